"""T5's gated MLP, which drops elements between its gate and its last layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cute_ops_torch import functions
from cute_ops_torch.huggingface.bypass import takes
from cute_ops_torch.huggingface.match import by_source
from cute_ops_torch.huggingface.plain_mlp import activation_of, learn

Tensor = torch.Tensor
# `forward` of T5DenseGatedActDense.
_GATED = "2d597609614f0f48"
_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


class T5DenseGatedActDense(nn.Module):
    """The layers of Hugging Face's class of this name."""

    wi_0: nn.Linear
    wi_1: nn.Linear
    wo: nn.Linear
    dropout: nn.Dropout
    act: nn.Module


def _gated(self: T5DenseGatedActDense, hidden_states: Tensor) -> Any:
    approximate = _APPROXIMATE.get(activation_of(self.act) or "")
    if approximate is None:
        return NotImplemented
    gate = self.wi_0(hidden_states)
    if _APPROXIMATE.get(activation_of(self.act) or "") != approximate:  # a hook of the layer has changed it
        hidden_states = self.act(gate) * self.wi_1(hidden_states)
    else:
        up = self.wi_1(hidden_states)
        alike = (gate.dtype, gate.shape) == (up.dtype, up.shape) and takes(gate, up)
        hidden_states = functions.gelu_mul(gate, up, approximate) if alike else self.act(gate) * up
    hidden_states = self.dropout(hidden_states)
    weight = self.wo.weight
    if isinstance(weight, Tensor) and hidden_states.dtype != weight.dtype and weight.dtype != torch.int8:
        hidden_states = hidden_states.to(weight.dtype)
    return self.wo(hidden_states)


def _is_gelu(module: Any) -> bool:
    return learn(module.act) in _APPROXIMATE


REPLACEMENTS = (by_source("gelu_mul", _GATED, _gated, also=_is_gelu, unused="act"),)
