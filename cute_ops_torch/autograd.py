"""Autograd on the raw op: one kernel for torch's Autograd dispatch keys.

``torch.library.register_autograd`` costs a call more host time than the op itself; a kernel of our own can
also skip the dispatcher where nothing listens below autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from cute_ops.errors import message
from cute_ops.op import Op
from cute_ops_torch.schema import filler, resolver
from cute_ops_torch.tensors import arrays

_C = torch._C
_is_grad_enabled, _any_requires_grad = torch.is_grad_enabled, _C._any_requires_grad
# The dispatch keys of a call that nothing below autograd watches: no mode, no subclass, no negated view.
_PLAIN_CUDA = _C.DispatchKeySet(_C.DispatchKey.CUDA).add(_C.DispatchKey.AutogradCUDA).raw_repr()

Call = Callable[..., Any]


def autograd_kernel(op: Op, overload: Any, launch: Call, gradient: Call | None) -> Call:
    """The Autograd kernel of an op.

    Args:
        op: the declaration.
        overload: the registered op.
        launch: its CUDA implementation.
        gradient: the registered backward op, None where there is none.
    """
    fill = filler(op)

    def run(keyset: Any, args: tuple[Any, ...]) -> Any:
        """What happens below autograd."""
        if keyset.raw_repr() == _PLAIN_CUDA:
            return launch(*args)
        with _C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & _C._after_autograd_keyset, *args)

    def run_in_node(keyset: Any, args: tuple[Any, ...]) -> Any:
        if not _C._are_functorch_transforms_active():
            return run(keyset, args)
        # A Function's forward turns both kinds of gradient off; functorch's outer levels still want theirs.
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return run(keyset, args)

    node = graph_node(op, run_in_node, gradient)

    def kernel(keyset: Any, *args: Any) -> Any:
        if forward_ad._current_level >= 0:
            refuse_tangents(op, fill(args))
        if not (_is_grad_enabled() and _any_requires_grad(*args)):
            # `run` without the call, which is a tenth of a microsecond
            return launch(*args) if keyset.raw_repr() == _PLAIN_CUDA else run(keyset, args)
        if _C._are_functorch_transforms_active():
            # functorch has entered its level by the time it calls an autograd kernel. A Function that stays
            # on that level is right here, but torch wants to be told.
            with enable_single_level_autograd_function():
                return node.apply(keyset, *fill(args))
        return node.apply(keyset, *fill(args))

    return kernel


def refuse_tangents(op: Op, args: tuple[Any, ...]) -> None:
    """Raise where an input carries a forward-mode tangent, which would silently be dropped."""
    tensors = args[: len(op.inputs)]
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        problem = "forward-mode AD (jvp) is not supported; reverse mode is."
        raise NotImplementedError(message(op, problem, arrays(op, tensors)))


def graph_node(op: Op, run: Call, gradient: Call | None) -> Any:
    """The autograd Function of an op: ``apply(context, *args)`` calls ``run(context, args)``."""
    if op.grad is None or gradient is None:
        methods = _without_gradient(op, run)
    else:
        methods = _with_gradient(op, op.grad, run, gradient)
    # Not autograd.Function itself: its `apply` is for functions called from outside the dispatcher.
    return type(f"cute_{op.name}", (_SingleLevelFunction,), {k: staticmethod(v) for k, v in methods.items()})


def _with_gradient(op: Op, grad: Op, run: Call, gradient: Call) -> dict[str, Call]:
    """Forward and backward, wired by names as :class:`cute_ops.Op` describes."""
    arity, outputs = len(op.inputs), list(op.outputs)
    arguments = [*op.inputs, *op.attrs]
    saved_inputs = [i for i, name in enumerate(op.inputs) if name in grad.inputs]
    saved_outputs = [k for k, name in enumerate(outputs) if name in grad.inputs]
    saved = [name for name in (*op.inputs, *outputs) if name in grad.inputs]
    cotangents = {f"d{name}": k for k, name in enumerate(outputs)}
    required = [cotangents[n] for n, t in grad.inputs.items() if n in cotangents and not t.optional]
    attributes = [arguments.index(name) for name in grad.attrs]
    gradients = [list(grad.outputs).index(f"d{name}") if f"d{name}" in grad.outputs else None for name in arguments]
    resolve_outputs = resolver(op) if any(t.given or t.same_as for t in op.outputs.values()) else None
    resolve_gradients = resolver(grad)

    def forward(ctx: Any, context: Any, *args: Any) -> Any:
        result = run(context, args)
        results = result if isinstance(result, tuple) else (result,)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*[args[i] for i in saved_inputs], *[results[k] for k in saved_outputs])
        ctx.attributes = [args[i] for i in attributes]
        ctx.required = [(k, results[k].shape, results[k].dtype) for k in required]
        if resolve_outputs:
            real = resolve_outputs(args[:arity], results)
            ctx.mark_non_differentiable(*[r for r, used in zip(results, real, strict=True) if r is not used])
        return result

    def backward(ctx: Any, *given: torch.Tensor | None) -> Any:
        if all(d is None for d in given):
            return (None,) * (1 + len(arguments))
        known = dict(zip(saved, ctx.saved_tensors, strict=True))
        like = next(d for d in given if d is not None)
        douts = list(given)
        for k, shape, dtype in ctx.required:
            if douts[k] is None:
                douts[k] = like.new_zeros(shape, dtype=dtype)
        tensors = [_row_major(douts[cotangents[n]]) if n in cotangents else known[n] for n in grad.inputs]
        result = gradient(*tensors, *ctx.attributes)
        results = resolve_gradients(tensors, result if isinstance(result, tuple) else (result,))
        return (None, *[None if k is None else results[k] for k in gradients])

    return {"forward": forward, "backward": backward}


def _row_major(cotangent: torch.Tensor | None) -> torch.Tensor | None:
    """Copies what kernels cannot read. The caller never chose a cotangent's strides: `sum` makes expanded ones."""
    if cotangent is None or cotangent.ndim == 0 or cotangent.stride(-1) == 1:
        return cotangent
    return cotangent.contiguous()


def _without_gradient(op: Op, run: Call) -> dict[str, Call]:
    """Runs, and raises when differentiated. Backward ops are such ops: there is no double backward."""

    def forward(ctx: Any, context: Any, *args: Any) -> Any:
        ctx.given = arrays(op, args[: len(op.inputs)])
        return run(context, args)

    def backward(ctx: Any, *given: Any) -> Any:
        problem = "has no gradient of its own"
        if op.name.endswith("_bwd"):
            problem += ", so there is no double backward"
        raise NotImplementedError(message(op, f"{problem}.", ctx.given))

    return {"forward": forward, "backward": backward}
