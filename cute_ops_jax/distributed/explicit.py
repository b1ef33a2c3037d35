"""An op on arrays whose types say how they are sharded: it runs in a ``shard_map``, made while the program is traced.

That is so with explicit mesh axes, and inside of a ``shard_map`` that leaves some axes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from cute_ops.declaration.binding import Binding
from cute_ops.declaration.sharding import factors
from cute_ops_jax import _compat
from cute_ops_jax.distributed.slices import (
    Arrays,
    Call,
    Cuts,
    Together,
    assign,
    entries,
    of_one_device,
    present,
    spec_of,
)


def by_type(
    call: Call, together: Together, arrays: Arrays, binding: Binding, batched: Collection[str] = ()
) -> Sequence[Any]:
    """Run ``call`` in a ``shard_map`` over the axes that are left; as it is where none is left.

    A dim that the declaration says how to split is sharded too. Automatic axes inside of another ``shard_map``, or
    beside explicit ones, shard nothing: every device along them does the same.

    Inside of a ``vmap`` over a dim that axes shard, devices part in the batching rule, which knows all axes: it comes
    here with the names of the arrays that are ``batched``, in their first dim. The call is that of an example; each
    device maps it over its own examples.
    """
    mesh = mesh_of(arrays.values())
    left = _axes(mesh, arrays, AxisType.Auto, AxisType.Explicit)
    outputs = present(binding.results)
    if not left or (not batched and _compat.mapped_axes(arrays.values())):
        found = call(arrays, binding.attrs)
        return [found[n] for n in outputs]
    specs = _specs(mesh, arrays, binding, batched)
    program = of_one_device(binding, call, together, specs.cuts)
    if batched:
        program = jax.vmap(program, [0 if n in batched else None for n in arrays])
    return jax.shard_map(
        program,
        in_specs=tuple(specs.inputs.values()),
        out_specs=list(specs.results.values()),
        axis_names=left,
        mesh=mesh,
    )(*(_resharded(a, specs.inputs[n], mesh) for n, a in arrays.items()))


def placed(arrays: Arrays, binding: Binding) -> Arrays:
    """The arrays, sharded as :func:`by_type` runs the call. A gradient has the type of its array, so a gradient rule is
    given these.
    """
    mesh = mesh_of(arrays.values())
    if not parted(arrays):
        return arrays
    specs = _specs(mesh, arrays, binding)
    return {n: _resharded(a, specs.inputs[n], mesh) for n, a in arrays.items()}


def types(arrays: Arrays, binding: Binding) -> Mapping[str, NamedSharding]:
    """How :func:`by_type` shards the results of a call on abstract values; empty without explicit axes."""
    mesh = mesh_of(arrays.values())
    if not parted(arrays):
        return {}
    specs = _specs(mesh, arrays, binding)
    return {n: NamedSharding(mesh, spec) for n, spec in specs.results.items()}


def mesh_of(arrays: Iterable[Any]) -> AbstractMesh:
    """The mesh of the context, else that of the arrays' types: a program of explicit axes needs no ``jax.set_mesh``."""
    context = jax.sharding.get_abstract_mesh()
    meshes = (_sharding(a).mesh for a in arrays) if context.empty else ()
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), context)


def mapped(arrays: Iterable[Any]) -> bool:
    """Whether arrays still have explicit axes where an op is to run on one device: those of a ``vmap``. Devices part in
    its batching rule, so nothing may look into the op before.
    """
    return AxisType.Explicit in mesh_of(arrays).axis_types


def parted(arrays: Arrays) -> bool:
    """Whether explicit axes are left that shard arrays, other than those of an enclosing ``vmap``."""
    return bool(_axes(mesh_of(arrays.values()), arrays, AxisType.Explicit))


def _axes(mesh: AbstractMesh, arrays: Arrays, *kinds: AxisType) -> set[str]:
    """The mesh's axes of these kinds, without those that shard a dim that ``vmap`` maps over."""
    here = {a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind in kinds}
    return here - _compat.mapped_axes(arrays.values()) if here else here


class _Specs(NamedTuple):
    """The axes that shard each factor of a call, and the ``PartitionSpec`` of each array, by name."""

    cuts: Cuts
    inputs: Mapping[str, PartitionSpec]
    results: Mapping[str, PartitionSpec]


def _specs(mesh: AbstractMesh, arrays: Arrays, binding: Binding, batched: Collection[str] = ()) -> _Specs:
    """How the arrays' types say that the call, of an example, is sharded."""
    every = {n: entries(_sharding(a).spec, len(a.shape)) for n, a in arrays.items()}
    over = next((every[n][0] for n in batched if every[n][0]), ())
    named = factors(binding, split=True)
    sizes = {a: mesh.shape[a] for a in _axes(mesh, arrays, AxisType.Explicit).difference(over)}
    # Row-wise inputs say how rows are sharded, those of the highest rank first.
    order = sorted(arrays, key=lambda n: -len(every[n]))
    cuts = assign(binding, named, [(n, every[n][n in batched :]) for n in order], sizes)

    def spec(name: str, has_batch: bool) -> PartitionSpec:
        own = spec_of(named[name], cuts)
        return PartitionSpec(over, *own) if has_batch else own

    results = {n: spec(n, bool(batched)) for n in present(binding.results)}
    return _Specs(cuts, {n: spec(n, n in batched) for n in arrays}, results)


def as_typed(array: Any, aval: Any) -> Any:
    """The array as an abstract value of its shape is sharded, if that has explicit axes."""
    want = getattr(aval, "sharding", None)
    if want is None or want.mesh.empty or AxisType.Explicit not in want.mesh.axis_types:
        return array
    return _resharded(array, want.spec, want.mesh)


def is_explicit(array: Any) -> bool:
    """Whether the type of an array says how it is sharded."""
    return AxisType.Explicit in jax.typeof(array).sharding.mesh.axis_types


def whole(array: Any) -> Any:
    """The array, on explicit meshes all of it on each device, as what loops over its rows needs it."""
    return _resharded(array, PartitionSpec(), _sharding(array).mesh) if is_explicit(array) else array


def _sharding(array: Any) -> Any:
    """The sharding in the type of an array, or of an abstract value."""
    return (array if isinstance(array, _compat.ShapedArray) else jax.typeof(array)).sharding


def _resharded(array: Any, spec: PartitionSpec, mesh: AbstractMesh) -> Any:
    """The array as ``shard_map`` takes it: with explicit axes it must already be sharded that way."""
    here = jax.typeof(array).sharding
    same = entries(here.spec, array.ndim) == entries(spec, array.ndim)
    return array if same else jax.reshard(array, NamedSharding(mesh, spec))
