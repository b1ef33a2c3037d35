"""Writes the stub file of this package from the declarations: ``python -m cute_ops_jax.tools.stubs``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cute_ops.declaration.headers import stub
from cute_ops.declaration.op import Op
from cute_ops.ops import OPS, PRODUCTS
from cute_ops_jax.primitive.function import signature

PATH = Path(__file__).parents[1] / "__init__.pyi"
_HEADER = '''"""Made by ``python -m cute_ops_jax.tools.stubs``; edit the declarations instead."""

from jax import Array
from jax.typing import ArrayLike

from cute_ops import __version__ as __version__
from cute_ops_jax.composite.block import gated_mlp as gated_mlp
from cute_ops_jax.composite.block import linear_add_rmsnorm as linear_add_rmsnorm
from cute_ops_jax.composite.block import qkv_rope as qkv_rope
from cute_ops_jax.composite.block import rmsnorm_linear as rmsnorm_linear
from cute_ops_jax.composite.embedding import embedding as embedding
from cute_ops_jax.composite.fused import fused as fused
from cute_ops_jax.composite.linear import gated_linear as gated_linear
from cute_ops_jax.composite.linear import linear as linear
from cute_ops_jax.composite.losses import linear_cross_entropy as linear_cross_entropy
from cute_ops_jax.composite.losses import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from cute_ops_jax.composite.losses import vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy
from cute_ops_jax.exporting import export as export
from cute_ops_jax.loading import load as load
from cute_ops_jax.primitive.ffi_check import probe as probe
from cute_ops_jax.primitive.function import register as register
'''


def text(ops: Iterable[Op] = (*OPS, *PRODUCTS)) -> str:
    """The stub file's text."""
    own = (op for op in ops if f" as {op.name}\n" not in _HEADER)
    return _HEADER + "\n" + "".join(stub(op.name, signature(op)) for op in own)


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
