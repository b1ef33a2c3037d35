"""Parts of layers in the graph pass: gated MLPs, projections to rotated heads, the end of a block."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cute_ops.fusion import attention as written_attention
from cute_ops.jit.target import Target
from cute_ops_torch import inductor
from cute_ops_torch.inductor import choice, graph_pass
from cute_ops_torch.inductor.dynamo import DynamoFront
from tests.torch.drawn_programs import enabled, only_the_pass, through_autograd

Tensor = torch.Tensor
B, S, K = 2, 5, 24


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    inductor.replaced.clear()
    with enabled():
        yield


def made(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype).requires_grad_()


def compare(function: Callable[..., Any], *given: Any, found: dict[str, int], backend: Any = through_autograd) -> None:
    """Results, which lie as they did, and gradients of the compiled function are those of the function."""
    every, strides = [], []
    for run in (function, torch.compile(function, backend=backend, fullgraph=True)):
        leaves = [t.detach().clone().requires_grad_(t.requires_grad) if torch.is_tensor(t) else t for t in given]
        outs = run(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        strides.append([[s for s, n in zip(out.stride(), out.shape, strict=True) if n != 1] for out in outs])
        loss = sum((out.float() * (0.5 + i + out.detach().float().cos())).sum() for i, out in enumerate(outs))
        loss.backward()  # type: ignore[union-attr]
        every.append(
            [*(out.detach() for out in outs), *(t.grad for t in leaves if torch.is_tensor(t) and t.requires_grad)]
        )
    for got, want in zip(every[1], every[0], strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        bound = (3e-5 if want.dtype == torch.float32 else 4e-2) * max(want.abs().max().item(), 1e-2)
        assert (got.double() - want.double()).abs().max().item() <= bound
    assert strides[1] == strides[0]
    assert dict(inductor.replaced) == found


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "written": lambda x: x * torch.sigmoid(x),
}  # fmt: skip


@pytest.mark.drawn(0.8)
@pytest.mark.parametrize("transposed", [False, True], ids=("n k", "k n"))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_mlps_of_two_weights(activation: str, transposed: bool) -> None:
    act, multiply = ACTIVATIONS[activation], torch.matmul if transposed else F.linear

    def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return multiply(act(multiply(x, gate)) * multiply(x, up), down) + x

    weights = [made(40, K, seed=1), made(40, K, seed=2), made(K, 40, seed=3)]
    weights = [w.detach().t().contiguous().requires_grad_() for w in weights] if transposed else weights
    compare(mlp, made(B, S, K, seed=0), *weights, found={"gated_mlp": 1})
    x = made(B, S, K, seed=0, dtype=torch.bfloat16)
    inductor.replaced.clear()
    compare(mlp, x, *(w.detach().bfloat16().requires_grad_() for w in weights), found={"gated_mlp": 1})


def test_a_bias_of_two_halves_stays_with_the_framework_s_product() -> None:
    def halves(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        left, right = F.linear(x, w, b).chunk(2, dim=-1)
        return left.unflatten(-1, (2, -1)), right.unflatten(-1, (2, -1))

    compare(halves, made(B, S, K, seed=0), made(64, K, seed=1), made(64, seed=2), found={})
    assert "the framework's product adds its bias" in str(inductor.report())


def test_gated_mlps_of_one_packed_weight() -> None:
    def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, down)

    compare(mlp, made(B, S, K, seed=0), made(80, K, seed=1), made(K, 40, seed=2), found={"gated_mlp": 1})


def test_gated_mlps_with_a_frozen_weight() -> None:
    def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    for frozen in range(4):
        given = [made(B, S, K, seed=0), made(40, K, seed=1), made(40, K, seed=2), made(K, 40, seed=3)]
        given[frozen].requires_grad_(False)
        torch._dynamo.reset()
        inductor.replaced.clear()
        compare(mlp, *given, found={"gated_mlp": 1})


@pytest.mark.slow
def test_gated_mlps_that_stay_in_parts() -> None:
    """What others read too is computed for them; products of two inputs are no one product."""
    given = [made(B, S, K, seed=0), made(40, K, seed=1), made(40, K, seed=2), made(K, 40, seed=3)]

    def parts(x: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, gate), F.linear(x, up)

    def reads_gate(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        g, u = parts(x, gate, up)
        return F.linear(F.silu(g) * u, down), g

    def reads_hidden(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        g, u = parts(x, gate, up)
        return F.linear(h := F.silu(g) * u, down), h

    def other_input(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x.sin(), up), down)

    def biased(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, gate, gate[:, 0])) * F.linear(x, up), down)

    def written(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        h = F.silu(F.linear(x, gate)) * F.linear(x, up)
        out = F.linear(h, down)
        return out.mul_(2.0)

    for function in (reads_gate, reads_hidden, other_input, biased, written):
        torch._dynamo.reset()
        inductor.replaced.clear()
        compare(function, *given, found=dict(inductor.replaced) | _without_parts(function, given))


def _without_parts(function: Callable[..., Any], given: list[Tensor]) -> dict[str, int]:
    """What is replaced in a function, which has no part of a layer."""
    torch.compile(function, backend=only_the_pass)(*given)
    found = dict(inductor.replaced)
    assert not {"gated_mlp", "mlp", "qkv_rope", "linear_add_rmsnorm"} & set(found)
    torch._dynamo.reset()
    inductor.replaced.clear()
    return found


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(), "silu": F.silu, "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "written": lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3))),
}  # fmt: skip


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("biases", ["both", "none", "first", "with a residual"])
@pytest.mark.parametrize("activation", PLAIN)
def test_mlps_without_a_gate(activation: str, biases: str) -> None:
    act = PLAIN[activation]

    def mlp(x: Tensor, up: Tensor, b_up: Tensor, down: Tensor, b_down: Tensor) -> Tensor:
        h = act(F.linear(x, up, None if biases == "none" else b_up))
        out = F.linear(h, down, b_down if biases in ("both", "with a residual") else None)
        return x + out if biases == "with a residual" else out

    given = made(B, S, K, seed=0), made(40, K, seed=1), made(40, seed=2), made(K, 40, seed=3), made(K, seed=4)
    for unused in {"none": (2, 4), "first": (4,)}.get(biases, ()):
        given[unused].requires_grad_(False)
    compare(mlp, *given, found={"mlp": 1})


@pytest.mark.slow
def test_mlps_without_a_gate_that_stay_in_parts() -> None:
    given = [made(B, S, K, seed=0), made(40, K, seed=1), made(40, seed=2), made(K, 40, seed=3)]

    def reads_product(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        pre = F.linear(x, up, bias)
        return F.linear(F.gelu(pre), down), pre

    def drops(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, up, bias)).cumsum(1), down)

    def other_activation(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, up, bias)).sin(), down)

    for function in (reads_product, drops, other_activation):
        torch._dynamo.reset()
        inductor.replaced.clear()
        compare(function, *given, found=_without_parts(function, given))


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def tables(s: int, d: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angles = torch.arange(s)[:, None] * 0.7 ** torch.arange(d // 2)
    both = torch.cat((angles, angles), -1)[None]
    return both.cos().to(dtype), both.sin().to(dtype)


def attention(
    heads: tuple[int, int], d: int, rotates: Callable[..., Tensor], before: bool = False
) -> Callable[..., Any]:
    """Attention as models write it; ``before``: heads come before positions only after the rotation."""

    def function(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
        with torch.no_grad():
            angles = torch.arange(x.shape[1])[:, None] * 0.7 ** torch.arange(d // 2)
            both = torch.cat((angles, angles), -1)[None]
            cos, sin = (t.to(x.dtype).unsqueeze(2 if before else 1) for t in (both.cos(), both.sin()))
        q, k, v = (F.linear(x, w).view(*x.shape[:-1], -1, d) for w in (wq, wk, wv))
        if before:
            q, k = rotates(q, cos, sin).transpose(1, 2), rotates(k, cos, sin).transpose(1, 2)
        else:
            q, k = (rotates(t.transpose(1, 2), cos, sin) for t in (q, k))
        group = heads[0] // heads[1]
        k, v = (t.repeat_interleave(group, 1) for t in (k, v.transpose(1, 2)))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    return function


def whole(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    a, b, cos, sin = x[..., :half], x[..., half:], cos[..., :half], sin[..., :half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("before", [False, True], ids=("heads first", "positions first"))
@pytest.mark.parametrize("rotates", [whole, by_halves])
@pytest.mark.parametrize(("heads", "d"), [((4, 2), 64), ((2, 2), 128), ((5, 5), 64)])
def test_projections_to_rotated_heads(heads: tuple[int, int], d: int, rotates: Any, before: bool) -> None:
    """``S`` is 5, as many as heads in one case: then shapes alone do not tell positions from heads."""
    weights = [made(n * d, K, seed=1 + i) for i, n in enumerate((heads[0], heads[1], heads[1]))]
    function = attention(heads, d, rotates, before)
    compare(function, made(B, S, K, seed=0), *weights, found={"qkv_rope": 1})


@pytest.mark.slow
def test_projections_that_stay_in_parts() -> None:
    """Heads of other sizes, angles with a gradient, a norm before the rotation, a product that others read."""
    weights = [made(128, K, seed=1), made(128, K, seed=2), made(128, K, seed=3)]
    x = made(B, S, K, seed=0)
    cos, sin = tables(S, 64)

    def with_gradient(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> tuple[Tensor, ...]:
        c, s = (torch.cat((t[..., :32], t[..., :32]), -1) * x.mean() for t in (cos, sin))
        q, k, v = (F.linear(x, w).view(B, S, 2, 64) for w in (wq, wk, wv))
        return whole(q, c.unsqueeze(2), s.unsqueeze(2)), whole(k, c.unsqueeze(2), s.unsqueeze(2)), v * 2

    def normed(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> tuple[Tensor, ...]:
        c, s = (torch.cat((t[..., :32], t[..., :32]), -1).unsqueeze(2) for t in (cos, sin))
        q, k, v = (F.linear(x, w).view(B, S, 2, 64) for w in (wq, wk, wv))
        return whole(F.rms_norm(q, (64,)), c, s), whole(F.rms_norm(k, (64,)), c, s), v * 2

    def read_twice(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> tuple[Tensor, ...]:
        c, s = (torch.cat((t[..., :32], t[..., :32]), -1).unsqueeze(2) for t in (cos, sin))
        q, k, v = (F.linear(x, w).view(B, S, 2, 64) for w in (wq, wk, wv))
        return whole(q, c, s), whole(k, c, s) * 2, v * 2, q * 3

    for function in (with_gradient, normed, read_twice, attention((4, 4), 32, whole)):
        torch._dynamo.reset()
        inductor.replaced.clear()
        compare(function, x, *weights, found=_without_parts(function, [x, *weights]))


@pytest.mark.parametrize("order", ["product first", "residual first"])
@pytest.mark.parametrize("returned", [True, False], ids=("sum goes on", "sum ends"))
def test_the_end_of_a_block(order: str, returned: bool) -> None:
    def end(x: Tensor, w: Tensor, residual: Tensor, norm: Tensor) -> Any:
        y = F.linear(x, w)
        total = y + residual if order == "product first" else residual + y
        out = F.rms_norm(total, (K,), norm, 1e-5)
        return (out, total) if returned else out

    given = made(B, S, 16, seed=0), made(K, 16, seed=1), made(B, S, K, seed=2), made(K, seed=3)
    compare(end, *given, found={"linear_add_rmsnorm": 1})


def test_only_the_parts_asked_for_and_none_where_roundings_are_kept() -> None:
    def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    given = [made(B, S, K, seed=0), made(40, K, seed=1), made(40, K, seed=2), made(K, 40, seed=3)]
    with inductor.enable(("silu_mul",), ("cpu",)):
        compare(mlp, *given, found={"silu_mul": 1})
        (entry,) = (each for each in inductor.report().left if "w_gate" in each.what)
        assert entry.why == "gated_mlp is not asked for"
    torch._dynamo.reset()
    inductor.replaced.clear()
    with inductor.enable(devices=("cpu",), exact=True):
        compare(mlp, *given, found={"silu_mul": 1})


@pytest.mark.slow
def test_rows_of_any_number_compile_once() -> None:
    weights = [made(n * 64, K, seed=1 + i) for i, n in enumerate((4, 2, 2))]
    function = attention((4, 2), 64, whole)
    compiled = torch.compile(function, backend=through_autograd, fullgraph=True)
    for b, s in ((2, 5), (3, 7), (4, 9)):
        x = made(b, s, K, seed=0)
        torch._dynamo.mark_dynamic(x, (0, 1))
        torch.testing.assert_close(compiled(x, *weights), function(x, *weights), rtol=1e-4, atol=1e-5)
    assert dict(inductor.replaced) == {"qkv_rope": 1}


@pytest.mark.slow
def test_drawn_layers() -> None:
    """Layers of drawn sizes, orders and neighbours, as often in parts as whole."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(6):
        n, seen = draw.choice((8, 40, 33)), draw.random() < 0.5
        act, transposed = draw.choice([*ACTIVATIONS.values()]), draw.random() < 0.5
        multiply = torch.matmul if transposed else F.linear
        shapes = [(n, K), (n, K), (K, n)]
        shapes = [shape[::-1] for shape in shapes] if transposed else shapes

        def layer(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
            y = F.rms_norm(x, (K,), norm, 1e-6)
            g, u = multiply(y, gate), multiply(y, up)  # noqa: B023
            h = u * act(g)  # noqa: B023
            total = x + multiply(h, down)  # noqa: B023
            out = F.rms_norm(total, (K,), norm, 1e-6), total
            return (*out, h * 2) if seen else out  # noqa: B023

        torch._dynamo.reset()
        given = [made(draw.randint(1, 3), S, K, seed=0), made(K, seed=1)]
        weights = [made(*shape, seed=2 + i) for i, shape in enumerate(shapes)]
        inductor.replaced.clear()
        compare(layer, *given, *weights, found=_found(layer, [*given, *weights], whole=not seen))


def _found(function: Callable[..., Any], given: list[Tensor], whole: bool) -> dict[str, int]:
    torch.compile(function, backend=only_the_pass)(*given)
    found = dict(inductor.replaced)
    assert ("gated_mlp" in found) == whole
    torch._dynamo.reset()
    inductor.replaced.clear()
    return found


class Head(torch.nn.Module):
    """A language model's head and loss, as Hugging Face writes them."""

    def __init__(self, wide: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.wide = torch.nn.Linear(K, K), torch.nn.Linear(K, 37, bias=False), wide

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(x))
        wide = logits.float()
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
        return F.cross_entropy(wide.view(-1, 37), shifted), wide if self.wide else logits


@pytest.mark.parametrize("wide", [False, True])
def test_logits_that_are_not_kept(wide: bool) -> None:
    model, x = Head(wide).bfloat16(), torch.randn(B, S, K).bfloat16()
    labels = torch.arange(B * S).view(B, S)
    grads = []
    for run in (model, torch.compile(model, backend=through_autograd, fullgraph=True)):
        model.zero_grad()
        with inductor.enable(devices=("cpu",), logits=False):
            loss, logits = run(x, labels)
        loss.backward()
        grads.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert dict(inductor.replaced) == {"linear_cross_entropy": 1}
    assert (logits.shape, logits.dtype, logits.device) == ((B, S, 37), torch.float32 if wide else x.dtype, x.device)
    assert logits.isnan().all()
    assert not logits.requires_grad
    assert logits.stride(-1) == 0
    for got, want in zip(*grads[::-1], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-3)


def _accuracy(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        right = (logits.argmax(-1) == labels).float().mean()
    return F.cross_entropy(logits.view(-1, 37), labels.view(-1)), right


def _z_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    rows = logits.float().flatten(0, 1)
    z = rows.logsumexp(dim=-1, keepdim=True).square().mean()
    return F.cross_entropy(rows, labels.flatten(), label_smoothing=0.1) + 0.1 * z, rows.max(-1)[1]


def _of_shifted_rows(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    rows = logits[:, :-1].contiguous()
    loss = F.cross_entropy(rows.view(-1, 37), labels[:, 1:].reshape(-1), reduction="none", ignore_index=0)
    return loss, rows.logsumexp(-1), rows.detach().argmax(-1)


def _written(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """A program that writes to one of two metrics, and reads others in inference mode."""
    lse = logits.logsumexp(-1)
    loss = F.cross_entropy(logits.view(-1, 37), labels.view(-1))
    doubled = logits.detach().logsumexp(-1).mul_(2)
    with torch.inference_mode():
        right = (logits.argmax(-1) == labels).sum() + logits.logsumexp(-1).mean()
    return loss, lse, doubled, right


@pytest.mark.slow
@pytest.mark.parametrize("metrics", [_accuracy, _z_loss, _of_shifted_rows, _written])
def test_metrics_beside_a_loss_need_no_logits(metrics: Callable[..., Any]) -> None:
    ignored = 0 if metrics is _of_shifted_rows else -100
    labels = (torch.arange(B * S) % 37).view(B, S).index_fill(1, torch.tensor([2]), ignored)
    compare(
        lambda x, w: metrics(F.linear(x, w), labels), made(B, S, K, seed=1), made(37, K, seed=2),
        found={"linear_cross_entropy_metrics": 1},
    )  # fmt: skip


@pytest.mark.parametrize("what", ["other readers", "rows of all", "a head without gradients"])
def test_logits_that_something_else_reads_are_kept(what: str) -> None:
    def loss(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(what != "a head without gradients"):
            logits = F.linear(x, w)
        shifted = logits[:, :-1].contiguous().view(-1, 37)
        beside = logits.argmax(-1) if what == "rows of all" else logits.softmax(-1)
        return F.cross_entropy(shifted, labels[:, 1:].reshape(-1)) + x.sum() * w.sum(), beside

    given = made(B, S, K, seed=1), made(37, K, seed=2), (torch.arange(B * S) % 37).view(B, S)
    want, got = (
        torch.autograd.grad(run(*given)[0], given[:2]) for run in (loss, torch.compile(loss, backend=through_autograd))
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert inductor.replaced["cross_entropy"] == 1
    why = {"other readers": "softmax reads its logits", "rows of all": "argmax reads its logits"}.get(what, "")
    assert why in next(entry.why for entry in inductor.report() if entry.becomes == "cross_entropy")


@pytest.mark.parametrize("metric", [False, True])
def test_logits_are_kept_where_the_head_s_input_is_written_to(metric: bool) -> None:
    """A head that is not trained needs its input no more."""

    def loss(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        hidden = x * 2
        logits = F.linear(hidden, w).flatten(0, 1)
        losses = F.cross_entropy(logits, torch.arange(B * S) % 37, reduction="none")
        return losses, logits.argmax(-1) if metric else losses * 2, hidden.mul_(0.5)

    compare(loss, made(B, S, K, seed=1), made(37, K, seed=2).detach(), found={"cross_entropy": 1})


@pytest.mark.slow
def test_logits_are_kept_unless_asked_and_where_nothing_is_trained() -> None:
    model, x, labels = Head(), torch.randn(B, S, K), torch.arange(B * S).view(B, S)
    wanted = model(x, labels)
    for options, trained in (({}, True), ({"logits": False}, False)):
        torch._dynamo.reset()
        inductor.replaced.clear()
        with inductor.enable(devices=("cpu",), **options), torch.set_grad_enabled(trained):  # type: ignore[arg-type]
            found = torch.compile(model, backend=through_autograd, fullgraph=True)(x, labels)
        assert dict(inductor.replaced) == {"cross_entropy": 1}
        torch.testing.assert_close(found, wanted)


@pytest.mark.slow
def test_a_patched_model_keeps_its_products_under_compile() -> None:
    """As in eager mode: one product of gate and up, one of queries, keys and values, rotated in its epilogue."""
    import transformers
    from torch._dynamo.backends.debugging import aot_eager

    import cute_ops_torch

    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, vocab_size=61, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model, tokens = transformers.LlamaForCausalLM(config).train(), torch.arange(18).view(2, 9)
    calls: list[str] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs = [each.graph for each in module.modules() if isinstance(each, torch.fx.GraphModule)]
        calls.extend(str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function")
        return aot_eager(module, inputs)

    def results(run: Any) -> list[Any]:
        model.zero_grad()
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    wanted = results(model)
    cute_ops_torch.patch(model)
    found = results(torch.compile(model, backend=backend, fullgraph=True))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    ours = {
        name: sum(name in call for call in calls)
        for name in ("gated_mlp_apart", "qkv_rope_64", "silu_mul", "cute.rope.")
    }
    assert ours == {"gated_mlp_apart": 2, "qkv_rope_64": 2, "silu_mul": 0, "cute.rope.": 0}
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    torch._dynamo.reset()
    calls.clear()
    results(torch.compile(model, backend=backend, fullgraph=True))
    assert sum("gated_mlp_apart" in call for call in calls) == 1


def attend(groups: bool, causal: bool, scale: float | None = None, **options: Any) -> Callable[..., Tensor]:
    def function(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
        q, k, v = (F.linear(x, w).view(*x.shape[:-1], -1, 16).transpose(1, 2) for w in (wq, wk, wv))
        if groups:
            b, heads, s, d = k.shape
            k, v = (t[:, :, None].expand(b, heads, 2, s, d).reshape(b, 2 * heads, s, d) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, **options)
        return out.reshape(x.shape[0], -1, *out.shape[2:]).transpose(1, 2).flatten(2)

    return function


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("scale", [None, 0.25, 0.4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [True, False], ids=("repeated", "apart"))
def test_attention(groups: bool, causal: bool, scale: float | None) -> None:
    """Keys and values that are repeated for each group of queries are read once."""
    half = torch.bfloat16
    weights = [made(16 * n, K, seed=1 + i, dtype=half) for i, n in enumerate((4, 2, 2) if groups else (4, 4, 4))]
    compare(attend(groups, causal, scale), made(B, S, K, seed=0, dtype=half), *weights, found={"attention": 1})
    assert "scaled_dot_product_attention" not in {entry.what for entry in inductor.report().left}
    if groups:
        heads: list[Any] = []
        with enabled():
            torch._dynamo.reset()
            backend = _looking_at(lambda node: heads.append(node.args[1].meta["example_value"].shape[2]))
            torch.compile(attend(groups, causal, scale), backend=backend)(made(B, S, K, seed=0, dtype=half), *weights)
        assert heads == [2]


@pytest.mark.parametrize("fixed", [True, False])
def test_attention_sums_in_a_fixed_order_where_torch_is_told_to(fixed: bool) -> None:
    half, found = torch.bfloat16, list[Any]()
    weights = [made(64, K, seed=1 + i, dtype=half) for i in range(3)]
    torch.use_deterministic_algorithms(fixed)
    try:
        backend = _looking_at(lambda node: found.append(node.args[9]))
        torch.compile(attend(False, True), backend=backend)(made(B, S, K, seed=0, dtype=half), *weights)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == [fixed]


@pytest.mark.parametrize("number", [0.5, -1e4, math.inf])
def test_masks_that_add_other_numbers_stay(number: float) -> None:
    def attend(x: Tensor, w: Tensor) -> Tensor:
        q = F.linear(x, w).view(*x.shape[:-1], -1, 16).transpose(1, 2)
        mask = torch.full((x.shape[1], x.shape[1]), number, dtype=x.dtype).triu(1)
        return F.scaled_dot_product_attention(q, q, q, mask)

    half = torch.bfloat16
    torch.compile(attend, backend=only_the_pass, fullgraph=True)(
        made(B, S, K, seed=0, dtype=half), made(64, K, seed=1, dtype=half)
    )
    assert "attention" not in inductor.replaced and "attention_mask" not in inductor.replaced


def masked(allowed: Callable[[Tensor, Tensor], Tensor], added: bool = False) -> Callable[..., Tensor]:
    """Attention whose mask says which keys, by their places, a query attends to, as Hugging Face's models make it, or
    is ``added`` to scores.
    """

    def function(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
        q, k, v = (F.linear(x, w).view(*x.shape[:-1], -1, 16).transpose(1, 2) for w in (wq, wk, wv))
        places = torch.arange(x.shape[1])
        mask = allowed(places[None, None, :, None], places[None, None, None, :]).expand(x.shape[0], -1, -1, -1)
        mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, -math.inf) if added else mask
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

    return function


WINDOWS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[bool, int, int] | None]] = {
    "before": (lambda i, j: (j <= i) & (j > i - 3), (True, 2, -1)),
    "around": (lambda i, j: (j - i < 2) & (i - j < 4), (False, 3, 1)),
    "behind": (lambda i, j: (j >= i) & (j < i + 2), (False, 0, 1)),
    "all before": (lambda i, j: j - i <= 2, (False, -1, 2)),
    "with a first key": (lambda i, j: (j <= i) & ((j > i - 2) | (j == 0)), None),
    "blocks": (lambda i, j: i // 2 == j // 2, None),
    "of one query less": (lambda i, j: (j < i) & (j > i - 3), None),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.drawn(0.6)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name: str, added: bool) -> None:
    """A mask that follows from sizes and is a window becomes its limits; others stay."""
    (allowed, limits), half = WINDOWS[name], torch.bfloat16
    attend = masked(allowed, added)
    given = [made(B, 8, K, seed=0, dtype=half), *(made(64, K, seed=1 + i, dtype=half) for i in range(3))]
    if limits is None:
        torch.compile(attend, backend=only_the_pass, fullgraph=True)(*given)
        assert "attention" not in inductor.replaced
        return
    found: list[Any] = []
    torch.compile(attend, backend=_looking_at(lambda node: found.append(node.args[5:8])))(*given)
    assert found == [limits]
    replaced = dict(inductor.replaced)  # and parts of the mask, which nothing reads
    torch._dynamo.reset()
    inductor.replaced.clear()
    compare(attend, *given, found=replaced)


def _looking_at(look: Callable[[Any], Any]) -> Any:
    def backend(module: Any, inputs: Any) -> Any:
        made = only_the_pass(module, inputs)
        for node in module.graph.nodes:
            if str(node.target) == "cute.attention.default":
                look(node)
        return made

    return backend


@pytest.mark.slow
def test_attention_that_stays() -> None:
    """A mask, dropout, float32, one query, another repetition."""
    half = torch.bfloat16
    weights = [made(64, K, seed=1 + i, dtype=half) for i in range(3)]
    wide = [w.detach().float() for w in weights]
    mask = torch.ones(S, S, dtype=torch.bool).tril().flip(0)
    x, row = made(B, S, K, seed=0, dtype=half), made(B, 1, K, seed=0)
    cases: list[tuple[Any, list[Tensor]]] = [
        (attend(False, False, attn_mask=mask), [x, *weights]), (attend(False, False, dropout_p=0.5), [x, *weights]),
        (attend(False, True), [x.detach().float(), *wide]), (attend(False, True), [row.detach().to(half), *weights]),
    ]  # fmt: skip
    for function, given in cases:
        torch._dynamo.reset()
        inductor.replaced.clear()
        torch.compile(function, backend=only_the_pass, fullgraph=True)(*given)
        assert "attention" not in inductor.replaced
    torch._dynamo.reset()

    def interleaved(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
        q, k, v = (F.linear(x, w).view(B, S, -1, 16).transpose(1, 2) for w in (wq, wk[:32], wv[:32]))
        k, v = (t[:, None].expand(B, 2, 2, S, 16).reshape(B, 4, S, 16) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    inductor.replaced.clear()
    compare(interleaved, x, *weights, found={"attention": 1})  # of keys as they were repeated


@pytest.mark.slow
def test_biases_of_scores() -> None:
    """One that is looked up with its heads last, as T5's, reaches torch's attention with rows in one piece: its fused
    kernels take no other.
    """
    places, seen = torch.arange(S)[:, None] - torch.arange(S) + S, list[Any]()

    def function(x: Tensor, table: Tensor) -> Tensor:
        heads = x.view(B, S, -1, 6).transpose(1, 2)
        bias = F.embedding(places, table).permute(2, 0, 1)[None]
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias, scale=1.0).transpose(1, 2)

    def backend(module: Any, inputs: Any) -> Any:
        after = through_autograd(module, inputs)
        calls = [n for n in module.graph.nodes if "scaled_dot_product_attention" in str(n.target)]
        seen.extend(n.kwargs["attn_mask"].meta["example_value"].stride() for n in calls)
        return after

    given = made(B, S, K, seed=0), made(2 * S, K // 6, seed=1)
    compare(function, *given, found={"embedding": 1}, backend=backend)
    assert seen == [(K // 6 * S * S, S * S, S, 1)]


def test_logits_take_memory_that_the_backward_needs() -> None:
    """Chunks of the head's rows are larger behind gated MLPs, whose backward computes again what they do not keep."""
    seen, target = list[Any](), torch.randint(0, 64, (512,))

    def function(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, head: Tensor) -> Tensor:
        x = x + F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        return F.cross_entropy(F.linear(x, head).flatten(0, -2), target)

    def backend(module: Any, inputs: Any) -> Any:
        after = through_autograd(module, inputs)
        seen.extend(node.kwargs for node in module.graph.nodes if "cute.linear_cross_entropy" in str(node.target))
        return after

    for width, found in ((512, {"chunk_rows": 2048}), (48, {})):
        shapes = (2, 256, 16), (width, 16), (width, 16), (16, width), (64, 16)
        given = [made(*shape, seed=i) for i, shape in enumerate(shapes)]
        torch._dynamo.reset()
        inductor.replaced.clear()
        compare(function, *given, found={"gated_mlp": 1, "linear_cross_entropy": 1}, backend=backend)
        assert seen.pop() == found


@pytest.mark.parametrize("padding", [None, 3, -2])
def test_embeddings(padding: int | None) -> None:
    tokens = torch.tensor([[1, 3, 3, 0], [35, 1, 1, 7]])
    compare(lambda w: F.embedding(tokens, w, padding).sin(), made(37, K, seed=0), found={"embedding": 1})


@pytest.mark.slow
def test_embeddings_that_stay() -> None:
    tokens, table = torch.tensor([[1, 3, 3, 0]]), made(37, K, seed=0)
    for call in (lambda w: F.embedding(tokens, w.detach()), lambda w: F.embedding(tokens, w, scale_grad_by_freq=True)):
        torch._dynamo.reset()
        inductor.replaced.clear()
        torch.compile(call, backend=only_the_pass, fullgraph=True)(table)
        assert not inductor.replaced


# Fresh processes but for the imports, which take longer than the program.
PROGRAM = """
import os, sys, torch, torch._inductor.compile_fx, transformers
from torch._dynamo.utils import counters
from transformers import LlamaForCausalLM
from cute_ops_torch import inductor

for run in range(2):
    if not (child := os.fork()):
        break
    if os.waitpid(child, 0)[1]:
        sys.exit(f"process {run} failed")
else:
    os._exit(0)

config = transformers.LlamaConfig(
    hidden_size=128, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=64, vocab_size=61, use_cache=False,
)
torch.manual_seed(0)
model, tokens = LlamaForCausalLM(config).train().bfloat16(), torch.arange(18).view(2, 9)
inductor.enable(devices=("cpu",), logits=False)
torch.compile(model)(input_ids=tokens, labels=tokens).loss.backward()
hits = counters["aot_autograd"]["autograd_cache_hit"]
print(hits, *sorted(inductor.replaced.items()), flush=True)
os._exit(0)
"""


@pytest.mark.drawn(0.35, among="second processes")
@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    """Of an untouched Llama with all its parts: torch's caches hold the graphs that call our ops."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = (line.split(" ", 1) for line in done.stdout.splitlines())
    assert (first[0], second[0]) == ("0", "1")
    assert first[1] == second[1]
    assert all(name in first[1] for name in ("gated_mlp", "qkv_rope", "linear_add_rmsnorm", "attention", "embedding"))


def test_parts_are_replaced_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H100, with tensors that have no memory: many rows pay, few do not, and float32 has no kernel."""
    monkeypatch.setattr(choice, "target_of", lambda device: Target("sm_90a", 132))
    monkeypatch.setattr(DynamoFront, "device_of", lambda self, value: "cuda")
    monkeypatch.setattr(graph_pass.Replace, "_concerns", lambda self, graph: True)

    def plain(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, up, bias)), down)

    def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    shapes = {plain: ((4096, 1024), (4096,), (1024, 4096)), gated: ((4096, 1024), (4096, 1024), (1024, 4096))}
    found = {}
    for function, of_weights in shapes.items():
        for dtype, rows in ((torch.bfloat16, 16384), (torch.bfloat16, 16), (torch.float32, 16384)):
            torch._dynamo.reset()
            given = [torch.empty(s, dtype=dtype, device="meta") for s in ((rows, 1024), *of_weights)]
            with inductor.enable():
                torch.compile(function, backend=only_the_pass, fullgraph=True, dynamic=False)(*given)
                (entry,) = (each for each in inductor.report() if each.what.startswith("x, w_"))
            found[function.__name__, dtype, rows] = entry.becomes or entry.why
    few = "16 rows are too few: joining the weights would cost more than a pass"
    wide = "no kernel of a product takes float32"
    del found["plain", torch.bfloat16, 16]  # either may be as fast
    assert [*found.values()] == ["mlp", wide, "gated_mlp", few, wide]


def test_nested_tensors_stay() -> None:
    def ragged(values: Tensor, w: Tensor) -> Tensor:
        x = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 7]))
        made: Tensor = torch.compile(through, backend=through_autograd)(x, w).values()
        return made

    def through(x: Tensor, w: Tensor) -> Tensor:
        return F.silu(F.linear(F.layer_norm(x, (K,)), w)) * x

    values, w = made(7, K, seed=0), made(K, K, seed=1)
    torch.testing.assert_close(ragged(values, w), through(values, w))
    assert not inductor.replaced


# Attention that a model writes out


def _heads(x: Tensor, w: Tensor) -> list[Tensor]:
    return [(x @ each).unflatten(-1, (-1, 16)).transpose(1, 2) for each in w]


def _masked(scores: Tensor, low: int) -> Tensor:
    places = torch.arange(scores.shape[-1])
    ahead = places - places[:, None]
    return scores.masked_fill((ahead > 0) | (ahead < low), float("-inf"))


def _with_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As GPT-OSS writes it: one more column of scores, which is dropped behind the softmax."""
    scores = _masked(q @ k.mT * 0.25, -99)
    joined = torch.cat([scores, v[:1, :, :1, :1].expand(*scores.shape[:-1], 1)], -1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    weights = torch.softmax(joined, -1, dtype=torch.float32).to(v.dtype)
    return weights[..., :-1] @ v


def _masked_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As fairseq and ESM write it: heads and examples are one batch for products, and two dims for a padding mask."""
    padded = torch.arange(24) >= torch.linspace(9, 15, q.shape[0])[:, None]
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).unflatten(0, q.shape[:2])
    scores = scores.masked_fill(padded[:, None, None], float("-inf")).flatten(0, 1)
    return torch.bmm(torch.softmax(scores, -1), v.flatten(0, 1)).unflatten(0, q.shape[:2])


WRITTEN: dict[str, tuple[Callable[..., Tensor], str]] = {
    "scaled": (lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1) * 0.2, -1) @ v, "q, k, v"),
    "in float32": (
        lambda q, k, v: torch.softmax(q @ k.transpose(-2, -1) / 4, -1, dtype=torch.float32).to(q.dtype) @ v, "q, k, v",
    ),
    "causal": (lambda q, k, v: torch.softmax(_masked(q @ k.mT * 0.25, -99), -1) @ v, "q, k, v, causal"),
    "window": (lambda q, k, v: torch.softmax(_masked(q @ k.mT * 0.25, -3), -1) @ v, "q, k, v, left=3, right=0"),
    "capped": (lambda q, k, v: torch.softmax(5 * torch.tanh(q @ k.mT * 0.05), -1) @ v, "q, k, v, softcap=5"),
    "sinks": (_with_sinks, "q, k, v, sinks, causal"),
    "learned bias of keys": (
        lambda q, k, v: torch.softmax(q @ k.mT * 0.25 + v[..., :1].mT, -1) @ v, "q, k, v, captured0, scores changed",
    ),
    "learned bias of heads": (
        lambda q, k, v: torch.softmax(q @ k.mT * 0.25 + q[:1] @ q[:1].mT, -1) @ v, "q, k, v, captured0, scores changed",
    ),
    "one batch": (
        lambda q, k, v: torch.bmm(
            torch.softmax(torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) * 0.25, -1), v.flatten(0, 1)
        ).unflatten(0, q.shape[:2]),
        "q, k, v",
    ),
    "einsum": (
        lambda q, k, v: torch.einsum(
            "b h i j, b h j d -> b h i d", torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * 0.25, -1), v
        ),
        "q, k, v",
    ),
    "masked by head": (_masked_by_head, "q, k, v, captured0, scores changed"),
    "scaled by an array": (
        lambda q, k, v: torch.softmax(q @ k.mT * torch.linspace(0.25, 0.25, 1)[0].to(q.dtype), -1) @ v,
        "q, k, v, captured0, scores changed",
    ),
    "repeated": (
        lambda q, k, v: torch.softmax(q @ k[:, :1, None].expand(-1, 1, 2, -1, -1).flatten(1, 2).mT, -1) @ v, "q, k, v",
    ),
}  # fmt: skip


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize(("form", "batch"), [*((form, 2) for form in WRITTEN), ("causal", 1)])
def test_attention_that_is_written_out_becomes_attention(
    form: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    function, said = WRITTEN[form]
    if form.startswith("learned"):  # however few scores there are
        monkeypatch.setattr(written_attention, "LEAST_LEARNED", 0)
        monkeypatch.setattr(written_attention, "LEAST_LEARNED_KEYS", 0)
    entries = _run_attention(function, batch)
    assert [entry.what for entry in entries if entry.becomes == "attention"] == [said]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dropout", "learned bias", "weights that are read", "one in the sum"])
def test_what_attention_does_not_compute_stays(form: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        if form == "learned bias":
            scores = scores + v[..., :1].mT
        weights = torch.softmax(scores, -1)
        if form == "one in the sum":
            weights = scores.float().exp() / (1 + scores.float().exp().sum(-1, keepdim=True))
            weights = weights.to(v.dtype)
        made = F.dropout(weights, 0.0 if form != "dropout" else 1e-9, True) @ v
        return made + weights.sum() if form == "weights that are read" else made

    entries = _run_attention(function)
    assert "attention" not in {entry.becomes for entry in entries}


def _hidden(scores: Tensor, of: Tensor, kind: str, how: str, low: float) -> Tensor:
    """Scores with a mask that a program computes from what it is given."""
    if kind.startswith("floats"):
        return scores + of
    keep = {
        "ones and zeros": lambda: of[:, None, None] > 0, "segments": lambda: (of[:, :, None] == of[:, None])[:, None],
        "lengths": lambda: (torch.arange(scores.shape[-1]) < of[:, None])[:, None, None],
    }[kind]()  # fmt: skip
    if how == "added":
        added = (1.0 - keep.to(scores.dtype)) * low if low > -math.inf else torch.where(keep, 0.0, low)
        return scores + added
    return scores.masked_fill(~keep, low) if how == "filled" else torch.where(keep, scores, low)


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("of", ["ones and zeros", "lengths", "segments", "floats", "floats of heads"])
@pytest.mark.parametrize("low", [-math.inf, torch.finfo(torch.bfloat16).min, -1e9])
def test_masks_of_data_in_written_attention(of: str, low: float) -> None:
    """Padding, segments and biases without a gradient; an example without keys gets what the program gives it."""
    draw = random.Random(f"{of} {low}")
    lengths = torch.tensor([draw.choice([0, 5]), draw.randrange(1, 25)])
    seen = torch.arange(24) < lengths[:, None]
    given = {
        "ones and zeros": lambda: seen.long(),
        "lengths": lambda: lengths,
        "segments": lambda: torch.randint(1, 4, (2, 24)).sort(-1)[0],
        "floats": lambda: torch.where(seen, 0.0, low)[:, None, None],
        "floats of heads": lambda: torch.where(torch.rand(2, 24, 24) < 0.5, torch.randn(2, 24, 24), low),
    }[of]()
    how, causal, wide = draw.choice(["filled", "chosen", "added"]), draw.random() < 0.5, draw.random() < 0.5

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * 0.25
        scores = _masked(scores.float() if wide else scores, -99) if causal else scores
        weights = torch.softmax(_hidden(scores, given, of, how, low), -1, dtype=torch.float32)
        return weights.to(v.dtype) @ v

    entries = _run_attention(function)
    assert [entry.what for entry in entries if entry.becomes == "attention"]


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("how", ["masked_fill_", "setitem", "view", "and", "copy", "clone"])
@pytest.mark.parametrize("behind", [True, False])
def test_masks_that_a_program_writes_to(how: str, behind: bool) -> None:
    """A mask that begins as one of sizes alone, and gets its values in place."""
    draw = random.Random(f"{how} {behind}")
    end, hidden = draw.randrange(3, 20), torch.rand(24, 24) < 0.5
    hidden[:, 0] = False

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if how == "and":
            keep = torch.ones(24, 24, dtype=torch.bool)
            keep.logical_and_(~hidden)
            scores = (q @ k.mT * 0.25).masked_fill(~keep, -math.inf)
        else:
            mask = torch.zeros(24, 24, dtype=q.dtype)
            if how == "setitem":
                mask[:, end:] = -math.inf
            elif how == "view":
                mask[:, end:].fill_(-math.inf)
            elif how == "copy":
                mask.copy_(torch.where(hidden, -math.inf, 0.0))
            else:
                mask.masked_fill_(hidden, -math.inf)
            scores = q @ k.mT * 0.25 + (mask.clone() if how == "clone" else mask)
        made = torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v
        return made * 2 if behind else made

    _run_attention(function)


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("number", [1001.0, -259.3])
@pytest.mark.parametrize("make", [torch.full, lambda size, fill, dtype: torch.tensor(fill, dtype=dtype)])
def test_new_tensors_hold_what_their_dtype_does(make: Callable[..., Tensor], number: float) -> None:
    def function(x: Tensor) -> Tensor:
        held = make((256,), number, dtype=torch.bfloat16).float()
        return torch.softmax(x * held - x * number, -1)

    x = torch.randn(8, 256)
    torch._dynamo.reset()
    with enabled():
        made = torch.compile(function, backend=through_autograd, fullgraph=True)(x)
    torch.testing.assert_close(made, function(x), atol=1e-3, rtol=1e-2)


def _run_attention(function: Callable[..., Tensor], batch: int = 2) -> Any:
    """Values and gradients of a layer around a written attention, beside the eager ones; the report."""
    from cute_ops_torch import inductor

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return function(*_heads(x, w)).transpose(1, 2).flatten(-2)

    x, w = (
        torch.randn(batch, 24, 32).bfloat16().requires_grad_(),
        (torch.randn(3, 32, 32) / 5).bfloat16().requires_grad_(),
    )
    torch._dynamo.reset()
    with enabled():
        results = []
        for run in (layer, torch.compile(layer, backend=through_autograd, fullgraph=True)):
            out = run(x, w)
            known = torch.where(out.isnan(), 0.0, out.float())  # of queries without keys there may be none
            results.append([out, *torch.autograd.grad(known.sin().sum(), (x, w))])
        assert torch.equal(results[0][0].isnan(), results[1][0].isnan())
        for got, want in zip(results[1], results[0], strict=True):
            assert got.shape == want.shape
            there = ~want.isnan()
            assert (got[there] - want[there]).norm() <= 0.02 * want[there].norm()
        return inductor.report()


def test_rows_masked_whole_in_float16_keep_their_scores() -> None:
    """A mask adds float16's lowest number to every score of a row.

    Float16 rounds the sums, so that eager attends to all keys alike. In a replaced part they stay in float32.
    """
    lowest = torch.finfo(torch.float16).min
    scores, bias, v = torch.randn(4, 24, 16) * 3, torch.full((24, 16), lowest).tril(-8), torch.randn(4, 16, 32)
    narrow = [each.half() for each in (scores, bias, v)]

    def attend(scores: Tensor, bias: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(4 * torch.tanh(scores / 4) + bias, -1) @ v

    with torch.no_grad():
        want = attend(*(each.double() for each in narrow))
        got = torch.compile(attend, backend=only_the_pass, fullgraph=True)(*narrow)
        assert inductor.replaced == {"fused": 1}
        assert (got.double() - want).abs().max() <= 2**-8
        assert (attend(*narrow).double() - want).abs().max() >= 0.5


def test_a_bias_stays_with_its_product_where_roundings_are_kept() -> None:
    """Torch adds it before it rounds, so a pass after the product would round once more."""
    x, w, b = (torch.randn(*shape).bfloat16() for shape in ((3, 16), (16, 16), (16,)))
    torch._dynamo.reset()
    with enabled(exact=True), torch.no_grad():
        for product in (lambda x, w, b: F.linear(x, w, b), lambda x, w, b: torch.addmm(b, x, w)):
            function = lambda x, w, b, product=product: torch.softmax(F.gelu(product(x, w, b)) * 2 + x, -1)  # noqa: E731
            assert torch.equal(torch.compile(function, backend=only_the_pass)(x, w, b), function(x, w, b))


@pytest.mark.parametrize("written", [False, True])
def test_results_whose_layout_spreads(written: bool) -> None:
    """The program's sum lies by columns and ours by rows, and so does what torch computes from it."""

    def function(x: Tensor, r: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        total = x.mT + r
        turned = total.mT.cos()
        flat = total.cos().reshape(B, -1)  # a copy, of what lies by columns
        flat = flat.mul_(2.0) if written else flat * 2
        return F.layer_norm(total, (8,), w), F.rms_norm(turned, (S,), g), flat

    found = {"rmsnorm": 1} if written else {"fused": 1, "rmsnorm": 1}
    given = made(B, 8, S, seed=0), made(B, S, 8, seed=1), made(S, seed=2), made(8, seed=3)
    compare(function, *given, found=found)


@pytest.mark.parametrize("shared", [False, True])
def test_programs_return_what_lies_as_before(shared: bool) -> None:
    """Copies of what is computed of our rows; not where two results are one array, of which one would be copied."""

    def function(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        sine = (total := x.mT + r).sin()
        return F.layer_norm(total, (8,), w), sine, sine[:1] if shared else sine[:1] * 2

    given = made(B, 8, S, seed=0), made(B, S, 8, seed=1), made(8, seed=3)
    compare(function, *given, found={} if shared else {"fused": 1})


def test_results_whose_layout_spreads_to_sizes_that_depend_on_data() -> None:
    """Compilers forgive no such size that they have not traced."""

    def function(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        turned = (total := x.mT + r).cos()
        return F.layer_norm(total, (8,), w), turned[turned > 0.5].sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compare(function, made(B, 8, S, seed=0), made(B, S, 8, seed=1), made(8, seed=3), found={})


def test_inductor_may_lay_out_what_a_backward_reads_otherwise() -> None:
    """It runs convolutions channels last, whatever the program does: fake tensors of their outputs come so, and the
    lowering of an op lays them out as it takes them.
    """
    from torch._inductor.debug import DebugContext
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        x, weight = torch.empty(B, 8, S).mT, torch.empty(8)
        with pytest.raises(ValueError, match="stride"):
            torch.ops.cute.rmsnorm(x, weight)
        with DebugContext():  # which Inductor enters before all that it does
            assert torch.ops.cute.rmsnorm(x, weight)[0].shape[-1] == 8


@pytest.mark.parametrize("seed", range(6))
def test_what_only_a_detached_result_reads_gets_no_gradient(seed: int) -> None:
    """A gradient of zeros in place of None would let an optimizer decay a weight that takes no part."""
    rng = random.Random(seed)
    norm = rng.choice((torch.nn.LayerNorm, torch.nn.RMSNorm))
    modules = torch.nn.ModuleDict({name: norm(K) for name in ("first", "second")})
    modules["up"] = torch.nn.Linear(K, K)
    before, with_norm, cast, also = (rng.random() < 0.5 for _ in range(4))

    def function(x: Tensor, y: Tensor) -> Tensor:
        h = modules["first"](x) if before else modules["up"](x) if also else x + y
        read = modules["second"](h)
        shown = read.double().detach().float() if cast else read.detach()
        return h * shown + (modules["first"](h) if with_norm else y)

    found = []
    for run in (function, torch.compile(function, backend=through_autograd, fullgraph=True)):
        modules.zero_grad()
        given = [made(B, K, seed=i) for i in (seed, seed + 1)]
        run(*given).square().sum().backward()
        found.append([*(p.grad for p in modules.parameters()), *(t.grad for t in given)])
    want, got = found
    assert [each is None for each in got] == [each is None for each in want]
    for a, b in zip(got, want, strict=True):
        assert a is b is None or torch.allclose(a, b, rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]


def test_a_detached_result_whose_operands_are_trained_otherwise_stays_in_an_op() -> None:
    def function(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + y
        return h, F.rms_norm(h, (K,), weight.detach()).detach()

    x, y, weight = made(B, K, seed=1), made(B, K, seed=2), made(K, seed=3).detach()
    x.data, y.data = x.data * 3, y.data * 3
    compiled = torch.compile(function, backend=through_autograd, fullgraph=True)
    for got, want in zip(compiled(x, y, weight), function(x, y, weight), strict=True):
        torch.testing.assert_close(got, want)
    assert sum(inductor.replaced.values()) == 1


@pytest.mark.parametrize("first", [False, True])
def test_products_whose_tensors_are_given_by_name(first: bool) -> None:
    """As timm's BEiT and Swin give them: such a graph stayed as it was."""
    x, weight, bias = torch.randn(3, 16), torch.randn(16, 16), torch.randn(16)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        product = F.linear(input=x, weight=weight, bias=bias) if first else F.linear(x, weight=weight, bias=bias)
        return F.gelu(product)

    want = function(x, weight, bias)
    torch._dynamo.reset()
    with enabled():
        torch.testing.assert_close(torch.compile(function, backend=only_the_pass)(x, weight, bias), want)
        assert [entry.becomes for entry in inductor.report()] == ["linear"]
