"""Arrays of a program whose values are known when it is traced, as masks that follow from sizes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from cute_ops.fusion.graph import Node
from cute_ops_jax._compat import JaxprEqn, Tracer
from cute_ops_jax.fusion.front import Front, Value

MOST = 1 << 28  # elements of an array whose value is computed; repeated ones count once
# The array of an input of the program; None of one that is not known.
Input = Callable[[], Any]


class KnownArrays:
    """The values of a program's nodes that depend on no input, or on inputs that are known themselves."""

    def __init__(self, front: Front, inputs: Mapping[int, Input]) -> None:
        self._front, self._inputs = front, inputs
        self._of_step: dict[int, Any] = {}

    def __call__(self, node: Node) -> Any:
        """The array of a node; None if it is not known."""
        value = self._front.values.get(node)
        return None if value is None else self.of_value(value)

    def of_value(self, value: Any) -> Any:
        """The array of a value of the program, or of a number."""
        if not isinstance(value, Value):
            return np.asarray(value)
        if value.step is None:
            return self._of_input(value)
        key = id(value.step)
        if key not in self._of_step:
            self._of_step[key] = self._computed(value.step.equation, value.step.inputs)
        return self._of_step[key]

    def _of_input(self, value: Value) -> Any:
        if value.array is not None:
            small = not isinstance(value.array, Tracer) and np.size(value.array) <= MOST
            return np.asarray(value.array) if small and getattr(value.array, "is_fully_addressable", True) else None
        known = self._inputs.get(value.index)
        return known and known()

    def _computed(self, equation: JaxprEqn, inputs: Any) -> Any:
        rule = _RULES.get(equation.primitive.name)
        aval: Any = equation.outvars[0].aval
        if rule is None or len(equation.outvars) != 1 or not all(isinstance(s, int) for s in aval.shape):
            return None
        if aval.dtype.kind not in "biuf":
            return None
        arrays = [self.of_value(each) for each in inputs]
        made = None if any(a is None for a in arrays) else rule(equation.params, aval, *arrays)
        return None if made is None else np.asarray(made, aval.dtype)


def _iota(params: Any, aval: Any) -> Any:
    shape = [size if i == params["dimension"] else 1 for i, size in enumerate(aval.shape)]
    return np.broadcast_to(np.arange(prod(shape), dtype=aval.dtype).reshape(shape), aval.shape)


def _broadcast(params: Any, aval: Any, x: Any) -> Any:
    shape = [1] * len(aval.shape)
    for place, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[place] = size
    return np.broadcast_to(x.reshape(shape), aval.shape)


def _slice(params: Any, aval: Any, x: Any) -> Any:
    bounds = zip(params["start_indices"], params["limit_indices"], params["strides"] or (1,) * x.ndim, strict=True)
    return x[tuple(slice(*each) for each in bounds)]


def _reshaped(params: Any, aval: Any, x: Any) -> Any:
    return x.reshape(aval.shape) if prod(aval.shape) <= MOST else None


def _same(params: Any, aval: Any, x: Any) -> Any:
    return x


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of an elementwise function. It computes one element of each dim along which all arrays are repeated, as
    those of a mask that all examples share.
    """

    def run(params: Any, aval: Any, *arrays: Any) -> Any:
        whole = [np.broadcast_to(a, aval.shape) for a in arrays]
        repeated = [not any(a.strides[i] for a in whole) for i in range(len(aval.shape))]
        if prod(size for size, each in zip(aval.shape, repeated, strict=True) if not each) > MOST:
            return None
        cut = tuple(slice(0, 1) if each else slice(None) for each in repeated)
        return np.broadcast_to(np.asarray(function(*(a[cut] for a in whole)), aval.dtype), aval.shape)

    return run


_RULES: dict[str, Callable[..., Any]] = {
    "iota": _iota, "broadcast_in_dim": _broadcast, "reshape": _reshaped, "squeeze": _reshaped,
    "expand_dims": _reshaped, "slice": _slice, "copy": _same, "name": _same,
    "stop_gradient": _same,
    "convert_element_type": _elementwise(lambda x: x),
    "transpose": lambda params, aval, x: x.transpose(params["permutation"]),
    "select_n": _elementwise(lambda which, *cases: np.choose(which.astype(np.int8), cases)),
    **{name: _elementwise(function) for name, function in (
        ("eq", np.equal), ("ne", np.not_equal), ("lt", np.less), ("le", np.less_equal), ("gt", np.greater),
        ("ge", np.greater_equal), ("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor),
        ("not", np.invert), ("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("neg", np.negative),
        ("max", np.maximum), ("min", np.minimum), ("abs", np.abs),
    )},
}  # fmt: skip
