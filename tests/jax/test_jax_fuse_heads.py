"""``fuse`` of projections whose weights have heads as dims, ``[d, heads, columns]``, as einsum programs have them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from tests.jax.drawn_graphs import QUICK

Arrays = dict[str, jax.Array]
EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-8}
MODES = ("inside", "around", "vmap", "scan", "remat", "frozen", "shared")


def turned(x: jax.Array, positions: int) -> jax.Array:
    """Rotated heads of ``x [b, s, h, k]`` or ``[b, h, s, k]``."""
    r = x.shape[-1] // 2
    angles = jnp.arange(x.shape[positions])[:, None] * 1e2 ** (-jnp.arange(r) / r)
    angles = angles.reshape([r if i == 3 else size if i == positions else 1 for i, size in enumerate(x.shape)])
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def rms(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, "float32"))
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * weight


class Drawn:
    """A layer with attention: where its weights have their dims, how its heads lie, its mask and what is added."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 41])

        def one(*names: str) -> str:
            return str(rng.choice(names))

        self.into, self.out, self.lies = one("dhk", "hkd", "hdk"), one("hkd", "dhk", "hdk"), one("bshk", "bhsk")
        self.b, self.s, self.h, self.k, self.d = (
            int(rng.choice(sizes)) for sizes in ((1, 2), (4, 6), (1, 2, 4), (64, 128), (16, 64))
        )
        self.mask, self.rope, self.bias, self.after = (
            one("causal", "padding", ""),
            one("rope", ""),
            one("bias", ""),
            one("norm", "add", ""),
        )
        self.mode = MODES[seed % len(MODES)]
        sizes = {"d": self.d, "h": self.h, "k": self.k}
        self.shapes = {name: tuple(map(sizes.__getitem__, self.into)) for name in "qkv"}
        self.shapes |= {"o": tuple(map(sizes.__getitem__, self.out)), "n": (self.d,), "bo": (self.d,)}
        self.shapes |= {"b" + name: (self.h, self.k) for name in "qkv"}
        self.arrays = {name: rng.standard_normal(shape) * self.d**-0.5 for name, shape in self.shapes.items()}
        self.x = rng.standard_normal((3, self.b, self.s, self.d))
        self.kept = np.arange(self.s) < rng.integers(1, self.s + 1, (self.b, 1))

    def __str__(self) -> str:
        return str({name: value for name, value in vars(self).items() if name not in ("arrays", "x", "kept")})

    def heads(self, x: jax.Array, p: Arrays, name: str) -> jax.Array:
        y = jnp.einsum(f"bsd,{self.into}->{self.lies}", x, p[name])
        bias = p["b" + name]
        y = y + (bias if self.lies == "bshk" else bias[:, None]) if self.bias else y
        return turned(y, self.lies.index("s")) if self.rope and name != "v" else y

    def layer(self, x: jax.Array, p: Arrays) -> jax.Array:
        q, k, v = (self.heads(x, p, name) for name in "qkv")
        as_q, as_k = self.lies.replace("s", "q"), self.lies.replace("s", "t")
        scores = jnp.einsum(f"{as_q},{as_k}->bhqt", q, k) * self.k**-0.5
        shown = jnp.tril(jnp.ones((self.s, self.s), bool)) if self.mask == "causal" else self.kept[:, None, None]
        scores = jnp.where(shown, scores, -1e9) if self.mask else scores
        weights = jax.nn.softmax(scores.astype(jnp.promote_types(x.dtype, "float32")), -1).astype(x.dtype)
        o = jnp.einsum(f"bhqt,{as_k}->{as_q}", weights, v)
        y = jnp.einsum(f"{self.lies},{self.out}->bsd", o, p["o"]) + (p["bo"] if self.bias else 0)
        return rms(x + y, p["n"]) if self.after == "norm" else x + y if self.after else y

    def run(self, x: jax.Array, p: Arrays) -> jax.Array:
        """Of three inputs."""
        if self.mode == "vmap":
            return jax.vmap(self.layer, (0, None))(x, p)
        if self.mode == "scan":
            return jax.lax.scan(lambda y, x: (self.layer(y + x, p), None), jnp.zeros_like(x[0]), x)[0]
        if self.mode == "remat":
            return jax.checkpoint(self.layer)(x[0], p)
        return self.layer(x[0], p | {"k": p["q"]} if self.mode == "shared" else p)

    def gradients(self, dtype: str, fuses: bool) -> Any:
        fuse = cute_ops_jax.fuse if fuses else lambda function: function
        p, x = ({name: jnp.asarray(each, dtype) for name, each in self.arrays.items()}, jnp.asarray(self.x, dtype))
        learned = {"q", "bq", "o"} if self.mode == "frozen" else set(p)

        def loss(run: Callable[..., jax.Array], some: Arrays, x: jax.Array) -> Any:
            out = run(x, p | some)
            return jnp.sum(jnp.sin(out.astype(jnp.promote_types(dtype, "float32")))), out

        def grad(run: Callable[..., jax.Array]) -> Callable[..., Any]:
            return jax.grad(partial(loss, run), (0, 1), has_aux=True)

        made = fuse(grad(self.run)) if self.mode == "around" else grad(fuse(self.run))
        return jax.jit(made, compiler_options=QUICK)({name: p[name] for name in sorted(learned)}, x)


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("seed", range(21))
def test_drawn_layers_beside_float64(seed: int) -> None:
    drawn, dtype = Drawn(seed), ("bfloat16", "float32")[seed // len(MODES) % 2]
    got, plain = drawn.gradients(dtype, True), drawn.gradients(dtype, False)
    with jax.enable_x64(True):
        exact = jax.tree.map(np.asarray, drawn.gradients("float64", False))
    most = max(float(np.abs(each).max()) for each in jax.tree.leaves(exact[0]))
    for (path, a), b, c in zip(
        jax.tree_util.tree_leaves_with_path(got), *map(jax.tree.leaves, (plain, exact)), strict=True
    ):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        far, its = (float(np.abs(np.asarray(each, np.float64) - c).max()) for each in (a, b))
        size = max(float(np.abs(c).max()), 0.25 * most)  # keys' biases have no gradient without a rotation
        assert far <= 1.7 * its + 4 * EPS[dtype] * size, f"{jax.tree_util.keystr(path)}: {far} beside {its}: {drawn}"


B, T, D, H, K = 2, 4, 16, 2, 64
KEY = np.random.default_rng(5)


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(KEY.standard_normal(shape) * 0.3, jnp.float32)


def check(function: Callable[..., Any], *args: Any) -> list[str]:
    """Compare values and gradients with those of what a function becomes; returns what that is."""

    def loss(function: Callable[..., Any], *args: Any) -> Any:
        out = function(*args)
        return sum(jnp.sum(jnp.sin(each)) for each in jax.tree.leaves(out)), out

    fused = cute_ops_jax.fuse(function)
    made = [jax.jit(jax.grad(partial(loss, each), tuple(range(len(args))), has_aux=True), compiler_options=QUICK)(*args)
            for each in (function, fused)]  # fmt: skip
    for a, b in zip(*map(jax.tree.leaves, made), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-5 * max(1, float(jnp.abs(a).max())))
    return [entry.becomes for entry in cute_ops_jax.fuse.report(function, *args).replaced]


X, Q, V, O, BIAS, NORM = draw(B, T, D), draw(D, H, K), draw(D, H, K), draw(H, K, D), draw(H, K), draw(D)
INTO = {"dhk": (0, 1, 2), "hkd": (1, 2, 0), "hdk": (1, 0, 2)}


@pytest.mark.parametrize("lies", ["bshk", "bhsk"])
@pytest.mark.parametrize("into", INTO)
def test_projections_to_rotated_heads(into: str, lies: str) -> None:
    """Weights in each order of dims, heads before and behind positions; the products run once."""

    def function(x: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        q, k, v = (jnp.einsum(f"bsd,{into}->{lies}", x, each) for each in (q, k, v))
        return turned(q, lies.index("s")), turned(k, lies.index("s")), v

    args = X, *(each.transpose(INTO[into]) for each in (Q, draw(D, H, K), V))
    assert check(function, *args) == ["qkv_rope"]
    equations = jax.make_jaxpr(cute_ops_jax.fuse(function))(*args).eqns
    assert not [each for each in equations if each.primitive.name == "dot_general"]


@pytest.mark.parametrize("out", ["hkd", "dhk", "hdk"])
def test_output_projections_with_the_norm_after_them(out: str) -> None:
    def function(x: jax.Array, o: jax.Array, weight: jax.Array, norm: jax.Array) -> jax.Array:
        return rms(x + jnp.einsum(f"bshk,{out}->bsd", o, weight), norm)

    weight = jnp.einsum(f"hkd->{out}", O)
    assert check(function, X, draw(B, T, H, K), weight, NORM) == ["linear_add_rmsnorm"]


def projected(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum("bsd,dhk->bshk", x, weight)


GATED = (X, draw(D, 2, K), draw(2, K), draw(K, D))
ELEMENTS: dict[str, tuple[Callable[..., Any], tuple[jax.Array, ...], list[str]]] = {
    "a bias": (lambda x, w, b: projected(x, w) + b, (X, Q, BIAS), ["linear"]),
    "a bias that is cast": (
        lambda x, w, b: (projected(x, w).astype("float32") + b[None, None]).astype(x.dtype), (X, Q, BIAS), ["linear"]),
    "a bias, then a norm of each head": (
        lambda x, w, b, n: rms(projected(x, w) + b, n), (X, Q, BIAS, draw(K)), ["linear", "rmsnorm"]),
    "a gate": (lambda x, w, y: jax.nn.sigmoid(projected(x, w)) * y, (X, Q, draw(B, T, H, K)), ["linear"]),
    "a number per head": (lambda x, w, b: jnp.tanh(projected(x, w)) * b, (X, Q, draw(H, 1)), ["fused"]),
    "a gate of rows": (
        lambda x, w, y: jax.nn.sigmoid(projected(x, w)) * y[..., None, None], (X, Q, draw(B, T)), ["linear"]),
    "read twice": (lambda x, w, b: (projected(x, w) + b, jnp.tanh(projected(x, w)).sum(-1)), (X, Q, BIAS), ["fused"]),
    "an MLP of hidden dims": (
        lambda x, w, b, o: jnp.einsum("bshk,hkd->bsd", jax.nn.silu(projected(x, w) + b), o), (X, Q, BIAS, O), ["mlp"]),
    "gate and up in one weight": (
        lambda x, w, _, o: (lambda y: jax.nn.silu(y[:, :, 0]) * y[:, :, 1])(projected(x, w)) @ o, GATED, ["gated_mlp"]),
    "gate and up with a bias": (
        lambda x, w, b, o: (lambda y: jax.nn.silu(y[:, :, 0]) * y[:, :, 1])(projected(x, w) + b) @ o, GATED, ["linear"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTS)
def test_elements_of_products_in_heads(name: str) -> None:
    function, args, want = ELEMENTS[name]
    assert check(function, *args) == want


@pytest.mark.parametrize("spec", [("x", None, "y"), ("x", "y", None)])
def test_weights_whose_heads_are_on_several_devices(spec: tuple[str | None, ...]) -> None:
    """A column of a mesh has some heads, and perhaps some rows; results are those of one device."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    heads = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, spec[1] or spec[2]))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(spec[0]))

    def function(x: jax.Array, w: jax.Array, b: jax.Array, o: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(x + jnp.einsum("bshk,hkd->bsd", jax.nn.silu(projected(x, w) + b), o)))

    args = X, Q, BIAS, O
    want = jax.grad(function, (0, 1, 2, 3))(*args)
    placed = (jax.device_put(X, rows), jax.device_put(Q, heads), BIAS, O)
    got = jax.jit(jax.grad(cute_ops_jax.fuse(function), (0, 1, 2, 3)), compiler_options=QUICK)(*placed)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
