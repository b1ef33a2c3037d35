"""The epilogue of a product: an expression of the product, of tiles, vectors and scalars, computed in registers."""

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.expressions.groups import REDUCTIONS, reads
from cute_ops.expressions.stages import split
from cute_ops.expressions.text import parse
from cute_ops.kernels.emit.accumulators import AccumulatorEmitter, partner
from cute_ops.kernels.gemm.config import K_PARTS
from cute_ops.kernels.gemm.rows import FinishRows, RowReductions
from cute_ops.kernels.gemm.views import by_row, each_by_row, half, transposed
from cute_ops.kernels.lib.copy import fragment, load, store_if, widen
from cute_ops.kernels.lib.row_layout import element_address, row_address, row_count

# What depends on an element's column, or on others of its row.
BY_COLUMNS = ("column", "n", "rotate_half", *REDUCTIONS)


class EpilogueTensor(NamedTuple):
    """A tensor of a call, or the half of one that is ``[gate | up]``.

    Attributes:
        key: the tensor's key.
        rows: whether each row has its own elements.
        columns: whether each column has its own elements.
        index: the half's index.
        is_half: whether it is a half.
        align: bytes, at most 16, that divide the addresses of its rows.
        period: columns after which it repeats itself, 0 if it does not.
        batched: whether each matrix of a batch has its own elements.
        rotate: group size when ``rotate_half`` reads the opposite half of its group; 0 otherwise.
        transposed: whether its rows are columns of the accumulators.
    """

    key: Any
    rows: bool
    columns: bool
    index: int
    is_half: bool
    align: int
    period: int = 0
    batched: bool = False
    rotate: int = 0
    transposed: bool = False

    @property
    def tile(self):
        return self.rows and self.columns

    @property
    def by_tma(self):
        """Whether TMA can take it: a tile whose rows start on 16 bytes, one stride apart."""
        one_stride = self.batched or self.key.layout == "flat" or self.key.rank == 2
        return self.tile and not self.period and self.align == 16 and one_stride

    @property
    def word(self):
        """Bytes of words that its rows consist of: strides of rows that do not follow on each other do not tell."""
        return self.align if self.key.layout == "flat" else self.key.itemsize

    @property
    def along(self):
        """Whether each row, and each column, of the accumulators has its own elements."""
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)

    def loaded_at(self, v):
        """The index at which :meth:`Epilogue.load` puts the element for the accumulator with this index."""
        rows, columns = self.along
        if rows and columns:
            return v
        return v // 4 * 2 + v % 2 if columns else v // 2 % 2 if rows else 0

    def matrix(self, mX):
        """A tile as a matrix, or as a batch of them."""
        whole = (each_by_row if self.batched else by_row)(mX, self.key)
        matrix = half(whole, self.index, 1, self.align) if self.is_half else whole
        return transposed(matrix) if self.transposed else matrix

    def column(self, chunk, c, j, most):
        """The column of an element for the accumulators in a chunk's column, at most ``most``."""
        column = cutlass.min(chunk.columns[c] + j + partner(chunk.tile_columns[c], self.rotate), most)
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
        return address + self.index * Int64(n) * self.key.itemsize if self.is_half else address


class Epilogue:
    """The expression that a config names, its operands and its outputs.

    Outputs without columns are not computed here: :attr:`rows` reduces the elements that they need, and the kernel
    :attr:`finish`, None where there are none, computes them.
    """

    def __init__(self, variant, config, batched):
        self.batched, self.transposed = batched, config.transposed
        whole = parse(config.expression)
        divided = split(whole)
        self.expression, self.rows = divided.elements, RowReductions(divided.reductions)
        self.emit = AccumulatorEmitter(self.expression)
        self.halves = 1 + self.expression.operands[0].packed
        self.half_align = config.half_align
        self.names = config.reads.split()
        self.operands = []
        for read in self.emit.read:
            operand, name = self.expression.operands[read.operand], self.names[read.operand - 1]
            tensor = self._tensor(variant, name, operand.kind, int(read.half == "[n:]"), operand.packed)
            self.operands.append(tensor._replace(rotate=read.rotate))
        last = [name for name in variant.names if name != K_PARTS][-1:]
        words = [word.partition("[") for word in config.writes.split() or last]
        outputs = [
            self._tensor(variant, name, kind, int(which == "n:]"), bool(which))
            for (name, _, which), kind in zip(words, whole.output_kinds)
        ]
        self.outputs, columns = ([tensor for tensor in outputs if tensor.columns == which] for which in (True, False))
        self.finish = self._finish(variant, divided, columns) if columns else None
        # Indices of the operands that TMA loads.
        self.by_tma = [i for i, tensor in enumerate(self.operands) if tensor.by_tma and config.tile_stages]
        # Whether rows have an even number of elements: then both of two neighbours lie inside, or neither.
        self.even = all(tensor.word >= 2 * tensor.key.itemsize for tensor in self.outputs)
        if self.transposed:
            self._check_transposed(whole)

    def _tensor(self, variant, name, kind, index, is_half):
        name, _, period = name.partition("%")
        key, period = variant.tensors[name], int(period or 0)
        rows = kind.rows or self.batched
        align = min(key.align, key.row_align if rows else 16, self.half_align if is_half else 16)
        align = math.gcd(align, period * key.itemsize)
        return EpilogueTensor(
            key, kind.rows, kind.columns, index, is_half, align, period, self.batched, transposed=self.transposed
        )

    def _check_transposed(self, expression):
        """Refuse what a transposed tile has no columns for, and outputs that TMA cannot store."""
        looks = any(node.primitive in BY_COLUMNS for node in expression.nodes)
        repeats = any(tensor.period for tensor in self.operands)
        if looks or repeats or self.finish or self.batched or not all(tensor.by_tma for tensor in self.outputs):
            raise NotImplementedError("transposed tiles are for epilogues by element of outputs that TMA stores")

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

    def coordinate(self, tensor, chunk):
        """A key of the elements that a chunk reads of an operand: chunks of a tile with equal keys share one load.

        Chunks share a table that repeats itself only where threads load at most two operands with columns, such as
        cosines and sines: with more of them registers would spill.
        """
        rows, columns = tensor.along
        if not columns:
            return chunk.repeat_m if rows else 0
        shared = tensor.period and sum(each.columns for each in self.operands) - len(self.by_tma) <= 2
        columns = [c + partner(c, tensor.rotate) for c in chunk.tile_columns]
        return chunk.repeat_m, *(c % tensor.period if shared else c for c in columns)

    def load(self, tensor, mX, chunk):
        """A thread's elements of an operand for a chunk: one for each accumulator, column or row, or just one.

        Loads are unpredicated: coordinates are clamped, results out of bounds are not stored.
        """
        if tensor.transposed:
            return self._load_transposed(tensor, mX, chunk)
        m, n = chunk.shape
        count = 2 if self.even and tensor.align >= 2 * tensor.key.itemsize else 1  # of neighbours that one load takes
        rows = [cutlass.min(row, m - 1) for row in chunk.rows] if tensor.rows else [0]
        addresses = [tensor.address(mX, chunk.row_of(tensor, row), n) for row in rows]
        if not tensor.columns:
            loaded = fragment(mX.element_type, len(rows))
            for r, address in enumerate(addresses):
                self._load(loaded, r, 1, address)
            return loaded
        loaded = fragment(mX.element_type, 2 * len(rows) * len(chunk.columns))
        for c in range(len(chunk.columns)):
            for j in range(0, 2, count):
                column = Int64(tensor.column(chunk, c, j, n - count)) * tensor.key.itemsize
                for r, address in enumerate(addresses):
                    self._load(loaded, 2 * (len(rows) * c + r) + j, count, address + column)
        return loaded

    def _load_transposed(self, tensor, mX, chunk):
        """Elements for accumulators whose rows are columns of the output."""
        n, m = chunk.shape
        columns = [cutlass.min(row, n - 1) for row in chunk.rows] if tensor.columns else [0]
        rows = [cutlass.min(c + j, m - 1) for c in chunk.columns for j in range(2)] if tensor.rows else [0]
        loaded = fragment(mX.element_type, len(rows) * len(columns))
        for i, row in enumerate(rows):
            address = tensor.address(mX, row, n)
            for r, column in enumerate(columns):
                at = 2 * (len(columns) * (i // 2) + r) + i % 2 if tensor.rows else r
                self._load(loaded, at, 1, address + Int64(column) * tensor.key.itemsize)
        return loaded

    def _load(self, rX, at, count, address):
        piece = fragment(rX.element_type, count)
        load(piece, address)
        for j in range(count):
            rX[at + j] = piece[j]

    def compute(self, accumulators, loaded, chunk, groups):
        """The outputs of a chunk in fp32, then the terms of reductions of rows: a fragment each.

        Args:
            accumulators: see :class:`AccumulatorEmitter`, as ``groups``.
            loaded: what :meth:`load` gave for each operand.
            chunk: the coordinates of the accumulators.
        """
        operands = [_element_of(tensor, widen(rX)) for tensor, rX in zip(self.operands, loaded)]
        return self.emit(accumulators, operands, chunk, groups)

    @cute.jit
    def store(self, tensor: cutlass.Constexpr, mX, rX, chunk: cutlass.Constexpr):
        """Store a chunk of an output from registers."""
        (m, n), count = chunk.shape, 2 if const_expr(self.even) else 1
        for r in cutlass.range_constexpr(2):
            row = tensor.address(mX, chunk.row_of(tensor, chunk.rows[r]), n)
            for c in cutlass.range_constexpr(len(chunk.columns)):
                for j in cutlass.range_constexpr(0, 2, count):
                    piece = fragment(mX.element_type, count)
                    for v in cutlass.range_constexpr(count):
                        piece[v] = rX[4 * c + 2 * r + j + v].to(mX.element_type)
                    column = chunk.columns[c] + j
                    address = row + Int64(column) * tensor.key.itemsize
                    store_if((chunk.rows[r] < m) & (column < n), piece, address)


def _element_of(tensor, rX):
    """From an accumulator's index to its element of what was loaded."""
    return lambda v: rX[tensor.loaded_at(v)]
