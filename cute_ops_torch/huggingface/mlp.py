"""Gated MLPs, ``down(act(gate(x)) * up(x))``, and GELU by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from cute_ops_torch import functions
from cute_ops_torch.huggingface import autograd_nodes, products
from cute_ops_torch.huggingface.bypass import calls, can_bypass_linear, declined, only_multiplies, runs, takes
from cute_ops_torch.huggingface.match import Forward, Replacement, by_source
from cute_ops_torch.huggingface.source import source_digest

# `forward` of LlamaMLP, with any activation.
_GATED_MLP = "abc78a408730aea7"
# By the source of their `forward`: Hugging Face's SiLU, and a module that calls its attribute `act`.
_DIGESTS = {"2bdc4d94c9296936": "silu", "4587a7e0c8fdf068": "act"}
# The kind of each known activation's `forward`. Hugging Face's are added when a model has them.
_KINDS: dict[Forward, str] = {nn.SiLU.forward: "silu", nn.GELU.forward: "approximate"}


class LlamaMLP(nn.Module):
    """The layers of Hugging Face's class of this name."""

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear
    act_fn: nn.Module


def _silu_mlp(self: LlamaMLP, x: torch.Tensor) -> Any:
    if _computes(self.act_fn) != "silu":
        return NotImplemented
    if torch.is_grad_enabled() and _is_bypassed(self, x):
        run = products.gated_mlp if torch.compiler.is_compiling() else autograd_nodes.silu_mlp
        return run(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
    return _gated(self, x, "silu", functions.silu_mul)


def _gated(mlp: LlamaMLP, x: torch.Tensor, act: str, multiply: Forward) -> Any:
    """A gated MLP whose layers are called; ``multiply`` computes ``act(gate) * up``."""
    gate = mlp.gate_proj(x)
    if _computes(mlp.act_fn) != act:  # a hook of the layer has changed it
        return mlp.down_proj(mlp.act_fn(gate) * mlp.up_proj(x))
    up = mlp.up_proj(x)
    alike = (gate.dtype, gate.shape) == (up.dtype, up.shape) and takes(gate, up)
    return mlp.down_proj(multiply(gate, up) if alike else mlp.act_fn(gate) * up)


def drops_product(mlp: nn.Module, x: torch.Tensor) -> bool:
    """Whether a module is a gated MLP that does not keep ``act(gate) * up`` for its backward, and nothing looks on."""
    return _is_silu_mlp(mlp) and _is_bypassed(mlp, x)  # type: ignore[arg-type]


def drops_product_in_graph(mlp: Any, dtype: torch.dtype) -> bool:
    """Whether :func:`drops_product` holds in a graph that a compiler makes, for inputs of this dtype."""
    return _is_silu_mlp(mlp) and all(only_multiplies(each, dtype) for each in _layers(mlp))


def _is_silu_mlp(mlp: nn.Module) -> bool:
    """Whether a module is a gated MLP with SiLU whose ``forward`` is ours."""
    return runs(mlp, _silu_mlp) and _computes(mlp.act_fn) == "silu"  # type: ignore[arg-type]


def _is_bypassed(mlp: LlamaMLP, x: torch.Tensor) -> bool:
    return can_bypass_linear(x, *_layers(mlp))


def _layers(mlp: LlamaMLP) -> tuple[nn.Module, ...]:
    return mlp.gate_proj, mlp.up_proj, mlp.down_proj


def _gelu_mlp(self: LlamaMLP, x: torch.Tensor) -> Any:
    approximate = _computes(self.act_fn)
    if approximate not in ("tanh", "none"):
        return NotImplemented
    return _gated(self, x, approximate, lambda gate, up: functions.gelu_mul(gate, up, approximate))


def _gelu(self: nn.Module, input: torch.Tensor) -> Any:
    approximate = approximation(self)
    if approximate is None:
        return NotImplemented
    return functions.gelu(input, approximate) if input.ndim and takes(input) else declined(self, input)


def _computes(activation: nn.Module) -> str | None:
    """The function that calling an activation computes: SiLU, or GELU in this approximation; None: anything else."""
    forward: Any = getattr(type(activation), "forward", None)
    kind = _KINDS.get(forward)
    if kind is None or not calls(activation, forward):
        return None
    return "silu" if kind == "silu" else approximation(activation)


def approximation(activation: Any) -> str | None:
    """The approximation of torch's or Hugging Face's GELU; None where it is another function by now."""
    if isinstance(activation, nn.GELU):
        return activation.approximate
    act: Forward = activation.act
    if isinstance(act, partial):
        known = act.func is nn.functional.gelu and not act.args and list(act.keywords) == ["approximate"]
        return act.keywords["approximate"] if known else None
    return "none" if act is nn.functional.gelu else None


def _learn(activation: Any) -> str | None:
    """Add an activation's ``forward`` to the known ones; returns its kind, None if no function of ours computes it."""
    forward: Any = getattr(type(activation), "forward", None)
    kind = _DIGESTS.get(source_digest(forward) or "")
    if kind is not None:
        _KINDS.setdefault(forward, kind)
    return _computes(activation)


def _is_silu(mlp: LlamaMLP) -> bool:
    return _learn(mlp.act_fn) == "silu"


def _is_gelu_gated(mlp: LlamaMLP) -> bool:
    return _learn(mlp.act_fn) in ("tanh", "none")


def _is_gelu(module: nn.Module, model: nn.Module) -> bool:
    return _learn(module) in ("tanh", "none")


REPLACEMENTS = (
    by_source("silu_mul", _GATED_MLP, _silu_mlp, also=_is_silu, unused="act_fn", packed=("gate_proj", "up_proj")),
    by_source("gelu_mul", _GATED_MLP, _gelu_mlp, also=_is_gelu_gated, unused="act_fn"),
    Replacement("gelu", _is_gelu, lambda original: _gelu),
)
