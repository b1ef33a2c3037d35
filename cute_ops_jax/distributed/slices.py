"""The program that each device runs on its slices: the kernel, and the sums and merges over devices around it.

:mod:`cute_ops.declaration.sharding` says which dims of a call may be sharded, as *factors*. A sum over rows is a
``psum``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from cute_ops.declaration.binding import Binding
from cute_ops.declaration.op import Op
from cute_ops.declaration.sharding import Factors, factors
from cute_ops.declaration.sharding import sizes as factor_sizes
from cute_ops.declaration.tensor import Tensor
from cute_ops_jax.distributed.varying import Axes, alike, varies, varying_like

T = TypeVar("T")
Arrays: TypeAlias = Mapping[str, Any]
# The program of one device, on the arrays that are present: its outputs that exist.
Local: TypeAlias = Callable[..., Sequence[Any]]
# ``call(inputs, attrs) -> outputs``: an op on one device, arrays by name. With ``terms``, the axes along which devices
# have slices of each of its inner dims, it adds up sums over these.
Call: TypeAlias = Callable[..., Arrays]
# ``together(op, inputs, attrs, axes, call) -> outputs``: the same where the devices along the axes have slices of the
# dim that the declaration splits.
Together: TypeAlias = Callable[[Op, Arrays, Arrays, Axes, Call], Arrays]


def assign(binding: Binding, named: Factors, wanted: Sequence[tuple[str, Any]], sizes: Mapping[str, int]) -> Cuts:
    """The mesh axes that shard each factor.

    Args:
        binding: the call.
        named: its factors.
        wanted: arrays by name with the ``PartitionSpec`` that they have or should get, those that matter most first.
        sizes: of the mesh's axes. An axis that is not in here is not used.
    """
    cuts: dict[str, Axes] = {}
    used: set[str] = set()
    arrays, lengths = {**binding.inputs, **binding.outputs}, factor_sizes(binding, named)
    for name, spec in wanted:
        array = arrays[name]
        if array is None:
            continue
        for factor, entry in zip(named[name], entries(spec, len(array.shape)), strict=True):
            axes = tuple(a for a in entry if a in sizes)
            if factor is None or factor in cuts or not axes or used & set(axes):
                continue
            # XLA pads uneven slices, and the padding would get into sums.
            if lengths[factor] % math.prod(sizes[a] for a in axes) == 0:
                cuts[factor] = axes
                used |= set(axes)
    return cuts


# The mesh axes that shard each factor.
Cuts: TypeAlias = Mapping[str, Axes]
WHOLE: Cuts = {}


def entries(spec: Any, rank: int) -> list[Axes]:
    """The mesh axes of each dim in a ``PartitionSpec``."""
    padded = [*spec, *[None] * (rank - len(spec))]
    return [(e,) if isinstance(e, str) else e if isinstance(e, tuple) else () for e in padded]


def spec_of(names: Sequence[str | None], cuts: Cuts) -> PartitionSpec:
    """The ``PartitionSpec`` of an array with these factors."""
    return PartitionSpec(*(cuts.get(f) if f else None for f in names))


def of_one_device(binding: Binding, call: Call, together: Together, cuts: Cuts) -> Local:
    """The program of one device: ``call`` on its slices, combined with the results of the others."""
    op, attrs = binding.op, binding.attrs
    inputs, outputs = present(binding.inputs), present(binding.results)
    split = () if op.split is None else cuts.get(op.split.dim, ())
    terms = {f: axes for f, axes in cuts.items() if f in op.inner}

    def local(*slices: Any) -> list[Any]:
        given = dict(zip(inputs, slices, strict=True))
        if terms:
            found = call(given, attrs, terms=terms)
        else:
            found = together(op, given, attrs, split, call) if split else call(given, attrs)
        return [found[n] for n in outputs]

    return _added(binding, local, {f: axes for f, axes in cuts.items() if axes != split and f not in terms})


def present(arrays: Mapping[str, T | None]) -> dict[str, T]:
    """The arrays that are there, by name."""
    return {n: a for n, a in arrays.items() if a is not None}


def _added(binding: Binding, local: Local, cuts: Cuts) -> Local:
    """``local`` with every output that is a sum over slices added up over the devices."""
    op, named = binding.op, factors(binding)
    inputs, outputs = present(binding.inputs), present(binding.results)

    def run(*arrays: Any) -> list[Any]:
        over = {n: tuple(a for f, axes in cuts.items() if f not in named[n] for a in axes) for n in outputs}
        summed = {n for n, axes in over.items() if axes}
        results = local(*_widened(op, dict(zip(inputs, arrays, strict=True)), summed).values())
        return [
            (jax.lax.psum(result, over[n]) if n in summed else result).astype(out.dtype)
            for (n, out), result in zip(outputs.items(), results, strict=True)
        ]

    return run


def _widened(op: Op, arrays: Arrays, summed: Collection[str]) -> dict[str, Any]:
    """The arrays, in float32 those whose gradient is added up: so the total is rounded once, not each partial sum.

    Only where the declaration allows it: where no other tensor's dtype would change with theirs.
    """
    wide = {n for n in arrays if f"d{n}" in summed and _may_widen(op, n)}
    return {n: a.astype(jnp.float32) if n in wide else a for n, a in arrays.items()}


def _may_widen(op: Op, name: str) -> bool:
    gradient, variable = f"d{name}", op.inputs[name].dtype
    if "float32" not in op.dtypes.get(variable, ()):
        return False
    return {n for n, t in {**op.inputs, **op.outputs}.items() if t.dtype == variable} == {name, gradient}


def on_slices(op: Op, inputs: Arrays, attrs: Arrays, axis: str | Axes, call: Call) -> Arrays:
    """The op where each device along one mesh axis, or several, has a slice of the dim that its declaration splits, by
    ``call(inputs, attrs) -> outputs`` on one device. The attributes are those of the whole call.
    """
    if op.split is None or op.split.of_slice is None:
        raise TypeError(f"op {op.name} declares no split")
    size = next(inputs[n].shape[_place(t, op.split.dim)] for n, t in op.inputs.items() if _place(t, op.split.dim))
    whole = size * jax.lax.axis_size(axis)
    found = dict(call(*op.split.of_slice(jnp, inputs, attrs, jax.lax.axis_index(axis) * size, size, whole)))
    own = {n: a for n, a in present(found).items() if not _place(op.outputs[n], op.split.dim)}
    if own and op.split.merge is not None:
        sizes = [size] * jax.lax.axis_size(axis)
        found |= op.split.merge(jnp, _stacked(own, axis), inputs, attrs, sizes, whole)
    return found


def adds_up(op: Op, output: str) -> bool:
    """Whether the devices with slices of the dim that an op splits have partial sums."""
    return op.split is not None and op.split.adds_up(output) and not _place(op.outputs[output], op.split.dim)


def spread(arrays: Arrays, axes: Axes) -> dict[str, Any]:
    """The inputs of an op of which devices along the axes have slices. Floats are made to vary over these and every
    axis that one of them varies over, so JAX adds up the gradients of those that devices share; integers over the same
    axes but for these: what they are, they are for the whole.
    """
    given = present(arrays)
    # Gathered rows are the same on all devices; a maximum over them tells JAX so.
    whole = {
        n: jax.lax.pmax(jax.lax.stop_gradient(a), axes) if varies(a, axes) else a
        for n, a in given.items() if not jnp.issubdtype(a.dtype, jnp.floating)
    }  # fmt: skip
    floats = {n: a for n, a in given.items() if n not in whole}
    # The axis' index varies over it, if replication is checked.
    *found, like = alike([*floats.values(), *whole.values(), jax.lax.axis_index(axes)])
    varying = dict(zip(floats, found, strict=False))
    return {n: varying[n] if n in varying else varying_like(whole[n], like, axes) for n in given}


def _place(tensor: Tensor, dim: str) -> int:
    """The position of a tensor's dim, counted from its end; 0 if it has none."""
    return next((i - len(tensor.dims) for i, d in enumerate(tensor.dims) if d.name == dim), 0)


def _stacked(arrays: Arrays, axis: str | Axes) -> dict[str, Any]:
    """The arrays of all devices, stacked in front. Not an ``all_gather``, but a ``psum`` of arrays that are zero but
    for the device's own, because JAX knows that the result of a sum is the same on all devices.
    """
    own = jnp.stack(list(arrays.values()))[:, None]
    empty = varying_like(jnp.zeros((own.shape[0], jax.lax.axis_size(axis), *own.shape[2:]), own.dtype), own)
    every = jax.lax.dynamic_update_slice_in_dim(empty, own, jax.lax.axis_index(axis), 1)
    return dict(zip(arrays, jax.lax.psum(every, axis), strict=True))
