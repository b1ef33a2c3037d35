"""Outputs that a call or a config asks for (``output_router_logits=True``), which Hugging Face keeps by hooks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Set
from typing import Any

from torch import nn

from cute_ops_torch.huggingface.bypass import CAPTURES

_NO_SUMS = {"attentions", "cross_attentions", "router_logits"}


def captured() -> Set[str]:
    """The outputs that Hugging Face keeps in this call."""
    keeper: Any = sys.modules.get(CAPTURES)  # not in versions that keep outputs otherwise
    return (keeper._active_collector.get() or {}).keys() if keeper is not None else set()


def returns_sums(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether a call with these arguments returns hidden states, which are sums of its layers."""
    asked = given.get("output_hidden_states")
    if asked is None:
        asked = getattr(getattr(model, "config", None), "output_hidden_states", False)
    return asked is not False or bool(captured() - _NO_SUMS)


def install_hooks(model: nn.Module) -> None:
    """Install the hooks that the model's first call would install: their lock breaks the graph of a compiled call. A
    part that has run has its hooks already; a second hook would keep each output twice.
    """
    try:
        from transformers.utils.output_capturing import maybe_install_capturing_hooks
    except ImportError:  # versions that keep outputs otherwise
        return
    for module in model.modules():
        kept, config = getattr(type(module), "_can_record_outputs", None), getattr(module, "config", None)
        asked = any(getattr(config, f"output_{name}", False) for name in kept or ())
        if asked and not any(getattr(part, "_output_capturing_hooks_installed", False) for part in module.modules()):
            maybe_install_capturing_hooks(module)
