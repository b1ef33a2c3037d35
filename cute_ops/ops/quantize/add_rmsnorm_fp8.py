"""Residual add + RMSNorm, quantised to float8_e4m3fn: declaration, reference maths, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.array_api import widen
from cute_ops.declaration.case import Case
from cute_ops.ops import docs
from cute_ops.ops.norm.add_rmsnorm import add_rmsnorm
from cute_ops.ops.norm.rmsnorm import reference as normalise
from cute_ops.ops.quantize.quantize_fp8 import BLOCK, RETURNS, declare, quantise

CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("odd-small", {"m": (3, 5), "n": 7}, {"W": "float32", "B": "float16"}, attrs={"block": 128}),
    Case("odd", {"m": (37,), "n": 4097}),
    Case("odd-wide-residual", {"m": (37,), "n": 1001}, {"R": "float32"}, attrs={"block": 128}),
    Case("llama3-8b", {"m": (2, 67), "n": 4096}, absent=("bias",), attrs={"eps": 1e-5}),
    Case("deepseek-v3", {"m": (2, 33), "n": 7168}, absent=("bias",), attrs={"block": 128}),
    Case("wide-residual", {"m": (33,), "n": 4096}, {"R": "float32", "W": "float32"}, absent=("bias",)),
    Case("longest", {"m": (3,), "n": 262144}, absent=("bias",)),
)


def reference(
    xp: Any, x: Any, residual: Any, weight: Any = None, bias: Any = None,
    *, eps: float, weight_offset: float, block: int, power_of_two: bool = False,
) -> tuple[Any, Any, Any]:  # fmt: skip
    wide, r = widen(xp, x, residual)
    residual_out = xp.astype(wide + r, residual.dtype)
    y = normalise(xp, *widen(xp, residual_out, weight, bias), eps=eps, weight_offset=weight_offset)
    return *quantise(xp, y, block, x, power_of_two), residual_out


add_rmsnorm_fp8 = declare(
    "add_rmsnorm_fp8",
    "AddRMSNormFP8",
    reference,
    like=add_rmsnorm,
    cases=CASES,
    doc=f"""Residual add and RMSNorm to float8_e4m3fn with a scale per row or block of 128 columns. Inference only.

    ``residual_out = x + residual``; ``y = rmsnorm(residual_out, weight, bias, eps, weight_offset)``;
    ``out = y / scale`` with ``scale = max(|y|) / 448``

    Args:
        {docs.X}
        {docs.RESIDUAL}
        {docs.RMS}
        {BLOCK}

    Returns:
        ``(out, scale, residual_out)``; of these, {RETURNS}
        ``residual_out`` is ``R[*m n]``: the sum is rounded to R before it is normalised. ``y`` is float32 and not
        rounded between; deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an attribute out of its range, a narrower residual, a last dim that is not
            contiguous, another block.
        NotImplementedError: a gradient is asked for, or the GPU is older than SM 8.9.

    Source: the pre-norm residual stream of Llama-style decoders (Touvron et al., LLaMA, 2023); blocks as in
        DeepSeek-V3, 2024.
    """,
)
