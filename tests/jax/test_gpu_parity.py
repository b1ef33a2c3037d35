"""One kernel in two frameworks: torch and JAX get the same bits, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import cute_ops_jax
from cute_ops import testing

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def torch_ops() -> Any:
    import cute_ops_torch  # noqa: F401  it registers torch.ops.cute

    return torch.ops.cute


def same_bits(mine: np.ndarray, other: np.ndarray) -> bool:
    return (mine.shape, mine.dtype) == (other.shape, other.dtype) and mine.tobytes() == other.tobytes()


def test_same_bits_from_each_op(any_problem: Any, run_op: Callable[..., Any], torch_arrays: Any) -> None:
    from cute_ops_torch.tools.runner import functional  # JAX's tests also run where there is no torch

    op, arrays, attrs = any_problem.op, any_problem.inputs(), any_problem.attrs
    ours = run_op(op, arrays, attrs)
    raw = functional(op)(*torch_arrays.to_torch(arrays, "cuda"), *attrs.values())
    theirs = raw if isinstance(raw, tuple) else (raw,)
    pairs = [
        (n, a, torch_arrays.to_numpy(b)) for n, a, b in zip(op.results, ours, theirs, strict=True) if a is not None
    ]
    assert pairs
    for name, mine, other in pairs:
        assert same_bits(mine, other), f"{name}: {np.sum(mine != other)} of {mine.size} elements differ"


def test_same_bits_through_autograd_and_vjp(problem: Any, torch_arrays: Any) -> None:
    op, arrays, attrs = problem.op, problem.inputs(), problem.attrs
    fixed = {name: a for name, a in arrays.items() if name not in op.differentiable}
    present = {name: a for name, a in arrays.items() if a is not None and name not in fixed}
    function = testing.plain(op, cute_ops_jax.register(op))
    outputs, pull = jax.vjp(lambda given: function(**given, **fixed, **attrs), present)
    rng = np.random.default_rng(11)
    cotangents = jax.tree.map(lambda o: rng.standard_normal(o.shape, np.float32).astype(o.dtype), outputs)
    (ours,) = jax.jit(pull)(cotangents)

    given = torch_arrays.to_torch(arrays, "cuda")
    leaves = [
        t.requires_grad_() for n, t in zip(arrays, given, strict=True) if n in op.differentiable and t is not None
    ]
    raw = getattr(torch.ops.cute, op.name)(*given, *attrs.values())
    named = dict(zip(op.outputs, raw if isinstance(raw, tuple) else (raw,), strict=True))
    results = [named[name] for name in op.shown]
    wanted = torch_arrays.to_torch(dict(enumerate(jax.tree.leaves(cotangents))), "cuda")
    theirs = torch.autograd.grad(results, leaves, wanted)
    for mine, other in zip(jax.tree.leaves(outputs), results, strict=True):
        assert same_bits(np.asarray(mine), torch_arrays.to_numpy(other))
    for name, other in zip((n for n in present if n in op.differentiable), theirs, strict=True):
        assert same_bits(np.asarray(ours[name]), torch_arrays.to_numpy(other)), f"d{name}"
