"""Kernels made of expressions beside torch.compile and XLA: part of the copy rate forward and backward, one table.

The expressions are the package's own activations and those of formulas.py; the contenders compute the same functions,
torch.compile with max-autotune and without CUDA graphs. Each expression has a problem of 128 MB or more that all
contenders measure, of other dtypes and odd lengths in turn, and one more for ours alone. ``--contenders`` has those
that it names measure everything. How a problem is measured is said in device_time.py. Our kernels are compiled first,
one per core, then what the others compile, in as many processes.

    python benchmarks/expressions.py --out out/benchmarks [--only "row_.* backward"] [--contenders "ours (torch)"]
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import contenders
import device_time
import prewarm
import torch
from common import Table, first_line, parse, read
from formulas import FUNCTIONS
from problems import Problem, smoke
from rich.console import Console
from summary import COMPILED, OURS, TITLES, XLA, of_expressions, points
from torch._functorch import config as functorch_config

from cute_ops.autotune.dispatch import foresee
from cute_ops.jit import cache, target

OWN = ("silu", "gelu", "relu2", "silu_mul", "gelu_mul", "swiglu", "geglu")
NAMES = (*OWN, *FUNCTIONS)
ROWS = [name for name in FUNCTIONS if name.startswith("row_")]
# What expressions are measured on in turn: rows, row length, dtype.
IN_TURN = (
    (16384, 4096, "bfloat16"), (16384, 4097, "bfloat16"), (16384, 4096, "bfloat16"), (8192, 4096, "float32"),
    (16384, 4096, "bfloat16"), (16384, 5120, "float16"),
)  # fmt: skip
# And ours alone.
MORE = ((16384, 4095, "float16"), (64, 4096, "bfloat16"), (16384, 4097, "bfloat16"), (8192, 4097, "float32"))
LONG = ((2048, 32768, "bfloat16"),)
SECONDS = 235.0


class Task(NamedTuple):
    """A problem in a direction, and who measures it."""

    problem: Problem
    direction: str
    contenders: Sequence[str]

    @property
    def name(self) -> str:
        return f"{self.problem.op} {TITLES[self.direction]} {self.problem.label}"


def grid(names: Sequence[str] | None) -> list[Task]:
    """What all measure comes first; with names, all of it is for these contenders."""
    shared, own = in_turn(NAMES, IN_TURN), in_turn(NAMES[::2], MORE) + in_turn(ROWS, LONG)
    return [*tasks(shared, names or (OURS, COMPILED, XLA)), *tasks(own, names or (OURS,))]


def in_turn(names: Iterable[str], shapes: Sequence[tuple[int, int, str]]) -> list[Problem]:
    return [Problem(op, *shape) for op, shape in zip(names, cycle(shapes), strict=False)]


def tasks(problems: Iterable[Problem], names: Sequence[str]) -> list[Task]:
    return [Task(problem, direction, names) for problem in problems for direction in problem.directions]


def compile_ahead(chosen: Sequence[Task], workers: int, seconds: float, console: Console) -> None:
    """Our kernels, and what the others compile."""
    begin, where = time.perf_counter(), target.of_device()
    # Before its backward an op's forward runs.
    calls = [task.problem.binding(direction) for task in chosen for direction in task.problem.directions]
    built = cache.build_all(foresee(call, {}, where).variant for call in calls)
    for one in built:
        if one.error:
            console.print(f"{one.variant.op}: {first_line(one.error)}")
    console.print(f"{len(built)} kernels in {time.perf_counter() - begin:.0f} s")
    others = {name for task in chosen for name in task.contenders if not name.startswith("ours")}
    shared = [(task.problem, task.direction) for task in chosen if others & {*task.contenders}]
    if shared:
        device_time.compile_ahead(shared, sorted(others), workers, seconds, console)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for expressions.csv")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="of names such as `row_rms forward 64x4096 bfloat16`"
    )
    parser.add_argument("--contenders", nargs="+", choices=contenders.ALL, help="who measures all of the grid")
    parser.add_argument("--rounds", type=int, default=15, help="the most samples per contender")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="start no further problem after this long")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that compile; 0: none")
    options = parse(parser, arguments, torch.cuda.is_available())

    begin = time.perf_counter()
    console = Console(width=200, highlight=False)
    prewarm.share_caches()
    functorch_config.donated_buffer = False  # a compiled backward is called more than once
    whole = grid(options.contenders)
    if options.cpu_smoke:
        whole = tasks([p for p in smoke(NAMES) if not p.strided], options.contenders or (OURS, XLA))
    chosen = [task for task in whole if re.search(options.only, task.name)]
    if not chosen:
        parser.error(f"no problem is named {options.only}, for example {whole[0].name}")
    if options.workers and not options.cpu_smoke:
        compile_ahead(chosen, options.workers, options.seconds / 2, console)

    table = Table(options.out / "expressions.csv", device_time.COLUMNS)
    device = torch.device("cpu" if options.cpu_smoke else "cuda")
    ceiling = statistics.median(device_time.copy_rate(device, 0.01 if options.cpu_smoke else 2.0))
    console.print(f"copy: {ceiling:.0f} GB/s")
    table.add({"op": "copy", "contender": "copy", "status": "ok", "gb_s": ceiling, "of_copy": 1.0})
    bench = device_time.Bench(device, table, options.rounds, ceiling, console)
    for i, task in enumerate(chosen):
        if time.perf_counter() - begin > options.seconds:
            console.print(f"out of time: {len(chosen) - i} of {len(chosen)} not measured")
            break
        try:
            bench.measure(*task)
        except Exception as failure:  # too little memory for the buffers, or the GPU is lost
            console.print(f"{task.name}: {first_line(failure)}")
            if bench.lost():
                return 3
        bench.release()
    console.print(of_expressions(points(read(options.out / "expressions.csv"))))
    steps = ", ".join(f"{name} {seconds:.1f}" for name, seconds in bench.seconds.most_common())
    console.print(f"{time.perf_counter() - begin:.0f} s ({steps})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
