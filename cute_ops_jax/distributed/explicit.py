"""An op on arrays whose types say how they are sharded: it runs in a ``shard_map``, made while the program is traced.

That is so with explicit mesh axes, and inside of a ``shard_map`` that leaves some axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from cute_ops.binding import Binding
from cute_ops.sharding import factors
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


def by_type(call: Call, together: Together, arrays: Arrays, binding: Binding) -> Sequence[Any]:
    """Run ``call`` in a ``shard_map`` over the axes that are left; as it is where none is left.

    A dim that the declaration says how to split is sharded too. Automatic axes inside of another ``shard_map``, or
    beside explicit ones, shard nothing: every device along them does the same.
    """
    mesh = mesh_of(arrays.values())
    left = _axes(mesh, arrays, AxisType.Auto, AxisType.Explicit)
    outputs = present(binding.results)
    if not left:
        found = call(arrays, binding.attrs)
        return [found[n] for n in outputs]
    named, cuts = factors(binding, split=True), _cuts(mesh, arrays, binding)
    return jax.shard_map(
        of_one_device(binding, call, together, cuts),
        in_specs=tuple(spec_of(named[n], cuts) for n in arrays),
        out_specs=[spec_of(named[n], cuts) for n in outputs],
        axis_names=left,
        mesh=mesh,
    )(*placed(arrays, binding).values())


def placed(arrays: Arrays, binding: Binding) -> Arrays:
    """The arrays, sharded as :func:`by_type` runs the call. A gradient has the type of its array, so a gradient rule is
    given these.
    """
    mesh = mesh_of(arrays.values())
    if not _axes(mesh, arrays, AxisType.Explicit):
        return arrays
    named, cuts = factors(binding, split=True), _cuts(mesh, arrays, binding)
    return {n: _resharded(a, spec_of(named[n], cuts), mesh) for n, a in arrays.items()}


def mesh_of(arrays: Iterable[Any]) -> AbstractMesh:
    """The mesh of the context, else that of the arrays' types: a program of explicit axes needs no ``jax.set_mesh``."""
    context = jax.sharding.get_abstract_mesh()
    meshes = (jax.typeof(a).sharding.mesh for a in arrays) if context.empty else ()
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), context)


def by_batches(run: Callable[..., Sequence[Any]], arrays: Sequence[Any], batched: Sequence[bool]) -> Sequence[Any]:
    """``run(*arrays)``, whose results are batched, on each device's examples, if explicit axes shard the batch: the
    first dim of the arrays that are batched.
    """
    types = [jax.typeof(a).sharding for a in arrays]
    axes = next((over for s, has in zip(types, batched, strict=True) if has and (over := entries(s.spec, 1)[0])), ())
    if not axes:
        return run(*arrays)
    mesh, over = mesh_of(arrays), PartitionSpec(axes)
    placed = [_resharded_first(a, over, mesh) if has else a for a, has in zip(arrays, batched, strict=True)]
    specs = tuple(over if has else PartitionSpec() for has in batched)
    return jax.shard_map(run, in_specs=specs, out_specs=over, axis_names=set(axes), mesh=mesh)(*placed)


def mapped(arrays: Iterable[Any]) -> bool:
    """Whether arrays have explicit axes inside of a ``shard_map`` over all axes that are left: those of a ``vmap``. Its
    batching rule is where devices part, so nothing may look into the op before.
    """
    return AxisType.Explicit in mesh_of(arrays).axis_types


def _axes(mesh: AbstractMesh, arrays: Arrays, *kinds: AxisType) -> set[str]:
    """The mesh's axes of these kinds, without those that shard a dim that ``vmap`` maps over: see :func:`by_batches`."""
    here = {a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind in kinds}
    return here - _compat.mapped_axes(arrays.values()) if here else here


def _cuts(mesh: AbstractMesh, arrays: Arrays, binding: Binding) -> Cuts:
    """The explicit axes that shard each factor."""
    sizes = {a: mesh.shape[a] for a in _axes(mesh, arrays, AxisType.Explicit)}
    # Row-wise inputs say how rows are sharded, those of the highest rank first.
    order = sorted(arrays, key=lambda n: -len(arrays[n].shape))
    specs = [(n, jax.typeof(arrays[n]).sharding.spec) for n in order]
    return assign(binding, factors(binding, split=True), specs, sizes)


def _resharded(array: Any, spec: PartitionSpec, mesh: AbstractMesh) -> Any:
    """The array as ``shard_map`` takes it: with explicit axes it must already be sharded that way."""
    here = jax.typeof(array).sharding
    same = entries(here.spec, array.ndim) == entries(spec, array.ndim)
    return array if same else jax.reshard(array, NamedSharding(mesh, spec))


def _resharded_first(array: Any, over: PartitionSpec, mesh: AbstractMesh) -> Any:
    """The array with its first dim sharded like this."""
    return _resharded(array, PartitionSpec(*over, *jax.typeof(array).sharding.spec[1:]), mesh)
