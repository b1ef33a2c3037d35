"""Runs a sweep in many processes: each compiles and runs its share; one that a kernel ends is replaced."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from cute_ops import cache, declarations, target, testing
from cute_ops.binding import bind
from cute_ops.op import Op
from cute_ops.plan import limit_static, plan
from cute_ops.sweep import Trial, memory, trials
from cute_ops.target import Target

# Trials whose kernels compile before they run.
CHUNK = 48
# Of how many numbers the most that a reference loses is known well enough, and in how many draws at most.
SAMPLE, MOST_DRAWS = 1 << 15, 256


class Task(NamedTuple):
    """A share of an op's round, from a trial on."""

    place: str
    number: int
    seed: int
    part: int
    parts: int
    start: int = 0


class Progress(NamedTuple):
    """One trial, just ended; ``problem`` is empty where all is well."""

    trial: str
    problem: str
    kernels: int


class Child(NamedTuple):
    """A process and what it works on."""

    process: SpawnProcess
    pipe: Connection


def sweep(
    ops: Sequence[Op], runner: str, number: int, seed: int, processes: int, seconds: float = float("inf")
) -> Iterator[Progress]:
    """Run a round of a sweep and yield each trial as it ends.

    Args:
        runner: module of an adapter's runner.
        number, seed: of the round; see :func:`cute_ops.sweep.trials`.
        seconds: no trial starts later.

    Raises:
        ValueError: an op that no module holds, so that no other process finds it.
    """
    lost = [op.name for op in ops if declarations.place(op) is None]
    if lost:
        raise ValueError(f"no module holds the declaration of {', '.join(lost)}")
    # Shares of one op are of one size; the ops with most kernels come first, or one process would end last.
    parts = max(processes // 4, 1)
    tasks = [Task(str(declarations.place(op)), number, seed, part, parts) for part in range(parts) for op in ops]
    end, devices = time.monotonic() + seconds, itertools.cycle(_devices())
    with tempfile.TemporaryDirectory(prefix="cute_ops-sweep-") as folder:
        children: dict[Connection, tuple[SpawnProcess, Task]] = {}
        while tasks or children:
            while tasks and len(children) < processes and time.monotonic() < end:
                child = _start(runner, folder, next(devices))
                children[child.pipe] = child.process, tasks[0]
                child.pipe.send(tasks.pop(0))
            if not children:
                return
            yield from _listen(children, tasks, end)


def _listen(children: dict[Connection, tuple[SpawnProcess, Task]], tasks: list[Task], end: float) -> Iterator[Progress]:
    """Yield what processes have to say; give those that are done another task, and replace those that have died."""
    ready = set(wait(list(children), timeout=1.0))
    for pipe in [pipe for pipe in children if pipe in ready]:
        process, task = children[pipe]
        try:
            said = pipe.recv()
        except EOFError:
            said = None
        if isinstance(said, tuple):
            index, trial, problem, kernels = said
            children[pipe] = process, task._replace(start=index + (problem is not None))
            if problem is not None:
                yield Progress(trial, problem, kernels)
        elif said == "done" and tasks and time.monotonic() < end:
            children[pipe] = process, tasks[0]
            pipe.send(tasks.pop(0))
        else:
            del children[pipe]
            process.join(10)
            if said is None:
                yield Progress(f"{task.place} from trial {task.start} on", f"process ended with {process.exitcode}", 0)
                tasks.insert(0, task._replace(start=task.start + 1))
            else:
                pipe.send(None)
    if time.monotonic() > end:
        for process, _ in children.values():
            process.kill()
        children.clear()


def _devices() -> list[str]:
    """The visible GPUs as CUDA_VISIBLE_DEVICES names them; processes take turns on them."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named or [str(index) for index in range(target.device_count())] or [""]


def _start(runner: str, folder: str, device: str) -> Child:
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_serve, args=(theirs, runner, folder, device), daemon=True)
    process.start()
    theirs.close()
    return Child(process, ours)


def _serve(pipe: Connection, runner: str, folder: str, device: str) -> None:
    """A process of a sweep: tasks come, answers go: (index, trial, None, 0) before a trial, (index, trial, problem,
    kernels compiled) after it, "done" after a task.
    """
    os.environ["CUTE_OPS_COMPILE_WORKERS"] = "1"
    os.environ["CUTE_OPS_CACHE_DIR"] = tempfile.mkdtemp(dir=folder)
    os.environ["CUTE_OPS_TUNE"] = "0"
    os.environ["CUDA_VISIBLE_DEVICES"] = device  # before anything asks the driver
    by = import_module(runner)
    where = target.of_device() if by.device() == "cuda" else target.parse("sm_90a")
    while task := pipe.recv():
        for index, trial, compiled in _prepared(task, where, by.device() == "cuda"):
            pipe.send((index, str(trial), None, 0))
            problem = _attempt(by, trial)
            pipe.send((index, str(trial), problem, compiled))
            if problem and by.broken():
                pipe.close()
                os._exit(1)
        pipe.send("done")


def _prepared(task: Task, where: Target, compiles: bool) -> Iterator[tuple[int, Trial, int]]:
    """The trials of a task with their indices, kernels compiled beforehand, and how many were before each."""
    op = declarations.find(task.place)
    every = [t for i, t in enumerate(trials(op, where, task.number, task.seed)) if i // 6 % task.parts == task.part]
    for start in range(task.start, len(every), CHUNK):
        chunk, compiled = every[start : start + CHUNK], 0
        if compiles:
            variants = {}
            for trial in chunk:
                arrays = testing.specs(op, trial.case, trial.dtype)
                planned = plan(
                    bind(op, arrays, trial.case.attrs), memory(op, arrays, trial.base), where, fixed=trial.fixed
                )
                variants[planned.variant.symbol] = planned.variant
            compiled = sum(built.seconds > 0 for built in cache.build_all(variants.values()))
        for i, trial in enumerate(chunk):
            yield start + i, trial, compiled if i == 0 else 0
    cache.clear()  # of this process alone; what is loaded stays


def _attempt(by: Any, trial: Trial) -> str:
    limit_static(1 << 30 if trial.fixed else 0)

    def inputs(seed: int) -> testing.Arrays:
        return testing.inputs(trial.op, trial.case, trial.dtype, seed)

    def others() -> Iterator[testing.Arrays]:
        count = max(a.size for a in inputs(0).values() if a is not None)
        return (inputs(seed) for seed in range(1, 1 + min(MOST_DRAWS, SAMPLE // count)))

    try:
        by.check(trial.op, inputs(0), testing.attributes(trial.op, trial.case), trial.base, others)
    except Exception as error:  # whatever is wrong with a kernel belongs into its line
        return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    return ""
