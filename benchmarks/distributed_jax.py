"""Training steps of a decoder in JAX on a mesh, by what XLA makes of jax.numpy and by our ops; for distributed.py.

    distributed_jax.py DEVICE DEVICES FOLDER [--rounds 7]

The mesh has one axis. Over it devices share sequences (data parallel), or heads, features and classes (tensor
parallel); XLA's partitioner finds the collectives, or the types of the arrays with explicit axes, or the program names
them itself, in a ``jax.shard_map``. Gradients are compared with those of one device in float32. A line of JSON for each
contender goes to FOLDER/rows.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# Alone on the GPUs, unlike other benchmarks. Before the first import of JAX, which `common` may need.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true")

import jax
import jax.numpy as jnp
import numpy as np
from common import first_line, spread
from jax.sharding import AxisType, NamedSharding

import cute_ops_jax

P = jax.P
Array = jax.Array
AXIS = "gpus"
EPS, RATE, MOMENTUM = 1e-6, 1e-2, 0.9
# By so much the error of our gradients may exceed that of XLA's.
ERROR_FACTOR, ERROR_MORE = 1.5, 1e-3


@dataclass(frozen=True)
class Config:
    """Sizes of a decoder and of its batches."""

    layers: int = 4
    hidden: int = 2048
    mlp: int = 8192
    heads: int = 16
    vocabulary: int = 65536
    batch: int = 8
    seqlen: int = 2048
    dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        return self.batch * self.seqlen

    @property
    def headdim(self) -> int:
        return self.hidden // self.heads


SMALL = Config(layers=2, hidden=64, mlp=96, heads=4, vocabulary=256, batch=4, seqlen=16, dtype="float32")
# Dims of each weight, and the one that devices share in tensor parallelism.
WEIGHTS = {"q": ("hh", 0), "k": ("hh", 0), "v": ("hh", 0), "o": ("hh", 1), "gate": ("mh", 0), "up": ("mh", 0),
           "down": ("hm", 1)}  # fmt: skip


class Way(NamedTuple):
    """How a step is spread over the mesh.

    Attributes:
        name: as the table has it.
        shares: ``sequences``, or ``features``.
        kind: of the mesh's axis.
        by_hand: whether the program names its collectives.
    """

    name: str
    shares: str
    kind: AxisType = AxisType.Auto
    by_hand: bool = False

    @property
    def batch(self) -> str | None:
        return AXIS if self.shares == "sequences" else None

    @property
    def features(self) -> str | None:
        return AXIS if self.shares == "features" else None


WAYS = (
    Way("data parallel", "sequences"),
    Way("data parallel, explicit axes", "sequences", AxisType.Explicit),
    Way("data parallel, shard_map", "sequences", by_hand=True),
    Way("tensor parallel", "features"),
    Way("tensor parallel, explicit axes", "features", AxisType.Explicit),
    Way("tensor parallel, shard_map", "features", by_hand=True),
)


class Ops(NamedTuple):
    """All that differs between contenders."""

    rmsnorm: Callable[..., Array]
    add_rmsnorm: Callable[..., tuple[Array, Array]]
    rope: Callable[..., Array]
    gated: Callable[..., Array]
    loss: Callable[..., Array]


def xla_rmsnorm(x: Array, weight: Array) -> Array:
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS)
    return (normed * weight.astype(jnp.float32)).astype(x.dtype)


def xla_add_rmsnorm(x: Array, residual: Array, weight: Array) -> tuple[Array, Array]:
    total = x + residual
    return xla_rmsnorm(total, weight), total


def xla_rope(x: Array, cos: Array, sin: Array) -> Array:
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def xla_loss(hidden: Array, head: Array, target: Array, way: Way | None) -> Array:
    """The mean over this device's rows. Of classes that devices share by hand, each has a part of the sum."""
    spec = P(way.batch, None, way.features) if way and way.kind is AxisType.Explicit else None
    logits = product(hidden, head, spec).astype(jnp.float32)
    by_hand = bool(way and way.by_hand and way.features)
    first = jax.lax.axis_index(AXIS) * logits.shape[-1] if by_hand else 0
    is_target = first + jnp.arange(logits.shape[-1]) == target[..., None]
    top = jax.lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
    top = jax.lax.pmax(top, AXIS) if by_hand else top
    sums = jnp.sum(jnp.exp(logits - top), -1), jnp.sum(jnp.where(is_target, logits, 0.0), -1)
    total, chosen = jax.lax.psum(sums, AXIS) if by_hand else sums
    return jnp.mean(jnp.log(total) + top[..., 0] - chosen)


def our_loss(hidden: Array, head: Array, target: Array, way: Way | None) -> Array:
    if way and way.by_hand and way.features:
        return cute_ops_jax.vocab_parallel_linear_cross_entropy(hidden, head, target, AXIS)
    return cute_ops_jax.linear_cross_entropy(hidden, head, target)


OPS = {
    "XLA": Ops(xla_rmsnorm, xla_add_rmsnorm, xla_rope, lambda gate, up: jax.nn.silu(gate) * up, xla_loss),
    "ours": Ops(
        partial(cute_ops_jax.rmsnorm, eps=EPS), partial(cute_ops_jax.add_rmsnorm, eps=EPS), cute_ops_jax.rope,
        cute_ops_jax.silu_mul, our_loss,
    ),
}  # fmt: skip


def product(x: Array, weight: Array, spec: Any) -> Array:
    """``x @ weight.T``; ``spec`` says how the result is sharded, with explicit axes."""
    return jnp.einsum("bsk,nk->bsn", x, weight, out_sharding=spec)


def forward(params: dict[str, Array], window: Array, config: Config, ops: Ops, way: Way | None) -> Array:
    """The mean loss of ``window: int32[batch, seqlen + 1]``, by hand that of this device's sequences."""
    explicit = way is not None and way.kind is AxisType.Explicit
    rows = P(way.batch) if way and explicit else None
    wide = P(way.batch, None, way.features) if way and explicit else None
    tokens, target = window[:, :-1], window[:, 1:]
    cos, sin = rotary(config)
    total = params["embedding"].at[tokens].get(out_sharding=rows)

    def down(x: Array, weight: Array) -> Array:
        out = product(x, weight, rows)
        return jax.lax.psum(out, AXIS) if way and way.by_hand and way.features else out

    x = ops.rmsnorm(total, params["first"])
    for i in range(config.layers):
        w = {name: params[f"{i}.{name}"] for name in WEIGHTS}
        heads = [split(product(x, w[name], wide), config, wide) for name in "qkv"]
        q, k = (ops.rope(each, cos, sin) for each in heads[:2])
        x = down(merged(attend(q, k, heads[2], config, way), wide), w["o"])
        x, total = ops.add_rmsnorm(x, total, params[f"{i}.norm"])
        x = down(ops.gated(product(x, w["gate"], wide), product(x, w["up"], wide)), w["down"])
        x, total = ops.add_rmsnorm(x, total, params[f"{i}.next"])
    return ops.loss(x, params["head"], target, way)


def split(x: Array, config: Config, wide: Any) -> Array:
    """As heads."""
    sharding = None if wide is None else P(*wide, None)
    return jax.lax.reshape(x, (*x.shape[:2], x.shape[-1] // config.headdim, config.headdim), out_sharding=sharding)


def merged(heads: Array, wide: Any) -> Array:
    return jax.lax.reshape(heads, (*heads.shape[:2], heads.shape[2] * heads.shape[3]), out_sharding=wide)


def attend(q: Array, k: Array, v: Array, config: Config, way: Way | None) -> Array:
    """Causal attention, on each device of its own sequences or heads."""
    # cuDNN's fused attention takes half precision only.
    fused = "cudnn" if jax.default_backend() == "gpu" and config.dtype == "bfloat16" else None
    attention = partial(jax.nn.dot_product_attention, is_causal=True, implementation=fused)
    if way is None:  # in float32, whose probabilities would take gigabytes until the backward
        return jax.checkpoint(attention)(q, k, v)
    if way.by_hand:
        return attention(q, k, v)
    spec = P(way.batch, None, way.features)
    return jax.shard_map(attention, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)(q, k, v)


def rotary(config: Config) -> tuple[Array, Array]:
    frequency = 1e4 ** (-np.arange(0, config.headdim, 2) / config.headdim)
    angle = np.arange(config.seqlen)[:, None] * frequency
    return jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)


# --- weights and their places ----------------------------------------------------------------------------------------


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    size = {"h": config.hidden, "m": config.mlp}
    found: dict[str, tuple[int, ...]] = {"embedding": (config.vocabulary, config.hidden), "first": (config.hidden,)}
    for i in range(config.layers):
        found |= {f"{i}.{name}": tuple(size[d] for d in dims) for name, (dims, _) in WEIGHTS.items()}
        found |= {f"{i}.norm": (config.hidden,), f"{i}.next": (config.hidden,)}
    return {**found, "head": (config.vocabulary, config.hidden)}


def specs(config: Config, way: Way) -> dict[str, Any]:
    """How each weight is sharded."""
    cuts = {"head": 0, **{f"{i}.{n}": cut for i in range(config.layers) for n, (_, cut) in WEIGHTS.items()}}
    if way.features is None:
        cuts = {}
    return {name: P(*[None] * cuts[name], AXIS) if name in cuts else P() for name in shapes(config)}


def weights(config: Config) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: np.ones(shape, np.float32) if len(shape) == 1 else 0.02 * rng.standard_normal(shape, np.float32)
        for name, shape in shapes(config).items()
    }


# --- a contender -----------------------------------------------------------------------------------------------------


class Step:
    """A compiled training step: gradient, momentum, update. The state is on its devices while it is sampled."""

    def __init__(self, config: Config, name: str, way: Way | None, devices: Sequence[Any]) -> None:
        self.config, self.name, self.way = config, name, way
        self.mesh = None if way is None else jax.make_mesh((len(devices),), (AXIS,), (way.kind,), devices=devices)
        loss = partial(forward, config=config, ops=OPS[name], way=way)
        if way is not None and way.by_hand:
            loss = self._by_hand(loss, way)
        self._loss = loss
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def _by_hand(self, loss: Callable[..., Array], way: Way) -> Callable[..., Array]:
        def local(params: Any, window: Array) -> Array:
            value = loss(params, window)
            return jax.lax.pmean(value, AXIS) if way.batch else value

        given = specs(self.config, way), P(way.batch)
        return jax.shard_map(local, mesh=self.mesh, in_specs=given, out_specs=P())

    def _update(self, state: Any, window: Array) -> tuple[Any, Array]:
        params, momenta = state
        value, grads = jax.value_and_grad(self._loss)(params, window)
        momenta = {n: MOMENTUM * momenta[n] + g.astype(jnp.float32) for n, g in grads.items()}
        return ({n: (p - RATE * momenta[n]).astype(p.dtype) for n, p in params.items()}, momenta), value

    def _context(self) -> Any:
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def _places(self) -> tuple[dict[str, Any], Any]:
        if self.way is None or self.mesh is None:
            return dict.fromkeys(shapes(self.config)), None
        own = {n: NamedSharding(self.mesh, spec) for n, spec in specs(self.config, self.way).items()}
        return own, NamedSharding(self.mesh, P(self.way.batch))

    def compile(self) -> None:
        places, of_window = self._places()

        def described(dtype: str) -> dict[str, Any]:
            return {n: jax.ShapeDtypeStruct(s, dtype, sharding=places[n]) for n, s in shapes(self.config).items()}

        window = jax.ShapeDtypeStruct((self.config.batch, self.config.seqlen + 1), np.int32, sharding=of_window)
        state = described(self.config.dtype), described("float32")
        with self._context():
            self.run = jax.jit(self._update, donate_argnums=0).lower(state, window).compile()
        self.temporaries = self.run.memory_analysis().temp_size_in_bytes

    def load(self, params: dict[str, np.ndarray], window: np.ndarray) -> dict[str, np.ndarray]:
        """Put the weights onto the devices and make one step; the gradient, which is then the momentum."""
        places, of_window = self._places()
        put = {n: jax.device_put(p, places[n]) for n, p in params.items()}
        zeros = {n: jnp.zeros(p.shape, jnp.float32, device=places[n]) for n, p in params.items()}
        self.state, self.window = (put, zeros), jax.device_put(window, of_window)
        self.sample(1)
        self.seconds.clear()
        return {n: np.asarray(m) for n, m in self.state[1].items() if compared(n, self.config)}

    def sample(self, steps: int) -> None:
        begin = time.perf_counter()
        found = []
        for _ in range(steps):
            self.state, loss = self.run(self.state, self.window)
            found.append(loss)
        jax.block_until_ready((self.state, found))
        self.seconds.append((time.perf_counter() - begin) / steps)
        self.losses += map(float, found)


def compared(name: str, config: Config) -> bool:
    """Of the layers the first and the last: gigabytes come from the devices."""
    layer = name.partition(".")[0]
    return not layer.isdigit() or int(layer) in (0, config.layers - 1)


def relative_error(found: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> float:
    """The largest of all weights, by the norm of their gradients."""
    apart = (np.linalg.norm(found[n] - right[n]) / max(np.linalg.norm(right[n]), 1e-30) for n in right)
    return max(float(np.nan_to_num(a, nan=np.inf)) for a in apart)


def attempt(what: str, run: Callable[[], Any]) -> tuple[Any, str]:
    print(f"at {what}", flush=True)
    try:
        made = run()
    except Exception as problem:
        traceback.print_exc()
        return None, first_line(problem)
    print(f"done: {what}", flush=True)
    return made, ""


def compile_all(exact: Step, steps: Sequence[Step]) -> list[str]:
    """At once; what went wrong with each step."""

    def precisely() -> None:
        with jax.default_matmul_precision("highest"):
            exact.compile()

    with ThreadPoolExecutor() as pool:
        first = pool.submit(precisely)
        found = list(pool.map(lambda s: attempt(f"compiling {s.way.name}: {s.name}", s.compile)[1], steps))
        first.result()
    return found


def measure(
    config: Config, devices: Sequence[Any], rounds: int, report: Callable[..., None], ways: Sequence[Way]
) -> None:
    params = {n: p.astype(jnp.dtype(config.dtype)) for n, p in weights(config).items()}
    window = np.random.default_rng(1).integers(0, config.vocabulary, (config.batch, config.seqlen + 1)).astype(np.int32)
    exact = Step(replace(config, dtype="float32"), "XLA", None, devices)
    steps = [Step(config, name, way, devices) for way in ways for name in OPS]
    compiled = compile_all(exact, steps)
    right = exact.load({n: p.astype(np.float32) for n, p in params.items()}, window)
    del exact.state
    for way in ways:
        some: dict[str, Step] = {}
        errors = {}
        for step, wrong in zip(steps, compiled, strict=True):
            if step.way is not way:
                continue
            gradient = None
            if not wrong:
                load = partial(step.load, params, window)
                gradient, wrong = attempt(f"{way.name}: {step.name}", load)
            if gradient is None:
                report(case=way.name, contender=step.name, tokens=config.tokens, status=f"failed: {wrong}")
                continue
            some[step.name], errors[step.name] = step, relative_error(gradient, right)
        for turn in range(rounds + 1):
            print(f"at {way.name}: sample {turn}", flush=True)
            for name in list(some)[:: 1 if turn % 2 == 0 else -1]:
                some[name].sample(1 if config is SMALL else 4)
        for name, step in some.items():
            seconds = spread(step.seconds[1:])  # the first warms up
            limit = ERROR_FACTOR * errors.get("XLA", 0.0) + ERROR_MORE
            report(
                case=way.name, contender=name, tokens=config.tokens, ms=seconds.median * 1e3, ms_min=seconds.low * 1e3,
                ms_max=seconds.high * 1e3, tokens_per_s=config.tokens / statistics.median(step.seconds[1:]),
                peak_gb=step.temporaries / 1e9, error=errors[name], loss_first=step.losses[0],
                loss_last=step.losses[-1],
                status="ok" if errors[name] <= limit else f"wrong: relative error {errors[name]:.2g}",
            )  # fmt: skip
            del step.state


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("devices", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=7, help="samples of each contender")
    parser.add_argument("--ways", nargs="+", default=[w.name for w in WAYS], choices=[w.name for w in WAYS])
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)

    def report(**row: Any) -> None:
        print(f"{row['case']}: {row['contender']}: {row['status']}", flush=True)
        with (options.folder / "rows.jsonl").open("a") as file:
            file.write(json.dumps({"phase": "jax", "gpus": options.devices, **row}) + "\n")

    config = SMALL if options.device == "cpu" else Config()
    ways = [way for way in WAYS if way.name in options.ways]
    measure(config, jax.devices()[: options.devices], options.rounds, report, ways)


if __name__ == "__main__":
    main()
