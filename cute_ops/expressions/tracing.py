"""Trace a Python function: call it once, with a namespace of primitives and with symbols in place of arrays.

    def gelu_add(xp, x, bias, residual):
        return gelu(x + bias) + residual

    trace(gelu_add, {"x": "*m n", "bias": "n", "residual": "*m n"})

All values are computed in float32; ``xp.astype`` rounds where it stands, and outputs are rounded once, when they are
stored. An output that ``xp.astype`` gives has that dtype.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from traceback import walk_tb
from typing import Any

from cute_ops.errors import first_line, meant
from cute_ops.expressions.graph import MOST_OUTPUTS, SHAPES, Expression, Operand, copied
from cute_ops.expressions.primitives import LIKE, OF_ROWS, OFFERED, PRIMITIVES, ROUNDS_TO
from cute_ops.expressions.reference import REFERENCE
from cute_ops.expressions.simplify import NUMBERS, SimplifyingGraph, fold
from cute_ops.expressions.symbols import OperandDtype, Packed, Size, Symbol, TraceError, Tracing, is_users


class TracedExpression(Expression):
    """A function's expression, which is simplified, and so may use other primitives than the function.

    Attributes:
        written: as the function wrote it.
    """

    written: Expression


def trace(
    function: Callable[..., Any],
    operands: Mapping[str, str | Operand | None],
    attrs: Mapping[str, Any] | None = None,
) -> Expression:
    """The expression of ``function(xp, **operands, **attrs)``.

    Args:
        function: functions of single elements and reductions of rows; returns a value or a tuple of values.
        operands: the shape of each by the parameter's name: ``*m n`` a tile, ``n`` a row vector, ``*m 1`` a column
            vector, empty a scalar. ``*m 2n`` and ``2n`` are packed, and read as ``x[..., :n]`` and ``x[..., n:]`` with
            ``n = x.shape[-1] // 2``. ``bool *m n`` is a mask. An operand that is left out is None.
        attrs: attributes with their values; numbers become constants.

    Raises:
        TraceError: the function does what an expression cannot say, or needs one that is too large.
        ValueError: a shape is none of the above.
    """
    declared = {name: _operand(name, shape) for name, shape in operands.items() if shape is not None}
    name, at = named(function)
    graph = Tracing(name, declared, at)
    graph.simplifies = False
    given: dict[str, Any] = dict.fromkeys(operands)
    for i, (name, operand) in enumerate(declared.items()):
        given[name] = Packed(graph, i) if operand.packed else Symbol(graph, graph.operand(i))
    return finished(graph, partial(function, **{**given, **(attrs or {})}), at)


def named(function: Callable[..., Any]) -> tuple[str, tuple[str, int] | None]:
    """A function's name in messages, and its file and first line, if it has them."""
    plain = inspect.unwrap(function)
    code = getattr(plain, "__code__", None)
    name = getattr(plain, "__qualname__", type(plain).__name__)
    return name, (code.co_filename, code.co_firstlineno) if code else None


def finished(graph: Tracing, function: Callable[..., Any], at: tuple[str, int] | None) -> TracedExpression:
    """The expression of ``function(xp)``, which computes with symbols of a graph."""
    returned = _called(function, graph)
    if graph.refused is not None:
        raise graph.refused
    results = returned if isinstance(returned, tuple) else (returned,)
    if not 0 < len(results) <= MOST_OUTPUTS:
        graph.refuse(f"it returns {len(results)} values", f"return 1 to {MOST_OUTPUTS} values", at)
    written = graph.finish([_output(graph, x, at) for x in results])
    simplifying = SimplifyingGraph(written.operands)
    nodes = copied(written, simplifying)
    expression = TracedExpression(*simplifying.finish([nodes[i] for i in written.outputs]))
    expression.written = written
    depends: list[bool] = []
    for node in expression.nodes:
        depends.append(node.primitive == "operand" or any(depends[i] for i in node.args))
    if not all(depends[i] for i in expression.outputs):
        _output(graph, 1.0, at)
    return expression


def _called(function: Callable[..., Any], graph: Tracing) -> Any:
    """Call a function with symbols. Raises TraceError where it does what an expression cannot say."""
    try:
        return function(Namespace(graph))
    except RecursionError as error:
        graph.refuse("it calls itself without an end", "write a loop of a fixed number of steps", _users_line(error))
    except TypeError as error:
        if isinstance(error, TraceError):
            raise
        whole, text = str(error), first_line(error)[:100]
        if Namespace.__name__ in whole:
            graph.refuse(text.replace(Namespace.__name__, "xp"), "write functions as xp.exp(x)", _users_line(error))
        if f"'{Size.__name__}'" in whole:
            graph.refuse(f"the length of a row in {text}", "use +, -, * and / on it", _users_line(error))
        if Symbol.__name__ in whole:  # raised by a library that does not know symbols, such as JAX
            what = f"a library's function of a value: {text}"
            graph.refuse(what, "write the function of xp that does it", _users_line(error))
        raise


def _users_line(error: Exception) -> tuple[str, int]:
    """The last line of the user's code that an error came through."""
    frame, line = [each for each in walk_tb(error.__traceback__) if is_users(each[0])][-1]
    return frame.f_code.co_filename, line


def _output(graph: Tracing, x: Any, at: tuple[str, int] | None) -> int:
    """The node of what a function returns."""
    if isinstance(x, Symbol) and not isinstance(x, Packed):
        return _stored(graph, graph.node(x, "return"), x._stored_as)
    what = f"{x._name}, which is packed" if isinstance(x, Packed) else f"a {type(x).__name__}"
    if isinstance(x, Real):
        what = "a value that depends on no operand"
    graph.refuse(f"it returns {what}", "return a value or a tuple of values", at)


def _stored(graph: Tracing, i: int, dtype: str) -> int:
    """The node of an output that says its dtype, if it is not the one that the output has anyway."""
    tiles = [k for k, operand in enumerate(graph.operands) if operand.kind.rows and operand.kind.columns]
    usual = [f"{LIKE}{k}" for k in tiles[:2]] if graph.kinds[i].columns else ["float32"]
    return i if dtype in ("", graph.nodes[i].value) or [dtype] == usual else graph.add("astype", i, value=dtype)


def _operand(name: str, shape: str | Operand) -> Operand:
    if isinstance(shape, Operand):
        return shape
    if shape not in SHAPES:
        raise ValueError(f"operand `{name}` has shape {shape!r}; shapes are {', '.join(map(repr, SHAPES))}")
    return SHAPES[shape]


def call(primitive: str, x: Any) -> Any:
    """A primitive of one argument, applied to a symbol, an array or a number."""
    if isinstance(x, Symbol):
        return x._graph.apply(primitive, x)
    if isinstance(x, Real):
        return REFERENCE[primitive](NUMBERS, x)
    import array_api_compat  # start-up time: tracing needs none

    return REFERENCE[primitive](array_api_compat.array_namespace(x), x)


# Names of the array API that are no primitives, and what to write instead.
_INSTEAD = {
    "power": "x ** 2",
    "isnan": "x != x",
    "detach": "xp.stop_gradient(x)",
    "log_softmax": "x - xp.logsumexp(x, axis=-1, keepdims=True)",
    "rint": "xp.round(x)",
    **dict.fromkeys(("asarray", "full_like", "ones_like", "zeros_like"), "the number itself"),
    **dict.fromkeys(("nonzero", "unique_values"), "xp.where(mask, x, 0.0): shapes may not depend on values"),
}


# What the refusal of another name lists.
_WORDS = (
    f"primitives are functions of single elements, {' '.join(sorted(OFFERED - {*OF_ROWS}))}, "
    f"and of rows, {' '.join(sorted(OF_ROWS))}"
)


class Namespace:
    """``xp``: the primitives, by the array API's names where it has them."""

    pi, e, inf = math.pi, math.e, math.inf

    def __init__(self, graph: Tracing) -> None:
        self._graph = graph

    def __getattr__(self, name: str) -> Any:
        if name in ("float32", "bool", *ROUNDS_TO):
            return name
        if name in PRIMITIVES:
            primitive = PRIMITIVES[name]
            return partial(
                self._reduced if primitive.reduces else self._grouped if primitive.grouped else self._primitive, name
            )
        if name in _INSTEAD:
            self._graph.refuse(f"xp.{name} is no primitive", f"write {_INSTEAD[name]}")
        self._graph.refuse(f"xp.{name} is no primitive{meant(name, OFFERED)}", _WORDS)

    def _primitive(self, primitive: str, *args: Any, **options: Any) -> Any:
        if options:
            self._graph.refuse(f"xp.{primitive} with {', '.join(options)}=", f"write xp.{primitive} without")
        if all(isinstance(x, Real) for x in args) and len(args) == len(PRIMITIVES[primitive].takes):
            value = fold(primitive, *args)
            return self._graph.refuse(f"{primitive}{args} is no number", "write a number") if value is None else value
        return self._graph.apply(primitive, *args)

    def greater(self, x: Any, y: Any) -> Any:
        return self._primitive("less", y, x)

    def greater_equal(self, x: Any, y: Any) -> Any:
        return self._primitive("less_equal", y, x)

    def not_equal(self, x: Any, y: Any) -> Any:
        return self._primitive("logical_not", self._primitive("equal", x, y))

    def pow(self, x: Any, power: Any) -> Any:
        return x**power

    def clip(self, x: Any, min: Any = None, max: Any = None) -> Any:
        if min is None or max is None:
            x = x if min is None else self._primitive("maximum", x, min)
            return x if max is None else self._primitive("minimum", x, max)
        return self._primitive("clip", x, min, max)

    def astype(self, x: Any, dtype: Any) -> Any:
        """Rounds to a narrow float; a bool to 0 or 1, a float to whether it is not 0. An output gets the dtype."""
        name = str(getattr(dtype, "name", getattr(dtype, "__name__", dtype))).rpartition(".")[2]
        if name == "bool":
            return x if getattr(x, "dtype", "") == "bool" else self.not_equal(x, 0.0)
        if name not in ("float32", *ROUNDS_TO):
            kinds = ", ".join(("float32", "bool", *ROUNDS_TO))
            self._graph.refuse(f"astype to {name}", f"round to one of {kinds}; values are computed in float32")
        if isinstance(x, Symbol) and x.dtype == "bool":
            x = self._primitive("where", x, 1.0, 0.0)
        if name != "float32":
            return self._graph.apply("astype", x, value=name)
        if isinstance(x, Packed) or not isinstance(x, Symbol):
            return x
        stored_as = f"{LIKE}{dtype.operand}" if isinstance(dtype, OperandDtype) else name
        return Symbol(self._graph, self._graph.node(x, "astype"), stored_as)

    def arange(self, n: Any) -> Any:
        """The number of each column, from 0 on."""
        if not isinstance(n, Size) or n._factor != 1:
            self._graph.refuse("xp.arange of anything but the length of a row", "write xp.arange(x.shape[-1])")
        return Symbol(self._graph, self._graph.leaf("column"))

    def softmax(self, x: Any = None, axis: Any = None) -> Any:
        """Exponentials of a row, divided by their sum."""
        powers = self.exp(x - self._reduced("max", x, axis, True))
        return powers / self._reduced("sum", powers, axis, True)

    def logsumexp(self, x: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
        """The logarithm of the sum of a row's exponentials; minus infinity if these are all 0."""
        largest = self._reduced("max", x, axis, keepdims)
        shift = self.stop_gradient(self.where(self.abs(largest) < self.inf, largest, 0.0))
        return self.log(self._reduced("sum", self.exp(x - shift), axis, keepdims)) + shift

    def var(self, x: Any = None, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Any:
        """The variance of a row: the sum of squared differences from the mean, by its length less ``correction``."""
        squares = self.square(x - self._reduced("mean", x, axis, keepdims))
        if not correction:
            return self._reduced("mean", squares, axis, keepdims)
        return self._reduced("sum", squares, axis, keepdims) / (x.shape[-1] - correction)

    def std(self, x: Any = None, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Any:
        """The square root of :meth:`var`."""
        return self.sqrt(self.var(x, axis, correction, keepdims))

    def group_mean(self, x: Any = None, size: Any = None) -> Any:
        """The mean of each group of ``size`` columns, in all of its columns."""
        return self._grouped("group_sum", x, size) * (1 / size)

    def _grouped(self, primitive: str, x: Any = None, size: Any = None) -> Any:
        if not isinstance(size, int) or size < 1:
            self._graph.refuse(f"xp.{primitive} of groups of {size!r} columns", f"write xp.{primitive}(x, 64)")
        return self._graph.apply(primitive, x, value=str(size))

    def _reduced(self, primitive: str, x: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
        if axis not in (-1, (-1,)) or not (keepdims is True or self._graph.squeezes):
            instead = f"write xp.{primitive}(x, axis=-1, keepdims=True)"
            if primitive in ("max", "min"):
                instead += f", or xp.{primitive}imum(x, y)"
            self._graph.refuse(f"xp.{primitive} of anything but whole rows", instead)
        return self._graph.apply(primitive, x)
