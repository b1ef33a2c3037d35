"""The Autograd kernel of an op, for torch's dispatcher.

``torch.library.register_autograd`` costs a call more host time than the op itself; a kernel of our own can also skip
the dispatcher where no mode is active below autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from cute_ops.declaration.messages import message
from cute_ops.declaration.op import Op
from cute_ops_torch.library.mutation import refuse_gradients
from cute_ops_torch.library.nodes import Nodes
from cute_ops_torch.library.schema import filler
from cute_ops_torch.library.tensors import arrays

Call = Callable[..., Any]
_C = torch._C
_is_grad_enabled, _any_requires_grad = torch.is_grad_enabled, _C._any_requires_grad
# The dispatch keys of a call with no mode, subclass or negated view below autograd.
PLAIN_CUDA = _C.DispatchKeySet(_C.DispatchKey.CUDA).add(_C.DispatchKey.AutogradCUDA).raw_repr()
# Keys that the dispatcher leaves out of a call: our ops have no kernels for them, and torch's fallbacks skip them.
_FALL_THROUGH = _C.DispatchKeySet(_C.DispatchKey.ADInplaceOrView)
for _name in ("BackendSelect", "AutocastCPU", "AutocastCUDA"):
    _FALL_THROUGH = _FALL_THROUGH.add(getattr(_C.DispatchKey, _name))


class SupportsFastPath(Protocol):
    """The way past the dispatcher.

    Attributes:
        table: functions of known calls by the shape of their first input; each returns None for a call that it does not
            fit.
    """

    table: dict[Any, Call]

    def specialize(self, *args: Any) -> Any:
        """Run a call that no mode observes, and put a function for others like it into the table."""


def autograd_kernel(
    op: Op,
    overload: Callable[[], Any],
    fast_path: SupportsFastPath,
    nodes: Nodes,
    plain: int = PLAIN_CUDA,
    saving: Callable[[Op], Any] | None = None,
) -> Call:
    """The Autograd kernel of an op, ``overload()``; ``saving`` makes that of an op that saves more for the gradient.

    A call that no mode observes has the dispatch keys ``plain``, which differ where tests run stand-ins on the CPU.
    """
    get, arity = fast_path.table.get, len(op.inputs)
    dispatched = _dispatching_kernel(op, overload, nodes, saving)

    def kernel(*args: Any) -> Any:
        try:
            known = get(args[0].shape)
        except (AttributeError, TypeError):  # no tensor; a symbolic shape, which has no hash
            known = None
        out = None if known is None else known(*args)
        return other(*args) if out is None else out

    def other(*args: Any) -> Any:
        keys = dispatch_keys(args[:arity])
        if keys.raw_repr() == plain and forward_ad._current_level < 0:
            return fast_path.specialize(*args)
        return dispatched(keys, *args)

    return kernel


def _dispatching_kernel(op: Op, overload: Callable[[], Any], nodes: Nodes, saving: Callable[[Op], Any] | None) -> Call:
    """The Autograd kernel of an op whose calls all stay in the dispatcher: ``kernel(keys, *args)``."""
    fill, arity = filler(op), len(op.inputs)

    def kernel(keys: Any, *args: Any) -> Any:
        def run(*args: Any, op: Any = None) -> Any:
            with _C._AutoDispatchBelowAutograd():
                return (op or overload()).redispatch(keys & _C._after_autograd_keyset, *args)

        def run_in_transform(*args: Any, op: Any = None) -> Any:
            # A Function's forward turns both kinds of gradient off; functorch's outer levels still want theirs.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                return run(*args, op=op)

        if forward_ad._current_level >= 0:
            refuse_tangents(op, fill(args)[:arity])
        if not (_is_grad_enabled() and _any_requires_grad(*args)):
            return run(*args)
        args = fill(args)
        refuse_gradients(op, args[:arity])
        if not _C._are_functorch_transforms_active():
            return nodes.apply(run, *args, saving=saving and (lambda more: partial(run, op=saving(more))))
        # functorch has entered its level by the time it calls an autograd kernel. A Function that stays
        # on that level is right here, but torch wants to be told.
        with enable_single_level_autograd_function():
            more = saving and (lambda more: partial(run_in_transform, op=saving(more)))
            return nodes.apply(run_in_transform, *args, saving=more)

    return kernel


def dispatch_keys(tensors: Sequence[Any]) -> Any:
    """The dispatch keys of a call with these inputs, as the dispatcher computes them.

    A kernel may ask the dispatcher for them, but wrapping them for Python costs every call 5% of its host time, and
    most calls do not need them.
    """
    keys = _C._dispatch_tls_local_include_set()
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            keys |= _C._dispatch_keys(tensor)
    return keys - _C._dispatch_tls_local_exclude_set() - _FALL_THROUGH


def refuse_tangents(op: Op, tensors: Sequence[Any]) -> None:
    """Raise where an input carries a forward-mode tangent, which would be dropped silently."""
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        problem = "forward-mode AD (jvp) is not supported; reverse mode is."
        raise NotImplementedError(message(op, problem, arrays(op, tensors)))
