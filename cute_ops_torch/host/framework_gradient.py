"""Whether torch differentiates a call: one of its own product, where that is the faster one in the backward, too.

A node of ours takes 4 us of host time, a third of what torch's product of few rows takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from cute_ops.autotune import dispatch
from cute_ops.declaration.binding import bind
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import ProductPlan
from cute_ops.declaration.shapes import Array
from cute_ops.jit import target
from cute_ops.jit.layout import Memory, compact
from cute_ops_torch.host.compiled_call import CompiledCall
from cute_ops_torch.host.launch import Launcher
from cute_ops_torch.library.products import autocast
from cute_ops_torch.library.remembered import remembered
from cute_ops_torch.library.tensors import Tensors, bind_tensors, memory

# Elements of a cotangent up to which torch may sum it up to the gradient of a bias. Ours sums up more in less time:
# 28 us instead of 37 for 8224 x 5120.
MOST_SUMMED = 2**21
# What was found of calls, by these and by the inputs whose gradients are wanted.
Known = dict[tuple[CompiledCall, tuple[str, ...]], bool]


def differentiates(
    op: Op, launcher: Callable[[], Launcher], tensors: Tensors, attrs: Sequence[Any], known: Known
) -> bool:
    """Whether a call runs by torch's product, and torch's autograd computes what ours would.

    Under autocast it may not: its backward may run in other dtypes. ``known`` holds what was found of earlier calls,
    because to plan their gradients takes 0.5 ms.
    """
    wanted = tuple(name for name, t in zip(op.inputs, tensors, strict=True) if t is not None and t.requires_grad)
    product = op.fallback.program.product if op.fallback else None
    if not (wanted and op.steps and product) or (product.read_as and not product.bias) or autocast():
        return False
    call = launcher().find(tensors, attrs)
    if not call.differentiable:
        return False
    return remembered(known, (call, wanted), lambda: _products_are_faster(op, product, tensors, attrs, wanted))


def _products_are_faster(
    op: Op, product: ProductPlan, tensors: Tensors, attrs: Sequence[Any], wanted: Collection[str]
) -> bool:
    """Whether the framework's products compute the gradients of these inputs, of compact cotangents."""
    binding, places = bind_tensors(op, tensors, attrs), memory(op, tensors)
    made = {f"d{name}": array for name, array in binding.outputs.items() if array is not None}
    known = {**binding.inputs, **made}
    arch = target.of_device(next(t.device.index or 0 for t in tensors if t is not None))
    if dispatch.realigned(binding, places, arch, reads=2):  # ours gains from copies that the backward reads, too
        return False
    places |= {name: Memory(compact(array.shape), 0) for name, array in made.items()}
    steps = op.backward(wanted, tuple(op.inputs))
    products = [step for step in steps if list(step.outputs) != [f"d{product.bias}"]]
    if len(products) < len(steps) and binding.rows * binding.dims["n"] > MOST_SUMMED:
        return False
    return all(_is_faster(step, known, places, binding.attrs, arch) for step in products)


def _is_faster(
    step: Op, arrays: Mapping[str, Array | None], places: Mapping[str, Memory], attrs: Mapping[str, Any],
    arch: target.Target,
) -> bool:  # fmt: skip
    """Whether the framework's product computes a step faster than our kernel."""
    if not _by_product(step) or not arrays.keys() >= step.inputs.keys():
        return False
    inputs = {name: arrays[name] for name in step.inputs}
    call = bind(step, inputs, {name: attrs[name] for name in step.attrs})
    given = {name: places[name] for name in inputs}
    return not dispatch.realigned(call, given, arch) and dispatch.fallback(call, given, arch) is not None


def _by_product(step: Op) -> bool:
    """Whether the framework computes a step by a product and nothing else."""
    program = step.fallback.program if step.fallback else None
    return program is not None and program.product is not None and not program.ops
