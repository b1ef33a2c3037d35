"""Linear layers that read the same input, biases included: queries, keys and values of BERT, ViT, Whisper, Qwen 2, T5.

In the gradient they are one layer: each product adds to the input's gradient where autograd would add whole tensors,
and biases are summed up by our op. Which layers those are follows from the names in a ``forward``; a layer that gets
another tensor than its name has promised runs by itself.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import nn

from cute_ops.ops.gemm.sums import column_sum
from cute_ops_torch.composite.constant import overloads
from cute_ops_torch.huggingface import products
from cute_ops_torch.huggingface.attention import Bypassed, unwrapped
from cute_ops_torch.huggingface.bypass import is_exporting, is_plain, is_plain_linear, parameter, takes
from cute_ops_torch.huggingface.match import Forward, Replacement, innermost
from cute_ops_torch.huggingface.source import Parameters, definition
from cute_ops_torch.library.no_gradient import once
from cute_ops_torch.library.tensors import row_major

Tensor = torch.Tensor


def _make_forward(original: Any) -> Forward:
    read, names = _read(original), Parameters.of(original).names

    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(self, *args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        parts: dict[str, Any] = {}
        for x, layers in _groups(read, given):
            taken = [name for name in layers if _fits(getattr(self, name, None), x)]
            if len(taken) > 1:
                parts.update(_Together(x, {name: getattr(self, name) for name in taken}).calls())
        return original(Bypassed(self, parts) if parts else self, *args, **kwargs)

    return forward


def _groups(read: Mapping[str, Sequence[str]], given: Mapping[str, Any]) -> list[tuple[Tensor, list[str]]]:
    """Tensors among a call's arguments, and the layers that read each of them."""
    found: list[tuple[Tensor, list[str]]] = []
    for layer, arguments in read.items():
        x = next((given[name] for name in arguments if given.get(name) is not None), None)
        if type(x) is not Tensor or not is_plain(x) or torch.is_autocast_enabled(x.device.type):
            continue
        layers = next((layers for known, layers in found if known is x), None)
        if layers is None:
            found.append((x, [layer]))
        else:
            layers.append(layer)
    return found


def _fits(layer: Any, x: Tensor) -> bool:
    """Whether a layer multiplies ``x`` by its weight, adds its bias, and does nothing else."""
    if layer is None or not is_plain_linear(layer):
        return False
    weight, bias = parameter(layer, "weight"), layer._parameters["bias"]
    own = [weight] if bias is None else [weight, parameter(layer, "bias")]
    return all(t is not None and t.dtype == x.dtype for t in own) and x.ndim > 1 and takes(x, *own)


class _Together:
    """Layers of one input, all computed when the first of them is called."""

    def __init__(self, x: Tensor, layers: Mapping[str, Any]) -> None:
        self._x, self._layers = x, layers
        self._outputs: dict[str, Tensor] = {}

    def calls(self) -> dict[str, Callable[[Tensor], Tensor]]:
        return {name: self._call(name) for name in self._layers}

    def _call(self, name: str) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            if x is not self._x:
                return self._layers[name](x)  # type: ignore[no-any-return]
            if not self._outputs:
                layers = self._layers.values()
                made = projections(x, [each.weight for each in layers], [each.bias for each in layers])
                self._outputs = dict(zip(self._layers, made, strict=True))
            return self._outputs[name]

        return call


def projections(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """``x @ w.T + b`` for each weight and bias."""
    trained = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *weights, *biases))
    if is_exporting() or not trained:  # without a gradient Dynamo gives a Function's forward no context
        return tuple(nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True))
    return _Projections.apply(x, *weights, *biases)  # type: ignore[no-untyped-call, no-any-return]


class _Projections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        half = len(parameters) // 2
        weights, biases = parameters[:half], parameters[half:]
        # The gradient of a weight needs x.
        ctx.save_for_backward(x if any(ctx.needs_input_grad[1 : 1 + half]) else None, *parameters)
        ctx.shape = x.shape
        ctx.set_materialize_grads(False)
        return tuple(nn.functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    @once("layers of one input")
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        half = len(parameters) // 2
        rows = None if x is None else x.reshape(-1, x.shape[-1])
        needs_dx, *needs = ctx.needs_input_grad
        given: list[tuple[Tensor, Tensor]] = []
        dweights: list[Tensor | None] = [None] * half
        dbiases: list[Tensor | None] = [None] * half
        for i, dout in enumerate(douts):
            if dout is None:
                continue
            dout, weight = dout.reshape(-1, dout.shape[-1]), parameters[i]
            given.append((dout, weight))
            if needs[i] and rows is not None:
                dweights[i] = products.weight_gradient(dout, rows)
            if needs[half + i]:  # that of one sequence's keys may lie by columns
                dbiases[i] = _sum_of_rows()(row_major(dout), parameters[half + i])
        dx = products.input_gradients(*zip(*given, strict=True)).view(ctx.shape) if needs_dx and given else None
        return dx, *dweights, *dbiases


_sum_of_rows = overloads(column_sum)


@cache
def _read(forward: Any) -> dict[str, tuple[str, ...]]:
    """By modules that a ``forward`` calls once: the arguments that they may read, of which the first that is given
    counts.
    """
    tree = definition(forward)
    if tree is None:
        return {}
    names = _sources(tree, Parameters.of(forward).names)
    me = forward.__code__.co_varnames[0]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func).startswith(f"{me}.")]
    called = [ast.unparse(call.func).removeprefix(f"{me}.") for call in calls]
    alone = [(name, call) for name, call in zip(called, calls, strict=True) if called.count(name) == 1]
    found = {name: _named(call) for name, call in alone}
    return {name: names[read] for name, read in found.items() if names.get(read)}


def _named(call: ast.Call) -> str:
    """The only argument of a call, if that is a name."""
    first = call.args[0] if len(call.args) == 1 and not call.keywords else None
    return first.id if isinstance(first, ast.Name) else ""


def _sources(tree: ast.FunctionDef, arguments: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The arguments that names may stand for: themselves, or two by ``a if condition else b``. A name that is assigned
    anything else stands for none.
    """
    names: dict[str, tuple[str, ...]] = {name: (name,) for name in arguments}
    for node in (each for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)):
        known = [names.get(each, ()) for each in _chosen(tree, node)]
        fresh = node.id not in names and len(known) == 2 and all(known)
        names[node.id] = tuple(p for each in known for p in each) if fresh else ()
    return names


def _chosen(tree: ast.FunctionDef, target: ast.Name) -> list[str]:
    """The two names of which one is assigned to another; none where that is not what happens."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and node.targets == [target] and isinstance(node.value, ast.IfExp):
            return [each.id for each in (node.value.body, node.value.orelse) if isinstance(each, ast.Name)]
    return []


def _projects(module: Any, model: nn.Module) -> bool:
    """Whether linear layers of a module, three or some with a bias, may read the same argument of its ``forward``.
    Without biases, those whose outputs are rotated have a node of their own.
    """
    forward = innermost(type(unwrapped(module)).forward)
    if forward is None or forward.__code__.co_freevars:
        return False
    layers: dict[str, list[nn.Linear]] = {}
    for name, arguments in _read(forward).items():
        layer = module._modules.get(name)
        if type(layer) is nn.Linear:
            layers.setdefault(arguments[-1], []).append(layer)
    rotates = "apply_rotary_pos_emb" in forward.__code__.co_names
    several = [each for each in layers.values() if len(each) > 1]
    return any(any(layer.bias is not None for layer in each) or (not rotates and len(each) > 2) for each in several)


SHARED = Replacement("linear", _projects, _make_forward)
