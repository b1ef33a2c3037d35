"""What attention to caches could reach at most: its kernels with parts switched off, beside themselves and a copy.

Of caches in bfloat16 and in float8_e4m3fn, in turns that each round draws anew:

- `ours`, as in decode.py;
- `loads`: the same copies into the same shared memory, which nobody reads;
- `loads, pages in order`: likewise of a table whose pages follow one another;
- `copy` of one of both caches, which reads and writes as much as ours reads.

`gbps` and `of_copy` are those of decode.py; `of_loads` is the time of `loads` by that of a contender: what reads these
addresses in this way and does no more. Of latents, hot: each alone for a second, samples of 20 ms from the second half
of it; watts and MHz are NVML's:

- `ours`;
- `products, exponentials`: shared memory is loaded once, and multiplied as often as ours does;
- `products`: nor are scores exponentiated.

    python benchmarks/decode_floor.py --out out/benchmarks
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Table, parse_for_gpu, spread
from decode import AHEAD, LATENT, LATENT_SCALE, LLAMA, RANK, ROTATED, Caches, Latent, Shape
from linear import sampler
from rich.console import Console
from tensor_cores import HOT_SAMPLE_US, Driver, both_orders

from cute_ops import Op
from cute_ops.declaration.binding import Binding
from cute_ops.jit import source_digest, target
from cute_ops.jit.plan import Plan, plan
from cute_ops.ops.attention.decode_attention import decode_attention
from cute_ops.ops.attention.mla_decode import mla_decode
from cute_ops_torch.host.launch import planned_call
from cute_ops_torch.library.tensors import bind_tensors, memory
from cute_ops_torch.tools.measure import elapsed

COLUMNS = (
    "contender", "dtype", "batch", "keys", "heads", "kv_heads", "headdim", "page", "queries", "us", "us_min", "us_max",
    "gbps", "of_copy", "of_loads", "tflops", "watts", "mhz",
)  # fmt: skip
# Shapes, and whether caches are float8.
SHAPES = (
    (Shape(8, 8192, 32, 8, 128), True), (Shape(8, 8192, 32, 8, 128), False), (Shape(1, 131072, 32, 8, 128), True),
    (Shape(1, 131072, 32, 8, 128, 16), True), (LLAMA, True), (LLAMA._replace(page=16), True), (LLAMA, False),
    (Shape(64, 8192, 64, 8, 128, 0, 4), True), (Shape(64, 8192, 64, 8, 128, 16, 4), True),
)  # fmt: skip
PRODUCTS = {"ours": "", "products, exponentials": "latent_products", "products": "latent_products_alone"}
CALLS = 8  # of a sample
Tensors = tuple[torch.Tensor | None, ...]
Run = Callable[[], Any]


def plan_of(op: Op, tensors: Tensors, attrs: dict[str, Any], kernel: str = "") -> tuple[Binding, Plan]:
    """A call of an op, and its plan, by a kernel of decode_floor_kernels.py if one is named."""
    binding = bind_tensors(op, tensors, [attrs.get(name, op.attrs[name]) for name in op.keywords])
    found = plan(binding, memory(op, tensors), target.of_device())
    if kernel:
        name = f"decode_floor_kernels:{kernel}"
        found = found._replace(variant=found.variant._replace(kernel=name, sources=source_digest.key(name)))
    return binding, found


def run_of(op: Op, tensors: Tensors, attrs: dict[str, Any], kernel: str = "") -> Run:
    binding, found = plan_of(op, tensors, attrs, kernel)
    outputs = [
        torch.empty(made.shape, dtype=getattr(torch, made.dtype), device="cuda")
        for made in binding.outputs.values() if made is not None
    ]  # fmt: skip
    given = [x for x in tensors if x is not None]
    return partial(planned_call(binding, found, torch.device("cuda")).fill(tuple(op.outputs)), *given, *outputs)


def measure(shape: Shape, eight: bool, rounds: int, table: Table, console: Console) -> None:
    q, k, v, lengths, pages = Caches.of(shape, "cuda")
    if eight:
        k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
    scales = (torch.ones(shape.kv_heads, device="cuda"),) * 2 if eight else (None, None)
    call = partial(run_of, decode_attention)
    tensors = q, k, v, lengths, pages, None, *scales
    copied = torch.empty_like(k)
    runs = {
        "ours": call(tensors, {}), "loads": call(tensors, {}, "loads"), "copy": lambda: copied.copy_(k),
    }  # fmt: skip
    if pages is not None:
        in_order = torch.arange(pages.numel(), dtype=pages.dtype, device="cuda").reshape(pages.shape)
        runs["loads, pages in order"] = call((q, k, v, lengths, in_order, None, *scales), {}, "loads")
    samples: dict[str, list[float]] = {name: [] for name in runs}
    draw = random.Random(0)
    for round_ in range(rounds + 1):
        for name in draw.sample([*runs], len(runs)):
            torch.cuda._sleep(AHEAD)
            us = elapsed(lambda name=name: [runs[name]() for _ in range(CALLS)]) / CALLS
            samples[name] += [us] if round_ else []
    moved, found = k.nbytes + v.nbytes, {name: spread(each) for name, each in samples.items()}
    for name, us in found.items():
        row = {
            "contender": name, "dtype": "float8" if eight else "bfloat16", **shape._asdict(), "us": us.median,
            "us_min": us.low, "us_max": us.high, "gbps": moved / us.median / 1e3,
            "of_copy": found["copy"].median / us.median, "of_loads": found["loads"].median / us.median,
        }  # fmt: skip
        table.add(row)
        console.print(f"{row['dtype']} {shape}: {name} {us.median:.1f} us, {row['of_copy']:.3f} of a copy, "
                      f"{row['of_loads']:.3f} of loads")  # fmt: skip


def measure_latents(shape: Latent, table: Table, console: Console) -> None:
    b, keys, heads, page, queries = shape
    generator = torch.Generator("cuda").manual_seed(0)
    given: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    pages = b * keys // page
    q, cache = (torch.randn(*lead, RANK + ROTATED, **given) for lead in ((b, queries, heads), (pages, page)))
    pages_of = torch.randperm(pages, device="cuda", generator=generator, dtype=torch.int32).reshape(b, -1)
    tensors = q, cache, torch.full((b,), keys, device="cuda", dtype=torch.int32), pages_of
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    runs = {name: run_of(mla_decode, tensors, {"scale": LATENT_SCALE}, kernel) for name, kernel in PRODUCTS.items()}
    samplers = {(name, ""): sampler([run], stream, HOT_SAMPLE_US) for name, run in runs.items()}
    sizes = {"batch": b, "keys": keys, "heads": heads, "kv_heads": 1, "headdim": RANK + ROTATED, "page": page}
    for (name, _), reading in both_orders(samplers, Driver()).items():
        us = spread(reading.us)
        tflops = 2 * b * keys * heads * queries * (2 * RANK + ROTATED) / us.median / 1e6
        row = {"contender": name, "dtype": "bfloat16", **sizes, "queries": queries, "us": us.median, "us_min": us.low,
               "us_max": us.high, "tflops": tflops, "watts": reading.watts, "mhz": reading.mhz}  # fmt: skip
        table.add(row)
        power = f"{reading.watts:.0f} W, {reading.mhz:.0f} MHz"
        console.print(f"{shape}: {name} {us.median:.1f} us, {tflops:.0f} TFLOPS, {power}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for decode_floor.csv")
    parser.add_argument("--rounds", type=int, default=9, help="samples per contender")
    every, latents = [*range(len(SHAPES))], range(len(LATENT))
    parser.add_argument("--shapes", nargs="*", type=int, default=every, choices=every, help="of the list of shapes")
    parser.add_argument("--latent", nargs="*", type=int, default=[2], choices=latents, help="of decode.py's latents")
    options = parse_for_gpu(parser, arguments, torch.cuda.is_available())
    table, console = Table(options.out / "decode_floor.csv", COLUMNS), Console(soft_wrap=True)
    for index in options.shapes:
        measure(*SHAPES[index], options.rounds, table, console)
    for index in options.latent:
        measure_latents(LATENT[index], table, console)


if __name__ == "__main__":
    main()
