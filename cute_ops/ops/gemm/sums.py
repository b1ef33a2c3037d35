"""The gradient of a bias: sums of columns."""

from __future__ import annotations

from functools import cache

from cute_ops.declaration.op import Op
from cute_ops.declaration.tensor import Tensor
from cute_ops.expressions.graph import SHAPES, identity
from cute_ops.ops.expression.formula import Formula
from cute_ops.ops.expression.pointwise import pointwise


@cache
def column_sum() -> Op:
    """The op that adds up the rows of a gradient, ``dbias = sum(x, axis=rows)``, in the dtype of the bias."""
    formula = Formula(identity(SHAPES["*m n"]), False, ("x",), ("dbias",), "r", "x")
    return pointwise(
        "column_sum", lambda attrs: formula, {"x": Tensor("*m n", "T"), "bias": Tensor("n", "T_bias", unread=True)},
        {"dbias": Tensor("n", "T_bias")}, {}, module=__name__, doc="The sum of all rows: the gradient of a bias.",
    )  # fmt: skip
