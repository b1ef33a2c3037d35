"""Drawn calls of every function of ``compat``, by the signatures of the libraries, beside references in float64.

``python tests/torch/test_torch_compat_drawn.py 500`` draws so many calls of each.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cute_ops_torch
from cute_ops_torch.compat import causal_conv1d, flash_attn, flash_attn_cute, liger, liger_chunked_loss, quack
from tests.contract.test_training_drawn import of_pairs
from tests.torch.compat_checks import alike

Tensor = torch.Tensor
Draw = random.Random
WIDE = {"rtol": 1e-3, "atol": 1e-4}
NAN = WIDE | {"equal_nan": True}


def normal(draw: Draw, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(2**31)))


def maybe(draw: Draw, make: Callable[[], Any], absent: Any = None) -> Any:
    return make() if draw.random() < 0.5 else absent


def given(draw: Draw, **options: Callable[[], Any]) -> dict[str, Any]:
    """Some options, each left out half of the time."""
    return {name: make() for name, make in options.items() if draw.random() < 0.5}


# --- losses ----------------------------------------------------------------------------------------------------------


def _targets(draw: Draw, rows: int, classes: int, ignored: int) -> Tensor:
    """Classes of which none, some or all are ignored."""
    share = draw.choice([0.0, 0.3, 0.9, 1.0])
    return torch.tensor([ignored if draw.random() < share else draw.randrange(classes) for _ in range(rows)])


def _loss(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, lse_square_scale: float = 0.0, softcap: float | None = None, scaled: bool = False,
    empty: float | None = 0.0,
) -> Tensor:  # fmt: skip
    """Liger's: the z-loss is not multiplied by class weights, and averaged over the tokens that count."""
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    weight = weight if weight is None else weight.to(logits.dtype)
    losses = F.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
    )
    counts = target != ignore_index
    squares = lse_square_scale * logits.logsumexp(-1).square() * counts
    if scaled:
        places = target.where(counts, torch.zeros_like(target))[:, None]
        probability = logits.softmax(-1).gather(-1, places)[:, 0].detach()
        losses, squares = losses * probability, squares * probability
    if reduction == "none":
        return losses + squares
    if reduction == "sum":
        return losses.sum() + squares.sum()
    if not counts.any() and empty is not None:
        return empty + 0 * logits.sum()
    share = counts.sum() if weight is None else weight[target[counts]].sum()
    return losses.sum() / share + squares.sum() / counts.sum()


def _loss_options(draw: Draw, ignored: int) -> dict[str, Any]:
    found = given(
        draw,
        reduction=lambda: draw.choice(["mean", "sum", "none"]),
        label_smoothing=lambda: draw.choice([0.0, 0.1, 0.9]),
        lse_square_scale=lambda: draw.choice([0.0, 1e-2]),
        softcap=lambda: draw.choice([None, 5.0, 30.0]),
    )
    return found | ({"ignore_index": ignored} if ignored != -100 else {})


def liger_cross_entropy(draw: Draw) -> None:
    rows, classes, ignored = draw.randrange(1, 9), draw.randrange(2, 40), draw.choice([-100, 0, -1])
    options, target = _loss_options(draw, ignored), _targets(draw, rows, classes, ignored)
    weight = maybe(draw, lambda: normal(draw, classes).abs() + 0.1)
    x = 3 * normal(draw, rows, classes)
    alike(
        lambda x: liger.liger_cross_entropy(x, target, weight, **options),
        lambda x: _loss(x, target, weight, **options), x, **WIDE,
    )  # fmt: skip
    asked = {f"return_{name}": draw.random() < 0.5 for name in ("z_loss", "token_accuracy", "predicted_tokens")}
    found = liger.liger_cross_entropy(x, target, weight, **options, **asked)
    _beside(found, x, target, options, asked)


def _beside(found: Any, logits: Tensor, target: Tensor, options: dict[str, Any], asked: dict[str, bool]) -> None:
    """What is asked for beside the loss."""
    if not any(asked.values()):
        assert isinstance(found, Tensor)
        return
    counts, reduction = target != options.get("ignore_index", -100), options.get("reduction", "mean")
    logits = logits.double()
    if cap := options.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    right = ((logits.argmax(-1) == target) & counts).float()
    z = (options.get("lse_square_scale", 0.0) * logits.logsumexp(-1).square() * counts).float()
    mean = {"none": lambda x: x, "sum": lambda x: x.sum(), "mean": lambda x: x.sum() / max(counts.sum(), 1)}[reduction]
    wanted = {
        "z_loss": mean(z), "token_accuracy": right if reduction == "none" else right.sum() / counts.sum(),
        "predicted_tokens": torch.where(counts, logits.argmax(-1), -1),
    }  # fmt: skip
    for name, value in wanted.items():
        if asked[f"return_{name}"]:
            torch.testing.assert_close(getattr(found, name), value, **NAN)
        else:
            assert getattr(found, name) is None


def liger_fused_linear_cross_entropy(draw: Draw) -> None:
    rows, k, classes, ignored = draw.randrange(1, 9), draw.randrange(1, 17), draw.randrange(2, 40), -100
    options, target = _loss_options(draw, ignored), _targets(draw, rows, classes, ignored)
    classed = maybe(draw, lambda: normal(draw, classes).abs() + 0.1)
    scaled = draw.random() < 0.3
    more: dict[str, Any] = {"ce_weight": classed} | ({"use_token_scaling": True} if scaled else {})
    x, w, b = normal(draw, rows, k), normal(draw, classes, k), maybe(draw, lambda: normal(draw, classes))
    inputs = (x, w) if b is None else (x, w, b)

    def ours(x: Tensor, w: Tensor, b: Tensor | None = None) -> Any:
        return liger.liger_fused_linear_cross_entropy(x, w, target, b, **options, **more)

    def theirs(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return _loss(F.linear(x, w, b), target, classed, scaled=scaled, **options)

    alike(ours, theirs, *inputs, **WIDE)


def quack_cross_entropy(draw: Draw) -> None:
    rows, classes, ignored = draw.randrange(1, 9), draw.randrange(2, 40), draw.choice([-100, 1])
    target, weight = _targets(draw, rows, classes, ignored), maybe(draw, lambda: normal(draw, classes).abs() + 0.1)
    options = given(draw, reduction=lambda: draw.choice(["mean", "sum", "none"])) | {"ignore_index": ignored}
    alike(
        lambda x: quack.cross_entropy(x, target, weight=weight, **options),
        lambda x: _loss(x, target, weight, **options, empty=torch.nan), 3 * normal(draw, rows, classes), **NAN,
    )  # fmt: skip


def quack_heads(draw: Draw) -> None:
    rows, k, classes = draw.randrange(1, 12), draw.randrange(1, 17), draw.randrange(2, 40)
    target = _targets(draw, rows, classes, -100)
    options = given(draw, reduction=lambda: draw.choice(["mean", "sum"]))
    x, w, b = normal(draw, rows, k), normal(draw, classes, k), normal(draw, classes)
    chunk = draw.choice([1, 3, 4096])
    alike(
        lambda x, w: quack.chunked_linear_cross_entropy(x, w, target, chunk, **options),
        lambda x, w: _loss(x @ w.T, target, **options, empty=torch.nan), x, w, **NAN,
    )  # fmt: skip
    alike(
        lambda x, w, b: quack.linear_cross_entropy_func(x, w, b, target, **options),
        lambda x, w, b: _loss(F.linear(x, w, b), target, **options, empty=torch.nan), x, w, b, **NAN,
    )  # fmt: skip


# --- rows ------------------------------------------------------------------------------------------------------------


def _rms(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float) -> Tensor:
    out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    out = out if weight is None else out * (weight + offset)
    return out if bias is None else out + bias


def _rows(draw: Draw) -> tuple[int, ...]:
    return (*(draw.randrange(1, 5) for _ in range(draw.randrange(1, 4))), draw.randrange(1, 40))


def norms(draw: Draw) -> None:
    shape, eps, offset = _rows(draw), draw.choice([1e-6, 1e-2]), draw.choice([0.0, 1.0])
    x, r, w, b = normal(draw, *shape), normal(draw, *shape), normal(draw, shape[-1]), normal(draw, shape[-1])
    mode = draw.choice(liger.CASTING_MODES)
    options = {"offset": offset, "casting_mode": mode, "in_place": draw.random() < 0.5}
    alike(lambda x, w: liger.liger_rms_norm(x, w, eps, **options), lambda x, w: _rms(x, w, None, eps, offset), x, w)
    alike(
        lambda x, r, w: liger.liger_fused_add_rms_norm(x, r, w, eps, **options),
        lambda x, r, w: (_rms(x + r, w, None, eps, offset), x + r), x, r, w,
    )  # fmt: skip
    alike(
        lambda x, w, b: liger.liger_layer_norm(x, w, b, eps),
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, eps), x, w, b, **WIDE,
    )  # fmt: skip
    biased, summed, prenorm, weighted = (draw.random() < 0.5 for _ in range(4))

    def of_quack(x: Tensor, r: Tensor, w: Tensor, b: Tensor, norm: Any = None) -> Any:
        options = {"weight_offset": offset} if weighted else {}
        residual, bias = r if summed else None, b if biased else None
        if norm is not None:
            h = x if residual is None else x + residual
            out = norm(h, w if weighted else None, bias, eps, offset)
            found: Any = (out, h) if prenorm else out
        else:
            found = quack.rmsnorm(x, w if weighted else None, bias, residual, eps=eps, prenorm=prenorm, **options)
        unread = sum(0.0 * each.sum() for each in (x, r, w, b))  # so that each has a gradient
        return [each + unread for each in found] if prenorm else found + unread

    alike(of_quack, partial(of_quack, norm=_rms), x, r, w, b)
    alike(
        lambda x, w, b: quack.layernorm_fwd(x, w, b if biased else None, eps),
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b if biased else None, eps), x, w, b if biased else 0, **WIDE,
    )  # fmt: skip


def norms_of_heads_and_groups(draw: Draw) -> None:
    heads, size, eps = draw.randrange(1, 5), draw.randrange(1, 20), draw.choice([1e-6, 1e-2])
    x, w, offset = normal(draw, draw.randrange(1, 6), heads, size), normal(draw, heads, size), draw.choice([0.0, 1.0])
    prenorm, summed = draw.random() < 0.5, draw.random() < 0.5
    options = {"eps": eps, "weight_offset": offset, "prenorm": prenorm}

    def theirs(x: Tensor, w: Tensor) -> Any:
        h = 2 * x if summed else x
        out = _rms(h, w, None, eps, offset)
        return (out, h) if prenorm else out

    alike(lambda x, w: quack.rmsnorm(x, w, residual=x if summed else None, **options), theirs, x, w, **WIDE)
    groups, each, n = draw.randrange(1, 5), draw.randrange(1, 4), draw.randrange(1, 4)
    images = normal(draw, n, groups * each, *(draw.randrange(2, 6) for _ in range(draw.randrange(1, 4))))
    w, b = normal(draw, groups * each), normal(draw, groups * each)
    alike(
        lambda x, w, b: liger.liger_group_norm(x, w, b, groups * each, groups, eps),
        lambda x, w, b: F.group_norm(x, groups, w, b, eps), images, w, b, rtol=1e-3, atol=1e-3,
    )  # fmt: skip


def pointwise(draw: Draw) -> None:
    shape = _rows(draw)
    a, b = 3 * normal(draw, *shape), normal(draw, *shape)
    alike(liger.liger_geglu, lambda a, b: F.gelu(a, approximate="tanh") * b, a, b)
    alike(liger.liger_swiglu, lambda a, b: F.silu(a) * b, a, b)
    alike(liger.liger_relu_squared, lambda x: x.relu().square(), a)
    alike(liger.liger_softmax, lambda x: x.softmax(-1), a)
    alike(quack.softmax, lambda x: x.softmax(-1), a)
    k, normed = draw.randrange(1, shape[-1] + 1), draw.random() < 0.5
    values, index = quack.topk(a, k, normed)
    wanted, places = a.topk(k)
    torch.testing.assert_close(values, wanted.softmax(-1) if normed else wanted)
    torch.testing.assert_close(a.gather(-1, index.long()), a.gather(-1, places))


def products(draw: Draw) -> None:
    rows, k, hidden, n = (draw.randrange(1, 17) for _ in range(4))
    x, b1, b2 = normal(draw, rows, k), normal(draw, hidden), normal(draw, n)
    w1, w2, gated = normal(draw, hidden, k), normal(draw, n, hidden), draw.choice(["swiglu", "geglu"])
    alike(quack.linear_func, F.linear, x, w1, b1)
    recompute = draw.random() < 0.5
    acts: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu_tanh_approx": partial(F.gelu, approximate="tanh"), "relu": F.relu, "relu_sq": lambda x: x.relu().square(),
        "silu": F.silu,
    }  # fmt: skip
    name = draw.choice([*acts])
    alike(
        lambda x, w1, w2, b1, b2: quack.mlp_func(x, w1, w2, name, b1, b2, recompute=recompute),
        lambda x, w1, w2, b1, b2: F.linear(acts[name](F.linear(x, w1, b1)), w2, b2), x, w1, w2, b1, b2, **WIDE,
    )  # fmt: skip
    act = {"swiglu": F.silu, "geglu": acts["gelu_tanh_approx"]}[gated]
    both = normal(draw, 2 * hidden, k)

    def theirs(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        gate, up = (x @ w1.T).chunk(2, -1)
        return (act(gate) * up) @ w2.T

    alike(
        lambda x, w1, w2: quack.mlp_func(x, w1, w2, gated, recompute=recompute, concat_layout=True), theirs, x, both,
        w2, **WIDE,
    )  # fmt: skip


# --- rotations -------------------------------------------------------------------------------------------------------


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """(..., heads, headdim) by (..., 1, pairs)."""
    r = cos.shape[-1]
    a, b = (x[..., 0 : 2 * r : 2], x[..., 1 : 2 * r : 2]) if interleaved else (x[..., :r], x[..., r : 2 * r])
    pairs = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat([turned, x[..., 2 * r :]], -1)


def rotations(draw: Draw) -> None:
    batch, seqlen, heads, r = draw.randrange(1, 4), draw.randrange(1, 8), draw.randrange(1, 4), draw.randrange(1, 6)
    size = 2 * r + draw.randrange(0, 5)
    q, k = normal(draw, batch, heads, seqlen, size), normal(draw, batch, 1, seqlen, size)
    lead = draw.choice([(seqlen,), (1, seqlen), (batch, seqlen)])
    angles = normal(draw, *lead, r)
    cos, sin = (f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))
    half = draw.random() < 0.5
    tables = (cos[..., :r], sin[..., :r]) if half else (cos, sin)
    options = {"rotary_dim": 2 * r} if half else given(draw, rotary_dim=lambda: 2 * r)
    function = draw.choice([liger.liger_rope, liger.liger_rotary_pos_emb])
    at = angles.double().unsqueeze(-3)
    alike(
        lambda q, k: function(q, k, *tables, **options),
        lambda q, k: tuple(_rotated(x, at.cos(), at.sin(), False) for x in (q, k)), q, k, **WIDE,
    )  # fmt: skip
    x, y = (normal(draw, batch, seqlen, heads, 2 * r) for _ in range(2))
    complexes, wide = torch.polar(torch.ones_like(angles), angles), angles.double().unsqueeze(-2)
    alike(
        lambda x, y: liger.liger_llama4_text_rotary_pos_emb(x, y, complexes),
        lambda x, y: tuple(_rotated(each, wide.cos(), wide.sin(), True) for each in (x, y)), x, y, **WIDE,
    )  # fmt: skip


def rotations_of_quack(draw: Draw) -> None:
    heads, r, most, interleaved = draw.randrange(1, 4), draw.randrange(1, 6), 40, draw.random() < 0.5
    angles, lengths = normal(draw, most, r), [draw.randrange(1, 8) for _ in range(draw.randrange(1, 4))]
    size = 2 * r + draw.randrange(0, 5)
    packed = draw.random() < 0.5
    lengths = lengths if packed else [lengths[0]] * len(lengths)
    kind = draw.choice(["none", "int", "tensor"])
    offsets = [0 if kind == "none" else draw.randrange(30) for _ in lengths]
    offsets = offsets if kind == "tensor" else [offsets[0]] * len(lengths)
    at = torch.cat([torch.arange(o, o + n) for o, n in zip(offsets, lengths, strict=True)])
    where = {"int": offsets[0], "tensor": torch.tensor(offsets, dtype=torch.int32)}
    options: dict[str, Any] = {"seqlen_offsets": where[kind]} if kind in where else {}
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    if packed:
        x = normal(draw, sum(lengths), heads, size)
        options |= {"cu_seqlens": ends} | given(draw, max_seqlen=lambda: max(lengths))
    else:
        x, at = normal(draw, len(lengths), lengths[0], heads, size), at.view(len(lengths), -1)
    wide = angles.double()[at].unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    alike(
        lambda x: quack.apply_rotary_emb(x, cos, sin, interleaved, **options),
        lambda x: _rotated(x, wide.cos(), wide.sin(), interleaved), x, **WIDE,
    )  # fmt: skip
    with torch.no_grad():
        wanted, changed = quack.apply_rotary_emb(x, cos, sin, interleaved, **options), x.clone()
        found = quack.apply_rotary_emb(changed, cos, sin, interleaved, inplace=True, **options)
    torch.testing.assert_close(changed, wanted)
    assert found.data_ptr() == changed.data_ptr()


# --- attention -------------------------------------------------------------------------------------------------------


def attended(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(batch, seqlen, heads, headdim), and the logarithms of sums."""
    heads, s, t = q.shape[2], q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(heads // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bshd,bthd->bhst", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap > 0 else scores
    apart = torch.arange(s)[:, None] + t - s - torch.arange(t)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double().reshape(-1, heads, 1, 1) * apart.abs()
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = ((apart > left) & (left >= 0)) | ((-apart > right) & (right >= 0))
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("bhst,bthe->bshe", scores.softmax(-1).nan_to_num(), v), scores.logsumexp(-1)


def _attention_options(draw: Draw, batch: int, heads: int) -> dict[str, Any]:
    return given(
        draw, softmax_scale=lambda: draw.choice([None, 0.3, 1.0]), causal=lambda: True,
        window_size=lambda: (draw.randrange(-1, 6), draw.randrange(-1, 6)), softcap=lambda: draw.choice([0.0, 2.0]),
        alibi_slopes=lambda: normal(draw, *draw.choice([(heads,), (batch, heads)])).abs(),
    )  # fmt: skip


def flash_attention(draw: Draw) -> None:
    batch, groups, size = draw.randrange(1, 3), draw.randrange(1, 3), draw.choice([8, 16, 24, 32])
    heads, s, t = groups * draw.randrange(1, 3), draw.randrange(1, 10), draw.randrange(1, 10)
    options = _attention_options(draw, batch, heads)
    with_sums = draw.random() < 0.3
    more = {"return_attn_probs": with_sums, "deterministic": draw.random() < 0.3, "dropout_p": 0.0}
    q, k, v = normal(draw, batch, s, heads, size), *(normal(draw, batch, t, groups, size) for _ in range(2))
    kind = draw.choice(["", "kv", "qkv"])
    if kind == "qkv":
        inputs: tuple[Tensor, ...] = (normal(draw, batch, s, 3, heads, size),)
        ours, parts = flash_attn.flash_attn_qkvpacked_func, lambda qkv: qkv.unbind(2)
    elif kind == "kv":
        inputs, ours, parts = (
            (q, torch.stack((k, v), 2)),
            flash_attn.flash_attn_kvpacked_func,
            lambda q, kv: (q, *kv.unbind(2)),
        )
    else:
        inputs, ours, parts = (q, k, v), flash_attn.flash_attn_func, lambda *x: x
    alike(
        lambda *x: ours(*x, **options, **more)[0] if with_sums else ours(*x, **options, **more),
        lambda *x: attended(*parts(*x), **options)[0], *inputs, **WIDE,
    )  # fmt: skip
    if with_sums:
        sums = attended(*(x.double() for x in parts(*inputs)), **options)[1]
        torch.testing.assert_close(ours(*inputs, **options, **more)[1].double(), sums, rtol=1e-4, atol=1e-4)


def flash_attention_packed(draw: Draw) -> None:
    batch, groups, size = draw.randrange(1, 4), draw.randrange(1, 3), draw.choice([8, 16, 24])
    heads = groups * draw.randrange(1, 3)
    kind = draw.choice(["", "kv", "qkv", "paged"])
    s = [draw.randrange(0 if kind != "qkv" else 1, 7) for _ in range(batch)]
    s[draw.randrange(batch)] += 1
    t = s if kind == "qkv" else [draw.randrange(1, 9) for _ in range(batch)]
    groups = heads if kind == "qkv" else groups
    options = _attention_options(draw, batch, heads)
    ends = [torch.tensor([0, *each]).cumsum(0).int() for each in (s, t)]
    q, k, v = normal(draw, sum(s), heads, size), *(normal(draw, sum(t), groups, size) for _ in range(2))

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slopes, outs = options.get("alibi_slopes"), []
        for i, each in enumerate(zip(q.split(s), k.split(t), v.split(t), strict=True)):
            own = {"alibi_slopes": slopes if slopes is None or slopes.ndim == 1 else slopes[i]}
            outs.append(attended(*(x[None] for x in each), **(options | own))[0][0])
        return torch.cat(outs)

    most = max(s), max(t)
    if kind == "qkv":
        alike(
            lambda x: flash_attn.flash_attn_varlen_qkvpacked_func(x, ends[0], most[0], **options),
            lambda x: theirs(*x.unbind(1)), torch.stack((q, k, v), 1), **WIDE,
        )  # fmt: skip
    elif kind == "kv":
        alike(
            lambda q, kv: flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *ends, *most, **options),
            lambda q, kv: theirs(q, *kv.unbind(1)), q, torch.stack((k, v), 1), **WIDE,
        )  # fmt: skip
    elif kind == "paged":
        size_of_page = draw.choice([1, 2, 4])
        pools, table = _paged(draw, [x.split(t) for x in (k, v)], size_of_page)
        found = flash_attn.flash_attn_varlen_func(q, *pools, *ends, *most, block_table=table, **options)
        torch.testing.assert_close(found.double(), theirs(*(x.double() for x in (q, k, v))), **WIDE)
    else:
        alike(lambda *x: flash_attn.flash_attn_varlen_func(*x, *ends, *most, **options), theirs, q, k, v, **WIDE)


def flash_attention_4(draw: Draw) -> None:
    batch, groups, size = draw.randrange(1, 4), draw.randrange(1, 3), draw.choice([8, 16, 24])
    heads, kind = groups * draw.randrange(1, 3), draw.choice(["rows", "packed", "paged", "lengths"])
    s = [draw.randrange(1, 7)] * batch if kind == "rows" else [draw.randrange(1, 7) for _ in range(batch)]
    t = [draw.randrange(1, 9)] * batch if kind == "rows" else [draw.randrange(1, 9) for _ in range(batch)]
    side = lambda: draw.choice([None, *range(5)])  # noqa: E731
    options = given(
        draw, softmax_scale=lambda: 0.3, causal=lambda: True, window_size=lambda: (side(), side()),
        softcap=lambda: 2.0, learnable_sink=lambda: normal(draw, heads),
    )  # fmt: skip
    more = {"return_lse": True, "num_splits": draw.randrange(3), "deterministic": draw.random() < 0.3}
    q, k, v = normal(draw, sum(s), heads, size), *(normal(draw, sum(t), groups, size) for _ in range(2))
    of_q, of_k = (torch.tensor([0, *each]).cumsum(0).int() for each in (s, t))

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        own = options | {"window_size": [-1 if x is None else x for x in options.get("window_size", (-1, -1))]}
        sink, outs, sums = own.pop("learnable_sink", None), [], []
        for each in zip(q.split(s), k.split(t), v.split(t), strict=True):
            out, lse = attended(*(x[None] for x in each), **own)
            if sink is not None:
                total = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
                out, lse = out * (lse - total).exp().mT[..., None], total
            outs.append(out[0])
            sums.append(lse[0])
        return torch.cat(outs), torch.cat(sums, -1)

    if kind == "rows":
        q, k, v = (x.unflatten(0, (batch, -1)) for x in (q, k, v))
        ours: Any = lambda *x: flash_attn_cute.flash_attn_func(*x, **options, **more)  # noqa: E731
        alike(
            lambda *x: (lambda out, lse: (out.flatten(0, 1), lse.transpose(0, 1).flatten(1)))(*ours(*x)),
            lambda *x: theirs(*(each.flatten(0, 1) for each in x)), q, k, v, **WIDE,
        )  # fmt: skip
    elif kind == "packed":
        where = {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k, "max_seqlen_q": draw.choice([None, max(s)])}
        alike(
            lambda *x: flash_attn_cute.flash_attn_varlen_func(*x, **where, **options, **more), theirs, q, k, v, **WIDE
        )  # fmt: skip
    else:
        pools, table = _paged(draw, [x.split(t) for x in (k, v)], 9 if kind == "lengths" else draw.choice([1, 2, 4]))
        where = {"cu_seqlens_q": of_q, "seqused_k": torch.tensor(t).int(), "page_table": table}
        if kind == "lengths":  # a page is a row
            pools = [pool[table[:, 0].long()] for pool in pools]
            del where["page_table"]
        found = flash_attn_cute.flash_attn_varlen_func(q, *pools, **where, **options, **more)
        for each, wanted in zip(found, theirs(*(x.double() for x in (q, k, v))), strict=True):
            torch.testing.assert_close(each.double(), wanted, **WIDE)


def _paged(draw: Draw, sequences: list[Any], size: int) -> tuple[list[Tensor], Tensor]:
    """Pools of pages in a drawn order that hold some sequences, and the table of these."""
    counts = [-(-len(x) // size) for x in sequences[0]]
    order = draw.sample(range(sum(counts) + 2), sum(counts))
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    pools = [xs[0].new_full((sum(counts) + 2, size, *xs[0].shape[1:]), 7.0) for xs in sequences]
    for i, count in enumerate(counts):
        for j in range(count):
            page = table[i, j] = order.pop()
            for pool, xs in zip(pools, sequences, strict=True):
                part = xs[i][j * size : (j + 1) * size]
                pool[page, : len(part)] = part
    return pools, table


def flash_attention_with_a_cache(draw: Draw) -> None:
    batch, groups, size = draw.randrange(1, 3), draw.randrange(1, 3), draw.choice([16, 32])
    heads, room, s = groups * draw.randrange(1, 3), draw.choice([16, 24]), draw.choice([1, 1, 2, 3, 18])
    options = _attention_options(draw, batch, heads)
    q = normal(draw, batch, s, heads, size).bfloat16()
    caches = [normal(draw, batch, room, groups, size).bfloat16() for _ in range(2)]
    new = draw.randrange(1, 4) if draw.random() < 0.5 else 0
    held = [draw.randrange(1, room - 3) for _ in range(batch)]
    same = draw.random() < 0.3
    held = [held[0]] * batch if same else held
    more: dict[str, Any] = {"cache_seqlens": held[0] if same else torch.tensor(held, dtype=torch.int32)}
    page = draw.choice([0, 0, 0, 1, 4, 8])
    starts, rows = [0] * batch, [*range(batch)]
    if not page and draw.random() < 0.5:
        starts = [draw.randrange(n + 1) for n in held]
        more["cache_leftpad"] = torch.tensor(starts, dtype=torch.int32)
    if not page and draw.random() < 0.5:
        rows = draw.sample(range(batch + 2), batch)
        more["cache_batch_idx"] = torch.tensor(rows, dtype=torch.int32)
    fresh = [normal(draw, batch, new, groups, size).bfloat16() for _ in range(2)]
    wide_q, whole = q.double(), [x.double().clone() for x in caches]
    rotary = new and draw.random() < 0.5
    interleaved = draw.random() < 0.5
    angles = normal(draw, 2 * room, draw.randrange(1, size // 2 + 1)).double()

    def turned(x: Tensor, at: Tensor) -> Tensor:
        wide = angles[at].unsqueeze(-2)
        return _rotated(x, wide.cos(), wide.sin(), interleaved)

    first = torch.tensor(held)[:, None]
    if rotary:
        # All queries are at the first place unless a mask tells their places apart.
        local = options.get("causal", False) or options.get("window_size", (-1, -1)) != (-1, -1)
        wide_q = turned(wide_q, first + (torch.arange(s) if local else torch.zeros(s, dtype=torch.long)))
        more |= {
            "rotary_cos": angles.cos().float(),
            "rotary_sin": angles.sin().float(),
            "rotary_interleaved": interleaved,
        }
    if new:
        keys = turned(fresh[0].double(), first + torch.arange(new)) if rotary else fresh[0].double()
        for i, n in enumerate(held):
            whole[0][i, n : n + new], whole[1][i, n : n + new] = keys[i], fresh[1][i].double()
        more |= {"k": fresh[0], "v": fresh[1]}
    wanted, sums = [], []
    for i, n in enumerate(held):
        slopes = options.get("alibi_slopes")
        own = {"alibi_slopes": slopes if slopes is None or slopes.ndim == 1 else slopes[i]}
        keys, values = (x[i : i + 1, starts[i] : n + new] for x in whole)
        out, lse = attended(wide_q[i : i + 1], keys, values, **(options | own))
        wanted.append(out[0])
        sums.append(lse[0])
    heads_first = draw.random() < 0.3
    given_caches = [_laid(x, starts, rows, heads_first) for x in caches]
    if page:
        given_caches, more["block_table"] = _paged(draw, [list(x) for x in caches], page)
    out, lse = flash_attn.flash_attn_with_kvcache(q, *given_caches, **more, **options, return_softmax_lse=True)
    near = {"rtol": 0.03, "atol": 0.03}
    torch.testing.assert_close(out.double(), torch.stack(wanted), **near)
    torch.testing.assert_close(lse.double(), torch.stack(sums), **near)
    if not page:
        for found, expected in zip(given_caches, whole, strict=True):
            for i, row in enumerate(rows):
                torch.testing.assert_close(found[row, starts[i] :].double(), expected[i, starts[i] :], **near)


def _laid(cache: Tensor, starts: list[int], rows: list[int], heads_first: bool) -> Tensor:
    """A cache whose rows stand in another order among others, NaN wherever no key is; in memory heads stand before
    slots or behind them.
    """
    laid = cache.new_full((max(rows, default=0) + 2, cache.shape[1] + 1, *cache.shape[2:]), torch.nan)[:, :-1]
    if heads_first:
        laid = laid.transpose(1, 2).contiguous().transpose(1, 2)
    for i, row in enumerate(rows):
        laid[row, starts[i] :] = cache[i, starts[i] :]
    return laid if rows != [*range(len(rows))] else laid[: len(rows)]


# --- convolutions ----------------------------------------------------------------------------------------------------


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor, activation: str | None) -> Tensor:
    out = F.conv1d(torch.cat([before, x], -1), weight[:, None], bias, groups=x.shape[1])
    return F.silu(out) if activation else out


def convolutions(draw: Draw) -> None:
    batch, channels, s, width = (
        draw.randrange(1, 3),
        draw.randrange(1, 9),
        draw.randrange(1, 12),
        draw.choice([2, 3, 4]),
    )
    x, w, b = normal(draw, batch, channels, s), normal(draw, channels, width), normal(draw, channels)
    last, activation = draw.random() < 0.5, draw.choice([None, "silu", "swish"])
    kind, biased, states = draw.choice(["", "initial", "ids"]), draw.random() < 0.5, draw.random() < 0.5
    before = normal(draw, batch, channels, width - 1) if kind == "initial" else torch.zeros(batch, channels, width - 1)
    ids = torch.tensor([sorted(draw.randrange(3) for _ in range(s)) for _ in range(batch)], dtype=torch.int32)
    out = torch.empty(batch, channels, width - 1) if states and draw.random() < 0.3 else None

    def ours(x: Tensor, w: Tensor, b: Tensor, before: Tensor) -> Any:
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if last else x
        found = causal_conv1d.causal_conv1d_fn(
            x, w, b if biased else None, ids if kind == "ids" else None, before if kind == "initial" else None, states,
            out if out is not None and not torch.is_grad_enabled() else None, activation,
        )  # fmt: skip
        unread = 0.0 * (b.sum() + before.sum())
        return (found[0] + unread, found[1]) if states else found + unread

    def theirs(x: Tensor, w: Tensor, b: Tensor, before: Tensor) -> Any:
        bias = b if biased else None
        if kind == "ids":
            found = torch.zeros_like(x)
            for each in range(3):
                own = (ids == each)[:, None]
                found = found + torch.where(
                    own, _convolved(x * own, w, bias, torch.zeros_like(before), activation), 0.0
                )
        else:
            found = _convolved(x, w, bias, before if kind == "initial" else torch.zeros_like(before), activation)
        found = found + 0.0 * (b.sum() + before.sum())
        first = before if kind == "initial" else torch.zeros_like(before)
        return (found, torch.cat([first, x], -1)[..., x.shape[-1] :]) if states else found

    alike(ours, theirs, x, w, b, before, **WIDE)


def steps_of_convolutions(draw: Draw) -> None:
    batch, channels, width = draw.randrange(1, 4), draw.randrange(1, 9), draw.choice([2, 3, 4])
    length, single = width - 1 + draw.randrange(4), draw.random() < 0.5
    new = 1 if single else draw.randrange(1, length + 4)
    w, b, activation = (
        normal(draw, channels, width),
        maybe(draw, lambda: normal(draw, channels)),
        draw.choice([None, "silu"]),
    )
    chosen, ring = draw.random() < 0.5, draw.random() < 0.5
    every = normal(draw, batch + (2 if chosen else 0), channels, length)
    index = torch.tensor(draw.sample(range(len(every)), batch), dtype=torch.int32)
    index[torch.tensor([chosen and draw.random() < 0.3 for _ in range(batch)])] = -1  # padding
    counts = index >= 0
    held = every[index.long()] if chosen else every[:batch]
    x, seqlens = normal(draw, batch, channels, new), [draw.randrange(20) for _ in range(batch)]
    after, before = held.clone(), held[..., length - width + 1 :]
    if ring:
        before = torch.stack(
            [held[i][:, [(n + j) % length for j in range(1 - width, 0)]] for i, n in enumerate(seqlens)]
        )
        for i, n in enumerate(seqlens):
            for j in range(new):
                after[i, :, (n + j) % length] = x[i, :, j]
    else:
        after = torch.cat([held, x], -1)[..., new:]
    if chosen:
        after = after[counts]
    state = every.clone()
    found = causal_conv1d.causal_conv1d_update(
        x[..., 0] if single else x, state, w, b, activation,
        torch.tensor(seqlens, dtype=torch.int32) if ring else None, index if chosen else None,
    )  # fmt: skip
    wanted = _convolved(*(t if t is None else t.double() for t in (x, w, b, before)), activation)
    if chosen:
        wanted = wanted * counts[:, None, None]
    torch.testing.assert_close(found.double(), wanted[..., 0] if single else wanted, **WIDE)
    expected = every.clone()
    expected[index[counts].long() if chosen else slice(batch)] = after
    torch.testing.assert_close(state, expected)
    lengths, count = [draw.randrange(0, 6) for _ in range(draw.randrange(1, 4))], draw.randrange(1, 5)
    rows = normal(draw, sum(lengths), channels)
    states = causal_conv1d.causal_conv1d_varlen_states(rows, torch.tensor([0, *lengths]).cumsum(0).int(), count)
    padded = [F.pad(each.T, (count, 0))[:, -count:] for each in rows.split(lengths)]
    torch.testing.assert_close(states, torch.stack(padded))


def _head(draw: Draw) -> tuple[list[Tensor], Tensor, int]:
    """Hidden states of pairs, a weight and a bias, those of a reference, targets, and the ignored one."""
    pairs, tokens, h, n, ignored = draw.randrange(1, 4), draw.randrange(1, 6), 8, 13, draw.choice([-100, 3])
    shapes = ((2 * pairs, tokens, h), (n, h), (n,)) * 2
    target = _targets(draw, 2 * pairs * tokens, n, ignored).view(2 * pairs, tokens)
    target[:, 0] = 1
    return [normal(draw, *shape) for shape in shapes], target, ignored


def _log_probs(x: Tensor, w: Tensor, b: Tensor, target: Tensor, ignored: int, average: bool) -> tuple[Tensor, Tensor]:
    """Of tokens, and of sequences."""
    kept = target != ignored
    logs = (x @ w.T + b).log_softmax(-1).gather(-1, torch.where(kept, target, 0)[..., None])[..., 0] * kept
    return logs, logs.sum(-1) / (kept.sum(-1) if average else 1)


def liger_preferences(draw: Draw) -> None:
    """Liger's DPO and its kinds: what is returned beside the loss, too."""
    arrays, target, ignored = _head(draw)
    (pairs, tokens), average = (len(target) // 2, target.shape[1]), draw.random() < 0.5
    beta, alpha, nll_wanted, compared = draw.choice([0.1, 0.5]), 0.3, draw.random() < 0.5, draw.random() < 0.7
    loss = liger_chunked_loss.LigerFusedLinearDPOLoss(
        ignored, beta, alpha, nll_wanted, use_ref_model=compared, average_log_prob=average, label_smoothing=0.1,
        loss_type=draw.choice([*liger_chunked_loss.DPO]), discopop_tau=0.5,
    )  # fmt: skip
    kind = loss.kind

    def ours(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return loss(w, x, target, b, *arrays[3:])

    def theirs(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        each, sums = _log_probs(x, w, b, target, ignored, average)
        y, v, c = (a.double() for a in arrays[3:])
        ratios = sums - _log_probs(y, v, c, target, ignored, average)[1] * compared
        smoothing = 0.0 if kind == "dpo" else 0.1
        found = of_pairs(kind, ratios[:pairs], ratios[pairs:], (beta, 0.0, smoothing)).mean()
        nll = -each[:pairs].sum() / (target[:pairs] != ignored).sum() * nll_wanted
        means = (x @ w.T + b).sum((1, 2)) / (pairs * tokens * len(w))
        more = *sums.split(pairs), *(a.sum() for a in means.split(pairs)), nll, *(beta * ratios).split(pairs)
        return found + alpha * nll, more

    alike(lambda *given: ours(*given)[0], lambda *given: theirs(*given)[0], *arrays[:3], **WIDE)
    for a, b in zip(ours(*arrays[:3])[1], theirs(*(a.double() for a in arrays[:3]))[1], strict=True):
        assert not a.requires_grad
        torch.testing.assert_close(a.double(), b, **WIDE)


def liger_policies(draw: Draw) -> None:
    """Liger's GRPO and its kin, with the share of tokens that are clipped."""
    arrays, target, _ = _head(draw)
    target = target.clamp(min=0)
    shape, kind = target.shape, draw.choice(liger_chunked_loss.POLICIES)
    level = draw.choice(["token", "sequence"]) if kind != "cispo" else "token"
    low, high, beta, delta, count = (
        0.1,
        draw.choice([0.2, 2.0]),
        draw.choice([0.0, 0.1]),
        draw.choice([None, 1.5]),
        draw.choice([None, 11]),
    )
    loss = liger_chunked_loss.LigerFusedLinearGRPOLoss(
        beta, epsilon_low=low, epsilon_high=high, loss_type=kind, importance_sampling_level=level, delta=delta,
        max_completion_length=7,
    )  # fmt: skip
    mask, gain, factor = (normal(draw, *shape) < 0.7).long(), normal(draw, shape[0]), normal(draw, shape[0]).abs()
    old, reference = (normal(draw, *shape) - 3 for _ in range(2))

    def theirs(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        logs, _ = _log_probs(x, w, b, target, -1, False)
        further = logs - old.double()
        if level == "sequence":
            further = ((further * mask).sum(-1) / mask.sum(-1).clamp(min=1))[:, None]
        ratio, a = further.exp(), gain.double()[:, None]
        top = high if kind == "cispo" else 1 + high
        losses = -torch.minimum(ratio.clamp(max=delta) * a if delta else ratio * a, ratio.clamp(1 - low, top) * a)
        losses = -ratio.clamp(max=top).detach() * a * logs if kind == "cispo" else losses
        apart = reference.double() - logs
        kl = apart.exp() - apart - 1
        losses = (losses * factor.double()[:, None] + beta * kl) * mask
        clipped = ((ratio > top) & (a > 0)) | ((ratio < 1 - low) & (a < 0) & (kind != "cispo"))
        total = mask.sum().clamp(min=1)
        metrics = ([(kl * mask).sum() / total] if beta else []) + [(clipped * mask).sum() / total]
        by = {"bnpo": total, "dr_grpo": 7 * shape[0]}.get(kind, count or total)
        if kind == "grpo":
            return (losses.sum(-1) / mask.sum(-1).clamp(min=1)).mean(), *metrics
        return losses.sum() / by, *metrics

    def ours(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        found, metrics = loss(
            x, w, target, mask, gain, b, reference, old, vllm_is_ratio=factor, num_items_in_batch=count
        )
        return found, *metrics

    alike(lambda *given: ours(*given)[0], lambda *given: theirs(*given)[0], *arrays[:3], **WIDE)
    for a, b in zip(ours(*arrays[:3])[1:], theirs(*(a.double() for a in arrays[:3]))[1:], strict=True):
        torch.testing.assert_close(a.double(), b.double(), **WIDE)


def liger_head_losses(draw: Draw) -> None:
    """Liger's CPO, SimPO, ORPO, KTO and distillation beside our functions, which other tests compare with formulas."""
    arrays, target, ignored = _head(draw)
    ops, of = cute_ops_torch, liger_chunked_loss
    kind, half, beta = draw.choice(["cpo", "simpo", "orpo", "kto", "jsd"]), len(target) // 2, 0.3
    labels, other = normal(draw, len(target)) > 0, target.roll(1, 1)
    made = {
        "cpo": lambda: of.LigerFusedLinearCPOLoss(ignored, beta, 0.7, 0.1, compute_nll_loss=False),
        "simpo": lambda: of.LigerFusedLinearSimPOLoss(ignored, beta, 0.7, 0.1, gamma=0.4),
        "orpo": lambda: of.LigerFusedLinearORPOLoss(ignored, beta),
        "kto": lambda: of.LigerFusedLinearKTOLoss(ignored, beta, use_ref_model=True),
        "jsd": lambda: of.LigerFusedLinearJSDLoss(
            0.4, 0.6, 0.2, ignored, 2.0, return_soft_hard_loss=draw.random() < 0.5
        ),
    }[kind]()  # fmt: skip
    common = {"beta": beta, "ignore_index": ignored}

    def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        if kind == "kto":
            return made(x, w, target, b, labels, *(a.to(x.dtype) for a in arrays[3:]), torch.tensor(0.2))[0]
        if kind == "jsd":
            found = made(x, w, arrays[3].to(x.dtype), arrays[4].to(x.dtype), target, b, arrays[5].to(x.dtype))
            return found[0] if isinstance(found, tuple) else found
        return made(w, x, target, b, **({"nll_target": other} if kind == "orpo" else {}))[0]

    def wanted(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        if kind == "jsd":
            teacher = arrays[3], arrays[4], target, b
            return ops.linear_distillation_loss(
                x,
                w,
                *teacher,
                teacher_bias=arrays[5],
                beta=0.2,
                temperature=2.0,
                hard=0.4,
                soft=0.6,
                ignore_index=ignored,
            )
        if kind == "kto":
            reference = ops.linear_log_probs(*arrays[3:5], target, arrays[5], ignore_index=ignored)
            return ops.linear_preference_loss(
                x, w, target, reference, b, kind=kind, desirable=labels, kl=0.2, **common
            )[0]
        more = {
            "cpo": {"label_smoothing": 0.1},
            "simpo": {"label_smoothing": 0.1, "gamma": 0.4, "alpha": 0.7},
            "orpo": {},
        }[kind]
        found = ops.linear_preference_loss(x, w, target, None, b, kind=kind, **more, **common)[0]
        nll = ops.linear_cross_entropy(x[:half], w, other[:half], b, ignored) if kind == "orpo" else 0.0
        return found + nll

    results: list[tuple[Tensor, ...]] = []
    for function in (ours, wanted):
        leaves = [a.clone().requires_grad_() for a in arrays[:3]]
        loss = function(*leaves)
        found = loss.detach(), *torch.autograd.grad(loss, leaves)
        results.append(found)
    torch.testing.assert_close(*results, **NAN)


DRAWS = (
    liger_cross_entropy, liger_fused_linear_cross_entropy, quack_cross_entropy, quack_heads, norms,
    norms_of_heads_and_groups, pointwise, products, rotations, rotations_of_quack, flash_attention,
    flash_attention_packed, flash_attention_4, flash_attention_with_a_cache, convolutions, steps_of_convolutions,
    liger_preferences, liger_policies, liger_head_losses,
)  # fmt: skip


def drawn_calls(function: Callable[[Draw], None], seeds: range) -> None:
    for seed in seeds:
        try:
            function(Draw(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed} of {function.__name__}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("function", DRAWS, ids=lambda function: function.__name__)
def test_drawn_calls(function: Callable[[Draw], None]) -> None:
    drawn_calls(function, range(6))


def main(count: int) -> int:
    bad = 0
    for function in DRAWS:
        for seed in range(count):
            try:
                drawn_calls(function, range(seed, seed + 1))
            except AssertionError as error:
                bad += 1
                print(str(error)[:400], flush=True)
        print(function.__name__, count, flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
