"""The operands and outputs of an expression with reductions of rows, as tensors and pieces of tensors."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.expressions.philox import WORDS
from cute_ops.kernels.emit.primitives import COMBINE, NEUTRAL, device_for
from cute_ops.kernels.emit.row_emitter import RowEmitter
from cute_ops.kernels.lib.copy import fragment, gmem_elements, trim, widen
from cute_ops.kernels.lib.philox import uniform
from cute_ops.kernels.lib.row_copy import Row, VectorAccess
from cute_ops.kernels.lib.row_layout import row_address, row_count
from cute_ops.kernels.rows.config import FusedRowConfig
from cute_ops.kernels.rows.pointwise import named, outputs_of
from cute_ops.kernels.rowwise.pointwise import Piece, number_address


class Column(NamedTuple):
    """A piece of a row vector, as a tensor of its own."""

    element_type: object
    iterator: object


class RowPieces:
    """The operands and outputs of an expression.

    Attributes:
        emit: the expression.
        tiles, vectors, numbers: operands that are read, as (node, piece): with rows and columns, with columns only, and
            without columns.
        stretched: operands with rows, of which an element serves several columns; ``random`` ones, which are computed.
        outputs: by letter ``t``, ``r``, ``c`` and ``s``, as (place among the outputs, piece).
        awaited: how many stages of reductions outputs with columns wait for. Others come last: numbers alone need them.
        keys: descriptions of the pieces of tiles and of vectors, by piece.
        tile_piece: one of the tiles.
    """

    def __init__(self, variant):
        config = FusedRowConfig.of(variant.config)
        self.variant, self.n = variant, variant.dims["n"]
        self.emit = RowEmitter(config.expression, device_for(variant, config.writes), self._narrow(config))
        nodes = self.emit.expression.nodes
        names, shared = config.reads.split(), {*config.shared.split()}
        stretched, random = config.stretched.split(), config.random.split()
        read = [(i, self._piece(nodes[i], names, shared)) for i in self.emit.read]
        self.tiles = [(i, piece) for i, piece in read if piece.tile and piece.name not in (*stretched, *random)]
        self.stretched = [(i, piece) for i, piece in read if piece.name in stretched]
        self.random = [(i, piece) for i, piece in read if piece.name in random]
        self.vectors = [(i, piece) for i, piece in read if piece.columns and not piece.rows]
        self.numbers = [(i, piece) for i, piece in read if not piece.columns]
        self.outputs = outputs_of(config)
        # What says how many examples there are, whose rows share a row of some tensors, and whether these have sums.
        self.shared, self.turns = config.shared.split(), config.turns
        self.sums_of_examples = not {*self.shared}.isdisjoint(word.partition("[")[0] for word in config.writes.split())
        self.awaited = self.emit.awaited(config.kinds)
        rows = self._rows_first(names, shared)
        self.tile_piece = rows[0]
        self.keys = {piece: self._key(piece) for piece in (*rows, *(piece for _, piece in self.vectors))}
        # What rows are laid out by, as Vectors takes it.
        self.names = [self.keys[piece].name for piece in rows]
        self.tensors = {self.keys[piece].name: self.keys[piece] for piece in rows}

    def _piece(self, node, names, shared):
        """The piece that an operand's node reads."""
        name, operand = names[node.operand], self.emit.expression.operands[node.operand]
        return Piece(name, int(node.half == "[n:]"), 1 + operand.packed, *operand.kind[:2], name in shared)

    def _rows_first(self, names, shared):
        """The pieces of tiles, a tile first that has all rows."""
        operands = self.emit.expression.operands
        rows = [piece for _, piece in (*self.tiles, *self.outputs["t"])]
        rows = sorted(rows, key=lambda piece: piece.shared)
        if rows and not rows[0].shared:
            return rows
        # Outputs without columns, computed from row vectors: a tile gives the number of rows.
        tile = next(i for i, o in enumerate(operands) if all(o.kind[:2]) and names[i] not in shared)
        return [Piece(names[tile], 0, 1 + operands[tile].packed), *rows]

    def _narrow(self, config):
        """Whether all tiles have 16 bits."""
        written = [name for name, kind in zip(config.writes.split(), config.kinds) if kind == "t"]
        names = {name.partition("[")[0] for name in (*config.reads.split(), *written)}
        tiles = [key for name in names if (key := self.variant.tensors[name.partition("%")[0]]) and key.rank > 1]
        return all(ITEMSIZE[key.dtype] <= 2 for key in tiles if key.shape[-1] != 1)

    def _key(self, piece):
        """The description of a piece: halves of packed rows have other starts, and a stride between rows."""
        key = self.variant.tensors[piece.name]
        if piece.shared or self.sums_of_examples:
            # No row of it follows on the one before; or rows of an example start at other places of a vector.
            key = key._replace(layout="strided")
        if piece.count == 1:
            return key
        step = ITEMSIZE[key.dtype] * (1 if self.n is None else self.n)
        step &= -step
        layout = "strided" if piece.rows else key.layout
        align, row_align = min(key.align, step), min(key.row_align, step)
        return key._replace(name=f"{piece.name}[{piece.index}]", layout=layout, align=align, row_align=row_align)

    def named(self, arguments):
        """The tensors by name."""
        return named(self.variant.names, arguments)

    def partials_of(self, piece):
        """The name of the workspace that holds partial sums of an output."""
        return f"{piece.name}_partials"

    def shape(self, tensors):
        """(rows, elements of a row's piece), the former in 64 bits."""
        piece = self.tile_piece
        mX = tensors[piece.name]
        n = mX.shape[-1]
        return row_count(mX), self.n if self.n is not None else n // piece.count

    def examples(self, tensors):
        """(examples, rows of each, in 32 bits): one that has all rows where nothing is shared by examples."""
        rows = self.shape(tensors)[0]
        if not self.shared:
            return Int32(1), Int32(rows)
        mX = tensors[self.shared[0]]
        count = Int32(row_count(mX))
        return count, Int32(rows // Int64(count))

    def walk_of_example(self, tensors, group, groups, rows):
        """The rows that a group takes, ``rows`` at a time: groups share out those of each example evenly. Neighbouring
        groups take neighbouring examples, so that a workspace has all examples' sums of a part side by side.
        """
        examples, each = self.examples(tensors)
        parts, part = Int32(groups) // examples, Int32(group) // examples
        example, begin, stride = Int32(group) - part * examples, part * rows, parts * rows
        steps = (each - begin + (stride - 1)) // stride
        if self.turns:
            apart = Int64(examples)
            return ExampleWalk(steps, example + begin * apart, stride * apart, each * apart, apart)
        first = Int64(example) * Int64(each)
        return ExampleWalk(steps, first + begin, stride, first + each)

    def row_of(self, tensors, piece, row):
        """A row's own row of a piece."""
        if not piece.shared:
            return row
        examples, each = self.examples(tensors)
        return Int64(Int32(row) % examples if self.turns else Int32(row) // each)

    def rows(self, tensors, pieces, row, n):
        """A row's pieces."""
        found = []
        for _, piece in pieces:
            mX = tensors[piece.name]
            own = self.row_of(tensors, piece, row)
            gRow = Row.of(mX, self.variant.tensors[piece.name], own, mX.shape[-1])
            step = Int64(n) * (piece.index * (mX.element_type.width // 8))
            found.append(gRow._replace(address=gRow.address + step))
        return found

    def column(self, tensors, piece, n):
        """A row vector, or a half of one."""
        mW = tensors[piece.name]
        return Column(mW.element_type, mW.iterator + n * piece.index if piece.index else mW.iterator)

    def stretches(self, tensors, row, first, n):
        """The stretched and the random operands in a row of n columns, at the vectors that begin at the columns
        ``first``.
        """
        stretched = [
            ((i, piece), Stretch(self, tensors[piece.name], piece, self.row_of(tensors, piece, row), first, n))
            for i, piece in self.stretched
        ]
        return stretched + [((i, piece), Random(self, tensors[piece.name], row, first)) for i, piece in self.random]

    def row_numbers(self, tensors, row, valid):
        """The operands of which a row has one number, in fp32, by node."""
        return {
            i: number(tensors[piece.name], self.number_address(tensors, piece, row), valid if piece.rows else True)
            for i, piece in self.numbers
        }

    def number_address(self, tensors, piece, row):
        mX = tensors[piece.name]
        if not piece.rows:
            return mX.iterator.toint()
        return number_address(mX, self.variant.tensors[piece.name], self.row_of(tensors, piece, row))

    @cute.jit
    def store_numbers(self, tensors: cutlass.Constexpr, values: cutlass.Constexpr, row: Int64, alone: Boolean):
        """Store a row's outputs without columns, by one thread."""
        if const_expr(len(self.outputs["c"]) > 0):
            if alone:
                self._store_each(tensors, values, row)

    def _store_each(self, tensors, values, row):
        for place, piece in self.outputs["c"]:
            mOut = tensors[piece.name]
            address = row_address(mOut, self.variant.tensors[piece.name], row, 1)
            gmem_elements(mOut.element_type, address, 1)[0] = values.number(place).to(mOut.element_type)

    def terms(self, values, stage, elements, vec):
        """The terms of a stage's reductions, one vector each: fp32 fragments."""
        vectors = [fragment(Float32, vec) for _ in self.emit.primitives[stage]]
        for j in range(vec):
            for rTerm, x in zip(vectors, values.terms(stage, elements(j))):
                rTerm[j] = x
        return vectors

    def nothing(self, stage):
        """The neutral elements of a stage's reductions."""
        return tuple(Float32(NEUTRAL[primitive]) for primitive in self.emit.primitives[stage])

    def added(self, totals, values, stage, elements, first, n):
        """A stage's reductions with one more vector, of which some elements may lie outside the row."""
        found = []
        for primitive, total, rTerm in zip(
            self.emit.primitives[stage], totals, self.terms(values, stage, elements, self.tile.vec)
        ):
            if self.tile.v.masked:
                trim(rTerm, first, n, NEUTRAL[primitive])
            found.append(COMBINE[primitive](total, combined(COMBINE[primitive], rTerm)))
        return tuple(found)

    def computed(self, values, outputs, elements, vec):
        """One vector each of some outputs: fp32 fragments."""
        vectors = [fragment(Float32, vec) for _ in outputs]
        for j in range(vec):
            for rOut, x in zip(vectors, values.outputs([i for i, _ in outputs], elements(j))):
                rOut[j] = x
        return vectors

    def store_inside(self, vectors, targets, v, first, n):
        """Store vectors of the tiles, of which some elements may lie outside the row."""
        for rOut, gOut in zip(vectors, targets):
            VectorAccess(v).write(gOut, rOut.load(), first, n)


class ExampleWalk(NamedTuple):
    """The rows of one example that a group of threads takes: from ``start`` on, every ``stride``-th, before ``end``;
    neighbouring rows of the example lie ``apart``.
    """

    steps: object
    start: object
    stride: object
    end: object
    apart: object = 1

    def beside(self, local):
        """Where the ``local``-th of the rows begins that are taken at a time."""
        return self.start + (local if isinstance(self.apart, int) else local * self.apart)

    def row(self, start, step, count):
        """The row of a step that begins at ``start``; ``count``, the number of all rows, where there is none."""
        row = start + Int64(step) * Int64(self.stride)
        return cutlass.select_((step < self.steps) & (row < self.end), row, count)


class Stretch(NamedTuple):
    """A row of a shared operand of which each element serves as many neighbouring columns: a thread's vectors of it.

    Elements are loaded where they are used, from L1: one for a vector, where no other's columns begin inside of it.
    """

    rows: object
    tensor: object
    piece: object
    row: object
    first: object
    n: object

    def __getitem__(self, k):
        """The k-th vector, a list of fp32 numbers; of columns outside of the row those of its ends."""
        rows, mW, first = self.rows, self.tensor, self.first[k]
        count, itemsize, vec = mW.shape[-1], mW.element_type.width // 8, rows.tile.vec
        address = row_address(mW, rows.variant.tensors[self.piece.name], self.row, count)
        each = self.n // count
        alike = isinstance(each, int) and each % vec == 0 and not rows.tile.v.masked
        found = []
        for j in range(1 if alike else vec):
            column = cutlass.min(cutlass.max(first + j, 0), self.n - 1)
            place = address + Int64(column // each) * itemsize
            found.append(gmem_elements(mW.element_type, place, 1)[0].to(Float32))
        return found * (vec // len(found))


class Random(NamedTuple):
    """Random numbers of a row: a thread's vectors of them, computed where they are used."""

    rows: object
    seed: object
    row: object
    first: object

    def __getitem__(self, k):
        """The k-th vector, a list of fp32 numbers."""
        seed = gmem_elements(self.seed.element_type, self.seed.iterator.toint(), 1)[0]
        tile = self.rows.tile
        whole = tile.vec % WORDS == 0 and not tile.v.shifted
        return uniform(seed, self.row, (self.first[k], tile.vec, whole))


class Shown:
    """Pieces of tensors, as :class:`Vectors` and :class:`RowAccess` take a variant's."""

    def __init__(self, tensors):
        self.tensors = tensors


def wide(x):
    """A fragment in fp32; the numbers of a :class:`Stretch` as they are."""
    return x if isinstance(x, list) else widen(x)


def combined(combine, rX):
    """All elements of a fragment combined pairwise, in a tree: no element waits for all before it."""
    values = [rX[j] for j in range(cute.size(rX))]
    while len(values) > 1:
        pairs = [combine(a, b) for a, b in zip(values[::2], values[1::2])]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


@cute.jit
def number(mX: cute.Tensor, address: Int64, valid: Boolean):
    """A number in fp32; 0 where it does not exist."""
    rX = fragment(mX.element_type, 1, 0)
    if valid:
        rX[0] = gmem_elements(mX.element_type, address, 1)[0]
    return rX[0].to(Float32)
