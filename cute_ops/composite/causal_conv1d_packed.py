"""A causal convolution of packed sequences, and the states that they end with: composites.

One convolution runs over all tokens as if they were one sequence. Only the first ``w - 1`` tokens of a sequence see
others that are not theirs: those few are computed again, from zeros on, and put in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.conv import causal_conv1d as conv

Arrays = Mapping[str, Any]
Call = Callable[..., Any]


class _Firsts(NamedTuple):
    """The first tokens of each sequence.

    Attributes:
        index: their rows, ``[b, w - 1]``; 0 for those beyond a sequence's end.
        there: which are not beyond it.
        x: the tokens.
    """

    index: Any
    there: Any
    x: Any


def _firsts(xp: Any, inputs: Arrays) -> _Firsts:
    x, ends = inputs["x"], inputs["cu_seqlens"]
    places = xp.offsets(ends[:-1], inputs["weight"].shape[-1] - 1)
    there = places < ends[1:][..., None]
    index = xp.where(there, places, 0 * places)
    return _Firsts(index, there, xp.rows_of(x, index))


def _run(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    given = {"weight": inputs["weight"], "bias": inputs["bias"], "initial_state": None}
    out = call(conv.causal_conv1d, {"x": inputs["x"], **given}, attrs)["out"]
    firsts = _firsts(xp, inputs)
    again = call(conv.causal_conv1d, {"x": firsts.x, **given}, attrs)["out"]
    # What is beyond a sequence's end writes the first token's output once more.
    rows = xp.where(firsts.there[..., None], again, again[:1, :1])
    return {"out": xp.with_rows(out, firsts.index, rows)}


def _run_bwd(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    given = {name: inputs[name] for name in ("weight", "bias")} | {"initial_state": None, "dfinal_state": None}
    firsts, dout = _firsts(xp, inputs), inputs["dout"]
    own = xp.rows_of(dout, firsts.index)
    own = xp.where(firsts.there[..., None], own, 0 * own)
    rest = xp.with_rows(dout, firsts.index, 0 * own)
    found = call(conv.causal_conv1d_bwd, {"x": inputs["x"], "dout": rest, **given}, attrs)
    again = call(conv.causal_conv1d_bwd, {"x": firsts.x, "dout": own, **given}, attrs)
    made = {"dx": xp.plus_rows(found["dx"], firsts.index, again["dx"]), "dweight": found["dweight"] + again["dweight"]}
    return {**made, "dbias": None if inputs["bias"] is None else found["dbias"] + again["dbias"]}


def _states(xp: Any, call: Call, inputs: Arrays, attrs: Arrays) -> Arrays:
    x, ends = inputs["x"], inputs["cu_seqlens"]
    places = xp.offsets(ends[1:] - attrs["length"], attrs["length"])
    there = places >= ends[:-1][..., None]
    rows = xp.rows_of(x, xp.where(there, places, 0 * places))
    return {"states": xp.where(there[..., None], rows, 0 * rows)}


def _check(binding: Binding) -> str | None:
    t = binding.dims["t"]
    if isinstance(t, int) and t < 1:
        return "argument `x` has t=0, expected at least one token."
    return conv.check_width(binding.dims["w"])


def _check_states(binding: Binding) -> str | None:
    length, t = binding.attrs["length"], binding.dims["t"]
    if length < 1:
        return f"attribute `length` is {length}, expected at least 1."
    return "argument `x` has t=0, expected at least one token." if isinstance(t, int) and t < 1 else None


X, WEIGHT, ENDS = Tensor("t n", "T"), Tensor("n w", "W"), Tensor("b+1", "I", upper_bound="t")
BIAS = Tensor("n", "B", optional=True)
_COMMON: dict[str, Any] = {
    "dtypes": {"T": FLOATS, "W": FLOATS, "B": FLOATS, "I": ("int32", "int64")}, "static": (), "check": _check,
    "attrs": {"activation": conv.COMMON["attrs"]["activation"]}, "called": "causal_conv1d_packed",
}  # fmt: skip
_ENDS_DOC = """cu_seqlens: ``I[b+1]``, int32 or int64: where sequences begin, 0 first, and t. Sequences may be empty."""

causal_conv1d_packed_bwd = Op(
    "causal_conv1d_packed_bwd",
    inputs={"x": X, "weight": WEIGHT, "cu_seqlens": ENDS, "dout": X, "bias": BIAS},
    outputs={"dx": X, "dweight": WEIGHT, "dbias": BIAS._replace(optional=False, given="bias")},
    kernel=Program(_run_bwd, (conv.causal_conv1d_bwd,)),
    doc="""Gradients of :func:`causal_conv1d_packed`.""",
    **_COMMON,
)

causal_conv1d_packed = Op(
    "causal_conv1d_packed",
    inputs={"x": X, "weight": WEIGHT, "cu_seqlens": ENDS, "bias": BIAS},
    outputs={"out": X},
    kernel=Program(_run, (conv.causal_conv1d,)),
    grad=causal_conv1d_packed_bwd,
    cases=(Case("odd-small", {"t": 15, "n": 7, "w": 4, "b": 3}),),
    doc=f"""Causal depthwise convolution along packed sequences, each of which begins with zeros.

    ``out_t = activation(bias + sum_j weight[:, j] * x_(t - w + 1 + j))``, of tokens of the same sequence

    Args:
        x: ``T[t n]``: (tokens, channels); float32, float16 or bfloat16.
        weight: ``W[n w]``, a float dtype of its own; width 2, 3 or 4.
        {_ENDS_DOC}
        bias: ``B[n]``, a float dtype of its own; zeros where None.
        activation: "none" or "silu".

    Returns:
        ``T[t n]``. Computed in float32, rounded once; of the gradients those of the first tokens, the weight and the
        bias are sums of two that are rounded.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, another width, no token.

    Source: Dao and Gu, Transformers are SSMs, 2024.
    """,
    **_COMMON,
)

causal_conv1d_states = Op(
    "causal_conv1d_states",
    inputs={"x": X, "cu_seqlens": ENDS},
    outputs={"states": Tensor("b l n", "T")},
    dtypes={"T": FLOATS, "I": ("int32", "int64")},
    attrs={"length": 3},
    derived={"l": lambda dims, attrs: attrs["length"]},
    static=(),
    kernel=Program(_states),
    check=_check_states,
    inference_only="train without states (causal_conv1d_packed)",
    cases=(Case("odd-small", {"t": 15, "n": 7, "b": 3}),),
    doc=f"""The last tokens of packed sequences: the state with which :func:`causal_conv1d` goes on. Inference only.

    ``states[i] = x[cu_seqlens[i + 1] - length : cu_seqlens[i + 1]]``, zeros before the sequence's first token

    Args:
        x: ``T[t n]``: (tokens, channels); float32, float16 or bfloat16.
        {_ENDS_DOC}
        length: tokens of a state, the width of the convolution less one.

    Returns:
        ``T[b length n]``, the oldest token first: the ``initial_state`` of what follows.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, a length below 1, no token.
        NotImplementedError: a gradient is asked for.

    Source: Dao and Gu, Transformers are SSMs, 2024.
    """,
)
