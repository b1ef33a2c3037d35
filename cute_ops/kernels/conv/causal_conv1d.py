"""Causal depthwise convolution along a sequence, forward and backward."""

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.conv.apart import Apart
from cute_ops.kernels.conv.config import ConvConfig
from cute_ops.kernels.conv.walk import Walk, before, start_of
from cute_ops.kernels.lib.activation import silu, times_silu_derivative
from cute_ops.kernels.lib.arguments import by_name, named
from cute_ops.kernels.lib.column_reduce import TERMS, ColumnSum, fold
from cute_ops.kernels.lib.copy import (
    compiler_barrier_value,
    fetch_ahead,
    fragment,
    narrow,
    store,
    widen,
)
from cute_ops.kernels.lib.pdl import let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import row_address, row_count

FORWARD_ROWS = "x", "initial_state", "out", "final_state"
BACKWARD_ROWS = "x", "dout", "initial_state", "dfinal_state", "dx", "dinitial_state"
BATCH_SPANS = 2**30  # spans
LEVELS = 8  # threads of a CTA whose sums are added one after the other


class Cuts(NamedTuple):
    """How sequences are cut into spans. A batch is some whole sequences, so few that 32 bits count their spans: a
    64-bit division is a call, around which a kernel spills registers.

    Attributes:
        span: rows of a span.
        each: spans of a sequence.
        batch: sequences of a batch.
        spans: those of a batch.
        sequences: all of them.
        batches: how many there are.
    """

    span: Int32
    each: Int32
    batch: Int32
    spans: Int32
    sequences: Int64
    batches: Int32


class Shares(NamedTuple):
    """How all sequences' rows are shared out to the gradient's threads. Starting a sequence takes a thread as long as
    some rows do, which count as rows before its first one.

    Attributes:
        total: rows of all sequences, those before the first ones included.
        share: of these, a thread's.
        pieces: sequences that a share can meet.
    """

    total: Int64
    share: Int32
    pieces: Int32


class Span(NamedTuple):
    """Rows ``start`` to ``end`` of one sequence at a thread's channels, the first of which is ``channel``."""

    channel: Int32
    sequence: Int64
    start: Int32
    end: Int32


class Tensors(NamedTuple):
    """The forward's tensors."""

    x: Any
    weight: Any
    bias: Any
    initial_state: Any
    out: Any
    final_state: Any


class Forward(Walk):
    """``out_t = activation(bias + sum_j weight_j * x_(t - taps + j))`` in fp32, and the last ``taps`` inputs.

    Tile: see :class:`~cute_ops.kernels.conv.walk.Walk`; one span per thread.
    Shared memory: ``ahead`` rows per thread.
    Bytes moved per element: x and out once; of every span, ``taps`` rows again and the parameters, mostly from L2.
    """

    def __init__(self, variant):
        super().__init__(variant, FORWARD_ROWS, 1)

    @cute.jit
    def __call__(self, *arguments):
        tensors = named(Tensors, self.variant, arguments)
        cuts = self.cuts(tensors.x)
        groups = (Int64(cuts.spans) + (self.depth - 1)) // self.depth
        self.kernel(tensors, cuts).launch(
            grid=[Int32(groups * self.blocks(tensors.x)), 1, cuts.batches],
            block=[self.lanes, self.depth, 1],
            min_blocks_per_mp=self.ctas,
            preferred_smem_carveout=self.carveout,
            stream=arguments[-1],
            use_pdl=self.pdl,
        )

    def cuts(self, mX):
        """The :class:`Cuts` that let the threads that run at once go the same number of times, computed on the host."""
        seqlen, rows = Int64(self.seqlen(mX)), row_count(mX)
        walkers = cutlass.max(Int64(self.ctas * self.config.sms) // self.blocks(mX), 1) * self.depth
        sequences = rows // seqlen
        rounds = (rows + (walkers * self.config.span - 1)) // (walkers * self.config.span)
        each = cutlass.max(walkers * rounds // sequences, 1)
        span = (seqlen + (each - 1)) // each
        each = (seqlen + (span - 1)) // span
        batch = cutlass.min(cutlass.max(BATCH_SPANS // each, 1), sequences)
        batches = (sequences + (batch - 1)) // batch
        return Cuts(Int32(span), Int32(each), Int32(batch), Int32(batch * each), sequences, Int32(batches))

    @cute.kernel
    def kernel(self, tensors, cuts):
        mX = tensors.x
        ring = self.ring(cutlass.utils.SmemAllocator(), mX)
        group, channel, level, inside = self.coordinate(mX)
        let_next_start(self.pdl)
        wait_for_previous(self.pdl)
        index = group * self.depth + level
        sequence, start, end = self.bounds(mX, cuts, cute.arch.block_idx()[2], index)
        if inside & (index < cuts.spans) & (sequence < cuts.sequences):
            self._walk(ring, tensors, Span(channel, sequence, start, end))

    @cute.jit
    def _walk(self, ring: cutlass.Constexpr, tensors: cutlass.Constexpr, span: cutlass.Constexpr):
        mX, (channel, _, start, end) = tensors.x, span
        rows = self.rows(tensors, ("x", "initial_state", "out", "final_state"), span)
        self.start(ring, rows, start, end)
        # First, though these are its last rows: afterwards, what it takes would be in registers all the time.
        if end == self.seqlen(mX):
            self._store_final(fragment(mX.element_type, self.vec), rows, end)
        window = self.window(mX.element_type, start, rows)
        rWeight = self.weights(tensors.weight, channel)
        rBias = None if tensors.bias is None else self.column(tensors.bias, channel)
        given = ring, rows, window, rWeight, rBias
        stage, inner = Int32(0), self.inner(start, end, rows)
        for t in cutlass.range(start, inner, self.unit, unroll=1):
            self._step(given, t, stage, None)
            stage = self.next(stage)
        for t in cutlass.range(inner, end, self.unit, unroll=1):
            self._step(given, t, stage, end)
            stage = self.next(stage)

    def _step(self, given, first, stage, end):
        """Take a step's rows, and let as many come in their place: all of them, or those before row ``end``."""
        ring, rows, window, rWeight, rBias = given
        self.wait()
        held = self.take(ring, rows, first, stage)
        self.taken()
        self.fetch(ring, rows, first, self.ahead, end, stage)
        to = rows["out"], ring, []
        for u, (rX,) in enumerate(held):
            inputs = [rOld.load() for rOld in self.older(window, u)] + [widen(rX)]
            self.newest(window, u).store(inputs[-1])
            rOut = fragment(Float32, self.vec)
            rOut.store(self.convolved(inputs, rWeight, rBias))
            if self.silu:
                for c in range(self.vec):
                    rOut[c] = silu(rOut[c])[0]
            rOut = narrow(rOut.load(), rX.element_type, self.vec)
            self.emit(to, rOut, before(first + u, end), first, u)
        self.flush(to, first)

    def bounds(self, mX, cuts, batch, index):
        """(sequence, first row, row after the last) of a batch's span."""
        sequence = index // cuts.each
        start = (index - sequence * cuts.each) * cuts.span
        return Int64(batch) * cuts.batch + sequence, start, cutlass.min(start + cuts.span, self.seqlen(mX))

    def _store_final(self, rX, rows, end):
        final = rows["final_state"]
        for i in range(self.taps):
            self.load_padded(rX, end, i, rows)
            self.put(Boolean(True), rX, final.address(i), final.channel)


class BackwardTensors(NamedTuple):
    """Tensors of the gradients, but for the gradients of the parameters, which are sums of the workspaces' rows."""

    x: Any
    weight: Any
    dout: Any
    bias: Any
    initial_state: Any
    dfinal_state: Any
    dx: Any
    dinitial_state: Any
    dweight_partials: Any
    dbias_partials: Any


class Totals(NamedTuple):
    """A workspace, and which of the threads' totals go to it: ``count`` for each channel, from ``first`` on."""

    partials: Any
    totals: Any
    first: int
    count: int


class Backward(Walk):
    """With ``g_t = dout_t * activation'(...)`` and x preceded by the initial state:
    ``dx_t = sum_j weight_j * g_(t + taps - j)``, ``dweight_j = sum_t g_t * x_(t - taps + j)``, ``dbias = sum_t g_t``.

    Tile: see :class:`~cute_ops.kernels.conv.walk.Walk`; persistent, a thread takes its share of the consecutive rows of
    all sequences, a span of each that it meets (:class:`Shares`). It keeps the last ``taps`` rows of x and of g and
    walks ``taps`` rows past its span: the gradient of a row is there once g has come so far. Sums of the parameters'
    gradients stay in registers for some :data:`~cute_ops.kernels.lib.column_reduce.TERMS` rows, then go to totals in
    shared memory; those of a CTA make a row of the workspace, and a second kernel adds these rows in a fixed order.
    Shared memory: ``ahead`` rows of x and of dout per thread, those of one more stage, and 4 bytes per sum and thread.
    Bytes moved per element: x, dout and dx once; of every span, ``2 * taps`` rows of x and ``taps`` of dout again.
    """

    def __init__(self, variant):
        super().__init__(variant, BACKWARD_ROWS, 2, spare=1)
        self.column_sum = ColumnSum(None if self.n is None else self.n * (self.width + 1), variant.arch)
        # Rows between two folds, in whole steps of the walk.
        self.every = TERMS // self.unit * self.unit

    @cute.jit
    def __call__(self, *arguments):
        tensors, given = named(BackwardTensors, self.variant, arguments), by_name(self.variant, arguments)
        mX, mPartials = tensors.x, tensors.dweight_partials
        groups = Int32(mPartials.shape[0])
        walkers = Int64(groups) * self.depth
        rows = Int64(self.seqlen(mX)) + self.ahead
        total = row_count(mX) // self.seqlen(mX) * rows
        share = (total + (walkers - 1)) // walkers
        shares = Shares(total, Int32(share), Int32((share - 1) // rows) + 2)
        self.kernel(tensors, shares).launch(
            grid=[groups * Int32(self.blocks(mX)), 1, 1],
            block=[self.lanes, self.depth, 1],
            min_blocks_per_mp=self.ctas,
            preferred_smem_carveout=self.carveout,
            stream=arguments[-1],
            use_pdl=self.pdl,
        )
        columns = cute.make_tensor(given["dweight"].iterator, cute.make_layout(mPartials.shape[1]))
        self.column_sum((mPartials, tensors.dbias_partials), (columns, given["dbias"]), arguments[-1])

    @cute.kernel
    def kernel(self, tensors, shares):
        mX = tensors.x
        smem = cutlass.utils.SmemAllocator()
        ring = self.ring(smem, mX)
        group, channel, level, inside = self.coordinate(mX)
        seqlen = self.seqlen(mX)
        rows = Int64(seqlen) + self.ahead
        first = (Int64(group) * self.depth + level) * shares.share
        sequence = first // rows
        start = Int32(first - sequence * rows) - self.ahead
        left = cutlass.min(Int64(shares.share), shares.total - first)
        if const_expr(self.pdl):
            self._fetch_ahead(tensors, inside & (left > 0), Span(channel, sequence, start, None))
        wait_for_previous(self.pdl)
        sums = self.sums(smem, tensors.dbias_partials)
        if inside:
            # Where a share meets fewer sequences, what is left of it is nothing.
            for _ in cutlass.range(shares.pieces, unroll=1):
                end = Int32(cutlass.min(start + left, seqlen))
                if cutlass.max(start, 0) < end:
                    self._walk(ring, tensors, sums, Span(channel, sequence, cutlass.max(start, 0), end))
                rest = left - (end - start)
                if left // TERMS != rest // TERMS:
                    self._fold(sums)
                left, sequence, start = rest, sequence + 1, Int32(-self.ahead)
        let_next_start(self.pdl)
        # A thread's place in its CTA, from its channel: otherwise its index is in a register all the time.
        start, channel = self.cta_coordinate(mX)[1], compiler_barrier_value(channel)
        self._fold(sums)
        if const_expr(self.depth > 1):
            cute.arch.barrier()
        weight = Totals(tensors.dweight_partials, sums[1], 0, self.width)
        for totals in (weight, Totals(tensors.dbias_partials, sums[1], self.width, 1)):
            if const_expr(totals.partials is not None):
                if const_expr(self.depth == 1):
                    self._store_sums(totals, group, channel)
                else:
                    self._add_levels(totals, group, start, channel - start, level)

    def sums(self, smem, mBiasPartials):
        """A thread's sums, one vector for each tap and one of the bias, and their totals: (element, thread, sum)."""
        rSums = [fragment(Float32, self.vec) for _ in range(self.width + (mBiasPartials is not None))]
        layout = cute.make_layout((self.vec, self.threads, len(rSums)))
        sTotals = smem.allocate_tensor(Float32, layout, byte_alignment=VECTOR_BYTES)
        for j, rSum in enumerate(rSums):
            rSum.fill(0.0)
            cute.autovec_copy(rSum, sTotals[None, self.thread(), j])
        return rSums, sTotals

    def _fold(self, sums):
        rSums, sTotals = sums
        for j, rSum in enumerate(rSums):
            rTotal, sTotal = fragment(Float32, self.vec), sTotals[None, self.thread(), j]
            cute.autovec_copy(sTotal, rTotal)
            fold(rSum, rTotal)
            cute.autovec_copy(rTotal, sTotal)

    def _fetch_ahead(self, tensors, there, span):
        """Prefetch to L2 what a thread needs first, before the previous kernel ends."""
        mX, channel, start = tensors.x, span.channel, span.start
        rows = self.rows(tensors, ("x", "dout"), span)
        for name, older in (("x", self.taps), ("dout", 0)):
            for u in range(-older, self.ahead):
                t = cutlass.max(start, 0) + u
                fetch_ahead(rows[name].address(t), there & (t >= 0) & (t < self.seqlen(mX)))
        for name, mParameter, width in (("weight", tensors.weight, self.width), ("bias", tensors.bias, 1)):
            if mParameter is not None:
                fetch_ahead(row_address(mParameter, self.keys[name], Int64(channel), width), there)

    @cute.jit
    def _store_sums(self, totals: cutlass.Constexpr, group: Int32, channel: Int32):
        """Write a thread's totals to its CTA's row of the workspace."""
        mPartials, sTotals, first, each = totals
        for count, column, c in self.columns(channel, each):
            rRow, vec = fragment(Float32, count), math.gcd(count, 4)
            for i in cutlass.range_constexpr(count):
                rRow[i] = sTotals[c + i // each, self.thread(), first + i % each]
            if column < mPartials.shape[1]:
                start = mPartials.iterator.toint() + (Int64(group) * mPartials.shape[1] + column) * 4
                for i in cutlass.range_constexpr(0, count, vec):
                    store(cute.make_tensor(rRow.iterator + i, cute.make_layout(vec)), start + 4 * i)

    @cute.jit
    def _add_levels(self, totals: cutlass.Constexpr, group: Int32, start: Int32, place: Int32, level: Int32):
        """Write the sums of a CTA's totals, where several threads have the same channels, to its row of the workspace.

        ``start``: the CTA's first channel; ``place``: the thread's first channel among the CTA's.
        """
        mPartials, sTotals, first, each = totals
        count = cutlass.min(self.lanes * self.vec * each, Int32(mPartials.shape[1]) - start * each)
        for column in cutlass.range(level * self.lanes + self.place(place)[1], count, self.threads, unroll=1):
            c, lane = self.place(column // each)
            total = Float32(0.0)
            for top in cutlass.range_constexpr(0, self.depth, LEVELS):
                some = Float32(0.0)
                for d in cutlass.range_constexpr(top, min(top + LEVELS, self.depth)):
                    some = some + sTotals[c, d * self.lanes + lane, first + column % each]
                total = total + some
            mPartials[group, start * each + column] = total

    @cute.jit
    def _walk(
        self, ring: cutlass.Constexpr, tensors: cutlass.Constexpr, sums: cutlass.Constexpr, span: cutlass.Constexpr
    ):  # fmt: skip
        (channel, _, start, end), seqlen = span, self.seqlen(tensors.x)
        names = "x", "dout", "dx", "initial_state", "dfinal_state", "dinitial_state"
        rows = self.rows(tensors, names, span)
        last = cutlass.min(end + self.taps, seqlen)
        self.taken()  # the last stages of the span before
        self.start(ring, rows, start, last)
        xs = self.window(tensors.x.element_type, start, rows)
        # For every sequence again: before them all, the first rows would be fetched once the weights are there.
        rWeight = self.weights(tensors.weight, channel)
        rBias = None if const_expr(tensors.bias is None) else self.column(tensors.bias, channel)
        gs = [fragment(Float32, self.vec) for _ in xs]
        for rG in gs:
            rG.fill(0.0)
        given, bounds = (ring, rows, xs, gs, rWeight, rBias, sums[0]), (start, end, last, seqlen)
        stage, free, inner = Int32(0), Int32(self.stages), self.inner(start, last, rows)
        for block in cutlass.range(start, inner, self.every, unroll=1):
            for t in cutlass.range(block, cutlass.min(block + self.every, inner), self.unit, unroll=1):
                stage, free = self._step(given, bounds, t, stage, free, False)
            if block + self.every <= inner:
                self._fold(sums)
        for t in cutlass.range(inner, end + self.taps, self.unit, unroll=1):
            stage, free = self._step(given, bounds, t, stage, free, True)

    @cute.jit
    def _step(
        self, given: cutlass.Constexpr, bounds: cutlass.Constexpr, first: Int32, stage: Int32, free: Int32,
        edge: cutlass.Constexpr,
    ):  # fmt: skip
        """Take a step's rows: all of the span, or with ``edge`` those that may be past its end or the sequence's.

        ``bounds``: where the span starts and ends, where its walk ends, and the sequence.
        """
        start, end, last, seqlen = bounds
        ring, rows, xs, gs, rWeight, rBias, rSums = given
        to = rows["dx"], ring, []
        for u in cutlass.range_constexpr(self.unit):
            if const_expr(u % self.batch == 0):
                self.wait()
                # To a stage that is not read now, or the copies would wait for its rows to be needed.
                self.fetch(ring, rows, first, u + self.ahead, last if const_expr(edge) else None, free)
                held = self.take(ring, rows, first + u, stage)
                free, stage = stage, self.next(stage)
            t = first + u
            rX, rDout = held[u % self.batch]
            dtype = rX.element_type
            inputs = [rOld.load() for rOld in self.older(xs, u)] + [widen(rX)]
            rG = self._gradient(rDout, inputs, rWeight, rBias)
            if const_expr(edge):
                if t >= seqlen:
                    rG.fill(0.0)
                if t < end:
                    self._add(rG, inputs, rSums)
            else:
                self._add(rG, inputs, rSums)
            cotangents = [rOld.load() for rOld in self.older(gs, u)] + [rG.load()]
            rDx = fragment(Float32, self.vec)
            rDx.store(self.convolved(cotangents, rWeight[::-1], None))
            self.newest(xs, u).store(inputs[-1])
            self.newest(gs, u).store(cotangents[-1])
            if const_expr(edge and rows["dfinal_state"] is not None):
                self._add_final(rDx, rows, dtype, t - seqlen)
            rOut = narrow(rDx.load(), dtype, self.vec)
            # The first rows are before the span, and its first taps are the gradients of the one before.
            inside = first > start if const_expr(u < self.taps) else Boolean(True)
            if const_expr(edge):
                inside = inside & (t - self.taps < end)
            dx, before_first = rows["dx"], rows["dinitial_state"]
            self.emit(to, rOut, inside, first, u - self.taps)
            if const_expr(u < self.taps and before_first is not None):
                self.put(first == 0, rOut, before_first.address(first, u), dx.channel)
        self.flush(to, first)
        return stage, free

    def _gradient(self, rDout, inputs, rWeight, rBias):
        """The gradient of a row before its activation."""
        rG = fragment(Float32, self.vec)
        rG.store(widen(rDout))
        if self.silu:
            rOut = fragment(Float32, self.vec)
            rOut.store(self.convolved(inputs, rWeight, rBias))
            for c in range(self.vec):
                rG[c] = times_silu_derivative(rG[c], rOut[c])
        return rG

    def _add(self, rG, inputs, rSums):
        g = rG.load()
        for rSum, x in zip(rSums, [*inputs, None]):
            rSum.store(rSum.load() + (g if x is None else g * x))

    def _add_final(self, rDx, rows, dtype, i):
        """Add the cotangent of the final state's i-th row, which is the input ``taps - i`` rows before the end."""
        rFinal = fragment(dtype, self.vec)
        rFinal.fill(0)
        state = rows["dfinal_state"]
        self.get((i >= 0) & (i < self.taps), rFinal, state.address(i), state.channel)
        rDx.store(rDx.load() + widen(rFinal))


class ForwardApart(Apart, Forward):
    """:class:`Forward` of rows that start anywhere."""


class BackwardApart(Apart, Backward):
    """:class:`Backward` of rows that start anywhere. It stores single elements: units would take more instructions,
    which limit it.
    """

    ring, emit, flush = Apart.inputs, Walk.emit, Walk.flush


def CausalConv1d(variant):
    return (ForwardApart if _apart(variant, FORWARD_ROWS) else Forward)(variant)


def CausalConv1dBackward(variant):
    return (BackwardApart if _apart(variant, BACKWARD_ROWS) else Backward)(variant)


def _apart(variant, names):
    return ConvConfig.of(variant.config).apart(variant.dims["n"], start_of(variant, names))
