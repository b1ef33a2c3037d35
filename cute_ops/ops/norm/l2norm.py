"""Rows of length one: an expression of rows, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.ops import docs
from cute_ops.ops.checks import NOT_NEGATIVE, within
from cute_ops.ops.expression.fused import fused

CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("odd-small", {"m": (3, 5), "n": 7}),
    Case("gated-deltanet", {"m": (2, 33, 4), "n": 128}),
    Case("clip", {"m": (37,), "n": 768}, attrs={"eps": 0.0}),
    Case("longest", {"m": (3,), "n": 262144}),
)


def _l2norm(xp: Any, x: Any, *, eps: float) -> Any:
    return x * xp.rsqrt(xp.sum(x * x, axis=-1, keepdims=True) + eps)


l2norm = fused(
    _l2norm, name="l2norm", operands={"x": "*m n"}, attrs={"eps": 1e-6}, cases=CASES,
    check=within(eps=NOT_NEGATIVE),
    grad_doc="Gradient of :func:`l2norm`: ``r * (dout - out * sum(dout * out))`` with ``r = rsqrt(sum(x^2) + eps)``.",
    doc=f"""Rows divided by their length.

    ``out = x * rsqrt(sum(x^2) + eps)``

    Args:
        x: {docs.ROWS}.
        eps: added to the sum of squares; a compile-time constant.

    Returns:
        ``T[*m n]``, compact. Computed in float32, rounded once; deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: an attribute out of its range, a last dim that is not contiguous.

    Source: queries and keys of linear attention: Yang et al., Gated Delta Networks, 2024.
    """,
)  # fmt: skip
