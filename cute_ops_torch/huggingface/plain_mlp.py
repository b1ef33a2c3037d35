"""MLPs without a gate: ``down(act(up(x)))``, as modules of their own, among a layer's statements or the modules of a
``Sequential``, or as BERT's two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from cute_ops_torch.composite.block import mlp
from cute_ops_torch.huggingface.bypass import calls, fits, is_plain, is_plain_linear, parameter, takes, unchanged
from cute_ops_torch.huggingface.match import Forward, Replacement, innermost, named_as, rebind
from cute_ops_torch.huggingface.meaning import checked_meaning, state_of
from cute_ops_torch.huggingface.mlp import approximation
from cute_ops_torch.huggingface.source import source_digest
from cute_ops_torch.huggingface.statements import Step, steps_of, with_call
from cute_ops_torch.huggingface.sums import add
from cute_ops_torch.huggingface.trial import attributes_of_class
from cute_ops_torch.huggingface.trial import is_plain as is_comparable

Tensor = torch.Tensor
# `forward` of GPT-2's Conv1D, a linear layer whose weight is transposed.
_CONV1D = "39ef3e2036d6cce4"
# BertLayer's `feed_forward_chunk`, and `forward` of both modules that it calls: a linear layer and an activation; then
# a linear layer, dropout, and a norm of that and a residual.
_BERT_CHUNK, _BERT_UP, _BERT_DOWN = "6bb29d0d5cade57e", "dc41afa55f1e5fd4", "db970be30eb7b719"
# By class, the `forward` that hands its input on unless it drops elements.
_DROPOUTS: dict[Any, Forward] = {nn.Dropout: nn.Dropout.forward, nn.Identity: nn.Identity.forward}
_APPROXIMATE = "approximate"
# By the source of their `forward`: Hugging Face's SiLU, QuickGELU, and a module that calls its attribute `act`.
_DIGESTS = {"2bdc4d94c9296936": "silu", "264bef87d559fca3": "quick_gelu", "4587a7e0c8fdf068": _APPROXIMATE}
# What an activation computes, by its `forward`. Those of Hugging Face's activations are added when a model has them.
# A `forward` whose source is not known may read attributes of its class, so it is a key only together with its class.
_ACTIVATIONS: dict[Forward | tuple[type, Forward], str] = {
    nn.SiLU.forward: "silu", nn.ReLU.forward: "relu", nn.GELU.forward: _APPROXIMATE,
}  # fmt: skip
# Of the keys with a class: the attributes that it had when it was learned, and whether it still has its methods.
_SHARED: dict[Any, tuple[tuple[str, Any], ...]] = {}
_UNCHANGED: dict[Any, Callable[[Any], bool]] = {}


class Layers(NamedTuple):
    """An MLP's parts in their module.

    Attributes:
        up, down: the names of the first and the second layer.
        act: the activation: a module, or one of torch's functions.
        dropout: what drops elements between them: modules, or the attribute that is the probability.
    """

    up: str
    act: Step
    down: str
    dropout: tuple[Step, ...] = ()


def _layers_of(module: nn.Module, steps: tuple[Step, ...]) -> Layers | None:
    """The MLP that these steps of a module's ``forward`` are; None where they are anything else."""
    if len(steps) < 3 or steps[0].kind != "call" or steps[-1].kind != "call":
        return None
    up, act, down = steps[0].name, steps[1], steps[-1].name
    if not (_is_linear(getattr(module, up, None)) and _is_linear(getattr(module, down, None))):
        return None
    if act.kind != "act" and not (act.kind == "call" and _may_be_known(getattr(module, act.name, None))):
        return None
    between = [step for step in steps[2:-1] if step.kind != "cast"]
    if not all(_drops_out(module, step) for step in between):
        return None
    casts = [step.name for step in steps if step.kind == "cast"]
    return Layers(up, act, down, tuple(between)) if casts in ([], [down]) else None


def _may_be_known(act: Any) -> bool:
    return isinstance(act, nn.Module) and learn(act) is not None


def _drops_out(module: nn.Module, step: Step) -> bool:
    """Whether a step between layers is a dropout, of a module or of a function, or a module in place of one."""
    if step.kind == "call":
        return type(getattr(module, step.name, None)) in _DROPOUTS
    return step.kind == "dropout"


def _is_linear(layer: Any) -> bool:
    return isinstance(layer, nn.Linear) or _is_conv1d(layer)


def _is_conv1d(layer: Any) -> bool:
    return type(layer).__name__ == "Conv1D" and source_digest(type(layer).forward) == _CONV1D


def replacement_of(module: nn.Module) -> Replacement | None:
    """The replacement of a module whose ``forward`` has an MLP's statements; None of any other module."""
    forward = innermost(type(module).forward)
    for steps in steps_of(forward):
        if (layers := _layers_of(module, steps)) is not None:
            return _replacement(forward, steps, layers)
    return None


@cache
def _replacement(forward: Any, steps: tuple[Step, ...], layers: Layers) -> Replacement:
    return Replacement(
        "mlp", lambda module, model: True, lambda original: with_call(original, steps, partial(_call, layers))
    )


def run(module: nn.Module, layers: Layers, x: Tensor) -> Tensor | None:
    """The output of a module's MLP for ``x``; None where the statements of its ``forward`` are to run."""
    if not is_plain(x) or any(_drops(module, step) for step in layers.dropout):
        return None
    parts, act = module._modules, layers.act
    activation = act.name if act.kind == "act" else activation_of(parts.get(act.name))
    return run_parts(parts.get(layers.up), activation, parts.get(layers.down), x)


def run_parts(up: Any, activation: str | None, down: Any, x: Tensor) -> Tensor | None:
    """``down(act(up(x)))`` by one op; None where a layer is not what the op takes, or is looked at."""
    first, second = _parameters(up), _parameters(down)
    if activation is None or first is None or second is None or first[2] != second[2] or not x.ndim:
        return None
    (w_up, b_up, transposed), (w_down, b_down, _) = first, second
    columns = w_up.shape[0 if transposed else 1]
    given = [x, *(t for t in (w_up, b_up, w_down, b_down) if t is not None)]
    alike = torch.is_autocast_enabled(x.device.type) or all(t.dtype == x.dtype for t in given)
    if not (alike and x.shape[-1] == columns and takes(*given) and all(t.device == x.device for t in given)):
        return None
    return mlp(x, w_up, b_up, w_down, b_down, activation, transposed=transposed)


def _drops(module: nn.Module, step: Step) -> bool:
    """Whether a step that was a dropout may change its input: it drops elements, or is no known dropout any more."""
    if step.kind == "dropout":
        return bool(module.training and getattr(module, step.name))
    return not _hands_on(module._modules.get(step.name))


def _hands_on(dropout: Any) -> bool:
    """Whether calling a module returns its input: a dropout that drops nothing at present, or an ``Identity``."""
    kind: Any = type(dropout)
    if kind not in _DROPOUTS or not calls(dropout, _DROPOUTS[kind]):
        return False
    return kind is nn.Identity or not (dropout.training and dropout.p)


def _parameters(layer: Any) -> tuple[Tensor, Tensor | None, bool] | None:
    """A linear layer's weight, its bias, and whether the weight is transposed; None where it does more than multiply
    and add.
    """
    transposed = not is_plain_linear(layer)
    if transposed and not (_is_conv1d(layer) and calls(layer, type(layer).forward) and "bias" in layer._parameters):
        return None
    weight, bias = parameter(layer, "weight"), layer._parameters["bias"]
    if weight is None or (bias is not None and parameter(layer, "bias") is None):
        return None
    if transposed and not fits(bias, weight, 1):
        return None
    return weight, bias, transposed


def activation_of(act: Any) -> str | None:
    """The function that calling an activation computes, as :func:`mlp` calls it; None: nothing that it knows."""
    kind: Any = type(act)
    original = getattr(kind, "_cute_original", kind)
    forward: Any = getattr(original, "forward", None)
    name = _ACTIVATIONS.get(forward) or _ACTIVATIONS.get((original, forward))
    if name is None or not calls(act, kind.forward):
        return None
    if any(getattr(act, key, None) != value for key, value in _SHARED.get((original, forward), ())):
        return None
    if (original, forward) in _UNCHANGED and not _UNCHANGED[original, forward](act):
        return None
    if name != _APPROXIMATE:
        return name
    return {"tanh": "gelu_tanh", "none": "gelu"}.get(str(approximation(act)))  # torch refuses others


def learn(act: nn.Module) -> str | None:
    """:func:`activation_of` an activation, whose ``forward`` is known by identity from now on."""
    kind: Any = getattr(type(act), "_cute_original", type(act))
    forward = getattr(kind, "forward", None)
    if forward is None or kind.__call__ is not nn.Module.__call__:
        # A script module has no `forward`; a `__call__` of its own may do more than that.
        return None
    if forward not in _ACTIVATIONS and (kind, forward) not in _ACTIVATIONS:
        if name := _DIGESTS.get(source_digest(forward) or ""):
            _ACTIVATIONS[forward] = name
        elif name := _written_out(act):
            shared = attributes_of_class(kind).items()  # its `forward` reads none but plain ones
            _ACTIVATIONS[kind, forward] = name
            _UNCHANGED[kind, forward] = unchanged(kind)
            _SHARED[kind, forward] = tuple((key, value) for key, value in shared if is_comparable(value))
        else:
            return None
    return activation_of(act)


def _written_out(act: nn.Module) -> str | None:
    """The function of an activation without attributes whose source is not known."""
    own = any(key not in vars(nn.Module()) and key != "_is_hf_initialized" for key in vars(act))
    holds = any(True for each in (act.parameters(), act.buffers(), act.children()) for _ in each)
    if own or holds or type(act).forward.__module__.startswith("torch."):
        return None
    try:
        found, _ = checked_meaning(act, 12, state_of(act))
    except Exception:  # a forward may raise, or branch on what a trace does not know
        return None
    if found is None or found.tensors != (("x", ""),):
        return None
    if found.op == "gelu":
        return {"tanh": "gelu_tanh", "none": "gelu"}.get(str(dict(found.attrs).get("approximate")))
    return found.op if found.op == "relu2" else None


# --- methods that a layer's `forward` runs in chunks of rows, as BERT's ---------------------------------------------

# Methods whose own statements are an MLP, as ALBERT's and DistilBERT's, and the ones that run in their place.
_METHODS: dict[Any, Forward] = {}


def _has_chunks(layer: Any) -> bool:
    """Whether a layer passes a method with an MLP to `apply_chunking_to_forward`."""
    forward = innermost(getattr(type(layer), "forward", None))
    names = forward.__code__.co_names if forward else ()
    if "apply_chunking_to_forward" not in names:
        return False
    methods = [getattr(layer, name) for name in names if isinstance(getattr(type(layer), name, None), FunctionType)]
    return any(_learn_method(layer, method) for method in methods)


def _learn_method(layer: nn.Module, method: Any) -> bool:
    """Whether a method has an MLP, or calls BERT's two modules."""
    if _of_bert(method) is not None:
        return learn(layer.intermediate.intermediate_act_fn) is not None  # type: ignore[union-attr, arg-type]
    function = method.__func__
    for steps in steps_of(function):
        if (layers := _layers_of(layer, steps)) is not None:
            if function not in _METHODS:
                _METHODS[function] = with_call(function, steps, partial(_call, layers))
            return True
    return False


def _call(layers: Layers, module: nn.Module, x: Tensor) -> Tensor | None:
    return run(module, layers, x)


def _of_bert(method: Any) -> Any:
    """The layer whose method calls BERT's two modules, with nothing that looks at them; None of any other method."""
    if not isinstance(method, MethodType) or source_digest(method.__func__) != _BERT_CHUNK:
        return None
    layer: Any = method.__self__
    known = (layer._modules.get("intermediate"), _BERT_UP), (layer._modules.get("output"), _BERT_DOWN)
    return layer if all(m is not None and _does(m, digest) for m, digest in known) else None


def _does(module: nn.Module, digest: str) -> bool:
    kind: Any = type(module)
    return source_digest(kind.forward) == digest and calls(module, kind.forward)


def _in_chunks(original: Any) -> Forward:
    """The ``forward`` of a layer whose methods run as one op where that can be."""
    apply = original.__globals__["apply_chunking_to_forward"]

    def ours(method: Any, chunk_size: int, dim: int, *tensors: Any) -> Any:
        if not isinstance(method, MethodType):
            return apply(method, chunk_size, dim, *tensors)
        if chunk_size:
            return apply(lambda *rows: _run_method(method, *rows), chunk_size, dim, *tensors)
        return _run_method(method, *tensors)

    return rebind(original, apply_chunking_to_forward=ours)


def _run_method(method: MethodType, *tensors: Any) -> Any:
    found = _METHODS.get(method.__func__)
    if found is not None:
        return found(method.__self__, *tensors)
    layer = _of_bert(method)
    return method(*tensors) if layer is None else _of_two_modules(layer, method, *tensors)


def _of_two_modules(layer: Any, original: Any, attention_output: Tensor) -> Any:
    up, output = layer.intermediate, layer.output
    if not is_plain(attention_output):
        return original(attention_output)
    found = run_parts(up.dense, activation_of(up.intermediate_act_fn), output.dense, attention_output)
    if found is None:
        return original(attention_output)
    found = output.dropout(found)
    if hasattr(type(output), "_cute_original"):
        return output.LayerNorm(add(output, (0, ("LayerNorm",)), found, attention_output))
    return output.LayerNorm(found + attention_output)


# --- sequences of modules --------------------------------------------------------------------------------------------


def _in_sequence(self: nn.Sequential, input: Any) -> Any:
    parts, place = [*self], 0
    while place < len(parts):
        down = _down_of(parts, place) if isinstance(input, Tensor) and is_plain(input) else 0
        found = run_parts(parts[place], activation_of(parts[place + 1]), parts[down], input) if down else None
        input, place = (parts[place](input), place + 1) if found is None else (found, down + 1)
    return input


def _down_of(parts: Sequence[nn.Module], place: int) -> int:
    """The place of the second layer of an MLP that begins here; 0 where there is none."""
    if not isinstance(parts[place], nn.Linear):
        return 0
    down = next((k for k in range(place + 2, len(parts)) if not _hands_on(parts[k])), 0)
    return down if isinstance(parts[down], nn.Linear) else 0


def _is_sequence(module: nn.Module) -> bool:
    """Whether a ``Sequential`` may run an MLP, dropout between its layers aside."""
    kind: Any = type(module)
    if not isinstance(module, nn.Sequential) or kind.forward is not nn.Sequential.forward:
        return False
    if kind.__iter__ is not nn.Sequential.__iter__:
        return False
    parts = [part for part in module if type(part) not in _DROPOUTS]
    triples = zip(parts, parts[1:], parts[2:], strict=False)
    return any(_is_linear(up) and _is_linear(down) and learn(act) for up, act, down in triples)


REPLACEMENTS = (
    Replacement("mlp", lambda module, model: _has_chunks(module), _in_chunks),
    Replacement("mlp", lambda module, model: _is_sequence(module), lambda original: named_as(_in_sequence, original)),
)
