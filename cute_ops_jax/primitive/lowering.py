"""Lowering of a primitive: to the op's reference, or on CUDA the compiled kernel as an FFI call.

JAX traces both bodies when it lowers a program, so a kernel is compiled and loaded before the program that calls it
exists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cute_ops.autotune import dispatch
from cute_ops.declaration.binding import Binding, as_outputs, check_returned, expanded_shape
from cute_ops.declaration.messages import message, naming
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.jit.layout import Memory, Shapes, check_memory, folded, preferred, with_leading_dims, with_shapes
from cute_ops.jit.plan import Plan
from cute_ops.jit.target import Target
from cute_ops_jax.primitive import ffi
from cute_ops_jax.primitive.any_size import plan_for_any_size, with_numbers
from cute_ops_jax.primitive.arrays import spec

# By input the dim, counted from the end, that was the last of the array which the program has transposed.
Transposed = Mapping[str, int]
NONE: Transposed = {}
# Elements of an output up to which XLA computes what follows its product: of five products of up to 1.6 million that
# saves 1.3 to 2.4 us, of three of 5.7 to 10.2 million it costs up to 5 us (H200).
FUSED_BY_XLA = 2**21


def reference(
    binding: Binding, arrays: Sequence[jax.Array], inplace: bool = False, transposed: Transposed = NONE
) -> list[jax.Array]:
    """The op's reference in jax.numpy, on every platform but CUDA.

    Raises:
        TypeError: the reference does not return what the op declares.
        ValueError: rows that are not aligned as the op demands.
    """
    op = binding.op
    check_memory(binding, {})
    given = by_name(binding, arrays)
    results = as_outputs(op, op.reference(jnp, *(given.get(name) for name in op.inputs), **binding.attrs))
    check_returned(binding, results, spec)
    return [array for array in results if array is not None]


def kernel(
    binding: Binding, arrays: Sequence[jax.Array], inplace: bool = False, transposed: Transposed = NONE
) -> list[jax.Array]:
    """The compiled kernel, called by its target's name on row-major arrays. An array of which the kernel wants another
    dim contiguous is transposed, so that this dim is the last: no copy where the program has just transposed it.

    XLA hands over compact arrays, so leading dims fold: into one, or into outer and inner ones where the outer ones
    share an input. One variant serves every rank. Scratch arrays are results that are not read: XLA places them
    among its own temporaries.

    Args:
        inplace: outputs take the memory of the inputs that are donated to them.
        transposed: inputs that are transposed arrays.

    Raises:
        NotImplementedError: symbolic sizes, or a GPU that no kernel is built for.
        CompileError: the kernel does not compile.
    """
    op, given, chosen = binding.op, by_name(binding, arrays), choose(binding, transposed)
    variant = chosen.plan.variant
    given |= {n: jnp.broadcast_to(given[n], shape) for n, shape in chosen.expanded.items()}
    orders = {n: key.order for n, key in zip(variant.names, variant.args, strict=True) if key and key.order}
    views = {n: given[n].reshape(a.shape) for n, a in chosen.folded.inputs.items() if a is not None}
    views |= {n: jnp.transpose(views[n], order) for n, order in orders.items()}
    made = {n: out for n, out in chosen.folded.outputs.items() if out is not None}
    every = chosen.folded.inputs
    written = {n: a._replace(shape=views[n].shape) for n in op.mutates if (a := every[n]) is not None}
    scratch = chosen.plan.workspaces
    results = {**made, **scratch, **written}
    shapes = [jax.ShapeDtypeStruct(out.shape, jnp.dtype(out.dtype)) for out in results.values()]
    donated = {n: op.outputs[n].donates for n in made if op.outputs[n].donates not in orders} if inplace else {}
    aliases = ffi.aliases(list(given), list(results), {**donated, **{n: n for n in written}})
    numbers = ffi.attributes(op.scalars, binding.attrs)
    ffi.ensure(variant)
    call = jax.ffi.ffi_call(variant.symbol, list(shapes), input_output_aliases=aliases)
    found = dict(zip(results, call(*views.values(), **numbers), strict=True))
    for name in (name for name in written if name in orders):
        found[name] = jnp.transpose(found[name], [orders[name].index(i) for i in range(found[name].ndim)])
    return [found[n].reshape(a.shape) for n, a in binding.results.items() if a is not None]


class Chosen(NamedTuple):
    """How a call runs: its leading dims folded, that call's plan, and the shapes of the inputs to broadcast first."""

    folded: Binding
    plan: Plan
    expanded: Shapes


def choose(binding: Binding, transposed: Transposed = NONE) -> Chosen:
    """The kernel for a call on compact arrays, whose sizes may be symbolic.

    Raises:
        NotImplementedError: a symbolic size that is a constant of kernels, or a GPU that no kernel is built for.
    """
    expanded, flat = _folded(binding)
    memory = partial(_memory, binding.op, transposed)
    if _has_symbols(binding):
        target, _ = _target_and_device(binding)
        return Chosen(flat, plan_for_any_size(flat, memory, target), expanded)
    return Chosen(flat, dispatch.choose(flat, memory(_shapes(flat)), *_target_and_device(binding)), expanded)


def fallback(binding: Binding, on_gpu: bool, transposed: Transposed = NONE) -> Program | None:
    """The program that runs a call in place of a kernel, if one does. Symbolic sizes count as large ones."""
    if binding.empty:
        return None
    if not on_gpu:
        return dispatch.fallback(binding, {}, None)
    target, _ = _target_and_device(binding)
    return dispatch.fallback(*_in_numbers(binding, transposed), target, pads=True)


def behind_product(binding: Binding) -> Callable[..., list[jax.Array]]:
    """What runs an epilogue behind XLA's product: :func:`reference`, which XLA fuses, or of large outputs
    :func:`kernel`.
    """
    outputs = _in_numbers(binding, NONE)[0].outputs.values()
    return reference if max(math.prod(a.shape) for a in outputs if a) <= FUSED_BY_XLA else kernel


def kernel_is_faster(binding: Binding) -> bool:
    """:func:`cute_ops.autotune.dispatch.kernel_is_faster` for the GPU to lower for; False where there is none."""
    try:
        target, _ = ffi.target_and_device()
    except (RuntimeError, NotImplementedError):
        return False
    return dispatch.kernel_is_faster(*_in_numbers(binding, NONE), target)


def _target_and_device(binding: Binding) -> tuple[Target, int | None]:
    """:func:`ffi.target_and_device`, whose errors name the call."""
    call = binding.op, binding.inputs, binding.dims, binding.dtypes
    try:
        with naming(*call):
            return ffi.target_and_device()
    except NotImplementedError:
        raise
    except RuntimeError as error:
        op, *others = call
        found = str(error).removeprefix("cute_ops: ")
        problem = f"no GPU to lower for: {found}; set CUTE_OPS_ARCH to that of another machine, such as sm_90a."
        raise RuntimeError(message(op, problem, *others)) from None


def _in_numbers(binding: Binding, transposed: Transposed) -> tuple[Binding, dict[str, Memory]]:
    """The call with its leading dims folded and large numbers for symbolic sizes, and how its inputs lie."""
    _, flat = _folded(binding)
    memory = partial(_memory, binding.op, transposed)
    return with_numbers(flat, memory) if _has_symbols(binding) else (flat, memory(_shapes(flat)))


def _folded(binding: Binding) -> tuple[Shapes, Binding]:
    """The shapes of the inputs to broadcast first, and the call with its leading dims folded."""
    expanded = _expanded(binding)
    whole = binding._replace(inputs=with_shapes(binding.inputs, expanded)) if expanded else binding
    return expanded, with_leading_dims(whole, folded(whole))


def _shapes(binding: Binding) -> Shapes:
    return {name: a.shape for name, a in binding.inputs.items() if a is not None}


def _has_symbols(binding: Binding) -> bool:
    return any(not isinstance(size, int) for shape in _shapes(binding).values() for size in shape)


def _memory(op: Op, transposed: Transposed, shapes: Shapes) -> dict[str, Memory]:
    """The layout of inputs that may have another contiguous dim than the last: as they come, if a kernel takes that."""
    found = {}
    for name, shape in shapes.items():
        tensor = op.inputs[name]
        for place in (transposed.get(name), -1) if tensor.contiguous else ():
            if place in tensor.axes:
                found[name] = Memory(preferred(tensor, shape, place))
                break
    return found


def by_name(binding: Binding, arrays: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """The inputs of a call by name."""
    return dict(zip((n for n, a in binding.inputs.items() if a is not None), arrays, strict=True))


def _expanded(binding: Binding) -> Shapes:
    """The shapes of inputs that broadcast along an inner leading dim, as the compact arrays that kernels read."""
    given = {n: (t, a) for n, t in binding.op.inputs.items() if t.broadcast and (a := binding.inputs[n]) is not None}
    found = {n: expanded_shape(t, a, binding.dims) for n, (t, a) in given.items()}
    return {n: shape for n, shape in found.items() if shape is not None}
