"""Losses with a ``custom_vjp`` rule: their jaxprs as nodes, for :mod:`cute_ops.fusion.loss_rules` to compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from cute_ops.fusion.graph import FLOATS, Graph, Node
from cute_ops.fusion.loss_rules import Given, Rule, rule_of
from cute_ops.fusion.named import Named
from cute_ops_jax import _compat
from cute_ops_jax._compat import ClosedJaxpr, JaxprEqn, Literal

# Makes the graph of a jaxpr, and gives the nodes of its inputs and outputs.
Read = Callable[[ClosedJaxpr], tuple[list[Node], list[Node]]]


def name_loss(graph: Graph, equation: JaxprEqn, args: list[Any], outputs: list[Node], read: Read) -> None:
    """Note in a graph which nodes of a call's outputs are a loss of rows of probabilities and values of its lse."""
    if (places := _logits_and_targets(equation)) is None:
        return
    for first, second in (places, places[::-1]):
        try:
            rule = _rule(equation, first, second, read)
        except Exception:  # whatever a user's function raises: it stays as it is
            return
        if rule is not None:
            x, rows = args[first], args[second]
            attrs: dict[str, Any] = {"z_loss": rule.z_loss, "of": rule.of}
            graph.named[outputs[0]] = Named("soft_loss", ("logits", "targets"), (x, rows), (x.shape,) * 2, attrs)
            for node, (a, b) in zip(outputs[1:], rule.others, strict=True):
                graph.named[node] = Named("of_lse", ("x",), (x,), (x.shape,), {"factor": a, "square": b})
            return


def _logits_and_targets(equation: JaxprEqn) -> tuple[int, int] | None:
    """The two inputs of a call of rows and columns, whose first output has the rows; None of another call."""
    arrays = [i for i, v in enumerate(equation.invars) if not isinstance(v, Literal)]
    if len(arrays) != 2 or equation.params.get("symbolic_zeros") or equation.effects:
        return None
    shapes, dtypes = zip(*(_of(equation.invars[i]) for i in arrays), strict=True)
    outputs = [_of(v) for v in equation.outvars]
    whole = shapes[0] == shapes[1] and len(shapes[0]) > 1
    if not whole or any(shape != shapes[0][:-1] for shape, _ in outputs):
        return None
    floats = all(dtype in FLOATS for dtype in (*dtypes, *(dtype for _, dtype in outputs)))
    return (arrays[0], arrays[1]) if floats else None


def _of(variable: Any) -> tuple[tuple[Any, ...], str]:
    return variable.aval.shape, str(variable.aval.dtype)


def _rule(equation: JaxprEqn, logits: int, targets: int, read: Read) -> Rule | None:
    specs = [jax.ShapeDtypeStruct(*_of(equation.invars[i])) for i in (logits, targets)]
    cotangents = [jax.ShapeDtypeStruct(*_of(v)) for v in equation.outvars]

    def with_given(run: Callable[[list[Any]], Any]) -> Callable[..., Any]:
        def call(x: Any, rows: Any) -> Any:
            known = {logits: x, targets: rows}
            return run([known.get(i, getattr(v, "val", None)) for i, v in enumerate(equation.invars)])

        return call

    def all_of_it(x: Any, rows: Any, *cotangents: Any) -> list[Any]:
        body = with_given(lambda args: _compat.run(equation.params["call_jaxpr"], args))
        outputs, back = jax.vjp(with_given(lambda args: tuple(_compat.bind(equation, args))), x, rows)
        return [*body(x, rows), *outputs, back(tuple(cotangents))[0]]

    (x, rows, dloss, *_), made = read(jax.make_jaxpr(all_of_it)(*specs, *cotangents))
    count = len(cotangents)
    return rule_of(Given(x, rows, dloss, made[:count], made[count : 2 * count], made[-1]))
