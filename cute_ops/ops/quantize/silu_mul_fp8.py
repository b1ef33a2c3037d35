"""SiLU-gated product, quantised to float8_e4m3fn: declaration, reference maths, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.array_api import widen
from cute_ops.config import Tuning
from cute_ops.op import Case, Kernel, OneOf, Op, Tensor
from cute_ops.ops.activation.silu_mul import reference as silu_mul
from cute_ops.ops.quantize.config import SPACE, config
from cute_ops.ops.quantize.quantize_fp8 import BLOCKS, LEAST_SM, RETURNS, blocks, quantise
from cute_ops.shapes import FLOATS

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


def reference(xp: Any, gate: Any, up: Any, *, block: int) -> tuple[Any, Any]:
    return quantise(xp, silu_mul(xp, *widen(xp, gate, up)), block, gate)


silu_mul_fp8 = Op(
    "silu_mul_fp8",
    inputs={"gate": Tensor("*m n", "T"), "up": Tensor("*m n", "T")},
    outputs={"out": Tensor("*m n", "float8_e4m3fn"), "scale": Tensor("*m blocks", "float32")},
    dtypes={"T": FLOATS},
    attrs={"block": OneOf(*BLOCKS)},
    derived={"blocks": blocks},
    reference=reference,
    kernel=Kernel("cute_ops.kernels.quantize.quantize_fp8:SiluMulFP8", least_sm=LEAST_SM),
    tuning=Tuning(config, space=SPACE),
    inference_only="silu_mul has one",
    cases=CASES,
    doc=f"""SiLU of the gate times up, to float8_e4m3fn with a scale per row or block of 128 columns. Inference only.

    ``y = gate * sigmoid(gate) * up``; ``out = y / scale`` with ``scale = max(|y|) / 448``

    Args:
        gate: ``T[*m n]``; float32, float16 or bfloat16; any leading shape, any row stride.
        up: ``T[*m n]``.
        block: 0 for one scale per row, 128 for one per block of 128 columns; a compile-time constant.

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
