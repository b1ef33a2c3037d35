"""A module's ``forward`` as a graph of ATen operators, traced on fake tensors: nothing is computed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

_DECOMPOSED = (
    "rms_norm", "_fused_rms_norm", "addcmul", "hardtanh", "leaky_relu", "elu", "softplus", "native_layer_norm_backward",
    "silu_backward", "gelu_backward", "threshold_backward", "sigmoid_backward", "tanh_backward",
    "_softmax_backward_data", "hardswish", "std", "linalg_vector_norm", "norm", "baddbmm", "addcdiv", "stack",
)  # fmt: skip


def traced(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, dtype: torch.dtype | None = None
) -> tuple[GraphModule, list[str]]:
    """The graph of a module for these arguments, whose tensors may be on any device; and the names of the parameters
    and buffers, which are its first inputs. With ``dtype`` those of floats are traced in this one.

    Raises:
        Exception: whatever its ``forward`` raises, or what a trace cannot follow, such as a branch on a value.
    """
    own = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    leaves, spec = pytree.tree_flatten((args, dict(kwargs or {})))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def run(state: list[torch.Tensor], given: list[torch.Tensor]) -> Any:
        full = list(leaves)
        for place, tensor in zip(places, given, strict=True):
            full[place] = tensor
        args, kwargs = pytree.tree_unflatten(full, spec)
        out = torch.func.functional_call(module, dict(zip(own, state, strict=True)), args, kwargs)
        return [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted)

    functional = torch.func.functionalize(run, remove="mutations")
    with torch.no_grad(), _unlogged(), mode:
        made = make_fx(functional, decomposition_table=_table())(
            [fake(tensor) for tensor in own.values()], [fake(leaves[place]) for place in places]
        )
    return made, list(own)


@contextmanager
def _unlogged() -> Iterator[None]:
    """Silence the tracebacks that torch logs of calls that cannot be traced: callers get the exception."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@cache
def _table() -> Any:
    aten = torch.ops.aten
    return get_decompositions([getattr(aten, name) for name in _DECOMPOSED if hasattr(aten, name)])
