"""Calls that look like one before.

What binding and planning look at in a call is in its key, and to build and look up a key takes longer than the rest of
a call's Python. A guard of Dynamo's compares all tensors with those of an earlier call at once, in C++: types, dtypes,
devices, shapes, strides, whether they ask for gradients, and dispatch keys, which modes and transforms add to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from cute_ops.op import Op
from cute_ops_torch.library.schema import define

Kinds = tuple[tuple[type, bool], ...]
_TensorGuards = torch._C._dynamo.guards.TensorGuards

_SOURCE = """
def make(_same, {names}):
    def before(_rest):
        def guarded({parameters}):
            if {condition}:
                return {result}
            return _rest({arguments})
        return guarded
    return before
"""


def guarded(
    op: Op,
    tensors: Sequence[torch.Tensor | None],
    attrs: Sequence[Any],
    texts: dict[str, str],
    **values: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``before(rest)``: a function that computes ``result`` in calls like this one, and asks ``rest`` in others.

    Args:
        op: the declaration.
        tensors: the call's.
        attrs: the call's.
        texts: source of the ``parameters``, of the ``arguments`` that hand all of them on, and of the ``result``;
            ``condition`` is one more to be met.
        values: what these use.
    """
    given = {name: t for name, t in zip(op.inputs, tensors, strict=True) if t is not None}
    sizes: Any = [list(t.shape) for t in given.values()]
    strides: Any = [list(t.stride()) for t in given.values()]
    guard = _TensorGuards(*given.values(), dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    same = [f"{name} is None" for name in op.inputs if name not in given]
    same += [f"{name} == _given_{name}" for name in op.attrs]
    same.append(f"_same({', '.join(given)})")
    places = {name: t.data_ptr() & 15 for name, t in given.items()}  # kernels are compiled for at most 16 bytes
    if any(places.values()):
        same += [f"{name}.data_ptr() & 15 == {place}" for name, place in places.items()]
    else:
        same.append(f"not ({' | '.join(f'{name}.data_ptr()' for name in given)}) & 15")
    same += [texts["condition"]] if "condition" in texts else []
    values |= {f"_given_{name}": value for name, value in zip(op.attrs, attrs, strict=True)}
    source = _SOURCE.format(**{**texts, "condition": " and ".join(same)}, names=", ".join(values))
    return _maker(source)(guard.check, **values)  # type: ignore[no-any-return]


def kinds(op: Op) -> str:
    """Source of what tells a guard from others for the same kernel: of each input its exact type (a Parameter is not a
    Tensor to it), and whether it asks for a gradient.
    """
    return ", ".join(
        f"(type({name}), {name} is not None and {name}.requires_grad)"
        if t.optional
        else f"(type({name}), {name}.requires_grad)"
        for name, t in op.inputs.items()
    )


@lru_cache(1024)
def _maker(source: str) -> Callable[..., Any]:
    return define(source, "guarded")["make"]  # type: ignore[no-any-return]


def unknown(*args: Any) -> None:
    """Stands for the function of a call that looks like none before."""
