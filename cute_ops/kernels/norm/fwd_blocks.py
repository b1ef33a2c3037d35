"""Forward of the norms, short rows that start anywhere; see :mod:`cute_ops.kernels.norm.fwd` for the maths."""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.lib.column_params import affine, column_vectors
from cute_ops.kernels.lib.copy import narrow, widen
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_blocks import Elements, RowBlocks
from cute_ops.kernels.lib.row_layout import RowTile, clusters, present, row_address, row_count
from cute_ops.kernels.norm.fwd import ROW_TENSORS, NormForward
from cute_ops.kernels.norm.statistics import normalised, row_statistics

# Vectors of a thread of a short unaligned row that is held in vectors.
VECTORS = 3


def blocks(variant, config, centred):
    """The form ``blocks``; one pass of registers where rows do not follow on each other."""
    form = NormForwardBlocks(variant, config, centred)
    if form.blocks.holds(present(variant, ROW_TENSORS)):
        return form
    vectors = form.n * max(ITEMSIZE[key.dtype] for key in present(variant, ROW_TENSORS)) // VECTOR_BYTES + 2
    share = next((share for share in (8, 16) if vectors <= share * VECTORS), WARP)
    return NormForward(variant, replace(config, threads_per_row=share, unroll=1, resident=1), centred)


class NormForwardBlocks:
    """One pass: the rows of a CTA go through shared memory as whole vectors.

    Tile: ``threads_per_row`` threads of a warp hold a row, of which each takes every so many-th element; a CTA of
    ``threads`` holds ``threads / threads_per_row`` rows at a time, ``unroll`` times, with the weight in registers.
    Shared memory: the CTA's rows of x and residual, which become those of out and residual_out.
    Bytes moved per element: x and out once each; with a residual also residual and residual_out.
    """

    def __init__(self, variant, config, centred):
        self.variant, self.n = variant, variant.dims["n"]
        self.weight_offset = variant.attrs.get("weight_offset", 0.0)
        self.tile = RowTile(Elements(variant, ROW_TENSORS, self.n), config)
        self.unroll, self.resident = config.unroll, config.resident
        self.blocks = RowBlocks(self.tile, self.tile.rows * self.unroll)
        narrow = ITEMSIZE[variant.tensors["x"].dtype] == 2
        self.sum = row_statistics(centred, self.tile, variant.attrs["eps"], False, min(self.unroll, 2), narrow=narrow)
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, tensors, stream):
        count = Int32((row_count(tensors.x) + (self.blocks.rows - 1)) // self.blocks.rows)
        self.kernel(tensors).launch(
            **clusters(self.tile, count, self.resident, 100), stream=stream, use_pdl=self.pdl
        )  # fmt: skip

    @cute.kernel
    def kernel(self, tensors):
        mX, mResidual, mWeight, mBias, mOut, mResidualOut = tensors
        bidx, local, t, rank = self.tile.here()
        smem = cutlass.utils.SmemAllocator()
        sX, sResidual = self.blocks.allocate(smem, mX), self.blocks.allocate(smem, mResidual)
        shared = self.sum.allocate(smem)
        self.sum.prepare(shared)
        start, first = Int64(bidx) * self.blocks.rows, self.tile.columns(t, rank, Int64(0))
        rows = Int32(cutlass.min(row_count(mX) - start, Int64(self.blocks.rows)))
        wait_for_previous(self.pdl)
        self.blocks.fetch(sX, self._address(mX, "x", start), rows)
        if const_expr(mResidual is not None):
            self.blocks.fetch(sResidual, self._address(mResidual, "residual", start), rows)
        cute.arch.cp_async_commit_group()
        kept = [
            [None] * self.tile.per_thread
            if m is None
            else column_vectors(m, self.variant.tensors[name], self.tile, first)
            for m, name in ((mWeight, "weight"), (mBias, "bias"))
        ]
        cute.arch.cp_async_wait_group(0)
        self.sum.ready()
        cute.arch.barrier()
        let_next_start(self.pdl)
        for u in cutlass.range(self.unroll, unroll=1):
            self._row(sX, sResidual, kept, u * self.tile.rows + local, first, (shared, u))
        cute.arch.barrier()
        self.blocks.send(sX, self._address(mOut, "out", start), rows)
        if const_expr(mResidual is not None):
            self.blocks.send(sResidual, self._address(mResidualOut, "residual_out", start), rows)

    def _address(self, mX, name, row):
        return row_address(mX, self.variant.tensors[name], row, self.n)

    def _row(self, sX, sResidual, kept, local, first, step):
        inside = [not self.tile.ends_outside(k) for k in range(self.tile.per_thread)]
        places = list(zip(first, inside))
        held = [self.blocks.read(sX, local, *place) for place in places]
        if sResidual is not None:
            for k, place in enumerate(places):
                h = widen(held[k]) + widen(self.blocks.read(sResidual, local, *place))
                held[k] = narrow(h, sResidual.element_type, 1)
                self.blocks.write(held[k], sResidual, local, *place)
        mean, rstd = self.sum.row(lambda k: (widen(held[k]),), first, *step)
        for k, place in enumerate(places):
            y = affine(normalised(widen(held[k]), mean, rstd), kept[0][k], kept[1][k], self.weight_offset)
            self.blocks.write(narrow(y, sX.element_type, 1), sX, local, *place)
