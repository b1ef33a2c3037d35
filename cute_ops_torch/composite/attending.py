"""What torch does with the arrays of :class:`cute_ops.composite.attention.Attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cute_ops.composite.attention import Attention, Function, Given
from cute_ops.declaration.op import Op
from cute_ops.ops.attention.by_call import Captured, op_of_call
from cute_ops_torch.composite.constant import guard, traced, whole
from cute_ops_torch.registry import define

Tensor = torch.Tensor


class TorchAttention(Attention[Tensor]):
    """The attention of tensors."""

    def function(self, op: Op) -> Function:
        return define(op).function

    def array(self, array: Any) -> Tensor:
        if not isinstance(array, Tensor):
            raise TypeError(f"cute.attention: `captured` has a {type(array).__name__}, expected tensors.")
        return array

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, scale: float = 0.0, causal: bool = False,
        left: int = -1, right: int = -1, softcap: float = 0.0, deterministic: bool = False, *,
        fused: str = "auto", score_mod: Function | None = None, mask_mod: Function | None = None,
        captured: Given = (), cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
        out: Sequence[Tensor | None] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        run, arrays = self.call(q, score_mod, mask_mod, captured, (cu_seqlens_q, cu_seqlens_k))
        options = {} if out is None else {"out": out}
        attrs = scale, causal, left, right, softcap, deterministic, fused
        return run(q, k, v, *arrays, sinks, *attrs, **options)  # type: ignore[no-any-return]

    attention.__doc__ = Attention.attention.__doc__

    def chosen(
        self, score_mod: Function | None, mask_mod: Function | None, captured: tuple[Captured, ...], lead: int,
        packed: bool,
    ) -> Function:  # fmt: skip
        if not torch.compiler.is_dynamo_compiling():
            return super().chosen(score_mod, mask_mod, captured, lead, packed)
        functions = [None if function is None else guard(function) for function in (score_mod, mask_mod)]
        return _traced(*functions, tuple([tuple(each) for each in captured]), lead, packed)


def _op(
    score_mod: tuple[str, ...] | None, mask_mod: tuple[str, ...] | None, captured: tuple[Any, ...], lead: int,
    packed: bool,
) -> Op:  # fmt: skip
    score, mask = (None if function is None else whole(function) for function in (score_mod, mask_mod))
    return op_of_call(score, mask, tuple(Captured(*each) for each in captured), lead, packed)


_traced: Callable[..., Function] = traced(_op)
attend = TorchAttention()
