"""The replacement of a found expression: an op of ours, an op of its own, a product's epilogue, or none.

An op ends what a compiler fuses around it. So it has to save a pass: over a row that is reduced and read again, over a
product's result, or over values between several primitives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from cute_ops.expressions.groups import sizes
from cute_ops.expressions.primitives import PRIMITIVES
from cute_ops.fusion.analyse import Found
from cute_ops.fusion.express import COLUMNS, Leaf
from cute_ops.fusion.graph import FLOATS, Node
from cute_ops.ops.gemm.fused import GROUPS

# Ops whose tiles and outputs have one dtype; a residual has its own.
BY_MEANING = (
    "rmsnorm", "layernorm", "add_rmsnorm", "silu_mul", "gelu_mul", "swiglu", "geglu", "silu", "gelu", "relu2",
    "softmax", "log_softmax",
)  # fmt: skip
FEW_QUERIES = 16  # of a step of decoding


class Choice(NamedTuple):
    """The op that an expression becomes, or none.

    Attributes:
        kind: ``"op"``, ``"fused"``, ``"linear"``, ``"own"``, or empty: it stays.
        name: the op, or ``"fused"`` or ``"linear"``.
        why: the reason if it stays.
        product: the leaf that is a product which is computed, too; -1 if there is none.
        own: of ``"own"`` how an op of the user's computes it.
    """

    kind: str
    name: str = ""
    why: str = ""
    product: int = -1
    own: Any = None


def choose(found: Found, products: Sequence[int] = (), *, exact: bool = False) -> Choice:
    """The op that an expression becomes, or none.

    Args:
        found: the expression with its leaves.
        products: leaves that are products which may take an epilogue.
        exact: whether the program's own roundings are kept; ours that round elsewhere are left out then.
    """
    if why := _obstacle(found):
        return Choice("", why=why)
    primitives = _primitives(found)
    reduces = any(PRIMITIVES[primitive].reduces for primitive in primitives)
    if len(products) == 1 and not reduces and not exact and _is_epilogue(found, products[0]):
        return Choice("linear", "linear", product=products[0])
    if any(PRIMITIVES[primitive].grouped for primitive in primitives):
        return Choice("", why="only epilogues of products look at groups of columns")
    meaning = found.meaning
    if meaning is not None and meaning.op in BY_MEANING and _fits(found) and len(primitives) > 1:
        return Choice("op", meaning.op)
    if len(primitives) - sum(root.dtype == "bool" for root in found.roots) < 2:  # a bool is written as a number
        return Choice("", why="one primitive alone: there is no pass to save")
    return Choice("fused", "fused")


def _primitives(found: Found) -> list[str]:
    names = (node.primitive for node in found.expression.nodes)
    return [name for name in names if name in PRIMITIVES and name != "astype"]


def _obstacle(found: Found) -> str:
    """Why no op of ours computes an expression, whatever it says; empty if one may."""
    arrays = [*(leaf.node for leaf in found.leaves), *found.roots]
    wrong = next((node.dtype for node in arrays if node.dtype not in (*FLOATS, "bool")), None)
    if wrong is not None:
        return f"no op of ours takes {wrong}"
    tiles = (leaf.operand.kind.rows and leaf.operand.kind.columns for leaf in found.leaves)
    return "" if any(tiles) else "none of its operands has rows and columns"


def rotations_in(found: Found) -> set[Node]:
    """The rotations in a region that stays because of them: without them the rest may be an expression."""
    alone = len(found.region.nodes) == 1
    return {
        node for node in found.region.nodes if node.op == "primitive" and isinstance(node.attr, tuple) and not alone
    }


def _is_epilogue(found: Found, product: int) -> bool:
    acc = found.leaves[product]
    whole = acc.node.shape[:-1] == found.rows and acc.labels[-1] == COLUMNS
    whole = whole and all(kind.rows and kind.columns for kind in found.expression.output_kinds)
    return whole and {*sizes(found.expression)} <= {*GROUPS} and all(leaf.node.dtype != "bool" for leaf in found.leaves)


def is_whole(leaf: Leaf) -> bool:
    """Whether a leaf has all rows of the values."""
    return [label for label in leaf.labels if label >= 0] == [i for i, size in enumerate(leaf.rows) if size != 1]


def _fits(found: Found) -> bool:
    """Whether leaves and outputs have the dtypes and the rows that the meaning's op wants."""
    assert found.meaning is not None
    arrays = dict(zip(found.meaning.operands, found.leaves, strict=True))
    tiles = {name: leaf for name, leaf in arrays.items() if name not in ("weight", "bias")}
    if not all(map(is_whole, tiles.values())) or any(leaf.node.dtype == "bool" for leaf in arrays.values()):
        return False
    outputs = {name: root.dtype for name, root in zip(found.meaning.outputs, found.roots, strict=True)}
    dtypes = {leaf.node.dtype for name, leaf in tiles.items() if name != "residual"} | {outputs["out"]}
    if "residual" not in tiles:
        return len(dtypes) == 1
    residual = tiles["residual"].node.dtype
    return len(dtypes) == 1 and outputs.get("residual_out", residual) == residual


def too_few_queries(q: tuple[int, ...], k: tuple[int, ...]) -> str:
    """Why the framework's products are faster for the queries of a step of decoding; empty where they are not. Single
    queries of heads that share keys come here as queries of one head.

    Our op has a CTA for each head of an example, which reads all its keys. On an H200 4 queries of 64 heads with keys
    of their own take 173 us (XLA 257), of 8 heads 566 (73); 4 of 256 heads that share keys 340 (278), 16 of these 343
    (389); one of 256 heads takes 224 (100).
    """
    (batch, queries, heads, _), shared = q, q[2] > k[2]
    few = batch * heads < 64 or queries < 4 or (shared and queries < FEW_QUERIES)
    if queries > FEW_QUERIES or not few:
        return ""
    return f"{queries} queries of {batch * heads} heads are too few: `decode_attention` splits their keys"
