"""What the loops of ``linear_cross_entropy`` (:mod:`cute_ops.composite.loss_loops`) are made of in torch.

Arrays are written in place: the logits of all chunks lie in one place, each sum of gradients in another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from cute_ops.composite import chunks, loss_loops
from cute_ops.op import Op
from cute_ops.ops.reduction.cross_entropy import cross_entropy
from cute_ops_torch.distributed.split import Slice, run_on_slice
from cute_ops_torch.library.inplace import donated, overwriting
from cute_ops_torch.registry import family

Tensor = torch.Tensor
State = TypeVar("State")
_NOTHING: Mapping[str, Tensor] = {}

# The dispatcher leaves out trailing arguments that equal the schema's defaults, so these functions have them too.


def rows(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, accum_dtype: torch.dtype | None = None,
    part: Sequence[int] = (), group: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss of each row, and the two parts of its log-sum-exp. ``accum_dtype`` is for the backward."""
    inputs, own = _flattened(hidden, weight, bias, target=target), Slice.of(part, group)
    plan = Plan(_slices(inputs["hidden"], weight, own), own)
    found = loss_loops.rows(Chunks(inputs, (ignore_index, label_smoothing, z_loss), plan))
    loss, row_max, log_sum = (found[name].view(target.shape) for name in cross_entropy.outputs)
    return loss, row_max, log_sum


def rows_bwd(
    hidden: Tensor, weight: Tensor, target: Tensor, row_max: Tensor, log_sum: Tensor, dloss: Tensor,
    bias: Tensor | None, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    accum_dtype: torch.dtype | None = None, wanted: Sequence[bool] = (), part: Sequence[int] = (), group: str = "",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of hidden, weight and bias for a cotangent of each row's loss, from logits computed again."""
    inputs = _flattened(hidden, weight, bias, target=target, row_max=row_max, log_sum=log_sum, dloss=dloss)
    plan = Plan.of(inputs["hidden"], weight, wanted, accum_dtype, Slice.of(part, group))
    found = loss_loops.rows_bwd(Chunks(inputs, (ignore_index, label_smoothing, z_loss), plan, wanted))
    return _gradients(hidden, found)


def step(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, accum_dtype: torch.dtype | None = None,
    reduction: str = "mean", wanted: Sequence[bool] = (),
    count: Tensor | None = None, part: Sequence[int] = (), group: str = "", chunk_rows: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The reduced loss, and its gradients of hidden, weight and bias.

    ``count`` is the number of rows that a mean is over, if not the number of those here that are not ignored.
    """
    inputs = _flattened(hidden, weight, bias, target=target)
    plan = Plan.of(inputs["hidden"], weight, wanted, accum_dtype, Slice.of(part, group), chunk_rows, share=True)
    factor = torch.ones((), dtype=torch.float32, device=hidden.device)
    if reduction == "mean":
        factor = factor / ((target != ignore_index).sum() if count is None else count)
    inputs["dloss"] = factor.expand(inputs["target"].shape)
    found = loss_loops.step(Chunks(inputs, (ignore_index, label_smoothing, z_loss), plan, wanted))
    return found["loss"].sum() * factor, *_gradients(hidden, found)


def _flattened(hidden: Tensor, weight: Tensor, bias: Tensor | None, **of_rows: Tensor) -> dict[str, Any]:
    flat = {name: each.reshape(-1) for name, each in of_rows.items()}
    return {"hidden": hidden.reshape(-1, hidden.shape[-1]), "weight": weight, "bias": bias, **flat}


def _gradients(hidden: Tensor, found: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The gradients; empty where not wanted. Outputs of an op must not share memory: each of these is a new one."""
    shapes = {"dhidden": hidden.shape}
    return tuple(
        g.view(shapes.get(name, g.shape)) if (g := found.get(name)) is not None else hidden.new_empty((0,))
        for name in loss_loops.GRADIENTS
    )


class Chunks:
    """The chunks of a call: :class:`cute_ops.composite.loss_loops.Chunks`.

    Args:
        inputs: of the loop, by name.
        attrs: ``ignore_index``, ``label_smoothing`` and ``z_loss``.
        plan: where chunks are, and their memory.
        wanted: whether gradients of hidden, weight and bias are.
    """

    def __init__(
        self, inputs: Mapping[str, Any], attrs: Sequence[float], plan: Plan, wanted: Sequence[bool] = (False,) * 3
    ) -> None:
        self.inputs, self.plan, self.classes_shared = inputs, plan, plan.own is not None
        self.attrs = dict(zip(cross_entropy.attrs, (*attrs, 0), strict=True))
        self.hidden: Tensor = inputs["hidden"]
        self.weight: Tensor = inputs["weight"]
        self.bias: Tensor | None = inputs["bias"]
        self.gradients = Gradients(self.hidden, self.weight, self.bias, wanted, plan)
        self.memory = self.gradients.spare

    def each(self, state: State, body: Callable[[State, Any], State]) -> State:
        for at in self.plan.slices:
            state = body(state, at)
        return state

    def call(
        self, op: Op, inputs: Mapping[str, Tensor], *, inplace: bool = False, into: Mapping[str, Tensor] = _NOTHING
    ) -> dict[str, Tensor]:
        _, run, fill = family("cute", op.name)
        given, attrs = {name: inputs[name] for name in op.inputs}, {name: self.attrs[name] for name in op.attrs}
        if inplace:
            run = overwriting(run, fill, [into.get(*each) for each in zip(op.outputs, donated(op), strict=True)])
        if self.plan.own is not None:
            raw: Any = tuple(run_on_slice(op, run, given, attrs, self.plan.own))
        else:
            raw = run(*given.values(), *attrs.values())
        return dict(zip(op.outputs, raw if isinstance(raw, tuple) else (raw,), strict=True))

    def new_rows(self) -> Tensor:
        return self.hidden.new_empty(self.hidden.shape[:1], dtype=torch.float32)

    def cut(self, array: Tensor, at: slice) -> Tensor:
        return array[at]

    def put(self, array: Tensor, at: slice, part: Tensor) -> Tensor:
        if part.data_ptr() != array[at].data_ptr():
            array[at] = part
        return array

    def logits(self, at: slice) -> Tensor:
        """In the same memory for all chunks: at the end of what is spare, where there is any."""
        shape = at.stop - at.start, self.weight.shape[0]
        if self.memory is None:
            self.memory = self.hidden.new_empty(shape).view(-1)
        start = (self.memory.numel() - math.prod(shape)) // chunks.TILE * chunks.TILE
        logits = self.memory[start : start + math.prod(shape)].view(shape)
        if self.bias is None:
            return torch.mm(self.hidden[at], self.weight.t(), out=logits)
        return torch.addmm(self.bias, self.hidden[at], self.weight.t(), out=logits)

    def sums(self) -> dict[str, Tensor]:
        return self.gradients.sums

    def put_product(self, array: Tensor, at: slice, a: Tensor, b: Tensor) -> Tensor:
        torch.mm(a, b, out=array[at])
        return array

    def add_product(self, total: Tensor, at: slice, a: Tensor, b: Tensor) -> Tensor:
        """The first product overwrites the total."""
        first = at.start == 0
        if total.dtype == a.dtype:
            return torch.mm(a, b, out=total) if first else total.addmm_(a, b)
        if total.is_cuda:
            wide: dict[str, Any] = {"out_dtype": total.dtype, "out": total}
            return torch.mm(a, b, **wide) if first else torch.addmm(total, a, b, **wide)
        product = a.to(total.dtype) @ b.to(total.dtype)  # `out_dtype` is for CUDA only
        return total.copy_(product) if first else total.add_(product)

    def add_rows(self, total: Tensor, rows: Tensor) -> Tensor:
        return total.add_(rows.sum(0, dtype=torch.float32))

    def rounded(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {name: total if name == "dweight" else total.to(self.hidden.dtype) for name, total in sums.items()}
        dweight = self.gradients.dweight
        if dweight is not None and dweight is not sums["dweight"]:
            found["dweight"] = dweight.copy_(sums["dweight"])
        return found


class Plan(NamedTuple):
    """Chunks, and the memory that their logits share.

    Attributes:
        slices: the rows of each chunk.
        own: this rank's slice of the classes; None: it has all.
        shared: elements of an array that holds the gradient of the hidden states and the logits; 0: no such array.
        sums_apart: whether the weight's gradient is summed in a float32 tensor of its own and rounded at the end. Until
            then logits may take its place.
    """

    slices: Sequence[slice]
    own: Slice | None
    shared: int = 0
    sums_apart: bool = False

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
        return cls(slices, own, shared, apart and len(slices) > 1)


def _slices(hidden: Tensor, weight: Tensor, own: Slice | None, size: int | None = None) -> Sequence[slice]:
    count, size = hidden.shape[0], size or chunks.rows_per_chunk(*_sizes(hidden, weight, own))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _sizes(hidden: Tensor, weight: Tensor, own: Slice | None = None) -> tuple[int, int, int, int]:
    # The first rank's slice, the largest: all ranks must have the same chunks.
    return hidden.shape[0], hidden.shape[1], own.most if own else weight.shape[0], hidden.dtype.itemsize


class Gradients:
    """The memory of the gradients.

    Attributes:
        sums: those that are wanted, by name.
        dweight: the weight's gradient, where its sum is rounded to; None where it is not wanted.
        spare: memory for logits until then; None where there is none.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool], plan: Plan) -> None:
        self.sums: dict[str, Tensor] = {}
        self.spare = hidden.new_empty(plan.shared) if plan.shared else None
        self.dweight = torch.empty_like(weight) if wanted[1] else None
        if wanted[0]:
            memory = hidden.new_empty(hidden.shape) if self.spare is None else self.spare[: hidden.numel()]
            self.sums["dhidden"] = memory.view(hidden.shape)
        if self.dweight is not None:
            self.sums["dweight"] = self.dweight if hidden.shape[0] else self.dweight.zero_()
            if plan.sums_apart:
                self.sums["dweight"] = torch.empty_like(weight, dtype=torch.float32)
                if self.spare is None and max(s.stop - s.start for s in plan.slices) <= weight.shape[1]:
                    self.spare = self.dweight.as_strided((weight.numel(),), (1,))
        if bias is not None and wanted[2]:
            self.sums["dbias"] = torch.zeros_like(bias, dtype=torch.float32)
