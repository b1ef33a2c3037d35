"""Dropout, residual add and norm in one pass: expressions with random numbers, cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.tensor import Tensor
from cute_ops.expressions.tracing import trace
from cute_ops.ops import docs
from cute_ops.ops.checks import NOT_NEGATIVE, within
from cute_ops.ops.expression.formula import ByAttrs, Formula, declare
from cute_ops.ops.norm.declare import RESIDUAL, ROWS, residual_problem

ROW: Mapping[str, Any] = {"axis": -1, "keepdims": True}
CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("odd-small", {"m": (3, 5), "n": 7}, {"R": "float32", "W": "float32"}),
    Case("llama3-8b", {"m": (2, 67), "n": 4096}, attrs={"p": 0.2}),
    Case("bert-large", {"m": (65,), "n": 1024}, {"R": "float32", "W": "float32"}, attrs={"p": 0.5}),
    Case("odd", {"m": (37,), "n": 4097}, attrs={"p": 0.0}),
)


def _dropped(xp: Any, x: Any, seed: Any, p: float) -> Any:
    """``seed`` is a uniform random number for each element."""
    return xp.where(seed < p, 0.0, x * (1 / (1 - p))) if p else x


def _rms(xp: Any, h: Any, eps: float) -> tuple[Any, Any]:
    rstd = xp.rsqrt(xp.mean(h * h, **ROW) + eps)
    return h * rstd, rstd


def _layer(xp: Any, h: Any, eps: float) -> tuple[Any, Any]:
    return _rms(xp, h - xp.mean(h, **ROW), eps)


def _rmsnorm(xp: Any, x: Any, residual: Any, weight: Any, seed: Any, *, p: float, eps: float) -> Any:
    h = _dropped(xp, x, seed, p) + residual
    return _rms(xp, h, eps)[0] * weight, h


def _rmsnorm_bwd(
    xp: Any, residual_out: Any, dout: Any, dresidual_out: Any, weight: Any, seed: Any, *, p: float, eps: float
) -> Any:
    normed, rstd = _rms(xp, residual_out, eps)
    slope = dout * weight
    dresidual = rstd * (slope - normed * xp.mean(slope * normed, **ROW)) + dresidual_out
    return _dropped(xp, dresidual, seed, p), dresidual, dout * normed


def _layernorm(xp: Any, x: Any, residual: Any, weight: Any, bias: Any, seed: Any, *, p: float, eps: float) -> Any:
    h = _dropped(xp, x, seed, p) + residual
    return _layer(xp, h, eps)[0] * weight + bias, h


def _layernorm_bwd(
    xp: Any, residual_out: Any, dout: Any, dresidual_out: Any, weight: Any, seed: Any, *, p: float, eps: float
) -> Any:
    normed, rstd = _layer(xp, residual_out, eps)
    slope = dout * weight
    inner = slope - xp.mean(slope, **ROW) - normed * xp.mean(slope * normed, **ROW)
    dresidual = rstd * inner + dresidual_out
    return _dropped(xp, dresidual, seed, p), dresidual, dout * normed, dout


WEIGHT, SEED = Tensor("n", "W"), Tensor("", "I", upper_bound="2147483648")
BIAS = Tensor("n", "B")
DTYPES = {"T": FLOATS, "R": FLOATS, "W": FLOATS, "I": ("int64", "int32")}


def _formula(function: Callable[..., Any], inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Any:
    shapes = {name: "*m n" if t.rows or name == "seed" else "n" for name, t in inputs.items()}
    kinds = "".join("t" if t.rows else "r" for t in outputs.values())
    tile = next(iter(inputs))

    def of(attrs: Mapping[str, Any]) -> Formula:
        expression = trace(partial(function, **attrs), shapes)
        return Formula(expression, True, tuple(inputs), tuple(outputs), kinds, tile, random=("seed",))

    return ByAttrs(of)


def _check(binding: Any) -> str | None:
    if problem := within(eps=NOT_NEGATIVE)(binding):
        return problem
    if not 0 <= binding.attrs["p"] < 1:
        return f"attribute `p` is {binding.attrs['p']}, expected at least 0 and less than 1."
    return residual_problem(binding)


def _norm(name: str, forward: Any, backward: Any, bias: bool, eps: float, doc: str) -> Op:
    """The op and its gradient, which draws the numbers of the forward again."""
    dtypes = DTYPES | ({"B": FLOATS} if bias else {})
    parameters = {"weight": WEIGHT, **({"bias": BIAS} if bias else {})}
    inputs = {"x": ROWS, "residual": RESIDUAL, **parameters, "seed": SEED}
    outputs = {"out": ROWS, "residual_out": RESIDUAL}
    common: dict[str, Any] = {"module": __name__, "check": None, "cases": CASES, "dtypes": dtypes}
    attrs = {"p": 0.1, "eps": eps}
    read = {"residual_out": RESIDUAL, "dout": ROWS, "dresidual_out": RESIDUAL, "weight": WEIGHT, "seed": SEED}
    dparameters = {f"d{key}": t._replace(zero_without="dout") for key, t in parameters.items()}
    written = {"dx": ROWS, "dresidual": RESIDUAL, **dparameters}
    more = {"bias": BIAS._replace(unread=True)} if bias else {}
    formula = _formula(backward, read, written)
    gradient = declare(
        f"{name}_bwd", formula, {**read, **more}, written, attrs,
        doc=f"Gradients of :func:`{name}`. The mask is computed again, and sums are in float32, in a fixed order.",
        **common,
    )  # fmt: skip
    return declare(
        name, _formula(forward, inputs, outputs), inputs, outputs, attrs, grad=gradient, doc=doc,
        **{**common, "check": _check},
    )  # fmt: skip


def _doc(what: str, formula: str, parameters: str, source: str) -> str:
    return f"""Dropout, residual add and {what} in one pass.

    ``residual_out = dropout(x, p) + residual``; ``out = {formula}``

    An element of x is dropped, or divided by ``1 - p``, by a random number that follows from the seed and from its
    place alone: a call with the same seed drops the same elements, in both frameworks, and the gradient computes the
    mask again.

    Args:
        {docs.X}
        {docs.RESIDUAL}
        {parameters}
        seed: int64 or int32 scalar, on the device: another number for each call. A CUDA graph may write it. Devices
            that have different rows get masks of their own from seeds of their own.
        p: how many elements are dropped, less than 1; a compile-time constant.
        eps: a compile-time constant.

    Returns:
        ``(out, residual_out)``: ``T[*m n]`` and ``R[*m n]``. Computed in float32, each rounded once; deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an attribute out of its range, a narrower residual, a last dim that is not
            contiguous.

    Source: {source}; Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011 (Philox 4x32-7).
    """


dropout_add_rmsnorm = _norm(
    "dropout_add_rmsnorm", _rmsnorm, _rmsnorm_bwd, False, 1e-6,
    _doc("RMSNorm", "rmsnorm(residual_out, weight, eps)", "weight: ``W[n]``, a float dtype of its own.",
         "flash-attn's ``dropout_add_rms_norm``"),
)  # fmt: skip
dropout_add_layernorm = _norm(
    "dropout_add_layernorm", _layernorm, _layernorm_bwd, True, 1e-5,
    _doc("layer norm", "layernorm(residual_out, weight, bias, eps)",
         "weight: ``W[n]``, a float dtype of its own.\n        bias: ``B[n]``, a float dtype of its own.",
         "the sublayers of Vaswani et al., Attention Is All You Need, 2017"),
)  # fmt: skip
