"""How Inductor's code calls an op: straight into a buffer of its own, past the dispatcher.

Only ops with one output: Inductor has an out form for those alone. Others go through its fallback, which calls
``torch.ops``. So does ahead-of-time code, which runs without Python.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir, lowering
from torch._inductor.select_algorithm import ExternKernelChoice
from torch._inductor.utils import convert_shape_to_inductor
from torch._inductor.virtualized import V

from cute_ops.op import Op
from cute_ops_torch.launch import Launcher
from cute_ops_torch.schema import defaults


def register_lowering(op: Op, overload: Any, launch: Launcher) -> None:
    """Register the lowering of an op; without effect for ops with several outputs."""
    if len(op.outputs) != 1:
        return
    arity, names, tail = len(op.inputs), (*op.inputs, *op.attrs), defaults(op)
    default = dict(zip(names[len(names) - len(tail) :], tail, strict=True))
    fallback = lowering.fallback_handler(overload, add_to_fallback_set=False)

    def kernel(*tensors: torch.Tensor, given: str, attrs: tuple[Any, ...], out: torch.Tensor) -> None:
        present = iter(tensors)
        inputs = tuple([next(present) if here == "1" else None for here in given])
        if out.is_cuda:
            launch.into(*inputs, *attrs, (out,))
        else:
            out.copy_(overload(*inputs, *attrs))

    # Inductor's cached code names this kernel and outlives a process, so a name must never change its
    # meaning: with another calling convention, count up and keep registering the old name too.
    namespace = overload.namespace
    choice = ExternKernelChoice(kernel, name=f"{namespace}_{op.name}_v1")

    @lowering.register_lowering(overload, type_promotion_kind=None)
    def lower(*args: Any, **kwargs: Any) -> Any:
        given_by_name = {**default, **dict(zip(names, args, strict=False)), **kwargs}
        args = tuple(given_by_name[name] for name in names)
        tensors, attrs = args[:arity], args[arity:]
        constant = all(isinstance(a, (int, float, str)) for a in attrs)
        if V.graph.cpp_wrapper or V.aot_compilation or not constant:
            return fallback(*args)
        value = V.graph.current_node.meta["val"]
        layout = ir.FixedLayout(
            device=value.device,
            dtype=value.dtype,
            size=convert_shape_to_inductor(value.shape),
            stride=convert_shape_to_inductor(value.stride()),
        )
        inputs = [_realize(t) for t in tensors if t is not None]
        given = "".join("0" if t is None else "1" for t in tensors)
        return choice.bind(inputs, layout, given=given, attrs=tuple(attrs)).output_node()


def _realize(tensor: Any) -> Any:
    """A buffer in memory whose last dim is contiguous."""
    buffer = ir.ExternKernel.realize_input(tensor)
    strides = buffer.get_stride()
    return buffer if not strides or strides[-1] == 1 else ir.ExternKernel.require_contiguous(buffer)
