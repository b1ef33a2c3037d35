"""An expression with reductions of rows that are too long to be held, or of unknown length."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.kernels.lib.column_params import column_elements
from cute_ops.kernels.lib.copy import fragment, gmem_elements, store, store_elements, widen
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import VectorAccess
from cute_ops.kernels.lib.row_layout import MAX_GRID, Vectors, WalkedRow, clusters, readable
from cute_ops.kernels.rows.config import FusedRowConfig
from cute_ops.kernels.rows.exchange import exchanges
from cute_ops.kernels.rows.pieces import RowPieces, Shown


class RowsInPasses(RowPieces):
    """Walks a row once for each stage of its reductions and once more for its outputs.

    Tile: a CTA takes a row; vector ``i`` of thread ``t`` is ``i * threads + t``. With gradients of row vectors a CTA
    takes every so many rows, all of which start at the same place of a vector, and adds to its row of the workspaces,
    of which a thread touches its own columns only.
    Shared memory: 4 bytes per reduction and warp, twice. Bytes moved per element: every tile that is read once per
    walk, from L2 where the row fits; every output once.
    """

    def __init__(self, variant):
        super().__init__(variant)
        config = FusedRowConfig.of(variant.config)
        self.tile = WalkedRow(Vectors(Shown(self.tensors), self.names, self.n, config.align_vectors), config)
        self.exchanges = exchanges(self.tile, self.emit.primitives)
        self.sums = [*self.outputs["r"], *self.outputs["s"]]
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, arguments, stream):
        tensors = self.named(arguments)
        groups = cutlass.min(self.shape(tensors)[0], Int64(MAX_GRID))
        if const_expr(len(self.sums) > 0):
            groups = tensors[self.partials_of(self.sums[0][1])].shape[0]
        self.kernel(arguments).launch(**clusters(self.tile, Int32(groups)), stream=stream, use_pdl=self.pdl)

    @cute.kernel
    def kernel(self, arguments):
        tidx, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        groups, _, _ = cute.arch.grid_dim()
        tensors = self.named(arguments)
        smem = cutlass.utils.SmemAllocator()
        shared = None
        if const_expr(len(self.exchanges) > 0):
            shared = self.exchanges[0].allocate(smem)
        count, long_n = self.shape(tensors)
        n = Int32(long_n)
        steps, start, stride = Int32((count - group + (groups - 1)) // Int64(groups)), Int64(group), Int64(groups)
        if const_expr(self.sums_of_examples):
            steps, start, stride, *_ = self.walk_of_example(tensors, group, groups, 1)
            stride = Int64(stride)
        wait_for_previous(self.pdl)
        if const_expr(len(self.sums) == 0):
            let_next_start(self.pdl)
        sums, scalars = (
            self._begin(tensors, Int32(group), n, long_n),
            [fragment(Float32, 1, 0.0) for _ in self.outputs["s"]],
        )
        for step in cutlass.range(steps, unroll=1):
            walk = RowPass(self, tensors, start + Int64(step) * stride, n, long_n, count)
            values = self._reduced(walk, step, shared, scalars)
            self._outputs(walk, values, sums, Int32(group), tidx)
        self._end(tensors, sums, Int32(group), tidx, n)
        if tidx == 0:
            for rSum, (_, piece) in zip(scalars, self.outputs["s"]):
                store(rSum, tensors[self.partials_of(piece)].iterator.toint() + Int64(group) * 4)
        if const_expr(len(self.sums) > 0):
            let_next_start(self.pdl)

    def _reduced(self, walk, step, shared, scalars):
        """The values of a row after its last stage; its numbers are stored and added to their sums over rows."""
        tidx, stages = cute.arch.thread_idx()[0], len(self.emit.primitives)
        values = self.emit.begin(self.row_numbers(walk.tensors, walk.row, walk.row < walk.count), walk.n)
        for s in range(stages):
            totals = self._stage(walk, values, s, tidx)
            values.reduced(s, self.exchanges[s](totals, shared, step * stages + s))
        self.store_numbers(walk.tensors, values, walk.row, tidx == 0)
        for rSum, (place, _) in zip(scalars, self.outputs["s"]):
            rSum[0] = rSum[0] + values.number(place)
        return values

    @cute.jit
    def _stage(self, walk: cutlass.Constexpr, values: cutlass.Constexpr, stage: cutlass.Constexpr, tidx: Int32):
        """One walk over a row: a thread's share of a stage's reductions."""
        totals = self.nothing(stage)
        for v in cutlass.range(tidx, walk.vectors, self.tile.threads, unroll=2):
            totals = self._with(totals, walk, values, stage, v * self.tile.vec - walk.shift)
        return totals

    def _with(self, totals, walk, values, stage, first):
        return self.added(totals, values, stage, walk.elements(first), first, walk.n)

    def _begin(self, tensors, group, n, long_n):
        """The sums over rows that are in registers: none, but those in the workspaces are cleared."""
        shift = self.tile.v.shift(Int64(group), long_n)
        self._clear(tensors, group, (n + shift + (self.tile.vec - 1)) // self.tile.vec, shift, n)
        return ()

    def _end(self, tensors, sums, group, tidx, n):
        """Store these sums."""

    @cute.jit
    def _outputs(
        self, walk: cutlass.Constexpr, values: cutlass.Constexpr, sums: cutlass.Constexpr, group: Int32, tidx: Int32
    ):
        """The last walk over a row."""
        if const_expr(len(self.outputs["t"]) + len(self.outputs["r"]) > 0):
            for v in cutlass.range(tidx, walk.vectors, self.tile.threads, unroll=1):
                self._emit(walk, values, group, v * self.tile.vec - walk.shift)

    def _emit(self, walk, values, group, first):
        outputs = [*self.outputs["t"], *self.outputs["r"]]
        vectors = self.computed(values, outputs, walk.elements(first), self.tile.vec)
        self.store_inside(vectors, walk.targets, self.tile.v, first, walk.n)
        for rX, (_, piece) in zip(vectors[len(self.outputs["t"]) :], self.outputs["r"]):
            self._add_to(walk.tensors[self.partials_of(piece)], piece, rX, group, first, walk.n)

    @cute.jit
    def _clear(self, tensors: cutlass.Constexpr, group: Int32, vectors: Int32, shift: Int32, n: Int32):
        """Set this thread's columns of the CTA's rows of the workspaces to 0."""
        for _, piece in self.outputs["r"]:
            for v in cutlass.range(cute.arch.thread_idx()[0], vectors, self.tile.threads, unroll=1):
                first = v * self.tile.vec - shift
                address = self._place(tensors[self.partials_of(piece)], piece, group, n) + Int64(first) * 4
                store_elements(fragment(Float32, self.tile.vec, 0.0), address, first, n)

    def _place(self, mPartials, piece, group, n):
        return mPartials.iterator.toint() + (Int64(group) * Int64(mPartials.shape[1]) + Int64(piece.index * n)) * 4

    @cute.jit
    def _add_to(
        self, mPartials: cute.Tensor, piece: cutlass.Constexpr, rX: cute.Tensor, group: Int32, first: Int32, n: Int32
    ):  # fmt: skip
        """Add a vector to the CTA's row of a workspace."""
        gSum = gmem_elements(Float32, self._place(mPartials, piece, group, n) + Int64(first) * 4, self.tile.vec)
        for j in cutlass.range_constexpr(self.tile.vec):
            if first + j >= 0 and first + j < n:
                gSum[j] = gSum[j] + rX[j]


class RowPass:
    """One walk over a row: the row, and where its pieces are."""

    def __init__(self, rows, tensors, row, n, long_n, count):
        v = rows.tile.v
        self.rows, self.tensors, self.row, self.n, self.count = rows, tensors, row, n, count
        self.shift = v.shift(row, long_n)
        self.vectors = (n + self.shift + (v.vec - 1)) // v.vec
        self.readable = readable(v, n, row, count)
        self.sources = rows.rows(tensors, rows.tiles, row, n)
        self.targets = rows.rows(tensors, rows.outputs["t"], row, n)

    def elements(self, first):
        """From j to the operands' elements in the column ``first + j``, by node."""
        access = VectorAccess(self.rows.tile.v)
        held = [
            (i, widen(access.load(gRow, first, self.readable))) for (i, _), gRow in zip(self.rows.tiles, self.sources)
        ]
        for i, piece in self.rows.vectors:
            rW = column_elements(
                self.rows.column(self.tensors, piece, self.n), self.rows.keys[piece], self.rows.tile.v, first, self.n
            )
            held.append((i, widen(rW)))
        held += [(i, s[0]) for (i, _), s in self.rows.stretches(self.tensors, self.row, (first,), self.n)]
        return lambda j: {i: vector[j] for i, vector in held}
