"""Device time of ops on this GPU, for ``python -m cute_ops bench``, tuning and the benchmarks.

Calls rotate through buffers that together exceed three times the L2 cache, many calls in one CUDA graph, so that
neither host time nor data left in L2 counts. One replay of the graph is a sample.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch

from cute_ops.autotune import dispatch
from cute_ops.autotune.rows import bytes_moved
from cute_ops.declaration.binding import Binding, bind
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import ITEMSIZE, Array
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.jit import target
from cute_ops.jit.layout import Memory, compact
from cute_ops.jit.plan import Plan
from cute_ops.testing import EPS, Arrays
from cute_ops_torch.host.launch import planned_call
from cute_ops_torch.host.sampler import Sampler as Sampler
from cute_ops_torch.host.sampler import elapsed as elapsed
from cute_ops_torch.host.sampler import graph_sampler as graph_sampler
from cute_ops_torch.library.tensors import DTYPES
from cute_ops_torch.tools.runner import broken as broken
from cute_ops_torch.tools.runner import device as place
from cute_ops_torch.tools.runner import to_numpy, to_torch

CALLS, REPLAYS, MAX_SETS = 64, 30, 256
LONG_US = 2000.0  # the graph has fewer calls if together they take so long
CHUNK = 1 << 26  # elements that are compared at a time


class Measured(NamedTuple):
    """Microseconds of a call, median and extremes; GB/s by the least bytes moved."""

    us: float
    low: float
    high: float
    rate: float


def available() -> bool:
    return torch.cuda.is_available()


def device() -> str:
    return torch.cuda.get_device_name()


def copy_rate() -> float:
    """GB/s of a large copy: the ceiling for an op that moves memory."""
    source = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device="cuda")
    copies = torch.empty_like(source)
    times = _events(lambda: copies.copy_(source), 20)
    return 2 * source.numel() / statistics.median(times) / 1e3


def measure(op: Op, arrays: Mapping[str, Array | None], attrs: Mapping[str, Any] | None = None) -> Measured:
    """Time an op on random inputs of these shapes."""
    binding = bind(op, arrays, attrs)
    chosen = dispatch.choose(binding, {}, target.of_device(torch.cuda.current_device()))
    with contest(binding, {}, [chosen]) as taken:
        times = [taken.sample(0) for _ in range(REPLAYS)]
    return Measured(us := statistics.median(times), min(times), max(times), bytes_moved(binding) / us / 1e3)


def functions(inputs: Sequence[Any], contenders: Mapping[str, Callable[..., Any]]) -> dict[str, Measured]:
    """Time functions of tensors by name, in turns on copies of the inputs. They may launch on any stream, so that no
    graph is captured: the host's time counts where it is longer. GB/s counts inputs and outputs once.
    """
    outputs = next(iter(contenders.values()))(*inputs)
    tensors = [t for t in (*inputs, *(outputs if isinstance(outputs, tuple | list) else [outputs]))
               if isinstance(t, torch.Tensor)]  # fmt: skip
    moved = sum(t.numel() * t.element_size() for t in tensors)
    l2 = torch.cuda.get_device_properties().L2_cache_size if available() else 0
    count = min(max(4, -(-3 * l2 // max(moved, 1))), MAX_SETS)
    sets = [[t.clone() if isinstance(t, torch.Tensor) else t for t in inputs] for _ in range(count)]
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(3):
        for name, each in contenders.items():
            turns = cycle(sets)
            times[name] += _events(lambda each=each, turns=turns: each(*next(turns)), REPLAYS)  # type: ignore[misc]
    return {
        name: Measured(us := statistics.median(found), min(found), max(found), moved / us / 1e3)
        for name, found in times.items()
    }


def run(binding: Binding, chosen: Plan, arrays: Arrays) -> tuple[np.ndarray | None, ...]:
    """Run a plan's kernel on NumPy arrays, with outputs in memory that was filled with NaN."""
    tensors = [None if a is None else to_torch(a) for a in arrays.values()]
    outputs = [None if a is None else _filled(a) for a in binding.outputs.values()]
    with torch.no_grad():
        _filling(binding, chosen)(*_present(tensors), *_present(outputs))
    return tuple(None if out is None else to_numpy(out) for out in outputs)


def _filling(binding: Binding, chosen: Plan) -> Callable[..., Any]:
    """``fill(*inputs, *outputs)`` by a plan, without those that are absent."""
    outputs = tuple(name for name, array in binding.outputs.items() if array is not None)
    fill = planned_call(binding, chosen, torch.device(place())).fill(outputs)
    numbers = [binding.attrs[name] for name in binding.op.scalars]
    return (lambda *tensors: fill(*tensors, *numbers)) if numbers else fill


def _present(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [t for t in tensors if t is not None]


@contextmanager
def contest(binding: Binding, memory: Mapping[str, Memory], plans: Sequence[Plan]) -> Iterator[Contest]:
    """Plans of one call on the same buffers, random numbers in all of them."""
    with torch.no_grad(), closing(Contest(binding, memory, plans)) as made:
        yield made


class Contest:
    """See :class:`cute_ops.autotune.compare.Contest`."""

    def __init__(self, binding: Binding, memory: Mapping[str, Memory], plans: Sequence[Plan]) -> None:
        self._binding = binding
        l2 = torch.cuda.get_device_properties().L2_cache_size if available() else 0
        count = min(max(4, -(-3 * l2 // bytes_moved(binding))), MAX_SETS)
        first = _inputs(binding, memory)
        self._inputs = [first, *([None if t is None else _copy(t) for t in first] for _ in range(count - 1))]
        self._outputs = [[None if a is None else _filled(a) for a in binding.outputs.values()] for _ in range(count)]
        self._runs = [partial(_filling, binding, chosen) for chosen in plans]
        self._samplers: dict[int, Sampler] = {}
        self._expected: list[torch.Tensor | None] | None = None
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._count = 0

    def close(self) -> None:
        """Free the memory: a program that tunes itself needs it."""
        self._samplers.clear()
        self._inputs.clear()
        self._outputs.clear()
        self._expected = None

    def differs(self, index: int, floors: Mapping[str, float]) -> str:
        if self._expected is None:
            self._call(0)
            self._expected = [None if t is None else t.clone() for t in self._outputs[0]]
        for out in self._outputs[0]:
            if out is not None:
                _poison(out)
        self._call(index)
        once = [None if t is None else t.clone() for t in self._outputs[0]]
        self._call(index)
        for name, expected, got, again in zip(
            self._binding.op.outputs, self._expected, once, self._outputs[0], strict=True
        ):
            if expected is None or got is None or again is None:
                continue
            if not torch.equal(_bytes(got), _bytes(again)):
                return f"output {name} differs from call to call: a race?"
            if not torch.equal(_bytes(got), _bytes(expected)):
                excess = _excess(expected, got, floors.get(name, EPS["float32"]))
                if not excess <= 1:
                    return f"output {name} differs from the heuristic's by {excess:.3g} times what is allowed"
        return ""

    def sample(self, index: int) -> float:
        if index not in self._samplers:
            self._samplers[index] = self._sampler(index)
        return self._samplers[index]()

    def _call(self, index: int) -> None:
        self._runs[index]()(*_present(self._inputs[0]), *_present(self._outputs[0]))

    def _sampler(self, index: int) -> Sampler:
        if self._stream is None:
            torch.cuda.synchronize()
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        fill = self._runs[index]()
        sets = [_present([*given, *outputs]) for given, outputs in zip(self._inputs, self._outputs, strict=True)]
        calls = [partial(fill, *arguments) for arguments in sets]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for call in calls[:3]:
                call()
            if not self._count:
                once = statistics.median(_events(calls[-1], 3))
                rounds = math.ceil(min(CALLS, max(LONG_US / once, 1)) / len(calls))
                self._count = rounds * len(calls)
        torch.cuda.synchronize()
        return graph_sampler(calls, self._count, self._stream, self._pool)


def _events(action: Callable[[], Any], count: int) -> list[float]:
    """Microseconds of each of ``count`` runs, after some to warm up; all are enqueued before the first wait."""
    for _ in range(3):
        action()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, end in marks:
        begin.record()
        action()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in marks]


def _inputs(binding: Binding, memory: Mapping[str, Memory]) -> list[torch.Tensor | None]:
    """Random values in the memory layout of the call, from a generator of their own."""
    generator = torch.Generator(place()).manual_seed(0)
    made: list[torch.Tensor | None] = []
    for name, array in binding.inputs.items():
        if array is None:
            made.append(None)
            continue
        values = random_input(binding.op, name, array, binding.dims, generator)
        where = memory.get(name, Memory(compact(array.shape)))
        made.append(_empty(array, where).copy_(values))
    return made


def random_input(op: Op, name: str, array: Array, dims: Mapping[str, Any], generator: torch.Generator) -> torch.Tensor:
    """Values as :func:`cute_ops.testing.inputs` makes them, on the generator's device."""
    declared = op.inputs[name]
    if declared.upper_bound:
        values = torch.randint(declared.bound(dims), array.shape, generator=generator, device=generator.device)
    else:
        values = torch.randn(array.shape, generator=generator, device=generator.device)
        if declared.at_most is not None:
            values = declared.at_most - values.abs_()
        if name.endswith("weight"):
            values = values.div_(4).add_(1)
    if array.dtype == "bool":
        return values > 0
    if array.dtype == "float8_e8m0fnu":
        values = values.round_().exp2_()
    elif array.dtype == "uint32":
        values = values.abs_().mul_(2.0**28).to(torch.int64)
    return values.to(DTYPES[array.dtype])


def _empty(array: Array, where: Memory) -> torch.Tensor:
    """A tensor with these strides whose address is as far from a vector's boundary."""
    off = where.address % VECTOR_BYTES // ITEMSIZE[array.dtype]
    span = 1 + sum((size - 1) * stride for size, stride in zip(array.shape, where.strides, strict=True))
    flat = torch.empty(off + max(span, 1), dtype=DTYPES[array.dtype], device=place())
    return flat.as_strided(tuple(array.shape), tuple(where.strides), off)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    array = Array(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return _empty(array, Memory(tensor.stride(), tensor.data_ptr())).copy_(tensor)


def _filled(array: Array) -> torch.Tensor:
    return _poison(torch.empty(array.shape, dtype=DTYPES[array.dtype], device=place()))


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    _bytes(tensor).fill_(255)  # NaN in every float dtype
    return tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _excess(expected: torch.Tensor, got: torch.Tensor, floor: float) -> float:
    """The largest difference of two results relative to the error that is allowed for both."""
    eps = EPS.get(str(expected.dtype).removeprefix("torch."), 0.0)
    # Numbers below the smallest normal one are as far apart as it is from its neighbour. Gradients of a thousand
    # classes in float16 are that small.
    normal = torch.finfo(expected.dtype).tiny if expected.dtype.is_floating_point else 0.0
    flat, other = expected.view(-1), got.view(-1)
    starts = range(0, flat.numel(), CHUNK)

    def wide(tensor: torch.Tensor, start: int) -> torch.Tensor:
        return tensor[start : start + CHUNK].float()

    largest = max(wide(flat, s).nan_to_num(0, 0, 0).abs().max().item() for s in starts)
    worst = 0.0
    for s in starts:
        a, b = wide(flat, s), wide(other, s)
        same = (a == b) | (a.isnan() & b.isnan())
        allowed = 4 * (eps * a.abs().clamp_min(normal) + floor * largest)
        error = torch.where(same, 0.0, (a - b).abs() / allowed)
        worst = max(worst, error.nan_to_num(math.inf).max().item())
    return worst
