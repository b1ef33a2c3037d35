"""Random numbers by counting, as :mod:`cute_ops.expressions.philox` has them."""

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from cute_ops.expressions.philox import BITS, FACTORS, ROUNDS, STEPS, WORDS

ONE = 0x3F800000  # the bits of 1.0


def uniform(seed, row, columns):
    """Float32 numbers in ``[0, 1)`` of a thread's columns of a row: :func:`words` as multiples of ``2^-23``."""
    found = words(seed, row, columns)
    return [Int32(ONE | word >> (32 - BITS)).bitcast(Float32) - 1.0 for word in found]


def words(seed, row, columns):
    """The words of 32 bits of a thread's ``columns`` of a row, a list of neighbours: of whole counts where the first
    is static or known to be a multiple of their number, else each by itself.

    Args:
        seed: the scalar, an integer.
        row: the row, in 64 bits.
        columns: ``(first, how many, whether the first is a multiple of four)``.
    """
    first, many, whole = columns
    wide = Int64(seed)
    key = Uint32(wide), Uint32(wide >> 32)
    place = Uint32(row), Uint32(row >> 32)
    found = []
    for j in range(0, many, WORDS if whole else 1):
        column = Uint32(first + j)
        four = philox((column // WORDS, *place, Uint32(0)), key)
        found += four[: many - j] if whole else [_picked(four, column % WORDS)]
    return found


def philox(counts, key):
    """The four words of a count of four words, under a key of two."""
    (a, b, c, d), (low, high) = counts, key
    for _ in range(ROUNDS):
        first, second = (Uint64(x) * Uint64(factor) for x, factor in zip((a, c), FACTORS))
        a, b, c, d = Uint32(second >> 32) ^ b ^ low, Uint32(second), Uint32(first >> 32) ^ d ^ high, Uint32(first)
        low, high = low + Uint32(STEPS[0]), high + Uint32(STEPS[1])
    return [a, b, c, d]


def _picked(four, place):
    """One of four words."""
    found = four[0]
    for i in range(1, WORDS):
        found = Uint32(cutlass.select_(place == i, four[i], found))
    return found
