"""Decoders: masks made without a search for packed sequences, and layers that know which norm reads their output."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn

from cute_ops_torch.huggingface import residual_norm
from cute_ops_torch.huggingface.bypass import runs
from cute_ops_torch.huggingface.layer import run_layer
from cute_ops_torch.huggingface.match import Forward, Replacement, innermost, rebind
from cute_ops_torch.huggingface.source import Parameters, definition, find, unify
from cute_ops_torch.library.modes import transforms_active

_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")
# How a model counts positions that are not given. They are consecutive where it gets no cache and no mask, either.
_COUNTS = (
    """
    seen = cache.get_seq_length() if cache is not None else 0
    positions = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen
    """,
    """
    seen = cache.get_seq_length() if cache is not None else 0
    positions = torch.arange(seen, seen + inputs_embeds.shape[1], device=inputs_embeds.device)
    """,
    """
    seen = cache.get_seq_length() if cache is not None else 0
    if positions is None:
        positions = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen
        positions = positions.unsqueeze(0).repeat(inputs_embeds.shape[0], 1)
    """,
)
_ARGUMENTS = ("attention_mask", "position_ids")


def _make_forward(plain: Any) -> Forward:
    """A ``forward`` whose masks ignore positions that the model has counted: a search in them waits for the GPU."""
    scope = plain.__globals__
    masks = {name: _without_positions(scope[name]) for name in _MASKS if name in scope}
    counting, names = rebind(plain, **masks), Parameters.of(plain).names
    chains, arguments = _chains_layers(plain), _position_arguments(plain)

    @wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        run = counting if all(given.get(name) is None for name in arguments) else plain
        if not chains or torch.compiler.is_compiling():
            return run(self, *args, **kwargs)
        with residual_norm.next_norms(_next_norms(self)):
            return run(self, *args, **kwargs)

    return forward


def _without_positions(mask: Forward) -> Forward:
    return lambda *args, position_ids=None, **kwargs: _masked(mask, args, kwargs)


def _masked(mask: Forward, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return mask(*args, **kwargs)


def _next_norms(model: Any) -> dict[int, residual_norm.LlamaRMSNorm]:
    """By id of each layer that nothing observes: the norm that reads its output, the next layer's or the model's."""
    if not torch.is_grad_enabled() or transforms_active():
        return {}
    layers = list(model.layers)[: model.config.num_hidden_layers]
    plain = [
        runs(layer, run_layer)
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
        if isinstance(loop, ast.For) and "self.layers[" in ast.unparse(loop.iter):
            return _chains(loop, after)
    return False


def _chains(loop: ast.For, after: ast.stmt) -> bool:
    step, norm = loop.body[0], unify("hidden = self.norm(hidden)", [after])
    if norm is None or len(loop.body) > 1 or loop.orelse:
        return False
    if not isinstance(step, ast.Assign) or not isinstance(step.value, ast.Call):
        return False
    call = ast.Call(step.value.func, step.value.args[:1], [])
    names = unify("hidden = layer(hidden)", [ast.Assign(step.targets, call, lineno=0)])
    each = {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}
    return names is not None and names["hidden"] == norm["hidden"] and names["layer"] in each


def _position_arguments(forward: Any) -> tuple[str, ...]:
    """Names of the arguments of a ``forward`` without which it counts positions; none where it does not."""
    tree = definition(forward)
    names = next((found for each in _COUNTS if tree and (found := find(each, tree))), None)
    needed = (*_ARGUMENTS, names["cache"], names["positions"]) if names else ()
    return tuple(dict.fromkeys(needed)) if {*needed} <= {*inspect.signature(forward).parameters} else ()


def _counts_positions(module: nn.Module, model: nn.Module) -> bool:
    """Whether a ``forward`` counts positions where none are given, and makes its masks of them."""
    forward = innermost(type(module).forward)
    masks = [forward.__globals__[name] for name in _MASKS if name in forward.__code__.co_names] if forward else []
    return (
        bool(masks)
        and bool(_position_arguments(forward))
        and all(inspect.signature(mask).parameters["position_ids"].default is None for mask in masks)
    )


REPLACEMENTS = (Replacement("attention_mask", _counts_positions, _make_forward),)
