"""Programs of several kernels that devices share like one op: the loop of :mod:`.linear_cross_entropy`, for one.

XLA's partitioner would shard such a loop as it sees fit, and gather rows in every turn. Declared as one op, with the
program in place of a kernel, every device runs the whole loop on its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from cute_ops.binding import Binding
from cute_ops.op import Op
from cute_ops_jax.distributed import varying
from cute_ops_jax.distributed.slices import present
from cute_ops_jax.distributed.varying import Axes
from cute_ops_jax.primitive.arrays import Arrays, in_order
from cute_ops_jax.primitive.lowering import by_name
from cute_ops_jax.primitive.primitive import Lowering, Stage, named, stage

# ``call(op, inputs, attrs, inplace=False)``: an op's outputs by name.
Call: TypeAlias = Callable[..., Arrays]


def by_stage(op: Op, inputs: Arrays, attrs: Mapping[str, Any], inplace: bool = False) -> Arrays:
    """An op in a program that is being traced."""
    return stage(op)(inputs, attrs, inplace)


def by_lowering(run: Lowering, op: Op, inputs: Arrays, attrs: Mapping[str, Any], inplace: bool = False) -> Arrays:
    """An op in a program that is being lowered."""
    given = in_order(op, inputs)
    binding = stage(op).bound(given, attrs)
    return dict.fromkeys(op.outputs) | named(binding, run(binding, list(given.values()), inplace))


class Composite(Stage):
    """A declaration with a program of other ops in place of a kernel.

    Args:
        op: the inputs and outputs, from which follows what devices may share. Its kernel, its reference and the
            functions of its split are not used.
        body: ``body(call, inputs, attrs, axes) -> outputs``, arrays by name, None where absent. Devices along ``axes``
            have slices of the dim that the declaration splits: the body exchanges what they need.
    """

    partitions_reference = True

    def __init__(self, op: Op, body: Callable[[Call, Arrays, Mapping[str, Any], Axes], Arrays]) -> None:
        self.body = body
        super().__init__(op)

    @staticmethod
    def together(op: Op, inputs: Arrays, attrs: Arrays, axes: Axes, call: Callable[..., Arrays]) -> Arrays:
        return call(inputs, attrs, axes=axes)

    def _on_one_device(self, inplace: bool, inputs: Arrays, attrs: Mapping[str, Any], axes: Axes = ()) -> Arrays:
        if not axes:
            inputs = dict(zip(inputs, varying.alike(list(inputs.values())), strict=True))
        return self._outputs(by_stage, inputs, attrs, axes)

    def _run(self, run: Lowering, binding: Binding, arrays: Sequence[Any], inplace: bool, axes: Axes = ()) -> list[Any]:
        inputs = by_name(binding, arrays)
        return list(self._outputs(partial(by_lowering, run), inputs, binding.attrs, axes).values())

    def _outputs(self, call: Call, inputs: Arrays, attrs: Mapping[str, Any], axes: Axes) -> dict[str, Any]:
        """The outputs that exist."""
        found = self.body(call, {n: inputs.get(n) for n in self.op.inputs}, attrs, axes)
        return present({n: found[n] for n in self.op.outputs})
