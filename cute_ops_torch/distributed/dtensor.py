"""Ops on DTensors: each rank runs the op on its own slices, wherever the declaration allows that.

One rule serves every op. :mod:`cute_ops.declaration.sharding` names the factors: dims of the arrays that ranks may
share. A mesh dim that shards an input along a factor shards every array that has the factor; arrays without it are
replicated. Gradients of inputs that rows share come out as ``Partial`` sums. A dim that the declaration splits (the
classes of a cross entropy) stays sharded too: ranks exchange the results of their slices and combine them. So does an
inner one (the terms of a product with an epilogue): ranks add up their partial sums and go on with that. Inputs with
any other sharding are redistributed first.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cute_ops.constants import of_attributes
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.messages import message
from cute_ops.declaration.op import Op
from cute_ops.declaration.sharding import OnTerms, factors, tied
from cute_ops.jit.layout import compact
from cute_ops_torch import registry
from cute_ops_torch.distributed.split import Slice, program_on_slice, run_on_slice
from cute_ops_torch.library import framework, program
from cute_ops_torch.library.nodes import sharing
from cute_ops_torch.library.reference import fake_kernel, register_fake, run_reference
from cute_ops_torch.library.remembered import remembered
from cute_ops_torch.library.schema import filler, schema
from cute_ops_torch.library.tensors import Tensors, bind_tensors, check_strides, readable

Tensor = torch.Tensor
# DTensors by name: the factors of their dims, and their placements.
Placed = Mapping[str, tuple[Sequence[str | None], Sequence[Placement]]]


class _Gathered(threading.local):
    """Tensors that the steps of one backward have redistributed: inputs that several of them read.

    Attributes:
        names: those inputs; none outside of a backward of several steps.
        known: by name and placements the whole tensor and this rank's slice.
    """

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self.known: dict[Any, tuple[Tensor, Tensor]] = {}


_gathered = _Gathered()


@contextmanager
def _gather_once(names: frozenset[str]) -> Iterator[None]:
    """Within the block, which is of one backward, redistribute inputs of these names once."""
    before = _gathered.names, _gathered.known
    _gathered.names, _gathered.known = names, {}
    try:
        yield
    finally:
        _gathered.names, _gathered.known = before


sharing[DTensor] = _gather_once


def shard(op: Op, overload: Any, library: torch.library.Library) -> None:
    """Teach an op to take DTensors."""
    fill, arity = filler(op), len(op.inputs)
    cache: dict[Any, CallPlacements] = {}
    on_slice = _define_on_slice(op, library) if op.program and op.split else None

    def call(*args: Any) -> Any:
        args = fill(args)
        tensors, attrs = args[:arity], args[arity:]
        placed = remembered(cache, _key(tensors, attrs), lambda: CallPlacements(op, tensors, attrs))
        local, own = placed.local_inputs(tensors), placed.slice
        if placed.terms:
            raw = placed.run_on_terms(local)
        elif own is None:
            raw = overload(*local, *attrs)
        elif on_slice is not None:
            raw = on_slice(*local, *attrs, [own.whole, own.rank, own.ranks], own.group)
        else:
            raw = run_on_slice(op, overload, dict(zip(op.inputs, local, strict=True)), placed.binding.attrs, own)
        return placed.wrap_outputs(raw)

    add_rule(overload.name(), call, library)


def _define_on_slice(op: Op, library: torch.library.Library) -> Any:
    """An op of one rank, which runs a program on its slice: compilers see no more of it."""
    name, local, arity = f"{op.name}_on_slice", copy(op), len(op.inputs)
    local.check = lambda binding: None  # of the whole call; a slice may be empty
    fake = fake_kernel(local, lambda: None)

    def run(*args: Any) -> Any:
        *given, (whole, rank, ranks), group = args
        binding = bind_tensors(local, given[:arity], given[arity:])
        return run_reference(binding, given[:arity], program_on_slice(op, Slice(whole, rank, ranks, group)))

    arguments = schema(op, name).replace(") ->", ", int[] part=[], str group='') ->")
    library.define(arguments, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    library.impl(name, run, "CompositeExplicitAutograd")
    register_fake(library, name, lambda *args: fake(*args[:-2]))
    return getattr(getattr(torch.ops, library.ns), name)


def add_rule(name: str, call: Callable[..., Any], library: torch.library.Library) -> None:
    """Run ``call`` where an op of this name is called with DTensors."""

    def rule(cls: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_grad_enabled():  # autograd differentiates the op itself, above this
            with torch.no_grad():
                return call(*args, **(kwargs or {}))
        return call(*args, **kwargs) if kwargs else call(*args)

    torch.library.register_torch_dispatch(name, DTensor, rule, lib=library)


def _key(tensors: Tensors, attrs: Sequence[Any]) -> Any:
    """All that a call's placements depend on, and how this rank's slices lie.

    Specs are compared by identity first, and DTensors that an op made share theirs: this costs a warm call little.
    """
    places: list[Any] = [of_attributes(attrs)]
    for t in tensors:
        if isinstance(t, DTensor):
            local = t._local_tensor
            places += (t._spec, local.shape, local.stride())
        else:
            places.append(None if t is None else (t.device, t.shape, t.stride(), t.dtype))
    return tuple(places)


class CallPlacements:
    """The placements of inputs and outputs with which ranks run a call, and all calls like it.

    Args:
        op: the declaration.
        tensors: the inputs; plain tensors are the same on every rank.
        attrs: the attributes.

    Raises:
        TypeError: a plain tensor beside DTensors as an input that has a gradient or is written, or what the op refuses.
        ValueError: DTensors of several meshes, an input that is written and placed otherwise, or what the op refuses.

    Attributes:
        binding: the call with its whole arrays.
        factors: for each mesh dim the factor that it shards, or None.
        split: the dim that the declaration splits, or None.
        slice: this rank's slice of that dim; None where no mesh dim shards it.
        terms: the inner dims that mesh dims shard.
        scattered: for each mesh dim that shards an inner dim, the leading dim that it shards in other inputs, as a
            factor: each rank then gets its rows of the sum. None for other mesh dims, and where each gets all rows.
    """

    def __init__(self, op: Op, tensors: Tensors, attrs: Sequence[Any]) -> None:
        self.binding = bind_tensors(op, tensors, attrs)
        check_strides(self.binding, tensors)
        given = {n: t for n, t in zip(op.inputs, tensors, strict=True) if t is not None}
        sharded = {n: t for n, t in given.items() if isinstance(t, DTensor)}
        self.mesh = next(iter(sharded.values())).device_mesh
        self._check_meshes(given, sharded)
        self._named = named = factors(self.binding, split=True)
        self.split = op.split.dim if op.split else None
        placed = {n: (named[n], t.placements) for n, t in sharded.items()}
        self.factors = self._choose_factors(placed)
        self.terms = set(op.inner).intersection(self.factors)
        self.scattered = [self._rows_of_others(k, placed) for k in range(self.mesh.ndim)]
        self._inputs = [self._input_placements(named[n]) if n in given else () for n in op.inputs]
        self._check_written(sharded)
        self.slice = None
        if self.split is not None and self.split in self.factors:
            self.slice = Slice.of_mesh(self.mesh, self.factors.index(self.split), self.binding.dims[self.split])
        self._as_they_lie = [
            isinstance(t, DTensor) and t.placements == placements and self._readable(name, t._local_tensor)
            for name, t, placements in zip(op.inputs, tensors, self._inputs, strict=True)
        ]
        self._specs: list[Any] = []
        self._sums: dict[Any, tuple[Any, list[Placement]]] = {}
        self._outputs: list[tuple[tuple[Placement, ...], tuple[int, ...]]] = []
        for name, array in self.binding.outputs.items():
            if array is None:
                self._outputs.append(((Replicate(),) * self.mesh.ndim, (0,)))
            else:
                self._outputs.append((self._output_placements(name), tuple(array.shape)))

    def _check_meshes(self, given: Mapping[str, Any], sharded: Mapping[str, DTensor]) -> None:
        """Refuse plain tensors beside DTensors, several meshes, and shards of dims that the declaration wants whole."""
        op, first = self.binding.op, next(iter(sharded))
        for name in given:
            if name in (*op.differentiable, *op.mutates) and name not in sharded:
                problem = f"argument `{name}` is a torch.Tensor, but `{first}` is a DTensor; distribute both."
                raise TypeError(refusal(self.binding, problem))
            if name in sharded and sharded[name].device_mesh != self.mesh:
                problem = f"argument `{name}` is on {sharded[name].device_mesh}, but `{first}` is on {self.mesh}."
                raise ValueError(refusal(self.binding, problem))
        for name, reason in self._refused(sharded):
            raise NotImplementedError(refusal(self.binding, f"argument `{name}` {reason}."))

    def _check_written(self, sharded: Mapping[str, DTensor]) -> None:
        """Refuse to redistribute an input that the op writes."""
        op = self.binding.op
        for name, placements in zip(op.inputs, self._inputs, strict=True):
            if name in op.mutates and name in sharded and sharded[name].placements != placements:
                problem = (
                    f"argument `{name}` is written, so this call cannot redistribute it from "
                    f"{sharded[name].placements} to {placements}; do so before it."
                )
                raise ValueError(refusal(self.binding, problem))

    def _refused(self, sharded: Mapping[str, DTensor]) -> Iterator[tuple[str, str]]:
        """The inputs that are sharded along a dim that the declaration wants whole, each with what it says."""
        for name, tensor in sharded.items():
            dims = self.binding.op.inputs[name].dims
            own = dict(zip(range(tensor.ndim - len(dims), tensor.ndim), dims, strict=True))
            for place, dim in own.items():
                if dim.name in self.binding.op.whole and any(p.is_shard(place) for p in tensor.placements):
                    yield name, self.binding.op.whole[dim.name]

    def _choose_factors(self, sharded: Placed) -> list[Any]:
        """For each mesh dim a factor that it shards in an input: the one for which the fewest elements move, of equal
        ones that of the input with the most dims.
        """
        order = sorted(sharded.values(), key=lambda each: -len(each[0]))
        chosen: list[str | None] = []
        for k in range(self.mesh.ndim):
            shards = [(names, p.dim) for names, placements in order if type(p := placements[k]) is Shard]
            # Only one mesh dim can shard the dim that is split.
            found = [f for names, dim in shards if (f := names[dim]) and not (f == self.split and f in chosen)]
            found = [f for f in found if self._fits(f, [i for i in range(k + 1) if i == k or chosen[i] == f])]
            # The split dim first: a vocabulary should not have to fit one rank.
            if len(set(found)) > 1 and self.split not in found:
                found = [min(dict.fromkeys(found), key=lambda f: self._moved(f, k, sharded))]
            chosen.append(self.split if self.split in found else found[0] if found else None)
        return chosen

    def _moved(self, factor: str, k: int, sharded: Placed) -> int:
        """How many elements ranks exchange if a mesh dim shards a factor: of inputs that it shards otherwise, and of
        outputs that are sums then.
        """
        binding, inner = self.binding, factor in self.binding.op.inner
        shards = {n: (names, names[p.dim]) for n, (names, ps) in sharded.items() if type(p := ps[k]) is Shard}
        stay = {n for n, (names, own) in shards.items() if own == factor or (inner and self._keeps_rows(names, own))}
        sums = {n for n, names in self._named.items() if n in binding.outputs and factor not in names}
        arrays = {**binding.inputs, **binding.outputs}
        return sum(math.prod(a.shape) for n in (shards.keys() - stay) | sums if (a := arrays[n]) is not None)

    def _fits(self, factor: str, mesh_dims: Sequence[int]) -> bool:
        """Whether ranks along these mesh dims may share a factor: of tied dims, ``g*r``, each gets as many whole groups
        as the others.
        """
        ranks = math.prod(self.mesh.size(i) for i in mesh_dims)
        return factor not in tied(self.binding) or self.binding.dims[factor] % ranks == 0

    def _rows_of_others(self, k: int, sharded: Placed) -> str | None:
        """The leading dim that a mesh dim shards in some inputs while it shards an inner dim of others."""
        if self.factors[k] not in self.terms:
            return None
        shards = [(names, names[p.dim]) for names, ps in sharded.values() if type(p := ps[k]) is Shard]
        found = (own for names, own in shards if self._keeps_rows(names, own) and own not in self.factors)
        return next(found, None)

    def _keeps_rows(self, names: Sequence[str | None], own: str | None) -> bool:
        """Whether an input whose factor ``own`` is sharded may stay so while an inner dim of others is: what is summed
        over that has all of these rows. An MLP has the dim within, so its x is gathered.
        """
        binding, inner = self.binding, set(self.binding.op.inner)
        every = [self._named.get(key, ()) for key in binding.op.inputs]
        summed = any(own in of and not inner.isdisjoint(of) for of in every)
        return own is not None and own not in binding.dims and summed and inner.isdisjoint(names)

    def _input_placements(self, names: Sequence[str | None]) -> tuple[Placement, ...]:
        chosen = [f if f in names else rows for f, rows in zip(self.factors, self.scattered, strict=True)]
        return tuple(Shard(names.index(f)) if f and f in names else Replicate() for f in chosen)

    def _output_placements(self, name: str) -> tuple[Placement, ...]:
        """Sharded along factors that an output has; a sum over ranks along others, unless slices have been merged."""
        split, names = self.binding.op.split, self._named[name]
        replicated = {None} if split is None or split.adds_up(name) else {None, self.split}
        inner = self.terms.difference(names)
        chosen = [rows if f in inner else f for f, rows in zip(self.factors, self.scattered, strict=True)]
        return tuple(
            Shard(names.index(f)) if f is not None and f in names else Replicate() if f in replicated else Partial()
            for f in chosen
        )

    def run_on_terms(self, local: Tensors) -> list[Any]:
        """Raw outputs for this rank's rows, from its slices of the inputs, whose inner dims ranks share."""
        op, given = self.binding.op, dict(zip(self.binding.op.inputs, local, strict=True))
        with torch._C._DisableAutocast():  # the declaration sets the dtypes
            on_terms = OnTerms(framework, self.terms, program.call, self._add)
            found = on_terms.run(op, given, self.binding.attrs)
        return [found[name] for name in op.results]

    def _add(self, partial: Tensor, dims: Iterable[str]) -> Tensor:
        """Add up the ranks' partial sums over inner dims; the result is this rank's rows where they are scattered."""
        key = partial.shape, partial.stride(), partial.dtype
        spec, wanted = remembered(self._sums, key, lambda: self._sum(partial))
        return _with_spec(partial, spec).redistribute(placements=wanted).to_local()

    def _sum(self, partial: Tensor) -> tuple[Any, list[Placement]]:
        """The spec of a sum of which each rank has such a part, and how it is placed once it is added up."""
        placements = [Partial() if f in self.terms else Replicate() for f in self.factors]
        rows = next(self._named[name] for name in self.binding.outputs if name in self._named)
        wanted: list[Placement] = [Shard(rows.index(f)) if f else Replicate() for f in self.scattered]
        return DTensor.from_local(partial, self.mesh, placements, run_check=False)._spec, wanted

    def local_inputs(self, tensors: Tensors) -> list[Tensor | None]:
        """This rank's slices of the inputs."""
        places = zip(self.binding.op.inputs, tensors, self._inputs, self._as_they_lie, strict=True)
        return [
            None if t is None else t._local_tensor if as_it_lies else self._local(name, t, placements)  # type: ignore[attr-defined]
            for name, t, placements, as_it_lies in places
        ]

    def _readable(self, name: str, local: Tensor) -> bool:
        op = self.binding.op
        return name in op.mutates or readable(op.inputs[name], local) is local

    def _local(self, name: str, tensor: Tensor, placements: tuple[Placement, ...]) -> Tensor:
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        if tensor.placements != placements:
            if self.binding.op.inputs[name].unread:  # only its shape is used
                return tensor.to_local().new_empty(self._local_shape(tensor.shape, placements))
            local = self._redistributed(name, tensor, placements)
        else:
            local = tensor.to_local()
        op = self.binding.op
        return local if name in op.mutates else readable(op.inputs[name], local)

    def _redistributed(self, name: str, tensor: DTensor, placements: tuple[Placement, ...]) -> Tensor:
        known = _gathered.known.get((name, placements))
        if known is not None and known[0] is tensor:
            return known[1]
        # Detached: the redistributed tensor would require a gradient, which has no way back.
        detached = _with_spec(tensor._local_tensor, tensor._spec)
        local: Tensor = detached.redistribute(placements=placements).to_local()
        if name in _gathered.names and name not in self.binding.op.mutates:
            _gathered.known[name, placements] = tensor, local
        return local

    def _local_shape(self, shape: Sequence[int], placements: Sequence[Placement]) -> list[int]:
        """The shape of this rank's slice of an array."""
        sizes = list(shape)
        for k, placement in enumerate(placements):
            if type(placement) is Shard:
                sizes[placement.dim] = Slice.of_mesh(self.mesh, k, sizes[placement.dim]).size
        return sizes

    def wrap_outputs(self, raw: Any) -> Any:
        """The op's results, from this rank's slices of them.

        The first call lets torch check and describe the outputs; others, which are like it, share the descriptions.
        """
        local = () if raw is None else raw if isinstance(raw, tuple | list) else (raw,)
        if self._specs:
            results = [_with_spec(tensor, spec) for tensor, spec in zip(local, self._specs, strict=True)]
        else:
            results = [self._wrap(tensor, *output) for tensor, output in zip(local, self._outputs, strict=True)]
            self._specs = [result._spec for result in results]
        return None if not results else results[0] if len(results) == 1 else tuple(results)

    def _wrap(self, local: Tensor, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
        """The array of this shape of which this rank has the slice ``local``."""
        size, stride = torch.Size(shape), compact(shape)
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=size, stride=stride)


def _with_spec(local: Tensor, spec: Any) -> DTensor:
    """A DTensor as torch's own ops make theirs.

    ``DTensor.from_local`` is an autograd function, and the class's ``__init__`` does nothing, in eight calls.
    """
    made: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    return made


def refusal(binding: Binding, problem: str) -> str:
    return message(binding.op, problem, binding.inputs, binding.dims, binding.dtypes)


def _scaled_gradient(gradient: DTensor, dloss: Tensor) -> DTensor:
    factor = dloss.full_tensor() if isinstance(dloss, DTensor) else dloss
    return _with_spec(torch.ops.cute.scaled_gradient(gradient.to_local(), factor), gradient._spec)


_library = torch.library.Library("cute", "FRAGMENT")
add_rule("cute::scaled_gradient", _scaled_gradient, _library)
for _each in list(registry.everything()):
    shard(*_each)
