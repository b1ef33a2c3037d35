"""Rows of a table, whose gradient is written in one pass.

The forward is torch's gather. The backward sorts the tokens by class with torch's sort and finds where each class's
tokens end; our kernel then writes each row of the table's gradient once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_ops.composite import embedding as declared
from cute_ops.composite.docstrings import continued
from cute_ops_torch.host.function import EXACT, watched
from cute_ops_torch.library.autograd import Node, dispatching_kernel, no_gradients
from cute_ops_torch.library.reference import register_fake
from cute_ops_torch.library.register import family
from cute_ops_torch.library.tensors import arrays, bind_tensors
from cute_ops_torch.library.vmap import examples

Tensor = torch.Tensor
library = torch.library.Library("cute", "FRAGMENT")


@continued(declared.DOC)
def embedding(index: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows of a table: ``out = weight[index]``.

    An index that is no class is torch's own error: IndexError on the CPU, a failed assertion on a GPU.
    """
    return torch.ops.cute.embedding(index, weight, padding_idx)  # type: ignore[no-any-return]


# --- below autograd ------------------------------------------------------------------------------------------------


def _check(index: Tensor, weight: Tensor, padding_idx: int | None) -> tuple[Any, ...]:
    """The shape of the rows."""
    bound = bind_tensors(declared.embedding, (index, weight), ())
    if padding_idx is not None:
        declared.padding(padding_idx, weight.shape[0])
    return bound.outputs["out"].shape  # type: ignore[union-attr]


def _rows(index: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    _check(index, weight, padding_idx)
    return torch.embedding(weight, index)


def _fake_rows(index: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    return weight.new_empty(_check(index, weight, padding_idx))


def _like_weight(dout: Tensor, classes: int) -> Tensor:
    """A tensor of the weight's shape, in the memory of one row."""
    return dout.new_empty((1, dout.shape[-1])).expand(classes, -1)


def _gradient(dout: Tensor, index: Tensor, classes: int, padding_idx: int = -1) -> Tensor:
    """Of the forward's tokens: that they are classes is not looked at again."""
    bind_tensors(declared.embedding_bwd, (index, _like_weight(dout, classes), dout), (padding_idx,))
    return _checked_gradient(dout, index, classes, padding_idx)


def _checked_gradient(dout: Tensor, index: Tensor, classes: int, padding_idx: int) -> Tensor:
    key = index.reshape(-1).to(torch.int32)
    rows = dout.reshape(len(key), dout.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    if padding_idx >= 0:
        key = key.masked_fill(key == padding_idx, classes)  # behind all classes, where nothing is read
    key, order = key.sort(stable=True)
    every = torch.arange(classes, dtype=torch.int32, device=key.device)
    ends = torch.searchsorted(key, every, right=True, out_int32=True)
    _, run, _ = family("cute", "sorted_embedding_bwd")
    return run(ends, key, order, rows)  # type: ignore[no-any-return]


def _fake_gradient(dout: Tensor, index: Tensor, classes: int, padding_idx: int = -1) -> Tensor:
    bind_tensors(declared.embedding_bwd, (index, _like_weight(dout, classes), dout), (padding_idx,))
    return dout.new_empty((classes, dout.shape[-1]))


# --- autograd ------------------------------------------------------------------------------------------------------


class _Rows(Node):
    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Tensor], index: Tensor, weight: Tensor, padding_idx: int | None = None
    ) -> Tensor:
        ctx.save_for_backward(index)
        ctx.classes, ctx.padding_idx = weight.shape[0], padding_idx
        return run(index, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        unwatched = type(dout) in EXACT and not (torch.is_grad_enabled() or torch.compiler.is_compiling() or watched())
        # Autograd's cotangents are of the rows that the forward has checked.
        run = _checked_gradient if unwatched else torch.ops.cute.embedding_bwd
        return None, None, run(dout, index, ctx.classes, declared.padding(ctx.padding_idx, ctx.classes)), None


class _Gradient(Node):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], dout: Tensor, index: Tensor, *sizes: int) -> Tensor:
        ctx.given = arrays(declared.embedding_bwd, (index, None, dout))
        return run(dout, index, *sizes)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        wanted = (ctx.needs_input_grad[2], False, ctx.needs_input_grad[1])  # in the declaration's order
        index, _, dout = no_gradients(declared.embedding_bwd, ctx.given, cotangents, wanted)
        return None, dout, index, None, None


# --- vmap ----------------------------------------------------------------------------------------------------------


def _vmap_rows(
    info: Any, in_dims: tuple[Any, ...], index: Tensor, weight: Tensor, padding_idx: int | None = None
) -> Any:
    """More tokens; a table per example is one after another."""
    of_index, of_weight = in_dims[0], in_dims[1]
    if of_index is not None:
        index = index.movedim(of_index, 0)
    if of_weight is None:
        return torch.ops.cute.embedding(index, weight, padding_idx), 0
    weights = weight.movedim(of_weight, 0).unbind()
    indices = [index] * len(weights) if of_index is None else index.unbind()
    each = [torch.ops.cute.embedding(i, w, padding_idx) for i, w in zip(indices, weights, strict=True)]
    return torch.stack(each), 0


def _vmap_gradient(
    info: Any, in_dims: tuple[Any, ...], dout: Tensor, index: Tensor, classes: int, padding_idx: int = -1
) -> Any:
    """A sum per example."""
    each = examples(info.batch_size, in_dims[:2], (dout, index))
    return torch.stack([torch.ops.cute.embedding_bwd(d, i, classes, padding_idx) for d, i in each]), 0


# --- registration --------------------------------------------------------------------------------------------------


def _register() -> None:
    rows = "(Tensor index, Tensor weight, int? padding_idx=None) -> Tensor"
    gradient = "(Tensor dout, Tensor index, SymInt classes, int padding_idx=-1) -> Tensor"
    for op, schema, run, fake, vmap, node, inputs in (
        (declared.embedding, rows, _rows, _fake_rows, _vmap_rows, _Rows, lambda i, w, *_: (i, w)),
        (
            declared.embedding_bwd, gradient, _gradient, _fake_gradient, _vmap_gradient, _Gradient,
            lambda d, i, *_: (i, None, d),
        ),
    ):  # fmt: skip
        library.define(op.name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(op.name, run, "CompositeExplicitAutograd")
        overload = getattr(torch.ops.cute, op.name).default
        kernel = dispatching_kernel(op, overload, inputs, node.apply)  # type: ignore[union-attr]
        library.impl(op.name, kernel, "Autograd", with_keyset=True)
        register_fake(library, op.name, fake)
        torch.library.register_vmap(f"cute::{op.name}", vmap, lib=library)


_register()
