"""PyTorch's side of ``python -m cute_ops verify``: one call of an op on NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from cute_ops import target
from cute_ops.op import ITEMSIZE, Array, Op
from cute_ops.plan import plan
from cute_ops.testing import Arrays, numpy_dtype
from cute_ops_torch.registry import register
from cute_ops_torch.tensors import DTYPES, bind_tensors, memory


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def run(op: Op, arrays: Arrays, attrs: Mapping[str, Any]) -> tuple[np.ndarray | None, ...]:
    """Call the registered op; None for absent outputs.

    Raises:
        AssertionError: on a GPU no output lies in memory that was filled with NaN, so that nothing would be shown.
    """
    register(op)
    tensors = [None if a is None else to_torch(a) for a in arrays.values()]
    poisoned = _poison(op, tensors, attrs) if device() == "cuda" else None
    result = getattr(torch.ops.cute, op.name).default(*tensors, *attrs.values())
    outputs = result if isinstance(result, tuple) else (result,)
    if poisoned and not any(out.data_ptr() in poisoned for out in outputs):
        raise AssertionError(f"{op.name}: no output lies where memory was poisoned")
    # An absent output is an empty tensor to torch.
    expected = bind_tensors(op, tensors, list(attrs.values())).outputs.values()
    return tuple(None if e is None else to_numpy(out) for out, e in zip(outputs, expected, strict=True))


def to_torch(array: np.ndarray) -> torch.Tensor:
    flat = np.frombuffer(np.ascontiguousarray(array).tobytes() or b"", dtype=np.uint8).copy()
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
    scratch = plan(binding, memory(op, tensors), target.of_device(0)).workspaces
    wanted: list[Array] = [a for a in (*binding.outputs.values(), *scratch.values()) if a is not None]
    blocks = [
        torch.full((math.prod(a.shape) * ITEMSIZE[a.dtype],), 255, dtype=torch.uint8, device="cuda") for a in wanted
    ]
    return {block.data_ptr() for block in blocks}
