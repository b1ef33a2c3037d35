"""``patch(model)``: a Hugging Face model's embeddings, norms, gated MLPs, rotations, softmaxes and loss run on our ops.

A module is known by the code of its ``forward``, not by its name: it is replaced only where that code is, word for
word, one of the forms in :mod:`cute_ops_torch.huggingface.hugging_face`. So other models of the same build (Mistral,
Qwen) are covered too, and a future version that computes something else is left alone. A replaced module keeps its
parameters, buffers, hooks and names; only its class becomes a subclass with another ``forward``.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from torch import nn

from cute_ops_torch.huggingface.hugging_face import ATTENTION, FORMS, Form
from cute_ops_torch.huggingface.packed_weights import lay_side_by_side


class Replaced(NamedTuple):
    """One module that :func:`patch` changed: its name in the model, and the op it now runs.

    Of a decoder, ``attention_mask``: where it counts positions itself, they are not searched for packed sequences,
    which would wait for the GPU.
    """

    module: str
    op: str


def patch(model: nn.Module) -> list[Replaced]:
    """Run a model's embeddings, norms, gated MLPs, rotary embeddings, eager attention's softmax and next-token loss on
    cute ops, in place.

    Parameters and state dict stay as they are; :func:`unpatch` undoes it. On a GPU, weights that meet the same input
    (gate and up; queries, keys and values) move in memory, to lie side by side: patch before CUDA graphs are captured,
    and after the model is where and in what dtype it is to train. To pickle the whole model (not its
    state dict), unpatch it first. Where a causal language model is in training mode and is given ``labels``, it
    computes the loss straight from the hidden states and returns ``logits=None``: they never exist.

    Args:
        model: a Hugging Face ``LlamaForCausalLM``, or a model whose modules are built alike (Mistral, Qwen,
            Gemma), or one with layer norms, GELUs and written-out attention (BERT).

    Returns:
        What was replaced, in the model's order.

    Raises:
        ValueError: nothing in the model is known, or all of it is patched already.
    """
    found = [(name, module, form) for name, module in model.named_modules() for form in _forms_of(module, model)]
    if not found:
        patched = any(hasattr(module, "_cute_original") for module in model.modules())
        raise ValueError(
            f"cute_ops_torch.patch: {type(model).__name__} is patched already"
            if patched
            else f"cute_ops_torch.patch: {type(model).__name__} has no module that is known: no norm, gated MLP, "
            "attention or decoder layer whose forward is that of Hugging Face's Llama or a relative"
        )
    unused = {f"{name}.{form.unused}" for name, _, form in found if form.unused}
    found = [each for each in found if each[0] not in unused]
    for _, module, form in reversed(found):  # an attention's softmax first: the other form wraps what that is bound to
        _lay_together(module, form)
        module.__class__ = _subclass(type(module), form)  # type: ignore[assignment, arg-type]
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
        module.__class__ = type(module)._cute_original  # type: ignore[attr-defined]


def _lay_together(module: nn.Module, form: Form) -> None:
    """Weights that meet the same input, on a GPU: one product instead of several then needs no copy of them."""
    layers = [getattr(module, name) for name in form.together(module)]
    # With a bias each runs by itself.
    if layers and all(type(m) is nn.Linear and m._parameters["bias"] is None and m.weight.is_cuda for m in layers):
        lay_side_by_side([layer.weight for layer in layers])


def _forms_of(module: nn.Module, model: nn.Module) -> list[Form]:
    """The forms that a module has, none of an unknown or patched one."""
    if "forward" in vars(module) or hasattr(module, "_cute_original"):
        return []  # someone, or we, replaced its forward
    first = next((form for form in FORMS if form.fits(module, model)), None)
    return [form for form in (first, ATTENTION if ATTENTION.fits(module, model) else None) if form]


@cache
def _subclass(original: type[nn.Module], form: Form) -> type[nn.Module]:
    # The same name: checkpointing, sharding and device maps look modules up by it.
    names = {
        "__module__": original.__module__, "__qualname__": original.__qualname__,
        "_cute_original": getattr(original, "_cute_original", original), "forward": form.forward(original),
    }  # fmt: skip
    return type(original.__name__, (original,), names)
