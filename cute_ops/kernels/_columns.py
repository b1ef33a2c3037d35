"""Per-column parameters of a row: weight and bias, whatever their dtype and alignment."""

import cutlass.cute as cute
from cutlass import Float32, Int64

from cute_ops.kernels._rows import ITEMSIZE
from cute_ops.kernels._vectors import fragment, load, load_elements, load_if


def is_wide(vectors, key):
    """Whether a parameter can be read by whole vectors: they start and end where those of the rows do."""
    needed = min(vectors.vec * ITEMSIZE[key.dtype], 16)
    return not vectors.masked and key.align >= needed


def column_vector(mW, key, vectors, first, n, guard):
    """A parameter's elements for the columns ``first ...``.

    Args:
        guard: whether some of the columns may lie outside the row.
    """
    rW = fragment(mW.element_type, vectors.vec)
    address = mW.iterator.toint() + Int64(first) * (mW.element_type.width // 8)
    if not is_wide(vectors, key):
        load_elements(rW, address, first, n)
    elif guard:
        rW.fill(0)
        load_if(first < n, rW, address)
    else:
        load(rW, address)
    return rW


def scale(rW, weight_offset):
    """``weight_offset + weight`` in fp32."""
    w = rW.load().to(Float32)
    return w + weight_offset if weight_offset else w
