"""Norms with learned parameters. Arguments by position are those of :mod:`torch.nn`'s norms, in their order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from cute_ops.errors import suggesting
from cute_ops_torch import functions
from cute_ops_torch.composite.layouts import group_norm
from cute_ops_torch.nn.layered import Layered

Device = torch.device | str | None
Size = int | Sequence[int]


class _Norm(Layered):
    """A norm's parameters."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, n: Size, eps: float, weight_offset: float, weight: bool, bias: bool, *, device: Device,
        dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        super().__init__()
        if isinstance(n, tuple | list):  # as torch.nn's norms take it
            if len(n) != 1:
                raise ValueError(f"cute.{type(self).__name__}: n is {n}, expected one size: that of the last dim.")
            (n,) = n
        self.n, self.eps, self.weight_offset = n, eps, weight_offset
        self._learn("weight", n if weight else None, device, dtype)
        self._learn("bias", n if bias else None, device, dtype)

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        affine = "" if self.weight is not None else ", elementwise_affine=False"
        return f"{self.n}, eps={self.eps}{affine}{offset}, bias={self.bias is not None}"


class RMSNorm(_Norm):
    """:func:`cute_ops_torch.rmsnorm` with a learned weight.

    Args:
        n: size of the last dim; as in torch.nn also in a list or a tuple.
        eps: added to the mean square.
        elementwise_affine: learn a weight.
        device: where the parameters are.
        dtype: a float dtype; it need not be that of the input.
        weight_offset: added to the weight; 1.0 is Gemma's. The weight starts at ``1 - weight_offset``.
        bias: learn a bias too.
    """

    @suggesting
    def __init__(
        self, n: Size, eps: float = 1e-6, elementwise_affine: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, *, weight_offset: float = 0.0, bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(n, eps, weight_offset, elementwise_affine, bias, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functions.rmsnorm(x, self.weight, self.bias, self.eps, self.weight_offset)


class AddRMSNorm(RMSNorm):
    """:func:`cute_ops_torch.add_rmsnorm` with a learned weight: ``(x, residual) -> (out, residual_out)``."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return functions.add_rmsnorm(x, residual, self.weight, self.bias, self.eps, self.weight_offset)


class LayerNorm(_Norm):
    """:func:`cute_ops_torch.layernorm` with a learned weight and bias.

    Args:
        n: size of the last dim.
        eps: added to the variance.
        elementwise_affine: learn a weight, and a bias if ``bias`` says so too.
        bias: learn a bias.
        device: where the parameters are.
        dtype: a float dtype; it need not be that of the input.
    """

    @suggesting
    def __init__(
        self, n: Size, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True, device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        learned = elementwise_affine, elementwise_affine and bias
        super().__init__(n, eps, 0.0, *learned, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functions.layernorm(x, self.weight, self.bias, self.eps)


class GroupNorm(Layered):
    """:func:`cute_ops_torch.group_norm` with a learned weight and bias.

    Args:
        num_groups: groups of channels.
        num_channels: the size of the dim of channels.
        eps: added to the variance.
        affine: learn a weight and a bias.
        device: where the parameters are.
        dtype: a float dtype; it need not be that of the input.
        channels_last: whether the last dim has the channels, not the second.
        activation: ``"silu"`` or ``"none"``, in the same pass.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    @suggesting
    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, *, channels_last: bool = False, activation: str = "none",
    ) -> None:  # fmt: skip
        super().__init__()
        if num_groups < 1 or num_channels % num_groups:
            raise ValueError(f"cute.GroupNorm: num_groups is {num_groups}, no divisor of num_channels={num_channels}.")
        self.groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.channels_last, self.activation = channels_last, activation
        self._learn("weight", num_channels if affine else None, device, dtype)
        self._learn("bias", num_channels if affine else None, device, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return group_norm(
            x, self.weight, self.bias, self.groups, self.eps, channels_last=self.channels_last,
            activation=self.activation,
        )  # fmt: skip

    def extra_repr(self) -> str:
        more = ", channels_last=True" if self.channels_last else ""
        more += f", activation={self.activation}" if self.activation != "none" else ""
        return f"{self.groups}, {self.num_channels}, eps={self.eps}, affine={self.weight is not None}{more}"


class DropoutAddRMSNorm(_Norm):
    """:func:`cute_ops_torch.dropout_add_rmsnorm` with a learned weight: ``(x, residual) -> (out, residual_out)``.

    In training each call draws a seed with torch's generator of the device, unless it is given one. In evaluation
    nothing is dropped.

    Args:
        n: size of the last dim.
        p: how many elements are dropped in training.
        eps: added to the mean square.
        device: where the weight is.
        dtype: a float dtype; it need not be that of the input.
    """

    weight: nn.Parameter

    @suggesting
    def __init__(
        self, n: Size, p: float = 0.1, eps: float = 1e-6, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(n, eps, 0.0, True, False, device=device, dtype=dtype)
        self.p = p

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.training or not self.p:
            return functions.add_rmsnorm(x, residual, self.weight, None, self.eps)
        seed = _drawn(x) if seed is None else seed
        return functions.dropout_add_rmsnorm(x, residual, self.weight, seed, self.p, self.eps)

    def extra_repr(self) -> str:
        return f"{self.n}, p={self.p}, eps={self.eps}"


class DropoutAddLayerNorm(DropoutAddRMSNorm):
    """:func:`cute_ops_torch.dropout_add_layernorm` with a learned weight and bias, as :class:`DropoutAddRMSNorm`."""

    bias: nn.Parameter

    @suggesting
    def __init__(
        self, n: Size, p: float = 0.1, eps: float = 1e-5, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(n, p, eps, device=device, dtype=dtype)
        self._learn("bias", self.n, device, dtype)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, seed: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.training or not self.p:
            total = x.to(residual.dtype) + residual
            return functions.layernorm(total, self.weight, self.bias, self.eps).to(x.dtype), total
        seed = _drawn(x) if seed is None else seed
        return functions.dropout_add_layernorm(x, residual, self.weight, self.bias, seed, self.p, self.eps)


def _drawn(x: torch.Tensor) -> torch.Tensor:
    """A seed from torch's generator, on the device of ``x``."""
    return torch.randint(2**31, (), device=x.device)
