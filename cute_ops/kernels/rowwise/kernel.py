"""A row function as an op's kernel: ``partial(RowKernel, Probabilities)`` is a kernel's name in a declaration."""

import cutlass.cute as cute

from cute_ops.kernels.rowwise.config import MapConfig, ReduceConfig
from cute_ops.kernels.rowwise.map import Segments
from cute_ops.kernels.rowwise.one_pass import OnePassRows
from cute_ops.kernels.rowwise.two_pass import WalkedRows

# Forms of their own beside those of expressions (kernels/rows): a row function also loads single elements of a row and
# stores a number of each row, as losses do, which no expression says.
FORMS = {
    "one_pass": OnePassRows, "smem": OnePassRows, "two_pass": WalkedRows,
    "rows": Segments, "segments": Segments, "elements": Segments, "flat": Segments,
}  # fmt: skip


class RowKernel:
    """Runs ``make(variant)``, a :class:`~cute_ops.kernels.rowwise.function.RowFunction`. The tensors that it names are
    arguments of those names.
    """

    def __init__(self, make, variant):
        self.names, self.function = variant.names, make(variant)
        config = (MapConfig if self.function.reduction is None else ReduceConfig).of(variant.config)
        self.form = FORMS[config.form](variant, config, self.function)

    @cute.jit
    def __call__(self, *arguments):
        tensors = dict(zip(self.names, arguments))
        kinds = (self.function.inputs, self.function.outputs, self.function.numbers)
        inputs, outputs, numbers = (tuple([tensors[name] for name in names]) for names in kinds)
        self.form(inputs, outputs, numbers, arguments[-1])
