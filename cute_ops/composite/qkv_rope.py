"""The projection to queries, keys and values of an attention layer, and the rotary embedding of queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import FUSED, Program
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.gemm.fused import fused_linear
from cute_ops.ops.gemm.linear import product_gradients
from cute_ops.ops.rotary.rope import rope_bwd_joined

SIZES = (64, 128)
DOC = """``out = x @ weight.T``, whose first ``heads`` heads are rotated as by :func:`rope`.

Args:
    x: ``T[*m k]``; bfloat16, float16 or float32; any leading shape.
    weight: ``T[n k]``: rows of queries, then of keys, then of as many values; ``T[k n]`` with ``transposed``.
    cos, sin: ``[*#m r]``, with r half of a head's 64 or 128 columns; any float dtype; leading dims that broadcast.
    heads: how many heads are rotated: those of queries and keys, or all where ``weight`` has no others.
    fused: ``"auto"`` and ``"always"`` rotate in the product's epilogue, ``"never"`` after the framework's product.
    transposed: the weight is ``[k, n]``, as in JAX.

Returns:
    ``T[*m n]``. ``cos`` and ``sin`` have no gradient.

Raises:
    TypeError: a dtype that is not listed.
    ValueError: shapes that do not fit, heads of another size, more or fewer of them than queries and keys can be.
"""


def head_size(cos: tuple[Any, ...]) -> int:
    """The columns of a head, from the shape of ``cos``, which has half of them.

    Raises:
        ValueError: as :data:`DOC` says.
    """
    columns = cos[-1] if cos else 0
    for size in SIZES:  # a constant, also where shapes are symbolic
        if size == 2 * columns:
            return size
    raise ValueError(f"cute.qkv_rope: argument `cos` has {columns} columns, expected 32 or 64: half of a head's.")


def _by_role(by_head: Any, heads: int) -> tuple[Any, Any, Any]:
    """Queries, keys and values of ``(..., heads in all, columns)``, whose first ``heads`` are queries and keys."""
    queries = 2 * heads - by_head.shape[-2]
    return by_head[..., :queries, :], by_head[..., queries:heads, :], by_head[..., heads:, :]


HEADS = 5 * 8  # rotated ones, by default


def qkv_rope(size: int, transposed: bool = False) -> Op:
    """The op for heads of so many columns: see :data:`DOC`.

    Raises:
        ValueError: another size than 64 and 128.
    """
    if size not in SIZES:
        raise ValueError(f"cute.qkv_rope: heads have {size} columns, expected 64 or 128.")
    return _op(size, transposed)


@cache
def _op(size: int, transposed: bool) -> Op:
    table = f"*#m {size // 2}"

    def epilogue(xp: Any, acc: Any, cos: Any, sin: Any, *, heads: int) -> Any:
        turned = acc * cos + xp.rotate_half(acc, size) * sin
        return xp.where(xp.arange(acc.shape[-1]) < heads * size, turned, acc)

    return fused_linear(
        epilogue, name=f"qkv_rope_{size}{'_kn' if transposed else ''}", weight="k n" if transposed else "n k",
        operands={"cos": table, "sin": table}, attrs={"heads": HEADS}, cases=_cases(size),
        check=partial(_problem, size),
        grad=(_turned_back(size), *product_gradients("dacc", across=transposed)), no_gradient=("cos", "sin"),
        called="qkv_rope",
    )  # fmt: skip


def _problem(size: int, binding: Binding) -> str | None:
    """The error text for the number of heads; empty if it is right."""
    n, given = binding.dims["n"], binding.attrs["heads"]
    every = n // size
    if n % size:
        return f"{n} columns are no multiple of the {size} columns of a head."
    if given == every or every < 2 * given <= 2 * every - 2:
        return None
    return f"attribute `heads` is {given}, but {every} heads in all are queries, keys and as many values."


@cache
def _turned_back(size: int) -> Op:
    """The op of the gradient to the product, for weights in either layout."""

    def backward(xp: Any, call: Callable[..., Any], inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> Any:
        dout = inputs["dout"]
        by_head = dout.reshape((*dout.shape[:-1], dout.shape[-1] // size, size))
        given = dict(zip(("dq", "dk", "dv"), _by_role(by_head, attrs["heads"]), strict=True))
        found = call(rope_bwd_joined, {**given, "cos": inputs["cos"], "sin": inputs["sin"]}, {})["dqkv"]
        return {"dacc": found.reshape(dout.shape)}

    def reference(xp: Any, dout: Any, cos: Any, sin: Any, *, heads: int, fused: str) -> Any:
        by_head = xp.reshape(dout, (*dout.shape[:-1], dout.shape[-1] // size, size))
        (found,) = rope_bwd_joined.reference(xp, *_by_role(by_head, heads), cos, sin, interleaved=False)
        return xp.reshape(found, dout.shape)

    rows, angles = Tensor("*m n", "T"), Tensor(f"*#m {size // 2}", "C")
    return Op(
        f"qkv_rope_{size}_bwd", inputs={"dout": rows, "cos": angles, "sin": angles}, outputs={"dacc": rows},
        reference=reference, kernel=Program(backward, (rope_bwd_joined,)), dtypes={"T": FLOATS, "C": FLOATS},
        attrs={"heads": HEADS, "fused": FUSED}, static=(), cases=_cases(size),
        check=partial(_problem, size), doc="Gradient of :func:`qkv_rope` to the product.",
    )  # fmt: skip


def _cases(size: int) -> tuple[Case, ...]:
    return (Case("llama3", {"m": (2, 4096), "n": 48 * size, "k": 32 * size}),)
