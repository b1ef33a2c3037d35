"""One training step of untouched JAX models: as XLA compiles it, and through ``cute_ops_jax.fuse``.

``stories15m`` and the others are examples/optax_decoder with its parts in jax.numpy; ``equinox`` and ``nnx`` are
transformers of equinox's and flax.nnx's own modules. Nothing in a model names our ops: `fuse` wraps its loss. All
contenders of a model start from the same weights, see the same tokens and take turns. `apart` is the largest difference
of a contender's losses from XLA's after the same steps, in nats.

Contenders compile one after the other, `fuse` first: `compile_s` is the whole of tracing, lowering and compiling, and
`kernels` says how many of our kernels were compiled in it; give an empty ``CUTE_OPS_CACHE_DIR`` to see all of them.
`again_s` and `again_kernels` are those of a second process.

    python benchmarks/fuse_step.py --out out/benchmarks [--models stories15m equinox nnx] [--profile]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true")  # alone on the GPU, unlike other benchmarks
sys.path.append(str(Path(__file__).parents[1] / "examples" / "optax_decoder"))

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Table, parse, read, spread
from decoder import MODELS, PARTS, Decoder, small
from flax import nnx
from rich.console import Console
from rich.table import Table as View

import cute_ops_jax
from cute_ops.jit import cache

COLUMNS = (
    "model", "contender", "tokens", "tokens_per_s", "tokens_per_s_min", "tokens_per_s_max", "ms", "temporaries_gb",
    "compile_s", "kernels", "again_s", "again_kernels", "loss_first", "loss_last", "steps", "apart",
)  # fmt: skip
CONTENDERS = ("fuse", "ours", "XLA")
MODULES = ("equinox", "nnx")
# The optimizers' learning rate is one at which both models learn in a few steps without a warm-up.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.1))


@dataclass(frozen=True)
class Sizes:
    """Sizes of a transformer of modules and of its batches."""

    layers: int = 8
    hidden: int = 1024
    heads: int = 16
    vocabulary: int = 32000
    batch: int = 16
    seqlen: int = 1024
    dtype: str = "bfloat16"


SIZES = {"equinox": Sizes(), "nnx": Sizes(layers=4, vocabulary=50257, batch=8)}
TINY = Sizes(2, 64, 4, 256, 2, 32, "float32")


class Block(eqx.Module):
    """A layer of one sequence: equinox's norms and its MLP, and JAX's attention."""

    norms: list[eqx.nn.LayerNorm]
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    mlp: eqx.nn.MLP
    heads: int = eqx.field(static=True)

    def __init__(self, sizes: Sizes, key: jax.Array) -> None:
        n, keys = sizes.hidden, jax.random.split(key, 3)
        self.norms = [eqx.nn.LayerNorm(n), eqx.nn.LayerNorm(n)]
        self.qkv, self.out = eqx.nn.Linear(n, 3 * n, key=keys[0]), eqx.nn.Linear(n, n, key=keys[1])
        self.mlp = eqx.nn.MLP(n, n, 4 * n, 1, activation=jax.nn.gelu, key=keys[2])
        self.heads = sizes.heads

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.norms[0])(x)
        q, k, v = jnp.split(jax.vmap(self.qkv)(y).reshape(x.shape[0], self.heads, -1), 3, axis=-1)
        fused = "cudnn" if jax.default_backend() == "gpu" and x.dtype == jnp.bfloat16 else None
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=fused)
        x = x + jax.vmap(self.out)(mixed.reshape(x.shape))
        return x + jax.vmap(lambda row: self.mlp(self.norms[1](row)))(x)


class Transformer(eqx.Module):
    """A decoder of one sequence with a head of its own; returns the mean loss in nats per token."""

    embedding: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, sizes: Sizes, key: jax.Array) -> None:
        first, last, *keys = jax.random.split(key, sizes.layers + 2)
        self.embedding = eqx.nn.Embedding(sizes.vocabulary, sizes.hidden, key=first)
        self.blocks = [Block(sizes, each) for each in keys]
        self.norm = eqx.nn.LayerNorm(sizes.hidden)
        self.head = eqx.nn.Linear(sizes.hidden, sizes.vocabulary, use_bias=False, key=last)

    def __call__(self, window: jax.Array) -> jax.Array:
        x = jax.vmap(self.embedding)(window[:-1])
        for block in self.blocks:
            x = block(x)
        logits = jax.vmap(self.head)(jax.vmap(self.norm)(x)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, window[1:]).mean()


def equinox_loss(sizes: Sizes) -> tuple[Callable[..., Any], Any]:
    """The loss of parameters and windows, and the parameters."""
    model = Transformer(sizes, jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    arrays = jax.tree.map(lambda a: a.astype(sizes.dtype), arrays)
    return lambda arrays, windows: jax.vmap(eqx.combine(arrays, static))(windows).mean(), arrays


class Layer(nnx.Module):
    """A layer of flax.nnx's norms, attention and products."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        n, same = sizes.hidden, {"dtype": sizes.dtype, "param_dtype": sizes.dtype, "rngs": rngs}
        self.norms = nnx.List([nnx.LayerNorm(n, **same), nnx.LayerNorm(n, **same)])
        self.attention = nnx.MultiHeadAttention(sizes.heads, n, decode=False, **same)
        self.up, self.down = nnx.Linear(n, 4 * n, **same), nnx.Linear(4 * n, n, **same)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    """A decoder with learned positions and a head of its own; returns the mean loss in nats per token."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs) -> None:
        n, same = sizes.hidden, {"dtype": sizes.dtype, "param_dtype": sizes.dtype, "rngs": rngs}
        self.tokens = nnx.Embed(sizes.vocabulary, n, **same)
        self.places = nnx.Embed(sizes.seqlen, n, **same)
        self.layers = nnx.List([Layer(sizes, rngs) for _ in range(sizes.layers)])
        self.norm = nnx.LayerNorm(n, **same)
        self.head = nnx.Linear(n, sizes.vocabulary, use_bias=False, **same)

    def __call__(self, windows: jax.Array) -> jax.Array:
        given = windows[:, :-1]
        x, mask = self.tokens(given) + self.places(jnp.arange(given.shape[1])), nnx.make_causal_mask(given)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(self.norm(x)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def nnx_loss(make: Callable[[nnx.Rngs], nnx.Module]) -> tuple[Callable[..., Any], Any]:
    graph, params = nnx.split(make(nnx.Rngs(0)))
    return lambda params, windows: nnx.merge(graph, params)(windows), params


class Run:
    """A contender's parameters, optimizer state and compiled step."""

    def __init__(self, loss: Callable[..., Any], params: Any, windows: Any) -> None:
        def update(state: Any, windows: jax.Array) -> tuple[Any, jax.Array]:
            params, memory = state
            value, grads = jax.value_and_grad(loss)(params, windows)
            updates, memory = OPTIMIZER.update(grads, memory, params)
            return (optax.apply_updates(params, updates), memory), value

        self.state = jax.block_until_ready((params, OPTIMIZER.init(params)))
        compiled, begin = cache.counters.compiled, time.perf_counter()
        self.step = jax.jit(update, donate_argnums=0).lower(self.state, windows).compile()
        self.compile_seconds, self.kernels = time.perf_counter() - begin, cache.counters.compiled - compiled
        self.temporaries = self.step.memory_analysis().temp_size_in_bytes
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def train(self, windows: list[Any]) -> None:
        """A step per window."""
        found = []
        begin = time.perf_counter()
        for window in windows:
            self.state, loss = self.step(self.state, window)
            found.append(loss)
        losses = [float(loss) for loss in jax.block_until_ready(found)]
        self.seconds.append((time.perf_counter() - begin) / len(windows))
        self.losses += losses


def contenders(model: str, is_tiny: bool) -> tuple[dict[str, Callable[[], tuple[Callable[..., Any], Any]]], Any]:
    """What makes the loss and the parameters of each, and the sizes of the model."""

    def fused(made: tuple[Callable[..., Any], Any]) -> tuple[Callable[..., Any], Any]:
        return cute_ops_jax.fuse(made[0]), made[1]

    if model in MODULES:
        sizes = TINY if is_tiny else SIZES[model]
        plain = partial(equinox_loss, sizes) if model == "equinox" else partial(nnx_loss, partial(GPT, sizes))
        return {"fuse": lambda: fused(plain()), "XLA": plain}, sizes
    config = small(MODELS[model]) if is_tiny else MODELS[model]
    of = {parts: partial(nnx_loss, partial(Decoder, config, PARTS[parts])) for parts in ("XLA", "ours")}
    return {"fuse": lambda: fused(of["XLA"]()), "ours": of["ours"], "XLA": of["XLA"]}, config


def batches(sizes: Any) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    drawn = rng.zipf(1.3, (2, sizes.batch, sizes.seqlen + 1)) % sizes.vocabulary  # words of a text are as unequal
    return [jnp.asarray(each, jnp.int32) for each in drawn]


def compiled_again(model: str, name: str, is_tiny: bool) -> tuple[float, int]:
    """The seconds that a new process takes to compile a contender, and how many of our kernels it compiles."""
    command = [sys.executable, __file__, "--models", model, "--contenders", name, "--compile"]
    kept = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # this process holds most of the memory
    made = subprocess.run(
        [*command, *["--cpu-smoke"][: int(is_tiny)]], env=kept, check=True, stdout=subprocess.PIPE, text=True
    )
    seconds, kernels = json.loads(made.stdout.splitlines()[-1])
    return seconds, kernels


def measure(table: Table, model: str, options: argparse.Namespace) -> None:
    makers, sizes = contenders(model, options.cpu_smoke)
    windows = batches(sizes)
    runs = {name: Run(*make(), windows[0]) for name, make in makers.items() if name in options.contenders}
    for _ in range(options.rounds + 1):  # the first warms up
        for run in runs.values():
            run.train([windows[k % 2] for k in range(options.steps)])
    for name, run in reversed(runs.items()):
        again = compiled_again(model, name, options.cpu_smoke) if options.again and name != "XLA" else ("", "")
        seconds = spread(run.seconds[1:])
        tokens = sizes.batch * sizes.seqlen
        rates = (tokens / s for s in (seconds.median, seconds.high, seconds.low))
        apart = float(np.max(np.abs(np.subtract(run.losses, runs["XLA"].losses))))
        losses = run.losses[0], run.losses[-1], len(run.losses), apart
        compiled = run.compile_seconds, run.kernels, *again
        cells = (model, name, tokens, *rates, seconds.median * 1e3, run.temporaries / 1e9, *compiled, *losses)
        table.add(dict(zip(COLUMNS, cells, strict=True)))
    if options.profile:
        for name, run in runs.items():
            print(profile(model, name, run, windows[0]))


def profile(model: str, name: str, run: Run, window: Any, steps: int = 2, most: int = 24) -> str:
    """The kernels of a step that take longest."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as traced

    with traced(activities=[ProfilerActivity.CUDA]) as trace:
        run.train([window] * steps)
    total: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in trace.events():
        total[event.name] += event.device_time
        count[event.name] += 1
    lines = [f"{model}, {name}: {sum(total.values()) / steps / 1e3:.2f} ms of kernels, {sum(count.values()) // steps}"]
    lines += [f"{us / steps / 1e3:9.3f} ms {count[k] / steps:6.1f} x {k[:90]}" for k, us in total.most_common(most)]
    return "\n".join(lines)


def show(path: Path, console: Console) -> None:
    shown = ("model", "contender", "ms", "temporaries_gb", "compile_s", "kernels", "again_s", "again_kernels", "apart")
    view = View(*shown, "x XLA", title="training steps through fuse")
    rows = read(path)
    xla = {row["model"]: float(row["ms"]) for row in rows if row["contender"] == "XLA"}
    for row in rows:
        view.add_row(*(row[name] for name in shown), f"{xla[row['model']] / float(row['ms']):.2f}")
    console.print(view)


def main(arguments: list[str] | None = None) -> Mapping[str, float]:
    """Measure; returns how many times XLA's tokens per second `fuse` trains, by model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for fuse_step.csv")
    parser.add_argument("--models", nargs="+", default=["stories15m", *MODULES], choices=[*MODELS, *MODULES])
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS, help="XLA among them")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each")
    parser.add_argument("--steps", type=int, default=6, help="steps of one sample")
    parser.add_argument("--again", action="store_true", help="also compile in a second process")
    parser.add_argument("--compile", action="store_true", help="compile only, and print the seconds and kernels of it")
    parser.add_argument("--append", action="store_true", help="keep the rows of an earlier run")
    parser.add_argument("--profile", action="store_true", help="then the kernels that take longest")
    options = parse(parser, arguments, jax.default_backend() == "gpu")
    if options.compile:
        makers, sizes = contenders(options.models[0], options.cpu_smoke)
        run = Run(*makers[options.contenders[0]](), batches(sizes)[0])
        print(json.dumps([run.compile_seconds, run.kernels]))
        return {}
    path = options.out / "fuse_step.csv"
    table = Table(path, COLUMNS, options.append)
    for model in options.models:
        measure(table, model, options)
    show(path, Console(width=120))
    times = {(row["model"], row["contender"]): float(row["ms"]) for row in read(path)}
    return {model: times[model, "XLA"] / times[model, "fuse"] for model in options.models}


if __name__ == "__main__":
    main()
