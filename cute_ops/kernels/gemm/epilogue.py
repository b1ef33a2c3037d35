"""The epilogue of a product: an expression of the product, of tiles, vectors and scalars, computed in registers."""

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.expressions.groups import REDUCTIONS, reads
from cute_ops.expressions.stages import split
from cute_ops.expressions.text import parse
from cute_ops.kernels.emit.emitter import computed
from cute_ops.kernels.emit.words import COMBINE, NEUTRAL
from cute_ops.kernels.gemm.rows import FinishRows, RowReductions
from cute_ops.kernels.gemm.views import by_row, each_by_row, half
from cute_ops.kernels.lib.copy import fragment, load, store_if, widen
from cute_ops.kernels.lib.row_layout import element_address, row_address, row_count


class EpilogueTensor(NamedTuple):
    """A tensor of a call, or a half of a packed one.

    Attributes:
        key: the tensor's key.
        rows: whether each row has its own elements.
        columns: whether each column has its own elements.
        index: the half's index.
        packed: whether it is a half.
        align: bytes, at most 16, that divide where its rows start.
        period: columns after which it repeats itself, 0 if it does not.
        batched: whether each matrix of a batch has its own elements.
        turned: columns of the groups in whose other half ``rotate_half`` reads it; 0 at the element's own place.
    """

    key: Any
    rows: bool
    columns: bool
    index: int
    packed: bool
    align: int
    period: int = 0
    batched: bool = False
    turned: int = 0

    @property
    def tile(self):
        return self.rows and self.columns

    @property
    def by_tma(self):
        """Whether TMA can take it: a tile whose rows start on 16 bytes, one stride apart."""
        one_stride = self.batched or self.key.layout == "flat" or self.key.rank == 2
        return self.tile and not self.period and self.align == 16 and one_stride

    def loaded_at(self, v):
        """Where :meth:`Epilogue.load` puts the element for the accumulator with this index."""
        if self.tile:
            return v
        return v // 4 * 2 + v % 2 if self.columns else v // 2 % 2 if self.rows else 0

    def matrix(self, mX):
        """A tile as a matrix, or as a batch of them."""
        whole = (each_by_row if self.batched else by_row)(mX, self.key)
        return half(whole, self.index, 1, self.align) if self.packed else whole

    def column(self, chunk, c, j, most):
        """The column of an element for the accumulators in a chunk's column, at most ``most``."""
        column = cutlass.min(chunk.columns[c] + j + partner(chunk.at[c], self.turned), most)
        return column % self.period if self.period else column

    def address(self, mX, row, n):
        """The byte address of a row of ``n`` elements; in a batch each vector counts as a row."""
        address = mX.iterator.toint()
        if (self.rows or self.batched) and self.key.layout == "scattered":
            address = element_address(mX, self.key, Int64(row))
        elif self.rows or self.batched:
            # A tensor that repeats itself along the columns may also do so along the leading dims.
            row = row % Int32(row_count(mX)) if self.period else row
            address = row_address(mX, self.key, Int64(row), mX.shape[-1] if self.columns else 1)
        return address + self.index * Int64(n) * self.key.itemsize if self.packed else address


class Chunk(NamedTuple):
    """Places of those accumulators of a thread that are stored at once: two rows of pairs of neighbouring columns.

    Accumulator ``4 * c + 2 * r + j`` lies in row ``rows[r]`` and column ``columns[c] + j``, by the layout of the matrix
    instructions. ``shape`` is that of the outputs: what lies outside is neither read nor stored. ``at`` are the places
    of the columns in the tile for the thread that has the first one, ``below`` counts the subtiles above: both are
    known at compile time. ``batch`` is the matrix of a batch, empty where there is none.
    """

    rows: tuple[Any, Any]
    columns: tuple[Any, ...]
    shape: tuple[Any, Any]
    at: tuple[int, ...]
    batch: tuple[Any, ...] = ()
    below: int = 0

    def row_of(self, tensor, row):
        """The row of a tensor, after those of the matrices before it, that is this row of a matrix."""
        if not tensor.batched:
            return row
        (batch,) = self.batch
        return Int64(batch) * self.shape[0] + row if tensor.rows else batch

    @property
    def size(self):
        return 4 * len(self.columns)


class Epilogue:
    """The expression that a config names, its operands and its outputs.

    Outputs without columns are not computed here: :attr:`rows` reduces the elements that they need, and the kernel
    :attr:`finish`, None where there are none, computes them.
    """

    def __init__(self, variant, config, batched):
        self.batched = batched
        whole = parse(config.expression)
        divided = split(whole)
        self.expression, self.rows = divided.elements, RowReductions(divided.reductions)
        self.packed = self.expression.operands[0].packed
        self.half_align = config.half_align
        self.names = config.reads.split()
        # How operands are read, except for the product itself.
        self.read = [read for read in reads(self.expression) if read.operand]
        self.operands = []
        for read in self.read:
            operand, name = self.expression.operands[read.operand], self.names[read.operand - 1]
            tensor = self._tensor(variant, name, operand.kind, int(read.half == "[n:]"), operand.packed)
            self.operands.append(tensor._replace(turned=read.turned))
        words = [word.partition("[") for word in config.writes.split() or variant.names[-1:]]
        outputs = [
            self._tensor(variant, name, kind, int(which == "n:]"), bool(which))
            for (name, _, which), kind in zip(words, whole.output_kinds)
        ]
        self.outputs, columns = ([tensor for tensor in outputs if tensor.columns == which] for which in (True, False))
        self.finish = self._finish(variant, divided, columns) if columns else None
        # Places of the operands that TMA loads.
        self.by_tma = [i for i, tensor in enumerate(self.operands) if tensor.by_tma and config.tile_stages]
        # Whether rows have an even number of elements: then both of two neighbours lie inside, or neither.
        self.even = all(tensor.align >= 2 * tensor.key.itemsize for tensor in self.outputs)

    def _tensor(self, variant, name, kind, index, packed):
        name, _, period = name.partition("%")
        key, period = variant.tensors[name], int(period or 0)
        rows = kind.rows or self.batched
        align = min(key.align, key.row_align if rows else 16, self.half_align if packed else 16)
        align = math.gcd(align, period * key.itemsize)
        return EpilogueTensor(key, kind.rows, kind.columns, index, packed, align, period, self.batched)

    def _finish(self, variant, divided, outputs):
        """The kernel of the outputs without columns; of its operands the first is the product itself."""
        count, read = len(divided.reductions), {}
        for i in [read.operand for read in reads(divided.rows) if read.operand >= count]:
            read[i] = self._tensor(variant, self.names[i - count - 1], divided.rows.operands[i].kind, 0, False)
        return FinishRows(divided.rows, divided.reductions, read, outputs, variant.arch)

    @property
    def itemsizes(self):
        """The element sizes of the tensors whose subtiles go through shared memory."""
        return [tensor.key.itemsize for tensor in (*(self.operands[i] for i in self.by_tma), *self.outputs)]

    def place(self, tensor, chunk):
        """A key for what a chunk reads of an operand: chunks of a tile with equal keys share what the first one loads.

        Chunks share a table that repeats itself only where threads load at most two operands with columns, such as
        cosines and sines: with more of them registers would spill.
        """
        if not tensor.columns:
            return chunk.below if tensor.rows else 0
        shared = tensor.period and sum(each.columns for each in self.operands) - len(self.by_tma) <= 2
        at = [c + partner(c, tensor.turned) for c in chunk.at]
        return chunk.below, *(c % tensor.period if shared else c for c in at)

    def load(self, tensor, mX, chunk):
        """What a thread needs of an operand for a chunk: an element for each accumulator, column or row, or just one.

        No load depends on a condition: a place outside loads an element inside, whose result is not stored.
        """
        m, n = chunk.shape
        count = 2 if self.even and tensor.align >= 2 * tensor.key.itemsize else 1  # of neighbours that one load takes
        rows = [cutlass.min(row, m - 1) for row in chunk.rows] if tensor.rows else [0]
        places = [tensor.address(mX, chunk.row_of(tensor, row), n) for row in rows]
        if not tensor.columns:
            loaded = fragment(mX.element_type, len(rows))
            for r, place in enumerate(places):
                self._load(loaded, r, 1, place)
            return loaded
        loaded = fragment(mX.element_type, 2 * len(rows) * len(chunk.columns))
        for c in range(len(chunk.columns)):
            for j in range(0, 2, count):
                column = Int64(tensor.column(chunk, c, j, n - count)) * tensor.key.itemsize
                for r, place in enumerate(places):
                    self._load(loaded, 2 * (len(rows) * c + r) + j, count, place + column)
        return loaded

    def _load(self, rX, at, count, address):
        piece = fragment(rX.element_type, count)
        load(piece, address)
        for j in range(count):
            rX[at + j] = piece[j]

    def compute(self, sums, loaded, chunk, rows, groups):
        """The outputs of a chunk, in fp32.

        Args:
            sums: ``sums(h, v, distance)``: the accumulator ``distance`` columns after accumulator ``v``, in the half
                ``h`` where they are packed.
            loaded: what :meth:`load` gave for each operand.
            chunk: the places of the accumulators.
            rows: the results of reductions so far, which these elements are added to.
            groups: the results of groups of columns of these rows, as far as they are known.
        """
        results = [fragment(Float32, chunk.size) for _ in self.outputs]
        wide = [widen(rX) for rX in loaded]
        self._reduce_groups(sums, wide, chunk, groups)
        for v in range(chunk.size):
            element = Element(self, sums, wide, chunk, v, groups)
            values = [element(i) for i in self.expression.outputs]
            for rX, x in zip(results, values):
                rX[v] = x
            self.rows.add(rows, v, chunk, values[len(results) :])
        return results

    def _reduce_groups(self, sums, loaded, chunk, groups):
        """Reduce the groups of columns that a chunk lies in; four lanes hold those of a row."""
        nodes = self.expression.nodes
        for i, size in [(i, int(node.value)) for i, node in enumerate(nodes) if node.word in REDUCTIONS]:
            word = nodes[i].word.removeprefix("group_")
            for group in sorted({at // size for at in chunk.at} - {group for j, group in groups if i == j}):
                results = []
                for r in range(2):
                    x = Float32(NEUTRAL[word])
                    for at in range(group * size, (group + 1) * size, 8):
                        for j in range(2):
                            element = Element(self, sums, loaded, chunk, 2 * r + j, groups, at - chunk.at[0])
                            x = COMBINE[word](x, element(nodes[i].args[0]))
                    results.append(cute.arch.warp_reduction(x, COMBINE[word], threads_in_group=4))
                groups[i, group] = results

    @cute.jit
    def store(self, tensor: cutlass.Constexpr, mX, rX, chunk: cutlass.Constexpr):
        """Store a chunk of an output from registers."""
        (m, n), count = chunk.shape, 2 if const_expr(self.even) else 1
        for r in cutlass.range_constexpr(2):
            place = tensor.address(mX, chunk.row_of(tensor, chunk.rows[r]), n)
            for c in cutlass.range_constexpr(len(chunk.columns)):
                for j in cutlass.range_constexpr(0, 2, count):
                    piece = fragment(mX.element_type, count)
                    for v in cutlass.range_constexpr(count):
                        piece[v] = rX[4 * c + 2 * r + j + v].to(mX.element_type)
                    column = chunk.columns[c] + j
                    address = place + Int64(column) * tensor.key.itemsize
                    store_if((chunk.rows[r] < m) & (column < n), piece, address)


class Element:
    """The values of an expression's nodes for one of a thread's accumulators, or the one ``shift`` columns after it.
    Each is computed on first use.
    """

    def __init__(self, epilogue, sums, loaded, chunk, v, groups, shift=0):
        self.nodes, self.kinds = epilogue.expression.nodes, epilogue.expression.kinds
        self.sums, self.chunk, self.v, self.groups, self.shift = sums, chunk, v, groups, shift
        self.loaded = dict(zip(epilogue.read, zip(loaded, epilogue.operands)))
        self.values = {}

    def __call__(self, i, turned=0):
        """A node's value here, or in the other half of its group of ``turned`` columns."""
        if (i, turned) not in self.values:
            self.values[i, turned] = self._value(i, turned)
        return self.values[i, turned]

    def _value(self, i, turned):
        node, at = self.nodes[i], self.chunk.at[self.v // 4] + self.shift
        distance = self.shift + partner(at, turned)
        if node.word == "operand" and node.operand == 0:
            return self.sums(int(node.half == "[n:]"), self.v, distance)
        if node.word == "operand":
            values, tensor = self.loaded[node.operand, node.half, turned if self.kinds[i].columns else 0]
            return values[tensor.loaded_at(self.v)]
        if node.word == "rotate_half":
            x = self(node.args[0], int(node.value))
            return x if partner(at, int(node.value)) < 0 else x * -1.0
        if node.word in REDUCTIONS:
            return self.groups[i, at // int(node.value)][self.v // 2 % 2]
        column = self.chunk.columns[self.v // 4] + self.v % 2 + distance
        return computed(node, [self(arg, turned) for arg in node.args], self.chunk.shape[1], column=column)


def partner(at, turned):
    """The distance from a column of a tile to its partner in the other half of its group of ``turned`` columns."""
    if not turned:
        return 0
    return turned // 2 if 2 * (at % turned) < turned else -(turned // 2)
