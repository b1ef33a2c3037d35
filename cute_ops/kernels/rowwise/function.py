"""Functions of rows: the protocol of this package's kernels."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32

from cute_ops.kernels.lib.copy import narrow
from cute_ops.kernels.lib.row_reduce import RowSum


class Columns(NamedTuple):
    """The columns of a vector: ``first`` and the ones after it, ``count`` altogether. Some may lie outside the row."""

    first: Any
    count: int


class Sum:
    """The sum of ``term(*inputs)`` over a row."""

    empty = 0

    def __init__(self, term):
        self.term = term

    def across(self, tile, stages):
        return RowSum(tile, 1, stages)

    def start(self):
        return (Float32(0.0),)

    def add(self, state, get, inside):
        """Add a vector of each input, which ``get()`` reads; ``inside`` tells which elements are inside the row."""
        return (state[0] + self.term(*get()).reduce(cute.ReductionOp.ADD, Float32(0.0), 0),)

    def gather(self, gets, insides):
        """The state of all vectors at once."""
        state = self.start()
        for get in gets:
            state = self.add(state, get, None)
        return state


class RowFunction:
    """A function of each row, which a kernel computes.

    Attributes:
        inputs, outputs: names of the row tensors.
        numbers: names of the tensors that :meth:`begin` and :meth:`postprocess` take.
        reduction: :class:`Sum`, :class:`~cute_ops.kernels.lib.row_reduce_lse.LogSum`, or None where an element of the
            outputs follows from the same one of the inputs and from what :meth:`begin` loads.
    """

    inputs: tuple
    outputs: tuple
    numbers: tuple = ()
    reduction: object = None

    def __init__(self, variant):
        pass

    def begin(self, variant, numbers, row, valid):
        """(``context`` of the other methods, whether the row must be read); ``valid``: whether the row exists."""
        return None, valid

    def tied(self, state, context):
        """A thread's contribution to the row's reduction, once the loads of :meth:`begin` have arrived."""
        return state

    def emit(self, values, results, context, columns):
        """Output vectors from input vectors and the results of the row's reduction, in fp32."""
        return ()

    def rounded(self, x, dtype, vec):
        """An fp32 vector of an output as it is stored."""
        return narrow(x, dtype, vec)

    def postprocess(self, variant, numbers, rows, results, context, row):
        """Called by one thread of each row, after its reduction."""
