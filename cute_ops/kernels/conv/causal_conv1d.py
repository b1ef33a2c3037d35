"""Causal depthwise convolution along a sequence, forward and backward."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_ops.kernels.conv.walk import SMEM_PERCENT, Walk, before
from cute_ops.kernels.lib.activation import silu
from cute_ops.kernels.lib.column_reduce import ColumnSum
from cute_ops.kernels.lib.copy import fragment, load_if, narrow, store, store_if, widen
from cute_ops.kernels.lib.pdl import let_next_start, wait_for_previous


class CausalConv1d(Walk):
    """``out_t = activation(bias + sum_j weight_j * x_(t - taps + j))`` in fp32, and the last ``taps`` inputs.

    Tile: see :class:`~cute_ops.kernels.conv.walk.Walk`; one span per thread. A thread loads ``ahead`` rows ahead: as
    soon as a row is in fp32, the load of the row ``ahead`` later takes its registers. No shared memory.
    Bytes moved per element: x and out once; of every span, ``taps`` rows again and the parameters, mostly from L2.
    """

    def __init__(self, variant):
        super().__init__(variant, ("x", "initial_state", "out", "final_state"))

    @cute.jit
    def __call__(self, mX, mWeight, mBias, mInitial, mOut, mFinal, stream):
        threads = Int64(self.config.ctas) * (self.lanes * self.depth)
        span = self.span(mX, cutlass.max(threads // (self.channels(mX) // self.vec), 1))
        cuts = self.cuts(mX, span)
        groups = (Int64(cuts.spans) + (self.depth - 1)) // self.depth
        self.kernel(mX, mWeight, mBias, mInitial, mOut, mFinal, cuts).launch(
            grid=[Int32(groups * self.blocks(mX)), 1, cuts.parts],
            block=[self.lanes, self.depth, 1],
            min_blocks_per_mp=self.config.resident,
            preferred_smem_carveout=SMEM_PERCENT,
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, mX, mWeight, mBias, mInitial, mOut, mFinal, cuts):
        group, channel, level, inside = self.place(mX)
        let_next_start(self.pdl)
        wait_for_previous(self.pdl)
        index = group * self.depth + level
        sequence, start, end = self.bounds(mX, cuts, cute.arch.block_idx()[2], index)
        if inside & (index < cuts.spans) & (sequence < cuts.sequences):
            self._walk(mX, mWeight, mBias, mInitial, mOut, mFinal, channel, sequence, start, end)

    @cute.jit
    def _walk(
        self, mX, mWeight, mBias, mInitial, mOut, mFinal, channel: Int32, sequence: Int64, start: Int32, end: Int32
    ):  # fmt: skip
        tensors = {"x": mX, "initial_state": mInitial, "out": mOut, "final_state": mFinal}
        rows = self.rows(tensors, sequence, channel)
        coming = [fragment(mX.element_type, self.vec) for _ in range(self.ahead)]
        # First, though it reads the last rows: afterwards, what it takes would be in registers all the time.
        if end == self.seqlen(mX):
            self._store_final(coming[0], rows, end)
        for u, rX in enumerate(coming):
            load_if(start + u < end, rX, rows["x"].address(start, u))
        window = self.window(mX.element_type, start, rows)
        rWeight = self.weights(mWeight, channel)
        rBias = None if mBias is None else self.column(mBias, channel)
        given = rows, coming, window, rWeight, rBias
        inner = self.inner(start, end)
        for t in cutlass.range(start, inner, self.ahead, unroll=1):
            self._step(given, t, None)
        for t in cutlass.range(inner, end, self.ahead, unroll=1):
            self._step(given, t, end)

    def _step(self, given, first, end):
        """Take ``ahead`` rows, and let as many come in their place: all of them, or those before row ``end``."""
        rows, coming, window, rWeight, rBias = given
        for u, rX in enumerate(coming):
            inputs = [rOld.load() for rOld in self.older(window, u)] + [widen(rX)]
            window[u % self.taps].store(inputs[-1])
            load_if(before(first + (u + self.ahead), end), rX, rows["x"].address(first, u + self.ahead))
            rOut = fragment(Float32, self.vec)
            rOut.store(self.convolved(inputs, rWeight, rBias))
            if self.silu:
                for c in range(self.vec):
                    rOut[c] = silu(rOut[c])[0]
            rOut = narrow(rOut.load(), rX.element_type, self.vec)
            store_if(before(first + u, end), rOut, rows["out"].address(first, u), True)

    def _store_final(self, rX, rows, end):
        for i in range(self.taps):
            self.load_padded(rX, end, i, rows)
            store(rX, rows["final_state"].address(i))


class CausalConv1dBackward(Walk):
    """With ``g_t = dout_t * activation'(...)`` and x preceded by the initial state:
    ``dx_t = sum_j weight_j * g_(t + taps - j)``, ``dweight_j = sum_t g_t * x_(t - taps + j)``, ``dbias = sum_t g_t``.

    Tile: see :class:`~cute_ops.kernels.conv.walk.Walk`; persistent, a thread takes one span after another of its
    channels. It keeps the last ``taps`` rows of x and of g and walks ``taps`` rows past its span: the gradient of a row
    is there once g has come so far. Sums of the parameters' gradients stay in registers to the end; those of a CTA make
    a row of the workspace, and a second kernel adds these rows in a fixed order.
    Shared memory: 4 bytes per sum and thread. Bytes moved per element: x, dout and dx once; of every span, ``2 * taps``
    rows of x and ``taps`` of dout again, mostly from L2.
    """

    def __init__(self, variant):
        super().__init__(variant, ("x", "dout", "initial_state", "dfinal_state", "dx", "dinitial_state"))
        self.column_sum = ColumnSum(None if self.n is None else self.n * self.width, variant.arch)

    @cute.jit
    def __call__(
        self, mX, mWeight, mDout, mBias, mInitial, mDfinal, mDx, mDweight, mDbias, mDinitial, mWeightParts, mBiasParts,
        stream,
    ):  # fmt: skip
        groups = Int32(mWeightParts.shape[0])
        span = self.span(mX, Int64(groups) * self.depth)
        cuts = self.cuts(mX, span)
        self.kernel(
            mX, mWeight, mDout, mBias, mInitial, mDfinal, mDx, mDinitial, mWeightParts, mBiasParts, cuts
        ).launch(
            grid=[groups * Int32(self.blocks(mX)), 1, 1],
            block=[self.lanes, self.depth, 1],
            min_blocks_per_mp=self.config.resident,
            preferred_smem_carveout=SMEM_PERCENT,
            stream=stream,
            use_pdl=self.pdl,
        )
        columns = cute.make_tensor(mDweight.iterator, cute.make_layout(mWeightParts.shape[1]))
        self.column_sum((mWeightParts, mBiasParts), (columns, mDbias), stream)

    @cute.kernel
    def kernel(self, mX, mWeight, mDout, mBias, mInitial, mDfinal, mDx, mDinitial, mWeightParts, mBiasParts, cuts):
        smem = cutlass.utils.SmemAllocator()
        row = self.lanes * self.vec
        sWeight = smem.allocate_tensor(Float32, cute.make_layout((row * self.width, self.depth)), byte_alignment=16)
        sBias = smem.allocate_tensor(Float32, cute.make_layout((row, self.depth)), byte_alignment=16)
        group, channel, level, inside = self.place(mX)
        wait_for_previous(self.pdl)
        rDweight, rDbias = [fragment(Float32, self.vec) for _ in range(self.width)], fragment(Float32, self.vec)
        for rSum in (*rDweight, rDbias):
            rSum.fill(0.0)
        if inside:
            rWeight = self.weights(mWeight, channel)
            rBias = None if const_expr(mBias is None) else self.column(mBias, channel)
            step = Int32(mWeightParts.shape[0]) * self.depth
            for part in cutlass.range(cuts.parts, unroll=1):
                for index in cutlass.range(group * self.depth + level, cuts.spans, step, unroll=1):
                    sequence, start, end = self.bounds(mX, cuts, part, index)
                    if sequence < cuts.sequences:
                        self._walk(
                            mX, mDout, mInitial, mDfinal, mDx, mDinitial, rWeight, rBias, rDweight, rDbias, channel,
                            sequence, start, end,
                        )  # fmt: skip
        let_next_start(self.pdl)
        # A thread past the last channel has sums of zero, which nobody reads.
        lane = cute.arch.thread_idx()[0]
        for c in cutlass.range_constexpr(self.vec):
            for j in cutlass.range_constexpr(self.width):
                sWeight[(lane * self.vec + c) * self.width + j, level] = rDweight[j][c]
            sBias[lane * self.vec + c, level] = rDbias[c]
        cute.arch.barrier()
        start = channel - lane * self.vec
        self._store_parts(mWeightParts, sWeight, group, start * self.width)
        if const_expr(mBiasParts is not None):
            self._store_parts(mBiasParts, sBias, group, start)

    @cute.jit
    def _store_parts(self, mParts, sSum, group: Int32, start: Int32):
        """Write the CTA's sums to its row of the workspace, neighbouring threads neighbouring numbers."""
        lane, level, _ = cute.arch.thread_idx()
        count = cutlass.min(Int32(sSum.shape[0]), Int32(mParts.shape[1]) - start)
        for column in cutlass.range(level * self.lanes + lane, count, self.lanes * self.depth, unroll=1):
            total = Float32(0.0)
            for d in cutlass.range_constexpr(self.depth):
                total = total + sSum[column, d]
            mParts[group, start + column] = total

    @cute.jit
    def _walk(
        self, mX, mDout, mInitial, mDfinal, mDx, mDinitial, rWeight: cutlass.Constexpr, rBias: cutlass.Constexpr,
        rDweight: cutlass.Constexpr, rDbias: cute.Tensor, channel: Int32, sequence: Int64, start: Int32, end: Int32,
    ):  # fmt: skip
        dtype, seqlen = mX.element_type, self.seqlen(mX)
        tensors = {"x": mX, "dout": mDout, "dx": mDx, "initial_state": mInitial, "dfinal_state": mDfinal,
                   "dinitial_state": mDinitial}  # fmt: skip
        rows = self.rows(tensors, sequence, channel)
        last = cutlass.min(end + self.taps, seqlen)
        coming = [(fragment(dtype, self.vec), fragment(dtype, self.vec)) for _ in range(self.ahead)]
        for u, held in enumerate(coming):
            self._load(held, rows, start, u, last)
        xs = self.window(dtype, start, rows)
        gs = [fragment(Float32, self.vec) for _ in xs]
        for rG in gs:
            rG.fill(0.0)
        given = rows, coming, xs, gs, rWeight, rBias, rDweight, rDbias
        inner = self.inner(start, last)
        for t in cutlass.range(start, inner, self.ahead, unroll=1):
            self._step(given, t, start, end, last, seqlen, False)
        for t in cutlass.range(inner, end + self.taps, self.ahead, unroll=1):
            self._step(given, t, start, end, last, seqlen, True)

    @cute.jit
    def _step(
        self, given: cutlass.Constexpr, first: Int32, start: Int32, end: Int32, last: Int32, seqlen: Int32,
        edge: cutlass.Constexpr,
    ):  # fmt: skip
        """Take ``ahead`` rows: all of the span, or with ``edge`` those that may be past its end or the sequence's."""
        rows, coming, xs, gs, rWeight, rBias, rDweight, rDbias = given
        for u in cutlass.range_constexpr(self.ahead):
            t = first + u
            rX, rDout = coming[u]
            dtype = rX.element_type
            inputs = [rOld.load() for rOld in self.older(xs, u)] + [widen(rX)]
            rG = fragment(Float32, self.vec)
            rG.store(widen(rDout))
            self._load(coming[u], rows, first, u + self.ahead, last if edge else None)
            if const_expr(self.silu):
                rOut = fragment(Float32, self.vec)
                rOut.store(self.convolved(inputs, rWeight, rBias))
                for c in cutlass.range_constexpr(self.vec):
                    rG[c] = rG[c] * silu(rOut[c])[1]
            if const_expr(edge):
                if t >= seqlen:
                    rG.fill(0.0)
                if t < end:
                    self._add(rG, inputs, rDweight, rDbias)
            else:
                self._add(rG, inputs, rDweight, rDbias)
            cotangents = [rOld.load() for rOld in self.older(gs, u)] + [rG.load()]
            rDx = fragment(Float32, self.vec)
            rDx.store(self.convolved(cotangents, rWeight[::-1], None))
            xs[u % self.taps].store(inputs[-1])
            gs[u % self.taps].store(cotangents[-1])
            if const_expr(edge and rows["dfinal_state"] is not None):
                self._add_final(rDx, rows, dtype, t - seqlen)
            rOut = narrow(rDx.load(), dtype, self.vec)
            # The first rows are before the span, and its first taps are the gradients of the one before.
            inside = first > start if const_expr(u < self.taps) else Boolean(True)
            if const_expr(edge):
                inside = inside & (t - self.taps < end)
            store_if(inside, rOut, rows["dx"].address(first, u - self.taps), True)
            if const_expr(u < self.taps and rows["dinitial_state"] is not None):
                store_if(first == 0, rOut, rows["dinitial_state"].address(first, u), True)

    def _load(self, held, rows, t, more, last):
        for rX, name in zip(held, ("x", "dout")):
            load_if(before(t + more, last), rX, rows[name].address(t, more))

    def _add(self, rG, inputs, rDweight, rDbias):
        g = rG.load()
        for rSum, x in zip(rDweight, inputs):
            rSum.store(rSum.load() + g * x)
        rDbias.store(rDbias.load() + g)

    def _add_final(self, rDx, rows, dtype, i):
        """Add the cotangent of the final state's i-th row, which is the input ``taps - i`` rows before the end."""
        rFinal = fragment(dtype, self.vec)
        rFinal.fill(0)
        load_if((i >= 0) & (i < self.taps), rFinal, rows["dfinal_state"].address(i))
        rDx.store(rDx.load() + widen(rFinal))
