"""fp32 to float8_e4m3fn: scales, and the conversion, which needs SM 8.9."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int16, Int32, Uint8

from cute_ops.kernels.lib.copy import fragment

BLOCK = 128
# The largest finite number.
LARGEST = 448.0
# The smallest normal fp32 number: its reciprocal is finite.
LEAST_SCALE = 2.0**-126
INFINITY = float("inf")
# Bits of a float32.
MANTISSA, EXPONENT = 0x7FFFFF, 0x7F800000

# Rounds to nearest even. Numbers beyond the largest, infinities too, become the largest; NaN stays NaN.
_PAIR = "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r1}, {$r0};"
_FOUR = """{
.reg .b16 low, high;
cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};
cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2};
mov.b32 {$w0}, {low, high};
}"""


def to_fp8(x, vec, kind="e4m3"):
    """An fp32 vector as a fragment of bytes, of float8_e4m3fn or of float8_e5m2."""
    pair, four_words = (code.replace("e4m3", kind) for code in (_PAIR, _FOUR))
    rX = fragment(Float32, vec)
    rX.store(x)
    if vec % 4 == 0:
        rWords = fragment(Int32, vec // 4)
        for i in range(vec // 4):
            four = [rX[4 * i + j] for j in range(4)]
            rWords[i] = cute.arch.inline_ptx(four_words, write_only_types=[Int32], read_only_args=four)
        return _bytes(rWords, vec)
    rPairs = fragment(Int16, (vec + 1) // 2)
    for i in range((vec + 1) // 2):
        two = [rX[2 * i], rX[min(2 * i + 1, vec - 1)]]
        rPairs[i] = cute.arch.inline_ptx(pair, write_only_types=[Int16], read_only_args=two)
    return _bytes(rPairs, vec)


def _bytes(rX, vec):
    """A fragment's bytes. The layout is a new one, because that of a single word would have no stride."""
    return cute.make_tensor(cute.recast_ptr(rX.iterator, dtype=Uint8), cute.make_layout(vec))


def largest_finite(rX, found):
    """The maximum of ``found`` and the magnitudes of a fragment's finite elements."""
    for j in range(cute.size(rX)):
        # An infinity times zero is NaN, and a maximum ignores NaN.
        found = cute.arch.fmax(found, abs(rX[j] * 0.0 + rX[j]))
    return found


def magnitude(rX, found):
    """The maximum of ``found`` and the magnitudes of a fragment's elements, infinities included."""
    for j in range(cute.size(rX)):
        found = cute.arch.fmax(found, abs(rX[j]))
    return found


@cute.jit
def largest_of_each(vectors: cutlass.Constexpr):
    """The largest magnitude of each vector's finite elements. Infinities are left out only if there are any."""
    rFound = fragment(Float32, len(vectors))
    largest = Float32(0.0)
    for i in cutlass.range_constexpr(len(vectors)):
        rFound[i] = magnitude(vectors[i], Float32(0.0))
        largest = cute.arch.fmax(largest, rFound[i])
    if largest == INFINITY:
        for i in cutlass.range_constexpr(len(vectors)):
            rFound[i] = largest_finite(vectors[i], Float32(0.0))
    return [rFound[i] for i in range(len(vectors))]


def scale_of(largest, power_of_two=False):
    """The scale of a row or block and its reciprocal; ``power_of_two``: the least such number that is large enough."""
    scale = cute.arch.fmax(largest * (1.0 / LARGEST), LEAST_SCALE)
    if power_of_two:
        # By the exponent's bits. The quotient above is rounded, products with powers of two are exact.
        scale = ((scale.bitcast(Int32) + MANTISSA) & EXPONENT).bitcast(Float32)
        scale = cutlass.select_(scale * LARGEST < largest, scale * 2.0, scale)
        fits = (scale * (LARGEST / 2) >= largest) & (scale > LEAST_SCALE)
        scale = cutlass.select_(fits, scale * 0.5, scale)
    scale = cutlass.select_(largest == 0.0, Float32(1.0), scale)
    return scale, cute.arch.rcp_approx(scale)
