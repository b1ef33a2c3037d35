"""One thread's vector of a row: global memory to registers and back, masked at the row's edges.

Fragments are flat, ``vec`` elements; an access moves at most 16 bytes, so a vector of a wide dtype takes several.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import CopyG2ROp, CopyR2GOp, LoadCacheMode, StoreCacheMode

MAX_BITS = 128


def access_bits(dtype, vec):
    return min(vec * dtype.width, MAX_BITS)


def pieces(dtype, vec):
    """A vector as a layout of accesses: (elements of one access, accesses)."""
    width = access_bits(dtype, vec) // dtype.width
    return cute.make_layout((width, vec // width))


def gmem_vector(dtype, address, vec):
    """View of ``vec`` elements at a byte address that is aligned to one access."""
    align = access_bits(dtype, vec) // 8
    return cute.make_tensor(
        cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align), pieces(dtype, vec)
    )


def gmem_elements(dtype, address, vec):
    return cute.make_tensor(cute.make_ptr(dtype, address, cute.AddressSpace.gmem), cute.make_layout(vec))


def fragment(dtype, vec):
    return cute.make_rmem_tensor((vec,), dtype)


def load(rX, address, streaming=False):
    """Load a whole vector. ``streaming`` marks what is read once."""
    dtype, vec = rX.element_type, cute.size(rX)
    mode = LoadCacheMode.STREAMING if streaming else LoadCacheMode.ALWAYS
    atom = cute.make_copy_atom(
        CopyG2ROp(), dtype, num_bits_per_copy=access_bits(dtype, vec), load_cache_mode=mode
    )
    cute.copy(atom, gmem_vector(dtype, address, vec), cute.make_tensor(rX.iterator, pieces(dtype, vec)))


def store(rX, address, streaming=False):
    """Store a whole vector. ``streaming`` marks what is not read again soon."""
    dtype, vec = rX.element_type, cute.size(rX)
    mode = StoreCacheMode.STREAMING if streaming else StoreCacheMode.WRITE_BACK
    atom = cute.make_copy_atom(
        CopyR2GOp(), dtype, num_bits_per_copy=access_bits(dtype, vec), store_cache_mode=mode
    )
    cute.copy(atom, cute.make_tensor(rX.iterator, pieces(dtype, vec)), gmem_vector(dtype, address, vec))


@cute.jit
def load_if(valid: Boolean, rX: cute.Tensor, address: Int64, streaming: cutlass.Constexpr = False):
    """Load a vector that holds at least one wanted element; keep the fragment as it is elsewhere."""
    if valid:
        load(rX, address, streaming)


@cute.jit
def store_if(valid: Boolean, rX: cute.Tensor, address: Int64, streaming: cutlass.Constexpr = False):
    if valid:
        store(rX, address, streaming)


@cute.jit
def load_elements(rX: cute.Tensor, address: Int64, first: Int32, n: Int32):
    """Load those of the columns ``first + j`` that lie in ``[0, n)``, one by one; zeros for the others."""
    rX.fill(0)
    gX = gmem_elements(rX.element_type, address, cute.size(rX))
    for j in cutlass.range_constexpr(cute.size(rX)):
        if first + j >= 0 and first + j < n:
            rX[j] = gX[j]


@cute.jit
def store_elements(rX: cute.Tensor, address: Int64, first: Int32, n: Int32):
    gX = gmem_elements(rX.element_type, address, cute.size(rX))
    for j in cutlass.range_constexpr(cute.size(rX)):
        if first + j >= 0 and first + j < n:
            gX[j] = rX[j]


@cute.jit
def store_masked(rX: cute.Tensor, address: Int64, first: Int32, n: Int32, streaming: cutlass.Constexpr = False):
    """Store the columns ``first + j`` that lie in ``[0, n)``: in one go where all do, else one by one."""
    if first >= 0 and first + cute.size(rX) <= n:
        store(rX, address, streaming)
    else:
        store_elements(rX, address, first, n)


def widen(rX, first, n, low, high):
    """The fragment in fp32, zero outside the row. A select, no product: a neighbouring row may hold NaN.

    Args:
        low, high: whether the vector may begin before, or end after, the row.
    """
    x = rX.load().to(Float32)
    if not (low or high):
        return x
    rF = fragment(Float32, cute.size(rX))
    rF.store(x)
    for j in range(cute.size(rX)):
        column = first + j
        inside = column >= 0 if not high else column < n if not low else (column >= 0) & (column < n)
        rF[j] = cutlass.select_(inside, rF[j], Float32(0.0))
    return rF.load()


def narrow(x, dtype, vec):
    """An fp32 vector rounded to a fragment of a dtype."""
    rX = fragment(dtype, vec)
    rX.store(x.to(dtype))
    return rX
