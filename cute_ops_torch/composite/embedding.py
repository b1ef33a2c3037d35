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
from cute_ops_torch.host.modes import EXACT, modes_active
from cute_ops_torch.library.autograd import dispatching_kernel
from cute_ops_torch.library.no_gradient import no_gradients
from cute_ops_torch.library.nodes import Node
from cute_ops_torch.library.reference import register_fake
from cute_ops_torch.library.tensors import arrays, bind_tensors
from cute_ops_torch.library.vmap import examples, stacked
from cute_ops_torch.registry import family

Tensor = torch.Tensor


@continued(declared.DOC)
def embedding(index: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows of a table: ``out = weight[index]``.

    An index that is no class is torch's own error: IndexError on the CPU, a failed assertion on a GPU.
    """
    return torch.ops.cute.embedding(index, weight, padding_idx)  # type: ignore[no-any-return]


# --- below autograd ------------------------------------------------------------------------------------------------


def _gather(index: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    _check(index, weight, padding_idx)
    return torch.embedding(weight, index)


def _fake_gather(index: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    return weight.new_empty(_check(index, weight, padding_idx))


def _check(index: Tensor, weight: Tensor, padding_idx: int | None) -> tuple[Any, ...]:
    """The shape of the output, of valid arguments."""
    out = bind_tensors(declared.embedding, (index, weight), ()).outputs["out"]
    if padding_idx is not None:
        declared.padding(padding_idx, weight.shape[0])
    assert out is not None
    return out.shape


def _gradient(dout: Tensor, index: Tensor, classes: int, padding_idx: int = -1) -> Tensor:
    _check_gradient(dout, index, classes, padding_idx)
    return _checked_gradient(dout, index, classes, padding_idx)


def _fake_gradient(dout: Tensor, index: Tensor, classes: int, padding_idx: int = -1) -> Tensor:
    _check_gradient(dout, index, classes, padding_idx)
    return dout.new_empty((classes, dout.shape[-1]))


def _check_gradient(dout: Tensor, index: Tensor, classes: int, padding_idx: int) -> None:
    """Check all but that each index is a class, which the forward has checked."""
    weight = weight_like(dout, classes, dout.shape[-1])
    bind_tensors(declared.embedding_bwd, (index, weight, dout), (padding_idx,))


def weight_like(dout: Tensor, classes: int, n: int) -> Tensor:
    """A tensor of the weight's shape and dtype, in the memory of one row."""
    return dout.new_empty((1, n)).expand(classes, -1)


def _checked_gradient(dout: Tensor, index: Tensor, classes: int, padding_idx: int) -> Tensor:
    key = index.reshape(-1).to(torch.int32)
    rows = dout.reshape(len(key), dout.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    if padding_idx >= 0:
        key = key.masked_fill(key == padding_idx, classes)  # sorted behind all classes, where nothing is read
    key, order = key.sort(stable=True)
    every = torch.arange(classes, dtype=torch.int32, device=key.device)
    ends = torch.searchsorted(key, every, right=True, out_int32=True)
    _, run, _ = family("cute", "sorted_embedding_bwd")
    return run(ends, key, order, rows)  # type: ignore[no-any-return]


# --- autograd ------------------------------------------------------------------------------------------------------


class _Embedding(Node):
    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Tensor], index: Tensor, weight: Tensor, padding_idx: int | None = None
    ) -> Tensor:
        ctx.save_for_backward(index)
        ctx.classes, ctx.padding_idx = weight.shape[0], padding_idx
        return run(index, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        observed = torch.is_grad_enabled() or torch.compiler.is_compiling() or modes_active()
        eager = type(dout) in EXACT and not observed
        # The forward has checked the index, and autograd the shape of its cotangent.
        run = _checked_gradient if eager else torch.ops.cute.embedding_bwd
        return None, None, run(dout, index, ctx.classes, declared.padding(ctx.padding_idx, ctx.classes)), None


class _EmbeddingBwd(Node):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], dout: Tensor, index: Tensor, *sizes: int) -> Tensor:
        ctx.given = arrays(declared.embedding_bwd, (index, None, dout))
        return run(dout, index, *sizes)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        wanted = (ctx.needs_input_grad[2], False, ctx.needs_input_grad[1])  # in the declaration's order
        index, _, dout = no_gradients(declared.embedding_bwd, ctx.given, cotangents, wanted)
        return None, dout, index, None, None


# --- vmap ----------------------------------------------------------------------------------------------------------


def _vmap_gather(
    info: Any, in_dims: tuple[int | None, ...], index: Tensor, weight: Tensor, padding_idx: int | None = None
) -> tuple[Tensor, int]:
    """A batch of indices is more tokens; tables go one by one."""
    index_dim, weight_dim, *_ = in_dims
    if weight_dim is None and index_dim is not None:
        return torch.ops.cute.embedding(index.movedim(index_dim, 0), weight, padding_idx), 0
    each = examples(info.batch_size, (index_dim, weight_dim), (index, weight))
    return stacked(info.batch_size, [torch.ops.cute.embedding(i, w, padding_idx) for i, w in each]), 0


def _vmap_gradient(
    info: Any, in_dims: tuple[int | None, ...], dout: Tensor, index: Tensor, classes: int, padding_idx: int = -1
) -> tuple[Tensor, int]:
    """Examples go one by one: each has a sum of its own."""
    each = examples(info.batch_size, in_dims[:2], (dout, index))
    return stacked(info.batch_size, [torch.ops.cute.embedding_bwd(d, i, classes, padding_idx) for d, i in each]), 0


# --- registration --------------------------------------------------------------------------------------------------


_library = torch.library.Library("cute", "FRAGMENT")


def _register() -> None:
    gather = "(Tensor index, Tensor weight, int? padding_idx=None) -> Tensor"
    gradient = "(Tensor dout, Tensor index, SymInt classes, int padding_idx=-1) -> Tensor"
    for op, schema, run, fake, vmap, node, inputs in (
        (declared.embedding, gather, _gather, _fake_gather, _vmap_gather, _Embedding, lambda i, w, *_: (i, w)),
        (
            declared.embedding_bwd, gradient, _gradient, _fake_gradient, _vmap_gradient, _EmbeddingBwd,
            lambda d, i, *_: (i, None, d),
        ),
    ):  # fmt: skip
        _library.define(op.name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(op.name, run, "CompositeExplicitAutograd")
        overload = getattr(torch.ops.cute, op.name).default
        kernel = dispatching_kernel(op, overload, inputs, node.apply)  # type: ignore[union-attr]
        _library.impl(op.name, kernel, "Autograd", with_keyset=True)
        register_fake(_library, op.name, fake)
        torch.library.register_vmap(f"cute::{op.name}", vmap, lib=_library)


_register()
