"""Torch tensors as the core describes arrays: shape, dtype name, place in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from cute_ops.declaration.binding import Binding, bind
from cute_ops.declaration.messages import message
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import ITEMSIZE, Array
from cute_ops.declaration.tensor import Tensor as Declared
from cute_ops.errors import suggesting
from cute_ops.jit.layout import Memory, check_memory, contiguous_axis, has_contiguous

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

Tensors = Sequence[torch.Tensor | None]
P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: misspelt arguments of a function are named, and those that are no dense tensors."""
    return suggesting(function, wrong_tensor)


def wrong_tensor(value: Any) -> str:
    """The problem with a value that is to be a tensor, ``one dense tensor, got ndarray``; empty for a tensor whose
    elements a kernel finds by strides, and for None.
    """
    came = _no_dense_tensor(value)
    return came and f"one dense tensor, got {came}"


def _no_dense_tensor(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return f"a tensor of layout {value.layout}"
        return "a nested tensor" if value.is_nested else "a quantized tensor" if value.is_quantized else ""
    known = value is None or hasattr(value, "__torch_function__")  # fx's proxies
    return "" if known else type(value).__name__


def check_inputs(op: Op, args: Sequence[Any], missing: Any = None) -> None:
    """Raise TypeError for a required input that is None, or is ``missing``, and for one that is no dense tensor."""
    for (name, declared), value in zip(op.inputs.items(), args, strict=False):
        if not declared.optional and (value is None or value is missing):
            what = "None was" if value is None else "was not"
            raise TypeError(message(op, f"argument `{name}` is required, but {what} given."))
        several = declared.many and isinstance(value, list | tuple)
        for i, each in enumerate(value if several else [value]):
            if problem := wrong_tensor(each):
                label = f"{name}[{i}]" if several else name
                raise TypeError(message(op, f"argument `{label}` must be {problem}."))


def bind_tensors(op: Op, tensors: Tensors, attrs: Sequence[Any]) -> Binding:
    """Check a call against its declaration, and that all tensors are on one device.

    Raises:
        TypeError: a wrong dtype or a missing argument.
        ValueError: shapes or devices that do not fit together.
    """
    given = arrays(op, tensors)
    first: tuple[str, torch.device] | None = None
    for name, tensor in zip(op.inputs, tensors, strict=True):
        if tensor is None:
            continue
        first = first or (name, tensor.device)
        if tensor.device != first[1]:
            problem = f"argument `{name}` is on {tensor.device}, but `{first[0]}` is on {first[1]}."
            raise ValueError(message(op, problem, given))
    return bind(op, given, dict(zip(op.keywords, attrs, strict=True)))


def arrays(op: Op, tensors: Tensors) -> dict[str, Array | None]:
    return {name: None if t is None else array(t) for name, t in zip(op.inputs, tensors, strict=True)}


def array(tensor: torch.Tensor) -> Array:
    return Array(tuple(tensor.shape), NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch."))


def check_strides(binding: Binding, tensors: Tensors, addresses: bool = False) -> None:
    """Raise ValueError unless tensors lie as their inputs demand, on any device. Programs take any strides."""
    if binding.op.program:
        return
    for tensor, declared in zip(tensors, binding.op.inputs.values(), strict=True):
        usual = declared.contiguous is None and not declared.align and not declared.merged
        # Strides first, so that the usual case adds no guard on a symbolic size.
        if tensor is not None and not (usual and (not declared.dims or tensor.stride(-1) == 1)):
            check_memory(binding, memory(binding.op, tensors, addresses), by_kernel=False)
            break


def readable(declared: Declared, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose strides the caller never chose: a copy where no dim is contiguous that an input asks for, and
    where rows are not one stride apart that it wants merged.
    """
    shape, strides = tensor.shape, tensor.stride()
    contiguous = not has_contiguous(declared) or contiguous_axis(declared, shape, strides) is not None
    if contiguous and (not declared.merged or declared.is_merged(shape, strides)):
        return tensor
    if not declared.axes:  # no dim has to be contiguous
        return tensor.contiguous()
    order = declared.memory_order(tensor.ndim, declared.axes[0])
    return tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(tensor.ndim)])


def memory(op: Op, tensors: Tensors, addresses: bool = True) -> dict[str, Memory]:
    return {
        name: Memory(t.stride(), t.data_ptr() if addresses else 0)
        for name, t in zip(op.inputs, tensors, strict=True)
        if t is not None
    }


def absent_dtype(binding: Binding, declared: Declared) -> torch.dtype:
    """The dtype of the empty tensor that stands for an absent output: its own if an input binds it."""
    name = binding.dtype(declared)
    return DTYPES[name if name in DTYPES else next(a.dtype for a in binding.inputs.values() if a is not None)]


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    """A copy where kernels cannot read a tensor whose strides no caller chose: ``sum`` makes expanded cotangents."""
    return tensor if tensor.ndim == 0 or tensor.stride(-1) == 1 else tensor.contiguous()
