"""Both adapters on the CPU run one reference: the same numbers up to the order of sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cute_ops import testing

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", autouse=True)
def torch_ops() -> Any:
    import cute_ops_torch  # noqa: F401  it registers torch.ops.cute

    return torch.ops.cute


def test_torch_and_jax_agree(stage_problem: Any, run_stage: Callable[..., Any], torch_arrays: Any) -> None:
    op, arrays, attrs = stage_problem.op, stage_problem.inputs(), stage_problem.attrs
    ours = run_stage(op, arrays, attrs)
    raw = getattr(torch.ops.cute, op.name)(*torch_arrays.to_torch(arrays, "cpu"), *attrs.values())
    theirs = raw if isinstance(raw, tuple) else (raw,)
    compared = 0
    for mine, other, limit in zip(ours, theirs, testing.tolerances(op, arrays, attrs), strict=True):
        if mine is None:
            assert other.numel() == 0  # torch's schema has a fixed number of outputs
            continue
        other = torch_arrays.to_numpy(other)
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        # Each of the two may be off by the limit.
        assert np.all(np.abs(mine.astype(np.float64) - other.astype(np.float64)) <= 2 * limit)
        compared += 1
    assert compared
