"""The one loop: every declaration of ``cute_ops.ops`` becomes an op of torch and a function here."""

from cute_ops.ops import OPS
from cute_ops_torch.registry import register

__all__ = [op.name for op in OPS]

for _op in OPS:
    globals()[_op.name] = register(_op)
