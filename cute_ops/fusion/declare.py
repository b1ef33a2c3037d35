"""The op of an expression that was found in a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

from cute_ops.declaration.op import Op
from cute_ops.expressions.graph import Expression, Graph, copied, operands_of
from cute_ops.expressions.text import text_of
from cute_ops.fusion.analyse import Found
from cute_ops.fusion.choose import is_whole
from cute_ops.fusion.express import Leaf
from cute_ops.ops.expression.call import op_of

_SHAPES = {"t": "*m n", "2t": "*m 2n", "r": "n", "2r": "2n", "c": "*m 1", "s": ""}


def declared(found: Found, examples: bool = False, dtypes: tuple[str, ...] = ()) -> Op:
    """The op of an expression, whose operands are ``x0``, ``x1``, ... in the order of its leaves; ``examples`` and
    ``dtypes`` as for :func:`declaration`.

    An operand of bools is given as zeros and ones of the dtype that :func:`operand_dtypes` says.
    """
    text, operands = declaration(found, examples, dtypes)
    return _op(text, tuple(operands.items()))


@lru_cache(4096)
def _op(text: str, operands: tuple[tuple[str, str], ...]) -> Op:
    """The op of a text, which layers that are alike share."""
    return op_of(text, dict(operands), name="found")


def declaration(found: Found, examples: bool = False, dtypes: tuple[str, ...] = ()) -> tuple[str, Mapping[str, str]]:
    """The text of an expression that is the op's, and the shapes of the op's operands by name. With ``examples`` what
    all rows of an example share has the dims of the batch alone: the kernel sums its gradient over these rows.
    ``dtypes``: the operands', other than :func:`operand_dtypes`.
    """
    kinds = []
    for leaf in found.leaves:
        shape = _SHAPES[str(leaf.operand)]
        if examples and is_of_example(leaf, found):
            shape = shape.replace("*m", "*b")
        elif is_expanded(leaf, found):
            shape = f"any {shape}"
        kinds.append(shape)
    return _declared(
        found.expression, dtypes or operand_dtypes(found), tuple(kinds), tuple(root.dtype for root in found.roots)
    )


def is_expanded(leaf: Leaf, found: Found) -> bool:
    """Whether a leaf is a tile that is copied to rows which it lacks; outputs' dtypes do not follow from it."""
    return leaf.operand.kind[:2] == (True, True) and leaf.rows == found.rows and not is_whole(leaf)


def is_of_example(leaf: Leaf, found: Found) -> bool:
    """Whether a leaf lacks no rows but the last dim of them, which a tile has."""
    *batch, m = found.rows or (1,)
    rows = [label for label in leaf.labels if label >= 0]
    if leaf.rows != found.rows or m == 1 or not rows or rows != [i for i, size in enumerate(batch) if size != 1]:
        return False
    return any(other.operand.kind[:2] == (True, True) and is_whole(other) for other in found.leaves)


def operand_dtypes(found: Found) -> tuple[str, ...]:
    """The dtype of each operand; bools have that of the first tile."""
    dtypes = [leaf.node.dtype for leaf in found.leaves]
    of_bools = next((dtype for dtype in dtypes if dtype != "bool"), "float32")
    return tuple(of_bools if dtype == "bool" else dtype for dtype in dtypes)


@cache
def _declared(
    expression: Expression, dtypes: tuple[str, ...], shapes: tuple[str, ...], outputs: tuple[str, ...]
) -> tuple[str, Mapping[str, str]]:
    tiles_of_rows = [i for i, operand in enumerate(expression.operands) if operand.kind[:2] == (True, True)]
    every = [i for i in tiles_of_rows if not shapes[i].startswith("*b")]
    whole = [i for i in every if not shapes[i].startswith("any ")] or every
    tiles = {i: dtypes[i] for i in whole}
    several = len(set(tiles.values())) > 1
    own = {i: f"{dtypes[i]} {_SHAPES[str(expression.operands[i])]}" for i in tiles if several}
    operands = {f"x{i}": own.get(i, shape) for i, shape in enumerate(shapes)}
    return text_of(with_dtypes(expression, tiles, outputs)), operands


def with_dtypes(expression: Expression, tiles: dict[int, str], outputs: Sequence[str]) -> Expression:
    """The expression whose outputs say their dtypes where these are not what an op gives them anyway: that of the
    tiles that an output follows from if they have one, else float32.
    """
    graph = Graph(expression.operands)
    nodes = copied(expression, graph)
    made = []
    for i, dtype in zip(expression.outputs, outputs, strict=True):
        reads = {tiles[k] for k in operands_of(expression, i) if k in tiles}
        usual = next(iter(reads)) if len(reads) == 1 and expression.kinds[i].columns else "float32"
        wanted = usual if dtype == "bool" else dtype
        made.append(nodes[i] if wanted == usual else graph.add("astype", nodes[i], value=wanted))
    return graph.finish(made)
