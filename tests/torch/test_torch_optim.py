"""AdamW against PyTorch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from cute_ops_torch.optim import AdamW

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def model(device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(32, 64), nn.Conv2d(3, 5, 3, bias=False), nn.Linear(7, 3), nn.LayerNorm(2048))
    made.scale = nn.Parameter(torch.tensor(2.0))
    made.turned = nn.Parameter(torch.randn(6, 5).t())
    return made.to(device, dtype)


def steps(made: nn.Module, optimizer: torch.optim.Optimizer, count: int = 4, first: int = 0) -> None:
    for i in range(first, first + count):
        torch.manual_seed(100 + i)
        for p in made.parameters():
            p.grad = torch.randn(p.shape, dtype=p.dtype).to(p.device)
        optimizer.step()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_torch_and_from_its_state(dtype: torch.dtype, device: str) -> None:
    ours, theirs = model(device, dtype), model(device, dtype)
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    one, other = AdamW(ours.parameters(), **options), torch.optim.AdamW(theirs.parameters(), **options)
    limits = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    places = [p.data_ptr() for p in ours.parameters()]
    steps(ours, one)
    steps(theirs, other)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, **limits)
    assert places == [p.data_ptr() for p in ours.parameters()]
    # Both go on from the other's state.
    state, others = copy.deepcopy(one.state_dict()), copy.deepcopy(other.state_dict())
    assert state["state"].keys() == others["state"].keys()
    one.load_state_dict({**state, "state": others["state"]})
    other.load_state_dict({**others, "state": state["state"]})
    steps(ours, one, 2, 4)
    steps(theirs, other, 2, 4)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, **limits)


@pytest.mark.parametrize("device", DEVICES)
def test_from_a_fused_optimizers_state(device: str) -> None:
    """It counts its steps where its parameters are; to ask the GPU for the count at each step would wait for it."""
    ours, theirs = nn.Linear(32, 64, device=device), nn.Linear(32, 64, device=device)
    one, other = AdamW(ours.parameters(), lr=1e-2), torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True)
    steps(theirs, other)
    ours.load_state_dict(theirs.state_dict())
    one.load_state_dict(copy.deepcopy(other.state_dict()))
    assert {state["step"].device.type for state in one.state.values()} == {"cpu"}
    steps(ours, one, 2, 4)
    steps(theirs, other, 2, 4)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_parameters_without_gradients() -> None:
    """Each counts its own steps."""
    weights = [nn.Parameter(torch.ones(3, 4)) for _ in range(2)]
    optimizer = AdamW(weights, lr=0.1, weight_decay=0.0)
    optimizer.step()
    assert not optimizer.state
    for given in (weights, weights[:1], weights):
        optimizer.zero_grad()
        for weight in given:
            weight.grad = torch.ones(3, 4)
        optimizer.step()
    assert [int(optimizer.state[weight]["step"]) for weight in weights] == [3, 2]
    for weight, count in zip(weights, (3, 2), strict=True):  # a constant gradient moves by the rate
        torch.testing.assert_close(weight.detach(), torch.full((3, 4), 1 - 0.1 * count), rtol=1e-5, atol=1e-5)


def test_closures_groups_and_schedules() -> None:
    weights = [nn.Parameter(torch.ones(3, 4)) for _ in range(3)]
    optimizer = AdamW([{"params": weights[:1], "lr": 0.0}, {"params": weights[1:], "weight_decay": 0.0}], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda step: 1.0 / (1 + step)])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weights[0].sum() + weights[1].sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 24
    schedule.step()
    optimizer.step(closure)
    assert (weights[0] == 1).all() and (weights[2] == 1).all()  # no rate, no gradient
    torch.testing.assert_close(weights[1], torch.full((3, 4), 1 - 0.1 - 0.05), rtol=1e-5, atol=1e-5)


def test_errors() -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"optim\.AdamW: argument `lr` is -1, expected at least 0"):
        AdamW([weight], lr=-1)
    with pytest.raises(ValueError, match=r"argument `betas` is \(0\.9, 1\.0\), expected both in \[0, 1\)"):
        AdamW([weight], betas=(0.9, 1.0))
    weight.grad = torch.eye(3, 4).to_sparse()
    with pytest.raises(RuntimeError, match="sparse gradients are not supported"):
        AdamW([weight]).step()
