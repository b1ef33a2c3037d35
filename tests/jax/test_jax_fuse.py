"""``fuse``: untouched functions and models run on our ops, and compute what they computed before."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from cute_ops.fusion.report import Report
from cute_ops_jax.fusion.program import Program
from tests.jax.drawn_graphs import run_seed

B, T, N = 2, 4, 16
KEY = np.random.default_rng(3)


def draw(*shape: int, dtype: str = "float32", scale: float = 1.0) -> jax.Array:
    """Rounded by NumPy: JAX would compile that for each shape."""
    return jnp.asarray((KEY.standard_normal(shape) * scale).astype(np.float32)).astype(dtype)


def became(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    return [entry.becomes for entry in cute_ops_jax.fuse.report(function, *args, **kwargs).replaced]


def same(got: Any, want: Any, rtol: float = 2e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        b = np.asarray(b, np.float64)
        np.testing.assert_allclose(
            np.asarray(a, np.float64), b, rtol=rtol, atol=rtol * max(1, np.abs(b).max(initial=0))
        )


def rms(x: jax.Array, w: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    return w * (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def layernorm(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(jnp.var(x, -1, keepdims=True) + 1e-5) * w + b


def block(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    b, t, d = x.shape
    y = rms(x, p["n1"])
    q, k, v = ((y @ p[name]).reshape(b, t, 4, d // 4).transpose(0, 2, 1, 3) for name in "qkv")
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(d // 4)
    mixed = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, -1), v)
    x = x + mixed.transpose(0, 2, 1, 3).reshape(b, t, d) @ p["o"]
    y = rms(x, p["n2"])
    return x + (jax.nn.silu(y @ p["g"]) * (y @ p["u"])) @ p["d"]


def params() -> dict[str, jax.Array]:
    shapes = {**dict.fromkeys(("n1", "n2"), (N,)), **dict.fromkeys("qkvo", (N, N)), **dict.fromkeys("gu", (N, 2 * N))}
    return {name: draw(*shape, scale=0.3) for name, shape in (shapes | {"d": (2 * N, N)}).items()}


BLOCK = ["rmsnorm", "fused", "linear_add_rmsnorm", "gated_mlp"]
X, W, BIAS = draw(B, T, N), draw(N), draw(N)
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[str]]] = {
    "rms norm": (rms, (X, W), ["rmsnorm"]),
    "1 + weight": (lambda x, w: rms(x, 1 + w), (X, W), ["rmsnorm"]),
    "layer norm": (layernorm, (X, W, BIAS), ["layernorm"]),
    "residual and norm": (lambda x, y, w: (x + y, rms(x + y, w)), (X, X * 2, W), ["add_rmsnorm"]),
    "gate": (lambda x, y: jax.nn.silu(x) * y, (X, X * 2), ["silu_mul"]),
    "gelu gate": (lambda x, y: jax.nn.gelu(x) * y, (X, X * 2), ["gelu_mul"]),
    "exact gelu gate": (lambda x, y: jax.nn.gelu(x, approximate=False) * y, (X, X * 2), ["gelu_mul"]),
    "packed gate": (lambda x: jax.nn.silu(x[..., : N // 2]) * x[..., N // 2 :], (X,), ["swiglu"]),
    "squared relu": (lambda x: jnp.square(jax.nn.relu(x)), (X,), ["relu2"]),
    "softmax": (lambda x: jax.nn.softmax(x, -1), (X,), ["softmax"]),
    "log softmax": (lambda x: jax.nn.log_softmax(x, -1), (X,), ["log_softmax"]),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, -1), (X,), ["fused"]),
    "bias and gelu": (lambda x, w, b: jax.nn.gelu(x @ w + b), (X, draw(N, 8), draw(8)), ["linear"]),
    "weights as in PyTorch": (lambda x, w, b: jax.nn.silu(x @ w.T + b), (X, draw(8, N), draw(8)), ["linear"]),
    "modulation": (lambda x, c: x * (1 + c[:, None]) + jnp.tanh(c)[:, None], (X, draw(B, N)), ["fused"]),
    "block": (lambda x: block(PARAMS, x), (X,), BLOCK),
    "scan": (lambda x: jax.lax.scan(lambda x, p: (block(p, x), None), x, STACKED)[0], (X,), BLOCK),
    "cond": (lambda x: jax.lax.cond(x[0, 0, 0] > 0, lambda x: rms(x, W), jnp.tanh, x), (X,), ["rmsnorm"]),
    "while": (
        lambda x: jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, rms(s[1], W)), (0, x))[1],
        (X,), ["rmsnorm"],
    ),
    "checkpoint": (lambda x: jax.checkpoint(lambda x: block(PARAMS, x))(x), (X,), BLOCK),
    "vmap inside": (lambda x: jax.vmap(jax.vmap(lambda row: rms(row, W)))(x), (X,), ["rmsnorm"]),
}  # fmt: skip
PARAMS = params()
STACKED = jax.tree.map(lambda a: jnp.asarray(np.stack([a, 0.5 * np.asarray(a)])), PARAMS)


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_become_ops(name: str) -> None:
    function, args, want = FUNCTIONS[name]
    assert became(function, *args) == want
    same(cute_ops_jax.fuse(function)(*args), function(*args))
    if name == "while":  # has no reverse mode
        return

    def loss(function: Any, *args: Any) -> Any:
        return sum(jnp.sum(jnp.tanh(out)) for out in jax.tree.leaves(function(*args)))

    places = tuple(range(len(args)))
    got = jax.jit(jax.grad(lambda *a: loss(cute_ops_jax.fuse(function), *a), places))(*args)
    same(got, jax.grad(lambda *a: loss(function, *a), places)(*args))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scan", "layer norm", "modulation"])
def test_around_grad_and_inside_vmap(name: str) -> None:
    function, args, _ = FUNCTIONS[name]
    grad = jax.grad(lambda *a: jnp.sum(jnp.tanh(function(*a))), tuple(range(len(args))))
    same(cute_ops_jax.fuse(grad)(*args), grad(*args))
    many = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), args)
    same(jax.vmap(cute_ops_jax.fuse(function))(*many), jax.vmap(function)(*many))


@pytest.mark.parametrize("mapped", [False, True])
def test_loops_whose_examples_end_apart(mapped: bool) -> None:
    """Under ``vmap`` the condition of a loop has a value for each example, also in a shard map."""
    counts = jnp.asarray(KEY.permutation(B))

    def one(x: Any, count: Any) -> Any:
        return jax.lax.while_loop(lambda s: s[0] < count, lambda s: (s[0] + 1, rms(s[1], W) * 1.5), (0, x))[1]

    each = jax.vmap(one)
    function = each
    if mapped:
        mesh = jax.make_mesh((B,), ("b",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:B])
        spec = jax.sharding.PartitionSpec("b")
        function = jax.shard_map(each, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    (entry,) = cute_ops_jax.fuse.report(function, X, counts).replaced
    assert (entry.becomes, entry.where) == ("fused", "shard_map while" if mapped else "while")
    same(jax.jit(cute_ops_jax.fuse(function))(X, counts), each(X, counts))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_programs_have_the_same_meanings(dtype: str) -> None:
    """Constants that a 16-bit program rounds, and casts in between, are what they stand for."""
    x, w = X.astype(dtype), W.astype(dtype)
    for name in ("rms norm", "gate", "gelu gate", "exact gelu gate", "softmax", "log softmax", "residual and norm"):
        function, args, want = FUNCTIONS[name]
        given = [w if a.ndim == 1 else x for a in args]
        assert became(function, *given) == want, name
        for out in jax.tree.leaves(cute_ops_jax.fuse(function)(*given)):
            assert out.dtype == dtype


def test_exact_keeps_each_rounding() -> None:
    """Casts and constants of 16 bits, so that eager operations give the same bits."""
    x = X.astype("bfloat16")

    def function(x: Any, y: Any) -> Any:
        return (jax.nn.gelu(x) + y) * 0.3

    (entry,) = cute_ops_jax.fuse.report(function, x, x * 2, exact=True).replaced
    assert "astype" in entry.what and "0.0446" in entry.what
    got = cute_ops_jax.fuse(function, exact=True)(x, x * 2)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(function(x, x * 2), np.float32))


def test_exact_rounds_a_word_once() -> None:
    """Where XLA's own 16-bit sigmoid rounds inside, too: results differ from it by that."""
    x, y, w = (draw(64, 8, dtype="bfloat16"), draw(64, 8, dtype="bfloat16"), draw(8, 8, dtype="bfloat16"))
    z = x @ w
    sigmoid = jax.nn.sigmoid(z.astype(jnp.float32)).astype("bfloat16")
    for function in (lambda x, y: jax.nn.silu(x @ w) * y + x, jax.checkpoint(lambda x, y: jax.nn.silu(x @ w) * y + x)):
        got = cute_ops_jax.fuse(function, exact=True)(x, y)
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(z * sigmoid * y + x, np.float32))


@pytest.mark.parametrize("exact", [False, True])
def test_sums_keep_their_order(exact: bool) -> None:
    """Two of the terms are large and cancel. In another order the third one would lose its last digits."""
    y = jnp.abs(X) + 1e5
    for first in (jnp.tanh, jnp.exp, jax.nn.sigmoid, jax.nn.gelu):

        def function(x: Any, y: Any, z: Any, one: Any) -> Any:
            return first(x) + (jnp.abs(y) + z * one)  # noqa: B023

        args = X, y, -y, jnp.ones_like(X)
        assert became(function, *args, exact=exact) == ["fused"]
        np.testing.assert_allclose(cute_ops_jax.fuse(function, exact=exact)(*args), first(X), rtol=1e-6, atol=1e-6)


def test_exact_keeps_the_order_of_factors() -> None:
    def function(x: Any, y: Any) -> Any:
        return (x * 1e30) * (y * 1e-30) + x / 3.0

    got = cute_ops_jax.fuse(function, exact=True)(X, X + 1)
    np.testing.assert_array_equal(got, function(X, X + 1))


def test_a_derivative_of_ones_own_is_kept() -> None:
    @jax.custom_jvp
    def straight_through(x: Any) -> Any:
        return x * 0.5 + jnp.tanh(x) * 2

    straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), tangents[0]))
    loss = cute_ops_jax.fuse(lambda x: straight_through(x).sum())
    np.testing.assert_array_equal(jax.grad(loss)(X), jnp.ones_like(X))
    report = cute_ops_jax.fuse.report(straight_through, X)
    (entry,) = report.left
    assert (entry.what, entry.why) == ("custom_jvp_call straight_through", "it has a derivative of its own")


def test_stopped_gradients_stop() -> None:
    def loss(x: Any) -> Any:
        return jnp.sum(jnp.tanh(x - jax.lax.stop_gradient(x.max(-1, keepdims=True))) * x)

    same(jax.grad(cute_ops_jax.fuse(loss))(X), jax.grad(loss)(X))
    detached = jax.grad(cute_ops_jax.fuse(lambda x: jnp.sum(jax.lax.stop_gradient(jnp.tanh(x)) * x * 2)))(X)
    same(detached, 2 * jnp.tanh(X))


@pytest.mark.slow
def test_a_stopped_number_that_a_part_and_the_program_read() -> None:
    """The largest of all, which a part subtracts and the program adds; weights have a NaN where the sum is negative."""
    for weights in (None, jnp.arange(1.0, X.shape[-1] + 1)):
        loss = partial(jax.nn.logsumexp, b=weights)
        assert "fused" in became(loss, X)
        same(jax.grad(cute_ops_jax.fuse(loss))(X), jax.grad(loss)(X))
        rows = partial(jax.nn.logsumexp, axis=-1, b=weights)
        same(cute_ops_jax.fuse(rows)(X), rows(X))


def test_what_would_wait_for_itself_is_computed_in_turn() -> None:
    """A stopped element of a softmax beside its entropy: a gather reads a result of the part that reads the gather."""
    x, w = draw(6, N), draw(N, 7)
    chosen = jnp.arange(6)[:, None]

    def loss(w: jax.Array) -> jax.Array:
        p = jax.nn.log_softmax(x @ w)
        one = jnp.take_along_axis(p, chosen, -1)[:, 0]
        ratio = jnp.exp(one - 0.9 * jax.lax.stop_gradient(one))
        return jnp.sin(ratio + (jnp.exp(p) * p).sum(-1)).sum()

    def product(w: jax.Array) -> jax.Array:
        return jax.jvp(jax.grad(loss), (w,), (jnp.cos(w),))[1]

    same(jax.jit(cute_ops_jax.fuse(product))(w), jax.jit(product)(w))


@pytest.mark.parametrize("form", ["scan", "checkpoint in a scan", "cond"])
def test_arrays_of_one_number_are_numbers_inside_of_bodies(form: str) -> None:
    """An eps that is an array, which loops and branches get as an input."""
    eps = jnp.asarray(1e-5)

    def norm(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * w, None

    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        if form == "cond":
            return jax.lax.cond(x[0, 0] > 0, lambda x: norm(x, w[0])[0], lambda x: jnp.sin(x) * eps, x)
        return jax.lax.scan(jax.checkpoint(norm) if form.startswith("checkpoint") else norm, x, w)[0]

    args = jnp.asarray(KEY.standard_normal((4, 8)), jnp.float32), jnp.ones((2, 8))
    assert "rmsnorm" in [entry.becomes for entry in cute_ops_jax.fuse.report(function, *args).replaced]
    both = [cute_ops_jax.fuse(function), function]
    same(*(jax.jit(jax.value_and_grad(lambda *a, f=f: jnp.sin(f(*a)).sum(), (0, 1)))(*args) for f in both))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_groups_that_no_epilogue_has_are_left_out(dtype: str) -> None:
    """A product whose halves are exchanged in groups of 8 columns, which our products' epilogues do not look at."""
    x, w, y = draw(B, T, N, dtype=dtype), draw(N, 8, dtype=dtype), draw(B, T, 8, dtype=dtype)

    def function(x: Any, w: Any, y: Any) -> Any:
        z = jax.nn.silu(x @ w) * y + x[..., :8]
        return z * jnp.cos(y) + jnp.concatenate([-z[..., 4:], z[..., :4]], -1) * y

    assert became(function, x, w, y) == ["linear", "fused"]
    same(cute_ops_jax.fuse(function)(x, w, y), function(x, w, y), 2e-5 if dtype == "float32" else 3e-2)


@pytest.mark.slow
def test_names_hide_nothing_and_policies_save_what_they_saved() -> None:
    """A product or a value with a name that a checkpoint's policy saves is saved where a part computes it, too."""
    name, policies = jax.ad_checkpoint.checkpoint_name, jax.checkpoint_policies

    def layer(x: Any, up: Any, down: Any) -> Any:
        return x + name(jax.nn.silu(name(x @ up, "up")) @ down, "down")

    def saved(function: Any, *args: Any) -> int:
        """Arrays of the hidden layer that a gradient keeps."""
        return sum(a.shape[-1:] == (48,) and a.ndim > 2 for a in jax.tree.leaves(jax.vjp(function, *args)[1]))

    args = X, draw(N, 48), draw(48, N)
    only = policies.save_only_these_names
    cases = {None: 0, only("up"): 1, only("down"): 0, policies.dots_with_no_batch_dims_saveable: 1}

    def layers(x: Any, *weights: Any) -> Any:
        return jax.lax.scan(lambda x, _: (layer(x, *weights), None), x, length=2)[0]

    for policy, want in cases.items():
        function = jax.checkpoint(layers if policy is None or want else layer, policy=policy)
        assert became(function, *args) == ["mlp"]
        fused = cute_ops_jax.fuse(function)
        assert (saved(function, *args), saved(fused, *args)) == (want, want), policy
        grads = (jax.grad(lambda *a, run=run: jnp.sum(jnp.tanh(run(*a))), (0, 1, 2)) for run in (fused, function))
        same(*(grad(*args) for grad in grads))


def test_slices_by_integers_of_numpy() -> None:
    """As those of a convolution's gradient; their sizes are numbers, also for a checkpoint's policy."""
    w = draw(N, 8)

    def function(x: Any) -> Any:
        rows = jax.lax.slice(x, (0, 1, 0), x.shape, (1, np.int64(2), 1))
        return jax.nn.silu(rows @ w) * 2

    each = jax.checkpoint(function, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    assert became(each, X) == ["linear"]
    same(jax.grad(lambda x: cute_ops_jax.fuse(each)(x).sum())(X), jax.grad(lambda x: each(x).sum())(X))


@pytest.mark.slow
def test_a_policy_that_saves_some_of_like_layers() -> None:
    """The op of a layer whose name it does not know keeps nothing."""
    name, args = jax.ad_checkpoint.checkpoint_name, (X, draw(N, 48), draw(48, N))

    def layers(x: Any, up: Any, down: Any) -> Any:
        for i in range(3):
            x = x + jax.nn.silu(name(x @ (up * (i + 1)), f"up{i}")) @ down
        return x

    def saved(function: Any) -> int:
        return sum(a.shape[-1:] == (48,) and a.ndim > 2 for a in jax.tree.leaves(jax.vjp(function, *args)[1]))

    for names in ((), ("up1",), ("up0", "up2"), ("up0", "up1", "up2")):
        function = jax.checkpoint(layers, policy=jax.checkpoint_policies.save_only_these_names(*names))
        assert became(function, *args) == ["mlp"]  # three of them
        fused = cute_ops_jax.fuse(lambda *a, run=function: jax.jit(run)(*a))
        assert (saved(function), saved(fused)) == (len(names), len(names)), names
        grads = (jax.grad(lambda *a, run=run: jnp.sum(jnp.tanh(run(*a)))) for run in (fused, function))
        same(*(grad(*args) for grad in grads))


def test_a_policy_that_saves_names_like_those_of_ops() -> None:
    name, args = jax.ad_checkpoint.checkpoint_name, (X, draw(N, 48), draw(48, N))

    def layer(x: Any, up: Any, down: Any) -> Any:
        made = jax.nn.silu(name(x @ up, "up")) @ down
        return jnp.tanh(name(jnp.sort(made), "rows#1") @ down.T)

    def saved(*names: str) -> int:
        function = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(*names))
        fused = cute_ops_jax.fuse(lambda *a: jax.jit(function)(*a))
        return sum(a.shape == X.shape for a in jax.tree.leaves(jax.vjp(fused, *args)[1]))

    assert saved("up", "rows#1") == saved("up") + 1


@pytest.mark.slow
def test_row_vectors_with_more_dims() -> None:
    """Biases and weights of norms ``[1, 1, n]``."""
    up, down, b_up, b_down, w = draw(N, 8), draw(8, N), draw(1, 1, 8), draw(1, N), draw(1, 1, N)

    def function(x: Any) -> Any:
        x = jax.nn.gelu(x @ up + b_up) @ down + b_down
        y = x @ square + X
        return rms(y, w) + y

    square = draw(N, N)
    assert became(function, X)[0] == "mlp"
    same(jax.grad(lambda x: cute_ops_jax.fuse(function)(x).sum())(X), jax.grad(lambda x: function(x).sum())(X), 1e-4)


def test_sums_of_numbers() -> None:
    """A value without dims has no columns that a rotation could exchange."""
    numbers = jnp.float32(0.3), jnp.float32(2.0)

    def function(a: Any, b: Any) -> Any:
        return jnp.tanh(a) * b + jnp.exp(a) * jnp.tanh(b)

    same(cute_ops_jax.fuse(function)(*numbers), function(*numbers))
    same(jax.grad(cute_ops_jax.fuse(function))(*numbers), jax.grad(function)(*numbers))


def test_half_of_a_relu_is_kept_whole() -> None:
    """relu's derivative at 0 is 0, which its body ``maximum(x, 0)`` does not say."""
    zeros = jnp.zeros((2, 4))
    grad = jax.grad(cute_ops_jax.fuse(lambda x: jnp.cumsum(jax.nn.relu(jnp.cumsum(x, 1)), 1).sum()))(zeros)
    np.testing.assert_array_equal(grad, zeros)


def test_gradients_of_an_input_in_a_loss() -> None:
    """A gradient penalty: a product that only chooses between an operand's multiples has no gradient of its own."""
    up, bias, down = draw(N, 7), draw(7), draw(7)

    def critic(up: Any, bias: Any, down: Any, x: Any) -> Any:
        return jax.nn.leaky_relu(x @ up + bias) @ down

    def penalty(*weights: Any) -> Any:
        slopes = jax.vmap(jax.grad(critic, 3), (None, None, None, 0))(*weights, X.reshape(-1, N))
        return jnp.mean((jnp.sqrt(jnp.sum(slopes**2, -1)) - 1) ** 2)

    given = up, bias, down
    assert "linear" in became(jax.grad(penalty, (0, 1, 2)), *given)
    same(jax.grad(cute_ops_jax.fuse(penalty), (0, 1, 2))(*given), jax.grad(penalty, (0, 1, 2))(*given))


def test_half_of_a_product_is_added_to_another_one() -> None:
    """Messages of a graph: the half belongs to one end of an edge."""
    edges, both, weight = draw(B, T, T, 3), draw(B, T, 2 * N), draw(3, N)

    def message(edges: Any, both: Any, weight: Any) -> Any:
        _, sent = jnp.split(both, 2, -1)
        return jax.nn.silu(edges @ weight + sent[:, None])

    given = edges, both, weight
    assert became(message, *given) == ["linear"]
    same(cute_ops_jax.fuse(message)(*given), message(*given))


def test_effects_happen_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    def function(x: Any) -> Any:
        jax.debug.print("first", ordered=True)
        y = rms(x, W)
        jax.debug.print("second", ordered=True)
        return y

    jax.block_until_ready(jax.jit(cute_ops_jax.fuse(function))(X))
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["first", "second"]


TABLE, IDS = draw(7, 4), jnp.asarray(np.random.default_rng(4).integers(-9, 10, (2, 30)), jnp.int32)
TOKENS = IDS % 7
LOOKUPS: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "index": (lambda t: t[TOKENS], ["embedding"]),
    "take": (lambda t: jnp.take(t, IDS, axis=0), ["embedding"]),
    "clip": (lambda t: jnp.take(t, IDS, axis=0, mode="clip"), ["embedding"]),
    "nan outside": (lambda t: t.at[IDS].get(mode="fill"), ["embedding"]),
    "each token": (lambda t: jax.vmap(jax.vmap(lambda i: t[i]))(TOKENS), ["embedding"]),
    "flat": (lambda t: t[TOKENS.reshape(-1)].reshape(2, 30, 4), ["embedding"]),
    "0 outside": (lambda t: t.at[IDS].get(mode="fill", fill_value=0.0), []),
    "some columns": (lambda t: t[TOKENS, 1:3], []),
    "one row": (lambda t: jnp.broadcast_to(t[3], (2, 30, 4)), []),
}


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@pytest.mark.parametrize("name", LOOKUPS)
def test_rows_of_a_table_are_looked_up(name: str) -> None:
    """Targets below 0 and beyond the table, too: values, and gradients inside and around, and of several tables."""
    function, want = LOOKUPS[name]
    assert became(function, TABLE) == want
    fused, exact = cute_ops_jax.fuse(function), function(TABLE)
    np.testing.assert_array_equal(fused(TABLE), exact)
    cotangent = jnp.cos(jnp.arange(exact.size, dtype=jnp.float32)).reshape(exact.shape)
    loss = lambda run: lambda t: jnp.nansum(run(t) * cotangent)  # noqa: E731
    gradient = jax.grad(loss(function))(TABLE)
    same(jax.jit(jax.grad(loss(fused)))(TABLE), gradient)
    same(cute_ops_jax.fuse(jax.grad(loss(function)))(TABLE), gradient)
    same(jax.vmap(jax.grad(loss(fused)))(jnp.stack([TABLE, 2 * TABLE]))[0], gradient)


@pytest.mark.slow
def test_a_table_that_devices_share() -> None:
    """Rows are gathered, as the program says it, or as XLA does."""
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    table, spec = draw(8, 4), jax.sharding.PartitionSpec
    placed = jax.device_put(table, jax.sharding.NamedSharding(mesh, spec("rows", None)))
    loss = lambda run: lambda t: jnp.sum(jnp.sin(run(t)))  # noqa: E731
    function = lambda t: t[TOKENS]  # noqa: E731
    same(jax.jit(jax.grad(loss(cute_ops_jax.fuse(function))))(placed), jax.grad(loss(function))(table))


@pytest.mark.slow
def test_complex_numbers_stay() -> None:
    """Those of a recurrence, or of a rotation, and numbers that a program has of them."""

    def function(x: jax.Array) -> jax.Array:
        waves = jnp.where(x > 0, x * jnp.full(x.shape, 1 + 2j), jnp.zeros(x.shape, "complex64"))
        return rms(waves.imag, W) + jnp.abs(waves).mean(-1, keepdims=True)

    assert became(function, X) == ["fused"]
    same(cute_ops_jax.fuse(function)(X), function(X))


def test_float64_is_left_alone() -> None:
    with jax.enable_x64(True):
        x, w = jnp.asarray(np.asarray(X), jnp.float64), jnp.asarray(np.asarray(W), jnp.float64)
        function = lambda x, w: jax.nn.gelu(x * w) * x  # noqa: E731
        assert became(function, x, w) == []
        np.testing.assert_array_equal(cute_ops_jax.fuse(function)(x, w), function(x, w))


def test_arguments_that_are_no_arrays_are_static() -> None:
    def function(tree: dict[str, Any], activation: Callable[..., Any], *, scale: float = 1.0) -> Any:
        return {"out": activation(tree["x"]) * tree["y"] * scale, "name": tree["name"]}

    tree = {"x": X, "y": np.asarray(X), "name": "gate"}
    got = cute_ops_jax.fuse(function)(tree, jax.nn.silu, scale=2.0)
    assert got["name"] == "gate"
    same(got["out"], function(tree, jax.nn.silu, scale=2.0)["out"])


@pytest.mark.slow
def test_sharded_programs() -> None:
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("rows")
    x = draw(4, T, N)

    def local(x: Any, w: Any) -> Any:
        return jax.lax.psum(rms(x, w), "rows") + x

    specs = {"mesh": mesh, "in_specs": (spec, jax.sharding.PartitionSpec()), "out_specs": spec}
    function = jax.shard_map(local, **specs)
    assert became(function, x, W) == ["rmsnorm"]
    same(jax.jit(cute_ops_jax.fuse(function))(x, W), function(x, W))
    same(jax.jit(jax.shard_map(cute_ops_jax.fuse(local), **specs))(x, W), function(x, W))
    placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
    out = jax.jit(cute_ops_jax.fuse(lambda x: block(PARAMS, x)))(placed)
    same(out, block(PARAMS, x))


@pytest.mark.slow
def test_a_custom_vjp_is_kept_and_may_contain_fuse() -> None:
    @jax.custom_vjp
    def scaled(x: Any) -> Any:
        return jax.nn.silu(x) * x

    scaled.defvjp(lambda x: (scaled(x), x), lambda x, d: (3 * d,))
    loss = lambda x: jnp.sum(scaled(rms(x, W)) * 2)  # noqa: E731
    assert became(loss, X) == ["rmsnorm"]
    same(jax.grad(cute_ops_jax.fuse(loss))(X), jax.grad(loss)(X))

    @jax.custom_vjp
    def outer(x: Any) -> Any:
        return cute_ops_jax.fuse(lambda x: rms(jax.nn.silu(x) * x, W))(x)

    pull = lambda x, d: jax.vjp(cute_ops_jax.fuse(lambda x: rms(jax.nn.silu(x) * x, W)), x)[1](d)  # noqa: E731
    outer.defvjp(lambda x: (outer(x), x), pull)
    same(jax.grad(lambda x: jnp.sum(jnp.tanh(outer(x))))(X),
         jax.grad(lambda x: jnp.sum(jnp.tanh(rms(jax.nn.silu(x) * x, W))))(X))  # fmt: skip


@pytest.mark.slow
def test_an_epilogue_comes_after_the_sum_of_a_sharded_k() -> None:
    """In a shard_map by its psum, under jit by XLA's; with shardings that a jit states, too."""
    mesh = jax.make_mesh((4,), ("k",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    x, w, b = draw(6, N), draw(N, 8), draw(8)
    function = lambda x, w, b: jax.nn.gelu(x @ w + b)  # noqa: E731
    local = lambda x, w, b: jax.nn.gelu(jax.lax.psum(x @ w, "k") + b)  # noqa: E731
    specs = {"mesh": mesh, "in_specs": (spec(None, "k"), spec("k"), spec()), "out_specs": spec()}
    want = function(x, w, b)
    same(jax.jit(cute_ops_jax.fuse(jax.shard_map(local, **specs)))(x, w, b), want)
    same(jax.jit(jax.shard_map(cute_ops_jax.fuse(local), **specs))(x, w, b), want)
    at = [jax.sharding.NamedSharding(mesh, each) for each in (spec(None, "k"), spec("k"), spec())]
    placed = [jax.device_put(a, s) for a, s in zip((x, w, b), at, strict=True)]
    loss = lambda run: lambda *a: jnp.sum(jnp.sin(run(*a)))  # noqa: E731
    for run in (cute_ops_jax.fuse(function), cute_ops_jax.fuse(jax.jit(function, in_shardings=at))):
        same(jax.jit(run)(*placed), want)
        same(jax.jit(jax.grad(loss(run), (0, 1, 2)))(*placed), jax.grad(loss(function), (0, 1, 2))(x, w, b))


@pytest.mark.slow
def test_equinox_and_nnx_models_stay_as_they_are() -> None:
    eqx, nnx = pytest.importorskip("equinox"), pytest.importorskip("flax.nnx")
    norm, mlp = eqx.nn.LayerNorm(N), eqx.nn.MLP(N, N, 2 * N, 1, activation=jax.nn.gelu, key=jax.random.key(0))
    model = lambda norm, mlp, x: jax.vmap(jax.vmap(lambda row: row + mlp(norm(row))))(x)  # noqa: E731
    assert became(model, norm, mlp, X) == ["layernorm", "mlp"]
    same(cute_ops_jax.fuse(model)(norm, mlp, X), model(norm, mlp, X))
    same(eqx.filter_grad(lambda m, x: jnp.sum(cute_ops_jax.fuse(model)(*m, x) ** 2))((norm, mlp), X),
         eqx.filter_grad(lambda m, x: jnp.sum(model(*m, x) ** 2))((norm, mlp), X), 1e-4)  # fmt: skip

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.norm = nnx.RMSNorm(N, rngs=rngs)
            self.up, self.down = nnx.Linear(N, 32, rngs=rngs), nnx.Linear(32, N, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return x + self.down(nnx.gelu(self.up(self.norm(x))))

    one = Block(nnx.Rngs(0))
    graph, state = nnx.split(one)
    run = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
    assert became(run, state, X) == ["rmsnorm", "mlp"]
    want = one(X)
    same(cute_ops_jax.fuse(run)(state, X), want)
    same(nnx.jit(lambda m, x: cute_ops_jax.fuse(m.__call__)(x))(one, X), want)


def test_recognition_is_quick() -> None:
    """Function calls for each equation, which no load of the machine changes: 1000 equations take some 15 ms."""
    layers = [PARAMS] * 8

    def model(x: Any) -> Any:
        for each in layers:
            x = block(each, x)
        return x

    closed = jax.make_jaxpr(model)(X)
    Program(closed)  # expressions are kept
    with cProfile.Profile() as profile:
        Program(closed)
    assert pstats.Stats(profile).total_calls < 160 * _equations(closed.jaxpr)  # type: ignore[attr-defined]


def _equations(jaxpr: Any) -> int:
    inner = [each.params["jaxpr"].jaxpr for each in jaxpr.eqns if "jaxpr" in each.params]
    return len(jaxpr.eqns) - len(inner) + sum(map(_equations, inner))


def test_report_shows_what_became_and_what_stays() -> None:
    def function(x: Any) -> Any:
        return jnp.cumsum(rms(x, W), axis=0)

    report = cute_ops_jax.fuse.report(function, jax.ShapeDtypeStruct(X.shape, X.dtype))
    assert isinstance(report, Report)
    assert str(report) == (
        "function: 1 parts replaced, 1 left\n    1 x rmsnorm [2, 4, 16]\nleft as they are\n    1 x cumsum"
    )


def test_reports_of_what_only_multiplies() -> None:
    report = cute_ops_jax.fuse.report(lambda x, w: x @ w, X, draw(N, N))
    assert not report and str(report).splitlines()[1:] == [
        "  it has only products, views and whole numbers, which run as they stand"
    ]
    (entry,) = cute_ops_jax.fuse.report(lambda x, w: jnp.dot(x, w, precision="high"), X, draw(N, N))
    assert (entry.what, entry.why) == ("dot_general", "a product with precision HIGH")


def test_numbers_of_rows_are_no_result_of_an_epilogue() -> None:
    """A region with a product may have another result that has no columns: it is no epilogue then."""
    w, each = draw(N, N), draw(B, T, 1)

    def function(x: Any, w: Any, each: Any) -> Any:
        scale = jnp.cumsum(each, 1) * 0.3
        return x @ w + x * scale, jnp.cumsum(scale, 1)

    for got, want in zip(cute_ops_jax.fuse(function)(X, w, each), function(X, w, each), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_programs_for_any_number_of_rows() -> None:
    """An exported program, whose rows are counted when it runs, has the ops that one of known rows has."""
    norm, up, down, head = draw(N), draw(N, 2 * N), draw(2 * N, N), draw(8, N)

    def loss(x: jax.Array) -> jax.Array:
        y = x + jax.nn.gelu(x @ up) @ down
        y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * norm
        target = jnp.ones(y.shape[:-1], jnp.int32)
        logp = jax.nn.log_softmax((y @ head.T).reshape(-1, 8))
        return -jnp.take_along_axis(logp, target.reshape(-1, 1), -1).mean()

    step = lambda run: jax.jit(jax.value_and_grad(run))  # noqa: E731
    rows = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b, t"), N), "float32")
    exported = jax.export.export(step(cute_ops_jax.fuse(loss)))(rows)
    assert became(loss, rows) == became(loss, X) == ["mlp", "add_rmsnorm", "linear_cross_entropy"]
    for got, want in zip(exported.call(X), step(loss)(X), strict=True):
        same(got, want)


def test_a_function_that_cannot_be_traced_is_named() -> None:
    def flips(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return x if x.sum() > 0 else -params["scale"] * x

    line = flips.__code__.co_firstlineno
    where = rf"the function flips at .*test_jax_fuse.py:{line} .*of the argument x\."
    for call in (cute_ops_jax.fuse(flips), lambda *args: cute_ops_jax.fuse.report(flips, *args)):
        with pytest.raises(jax.errors.TracerBoolConversionError, match=where):
            call({"scale": W}, X)


def test_a_class_of_arguments_may_refuse_what_is_no_array() -> None:
    @jax.tree_util.register_pytree_node_class
    class Named:
        def __init__(self, x: Any, name: Any) -> None:
            if name is None:
                raise ValueError("a name is missing")
            self.x, self.name = x, name

        def tree_flatten(self) -> tuple[Any, None]:
            return (self.x, self.name), None

        @classmethod
        def tree_unflatten(cls, _: None, children: Any) -> Any:
            return cls(*children)

    np.testing.assert_array_equal(cute_ops_jax.fuse(lambda named: named.x + 1)(Named(X, "x")), X + 1)


def test_what_is_no_function_is_refused() -> None:
    message = "cute_ops_jax.fuse: argument `function` must be a function, got int."
    with pytest.raises(TypeError, match=message):
        cute_ops_jax.fuse(3)  # type: ignore[arg-type]


@pytest.mark.drawn(0.2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(3), 853, 10009, 20005])
def test_drawn_programs(seed: int) -> None:
    """``python -m tests.jax.drawn_graphs --count 500`` runs more. 853 has terms that cancel, 20005 is large."""
    run_seed(seed)


def test_no_tracer_leaks() -> None:
    def function(x: jax.Array, weight: jax.Array) -> dict[str, Any]:
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weight
        return {"sum": y.sum(), "rows": x.shape[0]}

    x, weight = jnp.ones((4, 64)), jnp.ones(64)
    with jax.check_tracer_leaks(True):
        jax.jit(jax.grad(lambda x, weight: cute_ops_jax.fuse(function)(x, weight)["sum"]))(x, weight)
        assert cute_ops_jax.fuse(function)(x, weight)["rows"] == 4
