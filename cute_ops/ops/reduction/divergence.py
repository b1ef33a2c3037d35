"""The generalised Jensen-Shannon divergence of two rows' distributions: an expression of rows, cases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.ops import docs
from cute_ops.ops.checks import FINITE, within
from cute_ops.ops.expression.fused import fused

ROW: Mapping[str, Any] = {"axis": -1, "keepdims": True}
CASES = (
    Case("odd-small", {"m": (3, 5), "n": 7}),
    Case("forward", {"m": (33,), "n": 1000}, attrs={"beta": 0.0}),
    Case("reverse", {"m": (17,), "n": 515}, attrs={"beta": 1.0, "temperature": 2.0}),
    Case("llama3-8b", {"m": (3,), "n": 128256}, attrs={"beta": 0.1}),
)


# No probability adds anything below it: what it is multiplied by is finite.
LEAST = 2.0**-126


def _softmax(xp: Any, x: Any, weight: float, temperature: float) -> tuple[Any, Any]:
    """The weighted probabilities, and the logarithms to base 2 of those without a weight. Powers of 2 take one
    instruction.
    """
    # A softmax does not change with what is subtracted. Scaled before, an element takes one multiply-add.
    scale = math.log2(math.e) / temperature
    shifted = x * scale - xp.stop_gradient(xp.max(x, **ROW)) * scale
    powers = xp.exp2(shifted)
    total = xp.sum(powers, **ROW)
    return powers * (weight / total), shifted - xp.log2(total)


def _divergence(xp: Any, student: Any, teacher: Any, *, beta: float, temperature: float) -> Any:
    q, log_q = _softmax(xp, student, 1 - beta if 0 < beta < 1 else 1.0, temperature)
    p, log_p = _softmax(xp, teacher, beta or 1.0, temperature)
    if beta == 0:
        return xp.sum(p * (log_p - log_q), **ROW) * math.log(2)
    # The gradients by way of logarithms are sums of q's, of which a softmax has none: only its factor's is left.
    if beta == 1:
        return xp.sum(q * xp.stop_gradient(log_q - log_p), **ROW) * math.log(2)
    log_mixed = xp.log2(xp.maximum(p + q, LEAST))
    from_q = q * xp.stop_gradient(log_q - log_mixed)
    return xp.sum(p * xp.stop_gradient(log_p - log_mixed) + from_q, **ROW) * math.log(2)


def check(binding: Binding) -> str | None:
    if (temperature := binding.attrs["temperature"]) <= 0:
        return f"attribute `temperature` is {temperature}, expected a positive number."
    return within(beta=(0.0, 1.0), temperature=FINITE)(binding)


divergence = fused(
    _divergence, name="divergence", operands={"student": "*m n", "teacher": "*m n"}, outputs=("loss",), cases=CASES,
    attrs={"beta": 0.5, "temperature": 1.0}, no_gradient=("teacher",), squeezed=True, check=check,
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
        ValueError: shapes that do not fit, an attribute out of its range, a last dim that is not contiguous.

    Source: Agarwal et al., On-Policy Distillation of Language Models, 2023.
    """,
)  # fmt: skip
