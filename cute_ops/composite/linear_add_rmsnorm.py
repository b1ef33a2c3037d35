"""A linear layer, the residual stream that its output is added to, and the next layer's RMSNorm.

With our kernel, the product's epilogue adds the residual and computes each row's rstd, and one pass scales the rows.
Otherwise :func:`add_rmsnorm` reads the framework's product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import FUSED, ProductPlan, Program
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Accumulation, Tensor
from cute_ops.ops.checks import NOT_NEGATIVE, within
from cute_ops.ops.expression.fused import fused
from cute_ops.ops.gemm.fused import fused_linear
from cute_ops.ops.gemm.linear import exact, linear, linear_acc, product_gradients
from cute_ops.ops.norm.add_rmsnorm import add_rmsnorm, add_rmsnorm_bwd

DOC = """``residual_out = x @ weight.T + residual``; ``out = rmsnorm(residual_out, norm_weight, eps)``

Args:
    x: ``T[*m k]``; bfloat16, float16 or float32; any leading shape.
    weight: ``T[n k]``; ``T[k n]`` with ``transposed``.
    residual: ``T[*m n]``.
    norm_weight: ``W[n]``, a float dtype of its own.
    fused: ``"always"`` adds the residual and the squares in the product's epilogue, for bfloat16 and float16, and so
        does ``"auto"`` on Hopper from 2^21 elements of the output on: on an H200 that was faster by 1% at k = 14336, 4%
        at 8192 and 10% at 2048. ``"never"``, and ``"auto"`` elsewhere, run a product, as in :func:`linear`, and
        :func:`add_rmsnorm`.
    transposed: the weight is ``[k, n]``, as in JAX.

Returns:
    ``(out, residual_out)``, both ``T[*m n]``. Sums are in float32, in a fixed order.

Raises:
    TypeError: a dtype that is not listed.
    ValueError: shapes that do not fit together.
"""
Arrays = Mapping[str, Any]
Call = Callable[..., Arrays]
CASES = (
    Case("odd-rows-and-columns", {"m": (3, 67), "n": 333, "k": 200}),
    Case("llama3-1b-out", {"m": (4, 4096), "n": 2048, "k": 2048}, attrs={"eps": 1e-5}),
    Case("llama3-8b-down", {"m": (2, 4096), "n": 4096, "k": 14336}, attrs={"eps": 1e-5}),
)
# Fewer elements of the output are written and read in less time than the kernel that adds up the rows' squares takes,
# which is one more for the host, too.
FEW_ELEMENTS = 2**21
ROWS, NORM = Tensor("*m n", "T"), Tensor("n", "W")
SUMMED = ROWS._replace(accumulates=Accumulation(("k",)))


def _add_rstd(xp: Any, acc: Any, residual: Any, *, eps: float) -> tuple[Any, Any]:
    """The sum of a linear layer and a residual, and the factor by which RMSNorm multiplies each row of it."""
    out = acc + residual
    return out, xp.rsqrt(xp.mean(out * out, axis=-1, keepdims=True) + eps)


def _scaled(xp: Any, x: Any, rstd: Any, weight: Any) -> Any:
    """Rows times a number each, and columns times a number each."""
    return x * rstd * weight


def _few(shape: tuple[Any, ...]) -> bool:
    """Whether there are few elements; symbolic sizes count as many."""
    return all(isinstance(size, int) for size in shape) and math.prod(shape) < FEW_ELEMENTS


def linear_add_rstd(transposed: bool = False) -> Op:
    """The op of the product with the residual and the norm's factor in its epilogue."""
    return _with_rstd(transposed)


@cache
def _with_rstd(transposed: bool) -> Op:
    return fused_linear(
        _add_rstd, name=f"linear{'_kn' if transposed else ''}_add_rstd", operands={"residual": "*m n"}, cases=CASES,
        weight="k n" if transposed else "n k", attrs={"eps": 1e-6},
        outputs={"residual_out": "*m n", "rstd": "*m 1"},
    )  # fmt: skip


@cache
def scaled_rows() -> Op:
    """The op that completes the norm after that."""
    return fused(_scaled, name="scaled_rows", operands={"x": "*m n", "rstd": "*m 1", "weight": "n"})


COMMON: dict[str, Any] = {
    "dtypes": {"T": FLOATS, "W": FLOATS}, "attrs": {"eps": 1e-6, "fused": FUSED}, "static": (), "cases": CASES,
    "check": within(eps=NOT_NEGATIVE),
}  # fmt: skip


def _bwd(name: str = "linear_add_rmsnorm_bwd", wanted: tuple[str, ...] = ("dresidual", "dnorm_weight")) -> Op:
    """The op of the gradients to the residual, which is the product's, and to the norm's weight if that is wanted."""
    step = add_rmsnorm_bwd if "dnorm_weight" in wanted else add_rmsnorm_bwd.only()
    outputs = {"dresidual": ROWS, "dnorm_weight": NORM._replace(skippable=True)}

    def run(xp: Any, call: Call, inputs: Arrays, attrs: Mapping[str, Any]) -> Arrays:
        given = {key: inputs[key] for key in ("residual_out", "dout", "dresidual_out")}
        found = call(step, {**given, "weight": inputs["norm_weight"]}, {"eps": attrs["eps"]})
        return {key: found["dweight" if key == "dnorm_weight" else key] for key in wanted}

    def reference(
        xp: Any, residual_out: Any, dout: Any, norm_weight: Any, dresidual_out: Any = None, *, eps: float, fused: str
    ) -> tuple[Any, ...]:
        options = {"eps": eps, "weight_offset": 0.0}
        every = add_rmsnorm_bwd.reference(xp, residual_out, dout, dresidual_out, norm_weight, **options)
        return tuple(every[1 : 1 + len(wanted)])

    return Op(
        name,
        inputs={
            "residual_out": ROWS, "dout": ROWS, "norm_weight": NORM, "dresidual_out": ROWS._replace(optional=True),
        },
        outputs={key: outputs[key] for key in wanted},
        reference=reference,
        kernel=Program(run, (step,)),
        narrow=_bwd,
        doc="Gradients of :func:`linear_add_rmsnorm` to the residual, the product's too, and to the norm's weight.",
        **COMMON,
    )  # fmt: skip


linear_add_rmsnorm_bwd = _bwd()


def linear_add_rmsnorm(transposed: bool = False) -> Op:
    """The op: see :data:`DOC`. It is made on first use, because that takes longer than most imports."""
    return _op(transposed)


@cache
def _op(transposed: bool) -> Op:
    behind = linear_add_rstd(transposed)
    # Both call the dim that is summed over k, as this op does: devices that share it add up what they get.
    multiplies, made = (linear_acc("T", across=True), "acc") if transposed else (linear, "out")

    def run(xp: Any, call: Call, inputs: Arrays, attrs: Mapping[str, Any]) -> Arrays:
        given, eps = {key: inputs[key] for key in ("x", "weight")}, {"eps": attrs["eps"]}
        summed = {**given, "residual": inputs["residual"]}
        automatic = attrs["fused"] == "auto" and not _few(inputs["residual"].shape)
        if attrs["fused"] == "always" or (automatic and xp.kernel_is_faster(behind, summed, eps)):
            found = call(behind, summed, {**eps, "fused": attrs["fused"]})
            scaled = {"x": found["residual_out"], "rstd": found["rstd"], "weight": inputs["norm_weight"]}
            return {"out": call(scaled_rows(), scaled, {})["out"], "residual_out": found["residual_out"]}
        acc = call(multiplies, given, {"fused": attrs["fused"]})[made]
        summands = {"x": acc, "residual": inputs["residual"], "weight": inputs["norm_weight"]}
        found = call(add_rmsnorm, summands, eps)
        return {"out": found["out"], "residual_out": found["residual_out"]}

    def reference(
        xp: Any, x: Any, weight: Any, residual: Any, norm_weight: Any, *, eps: float, fused: str
    ) -> tuple[Any, Any]:
        acc = exact(xp, ProductPlan(None if transposed else 1), x, weight)
        residual, options = xp.astype(residual, acc.dtype), {"eps": eps, "weight_offset": 0.0}
        out, residual_out = add_rmsnorm.reference(xp, acc, residual, norm_weight, **options)
        return xp.astype(out, x.dtype), xp.astype(residual_out, x.dtype)

    weight = Tensor("k n" if transposed else "n k", "T")
    return Op(
        f"linear{'_kn' if transposed else ''}_add_rmsnorm",
        inputs={"x": Tensor("*m k", "T"), "weight": weight, "residual": ROWS, "norm_weight": NORM},
        outputs={"out": SUMMED, "residual_out": SUMMED},
        reference=reference,
        kernel=Program(run, (behind, scaled_rows(), multiplies, add_rmsnorm)),
        sharding=Sharding(inner=("k",)),
        grad=(linear_add_rmsnorm_bwd, *product_gradients("dresidual", across=transposed)),
        doc=f"A linear layer, residual add and RMSNorm.\n\n{DOC}",
        called="linear_add_rmsnorm",
        **COMMON,
    )
