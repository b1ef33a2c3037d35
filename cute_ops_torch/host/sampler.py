"""Samples of device time: replays of a CUDA graph of calls."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

WAIT_CYCLES = 200_000  # of the GPU before a replay, while the host enqueues it: else host time would count
# Of two ways to compute a call that are measured before it. Of one call alone a kernel of ours, which starts while the
# one before it ends, took up to 6 us more than of eight in a row (H200).
L2_TIMES, MOST_SETS, LEAST_CALLS, TURNS = 3, 16, 8, 9

Sampler = Callable[[], float]


def alternately(runs: Sequence[Callable[..., Any]], given: Sequence[torch.Tensor]) -> list[float]:
    """Microseconds of each of some functions of the same tensors, in turns: medians of replays of CUDA graphs.

    They read copies of the tensors that are together larger than L2, one after another.
    """
    room = L2_TIMES * torch.cuda.get_device_properties(given[0].device).L2_cache_size
    count = min(max(room // sum(t.nbytes for t in given), 1), MOST_SETS)
    sets = [given, *([t.clone() for t in given] for _ in range(count - 1))]
    with torch.cuda.device(given[0].device), torch.no_grad():
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        samplers = []
        for run in runs:
            calls = [partial(run, *each) for each in sets]
            with torch.cuda.stream(stream):
                for call in calls[:3]:
                    call()
            torch.cuda.synchronize()
            samplers.append(graph_sampler(calls, -(-LEAST_CALLS // count) * count, stream))
        samples = [[sample() for sample in samplers] for _ in range(TURNS)]
    return [statistics.median(times) for times in zip(*samples, strict=True)]


def graph_sampler(
    calls: Sequence[Callable[[], Any]], count: int, stream: torch.cuda.Stream, pool: Any = None
) -> Sampler:
    """Microseconds of a call, by replays of a graph of ``count`` calls."""
    graph = torch.cuda.CUDAGraph()
    keep: list[Any] = [None] * len(calls)  # outputs of the last round, so that no two calls share output buffers
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        for i in range(count):
            keep[i % len(calls)] = calls[i % len(calls)]()
    graph.replay()

    def sample() -> float:
        torch.cuda._sleep(WAIT_CYCLES)
        return elapsed(graph.replay) / count

    # A graph owns only what was allocated inside: inputs and what autograd saved for backward stay with the calls.
    sample.owns = graph, keep, calls  # type: ignore[attr-defined]
    return sample


def elapsed(action: Callable[[], Any]) -> float:
    """Microseconds between an action's begin and end on the device; host time counts where that is slower."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    action()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3  # type: ignore[no-any-return]
