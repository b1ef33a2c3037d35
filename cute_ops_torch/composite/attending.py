"""Torch's functions on the arrays of :class:`cute_ops.composite.attention.Attention`."""

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
        lengths: Tensor | None = None, page_table: Tensor | None = None, k_scale: Tensor | None = None,
        v_scale: Tensor | None = None, out: Sequence[Tensor | None] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        where = cu_seqlens_q, cu_seqlens_k, lengths, page_table, k_scale, v_scale
        run, arrays = self.call(q, score_mod, mask_mod, captured, where)
        options = {} if out is None else {"out": out}
        attrs = scale, causal, left, right, softcap
        if lengths is None:
            return run(q, k, v, *arrays, sinks, *attrs, deterministic, fused, **options)  # type: ignore[no-any-return]
        return run(q, k, v, *arrays, sinks, k_scale, v_scale, *attrs, fused, **options)  # type: ignore[no-any-return]

    attention.__doc__ = Attention.attention.__doc__

    def decode_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, page_table: Tensor | None = None,
        sinks: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None, scale: float = 0.0,
        window: int = 0, softcap: float = 0.0, batch_invariant: bool = False, *, score_mod: Function | None = None,
        captured: Given = (), out: Sequence[Tensor | None] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        run, arrays = self.decoding(score_mod, captured)
        options = {} if out is None else {"out": out}
        attrs = scale, window, softcap, batch_invariant
        return run(q, k_cache, v_cache, lengths, *arrays, page_table, sinks, k_scale, v_scale, *attrs, **options)  # type: ignore[no-any-return]

    decode_attention.__doc__ = Attention.decode_attention.__doc__

    def chosen(
        self, score_mod: Function | None, mask_mod: Function | None, captured: tuple[Captured, ...], lead: int,
        form: str = "attention",
    ) -> Function:  # fmt: skip
        if not torch.compiler.is_dynamo_compiling():
            return super().chosen(score_mod, mask_mod, captured, lead, form)
        functions = [None if function is None else guard(function) for function in (score_mod, mask_mod)]
        return _traced(*functions, tuple([tuple(each) for each in captured]), lead, form)


def _op(
    score_mod: tuple[str, ...] | None, mask_mod: tuple[str, ...] | None, captured: tuple[Any, ...], lead: int,
    form: str,
) -> Op:  # fmt: skip
    score, mask = (None if function is None else whole(function) for function in (score_mod, mask_mod))
    return op_of_call(score, mask, tuple(Captured(*each) for each in captured), lead, form)


_traced: Callable[..., Function] = traced(_op)
attend = TorchAttention()
