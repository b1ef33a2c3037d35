"""Gated MLPs, ``down(act(gate(x)) * up(x))``, and GELU by itself."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from cute_ops_torch import functions
from cute_ops_torch.huggingface import autograd_nodes
from cute_ops_torch.huggingface.bypass import can_bypass_linear
from cute_ops_torch.huggingface.match import Forward, Replacement, by_source, runs
from cute_ops_torch.huggingface.source import source_digest

# `forward` of LlamaMLP, with any activation.
_GATED = "abc78a408730aea7"
# `forward` of a module that calls its attribute `act`.
_CALLS_ACT = "4587a7e0c8fdf068"


class LlamaMLP(nn.Module):
    """The layers of Hugging Face's class of this name."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear
    act_fn: nn.Module


def _silu_mlp(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() and _is_bypassed(self, x):
        return autograd_nodes.silu_mlp(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
    out: torch.Tensor = self.down_proj(functions.silu_mul(self.gate_proj(x), self.up_proj(x)))
    return out


def drops_product(mlp: nn.Module, x: torch.Tensor) -> bool:
    """Whether a module is a gated MLP that does not keep ``act(gate) * up`` for its backward."""
    return runs(mlp, _silu_mlp) and _is_bypassed(mlp, x)  # type: ignore[arg-type]


def _is_bypassed(mlp: LlamaMLP, x: torch.Tensor) -> bool:
    return can_bypass_linear(x, mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def _is_silu(mlp: LlamaMLP) -> bool:
    return type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")


def _gelu_replacements(approximate: str) -> tuple[Replacement, Replacement]:
    """The gated MLP and the activation, for GELU in one approximation."""

    def gelu_mlp(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functions.gelu_mul(self.gate_proj(x), self.up_proj(x), approximate))
        return out

    def gelu(self: nn.Module, input: torch.Tensor) -> torch.Tensor:
        return functions.gelu(input, approximate)

    def is_gelu(activation: nn.Module, model: nn.Module | None = None) -> bool:
        return _is_gelu(activation, approximate)

    gated = by_source("gelu_mul", _GATED, gelu_mlp, also=lambda mlp: is_gelu(mlp.act_fn), unused="act_fn")
    return gated, Replacement("gelu", is_gelu, lambda original: gelu)


def _is_gelu(activation: nn.Module, approximate: str) -> bool:
    """Whether a module is torch's or Hugging Face's GELU in this approximation."""
    if type(activation) is nn.GELU:
        return activation.approximate == approximate
    act: Forward | None = getattr(activation, "act", None)
    if source_digest(type(activation).forward) != _CALLS_ACT:
        return False
    if isinstance(act, partial):
        return act.func is nn.functional.gelu and not act.args and act.keywords == {"approximate": approximate}
    return act is nn.functional.gelu and approximate == "none"


REPLACEMENTS = (
    by_source("silu_mul", _GATED, _silu_mlp, also=_is_silu, unused="act_fn", packed=("gate_proj", "up_proj")),
    *_gelu_replacements("tanh"),
    *_gelu_replacements("none"),
)
