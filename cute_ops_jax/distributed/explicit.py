"""An op on arrays whose types say how they are sharded: it runs in a ``shard_map``, made while the program is traced.

That is so with explicit mesh axes, and inside of a ``shard_map`` that leaves some axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cute_ops.binding import Binding
from cute_ops.sharding import factors
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
    left = _axes(AxisType.Auto, AxisType.Explicit)
    outputs = present(binding.results)
    if not left:
        found = call(arrays, binding.attrs)
        return [found[n] for n in outputs]
    named, cuts = factors(binding, split=True), _cuts(arrays, binding)
    return jax.shard_map(
        of_one_device(binding, call, together, cuts),
        in_specs=tuple(spec_of(named[n], cuts) for n in arrays),
        out_specs=[spec_of(named[n], cuts) for n in outputs],
        axis_names=left,
    )(*placed(arrays, binding).values())


def placed(arrays: Arrays, binding: Binding) -> Arrays:
    """The arrays, sharded as :func:`by_type` runs the call. A gradient has the type of its array, so a gradient rule is
    given these.
    """
    explicit = _axes(AxisType.Explicit)
    if not explicit:
        return arrays
    named, cuts = factors(binding, split=True), _cuts(arrays, binding)
    return {n: _resharded(a, spec_of(named[n], cuts), explicit) for n, a in arrays.items()}


def _axes(*kinds: AxisType) -> set[str]:
    mesh = jax.sharding.get_abstract_mesh()
    return {a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind in kinds}


def _cuts(arrays: Arrays, binding: Binding) -> Cuts:
    """The explicit axes that shard each factor."""
    sizes = {a: jax.sharding.get_abstract_mesh().shape[a] for a in _axes(AxisType.Explicit)}
    # Row-wise inputs say how rows are sharded, those of the highest rank first.
    order = sorted(arrays, key=lambda n: -len(arrays[n].shape))
    specs = [(n, jax.typeof(arrays[n]).sharding.spec) for n in order]
    return assign(binding, factors(binding, split=True), specs, sizes)


def _resharded(array: Any, spec: PartitionSpec, explicit: set[str]) -> Any:
    """The array as ``shard_map`` takes it: with explicit axes it must already be sharded that way."""
    here = jax.typeof(array).sharding
    same = entries(here.spec, array.ndim) == entries(spec, array.ndim)
    return array if same or not explicit else jax.reshard(array, NamedSharding(here.mesh, spec))
