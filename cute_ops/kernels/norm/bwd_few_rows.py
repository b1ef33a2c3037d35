"""Backward of the norms for few rows; see :mod:`cute_ops.kernels.norm.bwd_persistent` for the maths."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_ops.kernels.lib.column_reduce import CTAColumnSum
from cute_ops.kernels.lib.copy import fragment, widen
from cute_ops.kernels.lib.pdl import let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import Row, VectorAccess
from cute_ops.kernels.lib.row_layout import clusters, row_address, row_count
from cute_ops.kernels.lib.smem_ring import Source
from cute_ops.kernels.norm.bwd_persistent import NormBackward
from cute_ops.kernels.norm.persistent import Walk
from cute_ops.kernels.norm.statistics import centre, row_statistics


class Share(NamedTuple):
    """A cluster's share of the columns.

    Attributes:
        dout: this thread's vectors of dout.
        terms: mean and rstd of each of the ``count`` rows, in shared memory.
        sums: shared memory for the threads' sums.
        replica, rank: the cluster, and the CTA in it.
    """

    dout: Any
    terms: Any
    sums: Any
    count: Any
    replica: Any
    rank: Any


class NormBackwardFewRows(NormBackward):
    """One launch, no workspace: each of a few clusters computes mean and rstd of all rows.

    Every CTA of a cluster holds its columns of x of all rows in shared memory, ``stages`` groups of ``rows`` rows. All
    row sums are sent before the first is read, so the cluster's latency is paid once. Then each of the ``replicas``
    clusters writes the gradients of its share of the rows, and those of the weight and the bias for its share of each
    CTA's columns, so no cluster needs another's results.
    Shared memory: the CTA's columns of all rows; 4 bytes per sum, warp, CTA of the cluster and stage; 8 bytes per row;
    the column sums of each thread.
    Bytes moved per element: dx once, dout twice, x as often as there are replicas, mostly from L2.
    """

    def __init__(self, variant, config, x, dx, centred):
        super().__init__(variant, config, x, dx, centred)
        tile, stages = self.tile, self.ring.stages
        self.sum = row_statistics(centred, tile, variant.attrs["eps"], backward=True, stages=stages)
        self.replicas = config.replicas
        # The share of the columns, in vectors; rows that the threads cover side by side, and how many of those exist.
        self.held = tile.threads_per_row * tile.per_thread
        self.share = self.held // self.replicas
        self.height = tile.threads // self.share
        self.depth = min(self.height, stages * tile.rows)
        self.threads_sum = CTAColumnSum(tile.threads, self.share, tile.vec, self.depth, self.n)

    @cute.jit
    def __call__(self, tensors, stream):
        self.kernel(tensors.inputs, tensors.columns[0], tensors.outputs, tensors.dcolumns).launch(
            **clusters(self.tile, self.replicas), stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, inputs, mWeight, outputs, dcolumns):
        tidx, _, _ = cute.arch.thread_idx()
        replica, rank, _ = cute.arch.block_idx()
        if const_expr(self.tile.cluster == 1):
            rank = 0
        stages, rows = self.ring.stages, self.tile.rows
        smem = cutlass.utils.SmemAllocator()
        _, slots = self.ring.allocate(smem, inputs)
        shared = self.sum.allocate(smem)
        self.sum.prepare(shared)
        sTerms = smem.allocate_tensor(Float32, cute.make_layout((2, stages * rows)), byte_alignment=16)
        sColumns = self.threads_sum.allocate(smem)

        count = row_count(inputs[0])
        t, local = tidx % self.tile.threads_per_row, tidx // self.tile.threads_per_row
        first = self.tile.columns(t, rank, Int64(0))
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        mine = [(local + stage) % self.replicas == replica for stage in range(stages)]
        for stage in cutlass.range_constexpr(stages):
            row = Int64(stage * rows + local)
            edge = self.tile.edge(row, count)
            self.ring.fetch_rows(self._sources(inputs, slots, first, row, row < count, mine[stage]), edge, Int32(stage))
            cute.arch.cp_async_commit_group()
        held = []
        if const_expr(any(m is not None for m in dcolumns)):
            held = self._load_share(inputs[1], count, replica, rank)
        rWeight = self._keep(mWeight, first)
        counts = self.sum.counts(first)
        walk = Walk(slots, shared, outputs, first, rWeight, (None, None), counts, 0)
        self.sum.ready()
        given = []
        for stage in cutlass.range_constexpr(stages):
            cute.arch.cp_async_wait_group(stages - 1 - stage)
            values = self._thread(walk, Int32(stage), mine[stage])
            given.append(self.sum.arrive(self.sum.with_counts(values, counts), shared, Int32(stage)))
        for stage in cutlass.range_constexpr(stages):
            sums = self.sum.wait(given[stage], shared, Int32(stage))
            mean, rstd, _, _ = self.sum.backward_terms(sums, 1.0 / self.n)
            row = Int64(stage * rows + local)
            if t == 0:
                sTerms[1, stage * rows + local] = rstd
                if const_expr(mean is not None):
                    sTerms[0, stage * rows + local] = mean
            if (row < count) & mine[stage]:
                self._postprocess(walk, row, Int32(stage), sums)
        if const_expr(any(m is not None for m in dcolumns)):
            cute.arch.barrier()
            share = Share(held, sTerms, sColumns, count, replica, rank)
            self._sum_columns(slots[0], dcolumns, share)

    def _sources(self, inputs, slots, first, row, valid, mine):
        """A row of each input for :meth:`RowRing.fetch_rows`: inputs that only the row's gradient needs are loaded only
        if that is written here.
        """
        return (
            Source(
                sX, row_address(mX, self.variant.tensors[name], row, self.n), first,
                valid if name == self.names[0] else valid & mine,
            )
            for mX, sX, name in zip(inputs, slots, self.names) if mX is not None
        )  # fmt: skip

    @cute.jit
    def _thread(self, walk: cutlass.Constexpr, stage: Int32, mine: Boolean):
        """A thread's sums of a row; those with dout only if the row's gradient is written here."""
        slots, first, counts = walk.slots, walk.first, walk.counts
        values = self.sum.without_counts(self.sum.begin())
        if mine:
            values = self.sum.without_counts(self.sum.thread(self._reader(walk, stage), first, counts))
        else:
            values = self.sum.without_counts(
                self.sum.thread(lambda k: (widen(self.ring.read(slots[0], k, stage)),), first, counts)
            )
        return values

    def _place(self, replica):
        """For the gradients of the weight and the bias: this thread's vector among the CTA's, and its first row."""
        tidx = cute.arch.thread_idx()[0]
        return replica * self.share + tidx % self.share, tidx // self.share

    def _load_share(self, mDout, count, replica, rank):
        """This thread's vectors of dout in the cluster's share of the columns."""
        vector, top = self._place(replica)
        column = (rank * self.held + vector) * self.tile.vec
        held = []
        for row in range(0, self.ring.stages * self.tile.rows, self.height):
            gDout = Row.of(mDout, self.variant.tensors["dout"], Int64(row + top), self.n)
            wanted = (Int64(row + top) < count) & (column < self.n) & (top < self.depth)
            held.append(VectorAccess(self.tile.v).load(gDout, column, self.n, wanted))
        return held

    @cute.jit
    def _sum_columns(self, sX, dcolumns, share: cutlass.Constexpr):
        """Gradients of the weight and the bias, for the cluster's share of the CTA's columns."""
        held, sTerms, sColumns, count, replica, rank = share
        tile, rows = self.tile, self.tile.rows
        vector, top = self._place(replica)
        sums = [fragment(Float32, tile.vec, 0.0) for _ in dcolumns]
        for i in cutlass.range_constexpr(len(held)):
            row = i * self.height + top
            if (row < count) & (top < self.depth):
                thread = row % rows * tile.threads_per_row + vector % tile.threads_per_row
                sV = sX[None, None, thread, vector // tile.threads_per_row, row // rows]
                rX = fragment(sX.element_type, tile.vec)
                cute.autovec_copy(sV, cute.make_tensor(rX.iterator, cute.make_layout(sV.shape)))
                dout = widen(held[i])
                mean = sTerms[0, row] if const_expr(self.sum.centred) else None
                normed = centre(widen(rX), mean) * sTerms[1, row]
                for rSum, term in zip(sums, (dout * normed, dout)):
                    rSum.store(rSum.load() + term)
        start = rank * (self.held * tile.vec) + replica * self.threads_sum.width
        for mD, rSum in zip(dcolumns, sums):
            if const_expr(mD is not None):
                self.threads_sum(mD, rSum, sColumns, vector - replica * self.share, top, start)
