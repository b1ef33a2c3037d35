"""Every primitive at special numbers, values and gradients: as the framework's own functions have them."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
import pytest

from tests.contract.adapters import Adapter
from tests.ops import special

PRIMITIVES = special.primitives(None, None)
NOT_OURS = {"torch": special.NOT_TORCH, "jax": special.NOT_JAX}
if find_spec("torch") is not None and tuple(map(int, version("torch").split(".")[:2])) >= (2, 15):
    NOT_OURS["torch"] = special.NOT_TORCH_2_15


@pytest.mark.drawn(0.3)
@pytest.mark.on_gpus
@pytest.mark.parametrize("name", PRIMITIVES)
def test_values_and_gradients(adapter: Adapter, name: str) -> None:
    primitive = PRIMITIVES[name]
    arrays = [special.ROWS] if primitive.rows else special.pairs(len(primitive.operands))
    theirs = special.primitives(*((adapter.torch, None) if adapter.name == "torch" else (None, adapter.jax)))[name]
    functions = adapter.ours.fused(primitive.ours, name="special"), getattr(theirs, adapter.name)
    given, names = adapter.arrays(arrays), ("out", "dx", "dy", "dz")
    found, wanted = ({}, {})
    for function, into in zip(functions, (found, wanted), strict=True):
        outputs, pull = adapter.vjp(function, *given)
        gradients = pull(adapter.array(np.full(outputs[0].shape, 1.5, np.float32)))
        into |= dict(zip(names, map(adapter.numpy, (*outputs, *gradients)), strict=False))
    unsure = np.zeros_like(arrays[0], bool)
    if not adapter.subnormal:
        unsure = special.is_subnormal(*arrays)
    elif getattr(adapter, "device", "cpu") == "cuda":  # a kernel's reciprocals take subnormal numbers for 0
        unsure = special.is_subnormal(*arrays) | special.is_huge(*arrays)
    unsure = unsure.any(-1, keepdims=True) if primitive.rows else unsure
    for what, ours in found.items():
        wrong = special.differ(ours, wanted[what]) & ~unsure
        if (name, what) in NOT_OURS[adapter.name]:
            wrong &= ~NOT_OURS[adapter.name][name, what](*arrays)
        assert not wrong.any(), special.told(
            name, what, wrong, arrays if not primitive.rows else [], ours, wanted[what]
        )
