"""Write one CuTe DSL kernel. Call it from PyTorch and from JAX.

The core: declarations of ops, their kernels and the compile cache. It imports neither torch nor jax;
``cute_ops_torch`` and ``cute_ops_jax`` turn every declaration into an op of their framework.
"""

from cute_ops.array_api import cast, widen
from cute_ops.config import Needs, Problem, Space, Tuning, vary
from cute_ops.errors import CacheError, CompileError
from cute_ops.op import Accumulation, Case, Finish, Kernel, OneOf, Op, Sharding, Split, Tensor, WhileFew
from cute_ops.shapes import FLOATS, Array

__version__ = "0.1.0"
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
    "Sharding",
    "Space",
    "Split",
    "Tensor",
    "Tuning",
    "WhileFew",
    "cast",
    "vary",
    "widen",
]
