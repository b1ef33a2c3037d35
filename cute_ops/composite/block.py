"""Parts of a transformer's block as functions, written once for the arrays of any framework.

They are linear layers with the norm of the residual stream before or after them, or with the rotation of heads after
them; and MLPs, gated and not.
"""

from __future__ import annotations

import math
from typing import Any, Generic

from cute_ops.composite import gated_mlp as gated
from cute_ops.composite import linear_add_rmsnorm as add_rmsnorm
from cute_ops.composite import mlp as plain
from cute_ops.composite import qkv_rope as rotation
from cute_ops.composite import rmsnorm_linear as norm_before
from cute_ops.composite.products import Array, Caller, Products
from cute_ops.composite.public import continued
from cute_ops.declaration.op import Op
from cute_ops.ops.gemm.by_call import Epilogue, weight_shape

_RMSNORM_LINEAR = Caller("rmsnorm_linear", norm_before.op_of_call)


class Block(Generic[Array]):
    """The functions of a framework whose linear layers are given."""

    def __init__(self, products: Products[Array]) -> None:
        self._products = products
        self._linear_add_rmsnorm = products.functions(add_rmsnorm.linear_add_rmsnorm)
        self._qkv_rope = products.functions(rotation.qkv_rope)
        self._gated_mlp = products.functions(gated.gated_mlp)
        self._mlp = products.functions(plain.mlp)

    @continued(add_rmsnorm.DOC)
    def linear_add_rmsnorm(
        self, x: Array, weight: Array, residual: Array, norm_weight: Array, eps: float = 1e-6, *, fused: str = "auto",
        transposed: bool = False,
    ) -> tuple[Array, Array]:  # fmt: skip
        """The last layer of a transformer's block, and the norm that comes next."""
        if self._products.converts():
            x, weight, residual = self._products.operands(x, weight, residual)
        if self._products.tracing():
            eps = self._products.number(eps)
        function = self._linear_add_rmsnorm(transposed)
        return function(x, weight, residual, norm_weight, eps, fused)  # type: ignore[no-any-return]

    @continued(norm_before.DOC)
    def rmsnorm_linear(
        self, x: Array, norm_weight: Array | None, weight: Array, *operands: Array | None, eps: float = 1e-6,
        epilogue: Epilogue = "bias", fused: str = "auto", packed: bool = False, transposed: bool = False,
        halves: bool = False, save: str = "pre", **attrs: Any,
    ) -> Any:  # fmt: skip
        """The norm before a linear layer, the layer, and what happens to its product before that is stored."""
        if self._products.converts():
            x, weight = self._products.operands(x, weight)
        if self._products.tracing():
            eps = self._products.number(eps)
        layout, given = weight_shape(packed, transposed, halves, "rmsnorm_linear"), (x, weight, *operands)
        function, fitted = self._products.with_epilogue(_RMSNORM_LINEAR, epilogue, given, layout, save, attrs)
        return function(x, weight, *fitted, norm_weight, eps, fused)

    @continued(rotation.DOC)
    def qkv_rope(
        self, x: Array, weight: Array, cos: Array, sin: Array, heads: int, *, fused: str = "auto",
        transposed: bool = False,
    ) -> Array:  # fmt: skip
        """The projection to queries, keys and values, and the rotary embedding of queries and keys."""
        size = rotation.head_size(self._products.shape(cos))
        if self._products.converts():
            x, weight = self._products.operands(x, weight)
        return self._qkv_rope(size, transposed)(x, weight, cos, sin, heads, fused)  # type: ignore[no-any-return]

    @continued(gated.DOC)
    def gated_mlp(
        self, x: Array, w_gate_up: Array, w_down: Array, activation: str = "silu", *, fused: str = "auto",
        save: str = "pre", transposed: bool = False, halves: bool = False,
    ) -> Array:  # fmt: skip
        """``out = (activation(x @ gate.T) * (x @ up.T)) @ w_down.T``, where gate and up are the halves of w_gate_up."""
        if self._products.converts():
            x, w_gate_up, w_down = self._products.operands(x, w_gate_up, w_down)
        if columns := self._products.columns_to_vectors(x, w_gate_up, w_down, transposed, fused):
            layout: dict[str, Any] = {"transposed": transposed, "parts": (2,), "apart": halves}
            ops = gated.mlp_ops(transposed)
            hidden = self._apart(ops.gated, x, w_gate_up, (), w_down, (activation, fused), **layout)
            if hidden is not None:
                return self._products.function(ops.linear)(hidden, w_down, fused)  # type: ignore[no-any-return]
            w_gate_up, w_down = self._widened(x, w_gate_up, w_down, columns, **layout)
        packed: Any = w_gate_up
        function = self._gated_mlp(save, transposed, packed.ndim > 2 and not halves, halves)
        return function(x, w_gate_up, w_down, activation, fused)  # type: ignore[no-any-return]

    @continued(plain.DOC)
    def mlp(
        self, x: Array, w_up: Array, b_up: Array | None, w_down: Array, b_down: Array | None = None,
        activation: str = "gelu", *, fused: str = "auto", save: str = "pre", transposed: bool = False,
    ) -> Array:  # fmt: skip
        """``out = activation(x @ w_up.T + b_up) @ w_down.T + b_down``; biases may be None."""
        if self._products.converts():
            x, w_up, w_down = self._products.operands(x, w_up, w_down)
        if columns := self._products.columns_to_vectors(x, w_up, w_down, transposed, fused):
            before, ops, bias = w_up, plain.mlp_ops(transposed), () if b_up is None else (b_up,)
            up, attrs = ops.up[b_up is not None], (activation, fused)
            hidden = self._apart(up, x, w_up, bias, w_down, attrs, transposed=transposed)
            if hidden is not None:
                down, last = (ops.linear, ()) if b_down is None else (ops.biased, (b_down,))
                return self._products.function(down)(hidden, w_down, *last, fused)  # type: ignore[no-any-return]
            w_up, w_down = self._widened(x, w_up, w_down, columns, transposed=transposed)
            if b_up is not None and w_up is not before:
                b_up = self._products.widened(b_up, -1, columns)
        weight: Any = w_up
        function = self._mlp(save, transposed, weight.ndim > 2)
        return function(x, w_up, w_down, b_up, b_down, activation, fused)  # type: ignore[no-any-return]

    def _widened(
        self, x: Any, first: Any, w_down: Any, columns: int, *, transposed: bool, parts: tuple[int, ...] = (),
        apart: bool = True,
    ) -> tuple[Array, Array]:  # fmt: skip
        """The weights of an MLP, of which the first has so many parts, with zeros for more hidden columns; as they are
        where their shapes do not fit together, which the op says.
        """
        shape = _shape(x, w_down, parts, transposed)
        if first.shape != (shape if apart else _packed(shape, transposed)):
            return first, w_down
        wide = self._products.widened(first.reshape(shape), -1 if transposed else -2, columns)
        if not apart:
            wide = wide.reshape((x.shape[-1], -1) if transposed else (-1, x.shape[-1]))
        return wide, self._products.widened(w_down, -2 if transposed else -1, columns)

    def _apart(
        self, op: Op, x: Any, first: Any, bias: tuple[Any, ...], w_down: Any, attrs: tuple[str, str], *,
        transposed: bool, parts: tuple[int, ...] = (), apart: bool = True,
    ) -> Any:  # fmt: skip
        """An MLP's hidden layer in rows that begin at lines of memory, by the op of its first product; None where a
        gradient is wanted, and where shapes do not fit together, which the op of all says.
        """
        shape, n = _shape(x, w_down, parts, transposed), w_down.shape[0 if transposed else -1]
        packed = _packed(shape, transposed)
        if first.shape != (shape if apart else packed):
            return None
        return self._products.apart(op, n, (x, first.reshape(packed), *bias), attrs)


def _shape(x: Any, w_down: Any, parts: tuple[int, ...], transposed: bool) -> tuple[int, ...]:
    """The shape of an MLP's first weight, of so many parts."""
    k, n = x.shape[-1], w_down.shape[0 if transposed else -1]
    return (k, *parts, n) if transposed else (*parts, n, k)


def _packed(shape: tuple[int, ...], transposed: bool) -> tuple[int, int]:
    """The shape of an MLP's first weight as a matrix, its parts one after the other."""
    return (shape[0], math.prod(shape[1:])) if transposed else (math.prod(shape[:-1]), shape[-1])
