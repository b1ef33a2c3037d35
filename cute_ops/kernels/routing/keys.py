"""Numbers as integers of the same order, with the column that tells equal ones apart.

An integer has 32 bits; that of a 16-bit number is in the upper half. -0 is 0, and NaN, of either sign, is above
infinity. A key holds the integer and, below it, the column counted backwards from ``LAST``: of equal numbers the one of
the lower column has the larger key. Keys of 16-bit numbers have 32 bits, of wider ones 64.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int16, Int32, Int64

from cute_ops.kernels.lib.copy import UPPER_HALF, fragment

MOST, LEAST = 0x7FFFFFFF, -0x80000000
LAST = 0xFFFF
# An integer below those of all numbers, as a key of it is that loses up to half of its columns. The word of two.
NONE, NONES = LEAST + 0x10000, LEAST + 0x18001
# In both halves of a word: all bits but the sign.
BELOW_SIGNS = 0x7FFF7FFF
# The byte permutation that fills each half of a word with copies of its sign.
SIGNS = 0xBB99
# Both numbers of a word plus zero, by whether they are bfloat16.
_PLUS_ZERO = {
    bfloat: f"{{ .reg .b32 one, none; mov.b32 one, {one:#x}; mov.b32 none, 0; "
    f"fma.rn.{kind} {{$w0}}, {{$r0}}, one, none; }}"
    for bfloat, kind, one in ((True, "bf16x2", 0x3F803F80), (False, "f16x2", 0x3C003C00))
}


# The larger numbers of both halves of two words; NaN where one is.
_LARGER = {b: f"max.NaN.{'b' if b else ''}f16x2 {{$w0}}, {{$r0}}, {{$r1}};" for b in (True, False)}
# Byte permutations that make words of the lower and of the upper halves of two.
LOWER, UPPER = 0x5410, 0x7632


def key_type(itemsize):
    return Int32 if itemsize == 2 else Int64


def order(rX):
    """The integers of a vector's numbers, in words that hold two of 16 bits."""
    if rX.element_type.width == 32:
        rWords = fragment(Int32, cute.size(rX))
        for j in range(cute.size(rX)):
            rWords[j] = _ordered(rX[j])
        return rWords
    if cute.size(rX) == 1:
        rWords = fragment(Int32, 1)
        rWords[0] = Int32(cute.recast_tensor(rX, Int16)[0])
    else:
        rWords = cute.recast_tensor(rX, Int32)
    for i in range(cute.size(rWords)):
        rWords[i] = _ordered_pair(rWords[i], rX.element_type == BFloat16)
    return rWords


def tops(vectors):
    """The integer of each vector's largest number."""
    if vectors[0].element_type.width == 32:
        return [_ordered(_largest([rX[j] for j in range(cute.size(rX))])) for rX in vectors]
    bfloat, words = vectors[0].element_type == BFloat16, []
    for rX in vectors:
        rWords = cute.recast_tensor(rX, Int32)
        words.append(_halving([rWords[i] for i in range(cute.size(rWords))], lambda a, b: _larger(a, b, bfloat)))
    found = []
    for one, other in zip(words[::2], [*words, words[-1]][1::2]):
        halves = [cute.arch.prmt(one, other, select) for select in (LOWER, UPPER)]
        word = _ordered_pair(_larger(*halves, bfloat), bfloat)
        found += [word << 16, word & UPPER_HALF]
    return found[: len(vectors)]


def _larger(one, other, bfloat):
    return cute.arch.inline_ptx(_LARGER[bfloat], write_only_types=[Int32], read_only_args=[one, other])


def _largest(numbers):
    return _halving(numbers, lambda a, b: cute.arch.fmax(a, b, nan=True))


def _halving(each, combine):
    while len(each) > 1:
        each = [combine(a, b) for a, b in zip(each[::2], each[1::2])] + each[len(each) // 2 * 2 :]
    return each[0]


def _ordered(x):
    return Int32(cutlass.select_(x == x, ordered_number(x), Int32(MOST)))


def ordered_number(x):
    """The integer of a number that is not NaN."""
    # Adding zero makes -0 the number that is equal to it.
    bits = (x + Float32(0.0)).bitcast(Int32)
    return bits ^ ((bits >> 31) & Int32(MOST))


def _ordered_pair(word, bfloat):
    # x * 1 + 0 makes -0 the number that is equal to it, and gives every NaN the same bits without a sign.
    word = cute.arch.inline_ptx(_PLUS_ZERO[bfloat], write_only_types=[Int32], read_only_args=[word])
    return word ^ (cute.arch.prmt(word, word, SIGNS) & BELOW_SIGNS)


def integers(rWords, dtype, vec):
    """The integers of ``vec`` numbers, one each."""
    if dtype.width == 32:
        return [rWords[j] for j in range(vec)]
    return [rWords[j // 2] & UPPER_HALF if j % 2 else rWords[j // 2] << 16 for j in range(vec)]


def key(integer, back, kind):
    """The key of a column that is given as ``LAST - column``."""
    return integer + back if kind is Int32 else (Int64(integer) << 32) + back


def no_key(kind):
    """Below the key of any number, though a column is taken off."""
    return Int32(NONE + LAST // 2) if kind is Int32 else (Int64(NONE) << 32) + LAST // 2


def column(key):
    return LAST - Int32(key & LAST)


def number(integer):
    """The number of 32 bits that has this integer."""
    return Int32(integer ^ ((integer >> 31) & Int32(MOST))).bitcast(Float32)


def numbers(keys, dtype):
    """A fragment of the numbers of some keys."""
    bits = Int16 if dtype.width == 16 else Int32
    rX = fragment(dtype, len(keys))
    rBits = cute.recast_tensor(rX, bits)
    for i, each in enumerate(keys):
        value = Int32(each >> dtype.width)
        rBits[i] = bits(value ^ ((value >> 31) & (MOST >> (32 - dtype.width))))
    return rX
