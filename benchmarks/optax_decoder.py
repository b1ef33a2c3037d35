"""One training step of a decoder in JAX with optax: with our ops, and with what XLA makes of jax.numpy.

Decoder, runs and data are those of examples/optax_decoder; the two take turns. `apart` is the largest difference of
their losses after the same steps, in nats.

    python benchmarks/optax_decoder.py --out out/benchmarks [--models stories15m gemma3-270m]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "true")  # alone on the GPU, unlike other benchmarks
sys.path.append(str(Path(__file__).parents[1] / "examples" / "optax_decoder"))

import jax
from common import Table, parse, read, spread
from decoder import MODELS, small
from optax_step import apart, train
from rich.console import Console
from rich.table import Table as View

COLUMNS = (
    "model", "ops", "tokens", "tokens_per_s", "tokens_per_s_min", "tokens_per_s_max", "ms", "temporaries_gb",
    "loss_first", "loss_last", "steps", "apart",
)  # fmt: skip


def measure(table: Table, model: str, rounds: int, steps: int) -> None:
    config = MODELS[model] if jax.default_backend() == "gpu" else small(MODELS[model])
    runs = train(config, None, rounds, steps)
    for name, run in runs.items():
        seconds = spread(run.seconds[1:])  # the first warms up
        rates = (config.tokens / s for s in (seconds.median, seconds.high, seconds.low))
        losses = run.losses[0], run.losses[-1], len(run.losses), apart(runs)
        cells = (model, name, config.tokens, *rates, seconds.median * 1e3, run.temporaries / 1e9, *losses)
        table.add(dict(zip(COLUMNS, cells, strict=True)))


def show(path: Path, console: Console) -> None:
    shown = ("model", "ops", "tokens_per_s", "ms", "temporaries_gb", "loss_first", "loss_last")
    view = View(*shown, title="decoder trained with optax")
    for row in read(path):
        view.add_row(*(row[name] for name in shown))
    console.print(view)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for optax_decoder.csv")
    parser.add_argument("--models", nargs="+", default=["stories15m"], choices=MODELS)
    parser.add_argument("--rounds", type=int, default=7, help="samples of each")
    parser.add_argument("--steps", type=int, default=8, help="steps of one sample")
    options = parse(parser, arguments, jax.default_backend() == "gpu")
    path = options.out / "optax_decoder.csv"
    table = Table(path, COLUMNS)
    for model in options.models:
        measure(table, model, options.rounds, options.steps)
    show(path, Console(width=110))


if __name__ == "__main__":
    main()
