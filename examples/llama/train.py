"""Train a small decoder six ways and compare: PyTorch eager, torch.compile and jax.jit, with cute_ops and without.

All six start from the same weights and see the same bytes. Writes the loss curves as a picture and a table and fails
when they differ by more than ``TOLERANCE``. On a GPU it then trains a larger model in bfloat16 and prints tokens/s.

    python examples/llama/train.py --steps 80 --out out/llama
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

# The frameworks take turns on one GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import model_jax
import model_torch
import numpy as np
import torch
from config import LARGE, SMALL, Config
from data import batches, load_bytes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

# Largest difference of two losses, in nats per byte: float32 rounding, carried through training.
TOLERANCE = 2e-4
MODES: dict[str, Callable[..., Callable[[np.ndarray], float]]] = {
    "torch eager": model_torch.make_step,
    "torch.compile": lambda *args, **kwargs: model_torch.make_step(*args, compiled=True, **kwargs),
    "jax.jit": model_jax.make_step,
}
OPS = {"own": "its own functions", "our": "cute_ops"}  # what a mode runs on, and how that is called
WITHOUT_GPU = (
    "No GPU here: cute_ops runs as its references, which are written in the framework's own functions. The losses say "
    "whether the maths is right; tokens/s say nothing about our kernels. On a GPU the same program runs the kernels, "
    "and then trains a larger model in bfloat16 to compare speed."
)
Curves = dict[tuple[str, str], list[float]]


def train(config: Config, steps: int, console: Console, dtype: str = "float32") -> tuple[Curves, dict]:
    """Losses and seconds of every step, by (mode, ops)."""
    text = load_bytes()
    curves: Curves = {}
    seconds: dict[tuple[str, str], list[float]] = {}
    columns = TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    columns += (TextColumn("loss {task.fields[loss]:.4f}"),)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for mode, make_step in MODES.items():
            for ops in OPS:
                task = progress.add_task(f"{mode}, {OPS[ops]}", total=steps, loss=float("nan"))
                step = make_step(config, ops, dtype=dtype)
                losses, times = curves.setdefault((mode, ops), []), seconds.setdefault((mode, ops), [])
                for _, batch in zip(range(steps), batches(text, config.batch, config.seqlen), strict=False):
                    start = time.perf_counter()
                    losses.append(step(batch))
                    times.append(time.perf_counter() - start)
                    progress.update(task, advance=1, loss=losses[-1])
                if losses and progress.disable:  # a pipe or a file gets a line for each
                    console.print(
                        f"{mode}, {OPS[ops]}: loss {losses[-1]:.4f} after {sum(times):.0f} s", highlight=False
                    )
                del step
                torch.cuda.empty_cache()
    return curves, seconds


def differences(curves: Curves) -> dict[str, float]:
    """The largest distances: of our ops from the framework's own, per mode, and of all curves from the first."""
    found = {f"{mode}: cute_ops - its own": distance(curves[mode, "our"], curves[mode, "own"]) for mode in MODES}
    first = next(iter(curves.values()))
    found["all - torch eager, its own"] = max(distance(curve, first) for curve in curves.values())
    return found


def distance(a: list[float], b: list[float]) -> float:
    """The largest absolute difference; NaN where either has one, which no tolerance admits."""
    return float(np.max(np.abs(np.subtract(a, b))))


def write_table(curves: Curves, path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *(f"{mode}, {OPS[ops]}" for mode, ops in curves)])
        writer.writerows([i, *(f"{v:.7f}" for v in row)] for i, row in enumerate(zip(*curves.values(), strict=True)))


def write_picture(curves: Curves, path: Path) -> None:
    figure = Figure(figsize=(7, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    styles = {"own": {"linewidth": 4, "alpha": 0.3}, "our": {"linewidth": 1.2}}
    for color, mode in enumerate(MODES):
        for ops in OPS:
            top.plot(curves[mode, ops], color=f"C{color}", label=f"{mode}, {OPS[ops]}", **styles[ops])
        bottom.plot(np.abs(np.subtract(curves[mode, "our"], curves[mode, "own"])), color=f"C{color}", label=mode)
    bottom.axhline(TOLERANCE, color="black", linestyle=":", label="tolerance")
    top.set(ylabel="loss, nats per byte", title="One decoder, six ways to train it")
    bottom.set(ylabel="|cute_ops - its own|", xlabel="step")
    bottom.set_yscale("symlog", linthresh=1e-7)
    top.legend(fontsize=8)
    bottom.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def print_summary(curves: Curves, seconds: dict, config: Config, console: Console) -> None:
    table = Table("run", "with", "first loss", "last loss", "tokens/s", title="training")
    for (mode, ops), losses in curves.items():
        rate = config.tokens / statistics.median(seconds[mode, ops])
        table.add_row(mode, OPS[ops], f"{losses[0]:.4f}", f"{losses[-1]:.4f}", f"{rate:,.0f}")
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--speed-steps", type=int, default=12, help="steps of the larger model, on a GPU; 0 for none")
    parser.add_argument("--out", type=Path, default=Path("out/llama"))
    options = parser.parse_args(arguments)
    console = Console()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second, which a busy machine may not have
    options.out.mkdir(parents=True, exist_ok=True)

    if not torch.cuda.is_available():
        console.print(WITHOUT_GPU)
    curves, seconds = train(SMALL, options.steps, console)
    write_table(curves, options.out / "loss.csv")
    write_picture(curves, options.out / "loss.png")
    print_summary(curves, seconds, SMALL, console)
    console.print(f"wrote {options.out / 'loss.png'} and {options.out / 'loss.csv'}")

    table = Table("largest difference of losses", "nats", f"at most {TOLERANCE}")
    found = differences(curves)
    for name, value in found.items():
        table.add_row(name, f"{value:.2e}", "yes" if value <= TOLERANCE else "NO")
    console.print(table)
    agree = all(value <= TOLERANCE for value in found.values())
    console.print("The curves agree." if agree else "[bold red]The curves differ.")

    if torch.cuda.is_available() and options.speed_steps and agree:
        console.print(f"\nSpeed on {torch.cuda.get_device_name()}, bfloat16, {LARGE}")
        curves, seconds = train(LARGE, options.speed_steps, console, dtype="bfloat16")
        print_summary(curves, seconds, LARGE, console)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
