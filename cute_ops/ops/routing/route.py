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
from cute_ops.declaration.split import Sharding
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
expert_totals = declare(
    "expert_totals", lambda attrs: _TOTAL, {"logits": Tensor("*m n", "T")}, {"total": Tensor("n", "float32")}, {},
    module=__name__, cases=expert_probabilities.cases,
    doc="The sum of the softmax of all rows, in float32 and in a fixed order.",
)  # fmt: skip


def _routed(xp: Any, logits: Any, *, k: int, normalize: bool) -> tuple[Any, Any, Any]:
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
    balance = xp.sum(xp.sum(rows, axis=0) / count * (xp.sum(xp.astype(chosen, rows.dtype), axis=0) / count)) * n
    return xp.astype(weights, logits.dtype), index, balance


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
    count = max(math.prod(logits.shape[:-1]), 1)
    mean = call(expert_totals, {"logits": logits}, {})["total"] / count
    # The sum over the experts of mean * load is that of the means of all experts that are chosen.
    of_chosen = xp.rows_of(mean.reshape(-1, 1), found["found"].reshape(-1))
    balance = of_chosen.sum() * (logits.shape[-1] / count)
    return {"weights": weights, "index": found["found"], "balance": balance}


def _load(xp: Any, probabilities: Any, index: Any) -> Any:
    """How often a token chooses each expert."""
    rows = probabilities.reshape(-1, probabilities.shape[-1])
    ones = xp.broadcast_to(xp.ones((), rows), (rows.shape[0], index.shape[-1]))
    chosen = xp.scattered(ones, index.reshape(-1, index.shape[-1]), rows)
    return xp.sums(chosen, (-2,), rows) / max(rows.shape[0], 1)


def _run_bwd(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    logits, index, dweights, dbalance = (inputs[name] for name in ("logits", "index", "dweights", "dbalance"))
    probabilities = _probabilities(xp, call, logits)
    w, d = (None if a is None else xp.cast(a, probabilities) for a in (inputs["weights"], dweights))
    slope, direct = None, None
    if d is not None and attrs["normalize"]:
        direct = xp.scattered(w * (d - (w * d).sum(-1)[..., None]), index, probabilities)
    elif d is not None:
        slope = xp.scattered(d, index, probabilities)
    if dbalance is not None:
        count = max(probabilities.reshape(-1, logits.shape[-1]).shape[0], 1)
        load = _load(xp, probabilities, index)
        of_mean = xp.broadcast_to(dbalance * load * (logits.shape[-1] / count), logits.shape)
        slope = of_mean if slope is None else slope + of_mean
    total = probabilities * 0 if direct is None else direct
    if slope is not None:
        total = total + probabilities * (slope - (probabilities * slope).sum(-1)[..., None])
    return {"dlogits": xp.cast(total, logits)}


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
_COMMON: dict[str, Any] = {
    "dtypes": {"T": FLOATS}, "attrs": {"k": 1, "normalize": True}, "static": ("n",), "cases": CASES,
}  # fmt: skip

routed_rows = Op(
    "routed_rows",
    inputs={"logits": LOGITS},
    outputs={"weights": OF_CHOSEN, "index": INDEX._replace(upper_bound=None), "balance": Tensor("", "float32")},
    derived={"t": lambda dims, attrs: attrs["k"]},
    reference=_routed,
    kernel="cute_ops.kernels.routing.route:RoutedRows",
    tuning=Tuning(config.routed, workspace=config.expert_sums),
    check=check_few,
    inference_only="route has one",
    doc=f"""All that :func:`route` returns, of at most {config.SORTED_MOST} experts of a token, in one pass.""",
    **_COMMON,
)

route_bwd = Op(
    "route_bwd",
    inputs={"logits": LOGITS, "weights": OF_CHOSEN, "index": INDEX,
            "dweights": OF_CHOSEN._replace(optional=True), "dbalance": Tensor("", "float32", optional=True)},
    outputs={"dlogits": LOGITS},
    sharding=Sharding(whole={"m": "has rows that all count for the load of an expert"}),
    kernel=Program(_run_bwd, (expert_probabilities,)),
    doc="""Gradient of :func:`route`: of the weights, and of the balance by the mean probabilities.""",
    **_COMMON,
)  # fmt: skip

route = Op(
    "route",
    inputs={"logits": LOGITS},
    outputs={"weights": OF_CHOSEN, "index": INDEX._replace(upper_bound=None), "balance": Tensor("", "float32")},
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
