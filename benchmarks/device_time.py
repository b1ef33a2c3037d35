"""Device time of every contender on a grid of problems, and what part of the copy rate each reaches.

PyTorch contenders: many calls, 64 where they are short, are captured in one CUDA graph. They take turns on buffer sets
that together exceed three times the L2 cache (four sets at least), and write to as many output buffers, so that neither
inputs nor outputs are found in L2. The graph's replay time, by events, divided by its calls is one sample.

JAX contenders: one jitted program calls once per buffer set, one call after another, on the same buffers, imported
without a copy, between two events on XLA's stream (jax_program.py). Their time divided by the calls is one sample.

Samples of a problem's contenders are interleaved, PyTorch's first, then JAX's, until their medians have
settled; the median counts and the extremes are kept. Every contender's result is checked first. GB/s counts the least
bytes: each input read once, each output written once. The copy rate is that of a large ``copy_``, by events, outside of
a graph (inside, it would use the copy engine).

Everything is compiled ahead in several processes (prewarm.py); nothing else runs while this one measures. Rows are
written as they come, the most important problems first: a run that was cut short goes on with ``--resume``.

    python benchmarks/device_time.py --out out/benchmarks [--ops rmsnorm] [--contenders "torch eager" quack] [--quick]
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import contenders
import prewarm
import torch
from common import Table, environment, first_line, parse, read, spread
from formulas import FUNCTIONS
from problems import BY_NAME, DIRECTIONS, Buffers, Problem, by_importance, grid, set_count, smoke
from rich.console import Console
from torch._functorch import config as functorch_config

from cute_ops_torch.tools.measure import CALLS, LONG_US, elapsed, graph_sampler

KEY = ("op", "direction", "rows", "n", "dtype", "weight", "residual", "layout")
COLUMNS = (
    *KEY, "contender", "status", "us", "us_min", "us_max", "bytes", "gb_s", "of_copy", "sets", "calls",
)  # fmt: skip
LEAST_ROUNDS, JAX_ROUNDS = 9, 9
AGAIN = ", again"  # ends the name of a contender that is measured a second time
SETTLED = 0.002  # of a median: its standard error, by quartiles, at which no more samples are taken
# Samples with a median so far above their least are taken again, after some seconds: another process used the GPU.
DISTURBED, ATTEMPTS, PAUSE = 1.08, 3, 1.0
Sampler = Callable[[], float]


class Lost(Exception):
    """A contender left the CUDA context unusable: only a new process can go on."""


# --- sampling ------------------------------------------------------------------------------------------------------


def loop_sampler(calls: Sequence[Callable[[], Any]], count: int) -> Sampler:
    """The same by wall time, for machines without a GPU: a check of this file, not a measurement."""

    def sample() -> float:
        begin = time.perf_counter()
        for i in range(count):
            calls[i % len(calls)]()
        return (time.perf_counter() - begin) * 1e6 / count

    return sample


def settled(samples: Sequence[float]) -> bool:
    """Whether more samples would hardly move the median."""
    if len(samples) < LEAST_ROUNDS:
        return False
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / middle / math.sqrt(len(samples)) < SETTLED


def disturbed(samples: Sequence[float]) -> bool:
    """Whether something else ran beside most of them."""
    return statistics.median(samples) > DISTURBED * min(samples)


def copy_rate(device: torch.device, gigabytes: float) -> list[float]:
    """GB/s of a large copy, bytes read and bytes written, by events; one figure per sample."""
    elements = int(gigabytes * 2**30) // 4
    pairs = [(torch.randn(elements, device=device), torch.empty(elements, device=device)) for _ in range(2)]
    rates = []
    for i in range(24):
        source, target = pairs[i % 2]
        copy = partial(target.copy_, source)
        us = elapsed(copy) if device.type == "cuda" else loop_sampler([copy], 1)()
        rates.append(8 * elements / us / 1e3)
    return rates[4:]


# --- one problem ---------------------------------------------------------------------------------------------------


def expected(problem: Problem, direction: str, buffers: Buffers) -> list[torch.Tensor]:
    """The eager result in float32 on the same values."""
    copy = contenders.overwrites_inputs("torch eager", problem.op, direction)
    widen = lambda t: t.to(torch.float32, copy=copy) if t.is_floating_point() else t  # noqa: E731
    wide = Buffers(*(tuple(map(widen, part)) for part in buffers))
    eager = contenders.make("torch eager", problem.op, dict(problem.attrs))
    if eager is None:
        raise RuntimeError("PyTorch's own function is missing")
    return list(contenders.torch_calls(eager, direction, [wide], problem.wanted)[0]())


def error(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest error of any output, relative to that output's largest value. Of columns and experts only the number
    counts: of equal numbers any may be found.
    """
    if len(got) != len(wanted) or any(g.shape != w.shape for g, w in zip(got, wanted, strict=True)):
        return math.inf
    return max(
        ((g.float() - w.float()).abs().max() / w.float().abs().max()).item()
        for g, w in zip(got, wanted, strict=True)
        if w.is_floating_point()
    )


def key(problem: Problem, direction: str) -> tuple[str, ...]:
    """What identifies a problem in the file."""
    p = problem
    return (
        p.op, direction, str(p.rows), str(p.n), p.dtype, p.weight or p.dtype, p.residual or p.dtype, p.layout,
    )  # fmt: skip


class Bench:
    """Measures problems and writes their rows.

    Args:
        device: where to run.
        table: where rows go.
        rounds: the most samples per contender.
        ceiling: GB/s of a copy.
        again: measure each contender twice in the same turns, with graphs and outputs of their own.
    """

    def __init__(
        self, device: torch.device, table: Table, rounds: int, ceiling: float, console: Console, again: bool = False
    ) -> None:
        self.device, self.table, self.rounds = device, table, rounds
        self.ceiling, self.console, self.again = ceiling, console, again
        self.cuda = device.type == "cuda"
        # Forward and backward calls of autograd must be captured on the stream that they were made on.
        self.stream = torch.cuda.Stream(device) if self.cuda else None
        self.seconds = Counter[str]()

    def measure(self, problem: Problem, direction: str, names: Sequence[str]) -> None:
        """Check and time these contenders on one problem.

        Raises:
            Lost: with the row of the contender that failed written.
        """
        with self.step("buffers"):
            sets = [problem.buffers(self.device, i) for i in range(set_count(problem, direction, self.device))]
            wanted = expected(problem, direction, sets[0])
            self.synchronize()
        status: dict[str, str] = {}
        samplers: dict[str, tuple[Sampler, int]] = {}
        programs: dict[str, Any] = {}
        for name in (*names, *(name + AGAIN for name in names if self.again)):
            contender = name.removesuffix(AGAIN)
            with self.step(contender):
                try:
                    made = self.ready(contender, problem, direction, sets, wanted)
                    self.synchronize()
                except Exception as failure:  # a contender's failure is a result
                    status[name] = f"failed: {first_line(failure)}"
                    if self.lost():
                        self.write(problem, direction, {contender: status[name]}, {}, {}, len(sets))
                        raise Lost(f"{contender} left the GPU unusable") from failure
                    continue
            status[name] = made if isinstance(made, str) else "ok"
            if isinstance(made, tuple):
                samplers[name] = made
            elif not isinstance(made, str):
                programs[name] = made
        del wanted
        with self.step("samples"):
            samples = self.interleaved(samplers)
        with self.step("JAX samples"):
            try:
                samples |= zip(programs, self.sampled(list(programs.values())), strict=True)
            except RuntimeError as failure:
                status |= dict.fromkeys(programs, f"failed: {first_line(failure)}")
        calls = {name: count for name, (_, count) in samplers.items()}
        calls |= {name: program.calls for name, program in programs.items()}
        self.write(problem, direction, status, samples, calls, len(sets))

    def interleaved(self, samplers: dict[str, tuple[Sampler, int]]) -> dict[str, list[float]]:
        """Samples of PyTorch's contenders until their medians have settled."""
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(PAUSE)
            samples: dict[str, list[float]] = {name: [] for name in samplers}
            for _ in range(-(-self.rounds // 2)):
                # There and back: a contender that keeps the GPU cool leaves a higher clock to the next one.
                for name in (*samplers, *reversed(samplers)):
                    self.synchronize()
                    samples[name].append(samplers[name][0]())
                if all(map(settled, samples.values())):
                    break
            if not (self.cuda and any(map(disturbed, samples.values()))):
                break
        return samples

    def ready(
        self, name: str, problem: Problem, direction: str, sets: list[Buffers], wanted: list[torch.Tensor]
    ) -> tuple[Sampler, int] | Any:
        """A checked contender: its sampler and its calls per sample, its JAX program, or why there is none."""
        function = self.function(name, problem)
        if function is None:
            return "not available"
        if name in contenders.JAX:
            return self.ready_program(function, problem, direction, sets, wanted)
        if contenders.overwrites_inputs(name, problem.op, direction):
            sets = [Buffers(*(tuple(t.clone() for t in part) for part in buffers)) for buffers in sets]
        with torch.set_grad_enabled(direction != "fwd"):
            if self.stream is None:
                calls = contenders.torch_calls(function, direction, sets, problem.wanted)
                wrong = self.wrong(calls[0](), wanted, problem, direction)
                return wrong or (loop_sampler(calls, len(sets)), len(sets))
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                calls = contenders.torch_calls(function, direction, sets, problem.wanted)
                wrong = self.wrong(calls[0](), wanted, problem, direction)
                if wrong:
                    return wrong
                once = self.once(calls[:3])
            # A graph of fewer calls will do where they take long.
            rounds = math.ceil(min(CALLS, max(LONG_US / once, 1)) / len(sets))
            self.synchronize()
            return graph_sampler(calls, rounds * len(sets), self.stream), rounds * len(sets)

    def function(self, name: str, problem: Problem) -> Callable[..., Any] | None:
        """A contender's function."""
        return contenders.make(name, problem.op, dict(problem.attrs))

    def once(self, calls: Sequence[Callable[[], Any]]) -> float:
        """Microseconds of a call, about."""
        times = []
        for call in calls:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return min(times)

    def ready_program(
        self, function: Any, problem: Problem, direction: str, sets: list[Buffers], wanted: list[torch.Tensor]
    ) -> Any:
        if problem.strided or problem.hot:
            return "not available"  # XLA's buffers are compact; one set would make one call, and time its dispatch
        import jax_program

        self.synchronize()  # the arrays are imported without waiting for PyTorch's stream
        program = self.program(function, problem, direction, sets)
        got = [jax_program.to_torch(a) for a in program.run()[0][: len(program.returned)]]
        wrong = self.wrong(got, [wanted[i] for i in program.returned], problem, direction, program.returned)
        if wrong:
            return wrong
        program.run()  # the first run made no graph yet
        return program

    def program(self, function: Any, problem: Problem, direction: str, sets: list[Buffers]) -> Any:
        """A contender's JAX program."""
        import jax_program

        return jax_program.build(function, problem, direction, sets)

    def sampled(self, programs: Sequence[Any]) -> list[list[float]]:
        if not programs:
            return []
        if self.cuda:
            import jax_program

            return jax_program.sample(programs, JAX_ROUNDS)
        samplers = [loop_sampler([program.run], program.calls) for program in programs]
        return [[sample() for _ in range(LEAST_ROUNDS)] for sample in samplers]

    def wrong(
        self,
        got: Sequence[torch.Tensor],
        wanted: list[torch.Tensor],
        problem: Problem,
        direction: str,
        returned: Sequence[int] | None = None,
    ) -> str | None:
        """What disqualifies a result: other values, or what moves other bytes: other dtypes, views without memory."""
        if direction == "fwd":
            made, op = problem.binding("fwd").results, problem.declaration
            arrays = [made[name] for name in (*op.mutates, *op.shown)]
        else:
            arrays = [a for n, a in problem.arrays().items() if n in problem.declaration.differentiable]
        dtypes = [a.dtype for a in ([arrays[i] for i in returned] if returned else arrays) if a]
        found = error(got, wanted)
        # A whole step of an 8-bit float may lie between two right results.
        limit = 2.0**-3 if "float8_e4m3fn" in dtypes else 1e-4 if problem.dtype == "float32" else 3e-2
        if not found <= limit:
            return f"wrong: relative error {found:.2g}"
        if [str(g.dtype).removeprefix("torch.") for g in got] != dtypes:
            return f"wrong: outputs are {', '.join(str(g.dtype) for g in got)}"
        if any(g.untyped_storage().nbytes() < g.nbytes for g in got):
            return "a view: nothing is written"  # as PyTorch's gradient of a sum, which its reader then expands
        return None

    def write(
        self, problem: Problem, direction: str, status: dict, samples: dict, calls: dict[str, int], sets: int
    ) -> None:
        """A row per contender, and a line for who watches."""
        least = problem.bytes(direction)
        figures = []
        for name, state in status.items():
            if name.endswith(AGAIN):
                continue
            row: dict[str, Any] = dict(zip(KEY, key(problem, direction), strict=True))
            row |= {"contender": name, "status": state, "bytes": least, "sets": sets}
            if name in samples:
                us = spread(samples[name])
                rate = least / us.median / 1e3
                row |= {"us": us.median, "us_min": us.low, "us_max": us.high, "gb_s": rate, "calls": calls[name]}
                row |= {"of_copy": rate / self.ceiling}
                row |= {"us_again": spread(samples[name + AGAIN]).median} if name + AGAIN in samples else {}
                figures.append(f"{name} {us.median:.2f} ({rate / self.ceiling:.0%})")
            elif state != "not available":
                figures.append(f"{name} {state}")
            self.table.add(row)
        if figures:
            self.console.print(f"{problem.op} {direction} {problem.label}: {', '.join(figures)}")

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def lost(self) -> bool:
        try:
            self.synchronize()
        except Exception:  # whatever it is, nothing works any more
            return True
        return False

    def release(self) -> None:
        """Give memory back before the next problem."""
        with self.step("release"):
            prewarm.forget()
            if self.cuda:
                torch.cuda.empty_cache()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Where the time goes."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - begin


# --- all of them ---------------------------------------------------------------------------------------------------


def compile_ahead(
    tasks: Sequence[tuple[Problem, str]], names: Sequence[str], workers: int, seconds: float, console: Console
) -> None:
    begin = time.perf_counter()
    spent, count = Counter[str](), Counter[str]()
    for done in prewarm.run(tasks, names, workers, seconds):
        spent[done.contender] += done.seconds
        count[done.contender] += 1
        if done.problem:
            problem, direction = tasks[done.task]
            console.print(f"{problem.op} {direction} {problem.label}: {done.contender}: {done.problem}")
    each = ", ".join(f"{name} {spent[name]:.0f} s for {count[name]}" for name in spent)
    console.print(f"compiled ahead in {time.perf_counter() - begin:.0f} s; seconds of all processes: {each}")


def begun(path: Path) -> Counter[str]:
    """How often each problem was begun, by earlier runs too: one that ends the process must not do so for ever."""
    return Counter(path.read_text().splitlines()) if path.exists() else Counter()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for device_time.csv")
    parser.add_argument("--resume", action="store_true", help="add to the file what it lacks of this commit")
    own = [name for name in BY_NAME if name not in FUNCTIONS]  # the others are those of expressions.py
    parser.add_argument("--ops", nargs="+", default=own, choices=list(BY_NAME))
    parser.add_argument("--directions", nargs="+", default=list(DIRECTIONS), choices=DIRECTIONS)
    parser.add_argument("--contenders", nargs="+", default=list(contenders.ALL), choices=contenders.ALL)
    parser.add_argument("--only", help="only problems whose label holds this, e.g. 32768x4096")
    parser.add_argument("--first", type=int, help="only so many problems, the most important ones")
    parser.add_argument("--rounds", type=int, default=25, help="the most samples per contender")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further problem after this long")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that compile; 0: none")
    parser.add_argument("--compile-seconds", type=float, default=math.inf, help="compile ahead no longer than this")
    parser.add_argument("--compile-only", action="store_true", help="compile ahead and end")
    parser.add_argument("--quick", action="store_true", help="few shapes, few rounds")
    options = parse(parser, arguments, torch.cuda.is_available())

    begin = time.perf_counter()
    console = Console(width=200, highlight=False)
    prewarm.share_caches()
    functorch_config.donated_buffer = False  # a compiled backward is called more than once
    device = torch.device("cpu" if options.cpu_smoke else "cuda")
    chosen = smoke(options.ops) if options.cpu_smoke else by_importance(grid(options.ops, options.quick))
    tasks = [
        (p, d)
        for p in [p for p in chosen if not options.only or options.only in p.label][: options.first]
        for d in p.directions
        if d in options.directions
    ]
    path, starts = options.out / "device_time.csv", options.out / "device_time.begun"
    rows = read(path) if options.resume and path.exists() else []
    rows = [row for row in rows if row["commit"] == environment()["commit"]]
    done = {(*(row[c] for c in KEY), row["contender"]) for row in rows}
    missing = {task: [n for n in options.contenders if (*key(*task), n) not in done] for task in tasks}
    earlier = begun(starts) if options.resume else Counter[str]()
    left = sorted((item for item in missing.items() if item[1]), key=lambda item: earlier["/".join(key(*item[0]))])
    if options.compile_only or (options.workers and not options.cpu_smoke):
        names = [name for name in options.contenders if any(name in names for _, names in left)]
        compile_ahead([task for task, _ in left], names, options.workers, options.compile_seconds, console)
    if options.compile_only:
        return 0

    table = Table(path, COLUMNS, options.resume)
    if not options.resume:
        starts.unlink(missing_ok=True)
    rates = copy_rate(device, 0.01 if options.cpu_smoke else 2.0)
    ceiling = statistics.median(rates)
    console.print(f"copy: {ceiling:.0f} GB/s (from {min(rates):.0f} to {max(rates):.0f})")
    if not any(row["op"] == "copy" for row in rows):
        table.add({"op": "copy", "contender": "copy", "status": "ok", "gb_s": ceiling, "of_copy": 1.0})
    rounds = LEAST_ROUNDS if options.quick or options.cpu_smoke else options.rounds
    bench = Bench(device, table, rounds, ceiling, console)
    ends = 0
    for i, ((problem, direction), names) in enumerate(left):
        if time.perf_counter() - begin > options.seconds:
            console.print(f"out of time: {len(left) - i} of {len(left)} problems not measured")
            break
        with starts.open("a") as file:
            file.write("/".join(key(problem, direction)) + "\n")
        try:
            bench.measure(problem, direction, names)
        except Exception as failure:  # as too little memory for the buffers: the other problems are still there
            console.print(f"{problem.op} {direction} {problem.label}: {first_line(failure)}")
            if isinstance(failure, Lost) or bench.lost():
                console.print("the GPU does not answer this process any more; go on with --resume")
                ends = 3
                break
        bench.release()
    steps = ", ".join(f"{name} {seconds:.1f}" for name, seconds in bench.seconds.most_common())
    console.print(f"{time.perf_counter() - begin:.0f} s ({steps}); wrote {path}")
    return ends


if __name__ == "__main__":
    sys.exit(main())
