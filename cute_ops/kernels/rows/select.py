"""Which kernel computes an expression."""

import cutlass.cute as cute
from cutlass import Int64

from cute_ops.kernels.lib.column_reduce import ColumnSum
from cute_ops.kernels.rows.on_chip import RowsInRegisters, RowsInRing
from cute_ops.kernels.rows.passes import RowsInPasses
from cute_ops.kernels.rows.pointwise import FusedPointwise, RowSums, Terms
from cute_ops.kernels.rowwise.pointwise import Piece

FORMS = {"one_pass": RowsInRegisters, "ring": RowsInRing, "passes": RowsInPasses}


def fused(variant):
    """An expression's kernel: one of rows, where it has reductions of rows, or of elements."""
    if "form" not in variant.config:
        return FusedPointwise(variant)
    return FusedRows(variant, FORMS[variant.config["form"]](variant))


class FusedRows:
    """Computes the expression that its config names, rows by one of :data:`FORMS`.

    Row vectors and scalars among the outputs are sums over rows in fp32, in a fixed order. Their partial sums are in
    workspaces, ``dweight_partials``: :class:`ColumnSum` adds up those of row vectors, equally long ones in one launch,
    and :class:`RowSums` those of scalars.
    """

    def __init__(self, variant, rows):
        self.variant, self.rows = variant, rows
        whole = [piece for _, piece in self.rows.outputs["r"] if piece.index + 1 == piece.count]
        self.sums = [[piece for piece in whole if piece.count == count] for count in sorted({p.count for p in whole})]

    @cute.jit
    def __call__(self, *arguments):
        stream = arguments[-1]
        self.rows(arguments[:-1], stream)
        tensors = self.rows.named(arguments[:-1])
        for alike in self.sums:
            partials = tuple([tensors[self.rows.partials_of(piece)] for piece in alike])
            outputs = tuple([tensors[piece.name] for piece in alike])
            ColumnSum(self.rows.n, self.variant.arch)(partials, outputs, stream)
        for _, piece in self.rows.outputs["s"]:
            name = self.rows.partials_of(piece)
            terms, mPartials = Terms(self.variant, (Piece(name, rows=False),), lambda x: (x,)), tensors[name]
            n = Int64(mPartials.shape[0])
            RowSums(self.variant.arch, terms)((mPartials,), tensors[piece.name], Int64(1), n, stream)
