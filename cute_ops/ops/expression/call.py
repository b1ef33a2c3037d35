"""The op of a call follows from an expression, the shapes of its operands, and the product that it reads, if any.

:func:`op_of` is for whoever has an expression. ``fused`` without declared shapes (:mod:`by_call`) and ``linear`` with
an epilogue (:mod:`cute_ops.ops.gemm.by_call`) have a function: they trace it once for each combination of attributes
and of the numbers that it refers to, and then run the op that :func:`op_of` gives.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from cute_ops.constants import Unknown, constant, make_room, state
from cute_ops.constants.exact import is_constant
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import Array
from cute_ops.expressions.graph import SHAPES as OPERANDS
from cute_ops.expressions.graph import Expression
from cute_ops.expressions.symbols import HalvesError
from cute_ops.expressions.text import parse, text_of
from cute_ops.expressions.tracing import trace
from cute_ops.ops.expression.broadcast import NUMBER, Fit, Refuse, fits, with_dtypes
from cute_ops.ops.expression.fused import BOOL, INT, fused_traced, shape_of

Attrs = tuple[tuple[str, Any], ...]
Shapes = Mapping[str, str | None]
Arrays = Mapping[str, Array | str | None]
Function = Callable[..., Any]
T = TypeVar("T")
EXPRESSION = "expression"  # what an expression without a name is called
DTYPES = {"F": "float32", "H": "float16", "B": "bfloat16"}
# The declared shape of an operand of each kind.
SHAPES: dict[str, str | None] = {
    "t": "*m n", "2t": "*m 2n", "e": "any *m n", "2e": "any *m 2n", "r": "n", "2r": "2n", "c": "*m 1", "s": "",
    "n": NUMBER, "_": None, "b": "*b n", "2b": "*b 2n", "d": "*b 1",
    **{f"t{letter}": f"{dtype} *m n" for letter, dtype in DTYPES.items()},
    **{f"2t{letter}": f"{dtype} *m 2n" for letter, dtype in DTYPES.items()},
}  # fmt: skip
# Operands of bools, and of whole numbers.
SHAPES |= {
    f"{kind}{letter}": f"{word} {SHAPES[kind]}".strip()
    for letter, word in (("M", BOOL), ("I", INT)) for kind in ("t", "2t", "r", "2r", "c", "s")
}  # fmt: skip
KINDS = {shape: kind for kind, shape in SHAPES.items()}
# Ops without a product, by name; functions with the same expression share one.
_ops: dict[str, Op] = {}


class Product(Protocol):
    """The product that an expression reads: :class:`cute_ops.ops.gemm.by_call.Product`."""

    def op(self, expression: Expression | str, operands: Shapes, name: str) -> Op:
        """The op of the product with the expression as its epilogue."""

    def fits(self, expression: Expression, operands: Arrays) -> Mapping[str, Fit | None]:
        """How the operands besides the product broadcast to its shape."""


def op_of(
    expression: Expression | str, operands: Mapping[str, str | Array | None], product: Product | None = None, *,
    name: str = "",
) -> Op:  # fmt: skip
    """The op of an expression. It is the op that ``fused(function)``, or with a product ``linear(epilogue=function)``,
    runs for a function of this name whose trace is the expression.

        op_of("e1(t,r) add 0 1; gelu 2 -> 3", {"x": "*m n", "bias": "n"}, name="gelu_bias")
        op_of("e1(t,r) add 0 1; gelu 2 -> 3", {"bias": Array((768,), "float32")}, Product.of(x, weight))

    ``register`` of an adapter makes a function of it, whose arguments are x and the weight of a product, then the
    operands that are not None, broadcast as :func:`fits_of` says.

    Args:
        expression: a graph, or its text. With a product its first operand is that.
        operands: by name, in order, those of the expression besides the product, and with None what a function has, but
            was left out. Either as declared shapes, ``*m n`` and others that :func:`cute_ops.fused` has, or
            :data:`NUMBER` for a scalar without a gradient; or the arrays of a call, as their shapes and dtypes.
        product: what the expression is the epilogue of.
        name: what the op's name begins with.

    Raises:
        ValueError: a text is no expression, or operands are others than the expression's or do not broadcast.
    """
    shapes: Shapes
    if any(isinstance(operand, Array) for operand in operands.values()):
        found = fits_of(expression, operands, product, name=name)
        shapes = {key: how and how.shape for key, how in found.items()}
    else:
        shapes = operands  # type: ignore[assignment]
    if product is not None:
        return product.op(expression, shapes, name)
    return of_elements(_graph(expression), shapes, readable(name) or EXPRESSION)


def fits_of(
    expression: Expression | str, operands: Arrays, product: Product | None = None, *, name: str = ""
) -> Mapping[str, Fit | None]:
    """How the arrays of a call broadcast to the shape of the expression's values. Arguments and errors as of
    :func:`op_of`.
    """
    graph = _graph(expression)
    if product is not None:
        return product.fits(graph, operands)

    def refuse(problem: str) -> Any:
        raise ValueError(f"cute.{name or EXPRESSION}: {problem}")

    packed = iter(operand.packed for operand in graph.operands)
    given = [operand is not None for operand in operands.values()]
    if sum(given) != len(graph.operands):
        refuse(f"{sum(given)} operands were given for the {len(graph.operands)} of the expression.")
    halves = "".join("2" if each and next(packed) else "1" for each in given)
    sizes = {key: a.shape if isinstance(a, Array) else a for key, a in operands.items()}
    dtypes = [a.dtype if isinstance(a, Array) else "" for a in operands.values()]
    return dict(zip(operands, with_dtypes(fits(sizes, halves, refuse), dtypes), strict=True))


def of_elements(expression: Expression, operands: Shapes, name: str, function: Function | None = None) -> Op:
    """The op of an expression that reads no product. ``function`` is what it was traced from, if there is one."""
    if unknown := [key for key, shape in operands.items() if shape not in KINDS]:
        raise ValueError(f"cute.{name}: operand `{unknown[0]}` has the shape {operands[unknown[0]]!r}, which none has.")
    kinds, shapes = "".join(KINDS[shape] for shape in operands.values()), declared(operands)
    given = tuple(OPERANDS[shape_of(shape)] for shape in shapes.values())
    if given != expression.operands:
        takes, has = (",".join(map(str, each)) for each in (expression.operands, given))
        raise ValueError(f"cute.{name}: the expression takes ({takes}), and the operands are ({has}).")
    full = f"{name}_{kinds}_{digest(text_of(expression), kinds, *shapes)}"
    if full not in _ops:
        numbers = tuple(key for key, shape in operands.items() if shape == NUMBER)
        op = fused_traced(expression, shapes, full, no_gradient=numbers, function=function, called=name)
        _ops.setdefault(full, op)
    return _ops[full]


def declared(operands: Shapes) -> dict[str, str]:
    """The shapes of operands that are not left out, a number's as that of a scalar."""
    return {key: "" if shape == NUMBER else shape for key, shape in operands.items() if shape is not None}


def readable(name: str) -> str:
    """A name of what Python calls a function, ``<lambda>``."""
    return re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")


def names_of_inputs(names: Sequence[str], taken: re.Pattern[str], other: str) -> list[str]:
    """Names that an op may have for inputs which a call names: ``other`` and a number in the place of those that are
    ``taken``, given twice, no name in ASCII, or beside ``x`` the name of its gradient, ``dx``.
    """
    gradients = {f"d{name}" for name in names}
    return [
        name
        if name.isascii() and name.isidentifier() and names.count(name) == 1 and name not in gradients
        and not taken.fullmatch(name) and not re.fullmatch(rf"d?{other}\d+", name)
        else f"{other}{i}"
        for i, name in enumerate(names)
    ]  # fmt: skip


def digest(*parts: str) -> str:
    """The suffix of an op's name."""
    return hashlib.sha256("; ".join(parts).encode()).hexdigest()[:12]


def _graph(expression: Expression | str) -> Expression:
    return parse(expression) if isinstance(expression, str) else expression


def key_of(function: Function | str, attrs: Attrs, *what: Hashable) -> Hashable:
    """A key of ``what``, of a function with what it refers to, and of attributes; None where it cannot be known whether
    that changes: then the function is traced anew.
    """
    if type(function) is str:  # the text of an expression has no attributes: some are refused each time
        return None if attrs else (function, what)
    refers_to = state(function)
    if not attrs or refers_to is None:
        return refers_to and (refers_to, what)
    try:
        return refers_to, what, constant(attrs)
    except Unknown:
        return None


def remembered(
    table: dict[Hashable, T], function: Function | str, attrs: Attrs, what: Hashable, make: Callable[[], T]
) -> T:
    """The table's entry for :func:`key_of` these; if there is none, ``make`` makes it."""
    key = key_of(function, attrs, what)
    found = table.get(key) if key else None
    if found is None:
        found = make()
        if key and key == key_of(function, attrs, what):  # nothing has changed meanwhile
            make_room(table)
            table[key] = found
    return found


def check_attributes(attrs: Attrs, where: str, refuse: Refuse) -> None:
    """Refuse attributes that are no constants; ``where`` says where a call has its arrays. A number of NumPy is one."""
    for name, value in attrs:
        if not isinstance(value, Hashable) or (hasattr(value, "shape") and not is_constant(value)):
            refuse(
                f"attribute `{name}` is a kernel's constant: give a number or text, not {type(value).__name__}; an "
                f"array is an operand, {where}."
            )


def read_by_halves(function: Function, shapes: Shapes, attrs: Attrs) -> set[str]:
    """The operands that a function reads by halves. Their shapes may have one or both.

    Raises:
        TraceError: it does what an expression cannot say.
    """
    shapes, found = dict(shapes), set[str]()
    while True:
        try:
            trace(function, shapes, dict(attrs))
        except HalvesError as error:
            found.add(error.operand)
            shapes[error.operand] = str(shapes[error.operand]).replace("n", "2n")
        else:
            return found
