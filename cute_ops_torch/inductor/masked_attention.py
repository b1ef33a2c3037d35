"""Writes torch's attention with a mask of data out, as products around a softmax, where the pass reads the program.

Hugging Face's models give the mask of a padded batch to ``scaled_dot_product_attention``. Our attention reads for each
score what the mask is computed from, and skips the tiles that its causal part hides; nothing as large as the scores
exists. A call whose mask our attention does not compute stays one call of torch's function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cute_ops.fusion.attention_arrays import HALVES, Read
from cute_ops.fusion.graph import FLOATS, Graph, Shape
from cute_ops.fusion.graph import Node as Value
from cute_ops.fusion.scores import Known
from cute_ops_torch.inductor.attention_mask import ARGUMENTS
from cute_ops_torch.inductor.front import softmax

_QUERY, _KEY = 2, 3  # of the dims of a score


def has_dense_mask(reads: Sequence[Read]) -> bool:
    """Whether scores are computed from an array of queries and keys."""
    return any({_QUERY, _KEY} <= set(read.dims) for read in reads)


def write_out(graph: Graph, given: Mapping[str, Any], known: Known) -> Value | None:
    """The value of a call with a mask, by products and a softmax; None for a call with dropout, or without a mask.

    Written out, a query whose keys are all hidden gets NaN; torch's function and our op give it zeros.
    """
    mask, arrays = given.get("attn_mask"), _arrays(graph, given)
    if arrays is None or not isinstance(mask, Value) or mask.dtype not in ("bool", *FLOATS):
        return None
    q, k, v = arrays
    heads, scale = q.shape[:-2], _scale(given, q.shape[-1])
    if scale is None:
        return None
    rank = len(heads)
    batch, shape = tuple(range(rank)), (*heads, q.shape[-2], k.shape[-2])
    product = graph.contract(q, k, ((rank + 1,), (rank + 1,)), shape, q.dtype, (batch, batch))
    scores = graph.primitive("multiply", [graph.cast(product, "float32"), graph.constant(scale)], shape, "float32")
    weights = graph.cast(softmax(graph, _masked(graph, scores, mask, known), "float32"), v.dtype)
    return graph.contract(weights, v, ((rank + 1,), (rank,)), (*shape[:-1], v.shape[-1]), v.dtype, (batch, batch))


def _scale(given: Mapping[str, Any], columns: int | str) -> float | None:
    """The number that scores are multiplied by; None of a call with dropout, or one that is causal, too."""
    if given.get("dropout_p", 0.0) != 0 or given.get("is_causal", False) is not False:
        return None
    scale = given.get("scale")
    scale = columns**-0.5 if scale is None and isinstance(columns, int) else scale
    return scale if isinstance(scale, float) and scale > 0 else None


def _arrays(graph: Graph, given: Mapping[str, Any]) -> tuple[Value, Value, Value] | None:
    """Queries, keys and values in 16 bits, with as many heads; None of others."""
    q, k, v = (given.get(name) for name in ARGUMENTS[:3])
    if not (isinstance(q, Value) and isinstance(k, Value) and isinstance(v, Value)):
        return None
    if not (q.dtype in HALVES and q.dtype == k.dtype == v.dtype and len(q.shape) == len(k.shape) == len(v.shape) > 2):
        return None
    heads = q.shape[:-2]
    if given.get("enable_gqa") and k.shape != q.shape:
        k, v = (_repeated(graph, each, heads) for each in (k, v))
    if k is None or v is None or not k.shape[:-2] == v.shape[:-2] == heads:
        return None
    return q, k, v


def _masked(graph: Graph, scores: Value, mask: Value, known: Known) -> Value:
    """Scores with a mask. Conditions that follow from sizes alone stand outside of the others."""
    if mask.dtype != "bool":
        return graph.primitive("add", [scores, mask], scores.shape, "float32")
    terms = dict.fromkeys(_terms(mask))
    for condition in sorted(terms, key=lambda each: known(each) is not None):
        given = [condition, scores, graph.constant(-math.inf)]
        scores = graph.primitive("where", given, scores.shape, "float32")
    return scores


def _terms(mask: Value) -> Iterator[Value]:
    """The conditions that all hold where a mask shows a score. Layers share the mask; each computes it from these."""
    if (mask.op, mask.attr) == ("primitive", "logical_and"):
        for each in mask.args:
            yield from _terms(each)
    elif mask.op != "constant" or mask.attr is not True:
        yield mask


def _repeated(graph: Graph, x: Value, heads: Shape) -> Value | None:
    """Keys or values with each head repeated for the neighbouring heads of queries that share it."""
    *lead, groups, keys, columns = x.shape
    many = heads[-1]
    if not (isinstance(groups, int) and isinstance(many, int)) or groups == 0 or many % groups:
        return None
    wide = (*lead, groups, many // groups, keys, columns)
    dims = [*range(len(lead) + 1), len(lead) + 2, len(lead) + 3]
    return graph.reshape(graph.broadcast(x, wide, dims), (*lead, many, keys, columns))
