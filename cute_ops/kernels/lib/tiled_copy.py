"""CuTe's tiled copies for rows of whole vectors: a layout of lanes, each of which holds a vector of a tile."""

import cutlass.cute as cute
from cutlass import Boolean

from cute_ops.kernels.lib.copy import access_bits, fragment
from cute_ops.kernels.lib.row_layout import row_count


def as_rows(mX, key, n):
    """A tensor as (rows, n). Rows are counted in 64 bits and in row-major order."""
    if key.layout == "flat":
        return cute.make_tensor(mX.iterator, cute.make_layout((row_count(mX), n), stride=(n, 1)))
    leading = len(mX.shape) - 1
    layout = cute.select(mX.layout, mode=[*reversed(range(leading)), leading])
    return cute.make_tensor(mX.iterator, cute.group_modes(layout, 0, leading))


def lane_copy(op, dtype, lanes, vec, lane, **cache_mode):
    """A lane's slice of a tiled copy of ``lanes`` lanes, which hold neighbouring vectors."""
    atom = cute.make_copy_atom(op, dtype, num_bits_per_copy=access_bits(dtype, vec), **cache_mode)
    return cute.make_tiled_copy_tv(atom, cute.make_layout((lanes,)), cute.make_layout((vec,))).get_slice(lane)


def load_vector(copy, tXgX):
    """A lane's vector, ((access, accesses)), in registers."""
    rX = fragment(tXgX.element_type, cute.size(tXgX))
    cute.copy(copy, tXgX, cute.make_tensor(rX.iterator, tXgX.layout.shape))
    return rX


def store_vector(copy, rX, tXgX, inside=True):
    """Store a lane's vector if ``inside``; all its accesses have this one predicate, (accesses)."""
    tXpX = None
    if inside is not True:
        rInside = fragment(Boolean, 1)
        rInside[0] = inside
        tXpX = cute.make_tensor(rInside.iterator, cute.make_layout((cute.size(tXgX, mode=[0, 1]),), stride=(0,)))
    cute.copy(copy, cute.make_tensor(rX.iterator, tXgX.layout.shape), tXgX, pred=tXpX)
