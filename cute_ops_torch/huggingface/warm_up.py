"""``warm_up(model)``: the kernels of a patched model, before its first step."""

from __future__ import annotations

import torch
from torch import nn

from cute_ops.aot.build import variants_of
from cute_ops.aot.hf_config import calls_of_model
from cute_ops.errors import suggesting
from cute_ops.jit import cache, target


@suggesting
def warm_up(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Load the kernels that a model runs once it is patched, so that its first step waits for no compiler.

    Kernels that no bundle and no cache holds are compiled, as many at a time as there are cores; a step that meets them
    one after another waits for each. They are found in the model's configuration, as those of ``python -m cute_ops
    manifest`` are: those of the gradients and of the loss, too, if the model is in training mode. What else a program
    calls, the loss of ``patch(model, logits=True)``, and a model cut over several devices by tensor parallelism, is
    compiled when it is called.

    Args:
        model: a Hugging Face model on one device.
        dtype: the dtype that it runs in, where that is not the one of its weights: ``param_dtype`` of FSDP's mixed
            precision.

    Returns:
        The number of kernels; 0 on a CPU, where references run.

    Raises:
        TypeError: the model has no configuration.
        ValueError: its configuration says too little, or its dtype is one that no op takes.
        CompileError: a kernel does not compile, or there is no compiler; the other kernels are there.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise TypeError(f"cute_ops_torch.warm_up: {type(model).__name__} has no config as Hugging Face's models have")
    weight = next(model.parameters())
    if not weight.is_cuda:
        return 0
    calls = calls_of_model(config.to_dict(), str(dtype or weight.dtype).removeprefix("torch."), train=model.training)
    found = cache.build_all(variants_of(calls, [target.of_device(weight.device.index)]), each=cache.load)
    for one in found:
        if one.error:
            raise one.error
    return len(found)
