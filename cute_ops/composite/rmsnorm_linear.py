"""RMSNorm and the linear layer that reads its rows.

By our kernel the norm moves behind the product: its factor is a column vector of the epilogue, and its weight is
multiplied into the layer's. Else :func:`rmsnorm` writes rows that the product reads. Nothing of this is kept for the
gradient, which normalises x again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from cute_ops.expressions.tracing import trace
from cute_ops.op import FUSED, Accumulation, Case, Op, Program, Tensor
from cute_ops.ops.fused import Formula, fused
from cute_ops.ops.gemm.by_call import op_of
from cute_ops.ops.gemm.fused import fused_linear
from cute_ops.ops.gemm.linear import linear
from cute_ops.ops.gemm.named import EPILOGUES
from cute_ops.ops.gemm.pointwise import pointwise
from cute_ops.ops.norm import rmsnorm as norm
from cute_ops.ops.norm.rmsnorm import rmsnorm
from cute_ops.shapes import FLOATS

DOC = """``out = epilogue(rmsnorm(x, norm_weight, eps=eps) @ weight.T + bias)``

Args:
    x: ``T[*m k]``; bfloat16, float16 or float32; any leading shape.
    norm_weight: ``W[k]``, a float dtype of its own, or None.
    weight: ``T[n k]``.
    bias: ``[n]``; float32, bfloat16 or float16, or None.
    eps: what is added to the mean of squares.
    epilogue: ``"bias"`` for no activation, ``"gelu"``, ``"gelu_tanh"`` or ``"silu"``.
    fused: ``"auto"`` and ``"never"`` run :func:`rmsnorm` and a product, as :func:`linear` has it. ``"always"`` moves
        the norm behind the product, for bfloat16 and float16: instead of ``4 m k`` bytes of a pass it moves ``2 m k``
        for the factors of rows and, unless ``norm_weight`` is None, ``4 n k`` for the product of both weights, which is
        rounded to T as normalised rows are otherwise. On an H200 that was slower in 19 of 24 calls, at m = 8192 to
        65536, n = 2048 to 28672 and k = 768 to 4096.

Returns:
    ``T[*m n]``. Sums in float32, in a fixed order.

Raises:
    TypeError: a dtype that is not listed.
    ValueError: shapes that do not fit together, another epilogue.
"""
Call = Callable[..., Any]
Arrays = Mapping[str, Any]
KINDS = ("bias", "gelu", "gelu_tanh", "silu")
CASES = (
    Case("odd-rows-and-columns", {"m": (3, 67), "n": 333, "k": 200}),
    Case("llama3-1b-qkv", {"m": (4, 4096), "n": 3072, "k": 2048}),
    Case("llama3-8b-qkv", {"m": (2, 4096), "n": 6144, "k": 4096}),
)
ROWS, OUT = Tensor("*m k", "T"), Tensor("*m n", "T", accumulates=Accumulation(("k",)))
NORM = Tensor("k", "W", optional=True)


def _factor(xp: Any, x: Any, *, eps: float) -> Any:
    return xp.rsqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps)


@cache
def row_factors() -> Op:
    """What RMSNorm multiplies each row by, in float32."""

    @cache
    def formula(eps: float) -> Formula:
        return Formula(trace(_factor, {"x": "*m n"}, {"eps": eps}), True, ("x",), ("rstd",), "c", "x")

    return pointwise(
        "rmsnorm_factors", lambda attrs: formula(attrs["eps"]), {"x": Tensor("*m n", "T")},
        {"rstd": Tensor("*m 1", "float32")}, {"eps": 1e-6}, {"eps": 1e-6}, module=__name__,
        doc="``rsqrt(mean(x^2) + eps)`` of each row.",
    )  # fmt: skip


def _scaled(xp: Any, weight: Any, norm_weight: Any) -> Any:
    """Both weights as one: columns times a number each."""
    return weight * norm_weight


@cache
def scaled_columns() -> Op:
    """The weight of a layer that reads rows which a norm's weight has not been multiplied with."""
    return fused(_scaled, name="scaled_columns", operands={"weight": "*m n", "norm_weight": "n"})


COMMON: dict[str, Any] = {"dtypes": {"T": FLOATS, "W": FLOATS}, "static": (), "cases": CASES}


def _reference_normed(xp: Any, x: Any, norm_weight: Any = None, *, eps: float) -> Any:
    return norm.reference(xp, x, norm_weight, eps=eps, weight_offset=0.0)


@cache
def _normed() -> Op:
    """The rows that the product reads, for the gradient of its weight."""

    def run(xp: Any, call: Call, inputs: Arrays, attrs: Mapping[str, Any]) -> Arrays:
        given = {"x": inputs["x"], "weight": inputs["norm_weight"]}
        return {"normed": call(rmsnorm, given, {"eps": attrs["eps"]})["out"]}

    return Op(
        "rmsnorm_linear_normed", inputs={"x": ROWS, "norm_weight": NORM}, outputs={"normed": ROWS},
        reference=_reference_normed, kernel=Program(run, (rmsnorm,)), attrs={"eps": 1e-6}, **COMMON,
    )  # fmt: skip


@cache
def _of_normed(step: Op) -> Op:
    """A step of the product's gradient, which calls normalised rows ``x``."""
    names = {"x": "normed", "dx": "dnormed"}

    def run(xp: Any, call: Call, inputs: Arrays, attrs: Mapping[str, Any]) -> Arrays:
        found = call(step, {key: inputs[names.get(key, key)] for key in step.inputs}, attrs)
        return {names.get(key, key): found[key] for key in step.outputs}

    if names.keys().isdisjoint({*step.inputs, *step.outputs}):
        return step
    return Op(
        f"rmsnorm_{step.name}", inputs={names.get(key, key): tensor for key, tensor in step.inputs.items()},
        outputs={names.get(key, key): tensor for key, tensor in step.outputs.items()}, kernel=Program(run, (step,)),
        reference=step.reference, attrs={"fused": FUSED}, dtypes=step.accepts, static=(), cases=CASES,
    )  # fmt: skip


@cache
def _norm_bwd(name: str = "rmsnorm_linear_norm_bwd", wanted: tuple[str, ...] = ("dx", "dnorm_weight")) -> Op:
    """The gradient of the norm, or only of x."""
    (rmsnorm_bwd,) = rmsnorm.steps
    step = rmsnorm_bwd.only("dx", *(["dweight"] if "dnorm_weight" in wanted else []))
    outputs = {"dx": ROWS, "dnorm_weight": Tensor("k", "W", given="norm_weight", skippable=True)}

    def run(xp: Any, call: Call, inputs: Arrays, attrs: Mapping[str, Any]) -> Arrays:
        given = {"x": inputs["x"], "dout": inputs["dnormed"], "weight": inputs["norm_weight"]}
        found = call(step, given, {"eps": attrs["eps"]})
        return {"dx": found["dx"]} | ({"dnorm_weight": found["dweight"]} if "dnorm_weight" in wanted else {})

    def reference(xp: Any, x: Any, dnormed: Any, norm_weight: Any = None, *, eps: float) -> tuple[Any, ...]:
        return norm.reference_bwd(xp, x, dnormed, norm_weight, eps=eps, weight_offset=0.0)[: len(wanted)]

    return Op(
        name, inputs={"x": ROWS, "dnormed": ROWS, "norm_weight": NORM}, outputs={key: outputs[key] for key in wanted},
        reference=reference, kernel=Program(run, (step,)), narrow=_norm_bwd, attrs={"eps": 1e-6}, **COMMON,
    )  # fmt: skip


def name_of(epilogue: str, biased: bool) -> str:
    """The name of the op of one epilogue, with a bias or without.

    Raises:
        ValueError: another epilogue.
    """
    if epilogue not in KINDS:
        known = ", ".join(map(repr, KINDS[:-1])) + f" or {KINDS[-1]!r}"
        raise ValueError(f"cute.rmsnorm_linear: option `epilogue` is {epilogue!r}, expected {known}.")
    return "rmsnorm_linear" + "_bias" * biased + ("" if epilogue == "bias" else f"_{epilogue}")


@cache
def rmsnorm_linear(epilogue: str, biased: bool) -> Op:
    """The op of one epilogue, with a bias or without: see :data:`DOC`.

    Raises:
        ValueError: another epilogue.
    """
    return Layer(epilogue, biased).op()


class Layer:
    """The ops of one epilogue, with a bias or without."""

    def __init__(self, epilogue: str, biased: bool) -> None:
        self.name = name_of(epilogue, biased)
        self.epilogue, self.bias = EPILOGUES[epilogue], {"bias": Tensor("n", "B")} if biased else {}
        # Of rows that are normalised.
        self.product = linear
        if biased or epilogue != "bias":
            self.product = op_of(epilogue, ("n" if biased else None,), "n k")

    def op(self) -> Op:
        """The layer. Its gradient is that of the product of normalised rows, and that of the norm."""
        steps = _normed(), *map(_of_normed, self.product.steps), _norm_bwd()
        return self._declare(self.name, self.product, grad=steps, saving=self._saving())

    def _saving(self) -> Op | None:
        """The layer that keeps the product before the epilogue."""
        saving = self.product.saving
        return saving and self._declare(f"{self.name}_saving", saving, {"acc": OUT._replace(hidden=True)})

    def _declare(self, name: str, product: Op, saved: Mapping[str, Tensor] = MappingProxyType({}), **more: Any) -> Op:
        behind = self._behind(name, bool(saved))

        def run(xp: Any, call: Call, inputs: Arrays, attrs: Mapping[str, Any]) -> Arrays:
            given, how = {key: inputs[key] for key in self.bias}, {"fused": attrs["fused"]}
            x, weight, norm_weight, eps = inputs["x"], inputs["weight"], inputs["norm_weight"], {"eps": attrs["eps"]}
            if how["fused"] == "always":
                if norm_weight is not None:
                    weight = call(scaled_columns(), {"weight": weight, "norm_weight": norm_weight}, {})["out"]
                rstd = call(row_factors(), {"x": x}, eps)["rstd"]
                found = call(behind, {"x": x, "weight": weight, "rstd": rstd, **given}, how)
                return {"out": found["out"], **({"acc": found["pre"]} if saved else {})}
            normed = call(rmsnorm, {"x": x, "weight": norm_weight}, eps)["out"]
            outputs: Arrays = call(product, {"x": normed, "weight": weight, **given}, how)
            return outputs

        def reference(xp: Any, x: Any, weight: Any, *others: Any, eps: float, fused: str) -> Any:
            *bias, norm_weight = others if len(others) > len(self.bias) else (*others, None)
            return product.reference(xp, _reference_normed(xp, x, norm_weight, eps=eps), weight, *bias)

        return Op(
            name, inputs={"x": ROWS, "weight": Tensor("n k", "T"), **self.bias, "norm_weight": NORM},
            outputs={"out": OUT, **saved}, reference=reference, attrs={"eps": 1e-6, "fused": FUSED},
            kernel=Program(run, (rmsnorm, product, scaled_columns(), row_factors(), behind)), static=(), cases=CASES,
            dtypes={"T": FLOATS, "W": FLOATS, **({"B": FLOATS} if self.bias else {})},
            doc=f"RMSNorm and a linear layer.\n\n{DOC}", **more,
        )  # fmt: skip

    def _behind(self, name: str, saves: bool) -> Op:
        """The product of rows that are not normalised, the norm and the epilogue."""

        def normed(xp: Any, acc: Any, rstd: Any, bias: Any = None) -> Any:
            out = self.epilogue(xp, acc * rstd, bias)
            return (out, acc * rstd) if saves else out

        return fused_linear(
            normed, name=f"{name}_behind", operands={"rstd": "*m 1"} | dict.fromkeys(self.bias, "n"),
            outputs={"out": "*m n"} | ({"pre": "*m n"} if saves else {}),
        )  # fmt: skip
