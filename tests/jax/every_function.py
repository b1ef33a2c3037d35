"""Every public function of the adapter with small arrays: ops, products, composites, losses and fused expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import cute_ops_jax
from cute_ops import testing
from cute_ops.ops import OPS
from tests.ops.offered_products import PRODUCTS

CLASSES, HIDDEN = 12, 8


class Function(NamedTuple):
    """A function with arrays to call it on.

    Attributes:
        call: it takes the arrays.
        arrays: those with rows have the leading dims that were asked for.
        rows: which of them have rows, by how many leading dims.
        differentiable: the positions of those that have a gradient.
    """

    name: str
    call: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]
    rows: tuple[int, ...]
    differentiable: tuple[int, ...]

    def loss(self, *arrays: Any) -> Any:
        """A number that every result has a share in."""
        found = jax.tree.leaves(self.call(*arrays))
        return sum(jnp.sum(jnp.sin(a.astype(jnp.float32)) * (i + 1)) for i, a in enumerate(found))

    def gradient(self, *arrays: Any) -> Any:
        return jax.grad(self.loss, self.differentiable)(*arrays)


def every(lead: tuple[int, ...]) -> list[Function]:
    """All functions, on arrays with these leading dims."""
    rng = np.random.default_rng(11)
    found = []
    for op in OPS:
        function = testing.plain(op, cute_ops_jax.register(op))
        arrays = tuple(testing.sample(op, lead, HIDDEN, rng))
        rows = tuple(len(lead) if t.rows else 0 for t in op.inputs.values())
        found.append(Function(op.name, function, arrays, rows, testing.argnums(op)))
    for product in PRODUCTS:
        arrays = tuple(product.arrays(lead))
        tensors = product.inputs.values()
        rows = tuple(a.ndim - len(t.dims) if t.rows else 0 for a, t in zip(arrays, tensors, strict=True))
        found.append(Function(product.name, product.of(cute_ops_jax), arrays, rows, product.differentiable))
    for name, call in (*LOSSES.items(), *EXPRESSIONS.items()):
        hidden, weight = (rng.standard_normal(s).astype(np.float32) for s in ((*lead, HIDDEN), (CLASSES, HIDDEN)))
        target = rng.integers(0, CLASSES, lead).astype(np.int32)
        arrays = (hidden, weight, target) if name in LOSSES else (hidden, weight[0])
        found.append(Function(name, call, arrays, (len(lead), 0, len(lead))[: len(arrays)], (0, 1)))
    table = rng.standard_normal((CLASSES, HIDDEN)).astype(np.float32)
    index = rng.integers(0, CLASSES, lead).astype(np.int32)
    found.append(Function("embedding", cute_ops_jax.embedding, (index, table), (len(lead), 0), (1,)))
    return found


def _gelu_add(xp: Any, x: Any, bias: Any) -> Any:
    return xp.gelu(x + bias) * x


def _centred(xp: Any, x: Any, weight: Any) -> Any:
    return (x - xp.mean(x, axis=-1, keepdims=True)) * weight


LOSSES: dict[str, Callable[..., Any]] = {
    "linear_cross_entropy": cute_ops_jax.linear_cross_entropy,
    "linear_cross_entropy none": lambda h, w, t: cute_ops_jax.linear_cross_entropy(h, w, t, reduction="none"),
    "linear_cross_entropy chunks": lambda h, w, t: cute_ops_jax.linear_cross_entropy(h, w, t, chunk_rows=3),
    "cross_entropy mean": lambda h, w, t: cute_ops_jax.cross_entropy(h @ w.T, t),
}
EXPRESSIONS: dict[str, Callable[..., Any]] = {
    "fused elements": cute_ops_jax.fused(_gelu_add),
    "fused rows": cute_ops_jax.fused(_centred),
    "linear plain": lambda x, w: cute_ops_jax.linear(x, jnp.stack([w, 2 * w])),
    "rmsnorm_linear plain": lambda x, w: cute_ops_jax.rmsnorm_linear(x, w, jnp.stack([w, 2 * w])),
}
