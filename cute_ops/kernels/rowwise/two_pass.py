"""A reduction over each row and the outputs that need its result, for rows too long for an SM or of unknown length."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.kernels.lib.copy import Inside, widen_late
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import Row, VectorAccess
from cute_ops.kernels.lib.row_layout import (
    MAX_GRID,
    SMEM_PERCENT,
    Vectors,
    WalkedRow,
    clusters,
    readable,
    row_count,
)
from cute_ops.kernels.rowwise.function import Columns

BATCH = 4  # vectors of a thread that are in flight together


class Walked(NamedTuple):
    """A row as its threads walk it.

    Attributes:
        rows: the row of each input.
        n: its length.
        shift: elements of the previous row in its first vector.
        readable: columns that may be read, see :func:`readable`.
    """

    rows: Any
    n: Any
    shift: Any
    readable: Any


class WalkedRows:
    """Walks a row once for its reduction and, where there are outputs, once more for them.

    Tile: a row is cut into segments. CTA ``p`` of a cluster takes segment ``p`` or, if rows are many, one CTA takes all
    of them, one after another. They are combined in the same order, so the bits are the same. Vector ``i`` of thread
    ``t`` is the segment's vector ``i * threads + t``; a thread takes four at a time.
    Shared memory: 4 bytes per value, segment and warp, twice. Bytes moved per element: every input once, and with
    outputs every input again, from L2 where the row fits, and every output.
    """

    def __init__(self, variant, config, function):
        self.variant = variant
        self.function = function
        names = (*function.inputs, *function.outputs)
        vectors = Vectors(variant, names, variant.dims["n"], config.align_vectors)
        self.tile = WalkedRow(vectors, config, config.cluster, config.segments_per_cta)
        self.access = VectorAccess(self.tile.v, function.reduction.empty)
        self.sum = function.reduction.across(self.tile, 2)
        self.resident = config.resident
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, inputs, outputs, numbers, stream):
        count = Int32(cutlass.min(row_count(inputs[0]), Int64(MAX_GRID)))
        self.kernel(inputs, outputs, numbers).launch(
            **clusters(self.tile, count, self.resident, SMEM_PERCENT if self.resident > 1 else None),
            stream=stream, use_pdl=self.pdl,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, inputs, outputs, numbers):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, rank, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        if const_expr(self.tile.cluster == 1):
            rank = 0
        smem = cutlass.utils.SmemAllocator()
        shared = self.sum.allocate(smem)
        self.sum.prepare(shared)
        long_n = inputs[0].shape[-1]
        n, vec, local = Int32(long_n), self.tile.vec, self.tile.local
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        self.sum.ready()
        steps = Int32((row_count(inputs[0]) - bidx + (grid - 1)) // Int64(grid))
        for step in cutlass.range(steps, unroll=1):
            row = Int64(bidx) + Int64(step) * Int64(grid)
            context, predicate = self.function.begin(self.variant, numbers, row, row >= 0)
            shift = self.tile.v.shift(row, long_n)
            count = (n + shift + (vec - 1)) // vec
            size = (count + (self.tile.cluster * local - 1)) // (self.tile.cluster * local)
            readable_n = readable(self.tile.v, n, row, row_count(inputs[0]))
            walked = Walked(self._rows(inputs, self.function.inputs, row, long_n), n, shift, readable_n)
            targets = self._rows(outputs, self.function.outputs, row, long_n)
            last = cutlass.select_(predicate, count, Int32(0))
            for j in cutlass.range(local, unroll=1):
                begin = (rank * local + j) * size
                end = cutlass.min(begin + size, last)
                state = self.function.reduction.start()
                for base in cutlass.range(begin, end, BATCH * self.tile.threads, unroll=1):
                    state = self._batch(state, walked, base + tidx, end)
                self.sum.arrive(self.function.tied(state, context), shared, step, j)
            results = self.sum.wait(None, shared, step)
            if (tidx == 0) & (rank == 0):
                self.function.postprocess(self.variant, numbers, inputs, results, context, row)
            if const_expr(len(outputs) > 0):
                begin = rank * local * size
                end = cutlass.min(begin + local * size, count)
                for v in cutlass.range(begin + tidx, end, self.tile.threads, unroll=2):
                    self._emit(walked, targets, results, context, v * vec - shift)

    def _rows(self, tensors, names, row, n):
        return [Row.of(m, self.variant.tensors[name], row, n) for m, name in zip(tensors, names)]

    def _emit(self, walked, targets, results, context, first):
        values = tuple(self.access.read(gRow, first, walked.n, walked.readable) for gRow in walked.rows)
        emitted = self.function.emit(values, results, context, Columns(first, self.tile.vec))
        for x, gOut in zip(emitted, targets):
            self.access.write(gOut, x, first, walked.n)

    def _batch(self, state, walked, start, end):
        """The state with up to four more vectors of this thread, all loaded before any is used."""
        rows, n, shift, readable = walked
        firsts, loaded = [], []
        for i in range(BATCH):
            v = start + i * self.tile.threads
            firsts.append(v * self.tile.vec - shift)
            wanted = (v < end) & (firsts[i] + self.tile.vec > 0) if self.tile.v.shifted else v < end
            loaded.append([self.access.load(gRow, firsts[i], readable, wanted) for gRow in rows])
        for first, vectors in zip(firsts, loaded):
            for rX in vectors:
                self.access.trim(rX, first, n)
        for first, vectors in zip(firsts, loaded):
            state = self.function.reduction.add(
                state,
                lambda vectors=vectors: widen_late(vectors),
                Inside(self.tile.vec, first, cutlass.min(end * self.tile.vec - shift, n)),
            )
        return state
