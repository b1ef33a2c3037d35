"""cute_ops in JAX: every declared op as a function that works under ``jit``, ``grad``, ``vmap`` and the rest.

On CUDA the compiled kernels run on XLA's own buffers and stream; on other platforms the references run.
"""

from importlib import import_module
from typing import Any

from cute_ops import __version__ as __version__
from cute_ops.garbage import without_collections

with without_collections(stays=True):
    try:
        import jax as _jax  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError("cute_ops_jax needs JAX: pip install 'cute-ops[jax]'") from error
    from cute_ops.composite.models import MODELS
    from cute_ops.errors import no_attribute
    from cute_ops.ops import ATTENTION, OPS, PRODUCTS
    from cute_ops_jax.primitive.ffi_check import probe
    from cute_ops_jax.primitive.function import register

_DECLARED = {op.name: op for op in (*OPS, *PRODUCTS, *ATTENTION, *MODELS)}
# Imported when they are first asked for: most programs use few of them, and start faster without their imports.
_LAZY = {
    "attention": "composite.attention", "decode_attention": "composite.attention",
    "dot_product_attention": "composite.dot_product_attention", "embedding": "composite.embedding",
    "export": "exporting", "fuse": "fusion", "fused": "composite.fused", "gated_linear": "composite.linear",
    "gated_mlp": "composite.block", "linear": "composite.linear", "linear_add_rmsnorm": "composite.block",
    "group_norm": "composite.layouts", "load": "loading", "mlp": "composite.block", "qkv_rope": "composite.block",
    "rmsnorm_linear": "composite.block", "rope_from_positions": "composite.layouts",
    **dict.fromkeys(
        ("linear_distillation_loss", "linear_log_probs", "linear_policy_loss", "linear_preference_loss"),
        "composite.training",
    ),
    **dict.fromkeys(
        ("linear_cross_entropy", "vocab_parallel_cross_entropy", "vocab_parallel_linear_cross_entropy"),
        "composite.losses",
    ),
}  # fmt: skip
__all__ = [
    "probe",
    "register",
    *dict.fromkeys((*_LAZY, *_DECLARED)),
]


def __getattr__(name: str) -> Any:
    """The function of an op, made when it is first asked for, or a module of modules."""
    if name in ("equinox", "nnx"):
        return import_module(f"cute_ops_jax.{name}")
    if name in _LAZY:
        function = getattr(import_module(f"cute_ops_jax.{_LAZY[name]}"), name)
    elif name in _DECLARED:
        function = register(_DECLARED[name])
    else:
        raise no_attribute(__name__, name, (*__all__, "equinox", "nnx"))
    globals()[name] = function
    return function


def __dir__() -> list[str]:
    return sorted(__all__)
