"""Modules over the functions."""

from __future__ import annotations

import torch
from torch import nn

import cute_ops_torch


def test_rmsnorm_module() -> None:
    norm = cute_ops_torch.nn.RMSNorm(64, eps=1e-5)
    ours, x = norm.weight.data.uniform_(), torch.randn(3, 64)
    torch.testing.assert_close(norm(x), nn.functional.rms_norm(x, (64,), ours, 1e-5))
    assert repr(norm) == "RMSNorm(64, eps=1e-05, bias=False)"
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.ones(64))


def test_gemma_weights_start_at_zero() -> None:
    norm = cute_ops_torch.nn.AddRMSNorm(8, weight_offset=1.0, bias=True, dtype=torch.bfloat16)
    assert not norm.weight.any()
    assert not norm.bias.any()
    assert norm.weight.dtype == torch.bfloat16
    x, residual = torch.randn(2, 8), torch.randn(2, 8)
    out, residual_out = norm(x, residual)
    torch.testing.assert_close(residual_out, x + residual)
    torch.testing.assert_close(out, nn.functional.rms_norm(x + residual, (8,), eps=1e-6))
    assert repr(norm) == "AddRMSNorm(8, eps=1e-06, weight_offset=1.0, bias=True)"


def test_layernorm_module() -> None:
    norm = cute_ops_torch.nn.LayerNorm(64)
    weight, bias, x = norm.weight.data.uniform_(), norm.bias.data.uniform_(), torch.randn(3, 64)
    torch.testing.assert_close(norm(x), nn.functional.layer_norm(x, (64,), weight, bias, 1e-5))
    assert repr(norm) == "LayerNorm(64, eps=1e-05, bias=True)"
    norm.reset_parameters()
    torch.testing.assert_close(norm(x), nn.functional.layer_norm(x, (64,)))
    assert cute_ops_torch.nn.LayerNorm(64, bias=False).bias is None


def test_silu_mul_module() -> None:
    gate, up = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    torch.testing.assert_close(cute_ops_torch.nn.SiluMul()(gate, up), nn.functional.silu(gate) * up)
