"""Which kernel computes an expression."""

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.kernels.lib.column_reduce import ColumnSum
from cute_ops.kernels.rows.column_pass import PartSum
from cute_ops.kernels.rows.on_chip import RowsInRegisters, RowsInRing
from cute_ops.kernels.rows.passes import RowsInPasses
from cute_ops.kernels.rows.pointwise import FusedPointwise, RowSums, Terms, by_example
from cute_ops.kernels.rowwise.pointwise import Piece

# Examples from which on each has few partial sums.
MANY_EXAMPLES = 16
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
    :class:`PartSum` those of many examples, and :class:`RowSums` those of scalars.
    """

    def __init__(self, variant, rows):
        self.variant, self.rows = variant, rows
        whole = [piece for _, piece in self.rows.outputs["r"] if piece.index + 1 == piece.count]
        shared = [piece.name in self.rows.shared for piece in whole]
        kinds = sorted({(p.count, here) for p, here in zip(whole, shared)})
        # Sums in one launch, and whether they are those of examples.
        self.sums = [
            ([p for p, here in zip(whole, shared) if (p.count, here) == kind], kind[1]) for kind in kinds
        ]  # fmt: skip

    @cute.jit
    def __call__(self, *arguments):
        stream = arguments[-1]
        self.rows(arguments[:-1], stream)
        tensors = self.rows.named(arguments[:-1])
        for alike, shared in self.sums:
            partials = tuple([tensors[self.rows.partials_of(piece)] for piece in alike])
            outputs = tuple([tensors[piece.name] for piece in alike])
            if const_expr(shared):
                examples = self.rows.examples(tensors)[0]
                partials, outputs = by_example(partials, outputs, examples)
                if examples >= MANY_EXAMPLES:
                    PartSum(self.variant.arch)(partials, outputs, stream)
                else:
                    ColumnSum(None, self.variant.arch)(partials, outputs, stream)
            else:
                ColumnSum(self.rows.n, self.variant.arch)(partials, outputs, stream)
        for _, piece in self.rows.outputs["s"]:
            name, count = self.rows.partials_of(piece), Int64(1)
            terms, mPartials = Terms(self.variant, (Piece(name, rows=False),), lambda x: (x,)), tensors[name]
            if const_expr(piece.name in self.rows.shared):
                count = Int64(self.rows.examples(tensors)[0])
                terms = self._term_of_example
            n = Int64(mPartials.shape[0]) // count
            RowSums(self.variant.arch, terms)((mPartials,), tensors[piece.name], count, n, stream)

    def _term_of_example(self, inputs, example, i, n):
        """The i-th of an example's n partial sums: one for each part, and row that a group has at a time."""
        each = self.rows.tile.rows
        (mPartials,) = inputs
        part = i // each
        examples = Int32(mPartials.shape[0] // n)
        return mPartials[(part * examples + Int32(example)) * each + i - part * each]
