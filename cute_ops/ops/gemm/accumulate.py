"""A weight's gradient added to a running total: declaration and reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cute_ops.declaration.config import Problem, Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import FUSED, Program
from cute_ops.declaration.shapes import FLOATS, ITEMSIZE
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.gemm.config import GemmConfig
from cute_ops.ops.batches import CASES as BATCHES
from cute_ops.ops.batches import each
from cute_ops.ops.gemm.choice import fallback
from cute_ops.ops.gemm.config import EpilogueCost, GemmSize
from cute_ops.ops.gemm.linear import (
    CASES,
    DOUT,
    HALVES,
    X,
    check_rows,
    configure,
    exact,
    loads,
    product_of,
)

# Registers of a thread for a total that TMA cannot load, per byte of an element: a thread has elements of two subtiles.
BY_THREADS = 8


DOC = """Gradient of :func:`linear` to the weight, added to earlier ones: ``total += dout.T @ x``, over all rows.

    The gradients of micro-batches are added up without another pass, and without rounding each of them first.

    Args:
        dout: ``T[*m n]``; bfloat16, float16 or float32.
        x: ``T[*m k]``. Either dim of both may be contiguous.
        total: ``[n k]``; float32, float16 or bfloat16, whatever the others are. It is written.
        fused: as in :func:`linear`.

    Returns:
        PyTorch: nothing, ``total`` is changed. JAX: the new ``total``, in the memory of the old one where the program
        donates it or it is its own. Summed up in float32, rounded once; deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit together, a ``total`` that shares memory with an operand.
        NotImplementedError: an input that requires a gradient; on a GPU, more than 2^31 rows.
    """


def declare(name: str, kernel: str, inputs: Mapping[str, Tensor], **more: Any) -> Op:
    """The op, for one example or for each of a batch."""
    multiplied = product_of(kernel, "T")

    def reference(xp: Any, dout: Any, x: Any, total: Any, *, fused: str = "") -> Any:
        wide = xp.float64 if total.dtype == xp.float64 else xp.float32
        added = exact(xp, multiplied, xp.astype(dout, wide), xp.astype(x, wide))
        return xp.astype(xp.astype(total, wide) + added, total.dtype)

    def run(xp: Any, call: Any, inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
        dout, x = inputs["dout"], inputs["x"]
        if multiplied.flat:
            dout, x = (a.reshape(-1, a.shape[-1]) for a in (dout, x))
        return {"total": xp.add_product(inputs["total"], dout.mT, x)}

    def config(problem: Problem) -> GemmConfig:
        """The config of the product, whose epilogue reads one tile."""
        check_rows(op, problem)
        vectors, blocks = loads(problem, ("dout", "x"), "m")
        itemsize, by_tma = ITEMSIZE[problem.dtypes["total"]], problem.aligns["total"] == VECTOR_BYTES
        cost = EpilogueCost(
            (itemsize,), (itemsize,) if by_tma else (), live=2, fma=1, vectors=0 if by_tma else BY_THREADS * itemsize,
            blocks=blocks,
        )  # fmt: skip
        strides = [problem.size(problem.contiguous[name]) for name in ("dout", "x")]
        chosen = configure(problem, vectors, GemmSize.of(problem, ("n", "k", "m"), strides), cost)
        texts = {"expression": "e1(t,t) add 0 1 -> 2", "reads": "total", "writes": "total"}
        return GemmConfig.of({**chosen.flat(), **texts})

    op = Op(
        name, inputs=inputs, outputs={}, mutates=("total",), dtypes={"T": HALVES, "A": FLOATS}, static=(),
        kernel=f"cute_ops.kernels.gemm.linear:{kernel}", tuning=Tuning(config), attrs={"fused": FUSED},
        fallback=fallback(Program(run), config, anywhere=("dout", "x")), reference=reference,
        sharding=Sharding(parallel=("n", "k")), **more,
    )  # fmt: skip
    return op


INPUTS = {"dout": DOUT, "x": X, "total": Tensor("n k", "A")}
linear_dweight_add = declare(
    "linear_dweight_add", "LinearDweight", INPUTS, cases=CASES, doc=DOC,
    batched=lambda: declare(
        "linear_dweight_add_batched", "BatchedLinearDweight", each(INPUTS), cases=BATCHES, called="linear_dweight_add",
        doc=f"The same of each example of a batch.\n\n    {DOC}",
    ),
)  # fmt: skip
