"""RMSNorm, quantised to float8_e4m3fn: declaration, reference maths, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.array_api import widen
from cute_ops.config import Tuning
from cute_ops.op import Case, Kernel, OneOf, Op, Tensor
from cute_ops.ops.norm.rmsnorm import CHECK
from cute_ops.ops.norm.rmsnorm import reference as rmsnorm
from cute_ops.ops.quantize.config import SPACE, config
from cute_ops.ops.quantize.quantize_fp8 import BLOCKS, LEAST_SM, RETURNS, blocks, quantise
from cute_ops.shapes import FLOATS

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


def reference(
    xp: Any, x: Any, weight: Any = None, bias: Any = None, *, eps: float, weight_offset: float, block: int
) -> tuple[Any, Any]:
    y = rmsnorm(xp, *widen(xp, x, weight, bias), eps=eps, weight_offset=weight_offset)
    return quantise(xp, y, block, x)


rmsnorm_fp8 = Op(
    "rmsnorm_fp8",
    inputs={
        "x": Tensor("*m n", "T"),
        "weight": Tensor("n", "W", optional=True),
        "bias": Tensor("n", "B", optional=True),
    },
    outputs={"out": Tensor("*m n", "float8_e4m3fn"), "scale": Tensor("*m blocks", "float32")},
    dtypes={"T": FLOATS, "W": FLOATS, "B": FLOATS},
    attrs={"eps": 1e-6, "weight_offset": 0.0, "block": OneOf(*BLOCKS)},
    derived={"blocks": blocks},
    check=CHECK,
    reference=reference,
    kernel=Kernel("cute_ops.kernels.quantize.quantize_fp8:RMSNormFP8", least_sm=LEAST_SM),
    tuning=Tuning(config, space=SPACE),
    inference_only="rmsnorm has one",
    cases=CASES,
    doc=f"""RMSNorm to float8_e4m3fn with a scale per row or block of 128 columns. Inference only.

    ``y = rmsnorm(x, weight, bias, eps, weight_offset)``; ``out = y / scale`` with ``scale = max(|y|) / 448``

    Args:
        x: ``T[*m n]``; float32, float16 or bfloat16; any leading shape, any row stride.
        weight: ``W[n]``, a float dtype of its own; ones where None (and then no offset).
        bias: ``B[n]``, a float dtype of its own; zeros where None.
        eps: added to the mean square; a compile-time constant.
        weight_offset: added to the weight: 1.0 is Gemma's; a compile-time constant.
        block: 0 for one scale per row, 128 for one per block of 128 columns; a compile-time constant.

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
