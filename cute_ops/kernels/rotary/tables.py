"""Cosines and sines of positions: see :mod:`cute_ops.ops.rotary.rope`."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, Int64

from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.lib.copy import fragment, gmem_elements, load, store
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import row_count, strided_offset
from cute_ops.kernels.rotary.config import RotaryConfig
from cute_ops.kernels.rotary.layout import split_index

# Quadrants of a radian. Adding the other number to a float64 rounds that to a whole one, which its low bits hold.
QUADRANTS, ROUND = 2 / math.pi, 1.5 * 2.0**52
# Pi / 2 in two parts: a product of the first with a whole number below 2^25 is exact.
HALF_PI, HALF_PI_REST = 210828714 * 2.0**-27, 9.920935796805404e-10
# Coefficients of sine and cosine between -pi / 4 and pi / 4.
SINE = -1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4
COSINE = 4.166664568298827e-2, -1.388731625493765e-3, 2.443315711809948e-5


class RopeTables:
    """``cos, sin`` of ``positions[token, section[j]] * frequencies[j]``.

    Tile: a thread has up to four neighbouring angles of a token, of which neighbouring threads have neighbouring ones.
    No shared memory. Bytes moved per angle: 8 of the tables; positions come from L1.
    """

    def __init__(self, variant):
        self.keys, self.threads, self.r = variant.tensors, RotaryConfig.of(variant.config).threads, variant.dims["r"]
        starts = [min(self.keys[name].align, self.keys[name].row_align) for name in ("frequencies", "cos", "sin")]
        starts.append(self.keys["section"].align)
        self.vec = 1 if self.r is None else math.gcd(min(*starts, VECTOR_BYTES) // 4, self.r)
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, mPositions, mFrequencies, mSection, mCos, mSin, stream):
        count = row_count(mCos) * Int64(mFrequencies.shape[0] // self.vec)
        self.kernel(mPositions, mFrequencies, mSection, mCos, mSin).launch(
            grid=[Int32((count + (self.threads - 1)) // self.threads), 1, 1], block=[self.threads, 1, 1],
            stream=stream, use_pdl=self.pdl,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, mPositions, mFrequencies, mSection, mCos, mSin):
        vectors, start = Int32(mFrequencies.shape[0] // self.vec), Int64(cute.arch.block_idx()[0]) * self.threads
        token, vector = split_index(start, cute.arch.thread_idx()[0], vectors)
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        if token < row_count(mCos):
            first = Int64(vector * self.vec) * 4
            rFrequency, rSection = fragment(Float32, self.vec), fragment(Int32, self.vec)
            load(rFrequency, mFrequencies.iterator.toint() + first)
            load(rSection, mSection.iterator.toint() + first)
            rCos, rSin = fragment(Float32, self.vec), fragment(Float32, self.vec)
            for j in range(self.vec):
                rCos[j], rSin[j] = _cos_sin(self._position(mPositions, token, rSection[j]) * rFrequency[j])
            place = token * Int64(vectors * self.vec) * 4 + first
            store(rCos, mCos.iterator.toint() + place)
            store(rSin, mSin.iterator.toint() + place)

    def _position(self, mPositions, token, section):
        last, kind = len(mPositions.shape) - 1, mPositions.element_type
        section = cutlass.min(cutlass.max(section, Int32(0)), Int32(mPositions.shape[last]) - 1)
        offset = strided_offset(mPositions, token, last, Int64(section) * Int64(mPositions.stride[last]))
        return Float32(gmem_elements(kind, mPositions.iterator.toint() + offset * (kind.width // 8), 1)[0])


def _cos_sin(angle):
    """Both of one angle up to 2^31, off by a unit or so in the last place.

    The angle is reduced in float64: the library's own reduction of large ones needs an array in local memory.
    """
    wide = Float64(angle)
    shifted = wide * QUADRANTS + ROUND
    quadrant, count = Int32(shifted.bitcast(Int64) & 3), shifted - ROUND
    x = Float32((wide - count * HALF_PI) - count * HALF_PI_REST)
    z = x * x
    sine = x + x * z * (SINE[0] + z * (SINE[1] + z * SINE[2]))
    cosine = 1.0 - 0.5 * z + z * z * (COSINE[0] + z * (COSINE[1] + z * COSINE[2]))
    odd = (quadrant & 1) != 0
    first, second = Float32(cutlass.select_(odd, sine, cosine)), Float32(cutlass.select_(odd, cosine, sine))
    first = Float32(cutlass.select_(((quadrant + 1) & 2) != 0, -first, first))
    return first, Float32(cutlass.select_((quadrant & 2) != 0, -second, second))
