"""The program of a composite, which runs in place of a kernel and of a reference, on every device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from cute_ops.declaration.binding import Binding
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops_torch.library import framework, row_chunks
from cute_ops_torch.library.schema import resolver
from cute_ops_torch.library.tensors import Tensors, readable

# Makes the raw function of an op that is registered, or the one whose outputs take the memory of donated inputs.
functions: dict[Op, Callable[[bool], Callable[..., Any]]] = {}
planned = row_chunks.planned
# Makes ``call(*tensors)``, which runs ops by one guard: ``repeated(name, inputs, run, otherwise)``.
repeated: Callable[..., Callable[..., Any]]
_resolver = cache(resolver)


def run(program: Program, binding: Binding, tensors: Tensors, call: Callable[..., Any]) -> tuple[Any, ...]:
    """The results of a program for a call, in declared order; it runs other ops by ``call``."""
    op = binding.op
    with torch._C._DisableAutocast():  # the declaration says which dtypes there are
        found = program.run(framework, call, dict(zip(op.inputs, tensors, strict=True)), binding.attrs)
    return tuple(found.get(name) for name in op.results)


def call(op: Op, inputs: Mapping[str, Any], attrs: Mapping[str, Any], inplace: bool = False) -> dict[str, Any]:
    # Kernels read a contiguous last dim; the framework's functions give any.
    given = [None if (t := inputs.get(name)) is None else readable(tensor, t) for name, tensor in op.inputs.items()]
    raw = functions[op](inplace)(*given, *{**op.keywords, **attrs}.values())
    made = _resolver(op)(given, raw if isinstance(raw, tuple) else (raw,))
    return dict(zip(op.outputs, made, strict=True))
