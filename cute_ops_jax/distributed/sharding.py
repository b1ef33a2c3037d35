"""Programs on several devices: every device runs the kernel on its own rows, and sums over rows are added up.

:mod:`cute_ops.sharding` says which dims may be cut; sums over slices are a ``psum``.

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
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import cute_ops
from cute_ops.binding import Binding, bind
from cute_ops.errors import message
from cute_ops.op import Op, Tensor
from cute_ops.sharding import Factors, factors, sums
from cute_ops_jax import _compat
from cute_ops_jax.primitive import ffi
from cute_ops_jax.primitive.arrays import specs

Axes = tuple[str, ...]
Local = Callable[..., Sequence[Any]]
Outputs = Mapping[str, Any]
# ``call(inputs, attrs) -> outputs``: an op on one device, arrays by name.
Call = Callable[..., Outputs]
# ``together(op, inputs, attrs, axes, call) -> outputs``: the same where devices along the axes have slices of the dim
# that the declaration splits.
Together = Callable[[Op, Mapping[str, Any], Mapping[str, Any], Axes, Call], Outputs]


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
        sizes = [size] * jax.lax.axis_size(axis)
        found |= op.split.merge(jnp, _side_by_side(parts, axis), inputs, attrs, sizes, whole)
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


def of_one_device(binding: Binding, call: Call, together: Together, cuts: Mapping[str, Axes]) -> Local:
    """The program of one device: ``call`` on its slices, and what is combined with those of the others."""
    op, attrs = binding.op, binding.attrs
    names, outputs = ([n for n, a in of.items() if a is not None] for of in (binding.inputs, binding.outputs))
    split = () if op.split is None else cuts.get(op.split.dim, ())

    def local(*slices: Any) -> list[Any]:
        given = dict(zip(names, slices, strict=True))
        found = together(op, given, attrs, split, call) if split else call(given, attrs)
        return [found[n] for n in outputs]

    return added(binding, local, {f: axes for f, axes in cuts.items() if axes != split})


def by_type(call: Call, together: Together, arrays: Mapping[str, Any], binding: Binding) -> Sequence[Any]:
    """Run ``call`` where shardings are known while tracing: in a ``shard_map`` over the axes that are left.

    A dim that the declaration says how to split is cut too. Axes that XLA would decide on inside of another
    ``shard_map``, or beside explicit ones, cut nothing: every device along them does the same.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    left = {a for a, kind in kinds.items() if kind != AxisType.Manual}
    explicit = {a for a, kind in kinds.items() if kind == AxisType.Explicit}
    outputs = [n for n, out in binding.outputs.items() if out is not None]
    if not left:
        found = call(arrays, binding.attrs)
        return [found[n] for n in outputs]
    named, sizes = factors(binding, split=True), {a: mesh.shape[a] for a in explicit}
    # Row-wise inputs say how rows are cut, the widest of them first.
    order = sorted(arrays, key=lambda n: -len(arrays[n].shape))
    cuts = assign(binding, [(n, jax.typeof(arrays[n]).sharding.spec) for n in order], sizes, named)
    return jax.shard_map(
        of_one_device(binding, call, together, cuts),
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
    op: Op, call: Call, together: Together, *arrays: Any, names: Sequence[str], attrs: Mapping[str, Any], devices: int
) -> list[Any]:
    """The kernel as something that XLA's partitioner cuts: it asks, when it compiles, for the program of one device.

    Args:
        call: that program, which names its kernels to :mod:`cute_ops_jax.primitive.ffi` when it is traced.
        devices: of the whole program.

    Raises:
        NotImplementedError: when XLA compiles shardings that do not name the axes of one mesh.
    """
    # Here, since programs on one device have no use for them.
    from jax.experimental.custom_partitioning import custom_partitioning
    from jax.experimental.xla_metadata import set_xla_metadata

    binding = bind(op, specs(dict(zip(names, arrays, strict=True))), attrs)
    named = factors(binding, split=True)
    outputs = [n for n, out in binding.outputs.items() if out is not None]

    def cut(mesh: Any, known: Mapping[str, Any]) -> dict[str, Axes]:
        # Arrays that nobody placed, under jax.set_mesh, have no axes to name.
        placed = {n: a for n, a in known.items() if not a.sharding.is_fully_replicated}
        if any(not isinstance(a.sharding, NamedSharding) for a in placed.values()):
            problem = "its arguments have shardings of several meshes, or of none; use NamedShardings of one mesh."
            raise NotImplementedError(message(op, problem, binding.inputs, binding.dims, binding.dtypes))
        # Row-wise arrays say how rows are cut, arguments first.
        order = sorted(placed, key=lambda n: -len(known[n].shape))
        return assign(binding, [(n, known[n].sharding.spec) for n in order], dict(mesh.shape), named)

    def shardings(mesh: Any, which: Sequence[str], cuts: Mapping[str, Axes]) -> list[NamedSharding]:
        return [NamedSharding(mesh, spec_of(named[n], cuts)) for n in which]

    def partition(mesh: Any, arguments: Sequence[Any], results: Sequence[Any]) -> Any:
        cuts = cut(mesh, dict(zip((*names, *outputs), (*arguments, *results), strict=True)))
        program = of_one_device(binding, call, together, cuts)
        return mesh, program, shardings(mesh, outputs, cuts), tuple(shardings(mesh, names, cuts))

    def infer(mesh: Any, arguments: Sequence[Any], results: Sequence[Any]) -> list[NamedSharding]:
        return shardings(mesh, outputs, cut(mesh, dict(zip(names, arguments, strict=True))))

    cutting = custom_partitioning(of_one_device(binding, call, together, {}))
    rule, whole = _rule(names, outputs, named)
    # In the order of their first use, as Shardy wants them.
    every = dict.fromkeys(f for n in names for f in named[n] if f is not None)
    cutting.def_partition(
        partition, infer_sharding_from_operands=infer, sharding_rule=rule, need_replication_factors=whole,
        reduction_factors=tuple(f for f in every if all(f not in named[n] for n in outputs)),
    )  # fmt: skip
    with set_xla_metadata(cute_ops_kernel=_label(binding, call, together, named, devices)):
        return list(cutting(*arrays))


def _label(binding: Binding, call: Call, together: Together, named: Factors, devices: int) -> str:
    """What the program is, kernels included, for the key of XLA's persistent cache: a callback says nothing.

    What XLA finds there it does not ask the callback for. So where it may find any, kernels of all programs that it
    could be are made ready now. By default the callback's address is in the key.
    """
    with ffi.noted() as symbols:
        for parts in _partitions(binding, named, 1 if _compat.callbacks_in_keys() else devices):
            program = of_one_device(binding, call, together, {f: (f,) for f in parts})
            jax.make_jaxpr(program, axis_env=list(parts.items()))(*_slices(binding, named, parts))
    attrs = (f"{n}={v}" for n, v in binding.attrs.items())
    return " ".join([binding.op.name, cute_ops.__version__, *attrs, *symbols])


def _partitions(binding: Binding, named: Factors, devices: int) -> list[dict[str, int]]:
    """Into how many parts a mesh of so many devices may cut each factor, all possible ways."""
    shapes = {n: a.shape for n, a in binding.inputs.items() if a is not None}
    sizes = {f: size for n, shape in shapes.items() for f, size in zip(named[n], shape, strict=True) if f is not None}
    found: list[dict[str, int]] = [{}]
    for prime in _primes(devices):
        more = [{**parts, f: parts.get(f, 1) * prime} for parts in found for f in sizes]
        found += [parts for i, parts in enumerate(more) if parts not in found and parts not in more[:i]]
    return [parts for parts in found if all(sizes[f] % part == 0 for f, part in parts.items())]


def _slices(binding: Binding, named: Factors, parts: Mapping[str, int]) -> list[jax.ShapeDtypeStruct]:
    """The inputs that one device then has."""
    return [
        jax.ShapeDtypeStruct(
            tuple(s // parts.get(f or "", 1) for s, f in zip(a.shape, named[n], strict=True)), jnp.dtype(a.dtype)
        )
        for n, a in binding.inputs.items()
        if a is not None
    ]


def _primes(number: int) -> Iterator[int]:
    """``12 -> 2 2 3``."""
    factor = 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            number //= factor
            yield factor


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
