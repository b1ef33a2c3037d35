"""Attention to caches in JAX: drawn calls against float64, and the bits of PyTorch on a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from tests.ops.cached_calls import Cached, drawn


def run(call: Cached, seed: int) -> tuple[dict[str, Any], Any]:
    given = {name: jnp.asarray(np.ascontiguousarray(a)) for name, a in call.arrays(seed).items()}
    captured = {name: given[name] for name in call.functions.captured}
    others = {name: x for name, x in given.items() if name not in captured}
    options = {**call.attrs, **call.functions.options}
    return given, jax.jit(lambda x, c: cute_ops_jax.attention(**x, captured=c, **options))(others, captured)


@pytest.mark.parametrize("seed", range(300, 303))
def test_drawn_calls(seed: int) -> None:
    call = drawn(seed, longest=40)
    given, found = run(call, seed)
    named = {name: np.asarray(x, np.float64) for name, x in zip(("out", "lse"), found, strict=True)}
    call.assert_right({name: np.asarray(x) for name, x in given.items()}, named, f"seed {seed}")


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(6))
def test_the_bits_are_those_of_pytorch(part: int) -> None:
    torch = pytest.importorskip("torch")
    import cute_ops_torch

    for seed in range(3 * part, 3 * part + 3):
        call = drawn(seed)
        given, found = run(call, seed)
        tensors = {name: torch.from_dlpack(x) for name, x in given.items()}
        captured = {name: tensors.pop(name) for name in call.functions.captured}
        theirs = cute_ops_torch.attention(**tensors, **call.attrs, **call.functions.options, captured=captured)
        for ours, other in zip(found, theirs, strict=True):
            assert torch.equal(torch.from_dlpack(ours), other), f"seed {seed}: {call.name}"
