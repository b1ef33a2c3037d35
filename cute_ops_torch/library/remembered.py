"""Plans and guards remembered from earlier calls. Forgetting one costs a bind and a plan, no compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from cute_ops.constants import make_room
from cute_ops_torch.library.modes import EXACT, transforms_active

T = TypeVar("T")

_CONSTANTS: dict[Any, torch.Tensor] = {}


def remembered(table: dict[Any, T], key: Any, make: Callable[[], T]) -> T:
    """A table's entry, made where there is none. Symbolic sizes and attributes have no hash: then it is made anew."""
    try:
        found = table.get(key)
    except TypeError:
        return make()
    if found is None:
        make_room(table)
        found = table[key] = make()
    return found


def constant_of_device(key: Any, make: Callable[[], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A small tensor that depends on the key and on the device of x alone, which takes several launches to make. A
    trace, a mode or a CUDA graph, whose memory is its own, gets one of its own.
    """
    watched = torch.compiler.is_compiling() or type(x) not in EXACT or transforms_active()
    if watched or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return make()

    def made() -> torch.Tensor:
        found = make()
        if x.is_cuda:  # calls on other streams read it, and do not wait for this one
            torch.cuda.current_stream(x.device).synchronize()
        return found

    with torch.inference_mode(False):
        return remembered(_CONSTANTS, (key, x.device), made)
