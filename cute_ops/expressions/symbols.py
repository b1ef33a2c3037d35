"""Symbols, with which a traced function computes: their operators add primitives to the graph.

Values are float32 or bool, and a bool among floats counts as 0 or 1. What a symbol cannot do raises
:class:`TraceError`, which names the line of the function and what to write instead.
"""

from __future__ import annotations

import linecache
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from types import FrameType
from typing import Any, NoReturn

from cute_ops.expressions.graph import Operand, TooLargeError
from cute_ops.expressions.primitives import OF_ROWS, OFFERED, PRIMITIVES
from cute_ops.expressions.simplify import SimplifyingGraph

MOST_POWER = 8
# Frames of these packages may lie between a line of the function and ours.
_LIBRARIES = ("array_api_compat", "functools", "jax", "numpy", "torch")


class TraceError(TypeError):
    """A function does what an expression cannot say. The message names the line and what to write instead."""


class HalvesError(TraceError):
    """A function reads an operand by halves that was declared whole.

    Attributes:
        operand: its name.
    """

    operand = ""


class Tracing(SimplifyingGraph):
    """The graph of one call of a function.

    Attributes:
        refused: the first error that was raised. A function that catches it, as by ``except Exception``, goes on as it
            would not with arrays.
        squeezes: whether reductions may drop the dim of columns, which ``[..., None]`` gives back, as in references.
    """

    refused: TraceError | None = None
    squeezes = False

    def __init__(self, function: str, operands: Mapping[str, Operand], at: tuple[str, int] | None = None) -> None:
        self.function, self.names = function, tuple(operands)
        try:
            super().__init__(operands.values())
        except TooLargeError as error:
            self.refuse(str(error), "give it fewer operands", at)

    def too_large(self, what: str) -> NoReturn:
        self.refuse(what, "compute it by two functions, one after the other")

    def refuse(self, what: str, instead: str, at: tuple[str, int] | None = None) -> NoReturn:
        """Raises :class:`TraceError` for the line that runs, or for the line ``at``."""
        raise self._error(TraceError, what, instead, at) from None

    def refuse_slice(self, what: str, node: int | None) -> NoReturn:
        """Raises :class:`TraceError` for a slice of a value; :class:`HalvesError` if this node is a whole operand."""
        whole = node is not None and self.nodes[node].primitive == "operand" and not self.nodes[node].half
        instead = "declare an operand as `*m 2n` to read its halves, x[..., :n] and x[..., n:]"
        error = self._error(HalvesError if whole else TraceError, what, instead)
        if node is not None and isinstance(error, HalvesError):
            error.operand = self.names[self.nodes[node].operand]
        raise error from None

    def _error(self, kind: type[TraceError], what: str, instead: str, at: tuple[str, int] | None = None) -> TraceError:
        file, line = at or _line()
        source = linecache.getline(file, line).strip()
        where = f"{file}:{line}" + (f": {source}" if source else "")
        error = kind(f"cute_ops: {self.function} cannot be traced: {what}\n  {where}\n  {instead}")
        self.refused = self.refused or error
        return error

    def apply(self, primitive: str, *args: Any, value: str = "") -> Symbol:
        """Add a primitive, whose arguments are symbols and numbers, to the graph."""
        takes = PRIMITIVES[primitive].takes
        if len(args) != len(takes):
            call = f"xp.{primitive}({', '.join('xyz'[: len(takes)])})"
            self.refuse(f"xp.{primitive} of {len(args)} argument{'s' * (len(args) != 1)}", f"write {call}")
        nodes = [self.node(x, primitive) for x in args]
        self._make_floats(primitive, takes, nodes)
        if PRIMITIVES[primitive].grouped and not self.kinds[nodes[0]].columns:
            self.refuse(f"{primitive} of a value without columns", "compute it from a tile or a row vector")
        if PRIMITIVES[primitive].reduces and not self.kinds[nodes[0]].columns:
            if not self.kinds[nodes[0]].rows:
                self.refuse(f"{primitive} of a scalar", "leave it out: a scalar has no rows")
            return Symbol(self, nodes[0])  # a column vector: its last dim is 1
        return Symbol(self, self.add(primitive, *nodes, value=value))

    def _make_floats(self, primitive: str, takes: str, nodes: list[int]) -> None:
        """Turn bools among the arguments into 1 and 0 where floats are taken, but not if all of these are bools."""
        bools = [self.kinds[i].dtype == "bool" for i in nodes]
        if "b" not in takes and True not in bools:
            return
        floats = [i for i, letter in enumerate(takes) if letter == "f"]
        if any(letter == "b" and not bools[i] for i, letter in enumerate(takes)):
            self.refuse(f"{primitive} of a value that is no bool", "write a comparison, such as x != 0")
        if floats and all(bools[i] for i in floats):
            instead = "write xp.logical_and, xp.logical_or or xp.logical_not, or xp.where(condition, 1.0, 0.0)"
            self.refuse(f"{primitive} of bools", instead)
        for i in floats:
            if bools[i]:
                nodes[i] = self.add("where", nodes[i], self.constant(1.0), self.constant(0.0))

    def node(self, x: Any, primitive: str) -> int:
        """The node of a primitive's argument."""
        if isinstance(x, Packed):
            x._refuse(f"{primitive} of {x._name}, which is packed")
        if isinstance(x, Symbol):
            if x._graph is not self:
                self.refuse(
                    f"{primitive} of a value of another trace", "return values; keep none outside of the function"
                )
            return x._id
        if isinstance(x, Size):
            length = self.leaf("n")
            return length if x._factor == 1 else self.add("multiply", length, self.constant(x._factor))
        if isinstance(x, NoArray):
            x._refuse_value()
        number = as_number(x)
        if number is not None:
            if math.isnan(number):
                self.refuse(f"{primitive} of NaN", "write a number")
            if math.isinf(number) and x != number:
                self.refuse(f"{primitive} of a number beyond float64", "write a smaller one, or xp.inf")
            return self.constant(number)
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            library = type(x).__module__.partition(".")[0]
            self.refuse(
                f"{primitive} of a {library} array of shape {tuple(x.shape)}, which is no operand",
                "make it a parameter of the function",
            )
        if x is None:
            self.refuse(f"{primitive} of None", "test an operand that may be left out: `if bias is not None`")
        self.refuse(f"{primitive} of a {type(x).__name__}", "write an operand, a value or a number")


def is_users(frame: FrameType) -> bool:
    """Whether a frame is of the user's code: neither ours nor a library's."""
    module = str(frame.f_globals.get("__name__", ""))
    return not module.startswith(__package__) and module.partition(".")[0] not in _LIBRARIES


def _line() -> tuple[str, int]:
    """The line of the user's function that runs."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def as_number(x: Any) -> float | bool | None:
    """A number of Python or NumPy as a bool or a float, infinity for one beyond float64; None for anything else."""
    if type(x).__module__ in ("numpy", "ml_dtypes") and getattr(x, "ndim", None) == 0:
        x = x.item()
    try:
        return x if isinstance(x, bool) else float(x) if isinstance(x, Real) else None
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def _operator(primitive: str, swapped: bool = False) -> Callable[..., Symbol]:
    if swapped:
        return lambda self, other: self._graph.apply(primitive, other, self)
    return lambda self, *other: self._graph.apply(primitive, self, *other)


class OperandDtype(str):
    """The dtype of an operand, ``x.dtype``, which is known when the op is called: ``xp.astype(out, x.dtype)``. It reads
    as that of its values, float32.

    Attributes:
        operand: the operand, by index.
    """

    operand: int

    @classmethod
    def of(cls, operand: int) -> OperandDtype:
        made = cls("float32")
        made.operand = operand
        return made


class Arithmetic:
    """The operators that values and sizes have."""

    _graph: Tracing
    __hash__ = None  # type: ignore[assignment]

    __add__ = __radd__ = _operator("add")
    __mul__ = __rmul__ = _operator("multiply")
    __sub__, __rsub__ = _operator("subtract"), _operator("subtract", swapped=True)
    __truediv__, __rtruediv__ = _operator("divide"), _operator("divide", swapped=True)


class Size(Arithmetic):
    """The size of a value's last dim, ``factor`` times ``n``. It may be used as a number and as an end of a slice.

    Args:
        graph: the graph.
        factor: 2 for a packed operand.
        node: the value; None for a packed operand.
    """

    def __init__(self, graph: Tracing, factor: int, node: int | None = None) -> None:
        self._graph, self._factor, self._node = graph, factor, node

    def __floordiv__(self, divisor: object) -> Size:
        if divisor != self._factor:
            self._graph.refuse_slice("a slice of a row", self._node)
        return Size(self._graph, 1, self._node)

    def __bool__(self) -> NoReturn:
        self._graph.refuse("a decision on the length of a row", "one expression serves all lengths")

    def __eq__(self, other: object) -> bool:
        return bool(self)

    def __lt__(self, other: object) -> bool:
        return bool(self)

    __le__ = __gt__ = __ge__ = __lt__

    def __index__(self) -> int:
        return int(bool(self))


class TracedShape:
    """The shape of a value; only its last dim may be read."""

    def __init__(self, graph: Tracing, last: Size | int) -> None:
        self._graph, self._last = graph, last

    def __getitem__(self, index: object) -> Size | int:
        return self._last if index == -1 else self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()

    def _refuse(self) -> NoReturn:
        self._graph.refuse("a shape", "write shape[-1]; one expression serves all numbers of rows")


# With one of NumPy's numbers an operator arrives as NumPy's function.
_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv,
    "power": operator.pow, "less": operator.lt, "less_equal": operator.le, "greater": operator.gt,
    "greater_equal": operator.ge, "equal": operator.eq, "not_equal": operator.ne,
}  # fmt: skip


class NoArray:
    """Refuses the functions of NumPy and torch that get it as an argument."""

    _graph: Tracing

    def _refuse_value(self) -> NoReturn:
        """Refuse to be a value that is computed with."""
        self._graph.refuse("arithmetic on an array", "read an element")

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **_: Any) -> Any:
        own = _OPERATORS.get(function.__name__)
        others = [x for x in inputs if not isinstance(x, NoArray)]
        if own and others and all(hasattr(x, "dtype") and as_number(x) is not None for x in others):
            return own(*(x if isinstance(x, NoArray) else as_number(x) for x in inputs))
        self._foreign("numpy", function.__name__, inputs)

    def __array_function__(self, function: Any, types: Any, args: Sequence[Any], options: Any) -> Any:
        self._foreign("numpy", function.__name__, args)

    def __array__(self, *_: Any, **__: Any) -> Any:
        instead = "write the function of xp that does it; an array that it indexes must be a parameter"
        self._graph.refuse("numpy.asarray of a value, or an index of NumPy's array that is one", instead)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        given = [*args, *(options or {}).values()]
        flat = [x for arg in given for x in (arg if isinstance(arg, list | tuple) else [arg])]
        next(x for x in flat if isinstance(x, NoArray))._foreign("torch", getattr(function, "__name__", ""), flat)

    def _foreign(self, library: str, name: str, args: Sequence[Any] = ()) -> NoReturn:
        name = name.strip("_")
        for x in args:
            if hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, NoArray) and as_number(x) is None:
                self._graph.node(x, name)
        self._graph.refuse(f"{library}{f'.{name}' if name else ''} of a value", _instead(name))


def _instead(name: str) -> str:
    """What to write in place of a function or method of another library."""
    if name in OF_ROWS:
        return f"write xp.{name}(x, axis=-1{', keepdims=True' if name != 'softmax' else ''})"
    return f"write xp.{name}" if name in OFFERED else "write the function of xp that does it"


def _refused(what: str, instead: str) -> Callable[..., Any]:
    return lambda self, *_: self._graph.refuse(what, instead)


_DECISION = (
    "write xp.where(condition, a, b); for max(a, b) and min(a, b) xp.maximum and xp.minimum; for `and`, `or` and `not` "
    "xp.logical_and, xp.logical_or and xp.logical_not"
)
_NUMBER = "write the function of xp that does it, as xp.exp for math.exp; a value is known on the GPU only"


class Symbol(Arithmetic, NoArray):
    """A value: a node of a graph; ``stored_as``: the dtype that ``xp.astype`` gave it, which it has as an output."""

    def __init__(self, graph: Tracing, node: int, stored_as: str = "") -> None:
        self._graph, self._id, self._stored_as = graph, node, stored_as

    __lt__, __le__ = _operator("less"), _operator("less_equal")
    __gt__, __ge__ = _operator("less", swapped=True), _operator("less_equal", swapped=True)
    __eq__ = _operator("equal")  # type: ignore[assignment]
    __and__ = __rand__ = _operator("logical_and")
    __or__ = __ror__ = _operator("logical_or")
    __neg__, __abs__, __invert__ = map(_operator, ("negative", "abs", "logical_not"))

    def __ne__(self, other: object) -> Symbol:  # type: ignore[override]
        return ~(self._graph.apply("equal", self, other))

    def __pos__(self) -> Symbol:
        return self

    def __pow__(self, power: Any) -> Symbol:
        """Powers by small integers, by squaring, and by 0.5 and -0.5, by a root. Negative ones are powers of the
        reciprocal: so no gradient multiplies 0 with an infinity.
        """
        number = as_number(power)
        if number in (0.5, -0.5):
            return self._graph.apply("sqrt" if number == 0.5 else "rsqrt", self)
        if not number or number not in range(-MOST_POWER, MOST_POWER + 1):
            what = f"a power other than 1 to {MOST_POWER}, -1 to -{MOST_POWER}, 0.5 and -0.5"
            self._graph.refuse(what, "write xp.exp(y * xp.log(x))")
        base = self if number > 0 else self._graph.apply("reciprocal", self)
        result = base
        for bit in f"{abs(int(number)):b}"[1:]:
            result = self._graph.apply("square", result)
            result = result * base if bit == "1" else result
        return result

    def __rpow__(self, base: Any) -> Symbol:
        primitive = {2.0: "exp2", math.e: "exp"}.get(as_number(base) or 0.0)
        if primitive is None:
            self._graph.refuse("a power of another number than 2 and e", "write xp.exp(x * math.log(base))")
        return self._graph.apply(primitive, self)

    @property
    def dtype(self) -> str:
        node, dtype = self._graph.nodes[self._id], self._graph.kinds[self._id].dtype
        return OperandDtype.of(node.operand) if node.primitive == "operand" and dtype == "float32" else dtype

    @property
    def shape(self) -> TracedShape:
        return TracedShape(self._graph, Size(self._graph, 1, self._id) if self._graph.kinds[self._id].columns else 1)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, Symbol):
            self._graph.refuse("a mask as an index: the shape would depend on values", "write xp.where(mask, x, 0.0)")
        if self._graph.squeezes and not self._graph.kinds[self._id].columns and _adds_columns(index):
            return self
        slices = [each for each in (index if isinstance(index, tuple) else (index,)) if isinstance(each, slice)]
        half = any(isinstance(end, Size) for each in slices for end in (each.start, each.stop))
        self._graph.refuse_slice("an index of a value", self._id if half else None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a library asks
            raise AttributeError(name)
        function = "stop_gradient" if name == "detach" else name
        self._graph.refuse(f".{name} of a value", _instead(function))

    __bool__ = _refused("Python's control flow on a value", _DECISION)
    __float__ = _refused("float() of a value", _NUMBER)
    __int__ = __index__ = _refused("int() of a value", "write xp.floor(x)")
    __round__ = __floor__ = __trunc__ = __ceil__ = _refused("rounding a value", "write xp.floor(x) or xp.round(x)")
    __len__ = __iter__ = __contains__ = __reversed__ = _refused("a value as a sequence", "rows have any length")
    __setitem__ = __delitem__ = _refused("writing into a value", "write x = xp.where(mask, new, x)")
    __floordiv__ = __rfloordiv__ = _refused("// of a value", "write xp.floor(x / y)")
    __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _refused("% of a value", "write x - y * xp.floor(x / y)")
    __matmul__ = __rmatmul__ = _refused("a product of matrices", "write what happens to its result, as an epilogue")
    __xor__ = __rxor__ = _refused("^ of a value", "write a != b with xp.where(a, 1.0, 0.0)")
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _refused("a shift of a value", "write x * 2**k")
    __call__ = _refused("a call of a value", "write a function of xp")


def _adds_columns(index: Any) -> bool:
    """Whether an index is ``[..., None]``."""
    return isinstance(index, tuple) and len(index) == 2 and index[0] is ... and index[1] is None


class Packed(Symbol):
    """A packed operand; its two halves are values."""

    def __init__(self, graph: Tracing, index: int) -> None:
        super().__init__(graph, -1)
        self._index, self._name = index, graph.names[index]

    @property
    def dtype(self) -> str:
        dtype = self._graph.operands[self._index].kind.dtype
        return OperandDtype.of(self._index) if dtype == "float32" else dtype

    @property
    def shape(self) -> TracedShape:
        return TracedShape(self._graph, Size(self._graph, 2))

    def __getitem__(self, index: Any) -> Symbol:
        match index:
            case (first, slice(start=None, stop=Size(_factor=1), step=None)) if first is ...:
                half = "[:n]"
            case (first, slice(start=Size(_factor=1), stop=None, step=None)) if first is ...:
                half = "[n:]"
            case _:
                self._refuse(f"an index of {self._name} that is neither of its halves")
        return Symbol(self._graph, self._graph.operand(self._index, half))

    def _refuse(self, what: str) -> NoReturn:
        x = self._name
        self._graph.refuse(what, f"write {x}[..., :n] and {x}[..., n:] with n = {x}.shape[-1] // 2")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"{name} of {self._name}, which is packed")
