"""A rotation whose tables are read at the positions of tokens: declaration, reference maths, cases. The programs of
:mod:`cute_ops.composite.rope_at` call it.
"""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.rotary.rope import COMMON, HEADS, OF_ONE, TABLE, reference, reference_bwd
from cute_ops.ops.routing.gathered import rows_at


def reference_gathered(
    xp: Any, x: Any, positions: Any, cos: Any, sin: Any, *, interleaved: bool, inverse: bool, strict: bool
) -> Any:
    chosen = (rows_at(xp, table, positions) for table in (cos, sin))
    if inverse:
        return reference_bwd(xp, x, *chosen, interleaved=interleaved)[0]
    return reference(xp, x, *chosen, interleaved=interleaved)


gathered_rope = Op(
    "gathered_rope",
    inputs={
        "x": HEADS, "positions": Tensor("*m", "I", upper_bound="p"), "cos": TABLE._replace(shape="p r"),
        "sin": TABLE._replace(shape="p r"),
    },
    outputs={"out": HEADS},
    reference=reference_gathered,
    kernel="cute_ops.kernels.rotary.rope:GatheredRope",
    inference_only="the programs that call it have theirs",
    **{
        **OF_ONE,
        "dtypes": {"T": COMMON["dtypes"]["T"], "I": ("int64", "int32"), "C": COMMON["dtypes"]["C"]},
        "attrs": {"interleaved": False, "inverse": False, "strict": False},
        "cases": (
            Case("llama3-8b", {"m": (2, 67), "h": 32, "d": 128, "r": 64, "p": 131}, {"C": "float32"}),
            Case("one-head", {"m": (131,), "h": 1, "d": 96, "r": 48, "p": 35}),
            Case("odd-head", {"m": (3, 5), "h": 3, "d": 7, "r": 3, "p": 9}, {"I": "int32"}),
            Case("glm4-9b", {"m": (131,), "h": 32, "d": 128, "r": 32, "p": 67}, attrs={"interleaved": True}),
        ),
    },
    doc="""Rotary position embedding at given positions of a table, or its inverse: a step of :func:`rope_at`.

    ``out = rope(x, cos[positions], sin[positions], interleaved)``

    Args:
        x: ``T[*m h d]``; float32, float16 or bfloat16. Heads and positions may have any stride.
        positions: ``I[*m]``, int64 or int32: rows of the tables; NaN in rotated elements for one that is none.
        cos: ``C[p r]``, a float dtype of its own; any strides.
        sin: ``C[p r]``, likewise.
        interleaved: as in :func:`rope`.
        inverse: rotate by the negative angles, as the gradient does.
        strict: a position that is no row of the tables ends the kernel with an error.

    Returns:
        ``T[*m h d]``, compact. Computed in float32, rounded once.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, ``d < 2r``.
    """,
)  # fmt: skip
