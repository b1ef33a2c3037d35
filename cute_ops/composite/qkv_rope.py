"""The projection to queries, keys and values of an attention layer, and the rotary embedding of queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from cute_ops.op import FUSED, Case, Op, Program, Tensor
from cute_ops.ops.gemm.fused import fused_linear
from cute_ops.ops.gemm.linear import product_gradients
from cute_ops.ops.rotary.rope import rope_bwd_joined
from cute_ops.shapes import FLOATS

SIZES = (64, 128)


@cache
def qkv_rope(size: int) -> Op:
    """The op for heads of so many columns.

    ``out = x @ weight.T``, whose first ``heads`` heads are rotated as by :func:`rope`. ``x`` is ``T[*m k]``; the rows
    of ``weight``, ``T[n k]``, are those of queries, of keys and of as many values; ``cos`` and ``sin`` are ``[*#m r]``
    with ``r`` half of a head's columns, and have no gradient. With ``fused="never"`` the framework multiplies and
    rotates.

    Raises:
        ValueError: another size than 64 and 128.
    """
    if size not in SIZES:
        raise ValueError(f"cute.qkv_rope: heads have {size} columns, expected 64 or 128.")
    heads, table = 5 * 8, f"*#m {size // 2}"
    cases = (Case("llama3", {"m": (2, 4096), "n": 48 * size, "k": 32 * size}),)

    def epilogue(xp: Any, acc: Any, cos: Any, sin: Any, *, heads: int) -> Any:
        turned = acc * cos + xp.rotate_half(acc, size) * sin
        return xp.where(xp.arange(acc.shape[-1]) < heads * size, turned, acc)

    def backward(xp: Any, call: Callable[..., Any], inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> Any:
        dout = inputs["dout"]
        every, rotated = dout.shape[-1] // size, attrs["heads"]
        queries = 2 * rotated - every
        by_head = dout.reshape((*dout.shape[:-1], every, size))
        parts = (by_head[..., :queries, :], by_head[..., queries:rotated, :], by_head[..., rotated:, :])
        given = dict(zip(("dq", "dk", "dv"), parts, strict=True))
        found = call(rope_bwd_joined, {**given, "cos": inputs["cos"], "sin": inputs["sin"]}, {})["dqkv"]
        return {"dacc": found.reshape(dout.shape)}

    def reference(xp: Any, dout: Any, cos: Any, sin: Any, *, heads: int, fused: str) -> Any:
        by_head = xp.reshape(dout, (*dout.shape[:-1], dout.shape[-1] // size, size))
        queries = 2 * heads - by_head.shape[-2]
        parts = (by_head[..., :queries, :], by_head[..., queries:heads, :], by_head[..., heads:, :])
        (found,) = rope_bwd_joined.reference(xp, *parts, cos, sin, interleaved=False)
        return xp.reshape(found, dout.shape)

    rows, angles = Tensor("*m n", "T"), Tensor(table, "C")
    turned = Op(
        f"qkv_rope_{size}_bwd", inputs={"dout": rows, "cos": angles, "sin": angles}, outputs={"dacc": rows},
        reference=reference, kernel=Program(backward, (rope_bwd_joined,)), dtypes={"T": FLOATS, "C": FLOATS},
        attrs={"heads": heads, "fused": FUSED}, static=(), cases=cases,
        doc="Gradient of :func:`qkv_rope` to the product.",
    )  # fmt: skip
    return fused_linear(
        epilogue, name=f"qkv_rope_{size}", operands={"cos": table, "sin": table}, attrs={"heads": heads}, cases=cases,
        grad=(turned, *product_gradients("dacc", across=False)), no_gradient=("cos", "sin"),
    )  # fmt: skip
