"""Forward of the norms, rows streamed through persistent CTAs; see :mod:`cute_ops.kernels.norm.fwd` for the maths."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.kernels.lib.column_params import affine, column_vectors
from cute_ops.kernels.lib.copy import compiler_barrier, narrow, trim, widen
from cute_ops.kernels.lib.row_layout import row_count
from cute_ops.kernels.norm.persistent import Groups, RowWalk
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
    def __call__(self, tensors, stream):
        tiles = (row_count(tensors.x) + (self.tile.rows - 1)) // self.tile.rows
        groups = Int32(cutlass.min(tiles, self.config.clusters))
        inputs, outputs = (tensors.x, tensors.residual), (tensors.out, tensors.residual_out)
        self.launch(Groups(inputs, (tensors.weight, tensors.bias), outputs, (None, None)), groups, stream)

    def _remainders(self, count):
        return cutlass.min(count, Int64(self.sort_period))

    def _keep(self, columns, first):
        names = zip(columns, ("weight", "bias"))
        return tuple(
            None if m is None else column_vectors(m, self.variant.tensors[name], self.tile, first) for m, name in names
        )

    def _reader(self, walk, stage):
        return lambda k: (widen(self._hidden(walk, k, stage)),)

    def _sums(self, walk, step):
        """A row's vectors, its mean and rstd."""
        stage = step % self.ring.stages
        self._await(walk, stage)
        held = [self._hidden(walk, k, stage) for k in range(self.tile.per_thread)]
        return held, *self.sum.row(lambda k: (widen(held[k]),), walk.first, walk.shared, walk.before + step)

    def _inside(self, sX, first, k, stage):
        """This thread's k-th vector of a slot, without elements of neighbouring rows."""
        rX = self.ring.read(sX, k, stage)
        if self.tile.predicated(k):
            trim(rX, first[k], Int32(self.n))
        return rX

    def _hidden(self, walk, k, stage):
        """This thread's k-th vector of h."""
        x, residual = walk.slots
        rX = self._inside(x, walk.first, k, stage)
        if residual is None:
            return rX
        h = widen(rX) + widen(self._inside(residual, walk.first, k, stage))
        return narrow(h, residual.element_type, self.tile.vec)

    def _postprocess(self, walk, row, step, sums):
        if self.skewed:
            held, (mean, rstd) = None, self.sum.forward_terms(sums, 1.0 / self.n)
        else:
            held, mean, rstd = sums
        (mOut, mResidualOut), first = walk.outputs, walk.first
        target = self._start_of(mOut, "out", row, first)
        residual = None if mResidualOut is None else self._start_of(mResidualOut, "residual_out", row, first)
        for k in range(self.tile.per_thread):
            rH = self._hidden(walk, k, step % self.ring.stages) if held is None else held[k]
            if const_expr(mResidualOut is not None):
                self._store_row(residual, rH, first[k], k)
            y = normalised(widen(rH), mean, rstd)
            columns = [None if rColumns is None else rColumns[k] for rColumns in walk.kept]
            for rColumn in columns:
                if rColumn is not None:
                    compiler_barrier(rColumn)  # It stays in registers in its own dtype, not widened.
            y = affine(y, *columns, self.weight_offset)
            self._store_row(target, narrow(y, mOut.element_type, self.tile.vec), first[k], k)
