"""Checks the reference of a backward op against the derivative of the forward's, in float64 on NumPy arrays.

No framework is needed: along a random direction ``v`` of one input, the product of the outputs with random cotangents
must change by ``<gradient, v>``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from cute_ops import testing
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op

DRAWS = 3
# Long steps have the smallest rounding errors, and short ones cross no kink, such as abs at 0: one of them must agree.
STEPS = (1e-2, 1e-4, 1e-6, 1e-8)
# Allowed errors: relative to the norm of the terms that the derivative sums, and, for rounding, to that of the sum.
TOLERANCE, ROUNDING = 1e-4, 1e-14
# The products of outputs and cotangents, whose sum is differentiated, at given inputs.
Terms = Callable[[testing.Arrays], np.ndarray]


def check(op: Op, case: Case, seed: int = 0) -> None:
    """Raise AssertionError unless ``op.grad`` gives the gradient of every differentiable input of this case."""
    attrs = testing.attributes(op, case)
    arrays = testing.in_float64(testing.inputs(op, case, "float32", seed))
    rng = np.random.default_rng([seed, zlib.crc32(f"{op.name}.{case.name}".encode())])
    with np.errstate(all="ignore"):
        raw = testing.run_reference(op, arrays, attrs)
        outputs = {n: y for n, y in zip(op.shown, testing.shown(op, raw), strict=True) if y is not None}
        finite = {n: np.isfinite(y) for n, y in outputs.items() if y.dtype.kind == "f"}
        for _ in range(DRAWS):
            # Outputs that are not finite, such as the logarithm of a negative number, are not checked.
            cotangents = {n: np.where(there, rng.standard_normal(there.shape), 0.0) for n, there in finite.items()}
            terms = partial(_terms, op, attrs, cotangents)
            for name, gradient in backward(op, arrays, raw, cotangents, attrs).items():
                x: Any = arrays[name]
                if x is None:
                    continue
                if gradient is None or gradient.shape != x.shape:
                    came = None if gradient is None else gradient.shape
                    raise AssertionError(f"{_what(op, name)} has the shape {came}, expected {x.shape}")
                v = rng.standard_normal(x.shape)
                if not all(there.all() for there in finite.values()):
                    v, gradient = (np.where(np.isfinite(gradient), a, 0.0) for a in (v, gradient))
                _check_direction(op, name, gradient, v, arrays, terms)


def backward(
    op: Op, inputs: Mapping[str, Any], raw: tuple[Any, ...], cotangents: Mapping[str, Any], attrs: Mapping[str, Any]
) -> dict[str, Any]:
    """The gradients by input, from the references of ``op.grad``, wired by names as :class:`cute_ops.Op` says.

    Args:
        inputs: arrays of one framework, by name.
        raw: the reference's outputs for them.
        cotangents: by output name.
    """
    known = {**inputs, **dict(zip(op.outputs, raw, strict=True)), **{f"d{n}": c for n, c in cotangents.items()}}
    known |= {f"d{name}": cotangents[output] for name, output in op.handed_on.items()}
    present = [name for name, a in inputs.items() if a is not None]
    steps = op.backward(op.differentiable, present)
    if (saving := op.saved_by(op.differentiable, present)) is not None:
        known |= dict(zip(saving.outputs, testing.run_reference(saving, inputs, attrs), strict=True))
    for step in steps:
        given = {name: known.get(name) for name in step.inputs}
        found = testing.run_reference(step, given, {name: attrs[name] for name in step.keywords})
        results = dict(zip(step.outputs, found, strict=True))
        # If all dtypes are equal, one array may stand for two outputs.
        shared = {name: t.same_as for name, t in step.outputs.items() if t.same_as and results[name] is None}
        known |= {name: results[shared.get(name, name)] for name in results}
    return {name: known.get(f"d{name}") for name in op.differentiable}


def _terms(
    op: Op, attrs: Mapping[str, Any], cotangents: Mapping[str, np.ndarray], arrays: testing.Arrays
) -> np.ndarray:
    raw = testing.run_reference(op, arrays, attrs)
    outputs = dict(zip(op.shown, testing.differentiated(op, arrays, raw, attrs), strict=True))
    return np.concatenate([(c * outputs[n])[c != 0] for n, c in cotangents.items()])


def _check_direction(
    op: Op, name: str, gradient: np.ndarray, v: np.ndarray, arrays: testing.Arrays, terms: Terms
) -> None:
    x: Any = arrays[name]

    def change(h: float) -> float:
        """The sum's change along ``v``, from a difference whose error is of order ``h^4``."""
        at = {k: float(np.sum(terms({**arrays, name: x + k * h * v}))) for k in (-2, -1, 1, 2)}
        return (8 * (at[1] - at[-1]) - (at[2] - at[-2])) / (12 * h)

    given = float(np.sum(gradient * v))
    allowed, rounding = TOLERANCE * np.linalg.norm(gradient * v), ROUNDING * (1 + np.linalg.norm(terms(arrays)))
    changes = []
    for h in STEPS:
        changes.append(change(h))
        if abs(changes[-1] - given) <= allowed + rounding / h:
            return
    nearest = min(changes, key=lambda found: abs(found - given))
    raise AssertionError(
        f"{_what(op, name)} is {given:.6g} along a random direction, where the reference changes by {nearest:.6g}"
    )


def _what(op: Op, name: str) -> str:
    return f"{op.name}: the gradient of `{name}` by {' and '.join(step.name for step in op.steps)}"
