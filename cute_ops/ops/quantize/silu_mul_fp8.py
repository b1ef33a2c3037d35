"""SiLU-gated product, quantised to float8_e4m3fn: declaration, reference maths, cases."""

from __future__ import annotations

from cute_ops.declaration.case import Case
from cute_ops.ops import docs
from cute_ops.ops.activation.silu_mul import silu_mul
from cute_ops.ops.quantize.quantize_fp8 import BLOCK, RETURNS, declare

CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("odd-small", {"m": (3, 5), "n": 7}, attrs={"block": 128}),
    Case("odd", {"m": (37,), "n": 4097}),
    Case("odd-blocks", {"m": (37,), "n": 1001}, attrs={"block": 128}),
    Case("deepseek-v3-expert", {"m": (2, 33), "n": 2048}, attrs={"block": 128}),
    Case("llama3-8b", {"m": (2, 33), "n": 14336}),
    Case("llama3-405b", {"m": (5,), "n": 53248}),
    Case("longest-blocks", {"m": (3,), "n": 262144}, attrs={"block": 128}),
)


silu_mul_fp8 = declare(
    "silu_mul_fp8",
    "SiluMulFP8",
    like=silu_mul,
    cases=CASES,
    doc=f"""SiLU of the gate times up, to float8_e4m3fn with a scale per row or block of 128 columns. Inference only.

    ``y = gate * sigmoid(gate) * up``; ``out = y / scale`` with ``scale = max(|y|) / 448``

    Args:
        gate: {docs.ROWS}.
        up: ``T[*m n]``.
        {BLOCK}

    Returns:
        {RETURNS}
        ``y`` is float32 and not rounded between; deterministic.

    Raises:
        TypeError: a dtype that is not listed, or two different ones.
        ValueError: shapes that do not fit, a last dim that is not contiguous, another block.
        NotImplementedError: a gradient is asked for, or the GPU is older than SM 8.9.

    Source: Shazeer, GLU Variants Improve Transformer, 2020; blocks as in DeepSeek-V3, 2024.
    """,
)
