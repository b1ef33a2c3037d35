"""Kernels of a graph, compiled while Inductor compiles the graph.

A first step meets its kernels one after another and would wait for each compile. So the lowering of a call starts the
compiles of all kernels that it runs, those of a composite's steps too, each in a worker of its own. Where the first
step then asks for one that is not ready, it waits for that one. What cannot be foreseen is compiled when it is called.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._functorch import config as functorch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from cute_ops import env
from cute_ops.autotune import dispatch
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.jit import cache, target
from cute_ops.jit.target import Target
from cute_ops.jit.variant import Variant
from cute_ops_torch.inductor.effects import example
from cute_ops_torch.inductor.fx import hint
from cute_ops_torch.library import program as programs
from cute_ops_torch.library.products import adds_bias
from cute_ops_torch.library.tensors import Tensors, bind_tensors, memory

log = logging.getLogger("cute_ops")
_seen: set[Any] = set()


def compile_ahead(op: Op, node: Node) -> None:
    """Start to compile the kernels of a call in a graph. Errors are raised where a kernel is called."""
    start(op, *_arguments(op, node))


def start(op: Op, tensors: Sequence[Any], attrs: Sequence[Any]) -> None:
    """:func:`compile_ahead` of a call with these fake tensors and attributes."""
    if env.TUNE.read() or env.RECORD.read() is not None or env.BUNDLE.read():
        return  # a call that never runs is not measured or recorded, and bundles hold all kernels
    device = next((t.device for t in tensors if t is not None), None)
    if device is None or device.type != "cuda":
        return
    try:
        places = [None if t is None else (_sizes(t.shape), _sizes(t.stride()), t.dtype) for t in tensors]
        key = op, device, *places, *attrs
        if key in _seen:
            return
        _seen.add(key)
        # Programs ask for addresses, and those of fake tensors are multiples of all that matters: 0.
        addresses = functorch.patch(fake_tensor_allow_unsafe_data_ptr_access=True)
        with addresses, FakeTensorMode(), torch.no_grad(), _WiderProducts():
            fake = [None if p is None else torch.empty_strided(*p[:2], dtype=p[2], device=device) for p in places]
            wanted = kernels(op, fake, attrs, target.of_device(device.index or 0))
    except Exception as error:  # whatever it is, the call itself says so
        log.debug("the kernels of %s cannot be foreseen: %s", op.name, error)
        return
    for variant in wanted:
        cache.start(variant)


def _arguments(op: Op, node: Node) -> tuple[list[Any], list[Any]]:
    """The fake tensors that a call in a graph has, and its attributes."""
    given: Any = torch.fx.map_arg((node.args, node.kwargs), example)
    named = dict(zip((*op.inputs, *op.keywords), given[0], strict=False)) | given[1]
    attrs = [named.get(name, default) for name, default in op.keywords.items()]
    return [named.get(name) for name in op.inputs], attrs


def kernels(op: Op, tensors: Tensors, attrs: Sequence[Any], arch: Target) -> list[Variant]:
    """The kernels that a call runs, of which nothing is compiled; ``tensors`` are fake ones."""
    found: dict[str, Variant] = {}

    def call(op: Op, inputs: Mapping[str, Any], attrs: Mapping[str, Any], inplace: bool = False) -> dict[str, Any]:
        note(op, [inputs.get(name) for name in op.inputs], [*{**op.keywords, **attrs}.values()])
        return programs.call(op, inputs, attrs)

    def note(op: Op, tensors: Tensors, attrs: Sequence[Any]) -> None:
        binding = bind_tensors(op, tensors, attrs)
        places = memory(op, tensors, addresses=False)
        if binding.empty:
            return
        program = op.program or dispatch.fallback(binding, places, arch)
        if program is None:
            variant = dispatch.foresee(binding, places, arch).variant
            found[variant.symbol] = variant
        elif not _is_one_product(program, binding):
            try:
                programs.run(program, binding, tensors, call)
            except Exception as error:  # it reads elements, or addresses
                log.debug("%s cannot be foreseen to its end: %s", op.name, error)

    note(op, tensors, attrs)
    return [*found.values()]


class _WiderProducts(TorchFunctionMode):
    """Products of 16 bits with results in float32, of which fake tensors do not know what they return (torch 2.11)."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        dtype = given.pop("out_dtype", None)
        if dtype is None:
            return function(*args, **given)
        out = given.pop("out", None)
        return function(*args, **given).to(dtype) if out is None else out


def _is_one_product(program: Program, binding: Binding) -> bool:
    """Whether a program runs by torch's product alone, which adds a bias."""
    product = program.product
    if product is None:
        return False
    first = next(array for array in binding.inputs.values() if array is not None)
    return not program.ops or adds_bias(product, first, binding.inputs.get(product.bias))


def _sizes(given: Sequence[Any]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else hint(size) for size in given)
