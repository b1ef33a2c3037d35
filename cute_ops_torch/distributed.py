"""DTensors: every rank runs the op on its own part, wherever the declaration says that parts can be had.

One rule serves every op. :mod:`cute_ops.factors` says which dims ranks may share; a mesh dim that shards an input along
one of these shards all others alike, and what has no such dim comes whole. Gradients of what rows share come out as
``Partial`` sums. A dim that the declaration splits (the classes of a cross entropy) stays sharded too: ranks exchange
what their parts gave and combine it. Any other sharding is redistributed first.

Importing ``torch.distributed.tensor`` imports this, once ``cute_ops_torch`` is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cute_ops.binding import Binding
from cute_ops.errors import message
from cute_ops.factors import factors
from cute_ops.op import Op
from cute_ops.plan import compact
from cute_ops_torch import registry
from cute_ops_torch.linear_cross_entropy import GRADIENTS, ROWS
from cute_ops_torch.linear_cross_entropy import library as _library
from cute_ops_torch.schema import filler
from cute_ops_torch.slices import Slice, run_on_slice
from cute_ops_torch.tensors import Tensors, bind_tensors, check_strides

Tensor = torch.Tensor


def shard(op: Op, overload: Any, library: torch.library.Library) -> None:
    """Teach an op to take DTensors."""
    fill, arity = filler(op), len(op.inputs)

    def call(*args: Any) -> Any:
        args = fill(args)
        layout = Layout(op, args[:arity], args[arity:])
        own, attrs = layout.slice, layout.binding.attrs
        if own is None:
            raw = overload(*layout.parts, *attrs.values())
        else:
            raw = run_on_slice(op, overload, dict(zip(op.inputs, layout.parts, strict=True)), attrs, own)
        results = layout.whole(raw if isinstance(raw, tuple | list) else (raw,))
        return results[0] if len(results) == 1 else results

    _add(f"{library.ns}::{op.name}", call, library)


def _add(name: str, call: Callable[..., Any], library: torch.library.Library) -> None:
    # Autograd is above: it differentiates the op, not what is done here.
    @torch.no_grad()
    def rule(cls: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(*args, **(kwargs or {}))

    torch.library.register_torch_dispatch(name, DTensor, rule, lib=library)


class Layout:
    """Who has what of a call's arrays.

    Args:
        op: the declaration.
        tensors: the inputs, DTensors and others, which are the same on every rank.
        attrs: the attributes.
        differentiable: the inputs that have a gradient, if not those of the op.

    Raises:
        TypeError: a plain tensor beside DTensors where a gradient is to come out, or what the op refuses.
        ValueError: DTensors of several meshes, or what the op refuses.
    """

    def __init__(self, op: Op, tensors: Tensors, attrs: Sequence[Any] = (), differentiable: Sequence[str] = ()) -> None:
        self.binding = bind_tensors(op, tensors, attrs)
        check_strides(self.binding, tensors)
        given = {n: t for n, t in zip(op.inputs, tensors, strict=True) if t is not None}
        self.placed = {n: t for n, t in given.items() if isinstance(t, DTensor)}
        first = next(iter(self.placed))
        self.mesh = self.placed[first].device_mesh
        for name in given:
            if name in (differentiable or op.differentiable) and name not in self.placed:
                problem = f"argument `{name}` is a torch.Tensor, but `{first}` is a DTensor; distribute both."
                raise TypeError(_refusal(self.binding, problem))
            if name in self.placed and self.placed[name].device_mesh != self.mesh:
                problem = f"argument `{name}` is on {self.placed[name].device_mesh}, but `{first}` is on {self.mesh}."
                raise ValueError(_refusal(self.binding, problem))
        self.named = factors(self.binding, split=True)
        self.split = op.split.dim if op.split else None
        # Row-wise inputs say what is cut, the widest of them first.
        order = sorted(self.placed, key=lambda n: -len(self.named[n]))
        self.cuts: list[str | None] = []
        for k in range(self.mesh.ndim):
            found = [f for n in order if (f := self._factor(n, self.placed[n].placements[k]))]
            # A vocabulary is what no rank should have to hold.
            self.cuts.append(self.split if self.split in found else found[0] if found else None)
        self.parts = [None if t is None else self._part(n, t) for n, t in zip(op.inputs, tensors, strict=True)]

    def _factor(self, name: str, placement: Placement) -> str | None:
        """What a placement cuts; nothing where it cuts what must come whole, or what another mesh dim splits."""
        factor = self.named[name][placement.dim] if type(placement) is Shard else None
        return None if factor is not None and factor == self.split and factor in self.cuts else factor

    @property
    def slice(self) -> Slice | None:
        """This rank's part of the dim that is split, where it is."""
        if self.split is None or self.split not in self.cuts:
            return None
        return Slice.of_mesh(self.mesh, self.cuts.index(self.split), self.binding.dims[self.split])

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of an input."""
        own = self.named[name]
        placements = [Shard(own.index(f)) if f in own and f else Replicate() for f in self.cuts]
        whole = self.placed.get(name)
        if whole is None:
            whole = DTensor.from_local(tensor, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        if list(whole.placements) != placements:
            # Detached: what is redistributed would require a gradient if it does, where none can be.
            whole = cast(DTensor, whole.detach()).redistribute(placements=placements)
        part = whole.to_local()
        return part if part.ndim == 0 or part.stride(-1) == 1 else part.contiguous()

    def whole(self, parts: Sequence[Tensor]) -> tuple[DTensor, ...]:
        """The outputs, of which this rank has these parts."""
        merged = self.binding.op.split is not None and self.binding.op.split.merge is not None
        results = []
        for (name, array), part in zip(self.binding.outputs.items(), parts, strict=True):
            own = self.named.get(name, ())
            placements: list[Placement] = [
                Replicate() if array is None or f is None else Shard(own.index(f)) if f in own
                else Replicate() if f == self.split and merged else Partial()
                for f in self.cuts
            ]  # fmt: skip
            results.append(self.distributed(part, placements, (0,) if array is None else tuple(array.shape)))
        return tuple(results)

    def distributed(self, part: Tensor, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
        """The array of this shape of which this rank has a part."""
        size, stride = torch.Size(shape), compact(shape)
        return DTensor.from_local(part, self.mesh, placements, run_check=False, shape=size, stride=stride)


def _refusal(binding: Binding, problem: str) -> str:
    return message(binding.op, problem, binding.inputs, binding.dims, binding.dtypes)


# --- linear_cross_entropy ------------------------------------------------------------------------------------------

_LEARNED = ("hidden", "weight", "bias")


def _exchange(own: Slice | None) -> dict[str, Any]:
    """The slice as arguments of an op."""
    return {} if own is None else {"part": [own.whole, own.rank, own.ranks], "group": own.group}


def _rows(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *attrs: Any) -> Any:
    layout = Layout(ROWS, (hidden, weight, target, bias), (), _LEARNED)
    return layout.whole(torch.ops.cute.linear_cross_entropy_rows(*layout.parts, *attrs, **_exchange(layout.slice)))


def _gradients(wanted: Sequence[bool], *tensors: Any) -> Layout:
    """The layout of a call that gives these gradients."""
    layout = Layout(GRADIENTS, tensors, (), _LEARNED)
    outputs = zip(layout.binding.outputs.items(), wanted, strict=True)
    layout.binding = replace(layout.binding, outputs={n: a if w else None for (n, a), w in outputs})
    return layout


def _rows_bwd(*args: Any) -> Any:
    *attrs, wanted = args[6:]
    layout = _gradients(wanted, *args[:6])
    return layout.whole(
        torch.ops.cute.linear_cross_entropy_rows_bwd(*layout.parts, *attrs, wanted, **_exchange(layout.slice))
    )


def _step(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, reduction: str, wanted: Sequence[bool],
) -> Any:  # fmt: skip
    layout = _gradients(wanted, hidden, weight, target, bias, None, None)
    count = None
    if reduction == "mean":  # over the rows of all ranks
        kept = (target != ignore_index).sum()
        count = kept.full_tensor() if isinstance(kept, DTensor) else kept
    loss, *gradients = torch.ops.cute.linear_cross_entropy_step(
        *layout.parts[:4], ignore_index, label_smoothing, z_loss, reduction, wanted, count, **_exchange(layout.slice)
    )
    share = [Replicate() if f in (None, layout.split) else Partial() for f in layout.cuts]
    return layout.distributed(loss, share, ()), *layout.whole(gradients)


def _scale(gradient: DTensor, dloss: Tensor) -> DTensor:
    factor = dloss.full_tensor() if isinstance(dloss, DTensor) else dloss
    scaled = torch.ops.cute.linear_cross_entropy_scale(gradient.to_local(), factor)
    return DTensor.from_local(
        scaled, gradient.device_mesh, gradient.placements, run_check=False, shape=gradient.shape,
        stride=gradient.stride(),
    )  # fmt: skip


# --- registration --------------------------------------------------------------------------------------------------

for _each in registry.everything():
    shard(*_each)
for _name, _call in {"rows": _rows, "rows_bwd": _rows_bwd, "step": _step, "scale": _scale}.items():
    _add(f"cute::linear_cross_entropy_{_name}", _call, _library)
