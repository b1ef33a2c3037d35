"""The generalised Jensen-Shannon divergence of two rows' distributions: an expression of rows, cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Problem
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.tensor import Tensor
from cute_ops.kernels.rows.config import FusedConfig, FusedRowConfig
from cute_ops.ops import docs
from cute_ops.ops.checks import FINITE, within
from cute_ops.ops.expression.formula import ByAttrs, Formula, declare
from cute_ops.ops.expression.fused import fused
from cute_ops.ops.expression.traces import Traces

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


# `distillation_step` of 1024 x 128256 takes 478 us (beta 0.5) and 345 (beta 0) in the shared memory of eight CTAs of
# 512 threads, three of which share an SM, in the registers of sixteen 610 and 478 (H200).
RING_CTAS, RING_THREADS, RING_RESIDENT = 8, 512, 3


# --- loss and gradient in one pass ------------------------------------------------------------------------------------


def _powers(xp: Any, x: Any, temperature: float) -> tuple[Any, Any, Any]:
    """``log2(exp(x / temperature))`` beside the row's largest, the power of 2 of that, and the row's sum of powers."""
    scale = math.log2(math.e) / temperature
    shifted = x * scale - xp.max(x, **ROW) * scale
    powers = xp.exp2(shifted)
    return shifted, powers, xp.sum(powers, **ROW)


def _with_gradient(xp: Any, student: Any, teacher: Any, beta: float, temperature: float) -> tuple[Any, Any]:
    """The divergence and its gradient to the student's logits, in as few stages of sums as there can be."""
    s, at_s, sum_s = _powers(xp, student, temperature)
    t, at_t, sum_t = _powers(xp, teacher, temperature)
    log_s, log_t = xp.log2(sum_s), xp.log2(sum_t)
    if beta == 0:
        loss = math.log(2) * (xp.sum(at_t * (t - s), **ROW) / sum_t + (log_s - log_t))
        return loss, at_s * (1 / (sum_s * temperature)) - at_t * (1 / (sum_t * temperature))
    if beta == 1:
        loss = math.log(2) * (xp.sum(at_s * (s - t), **ROW) / sum_s - (log_s - log_t))
        offset = loss + math.log(2) * (log_s - log_t)
        return loss, at_s * (1 / (sum_s * temperature)) * (math.log(2) * (s - t) - offset)
    q, p = at_s * ((1 - beta) / sum_s), at_t * (beta / sum_t)
    log_mixed = xp.log2(xp.maximum(p + q, LEAST))
    apart = (s - log_s) - log_mixed
    of_q = xp.sum(q * apart, **ROW)
    loss = math.log(2) * (xp.sum(p * ((t - log_t) - log_mixed), **ROW) + of_q)
    return loss, q * (math.log(2) / temperature) * (apart - of_q * (1 / (1 - beta)))


def _divergence_step(
    xp: Any, student: Any, teacher: Any, soft: Any, *, beta: float, temperature: float
) -> tuple[Any, Any]:
    loss, slope = _with_gradient(xp, student, teacher, beta, temperature)
    return xp.where(soft != 0, soft * slope, 0.0), xp.where(soft != 0, soft * loss, 0.0)


def _distillation_step(
    xp: Any, student: Any, teacher: Any, target: Any, soft: Any, hard: Any, *, beta: float, temperature: float
) -> tuple[Any, Any]:
    loss, slope = _with_gradient(xp, student, teacher, beta, temperature)
    x, powers, total = _powers(xp, student, 1.0)
    here = xp.arange(student.shape[-1]) == target
    loss = soft * loss + hard * (xp.log2(total) - xp.sum(xp.where(here, x, 0.0), **ROW)) * math.log(2)
    slope = soft * slope + (powers * (hard / total) - xp.where(here, hard, 0.0))
    counts = (soft != 0) | (hard != 0)
    return xp.where(counts, slope, 0.0), xp.where(counts, loss, 0.0)


def _step(name: str, function: Callable[..., Any], numbers: Mapping[str, Tensor], doc: str, **more: Any) -> Op:
    """The op of a function of the logits and of these numbers of each row."""
    tiles = {key: Tensor("*m n", "T") for key in ("student", "teacher")}
    inputs, attrs = {**tiles, **numbers}, {"beta": 0.5, "temperature": 1.0}
    traces = Traces(name, function, {**dict.fromkeys(tiles, "*m n"), **dict.fromkeys(numbers, "*m 1")}, attrs)
    formula = ByAttrs(lambda a: Formula(traces(a), True, tuple(inputs), ("dstudent", "loss"), "tc", "student"))
    outputs = {"dstudent": tiles["student"]._replace(donates="student"), "loss": Tensor("*m", "float32")}
    return declare(name, formula, inputs, outputs, attrs, module=__name__, check=check, cases=CASES, doc=doc, **more)


def _in_shared_memory(formula: Formula, problem: Problem) -> FusedConfig | FusedRowConfig:
    """Rows that the registers of more than RING_CTAS would hold are in the shared memory of so many."""
    found = formula.config(problem)
    if isinstance(found, FusedConfig) or found.form != "one_pass" or found.cluster <= RING_CTAS:
        return found
    return replace(
        found, form="ring", threads=RING_THREADS, threads_per_row=RING_THREADS, cluster=RING_CTAS,
        resident=RING_RESIDENT, keep=False,
    )  # fmt: skip


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

_WEIGHT = Tensor("*m", "float32")
divergence_step = _step(
    "divergence_step", _divergence_step, {"soft": _WEIGHT},
    """Each row's :func:`divergence` times its weight, and the gradient of that to the student's logits, in one pass.

    Args:
        student: ``T[*m n]``: logits, whose memory the gradient may take.
        teacher: ``T[*m n]``: logits.
        soft: float32 ``[*m]``: weights. A row of weight 0 has loss and gradient 0, whatever its logits are.
        beta, temperature: as in :func:`divergence`.

    Returns:
        ``(dstudent, loss)``: ``T[*m n]`` and float32 ``[*m]``. Not differentiable.
    """,
)  # fmt: skip
distillation_step = _step(
    "distillation_step", _distillation_step,
    {"target": Tensor("*m", "I", upper_bound="n"), "soft": _WEIGHT, "hard": _WEIGHT},
    """A weighted sum of each row's :func:`divergence` and of the student's cross entropy, and its gradient to the
    student's logits, in one pass.

    Args:
        student: ``T[*m n]``: logits, whose memory the gradient may take.
        teacher: ``T[*m n]``: logits.
        target: ``I[*m]``, int64 or int32: classes. Of a row whose ``hard`` is 0 it may be anything.
        soft: float32 ``[*m]``: weights of the divergence.
        hard: float32 ``[*m]``: weights of the cross entropy, of logits that no temperature divides. A row whose weights
            are both 0 has loss and gradient 0, whatever its logits are.
        beta, temperature: as in :func:`divergence`.

    Returns:
        ``(dstudent, loss)``: ``T[*m n]`` and float32 ``[*m]``. Not differentiable.
    """,
    config=_in_shared_memory, kernel="cute_ops.kernels.rows.numbered:fused",
    dtypes={"T": FLOATS, "I": ("int64", "int32")},
)  # fmt: skip
