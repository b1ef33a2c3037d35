"""The one module that uses parts of JAX that its documentation does not promise.

Written against jax 0.9.1 to 0.12.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import jax
from jax._src import api_util, core, linear_util
from jax._src.core import JaxprEqn as JaxprEqn
from jax._src.core import Literal as Literal
from jax._src.core import Primitive, get_axis_env  # jax.extend.core has the first, but takes Pallas along: 20 ms
from jax._src.core import Tracer as Tracer
from jax._src.dispatch import apply_primitive, prim_requires_devices_during_lowering
from jax._src.interpreters import partial_eval
from jax._src.interpreters.batching import BatchTracer
from jax._src.sharding_impls import ShardingContext, parse_flatten_op_sharding
from jax.core import ShapedArray as ShapedArray
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from jax._src.core import ClosedJaxpr as ClosedJaxpr
else:
    ClosedJaxpr = getattr(core, "ClosedJaxpr", core.Jaxpr)  # one class since JAX 0.12

# For ``inline`` of ``jax.jit``: callers see the equations of a function, and lowering sees who made its operands. Since
# JAX has ``jax.Inline``, True means at lowering only.
INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True


def new_primitive(
    name: str, abstract: Callable[..., Any], batch: Callable[..., Any], differentiate: Callable[..., Any]
) -> Primitive:
    """A primitive with several results.

    Args:
        abstract: ``abstract(*avals, **params) -> [ShapedArray]``.
        batch: ``batch(arrays, axes, **params) -> (arrays, axes)``; an axis is None where unbatched, all may be.
        differentiate: ``differentiate(primals, tangents, **params)``, the forward-mode rule.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *arrays, **params: apply_primitive(primitive, *arrays, **params))
    primitive.def_abstract_eval(abstract)
    batching.fancy_primitive_batchers[primitive] = lambda axis, arrays, axes, **params: batch(arrays, axes, **params)
    ad.primitive_jvps[primitive] = differentiate
    return primitive


def reverse_only(name: str, refuse: Callable[..., NoReturn]) -> Callable[..., list[Any]]:
    """The identity of several arrays. Batching, running or lowering its forward-mode derivative calls ``refuse``.
    Reverse mode transposes that derivative first, to the identity.
    """

    def of_tangents(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Sequence[Any], list[Any]]:
        given = [t for t in tangents if type(t) is not ad.Zero]
        results = iter(linear.bind(*given))
        return primals, [t if type(t) is ad.Zero else next(results) for t in tangents]

    same = new_primitive(name, lambda *avals: avals, lambda arrays, axes: (same.bind(*arrays), axes), of_tangents)
    linear = new_primitive(f"{name}_jvp", lambda *avals: avals, refuse, refuse)
    ad.primitive_transposes[linear] = lambda cotangents, *arrays: cotangents
    register_lowering(same, lambda *arrays: arrays)
    register_lowering(linear, refuse)
    return cast(Callable[..., list[Any]], same.bind)


def register_lowering(
    primitive: Primitive,
    body: Callable[..., Sequence[Any]],
    platform: str | None = None,
    spread: Callable[..., Sequence[Any]] | None = None,
    transposed: bool = False,
) -> None:
    """Lower a primitive by tracing ``body(*arrays, **params)``.

    Args:
        primitive: one of ours.
        body: what to trace.
        platform: the platform to lower for; None for every platform that has no rule of its own.
        spread: the body to trace instead where XLA partitions the program over several devices; it gets their number
            as ``devices``.
        transposed: whether ``body`` gets for each operand, as ``last_dims``, which of its dims was the last before the
            program transposed it, counted from the end; None where it did not.
    """

    def rule(context: Any, *operands: Any, **params: Any) -> Any:
        axes = context.module_context.axis_context
        chosen: Callable[..., Any] = partial(body, last_dims=tuple(map(_last_dim, operands))) if transposed else body
        if spread is not None and isinstance(axes, ShardingContext) and axes.num_devices > 1:
            chosen = partial(spread, devices=axes.num_devices)
        return mlir.lower_fun(chosen, multiple_results=True)(context, *operands, **params)

    # A lowering that JAX keeps for other calls sees no operands.
    mlir.register_lowering(primitive, rule, platform=platform, cacheable=not transposed)


def _last_dim(operand: Any) -> int | None:
    """Which dim of an operand was the last before the program transposed it, counted from the end."""
    made_by = operand.owner
    if getattr(made_by, "name", "") != "stablehlo.transpose":
        return None
    order = list(made_by.attributes["permutation"])
    return order.index(len(order) - 1) - len(order)


def needs_devices(primitive: Primitive) -> None:
    """Make a program's devices and mesh known when the primitive is lowered, as ``custom_partitioning`` needs."""
    prim_requires_devices_during_lowering.add(primitive)


def named_sharding(sharding: Any, mesh: Any) -> Any:
    """A sharding of XLA by the axes of a mesh; None if it shards along a part of an axis, which has no name."""
    if isinstance(sharding, NamedSharding) or mesh.empty:
        return sharding
    try:
        return NamedSharding(mesh, parse_flatten_op_sharding(sharding._hlo_sharding, mesh)[0])
    except ValueError:
        return None


def callbacks_in_keys() -> bool:
    """Whether the keys of XLA's persistent cache hold the address of ``custom_partitioning``'s callback. Then no other
    process finds the entries.
    """
    return not getattr(jax.config, "jax_remove_custom_partitioning_ptr_from_cache_key", False)


def varying_axes(aval: Any) -> frozenset[str]:
    """The mesh axes of a ``shard_map`` with replication checks over which a value varies."""
    manual = getattr(aval, "manual_axis_type", None)  # jax >= 0.10
    found = manual.varying if manual is not None else getattr(aval, "vma", ())
    return frozenset(found)


def mapped_axes(arrays: Iterable[Any]) -> frozenset[str]:
    """The explicit mesh axes that ``vmap`` has taken out of the types of arrays: those that shard a dim it maps over.

    While a function is mapped the context names them. A backward rule runs later, and only its tracers know them.
    """
    found: frozenset[str] = getattr(get_axis_env(), "explicit_mesh_axis_names", frozenset())
    for array in arrays:
        while isinstance(array, BatchTracer):
            found |= frozenset(getattr(array._trace.axis_data, "explicit_mesh_axis", None) or ())
            array = array.val
    return found


def vary(array: Any, axes: frozenset[str]) -> Any:
    """The array, made to vary over these axes too."""
    return jax.lax.pcast(array, tuple(sorted(axes)), to="varying")


def aval_like(first: Any, shape: Sequence[Any], dtype: Any, sharding: NamedSharding | None = None) -> ShapedArray:
    """An abstract value on the mesh of ``first``, which varies over the axes that that varies over."""
    manual = getattr(first, "manual_axis_type", None)
    known = {"manual_axis_type": manual} if manual is not None else {"vma": first.vma}
    if first.sharding.mesh.empty:
        return ShapedArray(tuple(shape), dtype)
    sharding = sharding or NamedSharding(first.sharding.mesh, PartitionSpec(*(None,) * len(shape)))
    return ShapedArray(tuple(shape), dtype, sharding=sharding, **known)


def custom_calls(program: bytes) -> set[str]:
    """The targets of custom calls in a serialised StableHLO module, without those that JAX promises to keep: other
    libraries' kernels, and callbacks, whose number is valid in one process only.

    Raises:
        ValueError: the module cannot be read.
    """
    # Only loading an exported program needs these.
    from jax._src.export._export import _CUSTOM_CALL_TARGETS_GUARANTEED_STABLE as STABLE
    from jax.extend.mlir import deserialize_portable_artifact, ir

    found: set[str] = set()

    def note(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            found.add(ir.StringAttr(operation.attributes["call_target_name"]).value)
        return ir.WalkResult.ADVANCE

    with mlir.make_ir_context():
        try:
            module = deserialize_portable_artifact(program)
        except Exception as error:  # of a type that depends on the version
            raise ValueError(f"its StableHLO cannot be read: {error}") from error
        (ir.Module.parse(module) if isinstance(module, (str, bytes)) else module).operation.walk(note)
    return found - STABLE


def bind(equation: Any, inputs: Sequence[Any], **changed: Any) -> list[Any]:
    """Run an equation of a jaxpr, with some of its parameters changed."""
    given = equation.primitive.get_bind_params(equation.params | changed)
    subfunctions, params = given if isinstance(given, tuple) else ((), given)  # jax < 0.10
    with equation.ctx.manager:
        made = equation.primitive.bind(*subfunctions, *inputs, **params)
    return list(made) if equation.primitive.multiple_results else [made]


def mesh_among(jaxpr: ClosedJaxpr) -> Any:
    """The mesh of the program's context, if some equations of a jaxpr are in it and others are in another, as those of
    ``auto_axes`` are; else None.
    """
    meshes = {mesh_of(equation) for equation in jaxpr.jaxpr.eqns}
    kinds = {mesh: getattr(mesh, "axis_types", ()) for mesh in meshes}
    if any(AxisType.Manual in each for each in kinds.values()):  # `vmap` makes constants outside of a shard map
        meshes = {mesh for mesh in meshes if kinds[mesh]}
    ambient = jax.sharding.get_abstract_mesh() if len(meshes) > 1 else None
    return ambient if ambient in meshes else None


def mesh_of(equation: Any) -> Any:
    """The mesh of an equation's context."""
    return getattr(equation.ctx, "cur_abstract_mesh", None)


def run(jaxpr: ClosedJaxpr, arrays: Sequence[Any]) -> list[Any]:
    """The outputs of a jaxpr."""
    return list(core.jaxpr_as_fun(jaxpr)(*arrays))


def constants_of_scan(params: Any) -> int:
    """How many of a scan's operands are the same in each step: the first ones."""
    if "num_consts" in params:
        return int(params["num_consts"])
    return len(params["ft_in"].unpack()[0])  # newer versions have trees of the operands


def retraced(function: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The jaxpr of a function of arrays of these types, and the arrays that it refers to, which come first."""
    info = api_util.debug_info("fuse", function, tuple(avals), {})
    wrapped = linear_util.wrap_init(function, debug_info=info)
    jaxpr, _, constants = partial_eval.trace_to_jaxpr_dynamic(wrapped, list(avals))
    return partial_eval.convert_constvars_jaxpr(jaxpr), list(constants)


def closed(jaxpr: Any) -> Any:
    """A jaxpr without constants as a closed one."""
    return partial_eval.close_jaxpr(jaxpr)
