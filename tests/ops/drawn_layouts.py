"""Calls with drawn sizes, dtypes and places in memory, for the tests of what is refused and when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from cute_ops import Array, Op
from cute_ops.declaration.binding import Binding, bind
from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.jit.layout import Memory
from cute_ops.testing import left_out

SIZES = (1, 5, 8, 16, 24, 64, 72, 128, 200, 256, 1000, 4096)
LEADING = (1, 1, 2, 3, 5, 7)


class DrawnCall(NamedTuple):
    """A call, and where its arrays lie."""

    binding: Binding
    memory: dict[str, Memory]

    def __str__(self) -> str:
        arrays = {name: str(array) for name, array in self.binding.inputs.items() if array is not None}
        return f"{self.binding.op.name} {arrays} {self.binding.attrs} {self.memory}"


def family(ops: Iterable[Op]) -> list[Op]:
    """All ops with kernels that these call: for gradients, for batches, with fewer outputs, within programs."""
    found: dict[Op, None] = {}
    left = [(op, True) for op in ops]
    while left:
        op, alone = left.pop()
        if op in found:
            continue
        found[op] = None
        programs = [program for program in (op.program, op.fallback and op.fallback.program) if program]
        others = [*op.steps, *(other for program in programs for other in program.ops), *op.narrowed[:3], op.saving]
        others += op.instances if op.numbers else ()
        left += [(other, alone) for other in others if other]
        if alone and op.batched:  # a batch of batches is an op, too, and so on
            left.append((op.batched, False))
    return [op for op in found if op.program is None and not op.numbers]


def draw(op: Op, rng: np.random.Generator) -> DrawnCall | None:
    """A call of an op; None if the sizes or dtypes that were drawn do not fit it."""
    dims = dict(op.cases[int(rng.integers(len(op.cases)))].dims) if op.cases else dict(op.example((2, 3), 64))
    for name, size in dims.items():
        if isinstance(size, tuple):
            dims[name] = _leading(rng)
        elif name in ("m", "n", "k") and rng.random() < 0.7:
            dims[name] = int(rng.choice(SIZES))
    absent = left_out(op, rng, 0.3)
    dtypes = {name: str(rng.choice(choices)) for name, choices in op.accepts.items()}
    attrs: dict[str, Any] = {name: values[int(rng.integers(len(values)))] for name, values in op.choices.items()}
    try:
        dims |= {name: size(dims, {**op.attrs, **attrs}) for name, size in op.derived.items()}
        arrays: dict[str, Array | None] = {
            name: None
            if name in absent
            else Array(
                _shape(tensor.of(dims), tensor.broadcast, len(tensor.dims), rng), dtypes.get(tensor.dtype, tensor.dtype)
            )
            for name, tensor in op.inputs.items()
        }
        binding = bind(op, arrays, attrs)
    except (KeyError, TypeError, ValueError):
        return None
    if binding.empty:
        return None
    memory = {
        name: place(array.shape, ITEMSIZE[array.dtype], rng)
        for name, array in arrays.items()
        if array is not None and rng.random() < 0.7
    }
    for name in op.mutates:  # an array that is written lies compact: torch refuses one whose elements overlap
        memory.pop(name, None)
    return DrawnCall(binding, memory)


def place(shape: tuple[int, ...], itemsize: int, rng: np.random.Generator) -> Memory:
    """Strides and an address: dims in another order, slices of wider ones, expanded ones, a last dim with gaps."""
    order = [*range(len(shape))]
    kind = rng.random()
    if kind < 0.25:
        order = [int(i) for i in rng.permutation(len(shape))]
    elif kind < 0.4 and len(shape) > 2:
        order[:-1] = [int(i) for i in rng.permutation(len(shape) - 1)]
    strides, step = [0] * len(shape), 1
    if rng.random() < 0.1:
        step = int(rng.choice([2, 3, 8]))
    sliced = rng.random() < 0.6
    for i in reversed(order):
        strides[i] = step
        step *= shape[i] + (int(rng.choice([0, 0, 1, 8])) if sliced else 0)
    for i, size in enumerate(shape):
        if size == 1 and rng.random() < 0.5:
            strides[i] = int(rng.choice([0, 1, 3, 977]))
        elif i < len(shape) - 1 and rng.random() < 0.06:
            strides[i] = 0
    return Memory(tuple(strides), itemsize * int(rng.choice([0, 0, 1, 2, 4, 8])))


def _leading(rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(size) for size in rng.choice(LEADING, int(rng.integers(0, 5))))


def _shape(shape: tuple[int, ...], broadcast: bool, own: int, rng: np.random.Generator) -> tuple[int, ...]:
    """The shape of an input that broadcasts: some of the last leading dims, any of size 1."""
    if not broadcast:
        return shape
    lead = shape[: len(shape) - own]
    lead = tuple(1 if rng.random() < 0.3 else size for size in lead[int(rng.integers(len(lead) + 1)) :])
    return (*lead, *shape[len(shape) - own :])


def draws(ops: Iterable[Op], count: int, rng: np.random.Generator) -> Iterator[DrawnCall]:
    """So many calls of ops in turn."""
    found, made = [*ops], 0
    for _ in range(20 * count):
        for op in rng.permutation(np.array(found, dtype=object)):
            call = draw(op, rng)
            if call is not None:
                yield call
                made += 1
                if made == count:
                    return
