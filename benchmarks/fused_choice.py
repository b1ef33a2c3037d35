"""What ``fused="auto"`` chooses between: our kernel of a product, or the framework's product and a pass; drawn sizes.

Sizes are drawn as sample.py draws them; a point is an op of the product family: forward with and without an epilogue,
and both gradients. Operands that TMA cannot load are also measured copied into rows of whole lines, copies included.
The CSV has what the model of cycles says beside the times, so that the rule can be fitted to it; the last line is what
the rule of today loses.

    python benchmarks/fused_choice.py --out out/benchmarks [--seed 7] [--points 120] [--seconds 200]
"""

from __future__ import annotations

import argparse
import math
import random
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import Table, first_line, read, spread
from linear import Turns, in_turns, sampler
from rich.console import Console
from rich.progress import track
from sample import draw_size

from cute_ops.autotune import dispatch
from cute_ops.declaration.op import Op
from cute_ops.jit import cache, target
from cute_ops.jit.plan import signature
from cute_ops.kernels.gemm.config import GemmConfig
from cute_ops.ops.gemm.choice import whole_lines
from cute_ops.ops.gemm.config import GemmSize, busy, cycles
from cute_ops.ops.gemm.linear import linear, linear_dweight, linear_dx
from cute_ops.ops.gemm.named import gated_linear, linear_add, linear_gelu
from cute_ops_torch import registry
from cute_ops_torch.library.tensors import array, bind_tensors, memory

OPS = {op.name: op for op in (linear, linear_gelu, linear_add, gated_linear, linear_dx, linear_dweight)}
SIZES = {"linear_dx": ("m", "k", "n"), "linear_dweight": ("n", "k", "m")}
COLUMNS = ("op", "m", "n", "k", "dtype", "seed", "status", "form", "tile", "busy", "cycles", "tma",
           "ours", "framework", "copied", "auto")  # fmt: skip
VECTOR = 8  # elements of 16 bits


class Point(NamedTuple):
    op: Op
    m: int
    n: int
    k: int


def draw(seed: int, count: int) -> list[Point]:
    rng, found = random.Random(f"{seed} choice"), []
    while len(found) < count:
        m = round(2 ** rng.uniform(3, 14.5))
        m = rng.choice((m, -(-m // 64) * 64))
        point = Point(rng.choice(list(OPS.values())), m, draw_size(rng), draw_size(rng))
        if 2**27 <= math.prod(point[1:]) <= 2**39:
            found.append(point)
    return found


def inputs(point: Point) -> list[torch.Tensor]:
    dims = {"m": (point.m,), "n": point.n, "k": point.k}
    return [torch.randn(t.of(dims), device="cuda").bfloat16() for t in point.op.inputs.values()]


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose rows begin at lines of L2, as ``fused="auto"`` makes it; the tensor itself where its rows do."""
    strides = whole_lines(array(tensor), tensor.stride())
    if strides is None or strides == tensor.stride():
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def measure(point: Point, rounds: int, stream: torch.cuda.Stream) -> dict[str, Any]:
    op = point.op
    first = inputs(point)
    raw = registry.define(op).overload
    moved = sum(t.nbytes for t in first) + 2 * point.m * point.n
    count = max(2, min(64, -(-180_000_000 // moved)))
    sets = [first, *(inputs(point) for _ in range(count - 1))]
    attrs = {**op.attrs, "fused": "always"}

    def call(given: Sequence[torch.Tensor], fused: str) -> Any:
        return raw(*given, *{**attrs, "fused": fused}.values())

    def copied(given: Sequence[torch.Tensor]) -> Any:
        return call([*map(padded, given[:2]), *given[2:]], "always")

    binding = bind_tensors(op, first, [*attrs.values()])
    tma = all(t.shape[-1] % VECTOR == 0 for t in first[:2])
    operands = first if tma else [*map(padded, first[:2]), *first[2:]]
    problem = signature(binding, memory(op, operands), target.of_device()).problem
    config = GemmConfig.of(op.config(problem))
    size = GemmSize.of(problem, SIZES.get(op.name, ("m", "n", "k")), [t.stride(-2) for t in operands[:2]])
    forms: dict[str, Callable[..., Any]] = {
        "framework": partial(call, fused="never"),
        "auto": partial(call, fused="auto"),
    }
    forms |= {"ours": partial(call, fused="always")} if tma else {"copied": copied}
    exact = forms["framework"](first)
    state = "ok"
    for name, form in forms.items():
        error = (form(first).float() - exact.float()).abs().max().item() / exact.float().abs().max().item()
        if not error < 2**-6:
            state = f"{name} wrong: {error:.2g}"
    stream.wait_stream(torch.cuda.current_stream())
    samplers = {name: sampler([partial(form, given) for given in sets], stream, 1500.0) for name, form in forms.items()}
    times = {name: spread(each).median for name, each in in_turns(samplers, Turns(rounds)).items()}
    return {
        "status": state, "form": config.form, "tile": f"{config.tile_m}x{config.tile_n}", "tma": tma,
        "busy": busy(config, size, problem.sm_count), "cycles": cycles(config, size), **times,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for fused_choice.csv")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--points", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf)
    options = parser.parse_args(arguments)
    console, begin = Console(width=160, highlight=False), time.perf_counter()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    console.print(f"seed {seed}")
    points, where = draw(seed, options.points), target.of_device()
    variants = []
    for point in points:
        given = inputs(point)
        for operands in (given, [*map(padded, given[:2]), *given[2:]]):
            binding = bind_tensors(point.op, operands, [*{**point.op.attrs, "fused": "always"}.values()])
            variants.append(dispatch.foresee(binding, memory(point.op, operands), where).variant)
    cache.build_all(variants)
    console.print(f"{len(set(variants))} kernels in {time.perf_counter() - begin:.0f} s")
    table, stream = Table(options.out / "fused_choice.csv", COLUMNS), torch.cuda.Stream()
    for point in track(points, "measured", console=console):
        if time.perf_counter() - begin > options.seconds:
            console.print("out of time")
            break
        row = {"op": point.op.name, "m": point.m, "n": point.n, "k": point.k, "dtype": "bfloat16", "seed": seed}
        try:
            with torch.no_grad():
                row |= measure(point, options.rounds, stream)
        except Exception as failure:
            row["status"] = first_line(failure)
        table.add(row)
        torch.cuda.empty_cache()
    console.print(report(read(options.out / "fused_choice.csv")))
    return 0


def report(rows: Sequence[dict[str, str]]) -> str:
    """What today's choice loses to the best form."""
    lost = []
    for row in rows:
        times = [float(row[name]) for name in ("ours", "framework", "copied") if row[name]]
        if row["status"] == "ok":
            lost.append(min(times) / float(row["auto"]))
    return f"{len(lost)} points: auto {statistics.geometric_mean(lost):.3f} of the best form, least {min(lost):.2f}"


if __name__ == "__main__":
    sys.exit(main())
