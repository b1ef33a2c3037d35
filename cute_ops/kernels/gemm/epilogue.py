"""What becomes of a product's sums: an expression of them, of tiles, vectors and scalars, in registers."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr

from cute_ops.kernels.epilogue.emit import Emitter
from cute_ops.kernels.gemm.config import GemmConfig
from cute_ops.kernels.gemm.views import by_row, half
from cute_ops.kernels.lib.copy import fragment, load, store_if, widen
from cute_ops.kernels.lib.row_layout import element_address, row_address


class Part(NamedTuple):
    """A tensor of a call, or a half of a packed one.

    Attributes:
        key: the tensor's key.
        rows: whether each row has its own elements.
        columns: whether each column has its own elements.
        index: the half's index.
        packed: whether it is a half.
        align: bytes, at most 16, that divide where its rows start.
    """

    key: Any
    rows: bool
    columns: bool
    index: int
    packed: bool
    align: int

    @property
    def tile(self):
        return self.rows and self.columns

    @property
    def by_tma(self):
        """Whether TMA can take it: a tile with rows on 16 bytes, that a single stride steps over."""
        return self.tile and self.align == 16 and (self.key.layout == "flat" or self.key.rank == 2)

    def matrix(self, tensor):
        """A tile as a matrix."""
        whole = by_row(tensor, self.key)
        return half(whole, self.index, 1, self.align) if self.packed else whole

    def address(self, tensor, row, n):
        """Where the elements of a row begin, of ``n`` of them."""
        address = tensor.iterator.toint()
        if self.rows and self.key.layout == "scattered":
            address = element_address(tensor, self.key, Int64(row))
        elif self.rows:
            address = row_address(tensor, self.key, Int64(row), tensor.shape[-1] if self.columns else 1)
        return address + self.index * Int64(n) * self.key.itemsize if self.packed else address


class Chunk(NamedTuple):
    """The places of a thread's sums that are stored at once: in two rows, two neighbours for each of some columns.

    The sum with the index ``4 * c + 2 * r + j`` is that in row ``rows[r]`` and column ``columns[c] + j``, as the matrix
    instructions have it. ``shape`` is that of the outputs: what lies outside is neither read nor stored.
    """

    rows: tuple[Any, Any]
    columns: tuple[Any, ...]
    shape: tuple[Any, Any]

    @property
    def size(self):
        return 4 * len(self.columns)


class Epilogue:
    """The expression that a config names, its operands and its outputs."""

    def __init__(self, variant):
        config = GemmConfig.of(variant.config)
        self.emit = Emitter(config.expression)
        nodes = [node for node in self.emit.expression.nodes if node.word == "operand"]
        self.read = {node.operand for node in nodes}
        self.packed = self.emit.expression.operands[0].packed
        self.half_align = config.half_align
        self.operands = []
        for i, (name, operand) in enumerate(zip(config.reads.split(), self.emit.expression.operands[1:]), start=1):
            for index in range((1 + operand.packed) * (i in self.read)):
                self.operands.append(self._part(variant, name, operand.kind, index, operand.packed))
        words = [word.partition("[") for word in config.writes.split() or variant.names[-1:]]
        kinds = self.emit.expression.output_kinds
        self.outputs = [
            self._part(variant, name, kind, int(which == "n:]"), bool(which))
            for (name, _, which), kind in zip(words, kinds)
        ]
        # Places of the operands that TMA loads.
        self.by_tma = [i for i, part in enumerate(self.operands) if part.by_tma and config.tile_stages]
        # Whether rows have an even number of elements, so that neighbours are both there or both not.
        self.even = all(part.align >= 2 * part.key.itemsize for part in self.outputs)

    def _part(self, variant, name, kind, index, packed):
        key = variant.tensors[name]
        align = min(key.align, key.row_align if kind.rows else 16, self.half_align if packed else 16)
        return Part(key, kind.rows, kind.columns, index, packed, align)

    @property
    def itemsizes(self):
        """Of the tensors whose subtiles are in shared memory."""
        return [part.key.itemsize for part in (*(self.operands[i] for i in self.by_tma), *self.outputs)]

    def load(self, part, tensor, chunk):
        """What a thread needs of an operand for a chunk: an element for each sum, column, row, or one.

        No load depends on a condition: for a place outside it takes one inside, of which nothing is stored.
        """
        m, n = chunk.shape
        count = 2 if self.even and part.align >= 2 * part.key.itemsize else 1  # of neighbours that one load takes
        rows = [cutlass.min(row, m - 1) for row in chunk.rows] if part.rows else [0]
        places = [part.address(tensor, row, n) for row in rows]
        if not part.columns:
            loaded = fragment(tensor.element_type, len(rows))
            for r, place in enumerate(places):
                self._load(loaded, r, 1, place)
            return loaded
        loaded = fragment(tensor.element_type, 2 * len(rows) * len(chunk.columns))
        for c, first in enumerate(chunk.columns):
            for j in range(0, 2, count):
                column = Int64(cutlass.min(first + j, n - count)) * part.key.itemsize
                for r, place in enumerate(places):
                    self._load(loaded, 2 * (len(rows) * c + r) + j, count, place + column)
        return loaded

    def _load(self, rX, at, count, address):
        piece = fragment(rX.element_type, count)
        load(piece, address)
        for j in range(count):
            rX[at + j] = piece[j]

    def compute(self, sums, loaded, chunk):
        """The outputs of a chunk, in fp32.

        Args:
            sums: ``sums(h, v)``: the sum with an index, of the half ``h`` where they are packed.
            loaded: for each operand what :meth:`load` gave.
            chunk: where they are.
        """
        results = [fragment(Float32, chunk.size) for _ in self.outputs]
        wide = [widen(rX) for rX in loaded]
        for v in range(chunk.size):
            given = iter([values[part_index(part, v)] for part, values in zip(self.operands, wide)])
            elements = [(sums(0, v), sums(1, v)) if self.packed else sums(0, v)]
            for i, operand in enumerate(self.emit.expression.operands[1:], start=1):
                used = i in self.read
                elements.append(None if not used else (next(given), next(given)) if operand.packed else next(given))
            for rX, x in zip(results, self.emit(*elements, length=chunk.shape[1])):
                rX[v] = x
        return results

    @cute.jit
    def store(self, part: cutlass.Constexpr, tensor, rX, chunk: cutlass.Constexpr):
        """Store a chunk of an output from registers."""
        (m, n), count = chunk.shape, 2 if const_expr(self.even) else 1
        for r in cutlass.range_constexpr(2):
            place = part.address(tensor, chunk.rows[r], n)
            for c in cutlass.range_constexpr(len(chunk.columns)):
                for j in cutlass.range_constexpr(0, 2, count):
                    piece = fragment(tensor.element_type, count)
                    for v in cutlass.range_constexpr(count):
                        piece[v] = rX[4 * c + 2 * r + j + v].to(tensor.element_type)
                    column = chunk.columns[c] + j
                    address = place + Int64(column) * part.key.itemsize
                    store_if((chunk.rows[r] < m) & (column < n), piece, address)


def part_index(part, v):
    """Where :meth:`Epilogue.load` puts an operand's element for the sum with this index."""
    if part.tile:
        return v
    return v // 4 * 2 + v % 2 if part.columns else v // 2 % 2 if part.rows else 0
