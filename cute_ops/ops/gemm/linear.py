"""A linear layer's products, of itself and of its gradients: declarations, reference maths, cases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from cute_ops.declaration.array_api import widen
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Config, Problem, Tuning
from cute_ops.declaration.messages import message
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import FUSED, ProductPlan, Program
from cute_ops.declaration.shapes import ITEMSIZE, Array
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Accumulation, Tensor
from cute_ops.expressions.graph import SHAPES, identity
from cute_ops.hardware import VECTOR_BYTES, sm
from cute_ops.kernels.gemm.config import K_PARTS, GemmConfig
from cute_ops.ops.batches import CASES as BATCHES
from cute_ops.ops.batches import batch_of, each
from cute_ops.ops.expression.formula import Formula
from cute_ops.ops.expression.pointwise import pointwise
from cute_ops.ops.gemm.choice import fallback
from cute_ops.ops.gemm.config import SWIZZLED, EpilogueCost, GemmSize, in_place, space_of, without_tma
from cute_ops.ops.gemm.in_parts import choose

HALVES = ("bfloat16", "float16")
MOST_ROWS = 2**31 - 2**16  # rows are counted in 32 bits, and a tile may reach beyond the last one
# Of operands either dim may be contiguous, so that transposed ones are read in place.
X = Tensor("*m k", "T", contiguous=("k", "m"), merged=True)
WEIGHT = Tensor("n k", "T", contiguous=("k", "n"))
DOUT = Tensor("*m n", "T", contiguous=("n", "m"), merged=True)
OUT = Tensor("*m n", "T", contiguous="n", merged=True)  # one that the caller passes may have any row stride
ACROSS = Tensor("k n", "T", contiguous=("n", "k"))
DX, DWEIGHT = Tensor("*m k", "T", contiguous="k", merged=True), Tensor("n k", "T", contiguous="k")

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


def declare(
    name: str,
    kernel: str,
    sizes: tuple[str, str, str],
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    **more: Any,
) -> Op:
    """A product whose output has ``sizes[0]`` rows and ``sizes[1]`` columns, each a sum of ``sizes[2]`` terms. The
    kernel of a batch has a name that begins with ``Batched``.
    """

    def reference(xp: Any, a: Any, b: Any, *, fused: str = "") -> Any:
        out = exact(xp, multiplied, a, b)
        return out if multiplied.dtype else xp.astype(out, a.dtype)

    def epilogue_cost(problem: Problem) -> EpilogueCost:
        _, blocks = loads(problem, list(inputs), sizes[2])
        return EpilogueCost(
            (ITEMSIZE[problem.dtypes[out]],), blocks=blocks,
            parts=not is_batch, transposes=not is_batch and problem.aligns.get(out) == VECTOR_BYTES,
        )  # fmt: skip

    def size(problem: Problem) -> GemmSize:
        return GemmSize.of(problem, sizes, [problem.size(problem.contiguous[name]) for name in inputs])

    def config(problem: Problem) -> GemmConfig:
        check_rows(op, problem)
        vectors, _ = loads(problem, list(inputs), sizes[2])
        by_rows = problem.contiguous.get(next(iter(inputs)), sizes[2]) == sizes[2]
        lie = not is_batch and all(problem.contiguous[name] == sizes[2] for name in inputs)
        return configure(problem, vectors, size(problem), epilogue_cost(problem), by_rows, lie)

    def run(xp: Any, call: Any, inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
        return {out: multiply(xp, multiplied, *inputs.values())}

    def batched() -> Op:
        known: dict[str, Any] = {"sharding": Sharding(("m", "n"), contracted=("k",))} if "sharding" in more else {}
        if "grad" in more:
            known["grad"] = tuple(step.batched for step in more["grad"])
        known["doc"] = f"The same for each example of a batch.\n\n    {more['doc']}"
        return declare(
            f"{name}_batched", f"Batched{kernel}", sizes, each(inputs), each(outputs), called=name, **(more | known)
        )

    is_batch = kernel.startswith("Batched")
    ((out, tensor),) = outputs.items()
    multiplied = product_of(kernel, tensor.dtype)
    summed = Accumulation((sizes[2],))
    op = Op(
        name, inputs=inputs, outputs={n: t._replace(accumulates=summed) for n, t in outputs.items()},
        dtypes={"T": HALVES}, static=(), reference=reference, cases=BATCHES if is_batch else CASES,
        batched=None if is_batch else batched,
        kernel=f"cute_ops.kernels.gemm.linear:{kernel}", attrs={"fused": FUSED},
        tuning=Tuning(config, space_of(sizes, epilogue_cost, is_batch), partial(parts_of, sizes=sizes)),
        fallback=fallback(
            Program(run, product=multiplied), config, lambda p: (size(p), epilogue_cost(p)), after=False,
            anywhere=tuple(inputs),
        ),
        sharding=Sharding(tuple(dim for dim in sizes[:2] if dim != "m"), contracted=sizes[2:]), **more,
    )  # fmt: skip
    return op


def parts_of(problem: Problem, config: Config, sizes: tuple[str, str, str], halves: int = 1) -> dict[str, Array | None]:
    """The workspace of a product whose terms are cut into parts."""
    parts, (m, n, _) = GemmConfig.of(config).parts, map(problem.size, sizes)
    return {K_PARTS: Array((parts, m, halves * n), "float32")} if parts > 1 else {}


def product_of(kernel: str, dtype: str) -> ProductPlan:
    """The plan of the product that the kernel of this name computes, of this declared dtype."""
    transposed = {"Linear": 1, "LinearDx": None, "LinearDweight": 0}[kernel.removeprefix("Batched")]
    return ProductPlan(transposed, flat=kernel == "LinearDweight", dtype=None if dtype == "T" else dtype)


def exact(xp: Any, product: ProductPlan, a: Any, b: Any) -> Any:
    """The product in float32 or float64, in array-API style."""
    if product.flat:
        a, b = (xp.reshape(m, (math.prod(m.shape[:-1]), m.shape[-1])) for m in (a, b))
    a, b = widen(xp, a, b)
    transposed = xp.matrix_transpose
    return xp.matmul(transposed(a) if product.transposed == 0 else a, transposed(b) if product.transposed == 1 else b)


def multiply(xp: Any, product: ProductPlan, a: Any, b: Any) -> Any:
    """The framework's product."""
    if product.flat:
        a, b = (m.reshape(-1, m.shape[-1]) for m in (a, b))
    return xp.product(a.mT if product.transposed == 0 else a, b.mT if product.transposed == 1 else b, product.dtype)


def check_rows(op: Op, problem: Problem) -> None:
    """Raise NotImplementedError for more rows than kernels count."""
    if problem.size("m") * batch_of(problem) > MOST_ROWS:
        given = {n: Array(t.of(problem.dims), problem.dtypes[n]) for n, t in op.inputs.items()}
        raise NotImplementedError(message(op, f"it takes at most {MOST_ROWS} rows.", given, problem.dims))


def configure(
    problem: Problem, vectors: Sequence[tuple[int, bool]], size: GemmSize, cost: EpilogueCost, by_rows: bool = False,
    lie: bool = False,
) -> GemmConfig:  # fmt: skip
    """The config of a product of this size; ``vectors`` is what :func:`vector` gives for both operands. ``by_rows``:
    whether the rows of the first one are contiguous. ``lie``: whether a kernel of few rows can read operands that TMA
    cannot load where they lie.
    """
    (vec_a, a_by_tma), (vec_b, b_by_tma) = vectors
    chosen = None
    if sm(problem.arch) == 90 and a_by_tma and b_by_tma:
        chosen = choose(size, cost, problem.arch, problem.sm_count, by_rows)
    if sm(problem.arch) == 90 and lie and not (a_by_tma and b_by_tma):
        chosen = in_place(size.m)
    return chosen or without_tma(vec_a, vec_b)


def loads(problem: Problem, names: Sequence[str], terms: str) -> tuple[list[tuple[int, bool]], int]:
    """The vectors of the operands of these names, as of :func:`vector`, and the columns of the second that share a row
    of shared memory, where the dim ``terms`` is summed over.
    """
    vectors = [vector(problem, name, problem.size(problem.contiguous[name])) for name in names]
    return vectors, 8 if problem.contiguous[names[1]] == terms else SWIZZLED


def vector(problem: Problem, name: str, length: int) -> tuple[int, bool]:
    """How many neighbouring elements of an input, whose contiguous dim has this length, a thread may load at once; and
    whether TMA can load the input.
    """
    align = problem.aligns[name]
    return math.gcd(align // ITEMSIZE[problem.dtypes[name]], length), align == VECTOR_BYTES


_ARGS = """x: ``T[*m k]``; bfloat16, float16 or float32; any leading shape.
        weight: ``T[n k]``. Either dim of both may be contiguous, the other has any stride: a transposed operand is read
            in place. These strides should be multiples of 16 bytes: others are slower. Our kernel needs one stride
            that steps over all rows of x; for operands that lie otherwise the framework's product runs.
        fused: whether our kernel runs: ``"always"``, ``"never"``, or ``"auto"``, where it was measured to be at least
            as fast as the framework's product, which runs otherwise, and for float32.

    Returns:
        {out}, compact. Summed up in float32, rounded once; deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit together; with ``"always"`` an operand that our kernel cannot read where it
            lies.
        NotImplementedError: on a GPU, more than 2^31 rows.
    """


@cache
def product_gradients(cotangent: str, across: bool) -> tuple[Op, Op]:
    """The products that are the gradients of ``x @ weight.T`` to x and to the weight; ``across`` says that it is
    ``x @ weight``, of a weight ``k n``, and ``cotangent`` what its gradient is called.
    """
    of = ("_kn" if across else "") + ("" if cotangent == "dout" else f"_of_{cotangent}")
    what, dout = "a product" if across else ":func:`linear`", {cotangent: DOUT}
    dx = declare(
        f"linear{of}_dx", "Linear" if across else "LinearDx", ("m", "k", "n"),
        {**dout, "weight": ACROSS if across else WEIGHT}, {"dx": DX},
        doc=f"Gradient of {what} to x: ``dx = {cotangent} @ weight{'.T' if across else ''}``.",
    )  # fmt: skip
    factors = f"x.T @ {cotangent}" if across else f"{cotangent}.T @ x"
    dweight = declare(
        f"linear{of}_dweight", "LinearDweight", ("k", "n", "m") if across else ("n", "k", "m"),
        {"x": X, **dout} if across else {**dout, "x": X},
        {"dweight": ACROSS._replace(contiguous="n") if across else DWEIGHT},
        doc=f"Gradient of {what} to the weight: ``dweight = {factors}``, over all rows.",
    )  # fmt: skip
    return dx, dweight


@cache
def linear_acc(dtype: str, across: bool) -> Op:
    """The product alone, of this dtype, ``T`` or ``float32``: what a gradient computes again where the forward has not
    saved it; ``across`` as in :func:`product_gradients`.
    """
    name = f"linear{'_kn' if across else ''}_acc{'' if dtype == 'T' else f'_{dtype}'}"
    return declare(
        name, "LinearDx" if across else "Linear", ("m", "n", "k"), {"x": X, "weight": ACROSS if across else WEIGHT},
        {"acc": OUT._replace(dtype=dtype)}, doc="A product that the forward has not saved, recomputed.",
    )  # fmt: skip


linear_dx, linear_dweight = product_gradients("dout", across=False)
linear = declare(
    "linear", "Linear", ("m", "n", "k"), {"x": X, "weight": WEIGHT}, {"out": OUT},
    grad=(linear_dx, linear_dweight),
    doc="Product with a weight.\n\n    ``out = x @ weight.T``\n\n    Args:\n        " + _ARGS.format(out="``T[*m n]``"),
)  # fmt: skip
rounded = pointwise(
    "linear_float32_bwd",
    lambda attrs: Formula(identity(SHAPES["*m n"]), False, ("dout",), ("dacc",), "t", "dout"),
    {"dout": Tensor("*m n", "float32"), "weight": WEIGHT._replace(unread=True, contiguous=())},
    {"dacc": Tensor("*m n", "T")}, {}, doc="The cotangent of :func:`linear_float32` in x's dtype.",
)  # fmt: skip
linear_float32 = declare(
    "linear_float32", "Linear", ("m", "n", "k"), {"x": X, "weight": WEIGHT},
    {"out": OUT._replace(dtype="float32")}, grad=(rounded, *product_gradients("dacc", across=False)),
    doc="Product with a weight, unrounded: logits.\n\n    ``out = x @ weight.T``\n\n    Args:\n        "
    + _ARGS.format(out="``float32[*m n]``"),
)  # fmt: skip
PRODUCTS = (linear, linear_float32, linear_dx, linear_dweight)
