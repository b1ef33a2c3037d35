"""RMSNorm and the linear layer that reads its rows.

:func:`rmsnorm` writes the rows that the product reads. The gradient normalises x again, so these rows are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import FUSED, Program
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.batches import each
from cute_ops.ops.checks import NOT_NEGATIVE, within
from cute_ops.ops.expression.call import Attrs
from cute_ops.ops.gemm.by_call import Epilogue, Shapes, Traced, check_save, op_of_traced, refuse_batch, traced
from cute_ops.ops.gemm.halves import PACKED, STACKED, stack_halves
from cute_ops.ops.gemm.linear import linear
from cute_ops.ops.norm import rmsnorm as norm
from cute_ops.ops.norm.rmsnorm import rmsnorm

DOC = """``out = epilogue(rmsnorm(x, norm_weight, eps=eps) @ weight.T, *operands)``

Args:
    x: ``T[*m k]``; bfloat16, float16 or float32; any leading shape.
    norm_weight: ``W[k]``, a float dtype of its own, or None.
    weight: ``T[n k]``; ``T[k n]`` with ``transposed``; twice as many, gate and up, with ``packed``. With leading dims,
        ``T[*b n k]``, it is one matrix for each of x, ``T[*b m k]``; all of them have the same ``norm_weight``.
    operands: what the epilogue reads besides the product, as in :func:`linear`; by default a bias ``[n]``, or None.
    eps: what is added to the mean of squares.
    epilogue: as in :func:`linear`; ``"bias"`` for no activation.
    fused, packed, transposed, halves, save, attrs: as in :func:`linear`.

Returns:
    ``T[*m n]``, or what the epilogue returns. Sums are in float32, in a fixed order. Devices may share n; each has
    whole rows of x, since they are normalised.

Raises:
    TraceError: the epilogue does what an expression cannot say.
    TypeError: a dtype that is not listed, operands that the epilogue does not have.
    ValueError: shapes that do not fit together.
    NotImplementedError: a batch of weights with an epilogue that reduces rows or looks at groups of columns.
"""
Arrays = Mapping[str, Any]
Call = Callable[..., Arrays]
# Epilogues whose ops have names, with a bias and without.
NAMED = ("bias", "gelu", "gelu_tanh", "silu")
# Names that the op uses for other things than operands.
TAKEN = ("norm_weight", "dnorm_weight", "normed", "dnormed", "eps", "fused")
CASES = (
    Case("odd-rows-and-columns", {"m": (3, 67), "n": 333, "k": 200}),
    Case("llama3-1b-qkv", {"m": (4, 4096), "n": 3072, "k": 2048}),
    Case("llama3-8b-qkv", {"m": (2, 4096), "n": 6144, "k": 4096}),
)
ROWS = Tensor("*m k", "T")
NORM = Tensor("k", "W", optional=True)


COMMON: dict[str, Any] = {"dtypes": {"T": FLOATS, "W": FLOATS}, "static": (), "cases": CASES}


def _reference_normed(xp: Any, x: Any, norm_weight: Any = None, *, eps: float) -> Any:
    return norm.reference(xp, x, norm_weight, eps=eps, weight_offset=0.0)


@cache
def _normed() -> Op:
    """The op of the normalised rows, for the gradient of the product's weight."""

    def run(xp: Any, call: Call, inputs: Arrays, attrs: Mapping[str, Any]) -> Arrays:
        given = {"x": inputs["x"], "weight": inputs["norm_weight"]}
        return {"normed": call(rmsnorm, given, {"eps": attrs["eps"]})["out"]}

    return Op(
        "rmsnorm_linear_normed", inputs={"x": ROWS, "norm_weight": NORM}, outputs={"normed": ROWS},
        reference=_reference_normed, kernel=Program(run, (rmsnorm,), maps=True), attrs={"eps": 1e-6}, **COMMON,
    )  # fmt: skip


@cache
def _of_normed(step: Op) -> Op:
    """A step of the product's gradient, in which normalised rows are called ``normed`` instead of ``x``."""
    names = {"x": "normed", "dx": "dnormed"}

    def run(xp: Any, call: Call, inputs: Arrays, attrs: Mapping[str, Any]) -> Arrays:
        found = call(step, {key: inputs[names.get(key, key)] for key in step.inputs}, attrs)
        return {names.get(key, key): found[key] for key in step.outputs}

    if names.keys().isdisjoint({*step.inputs, *step.outputs}):
        return step
    return Op(
        f"rmsnorm_{step.name}", inputs={names.get(key, key): tensor for key, tensor in step.inputs.items()},
        outputs={names.get(key, key): tensor for key, tensor in step.outputs.items()}, reference=step.reference,
        kernel=Program(run, (step,), maps=True), attrs={"fused": FUSED}, dtypes=step.accepts, static=(), cases=CASES,
        sharding=Sharding(step.parallel, contracted=step.contracted),
    )  # fmt: skip


@cache
def _norm_bwd(name: str = "rmsnorm_linear_norm_bwd", wanted: tuple[str, ...] = ("dx", "dnorm_weight")) -> Op:
    """The gradient of the norm, or only of x, or of its weight."""
    (rmsnorm_bwd,), names = rmsnorm.steps, {"dx": "dx", "dnorm_weight": "dweight"}
    step = rmsnorm_bwd.only(*(names[key] for key in wanted))
    weight = Tensor("k", "W", given="norm_weight", skippable=True)
    outputs = {"dx": ROWS._replace(skippable=True), "dnorm_weight": weight}

    def run(xp: Any, call: Call, inputs: Arrays, attrs: Mapping[str, Any]) -> Arrays:
        given = {"x": inputs["x"], "dout": inputs["dnormed"], "weight": inputs["norm_weight"]}
        found = call(step, given, {"eps": attrs["eps"]})
        return {key: found[names[key]] for key in wanted}

    def reference(xp: Any, x: Any, dnormed: Any, norm_weight: Any = None, *, eps: float) -> tuple[Any, ...]:
        found = norm.reference_bwd(xp, x, dnormed, norm_weight, eps=eps, weight_offset=0.0)
        return tuple(value for key, value in zip(names, found, strict=False) if key in wanted)

    return Op(
        name, inputs={"x": ROWS, "dnormed": ROWS, "norm_weight": NORM}, outputs={key: outputs[key] for key in wanted},
        reference=reference, kernel=Program(run, (step,), maps=True), narrow=_norm_bwd,
        attrs={"eps": 1e-6}, **COMMON,
    )  # fmt: skip


def rmsnorm_linear(
    epilogue: Epilogue, shapes: Shapes = (), weight: str = "n k", save: str = "pre", attrs: Attrs = (),
    halves: bool = False, batched: bool = False,
) -> Op:  # fmt: skip
    """The op of an epilogue: see :data:`DOC`, and :func:`cute_ops.ops.gemm.by_call.op_of` for its first arguments. The
    halves of a packed weight may be a dim, and the weight a batch of weights.

    Raises:
        NotImplementedError: it is, and the epilogue reduces rows or looks at groups of columns.
    """
    check_save(save, "rmsnorm_linear")
    found = traced(epilogue, shapes, weight, attrs, "rmsnorm_linear")
    allowed = [(f"operand{i}" if name in TAKEN else name, shape) for i, (name, shape) in enumerate(found.operands)]
    called = epilogue if isinstance(epilogue, str) and epilogue in NAMED else ""
    named = weight == "n k" and save == "pre" and not attrs and allowed in ([], [("bias", "n")])
    made = _op(found._replace(operands=tuple(allowed)), called if named else "", weight, save, halves, batched)
    if made is None:
        refuse_batch(epilogue, "rmsnorm_linear")
    return made


def op_of_call(epilogue: Epilogue, shapes: Shapes, batched: bool, layout: str, save: str, attrs: Attrs) -> Op:
    """The op of a call; raises as :func:`rmsnorm_linear` does."""
    return rmsnorm_linear(epilogue, shapes, layout.replace(STACKED, PACKED), save, attrs, STACKED in layout, batched)


@cache
def _op(found: Traced, called: str, weight: str, save: str, halves: bool, batched: bool) -> Op | None:
    biased = bool(found.operands)
    plain = called == "bias" and not biased
    name = "rmsnorm_linear" + "_bias" * biased + ("" if called == "bias" else f"_{called}") if called else ""
    one = linear if plain else op_of_traced(found, weight, save)
    product, inputs = one, {"x": ROWS, "weight": Tensor(one.inputs["weight"].shape, "T")}
    if batched:
        if one.batched is None:
            return None
        product, inputs, name = one.batched, each(inputs), name and f"{name}_batched"
    if halves:
        whole = _op(found, called, weight, save, False, batched)
        return whole and stack_halves(whole, whole=one.batched is None)
    return _layer(name or f"rmsnorm_{product.name}", product, inputs)


def _layer(name: str, product: Op, inputs: Mapping[str, Tensor]) -> Op:
    """The op of a product of normalised rows, with the gradient of that product, then that of the norm."""
    steps, none = tuple(map(_of_normed, product.steps)), product.no_gradient
    if "x" in none:  # the epilogue does not depend on the product
        return _declare(name, product, inputs, grad=steps, no_gradient=(*none, "norm_weight"))
    return _declare(
        name, product, inputs, grad=(_normed(), *steps, _norm_bwd()), no_gradient=none, handed_on=product.handed_on,
        saving=product.saving and _declare(f"{name}_saving", product.saving, inputs),
    )  # fmt: skip


def _declare(name: str, product: Op, inputs: Mapping[str, Tensor], **more: Any) -> Op:
    operands = {key: tensor for key, tensor in product.inputs.items() if key not in inputs}

    def run(xp: Any, call: Call, inputs: Arrays, attrs: Mapping[str, Any]) -> Arrays:
        rows = {"x": inputs["x"], "weight": inputs["norm_weight"]}
        normed = call(rmsnorm, rows, {"eps": attrs["eps"]})["out"]
        given = {key: inputs[key] for key in ("weight", *operands)}
        return call(product, {"x": normed, **given}, {"fused": attrs["fused"]})

    def reference(xp: Any, x: Any, weight: Any, *others: Any, eps: float, fused: str) -> Any:
        count = len(operands)
        norm_weight = others[count] if len(others) > count else None
        return product.reference(xp, _reference_normed(xp, x, norm_weight, eps=eps), weight, *others[:count])

    return Op(
        name, inputs={**inputs, **operands, "norm_weight": NORM}, outputs=product.outputs, reference=reference,
        attrs={"eps": 1e-6, "fused": FUSED}, kernel=Program(run, (rmsnorm, product), maps=True), static=(),
        cases=CASES, dtypes={**product.accepts, "T": FLOATS, "W": FLOATS},
        doc=f"RMSNorm and a linear layer.\n\n{DOC}", called="rmsnorm_linear", check=within(eps=NOT_NEGATIVE),
        sharding=Sharding(tuple(dim for dim in product.parallel if dim == "n")), **more,
    )  # fmt: skip
