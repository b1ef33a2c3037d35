"""Per-column parameters of a row: weight and bias, whatever their dtype and alignment."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_ops.kernels._rows import ITEMSIZE
from cute_ops.kernels._vectors import fragment, load, load_elements, load_if, load_masked, widen
from cute_ops.kernels._windows import settle


def column_vector(mW, key, tile, first, k):
    """A parameter's elements for the columns ``first ...`` of a row tile's k-th vectors."""
    v, itemsize = tile.v, ITEMSIZE[key.dtype]
    base = mW.iterator.toint()
    address = base + Int64(first) * itemsize
    aligned = key.align >= min(v.vec * itemsize, 16)
    if v.shifted and aligned and v.vec * itemsize == 16:
        return _realigned(mW.element_type, base, tile, first)
    rW = fragment(mW.element_type, v.vec)
    if not aligned or v.shifted:
        load_elements(rW, address, first, Int32(tile.n))
    elif v.masked and tile.ends_outside(k):
        load_masked(rW, address, first, Int32(tile.n))
    elif tile.ends_outside(k):
        rW.fill(0)
        load_if(first < tile.n, rW, address)
    else:
        load(rW, address)
    return rW


def column_elements(mW, key, v, first, n):
    """As :func:`column_vector`, for a vector that begins inside the row or, with shifted rows, before it."""
    itemsize = ITEMSIZE[key.dtype]
    rW = fragment(mW.element_type, v.vec)
    address = mW.iterator.toint() + Int64(first) * itemsize
    if v.masked or key.align < min(v.vec * itemsize, 16):
        load_elements(rW, address, first, n)
    else:
        load(rW, address)
    return rW


def _realigned(dtype, base, tile, first):
    """16 bytes from any element on: two aligned loads, the words between them chosen, their halves moved.

    The loads stay on the parameter's own 16 bytes; what a vector holds outside the row is anything, NaN too.
    """
    vec, last = tile.vec, (tile.n - 1) // tile.vec
    lower = (first + tile.v.unit) // vec - tile.v.unit // vec
    rPair = cute.make_rmem_tensor((2 * vec,), dtype)
    for i in range(2):
        place = cutlass.min(cutlass.max(lower + i, 0), last)
        load(cute.make_tensor(rPair.iterator + i * vec, cute.make_layout(vec)), base + Int64(place) * 16)
    return settle(rPair, (first - lower * vec) * (dtype.width // 8))


def scale(rW, weight_offset):
    """``weight_offset + weight`` in fp32."""
    w = widen(rW)
    return w + weight_offset if weight_offset else w
