"""Residual add + RMSNorm in one pass: declaration, reference maths, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.array_api import widen
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS, ITEMSIZE
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops import docs
from cute_ops.ops.norm import rmsnorm as norm
from cute_ops.ops.norm.config import BACKWARD, FORWARD, backward, forward, workspace
from cute_ops.ops.norm.declare import COLUMNS, DCOLUMNS, ROWS

CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("odd-small", {"m": (3, 5), "n": 7}, {"W": "float32", "B": "float16"}),
    Case("odd", {"m": (37,), "n": 4097}),
    Case("odd-wide-residual", {"m": (37,), "n": 1001}, {"R": "float32"}),
    Case("gemma2-2b", {"m": (2, 17), "n": 2304}, absent=("bias",), attrs={"weight_offset": 1.0}),
    Case("llama3-8b", {"m": (2, 67), "n": 4096}, absent=("bias",), attrs={"eps": 1e-5}),
    Case("wide-residual", {"m": (33,), "n": 4096}, {"R": "float32", "W": "float32"}, absent=("bias",)),
    Case("no-weight", {"m": (65,), "n": 1024}, absent=("weight", "bias")),
    Case("llama3-405b", {"m": (19,), "n": 16384}, absent=("bias",), attrs={"eps": 1e-5}),
    Case("longest", {"m": (3,), "n": 262144}, absent=("bias",)),
)


def reference(
    xp: Any, x: Any, residual: Any, weight: Any = None, bias: Any = None, *, eps: float, weight_offset: float
) -> tuple[Any, Any]:
    wide, r = widen(xp, x, residual)
    residual_out = xp.astype(wide + r, residual.dtype)
    out = norm.reference(xp, *widen(xp, residual_out, weight, bias), eps=eps, weight_offset=weight_offset)
    return xp.astype(out, x.dtype), residual_out


def reference_bwd(
    xp: Any, residual_out: Any, dout: Any, dresidual_out: Any = None, weight: Any = None, bias: Any = None,
    *, eps: float, weight_offset: float,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    h, w, dy, dh = widen(xp, residual_out, weight, dout, dresidual_out)
    dsum, normed = norm.backward_terms(xp, h, w, dy, eps, weight_offset)
    if dh is not None:
        dsum = dsum + dh
    dresidual = xp.astype(dsum, residual_out.dtype)
    dx = None if dout.dtype == residual_out.dtype else xp.astype(dsum, dout.dtype)
    return dx, dresidual, norm.sum_rows(xp, dy * normed, weight), norm.sum_rows(xp, dy, bias)


def check_residual(binding: Binding) -> str | None:
    """Of the residual's dtype, and of the norm's attributes."""
    return norm.CHECK(binding) or residual_problem(binding)


def residual_problem(binding: Binding) -> str | None:
    """What is wrong with the residual's dtype."""
    x, residual = binding.dtypes["T"], binding.dtypes["R"]
    if residual == x or ITEMSIZE[residual] > ITEMSIZE[x]:
        return None
    return f"argument `residual` has dtype {residual}, expected {x} (that of `x`) or a wider one."


RESIDUAL = Tensor("*m n", "R")
COMMON: dict[str, Any] = {
    "dtypes": dict.fromkeys("TRWB", FLOATS), "attrs": {"eps": 1e-6, "weight_offset": 0.0}, "cases": CASES,
}  # fmt: skip

add_rmsnorm_bwd = Op(
    "add_rmsnorm_bwd",
    inputs={"residual_out": RESIDUAL, "dout": ROWS, "dresidual_out": RESIDUAL._replace(optional=True), **COLUMNS},
    outputs={"dx": ROWS._replace(same_as="dresidual"), "dresidual": RESIDUAL, **DCOLUMNS},
    **COMMON,
    check=norm.CHECK,
    reference=reference_bwd,
    kernel="cute_ops.kernels.norm.rmsnorm:RMSNormBackward",
    tuning=Tuning(backward, space=BACKWARD, workspace=workspace),
    doc="""Gradients of :func:`add_rmsnorm`.

    ``dresidual = rmsnorm_bwd(residual_out, dout) + dresidual_out`` and ``dx`` is the same sum in x's dtype
    (absent where the dtypes are equal: one array serves for both). ``dweight`` and ``dbias`` as for
    :func:`rmsnorm`; sums in float32, in a fixed order.
    """,
)

add_rmsnorm = Op(
    "add_rmsnorm",
    inputs={"x": ROWS, "residual": RESIDUAL, **COLUMNS},
    outputs={"out": ROWS, "residual_out": RESIDUAL},
    **COMMON,
    check=check_residual,
    reference=reference,
    kernel="cute_ops.kernels.norm.rmsnorm:RMSNorm",
    tuning=Tuning(forward, space=FORWARD),
    grad=add_rmsnorm_bwd,
    doc=f"""Residual add and RMSNorm in one pass.

    ``residual_out = x + residual``; ``out = rmsnorm(residual_out, weight, bias, eps, weight_offset)``

    Args:
        {docs.X}
        {docs.RESIDUAL}
        {docs.RMS}

    Returns:
        ``(out, residual_out)``: ``T[*m n]`` and ``R[*m n]``. The sum is rounded to R before it is
        normalised, as the next layer sees it; the rest is float32; deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an attribute out of its range, a narrower residual, a last dim that is not
            contiguous.

    Source: the pre-norm residual stream of Llama-style decoders (Touvron et al., LLaMA, 2023).
    """,
)
