"""Inputs, expected results and the tolerance rule, for tests and ``verify``. NumPy only.

The rule: an element may differ from the float64 reference by at most twice what the reference itself loses
when it runs in the inputs' dtypes with float32 arithmetic. That loss is one unit in the last place of the
element, plus the most by which any element of that run misses by more (at least one float32 unit of the
largest element, inputs included: a sum that cancels keeps the error of its terms). Nothing is tuned per op.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from cute_ops.op import Array, Case, Op, Tensor

EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7, "float64": 2.0**-52, "float8_e4m3fn": 2.0**-3}
Arrays = Mapping[str, np.ndarray | None]


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def attributes(op: Op, case: Case) -> dict[str, Any]:
    return {**op.attrs, **{k: v for k, v in case.attrs.items() if k in op.attrs}}


def specs(op: Op, case: Case, dtype: str) -> dict[str, Array | None]:
    """Shapes and dtypes of a case's inputs. Dtype variables follow ``dtype`` unless the case fixes them."""
    found: dict[str, Array | None] = {}
    for name, tensor in op.inputs.items():
        if name in case.absent:
            found[name] = None
            continue
        shape = tensor.of(case.dims)
        if name in case.leading:
            shape = shape[len(shape) - len(tensor.dims) - case.leading[name] :]
        # Every dtype variable of integers takes its first choice where the case fixes none.
        free = op.dtype_choices(tensor)[0] if tensor.below else dtype
        variable = tensor.below or tensor.dtype in op.dtypes
        found[name] = Array(shape, case.dtypes.get(tensor.dtype, free) if variable else tensor.dtype)
    return found


def inputs(op: Op, case: Case, dtype: str, seed: int = 0) -> dict[str, np.ndarray | None]:
    """Random inputs of a case: normal numbers, weights around one."""
    made: dict[str, np.ndarray | None] = {}
    for name, spec in specs(op, case, dtype).items():
        if spec is None:
            made[name] = None
            continue
        tensor = op.inputs[name]
        rng = np.random.default_rng([seed, zlib.crc32(f"{op.name}.{name}".encode())])
        if tensor.below:
            made[name] = rng.integers(0, case.dims[tensor.below], spec.shape).astype(spec.dtype)
            continue
        normal = rng.standard_normal(spec.shape, dtype=np.float32)
        values = 1 + normal / 4 if name.endswith("weight") else _valid(tensor, normal)
        made[name] = values.astype(numpy_dtype(spec.dtype))
    return made


def sample(
    op: Op, lead: tuple[int, ...], n: int, rng: np.random.Generator, dtype: str = "float32", count: int | None = None
) -> list[np.ndarray]:
    """Random values for every input of :meth:`Op.example`, optional ones too; ``count`` of each, stacked."""
    made = []
    for tensor in op.inputs.values():
        shape = (*(() if count is None else (count,)), *tensor.of(op.example(lead, n)))
        if tensor.below:
            made.append(rng.integers(0, n, shape).astype(op.dtype_choices(tensor)[-1]))
        else:
            kind = numpy_dtype(op.dtype_near(tensor, dtype))
            made.append(_valid(tensor, rng.standard_normal(shape, dtype=np.float32)).astype(kind))
    return made


def _valid(tensor: Tensor, normal: np.ndarray) -> np.ndarray:
    return normal if tensor.at_most is None else tensor.at_most - np.abs(normal)


def argnums(op: Op) -> tuple[int, ...]:
    """Where the inputs are that have a gradient."""
    return tuple(i for i, name in enumerate(op.inputs) if name in op.differentiable)


def plain(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    """An adapter's function of an op, without what follows the op itself."""
    return partial(function, **op.finish.plain) if op.finish else function


def shown(op: Op, raw: Any) -> tuple[Any, ...]:
    """Those of an op's outputs that are not hidden."""
    named = dict(zip(op.outputs, raw if isinstance(raw, tuple | list) else (raw,), strict=True))
    return tuple(named[name] for name in op.shown)


def run_reference(op: Op, arrays: Arrays, attrs: Mapping[str, Any]) -> tuple[np.ndarray | None, ...]:
    """The reference on NumPy arrays, always as a tuple."""
    result = op.reference(np, *arrays.values(), **attrs)
    return result if isinstance(result, tuple) else (result,)


def expected(op: Op, arrays: Arrays, attrs: Mapping[str, Any]) -> tuple[np.ndarray | None, ...]:
    """The reference in float64 on the same values; outputs stay float64."""
    wide = {n: a if a is None or a.dtype.kind == "i" else a.astype(np.float64) for n, a in arrays.items()}
    exact = dict(zip(op.outputs, run_reference(op, wide, attrs), strict=True))
    lows = dict(zip(op.outputs, run_reference(op, arrays, attrs), strict=True))
    # In float64 all dtypes are equal, so an output that shares another's array is missing here.
    shared = {n: t.same_as for n, t in op.outputs.items() if t.same_as and exact[n] is None}
    return tuple(None if lows[n] is None else exact[shared.get(n, n)] for n in op.outputs)


def tolerances(op: Op, arrays: Arrays, attrs: Mapping[str, Any]) -> tuple[np.ndarray | None, ...]:
    """The largest absolute error allowed, per element of each output."""
    result: list[np.ndarray | None] = []
    numbers = [a for a in arrays.values() if a is not None and a.dtype.kind != "i"]
    largest = max(float(np.max(np.abs(a), initial=0.0, where=np.isfinite(a))) for a in numbers)
    for low, exact in zip(run_reference(op, arrays, attrs), expected(op, arrays, attrs), strict=True):
        if low is None or exact is None:
            result.append(None)
            continue
        finite, overflows = np.isfinite(exact), np.isinf(low.astype(np.float64))
        unit = EPS[str(low.dtype)] * np.abs(exact)
        with np.errstate(invalid="ignore"):
            error = np.abs(low.astype(np.float64) - exact) - unit
        beyond = np.max(error, initial=0.0, where=finite & ~overflows)
        floor = EPS["float32"] * np.max(np.abs(exact), initial=largest, where=finite)
        tolerance = 2 * (unit + max(float(beyond), float(floor)))
        # Only of an element that the reference's dtype has no room for nothing is asked.
        result.append(np.where(finite & overflows, np.inf, tolerance))
    return tuple(result)


def check(op: Op, arrays: Arrays, attrs: Mapping[str, Any], outputs: tuple[np.ndarray | None, ...]) -> None:
    """Raise AssertionError unless every output is within tolerance of the float64 reference."""
    compare(op, outputs, expected(op, arrays, attrs), tolerances(op, arrays, attrs))


def compare(
    op: Op,
    outputs: tuple[np.ndarray | None, ...],
    expecteds: tuple[np.ndarray | None, ...],
    allowed: tuple[np.ndarray | None, ...],
) -> None:
    """As :func:`check`, with what is expected and allowed known."""
    for name, got, exact, tolerance in zip(op.outputs, outputs, expecteds, allowed, strict=True):
        if exact is None or tolerance is None:
            if got is not None:
                raise AssertionError(f"{op.name}: output {name} should be absent")
            continue
        if got is None or got.shape != exact.shape:
            raise AssertionError(f"{op.name}: output {name} is {None if got is None else got.shape}, not {exact.shape}")
        wide = got.astype(np.float64)
        if not np.array_equal(np.isnan(wide), np.isnan(exact)):
            raise AssertionError(f"{op.name}: output {name} has NaN where the reference has none, or the reverse")
        infinite = np.isinf(exact)
        if not np.array_equal(wide[infinite], exact[infinite]):
            raise AssertionError(f"{op.name}: output {name} differs from the reference's infinities")
        # Where the reference is finite and the output is not, the difference fails the comparison too.
        with np.errstate(invalid="ignore"):
            excess = np.where(np.isfinite(exact), np.abs(wide - exact) - tolerance, 0.0)
        # Where the dtype has no room for the exact value, the reference overflows too and nothing is asked.
        excess = np.where(np.isinf(tolerance), 0.0, excess)
        if not np.all(excess <= 0):
            worst = np.unravel_index(np.argmax(np.where(np.isnan(excess), np.inf, excess)), exact.shape)
            raise AssertionError(
                f"{op.name}: output {name}: error {abs(wide[worst] - exact[worst]):.3g} exceeds {tolerance[worst]:.3g} "
                f"at {tuple(map(int, worst))}: got {wide[worst]:.8g}, expected {exact[worst]:.8g}"
            )


def small(case: Case, most: int = 65) -> Case:
    """The case at a size for a CPU: its last dims shrink in proportion, so that they still fit together."""
    largest = max((v for v in case.dims.values() if not isinstance(v, tuple)), default=1)
    shrink = lambda v: max(v * most // largest, 1) if largest > most else v  # noqa: E731
    dims = {k: tuple(min(s, 3) for s in v) if isinstance(v, tuple) else shrink(v) for k, v in case.dims.items()}
    return case._replace(dims=dims)


def elements(case: Case) -> int:
    """Rows times columns of a case."""
    return math.prod(math.prod(v) if isinstance(v, tuple) else v for v in case.dims.values())
