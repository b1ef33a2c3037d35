"""Checks a file of ``kernel_fn``, ``reference_fn`` and ``get_inputs``, as collections of kernels have them.

The file declares no op: ``kernel_fn(*inputs)`` compiles and calls its kernel by itself, ``reference_fn(*inputs)`` says
what it must return, and ``get_inputs()`` returns a list of arrays of one framework and of other values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from cute_ops import testing
from cute_ops.tools.verify import Verdict, problem_of

NAMES = ("kernel_fn", "reference_fn", "get_inputs")


class Contract(NamedTuple):
    """The three functions of a file."""

    name: str
    kernel_fn: Callable[..., Any]
    reference_fn: Callable[..., Any]
    get_inputs: Callable[[], Sequence[Any]]


def of_module(module: ModuleType) -> Contract | None:
    """The contract of a module; None if it lacks one of the functions."""
    found = [getattr(module, name, None) for name in NAMES]
    return Contract(module.__name__, *found) if all(map(callable, found)) else None  # type: ignore[arg-type]


def verify(contract: Contract, repeats: int = 20) -> Iterator[Verdict]:
    """One verdict: the values against the reference in float64, the inputs unchanged, the same bits in every call."""
    device = dtype = ""
    try:
        inputs = _inputs(contract)
        first = next(a for a in inputs if _is_array(a))
        device, dtype = str(first.device), testing.dtype_name(first)
        _check(contract, inputs, repeats)
        problem = ""
    except Exception as error:  # every failure of a kernel is reported in its line
        problem = problem_of(error)
    yield Verdict(contract.name, "get_inputs()", dtype, "kernel_fn", device, repeats, problem)


def _inputs(contract: Contract) -> list[Any]:
    try:
        inputs = list(contract.get_inputs())
    except Exception as error:
        raise RuntimeError(f"get_inputs() failed, which needs a GPU if it makes tensors there: {error}") from error
    if not any(map(_is_array, inputs)):
        raise TypeError(f"get_inputs() returned no array, but {inputs!r}")
    return inputs


def _check(contract: Contract, inputs: list[Any], repeats: int) -> None:
    lows = _outputs(contract.reference_fn(*_copies(inputs)))
    given = {str(place): a for place, a in enumerate(inputs) if _is_array(a)}
    wide = [*map(testing.in_float64(given).get, map(str, range(len(inputs))), inputs)]
    exacts = _outputs(contract.reference_fn(*wide))
    if len(exacts) != len(lows):
        raise AssertionError(f"reference_fn returns {len(lows)} outputs, and {len(exacts)} of inputs in float64")
    xp = testing.namespace(given.values())
    exacts = tuple(xp.astype(a, xp.float64) for a in exacts)
    limits = testing.limits_of(given, lows, exacts)
    called = _copies(inputs)
    got = _outputs(contract.kernel_fn(*called))
    if len(got) != len(lows):
        raise AssertionError(f"kernel_fn returns {len(got)} outputs, reference_fn {len(lows)}")
    for place, (out, low, exact, limit) in enumerate(zip(got, lows, exacts, limits, strict=True)):
        if testing.dtype_name(out) != testing.dtype_name(low):
            came, wanted = testing.dtype_name(out), testing.dtype_name(low)
            raise AssertionError(f"kernel_fn: output {place} is {came}, that of reference_fn {wanted}")
        testing.compare_one(f"kernel_fn: output {place}", out, exact, limit)
    for place, (before, after) in enumerate(zip(inputs, called, strict=True)):
        if _is_array(before) and not _same(xp, before, after):
            raise AssertionError(f"kernel_fn: input {place} was written to")
    for _ in range(repeats - 1):
        again = _outputs(contract.kernel_fn(*_copies(inputs)))
        for place, pair in enumerate(zip(got, again, strict=True)):
            if not _same(xp, *pair):
                raise AssertionError(f"kernel_fn: output {place} differs from a repeated call: a race?")


def _outputs(returned: Any) -> tuple[Any, ...]:
    return tuple(returned) if isinstance(returned, tuple | list) else (returned,)


def _copies(inputs: Sequence[Any]) -> list[Any]:
    return [testing.namespace([a]).asarray(a, copy=True) if _is_array(a) else a for a in inputs]


def _same(xp: Any, a: Any, b: Any) -> bool:
    return bool(xp.all((a == b) | ((a != a) & (b != b))))


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "device")
