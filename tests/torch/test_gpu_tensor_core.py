"""Expressions over accumulators of scores and of products of 8 bits, and an epilogue's part, on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cute_ops_torch
from cute_ops import Case, Op, testing
from cute_ops.hardware import sm
from cute_ops.jit import target
from tests.ops.tensor_cores import fp8_product, scores, with_part

pytestmark = pytest.mark.gpu
SIZES: dict[str, list[dict[str, int]]] = {
    "scores": [{"m": 64, "n": 128, "d": 64}, {"m": 1, "n": 1, "d": 64}, {"m": 4096, "n": 1000, "d": 64}],
    "fp8_product": [{"m": 128, "n": 128, "k": 128}, {"m": 4096, "n": 4096, "k": 4096}, {"m": 1000, "n": 264, "k": 16}],
    "with_part": [{"m": 128, "n": 128, "k": 64}, {"m": 4096, "n": 4096, "k": 512}, {"m": 256, "n": 4096, "k": 64}],
}
CASES = [
    (op, case, dtype)
    for op in (scores, fp8_product, with_part)
    for case in (*op.cases, *(Case("x".join(map(str, dims.values())), dims) for dims in SIZES[op.name]))
    for dtype in op.dtypes["T"]
]


@pytest.fixture(scope="module", autouse=True)
def hopper() -> None:
    if sm(target.of_device().arch) != 90:
        pytest.skip("the kernels run on SM 9.0 alone")


@pytest.mark.parametrize(
    ("declared", "case", "dtype"), CASES, ids=[f"{op.name}-{case.name}-{dtype}" for op, case, dtype in CASES]
)
def test_values(declared: Op, case: Case, dtype: str) -> None:
    function = cute_ops_torch.register(declared)
    given = {name: moved(a) for name, a in testing.inputs(declared, case, dtype).items() if a is not None}
    expecteds, allowed = testing.limits(declared, given, {})
    if declared is fp8_product:
        allowed = (allowed[0] + lost_in_8_bits(given),)
    for _ in range(3):
        found = function(**given)
        outputs = found if isinstance(found, tuple) else (found,)
        testing.compare(declared, outputs, expecteds, allowed)
        if declared is fp8_product:
            error = (outputs[0].double() - expecteds[0]).square().mean().sqrt()
            assert error < 0.01 * expecteds[0].square().mean().sqrt()


def lost_in_8_bits(given: dict[str, torch.Tensor]) -> torch.Tensor:
    """By how much a result of :data:`fp8_product` may differ because of Hopper's sums.

    A matrix instruction adds 32 products of 8 bits and the sum so far with 13 bits behind the leading one of the
    largest: each of 33 addends loses up to that part of twice the largest. gelu's slope is at most 1.13.
    """
    x, weight, scale = (given[name].double() for name in ("x", "weight", "scale"))
    so_far, lost = torch.zeros(2, len(x), len(weight), dtype=x.dtype, device=x.device)
    for xs, weights in zip(x.split(32, dim=1), weight.split(32, dim=1), strict=True):
        largest = torch.maximum(so_far.abs(), xs.abs().amax(1)[:, None] * weights.abs().amax(1))
        so_far += xs @ weights.T
        lost += 33 * 2.0**-13 * 2 * torch.maximum(largest, so_far.abs())
    return 1.13 * scale.abs()[:, None] * lost


def moved(a: np.ndarray) -> torch.Tensor:
    """To the GPU, as bits of its dtype."""
    kind = getattr(torch, a.dtype.name)
    return torch.from_numpy(a.view(f"u{a.itemsize}").copy()).view(kind).reshape(a.shape).cuda()
