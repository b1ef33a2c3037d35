"""Ops of packed weights whose halves are a dim of their own: ``2 n k`` in place of ``2n k``.

A slice of ``2n`` rows is of one half, so devices cannot share them without moving weights. A slice of n is of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.split import Sharding

PACKED, STACKED = "2n", "2 n"
# Tensors of a gradient's steps that have a packed weight's 2n columns where the step calls these n.
OF_PRODUCTS = frozenset({"acc", "dacc", "weight", "dweight"})


def stack_halves(op: Op, whole: bool = False) -> Op:
    """An op with a dim for both halves in each tensor that has ``2n``, of which devices may share n. An output without
    that dim is a sum of what they get. The op reads the same memory.

    Args:
        op: of packed weights.
        whole: whether the op depends on a whole row, of n columns, so that devices cannot share these.
    """
    return _of(op, "", whole, _packed(op))


def _packed(op: Op) -> frozenset[str]:
    """Tensors of an op and of the steps of its gradient that have both halves."""
    found = {key for key, t in op.inputs.items() if PACKED in t.shape.split()}
    return OF_PRODUCTS.union(found, (f"d{key}" for key in found))


def _of(op: Op, name: str, whole: bool, packed: frozenset[str]) -> Op:
    """The op, or a step of a gradient, in which ``packed`` tensors may have n for the columns of both halves."""
    tensors = {**op.inputs, **op.outputs}
    if not any({"n", PACKED} & {*t.shape.split()} for t in tensors.values()):  # a step that is of neither half
        return op
    # Several ops have a step in common: it is made once.
    return _made(op, name, whole and "n" not in (*op.parallel, *op.contracted), packed.intersection(tensors))


@cache
def _made(op: Op, name: str, whole: bool, packed: frozenset[str]) -> Op:
    shapes = {key: _apart(t.shape, key in packed) for key, t in {**op.inputs, **op.outputs}.items()}

    def stacked(other: Op, name: str = "") -> Op:
        return _of(other, name, whole, packed | _packed(op))

    def run(xp: Any, call: Any, inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
        given = {key: _reshaped(a, shapes[key], parted=False) for key, a in inputs.items()}
        found = op.program.run(xp, call, given, attrs) if op.program else op.with_same_as(call(op, given, attrs))
        return {key: _reshaped(a, shapes[key], parted=True) for key, a in found.items()}

    run.__module__ = op.program.run.__module__ if op.program else op.reference.__module__
    shared = () if whole or "n" in op.parallel else ("n",)
    return Op(
        name or f"{op.name}_halves", inputs={key: t._replace(shape=shapes[key]) for key, t in op.inputs.items()},
        outputs={key: t._replace(shape=shapes[key], same_as=None) for key, t in op.outputs.items()},
        kernel=Program(run, op.program.ops if op.program else (op,), maps=op.program is None or op.program.maps),
        static=(), dtypes=op.accepts, attrs=op.declared_attrs,
        sharding=Sharding(op.parallel, contracted=tuple(dict.fromkeys((*shared, *op.contracted))), inner=op.inner),
        grad=tuple(map(stacked, op.steps)) or None, saving=op.saving and stacked(op.saving), handed_on=op.handed_on,
        no_gradient=op.no_gradient, batched=partial(stacked, op.batched) if op.batched else None,
        narrow=lambda name, outputs: stacked(op.only(*outputs), name), called=op.called,
        doc=f"{op.doc}\n\n    ``2n`` is two dims.",
    )  # fmt: skip


def _apart(shape: str, packed: bool) -> str:
    """A tensor's shape with a dim for both halves; ``packed`` is one that has them, also where a step calls them n."""
    both = "n" if packed and PACKED not in shape.split() else PACKED
    return " ".join(STACKED if dim == both else dim for dim in shape.split())


def _reshaped(array: Any, shape: str, parted: bool) -> Any:
    """The array with its halves as a dim, or with them in one dim, where the shape with that dim has it."""
    dims = shape.split()
    if array is None or "2" not in dims:
        return array
    sizes = tuple(array.shape)
    first = len(sizes) + parted + dims.index("2") - len(dims)
    if parted:
        return array.reshape((*sizes[:first], 2, sizes[first] // 2, *sizes[first + 1 :]))
    return array.reshape((*sizes[:first], 2 * sizes[first + 1], *sizes[first + 2 :]))
