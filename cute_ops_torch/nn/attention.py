"""Attention as a module: its options, and sinks that are learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cute_ops.composite.attention import Function
from cute_ops.errors import suggesting
from cute_ops_torch.composite.attention import attention
from cute_ops_torch.nn.layered import Layered

Tensor = torch.Tensor


class Attention(Layered):
    """:func:`cute_ops_torch.attention` with these options: ``(q, k, v) -> (out, lse)``. What functions read, and where
    packed sequences begin, is given with each call.

    Args:
        sinks: heads of q, for each of which a sink is learned; None learns none.
        device: where the sinks are.
        dtype: of the sinks.
        scale: of scores; 0 is ``1 / sqrt(headdim)``.
        causal: a query attends to keys up to its own.
        left: keys before its own that a query attends to at most; -1 is all.
        right: keys after its own that a query attends to at most; -1 is all.
        softcap: ``softcap * tanh(score / softcap)`` takes the place of a score; 0 is none.
        deterministic: gradients are summed in a fixed order, too.
        fused: ``"auto"``, ``"always"`` or ``"never"``, as the function has it.
        score_mod: what takes the place of a score.
        mask_mod: whether a query attends to a key.
    """

    sinks: nn.Parameter | None

    @suggesting
    def __init__(
        self, sinks: int | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None, *,
        scale: float = 0.0, causal: bool = False, left: int = -1, right: int = -1, softcap: float = 0.0,
        deterministic: bool = False, fused: str = "auto", score_mod: Function | None = None,
        mask_mod: Function | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scale, self.causal, self.left, self.right, self.softcap = scale, causal, left, right, softcap
        self.deterministic, self.fused, self.score_mod, self.mask_mod = deterministic, fused, score_mod, mask_mod
        self._learn("sinks", sinks, device, dtype)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, captured: Sequence[Any] | Mapping[str, Any] = (),
        cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return attention(
            q, k, v, self.sinks, self.scale, self.causal, self.left, self.right, self.softcap, self.deterministic,
            fused=self.fused, score_mod=self.score_mod, mask_mod=self.mask_mod, captured=captured,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        )  # fmt: skip

    def extra_repr(self) -> str:
        options = {name: getattr(self, name) for name in self.layer.options}
        said = {name: getattr(value, "__name__", value) for name, value in options.items()}
        sinks = "" if self.sinks is None else f"sinks={self.sinks.shape[0]}"
        changed = [f"{name}={value}" for name, value in said.items() if value not in _DEFAULTS]
        return ", ".join([*filter(None, [sinks]), *changed])


_DEFAULTS = (0.0, -1, "auto", None)
