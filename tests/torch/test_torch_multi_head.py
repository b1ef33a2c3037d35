"""``torch.nn.MultiheadAttention`` and what is built of it, under the graph pass and patched, beside torch's own."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import cute_ops_torch
from cute_ops_torch import inductor
from cute_ops_torch.composite import scaled_dot_product
from cute_ops_torch.composite.multi_head import MultiHead, multi_head_attention, torch_attention, written_attention
from tests.torch.drawn_programs import enabled, only_the_pass, through_autograd

Tensor = torch.Tensor
HEADS, SIZE = 2, 16
E = HEADS * SIZE


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    inductor.replaced.clear()
    with enabled():
        yield


def drawn(
    seed: int, dtype: torch.dtype, size: int = SIZE, times: int = 1
) -> tuple[nn.MultiheadAttention, list[Tensor], dict[str, Any]]:
    """A module with its tensors, ``times`` as long, and masks. No mask hides all keys."""
    rng = random.Random(f"multi-head {seed}")
    torch.manual_seed(seed)
    kind, batched = rng.choice(("self", "cross", "apart", "other sizes")), rng.random() < 0.8
    sizes = {"kdim": 24, "vdim": 40} if kind == "other sizes" else {}
    module = nn.MultiheadAttention(
        HEADS * size, HEADS, bias=rng.random() < 0.7, batch_first=rng.random() < 0.5, dtype=dtype, **sizes
    )
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3 * math.sqrt(SIZE / size))
    queries, batch = times * rng.choice((1, 5, 8)), rng.choice((1, 3))
    keys = queries if kind == "self" else times * rng.choice((2, 7))

    def tensor(length: int, columns: int) -> Tensor:
        lead = ((batch, length) if module.batch_first else (length, batch)) if batched else (length,)
        return torch.randn(*lead, columns).to(dtype).requires_grad_()

    query = tensor(queries, HEADS * size)
    key = query if kind == "self" else tensor(keys, sizes.get("kdim", HEADS * size))
    value = key if kind in ("self", "cross") else tensor(keys, sizes.get("vdim", HEADS * size))
    options: dict[str, Any] = {"need_weights": rng.random() < 0.5}
    floats = rng.random() < 0.5

    def mask(*shape: int) -> Tensor:
        hidden = torch.rand(shape) < 0.4
        hidden[..., 0] = False
        return torch.where(hidden, -math.inf, torch.randn(shape)).to(dtype) if floats else hidden

    if rng.random() < 0.4:
        options["key_padding_mask"] = mask(*((batch, keys) if batched else (keys,)))
    shape = rng.choice(((), (queries, keys), ((batch if batched else 1) * HEADS, queries, keys), "causal"))
    if shape == "causal":
        hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1)
        added = torch.zeros(queries, keys, dtype=dtype).masked_fill(hidden, -math.inf)
        options |= {"attn_mask": added if floats else hidden, "is_causal": rng.random() < 0.7}
    elif shape:
        options["attn_mask"] = mask(*shape)
    return module, [query, key, value], options


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("seed", range(40))
def test_steps_are_those_of_torch(seed: int) -> None:
    """In float64, in which both forms of attention agree: results and gradients."""
    module, tensors, options = drawn(seed, torch.float64)
    form = random.Random(seed).choice((torch_attention(0.0), written_attention))
    causal = bool(options.get("is_causal")) and "key_padding_mask" not in options and form is not written_attention
    weights, last = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight), module.out_proj
    given = MultiHead(
        *tensors, HEADS, module.in_proj_weight, module.in_proj_bias, weights, last.weight, last.bias,
        None if causal else options.get("attn_mask"), options.get("key_padding_mask"), causal, module.batch_first,
    )  # fmt: skip
    trained = [*dict.fromkeys(tensors), *module.parameters()]
    results = [module(*tensors, **options)[0], multi_head_attention(given, form)]
    toward = torch.randn_like(results[0])
    (want, *grads), (got, *ours) = [[out, *torch.autograd.grad(out, trained, toward)] for out in results]
    for a, b in zip([got, *ours], [want, *grads], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def run(function: Any, tensors: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
    """A result, and gradients of what it was computed from."""
    out = function(*tensors)
    generator = torch.Generator().manual_seed(0)
    trained = [*dict.fromkeys(each for each in tensors if each.requires_grad), *parameters]
    grads = torch.autograd.grad(out, trained, torch.randn(out.shape, generator=generator).to(out))
    return [out.detach(), *grads]


def near(got: list[Tensor], plain: list[Tensor], exact: list[Tensor], strides: bool = True) -> None:
    """Ours are not farther from exact values than twice what torch's own are."""
    out, same = got[0], plain[0]
    assert not strides or [s for s, n in zip(out.stride(), out.shape, strict=True) if n > 1] == [
        s for s, n in zip(same.stride(), same.shape, strict=True) if n > 1
    ]
    for ours, torchs, want in zip(got, plain, exact, strict=True):
        assert (ours.dtype, ours.shape) == (torchs.dtype, torchs.shape)
        assert torch.equal(ours.isnan(), torchs.isnan())
        scale = want.nan_to_num().abs().max().item()
        errors = [(each.double() - want.double()).nan_to_num().abs().max().item() for each in (ours, torchs)]
        assert errors[0] <= 2 * errors[1] + 0.01 * scale + 1e-3, (errors, scale)


@pytest.mark.slow
@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("seed", range(40))
def test_modules_in_the_pass(seed: int) -> None:
    module, tensors, options = drawn(seed, torch.bfloat16)
    wide = drawn(seed, torch.float64)[0]
    wide.load_state_dict(module.state_dict())
    exact = run(
        lambda *given: wide(*given, **{k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v
                                       for k, v in options.items()})[0],
        alike(tensors, torch.float64), [*wide.parameters()],
    )  # fmt: skip
    backend = random.Random(seed).choice((only_the_pass, through_autograd))
    compiled = torch.compile(lambda *given: module(*given, **options)[0], backend=backend, fullgraph=True)
    plain = run(lambda *given: module(*given, **options)[0], tensors, [*module.parameters()])
    near(run(compiled, tensors, [*module.parameters()]), plain, exact)


def alike(tensors: list[Tensor], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    made = {each: each.detach().to(device, dtype).requires_grad_() for each in tensors}
    return [made[each] for each in tensors]


class Encoder(nn.Module):
    """Layers of torch's encoder, called with a mask that follows from sizes, or one of padding."""

    def __init__(self, mask: str, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(E, HEADS, 48, **options)
        self.mask, self.layers = mask, nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        length = x.shape[1 if self.layers.layers[0].self_attn.batch_first else 0]
        if self.mask == "causal":
            mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device, dtype=x.dtype)
            return self.layers(x, mask, is_causal=False)
        if self.mask == "hinted":
            hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            return self.layers(x, hidden, is_causal=True)
        return self.layers(x, src_key_padding_mask=padding) if self.mask == "padding" else self.layers(x)


def test_padding_that_looks_causal() -> None:
    """Padding of as many elements as keys, which hides more keys of each element than of the one behind it."""
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(E, HEADS, 48, batch_first=True, dtype=torch.bfloat16).eval()
    x = torch.randn(6, 6, E).bfloat16()

    def run(x: Tensor) -> Tensor:
        result: Tensor = layer(x, src_key_padding_mask=torch.ones(6, 6, dtype=torch.bool).triu(1))
        return result

    with torch.no_grad():
        made = torch.compile(run, backend=only_the_pass, fullgraph=True)(x)
        assert (made - run(x)).abs().max() < 0.1


@pytest.mark.slow
@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("mode", ["training", "evaluation", "without gradients"])
@pytest.mark.parametrize("mask", ["none", "causal", "hinted", "padding"])
def test_encoders_in_the_pass(mask: str, mode: str) -> None:
    """Attention is ours unless torch's function of a whole layer gets a mask of data."""
    rng = random.Random(f"{mask} {mode}")
    torch.manual_seed(3)
    options: Any = {
        "norm_first": rng.random() < 0.5, "batch_first": mode == "without gradients" or rng.random() < 0.5,
        "activation": rng.choice(("relu", "gelu")), "dropout": 0.0,
    }  # fmt: skip
    model = Encoder(mask, **options).bfloat16().train(mode == "training")
    wide = Encoder(mask, **options).double().train(mode == "training")
    wide.load_state_dict(model.state_dict())
    x = torch.randn(3, 6, E).bfloat16() if options["batch_first"] else torch.randn(6, 3, E).bfloat16()
    padding = torch.arange(6) >= torch.tensor([[6], [3], [1]])
    compiled = torch.compile(model, backend=through_autograd, fullgraph=True)
    if mode == "without gradients":
        with torch.no_grad():
            results = [[of(each, padding)] for of, each in ((compiled, x), (model, x), (wide, x.double()))]
    else:
        results = [
            run(lambda each, of=of: of(each, padding), [each.requires_grad_()], [*weights])
            for of, each, weights in (
                (compiled, x, model.parameters()), (model, x, model.parameters()), (wide, x.double(), wide.parameters())
            )
        ]  # fmt: skip
    near(*results)
    left = mode == "without gradients" and mask == "padding"
    assert inductor.replaced["attention"] == (0 if left else 2)
    assert left or inductor.replaced["mlp"] == 2


@pytest.mark.slow
def test_decoders_in_the_pass() -> None:
    """Both attentions of a decoder: causal over its own tokens, and to those of the encoder."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Transformer(E, HEADS, 1, 2, 48, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            mask = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool).triu(1)
            return self.model(x, y, tgt_mask=mask, tgt_is_causal=True)

    torch.manual_seed(4)
    model = Both().bfloat16()
    wide = Both().double()
    wide.load_state_dict(model.state_dict())
    given = [torch.randn(2, n, E).bfloat16().requires_grad_() for n in (7, 5)]
    compiled = torch.compile(model, backend=through_autograd, fullgraph=True)
    results = [run(of, given, [*model.parameters()]) for of in (compiled, model)]
    near(*results, run(wide, alike(given, torch.float64), [*wide.parameters()]))
    assert inductor.replaced["attention"] == 5


@pytest.mark.parametrize("inside", [True, False], ids=("in the program", "around it"))
def test_autocast_in_the_pass(inside: bool) -> None:
    torch.manual_seed(5)
    module, x = nn.MultiheadAttention(E, HEADS), torch.randn(6, 3, E, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        if not inside:
            return module(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]
        with torch.autocast("cpu", torch.bfloat16):
            return module(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]

    compiled = torch.compile(attend, backend=through_autograd, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        results = [run(of, [x], [*module.parameters()]) for of in (compiled, attend)]
    exact = run(lambda x: module(x, x, x)[0], [x], [*module.parameters()])
    near(*results, exact)
    assert results[0][0].dtype == torch.bfloat16
    assert inductor.replaced["attention"] == 1


def test_dropout_of_weights_in_the_pass() -> None:
    """Random numbers are drawn as torch draws them, and the products stand by themselves."""
    torch.manual_seed(6)
    module, x = nn.MultiheadAttention(E, HEADS, dropout=0.5).bfloat16(), torch.randn(6, 3, E).bfloat16()
    results = []
    for of in (torch.compile(module, backend=only_the_pass, fullgraph=True), module):
        torch.manual_seed(7)
        results.append(of(x, x, x, need_weights=False)[0])
    torch.testing.assert_close(*results, rtol=0.02, atol=0.02)
    assert "multi_head_attention_forward" not in str(inductor.report())
    assert "scaled_dot_product_attention" in str(inductor.report())


LEFT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "weights that are read": ({}, {"need_weights": True}),
    "weights of a head": ({}, {"need_weights": True, "average_attn_weights": False}),
    "keys of a bias": ({"add_bias_kv": True}, {"need_weights": False}),
    "keys of zeros": ({"add_zero_attn": True}, {"need_weights": False}),
    "float32": ({"dtype": torch.float32}, {"need_weights": False}),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_stays_in_the_pass(what: str) -> None:
    torch.manual_seed(8)
    given, options = LEFT[what]
    module = nn.MultiheadAttention(E, HEADS, **{"dtype": torch.bfloat16, **given})
    x = torch.randn(6, 3, E).to(module.out_proj.weight.dtype)
    compiled = torch.compile(module, backend=only_the_pass, fullgraph=True)
    for a, b in zip(compiled(x, x, x, **options), module(x, x, x, **options), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert "multi_head_attention_forward: its weights are read or dropped" in str(inductor.report())


def test_queries_whose_keys_are_all_hidden_in_the_pass() -> None:
    """NaN where torch computes the weights, whether somebody reads them or not."""
    torch.manual_seed(9)
    module, x = nn.MultiheadAttention(E, HEADS, batch_first=True).bfloat16(), torch.randn(3, 6, E).bfloat16()
    padding = torch.arange(6) >= torch.tensor([[6], [3], [0]])
    compiled = torch.compile(lambda x: module(x, x, x, padding)[0], backend=only_the_pass, fullgraph=True)
    out = compiled(x)
    assert inductor.replaced["attention"] == 1
    assert bool(out[2].isnan().all()) and not bool(out[:2].isnan().any())


def test_any_number_of_rows_in_the_pass() -> None:
    torch.manual_seed(10)
    module = nn.MultiheadAttention(E, HEADS, batch_first=True).bfloat16()
    attend = lambda x, y: module(x, y, y, need_weights=False)[0]  # noqa: E731
    compiled = torch.compile(attend, backend=only_the_pass, fullgraph=True, dynamic=True)
    for batch, queries, keys in ((2, 5, 7), (3, 9, 4)):
        x, y = torch.randn(batch, queries, E).bfloat16(), torch.randn(batch, keys, E).bfloat16()
        torch.testing.assert_close(compiled(x, y), attend(x, y), rtol=0.02, atol=0.02)
    assert inductor.replaced["attention"] == 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of calls of our attention, whether they are causal."""
    seen, plain = list[bool](), scaled_dot_product._attention

    def attention(*args: Any) -> Any:
        seen.append(args[5])
        return plain(*args)

    monkeypatch.setattr(scaled_dot_product, "_attention", attention)
    scaled_dot_product._calls.clear()
    return seen


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("seed", range(60))
def test_patched_modules(seed: int, calls: list[bool]) -> None:
    """In training and evaluation, with gradients and without, by autocast or in one dtype."""
    rng = random.Random(f"patched {seed}")
    dtype = rng.choice((torch.bfloat16, torch.float16, torch.float32))
    autocast, mode = rng.random() < 0.3, rng.choice(("training", "evaluation", "without gradients"))
    module, tensors, options = drawn(seed, dtype)
    if rng.random() < 0.5:
        options = {"need_weights": False} | (
            {key: options[key] for key in ("attn_mask", "is_causal")} if options.get("is_causal") else {}
        )
    module.train(mode == "training")
    plain, wide = copy.deepcopy(module), drawn(seed, torch.float64)[0].train(mode == "training")
    wide.load_state_dict(module.state_dict())
    state = {name: value.clone() for name, value in module.state_dict().items()}
    assert list(cute_ops_torch.patch(module)) == [("", "attention")]
    results = []
    for of, given in ((module, tensors), (plain, tensors), (wide, alike(tensors, torch.float64))):
        more = {
            k: v.to(given[0].dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in options.items()
        }

        def attend(*given: Tensor, of: Any = of, more: Any = more) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast and of is not wide):
                return of(*given, **more)[0]  # type: ignore[no-any-return]

        if mode == "without gradients":
            with torch.no_grad():
                results.append([attend(*given)])
        else:
            results.append(run(attend, given, [*of.parameters()]))
    near(*results, strides=False)
    masked = "key_padding_mask" in options or ("attn_mask" in options and not options.get("is_causal"))
    narrow = dtype != torch.float32 or autocast
    longer = (
        bool(options.get("is_causal"))
        and tensors[0].shape[-2 if module.batch_first or tensors[0].ndim == 2 else 0]
        > tensors[1].shape[-2 if module.batch_first or tensors[0].ndim == 2 else 0]
    )
    assert calls == (
        [] if options["need_weights"] or masked or not narrow or longer else [bool(options.get("is_causal"))]
    )
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in state.items())
    cute_ops_torch.unpatch(module)
    assert type(module) is nn.MultiheadAttention


def _hook(module: Any) -> None:
    module.register_forward_hook(lambda module, given, out: (out[0] * 2, None))


def _parametrize(module: Any) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    nn.utils.parametrize.register_parametrization(module, "in_proj_weight", Twice())


def _replace_output(module: Any) -> None:
    nn.utils.parametrizations.weight_norm(module.out_proj)


CHANGES: dict[str, tuple[Any, bool]] = {
    "nothing": (lambda module: None, True), "a hook": (_hook, True), "a parametrization": (_parametrize, True),
    "weight norm of the last product": (_replace_output, True),
    "a frozen weight": (lambda module: module.in_proj_weight.requires_grad_(False), True),
    "dropout": (lambda module: setattr(module, "dropout", 1e-9), False),
    "float32": (lambda module: module.float(), False),
    "its forward": (lambda module: setattr(module, "forward", module.forward), True),
}  # fmt: skip


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
def test_patched_modules_that_change(change: str, when: str, calls: list[bool]) -> None:
    make, ours = CHANGES[change]
    torch.manual_seed(11)
    module = nn.MultiheadAttention(E, HEADS, batch_first=True).bfloat16()
    plain = copy.deepcopy(module)
    make(plain)
    if when == "before":
        make(module)
        if change == "its forward":
            with pytest.raises(ValueError, match="no module that is known"):
                cute_ops_torch.patch(module)
            return
    cute_ops_torch.patch(module)
    if when == "after":
        make(module)
    module = copy.deepcopy(module) if change != "its forward" else module
    x = torch.randn(2, 5, E).to(plain.out_proj.bias.dtype)
    out, want = (of(x, x, x, need_weights=False)[0] for of in (module, plain))
    torch.testing.assert_close(out, want, rtol=0.02, atol=0.02)
    assert len(calls) == ours
    (of_ours, of_plain) = (
        torch.autograd.grad(each.float().square().sum(), of.out_proj.bias)[0]
        for each, of in ((out, module), (want, plain))
    )
    torch.testing.assert_close(of_ours, of_plain, rtol=0.05, atol=0.05)


def test_patched_modules_that_stay() -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.MultiheadAttention(E, HEADS)
            self.pool = nn.MultiheadAttention(E, HEADS)

        def forward(self, x: Tensor) -> Any:
            return self.pool(x[:1], x, x)[0], self.plain(x, x, x, None, False)

    model = Asking()
    model.with_keys, model.own = nn.MultiheadAttention(E, HEADS, add_bias_kv=True), Own(E, HEADS)
    found = cute_ops_torch.patch(model)
    assert list(found) == [("plain", "attention")]
    assert [(each.module, each.reason) for each in found.left] == [
        ("pool", "its weights are asked for where it is called"), ("with_keys", "it attends to keys of its own"),
        ("own", "its forward is not torch.nn's"),
    ]  # fmt: skip


def test_patched_modules_raise_what_torch_raises() -> None:
    module = nn.MultiheadAttention(E, HEADS).bfloat16()
    plain, x = copy.deepcopy(module), torch.randn(5, 3, E).bfloat16()
    cute_ops_torch.patch(module)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, x, x), {"need_weight": False}), ((x, x, x, None, False), {"need_weights": False}),
        ((x, x, x, None, False, None, True, False, 1), {}), ((x, x[:2], x), {"need_weights": False}),
        ((x, x[:, :2], x[:, :2]), {"need_weights": False}), ((x[..., :8], x, x), {"need_weights": False}),
        ((x, x, x), {"need_weights": False, "is_causal": True}), ((x[0, 0], x, x), {"need_weights": False}),
        ((x.float(), x.float(), x.float()), {"need_weights": False}),
    ]  # fmt: skip
    for given, options in wrong:
        errors = []
        for of in (module, plain):
            with pytest.raises(Exception) as raised:
                of(*given, **options)
            errors.append((type(raised.value), str(raised.value)))
        assert errors[0] == errors[1]


def test_patched_modules_are_traced(calls: list[bool]) -> None:
    """By torch.compile without a break, and by torch.export."""
    torch.manual_seed(12)
    module = nn.MultiheadAttention(E, HEADS, batch_first=True).bfloat16()
    plain, x = copy.deepcopy(module), torch.randn(2, 5, E).bfloat16()
    cute_ops_torch.patch(module)
    inductor.disable()
    want = plain(x, x, x, need_weights=False)[0]
    seen: list[str] = []

    def backend(traced: torch.fx.GraphModule, given: Any) -> Any:
        seen.extend(str(node.target) for node in traced.graph.nodes)
        return traced

    compiled = torch.compile(lambda x: module(x, x, x, need_weights=False)[0], backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(x), want, rtol=0.02, atol=0.02)
    exported = torch.export.export(module, (x, x, x), {"need_weights": False})
    torch.testing.assert_close(exported.module()(x, x, x, need_weights=False)[0], want, rtol=0.02, atol=0.02)
    assert "cute.attention.default" in seen
    assert "cute.attention.default" in {str(node.target) for node in exported.graph.nodes}


def test_patched_modules_of_functions(calls: list[bool]) -> None:
    """Gradients of each example, by torch.func."""
    torch.manual_seed(14)
    module = nn.MultiheadAttention(E, HEADS, batch_first=True).bfloat16()
    plain, x = copy.deepcopy(module), torch.randn(3, 5, E).bfloat16()
    cute_ops_torch.patch(module)
    grads = []
    for of in (module, plain):

        def loss(parameters: Any, x: Tensor, of: Any = of) -> Tensor:
            return (
                torch.func.functional_call(of, parameters, (x, x, x), {"need_weights": False})[0].float().square().sum()
            )

        parameters = {name: each.detach() for name, each in of.named_parameters()}
        grads.append(torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x))
    assert calls
    for name, got in grads[0].items():
        torch.testing.assert_close(got, grads[1][name], rtol=0.05, atol=0.05 * grads[1][name].abs().max().item())


def test_patched_encoders(calls: list[bool]) -> None:
    """A model of torch's layers, in training: losses and gradients; in evaluation torch's own function runs, unless it
    is told not to.
    """
    torch.manual_seed(13)
    model = nn.Transformer(E, HEADS, 2, 2, 48, dropout=0.0, batch_first=True)
    narrow = copy.deepcopy(model).bfloat16()
    plain = copy.deepcopy(narrow)
    found = cute_ops_torch.patch(narrow)
    assert [each.module for each in found if each.op == "attention"] == [
        name for name, each in plain.named_modules() if isinstance(each, nn.MultiheadAttention)
    ]
    given = [torch.randn(2, n, E).bfloat16().requires_grad_() for n in (7, 5)]
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.bfloat16)
    results = [
        run(lambda x, y, of=of: of(x, y, tgt_mask=mask.to(x.dtype)), each, [*of.parameters()])
        for of, each in ((narrow, given), (plain, given), (model, alike(given, torch.float32)))
    ]
    near(*results)
    assert calls == [False] * 2 + [True, False] * 2
    calls.clear()
    outs = []
    with torch.no_grad():
        x = given[0].detach()
        for own in (True, False):
            torch.backends.mha.set_fastpath_enabled(own)
            try:
                outs += [of.eval().encoder(x) for of in (narrow, plain)]
            finally:
                torch.backends.mha.set_fastpath_enabled(True)
            assert calls == [False] * (0 if own else 2)
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0.03, atol=0.03)
