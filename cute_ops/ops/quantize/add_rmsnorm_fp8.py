"""Residual add + RMSNorm, quantised to float8_e4m3fn: declaration, reference maths, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.array_api import widen
from cute_ops.config import Tuning
from cute_ops.op import Case, Kernel, OneOf, Op, Tensor
from cute_ops.ops.norm.add_rmsnorm import check_residual
from cute_ops.ops.norm.rmsnorm import reference as rmsnorm
from cute_ops.ops.quantize.config import SPACE, config
from cute_ops.ops.quantize.quantize_fp8 import BLOCKS, LEAST_SM, RETURNS, blocks, quantise
from cute_ops.shapes import FLOATS

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
    *, eps: float, weight_offset: float, block: int,
) -> tuple[Any, Any, Any]:  # fmt: skip
    wide, r = widen(xp, x, residual)
    residual_out = xp.astype(wide + r, residual.dtype)
    y = rmsnorm(xp, *widen(xp, residual_out, weight, bias), eps=eps, weight_offset=weight_offset)
    return *quantise(xp, y, block, x), residual_out


add_rmsnorm_fp8 = Op(
    "add_rmsnorm_fp8",
    inputs={
        "x": Tensor("*m n", "T"),
        "residual": Tensor("*m n", "R"),
        "weight": Tensor("n", "W", optional=True),
        "bias": Tensor("n", "B", optional=True),
    },
    outputs={
        "out": Tensor("*m n", "float8_e4m3fn"),
        "scale": Tensor("*m blocks", "float32"),
        "residual_out": Tensor("*m n", "R"),
    },
    dtypes={"T": FLOATS, "R": FLOATS, "W": FLOATS, "B": FLOATS},
    attrs={"eps": 1e-6, "weight_offset": 0.0, "block": OneOf(*BLOCKS)},
    derived={"blocks": blocks},
    check=check_residual,
    reference=reference,
    kernel=Kernel("cute_ops.kernels.quantize.quantize_fp8:AddRMSNormFP8", least_sm=LEAST_SM),
    tuning=Tuning(config, space=SPACE),
    inference_only="add_rmsnorm has one",
    cases=CASES,
    doc=f"""Residual add and RMSNorm to float8_e4m3fn with a scale per row or block of 128 columns. Inference only.

    ``residual_out = x + residual``; ``y = rmsnorm(residual_out, weight, bias, eps, weight_offset)``;
    ``out = y / scale`` with ``scale = max(|y|) / 448``

    Args:
        x: ``T[*m n]``; float32, float16 or bfloat16; any leading shape, any row stride.
        residual: ``R[*m n]``, T or a wider float (a float32 residual stream).
        weight: ``W[n]``, a float dtype of its own; ones where None (and then no offset).
        bias: ``B[n]``, a float dtype of its own; zeros where None.
        eps: added to the mean square; a compile-time constant.
        weight_offset: added to the weight: 1.0 is Gemma's; a compile-time constant.
        block: 0 for one scale per row, 128 for one per block of 128 columns; a compile-time constant.

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
