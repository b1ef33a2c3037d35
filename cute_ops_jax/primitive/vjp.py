"""The reverse-mode rule: an op and the backward ops that it declares, wired by argument names.

An input of a backward op that is named like an input or output of the op is that array, ``d<output>`` is the cotangent,
and its output ``d<input>`` is the gradient. Nothing is computed, or saved for it, that no input which is differentiated
needs: a frozen weight has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from cute_ops.declaration.op import Op
from cute_ops.declaration.tensor import Tensor
from cute_ops_jax import _compat
from cute_ops_jax.distributed import explicit
from cute_ops_jax.distributed.varying import Axes, varies
from cute_ops_jax.primitive.arrays import Attributes, promoting
from cute_ops_jax.primitive.primitive import OpPrimitive, no_derivative, primitive_of

Arrays = dict[str, jax.Array]
# The arrays that the backward reads, by name, and one whose shape says which inputs are differentiated.
Saved = tuple[Arrays, jax.Array | None]


class StaticCall(NamedTuple):
    """The static part of a call.

    Attributes:
        names: the inputs that are present.
        attrs: the attributes.
        inplace: whether gradients may take the memory of the inputs that are donated to them.
        axes: of the enclosing ``shard_map``, along which devices have slices of the dim that the op splits.
        label: what stands behind the names that policies of checkpoints know the outputs by: see :func:`labelled`.
    """

    names: tuple[str, ...]
    attrs: Attributes
    inplace: bool = False
    axes: Axes = ()
    label: str = ""


label: ContextVar[str] = ContextVar("label", default="")


@contextmanager
def labelled(text: str) -> Iterator[None]:
    """Let ops that are called here have outputs of other names than their other calls, ``cute_<op><text>``, so that a
    policy of ``jax.checkpoint`` can tell them from these.
    """
    token = label.set(text)
    try:
        yield
    finally:
        label.reset(token)


def differentiable(op: Op) -> Callable[[StaticCall, Arrays], Arrays]:
    """``run(call, inputs) -> outputs``, with a gradient where one is declared; arrays that are there go by name."""
    forward = primitive_of(op)

    def run(call: StaticCall, inputs: Arrays) -> Arrays:
        return outputs_of(forward, call, inputs)

    def outputs_of(forward: OpPrimitive, call: StaticCall, inputs: Arrays) -> Arrays:
        # Policies of jax.checkpoint may name the outputs, those kept for the gradient included.
        outputs = forward(inputs, call.attrs, axes=call.axes).items()
        return {name: checkpoint_name(a, f"cute_{op.name}{call.label}") for name, a in outputs if a is not None}

    if not op.differentiable:
        return run
    of_step = primitive_of  # a step's is made when a gradient is first asked for
    reads = {name for step in op.steps for name in step.inputs} | op.handed_on.keys() | set(op.scaled.values())
    first, *others = op.outputs
    more = () if op.saving is None else op.saving.outputs.keys() - op.outputs.keys()
    # The inputs whose gradient can be left out.
    optional = [
        n for n in op.differentiable
        if len(op.steps) > 1 or n in {*op.handed_on, *op.scaled} or op.steps[0].outputs[f"d{n}"].skippable
    ]  # fmt: skip

    def forward_rule(call: StaticCall, primals: dict[str, Any]) -> tuple[Arrays, Saved]:
        inputs = {name: primal.value for name, primal in primals.items()}
        wanted = [name for name, primal in primals.items() if name not in optional or primal.perturbed]
        steps = op.backward(wanted, inputs)
        needed = {name for step in steps for name in step.inputs} | {op.scaled[n] for n in wanted if n in op.scaled}
        saving = op.saved_by(wanted, inputs)
        runs = of_step(saving) if saving else forward
        runs.stands_for = op
        made = outputs_of(runs, call, inputs)
        outputs = {name: made[name] for name in op.outputs if name in made}
        # JAX needs one structure of what is saved, whichever inputs are differentiated; shapes may differ.
        mark = jnp.zeros((0, *(int(name in wanted) for name in optional))) if optional else None
        known = {**dict.fromkeys(more, jnp.zeros(0)), **inputs, **made}
        kept = {n: a if n in needed else jnp.zeros(0, a.dtype) for n, a in known.items() if n in reads}
        return outputs, (kept, mark)

    def run_step(step: Op, call: StaticCall, known: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs of a step of the gradient, from what is known by name."""
        given = {name: _as_input(tensor, known.get(name)) for name, tensor in step.inputs.items()}
        attrs = {n: value for n, value in call.attrs if n in step.keywords}
        results = of_step(step)(given, attrs, call.inplace, call.axes)
        shared = {n: t.same_as for n, t in step.outputs.items() if t.same_as and results[n] is None}
        return {n: results[shared.get(n, n)] for n in results}

    def backward_rule(call: StaticCall, saved: Saved, cotangents: dict[str, Any]) -> tuple[dict[str, Any]]:
        kept, mark = saved
        kept = _arrays(kept)
        sizes = {} if mark is None else dict(zip(optional, mark.shape[1:], strict=True))
        cotangents = {name: _whole(cotangent, call.axes) for name, cotangent in cotangents.items()}
        known: dict[str, Any] = {**kept, **{f"d{name}": cotangent for name, cotangent in cotangents.items()}}
        for step in op.backward([name for name in call.names if sizes.get(name, 1)], call.names):
            known |= run_step(step, call, known)
        for name, output in op.handed_on.items():
            if name in kept and sizes.get(name, 1):
                known[f"d{name}"] = _like(cotangents[output], kept[name].dtype)
        if op.scaled and any(not isinstance(cotangents[n], SymbolicZero) for n in others if n in cotangents):
            no_derivative(op)  # of the gradients that it returns
        for name, gradient in op.scaled.items():
            if name in call.names and sizes[name]:
                known[f"d{name}"] = _times(kept[gradient], cotangents[first])
        return ({name: known.get(f"d{name}") for name in call.names},)  # None is a zero gradient

    function = jax.custom_vjp(run, nondiff_argnums=(0,))
    function.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
    # custom_vjp refuses forward mode too, but does not say which op it is.
    same = _compat.reverse_only(f"cute_{op.name}_inputs", partial(no_derivative, op))

    def reverse_only(call: StaticCall, inputs: Arrays) -> Arrays:
        here = [jax.sharding.get_abstract_mesh(), *(jax.typeof(a).sharding.mesh for a in inputs.values())]
        if not all(mesh.empty for mesh in here):
            inputs = dict(explicit.placed(inputs, forward.bound(inputs, call.attrs)))
        outputs: Arrays = function(call, dict(zip(inputs, same(*inputs.values()), strict=True)))
        return outputs

    return reverse_only


def _arrays(saved: Mapping[str, Any]) -> Arrays:
    """What was saved: JAX hands back a number of the program, such as a seed, as a number with a dtype."""
    return {name: a if hasattr(a, "shape") else jnp.asarray(a, a.dtype) for name, a in saved.items()}


def _like(cotangent: Any, dtype: Any) -> Any:
    """A cotangent as the gradient of an input of this dtype; None, a zero gradient, where there is none."""
    return None if isinstance(cotangent, SymbolicZero) else cotangent.astype(dtype)


@promoting
def _times(gradient: jax.Array, cotangent: Any) -> Any:
    """The product in float32: a cotangent rounded to 16 bits would add more error than the last rounding."""
    return None if isinstance(cotangent, SymbolicZero) else (gradient * cotangent).astype(gradient.dtype)


def _whole(cotangent: Any, axes: Axes) -> Any:
    """The cotangent of what devices along the axes have alike: without replication checks each has a partial sum of
    it, as of any ``psum``.
    """
    if not axes or isinstance(cotangent, SymbolicZero) or varies(jax.lax.axis_index(axes), axes):
        return cotangent
    return jax.lax.psum(cotangent, axes)


def _as_input(declared: Tensor, given: Any) -> Any:
    """An input of a backward op; the cotangent of an unused output is left out where the declaration allows it."""
    if not isinstance(given, SymbolicZero):
        return given
    return None if declared.optional else jnp.zeros_like(given)
