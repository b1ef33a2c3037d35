"""cute_ops for PyTorch: ``torch.ops.cute.*`` with fake kernels and autograd, functions and modules.

>>> import torch, cute_ops_torch
>>> x, weight = torch.randn(2, 3, 64), torch.ones(64)
>>> torch.equal(cute_ops_torch.rmsnorm(x, weight), torch.ops.cute.rmsnorm(x, weight))
True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cute_ops import __version__ as __version__
from cute_ops.declaration.fields import without_checks
from cute_ops.errors import no_attribute
from cute_ops.garbage import without_collections

with without_collections(stays=True), without_checks():
    try:
        import torch as _torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError("cute_ops_torch needs PyTorch: pip install 'cute-ops[torch]'") from error
    from cute_ops_torch import functions
    from cute_ops_torch.composite import dispatched as dispatched  # defines ops
    from cute_ops_torch.distributed.import_hook import when_imported
    from cute_ops_torch.registry import register

if TYPE_CHECKING:
    from cute_ops_torch import nn
    from cute_ops_torch.composite.attention import attention as attention
    from cute_ops_torch.composite.attention import decode_attention as decode_attention
    from cute_ops_torch.composite.block import gated_mlp, linear_add_rmsnorm, mlp, qkv_rope, rmsnorm_linear
    from cute_ops_torch.composite.embedding import embedding
    from cute_ops_torch.composite.flex_attention import flex_attention
    from cute_ops_torch.composite.fused import fused
    from cute_ops_torch.composite.layouts import group_norm, rope_from_positions
    from cute_ops_torch.composite.linear import gated_linear as gated_linear
    from cute_ops_torch.composite.linear import linear
    from cute_ops_torch.composite.linear_cross_entropy import linear_cross_entropy
    from cute_ops_torch.composite.scaled_dot_product import scaled_dot_product_attention
    from cute_ops_torch.composite.training import (
        linear_distillation_loss,
        linear_log_probs,
        linear_policy_loss,
        linear_preference_loss,
    )
    from cute_ops_torch.functions import *  # type: ignore[assignment]  # noqa: F403 (one function per declaration)
    from cute_ops_torch.huggingface.attention_function import register_attention
    from cute_ops_torch.huggingface.patch import patch, unpatch
    from cute_ops_torch.huggingface.warm_up import warm_up

__all__ = [
    "embedding",
    "flex_attention",
    "fused",
    "gated_mlp",
    "group_norm",
    "linear",
    "linear_add_rmsnorm",
    "linear_cross_entropy",
    "linear_distillation_loss",
    "linear_log_probs",
    "linear_policy_loss",
    "linear_preference_loss",
    "mlp",
    "nn",
    "patch",
    "qkv_rope",
    "register",
    "register_attention",
    "rmsnorm_linear",
    "rope_from_positions",
    "scaled_dot_product_attention",
    "unpatch",
    "warm_up",
    *functions.__all__,
]

# Where functions are that no op of torch's needs, and that take time to import.
_LAZY = {
    "attention": "composite.attention", "decode_attention": "composite.attention",
    "embedding": "composite.embedding", "flex_attention": "composite.flex_attention",
    "fused": "composite.fused", "gated_mlp": "composite.block", "linear_add_rmsnorm": "composite.block",
    "linear": "composite.linear", "linear_cross_entropy": "composite.linear_cross_entropy",
    "gated_linear": "composite.linear",
    "mlp": "composite.block", "qkv_rope": "composite.block", "rmsnorm_linear": "composite.block",
    "patch": "huggingface.patch", "register_attention": "huggingface.attention_function",
    "scaled_dot_product_attention": "composite.scaled_dot_product", "unpatch": "huggingface.patch",
    "warm_up": "huggingface.warm_up", "group_norm": "composite.layouts",
    "rope_from_positions": "composite.layouts",
    **dict.fromkeys(
        ("linear_distillation_loss", "linear_log_probs", "linear_policy_loss", "linear_preference_loss"),
        "composite.training",
    ),
}  # fmt: skip

# Teach all ops to take DTensors, once a program imports those.
when_imported("torch.distributed.tensor", "cute_ops_torch.distributed.dtensor")
# Define every op with a name, once a program loads exported graphs or packages.
when_imported("torch.export.pt2_archive", "cute_ops_torch.composite.loaded")


def __getattr__(name: str) -> Any:
    """Functions are made, and what few programs need is imported, when it is first used: that takes time."""
    if name in ("compat", "inductor", "nn", "optim"):
        return import_module(f"cute_ops_torch.{name}")
    if name not in __all__:
        raise no_attribute(__name__, name, (*__all__, "compat", "inductor", "optim"))
    module = import_module(f"cute_ops_torch.{_LAZY[name]}") if name in _LAZY else functions
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
