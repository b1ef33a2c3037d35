"""Modules for flax.nnx and equinox against the libraries' own, and the error where a library is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax

ROOT = Path(cute_ops_jax.__file__).parents[1]
Close = Callable[[Any, Any], None]
N = 24


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((3, 5, N), np.float32)


@pytest.fixture
def nnx() -> Any:
    return pytest.importorskip("flax.nnx", reason="flax is not installed")


@pytest.fixture
def eqx() -> Any:
    return pytest.importorskip("equinox", reason="equinox is not installed")


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_nnx_norms_are_flax_norms(name: str, nnx: Any, x: np.ndarray, close: Close) -> None:
    """Values and gradients are equal, with the state of one module in the other."""
    from cute_ops_jax import nnx as ours

    theirs = getattr(nnx, name)(N, scale_init=nnx.initializers.normal(), rngs=nnx.Rngs(1))
    mine = getattr(ours, name)(N, rngs=nnx.Rngs(0))
    nnx.update(mine, nnx.state(theirs))
    results = [
        nnx.jit(nnx.value_and_grad(lambda m, x: jnp.sum(jnp.sin(m(x))), argnums=(0, 1)))(m, x) for m in (mine, theirs)
    ]
    (mine_loss, (mine_state, mine_dx)), (loss, (state, dx)) = results
    assert set(nnx.to_pure_dict(mine_state)) == set(nnx.to_pure_dict(state))
    close((mine_loss, nnx.to_pure_dict(mine_state), mine_dx), (loss, nnx.to_pure_dict(state), dx))


def test_nnx_modules_without_parameters(nnx: Any, x: np.ndarray, close: Close) -> None:
    from cute_ops_jax.nnx import AddRMSNorm, LayerNorm, RMSNorm

    plain = RMSNorm(N, use_scale=False, rngs=nnx.Rngs(0))
    assert not jax.tree.leaves(nnx.state(plain))
    close(plain(x), cute_ops_jax.rmsnorm(x))
    gemma = RMSNorm(N, scale_init=nnx.initializers.zeros, weight_offset=1.0, use_bias=True, rngs=nnx.Rngs(0))
    close(gemma(x), cute_ops_jax.rmsnorm(x))
    out, residual = AddRMSNorm(N, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))(x, x)
    close((out, residual), cute_ops_jax.add_rmsnorm(x, x, jnp.ones(N, jnp.bfloat16)))
    assert out.dtype == jnp.float32
    close(LayerNorm(N, use_bias=False, use_scale=False, rngs=nnx.Rngs(0))(x), cute_ops_jax.layernorm(x, eps=1e-6))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "function"),
    [("silu", jax.nn.silu), ("gelu", lambda x: jax.nn.gelu(x, False)), ("gelu_tanh", jax.nn.gelu)],
)
def test_nnx_mlp(activation: str, function: Callable[..., Any], nnx: Any, x: np.ndarray, close: Close) -> None:
    from cute_ops_jax.nnx import GatedMLP

    mlp = GatedMLP(N, 40, activation=activation, use_bias=True, rngs=nnx.Rngs(0))
    close(mlp(x), mlp.down(function(mlp.gate(x)) * mlp.up(x)))
    with pytest.raises(ValueError, match="GatedMLP: activation is 'relu', expected one of 'silu', 'gelu', 'gelu_tanh'"):
        GatedMLP(N, 40, activation="relu", rngs=nnx.Rngs(0))


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_with_epilogues(bias: bool, nnx: Any, eqx: Any, x: np.ndarray, close: Close) -> None:
    from cute_ops_jax import equinox
    from cute_ops_jax import nnx as ours

    residual = np.ones((3, 5, 16), np.float32)
    for theirs, mine in (
        (nnx.Linear(N, 16, use_bias=bias, rngs=nnx.Rngs(0)), ours.Linear),
        (eqx.nn.Linear(N, 16, bias, key=jax.random.key(0)), equinox.Linear),
    ):
        plain = theirs(x) if mine is ours.Linear else jax.vmap(jax.vmap(theirs))(x)
        close(mine.from_linear(theirs)(x), plain)
        close(mine.from_linear(theirs, epilogue="gelu_tanh")(x), jax.nn.gelu(plain))
        close(mine.from_linear(theirs, epilogue="add")(x, residual), plain + residual)
        scaled = mine.from_linear(theirs, epilogue=lambda xp, acc, bias, *, scale: acc * scale, scale=0.0)
        close(scaled(x), 0 * plain)
    made = ours.Linear(N, 16, epilogue="silu", use_bias=bias, rngs=nnx.Rngs(0))
    state = nnx.state(nnx.Linear(N, 16, use_bias=bias, rngs=nnx.Rngs(1)))
    assert set(nnx.to_pure_dict(nnx.state(made))) == set(nnx.to_pure_dict(state))
    nnx.jit(nnx.grad(lambda layer, x: layer(x).sum()))(made, x)
    one = equinox.Linear(N, 16, bias, epilogue="silu", key=jax.random.key(0))
    close(jax.vmap(jax.vmap(one))(x), one(x))
    eqx.filter_jit(eqx.filter_grad(lambda layer, x: layer(x).sum()))(one, x)


@pytest.mark.slow
def test_a_module_for_every_product(nnx: Any, eqx: Any, x: np.ndarray, close: Close) -> None:
    """Each has the parameters of the library's own layers, and computes what these do."""
    from cute_ops_jax import equinox
    from cute_ops_jax import nnx as ours

    rngs, key = nnx.Rngs(0), jax.random.key(0)
    angles = np.linspace(0, 6, 5 * 32, dtype=np.float32).reshape(5, 32)
    residual, table = np.full((3, 5, 16), 0.5, np.float32), (np.cos(angles), np.sin(angles))
    layer, norm = nnx.Linear(N, 16, rngs=rngs), nnx.RMSNorm(N, scale_init=nnx.initializers.normal(), rngs=rngs)
    plain, after = nnx.Linear(N, 16, use_bias=False, rngs=rngs), nnx.RMSNorm(16, epsilon=1e-3, rngs=rngs)

    def theirs(layer: Any) -> Any:
        """The layer of equinox with a layer's parameters."""
        made = eqx.nn.Linear(layer.in_features, layer.out_features, layer.use_bias, key=key)
        made = eqx.tree_at(lambda m: m.weight, made, layer.kernel[...].T)
        return eqx.tree_at(lambda m: m.bias, made, layer.bias[...]) if layer.use_bias else made

    def theirs_norm(norm: Any) -> Any:
        made = eqx.nn.RMSNorm(norm.num_features, eps=norm.epsilon, use_bias=False)
        return eqx.tree_at(lambda m: m.weight, made, norm.scale[...])

    total = plain(x) + residual
    pairs: list[tuple[Any, Any, tuple[Any, ...], Any]] = [
        (ours.LinearGELU.from_linear(layer), equinox.LinearGELU.from_linear(theirs(layer)), (x,),
         jax.nn.gelu(layer(x), approximate=False)),
        (ours.LinearSiLU.from_linear(layer), equinox.LinearSiLU.from_linear(theirs(layer)), (x,),
         jax.nn.silu(layer(x))),
        (ours.LinearAdd.from_linear(layer), equinox.LinearAdd.from_linear(theirs(layer)), (x, residual),
         layer(x) + residual),
        (ours.RMSNormLinear.from_layers(norm, layer, epilogue="add"),
         equinox.RMSNormLinear.from_layers(theirs_norm(norm), theirs(layer), epilogue="add"), (x, residual),
         layer(norm(x)) + residual),
        (ours.LinearAddRMSNorm.from_layers(plain, after),
         equinox.LinearAddRMSNorm.from_layers(theirs(plain), theirs_norm(after)), (x, residual), (after(total), total)),
        (ours.GatedLinear.from_linear(plain, plain), equinox.GatedLinear.from_linear(theirs(plain), theirs(plain)),
         (x,), jax.nn.silu(plain(x)) * plain(x)),
    ]  # fmt: skip
    turning = ours.QKVRope(N, 2, 1, 64, rngs=rngs)
    expected = cute_ops_jax.qkv_rope(x, turning.kernel[...].T, *table, 3)
    turned = eqx.tree_at(lambda m: m.weight, equinox.QKVRope(N, 2, 1, 64, key=key), turning.kernel[...].T)
    for mine, other, given, wanted in [*pairs, (turning, turned, (x, *table), expected)]:
        for made in (mine, other):
            close(made(*given), wanted)
    for made, size in ((ours.RMSNormLinear(N, 16, rngs=rngs), N), (ours.LinearAddRMSNorm(N, 16, rngs=rngs), 16)):
        assert made.norm_scale.shape == (size,)
    assert ours.GatedLinear(N, 16, rngs=rngs).kernel.shape == (N, 32)
    for bad in (
        lambda: ours.LinearGELU(N, 16, approximate="erf", rngs=rngs),
        lambda: ours.RMSNormLinear.from_layers(after, layer),
        lambda: equinox.LinearAddRMSNorm.from_layers(theirs(layer), theirs_norm(after)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            bad()


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_packed_mlps(activation: str, nnx: Any, eqx: Any, x: np.ndarray, close: Close) -> None:
    from cute_ops_jax import equinox
    from cute_ops_jax import nnx as ours

    mlp = ours.GatedMLP(N, 40, activation=activation, rngs=nnx.Rngs(0))
    packed = ours.PackedGatedMLP.from_linear(mlp.gate, mlp.up, mlp.down, activation=activation, save="none")
    close(packed(x), mlp(x))
    assert ours.PackedGatedMLP(N, 40, rngs=nnx.Rngs(0)).gate_up.kernel.shape == (N, 80)
    nnx.jit(nnx.grad(lambda layer, x: layer(x).sum()))(packed, x)
    layers = []
    for layer in (mlp.gate, mlp.up, mlp.down):
        other = eqx.nn.Linear(*layer.kernel.shape, False, key=jax.random.key(0))
        layers.append(eqx.tree_at(lambda m: m.weight, other, layer.kernel[...].T))
    made = equinox.GatedMLP.from_linear(*layers, activation=activation)
    close(made(x), mlp(x))
    close(jax.vmap(made)(x), mlp(x))
    assert equinox.GatedMLP(N, 40, key=jax.random.key(0)).gate_up.weight.shape == (80, N)


@pytest.mark.slow
@pytest.mark.parametrize("use_bias", [True, False])
def test_mlps(use_bias: bool, nnx: Any, eqx: Any, x: np.ndarray, close: Close) -> None:
    from cute_ops_jax import equinox
    from cute_ops_jax import nnx as ours

    up, down = (nnx.Linear(*size, use_bias=use_bias, rngs=nnx.Rngs(k)) for k, size in enumerate([(N, 40), (40, N)]))
    if use_bias:
        up.bias, down.bias = (nnx.Param(jnp.cos(jnp.arange(float(size)))) for size in (40, N))
    expected = down(jax.nn.relu(up(x)) ** 2)
    mlp = ours.MLP.from_linear(up, down, activation="relu2", save="none")
    close(mlp(x), expected)
    nnx.jit(nnx.grad(lambda layer, x: layer(x).sum()))(mlp, x)
    assert ours.MLP(N, 40, use_bias=use_bias, rngs=nnx.Rngs(0)).up.kernel.shape == (N, 40)
    layers = []
    for layer in (up, down):
        other = eqx.nn.Linear(*layer.kernel.shape, use_bias, key=jax.random.key(0))
        other = eqx.tree_at(lambda m: m.weight, other, layer.kernel[...].T)
        layers.append(eqx.tree_at(lambda m: m.bias, other, layer.bias[...]) if use_bias else other)
    made = equinox.MLP.from_linear(*layers, activation="relu2")
    close(made(x), expected)
    close(jax.vmap(made)(x), expected)
    assert equinox.MLP(N, 40, use_bias=use_bias, key=jax.random.key(0)).up.weight.shape == (40, N)


@pytest.mark.slow
def test_halves_that_devices_may_share(nnx: Any, eqx: Any, x: np.ndarray, close: Close) -> None:
    """The same numbers in the same order."""
    from cute_ops_jax import equinox
    from cute_ops_jax import nnx as ours

    gate, up, down = (
        nnx.Linear(*size, use_bias=False, rngs=nnx.Rngs(k)) for k, size in enumerate([(N, 40)] * 2 + [(40, N)])
    )
    first, mlp = nnx.silu(gate(x)) * up(x), down(nnx.silu(gate(x)) * up(x))
    layers = []
    for layer in (gate, up, down):
        made = eqx.nn.Linear(*layer.kernel.shape, False, key=jax.random.key(0))
        layers.append(eqx.tree_at(lambda m: m.weight, made, layer.kernel[...].T))
    for made, wanted, shape in (
        (ours.GatedLinear.from_linear(gate, up, halves=True), first, (N, 2, 40)),
        (equinox.GatedLinear.from_linear(*layers[:2], halves=True), first, (2, 40, N)),
        (ours.PackedGatedMLP.from_linear(gate, up, down, halves=True), mlp, (N, 2, 40)),
        (equinox.GatedMLP.from_linear(*layers, halves=True), mlp, (2, 40, N)),
    ):
        close(made(x), wanted)
        assert shape in [a.shape for a in jax.tree.leaves(made)]
    for pair in (
        [ours.GatedLinear(N, 40, halves=halves, rngs=nnx.Rngs(0)) for halves in (True, False)],
        [ours.PackedGatedMLP(N, 40, halves=halves, rngs=nnx.Rngs(0)) for halves in (True, False)],
        [equinox.GatedLinear(N, 40, halves=halves, key=jax.random.key(0)) for halves in (True, False)],
        [equinox.GatedMLP(N, 40, halves=halves, key=jax.random.key(0)) for halves in (True, False)],
    ):
        close(pair[0](x), pair[1](x))
        gradients = [jax.grad(lambda m, x: jnp.sum(jnp.sin(m(x))), allow_int=True)(m, x) for m in pair]
        close(*([np.ravel(a) for a in jax.tree.leaves(g)] for g in gradients))


def heads() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(s, np.float32) for s in ((2, 5, 4, 8), (2, 5, 2, 8), (5, 4), (5, 4)))


def test_qk_norm_rope(nnx: Any, eqx: Any, close: Close) -> None:
    from cute_ops_jax import equinox
    from cute_ops_jax import nnx as ours

    weight = np.ones(8, np.float32)
    q, k, cos, sin = heads()
    expected = cute_ops_jax.qk_norm_rope(q, k, weight, weight, cos, sin)
    close(ours.QKNormRope(8, rngs=nnx.Rngs(0))(q, k, cos, sin), expected)
    close(equinox.QKNormRope(8)(q, k, cos, sin), expected)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_equinox_norms_are_equinox_norms(name: str, eqx: Any, x: np.ndarray, close: Close) -> None:
    """One example under vmap, as with equinox's own, and a batch without."""
    from cute_ops_jax import equinox

    weight = np.linspace(0.5, 1.5, N, dtype=np.float32)
    pair = [eqx.tree_at(lambda m: m.weight, getattr(lib, name)(N), weight) for lib in (equinox, eqx.nn)]

    def loss(module: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(jax.vmap(jax.vmap(module))(x)))

    (mine, mine_grad), (own, own_grad) = (eqx.filter_jit(eqx.filter_value_and_grad(loss))(m, x) for m in pair)
    close((mine, mine_grad.weight, mine_grad.bias), (own, own_grad.weight, own_grad.bias))
    close(pair[0](x), jax.vmap(jax.vmap(pair[1]))(x))


def test_equinox_add(eqx: Any, x: np.ndarray, close: Close) -> None:
    from cute_ops_jax.equinox import AddRMSNorm

    norm = AddRMSNorm(N, use_bias=False, weight_offset=1.0)
    close(jax.vmap(jax.vmap(norm))(x, x), cute_ops_jax.add_rmsnorm(x, x, eps=1e-5))
    assert [a.shape for a in jax.tree.leaves(norm)] == [(N,)]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "library"), [("nnx", "flax"), ("equinox", "equinox")])
def test_libraries_are_optional(module: str, library: str) -> None:
    code = f"""
import sys
sys.modules[{library!r}] = None
import cute_ops_jax
try:
    import cute_ops_jax.{module}
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == f"cute_ops_jax.{module} needs {library}: pip install 'cute-ops[{module}]'"


@pytest.mark.slow
def test_they_are_imported_on_demand_only() -> None:
    code = "import sys, cute_ops_jax; print([m for m in ('flax', 'equinox', 'optax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
