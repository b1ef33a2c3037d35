"""Policies of checkpoints whose bodies are rewritten: what they save of the program's equations stays saved.

A part that replaces products, or values that ``checkpoint_name`` names, computes some of them itself, and its gradient
reads what its op keeps, which has the op's name. That is saved if, besides the op's results, it takes no more memory
than those of the replaced equations' outputs that the policy saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax

from cute_ops.fusion.graph import Node
from cute_ops_jax._compat import JaxprEqn
from cute_ops_jax.primitive.vjp import labelled

Policy = Callable[..., Any]
NAME = "name"  # the primitive of checkpoint_name, which also names the outputs of our ops
LABEL = "#"  # stands between the name of an op's outputs and the label that they have in a part of a program


def answers_of(
    policy: Policy, equations: Sequence[JaxprEqn], call: Callable[..., Any], reads: Sequence[Any], roots: Sequence[Node]
) -> tuple[str, dict[str, Any]]:
    """The label of the named outputs of ops that replace equations, and a checkpoint policy's answers for them by name.

    Parts of a program for which the policy has the same answer share a label.

    Args:
        policy: the program's.
        equations: those that the ops replace.
        call: computes the roots by ops.
        reads: the nodes, and tuples of nodes, of the arrays that it takes.
        roots: the nodes that it computes.
    """
    said = [(policy(each.primitive, *(v.aval for v in each.invars), **each.params), each) for each in equations]
    saved = {each.outvars[0]: answer for answer, each in said if _saves(answer)}
    if not saved or not all(isinstance(size, int) for v in saved for size in getattr(v.aval, "shape", ())):
        return "", {}
    answer = next(iter(saved.values()))
    label = " ".join([f"{LABEL}{type(answer).__name__}", *map(str, answer if isinstance(answer, tuple) else ())])
    specs = jax.tree.map(_spec, reads, is_leaf=lambda each: isinstance(each, Node))
    with labelled(label):
        kept = dict(_named(jax.make_jaxpr(partial(jax.vjp, call))(specs).jaxpr))
    more = sum(_bytes(v.aval) for v in kept) - sum(map(_bytes, map(_spec, roots)))
    return label, {} if more > sum(_bytes(v.aval) for v in saved) else dict.fromkeys(kept.values(), answer)


def with_answers(policy: Policy, answers: Mapping[str, Any]) -> Policy:
    """A policy that gives these answers for outputs with these names, unless ``policy`` saves them anyway."""
    return partial(_extended, policy, answers) if answers else policy


def _extended(policy: Policy, answers: Mapping[str, Any], primitive: Any, *avals: Any, **params: Any) -> Any:
    if primitive.name != NAME:
        return policy(primitive, *avals, **params)
    name = params["name"]
    plain = name.split(LABEL)[0] if name in answers else name  # the program's own names may have any form
    made = policy(primitive, *avals, **{**params, "name": plain})
    return made if _saves(made) else answers.get(name, made)


def _saves(answer: Any) -> bool:
    return answer if isinstance(answer, bool) else type(answer).__name__ != "RecomputeType"


def _spec(node: Node) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(node.shape, node.dtype)


def _bytes(array: Any) -> int:
    return int(prod(array.shape)) * int(array.dtype.itemsize)


def _named(jaxpr: Any) -> Iterator[tuple[Any, str]]:
    """The variables of a jaxpr that have names, and these."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == NAME:
            yield equation.outvars[0], equation.params["name"]
        for each in jax.tree.leaves(list(equation.params.values()), is_leaf=_has_equations):
            if _has_equations(each):
                yield from _named(getattr(each, "jaxpr", each))


def _has_equations(value: Any) -> bool:
    return hasattr(value, "eqns")
