"""Two results of attention as one: see :mod:`cute_ops.ops.attention.merge_states`."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.attention.config import MergeConfig
from cute_ops.kernels.attention.registers import exp2
from cute_ops.kernels.attention.softmax import LN2
from cute_ops.kernels.lib.activation import LOG2_E
from cute_ops.kernels.lib.copy import fragment, load, narrow, store, widen
from cute_ops.kernels.lib.matrix import folded
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous


class MergeStates:
    """``out = 2^(a - lse) * out_a + 2^(b - lse) * out_b`` with ``lse = log2(2^a + 2^b)``, of base 2.

    Tile: a thread has one vector of a row, as wide as the alignment of all tensors allows. No shared memory.
    Bytes moved per element: both results are read once, out is written once.
    """

    def __init__(self, variant):
        self.threads, self.e = MergeConfig.of(variant.config).threads, variant.dims["e"]
        keys = [variant.tensors[name] for name in ("out_a", "out_b", "out")]
        widest = (min(VECTOR_BYTES, key.align, key.row_align) // ITEMSIZE[key.dtype] for key in keys)
        self.vec, self.pdl = math.gcd(self.e, *widest), can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, mA, mLseA, mB, mLseB, *others):
        mOut, mLse, stream = others
        mA, mB, mOut = (folded(m, own=3) for m in (mA, mB, mOut))  # (batch, queries, heads, e)
        mLseA, mLseB, mLse = (folded(m, own=2) for m in (mLseA, mLseB, mLse))  # (batch, heads, queries)
        vectors = Int64(mA.shape[0]) * mA.shape[1] * mA.shape[2] * (self.e // self.vec)
        blocks = (vectors + (self.threads - 1)) // self.threads
        self.kernel((mA, mB, mOut), (mLseA, mLseB, mLse), vectors).launch(
            grid=[Int32(blocks), 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, rows, sums, vectors: Int64):
        index = Int64(cute.arch.block_idx()[0]) * self.threads + cute.arch.thread_idx()[0]
        let_next_start(self.pdl)
        wait_for_previous(self.pdl)
        if index < vectors:
            self._merge(rows, sums, index)

    @cute.jit
    def _merge(self, rows: cutlass.Constexpr, sums: cutlass.Constexpr, index):
        (mA, mB, mOut), (mLseA, mLseB, mLse) = rows, sums
        _, queries, heads, _ = mA.shape
        row, column = index // (self.e // self.vec), index % (self.e // self.vec) * self.vec
        token = row // heads
        batch, head = token // queries, row - token * heads
        token = token - batch * queries
        a, b = (Float32(m[batch, head, token]) * Float32(LOG2_E) for m in (mLseA, mLseB))
        highest = cute.arch.fmax(a, b)
        # Two rows without a key: -inf less -inf would be NaN.
        shift = cutlass.select_(highest == -Float32.inf, Float32(0.0), highest)
        shares = [exp2(a - shift), exp2(b - shift)]
        total = shares[0] + shares[1]
        inverse = cute.arch.rcp_approx(cutlass.select_(total == 0.0, Float32.inf, total))
        rOut = fragment(Float32, self.vec, 0)
        for mX, share in zip((mA, mB), shares):
            rX, rWide = fragment(mX.element_type, self.vec), fragment(Float32, self.vec)
            load(rX, self._address(mX, (batch, token, head, column)))
            rWide.store(widen(rX))
            for j in range(self.vec):
                # What has no key is ignored, NaN too.
                rOut[j] = rOut[j] + cutlass.select_(share == 0.0, Float32(0.0), share * inverse * rWide[j])
        store(narrow(rOut.load(), mOut.element_type, self.vec), self._address(mOut, (batch, token, head, column)))
        if column == 0:
            mLse[batch, head, token] = (shift + cute.math.log2(total, fastmath=True)) * Float32(LN2)

    def _address(self, mX, at):
        offset = sum(Int64(index) * stride for index, stride in zip(at, mX.stride))
        return mX.iterator.toint() + offset * (mX.element_type.width // 8)
