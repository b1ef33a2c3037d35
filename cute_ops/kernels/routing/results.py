"""Stores of the values and the columns that were found."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.lib.copy import fragment, gmem_elements, store
from cute_ops.kernels.lib.row_layout import row_address


def store_results(rX, mX, key, row, n):
    """A row's results, by vectors as wide as all rows allow. ``key``: the tensor's description."""
    size, count = key.itemsize, cute.size(rX)
    bytes_, vec = min(key.align, key.row_align, VECTOR_BYTES), 1
    while 2 * vec * size <= bytes_ and count % (2 * vec) == 0:
        vec *= 2
    address = row_address(mX, key, row, n)
    for i in range(0, count, vec):
        part = cute.make_tensor(rX.iterator + i, cute.make_layout(vec))
        store(part, address + i * size)


@cute.jit
def names_of(mIndex: cute.Tensor, variant: cutlass.Constexpr, row: Int64, columns: cutlass.Constexpr):
    """A fragment of what columns of a row are called: by default their numbers."""
    rFound = fragment(Int32, len(columns))
    for i in cutlass.range_constexpr(len(columns)):
        rFound[i] = columns[i]
        if const_expr(mIndex is not None):
            address = row_address(mIndex, variant.tensors["index"], row, variant.dims["n"])
            rFound[i] = gmem_elements(Int32, address + Int64(columns[i]) * 4, 1)[0]
    return rFound
