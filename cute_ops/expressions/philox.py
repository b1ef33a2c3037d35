"""Random numbers by counting: Philox 4x32 of seven rounds, in array-API style. Kernels compute equal numbers.

A number depends on the seed and on its place alone, so a gradient computes those of its forward again. Kernels import
this module, so that it imports the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

# The least number of rounds that passes all statistical tests of Salmon et al., Parallel Random Numbers, 2011.
ROUNDS = 7
FACTORS, STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
# Numbers of one count, and bits of a uniform number: those of a float32 between one and two, which no conversion from
# an integer makes.
WORDS, BITS = 4, 23


def uniform(xp: Any, seed: Any, shape: tuple[Any, ...]) -> Any:
    """Float32 numbers in ``[0, 1)``, multiples of ``2^-23``, of an integer scalar."""
    *lead, n = shape
    found = words(xp, seed, math.prod(lead), n)
    return xp.reshape(xp.astype(found >> (32 - BITS), xp.float32) * 2.0**-BITS, tuple(shape))


def words(xp: Any, seed: Any, rows: Any, n: Any) -> Any:
    """Words of 32 bits, ``[rows, n]``: of the column ``c`` of row ``r`` word ``c % 4`` of the count ``(c // 4, r)``.

    They are uint32, in torch, which computes little of that, int64.
    """
    torch = "torch" in xp.__name__
    kind, number = (xp.int64, int) if torch else (xp.uint32, xp.uint32)
    seed = xp.reshape(seed, (1, 1))
    wide = xp.astype(seed, kind) & number(MASK)
    if "64" in str(seed.dtype):
        high = xp.astype((seed >> 32) & MASK, kind)
    else:  # of a negative number all bits are set that it lacks
        high = xp.where(seed < 0, wide * 0 + number(MASK), wide * 0)
    counts = -(-n // WORDS)
    place = {"device": wide.device} if torch else {}
    row, count = (xp.arange(size, dtype=wide.dtype, **place) for size in (rows, counts))
    row, count = row[:, None], count[None, :]
    none = 0 * (row + count)
    found = philox(xp, (count + none, row + none, none, none), (wide, high), number)
    return xp.reshape(xp.stack(found, axis=-1), (rows, counts * WORDS))[:, :n]


def philox(
    xp: Any, counts: tuple[Any, ...], key: tuple[Any, Any], number: Callable[[int], Any], rounds: int = ROUNDS
) -> tuple[Any, ...]:
    """The four words of a count of four words, under a key of two; ``number`` makes constants of their dtype."""
    (a, b, c, d), (low, high) = counts, key
    mask, (first, second) = number(MASK), (number(step) for step in STEPS)
    for _ in range(rounds):
        above, below = _product(a, FACTORS[0], number)
        over, under = _product(c, FACTORS[1], number)
        a, b, c, d = over ^ b ^ low, under, above ^ d ^ high, below
        low, high = (low + first) & mask, (high + second) & mask
    return a, b, c, d


def _product(x: Any, factor: int, number: Callable[[int], Any]) -> tuple[Any, Any]:
    """The upper and the lower word of a product, by halves, of which no sum exceeds 32 bits."""
    low, high, mask = number(factor & 0xFFFF), number(factor >> 16), number(0xFFFF)
    x_low, x_high = x & mask, x >> 16
    first = x_low * low
    middle = x_high * low + (first >> 16)
    other = x_low * high + (middle & mask)
    upper = x_high * high + (middle >> 16) + (other >> 16)
    return upper & number(MASK), ((other << 16) | (first & mask)) & number(MASK)
