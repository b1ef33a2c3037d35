"""Modules that ``patch`` leaves although its ops are for them, by their role in the model, and why each is left."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from cute_ops_torch.huggingface.loss import asks_known_loss
from cute_ops_torch.huggingface.match import innermost
from cute_ops_torch.huggingface.multi_head import why_left
from cute_ops_torch.huggingface.report import Left
from cute_ops_torch.huggingface.source import definition

_MLP = r"(?i)(mlp|feedforward|ffn|experts|moe|densegatedact|denseact)"


class _Role(NamedTuple):
    """The role of a module in its model.

    Attributes:
        kind: its name.
        ops: a module that runs one of these is not left.
        has: ``has(module)``: whether a module has this role.
        reason: ``reason(module)``: why it is left, if Python knows its ``forward``.
    """

    kind: str
    ops: tuple[str, ...]
    has: Callable[[Any], bool]
    reason: Callable[[Any], str]


UNWANTED = "its ops are not among those that `patch` was asked for"


def find_left(
    model: nn.Module, replaced: Mapping[str, Collection[str]], unwanted: Collection[tuple[str, str]]
) -> list[Left]:
    """The modules of a model that have a role but none of its ops; ``replaced`` has the ops that run, by module, and
    ``unwanted`` modules with the ops that they would run if they were asked for.
    """
    found = []
    for name, module in model.named_modules():
        if hasattr(type(module), "_cute_original") and name not in replaced:
            continue  # an earlier call has patched it
        # A plain MLP is its products and its activation, which may run on an op by itself.
        found += [
            (role, name, module)
            for role in _ROLES
            if role.has(module)
            and not {*role.ops}
            & {*(replaced.get(name, ()) if role.kind not in ("MLP", "layer") else _within(name, module, replaced))}
        ]
    causal = is_causal(model)
    return [
        Left(
            name,
            _kind(role, module, causal),
            UNWANTED if any((name, op) in unwanted for op in role.ops) else _hidden(module) or role.reason(module),
        )
        for role, name, module in sorted(found, key=lambda each: _ROLES.index(each[0]))
    ]


def is_causal(model: Any) -> bool:
    """Whether a model predicts the next token."""
    generates = hasattr(model, "can_generate") and model.can_generate()
    return generates or any(getattr(module, "is_causal", False) is True for module in model.modules())


def _kind(role: _Role, module: nn.Module, causal: bool) -> str:
    if role.kind != "layer":
        return role.kind
    return "decoder layer" if causal and not _named("Encoder|Vision", module) else "encoder layer"


def _within(name: str, module: nn.Module, replaced: Mapping[str, Collection[str]]) -> set[str]:
    return {op for inner, _ in module.named_modules(prefix=name) for op in replaced.get(inner, ())}


def _hidden(module: nn.Module) -> str:
    """Why the source of a module's ``forward`` says nothing; empty where it does."""
    cls: Any = getattr(type(module), "_cute_original", type(module))  # one op may run, and another be left
    forward = getattr(cls, "forward", None)
    if "forward" in vars(module):
        return "a `forward` was set on the module itself before it was patched"
    if innermost(forward) is None:
        return "a decorator of its forward hides the function beneath it"
    if definition(forward) is None:
        return "its forward has no Python source"
    return ""


def _called(module: nn.Module) -> set[str]:
    """Global names and attributes that the ``forward`` of a module's class uses."""
    forward: Any = getattr(type(module), "forward", None)
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return set(code.co_names) if code else set()


def _named(pattern: str, module: nn.Module) -> bool:
    return re.search(pattern, type(module).__name__) is not None


def _is_loss(module: Any) -> bool:
    # `loss_function` is asked for last: it is a property that logs a warning in modules without a loss.
    if (
        not hasattr(module, "get_output_embeddings")
        or "labels" not in inspect.signature(type(module).forward).parameters
    ):
        return False
    return bool(module.get_output_embeddings()) and hasattr(module, "loss_function")


def _why_loss(module: Any) -> str:
    head = module.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__}, not a plain torch.nn.Linear"
    if not asks_known_loss(module):
        return f"its loss is {getattr(module.loss_function, '__name__', 'another function')}, none of Hugging Face's"
    return "its forward, or one around its head, assigns to an attribute or refers to names of a function around it"


def _makes_mask(module: nn.Module) -> bool:
    return bool({"create_causal_mask", "create_sliding_window_causal_mask"} & _called(module))


def _why_mask(module: nn.Module) -> str:
    return "its forward does not count positions as Llama's does, so they are searched for packed sequences"


def _why_embedding(module: Any) -> str:
    if module.weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"its table is {module.weight.dtype}".replace("torch.", "")
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, name):
            return f"it has {name}={getattr(module, name)}"
    return f"{type(module).__name__} does more than look up rows"


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is one of those that a model stacks: an attention, or what takes its place, norms of rows and an
    MLP.
    """
    return (
        _named(r"(Layer|Block)(_?V?\d+)?$", module)
        and len([*module.children()]) > 1
        and any(_is_norm(each) and not isinstance(each, nn.GroupNorm) for each in module.modules())
        and not _is_mlp(module)
    )


def _why_layer(module: Any) -> str:
    return "no module in it has both a norm that is known and the residual add, written as `a + b`, in its forward"


def _rotation(module: nn.Module) -> str:
    """The name of the function by which an attention rotates queries and keys; empty where there is none."""
    return next((n for n in sorted(_called(module)) if re.match(r"_?apply_.*(rotary|rope)", n)), "")


def _why_rotation(module: nn.Module) -> str:
    return f"`{_rotation(module)}` is no rotation of ours, or its tables are not known to hold each angle twice"


def _attends(module: Any) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return True
    eager = getattr(getattr(module, "config", None), "_attn_implementation", None) == "eager"
    return eager and _named(r"Attention", module) and bool({"eager_attention_forward", "softmax"} & _called(module))


def _why_attention(module: nn.Module) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return why_left(module)
    return "its eager attention is not that of BERT, ViT, Llama, Gemma 2 or GPT-OSS"


def _is_mlp(module: nn.Module) -> bool:
    """Whether a module is an MLP, or experts of which no one is a module."""
    other = _named(r"(?i)(layer|router|gate|attention)$", module)  # as `Qwen2MoeAttention`
    if not _named(_MLP, module) or other or isinstance(module, nn.ModuleList):
        return False
    children = [*module.modules()][1:]
    return (bool(children) or _named("Experts", module)) and not any(_named(_MLP, child) for child in children)


def _why_mlp(module: Any) -> str:
    act = next((getattr(module, name) for name in ("act_fn", "act", "activation_fn") if hasattr(module, name)), None)
    gate, up, down = (isinstance(getattr(module, f"{n}_proj", None), nn.Linear) for n in ("gate", "up", "down"))
    gated = any("gate" in name for name, _ in module.named_parameters())
    if isinstance(act, nn.Module) and ((gate and up and down) or not gated):
        return f"its activation {type(act).__name__} is neither SiLU nor GELU, or its forward is not Llama's"
    return "it does not compute down(act(gate(x)) * up(x)) with three linear layers"


def _is_norm(module: nn.Module) -> bool:
    return _named(r"(?i)norm", module) and not list(module.children())


def _why_norm(module: Any) -> str:
    if isinstance(module, nn.LayerNorm):
        several = len(module.normalized_shape) > 1
        return "it normalises several dims together" if several else f"{type(module).__name__} is not torch's LayerNorm"
    return f"{type(module).__name__} computes neither an RMS norm nor a layer norm of rows"


_MLPS = ("silu_mul", "gelu_mul", "gelu", "relu2", "swiglu", "geglu", "mlp", "permute_tokens")
_ROLES = (
    _Role("loss", ("linear_cross_entropy", "cross_entropy"), _is_loss, _why_loss),
    _Role("mask", ("attention_mask",), _makes_mask, _why_mask),
    _Role("embedding", ("embedding",), lambda module: isinstance(module, nn.Embedding), _why_embedding),
    _Role("layer", ("add_rmsnorm", "add_layernorm"), _is_layer, _why_layer),
    _Role("rotary function", ("rope",), lambda module: bool(_rotation(module)), _why_rotation),
    _Role("attention", ("attention", "softmax"), _attends, _why_attention),
    _Role("MLP", _MLPS, _is_mlp, _why_mlp),
    _Role("norm", ("rmsnorm", "layernorm", "group_norm", "fused"), _is_norm, _why_norm),
)
