"""Cross entropy of a linear layer's output that never holds all logits.

Rows go in chunks: their logits by a matrix product, the loss and, in the logits' own memory, their gradient by our
kernel, the gradients of the inputs by two more products. So the gradients are there when the forward is over, and the
backward scales them. With ``reduction="none"`` each row's gradient has a factor of its own, which the
weight's gradient cannot be given afterwards: there the backward makes the logits again. So it does in float16, whose
gradients are nothing unless the loss is scaled: what has underflown, no factor brings back.

Where ranks share the classes, each makes the logits of its own ones, and what they say of a chunk's rows is exchanged
between forward and gradient: :class:`Slice`. Gradients of the hidden states then are parts of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from cute_ops.composite import chunks
from cute_ops.composite.docstrings import continued
from cute_ops.composite.linear_cross_entropy import DOC, check, check_chunk_rows
from cute_ops.errors import message
from cute_ops.op import Op, Sharding
from cute_ops.op import Tensor as Declared
from cute_ops.ops.reduction.cross_entropy import cross_entropy, cross_entropy_bwd
from cute_ops_torch.composite import transforms
from cute_ops_torch.distributed.split import Slice, run_on_slice
from cute_ops_torch.host.function import EXACT, watched
from cute_ops_torch.library.autograd import inplace_gradient, once, refuse_tangents
from cute_ops_torch.library.reference import register_fake
from cute_ops_torch.library.register import family
from cute_ops_torch.library.tensors import arrays

Tensor = torch.Tensor
library = torch.library.Library("cute", "FRAGMENT")
_ATTRS = "int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0"
_ACCUM = "ScalarType? accum_dtype=None"
_INPUTS = "Tensor hidden, Tensor weight, Tensor target, Tensor? bias"
# This rank's slice of the classes, as `Slice`; none where all are here.
_SLICE = "int[] part=[], str group=''"


@continued(DOC)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_rows: int | None = None,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:
    """Cross entropy of ``hidden @ weight.T + bias``, without ever holding all logits.

    ``logits = hidden @ weight.T + bias``, rounded to the dtype of hidden; the rest as :func:`cross_entropy`.

    Deterministic where the framework's matrix products are. ``chunk_rows`` is a hint for training outside of
    ``torch.compile``: where None, as few as lose little time; up to about 4096, more of them are faster.

    Memory, beyond inputs and gradients, at 16384 x 2048 x 128256 in bfloat16: 1.05 GB for the weight's gradient in
    float32; the logits of a chunk of 2048 rows lie where that goes at last. With ``accum_dtype=torch.bfloat16``: 0.13
    GB.
    """
    arguments = (hidden, weight, target, bias, ignore_index, label_smoothing, z_loss, reduction, accum_dtype)
    check_chunk_rows("linear_cross_entropy", chunk_rows)
    wanted = _wanted(hidden, weight, bias)
    if not torch.compiler.is_compiling() and transforms.active((hidden, weight, target, bias)):
        _check(*arguments[:4], reduction, accum_dtype)
        step, rows = transforms.step, transforms.rows
        return _reduced(step, rows, arguments[:4], (*arguments[4:7], accum_dtype), reduction, wanted)
    if (
        torch.compiler.is_compiling()
        or watched()
        or any(type(t) not in EXACT for t in (hidden, weight, target, bias) if t is not None)
        or reduction == "none"
        or hidden.dtype == torch.float16
        or not any(wanted)
    ):
        return torch.ops.cute.linear_cross_entropy(*arguments)
    _check(*arguments[:4], reduction, accum_dtype)
    return _Direct.apply(*arguments, wanted, chunk_rows)


def composite(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean", accum_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """``torch.ops.cute.linear_cross_entropy``, of ops that are no compositions."""
    _check(hidden, weight, target, bias, reduction, accum_dtype)
    tensors = hidden, weight, target, bias
    if forward_ad._current_level >= 0:
        refuse_tangents(ROWS, tensors)
    if transforms.differentiated(tensors):
        problem = (
            "gradients of torch.func are those of the function, cute_ops_torch.linear_cross_entropy, not of the op."
        )
        raise NotImplementedError(message(ROWS, problem, arrays(ROWS, tensors)))
    wanted = _wanted(hidden, weight, bias)
    ops, attrs = torch.ops.cute, (ignore_index, label_smoothing, z_loss, accum_dtype)
    return _reduced(ops.linear_cross_entropy_step, ops.linear_cross_entropy_rows, tensors, attrs, reduction, wanted)


def _check(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, reduction: str, accum_dtype: Any
) -> None:
    arrays = hidden, weight, target, bias
    check("linear_cross_entropy", *arrays, reduction, accum_dtype=accum_dtype, float32=torch.float32)


def _wanted(*inputs: Tensor | None) -> list[bool]:
    """Which of them get gradients."""
    return [torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs]


def _reduced(
    step: Any, rows: Any, tensors: Sequence[Tensor | None], attrs: Sequence[Any], reduction: str, wanted: Sequence[bool]
) -> Tensor:
    """The loss by one of two ops: with the gradients that are wanted, or of each row."""
    if reduction != "none" and any(wanted) and tensors[0].dtype != torch.float16:  # type: ignore[union-attr]
        return step(*tensors, *attrs, reduction, wanted)[0]  # type: ignore[no-any-return]
    loss: Tensor = rows(*tensors, *attrs)[0]
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (tensors[2] != attrs[0]).sum()


class _Direct(torch.autograd.Function):
    """The same past the dispatcher, where gradients can be scaled in their own memory."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *given, reduction, accum_dtype, wanted, chunk_rows = arguments
        step: Any = _step
        loss, *gradients = step(*given, accum_dtype, reduction, wanted, chunk_rows=chunk_rows)
        ctx.wanted = wanted
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once("linear_cross_entropy")
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        (dloss,) = cotangents
        # No second buffer of the weight's size, unless another backward is to come.
        keep = torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
        scale = _scale if keep else _scale_
        found = [scale(g, dloss) if w else None for g, w in zip(ctx.saved_tensors, ctx.wanted, strict=True)]
        return found[0], found[1], None, found[2], *[None] * 7


# --- chunks --------------------------------------------------------------------------------------------------------


def _sizes(hidden: Tensor, weight: Tensor, own: Slice | None = None) -> tuple[int, int, int, int]:
    # All ranks must cut alike, whatever their own slices of the classes are.
    return *hidden.shape, own.most if own else weight.shape[0], hidden.dtype.itemsize  # type: ignore[return-value]


def _slices(hidden: Tensor, weight: Tensor, own: Slice | None, size: int | None = None) -> Sequence[slice]:
    rows, size = hidden.shape[0], size or chunks.rows_per_chunk(*_sizes(hidden, weight, own))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


class _Losses:
    """Loss, lse and gradient of a chunk's logits, of a slice of the classes or of all."""

    def __init__(self, attrs: Sequence[Any], own: Slice | None) -> None:
        self.attrs, self.own = dict(zip(cross_entropy.attrs, (*attrs[:3], 0), strict=True)), own

    def forward(self, logits: Tensor, target: Tensor) -> list[Tensor]:
        """Loss, and the lse in two parts, over all classes."""
        return self._run(cross_entropy, torch.ops.cute.cross_entropy, logits, target)

    def gradient(self, logits: Tensor, target: Tensor, lse: Sequence[Tensor], dloss: Tensor) -> Tensor:
        """Over the logits."""
        grad, gradient, into = family("cute", "cross_entropy_bwd")
        return self._run(grad, inplace_gradient(grad, gradient, into), logits, target, *lse, dloss)[0]

    def both(self, logits: Tensor, target: Tensor, dloss: Tensor, loss: Tensor) -> Tensor:
        """The gradient, over the logits; fills the losses."""
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

    def _run(self, op: Op, call: Any, *inputs: Tensor) -> list[Tensor]:
        if self.own:
            return run_on_slice(op, call, dict(zip(op.inputs, inputs, strict=True)), self.attrs, self.own)
        raw = call(*inputs, *self.attrs.values())
        return list(raw) if isinstance(raw, tuple) else [raw]


class _Logits:
    """The logits of one chunk after another, in the same memory: the end of an array, where one is given."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, memory: Tensor | None = None) -> None:
        self.hidden, self.weight, self.bias, self.memory = hidden, weight, bias, memory

    def __getitem__(self, at: slice) -> Tensor:
        shape = at.stop - at.start, self.weight.shape[0]
        if self.memory is None:
            self.memory = self.hidden.new_empty(shape).view(-1)
        start = (self.memory.numel() - math.prod(shape)) // chunks.TILE * chunks.TILE
        logits = self.memory[start : start + math.prod(shape)].view(shape)
        if self.bias is None:
            return torch.mm(self.hidden[at], self.weight.t(), out=logits)
        return torch.addmm(self.bias, self.hidden[at], self.weight.t(), out=logits)


class _Plan(NamedTuple):
    """How the gradients come about.

    Attributes:
        slices: the rows of each chunk.
        room: elements of the array that the gradient of the hidden states shares with the logits; 0: none.
        apart: whether the weight's gradient is summed in float32 and rounded to its place in the end, where meanwhile
            logits may lie.
    """

    slices: Sequence[slice]
    room: int
    apart: bool

    @classmethod
    def of(
        cls, hidden: Tensor, weight: Tensor, wanted: Sequence[bool], accum_dtype: torch.dtype | None,
        own: Slice | None = None, chunk_rows: int | None = None, share: bool = False,
    ) -> _Plan:  # fmt: skip
        """``share``: where nothing else is asked for, the gradient of the hidden states may share its memory."""
        apart = wanted[1] and (accum_dtype or torch.float32) != weight.dtype
        room, slices = 0, _slices(hidden, weight, own, chunk_rows)
        if chunk_rows is None and own is None and share and wanted[0]:
            room, slices = chunks.shared(*_sizes(hidden, weight))
        beside = chunks.beside_weight(*hidden.shape) if apart and chunk_rows is None else 0
        if beside and -(-hidden.shape[0] // beside) <= len(slices):
            room, slices = 0, _slices(hidden, weight, own, beside)
        return cls(slices, room, apart and len(slices) > 1)


class _Gradients:
    """Gradients of the inputs, chunk after chunk.

    Attributes:
        spare: memory for logits until :meth:`results`, if there is some.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool], plan: _Plan
    ) -> None:
        self.hidden, self.weight, self.empty = hidden, weight, hidden.shape[0] == 0
        self.spare = hidden.new_empty(plan.room) if plan.room else None
        shared = hidden.new_empty(hidden.shape) if self.spare is None else self.spare[: hidden.numel()]
        self.dhidden = shared.view(hidden.shape) if wanted[0] else None
        self.dweight = torch.empty_like(weight) if wanted[1] else None
        self.total = self.dweight
        if plan.apart and self.dweight is not None:
            self.total = torch.empty_like(weight, dtype=torch.float32)
            if self.spare is None and max(s.stop - s.start for s in plan.slices) <= weight.shape[1]:
                self.spare = self.dweight.as_strided((weight.numel(),), (1,))
        # A sum over rows, one rounding at the end.
        self.dbias = None if bias is None or not wanted[2] else torch.zeros_like(bias, dtype=torch.float32)
        if self.empty and self.dweight is not None:
            self.dweight.zero_()

    def add(self, at: slice, dlogits: Tensor) -> None:
        if self.dhidden is not None:
            torch.mm(dlogits, self.weight, out=self.dhidden[at])
        if self.total is not None:
            _add_product(self.total, dlogits.t(), self.hidden[at], first=at.start == 0)
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=torch.float32)

    def results(self, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
        none = self.hidden.new_empty((0,))
        dhidden = none if self.dhidden is None else self.dhidden.view(shape)
        # Outputs of an op share no memory, so each absent one is an empty tensor of its own.
        dweight = none.clone() if self.dweight is None else self.dweight
        if self.total is not None and self.total is not self.dweight:
            dweight.copy_(self.total)
        return dhidden, dweight, none.clone() if self.dbias is None else self.dbias.to(self.hidden.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """``total += a @ b`` in the dtype of the total, in the product's epilogue; the first one overwrites it."""
    if total.dtype == a.dtype:
        torch.mm(a, b, out=total) if first else total.addmm_(a, b)
    elif total.is_cuda:
        wide: dict[str, Any] = {"out_dtype": total.dtype, "out": total}
        torch.mm(a, b, **wide) if first else torch.addmm(total, a, b, **wide)
    else:  # torch has those for CUDA alone
        product = a.to(total.dtype) @ b.to(total.dtype)
        total.copy_(product) if first else total.add_(product)


def _flat(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)


# The dispatcher leaves out trailing arguments that equal the schema's defaults.


def _rows(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, accum_dtype: torch.dtype | None = None,
    part: Sequence[int] = (), group: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Loss of each row, and its lse in two parts. ``accum_dtype`` is for the backward."""
    attrs = (ignore_index, label_smoothing, z_loss)
    h, t = _flat(hidden, target)
    own = Slice.of(part, group)
    logits, losses = _Logits(h, weight, bias), _Losses(attrs, own)
    loss, row_max, log_sum = (h.new_empty(t.shape, dtype=torch.float32) for _ in range(3))
    for at in _slices(h, weight, own):
        loss[at], row_max[at], log_sum[at] = losses.forward(logits[at], t[at])
    return loss.view(target.shape), row_max.view(target.shape), log_sum.view(target.shape)


def _rows_bwd(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, row_max: Tensor, log_sum: Tensor,
    dloss: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    accum_dtype: torch.dtype | None = None, wanted: Sequence[bool] = (), part: Sequence[int] = (), group: str = "",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients for a cotangent of each row's loss; the logits are made again."""
    attrs = (ignore_index, label_smoothing, z_loss)
    h, t = _flat(hidden, target)
    own = Slice.of(part, group)
    plan = _Plan.of(h, weight, wanted, accum_dtype, own)
    gradients = _Gradients(h, weight, bias, wanted, plan)
    logits, losses = _Logits(h, weight, bias, gradients.spare), _Losses(attrs, own)
    m, s, d = (row.reshape(-1) for row in (row_max, log_sum, dloss))
    for at in plan.slices:
        gradients.add(at, losses.gradient(logits[at], t[at], (m[at], s[at]), d[at]))
    return gradients.results(hidden.shape)


def _step(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, accum_dtype: torch.dtype | None = None,
    reduction: str = "mean", wanted: Sequence[bool] = (),
    count: Tensor | None = None, part: Sequence[int] = (), group: str = "", chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The reduced loss and its gradients, together. ``count``: how many rows a mean is over, if not those here."""
    attrs = (ignore_index, label_smoothing, z_loss)
    h, t = _flat(hidden, target)
    own = Slice.of(part, group)
    plan = _Plan.of(h, weight, wanted, accum_dtype, own, chunk_rows, share=True)
    gradients = _Gradients(h, weight, bias, wanted, plan)
    logits, losses = _Logits(h, weight, bias, gradients.spare), _Losses(attrs, own)
    each = h.new_empty(t.shape, dtype=torch.float32)
    share = torch.ones((), dtype=torch.float32, device=h.device)
    if reduction == "mean":
        share = share / ((t != ignore_index).sum() if count is None else count)
    for at in plan.slices:
        gradients.add(at, losses.both(logits[at], t[at], share.expand(t[at].shape), each[at]))
    return each.sum() * share, *gradients.results(hidden.shape)


# --- registration --------------------------------------------------------------------------------------------------


def _fake_rows(hidden: Tensor, weight: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(target.new_empty(target.shape, dtype=torch.float32) for _ in range(3))  # type: ignore[return-value]


def _fake_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    none = [hidden.new_empty((0,)) for _ in wanted]
    dbias = none[2] if bias is None else hidden.new_empty(bias.shape)
    like = zip((hidden.new_empty(hidden.shape), torch.empty_like(weight), dbias), none, wanted, strict=True)
    return tuple(there if w else absent for there, absent, w in like)  # type: ignore[return-value]


def _fake_rows_bwd(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_gradients(args[0], args[1], args[3], args[11])


def _fake_step(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return args[0].new_empty((), dtype=torch.float32), *_fake_gradients(args[0], args[1], args[3], args[9])


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, weight, target, bias, *ctx.attrs, ctx.part, ctx.group = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, target, bias, *output[1:])


@once("linear_cross_entropy")
def _backward_rows(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dloss is None:
        return (None,) * 10
    hidden, weight, target, bias, row_max, log_sum = ctx.saved_tensors
    needed = ctx.needs_input_grad
    wanted = [needed[0], needed[1], needed[3]]
    found = torch.ops.cute.linear_cross_entropy_rows_bwd(
        hidden, weight, target, bias, row_max, log_sum, dloss.contiguous(), *ctx.attrs, wanted, ctx.part, ctx.group
    )
    dhidden, dweight, dbias = (g if w else None for g, w in zip(found, wanted, strict=True))
    return dhidden, dweight, None, dbias, *[None] * 6


def _save_step(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.wanted = inputs[-4]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # or they would be zeros of the gradients' size
    ctx.save_for_backward(*output[1:])


@once("linear_cross_entropy")
def _backward_step(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dloss is None:
        return (None,) * 13
    pairs = zip(ctx.saved_tensors, ctx.wanted, strict=True)
    scale = torch.ops.cute.linear_cross_entropy_scale
    dhidden, dweight, dbias = (scale(g, dloss) if w else None for g, w in pairs)
    return dhidden, dweight, None, dbias, *[None] * 9


def _scale(gradient: Tensor, dloss: Tensor) -> Tensor:
    """The product in float32, rounded once."""
    line = _line(gradient)
    if line is None:
        return (gradient.float() * dloss).to(gradient.dtype)
    _, run, _ = family("cute", "scale")
    return run(line, dloss.view(1)).as_strided(gradient.shape, gradient.stride())  # type: ignore[no-any-return]


def _scale_(gradient: Tensor, dloss: Tensor) -> Tensor:
    """The same in place: no more than a launch where dloss is one, which only the device needs to know."""
    line = _line(gradient)
    if line is None or type(dloss) not in EXACT:
        return gradient.copy_(_scale(gradient, dloss))
    inplace_gradient(*family("cute", "scale"))(line, dloss.view(1))
    return gradient


def _line(tensor: Tensor) -> Tensor | None:
    """The elements as one row, in the order of memory, None where that has gaps: one kernel for every shape."""
    ordered = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    return ordered.view(1, -1) if ordered.is_contiguous() else None


def _fake_scale(gradient: Tensor, dloss: Tensor) -> Tensor:
    return torch.empty_like(gradient)


# What sharding needs to know of the ops above: the dims of their arrays.
_ARRAYS = {"hidden": Declared("*m h", "T"), "weight": Declared("n h", "T"), "target": Declared("*m", "I")}
_BIAS = {"bias": Declared("n", "T", optional=True)}
ROWS = Op(
    "linear_cross_entropy", inputs={**_ARRAYS, **_BIAS}, outputs=cross_entropy.outputs, dtypes=cross_entropy.dtypes,
    static=(), sharding=Sharding(split=cross_entropy.split), reference=_rows, kernel=cross_entropy.kernel,
)  # fmt: skip
GRADIENTS = Op(
    "linear_cross_entropy",
    inputs={
        **_ARRAYS, **_BIAS,
        **{name: Declared("*m", "float32", optional=True) for name in ("row_max", "log_sum", "dloss")},
    },
    outputs={"dhidden": _ARRAYS["hidden"], "dweight": _ARRAYS["weight"], "dbias": Declared("n", "T", given="bias")},
    dtypes=cross_entropy.dtypes, static=(), sharding=Sharding(split=cross_entropy_bwd.split), reference=_rows_bwd,
    kernel=cross_entropy_bwd.kernel,
)  # fmt: skip


def _register() -> None:
    library.define(f"linear_cross_entropy({_INPUTS}=None, {_ATTRS}, str reduction='mean', {_ACCUM}) -> Tensor")
    library.impl("linear_cross_entropy", composite, "CompositeImplicitAutograd")
    inner: dict[str, tuple[str, Any, Any]] = {
        "linear_cross_entropy_rows": (
            f"({_INPUTS}, {_ATTRS}, {_ACCUM}, {_SLICE}) -> (Tensor, Tensor, Tensor)",
            _rows,
            _fake_rows,
        ),
        "linear_cross_entropy_rows_bwd": (
            f"({_INPUTS}, Tensor row_max, Tensor log_sum, Tensor dloss, {_ATTRS}, {_ACCUM}, bool[] wanted=[], "
            f"{_SLICE}) -> (Tensor, Tensor, Tensor)",
            _rows_bwd,
            _fake_rows_bwd,
        ),
        "linear_cross_entropy_step": (
            f"({_INPUTS}, {_ATTRS}, {_ACCUM}, str reduction='mean', bool[] wanted=[], Tensor? count=None, {_SLICE}) "
            "-> (Tensor, Tensor, Tensor, Tensor)",
            _step,
            _fake_step,
        ),
        # An op, so that the gradients' layout on several devices stays as it is.
        "linear_cross_entropy_scale": ("(Tensor gradient, Tensor dloss) -> Tensor", _scale, _fake_scale),
    }
    for name, (schema, implementation, fake) in inner.items():
        # A weight's gradient has its strides, whatever these are.
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
        library.impl(name, implementation, "CompositeExplicitAutograd")
        register_fake(library, name, fake)
    for name, save, backward in (
        ("linear_cross_entropy_rows", _save_rows, _backward_rows),
        ("linear_cross_entropy_step", _save_step, _backward_step),
    ):
        torch.library.register_autograd(f"cute::{name}", backward, setup_context=save, lib=library)


_register()
