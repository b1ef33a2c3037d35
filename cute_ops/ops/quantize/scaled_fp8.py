"""Quantisation to float8 with a scale that the caller gives: declaration, reference maths, cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cute_ops.declaration.array_api import cast, divide, widen
from cute_ops.declaration.attributes import OneOf
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Problem, Tuning, vary
from cute_ops.declaration.kernel import Kernel
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.kernels.rowwise.config import MapConfig
from cute_ops.ops import docs
from cute_ops.ops.quantize.quantize_fp8 import LEAST_SM
from cute_ops.ops.rows import CTA_VECTORS, row_of, threads_for

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
CASES = (
    Case("odd-small", {"m": (3, 5), "n": 7}),
    Case("llama3-8b", {"m": (2, 67), "n": 4096}),
    Case("gradients", {"m": (33,), "n": 1000}, attrs={"out_dtype": "float8_e5m2"}),
    Case("odd", {"m": (37,), "n": 4097}, attrs={"out_dtype": "float8_e5m2"}),
)


def reference(xp: Any, x: Any, scale: Any, *, out_dtype: str) -> Any:
    wide, by = widen(xp, x, scale)
    most = LARGEST[out_dtype]
    return cast(xp, xp.clip(divide(xp, wide, by), -most, most), out_dtype, x)


def _config(problem: Problem) -> MapConfig:
    """Compact rows are one. Of others a thread takes one vector; a row is cut into as few CTAs as hold it."""
    if problem.n is None:
        return MapConfig("elements", 256)
    row = row_of(problem, ("x",))
    segments = -(-row.touched // CTA_VECTORS)
    share = threads_for(-(-row.touched // segments), 1)
    return MapConfig("flat", max(128, share), share, align_vectors=row.align_vectors, segments=segments)


def _arrange(xp: Any, arrays: Mapping[str, Any]) -> None:
    arrays["scale"].fill(0.03125)


scaled_fp8 = Op(
    "scaled_fp8",
    inputs={"x": Tensor("*m n", "T"), "scale": Tensor("", "float32")},
    outputs={"out": Tensor("*m n", "out_dtype")},
    dtypes={"T": FLOATS},
    attrs={"out_dtype": OneOf(*LARGEST)},
    sharding=Sharding(parallel=("n",)),
    reference=reference,
    kernel=Kernel("cute_ops.kernels.quantize.scaled_fp8:ScaledFP8", least_sm=LEAST_SM),
    tuning=Tuning(_config, space=vary(threads=(64, 128, 256, 512))),
    inference_only="quantise where none is needed (torch.no_grad, jax.lax.stop_gradient)",
    arrange=_arrange,
    cases=CASES,
    doc=f"""Rows to float8 with a given scale for the whole tensor: a static or a delayed one. Inference only.

    ``out = x / scale``, at most the largest number of the dtype

    Args:
        {docs.X}
        scale: float32 scalar, on the device; positive.
        out_dtype: "float8_e4m3fn", or "float8_e5m2", which gradients are stored in.

    Returns:
        ``out_dtype[*m n]``, compact, to nearest even. NaN stays NaN and infinities become the largest number with
        their sign. Deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: a last dim that is not contiguous, another output dtype.
        NotImplementedError: a gradient is asked for, or the GPU is older than SM 8.9.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """,
)
