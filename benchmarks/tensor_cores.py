"""What a large product could reach at most: our kernel with its parts switched off, beside itself and cuBLAS.

On a card that is slowed down by its power limit a product's rate is the limit over the energy of a multiply-add, and
no kernel for the same data goes beyond what the Tensor Cores reach when they do nothing but multiply. Contenders:

- `cuBLAS` and `ours`, as in linear.py;
- `no stores`: ours without its epilogue;
- `few blocks`: without reads of memory, too: loads take the first blocks of k again and again, from L2;
- `resident`: without loads, too: shared memory is filled once, and its blocks are multiplied as often as ours does.

The config that is chosen and those that `--configs` finds are measured, each in three states. `hot`: alone for a
second, samples of 20 ms from the second half of it, each contender once in either order; power and clock are the
driver's, and watts per TFLOPS are picojoules per operation. `turns`: in turns, samples of 3 ms without a pause, as in
linear.py: all run at the clock that their mean power allows. `cool`: the same with a pause before each sample.
`of_cublas` of `resident` is the most that a kernel with these instructions could gain.

    python benchmarks/tensor_cores.py --out out/benchmarks                    # Llama 8B's gate and up
    python benchmarks/tensor_cores.py --out out/benchmarks --shapes 1b --ops linear_dweight
    python benchmarks/tensor_cores.py --out out/benchmarks --zeros            # zeros in place of normal numbers
"""

from __future__ import annotations

import argparse
import ctypes
import math
import re
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import linear
import torch
from common import Table, spread
from linear import CUBLAS, OPS, Sampler, Turns
from rich.console import Console

from cute_ops import Op
from cute_ops.declaration.case import Case
from cute_ops.jit import cache, source_digest
from cute_ops.jit.plan import Plan
from cute_ops.ops.gemm.linear import CASES
from cute_ops_torch.library.tensors import bind_tensors

COLUMNS = (
    "op", "case", "m", "n", "k", "numbers", "state", "contender", "config", "us", "us_min", "us_max", "tflops",
    "of_cublas", "watts", "mhz",
)  # fmt: skip
PARTS = {"ours": "", "no stores": "no_stores", "few blocks": "few_blocks", "resident": "resident"}
CONFIGS = "cooperative-128x256-cluster2x1|pingpong-128x128-cluster1x2"
LEAST_WORK, BLOCK = 2**36, 64  # multiply-adds of a shape; elements of a block of k
HOT_SECONDS, HOT_SAMPLE_US = 1.0, 20e3
SM_CLOCK = 1  # NVML's number
Name = tuple[str, str]  # a contender and its config


class Reading(NamedTuple):
    """Samples of a contender in a state, and what the driver says of the time they took; NaN where it was not asked."""

    us: list[float]
    watts: float = math.nan
    mhz: float = math.nan


class Driver:
    """The energy that the GPU has taken and its clock, from NVML; NaN where it does not say."""

    def __init__(self) -> None:
        self._nvml, self._device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        self._nvml.nvmlInit_v2()
        name = f"GPU-{torch.cuda.get_device_properties().uuid}".encode()
        self._nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._device))

    def watch(self, done: threading.Event) -> tuple[float, float]:
        """Mean watts and median MHz until this is done."""
        energy, clocks = [], []
        while not done.wait(0.01):
            energy.append((time.monotonic(), self.joules()))
            clocks.append(self.mhz())
        # Energy is counted in steps of up to 100 ms: between the first step and the last one time is known.
        steps = [after for before, after in pairwise(energy) if after[1] > before[1]]
        if len(steps) < 2:
            return math.nan, math.nan
        seconds, joules = (last - first for first, last in zip(steps[0], steps[-1], strict=True))
        return joules / seconds, statistics.median(clocks)

    def joules(self) -> float:
        value = ctypes.c_ulonglong()
        failed = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(value))
        return math.nan if failed else value.value / 1e3

    def mhz(self) -> float:
        value = ctypes.c_uint()
        failed = self._nvml.nvmlDeviceGetClockInfo(self._device, SM_CLOCK, ctypes.byref(value))
        return math.nan if failed else float(value.value)


def part(plan: Plan, kernel: str) -> Plan:
    """A plan whose kernel is one of product_parts_kernels.py; its own where there is no name."""
    if not kernel:
        return plan
    name = f"product_parts_kernels:{kernel}"
    return plan._replace(variant=plan.variant._replace(kernel=name, sources=source_digest.key(name)))


def plans(configs: Mapping[str, Plan]) -> dict[Name, Plan]:
    """All parts of each config."""
    return {(label, config): part(plan, kernel) for config, plan in configs.items() for label, kernel in PARTS.items()}


def hot(sampler: Sampler, driver: Driver) -> Reading:
    """Samples of a contender alone, once it has run for a while."""
    begin, done, samples = time.monotonic(), threading.Event(), []
    while time.monotonic() - begin < HOT_SECONDS / 2:
        sampler()
    with ThreadPoolExecutor(1) as pool:
        # The driver takes milliseconds to answer, in which the GPU must not be idle.
        watched = pool.submit(driver.watch, done)
        while not samples or time.monotonic() - begin < HOT_SECONDS:
            samples.append(sampler())
        done.set()
    return Reading(samples, *watched.result())


def both_orders(samplers: Mapping[Name, Sampler], driver: Driver) -> dict[Name, Reading]:
    names = [*samplers]
    readings = [(name, hot(samplers[name], driver)) for name in (*names, *reversed(names))]
    merged = {}
    for name in names:
        first, second = (reading for each, reading in readings if each == name)
        watts, mhz = (statistics.mean(pair) for pair in zip(first[1:], second[1:], strict=True))
        merged[name] = Reading(first.us + second.us, watts, mhz)
    return merged


def states(calls: Mapping[Name, list[linear.Call]], turns: Turns) -> Iterator[tuple[str, dict[Name, Reading]]]:
    """The readings of all contenders in each state."""
    stream, driver = torch.cuda.Stream(), Driver()
    stream.wait_stream(torch.cuda.current_stream())
    long = {name: linear.sampler(each, stream, HOT_SAMPLE_US) for name, each in calls.items()}
    short = {name: linear.sampler(each, stream) for name, each in calls.items()}
    yield "hot", both_orders(long, driver)
    for state, pause in (("turns", 0.0), ("cool", turns.pause)):
        labels = {"|".join(name): name for name in short}
        found = linear.in_turns({label: short[name] for label, name in labels.items()}, turns._replace(pause=pause))
        yield state, {labels[label]: Reading(samples) for label, samples in found.items()}


def measure(op: Op, case: Case, configs: str, zeros: bool, turns: Turns, table: Table, console: Console) -> None:
    device = torch.device("cuda")
    sets = [linear.inputs(op, case, device) for _ in range(2)]
    for tensor in (t for each in sets if zeros for t in each):
        tensor.zero_()
    binding = bind_tensors(op, sets[0], [*linear.attributes(op).values()])
    (made,) = binding.outputs.values()
    assert made is not None
    outputs = [torch.empty(made.shape, dtype=torch.bfloat16, device=device) for _ in sets]
    wanted = plans(linear.plans(binding, sets[0], None, {}) | linear.plans(binding, sets[0], configs, {}))
    for built in cache.build_all(plan.variant for plan in wanted.values()):
        if built.error is not None:
            raise built.error

    rotation = list(zip(sets, outputs, strict=True))
    calls: dict[Name, list[linear.Call]]
    calls = {(CUBLAS, ""): [partial(linear.matrix_product, op, *tensors, out) for tensors, out in rotation]}
    for name, plan in wanted.items():
        fill = linear.filling(binding, plan, device)
        fill(*sets[0], outputs[0])
        linear.finish(f"{op.name} {case.name} {name}")
        calls[name] = [partial(fill, *given, out) for given, out in rotation]
    sizes = {"m": binding.rows, "n": binding.dims["n"], "k": binding.dims["k"]}
    row = {"op": op.name, "case": case.name, **sizes, "numbers": "zeros" if zeros else "normal"}
    for state, readings in states(calls, turns):
        write({**row, "state": state}, readings, table, console)


def write(row: dict[str, Any], readings: dict[Name, Reading], table: Table, console: Console) -> None:
    """A row for each contender in a state, and a line."""
    cublas = spread(readings[CUBLAS, ""].us).median
    console.print(f"{row['op']} {row['case']}, {row['numbers']}, {row['state']}:")
    for (contender, config), reading in readings.items():
        us = spread(reading.us)
        tflops = linear.tflops({name: row[name] for name in "mnk"}, us.median)
        figures = {"us": us.median, "us_min": us.low, "us_max": us.high, "tflops": tflops}
        figures["of_cublas"] = cublas / us.median
        asked = {} if math.isnan(reading.mhz) else {"watts": reading.watts, "mhz": reading.mhz}
        table.add({**row, "contender": contender, "config": config, **figures, **asked})
        driver = f", {reading.watts:.0f} W, {reading.mhz:.0f} MHz, {reading.watts / tflops:.3f} pJ" if asked else ""
        console.print(f"  {contender:11}{config:34}{tflops:6.1f} TFLOPS, {cublas / us.median:.3f} of cuBLAS{driver}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for tensor_cores.csv")
    parser.add_argument("--ops", nargs="*", default=[op.name for op in OPS], choices=[op.name for op in OPS])
    parser.add_argument("--shapes", default="8b-gate-up", help="cases in whose names this pattern is found")
    parser.add_argument("--configs", default=CONFIGS, help="beside the chosen one, those whose names this finds")
    parser.add_argument("--zeros", action="store_true", help="zeros in place of normal numbers")
    parser.add_argument("--rounds", type=int, default=10, help="samples of each, in turns")
    parser.add_argument("--pause", type=float, default=0.012, metavar="SECONDS", help="before each sample when cool")
    given = parser.parse_args(arguments)
    table, console = Table(given.out / "tensor_cores.csv", COLUMNS, append=True), Console(soft_wrap=True)
    turns = Turns(given.rounds, given.pause)
    for case in CASES:
        rows, n, k = math.prod(case.dims["m"]), case.dims["n"], case.dims["k"]
        whole = not any(size % BLOCK for size in (rows, n, k))
        for op in OPS:
            if op.name in given.ops and re.search(given.shapes, case.name) and whole and rows * n * k >= LEAST_WORK:
                measure(op, case, given.configs, given.zeros, turns, table, console)


if __name__ == "__main__":
    main()
