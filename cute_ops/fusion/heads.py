"""Elements of products whose columns a program has as several dims, such as heads and their columns. They are computed
by the product's own columns, so that its epilogue takes a bias, an activation and whatever else is done to them.
"""

from __future__ import annotations

from math import prod

from cute_ops.fusion.graph import Graph, Node, Shape
from cute_ops.fusion.region import VALUES, live_nodes

_COMPUTED = ("primitive", "cast", "reduce")


def by_columns(graph: Graph) -> dict[Node, Node]:
    """Compute elements of products in heads by the products' columns: each bias that is added to one, and others where
    nothing that reads them looks at single heads.

    Returns:
        By value the reshape to heads that takes its place.
    """
    if not graph.heads:
        return {}
    made = _Heads(graph).made()
    for node, other in made.items():
        node.become(other)
    graph.follow(made)
    return made


class _Heads:
    """What may be computed by columns.

    Attributes:
        live: the nodes that outputs need.
    lead: of values that may be computed by columns how many of their dims are rows.
    products: products in heads.
    kept: what is to be computed by columns.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, nodes = graph, live_nodes(graph)
        self.live = dict.fromkeys(nodes)
        self.products = {heads: x for x, heads in graph.heads.items() if heads in self.live}
        self.lead = {heads: len(x.shape) - 1 for heads, x in self.products.items()}
        for node in nodes:
            if _is_elementwise(node) and (lead := self._lead_of(node)) is not None:
                self.lead[node] = lead
        self.kept = self._chosen(nodes)
        for node in self.products:
            readers = self._readers(node)
            if node in graph.outputs or not all(each in self.kept or self._is_half(each) for each in readers):
                self.kept -= readers

    def _chosen(self, nodes: list[Node]) -> set[Node]:
        """Biases, and values that are read by what looks at no single heads alone."""
        kept, ends = set[Node](), set[Node]()
        for node in reversed(nodes):
            alone = self._readers(node) <= ends
            if node in self.lead and node not in self.products and (alone or self._adds_bias(node)):
                kept.add(node)
            if node in kept or self._is_end(node, alone):
                ends.add(node)
        return kept

    def made(self) -> dict[Node, Node]:
        """By value that is computed by columns the reshape of it to heads."""
        graph, made, columns = self.graph, dict[Node, Node](), dict(self.products)
        for node in self.live:
            if node in self.kept and all(arg in columns or arg not in self.lead for arg in node.args):
                x = self._in_columns(node, columns)
                if x.shape == self._shape(node):
                    columns[node] = x
                    made[node] = graph.in_heads(x, node.shape)
            elif node.op == "slice" and node.args[0] in columns and self._is_half(node):
                x, (axis, start, _, _) = columns[node.args[0]], node.attr
                size = prod(map(int, node.shape[axis:]))
                half = graph.slice(x, len(x.shape) - 1, start * size, (start + 1) * size)
                made[node] = graph.reshape(half, node.shape)
            elif node.op == "reshape" and node.args[0] in columns and columns[node.args[0]].shape == node.shape:
                made[node] = columns[node.args[0]]
        return made

    def _readers(self, node: Node) -> set[Node]:
        return {user for user in node.users if user in self.live}

    def _lead_of(self, node: Node) -> int | None:
        """How many dims of a function of elements are rows; None where it is none of a product in heads alone."""
        found = {self.lead[arg] for arg in node.args if arg in self.lead and arg.shape == node.shape}
        if len(found) != 1 or not all(self._fits(arg, node.shape, *found) for arg in node.args):
            return None
        return found.pop()

    def _fits(self, arg: Node, shape: Shape, lead: int) -> bool:
        """Whether an argument's columns can be joined without computing it before."""
        if arg in self.lead or not arg.shape:
            return arg.shape in (shape, ())
        return _own_dims(arg, shape, lead) is not None and arg.op not in _COMPUTED

    def _adds_bias(self, node: Node) -> bool:
        """Whether a value is the sum of a product, which may be cast, and a row of all heads."""
        if node.attr != "add":
            return False
        lead = self.lead[node]
        products = [arg for arg in node.args if _uncast(arg) in self.products]
        rows = [arg for arg in node.args if arg.shape and _own_dims(arg, node.shape, lead) == (lead,)]
        return len(products) == len(rows) == 1

    def _is_end(self, node: Node, alone: bool) -> bool:
        """Whether a reader of heads looks at all of them alike, or not itself."""
        if node.op in ("reshape", "transpose"):
            return alone
        return node.op == "opaque" or (node.op == "contract" and node.attr[2] == ((), ())) or self._is_half(node)

    def _is_half(self, node: Node) -> bool:
        """Whether a value is one of two parts of another, by its first columns, as are all that read this."""
        if node.op != "slice" or node.args[0] not in self.lead:
            return False
        x = node.args[0]
        axis = self.lead[x]
        parts = ((axis, 0, 1, 1), (axis, 1, 2, 1))
        return x.shape[axis] == 2 and all(each.op == "slice" and each.attr in parts for each in self._readers(x))

    def _shape(self, node: Node) -> Shape:
        lead = self.lead[node]
        return (*node.shape[:lead], prod(map(int, node.shape[lead:])))

    def _in_columns(self, node: Node, columns: dict[Node, Node]) -> Node:
        graph, lead, shape = self.graph, self.lead[node], self._shape(node)
        args = [columns.get(arg) or self._joined(arg, shape, lead, node.shape[lead:]) for arg in node.args]
        return (
            graph.cast(args[0], node.dtype)
            if node.op == "cast"
            else graph.primitive(node.attr, args, shape, node.dtype)
        )

    def _joined(self, arg: Node, shape: Shape, lead: int, heads: Shape) -> Node:
        """An argument with its columns joined."""
        if not arg.shape:
            return arg
        dims = _own_dims(arg, (*shape[:lead], *heads), lead)
        assert dims is not None
        x = arg.args[0] if arg.op == "broadcast" else arg
        return self.graph.broadcast(self.graph.reshape(x, tuple(shape[dim] for dim in dims)), shape, dims)


def _is_elementwise(node: Node) -> bool:
    return node.dtype in VALUES and (node.op == "cast" or (node.op == "primitive" and isinstance(node.attr, str)))


def _uncast(node: Node) -> Node:
    return node.args[0] if node.op == "cast" else node


def _own_dims(arg: Node, shape: Shape, lead: int) -> tuple[int, ...] | None:
    """The dims of a value with its columns joined that an argument has which is copied to it; None of an argument that
    has some columns and is copied to others.
    """
    x, dims = arg, list(range(len(shape) - len(arg.shape), len(shape)))
    if arg.op == "broadcast":
        x, dims = arg.args[0], [dims[dim] for dim in arg.attr]
    own = [dim for dim, size in zip(dims, x.shape, strict=True) if size != 1]
    heads = [dim for dim in own if dim >= lead]
    every = [dim for dim in range(lead, len(shape)) if shape[dim] != 1]
    if own != sorted(own) or heads not in ([], every):
        return None
    return (*(dim for dim in own if dim < lead), *([lead] if heads else []))
