"""Residual adds that compute the norm which reads their sums, in models of any build."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import cute_ops_torch
from cute_ops_torch.huggingface import residual_norm, sums
from tests.torch.test_torch_patch_families import make

transformers = pytest.importorskip("transformers")
TOKENS = torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(5))
# By family: the op, and how many of a step's norms are computed with the add before them, of two layers.
FAMILIES = {
    "bert": ("add_layernorm", 4), "gpt2": ("add_layernorm", 4), "modernbert": ("add_layernorm", 4),
    "gemma2": ("add_rmsnorm", 4), "olmo2": ("add_rmsnorm", 1), "gpt_oss": ("add_rmsnorm", 4),
    "mamba": ("add_rmsnorm", 2), "qwen3_moe": ("add_rmsnorm", 2),
}  # fmt: skip


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The norms that were taken from sums."""
    found: list[nn.Module] = []
    pop = residual_norm.pop

    def noted(norm: nn.Module, total: torch.Tensor) -> torch.Tensor | None:
        normed = pop(norm, total)
        found.extend([] if normed is None else [norm])
        return normed

    monkeypatch.setattr(residual_norm, "pop", noted)
    return found


def without_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def step(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        scale = max(1.0, float(grad.abs().max()))
        torch.testing.assert_close(got[1][name], grad, rtol=1e-4, atol=2e-6 * scale, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("family", FAMILIES)
def test_adds_compute_the_norms_that_read_them(family: str, taken: list[nn.Module]) -> None:
    model = without_dropout(make(family))
    want, (op, count) = step(model), FAMILIES[family]
    found = cute_ops_torch.patch(model)
    assert op in {each.op for each in found} and not [e for e in found.left if "layer" in e.kind]
    close(step(model), want)
    del taken[:]
    close(step(model), want)
    assert len(taken) == count
    cute_ops_torch.unpatch(model)
    assert not [name for module in model.modules() for name in vars(module) if name.startswith("_cute")]
    close(step(model), want)


def test_what_changes_between_an_add_and_its_norm_is_seen(taken: list[nn.Module]) -> None:
    model = without_dropout(make("gpt2"))
    cute_ops_torch.patch(model)
    step(model)
    block: Any = model.transformer.h[1]

    def changed(change: Any, undo: Any) -> list[nn.Module]:
        plain = copy.deepcopy(model)
        cute_ops_torch.unpatch(plain)
        for each in (plain, model):
            change(each.transformer)
        del taken[:]
        got, used = step(model), [*taken]
        close(got, step(plain))
        undo(model.transformer)
        return used

    hooks: list[Any] = []
    hook = changed(
        lambda t: hooks.append(t.h[1].ln_2.register_forward_pre_hook(lambda m, args: (args[0] * 2,))),
        lambda t: [each.remove() for each in hooks],
    )
    assert {block.ln_1, block.ln_2}.isdisjoint(hook) and model.transformer.ln_f in hook
    step(model)
    behind = changed(
        lambda t: hooks.append(t.h[0].register_forward_hook(lambda m, args, out: _write(out))),
        lambda t: hooks.pop().remove(),
    )
    assert block.ln_1 not in behind and block.ln_2 in behind
    others = changed(lambda t: setattr(t, "h", nn.ModuleList([t.h[1], t.h[0]])), lambda t: None)
    assert block.ln_2 in others and block.ln_1 not in others  # it reads the embeddings
    del taken[:]
    step(model)
    assert len(taken) == 4  # learned anew


def _write(x: Any) -> None:
    (x[0] if isinstance(x, tuple) else x)[:, -1] *= 1.5


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gpt_neox"])
def test_sums_that_are_seen_have_all_of_their_gradients(family: str) -> None:
    """Where a model returns them, hooks get them or write their gradients, or layers are called one by one."""
    plain: Any = without_dropout(make(family))
    model = copy.deepcopy(plain)
    cute_ops_torch.patch(model)
    step(model)

    def returned(model: Any) -> list[torch.Tensor]:
        out = model(input_ids=TOKENS, labels=TOKENS, output_hidden_states=True)
        return [*torch.autograd.grad(out.loss, out.hidden_states)]

    def hooked(model: Any, before: bool) -> list[torch.Tensor]:
        base, seen = model.base_model, list[torch.Tensor]()
        layers = base.h if family == "gpt2" else base.layers
        if before:
            reads = layers[1].post_attention_layernorm if family == "gpt_neox" else layers[1]  # beside the other norm
            handle = reads.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
        else:
            handle = layers[0].register_forward_hook(
                lambda m, args, out: seen.append(out[0] if isinstance(out, tuple) else out)
            )
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        handle.remove()
        return [*torch.autograd.grad(loss, seen)]

    def one_by_one(model: Any) -> list[torch.Tensor]:
        x = seen = model.transformer.wte(TOKENS)
        for block in model.transformer.h:
            seen, x = x, block(x)
            _write(x)
        return [*torch.autograd.grad(model.transformer.ln_f(x).sin().sum(), [seen])]

    def wrapped(model: Any) -> list[torch.Tensor]:
        layer = (model.base_model.h if family == "gpt2" else model.base_model.layers)[0]
        plainly = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            out = plainly(*args, **kwargs)
            (out[0] if isinstance(out, tuple) else out).register_hook(lambda gradient: gradient * 2)
            return out

        layer.forward = forward
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        del layer.forward
        return [*torch.autograd.grad(loss, [*layer.parameters()])]

    alone = [one_by_one] if family == "gpt2" else []
    for way in (returned, partial(hooked, before=False), partial(hooked, before=True), wrapped, *alone):
        got, want = ({str(k): x for k, x in enumerate(way(each))} for each in (model, plain))
        close((TOKENS, got), (TOKENS, want))


class Hooked(nn.Module):
    """Layers whose sums have gradients that are halved and kept."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.h, self.norm = model.transformer.h, model.transformer.ln_f

    def forward(self, x: torch.Tensor, kept: list[torch.Tensor]) -> Any:
        for layer in self.h:
            x = layer(x)
            x.register_hook(lambda gradient: gradient * 0.5)
            x.retain_grad()
            kept.append(x)
        return self.norm(x)


def test_gradients_of_sums_that_a_model_changes(taken: list[nn.Module]) -> None:
    plain = Hooked(without_dropout(make("gpt2")))
    model, width = copy.deepcopy(plain), plain.norm.weight.numel()
    x = torch.linspace(-1, 1, 6 * width).view(2, 3, width).sin()
    cute_ops_torch.patch(model)
    for _ in range(2):
        found = []
        for each in (model, plain):
            each.zero_grad()
            kept: list[torch.Tensor] = []
            each(x, kept).sin().sum().backward()
            found.append({str(k): x.grad for k, x in enumerate([*kept, *each.parameters()])})
        close(*((TOKENS, each) for each in found))
    assert model.norm not in taken


class Listed(nn.Module):
    """Layers whose sums are returned if they are asked for."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.h, self.norm = model.transformer.h, model.transformer.ln_f

    def forward(self, x: torch.Tensor, asked: bool) -> Any:
        states = []
        for layer in self.h:
            x = layer(x)
            states.append(x)
        return self.norm(x), (states if asked else [])


def test_gradients_of_sums_that_a_model_returns(taken: list[nn.Module]) -> None:
    plain = Listed(without_dropout(make("gpt2")))
    models, width = [copy.deepcopy(plain) for _ in range(2)], plain.norm.weight.numel()
    x = torch.linspace(-1, 1, 6 * width).view(2, 3, width).sin()

    def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
        out, states = model(x, True)
        return {str(k): x for k, x in enumerate(torch.autograd.grad(out.sin().sum(), states))}

    for k, model in enumerate(models):
        cute_ops_torch.patch(model)
        for _ in range(2 * k):
            model(x, False)[0].sum().backward()
        assert (model.norm in taken) == bool(k)
        if k:  # sums are handed on already
            with pytest.raises(RuntimeError, match="not have been used in the graph"):
                gradients(model)
        for _ in range(3):
            close((TOKENS, gradients(model)), (TOKENS, gradients(plain)))


class Embeddings(nn.Module):
    """Sums of which one is changed in place before its norm reads it, as in the embeddings of FNet and others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        total = x + 2 * x
        kept = total
        if how == "+=":
            kept += x
        elif how == "[]":
            total[0] = x[0]
        elif how == ".add_":
            total.add_(x)
        return self.second(self.first(total) + x)


class Rectified(Embeddings):
    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        total = x + 2 * x
        nn.functional.leaky_relu(total, 0.5, inplace=True)
        return self.second(self.first(total) + x)


@pytest.mark.parametrize("how", ["+=", "[]", ".add_", "relu", ""])
def test_a_sum_that_is_changed_in_place_is_no_add_with_a_norm(how: str, taken: list[nn.Module]) -> None:
    model = Rectified() if how == "relu" else Embeddings()

    def run() -> list[torch.Tensor]:
        x = torch.linspace(-2, 3, 96).view(2, 3, 16).sin().requires_grad_()
        out = model(x, how)
        return [out, *torch.autograd.grad(out, x, x.detach())]

    want = run()
    assert "add_layernorm" in {each.op for each in cute_ops_torch.patch(model)}
    for _ in range(2):
        torch.testing.assert_close(run(), want, rtol=1e-5, atol=1e-5)
    assert model.second in taken and (model.first in taken) == (not how)


@pytest.mark.parametrize("family", ["fnet", "yoso"])
def test_embeddings_that_are_added_in_place(family: str) -> None:
    model = without_dropout(make(family))
    want = step(model)
    cute_ops_torch.patch(model)
    for _ in range(2):
        close(step(model), want)


def test_checkpoints_run_parts_of_a_model_alone(taken: list[nn.Module]) -> None:
    # All sums stay in their part, whose second forward ends before its last norm; half of them do.
    for family, count in (("bert", 4 + 2), ("gpt2", 2 + 2)):
        model = without_dropout(make(family))
        want = step(model)
        cute_ops_torch.patch(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        step(model)
        del taken[:]
        close(step(model), want)
        assert len(taken) == count, family


@pytest.mark.parametrize(("decoder", "norm"), [(True, "final_layer_norm"), (False, "encoder_attn_layer_norm")])
def test_which_of_several_norms_reads_a_sum_depends_on_the_call(
    decoder: bool, norm: str, taken: list[nn.Module]
) -> None:
    """A decoder that is given no encoder's states passes by the norm of the attention to these: it has no gradient."""
    cls = transformers.MBartForCausalLM if decoder else transformers.MBartForConditionalGeneration
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 1), ("ffn_dim", 24))}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "dropout": 0.0}
    torch.manual_seed(0)
    model = cls(transformers.MBartConfig(vocab_size=97, d_model=16, **sizes, **heads)).train()
    want = step(model)
    cute_ops_torch.patch(model)
    for _ in range(2):
        taken.clear()
        close(step(model), want)
    assert model.model.decoder.layers[0].get_submodule(norm) in taken
    model.gradient_checkpointing_enable({"use_reentrant": False})
    close(step(model), want)


class Chosen(nn.Module):
    """Layers whose inner norm is chosen by a flag of the call, or left out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.f = nn.LayerNorm(width), nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, flag: int) -> torch.Tensor:
        x = y = x + self.f(x)
        if flag == 1:
            y = self.a(x)
        elif flag == 2:
            y = self.b(x)
        return x + self.f(y)


class ChosenTwice(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Chosen(width), Chosen(width)])

    def forward(self, x: torch.Tensor, flag: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, flag)
        return x


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_norms_that_a_flag_leaves_out_have_no_gradients(compiled: bool) -> None:
    """Not zeros, which an optimizer with weight decay would take for gradients."""
    plain = ChosenTwice(16)
    model = copy.deepcopy(plain)
    cute_ops_torch.patch(model)
    run = torch.compile(model, backend="aot_eager") if compiled else model
    x = torch.linspace(-1, 1, 6 * 16).view(2, 3, 16).sin()
    for flag in (1, 1, 2, 0, 2, 1):
        found = []
        for each, call in ((model, run), (plain, plain)):
            each.zero_grad()
            loss = call(x, flag).sin().sum()
            loss.backward()
            found.append((loss, {name: p.grad for name, p in each.named_parameters() if p.grad is not None}))
        close(*found)


def test_an_op_that_is_not_wanted_adds_alone(taken: list[nn.Module]) -> None:
    model = without_dropout(make("bert"))
    want = step(model)
    found = cute_ops_torch.patch(model, without=["add_layernorm"])
    assert "add_layernorm" not in {each.op for each in found}
    step(model)
    close(step(model), want)
    assert not taken


def test_sums_of_other_things_are_sums() -> None:
    module, x = nn.LayerNorm(4), torch.randn(2, 4)
    for a, b in ((1, 2), (x, 1.0), (x, x[0]), (x, x.double()), (x[0], x[0]), ("a", "b")):
        got = sums.add(module, (0, ()), a, b)
        assert type(got) is type(a + b) and (got == a + b if not isinstance(got, torch.Tensor) else got.equal(a + b))
    turned = torch.randn(2, 4, 3).mT
    got = sums.add(module, (0, ("norm",)), turned, torch.zeros(2, 3, 4))
    assert got.is_contiguous() and torch.equal(got, turned)
