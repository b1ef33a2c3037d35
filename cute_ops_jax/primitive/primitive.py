"""An op as a JAX primitive: one per declaration, the backward op included.

A primitive takes the inputs that are present, in declared order and with any leading dims, and gives the
outputs that exist. Its parameters are plain values: the names of those inputs and the attributes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from cute_ops.binding import Binding, bind
from cute_ops.errors import message
from cute_ops.op import Op
from cute_ops_jax import _compat
from cute_ops_jax.distributed import sharding
from cute_ops_jax.primitive import lowering, vmap
from cute_ops_jax.primitive.arrays import specs

T = TypeVar("T")
Attributes = tuple[tuple[str, Any], ...]


def one_for_each(make: Callable[[Op], T]) -> Callable[[Op], T]:
    """As :func:`functools.cache`, where threads that ask at once get the same one, too."""
    made, lock = cache(make), threading.RLock()

    @wraps(make)
    def call(op: Op) -> T:
        with lock:
            return made(op)

    return call


class Stage:
    """A declaration with its primitive.

    Calling it binds the primitive; arrays and results go by name, None where absent.
    """

    # How devices that have slices of what the declaration splits run it.
    together: sharding.Together = staticmethod(sharding.on_slices)

    def __init__(self, op: Op) -> None:
        self.op = op
        self.primitive = self._new()
        # The twin that XLA may partition: JAX must then know the devices when it lowers.
        self.partitioned = self._new()
        _compat.needs_devices(self.partitioned)
        self.run_kernels_on("cuda")

    def run_kernels_on(self, platform: str) -> None:
        """Lower to the kernel on this platform."""
        kernel = partial(lowering.kernel, self.op)
        _compat.register_lowering(self.primitive, kernel, platform)
        _compat.register_lowering(self.partitioned, kernel, platform, partial(self._spread, kernel))

    def _spread(
        self,
        program: Callable[..., Sequence[Any]],
        *arrays: Any,
        names: tuple[str, ...],
        attrs: Attributes,
        inplace: bool,
        devices: int,
    ) -> list[Any]:
        """``program`` on all devices; it takes what the primitive takes."""

        def call(inputs: Mapping[str, Any], attrs: Mapping[str, Any], **options: Any) -> dict[str, Any]:
            options |= {"names": tuple(inputs), "attrs": tuple(attrs.items()), "inplace": inplace}
            return self._by_name(program(*inputs.values(), **options), inputs, attrs)

        return sharding.by_partitioner(
            self.op, call, self.together, *arrays, names=names, attrs=dict(attrs), devices=devices
        )

    def _by_name(self, results: Sequence[Any], inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
        outputs = bind(self.op, specs(inputs), attrs).outputs
        return dict(zip((n for n, out in outputs.items() if out is not None), results, strict=True))

    def _new(self) -> _compat.Primitive:
        primitive = _compat.new_primitive(
            f"cute_{self.op.name}", self._abstract, partial(vmap.batch, self), self._differentiate
        )
        _compat.register_lowering(primitive, partial(lowering.reference, self.op))
        return primitive

    def __call__(
        self, inputs: Mapping[str, Any], attrs: Mapping[str, Any], inplace: bool = False
    ) -> dict[str, jax.Array | None]:
        """Check the call and bind the primitive. ``inplace``: outputs take the memory of the inputs that they reuse.

        Raises:
            TypeError: unknown or missing argument, wrong dtype.
            ValueError: shapes that do not fit together.
        """
        present = {name: a for name, a in inputs.items() if a is not None}
        for name, a in present.items():
            if not (hasattr(a, "shape") and hasattr(a, "dtype")):
                raise TypeError(message(self.op, f"argument `{name}` must be one array, got {type(a).__name__}."))
        binding = bind(self.op, specs(present), attrs)
        wanted = {name: out for name, out in binding.outputs.items() if out is not None}
        if binding.empty:
            # A kernel cannot launch on nothing; a sum over no rows is zero.
            results: Sequence[Any] = [jnp.zeros(out.shape, out.dtype) for out in wanted.values()]
        else:
            results = self._bind({name: present[name] for name in self.op.inputs if name in present}, binding, inplace)
        return dict.fromkeys(self.op.outputs) | dict(zip(wanted, results, strict=True))

    def _bind(self, given: Mapping[str, Any], binding: Binding, inplace: bool) -> Sequence[Any]:
        def params(inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
            return {"names": tuple(inputs), "attrs": tuple(attrs.items()), "inplace": inplace}

        def call(inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
            results = self.primitive.bind(*sharding.alike(list(inputs.values())), **params(inputs, attrs))
            return self._by_name(results, inputs, attrs)

        if sharding.automatic():
            return self.partitioned.bind(*given.values(), **params(given, binding.attrs))
        return sharding.by_type(call, self.together, given, binding)

    def _abstract(
        self, *avals: Any, names: tuple[str, ...], attrs: Attributes, inplace: bool
    ) -> list[_compat.ShapedArray]:
        outputs = bind(self.op, specs(dict(zip(names, avals, strict=True))), dict(attrs)).outputs.values()
        return [_compat.aval_like(avals[0], out.shape, jnp.dtype(out.dtype)) for out in outputs if out is not None]

    def _differentiate(self, primals: Any, tangents: Any, **params: Any) -> Any:
        """Reached by a second derivative, and by any derivative of an op without a gradient."""
        if self.op.inference_only:
            problem = f"is for inference only, it has no gradient; {self.op.inference_only}."
            raise NotImplementedError(
                message(self.op, problem, specs(dict(zip(params["names"], primals, strict=True))))
            )
        what = "only its first derivative exists, in reverse mode" if self.op.grad else "no gradient is declared for it"
        raise NotImplementedError(
            f"cute.{self.op.name}: {what}; for other derivatives differentiate its reference, "
            f"op.reference(jax.numpy, ...)."
        )


@one_for_each
def stage(op: Op) -> Stage:
    """The one stage of a declaration in this process."""
    return Stage(op)
