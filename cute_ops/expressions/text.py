"""Expressions as text: the static attribute that a compiler is given.

``gelu(x + bias) + residual`` is ``e1(t,r,t) add 0 1; gelu 3; add 2 4 -> 5``. In parentheses stand the operands: ``t``
tile, ``r`` row vector, ``c`` column vector, ``s`` scalar, ``?`` of bools, ``2`` packed. Primitives follow. Operands and
primitives are numbered together, from 0; ``0[:n]`` and ``0[n:]`` are halves of a packed operand, ``0.5`` and ``true``
constants, ``n`` is the length of a row and ``column`` an element's place in it. The outputs come last.

An expression has one text: it does not depend on names, on the order in which temporaries were made, or on the order
of arguments that commute. ``e1`` is the format's version, which changes when the meaning of any text does.
"""

from __future__ import annotations

import hashlib
import re

from cute_ops.expressions.graph import LEAVES, OPERANDS, Expression, Graph
from cute_ops.expressions.primitives import PRIMITIVES

VERSION = "e1"
MOST_CHARACTERS = 1 << 15
_TEXT = r"(\w+)\(([^()]*)\) (?:([^()>]+) )?-> ([^()>]+)"


def text_of(expression: Expression) -> str:
    """The expression's text."""
    tokens: list[str] = []
    lines = []
    for node in expression.nodes:
        if node.primitive in LEAVES:
            tokens.append(node.value or node.primitive)
        else:
            lines.append(
                " ".join([node.primitive, *(tokens[i] for i in node.args), *([node.value] if node.value else [])])
            )
            tokens.append(str(len(expression.operands) + len(lines) - 1))
    operands = ",".join(map(str, expression.operands))
    body = "; ".join(lines) + " " if lines else ""
    return f"{VERSION}({operands}) {body}-> {' '.join(tokens[i] for i in expression.outputs)}"


def digest(expression: Expression) -> str:
    """A name that no other expression has."""
    return hashlib.sha256(text_of(expression).encode()).hexdigest()


def parse(given: str) -> Expression:
    """The expression of a :func:`text_of`.

    Raises:
        ValueError: it is no expression's text; says why.
    """
    if len(given) > MOST_CHARACTERS:
        raise ValueError(f"an expression's text has at most {MOST_CHARACTERS} characters, got {len(given)}")
    shown = f"{given[:60]}..." if len(given) > 63 else given
    try:
        expression = _parse(given)
    except ValueError as error:
        raise ValueError(f"{shown!r} is no expression: {str(error)[:200]}") from None
    if text_of(expression) != given:
        raise ValueError(f"{shown!r} is not how the expression is written, but {text_of(expression)[:200]!r}")
    return expression


def _parse(given: str) -> Expression:
    match = re.fullmatch(_TEXT, given)
    if match is None:
        raise ValueError("it is not of the form `e1(t,r) add 0 1 -> 2`")
    version, kinds, body, results = match.groups(default="")
    if version != VERSION:
        raise ValueError(f"its format is {version!r}, this version reads {VERSION!r}")
    names = kinds.split(",") if kinds else []
    if unknown := [name for name in names if name not in OPERANDS]:
        raise ValueError(f"{unknown[0]!r} is no operand; operands are {', '.join(OPERANDS)}")
    graph = Graph(OPERANDS[name] for name in names)
    primitives: list[int] = []
    for line in body.split("; ") if body else []:
        primitive, *tokens = line.split(" ")
        value = (
            tokens.pop()
            if tokens and (primitive == "astype" or (primitive in PRIMITIVES and PRIMITIVES[primitive].grouped))
            else ""
        )
        primitives.append(graph.add(primitive, *(_node(graph, primitives, token) for token in tokens), value=value))
    return graph.finish([_node(graph, primitives, token) for token in results.split(" ")])


_OPERAND = r"([0-9]{1,4})(\[:n\]|\[n:\])?"


def _node(graph: Graph, primitives: list[int], token: str) -> int:
    """The node that a token stands for."""
    if token in ("n", "column"):
        return graph.leaf(token)
    if token in ("true", "false"):
        return graph.constant(token == "true")
    match = re.fullmatch(_OPERAND, token)
    if match is None:
        return graph.constant(float(token))
    index = int(match[1])
    if index < len(graph.operands):
        return graph.operand(index, match[2] or "")
    if index - len(graph.operands) >= len(primitives) or match[2]:
        raise ValueError(f"{token!r} stands for nothing that comes before it")
    return primitives[index - len(graph.operands)]
