"""Boxes of caches that TMA loads: some keys of one page, of columns as many as the rows of a swizzle have."""

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from cute_ops.kernels.attention.tensors import view

FAR = 1 << 22  # a box behind the last one of each page, which has zeros
EVICT_FIRST = 0x12F0000000000000  # a policy of L2: what is read once


def columns_of(width):
    """The columns of a box, of rows of so many elements of 16 bits."""
    return next(n for n in (64, 32, 16) if width % n == 0)


def copies_of(caches, dtype, keys, columns):
    """For each cache TMA's copy of boxes of so many keys, and its coordinates: (row, column, head, page). Float8 is
    copied as ``dtype``, of 16 bits, in pairs.
    """
    load, copies = cpasync.CopyBulkTensorTileG2SOp(), []
    for mX, each in zip(caches, columns):
        box = cute.select(_layout(dtype, keys, each), mode=[0, 1])
        m = cute.recast_tensor(view(mX), dtype)
        copies.append(cpasync.make_tiled_tma_atom(load, m, box, (keys, each)))
    return tuple(copies)


def slots_of(pointer, dtype, box, tile, slots):
    """Shared memory as TMA fills it: (box, row of boxes, column of boxes, slot).

    Args:
        pointer: the first slot.
        dtype: of 16 bits.
        box: keys and columns of a box.
        tile: keys and columns of a tile.
        slots: how many, and elements from one to the next.
    """
    (keys, columns), (rows, width), (count, pitch) = box, tile, slots
    layout = cute.make_layout(
        ((keys, columns), rows // keys, width // columns, count),
        stride=((columns, 1), keys * columns, rows * columns, pitch),
    )
    return cute.make_tensor(cute.recast_ptr(pointer, swizzle_of(dtype, keys, columns), dtype), layout)


def swizzle_of(dtype, keys, columns):
    """Of a box in shared memory."""
    return _layout(dtype, keys, columns).inner


def _layout(dtype, keys, columns):
    return hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (0, keys, columns), dtype, 1)
