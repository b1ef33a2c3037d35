"""Ops of functions without declared shapes: the shapes of a call's arguments determine the op that it runs.

Each operand has a kind, by how NumPy broadcasts it:

- ``t`` a tile, which has the shape of the result; ``2t`` two side by side, which the function reads by halves; ``tF``,
  ``tH`` and ``tB`` tiles of float32, float16 and bfloat16 in a call whose tiles have several dtypes
- ``e`` a tile that was expanded, since it lacks some of the leading dims; ``2e`` two side by side
- ``r`` a row vector, which all rows share; ``2r`` two side by side
- ``b`` a row vector of each example, ``[batch 1 n]`` beside rows ``[batch m n]``; ``2b`` two side by side; ``d`` a
  number of each example
- ``c`` a column vector, one number per row
- ``s`` a scalar
- ``n`` a Python number: a scalar without a gradient
- ``tM``, ``rM``, ``cM`` and ``sM`` such operands of bools, ``tI`` and its like of whole numbers, without a gradient
- ``_`` left out: None

An op's name is the function's, these *kinds* and a digest of the expression: ``gelu_add_trt_1f3b0c9a2d4e``. So it is
the same in every process, and functions with the same expression share an op.
"""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial, update_wrapper
from numbers import Real
from typing import Any, NoReturn

from cute_ops.constants import Exact
from cute_ops.declaration.op import Op
from cute_ops.errors import header_of, meant, unknown_argument
from cute_ops.expressions.tracing import trace
from cute_ops.ops.expression import many
from cute_ops.ops.expression.broadcast import NUMBER, TILES, Fit, Sizes, fits, of_examples, with_dtypes
from cute_ops.ops.expression.call import (
    KINDS,
    SHAPES,
    Attrs,
    Function,
    check_attributes,
    declared,
    of_elements,
    read_by_halves,
    readable,
    remembered,
)
from cute_ops.ops.expression.fused import BOOL, INT, fused, shape_of

_KIND = re.compile(r"2?t[FHB]|(?:2?[tr]|[cs])[MI]|2?[terb]|[cdsn_]")
_CALL = re.compile(rf"((?:{_KIND.pattern})+)(?:\((.+)\))?")
_VALUE = re.compile(r"[-+.'\w]+", re.ASCII)

DOC = """Operands broadcast as in NumPy. If the result is ``[*m n]``, an operand is a tile ``[*m n]``, a row vector
``[n]``, a column vector ``[*m 1]``, a scalar ``[]``, or a Python number, which has no gradient. None means that an
operand is left out. An operand that lacks some of the leading dims is expanded to all of them, and its gradient is
summed in float32. Bools are conditions, ``xp.where(mask, x, 0.0)``, and whole numbers (int32, int64, uint8) are read as
float32, exact below 2^24; neither has a gradient. Outputs have the dtype of the tiles of floats that are not expanded,
float32 if these differ; what follows from reductions of rows alone is float32. An output that ``xp.astype`` gives has
that dtype. An operand that the function reads by halves, ``x[..., :n]`` and ``x[..., n:]`` with
``n = x.shape[-1] // 2``, has twice the columns.
Keyword-only arguments are attributes: numbers and texts that Python sees; each combination has a kernel of its own.

There is an op for each combination of these, ``gelu_add_trt_<digest>`` for a tile, a row vector and a tile; its name is
the same in every process. The function is traced at its first call of each combination, and when a number that it
refers to has changed: these are constants of its kernel.

Args:
    function: ``function(xp, *operands, **attrs)`` in array-API style; returns a value or a tuple of values.
    name: with ``operands`` the op's name, otherwise the beginning of the ops' names; by default the function's.
    operands: declared shapes, as in :func:`cute_ops.fused`, for a single op.
    declaration: further arguments of :func:`cute_ops.fused` for that op.

Raises:
    TraceError: the function does what an expression cannot say.
    TypeError: it does not name its operands.
"""


def decorate(
    function: Function | None, name: str, operands: Mapping[str, str] | None, declaration: Mapping[str, Any],
    register: Callable[[Op], Function], by_call: Callable[[ByCall], Function],
) -> Function:  # fmt: skip
    """The decorated function, for the decorators of both adapters, which make functions of an op by ``register`` and of
    a :class:`ByCall` by ``by_call``. Without a function it is a decorator that is called with arguments,
    ``@fused(name="f")``. Other arguments as in :data:`DOC`.
    """
    if operands is None and declaration:
        name = next(iter(declaration))
        declared = list(inspect.signature(fused).parameters)[1:]
        if name not in declared:
            raise TypeError(f"cute_ops.fused: {unknown_argument(name, declared)}")
        raise TypeError(f"cute_ops.fused: `{name}` belongs to declared shapes: give `operands`, too")
    if function is None:
        return lambda function: decorate(function, name, operands, declaration, register, by_call)
    if operands is not None:
        return register(fused(function, operands=operands, name=name, **declaration))
    of = ByCall(function, name)
    made = update_wrapper(by_call(of), function)
    made.__signature__, made.by_call = of.signature, of  # type: ignore[attr-defined]
    del made.__wrapped__  # tracers would read its signature, which begins with xp
    return made


class ByCall:
    """A function without declared shapes, and the ops of its calls.

    Attributes:
        function: ``function(xp, *operands, **attrs)`` in array-API style; attributes are keyword-only.
        name: the beginning of its ops' names.
        operands: the names of its operands.
    """

    def __init__(self, function: Function, name: str = "") -> None:
        called = str(getattr(function, "__name__", type(function).__name__))
        self.function = function
        self.name = readable(name or called) or "function"
        parameters = list(header_of(function, "cute_ops.fused: argument `function`").parameters.values())[1:]
        own = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        if not own or any(p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
            raise TypeError(
                f"cute_ops.fused: {called} does not name its operands: write them after the namespace, and attributes "
                "after a `*`: (xp, x, y, *, limit=1.0)."
            )
        self.operands = tuple(p.name for p in own)
        taken = {"out", "dout", *(f"d{name}" for name in self.operands)}
        if clash := [name for name in self.operands if name in taken or re.fullmatch(r"d?out\d+", name)]:
            raise ValueError(f"cute_ops.fused: {called}: operand `{clash[0]}` has the name of an output or a gradient")
        self._defaults = {p.name: p.default for p in own if p.default is not p.empty}
        self._attrs = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        self._halves: dict[Hashable, str] = {}
        # By all that an op follows from, and the last one by kinds and attributes.
        self._ops: dict[Hashable, Op] = {}
        self._last: dict[tuple[str, Exact], Op] = {}

    @property
    def signature(self) -> inspect.Signature:
        """The signature for callers, who leave out the namespace."""
        whole = inspect.signature(self.function)
        return whole.replace(parameters=list(whole.parameters.values())[1:])

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Attrs]:
        """A call's operands, in order, and its attributes.

        Raises:
            TypeError: an argument is missing or unknown.
        """
        if len(args) == len(self.operands) and not kwargs and not self._attrs:
            return args, ()
        takes = (*self.operands, *self._attrs)
        for name in kwargs:
            if name not in takes:
                self._refuse(TypeError, unknown_argument(name, takes))
            if name in self.operands[: len(args)]:
                self._refuse(TypeError, f"argument `{name}` was given twice, by position and by name.")
        if len(args) > len(self.operands):
            listed = ", ".join(f"`{each}`" for each in self.operands)
            first = next(iter(inspect.signature(self.function).parameters))
            lacks = "" if first == "xp" else f" Its first parameter, `{first}`, is the namespace: call it `xp`."
            self._refuse(TypeError, f"{len(args)} operands were given; it takes {listed}.{lacks}")
        given = {**self._defaults, **kwargs}
        operands = [*args]
        for name in self.operands[len(args) :]:
            if name not in given:
                self._refuse(TypeError, f"argument `{name}` is required, but was not given.")
            operands.append(given[name])
        return operands, self._with_defaults(kwargs)

    def _with_defaults(self, given: Mapping[str, Any]) -> Attrs:
        attrs = tuple((name, given.get(name, default)) for name, default in self._attrs.items())
        for name, value in attrs:
            if value is inspect.Parameter.empty:
                self._refuse(TypeError, f"attribute `{name}` is required, but was not given.")
        return attrs

    def shapes(self, operands: Sequence[Any], array: Any) -> list[Sizes]:
        """The shapes of a call's operands, as :data:`Sizes`; ``array``: the type, or types, of the framework's arrays.

        Raises:
            TypeError: an operand is not an array, a number or None.
        """
        found: list[Sizes] = []
        for name, value in zip(self.operands, operands, strict=True):
            if isinstance(value, array):
                found.append(value.shape)
            elif value is None:
                found.append(None)
            elif isinstance(value, bool):
                problem = "is a bool, on which Python decides: make it an attribute, after a `*`."
                self._refuse(TypeError, f"argument `{name}` {problem}")
            elif isinstance(value, Real):
                found.append(NUMBER)
            else:
                problem = f"must be an array, a number or None, got {type(value).__name__}."
                self._refuse(TypeError, f"argument `{name}` {problem}")
        return found

    def halves(self, presence: str, attrs: Attrs) -> str:
        """Which operands are read by halves: ``2`` for each that is, ``1`` for each other one; ``presence`` is from
        :func:`presence`. Raises TraceError for a function that does what an expression cannot say.
        """

        def find() -> str:
            self._check(attrs)
            kind = {"0": "_", "1": "t", "M": "tM"}
            shapes = {name: SHAPES[kind[each]] for name, each in zip(self.operands, presence, strict=True)}
            packed = read_by_halves(self.function, shapes, attrs)
            return "".join("2" if name in packed else "1" for name in self.operands)

        return remembered(self._halves, self.function, attrs, presence, find)

    def fits(self, shapes: Sequence[Sizes], halves: str, dtypes: Sequence[str]) -> tuple[Fit | None, ...]:
        """How each operand of a call broadcasts to the result; None for one that is left out. ``dtypes`` has the name
        of each operand's dtype, an empty one for what is no array.

        Raises:
            ValueError: they do not broadcast, or none has the shape of the result.
        """

        def refuse(problem: str) -> NoReturn:
            self._refuse(ValueError, problem, shapes)

        found = with_dtypes(fits(dict(zip(self.operands, shapes, strict=True)), halves, refuse), dtypes)
        if not any(how and how.shape.endswith(TILES) and not how.shape.startswith((BOOL, INT)) for how in found):
            refuse("no argument of floats has the shape of the result; one must, because its dtype is the result's.")
        return of_examples(found)

    def op(self, kinds: str, attrs: Attrs = ()) -> Op:
        """The op of calls with operands of these kinds, and with these attributes.

        Raises:
            TraceError: the function does what an expression cannot say.
            ValueError: it does something that cannot be fused yet.
        """

        def make() -> Op:
            self._check(attrs)
            op = self._last[kinds, Exact(attrs)] = self._declared(kinds, dict(attrs))
            many.note(self.function, self.name, op.name)
            return op

        return remembered(self._ops, self.function, attrs, kinds, make)

    def choose(self, operands: Sequence[Any], attrs: Attrs, array: Any) -> tuple[Op, tuple[Fit | None, ...]]:
        """The op of a call, and how its operands broadcast to the result."""
        shapes = self.shapes(operands, array)
        dtypes = [dtype_of(each) if isinstance(each, array) else "" for each in operands]
        fitted = self.fits(shapes, self.halves(presence(shapes, dtypes), attrs), dtypes)
        return self.op(kinds(fitted), attrs), fitted

    def _check(self, attrs: Attrs) -> None:
        check_attributes(attrs, "before the `*`", partial(self._refuse, TypeError))

    def _declared(self, kinds: str, attrs: Mapping[str, Any]) -> Op:
        operands = dict(zip(self.operands, map(SHAPES.__getitem__, _KIND.findall(kinds)), strict=True))
        known = {**{name: None for name, shape in operands.items() if shape is None}, **attrs}
        function = update_wrapper(partial(self.function, **known), self.function) if known else self.function
        shapes = {name: shape_of(shape) for name, shape in declared(operands).items()}
        # Traced once: name and op must be of the same numbers.
        return of_elements(trace(function, shapes), operands, self.name, function)

    def default(self) -> Op:
        """The op whose operands without a default are all tiles.

        Raises:
            TypeError, ValueError: there is none.
        """
        given = [self._defaults.get(name, inspect.Parameter.empty) for name in self.operands]
        attrs = self._with_defaults({})
        halves = self.halves("".join("0" if value is None else "1" for value in given), attrs)
        tile = {"1": "t", "2": "2t"}
        each = zip(given, halves, strict=True)
        return self.op(
            "".join("_" if v is None else "n" if isinstance(v, Real) else tile[half] for v, half in each), attrs
        )

    def find(self, text: str) -> Op:
        """The op of a text such as ``trt``, or with attributes ``t(limit=2.0)``.

        Raises:
            TypeError, ValueError: there is none.
        """
        found = _CALL.fullmatch(text)
        kinds = _KIND.findall(found[1]) if found else []
        if found is None or len(kinds) != len(self.operands):
            raise ValueError(
                f"{self.name} has no op {text!r}: write a kind for each of {', '.join(self.operands)}: t for a tile, "
                "r for a row vector, c for a column vector, s for a scalar, n for a number, _ if it is left out, 2t "
                "and 2r for two halves"
            )
        pairs = [pair.partition("=") for pair in (found[2] or "").split(",") if pair]
        try:
            given = {name.strip(): ast.literal_eval(value.strip()) for name, _, value in pairs}
        except (SyntaxError, ValueError):
            raise ValueError(f"{found[2]!r} are no attributes of {self.name}: write t(limit=2.0,kind='silu')") from None
        if unknown := [name for name in given if name not in self._attrs]:
            raise ValueError(f"{self.name} has no attribute {unknown[0]!r}{meant(unknown[0], self._attrs)}")
        return self.op(found[1], self._with_defaults(given))

    def texts(self) -> dict[str, Op]:
        """The ops of all calls so far, by the text that :meth:`find` takes, without ops that no text describes. If a
        number that the function refers to has changed, it is the last op.
        """
        found = {}
        for (kinds, attrs), op in list(self._last.items()):
            differing = {name: value for name, value in attrs if repr(value) != repr(self._attrs[name])}
            if all(map(_has_text, differing.values())):
                said = ",".join(f"{name}={value!r}" for name, value in differing.items())
                found[f"{kinds}({said})" if said else kinds] = op
        return found

    def _refuse(self, error: type[Exception], problem: str, shapes: Sequence[Sizes] = ()) -> NoReturn:
        """Raise an error that names the function and lists the shapes of its operands."""
        lines = [f"cute.{self.name}: {problem}"]
        for name, shape in zip(self.operands, shapes, strict=False):
            if shape is not None:
                lines.append(f"  {name}: {shape if isinstance(shape, str) else [*shape]}")
        raise error("\n".join(lines))


def _has_text(value: Any) -> bool:
    """Whether :meth:`ByCall.find` can read an attribute's value."""
    if type(value) is float:
        return math.isfinite(value)
    return value is None or (isinstance(value, bool | int | str) and _VALUE.fullmatch(repr(value)) is not None)


def dtype_of(operand: Any) -> str:
    """The name of an array's dtype, ``float32``."""
    return str(operand.dtype).rpartition(".")[2]


def presence(shapes: Sequence[Sizes], dtypes: Sequence[str]) -> str:
    """Which operands of a call are given: ``1`` for each that is, ``M`` for bools, ``0`` for each that is left out."""
    each = zip(shapes, dtypes, strict=True)
    return "".join("0" if shape is None else "M" if dtype == "bool" else "1" for shape, dtype in each)


def kinds(fits: Sequence[Fit | None]) -> str:
    """The kinds of a call's operands as one text."""
    return "".join(KINDS[how and how.shape] for how in fits)
