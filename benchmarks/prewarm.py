"""Compile ahead, in several processes, what device_time.py will call, into the caches that they share.

Every process takes the next problem, makes one set of buffers and calls each contender once: Inductor's, Triton's,
quack's and our own kernels come to lie in the caches on disk, JAX programs in JAX's compilation cache. Nothing is timed
here but what Inductor times to choose among its candidates, and those benchmarks take turns over all processes.
"""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import queue
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import contenders
import torch
from common import first_line
from problems import Buffers, Problem, set_count

Task = tuple[Problem, str]
RESTARTS = 4  # of processes that a contender took down
# Rows, columns and terms of a tile, stages and warps of Triton's products: those for up to so many rows, and for more,
# with which 84 of Inductor's choices at drawn sizes take 0.2% longer in the mean than with all of its 20 (H200).
FEW_ROWS = 64
TRITON_PRODUCTS = {
    True: ((32, 64, 128, 5, 4), (64, 64, 64, 3, 8), (64, 64, 128, 5, 4), (64, 32, 128, 5, 4), (64, 128, 128, 4, 4)),
    False: ((128, 128, 64, 3, 4), (128, 128, 32, 3, 4), (64, 128, 32, 4, 8), (128, 128, 64, 5, 8), (64, 32, 128, 5, 4)),
}  # fmt: skip
FIELDS = "BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages", "num_warps"


class Done(NamedTuple):
    """What a process reports: a contender of a task, its seconds and what went wrong."""

    task: int
    contender: str
    seconds: float
    problem: str


def share_caches() -> None:
    """Before JAX or Inductor are imported. Those of quack, Inductor and ours are in the user's folders anyway."""
    from platformdirs import user_cache_dir

    try:
        folder = user_cache_dir("cute_ops_benchmarks")
    except RuntimeError:  # without a home each process compiles for itself; older versions return a relative path
        return
    if not os.path.isabs(folder):  # noqa: PTH117
        return
    os.environ.setdefault("TRITON_CACHE_DIR", f"{folder}/triton")  # else Inductor moves it once it is imported
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/jax")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    # Processes are many already, and the measuring one finds all that it needs.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def run(tasks: Sequence[Task], names: Sequence[str], workers: int, seconds: float) -> Iterator[Done]:
    """Go through the tasks, in their order, for so many seconds at most."""
    end = time.perf_counter() + seconds
    context = multiprocessing.get_context("spawn")
    todo, done = context.SimpleQueue(), context.Queue()
    for task in enumerate(tasks):
        todo.put(task)
    for _ in range(workers + RESTARTS):
        todo.put(None)
    started = [start(context, todo, done, names) for _ in range(min(workers, len(tasks)))]
    restarts = RESTARTS
    while time.perf_counter() < end and any(process.is_alive() for process in started):
        try:
            yield done.get(timeout=0.2)
        except queue.Empty:
            died = [process for process in started if process.exitcode]
            for process in died[:restarts]:
                restarts -= 1
                started[started.index(process)] = start(context, todo, done, names)
    while True:  # before they are ended: one that ends while it writes leaves half a message
        try:
            yield done.get(timeout=0.1)
        except queue.Empty:
            break
    for process in started:
        process.terminate()


def start(context: Any, todo: Any, done: Any, names: Sequence[str]) -> Any:
    process = context.Process(target=work, args=(todo, done, tuple(names)))
    process.start()
    return process


def work(todo: Any, done: Any, names: Sequence[str]) -> None:
    """One process: tasks until there is none."""
    from torch._functorch import config as functorch_config

    functorch_config.donated_buffer = False  # as where it is measured
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and "torch.compile" in names:
        benchmarks_take_turns()
    while (item := todo.get()) is not None:
        index, (problem, direction) = item
        prepare(problem, direction, device, names, lambda *report, index=index: done.put(Done(index, *report)))
        forget()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def prepare(
    problem: Problem, direction: str, device: torch.device, names: Sequence[str], report: Callable[..., None]
) -> None:
    """Call every contender once. One that fails fails again, visibly, where it is measured."""
    made = problem.buffers(device, 0)
    for name in names:
        begin = time.perf_counter()
        failed = ""
        try:
            function = contenders.make(name, problem.op, dict(problem.attrs))
            if function is None or (name in contenders.JAX and (problem.strided or problem.hot)):
                continue
            once(name, function, problem, direction, made, device)
        except Exception as failure:
            failed = first_line(failure)
        report(name, time.perf_counter() - begin, failed)
        if device.type == "cuda":
            torch.cuda.synchronize()  # where the context is lost this raises, and ends the process


def once(
    name: str, function: Callable[..., Any], problem: Problem, direction: str, made: Buffers, device: torch.device
) -> Any:
    """Compile a contender: its JAX program, which is returned, or PyTorch's functions, which are called."""
    if name in contenders.JAX:
        import jax_program

        if device.type == "cuda":
            torch.cuda.synchronize()
        return jax_program.build(function, problem, direction, [made] * set_count(problem, direction, device))
    if contenders.overwrites_inputs(name, problem.op, direction):
        made = Buffers(tuple(t.clone() for t in made.inputs), made.cotangents)
    with torch.set_grad_enabled(direction != "fwd"):
        contenders.torch_calls(function, direction, [made], problem.wanted)[0]()
    return None


def forget() -> None:
    """Drop what a problem leaves behind."""
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()  # what is left are modules: the next time they need not be gone through


class Turns:
    """A lock of all processes on a file, which a process may take again while it holds it. Its end releases it, too."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self._depth = 0

    @contextmanager
    def __call__(self, shared: bool = False) -> Iterator[None]:
        """Hold it, alone or with others that share it."""
        if not self._depth:
            fcntl.flock(self._file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def free(self) -> bool:
        """Whether no process holds it; not for one that does, which would lose it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return True


def few_triton_products() -> None:
    """Let Inductor compile few of Triton's products beside cuBLAS and its other forms: :data:`TRITON_PRODUCTS`, and the
    same for fewer rows.
    """
    from torch._inductor.select_algorithm import add_preprocessing_fn

    def likely(choice: Any) -> bool:
        found = dict(re.findall(r"(\w+)=(\d+)", choice.description))
        if not found.keys() >= set(FIELDS):
            return True
        rows, *others = (int(found[name]) for name in FIELDS)
        kind = int(choice.layout.size[-2]) <= FEW_ROWS
        return any(others == sizes and rows <= most for most, *sizes in TRITON_PRODUCTS[kind])

    add_preprocessing_fn(lambda choices: list(filter(likely, choices)))


def benchmarks_take_turns(turn: Turns | None = None) -> None:
    """Inductor's benchmarks of its candidates, one at a time over all processes.

    Each takes the least of up to 25 calls in 10 ms, instead of 100 in 25: the least of five calls of 2 ms is within 1%.
    """
    from torch._inductor.runtime import benchmarking
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    turn = turn or Turns(Path(cache_dir()) / "benchmarks.lock")

    def locked(method: Callable[..., Any], **shorter: int) -> Callable[..., Any]:
        @wraps(method)
        def inner(*args: Any, **kwargs: Any) -> Any:
            with turn():
                return method(*args, **(shorter | kwargs))

        return inner

    triton, inductor = benchmarking.TritonBenchmarker, benchmarking.InductorBenchmarker
    triton.benchmark_gpu = locked(triton.benchmark_gpu)
    shorter = {"estimation_iters": 2, "memory_warmup_iters": 20, "benchmark_iters": 25, "max_benchmark_duration": 10}
    inductor.benchmark_gpu = locked(inductor.benchmark_gpu, **shorter)
