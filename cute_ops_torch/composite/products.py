"""Torch's functions on the arrays of :class:`cute_ops.composite.products.Products`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from cute_ops.composite.products import Caller, Fits, Function, Products
from cute_ops.declaration.op import Op
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.ops.expression.broadcast import Fit
from cute_ops.ops.gemm import by_call
from cute_ops.ops.gemm.by_call import Epilogue
from cute_ops_torch.composite.autocast import autocast, enabled
from cute_ops_torch.composite.constant import attribute, constant, functions, guard, traced, whole
from cute_ops_torch.host.traced_constants import static
from cute_ops_torch.library.modes import EXACT, transforms_active
from cute_ops_torch.library.tensors import array
from cute_ops_torch.registry import define

Tensor = torch.Tensor
HALF, VECTOR, LINE = (torch.bfloat16, torch.float16), VECTOR_BYTES // 2, 64  # elements of 16 bits
# Rows of an MLP's input from which on an odd hidden layer is widened for a gradient, by its columns; without one
# elements of the hidden layer from which on its rows lie apart, which takes the host longer.
LEAST_ROWS, LEAST_APART = 2, 1 << 22
constant(by_call.read_by_halves)  # torch.compile calls it, and does not trace it


class TorchProducts(Products[Tensor]):
    """Linear layers of tensors. Autocast has x and weights in its dtype, as torch's own products have them."""

    converts, tracing = staticmethod(enabled), staticmethod(torch.compiler.is_dynamo_compiling)
    spec, shape = staticmethod(array), staticmethod(lambda tensor: tuple(tensor.shape))
    functions, number = staticmethod(functions), staticmethod(static)

    def operands(self, *arrays: Tensor) -> tuple[Tensor, ...]:
        return autocast(*arrays)

    def columns_to_vectors(self, x: Any, first: Any, w_down: Any, transposed: bool, fused: str) -> int:
        if self.tracing() or fused != "auto" or any(type(t) not in EXACT for t in (x, first, w_down)):
            return 0
        n = w_down.shape[0 if transposed else -1] if w_down.ndim == 2 else 0
        if n % VECTOR == 0 or not x.is_cuda or x.dtype not in HALF or not x.ndim:
            return 0
        rows, columns = math.prod(x.shape[:-1]), max(x.shape[-1], w_down.shape[1 if transposed else 0])
        if not _differentiated(x, first, w_down):
            return -n % VECTOR if rows * n >= LEAST_APART and not transforms_active() else 0
        # Copies of the hidden layer and of its gradient, and stores off a vector, take longer than a copy of the
        # weights if there are rows enough.
        return -n % VECTOR if rows >= LEAST_ROWS * columns else 0

    def apart(self, op: Op, columns: int, arrays: Sequence[Tensor], attrs: Sequence[Any]) -> Tensor | None:
        x, weight = arrays[:2]
        if (
            _differentiated(*arrays)
            or weight.dtype != x.dtype
            or any(type(t) not in EXACT or t.is_neg() for t in arrays)
        ):
            return None
        out = x.new_empty(*x.shape[:-1], -(-columns // LINE) * LINE)[..., :columns]
        call = define(op).launcher.find(arrays, attrs, {next(iter(op.outputs)): out})
        call.fill(tuple(op.outputs))(*arrays, out)
        return out

    def widened(self, array: Tensor, axis: int, columns: int) -> Tensor:
        return F.pad(array, (0, 0) * (-1 - axis) + (0, columns))

    def function(self, op: Op) -> Function:
        return define(op).function

    def expanded(self, array: Tensor, fit: Fit) -> Tensor:
        # Tiles that some rows share are copied: kernels step from row to row by one stride.
        return array.reshape(fit.own).expand(fit.sizes).contiguous()

    def traced(
        self, caller: Caller, epilogue: Epilogue, arrays: Sequence[Any], layout: str, save: str,
        attrs: Mapping[str, Any],
    ) -> tuple[Function, Fits]:  # fmt: skip
        constants = tuple((name, attribute(name, value)) for name, value in attrs.items())
        function = epilogue if isinstance(epilogue, str) else guard(epilogue)
        options, fits = self.choose(epilogue, arrays, layout, constants, caller.name)
        return _traced(caller.op, function, *options, layout, save, constants), fits

    def gated_linear(
        self, x: Tensor, weight: Tensor, activation: str = "silu", fused: str = "auto", *, transposed: bool = False,
        halves: bool = False, out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if out is None:
            return super().gated_linear(x, weight, activation, fused, transposed=transposed, halves=halves)
        if enabled():
            x, weight = autocast(x, weight)
        function = self.gated(weight, transposed, halves)
        return function(x, weight, activation, fused, out=out)  # type: ignore[no-any-return]

    gated_linear.__doc__ = Products.gated_linear.__doc__


def _differentiated(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _op(make: Callable[..., Op], function: str | tuple[str, ...], *options: Any) -> Op:
    return make(whole(function), *options)


_traced: Callable[..., Function] = traced(_op)
products = TorchProducts()
