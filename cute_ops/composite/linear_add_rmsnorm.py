"""A linear layer, the residual stream that its output is added to, and the next layer's RMSNorm.

By our kernel, the product's epilogue adds the residual and reduces each row to its rstd; a pass that scales is left.
Else the framework's product is followed by :func:`add_rmsnorm`, which reads that product again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from cute_ops.op import FUSED, Accumulation, Case, Op, Program, Sharding, Tensor
from cute_ops.ops.fused import fused
from cute_ops.ops.gemm.fused import fused_linear
from cute_ops.ops.gemm.linear import linear, product, product_gradients
from cute_ops.ops.norm import add_rmsnorm as norm
from cute_ops.ops.norm.add_rmsnorm import add_rmsnorm, add_rmsnorm_bwd
from cute_ops.shapes import FLOATS

DOC = """``residual_out = x @ weight.T + residual``; ``out = rmsnorm(residual_out, norm_weight, eps)``

Args:
    x: ``T[*m k]``; bfloat16, float16 or float32; any leading shape.
    weight: ``T[n k]``.
    residual: ``T[*m n]``.
    norm_weight: ``W[n]``, a float dtype of its own.
    fused: ``"always"`` adds the residual and the squares in the product's epilogue, for bfloat16 and float16, and so
        does ``"auto"`` on Hopper with more than 64 rows: on an H200 that was faster by 1% at k = 14336, 4% at 8192 and
        10% at 2048. ``"never"``, and ``"auto"`` elsewhere, run a product, as :func:`linear` has it, and
        :func:`add_rmsnorm`.

Returns:
    ``(out, residual_out)``, both ``T[*m n]``. Sums in float32, in a fixed order.

Raises:
    TypeError: a dtype that is not listed.
    ValueError: shapes that do not fit together.
"""
Call = Callable[..., Any]
Arrays = Mapping[str, Any]
CASES = (
    Case("odd-rows-and-columns", {"m": (3, 67), "n": 333, "k": 200}),
    Case("llama3-1b-out", {"m": (4, 4096), "n": 2048, "k": 2048}, attrs={"eps": 1e-5}),
    Case("llama3-8b-down", {"m": (2, 4096), "n": 4096, "k": 14336}, attrs={"eps": 1e-5}),
)
ROWS, NORM = Tensor("*m n", "T"), Tensor("n", "W")
SUMMED = ROWS._replace(accumulates=Accumulation(("k",)))


def _add_rstd(xp: Any, acc: Any, residual: Any, *, eps: float) -> tuple[Any, Any]:
    """A linear layer and a residual, and what RMSNorm of the sum multiplies each row by."""
    out = acc + residual
    return out, xp.rsqrt(xp.mean(out * out, axis=-1, keepdims=True) + eps)


def _scaled(xp: Any, x: Any, rstd: Any, weight: Any) -> Any:
    """Rows times a number each, and columns times another one."""
    return x * rstd * weight


@cache
def linear_add_rstd() -> Op:
    """The product, the residual and the norm's factor."""
    return fused_linear(
        _add_rstd, name="linear_add_rstd", operands={"residual": "*m n"}, attrs={"eps": 1e-6}, cases=CASES,
        outputs={"residual_out": "*m n", "rstd": "*m 1"},
    )  # fmt: skip


@cache
def scaled_rows() -> Op:
    """What is left of the norm then."""
    return fused(_scaled, name="scaled_rows", operands={"x": "*m n", "rstd": "*m 1", "weight": "n"})


def _forward(xp: Any, call: Call, inputs: Arrays, attrs: Mapping[str, Any]) -> Arrays:
    given, eps = {key: inputs[key] for key in ("x", "weight")}, {"eps": attrs["eps"]}
    summed = {**given, "residual": inputs["residual"]}
    if attrs["fused"] == "always" or (attrs["fused"] == "auto" and xp.leads(linear_add_rstd(), summed, eps)):
        found = call(linear_add_rstd(), summed, {**eps, "fused": "always"})
        rows = {"x": found["residual_out"], "rstd": found["rstd"], "weight": inputs["norm_weight"]}
        return {"out": call(scaled_rows(), rows, {})["out"], "residual_out": found["residual_out"]}
    acc = call(linear, given, {"fused": attrs["fused"]})["out"]
    rows = {"x": acc, "residual": inputs["residual"], "weight": inputs["norm_weight"]}
    found = call(add_rmsnorm, rows, eps)
    return {"out": found["out"], "residual_out": found["residual_out"]}


def _backward(xp: Any, call: Call, inputs: Arrays, attrs: Mapping[str, Any]) -> Arrays:
    given = {key: inputs[key] for key in ("residual_out", "dout", "dresidual_out")}
    found = call(add_rmsnorm_bwd, {**given, "weight": inputs["norm_weight"]}, {"eps": attrs["eps"]})
    return {"dresidual": found["dresidual"], "dnorm_weight": found["dweight"]}


def reference(
    xp: Any, x: Any, weight: Any, residual: Any, norm_weight: Any, *, eps: float, fused: str
) -> tuple[Any, Any]:
    acc = product(xp, x, weight)
    out, residual_out = norm.reference(xp, acc, xp.astype(residual, acc.dtype), norm_weight, eps=eps, weight_offset=0.0)
    return xp.astype(out, x.dtype), xp.astype(residual_out, x.dtype)


def reference_bwd(
    xp: Any, residual_out: Any, dout: Any, norm_weight: Any, dresidual_out: Any = None, *, eps: float, fused: str
) -> tuple[Any, Any]:
    options = {"eps": eps, "weight_offset": 0.0}
    return norm.reference_bwd(xp, residual_out, dout, dresidual_out, norm_weight, **options)[1:3]


COMMON: dict[str, Any] = {
    "dtypes": {"T": FLOATS, "W": FLOATS}, "attrs": {"eps": 1e-6, "fused": FUSED}, "static": (), "cases": CASES,
}  # fmt: skip
linear_add_rmsnorm_bwd = Op(
    "linear_add_rmsnorm_bwd",
    inputs={
        "residual_out": ROWS, "dout": ROWS, "norm_weight": NORM, "dresidual_out": ROWS._replace(optional=True),
    },
    outputs={"dresidual": ROWS, "dnorm_weight": NORM},
    reference=reference_bwd,
    kernel=Program(_backward, (add_rmsnorm_bwd,)),
    doc="Gradients of :func:`linear_add_rmsnorm` to the residual, which is that of the product too, and to the norm.",
    **COMMON,
)  # fmt: skip


@cache
def linear_add_rmsnorm() -> Op:
    """The op: see :data:`DOC`. It is made when it is asked for, since that takes longer than most imports."""
    return Op(
        "linear_add_rmsnorm",
        inputs={"x": Tensor("*m k", "T"), "weight": Tensor("n k", "T"), "residual": ROWS, "norm_weight": NORM},
        outputs={"out": SUMMED, "residual_out": SUMMED},
        reference=reference,
        kernel=Program(_forward, (linear_add_rstd(), scaled_rows(), linear, add_rmsnorm)),
        sharding=Sharding(inner=("k",)),
        grad=(linear_add_rmsnorm_bwd, *product_gradients("dresidual", across=False)),
        doc=f"A linear layer, residual add and RMSNorm.\n\n{DOC}",
        **COMMON,
    )
