"""MLPs without a gate in patched Hugging Face models: which run as one op, when they do not, and what they compute."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import silu

import cute_ops_torch
from cute_ops_torch.huggingface import plain_mlp, statements

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(0))
BOTH = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :7]}


class Family(NamedTuple):
    """A model without its heads.

    Attributes:
        name: of its classes.
        config: what its configuration is given.
        inputs: what it is called with.
        mlp: the name of the module that has the first MLP.
        activation: what the op is called with.
        trains: whether the MLP is one op in training as it is configured.
    """

    name: str
    config: dict[str, Any]
    inputs: dict[str, torch.Tensor]
    mlp: str
    activation: str
    trains: bool = True

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.name}Config")(**self.config)
        model: nn.Module = getattr(transformers, f"{self.name}Model")(config)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.randn_like(p))
        return model


WHISPER = {
    "d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 97, "max_source_positions": 50,
    "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
T5 = {"d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 97}
IMAGES, SOUND = torch.randn(2, 3, 32, 32), torch.randn(2, 8, 100)
DECODER = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 97}
ALBERT = "encoder.albert_layer_groups.0.albert_layers.0"
TEXT, SPOKEN = {"input_ids": TOKENS}, {"input_features": SOUND, "decoder_input_ids": TOKENS}
FAMILIES = (
    Family("Bert", SIZES, TEXT, "encoder.layer.0", "gelu"),
    Family("Albert", {**SIZES, "embedding_size": 32}, TEXT, ALBERT, "gelu_tanh"),
    Family("ViT", {**SIZES, "image_size": 32, "patch_size": 8}, {"pixel_values": IMAGES}, "layers.0.mlp", "gelu"),
    Family("CLIPText", SIZES, TEXT, "encoder.layers.0.mlp", "quick_gelu"),
    Family("Nemotron", DECODER, TEXT, "layers.0.mlp", "relu2"),
    Family("GPT2", GPT2, TEXT, "h.0.mlp", "gelu_tanh"),
    Family("T5", T5, BOTH, "encoder.block.0.layer.1.DenseReluDense", "relu", trains=False),
    Family("T5", {**T5, "dropout_rate": 0.0}, BOTH, "decoder.block.1.layer.2.DenseReluDense", "relu"),
    Family("Whisper", WHISPER, SPOKEN, "decoder.layers.1", "gelu"),
    Family("Whisper", {**WHISPER, "activation_dropout": 0.2}, SPOKEN, "encoder.layers.0", "gelu", trains=False),
)  # fmt: skip


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The activations of the calls of our op."""
    found, mlp = list[str](), plain_mlp.mlp

    def counted(*given: Any, **options: Any) -> Any:
        found.append(given[5])
        return mlp(*given, **options)

    monkeypatch.setattr(plain_mlp, "mlp", counted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield found


def results(model: Any, inputs: dict[str, torch.Tensor], train: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)  # of dropout
    model.train(train).zero_grad()
    out = model(**inputs)[0]
    out.float().square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def check(model: nn.Module, inputs: dict[str, torch.Tensor], expected: list[list[torch.Tensor]]) -> None:
    for train, wanted in zip((False, True), expected, strict=True):
        largest = max(float(g.norm()) for g in wanted[1:])
        for got, right in zip(results(model, inputs, train), wanted, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-4, atol=2e-6 * max(1.0, largest))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f"{f.name}-{f.mlp}")
def test_families(family: Family, ran: list[str]) -> None:
    """In evaluation and in training, where active dropout between both layers lets the original run."""
    model = family.make()
    expected = [results(model, family.inputs, train) for train in (False, True)]
    replaced = cute_ops_torch.patch(model)
    assert (family.mlp, "mlp") in [*map(tuple, replaced)]
    assert family.mlp not in {each.module for each in replaced.left if each.kind == "MLP"}
    mlps = sum(op == "mlp" for _, op in replaced) * (2 if family.name == "Albert" else 1)  # which shares its layers
    check(model, family.inputs, expected)
    assert ran == [family.activation] * mlps * (1 + family.trains)
    cute_ops_torch.unpatch(model)
    ran.clear()
    check(model, family.inputs, expected)
    assert not ran


def test_gates_of_t5(ran: list[str]) -> None:
    family = Family("T5", {**T5, "feed_forward_proj": "gated-gelu"}, BOTH, "", "")
    model = family.make()
    expected = [results(model, BOTH, train) for train in (False, True)]
    replaced = cute_ops_torch.patch(model)
    assert ("encoder.block.0.layer.1.DenseReluDense", "gelu_mul") in [*map(tuple, replaced)]
    check(model, BOTH, expected)


def _hook(model: Any) -> None:
    model.encoder.layer[0].output.dense.register_forward_hook(lambda module, given, out: 2 * out)


def _hook_of_the_module(model: Any) -> None:
    model.encoder.layer[0].intermediate.register_forward_pre_hook(lambda module, given: (3 * given[0],))


def _other_activation(model: Any) -> None:
    model.encoder.layer[0].intermediate.intermediate_act_fn = nn.Tanh()


def _own_forward(model: Any) -> None:
    model.encoder.layer[0].intermediate.dense.forward = torch.sin


def _own_method(model: Any) -> None:
    layer = model.encoder.layer[0]
    layer.feed_forward_chunk = lambda attention_output: attention_output * 2


@pytest.mark.parametrize("change", [_hook, _hook_of_the_module, _other_activation, _own_forward, _own_method])
def test_a_changed_layer_of_bert_runs_by_itself(change: Callable[[Any], None], ran: list[str]) -> None:
    family = FAMILIES[0]._replace(config={**SIZES, "intermediate_size": 64})
    plain, patched = family.make(), family.make()
    cute_ops_torch.patch(patched)
    for model in (plain, patched):
        change(model)
    check(patched, family.inputs, [results(plain, family.inputs, train) for train in (False, True)])
    assert ran == ["gelu"] * 2  # the other layer


@pytest.mark.slow
def test_autocast_and_compiled(ran: list[str]) -> None:
    family = FAMILIES[2]
    plain, patched = family.make().eval(), family.make().eval()
    cute_ops_torch.patch(patched)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = (model(**family.inputs)[0] for model in (patched, plain))
    assert ran == ["gelu"] * 2 and found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
    torch._dynamo.reset()
    compiled = torch.compile(patched.layers[0].mlp, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 5, 64)
    torch.testing.assert_close(compiled(x), plain.layers[0].mlp(x))
    assert ran == ["gelu"] * 3


class Written(nn.Module):
    """An MLP in words of its own."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 20, bias), nn.Linear(20, 8, bias)
        self.act, self.drop = nn.GELU("tanh"), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, double: bool = False) -> torch.Tensor:
        if double:
            x = 2 * x
        else:
            y = self.first(x)
            y = self.act(y)
            x = self.second(self.drop(y))
        return x


class Both(nn.Module):
    """Two MLPs: which of them is one op does not matter to what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.act = nn.Linear(12, 20), nn.Linear(20, 12), nn.Linear(12, 20), nn.SiLU()
        self.d = nn.Linear(20, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.act(self.a(x)))
        return self.d(self.act(self.c(x)))


class Kept(nn.Module):
    """What is between is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(12, 20), nn.Linear(20, 20), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.a(x))
        x = self.b(y)
        return x + y


def test_modules_of_ones_own(ran: list[str]) -> None:
    x = torch.randn(3, 12)
    for module, calls in ((Written(), 1), (Written(bias=False), 1), (Both(), 1), (Kept(), 0)):
        expected = module.eval()(x)
        if calls:
            cute_ops_torch.patch(module)
        else:
            with pytest.raises(ValueError, match="no module that is known"):
                cute_ops_torch.patch(module)
        torch.testing.assert_close(module(x), expected)
        assert len(ran) == calls
        ran.clear()
    module = Written()
    cute_ops_torch.patch(module)
    assert torch.equal(module(x, double=True), 2 * x) and torch.equal(module(x=x, double=True), 2 * x)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):  # the original's own error
        module(x[:, :5])


class Timm(nn.Module):
    """Places for a norm and for dropout between both layers, as in timm's MLPs."""

    def __init__(self, drop: float, norm: nn.Module) -> None:
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(12, 20), nn.GELU(), nn.Dropout(drop)
        self.norm, self.fc2, self.drop2 = norm, nn.Linear(20, 8), nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop1(x)
        x = self.norm(x)
        x = self.fc2(x)
        return self.drop2(x)


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_what_stands_between_both_layers(drop: float, ran: list[str]) -> None:
    x = torch.randn(3, 12)
    for norm, count in ((nn.Identity(), 2 if drop == 0.0 else 1), (nn.LayerNorm(20), 0)):
        model, inputs = Wrapped(Timm(drop, norm)), {"x": x}
        expected = [results(model, inputs, train) for train in (False, True)]
        cute_ops_torch.patch(model)
        check(model, inputs, expected)
        assert len(ran) == count
        ran.clear()
        model.inner.norm = nn.Tanh()  # afterwards
        expected = results(copy.deepcopy(model), inputs, False)
        cute_ops_torch.unpatch(model)
        torch.testing.assert_close(expected, results(model, inputs, False))
        assert not ran


class Wrapped(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.inner(x),)


def drawn_sequence(rng: random.Random) -> tuple[nn.Sequential, int, int]:
    """A sequence of MLPs and other modules, with how many of these run as one op in evaluation and in training."""
    parts: list[nn.Module] = []
    evaluated = trained = 0
    for _ in range(rng.randint(1, 3)):
        act = rng.choice([nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.ReLU(inplace=True), nn.Tanh()])
        between = [rng.choice([nn.Dropout(0.0), nn.Dropout(0.5), nn.Identity()]) for _ in range(rng.randint(0, 2))]
        bias = rng.random() < 0.8
        mlp = [nn.Linear(12, 20, bias), act, *between, nn.Linear(20, 12, rng.random() < 0.8)]
        known = type(act) is not nn.Tanh
        evaluated += known
        trained += known and not any(getattr(part, "p", 0.0) for part in between)
        other = rng.choice([nn.LayerNorm(12), nn.Dropout(0.5), nn.Identity(), nn.GELU(), nn.Linear(12, 12)])
        parts += [*mlp, nn.LayerNorm(12), *([other, nn.LayerNorm(12)] if rng.random() < 0.5 else [])]
    return nn.Sequential(*parts), evaluated, trained


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("seed", range(12))
def test_mlps_of_sequences(seed: int, ran: list[str]) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sequence, evaluated, trained = drawn_sequence(rng)
    model, inputs = Wrapped(sequence), {"x": torch.randn(*rng.choice([(12,), (3, 12), (2, 3, 12)]))}
    expected = [results(model, inputs, train) for train in (False, True)]
    cute_ops_torch.patch(model)
    check(model, inputs, expected)
    assert len(ran) == evaluated + trained
    ran.clear()
    sequence[rng.randrange(len(sequence))].register_forward_hook(lambda module, given, out: 2 * out)
    looked_at = results(model, inputs, False)
    runs = len(ran)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs)[0]
    torch.testing.assert_close(compiled, looked_at[0], rtol=1e-4, atol=1e-5)
    assert evaluated - 1 <= runs <= evaluated
    cute_ops_torch.unpatch(model)
    torch.testing.assert_close(looked_at, results(model, inputs, False), rtol=1e-4, atol=1e-4)


class Functions(nn.Module):
    """Activations that are functions, in the ``forward`` of each class derived from this."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop, self.approximate = nn.Linear(12, 20), nn.Linear(20, 8), nn.Dropout(0.0), "tanh"


class OfGELU(Functions):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.drop(F.gelu(self.a(x))))


class OfTanhGELU(Functions):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(nn.functional.gelu(self.a(x), approximate="tanh"))


class OfSiLU(Functions):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = silu(self.a(x))
        x = self.drop(x)
        x = self.b(x)
        return x


class OfReLU(Functions):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.drop(torch.relu(self.a(x))))


class OfTwo(Functions):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.relu(F.silu(self.a(x))))


class OfAnother(Functions):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.leaky_relu(self.a(x)))


class OfASetting(Functions):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.gelu(self.a(x), approximate=self.approximate))


class OfAParameter(Functions):
    def forward(self, x: torch.Tensor, silu: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> torch.Tensor:
        return self.b(silu(self.a(x)))


class OfALocal(Functions):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        silu = torch.tanh
        x = silu(self.a(x))
        return self.b(x)


class OfOneLine(Functions):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x); y = self.b(silu(x)); return y + x.sum()  # fmt: skip  # noqa: E702


@dataclass
class Tanh:
    """A function that has no hash."""

    scale: float = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.scale * x)


tanh = Tanh()


class OfAnObject(Functions):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(tanh(self.a(x)))


@pytest.mark.parametrize(("kind", "name"), [
    (OfAParameter, ""), (OfALocal, ""), (OfOneLine, ""), (OfAnObject, ""),
    (OfGELU, "gelu"), (OfTanhGELU, "gelu_tanh"), (OfSiLU, "silu"), (OfReLU, "relu"), (OfTwo, ""), (OfAnother, ""),
    (OfASetting, ""),
])  # fmt: skip
def test_activations_that_are_functions(
    kind: type[Functions], name: str, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = nn.ModuleDict({"norm": nn.LayerNorm(8), "mlp": Wrapped(kind())}), {"x": torch.randn(3, 12)}
    mlp: Any = model["mlp"]
    expected = [results(mlp, inputs, train) for train in (False, True)]
    cute_ops_torch.patch(model)
    check(mlp, inputs, expected)
    assert ran == ([name] * 2 if name else [])
    ran.clear()
    mlp.inner.drop.p = 0.5
    results(mlp, inputs, True)
    assert ran == ([name] if kind is OfTanhGELU else [])  # which calls no dropout
    monkeypatch.setattr(f"{__name__}.silu", torch.tanh)  # a global that a forward reads
    changed = results(mlp, inputs, False)
    cute_ops_torch.unpatch(model)
    torch.testing.assert_close(changed, results(mlp, inputs, False), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Identity])
def test_classes_of_dropout_may_change(kind: Any, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(12, 20), nn.GELU(), kind(), nn.Linear(20, 8)).eval(), torch.randn(3, 12)
    cute_ops_torch.patch(model)
    monkeypatch.setattr(kind, "forward", lambda self, x: 2 * x)  # as dropout in evaluation does it
    got = model(x)
    cute_ops_torch.unpatch(model)
    torch.testing.assert_close(got, model(x))
    assert not ran


class Called(nn.ReLU):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().__call__(x)


def test_activations_that_do_more_than_their_forward(ran: list[str]) -> None:
    model, x = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 20), Called(), nn.Linear(20, 8)), torch.randn(3, 12)
    want = model(x)
    cute_ops_torch.patch(model)
    torch.testing.assert_close(model(x), want)
    assert not ran


def test_steps_of_statements() -> None:
    (longest, *_) = sorted(statements.steps_of(Written.forward), key=len, reverse=True)
    assert [step.name for step in longest] == ["first", "act", "drop", "second"]
    assert {step.kind for step in longest} == {"call"}


@pytest.mark.parametrize("seed", range(4))
def test_biases_of_any_shape_may_be_set_afterwards(seed: int) -> None:
    """Those that torch's functions broadcast, which no op of ours does."""
    rng, x = random.Random(seed), torch.randn(4, 16)
    conv1d = transformers.pytorch_utils.Conv1D
    first, second = rng.choice([(nn.Linear(16, 24), nn.Linear(24, 8)), (conv1d(24, 16), conv1d(8, 24))])
    model = MLPOf(first, second)
    cute_ops_torch.patch(model)
    for layer, n in rng.sample([(first, 24), (second, 8)], 2):
        shapes = [(4, n), (1, n), (4, 1), (1,)] if isinstance(layer, nn.Linear) else [(1, n), (4, n), (1,), (4, 1)]
        layer.bias = nn.Parameter(torch.randn(rng.choice(shapes)))
        got = model(x)
        gradients = torch.autograd.grad(got.square().sum(), [*model.parameters()])
        cute_ops_torch.unpatch(model)
        want = model(x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(gradients, torch.autograd.grad(want.square().sum(), [*model.parameters()]))
        cute_ops_torch.patch(model)


def test_an_approximation_that_no_gelu_has_is_refused_by_name() -> None:
    model = MLPOf(nn.Linear(16, 24), nn.Linear(24, 8))
    cute_ops_torch.patch(model)
    model.act.approximate = "sigmoid"
    with pytest.raises(ValueError, match="`approximate` must be 'tanh' or 'none', got 'sigmoid'"):
        model(torch.randn(3, 16))


class MLPOf(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.act, self.second = first, nn.GELU(), second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(self.first(x)))


class Listed(nn.Module):
    """An activation whose class has a tensor that it does not read."""

    names = torch.arange(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.square(torch.relu(x))


@pytest.mark.drawn(0.5)
def test_an_activation_whose_class_has_a_tensor() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.down = nn.Linear(64, 96), Listed(), nn.Linear(96, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.act(self.up(x)))

    layer, x = Layer(), torch.randn(3, 5, 64)
    want = layer(x)
    cute_ops_torch.patch(layer)
    torch.testing.assert_close(layer(x), want)
