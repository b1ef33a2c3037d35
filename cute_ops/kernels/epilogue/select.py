"""Which kernel computes an expression."""

import cutlass.cute as cute
from cutlass import Int64

from cute_ops.kernels.epilogue.pointwise import FusedPointwise, RowSums, Terms
from cute_ops.kernels.epilogue.row_passes import RowsInPasses
from cute_ops.kernels.epilogue.rows import RowsInRegisters, RowsInRing
from cute_ops.kernels.lib.column_reduce import ColumnSum
from cute_ops.kernels.rowwise.pointwise import Part

FORMS = {"one_pass": RowsInRegisters, "ring": RowsInRing, "passes": RowsInPasses}


def fused(variant):
    """An expression's kernel: one of rows, where it has reductions of rows, or of elements."""
    if "form" not in variant.config:
        return FusedPointwise(variant)
    return FusedRows(variant, FORMS[variant.config["form"]](variant))


class FusedRows:
    """Computes the expression that its config names, rows by one of :data:`FORMS`.

    Row vectors and scalars among the outputs are sums over rows in fp32, in a fixed order. Their parts are in the
    workspaces, ``dweight_parts``: :class:`ColumnSum` adds up those of row vectors, equally long ones in one launch, and
    :class:`RowSums` those of scalars.
    """

    def __init__(self, variant, rows):
        self.variant, self.rows = variant, rows
        whole = [part for _, part in self.rows.outputs["r"] if part.index + 1 == part.count]
        self.sums = [[part for part in whole if part.count == count] for count in sorted({p.count for p in whole})]

    @cute.jit
    def __call__(self, *arguments):
        stream = arguments[-1]
        self.rows(arguments[:-1], stream)
        tensors = self.rows.named(arguments[:-1])
        for alike in self.sums:
            parts = tuple([tensors[self.rows.parts_of(part)] for part in alike])
            outputs = tuple([tensors[part.name] for part in alike])
            ColumnSum(self.rows.n, self.variant.arch)(parts, outputs, stream)
        for _, part in self.rows.outputs["s"]:
            name = self.rows.parts_of(part)
            terms, mParts = Terms(self.variant, (Part(name, rows=False),), lambda x: (x,)), tensors[name]
            RowSums(self.variant.arch, terms)((mParts,), tensors[part.name], Int64(1), Int64(mParts.shape[0]), stream)
