"""Convolutions whose windows are the patches of their input run as a matrix product."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cute_ops_torch
from cute_ops_torch.huggingface import convolutions

transformers = pytest.importorskip("transformers")
KINDS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Chained(nn.Module):
    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(8), convolution

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


class Named(Chained):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.proj(x)
        batch = found.shape[0]
        found = found.flatten(2).transpose(1, 2)
        return self.norm(found.view(batch, -1, 8))


class Whole(Chained):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.proj(x).view(-1, 8))


class Viewed(Chained):
    """Its view fails where channels lie last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.proj(x)
        return self.norm(found.view(found.shape[0], -1).unflatten(1, (-1, 8)))


class Twice(Chained):
    """Its second view fails where channels lie last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.proj(x)
        patches = found.flatten(2).transpose(1, 2)
        return self.norm(patches) + found.view(found.shape[0], -1).mean()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Sizes of the products that took the place of convolutions: rows and columns of windows."""
    seen, run = list[tuple[int, ...]](), convolutions.projections

    def projections(x: torch.Tensor, *parameters: Any) -> Any:
        seen.append(tuple(x.shape))
        return run(x, *parameters)

    monkeypatch.setattr(convolutions, "projections", projections)
    return seen


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output and all gradients."""
    x = x.clone().requires_grad_()
    out = model(x)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out, *torch.autograd.grad(out, [x, *model.parameters()], weights)]


def is_as_close(found: list[torch.Tensor], plain: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    """Errors are at most twice those of the convolution, or two roundings."""
    for ours, theirs, right in zip(found, plain, exact, strict=True):
        assert ours.shape == right.shape
        error, allowed = ((x.detach().double() - right).abs().max() for x in (ours, theirs))
        assert float(error) <= 2 * float(allowed) + 2**-7 * float(right.abs().max())


@pytest.mark.parametrize("seed", range(8))
def test_patches_are_multiplied(seed: int, products: list[tuple[int, ...]]) -> None:
    draw = random.Random(seed)
    dims, kind = draw.choice((1, 2, 3)), draw.choice((Chained, Named, Whole))
    sizes, channels = [draw.randint(1, 5) for _ in range(dims)], draw.randint(1, 5)
    counts = [1 if kind is Whole else draw.randint(1, 3) for _ in sizes]
    more = [0 if kind is Whole else draw.randrange(size) for size in sizes]  # which no window has
    torch.manual_seed(seed)
    convolution = KINDS[dims](channels, 8, tuple(sizes), stride=tuple(sizes), bias=draw.random() < 0.7)
    exact, batch = kind(convolution), draw.randint(1, 4)
    exact.double()
    x = torch.randn(batch, channels, *(n * c + m for n, c, m in zip(counts, sizes, more, strict=True)))
    model, x = copy.deepcopy(exact).bfloat16(), x.bfloat16()
    right = results(copy.deepcopy(model).double(), x.double())
    plain = results(model, x)
    assert ("proj", "linear") in cute_ops_torch.patch(model)
    is_as_close(results(model, x), plain, right)
    rows, columns = batch * torch.Size(counts).numel(), channels * torch.Size(sizes).numel()
    assert products == [(rows, -(-columns // 8) * 8)]
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if seed < 2 else model
    is_as_close(results(compiled, x), plain, right)
    torch._dynamo.reset()


def test_what_a_product_does_not_take_stays_a_convolution(products: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    model, x = Chained(nn.Conv2d(3, 8, 4, 4)), torch.randn(2, 3, 8, 8)
    cute_ops_torch.patch(model)
    want = nn.functional.conv2d(x, model.proj.weight, model.proj.bias, 4)  # type: ignore[arg-type]
    torch.testing.assert_close(model.proj(x), want)  # float32
    with torch.autocast("cpu"):
        assert model.proj(x).dtype == torch.bfloat16
    model, x = model.bfloat16(), x.bfloat16()
    model.proj(x.to(memory_format=torch.channels_last))
    model.proj(x[0])
    with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
        model.proj(x[..., :2])
    with pytest.raises(RuntimeError, match="expected input"):
        model.proj(x[:, :2])
    assert not products
    assert model.proj(x).shape == (2, 8, 2, 2)
    assert products == [(8, 48)]


@pytest.mark.parametrize("make", [
    lambda: Viewed(nn.Conv2d(3, 8, 4, 4)), lambda: Twice(nn.Conv2d(3, 8, 4, 4)),
    lambda: Chained(nn.Conv2d(3, 8, 4, 2)),
    lambda: Chained(nn.Conv2d(3, 8, 4, 4, padding=1)), lambda: Chained(nn.Conv2d(4, 8, 4, 4, groups=2)),
    lambda: Chained(nn.Conv2d(3, 8, 4, 4, dilation=2)), lambda: Chained(nn.Conv1d(3, 8, 1, padding="same")),
    lambda: Chained(nn.Conv2d(3, 8, 4, 4, padding_mode="circular", padding=1)),
])  # fmt: skip
def test_other_convolutions_are_left(make: Callable[[], nn.Module]) -> None:
    assert ("proj", "linear") not in cute_ops_torch.patch(make())


def test_vision_models_multiply_their_patches(products: list[tuple[int, ...]]) -> None:
    config = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
    )
    torch.manual_seed(0)
    model, pixels = transformers.SiglipVisionModel(config).bfloat16().eval(), torch.randn(2, 3, 16, 16).bfloat16()
    want = model(pixels).last_hidden_state
    cute_ops_torch.patch(model)
    torch.testing.assert_close(model(pixels).last_hidden_state, want, rtol=0, atol=0.05)
    assert products == [(32, 48)]
    cute_ops_torch.unpatch(model)
    assert torch.equal(model(pixels).last_hidden_state, want)
