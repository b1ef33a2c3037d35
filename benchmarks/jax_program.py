"""A contender's JAX program: one call per buffer set, one after another. Made for prewarm.py and device_time.py.

CUDA graphs inside XLA close most of the gaps between launches. An optimization barrier keeps XLA from merging calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from contenders import as_tuple
from problems import Buffers, Problem
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

MAX_CALLS = 128
MARK_CYCLES = 20_000  # of a kernel that does nothing but wait, between the runs of a trace
MARK = "spin_kernel"


@dataclass(frozen=True)
class Program:
    """A compiled program and its arguments.

    Attributes:
        compiled: returns one tuple of outputs per call.
        arguments: what it is called with.
        calls: how many calls one run makes.
        returned: which of the contender's outputs a call returns.
    """

    compiled: Callable[..., Any]
    arguments: Any
    calls: int
    returned: list[int]

    def run(self) -> Any:
        import jax

        return jax.block_until_ready(self.compiled(self.arguments))


def build(function: Callable[..., Any], problem: Problem, direction: str, sets: Sequence[Buffers]) -> Program:
    """Compile. A backward call takes what the forward call, made here, has saved. A gradient that serves two inputs is
    returned once, since XLA copies what a program returns twice. A buffer that passes two barriers would be copied:
    hence one call per set.
    """
    import jax

    sets = sets[:MAX_CALLS]
    # A set that is given several times is imported once.
    imported = {id(s): tuple(tuple(jax.dlpack.from_dlpack(t) for t in part) for part in s) for s in sets}
    if direction == "fwd":
        returned = list(range(len(problem.declaration.shown)))

        def call(inputs: Any, cotangents: Any) -> Any:
            return as_tuple(function(*inputs))

    else:
        made = problem.binding("bwd").outputs
        names = [name for name, w in zip(problem.arrays(), problem.wanted, strict=True) if w]
        returned = [i for i, name in enumerate(names) if made[f"d{name}"] is not None]

        def pull_of(inputs: Any) -> Any:
            of_wanted, some = only(function, inputs, problem.wanted)
            return jax.vjp(of_wanted, *some)[1]

        pull_back = jax.jit(pull_of)
        imported = {k: (pull_back(inputs), cotangents) for k, (inputs, cotangents) in imported.items()}

        def call(pull: Any, cotangents: Any) -> Any:
            gradients = pull(cotangents if len(cotangents) > 1 else cotangents[0])
            return [gradients[i] for i in returned]

    def program(sets: Any) -> Any:
        outputs: list[Any] = []
        for arguments in sets:
            if outputs:  # a call waits for the one before it
                arguments, outputs[-1] = jax.lax.optimization_barrier((arguments, outputs[-1]))
            outputs.append(call(*arguments))
        return outputs

    arguments = [imported[id(s)] for s in sets]
    return Program(jax.jit(program).lower(arguments).compile(), arguments, len(sets), returned)


def sample(programs: Sequence[Program], rounds: int) -> list[list[float]]:
    """Microseconds per call of every program, in turns, from the first kernel of a run to the end of its last one."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        for _ in range(rounds):
            for program in programs:
                torch.cuda._sleep(MARK_CYCLES)
                torch.cuda.synchronize()
                program.run()
    events = [e for e in trace.profiler.kineto_results.events() if e.device_type() == DeviceType.CUDA]
    runs: list[list[Any]] = []
    for event in sorted(events, key=lambda e: e.start_ns()):
        if MARK in event.name():
            runs.append([])
        elif runs:
            runs[-1].append(event)
    if len(runs) != rounds * len(programs) or not all(runs):
        raise RuntimeError(f"the trace holds {len(runs)} runs, not {rounds * len(programs)}")
    spans = [max(e.start_ns() + e.duration_ns() for e in run) - run[0].start_ns() for run in runs]
    return [
        [ns / 1e3 / program.calls for ns in spans[i :: len(programs)]] for i, program in enumerate(programs)
    ]  # fmt: skip


def only(function: Callable[..., Any], inputs: Sequence[Any], wanted: Sequence[bool]) -> tuple[Any, list[Any]]:
    """A function of those inputs that have a gradient, and these inputs."""

    def of_wanted(*some: Any) -> Any:
        given = iter(some)
        return function(*(next(given) if w else a for a, w in zip(inputs, wanted, strict=True)))

    return of_wanted, [a for a, w in zip(inputs, wanted, strict=True) if w]


def to_torch(array: Any) -> torch.Tensor:
    """A JAX array without a copy; DLPack between the two has no 8-bit floats."""
    import jax

    if array.dtype.itemsize > 1:
        return torch.from_dlpack(array)
    return torch.from_dlpack(jax.lax.bitcast_convert_type(array, "uint8")).view(getattr(torch, array.dtype.name))
