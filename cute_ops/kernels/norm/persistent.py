"""Rows streamed through persistent CTAs, in the norms' forward of long rows and their backward of many rows."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.kernels.lib.copy import compiler_barrier_value, store, store_if, store_masked
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import RowTile, Vectors, clusters, present, row_address, row_count
from cute_ops.kernels.lib.smem_ring import RowRing
from cute_ops.kernels.norm.statistics import row_statistics


class Groups(NamedTuple):
    """The tensors of a kernel that walks: row tensors, parameters, and workspaces of the walks' sums."""

    inputs: Any
    columns: Any
    outputs: Any
    partials: Any


class Memory(NamedTuple):
    """A CTA's shared memory: the ring at ``base``, its slots of each input, and what sums are exchanged through."""

    base: Any
    slots: Any
    shared: Any


class Rows(NamedTuple):
    """The rows of a walk: ``steps`` rows from ``start`` on, ``stride`` apart, after ``before`` steps of other walks."""

    start: Any
    stride: Any
    steps: Any
    before: Any


class Walk(NamedTuple):
    """A thread's state that stays the same from row to row.

    Attributes:
        slots: the ring's slots of each input.
        shared: what sums are exchanged through.
        outputs: the tensors to write.
        first: first columns of the thread's vectors.
        kept: parameters at the thread's columns, in registers.
        accumulated: sums over the rows, in registers.
        counts: of the thread's elements, see :meth:`MeanSquare.counts`.
        before: steps of the walks before.
    """

    slots: Any
    shared: Any
    outputs: Any
    first: Any
    kept: Any
    accumulated: Any
    counts: Any
    before: Any


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
        self.tile = RowTile(
            Vectors(variant, (*inputs, *outputs), self.n, config.align_vectors, lines=config.lines), config
        )
        self.ring = RowRing(self.tile, present(variant, inputs), config.stages)
        self.sort_period = config.sort_period
        if self.sort_period and self.tile.v.shifted and not self.tile.v.masked:
            # Slots keep vectors behind a row's end, which no mask hides: those of a row that starts elsewhere.
            rows = f"rows of {self.n} elements, whole vectors that are read from the start of a line"
            raise ValueError(f"{variant.op}: {rows}, are not sorted: lines takes sort_period=0, got {self.sort_period}")
        self.skewed = self.tile.cluster > 1 and self.ring.stages > 2
        stages = 4 if self.skewed else 2
        narrow = ITEMSIZE[variant.tensors[inputs[0]].dtype] == 2
        self.sum = row_statistics(centred, self.tile, variant.attrs["eps"], backward, stages, narrow=narrow)
        self.pdl = can_use_pdl(variant.arch)
        # Whether the next kernel may start right after this one's wait, because it reads this one's inputs first.
        self.early = False

    def launch(self, tensors, groups, stream):
        """Launch ``groups`` clusters."""
        self.kernel(tensors).launch(
            **clusters(self.tile, groups, self.config.resident, 100), stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, tensors):
        tidx, _, _ = cute.arch.thread_idx()
        group, rank, _ = cute.arch.block_idx()
        groups, _, _ = cute.arch.grid_dim()
        if const_expr(self.tile.cluster == 1):
            rank = 0
        smem = cutlass.utils.SmemAllocator()
        base, slots = self.ring.allocate(smem, tensors.inputs)
        shared = self.sum.allocate(smem)
        self.sum.prepare(shared)
        memory = Memory(base, slots, shared)

        wait_for_previous(self.pdl)
        if const_expr(self.early):
            let_next_start(self.pdl)
        self.sum.ready()
        count = row_count(tensors.inputs[0])
        line = Int32(group)
        if const_expr(self.sort_period):
            height = (count + (self.sort_period - 1)) // self.sort_period
            sorted_rows = height * self._remainders(count)
            begin, end = sorted_rows * group // Int64(groups), sorted_rows * (group + 1) // Int64(groups)
            least, most = Int32(begin // height), Int32((end - 1) // height)
            for remainder in cutlass.range(least, most + 1, unroll=1):
                low, high = height * remainder, height * (remainder + 1)
                start, stop = cutlass.max(begin, low), cutlass.min(end, high)
                first_row = (start - low) * self.sort_period + remainder
                rows = Rows(first_row, Int64(self.sort_period), Int32(stop - start), Int32(start - begin))
                self._walk(tensors, memory, rows, rank, line + remainder)
                if (group > 0) & (begin == low):
                    # The previous cluster's last walk ended with its remainder, so no walk fills the line in between.
                    self._accumulate_nothing(tensors.partials, memory, rank, line + remainder - 1)
        else:
            tiles = (count + (self.tile.rows - 1)) // self.tile.rows
            steps = Int32((tiles - group + (groups - 1)) // Int64(groups))
            local = tidx // self.tile.threads_per_row
            rows = Rows(Int64(group) * self.tile.rows + local, Int64(groups) * self.tile.rows, steps, 0)
            self._walk(tensors, memory, rows, rank, line)
        if const_expr(not self.early):
            let_next_start(self.pdl)

    @cute.jit
    def _walk(self, tensors, memory: cutlass.Constexpr, rows: cutlass.Constexpr, rank, line: Int32):
        """Go through rows that start at the same place of a vector; ``line``: the walk's row of the workspace."""
        tidx, inputs = cute.arch.thread_idx()[0], tensors.inputs
        count = row_count(inputs[0])
        start, steps = compiler_barrier_value(rows.start), compiler_barrier_value(rows.steps)
        row_of = lambda step: cutlass.select_(step < steps, start + Int64(step) * rows.stride, count)  # noqa: E731
        first = self.tile.columns(tidx % self.tile.threads_per_row, rank, start)
        for stage in cutlass.range_constexpr(self.ring.stages - 1):
            self._fetch(inputs, memory.slots, first, row_of(Int32(stage)), count, Int32(stage))
        kept = self._keep(tensors.columns, first)
        walk = Walk(
            memory.slots, memory.shared, tensors.outputs, first, kept, self._accumulate(tensors.partials),
            self.sum.counts(first), rows.before,
        )  # fmt: skip
        if const_expr(self.skewed):
            if steps > 0:
                self._arrive(walk, Int32(0))

        for step in cutlass.range(steps, unroll=1):
            ahead = step + (self.ring.stages - 1)
            self._fetch(inputs, memory.slots, first, row_of(ahead), count, ahead % self.ring.stages)
            if const_expr(self.skewed):
                if step + 1 < steps:
                    self._arrive(walk, step + 1)
                sums = self.sum.wait(None, memory.shared, rows.before + step)
            else:
                sums = self._sums(walk, step)
            row = row_of(step)
            if row < count:
                self._postprocess(walk, row, step, sums)

        cute.arch.cp_async_wait_group(0)
        self._store_accumulated(tensors.partials, memory, walk, rank, line)

    def _fetch(self, inputs, slots, first, row, count, stage):
        """Start loading a row into a slot."""
        sources = self.ring.sources(inputs, slots, row, first, count)
        self.ring.fetch_rows(sources, self.tile.edge(row, count), stage)
        cute.arch.cp_async_commit_group()

    def _arrive(self, walk, step):
        """Wait for a row and send its sums."""
        stage = step % self.ring.stages
        self._await(walk, stage)
        values = self.sum.thread(self._reader(walk, stage), walk.first, walk.counts)
        return self.sum.arrive(values, walk.shared, walk.before + step)

    def _await(self, walk, stage):
        """Wait until a stage's row is there: until no more loads than those of the later ones are in flight."""
        cute.arch.cp_async_wait_group(self.ring.stages - (2 if self.skewed else 1))

    def _sums(self, walk, step):
        """Wait for a row and for its sums."""
        return self.sum.wait(self._arrive(walk, step), walk.shared, walk.before + step)

    def _start_of(self, mX, name, row, first):
        """Byte address of this thread's first vector of a row, computed once."""
        address = row_address(mX, self.variant.tensors[name], row, self.n)
        return compiler_barrier_value(address + Int64(first[0]) * (mX.element_type.width // 8))

    def _store_row(self, place, rX, first, k):
        """Store this thread's k-th vector, which begins with the column ``first``."""
        address = place + self.tile.reach(k) * (rX.element_type.width // 8)
        if self.tile.partial(k):
            store_masked(rX, address, first, Int32(self.n), True)
        elif self.tile.starts_outside(k) or self.tile.ends_outside(k):
            store_if(self.tile.inside(k, first, self.n), rX, address, True)
        else:
            store(rX, address, True)

    def _remainders(self, count):
        """How many remainders are distributed, whether or not rows have them."""
        return self.sort_period

    def _accumulate(self, partials):
        return None

    def _accumulate_nothing(self, partials, memory, rank, line):
        """Called for a row of the workspace that no walk fills."""

    def _store_accumulated(self, partials, memory, walk, rank, line):
        """Called at the end of a walk."""
