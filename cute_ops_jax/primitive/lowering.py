"""What a primitive becomes: the declared reference, or on CUDA the compiled kernel as an FFI call.

Both bodies are traced when a program is lowered, so a kernel is compiled and loaded before the program
that calls it exists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cute_ops import dispatch
from cute_ops.binding import Binding, bind, expanded_shape
from cute_ops.errors import message
from cute_ops.jit.layout import folded
from cute_ops.jit.plan import Plan
from cute_ops.op import Op
from cute_ops.shapes import Array
from cute_ops_jax.primitive import ffi
from cute_ops_jax.primitive.arrays import spec, specs


def reference(
    op: Op, *arrays: jax.Array, names: Sequence[str], attrs: Sequence[tuple[str, Any]], inplace: bool = False
) -> list[jax.Array]:
    """The declared reference through jax.numpy: every platform but CUDA.

    Raises:
        TypeError: the reference does not return what the op declares.
    """
    given = dict(zip(names, arrays, strict=True))
    outputs = bind(op, specs(given), dict(attrs)).outputs
    result = op.reference(jnp, *(given.get(name) for name in op.inputs), **dict(attrs))
    results = result if isinstance(result, tuple) else (result,)
    if len(results) != len(outputs):
        raise TypeError(message(op, f"its reference returned {len(results)} outputs, declared are {len(outputs)}."))
    for (name, declared), array in zip(outputs.items(), results, strict=True):
        got = None if array is None else spec(array)
        if got != declared:
            problem = f"its reference returned {_text(got)} for `{name}`, declared is {_text(declared)}."
            raise TypeError(message(op, problem))
    return [array for array in results if array is not None]


# Enough to keep a GPU busy.
MANY_ROWS = 1 << 20


class Chosen(NamedTuple):
    """A call as it is, the same with leading dims folded, and how that runs."""

    whole: Binding
    folded: Binding
    plan: Plan


def choose(op: Op, given: Mapping[str, Array | None], attrs: Sequence[tuple[str, Any]]) -> Chosen:
    """The kernel for a call of compact arrays, whose leading dims may be symbolic.

    Raises:
        NotImplementedError: other symbolic sizes, or a GPU that no kernel is built for.
    """
    whole = bind(op, given, dict(attrs))
    shapes = folded(_with_shapes(whole, expanded(whole)))
    binding = _with_shapes(whole, shapes)
    target = dispatch.target_of(whole, ffi.device_target)
    if not any(_symbolic(size) for array in binding.inputs.values() if array for size in array.shape):
        return Chosen(whole, binding, dispatch.choose(binding, {}, target, ffi.here()))
    inner = {n: a.shape[len(a.shape) - len(op.inputs[n].dims) :] for n, a in binding.inputs.items() if a}
    problem = next((f"argument `{n}` has others" for n, shape in inner.items() if any(map(_symbolic, shape))), "")
    if not problem:
        # A kernel does not depend on the number of rows, and scratch arrays that serve many serve fewer.
        fixed, larger = (dispatch.choose(_with_rows(binding, rows), {}, target) for rows in (MANY_ROWS, 2 * MANY_ROWS))
        if _elements(larger) > 1.5 * _elements(fixed):
            problem = "its scratch arrays grow with the rows"
    if problem:
        problem = f"on CUDA only leading dims may be symbolic, but {problem}."
        raise NotImplementedError(message(op, problem, whole.inputs, whole.dims, whole.dtypes))
    return Chosen(whole, binding, fixed)


def expanded(whole: Binding) -> dict[str, tuple[Any, ...]]:
    """The shapes of inputs that broadcast along an inner leading dim, as the compact arrays that kernels read."""
    given = {n: (t, a) for n, t in whole.op.inputs.items() if (a := whole.inputs[n]) is not None}
    found = {n: expanded_shape(t, a, whole.dims) for n, (t, a) in given.items()}
    return {n: shape for n, shape in found.items() if shape is not None}


def _with_shapes(binding: Binding, shapes: Mapping[str, tuple[Any, ...]]) -> Binding:
    """The binding with other shapes of some inputs."""
    arrays = {n: a and Array(shapes.get(n, a.shape), a.dtype) for n, a in binding.inputs.items()}
    return bind(binding.op, arrays, binding.attrs) if shapes else binding


def symbol(op: Op, given: Mapping[str, Any], attrs: Sequence[tuple[str, Any]]) -> str:
    """The name of the kernel for a call."""
    return choose(op, specs(given), attrs).plan.variant.symbol


def _elements(chosen: Plan) -> int:
    return sum(math.prod(scratch.shape) for scratch in chosen.workspaces.values())


def _symbolic(size: Any) -> bool:
    return not isinstance(size, int)


def _with_rows(binding: Binding, rows: int) -> Binding:
    """The binding with a number in place of everything symbolic."""
    shapes = {n: tuple(rows if _symbolic(size) else size for size in a.shape) for n, a in binding.inputs.items() if a}
    return _with_shapes(binding, shapes)


def kernel(
    op: Op, *arrays: jax.Array, names: Sequence[str], attrs: Sequence[tuple[str, Any]], inplace: bool = False
) -> list[jax.Array]:
    """The compiled kernel, called by its target's name on row-major arrays.

    XLA hands over compact arrays, so leading dims fold: into one, or where an input is shared by the outer
    ones, into outer and inner ones. A single variant serves every rank.
    Scratch arrays are results that nobody reads: XLA places them with its own temporaries.

    Raises:
        NotImplementedError: symbolic sizes, or a GPU that no kernel is built for.
        CompileError: the kernel does not compile.
    """
    given = dict(zip(names, arrays, strict=True))
    whole, binding, chosen = choose(op, specs(given), attrs)
    wide = {n: jnp.broadcast_to(given[n], shape) for n, shape in expanded(whole).items()}
    views = {n: a.reshape(binding.inputs[n].shape) for n, a in {**given, **wide}.items()}  # type: ignore[union-attr]
    ffi.ensure(chosen.variant)
    outputs = [out for out in binding.outputs.values() if out is not None]
    results = [jax.ShapeDtypeStruct(out.shape, jnp.dtype(out.dtype)) for out in (*outputs, *chosen.workspaces.values())]
    # No attributes: scalars are part of the variant (jax-tvm-ffi 0.1.3 corrupts memory with some).
    made = [name for name, out in binding.outputs.items() if out is not None]
    sources = {op.outputs[name].donates: i for i, name in enumerate(made)} if inplace else {}
    # XLA copies an aliased operand that is read later.
    aliases = {i: sources[name] for i, name in enumerate(views) if name in sources}
    flat = jax.ffi.ffi_call(chosen.variant.symbol, results, input_output_aliases=aliases)(*views.values())
    wanted = [out.shape for out in whole.outputs.values() if out is not None]
    return [array.reshape(shape) for array, shape in zip(flat[: len(wanted)], wanted, strict=True)]


def _text(array: Array | None) -> str:
    return "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
