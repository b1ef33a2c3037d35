"""The largest numbers of each segment of a row: see :mod:`cute_ops.ops.routing.topk`."""

import cutlass.cute as cute

from cute_ops.kernels.routing.config import TopkConfig
from cute_ops.kernels.routing.select import SelectedTopK
from cute_ops.kernels.routing.sort import SortedTopK

FORMS = {"sort": SortedTopK, "select": SelectedTopK}


class TopK:
    """The k largest of every ``SEGMENT`` columns, in order; of equal ones those of lower columns."""

    def __init__(self, variant):
        config = TopkConfig.of(variant.config)
        self.form = FORMS[config.form](variant, config)

    @cute.jit
    def __call__(self, mX, mIndex, mValues, mFound, stream):
        self.form(mX, mIndex, mValues, mFound, stream)
