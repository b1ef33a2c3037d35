"""Inputs, expected results and the tolerance rule, for tests and ``verify``.

Inputs are NumPy arrays. All other functions take NumPy arrays or those of a framework, on any device.

The rule: an element may differ from the float64 reference by at most twice what the reference itself loses when it
runs in the inputs' dtypes with float32 arithmetic. That loss is one unit in the last place of the element, plus the
largest further error of any element of that run. The latter counts as at least one float32 unit of the largest element,
inputs included, since a sum that cancels keeps the error of its terms. For an output that is declared to add ``k``
terms one after another it is at least ``sqrt(k)`` units of the dtype of the sum, since each step loses about one unit
of the sum so far, in either direction. Nothing else is tuned per op.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from cute_ops.declaration.binding import as_outputs, bind
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import ACCUMULATORS, Array
from cute_ops.declaration.tensor import Accumulation, Tensor

# The distance from 1 to the next number of a dtype. Integers, which are not in here, must be equal.
EPS = {
    "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7, "float64": 2.0**-52, "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2, "float8_e8m0fnu": 1.0,
}  # fmt: skip
FEW = 4  # dims of so few elements, such as taps, are not made smaller
Arrays = Mapping[str, np.ndarray | None]


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def attributes(op: Op, case: Case) -> dict[str, Any]:
    return {**op.keywords, **{k: v for k, v in case.attrs.items() if k in op.keywords}}


def specs(op: Op, case: Case, dtype: str) -> dict[str, Array | None]:
    """Shapes and dtypes of a case's inputs. Dtype variables follow ``dtype`` unless the case fixes them."""
    if op.numbers:
        raise TypeError(f"{op.name} has lists of tensors: take one of its `instances`, and that one's cases")
    found: dict[str, Array | None] = {}
    for name, tensor in op.inputs.items():
        if name in case.absent:
            found[name] = None
            continue
        shape = tensor.of(case.dims)
        if name in case.leading:
            shape = shape[len(shape) - len(tensor.dims) - case.leading[name] :]
        # A dtype variable of integers that the case does not fix has its first choice.
        free = op.dtype_choices(tensor)[0] if tensor.upper_bound else dtype
        variable = tensor.upper_bound or tensor.dtype in op.dtypes
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
        if tensor.upper_bound:
            made[name] = rng.integers(0, tensor.bound(case.dims), spec.shape).astype(spec.dtype)
            continue
        normal = rng.standard_normal(spec.shape, dtype=np.float32)
        values = 1 + normal / 4 if name.endswith("weight") else _valid(tensor, normal)
        made[name] = as_dtype(values, spec.dtype)
    op.arrange(np, made)
    return made


def sample(
    op: Op, lead: tuple[int, ...], n: int, rng: np.random.Generator, dtype: str = "float32", count: int | None = None
) -> list[np.ndarray]:
    """Random values for every input of :meth:`Op.example`, optional ones too; ``count`` of each, stacked, if given."""
    made = []
    for tensor in op.inputs.values():
        shape = (*(() if count is None else (count,)), *tensor.of(op.example(lead, n)))
        if tensor.upper_bound:
            made.append(rng.integers(0, n, shape).astype(op.dtype_choices(tensor)[-1]))
        else:
            values = _valid(tensor, rng.standard_normal(shape, dtype=np.float32))
            made.append(as_dtype(values, op.dtype_near(tensor, dtype)))
    return made


def left_out(op: Op, rng: np.random.Generator, share: float) -> tuple[str, ...]:
    """A random choice of optional inputs, each with this probability; inputs that are given together stay together."""
    alone = [name for name, t in op.inputs.items() if t.optional and not t.given and rng.random() < share]
    return tuple(name for name, t in op.inputs.items() if name in alone or t.given in alone)


def as_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers around zero in a dtype: powers of two in ``float8_e8m0fnu``, large numbers in ``uint32``, in ``bool``
    whether they are positive.
    """
    if dtype == "bool":
        return values > 0
    if dtype == "float8_e8m0fnu":
        values = np.exp2(np.rint(values))
    elif dtype == "uint32":
        values = np.abs(values) * 2.0**28
    return values.astype(numpy_dtype(dtype))


def _valid(tensor: Tensor, normal: np.ndarray) -> np.ndarray:
    return normal if tensor.at_most is None else tensor.at_most - np.abs(normal)


def argnums(op: Op) -> tuple[int, ...]:
    """The positions of the inputs that have a gradient."""
    return tuple(i for i, name in enumerate(op.inputs) if name in op.differentiable)


def plain(op: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    """An adapter's function of an op, without what ``finish`` adds to the op."""
    return partial(function, **op.finish.plain) if op.finish else function


def shown(op: Op, raw: Any) -> tuple[Any, ...]:
    """An op's outputs without the hidden ones."""
    named = dict(zip(op.outputs, raw if isinstance(raw, tuple | list) else (raw,), strict=True))
    return tuple(named[name] for name in op.shown)


def differentiated(op: Op, inputs: Mapping[str, Any], raw: Any, attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The outputs of :func:`shown` that a backward op differentiates, and integers. A loss of a slice of the classes is
    relative to the slice's maximum for targets in other slices, or lacks the other slices' shares; its backward op is
    that of the loss itself.
    """
    outputs = shown(op, raw)
    if not attrs.get("classes"):
        return outputs
    n, smoothing = inputs["logits"].shape[-1], attrs["label_smoothing"]
    here = namespace([raw[0]]).astype(inputs["target"] < n, raw[0].dtype)
    share = (1 - smoothing) * here + smoothing * n / attrs["classes"]
    return (raw[0] + (1 - share) * raw[1], *outputs[1:])


def run_reference(op: Op, arrays: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The reference on arrays of one framework, always as a tuple."""
    return as_outputs(op, op.reference(namespace(arrays.values()), *arrays.values(), **attrs))


def namespace(arrays: Iterable[Any]) -> Any:
    """The array-API namespace of some arrays, NumPy itself for NumPy's."""
    first = next(a for a in arrays if a is not None)
    if isinstance(first, np.ndarray):
        return np
    from array_api_compat import array_namespace  # only where a framework's arrays are

    return array_namespace(first)


def dtype_name(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")


def expected(op: Op, arrays: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The reference in float64 on the same values; outputs are float64."""
    return _expected(op, arrays, attrs, run_reference(op, arrays, attrs))


def _expected(op: Op, arrays: Mapping[str, Any], attrs: Mapping[str, Any], lows: tuple[Any, ...]) -> tuple[Any, ...]:
    exact = dict(zip(op.results, run_reference(op, in_float64(arrays), attrs), strict=True))
    present = dict(zip(op.results, lows, strict=True))
    # In float64 all dtypes are equal, so an output that shares another's array is missing here.
    shared = {n: t.same_as for n, t in op.outputs.items() if t.same_as and exact[n] is None}
    found = {n: None if present[n] is None else exact[shared.get(n, n)] for n in op.results}
    xp = namespace(arrays.values())
    return tuple(None if a is None else xp.astype(a, xp.float64) for a in found.values())


def in_float64(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Values in float64; integers stay."""
    xp = namespace(arrays.values())
    return {n: a if a is None or _is_integer(a) else xp.astype(a, xp.float64) for n, a in arrays.items()}


def _is_integer(array: Any) -> bool:
    return "int" in dtype_name(array)


def tolerances(op: Op, arrays: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The largest absolute error allowed, per element of each output."""
    return limits(op, arrays, attrs)[1]


def limits(
    op: Op, arrays: Mapping[str, Any], attrs: Mapping[str, Any], others: Iterable[Mapping[str, Any]] = ()
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The results of :func:`expected` and :func:`tolerances`.

    Args:
        others: more inputs of the same shapes and distribution on which the reference's loss is measured, too, since a
            dozen numbers say little about its largest loss.
    """
    lows = run_reference(op, arrays, attrs)
    exacts = _expected(op, arrays, attrs, lows)
    xp = namespace(arrays.values())
    units = _units(op, arrays, attrs)
    losses = _losses(xp, arrays, lows, exacts, units)
    for given in others:
        found = run_reference(op, given, attrs)
        more = _losses(xp, given, found, _expected(op, given, attrs, found), units)
        losses = [max(pair) for pair in zip(losses, more, strict=True)]
    allowed = [
        None if low is None or exact is None else _allowed(xp, low, exact, loss)
        for low, exact, loss in zip(lows, exacts, losses, strict=True)
    ]
    return exacts, tuple(allowed)


def limits_of(
    arrays: Mapping[str, Any],
    lows: tuple[Any, ...],
    exacts: tuple[Any, ...],
    others: Iterable[tuple[Any, Any, Any]] = (),
) -> tuple[Any, ...]:
    """The tolerances of a function that is no op: ``lows`` are its reference's outputs for the arrays, ``exacts`` those
    for the same values in float64. ``others`` are such triples of more inputs of the same distribution.
    """
    xp, units = namespace(arrays.values()), [EPS["float32"]] * len(lows)
    each = [_losses(xp, a, low, exact, units) for a, low, exact in ((arrays, lows, exacts), *others)]
    losses = [max(of_output) for of_output in zip(*each, strict=True)]
    return tuple(_allowed(xp, low, exact, loss) for low, exact, loss in zip(lows, exacts, losses, strict=True))


def _units(op: Op, arrays: Mapping[str, Any], attrs: Mapping[str, Any]) -> list[float]:
    """The least loss that each output is allowed, relative to its largest element."""
    if not any(t.accumulates for t in op.results.values()):
        return [EPS["float32"]] * len(op.results)
    given = {n: None if a is None else Array(tuple(a.shape), dtype_name(a)) for n, a in arrays.items()}
    dims = bind(op, given, attrs).dims

    def terms(over: Iterable[str]) -> int:
        return math.prod(math.prod(size) if isinstance(size := dims[name], tuple) else size for name in over)

    sums = [t.accumulates or Accumulation(()) for t in op.results.values()]
    return [ACCUMULATORS[a.dtype] * math.sqrt(max(terms(a.over), 1)) for a in sums]


def _losses(
    xp: Any, arrays: Mapping[str, Any], lows: tuple[Any, ...], exacts: tuple[Any, ...], units: Iterable[float]
) -> list[float]:
    """The largest error of each output beyond one unit in an element's last place, at least its unit of the largest
    element.
    """
    wide = [xp.astype(a, xp.float64) for a in arrays.values() if a is not None and not _is_integer(a)]
    largest, losses = max((_largest(xp, xp.abs(a), xp.isfinite(a)) for a in wide), default=0.0), []
    for low, exact, unit in zip(lows, exacts, units, strict=True):
        if low is None or exact is None or dtype_name(low) not in EPS:
            losses.append(0.0)
            continue
        got, finite = xp.astype(low, xp.float64), xp.isfinite(exact)
        with np.errstate(invalid="ignore"):
            error = xp.abs(got - exact) - EPS[dtype_name(low)] * xp.abs(exact)
        floor = unit * max(_largest(xp, xp.abs(exact), finite), largest)
        losses.append(max(_largest(xp, error, finite & ~xp.isinf(got)), floor))
    return losses


def _allowed(xp: Any, low: Any, exact: Any, loss: float) -> Any:
    tolerance = 2 * (EPS.get(dtype_name(low), 0.0) * xp.abs(exact) + loss)
    # Nothing is asked of an element that is too large for the reference's dtype.
    overflows = xp.isfinite(exact) & xp.isinf(xp.astype(low, xp.float64))
    return xp.where(overflows, xp.full_like(tolerance, math.inf), tolerance)


def _largest(xp: Any, values: Any, where: Any) -> float:
    """The largest of the chosen values, at least zero."""
    return float(xp.max(xp.where(where, values, xp.zeros_like(values)))) if math.prod(values.shape) else 0.0


def draws(arrays: Arrays) -> int:
    """How many more inputs like these show a reference's largest loss well enough: 32768 numbers in all, and at least
    a dozen inputs, because all elements of a row or a column may share one sum's loss.
    """
    count = max(a.size for a in arrays.values() if a is not None) or 1
    return min(256, max(2**15 // count, 12), 2**28 // count)


def check(
    op: Op,
    arrays: Mapping[str, Any],
    attrs: Mapping[str, Any],
    outputs: tuple[Any, ...],
    others: Callable[[], Iterable[Mapping[str, Any]]] | None = None,
) -> None:
    """Raise AssertionError unless every output is within tolerance of the float64 reference.

    Args:
        others: makes ``others`` of :func:`limits`; called only if the outputs fail without them.
    """
    try:
        compare(op, outputs, *limits(op, arrays, attrs))
    except AssertionError:
        if others is None:
            raise
        compare(op, outputs, *limits(op, arrays, attrs, others()))


def compare(op: Op, outputs: tuple[Any, ...], expecteds: tuple[Any, ...], allowed: tuple[Any, ...]) -> None:
    """Check outputs against known expected values and tolerances."""
    for name, got, exact, tolerance in zip(op.results, outputs, expecteds, allowed, strict=True):
        if exact is None or tolerance is None:
            if got is not None:
                raise AssertionError(f"{op.name}: output {name} should be absent")
            continue
        compare_one(f"{op.name}: output {name}", got, exact, tolerance)


def compare_one(what: str, got: Any, exact: Any, tolerance: Any) -> None:
    """Raise AssertionError unless an output is within tolerance; ``what`` names it."""
    if got is None or tuple(got.shape) != tuple(exact.shape):
        came = None if got is None else tuple(got.shape)
        raise AssertionError(f"{what} is {came}, not {tuple(exact.shape)}")
    xp = namespace([exact])
    wide = xp.astype(got, xp.float64)
    if not bool(xp.all(xp.isnan(wide) == xp.isnan(exact))):
        raise AssertionError(f"{what} has NaN where the reference has none, or the reverse")
    if bool(xp.any(xp.isinf(exact) & (wide != exact))):
        raise AssertionError(f"{what} differs from the reference's infinities")
    # An infinite output where the reference is finite fails the comparison by its difference. Where the exact value
    # is too large for the dtype, the reference overflows too and nothing is asked.
    with np.errstate(invalid="ignore"):
        excess = xp.abs(wide - exact) - tolerance
    excess = xp.where(xp.isfinite(exact) & ~xp.isinf(tolerance), excess, xp.zeros_like(excess))
    if not bool(xp.all(excess <= 0)):
        index = int(xp.argmax(xp.where(xp.isnan(excess), xp.full_like(excess, math.inf), excess)))
        worst = tuple(map(int, np.unravel_index(index, tuple(exact.shape))))
        raise AssertionError(
            f"{what}: error {float(abs(wide[worst] - exact[worst])):.3g} exceeds "
            f"{float(tolerance[worst]):.3g} at {worst}: got {float(wide[worst]):.8g}, "
            f"expected {float(exact[worst]):.8g}"
        )


def small(case: Case, most: int = 65, op: Op | None = None) -> Case:
    """The case at a size for a CPU: its last dims shrink in proportion, so that they still fit together, to multiples
    of the divisors that ``op`` declares. Dims of a few elements, such as taps, stay.
    """
    largest = max((v for v in case.dims.values() if not isinstance(v, tuple)), default=1)
    tensors = [*op.inputs.values(), *op.outputs.values()] if op else []
    units = {n: d.divisor for t in tensors for d in t.dims if not d.ceil and d.divisor > 1 for n in d.names}

    def shrink(name: str, size: int) -> int:
        unit = units.get(name, 1)
        least = min(size, FEW) // unit
        return max(size * most // largest // unit, least, 1) * unit if largest > most else size

    dims = {k: tuple(min(s, 3) for s in v) if isinstance(v, tuple) else shrink(k, v) for k, v in case.dims.items()}
    return case._replace(dims=dims)


def elements(case: Case) -> int:
    """Rows times columns of a case."""
    return math.prod(math.prod(v) if isinstance(v, tuple) else v for v in case.dims.values())
