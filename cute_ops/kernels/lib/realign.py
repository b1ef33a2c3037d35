"""Vectors that begin at any element: the two aligned vectors that contain one are loaded, and its words are moved.

Loads stay 16 bytes wide wherever a row starts. Neighbouring threads share every aligned vector, so its second load hits
L1.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from cute_ops.kernels.lib.copy import fragment, load, load_first

WORD_BYTES = 4
# Selector of a byte permutation of two words that takes the lower one; what is added for each byte further up.
LOWER, NEXT_BYTE = 0x3210, 0x1111


def bytes_past(address, dtype, vec):
    """Bytes between the start of the aligned vector that contains an address, and the address."""
    return Int32(address & (vec * dtype.width // 8 - 1))


@cute.jit
def fetch(rPair: cute.Tensor, address: Int64, begin: Int32, end: Int32, bound: Int32, tail: Boolean):
    """Load two neighbouring aligned vectors if they contain a column of the row, without elements that may not be read:
    :meth:`RowTile.edge` gives ``bound`` and ``tail``.

    The lower one, at ``address``, begins with the column ``begin``, above ``-2 * vec``. The row ends at the column
    ``end``, which is negative if there is no row.
    """
    vec = cute.size(rPair) // 2
    for i in cutlass.range_constexpr(2):
        first = begin + i * vec
        if (first + vec > 0) & (first < cutlass.min(end, bound)):
            load(_half(rPair, i), address + i * _bytes(rPair) // 2)
    if tail:
        for i in cutlass.range_constexpr(2):
            first = begin + i * vec
            if (first >= bound) & (first < end):
                load_first(_half(rPair, i), address + i * _bytes(rPair) // 2, end - first)


def _half(rPair, i):
    vec = cute.size(rPair) // 2
    return cute.make_tensor(rPair.iterator + i * vec, cute.make_layout(vec))


def settle(rPair, past):
    """The vector that begins ``past`` bytes, a static number or not, after the beginning of a pair."""
    words, vec = _bytes(rPair) // 2 // WORD_BYTES, cute.size(rPair) // 2
    rWords = cute.recast_tensor(rPair, Int32)
    found = [rWords[i] for i in range(2 * words)]
    rX = fragment(rPair.element_type, vec)
    rOut = cute.recast_tensor(rX, Int32)
    if isinstance(past, int):
        found = found[past // WORD_BYTES :]
        selector = None if past % WORD_BYTES == 0 else Int32(LOWER + past % WORD_BYTES * NEXT_BYTE)
    else:
        step = words // 2
        while step > 0:
            last = len(found) - 1
            found = [
                cutlass.select_((past & (step * WORD_BYTES)) != 0, found[min(i + step, last)], found[i])
                for i in range(min(len(found), words + step))
            ]
            step //= 2
        whole = rPair.element_type.width // 8 >= WORD_BYTES
        selector = None if whole else LOWER + (past & (WORD_BYTES - 1)) * NEXT_BYTE
    for i in range(words):
        rOut[i] = found[i] if selector is None else cute.arch.prmt(found[i], found[i + 1], selector)
    return rX


@cute.jit
def settle_all(pairs: cutlass.Constexpr, past: Int32):
    """The vectors that begin ``past`` bytes into several pairs, by a branch that all threads of a row take together.

    Each word goes through a byte permutation, even if it is copied whole: libNVVM merges branches that only copy words,
    see :mod:`cute_ops.kernels.lib.column_params`.
    """
    vec, words = cute.size(pairs[0]) // 2, _bytes(pairs[0]) // 2 // WORD_BYTES
    found = [fragment(rPair.element_type, vec) for rPair in pairs]
    if const_expr(words == 4):
        if past < 2 * WORD_BYTES:
            _take_either(pairs, found, 0, past)
        else:
            _take_either(pairs, found, 2, past)
    elif const_expr(words == 2):
        _take_either(pairs, found, 0, past)
    else:
        _take(pairs, found, 0, past)
    return found


@cute.jit
def _take_either(pairs: cutlass.Constexpr, found: cutlass.Constexpr, skip: cutlass.Constexpr, past: Int32):
    if past < (skip + 1) * WORD_BYTES:
        _take(pairs, found, skip, past)
    else:
        _take(pairs, found, skip + 1, past)


def _take(pairs, found, skip, past):
    """The words that begin ``skip`` words and ``past % 4`` bytes after the beginning of each pair."""
    selector = LOWER + (past & (WORD_BYTES - 1)) * NEXT_BYTE
    for rPair, rX in zip(pairs, found):
        rWords, rOut = cute.recast_tensor(rPair, Int32), cute.recast_tensor(rX, Int32)
        for i in range(cute.size(rOut)):
            rOut[i] = cute.arch.prmt(rWords[skip + i], rWords[skip + i + 1], selector)


def _bytes(rX):
    return cute.size(rX) * rX.element_type.width // 8
