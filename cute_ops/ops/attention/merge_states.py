"""Two results of attention to parts of the keys as one: declaration, reference maths, cases."""

from __future__ import annotations

import math
from typing import Any

from cute_ops.declaration.array_api import widen
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.attention import config

CASES = (
    Case("llama3-8b-decode", {"m": (65,), "s": 1, "h": 32, "e": 128}),
    Case("qwen3-8b-prefill", {"m": (2,), "s": 67, "h": 8, "e": 128}),
    Case("odd", {"m": (), "s": 5, "h": 3, "e": 7}),
)


def reference(xp: Any, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    wide_a, wide_b, a, b = widen(xp, out_a, out_b, lse_a, lse_b)
    highest = xp.where(a > b, a, b)
    shift = xp.where(highest > -math.inf, highest, xp.zeros_like(highest))
    weights = [xp.exp(lse - shift) for lse in (a, b)]
    total = weights[0] + weights[1]
    some = xp.where(total == 0, xp.ones_like(total), total)
    lse = xp.where(total == 0, xp.full_like(total, -math.inf), xp.log(some) + shift)
    out = xp.zeros_like(wide_a)
    for each, weight in zip((wide_a, wide_b), weights, strict=True):
        share = xp.matrix_transpose(weight / some)[..., None]
        out = out + xp.where(share == 0, xp.zeros_like(each), share * each)
    return xp.astype(out, out_a.dtype), xp.astype(lse, lse_a.dtype)


OUT, LSE = Tensor("*m s h e", "T", merged=True), Tensor("*m h s", "float32", merged=True)
ANY = LSE._replace(contiguous=())

merge_states = Op(
    "merge_states",
    inputs={"out_a": OUT, "lse_a": ANY, "out_b": OUT, "lse_b": ANY},
    outputs={"out": OUT, "lse": LSE},
    dtypes={"T": FLOATS},
    static=("e",),
    sharding=Sharding(parallel=("s", "h")),
    reference=reference,
    kernel="cute_ops.kernels.attention.merge_states:MergeStates",
    tuning=Tuning(config.merge_states),
    cases=CASES,
    inference_only="it combines results of serving; attention to all keys at once has a gradient.",
    doc="""Two results of attention to different keys as the result of attention to all of them.

    ``lse = log(exp(lse_a) + exp(lse_b))``, ``out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b``

    The keys that many sequences begin with are attended to once for all of them, and each one's own keys by
    :func:`decode_attention`. Only one of both may count a sink.

    Args:
        out_a: ``T[*m s h e]``: (batch, queries, heads, headdim), float32, float16 or bfloat16; all dims but the last
            may have any stride.
        lse_a: float32 ``[*m h s]`` of any strides, as :func:`attention` and :func:`decode_attention` return it.
        out_b: ``T[*m s h e]``.
        lse_b: float32 ``[*m h s]``.

    Returns:
        ``out``: ``T[*m s h e]`` and ``lse``: ``float32[*m h s]``, computed in float32. A result whose lse is -inf adds
        nothing, whatever it is; where both are, out is 0. The order of both changes no bit.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, a last dim that is not contiguous.
        NotImplementedError: an input that requires a gradient.

    Source: Juravsky et al., Hydragen: High-Throughput LLM Inference with Shared Prefixes, 2024.
    """,
)
