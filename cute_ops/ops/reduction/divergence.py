"""The generalised Jensen-Shannon divergence of two rows' distributions: an expression of rows, cases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.ops import docs
from cute_ops.ops.expression.fused import fused

ROW: Mapping[str, Any] = {"axis": -1, "keepdims": True}
CASES = (
    Case("odd-small", {"m": (3, 5), "n": 7}),
    Case("forward", {"m": (33,), "n": 1000}, attrs={"beta": 0.0}),
    Case("reverse", {"m": (17,), "n": 515}, attrs={"beta": 1.0, "temperature": 2.0}),
    Case("llama3-8b", {"m": (3,), "n": 128256}, attrs={"beta": 0.1}),
)


def _log_softmax(xp: Any, x: Any, temperature: float) -> Any:
    x = x * (1 / temperature) if temperature != 1 else x
    shifted = x - xp.max(x, **ROW)
    return shifted - xp.log(xp.sum(xp.exp(shifted), **ROW))


def _divergence(xp: Any, student: Any, teacher: Any, *, beta: float, temperature: float) -> Any:
    q, p = (_log_softmax(xp, x, temperature) for x in (student, teacher))
    if beta == 0:
        return xp.sum(xp.exp(p) * (p - q), **ROW)
    if beta == 1:
        return xp.sum(xp.exp(q) * (q - p), **ROW)
    first, second = p + math.log(beta), q + math.log(1 - beta)
    # log(beta * exp(p) + (1 - beta) * exp(q)), which never takes the logarithm of zero
    mixed = xp.maximum(first, second) + xp.log1p(xp.exp(-xp.abs(first - second)))
    return xp.sum(beta * xp.exp(p) * (p - mixed) + (1 - beta) * xp.exp(q) * (q - mixed), **ROW)


divergence = fused(
    _divergence, name="divergence", operands={"student": "*m n", "teacher": "*m n"}, outputs=("loss",), cases=CASES,
    attrs={"beta": 0.5, "temperature": 1.0}, no_gradient=("teacher",), squeezed=True,
    grad_doc="Gradient of :func:`divergence` to the student's logits.",
    doc=f"""The generalised Jensen-Shannon divergence of a student's and a teacher's distributions.

    With ``p``, ``q`` the softmax of the teacher's and the student's logits over the temperature and ``m = beta * p +
    (1 - beta) * q``: ``loss = beta * KL(p, m) + (1 - beta) * KL(q, m)``; ``KL(p, q)`` for beta 0, ``KL(q, p)`` for 1

    Args:
        student: {docs.ROWS}: logits.
        teacher: ``T[*m n]``: logits. No gradient.
        beta: from 0 to 1; a compile-time constant.
        temperature: divides the logits; a compile-time constant.

    Returns:
        float32 ``[*m]``. Accumulated in float32, deterministic.

    Raises:
        TypeError: a dtype that is not listed, or two different ones.
        ValueError: shapes that do not fit, a last dim that is not contiguous.

    Source: Agarwal et al., On-Policy Distillation of Language Models, 2023.
    """,
)  # fmt: skip
