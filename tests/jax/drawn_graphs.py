"""Random JAX programs for ``fuse``: products, pointwise and row functions, casts, views, branches, loops and dropout.

A program is drawn from a seed and runs in any dtype, in float64 for the exact values. More of them than the suite runs:
``python -m tests.jax.drawn_graphs --count 500 --first 1000``. Programs of seeds from 10000 on have parts of layers:
attention in many forms, MLPs, lookups, and bodies of derivatives of their own, of shard maps and of loops. Those from
20000 on have parts of models: mixes of dtypes, integers, einsums, convolutions, derivatives within, policies of
checkpoints, dropout, forms of softmaxes and of losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cute_ops_jax
from cute_ops.testing import compare_one, limits_of
from tests.drawing import check_seeds

B, T, N, HEADS = 2, 3, 8, 2
SIZE = 16  # columns of a head that our attention takes
LAYERS = 10000  # the first seed of programs with parts of layers
MODELS = 20000  # the first seed of programs with parts of models
MORE = 128  # inputs on which a loss is measured that one input does not show
SHAPES = {
    "x": (B, T, N), "y": (B, T, N), "cond": (B, N), "mask": (B, T, N), "bias": (N,), "weight": (N,), "scale": (B, T, 1),
    "w0": (N, N), "w1": (N, N), "packed": (N, 2 * N), "table": (5, N), "layers": (2, N, N),
}  # fmt: skip
# What programs with parts of layers have, too.
MORE_SHAPES = {
    "heads": (N, HEADS * SIZE), "keys": (N, HEADS * SIZE), "back": (HEADS * SIZE, N), "wide": (N, 128),
    "narrow": (N, 64), "from_wide": (128, N), "up": (N, 12), "gate": (N, 12), "b_up": (12,), "down": (12, N),
    "lengths": (B, T),
}  # fmt: skip
Arrays = Mapping[str, Any]
Step = Callable[["Run"], Any]


class Run:
    """One evaluation of a program: its inputs, the values so far, and the dtype that it computes in."""

    def __init__(self, arrays: Arrays, dtype: Any) -> None:
        self.arrays, self.dtype = arrays, dtype
        self.values = [arrays["x"], arrays["y"]]

    def __getitem__(self, name: str) -> Any:
        return self.arrays[name]

    def wide(self, x: Any) -> Any:
        """In float32, or in float64 where all is."""
        return x.astype(jnp.promote_types(self.dtype, jnp.float32))

    def narrow(self, x: Any) -> Any:
        return x.astype(self.dtype)


def program(
    rng: np.random.Generator, smooth: bool, layers: Mapping[str, Any] | None = None
) -> tuple[Callable[[Arrays, Any], tuple[Any, ...]], str]:
    """A random program and its text.

    Args:
        rng: draws it.
        smooth: without words whose derivative jumps.
        layers: with these parts of layers or of models, too.
    """
    steps: list[tuple[str, Step]] = []
    table = {**_KINDS, **(layers or {})}
    kinds = [kind for kind in table if not smooth or kind not in _JUMPS]
    if layers:  # half of the steps
        kinds = [*kinds, *[str(kind) for kind in rng.choice(list(layers), len(kinds) - len(layers))]]
    for k in range(int(rng.integers(2, 6) if layers else rng.integers(3, 12))):
        kind = str(rng.choice(kinds))
        picked = [int(i) for i in rng.integers(0, 2 + k, 2)]
        if rng.random() < 0.6:
            picked[0] = 1 + k  # the last value, so that programs are deep
        steps.append((f"{kind}{picked}", table[kind](rng, *picked)))
    shown = [int(i) for i in rng.integers(0, 2 + len(steps), 2)]

    def function(arrays: Arrays, dtype: Any) -> tuple[Any, ...]:
        run = Run(arrays, dtype)
        for _, step in steps:
            run.values.append(run.narrow(step(run)))
        return (run.values[-1], *(run.values[i] for i in shown))

    return function, "; ".join(text for text, _ in steps) + f" -> {shown}"


def inputs(rng: np.random.Generator, layers: bool = False) -> dict[str, np.ndarray]:
    shapes = {**SHAPES, **(MORE_SHAPES if layers else {})}
    made = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name in {"w0", "w1", "packed", "layers", *MORE_SHAPES} & made.keys():
        made[name] *= 0.4
    return made


def check(seed: int, dtype: str, mode: str, smooth: bool | None = None) -> str:
    """Compare a program with what ``fuse`` makes of it, and the gradients; returns its text.

    Args:
        seed: of the program and its inputs.
        dtype: ``float32`` or ``bfloat16``.
        mode: one of :data:`MODES`.
        smooth: whether no derivative of the program jumps, which is so by default in 16 bits.
    """
    rng = np.random.default_rng([seed, 17])
    layers = seed >= LAYERS
    parts = _MODELS if seed >= MODELS else _LAYERS if layers else None
    function, text = program(rng, dtype != "float32" if smooth is None else smooth, parts)
    arrays = inputs(rng, layers)
    cotangents = [rng.standard_normal((B, T, N)).astype(np.float32) for _ in range(3)]
    what = f"seed {seed}, {dtype}, {mode}: {text}"
    try:
        # Not under jit: operations are compiled once for all programs. Bodies of loops are not, so programs with parts
        # of layers are compiled as a whole.
        compare_with_fused(what, function, arrays, cotangents, dtype, mode, layers, lambda: inputs(rng, layers))
    except AssertionError:
        if dtype == "float32":
            raise
        # What is too far in 16 bits has to hold in float32, whose tolerance no wrong formula passes.
        check(seed, "float32", mode, smooth=True)
    return text


def compare_with_fused(
    what: str, function: Callable[[Arrays, Any], Sequence[Any]], inputs: Mapping[str, np.ndarray],
    cotangents: Sequence[np.ndarray], dtype: str, mode: str, compiles: bool,
    draw: Callable[[], Mapping[str, np.ndarray]],
) -> None:  # fmt: skip
    """Compare a function of arrays by name and a dtype, and its gradients, with what ``fuse`` makes of it.

    Args:
        mode: ``inside``, ``grad(fuse(f))``; ``around``, ``fuse(grad(f))``; ``vmap``; ``exact``; ``sharded``, with each
            array shared by the devices along one of its dims, if that is possible.
        compiles: whether all is compiled as a whole.
        draw: draws more inputs.
    """
    arrays = {name: jnp.asarray(array).astype(dtype) for name, array in inputs.items()}

    def loss(arrays: Arrays, dtype: Any) -> Any:
        outputs = tuple(function(arrays, dtype))
        total = sum(
            jnp.sum(out.astype(jnp.promote_types(dtype, jnp.float32)) * c)
            for out, c in zip(outputs, cotangents, strict=True)
        )
        return total, outputs

    # The loss itself is one number, whose error is luck.
    compiled = partial(jax.jit, compiler_options=QUICK) if compiles else lambda function: function
    gradients = jax.grad(loss, has_aux=True)

    def both(arrays: Arrays, dtype: Any) -> Any:
        return compiled(lambda arrays: gradients(arrays, dtype))(arrays)

    if mode == "around":
        got = compiled(cute_ops_jax.fuse(lambda a: gradients(a, jnp.dtype(dtype))))(arrays)
    elif mode == "vmap":
        one = jax.grad(cute_ops_jax.fuse(lambda a: loss(a, jnp.dtype(dtype))), has_aux=True)
        stacked = jax.tree.map(lambda a: jnp.stack([a * 0, a]), arrays)
        got = jax.tree.map(lambda a: a[1], compiled(jax.vmap(one))(stacked))
    else:
        fused = cute_ops_jax.fuse(lambda a: loss(a, jnp.dtype(dtype)), exact=mode == "exact")
        got = compiled(jax.grad(fused, has_aux=True))(_shared(arrays) if mode == "sharded" else arrays)
    measured = _measured(both, arrays, dtype)
    try:
        _compare(what, got, measured, limits_of(*measured))
    except AssertionError:
        # A dozen numbers say little about the largest loss of a deep program: it is measured on more inputs.
        drawn = [draw() for _ in range(MORE)]
        many = {name: jnp.stack([jnp.asarray(each[name]).astype(dtype) for each in drawn]) for name in inputs}
        stacked = _measured(lambda many, dtype: compiled(jax.vmap(lambda a: gradients(a, dtype)))(many), many, dtype)
        more = (jax.tree.map(lambda a: a[k], stacked) for k in range(MORE))  # noqa: B023
        _compare(what, got, measured, limits_of(*measured, more))


def _shared(arrays: Arrays) -> Arrays:
    """The arrays, each along another one of its dims that all devices, or two groups of them, can share."""
    count = max(c for c in (1, 2, 4, 8) if c <= len(jax.devices()))
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh(
        (max(count // 4, 1), min(count, 4)), ("a", "b"), axis_types=kinds, devices=jax.devices()[:count]
    )
    made = {}
    for k, (name, array) in enumerate(arrays.items()):
        axis, names = k % max(array.ndim, 1), ("a", "b", ("a", "b"))[k // 2 % 3]
        parts = count if k // 2 % 3 == 2 else mesh.shape[names]  # type: ignore[index]
        of_dims = [names if i == axis and size % parts == 0 else None for i, size in enumerate(array.shape)]
        spec = jax.sharding.PartitionSpec(*of_dims)
        made[name] = jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))
    return made


def _measured(both: Callable[..., Any], arrays: Arrays, dtype: str) -> tuple[Any, ...]:
    """The arrays, and all results for them: in their dtype and in float64."""
    low = both(arrays, jnp.dtype(dtype))
    with jax.enable_x64(True):
        exact = both({k: a.astype("float64") for k, a in arrays.items()}, jnp.dtype("float64"))
    lows, exacts = (tuple(np.asarray(a) for a in jax.tree.leaves(tree)) for tree in (low, exact))
    return {name: np.asarray(a) for name, a in arrays.items()}, lows, exacts


def _compare(what: str, tree: Any, measured: tuple[Any, ...], tolerances: Sequence[Any]) -> None:
    got, (_, lows, exacts) = [np.asarray(a) for a in jax.tree.leaves(tree)], measured
    assert [a.dtype for a in got] == [a.dtype for a in lows], what
    for i, (a, b, tolerance) in enumerate(zip(got, exacts, tolerances, strict=True)):
        compare_one(f"{what}, result {i}", a, b, tolerance)


def _unary(function: Callable[[Any], Any]) -> Callable[..., Step]:
    return lambda rng, i, j: lambda run: function(run.values[i])


def _binary(function: Callable[[Any, Any], Any]) -> Callable[..., Step]:
    return lambda rng, i, j: lambda run: function(run.values[i], run.values[j])


def _norm(rng: np.random.Generator, i: int, j: int) -> Step:
    kind = int(rng.integers(0, 6))

    def step(run: Run) -> Any:
        x = run.wide(run.values[i] + run.values[j] if kind == 4 else run.values[i])
        if kind in (1, 5):
            x = x - x.mean(-1, keepdims=True)
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3)
        if kind == 2:
            return run.narrow(y * (1 + run.wide(run["weight"])))
        if kind == 3:
            return jnp.square(x).sum(-1, keepdims=True) * 0.01 + y
        return run.narrow(y) * run["weight"] + (run["bias"] if kind == 5 else 0)

    return step


def _rows(rng: np.random.Generator, i: int, j: int) -> Step:
    word, keeps = str(rng.choice(["mean", "sum", "max", "min"])), bool(rng.random() < 0.5)

    def step(run: Run) -> Any:
        x = run.values[i]
        row = getattr(jnp, word)(x, axis=-1, keepdims=keeps)
        row = jnp.tanh(row) if keeps else jnp.tanh(row)[..., None]
        return run.values[j] * row + run["scale"]

    return step


def _linear(rng: np.random.Generator, i: int, j: int) -> Step:
    kind, weight = int(rng.integers(0, 6)), str(rng.choice(["w0", "w1"]))

    def step(run: Run) -> Any:
        x = run.values[i]
        y = x @ run[weight] if kind != 1 else jnp.einsum("btk,nk->btn", x, run[weight])
        if kind == 2:
            return jax.nn.gelu(y + run["bias"], approximate=False)
        if kind == 3:
            return y + run.values[j]
        if kind == 4:
            return jax.nn.gelu(y) * (x @ run["w1"])
        if kind == 5:
            gate, up = jnp.split(x @ run["packed"], 2, axis=-1)
            return jax.nn.silu(gate) * up
        return y

    return step


def _attention(rng: np.random.Generator, i: int, j: int) -> Step:
    def heads(x: Any) -> Any:
        return x.reshape(B, T, HEADS, N // HEADS).transpose(0, 2, 1, 3)

    def step(run: Run) -> Any:
        q, k, v = heads(run.values[i] * 0.5), heads(run.values[j] * 0.5), heads(run["mask"])
        scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), jnp.einsum("bhqd,bhkd->bhqk", q, k), -1e9)
        p = jax.nn.softmax(run.wide(scores), axis=-1)
        return jnp.einsum("bhqk,bhkd->bhqd", run.narrow(p), v).transpose(0, 2, 1, 3).reshape(B, T, N)

    return step


def _views(rng: np.random.Generator, i: int, j: int) -> Step:
    kind = int(rng.integers(0, 5))

    def step(run: Run) -> Any:
        x, y = run.values[i], run.values[j]
        if kind == 0:
            return (jnp.tanh(x.reshape(B * T, N)) * y.reshape(B * T, N) + run["bias"]).reshape(B, T, N)
        if kind == 1:
            return (jnp.tanh(x).transpose(1, 0, 2) * y.transpose(1, 0, 2)).transpose(1, 0, 2)
        if kind == 2:
            high, low = x[..., N // 2 :], x[..., : N // 2]
            return x * jnp.cos(run["mask"]) + jnp.concatenate([-high, low], -1) * y
        if kind == 3:
            return jnp.concatenate([x[..., :3] * 2, y[..., 3:]], -1)
        return (x.reshape(B, T, HEADS, -1) * jnp.tanh(y).reshape(B, T, HEADS, -1)).reshape(B, T, N)

    return step


def _modulated(rng: np.random.Generator, i: int, j: int) -> Step:
    direct = bool(rng.random() < 0.5)

    def step(run: Run) -> Any:
        shift = run["cond"] if direct else jnp.tanh(run.values[j].mean(1))
        return run.values[i] * (1 + shift[:, None, :]) + jax.nn.silu(run["cond"])[:, None, :]

    return step


def _chosen(rng: np.random.Generator, i: int, j: int) -> Step:
    return lambda run: jnp.where(run["mask"] > 0.3, run.values[i], run.values[j] * 0.5)


def _dropout(rng: np.random.Generator, i: int, j: int) -> Step:
    key = int(rng.integers(0, 1000))

    def step(run: Run) -> Any:
        bits = jax.random.bits(jax.random.key(key), (B, T, N), "uint32")
        return jnp.where(bits > np.uint32(2**31), run.values[i] * 2, 0) + run.values[j]

    return step


def _loop(rng: np.random.Generator, i: int, j: int) -> Step:
    def step(run: Run) -> Any:
        def body(x: Any, w: Any) -> Any:
            y = run.wide(x)
            y = run.narrow(y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-2)) * run["weight"]
            return jnp.tanh(y @ w + run["bias"]) + x, None

        return jax.lax.scan(body, run.values[i], run["layers"])[0]

    return step


def _branch(rng: np.random.Generator, i: int, j: int) -> Step:
    def step(run: Run) -> Any:
        return jax.lax.cond(
            run["bias"][0] > 0, lambda x, y: jax.nn.silu(x) * y, lambda x, y: jnp.tanh(x + y) * x,
            run.values[i], run.values[j],
        )  # fmt: skip

    return step


def _checkpointed(rng: np.random.Generator, i: int, j: int) -> Step:
    return lambda run: jax.checkpoint(lambda x, y: jax.nn.silu(x @ run["w0"]) * y + x)(run.values[i], run.values[j])


def _stopped(rng: np.random.Generator, i: int, j: int) -> Step:
    return lambda run: jnp.tanh(run.values[i] - jax.lax.stop_gradient(run.values[j].max(-1, keepdims=True)))


@jax.custom_jvp
def _straight_through(x: Any) -> Any:
    return x * 0.5 + 0.1


@_straight_through.defjvp
def _straight_through_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    return _straight_through(*primals), tangents[0] * 3


def _rotated(rng: np.random.Generator, i: int, j: int) -> Step:
    """Of heads: by halves, by neighbours, as a sum with exchanged halves, and of some columns alone; tables may be
    computed from values that have gradients.
    """
    kind, learned = int(rng.integers(0, 4)), bool(rng.random() < 0.3)

    def step(run: Run) -> Any:
        x = run.wide(run.values[i]).reshape(B, T, HEADS, -1)
        r = x.shape[-1] // (4 if kind == 3 else 2)
        angles = (jnp.arange(T)[:, None] * 0.7 ** jnp.arange(r)).astype(x.dtype)[None, :, None]
        if learned:
            angles = angles * jnp.tanh(run.wide(run["bias"])[:r])
        if kind == 2:
            angles = jnp.concatenate([angles, angles], -1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        low, high = (x[..., ::2], x[..., 1::2]) if kind == 1 else (x[..., :r], x[..., r : 2 * r])
        both = (low * cos - high * sin, high * cos + low * sin) if kind != 2 else ()
        if kind == 1:
            turned = jnp.stack(both, -1).reshape(x.shape)
        elif kind == 2:
            turned = x * cos + jnp.concatenate([-high, low], -1) * sin
        else:
            turned = jnp.concatenate([*both, *([x[..., 2 * r :]] if kind == 3 else [])], -1)
        return turned.reshape(B, T, N) + run.values[j]

    return step


def _loss(rng: np.random.Generator, i: int, j: int) -> Step:
    """Of rows' logits: a value, or the product of one, with a mask or a mean."""
    kind, head, after = (int(k) for k in rng.integers(0, [3, 3, 3]))
    target = rng.integers(0, N, (B, T)).astype(np.int32)

    def step(run: Run) -> Any:
        x = run.values[i]
        logits = (x, x @ run["w0"], x @ run["w1"].T)[head]
        logits = run.wide(logits) if kind == 2 else logits
        if kind == 0:
            at = jnp.take_along_axis(logits, target[..., None], -1)[..., 0]
            loss = jax.nn.logsumexp(logits, -1) - at
        else:
            loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), target[..., None], -1)[..., 0]
        if after == 0:
            return run.values[j] + loss[..., None]
        kept = jnp.where(target > 2, loss, 0)
        return run.values[j] + (kept.sum() / 4 if after == 1 else loss.mean())

    return step


def _embedded(rng: np.random.Generator, i: int, j: int) -> Step:
    ids = rng.integers(0, 5, (B, T)).astype(np.int32)
    return lambda run: jnp.take(run["table"], ids, axis=0) + run.values[i]


# Parts of layers ------------------------------------------------------------------------------------------------------


def _mixed(rng: np.random.Generator, i: int, j: int) -> Step:
    """Attention of heads of 16 columns: in several orders of dims, with grouped heads, masks, caps and biases."""
    order, mask, kind = (int(k) for k in rng.integers(0, [4, 6, 6]))
    few = bool(rng.random() < 0.3)  # heads of keys

    def step(run: Run) -> Any:
        q = (run.values[i] @ run["heads"]).reshape(B, T, HEADS, SIZE)
        keys = run["keys"][:, :SIZE] if few else run["keys"]
        k, v = ((run.values[at] @ keys).reshape(B, T, -1, SIZE) for at in (j, i))
        if kind == 1:
            q = q * 0.25
        if few and order != 3:
            k, v = (jnp.repeat(x, HEADS, axis=2) for x in (k, v))
        if order == 0:
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        elif order == 1:
            scores = q.transpose(0, 2, 1, 3) @ k.transpose(0, 2, 3, 1)
        elif order == 2:
            scores = jax.vmap(jax.vmap(lambda a, b: a @ b.T, 1, 0))(q, k)
        else:
            k, v = (x if few else x[:, :, :1] for x in (k, v))
            scores = jnp.einsum("bqhd,bkd->bhqk", q, k[:, :, 0])
        scores = _scored(run, scores * (1.0 if kind == 1 else 0.25), kind)
        p = run.narrow(jax.nn.softmax(_masked(run, scores, mask), axis=-1))
        if order == 0:
            out = jnp.einsum("bhqk,bkhd->bqhd", p, v)
        elif order == 3:
            out = jnp.einsum("bhqk,bkd->bqhd", p, v[:, :, 0])
        else:
            out = (p @ v.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
        return out.reshape(B, T, -1) @ run["back"]

    return step


def _scored(run: Run, scores: Any, kind: int) -> Any:
    if kind == 2:
        return jnp.tanh(run.wide(scores) / 5) * 5
    if kind == 3:
        return run.wide(scores) + run.wide(run["mask"])[:, None, :, :T]
    if kind == 4:
        return run.wide(scores) - 0.3 * jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T)).astype(run.wide(scores).dtype)
    return scores if kind == 5 else run.wide(scores)


def _masked(run: Run, scores: Any, mask: int) -> Any:
    ahead = jnp.arange(T)[:, None] - jnp.arange(T)
    seen = run["lengths"] > 0  # an example may see no key
    if mask == 0:
        return scores
    if mask == 1:
        return jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)
    if mask == 2:
        return jnp.where((ahead >= 0) & (ahead < 2), scores, -jnp.inf)
    if mask == 3:
        return scores + jnp.where(ahead >= 0, 0.0, -1e9).astype(scores.dtype)
    seen = seen[:, None, None, :]
    return jnp.where(seen & (ahead >= 0) if mask == 4 else seen, scores, -1e9)


def _mlp(rng: np.random.Generator, i: int, j: int) -> Step:
    kind, activation = int(rng.integers(0, 5)), int(rng.integers(0, 4))
    act = (jax.nn.silu, jax.nn.gelu, lambda x: jax.nn.gelu(x, approximate=False), jnp.tanh)[activation]

    def step(run: Run) -> Any:
        x = run.values[i]
        up, gate = x @ run["up"], x @ run["gate"]
        if kind == 0:
            return (act(gate) * up) @ run["down"] + run.values[j]
        if kind == 1:
            return jnp.einsum("bth,nh->btn", act(up + run["b_up"]), run["down"].T) + run["bias"]
        if kind == 2:
            return act(up) @ run["down"] + run["bias"] + run.values[j]
        if kind == 3:
            a, b = jnp.split(x @ jnp.concatenate([run["gate"], run["up"]], -1), 2, axis=-1)
            return (act(a) * b) @ run["down"]
        return act(up + run["b_up"]) @ run["down"] + gate[..., :N]

    return step


def _projected(rng: np.random.Generator, i: int, j: int) -> Step:
    """Rotated heads of 64 columns, of products of one input."""
    first, learned, values = (bool(rng.random() < p) for p in (0.5, 0.2, 0.7))

    def step(run: Run) -> Any:
        x = run.values[i]
        angles = (jnp.arange(T)[:, None] * 0.9 ** jnp.arange(32)).astype(run.wide(x).dtype)
        if learned:
            angles = angles * jnp.tanh(run.wide(run["bias"])[0])
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        cos, sin = (cos[None, None], sin[None, None]) if first else (cos[None, :, None], sin[None, :, None])

        def turned(weight: Any) -> Any:
            heads = (x @ weight).reshape(B, T, -1, 64)
            a, b = jnp.split(run.wide(heads.transpose(0, 2, 1, 3) if first else heads), 2, axis=-1)
            both = run.narrow(jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1))
            return both.transpose(0, 2, 1, 3) if first else both

        q, k = turned(run["wide"]), turned(run["narrow"])
        out = q.reshape(B, T, -1) @ run["from_wide"] + (k * k).mean((-1, -2))[..., None]
        return out + (x @ run["narrow"]).mean(-1, keepdims=True) if values else out

    return step


def _ended(rng: np.random.Generator, i: int, j: int) -> Step:
    """The end of a block: a product, a residual and a norm of the sum, which may be read, too."""
    both = bool(rng.random() < 0.5)

    def step(run: Run) -> Any:
        total = run.values[i] @ run["w0"] + run.values[j]
        x = run.wide(total)
        y = run.narrow(x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3)) * run["weight"]
        return y + total * 0.5 if both else y

    return step


def _looked_up(rng: np.random.Generator, i: int, j: int) -> Step:
    """Rows or elements of a table, by integers of which some may be outside, negative or the same."""
    kind = int(rng.integers(0, 6))
    ids = rng.integers(-5 if kind in (0, 3) else 0, 5, (B, T)).astype(np.int32)
    far = np.where(rng.random((B, T)) < 0.2, 7, ids).astype(np.int32)

    def step(run: Run) -> Any:
        table, x = run["table"], run.values[i]
        if kind == 0:
            return table[ids] * x
        if kind == 1:
            return jnp.take(table, far, axis=0, mode="clip") + x
        if kind == 2:
            return table.at[far].get(mode="fill", fill_value=0) + x
        if kind == 3:
            return jnp.take_along_axis(x, ids[..., None] % N, axis=-1) * run.values[j]
        if kind == 4:
            return jax.nn.one_hot(ids, 5, dtype=x.dtype) @ table + x
        return jnp.stack([table[ids[0]], table[ids[1]]]) + jnp.take(x, ids[:, 0] % T, axis=1)[:, :1]

    return step


@jax.custom_vjp
def _doubled(x: Any, w: Any) -> Any:
    """A norm whose derivative is twice that of its body."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-2) * w


def _doubled_forward(x: Any, w: Any) -> Any:
    return _doubled(x, w), (x, w)


def _doubled_backward(saved: Any, dout: Any) -> Any:
    plain = lambda x, w: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-2) * w  # noqa: E731
    return tuple(2 * each for each in jax.vjp(plain, *saved)[1](dout))


_doubled.defvjp(_doubled_forward, _doubled_backward)


def _own_vjp(rng: np.random.Generator, i: int, j: int) -> Step:
    return lambda run: _doubled(jnp.tanh(run.values[i]), run["weight"]) + run.values[j]


def _sharded(rng: np.random.Generator, i: int, j: int) -> Step:
    """A shard map over one device, whose body has a norm, a product and a sum over devices."""
    check_vma = bool(rng.random() < 0.5)

    def body(x: Any, y: Any, w: Any, bias: Any) -> Any:
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-2)
        return jax.nn.gelu(jax.lax.psum(x @ w, "k") + bias) * y

    def step(run: Run) -> Any:
        mesh = jax.make_mesh((1,), ("k",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec
        specs = {"in_specs": (spec(None, None, "k"), spec(), spec("k"), spec()), "out_specs": spec()}
        mapped = jax.shard_map(body, mesh=mesh, check_vma=check_vma, **specs)
        return mapped(run.values[i], run.values[j], run["w0"], run["bias"])

    return step


def _bodies(rng: np.random.Generator, i: int, j: int) -> Step:
    """Loops and branches with MLPs, lookups and softmaxes: of several outputs, backwards, nested, with checkpoints."""
    kind = int(rng.integers(0, 4))

    def layer(run: Run, x: Any, w: Any) -> Any:
        return x + jax.nn.gelu(x @ w + run["bias"]) @ run["w1"]

    def step(run: Run) -> Any:
        x, y = run.values[i], run.values[j]
        if kind == 0:
            body = jax.checkpoint(lambda x, w: (layer(run, x, w), run.narrow(jax.nn.softmax(run.wide(x), -1))))
            out, each = jax.lax.scan(body, x, run["layers"], reverse=True)
            return out + each.sum(0) * y
        if kind == 1:
            return jax.lax.fori_loop(0, 2, lambda k, x: layer(run, x, run["layers"][k]) * 0.5, x)
        if kind == 2:
            branches = [
                jnp.tanh,
                lambda x: layer(run, x, run["w0"]),
                lambda x: run["table"][jnp.arange(B * T).reshape(B, T) % 5] * x,
            ]
            return jax.lax.switch(jnp.int32(i % 3), branches, x) + y
        inner = lambda x, w: (jax.lax.cond(w[0, 0] > 0, lambda x: layer(run, x, w), lambda x: x * 0.5, x), None)  # noqa: E731
        return jax.vmap(lambda x: jax.lax.scan(inner, x, run["layers"])[0])(x) + y

    return step


def _inner_vmap(rng: np.random.Generator, i: int, j: int) -> Step:
    axis = int(rng.integers(0, 2))

    def step(run: Run) -> Any:
        def row(x: Any, y: Any) -> Any:
            x = run.wide(x) - run.wide(x).mean(-1, keepdims=True)
            x = run.narrow(x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-2)) * run["weight"] + run["bias"]
            return jax.nn.silu(x @ run["w0"].T) * y

        each = jax.vmap(row, axis, axis) if axis else jax.vmap(jax.vmap(row))
        return each(run.values[i], run.values[j])

    return step


# Parts of models --------------------------------------------------------------------------------------------------


def _in_float(run: Run, x: Any, dtype: str) -> Any:
    """In another dtype, but not where all is float64."""
    return x if run.dtype == jnp.float64 else x.astype(dtype)


def _dtypes(rng: np.random.Generator, i: int, j: int) -> Step:
    """A mix of 16 bits and float32: norms, gates and products whose operands and results differ."""
    kind, half = int(rng.integers(0, 4)), str(rng.choice(["bfloat16", "float16"]))

    def step(run: Run) -> Any:
        x, y = jnp.tanh(run.values[i]), jnp.tanh(run.values[j])
        low = _in_float(run, x, half)
        if kind == 0:
            return jax.nn.silu(run.wide(low)) * _in_float(run, y, half) + run["bias"]
        if kind == 1:
            wide = jnp.einsum(
                "btn,nm->btm", low, _in_float(run, run["w0"], half), preferred_element_type=run.wide(x).dtype
            )
            return wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-2) * run.wide(run["weight"])
        if kind == 2:
            return jax.nn.gelu(run.wide(x) @ run.wide(run["w0"]) + run.wide(run["bias"])) * low
        return _in_float(run, jax.nn.softmax(run.wide(low) * 2, -1), half) @ _in_float(
            run, run["w1"], half
        ) + run.narrow(y)

    return step


def _whole_numbers(rng: np.random.Generator, i: int, j: int) -> Step:
    """Masks of integers, bits and places, and numbers that are counted."""
    kind, ids = int(rng.integers(0, 5)), rng.integers(0, 4, (B, T)).astype(np.int32)

    def step(run: Run) -> Any:
        x, y, given = run.values[i], run.values[j], jnp.asarray(ids)
        if kind == 0:
            return jnp.where((given[..., None] & 1) == (jnp.arange(N) & 1), jnp.tanh(x), y * 0.5)
        if kind == 1:
            same = given[:, :, None] == given[:, None, :]
            return jnp.einsum("bqk,bkn->bqn", run.narrow(same / same.sum(-1, keepdims=True)), x) + y
        if kind == 2:
            place = jnp.cumsum(given > 1, 1) - 1
            return x * (place[..., None] >= 0) + y * jax.nn.one_hot(place, N, dtype=y.dtype)
        if kind == 3:
            return jnp.where(jnp.arange(T)[:, None] < given.sum(1)[:, None, None], x, 0) * (given[..., None] != 2)
        return x * (given[..., None].astype(x.dtype) * 0.3) + jnp.clip(given, 1, 2)[..., None] * y

    return step


def _products(rng: np.random.Generator, i: int, j: int) -> Step:
    """Einsums and products with dims of a batch, of several operands, and with a precision."""
    kind = int(rng.integers(0, 7))

    def step(run: Run) -> Any:
        x, y, w = run.values[i], run.values[j], run["w0"]
        if kind == 0:
            return jnp.einsum("btn,btm->bnm", x, y * 0.3)[:, :T] + run["bias"]
        if kind == 1:
            return jnp.einsum("btn,nm->bmt", x, w).transpose(0, 2, 1) * jax.nn.sigmoid(y)
        if kind == 2:
            return jnp.einsum("btn,nm,bm->btm", x, w, run["cond"])
        if kind == 3:
            heads = x.reshape(B, T, HEADS, -1)
            return jax.nn.gelu(jnp.einsum("bthi,hij->bthj", heads, run["w1"].reshape(HEADS, 4, -1)[..., :4])).reshape(
                B, T, N
            )
        if kind == 4:
            return jnp.dot(x, w, precision="highest") + y
        if kind == 5:
            return jax.lax.dot_general(w, x, (((0,), (2,)), ((), ()))).transpose(1, 2, 0) + jnp.tensordot(y, w, 1)
        return jnp.einsum("bti,bsi,bsn->btn", x * 0.3, y * 0.3, x)

    return step


def _convolved(rng: np.random.Generator, i: int, j: int) -> Step:
    """Convolutions over places: of all columns, of each one, and of patches, with what follows."""
    kind = int(rng.integers(0, 3))

    def step(run: Run) -> Any:
        x, names = run.values[i], ("NWC", "WIO", "NWC")
        if kind == 0:
            y = jax.lax.conv_general_dilated(x, run["layers"], (1,), "SAME", dimension_numbers=names)
            return jax.nn.gelu(y + run["bias"]) + run.values[j]
        if kind == 1:
            taps = run["w0"][:2, None]
            y = jax.lax.conv_general_dilated(x, taps, (1,), [(1, 0)], dimension_numbers=names, feature_group_count=N)
            return jax.nn.silu(y + run["bias"]) * run.values[j]
        padded = jnp.pad(x, ((0, 0), (2, 0), (0, 0)))
        return sum(padded[:, k : k + T] * run["w1"][k] for k in range(3)) + run["bias"]

    return step


def _derivatives(rng: np.random.Generator, i: int, j: int) -> Step:
    """Derivatives inside of the program: of each row, along a direction, and of a sum."""
    kind = int(rng.integers(0, 4))

    def step(run: Run) -> Any:
        x, y = run.values[i], run.values[j]

        def energy(row: Any) -> Any:
            row = run.wide(row)
            return jnp.sum(jax.nn.silu(row @ run.wide(run["w0"])) * row) + jax.nn.logsumexp(row)

        if kind == 0:
            return jax.vmap(jax.vmap(jax.grad(energy)))(x)
        if kind == 1:
            return jax.jvp(lambda x: jax.nn.gelu(x @ run["w0"] + run["bias"]), (x,), (jnp.tanh(y),))[1]
        if kind == 2:
            value, back = jax.vjp(lambda x: jax.nn.softmax(run.wide(x), -1) * 2, x)
            return back(value * run.wide(y))[0] + y
        return (
            jax.vmap(jax.value_and_grad(lambda a: jnp.sum(jnp.tanh(run.wide(a) * run.wide(run["weight"])))))(x)[1] + y
        )

    return step


def _saved(rng: np.random.Generator, i: int, j: int) -> Step:
    """Checkpoints with policies and names, one within the other, and within a scan."""
    kind = int(rng.integers(0, 4))
    policies = jax.checkpoint_policies
    policy = (policies.dots_saveable, policies.nothing_saveable, policies.save_only_these_names("hidden"), None)[kind]

    def step(run: Run) -> Any:
        @partial(jax.checkpoint, policy=policy)
        def layer(x: Any, w: Any) -> Any:
            hidden = jax.ad_checkpoint.checkpoint_name(x @ w + run["bias"], "hidden")
            inner = jax.checkpoint(lambda h: jax.nn.softmax(run.wide(h), -1))(hidden)
            return run.narrow(inner) * x + jax.nn.silu(hidden)

        if kind == 3:
            return jax.lax.scan(lambda x, w: (layer(x, w), None), run.values[i], run["layers"], unroll=2)[0]
        return layer(run.values[i], run["w0"]) + run.values[j]

    return step


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _scaled_gate(x: Any, y: Any, factor: float) -> Any:
    return jax.nn.silu(x) * y


_scaled_gate.defvjp(
    lambda x, y, factor: (_scaled_gate(x, y, factor), (x, y)),
    lambda factor, saved, dout: (dout * saved[1] * factor, dout * jnp.tanh(saved[0])),
)


def _called(rng: np.random.Generator, i: int, j: int) -> Step:
    """Functions within functions: jits with static and donated arguments, and derivatives of their own."""
    kind = int(rng.integers(0, 4))

    def step(run: Run) -> Any:
        x, y = run.values[i], run.values[j]
        if kind == 0:
            return jax.jit(lambda x, y: jax.nn.gelu(x @ run["w0"]) * y, donate_argnums=0)(x + 1, y)
        if kind == 1:
            inner = jax.jit(lambda x, times: jnp.tanh(x * times) + run["bias"], static_argnums=1)
            return inner(x, 2) + inner(y, 3)
        if kind == 2:
            return _scaled_gate(x, y @ run["w0"], 0.7)
        return jax.jit(jax.checkpoint(jax.vmap(lambda a, b: jax.nn.log_softmax(run.wide(a)) * run.wide(b))))(x, y)

    return step


def _dropped(rng: np.random.Generator, i: int, j: int) -> Step:
    """Dropout as models write it: a key for each use, of elements, of rows and of paths."""
    kind, key = int(rng.integers(0, 3)), int(rng.integers(0, 1000))

    def step(run: Run) -> Any:
        first, second = jax.random.split(jax.random.fold_in(jax.random.key(key), 3))
        x = jax.nn.gelu(run.values[i] @ run["w0"])
        if kind == 0:
            x = jnp.where(jax.random.bernoulli(first, 0.7, x.shape), x / 0.7, jnp.zeros_like(x))
        elif kind == 1:
            x = x * jax.random.bernoulli(first, 0.7, (B, T, 1)) / 0.7
        else:
            x = jax.lax.select(jax.random.uniform(first, x.shape) < 0.6, x, jnp.zeros_like(x))
        kept = jax.random.bernoulli(second, 0.5, (B, 1, 1))
        return run.narrow(x) * kept + run.values[j]

    return step


def _grouped_norm(rng: np.random.Generator, i: int, j: int) -> Step:
    """Norms over groups of columns, over places, and over all of an example."""
    kind = int(rng.integers(0, 4))

    def step(run: Run) -> Any:
        x = run.wide(run.values[i] + run.values[j])
        if kind == 0:
            x = x.reshape(B, T, 2, -1)
        axes = ((-1,), (0, 1), (1, 2), (1,))[kind]
        mean = x.mean(axes, keepdims=True)
        spread = jnp.mean(x * x, axes, keepdims=True) - mean * mean if kind == 3 else jnp.var(x, axes, keepdims=True)
        y = (x - mean) * jax.lax.rsqrt(jnp.maximum(spread, 0) + 1e-1)
        return run.narrow(y.reshape(B, T, N)) * run["weight"] + run["bias"]

    return step


def _attending(rng: np.random.Generator, i: int, j: int) -> Step:
    """Two layers of attention that share a mask: their softmaxes in many forms, in float32 or not, and with dropout."""
    form, mask, wide, key = (int(k) for k in rng.integers(0, [7, 4, 3, 1000]))

    def weights(run: Run, scores: Any, seen: Any) -> Any:
        if form == 0:
            return jax.nn.softmax(scores, -1, where=seen)
        scores = jnp.where(seen, scores, -1e9 if form != 5 else jnp.finfo(scores.dtype).min)
        if form == 1:
            return jnp.exp(jax.nn.log_softmax(scores))
        if form == 2:
            return jnp.exp(scores - jax.nn.logsumexp(scores, -1, keepdims=True))
        if form == 3:
            e = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
            return e / e.sum(-1, keepdims=True)
        p = jax.nn.softmax(scores, -1)
        if form == 4:
            return p * jax.random.bernoulli(jax.random.key(key), 0.8, p.shape) / 0.8
        return p

    def step(run: Run) -> Any:
        x, y = run.values[i], run.values[j]
        causal = jnp.tril(jnp.ones((T, T), bool))
        seen = (
            causal[None, None],
            (run["lengths"] > -0.5)[:, None, None] | jnp.eye(T, dtype=bool),
            causal[None, None] & (run["lengths"] > -0.5)[:, None, None] | jnp.eye(T, dtype=bool),
            jnp.ones((B, 1, T, T), bool),
        )[mask]
        for _ in range(2):
            q, k, v = (
                (a @ w).reshape(B, T, HEADS, SIZE) for a, w in ((x, run["heads"]), (y, run["keys"]), (x, run["keys"]))
            )
            if wide == 1:
                q, k = run.wide(q), run.wide(k)
            scores = run.wide(jnp.einsum("bqhd,bkhd->bhqk", q * 0.25, k))
            p = weights(run, scores, seen.astype(jnp.float32) != 0)
            if wide == 2:
                out = run.narrow(jnp.einsum("bhqk,bkhd->bqhd", run.wide(p), run.wide(v)))
            else:
                out = jnp.einsum("bhqk,bkhd->bqhd", run.narrow(p), v)
            x = x + out.reshape(B, T, -1) @ run["back"]
        return x

    return step


def _head_loss(rng: np.random.Generator, i: int, j: int) -> Step:
    """Losses of a head as models write them: one-hot labels, smoothing, z-loss, masks, caps, biases and shifts, a
    log-sum-exp beside the loss, and logits in float32.
    """
    kind, mask, head = (int(k) for k in rng.integers(0, [7, 4, 7]))
    target = rng.integers(0, N, (B, T)).astype(np.int32)
    weights = rng.random((B, T)) < 0.7

    def step(run: Run) -> Any:
        x = run.values[i]
        wide = run.wide(x).dtype if head == 6 else None
        logits = jnp.matmul(x, run["w0"], preferred_element_type=wide)
        logits = run.wide(logits + run["bias"] if head == 1 else logits)
        if head == 2:
            logits = jnp.tanh(logits / 3) * 3
        elif head == 3:
            logits = logits * 0.25
        logits = logits.reshape(B * T, N) if head == 4 else logits
        labels, seen = (a.reshape(-1) if head == 4 else a for a in (jnp.asarray(target), jnp.asarray(weights)))
        if head == 5:
            logits, labels, seen = logits[:, :-1], labels[:, 1:], seen[:, 1:]
        logp = jax.nn.log_softmax(logits)
        at = jnp.take_along_axis(logp, labels[..., None], -1)[..., 0]
        if kind == 0:
            loss = -(jax.nn.one_hot(labels, N, dtype=logits.dtype) * logp).sum(-1)
        elif kind == 1:
            loss = -0.9 * at - 0.1 * logp.mean(-1)
        elif kind == 2:
            loss = -at + 1e-2 * jnp.square(jax.nn.logsumexp(logits, -1))
        elif kind == 3:
            soft = jax.nn.one_hot(labels, N, dtype=logits.dtype) * 0.9 + 0.1 / N
            loss = -jnp.einsum("...n,...n->...", soft, logp)
        elif kind == 4:
            loss = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        else:
            loss = -at
        if mask == 0:
            total = (loss * seen).sum() / seen.sum()
        elif mask == 1:
            total = jnp.where(seen, loss, 0).sum() / 4
        elif mask == 2:
            total = loss.mean()
        else:
            total = (loss * jnp.linspace(0.5, 1.5, loss.size, dtype=loss.dtype).reshape(loss.shape)).sum()
        if kind == 6:
            total += 0.1 * jnp.square(jax.nn.logsumexp(logits, -1)).mean()
        return run.values[j] + total

    return step


def _sharded_more(rng: np.random.Generator, i: int, j: int) -> Step:
    """Shard maps over as many devices as there are, up to 8, with sums over them: each has some rows of the weight."""
    check_vma, kind = bool(rng.random() < 0.5), int(rng.integers(0, 3))

    def body(x: Any, w: Any, scale: Any) -> Any:
        if kind == 0:
            return jax.nn.silu(jax.lax.psum(x @ w, "k")) * scale
        if kind == 1:
            total = jax.lax.psum(jnp.sum(x * x, -1, keepdims=True), "k")
            return jax.lax.psum((x * jax.lax.rsqrt(total / N + 1e-2)) @ w, "k") + scale
        return jax.nn.gelu(jax.lax.psum(x @ w, "k") + scale)

    def step(run: Run) -> Any:
        count = max(c for c in (1, 2, 4, 8) if c <= len(jax.devices()))
        mesh = jax.make_mesh((count,), ("k",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:count])
        spec = jax.sharding.PartitionSpec
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=(spec(None, None, "k"), spec("k"), spec()), out_specs=spec(), check_vma=check_vma
        )
        return mapped(run.values[i], run["w0"], run["bias"]) + run.values[j]

    return step


def _carried(rng: np.random.Generator, i: int, j: int) -> Step:
    """Scans with several carries and inputs, a state-space recurrence, and an associative scan."""
    kind = int(rng.integers(0, 3))

    def step(run: Run) -> Any:
        x, y = run.values[i], run.values[j]
        if kind == 0:

            def body(carry: Any, each: Any) -> Any:
                state, count = carry
                kept, new = each
                state = state * kept + new
                return (state, count + 1), jax.nn.silu(state @ run["w0"]) * new

            start = jnp.zeros_like(x[:, 0]), jnp.int32(0)
            over = jax.nn.sigmoid(y).swapaxes(0, 1), x.swapaxes(0, 1)
            return jax.lax.scan(body, start, over)[1].swapaxes(0, 1)
        if kind == 1:
            join = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])  # noqa: E731
            return jax.lax.associative_scan(join, (jax.nn.sigmoid(y), x), axis=1)[1]
        return jax.lax.map(lambda row: jax.nn.softmax(run.wide(row @ run["w0"]), -1) * 2, x) + y

    return step


_MODELS: dict[str, Callable[..., Step]] = {
    "dtypes": _dtypes, "whole_numbers": _whole_numbers, "products": _products, "convolved": _convolved,
    "derivatives": _derivatives, "saved": _saved, "called": _called, "dropped": _dropped,
    "grouped_norm": _grouped_norm, "attending": _attending, "head_loss": _head_loss, "sharded_more": _sharded_more,
    "carried": _carried,
}  # fmt: skip
_LAYERS: dict[str, Callable[..., Step]] = {
    "mixed": _mixed, "mlp": _mlp, "projected": _projected, "ended": _ended, "looked_up": _looked_up,
    "own_vjp": _own_vjp, "sharded": _sharded, "bodies": _bodies, "inner_vmap": _inner_vmap,
}  # fmt: skip
_KINDS: dict[str, Callable[..., Step]] = {
    "tanh": _unary(jnp.tanh), "silu": _unary(jax.nn.silu), "gelu": _unary(jax.nn.gelu),
    "sigmoid": _unary(jax.nn.sigmoid), "root": _unary(lambda x: jnp.sqrt(x * x + 1)),
    "quotient": _binary(lambda x, y: x / (1 + y * y)), "add": _binary(lambda x, y: x + y),
    "subtract": _binary(lambda x, y: x - y * 0.3), "multiply": _binary(lambda x, y: jnp.tanh(x) * y),
    "gate": _binary(lambda x, y: jax.nn.silu(x) * y), "relu": _unary(jax.nn.relu),
    "maximum": _binary(jnp.maximum), "clip": _unary(lambda x: jnp.clip(x, -0.7, 0.9)),
    "softmax": _unary(lambda x: jax.nn.softmax(x, -1) * 3), "log_softmax": _unary(lambda x: jax.nn.log_softmax(x, -1)),
    "logsumexp": _binary(lambda x, y: y - jax.nn.logsumexp(x, -1, keepdims=True)),
    "power": _unary(lambda x: jnp.tanh(x) ** 3),
    "opaque": _unary(lambda x: jnp.sin(x)), "sum_over_rows": _binary(lambda x, y: x + jnp.tanh(y.sum((0, 1)))),
    "cumulative": _unary(lambda x: jnp.cumsum(x, 1) * 0.5), "custom": _unary(_straight_through),
    "norm": _norm, "rows": _rows, "linear": _linear, "attention": _attention, "views": _views,
    "modulated": _modulated, "chosen": _chosen, "dropout": _dropout, "loop": _loop, "branch": _branch,
    "rotated": _rotated, "loss": _loss, "checkpointed": _checkpointed, "stopped": _stopped, "embedded": _embedded,
}  # fmt: skip
# Kinds whose derivative jumps where two values cross, which rounding to 16 bits moves.
_JUMPS = ("relu", "maximum", "clip", "rows", "stopped")
MODES = ("inside", "around", "exact", "vmap")
# Compiles programs in little time, and rounds what they round.
QUICK = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}


def run_seed(seed: int) -> str:
    """Check the program of a seed in its dtype and mode."""
    return check(seed, "float32" if seed % 3 else "bfloat16", MODES[seed % 4])


if __name__ == "__main__":
    check_seeds(run_seed, "programs")
