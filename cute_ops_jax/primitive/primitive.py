"""An op as a JAX primitive: one per declaration, the backward op included.

A primitive takes the inputs that are present, in declared order and with any leading dims, and gives the new values of
those that the op mutates, then the outputs that exist. Its parameters are plain values: the names of those inputs, the
attributes with the scalars, and whether inputs are donated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache, partial, wraps
from typing import Any, NoReturn, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from cute_ops.constants import Exact
from cute_ops.declaration.batching import as_one_call
from cute_ops.declaration.binding import Binding, bind
from cute_ops.declaration.messages import message
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import Array
from cute_ops.declaration.sharding import OnTerms, with_others
from cute_ops_jax import _compat
from cute_ops_jax.distributed import explicit, partitioner, slices
from cute_ops_jax.distributed.varying import Axes, alike
from cute_ops_jax.primitive import ffi, framework, lowering
from cute_ops_jax.primitive.arrays import Arrays, Attributes, in_order, promoting, specs

T = TypeVar("T")
MOST_TRACED = 512
# ``call(op, inputs, attrs, inplace=False)``: an op's outputs by name.
Call: TypeAlias = Callable[..., Arrays]
# :func:`lowering.reference` or :func:`lowering.kernel`.
Lowering: TypeAlias = Callable[..., list[jax.Array]]


def one_for_each(make: Callable[[Op], T]) -> Callable[[Op], T]:
    """:func:`functools.cache`, but threads that ask at once get the same object."""
    made, lock = cache(make), threading.RLock()

    @wraps(make)
    def call(op: Op) -> T:
        with lock:
            return made(op)

    return call


class OpPrimitive:
    """A declaration with its primitive.

    Calling it binds the primitive; arrays and results go by name, None where absent.
    """

    # How devices that have slices of the dim that the declaration splits run the op.
    together: slices.Together = staticmethod(slices.on_slices)
    # Whether XLA's partitioner gets the reference in one piece too, not only the kernel.
    partitions_reference = False
    # The platforms that run the kernel.
    platforms = ("cuda",)
    # Whether XLA sees what the op is made of, and decides how that is sharded.
    transparent = False

    def __init__(self, op: Op) -> None:
        self.op = op
        # What messages call it: the op that it runs in place of, to save more for the gradient.
        self.stands_for = op
        rules = (self._abstract, self._batch, self._differentiate)
        self.primitive = _compat.new_primitive(f"cute_{op.name}", *rules)
        # Its twin that XLA may partition: JAX must then know the devices when it lowers.
        self.partitioned = _compat.new_primitive(f"cute_{op.name}", *rules)
        _compat.needs_devices(self.partitioned)
        body, spread = partial(self._lower, lowering.reference), partial(self._spread, lowering.reference)
        _compat.register_lowering(self.primitive, body)
        _compat.register_lowering(self.partitioned, body, spread=spread if self.partitions_reference else None)
        body, spread = partial(self._lower, lowering.kernel), partial(self._spread, lowering.kernel)
        transposed = any(t.contiguous is not None for t in op.inputs.values())
        for platform in self.platforms:
            _compat.register_lowering(self.primitive, body, platform, transposed=transposed)
            _compat.register_lowering(self.partitioned, body, platform, spread, transposed)

    def __call__(
        self, inputs: Arrays, attrs: Mapping[str, Any] | Attributes, inplace: bool = False, axes: Axes = ()
    ) -> dict[str, jax.Array | None]:
        """Check the call and bind the primitive.

        Args:
            inputs: arrays by name.
            attrs: attributes by name; those that are missing have their default.
            inplace: outputs take the memory of the inputs that are donated to them.
            axes: of the enclosing ``shard_map``, along which devices have slices of the dim that the op splits.

        Raises:
            TypeError: unknown or missing argument, wrong dtype.
            ValueError: shapes that do not fit together.
        """
        given = {name: inputs[name] for name in (*self.op.inputs, *inputs) if inputs.get(name) is not None}
        binding = self.bound(given, attrs)
        if axes:
            found = self._on_axes(inplace, given, binding.attrs, axes)
            return dict.fromkeys(self.op.results) | dict(found)
        names, empty, mesh = binding.result_names, binding.empty, explicit.mesh_of(given.values())
        # Whether XLA decides how arrays are sharded, if they are at all.
        automatic = mesh.empty or all(kind == AxisType.Auto for kind in mesh.axis_types)
        if automatic and (empty or self.transparent):
            arrays = [jnp.asarray(a) for a in given.values()]
            results: Sequence[Any] = self._run(lowering.reference, binding, arrays, inplace=False)
        elif automatic:
            results = self.partitioned.bind(*given.values(), **_params(binding, attrs, inplace))
        else:
            results = explicit.by_type(partial(self._on_one_device, inplace), self.together, given, binding)
        return dict.fromkeys(self.op.results) | dict(zip(names, results, strict=True))

    def bound(self, arrays: Arrays, attrs: Mapping[str, Any] | Attributes) -> Binding:
        """The checked call of arrays, tracers or abstract values in declared order; missing attributes have defaults,
        none is missing in :class:`Exact` ones.
        Tracing, abstract evaluation and lowering of one call share it.
        """
        given = tuple((name, tuple(a.shape), a.dtype) for name, a in arrays.items())
        # All attributes of a call stay one object, which tables find by identity.
        full = attrs if isinstance(attrs, Exact) else Exact({**self.op.keywords, **dict(attrs)}.items())
        return _bound(self.op, given, full)

    def _on_one_device(
        self, inplace: bool, inputs: Arrays, attrs: Mapping[str, Any], *, terms: slices.Cuts = slices.WHOLE
    ) -> Arrays:
        """Bind the primitive inside of a ``shard_map`` over all axes."""
        if terms:
            return self._on_terms(inputs, attrs, terms, by_tracing)
        given = in_order(self.op, inputs)
        binding, arrays = self.bound(given, attrs), alike(list(given.values()))
        if binding.empty and not explicit.mapped(arrays):
            return named(binding, self._run(lowering.reference, binding, arrays, inplace=False))
        return named(binding, self.primitive.bind(*arrays, **_params(binding, attrs, inplace)))

    def _on_axes(self, inplace: bool, inputs: Arrays, attrs: Mapping[str, Any], axes: Axes) -> Arrays:
        return self.together(self.op, inputs, attrs, axes, partial(self, inplace=inplace))

    def _abstract(
        self, *avals: Any, names: tuple[str, ...], attrs: Attributes, inplace: bool
    ) -> list[_compat.ShapedArray]:
        given = dict(zip(names, avals, strict=True))
        binding = self.bound(given, attrs)
        like = next((a for a in avals if not a.sharding.mesh.empty), avals[0])
        types = {} if like.sharding.mesh.empty else explicit.types(given, binding)
        if not types:
            self._note(binding, names, avals)
        return [
            _compat.aval_like(like, out.shape, jnp.dtype(out.dtype), types.get(name))
            for name, out in slices.present(binding.results).items()
        ]

    def _note(self, binding: Binding, names: tuple[str, ...], avals: Sequence[Any]) -> None:
        """Note a call that is traced. Of very many calls the first ones are forgotten."""
        traced = ffi.traced
        if traced.lowers:
            traced.lowerings.clear()
            traced.lowers = False
        traced.lowerings[self, id(binding)] = partial(self._ask, binding, names, avals)
        if len(traced.lowerings) > MOST_TRACED:
            del traced.lowerings[next(iter(traced.lowerings))]

    def _ask(self, binding: Binding, names: tuple[str, ...], avals: Sequence[Any]) -> None:
        """Ask for the kernels of a call on one device."""
        given = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        jax.eval_shape(lambda *arrays: self._run(lowering.kernel, binding, arrays, inplace=False), *given)

    def _batch(
        self, arrays: Sequence[jax.Array], axes: Sequence[int | None], *, names: tuple[str, ...], attrs: Attributes,
        inplace: bool,
    ) -> tuple[list[jax.Array], list[int | None]]:  # fmt: skip
        """The batching rule, with the batch in axis 0: one call for all examples, or :meth:`_map`."""
        if all(axis is None for axis in axes):  # bound again, outside of the vmap
            found = slices.present(self(dict(zip(names, arrays, strict=True)), dict(attrs), inplace))
            return list(found.values()), [None] * len(found)
        each = zip(names, arrays, axes, strict=True)
        given = {n: a if axis is None else jnp.moveaxis(a, axis, 0) for n, a, axis in each}
        batched = [n for n, axis in zip(names, axes, strict=True) if axis is not None]
        if explicit.parted(given):
            example = self._example(given, batched, dict(attrs))
            results = explicit.by_type(partial(self._on_one_device, inplace), self.together, given, example, batched)
        else:
            results = self._of_batch(given, batched, dict(attrs), inplace)
        return list(results), [0] * len(results)

    def _example(self, given: Arrays, batched: Collection[str], attrs: Arrays) -> Binding:
        """The call of one example."""
        one = {n: jax.ShapeDtypeStruct(a.shape[n in batched :], a.dtype) for n, a in given.items()}
        return self.bound(one, attrs)

    def _of_batch(self, given: Arrays, batched: Collection[str], attrs: Arrays, inplace: bool) -> list[jax.Array]:
        """The results of a batch, from arrays of which some are batched, in their first dim."""
        size = next(given[n].shape[0] for n in batched)
        one = as_one_call(jnp, self.op, {n: (a, n in batched) for n, a in given.items()}, size)
        if one is None:
            shared, examples = ({n: a for n, a in given.items() if (n in batched) is kind} for kind in (False, True))
            return self._map(shared, examples, attrs, inplace)
        every = self._example(given, batched, attrs).results
        found = (self if one.op is self.op else primitive_of(one.op))(one.inputs, attrs, inplace)
        # A program makes outputs of its own also of those that another one serves for.
        there = {n: a for n, a in slices.present(found).items() if every[n] is not None}
        return [one.unfolded(self.op.results[n], a) for n, a in there.items()]

    def _map(self, shared: Arrays, batched: Arrays, attrs: Arrays, inplace: bool) -> list[jax.Array]:
        """The results of all examples, by a loop with a launch for each."""

        def run(examples: Arrays) -> list[jax.Array]:
            return [*slices.present(self({**shared, **examples}, attrs, inplace)).values()]

        results: list[jax.Array] = jax.lax.map(run, batched)
        return results

    def _differentiate(self, primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> NoReturn:
        """Reached by a second derivative, and by any derivative of an op without a gradient."""
        if self.op.inference_only:
            problem = f"is for inference only, it has no gradient; {self.op.inference_only}."
            given = specs(dict(zip(params["names"], primals, strict=True)))
            raise NotImplementedError(message(self.op, problem, given))
        no_derivative(self.stands_for)

    def _lower(
        self,
        run: Lowering,
        *arrays: Any,
        names: tuple[str, ...],
        attrs: Attributes,
        inplace: bool,
        last_dims: tuple[int | None, ...] = (),
    ) -> list[jax.Array]:
        """The function that JAX traces when it lowers a program on one device; ``last_dims``: of operands before they
        were transposed, None for one that was not.
        """
        known = {name: place for name, place in zip(names, last_dims, strict=False) if place is not None}
        binding = self.bound(dict(zip(names, arrays, strict=True)), attrs)
        ffi.traced.lowers = True
        return self._run(run, binding, arrays, inplace, transposed=known)

    def _spread(
        self, run: Lowering, *arrays: Any, names: tuple[str, ...], attrs: Attributes, inplace: bool, devices: int
    ) -> list[Any]:
        """The function that JAX traces when it lowers a program that XLA partitions over several devices."""

        def call(
            inputs: Arrays, attrs: Mapping[str, Any], axes: Axes = (), terms: slices.Cuts = slices.WHOLE
        ) -> Arrays:
            if terms:
                return self._on_terms(inputs, attrs, terms, partial(by_lowering, run))
            given = in_order(self.op, inputs)
            binding = self.bound(given, attrs)
            return named(binding, self._run(run, binding, list(given.values()), inplace, axes))

        binding = self.bound(dict(zip(names, arrays, strict=True)), attrs)
        local = partial(slices.of_one_device, binding, call, self.together)
        return partitioner.by_partitioner(local, ffi.asked_for_by, devices, binding, arrays)

    def _on_terms(self, inputs: Arrays, attrs: Mapping[str, Any], terms: slices.Cuts, call: Call) -> Arrays:
        """The op where devices share its inner dims, by its program."""
        given = {n: inputs.get(n) for n in self.op.inputs}

        def add(sums: jax.Array, dims: Iterable[str]) -> Any:
            return jax.lax.psum(sums, tuple(axis for dim in dims for axis in terms[dim]))

        return OnTerms(framework, terms.keys(), call, add).run(self.op, given, attrs)

    def _run(
        self, run: Lowering, binding: Binding, arrays: Sequence[Any], inplace: bool, axes: Axes = (),
        transposed: lowering.Transposed = lowering.NONE,
    ) -> list[jax.Array]:  # fmt: skip
        """The body of the primitive on one device, by the reference or the kernel, or by what runs instead."""
        program = lowering.fallback(binding, run is lowering.kernel, transposed) if self.op.fallback else None
        # What `promoting` does, written out: its wrapper would add two moves between files to each first call.
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            if program is None:
                return run(binding, arrays, inplace, transposed)
            if run is lowering.kernel and program.product is not None:
                run = lowering.behind_product(binding)
            given = lowering.by_name(binding, arrays)
            found = program.run(framework, partial(by_lowering, run), given, binding.attrs)
            return list(slices.present({n: found[n] for n in self.op.results}).values())


class Composite(OpPrimitive):
    """A declaration with a program of other ops in place of a kernel.

    XLA's partitioner would shard such a program as it sees fit, and gather rows in every turn of a loop. Declared as
    one op, every device runs the whole program on its own rows.

    Where devices have slices of the dim that it splits, each runs the program on its slice, and together they run the
    ops in it that split that dim, too.
    """

    partitions_reference = True

    def __init__(self, op: Op) -> None:
        assert op.program is not None
        self.program, self.transparent = op.program, not op.program.ops
        super().__init__(op)

    @staticmethod
    def together(op: Op, inputs: Arrays, attrs: Arrays, axes: Axes, call: Callable[..., Arrays]) -> Arrays:
        found = call(slices.spread(inputs, axes), attrs, axes=axes)
        return {n: jax.lax.psum(a, axes) if slices.adds_up(op, n) else a for n, a in found.items()}

    def _on_axes(self, inplace: bool, inputs: Arrays, attrs: Mapping[str, Any], axes: Axes) -> Arrays:
        return self._outputs(by_tracing, inputs, attrs, axes)

    def _on_one_device(
        self, inplace: bool, inputs: Arrays, attrs: Mapping[str, Any], axes: Axes = (), *,
        terms: slices.Cuts = slices.WHOLE,
    ) -> Arrays:  # fmt: skip
        if terms:
            return self._on_terms(inputs, attrs, terms, by_tracing)
        if not axes and explicit.mapped(inputs.values()):
            return super()._on_one_device(inplace, inputs, attrs)
        if not axes:
            inputs = dict(zip(inputs, alike(list(inputs.values())), strict=True))
        return self._outputs(by_tracing, inputs, attrs, axes)

    def _map(self, shared: Arrays, batched: Arrays, attrs: Arrays, inplace: bool) -> list[jax.Array]:
        """The results of all examples: where the program allows it, each of its ops is batched by itself."""
        if not self.program.maps:
            return super()._map(shared, batched, attrs, inplace)

        def run(examples: Arrays) -> list[jax.Array]:
            return [*self._outputs(by_tracing, {**shared, **examples}, attrs, ()).values()]

        results: list[jax.Array] = jax.vmap(run)(batched)
        return results

    @promoting
    def _run(
        self, run: Lowering, binding: Binding, arrays: Sequence[Any], inplace: bool, axes: Axes = (),
        transposed: lowering.Transposed = lowering.NONE,
    ) -> list[Any]:  # fmt: skip
        inputs = lowering.by_name(binding, arrays)
        return list(self._outputs(partial(by_lowering, run), inputs, binding.attrs, axes).values())

    def _outputs(self, call: Call, inputs: Arrays, attrs: Mapping[str, Any], axes: Axes) -> dict[str, Any]:
        """The outputs that exist."""
        xp: Any = with_others(framework, shared=True) if axes else framework
        run = partial(_together, call=call, program=self.op, axes=axes) if axes else call
        found = self.program.run(xp, run, {n: inputs.get(n) for n in self.op.inputs}, attrs)
        return slices.present({n: found.get(n) for n in self.op.outputs})


def _together(
    op: Op, inputs: Arrays, attrs: Mapping[str, Any], inplace: bool = False, *, call: Call, program: Op, axes: Axes
) -> Arrays:
    """An op in a program whose devices along the axes have slices of a dim: run together where it splits that, too."""
    each = partial(call, op, inplace=inplace)
    if op.split is None or program.split is None or op.split.dim != program.split.dim:
        return each(inputs, attrs)
    return slices.on_slices(op, inputs, {**op.keywords, **attrs}, axes, each)


def by_tracing(op: Op, inputs: Arrays, attrs: Mapping[str, Any], inplace: bool = False) -> Arrays:
    """An op in a program that is being traced."""
    return primitive_of(op)(inputs, attrs, inplace)


def by_lowering(run: Lowering, op: Op, inputs: Arrays, attrs: Mapping[str, Any], inplace: bool = False) -> Arrays:
    """An op in a program that is being lowered."""
    given = in_order(op, inputs)
    found = primitive_of(op)
    binding = found.bound(given, attrs)
    return dict.fromkeys(op.outputs) | named(binding, found._run(run, binding, list(given.values()), inplace))


def no_derivative(op: Op, *_: Any, **__: Any) -> NoReturn:
    """Refuse a derivative that is not declared: of second order, or in forward mode."""
    what = "only its first derivative exists, in reverse mode" if op.grad else "no gradient is declared for it"
    raise NotImplementedError(
        f"cute.{op.called}: {what}; for other derivatives differentiate its reference, op.reference(jax.numpy, ...), "
        "or put `fuse` around the derivative if it made the op."
    )


@one_for_each
def primitive_of(op: Op) -> OpPrimitive:
    """The one primitive of a declaration in this process."""
    return OpPrimitive(op) if op.program is None else Composite(op)


def named(binding: Binding, results: Sequence[Any]) -> dict[str, Any]:
    """The results of a call by name."""
    return dict(zip(binding.result_names, results, strict=True))


def _params(binding: Binding, attrs: Mapping[str, Any] | Attributes, inplace: bool) -> dict[str, Any]:
    names, bound = tuple(n for n, a in binding.inputs.items() if a is not None), binding.attrs.items()
    same = isinstance(attrs, Exact) and all(a is b for (_, a), (_, b) in zip(attrs, bound, strict=True))
    return {"names": names, "attrs": attrs if same else Exact(bound), "inplace": inplace}


@lru_cache(maxsize=1024)
def _bound(op: Op, given: tuple[tuple[str, tuple[Any, ...], Any], ...], attrs: Attributes) -> Binding:
    return bind(op, {name: Array(shape, jnp.dtype(dtype).name) for name, shape, dtype in given}, dict(attrs))
