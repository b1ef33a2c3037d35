"""Kernels of activations: alone, times ``up``, and times the other half of packed rows.

Each is a row of data: ``partial(Activation, silu, GATED)`` is a kernel's name in a declaration.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass.cute as cute

from cute_ops.kernels.rowwise.pointwise import Part, Pointwise


class Form(NamedTuple):
    """What a kernel computes, in fp32.

    Attributes:
        inputs, outputs: names of row tensors, or parts of them.
        compute: from an activation, ``(activation(x), activation'(x))``, and the inputs' elements to the outputs'.
    """

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    compute: Callable[..., tuple[Any, ...]]


def alone(activation, x):
    """``out = activation(x)``."""
    return (activation(x)[0],)


def alone_backward(activation, x, dout):
    """``dx = dout * activation'(x)``."""
    return (dout * activation(x)[1],)


def gated(activation, gate, up):
    """``out = activation(gate) * up``."""
    return (activation(gate)[0] * up,)


def gated_backward(activation, gate, up, dout):
    """``dgate = dout * up * activation'(gate)``, ``dup = dout * activation(gate)``."""
    y, slope = activation(gate)
    return dout * up * slope, dout * y


def gated_again(activation, gate, up, dout):
    """Both gradients, and ``out`` once more."""
    y, slope = activation(gate)
    return dout * up * slope, dout * y, y * up


# Gate and up of rows of ``2n``, and their gradients side by side as in x.
HALVES, DHALVES = ((Part(name, 0, 2), Part(name, 1, 2)) for name in ("x", "dx"))
ALONE, ALONE_BACKWARD = Form(("x",), ("out",), alone), Form(("x", "dout"), ("dx",), alone_backward)
GATED = Form(("gate", "up"), ("out",), gated)
GATED_BACKWARD = Form(("gate", "up", "dout"), ("dgate", "dup"), gated_backward)
PACKED, PACKED_BACKWARD = Form(HALVES, ("out",), gated), Form((*HALVES, "dout"), DHALVES, gated_backward)
PACKED_AGAIN = Form((*HALVES, "dout"), (*DHALVES, "out"), gated_again)


class Activation:
    """A form of an activation, element by element.

    Args:
        activation: the function, or those that the attribute ``approximate`` chooses from.
        form: what is computed.
        variant: the kernel's variant.
    """

    def __init__(self, activation, form, variant):
        function = activation[variant.attrs["approximate"]] if isinstance(activation, dict) else activation
        self.names = variant.names
        self.form = Pointwise(variant, form.inputs, form.outputs, lambda *given: form.compute(function, *given))

    @cute.jit
    def __call__(self, *arguments):
        tensors = dict(zip(self.names, arguments))
        inputs, outputs = ([tensors[part.name] for part in parts] for parts in (self.form.inputs, self.form.outputs))
        self.form(tuple(inputs), tuple(outputs), arguments[-1])
