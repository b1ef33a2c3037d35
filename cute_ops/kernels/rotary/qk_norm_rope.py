"""RMS norm of every head and its rotation in one pass, of q and k at once."""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_ops.kernels.lib.column_reduce import TERMS, ColumnSum, fold
from cute_ops.kernels.lib.copy import fragment
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import row_count
from cute_ops.kernels.lib.row_reduce import WARP
from cute_ops.kernels.rotary.config import RotaryBackwardConfig, RotaryConfig
from cute_ops.kernels.rotary.layout import (
    Rotary,
    apart,
    head_address,
    head_count,
    sequence_and_block,
    table_grid,
    wide,
)

# Chunks of a head that a thread keeps in registers; heads that need more are read twice.
MOST_KEPT = 2


class HeadRows:
    """How heads spread over threads.

    ``lanes`` neighbouring threads share a head, each with ``per_thread`` of its chunks (see :class:`Rotary`). Such a
    *unit* of threads works on ``heads_per_thread`` heads of a token and reads cosines, sines and weights once for them.
    CTAs work on q or on k, never on both. Heads that do not fit, or whose length is unknown at compile time, are
    *long*: a warp walks over each of them twice.
    """

    def __init__(self, variant, config, names):
        self.variant = variant
        self.rotary = Rotary(variant, names, interleaved=False)
        self.eps = variant.attrs["eps"]
        self.threads = config.threads
        chunks = None if self.rotary.d is None else self.rotary.chunks(self.rotary.d, self.rotary.r)
        self.long = chunks is None or chunks > MOST_KEPT * WARP
        self.lanes = WARP if self.long else min(1 << (chunks - 1).bit_length(), WARP)
        self.per_thread = None if self.long else -(-chunks // self.lanes)
        self.whole = not self.long and chunks == self.lanes * self.per_thread
        self.units = self.threads // self.lanes
        self.heads = 1 if self.long else config.heads_per_thread
        self.pdl = can_use_pdl(variant.arch)

    def key(self, name):
        return self.variant.tensors[name]

    def groups(self, mX):
        """Units of a token."""
        return (head_count(mX) + (self.heads - 1)) // self.heads

    def unit(self, mX, block, tokens):
        """(token, first head, whether there is such a token) of this thread's unit of a block of them."""
        groups = self.groups(mX)
        token, group = apart(block * self.units, cute.arch.thread_idx()[0] // self.lanes, groups)
        return token, group, token < tokens

    def blocks(self, mX, tokens):
        units = tokens * Int64(self.groups(mX))
        return (units + (self.units - 1)) // self.units

    def lane(self):
        return cute.arch.thread_idx()[0] % self.lanes

    def places(self, d, r):
        """(chunk, whether it lies in the head, whether it is rotated, its two vectors) of each kept chunk."""
        found = []
        for c in range(self.per_thread):
            chunk = self.lane() + c * self.lanes
            inside = cutlass.Boolean(True) if self.whole else chunk < self.rotary.chunks(d, r)
            found.append((chunk, inside, *self.rotary.place(chunk, d, r)))
        return found

    def total(self, x):
        """Sum over the threads of a head."""
        if self.lanes == 1:
            return x
        return cute.arch.warp_reduction(x, operator.add, threads_in_group=self.lanes)

    def load(self, mX, name, token, head, valid, places, d):
        """This thread's chunks of a head."""
        address = head_address(mX, self.key(name), token, head, d)
        return [wide(self.rotary.load(mX.element_type, address, valid & p[1], *p[3:], d)) for p in places]

    def heads_of(self, mX, group, valid):
        """(head, whether it exists) of each head that a unit of threads works on."""
        heads = [group + u * self.groups(mX) for u in range(self.heads)]
        return [(head, valid & (head < head_count(mX))) for head in heads]

    def tables(self, mCos, mSin, row, place, valid):
        chunk, inside, rotated, _, _ = place
        turned = valid & inside & rotated
        return tuple(wide(self.rotary.table(m, i, row, chunk, turned)) for i, m in enumerate((mCos, mSin)))


class QKNormRope(HeadRows):
    """``out = rotate(x * rsqrt(mean(x^2) + eps) * weight)`` for each head of q and of k.

    CTAs that read the same row of the tables run at the same time, as in :class:`~cute_ops.kernels.rotary.rope.Rope`.
    No shared memory. Bytes moved per element: x and out once, the tables once for q and for k; weights come from L2.
    """

    def __init__(self, variant):
        super().__init__(variant, RotaryConfig.of(variant.config), ("q", "k", "q_out", "k_out"))

    @cute.jit
    def __call__(self, mQ, mK, mQWeight, mKWeight, mCos, mSin, mQOut, mKOut, stream):
        rows = row_count(mCos)
        self.kernel(mQ, mK, mQWeight, mKWeight, mCos, mSin, mQOut, mKOut).launch(
            grid=table_grid(self.blocks(mQ, rows) + self.blocks(mK, rows), mQ, mCos),
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, mQ, mK, mQWeight, mKWeight, mCos, mSin, mQOut, mKOut):
        sequence, block = sequence_and_block()
        first_of_k = self.blocks(mQ, row_count(mCos))
        wait_for_previous(self.pdl)
        if block < first_of_k:
            self._some(mQ, mQWeight, mCos, mSin, mQOut, sequence, block, ("q", "q_weight", "q_out"))
        else:
            self._some(mK, mKWeight, mCos, mSin, mKOut, sequence, block - first_of_k, ("k", "k_weight", "k_out"))
        let_next_start(self.pdl)

    @cute.jit
    def _some(self, mX, mWeight, mCos, mSin, mOut, sequence: Int64, block: Int64, names: cutlass.Constexpr):
        d, r = self.rotary.sizes(mX, mCos)
        rows = row_count(mCos)
        row, group, valid = self.unit(mX, block, rows)
        token = sequence * rows + row
        if const_expr(self.long):
            self._long(mX, mWeight, mCos, mSin, mOut, token, group, valid, row, names)
        else:
            places = self.places(d, r)
            heads = self.heads_of(mX, group, valid)
            loaded = [self.load(mX, names[0], token, head, ok, places, d) for head, ok in heads]
            weights = [self.rotary.column(mWeight, self.key(names[1]), p[1], *p[3:], d) for p in places]
            tables = [self.tables(mCos, mSin, row, p, valid) for p in places]
            for (head, ok), chunks in zip(heads, loaded):
                squares = Float32(0.0)
                for rX in chunks:
                    squares = squares + _dot(rX, rX)
                rstd = cute.math.rsqrt(self.total(squares) * (1.0 / d) + self.eps, fastmath=True)
                for p, rX, rWeight, table in zip(places, chunks, weights, tables):
                    rX.store(rX.load() * rstd * rWeight.load())
                    self.rotary.rotate(rX, *table, p[2])
                    address = head_address(mOut, self.key(names[2]), token, head, d)
                    self.rotary.store(rX, mOut.element_type, address, ok & p[1], *p[3:], d)

    @cute.jit
    def _long(self, mX, mWeight, mCos, mSin, mOut, token, head, valid, row, names: cutlass.Constexpr):
        d, r = self.rotary.sizes(mX, mCos)
        address = head_address(mX, self.key(names[0]), token, head, d)
        target = head_address(mOut, self.key(names[2]), token, head, d)
        count = Int32(self.rotary.chunks(d, r))
        squares = Float32(0.0)
        for chunk in cutlass.range(self.lane(), count, self.lanes, unroll=1):
            _, first, second = self.rotary.place(chunk, d, r)
            rX = wide(self.rotary.load(mX.element_type, address, valid, first, second, d))
            squares = squares + _dot(rX, rX)
        rstd = cute.math.rsqrt(self.total(squares) / Float32(d) + self.eps, fastmath=True)
        for chunk in cutlass.range(self.lane(), count, self.lanes, unroll=1):
            rotated, first, second = self.rotary.place(chunk, d, r)
            place = (chunk, cutlass.Boolean(True), rotated, first, second)
            rX = wide(self.rotary.load(mX.element_type, address, valid, first, second, d))
            rWeight = self.rotary.column(mWeight, self.key(names[1]), place[1], first, second, d)
            rX.store(rX.load() * rstd * rWeight.load())
            self.rotary.rotate(rX, *self.tables(mCos, mSin, row, place, valid), rotated)
            self.rotary.store(rX, mOut.element_type, target, valid, first, second, d)


class QKNormRopeBackward(HeadRows):
    """Gradients of :class:`QKNormRope`; rstd is computed again from q and k.

    With ``g`` the cotangent rotated back, times the weight: ``dx = rstd * g - x * rstd^3 * mean(x * g)``;
    the cotangent rotated back, times ``x * rstd``, is summed over all heads to the weight's gradient.

    Persistent: CTAs of q share its units evenly, those of k likewise. A thread always holds the same elements of a
    head and keeps their sums in registers, which it folds into totals every so many heads. Each CTA (for long heads
    each warp, without totals) stores its sums in its row of a workspace; a second kernel adds the rows in a fixed
    order. Shared memory: 4 bytes per element of a head and warp, and per sum of a thread.
    Bytes moved per element: x, its cotangent and its gradient once each.
    """

    def __init__(self, variant):
        config = RotaryBackwardConfig.of(variant.config)
        super().__init__(variant, config, ("q", "k", "dq_out", "dk_out", "dq", "dk"))
        self.column_sum = ColumnSum(self.rotary.d, variant.arch)
        self.warps = self.threads // WARP
        self.resident = config.resident

    @cute.jit
    def __call__(
        self, mQ, mK, mQWeight, mKWeight, mCos, mSin, mDqOut, mDkOut, mDq, mDk, mDqWeight, mDkWeight, mQPartials,
        mKPartials, stream,
    ):  # fmt: skip
        q, k = (mQ, mQWeight, mDqOut, mDq, mQPartials), (mK, mKWeight, mDkOut, mDk, mKPartials)
        self.kernel(q, k, mCos, mSin).launch(
            grid=[self._ctas(mQPartials) + self._ctas(mKPartials), 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=50,
            stream=stream,
            use_pdl=self.pdl,
        )
        self.column_sum((mQPartials, mKPartials), (mDqWeight, mDkWeight), stream)

    def _ctas(self, mPartials):
        rows = Int32(mPartials.shape[0])
        return rows // self.warps if self.long else rows

    @cute.kernel
    def kernel(self, q, k, mCos, mSin):
        block = cute.arch.block_idx()[0]
        smem = cutlass.utils.SmemAllocator()
        sSum, sTotals = None, None
        if const_expr(not self.long):
            sSum = smem.allocate_tensor(Float32, cute.make_layout((self.rotary.d, self.warps)), byte_alignment=16)
            layout = cute.make_layout((2 * self.rotary.vec, self.threads, self.per_thread))
            sTotals = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        first_of_k = self._ctas(q[4])
        wait_for_previous(self.pdl)
        if block < first_of_k:
            self._some(*q, mCos, mSin, sSum, sTotals, block, ("q", "q_weight", "dq_out", "dq"))
        else:
            self._some(*k, mCos, mSin, sSum, sTotals, block - first_of_k, ("k", "k_weight", "dk_out", "dk"))
        let_next_start(self.pdl)

    @cute.jit
    def _some(
        self, mX, mWeight, mDout, mDx, mPartials, mCos, mSin, sSum, sTotals, block: Int32, names: cutlass.Constexpr
    ):  # fmt: skip
        if const_expr(self.long):
            partial = block * self.warps + cute.arch.thread_idx()[0] // WARP
            self._long(mX, mWeight, mDout, mDx, mPartials, mCos, mSin, partial, names)
        else:
            d, r = self.rotary.sizes(mX, mCos)
            ctas = Int32(mPartials.shape[0])
            places = self.places(d, r)
            weights = [self.rotary.column(mWeight, self.key(names[1]), p[1], *p[3:], d) for p in places]
            sums = [fragment(Float32, 2 * self.rotary.vec, 0.0) for _ in places]
            steps = Int32((self.blocks(mX, row_count(mX, inner=2)) - Int64(block) + Int64(ctas - 1)) // Int64(ctas))
            every = max(TERMS // self.heads, 1)
            for step in cutlass.range(steps, unroll=1):
                at = Int64(block) + Int64(step) * Int64(ctas)
                self._step(mX, mDout, mDx, mCos, mSin, at, places, weights, sums, names)
                if (step + 1) % every == 0:
                    self._fold(sums, sTotals, step >= every)
            if steps >= every:
                self._fold(sums, sTotals, Boolean(True))
                for p, rSum in enumerate(sums):
                    cute.autovec_copy(sTotals[None, cute.arch.thread_idx()[0], p], rSum)
            self._store_sums(mPartials, sSum, block, places, sums)

    @cute.jit
    def _step(
        self, mX, mDout, mDx, mCos, mSin, at: Int64, places: cutlass.Constexpr, weights: cutlass.Constexpr,
        sums: cutlass.Constexpr, names: cutlass.Constexpr,
    ):  # fmt: skip
        d, _ = self.rotary.sizes(mX, mCos)
        token, group, valid = self.unit(mX, at, row_count(mX, inner=2))
        heads, loaded = self.heads_of(mX, group, valid), []
        for head, ok in heads:
            both = [self.load(m, name, token, head, ok, places, d) for m, name in ((mX, names[0]), (mDout, names[2]))]
            loaded.append([*zip(*both)])
        row = self.rotary.row(mCos, token)
        tables = [self.tables(mCos, mSin, row, p, valid) for p in places]
        for (head, ok), chunks in zip(heads, loaded):
            squares, products = Float32(0.0), Float32(0.0)
            for p, (rX, rDout), rWeight, table in zip(places, chunks, weights, tables):
                self.rotary.rotate(rDout, *table, p[2], -1.0)
                squares = squares + _dot(rX, rX)
                rG = fragment(Float32, 2 * self.rotary.vec)
                rG.store(rDout.load() * rWeight.load())
                products = products + _dot(rX, rG)
            rstd = cute.math.rsqrt(self.total(squares) * (1.0 / d) + self.eps, fastmath=True)
            pull = rstd * rstd * rstd * (self.total(products) * (1.0 / d))
            # Missing heads are zeros, whose rstd is not finite with eps=0.
            scale = cutlass.select_(ok, rstd, Float32(0.0))
            address = head_address(mDx, self.key(names[3]), token, head, d)
            for p, (rX, rDout), rWeight, rSum in zip(places, chunks, weights, sums):
                rSum.store(rSum.load() + rDout.load() * (rX.load() * scale))
                rX.store(rDout.load() * rWeight.load() * rstd - rX.load() * pull)
                self.rotary.store(rX, mDx.element_type, address, ok & p[1], *p[3:], d)

    @cute.jit
    def _fold(self, sums: cutlass.Constexpr, sTotals: cute.Tensor, there: Boolean):
        """Fold a thread's sums into its totals, which are zeros before they are ``there``."""
        for p, rSum in enumerate(sums):
            rTotal, sTotal = fragment(Float32, cute.size(rSum), 0.0), sTotals[None, cute.arch.thread_idx()[0], p]
            if there:
                cute.autovec_copy(sTotal, rTotal)
            fold(rSum, rTotal)
            cute.autovec_copy(rTotal, sTotal)

    @cute.jit
    def _store_sums(self, mPartials, sSum, block: Int32, places: cutlass.Constexpr, sums: cutlass.Constexpr):
        """Add the sums of a warp's units, then those of the warps, into the CTA's row of the workspace."""
        tidx = cute.arch.thread_idx()[0]
        vec, d = self.rotary.vec, self.rotary.d
        for p, rSum in zip(places, sums):
            for j in range(2 * vec):
                total = rSum[j]
                offset = self.lanes
                while offset < WARP:
                    total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
                    offset *= 2
                column = p[3] + j if j < vec else p[4] + (j - vec)
                if (tidx % WARP < self.lanes) & p[1] & (column < d):
                    sSum[column, tidx // WARP] = total
        cute.arch.barrier()
        for column in cutlass.range(tidx, d, self.threads, unroll=1):
            total = Float32(0.0)
            for w in cutlass.range_constexpr(self.warps):
                total = total + sSum[column, w]
            mPartials[block, column] = total

    @cute.jit
    def _long(self, mX, mWeight, mDout, mDx, mPartials, mCos, mSin, partial: Int32, names: cutlass.Constexpr):
        """A warp's heads one by one; its row of the workspace holds the sums, each element one lane's own."""
        d, r = self.rotary.sizes(mX, mCos)
        count, partials = Int32(self.rotary.chunks(d, r)), Int32(mPartials.shape[0])
        units = row_count(mX, inner=2) * Int64(head_count(mX))
        steps = Int32((units - Int64(partial) + Int64(partials - 1)) // Int64(partials))
        for chunk in cutlass.range(self.lane(), count, self.lanes, unroll=1):
            _, first, second = self.rotary.place(chunk, d, r)
            zero = fragment(Float32, 2 * self.rotary.vec, 0.0)
            self._set_partial(mPartials, partial, zero, first, second, d)
        for step in cutlass.range(steps, unroll=1):
            at = Int64(partial) + Int64(step) * Int64(partials)
            token = at // Int64(head_count(mX))
            head = Int32(at - token * Int64(head_count(mX)))
            row, yes = self.rotary.row(mCos, token), cutlass.Boolean(True)
            addresses = [
                head_address(m, self.key(name), token, head, d)
                for m, name in ((mX, names[0]), (mDout, names[2]), (mDx, names[3]))
            ]
            squares, products = Float32(0.0), Float32(0.0)
            for chunk in cutlass.range(self.lane(), count, self.lanes, unroll=1):
                rX, _, rG, _, _ = self._terms(mX, mWeight, mDout, mCos, mSin, addresses, chunk, row, names)
                squares = squares + _dot(rX, rX)
                products = products + _dot(rX, rG)
            rstd = cute.math.rsqrt(self.total(squares) / Float32(d) + self.eps, fastmath=True)
            pull = rstd * rstd * rstd * (self.total(products) / Float32(d))
            for chunk in cutlass.range(self.lane(), count, self.lanes, unroll=1):
                rX, rDout, rG, first, second = self._terms(mX, mWeight, mDout, mCos, mSin, addresses, chunk, row, names)
                rSum = self._get_partial(mPartials, partial, first, second, d)
                rSum.store(rSum.load() + rDout.load() * (rX.load() * rstd))
                self._set_partial(mPartials, partial, rSum, first, second, d)
                rX.store(rG.load() * rstd - rX.load() * pull)
                self.rotary.store(rX, mDx.element_type, addresses[2], yes, first, second, d)

    def _terms(self, mX, mWeight, mDout, mCos, mSin, addresses, chunk, row, names):
        yes = cutlass.Boolean(True)
        d, r = self.rotary.sizes(mX, mCos)
        rotated, first, second = self.rotary.place(chunk, d, r)
        rX = wide(self.rotary.load(mX.element_type, addresses[0], yes, first, second, d))
        rDout = wide(self.rotary.load(mDout.element_type, addresses[1], yes, first, second, d))
        table = self.tables(mCos, mSin, row, (chunk, yes, rotated, first, second), yes)
        self.rotary.rotate(rDout, *table, rotated, -1.0)
        rG = fragment(Float32, 2 * self.rotary.vec)
        rG.store(rDout.load() * self.rotary.column(mWeight, self.key(names[1]), yes, first, second, d).load())
        return rX, rDout, rG, first, second

    @cute.jit
    def _set_partial(self, mPartials, partial: Int32, rSum: cute.Tensor, first: Int32, second: Int32, d: Int32):
        for j in cutlass.range_constexpr(cute.size(rSum)):
            vec = cute.size(rSum) // 2
            column = first + j if const_expr(j < vec) else second + (j - vec)
            if column < d:
                mPartials[partial, column] = rSum[j]

    @cute.jit
    def _get_partial(self, mPartials, partial: Int32, first: Int32, second: Int32, d: Int32):
        rSum = fragment(Float32, 2 * self.rotary.vec, 0.0)
        for j in cutlass.range_constexpr(2 * self.rotary.vec):
            column = first + j if const_expr(j < self.rotary.vec) else second + (j - self.rotary.vec)
            if column < d:
                rSum[j] = mPartials[partial, column]
        return rSum


def _dot(rA, rB):
    total = Float32(0.0)
    for j in range(cute.size(rA)):
        total = total + rA[j] * rB[j]
    return total
