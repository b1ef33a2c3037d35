"""Linear layers with epilogues or a loss. Parameters are those of :class:`torch.nn.Linear`, so state dicts fit both."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from cute_ops.composite import layers
from cute_ops.errors import suggesting
from cute_ops.ops.gemm.by_call import Epilogue, check_options
from cute_ops_torch.composite.block import gated_mlp, linear_add_rmsnorm, mlp, qkv_rope, rmsnorm_linear
from cute_ops_torch.composite.linear import gated_linear, linear
from cute_ops_torch.composite.linear_cross_entropy import linear_cross_entropy
from cute_ops_torch.nn.layered import Layered

Tensor = torch.Tensor
Device = torch.device | str | None


class Linear(nn.Linear):
    """:func:`cute_ops_torch.linear` with learned parameters: ``(x, *operands) -> out``.

    Args:
        in_features: size of x's last dim.
        out_features: columns of the product.
        bias: learn a bias. It is the epilogue's first operand, None where it is not learned.
        device: where the parameters are.
        dtype: of the parameters.
        epilogue: the function's, which reads the bias, then what the module is called with.
        options: other options of the function, and attributes of the epilogue.
    """

    @suggesting
    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, *, epilogue: Epilogue = "bias", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype)
        check_options(epilogue, options, type(self))
        self.epilogue, self.options = epilogue, options

    @classmethod
    def from_linear(cls, layer: nn.Linear, **options: Any) -> Self:
        """A layer with the parameters of another one, which they share."""
        made = cls(layer.in_features, layer.out_features, _has_bias(layer), "meta", **options)
        made.weight, made.bias = layer.weight, layer.bias
        return made.train(layer.training)

    def forward(self, x: Tensor, *operands: Tensor | None) -> Any:
        return linear(x, self.weight, self.bias, *operands, epilogue=self.epilogue, **self.options)

    def extra_repr(self) -> str:
        options = {"epilogue": getattr(self.epilogue, "__name__", self.epilogue), **self.options}
        return ", ".join([super().extra_repr(), *(f"{name}={value}" for name, value in options.items())])


class LinearGELU(layers.GELU, Linear):
    """A linear layer and GELU. Arguments are those of :class:`torch.nn.Linear`, then these.

    Args:
        approximate: ``"none"`` for the error function, or ``"tanh"``, as :class:`torch.nn.GELU` has it.
        options: of :func:`cute_ops_torch.linear`.
    """


class LinearSiLU(layers.SiLU, Linear):
    """A linear layer and SiLU. Arguments are those of :class:`torch.nn.Linear`; options are the function's."""


class LinearAdd(layers.Add, Linear):
    """A linear layer whose output is added to a residual: ``(x, residual) -> out``. Arguments are those of
    :class:`torch.nn.Linear`; options are the function's.
    """


class RMSNormLinear(Layered, Linear):
    """:func:`cute_ops_torch.rmsnorm_linear` with learned parameters: those of :class:`torch.nn.Linear`, and
    ``norm_weight``, which starts at one: ``(x, *operands) -> out``.

    Args:
        in_features, out_features, bias, device, dtype, epilogue, options: as :class:`Linear` has them.
        eps: the function's.
    """

    norm_weight: nn.Parameter | None

    @suggesting
    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, *, eps: float = 1e-6, epilogue: Epilogue = "bias", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype, epilogue=epilogue, **options)
        self.options["eps"] = eps
        self._learn("norm_weight", in_features, device, dtype)

    @classmethod
    def from_layers(cls, norm: nn.RMSNorm, layer: nn.Linear, **options: Any) -> Self:
        """A layer with the parameters of a norm and of the layer that reads it, which they share.

        Raises:
            ValueError: the norm is not of the layer's rows.
        """
        _check_columns("RMSNormLinear", norm, layer.in_features)
        made = cls.from_linear(layer, **{"eps": _eps(norm, layer), **options})
        made.norm_weight = norm.weight
        return made

    def forward(self, x: Tensor, *operands: Tensor | None) -> Any:
        parameters = self.norm_weight, self.weight, self.bias
        return rmsnorm_linear(x, *parameters, *operands, epilogue=self.epilogue, **self.options)


class LinearAddRMSNorm(Layered, nn.Linear):
    """:func:`cute_ops_torch.linear_add_rmsnorm` with learned parameters, ``weight`` and ``norm_weight``, which starts
    at one: ``(x, residual) -> (out, residual_out)``.

    Args:
        in_features: size of x's last dim.
        out_features: columns of the product, and of the norm.
        device: where the parameters are.
        dtype: of the parameters.
        eps, fused: the function's.
    """

    norm_weight: nn.Parameter

    @suggesting
    def __init__(
        self, in_features: int, out_features: int, device: Device = None, dtype: torch.dtype | None = None, *,
        eps: float = 1e-6, fused: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, False, device, dtype)
        self._learn("norm_weight", out_features, device, dtype)
        self.eps, self.fused = eps, fused

    @classmethod
    def from_layers(cls, layer: nn.Linear, norm: nn.RMSNorm, **options: Any) -> Self:
        """A layer with the parameters of a layer without bias and of the norm behind it, which they share.

        Raises:
            ValueError: the norm has no weight or is not of the layer's outputs, or the layer has a bias.
        """
        _check_columns("LinearAddRMSNorm", norm, layer.out_features)
        if _has_bias(layer) or norm.weight is None:
            raise ValueError(f"LinearAddRMSNorm: layer is {layer} and norm is {norm}, expected no bias and a weight.")
        made = cls(layer.in_features, layer.out_features, "meta", **{"eps": _eps(norm, layer), **options})
        made.weight, made.norm_weight = layer.weight, norm.weight
        return made.train(layer.training)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return linear_add_rmsnorm(x, self.weight, residual, self.norm_weight, self.eps, fused=self.fused)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, eps={self.eps}"


class QKVRoPE(nn.Linear):
    """:func:`cute_ops_torch.qkv_rope` with a learned weight, whose rows are those of queries, of keys and of as many
    values: ``(x, cos, sin) -> out``.

    Args:
        in_features: size of x's last dim.
        query_heads: how many heads queries have.
        key_heads: how many heads keys have, and values.
        head_dim: columns of a head, 64 or 128.
        device: where the parameter is.
        dtype: of the parameter.
        fused: the function's.
    """

    @suggesting
    def __init__(
        self, in_features: int, query_heads: int, key_heads: int, head_dim: int = 128, device: Device = None,
        dtype: torch.dtype | None = None, *, fused: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__(in_features, (query_heads + 2 * key_heads) * head_dim, False, device, dtype)
        self.heads, self.fused = query_heads + key_heads, fused

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        return qkv_rope(x, self.weight, cos, sin, self.heads, fused=self.fused)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, heads={self.heads}"


class GatedLinear(nn.Linear):
    """:func:`cute_ops_torch.gated_linear` with a learned weight, ``[gate | up]``, of ``2 * out_features`` rows.

    Args:
        in_features: size of x's last dim.
        out_features: size of the output's last dim.
        activation: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        device: where the parameter is.
        dtype: of the parameter.
        fused: the function's.
        halves: the parameter is ``[2, out_features, in_features]``, which devices share by ``Shard(1)``. State dicts
            with either shape are loaded.
    """

    @suggesting
    def __init__(
        self, in_features: int, out_features: int, activation: str = "silu", device: Device = None,
        dtype: torch.dtype | None = None, *, fused: str = "auto", halves: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(in_features, 2 * out_features, False, device, dtype)
        self.activation, self.fused, self.halves = activation, fused, halves
        if halves:
            self.weight = nn.Parameter(self._shaped(self.weight.detach()))

    @classmethod
    def from_linear(cls, gate: nn.Linear, up: nn.Linear, **options: Any) -> Self:
        """The layer of two, whose weights are copied side by side.

        Raises:
            ValueError: they have biases, or differ in size.
        """
        weight = _packed(gate, up)
        made = cls(gate.in_features, gate.out_features, device="meta", **options)
        made.weight = nn.Parameter(made._shaped(weight), gate.weight.requires_grad)
        return made.train(gate.training)

    def reset_parameters(self) -> None:
        if self.weight.ndim == 2:
            super().reset_parameters()
        elif self.weight.numel():  # torch would count the terms of a sum otherwise
            nn.init.uniform_(self.weight, -(self.in_features**-0.5), self.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return gated_linear(x, self.weight, self.activation, self.fused, halves=self.halves)

    def _shaped(self, weight: Tensor) -> Tensor:
        """A weight as the parameter is, and other ones as they are."""
        if self.halves and weight.ndim == 2 and weight.shape[0] % 2 == 0:
            weight = weight.unflatten(0, (2, weight.shape[0] // 2))
        elif not self.halves and weight.ndim == 3:
            weight = weight.flatten(0, 1)
        return weight

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if isinstance(weight := state_dict.get(f"{prefix}weight"), Tensor):
            state_dict[f"{prefix}weight"] = self._shaped(weight)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features // 2}, activation={self.activation!r}"


class GatedMLP(nn.Module):
    """:func:`cute_ops_torch.gated_mlp` with learned weights, ``gate_up_proj.weight`` and ``down_proj.weight``.

    Args:
        in_features: size of x's last dim, and of the output's.
        hidden_features: size between.
        activation: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        device: where the parameters are.
        dtype: of the parameters.
        fused, save: the function's.
        halves: the first parameter is ``[2, hidden_features, in_features]``. Devices that share it and the other one by
            ``Shard(1)`` gather nothing, and their outputs are partial sums. State dicts with either shape are loaded.
    """

    @suggesting
    def __init__(
        self, in_features: int, hidden_features: int, activation: str = "silu", device: Device = None,
        dtype: torch.dtype | None = None, *, fused: str = "auto", save: str = "pre", halves: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gate_up_proj = GatedLinear(
            in_features, hidden_features, activation, device, dtype, fused=fused, halves=halves
        )  # fmt: skip
        self.down_proj = nn.Linear(hidden_features, in_features, False, device, dtype)
        self.activation, self.fused, self.save = activation, fused, save

    @classmethod
    def from_linear(cls, gate: nn.Linear, up: nn.Linear, down: nn.Linear, **options: Any) -> Self:
        """The MLP of three layers: the first two weights are copied side by side, the last one is shared.

        Raises:
            ValueError: layers have biases, or do not fit together.
        """
        first = GatedLinear.from_linear(gate, up, halves=options.get("halves", False))
        if _has_bias(down) or down.weight.shape != (gate.in_features, gate.out_features):
            raise ValueError(f"GatedMLP: down is {down}, expected {gate.out_features} columns and no bias.")
        made = cls(gate.in_features, gate.out_features, device="meta", **options)
        made.gate_up_proj.weight = first.weight
        made.down_proj.weight = down.weight
        return made.train(down.training)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate_up_proj.weight, self.down_proj.weight
        halves = self.gate_up_proj.halves
        return gated_mlp(x, *weights, self.activation, fused=self.fused, save=self.save, halves=halves)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class MLP(nn.Module):
    """:func:`cute_ops_torch.mlp` with learned parameters: those of ``up_proj`` and ``down_proj``.

    Args:
        in_features: size of x's last dim, and of the output's.
        hidden_features: size between.
        activation: the function's.
        device: where the parameters are.
        dtype: of the parameters.
        bias: learn biases of both layers.
        fused, save: the function's.
    """

    @suggesting
    def __init__(
        self, in_features: int, hidden_features: int, activation: str = "gelu", device: Device = None,
        dtype: torch.dtype | None = None, *, bias: bool = True, fused: str = "auto", save: str = "pre",
    ) -> None:  # fmt: skip
        super().__init__()
        self.up_proj = nn.Linear(in_features, hidden_features, bias, device, dtype)
        self.down_proj = nn.Linear(hidden_features, in_features, bias, device, dtype)
        self.activation, self.fused, self.save = activation, fused, save

    @classmethod
    def from_linear(cls, up: nn.Linear, down: nn.Linear, **options: Any) -> Self:
        """The MLP of two layers, whose parameters it shares; either may have no bias.

        Raises:
            ValueError: the second layer does not read what the first one returns.
        """
        if down.in_features != up.out_features:
            raise ValueError(f"MLP: down is {down}, expected {up.out_features} columns.")
        made = cls(up.in_features, up.out_features, device="meta", **options)
        for ours, theirs in ((made.up_proj, up), (made.down_proj, down)):
            ours.in_features, ours.out_features = theirs.in_features, theirs.out_features
            ours.weight, ours.bias = theirs.weight, theirs.bias
        return made.train(down.training)

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.up_proj, self.down_proj
        parameters = up.weight, up.bias, down.weight, down.bias
        return mlp(x, *parameters, self.activation, fused=self.fused, save=self.save)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class LinearCrossEntropy(nn.Module):
    """:func:`cute_ops_torch.linear_cross_entropy` with a learned weight: ``(hidden, target) -> loss``.

    By position it takes what :class:`torch.nn.LinearCrossEntropyLoss` does.

    Args:
        n: size of the hidden states' last dim.
        classes: number of classes.
        bias: learn a bias.
        ignore_index, label_smoothing, z_loss, reduction, softcap, logit_scale: the function's.
        device: where the parameters are.
        dtype: of the parameters, and of the hidden states.
    """

    @suggesting
    def __init__(
        self, n: int, classes: int, *, bias: bool = False, ignore_index: int = -100, label_smoothing: float = 0.0,
        z_loss: float = 0.0, reduction: str = "mean", softcap: float = 0.0, logit_scale: float = 1.0,
        device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.n, self.classes = n, classes
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss, "reduction": reduction,
            "softcap": softcap, "logit_scale": logit_scale,
        }  # fmt: skip
        self.weight = nn.Parameter(torch.empty(classes, n, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(classes, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as :class:`torch.nn.Linear` does."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.n**-0.5), self.n**-0.5)

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.n}, {self.classes}, bias={self.bias is not None}, {options}"

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, self.weight, target, self.bias, **self.options)


def _has_bias(layer: nn.Linear) -> bool:
    return any(name == "bias" for name, _ in layer.named_parameters(recurse=False))


def _check_columns(name: str, norm: nn.RMSNorm, columns: int) -> None:
    if tuple(norm.normalized_shape) != (columns,):
        raise ValueError(f"{name}: norm is {norm}, expected one of {columns} columns.")


def _eps(norm: nn.RMSNorm, layer: nn.Linear) -> float:
    return torch.finfo(layer.weight.dtype).eps if norm.eps is None else norm.eps


def _packed(gate: nn.Linear, up: nn.Linear) -> Tensor:
    if _has_bias(gate) or _has_bias(up) or gate.weight.shape != up.weight.shape:
        raise ValueError(f"gate is {gate} and up is {up}, expected two of one size without biases.")
    return torch.cat([gate.weight.detach(), up.weight.detach()])
