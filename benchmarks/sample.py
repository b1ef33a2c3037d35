"""Sizes that nobody picked: products, expressions and rows drawn by a seed, ours beside the others.

A fixed grid does not show where ours loses at other sizes. So each run draws its own points: products of layers forward
and in training (layers.py), functions as our kernels' expressions (formulas.py), and the row-wise ops, with sizes of
models, sizes at random, and odd ones. The seed is printed and stands in each row of sample.csv; the same seed draws the
same points. How a point is measured is said in device_time.py: contenders take turns, results are checked first.

The table at the end lists each point where another contender is more than 3% ahead, with the reason that our choice
gave in the log; each one is a bug with a number. ``--again`` says how many of them chance makes: each contender is
measured a second time in the same turns (``us_again``), and a table says how often two measures of the same code lie
more than 3% apart, and what the means come to by the second measures. The fastest of several contenders is the one
whose first measure was luckiest, too, so that the first measures flatter the others; it is not chosen by the second.

Processes share the points of a run. Each first compiles the JAX programs of its points, for two fifths of the time at
most, since XLA tries kernels on the GPU and takes no turns. Once no process does so any more, points are measured as
soon as their other contenders are compiled: one process measures at a time, no other one benchmarks candidates
meanwhile, and the rest of the processor's cores go on compiling. Beside cuBLAS, torch.compile tries those few of
Triton's products that are as fast as all of them (prewarm.TRITON_PRODUCTS), in a third of the time. A contender that
does not compile in ``--compile-seconds`` is left out of its point, a point that is not ready before ``--seconds`` are
over is left out itself, and rows are written as they come. ``--resume`` goes on with the points that the file lacks.
With several GPUs each has its processes, its points and its turns.

    python benchmarks/sample.py --out out/benchmarks                      # a new seed
    python benchmarks/sample.py --out out/benchmarks --seed 7 --kinds products --points 60 --seconds 150
    python benchmarks/sample.py --out out/benchmarks --seed 7 --kinds products --points 60 --seconds 150 --resume
    python benchmarks/sample.py --seed 7 8 --kinds products                # of two seeds
    python benchmarks/sample.py --seed 7 --again                           # each contender twice
    CUTE_OPS_TUNE=1 python benchmarks/sample.py --behind out/benchmarks/sample.csv --out out/tuned   # what was behind
    python benchmarks/sample.py --seed 7 --list                           # print the points only; needs no GPU
"""

from __future__ import annotations

import argparse
import gc
import heapq
import logging
import math
import multiprocessing
import os
import random
import secrets
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

import contenders
import device_time
import prewarm
import torch
from common import Table, environment, first_line, markdown, read
from formulas import FUNCTIONS
from layers import LAYERS, Product
from problems import (
    TINY,
    Problem,
    convolved,
    grouped,
    normed_heads,
    packed_heads,
    permuted,
    rotated_at,
    rotated_to_fp8,
    smoke,
)
from rich.console import Console
from summary import BEHIND, COMPILED, OURS, XLA
from torch._functorch import config as functorch_config

EAGER, QUACK, LIGER = "torch eager", "quack", "Liger"
COLUMNS = (*device_time.COLUMNS, "us_again", "tflops", "kind", "seed", "reason")
# Hidden sizes, heads and MLPs of models from BERT to Llama 3 70B, DeepSeek, Qwen, Whisper and ViT.
MODEL_SIZES = (
    384, 512, 576, 768, 1024, 1152, 1280, 1536, 1600, 1664, 2048, 2304, 2560, 2880, 3072, 3584, 4096, 4608, 5120, 6144,
    6400, 6656, 7168, 8192, 9216, 10240, 11008, 12288, 13824, 14336, 16384, 18944, 24576, 28672,
)  # fmt: skip
LEAST_WORK, MOST_WORK = 2**28, 2**40  # multiply-adds of a product
MOST_ROWS = 32768
ROW_BYTES = (128 << 20, 640 << 20)  # of a point of rows and of expressions: past the caches, short enough for many
ROW_OPS = (
    "rmsnorm", "add_rmsnorm", "layernorm", "softmax", "log_softmax", "cross_entropy", "sum", "mean", "silu_mul",
    "gelu_mul", "swiglu", "geglu", "silu", "gelu", "quantize_fp8", "rmsnorm_fp8", "silu_mul_fp8", "l2norm",
    "divergence", "soft_cross_entropy", "cross_entropy_metrics", "topk", "route", "permute_tokens", "unpermute_tokens",
    "rope_at", "add_layernorm", "head_rmsnorm", "group_norm_first", "group_norm_last", "scaled_fp8", "rope",
    "rope_packed", "rope_fp8", "head_layernorm", "causal_conv1d", "causal_conv1d_channels_first", "relu2",
    "add_rmsnorm_fp8", "adamw",
)  # fmt: skip
# Experts of mixtures, and how many a token takes; classes to sample from, and of how many; heads.
EXPERTS, CHOSEN = (8, 16, 32, 60, 64, 128, 160, 256, 384, 512), (1, 2, 4, 6, 8)
VOCABULARIES, SAMPLED = (32000, 50257, 128256, 151936, 201088), (1, 20, 50, 100)
HEADS = (1, 8, 12, 32, 40, 64)
LONGEST = 262144  # elements of a drawn row
# Modules that processes share with the one that they are forked from: none of them begins to use the GPU.
SHARED = ("torch", "torch._inductor.compile_fx", "torch._inductor.select_algorithm", "jax", "cute_ops_torch")
# Of a run's seconds: the first of them, in which JAX programs are compiled, and the last, in which nothing new is.
PROGRAMS, MEASURED = 0.4, 0.06
GRACE = 10.0  # seconds that a process may take longer
AGAIN = 5.0  # seconds after which what takes too long is interrupted again: time to clean up
DTYPES = ("bfloat16", "bfloat16", "bfloat16", "float16", "float32")


Rows = Mapping[str, Mapping[str, str]]  # of a point, by contender


class Point(NamedTuple):
    """What is measured: a problem of a kind in a direction, drawn by a seed."""

    kind: str
    problem: Any
    direction: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.problem.op} {self.direction} {self.problem.label}"

    @property
    def key(self) -> tuple[str, ...]:
        """What identifies a point in a file."""
        return str(self.seed), self.kind, *device_time.key(self.problem, self.direction)

    @property
    def kernels(self) -> int:
        """To compile, about, for a contender: of products, one for each and two for its gradients, and two others."""
        if not isinstance(self.problem, Product):
            return 1
        return 2 + LAYERS[self.problem.op].products * (1 if self.direction == "fwd" else 3)


# --- drawing -------------------------------------------------------------------------------------------------------


def draw(seed: int, kinds: Sequence[str], count: int) -> list[Point]:
    """So many points of each kind; a kind's points do not depend on which others are drawn."""
    found = []
    for kind in kinds:
        rng = random.Random(f"{seed} {kind}")
        for _ in range(count):
            problem = DRAWN[kind](rng)
            found.append(Point(kind, problem, rng.choice(problem.directions), seed))
    return found


def draw_product(rng: random.Random) -> Product:
    """Three of four sizes are models'; rows are few, many, and any number between."""
    while True:
        rows = round(2 ** rng.uniform(0, math.log2(MOST_ROWS)))
        m = rng.choice((rows, -(-rows // 64) * 64))
        found = Product(rng.choice(list(LAYERS)), m, draw_size(rng), draw_size(rng), rng.choice(DTYPES[:4]))
        if LEAST_WORK <= found.flops("fwd") // 2 <= MOST_WORK:
            return found


def draw_size(rng: random.Random) -> int:
    """A model's size, a multiple of 8, or any."""
    any_size = round(2 ** rng.uniform(8, 14.5))
    return rng.choice((*(rng.choice(MODEL_SIZES) for _ in range(3)), any_size // 8 * 8, any_size))


def draw_row(rng: random.Random, op: str) -> Problem:
    """An op on rows of any length, of so many rows that it moves between the bounds."""
    dtype = "bfloat16" if op.endswith("_fp8") else rng.choice(DTYPES)
    n = rng.choice((rng.choice(MODEL_SIZES), round(2 ** rng.uniform(6, math.log2(LONGEST)))))
    weight = rng.choice((None, "float32")) if "norm" in op and op != "l2norm" else None
    make = of_rows(rng, op) or partial(Problem, op, n=n, weight=weight, attrs=(("eps", 0.1),) if op == "adamw" else ())
    one, two = (make(rows=rows, dtype=dtype).bytes("fwd") for rows in (1, 2))
    rows = round(2 ** rng.uniform(*map(math.log2, ROW_BYTES)) / (two - one))
    return make(rows=max(rows, 1), dtype=dtype)


def of_rows(rng: random.Random, op: str) -> Callable[..., Problem] | None:
    """The problems of an op whose sizes are more than a row's length, by their rows and dtype; None for other ops."""
    experts, chosen, heads = rng.choice(EXPERTS), rng.choice(CHOSEN), rng.choice(HEADS)
    if op in ("topk", "route"):
        found = partial(Problem, op, n=experts, attrs=(("k", chosen),))
        classes = partial(Problem, op, n=rng.choice(VOCABULARIES), attrs=(("k", rng.choice(SAMPLED)),))
        return found if op == "route" or rng.random() < 0.6 else classes
    if op.endswith("permute_tokens"):
        size = rng.choice([n for n in MODEL_SIZES if n <= 8192])
        return partial(permuted, op, n=size, each=chosen, experts=0 if op.startswith("un") else experts)
    headdim, tokens = rng.choice((64, 96, 128)), rng.choice((1024, 2048, 4096))
    if op.startswith("head_"):
        return partial(normed_heads, op, heads=heads, headdim=rng.choice((64, 96, 128, 256)))
    if op == "rope":
        sizes = (("h", heads), ("d", headdim), ("r", headdim // 2))
        return lambda rows, dtype: Problem(op, rows * tokens, heads * headdim, dtype, lead=(rows, tokens), sizes=sizes)
    if op == "rope_packed":
        of_keys = max(heads // 4, 1)
        return partial(packed_heads, heads=heads + 2 * of_keys, rotated=heads + of_keys, headdim=headdim)
    if op == "rope_fp8":
        return partial(rotated_to_fp8, heads=heads, headdim=headdim)
    if op.startswith("causal_conv1d"):
        channels, width = 8 * rng.randint(64, 1024), rng.choice((3, 4))
        sizes, attrs = (("s", tokens), ("w", width)), (("activation", "silu"),)
        if op.endswith("first"):
            return lambda rows, dtype: convolved(rows, channels, tokens, width, dtype=dtype)
        return lambda rows, dtype: Problem(op, rows * tokens, channels, dtype, lead=(rows,), sizes=sizes, attrs=attrs)
    if op.startswith("group_norm"):
        channels, positions = 32 * rng.choice((4, 8, 10, 16, 20, 40)), rng.choice((8, 16, 32, 64, 128)) ** 2
        return lambda rows, dtype: grouped(op, rows, channels, positions, dtype=dtype)
    if op == "rope_at":
        return partial(rotated_at, heads=heads, headdim=headdim)
    if op == "cross_entropy_metrics" and rng.random() < 0.5:
        return partial(Problem, op, n=rng.choice(VOCABULARIES), attrs=(("label_smoothing", 0.1),))
    return None


DRAWN: Mapping[str, Callable[[random.Random], Any]] = {
    "products": draw_product,
    "expressions": lambda rng: draw_row(rng, rng.choice(list(FUNCTIONS))),
    "rows": lambda rng: draw_row(rng, rng.choice(ROW_OPS)),
}
CONTENDERS = {
    "products": (OURS, EAGER, COMPILED, QUACK, XLA),
    "expressions": (OURS, COMPILED, XLA),
    "rows": (OURS, EAGER, COMPILED, QUACK, LIGER, XLA),
}


def shrunk(point: Point) -> Point:
    """A point of a size that a CPU takes in no time."""
    problem = point.problem
    if getattr(problem, "op", "") in TINY:
        return point._replace(problem=TINY[problem.op])
    if getattr(problem, "sizes", ()):
        return point._replace(problem=smoke([problem.op])[0])
    small = {"m": 5, "n": 24, "k": 40} if isinstance(problem, Product) else {"rows": 6, "n": 33 + problem.n % 2}
    return point._replace(problem=replace(problem, **small))


# --- measuring -----------------------------------------------------------------------------------------------------


class Drawn(Table):
    """A table whose rows say which point of which seed they belong to, and what our choice said of it; those of no
    point have the table's seed.
    """

    def __init__(self, path: Path, seed: int, append: bool = False, of: Mapping[str, str] | None = None) -> None:
        super().__init__(path, COLUMNS, append, of)
        self._seed = seed
        self._point: Point | None = None
        self._said: Sequence[str] = ()

    def begin(self, point: Point, said: Sequence[str]) -> None:
        self._point, self._said = point, said

    def add(self, row: Mapping[str, Any]) -> None:
        found, point = {**row, "seed": self._seed}, self._point
        if point:
            found |= {"seed": point.seed, "kind": point.kind, "reason": "; ".join(self._said)}
            if isinstance(point.problem, Product) and "us" in row:
                found["tflops"] = point.problem.flops(point.direction) / row["us"] / 1e6
        super().add(found)


def missing(points: Iterable[Point], rows: Iterable[Mapping[str, str]]) -> list[Point]:
    """The points that these rows of a file do not have."""
    found = by_point(rows)
    return [p for p in points if p.key not in found]


def behind(rows: Iterable[Mapping[str, str]], kinds: Sequence[str], count: int) -> list[Point]:
    """The points of a file at which another contender was more than 3% ahead, of so many of each kind and seed."""
    late = [key for key, found in by_point(rows).items() if (best := beside_best(found)) and best[1] < 1 - BEHIND]
    seeds = dict.fromkeys(int(key[0]) for key in late)
    return [point for seed in seeds for point in draw(seed, kinds, count) if point.key in late]


def chosen(options: argparse.Namespace) -> list[Point]:
    """What a run is asked for."""
    if options.behind:
        rows = (row for row in read(options.behind) if not options.seed or int(row["seed"]) in options.seed)
        return behind(rows, options.kinds, options.points)
    seeds = options.seed or [secrets.randbelow(10**6)]
    return [point for seed in seeds for point in draw(seed, options.kinds, options.points)]


def by_point(rows: Iterable[Mapping[str, str]]) -> dict[tuple[str, ...], Rows]:
    """The rows of each point of a file, by contender."""
    found: dict[tuple[str, ...], dict[str, Mapping[str, str]]] = {}
    for row in rows:
        if row["kind"]:
            key = row["seed"], row["kind"], *(row[c] for c in device_time.KEY)
            found.setdefault(key, {})[row["contender"]] = row
    return found


def beside_best(found: Rows) -> tuple[str, float] | None:
    """The fastest of a point's other contenders, and ours' speed over it; None where one of the two is missing."""
    times = {name: float(row["us"]) for name, row in found.items() if row["us"]}
    others = {name: us for name, us in times.items() if not name.startswith("ours")}
    if OURS not in times or not others:
        return None
    best = min(others, key=others.__getitem__)
    return best, others[best] / times[OURS]


class Late(BaseException):
    """A contender that takes too long to compile. Compilers catch every Exception, and try something else."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise Late in the main thread after so long, once Python runs again; once more where a callback swallows it."""

    def late(*_: Any) -> None:
        raise Late(f"not ready in {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0 if math.isinf(seconds) else max(seconds, 1e-3), AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Ready(NamedTuple):
    """A point whose contenders are compiled: their names, why others are left out, and what our choice said."""

    point: Point
    names: list[str]
    left_out: dict[str, str]
    said: list[str]


class Bench(device_time.Bench):
    """Also measures products, whose outputs have the dtypes of the inputs. Functions and JAX programs are compiled
    once, before their point is measured.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._reasons = Reasons()
        self._functions: dict[tuple[str, Any], Any] = {}
        self._programs: dict[tuple[Any, str], Any] = {}
        self._failed: dict[tuple[str, Point], str] = {}

    def function(self, name: str, problem: Any) -> Any:
        if (name, problem) not in self._functions:
            self._functions[name, problem] = super().function(name, problem)
        return self._functions[name, problem]

    def program(self, function: Any, problem: Any, direction: str, sets: Any) -> Any:
        import jax_program

        return jax_program.build(function, problem, direction, sets, self._programs.get((problem, direction)))

    def prepare(self, point: Point, names: Iterable[str], seconds: float, end: float) -> Ready:
        """Call each contender once.

        Raises:
            Late: ours is not ready in ``seconds``, or a contender at ``end``.
        """
        made, found = point.problem.buffers(self.device, 0), Ready(point, [], {}, [])
        for name in names:
            self._reasons.said.clear()
            if failed := self.compile(name, point, made, seconds, end):
                found.left_out[name] = failed
            else:
                found.names.append(name)
            if name == OURS:
                found.said[:] = self._reasons.said
        self.release()
        return found

    def prepare_programs(self, point: Point, names: Iterable[str], seconds: float, end: float) -> None:
        """Compile those of the contenders that are JAX programs, for :meth:`prepare` to find, none later than at
        ``end``.
        """
        made = None
        for name in [name for name in names if name in contenders.JAX]:
            left = min(seconds, end - time.time())
            if left > 0 and made is None:
                made = point.problem.buffers(self.device, 0)
            failed = self.compile(name, point, made, left, math.inf) if left > 0 else "no time is left"
            self._failed[name, point] = failed

    def compile(self, name: str, point: Point, made: Any, seconds: float, end: float) -> str:
        """Call a contender once; why it is left out, or nothing."""
        problem, direction = point.problem, point.direction
        if (name, point) in self._failed:
            return self._failed.pop((name, point))
        with self.step(f"compile {name}"):
            try:
                with at_most(min(seconds, end - time.time())):
                    function = self.function(name, problem)
                    if function is None or (name in contenders.JAX and (problem.strided or problem.hot)):
                        return "not available"
                    program = prewarm.once(name, function, problem, direction, made, self.device)
            except (Exception, Late) as failure:  # a contender's failure is a result
                if isinstance(failure, Late) and (name == OURS or time.time() >= end):
                    raise
                return f"failed: {first_line(failure)}"
        if program and direction != "bwd":  # a backward's program holds its forward's results
            self._programs[problem, direction] = replace(program, arguments=None)
        return ""

    def finish(self, ready: Ready) -> None:
        """Measure a point, and write its rows."""
        point = ready.point
        self.table.begin(point, ready.said)
        self.measure(point.problem, point.direction, ready.names)
        self.write(point.problem, point.direction, ready.left_out, {}, {}, 0)
        self._functions = {key: each for key, each in self._functions.items() if key[1] != point.problem}
        self._programs.pop((point.problem, point.direction), None)
        self.release()

    def wrong(self, got: Sequence[torch.Tensor], wanted: list[torch.Tensor], problem: Any, *rest: Any) -> str | None:
        if not isinstance(problem, Product):
            return super().wrong(got, wanted, problem, *rest)
        found = device_time.error(got, wanted)
        return None if found <= 3e-2 else f"wrong: relative error {found:.2g}"

    def release(self) -> None:
        """Give memory back; what is compiled stays."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


class Reasons(logging.Handler):
    """What our choices say of the calls that are being made."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.said: list[str] = []
        logger = logging.getLogger("cute_ops")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if " runs by " in text and text not in self.said:
            self.said.append(text)


# --- the table -----------------------------------------------------------------------------------------------------


Compared = tuple[Rows, str]  # a point's rows, and the best other's name


def report(rows: Iterable[Mapping[str, str]]) -> str:
    """Geometric means of the best other's time over ours by kind and direction, then each point that is behind."""
    compared: dict[tuple[str, str], list[Compared]] = {}
    late, failed = [], []
    for (_, kind, *key), found in by_point(rows).items():
        name = " ".join(part for part in (*key[:2], "x".join(key[2:4]), *key[4:]) if part)
        ours = found.get(OURS)
        if not (ours and ours["us"]):
            failed.append((name, ours["status"] if ours else "not measured"))
            continue
        beside = beside_best(found)
        if beside is None:
            continue
        best, ratio = beside
        compared.setdefault((kind, key[1]), []).append((found, best))
        if ratio < 1 - BEHIND:
            mine, other = (f"{float(found[label]['us']):.1f}" for label in (OURS, best))
            figures = (name, mine, best, other, f"{ratio:.2f}")
            late.append((ratio, (*figures, ours["reason"] or f"{float(ours['of_copy']):.0%} of a copy")))
    means = []
    for group, each in sorted(compared.items()):
        ratios = speeds(each, "us")
        means.append((*group, f"{statistics.geometric_mean(ratios):.3f}", f"{min(ratios):.2f}", str(len(each))))
    parts = [markdown(("kind", "direction", "speed over the best other", "least", "points"), means)]
    parts += repeated(compared)
    if late:
        header = ("behind by more than 3%", "ours, us", "best other", "us", "speed", "why")
        parts.append(markdown(header, [row for _, row in sorted(late)]))
    if failed:
        parts.append(markdown(("not measured with ours", "why"), failed))
    return "\n\n".join(parts)


def speeds(points: Iterable[Compared], column: str) -> list[float]:
    """The best other's time over ours."""
    return [float(found[best][column]) / float(found[OURS][column]) for found, best in points]


def repeated(compared: Mapping[tuple[str, str], Iterable[Compared]]) -> list[str]:
    """A table of the points with second measures: how far those of the same code lie apart, and what they come to."""
    lines = []
    for group, points in sorted(compared.items()):
        twice = [(rows, best) for rows, best in points if all(rows[name].get("us_again") for name in (OURS, best))]
        if not twice:
            continue
        pairs = ((float(r["us"]), float(r["us_again"])) for rows, _ in twice for r in rows.values() if r["us_again"])
        apart = [1 - min(pair) / max(pair) for pair in pairs]
        far = f"{sum(each > BEHIND for each in apart)} of {len(apart)}"
        second = speeds(twice, "us_again")
        late = [ratio < 1 - BEHIND for ratio in second]
        both = sum(a and b < 1 - BEHIND for a, b in zip(late, speeds(twice, "us"), strict=True))
        figures = (f"{statistics.median(apart):.2%}", far, f"{statistics.geometric_mean(second):.3f}")
        lines.append((*group, *figures, str(sum(late)), str(both)))
    header = (
        "measured twice", "direction", "the same code apart, median", "by more than 3%", "speed by the second measures",
        "behind by them", "and by the first",
    )  # fmt: skip
    return [markdown(header, lines)] if lines else []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for sample.csv")
    parser.add_argument("--seed", type=int, nargs="+", help="draws the points; by default a new one")
    parser.add_argument("--kinds", nargs="+", default=list(DRAWN), choices=list(DRAWN))
    parser.add_argument("--points", type=int, default=60, help="of each kind and seed")
    parser.add_argument("--rounds", type=int, default=15, help="the most samples per contender")
    parser.add_argument("--again", action="store_true", help="measure each contender twice: how much of it is noise")
    parser.add_argument("--without", nargs="+", default=[], metavar="CONTENDER", help="who is left out")
    parser.add_argument("--seconds", type=float, default=math.inf, help="measure no further point after this long")
    parser.add_argument("--compile-seconds", type=float, default=60.0, help="the most for a contender of a point")
    parser.add_argument("--workers", type=int, help="processes; 0: this one, by default on a CPU")
    parser.add_argument("--start", default="forkserver", choices=("forkserver", "spawn"), help="how processes start")
    parser.add_argument("--resume", action="store_true", help="go on with what the file lacks of the seed's points")
    parser.add_argument(
        "--behind", type=Path, metavar="CSV", help="only points that are behind in this file, of its seeds"
    )
    parser.add_argument("--list", action="store_true", help="print the points and end")
    parser.add_argument("--cpu-smoke", action="store_true", help="on the CPU: checks this file only")
    options = parser.parse_args(arguments)
    console = Console(width=200, highlight=False)
    begin, points = time.time(), chosen(options)
    if not points:
        parser.error("there is no such point")
    seeds = [*dict.fromkeys(point.seed for point in points)]
    console.print("seed", *seeds)
    if options.list:
        for point in points:
            console.print(f"{point.kind}: {point.name}")
        return 0
    if not options.cpu_smoke and not torch.cuda.is_available():
        parser.error("no GPU here; --list prints the points, --cpu-smoke checks the code paths")
    if options.cpu_smoke:
        points = list(map(shrunk, points))
    if options.workers is None:
        options.workers = 0 if options.cpu_smoke else os.cpu_count() or 1
    prewarm.share_caches()
    context = multiprocessing.get_context(options.start)
    if options.workers and options.start == "forkserver":
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to ask for a GPU else starts the driver, which cannot fork
        context.set_forkserver_preload(list(SHARED))
        forkserver.ensure_running()  # it imports while this process measures what a copy takes
    path = options.out / "sample.csv"
    # In turn, so that a run which is cut short has some of each kind.
    todo = points if options.behind else [p for k in range(options.points) for p in points[k :: options.points]]
    if options.resume and path.exists():
        todo = missing(todo, read(path))
    device = torch.device("cpu" if options.cpu_smoke else "cuda")
    ceiling = statistics.median(device_time.copy_rate(device, 0.01 if options.cpu_smoke else 2.0))
    table = Drawn(path, seeds[0], options.resume)
    table.add({"op": "copy", "contender": "copy", "status": "ok", "gb_s": ceiling, "of_copy": 1.0})
    torch.cuda.empty_cache()
    run(todo, Run(device, path, seeds[0], ceiling, environment(), options, begin + options.seconds), context, console)
    of_seeds = [*map(str, seeds)]
    console.print(report(row for row in read(path) if row["seed"] in of_seeds))
    if left := missing(todo, read(path)):
        again = " ".join(of_seeds)
        console.print(f"{len(left)} of {len(points)} points are not measured; go on with --seed {again} --resume")
    return 0


# --- processes -----------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """What all processes of a run know; ``end`` is when it is to be over."""

    device: torch.device
    path: Path
    seed: int
    ceiling: float
    environment: Mapping[str, str]
    options: argparse.Namespace
    end: float

    @property
    def programs(self) -> float:
        """When no further JAX program is compiled."""
        return self.end - (1 - PROGRAMS) * self.options.seconds if math.isfinite(self.end) else math.inf

    @property
    def compiled(self) -> float:
        """When nothing new is compiled any more."""
        return self.end - MEASURED * self.options.seconds if math.isfinite(self.end) else math.inf

    def turns(self, gpu: int) -> Turns:
        return Turns(*(prewarm.Turns(self.path.with_suffix(f".{part}{gpu}.lock")) for part in ("xla", "gpu")))


class Turns(NamedTuple):
    """Locks of the processes of a GPU: shared by those that compile JAX programs; whose turn it is to measure."""

    programs: prewarm.Turns
    gpu: prewarm.Turns


def run(todo: Sequence[Point], given: Run, context: Any, console: Console) -> None:
    """Compile and measure these points, in several processes; in this one with ``--workers 0``."""
    count = min(given.options.workers, len(todo))
    if not count:
        work(todo, given.turns(0), lambda: None, given)
        return
    gpus = visible_gpus()
    shared, holding = shares(todo, count), context.Semaphore(0)
    started = [
        context.Process(target=in_process, args=(each, i % len(gpus), gpus[i % len(gpus)], holding, given))
        for i, each in enumerate(shared)
    ]
    with ExitStack() as until_all_hold:
        for i in range(len(gpus)):
            until_all_hold.enter_context(given.turns(i).programs(shared=True))
        for process in started:
            process.start()
        # One that is lost, or does not come back from its compiler, must not keep the others' results.
        while any(process.is_alive() for process in started) and time.time() < given.end + GRACE:
            if holding.get_value() + sum(bool(process.exitcode) for process in started) >= count:
                until_all_hold.close()
            time.sleep(0.2)
    for process, each in zip(started, shared, strict=True):
        if process.exitcode:
            console.print(f"a process has ended early, of {len(each)} points: exit code {process.exitcode}")
        process.kill()


def shares(todo: Sequence[Point], count: int) -> list[list[Point]]:
    """Points for each process, of about as many kernels; a share keeps the order of the points."""
    loads = [(0, i) for i in range(count)]
    owner = {}
    for k in sorted(range(len(todo)), key=lambda k: -todo[k].kernels):
        load, i = heapq.heappop(loads)
        owner[k] = i
        heapq.heappush(loads, (load + todo[k].kernels, i))
    return [[todo[k] for k in range(len(todo)) if owner[k] == i] for i in range(count)]


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; one without a name where there is none."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())] or [""]


def in_process(points: Sequence[Point], index: int, gpu: str, holding: Any, given: Run) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before this process uses one
    gc.freeze()  # modules need not be gone through
    turns = given.turns(index)
    prewarm.benchmarks_take_turns(turns.gpu)
    work(points, turns, holding.release, given)


def work(points: Sequence[Point], turns: Turns, holding: Callable[[], None], given: Run) -> None:
    """Compile and measure these points, by turns with other processes.

    Args:
        holding: is called once this process holds the lock of those that compile JAX programs.
    """
    functorch_config.donated_buffer = False  # a compiled backward is called more than once
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10**4
    if given.device.type == "cuda":
        prewarm.few_triton_products()
    options, console = given.options, Console(width=200, highlight=False)
    table = Drawn(given.path, given.seed, True, given.environment)
    bench = Bench(given.device, table, options.rounds, given.ceiling, console, options.again)
    who = {kind: [name for name in names if name not in options.without] for kind, names in CONTENDERS.items()}

    def attempt(step: Callable[[], Any], point: Point) -> Any:
        try:
            return step()
        except (Exception, Late) as failure:  # too little memory for the buffers, or no time
            console.print(f"{point.name}: {first_line(failure)}")
            return None

    limits = options.compile_seconds, given.compiled
    with turns.programs(shared=True):
        holding()
        for point in points:
            each = partial(bench.prepare_programs, point, who[point.kind], options.compile_seconds, given.programs)
            attempt(each, point)
    ready: list[Ready] = []
    measured = 0
    for point in points:
        if time.time() < given.compiled and (
            made := attempt(partial(bench.prepare, point, who[point.kind], *limits), point)
        ):
            ready.append(made)
        last = point is points[-1]
        while ready and (last or turns.programs.free()) and time.time() < given.end:
            with turns.programs() if last else nullcontext(), turns.gpu():
                each = ready.pop(0)
                attempt(partial(bench.finish, each), each.point)
                measured += 1
            if bench.lost():
                console.print("the GPU does not answer this process any more")
                return
    spent = ", ".join(f"{step} {seconds:.1f}" for step, seconds in bench.seconds.most_common())
    console.print(f"{measured} of {len(points)} points measured; seconds: {spent}")


if __name__ == "__main__":
    sys.exit(main())
