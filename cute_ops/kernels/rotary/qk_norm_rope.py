"""RMS norm of every head and its rotation in one pass, of q and k at once."""

import operator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_ops.hardware import WARP
from cute_ops.kernels.lib.arguments import by_name, named
from cute_ops.kernels.lib.column_reduce import TERMS, ColumnSum, fold
from cute_ops.kernels.lib.copy import fragment
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import row_count
from cute_ops.kernels.rotary.config import RotaryBackwardConfig, RotaryConfig
from cute_ops.kernels.rotary.layout import (
    Rotary,
    head_address,
    head_count,
    sequence_and_block,
    split_index,
    table_grid,
    wide,
)

# Chunks of a head that a thread keeps in registers; heads that need more are read twice.
MOST_KEPT = 2


class Tables(NamedTuple):
    """Cosines and sines."""

    cos: Any
    sin: Any


class Head(NamedTuple):
    """One head of a token; ``valid`` tells whether it exists, ``row`` is the tables' row for the token."""

    token: Any
    index: Any
    row: Any
    valid: Any


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
        token, group = split_index(block * self.units, cute.arch.thread_idx()[0] // self.lanes, groups)
        return token, group, token < tokens

    def blocks(self, mX, tokens):
        units = tokens * Int64(self.groups(mX))
        return (units + (self.units - 1)) // self.units

    def lane(self):
        return cute.arch.thread_idx()[0] % self.lanes

    def chunks(self, d, r):
        """The chunks of a head that this thread keeps in registers."""
        found = []
        for c in range(self.per_thread):
            index = self.lane() + c * self.lanes
            inside = Boolean(True) if self.whole else index < self.rotary.chunks(d, r)
            found.append(self.rotary.chunk(index, d, r)._replace(inside=inside))
        return found

    def total(self, x):
        """Sum over the threads of a head."""
        if self.lanes == 1:
            return x
        return cute.arch.warp_reduction(x, operator.add, threads_in_group=self.lanes)

    def load(self, mX, name, head, chunks, d):
        """This thread's chunks of a head, in fp32."""
        address = head_address(mX, self.key(name), head.token, head.index, d)
        return [wide(self.rotary.load(mX.element_type, address, head.valid & c.inside, c)) for c in chunks]

    def heads_of(self, mX, group, token, row, valid):
        """The heads that a unit of threads works on."""
        heads = [group + u * self.groups(mX) for u in range(self.heads)]
        return [Head(token, head, row, valid & (head < head_count(mX))) for head in heads]

    def angles(self, tables, row, chunk, valid):
        """(cosines, sines) of a chunk's pairs, in fp32."""
        wanted = valid & chunk.inside & chunk.rotated
        return tuple(wide(self.rotary.table(m, i, row, chunk, wanted)) for i, m in enumerate(tables))


class Side(NamedTuple):
    """The tensors of q or of k."""

    x: Any
    weight: Any
    out: Any


class QKNormRope(HeadRows):
    """``out = rotate(x * rsqrt(mean(x^2) + eps) * weight)`` for each head of q and of k.

    CTAs that read the same row of the tables run at the same time, as in :class:`~cute_ops.kernels.rotary.rope.Rope`.
    No shared memory. Bytes moved per element: x and out once, the tables once for q and for k; weights come from L2.
    """

    def __init__(self, variant):
        super().__init__(variant, RotaryConfig.of(variant.config), ("q", "k", "q_out", "k_out"))

    @cute.jit
    def __call__(self, mQ, mK, *arguments):
        mQWeight, mKWeight, mCos, mSin, mQOut, mKOut, stream = arguments
        rows = row_count(mCos)
        self.kernel(mQ, mK, (mQWeight, mKWeight), Tables(mCos, mSin), (mQOut, mKOut)).launch(
            grid=table_grid(self.blocks(mQ, rows) + self.blocks(mK, rows), mQ, mCos),
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, mQ, mK, weights, tables, outputs):
        sequence, block = sequence_and_block()
        first_of_k = self.blocks(mQ, row_count(tables.cos))
        wait_for_previous(self.pdl)
        if block < first_of_k:
            self._side(Side(mQ, weights[0], outputs[0]), "q", tables, sequence, block)
        else:
            self._side(Side(mK, weights[1], outputs[1]), "k", tables, sequence, block - first_of_k)
        let_next_start(self.pdl)

    @cute.jit
    def _side(self, side: cutlass.Constexpr, name: cutlass.Constexpr, tables, sequence: Int64, block: Int64):
        """A CTA's heads of q or of k."""
        mX, mWeight, mOut = side
        d, r = self.rotary.sizes(mX, tables.cos)
        rows = row_count(tables.cos)
        row, group, valid = self.unit(mX, block, rows)
        token = sequence * rows + row
        if const_expr(self.long):
            self._long(side, name, tables, Head(token, group, row, valid))
        else:
            chunks = self.chunks(d, r)
            heads = self.heads_of(mX, group, token, row, valid)
            loaded = [self.load(mX, name, head, chunks, d) for head in heads]
            weights = [self.rotary.column(mWeight, self.key(f"{name}_weight"), c.inside, c) for c in chunks]
            angles = [self.angles(tables, row, c, valid) for c in chunks]
            for head, held in zip(heads, loaded):
                squares = Float32(0.0)
                for rX in held:
                    squares = squares + _dot(rX, rX)
                rstd = cute.math.rsqrt(self.total(squares) * (1.0 / d) + self.eps, fastmath=True)
                for chunk, rX, rWeight, angle in zip(chunks, held, weights, angles):
                    rX.store(rX.load() * rstd * rWeight.load())
                    self.rotary.rotate(rX, *angle, chunk.rotated)
                    address = head_address(mOut, self.key(f"{name}_out"), token, head.index, d)
                    self.rotary.store(rX, mOut.element_type, address, head.valid & chunk.inside, chunk)

    @cute.jit
    def _long(self, side: cutlass.Constexpr, name: cutlass.Constexpr, tables, head: cutlass.Constexpr):
        """A head that a warp walks over twice."""
        mX, mWeight, mOut = side
        d, r = self.rotary.sizes(mX, tables.cos)
        address = head_address(mX, self.key(name), head.token, head.index, d)
        target = head_address(mOut, self.key(f"{name}_out"), head.token, head.index, d)
        count = Int32(self.rotary.chunks(d, r))
        squares = Float32(0.0)
        for index in cutlass.range(self.lane(), count, self.lanes, unroll=1):
            chunk = self.rotary.chunk(index, d, r)
            rX = wide(self.rotary.load(mX.element_type, address, head.valid, chunk))
            squares = squares + _dot(rX, rX)
        rstd = cute.math.rsqrt(self.total(squares) / Float32(d) + self.eps, fastmath=True)
        for index in cutlass.range(self.lane(), count, self.lanes, unroll=1):
            chunk = self.rotary.chunk(index, d, r)._replace(inside=Boolean(True))
            rX = wide(self.rotary.load(mX.element_type, address, head.valid, chunk))
            rWeight = self.rotary.column(mWeight, self.key(f"{name}_weight"), chunk.inside, chunk)
            rX.store(rX.load() * rstd * rWeight.load())
            self.rotary.rotate(rX, *self.angles(tables, head.row, chunk, head.valid), chunk.rotated)
            self.rotary.store(rX, mOut.element_type, target, head.valid, chunk)


class BackwardSide(NamedTuple):
    """The tensors of the gradients of q or of k; ``partials`` is the workspace of the weight's gradient."""

    x: Any
    weight: Any
    dout: Any
    dx: Any
    partials: Any


class Held(NamedTuple):
    """A thread's registers from head to head: its chunks, their weights and the sums of the weights' gradients."""

    chunks: Any
    weights: Any
    sums: Any


class QKNormRopeBackward(HeadRows):
    """Gradients of :class:`QKNormRope`; rstd is recomputed from q and k.

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
    def __call__(self, *arguments):
        given = by_name(self.variant, arguments)
        q, k = [
            BackwardSide(
                given[x], given[f"{x}_weight"], given[f"d{x}_out"], given[f"d{x}"], given[f"d{x}_weight_partials"]
            )
            for x in ("q", "k")
        ]
        self.kernel(q, k, named(Tables, self.variant, arguments)).launch(
            grid=[self._ctas(q.partials) + self._ctas(k.partials), 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=50,
            stream=arguments[-1],
            use_pdl=self.pdl,
        )
        self.column_sum((q.partials, k.partials), (given["dq_weight"], given["dk_weight"]), arguments[-1])

    def _ctas(self, mPartials):
        rows = Int32(mPartials.shape[0])
        return rows // self.warps if self.long else rows

    @cute.kernel
    def kernel(self, q, k, tables):
        block = cute.arch.block_idx()[0]
        smem = cutlass.utils.SmemAllocator()
        sSum, sTotals = None, None
        if const_expr(not self.long):
            sSum = smem.allocate_tensor(Float32, cute.make_layout((self.rotary.d, self.warps)), byte_alignment=16)
            layout = cute.make_layout((2 * self.rotary.vec, self.threads, self.per_thread))
            sTotals = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        first_of_k = self._ctas(q.partials)
        wait_for_previous(self.pdl)
        if block < first_of_k:
            self._side(q, "q", tables, (sSum, sTotals), block)
        else:
            self._side(k, "k", tables, (sSum, sTotals), block - first_of_k)
        let_next_start(self.pdl)

    @cute.jit
    def _side(
        self, side: cutlass.Constexpr, name: cutlass.Constexpr, tables, smem: cutlass.Constexpr, block: Int32
    ):  # fmt: skip
        """A CTA's heads of q or of k; ``smem``: memory of the sums of warps, and of the threads' totals."""
        mX, mPartials, (sSum, sTotals) = side.x, side.partials, smem
        if const_expr(self.long):
            partial = block * self.warps + cute.arch.thread_idx()[0] // WARP
            self._long(side, name, tables, partial)
        else:
            d, r = self.rotary.sizes(mX, tables.cos)
            ctas = Int32(mPartials.shape[0])
            chunks = self.chunks(d, r)
            weights = [self.rotary.column(side.weight, self.key(f"{name}_weight"), c.inside, c) for c in chunks]
            sums = [fragment(Float32, 2 * self.rotary.vec, 0.0) for _ in chunks]
            held = Held(chunks, weights, sums)
            steps = Int32((self.blocks(mX, row_count(mX, inner=2)) - Int64(block) + Int64(ctas - 1)) // Int64(ctas))
            every = max(TERMS // self.heads, 1)
            for step in cutlass.range(steps, unroll=1):
                at = Int64(block) + Int64(step) * Int64(ctas)
                self._step(side, name, tables, at, held)
                if (step + 1) % every == 0:
                    self._fold(sums, sTotals, step >= every)
            if steps >= every:
                self._fold(sums, sTotals, Boolean(True))
                for p, rSum in enumerate(sums):
                    cute.autovec_copy(sTotals[None, cute.arch.thread_idx()[0], p], rSum)
            self._store_sums(mPartials, sSum, block, held)

    @cute.jit
    def _step(
        self, side: cutlass.Constexpr, name: cutlass.Constexpr, tables, block: Int64, held: cutlass.Constexpr
    ):  # fmt: skip
        """The heads of one block of units."""
        mX, mDout, mDx = side.x, side.dout, side.dx
        d, _ = self.rotary.sizes(mX, tables.cos)
        token, group, valid = self.unit(mX, block, row_count(mX, inner=2))
        heads, loaded = self.heads_of(mX, group, token, None, valid), []
        for head in heads:
            pair = (mX, name), (mDout, f"d{name}_out")
            loaded.append([*zip(*[self.load(m, key, head, held.chunks, d) for m, key in pair])])
        row = self.rotary.row(tables.cos, token)
        angles = [self.angles(tables, row, c, valid) for c in held.chunks]
        for head, vectors in zip(heads, loaded):
            squares, products = Float32(0.0), Float32(0.0)
            for chunk, (rX, rDout), rWeight, angle in zip(held.chunks, vectors, held.weights, angles):
                self.rotary.rotate(rDout, *angle, chunk.rotated, -1.0)
                squares = squares + _dot(rX, rX)
                rG = fragment(Float32, 2 * self.rotary.vec)
                rG.store(rDout.load() * rWeight.load())
                products = products + _dot(rX, rG)
            rstd = cute.math.rsqrt(self.total(squares) * (1.0 / d) + self.eps, fastmath=True)
            pull = rstd * rstd * rstd * (self.total(products) * (1.0 / d))
            # Missing heads are zeros, whose rstd is not finite with eps=0.
            scale = cutlass.select_(head.valid, rstd, Float32(0.0))
            address = head_address(mDx, self.key(f"d{name}"), token, head.index, d)
            for chunk, (rX, rDout), rWeight, rSum in zip(held.chunks, vectors, held.weights, held.sums):
                rSum.store(rSum.load() + rDout.load() * (rX.load() * scale))
                rX.store(rDout.load() * rWeight.load() * rstd - rX.load() * pull)
                self.rotary.store(rX, mDx.element_type, address, head.valid & chunk.inside, chunk)

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
    def _store_sums(self, mPartials, sSum, block: Int32, held: cutlass.Constexpr):
        """Add the sums of a warp's units, then those of the warps, into the CTA's row of the workspace."""
        tidx = cute.arch.thread_idx()[0]
        vec, d = self.rotary.vec, self.rotary.d
        for chunk, rSum in zip(held.chunks, held.sums):
            for j in range(2 * vec):
                total = rSum[j]
                offset = self.lanes
                while offset < WARP:
                    total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
                    offset *= 2
                column = chunk.first + j if j < vec else chunk.second + (j - vec)
                if (tidx % WARP < self.lanes) & chunk.inside & (column < d):
                    sSum[column, tidx // WARP] = total
        cute.arch.barrier()
        for column in cutlass.range(tidx, d, self.threads, unroll=1):
            total = Float32(0.0)
            for w in cutlass.range_constexpr(self.warps):
                total = total + sSum[column, w]
            mPartials[block, column] = total

    @cute.jit
    def _long(self, side: cutlass.Constexpr, name: cutlass.Constexpr, tables, partial: Int32):
        """A warp's heads one by one; its row of the workspace holds the sums, each element one lane's own."""
        mX, mPartials = side.x, side.partials
        d, r = self.rotary.sizes(mX, tables.cos)
        count, partials = Int32(self.rotary.chunks(d, r)), Int32(mPartials.shape[0])
        units = row_count(mX, inner=2) * Int64(head_count(mX))
        steps = Int32((units - Int64(partial) + Int64(partials - 1)) // Int64(partials))
        for index in cutlass.range(self.lane(), count, self.lanes, unroll=1):
            chunk = self.rotary.chunk(index, d, r)
            zero = fragment(Float32, 2 * self.rotary.vec, 0.0)
            self._set_partial(mPartials, partial, zero, chunk)
        for step in cutlass.range(steps, unroll=1):
            at = Int64(partial) + Int64(step) * Int64(partials)
            token = at // Int64(head_count(mX))
            head = Int32(at - token * Int64(head_count(mX)))
            row, yes = self.rotary.row(tables.cos, token), Boolean(True)
            names = name, f"d{name}_out", f"d{name}"
            *addresses, target = [
                head_address(m, self.key(key), token, head, d) for m, key in zip((mX, side.dout, side.dx), names)
            ]
            squares, products = Float32(0.0), Float32(0.0)
            for index in cutlass.range(self.lane(), count, self.lanes, unroll=1):
                rX, _, rG, _ = self._terms(side, name, tables, addresses, row, index)
                squares = squares + _dot(rX, rX)
                products = products + _dot(rX, rG)
            rstd = cute.math.rsqrt(self.total(squares) / Float32(d) + self.eps, fastmath=True)
            pull = rstd * rstd * rstd * (self.total(products) / Float32(d))
            for index in cutlass.range(self.lane(), count, self.lanes, unroll=1):
                rX, rDout, rG, chunk = self._terms(side, name, tables, addresses, row, index)
                rSum = self._get_partial(mPartials, partial, chunk)
                rSum.store(rSum.load() + rDout.load() * (rX.load() * rstd))
                self._set_partial(mPartials, partial, rSum, chunk)
                rX.store(rG.load() * rstd - rX.load() * pull)
                self.rotary.store(rX, side.dx.element_type, target, yes, chunk)

    def _terms(self, side, name, tables, addresses, row, index):
        """(x, the cotangent rotated back, that times the weight, the chunk) of a chunk of a head."""
        yes = Boolean(True)
        d, r = self.rotary.sizes(side.x, tables.cos)
        chunk = self.rotary.chunk(index, d, r)._replace(inside=yes)
        rX = wide(self.rotary.load(side.x.element_type, addresses[0], yes, chunk))
        rDout = wide(self.rotary.load(side.dout.element_type, addresses[1], yes, chunk))
        self.rotary.rotate(rDout, *self.angles(tables, row, chunk, yes), chunk.rotated, -1.0)
        rG = fragment(Float32, 2 * self.rotary.vec)
        rG.store(rDout.load() * self.rotary.column(side.weight, self.key(f"{name}_weight"), yes, chunk).load())
        return rX, rDout, rG, chunk

    @cute.jit
    def _set_partial(self, mPartials, partial: Int32, rSum: cute.Tensor, chunk: cutlass.Constexpr):
        for j in cutlass.range_constexpr(cute.size(rSum)):
            vec = cute.size(rSum) // 2
            column = chunk.first + j if const_expr(j < vec) else chunk.second + (j - vec)
            if column < chunk.d:
                mPartials[partial, column] = rSum[j]

    @cute.jit
    def _get_partial(self, mPartials, partial: Int32, chunk: cutlass.Constexpr):
        rSum, vec = fragment(Float32, 2 * self.rotary.vec, 0.0), self.rotary.vec
        for j in cutlass.range_constexpr(2 * vec):
            column = chunk.first + j if const_expr(j < vec) else chunk.second + (j - vec)
            if column < chunk.d:
                rSum[j] = mPartials[partial, column]
        return rSum


def _dot(rA, rB):
    total = Float32(0.0)
    for j in range(cute.size(rA)):
        total = total + rA[j] * rB[j]
    return total
