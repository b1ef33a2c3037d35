"""Torch's functions for the programs of composites: see :class:`cute_ops.declaration.program.Program`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Any

import torch

from cute_ops.autotune import dispatch
from cute_ops.constants import of_attributes
from cute_ops.declaration.binding import bind
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import Array
from cute_ops.jit import target
from cute_ops.jit.layout import Memory
from cute_ops_torch.library import class_blocks, row_halves
from cute_ops_torch.library.packed import packed_view
from cute_ops_torch.library.row_chunks import Chunks
from cute_ops_torch.library.tensors import DTYPES, array

Tensor = torch.Tensor
where = torch.where
broadcast_to = torch.broadcast_to
_FORMS: Mapping[str, Callable[[Chunks], Chunks]] = {
    "rows": lambda made: made, "classes": class_blocks.by_classes, "halves": row_halves.in_halves,
}  # fmt: skip
shared = False


def chunks(*given: Any, by: str = "rows", **named: Any) -> Chunks:
    """A call's chunks, or what takes less memory of that which ``by`` names: ``rows``, ``classes`` or ``halves``."""
    return _FORMS[by](Chunks(*given, **named))


def ones(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return like.new_ones(shape, dtype=torch.float32)


def number(value: float, like: Tensor) -> Tensor:
    return like.new_full((), value, dtype=torch.float32)


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    """An index that is no class is torch's own error."""
    return torch.embedding(table, index)


def named_rows(index: Tensor, count: int) -> tuple[Tensor, bool]:
    """(index, whether one that is no row is an error) for kernels that copy rows as :func:`rows_of` does."""
    return index, True


def classes_of(index: Tensor, count: int) -> Tensor:
    """Of indices that :func:`rows_of` has taken, which are all in range."""
    return index.to(torch.int32)


def sort(keys: Tensor) -> tuple[Tensor, Tensor]:
    found, order = keys.sort(stable=True)
    return found, order


def whole(x: Tensor) -> Tensor:
    return x.to(torch.int32)


def scattered(values: Tensor, index: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like, memory_format=torch.contiguous_format).scatter_(-1, index.long(), values)


def picked(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(-1, index.long())


def cast(x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype)


def offsets(starts: Tensor, count: int) -> Tensor:
    return starts[..., None] + torch.arange(count, dtype=starts.dtype, device=starts.device)


def with_rows(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    return x.index_put((index,), rows)


def plus_rows(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    return x.index_add(0, index.reshape(-1), rows.reshape(-1, x.shape[-1]))


def ends(keys: Tensor, count: int) -> Tensor:
    every = torch.arange(count, dtype=torch.int32, device=keys.device)
    return torch.searchsorted(keys, every, right=True, out_int32=True)


def joined(tensors: tuple[Tensor, ...], axis: int) -> Tensor:
    view = packed_view(tensors) if axis == 0 else None
    return torch.cat(tensors, axis) if view is None else view


def product(a: Tensor, b: Tensor, dtype: str | None = None) -> Tensor:
    """By cuBLAS. Torch's settings say whether it rounds parts of long sums, and factors of float32 to TF32."""
    wanted = a.dtype if dtype is None else DTYPES[dtype]
    if wanted == a.dtype:
        return torch.matmul(a, b)
    if not a.is_cuda:
        return torch.matmul(a.to(wanted), b.to(wanted))
    if b.ndim > 2:
        out = torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out_dtype=wanted)
    else:
        out = torch.mm(a.reshape(-1, a.shape[-1]), b, out_dtype=wanted)
    return out.reshape(*a.shape[:-1], b.shape[-1])


def sums(x: Tensor, axes: tuple[int, ...], like: Tensor) -> Tensor:
    return x.sum(axes, dtype=torch.float32).to(like.dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if total.dtype == a.dtype and a.ndim == 2:
        return torch.addmm(total, a, b)
    if total.dtype == a.dtype:
        return torch.baddbmm(*(t.flatten(0, -3) for t in (total, a, b))).reshape(total.shape)
    return (total + product(a, b, "float32")).to(total.dtype)


def added(total: Tensor, index: tuple[Any, ...], value: Tensor) -> Tensor:
    total[index].add_(value)
    return total


def repeat(count: int, step: Callable[[Any, Any], Any], state: Any) -> Any:
    for i in range(count):
        state = step(i, state)
    return state


def kernel_is_faster(op: Op, inputs: Mapping[str, Tensor], attrs: Mapping[str, Any]) -> bool:
    """Whether our kernel is to run, see :func:`cute_ops.autotune.dispatch.kernel_is_faster`, on the tensors' GPU."""
    first = next(iter(inputs.values()))
    places = tuple((name, array(t), t.stride(), t.data_ptr() % 16) for name, t in inputs.items())
    exactly = of_attributes(tuple(attrs.values()))
    return first.is_cuda and _kernel_is_faster(op, places, tuple(attrs.items()), first.device.index, exactly)


@lru_cache(1024)
def _kernel_is_faster(
    op: Op, places: tuple[tuple[str, Array, tuple[int, ...], int], ...], attrs: tuple[tuple[str, Any], ...],
    device: int, exactly: Hashable,
) -> bool:  # fmt: skip
    """``exactly`` tells attributes apart that are equal to Python."""
    binding = bind(op, {name: found for name, found, _, _ in places}, dict(attrs))
    memory = {name: Memory(strides, start) for name, _, strides, start in places}
    arch = target.of_device(device)
    memory |= {name: Memory(strides) for name, strides in dispatch.realigned(binding, memory, arch).items()}
    return dispatch.kernel_is_faster(binding, memory, arch)
