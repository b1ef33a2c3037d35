"""RMSNorm of every head of q and k, and their rotation, in one pass: declaration, reference maths, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.array_api import widen
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.static import WhileFew
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.checks import NOT_NEGATIVE, within
from cute_ops.ops.norm.rmsnorm import backward_terms, sum_rows
from cute_ops.ops.rotary import config
from cute_ops.ops.rotary.rope import SHARED, rotate
from cute_ops.ops.rotary.rope import check as check_heads

CASES = (
    Case("one-group", {"m": (3, 5), "hq": 2, "hk": 1, "d": 64, "r": 32}),
    Case("qwen3-8b", {"m": (2, 67), "hq": 32, "hk": 8, "d": 128, "r": 64}, {"W": "float32", "C": "float32"},
         leading=SHARED),
    Case("odd-head", {"m": (3, 5), "hq": 3, "hk": 1, "d": 7, "r": 2}),
    Case("gemma3-partial", {"m": (131,), "hq": 4, "hk": 1, "d": 256, "r": 32}, {"C": "float32"}, leading=SHARED),
    Case("long-head", {"m": (5,), "hq": 2, "hk": 1, "d": 4096, "r": 2048}, {"C": "float32"}),
)  # fmt: skip


def check(binding: Any) -> str | None:
    return within(eps=NOT_NEGATIVE)(binding) or check_heads(binding)


def _normed(xp: Any, x: Any, weight: Any, eps: float) -> Any:
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def reference(
    xp: Any, q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, *, eps: float
) -> tuple[Any, Any]:
    wide_q, wide_k, wq, wk, c, s = widen(xp, q, k, q_weight, k_weight, cos, sin)
    q_out = rotate(xp, _normed(xp, wide_q, wq, eps), c, s, False)
    k_out = rotate(xp, _normed(xp, wide_k, wk, eps), c, s, False)
    return xp.astype(q_out, q.dtype), xp.astype(k_out, k.dtype)


def reference_bwd(
    xp: Any, q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, dq_out: Any, dk_out: Any, *, eps: float
) -> tuple[Any, Any, Any, Any]:
    c, s = widen(xp, cos, sin)

    def one(x: Any, weight: Any, dout: Any) -> tuple[Any, Any]:
        wide, w, dy = widen(xp, x, weight, dout)
        rotated = rotate(xp, dy, c, -s, False)
        dx, normed = backward_terms(xp, wide, w, rotated, eps, 0.0)
        return xp.astype(dx, x.dtype), sum_rows(xp, rotated * normed, weight)

    dq, dq_weight = one(q, q_weight, dq_out)
    dk, dk_weight = one(k, k_weight, dk_out)
    return dq, dk, dq_weight, dk_weight


Q, K, WEIGHT, TABLE = Tensor("*m hq d", "T"), Tensor("*m hk d", "T"), Tensor("d", "W"), Tensor("*#m r", "C")
INPUTS = {"q": Q, "k": K, "q_weight": WEIGHT, "k_weight": WEIGHT, "cos": TABLE, "sin": TABLE}
COMMON: dict[str, Any] = {
    "dtypes": {"T": FLOATS, "W": FLOATS, "C": FLOATS}, "attrs": {"eps": 1e-6},
    "static": WhileFew("hq", "hk", "d", "r"), "check": check, "cases": CASES,
}  # fmt: skip

qk_norm_rope_bwd = Op(
    "qk_norm_rope_bwd",
    inputs={**INPUTS, "dq_out": Q, "dk_out": K},
    outputs={"dq": Q, "dk": K, "dq_weight": WEIGHT, "dk_weight": WEIGHT},
    **COMMON,
    reference=reference_bwd,
    kernel="cute_ops.kernels.rotary.qk_norm_rope:QKNormRopeBackward",
    tuning=Tuning(config.qk_norm_rope_bwd, space=config.BACKWARD, workspace=config.workspace),
    doc="""Gradients of :func:`qk_norm_rope`.

    The cotangents are rotated back; then as :func:`rmsnorm_bwd`, for each head, with weights' gradients summed over
    all heads and positions. Sums are in float32, in a fixed order: results are deterministic.
    """,
)

qk_norm_rope = Op(
    "qk_norm_rope",
    inputs=INPUTS,
    outputs={"q_out": Q, "k_out": K},
    **COMMON,
    reference=reference,
    kernel="cute_ops.kernels.rotary.qk_norm_rope:QKNormRope",
    tuning=Tuning(config.qk_norm_rope, space=config.SPACE),
    grad=qk_norm_rope_bwd,
    no_gradient=("cos", "sin"),
    doc="""RMSNorm over the elements of each head of q and k, then rotary position embedding, in one pass.

    ``q_out = rope(q * rsqrt(mean(q^2) + eps) * q_weight, cos, sin)``, k likewise.

    Args:
        q: ``T[*m hq d]``: (batch, seqlen, nheads, headdim), or (tokens, nheads, headdim); float32, float16 or bfloat16.
            Heads and positions may have any stride.
        k: ``T[*m hk d]``: as q, with its own number of heads.
        q_weight: ``W[d]``, a float dtype of its own, shared by all heads.
        k_weight: ``W[d]``.
        cos: ``C[*#m r]``, a float dtype of its own: (seqlen, r) for all of a batch, or (batch, seqlen, r). Pairs are
            ``(j, j + r)``; elements from ``2r`` on are not rotated. No gradient.
        sin: ``C[*#m r]``, the shape of cos.
        eps: added to the mean square; a compile-time constant.

    Returns:
        ``(q_out, k_out)``: ``T[*m hq d]`` and ``T[*m hk d]``, compact. Computed in float32, rounded once;
        deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an attribute out of its range, a last dim that is not contiguous,
            ``d < 2r``.

    Source: Dehghani et al., Scaling Vision Transformers to 22 Billion Parameters, 2023; Qwen3.
    """,
)
