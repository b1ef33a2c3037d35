"""Device time of an op on this GPU: what ``python -m cute_ops bench`` and tuning measure by.

Calls take turns on buffers that together exceed three times the L2 cache, many of them in one CUDA graph, so that
neither host time nor what a call left in L2 is measured; the median of the graph's replays counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from cute_ops.op import ITEMSIZE, Array, Op
from cute_ops_torch.registry import register
from cute_ops_torch.tensors import DTYPES, bind_tensors

CALLS, REPLAYS, MAX_SETS = 64, 30, 256


class Measured(NamedTuple):
    """Microseconds of a call, median and extremes; GB/s by the least bytes moved."""

    us: float
    low: float
    high: float
    rate: float


def available() -> bool:
    return torch.cuda.is_available()


def copy_rate() -> float:
    """GB/s of a large copy, by events: what an op that moves memory can reach."""
    source = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = _events(lambda: target.copy_(source), 20)
    return 2 * source.numel() / statistics.median(times) / 1e3


def measure(op: Op, arrays: Mapping[str, Array | None], attrs: Mapping[str, Any] | None = None) -> Measured:
    """Time an op on random inputs of these shapes."""
    register(op)
    overload = getattr(torch.ops.cute, op.name).default
    values = list({**op.attrs, **(attrs or {})}.values())
    first = _inputs(arrays)
    binding = bind_tensors(op, first, values)
    present = [a for a in (*binding.inputs.values(), *binding.outputs.values()) if a is not None]
    moved = sum(math.prod(a.shape) * ITEMSIZE[a.dtype] for a in present)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    count = min(max(4, -(-3 * l2 // moved)), MAX_SETS)
    sets = [first, *(_inputs(arrays) for _ in range(count - 1))]
    outputs: list[Any] = [None] * count
    calls = -(-CALLS // count) * count

    def once() -> None:
        for i in range(calls):
            outputs[i % count] = overload(*sets[i % count], *values)

    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            once()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once()
        times = [t / calls for t in _events(graph.replay, REPLAYS)]
    return Measured(us := statistics.median(times), min(times), max(times), moved / us / 1e3)


def _events(action: Callable[[], Any], count: int) -> list[float]:
    """Microseconds of each of ``count`` runs, after some to warm up."""
    for _ in range(3):
        action()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, end in marks:
        begin.record()  # type: ignore[no-untyped-call]
        action()
        end.record()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in marks]  # type: ignore[no-untyped-call]


def _inputs(arrays: Mapping[str, Array | None]) -> list[torch.Tensor | None]:
    made: list[torch.Tensor | None] = []
    for array in arrays.values():
        if array is None:
            made.append(None)
        elif DTYPES[array.dtype].is_floating_point:
            made.append(torch.randn(array.shape, device="cuda").to(DTYPES[array.dtype]))
        else:
            made.append(torch.zeros(array.shape, dtype=DTYPES[array.dtype], device="cuda"))
    return made
