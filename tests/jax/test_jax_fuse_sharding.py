"""``fuse`` of functions whose arrays devices share, inside and around ``jit``: with automatic and explicit meshes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cute_ops_jax
from tests.jax.drawn_graphs import QUICK

B, T, N, HIDDEN, HEADS = 8, 3, 16, 24, 2
RNG = np.random.default_rng(2)
Arrays = dict[str, jax.Array]


def draw(*shape: int) -> jax.Array:
    return jnp.asarray((RNG.standard_normal(shape) * 0.4).astype(np.float32))


SHAPES = {
    "n1": (N,), "n2": (N,), **dict.fromkeys("qkv", (N, HEADS * 64)), "o": (HEADS * 64, N), "gate": (N, HIDDEN),
    "up": (N, HIDDEN), "down": (HIDDEN, N), "w1": (N, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, N), "b2": (N,),
    "embed": (32, N), "head": (N, 32),
}  # fmt: skip
PARAMS = {name: draw(*shape) for name, shape in SHAPES.items()}
COLUMNS = {name: P(None, "t") for name in ("q", "k", "v", "gate", "up", "w1", "head")} | {"b1": P("t")}
# Of products whose sums devices share, too.
TENSOR = COLUMNS | {name: P("t", None) for name in ("o", "down", "w2", "embed")}


def rms(x: jax.Array, weight: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weight


def attended(p: Arrays, x: jax.Array) -> jax.Array:
    angles = (jnp.arange(T)[:, None] * 0.9 ** jnp.arange(32))[None, :, None]
    cos, sin, y = jnp.cos(angles), jnp.sin(angles), rms(x, p["n1"])

    def turned(x: jax.Array) -> jax.Array:
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    q, k, v = ((y @ p[name]).reshape(B, T, HEADS, 64) for name in "qkv")
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), jnp.einsum("bqhd,bkhd->bhqk", turned(q), turned(k)) / 8, -1e9)
    return x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v).reshape(B, T, -1) @ p["o"]


def block(p: Arrays, x: jax.Array) -> jax.Array:
    x = attended(p, x)
    y = rms(x, p["n2"])
    x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
    return x + jax.nn.gelu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def loss(p: Arrays, tokens: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(block(p, p["embed"][tokens]) @ p["head"])
    return -jnp.take_along_axis(logp, (tokens + 1)[..., None] % 32, -1).mean()


TOKENS = jnp.asarray(RNG.integers(0, 32, (B, T)), jnp.int32)
X = draw(B, T, N)


def on_mesh(function: Callable[..., Any], x: jax.Array, specs: dict[str, P], kind: Any) -> list[np.ndarray[Any, Any]]:
    """The results for the parameters and inputs that eight devices share."""
    mesh = jax.make_mesh((4, 2), ("b", "t"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        params = {n: jax.device_put(a, NamedSharding(mesh, specs.get(n, P()))) for n, a in PARAMS.items()}
        made = jax.jit(function, compiler_options=QUICK)(params, jax.device_put(x, NamedSharding(mesh, P("b"))))
        return [np.asarray(a) for a in jax.tree.leaves(made)]


def close(got: list[np.ndarray[Any, Any]], want: Any) -> None:
    for a, b in zip(got, jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * max(1e-2, np.abs(b).max()))


@pytest.mark.slow
def test_what_devices_share_of_a_model() -> None:
    """Columns and rows of weights: the results of products are summed before what follows them."""
    becomes = [entry.becomes for entry in cute_ops_jax.fuse.report(loss, PARAMS, TOKENS).replaced]
    assert {"qkv_rope", "linear_add_rmsnorm", "gated_mlp", "mlp", "linear_cross_entropy", "embedding"} <= {*becomes}
    gradients = jax.value_and_grad(loss)
    want = jax.jit(gradients, compiler_options=QUICK)(PARAMS, TOKENS)
    close(on_mesh(jax.value_and_grad(cute_ops_jax.fuse(loss)), TOKENS, TENSOR, AxisType.Auto), want)
    close(on_mesh(cute_ops_jax.fuse(jax.jit(gradients)), TOKENS, TENSOR, AxisType.Auto), want)


@pytest.mark.slow
@pytest.mark.parametrize("specs", [{}, COLUMNS])
def test_explicit_meshes(specs: dict[str, P]) -> None:
    """Cotangents get the sharding of what they belong to."""

    def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda p, x: jnp.sum(jnp.sin(function(p, x))), (0, 1))

    specs = {name: spec for name, spec in specs.items() if name in "qkv"}
    want = jax.jit(gradients(attended), compiler_options=QUICK)(PARAMS, X)
    specs |= {"o": P()}
    close(on_mesh(gradients(cute_ops_jax.fuse(attended)), X, specs, AxisType.Explicit), want)


@pytest.mark.parametrize("check_vma", [False, True])
def test_losses_in_a_shard_map(check_vma: bool) -> None:
    """Numbers, places and labels that are the same on all devices are no obstacle."""
    mesh = jax.make_mesh((8,), ("b",), axis_types=(AxisType.Auto,))

    def of_rows(x: jax.Array, head: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = x @ head
        losses = -jnp.sum(jax.nn.one_hot(tokens, 32) * jax.nn.log_softmax(logits), -1)
        return jax.lax.pmean(losses.mean(), "b"), jax.lax.pmean((logits.argmax(-1) == tokens).mean(), "b")

    specs: Any = {"mesh": mesh, "in_specs": (P("b"), P(), P("b")), "out_specs": (P(), P()), "check_vma": check_vma}
    function = jax.shard_map(of_rows, **specs)
    found = cute_ops_jax.fuse.report(function, X, PARAMS["head"], TOKENS).replaced
    assert [entry.becomes for entry in found] == ["linear_cross_entropy_metrics"]
    got, want = (
        jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True), compiler_options=QUICK)(X, PARAMS["head"], TOKENS)
        for f in (cute_ops_jax.fuse(function), function)
    )
    close([np.asarray(a) for a in jax.tree.leaves(got)], want)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gather", "one-hot rows and accuracy", "logits in float32", "weights"])
def test_losses_on_explicit_meshes(form: str) -> None:
    """Where rows are sharded, and for labels that are no class, whose losses a loop computes."""

    def of_head(labels: jax.Array, p: Arrays, x: jax.Array) -> Any:
        wide = jnp.float32 if form in ("logits in float32", "weights") else None
        x, head = (a.astype(jnp.bfloat16) if wide else a for a in (x, p["head"]))
        logits = jnp.matmul(x, head, preferred_element_type=wide)
        if form == "gather":
            at = jnp.take_along_axis(logits, labels[..., None], -1, mode="clip")[..., 0]
            return (jax.nn.logsumexp(logits, -1) - at).mean()
        rows = jax.nn.one_hot(labels, 32, dtype=logits.dtype)
        correct = (logits.argmax(-1) == labels).mean() if not wide else 0.0
        losses = jax.nn.logsumexp(logits, -1) - (rows * logits).sum(-1)
        return (losses * jnp.arange(losses.shape[-1])).sum() if form == "weights" else losses.mean() + correct

    for labels in (TOKENS, TOKENS.at[0, 1].set(-100)):
        of_labels = partial(of_head, labels)
        want = jax.value_and_grad(of_labels, (0, 1))(PARAMS, X)
        got = on_mesh(jax.value_and_grad(cute_ops_jax.fuse(of_labels), (0, 1)), X, {}, AxisType.Explicit)
        for a, b in zip(got, jax.tree.leaves(want), strict=True):
            rtol = 1e-2 if form in ("logits in float32", "weights") else 2e-5
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * max(1e-2, np.abs(b).max()))


@pytest.mark.parametrize("part", ["lookup", "norm"])
def test_parts_on_automatic_axes_of_an_explicit_mesh_stay(part: str) -> None:
    """``auto_axes``, and a lookup that says how its rows are sharded, run on another mesh than the program."""
    mesh = jax.make_mesh((8,), ("b",), axis_types=(AxisType.Explicit,))
    table, tokens = draw(16, 32), jnp.arange(16, dtype=jnp.int32)[::-1]

    def function(table: jax.Array, tokens: jax.Array) -> jax.Array:
        if part == "lookup":
            return jnp.sin(table.at[tokens].get(out_sharding=P("b", None))).sum()
        scaled = jax.sharding.auto_axes(rms, out_sharding=P(None, None))(table, table[0])
        return jnp.sin(scaled).sum()

    with jax.set_mesh(mesh):
        given = jax.device_put(table, NamedSharding(mesh, P())), jax.device_put(tokens, NamedSharding(mesh, P("b")))
        got, want = (jax.jit(jax.grad(each))(*given) for each in (cute_ops_jax.fuse(function), function))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
