"""One call of an op in PyTorch, for ``python -m cute_ops verify``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from cute_ops import testing
from cute_ops.autotune import dispatch
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import ITEMSIZE, Array
from cute_ops.declaration.tensor import Tensor
from cute_ops.jit import target
from cute_ops.testing import Arrays, numpy_dtype
from cute_ops.tools import sweep
from cute_ops_torch.library.tensors import DTYPES, NAMES, bind_tensors, memory
from cute_ops_torch.registry import register


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def broken() -> bool:
    """Whether a kernel has left the GPU's context unusable."""
    try:
        if device() == "cuda":
            torch.cuda.synchronize()
    except Exception:  # whatever it is, no call works any more
        return True
    return False


def not_checked() -> str:
    """The checks that :func:`run` and :func:`check` cannot make with this allocator; empty if they make all.

    They rely on a caching allocator, which hands out the memory that was filled with NaN and freed just before.
    """
    if device() != "cuda":
        return ""
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:  # whatever its value is
        reason = "PYTORCH_NO_CUDA_MEMORY_CACHING is set"
    elif (backend := torch.cuda.get_allocator_backend()) != "native":
        reason = f"PyTorch's allocator is {backend}"
    else:
        return ""
    return f"elements that a kernel does not write may go unseen, because {reason}: memory is not filled with NaN"


def run(op: Op, arrays: Arrays, attrs: Mapping[str, Any]) -> tuple[np.ndarray | None, ...]:
    """Call the registered op on NumPy arrays; None for absent outputs.

    Raises:
        AssertionError: on a GPU no output lies in memory that was filled with NaN, so the run would prove nothing.
            Nothing is filled where :func:`not_checked` says so.
    """
    outputs = _call(op, list(on_device(arrays).values()), attrs)
    return tuple(None if out is None else to_numpy(out) for out in outputs)


def check(op: Op, arrays: Arrays, attrs: Mapping[str, Any], base: str, others: Callable[[], Iterable[Arrays]]) -> None:
    """Compare a call with float64, all on the device. Inputs lie in memory as :mod:`cute_ops.tools.sweep` says of
    ``base``; ``others`` are what :func:`cute_ops.testing.check` takes.

    Raises:
        AssertionError: an output is wrong, or an input was written to.
    """
    given = on_device(arrays)
    tensors = [None if t is None else laid_out(t, op.inputs[name], base) for name, t in given.items()]
    outputs = _call(op, tensors, attrs)
    testing.check(op, given, attrs, outputs, lambda: map(on_device, others()))
    for (name, before), after in zip(given.items(), tensors, strict=True):
        if before is not None and after is not None and name not in op.mutates and _differ(before, after):
            raise AssertionError(f"{op.name}: input {name} was written to")


def functional(op: Op, call: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A call of an op, by default the registered one, that writes to copies and returns them before the outputs."""
    run = call or getattr(torch.ops.cute, op.name).default
    if not op.mutates:
        return run

    def copying(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        given = dict(zip(op.inputs, args, strict=False))
        given |= {name: given[name].clone() for name in op.mutates}
        made = run(*given.values(), *args[len(given) :], **kwargs)
        outputs = () if made is None else made if isinstance(made, tuple) else (made,)
        return (*map(given.__getitem__, op.mutates), *outputs)

    return copying


def on_device(arrays: Arrays) -> dict[str, torch.Tensor | None]:
    """Arrays as tensors, on the GPU if there is one."""
    return {name: None if a is None else to_torch(a) for name, a in arrays.items()}


def laid_out(tensor: torch.Tensor, declared: Tensor, base: str) -> torch.Tensor:
    """A copy of a tensor, with NaN around it (or the largest integer), as a sweep lays it out."""
    where = sweep.place(declared, Array(tuple(tensor.shape), NAMES[tensor.dtype]), base)
    buffer = torch.full((where.size * tensor.itemsize,), 127, dtype=torch.uint8, device=tensor.device)
    buffer = buffer.view(tensor.dtype)
    if tensor.is_floating_point():
        buffer.fill_(torch.nan)
    view = buffer.as_strided(tensor.shape, where.strides, where.start)
    view.copy_(tensor)
    return view


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Copies: a view of one element may keep any stride.
    first, second = (t.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for t in (one, other))
    return not torch.equal(first, second)


def _call(op: Op, tensors: list[torch.Tensor | None], attrs: Mapping[str, Any]) -> tuple[torch.Tensor | None, ...]:
    register(op)
    poisoned = _poison(op, tensors, attrs) if device() == "cuda" and not not_checked() else None
    result = getattr(torch.ops.cute, op.name).default(*tensors, *attrs.values())
    outputs = () if result is None else result if isinstance(result, tuple) else (result,)
    if outputs and poisoned and not any(out.data_ptr() in poisoned for out in outputs):
        raise AssertionError(f"{op.name}: no output lies where memory was poisoned")
    # An absent output is an empty tensor to torch.
    expected = bind_tensors(op, tensors, list(attrs.values())).outputs.values()
    written = dict(zip(op.inputs, tensors, strict=True))
    there = (None if e is None else out for e, out in zip(expected, outputs, strict=True))
    return (*map(written.get, op.mutates), *there)


def to_torch(array: np.ndarray) -> torch.Tensor:
    if not array.size:
        return torch.empty(array.shape, dtype=DTYPES[str(array.dtype)], device=device())
    flat = np.frombuffer(np.ascontiguousarray(array).tobytes(), dtype=np.uint8).copy()
    return torch.from_numpy(flat).view(DTYPES[str(array.dtype)]).reshape(array.shape).to(device())


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    name = str(tensor.dtype).removeprefix("torch.")
    return flat.view(numpy_dtype(name)).reshape(tensor.shape).copy()


def _poison(op: Op, tensors: list[Any], attrs: Mapping[str, Any]) -> set[int]:
    """Fill memory with NaN and free it, in the sizes of outputs and scratch arrays: the allocator hands it out next."""
    binding = bind_tensors(op, tensors, list(attrs.values()))
    if binding.empty:
        return set()
    scratch = dispatch.choose(binding, memory(op, tensors), target.of_device(0)).workspaces
    wanted: list[Array] = [a for a in (*binding.outputs.values(), *scratch.values()) if a is not None]
    blocks = [
        torch.full((math.prod(a.shape) * ITEMSIZE[a.dtype],), 255, dtype=torch.uint8, device="cuda") for a in wanted
    ]
    return {block.data_ptr() for block in blocks}
