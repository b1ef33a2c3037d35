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
from cute_ops.ops.checks import FINITE, factors, within
from cute_ops.ops.expression.formula import ByAttrs, Formula, declare
from cute_ops.ops.expression.traces import Traces
from cute_ops.ops.rows import CTA_VECTORS, cluster_for, threads_for

ROW: Mapping[str, Any] = {"axis": -1, "keepdims": True}
CASES = (
    Case("odd-small", {"m": (3, 5), "n": 7}),
    Case("forward", {"m": (33,), "n": 1000}, attrs={"beta": 0.0}),
    Case("reverse", {"m": (17,), "n": 515}, attrs={"beta": 1.0, "temperature": 2.0}),
    Case("llama3-8b", {"m": (3,), "n": 128256}, attrs={"beta": 0.1}),
)


# No probability adds anything below it: what it is multiplied by is finite.
LEAST = 2.0**-126


def _softmax(xp: Any, x: Any, weight: float, temperature: float) -> tuple[Any, Any, Any, Any]:
    """The weighted probabilities, the logarithms to base 2 of those without a weight, and the two numbers of a row that
    these take: its largest exponent, and the logarithm of its sum of powers. Powers of 2 take one instruction.
    """
    # A softmax does not change with what is subtracted. Scaled before, an element takes one multiply-add.
    scale = math.log2(math.e) / temperature
    top = xp.max(x, **ROW) * scale
    shifted = x * scale - top
    powers = xp.exp2(shifted)
    total = xp.sum(powers, **ROW)
    log_sum = xp.log2(total)
    return powers * (weight / total), shifted - log_sum, top, log_sum


def _terms(xp: Any, student: Any, teacher: Any, beta: float, temperature: float) -> tuple[list[Any], tuple[Any, ...]]:
    """The teacher's and the student's terms of an element in the divergence, in bits, and the numbers of both softmaxes
    for each row.
    """
    q, log_q, *of_student = _softmax(xp, student, 1 - beta if 0 < beta < 1 else 1.0, temperature)
    p, log_p, *of_teacher = _softmax(xp, teacher, beta or 1.0, temperature)
    numbers = *of_student, *of_teacher
    if beta == 0:
        return [p * (log_p - log_q)], numbers
    if beta == 1:
        return [q * (log_q - log_p)], numbers
    log_mixed = xp.log2(xp.maximum(p + q, LEAST))
    return [p * (log_p - log_mixed), q * (log_q - log_mixed)], numbers


def _divergence(xp: Any, student: Any, teacher: Any, *, beta: float, temperature: float) -> Any:
    terms, _ = _terms(xp, student, teacher, beta, temperature)
    return xp.sum(sum(terms[1:], terms[0]), **ROW) * math.log(2)


def _with_numbers(xp: Any, student: Any, teacher: Any, *, beta: float, temperature: float) -> tuple[Any, ...]:
    """The divergence, and what its gradient takes of a row: the numbers of both softmaxes, and the student's own
    divergence, in bits.
    """
    terms, numbers = _terms(xp, student, teacher, beta, temperature)
    sums = [xp.sum(term, **ROW) for term in terms]
    offset = sums[1] * (1 / (1 - beta)) if len(sums) > 1 else sums[0]
    return sum(sums[1:], sums[0]) * math.log(2), *numbers, offset


def _gradient(
    xp: Any, student: Any, teacher: Any, *, student_max: Any, student_log_sum: Any, teacher_max: Any,
    teacher_log_sum: Any, offset: Any, dloss: Any, beta: float, temperature: float,
) -> Any:  # fmt: skip
    scale = math.log2(math.e) / temperature
    log_q = (student * scale - student_max) - student_log_sum
    log_p = (teacher * scale - teacher_max) - teacher_log_sum
    q = xp.exp2(log_q)
    if beta == 0:
        return (dloss * (1 / temperature)) * (q - xp.exp2(log_p))
    if beta < 1:
        log_p = xp.log2(xp.maximum(xp.exp2(log_p) * beta + q * (1 - beta), LEAST))
    weight = math.log(2) / temperature * (1 - beta if beta < 1 else 1.0)
    return (dloss * weight) * q * ((log_q - log_p) - offset)


# Vectors of each row of a thread, and threads of an SM, where rows are off a vector: 1957 x 30001 runs at 0.50 of a
# copy's rate, by single slots of shared memory at 0.40. Longer rows than the registers of sixteen such CTAs hold have
# up to MOST_THREADS for LONGEST_SPAN vectors: 292 x 201088 runs at 0.33, by single slots at 0.27, 223 x 262144 at 0.36,
# 0.33.
VECTORS, SM_THREADS, MOST_THREADS, LONGEST_SPAN = 4, 1024, 416, 2080
# Rows off a vector of more vectors, which two CTAs would share, have one: 4777 x 12291 runs at 0.50, by two at 0.47.
ALONE_VECTORS = 1536
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
    return within(beta=(0.0, 1.0), temperature=FINITE)(binding) or factors("temperature")(binding)


def _in_registers(formula: Formula, problem: Problem) -> FusedConfig | FusedRowConfig:
    """Rows off a vector, and the longest, are in registers, too, where the expression's kernel would spill."""
    found = formula.config(problem)
    if isinstance(found, FusedConfig) or found.form == "passes" or problem.attrs["beta"] in (0.0, 1.0):
        return found
    row = formula.rows.row(problem)
    if found.form == "one_pass":
        alone = not row.aligned and found.cluster == 2 and row.touched > ALONE_VECTORS
        return replace(found, threads=256, threads_per_row=256, cluster=1, resident=2) if alone else found
    cluster = cluster_for(row.touched, CTA_VECTORS, row.max_cluster)
    share = min(threads_for(-(-row.touched // cluster), VECTORS), MOST_THREADS)
    if row.touched > cluster * LONGEST_SPAN:
        return found
    return replace(
        found, form="one_pass", threads=share, threads_per_row=share, cluster=cluster, resident=SM_THREADS // share
    )


def _rows_off_a_vector(formula: Formula, problem: Problem) -> FusedConfig | FusedRowConfig:
    """A kernel of elements loads elements one by one where rows do not start on a vector."""
    rows = formula.rows
    return formula.config(problem) if problem.n is None or rows.row(problem).aligned else rows.config(problem)


def _formula(name: str, function: Callable[..., Any], inputs: Mapping[str, Tensor], writes: tuple[str, ...]) -> Any:
    """By attributes, the formula of a function of tiles and of numbers of rows."""
    by_rows = "student_max" not in inputs
    kinds = {key: "*m n" if tensor.shape == "*m n" else "*m 1" for key, tensor in inputs.items()}
    traces, letters = Traces(name, function, kinds, ATTRS), "t" if writes == ("dstudent",) else "c" * len(writes)
    return ByAttrs(lambda attrs: Formula(traces(attrs), by_rows, tuple(inputs), writes, letters, "student"))


def saved_by_the_forward(xp: Any, arrays: dict[str, Any]) -> None:
    """The numbers of each row, as the gradient gets them with the attributes' defaults."""
    found = _with_numbers(xp, *(arrays[key].astype(xp.float64) for key in TILES), beta=0.5, temperature=1.0)
    for key, value in zip(NUMBERS, found[1:], strict=True):
        arrays[key][...] = value[..., 0]


TILES = {key: Tensor("*m n", "T") for key in ("student", "teacher")}
ATTRS = {"beta": 0.5, "temperature": 1.0}
ROW_NUMBER = Tensor("*m", "float32")
NUMBERS = dict.fromkeys(("student_max", "student_log_sum", "teacher_max", "teacher_log_sum", "offset"), ROW_NUMBER)
KERNEL = "cute_ops.kernels.reduction.divergence:divergence"

_given = {**TILES, **NUMBERS, "dloss": ROW_NUMBER}
divergence_bwd = declare(
    "divergence_bwd", _formula("divergence_bwd", _gradient, _given, ("dstudent",)), _given,
    {"dstudent": TILES["student"]}, ATTRS, module=__name__, config=_rows_off_a_vector, check=check, cases=CASES,
    arrange=saved_by_the_forward,
    doc="""Gradient of :func:`divergence` to the student's logits, from numbers of each row that the forward gave.

    With ``q`` the student's softmax, ``p`` the teacher's and ``m`` their mixture: ``dstudent = dloss * (1 - beta) /
    temperature * q * (log(q / m) - sum(q * log(q / m)))``; for beta 1 with p in place of m and without the factor, for
    beta 0 ``dloss / temperature * (q - p)``. One read of both, one write.
    """,
)  # fmt: skip

_saved = {"loss": ROW_NUMBER, **NUMBERS}
divergence_saving = declare(
    "divergence_saving", _formula("divergence_saving", _with_numbers, TILES, tuple(_saved)), TILES, _saved, ATTRS,
    module=__name__, config=_in_registers, kernel=KERNEL, check=check, cases=CASES,
    inference_only="divergence has one",
    doc="""What :func:`divergence` computes, and the numbers of each row that its gradient takes, in one pass: the
    largest exponents to base 2, the logarithms of the sums of powers, and the student's divergence from the mixture, in
    bits.
    """,
)  # fmt: skip

divergence = declare(
    "divergence", _formula("divergence", _divergence, TILES, ("loss",)), TILES, {"loss": ROW_NUMBER}, ATTRS,
    module=__name__, config=_in_registers, kernel=KERNEL, grad=divergence_bwd, saving=divergence_saving,
    no_gradient=("teacher",), check=check, cases=CASES,
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

divergence_step = _step(
    "divergence_step", _divergence_step, {"soft": ROW_NUMBER},
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
    {"target": Tensor("*m", "I", upper_bound="n"), "soft": ROW_NUMBER, "hard": ROW_NUMBER},
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
