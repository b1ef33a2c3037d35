"""Residual add + layer norm in one pass: declaration, reference maths, cases."""

from __future__ import annotations

from functools import partial
from typing import Any

from cute_ops.declaration.array_api import widen
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.ops import docs
from cute_ops.ops.checks import NOT_NEGATIVE, within
from cute_ops.ops.norm import layernorm as norm
from cute_ops.ops.norm.add_rmsnorm import RESIDUAL, residual_problem
from cute_ops.ops.norm.config import BACKWARD, FORWARD, backward, forward, workspace
from cute_ops.ops.norm.declare import COLUMNS, DCOLUMNS, ROWS

CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("odd-small", {"m": (3, 5), "n": 7}, {"W": "float32", "B": "float16"}),
    Case("odd-wide-residual", {"m": (37,), "n": 1001}, {"R": "float32"}),
    Case("bert-large", {"m": (65,), "n": 1024}, attrs={"eps": 1e-12}),
    Case("whisper-large", {"m": (2, 75), "n": 1280}, {"W": "float32", "B": "float32"}),
    Case("gpt2-xl", {"m": (3, 33), "n": 1600}),
    Case("no-bias", {"m": (37,), "n": 4097}, absent=("bias",)),
    Case("no-weight", {"m": (300,), "n": 4096}, absent=("weight", "bias")),
)


def reference(xp: Any, x: Any, residual: Any, weight: Any = None, bias: Any = None, *, eps: float) -> tuple[Any, Any]:
    wide, r = widen(xp, x, residual)
    residual_out = xp.astype(wide + r, residual.dtype)
    out = norm.reference(xp, *widen(xp, residual_out, weight, bias), eps=eps)
    return xp.astype(out, x.dtype), residual_out


def reference_bwd(
    xp: Any, residual_out: Any, dout: Any, dresidual_out: Any = None, weight: Any = None, bias: Any = None,
    *, eps: float,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    wide, dy, dh = widen(xp, residual_out, dout, dresidual_out)
    dsum, dweight, dbias = norm.reference_bwd(xp, wide, dy, weight, bias, eps=eps)
    if dh is not None:
        dsum = dsum + dh
    dresidual = xp.astype(dsum, residual_out.dtype)
    return None if dout.dtype == residual_out.dtype else xp.astype(dsum, dout.dtype), dresidual, dweight, dbias


def _check(binding: Binding) -> str | None:
    return _EPS(binding) or residual_problem(binding)


_EPS = within(eps=NOT_NEGATIVE)
_KERNEL = "cute_ops.kernels.norm.layernorm:LayerNorm"
_COMMON: dict[str, Any] = {"dtypes": dict.fromkeys("TRWB", FLOATS), "attrs": {"eps": 1e-5}, "cases": CASES}

add_layernorm_bwd = Op(
    "add_layernorm_bwd",
    inputs={"residual_out": RESIDUAL, "dout": ROWS, "dresidual_out": RESIDUAL._replace(optional=True), **COLUMNS},
    outputs={"dx": ROWS._replace(same_as="dresidual"), "dresidual": RESIDUAL, **DCOLUMNS},
    **_COMMON,
    check=_EPS,
    reference=reference_bwd,
    kernel=f"{_KERNEL}Backward",
    tuning=Tuning(partial(backward, centred=True), space=BACKWARD, workspace=workspace),
    doc="""Gradients of :func:`add_layernorm`.

    ``dresidual = layernorm_bwd(residual_out, dout) + dresidual_out`` and ``dx`` is the same sum in x's dtype
    (absent where the dtypes are equal: one array serves for both). ``dweight`` and ``dbias`` as for
    :func:`layernorm`; sums in float32, in a fixed order.
    """,
)

add_layernorm = Op(
    "add_layernorm",
    inputs={"x": ROWS, "residual": RESIDUAL, **COLUMNS},
    outputs={"out": ROWS, "residual_out": RESIDUAL},
    **_COMMON,
    check=_check,
    reference=reference,
    kernel=_KERNEL,
    tuning=Tuning(partial(forward, centred=True), space=FORWARD),
    grad=add_layernorm_bwd,
    doc=f"""Residual add and layer norm in one pass.

    ``residual_out = x + residual``; ``out = layernorm(residual_out, weight, bias, eps)``

    Args:
        {docs.X}
        {docs.RESIDUAL}
        weight: ``W[n]``, a float dtype of its own; ones where None.
        {docs.BIAS}
        eps: added to the variance; a compile-time constant.

    Returns:
        ``(out, residual_out)``: ``T[*m n]`` and ``R[*m n]``. The sum is rounded to R before it is
        normalised, as the next layer sees it; the rest is float32; deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an attribute out of its range, a narrower residual, a last dim that is not
            contiguous.

    Source: the residual stream of BERT (Devlin et al., 2018), GPT-2 and vision transformers; Ba, Kiros and Hinton,
    Layer Normalization, 2016.
    """,
)
