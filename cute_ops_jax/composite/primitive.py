"""Programs of several kernels that devices share like one op: :mod:`cute_ops_jax.linear_cross_entropy`'s loop.

XLA's partitioner would cut such a loop as it sees fit, and gather the rows of each turn. As a declaration, with the
program in place of a kernel, every device runs the whole loop on its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from cute_ops.binding import Binding, bind
from cute_ops.op import Op
from cute_ops_jax import _compat
from cute_ops_jax.distributed import sharding
from cute_ops_jax.primitive import lowering
from cute_ops_jax.primitive.arrays import specs
from cute_ops_jax.primitive.primitive import Attributes, Stage, stage

Arrays = Mapping[str, Any]
# ``call(op, inputs, attrs, inplace=False)``: an op's outputs by name.
Call = Callable[..., Arrays]


def by_stage(op: Op, inputs: Arrays, attrs: Mapping[str, Any], inplace: bool = False) -> Arrays:
    """An op in a program that is still traced."""
    return stage(op)(inputs, attrs, inplace)


class Composite(Stage):
    """A declaration with a program of other ops in place of a kernel.

    Args:
        op: what it takes and gives, which says what devices may share. Its kernel, its reference and the parts of its
            split are not asked for.
        body: ``body(call, inputs, attrs, axes) -> outputs``, arrays by name, None where absent. Devices along ``axes``
            have slices of the dim that the declaration splits: the body says what they exchange.
    """

    def __init__(self, op: Op, body: Callable[[Call, Arrays, Mapping[str, Any], sharding.Axes], Arrays]) -> None:
        self.body = body
        super().__init__(op)

    @staticmethod
    def together(
        op: Op, inputs: Arrays, attrs: Mapping[str, Any], axes: sharding.Axes, call: Callable[..., Arrays]
    ) -> Arrays:
        return call(inputs, attrs, axes=axes)

    def run_kernels_on(self, platform: str) -> None:
        self._lower(self.partitioned, lowering.kernel, platform)

    def _new(self) -> _compat.Primitive:
        primitive = super()._new()
        self._lower(primitive, lowering.reference)
        return primitive

    def _lower(self, primitive: _compat.Primitive, run: Callable[..., Any], platform: str | None = None) -> None:
        program = partial(self._program, run)
        _compat.register_lowering(primitive, program, platform, partial(self._spread, program))

    def _program(
        self,
        run: Callable[..., Any],
        *arrays: Any,
        names: Sequence[str],
        attrs: Attributes,
        inplace: bool,
        axes: sharding.Axes = (),
    ) -> list[Any]:
        def call(op: Op, inputs: Arrays, attrs: Mapping[str, Any], inplace: bool = False) -> Arrays:
            given = {n: inputs[n] for n in op.inputs if inputs.get(n) is not None}
            binding = bind(op, specs(given), attrs)
            params = {"names": tuple(given), "attrs": tuple(binding.attrs.items()), "inplace": inplace}
            outputs = [n for n, out in binding.outputs.items() if out is not None]
            return dict.fromkeys(op.outputs) | dict(zip(outputs, run(op, *given.values(), **params), strict=True))

        return list(self._run(call, dict(zip(names, arrays, strict=True)), dict(attrs), axes).values())

    def _run(self, call: Call, given: Arrays, attrs: Mapping[str, Any], axes: sharding.Axes) -> dict[str, Any]:
        found = self.body(call, dict.fromkeys(self.op.inputs) | dict(given), attrs, axes)
        return {n: found[n] for n in self.op.outputs if found[n] is not None}

    def _bind(self, given: Arrays, binding: Binding, inplace: bool) -> Sequence[Any]:
        if sharding.automatic():
            attrs = tuple(binding.attrs.items())
            return self.partitioned.bind(*given.values(), names=tuple(given), attrs=attrs, inplace=inplace)

        def call(inputs: Arrays, attrs: Mapping[str, Any], axes: sharding.Axes = ()) -> dict[str, Any]:
            if not axes:
                inputs = dict(zip(inputs, sharding.alike(list(inputs.values())), strict=True))
            return self._run(by_stage, inputs, attrs, axes)

        return sharding.by_type(call, self.together, given, binding)
