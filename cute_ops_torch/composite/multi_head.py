"""Multi-head attention with its projections, as ``torch.nn.MultiheadAttention`` has it, in steps that ops of ours take.

torch copies queries, keys and values apart behind their product, and the heads together before the last one. Here heads
are views of the product, and where the batch is the first dim, the last product reads what attention writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


class MultiHead(NamedTuple):
    """The arguments of ``torch.nn.functional.multi_head_attention_forward`` that its first result depends on. It has no
    static keys, no key of a bias and none of zeros.

    Attributes:
        query, key, value: ``[batch, sequence, columns]``, ``[sequence, batch, columns]``, or without a batch.
        heads: how many there are.
        in_weight, in_bias: of queries, keys and values, one below the other; the weight is None where each has its own.
        weights: those of queries, of keys and of values then.
        out_weight, out_bias: of the last product.
        attn_mask: added to scores, or true where it hides them: of queries and keys, before them one dim of the batch
            and its heads together.
        key_padding_mask: the same of the batch and keys.
        causal: query i attends to keys up to i.
        batch_first: whether the batch is the first dim.
    """

    query: Any
    key: Any
    value: Any
    heads: int
    in_weight: Any
    in_bias: Any
    weights: tuple[Any, Any, Any]
    out_weight: Any
    out_bias: Any
    attn_mask: Any = None
    key_padding_mask: Any = None
    causal: bool = False
    batch_first: bool = False


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]


def multi_head_attention(given: MultiHead, attend: Attend) -> Tensor:
    """The result of multi-head attention, whose heads ``attend`` computes: ``attend(query, key, value, mask, causal)``
    of ``[batch, heads, sequence, headdim]`` and of what is added to scores.
    """
    batched, mask = given.query.ndim == 3, _merged(given)
    q, k, v = (_heads(x, given.heads, given.batch_first) for x in _projected(given))
    out = attend(q, k, v, mask, given.causal).transpose(1, 2)
    if not batched:
        out = out.squeeze(0)
    elif not given.batch_first:
        out = out.transpose(0, 1).contiguous()
    return F.linear(out.flatten(-2), given.out_weight, given.out_bias)


def torch_attention(dropout: float) -> Attend:
    """Attention by torch's function, which drops weights with this probability."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)

    return attend


def written_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Attention whose queries get NaN where all keys are hidden, as torch computes it beside weights."""
    scores = torch.mul(torch.matmul(q, k.transpose(-2, -1)), 1 / math.sqrt(q.shape[-1]))
    scores = scores if mask is None else torch.add(scores, mask)
    return torch.matmul(torch.softmax(scores, -1), v)


def _projected(given: MultiHead) -> tuple[Tensor, ...]:
    """Queries, keys and values, of one product where they are projected from the same tensor."""
    x, weight, bias = given.query, given.in_weight, given.in_bias
    if weight is None:
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        return tuple(map(F.linear, (x, given.key, given.value), given.weights, biases))
    if given.key is given.value and x is given.key:
        return F.linear(x, weight, bias).chunk(3, -1)
    columns = weight.shape[1]
    sizes = [columns, 2 * columns] if given.key is given.value else [columns] * 3
    weights = weight.split(sizes)
    biases = (None,) * 3 if bias is None else bias.split(sizes)
    if given.key is not given.value:
        return tuple(map(F.linear, (x, given.key, given.value), weights, biases))
    return F.linear(x, weights[0], biases[0]), *F.linear(given.key, weights[1], biases[1]).chunk(2, -1)


def _heads(x: Tensor, heads: int, batch_first: bool) -> Tensor:
    """``[batch, heads, sequence, headdim]`` of rows of heads."""
    x = x.unflatten(-1, (heads, -1))
    if x.ndim == 3:
        x = x.unsqueeze(0)
    elif not batch_first:
        x = x.transpose(0, 1)
    return x.transpose(1, 2)


def _merged(given: MultiHead) -> Tensor | None:
    """The numbers that both masks add to scores, with dims for the batch and for heads; None where there is no mask."""
    mask, padding = (_added(each, given.query) for each in (given.attn_mask, given.key_padding_mask))
    if mask is not None and mask.ndim == 3:
        mask = mask.unflatten(0, (-1, given.heads))
    if padding is None:
        return mask
    padding = padding.unsqueeze(-2).unsqueeze(-2)
    return padding if mask is None else torch.add(mask, padding)


def _added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """The numbers that a mask adds to scores: a float mask itself; of a boolean one -inf where it is true, else 0."""
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)
