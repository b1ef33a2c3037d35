"""Plans of calls whose sizes are symbolic, as exported programs have them: one kernel for all sizes.

A call is planned with numbers in the place of symbolic sizes. Rows are as aligned as they are for every size, and a
scratch array may be as long as a symbolic size, a whole number of times, or as a fraction of it, rounded up, or as so
many whole tiles, those of packed sequences among them. Work that is split by how many SMs some sizes leave idle is not
split.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cute_ops.autotune import dispatch
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.messages import message
from cute_ops.declaration.shapes import ITEMSIZE, Array
from cute_ops.jit.layout import Memory, Shapes, compact, contiguous_axis, has_contiguous, with_sizes
from cute_ops.jit.plan import Plan, plan
from cute_ops.jit.target import Target

# Enough rows to keep a GPU busy.
MANY_ROWS = 1 << 20
# For other sizes: no rounding of a prime is a multiple of it. A few more show what depends on them.
PRIME, OTHERS = 4099, (1, 67, 8209)
TILES = (16, 32, 64, 128, 256)  # tokens of packed sequences
ROWS = "*rows"  # among sizes by name: the product of the leading dims
NO_FACTORS: Mapping[str, int] = {}
Dims = Mapping[str, Any]


def is_symbolic(size: Any) -> bool:
    return not isinstance(size, int)


def plan_for_any_size(binding: Binding, memory: Callable[[Shapes], dict[str, Memory]], target: Target) -> Plan:
    """The plan of a call with folded leading dims and symbolic sizes; ``memory`` says how inputs of some shapes lie,
    where they are not row-major.

    Raises:
        NotImplementedError: a symbolic size that kernels do not have as a dynamic one.
    """
    op = binding.op
    always = [dim for dim in op.static if dim not in op.few and is_symbolic(binding.dims.get(dim, 0))]
    if always:
        raise _refused(binding, f"{always[0]}={binding.dims[always[0]]} is a constant of every kernel")
    dynamic = any(is_symbolic(binding.dims[dim]) for dim in op.few)
    numbers, places = with_numbers(binding, memory)
    chosen = dispatch.choose(numbers, places, target, fixed=False if dynamic else None)
    fixed, config = None not in chosen.variant.dims.values(), chosen.variant.config

    def scratch(numbers: Binding, target: Target = target) -> Mapping[str, Array]:
        return plan(numbers, _places(binding, numbers, memory), target, fixed=fixed, config=config).workspaces

    sizes = {name: size for name, size in binding.dims.items() if not isinstance(size, tuple)}
    own = [name for name, size in sizes.items() if is_symbolic(size) and name not in op.derived]
    others = [_with_numbers(binding, factors={name: factor}) for name in own for factor in OTHERS]
    # Scratch arrays that suffice for many rows suffice for fewer, unless they grow with the rows.
    if _elements(scratch(_with_numbers(binding, 2 * MANY_ROWS))) > 1.5 * _elements(chosen.workspaces):
        own.append(ROWS)
        others += [_with_numbers(binding, rows) for rows in OTHERS]

    def of_any_size(target: Target) -> dict[str, Array] | None:
        found = {}
        for name, array in scratch(numbers, target).items():
            seen = [(_sizes(each), scratch(each, target)[name].shape) for each in others]
            shape = [
                _size(_sizes(binding), size, _sizes(numbers), [(dims, other[k]) for dims, other in seen], own)
                for k, size in enumerate(array.shape)
            ]
            if None in shape:
                return None
            found[name] = array._replace(shape=tuple(shape))
        return found

    # Kernels read from a scratch array into how many parts work is split, which depends on the sizes where a few do not
    # occupy all SMs; one SM always has work.
    found = of_any_size(target) or of_any_size(target._replace(sm_count=1))
    if found is None:
        raise _refused(binding, "its scratch arrays do not grow as one of them, or as a part of one")
    return chosen._replace(workspaces=found)


def with_numbers(binding: Binding, memory: Callable[[Shapes], dict[str, Memory]]) -> tuple[Binding, dict[str, Memory]]:
    """A call with large numbers for symbolic sizes, and where its arrays lie."""
    numbers = _with_numbers(binding)
    return numbers, _places(binding, numbers, memory)


def _sizes(binding: Binding) -> Dims:
    """The sizes of a call by name, and of its rows."""
    return {**binding.dims, ROWS: binding.rows}


def _size(symbols: Dims, size: int, dims: Dims, others: Sequence[tuple[Dims, int]], names: Sequence[str]) -> Any:
    """A size of a scratch array: the same for all numbers that stand for symbolic sizes, or a multiple of one of them,
    which have these names, or a fraction of it, rounded up, or so many whole tiles. It is ``size`` where the numbers
    are ``dims``; ``others`` are other numbers, with sizes. None where it is nothing of this.
    """
    if all(other == size for _, other in others):
        return size
    tile = math.gcd(size, *(other for _, other in others))
    for name in names:
        if size % dims[name] == 0 and all(other * dims[name] == size * by[name] for by, other in others):
            return size // dims[name] * symbols[name]
        every = [(dims[name], size // tile), *((by[name], other // tile) for by, other in others)]
        number, parts = max(every)
        for part in (tile, -(-number // max(parts, 1))):  # the second is no larger than what a part is
            if all(-(-number // part) == parts for number, parts in every):
                return -(-symbols[name] // part) * tile
    # Packed sequences have as many tiles as their tokens fill, a few more, and one more each.
    for unit, name, each, part in itertools.product((tile, *TILES, 1), (*names, ""), ("", *names), TILES):

        def whole(dims: Dims, name: str = name, each: str = each, part: int = part, unit: int = unit) -> Any:
            return ((dims[name] // part if name else 0) + (dims[each] if each else 0)) * unit

        rest = size - whole(dims)
        if rest >= 0 and all(other == whole(by) + rest for by, other in others):
            return whole(symbols) + rest
    return None


def _refused(binding: Binding, why: str) -> NotImplementedError:
    problem = f"on CUDA some sizes may not be symbolic: {why}."
    return NotImplementedError(message(binding.op, problem, binding.inputs, binding.dims, binding.dtypes))


def _with_numbers(binding: Binding, rows: int = MANY_ROWS, factors: Mapping[str, int] = NO_FACTORS) -> Binding:
    """The call with numbers for symbolic sizes: many rows, and else a known divisor times a factor by name."""
    op = binding.op

    def many(sizes: tuple[Any, ...]) -> tuple[int, ...]:
        return tuple(rows if is_symbolic(size) else size for size in sizes)

    def number(name: str, size: Any) -> Any:
        if isinstance(size, tuple):
            return many(size)
        return divisor(size) * factors.get(name, PRIME) if is_symbolic(size) else size

    def input_of(name: str, array: Array, dims: Dims) -> Array:
        own = op.inputs[name].dims  # of the leading dims it may have the last few
        lead = array.shape[: len(array.shape) - len(own)]
        return array._replace(shape=(*many(lead), *(dims[d.name] if d.name else d.of(dims) for d in own)))

    sizes = {name: number(name, size) for name, size in binding.dims.items()}
    return with_sizes(binding, sizes, lambda dims: {n: a and input_of(n, a, dims) for n, a in binding.inputs.items()})


def _places(binding: Binding, numbers: Binding, memory: Callable[[Shapes], dict[str, Memory]]) -> dict[str, Memory]:
    """The arrays' layouts, with divisors of their strides that hold for all values of the symbolic sizes."""
    shapes = {n: a.shape for n, a in numbers.inputs.items() if a is not None}
    found, tensors = memory(shapes), {**binding.op.inputs, **binding.op.outputs}
    symbolic = {**binding.inputs, **binding.outputs}
    for name, array in {**numbers.inputs, **numbers.outputs}.items():
        tensor, whole = tensors[name], symbolic[name]
        if array is None or whole is None or not has_contiguous(tensor) or not array.shape:
            continue
        where = found.get(name) or Memory(compact(array.shape))
        place = contiguous_axis(tensor, array.shape, where.strides)
        inner = whole.shape[-1 if place is None else place]
        if is_symbolic(inner):
            found[name] = where._replace(multiple=divisor(inner) * ITEMSIZE[array.dtype])
    return found


def divisor(size: Any) -> int:
    """The largest power of two, at most 16, that surely divides a symbolic size."""
    return next(d for d in (16, 8, 4, 2, 1) if size % d == 0)


def _elements(scratch: Mapping[str, Array]) -> int:
    return sum(math.prod(array.shape) for array in scratch.values())
