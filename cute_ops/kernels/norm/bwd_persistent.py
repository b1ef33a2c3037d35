"""Backward of the norms, rows streamed through persistent CTAs.

With ``r = rsqrt(mean(x^2) + eps)`` and ``g = dout * (weight_offset + weight)``:
``dx = r * g - x * r^3 * mean(x * g)``, plus the residual's own gradient if there is one;
``dweight = sum_rows(dout * x * r)``, ``dbias = sum_rows(dout)``.
In a layer norm ``x`` stands for x minus its mean, and ``r * mean(g)`` is subtracted from dx.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.hardware import WARP
from cute_ops.kernels.lib.column_params import column_vectors, scale
from cute_ops.kernels.lib.column_reduce import ColumnSum, TileColumnSum
from cute_ops.kernels.lib.copy import fragment, narrow, store_if, trim, widen
from cute_ops.kernels.lib.row_layout import row_count
from cute_ops.kernels.norm.persistent import Groups, RowWalk
from cute_ops.kernels.norm.statistics import centre


class NormBackward(RowWalk):
    """One pass over the rows, then one over the partial column sums.

    Tile: as in the forward, and persistent; see :class:`~cute_ops.kernels.norm.persistent.RowWalk`. A thread keeps the
    weight and the column sums of its columns in registers. The column sums of a walk end in its row of the workspace; a
    second kernel adds the rows in a fixed order.
    Shared memory: the ring; 4 bytes per sum, warp and CTA of the cluster, twice, in a cluster four times.
    Bytes moved per element: x, dout and dx once each; with a residual also its two gradients.
    ``x`` names the normalised tensor, ``dx`` the outputs of its gradient.
    """

    def __init__(self, variant, config, x, dx, centred):
        super().__init__(variant, config, (x, "dout", "dresidual_out"), dx, centred, backward=True)
        self.dx_names = dx
        self.tile_sum, self.column_sum = TileColumnSum(self.tile), ColumnSum(self.n, variant.arch)

    @cute.jit
    def __call__(self, tensors, stream):
        """Launch both kernels. The workspaces are (partials, n) each."""
        partials = tensors.partials[:2]
        mPartials = partials[0] if const_expr(partials[0] is not None) else partials[1]
        rows = row_count(tensors.inputs[0])
        if const_expr(mPartials is not None):
            groups = Int32(mPartials.shape[0]) - max(self.sort_period - 1, 0)
        else:
            groups = Int32(cutlass.min((rows + (self.tile.rows - 1)) // self.tile.rows, self.config.clusters))
        self.launch(Groups(tensors.inputs, tensors.columns[0], tensors.outputs, partials), groups, stream)
        if const_expr(mPartials is not None):
            self.column_sum(partials, tensors.dcolumns, stream)

    def _await(self, walk, stage):
        """Wait for a row; then overwrite the vectors' elements of neighbouring rows, once for both reads."""
        super()._await(walk, stage)
        for k in range(self.tile.per_thread):
            if self.tile.predicated(k):
                self.ring.trim(walk.slots[:2], k, stage, walk.first[k])

    def _reader(self, walk, stage):
        """From k to (x, g) of this thread's k-th vector."""
        rWeight = walk.kept

        def read(k):
            x, dout = (widen(self.ring.read(sX, k, stage)) for sX in walk.slots[:2])
            return x, dout if rWeight is None else dout * scale(rWeight[k], self.weight_offset)

        return read

    def _postprocess(self, walk, row, step, sums):
        """Write a row's gradient and add to the column sums."""
        terms, first = self.sum.backward_terms(sums, 1.0 / self.n), walk.first
        targets = [
            None if m is None else self._start_of(m, name, row, first) for m, name in zip(walk.outputs, self.dx_names)
        ]
        given = walk, targets, step % self.ring.stages, terms
        for k in range(self.tile.per_thread):
            if self.tile.sparse(k):
                self._postprocess_if(first[k] < self.n, given, k)
            else:
                self._postprocess_vector(*given, k)

    @cute.jit
    def _postprocess_if(self, valid, given: cutlass.Constexpr, k: cutlass.Constexpr):
        if valid:
            self._postprocess_vector(*given, k)

    def _postprocess_vector(self, walk, targets, stage, terms, k):
        mean, rstd, pull, push = terms
        rWeight, slots, (rDweight, rDbias) = walk.kept, walk.slots, walk.accumulated
        x, dout = (widen(self.ring.read(sX, k, stage)) for sX in slots[:2])
        x = centre(x, mean)
        scaled = dout * rstd
        rest = x * pull if push is None else x * pull + push
        dx = (scaled if rWeight is None else scaled * scale(rWeight[k], self.weight_offset)) - rest
        if slots[2] is not None:
            dx = dx + widen(self.ring.read(slots[2], k, stage))
        for mDx, target in zip(walk.outputs, targets):
            if mDx is not None:
                self._store_row(target, narrow(dx, mDx.element_type, self.tile.vec), walk.first[k], k)
        if rDweight is not None:
            rDweight[k].store(rDweight[k].load() + x * scaled)
        if rDbias is not None:
            rDbias[k].store(rDbias[k].load() + dout)

    def _keep(self, mWeight, first):
        if mWeight is None:
            return None
        key, tile = self.variant.tensors["weight"], self.tile
        rWeight = column_vectors(mWeight, key, tile, first)
        for k in range(tile.per_thread):
            if self.tile.predicated(k):
                # Outside the row the sums multiply it by zeros, and a NaN times zero is NaN.
                trim(rWeight[k], first[k], Int32(self.n))
        return rWeight

    def _accumulate(self, partials):
        return tuple(self._accumulators(mPartials) for mPartials in partials)

    def _accumulators(self, mPartials):
        if mPartials is None:
            return None
        return [fragment(Float32, self.tile.vec, 0.0) for _ in range(self.tile.per_thread)]

    def _store_accumulated(self, partials, memory, walk, rank, line):
        self._store_lines(partials, walk.accumulated, walk.first, memory.base, rank, line)

    def _accumulate_nothing(self, partials, memory, rank, line):
        first = self.tile.columns(cute.arch.thread_idx()[0], rank, Int64(0))
        self._store_lines(partials, self._accumulate(partials), first, memory.base, rank, line)

    def _store_lines(self, partials, accumulated, first, base, rank, line):
        for mPartials, rSum in zip(partials, accumulated):
            if mPartials is not None:
                self._store_partials(mPartials, rSum, base, line, rank, first)

    @cute.jit
    def _store_partials(self, mPartials, rSum: cutlass.Constexpr, base, line, rank, first: cutlass.Constexpr):
        """Write the CTA's column sums to a row of the workspace, after adding those of its rows."""
        n = self.n
        address = mPartials.iterator.toint() + Int64(line) * (n * 4)
        if const_expr(self.tile.rows == 1 and (self.tile.v.masked or (n * 4) % 16 != 0)):
            self._store_across(rSum, address, base, first)
        elif const_expr(self.tile.rows == 1):
            for k in cutlass.range_constexpr(self.tile.per_thread):
                store_if(self.tile.inside(k, first[k], n), rSum[k], address + Int64(first[k]) * 4)
        else:
            self.tile_sum(rSum, base, address, line, rank)

    @cute.jit
    def _store_across(self, rSum: cutlass.Constexpr, address: Int64, base, first: cutlass.Constexpr):
        """Write column sums that start anywhere element by element, neighbouring lanes storing neighbouring elements.

        If each thread stored its own elements, there would be eight times as many accesses.
        """
        vec, threads = self.tile.vec, self.tile.threads
        tidx = cute.arch.thread_idx()[0]
        lane = tidx % WARP
        sums = cute.recast_ptr(base, dtype=Float32)
        sVectors = cute.make_tensor(sums, cute.make_layout((vec, threads), stride=(1, vec)))
        sElements = cute.make_tensor(sums, cute.make_layout((WARP, vec, threads // WARP)))
        gPartials = cute.make_tensor(cute.make_ptr(Float32, address, cute.AddressSpace.gmem), cute.make_layout(self.n))
        # After the barrier no thread reads the slots; after the next one they are free for the next walk.
        cute.arch.barrier()
        for k in cutlass.range_constexpr(self.tile.per_thread):
            start = first[k] - lane * vec + lane
            cute.autovec_copy(rSum[k], sVectors[None, tidx])
            cute.arch.sync_warp()
            for i in cutlass.range_constexpr(vec):
                column = start + i * WARP
                if column >= 0 and column < self.n:
                    gPartials[column] = sElements[lane, i, tidx // WARP]
            cute.arch.sync_warp()
        cute.arch.barrier()
