"""Casts of the operands of products under autocast, as torch's own products have them."""

from __future__ import annotations

from typing import Any

import torch

enabled = torch._C._is_any_autocast_enabled


def autocast(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """X and weights in autocast's dtype where that is on; as they are where it is off."""
    if not enabled():  # the device's name takes longer to look up
        return x, *weights
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # which raises for a device without autocast
        return x, *weights
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), *(w.to(dtype) for w in weights)


def autocast_given(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[Any, ...]:
    """:func:`autocast` of arrays of which some are None."""
    found = iter(autocast(x, *(a for a in others if a is not None)))
    return next(found), *(None if a is None else next(found) for a in others)
