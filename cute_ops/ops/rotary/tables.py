"""Cosines and sines of positions, in one pass: declaration, reference maths, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.array_api import widen
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.static import WhileFew
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.rotary import config

CASES = (
    Case("text", {"m": (2, 67), "k": 1, "r": 64}),
    Case("qwen2-vl", {"m": (131,), "k": 3, "r": 64}, {"I": "int32"}),
    Case("odd-float", {"m": (3, 5), "k": 2, "r": 7}, {"I": "float32"}),
)


def reference(xp: Any, positions: Any, frequencies: Any, section: Any) -> tuple[Any, Any]:
    at, steps = widen(xp, positions, frequencies)
    at = xp.astype(at, steps.dtype)
    # Each angle has the position of its own section; indexing by an array is no function of the array API.
    places = xp.arange(at.shape[-1], dtype=section.dtype)
    chosen = xp.astype(section[:, None] == places[None, :], steps.dtype)
    angles = xp.sum(at[..., None, :] * chosen, axis=-1) * steps
    return xp.astype(xp.cos(angles), frequencies.dtype), xp.astype(xp.sin(angles), frequencies.dtype)


def _arrange(xp: Any, arrays: dict[str, Any]) -> None:
    """Positions of short sequences: an angle in float32 loses as many digits as it has before the point."""
    arrays["positions"][...] = xp.floor(abs(arrays["positions"])) % 61


TABLE = Tensor("*m r", "float32")
rope_tables = Op(
    "rope_tables",
    inputs={
        "positions": Tensor("*m k", "I", contiguous=()),
        "frequencies": Tensor("r", "float32"),
        "section": Tensor("r", "int32", upper_bound="k"),
    },
    outputs={"cos": TABLE, "sin": TABLE},
    dtypes={"I": ("int64", "int32", *FLOATS)},
    static=WhileFew("r"),
    reference=reference,
    kernel="cute_ops.kernels.rotary.tables:RopeTables",
    tuning=Tuning(config.tables),
    inference_only="positions have no gradient",
    arrange=_arrange,
    cases=CASES,
    doc="""Cosines and sines of positions times frequencies: a step of :func:`rope_from_positions`.

    ``cos[..., j], sin[..., j]`` of the angle ``positions[..., section[j]] * frequencies[j]``

    Args:
        positions: ``I[*m k]``, int64, int32 or a float dtype, of any strides: time, height and width of a token, or
            one.
        frequencies: float32 ``[r]``.
        section: int32 ``[r]``: which of the k positions each angle has, from 0 to k - 1.

    Returns:
        ``(cos, sin)``: float32 ``[*m r]``. Angles are products in float32; no gradient.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit.
    """,
)
