"""Functions that read arrays by index, ``slopes[head]`` or ``document[batch, q]``: traced and evaluated.

Each read is an operand of the function's expression. Its index is an expression of the operands before it, so that an
index may depend on what was read: ``document[batch, place[q]]``. What evaluates such a function loads what is read.

An index is a whole number up to 2^24, which float32 holds. One outside of the array is the nearest inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from cute_ops.declaration.array_api import beside
from cute_ops.expressions.graph import SCALAR, Expression, Graph, Kind, Operand, copied, operands_of
from cute_ops.expressions.primitives import PRIMITIVES
from cute_ops.expressions.reads import BOOL, FLOAT, SIZE, Mod, Read
from cute_ops.expressions.reference import evaluate
from cute_ops.expressions.simplify import SimplifyingGraph
from cute_ops.expressions.symbols import NoArray, Symbol, Tracing
from cute_ops.expressions.tracing import finished, named


def operands_on(mod: Mod, xp: Any, given: Sequence[Any], captured: Sequence[Any]) -> list[Any]:
    """The operands of a function's expression as arrays: what is given, and what is read of the captured arrays."""
    found, like = [*given], given[0]
    for read in mod.reads:
        array = captured[read.array]
        if read.kind.startswith(SIZE):
            size = array.shape[int(read.kind.removeprefix(SIZE))]
            found.append(xp.asarray(size, dtype=like.dtype, **beside(xp, like)))
            continue
        places = places_of(xp, array, evaluate(read.place, xp, found)) if read.place else ()
        found.append(xp.astype(array[places], like.dtype))
    return found


def places_of(xp: Any, array: Any, index: Sequence[Any]) -> tuple[Any, ...]:
    """An index as whole numbers inside of an array."""
    places = []
    for x, size in zip(index, array.shape, strict=True):
        zero = xp.zeros_like(x)
        inside = xp.minimum(xp.where(x > 0, x, zero), zero + (size - 1))
        places.append(xp.astype(inside, xp.int64 if "torch" in xp.__name__ else xp.int32))
    return tuple(places)


def _whole(primitive: str, swapped: bool = False) -> Callable[..., Symbol]:
    """An operator whose result of whole numbers is one."""

    def operator(self: Whole, other: Any) -> Symbol:
        found = self._graph.apply(primitive, *((other, self) if swapped else (self, other)))
        is_whole = isinstance(other, Whole) or (isinstance(other, int) and not isinstance(other, bool))
        return Whole(self._graph, found._id) if is_whole else found

    return operator


class Whole(Symbol):
    """A whole number up to 2^22: a coordinate, a size, what is read of integers, and what follows from these."""

    __add__ = __radd__ = _whole("add")
    __mul__ = __rmul__ = _whole("multiply")
    __sub__, __rsub__ = _whole("subtract"), _whole("subtract", swapped=True)

    def __floordiv__(self, divisor: Any) -> Whole:
        if not isinstance(divisor, Whole) and not (isinstance(divisor, int) and divisor > 0):
            self._graph.refuse(f"// by {divisor!r}", "divide by a positive whole number")
        # A half more is never a multiple: however the quotient is rounded, it stays on its side of one.
        quotient = self._graph.apply("divide", self._graph.apply("add", self, 0.5), divisor)
        return Whole(self._graph, self._graph.apply("floor", quotient)._id)

    def __mod__(self, divisor: Any) -> Any:
        return self - (self // divisor) * divisor


class Capturing(Tracing):
    """The graph of one call of a function that reads arrays."""

    def __init__(self, function: str, operands: Mapping[str, Operand], at: tuple[str, int] | None) -> None:
        super().__init__(function, operands, at)
        self.simplifies = False
        self.reads: dict[tuple[int, str, tuple[int, ...]], int] = {}  # their operands

    def read(self, array: int, kind: str, index: tuple[int, ...] = ()) -> Symbol:
        """The symbol for an array's element at an index of these nodes: the same one every time."""
        key = array, kind, index
        if key not in self.reads:
            self.reads[key] = len(self.operands)
            rows, columns = (any(getattr(self.kinds[i], dim) for i in index) for dim in ("rows", "columns"))
            self.operands += (Operand(Kind(rows, columns)),)
            self.names += (f"what is read of array {array}",)
        return (Symbol if kind == FLOAT else Whole)(self, self.operand(self.reads[key]))


class Captured(NoArray):
    """A captured array. It is read by one index for each of its dims, and may be asked for its shape.

    Args:
        graph: the graph.
        number: which of the arrays it is.
        kind: of its elements.
    """

    def __init__(self, graph: Capturing, number: int, kind: str) -> None:
        self._graph: Capturing = graph
        self._number, self._kind = number, kind

    def __getitem__(self, index: Any) -> Symbol:
        each = index if isinstance(index, tuple) else (index,)
        if any(x is None or x is ... or isinstance(x, slice) for x in each):
            self._graph.refuse("a part of a captured array", "read one element: one number for each dim")
        nodes = tuple(self._graph.node(x, "an index") for x in each)
        if any(self._graph.kinds[i].dtype == "bool" for i in nodes):
            self._graph.refuse("a bool as an index", "write xp.where(condition, 1, 0)")
        found = self._graph.read(self._number, self._kind, nodes)
        if self._kind == BOOL:
            return ~self._graph.apply("equal", found, 0.0)
        return found

    @property
    def shape(self) -> CapturedShape:
        return CapturedShape(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a library asks
            raise AttributeError(name)
        self._graph.refuse(f".{name} of a captured array", "read an element: array[batch, q]")

    def _refuse_value(self, *_: Any) -> NoReturn:
        self._graph.refuse("arithmetic on a captured array", "read an element: array[batch, q]")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse_value
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __float__ = __int__ = __index__ = __len__ = __iter__ = _refuse_value
    __and__ = __or__ = __neg__ = __abs__ = __invert__ = __pow__ = _refuse_value
    __eq__ = __ne__ = _refuse_value
    __hash__ = None  # type: ignore[assignment]


class CapturedShape:
    """The shape of a captured array; ``shape[0]`` is the size of a dim."""

    def __init__(self, array: Captured) -> None:
        self._array = array

    def __getitem__(self, dim: Any) -> Symbol:
        graph = self._array._graph
        if not isinstance(dim, int) or dim < 0:
            graph.refuse(f"shape[{dim!r}] of a captured array", "count its dims from the first: shape[0]")
        return graph.read(self._array._number, f"{SIZE}{dim}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._array._refuse_value()


class Coordinate(Whole):
    """The place of a value along a dim; ``size`` is that dim's.

    Args:
        graph: the graph.
        place, size: both as nodes.
    """

    def __init__(self, graph: Tracing, place: int, size: int) -> None:
        super().__init__(graph, place)
        self._size = size

    @property
    def size(self) -> Whole:
        return Whole(self._graph, self._size)


def trace_mod(
    function: Callable[..., Any], values: Mapping[str, Operand], coordinates: Mapping[str, Operand],
    arrays: Mapping[int, str], gives: str = "float32",
) -> Mod:  # fmt: skip
    """The expression of ``function(xp, *values, *coordinates, *captured)``. Its operands are the values, the
    coordinates, the sizes of these, and what is read.

    Args:
        function: returns one value.
        values, coordinates: by name.
        arrays: those that it captures, by number, and the kind of each.
        gives: the dtype of what it returns, float32 or bool.

    Raises:
        TraceError: the function does what an expression cannot say.
    """
    name, at = named(function)
    given = {**values, **coordinates, **{f"{key}.size": Operand(SCALAR) for key in coordinates}}
    graph = Capturing(name, given, at)
    args: list[Any] = [Symbol(graph, graph.operand(i)) for i in range(len(values))]
    for i in range(len(values), len(values) + len(coordinates)):
        args.append(Coordinate(graph, graph.operand(i), graph.operand(i + len(coordinates))))
    args += [Captured(graph, i, kind) for i, kind in arrays.items()]
    found = finished(graph, lambda xp: function(xp, *args), at)
    _check_result(graph, found, gives, at)
    reads = [Read(array, kind, _simple(graph, index) if index else None) for array, kind, index in graph.reads]
    indices = [read.place for read in reads if read.place is not None]
    for expression in (found, *indices):
        _check_nodes(graph, expression, at)
    if any(min(operands_of(index, i), default=len(values)) < len(values) for index in indices for i in index.outputs):
        graph.refuse("an index that depends on a score", "read by batch, head, q and k", at)
    return Mod(found, tuple(reads))


def _check_result(graph: Tracing, found: Expression, gives: str, at: tuple[str, int] | None) -> None:
    """Refuse a function that does not return one value of the dtype ``gives``."""
    if [kind.dtype for kind in found.output_kinds] != [gives]:
        instead = {"bool": "return a comparison, such as k <= q", "float32": "return the new score"}[gives]
        returned = " and ".join(kind.dtype for kind in found.output_kinds)
        graph.refuse(f"it returns {returned}, not one {gives}", instead, at)


def _check_nodes(graph: Tracing, expression: Expression, at: tuple[str, int] | None) -> None:
    """Refuse what is computed of more than one score."""
    for node in expression.nodes:
        if node.primitive in ("n", "column"):
            graph.refuse("the length of a row of scores", "write k.size, the number of keys", at)
        if node.primitive in PRIMITIVES and (PRIMITIVES[node.primitive].reduces or PRIMITIVES[node.primitive].grouped):
            graph.refuse(f"xp.{node.primitive} of scores", "a function sees one score at a time", at)


def _simple(graph: Graph, outputs: Sequence[int]) -> Expression:
    """These nodes of a graph as an expression, simplified."""
    written = graph.finish(outputs)
    simplifying = SimplifyingGraph(written.operands)
    nodes = copied(written, simplifying)
    return simplifying.finish([nodes[i] for i in written.outputs])
