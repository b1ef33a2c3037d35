"""The reverse-mode rule: an op and the backward op that it declares, wired by argument names.

An input of the backward op that is named like an input or output of the op is that array, ``d<output>`` is the
cotangent, and its output ``d<input>`` is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from cute_ops.op import Op
from cute_ops_jax import _compat
from cute_ops_jax.primitive.arrays import Attributes
from cute_ops_jax.primitive.primitive import no_derivative, stage

Arrays = dict[str, jax.Array]


class Call(NamedTuple):
    """What is static in a call: the inputs that are present, the attributes, and whether gradients may take the memory
    of the inputs that are donated to them.
    """

    names: tuple[str, ...]
    attrs: Attributes
    inplace: bool = False


def differentiable(op: Op) -> Callable[[Call, Arrays], Arrays]:
    """``run(call, inputs) -> outputs``, with a gradient where one is declared. Arrays go by name, absent ones are left
    out.
    """
    forward = stage(op)

    def run(call: Call, inputs: Arrays) -> Arrays:
        # Policies of jax.checkpoint may name the outputs, those kept for the gradient included.
        outputs = forward(inputs, dict(call.attrs)).items()
        return {name: checkpoint_name(a, f"cute_{op.name}") for name, a in outputs if a is not None}

    if op.grad is None:
        return run
    grad, backward = op.grad, partial(stage, op.grad)  # its stage is made when a gradient is first asked for

    def forward_rule(call: Call, primals: dict[str, Any]) -> tuple[Arrays, Arrays]:
        inputs = {name: primal.value for name, primal in primals.items()}
        outputs = run(call, inputs)
        return outputs, {name: a for name, a in {**inputs, **outputs}.items() if name in grad.inputs}

    def backward_rule(call: Call, saved: Arrays, cotangents: dict[str, Any]) -> tuple[dict[str, Any]]:
        given: dict[str, Any] = dict(saved)
        for name, cotangent in cotangents.items():
            wanted = grad.inputs.get(f"d{name}")
            if wanted is None:
                continue
            zero = isinstance(cotangent, SymbolicZero)
            # The output was not used: leave its cotangent out where the declaration allows it, to save reading zeros.
            given[f"d{name}"] = (None if wanted.optional else jnp.zeros_like(cotangent)) if zero else cotangent
        results = backward()(given, {name: value for name, value in call.attrs if name in grad.attrs}, call.inplace)
        for name, tensor in grad.outputs.items():
            if results[name] is None and tensor.same_as is not None:
                results[name] = results[tensor.same_as]
        return ({name: results.get(f"d{name}") for name in call.names},)  # None is a zero gradient

    function = jax.custom_vjp(run, nondiff_argnums=(0,))
    function.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
    # custom_vjp refuses forward mode too, but does not say which op it is.
    same = _compat.reverse_only(f"cute_{op.name}_inputs", partial(no_derivative, op))

    def reverse_only(call: Call, inputs: Arrays) -> Arrays:
        outputs: Arrays = function(call, dict(zip(inputs, same(*inputs.values()), strict=True)))
        return outputs

    return reverse_only
