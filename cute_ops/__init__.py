"""Write one CuTe DSL kernel. Call it from PyTorch and from JAX.

The core: declarations of ops, their kernels and the compile cache. It imports neither torch nor jax;
``cute_ops_torch`` and ``cute_ops_jax`` turn every declaration into an op of their framework.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cute_ops.garbage import without_collections

with without_collections(stays=True):
    from cute_ops.declaration.array_api import cast, widen
    from cute_ops.declaration.attributes import OneOf
    from cute_ops.declaration.case import Case
    from cute_ops.declaration.config import Needs, Problem, Space, Tuning, vary
    from cute_ops.declaration.finish import Finish
    from cute_ops.declaration.kernel import Kernel
    from cute_ops.declaration.op import Op
    from cute_ops.declaration.program import Program
    from cute_ops.declaration.shapes import FLOATS, Array
    from cute_ops.declaration.split import Sharding, Split
    from cute_ops.declaration.static import WhileFew
    from cute_ops.declaration.tensor import Accumulation, Tensor
    from cute_ops.errors import CacheError, CompileError, no_attribute
    from cute_ops.version import __version__ as __version__

if TYPE_CHECKING:
    from cute_ops.ops.expression.fused import fused
    from cute_ops.ops.gemm.fused import fused_linear

__all__ = [
    "FLOATS",
    "Accumulation",
    "Array",
    "CacheError",
    "Case",
    "CompileError",
    "Finish",
    "Kernel",
    "Needs",
    "OneOf",
    "Op",
    "Problem",
    "Program",
    "Sharding",
    "Space",
    "Split",
    "Tensor",
    "Tuning",
    "WhileFew",
    "cast",
    "fused",
    "fused_linear",
    "vary",
    "widen",
]


def __getattr__(name: str) -> Any:
    """Import tracing on first use, because that takes time."""
    homes = {"fused": "cute_ops.ops.expression.fused", "fused_linear": "cute_ops.ops.gemm.fused"}
    if name not in homes:
        where = ": functions are in cute_ops_torch and cute_ops_jax" if name.islower() else ""
        raise no_attribute(__name__, name, __all__, where)
    return getattr(import_module(homes[name]), name)
