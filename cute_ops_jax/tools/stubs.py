"""Make the stub files of functions that the source does not spell out: ``python -m cute_ops_jax.tools.stubs``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cute_ops.composite.models import MODELS
from cute_ops.declaration.headers import module_stub, stub
from cute_ops.declaration.op import Op
from cute_ops.ops import ATTENTION, OPS, PRODUCTS
from cute_ops_jax.composite import attention, block, layouts, linear, training
from cute_ops_jax.primitive.function import signature

ROOT = Path(__file__).parents[1]
COMMAND = "python -m cute_ops_jax.tools.stubs"
_IMPORTS = {
    "Sequence": "from collections.abc import Sequence",
    "Any": "from typing import Any", "Array": "from jax import Array",
    "Epilogue": "from cute_ops.ops.gemm.by_call import Epilogue",
    "Given": "from cute_ops.composite.attention import Function, Given",
}  # fmt: skip
MODULES = {"attention": attention, "block": block, "layouts": layouts, "linear": linear, "training": training}
_HEADER = '''"""Made by ``python -m cute_ops_jax.tools.stubs``; edit the declarations instead."""

from jax import Array
from jax.typing import ArrayLike

from cute_ops import __version__ as __version__
from cute_ops_jax.composite.attention import attention as attention
from cute_ops_jax.composite.attention import decode_attention as decode_attention
from cute_ops_jax.composite.block import gated_mlp as gated_mlp
from cute_ops_jax.composite.block import linear_add_rmsnorm as linear_add_rmsnorm
from cute_ops_jax.composite.block import mlp as mlp
from cute_ops_jax.composite.block import qkv_rope as qkv_rope
from cute_ops_jax.composite.block import rmsnorm_linear as rmsnorm_linear
from cute_ops_jax.composite.dot_product_attention import dot_product_attention as dot_product_attention
from cute_ops_jax.composite.embedding import embedding as embedding
from cute_ops_jax.composite.fused import fused as fused
from cute_ops_jax.composite.layouts import group_norm as group_norm
from cute_ops_jax.composite.layouts import rope_from_positions as rope_from_positions
from cute_ops_jax.composite.linear import gated_linear as gated_linear
from cute_ops_jax.composite.linear import linear as linear
from cute_ops_jax.composite.losses import linear_cross_entropy as linear_cross_entropy
from cute_ops_jax.composite.losses import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from cute_ops_jax.composite.losses import vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy
from cute_ops_jax.composite.training import linear_distillation_loss as linear_distillation_loss
from cute_ops_jax.composite.training import linear_log_probs as linear_log_probs
from cute_ops_jax.composite.training import linear_policy_loss as linear_policy_loss
from cute_ops_jax.composite.training import linear_preference_loss as linear_preference_loss
from cute_ops_jax.exporting import export as export
from cute_ops_jax.fusion import fuse as fuse
from cute_ops_jax.loading import load as load
from cute_ops_jax.primitive.ffi_check import probe as probe
from cute_ops_jax.primitive.function import register as register
'''


def text(ops: Iterable[Op] = (*OPS, *PRODUCTS, *ATTENTION, *MODELS)) -> str:
    """The stub file of the package."""
    own = (op for op in ops if f" as {op.name}\n" not in _HEADER)
    return _HEADER + "\n" + "".join(stub(op.name, signature(op)) for op in own)


def files() -> dict[Path, str]:
    """The text of each stub file."""
    published = {f"composite/{name}.pyi": module for name, module in MODULES.items()}
    made = {path: module_stub(module, COMMAND, _IMPORTS) for path, module in published.items()}
    return {ROOT / path: content for path, content in {"__init__.pyi": text(), **made}.items()}


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")
