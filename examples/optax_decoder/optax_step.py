"""Train one decoder with optax twice, with our ops and with what XLA makes of jax.numpy: losses and tokens/s.

Both start from the same weights and see the same words; the script fails when their losses part. On a GPU the decoder
is like Qwen3-0.6B, like Gemma 3 270M or like the Llama of TinyStories with 15 million parameters, in bfloat16; on a CPU
it is tiny. ``--freeze embedding`` trains the layers alone, as fine-tuning may: two thirds of Gemma's parameters are its
embedding, which also makes the logits. ``pip install flax optax`` first.

    python examples/optax_decoder/optax_step.py --model stories15m
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from decoder import MODELS, PARTS, Config, Decoder, Parts, small
from flax import nnx
from rich.console import Console
from rich.table import Table

WITHOUT_GPU = "No GPU here: a small model, ours by references. tokens/s say nothing about our kernels."
# Largest difference of two losses after the same steps, in nats: rounding, carried through training.
TOLERANCE = {"float32": 2e-4, "bfloat16": 2e-2}
Compiled = Callable[..., Any]


class Run:
    """A model, its optimizer's state and its compiled step."""

    def __init__(self, config: Config, parts: Parts, freeze: str | None = None) -> None:
        frozen = nnx.PathContains(freeze) if freeze else nnx.Nothing()
        self.graph, self.frozen, params = nnx.split(Decoder(config, parts, nnx.Rngs(0)), frozen, ...)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.1))
        self.state = params, self.optimizer.init(params)
        window = jax.ShapeDtypeStruct((config.batch, config.seqlen + 1), np.int32)
        self.lowered = jax.jit(self._update, donate_argnums=0).lower(self.state, self.frozen, window)
        self.losses: list[float] = []
        self.seconds: list[float] = []  # per step, of each round

    def compile(self) -> None:
        self.step = self.lowered.compile()
        self.temporaries = self.step.memory_analysis().temp_size_in_bytes

    def _update(self, state: Any, frozen: Any, window: jax.Array) -> tuple[Any, jax.Array]:
        params, memory = state
        loss, grads = jax.value_and_grad(lambda params: nnx.merge(self.graph, frozen, params)(window))(params)
        updates, memory = self.optimizer.update(grads, memory, params)
        return (optax.apply_updates(params, updates), memory), loss

    def train(self, windows: list[np.ndarray]) -> float:
        """A step per window; seconds per step."""
        found = []
        start = time.perf_counter()
        for window in windows:
            self.state, loss = self.step(self.state, self.frozen, window)
            found.append(loss)
        self.losses += [float(loss) for loss in jax.block_until_ready(found)]
        return (time.perf_counter() - start) / len(windows)


def tokens(vocabulary: int) -> np.ndarray:
    """The standard library's modules, which every machine has, as ``int32`` words, the most frequent first."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py"))
    words = re.findall(r" ?\w+|\s+|[^\w\s]+", "".join(f.read_text("utf-8") for f in files))
    known = {word: i for i, (word, _) in enumerate(Counter(words).most_common())}
    # What a small vocabulary has no room for is one token, the last.
    return np.minimum([known[word] for word in words], vocabulary - 1).astype(np.int32)


def batches(config: Config, seed: int = 0) -> Iterator[np.ndarray]:
    """Random windows ``int32[batch, seqlen + 1]`` of the text."""
    text, rng = tokens(config.vocabulary), np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - config.seqlen - 1, config.batch)
        yield np.stack([text[s : s + config.seqlen + 1] for s in starts])


def train(config: Config, freeze: str | None, rounds: int, steps: int) -> dict[str, Run]:
    """Both, in turns; the first round warms up."""
    runs = {name: Run(config, parts, freeze) for name, parts in PARTS.items()}
    with ThreadPoolExecutor() as pool:
        list(pool.map(Run.compile, runs.values()))
    source = batches(config)
    for _ in range(rounds + 1):
        windows = [next(source) for _ in range(steps)]
        for run in runs.values():
            run.seconds.append(run.train(windows))
    return runs


def apart(runs: dict[str, Run]) -> float:
    """The largest difference of the losses after the same steps, in nats."""
    return float(np.max(np.abs(np.subtract(runs["ours"].losses, runs["XLA"].losses))))


def main(arguments: list[str] | None = None) -> int:
    """Train and compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument("--freeze", choices=["embedding"], help="parameters that are not trained")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each, taken in turns")
    parser.add_argument("--steps", type=int, default=5, help="steps of one sample")
    options = parser.parse_args(arguments)
    config = MODELS[options.model]
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu:
        config = small(config)

    runs = train(config, options.freeze, options.rounds, options.steps)
    rates = {name: config.tokens / statistics.median(run.seconds[1:]) for name, run in runs.items()}
    device = jax.devices()[0]
    table = Table("ops", "tokens/s", "ms per step", "temporaries", "first loss", "last loss", title=device.device_kind)
    for name, run in runs.items():
        figures = f"{rates[name]:,.0f}", f"{1e3 * config.tokens / rates[name]:.1f}", f"{run.temporaries / 1e9:.2f} GB"
        table.add_row(name, *figures, f"{run.losses[0]:.4f}", f"{run.losses[-1]:.4f}")
    console = Console(width=110)
    console.print(config)
    console.print(table)
    console.print(f"ours: {rates['ours'] / rates['XLA']:.2f} x XLA's tokens/s" if on_gpu else WITHOUT_GPU)
    agree = apart(runs) <= TOLERANCE[config.dtype]
    console.print(f"losses differ by at most {apart(runs):.1e} nats{'' if agree else ', which is too much'}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
