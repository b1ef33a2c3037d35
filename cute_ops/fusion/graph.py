"""A program as a graph of twelve operations, into which front ends translate fx graphs and jaxprs.

========== ==================================================================================================
operation  attribute
========== ==================================================================================================
input      None: an array that comes from outside
constant   the number or bool, rounded to float32
primitive  one of expressions (:mod:`cute_ops.expressions.primitives`), or ``(primitive, size of a group)``
cast       None: to the node's dtype
reduce     ``(primitive, axes, keepdims)``
contract   ``(dims of the left, dims of the right)`` that are summed over, and ``(left, right)`` dims of a batch
reshape    None: to the node's shape
transpose  the permutation
broadcast  for each dim of the argument, the dim of the result
slice      ``(axis, start, stop, step)``
concat     the axis
opaque     a name: what no other operation says
========== ==================================================================================================

Equal nodes are one node, except inputs and opaque ones. Sizes are ints, or texts where they are symbolic.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Hashable, Sequence
from typing import Any

from cute_ops.expressions.reference import CUBE, REFERENCE, SLOPE
from cute_ops.expressions.simplify import fold

Size = int | str
Shape = tuple[Size, ...]
FLOATS = ("float32", "bfloat16", "float16")
NARROW = ("bfloat16", "float16")
# Constants of GELU, which programs in 16 bits carry rounded to 16 bits.
_EXACT = (SLOPE, CUBE, math.sqrt(0.5), math.sqrt(2.0), 2 * SLOPE)
_MANTISSA = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


class Node:
    """A value of the program.

    Attributes:
        op: an operation.
        args: what it is computed from.
        attr: as the module's table has it.
        shape: its sizes.
        dtype: the name of its dtype, ``bfloat16``.
        index: its place among the graph's nodes; arguments come first.
        users: the nodes that read it.
    """

    __slots__ = ("args", "attr", "dtype", "index", "op", "shape", "users")

    def __init__(self, op: str, args: tuple[Node, ...], attr: Any, shape: Shape, dtype: str) -> None:
        self.op, self.args, self.attr, self.shape, self.dtype = op, args, attr, shape, dtype
        self.index = -1
        self.users: list[Node] = []

    def __repr__(self) -> str:
        said = "" if self.attr is None else f" {self.attr}"
        return f"<{self.index} {self.op}{said} {self.dtype}{list(self.shape)}>"


class Graph:
    """Nodes as they are made, in an order in which arguments come first.

    Attributes:
        exact: constants stay as the program rounds them.
        nodes: all of them.
        outputs: what the program returns, or keeps.
    """

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self.nodes: list[Node] = []
        self.outputs: list[Node] = []
        self._known: dict[Hashable, Node] = {}

    def make(
        self, op: str, args: Sequence[Node] = (), attr: Hashable = None, shape: Shape = (), dtype: str = "float32"
    ) -> Node:
        """A node of an operation, as given; the methods below bring what they make into its normal form."""
        unique = op in ("input", "opaque")
        key = (op, attr, shape, dtype, *(arg.index for arg in args))
        found = None if unique else self._known.get(key)
        if found is None:
            found = Node(op, tuple(args), attr, shape, dtype)
            found.index = len(self.nodes)
            self.nodes.append(found)
            for arg in dict.fromkeys(args):
                arg.users.append(found)
            if not unique:
                self._known[key] = found
        return found

    def input(self, shape: Shape, dtype: str) -> Node:
        return self.make("input", (), None, shape, dtype)

    def opaque(self, name: str, args: Sequence[Node], shape: Shape, dtype: str) -> Node:
        return self.make("opaque", args, name, shape, dtype)

    def constant(self, value: float | bool, dtype: str = "float32") -> Node:
        """A number, rounded to float32, in which expressions compute; NaN is opaque.

        A constant of GELU's formulas that was rounded to ``dtype`` is the one before, unless the graph is exact: what
        a function means does not depend on the dtype in which it runs.
        """
        if isinstance(value, bool):
            return self.make("constant", (), value, (), "bool")
        value = float(value)
        if math.isnan(value):
            return self.opaque("NaN", (), (), dtype)
        if dtype in _MANTISSA and not self.exact:
            exact = (each for each in _EXACT if math.isclose(abs(value), each, rel_tol=_MANTISSA[dtype]))
            value = math.copysign(next(exact, abs(value)), value)
        if math.isfinite(value) and abs(value) < 3e38:
            value = struct.unpack("f", struct.pack("f", value))[0]
        return self.make("constant", (), value, (), "float32")

    def primitive(self, name: str, args: Sequence[Node], shape: Shape, dtype: str) -> Node:
        """A primitive of elements. ``erfc`` is written with others; primitives of constants are constants."""
        numbers = [arg.attr for arg in args if arg.op == "constant"]
        if numbers and len(numbers) == len(args) and name in REFERENCE and shape == ():
            folded = fold(name, *numbers)
            if folded is not None:
                return self.constant(folded)
        if name == "where" and args[0].op == "constant":
            return self.broadcast(self.cast(args[1 if args[0].attr else 2], dtype), shape)
        if name == "erfc":  # 2 ndtr(-x sqrt(2)): one minus erf would cancel
            turned = self.primitive("negative", args, args[0].shape, dtype)
            scaled = self.primitive("multiply", [turned, self.constant(math.sqrt(2))], turned.shape, dtype)
            half = self.make("primitive", [scaled], "ndtr", shape, dtype)
            return self.primitive("multiply", [half, self.constant(2.0)], shape, dtype)
        if name == "maximum":  # of rows without elements
            for x, bound in (args, args[::-1]):
                if bound.op == "constant" and bound.attr == -math.inf and x.shape == shape:
                    return x
        return self.make("primitive", args, name, shape, dtype)

    def power(self, x: Node, power: float, shape: Shape, dtype: str) -> Node | None:
        """``x`` to a constant power; None where it is no product of few factors."""
        if power in (0.5, -0.5):
            return self.primitive("sqrt" if power > 0 else "rsqrt", [x], shape, dtype)
        if power < 0:
            positive = self.power(x, -power, shape, dtype)
            return positive and self.primitive("reciprocal", [positive], shape, dtype)
        if power == 1:
            return x
        if power not in (2, 3, 4):
            return None
        square = self.primitive("square", [x], shape, dtype)
        if power == 2:
            return square
        return self.primitive("multiply", [square, x if power == 3 else square], shape, dtype)

    def cast(self, x: Node, dtype: str) -> Node:
        if x.op == "constant" and dtype in FLOATS:
            return self.constant(float(x.attr))
        return x if x.dtype == dtype else self.make("cast", [x], None, x.shape, dtype)

    def reduce(self, primitive: str, x: Node, axes: Sequence[int], keepdims: bool, dtype: str) -> Node:
        axes = tuple(sorted(axis % len(x.shape) for axis in axes))
        if all(x.shape[axis] == 1 for axis in axes):
            left = x.shape if keepdims else tuple(size for i, size in enumerate(x.shape) if i not in axes)
            return self.cast(self.reshape(x, left), dtype)
        kept = tuple(1 if i in axes else size for i, size in enumerate(x.shape))
        shape = kept if keepdims else tuple(size for i, size in enumerate(x.shape) if i not in axes)
        return self.make("reduce", [x], (primitive, axes, keepdims), shape, dtype)

    def reshape(self, x: Node, shape: Shape) -> Node:
        """Another shape. A product of rows that were joined before is the product of the rows as they were, and pairs
        of which each was turned are the primitive ``rotate_pairs``.
        """
        if x.shape == shape:
            return x
        if x.op == "concat" and (turned := _turned_pairs(x, shape)) is not None:
            return self.make("primitive", [turned], ("rotate_pairs", shape[-1]), shape, x.dtype)
        if x.op == "contract" and x.args[0].op == "reshape" and x.attr[2] == ((), ()):
            left, right = x.args
            rows = left.args[0]
            joined = x.attr[0] == (len(left.shape) - 1,) and rows.shape[-1:] == left.shape[-1:]
            if joined and len(shape) == len(rows.shape) and shape == (*rows.shape[:-1], x.shape[-1]):
                return self.make("contract", [rows, right], ((len(rows.shape) - 1,), *x.attr[1:]), shape, x.dtype)
        return self.make("reshape", [x], None, shape, x.dtype)

    def broadcast(self, x: Node, shape: Shape, dims: Sequence[int] | None = None) -> Node:
        """``dims``: for each dim of x that of the result; by default they are the last ones, as in NumPy."""
        if dims is None:
            dims = range(len(shape) - len(x.shape), len(shape))
        return x if x.shape == shape else self.make("broadcast", [x], tuple(map(int, dims)), shape, x.dtype)

    def transpose(self, x: Node, order: Sequence[int]) -> Node:
        """Transposing twice is one transposition; that of a product's two kinds of rows exchanges its operands."""
        order = tuple(axis % len(x.shape) for axis in order)
        if x.op == "transpose":
            x, order = x.args[0], tuple(x.attr[axis] for axis in order)
        if order == tuple(range(len(order))):
            return x
        shape = tuple(x.shape[axis] for axis in order)
        if x.op == "contract" and x.attr[2] == ((), ()):
            (left, right), (a, b, none) = x.args, x.attr
            of_left = len(left.shape) - len(a)
            if order == (*range(of_left, len(order)), *range(of_left)):
                return self.make("contract", [right, left], (b, a, none), shape, x.dtype)
        return self.make("transpose", [x], order, shape, x.dtype)

    def slice(self, x: Node, axis: int, start: Size, stop: Size, step: Size = 1) -> Node:
        whole = x.shape[axis]
        if (start, stop, step) == (0, whole, 1):
            return x
        shape = list(x.shape)
        if isinstance(start, int) and isinstance(stop, int) and isinstance(step, int):
            shape[axis] = -((start - stop) // step)
        else:
            shape[axis] = f"({stop}-{start})//{step}"
        return self.make("slice", [x], (axis, start, stop, step), tuple(shape), x.dtype)

    def concat(self, parts: Sequence[Node], axis: int, shape: Shape) -> Node:
        """Parts one after the other; of a rotation's two halves, the primitive ``rotate_half``."""
        rotated = rotation(parts, axis)
        if rotated is not None:
            return self.make("primitive", [rotated], ("rotate_half", shape[-1]), shape, rotated.dtype)
        return self.make("concat", parts, axis, shape, parts[0].dtype)

    def contract(
        self, left: Node, right: Node, dims: tuple[tuple[int, ...], tuple[int, ...]], shape: Shape, dtype: str,
        batch: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> Node:  # fmt: skip
        """A product: the dims of a batch first, then what is left of the left operand, then of the right one.

        An operand that is transposed is read as it lies.
        """
        if batch == ((), ()) and len(dims[0]) == 1:
            (left, a), (right, b) = _as_it_lies(left, dims[0][0]), _as_it_lies(right, dims[1][0])
            dims = ((a,), (b,))
        return self.make("contract", [left, right], (*dims, batch), shape, dtype)


def _as_it_lies(x: Node, axis: int) -> tuple[Node, int]:
    """A matrix before it was transposed, and which of its dims is summed over."""
    if x.op == "transpose" and len(x.shape) == 2:
        return x.args[0], 1 - axis
    return x, axis


def _turned_pairs(x: Node, shape: Shape) -> Node | None:
    """``x`` of ``stack([-x[..., 1::2], x[..., ::2]], axis=-1)`` with the pairs joined to this shape."""
    if len(x.args) != 2 or x.attr != len(x.shape) - 1 or any(part.op != "reshape" for part in x.args):
        return None
    odd, even = (part.args[0] for part in x.args)
    if odd.op != "primitive" or odd.attr != "negative" or even.op != "slice" or odd.args[0].op != "slice":
        return None
    whole, n, last = even.args[0], shape[-1], len(shape) - 1
    bounds = (odd.args[0].attr, even.attr)
    same = odd.args[0].args[0] is whole and whole.shape == shape
    return whole if same and bounds == ((last, 1, n, 2), (last, 0, n, 2)) else None


def rotation(parts: Sequence[Node], axis: int) -> Node | None:
    """``x`` of ``concat(-x[..., h:], x[..., :h])``; None of other parts."""
    if len(parts) != 2 or parts[0].op != "primitive" or parts[0].attr != "negative" or axis != len(parts[0].shape) - 1:
        return None
    high, low = parts[0].args[0], parts[1]
    if high.op != "slice" or low.op != "slice" or high.args[0] is not low.args[0]:
        return None
    x = low.args[0]
    n = x.shape[axis]
    if not isinstance(n, int) or n % 2 or (high.attr, low.attr) != ((axis, n // 2, n, 1), (axis, 0, n // 2, 1)):
        return None
    return x
