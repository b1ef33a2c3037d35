"""The loops of ``linear_cross_entropy``: loss and gradients of one chunk of rows after another.

The logits of a chunk are a matrix product. Our kernel computes their loss and overwrites them with their gradient,
from which two more products compute the gradients of the hidden states and of the weight.

Where ranks share the classes (:class:`cute_ops_torch.distributed.split.Slice`), each computes the logits of its own
classes; ranks exchange the losses of a chunk's rows between forward and gradient. Gradients of the hidden states are
then terms of a sum over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from cute_ops.composite import chunks
from cute_ops.op import Op
from cute_ops.ops.reduction.cross_entropy import cross_entropy
from cute_ops_torch.distributed.split import Slice, run_on_slice
from cute_ops_torch.library.inplace import inplace_gradient
from cute_ops_torch.registry import family

Tensor = torch.Tensor

# The dispatcher leaves out trailing arguments that equal the schema's defaults, so these functions have them too.


def rows(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, accum_dtype: torch.dtype | None = None,
    part: Sequence[int] = (), group: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss of each row, and the two parts of its log-sum-exp. ``accum_dtype`` is for the backward."""
    h, t, own = *_flatten(hidden, target), Slice.of(part, group)
    logits, kernels = _Logits(h, weight, bias), _Kernels((ignore_index, label_smoothing, z_loss), own)
    loss, row_max, log_sum = (h.new_empty(t.shape, dtype=torch.float32) for _ in range(3))
    for at in _slices(h, weight, own):
        loss[at], row_max[at], log_sum[at] = kernels.forward(logits.compute(at), t[at])
    return loss.view(target.shape), row_max.view(target.shape), log_sum.view(target.shape)


def rows_bwd(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, row_max: Tensor, log_sum: Tensor,
    dloss: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    accum_dtype: torch.dtype | None = None, wanted: Sequence[bool] = (), part: Sequence[int] = (), group: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of hidden, weight and bias for a cotangent of each row's loss, from logits computed again."""
    h, t, own = *_flatten(hidden, target), Slice.of(part, group)
    plan = Plan.of(h, weight, wanted, accum_dtype, own)
    gradients = Gradients(h, weight, bias, wanted, plan)
    logits = _Logits(h, weight, bias, gradients.spare)
    kernels = _Kernels((ignore_index, label_smoothing, z_loss), own)
    m, s, d = (row.reshape(-1) for row in (row_max, log_sum, dloss))
    for at in plan.slices:
        gradients.add(at, kernels.gradient(logits.compute(at), t[at], (m[at], s[at]), d[at]))
    return gradients.results(hidden.shape)


def step(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, accum_dtype: torch.dtype | None = None,
    reduction: str = "mean", wanted: Sequence[bool] = (),
    count: Tensor | None = None, part: Sequence[int] = (), group: str = "", chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The reduced loss, and its gradients of hidden, weight and bias.

    ``count`` is the number of rows that a mean is over, if not the number of those here that are not ignored.
    """
    h, t, own = *_flatten(hidden, target), Slice.of(part, group)
    plan = Plan.of(h, weight, wanted, accum_dtype, own, chunk_rows, share=True)
    gradients = Gradients(h, weight, bias, wanted, plan)
    logits = _Logits(h, weight, bias, gradients.spare)
    kernels = _Kernels((ignore_index, label_smoothing, z_loss), own)
    loss = h.new_empty(t.shape, dtype=torch.float32)
    factor = torch.ones((), dtype=torch.float32, device=h.device)
    if reduction == "mean":
        factor = factor / ((t != ignore_index).sum() if count is None else count)
    for at in plan.slices:
        gradients.add(at, kernels.step(logits.compute(at), t[at], factor.expand(t[at].shape), loss[at]))
    return loss.sum() * factor, *gradients.results(hidden.shape)


def _flatten(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)


class _Kernels:
    """The cross entropy of one chunk's logits, over all classes; this rank has a slice of them, or all."""

    def __init__(self, attrs: Sequence[float], own: Slice | None) -> None:
        self.attrs, self.own = dict(zip(cross_entropy.attrs, (*attrs, 0), strict=True)), own

    def forward(self, logits: Tensor, target: Tensor) -> list[Tensor]:
        """Loss, and the log-sum-exp in two parts."""
        return self._run(cross_entropy, torch.ops.cute.cross_entropy, logits, target)

    def gradient(self, logits: Tensor, target: Tensor, lse: Sequence[Tensor], dloss: Tensor) -> Tensor:
        """The gradient of the logits, in their memory."""
        op, run, into = family("cute", "cross_entropy_bwd")
        return self._run(op, inplace_gradient(op, run, into), logits, target, *lse, dloss)[0]

    def step(self, logits: Tensor, target: Tensor, dloss: Tensor, loss: Tensor) -> Tensor:
        """The gradient of the logits, in their memory; writes ``loss``."""
        if self.own:
            found, *lse = self.forward(logits, target)
            loss.copy_(found)
            return self.gradient(logits, target, lse, dloss)
        op, run, into = family("cute", "cross_entropy_step")
        attrs = [self.attrs[name] for name in op.attrs]
        if logits.is_cuda and not (logits.data_ptr() | loss.data_ptr()) % 16:
            into(logits, target, dloss, *attrs, logits, loss)
            return logits
        dlogits, found = run(logits, target, dloss, *attrs)
        loss.copy_(found)
        return logits.copy_(dlogits)

    def _run(self, op: Op, call: Callable[..., Any], *inputs: Tensor) -> list[Tensor]:
        if self.own:
            return run_on_slice(op, call, dict(zip(op.inputs, inputs, strict=True)), self.attrs, self.own)
        raw = call(*inputs, *self.attrs.values())
        return list(raw) if isinstance(raw, tuple) else [raw]


class _Logits:
    """Logits of one chunk after another, in the same memory: at the end of ``memory``, where that is given."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, memory: Tensor | None = None) -> None:
        self.hidden, self.weight, self.bias, self.memory = hidden, weight, bias, memory

    def compute(self, at: slice) -> Tensor:
        shape = at.stop - at.start, self.weight.shape[0]
        if self.memory is None:
            self.memory = self.hidden.new_empty(shape).view(-1)
        start = (self.memory.numel() - math.prod(shape)) // chunks.TILE * chunks.TILE
        logits = self.memory[start : start + math.prod(shape)].view(shape)
        if self.bias is None:
            return torch.mm(self.hidden[at], self.weight.t(), out=logits)
        return torch.addmm(self.bias, self.hidden[at], self.weight.t(), out=logits)


class Plan(NamedTuple):
    """Chunks, and the memory that their logits share.

    Attributes:
        slices: the rows of each chunk.
        shared: elements of an array that holds the gradient of the hidden states and the logits; 0: no such array.
        sums_apart: whether the weight's gradient is summed in a float32 tensor of its own and rounded at the end. Until
            then logits may take its place.
    """

    slices: Sequence[slice]
    shared: int
    sums_apart: bool

    @classmethod
    def of(
        cls, hidden: Tensor, weight: Tensor, wanted: Sequence[bool], accum_dtype: torch.dtype | None,
        own: Slice | None = None, chunk_rows: int | None = None, share: bool = False,
    ) -> Plan:  # fmt: skip
        """``share``: whether the gradient of the hidden states may share an array with the logits."""
        apart = wanted[1] and (accum_dtype or torch.float32) != weight.dtype
        shared, slices = 0, _slices(hidden, weight, own, chunk_rows)
        if chunk_rows is None and own is None and share and wanted[0]:
            shared, slices = chunks.plan_shared(*_sizes(hidden, weight))
        size = chunks.rows_in_weight(*hidden.shape) if apart and chunk_rows is None else 0
        if size and -(-hidden.shape[0] // size) <= len(slices):
            shared, slices = 0, _slices(hidden, weight, own, size)
        return cls(slices, shared, apart and len(slices) > 1)


def _slices(hidden: Tensor, weight: Tensor, own: Slice | None, size: int | None = None) -> Sequence[slice]:
    count, size = hidden.shape[0], size or chunks.rows_per_chunk(*_sizes(hidden, weight, own))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _sizes(hidden: Tensor, weight: Tensor, own: Slice | None = None) -> tuple[int, int, int, int]:
    # The first rank's slice, the largest: all ranks must have the same chunks.
    return hidden.shape[0], hidden.shape[1], own.most if own else weight.shape[0], hidden.dtype.itemsize


class Gradients:
    """Sums the gradients of the inputs over the chunks.

    Attributes:
        spare: memory for logits until :meth:`results`; None where there is none.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool], plan: Plan) -> None:
        self.hidden, self.weight = hidden, weight
        self.spare = hidden.new_empty(plan.shared) if plan.shared else None
        shared = hidden.new_empty(hidden.shape) if self.spare is None else self.spare[: hidden.numel()]
        self.dhidden = shared.view(hidden.shape) if wanted[0] else None
        self.dweight = torch.empty_like(weight) if wanted[1] else None
        self.total = self.dweight
        if plan.sums_apart and self.dweight is not None:
            self.total = torch.empty_like(weight, dtype=torch.float32)
            if self.spare is None and max(s.stop - s.start for s in plan.slices) <= weight.shape[1]:
                self.spare = self.dweight.as_strided((weight.numel(),), (1,))
        # Summed over rows in float32, rounded once at the end.
        self.dbias = None if bias is None or not wanted[2] else torch.zeros_like(bias, dtype=torch.float32)
        if hidden.shape[0] == 0 and self.dweight is not None:
            self.dweight.zero_()

    def add(self, at: slice, dlogits: Tensor) -> None:
        if self.dhidden is not None:
            torch.mm(dlogits, self.weight, out=self.dhidden[at])
        if self.total is not None:
            _add_product(self.total, dlogits.t(), self.hidden[at], first=at.start == 0)
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=torch.float32)

    def results(self, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of hidden, weight and bias; empty where not wanted."""
        none = self.hidden.new_empty((0,))
        dhidden = none if self.dhidden is None else self.dhidden.view(shape)
        # Outputs of an op must not share memory, so each absent one is an empty tensor of its own.
        dweight = none.clone() if self.dweight is None else self.dweight
        if self.total is not None and self.total is not self.dweight:
            dweight.copy_(self.total)
        return dhidden, dweight, none.clone() if self.dbias is None else self.dbias.to(self.hidden.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """``total += a @ b``, rounded to the dtype of ``total`` only; the first product overwrites it."""
    if total.dtype == a.dtype:
        torch.mm(a, b, out=total) if first else total.addmm_(a, b)
    elif total.is_cuda:
        wide: dict[str, Any] = {"out_dtype": total.dtype, "out": total}
        torch.mm(a, b, **wide) if first else torch.addmm(total, a, b, **wide)
    else:  # `out_dtype` is for CUDA only
        product = a.to(total.dtype) @ b.to(total.dtype)
        total.copy_(product) if first else total.add_(product)
