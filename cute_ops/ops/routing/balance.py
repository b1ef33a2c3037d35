"""The load-balancing loss of experts, of tokens that may be weighted: a program, its steps, cases.

Trainers of mixtures add it over all layers, and leave out padding: :func:`route` computes it beside the weights of one
layer, without weights of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.expressions.tracing import trace
from cute_ops.ops.expression.formula import Formula, declare
from cute_ops.ops.expression.fused import fused
from cute_ops.ops.routing import topk as largest
from cute_ops.ops.routing.route import check_experts

Arrays = Mapping[str, Any]
CASES = (Case("odd-small", {"m": (15,), "n": 7}, attrs={"k": 3}), Case("qwen3-moe", {"m": (33,), "n": 128}))
ROWS = (Case("odd-small", {"m": (5,), "n": 7}), Case("qwen3-moe", {"m": (33,), "n": 128}))


def _weighted(xp: Any, logits: Any, weight: Any) -> Any:
    return xp.softmax(logits, axis=-1) * weight


def _slope(xp: Any, logits: Any, weight: Any, load: Any) -> Any:
    p = xp.softmax(logits, axis=-1)
    return weight * p * (load - xp.sum(p * load, axis=-1, keepdims=True))


_TOTAL = Formula(
    trace(_weighted, {"logits": "*m n", "weight": "*m 1"}), True, ("logits", "weight"), ("total",), "r", "logits"
)
weighted_expert_totals = declare(
    "weighted_expert_totals", lambda attrs: _TOTAL,
    {"logits": Tensor("*m n", "T"), "weight": Tensor("*m 1", "float32")}, {"total": Tensor("n", "float32")}, {},
    module=__name__, cases=ROWS,
    doc="The sum of the softmax of all rows, each times its weight, in float32 and in a fixed order.",
)  # fmt: skip
expert_slopes = fused(
    _slope, name="expert_slopes", operands={"logits": "*m n", "weight": "*m 1", "load": "n"}, cases=ROWS,
    no_gradient=("weight", "load"),
    doc="Gradient of a sum over experts of ``load`` times the weighted mean of the softmax, to the logits.",
)  # fmt: skip
PARTS = (weighted_expert_totals, expert_slopes)


def _weights(xp: Any, inputs: Arrays) -> tuple[Any, Any]:
    """The weights of tokens, ``[*m]`` in float32, and their sum."""
    logits, weights = inputs["logits"], inputs["token_weights"]
    if weights is None:
        weights = xp.ones(logits.shape[:-1], logits)
    weights = xp.cast(weights, xp.ones((), logits))
    return weights, weights.reshape(-1).sum()


def _run(xp: Any, call: Callable[..., Arrays], inputs: Arrays, attrs: Arrays) -> Arrays:
    logits = inputs["logits"]
    index = call(largest.topk_step, {"x": logits, "index": None}, {"k": attrs["k"]})["found"]
    weights, count = _weights(xp, inputs)
    mean = call(weighted_expert_totals, {"logits": logits, "weight": weights[..., None]}, {})["total"] / count
    of_chosen = xp.rows_of(mean.reshape(-1, 1), index.reshape(-1)).reshape(index.shape).sum(-1)
    return {"balance": (of_chosen * weights).sum() * (logits.shape[-1] / count), "index": index}


def _run_bwd(xp: Any, call: Callable[..., Arrays], inputs: Arrays, attrs: Arrays) -> Arrays:
    logits, index = inputs["logits"], inputs["index"]
    weights, count = _weights(xp, inputs)
    # How often a weighted token chooses each expert.
    like = xp.broadcast_to(weights[..., None], logits.shape)
    chosen = xp.scattered(xp.broadcast_to(weights[..., None], index.shape), index, like)
    load = chosen.reshape(-1, logits.shape[-1]).sum(-2) * (inputs["dbalance"] * logits.shape[-1] / (count * count))
    found = call(expert_slopes, {"logits": logits, "weight": weights[..., None], "load": load}, {})
    return {"dlogits": found["out"]}


_LOGITS, _WEIGHTS = Tensor("*m n", "T"), Tensor("*m", "W", optional=True)
_COMMON: dict[str, Any] = {
    "dtypes": {"T": FLOATS, "W": FLOATS}, "attrs": {"k": 1}, "static": ("n",), "cases": CASES,
}  # fmt: skip
expert_balance_bwd = Op(
    "expert_balance_bwd",
    inputs={"logits": _LOGITS, "index": Tensor("*m t", "int32", upper_bound="n"), "dbalance": Tensor("", "float32"),
            "token_weights": _WEIGHTS},
    outputs={"dlogits": _LOGITS}, kernel=Program(_run_bwd, (expert_slopes,)),
    sharding=Sharding(whole={"m": "has rows that all count for the load of an expert"}),
    doc="Gradient of :func:`expert_balance` by the mean probabilities.", **_COMMON,
)  # fmt: skip
expert_balance = Op(
    "expert_balance",
    inputs={"logits": _LOGITS, "token_weights": _WEIGHTS},
    outputs={"balance": Tensor("", "float32"), "index": Tensor("*m t", "int32", hidden=True)},
    derived={"t": lambda dims, attrs: attrs["k"]},
    kernel=Program(_run, (largest.topk_step, weighted_expert_totals)),
    check=check_experts,
    grad=expert_balance_bwd,
    no_gradient=("token_weights",),
    doc="""The load-balancing loss of tokens with weights, such as those that are no padding.

    ``balance = n * sum(mean(softmax(logits)) * load)``, with ``load`` the mean number of times that a token chooses
    each of n experts, both means by ``token_weights``
    """,
    **_COMMON,
)
