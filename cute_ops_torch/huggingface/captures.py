"""Outputs that a config asks for (``output_router_logits=True``), which Hugging Face keeps by hooks."""

from __future__ import annotations

from torch import nn


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
