"""Liger's and quack's functions and modules on our ops: values and gradients beside what they are said to compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cute_ops_torch.compat import liger, quack
from tests.torch.compat_checks import alike, drawn

Tensor = torch.Tensor


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


X, WEIGHT, BIAS = drawn(2, 5, 32), drawn(32, seed=1), drawn(32, seed=2)
TARGET = torch.tensor([3, -100, 0, 15, 7, 7])
LOGITS = drawn(6, 16) * 4


@pytest.mark.parametrize(("ours", "theirs", "inputs"), [
    (lambda x, w: liger.liger_rms_norm(x, w, 1e-5, 1.0, "gemma"), lambda x, w: rms(x, w + 1, 1e-5), (X, WEIGHT)),
    (lambda x, r, w: liger.liger_fused_add_rms_norm(x, r, w, 1e-6), lambda x, r, w: (rms(x + r, w), x + r),
     (X, drawn(2, 5, 32, seed=3), WEIGHT)),
    (lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-6), lambda x, w, b: F.layer_norm(x, (32,), w, b, 1e-6),
     (X, WEIGHT, BIAS)),
    (liger.liger_swiglu, lambda a, b: F.silu(a) * b, (X, X.flip(0))),
    (liger.liger_geglu, lambda a, b: F.gelu(a, approximate="tanh") * b, (X, X.flip(0))),
    (liger.liger_relu_squared, lambda x: F.relu(x) ** 2, (X,)),
    (liger.liger_softmax, lambda x: x.softmax(-1), (X,)),
    (quack.rmsnorm, rms, (X, WEIGHT)),
    (lambda x, w, b, r: quack.rmsnorm(x, w, b, r, prenorm=True), lambda x, w, b, r: (rms(x + r, w) + b, x + r),
     (X, WEIGHT, BIAS, X.flip(1))),
    (lambda x, w, r: quack.rmsnorm(x, w, residual=r), lambda x, w, r: rms(x + r, w), (X, WEIGHT, X.flip(1))),
    (lambda x, w: quack.rmsnorm(x, w, prenorm=True), lambda x, w: (rms(x, w), x), (X, WEIGHT)),
    (quack.softmax, lambda x: x.softmax(-1), (X,)),
    (lambda x: quack.topk(x, 5)[0], lambda x: x.topk(5)[0], (X,)),
    (lambda x: quack.topk(x, 5, softmax=True)[0], lambda x: x.topk(5)[0].softmax(-1), (X,)),
    (quack.layernorm_fwd, lambda x, w, b: F.layer_norm(x, (32,), w, b, 1e-6), (X, WEIGHT, BIAS)),
    (quack.linear_func, F.linear, (X, drawn(24, 32), drawn(24))),
    (lambda x, a, b: quack.mlp_func(x, a, b, "relu_sq"), lambda x, a, b: F.relu(x @ a.T) ** 2 @ b.T,
     (X, drawn(48, 32), drawn(32, 48))),
    (lambda x, a, b, c, d: quack.mlp_func(x, a, b, "gelu_tanh_approx", c, d, recompute=True),
     lambda x, a, b, c, d: F.linear(F.gelu(F.linear(x, a, c), approximate="tanh"), b, d),
     (X, drawn(48, 32), drawn(32, 48), drawn(48), drawn(32))),
    (lambda x, a, b: quack.mlp_func(x, a, b, "geglu", concat_layout=True),
     lambda x, a, b: F.gelu(x @ a[:24].T, approximate="tanh") * (x @ a[24:].T) @ b.T,
     (X, drawn(48, 32), drawn(32, 24))),
])  # fmt: skip
def test_functions_of_rows(ours: Callable[..., Any], theirs: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
    alike(ours, theirs, *inputs, atol=2e-4)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses(reduction: str) -> None:
    def theirs(x: Tensor, smooth: float = 0.0, z: float = 0.0, cap: float = 0.0) -> Tensor:
        y = cap * torch.tanh(x / cap) if cap else x
        rows = F.cross_entropy(y, TARGET, reduction="none", label_smoothing=smooth)
        rows = rows + z * (y.logsumexp(-1) ** 2).where(TARGET >= 0, torch.zeros((), dtype=y.dtype))
        return {"mean": rows.sum() / 5, "sum": rows.sum(), "none": rows}[reduction]

    def capped(x: Tensor) -> Tensor:
        return liger.liger_cross_entropy(
            x, TARGET, reduction=reduction, label_smoothing=0.1, lse_square_scale=1e-2, softcap=5.0
        )  # type: ignore[no-any-return]

    alike(capped, lambda x: theirs(x, 0.1, 1e-2, 5.0), LOGITS)
    alike(lambda x: quack.cross_entropy(x, TARGET, reduction=reduction), theirs, LOGITS)
    alike(lambda x: liger.LigerCrossEntropyLoss(reduction=reduction)(x, TARGET), theirs, LOGITS)
    hidden, weight, bias = drawn(6, 8), drawn(16, 8), drawn(16)
    alike(
        lambda h, w, b: liger.liger_fused_linear_cross_entropy(h, w, TARGET, b, reduction=reduction),
        lambda h, w, b: theirs(F.linear(h, w, b)), hidden, weight, bias,
    )  # fmt: skip
    alike(
        lambda h, w: liger.LigerFusedLinearCrossEntropyLoss(reduction=reduction, softcap=5.0)(w, h, TARGET),
        lambda h, w: theirs(h @ w.T, cap=5.0), hidden, weight,
    )  # fmt: skip
    alike(
        lambda h, w, b: quack.linear_cross_entropy_func(h, w, b, TARGET, reduction=reduction),
        lambda h, w, b: theirs(F.linear(h, w, b)), hidden, weight, bias,
    )  # fmt: skip
    if reduction != "none":
        alike(
            lambda h, w: quack.chunked_linear_cross_entropy(h, w, TARGET, 8, reduction=reduction),
            lambda h, w: theirs(h @ w.T), hidden, weight,
        )  # fmt: skip


def written_out(
    x: Tensor, weight: Tensor | None, reduction: str, scaled: bool
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Liger's loss, z-loss, accuracy and predictions, with label smoothing of 0.1, z-loss of 0.01, soft cap of 5.

    Class weights multiply the loss, and not the z-loss, which is the mean over all rows that count.
    """
    y = 5 * torch.tanh(x / 5)
    valid = TARGET >= 0
    by_class = None if weight is None else weight.double()
    rows = F.cross_entropy(y, TARGET, by_class, reduction="none", label_smoothing=0.1)
    z = (1e-2 * y.logsumexp(-1) ** 2).where(valid, torch.zeros((), dtype=y.dtype))
    if scaled:
        factor = y.detach().softmax(-1)[torch.arange(6), TARGET.clamp(min=0)]
        rows, z = rows * factor, z * factor
    total = 5 if by_class is None else by_class[TARGET[valid]].sum()
    ways = {"mean": (rows.sum() / total, z.sum() / 5), "sum": (rows.sum(), z.sum()), "none": (rows, z)}
    predicted = y.argmax(-1).where(valid, torch.full((), -1))
    right = (predicted == TARGET).float() * valid
    accuracy = right if reduction == "none" else right.sum() / 5
    loss, z = ways[reduction]
    return loss + z, z.detach(), accuracy, predicted.tolist()


CLASSES = drawn(16).abs() + 0.1


@pytest.mark.parametrize("weight", [None, CLASSES], ids=["plain", "weighted"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_what_comes_beside_ligers_loss(reduction: str, weight: Tensor | None) -> None:
    options: dict[str, Any] = {"reduction": reduction, "lse_square_scale": 1e-2, "label_smoothing": 0.1, "softcap": 5.0}
    everything = dict.fromkeys(("return_z_loss", "return_token_accuracy", "return_predicted_tokens"), True)
    hidden, head, bias = drawn(6, 8), drawn(16, 8), drawn(16)

    def loss(x: Tensor, **more: Any) -> Any:
        return liger.LigerCrossEntropyLoss(weight, **options, **more)(x, TARGET)

    def of_head(h: Tensor, w: Tensor, b: Tensor, **more: Any) -> Any:
        return liger.LigerFusedLinearCrossEntropyLoss(weight, **options, **more)(w, h, TARGET, b)

    for scaled in (False, True):
        more = {"use_token_scaling": True} if scaled else {}
        alike(
            partial(of_head, **more),
            lambda h, w, b, s=scaled: written_out(F.linear(h, w, b), weight, reduction, s)[0], hidden, head, bias,
        )  # fmt: skip
        out = of_head(hidden, head, bias, **more, **everything)
        compare(out, written_out(F.linear(hidden, head, bias).double(), weight, reduction, scaled))
    alike(loss, lambda x: written_out(x, weight, reduction, False)[0], LOGITS)
    x = LOGITS.clone().requires_grad_()
    out = loss(x, **everything)
    compare(out, written_out(LOGITS.double(), weight, reduction, False))
    assert not out.z_loss.requires_grad
    gradients = [torch.autograd.grad(each.sum(), x)[0] for each in (out.loss, loss(x))]
    torch.testing.assert_close(*gradients)
    only = loss(LOGITS, return_token_accuracy=True)
    assert (only.z_loss, only.predicted_tokens) == (None, None)
    alike(
        lambda x: quack.cross_entropy(x, TARGET, weight=CLASSES, reduction=reduction),
        lambda x: F.cross_entropy(x, TARGET, CLASSES.double(), reduction=reduction), LOGITS,
    )  # fmt: skip


def compare(out: Any, wanted: tuple[Any, ...]) -> None:
    for a, b in zip((out.loss, out.z_loss, out.token_accuracy), wanted, strict=False):
        torch.testing.assert_close(a.detach().double(), b.double(), rtol=1e-4, atol=1e-5)
    assert out.predicted_tokens.tolist() == wanted[3]
    assert out.predicted_tokens.dtype == torch.int64


def turned(x: Tensor) -> Tensor:
    """``rotate_half`` of Hugging Face's models."""
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


@pytest.mark.parametrize("rotary", [32, 16])
def test_ligers_rotation(rotary: int) -> None:
    q, k = drawn(2, 4, 6, 32), drawn(2, 2, 6, 32)
    half = drawn(1, 6, rotary // 2)
    cos, sin = torch.cat((half, half), -1).cos(), torch.cat((half, half), -1).sin()

    def theirs(*xs: Tensor) -> list[Tensor]:
        c, s = cos[:, None].double(), sin[:, None].double()
        return [torch.cat((x[..., :rotary] * c + turned(x[..., :rotary]) * s, x[..., rotary:]), -1) for x in xs]

    alike(lambda q, k: liger.liger_rotary_pos_emb(q, k, cos, sin), theirs, q, k)
    alike(lambda q, k: liger.liger_rope(q, k, half.cos(), half.sin(), rotary_dim=rotary), theirs, q, k)


def test_rotations_of_pairs() -> None:
    x = drawn(2, 6, 4, 32)
    angles = drawn(9, 16)

    def theirs(x: Tensor, places: Tensor) -> Tensor:
        turn = torch.polar(torch.ones((), dtype=torch.float64), angles.double())[places]
        turn = turn[:, :, None] if places.ndim == 2 else turn[None, :, None]
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (16, 2))) * turn).flatten(-2)

    start = torch.arange(6)
    cis = torch.polar(torch.ones(6, 16), angles[:6])
    alike(
        lambda a, b: liger.liger_llama4_text_rotary_pos_emb(a, b, cis),
        lambda a, b: (theirs(a, start), theirs(b, start)), x, x.flip(0),
    )  # fmt: skip
    cos, sin = angles.cos(), angles.sin()
    alike(lambda x: quack.apply_rotary_emb(x, cos, sin, True), lambda x: theirs(x, start), x)
    alike(
        lambda x: quack.apply_rotary_emb(x, cos, sin, True, seqlen_offsets=np.int64(2)),
        lambda x: theirs(x, start + 2),
        x,
    )
    offsets = torch.tensor([1, 3])
    alike(
        lambda x: quack.apply_rotary_emb(x, cos, sin, True, seqlen_offsets=offsets),
        lambda x: theirs(x, offsets[:, None] + start), x,
    )  # fmt: skip


def test_rotations_in_place_and_of_packed_sequences() -> None:
    x, angles = drawn(9, 2, 32), drawn(12, 16)
    cos, sin, ends = angles.cos(), angles.sin(), torch.tensor([0, 4, 4, 9])
    for offsets in (None, 2, torch.tensor([1, 0, 3])):
        found = quack.apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets, cu_seqlens=ends, max_seqlen=5)
        for i, (start, end) in enumerate(pairwise(ends.tolist())):
            first = offsets[i : i + 1] if isinstance(offsets, Tensor) else offsets
            alone = quack.apply_rotary_emb(x[None, start:end], cos, sin, seqlen_offsets=first)[0]
            torch.testing.assert_close(found[start:end], alone, rtol=0, atol=0)
    written = x[None].clone()
    assert quack.apply_rotary_emb(written, cos, sin, inplace=True) is written
    torch.testing.assert_close(written, quack.apply_rotary_emb(x[None], cos, sin), rtol=0, atol=0)
    leaf = x[None].clone().requires_grad_()
    (slope,) = torch.autograd.grad(quack.apply_rotary_emb(leaf * 1, cos, sin, inplace=True).sum(), leaf)
    (wanted,) = torch.autograd.grad(quack.apply_rotary_emb(leaf, cos, sin).sum(), leaf)
    torch.testing.assert_close(slope, wanted, rtol=0, atol=0)


def test_norms_of_heads_and_of_groups() -> None:
    x, weight = drawn(3, 4, 8), drawn(4, 8)
    alike(lambda x, w: quack.rmsnorm(x, w, weight_offset=1.0), lambda x, w: rms(x, torch.ones(8)) * (w + 1), x, weight)
    images, made = drawn(2, 6, 5, 3), liger.LigerGroupNorm(6, 3, bias=True)
    expected = F.group_norm(images, 3, made.weight, made.bias, 1e-6)
    torch.testing.assert_close(made(images), expected)


CONFIG = SimpleNamespace(hidden_size=32, intermediate_size=48, hidden_act="silu")
MODULES: list[tuple[Callable[[], Any], Callable[..., Any]]] = [
    (lambda: liger.LigerRMSNorm(32, 1e-5, 1.0, "gemma", "zeros"), lambda m, x: rms(x, m.weight + 1, 1e-5)),
    (lambda: liger.LigerRMSNorm(32, offset=1.0, elementwise_affine=False), lambda m, x: rms(x, x.new_ones(32))),
    (lambda: liger.LigerLayerNorm(32, bias=True), lambda m, x: F.layer_norm(x, (32,), m.weight, m.bias, 1e-6)),
    (liger.LigerReLUSquared, lambda m, x: F.relu(x) ** 2),
    (liger.LigerSoftmax, lambda m, x: x.softmax(-1)),
    (lambda: liger.LigerGEGLUMLP(CONFIG),
     lambda m, x: m.down_proj(F.gelu(m.gate_proj(x), approximate="tanh") * m.up_proj(x))),
    (lambda: liger.LigerSwiGLUMLP(CONFIG, 24), lambda m, x: m.down_proj(F.silu(m.gate_proj(x)) * m.up_proj(x))),
    (lambda: liger.LigerQwen3MoeSwiGLUMLP(CONFIG), lambda m, x: m.down_proj(F.silu(m.gate_proj(x)) * m.up_proj(x))),
    (lambda: liger.LigerPhi3SwiGLUMLP(CONFIG),
     lambda m, x: m.down_proj(F.silu(m.gate_up_proj(x).chunk(2, -1)[0]) * m.gate_up_proj(x).chunk(2, -1)[1])),
    (lambda: liger.LigerBlockSparseTop2MLP(CONFIG), lambda m, x: m.w2(F.silu(m.w1(x)) * m.w3(x))),
    (lambda: quack.QuackRMSNorm(32, 1e-5), lambda m, x: rms(x, m.weight, 1e-5)),
    (lambda: quack.Linear(32, 24, bias=True), lambda m, x: F.linear(x, m.weight, m.bias)),
    (lambda: quack.MLP(32, bias1=True, bias2=True), lambda m, x: m.fc2(F.gelu(m.fc1(x), approximate="tanh"))),
    (lambda: quack.MLP(32, 40, 16, activation="swiglu", multiple_of=16, concat_layout=True),
     lambda m, x: m.fc2(F.silu(m.fc1(x)[..., :48]) * m.fc1(x)[..., 48:])),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(MODULES)))
def test_modules(index: int) -> None:
    """Values, and gradients of the input and of every parameter."""
    make, theirs = MODULES[index]
    torch.manual_seed(index)
    module = make()
    twin = make().double()
    twin.load_state_dict(module.state_dict())
    x = X.clone().requires_grad_()
    wide = X.double().requires_grad_()
    out, wanted = module(x), theirs(twin, wide)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    dout = drawn(*out.shape)
    out.backward(dout)
    wanted.backward(dout.double())
    for a, b in ((x, wide), *zip(module.parameters(), twin.parameters(), strict=True)):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-4)


def test_where_the_largest_are() -> None:
    assert quack.topk(X, 5)[1].tolist() == X.topk(5)[1].tolist()


def test_modules_of_two_inputs() -> None:
    torch.manual_seed(0)
    norm = liger.LigerFusedAddRMSNorm(32)
    alike(norm, lambda x, r: (rms(x + r, torch.ones(32)), x + r), X, X.flip(1))
    loss = quack.LinearCrossEntropy(8, 16, chunk_size=8)
    alike(
        lambda h: loss(h, TARGET), lambda h: F.cross_entropy(h @ loss.weight.detach().double().T, TARGET), drawn(6, 8)
    )
