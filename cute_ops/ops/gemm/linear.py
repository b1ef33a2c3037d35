"""A linear layer's products, of itself and of its gradients: declarations, reference maths, cases.

They are not among :data:`cute_ops.ops.OPS` yet: their kernels ran on a CPU, from their PTX, but not on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from cute_ops.array_api import widen
from cute_ops.config import Problem, Tuning
from cute_ops.errors import message
from cute_ops.hardware import sm
from cute_ops.kernels.gemm.config import GemmConfig
from cute_ops.op import Case, Op, Sharding, Tensor
from cute_ops.ops.gemm.config import choose, without_tma
from cute_ops.ops.rows import VECTOR_BYTES
from cute_ops.shapes import ITEMSIZE, Array

HALVES = ("bfloat16", "float16")
MOST_ROWS = 2**31 - 2**16  # rows are counted in 32 bits, and a tile may reach beyond the last one
X, WEIGHT, OUT = Tensor("*m k", "T"), Tensor("n k", "T"), Tensor("*m n", "T")

CASES = (
    Case("one-row", {"m": (), "n": 64, "k": 64}),
    Case("odd-rows-and-columns", {"m": (3, 67), "n": 333, "k": 200}),
    Case("minilm", {"m": (8, 31), "n": 1536, "k": 384}),
    Case("bert-base", {"m": (8, 128), "n": 3072, "k": 768}),
    Case("vit-base-qkv", {"m": (64, 197), "n": 2304, "k": 768}),
    Case("vit-base-head", {"m": (64,), "n": 1000, "k": 768}),
    Case("gpt2-vocabulary", {"m": (2, 67), "n": 50257, "k": 768}),
    Case("llama3-1b-gate-up", {"m": (4, 4096), "n": 16384, "k": 2048}),
    Case("llama3-1b-down", {"m": (4, 4096), "n": 2048, "k": 8192}),
    Case("llama3-8b-qkv", {"m": (2, 4096), "n": 6144, "k": 4096}),
    Case("llama3-8b-gate-up", {"m": (2, 4096), "n": 28672, "k": 4096}),
    Case("llama3-8b-down", {"m": (2, 4096), "n": 4096, "k": 14336}),
    Case("llama3-8b-decode", {"m": (16,), "n": 28672, "k": 4096}),
    Case("llama3-70b-gate-up", {"m": (4096,), "n": 57344, "k": 8192}),
)


def reference(xp: Any, x: Any, weight: Any) -> Any:
    return xp.astype(_product(xp, x, weight), x.dtype)


def reference_float32(xp: Any, x: Any, weight: Any) -> Any:
    return _product(xp, x, weight)


def reference_dx(xp: Any, dout: Any, weight: Any) -> Any:
    wide, w = widen(xp, dout, weight)
    return xp.astype(xp.matmul(wide, w), dout.dtype)


def reference_dweight(xp: Any, dout: Any, x: Any) -> Any:
    rows = math.prod(x.shape[:-1])
    dy, wide = (xp.reshape(a, (rows, a.shape[-1])) for a in widen(xp, dout, x))
    return xp.astype(xp.matmul(dy.T, wide), x.dtype)


def _product(xp: Any, x: Any, weight: Any) -> Any:
    wide, w = widen(xp, x, weight)
    return xp.matmul(wide, w.T)


def _declare(
    name: str,
    kernel: str,
    reference: Callable[..., Any],
    sizes: tuple[str, str, str],
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    **more: Any,
) -> Op:
    """A product whose output has ``sizes[0]`` rows and ``sizes[1]`` columns, each a sum of ``sizes[2]`` terms."""

    def config(problem: Problem) -> GemmConfig:
        if problem.size("m") > MOST_ROWS:
            given = {n: Array(t.of(problem.dims), problem.dtypes[n]) for n, t in inputs.items()}
            raise NotImplementedError(message(op, f"it takes at most {MOST_ROWS} rows.", given, problem.dims))
        if sm(problem.arch) == 90 and all(problem.aligns[n] == VECTOR_BYTES for n in inputs):
            itemsize, out_itemsize = (ITEMSIZE[problem.dtypes[next(iter(names))]] for names in (inputs, outputs))
            m, n, k = map(problem.size, sizes)
            return choose(m, n, k, itemsize, out_itemsize, problem.arch, problem.sm_count)
        return without_tma(*(_vector(problem, n, t) for n, t in inputs.items()))

    op = Op(
        name, inputs=inputs, outputs=outputs, dtypes={"T": HALVES}, static=(), reference=reference, cases=CASES,
        kernel=f"cute_ops.kernels.gemm.linear:{kernel}", tuning=Tuning(config), **more,
    )  # fmt: skip
    return op


def _vector(problem: Problem, name: str, tensor: Tensor) -> int:
    """Elements that divide the rows of an input, and what its address and its strides are multiples of."""
    return math.gcd(problem.aligns[name] // ITEMSIZE[problem.dtypes[name]], tensor.dims[-1].of(problem.dims))


_ARGS = """x: ``T[*m k]``; bfloat16 or float16; any leading shape, any row stride.
        weight: ``T[n k]``, any row stride. Rows of both should start on 16 bytes: others are slower.

    Returns:
        {out}, compact. Summed up in float32, rounded once; deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit together, a last dim that is not contiguous.
        NotImplementedError: on a GPU, more than 2^31 rows.
    """

linear = _declare(
    "linear", "Linear", reference, ("m", "n", "k"), {"x": X, "weight": WEIGHT}, {"out": OUT},
    sharding=Sharding(parallel=("n",), contracted=("k",)),
    doc="Product with a weight.\n\n    ``out = x @ weight.T``\n\n    Args:\n        " + _ARGS.format(out="``T[*m n]``"),
)  # fmt: skip
linear_float32 = _declare(
    "linear_float32", "Linear", reference_float32, ("m", "n", "k"), {"x": X, "weight": WEIGHT},
    {"out": OUT._replace(dtype="float32")}, sharding=Sharding(parallel=("n",), contracted=("k",)),
    doc="Product with a weight, unrounded: logits.\n\n    ``out = x @ weight.T``\n\n    Args:\n        "
    + _ARGS.format(out="``float32[*m n]``"),
)  # fmt: skip
linear_dx = _declare(
    "linear_dx", "LinearDx", reference_dx, ("m", "k", "n"), {"dout": OUT, "weight": WEIGHT}, {"dx": X},
    doc="Gradient of :func:`linear` to x: ``dx = dout @ weight``.",
)  # fmt: skip
linear_dweight = _declare(
    "linear_dweight", "LinearDweight", reference_dweight, ("n", "k", "m"), {"dout": OUT, "x": X}, {"dweight": WEIGHT},
    doc="Gradient of :func:`linear` to the weight: ``dweight = dout.T @ x``, over all rows.",
)  # fmt: skip
PRODUCTS = (linear, linear_float32, linear_dx, linear_dweight)
