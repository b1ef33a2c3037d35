"""The calls that ``python -m cute_ops verify --sweep`` tries: every op at many row lengths, dtypes and layouts.

Named cases alone are too few: a dozen of them once passed while norms were wrong at twenty other row lengths. A sweep
takes each op and each gradient at every length from 1 to 300, on both sides of every length at which its heuristic
chooses another form, and at random lengths up to 262144; each with few and with many rows.

A whole sweep has twelve rounds. A round takes each length with one pair of dtype and layout, the next one with another.
Dtypes of parameters, optional inputs and attributes are drawn at random from a seed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from cute_ops.declaration.binding import bind
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS, ITEMSIZE, Array
from cute_ops.declaration.tensor import Tensor
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.jit.layout import Memory, compact
from cute_ops.jit.plan import signature
from cute_ops.jit.target import Target
from cute_ops.testing import left_out, specs

# Every length up to SHORTEST is tried, and in each round RANDOM longer ones.
SHORTEST, LONGEST, RANDOM = 300, 262144, 12
ROWS = (1, 2, 5, 201, 4099)
# Larger tensors are left out, because their float64 references take too long.
MOST_ELEMENTS = 1 << 24
# Layouts. aligned: compact, 16-byte aligned. shifted: compact, starting one element later. strided: slices of wider
# rows, 16-byte aligned. slices: slices of wider rows that start at the second element.
BASES = ("aligned", "shifted", "strided", "slices")
PAIRS = tuple((dtype, base) for dtype in FLOATS for base in BASES)
DRAWS = 100  # random cases that are tried before giving up that an op accepts one
# Lengths this far apart are aligned alike: a form that comes with alignment has no threshold. They are looked for among
# lengths that leave these remainders.
STEP, REMAINDERS = 64, (0, 4, 2, 1)
# Fields of a config that grow with the length: a change in these alone does not make another form.
GRADUAL = ("threads", "threads_per_row", "clusters", "segments_per_cta", "resident", "replicas", "segments")


class SweepCall(NamedTuple):
    """One call to make and to compare with float64; ``fixed``: dims that are static while few are constants."""

    op: Op
    case: Case
    dtype: str
    base: str
    fixed: bool = True

    def __str__(self) -> str:
        return f"{self.op.name} {self.case.name} {self.dtype} {self.base}{'' if self.fixed else ' any length'}"


class BufferView(NamedTuple):
    """The place of an input in a buffer of its own, in elements. The buffer ends with the input's last element.

    Args:
        size: elements of the buffer.
        start: index of the input's first element.
        strides: strides of the input.
    """

    size: int
    start: int
    strides: tuple[int, ...]


def place(tensor: Tensor, array: Array, base: str) -> BufferView:
    """The place of an input in a layout of :data:`BASES`."""
    shape, off = array.shape, int(base in ("shifted", "slices"))
    strides = compact(shape)
    if base in ("strided", "slices") and tensor.rows:
        if tensor.dims:
            pitch = shape[-1] + off
            pitch += -pitch % VECTOR_BYTES + VECTOR_BYTES
            strides = compact((*shape[:-1], pitch))
        else:  # one number per row: every third number of the buffer
            strides = compact((*shape, 3))[:-1]
    end = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return BufferView(off + end if all(shape) else 0, off, strides)


def memory(op: Op, arrays: Mapping[str, Array | None], base: str) -> dict[str, Memory]:
    """Strides and address of every input in a layout, as planning takes them."""
    found = {}
    for name, array in arrays.items():
        if array is not None:
            where = place(op.inputs[name], array, base)
            found[name] = Memory(where.strides, where.start * ITEMSIZE[array.dtype])
    return found


def comparable(op: Op) -> bool:
    """Whether an op has a reference besides its program, that a sweep can compare with."""
    return op.program is None or op.reference is not op.program.run


def swept(op: Op) -> str:
    """The dim whose size is swept: the row length, or the size of a head."""
    names = [name for tensor in op.inputs.values() for dim in tensor.dims for name in dim.names]
    return "n" if "n" in names else "d"


def trials(
    op: Op, target: Target, number: int, seed: int = 0, fraction: float = 1.0, *, share: int = 0, shares: int = 1
) -> Iterator[SweepCall]:
    """A round of an op's sweep; nothing of an op that is not :func:`comparable`.

    Args:
        target: what kernels are compiled for.
        number: the round's number; twelve consecutive rounds cover every pair of dtype and layout at every length.
        seed: seed of everything that is drawn at random.
        fraction: of the lengths that are tried, drawn at random: a sample.
        share, shares: which of how many shares of the lengths. At a threshold that several find, each takes another
            pair.
    """
    if not comparable(op):
        return
    salt = zlib.crc32(op.name.encode())
    rng = np.random.default_rng([seed, salt, number, share])
    drawn_lengths = np.random.default_rng([seed, salt, number])
    for n, chance in lengths(op, target, drawn_lengths, share, shares, fraction).items():
        if rng.random() >= chance:
            continue
        pair = (number + 5 * n + salt + share) % len(PAIRS)
        dtype, base = PAIRS[pair]
        drawn = _draw(op, n, dtype, np.random.default_rng([seed, salt, number, n]))
        # One more trial, with another number of rows, for the kernel that serves any length.
        counts = [(rows, True) for rows in ROWS] + [(ROWS[n % len(ROWS)] + 2, False)] * bool(op.few)
        if drawn is None:
            continue
        for rows, fixed in counts:
            case = _with_rows(op, drawn, rows)
            if _elements(op, case, dtype) <= MOST_ELEMENTS:
                yield SweepCall(op, case, dtype, base, fixed)


def lengths(
    op: Op, target: Target, rng: np.random.Generator, share: int = 0, shares: int = 1, fraction: float = 1.0
) -> dict[int, float]:
    """A share of the lengths of a round, ascending, with the chance of each to be in a sample: all short ones, both
    sides of every threshold, and random ones.
    """
    found = dict.fromkeys(range(1, SHORTEST + 1)[share::shares], fraction)
    if swept(op) != "n":
        return found
    at_random = np.exp(rng.uniform(np.log(SHORTEST), np.log(LONGEST), RANDOM)).astype(int).tolist()
    found |= dict.fromkeys(at_random[share::shares], fraction)
    # A sample looks for thresholds in few pairs of dtype and layout, and takes more of what it finds there.
    chance = max(fraction, 1 / len(PAIRS))
    drawn = rng.random(len(PAIRS)) < fraction / chance
    pairs = [pair for pair, taken in zip(PAIRS, drawn, strict=True) if taken][share::shares]
    # A product's kernel serves any length, and a program has no kernel of its own.
    edges = thresholds(op, target, pairs) if op.kernel and not op.fallback else []
    near = sorted({n for edge in edges for n in (edge - 1, edge, edge + 1) if n <= LONGEST})
    return dict(sorted((dict.fromkeys(near, chance) | found).items()))


def thresholds(op: Op, target: Target, pairs: Sequence[tuple[str, str]] = PAIRS) -> list[int]:
    """The lengths from which a heuristic chooses another form, with few or many rows, in pairs of dtype and layout."""
    found: set[int] = set()
    for dtype, base in pairs:
        for rows in (ROWS[0], ROWS[2], ROWS[-1]):
            form = _form_of(op, target, dtype, base, rows)
            # Between two neighbours on this grid with the same form no threshold is looked for.
            every = {int(SHORTEST * (LONGEST / SHORTEST) ** (i / 128)) // STEP for i in range(129)}
            for remainder in REMAINDERS:
                grid = [n for i in sorted(every) if (n := STEP * i + remainder) <= LONGEST]
                taken = [n for n in grid if form(n) is not None]
                for low, high in pairwise(taken):
                    found |= set(_edges(form, low, high))
                if taken and taken[-1] != grid[-1]:  # there may be a longest one
                    found.add(_change(form, taken[-1], grid[grid.index(taken[-1]) + 1]))
    return sorted(found)


def _form_of(op: Op, target: Target, dtype: str, base: str, rows: int) -> Callable[[int], Any]:
    """The config that a heuristic chooses, by row length, without the fields that grow with it; None of a length that
    the op refuses.
    """

    @cache
    def form(n: int) -> Any:
        try:
            arrays = specs(op, Case("", op.example((rows,), n)), dtype)
            config = op.config(signature(bind(op, arrays), memory(op, arrays, base), target).problem)
        except ValueError:
            return None
        return tuple(sorted((k, v) for k, v in config.items() if k not in GRADUAL))

    return form


def _edges(form: Callable[[int], Any], low: int, high: int) -> Iterator[int]:
    """The lengths in ``(low, high]`` whose form differs from that of the length before, by bisection among those that
    are aligned as ``low`` and ``high`` are and that the op takes.
    """
    if form(low) == form(high):
        return
    between = sorted(range(low + STEP, high, STEP), key=lambda n: abs(2 * n - low - high))
    middle = next((n for n in between[:8] if form(n) is not None), None)
    if middle is None:
        change = _change(form, low, high)
        yield change
        if form(change) != form(high):  # lengths that are aligned otherwise have another form
            yield high
    else:
        yield from _edges(form, low, middle)
        yield from _edges(form, middle, high)


def _change(form: Callable[[int], Any], low: int, high: int) -> int:
    """A length in ``(low, high]`` whose form differs from that of the length before."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if form(middle) == form(low) else (low, middle)
    return high


def _draw(op: Op, n: int, dtype: str, rng: np.random.Generator) -> Case | None:
    """A case of one row with other sizes, dtypes, attributes and optional inputs drawn at random.

    None if the op refuses every draw, or has no kernel for the dtype.
    """
    for _ in range(DRAWS):
        case = _case(op, n, rng)
        try:
            binding = bind(op, specs(op, case, dtype), case.attrs)
        except (TypeError, ValueError):  # the op refuses this combination of dtypes or sizes
            continue
        if binding.dtype_without_kernel is None:
            return case
    return None


def _case(op: Op, n: int, rng: np.random.Generator) -> Case:
    dims = {**op.example((1,), n), swept(op): n}
    for name, (low, high) in {"h": (1, 4), "hk": (1, 3), "r": (1, max(n // 2, 1) + 1)}.items():
        if name in dims:
            dims[name] = int(rng.integers(low, high))
    if "hq" in dims:
        dims["hq"] = dims["hk"] * int(rng.integers(1, 4))
    options = _options(op)
    attrs = {name: values[rng.integers(len(values))] for name, values in options.items()}
    # The first dtype variable has the trial's dtype.
    first = next(t.dtype for t in op.inputs.values() if t.dtype in op.dtypes)
    dtypes = {v: c[rng.integers(len(c))] for v, c in op.dtypes.items() if v != first}
    absent = left_out(op, rng, 0.25)
    drawn = [f"{v}={d}" for v, d in dtypes.items()] + [f"no {name}" for name in absent]
    drawn += [f"{name}={value}" for name, value in attrs.items() if value != op.attrs[name]]
    sizes = [f"{name}={size}" for name, size in dims.items() if not isinstance(size, tuple) and name not in op.derived]
    return Case(" ".join([*sizes, *drawn]), dims, dtypes, absent, attrs)


def _options(op: Op) -> dict[str, list[Any]]:
    """The values of attributes that are drawn from: defaults, those of the cases, and declared choices."""
    options = {name: [default] for name, default in op.attrs.items()}
    for case in op.cases:
        for name, value in case.attrs.items():
            if name in options:
                options[name].append(value)
    options |= {name: list(values) for name, values in op.choices.items()}
    if op.fallback:  # it is our kernels that are tried, not the framework's
        options["fused"] = ["always"]
    return options


def _with_rows(op: Op, case: Case, rows: int) -> Case:
    lead = (3, rows // 3) if rows % 3 == 0 else (rows,)
    dims = {name: lead if isinstance(size, tuple) else size for name, size in case.dims.items()}
    dims |= {name: size(dims, case.attrs) for name, size in op.derived.items()}
    return case._replace(name=f"rows={rows} {case.name}", dims=dims)


def _elements(op: Op, case: Case, dtype: str) -> int:
    return max(int(np.prod(a.shape)) for a in specs(op, case, dtype).values() if a is not None)
