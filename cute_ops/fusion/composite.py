"""Parts of a layer that several expressions and products make up: MLPs with and without a gate, projections to rotated
heads, and the last product of a block with the norm after it.

One op computes such a part, with one gradient: products of one input become one, activations and rotations move into
epilogues, and what the gradient can compute again is not kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from math import isclose
from typing import Any, NamedTuple

from cute_ops.expressions.tracing import trace
from cute_ops.fusion.analyse import Analysis, Found, is_linear
from cute_ops.fusion.canonical import canonical, with_holes
from cute_ops.fusion.choose import is_whole
from cute_ops.fusion.graph import Graph, Node, Shape
from cute_ops.fusion.match import Meaning
from cute_ops.fusion.named import Named
from cute_ops.ops.activation.maths import activated
from cute_ops.ops.gemm.mlp_products import ACTIVATIONS

NAMES = ("gated_mlp", "mlp", "qkv_rope", "linear_add_rmsnorm")
# What multiplies an activation by something, of two tiles or of both halves of one.
_GATED = ("silu_mul", "gelu_mul", "swiglu", "geglu")


class Composite(NamedTuple):
    """A part of a layer.

    Attributes:
        name: one of :data:`NAMES`, or ``attention``.
        operands: its arguments.
        attrs: its attributes.
        roots: the nodes that it computes, which others read.
        nodes: those and all that it computes on the way.
        found: the expressions among them.
    """

    name: str
    operands: Mapping[str, Node]
    attrs: Mapping[str, Any]
    roots: tuple[Node, ...]
    nodes: tuple[Node, ...]
    found: tuple[Found, ...] = ()

    @property
    def text(self) -> str:
        return ", ".join([*self.operands, *filter(None, [self.attrs.get("said", "")])])

    @property
    def rows(self) -> Shape:
        return self.roots[0].shape[:-1]

    @property
    def n(self) -> int | str | None:
        return self.roots[0].shape[-1]


def cuts(parts: list[Composite], analysis: Analysis) -> set[Node]:
    """What ends or begins a region, since a part computes what is before it or behind it: results of parts that others
    compute on the way to something else, and casts of what parts read that others compute with it.
    """
    own = {found for part in parts for found in part.found}
    results = {root for part in parts for root in part.roots}
    read = {node for part in parts for node in part.operands.values()}
    others = [found for found in analysis.found if found not in own]
    inside = {node for found in others for node in found.region.nodes}
    casts = {user for node in read & inside for user in node.users if user.op == "cast" and user in inside}
    roots = {root for found in others for root in found.region.roots}
    return (inside & results) | {cast for cast in casts if cast.args[0] not in roots}


def composites(graph: Graph, analysis: Analysis) -> list[Composite]:
    """The parts of layers in a graph; no two of them have a node in common."""
    parts = _Parts(graph, analysis)
    found: list[Composite] = []
    taken: set[Node] = set()
    for each in (*parts.gated_mlps(), *parts.plain_mlps(), *parts.rotated_heads(), *parts.adding_norms()):
        if taken.isdisjoint(each.nodes):
            found.append(each)
            taken.update(each.nodes)
    return found


def rotations(analysis: Analysis) -> list[Composite]:
    """The rotations of heads, each with the order in which ``rope`` takes the dims of its value, and its table's shape.

    Attributes of each: ``order`` of the value's dims, heads and columns last, or None where the value gets a dim of one
    head, ``table``, the shape of both tables, and ``interleaved``.
    """
    found = []
    for call in analysis.calls:
        if call.named.op == "rope":
            order, table = _heads_last(call.named)
            attrs = {**call.named.attrs, "order": order, "table": table}
            operands = dict(zip(call.named.operands, call.named.nodes, strict=True))
            found.append(Composite("rope", operands, attrs, call.roots, call.roots))
    return found


def _heads_last(call: Named) -> tuple[tuple[int, ...] | None, Shape]:
    x, table = call.shapes[:2]
    rank = len(call.nodes[0].shape)
    if len(x) == rank:
        return tuple(range(rank)), table
    shared = [i for i, size in enumerate(table[:-1]) if size == 1 and i]  # heads that have one angle
    if not shared:
        return None, table
    heads = shared[-1]
    return (*(i for i in range(rank - 1) if i != heads), heads, rank - 1), (*table[:heads], *table[heads + 1 :])


class _Parts:
    def __init__(self, graph: Graph, analysis: Analysis) -> None:
        self.analysis, self.outputs = analysis, set(graph.outputs)
        self.live = analysis.live
        self.products = [node for node in graph.nodes if node in self.live and is_linear(node)]
        self.of_root = {root: each for each in analysis.found for root in each.roots}
        self.calls = {each.roots[0]: each.named for each in analysis.calls}

    # Gated MLPs

    def gated_mlps(self) -> Iterator[Composite]:
        """Products of what an activation of one product of x times another product of x is, or of halves of one."""
        for down in self.products:
            hidden, w_down = down.args
            gated = self.of_root.get(hidden)
            meaning = None if gated is None or len(gated.roots) > 1 else gated.meaning
            if gated is None or meaning is None or meaning.op not in _GATED:
                continue
            halves = _halves_of(gated, meaning)
            first, inside = halves[0], set(gated.region.nodes)
            alone = self._are_read_only_by(halves, inside) and self._is_read_only_by(hidden, {down})
            alike = _are_alike(halves) and first.attr[1] == down.attr[1] and _one_dtype(*halves, hidden, down)
            if not (alone and alike and _has_rows_of(gated, halves)):
                continue
            x, weights = first.args[0], [each.args[1] for each in halves]
            names = ("w_gate", "w_up") if len(halves) == 2 else ("w_gate_up",)
            operands = {"x": x, **dict(zip(names, weights, strict=True)), "w_down": w_down}
            attrs = {"activation": _activation(meaning), "transposed": first.attr[1] == (0,)}
            yield Composite("gated_mlp", operands, attrs, (down,), (*halves, *inside, down), (gated,))

    def plain_mlps(self) -> Iterator[Composite]:
        """Products of what an activation of one product of x is, with and without biases."""
        for down in self.products:
            hidden, w_down = down.args
            active = self.of_root.get(hidden)
            known = None if active is None or len(active.roots) > 1 else _activation_of(active)
            if active is None or known is None:
                continue
            given = dict(zip(known[1], (leaf.node for leaf in active.leaves), strict=True))
            up, inside = given["acc"], set(active.region.nodes)
            alone = is_linear(up) and self._is_read_only_by(up, inside) and self._is_read_only_by(hidden, {down})
            alone = alone and _has_rows_of(active, [up])
            if not (alone and up.attr[1] == down.attr[1] and _one_dtype(up, hidden, down)):
                continue
            operands = {"x": up.args[0], "w_up": up.args[1], "w_down": w_down}
            operands |= {"b_up": given["bias"]} if "bias" in given else {}
            attrs = {"activation": known[0], "transposed": up.attr[1] == (0,)}
            nodes: tuple[Node, ...] = (up, *inside, down)
            root = down
            if (after := self._with_bias(down)) is not None:
                root, operands["b_down"] = after
            yield Composite("mlp", operands, attrs, (root,), (*nodes, root), self._within((*nodes, root)))

    def _with_bias(self, product: Node) -> tuple[Node, Node] | None:
        """The sum of a product and a bias, and the bias, where nothing else reads the product."""
        readers = {user for user in product.users if user in self.live}
        total = next(iter(readers)) if len(readers) == 1 and product not in self.outputs else product
        if (total.op, total.attr, total.shape, total.dtype) != ("primitive", "add", product.shape, product.dtype):
            return None
        bias = _row(total.args[0] if total.args[1] is product else total.args[1])
        return (total, bias) if bias.shape == product.shape[-1:] else None

    def _within(self, nodes: tuple[Node, ...]) -> tuple[Found, ...]:
        """The expressions of these nodes and of no others."""
        inside = set(nodes)
        found = dict.fromkeys(each for node in nodes if (each := self.of_root.get(node)) is not None)
        return tuple(each for each in found if inside.issuperset(each.region.nodes))

    # Projections to heads

    def rotated_heads(self) -> Iterator[Composite]:
        """Products of one input whose heads are rotated by the same angles, and a third one as large as the second."""
        by_input: dict[tuple[Node, Node, Node, int], list[_Heads]] = {}
        for root, call in self.calls.items():
            heads = self._heads(root, call)
            if heads is not None:
                key = heads.product.args[0], heads.cos, heads.sin, heads.size
                by_input.setdefault(key, []).append(heads)
        for (x, cos, sin, size), found in by_input.items():
            if len(found) != 2:
                continue
            q, k = sorted(found, key=lambda each: -_columns(each.product))
            if k.product.attr != q.product.attr or k.table != q.table or not _one_dtype(q.product, k.product):
                continue
            values = [v for v in self.products if v.args[0] is x and v not in (q.product, k.product)]
            values = [v for v in values if v.shape == k.product.shape and v.attr == k.product.attr and _one_dtype(v)]
            v = values[:1]
            operands = {"x": x, "w_q": q.product.args[1], "w_k": k.product.args[1]}
            operands |= {"w_v": v[0].args[1]} if v else {}
            attrs = {
                "size": size, "table": q.table, "transposed": q.product.attr[1] == (0,),
                "turned": (q.turned, k.turned),
                "columns": tuple(_columns(each) for each in (q.product, k.product, *v)),
            }  # fmt: skip
            roots = (q.root, k.root, *v)
            nodes = (*q.nodes, *k.nodes, *v)
            yield Composite("qkv_rope", {**operands, "cos": cos, "sin": sin}, attrs, roots, nodes)

    def _heads(self, root: Node, call: Named) -> _Heads | None:
        """The product whose heads a rotation turns; None of another value, or where something else reads it."""
        if call.op != "rope" or call.attrs.get("interleaved"):
            return None
        (x, cos, sin), size = call.nodes, root.shape[-1]
        if not isinstance(size, int) or call.shapes[1][-1] != size // 2 or call.shapes[1] != call.shapes[2]:
            return None
        nodes = self._to_product(x, root)
        if not nodes or root.dtype != nodes[-1].dtype:
            return None
        product = nodes[-1]
        lead, n = product.shape[:-1], product.shape[-1]
        if not isinstance(n, int) or n % size:
            return None
        turned = _are_turned(nodes, (*lead, n // size, size))
        table = None if turned is None else _by_position(call.shapes[1], turned, len(lead))
        if turned is None or table is None:
            return None
        return _Heads(root, product, cos, sin, size, table, turned, nodes)

    def _to_product(self, x: Node, reader: Node) -> tuple[Node, ...]:
        """The reader of a view of a product, the views, and the product; empty if it is none or others read of it."""
        nodes = [reader]
        while not is_linear(x) and x.op in ("reshape", "transpose") and self._is_read_only_by(x, set(nodes)):
            nodes.append(x)
            x = x.args[0]
        return (*nodes, x) if is_linear(x) and self._is_read_only_by(x, set(nodes)) else ()

    # The end of a block

    def adding_norms(self) -> Iterator[Composite]:
        """RMS norms of the sum of a residual and a product that nothing else reads."""
        for found in self.analysis.found:
            meaning = found.meaning
            if meaning is None or meaning.op != "add_rmsnorm" or set(found.roots) != set(found.region.roots):
                continue
            given = dict(zip(meaning.operands, (leaf.node for leaf in found.leaves), strict=True))
            plain = set(given) == {"x", "residual", "weight"} and not meaning.attrs.get("weight_offset")
            inside = set(found.region.nodes)
            for name, other in (("x", "residual"), ("residual", "x")):
                product = given[name]
                if not plain or not is_linear(product) or not self._is_read_only_by(product, inside):
                    continue
                alike = product.shape == given[other].shape == found.roots[0].shape
                if not alike or not _one_dtype(product, given[other], *found.roots):
                    continue
                operands = {"x": product.args[0], "weight": product.args[1], "residual": given[other]}
                attrs = {
                    "eps": meaning.attrs["eps"], "transposed": product.attr[1] == (0,), "outputs": meaning.outputs,
                }  # fmt: skip
                operands["norm_weight"] = given["weight"]
                yield Composite(
                    "linear_add_rmsnorm", operands, attrs, found.roots, (product, *found.region.nodes), (found,)
                )
                break

    def _are_read_only_by(self, nodes: Sequence[Node], readers: set[Node]) -> bool:
        return all(self._is_read_only_by(node, readers) for node in nodes)

    def _is_read_only_by(self, node: Node, readers: set[Node]) -> bool:
        live = {user for user in node.users if user in self.live}
        return node not in self.outputs and self._through_views(live) <= readers

    def _through_views(self, users: set[Node]) -> set[Node]:
        found: set[Node] = set()
        for user in users:
            if user in self.analysis.plain and user not in self.outputs:
                found |= {user} if not user.users else self._through_views({u for u in user.users if u in self.live})
            else:
                found.add(user)
        return found


class _Heads(NamedTuple):
    """A product whose heads are rotated.

    Attributes:
        root: the rotated heads.
        product: the product.
        cos, sin: the tables.
        size: columns of a head.
        table: the shape of a table among the product's rows.
        turned: whether heads come before positions in ``root``.
        nodes: all from the product on.
    """

    root: Node
    product: Node
    cos: Node
    sin: Node
    size: int
    table: Shape
    turned: bool
    nodes: tuple[Node, ...]


def _halves_of(found: Found, meaning: Meaning) -> list[Node]:
    """The values that a gated activation reads: gate and up, or one that has both."""
    given = dict(zip(meaning.operands, (leaf.node for leaf in found.leaves), strict=True))
    return [given[name] for name in ("gate", "up", "x") if name in given]


def _activation_of(found: Found) -> tuple[str, tuple[str, ...]] | None:
    """The activation that an expression is of a product, with a bias or without, and what its operands are."""
    text, numbers = with_holes(found.flat)
    name, operands, own = _activations().get(text, ("", (), ()))
    close = all(isclose(a, b, rel_tol=2**-20) for a, b in zip(own, numbers, strict=True)) if name else False
    return (name, operands) if close else None


@cache
def _activations() -> Mapping[str, tuple[str, tuple[str, ...], tuple[float, ...]]]:
    """Activations by their text with holes, with what their operands are and the numbers in the holes."""
    found = {}
    for name in ACTIVATIONS.values:
        for operands in ({"acc": "*m n"}, {"acc": "*m n", "bias": "n"}):
            made = canonical(trace(partial(_activated, name), operands))
            text, numbers = with_holes(made.flat)
            names = list(operands)
            found[text] = name, tuple(names[i] for i in made.operands), numbers
    return found


def _activated(activation: str, xp: Any, acc: Any, bias: Any = None) -> Any:
    return activated(xp, acc if bias is None else acc + bias, activation)


def _activation(meaning: Meaning) -> str:
    if meaning.op in ("silu_mul", "swiglu"):
        return "silu"
    return "gelu_tanh" if meaning.attrs.get("approximate") == "tanh" else "gelu"


def _are_alike(nodes: list[Node]) -> bool:
    """Whether nodes are products, no two the same one, of one input and of weights of one shape in one layout."""
    if not all(map(is_linear, nodes)) or len(set(nodes)) < len(nodes):
        return False
    return len({(each.args[0], each.attr, each.args[1].shape) for each in nodes}) == 1


def _row(node: Node) -> Node:
    """A row vector before it was copied to other rows."""
    while node.op in ("broadcast", "reshape") and node.args[0].shape[-1:] == node.shape[-1:]:
        if node.op == "broadcast" and node.attr[-1] != len(node.shape) - 1:
            break
        node = node.args[0]
    return node


def _columns(product: Node) -> int:
    n = product.shape[-1]
    assert isinstance(n, int)
    return n


def _one_dtype(*nodes: Node) -> bool:
    """Whether all have one dtype, products with their operands."""
    found = {node.dtype for node in nodes}
    found |= {arg.dtype for node in nodes if node.op == "contract" for arg in node.args}
    return len(found) == 1


def _has_rows_of(found: Found, products: Sequence[Node]) -> bool:
    """Whether the rows of an expression's value are those of these products, of which dims may be joined or split."""
    leaves = [leaf for leaf in found.leaves if leaf.node in products]
    known = all(isinstance(size, int) for size in found.rows) or all(
        leaf.node.shape[:-1] == found.rows for leaf in leaves
    )
    return known and all(map(is_whole, leaves))


def _are_turned(nodes: Sequence[Node], by_row: Shape) -> bool | None:
    """Whether the views of a product put heads before positions, ``[batch, heads, positions, size]``; None where they
    are no such heads, and none of the shape ``by_row``, either.

    Args:
        nodes: the reader of the last view, the views and the product.
        by_row: the product's shape with its columns by head.
    """
    root, *views, _ = nodes
    moves = [view for view in views if view.op == "transpose"]
    if not moves and root.shape == by_row:
        return False
    if len(by_row) != 4 or root.shape != (by_row[0], by_row[2], by_row[1], by_row[3]):
        return None
    if not moves:  # one head or one position: heads may stand on either side
        return True if 1 in by_row[1:3] else None
    fits = len(moves) == 1 and moves[0].attr == (0, 2, 1, 3) and moves[0].args[0].shape == by_row
    return True if fits else None


def _by_position(table: Shape, turned: bool, rank: int) -> Shape | None:
    """The shape of a table ``[*rows, r]`` for the rows of a product, which have no dim of heads; None of other tables.

    A rotation of ``[batch, heads, seqlen, size]`` has a table ``[batch, 1, seqlen, r]``.
    """
    if turned:
        return (table[0], *table[2:]) if len(table) == 4 and table[1] == 1 else None
    return table if len(table) == rank + 1 else None
