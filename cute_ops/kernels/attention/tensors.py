"""Tensors of attention: as TMA moves them, those of packed sequences too, and in shared memory."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from cute_ops.kernels.lib.matrix import folded
from cute_ops.kernels.tensor_core.pipeline import tma_pipeline
from cute_ops.kernels.tensor_core.sizes import WARPGROUP

# Of packed sequences: rows of a tensor for TMA, a power of two, and the most elements of a dim.
FAR, MOST = 1 << 30, (1 << 31) - 1


class Moved(NamedTuple):
    """A tensor that TMA moves: the copy, the tensor, its shared memory."""

    tma: Any
    m: Any
    s: Any


def view(m, order=(1, 3, 2, 0)):
    """A tensor (batch, seqlen, heads, d) with its dims in another order, as TMA takes it."""
    m = folded(m, own=3)
    step = 128 // m.element_type.width  # elements of 16 bytes
    sizes = [Int32(size) if isinstance(size, cutlass.Numeric) else size for size in m.shape]
    strides = [s if isinstance(s, int) else cute.assume(Int64(s), divby=step) for s in m.stride]
    shape, stride = (tuple([each[i] for i in order]) for each in (sizes, strides))
    return cute.make_tensor(m.iterator, cute.make_layout(shape, stride=stride))


def by_sequence(m, mode=0):
    """A tensor (seqlen, d, heads, batch) of packed sequences, with rows in this mode, as TMA takes one of them: a copy
    ends with the sequence, of which it reads zeros and writes nothing beyond.

    TMA knows one bound for all sequences. So row ``i`` of ``length`` has the number ``FAR - length + i``, and two more
    dims move it back to its place: one steps over rows, from the end of the sequence, one by so many bytes that FAR
    steps of both are 2^64, which addresses leave out.
    """
    step = 128 // m.element_type.width
    shape, stride = list(m.shape[:3]), list(m.stride[:3])
    row = stride[mode] if isinstance(stride[mode], int) else Int64(stride[mode])
    shape[mode] = FAR
    back = (1 << 64) // FAR - row
    back = back if isinstance(back, int) else cute.assume(back, divby=step)
    return cute.make_tensor(m.iterator, cute.make_layout((*shape, MOST, MOST), stride=(*stride, stride[mode], back)))


def row_at(index, seqlen, heads):
    """The row, the head and the batch of a number of rows of all heads, (batch, heads, seqlen)."""
    which = Int32(index // seqlen)
    row, batch = Int32(index - Int64(which) * seqlen), which // heads
    return row, which - batch * heads, batch


def address_of(m, at, more=0):
    """The address in memory of an element, or of one so many elements further."""
    return m.iterator.toint() + (Int64(cute.crd2idx(at, m.layout)) + more) * (m.element_type.width // 8)


def slots(smem, dtype, layout):
    return smem.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)


def transposed(s):
    """Slots of shared memory with rows as columns: the same bytes, as the operand of another product."""
    return cute.make_tensor(s.iterator, cute.select(s.layout, mode=[1, 0, 2]))


def ring(smem, dtype, layout, stages, consumers=2, more=0):
    """Slots that one warp fills and warpgroups empty. ``more``: bytes that a slot gets besides those of this layout."""
    slot_bytes = cute.size(cute.select(layout, mode=[0, 1])) * (dtype.width // 8) + more
    return tma_pipeline(smem.allocate_array(Int64, 2 * stages), stages, slot_bytes, consumers * WARPGROUP)


def partition(moved, tile, at, rows=None, mode=0):
    """TMA's view of shared memory, (tma, stages), and of a tensor, (tma, rest).

    Args:
        moved: the tensor (seqlen, d, heads, batch).
        tile: rows and columns of a part.
        at: which parts.
        rows: of a packed sequence, whose number ``at`` does not need: its first token and how many it has.
        mode: that of the rows.
    """
    m = moved.m
    if rows is not None:
        start, length = rows
        m = cute.domain_offset(tuple([FAR - length if i == mode else 0 for i in range(5)]), m)
        at = *at[:3], start + length, FAR
    s, g = cute.group_modes(moved.s, 0, 2), cute.group_modes(cute.local_tile(m, tile, at), 0, 2)
    return cpasync.tma_partition(moved.tma, 0, cute.make_layout(1), s, g)
