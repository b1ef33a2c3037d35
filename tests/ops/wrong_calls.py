"""Wrong calls of public functions, drawn at random, and what their errors must say."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# What no argument of any function is.
ODD: tuple[Any, ...] = (
    None, 0, 1, -1, 2**70, 10**400, 1.5, float("nan"), float("inf"), -0.0, 1j, True, "a", "auto", b"x", [], [1.0], (),
    {}, object(), int, print, lambda: 0, slice(None), ..., np.ones(8), np.float32(1),
)  # fmt: skip
NAMES = (
    "eps", "out", "foo", "epilogue", "fused", "activation", "dim", "axis", "bias", "transposed", "packed", "halves",
    "save", "reduction", "ignore_index", "inplace_backward",
)  # fmt: skip


# A good call of each function: shapes, the number of classes of an index, or a value.
ROWS, ROW, COLUMNS = (2, 8), (8,), (6, 8)
GOOD: dict[str, tuple[Any, ...]] = {
    "add_rmsnorm": (ROWS, ROWS, ROW), "add_rmsnorm_fp8": (ROWS, ROWS, ROW), "causal_conv1d": ((2, 8, 6), (6, 4)),
    "cross_entropy": (ROWS, {"classes": 8}), "embedding": ({"classes": 6}, COLUMNS), "gated_linear": (ROWS, (12, 8)),
    "gated_mlp": (ROWS, (12, 8), (8, 6)), "geglu": (ROWS,), "gelu": (ROWS,), "gelu_mul": (ROWS, ROWS),
    "layernorm": (ROWS, ROW, ROW), "linear": (ROWS, COLUMNS), "linear_add": (ROWS, COLUMNS, (2, 6)),
    "linear_add_rmsnorm": (ROWS, COLUMNS, (2, 6), (6,)), "linear_cross_entropy": (ROWS, COLUMNS, {"classes": 6}),
    "linear_gelu": (ROWS, COLUMNS, (6,)), "linear_silu": (ROWS, COLUMNS, (6,)), "log_softmax": (ROWS,), "mean": (ROWS,),
    "mlp": (ROWS, COLUMNS, (6,), (8, 6), (8,)),
    "qkv_rope": (ROWS, (192, 8), (2, 32), (2, 32), 2), "quantize_fp8": (ROWS,), "relu2": (ROWS,),
    "rmsnorm": (ROWS, ROW), "rmsnorm_fp8": (ROWS, ROW),
    "rmsnorm_linear": (ROWS, ROW, COLUMNS), "rope": ((2, 3, 4, 8), (2, 3, 4), (2, 3, 4)),
    "silu": (ROWS,), "silu_mul": (ROWS, ROWS), "silu_mul_fp8": (ROWS, ROWS), "softmax": (ROWS,), "sum": (ROWS,),
    "swiglu": (ROWS,),
}  # fmt: skip


class WrongCall(NamedTuple):
    """A call of a function, most likely a wrong one."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def complaints(
    module: Any, make: Callable[[np.ndarray], Any], arrays: Sequence[Any], count: int, rng: np.random.Generator
) -> list[str]:
    """What is wrong with the errors of so many calls of each function of an adapter, which makes arrays by ``make``;
    ``arrays`` are wrong for most arguments.
    """
    found = []
    for name, specs in GOOD.items():
        function, good = getattr(module, name), []
        for spec in specs:
            drawn = rng.standard_normal(spec).astype(np.float32) if isinstance(spec, tuple) else spec
            drawn = rng.integers(0, spec["classes"], 2) if isinstance(spec, dict) else drawn
            good.append(make(drawn) if isinstance(drawn, np.ndarray) else drawn)
        function(*good)
        for _ in range(count):
            call = draw(function, good, arrays, rng)
            # A table that lacks an index raises the framework's own error.
            if (said := complaint(name, call, function)) and name != "embedding":
                found.append(f"{name}{call.args} {call.kwargs}\n{said}")
    return found


def draw(
    function: Callable[..., Any], good: Sequence[Any], arrays: Sequence[Any], rng: np.random.Generator
) -> WrongCall:
    """A good call with one or two arguments changed, left out, added or given by another name."""
    args, kwargs = list(good), dict[str, Any]()
    every = (*ODD, *arrays, [arrays[0]], (arrays[0],))
    for _ in range(int(rng.integers(1, 3))):
        value, what = every[int(rng.integers(len(every)))], rng.random()
        if what < 0.55 and args:
            args[int(rng.integers(len(args)))] = value
        elif what < 0.65 and args:
            args.pop(int(rng.integers(len(args))))
        elif what < 0.8:
            args.insert(int(rng.integers(len(args) + 1)), value)
        else:
            names = (*inspect.signature(function).parameters, *NAMES)
            kwargs[names[int(rng.integers(len(names)))]] = value
    return WrongCall(tuple(args), kwargs)


def complaint(name: str, call: WrongCall, function: Callable[..., Any]) -> str:
    """What is wrong with the error of a call: it has another type, no name, or the elements of an array."""
    try:
        function(*call.args, **call.kwargs)
    except (ValueError, TypeError, NotImplementedError) as error:
        text = str(error)
        twice = rf"{name}\(\) got multiple values for argument"  # Python's own, before the function runs
        named = re.match(rf"cute(_ops(_torch|_jax)?)?[.:]|{twice}", text)
        values = re.search(r"(tensor|array)\(|-?\d\.\d{3,}e?", text, re.IGNORECASE)
        return "" if named and not values and len(text) < 1500 else f"{type(error).__name__}: {text}"
    except Exception as error:
        # As torch's own functions say it.
        return "" if "automatic differentiation" in str(error) else f"{type(error).__name__}: {error}"
    return ""
