"""An expression of tiles, vectors and scalars, in one pass over ``[m, n]``, and sums of its values."""

import math
import operator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, const_expr

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.emit.emitter import Emitter
from cute_ops.kernels.emit.primitives import device_for
from cute_ops.kernels.lib.column_reduce import ColumnSum
from cute_ops.kernels.lib.copy import gmem_elements
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import extent, row_address, row_count
from cute_ops.kernels.rows.column_pass import ColumnPass, PartSum
from cute_ops.kernels.rows.config import FusedConfig
from cute_ops.kernels.rowwise.pointwise import Piece, Pointwise, number_address, vector_widths


def named(names, arguments):
    """The tensors by name, those of bools as bytes."""
    return {
        name: cute.make_tensor(cute.recast_ptr(mX.iterator, dtype=Uint8), mX.layout)
        if mX is not None and mX.element_type == Boolean else mX
        for name, mX in zip(names, arguments)
    }  # fmt: skip


def outputs_of(config):
    """The pieces that a config's expression is stored in, by kind, each with its index among the outputs."""
    words = [word.partition("[") for word in config.writes.split()]
    pieces = [Piece(name, int(half == "n:]"), 2 if half else 1) for name, _, half in words]
    return {kind: [(i, pieces[i]) for i, k in enumerate(config.kinds) if k == kind] for kind in "trcs"}


class FusedPointwise:
    """Computes the expression that its config names, its tiles by :class:`Pointwise`.

    Vectors and scalars among the outputs are sums of its values in fp32, in a fixed order. :class:`ColumnPass` gives
    partial sums over rows in the workspace ``dbias_partials``, and the tiles in the same pass, unless rows start on no
    half of a vector and do not follow on each other. :class:`ColumnSum` adds them up: to the row vector ``dbias``, or
    for a scalar to the workspace ``dfactor_totals``, whose elements :class:`RowSums` adds up. Column vectors are a pass
    of their own by that. Of few rows :class:`ColumnPass` gives the row vectors themselves.
    """

    def __init__(self, variant):
        config = FusedConfig.of(variant.config)
        self.variant, self.names, self.n = variant, variant.names, variant.dims["n"]
        self.emit = Emitter(config.expression, device_for(variant, config.writes))
        self.read = {node.operand for node in self.emit.expression.nodes if node.primitive == "operand"}
        self.inputs, whole, shared = [], [], config.shared.split()
        for i, (name, operand) in enumerate(zip(config.reads.split(), self.emit.expression.operands)):
            count, kind = 1 + operand.packed, operand.kind
            pieces = [Piece(name, half, count, kind.rows, kind.columns, name in shared) for half in range(count)]
            whole += [piece for piece in pieces if piece.tile and not piece.shared]
            if i in self.read:
                self.inputs += pieces
        self.outputs = outputs_of(config)
        tiles = [piece for _, piece in self.outputs["t"]]
        # A tile, whose shape gives the numbers of rows and columns.
        self.whole = (tiles or whole)[0]
        self.tiles = Pointwise(variant, self.inputs, tiles, self._only(self.outputs["t"]), config) if tiles else None
        self.sums = [*self.outputs["r"], *self.outputs["s"]]
        self.together, self.alone = False, config.alone
        # Inputs that a thread of a column pass reads once for all rows of an example, and sums over an example's rows.
        self.shared = [piece.name for piece in self.inputs if piece.shared and not config.turns]
        self.of_examples = [piece.name for _, piece in self.sums if piece.name in shared]
        column_pass = self._over_columns(tiles) if self.sums or self.shared else None
        self.column_pass = column_pass if self.sums or self.together else None

    def _over_columns(self, tiles):
        """The pass that sums up, and computes tiles together with sums where vectors are wide enough."""
        pieces = [piece for _, piece in self.sums]
        widest, vec = vector_widths(self.variant, self.inputs, tiles)
        fold = self._fold(tiles, widest) if vec < widest and not (self.shared or self.alone) else 1
        vec = widest if fold > 1 else vec
        self.together = bool(tiles) and 2 * vec >= widest
        outputs = [*(self.outputs["t"] if self.together else []), *self.sums]
        own = tiles if self.together else []
        return ColumnPass(self.variant, self.inputs, own, pieces, self._only(outputs), vec, fold=fold, alone=self.alone)

    def _fold(self, written, vec):
        """How many rows, one after another in every tile, are whole vectors; 1 if rows do not follow on each other."""
        keys = self.variant.tensors
        tiles = [p for p in (*self.inputs, *written) if p.tile]
        flat = all(p.count == 1 and keys[p.name].layout == "flat" for p in tiles)
        aligned = all(keys[p.name].align >= min(vec * ITEMSIZE[keys[p.name].dtype], VECTOR_BYTES) for p in tiles)
        # A vector has elements of two rows at most.
        if not flat or not aligned or self.n is None or not vec <= self.n < 2**31 // vec:
            return 1
        return vec // math.gcd(self.n, vec)

    def _only(self, outputs):
        """A function from an element of each piece to elements of these outputs."""

        def compute(*elements):
            given = iter(elements)
            operands = []
            for i, operand in enumerate(self.emit.expression.operands):
                each = [next(given) for _ in operand.halves] if i in self.read else [None]
                if operand.kind.dtype == "bool" and i in self.read:
                    each = [x != 0.0 for x in each]
                operands.append(each if operand.packed else each[0])
            values = self.emit(*operands, length=self.n)
            return tuple(values[i] for i, _ in outputs)

        return compute

    def _add_up(self, tensors, stream):
        """Add up partial sums, equally long ones in one launch."""
        whole = [piece for _, piece in self.sums if piece.index + 1 == piece.count]
        kinds = {piece.name: (piece.count, piece.name in self.of_examples) for piece in whole}
        for kind in sorted({*kinds.values()}):
            names = [name for name in kinds if kinds[name] == kind]
            partials = tuple([tensors[f"{name}_partials"] for name in names])
            totals = tuple([tensors.get(f"{name}_totals", tensors[name]) for name in names])
            if const_expr(kind[1]):
                examples = Int32(row_count(tensors[self.shared[0]]))
                PartSum(self.variant.arch)(*by_example(partials, totals, examples), stream)
            else:
                ColumnSum(self.n, self.variant.arch)(partials, totals, stream)

    @cute.jit
    def __call__(self, *arguments):
        tensors, stream = named(self.names, arguments[:-1]), arguments[-1]
        inputs = tuple([tensors[piece.name] for piece in self.inputs])
        tiles = tuple([tensors[piece.name] for _, piece in self.outputs["t"]])
        if const_expr(self.tiles is not None and not self.together):
            self.tiles(inputs, tiles, stream)
        mX = tensors[self.whole.name]
        rows, n = row_count(mX), extent(mX, len(mX.shape) - 1) // self.whole.count
        for output in self.outputs["c"]:
            terms = Terms(self.variant, self.inputs, self._only([output]))
            RowSums(self.variant.arch, terms)(inputs, tensors[output[1].name], rows, n, stream)
        if const_expr(self.column_pass is not None):
            ending = "" if const_expr(self.alone) else "_partials"
            partials = tuple([tensors[f"{piece.name}{ending}"] for _, piece in self.sums])
            self.column_pass(inputs, tiles if const_expr(self.together) else (), partials, rows, n, stream)
            if const_expr(not self.alone):
                self._add_up(tensors, stream)
        for _, piece in self.outputs["s"]:
            mTotals = tensors[f"{piece.name}_totals"]
            terms = Terms(self.variant, (Piece(f"{piece.name}_totals", rows=False),), lambda x: (x,))
            RowSums(self.variant.arch, terms)((mTotals,), tensors[piece.name], Int64(1), n, stream)


def by_example(partials, outputs, examples):
    """Views of workspaces that have a row for each part of each example, as a row for each part with the columns of all
    examples; and of the outputs, as one row.
    """
    wide = []
    for mPartials in partials:
        groups, n = Int32(mPartials.shape[0]), Int32(mPartials.shape[1])
        layout = cute.make_layout((groups // examples, examples * n), stride=(examples * n, 1))
        wide.append(cute.make_tensor(mPartials.iterator, layout))
    flat = [cute.make_tensor(mX.iterator, cute.make_layout(cute.size(mX))) for mX in outputs]
    return tuple(wide), tuple(flat)


class Terms:
    """One output of an expression, an element at a time."""

    def __init__(self, variant, inputs, compute):
        self.keys, self.inputs, self.compute = variant.tensors, inputs, compute

    def __call__(self, inputs, row, column, n):
        elements = []
        for mX, piece in zip(inputs, self.inputs):
            address, key = mX.iterator.toint(), self.keys[piece.name]
            if piece.rows and not piece.columns:
                address = number_address(mX, key, row)
            elif piece.rows:
                address = row_address(mX, key, row, mX.shape[-1])
            if piece.columns:
                address = address + (Int64(column) + piece.index * n) * (mX.element_type.width // 8)
            elements.append(gmem_elements(mX.element_type, address, 1)[0].to(Float32))
        return self.compute(*elements)[0]


class RowSums:
    """``out[r] = sum_c terms[r, c]`` in fp32, rounded once to out's dtype; out is compact.

    Tile: a CTA of 128 threads takes four rows, a warp each. No shared memory. Bytes moved: every input once.
    """

    threads = 4 * WARP

    def __init__(self, arch, terms):
        self.terms, self.pdl = terms, can_use_pdl(arch)

    @cute.jit
    def __call__(self, inputs, mOut, rows, n, stream):
        per_cta = self.threads // WARP
        self.kernel(inputs, mOut, rows, n).launch(
            grid=[Int32((rows + (per_cta - 1)) // per_cta), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, inputs, mOut, rows: Int64, n: Int64):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        row, lane = Int64(bidx) * (self.threads // WARP) + tidx // WARP, tidx % WARP
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        if row < rows:
            total = Float32(0.0)
            for column in cutlass.range(lane, Int32(n), WARP, unroll=4):
                total = total + self.terms(inputs, row, column, n)
            total = cute.arch.warp_reduction(total, operator.add)
            if lane == 0:
                target = mOut.iterator.toint() + row * (mOut.element_type.width // 8)
                gmem_elements(mOut.element_type, target, 1)[0] = total.to(mOut.element_type)
