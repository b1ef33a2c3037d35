"""An op that XLA's partitioner shards: with automatic mesh axes, XLA asks for the program of one device when it
compiles. JAX calls this ``custom_partitioning``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import cute_ops
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.messages import message
from cute_ops.declaration.sharding import Factors, factors, sizes
from cute_ops_jax import _compat
from cute_ops_jax.distributed.slices import Cuts, Local, assign, present, spec_of

# ``local(cuts)``: the program of one device, which names its kernels when it is traced.
Locals: TypeAlias = Callable[[Cuts], Local]
# ``kernels(traced) -> names``: traces, and tells the kernels that what was traced calls.
Kernels: TypeAlias = Callable[[Callable[[], object]], Iterable[str]]


def by_partitioner(local: Locals, kernels: Kernels, devices: int, binding: Binding, arrays: Sequence[Any]) -> list[Any]:
    """The op on arrays that XLA shards over so many devices.

    Raises:
        NotImplementedError: when XLA compiles shardings that do not name the axes of one mesh.
    """
    # Imported here, since programs on one device do not use them and start faster without.
    from jax.experimental.custom_partitioning import custom_partitioning
    from jax.experimental.xla_metadata import set_xla_metadata

    named = factors(binding, split=True)
    names, outputs = present(binding.inputs), present(binding.results)

    def cut(mesh: Any, known: Mapping[str, Any]) -> Cuts:
        # Arrays without a placement, under jax.set_mesh, have no axes to name.
        known = {n: a for n, a in known.items() if not a.sharding.is_fully_replicated}
        # XLA may shard a dim along a part of an axis, as after a reshape. JAX would raise an error.
        placed = {n: s for n, a in known.items() if (s := _compat.named_sharding(a.sharding, mesh)) is not None}
        if any(not isinstance(sharding, NamedSharding) for sharding in placed.values()):
            problem = "its arguments have shardings of several meshes, or of none; use NamedShardings of one mesh."
            raise NotImplementedError(message(binding.op, problem, binding.inputs, binding.dims, binding.dtypes))
        # Row-wise arrays say how rows are sharded, arguments first.
        order = sorted(placed, key=lambda n: -len(known[n].shape))
        return assign(binding, named, [(n, placed[n].spec) for n in order], dict(mesh.shape))

    def shardings(mesh: Any, which: Iterable[str], cuts: Cuts) -> list[NamedSharding]:
        return [NamedSharding(mesh, spec_of(named[n], cuts)) for n in which]

    def partition(mesh: Any, arguments: Sequence[Any], results: Sequence[Any]) -> Any:
        cuts = cut(mesh, dict(zip((*names, *outputs), (*arguments, *results), strict=True)))
        return mesh, local(cuts), shardings(mesh, outputs, cuts), tuple(shardings(mesh, names, cuts))

    def infer(mesh: Any, arguments: Sequence[Any], results: Sequence[Any]) -> list[NamedSharding]:
        return shardings(mesh, outputs, cut(mesh, dict(zip(names, arguments, strict=True))))

    partitioned = custom_partitioning(local({}))
    rule, whole, lengths = _rule(binding, names, outputs, named)
    # In the order of their first use, as Shardy wants them.
    every = dict.fromkeys(f for n in names for f in named[n] if f is not None)
    partitioned.def_partition(
        partition, infer_sharding_from_operands=infer, sharding_rule=rule, need_replication_factors=whole,
        reduction_factors=tuple(f for f in every if all(f not in named[n] for n in outputs)),
        decode_shardings=False, **lengths,
    )  # fmt: skip
    with set_xla_metadata(cute_ops_kernel=_label(local, kernels, devices, binding, named)):
        return list(partitioned(*arrays))


def _rule(
    binding: Binding, inputs: Iterable[str], outputs: Iterable[str], named: Factors
) -> tuple[str, tuple[str, ...], dict[str, int]]:
    """Shardy's rule as text, ``m2 m1 whole0, whole1 -> m2 m1 whole2``, its factors that are never sharded, and the
    sizes of those that no dim is alone: of ``(g whole0)``, which is a tied dim.
    """
    wholes: list[str] = []
    alone: set[str] = set()
    lengths, arrays, known = {}, {**binding.inputs, **binding.results}, sizes(binding, named)

    def text(name: str) -> str:
        words = []
        for factor, size in zip(named[name], present(arrays)[name].shape, strict=True):
            rest = f"whole{len(wholes)}"
            if factor is None or size != known[factor]:
                wholes.append(rest)
            if factor is not None and size != known[factor]:
                lengths[factor], lengths[rest] = known[factor], size // known[factor]
                words.append(f"({factor} {rest})")
                continue
            words.append(factor or rest)
            alone.add(words[-1])
        return " ".join(words)

    left = ", ".join(map(text, inputs))
    rule = f"{left} -> {', '.join(map(text, outputs))}"
    return rule, tuple(wholes), {f: size for f, size in lengths.items() if f not in alone}


def _label(local: Locals, kernels: Kernels, devices: int, binding: Binding, named: Factors) -> str:
    """The op, its attributes and its kernels, for the key of XLA's persistent cache, which would otherwise say nothing
    of the program behind the callback.

    XLA does not call back for a program that it finds in its cache. So wherever it may find one, the kernels of every
    program that it could be are loaded now. By default the callback's address is in the key: no other process finds it.
    """
    ways = _partitions(binding, named, 1 if _compat.callbacks_in_keys() else devices)

    def trace() -> None:
        for counts in ways:
            program = local({f: (f,) for f in counts})
            jax.make_jaxpr(program, axis_env=list(counts.items()))(*_slices(binding, named, counts))

    attrs = (f"{n}={v}" for n, v in binding.attrs.items())
    return " ".join([binding.op.name, cute_ops.__version__, *attrs, *kernels(trace)])


def _partitions(binding: Binding, named: Factors, devices: int) -> list[dict[str, int]]:
    """All ways in which a mesh of so many devices may shard the factors: the number of slices of each."""
    given = present(binding.inputs)
    known = sizes(binding, {n: named[n] for n in given})
    found: list[dict[str, int]] = [{}]
    for prime in _primes(devices):
        more = [{**counts, f: counts.get(f, 1) * prime} for counts in found for f in known]
        found += [counts for i, counts in enumerate(more) if counts not in found and counts not in more[:i]]
    return [counts for counts in found if all(known[f] % count == 0 for f, count in counts.items())]


def _primes(number: int) -> Iterator[int]:
    """``12 -> 2 2 3``."""
    factor = 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            number //= factor
            yield factor


def _slices(binding: Binding, named: Factors, counts: Mapping[str, int]) -> list[jax.ShapeDtypeStruct]:
    """The inputs that one device then has."""
    return [
        jax.ShapeDtypeStruct(
            tuple(s // counts.get(f or "", 1) for s, f in zip(a.shape, named[n], strict=True)), jnp.dtype(a.dtype)
        )
        for n, a in present(binding.inputs).items()
    ]
