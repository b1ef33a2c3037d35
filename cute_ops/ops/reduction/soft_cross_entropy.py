"""Cross entropy of logits with probabilities as targets: an expression of rows, cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.declaration.finish import Finish
from cute_ops.ops import docs
from cute_ops.ops.checks import FINITE, NOT_NEGATIVE, TERM, factors, within
from cute_ops.ops.expression.fused import fused

ROW: Mapping[str, Any] = {"axis": -1, "keepdims": True}
LARGEST = 3e38
CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("odd-small", {"m": (3, 5), "n": 7}, attrs={"label_smoothing": 0.1, "z_loss": 1e-3}),
    Case("imagenet", {"m": (33,), "n": 1000}, {"T_target": "float32"}, attrs={"label_smoothing": 0.1}),
    Case("distilled-llama3-8b", {"m": (2, 3), "n": 128256}),
    Case("capped", {"m": (2, 9), "n": 515}, attrs={"softcap": 2.0, "logit_scale": 1.5}),
)


def _soft_cross_entropy(
    xp: Any, logits: Any, target: Any, *, label_smoothing: float, z_loss: float, softcap: float, logit_scale: float
) -> Any:
    x = logits * logit_scale if logit_scale != 1 and not softcap else logits
    if softcap:
        x = softcap * xp.tanh(x * (logit_scale / softcap))
    m = xp.max(x, **ROW)
    shifted = x - m
    log_sum = xp.log(xp.sum(xp.exp(shifted), **ROW))
    cost = log_sum - shifted
    # A class of no probability adds nothing, whatever its logit is; its gradient is what it would cost.
    cost = xp.where(target == 0, xp.stop_gradient(xp.minimum(cost, LARGEST)), cost)
    loss = xp.sum(target * cost, **ROW)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (log_sum - xp.mean(shifted, **ROW))
    if z_loss:
        loss = loss + z_loss * xp.square(m + log_sum)
    return loss


def _reduced(
    xp: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any], attrs: Mapping[str, Any], *, reduction: str
) -> Mapping[str, Any]:
    """The losses, their sum, or their mean over all rows."""
    loss = outputs["loss"]
    return {"loss": loss if reduction == "none" else xp.sum(loss) if reduction == "sum" else xp.mean(loss)}


_in_range = within(label_smoothing=(0.0, 1.0), z_loss=TERM, softcap=NOT_NEGATIVE, logit_scale=FINITE)
_as_float32 = factors("softcap", "logit_scale")
soft_cross_entropy = fused(
    _soft_cross_entropy, name="soft_cross_entropy", operands={"logits": "*m n", "target": "any *m n"},
    outputs=("loss",), cases=CASES,
    attrs={"label_smoothing": 0.0, "z_loss": 0.0, "softcap": 0.0, "logit_scale": 1.0},
    finish=Finish(_reduced, {"reduction": ("mean", "sum", "none")}, {"reduction": "none"}),
    squeezed=True, check=lambda binding: _in_range(binding) or _as_float32(binding),
    grad_doc="Gradients of :func:`soft_cross_entropy` to the logits and to the probabilities.",
    doc=f"""Cross entropy of logits with probabilities of the classes as targets.

    ``loss = sum((1 - label_smoothing) * target + label_smoothing / n) * (lse - logits)) + z_loss * lse^2``

    For a weight per class, multiply the target by it.

    Args:
        logits: {docs.ROWS}.
        target: ``[*m n]``, a float dtype of its own: the probabilities, which need not add up to one.
        label_smoothing: fraction of the target that is spread evenly over all classes; a compile-time constant, as the
            next three.
        z_loss: weight of ``lse^2``.
        softcap: bound of the logits, ``softcap * tanh(logits / softcap)``; 0 is none.
        logit_scale: factor of the logits, before the cap.
        reduction: ``"mean"`` over all rows, ``"sum"`` or ``"none"``. ``torch.ops.cute.soft_cross_entropy`` has no such
            argument: it returns the loss of each row.

    Returns:
        float32: a scalar, or ``[*m]``. Logits and targets have gradients. Accumulated in float32, deterministic.
        A class whose target is 0 may have the logit -inf.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an attribute out of its range, a last dim that is not contiguous, an unknown
            reduction.

    Source: Hinton et al., Distilling the Knowledge in a Neural Network, 2015.
    """,
)  # fmt: skip
