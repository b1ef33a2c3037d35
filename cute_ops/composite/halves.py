"""Composites of packed weights whose halves are a dim of their own: ``2 n k`` in place of ``2n k``.

A slice of ``2n`` rows is of one half, so devices cannot share them without moving weights. A slice of n is of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from cute_ops.op import OneOf, Op, Program, Sharding, Tensor

PACKED = "2n"


@cache
def halves_apart(op: Op, name: str = "") -> Op:
    """The same composite with a dim for both halves in each tensor that has ``2n``, of which devices may share n: what
    lacks that dim is a sum of what they get. It reads the same memory.
    """
    program = op.program
    assert program is not None  # kernels have tensors of three dims for something else

    def run(xp: Any, call: Any, inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
        given = {key: _joined(a, op.inputs[key]) for key, a in inputs.items()}
        return {key: _parted(a, op.outputs[key]) for key, a in program.run(xp, call, given, attrs).items()}

    run.__module__ = program.run.__module__
    return Op(
        name or f"{op.name}_halves", inputs=_each(op.inputs), outputs=_each(op.outputs), static=(), dtypes=op.dtypes,
        attrs={key: OneOf(*op.choices[key]) if key in op.choices else value for key, value in op.attrs.items()},
        kernel=Program(run, program.ops), sharding=Sharding(contracted=("n", *op.contracted)),
        grad=tuple(map(halves_apart, op.steps)) or None, saving=op.saving and halves_apart(op.saving),
        narrow=lambda name, outputs: halves_apart(op.only(*outputs), name), called=op.called,
        doc=f"{op.doc}\n\n    ``2n`` is two dims.",
    )  # fmt: skip


def _each(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: t._replace(shape=t.shape.replace(PACKED, "2 n")) for key, t in tensors.items()}


def _place(tensor: Tensor) -> int:
    """Of the packed dim, from the end; 0 where there is none."""
    dims = [str(dim) for dim in tensor.dims]
    return dims.index(PACKED) - len(dims) if PACKED in dims else 0


def _joined(array: Any, tensor: Tensor) -> Any:
    place, shape = _place(tensor), tuple(array.shape)
    if not place:
        return array
    first = len(shape) + place - 1
    return array.reshape((*shape[:first], 2 * shape[first + 1], *shape[first + 2 :]))


def _parted(array: Any, tensor: Tensor) -> Any:
    place, shape = _place(tensor), tuple(array.shape)
    if not place:
        return array
    first = len(shape) + place
    return array.reshape((*shape[:first], 2, shape[first] // 2, *shape[first + 1 :]))
