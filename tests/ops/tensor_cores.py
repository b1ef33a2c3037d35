"""Ops whose kernels evaluate an expression over accumulators that are no 16-bit product's, for tests of its parts."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any

from cute_ops import Case, Op, Tensor
from cute_ops.declaration.array_api import widen
from cute_ops.declaration.config import KernelConfig, Problem, Tuning
from cute_ops.expressions.reference import evaluate
from cute_ops.expressions.text import parse
from cute_ops.kernels.gemm.config import GemmConfig

MODIFIED = "e1(t,r,s) sigmoid 0; multiply 1 3; multiply 0 2; tanh 5; add 4 6 -> 7"
SCALED = "e1(t,c,r) multiply 0 1; add 2 3; gelu_tanh 4 -> 5"


class ScoresConfig(KernelConfig):
    """The config of :class:`tests.ops.tensor_core_kernels.Scores`; the fields that an epilogue reads."""

    stages: int
    _: KW_ONLY
    expression: str
    reads: str
    writes: str = "out"
    half_align: int = 16
    tile_stages: int = 0
    transposed: bool = False


def _scores(xp: Any, q: Any, k: Any, v: Any, bias: Any, factor: Any) -> Any:
    wide = widen(xp, q, k, v, bias, factor)
    (p,) = evaluate(parse(MODIFIED), xp, [xp.matmul(wide[0], xp.matrix_transpose(wide[1])), *wide[3:]])
    rounded = xp.astype(xp.astype(p, v.dtype), wide[2].dtype)
    return xp.astype(xp.matmul(rounded, wide[2]), q.dtype)


scores = Op(
    "scores",
    inputs={
        "q": Tensor("m d", "T"), "k": Tensor("n d", "T"), "v": Tensor("n d", "T"), "bias": Tensor("n", "T"),
        "factor": Tensor("", "float32"),
    },
    outputs={"out": Tensor("m d", "T")},
    dtypes={"T": ("bfloat16", "float16")},
    static=("d",),
    reference=_scores,
    kernel="tests.ops.tensor_core_kernels:Scores",
    tuning=Tuning(lambda problem: ScoresConfig(2, expression=MODIFIED, reads="bias factor")),
    cases=(Case("scores", {"m": 70, "n": 200, "d": 64}),),
    doc="``f(q @ k.T) @ v``: an expression of the scores of attention, which are an operand of the next product.",
)  # fmt: skip


def _fp8(xp: Any, x: Any, weight: Any, scale: Any, bias: Any) -> Any:
    wide = widen(xp, x, weight, scale, bias)
    acc = xp.matmul(wide[0], xp.matrix_transpose(wide[1]))
    (out,) = evaluate(parse(SCALED), xp, [acc, wide[2][:, None], wide[3]])
    return xp.astype(out, bias.dtype)


def _fp8_config(problem: Problem) -> GemmConfig:
    form = "pingpong" if problem.size("m") > 256 else "cooperative"
    return GemmConfig(
        form, 128, 128, 4, problem.sm_count, tile_k=128, store_stages=2, expression=SCALED, reads="scale bias",
        writes="out",
    )  # fmt: skip


fp8_product = Op(
    "fp8_product",
    inputs={
        "x": Tensor("m k", "T"), "weight": Tensor("n k", "W"), "scale": Tensor("m", "float32"),
        "bias": Tensor("n", "bfloat16"),
    },
    outputs={"out": Tensor("m n", "bfloat16")},
    dtypes={"T": ("float8_e4m3fn",), "W": ("float8_e4m3fn", "float8_e5m2")},
    static=(),
    reference=_fp8,
    kernel="cute_ops.kernels.gemm.linear:Linear",
    tuning=Tuning(_fp8_config),
    cases=(
        Case("cooperative", {"m": 70, "n": 136, "k": 272}),
        Case("pingpong", {"m": 260, "n": 72, "k": 144}, {"W": "float8_e5m2"}),
    ),
    doc="``gelu(scale * (x @ weight.T) + bias)`` of 8-bit operands: the kernel of products with operands of 8 bits.",
)  # fmt: skip


def _twice(xp: Any, x: Any, weight: Any) -> tuple[Any, Any]:
    wide = widen(xp, x, weight)
    out = xp.matmul(wide[0], xp.matrix_transpose(wide[1]))
    return xp.astype(out, x.dtype), xp.astype(2 * out, x.dtype)


def _twice_config(problem: Problem) -> GemmConfig:
    form = "pingpong" if problem.size("m") > 256 else "cooperative"
    return GemmConfig(form, 128, 128, 4, problem.sm_count, store_stages=2, writes="out")


with_part = Op(
    "with_part",
    inputs={"x": Tensor("m k", "T"), "weight": Tensor("n k", "T")},
    outputs={"out": Tensor("m n", "T"), "twice": Tensor("m n", "T")},
    dtypes={"T": ("bfloat16",)},
    static=(),
    reference=_twice,
    kernel="tests.ops.tensor_core_kernels:with_part",
    tuning=Tuning(_twice_config),
    cases=(Case("cooperative", {"m": 70, "n": 136, "k": 72}), Case("pingpong", {"m": 260, "n": 72, "k": 72})),
    doc="A product, and twice the product by a part of its epilogue that has shared memory and TMA of its own.",
)  # fmt: skip
