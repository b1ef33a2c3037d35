"""Norms with a gate, which modules take as a second tensor: found by what they compute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import cute_ops_torch
from cute_ops_torch.huggingface import gated_norm

pytest.importorskip("transformers")


class GateBefore(nn.Module):
    """As Mamba 2's."""

    def __init__(self, n: int = 24) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(n) + 0.5), 1e-5

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        dtype = hidden_states.dtype
        x = hidden_states.float()
        if gate is not None:
            x = x * nn.functional.silu(gate.float())
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


class GateAfter(GateBefore):
    """As Qwen 3 Next's."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return ((self.weight * wide.to(x.dtype)) * nn.functional.silu(gate.float())).to(x.dtype)


class NoGate(GateBefore):
    """Of the second tensor it reads nothing."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class OfColumns(GateBefore):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x.cumsum(-1) * gate


class DropsOut(GateBefore):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.weight * x * nn.functional.silu(gate), 0.5, self.training)


def outcome(module: Any, *given: torch.Tensor) -> list[torch.Tensor]:
    leaves = [t.clone().requires_grad_() for t in given]
    out = module(*leaves)
    return [out, *torch.autograd.grad(out.float().square().sum(), [*leaves, module.weight])]


@pytest.mark.parametrize("kind", [GateBefore, GateAfter])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_with_a_gate(kind: type[GateBefore], dtype: torch.dtype) -> None:
    plain = nn.Sequential(kind()).to(dtype)
    model = copy.deepcopy(plain)
    assert [tuple(each) for each in cute_ops_torch.patch(model)] == [("0", "fused")]
    x, gate = torch.randn(2, 5, 24, dtype=dtype), torch.randn(2, 5, 48, dtype=dtype)[..., :24]  # a part of a product
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for got, want in zip(outcome(model[0], x, gate), outcome(plain[0], x, gate), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * float(want.detach().abs().max()))
    for module in (model[0], plain[0]):
        module.variance_epsilon = 0.5
    torch.testing.assert_close(model[0](x, gate), plain[0](x, gate), rtol=0, atol=0)
    if kind is GateBefore:
        torch.testing.assert_close(model[0](x), plain[0](x), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [GateBefore, GateAfter])
def test_in_a_compiled_graph(kind: type[GateBefore]) -> None:
    torch._dynamo.reset()
    model, called = nn.Sequential(kind()), list[str]()
    given = torch.randn(2, 5, 24), torch.randn(2, 5, 24)
    wanted = outcome(model[0], *given)
    cute_ops_torch.patch(model)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if "cute." in str(node.target))
        return graph.forward

    run = torch.compile(model[0], backend=backend, fullgraph=True)
    run.weight = model[0].weight
    for got, want in zip(outcome(run, *given), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert len(called) == 1


@pytest.mark.parametrize("kind", [NoGate, OfColumns, DropsOut])
def test_other_functions_keep_their_forward(kind: type[GateBefore]) -> None:
    assert gated_norm.replacement_of(kind().eval()) is None
