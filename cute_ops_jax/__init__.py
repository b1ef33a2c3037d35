"""cute_ops in JAX: every declared op as a function for ``jit``, ``grad``, ``vmap`` and the rest.

On CUDA the compiled kernels run on XLA's own buffers and stream; elsewhere the declared references.
"""

from cute_ops.ops import OPS
from cute_ops_jax.bridge import probe
from cute_ops_jax.exporting import export, load
from cute_ops_jax.front import register
from cute_ops_jax.linear_cross_entropy import linear_cross_entropy

__all__ = ["export", "linear_cross_entropy", "load", "probe", "register", *(op.name for op in OPS)]

for _op in OPS:
    globals()[_op.name] = register(_op)
