"""Decide what each part of a program becomes. A value that no part can compute inside splits its region in two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from cute_ops.fusion.analyse import Analysis, Found, analyse
from cute_ops.fusion.attention import attentions
from cute_ops.fusion.choose import rotations_in
from cute_ops.fusion.composite import Composite, composites, cuts
from cute_ops.fusion.graph import Graph, Node
from cute_ops.fusion.scores import Known
from cute_ops.fusion.softmaxes import beside_softmaxes


class Decision(Protocol):
    """The choice for a part of a layer or for an expression, which stays as it is if ``kind`` is empty."""

    @property
    def kind(self) -> str: ...


D = TypeVar("D", bound=Decision)
Layers = list[tuple[Composite, D]]
Expressions = list[tuple[Found, D]]


def settle(
    graph: Graph, known: Known | None, exact: bool, layer: Callable[[Composite], D],
    expressions: Callable[[Analysis, Sequence[Composite]], Expressions[D]],
) -> tuple[Analysis, Layers[D], Expressions[D], dict[Node, str]]:  # fmt: skip
    """Analyse a program until no value must leave its region: a rotation that no op computes there, a result of a part
    of a layer, an output beside a softmax.

    Args:
        known: gives the array of a value that follows from sizes alone; None if no attention is asked for.
        exact: whether the program's roundings are kept: then it has no parts of layers.
        layer: decides what a part of a layer becomes.
        expressions: decides what expressions become, beside the parts of layers that run.

    Returns:
        What is found, the parts of layers and the expressions with what they become, and by the last product of an
        attention that no op computes the reason.
    """
    whole: set[Node] = set()
    while True:
        analysis = analyse(graph, exact=exact, whole=whole)
        found, apart, stay = [] if exact else composites(graph, analysis), set[Node](), dict[Node, str]()
        if known is not None and not exact:
            found += attentions(graph, analysis, known, stay)
            apart |= beside_softmaxes(analysis)
        layers = [(each, layer(each)) for each in found]
        run = [each for each, decision in layers if decision.kind]
        rest = expressions(analysis, run)
        apart |= {node for each, decision in rest if not decision.kind for node in rotations_in(each)}
        apart |= cuts(run, analysis)
        if apart <= whole:
            return analysis, layers, rest, stay
        whole |= apart
