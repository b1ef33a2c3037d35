"""The ops of models and their trainers, composites among them, in the order of the documentation."""

from cute_ops.composite.causal_conv1d_packed import causal_conv1d_packed, causal_conv1d_states
from cute_ops.composite.linear_cross_entropy_metrics import linear_cross_entropy_metrics
from cute_ops.composite.rope_at import rope_at
from cute_ops.declaration.op import Op
from cute_ops.ops import MODELS as OF_KERNELS

MODELS: tuple[Op, ...] = (
    *OF_KERNELS, linear_cross_entropy_metrics, causal_conv1d_packed, causal_conv1d_states, rope_at
)  # fmt: skip
