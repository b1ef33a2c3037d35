"""Made by ``python -m cute_ops_torch.stubs``; edit the declarations instead."""

from torch import Tensor

__all__ = ["add_rmsnorm", "rmsnorm", "silu_mul"]

def rmsnorm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-06,
    weight_offset: float = 0.0,
) -> Tensor: ...
def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-06,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]: ...
def silu_mul(gate: Tensor, up: Tensor) -> Tensor: ...
