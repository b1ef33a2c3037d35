"""Every product that the adapters offer, for tests of both: its function's name, what it takes, its reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from cute_ops import Op, Tensor
from cute_ops.composite.gated_mlp import gated_mlp
from cute_ops.composite.linear_add_rmsnorm import linear_add_rmsnorm
from cute_ops.composite.qkv_rope import qkv_rope
from cute_ops.ops import PRODUCTS as NAMED
from cute_ops.ops.gemm import by_call
from cute_ops.ops.gemm.linear import linear
from cute_ops.ops.gemm.named import gated_linear

ROWS, COLUMNS, TERMS = (3, 4), 24, 16


def clipped_add(xp: Any, acc: Any, bias: Any, residual: Any, *, limit: float) -> Any:
    return xp.clip(acc + bias, -limit, limit) + residual


class Product(NamedTuple):
    """A product.

    Attributes:
        name: its column in the tables of features.
        op: what runs.
        function: what the adapters call it.
        options: keyword arguments of the function.
        attrs: of the op.
        reference: of the op, in array-API style; ``reference(xp, *arrays)``.
        inputs: its tensors by name.
    """

    name: str
    op: Op
    function: str
    options: Mapping[str, Any]
    attrs: Mapping[str, Any]
    reference: Callable[..., Any]

    @property
    def inputs(self) -> dict[str, Tensor]:
        return self.op.inputs

    @property
    def outputs(self) -> int:
        return len(self.op.shown)

    @property
    def differentiable(self) -> tuple[int, ...]:
        return tuple(i for i, name in enumerate(self.inputs) if name in self.op.differentiable)

    def arrays(self, rows: tuple[int, ...] = ROWS, k: int = TERMS, seed: int = 0) -> list[np.ndarray]:
        """Inputs in float32. Angles lack the first of the leading dims."""
        rng = np.random.default_rng(seed)
        sizes = {"m": rows, "k": k, "n": 3 * 64 if "heads" in self.attrs else COLUMNS, "p": 8}
        shapes = [t.of(sizes | {"m": rows[-1:]} if t.broadcast else sizes) for t in self.inputs.values()]
        return [(rng.standard_normal(shape) / 2).astype(np.float32) for shape in shapes]

    def exact(self, xp: Any, *arrays: Any) -> tuple[Any, ...]:
        """The outputs by the reference."""
        found = self.reference(xp, *arrays)
        return found if isinstance(found, tuple) else (found,)


def _of(op: Op, name: str = "", function: str = "", options: Mapping[str, Any] = {}, **attrs: Any) -> Product:
    def reference(xp: Any, *arrays: Any) -> Any:
        return op.reference(xp, *arrays, **{**op.keywords, **attrs})

    return Product(name or op.name, op, function or name or op.name, {**options, **attrs}, attrs, reference)


def _gated_mlp(xp: Any, x: Any, w_gate_up: Any, w_down: Any) -> Any:
    (hidden,) = gated_linear.reference(xp, x, w_gate_up, activation="silu")
    return linear.reference(xp, hidden, w_down)


PRODUCTS = (
    _of(linear),
    _of(
        by_call.op_of(clipped_add, ("n", "*m n"), "n k", attrs=(("limit", 2.0),)), "linear_epilogue", "linear",
        {"epilogue": clipped_add, "limit": 2.0},
    ),
    *map(_of, NAMED),
    _of(gated_mlp("pre", False))._replace(reference=_gated_mlp),
    _of(linear_add_rmsnorm()),
    _of(qkv_rope(64), "qkv_rope", heads=2),
)  # fmt: skip
