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
from collections.abc import Hashable, Mapping, Sequence

from cute_ops.expressions.reference import CUBE, REFERENCE, SLOPE
from cute_ops.expressions.simplify import fold
from cute_ops.fusion import named
from cute_ops.fusion.matrices import Factors, as_matrix
from cute_ops.fusion.node import Node as Node
from cute_ops.fusion.node import Shape as Shape
from cute_ops.fusion.node import Size

FLOATS = ("float32", "bfloat16", "float16")
NARROW = ("bfloat16", "float16")
# Constants of GELU, which programs in 16 bits carry rounded to 16 bits.
_EXACT = (SLOPE, CUBE, math.sqrt(0.5), math.sqrt(2.0), 2 * SLOPE)
_MANTISSA = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


class Graph:
    """Nodes as they are made, in an order in which arguments come first.

    Attributes:
        exact: constants stay as the program rounds them.
        flat: values are rows of one matrix where that is possible, as after autograd, and what a region computes ends
            before views of it.
        nodes: all of them.
        outputs: what the program returns, or keeps.
        named: by opaque node the op that it is.
        meant: of a loop's body, by input that is a mask what it is computed from outside, which is not to be computed.
        fixed: values that are known to have no gradient, such as inputs of a body.
        metrics: whether a loss may give what the program reads of its logits beside it, and its product be in float32.
        heads: by value whose columns the program has as several dims the reshape to these.
    """

    def __init__(self, exact: bool = False, flat: bool = False, metrics: bool = False) -> None:
        self.exact, self.flat, self.metrics = exact, flat, metrics
        self.named: dict[Node, named.Named] = {}
        self.meant: dict[Node, Node] = {}
        self.fixed: set[Node] = set()
        self.heads: dict[Node, Node] = {}
        self._factors: dict[Node, Factors] = {}
        self.nodes: list[Node] = []
        self.outputs: list[Node] = []
        self._known: dict[Hashable, Node] = {}

    def make(
        self, op: str, args: Sequence[Node] = (), attr: Hashable = None, shape: Shape = (), dtype: str = "float32"
    ) -> Node:
        """A node of an operation, as given; the methods below bring what they make into its normal form."""
        unique = op in ("input", "opaque")
        key = None if unique else _key(op, args, attr, shape, dtype)
        found = None if unique else self._known.get(key)
        if found is None:
            found = Node(op, tuple(args), attr, shape, dtype)
            found.index = len(self.nodes)
            self.nodes.append(found)
            for arg in args if len(args) < 2 else dict.fromkeys(args):
                arg.users.append(found)
            if not unique:
                self._known[key] = found
        return found

    def sort(self) -> None:
        """Bring nodes that got other arguments into an order in which arguments come first again."""
        order, done, waiting = list[Node](), set[Node](), self.nodes[::-1]
        while waiting:
            missing = [arg for arg in waiting[-1].args if arg not in done]
            waiting += missing
            if not missing and (node := waiting.pop()) not in done:
                done.add(node)
                order.append(node)
        self.nodes = order
        for i, node in enumerate(order):
            node.index = i
        known = (node for node in self._known.values() if node.op != "opaque")
        self._known = {_key(node.op, node.args, node.attr, node.shape, node.dtype): node for node in known}

    def follow(self, made: Mapping[Node, Node]) -> None:
        """Return, and name, the nodes that took the place of others."""
        if made:
            self.outputs = [made.get(node, node) for node in self.outputs]
            for node, call in self.named.items():
                self.named[node] = call._replace(nodes=tuple(made.get(each, each) for each in call.nodes))
            self.sort()

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
        if (folded := _folded(name, args, shape)) is not None:
            return self.constant(folded)
        if name == "where" and args[0].op == "constant":
            return self.broadcast(self.cast(args[1 if args[0].attr else 2], dtype), shape)
        if name == "erfc":  # 2 ndtr(-x sqrt(2)): one minus erf would cancel
            turned = self.primitive("negative", args, args[0].shape, dtype)
            scaled = self.primitive("multiply", [turned, self.constant(math.sqrt(2))], turned.shape, dtype)
            half = self.make("primitive", [scaled], "ndtr", shape, dtype)
            return self.primitive("multiply", [half, self.constant(2.0)], shape, dtype)
        if name == "maximum" and (bounded := _bounded_by_nothing(args, shape)) is not None:
            return bounded
        if name == "less" and args[1].op == "constant" and args[1].attr <= 0 and self._counts(args[0]):
            return self.broadcast(self.constant(False), shape)
        if name == "add" and (rope := self._rotation(named.of_sum(args), shape, dtype)) is not None:
            return rope
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
        if x.dtype == dtype:
            return x
        if self._names(x, "rope") and named.uncast(self.named[x].nodes[0]).dtype == dtype:
            _, cos, sin = (call := self.named[x]).nodes
            return self._call(call._replace(nodes=(named.uncast(call.nodes[0]), cos, sin)), x.shape, dtype)
        return self.make("cast", [x], None, x.shape, dtype)

    def reduce(self, primitive: str, x: Node, axes: Sequence[int], keepdims: bool, dtype: str) -> Node:
        """A reduction. The sum of all elements of a product with a one-hot matrix is that of its rows' sums."""
        axes = tuple(sorted(axis % len(x.shape) for axis in axes))
        if all(x.shape[axis] == 1 for axis in axes):
            left = x.shape if keepdims else tuple(size for i, size in enumerate(x.shape) if i not in axes)
            return self.cast(self.reshape(x, left), dtype)
        last = len(x.shape) - 1
        of_rows = primitive == "sum" and axes[-1] == last and not keepdims
        if of_rows and not self.exact and (weighed := self._sum_of_one_hot(x, dtype)) is not None:
            return self.reduce(primitive, weighed, axes[:-1], False, dtype) if axes[1:] else weighed
        if of_rows and axes[1:] and _is_of_one_hot(x):
            return self.reduce(primitive, self.reduce(primitive, x, (last,), False, dtype), axes[:-1], False, dtype)
        kept = tuple(1 if i in axes else size for i, size in enumerate(x.shape))
        shape = kept if keepdims else tuple(size for i, size in enumerate(x.shape) if i not in axes)
        return self.make("reduce", [x], (primitive, axes, keepdims), shape, dtype)

    def _sum_of_one_hot(self, x: Node, dtype: str) -> Node | None:
        """The sum of each row of a product of three, of which one is one-hot and one a mask of rows, by which the
        sum is multiplied afterwards; None of anything else.
        """
        for outer, inner in (x.args, x.args[::-1]) if _is_product(x) else ():
            both = _of_floats(inner)
            for one, other in (both.args, both.args[::-1]) if _is_product(both) else ():
                for by_row, rest in ((other, outer), (outer, other)):
                    weight = self._by_row(by_row) if _is_one_hot(one) or _is_one_hot(rest) else None
                    if weight is not None:
                        product = self.primitive("multiply", [rest, one], x.shape, dtype)
                        summed = self.reduce("sum", product, (len(x.shape) - 1,), False, dtype)
                        return self.primitive("multiply", [summed, self.cast(weight, dtype)], summed.shape, dtype)
        return None

    def _by_row(self, x: Node) -> Node | None:
        """The mask of rows that a value has in all columns, as bools or as zeros and ones; None of any other value."""
        bools, rows = self._as_bools(x), len(x.shape) - 1
        if bools is None or bools.op != "broadcast":
            return None
        inner, dims = bools.args[0], bools.attr
        if dims[-1:] == (rows,):
            if inner.shape[-1] != 1:
                return None
            inner, dims = self.reshape(inner, inner.shape[:-1]), dims[:-1]
        return self.broadcast(inner, x.shape[:-1], dims)

    def _as_bools(self, x: Node) -> Node | None:
        """The bools that are cast to a value, perhaps on the way to its shape; None of any other value."""
        x = _of_floats(x)
        if x.dtype == "bool":
            return x
        inner = self._as_bools(x.args[0]) if x.op in ("reshape", "broadcast") else None
        if inner is None:
            return None
        return self.reshape(inner, x.shape) if x.op == "reshape" else self.broadcast(inner, x.shape, x.attr)

    def reshape(self, x: Node, shape: Shape) -> Node:
        """Another shape. A product of rows that were joined before, with or without a bias, is that of the rows as they
        were, and pairs of which each was turned are the primitive ``rotate_pairs``.
        """
        x = self._of_view(x, shape)
        if x.op == "reshape" and x.args[0].shape == shape:
            return x.args[0]
        if x.shape == shape:
            return x
        if (joined := self._joined(x, shape)) is not None:
            return joined
        if (product := self._of_rows(x, shape)) is not None:
            return product
        if (x.op, x.attr) == ("primitive", "add"):
            made = [self._of_rows(arg, shape) for arg in x.args]
            if any(a is not None and len(b.shape) == 1 for a, b in zip(made, x.args[::-1], strict=True)):
                return self.primitive("add", [a or b for a, b in zip(made, x.args, strict=True)], shape, x.dtype)
        return self.make("reshape", [x], None, shape, x.dtype)

    def _joined(self, x: Node, shape: Shape) -> Node | None:
        """Columns that were stacked, one beside the other in this shape; None of what says no more than a reshape."""
        if (columns := named.columns_of(x, shape)) is not None:
            return self.concat([self.cast(part, x.dtype) for part in columns], x.attr, shape)
        if x.op == "concat" and (turned := named.turned_pairs(x, shape)) is not None:
            return self.make("primitive", [self.cast(turned, x.dtype)], ("rotate_pairs", shape[-1]), shape, x.dtype)
        pairs = x.args[0] if x.op == "cast" else x
        turn = named.of_pairs(pairs, shape) if pairs.op == "concat" else None
        rope = self._rotation(turn, shape, pairs.dtype)
        return None if rope is None else self.cast(rope, x.dtype)

    def _of_view(self, x: Node, shape: Shape) -> Node:
        """The node below a reshape in a flat graph, if its last dim is that of this shape; else the node itself."""
        view = self.flat and x.op == "reshape" and x.args[0].shape[-1:] == shape[-1:]
        return x.args[0] if view else x

    def _of_rows(self, x: Node, shape: Shape) -> Node | None:
        """The product of rows as they were before they were joined for it, in this shape; None of what is none."""
        if self.flat or x.op != "contract" or x.args[0].op != "reshape" or x.attr[2] != ((), ()):
            return None
        left, right = x.args
        rows = left.args[0]
        joined = x.attr[0] == (len(left.shape) - 1,) and rows.shape[-1:] == left.shape[-1:]
        if not joined or len(shape) != len(rows.shape) or shape != (*rows.shape[:-1], x.shape[-1]):
            return None
        return self.make("contract", [rows, right], ((len(rows.shape) - 1,), *x.attr[1:]), shape, x.dtype)

    def broadcast(self, x: Node, shape: Shape, dims: Sequence[int] | None = None) -> Node:
        """``dims``: for each dim of x that of the result; by default they are the last ones, as in NumPy."""
        if dims is None:
            dims = range(len(shape) - len(x.shape), len(shape))
        return x if x.shape == shape else self.make("broadcast", [x], tuple(map(int, dims)), shape, x.dtype)

    def transpose(self, x: Node, order: Sequence[int]) -> Node:
        """Transposing twice is one transposition; that of a product's two kinds of rows exchanges its operands, that of
        copies copies to other dims, and one that moves dims of one element alone is a reshape.
        """
        order = tuple(axis % len(x.shape) for axis in order)
        if x.op == "transpose":
            x, order = x.args[0], tuple(x.attr[axis] for axis in order)
        if order == tuple(range(len(order))):
            return x
        shape = tuple(x.shape[axis] for axis in order)
        if x in self._factors and (exchanged := self._exchanged(self._factors[x], x, order)) is not None:
            return exchanged
        if x.op == "contract" and x.attr[2] == ((), ()):
            (left, right), (a, b, none) = x.args, x.attr
            of_left = len(left.shape) - len(a)
            if order == (*range(of_left, len(order)), *range(of_left)):
                return self.make("contract", [right, left], (b, a, none), shape, x.dtype)
        if x.op == "broadcast" and isinstance(x.attr, tuple):
            dims = [order.index(dim) for dim in x.attr]
            inner = self.transpose(x.args[0], sorted(range(len(dims)), key=dims.__getitem__))
            return self.broadcast(inner, shape, sorted(dims))
        kept = [axis for axis in order if x.shape[axis] != 1]
        return self.reshape(x, shape) if kept == sorted(kept) else self.make("transpose", [x], order, shape, x.dtype)

    def slice(self, x: Node, axis: int, start: Size, stop: Size, step: Size = 1) -> Node:
        whole = x.shape[axis]
        if (start, stop, step) == (0, whole, 1):
            return x
        if (part := _part_of(named.uncast(x), axis, start, stop)) is not None and step == 1:
            return self.cast(part, x.dtype)
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
        turn = named.of_parts(parts, axis) or named.kept_beside(parts, axis, self.named)
        rope = self._rotation(turn, shape, parts[0].dtype)
        return self.make("concat", parts, axis, shape, parts[0].dtype) if rope is None else rope

    def pick(self, x: Node, index: Node, how: str, of: str = "logit", depth: int = 12) -> Node:
        """The element of each row of x, ``[*rows, n]``, at ``index``, integers with one for each row: ``[*rows, 1]``.

        An element of a sum is the sum of an element and of numbers per row.

        Args:
            how: what an index that is no column gives: ``"nan"``, or the nearest column, which has a gradient
                (``"clip"``) or none (``"promised"``).
            of: what the program picks from: ``"logit"``, or ``"log_prob"`` if numbers per row are added to logits that
                have gradients. An index that is no column has no gradient of these, either.
            depth: through so many nodes.
        """
        shape = (*x.shape[:-1], 1)
        if depth and x.op == "cast":
            return self.cast(self.pick(x.args[0], index, how, of, depth - 1), x.dtype)
        if depth and (whole := named.of_one(x)) is not None:
            if any(arg is not whole and not named.is_shift(arg) for arg in x.args):
                of = "log_prob"
            args = [self.pick(arg, index, how, of, depth - 1) if arg is whole else arg for arg in x.args]
            return self.primitive(x.attr, args, shape, x.dtype)
        call = named.Named("pick", ("x", "index"), (x, index), (x.shape, x.shape[:-1]), {"outside": how, "of": of})
        known = next((user for user in x.users if self.named.get(user) == call), None)
        return known or self._call(call, shape, x.dtype)

    def iota(self, axis: int, shape: Shape, dtype: str) -> Node:
        """The place of each element along an axis."""
        return self._call(named.Named("iota", attrs={"axis": axis}), shape, dtype)

    def argmax(self, x: Node, shape: Shape, dtype: str) -> Node:
        """The place of the largest element of each row, the first of several."""
        call = named.Named("argmax", ("x",), (x,), (x.shape,))
        known = next((user for user in x.users if self.named.get(user) == call and user.dtype == dtype), None)
        return known or self._call(call, shape, dtype)

    def _counts(self, node: Node) -> bool:
        """Whether a value's elements are places along an axis."""
        while node.op in ("reshape", "broadcast"):
            node = node.args[0]
        return self._names(node, "iota")

    def _names(self, node: Node, op: str) -> bool:
        return node in self.named and self.named[node].op == op

    def _rotation(self, turn: named.Turn | None, shape: Shape, dtype: str) -> Node | None:
        """The node of a rotation, but not in an exact program, which may round between."""
        if turn is None or self.exact or dtype not in FLOATS or turn.x.shape != shape:
            return None
        if turn.repeated:
            bounds = (0, turn.size, 2) if turn.interleaved else (0, turn.size // 2)
            tables = [self.slice(t, len(t.shape) - 1, *bounds) for t in map(named.table_of, turn[1:3])]
            turn = turn._replace(cos=tables[0], sin=tables[1])
        call = named.call_of(turn._replace(x=self.cast(turn.x, dtype)))
        return None if call is None else self._call(call, shape, dtype)

    def _call(self, call: named.Named, shape: Shape, dtype: str) -> Node:
        made = self.opaque(call.op, call.nodes, shape, dtype)
        self.named[made] = call
        return made

    def contract(
        self, left: Node, right: Node, dims: tuple[tuple[int, ...], tuple[int, ...]], shape: Shape, dtype: str,
        batch: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()), *, join: bool = False,
    ) -> Node:  # fmt: skip
        """A product: the dims of a batch first, then what is left of the left operand, then of the right one.

        An operand that is transposed is read as it lies. One of all dims with a one-hot matrix is the sum of those of
        its rows. ``join``: one with a weight of more than two dims, such as heads, is that with a matrix, reshaped.
        """
        every = tuple(range(len(left.shape)))
        if dims == (every, every) and every[1:] and (_is_one_hot(left) or _is_one_hot(right)):
            rows, last = every[:-1], every[-1:]
            each = self.make("contract", [left, right], (last, last, (rows, rows)), left.shape[:-1], dtype)
            return self.reduce("sum", each, rows, False, dtype)
        joined = self._by_joined_dims(Factors(left, right, dims), shape, dtype) if join and batch == ((), ()) else None
        if joined is not None:
            return joined
        if batch == ((), ()) and len(dims[0]) == 1:
            (left, a), (right, b) = _as_it_lies(left, dims[0][0]), _as_it_lies(right, dims[1][0])
            dims = ((a,), (b,))
        return self.make("contract", [left, right], (*dims, batch), shape, dtype)

    def _by_joined_dims(self, factors: Factors, shape: Shape, dtype: str) -> Node | None:
        """The product with one of the factors as a matrix of joined dims; None of rows and a matrix, and of what has
        none.
        """
        if len(factors.right.shape) == 2 and factors.dims[0] == (len(factors.left.shape) - 1,):
            return None
        made = self._by_matrix(factors, shape, dtype)
        if made is None and (turned := self._by_matrix(factors.exchanged, factors.turned(shape), dtype)) is not None:
            rows = len(shape) - factors.of_left
            order = (*range(rows, len(shape)), *range(rows))
            made = self.make("transpose", [turned], order, shape, dtype)
        return made

    def _by_matrix(self, factors: Factors, shape: Shape, dtype: str) -> Node | None:
        """The product of rows of the left factor with the right one as a matrix; None where that is no such product."""
        if (how := as_matrix(factors)) is None:
            return None
        x = self.reshape(self.transpose(factors.left, how.left), how.rows)
        weight = self.reshape(self.transpose(factors.right, how.right), how.matrix)
        axis, lead = 1 - how.columns, len(how.rows) - 1
        columns = (*how.rows[:-1], how.matrix[how.columns])
        product = self.make("contract", [x, weight], ((lead,), (axis,), ((), ())), columns, dtype)
        made = self.in_heads(product, shape)
        self._factors[made] = factors
        return made

    def in_heads(self, x: Node, shape: Shape) -> Node:
        """A value with its columns as several dims."""
        made = self.reshape(x, shape)
        if made is not x:
            self.heads[x] = made
        return made

    def _exchanged(self, factors: Factors, x: Node, order: tuple[int, ...]) -> Node | None:
        """A transposition of a product that has dims of the right factor first, as one of the product of the factors
        exchanged; None of another one, and where that is no product with a matrix, either.
        """
        lead, shape, other = factors.of_left, factors.turned(x.shape), factors.exchanged
        if order[0] < lead:
            return None
        is_matrix = len(factors.left.shape) == 2
        made = self.contract(*other, shape, x.dtype) if is_matrix else self._by_matrix(other, shape, x.dtype)
        rows = len(order) - lead
        return made and self.transpose(made, [axis - lead if axis >= lead else axis + rows for axis in order])


def _folded(name: str, args: Sequence[Node], shape: Shape) -> float | bool | None:
    """The number that a primitive of constants is; None of another."""
    constant = shape == () and args and name in REFERENCE and all(arg.op == "constant" for arg in args)
    return fold(name, *(arg.attr for arg in args)) if constant else None


def _is_of_one_hot(x: Node) -> bool:
    """Whether a value is a product with rows of zeros and ones, as of a comparison with each class."""
    return _is_product(x) and any(map(_is_one_hot, x.args))


def _of_floats(x: Node) -> Node:
    """The value that a float was cast from, perhaps more than once."""
    while x.op == "cast" and x.dtype in FLOATS:
        x = x.args[0]
    return x


def _is_product(x: Node) -> bool:
    return (x.op, x.attr) == ("primitive", "multiply")


def _key(op: str, args: Sequence[Node], attr: Hashable, shape: Shape, dtype: str) -> Hashable:
    return op, attr, shape, dtype, *[arg.index for arg in args]


def _is_one_hot(x: Node) -> bool:
    x = named.uncast(x)
    return (x.op, x.attr) == ("primitive", "equal")


def _bounded_by_nothing(args: Sequence[Node], shape: Shape) -> Node | None:
    """``x`` of ``maximum(x, -inf)``, of which the second is the maximum of a row without elements; None of another."""
    for x, bound in (args, args[::-1]):
        if bound.op == "constant" and bound.attr == -math.inf and x.shape == shape:
            return x
    return None


def _as_it_lies(x: Node, axis: int) -> tuple[Node, int]:
    """A matrix before it was transposed, and which of its dims is summed over."""
    if x.op == "transpose" and len(x.shape) == 2:
        return x.args[0], 1 - axis
    return x, axis


def _part_of(x: Node, axis: int, start: Size, stop: Size) -> Node | None:
    """The part between these bounds of values one after the other; None of anything else."""
    at: Size = 0
    for part in x.args if (x.op, x.attr) == ("concat", axis) else ():
        size = part.shape[axis]
        if not isinstance(size, int) or not isinstance(at, int):
            return None
        if (at, at + size) == (start, stop):
            return part
        at += size
    return None


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
