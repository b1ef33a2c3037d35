"""The neutral graph: normal forms, regions, canonical texts, meanings, and work that is linear in the graph's size."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from cute_ops.expressions import evaluate, text_of, trace
from cute_ops.fusion import Graph, analyse, repeated
from cute_ops.fusion.canonical import canonical
from cute_ops.fusion.choose import choose
from cute_ops.fusion.express import express
from cute_ops.fusion.graph import Node
from cute_ops.fusion.match import meaning_of
from cute_ops.garbage import without_collections

ROWS = (2, 3, 8)


def primitive(g: Graph, name: str, *args: Node) -> Node:
    shape = max((a.shape for a in args), key=lambda shape: (len(shape), [-(size == 1) for size in shape]))
    return g.primitive(name, args, shape, args[0].dtype)


def rms(g: Graph, x: Node, keepdims: bool = True) -> Node:
    mean = g.reduce("mean", primitive(g, "square", x), (-1,), keepdims, "float32")
    r = primitive(g, "rsqrt", primitive(g, "add", mean, g.constant(1e-6)))
    return primitive(g, "multiply", x, r if keepdims else g.reshape(r, (2, 3, 1)))


NORMS = {
    "kept dims": lambda g, x, w: primitive(g, "multiply", rms(g, x), w),
    "squeezed": lambda g, x, w: primitive(g, "multiply", w, rms(g, x, keepdims=False)),
    "narrow in between": lambda g, x, w: primitive(g, "multiply", w, g.cast(g.cast(rms(g, x), "bfloat16"), "float32")),
    "weight first": lambda g, x, w: primitive(
        g, "multiply", primitive(g, "multiply", x, w), primitive(g, "divide", rms(g, x), x)
    ),
}


@pytest.mark.parametrize("how", ["kept dims", "squeezed", "narrow in between"])
def test_one_meaning_has_one_text(how: str) -> None:
    g = Graph()
    x, w = g.input(ROWS, "float32"), g.input((8,), "float32")
    g.outputs = [NORMS[how](g, x, w)]
    (found,) = analyse(g).found
    want = "e1(t,r) square 0; mean 2; add 3 9.999999974752427e-07; rsqrt 4; multiply 0 5; multiply 1 6 -> 7"
    assert found.text == want
    assert found.meaning is not None
    assert (found.meaning.op, found.meaning.operands, found.meaning.attrs) == (
        "rmsnorm",
        ("x", "weight"),
        {"eps": 1e-6},
    )
    assert choose(found).name == "rmsnorm"


def test_exact_text_keeps_roundings() -> None:
    g = Graph()
    x, w = g.input(ROWS, "bfloat16"), g.input((8,), "bfloat16")
    g.outputs = [primitive(g, "multiply", w, g.cast(rms(g, g.cast(x, "float32")), "bfloat16"))]
    assert analyse(g).found[0].meaning is not None
    (exact,) = analyse(g, exact=True).found
    assert exact.meaning is None
    assert "astype" in exact.text
    assert choose(exact, exact=True).name == "fused"


@pytest.mark.parametrize(
    "function",
    [
        lambda xp, x, w: (x * xp.rsqrt(xp.mean(xp.square(x), axis=-1, keepdims=True) + 1e-6)) * w,
        lambda xp, x, w: x * (w * xp.rsqrt(1e-6 + xp.mean(x * x, axis=-1, keepdims=True))),
        lambda xp, x, w: w * (x / xp.sqrt(xp.sum(x * x, axis=-1, keepdims=True) / x.shape[-1] + 1e-6)),
    ],
)
def test_products_are_sorted_and_roots_are_factors(function) -> None:  # type: ignore[no-untyped-def]
    made = canonical(trace(function, {"x": "*m n", "w": "n"}))
    want = "e1(t,r) square 0; mean 2; add 3 1e-06; rsqrt 4; multiply 0 5; multiply 1 6 -> 7"
    assert made.text == want


def test_operands_have_an_order_that_no_name_decides() -> None:
    one = trace(lambda xp, g, u, b: xp.silu(g + b) * u, {"g": "*m n", "u": "*m n", "b": "n"})
    other = trace(lambda xp, b, u, g: xp.silu(g + b) * u, {"b": "n", "u": "*m n", "g": "*m n"})
    first, second = canonical(one), canonical(other)
    assert first.text == second.text
    names = [("g", "u", "b")[i] for i in first.operands]
    assert names == [("b", "u", "g")[i] for i in second.operands]


def test_canonical_form_computes_the_same() -> None:
    rng = np.random.default_rng(5)
    function = lambda xp, x, y, w: (x * 0.5 * (1 + xp.tanh(y * 3)) / (1 + w * w), x + y + w - 2)  # noqa: E731
    expression = trace(function, {"x": "*m n", "y": "*m n", "w": "n"})
    arrays = [rng.standard_normal((3, 4)), rng.standard_normal((3, 4)), rng.standard_normal(4)]
    made = canonical(expression)
    want = evaluate(expression, np, arrays)
    got = evaluate(made.expression, np, [arrays[i] for i in made.operands])
    for k, out in zip(made.outputs, got, strict=True):
        np.testing.assert_allclose(out, want[k], rtol=1e-6)


def test_meanings_differ_by_their_numbers() -> None:
    for offset, op in ((1.0, "rmsnorm"), (2.0, None)):
        expression = trace(
            lambda xp, x, w: x * xp.rsqrt(xp.mean(xp.square(x), axis=-1, keepdims=True) + 1e-5) * (offset + w),  # noqa: B023
            {"x": "*m n", "w": "n"},
        )
        found = meaning_of(canonical(expression).expression)
        assert (found and found.op) == op
        assert found is None or found.attrs == {"weight_offset": 1.0, "eps": 1e-5}


def test_what_comparisons_read_stays_rounded() -> None:
    g = Graph()
    x = g.input(ROWS, "bfloat16")
    y = primitive(g, "multiply", x, g.constant(3.0))
    more = g.primitive("less", [g.constant(1.0), y], ROWS, "bool")
    g.outputs = [g.primitive("where", [more, primitive(g, "tanh", y), x], ROWS, "bfloat16")]
    (found,) = analyse(g).found
    assert "astype 1 bfloat16; less 1.0 2" in found.text


def test_regions_never_wait_for_each_other() -> None:
    """A value that leaves a region and comes back by a product is computed in a region of its own."""
    g = Graph()
    x, w = g.input(ROWS, "float32"), g.input((8, 8), "float32")
    first = primitive(g, "tanh", primitive(g, "square", x))
    product = g.contract(first, w, ((2,), (0,)), ROWS, "float32")
    g.outputs = [primitive(g, "add", primitive(g, "silu", product), first)]
    analysis = analyse(g)
    assert [found.text for found in analysis.found] == ["e1(t) square 0; tanh 1 -> 2", "e1(t,t) silu 1; add 0 2 -> 3"]
    assert analysis.products(analysis.found[1]) == [[leaf.node for leaf in analysis.found[1].leaves].index(product)]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda g, x: g.transpose(x, (1, 0, 2)), "transpose"),
        (lambda g, x: g.reduce("sum", x, (0,), False, "float32"), "sum over other dims than the last"),
        (lambda g, x: g.reshape(x, (2, 3, 2, 4)), "reshape within rows"),
        (lambda g, x: g.slice(x, 2, 1, 5), "slice of other columns than a half"),
        (lambda g, x: g.opaque("cumsum", [x], ROWS, "float32"), "cumsum"),
        (lambda g, x: g.cast(x, "float8_e4m3fn"), "cast of float8_e4m3fn"),
        (lambda g, x: g.cast(x, "float64"), "cast of float64"),
    ],
)
def test_what_no_expression_computes_is_named(make, why) -> None:  # type: ignore[no-untyped-def]
    g = Graph()
    made = make(g, g.input(ROWS, "float32"))
    g.outputs = [made]
    assert analyse(g).reasons == {made: why}


def test_means_over_other_dims_have_columns() -> None:
    """A norm of rows that were averaged over tokens, as before a classifier."""
    g = Graph()
    pooled = g.reduce("mean", g.input((2, 3, 5, 8), "float32"), (2,), False, "float32")
    g.outputs = [rms(g, pooled)]
    assert [each.text.split()[0] for each in analyse(g).found] == ["e1(t)"]
    assert len(analyse(g).found[0].leaves) == 1


COLUMNS_OF_ROWS = {
    "more dims before the last": lambda g, x: g.reshape(x, (2, 1, 3)),
    "kept, then exchanged": lambda g, x: g.transpose(g.reshape(x, (2, 3, 1)), (0, 2, 1)),
    "fewer dims than the primitive": lambda g, x: x,
    "copied": lambda g, x: g.broadcast(x, (2, 4, 3), (0, 2)),
}


@pytest.mark.parametrize("how", COLUMNS_OF_ROWS)
def test_rows_that_become_columns_are_computed_before(how: str) -> None:
    """A softmax over keys with a number that is computed from each key."""
    g = Graph()
    keys, scores = g.input((2, 3, 8) if how != "fewer dims than the primitive" else (3, 8), "float32"), (2, 4, 3)
    of_keys = COLUMNS_OF_ROWS[how](g, g.reduce("max", keys, (len(keys.shape) - 1,), False, "float32"))
    y = g.primitive(
        "exp", [g.primitive("add", [g.input(scores, "float32"), of_keys], scores, "float32")], scores, "float32"
    )
    total = g.reduce("sum", y, (2,), True, "float32")
    g.outputs = [g.primitive("divide", [y, total], scores, "float32")]
    kind = "r" if how == "fewer dims than the primitive" else "t"
    assert analyse(g).found[-1].text == f"e1(t,{kind}) add 0 1; exp 2; sum 3; divide 3 4 -> 5"


def layers(count: int, n: int = 8) -> Graph:
    """A residual network: 14 nodes a layer."""
    g = Graph()
    rows = (*ROWS[:-1], n)
    x, w = g.input(rows, "float32"), g.input((n, n), "float32")
    for _ in range(count):
        y = rms(g, x)
        y = g.contract(y, w, ((2,), (0,)), rows, "float32")
        x = primitive(g, "add", x, primitive(g, "multiply", primitive(g, "silu", y), primitive(g, "tanh", y)))
    g.outputs = [x]
    return g


def test_work_grows_with_the_graph_alone() -> None:
    """Counted, not timed: how often a node is looked at, and what all expressions together hold."""
    small, large = layers(20), layers(80)
    one, four = analyse(small), analyse(large)
    assert four.visits == pytest.approx(4 * one.visits, rel=0.05)
    nodes = [sum(len(found.expression.nodes) for found in each.found) for each in (one, four)]
    assert nodes[1] == pytest.approx(4 * nodes[0], rel=0.05)
    assert len({found.text for found in four.found}) <= 4


def test_halves_of_sums_are_sums_of_halves() -> None:
    """A gate of a product with a bias, as diffusion models have it."""
    g = Graph()
    x, w, b = g.input(ROWS, "float32"), g.input((8, 12), "float32"), g.input((12,), "float32")
    y = primitive(g, "add", g.contract(x, w, ((2,), (0,)), (2, 3, 12), "float32"), b)
    g.outputs = [primitive(g, "multiply", primitive(g, "gelu", g.slice(y, 2, 0, 6)), g.slice(y, 2, 6, 12))]
    analysis = analyse(g)
    (found,) = analysis.found
    assert found.text == "e1(2t,2r) add 0[n:] 1[n:]; add 0[:n] 1[:n]; gelu 3; multiply 2 4 -> 5"
    assert analysis.products(found) == [0]


def test_halves_of_what_was_reduced_are_no_part_of_it() -> None:
    g = Graph()
    y = rms(g, g.input(ROWS, "float32"))
    g.outputs = [primitive(g, "multiply", g.slice(y, 2, 0, 4), g.slice(y, 2, 4, 8))]
    assert set(analyse(g).reasons.values()) == {"slice of a computed value"}


def test_layers_that_are_alike_are_expressed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    expressed: list[object] = []
    monkeypatch.setattr(repeated, "express", lambda *args: expressed.append(args) or express(*args))
    monkeypatch.setattr(repeated, "_kept", {})
    found = analyse(layers(80)).found
    assert 0 < len(expressed) <= 4
    before, wider = len(expressed), analyse(layers(3, n=20)).found
    assert len(expressed) == before
    assert {found.n for found in wider} == {20}
    assert {found.rows for found in wider} == {ROWS[:-1]}
    assert {found.text for found in wider} == {one.text for one in found}
    for one in found:  # of its own region
        assert {*one.roots} <= {*one.region.nodes}
        assert not {leaf.node for leaf in one.leaves} & {*one.region.nodes}


def test_text_of_a_found_expression_is_read_back() -> None:
    from cute_ops.expressions import parse

    for found in analyse(layers(2)).found:
        assert text_of(parse(found.text)) == found.text


def test_no_garbage_is_collected_while_a_graph_is_read() -> None:
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            with without_collections():
                assert not gc.isenabled()
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
