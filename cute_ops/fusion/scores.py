"""Steps from an attention's scores to its softmax: scale, soft cap, masks, or an expression of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from cute_ops.expressions.graph import Expression, Graph, copied, operands_of
from cute_ops.expressions.graph import Node as Step
from cute_ops.expressions.reference import evaluate
from cute_ops.fusion.analyse import Found
from cute_ops.fusion.express import COLUMNS, Leaf
from cute_ops.fusion.graph import Node

if TYPE_CHECKING:  # a program without masks that are known needs no NumPy
    import numpy as np

_HIDDEN = -1e4  # a score so low has no weight
_UNBOUNDED = ("divide", "reciprocal", "rsqrt", "exp", "exp2", "log", "log1p", "log2")  # infinite of some finite numbers
_FOLLOWED = ("primitive", "cast", "broadcast", "reshape", "transpose", "slice", "concat")
# The value of an array of the program that is known when it is traced; None of any other.
Known = Callable[[Node], "np.ndarray[Any, Any] | None"]


class Scores(NamedTuple):
    """The steps from ``q @ k.T`` to the softmax.

    Attributes:
        scale, softcap, left, right: as attributes of ``attention``; 0 and -1 where there is none.
        expression: what then takes the place of a score; None where that is the score.
        output: its node.
        acc: the operand that is the score.
    """

    scale: float = 1.0
    softcap: float = 0.0
    left: int = -1
    right: int = -1
    expression: Expression | None = None
    output: int = 0
    acc: int = 0

    @property
    def said(self) -> str:
        """The changes of the scores, as a report names them."""
        sides = "causal" if (self.left, self.right) == (-1, 0) else f"left={self.left}, right={self.right}"
        said = [sides] if (self.left, self.right) != (-1, -1) else []
        said += [f"softcap={self.softcap:.6g}"] if self.softcap else []
        return ", ".join([*said, *(["scores changed"] if self.expression is not None else [])])


def softmax_of(expression: Expression, output: int) -> int | None:
    """The node of which an output is the softmax; None of any other output.

    Programs write it with or without the maximum, by way of its logarithm, and with zeros where a mask hides a score.
    """
    hidden, i = _zero_where(expression, output)
    node = expression.nodes[i]
    if node.primitive == "exp" and hidden is None:
        return _log_softmax_of(expression, node.args[0])
    if (quotient := quotient_of(expression, node)) is None:
        return None
    weights, total = quotient
    if expression.nodes[total].primitive != "sum":
        return None
    if hidden is None and (masked := _masked_before_sum(expression, weights, total)) is not None:
        return masked[1]
    if expression.nodes[weights].primitive != "exp":
        return None
    before = _zero_where(expression, expression.nodes[total].args[0])
    z = unshifted(expression, expression.nodes[weights].args[0])
    if hidden is None:
        return z if before == (hidden, weights) else None
    if not _is_hidden_by(expression, z, hidden) or before not in ((hidden, weights), (None, weights)):
        return None
    # Zeros by which weights are multiplied leave NaN where a query sees no key; in place of weights they do not.
    if expression.nodes[output].primitive == "multiply" and math.isinf(_fill(expression, z, hidden)):
        return None
    # Zeros in place of the weights of a softmax: no other mask may hide the other scores, too.
    alone = before[0] is not None or len(operands_of(expression, _shown(expression, z, hidden))) == 1
    return z if alone else None


def _masked_before_sum(expression: Expression, weights: int, total: int) -> tuple[_Where, int] | None:
    """Which weights a mask makes zeros before they are summed up, and the scores of all; None where none does. The mask
    is all that scores depend on beside the product: no other one may hide them.
    """
    hidden, exponentials = _zero_where(expression, weights)
    if (
        hidden is None
        or expression.nodes[exponentials].primitive != "exp"
        or expression.nodes[total].args != (weights,)
    ):
        return None
    z = unshifted(expression, expression.nodes[exponentials].args[0])
    alone = len(operands_of(expression, z) - operands_of(expression, hidden[0])) == 1
    return (hidden, z) if alone else None


def weights_of(expression: Expression, output: int, total: int) -> int | None:
    """The node of whose softmax an output is the weights before they are divided by their sum, another output; None of
    any other two outputs.
    """
    weights = expression.nodes[output]
    summed = expression.nodes[total]
    if weights.primitive != "exp" or (summed.primitive, summed.args) != ("sum", (output,)):
        return None
    return unshifted(expression, weights.args[0])


def without_weight(expression: Expression, output: int, z: int) -> tuple[Expression, int, bool]:
    """The scores ``z`` of a softmax, infinitely low where zeros take the place of its weights, and whether a query that
    sees no key has none, as in the program: where the weights become zeros before they are divided, it gets NaN.
    """
    hidden, _ = _zero_where(expression, output)
    within = None
    if hidden is None and (quotient := quotient_of(expression, expression.nodes[output])) is not None:
        within = _masked_before_sum(expression, *quotient)
    mask = hidden if within is None else within[0]
    if mask is None or not (within is not None or _is_hidden_by(expression, z, mask)):
        return expression, z, False
    graph = Graph(expression.operands)
    nodes = copied(expression, graph)
    seen = _shown(expression, z, mask) if _is_hidden_by(expression, z, mask) else z
    condition, shown, lowest = nodes[mask[0]], nodes[seen], graph.constant(-math.inf)
    made = graph.add("where", condition, *((lowest, shown) if mask[1] else (shown, lowest)))
    changed = graph.finish([made])
    return changed, changed.outputs[0], within is None


def quotient_of(expression: Expression, node: Step) -> tuple[int, int] | None:
    """The numerator and the denominator of a quotient, also of a product with a reciprocal; None of other nodes."""
    if node.primitive == "divide":
        return node.args[0], node.args[1]
    if node.primitive == "multiply":
        for x, other in (node.args, node.args[::-1]):
            if expression.nodes[other].primitive == "reciprocal":
                return x, expression.nodes[other].args[0]
    return None


_Where = tuple[int, bool]  # a condition, and which of its values hides


def _zero_where(expression: Expression, i: int) -> tuple[_Where | None, int]:
    """The condition under which a node is zero, and the node that it is otherwise; None and the node itself of one
    without a condition.
    """
    node = expression.nodes[i]
    if node.primitive == "where":
        for arg, other, hides in ((node.args[1], node.args[2], True), (node.args[2], node.args[1], False)):
            number = expression.nodes[arg].number
            if number == 0 and not isinstance(number, bool):
                return (node.args[0], hides), other
    if node.primitive == "multiply":  # by ones and zeros
        for x, other in (node.args, node.args[::-1]):
            factor = expression.nodes[other]
            numbers = [expression.nodes[arg].number for arg in factor.args[1:]] if factor.primitive == "where" else []
            if numbers in ([1.0, 0.0], [0.0, 1.0]):
                return (factor.args[0], numbers[0] == 0.0), x
    return None, i


def _is_hidden_by(expression: Expression, z: int, hidden: _Where) -> bool:
    """Whether scores have no weight where a mask hides them."""
    node = expression.nodes[z]
    return node.primitive == "where" and node.args[0] == hidden[0] and hides(expression, node.args[2 - hidden[1]])


def _fill(expression: Expression, z: int, hidden: _Where) -> float:
    """The score that a mask gives those that it hides."""
    return float(expression.nodes[expression.nodes[z].args[2 - hidden[1]]].number or 0.0)


def _shown(expression: Expression, z: int, hidden: _Where) -> int:
    """The scores that a mask does not hide."""
    return expression.nodes[z].args[1 + hidden[1]]


def unshifted(expression: Expression, i: int) -> int:
    """The node from which a node subtracts one number a row, such as its maximum, which changes no softmax; the node
    itself if it is no such difference.
    """
    node = expression.nodes[i]
    shifted = node.primitive == "subtract" and not expression.kinds[node.args[1]].columns
    return node.args[0] if shifted else i


def _is_maximum(expression: Expression, i: int, z: int) -> bool:
    """Whether a node is the maximum of the rows of z, or 0 where that is infinite."""
    node = expression.nodes[i]
    if node.primitive == "where" and expression.nodes[node.args[2]].number == 0:
        node = expression.nodes[node.args[1]]
    return node.primitive == "max" and node.args == (z,)


def _log_softmax_of(expression: Expression, i: int) -> int | None:
    """The node whose ``log_softmax`` a node is; None if it is none."""
    nodes = expression.nodes
    if nodes[i].primitive != "subtract":
        return None
    y, lse = nodes[i].args
    if nodes[lse].primitive == "add":  # of the maximum and the rest
        for most, rest in (nodes[lse].args, nodes[lse].args[::-1]):
            if _is_maximum(expression, most, y) and (summed := _log_sum_of(expression, rest)) is not None:
                return y if nodes[summed].primitive == "subtract" and nodes[summed].args == (y, most) else None
        return None
    return unshifted(expression, y) if _log_sum_of(expression, lse) == y else None


def _log_sum_of(expression: Expression, i: int) -> int | None:
    """The node of whose exponentials a node is the logarithm of the sum; None if it is none."""
    for primitive in ("log", "abs", "sum", "exp"):
        if expression.nodes[i].primitive == primitive:
            (i,) = expression.nodes[i].args
        elif primitive != "abs":
            return None
    return i


class Masks:
    """The masks of scores that are known.

    Args:
        found: the softmax.
        of_query: which of its rows counts queries; None if there is one query.
        known: the values of arrays.
    """

    def __init__(self, found: Found, of_query: int | None, known: Known) -> None:
        self.found, self.of_query, self.known = found, of_query, known

    def scores(self, z: int, acc: int, sizes: tuple[int, int]) -> Scores:
        """The steps from the scores to the softmax.

        Args:
            z: the node whose softmax is taken.
            acc: the operand that is the product of queries and keys.
            sizes: how many queries and keys there are.
        """
        expression = self.found.expression
        allowed, inner = self._without_masks(expression, z)
        if allowed is not None and (sides := band(allowed, *sizes)) is not None:
            scores, z = Scores(left=sides[0], right=sides[1]), inner
        else:
            scores = Scores()
        plain = scaled(expression, z, acc)
        if plain is not None:
            return scores._replace(scale=plain[0], softcap=plain[1])
        return scores._replace(expression=expression, output=z, acc=acc)

    def _without_masks(self, expression: Expression, z: int) -> tuple[np.ndarray[Any, Any] | None, int]:
        """Which scores no known mask hides, and the node of scores before these masks.

        A mask of finite scores is only left out where nothing else hides scores: of a query to which it leaves no key
        that another mask shows, all scores are so low, and all keys have a weight.
        """
        outer, whole = z, list[tuple[Any, float, int]]()
        while True:
            inner, seen, fill = self._mask(expression, z)
            if seen is None:
                break
            z = inner
            whole.append((seen, fill, z))
        if not all(math.isinf(fill) for _, fill, _ in whole) and self._may_hide(expression, z):
            whole = list(takewhile(lambda each: math.isinf(each[1]), whole))
        allowed = None
        for seen, _, _ in whole:
            allowed = seen if allowed is None else allowed & seen
        return allowed, whole[-1][2] if whole else outer

    def _mask(self, expression: Expression, z: int) -> tuple[int, np.ndarray[Any, Any] | None, float]:
        """The node before a known mask, which scores that does not hide, and what it gives the others; the node itself
        and None if there is none.
        """
        node, fill = expression.nodes[z], 0.0
        inner, seen = z, None
        if node.primitive == "where":
            condition, yes, no = node.args
            hidden = [hides(expression, each) for each in (yes, no)]
            seen = self._value(expression, condition) if any(hidden) else None
            inner = no if hidden[0] else yes
            seen = None if seen is None else ~seen if hidden[0] else seen
            fill = expression.nodes[yes if hidden[0] else no].number or 0.0
        elif node.primitive == "add":
            inner, seen, fill = self._without_addend(expression, node.args)
        return inner, seen, fill

    def _may_hide(self, expression: Expression, z: int) -> bool:
        """Whether what is done to scores may give some of them no weight."""
        waiting, seen = [z], {z}
        while waiting:
            i = waiting.pop()
            node = expression.nodes[i]
            if hides(expression, i) or (node.primitive == "operand" and self._is_low(self.found.leaves[node.operand])):
                return True
            waiting += [arg for arg in node.args if arg not in seen]
            seen.update(node.args)
        return False

    def _is_low(self, leaf: Leaf) -> bool:
        """Whether an array of the program may be a mask that is added to scores."""
        import numpy as np

        value = self.known(leaf.node) if leaf.node.op != "contract" else None
        if value is not None:
            return leaf.node.dtype != "bool" and bool(np.min(value, initial=0.0) <= _HIDDEN)
        waiting, seen = [leaf.node], {leaf.node}
        while waiting:
            node = waiting.pop()
            if node.op == "constant" and not isinstance(node.attr, bool) and node.attr <= _HIDDEN:
                return True
            if node.op in _FOLLOWED:
                waiting += [arg for arg in node.args if arg not in seen and arg.dtype != "bool"]
                seen.update(node.args)
        return False

    def _without_addend(self, expression: Expression, args: tuple[int, ...]) -> tuple[int, Any, float]:
        """A term, where the other one is zero and not so low that it hides a score, and how low it is there."""
        import numpy as np

        for inner, other in (args, args[::-1]):
            value = self._value(expression, other)
            if value is not None and bool(np.all((value == 0) | (value <= _HIDDEN))):
                return inner, value == 0, float(np.max(value, initial=-math.inf, where=value != 0))
        return args[0], None, 0.0

    def _value(self, expression: Expression, node: int) -> np.ndarray[Any, Any] | None:
        """The value of a node, ``(queries, keys)``, if it is known and the same for all else."""
        import numpy as np

        arrays: list[Any] = [np.zeros((), np.float32)] * len(expression.operands)
        used = operands_of(expression, node)
        for i in used:
            leaf = self.found.leaves[i]
            array = None if leaf.rows != self.found.rows or leaf.packed else self.known(leaf.node)
            if array is None:
                return None
            array = np.reshape(array, places_of(leaf, len(self.found.rows)))
            for axis, step in enumerate(array.strides):
                if not step and self._is_other(axis):  # repeated: one element of it is enough
                    array = array[(slice(None),) * axis + (slice(0, 1),)]
            arrays[i] = array.astype(np.float32)
        graph = Graph(expression.operands)
        one = graph.finish([copied(expression, graph)[node]])
        found = evaluate(one, np, arrays)[0]
        for axis, size in enumerate(found.shape):
            if size != 1 and self._is_other(axis):
                first = np.take(found, [0], axis)
                if not bool(np.all(found == first)):
                    return None
                found = first
        rows = 1 if self.of_query is None or found.ndim <= self.of_query else found.shape[self.of_query]
        return np.reshape(found, (rows, found.shape[-1] if found.ndim else 1))

    def _is_other(self, axis: int) -> bool:
        """Whether a dim counts neither queries nor keys."""
        return axis not in (len(self.found.rows), self.of_query)


def places_of(leaf: Leaf, rank: int) -> tuple[Any, ...]:
    """A leaf's shape with all dims of the scores."""
    sizes = {label: size for label, size in zip(leaf.labels, leaf.node.shape, strict=True) if size != 1}
    return (*(sizes.get(i, 1) for i in range(rank)), sizes.get(COLUMNS, 1))


def hides(expression: Expression, i: int) -> bool:
    """Whether a node is a score so low that it has no weight."""
    number = expression.nodes[i].number
    return number is not None and not isinstance(number, bool) and number <= _HIDDEN


def hides_all(scores: Scores, leaves: Sequence[Leaf], known: Known) -> bool:
    """Whether a query may get only scores of -inf, whose softmax is NaN: unless all numbers and arrays that scores are
    computed from are known to be finite.
    """
    if scores.expression is None:
        return False
    nodes, kinds = scores.expression.nodes, scores.expression.kinds
    waiting, seen = [scores.output], {scores.output}
    while waiting:
        i = waiting.pop()
        node = nodes[i]
        if kinds[i].dtype == "bool" or (node.primitive == "operand" and node.operand == scores.acc):
            continue
        if node.primitive in _UNBOUNDED or (node.number is not None and math.isinf(node.number)):
            return True
        if node.primitive == "operand" and _may_be_infinite(leaves[node.operand].node, known):
            return True
        waiting += [arg for arg in node.args if arg not in seen]
        seen.update(node.args)
    return False


def _may_be_infinite(node: Node, known: Known) -> bool:
    """Whether an array of floats may have infinite elements."""
    import numpy as np

    waiting, seen = [node], {node}
    while waiting:
        each = waiting.pop()
        if "float" not in each.dtype:
            continue
        if each.op == "constant":
            infinite = math.isinf(each.attr)
        elif each.op == "input":
            infinite = (value := known(each)) is None or not bool(np.isfinite(value).all())
        elif each.op == "opaque":
            infinite = each.attr not in ("iota", "stop_gradient")
        else:
            infinite = each.op == "primitive" and each.attr in _UNBOUNDED
        if infinite:
            return True
        waiting += [arg for arg in each.args if arg not in seen]
        seen.update(each.args)
    return False


def may_have_gradient(node: Node, known: Known, fixed: Container[Node] = ()) -> bool:
    """Whether a float of the program's inputs may reach a node, other than by way of ``stop_gradient``. Values that are
    ``fixed`` have no gradient.
    """
    waiting, seen = [node], {node}
    while waiting:
        each = waiting.pop()
        if each in fixed or (each.op, each.attr) == ("opaque", "stop_gradient"):
            continue
        if each.op == "input" and "float" in each.dtype and known(each) is None:
            return True
        new = [arg for arg in each.args if arg not in seen and "float" in arg.dtype]
        seen.update(new)
        waiting += new
    return False


def band(allowed: np.ndarray[Any, Any], queries: int, keys: int) -> tuple[int, int] | None:
    """How many keys before and after its own each query attends to, -1 for all of them; None if that is no band, or a
    query may attend to nothing.
    """
    import numpy as np

    allowed = np.broadcast_to(allowed, (queries, keys))
    if allowed.all():
        return -1, -1
    first, count = allowed.argmax(1), np.count_nonzero(allowed, 1)
    if queries > keys or not count.all():
        return None
    own, last = np.arange(queries) + (keys - queries), first + count - 1
    low, high = int((first - own).min()), int((last - own).max())
    as_band = np.array_equal(first, np.maximum(own + low, 0)) and np.array_equal(last, np.minimum(own + high, keys - 1))
    if low > 0 or high < 0 or not as_band or _has_holes(allowed):
        return None
    return (-1 if low == 1 - keys else -low), (-1 if high == queries - 1 else high)


def _has_holes(allowed: np.ndarray[Any, Any]) -> bool:
    """Whether a query attends to a key again behind one to which it does not."""
    begins = allowed[:, 1:] & ~allowed[:, :-1]
    return bool((begins.sum(1) + allowed[:, 0] > 1).any())


def scaled(expression: Expression, i: int, acc: int) -> tuple[float, float] | None:
    """The scale and the soft cap, if that is all that a node does to scores."""
    if (scale := _multiple(expression, i, acc)) is not None:
        return (scale, 0.0) if scale > 0 else None
    cap, inner = _factor(expression, i)
    if expression.nodes[inner].primitive != "tanh" or cap <= 0:
        return None
    scale = _multiple(expression, expression.nodes[inner].args[0], acc)
    return None if scale is None or scale <= 0 else (scale * cap, cap)


def _multiple(expression: Expression, i: int, acc: int) -> float | None:
    number, inner = _factor(expression, i)
    node = expression.nodes[inner]
    return number if node.primitive == "operand" and node.operand == acc else None


def _factor(expression: Expression, i: int) -> tuple[float, int]:
    """The number by which a node multiplies another, and that."""
    number = 1.0
    while expression.nodes[i].primitive == "multiply":
        one, other = expression.nodes[i].args
        inner, constant = (one, other) if expression.nodes[other].primitive == "constant" else (other, one)
        found = expression.nodes[constant].number
        if found is None or isinstance(found, bool):
            break
        number, i = number * found, inner
    return number, i
