"""Forward of the norms, rows streamed through persistent CTAs; see :mod:`cute_ops.kernels.norm.fwd` for the maths."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.kernels.lib.column_params import affine, column_vectors
from cute_ops.kernels.lib.copy import compiler_barrier, narrow, trim, widen
from cute_ops.kernels.lib.row_layout import row_count
from cute_ops.kernels.norm.persistent import RowWalk
from cute_ops.kernels.norm.statistics import normalised


class NormForwardPersistent(RowWalk):
    """One pass over the rows.

    For long unaligned rows: the weight, which every row would have to load and move into place, stays in registers, in
    its own dtype.
    Tile: as in the forward, and persistent; see :class:`~cute_ops.kernels.norm.persistent.RowWalk`.
    Shared memory: the ring; 4 bytes per sum, warp and CTA of the cluster, twice, in a cluster four times.
    Bytes moved per element: x and out once each; with a residual also residual and residual_out.
    """

    def __init__(self, variant, config, centred):
        super().__init__(variant, config, ("x", "residual"), ("out", "residual_out"), centred, backward=False)

    @cute.jit
    def __call__(self, mX, mResidual, mWeight, mBias, mOut, mResidualOut, stream):
        tiles = (row_count(mX) + (self.tile.rows - 1)) // self.tile.rows
        groups = Int32(cutlass.min(tiles, self.config.clusters))
        self.launch((mX, mResidual), (mWeight, mBias), (mOut, mResidualOut), (None, None), groups, stream)

    def _remainders(self, count):
        return cutlass.min(count, Int64(self.sort_period))

    def _keep(self, columns, first):
        names = zip(columns, ("weight", "bias"))
        return tuple(
            None if m is None else column_vectors(m, self.variant.tensors[name], self.tile, first) for m, name in names
        )

    def _reader(self, slots, kept, first, stage):
        return lambda k: (widen(self._hidden(slots, first, k, stage)),)

    def _sums(self, slots, kept, first, counts, step, before, pending, sSum, mbar):
        """A row's vectors, its mean and rstd."""
        self._await(slots, first, step % self.ring.stages, pending)
        held = [self._hidden(slots, first, k, step % self.ring.stages) for k in range(self.tile.per_thread)]
        return held, *self.sum.row(lambda k: (widen(held[k]),), first, sSum, mbar, before + step)

    def _inside(self, sX, first, k, stage):
        """This thread's k-th vector of a slot, without elements of neighbouring rows."""
        rX = self.ring.read(sX, k, stage)
        if self.tile.predicated(k):
            trim(rX, first[k], Int32(self.n))
        return rX

    def _hidden(self, slots, first, k, stage):
        """This thread's k-th vector of h."""
        rX = self._inside(slots[0], first, k, stage)
        if slots[1] is None:
            return rX
        h = widen(rX) + widen(self._inside(slots[1], first, k, stage))
        return narrow(h, slots[1].element_type, self.tile.vec)

    def _postprocess(self, slots, outputs, kept, accumulated, first, row, step, sums):
        if self.skewed:
            held, (mean, rstd) = None, self.sum.forward_terms(sums, 1.0 / self.n)
        else:
            held, mean, rstd = sums
        mOut, mResidualOut = outputs
        place = self._start_of(mOut, "out", row, first)
        beside = None if mResidualOut is None else self._start_of(mResidualOut, "residual_out", row, first)
        for k in range(self.tile.per_thread):
            rH = self._hidden(slots, first, k, step % self.ring.stages) if held is None else held[k]
            if const_expr(mResidualOut is not None):
                self._store_row(beside, rH, first[k], k)
            y = normalised(widen(rH), mean, rstd)
            columns = [None if rColumns is None else rColumns[k] for rColumns in kept]
            for rColumn in columns:
                if rColumn is not None:
                    compiler_barrier(rColumn)  # It stays in registers in its own dtype, not widened.
            y = affine(y, *columns, self.weight_offset)
            self._store_row(place, narrow(y, mOut.element_type, self.tile.vec), first[k], k)
