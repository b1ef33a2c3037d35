"""Which modes of torch are active: calls past the dispatcher must not hide from them."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

_C = torch._C
# Types with the behaviour of a plain tensor. Other subclasses may override calls.
EXACT = frozenset((torch.Tensor, torch.nn.Parameter))
# How many modes see calls below autograd. Dynamo's guards, which compare dispatch keys, do not see those of selective
# checkpoints and others that ignore what a compiler does inside.
modes = _C._len_torch_dispatch_stack


def wrapped(tensor: torch.Tensor) -> bool:
    """Whether a transform has wrapped a tensor: one of functorch, or the vmap of ``is_grads_batched``."""
    of = _C._functorch
    return of.is_functorch_wrapped_tensor(tensor) or of.is_legacy_batchedtensor(tensor)


def modes_active() -> bool:
    """Whether anything observes or transforms calls of ops, the profiler too."""
    watched = _C._len_torch_function_stack() > 0 or transforms_active()
    return watched or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def transforms_active() -> bool:
    """Whether calls of ops may be transformed: by modes, functorch, forward-mode AD or tracing. A default device's mode
    transforms none.
    """
    return (
        modes() > 0
        or (_C._len_torch_function_stack() > 0 and not _only_default_device())
        or _C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _C._get_tracing_state() is not None
    )


def _only_default_device() -> bool:
    """Whether the one mode that sees calls of functions is that of ``torch.set_default_device``, or ``torch.device`` as
    a context: it gives a device to functions that make tensors, and observes nothing.
    """
    if _C._len_torch_function_stack() != 1:
        return False
    from torch.utils._device import DeviceContext  # start-up time: torch has it only where it is used

    return type(_C._get_function_stack_at(0)) is DeviceContext
