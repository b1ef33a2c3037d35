"""Routing of tokens to experts: the weights of the chosen experts, and the load-balancing loss: programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from cute_ops.declaration.array_api import beside, widen
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.tensor import Tensor
from cute_ops.expressions import trace
from cute_ops.ops import docs
from cute_ops.ops.expression.formula import Formula, declare
from cute_ops.ops.expression.fused import fused
from cute_ops.ops.reduction.softmax import softmax
from cute_ops.ops.routing import config
from cute_ops.ops.routing import topk as largest

MOST_EXPERTS = 1024
Arrays = Mapping[str, Any]
Call = Callable[..., Any]
CASES = (
    Case("odd-small", {"m": (3, 5), "n": 7}, attrs={"k": 3}),
    Case("mixtral-8x7b", {"m": (67,), "n": 8}, attrs={"k": 2}),
    Case("qwen3-moe", {"m": (33,), "n": 128}, attrs={"k": 8}),
    Case("olmoe", {"m": (17,), "n": 64}, attrs={"k": 8, "normalize": False}),
)


expert_probabilities = fused(
    lambda xp, logits: xp.astype(xp.softmax(logits, axis=-1), "float32"), name="expert_probabilities",
    operands={"logits": "*m n"},
    cases=(Case("qwen3-moe", {"m": (33,), "n": 128}), Case("odd-small", {"m": (5,), "n": 7})),
    doc="The softmax of rows in float32, whatever the dtype of the logits.",
    grad_doc="Gradient of the softmax of rows in float32.",
)  # fmt: skip

_TOTAL = Formula(
    trace(lambda xp, logits: xp.softmax(logits, axis=-1), {"logits": "*m n"}), True, ("logits",), ("total",), "r",
    "logits",
)  # fmt: skip


def _slopes(xp: Any, logits: Any, slope: Any, load: Any, *, normalize: bool) -> Any:
    """``slope`` is that of weights: by the logits where they are divided by their sum, else by the probabilities."""
    p = xp.softmax(logits, axis=-1)
    of_p = load if normalize else slope + load
    found = p * (of_p - xp.sum(p * of_p, axis=-1, keepdims=True))
    return slope + found if normalize else found


route_slopes = fused(
    _slopes, name="route_slopes", operands={"logits": "*m n", "slope": "any *m n", "load": "n"},
    attrs={"normalize": True}, no_gradient=("slope", "load"), cases=expert_probabilities.cases,
    doc="Gradient of the weights of experts and of their balance to the logits.",
)  # fmt: skip
expert_totals = declare(
    "expert_totals", lambda attrs: _TOTAL, {"logits": Tensor("*m n", "T")}, {"total": Tensor("n", "float32")}, {},
    module=__name__, cases=expert_probabilities.cases,
    doc="The sum of the softmax of all rows, in float32 and in a fixed order.",
)  # fmt: skip


def _routed(xp: Any, logits: Any, *, k: int, normalize: bool) -> tuple[Any, ...]:
    """In the order of :func:`cute_ops.ops.routing.topk.reference_step`."""
    values, index = largest.reference_step(xp, logits, k=k)
    wide, weights = widen(xp, logits, values)
    top = xp.max(wide, axis=-1, keepdims=True)
    p, weights = xp.exp(wide - top), xp.exp(weights - top)
    total = xp.sum(p, axis=-1, keepdims=True)
    weights = weights / (xp.sum(weights, axis=-1, keepdims=True) if normalize else total)
    rows, n = xp.reshape(p / total, (-1, logits.shape[-1])), logits.shape[-1]
    chosen = xp.reshape(index, (-1, 1)) == xp.arange(n, dtype=index.dtype, **beside(xp, index))
    count = max(rows.shape[0], 1)
    load = xp.sum(xp.astype(chosen, rows.dtype), axis=0) * (n / count**2)
    return xp.astype(weights, logits.dtype), index, xp.sum(xp.sum(rows, axis=0) * load), load


def _probabilities(xp: Any, call: Call, logits: Any) -> Any:
    return call(expert_probabilities, {"logits": logits}, {})["out"]


def _run(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    logits = inputs["logits"]
    if attrs["k"] <= config.SORTED_MOST:
        return call(routed_rows, {"logits": logits}, attrs)  # type: ignore[no-any-return]
    found = call(largest.topk_step, {"x": logits, "index": None}, {"k": attrs["k"]})
    if attrs["normalize"]:
        weights = call(softmax, {"x": found["values"]}, {})["out"]
    else:
        weights = xp.cast(xp.picked(_probabilities(xp, call, logits), found["found"]), logits)
    n, count = logits.shape[-1], max(math.prod(logits.shape[:-1]), 1)
    index = found["found"].reshape(-1)
    none = xp.cast(xp.ones((n, 1), logits) * 0, index)
    chosen = xp.plus_rows(none, index, (index * 0 + 1).reshape(-1, 1)).reshape(-1)
    load = xp.cast(chosen, xp.ones((), logits)) * (n / count**2)
    balance = (call(expert_totals, {"logits": logits}, {})["total"] * load).sum()
    return {"weights": weights, "index": found["found"], "balance": balance, "load": load}


def _run_bwd(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    logits, index, dweights, dbalance = (inputs[name] for name in ("logits", "index", "dweights", "dbalance"))
    one, slope = xp.ones((), logits), None
    if dweights is not None:
        w, slope = xp.cast(inputs["weights"], one), xp.cast(dweights, one)
        slope = w * (slope - (w * slope).sum(-1)[..., None]) if attrs["normalize"] else slope
    if slope is not None and dbalance is None and attrs["normalize"]:
        return {"dlogits": xp.scattered(xp.cast(slope, logits), index, logits)}
    like = xp.broadcast_to(one, logits.shape)
    slope = like * 0 if slope is None else xp.scattered(slope, index, like)
    load = inputs["load"] * (0 if dbalance is None else dbalance)
    given = {"logits": logits, "slope": slope, "load": load}
    return {"dlogits": call(route_slopes, given, {"normalize": attrs["normalize"]})["out"]}


def check_experts(binding: Binding) -> str | None:
    n = binding.dims["n"]
    if isinstance(n, int) and n > MOST_EXPERTS:
        return f"argument `logits` has n={n}, expected at most {MOST_EXPERTS} experts."
    return largest.check(binding)


def check_few(binding: Binding) -> str | None:
    k = binding.attrs["k"]
    if k > config.SORTED_MOST:
        return f"attribute `k` is {k}, expected at most {config.SORTED_MOST}."
    return check_experts(binding)


LOGITS, OF_CHOSEN, INDEX = Tensor("*m n", "T"), Tensor("*m t", "T"), Tensor("*m t", "int32", upper_bound="n")
# How often all tokens choose each expert, as the balance's derivative by the probabilities of any of them.
LOAD = Tensor("n", "float32")
_COMMON: dict[str, Any] = {
    "dtypes": {"T": FLOATS}, "attrs": {"k": 1, "normalize": True}, "static": ("n",), "cases": CASES,
}  # fmt: skip

routed_rows = Op(
    "routed_rows",
    inputs={"logits": LOGITS},
    outputs={
        "weights": OF_CHOSEN,
        "index": INDEX._replace(upper_bound=None),
        "balance": Tensor("", "float32"),
        "load": LOAD,
    },
    derived={"t": lambda dims, attrs: attrs["k"]},
    reference=_routed,
    kernel="cute_ops.kernels.routing.route:RoutedRows",
    tuning=Tuning(config.routed, workspace=config.expert_sums),
    check=check_few,
    inference_only="route has one",
    doc=f"""All that :func:`route` computes, of at most {config.SORTED_MOST} experts of a token, in one pass.""",
    **_COMMON,
)

route_bwd = Op(
    "route_bwd",
    inputs={"logits": LOGITS, "weights": OF_CHOSEN, "index": INDEX, "load": LOAD,
            "dweights": OF_CHOSEN._replace(optional=True), "dbalance": Tensor("", "float32", optional=True)},
    outputs={"dlogits": LOGITS},
    kernel=Program(_run_bwd, (route_slopes,)),
    doc="""Gradient of :func:`route`: of the weights, and of the balance by the mean probabilities.""",
    **_COMMON,
)  # fmt: skip

route = Op(
    "route",
    inputs={"logits": LOGITS},
    outputs={
        "weights": OF_CHOSEN,
        "index": INDEX._replace(upper_bound=None),
        "balance": Tensor("", "float32"),
        "load": LOAD._replace(hidden=True),
    },
    derived={"t": lambda dims, attrs: attrs["k"]},
    kernel=Program(_run, (routed_rows, largest.topk_step, softmax, expert_probabilities, expert_totals)),
    check=check_experts,
    grad=route_bwd,
    doc=f"""The k experts of each token, their weights, and the load-balancing loss.

    ``p = softmax(logits)``; ``index`` the k largest; ``weights = p[index]``, divided by their sum where ``normalize``;
    ``balance = n * sum(mean(p) * load)``, with ``load`` the mean number of times that a token chooses each expert

    Args:
        logits: {docs.ROWS}; n experts, at most {MOST_EXPERTS}.
        k: experts of a token, at most {largest.MOST} and n; a compile-time constant.
        normalize: whether the weights of a token add up to one, as in Mixtral and Qwen3; not in OLMoE.

    Returns:
        ``(weights, index, balance)``: ``T[*m k]``, the largest first, int32 ``[*m k]`` and a float32 scalar. Weights
        and balance have gradients. Softmaxes are in float32, rounded once.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: an attribute out of its range, too many experts, a last dim that is not contiguous.

    Source: Fedus et al., Switch Transformers, 2022; the loss as in Hugging Face's Mixtral.
    """,
    **_COMMON,
)
