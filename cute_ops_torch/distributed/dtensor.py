"""DTensors: every rank runs the op on its own part, wherever the declaration says that parts can be had.

One rule serves every op. :mod:`cute_ops.sharding` says which dims ranks may share; a mesh dim that shards an input
along one of these shards all others alike, and what has no such dim comes whole. Gradients of what rows share come out
as ``Partial`` sums. A dim that the declaration splits (the classes of a cross entropy) stays sharded too: ranks
exchange what their parts gave and combine it. Any other sharding is redistributed first.

Importing ``torch.distributed.tensor`` imports this, once ``cute_ops_torch`` is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cute_ops.binding import Binding
from cute_ops.composite import embedding as _declared
from cute_ops.errors import message
from cute_ops.jit.plan import compact
from cute_ops.op import Op
from cute_ops.sharding import factors
from cute_ops_torch.composite.embedding import library as _embeddings
from cute_ops_torch.composite.linear_cross_entropy import GRADIENTS, ROWS, composite
from cute_ops_torch.composite.linear_cross_entropy import library as _library
from cute_ops_torch.distributed.split import Slice, run_on_slice
from cute_ops_torch.host.launch import REMEMBERED, make_room
from cute_ops_torch.library import register
from cute_ops_torch.library.schema import filler
from cute_ops_torch.library.tensors import Tensors, bind_tensors, check_strides

Tensor = torch.Tensor


def shard(op: Op, overload: Any, library: torch.library.Library) -> None:
    """Teach an op to take DTensors."""
    fill, arity = filler(op), len(op.inputs)
    known: dict[Any, Layout] = {}

    def call(*args: Any) -> Any:
        args = fill(args)
        tensors, attrs = args[:arity], args[arity:]
        layout = _layout(known, op, tensors, attrs)
        parts, own = layout.parts(tensors), layout.slice
        if own is None:
            raw = overload(*parts, *attrs)
        else:
            raw = run_on_slice(op, overload, dict(zip(op.inputs, parts, strict=True)), layout.binding.attrs, own)
        results = layout.whole(raw if isinstance(raw, tuple | list) else (raw,))
        return results[0] if len(results) == 1 else results

    _add(f"{library.ns}::{op.name}", call, library)


def _add(name: str, call: Callable[..., Any], library: torch.library.Library) -> None:
    # Autograd is above: it differentiates the op, not what is done here.
    @torch.no_grad()
    def rule(cls: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(*args, **(kwargs or {}))

    torch.library.register_torch_dispatch(name, DTensor, rule, lib=library)


def _layout(known: dict[Any, Layout], op: Op, tensors: Tensors, attrs: Sequence[Any]) -> Layout:
    """The layout of a call; of one like it, where there was one."""
    key = (*attrs, *(None if t is None else (_place(t), t.shape, t.stride(), t.dtype) for t in tensors))
    try:
        found = known.get(key)
    except TypeError:  # symbolic sizes
        return Layout(op, tensors, attrs)
    if found is None:
        make_room(REMEMBERED, known)
        found = known[key] = Layout(op, tensors, attrs)
    return found


def _place(tensor: Tensor) -> Any:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else tensor.device


class Layout:
    """Who has what of the arrays of a call, and of all calls like it.

    Args:
        op: the declaration.
        tensors: the inputs, DTensors and others, which are the same on every rank.
        attrs: the attributes.
        differentiable: the inputs that have a gradient, if not those of the op.
        wanted: the outputs that are there, all that the op gives if not said.

    Raises:
        TypeError: a plain tensor beside DTensors where a gradient is to come out, or what the op refuses.
        ValueError: DTensors of several meshes, or what the op refuses.

    Attributes:
        slice: this rank's part of the dim that is split, None where no mesh dim cuts it.
    """

    def __init__(
        self, op: Op, tensors: Tensors, attrs: Sequence[Any] = (), differentiable: Sequence[str] = (),
        wanted: Sequence[bool] = (),
    ) -> None:  # fmt: skip
        self.binding = bind_tensors(op, tensors, attrs)
        check_strides(self.binding, tensors)
        given = {n: t for n, t in zip(op.inputs, tensors, strict=True) if t is not None}
        placed = {n: t for n, t in given.items() if isinstance(t, DTensor)}
        first = next(iter(placed))
        self.mesh = placed[first].device_mesh
        for name in given:
            if name in (differentiable or op.differentiable) and name not in placed:
                problem = f"argument `{name}` is a torch.Tensor, but `{first}` is a DTensor; distribute both."
                raise TypeError(_refusal(self.binding, problem))
            if name in placed and placed[name].device_mesh != self.mesh:
                problem = f"argument `{name}` is on {placed[name].device_mesh}, but `{first}` is on {self.mesh}."
                raise ValueError(_refusal(self.binding, problem))
        named = factors(self.binding, split=True)
        self.split = op.split.dim if op.split else None
        self.cuts = self._chosen({n: (named[n], t.placements) for n, t in placed.items()})
        self._inputs = [self._of_input(named[n]) if n in given else () for n in op.inputs]
        self.slice = None
        if self.split is not None and self.split in self.cuts:
            self.slice = Slice.of_mesh(self.mesh, self.cuts.index(self.split), self.binding.dims[self.split])
        merged = op.split is not None and op.split.merge is not None
        self._outputs = []
        for (name, array), there in zip(self.binding.outputs.items(), wanted or [True] * len(op.outputs), strict=True):
            whole = array is not None and there
            shape = tuple(array.shape) if array is not None and there else (0,)
            self._outputs.append((self._of_output(named[name] if whole else None, merged), shape))

    def _chosen(self, placed: Mapping[str, tuple[Sequence[str | None], Sequence[Placement]]]) -> list[str | None]:
        """The factor that each mesh dim cuts. Row-wise inputs say what is cut, the widest of them first."""
        order = sorted(placed.values(), key=lambda each: -len(each[0]))
        cuts: list[str | None] = []
        for k in range(self.mesh.ndim):
            shards = [(own, p.dim) for own, placements in order if type(p := placements[k]) is Shard]
            # No factor: what must come whole. And only one mesh dim splits what is split.
            found = [f for own, dim in shards if (f := own[dim]) and not (f == self.split and f in cuts)]
            # A vocabulary is what no rank should have to hold.
            cuts.append(self.split if self.split in found else found[0] if found else None)
        return cuts

    def _of_input(self, own: Sequence[str | None]) -> tuple[Placement, ...]:
        return tuple(Shard(own.index(f)) if f and f in own else Replicate() for f in self.cuts)

    def _of_output(self, own: Sequence[str | None] | None, merged: bool) -> tuple[Placement, ...]:
        """What has the factor is sharded, what has none is a sum over what has; None for what is not there."""
        return tuple(
            Replicate() if own is None or f is None or (f == self.split and f not in own and merged)
            else Shard(own.index(f)) if f in own else Partial()
            for f in self.cuts
        )  # fmt: skip

    def parts(self, tensors: Tensors) -> list[Tensor | None]:
        """This rank's parts of the inputs."""
        return [None if t is None else self._part(t, p) for t, p in zip(tensors, self._inputs, strict=True)]

    def _part(self, tensor: Tensor, placements: tuple[Placement, ...]) -> Tensor:
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        if tensor.placements != placements:
            # Detached: what is redistributed would require a gradient if it does, where none can be.
            tensor = cast(DTensor, tensor.detach()).redistribute(placements=placements)
        part = tensor.to_local()
        return part if part.ndim == 0 or part.stride(-1) == 1 else part.contiguous()

    def whole(self, parts: Sequence[Tensor]) -> tuple[DTensor, ...]:
        """The outputs, of which this rank has these parts."""
        each = zip(parts, self._outputs, strict=True)
        return tuple(self.distributed(part, placements, shape) for part, (placements, shape) in each)

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
    tensors = (hidden, weight, target, bias)
    layout = Layout(ROWS, tensors, (), _LEARNED)
    raw = torch.ops.cute.linear_cross_entropy_rows(*layout.parts(tensors), *attrs, **_exchange(layout.slice))
    return layout.whole(raw)


def _rows_bwd(*args: Any) -> Any:
    tensors, attrs, wanted = args[:7], args[7:-1], args[-1]
    layout = Layout(GRADIENTS, tensors, (), _LEARNED, wanted)
    op = torch.ops.cute.linear_cross_entropy_rows_bwd
    return layout.whole(op(*layout.parts(tensors), *attrs, wanted, **_exchange(layout.slice)))


def _step(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
    ignore_index: int, label_smoothing: float, z_loss: float, accum_dtype: Any, reduction: str, wanted: Sequence[bool],
) -> Any:  # fmt: skip
    tensors = (hidden, weight, target, bias, None, None, None)
    layout = Layout(GRADIENTS, tensors, (), _LEARNED, wanted)
    count = None
    if reduction == "mean":  # over the rows of all ranks
        kept = (target != ignore_index).sum()
        count = kept.full_tensor() if isinstance(kept, DTensor) else kept
    attrs = (ignore_index, label_smoothing, z_loss, accum_dtype, reduction, wanted, count)
    op = torch.ops.cute.linear_cross_entropy_step
    loss, *gradients = op(*layout.parts(tensors)[:4], *attrs, **_exchange(layout.slice))
    share = [Replicate() if f in (None, layout.split) else Partial() for f in layout.cuts]
    return layout.distributed(loss, share, ()), *layout.whole(gradients)


def _scale(gradient: DTensor, dloss: Tensor) -> DTensor:
    factor = dloss.full_tensor() if isinstance(dloss, DTensor) else dloss
    scaled = torch.ops.cute.linear_cross_entropy_scale(gradient.to_local(), factor)
    return DTensor.from_local(
        scaled, gradient.device_mesh, gradient.placements, run_check=False, shape=gradient.shape,
        stride=gradient.stride(),
    )  # fmt: skip


# --- embedding -----------------------------------------------------------------------------------------------------


def _embedding(index: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Rows of tokens and columns of the table may be cut. Classes may not: torch's own embedding has them masked."""
    op = _declared.embedding
    layout = Layout(op, (index, weight))
    if any(p.is_shard(0) for p in cast(DTensor, weight).placements):
        problem = "argument `weight` is sharded along its classes; torch.nn.functional.embedding takes it so."
        raise NotImplementedError(_refusal(layout.binding, problem))
    parts = layout.parts((index, weight))
    return layout.whole((torch.ops.cute.embedding(*parts, padding_idx),))[0]


def _embedding_bwd(dout: Tensor, index: Tensor, classes: int, padding_idx: int = -1) -> Tensor:
    local = dout.to_local() if isinstance(dout, DTensor) else dout
    like = local.new_empty((1, dout.shape[-1])).expand(classes, -1)  # says how many rows there are, and costs one
    layout = Layout(_declared.embedding_bwd, (index, like, dout), (padding_idx,))
    index, _, dout = (cast(Tensor, part) for part in layout.parts((index, like, dout)))
    return layout.whole((torch.ops.cute.embedding_bwd(dout, index, classes, padding_idx),))[0]


# --- registration --------------------------------------------------------------------------------------------------

for _each in register.everything():
    shard(*_each)
# In inference mode nothing takes it apart on the way here.
_add("cute::linear_cross_entropy", composite, _library)
_add("cute::embedding", _embedding, _embeddings)
_add("cute::embedding_bwd", _embedding_bwd, _embeddings)
for _name, _call in {"rows": _rows, "rows_bwd": _rows_bwd, "step": _step, "scale": _scale}.items():
    _add(f"cute::linear_cross_entropy_{_name}", _call, _library)
