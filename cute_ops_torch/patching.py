"""``patch(model)``: the norms and gated MLPs of a Hugging Face Llama run on our ops.

A module is known by the code of its ``forward``, not by its name: it is replaced only where that code is, word
for word, one of the forms below. So other models of the same build (Mistral, Qwen) are covered too, and a
future version that computes something else is left alone. A replaced module keeps its parameters, buffers,
hooks and names; only its class becomes a subclass with another ``forward``.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from cute_ops_torch import functions

# mypy: disable-error-code="attr-defined, no-untyped-def, has-type"


class Replaced(NamedTuple):
    """One module that :func:`patch` changed: its name in the model, and the op it now runs."""

    module: str
    op: str


def patch(model: nn.Module) -> list[Replaced]:
    """Run a model's RMS norms, gated MLPs and residual adds before a norm on cute ops, in place.

    Parameters and state dict stay as they are; :func:`unpatch` undoes it. To pickle the whole model (not its
    state dict), unpatch it first.

    Args:
        model: a Hugging Face ``LlamaForCausalLM``, or a model whose modules are built alike.

    Returns:
        What was replaced, in the model's order.

    Raises:
        ValueError: nothing in the model is known, or all of it is patched already.
    """
    found = [(name, module, form) for name, module in model.named_modules() if (form := _form_of(module))]
    if not found:
        patched = any(hasattr(module, "_cute_original") for module in model.modules())
        raise ValueError(
            f"cute_ops_torch.patch: {type(model).__name__} is patched already"
            if patched
            else f"cute_ops_torch.patch: {type(model).__name__} has no module that is known: no norm, SiLU-gated MLP "
            "or decoder layer whose forward is that of Hugging Face's Llama"
        )
    for _, module, form in found:
        module.__class__ = _subclass(type(module), form)  # type: ignore[arg-type]  # a class is hashable
    return [Replaced(name, form.op) for name, _, form in found]


def unpatch(model: nn.Module) -> None:
    """Undo :func:`patch`.

    Raises:
        ValueError: the model is not patched.
    """
    patched = [module for module in model.modules() if hasattr(module, "_cute_original")]
    if not patched:
        raise ValueError(f"cute_ops_torch.unpatch: {type(model).__name__} is not patched")
    for module in patched:
        module.__class__ = type(module)._cute_original


# The forms: what Hugging Face's modules compute, and what replaces it.


def _norm(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)


def _norm_by_ours(self, hidden_states: torch.Tensor) -> torch.Tensor:
    out = functions.rmsnorm(hidden_states, self.weight, None, self.variance_epsilon)
    return out.to(torch.promote_types(out.dtype, self.weight.dtype))  # as the product above promotes


def _mlp(self, x):
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def _mlp_by_ours(self, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(functions.silu_mul(self.gate_proj(x), self.up_proj(x)))


def _layer(
    self,
    hidden_states,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    use_cache=False,
    position_embeddings=None,
    **kwargs,
):
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    # Self Attention
    hidden_states, _ = self.self_attn(
        hidden_states=hidden_states,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    hidden_states = residual + hidden_states

    # Fully Connected
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states


def _layer_by_ours(
    self,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    residual = hidden_states
    attended, _ = self.self_attn(
        hidden_states=self.input_layernorm(hidden_states),
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    norm = self.post_attention_layernorm
    if residual.dtype == attended.dtype == norm.weight.dtype and not _hooked(norm):
        hidden_states, residual = functions.add_rmsnorm(attended, residual, norm.weight, None, norm.variance_epsilon)
    else:  # mixed dtypes promote step by step in the original; hooks want the module called
        residual = residual + attended
        hidden_states = norm(residual)
    return residual + self.mlp(hidden_states)


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _silu_gated(module: nn.Module) -> bool:
    return type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")


def _norm_after_attention(module: nn.Module) -> bool:
    form = _form_of(module.get_submodule("post_attention_layernorm"))
    return form is not None and form.op == "rmsnorm"


class _Form(NamedTuple):
    op: str
    original: Callable[..., Any]
    ours: Callable[..., Any]
    also: Callable[[nn.Module], bool]


_FORMS = (
    _Form("rmsnorm", _norm, _norm_by_ours, lambda module: True),
    _Form("silu_mul", _mlp, _mlp_by_ours, _silu_gated),
    _Form("add_rmsnorm", _layer, _layer_by_ours, _norm_after_attention),
)


def _form_of(module: nn.Module) -> _Form | None:
    """The form that a module has, None for an unknown or patched one."""
    if "forward" in vars(module) or hasattr(module, "_cute_original"):
        return None  # someone, or we, replaced its forward
    code = _code(type(module).forward)
    return next((form for form in _FORMS if code == _code(form.original) and form.also(module)), None)


@cache
def _code(function: Any) -> str | None:
    """A function's parameters and body as text, without annotations and docstring; None where there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    body = definition.body[1:] if ast.get_docstring(definition) else definition.body
    return "\n".join([ast.dump(definition.args), *map(ast.dump, body)])


@cache
def _subclass(original: type[nn.Module], form: _Form) -> type[nn.Module]:
    # The same name: checkpointing, sharding and device maps look modules up by it.
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "_cute_original": original}
    return type(original.__name__, (original,), names | {"forward": form.ours})
