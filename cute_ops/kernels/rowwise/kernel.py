"""A row function as an op's kernel: ``partial(RowKernel, Probabilities)`` is a kernel's name in a declaration."""

import cutlass.cute as cute

from cute_ops.kernels.rowwise.map import Segments
from cute_ops.kernels.rowwise.two_pass import run_rows


class RowKernel:
    """Runs ``make(variant)``, a :class:`~cute_ops.kernels.rowwise.function.RowFunction`. The tensors that it names are
    arguments of those names.
    """

    def __init__(self, make, variant):
        self.names, self.function = variant.names, make(variant)
        self.form = (Segments if self.function.reduction is None else run_rows)(variant, self.function)

    @cute.jit
    def __call__(self, *arguments):
        tensors = dict(zip(self.names, arguments))
        kinds = (self.function.inputs, self.function.outputs, self.function.numbers)
        inputs, outputs, numbers = (tuple([tensors[name] for name in names]) for names in kinds)
        self.form(inputs, outputs, numbers, arguments[-1])
