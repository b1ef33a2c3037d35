"""The auxiliary loss of mixtures of experts, which balances their load, by our op.

A language model calls ``load_balancing_loss_func`` of its module with the router logits of all layers. Families write
it in several ways: what it computes is compared with our op on random logits, with padding and without.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from cute_ops.ops.routing.balance import expert_balance
from cute_ops_torch.composite.constant import functions
from cute_ops_torch.huggingface.bypass import takes
from cute_ops_torch.huggingface.match import Forward, Replacement, innermost, rebind

Tensor = torch.Tensor
NAME = "load_balancing_loss_func"


def balance(gate_logits: tuple[Tensor, ...], top_k: int, attention_mask: Tensor | None) -> Tensor:
    """The loss of the logits of all layers, ``[tokens, experts]`` each, without tokens that are masked."""
    weights = None
    if attention_mask is not None:
        weights = attention_mask.reshape(-1).float().repeat(len(gate_logits))
    found = _balance()(torch.cat([each.to(gate_logits[0].device) for each in gate_logits]), weights, top_k)
    # The op that torch.compile calls returns its saved outputs, too.
    loss: Tensor = found[0] if isinstance(found, tuple) else found
    return loss


_balance = functions(lambda: expert_balance)


@cache
def is_balance(function: Any) -> bool:
    """Whether a function of router logits, experts, experts of a token and a mask is our loss, gradients included."""
    draw = torch.Generator().manual_seed(7)
    for mask in (None, torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])):
        layers = [torch.randn(10, 6, generator=draw).requires_grad_() for _ in range(2)]
        try:
            with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                wanted = function(tuple(layers), 6, 2, mask)
                found = balance(tuple(layers), 2, mask)
                slopes = [torch.autograd.grad(loss, layers) for loss in (wanted, found)]
        except Exception:  # it takes other arguments
            return False
        pairs = [(wanted, found), *zip(*slopes, strict=True)]
        if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs):
            return False
    return True


def _make_forward(forward: Any) -> Forward:
    plain = forward.__globals__[NAME]

    def load_balancing_loss_func(
        gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Tensor | None = None
    ) -> Any:
        known = isinstance(gate_logits, tuple) and gate_logits and all(map(_is_layer, gate_logits))
        if not known or gate_logits[0].shape[-1] != num_experts:
            return plain(gate_logits, num_experts, top_k, attention_mask)
        if attention_mask is not None and attention_mask.numel() != gate_logits[0].shape[0]:
            return plain(gate_logits, num_experts, top_k, attention_mask)
        return balance(gate_logits, top_k, attention_mask)

    vars(load_balancing_loss_func)["__wrapped__"] = plain
    return rebind(forward, **{NAME: load_balancing_loss_func})


def _is_layer(logits: Any) -> bool:
    return isinstance(logits, Tensor) and logits.ndim == 2 and takes(logits)


def _calls_it(module: nn.Module, model: nn.Module) -> bool:
    forward = innermost(type(module).forward)
    if forward is None or NAME not in forward.__code__.co_names:
        return False
    function = forward.__globals__.get(NAME)
    return function is not None and is_balance(function)


BALANCE = Replacement("expert_balance", _calls_it, _make_forward)
