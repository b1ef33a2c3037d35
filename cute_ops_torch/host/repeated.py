"""One guarded call for all the steps of a backward.

Each step is an op, whose function looks at the types, shapes and strides of its tensors. One guard of the tensors that
the whole backward gets implies all of these. The first call notes what its steps run; calls like it repeat that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cute_ops.declaration.tensor import Tensor
from cute_ops_torch.host.guards import GuardedCalls, Link, guarded, kinds
from cute_ops_torch.host.recorded import Record
from cute_ops_torch.library.modes import EXACT, modes, modes_active, wrapped
from cute_ops_torch.library.products import autocast

Call = Callable[..., Any]
_compiling, _function_modes = torch.compiler.is_dynamo_compiling, torch._C._len_torch_function_stack
_profiled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


class Signature(NamedTuple):
    """The part of an op that a guard reads. There are only tensors."""

    name: str
    inputs: Mapping[str, Tensor]
    attrs: Mapping[str, Any] = {}
    keywords: Mapping[str, Any] = {}
    scalars: Mapping[str, Any] = {}
    mutates: tuple[str, ...] = ()


def repeated(signature: Signature, run: Call, otherwise: Call) -> Call:
    """Make ``call(*tensors)``, which returns the tuple that ``run(record, *tensors)`` does. That runs ops by
    ``record.run_op``.

    Args:
        signature: a name for tracebacks, and the tensors by name, the first one required.
        run: the function, without gradients.
        otherwise: computes the tuple in calls that are observed or differentiated, and that cannot be repeated.
    """
    op: Any = signature
    calls = GuardedCalls(op, lambda *_: None)
    get = calls.table.get

    def call(*tensors: Any) -> Any:
        if _compiling() or _function_modes() or _profiled():
            return otherwise(*tensors)
        first = tensors[0]
        known = get(first.shape) if type(first) in EXACT else None
        out = None if known is None else known(*tensors)
        return specialize(*tensors) if out is None else out

    def specialize(*tensors: Any) -> Any:
        given = [t for t in tensors if t is not None]
        observed = torch.is_grad_enabled() or autocast() or modes_active()
        if observed or not all(map(_is_plain, given)) or len({id(t) for t in given}) < len(given):
            return otherwise(*tensors)
        record = Record(given)
        with record:
            out = run(record, *tensors)
        repeat = record.function(f"{signature.name}.steps", out)
        absent = [t is None for t in tensors]

        def in_full(*given: Any) -> Any:
            rest = iter(given)
            return otherwise(*[None if gone else next(rest) for gone in absent])

        places = [None if t is None else (t.dtype, t.shape, t.stride(), t.device, t.data_ptr() & 15) for t in tensors]
        calls.put(tensors, (*places, kinds(tensors)), lambda: guard(tensors, repeat or in_full))
        return out

    def guard(tensors: Sequence[Any], repeat: Call) -> Link:
        names = ", ".join(name for name, t in zip(op.inputs, tensors, strict=True) if t is not None)
        every = ", ".join(op.inputs)
        values = {"_run": repeat, "_grad_enabled": torch.is_grad_enabled, "_modes": modes}
        conditions = ["not _grad_enabled()", "not _modes()"]
        return guarded(op, tensors, (), conditions, values, parameters=every, arguments=every, result=f"_run({names})")

    return call


def _is_plain(tensor: Any) -> bool:
    """Whether a tensor has memory that a kernel can read as it lies. One of ``torch.func`` has none, also after its
    transform has ended, when a ``vjp``'s function is called.
    """
    plain = type(tensor) in EXACT and tensor.device.type in ("cpu", "cuda")
    return plain and not wrapped(tensor) and not tensor.is_neg()
