"""One thread's vector of a row: global memory to registers and back, masked at the row's edges.

Fragments are flat, ``vec`` elements; an access moves at most 16 bytes, so a vector of a wide dtype takes several.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int16, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import CopyG2ROp, CopyR2GOp, LoadCacheMode, StoreCacheMode

MAX_BITS, WORD_BITS = 128, 32
UPPER_HALF = -65536  # of a word
BITS = {8: Uint8, 16: Int16, 32: Int32}
AHEAD = 2048  # CTAs that prefetch: those that may start beside the previous kernel's; for later ones it only costs


def access_bits(dtype, vec):
    return min(vec * dtype.width, MAX_BITS)


def pieces(dtype, vec):
    """A vector as a layout of accesses: (elements of one access, accesses)."""
    width = access_bits(dtype, vec) // dtype.width
    return cute.make_layout((width, vec // width))


def gmem_pointer(dtype, address, vec):
    """A byte address that is aligned to one access."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=access_bits(dtype, vec) // 8)


def gmem_vector(dtype, address, vec):
    """View of ``vec`` elements at a byte address that is aligned to one access."""
    return cute.make_tensor(gmem_pointer(dtype, address, vec), pieces(dtype, vec))


def gmem_elements(dtype, address, vec):
    return cute.make_tensor(cute.make_ptr(dtype, address, cute.AddressSpace.gmem), cute.make_layout(vec))


def fragment(dtype, vec, value=None):
    """``vec`` elements in registers, undefined or all of one value."""
    rX = cute.make_rmem_tensor((vec,), dtype)
    if value is not None:
        rX.fill(value)
    return rX


def copy_vector(atom, dtype, vec, source, target):
    """Copy a vector from a pointer to another. A single access is the atom's own call, which is traced faster."""
    one = vec == access_bits(dtype, vec) // dtype.width
    layout = cute.make_layout((vec,)) if one else pieces(dtype, vec)
    copy = cute.copy_atom_call if one else cute.copy
    copy(atom, cute.make_tensor(source, layout), cute.make_tensor(target, layout))


def load(rX, address, shared=False):
    """Load a whole vector. ``shared``: from L2, past what L1 holds.

    No evict-first hint: when neighbouring kernels fill L2, hinted lines are evicted early and this kernel runs 5%
    slower.
    """
    dtype, vec = rX.element_type, cute.size(rX)
    mode = LoadCacheMode.GLOBAL if shared else LoadCacheMode.ALWAYS
    atom = cute.make_copy_atom(CopyG2ROp(), dtype, num_bits_per_copy=access_bits(dtype, vec), load_cache_mode=mode)
    copy_vector(atom, dtype, vec, gmem_pointer(dtype, address, vec), rX.iterator)


def fetch_ahead(address, predicate):
    """Prefetch a line to L2. This is safe while an earlier kernel may still write the line: all writes meet in L2."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address], predicate=predicate)


def store(rX, address, streaming=False):
    """Store a whole vector. ``streaming`` marks what is not read again soon."""
    dtype, vec = rX.element_type, cute.size(rX)
    mode = StoreCacheMode.STREAMING if streaming else StoreCacheMode.WRITE_BACK
    atom = cute.make_copy_atom(CopyR2GOp(), dtype, num_bits_per_copy=access_bits(dtype, vec), store_cache_mode=mode)
    copy_vector(atom, dtype, vec, rX.iterator, gmem_pointer(dtype, address, vec))


@cute.jit
def load_if(valid: Boolean, rX: cute.Tensor, address: Int64, shared: cutlass.Constexpr = False):
    """Load a vector if ``valid``, which means that it holds an element to read; else leave the fragment as it is."""
    if valid:
        load(rX, address, shared)


@cute.jit
def load_inside(
    valid: Boolean, rX: cute.Tensor, address: Int64, room: Int32, shared: cutlass.Constexpr = False
):  # fmt: skip
    """Load a vector, if ``valid``, of which only the first ``room`` elements may be read: one load if these are all of
    it, else one load per element.

    The rest is on the same page, so reading it would not fault, but memory checkers report it.
    """
    if valid:
        if room >= cute.size(rX):
            load(rX, address, shared)
        else:
            load_first(rX, address, room)


@cute.jit
def load_first(rX: cute.Tensor, address: Int64, room: Int32):
    """The first ``room`` elements of a vector, zeros for the others.

    The loads are relaxed, because the assembler merges plain ones whose address it knows to be aligned into a wide one.
    """
    rX.fill(0)
    bits = BITS[rX.element_type.width]
    rBits, gBits = cute.recast_tensor(rX, bits), gmem_elements(bits, compiler_barrier_value(address), cute.size(rX))
    for j in cutlass.range_constexpr(cute.size(rX)):
        if j < room:
            rBits[j] = cute.arch.load(gBits.iterator + j, bits, sem="relaxed", scope="cta")


@cute.jit
def load_first_if(valid: Boolean, rX: cute.Tensor, address: Int64, room: Int32):
    if valid:
        load_first(rX, address, room)


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
def load_masked(rX: cute.Tensor, address: Int64, first: Int32, n: Int32):
    """Load the columns ``first + j`` that lie in ``[0, n)``: by one load if all do, else one by one."""
    if first >= 0 and first + cute.size(rX) <= n:
        load(rX, address)
    else:
        load_elements(rX, address, first, n)


@cute.jit
def store_elements(rX: cute.Tensor, address: Int64, first: Int32, n: Int32):
    gX = gmem_elements(rX.element_type, address, cute.size(rX))
    for j in cutlass.range_constexpr(cute.size(rX)):
        if first + j >= 0 and first + j < n:
            gX[j] = rX[j]


@cute.jit
def store_masked(
    rX: cute.Tensor, address: Int64, first: Int32, n: Int32, streaming: cutlass.Constexpr = False,
    pieces: cutlass.Constexpr = False,
):  # fmt: skip
    """Store the columns ``first + j`` that lie in ``[0, n)``: by one store if all do, else one by one, or by ``pieces``
    of powers of two, if rows have at least a vector.
    """
    if const_expr(cute.size(rX) * rX.element_type.width % 32 == 0):
        # Without the barrier every element would be recomputed before it is stored.
        compiler_barrier(rX)
    if first >= 0 and first + cute.size(rX) <= n:
        store(rX, address, streaming)
    elif const_expr(not (pieces and _in_words(rX))):
        store_elements(rX, compiler_barrier_value(address), first, n)
    else:
        # Of a row that does not exist n is 0.
        count = cutlass.select_(n > 0, cutlass.min(first + cute.size(rX), n - first), Int32(0))
        _store_end(rX, address, first < 0, Int32(count))


def _in_words(rX):
    """Whether a vector is a power of two of words, and of elements no wider."""
    words = cute.size(rX) * rX.element_type.width // WORD_BITS
    return words > 0 and words & (words - 1) == 0 and rX.element_type.width <= WORD_BITS


@cute.jit
def _store_end(rX: cute.Tensor, address: Int64, last: Boolean, count: Int32):
    """Store the ``last`` or else the first ``count`` elements of a vector that is aligned in memory, of which the
    vector has more: by at most one store of each power of two, since L2 takes each store by itself.
    """
    rWords = cute.recast_tensor(rX, Int32)
    words = [rWords[i] for i in range(cute.size(rWords))]
    half, bits = cute.size(rX) // 2, rX.element_type.width
    place = compiler_barrier_value(address)
    for _ in cutlass.range_constexpr((cute.size(rX) - 1).bit_length()):
        # Half of what is left is stored or not, and the other half is left.
        piece, upper = _half(words, last, half * bits), last != ((count & half) != 0)
        step = Int64(half * bits // 8)
        if (count > 0) & ((count & half) != 0):
            _store_piece(piece, place + cutlass.select_(last, step, Int64(0)), half * bits)
        words, place = _half(words, upper, half * bits), place + cutlass.select_(upper, step, Int64(0))
        half //= 2


def _half(words, upper, bits):
    """The upper or the lower half of some words, or of one, with so many bits each."""
    if len(words) == 1:
        return [cutlass.select_(upper, words[0] >> bits, words[0])]
    return [
        Int32(cutlass.select_(upper, high, low))
        for low, high in zip(words[: len(words) // 2], words[len(words) // 2 :])
    ]


def _store_piece(words, address, bits):
    kind = BITS[min(bits, WORD_BITS)]
    rPiece = fragment(kind, len(words))
    for i, word in enumerate(words):
        rPiece[i] = kind(word)
    store(rPiece, address)


@cute.jit
def fill_outside(tX: cute.Tensor, first: Int32, n: Int32, value: cutlass.Constexpr = 0):
    """Overwrite the elements whose columns ``first + j`` lie outside the row; they may be a neighbouring row's NaN."""
    for j in cutlass.range_constexpr(cute.size(tX)):
        if first + j < 0 or first + j >= n:
            tX[j] = tX.element_type(value)


@cute.jit
def trim(rX: cute.Tensor, first: Int32, n: Int32, value: cutlass.Constexpr = 0):
    """:func:`fill_outside`, in a branch that only the few threads at a row's ends take."""
    if first < 0 or first + cute.size(rX) > n:
        fill_outside(rX, first, n, value)


def trimmed(x, first, n):
    """An fp32 vector with zeros outside the row."""
    rX = fragment(Float32, cute.size(x.shape))
    rX.store(x)
    trim(rX, first, n)
    return rX.load()


class Inside:
    """Which elements of a vector, whose first of ``vec`` is column ``first``, lie in the columns ``[0, end)``.

    Args:
        whole: whether it is known at compile time that all do.
    """

    def __init__(self, vec, first, end, whole=False):
        self.vec, self.first, self.end, self.whole = vec, first, end, whole

    def only(self, x):
        """The fp32 vector with zeros in place of the elements outside."""
        return x if self.whole else trimmed(x, self.first, self.end)

    def count(self):
        """The number of elements inside, in fp32."""
        if self.whole:
            return Float32(self.vec)
        last = cutlass.min(self.first + self.vec, self.end)
        return Float32(cutlass.max(last - cutlass.max(self.first, Int32(0)), Int32(0)))


def compiler_barrier(rX):
    """Hide from the compiler how a fragment was computed, so that it keeps the fragment and not a wider form of it."""
    rW = cute.recast_tensor(rX, Int32)
    for j in range(cute.size(rW)):
        rW[j] = cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[rW[j]])


def compiler_barrier_value(number):
    """A number with its origin hidden from the compiler, so that it is not recomputed."""
    kind = type(number)
    ptx = f"mov.b{kind.width} {{$w0}}, {{$r0}};"
    return cute.arch.inline_ptx(ptx, write_only_types=[kind], read_only_args=[number])


def widen(rX):
    """A vector in fp32.

    The two bfloat16 numbers of a word take one instruction each. Taking them apart first costs the upper one another.
    """
    if rX.element_type != BFloat16 or cute.size(rX) % 2:
        return rX.load().to(Float32)
    rWords, rWide = cute.recast_tensor(rX, Int32), fragment(Float32, cute.size(rX))
    for j in range(cute.size(rWords)):
        rWide[2 * j] = (rWords[j] << 16).bitcast(Float32)
        rWide[2 * j + 1] = (rWords[j] & UPPER_HALF).bitcast(Float32)
    return rWide.load()


def widen_late(vectors):
    """Vectors in fp32, no earlier than here: until then they take the registers of their own dtype."""
    for rX in vectors:
        if cute.size(rX) * rX.element_type.width >= 32:
            compiler_barrier(rX)
    return tuple(rX.load().to(Float32) for rX in vectors)


def narrow(x, dtype, vec):
    """An fp32 vector rounded to a fragment of a dtype."""
    rX = fragment(dtype, vec)
    rX.store(x.to(dtype))
    return rX
