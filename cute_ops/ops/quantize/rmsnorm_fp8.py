"""RMSNorm, quantised to float8_e4m3fn: declaration, reference maths, cases."""

from __future__ import annotations

from cute_ops.declaration.case import Case
from cute_ops.ops import docs
from cute_ops.ops.norm.rmsnorm import rmsnorm
from cute_ops.ops.quantize.quantize_fp8 import BLOCK, RETURNS, declare

CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("one-row", {"m": (), "n": 4096}, {"W": "float32"}, attrs={"block": 128}),
    Case("odd-small", {"m": (3, 5), "n": 7}, {"W": "float32", "B": "float16"}),
    Case("odd", {"m": (37,), "n": 4097}),
    Case("odd-blocks", {"m": (37,), "n": 1001}, attrs={"block": 128}),
    Case("gemma2-2b", {"m": (2, 17), "n": 2304}, absent=("bias",), attrs={"weight_offset": 1.0}),
    Case("llama3-8b", {"m": (2, 67), "n": 4096}, absent=("bias",), attrs={"eps": 1e-5}),
    Case("deepseek-v3", {"m": (2, 33), "n": 7168}, {"W": "float32"}, absent=("bias",), attrs={"block": 128}),
    Case("llama3-405b", {"m": (19,), "n": 16384}, absent=("bias",), attrs={"eps": 1e-5}),
    Case("no-weight", {"m": (65,), "n": 1000}, absent=("weight", "bias"), attrs={"block": 128}),
    Case("longest", {"m": (3,), "n": 262144}, absent=("bias",)),
)


rmsnorm_fp8 = declare(
    "rmsnorm_fp8",
    "RMSNormFP8",
    like=rmsnorm,
    cases=CASES,
    doc=f"""RMSNorm to float8_e4m3fn with a scale per row or block of 128 columns. Inference only.

    ``y = rmsnorm(x, weight, bias, eps, weight_offset)``; ``out = y / scale`` with ``scale = max(|y|) / 448``

    Args:
        {docs.X}
        {docs.RMS}
        {BLOCK}

    Returns:
        {RETURNS}
        ``y`` is float32 and not rounded between; deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an attribute out of its range, a last dim that is not contiguous, another
            block.
        NotImplementedError: a gradient is asked for, or the GPU is older than SM 8.9.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019; blocks as in DeepSeek-V3, 2024.
    """,
)
