"""Rotary embedding at given positions of a table, as packed and cached tokens have them: composites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.rotary.gathered_rope import gathered_rope
from cute_ops.ops.rotary.rope import HEADS, check

Arrays = Mapping[str, Any]


def _rotated(xp: Any, call: Callable[..., Arrays], x: Any, inputs: Arrays, attrs: Arrays, inverse: bool) -> Any:
    positions, strict = xp.named_rows(inputs["positions"], inputs["cos"].shape[0])
    given = {"x": x, "positions": positions, "cos": inputs["cos"], "sin": inputs["sin"]}
    return call(gathered_rope, given, {**attrs, "inverse": inverse, "strict": strict})["out"]


def _run(xp: Any, call: Callable[..., Arrays], inputs: Arrays, attrs: Arrays) -> Arrays:
    return {"out": _rotated(xp, call, inputs["x"], inputs, attrs, inverse=False)}


def _run_bwd(xp: Any, call: Callable[..., Arrays], inputs: Arrays, attrs: Arrays) -> Arrays:
    return {"dx": _rotated(xp, call, inputs["dout"], inputs, attrs, inverse=True)}


_TABLES = {"positions": Tensor("*m", "I", upper_bound="p"), "cos": Tensor("p r", "C"), "sin": Tensor("p r", "C")}
_COMMON: dict[str, Any] = {
    "dtypes": {"T": FLOATS, "I": ("int64", "int32"), "C": FLOATS}, "attrs": {"interleaved": False}, "static": (),
    "check": check, "cases": (Case("odd-small", {"m": (3, 5), "h": 3, "d": 7, "r": 3, "p": 9}),),
}  # fmt: skip

rope_at_bwd = Op(
    "rope_at_bwd",
    inputs={"dout": HEADS, **_TABLES},
    outputs={"dx": HEADS},
    kernel=Program(_run_bwd, (gathered_rope,)),
    doc="""Gradient of :func:`rope_at` to x: the rotation of ``dout`` by the negative angles.""",
    **_COMMON,
)

rope_at = Op(
    "rope_at",
    inputs={"x": HEADS, **_TABLES},
    outputs={"out": HEADS},
    kernel=Program(_run, (gathered_rope,)),
    grad=rope_at_bwd,
    no_gradient=("cos", "sin"),
    doc="""Rotary position embedding at given positions, as packed sequences and caches have them.

    ``out = rope(x, cos[positions], sin[positions], interleaved)``

    Args:
        x: ``T[*m h d]``: (batch, seqlen, nheads, headdim), or (tokens, nheads, headdim); float32, float16 or bfloat16.
        positions: int64 or int32 ``[*m]``: the position of each token, which all of its heads have.
        cos: ``C[p r]``, a float dtype of its own: the table of all positions. ``2r`` is the rotary dim. No gradient.
        sin: ``C[p r]``, likewise.
        interleaved: pairs are ``(2j, 2j + 1)``, as in GPT-J, instead of ``(j, j + r)``.

    Returns:
        ``T[*m h d]``, compact. Computed in float32, rounded once. A position that the table does not have is an
        error in PyTorch, and gives NaN in JAX.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, ``d < 2r``.

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """,
    **_COMMON,
)
