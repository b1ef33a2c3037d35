"""Quantisation to float8_e4m3fn: declaration, reference maths, cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cute_ops.declaration.array_api import cast, divide, widen
from cute_ops.declaration.attributes import OneOf
from cute_ops.declaration.binding import as_outputs
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.kernel import Kernel
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops import docs
from cute_ops.ops.quantize.config import SPACE, config

BLOCKS = (0, 128)
LARGEST, LEAST_SCALE = 448.0, 2.0**-126
LEAST_SM = 89  # the first with a conversion

CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("one-row", {"m": (), "n": 4096}),
    Case("odd-small", {"m": (3, 5), "n": 7}, attrs={"block": 128}),
    Case("odd", {"m": (37,), "n": 4097}),
    Case("odd-blocks", {"m": (37,), "n": 1001}, attrs={"block": 128}),
    Case("deepseek-v3", {"m": (2, 33), "n": 7168}, attrs={"block": 128}),
    Case("llama3-8b", {"m": (2, 67), "n": 4096}),
    Case("last-block-short", {"m": (65,), "n": 1000}, attrs={"block": 128}),
    Case("ue8m0", {"m": (17,), "n": 512}, attrs={"block": 128, "power_of_two": True}),
    Case("longest", {"m": (3,), "n": 262144}),
    Case("longest-blocks", {"m": (3,), "n": 262144}, attrs={"block": 128}),
)


def blocks(dims: Mapping[str, Any], attrs: Mapping[str, Any]) -> Any:
    """Scales of a row."""
    return -(-dims["n"] // attrs["block"]) if attrs["block"] else 1


def _power_of_two(xp: Any, largest: Any) -> Any:
    """The least power of two by which no number exceeds the largest of fp8: logarithms round, products do not."""
    safe = xp.where(largest > 0, largest, 1.0)
    exponent = xp.ceil(xp.log2(safe / LARGEST))
    scale = xp.ldexp(xp.ones_like(safe), xp.astype(exponent, xp.int32))
    scale = xp.where(scale * LARGEST < safe, scale * 2, scale)
    return xp.where(scale * (LARGEST / 2) >= safe, scale / 2, scale)


def quantise(xp: Any, y: Any, block: int, like: Any, power_of_two: bool = False) -> tuple[Any, Any]:
    """Rows in the accumulation dtype to ``(out, scale)``; both stay float64 where ``like`` is."""
    lead, n = y.shape[:-1], y.shape[-1]
    width = block or n
    if n == 0:
        return cast(xp, y, "float8_e4m3fn", like), xp.sum(y, axis=-1, keepdims=True)[..., : 0 if block else 1] + 1
    short = -n % width
    filled = xp.concat([y, xp.broadcast_to(xp.zeros_like(y[..., :1]), (*lead, short))], axis=-1) if short else y
    rows = xp.reshape(filled, (*lead, (n + short) // width, width))
    largest = xp.max(xp.where(xp.isfinite(rows), xp.abs(rows), 0.0), axis=-1, keepdims=True)
    scale = _power_of_two(xp, largest) if power_of_two else divide(xp, largest, LARGEST)
    scale = xp.where(largest == 0, 1.0, xp.where(scale < LEAST_SCALE, LEAST_SCALE, scale))
    out = xp.reshape(xp.clip(divide(xp, rows, scale), -LARGEST, LARGEST), (*lead, n + short))[..., :n]
    return cast(xp, out, "float8_e4m3fn", like), scale[..., 0]


def reference(xp: Any, x: Any, *, block: int, power_of_two: bool = False) -> tuple[Any, Any]:
    (wide,) = widen(xp, x)
    return quantise(xp, wide, block, x, power_of_two)


RETURNS = """``(out, scale)``: ``float8_e4m3fn[*m n]`` and ``float32[*m blocks]``, compact, with one block per row or
        ``ceil(n / 128)``, of which the last may be shorter. ``scale = max(largest / 448, 2^-126)`` and
        ``out = y / scale``, to nearest even, where ``largest`` is the largest finite magnitude of the row or block; a
        row or block of zeros has scale 1. So ``y`` is about ``out * scale``. NaN stays NaN and infinities become 448
        with their sign; neither changes the scale, nor any other element."""

# What the docstrings of the ops that quantise what another op computes have of their block.
BLOCK = """block: 0 for one scale per row, 128 for one per block of 128 columns; a compile-time constant.
        power_of_two: round scales up to powers of two, as ue8m0 has them; a compile-time constant."""


def declare(
    name: str, kernel: str, reference: Callable[..., Any] | None = None, *, like: Op | None = None,
    inference_only: str = "", cases: tuple[Case, ...], doc: str,
) -> Op:  # fmt: skip
    """An op whose first output is quantised, with the inputs, attributes and further outputs of ``like``; by default
    with rows alone. The reference is by default that of ``like``, whose one output is not rounded between.
    """

    def of_like(xp: Any, *arrays: Any, block: int, power_of_two: bool = False, **attrs: Any) -> tuple[Any, Any]:
        assert like is not None
        (y,) = as_outputs(like, like.reference(xp, *widen(xp, *arrays), **attrs))
        return quantise(xp, y, block, arrays[0], power_of_two)

    more = {n: t for n, t in like.outputs.items() if n != "out"} if like else {}
    return Op(
        name,
        inputs=like.inputs if like else {"x": Tensor("*m n", "T")},
        outputs={"out": Tensor("*m n", "float8_e4m3fn"), "scale": Tensor("*m blocks", "float32"), **more},
        dtypes=like.dtypes if like else {"T": FLOATS},
        attrs={**(like.attrs if like else {}), "block": OneOf(*BLOCKS), "power_of_two": False},
        derived={"blocks": blocks},
        check=like.check if like else None,
        reference=reference or of_like,
        kernel=Kernel(f"cute_ops.kernels.quantize.quantize_fp8:{kernel}", least_sm=LEAST_SM),
        tuning=Tuning(config, space=SPACE),
        inference_only=inference_only or (f"{like.name} has one" if like else ""),
        cases=cases,
        doc=doc,
    )


quantize_fp8 = declare(
    "quantize_fp8",
    "QuantizeFP8",
    reference,
    inference_only="quantise where none is needed (torch.no_grad, jax.lax.stop_gradient)",
    cases=CASES,
    doc=f"""Rows to float8_e4m3fn with a float32 scale per row, or per block of 128 columns. Inference only.

    ``out = x / scale`` with ``scale = max(|x|) / 448``

    Args:
        {docs.X}
        block: 0 for one scale per row, which a rowwise ``torch._scaled_mm`` takes as it is; 128 for one per block of
            128 columns, which its 1x128 blocks want transposed in memory: ``scale.t().contiguous().t()``. A
            compile-time constant.
        power_of_two: round scales up to powers of two, as ue8m0 has them: their exponents alone are needed. A
            compile-time constant.

    Returns:
        {RETURNS}
        Deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: a last dim that is not contiguous, another block.
        NotImplementedError: a gradient is asked for, or the GPU is older than SM 8.9.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022; blocks as in DeepSeek-V3, 2024.
    """,
)
