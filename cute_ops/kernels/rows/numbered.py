"""An expression with reductions of rows that reads the numbers of its columns."""

from typing import NamedTuple

from cutlass import Float32

from cute_ops.kernels.rows.on_chip import RowsInRegisters, RowsInRing
from cute_ops.kernels.rows.passes import RowsInPasses
from cute_ops.kernels.rows.select import FusedRows


class Numbered:
    """The numbers of columns as operands that are computed where they are used, exact below 2^24."""

    def stretches(self, tensors, row, first, n):
        nodes = self.emit.expression.nodes
        columns = [i for i, node in enumerate(nodes) if node.primitive == "column"]
        return super().stretches(tensors, row, first, n) + [((i, None), Numbers(self, first)) for i in columns]


class Numbers(NamedTuple):
    """The numbers of the columns of a thread's vectors."""

    rows: object
    first: object

    def __getitem__(self, k):
        first = Float32(self.first[k])
        return [first + float(j) for j in range(self.rows.tile.vec)]


class InRegisters(Numbered, RowsInRegisters):
    """Rows in registers."""


class InRing(Numbered, RowsInRing):
    """Rows in shared memory."""


class InPasses(Numbered, RowsInPasses):
    """Rows that are read again for each stage."""


FORMS = {"one_pass": InRegisters, "ring": InRing, "passes": InPasses}


def fused(variant):
    """An expression's kernel, of rows that are reduced."""
    return FusedRows(variant, FORMS[variant.config["form"]](variant))
