"""When a submodule need not be called: a fused node then computes its result from its parameters."""

from __future__ import annotations

import torch
from torch import nn

from cute_ops_torch.library.modes import transforms_active


def can_bypass_linear(x: torch.Tensor, *layers: nn.Module) -> bool:
    """Whether linear layers without bias do nothing but multiply ``x``, or what is made of it, by their weights."""
    return (
        is_eager(x)
        and not torch.is_autocast_enabled(x.device.type)
        and all(
            type(layer) is nn.Linear
            and layer._parameters["bias"] is None
            and type(layer.weight) is nn.Parameter
            and layer.weight.dtype == x.dtype
            and is_unobserved(layer)
            for layer in layers
        )
    )


def is_eager(x: torch.Tensor) -> bool:
    """Whether ``x`` is a plain tensor, and no compiler, mode or transform sees the calls made on it."""
    return not torch.compiler.is_compiling() and not transforms_active() and type(x) is torch.Tensor


def is_unobserved(module: nn.Module) -> bool:
    """Whether calling a module runs its class's ``forward`` and nothing else."""
    return "forward" not in vars(module) and not has_hooks(module) and not nn.modules.module._has_any_global_hook()


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
