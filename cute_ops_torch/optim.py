"""Optimizers over the functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from cute_ops_torch.autograd import inplace_gradient
from cute_ops_torch.registry import family

Tensor = torch.Tensor
# Parameters of a size that this divides are taken as rows of so many elements: one kernel for all of them.
ROW = 1024


class AdamW(torch.optim.Optimizer):
    """:func:`cute_ops_torch.adamw` on every parameter, in place: as :class:`torch.optim.AdamW`, with its state.

    Each parameter and its moments are read once and written once, in the parameter's dtype, computed in float32. State
    dicts of ``torch.optim.AdamW`` load, and the other way round.

    Args:
        params: parameters or groups of them, float32, float16 or bfloat16.
        lr: learning rate.
        betas: how much of the two moments stays in a step.
        eps: added to the root of the second moment.
        weight_decay: part of the parameter that is taken away, times the learning rate.

    Raises:
        ValueError: a negative rate, eps or decay, or betas outside of [0, 1).
        RuntimeError: in :meth:`step`, a sparse gradient.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"cute_ops_torch.optim.AdamW: argument `{name}` is {value}, expected at least 0.")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"cute_ops_torch.optim.AdamW: argument `betas` is {betas}, expected both in [0, 1).")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step on every parameter that has a gradient; ``closure`` makes gradients and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        op, run, into = family("cute", "adamw")
        update = inplace_gradient(op, run, into)
        for group in self.param_groups:
            numbers: dict[tuple[int, torch.device], tuple[Tensor, ...]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError("cute_ops_torch.optim.AdamW: sparse gradients are not supported.")
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["step"] += 1
                key = int(state["step"]), parameter.device
                if key not in numbers:
                    numbers[key] = _numbers(group, *key)
                given = [_local(t) for t in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])]
                if not given[0].numel():
                    continue
                rows = _rows(given)
                lead = rows[0].shape[:-1]
                update(*rows, *(n.expand(lead) for n in numbers[key]), *group["betas"], group["eps"])
        return loss


def _numbers(group: dict[str, Any], step: int, device: torch.device) -> tuple[Tensor, ...]:
    """What a step multiplies by, on the device: kept weights, step size and the scale of the root.

    Written there by kernels: a copy from memory that is not pinned would wait for the device.
    """
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    values = (1 - lr * group["weight_decay"], lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step))
    return tuple(torch.full((), value, dtype=torch.float32, device=device) for value in values)


def _local(tensor: Tensor) -> Tensor:
    """A DTensor's part on this rank: what happens to an element depends on no other one."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator, no-any-return]


def _rows(tensors: list[Tensor]) -> list[Tensor]:
    """Views with a last dim, of one length for most parameters."""
    if all(t.is_contiguous() for t in tensors) and tensors[0].numel() % ROW == 0:
        return [t.view(-1, ROW) for t in tensors]
    if all(t.ndim and t.stride(-1) == 1 for t in tensors):
        return tensors
    return [t.reshape(-1, 1) if t.ndim == 0 else t.unsqueeze(-1) for t in tensors]
