"""Norms of queries and keys that wait for the rotation behind them, which computes both in one pass (Qwen 3, Gemma 3).

What takes the place of a norm's output remembers its input. It may be turned, from (batch, seqlen, heads, headdim) to
heads before positions, and be rotated; whatever else is asked of it is asked of the real norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cute_ops_torch import functions
from cute_ops_torch.huggingface.bypass import is_plain
from cute_ops_torch.huggingface.lazy_logits import Lazy
from cute_ops_torch.huggingface.residual_norm import Norm, norm_of

Tensor = torch.Tensor


class LazyNorm(Lazy):
    """The norm of heads.

    Args:
        x: the norm's input.
        made: what it computes.
        compute: gives the real norm, as it is turned.
        turned: whether positions and heads have been exchanged.
    """

    def __init__(self, x: Tensor, made: Norm, compute: Callable[[], Tensor], turned: bool = False) -> None:
        super().__init__(compute)
        self.x, self.made, self._turned = x, made, turned

    @property
    def heads(self) -> Tensor:
        """The norm's input as (batch, seqlen, heads, headdim), if it has been turned to what rotations take."""
        return self.x if self._turned else self.x.transpose(1, 2)

    @property
    def weight(self) -> Tensor:
        """The factor of normalised heads."""
        weight, offset = self.made.weight, self.made.offset
        assert weight is not None  # norms without one are not lazy
        return weight.float() + offset if offset else weight

    def transpose(self, a: int, b: int) -> Any:
        if {a % 4, b % 4} != {1, 2}:
            return self.real().transpose(a, b)
        return LazyNorm(self.x, self.made, lambda: self.real().transpose(1, 2), not self._turned)


def stand_ins(attention: Any) -> dict[str, Callable[[Tensor], Any]]:
    """Callables that take the place of the norms of an attention's heads, by name; none if there are not two."""
    norms = {name: (child, norm_of(child)) for name, child in attention._modules.items() if child is not None}
    of_heads = {
        name: _stand_in(child, made)
        for name, (child, made) in norms.items()
        if made is not None and made.op == "rmsnorm" and made.bias is None and made.weight is not None
        and made.weight.shape == (getattr(attention, "head_dim", 0),)
    }  # fmt: skip
    return of_heads if len(of_heads) == 2 else {}


def _stand_in(norm: nn.Module, made: Norm) -> Callable[[Tensor], Any]:
    def call(x: Tensor) -> Any:
        lazy = is_plain(x) and x.ndim == 4 and not torch.is_autocast_enabled(x.device.type) and made.fits(x)
        return LazyNorm(x, made, lambda: norm(x)) if lazy else norm(x)

    return call


def norm_and_rotate(q: LazyNorm, k: LazyNorm, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, normalised and rotated by tables of single angles, with heads before positions."""
    outs = functions.qk_norm_rope(q.heads, k.heads, q.weight, k.weight, cos, sin, q.made.eps)
    return outs[0].transpose(1, 2), outs[1].transpose(1, 2)
