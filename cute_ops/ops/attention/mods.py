"""Masks and changes of scores as expressions, for references and kernels.

A function of a score and its coordinates (:mod:`cute_ops.mods`) is traced to a :class:`Mod`, whose operands are the
score, if it has one, ``batch``, ``head``, ``q`` and ``k``, their sizes, and what it reads of captured arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from cute_ops import mods as named
from cute_ops.expressions.captured import trace_mod
from cute_ops.expressions.derivative import differentiate
from cute_ops.expressions.graph import OPERANDS, Expression, Graph, Node, copied, operands_of
from cute_ops.expressions.limits import limits_and_rest
from cute_ops.expressions.reads import FLOAT, SIZE, Mod, Read, known
from cute_ops.expressions.simplify import SimplifyingGraph
from cute_ops.expressions.text import text_of

if TYPE_CHECKING:
    from cute_ops.expressions.intervals import Bounds

SCORE = {"score": OPERANDS["t"]}
COORDINATES = {"batch": OPERANDS["s"], "head": OPERANDS["s"], "q": OPERANDS["c"], "k": OPERANDS["r"]}
BATCH, HEAD, Q, K, SIZES = 0, 1, 2, 3, 4  # of the operands behind the score
LARGE_CAP = 256.0  # kernels have a tanh to 2e-7: of a larger cap scores would be wrong by more than 5e-5


class Own(NamedTuple):
    """The functions of a call.

    Attributes:
        score, mask: their texts; empty where there is none.
        captured: of each array its name, its kind and its declared shape.
    """

    score: str = ""
    mask: str = ""
    captured: tuple[tuple[str, str, str], ...] = ()


NONE = Own()


def score_mod(function: Callable[..., Any], arrays: Mapping[int, str] | None = None) -> Mod:
    """The expression of a change of scores; ``arrays`` are the kinds of those that it captures, by number."""
    return trace_mod(function, SCORE, COORDINATES, arrays or {})


def mask_mod(function: Callable[..., Any], arrays: Mapping[int, str] | None = None) -> Mod:
    """The expression of a mask; ``arrays`` as for :func:`score_mod`."""
    return trace_mod(function, {}, COORDINATES, arrays or {}, "bool")


def band(left: int, right: int) -> Callable[..., Any] | None:
    """The mask of keys at most ``left`` before the query and at most ``right`` after it; -1 is any number. None where
    it leaves out nothing.
    """
    if left >= 0 and right >= 0:
        return named.window(left, right)
    if right == 0:
        return named.causal
    if left < 0 and right < 0:
        return None
    if left < 0:
        return lambda xp, batch, head, q, k: k <= q + right
    return lambda xp, batch, head, q, k: q - left <= k


@cache
def mask_of(left: int, right: int, own: str = "") -> Mod | None:
    """The mask of a :func:`band` and of a call's own function, a text; None without both."""
    function = band(left, right)
    first, second = function and mask_mod(function), Mod.parse(own) if own else None
    if first is None or second is None:
        return first or second
    graph = SimplifyingGraph(second.expression.operands)
    both = [copied(each.expression, graph)[each.expression.outputs[0]] for each in (first, second)]
    return Mod(graph.finish([graph.add("logical_and", *both)]), second.reads)


def mask_of_call(attrs: Mapping[str, Any], own: str) -> Mod | None:
    """:func:`mask_of` a call with these attributes, and with a function of its own, a text."""
    return mask_of(attrs["left"], 0 if attrs["causal"] else attrs["right"], own)


@cache
def score_of(cap: float, own: str = "") -> Mod | None:
    """The change of scores by a soft cap, and then by a call's own function, a text; None without both."""
    change = named.softcap(cap) if cap <= LARGE_CAP else _large_softcap(cap)
    first, second = score_mod(change) if cap else None, Mod.parse(own) if own else None
    if first is None or second is None:
        return first or second
    graph = SimplifyingGraph(second.expression.operands)
    capped = copied(first.expression, graph)[first.expression.outputs[0]]
    nodes = copied(second.expression, graph, lambda node: graph.operand(node.operand) if node.operand else capped)
    return Mod(graph.finish([nodes[second.expression.outputs[0]]]), second.reads)


def _large_softcap(cap: float) -> named.Mod:
    """A soft cap with a series in the place of the tanh of small numbers, of which kernels have a few digits."""

    def softcap_mod(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
        x = score * (1 / cap)
        is_small = x * x < 1 / 64
        small = xp.where(is_small, x, 0.0)  # so that powers, which gradients multiply by 0, are finite
        square = small * small
        near = small * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
        return cap * xp.where(is_small, near, xp.tanh(x))

    return softcap_mod


@cache
def bounds_of(mask: Mod) -> tuple[str, tuple[str, ...]]:
    """The expression of a mask's bounds over a tile, and what of it could not be bounded. If it is a conjunction of
    limits of keys, or of queries, and other parts, ``mask | parts besides those of keys | of queries``; empty where
    there are none.
    """
    from cute_ops.expressions.intervals import Range, bounds  # only calls with a mask of their own need it

    def bounded(each: Mod) -> Bounds:
        return bounds(each.expression, [Range(number) for number in known(each)])

    found, rests = bounded(mask), []
    for axis in (K, Q):
        limits, others = limits_and_rest(mask, axis)
        rests.append(text_of(bounded(others).expression) if limits and others else "")
    names = (f"operand {mask.given + i}" for i in range(len(mask.reads)))
    arrays = dict(zip(names, (f"array {read.array}" for read in mask.reads), strict=True))
    text = " | ".join([text_of(found.expression), *(rests if any(rests) else [])])
    return text, tuple(dict.fromkeys(arrays.get(each, each) for each in found.unbounded))


@cache
def gradient_of(mod: Mod, wanted: tuple[int, ...] = (0,)) -> Expression:
    """The gradients of these operands of a change of scores; its operands are those of the function and the cotangent
    of what that returns.
    """
    forward = mod.expression
    found = differentiate(forward, wanted=wanted)
    graph = Graph([*forward.operands, OPERANDS["t"]])
    last = len(forward.operands)
    sources = [source.position if source.role == "operand" else last for source in found.sources]
    nodes = copied(found.expression, graph, lambda node: graph.operand(sources[node.operand]))
    totals: dict[int, int] = {}
    for addend, i in zip(found.addends, found.expression.outputs, strict=True):
        before = totals.get(addend.operand)
        totals[addend.operand] = nodes[i] if before is None else graph.add("add", before, nodes[i])
    return graph.finish([totals[i] for i in wanted])


# What follows from a call's own functions -----------------------------------------------------------------------------


def declared(
    functions: Sequence[Mod], names: Sequence[str], refuse: Callable[[str], NoReturn]
) -> list[list[str]]:  # fmt: skip
    """The dims of each captured array: ``*m`` where it is read by batch, ``g*r`` by head, else a name of its own.

    Args:
        functions: which read the arrays.
        names: of the arrays.
        refuse: raises an error.
    """
    found: list[list[set[str]] | None] = [None] * len(names)
    for mod in functions:
        base, uses = first_coordinate(mod), _uses(mod)
        if base + BATCH in uses or base + len(COORDINATES) + BATCH in uses:
            refuse("`batch` may only be the first index of a captured array: calls are batched and shared by it.")
        for read in mod.reads:
            if not read.kind.startswith(SIZE):
                found[read.array] = _roles(read, base, found[read.array], names[read.array], refuse)
    return [_dims(number, roles, names[number], refuse) for number, roles in enumerate(found)]


def _roles(
    read: Read, base: int, before: list[set[str]] | None, name: str, refuse: Callable[[str], NoReturn]
) -> list[set[str]]:
    """The roles of each index of an array, those of earlier reads (``before``) and of this one."""
    if read.place is None:
        refuse(f"`{name}` has no dims: give it one, and read element 0.")
    roles = [_role(read.place.nodes[i], base) for i in read.place.outputs]
    if before is not None and len(before) != len(roles):
        refuse(f"`{name}` is read with {len(before)} indices and with {len(roles)}.")
    if "*m" in roles[1:]:
        refuse(f"`{name}` is read by `batch` in another place than the first.")
    return [{role, *old} for role, old in zip(roles, before or [set()] * len(roles), strict=True)]


def _dims(number: int, roles: list[set[str]] | None, name: str, refuse: Callable[[str], NoReturn]) -> list[str]:
    """The dims of a captured array, from the roles of each of its indices."""
    if roles is None:
        refuse(f"`{name}` is read by no function.")
    if roles and "*m" in roles[0] and len(roles[0]) > 1:
        refuse(f"`{name}` is read by `batch` and by something else in its place.")
    return [
        next(iter(each)) if len(each) == 1 and "" not in each else f"c{number}d{place}"
        for place, each in enumerate(roles)
    ]


def first_coordinate(mod: Mod) -> int:
    """The number of the operand of a function that is the batch; other coordinates follow it, then sizes."""
    return mod.given - len(COORDINATES) - SIZES


def by_batch(xp: Any, own: Own, captured: Sequence[Any], batch: Any) -> list[Any]:
    """Captured arrays, with one dim for the batch where they have leading dims."""
    found = []
    for array, (_, _, shape) in zip(captured, own.captured, strict=True):
        words = shape.split()
        lead = len(array.shape) - len(words) + 1
        found.append(xp.reshape(array, (batch, *array.shape[lead:])) if words[:1] == ["*m"] else array)
    return found


def depends_on_head(functions: Sequence[Mod], shapes: Sequence[str]) -> bool:
    """Whether the number of a head counts, besides as an index of arrays that are declared to have each head's."""
    for mod in functions:
        base = first_coordinate(mod)
        if not {base + HEAD, base + len(COORDINATES) + HEAD}.isdisjoint(_uses(mod)):
            return True
        for read in mod.reads:
            places = [read.place.nodes[i] for i in read.place.outputs] if read.place else []
            for node, word in zip(places, shapes[read.array].split(), strict=False):
                if _role(node, base) == "g*r" != word:
                    return True
    return False


def reads_by_head(mask: Mod) -> bool:
    """Whether what a mask reads may depend on the head."""
    return any(HEAD in operands_of(read.place, i) for read in mask.reads if read.place for i in read.place.outputs)


def computes_with_head(mask: Mod) -> bool:
    """Whether a mask computes with the number of the head."""
    return any(HEAD in operands_of(mask.expression, i) for i in mask.expression.outputs)


def _role(node: Node, base: int) -> str:
    """The meaning of an index: ``*m`` the number of the batch, ``g*r`` that of the head, else empty."""
    if node.primitive != "operand":
        return ""
    return {base + BATCH: "*m", base + HEAD: "g*r"}.get(node.operand, "")


def _uses(mod: Mod) -> set[int]:
    """The operands that a function computes with, besides those that are an index as they are."""
    found = {i for output in mod.expression.outputs for i in operands_of(mod.expression, output)}
    for read in mod.reads:
        if read.place is not None:
            for i in read.place.outputs:
                node = read.place.nodes[i]
                found |= operands_of(read.place, i) if node.primitive != "operand" else set()
    return found


def differentiable(own: Own) -> tuple[int, ...]:
    """The captured arrays whose gradient a call may want: floats that scores are computed from."""
    if not own.score:
        return ()
    mod = Mod.parse(own.score)
    used = {i for output in mod.expression.outputs for i in operands_of(mod.expression, output)}
    arrays = {read.array for i, read in enumerate(mod.reads, mod.given) if i in used and read.kind == FLOAT}
    return tuple(sorted(arrays))
