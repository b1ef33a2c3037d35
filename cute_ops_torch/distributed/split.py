"""An op on this rank's slice of a dim that the declaration splits, combined with the results of the other ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.sharding import with_others
from cute_ops.declaration.tensor import Tensor as Declared
from cute_ops_torch.library import framework, program

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Tensor = torch.Tensor


class Slice(NamedTuple):
    """This rank's slice of a dim, as ``torch.chunk`` cuts it: of equal sizes, but the last ones smaller or empty.

    Attributes:
        whole: size of the dim.
        rank: of this process in the group.
        ranks: size of the group.
        group: the group's name.
    """

    whole: int
    rank: int
    ranks: int
    group: str

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, dim: int, whole: int) -> Slice:
        return cls(whole, mesh.get_local_rank(dim), mesh.size(dim), mesh.get_group(dim).group_name)

    @property
    def most(self) -> int:
        """The size of the first slice."""
        return -(-self.whole // self.ranks)

    @property
    def start(self) -> int:
        return min(self.rank * self.most, self.whole)

    @property
    def size(self) -> int:
        return min(self.start + self.most, self.whole) - self.start

    @property
    def sizes(self) -> list[int]:
        """The sizes of all slices that are not empty."""
        return [min(self.most, self.whole - start) for start in range(0, self.whole, self.most)]

    def gather(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """For each tensor those of all ranks whose slices are not empty, stacked. One collective per dtype."""
        gathered: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(p.dtype for p in tensors):
            chosen = [k for k, p in enumerate(tensors) if p.dtype == dtype]
            flat = torch.cat([tensors[k].reshape(-1) for k in chosen])
            # DTensor calls these too: they can be traced, and a graph of them holds no process group.
            every = torch.ops._c10d_functional.all_gather_into_tensor(flat, self.ranks, self.group)
            every = torch.ops._c10d_functional.wait_tensor(every).view(self.ranks, -1)[: len(self.sizes)]
            blocks = every.split([math.prod(tensors[k].shape) for k in chosen], dim=1)
            gathered |= {k: b.reshape(-1, *tensors[k].shape) for k, b in zip(chosen, blocks, strict=True)}
        return [gathered[k] for k in range(len(tensors))]


def run_on_slice(
    op: Op, call: Callable[..., Any], inputs: Mapping[str, Tensor | None], attrs: Mapping[str, Any], own: Slice
) -> list[Tensor]:
    """Raw outputs of ``call(*inputs, *attributes)``, which does what the op does: slices of those that have the dim,
    the others whole, as the inputs are. The attributes are those of the whole call.
    """
    # Lazily: importing cute_ops_torch must not import array_api_compat, which few programs use.
    from array_api_compat import torch as xp

    split = op.split
    assert split is not None and split.of_slice is not None
    sliced = {n for n, t in {**op.inputs, **op.outputs}.items() if any(d.name == split.dim for d in t.dims)}
    given, chosen = split.of_slice(xp, inputs, attrs, own.start, own.size, own.whole)
    if own.size == 0:  # ops refuse an empty dim: run on one zero, and drop the result
        given = {
            n: t if t is None or n not in sliced else _one_zero(op.inputs[n], split.dim, t) for n, t in given.items()
        }
    raw = call(*given.values(), *chosen.values())
    outputs = dict(zip(op.outputs, raw if isinstance(raw, tuple) else (raw,), strict=True))
    if own.size == 0:
        outputs |= {n: t.narrow(_axis(op.outputs[n], split.dim), 0, 0) for n, t in outputs.items() if n in sliced}
    whole = [n for n in op.outputs if n not in sliced]
    if whole and split.merge is not None:
        stacked = dict(zip(whole, own.gather([outputs[n] for n in whole]), strict=True))
        merged = split.merge(xp, stacked, inputs, attrs, own.sizes, own.whole)
        outputs |= {n: merged[n].to(outputs[n].dtype) for n in whole}
    return list(outputs.values())


def program_on_slice(op: Op, own: Slice) -> Program:
    """The program of an op for this rank's slice: ranks together run the ops that it calls and that split the dim."""
    assert op.program is not None and op.split is not None
    run, dim = op.program.run, op.split.dim

    def call(
        called: Op, inputs: Mapping[str, Any], attrs: Mapping[str, Any], inplace: bool = False
    ) -> Mapping[str, Any]:
        if called.split is None or called.split.dim != dim:
            return program.call(called, inputs, attrs, inplace)
        given = {name: inputs.get(name) for name in called.inputs}
        raw = run_on_slice(called, program.functions[called](inplace), given, {**called.keywords, **attrs}, own)
        return dict(zip(called.outputs, raw, strict=True))

    # All ranks must have the same chunks: those of the first one's slice, the largest.
    offered = with_others(framework, shared=True, chunks=partial(framework.chunks, largest=own.most))
    return op.program._replace(run=lambda xp, _, inputs, attrs: run(offered, call, inputs, attrs))


def _axis(declared: Declared, dim: str) -> int:
    """The position of a dim, counted from the end."""
    return [d.name for d in declared.dims].index(dim) - len(declared.dims)


def _one_zero(declared: Declared, dim: str, tensor: Tensor) -> Tensor:
    shape = list(tensor.shape)
    shape[_axis(declared, dim)] = 1
    return tensor.new_zeros(shape)
