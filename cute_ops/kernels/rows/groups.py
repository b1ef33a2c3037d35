"""An expression with groups of columns, and with reductions of rows, in passes over each row."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.expressions.groups import REDUCTIONS, sizes
from cute_ops.kernels.emit.emitter import computed
from cute_ops.kernels.emit.primitives import COMBINE
from cute_ops.kernels.emit.row_emitter import RowEmitter, RowValues
from cute_ops.kernels.lib.copy import fragment, load, narrow, store, store_if, widen
from cute_ops.kernels.lib.row_copy import Row
from cute_ops.kernels.lib.row_layout import row_count
from cute_ops.kernels.rows.config import FusedRowConfig
from cute_ops.kernels.rows.passes import RowsInPasses
from cute_ops.kernels.rows.select import FusedRows
from cute_ops.kernels.rowwise.pointwise import Piece

VEC = 8  # columns of a thread: half of the smallest group, a 16th of the largest
MOST_HELD = 4  # vectors of each tile, and of sums over rows, that a thread has in registers at once


class FusedGroups(FusedRows):
    """:class:`FusedRows` for expressions with groups of columns, numbers of columns or operands that repeat
    themselves.
    """

    def __init__(self, variant):
        super().__init__(variant, RowsOfGroups(variant))


class RowsOfGroups(RowsInPasses):
    """Walks a row once for each stage of its reductions and once more for its outputs.

    Tile: a CTA takes a row; thread ``t`` has the 8 columns from ``8 t`` on, and those that lie ``8 threads`` behind.
    So neighbouring lanes of a warp hold a group, which they reduce and rotate by shuffles. Lanes past the row's end
    take part with the row's last columns, and do not store them. Without groups a thread has fewer columns where n is
    no multiple of 8. With gradients of row vectors a CTA takes every so many rows, and adds up in registers, or for
    long rows in its row of the workspaces. Bytes moved per element and shared memory: as
    :class:`RowsInPasses`.
    """

    def __init__(self, variant):
        super().__init__(variant)
        config = FusedRowConfig.of(variant.config)
        expression = self.emit.expression
        self.emit = GroupEmitter(config.expression, self.emit.device)
        self.tile.v = ThreadColumns(VEC if sizes(expression) else math.gcd(VEC, self.n or 1))
        self.tile.vec = self.tile.v.vec
        self.tile_piece = next(
            Piece(name, 0, 1 + operand.packed)
            for name, operand in zip(config.reads.split(), expression.operands)
            if all(operand.kind[:2]) and not self._period(Piece(name, 0, 1 + operand.packed))
        )
        # Steps from one end of a row to the other if a thread holds its columns of all of them, else 0.
        steps = -(-self.n // (self.tile.threads * self.tile.vec)) if self.n is not None else 0
        self.steps = steps if steps * max(len(self.outputs["r"]), 1) <= MOST_HELD else 0

    def _period(self, piece):
        """Columns after which a tile repeats itself; 0 if it has whole rows."""
        columns = self.variant.tensors[piece.name].shape[-1]
        whole = None if self.n is None else self.n * piece.count
        return 0 if columns == whole else columns

    def rows(self, tensors, pieces, row, n):
        """The pieces of a row. A tile that repeats itself may have fewer rows, too, which it then repeats."""
        found = []
        for i, piece in pieces:
            at = row % row_count(tensors[piece.name]) if self._period(piece) else row
            found += super().rows(tensors, [(i, piece)], at, n)
        return found

    def _begin(self, tensors, group, n, long_n):
        if self.steps == 0:
            return super()._begin(tensors, group, n, long_n)
        return [[fragment(Float32, self.tile.vec, 0.0) for _ in self.outputs["r"]] for _ in range(self.steps)]

    def _end(self, tensors, sums, group, tidx, n):
        for k, held in enumerate(sums):
            first = self._first(k, tidx)
            for rSum, (_, piece) in zip(held, self.outputs["r"]):
                place = self._place(tensors[self.partials_of(piece)], piece, group, n) + Int64(first) * 4
                store_if(first < n, rSum, place)

    @cute.jit
    def _stage(self, walk: cutlass.Constexpr, values: cutlass.Constexpr, stage: cutlass.Constexpr, tidx: Int32):
        totals = self.nothing(stage)
        for start in cutlass.range(0, walk.n, self.tile.threads * self.tile.vec, unroll=1):
            totals = self._with(totals, walk, values, stage, start + tidx * self.tile.vec)
        return totals

    def _with(self, totals, walk, values, stage, first):
        return self.added(totals, values, stage, self._elements(walk, first), first, walk.n)

    def _outputs(self, walk, values, sums, group, tidx):
        if self.steps == 0:
            self._outputs_in_steps(walk, values, group, tidx)
        else:
            self._outputs_at_once(walk, values, sums, tidx)

    @cute.jit
    def _outputs_in_steps(self, walk: cutlass.Constexpr, values: cutlass.Constexpr, group: Int32, tidx: Int32):
        for start in cutlass.range(0, walk.n, self.tile.threads * self.tile.vec, unroll=1):
            self._emit(walk, values, group, start + tidx * self.tile.vec)

    def _outputs_at_once(self, walk, values, sums, tidx):
        """Store all columns of a thread in one step, so that all of its loads are in flight together."""
        loaded = [self._elements(walk, self._first(k, tidx)) for k in range(self.steps)]
        for k, (elements, held) in enumerate(zip(loaded, sums)):
            for rSum, rX in zip(held, self._stored(walk, values, elements, self._first(k, tidx))):
                rSum.store(rSum.load() + rX.load())

    def _first(self, k, tidx):
        """A thread's first column of those of a step."""
        return (k * self.tile.threads + tidx) * self.tile.vec

    def _emit(self, walk, values, group, first):
        found = self._stored(walk, values, self._elements(walk, first), first)
        for rX, (_, piece) in zip(found, self.outputs["r"]):
            self._add_to(walk.tensors[self.partials_of(piece)], piece, rX, group, first, walk.n)

    def _stored(self, walk, values, elements, first):
        """Store a thread's columns of the tiles; return the terms of sums over rows."""
        tiles, sums = self.outputs["t"], self.outputs["r"]
        vectors = self.computed(values, [*tiles, *sums], elements, self.tile.vec)
        for rOut, (_, piece), target in zip(vectors, tiles, walk.targets):
            rX = narrow(rOut.load(), walk.tensors[piece.name].element_type, self.tile.vec)
            for j, access in self._accesses(rX, piece):
                store_if(first < walk.n, access, target.at(first + j))
        return vectors[len(tiles) :]

    @cute.jit
    def _add_to(
        self, mPartials: cute.Tensor, piece: cutlass.Constexpr, rX: cute.Tensor, group: Int32, first: Int32, n: Int32
    ):  # fmt: skip
        if first < n:
            rSum, address = fragment(Float32, self.tile.vec), self._place(mPartials, piece, group, n) + Int64(first) * 4
            load(rSum, address)
            rSum.store(rSum.load() + rX.load())
            store(rSum, address)

    def _elements(self, walk, first):
        """A thread's elements of operands with columns, and its columns' numbers, by node."""
        at = cutlass.min(first, walk.n - self.tile.vec)
        held = [(i, piece, source) for (i, piece), source in zip(self.tiles, walk.sources)]
        for i, piece in self.vectors:
            mW = self.column(walk.tensors, piece, walk.n)
            held.append((i, piece, Row(mW.element_type, mW.iterator.toint())))
        found = {i: self._loaded(source, piece, at) for i, piece, source in held}
        places = [Float32(at + j) for j in range(self.tile.vec)]
        return found | {i: places for i, node in enumerate(self.emit.expression.nodes) if node.primitive == "column"}

    def _loaded(self, source, piece, first):
        rX, period = fragment(source.element_type, self.tile.vec), self._period(piece) if piece.tile else 0
        for j, access in self._accesses(rX, piece):
            column = (first + j) % period if period else first + j
            load(access, source.at(column))
        wide = widen(rX)
        return [wide[j] for j in range(self.tile.vec)]

    def _accesses(self, rX, piece):
        """A thread's vector of a piece access by access: (start, access)."""
        key, period = self.keys[piece], self._period(piece) if piece.tile else 0
        align = min(key.align, key.row_align) if piece.rows else key.align
        count = math.gcd(self.tile.vec, max(align // ITEMSIZE[key.dtype], 1), period)
        layout = cute.make_layout(count)
        return [(j, cute.make_tensor(rX.iterator + j, layout)) for j in range(0, self.tile.vec, count)]

    def terms(self, values, stage, elements, vec):
        return [filled(x, vec) for x in values.terms(stage, elements)]

    def computed(self, values, outputs, elements, vec):
        return [filled(x, vec) for x in values.outputs([i for i, _ in outputs], elements)]


class ThreadColumns:
    """The columns of a thread, in place of the :class:`Vectors` of :class:`RowsInPasses`."""

    masked, follows = True, False

    def __init__(self, vec):
        self.vec = vec

    def shift(self, row, n):
        return Int32(0)


def filled(x, vec):
    """A value of each column, or one for all of them, as a fragment."""
    rX = fragment(Float32, vec)
    for j in range(vec):
        rX[j] = x[j] if isinstance(x, list) else x
    return rX


class GroupEmitter(RowEmitter):
    """A :class:`RowEmitter` of all columns of a thread together."""

    def begin(self, numbers, length):
        return GroupValues(self, numbers, length)


class GroupValues(RowValues):
    """:class:`RowValues` in which a value with columns is a list, one number for each column of a thread."""

    def _computed(self, node, args):
        if node.primitive == "rotate_half":
            return rotate_half(args[0], int(node.value))
        if node.primitive in REDUCTIONS:
            return reduced(args[0], int(node.value), COMBINE[node.primitive.removeprefix("group_")])
        count = next((len(x) for x in args if isinstance(x, list)), 0)
        found = [
            computed(node, [x[j] if isinstance(x, list) else x for x in args], self.length, self.emitter.table(node))
            for j in range(count or 1)
        ]
        return found if count else found[0]


def rotate_half(values, size):
    """Each lane takes a value of the other half of its group: lanes of the lower half minus that of the upper one."""
    lanes = size // len(values)
    upper = cute.arch.lane_idx() % lanes >= lanes // 2
    others = [cute.arch.shuffle_sync_bfly(x, offset=lanes // 2) for x in values]
    return [Float32(cutlass.select_(upper, x, -x)) for x in others]


def reduced(values, size, combine):
    """The result of a group's reduction, for each of a thread's columns."""
    lanes, found = size // len(values), values
    while len(found) > 1:
        found = [combine(a, b) for a, b in zip(found[::2], found[1::2])]
    return [cute.arch.warp_reduction(found[0], combine, threads_in_group=lanes)] * len(values)
