"""What keeps an op of rows from a copy's rate: beside each kernel, what bounds it.

A point is a kernel on buffers that together exceed L2. Rows of the CSV file, in turns of one process:

- `ours`: the call;
- `without DRAM`: the same machine code, on tensors all of whose pages are the same few megabytes of memory, which stay
  in L2. What is left are instructions, exchanges between threads and CTAs, and the latency of L2;
- `bytes alone`: a kernel that reads and writes as many tensors, element by element, and does nothing but add them up;
  its rate for the bytes that the call moves at least. Where only numbers of rows are stored it adds up rows;
- of group norms in shared memory `parts alone` (parts_alone.py): the same CTAs load the same parts, wait for each other
  and store them, without sums;
- of rows that an index names `in order`: the same machine code with places in ascending order; `torch, by places`:
  PyTorch's copy of as many rows to the same places.

The floor of a point is the slower one of the first two that follow `ours`: no other schedule of these instructions, and
no kernel that moves these bytes, is faster; nor, than `parts alone`, one that keeps these parts. `of_copy` is the least
bytes over what a large copy would move in that time.

    python benchmarks/row_floor.py --out out/benchmarks
    python benchmarks/row_floor.py --points "rmsnorm fwd" topk --append
    python benchmarks/row_floor.py --list                            # points and their configs; needs no GPU
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import Spread, Table, first_line, read, spread
from cuda.bindings import driver
from problems import Problem
from rich.console import Console
from summary import BYTES_ALONE, ON_CHIP, row_floors

from cute_ops import Op, fused
from cute_ops.autotune import dispatch
from cute_ops.autotune.rows import bytes_moved
from cute_ops.declaration.binding import Binding, bind
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.shapes import ITEMSIZE, Array
from cute_ops.jit import cache, target
from cute_ops.jit.plan import Plan, plan
from cute_ops.ops.conv.channels_first import causal_conv1d_channels_first_bwd
from cute_ops.ops.norm import group_config
from cute_ops.ops.norm.group_norm import group_norm_examples, group_norm_examples_bwd
from cute_ops.ops.routing.gathered import scattered_dots, scattered_rows
from cute_ops.ops.routing.route import routed_rows
from cute_ops.ops.routing.topk import topk_step
from cute_ops_torch.tools import measure

COLUMNS = ("point", "kernel", "us", "us_min", "us_max", "bytes", "gb_s", "of_copy", "config")
OURS, IN_ORDER, BY_PLACES, OF_PARTS = "ours", "in order", "torch, by places", "parts alone"
CALL_BYTES = 224 << 20  # of a call whose number of rows is not said
FOLD = 4 << 20  # bytes of the memory that all pages of a tensor are
TURNS = 7
SM90 = "sm_90a:132"  # an H200, where --list is asked for
NAMED = {"scattered_rows": "x", "scattered_dots": "dout"}  # kernels whose rows go to places: the rows' own tensor
Sampler = Callable[[], float]


def parts_alone(op: Op, kernel: str) -> Op:
    """An op of group norms with another kernel."""
    return Op(
        f"{op.name}_parts", inputs=op.inputs, outputs=op.outputs, dtypes=op.dtypes, attrs=dict(op.attrs),
        static=op.static, derived=op.derived, reference=op.reference, kernel=f"parts_alone:{kernel}",
        tuning=Tuning(group_config.examples), cases=op.cases, doc=op.doc, inference_only="it computes nothing",
    )  # fmt: skip


PARTS_ALONE = {
    op.name: parts_alone(op, kernel)
    for op, kernel in ((group_norm_examples, "PartsForward"), (group_norm_examples_bwd, "PartsBackward"))
}


class Point(NamedTuple):
    """A call of one kernel."""

    name: str
    binding: Binding


def rows(op: str, n: int, direction: str = "fwd", **more: Any) -> Point:
    """An op on as many rows as move :data:`CALL_BYTES`."""
    one, two = (Problem(op, count, n, **more).bytes(direction) for count in (1, 2))
    problem = Problem(op, max(CALL_BYTES // (two - one), 1), n, **more)
    return Point(f"{op} {direction} {problem.label}", problem.binding(direction))


def of(op: Op, attrs: Mapping[str, Any] | None = None, /, **arrays: tuple[tuple[int, ...], str] | None) -> Point:
    """A kernel of a program, on these tensors."""
    given = {name: None if array is None else Array(*array) for name, array in arrays.items()}
    shapes = ", ".join("x".join(map(str, a[0])) + f" {a[1]}" for a in list(arrays.values())[:1] if a)
    more = "".join(f" {name}={value}" for name, value in (attrs or {}).items())
    if arrays.get("place"):
        more += f" k={arrays['place'][0][1]}"
    return Point(f"{op.name} {shapes}{more}", bind(op, given, attrs))


def heads(op: str, count: int, size: int, direction: str = "fwd", **more: Any) -> Point:
    return rows(op, count * size, direction, sizes=(("h", count), ("n", size)), **more)


def scattered(rows: int, n: int, k: int, dtype: str = "bfloat16") -> Point:
    """Tokens that go to k places each."""
    return of(scattered_rows, x=((rows, n), dtype), place=((rows, k), "int32"), weights=None)


def scattered_with_dots(rows: int, n: int, k: int, dtype: str = "bfloat16") -> Point:
    y, token = ((rows * k, n), dtype), ((rows, k), dtype)
    return of(scattered_dots, y=y, place=((rows, k), "int32"), dout=((rows, n), dtype), weights=token)


def conv(lead: tuple[int, int], channels: int, width: int, direction: str, dtype: str) -> Point:
    """``lead``: batch and positions."""
    sizes = (("s", lead[1]), ("w", width))
    problem = Problem(
        "causal_conv1d", math.prod(lead), channels, dtype, lead=lead[:1], sizes=sizes, attrs=(("activation", "silu"),)
    )
    return Point(f"causal_conv1d {direction} {lead[0]} of {problem.label}", problem.binding(direction))


def conv_channels_first(batch: int, channels: int, seqlen: int, width: int, dtype: str) -> Point:
    x, of_channels = ((batch, channels, seqlen), dtype), ((channels,), dtype)
    return of(
        causal_conv1d_channels_first_bwd, {"activation": "silu"}, x=x, weight=((channels, width), dtype), dout=x,
        bias=of_channels, seq_idx=None,
    )  # fmt: skip


def grouped(batch: int, positions: int, channels: int, dtype: str = "bfloat16") -> Point:
    x, each = ((batch, positions, channels), dtype), ((channels,), dtype)
    return of(group_norm_examples, {"groups": 32}, x=x, weight=each, bias=each)


def grouped_bwd(batch: int, positions: int, channels: int, dtype: str = "bfloat16") -> Point:
    x, each, of_groups = ((batch, positions, channels), dtype), ((channels,), dtype), ((batch, 32), "float32")
    return of(group_norm_examples_bwd, x=x, dy=x, mean=of_groups, rstd=of_groups, weight=each, bias=each)


def routed(rows: int, experts: int, k: int, dtype: str = "bfloat16") -> Point:
    return of(routed_rows, {"k": k, "normalize": True}, logits=((rows, experts), dtype))


def largest(rows: int, n: int, k: int, dtype: str = "bfloat16") -> Point:
    return of(topk_step, {"k": k}, x=((rows, n), dtype), index=None)


F16, F32, WIDE = {"dtype": "float16"}, {"dtype": "float32"}, {"weight": "float32"}
DROPPED = {"attrs": (("p", 0.1),)}


def points() -> Iterator[Point]:
    """Rows that ran below 0.90 of a copy's rate, and some of their neighbours."""
    yield from (
        scattered(14773, 1536, 4),
        scattered(8192, 4096, 2),
        scattered(16384, 2048, 8),
        scattered(60000, 2048, 1),
    )
    yield from (scattered_with_dots(8672, 2880, 8), scattered_with_dots(9000, 2048, 8))
    yield from (
        heads("head_layernorm", 40, 112, **F16),
        heads("head_layernorm", 24, 144),
        heads("head_layernorm", 24, 72),
    )
    yield from (heads("head_layernorm", 16, 208), heads("head_layernorm", 32, 128, **F16))
    yield from (rows("rmsnorm", 145298, **WIDE), rows("rmsnorm", 198813), rows("layernorm", 95430))
    yield from (rows("layernorm", n) for n in (9001, 15000, 15555, 27777, 60001, 107527))
    yield from (rows("add_layernorm", n) for n in (12245, 21001, 29771))
    yield from (rows("rmsnorm", 15000, **WIDE), rows("rmsnorm", 865, **WIDE), rows("add_rmsnorm", 21970))
    yield from (rows("sum", 181525), rows("sum", 92588), rows("sum", 98304))
    yield from (rows("rmsnorm", n, "bwd") for n in (17828, 20500, 10680, 9832, 17399, 20008))
    yield from (rows("layernorm", n, "bwd") for n in (9832, 10824))
    yield from (rows("add_layernorm", n, "bwd", **k) for n, k in ((10240, F16), (12288, {})))
    yield from (conv((1, 4096), 5216, 4, "fwd", "float32"), conv((8, 4096), 2048, 4, "fwd", "bfloat16"))
    yield from (conv((1, 4096), 5217, 4, "fwd", "float32"), conv((8, 4096), 2049, 4, "fwd", "bfloat16"))
    yield from (conv((97, 1024), 920, 4, "bwd", "float16"), conv((6, 1024), 6840, 4, "bwd", "float32"))
    yield from (conv_channels_first(2, 5896, 4096, 3, "bfloat16"), conv_channels_first(9, 1111, 3001, 4, "bfloat16"))
    yield from (conv_channels_first(400, 1536, 77, 4, "bfloat16"), rows("adamw", 289, attrs=(("eps", 0.1),)))
    yield from (grouped(143, 1600, 192), grouped(516, 1024, 128), grouped(66, 4096, 256), grouped(110, 1024, 320))
    yield from (grouped(60, 4096, 192), grouped(40, 4096, 320), grouped(96, 1024, 640), grouped(61, 2304, 192))
    yield from (grouped_bwd(143, 1600, 192), grouped_bwd(516, 1024, 128), grouped_bwd(66, 4096, 256))
    yield from (grouped_bwd(110, 1024, 320),)
    yield from (rows("dropout_add_layernorm", 8192, **DROPPED), rows("dropout_add_rmsnorm", 4096, **DROPPED))
    yield from (routed(511845, 256, 8), routed(262144, 512, 8), routed(4194304, 8, 2), routed(819200, 128, 8))
    yield from (rows("divergence", 2880, **F16), *(rows("divergence", n) for n in (9728, 32000, 128256, 124874)))
    yield from (rows("soft_cross_entropy", n) for n in (50257, 128256))
    yield from (rows("cross_entropy", n, attrs=(("label_smoothing", 0.1),)) for n in (50257, 128256, 201088))
    yield from (largest(1638400, 64, 8), largest(819200, 128, 8), largest(13110, 8192, 20), largest(6552, 8192, 100))


def moved(reads: int, writes: int, dtype: str, n: int, count: int) -> Binding:
    """A call that reads and writes so many tensors with rows of n elements, and does nothing else but add up."""

    def function(xp: Any, **tiles: Any) -> Any:
        first, *others = tiles.values()
        total = sum(others, first)
        if not writes:
            return xp.sum(total, axis=-1, keepdims=True)
        return tuple(total + float(k) for k in range(writes))

    names = [f"x{i}" for i in range(reads)]
    op = fused(function, name=f"moved_{reads}_{writes}", operands=dict.fromkeys(names, "*m n"))
    return bind(op, dict.fromkeys(names, Array((count, n), dtype)))


def bytes_alone(binding: Binding) -> Binding:
    """The call of :func:`moved` that moves as many tensors as this call."""
    given = [a for name, a in binding.inputs.items() if a is not None and not binding.op.inputs[name].unread]
    made = [a for a in binding.outputs.values() if a is not None]
    largest = max((*given, *made), key=size)
    read, written = (sum(map(size, arrays)) for arrays in (given, made))
    n = largest.shape[-1]
    # A tensor of the rows that there are fewest of, so that k reads and one write are as many tensors.
    unit = min(size(a) for a in (*given, *made) if size(a) * 10 > size(largest))
    reads, writes = max(round(read / unit), 1), round(written / unit)
    return moved(min(reads, 8), min(writes, 8), largest.dtype, n, max(unit // (n * ITEMSIZE[largest.dtype]), 1))


def size(array: Array) -> int:
    return math.prod(array.shape) * ITEMSIZE[array.dtype]


class Folded:
    """Tensors of which all pages are the same memory."""

    def __init__(self) -> None:
        place = driver.CUmemLocation()
        place.type, place.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, torch.cuda.current_device()
        self._new, self._access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
        self._new.type, self._new.location = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, place
        self._access.location = place
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._made: list[tuple[int, int, Any]] = []

    def of(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """A tensor with this one's shape, and with its values as far as they are kept; itself, if it is small."""
        if tensor is None or tensor.nbytes < 2 * FOLD:
            return tensor
        held = -(-tensor.nbytes // FOLD) * FOLD
        memory = called(driver.cuMemCreate(FOLD, self._new, 0))
        start = int(called(driver.cuMemAddressReserve(held, 0, 0, 0)))
        for offset in range(0, held, FOLD):
            called(driver.cuMemMap(start + offset, FOLD, 0, memory, 0))
        called(driver.cuMemSetAccess(start, held, [self._access], 1))
        self._made.append((start, held, memory))
        found = torch.as_tensor(Address(start, tensor.nbytes), device=tensor.device)
        return found.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def close(self) -> None:
        torch.cuda.synchronize()
        for start, held, memory in self._made:
            called(driver.cuMemUnmap(start, held))
            called(driver.cuMemRelease(memory))
            called(driver.cuMemAddressFree(start, held))
        self._made.clear()


class Address:
    """Bytes at an address, as PyTorch reads other libraries' arrays."""

    def __init__(self, start: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (start, False), "version": 3}


def called(result: tuple[Any, ...]) -> Any:
    """What the driver returns, without its status."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(str(status))
    return values[0] if values else None


class Measured(measure.Contest):
    """One plan on buffers of its own; with ``folded`` on one set of tensors of that memory. Rows that go to places each
    go to one, in drawn order or ``in_order``.
    """

    def __init__(self, binding: Binding, chosen: Plan, folded: Folded | None = None, *, in_order: bool = False) -> None:
        super().__init__(binding, {}, [chosen])
        if folded:
            self._inputs = [[folded.of(t) for t in self._inputs[0]]]
            self._outputs = [[folded.of(t) for t in self._outputs[0]]]
        if binding.op.name in NAMED:
            at = list(binding.inputs).index("place")
            for given in self._inputs:
                given[at] = places(given[at].shape, in_order)  # type: ignore[union-attr]


def places(shape: Sequence[int], in_order: bool) -> torch.Tensor:
    """A place for each of so many tokens' experts."""
    count = math.prod(shape)
    found = torch.arange(count, device="cuda") if in_order else torch.randperm(count, device="cuda")
    return found.int().view(tuple(shape))


def copied_by_torch(binding: Binding) -> tuple[Sampler, int]:
    """PyTorch's copy of rows to places, of as many rows as there are places; the bytes that it moves."""
    place, own = binding.inputs["place"], binding.inputs[NAMED[binding.op.name]]
    assert place is not None and own is not None
    order = places(place.shape, False).view(-1).long()
    x = torch.randn(len(order), own.shape[-1], device="cuda").to(getattr(torch, own.dtype))
    sets = [(torch.empty_like(x), x.clone()) for _ in range(4)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for out, rows in sets:
            out.index_copy_(0, order, rows)
    torch.cuda.synchronize()
    calls = [partial(out.index_copy_, 0, order, rows) for out, rows in sets]
    return measure.graph_sampler(calls, 16, stream), 2 * x.nbytes


def measured(point: Point, plans: Mapping[str, tuple[Binding, Plan]]) -> Iterator[tuple[str, Spread, int]]:
    """(kernel, microseconds, bytes) of a point's kernels, which take turns."""
    folded, made = Folded(), list[Measured]()
    samplers: dict[str, tuple[Sampler, int]] = {}
    try:
        for kernel, (binding, chosen) in plans.items():
            made.append(Measured(binding, chosen, folded if kernel == ON_CHIP else None, in_order=kernel == IN_ORDER))
            samplers[kernel] = partial(made[-1].sample, 0), bytes_moved(binding)
        if point.binding.op.name in NAMED:
            samplers[BY_PLACES] = copied_by_torch(point.binding)
        taken: dict[str, list[float]] = {kernel: [] for kernel in samplers}
        with torch.no_grad():
            for _ in range(TURNS):
                for kernel, (sample, _) in samplers.items():
                    taken[kernel].append(sample())
        for kernel, times in taken.items():
            yield kernel, spread(times), samplers[kernel][1]
    finally:
        samplers.clear()
        for each in made:
            each.close()
        folded.close()


def plans_of(point: Point, on: target.Target) -> dict[str, tuple[Binding, Plan]]:
    """By kernel its call and plan."""
    found = {OURS: point.binding, ON_CHIP: point.binding, BYTES_ALONE: bytes_alone(point.binding)}
    if point.binding.op.name in NAMED:
        found[IN_ORDER] = point.binding
    plans = {kernel: (binding, dispatch.choose(binding, {}, on)) for kernel, binding in found.items()}
    chosen = plans[OURS][1].variant.config
    if point.binding.op.name in PARTS_ALONE and chosen["form"] == "smem":
        binding = bind(PARTS_ALONE[point.binding.op.name], point.binding.inputs, point.binding.attrs)
        plans[OF_PARTS] = binding, plan(binding, {}, on, config=chosen)
    return plans


def config(chosen: Plan) -> str:
    """A config without what says the expression."""
    return " ".join(f"{k}={v}" for k, v in chosen.variant.config.items() if v and (isinstance(v, int) or k == "form"))


def rows_of(point: Point, on: target.Target, copy: float) -> Iterator[dict[str, Any]]:
    plans = plans_of(point, on)
    least = bytes_moved(point.binding)
    for kernel, us, moved_bytes in measured(point, plans):
        # Kernels that move other bytes are compared by their rate.
        rate = moved_bytes / us.median / 1e3
        share = least / us.median / 1e3 / copy if kernel == ON_CHIP else rate / copy
        yield {
            "point": point.name, "kernel": kernel, "us": us.median, "us_min": us.low, "us_max": us.high,
            "bytes": moved_bytes, "gb_s": rate, "of_copy": share,
            "config": config(plans[kernel][1]) if kernel in plans else "",
        }  # fmt: skip


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for row_floor.csv")
    parser.add_argument("--points", nargs="*", default=[""], help="those in whose names one of these is found")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no point after so many seconds")
    parser.add_argument("--append", action="store_true", help="keep the rows of other points")
    parser.add_argument("--list", action="store_true", help="measure nothing: print points and configs")
    options, begin = parser.parse_args(given), time.perf_counter()
    wanted = [point for point in points() if any(re.search(re.escape(each), point.name) for each in options.points)]
    if not wanted:
        parser.error(f"no point is named {' or '.join(options.points)}: --list prints all")
    console, path = Console(soft_wrap=True, highlight=False), options.out / "row_floor.csv"
    on = target.parse(SM90) if options.list else target.of_device()
    if options.list:
        for point in wanted:
            for kernel, (binding, chosen) in plans_of(point, on).items():
                if kernel in (OURS, BYTES_ALONE):
                    console.print(f"{point.name}: {kernel}, {bytes_moved(binding) >> 20} MB, {config(chosen)}")
        return
    earlier = [row for row in read(path) if row["point"] not in {p.name for p in wanted}] if options.append else []
    table, copy = Table(path, COLUMNS), measure.copy_rate()
    table.keep(earlier)
    console.print(f"A copy moves {copy:.0f} GB/s.")
    with cache.building(chosen.variant for point in wanted for _, chosen in plans_of(point, on).values()) as built:
        for point in wanted:
            if time.perf_counter() - begin > options.seconds:
                console.print(f"the time is over at {point.name}")
                break
            for _, chosen in plans_of(point, on).values():
                built[chosen.variant.symbol].result()
            try:
                found = list(rows_of(point, on, copy))
            except Exception as error:
                console.print(f"{point.name}: {first_line(error)}")
                continue
            for row in found:
                table.add(row)
            console.print(f"{point.name}: " + ", ".join(f"{row['kernel']} {row['of_copy']:.3f}" for row in found))
    console.print(row_floors(read(path)))


if __name__ == "__main__":
    main()
