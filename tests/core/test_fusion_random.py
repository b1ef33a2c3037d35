"""Random neutral graphs: each found expression computes what the graph does, and so does the op that it means.

Graphs are evaluated in float64 on NumPy arrays, node by node, by code that knows nothing of regions. ``python
tests/core/test_fusion_random.py 5000`` runs more of them than the suite.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cute_ops.expressions import evaluate
from cute_ops.expressions.primitives import PRIMITIVES
from cute_ops.expressions.reference import REFERENCE
from cute_ops.fusion import Found, Graph, analyse
from cute_ops.fusion.choose import choose
from cute_ops.fusion.express import COLUMNS, Leaf
from cute_ops.fusion.graph import Node
from cute_ops.ops import OPS

B, T, N = 2, 3, 6
COUNT, CHUNK = 300, 100
_OPS = {op.name: op for op in OPS}
_ONE = (
    "negative",
    "tanh",
    "sigmoid",
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "square",
    "abs",
    "erf",
    "erfc",
    "exp",
    "softplus",
)
_TWO = ("add", "subtract", "multiply", "maximum", "minimum")


def value(node: Node, values: dict[Node, Any]) -> Any:
    """A node's value, from those of its arguments."""
    args = [values[arg] for arg in node.args]
    if node.op == "constant":
        return np.asarray(node.attr, bool if node.dtype == "bool" else np.float64)
    if node.op == "primitive":
        name, more = node.attr if isinstance(node.attr, tuple) else (node.attr, None)
        return np.broadcast_to(REFERENCE[name](np, *args, *([] if more is None else [more])), node.shape)
    if node.op == "reduce":
        primitive, axes, keepdims = node.attr
        return getattr(np, primitive)(args[0], axis=axes, keepdims=keepdims)
    if node.op == "broadcast":
        there = [1] * len(node.shape)
        for dim, size in zip(node.attr, args[0].shape, strict=True):
            there[dim] = size
        return np.broadcast_to(args[0].reshape(there), node.shape)
    if node.op == "slice":
        axis, start, stop, step = node.attr
        return np.take(args[0], range(start, stop, step), axis)
    if node.op == "contract":
        return np.tensordot(args[0], args[1], node.attr[:2])
    one: dict[str, Callable[[], Any]] = {
        "cast": lambda: args[0].astype(np.float64) if node.dtype != "bool" else args[0],
        "reshape": lambda: args[0].reshape(node.shape),
        "transpose": lambda: args[0].transpose(node.attr),
        "concat": lambda: np.concatenate(args, node.attr),
        "opaque": lambda: np.cumsum(args[0], 0),
    }
    return one[node.op]()


def draw(rng: np.random.Generator) -> tuple[Graph, dict[Node, Any]]:
    """A random graph with the values of its inputs."""
    g = Graph()
    inputs = [
        g.input(shape, "float32")
        for shape in ((B, T, N), (B, T, N), (N,), (N,), (B, N), (B, T, 1), (N, N), (N, 2 * N), (B, T, 2 * N), (2 * N,))
    ]
    x, y, weight, bias, batch, scale, square, packed, wide, both = inputs
    tiles = [x, y]

    def pick() -> Node:
        return tiles[-1] if rng.random() < 0.5 else tiles[int(rng.integers(0, len(tiles)))]

    def primitive(name: str, *args: Node) -> Node:
        return g.primitive(name, args, (B, T, N), "float32")

    def number() -> Node:
        return g.constant(float(rng.choice([0.5, 1.0, 2.0, -0.3, 1.702, 0.044715])))

    def reduced(tile: Node) -> Node:
        keepdims = bool(rng.random() < 0.5)
        row = g.reduce(str(rng.choice(["mean", "sum", "max", "min"])), tile, (-1,), keepdims, "float32")
        if rng.random() < 0.5:
            row = g.primitive("tanh", [row], row.shape, "float32")
        return (
            row
            if keepdims
            else g.reshape(row, (B, T, 1))
            if rng.random() < 0.5
            else g.broadcast(row, (B, T, N), (0, 1))
        )

    def norm(tile: Node) -> Node:
        if rng.random() < 0.4:
            tile = primitive("subtract", tile, g.reduce("mean", tile, (-1,), True, "float32"))
        mean = g.reduce("mean", primitive("square", tile), (-1,), True, "float32")
        row = g.primitive("add", [mean, g.constant(1e-3)], (B, T, 1), "float32")
        if rng.random() < 0.5:
            made = primitive("divide", tile, g.primitive("sqrt", [row], (B, T, 1), "float32"))
        else:
            made = primitive("multiply", g.primitive("rsqrt", [row], (B, T, 1), "float32"), tile)
        made = primitive("multiply", made, weight) if rng.random() < 0.7 else made
        return primitive("add", bias, made) if rng.random() < 0.3 else made

    def softmax(tile: Node) -> Node:
        e = primitive("exp", primitive("subtract", tile, g.reduce("max", tile, (-1,), True, "float32")))
        return primitive("divide", e, g.reduce("sum", e, (-1,), True, "float32"))

    def halves(of: Node) -> Node:
        return primitive(str(rng.choice(_TWO)), primitive("silu", g.slice(of, 2, 0, N)), g.slice(of, 2, N, 2 * N))

    def computed(tile: Node) -> Node:
        made = wide if rng.random() < 0.3 else product(tile, packed)
        for _ in range(int(rng.integers(1, 3))):
            other = (both, g.broadcast(both, made.shape), scale, wide, g.cast(made, "bfloat16"))[
                int(rng.integers(0, 5))
            ]
            made = g.primitive(str(rng.choice(_TWO)), [made, g.cast(other, "float32")], made.shape, "float32")
        return made

    def rotated(tile: Node) -> Node:
        low, high = g.slice(tile, 2, 0, N // 2), g.slice(tile, 2, N // 2, N)
        turned = g.primitive("negative", [high], high.shape, "float32")
        return primitive("multiply", g.concat([turned, low], 2, (B, T, N)), bias)

    def rows(tile: Node) -> Node:
        shape = (B * T, N) if rng.random() < 0.5 else (B, 1, T, N)
        both = [g.reshape(tile, shape), g.reshape(pick(), shape)]
        return g.reshape(g.primitive("multiply", both, shape, "float32"), (B, T, N))

    def turned(tile: Node) -> Node:
        other = g.transpose(tile, (1, 0, 2))
        return g.transpose(g.primitive("tanh", [other], other.shape, "float32"), (1, 0, 2))

    def modulated(tile: Node) -> Node:
        shift = g.primitive("silu", [batch], (B, N), "float32")
        return primitive("multiply", tile, g.broadcast(g.reshape(shift, (B, 1, N)), (B, T, N), (0, 1, 2)))

    def chosen(tile: Node) -> Node:
        return primitive("where", g.primitive("less", [scale, g.constant(0.1)], (B, T, 1), "bool"), tile, pick())

    def bools(tile: Node) -> Node:
        both = g.primitive("logical_and", [g.primitive("less", [x, y], (B, T, N), "bool")] * 2, (B, T, N), "bool")
        return primitive("add", tile, g.cast(both, "float32"))

    root = g.constant(math.sqrt(0.5))  # of GELU

    def product(of: Node, by: Node) -> Node:
        return g.contract(of, by, ((2,), (0,)), (B, T, by.shape[1]), "float32")  # type: ignore[arg-type]

    kinds: list[Callable[[Node], Node]] = [
        lambda t: primitive(str(rng.choice(_ONE)), t), lambda t: primitive(str(rng.choice(_TWO)), t, pick()),
        lambda t: primitive(str(rng.choice(_TWO)), t, number()), lambda t: primitive("multiply", t, weight),
        lambda t: primitive("divide", t, primitive("add", g.constant(1.0), primitive("square", pick()))),
        lambda t: primitive("multiply", t, reduced(pick())), lambda t: primitive("add", reduced(pick()), t),
        lambda t: g.cast(g.cast(t, "bfloat16"), "float32"), norm, norm, softmax, rows, turned, modulated, chosen, bools,
        lambda t: primitive("add", product(t, square), bias), lambda t: product(t, square),
        lambda t: halves(product(t, packed)), lambda t: halves(wide), lambda t: halves(computed(t)),
        rotated, lambda t: rotated(product(t, square)),
        lambda t: g.opaque("cumsum", [t], (B, T, N), "float32"),
        lambda t: primitive("subtract", t, g.reduce("mean", t, (0,), True, "float32")),
        lambda t: primitive(
            "multiply", t, primitive("add", g.constant(1.0), primitive("erf", primitive("multiply", t, root)))
        ),
    ]  # fmt: skip
    for _ in range(int(rng.integers(2, 14))):
        tiles.append(kinds[int(rng.integers(0, len(kinds)))](pick()))
    g.outputs = [tiles[-1], *(tiles[i] for i in rng.integers(0, len(tiles), 2))]
    return g, {node: rng.standard_normal(node.shape) * 0.7 for node in inputs}  # type: ignore[arg-type]


def check(seed: int) -> int:
    """Compare what is found in a graph with the graph; returns how many expressions there were."""
    g, values = draw(np.random.default_rng([seed, 5]))
    for node in g.nodes:
        if node not in values:
            values[node] = value(node, values)
    found = analyse(g).found
    position = {root: i for i, each in enumerate(found) for root in each.roots}
    for i, each in enumerate(found):
        assert all(position.get(leaf.node, -1) < i for leaf in each.leaves), "it waits for a later one"
        arrays = [operand(leaf, each, values) for leaf in each.leaves]
        outputs = evaluate(each.expression, np, arrays)
        for root, out in zip(each.roots, outputs, strict=True):
            _same(f"seed {seed}: {each.text}", out, values[root], each)
        if choose(each).kind == "op":
            meaning = each.meaning
            assert meaning is not None
            op = _OPS[meaning.op]
            given = dict.fromkeys(op.inputs) | dict(zip(meaning.operands, arrays, strict=True))
            given |= {k: a.reshape(-1) for k, a in given.items() if k in ("weight", "bias") and a is not None}
            made = op.reference(np, *given.values(), **{**op.keywords, **meaning.attrs})
            named = dict(zip(op.outputs, made if isinstance(made, tuple) else (made,), strict=False))
            for root, name in zip(each.roots, meaning.outputs, strict=True):
                _same(f"seed {seed}: {op.name}", named[name], values[root], each)
    return len(found)


def operand(leaf: Leaf, each: Found, values: dict[Node, Any]) -> Any:
    """A leaf's array, which broadcasts to the values."""
    array = values[leaf.node].astype(np.float64)
    columns = leaf.node.shape[leaf.labels.index(COLUMNS)] if COLUMNS in leaf.labels else 1
    there = tuple(size if i in leaf.labels else 1 for i, size in enumerate(leaf.rows))
    array = array.reshape(*there, columns)
    if leaf.rows == each.rows or not leaf.operand.kind.rows:
        return array
    return np.broadcast_to(array, (*leaf.rows, columns)).reshape(*each.rows, columns)


def _same(what: str, out: Any, want: Any, each: Found) -> None:
    full = np.broadcast_to(out, (*each.rows, out.shape[-1] if want.size == out.size else each.n))
    got = full.reshape(want.shape) if full.size == want.size else full[..., :1].reshape(want.shape)
    scale = max(1.0, float(np.abs(want.astype(np.float64)).max()))
    # Constants of expressions are float32.
    np.testing.assert_allclose(
        got.astype(np.float64), want.astype(np.float64), rtol=1e-5, atol=1e-5 * scale, err_msg=what
    )


@pytest.mark.parametrize("first", range(0, COUNT, CHUNK))
def test_found_expressions_compute_what_the_graph_does(first: int) -> None:
    assert sum(check(seed) for seed in range(first, first + CHUNK)) > CHUNK


def test_every_primitive_is_drawn_or_has_no_front_end() -> None:
    assert {name for name in (*_ONE, *_TWO) if name != "erfc"} <= PRIMITIVES.keys()


if __name__ == "__main__":
    total = int(sys.argv[1])
    print(f"{total} graphs, {sum(map(check, range(total)))} expressions, none wrong")
