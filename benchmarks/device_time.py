"""Device time of every contender on a grid of problems, and what part of the copy rate each reaches.

PyTorch contenders: at least 64 calls are captured in one CUDA graph. They take turns on buffer sets that together
exceed three times the L2 cache (four sets at least), and write to as many output buffers, so that neither inputs nor
outputs are found in L2. The graph's replay time, by events, divided by its calls is one sample.

JAX contenders: one jitted program calls once per buffer set, one call after another (an optimization barrier keeps XLA
from merging them), on the same buffers, imported without a copy. CUDA graphs inside XLA close most of the gaps between
launches. The driver's trace says when the first kernel of a run of the program began and when the last one ended; that
span divided by the calls is one sample.

Samples of all contenders of a problem are interleaved; the median counts and the extremes are kept. Every contender's
result is checked first. GB/s counts the least bytes: each input read once, each output written once. The copy rate is
that of a large ``copy_``, by events, outside of a graph (inside, it would use the copy engine).

    python benchmarks/device_time.py --out out/benchmarks [--ops rmsnorm] [--contenders "torch eager" quack] [--quick]
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import contenders
import torch
from common import Table, first_line, read, spread
from problems import BY_NAME, DIRECTIONS, Problem, grid, smoke
from rich.console import Console
from rich.table import Table as View
from torch._functorch import config as functorch_config
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from cute_ops_torch.measure import graph_sampler

KEY = ("op", "direction", "rows", "n", "dtype", "weight", "residual", "layout")
COLUMNS = (
    *KEY, "contender", "status", "us", "us_min", "us_max", "bytes", "gb_s", "of_copy", "sets", "calls",
)  # fmt: skip
CALLS = 64
MAX_SETS = 256
SMALL = 600 << 20  # bytes of a call up to which there is room for eight sets
# A jitted program makes one call per set, at most so many; large enough that its dispatch hides behind the one before.
JAX_MAX_CALLS, PROGRAM_BYTES = 128, 2 << 30
Sampler = Callable[[], float]


class Buffers(NamedTuple):
    """Inputs of one call, and gradients of its outputs."""

    inputs: tuple[torch.Tensor, ...]
    cotangents: tuple[torch.Tensor, ...]


# --- calls ---------------------------------------------------------------------------------------------------------


def as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def torch_calls(
    function: Callable[..., Any], direction: str, sets: Sequence[Buffers], wanted: Sequence[bool]
) -> list[Callable[[], Any]]:
    """One closure per buffer set. A backward call goes through autograd, on a forward call made here.

    Args:
        wanted: per input, whether it has a gradient.
    """
    calls = []
    for inputs, cotangents in sets:
        if direction == "fwd":
            calls.append(lambda inputs=inputs: as_tuple(function(*inputs)))
            continue
        given = tuple(t.detach().requires_grad_(w) for t, w in zip(inputs, wanted, strict=True))
        outputs = as_tuple(function(*given))
        leaves = tuple(t for t in given if t.requires_grad)
        calls.append(
            lambda o=outputs, x=leaves, g=cotangents: torch.autograd.grad(o, x, g, retain_graph=True)
        )  # fmt: skip
    return calls


def jax_call(function: Callable[..., Any], direction: str, wanted: Sequence[bool]) -> Callable[..., Any]:
    """A traceable call: inputs, and for backward cotangents, to a tuple."""
    if direction == "fwd":
        return lambda inputs, cotangents: as_tuple(function(*inputs))
    import jax

    def backward(inputs: Any, cotangents: Any) -> Any:
        of_wanted, some = only(function, inputs, wanted)
        outputs, pull = jax.vjp(of_wanted, *some)
        return pull(cotangents if isinstance(outputs, tuple) else cotangents[0])

    return backward


def only(function: Callable[..., Any], inputs: Sequence[Any], wanted: Sequence[bool]) -> tuple[Any, list[Any]]:
    """A function of those inputs that have a gradient, and these inputs."""

    def of_wanted(*some: Any) -> Any:
        given = iter(some)
        return function(*(next(given) if w else a for a, w in zip(inputs, wanted, strict=True)))

    return of_wanted, [a for a, w in zip(inputs, wanted, strict=True) if w]


# --- sampling ------------------------------------------------------------------------------------------------------


def loop_sampler(calls: Sequence[Callable[[], Any]], count: int) -> Sampler:
    """The same by wall time, for machines without a GPU: a check of this file, not a measurement."""

    def sample() -> float:
        begin = time.perf_counter()
        for i in range(count):
            calls[i % len(calls)]()
        return (time.perf_counter() - begin) * 1e6 / count

    return sample


def jax_sampler(function: Callable[..., Any], problem: Problem, direction: str, sets: Sequence[Buffers]) -> Sampler:
    """Microseconds of a call, by programs that call once per set: a buffer that passes two barriers is copied.

    A backward call takes what the forward call, made here, has saved. A gradient that serves two inputs is returned
    once, since XLA copies what a program returns twice.
    """
    import jax

    count = len(sets)
    arrays = [tuple(tuple(jax.dlpack.from_dlpack(t) for t in part) for part in buffers) for buffers in sets]
    if direction == "fwd":

        def call(inputs: Any, cotangents: Any) -> Any:
            return as_tuple(function(*inputs))

    else:
        made = problem.binding("bwd").outputs
        names = [name for name, w in zip(problem.arrays(), problem.wanted, strict=True) if w]
        wanted = [i for i, name in enumerate(names) if made[f"d{name}"] is not None]

        def pull_of(inputs: Any) -> Any:
            of_wanted, some = only(function, inputs, problem.wanted)
            return jax.vjp(of_wanted, *some)[1]

        pull_back = jax.jit(pull_of)
        arrays = [(pull_back(inputs), cotangents) for inputs, cotangents in arrays]

        def call(pull: Any, cotangents: Any) -> Any:
            gradients = pull(cotangents if len(cotangents) > 1 else cotangents[0])
            return [gradients[i] for i in wanted]

    def program(sets: Any) -> Any:
        outputs: list[Any] = []
        for i in range(count):
            arguments = sets[i]
            if outputs:  # a call waits for the one before it
                arguments, outputs[-1] = jax.lax.optimization_barrier((arguments, outputs[-1]))
            outputs.append(call(*arguments))
        return outputs

    compiled = jax.jit(program).lower(arrays).compile()
    jax.block_until_ready(compiled(arrays))

    def sample() -> float:
        if not torch.cuda.is_available():
            begin = time.perf_counter()
            jax.block_until_ready(compiled(arrays))
            return (time.perf_counter() - begin) * 1e6 / count
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            jax.block_until_ready(compiled(arrays))
        events = [e for e in trace.profiler.kineto_results.events() if e.device_type() == DeviceType.CUDA]
        begin_ns = min(e.start_ns() for e in events)
        return (max(e.start_ns() + e.duration_ns() for e in events) - begin_ns) / 1e3 / count

    return sample


def to_torch(array: Any) -> torch.Tensor:
    """A JAX array without a copy; DLPack between the two has no 8-bit floats."""
    import jax

    if array.dtype.itemsize > 1:
        return torch.from_dlpack(array)
    return torch.from_dlpack(jax.lax.bitcast_convert_type(array, "uint8")).view(getattr(torch, array.dtype.name))


def copy_rate(device: torch.device, gigabytes: float) -> list[float]:
    """GB/s of a large copy, bytes read and bytes written, by events; one figure per sample."""
    elements = int(gigabytes * 2**30) // 4
    pairs = [(torch.randn(elements, device=device), torch.empty(elements, device=device)) for _ in range(2)]
    rates = []
    for i in range(24):
        source, target = pairs[i % 2]
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            seconds = start.elapsed_time(end) * 1e-3
        else:
            begin = time.perf_counter()
            target.copy_(source)
            seconds = time.perf_counter() - begin
        rates.append(8 * elements / seconds / 1e9)
    return rates[4:]


# --- one problem ---------------------------------------------------------------------------------------------------


def expected(problem: Problem, direction: str, buffers: Buffers) -> list[torch.Tensor]:
    """The eager result in float32 on the same values."""
    wide = Buffers(*(tuple(t.float() if t.is_floating_point() else t for t in part) for part in buffers))
    eager = contenders.make("torch eager", problem.op, dict(problem.attrs))
    if eager is None:
        raise RuntimeError("PyTorch's own function is missing")
    return list(torch_calls(eager, direction, [wide], problem.wanted)[0]())


def error(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest error of any output, relative to that output's largest value."""
    if len(got) != len(wanted):
        return math.inf
    return max(
        ((g.float() - w.float()).abs().max() / w.float().abs().max()).item() if g.shape == w.shape else math.inf
        for g, w in zip(got, wanted, strict=True)
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
        names: contenders.
        rounds: samples per contender.
        ceiling: GB/s of a copy.
    """

    def __init__(
        self, device: torch.device, table: Table, names: Sequence[str], rounds: int, ceiling: float, console: Console
    ) -> None:
        self.device, self.table, self.names, self.rounds = device, table, names, rounds
        self.ceiling, self.console = ceiling, console
        self.cuda = device.type == "cuda"
        self.l2 = torch.cuda.get_device_properties(device).L2_cache_size if self.cuda else 0
        # Forward and backward calls of autograd must be captured on the stream that they were made on.
        self.stream = torch.cuda.Stream(device) if self.cuda else None

    def measure(self, problem: Problem, direction: str) -> None:
        """Check and time every contender on one problem."""
        least = problem.bytes(direction)
        count = 1 if problem.hot else self.set_count(least)
        sets = [
            Buffers(tuple(problem.tensors(self.device, i).values()), problem.cotangents(self.device, i))
            for i in range(count)
        ]
        wanted = expected(problem, direction, sets[0])
        status: dict[str, str] = {}
        samplers: dict[str, Sampler] = {}
        calls: dict[str, int] = {}
        for name in self.names:
            try:
                made = self.sampler(name, problem, direction, sets, wanted)
            except Exception as failure:  # a contender's failure is a result
                status[name] = f"failed: {first_line(failure)}"
                self.synchronize()
                continue
            if isinstance(made, str):
                status[name] = made
            else:
                status[name] = "ok"
                samplers[name], calls[name] = made
        del wanted
        samples: dict[str, list[float]] = {name: [] for name in samplers}
        for _ in range(self.rounds):
            for name, sample in samplers.items():
                self.synchronize()
                samples[name].append(sample())
        for name in self.names:
            row: dict[str, Any] = dict(zip(KEY, key(problem, direction), strict=True))
            row |= {"contender": name, "status": status[name], "bytes": least, "sets": len(sets)}
            if name in samples:
                us = spread(samples[name])
                rate = least / us.median / 1e3
                row |= {"us": us.median, "us_min": us.low, "us_max": us.high, "gb_s": rate, "calls": calls[name]}
                row |= {"of_copy": rate / self.ceiling}
            self.table.add(row)
        self.show(problem, direction, status, samples, least)

    def sampler(
        self, name: str, problem: Problem, direction: str, sets: list[Buffers], wanted: list[torch.Tensor]
    ) -> tuple[Sampler, int] | str:
        """A checked contender's sampler and its calls per sample, or why there is none."""
        function = contenders.make(name, problem.op, dict(problem.attrs))
        if function is None:
            return "not available"
        if name in contenders.JAX:
            return self.jax_sampler(function, problem, direction, sets, wanted)
        if contenders.overwrites_inputs(name, problem.op, direction):
            sets = [Buffers(tuple(t.clone() for t in inputs), cotangents) for inputs, cotangents in sets]
        count = len(sets) * math.ceil(CALLS / len(sets))
        with torch.set_grad_enabled(direction == "bwd"):
            if self.stream is None:
                calls = torch_calls(function, direction, sets, problem.wanted)
                wrong = self.wrong(calls[0](), wanted, problem, direction)
                return wrong or (loop_sampler(calls, len(sets)), len(sets))
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                calls = torch_calls(function, direction, sets, problem.wanted)
                wrong = self.wrong(calls[0](), wanted, problem, direction)
                if wrong:
                    return wrong
                for call in calls[:3]:
                    call()
            self.synchronize()
            return graph_sampler(calls, count, self.stream), count

    def jax_sampler(
        self, function: Any, problem: Problem, direction: str, sets: list[Buffers], wanted: list[torch.Tensor]
    ) -> tuple[Sampler, int] | str:
        import jax

        if problem.strided or problem.hot:
            return "not available"  # XLA's buffers are compact; one set would make one call, and time its dispatch
        self.synchronize()  # the arrays are imported without waiting for PyTorch's stream
        call = jax_call(function, direction, problem.wanted)
        first = tuple(tuple(jax.dlpack.from_dlpack(t) for t in part) for part in sets[0])
        got = [to_torch(a) for a in jax.block_until_ready(jax.jit(call)(*first))]
        wrong = self.wrong(got, wanted, problem, direction)
        if wrong:
            return wrong
        del got
        used = sets[:JAX_MAX_CALLS]
        return jax_sampler(function, problem, direction, used), len(used)

    def wrong(
        self, got: Sequence[torch.Tensor], wanted: list[torch.Tensor], problem: Problem, direction: str
    ) -> str | None:
        """What disqualifies a result: other values, or what moves other bytes: other dtypes, views without memory."""
        if direction == "fwd":
            made = problem.binding("fwd").outputs
            arrays = {name: made[name] for name in problem.declaration.shown}
        else:
            arrays = {n: a for n, a in problem.arrays().items() if n in problem.declaration.differentiable}
        dtypes = [a.dtype for a in arrays.values() if a]
        found = error(got, wanted)
        # A whole step of an 8-bit float may lie between two right results.
        limit = 2.0**-3 if "float8_e4m3fn" in dtypes else 1e-4 if problem.dtype == "float32" else 3e-2
        if found > limit:
            return f"wrong: relative error {found:.2g}"
        if [str(g.dtype).removeprefix("torch.") for g in got] != dtypes:
            return f"wrong: outputs are {', '.join(str(g.dtype) for g in got)}"
        if any(g.untyped_storage().nbytes() < g.nbytes for g in got):
            return "a view: nothing is written"  # as PyTorch's gradient of a sum, which its reader then expands
        return None

    def set_count(self, least: int) -> int:
        """Sets that exceed three times L2 together, and that fill a jitted program."""
        if not self.cuda:
            return 4
        fill = min(64, math.ceil(PROGRAM_BYTES / least))
        return min(max(8 if least < SMALL else 4, math.ceil(3 * self.l2 / least), fill), MAX_SETS)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Give memory back before the next problem."""
        gc.collect()
        torch._dynamo.reset()
        if any(name in contenders.JAX for name in self.names):
            import jax

            jax.clear_caches()
        if self.cuda:
            torch.cuda.empty_cache()

    def show(self, problem: Problem, direction: str, status: dict, samples: dict, least: int) -> None:
        view = View("contender", "us", "GB/s", "of copy", "spread", title=f"{problem.op} {direction} {problem.label}")
        for name, state in status.items():
            if name not in samples:
                view.add_row(name, state, "", "", "")
                continue
            us = spread(samples[name])
            rate = least / us.median / 1e3
            width = (us.high - us.low) / us.median
            view.add_row(name, f"{us.median:.2f}", f"{rate:.0f}", f"{rate / self.ceiling:.1%}", f"{width:.1%}")
        self.console.print(view)


# --- all of them ---------------------------------------------------------------------------------------------------


def prepare(problems: Sequence[tuple[Problem, str]], workers: int) -> None:
    """Compile our kernels for all problems, in several processes, into the cache."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for _ in pool.map(prepare_one, problems):
            pass


def prepare_one(task: tuple[Problem, str]) -> None:
    """A kernel that fails to compile fails again, visibly, where it is measured."""
    from cute_ops import cache, target
    from cute_ops.plan import plan

    problem, direction = task
    if problem.strided:
        return  # its layout is known where it runs
    try:
        cache.get(plan(problem.binding(direction), {}, target.of_device()).variant)
    except Exception as failure:
        print(f"{problem.op} {direction} {problem.label}: not prepared: {first_line(failure)}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for device_time.csv")
    parser.add_argument("--append", action="store_true", help="add to an existing file what is not in it yet")
    parser.add_argument("--ops", nargs="+", default=list(BY_NAME), choices=list(BY_NAME))
    parser.add_argument("--directions", nargs="+", default=list(DIRECTIONS), choices=DIRECTIONS)
    parser.add_argument("--contenders", nargs="+", default=list(contenders.ALL), choices=contenders.ALL)
    parser.add_argument("--only", help="only problems whose label holds this, e.g. 32768x4096")
    parser.add_argument("--rounds", type=int, default=9, help="samples per contender")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further problem after this long")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile our kernels in advance")
    parser.add_argument("--quick", action="store_true", help="few shapes, few rounds")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny shapes on the CPU: checks this file only")
    options = parser.parse_args(arguments)

    begin = time.perf_counter()
    console = Console(width=110)
    if not options.cpu_smoke and not torch.cuda.is_available():
        parser.error("no GPU here; --cpu-smoke checks the code paths")
    functorch_config.donated_buffer = False  # a compiled backward is called more than once
    device = torch.device("cpu" if options.cpu_smoke else "cuda")
    chosen = smoke(options.ops) if options.cpu_smoke else grid(options.ops, options.quick)
    chosen = [p for p in chosen if not options.only or options.only in p.label]
    path = options.out / "device_time.csv"
    done = {tuple(row[c] for c in KEY) for row in read(path)} if options.append and path.exists() else set()
    tasks = [(p, d) for p in chosen for d in p.directions if d in options.directions and key(p, d) not in done]
    if not options.cpu_smoke:
        prepare(tasks, options.workers)
        console.print(f"our kernels are compiled after {time.perf_counter() - begin:.0f} s")

    table = Table(path, COLUMNS, options.append)
    rates = copy_rate(device, 0.01 if options.cpu_smoke else 2.0)
    ceiling = statistics.median(rates)
    console.print(f"copy: {ceiling:.0f} GB/s (from {min(rates):.0f} to {max(rates):.0f})")
    table.add({"op": "copy", "contender": "copy", "status": "ok", "gb_s": ceiling, "of_copy": 1.0})
    rounds = 3 if options.quick or options.cpu_smoke else options.rounds
    bench = Bench(device, table, options.contenders, rounds, ceiling, console)
    for i, (problem, direction) in enumerate(tasks):
        if time.perf_counter() - begin > options.seconds:
            console.print(f"out of time: {len(tasks) - i} of {len(tasks)} problems not measured")
            break
        try:
            bench.measure(problem, direction)
        except torch.OutOfMemoryError as failure:
            console.print(f"{problem.op} {direction} {problem.label}: {first_line(failure)}")
        bench.release()
    console.print(f"{time.perf_counter() - begin:.0f} s; wrote {path}")


if __name__ == "__main__":
    main()
