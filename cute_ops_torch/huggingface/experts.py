"""Experts of a mixture whose products the framework groups: our ops sort their tokens and sum what the experts made.

Hugging Face's ``grouped_mm`` sorts tokens by expert, gathers their rows, multiplies each by its weight, gathers the
products in the order of tokens and sums them: a pass of its own each, and backwards the gathers become sums over
duplicate indices. Ours places each row once and sums a token's rows in one pass, weights included. Products, biases and
a family's own gates stay as Hugging Face runs them.
"""

from __future__ import annotations

import sys
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from cute_ops_torch import functions
from cute_ops_torch.composite.embedding import embedding
from cute_ops_torch.huggingface.bypass import declined, is_eager, takes
from cute_ops_torch.huggingface.match import Forward, Replacement, innermost
from cute_ops_torch.huggingface.plain_mlp import activation_of, learn

Tensor = torch.Tensor
# The module of the decorator that gives experts another ``forward`` by the name of an implementation, and the name.
_HOME, _GROUPED = "transformers.integrations.moe", "grouped_mm"
_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def _run(home: Any, experts: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The outputs of experts for tokens ``x``, each for the experts that ``index`` names, times ``weights``.

    Args:
        home: Hugging Face's module of such functions.
    """
    rows, place, ends = functions.permute_tokens(x, index, experts.num_experts)
    has_gate = getattr(experts, "has_gate", True)
    ids = _experts_of_rows(ends, len(rows)) if experts.has_bias else None

    def multiply(rows: Tensor, name: str) -> Tensor:
        bias = None if ids is None else _of_rows(getattr(experts, f"{name}_bias"), ids)
        out: Tensor = home._grouped_linear(
            input=rows, weight=getattr(experts, name), bias=bias, offs=ends, is_transposed=experts.is_transposed
        )
        return out

    rows = multiply(rows, "gate_up_proj" if has_gate else "up_proj")
    rows = _gated(home, experts, rows) if has_gate else experts.act_fn(rows)
    rows = multiply(rows, "down_proj")
    if getattr(experts, "has_post_expert_norm", False):
        rows = experts.post_expert_norm(rows)
    return functions.unpermute_tokens(rows, place, weights).to(x.dtype)


def _experts_of_rows(ends: Tensor, count: int) -> Tensor:
    """The expert of each row, by the rows before which experts end."""
    rows = torch.arange(count, dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends, rows, right=True).clamp(max=len(ends) - 1)


def _of_rows(table: Tensor, ids: Tensor) -> Tensor:
    """A row of a table for each row. Its gradient is ours but in a compiled graph, which fuses its own: that of torch's
    kernel takes rows of one place one after another.
    """
    return embedding(ids, table) if is_eager(ids) and takes(table) and torch.is_grad_enabled() else table[ids]


def _gated(home: Any, experts: Any, rows: Tensor) -> Tensor:
    """The gate of experts: in one pass where it is the usual one, with an activation of ours."""
    if getattr(type(experts), "_apply_gate", None) is home._default_apply_gate and takes(rows):
        act = activation_of(experts.act_fn)
        if act == "silu":
            return functions.swiglu(rows)
        if act in _APPROXIMATE:
            return functions.geglu(rows, _APPROXIMATE[act])
    gated: Tensor = experts._apply_gate(rows)
    return gated


def _grouped(original: Any) -> Forward:
    """The ``forward`` of experts where the framework's grouped products are asked for."""
    home: Any = sys.modules[_HOME]
    function = home.ALL_EXPERTS_FUNCTIONS[_GROUPED]

    def experts(self: Any, *args: Any, **kwargs: Any) -> Any:
        grouped = self.config._experts_implementation == _GROUPED and not getattr(self, "_is_expert_parallel", False)
        if grouped and home.ALL_EXPERTS_FUNCTIONS[_GROUPED] is function:
            return run(self, *args, **kwargs)
        return NotImplemented

    def run(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        if hidden_states.ndim != 2 or top_k_index.ndim != 2 or top_k_index.shape != top_k_weights.shape:
            return NotImplemented
        if not takes(hidden_states, top_k_weights):
            return declined(self, hidden_states, top_k_weights)
        return _run(home, self, hidden_states, top_k_index, top_k_weights)

    return experts


def _are_experts(module: Any, model: nn.Module) -> bool:
    """Whether the decorator of a module's ``forward`` chooses among implementations, of which one is known."""
    forward, home = type(module).forward, sys.modules.get(_HOME)
    if home is None or getattr(forward, "__globals__", None) is not vars(home):
        return False
    named = all(hasattr(module, name) for name in ("config", "num_experts", "has_bias", "is_transposed"))
    one = innermost(forward) is getattr(forward, "__wrapped__", None)
    if not (named and one and _is_ours(home, home.ALL_EXPERTS_FUNCTIONS[_GROUPED], home._grouped_linear)):
        return False
    if isinstance(act := getattr(module, "act_fn", None), nn.Module):
        learn(act)
    return True


@cache
def _is_ours(home: Any, function: Any, multiply: Any) -> bool:
    """Whether a function of experts, tokens, their experts and weights is what ours is, gradients included."""
    draw = torch.Generator().manual_seed(11)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).requires_grad_()

    tokens, count, k, n, hidden = 12, 4, 2, 16, 8
    x, weights, up, up_bias = random(tokens, n), random(tokens, k), random(count, 2 * hidden, n), random(count, n)
    down, down_bias = random(count, n, hidden), random(count, n)
    index = torch.rand(tokens, count, generator=draw).topk(k).indices
    experts = SimpleNamespace(
        num_experts=count, gate_up_proj=up, gate_up_proj_bias=up_bias, down_proj=down, down_proj_bias=down_bias,
        has_bias=True, has_gate=True, is_transposed=False, has_post_expert_norm=False, _is_expert_parallel=False,
        _apply_gate=lambda rows: rows[:, :hidden].tanh() * rows[:, hidden:],
    )  # fmt: skip
    leaves = [x, weights, up, up_bias, down, down_bias]
    try:
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            wanted, found = function(experts, x, index, weights), _run(home, experts, x, index, weights)
            slopes = [torch.autograd.grad(out, leaves, torch.ones_like(x)) for out in (wanted, found)]
    except Exception:  # it takes other arguments
        return False
    pairs = [(wanted, found), *zip(*slopes, strict=True)]
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


REPLACEMENTS = (Replacement("permute_tokens", _are_experts, _grouped, whole=True),)
