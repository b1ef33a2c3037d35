"""Add an embedding's gradient to that of the head that shares its weight, in place and only where there are tokens.

Autograd adds two arrays of the weight's size. The embedding's has a row for each class, most of them zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor import lowering
from torch._inductor.fx_passes.post_grad import pass_patterns
from torch._inductor.pattern_matcher import Arg, CallFunction, CallFunctionVarArgs, Match, register_graph_pattern
from torch._inductor.virtualized import V
from torch.fx import Node

from cute_ops.composite.embedding import embedding_bwd
from cute_ops.ops.embedding.sorted_embedding_bwd import sorted_embedding_bwd
from cute_ops_torch.composite import embedding  # noqa: F401  # defines ops
from cute_ops_torch.inductor.ahead import start
from cute_ops_torch.inductor.effects import example
from cute_ops_torch.inductor.fx import hint
from cute_ops_torch.registry import define

# Classes for each token, at least: the rows of tokens are written, read and added to those of the other gradient.
LEAST_CLASSES = 8


def register(leave_to_torch: Callable[[Any], None]) -> None:
    """Let Inductor's pass after autograd find such sums, and lower the op that takes their place."""
    gradient = CallFunctionVarArgs(define(embedding_bwd).overload)
    for terms in ((Arg(), gradient), (gradient, Arg())):
        pattern = CallFunction(torch.ops.aten.add.Tensor, *terms)
        register_graph_pattern(pattern, extra_check=_is_short, pass_dict=pass_patterns[0])(_replace)
    ops = torch.ops.cute
    both = ops.add_embedding_gradient.default, ops.add_embedding_gradient_.default
    for each in both:
        leave_to_torch(each)
    anew, in_place = (lowering.lowerings[each] for each in both)

    @lowering.register_lowering(both[0], type_promotion_kind=None)
    def lower(total: Any, *given: Any) -> Any:
        arguments: Any = V.graph.current_node.args
        made, index, dout, _ = arguments
        _compile_ahead(example(index), example(dout))
        # The loss's scaled gradient has memory of its own.
        alone = made.target is ops.scaled_gradient.default and len(made.users) == 1
        if not alone or V.graph.cpp_wrapper or V.aot_compilation:
            return anew(total, *given)
        in_place(total, *given)
        return total


def _terms(match: Match) -> tuple[Any, Node]:
    """What is added to the gradient of an embedding, and that."""
    terms: Any = match.output_node().args
    first, second = terms
    return (first, second) if second in match.nodes else (second, first)


def _is_short(match: Match) -> bool:
    """Whether the sum is one of two arrays that are alike, without a factor (``alpha``), and has few tokens."""
    total, added = map(example, _terms(match))
    if match.output_node().kwargs:
        return False
    if not isinstance(total, torch.Tensor) or not total.is_contiguous():
        return False
    alike = (total.dtype, total.device, total.shape) == (added.dtype, added.device, added.shape)
    tokens = example(_terms(match)[1].args[0]).numel()
    return alike and 0 < LEAST_CLASSES * hint(tokens) <= hint(total.shape[0])


def _replace(match: Match, *_: Any, **__: Any) -> None:
    total, gradient = _terms(match)
    index, _weight, dout, *more = gradient.args
    padding_idx = more[0] if more else gradient.kwargs.get("padding_idx", -1)
    old = match.output_node()
    with match.graph.inserting_before(old):
        made = match.graph.call_function(
            torch.ops.cute.add_embedding_gradient.default, (total, index, dout, padding_idx)
        )
    made.meta.update(old.meta)
    old.replace_all_uses_with(made)
    match.erase_nodes()


def _compile_ahead(index: torch.Tensor, dout: torch.Tensor) -> None:
    tokens, n = index.numel(), dout.shape[-1]
    numbers = [index.new_empty(tokens, dtype=dtype) for dtype in (torch.int32, torch.int32, torch.int64)]
    start(sorted_embedding_bwd, [*numbers, dout.reshape(tokens, n)], [])
