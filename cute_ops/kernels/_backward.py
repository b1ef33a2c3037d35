"""Backward of the norms, rows streamed through persistent CTAs.

With ``r = rsqrt(mean(x^2) + eps)`` and ``g = dout * (weight_offset + weight)``:
``dx = r * g - x * r^3 * mean(x * g)``, plus the residual's own gradient where there is one;
``dweight = sum_rows(dout * x * r)``, ``dbias = sum_rows(dout)``.
In a layer norm ``x`` stands for x less its mean, and dx is ``r * mean(g)`` less.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.kernels._chain import can_chain, let_next_start, wait_for_previous
from cute_ops.kernels._column_sum import ColumnSum
from cute_ops.kernels._columns import column_vector, scale
from cute_ops.kernels._ring import RowRing
from cute_ops.kernels._rows import RowTile, Vectors, present, row_address, row_count
from cute_ops.kernels._statistics import centre, row_statistics
from cute_ops.kernels._vectors import fragment, narrow, store, store_elements, store_if, store_masked, trim


class NormBackward:
    """One pass over the rows, then one over the partial column sums.

    Tile: as in the forward, and persistent: cluster ``c`` of ``parts`` takes the row groups ``c, c + parts, ...``. With
    ``sorted_by`` rows are sorted by ``row % sorted_by`` and each cluster takes as many neighbours, in one walk for
    each remainder among them: rows of one remainder start at the same place of a vector.
    Rows travel through a ring of ``stages`` slots in shared memory, so that the next rows load while a row's sums
    cross its threads. In a cluster, where sums take long, a row's part is given before the row ahead is finished.
    A thread holds the same columns all along a walk and keeps their weight and their column sums in registers; with
    shifted rows that are not sorted this holds because ``parts * rows`` is a multiple of the vector width. The column
    sums of a walk end in its row of the workspace; a second kernel adds the rows in a fixed order.
    Shared memory: the ring; 4 bytes per sum, warp and CTA of the cluster, twice, in a cluster four times.
    Bytes moved per element: x, dout and dx once each; with a residual also its two gradients.

    Args:
        variant: the kernel's variant.
        x, dx: the name of the normalised tensor, the names of the outputs of its gradient.
        centred: whether the row's mean is subtracted.
    """

    def __init__(self, variant, x, dx, centred):
        self.variant = variant
        self.n = variant.dims["n"]
        self.weight_offset = variant.attrs.get("weight_offset", 0.0)
        self.names = (x, "dout", "dresidual_out")
        self.dx_names = dx
        self.tile = RowTile(Vectors(variant, (*self.names, *dx), self.n), variant.tile)
        self.ring = RowRing(self.tile, present(variant, self.names), variant.tile["stages"])
        self.sorted_by = variant.tile.get("sorted_by", 0)
        self.skewed = self.tile.cluster > 1 and self.ring.stages > 2
        self.sum = row_statistics(
            centred, self.tile, variant.attrs["eps"], backward=True, stages=4 if self.skewed else 2
        )
        self.column_sum = ColumnSum(self.n, variant.arch)
        self.chained = can_chain(variant.arch)

    @cute.jit
    def __call__(self, inputs, columns, outputs, dcolumns, parts, stream):
        """Launch both kernels.

        Args:
            inputs: (mX, mDout, mDresidualOut or None).
            columns: (mWeight or None, mBias or None).
            outputs: gradients of the normalised tensor, one per name in ``dx``, None where absent.
            dcolumns: (mDweight or None, mDbias or None).
            parts: their workspaces, (parts, n) each.
        """
        mParts = parts[0] if const_expr(parts[0] is not None) else parts[1]
        rows = row_count(inputs[0])
        if const_expr(mParts is not None):
            groups = Int32(mParts.shape[0]) - max(self.sorted_by - 1, 0)
        else:
            groups = Int32(cutlass.min((rows + (self.tile.rows - 1)) // self.tile.rows, self.variant.tile["parts"]))
        cluster = self.tile.cluster
        self.kernel(inputs, columns[0], outputs, parts).launch(
            grid=[groups, cluster, 1],
            block=[self.tile.threads, 1, 1],
            cluster=[1, cluster, 1] if const_expr(cluster > 1) else None,
            min_blocks_per_mp=self.variant.tile["resident"],
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=self.chained,
        )
        if const_expr(mParts is not None):
            self.column_sum(parts, dcolumns, stream)

    @cute.kernel
    def kernel(self, inputs, mWeight, outputs, parts):
        tidx, _, _ = cute.arch.thread_idx()
        group, rank, _ = cute.arch.block_idx()
        groups, _, _ = cute.arch.grid_dim()
        if const_expr(self.tile.cluster == 1):
            rank = 0
        smem = cutlass.utils.SmemAllocator()
        base, slots = self.ring.allocate(smem, inputs, self.names)
        sSum, mbar = self.sum.allocate(smem)
        self.sum.prepare(mbar)

        wait_for_previous(self.chained)
        self.sum.ready()
        count = row_count(inputs[0])
        place = Int32(group)
        if const_expr(self.sorted_by):
            height = (count + (self.sorted_by - 1)) // self.sorted_by
            begin = height * self.sorted_by * group // Int64(groups)
            end = height * self.sorted_by * (group + 1) // Int64(groups)
            least, most = Int32(begin // height), Int32((end - 1) // height)
            for remainder in cutlass.range(least, most + 1, unroll=1):
                low, high = height * remainder, height * (remainder + 1)
                start, stop = cutlass.max(begin, low), cutlass.min(end, high)
                steps = Int32(stop - start)
                self._walk(
                    inputs, slots, mWeight, outputs, parts,
                    lambda step: cutlass.select_(
                        step < steps, (start - low + Int64(step)) * self.sorted_by + remainder, count
                    ),
                    steps, Int32(start - begin), base, rank, place + remainder, sSum, mbar,
                )  # fmt: skip
                if group > 0 and begin == low:
                    # The walk of the cluster before ended with its remainder: no walk has the place between.
                    self._store_zeros(parts, place + remainder - 1, base, rank)
        else:
            tiles = (count + (self.tile.rows - 1)) // self.tile.rows
            steps = Int32((tiles - group + (groups - 1)) // Int64(groups))
            local = tidx // self.tile.threads_per_row
            self._walk(
                inputs, slots, mWeight, outputs, parts,
                lambda step: (Int64(group) + Int64(step) * Int64(groups)) * self.tile.rows + local,
                steps, 0, base, rank, place, sSum, mbar,
            )  # fmt: skip
        let_next_start(self.chained)

    @cute.jit
    def _walk(
        self, inputs, slots: cutlass.Constexpr, mWeight, outputs, parts, row_of: cutlass.Constexpr, steps: Int32,
        before: cutlass.Constexpr, base, rank, place: Int32, sSum, mbar,
    ):  # fmt: skip
        """Go through rows that start at the same place of a vector, and store their column sums.

        Args:
            inputs, slots, mWeight, outputs, parts: as in the kernel.
            row_of: from a step to this thread's row; the row count or more where there is none.
            steps: steps of this walk.
            before: steps of the walks before.
            base: the ring's shared memory.
            rank: the CTA's in its cluster.
            place: row of the workspace.
            sSum, mbar: shared memory of the sums.
        """
        tidx = cute.arch.thread_idx()[0]
        count = row_count(inputs[0])
        first = self._first(tidx % self.tile.threads_per_row, rank, row_of(Int32(0)))
        for stage in cutlass.range_constexpr(self.ring.stages - 1):
            self._fetch(inputs, slots, first, row_of(Int32(stage)), count, Int32(stage))
        rWeight = self._load_weight(mWeight, first)
        rDweight = self._accumulators(parts[0])
        rDbias = self._accumulators(parts[1])
        counts = self.sum.counts(first)
        pending = self.ring.stages - (2 if self.skewed else 1)
        if const_expr(self.skewed):
            if steps > 0:
                self._give(slots, rWeight, first, counts, Int32(0), before, pending, sSum, mbar)

        for step in cutlass.range(steps, unroll=1):
            ahead = step + (self.ring.stages - 1)
            self._fetch(inputs, slots, first, row_of(ahead), count, ahead % self.ring.stages)
            if const_expr(self.skewed):
                if step + 1 < steps:
                    self._give(slots, rWeight, first, counts, step + 1, before, pending, sSum, mbar)
                sums = self.sum.take(None, sSum, mbar, before + step)
            else:
                given = self._give(slots, rWeight, first, counts, step, before, pending, sSum, mbar)
                sums = self.sum.take(given, sSum, mbar, before + step)
            row = row_of(step)
            if row < count:
                self._finish(slots, outputs, rWeight, rDweight, rDbias, first, row, step, sums)

        cute.arch.cp_async_wait_group(0)
        for mParts, rSum in zip(parts, (rDweight, rDbias)):
            if const_expr(mParts is not None):
                self._store_parts(mParts, rSum, base, place, rank, first)

    def _first(self, t, rank, row):
        """First columns of this thread's vectors of a row."""
        shift = self.tile.v.shift(row, self.n)
        return [self.tile.vector(t, rank, k) * self.tile.vec - shift for k in range(self.tile.per_thread)]

    def _fetch(self, inputs, slots, first, row, count, stage):
        """Start loading a row into a slot."""
        for mX, sX, name in zip(inputs, slots, self.names):
            if mX is not None:
                address = row_address(mX, self.variant.tensors[name], row, self.n)
                self.ring.fetch(sX, address, first, row < count, stage)
        cute.arch.cp_async_commit_group()

    def _give(self, slots, rWeight, first, counts, step, before, pending, sSum, mbar):
        """Wait until no more than ``pending`` loads are on their way and give a row's sums."""
        cute.arch.cp_async_wait_group(pending)
        stage = step % self.ring.stages
        for k in range(self.tile.per_thread):
            if self._ragged(k):
                self.ring.trim(slots[:2], k, stage, first[k])
        values = self.sum.thread(self._reader(slots, rWeight, stage), first, counts)
        return self.sum.give(values, sSum, mbar, before + step)

    def _reader(self, slots, rWeight, stage):
        """From k to (x, g) of this thread's k-th vector."""

        def read(k):
            x, dout = self._pair(slots, k, stage)
            return x, dout if rWeight is None else dout * scale(rWeight[k], self.weight_offset)

        return read

    def _finish(self, slots, outputs, rWeight, rDweight, rDbias, first, row, step, sums):
        """Write a row's gradient and add to the column sums."""
        mean, rstd, pull, push = self.sum.backward_terms(sums, 1.0 / self.n)
        stage = step % self.ring.stages
        for k in range(self.tile.per_thread):
            x, dout = self._pair(slots, k, stage)
            x = centre(x, mean)
            scaled = dout * rstd
            dx = (scaled if rWeight is None else scaled * scale(rWeight[k], self.weight_offset)) - x * pull
            if push is not None:
                dx = dx - push
            if slots[2] is not None:
                dx = dx + self.ring.read(slots[2], k, stage).load().to(Float32)
            for mDx, name in zip(outputs, self.dx_names):
                if mDx is not None:
                    self._store_row(mDx, name, narrow(dx, mDx.element_type, self.tile.vec), row, first[k], k)
            if rDweight is not None:
                rDweight[k].store(rDweight[k].load() + x * scaled)
            if rDbias is not None:
                rDbias[k].store(rDbias[k].load() + dout)

    def _pair(self, slots, k, stage):
        return tuple(self.ring.read(sX, k, stage).load().to(Float32) for sX in slots[:2])

    def _load_weight(self, mWeight, first):
        if mWeight is None:
            return None
        key, tile = self.variant.tensors["weight"], self.tile
        rWeight = [column_vector(mWeight, key, tile, first[k], k) for k in range(tile.per_thread)]
        for k in range(tile.per_thread):
            if self._ragged(k):
                # The sums multiply it by zeros outside the row, which does not undo a NaN.
                trim(rWeight[k], first[k], Int32(self.n))
        return rWeight

    def _accumulators(self, mParts):
        if mParts is None:
            return None
        sums = [fragment(Float32, self.tile.vec) for _ in range(self.tile.per_thread)]
        for rSum in sums:
            rSum.fill(0.0)
        return sums

    def _ragged(self, k):
        """Whether some thread's k-th vector may be part inside, part outside the row."""
        return self.tile.starts_outside(k) or (self.tile.v.masked and self.tile.ends_outside(k))

    def _store_row(self, mX, name, rX, row, first, k):
        address = row_address(mX, self.variant.tensors[name], row, self.n)
        address = address + Int64(first) * (mX.element_type.width // 8)
        if self._ragged(k):
            store_masked(rX, address, first, Int32(self.n), True)
        elif self.tile.ends_outside(k):
            store_if(first < self.n, rX, address, True)
        else:
            store(rX, address, True)

    @cute.jit
    def _store_zeros(self, parts, place: Int32, base, rank):
        first = self._first(cute.arch.thread_idx()[0], rank, Int64(0))
        for mParts in parts:
            if const_expr(mParts is not None):
                self._store_parts(mParts, self._accumulators(mParts), base, place, rank, first)

    @cute.jit
    def _store_parts(self, mParts, rSum: cutlass.Constexpr, base, place, rank, first: cutlass.Constexpr):
        """Write the CTA's column sums to a row of the workspace, after adding those of its rows."""
        n, vec = self.n, self.tile.vec
        address = mParts.iterator.toint() + Int64(place) * (n * 4)
        if const_expr(self.tile.rows == 1):
            for k in cutlass.range_constexpr(self.tile.per_thread):
                target = address + Int64(first[k]) * 4
                if const_expr(self.tile.v.masked or (n * 4) % 16 != 0):
                    store_elements(rSum[k], target, first[k], Int32(n))
                else:
                    store_if(first[k] < n, rSum[k], target)
        else:
            width = self.tile.threads_per_row * self.tile.per_thread * vec
            tidx = cute.arch.thread_idx()[0]
            t, local = tidx % self.tile.threads_per_row, tidx // self.tile.threads_per_row
            sRows = cute.make_tensor(
                cute.recast_ptr(base, dtype=Float32), cute.make_layout((width, self.tile.rows), stride=(1, width))
            )
            # The slots are free once every thread is here; so are the sums of the call before.
            cute.arch.barrier()
            for k in cutlass.range_constexpr(self.tile.per_thread):
                for j in cutlass.range_constexpr(vec):
                    sRows[self.tile.vector(t, rank, k) * vec + j, local] = rSum[k][j]
            cute.arch.barrier()
            gParts = cute.make_tensor(cute.make_ptr(Float32, address, cute.AddressSpace.gmem), cute.make_layout(n))
            for column in cutlass.range(tidx, n, self.tile.threads, unroll=1):
                total = Float32(0.0)
                for r in cutlass.range_constexpr(self.tile.rows):
                    shifted = column + self.tile.v.shift(Int64(place) * self.tile.rows + r, n)
                    total = total + sRows[shifted, r]
                gParts[column] = total
