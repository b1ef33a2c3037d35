"""cute_ops in JAX: every declared op as a function for ``jit``, ``grad``, ``vmap`` and the rest.

On CUDA the compiled kernels run on XLA's own buffers and stream; elsewhere the declared references.
"""

from typing import Any

from cute_ops.ops import OPS
from cute_ops_jax.composite.embedding import embedding
from cute_ops_jax.composite.linear_cross_entropy import linear_cross_entropy, vocab_parallel_linear_cross_entropy
from cute_ops_jax.composite.vocab_parallel import vocab_parallel_cross_entropy
from cute_ops_jax.exporting import export, load
from cute_ops_jax.primitive.ffi_check import probe
from cute_ops_jax.primitive.function import register

_DECLARED = {op.name: op for op in OPS}
__all__ = [
    "embedding",
    "export",
    "linear_cross_entropy",
    "load",
    "probe",
    "register",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
    *_DECLARED,
]


def __getattr__(name: str) -> Any:
    """The function of an op, made when it is first asked for."""
    if name not in _DECLARED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function = globals()[name] = register(_DECLARED[name])
    return function


def __dir__() -> list[str]:
    return sorted(__all__)
