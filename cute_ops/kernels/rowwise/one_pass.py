"""A reduction over each row and the outputs that need its result, rows held in registers between the two."""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.kernels.lib.copy import AHEAD, Inside, narrow, widen_late
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import RowAccess
from cute_ops.kernels.lib.row_layout import SMEM_PERCENT, RowTile, Vectors, clusters, present, row_count
from cute_ops.kernels.lib.smem_ring import RowRing
from cute_ops.kernels.rowwise.function import Columns


class OnePassRows:
    """One pass: rows stay in registers, in their own dtype, between their reduction and their output.

    In the form ``smem`` they stay in shared memory instead, which lets more bytes be in flight than registers could
    receive. Each thread copies, and later reads, its own vectors.
    Tile: ``threads_per_row`` threads of each of ``cluster`` CTAs hold a row, ``per_thread`` vectors each; a CTA of
    ``threads`` holds ``threads / threads_per_row`` rows. All loads of a thread are in flight together.
    Shared memory: 4 bytes per value, warp and CTA of the cluster; none where a row fits a warp.
    Bytes moved per element: every input and output once.
    """

    def __init__(self, variant, config, function):
        self.variant = variant
        self.function = function
        self.n = variant.dims["n"]
        tile = RowTile(Vectors(variant, (*function.inputs, *function.outputs), self.n, config.align_vectors), config)
        self.tile = tile
        self.access = RowAccess(variant, tile, function.reduction.empty)
        self.sum = function.reduction.across(tile, 1)
        self.ring = RowRing(tile, present(variant, function.inputs), 1) if config.form == "smem" else None
        self.resident = config.resident
        self.carveout = 100 if self.ring else SMEM_PERCENT
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, inputs, outputs, numbers, stream):
        count = Int32((row_count(inputs[0]) + (self.tile.rows - 1)) // self.tile.rows)
        self.kernel(inputs, outputs, numbers).launch(
            **clusters(self.tile, count, self.resident, self.carveout if self.resident > 1 else None),
            stream=stream, use_pdl=self.pdl,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, inputs, outputs, numbers):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, rank, _ = cute.arch.block_idx()
        if const_expr(self.tile.cluster == 1):
            rank = 0
        smem = cutlass.utils.SmemAllocator()
        slots = None
        if const_expr(self.ring is not None):
            _, slots = self.ring.allocate(smem, inputs, self.function.reduction.empty)
        shared = self.sum.allocate(smem)
        self.sum.prepare(shared)
        blocks = self.access.allocate(smem, outputs, self.function.outputs)

        t = tidx % self.tile.threads_per_row
        row = Int64(bidx) * self.tile.rows + tidx // self.tile.threads_per_row
        count = row_count(inputs[0])
        valid = row < count
        coord = self.access.coord(row, count, t, rank)
        first = coord.first
        if const_expr(self.pdl and self.ring is None):
            few = cute.arch.grid_dim()[0] <= AHEAD
            rows = self.access.rows(inputs, self.function.inputs, cutlass.min(row, count - 1))
            self.access.fetch_ahead(rows, coord, few)
        wait_for_previous(self.pdl)
        context, predicate = self.function.begin(self.variant, numbers, row, valid)
        held = self._load(inputs, slots, coord, predicate)
        gets = [lambda k=k: self._read(held, k) for k in range(self.tile.per_thread)]
        insides = [self._inside(k, first) for k in range(self.tile.per_thread)]
        values = self.function.tied(self._gather(gets, insides), context)
        self.sum.ready()
        results = self.sum(values, shared, Int32(0))
        if t == 0 and rank == 0 and valid:
            self.function.postprocess(self.variant, numbers, inputs, results, context, row)
        if const_expr(len(outputs) > 0):
            rows = partial(self.access.rows, outputs, self.function.outputs)
            for k in cutlass.range_constexpr(self.tile.per_thread):
                columns = Columns(first[k], self.tile.vec)
                emitted = self.function.emit(self._read(held, k), results, context, columns)
                for x, gRow in zip(emitted, self.access.targets(rows(row), blocks)):
                    self.access.store(gRow, narrow(x, gRow.element_type, self.tile.vec), coord, k)
            self.access.flush(blocks, rows, coord)

    def _load(self, inputs, slots, coord, predicate):
        """This thread's vectors of a row, in registers or in the slots of shared memory."""
        if slots is None:
            held = self.access.load(self.access.rows(inputs, self.function.inputs, coord.row), coord, predicate)
            let_next_start(self.pdl)
            for k in range(self.tile.per_thread):
                for rX in held:
                    self.access.trim(rX[k], k, coord)
            return held
        sources = self.ring.sources(inputs, slots, coord.row, coord.first, coord.count, predicate)
        self.ring.fetch_rows(sources, self.tile.edge(coord.row, coord.count), Int32(0))
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        let_next_start(self.pdl)
        for k in range(self.tile.per_thread):
            if self.tile.predicated(k):
                self.ring.trim(slots, k, Int32(0), coord.first[k], self.function.reduction.empty)
        return slots

    def _gather(self, gets, insides):
        if self.ring is None:
            return self.function.reduction.gather(gets, insides)
        # One vector after another, since registers could not hold all of them.
        state = self.function.reduction.start()
        for get, inside in zip(gets, insides):
            state = self.function.reduction.add(state, get, inside)
        return state

    def _read(self, held, k):
        if self.ring is not None:
            return tuple(self.ring.read(sX, k, Int32(0)).load().to(Float32) for sX in held)
        return widen_late([vectors[k] for vectors in held])

    def _inside(self, k, first):
        """Which elements of the k-th vectors are inside the row."""
        whole = not (self.tile.predicated(k) or self.tile.ends_outside(k))
        return Inside(self.tile.vec, first[k], Int32(self.n), whole)
