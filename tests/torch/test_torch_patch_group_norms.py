"""``patch`` on blocks of image models: a group norm and the SiLU behind it are one pass, where statements show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cute_ops_torch
from cute_ops_torch.composite import layouts

Tensor = torch.Tensor


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def mish(x: Tensor) -> Tensor:
    return x * torch.tanh(F.softplus(x))


class Block(nn.Module):
    """Two convolutions behind norms, as diffusers writes it: modules may be absent; the second norm is in a branch."""

    def __init__(self, scaled: bool = False, down: bool = False) -> None:
        super().__init__()
        self.scaled = scaled
        self.norm1, self.norm2 = nn.GroupNorm(4, 16, eps=1e-6), nn.GroupNorm(4, 24, eps=1e-6)
        self.conv1, self.conv2 = nn.Conv2d(16, 24, 3, padding=1), nn.Conv2d(24, 24, 3, padding=1)
        self.time_emb_proj = nn.Linear(12, 48 if scaled else 24)
        self.nonlinearity, self.dropout = nn.SiLU(), nn.Dropout(0.0)
        self.downsample = nn.AvgPool2d(2) if down else None
        self.conv_shortcut: Any = nn.Conv2d(16, 24, 1)

    def forward(self, input_tensor: Tensor, temb: Tensor) -> Tensor:
        hidden_states = input_tensor

        hidden_states = self.norm1(hidden_states)
        hidden_states = self.nonlinearity(hidden_states)

        if self.downsample is not None:
            input_tensor = self.downsample(input_tensor)
            hidden_states = self.downsample(hidden_states)
        hidden_states = self.conv1(hidden_states)

        if self.time_emb_proj is not None:
            temb = self.nonlinearity(temb)
            temb = self.time_emb_proj(temb)[:, :, None, None]

        if not self.scaled:
            if temb is not None:
                hidden_states = hidden_states + temb
            hidden_states = self.norm2(hidden_states)
        else:
            time_scale, time_shift = torch.chunk(temb, 2, dim=1)
            hidden_states = self.norm2(hidden_states)
            hidden_states = hidden_states * (1 + time_scale) + time_shift
        hidden_states = self.nonlinearity(hidden_states)

        hidden_states = self.dropout(hidden_states)
        hidden_states = self.conv2(hidden_states)
        if self.conv_shortcut is not None:
            input_tensor = self.conv_shortcut(input_tensor)
        return input_tensor + hidden_states


class Written(nn.Module):
    """A norm and an activation; each class writes their calls in its own way."""

    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, 16), nn.Conv2d(16, 16, 3)
        self.act = act or nn.SiLU()


class InOneStatement(Written):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.silu(self.norm(x)))  # type: ignore[no-any-return]


class ByAFunction(Written):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = swish(h)
        return self.conv(h)  # type: ignore[no-any-return]


class ByAnotherName(Written):
    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        h = self.act(normed)
        return self.conv(h) + x[..., 1:-1, 1:-1]  # type: ignore[no-any-return]


class OtherActivation(Written):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        h = mish(h)
        return self.conv(h)  # type: ignore[no-any-return]


class ReadTwice(Written):
    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        h = self.act(normed)
        return self.conv(h + normed)  # type: ignore[no-any-return]


class ChangedBetween(Written):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        h = self.norm(x)
        x.mul_(2)
        h = self.act(h)
        return self.conv(h + x)  # type: ignore[no-any-return]


class InALoop(Written):
    def forward(self, x: Tensor) -> Tensor:
        h = x
        for _ in range(2):
            h = self.act(h)
            h = self.norm(h)
        return self.conv(h)  # type: ignore[no-any-return]


class InABranch(Written):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 1:
            h = self.norm(x)
        else:
            h = x
        h = self.act(h)
        return self.conv(h)  # type: ignore[no-any-return]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many passes have computed both since it was last asked."""
    counted, one_pass = list[int](), layouts.group_norm

    def counting(*args: Any, **options: Any) -> Any:
        counted.extend([1] * (options["activation"] == "silu"))
        return one_pass(*args, **options)

    def count() -> int:
        found = len(counted)
        counted.clear()
        return found

    monkeypatch.setattr(layouts, "group_norm", counting)
    return count


def outcome(model: nn.Module, *given: Tensor) -> list[Tensor]:
    leaves = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in given]
    out = model(*leaves)
    slopes = torch.autograd.grad(
        (out * torch.cos(torch.arange(out.numel()).view(out.shape))).sum(), [*leaves, *model.parameters()]
    )
    return [out, *slopes]


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(("scaled", "passes"), [(False, 2), (True, 1)])
def test_a_block_as_diffusers_writes_it(
    scaled: bool, passes: int, layout: torch.memory_format, fused: Callable[[], int]
) -> None:
    torch.manual_seed(0)
    model = Block(scaled, down=True)
    given = torch.randn(2, 16, 6, 10).to(memory_format=layout), torch.randn(2, 12)
    wanted = outcome(model, *given)
    patched = cute_ops_torch.patch(model)
    assert patched == [("", "group_norm"), ("norm1", "group_norm"), ("norm2", "group_norm")]
    assert not patched.left
    same(outcome(model, *given), wanted)
    assert fused() == passes
    model.norm1.register_forward_hook(lambda module, args, out: out * 2)  # which sees, and changes, the norm's output
    again = outcome(model, *given)
    assert fused() == passes - 1
    cute_ops_torch.unpatch(model)
    same(again, outcome(model, *given))
    assert fused() == 0


@pytest.mark.parametrize(
    ("kind", "passes"),
    [(InOneStatement, 1), (ByAFunction, 1), (ByAnotherName, 1), (InABranch, 1), (OtherActivation, 0), (ReadTwice, 0),
     (ChangedBetween, 0), (InALoop, 0)],
)  # fmt: skip
def test_what_statements_show(kind: type[Written], passes: int, fused: Callable[[], int]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 16, 5, 7)
    with_gradients = kind not in (InABranch, ChangedBetween)
    wanted = outcome(model, x) if with_gradients else [model(x)]
    found = cute_ops_torch.patch(model)
    assert found == [*([("", "group_norm")] if passes else []), ("norm", "group_norm")]
    same(outcome(model, x) if with_gradients else [model(x)], wanted)
    assert fused() == passes
    if kind is InABranch:
        torch.testing.assert_close(model(x[:1]), model.conv(F.silu(x[:1])))  # type: ignore[operator]
        assert fused() == 0


def test_what_changes_after_patch(fused: Callable[[], int]) -> None:
    """Another activation, another norm, autocast, and a compiler that sees one graph."""
    torch.manual_seed(0)
    model, x = ByAnotherName(), torch.randn(2, 16, 5, 7)
    wanted = model(x)
    cute_ops_torch.patch(model)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), wanted, rtol=1e-4, atol=1e-4)
    assert fused() == 1
    with torch.autocast("cpu", torch.bfloat16):
        narrow = model(x)
    assert fused() == 0
    torch.testing.assert_close(narrow, wanted, rtol=0.05, atol=0.05)
    for change in ({"act": nn.Mish()}, {"norm": nn.GroupNorm(8, 16)}):
        for name, module in change.items():
            setattr(model, name, module)
        expected = model.conv(model.act(F.group_norm(x, model.norm.num_groups, eps=1e-5))) + x[..., 1:-1, 1:-1]
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
        assert fused() == 0


def test_neighbours_in_a_sequence(fused: Callable[[], int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 16, 3), nn.GroupNorm(2, 16), nn.ReLU(),
                          nn.GroupNorm(2, 16))  # fmt: skip
    x = torch.randn(2, 32, 8, 8)
    wanted = outcome(model, x)
    found = cute_ops_torch.patch(model)
    assert found == [("", "group_norm"), *((name, "group_norm") for name in ("0", "3", "5"))]
    same(outcome(model, x), wanted)
    assert fused() == 1
    model[1].register_forward_hook(lambda module, args, out: out + 1)
    hooked = model(x)
    assert fused() == 0
    assert not torch.allclose(hooked, wanted[0])
    assert cute_ops_torch.patch(nn.Sequential(nn.GroupNorm(4, 32), nn.ReLU())) == [("0", "group_norm")]
