"""One thread's vector of a row: global memory to registers or shared memory and back, masked at the row's edges."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import CopyG2ROp, CopyR2GOp, LoadCacheMode, StoreCacheMode, cpasync

MAX_BITS = 128


def pieces(dtype, vec):
    """A vector as a layout of widest accesses: (elements of one access, accesses)."""
    width = min(vec, MAX_BITS // dtype.width)
    return cute.make_layout((width, vec // width))


def access_bytes(dtype, vec):
    return min(vec, MAX_BITS // dtype.width) * dtype.width // 8


def global_vector(dtype, address, vec):
    """View of ``vec`` elements at a byte address that is aligned to one access."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=access_bytes(dtype, vec))
    return cute.make_tensor(pointer, pieces(dtype, vec))


def load_atom(dtype, vec, streaming):
    mode = LoadCacheMode.STREAMING if streaming else LoadCacheMode.ALWAYS
    return cute.make_copy_atom(
        CopyG2ROp(), dtype, num_bits_per_copy=access_bytes(dtype, vec) * 8, load_cache_mode=mode
    )


def store_atom(dtype, vec, streaming):
    mode = StoreCacheMode.STREAMING if streaming else StoreCacheMode.WRITE_BACK
    return cute.make_copy_atom(
        CopyR2GOp(), dtype, num_bits_per_copy=access_bytes(dtype, vec) * 8, store_cache_mode=mode
    )


def fragment(dtype, vec):
    return cute.make_rmem_tensor(pieces(dtype, vec), dtype)


def load(dtype, address, vec, streaming=False):
    """Unconditional load of a vector into registers."""
    rX = fragment(dtype, vec)
    cute.copy(load_atom(dtype, vec, streaming), global_vector(dtype, address, vec), rX)
    return rX


def store(rX, address, vec, streaming=False):
    dtype = rX.element_type
    cute.copy(store_atom(dtype, vec, streaming), rX, global_vector(dtype, address, vec))


@cute.jit
def load_if(valid: Boolean, rX: cute.Tensor, address: cutlass.Int64, vec: cutlass.Constexpr[int],
            streaming: cutlass.Constexpr[bool]):
    """Load a vector that holds at least one wanted element; leave the fragment alone elsewhere."""
    if valid:
        dtype = rX.element_type
        cute.copy(load_atom(dtype, vec, streaming), global_vector(dtype, address, vec), rX)


@cute.jit
def load_elements(rX: cute.Tensor, address: cutlass.Int64, first: Int32, low: Int32, n: Int32):
    """Element-wise load of the columns ``first ...`` that lie in ``[low, n)``; zeros elsewhere."""
    rX.fill(0)
    gX = cute.make_tensor(
        cute.make_ptr(rX.element_type, address, cute.AddressSpace.gmem), cute.make_layout(cute.size(rX))
    )
    for j in cutlass.range_constexpr(cute.size(rX)):
        if first + j >= low and first + j < n:
            rX[j] = gX[j]


@cute.jit
def store_masked(rX: cute.Tensor, address: cutlass.Int64, first: Int32, n: Int32, vec: cutlass.Constexpr[int]):
    """Store the columns ``first ...`` that lie in ``[0, n)``: whole where all do, else one by one."""
    if first >= 0 and first + vec <= n:
        store(rX, address, vec)
    else:
        gX = cute.make_tensor(
            cute.make_ptr(rX.element_type, address, cute.AddressSpace.gmem), cute.make_layout(vec)
        )
        for j in cutlass.range_constexpr(vec):
            if first + j >= 0 and first + j < n:
                gX[j] = rX[j]


def keep_inside(rX, first, n, low, high):
    """Zero the fp32 elements whose columns ``first + j`` fall outside the row; not a product, as a neighbour may be NaN.

    Args:
        low, high: whether the vector may begin before, or end after, the row.
    """
    for j in range(cute.size(rX)):
        column = first + j
        if low and high:
            rX[j] = rX[j] if (column >= 0 and column < n) else Float32(0.0)
