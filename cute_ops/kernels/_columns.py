"""Per-column parameters of a row: weight and bias, whatever their dtype and alignment."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_ops.kernels._rows import ITEMSIZE
from cute_ops.kernels._vectors import fragment, load, load_elements, load_if

WORD_BYTES = 4
# Selectors of a byte permutation of two words: the lower word, and the four bytes from the lower word's middle on.
LOWER, MIDDLE = 0x3210, 0x5432


def column_vector(mW, key, tile, first, k):
    """A parameter's elements for the columns ``first ...`` of a row tile's k-th vectors."""
    v, itemsize = tile.v, ITEMSIZE[key.dtype]
    base = mW.iterator.toint()
    address = base + Int64(first) * itemsize
    aligned = key.align >= min(v.vec * itemsize, 16)
    if v.shifted and aligned and v.vec * itemsize == 16:
        return _realigned(mW.element_type, base, tile, first)
    rW = fragment(mW.element_type, v.vec)
    if v.masked or not aligned:
        load_elements(rW, address, first, Int32(tile.n))
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
    rWords = cute.recast_tensor(rPair, Int32)
    words = [rWords[i] for i in range(8)]
    offset = first - lower * vec
    per_word = WORD_BYTES * 8 // dtype.width
    skip = offset // per_word
    for step in (2, 1):
        words = [
            cutlass.select_((skip & step) != 0, words[min(i + step, len(words) - 1)], words[i])
            for i in range(min(len(words), 4 + step))
        ]
    rW = fragment(dtype, vec)
    rOut = cute.recast_tensor(rW, Int32)
    if per_word == 1:
        for i in range(4):
            rOut[i] = words[i]
    else:
        selector = cutlass.select_((offset & 1) != 0, Int32(MIDDLE), Int32(LOWER))
        for i in range(4):
            rOut[i] = cute.arch.prmt(words[i], words[i + 1], selector)
    return rW


def scale(rW, weight_offset):
    """``weight_offset + weight`` in fp32."""
    w = rW.load().to(Float32)
    return w + weight_offset if weight_offset else w
