"""The fp8 ops on a GPU: what matrix products take, what NaN and infinities do, how close they are to the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_ops_torch
from cute_ops import Op
from cute_ops.ops import OPS

pytestmark = pytest.mark.gpu
FP8 = [op for op in OPS if any(t.dtype == "float8_e4m3fn" for t in op.outputs.values())]


def raw(op: Op, tensors: list[torch.Tensor], block: int) -> tuple[torch.Tensor, ...]:
    return getattr(torch.ops.cute, op.name)(*tensors, **{**op.attrs, "block": block})


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def inputs(op: Op, rows: int, n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(n)
    return [torch.randn((rows, n) if t.rows else (n,), device="cuda").to(dtype) for t in op.inputs.values()]


def test_rowwise_scales_go_into_a_scaled_product_as_they_are() -> None:
    x, weight = torch.randn(256, 512, device="cuda"), torch.randn(128, 512, device="cuda")
    (a, a_scale), (b, b_scale) = cute_ops_torch.quantize_fp8(x), cute_ops_torch.quantize_fp8(weight)
    got = torch._scaled_mm(a, b.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=torch.bfloat16)
    exact = (a.float() * a_scale) @ (b.float() * b_scale).t()
    torch.testing.assert_close(got.float(), exact, rtol=1e-2, atol=1e-2 * exact.abs().max().item())
    # Three bits of fraction: the whole product is within a few percent of the unquantised one.
    assert (got.float() - x @ weight.t()).norm() / (x @ weight.t()).norm() < 0.05


def test_block_scales_go_into_a_scaled_product_transposed_in_memory() -> None:
    x, b = torch.randn(256, 512, device="cuda"), torch.randn(128, 512, device="cuda").to(torch.float8_e4m3fn)
    a, scale = cute_ops_torch.quantize_fp8(x, 128)
    b_scale = torch.rand(1, 4, device="cuda")
    try:
        got = torch._scaled_mm(
            a, b.t(), scale_a=scale.t().contiguous().t(), scale_b=b_scale.t(), out_dtype=torch.bfloat16
        )
    except RuntimeError as error:
        pytest.skip(f"this GPU or torch has no product of blocks: {error}")
    exact = (a.float() * scale.repeat_interleave(128, 1)) @ (b.float() * b_scale.repeat_interleave(128, 1)).t()
    torch.testing.assert_close(got.float(), exact, rtol=1e-2, atol=1e-2 * exact.abs().max().item())


@pytest.mark.parametrize("n", [7, 300, 1001, 4096, 40000, 50257])
@pytest.mark.parametrize("block", [0, 128])
@pytest.mark.parametrize("quantizer", FP8, ids=lambda op: op.name)
def test_no_element_is_more_than_one_step_from_the_reference(quantizer: Op, block: int, n: int) -> None:
    """And few are that: those on the border between two steps."""
    tensors = inputs(quantizer, 9, n, torch.bfloat16)
    out, scale, *rest = raw(quantizer, tensors, block)
    expected, expected_scale, *expected_rest = raw(quantizer, [t.cpu() for t in tensors], block)
    torch.testing.assert_close(scale.cpu(), expected_scale, rtol=1e-5, atol=0)
    for a, b in zip(rest, expected_rest, strict=True):
        assert same_bits(a.cpu(), b)
    steps = (out.view(torch.int8).cpu().int() - expected.view(torch.int8).int()).abs()
    # -0 and 0 are the same step.
    steps[(out.cpu().float() == 0) & (expected.float() == 0)] = 0
    assert steps.max() <= 1
    assert steps.float().mean() < 2e-3


@pytest.mark.parametrize("heavy", [1.0, 1e30])
@pytest.mark.parametrize("n", [32768, 50257])
def test_rows_that_leave_fp32_before_they_are_normed(n: int, heavy: float) -> None:
    """Long rows without bias meet their weight before their norm: they are as exact as if that had come first."""
    torch.manual_seed(n)
    x, weight = torch.randn(7, n, device="cuda"), torch.ones(n, device="cuda")
    weight[::2] = heavy
    x[1] = 0
    x[2] *= 1e12
    x[3] *= 1e-40  # no normal number, nor is its scale
    x[4, 5], x[5, 6] = torch.nan, torch.inf
    out, scale = torch.ops.cute.rmsnorm_fp8(x, weight)
    expected, expected_scale = torch.ops.cute.rmsnorm_fp8(x.cpu(), weight.cpu())
    torch.testing.assert_close(scale.cpu(), expected_scale, rtol=1e-5, atol=0)
    assert torch.equal(out.isnan().cpu(), expected.isnan())
    finite = ~expected.isnan() & (expected.float() != 0)
    steps = (out.view(torch.int8).cpu().int() - expected.view(torch.int8).int()).abs()[finite]
    assert steps.max() <= 1
    assert steps.float().mean() < 2e-3


@pytest.mark.parametrize("n", [64, 1001, 4096, 40000, 50257])
@pytest.mark.parametrize("block", [0, 128])
@pytest.mark.parametrize("quantizer", FP8, ids=lambda op: op.name)
def test_nan_infinity_and_zeros(quantizer: Op, block: int, n: int) -> None:
    clean = inputs(quantizer, 6, n, torch.bfloat16)
    for t, name in zip(clean, quantizer.inputs, strict=True):
        if t.ndim > 1:
            t[2] = 0
        elif name == "bias":
            t.zero_()  # it would leave no row of zeros
    dirty = [t.clone() for t in clean]
    dirty[0][1, n // 2], dirty[0][3, 0], dirty[0][4, -1] = torch.nan, torch.inf, -torch.inf
    got: Any = raw(quantizer, dirty, block)
    expected, untouched = raw(quantizer, [t.cpu() for t in dirty], block), raw(quantizer, clean, block)
    assert torch.equal(got[0].isnan().cpu(), expected[0].isnan())
    big = expected[0].float().abs() == 448
    assert (got[0].cpu().float() - expected[0].float())[big].abs().max() <= 32
    for a, b in zip(got, untouched, strict=True):
        assert same_bits(a[[0, 2, 5]], b[[0, 2, 5]])
    assert not got[0][2].float().any()
    assert torch.all(got[1][2] == 1)
    if quantizer.name == "quantize_fp8":
        assert got[0][3, 0].float() == 448 and got[0][4, -1].float() == -448
        clean[0][3, 0] = clean[0][4, -1] = clean[0][1, n // 2] = 0
        again = raw(quantizer, clean, block)
        kept = torch.ones(6, n, dtype=torch.bool, device="cuda")
        kept[1, n // 2] = kept[3, 0] = kept[4, -1] = False
        assert torch.equal(got[0].view(torch.uint8)[kept], again[0].view(torch.uint8)[kept])
        assert same_bits(got[1], again[1])
