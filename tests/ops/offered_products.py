"""Every product that the adapters offer, for tests of both: its function's name, what it takes, its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from cute_ops import Op, Tensor
from cute_ops.composite.gated_mlp import gated_mlp
from cute_ops.composite.linear_add_rmsnorm import linear_add_rmsnorm
from cute_ops.composite.mlp import mlp
from cute_ops.composite.qkv_rope import qkv_rope
from cute_ops.composite.rmsnorm_linear import rmsnorm_linear
from cute_ops.expressions import TraceError
from cute_ops.ops import PRODUCTS as NAMED
from cute_ops.ops.gemm import by_call
from cute_ops.ops.gemm.linear import linear
from cute_ops.ops.gemm.named import gated_linear, linear_gelu

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
        order: in which the function takes the op's inputs, by index; empty where it is the op's.
        inputs: its tensors by name.
    """

    name: str
    op: Op
    function: str
    options: Mapping[str, Any]
    attrs: Mapping[str, Any]
    reference: Callable[..., Any]
    order: tuple[int, ...] = ()

    def of(self, adapter: Any) -> Callable[..., Any]:
        """The adapter's function, of the op's inputs in their order."""

        def call(*arrays: Any, **options: Any) -> Any:
            given = [arrays[i] for i in self.order] if self.order else arrays
            return getattr(adapter, self.function)(*given, **{**self.options, **options})

        return call

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


def _mlp(xp: Any, x: Any, w_up: Any, w_down: Any, b_up: Any, b_down: Any) -> Any:
    (hidden,) = linear_gelu.reference(xp, x, w_up, b_up, approximate="none")
    return linear.reference(xp, hidden, w_down) + b_down


PRODUCTS = (
    _of(linear),
    _of(
        by_call.op_of_call(clipped_add, ("n", "*m n"), attrs=(("limit", 2.0),)), "linear_epilogue", "linear",
        {"epilogue": clipped_add, "limit": 2.0},
    ),
    *map(_of, NAMED),
    _of(gated_mlp("pre", False))._replace(reference=_gated_mlp),
    _of(mlp("pre", False))._replace(reference=_mlp, order=(0, 1, 3, 2, 4)),
    _of(linear_add_rmsnorm()),
    _of(rmsnorm_linear("bias"))._replace(order=(0, 2, 1)),
    _of(qkv_rope(64), "qkv_rope", heads=2),
)  # fmt: skip


class Refused(NamedTuple):
    """A call that both adapters refuse in the same words.

    Attributes:
        function: what is called.
        shapes: of its arrays, in float16; ``float32`` where a shape starts with that. None is left out.
        options: its other arguments.
        error: what is raised.
        text: how its message begins.
    """

    function: str
    shapes: tuple[Any, ...]
    options: Mapping[str, Any]
    error: type[Exception]
    text: str

    def arrays(self) -> list[np.ndarray | None]:
        wide = [s is not None and s[:1] == ("float32",) for s in self.shapes]
        return [
            None if s is None else np.ones(s[w:], np.float32 if w else np.float16)
            for s, w in zip(self.shapes, wide, strict=True)
        ]


def reading_none(xp: Any, acc: Any, bias: Any = None) -> Any:
    return acc + bias


def _refused() -> Iterator[Refused]:
    x, weight, wide = (2, 3, 16), (8, 16), ("float32", 8, 16)
    yield Refused("linear", (x, (8, 15)), {}, ValueError, "linear: argument `weight` has k=15, but k=16.\n  x:")
    mixed = "argument `weight` has dtype float32, but T=float16 from `x`.\n  x:"
    yield Refused("linear", (x, wide), {}, TypeError, f"linear: {mixed}")
    yield Refused("gated_mlp", (x, wide, (5, 4)), {}, TypeError, "gated_mlp: argument `w_gate_up` has dtype float32")
    yield Refused(
        "linear_add_rmsnorm", (x, wide, (2, 3, 8), (8,)), {}, TypeError, f"linear_add_rmsnorm: {mixed}",
    )  # fmt: skip
    lead = "argument `weight` has leading dims (3,), but *b=(2,).\n  x:"
    yield Refused("linear", (x, (3, 8, 16)), {}, ValueError, f"linear: {lead}")
    yield Refused(
        "linear", (x, (2, 8, 15)), {"epilogue": "gelu"}, ValueError, "linear: argument `weight` has k=15, but k=16."
    )
    yield Refused("gated_mlp", (x, (3, 8, 16), (3, 5, 4)), {}, ValueError, "gated_mlp: argument `w_gate_up` has lead")
    biased = "mlp: argument `b_up` has n=7, but n=8."
    yield Refused("mlp", (x, weight, (7,), (5, 8)), {}, ValueError, biased)
    yield Refused("mlp", (x, weight, None, (5, 4)), {}, ValueError, "mlp: argument `w_down` has n=4, but n=8.")
    yield Refused("mlp", (x, weight, (8,), None), {}, TypeError, "mlp: argument `w_down` is required, but None was")
    down = "mlp: argument `b_down` has p=4, but p=5."
    yield Refused("mlp", (x, (16, 8), None, (8, 5), (4,)), {"transposed": True}, ValueError, down)
    transposed = "gated_mlp: argument `w_down` has n=5, but n=4."
    yield Refused("gated_mlp", (x, (16, 8), (5, 4)), {"transposed": True, "save": "none"}, ValueError, transposed)
    normed = "rmsnorm_linear: argument `norm_weight` has k=15, but k=16."
    yield Refused("rmsnorm_linear", (x, (15,), weight, (8,)), {"epilogue": "gelu"}, ValueError, normed)
    yield Refused("linear", ((), weight), {}, ValueError, "linear: argument `x` has 0 dims, expected at least 1")
    yield Refused("linear", (x, weight), {"fused": "yes"}, ValueError, "linear: attribute `fused` must be 'auto', 'al")
    # With an epilogue.
    broadcast = "linear: argument `bias` has shape [7], which does not broadcast to [2, 3, 8].\n  x:"
    yield Refused("linear", (x, weight, (7,)), {"epilogue": reading_none}, ValueError, broadcast)
    yield Refused(
        "linear", (x, weight, (8,), (3, 3, 8)), {"epilogue": clipped_add, "limit": 2.0}, ValueError,
        "linear: argument `residual` has shape [3, 3, 8], which does not broadcast to [2, 3, 8].",
    )  # fmt: skip
    few = "linear: the epilogue clipped_add reads `bias`, `residual` besides the product; 1 was given."
    yield Refused("linear", (x, weight, (8,)), {"epilogue": clipped_add, "limit": 2.0}, TypeError, few)
    yield Refused("linear", (x, weight, (8,)), {}, TypeError, "linear: operand 1 was given, but no epilogue that reads")
    yield Refused("linear", (x, weight, None), {"epilogue": reading_none}, TraceError, "reading_none cannot be traced")
    bare, near = {"epilogue": clipped_add}, {"epilogue": clipped_add, "limitt": 2.0}
    pair = (x, weight, (8,), (2, 3, 8))
    yield Refused(
        "linear", pair, bare, TypeError, "linear: the epilogue clipped_add needs `limit`, which was not given."
    )
    unknown = "linear: unknown attribute `limitt` (did you mean limit?); the epilogue clipped_add has `limit`."
    yield Refused("linear", pair, near, TypeError, unknown)
    named = "linear: argument `epilogue` is 'gelo' (did you mean gelu?), expected one of 'bias', 'gelu', 'gelu_tanh', "
    yield Refused("linear", (x, weight), {"epilogue": "gelo"}, ValueError, named)
    kind = "linear: argument `epilogue` must be a function, or a text, got int."
    yield Refused("linear", (x, weight), {"epilogue": 3}, TypeError, kind)
    save = "linear: option `save` is 'h', expected 'pre' or 'none'."
    yield Refused("linear", (x, weight), {"epilogue": "gelu", "save": "h"}, ValueError, save)
    bare = "linear: the epilogue <lambda> must take xp and the product first: (xp, acc, *operands)."
    yield Refused("linear", (x, weight), {"epilogue": lambda acc: acc}, TypeError, bare)
    of_any = "linear: the epilogue <lambda> does not name its operands: write them after the product, and attributes "
    for of_more in (lambda xp, acc, *more: acc + more[0], lambda xp, acc, **more: acc):
        yield Refused("linear", (x, weight, (2, 3, 8)), {"epilogue": of_more}, TypeError, of_any)
    listed = "linear: attribute `limit` is a kernel's constant: give a number or text, not list"
    yield Refused("linear", pair, {"epilogue": clipped_add, "limit": [1]}, TypeError, listed)
    # Nothing where something is needed, and too few dims.
    options: Any
    for function, shapes, options, name in (
        ("linear", (None, weight), {}, "x"), ("linear", (x, None), {"epilogue": "gelu"}, "weight"),
        ("rmsnorm_linear", (None, None, weight), {}, "x"), ("rmsnorm_linear", (x, None, None), {}, "weight"),
        ("gated_linear", (x, None), {}, "weight"), ("gated_mlp", (x, weight, None), {}, "w_down"),
        ("gated_mlp", (x, None, weight), {}, "w_gate_up"),
        ("qkv_rope", (x, (192, 16), None, (3, 32)), {"heads": 2}, "cos"),
    ):  # fmt: skip
        nothing = f"{function}: argument `{name}` is required, but None was given."
        yield Refused(function, shapes, options, TypeError, nothing)
    flat = "linear: argument `weight` has 1 dims, expected 2: T[n k]."
    yield Refused("linear", (x, (16,)), {"transposed": True}, ValueError, flat)
    # What is no text, and no number.
    for function, shapes, options, text in (
        ("linear", (x, weight), {"fused": None}, "attribute `fused` must be str, got None."),
        ("gated_linear", (x, weight), {"activation": 1}, "attribute `activation` must be str, got 1."),
        ("linear_gelu", (x, weight, (8,)), {"approximate": True}, "attribute `approximate` must be str, got True."),
        ("qkv_rope", (x, (192, 16), (3, 32), (3, 32)), {"heads": "2"}, "attribute `heads` must be int, got '2'."),
        ("qkv_rope", (x, (192, 16), (3, 32), (3, 32)), {"heads": None}, "attribute `heads` must be int, got None."),
        ("rmsnorm_linear", (x, None, weight), {"eps": [1]}, "attribute `eps` must be float, got [1]."),
    ):
        yield Refused(function, shapes, options, TypeError, f"{function}: {text}")
    # Those with names.
    yield Refused("linear_gelu", (x, weight, (7,)), {}, ValueError, "linear_gelu: argument `bias` has n=7, but n=8.")
    rows = "linear_add: argument `residual` has leading dims (2, 2), but *m=(2, 3)."
    yield Refused("linear_add", (x, weight, (2, 2, 8)), {}, ValueError, rows)
    halves = "gated_linear: argument `weight` has 2n=7, expected a multiple of 2."
    yield Refused("gated_linear", (x, (7, 16)), {}, ValueError, halves)
    activation = "gated_mlp: attribute `activation` must be 'silu', 'gelu' or 'gelu_tanh', got 'relu'"
    yield Refused("gated_mlp", (x, weight, (5, 4)), {"activation": "relu"}, ValueError, activation)
    every = "mlp: attribute `activation` must be 'gelu', 'gelu_tanh', 'relu', 'relu2', 'silu' or 'quick_gelu', got 'mi"
    yield Refused("mlp", (x, weight, None, (5, 8)), {"activation": "mish"}, ValueError, every)
    saved = "mlp: option `save` is 'h', expected 'pre' or 'none'."
    yield Refused("mlp", (x, weight, None, (5, 8)), {"save": "h"}, ValueError, saved)
    angles = {"heads": 2}
    few_rows = "qkv_rope: argument `cos` has leading dims (2,), expected the last ones of *m=(2, 3), or 1."
    yield Refused("qkv_rope", (x, (192, 16), (2, 32), (2, 32)), angles, ValueError, few_rows)


REFUSED = tuple(_refused())
