"""Every benchmark, one after the other, into one folder, with a limit for each.

Compiling takes longest, so all cores fill the caches first; what is timed afterwards has the GPU for itself. Benchmarks
write as they go: a run that is cut short keeps what it has, and device_time goes on where it stopped.

    python benchmarks/everything.py --out out/benchmarks [--seconds 900] [--phases device_time startup]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

HERE = Path(__file__).parent
RESUME = 3  # device_time lost the GPU: a new process goes on
LEAST = 10  # seconds that are worth starting a benchmark for


# Arguments of Python; ``{out}``, ``{scratch}`` and ``{seconds}`` (what is left) stand for themselves.
Command = tuple[str, ...]


class Phase(NamedTuple):
    """What runs at the same time, no longer than this; nothing is timed where it is more than one command."""

    seconds: int
    commands: tuple[Command, ...]


def script(name: str, *arguments: str) -> Command:
    return str(HERE / f"{name}.py"), *arguments


PHASES = {
    "caches": Phase(
        190,
        (
            script("device_time", "--out", "{out}", "--resume", "--compile-only", "--compile-seconds", "150"),
            script("llama_step", "--one", "torch.compile", "--steps", "1", "--rounds", "1"),
            script("llama_step", "--one", "graph pass + compile", "--steps", "1", "--rounds", "1"),
            script("host_time", "--out", "{scratch}", "--rounds", "1"),
        ),
    ),
    "device_time": Phase(
        300, (script("device_time", "--out", "{out}", "--resume", "--workers", "0", "--seconds", "{seconds}"),)
    ),
    "llama_step": Phase(240, (script("llama_step", "--out", "{out}"),)),
    "llama_floor": Phase(240, (script("llama_floor", "--out", "{out}", "--warm"),)),
    "model_steps": Phase(480, (script("model_steps", "--out", "{out}", "--seconds", "{seconds}"),)),
    "attention": Phase(240, (script("attention", "--out", "{out}"),)),
    "masked_attention": Phase(90, (script("masked_attention", "--out", "{out}"),)),
    "attention_floor": Phase(60, (script("attention_floor", "--out", "{out}"),)),
    "decode": Phase(180, (script("decode", "--out", "{out}"),)),
    "sample": Phase(300, (script("sample", "--out", "{out}", "--again", "--seconds", "{seconds}"),)),
    "expressions": Phase(270, (script("expressions", "--out", "{out}"),)),
    "linear_cross_entropy": Phase(90, (script("linear_cross_entropy", "--out", "{out}"),)),
    "head_losses": Phase(110, (script("head_losses", "--out", "{out}"),)),
    "optax_decoder": Phase(90, (script("optax_decoder", "--out", "{out}"),)),
    "startup": Phase(120, (script("startup", "--out", "{out}"),)),
    "host_time": Phase(90, (script("host_time", "--out", "{out}"),)),
    "fusion": Phase(120, (script("fusion", "--out", "{out}"),)),
    "tuning_gap": Phase(150, (script("tuning_gap", "--out", "{out}", "--seconds", "{seconds}"),)),
    "tutorial": Phase(60, (script("tutorial", "--out", "{out}"),)),
    "picture": Phase(60, (script("plot", "{out}"),)),
    "summary": Phase(30, (script("summary", "{out}", "--write", "{out}/summary.md"),)),
}  # fmt: skip


def run(name: str, phase: Phase, out: Path, deadline: float) -> str:
    """``ok``, or what went wrong. Output goes to ``<out>/logs/<name>.txt``, a file per command."""
    end = min(time.monotonic() + phase.seconds, deadline)
    while True:
        left = end - time.monotonic()
        if left < LEAST:
            return "no time left"
        codes = together(name, phase, out, end)
        # A contender that takes the process down with it costs its own figures only: what goes on asks for --resume.
        died = [
            code is not None and code < 0 and "--resume" in c for code, c in zip(codes, phase.commands, strict=True)
        ]
        if RESUME not in codes and not any(died):
            break
    return ", ".join("over its limit" if code is None else f"ended with {code}" for code in codes if code != 0) or "ok"


def together(name: str, phase: Phase, out: Path, end: float) -> list[int | None]:
    """Exit codes; None of a command that was stopped."""
    processes = []
    names = {"out": str(out), "scratch": str(out / "logs"), "seconds": str(int(end - time.monotonic() - LEAST // 2))}
    for i, command in enumerate(phase.commands):
        arguments = [a.format(**names) for a in command]
        with (out / "logs" / f"{name}{f' {i + 1}' if i else ''}.txt").open("ab") as log:
            processes.append(subprocess.Popen([sys.executable, *arguments], stdout=log, stderr=subprocess.STDOUT))
    return [wait(process, end) for process in processes]


def wait(process: subprocess.Popen[bytes], end: float) -> int | None:
    try:
        return process.wait(max(end - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        process.terminate()  # so that it ends its own processes
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for the results")
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=list(PHASES), metavar="PHASE",
                        help=f"of {', '.join(PHASES)}")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=3600, help="for all of them")
    options = parser.parse_args(arguments)
    (options.out / "logs").mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds
    console, failed = Console(highlight=False), 0
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(options.phases))
        for name in options.phases:
            progress.update(task, description=name)
            begin = time.monotonic()
            said = run(name, PHASES[name], options.out, deadline)
            where = "" if said == "ok" else f"; its output is in {options.out / 'logs'}"
            console.print(f"{name}: {said}, {time.monotonic() - begin:.0f} s{where}")
            failed += said != "ok"
            progress.advance(task)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
