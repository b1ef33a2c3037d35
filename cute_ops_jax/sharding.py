"""Programs on several devices: every device runs the kernel on its own rows, and sums over rows are added up.

:mod:`cute_ops.factors` says which dims may be cut; sums over slices are a ``psum``.

Who cuts depends on the mesh. With explicit axes, and inside of a ``shard_map`` that leaves axes, shardings are types:
the op runs in a ``shard_map`` of its own, made while a program is traced. With automatic axes XLA decides, and asks
when it partitions a program: that is ``custom_partitioning``. Inside of a ``shard_map`` over all axes there is nothing
to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from cute_ops.binding import Binding, bind
from cute_ops.errors import message
from cute_ops.factors import Factors, factors, sums
from cute_ops.op import Op, Tensor
from cute_ops_jax import _compat
from cute_ops_jax.arrays import specs

Axes = tuple[str, ...]
Local = Callable[..., Sequence[Any]]
Outputs = Mapping[str, Any]
Call = Callable[[Mapping[str, Any], Mapping[str, Any]], Outputs]


def assign(
    binding: Binding, wanted: Sequence[tuple[str, Any]], sizes: Mapping[str, int], named: Factors | None = None
) -> dict[str, Axes]:
    """The mesh axes that cut each factor.

    Args:
        named: the factors; by default those that need nothing but :func:`added`.
        wanted: arrays by name with the sharding's spec that they have or should get, those that matter most first.
        sizes: of the mesh's axes. An axis that is not here is not used.
    """
    cuts: dict[str, Axes] = {}
    used: set[str] = set()
    named, arrays = named or factors(binding), {**binding.inputs, **binding.outputs}
    for name, spec in wanted:
        array = arrays[name]
        if array is None:
            continue
        for factor, size, entry in zip(named[name], array.shape, _entries(spec, len(array.shape)), strict=True):
            axes = tuple(a for a in entry if a in sizes)
            # Uneven slices would be padded, and what lies in the padding would get into sums.
            if factor is None or factor in cuts or not axes or used & set(axes):
                continue
            if size % math.prod(sizes[a] for a in axes) == 0:
                cuts[factor] = axes
                used |= set(axes)
    return cuts


def _entries(spec: Any, rank: int) -> list[Axes]:
    entries = [*spec, *[None] * (rank - len(spec))]
    return [(e,) if isinstance(e, str) else e if isinstance(e, tuple) else () for e in entries]


def spec_of(names: Sequence[str | None], cuts: Mapping[str, Axes]) -> PartitionSpec:
    """The sharding's spec of an array with these factors."""
    return PartitionSpec(*(cuts.get(f) if f else None for f in names))


def widened(op: Op, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays, float32 those whose gradient is a sum over rows: parts of a sum are rounded once they are added.

    Only where a declaration lets them: where no other tensor's dtype would change with them.
    """
    return {n: a.astype(jnp.float32) if _widens(op, n) else a for n, a in arrays.items()}


def _widens(op: Op, name: str) -> bool:
    gradient, variable = f"d{name}", op.inputs[name].dtype
    if gradient not in op.outputs or not sums(op, gradient) or "float32" not in op.dtypes.get(variable, ()):
        return False
    return {n for n, t in {**op.inputs, **op.outputs}.items() if t.dtype == variable} == {name, gradient}


def added(binding: Binding, local: Local, cuts: Mapping[str, Axes]) -> Local:
    """``local`` on one device's slices, with what is a sum over slices added up over the devices."""
    op, named = binding.op, factors(binding)
    names = [n for n, a in binding.inputs.items() if a is not None]
    outputs = {n: out for n, out in binding.outputs.items() if out is not None}

    def run(*arrays: Any) -> list[Any]:
        results = local(*widened(op, dict(zip(names, arrays, strict=True))).values())
        totals = []
        for (name, out), result in zip(outputs.items(), results, strict=True):
            over = tuple(a for f, axes in cuts.items() if f not in named[name] for a in axes)
            totals.append((jax.lax.psum(result, over) if over else result).astype(out.dtype))
        return totals

    return run


def with_split(binding: Binding) -> Factors:
    """The factors of a call, the dim among them that the declaration says how to split."""
    op, named = binding.op, factors(binding)
    tensors = {**op.inputs, **op.outputs}
    return {n: (*dims[: len(dims) - len(tensors[n].dims)], *_split_dims(op, n, dims)) for n, dims in named.items()}


def _split_dims(op: Op, name: str, dims: Sequence[str | None]) -> Iterator[str | None]:
    own = {**op.inputs, **op.outputs}[name].dims
    for factor, dim in zip(dims[len(dims) - len(own) :], own, strict=True):
        yield dim.name if op.split is not None and dim.factor == 1 and dim.name == op.split.dim else factor


def on_slices(op: Op, inputs: Mapping[str, Any], attrs: Mapping[str, Any], axis: str | Axes, call: Call) -> Outputs:
    """The op where each device along ``axis`` has a slice of the dim that its declaration splits.

    Args:
        call: ``call(inputs, attrs)``: the op on one device, outputs by name.
    """
    if op.split is None:
        raise TypeError(f"op {op.name} declares no split")
    size = next(inputs[n].shape[_place(t, op.split.dim)] for n, t in op.inputs.items() if _place(t, op.split.dim))
    whole = size * jax.lax.axis_size(axis)
    found = dict(call(*op.split.part(jnp, inputs, attrs, jax.lax.axis_index(axis) * size, size, whole)))
    parts = {n: a for n, a in found.items() if a is not None and not _place(op.outputs[n], op.split.dim)}
    if parts and op.split.merge is not None:
        found |= op.split.merge(jnp, _side_by_side(parts, axis), inputs, attrs, whole)
    return found


def _place(tensor: Tensor, dim: str) -> int:
    """Where a tensor has a dim, counted from its end; 0 where it has none."""
    return next((i - len(tensor.dims) for i, d in enumerate(tensor.dims) if d.name == dim), 0)


def _side_by_side(parts: Mapping[str, Any], axis: str | Axes) -> dict[str, Any]:
    """What every device has, stacked in front: a sum, since JAX knows that its result is the same on all."""
    own = jnp.stack(list(parts.values()))[:, None]
    empty = varying_like(jnp.zeros((own.shape[0], jax.lax.axis_size(axis), *own.shape[2:]), own.dtype), own)
    every = jax.lax.dynamic_update_slice_in_dim(empty, own, jax.lax.axis_index(axis), 1)
    return dict(zip(parts, jax.lax.psum(every, axis), strict=True))


def by_type(local: Callable[..., Sequence[Any]], arrays: Mapping[str, Any], binding: Binding) -> Sequence[Any]:
    """Run ``local(*arrays, attrs=...)`` where shardings are known while tracing: in a ``shard_map`` over the axes that
    are left.

    A dim that the declaration says how to split is cut too. Axes that XLA would decide on inside of another
    ``shard_map``, or beside explicit ones, cut nothing: every device along them does the same.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    left = {a for a, kind in kinds.items() if kind != AxisType.Manual}
    explicit = {a for a, kind in kinds.items() if kind == AxisType.Explicit}
    if not left:
        return local(*arrays.values(), attrs=binding.attrs)
    op, named = binding.op, with_split(binding)
    sizes = {a: mesh.shape[a] for a in explicit}
    # Row-wise inputs say how rows are cut, the widest of them first.
    order = sorted(arrays, key=lambda n: -len(arrays[n].shape))
    cuts = assign(binding, [(n, jax.typeof(arrays[n]).sharding.spec) for n in order], sizes, named)
    outputs = [n for n, out in binding.outputs.items() if out is not None]
    split = () if op.split is None else cuts.get(op.split.dim, ())

    def one(*slices: Any) -> Sequence[Any]:
        if not split:
            return local(*slices, attrs=binding.attrs)

        def call(inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> Outputs:
            return dict(zip(outputs, local(*inputs.values(), attrs=attrs), strict=True))

        found = on_slices(op, dict(zip(arrays, slices, strict=True)), binding.attrs, split, call)
        return [found[n] for n in outputs]

    return jax.shard_map(
        added(binding, one, {f: axes for f, axes in cuts.items() if axes != split}),
        in_specs=tuple(spec_of(named[n], cuts) for n in arrays),
        out_specs=[spec_of(named[n], cuts) for n in outputs],
        axis_names=left,
    )(*(_resharded(a, spec_of(named[n], cuts), explicit) for n, a in arrays.items()))


def _resharded(array: Any, spec: PartitionSpec, explicit: set[str]) -> Any:
    """With explicit axes an array must already be cut as ``shard_map`` takes it."""
    here = jax.typeof(array).sharding
    same = _entries(here.spec, array.ndim) == _entries(spec, array.ndim)
    return array if same or not explicit else jax.reshard(array, NamedSharding(here.mesh, spec))


def by_partitioner(
    op: Op,
    program: Callable[..., list[Any]],
    label: Callable[..., str],
    *arrays: Any,
    names: tuple[str, ...],
    attrs: Sequence[tuple[str, Any]],
    inplace: bool,
) -> list[Any]:
    """The kernel as something that XLA's partitioner cuts: it asks, when it compiles, for the program of one device.

    Args:
        program: that program, as :func:`lowering.kernel` without the op.
        label: ``label(inputs, attrs)``: its name, for the key of XLA's persistent cache: a callback says nothing.

    Raises:
        NotImplementedError: when XLA compiles shardings that do not name the axes of one mesh.
    """
    given = dict(zip(names, arrays, strict=True))
    binding = bind(op, specs(given), dict(attrs))
    named = factors(binding)
    outputs = [n for n, out in binding.outputs.items() if out is not None]

    def local(*slices: Any) -> list[Any]:
        return program(*slices, names=names, attrs=attrs, inplace=inplace)

    def cut(mesh: Any, known: Mapping[str, Any]) -> dict[str, Axes]:
        if any(not isinstance(a.sharding, NamedSharding) for a in known.values()):
            problem = "its arguments have shardings of several meshes, or of none; use NamedShardings of one mesh."
            raise NotImplementedError(message(op, problem, binding.inputs, binding.dims, binding.dtypes))
        # Row-wise arrays say how rows are cut, arguments first.
        order = sorted(known, key=lambda n: -len(known[n].shape))
        return assign(binding, [(n, known[n].sharding.spec) for n in order], dict(mesh.shape))

    def shardings(mesh: Any, which: Sequence[str], cuts: Mapping[str, Axes]) -> list[NamedSharding]:
        return [NamedSharding(mesh, spec_of(named[n], cuts)) for n in which]

    def partition(mesh: Any, arguments: Sequence[Any], results: Sequence[Any]) -> Any:
        cuts = cut(mesh, dict(zip((*names, *outputs), (*arguments, *results), strict=True)))
        return mesh, added(binding, local, cuts), shardings(mesh, outputs, cuts), tuple(shardings(mesh, names, cuts))

    def infer(mesh: Any, arguments: Sequence[Any], results: Sequence[Any]) -> list[NamedSharding]:
        return shardings(mesh, outputs, cut(mesh, dict(zip(names, arguments, strict=True))))

    cutting = custom_partitioning(added(binding, local, {}))
    rule, whole = _rule(names, outputs, named)
    # In the order of their first use, as Shardy wants them.
    every = dict.fromkeys(f for n in names for f in named[n] if f is not None)
    cutting.def_partition(
        partition, infer_sharding_from_operands=infer, sharding_rule=rule, need_replication_factors=whole,
        reduction_factors=tuple(f for f in every if all(f not in named[n] for n in outputs)),
    )  # fmt: skip
    with set_xla_metadata(cute_ops_kernel=label(widened(op, given), attrs)):
        return list(cutting(*arrays))


def _rule(inputs: Sequence[str], outputs: Sequence[str], named: Factors) -> tuple[str, tuple[str, ...]]:
    """Shardy's rule as text, ``m2 m1 whole0, whole1 -> m2 m1 whole2``, and its factors that are never cut."""
    wholes: list[str] = []

    def text(name: str) -> str:
        words = []
        for factor in named[name]:
            if factor is None:
                factor = f"whole{len(wholes)}"
                wholes.append(factor)
            words.append(factor)
        return " ".join(words)

    left = ", ".join(map(text, inputs))
    return f"{left} -> {', '.join(map(text, outputs))}", tuple(wholes)


def automatic() -> bool:
    """Whether XLA decides how arrays are cut, if at all."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or all(kind == AxisType.Auto for kind in mesh.axis_types)


def manual() -> set[str]:
    """The axes of the ``shard_map`` programs that are being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return {a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual}


def as_axes(axes: str | Axes | None) -> Axes:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def alike(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, each made to vary over all axes of a ``shard_map`` that any of them varies over.

    Differentiating this sums over devices, which is how replicated weights get their gradient.
    """
    axes = [_compat.varying_axes(getattr(a, "aval", None)) for a in arrays]
    union = frozenset[str]().union(*axes)
    return [_compat.vary(a, union - own) if union - own else a for a, own in zip(arrays, axes, strict=True)]


def varies(array: Any, axes: str | Axes | None) -> bool:
    """Whether a value varies over one of these axes of a ``shard_map`` with replication checks."""
    return not _compat.varying_axes(getattr(array, "aval", None)).isdisjoint(as_axes(axes))


def varying_like(array: Any, other: Any, but: str | Axes | None = None) -> Any:
    """The array as one that varies over what ``other`` varies over, except for these axes."""
    own, wanted = (_compat.varying_axes(getattr(a, "aval", None)) for a in (array, other))
    wanted -= set(as_axes(but))
    return _compat.vary(array, wanted - own) if wanted - own else array
