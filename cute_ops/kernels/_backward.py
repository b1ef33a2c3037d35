"""Backward of the RMS norms, rows streamed through persistent CTAs.

With ``r = rsqrt(mean(x^2) + eps)`` and ``g = dout * (weight_offset + weight)``:
``dx = r * g - x * r^3 * mean(x * g)``, plus the residual's own gradient where there is one;
``dweight = sum_rows(dout * x * r)``, ``dbias = sum_rows(dout)``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.kernels._chain import can_chain, let_next_start, wait_for_previous
from cute_ops.kernels._column_sum import ColumnSum
from cute_ops.kernels._columns import column_vector, scale
from cute_ops.kernels._reduce import RowSum
from cute_ops.kernels._ring import RowRing
from cute_ops.kernels._rows import RowTile, Vectors, present, row_address, row_count
from cute_ops.kernels._vectors import fragment, narrow, store, store_elements, store_if, store_masked, trim


class NormBackward:
    """One pass over the rows, then one over the partial column sums.

    Tile: as in the forward, and persistent: cluster ``c`` of ``parts`` takes the row groups ``c, c + parts, ...``.
    Rows travel through a ring of ``stages`` slots in shared memory, so that the next rows load while a row's two sums
    cross its threads. In a cluster, where sums take long, a row's part is given before the row ahead is finished.
    A thread always holds the same columns and keeps their weight and their column sums in registers; with shifted
    rows this holds because ``parts * rows`` is a multiple of the vector width. The column sums of a CTA end in its
    row of the workspace; a second kernel adds the rows in a fixed order.
    Shared memory: the ring; 8 bytes per warp and CTA of the cluster, twice, in a cluster four times.
    Bytes moved per element: x, dout and dx once each; with a residual also its two gradients.

    Args:
        variant: the kernel's variant.
        x, dx: the name of the normalised tensor, the names of the outputs of its gradient.
    """

    def __init__(self, variant, x, dx):
        self.variant = variant
        self.n = variant.dims["n"]
        self.eps = variant.attrs["eps"]
        self.weight_offset = variant.attrs["weight_offset"]
        self.names = (x, "dout", "dresidual_out")
        self.dx_names = dx
        self.tile = RowTile(Vectors(variant, (*self.names, *dx), self.n), variant.tile)
        self.ring = RowRing(self.tile, present(variant, self.names), variant.tile["stages"])
        self.skewed = self.tile.cluster > 1 and self.ring.stages > 2
        self.sum = RowSum(self.tile, values=2, stages=4 if self.skewed else 2)
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
            groups = Int32(mParts.shape[0])
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
        base = smem.allocate(self.ring.bytes, 16)
        slots = [self.ring.view(base, m, name) if m is not None else None for m, name in zip(inputs, self.names)]
        sSum, mbar = self.sum.allocate(smem)
        self.sum.prepare(mbar)
        for sX in slots:
            if const_expr(sX is not None):
                self.ring.clear(sX)

        t = tidx % self.tile.threads_per_row
        local = tidx // self.tile.threads_per_row
        count = row_count(inputs[0])
        tiles = (count + (self.tile.rows - 1)) // self.tile.rows
        steps = Int32((tiles - group + (groups - 1)) // Int64(groups))
        shift = self.tile.v.shift(Int64(group) * self.tile.rows + local, self.n)
        first = [self.tile.vector(t, rank, k) * self.tile.vec - shift for k in range(self.tile.per_thread)]

        wait_for_previous(self.chained)
        for stage in cutlass.range_constexpr(self.ring.stages - 1):
            self._fetch(inputs, slots, first, self._row(group, groups, local, Int32(stage)), count, Int32(stage))
        rWeight = self._load_weight(mWeight, first)
        rDweight = self._accumulators(parts[0])
        rDbias = self._accumulators(parts[1])
        self.sum.ready()
        if const_expr(self.skewed):
            if steps > 0:
                self._give(slots, rWeight, first, Int32(0), sSum, mbar)

        for step in cutlass.range(steps, unroll=1):
            ahead = step + (self.ring.stages - 1)
            self._fetch(inputs, slots, first, self._row(group, groups, local, ahead), count, ahead % self.ring.stages)
            if const_expr(self.skewed):
                if step + 1 < steps:
                    self._give(slots, rWeight, first, step + 1, sSum, mbar)
                squares, products = self.sum.take(None, sSum, mbar, step)
            else:
                given = self._give(slots, rWeight, first, step, sSum, mbar)
                squares, products = self.sum.take(given, sSum, mbar, step)
            rstd = cute.math.rsqrt(squares * (1.0 / self.n) + self.eps, fastmath=True)
            pull = rstd * rstd * rstd * (products * (1.0 / self.n))
            row = self._row(group, groups, local, step)
            if row < count:
                self._finish(slots, outputs, rWeight, rDweight, rDbias, first, row, step, rstd, pull)

        cute.arch.cp_async_wait_group(0)
        let_next_start(self.chained)
        for mParts, rSum in zip(parts, (rDweight, rDbias)):
            if const_expr(mParts is not None):
                self._store_parts(mParts, rSum, base, group, t, rank, first)

    def _row(self, group, groups, local, step):
        return (Int64(group) + Int64(step) * Int64(groups)) * self.tile.rows + local

    def _fetch(self, inputs, slots, first, row, count, stage):
        """Start loading a row into a slot."""
        for mX, sX, name in zip(inputs, slots, self.names):
            if mX is not None:
                address = row_address(mX, self.variant.tensors[name], row, self.n)
                self.ring.fetch(sX, address, first, row < count, stage)
        cute.arch.cp_async_commit_group()

    def _give(self, slots, rWeight, first, step, sSum, mbar):
        """Wait for a row and give its two sums."""
        cute.arch.cp_async_wait_group(self.ring.stages - (2 if self.skewed else 1))
        stage = step % self.ring.stages
        squares, products = Float32(0.0), Float32(0.0)
        for k in range(self.tile.per_thread):
            if self._ragged(k):
                self.ring.trim(slots[:2], k, stage, first[k])
            x, dout = self._pair(slots, k, stage)
            g = dout if rWeight is None else dout * scale(rWeight[k], self.weight_offset)
            squares = squares + (x * x).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            products = products + (x * g).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        return self.sum.give((squares, products), sSum, mbar, step)

    def _finish(self, slots, outputs, rWeight, rDweight, rDbias, first, row, step, rstd, pull):
        """Write a row's gradient and add to the column sums."""
        stage = step % self.ring.stages
        for k in range(self.tile.per_thread):
            x, dout = self._pair(slots, k, stage)
            scaled = dout * rstd
            dx = (scaled if rWeight is None else scaled * scale(rWeight[k], self.weight_offset)) - x * pull
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
    def _store_parts(self, mParts, rSum: cutlass.Constexpr, base, group, t, rank, first: cutlass.Constexpr):
        """Write the CTA's column sums to its row of the workspace, after adding those of its rows."""
        n, vec = self.n, self.tile.vec
        address = mParts.iterator.toint() + Int64(group) * (n * 4)
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
            local = tidx // self.tile.threads_per_row
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
                    place = column + self.tile.v.shift(Int64(group) * self.tile.rows + r, n)
                    total = total + sRows[place, r]
                gParts[column] = total
