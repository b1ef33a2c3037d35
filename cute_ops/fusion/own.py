"""Ops of a user's own that take part in recognition: a region that computes what such an op means becomes the op.

What an op means is its reference, or a function that says it in array-API style. That of a product is a function of the
product and of the op's other inputs, as an epilogue is.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cute_ops.declaration.op import Op
from cute_ops.expressions.graph import Expression, rebuilt
from cute_ops.expressions.tracing import trace
from cute_ops.fusion.analyse import Found
from cute_ops.fusion.canonical import Canonical, canonical, with_holes
from cute_ops.fusion.express import COLUMNS
from cute_ops.fusion.match import shortest

ACC = "acc"
_SHAPES = ("*m n", "*m 2n", "n", "2n", "*m 1", "")
_PROBE = 0.0123456789  # stands for any value of an attribute
_CLOSE = 2**-20


class Own(NamedTuple):
    """An op of a user's own for :func:`cute_ops_torch.inductor.enable` and for ``cute_ops_jax.fuse``.

    Attributes:
        op: the op.
        meaning: ``meaning(xp, *inputs, **attrs)`` in array-API style, the op's reference by default. With a product
            ``meaning(xp, acc, *others, **attrs)``, where ``acc`` is the product in float32. Hidden outputs are left
            out.
        product: the names of the inputs that are multiplied: rows, ``*m k``, and the matrix, ``n k`` or ``k n``.
    """

    op: Op
    meaning: Callable[..., Any] | None = None
    product: tuple[str, str] | None = None


class Owned(NamedTuple):
    """A region that an op computes.

    Attributes:
        own: the op, with what it means.
        operands: the input that each operand of the found expression is; ``acc`` is the product.
        outputs: the output that each root is.
        attrs: the op's attributes.
    """

    own: Own
    operands: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]


class _Pattern(NamedTuple):
    own: Own
    operands: tuple[str, ...]
    outputs: tuple[str, ...]
    numbers: tuple[float, ...]
    holes: Mapping[int, tuple[str, str]]

    def attrs_of(self, numbers: Sequence[float]) -> dict[str, Any] | None:
        """The attributes where these numbers fill the holes; None where the op computes with others."""
        found: dict[str, Any] = {}
        for i, (name, how) in sorted(self.holes.items(), key=lambda hole: [*_HOW].index(hole[1][1])):
            found.setdefault(name, shortest(_HOW[how](numbers[i])) if numbers[i] else 0.0)
        for i, (own, given) in enumerate(zip(self.numbers, numbers, strict=True)):
            wanted = own
            if i in self.holes:
                name, how = self.holes[i]
                wanted = _HOW[how](found[name]) if found[name] else 0.0
            if not math.isclose(wanted, given, rel_tol=_CLOSE):
                return None
        return {**self.own.op.attrs, **found}


# How a number in an expression may follow from an attribute. Each function is its own inverse; the attribute itself is
# tried first.
_HOW: dict[str, Callable[[float], float]] = {
    "itself": lambda x: x, "negative": lambda x: -x, "reciprocal": lambda x: 1 / x, "opposite": lambda x: -1 / x,
}  # fmt: skip


class Meanings:
    """Ops of users, by the canonical text of what they compute.

    Args:
        ops: ops, or :class:`Own` where an op's reference does not say what it means.

    Raises:
        TypeError: one is no op.
        ValueError: what an op means is no expression of rows; says what to give.
    """

    def __init__(self, ops: Sequence[Op | Own]) -> None:
        self.ops = [each if isinstance(each, Own) else Own(_checked(each)) for each in ops]
        self._patterns: dict[str, list[_Pattern]] = {}
        for own in self.ops:
            text, pattern = _pattern(own)
            self._patterns.setdefault(text, []).append(pattern)

    def of(self, found: Found, products: Sequence[int]) -> tuple[Owned, int] | None:
        """The op that computes an expression, and which operand is the product that it computes, too, -1 for none.

        Args:
            found: the expression.
            products: its operands that are products which may take an epilogue.
        """
        if not self._patterns:
            return None
        text, numbers = with_holes(found.expression)
        for pattern in self._patterns.get(text, ()):
            attrs = pattern.attrs_of(numbers)
            place = pattern.operands.index(ACC) if pattern.own.product else -1
            if attrs is not None and (place < 0 or (place in products and _fits(found, place, pattern.own))):
                return Owned(pattern.own, pattern.operands, pattern.outputs, attrs), place
        return None

    @property
    def key(self) -> str:
        """All that decides what becomes one of the ops, the same in every process."""
        return repr([
            (text, each.own.op.name, each.own.product, *each[1:])
            for text, patterns in self._patterns.items() for each in patterns
        ])  # fmt: skip


def _fits(found: Found, place: int, own: Own) -> bool:
    """Whether a product is of whole rows and of a matrix that lies as the op takes it."""
    assert own.product is not None
    leaf = found.leaves[place]
    whole = leaf.node.shape[:-1] == found.rows and leaf.labels[-1] == COLUMNS
    return whole and (leaf.node.attr[1] == (0,)) == own.op.inputs[own.product[1]].shape.startswith("k")


def _checked(op: Any) -> Op:
    if not isinstance(op, Op):
        raise TypeError(f"an op of your own must be an Op, or Own(op, ...), got {type(op).__name__}.")
    return op


def _pattern(own: Own) -> tuple[str, _Pattern]:
    op, names = own.op, [name for name in own.op.inputs if name not in (own.product or ())]
    shapes = {**({ACC: "*m n"} if own.product else {}), **{name: op.inputs[name].shape for name in names}}
    if own.product and set(own.product) - set(op.inputs):
        raise ValueError(f"{op.name}: product names {own.product}, but the op has the inputs {', '.join(op.inputs)}.")
    if own.product and own.meaning is None:
        raise ValueError(f"{op.name}: say what follows the product: Own(op, meaning, product), meaning(xp, acc, ...).")
    if wrong := [name for name, shape in shapes.items() if shape not in _SHAPES]:
        listed = ", ".join(map(repr, _SHAPES))
        raise ValueError(f"{op.name}: input `{wrong[0]}` has shape {shapes[wrong[0]]!r}; recognised are {listed}.")
    made = _traced(own, shapes, op.attrs)
    text, numbers = with_holes(made.expression)
    given, outputs = list(shapes), _shown(op)
    operands = tuple(given[i] for i in made.operands)
    outs = tuple(outputs[k] for k in made.outputs)
    return text, _Pattern(own, operands, outs, numbers, _holes(own, shapes, text, numbers))


def _holes(own: Own, shapes: Mapping[str, str], text: str, numbers: tuple[float, ...]) -> dict[int, tuple[str, str]]:
    """The numbers that follow from an attribute alone: which one, and how."""
    holes: dict[int, tuple[str, str]] = {}
    for name, value in own.op.attrs.items():
        if isinstance(value, float):
            probed_text, probed = with_holes(_traced(own, shapes, {**own.op.attrs, name: _PROBE}).expression)
            changed = [i for i, (a, b) in enumerate(zip(numbers, probed, strict=False)) if a != b]
            how = {i: next((k for k, f in _HOW.items() if math.isclose(probed[i], f(_PROBE), rel_tol=_CLOSE)), "")
                   for i in changed}  # fmt: skip
            if probed_text == text and all(how.values()):
                holes |= {i: (name, each) for i, each in how.items()}
    return holes


def _traced(own: Own, shapes: Mapping[str, str], attrs: Mapping[str, Any]) -> Canonical:
    function = own.meaning or own.op.reference
    if own.meaning is not None:  # which has those attributes alone that it computes with
        taken = inspect.signature(own.meaning).parameters
        attrs = {name: value for name, value in attrs.items() if name in taken}

    def meaning(xp: Any, **given: Any) -> Any:
        returned = function(_Wide(xp), *(given[name] for name in shapes), **attrs)
        if not isinstance(returned, tuple) or len(returned) != len(own.op.outputs):
            return returned
        return tuple(x for x, output in zip(returned, own.op.outputs.values(), strict=True) if not output.hidden)

    meaning.__qualname__ = own.op.name
    try:
        expression = trace(meaning, shapes)
    except (TypeError, ValueError, AttributeError) as error:
        hint = "its reference is no expression of rows, give Own(op, meaning)"
        raise ValueError(f"{own.op.name}: {hint}: {str(error).splitlines()[0]}") from error
    made = canonical(_unrounded(expression))
    if len(made.outputs) != len(shown := _shown(own.op)):
        raise ValueError(f"{own.op.name}: {len(made.outputs)} values are computed, of the outputs {', '.join(shown)}.")
    return made


def _shown(op: Op) -> list[str]:
    """The outputs of which a program knows: not those that are kept for the gradient."""
    return [name for name, output in op.outputs.items() if not output.hidden]


class _Wide:
    """An array namespace as references use it, in which floats are not rounded: meanings are compared without that.
    Reductions may drop the dim of columns.
    """

    float64, float32, float16, bfloat16 = "float64", "float32", "float16", "bfloat16"

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        xp._graph.squeezes = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._xp, name)

    def zeros_like(self, x: Any) -> float:
        return 0.0

    def ones_like(self, x: Any) -> float:
        return 1.0

    def astype(self, x: Any, dtype: Any) -> Any:
        return self._xp.astype(x, dtype) if "bool" in (str(dtype), getattr(x, "dtype", "")) else x


def _unrounded(expression: Expression) -> Expression:
    """An expression without the dtypes of its outputs, which the op's declaration has."""
    nodes = expression.nodes
    outputs = [nodes[i].args[0] if nodes[i].primitive == "astype" else i for i in expression.outputs]
    return rebuilt(expression, outputs=outputs)
