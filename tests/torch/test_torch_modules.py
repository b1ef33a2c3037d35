"""Modules over the functions."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import cute_ops_torch
from cute_ops import Op, Tensor
from cute_ops.declaration.shapes import FLOATS
from cute_ops.ops import OPS
from cute_ops_torch.nn import class_name, module


@pytest.mark.feature("nn module")
@pytest.mark.parametrize("layer", [op for op in OPS if op.grad or op.inference_only], ids=lambda op: op.name)
def test_a_module_for_every_layer(layer: Op, make_inputs: Callable[..., Any]) -> None:
    """It computes what the function does with its parameters; it is copied, pickled and compiled."""
    tensors = dict(zip(layer.inputs, make_inputs(layer), strict=True))
    learned = {name: tensors.pop(name) for name, t in layer.inputs.items() if not t.rows}
    made = getattr(cute_ops_torch.nn, class_name(layer))(
        *dict.fromkeys(size for t in learned.values() for size in t.shape),
        **({"bias": True} if "bias" in learned else {}),
    )
    assert [name for name, _ in made.named_parameters()] == list(learned)
    made.load_state_dict(learned)
    file = io.BytesIO()
    torch.save(copy.deepcopy(made), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    expected = getattr(cute_ops_torch, layer.name)(**tensors, **learned)
    for called in (made, loaded, torch.compile(made, fullgraph=True, backend="eager")):
        torch.testing.assert_close(called(*tensors.values()), expected, rtol=0, atol=0)
    assert not hasattr(cute_ops_torch.nn, layer.name)


def test_a_module_of_ones_own_op() -> None:
    own = Op(
        "scale_and_shift",
        inputs={"x": Tensor("*m n", "T"), "weight": Tensor("n", "T"), "shift": Tensor("n", "T", optional=True)},
        outputs={"out": Tensor("*m n", "T")},
        dtypes={"T": FLOATS},
        attrs={"power": 1},
        reference=lambda xp, x, weight, shift, *, power: x**power * weight + (0 if shift is None else shift),
        kernel="nowhere:ScaleAndShift",
    )
    made = module(own, "cute_test")(8, power=2, shift=True, dtype=torch.bfloat16)
    assert repr(made) == "ScaleAndShift(8, power=2, shift=True)"
    assert made.weight.dtype == torch.bfloat16
    x = torch.randn(2, 8).bfloat16()
    torch.testing.assert_close(made(x), x**2)
    with pytest.raises(
        TypeError, match=r"^cute\.ScaleAndShift: unknown argument `bias`; it takes `n`, `power`, `shift`"
    ):
        module(own, "cute_test")(8, bias=True)
    with pytest.raises(TypeError, match=r"^cute\.ScaleAndShift: unknown argument `powr` \(did you mean power\?\);"):
        module(own, "cute_test")(8, powr=2)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_with_epilogues(bias: bool) -> None:
    layer, x = nn.Linear(16, 8, bias), torch.randn(2, 3, 16)
    residual = torch.randn(2, 3, 8)
    plain = {
        "LinearGELU": nn.functional.gelu, "LinearSiLU": nn.functional.silu, "LinearAdd": lambda y: y + residual,
        "Linear": lambda y: y,
    }  # fmt: skip
    for name, function in plain.items():
        made = getattr(cute_ops_torch.nn, name).from_linear(layer.eval())
        assert made.weight is layer.weight and made.bias is layer.bias and not made.training
        out = made(x, residual) if name == "LinearAdd" else made(x)
        torch.testing.assert_close(out, function(layer(x)))
        loaded = getattr(cute_ops_torch.nn, name)(16, 8, bias=bias)
        loaded.load_state_dict(layer.state_dict())
    tanh = cute_ops_torch.nn.LinearGELU.from_linear(layer, approximate="tanh")
    torch.testing.assert_close(tanh(x), nn.functional.gelu(layer(x), approximate="tanh"))
    assert repr(tanh) == f"LinearGELU(in_features=16, out_features=8, bias={bias}, epilogue=gelu_tanh)"
    own = cute_ops_torch.nn.Linear(16, 8, bias, epilogue=lambda xp, acc, bias, scale: acc * scale)
    torch.testing.assert_close(own(x, torch.tensor(2.0)), 2 * nn.functional.linear(x, own.weight))
    with pytest.raises(ValueError, match="LinearGELU: approximate is 'erf', expected 'none' or 'tanh'"):
        cute_ops_torch.nn.LinearGELU(16, 8, approximate="erf")


@pytest.mark.parametrize("learned", [False, True])
def test_a_norm_and_a_layer_as_one(learned: bool) -> None:
    norm, layer, x = nn.RMSNorm(16, elementwise_affine=learned), nn.Linear(16, 8), torch.randn(2, 3, 16)
    if learned:
        nn.init.normal_(norm.weight)
    made = cute_ops_torch.nn.RMSNormLinear.from_layers(norm, layer.eval(), epilogue="silu")
    assert made.norm_weight is norm.weight and made.weight is layer.weight and not made.training
    torch.testing.assert_close(made(x), nn.functional.silu(layer(norm(x))))
    assert repr(made).endswith("bias=True, epilogue=silu, eps=1.1920928955078125e-07)")
    own = cute_ops_torch.nn.RMSNormLinear(16, 8, eps=1e-5)
    assert [name for name, _ in own.named_parameters()] == ["weight", "bias", "norm_weight"]
    normed = nn.functional.rms_norm(x, (16,), eps=1e-5)
    torch.testing.assert_close(own(x), nn.functional.linear(normed, own.weight, own.bias))
    with pytest.raises(ValueError, match="expected one of 16 columns"):
        cute_ops_torch.nn.RMSNormLinear.from_layers(nn.RMSNorm(8), layer)
    added = cute_ops_torch.nn.RMSNormLinear.from_layers(norm, layer, epilogue="add")
    residual = torch.randn(2, 3, 8)
    torch.testing.assert_close(added(x, residual), layer(norm(x)) + residual)


def test_a_layer_a_residual_and_a_norm_as_one() -> None:
    layer, norm, x, residual = nn.Linear(16, 8, False), nn.RMSNorm(8, 1e-5), torch.randn(3, 16), torch.randn(3, 8)
    nn.init.normal_(norm.weight)
    made = cute_ops_torch.nn.LinearAddRMSNorm.from_layers(layer, norm.eval())
    assert made.norm_weight is norm.weight and made.weight is layer.weight
    total = layer(x) + residual
    torch.testing.assert_close(made(x, residual), (norm(total), total))
    own = cute_ops_torch.nn.LinearAddRMSNorm(16, 8, dtype=torch.bfloat16)
    assert {name: p.dtype for name, p in own.named_parameters()} == dict.fromkeys(
        ("weight", "norm_weight"), torch.bfloat16
    )
    assert repr(own) == "LinearAddRMSNorm(16, 8, eps=1e-06)"
    with pytest.raises(ValueError, match="expected no bias and a weight"):
        cute_ops_torch.nn.LinearAddRMSNorm.from_layers(nn.Linear(16, 8), norm)


def test_a_projection_that_rotates() -> None:
    made = cute_ops_torch.nn.QKVRoPE(16, 4, 2, 64)
    x, angles = torch.randn(3, 16), torch.rand(3, 32)
    expected = cute_ops_torch.qkv_rope(x, made.weight, angles.cos(), angles.sin(), 6)
    torch.testing.assert_close(made(x, angles.cos(), angles.sin()), expected)
    assert repr(made) == "QKVRoPE(16, 512, heads=6)"


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated_layers_of_linear_ones(activation: str) -> None:
    gate, up, down = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False), nn.Linear(24, 16, bias=False)
    x = torch.randn(2, 3, 16)
    hidden = getattr(nn.functional, activation)(gate(x)) * up(x)
    half = cute_ops_torch.nn.GatedLinear.from_linear(gate, up, activation=activation)
    torch.testing.assert_close(half(x), hidden)
    mlp = cute_ops_torch.nn.GatedMLP.from_linear(gate, up, down, activation=activation, save="none")
    assert [name for name, _ in mlp.named_parameters()] == ["gate_up_proj.weight", "down_proj.weight"]
    torch.testing.assert_close(mlp(x), down(hidden))
    mlp(x).sum().backward()
    assert mlp.gate_up_proj.weight.grad.shape == (48, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert mlp(x).dtype == half(x).dtype == torch.bfloat16
        assert cute_ops_torch.nn.Linear(16, 8)(x).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="expected two of one size without biases"):
        cute_ops_torch.nn.GatedLinear.from_linear(gate, nn.Linear(16, 24))
    with pytest.raises(ValueError, match="expected 24 columns and no bias"):
        cute_ops_torch.nn.GatedMLP.from_linear(gate, up, nn.Linear(16, 16, bias=False))


@pytest.mark.parametrize("biases", [(True, True), (False, False), (True, False)])
def test_an_mlp_of_linear_layers(biases: tuple[bool, bool]) -> None:
    up, down = nn.Linear(16, 24, bias=biases[0]), nn.Linear(24, 8, bias=biases[1])
    x, mlp = torch.randn(2, 3, 16), cute_ops_torch.nn.MLP.from_linear(up, down, activation="silu", save="none")
    torch.testing.assert_close(mlp(x), down(nn.functional.silu(up(x))))
    mlp(x).sum().backward()
    assert up.weight.grad is mlp.up_proj.weight.grad and (up.bias is None) == (mlp.up_proj.bias is None)
    assert repr(mlp).startswith("MLP(\n  activation='silu'\n  (up_proj): Linear(in_features=16, out_features=24")
    assert [*cute_ops_torch.nn.MLP(16, 24).state_dict()] == [
        "up_proj.weight", "up_proj.bias", "down_proj.weight", "down_proj.bias"
    ]  # fmt: skip
    assert cute_ops_torch.nn.MLP(16, 24, bias=False)(x).shape == x.shape
    with torch.autocast("cpu", torch.bfloat16):
        assert mlp(x).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"MLP: down is Linear.*, expected 24 columns"):
        cute_ops_torch.nn.MLP.from_linear(up, nn.Linear(16, 16))


@pytest.mark.parametrize("make", [cute_ops_torch.nn.GatedLinear, cute_ops_torch.nn.GatedMLP])
def test_halves_that_devices_may_share(make: Any) -> None:
    """The same numbers in the same memory, and either shape in state dicts."""
    torch.manual_seed(0)
    packed = make(16, 24)
    torch.manual_seed(0)
    apart = make(16, 24, "silu", halves=True)
    name = "weight" if make is cute_ops_torch.nn.GatedLinear else "gate_up_proj.weight"
    assert apart.get_parameter(name).shape == (2, 24, 16)
    for ours, theirs in zip(apart.parameters(), packed.parameters(), strict=True):
        assert torch.equal(ours.flatten(), theirs.flatten())
    x = torch.randn(2, 3, 16)
    assert torch.equal(apart(x), packed(x))
    wanted, got = (torch.autograd.grad(m(x).sin().sum(), [*m.parameters()]) for m in (packed, apart))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.flatten(), other.flatten())
    other = make(16, 24, halves=True)
    other.load_state_dict(packed.state_dict())
    packed.load_state_dict(apart.state_dict())
    assert torch.equal(other(x), apart(x))
    with pytest.raises(RuntimeError, match=rf"size mismatch for {name}: copying a param with shape .*\[2, 20, 16\]"):
        other.load_state_dict(make(16, 20).state_dict())
    meta = make(16, 24, device="meta", halves=True).to_empty(device="cpu")
    for layer in meta.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    weight = meta.get_parameter(name)
    assert weight.shape == (2, 24, 16) and weight.abs().max() <= 0.25 and weight.std() > 0.1
    with pytest.warns(UserWarning, match="zero-element"):
        none = make(0, 24, halves=True)
    none.get_submodule(name.rpartition(".")[0]).reset_parameters()
    assert none(torch.randn(3, 0)).shape[0] == 3


def test_halves_of_layers() -> None:
    gate, up, down = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False), nn.Linear(24, 16, bias=False)
    x = torch.randn(2, 3, 16)
    hidden = nn.functional.silu(gate(x)) * up(x)
    half = cute_ops_torch.nn.GatedLinear.from_linear(gate.requires_grad_(False), up, halves=True)
    assert half.weight.shape == (2, 24, 16) and not half.weight.requires_grad
    torch.testing.assert_close(half(x), hidden)
    mlp = cute_ops_torch.nn.GatedMLP.from_linear(gate, up, down, halves=True)
    assert mlp.gate_up_proj.weight.shape == (2, 24, 16)
    torch.testing.assert_close(mlp(x), down(hidden))


def test_modules_with_options() -> None:
    loss = cute_ops_torch.nn.CrossEntropy(reduction="sum", label_smoothing=0.1)
    assert repr(loss) == "CrossEntropy(label_smoothing=0.1, reduction='sum')"
    logits, target = torch.randn(4, 9), torch.tensor([1, 2, 3, 8])
    expected = nn.functional.cross_entropy(logits, target, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(loss(logits, target), expected)
    head = cute_ops_torch.nn.LinearCrossEntropy(16, 9, bias=True, reduction="none")
    hidden = torch.randn(4, 16)
    expected = nn.functional.cross_entropy(hidden @ head.weight.T + head.bias, target, reduction="none")
    torch.testing.assert_close(head(hidden, target), expected)
    assert repr(head).startswith("LinearCrossEntropy(16, 9, bias=True, ignore_index=-100, label_smoothing=0.0, ")
    norm = cute_ops_torch.nn.RMSNormFP8(64, 1e-5, weight_offset=1.0, block=128)
    assert not norm.weight.any()
    assert repr(norm) == "RMSNormFP8(64, eps=1e-05, weight_offset=1.0, block=128)"


def test_rmsnorm_module() -> None:
    norm = cute_ops_torch.nn.RMSNorm(64, eps=1e-5)
    ours, x = norm.weight.data.uniform_(), torch.randn(3, 64)
    torch.testing.assert_close(norm(x), nn.functional.rms_norm(x, (64,), ours, 1e-5))
    assert repr(norm) == "RMSNorm(64, eps=1e-05, bias=False)"
    plain = cute_ops_torch.nn.RMSNorm(64, elementwise_affine=False)
    assert repr(plain) == "RMSNorm(64, eps=1e-06, elementwise_affine=False, bias=False)"
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.ones(64))


def test_gemma_weights_start_at_zero() -> None:
    norm = cute_ops_torch.nn.AddRMSNorm(8, weight_offset=1.0, bias=True, dtype=torch.bfloat16)
    assert not norm.weight.any()
    assert not norm.bias.any()
    assert norm.weight.dtype == torch.bfloat16
    x, residual = torch.randn(2, 8), torch.randn(2, 8)
    out, residual_out = norm(x, residual)
    torch.testing.assert_close(residual_out, x + residual)
    torch.testing.assert_close(out, nn.functional.rms_norm(x + residual, (8,), eps=1e-6))
    assert repr(norm) == "AddRMSNorm(8, eps=1e-06, weight_offset=1.0, bias=True)"


def test_layernorm_module() -> None:
    norm = cute_ops_torch.nn.LayerNorm(64)
    weight, bias, x = norm.weight.data.uniform_(), norm.bias.data.uniform_(), torch.randn(3, 64)
    torch.testing.assert_close(norm(x), nn.functional.layer_norm(x, (64,), weight, bias, 1e-5))
    assert repr(norm) == "LayerNorm(64, eps=1e-05, bias=True)"
    norm.reset_parameters()
    torch.testing.assert_close(norm(x), nn.functional.layer_norm(x, (64,)))
    assert cute_ops_torch.nn.LayerNorm(64, bias=False).bias is None


@pytest.mark.parametrize(
    ("name", "by_position"),
    [
        ("RMSNorm", (64, 1e-6, True)),
        ("RMSNorm", (64, 1e-6, False, "meta", torch.bfloat16)),
        ("LayerNorm", (64, 1e-5, False)),
        ("LayerNorm", (64, 1e-5, True, False, "meta", torch.bfloat16)),
        ("GELU", ("none",)),
    ],
)
def test_arguments_by_position_mean_what_they_mean_to_torch(name: str, by_position: tuple[Any, ...]) -> None:
    """torch's order of arguments, with which ``RMSNorm(64, 1e-6, True)`` had a weight offset of True."""
    ours, theirs = (getattr(package, name)(*by_position) for package in (cute_ops_torch.nn, nn))
    assert {k: (p.shape, p.dtype, p.device) for k, p in ours.named_parameters()} == {
        k: (p.shape, p.dtype, p.device) for k, p in theirs.named_parameters()
    }
    if "meta" not in by_position:
        x = torch.randn(3, 64)
        torch.testing.assert_close((ours(x), *ours.parameters()), (theirs(x), *theirs.parameters()))


@pytest.mark.parametrize(
    ("name", "by_position"),
    [
        ("RMSNorm", (64, 1e-6, True, None, None, 1.0)), ("RMSNormFP8", (64, 1e-6, True)), ("CrossEntropy", (None,)),
        ("LinearCrossEntropy", (16, 9, True)), ("RoPE", (True,)), ("QKNormRoPE", (64, 1e-6, None)),
    ],
)  # fmt: skip
def test_arguments_beyond_torchs_go_by_name(name: str, by_position: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="arguments were given by position; it takes"):
        getattr(cute_ops_torch.nn, name)(*by_position)


def test_silu_mul_module() -> None:
    gate, up = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    torch.testing.assert_close(cute_ops_torch.nn.SiLUMul()(gate, up), nn.functional.silu(gate) * up)


def test_reset_parameters_resets_a_norm_too() -> None:
    for made in (cute_ops_torch.nn.RMSNormLinear(16, 8), cute_ops_torch.nn.LinearAddRMSNorm(16, 8)):
        with torch.no_grad():
            made.norm_weight.fill_(3.0)
            made.weight.fill_(3.0)
        made.reset_parameters()
        assert made.norm_weight.eq(1).all() and made.weight.abs().max() < 1


def test_modules_of_losses_learn_no_class_weights() -> None:
    """A call gives them; a head's module learns its weight alone."""
    logits, target, weights = torch.randn(3, 9), torch.tensor([0, -100, 8]), torch.rand(9)
    alone = cute_ops_torch.nn.CrossEntropyMetrics(label_smoothing=0.1)
    assert not [*alone.parameters()]
    expected = cute_ops_torch.cross_entropy_metrics(logits, target, weights, label_smoothing=0.1)
    torch.testing.assert_close(alone(logits, target, weights), expected)
    head = cute_ops_torch.nn.LinearCrossEntropyMetrics(9, 5, bias=True)
    assert [name for name, _ in head.named_parameters()] == ["weight", "bias"]
    hidden = torch.randn(3, 5)
    expected = cute_ops_torch.linear_cross_entropy_metrics(hidden, head.weight, target, head.bias, weights)
    torch.testing.assert_close(head(hidden, target, weights), expected)
    teacher = torch.randn(3, 9)
    for name, given in (("Divergence", (logits, teacher)), ("SoftCrossEntropy", (logits, teacher.softmax(-1)))):
        made = getattr(cute_ops_torch.nn, name)()
        function = {"Divergence": "divergence", "SoftCrossEntropy": "soft_cross_entropy"}[name]
        torch.testing.assert_close(made(*given), getattr(cute_ops_torch, function)(*given))


def test_a_group_norm_needs_groups() -> None:
    with pytest.raises(ValueError, match=r"cute\.GroupNorm: num_groups is 0, no divisor of num_channels=8"):
        cute_ops_torch.nn.GroupNorm(0, 8)
