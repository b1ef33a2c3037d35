"""Rows streamed through persistent CTAs, in the norms' forward of long rows and their backward of many rows."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.kernels.lib.copy import compiler_barrier_value, store, store_if, store_masked
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import ITEMSIZE, RowTile, Vectors, clusters, present, row_address, row_count
from cute_ops.kernels.lib.smem_ring import RowRing
from cute_ops.kernels.norm.statistics import row_statistics


class RowWalk:
    """A kernel whose clusters go from row to row.

    Cluster ``c`` of ``clusters`` takes the row groups ``c, c + clusters, ...``. With ``sort_period`` rows are sorted by
    ``row % sort_period``, and each cluster takes an equal number of consecutive ones, in one walk per remainder: rows
    of one remainder start at the same place of a vector.
    Rows pass through a ring of ``stages`` slots in shared memory, so that the next rows load while a row's sums are
    exchanged. In a cluster, where that takes long, a CTA sends its sums of the next row before it finishes a row.
    A thread holds the same columns throughout a walk and keeps what it needs of them in registers; for shifted rows
    that are not sorted this holds because ``clusters * rows`` is a multiple of the vector width.

    Subclasses define what is kept of the columns (``_keep``), what is added up over the rows of a walk
    (``_accumulate``, ``_store_accumulated``), what is summed over a row (``_reader``) and what follows from the sums
    (``_postprocess``).
    """

    def __init__(self, variant, config, inputs, outputs, centred, backward):
        self.variant, self.config = variant, config
        self.n = variant.dims["n"]
        self.weight_offset = variant.attrs.get("weight_offset", 0.0)
        self.names = inputs
        self.tile = RowTile(Vectors(variant, (*inputs, *outputs), self.n, config.align_vectors), config)
        self.ring = RowRing(self.tile, present(variant, inputs), config.stages)
        self.sort_period = config.sort_period
        self.skewed = self.tile.cluster > 1 and self.ring.stages > 2
        stages = 4 if self.skewed else 2
        narrow = ITEMSIZE[variant.tensors[inputs[0]].dtype] == 2
        self.sum = row_statistics(centred, self.tile, variant.attrs["eps"], backward, stages, narrow)
        self.pdl = can_use_pdl(variant.arch)
        # Whether the next kernel may start right after this one's wait, because it reads this one's inputs first.
        self.early = False

    def launch(self, inputs, columns, outputs, partials, groups, stream):
        """Launch ``groups`` clusters; ``partials`` are the workspaces of the walks' sums."""
        self.kernel(inputs, columns, outputs, partials).launch(
            **clusters(self.tile, groups, self.config.resident, 100), stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, inputs, columns, outputs, partials):
        tidx, _, _ = cute.arch.thread_idx()
        group, rank, _ = cute.arch.block_idx()
        groups, _, _ = cute.arch.grid_dim()
        if const_expr(self.tile.cluster == 1):
            rank = 0
        smem = cutlass.utils.SmemAllocator()
        base, slots = self.ring.allocate(smem, inputs)
        sSum, mbar = self.sum.allocate(smem)
        self.sum.prepare(mbar)

        wait_for_previous(self.pdl)
        if const_expr(self.early):
            let_next_start(self.pdl)
        self.sum.ready()
        count = row_count(inputs[0])
        place = Int32(group)
        if const_expr(self.sort_period):
            height = (count + (self.sort_period - 1)) // self.sort_period
            sorted_rows = height * self._remainders(count)
            begin, end = sorted_rows * group // Int64(groups), sorted_rows * (group + 1) // Int64(groups)
            least, most = Int32(begin // height), Int32((end - 1) // height)
            for remainder in cutlass.range(least, most + 1, unroll=1):
                low, high = height * remainder, height * (remainder + 1)
                start, stop = cutlass.max(begin, low), cutlass.min(end, high)
                self._walk(
                    inputs, slots, columns, outputs, partials, (start - low) * self.sort_period + remainder,
                    Int64(self.sort_period), Int32(stop - start), Int32(start - begin), base, rank, place + remainder,
                    sSum, mbar,
                )  # fmt: skip
                if (group > 0) & (begin == low):
                    # The previous cluster's last walk ended with its remainder, so no walk fills the row in between.
                    self._accumulate_nothing(partials, place + remainder - 1, base, rank)
        else:
            tiles = (count + (self.tile.rows - 1)) // self.tile.rows
            steps = Int32((tiles - group + (groups - 1)) // Int64(groups))
            local = tidx // self.tile.threads_per_row
            self._walk(
                inputs, slots, columns, outputs, partials, Int64(group) * self.tile.rows + local,
                Int64(groups) * self.tile.rows, steps, 0, base, rank, place, sSum, mbar,
            )  # fmt: skip
        if const_expr(not self.early):
            let_next_start(self.pdl)

    @cute.jit
    def _walk(
        self, inputs, slots: cutlass.Constexpr, columns, outputs, partials, start: Int64, stride: Int64, steps: Int32,
        before: cutlass.Constexpr, base, rank, place: Int32, sSum, mbar,
    ):  # fmt: skip
        """Go through rows that start at the same place of a vector: this thread's are the row ``start`` and those
        ``stride`` apart. ``before``: steps of the walks before; ``place``: the walk's row of the workspace.
        """
        tidx = cute.arch.thread_idx()[0]
        count = row_count(inputs[0])
        start, steps = compiler_barrier_value(start), compiler_barrier_value(steps)
        row_of = lambda step: cutlass.select_(step < steps, start + Int64(step) * stride, count)  # noqa: E731
        first = self.tile.columns(tidx % self.tile.threads_per_row, rank, start)
        for stage in cutlass.range_constexpr(self.ring.stages - 1):
            self._fetch(inputs, slots, first, row_of(Int32(stage)), count, Int32(stage))
        kept = self._keep(columns, first)
        accumulated = self._accumulate(partials)
        counts = self.sum.counts(first)
        pending = self.ring.stages - (2 if self.skewed else 1)
        if const_expr(self.skewed):
            if steps > 0:
                self._arrive(slots, kept, first, counts, Int32(0), before, pending, sSum, mbar)

        for step in cutlass.range(steps, unroll=1):
            ahead = step + (self.ring.stages - 1)
            self._fetch(inputs, slots, first, row_of(ahead), count, ahead % self.ring.stages)
            if const_expr(self.skewed):
                if step + 1 < steps:
                    self._arrive(slots, kept, first, counts, step + 1, before, pending, sSum, mbar)
                sums = self.sum.wait(None, sSum, mbar, before + step)
            else:
                sums = self._sums(slots, kept, first, counts, step, before, pending, sSum, mbar)
            row = row_of(step)
            if row < count:
                self._postprocess(slots, outputs, kept, accumulated, first, row, step, sums)

        cute.arch.cp_async_wait_group(0)
        self._store_accumulated(partials, accumulated, base, place, rank, first)

    def _fetch(self, inputs, slots, first, row, count, stage):
        """Start loading a row into a slot."""
        self.ring.fetch_row(inputs, slots, row, count, first, stage)
        cute.arch.cp_async_commit_group()

    def _arrive(self, slots, kept, first, counts, step, before, pending, sSum, mbar):
        """Wait for a row and send its sums."""
        self._await(slots, first, step % self.ring.stages, pending)
        values = self.sum.thread(self._reader(slots, kept, first, step % self.ring.stages), first, counts)
        return self.sum.arrive(values, sSum, mbar, before + step)

    def _await(self, slots, first, stage, pending):
        """Wait until no more than ``pending`` loads are in flight."""
        cute.arch.cp_async_wait_group(pending)

    def _sums(self, slots, kept, first, counts, step, before, pending, sSum, mbar):
        """Wait for a row and for its sums."""
        given = self._arrive(slots, kept, first, counts, step, before, pending, sSum, mbar)
        return self.sum.wait(given, sSum, mbar, before + step)

    def _start_of(self, mX, name, row, first):
        """Byte address of this thread's first vector of a row, computed once."""
        address = row_address(mX, self.variant.tensors[name], row, self.n)
        return compiler_barrier_value(address + Int64(first[0]) * (mX.element_type.width // 8))

    def _store_row(self, place, rX, first, k):
        """Store this thread's k-th vector, which begins with the column ``first``."""
        address = place + self.tile.reach(k) * (rX.element_type.width // 8)
        if self.tile.predicated(k):
            store_masked(rX, address, first, Int32(self.n), True)
        elif self.tile.ends_outside(k):
            store_if(first < self.n, rX, address, True)
        else:
            store(rX, address, True)

    def _remainders(self, count):
        """How many remainders are distributed, whether or not rows have them."""
        return self.sort_period

    def _accumulate(self, partials):
        return None

    def _accumulate_nothing(self, partials, place, base, rank):
        """Called for a row of the workspace that no walk fills."""

    def _store_accumulated(self, partials, accumulated, base, place, rank, first):
        """Called at the end of a walk."""
