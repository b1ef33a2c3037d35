"""Cosines and sines of positions: see :mod:`cute_ops.ops.rotary.tables`."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, Int64

from cute_ops.kernels.lib.copy import gmem_elements
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import row_count, strided_offset
from cute_ops.kernels.rotary.config import RotaryConfig
from cute_ops.kernels.rotary.layout import split_index

# Quadrants of a radian; adding and subtracting the next one rounds a float64 to a whole number, which its low bits hold.
QUADRANTS, ROUND = 2 / math.pi, 1.5 * 2.0**52
# Pi / 2 in two parts: a product of the first with a whole number below 2^25 is exact.
HALF_PI, HALF_PI_REST = 210828714 * 2.0**-27, 9.920935796805404e-10
# Coefficients of sine and cosine between -pi / 4 and pi / 4.
SINE = -1.6666654611e-1, 8.3321608736e-3, -1.9515295891e-4
COSINE = 4.166664568298827e-2, -1.388731625493765e-3, 2.443315711809948e-5


class RopeTables:
    """``cos, sin`` of ``positions[token, section[j]] * frequencies[j]``.

    Tile: a thread has one angle of a token; neighbouring threads have neighbouring angles. No shared memory. Bytes
    moved per angle: 8 of the tables; positions come from L1.
    """

    def __init__(self, variant):
        self.keys, self.threads = variant.tensors, RotaryConfig.of(variant.config).threads
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, mPositions, mFrequencies, mSection, mCos, mSin, stream):
        count = row_count(mCos, inner=0)
        self.kernel(mPositions, mFrequencies, mSection, mCos, mSin).launch(
            grid=[Int32((count + (self.threads - 1)) // self.threads), 1, 1], block=[self.threads, 1, 1],
            stream=stream, use_pdl=self.pdl,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, mPositions, mFrequencies, mSection, mCos, mSin):
        r, start = Int32(mFrequencies.shape[0]), Int64(cute.arch.block_idx()[0]) * self.threads
        token, j = split_index(start, cute.arch.thread_idx()[0], r)
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        if token < row_count(mCos):
            last = len(mPositions.shape) - 1
            section = cutlass.min(cutlass.max(mSection[j], Int32(0)), Int32(mPositions.shape[last]) - 1)
            offset = strided_offset(mPositions, token, last, Int64(section) * Int64(mPositions.stride[last]))
            kind = mPositions.element_type
            at = gmem_elements(kind, mPositions.iterator.toint() + offset * (kind.width // 8), 1)[0]
            angle = Float32(at) * mFrequencies[j]
            place = (token * Int64(r) + Int64(j)) * 4
            for mOut, value in zip((mCos, mSin), _cos_sin(angle)):
                gmem_elements(Float32, mOut.iterator.toint() + place, 1)[0] = value


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
