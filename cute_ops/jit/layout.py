"""The memory layout of a call's arrays, and the tensors as which a kernel gets them.

Kernels see a row-wise tensor either *flat*, compact and of any rank, or *strided*, with free strides on
all dims but the contiguous one. Leading dims that memory allows to merge are merged first (a view, never a copy), so
that ``qkv[:, :, :h]`` is passed with few strides. A tensor without leading dims is one row, because a kernel's row-wise
tensors have at least one leading dim. A tensor whose contiguous dim is not the last is passed as a view with that dim
last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

from cute_ops.declaration.binding import Binding, expanded_shape, own_lead
from cute_ops.declaration.messages import message
from cute_ops.declaration.shapes import ITEMSIZE, Array
from cute_ops.declaration.tensor import Tensor
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.jit.variant import TensorKey

Shapes: TypeAlias = Mapping[str, tuple[Any, ...]]


class Memory(NamedTuple):
    """An array's strides in elements and its address (or the alignment of that) in bytes.

    Attributes:
        multiple: if the strides stand for symbolic ones: bytes that divide all of them but the contiguous dim's; else
            0.
    """

    strides: tuple[int, ...]
    address: int = 0
    multiple: int = 0


class View(NamedTuple):
    """The shape and strides with which an array is passed to a kernel, without a copy."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Layout(NamedTuple):
    """The inputs and outputs of a call as its kernel gets them.

    Attributes:
        keys: what the kernel knows of each tensor, None for an absent one.
        views: for arrays that are passed with another shape or other strides.
        copies: the inputs to copy first, into memory with these strides.
    """

    keys: dict[str, TensorKey | None]
    views: dict[str, View]
    copies: dict[str, tuple[int, ...]]


def compact(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a compact row-major array."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def layout(binding: Binding, memory: Mapping[str, Memory], static: Mapping[str, int | None]) -> Layout:
    """Merge leading dims as far as memory allows, and describe every tensor.

    Args:
        binding: a checked call with concrete sizes.
        memory: of inputs, and of outputs that the caller gives; all others are compact and 16-byte aligned.
        static: the sizes of dims that are compile-time constants; None for a dim that is dynamic.

    Raises:
        ValueError: an input's strides or alignment are not those that its declaration demands.
    """
    op, copies = binding.op, check_memory(binding, memory)
    given = {name: array for name, array in binding.inputs.items() if array is not None}
    tight = {name: preferred(op.inputs[name], a.shape) for name, a in given.items() if name not in memory}
    memory = {**memory, **{name: Memory(strides) for name, strides in {**tight, **copies}.items()}}
    views = _expanded(binding, memory)
    for group in groups(binding):
        views |= _merge_leading(binding, memory, group)
    keys: dict[str, TensorKey | None] = {}
    tensors, arrays = {**op.inputs, **op.outputs}, {**binding.inputs, **binding.outputs}
    for name in (*op.inputs, *op.kernel_outputs):
        array = arrays.get(name)
        if array is None:
            keys[name] = None
            continue
        tensor, view = tensors[name], views.get(name)
        shape = view.shape if view else array.shape
        place = memory.get(name) or Memory(compact(shape))
        known: list[int | None] = [None] * (len(shape) - len(tensor.dims))
        known += [static.get(d.name) if d.name else d.of(static) for d in tensor.dims]
        strides = view.strides if view else place.strides
        if not has_contiguous(tensor):
            keys[name] = _scattered_key(name, array.dtype, shape, tuple(known), strides)
            continue
        order: tuple[int, ...] = ()
        if (contiguous := contiguous_axis(tensor, shape, strides)) not in (-1, None):
            order = tensor.memory_order(len(shape), contiguous)
            shape, strides = (tuple(each[i] for i in order) for each in (shape, strides))
            strides = (*strides[:-1], 1)  # for a dim of one element, too
            views[name] = View(shape, strides)
        key = tensor_key(name, array.dtype, shape, tuple(known), place._replace(strides=strides))
        keys[name] = key._replace(order=order)
    return Layout(keys, views, copies)


def check_memory(binding: Binding, memory: Mapping[str, Memory], by_kernel: bool = True) -> dict[str, tuple[int, ...]]:
    """The inputs that are copied before a kernel takes them, with the strides of their copies.

    Args:
        binding, memory: as :func:`layout` takes them.
        by_kernel: whether the kernel surely runs. If not, inputs that a program takes in its place may lie anywhere.

    Raises:
        ValueError: an input's strides or alignment are refused by its declaration.
    """
    copies: dict[str, tuple[int, ...]] = {}
    for name, array in binding.inputs.items():
        tensor, where = binding.op.inputs[name], memory.get(name)
        anywhere = binding.op.fallback is not None and name in binding.op.fallback.anywhere
        if anywhere and not by_kernel and binding.attrs["fused"] != "always":
            continue
        problem = misplaced(binding, name, where)
        if problem and array and where and tensor.otherwise == "copy":
            copies[name] = preferred(tensor, array.shape)
            problem = misplaced(binding, name, Memory(copies[name]))
        if problem:
            if anywhere:
                problem += " With fused='auto' the framework's product takes it anywhere."
            raise ValueError(message(binding.op, problem, binding.inputs, binding.dims, binding.dtypes))
    return copies


def misplaced(binding: Binding, name: str, where: Memory | None) -> str:
    """The error text for the layout of an input, compact by default; empty if it is right."""
    tensor, array = binding.op.inputs[name], binding.inputs[name]
    if array is None or 0 in array.shape or not (where or tensor.align):
        return ""
    return _misplaced(name, tensor, array, where or Memory(preferred(tensor, array.shape)))


def _misplaced(name: str, tensor: Tensor, array: Array, where: Memory) -> str:
    if not has_contiguous(tensor):
        return ""
    contiguous = contiguous_axis(tensor, array.shape, where.strides)
    if contiguous is None:
        others = "Other dims may have any stride; call .contiguous() where you accept the copy."
        if tensor.contiguous is None:
            return f"argument `{name}` has stride {where.strides[-1]} in its last dim, expected 1. {others}"
        dims = " or ".join(tensor.may_be_contiguous)
        return f"argument `{name}` has strides {tuple(where.strides)}, expected 1 in {dims}."
    if tensor.merged and not tensor.is_merged(array.shape, where.strides):
        return (
            f"argument `{name}` has strides {tuple(where.strides)}, expected one that steps over all rows of "
            f"{list(array.shape)}, as if they were a matrix; call .contiguous() where you accept the copy."
        )
    if not tensor.align:
        return ""
    if where.address % tensor.align:
        return f"argument `{name}` lies {where.address % tensor.align} bytes off a multiple of {tensor.align} bytes."
    if where.multiple % tensor.align:
        return f"argument `{name}` has strides that are no multiple of {tensor.align} bytes for all sizes."
    # Sizes come last, so that the usual case does not compare a symbolic one.
    stepped = [
        pair
        for k, pair in enumerate(zip(where.strides, array.shape, strict=True))
        if k != len(array.shape) + contiguous
    ]
    if odd := [s for s, size in stepped if s * ITEMSIZE[array.dtype] % tensor.align and size > 1]:
        return (
            f"argument `{name}` has a stride of {odd[0]} elements, expected a multiple of "
            f"{tensor.align // math.gcd(tensor.align, ITEMSIZE[array.dtype])}: pad its rows."
        )
    return ""


# Declarations with the default layout are answered here, so that an op's first call does not enter `op` once more.


def has_contiguous(tensor: Tensor) -> bool:
    """Whether one of the dims must be contiguous."""
    return bool(tensor.dims if tensor.contiguous is None else tensor.contiguous)


def vector_alignment(declared: Tensor, key: TensorKey) -> int:
    """Bytes by which a tensor limits the vector width; one without a contiguous dim does not."""
    return min(key.align, key.row_align) if declared.dims and declared.contiguous != () else VECTOR_BYTES


def contiguous_axis(tensor: Tensor, shape: Sequence[Any], strides: Sequence[Any]) -> int | None:
    """:meth:`Tensor.contiguous_axis`."""
    if tensor.contiguous is not None:
        return tensor.contiguous_axis(shape, strides)
    # Strides come first, so that the usual case does not compare a symbolic size.
    return -1 if tensor.dims and (strides[-1] == 1 or shape[-1] <= 1) else None


def preferred(tensor: Tensor, shape: Sequence[int], place: int | None = None) -> tuple[int, ...]:
    """The strides of a compact array that is contiguous at this place, by default at the preferred one."""
    if not tensor.contiguous:
        return compact(shape)
    order = tensor.memory_order(len(shape), place or tensor.axes[0])
    strides = compact([shape[i] for i in order])
    return tuple(strides[order.index(i)] for i in range(len(shape)))


def tensor_key(
    name: str, dtype: str, shape: tuple[int, ...], known: tuple[int | None, ...], where: Memory
) -> TensorKey:
    """The key of a tensor that is contiguous in its last dim; ``known`` has the sizes that are compile-time
    constants, None for the others.
    """
    # The stride of a dim of size 1 (or 0) is never used.
    stepped = [s for size, s in zip(shape[:-1], where.strides[:-1], strict=True) if size > 1]
    flat = not _uneven(shape, where.strides)
    strides = compact((2,) * (len(shape) - 1) + shape[-1:])[:-1] if flat else stepped
    return TensorKey(
        name=name, dtype=dtype, shape=known, layout="flat" if flat else "strided",
        align=math.gcd(where.address, VECTOR_BYTES),
        row_align=math.gcd(VECTOR_BYTES, where.multiple, *(s * ITEMSIZE[dtype] for s in strides)),
    )  # fmt: skip


def _scattered_key(
    name: str, dtype: str, shape: tuple[int, ...], known: tuple[int | None, ...], strides: tuple[int, ...]
) -> TensorKey:
    """The key of a tensor without a contiguous dim: numbers, aligned to one item."""
    kind: Literal["flat", "scattered"] = "scattered" if _uneven(shape, strides) else "flat"
    return TensorKey(name, dtype, known, kind, align=ITEMSIZE[dtype], row_align=ITEMSIZE[dtype])


def number_key(name: str, default: float) -> TensorKey:
    """The key of a number that is passed by value: its type, which is its default's."""
    dtype = "float32" if isinstance(default, float) else "int64"
    return TensorKey(name, dtype, (), "number", align=ITEMSIZE[dtype], row_align=ITEMSIZE[dtype])


def folded(binding: Binding) -> dict[str, tuple[int, ...]]:
    """The shapes of compact inputs with leading dims folded: those of one name into one dim, or into an outer and an
    inner one if an input broadcasts over the outer ones.
    """
    given = {n: (t, a) for n, t in binding.op.inputs.items() if (a := binding.inputs[n]) is not None}
    shapes = {n: tuple(a.shape) for n, (_, a) in given.items()}
    for group in groups(binding):
        shapes |= _folded({n: each for n, each in given.items() if each[0].rows == group}, binding.dims[group])
    return shapes


def with_leading_dims(binding: Binding, shapes: Shapes) -> Binding:
    """A call on views of its arrays with other leading dims; nothing is checked again."""
    op, dims = binding.op, dict(binding.dims)
    for name, shape in shapes.items():
        tensor = op.inputs[name]
        if tensor.rows and not tensor.broadcast:
            dims[tensor.rows] = shape[: len(shape) - len(tensor.dims)]
    return with_sizes(binding, dims, lambda dims: with_shapes(binding.inputs, shapes))


def with_sizes(
    binding: Binding, dims: Mapping[str, Any], inputs_of: Callable[[Mapping[str, Any]], dict[str, Array | None]]
) -> Binding:
    """A call with other sizes, which are not checked.

    Args:
        dims: the sizes by name; derived ones are recomputed.
        inputs_of: from all sizes to the inputs.
    """
    op, constants = binding.op, {name: binding.attrs[name] for name in binding.op.attrs}
    dims = {**dims, **{name: size(dims, constants) for name, size in op.derived.items()}}
    inputs = inputs_of(dims)
    outputs = {n: out and out._replace(shape=op.outputs[n].of(dims)) for n, out in binding.outputs.items()}
    results = {**{n: inputs[n] for n in op.mutates}, **outputs}
    return binding._replace(dims=dims, inputs=inputs, outputs=outputs, results=results)


def with_shapes(arrays: Mapping[str, Array | None], shapes: Shapes) -> dict[str, Array | None]:
    """Arrays with the shapes that are given for some of them."""
    return {n: a and a._replace(shape=shapes.get(n, a.shape)) for n, a in arrays.items()}


def _folded(given: Mapping[str, tuple[Tensor, Array]], whole: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """:func:`folded` for the inputs with leading dims of one name, whose sizes are ``whole``."""

    def reach(tensor: Tensor, array: Array) -> int:
        """How many of the last leading dims the array has; all if the others are 1."""
        own = len(own_lead(tensor, array)) if tensor.broadcast else len(whole)
        return len(whole) if math.prod(whole[: len(whole) - own]) == 1 else own

    reached = {n: reach(t, a) for n, (t, a) in given.items()}
    cuts = sorted({k for k in reached.values() if k})

    def lead(own: int) -> tuple[int, ...]:
        edges = [0, *([k for k in cuts if k <= own] or [0])]
        sizes = [math.prod(whole[len(whole) - b : len(whole) - a]) for a, b in pairwise(edges)]
        return tuple(reversed(sizes))

    return {n: (*lead(reached[n]), *a.shape[len(a.shape) - len(t.dims) :]) for n, (t, a) in given.items()}


def groups(binding: Binding) -> list[str]:
    """The names of leading dims that a call has."""
    return [name for name, size in binding.dims.items() if isinstance(size, tuple)]


def _merge_leading(binding: Binding, memory: Mapping[str, Memory], group: str) -> dict[str, View]:
    """Views that merge the leading dims of one name as far as every input with them allows; none if all are compact.
    Without such dims, views with one of size 1. A tensor that is declared as merged has one, whatever others allow.

    Inputs that broadcast keep their own leading dims: row i of the op reads their row i modulo their number of rows.
    """
    op, lead, arrays = binding.op, binding.dims[group], {**binding.inputs, **binding.outputs}
    every = {n: t for n, t in {**op.inputs, **op.outputs}.items() if t.rows == group and not t.broadcast}
    shapes = {n: tuple(a.shape) for n in every if (a := arrays[n]) is not None}
    # Outputs that the caller gives have strides, too.
    read = [n for n in shapes if n in op.inputs or n in memory]
    strides = {n: memory[n].strides if n in memory else compact(shapes[n]) for n in read}
    if lead and not any(_uneven(shapes[n], strides[n]) for n in read):
        return {}
    kept = [i for i, size in enumerate(lead) if size != 1]
    runs = _runs(kept, lead, list(strides.values()))
    views = {}
    for name, shape in shapes.items():
        tensor, stride = every[name], tuple(strides.get(name, compact(shape)))
        own = [kept] if tensor.merged and _uneven(shape, stride) else runs
        if len(own) != len(lead):
            views[name] = _merged(tensor, lead, own, shape, stride)
    return views


def _runs(kept: list[int], lead: tuple[int, ...], strides: list[tuple[int, ...]]) -> list[list[int]]:
    """Runs of neighbouring dims that one stride of every tensor steps over; one empty run if no dim is kept."""
    runs: list[list[int]] = []
    for i in kept:
        previous = runs[-1][-1] if runs else None
        if previous is not None and all(s[previous] == s[i] * lead[i] for s in strides):
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs or [[]]


def _merged(
    tensor: Tensor, lead: tuple[int, ...], runs: list[list[int]], shape: tuple[int, ...], strides: tuple[int, ...]
) -> View:
    """The view whose leading dims are runs of a tensor's."""
    tail = len(tensor.dims)
    merged = tuple(math.prod(lead[i] for i in run) for run in runs)
    leading = tuple(strides[run[-1]] if run else math.prod(shape[-tail:]) for run in runs)
    return View(merged + shape[len(shape) - tail :], leading + strides[len(strides) - tail :])


def _expanded(binding: Binding, memory: Mapping[str, Memory]) -> dict[str, View]:
    """Views of inputs that broadcast: an inner leading dim of size 1 is expanded with stride 0, and an input without
    leading dims is one row.
    """
    views = {}
    for name, tensor in binding.op.inputs.items():
        array = binding.inputs[name]
        if array is None or not tensor.broadcast:
            continue
        strides = memory[name].strides if name in memory else compact(array.shape)
        if len(array.shape) == len(tensor.dims):
            views[name] = View((1, *array.shape), (math.prod(array.shape), *strides))
        elif shape := expanded_shape(tensor, array, binding.dims):
            skipped = len(array.shape) - len(shape)
            own = zip(array.shape[skipped:], shape, strides[skipped:], strict=True)
            views[name] = View(shape, tuple(0 if size != wide else stride for size, wide, stride in own))
    return views


def _uneven(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    return any(size > 1 and stride != tight for size, stride, tight in zip(shape, strides, compact(shape), strict=True))
