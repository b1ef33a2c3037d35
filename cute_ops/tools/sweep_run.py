"""Runs a sweep in several subprocesses, each of which compiles and runs its share; one that dies is replaced."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from importlib import import_module
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from cute_ops import processes, testing
from cute_ops.autotune import dispatch
from cute_ops.calls import lookup
from cute_ops.declaration.binding import bind
from cute_ops.declaration.op import Op
from cute_ops.jit import cache, target
from cute_ops.jit.target import Target
from cute_ops.tools.sweep import SweepCall, memory, trials
from cute_ops.tools.verify import problem_of

# Trials whose kernels compile before they run, and how long that may take.
CHUNK, STEP_SECONDS = 16, 600.0
IDLE_SECONDS = 60.0
# When no trial starts any more, those that run get so long to end.
GRACE_SECONDS = 15.0


class Task(NamedTuple):
    """A share of an op's round, beginning with one of its trials."""

    place: str
    number: int
    seed: int
    fraction: float
    share: int
    shares: int
    start: int = 0


class Progress(NamedTuple):
    """One finished trial; ``problem`` is empty if its outputs are right."""

    trial: str
    problem: str
    kernels: int


def sweep(
    ops: Sequence[Op], runner: str, number: int, seed: int, workers: int, *, fraction: float = 1.0,
    seconds: float = float("inf"),
) -> Iterator[Progress]:  # fmt: skip
    """Run a round of a sweep and yield each trial as it ends.

    Args:
        runner: module of an adapter's runner.
        number, seed, fraction: of the round; see :func:`cute_ops.tools.sweep.trials`.
        workers: processes.
        seconds: no trial starts later; what has not ended after another 15 seconds is given up.

    Raises:
        ValueError: no module holds an op, so no other process can find it.
    """
    places = {op.name: lookup.place(op) for op in ops}
    lost = [name for name, place in places.items() if place is None]
    if lost:
        raise ValueError(f"no module holds the declaration of {', '.join(lost)}")
    # An op is cut into shares, so that no process has a long one at the end.
    shares = max(workers // 4, 1)
    tasks = deque(
        Task(str(place), number, seed, fraction, i, shares) for i in range(shares) for place in places.values()
    )
    ended: SimpleQueue[Progress | None] = SimpleQueue()
    end = time.time() + seconds
    with tempfile.TemporaryDirectory(prefix="cute_ops-sweep-") as folder:
        working = []
        for _, device in zip(range(workers), itertools.cycle(target.device_names() or [""]), strict=False):
            process = processes.Process(
                "cute_ops.tools.sweep_run", runner, CUDA_VISIBLE_DEVICES=device, CUTE_OPS_COMPILE_WORKERS="1",
                CUTE_OPS_CACHE_DIR=tempfile.mkdtemp(dir=folder), CUTE_OPS_TUNE="0",
            )  # fmt: skip
            threading.Thread(target=_work, args=(process, tasks, end, ended), daemon=True).start()
            working.append(process)
        left = workers
        while left:
            try:
                progress = ended.get(timeout=min(max(end + GRACE_SECONDS - time.time(), 0.1), threading.TIMEOUT_MAX))
            except Empty:
                for process in working:
                    process.kill()
                continue
            if progress is None:
                left -= 1
            else:
                yield progress


def _work(process: processes.Process, tasks: deque[Task], end: float, ended: SimpleQueue[Progress | None]) -> None:
    """Let a process run tasks while there are any; after its death the trial that killed it is left out."""
    trying: dict[str, Any] = {}

    def told(step: dict[str, Any]) -> None:
        trying.update(step)
        if "problem" in step:
            ended.put(Progress(step["trial"], step["problem"], step["kernels"]))

    try:
        while tasks and time.time() < end:
            task = tasks.popleft()
            trying.update(index=None, trial=f"{task.place} from its trial {task.start} on")
            try:
                process.ask({"task": task, "end": end}, STEP_SECONDS, told)
            except processes.Ended as error:
                if time.time() > end + GRACE_SECONDS:  # it was given up
                    break
                ended.put(Progress(trying["trial"], f"the process {error}: {error.log[-500:]}", 0))
                if trying["index"] is not None:  # else the process died before its first trial
                    tasks.appendleft(task._replace(start=trying["index"] + 1))
    except IndexError:  # another thread has taken the last task
        pass
    finally:
        process.stop()
        ended.put(None)


def serve(runner: str) -> None:
    """Run shares of a sweep in the subprocess: a step before each trial and one after it.

    See :func:`cute_ops.processes.requests`.
    """
    for request, say in processes.requests(IDLE_SECONDS):
        by = import_module(runner)
        where = target.of_device() if by.device() == "cuda" else target.parse("sm_90a")
        for index, trial, kernels in _prepared(Task(*request["task"]), where, by.device() == "cuda", request["end"]):
            say(step=True, index=index, trial=str(trial))
            problem = _attempt(by, trial)
            say(step=True, index=index, trial=str(trial), problem=problem, kernels=kernels)
            if problem and by.broken():
                os._exit(1)
        say()


def _prepared(task: Task, where: Target, compiles: bool, end: float) -> Iterator[tuple[int, SweepCall, int]]:
    """The trials of a task with their indices, kernels compiled beforehand, and how many were before each."""
    op = lookup.find(task.place)
    every = list(trials(op, where, task.number, task.seed, task.fraction, share=task.share, shares=task.shares))
    for start in range(task.start, len(every), CHUNK):
        chunk, compiled = every[start : start + CHUNK], 0
        if time.time() > end:
            break
        if compiles and op.kernel:  # a program has none of its own
            variants = {}
            for trial in chunk:
                arrays = testing.specs(op, trial.case, trial.dtype)
                planned = dispatch.foresee(
                    bind(op, arrays, trial.case.attrs), memory(op, arrays, trial.base), where, fixed=trial.fixed
                )
                variants[planned.variant.symbol] = planned.variant
            compiled = sum(built.seconds > 0 for built in cache.build_all(variants.values()))
        for i, trial in enumerate(chunk):
            if time.time() > end:
                break
            yield start + i, trial, compiled if i == 0 else 0
    cache.clear()  # of this process alone; what is loaded stays


def _attempt(by: Any, trial: SweepCall) -> str:
    dispatch.limit_static(1 << 30 if trial.fixed else 0)

    def inputs(seed: int) -> testing.Arrays:
        return testing.inputs(trial.op, trial.case, trial.dtype, seed)

    def others() -> Iterator[testing.Arrays]:
        return (inputs(seed) for seed in range(1, 1 + testing.draws(inputs(0))))

    try:
        by.check(trial.op, inputs(0), testing.attributes(trial.op, trial.case), trial.base, others)
    except Exception as error:  # every failure of a kernel is reported in its line
        return problem_of(error)
    return ""
