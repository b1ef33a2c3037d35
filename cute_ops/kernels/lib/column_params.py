"""Per-column parameters of a row: weight and bias, whatever their dtype and alignment."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32, Int64, const_expr

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.lib.copy import fragment, load, load_elements, load_if, load_masked, widen

WORD_BYTES = 4
REALIGNED = 2, 4  # bytes of elements that are picked from aligned loads; others are loaded one by one
# Selectors of a byte permutation of two words: the lower word, and the four bytes from the lower word's middle on.
LOWER, MIDDLE = 0x3210, 0x5432


def column_vectors(mW, key, tile, first, ks=None):
    """A parameter's elements for the columns of a thread's vectors of a row, which begin at ``first``; all of them, or
    the ``ks``-th.
    """
    v, itemsize = tile.v, ITEMSIZE[key.dtype]
    ks = range(tile.per_thread) if ks is None else ks
    base = mW.iterator.toint()
    aligned = key.align >= min(v.vec * itemsize, VECTOR_BYTES)
    if v.shifted and v.masked and key.align >= VECTOR_BYTES and itemsize in REALIGNED:
        return _realigned(mW.element_type, base, tile, first, ks)
    vectors = []
    for k in ks:
        rW = fragment(mW.element_type, v.vec)
        address = base + Int64(first[k]) * itemsize
        if (v.shifted and v.masked) or not aligned:
            load_elements(rW, address, first[k], Int32(tile.n))
        elif v.masked and tile.ends_outside(k):
            load_masked(rW, address, first[k], Int32(tile.n))
        elif tile.starts_outside(k) or tile.ends_outside(k):
            rW.fill(0)
            load_if(tile.inside(k, first[k], tile.n), rW, address)
        else:
            load(rW, address)
        vectors.append(rW)
    return vectors


def column_elements(mW, key, v, first, n):
    """A parameter's elements at one vector, which begins inside the row or, with shifted rows, before it."""
    itemsize = ITEMSIZE[key.dtype]
    rW = fragment(mW.element_type, v.vec)
    address = mW.iterator.toint() + Int64(first) * itemsize
    if v.masked or key.align < min(v.vec * itemsize, 16):
        load_elements(rW, address, first, n)
    else:
        load(rW, address)
    return rW


def column_vector(mW, key, shifted, vec, first, n):
    """A parameter's ``vec`` elements from column ``first`` on, zeros or any outside of the ``n``, by vectors where the
    parameter starts on one. ``shifted``: whether ``first`` may be no multiple of ``vec``; ``n`` is None where dynamic.
    """
    rW, itemsize = fragment(mW.element_type, vec), ITEMSIZE[key.dtype]
    address = mW.iterator.toint() + Int64(first) * itemsize
    if key.align < min(vec * itemsize, VECTOR_BYTES) or n is None:
        load_elements(rW, address, first, Int32(mW.shape[-1]))
    elif not shifted:
        load_masked(rW, address, first, Int32(n))
    elif key.align < VECTOR_BYTES:
        load_elements(rW, address, first, Int32(n))
    else:
        each = VECTOR_BYTES // itemsize
        rLoaded, last = fragment(mW.element_type, (max(vec // each, 1) + 1) * each), (n - 1) // each
        for i in range(cute.size(rLoaded) // each):
            place = cutlass.min(cutlass.max((first >> each.bit_length() - 1) + i, Int32(0)), Int32(last))
            rPart = cute.make_tensor(rLoaded.iterator + i * each, cute.make_layout(each))
            _load_to_end(rPart, mW.iterator.toint() + Int64(place) * VECTOR_BYTES, place < last, n - last * each)
        _select(rLoaded, rW, first & (each - 1))
    return rW


def _realigned(dtype, base, tile, first, ks):
    """Vectors that start at any element: aligned 16-byte loads, of which the words, and halves of words, are picked.

    One branch on the offset serves several vectors. A thread's only vector is selected without a branch, which loads
    could not cross. Selection goes by whole words: libNVVM 13.0 to 13.5 merges two branches that copy different words
    of one register vector (``tests/core/test_moved_words.py``). It does not look into the PTX that moves halves.

    Nothing past the parameter's end is read; what a vector holds outside the row is undefined and may be NaN.
    """
    size = dtype.width // 8
    each = VECTOR_BYTES // size
    count = max(tile.vec // each, 1) + 1
    last = (tile.n - 1) // each
    # If threads lie whole accesses apart, all vectors of a thread have the same offset in an access, and only those at
    # the row's end reach past the parameter's.
    regular = tile.threads_per_row * tile.vec % each == 0
    loaded = []
    for k in ks:
        rLoaded = fragment(dtype, count * each)
        lower = first[k] >> each.bit_length() - 1
        for i in range(count):
            place = lower + i
            if tile.starts_outside(k):
                place = cutlass.max(place, 0)
            rPart = cute.make_tensor(rLoaded.iterator + i * each, cute.make_layout(each))
            # The last of these accesses lies past the vector's own elements.
            if tile.ends_outside(k, each) or not regular:
                place = cutlass.min(place, last)
                _load_to_end(rPart, base + Int64(place) * VECTOR_BYTES, place < last, tile.n - last * each)
            else:
                load(rPart, base + Int64(place) * VECTOR_BYTES)
        loaded.append(rLoaded)
    vectors = [fragment(dtype, tile.vec) for _ in ks]
    if regular and len(ks) > 1 and tile.threads_per_row >= WARP and dtype.width == 16:
        _branch(loaded, vectors, first[0] & (each - 1))
    else:
        for k, rLoaded, rW in zip(ks, loaded, vectors):
            _select(rLoaded, rW, first[k] & (each - 1))
    return vectors


@cute.jit
def _load_to_end(rPart: cute.Tensor, address: Int64, whole: Boolean, rest: cutlass.Constexpr):
    """Load an access of a parameter. If it is the last one, which has ``rest`` elements, load pieces of powers of two.

    The loads are relaxed, because the assembler would merge plain ones into a wide one.
    """
    if const_expr(rest == cute.size(rPart)):
        load(rPart, address)
    else:
        load_if(whole, rPart, address)
        size, place = rPart.element_type.width // 8, 0
        for power in (4, 2, 1):
            if const_expr(rest & power):
                _load_piece(not whole, rPart, address, place, power * size)
                place += power


@cute.jit
def _load_piece(
    here: Boolean, rX: cute.Tensor, address: Int64, place: cutlass.Constexpr, bytes_: cutlass.Constexpr
):  # fmt: skip
    """A number of bytes of a vector, from an element on."""
    bits = {2: Int16, 4: Int32, 8: Int64}[bytes_]
    size = rX.element_type.width // 8
    if here:
        source = cute.make_ptr(bits, address + place * size, cute.AddressSpace.gmem, assumed_align=bytes_)
        found = fragment(bits, 1)
        found[0] = cute.arch.load(source, bits, sem="relaxed", scope="cta")
        # The layout is made anew: that of a single number would have no stride.
        pointer = cute.recast_ptr(found.iterator, dtype=rX.element_type)
        elements = cute.make_tensor(pointer, cute.make_layout(bytes_ // size))
        for j in cutlass.range_constexpr(bytes_ // size):
            rX[place + j] = elements[j]


@cute.jit
def _branch(loaded: cutlass.Constexpr, vectors: cutlass.Constexpr, offset: Int32):
    """Vectors that begin ``offset`` elements past what was loaded; all threads of a row take one branch."""
    per_word = WORD_BYTES * 8 // vectors[0].element_type.width
    if offset < 2 * per_word:
        if offset < per_word:
            _take(loaded, vectors, 0, offset)
        else:
            _take(loaded, vectors, 1, offset)
    else:
        if offset < 3 * per_word:
            _take(loaded, vectors, 2, offset)
        else:
            _take(loaded, vectors, 3, offset)


def _take(loaded, vectors, skip, offset):
    for rLoaded, rW in zip(loaded, vectors):
        rWords = cute.recast_tensor(rLoaded, Int32)
        _join([rWords[i] for i in range(skip, cute.size(rWords))], rW, offset)


def _select(rLoaded, rW, offset):
    """One vector that begins ``offset`` elements past what was loaded, without a branch."""
    rWords = cute.recast_tensor(rLoaded, Int32)
    words = [rWords[i] for i in range(cute.size(rWords))]
    per_word = WORD_BYTES * 8 // rW.element_type.width
    needed = cute.size(rW) // per_word + per_word - 1
    skip = offset >> per_word - 1
    for step in (2, 1):
        words = [
            cutlass.select_((skip & step) != 0, words[min(i + step, len(words) - 1)], words[i])
            for i in range(min(len(words), needed + step - 1))
        ]
    _join(words, rW, offset)


def _join(words, rW, offset):
    """Put words, or the halves of neighbouring ones, into a vector."""
    rOut = cute.recast_tensor(rW, Int32)
    selector = cutlass.select_((offset & 1) != 0, Int32(MIDDLE), Int32(LOWER))
    for i in range(cute.size(rOut)):
        whole = rW.element_type.width == WORD_BYTES * 8
        rOut[i] = words[i] if whole else cute.arch.prmt(words[i], words[i + 1], selector)


def scale(rW, weight_offset):
    """``weight_offset + weight`` in fp32."""
    w = widen(rW)
    return w + weight_offset if weight_offset else w


def affine(y, rWeight, rBias, weight_offset):
    """``y * (weight_offset + weight) + bias`` in fp32, without what is None."""
    if rWeight is not None:
        y = y * scale(rWeight, weight_offset)
    return y if rBias is None else y + widen(rBias)
