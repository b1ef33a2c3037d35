"""Random calls of functions with attributes and captured numbers, each against what plain Python computes in float64.

    python -m tests.fuzz.constants --framework torch --calls 2000

Between calls a number that a function reads is changed to one of another value, type or sign. The function itself, with
NumPy as its namespace, says what is right at that moment.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import random
import sys
import time
import types
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tests.contract.adapters import ADAPTERS, Adapter

VALUES = [0, 1, 2, True, False, 0.0, -0.0, 1.0, 2.0, -3.0, 0.5, math.inf, np.float32(2), "text", None]
# Attributes may be any number of NumPy. Of captured ones torch.compile guards the type alone.
ATTRIBUTES = [*VALUES, np.float32(3), np.float64(2), np.int64(2), np.int8(3), np.bool_(True), ml_dtypes.bfloat16(2)]
DTYPES = ["float32", "bfloat16", "float16"]
UNITS = {"float32": 2.0**-17, "bfloat16": 2.0**-6, "float16": 2.0**-8}
ROWS, COLUMNS, INNER = 3, 8, 6


def apply(x: Any, v: Any) -> Any:
    """Something else for each value."""
    if v is None:
        return x + 7
    if v is True:
        return x * 10
    if v is False:
        return x - 5
    if isinstance(v, str):
        return x * 20
    if isinstance(v, np.generic):
        return x * (30 + len(type(v).__name__)) + float(v)
    if isinstance(v, int):
        return x * 2 + (v * 3 + 1)
    return x - 11 if v == math.inf else x * v


NUMBER: Any = 1.0
TABLE: dict[str, Any] = {"k": 1.0}
LIST: list[Any] = [1.0, 1.0]
NESTED: dict[str, Any] = {"a": [(1.0,)]}
MODULE: Any = types.ModuleType("numbers_of_the_fuzz")
MODULE.inner = types.SimpleNamespace(k=1.0)


def helper(x: Any) -> Any:
    return apply(x, NUMBER)


def of_global(xp: Any, x: Any, bias: Any = None, *, k: Any = 1.0) -> Any:
    return apply(apply(x if bias is None else x + bias, NUMBER), k)


def of_table(xp: Any, x: Any, bias: Any = None, *, k: Any = 1.0) -> Any:
    return apply(apply(x if bias is None else x + bias, TABLE["k"]), k)


def of_list(xp: Any, x: Any, bias: Any = None, *, k: Any = 1.0) -> Any:
    for each in LIST:
        x = apply(x, each)
    return apply(x if bias is None else x + bias, k)


def of_nested(xp: Any, x: Any, bias: Any = None, *, k: Any = 1.0) -> Any:
    inner = NESTED["a"]
    return apply(apply(x if bias is None else x + bias, inner[0][0]), k)


def of_helper(xp: Any, x: Any, bias: Any = None, *, k: Any = 1.0) -> Any:
    return apply(helper(x if bias is None else x + bias), k)


def of_module(xp: Any, x: Any, bias: Any = None, *, k: Any = 1.0) -> Any:
    return apply(apply(x if bias is None else x + bias, MODULE.inner.k), k)


def of_environment(xp: Any, x: Any, bias: Any = None, *, k: Any = 1.0) -> Any:
    return apply(apply(x if bias is None else x + bias, float(os.environ["NUMBER_OF_THE_FUZZ"])), k)


def of_name(xp: Any, x: Any, bias: Any = None, *, k: Any = 1.0) -> Any:
    return apply(apply(x if bias is None else x + bias, getattr(MODULE.inner, "k")), k)  # noqa: B009


def of_default(xp: Any, x: Any, bias: Any = None, *, k: Any = 1.0, by: Any = 1.0) -> Any:
    return apply(apply(x if bias is None else x + bias, by), k)


def closure(v: Any) -> tuple[Callable[..., Any], Callable[[Any], None]]:
    def function(xp: Any, x: Any, bias: Any = None, *, k: Any = 1.0) -> Any:
        return apply(apply(x if bias is None else x + bias, v), k)

    def change(to: Any) -> None:
        nonlocal v
        v = to

    return function, change


class Layer:
    def __init__(self) -> None:
        self.value: Any = 1.0
        self.config = types.SimpleNamespace(value=1.0)

    @property
    def own(self) -> Any:
        return self.value

    def method(self, xp: Any, x: Any, bias: Any = None, *, k: Any = 1.0) -> Any:
        return apply(apply(x if bias is None else x + bias, self.value), k)

    def by_property(self, xp: Any, x: Any, bias: Any = None, *, k: Any = 1.0) -> Any:
        return apply(apply(x if bias is None else x + bias, self.own), k)

    def by_config(self, xp: Any, x: Any, bias: Any = None, *, k: Any = 1.0) -> Any:
        config = self.config
        return apply(apply(x if bias is None else x + bias, config.value), k)

    def by_method(self, xp: Any, x: Any, bias: Any = None, *, k: Any = 1.0) -> Any:
        return self.method(xp, x, bias, k=k)

    def __call__(self, xp: Any, x: Any, bias: Any = None, *, k: Any = 1.0) -> Any:
        return apply(apply(x if bias is None else x + bias, self.value), k)


class Source:
    """A function, and how the number that it reads is changed."""

    def __init__(self, name: str, function: Callable[[], Any], change: Callable[[Any], None]) -> None:
        self.name, self.function, self.change = name, function, change
        self.fused: Any = None


def sources() -> list[Source]:
    here = globals()
    inner, change = closure(1.0)
    layers = [Layer(), Layer()]
    held: list[Any] = [1.0]
    numbers = [v for v in VALUES if type(v) is float]

    def environment(v: Any) -> None:
        other = numbers[zlib.crc32(str(v).encode()) % len(numbers)]
        os.environ["NUMBER_OF_THE_FUZZ"] = repr(v if type(v) is float else other)

    def put(owner: Any, name: Any) -> Callable[[Any], None]:
        if isinstance(owner, dict | list):
            return lambda v: owner.__setitem__(name, v)
        return lambda v: setattr(owner, name, v)

    environment(1.0)
    found = [
        Source("global", lambda: of_global, put(here, "NUMBER")), Source("table", lambda: of_table, put(TABLE, "k")),
        Source("list", lambda: of_list, put(LIST, 0)), Source("helper", lambda: of_helper, put(here, "NUMBER")),
        Source("nested", lambda: of_nested, lambda v: NESTED["a"].__setitem__(0, (v,))),
        Source("module", lambda: of_module, put(MODULE.inner, "k")),
        Source("name", lambda: of_name, put(MODULE.inner, "k")),
        Source("environment", lambda: of_environment, environment), Source("closure", lambda: inner, change),
        Source("fresh closure", lambda: closure(held[0])[0], put(held, 0)),
        Source("partial", lambda: functools.partial(of_default, by=held[0]), put(held, 0)),
        Source("default", lambda: of_default, lambda v: of_default.__kwdefaults__.__setitem__("by", v)),
    ]  # fmt: skip
    for i, layer in enumerate(layers):
        for name in ("method", "by_property", "by_method", "__call__"):
            bound = (
                (lambda each: lambda: each)(layer) if name == "__call__" else functools.partial(getattr, layer, name)
            )
            found.append(Source(f"{name} {i}", bound, put(layer, "value")))
        found.append(
            Source(f"by_config {i}", functools.partial(getattr, layer, "by_config"), put(layer.config, "value"))
        )
    return found


def attributes_of(function: Any) -> Any:
    """The attributes that a function has, if a call gives no others."""
    if isinstance(function, functools.partial):
        return function.keywords.values()
    return (getattr(function, "__kwdefaults__", None) or {}).values()


# Readers of what torch.compile does not know keep the value of then, as docs/fused.md says.
UNKNOWN = ("environment", "name")


def fuzz(made: Adapter, calls: int, seed: int, compiled: float = 0.05) -> Counter[str]:
    """Raise AssertionError for the first wrong call; returns how many there were of each kind."""
    draw, framework = random.Random(seed), made.name
    rng = np.random.default_rng(seed)
    every, counts, told = sources(), Counter[str](), []
    compiled_runs: dict[str, Callable[..., Any]] = {}
    for call in range(calls):
        source = draw.choice(every)
        if draw.random() < 0.6:
            value = draw.choice(VALUES)
            told.append(f"{source.name} := {value!r}")
            source.change(value)
        function, k = source.function(), draw.choice(ATTRIBUTES)
        attrs = {"k": k} if draw.random() < 0.7 else {}
        kind, dtype = draw.choice(["fused", "fused", "fused bias", "linear", "rmsnorm_linear"]), draw.choice(DTYPES)
        low = np.dtype(getattr(ml_dtypes, dtype, dtype))
        x, w, bias = (rng.uniform(0.5, 2, s).astype(low) for s in ((ROWS, INNER), (COLUMNS, INNER), (INNER,)))
        given = [made.array(a) for a in (x, w, bias)]
        wide = [a.astype(np.float64) for a in (x, w, bias)]
        told.append(f"{call}: {kind} of {source.name}, {attrs}, {dtype}")
        if kind.startswith("fused"):
            fresh = source.name in ("fresh closure", "partial", "default")
            if fresh or source.fused is None:
                source.fused = made.ours.fused(function, name="fuzzed")
            run, count = source.fused, 2 if kind == "fused bias" else 1
            arrays, plain = [given[0], given[2]][:count], function(np, *[wide[0], wide[2]][:count], **attrs)
        elif kind == "linear":
            run, arrays = functools.partial(made.ours.linear, epilogue=function), given[:2]
            plain = function(np, wide[0] @ wide[1].T, **attrs)
        else:
            run, arrays = functools.partial(made.ours.rmsnorm_linear, epilogue=function), [given[0], None, given[1]]
            rows = wide[0] / np.sqrt(np.mean(wide[0] ** 2, axis=-1, keepdims=True) + 1e-6)
            plain = function(np, rows @ wide[1].T, **attrs)
        whole = kind.startswith("fused") and draw.random() < compiled
        given_by_numpy = any(isinstance(v, np.generic) for v in (k, *attributes_of(function)))
        whole = whole and (framework == "jax" or not (source.name in UNKNOWN or given_by_numpy))
        if whole:
            # A jitted function is traced anew: JAX keeps what it has traced, of any function.
            key = f"{source.name} {kind}" if framework == "torch" and not fresh else ""
            ours = run
            if not key or key not in compiled_runs:
                compiled_runs[key] = made.compiled(lambda *a, _ours=ours, **n: _ours(*a, **n))
            out = compiled_runs[key](*arrays, **attrs) if framework == "torch" else made.compiled(
                lambda *a, _ours=ours, _attrs=attrs: _ours(*a, **_attrs))(*arrays)  # fmt: skip
        else:
            out = run(*arrays, **attrs)
        found, expected = made.numpy(out).astype(np.float64), np.broadcast_to(plain, out.shape)
        scale = float(np.max(np.abs(expected))) + 1
        bad = np.abs(found - expected) > UNITS[dtype] * 8 * scale
        # A zero has the sign that it was given; torch.compile's own guards do not see that.
        signs = (expected == 0) & (np.signbit(found) != np.signbit(expected)) & (not whole)
        assert not (bad | signs).any(), "\n".join([f"seed {seed}", *told[-12:], f"got {found}", f"expected {expected}"])
        counts[f"{kind}{' compiled' * whole}"] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    options = parser.parse_args()
    print("seed", options.seed, flush=True)
    start = time.monotonic()
    if options.framework == "torch":
        import torch

        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10**6
    counts = fuzz(ADAPTERS[options.framework](), options.calls, options.seed)
    seconds = time.monotonic() - start
    print(f"{options.framework}: {sum(counts.values())} calls, none wrong, {seconds:.0f} s: {dict(counts)}")


if __name__ == "__main__":
    sys.exit(main())
