"""Decoders: masks made without a search for packed sequences, and layers that know which norm reads their output."""

from __future__ import annotations

import ast
import inspect
import itertools
import types
from functools import wraps
from typing import Any

import torch
from torch import nn

from cute_ops_torch.huggingface import residual_norm
from cute_ops_torch.huggingface.bypass import is_unobserved
from cute_ops_torch.huggingface.layer import layer_forward
from cute_ops_torch.huggingface.match import Forward, Replacement, can_rebind, definition, rebind
from cute_ops_torch.library.modes import transforms_active

_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")
# Without these arguments positions are consecutive: the model counts them by the statement below.
_POSITION_ARGUMENTS = ("attention_mask", "position_ids", "past_key_values")
_COUNTS = "position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens"


def _make_forward(original: type[nn.Module]) -> Forward:
    """A ``forward`` whose masks ignore positions that the model has counted: a search in them waits for the GPU."""
    plain = original.forward
    scope = inspect.unwrap(plain).__globals__
    masks = {name: _without_positions(scope[name]) for name in _MASKS if name in scope}
    counting, names = rebind(plain, **masks), list(inspect.signature(plain).parameters)[1:]
    chains = _chains_layers(plain)

    @wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        run = counting if all(given.get(name) is None for name in _POSITION_ARGUMENTS) else plain
        if not chains or torch.compiler.is_compiling():
            return run(self, *args, **kwargs)
        with residual_norm.next_norms(_next_norms(self)):
            return run(self, *args, **kwargs)

    return forward


def _without_positions(mask: Forward) -> Forward:
    return lambda *args, position_ids=None, **kwargs: mask(*args, **kwargs)


def _next_norms(model: Any) -> dict[int, residual_norm.LlamaRMSNorm]:
    """By id of each layer that nothing observes: the norm that reads its output, the next layer's or the model's."""
    if not torch.is_grad_enabled() or transforms_active():
        return {}
    layers = list(model.layers)[: model.config.num_hidden_layers]
    plain = [
        inspect.unwrap(type(layer).forward) is layer_forward  # checkpointing wraps it
        and is_unobserved(layer)
        and not getattr(layer, "gradient_checkpointing", False)  # its second forward runs without its neighbours
        for layer in layers
    ]
    norms = [layer.input_layernorm if p else None for layer, p in zip(layers, plain, strict=True)]
    each = zip(layers, plain, [*norms[1:], model.norm], strict=True)
    return {id(layer): norm for layer, p, norm in each if p and norm is not None}


def _chains_layers(forward: Any) -> bool:
    """Whether a model's ``forward`` passes each layer's output to the next layer and the last one's to a norm only."""
    tree = definition(forward)
    for loop, after in itertools.pairwise(tree.body if tree else []):
        if isinstance(loop, ast.For) and "self.layers[" in ast.unparse(loop.iter) and len(loop.body) == 1:
            step = ast.unparse(loop.body[0]).replace("\n", "")
            chained = step.startswith("hidden_states = decoder_layer(hidden_states,") and not loop.orelse
            return chained and ast.unparse(after) == "hidden_states = self.norm(hidden_states)"
    return False


def _counts_positions(module: nn.Module, model: nn.Module) -> bool:
    """Whether a ``forward`` counts positions where none are given, and makes its masks of them."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, types.FunctionType) or not set(_MASKS) & set(forward.__code__.co_names):
        return False
    tree = definition(forward)
    masks = [forward.__globals__[name] for name in _MASKS if name in forward.__code__.co_names]
    return (
        tree is not None
        and can_rebind(type(module).forward)
        and _COUNTS in map(ast.unparse, ast.walk(tree))
        and set(_POSITION_ARGUMENTS) <= set(inspect.signature(forward).parameters)
        and all(inspect.signature(mask).parameters["position_ids"].default is None for mask in masks)
    )


REPLACEMENTS = (Replacement("attention_mask", _counts_positions, _make_forward),)
