"""The Python function of an op, with its real signature and a way past the dispatcher.

The direct way is taken only where nobody watches: not compiling or tracing, no mode of torch, no functorch
level, no forward-mode AD, no profiler, and exact Tensor or Parameter types. Autocast does not matter, since
the ops run in the dtypes they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from cute_ops.op import Op
from cute_ops_torch.autograd import graph_node
from cute_ops_torch.schema import parameters, resolver

_C = torch._C
_EXACT = frozenset((torch.Tensor, torch.nn.Parameter))


def make_function(op: Op, overload: Any, launch: Callable[..., Any], gradient: Any) -> Callable[..., Any]:
    """``cute_ops_torch.<op>``: the declaration's signature and docstring."""
    call = _caller(op, overload, launch, gradient)
    if any(t.given or t.same_as for t in op.outputs.values()):
        call = _resolved(op, call)
    names = ", ".join((*op.inputs, *op.attrs))
    # A function from a text, as dataclasses makes them: its keyword arguments cost nothing at run time. The
    # callee is in its closure: a global of a module that does not exist would confuse torch.compile.
    text = f"def {op.name}({parameters(op)}):\n        return _call({names})"
    source = f"def _make(_call):\n    {text}\n    return {op.name}\n"
    space: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, f"<cute_ops_torch.{op.name}>", "exec"), space)
    function = space["_make"](call)
    function.__doc__, function.__module__, function.__qualname__ = op.doc, "cute_ops_torch", op.name
    return function


def _caller(op: Op, overload: Any, launch: Callable[..., Any], gradient: Any) -> Callable[..., Any]:
    arity = len(op.inputs)
    node = graph_node(op, lambda context, args: launch(*args), gradient)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling() or _watched():
            return overload(*args)
        for t in args[:arity]:
            # A negated view has the memory of its base: only the dispatcher's fallback resolves it.
            if t is not None and (type(t) not in _EXACT or not t.is_cuda or t.is_neg()):
                return overload(*args)
        if torch.is_grad_enabled() and _C._any_requires_grad(*args):
            return node.apply(None, *args)
        return launch(*args)

    return call


def _watched() -> bool:
    return (
        _C._len_torch_dispatch_stack() > 0
        or _C._len_torch_function_stack() > 0
        or _C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _C._get_tracing_state() is not None
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    )


def _resolved(op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
    """Absent outputs as None, and shared ones as the array that serves for them."""
    arity, resolve = len(op.inputs), resolver(op)

    def resolved(*args: Any) -> Any:
        raw = call(*args)
        outputs = resolve(args[:arity], raw if isinstance(raw, tuple) else (raw,))
        return outputs if len(outputs) > 1 else outputs[0]

    return resolved
