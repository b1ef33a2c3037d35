"""Attention to caches: ours, in JAX too, beside PyTorch's SDPA, FlashInfer and FlashMLA, and a copy of as many bytes.

All contenders read the same keys and values in bfloat16, in one process, in turns that each round draws anew; caches
are larger than L2. `gbps` is the keys and values of all sequences, which are read once, by time; of the copy, what it
reads and writes. `of_copy` is the ratio of both; caches in float8 are half as many bytes, with scales of one. SDPA
takes contiguous caches of equal lengths alone, FlashInfer pages of its own layout, planned before. `host_us` is the
time until a call returns. `error` is the largest difference from float32 in the last sequence. Rows of more than 16
queries are chunks of a prompt, which `attention` computes; "no cache" is ours of the same keys as they lie in a batch.
JAX's time is by the clock, of many calls less those of a few.

    python benchmarks/decode.py --out out/benchmarks
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import Table, by_clock, first_line, parse, spread
from rich.console import Console
from rich.table import Table as View

import cute_ops_torch
from cute_ops_torch.tools.measure import elapsed

COLUMNS = (
    "contender", "batch", "keys", "heads", "kv_heads", "headdim", "page", "queries", "status", "us", "us_min", "us_max",
    "gbps", "of_copy", "tflops", "host_us", "error",
)  # fmt: skip
FLOAT8, JAX, MOST_QUERIES = "ours, float8", "ours, JAX", 16
AHEAD = 1 << 20  # cycles that the device waits, so that the host is ahead of it: `host_us` says what that takes
Tensor = torch.Tensor
Run = Callable[[], Tensor]


class Shape(NamedTuple):
    """``page``: slots of a page; 0 of contiguous caches."""

    batch: int
    keys: int
    heads: int
    kv_heads: int
    headdim: int
    page: int = 0
    queries: int = 1


LLAMA = Shape(64, 8192, 32, 8, 128)
SHAPES = (
    LLAMA, *(LLAMA._replace(page=page) for page in (1, 16, 64, 128)), LLAMA._replace(queries=4),
    Shape(1, 131072, 32, 8, 128), Shape(1, 131072, 32, 8, 128, 16), Shape(256, 1024, 32, 8, 128),
    Shape(256, 1024, 32, 8, 128, 16), Shape(8, 8192, 32, 8, 128), Shape(64, 8192, 64, 8, 64),
    Shape(64, 4096, 16, 8, 256), Shape(64, 8192, 16, 16, 128), Shape(64, 8192, 64, 8, 128, 16, 4),
    # Chunks of prompts.
    Shape(4, 8192, 32, 8, 128, 0, 1024), Shape(4, 8192, 32, 8, 128, 16, 1024), Shape(4, 8192, 32, 8, 128, 128, 1024),
    Shape(1, 32768, 32, 8, 128, 16, 2048),
)  # fmt: skip


class Latent(NamedTuple):
    """Multi-head latent attention: latents of 512 and 64 elements, pages of ``page`` slots."""

    batch: int
    keys: int
    heads: int
    page: int = 64
    queries: int = 1


LATENT = (
    Latent(64, 8192, 16),
    Latent(64, 8192, 32),
    Latent(64, 8192, 128),
    Latent(64, 8192, 16, 1),
    Latent(1, 65536, 128),
)
RANK, ROTATED, LATENT_SCALE = 512, 64, 192**-0.5


class Caches(NamedTuple):
    """Queries, keys and values of equal lengths, and pages in any order."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    table: Tensor | None

    @classmethod
    def of(cls, shape: Shape, device: str) -> Caches:
        b, keys, heads, kv_heads, d, page, queries = shape
        generator = torch.Generator(device).manual_seed(0)
        given: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": generator}
        pages = b * keys // page if page else b
        q = torch.randn(b, queries, heads, d, **given)
        k, v = (torch.randn(pages, page or keys, kv_heads, d, **given) for _ in range(2))
        table = None
        if page:
            table = torch.randperm(pages, device=device, generator=generator, dtype=torch.int32).reshape(b, -1)
        return cls(q, k, v, torch.full((b,), keys, device=device, dtype=torch.int32), table)

    def sequence(self, index: int) -> tuple[Tensor, Tensor]:
        """Its keys and values."""
        if self.table is None:
            return self.k[index], self.v[index]
        pages = self.table[index].long()
        return self.k[pages].flatten(0, 1), self.v[pages].flatten(0, 1)


def by_jax(function: Any, *tensors: Tensor | None) -> Run:
    """A call of a jitted function of JAX with these arrays, whose memory is theirs."""
    import jax

    arrays = [None if x is None else jax.dlpack.from_dlpack(x.contiguous()) for x in tensors]
    compiled = jax.jit(function)
    return lambda: compiled(*arrays)[0]


def chunks(shape: Shape, caches: Caches) -> dict[str, Callable[[], Run]]:
    """What makes the calls of a prompt's chunk."""
    q, k, v, lengths, table = caches

    def ours() -> Run:
        return lambda: cute_ops_torch.attention(q, k, v, causal=True, lengths=lengths, page_table=table)[0]

    def jax() -> Run:
        import cute_ops_jax

        def attend(q: Any, k: Any, v: Any, lengths: Any, table: Any) -> Any:
            return cute_ops_jax.attention(q, k, v, causal=True, lengths=lengths, page_table=table)

        return by_jax(attend, q, k, v, lengths, table)

    def side_by_side() -> list[Tensor]:
        return [torch.stack(each) for each in zip(*map(caches.sequence, range(shape.batch)), strict=True)]

    def sdpa() -> Run:
        from torch.nn.attention.bias import causal_lower_right

        heads_first = [x.transpose(1, 2) for x in (q, *side_by_side())]
        mask = causal_lower_right(shape.queries, shape.keys)
        return lambda: F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    def no_cache() -> Run:
        keys, values = side_by_side()
        return lambda: cute_ops_torch.attention(q, keys, values, causal=True)[0]

    return {"ours": ours, JAX: jax, "ours, no cache": no_cache, "SDPA": sdpa}


def contenders(shape: Shape, caches: Caches) -> dict[str, Callable[[], Run]]:
    """What makes each one's call."""
    if shape.queries > MOST_QUERIES:
        return chunks(shape, caches)
    q, k, v, lengths, table = caches

    def ours(**options: Any) -> Run:
        return lambda: cute_ops_torch.decode_attention(q, k, v, lengths, table, **options)[0]

    def jax() -> Run:
        import cute_ops_jax

        return by_jax(cute_ops_jax.decode_attention, q, k, v, lengths, table)

    def sdpa() -> Run:
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        queries, keys = shape.queries, shape.keys
        mask = None
        if queries > 1:
            mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        return lambda: F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    def flashinfer() -> Run:
        import flashinfer

        size = shape.page or 16
        pages = [x.reshape(-1, size, shape.kv_heads, shape.headdim) for x in (k, v)]
        each = shape.keys // size
        in_order = torch.arange(len(pages[0]), device=q.device, dtype=torch.int32)
        indices = in_order if table is None else table.reshape(-1)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device=q.device), "NHD", use_tensor_cores=True
        )
        if shape.queries > 1:
            raise NotImplementedError("one query")
        starts = torch.arange(shape.batch + 1, device=q.device, dtype=torch.int32) * each
        last = torch.full((shape.batch,), size, device=q.device, dtype=torch.int32)
        wrapper.plan(
            starts, indices, last, shape.heads, shape.kv_heads, shape.headdim, size, q_data_type=q.dtype,
            kv_data_type=q.dtype,
        )  # fmt: skip
        return lambda: wrapper.run(q[:, 0], tuple(pages))[:, None]

    def eights() -> Run:
        caches = [x.to(torch.float8_e4m3fn) for x in (k, v)]
        scale = torch.ones(1, device=q.device).expand(shape.kv_heads)
        return lambda: cute_ops_torch.decode_attention(q, *caches, lengths, table, None, scale, scale)[0]

    found = {
        "ours": ours,
        JAX: jax,
        FLOAT8: eights,
        "ours, batch-invariant": lambda: ours(batch_invariant=True),
        "FlashInfer": flashinfer,
    }
    return found | ({} if shape.page else {"SDPA": sdpa})


def error(shape: Shape, caches: Caches, out: Tensor) -> float:
    """The largest difference in the last sequence."""
    k, v = (x.transpose(0, 1).float() for x in caches.sequence(-1))
    q, queries = caches.q[-1].transpose(0, 1).float(), shape.queries
    mask = torch.ones(queries, shape.keys, dtype=torch.bool, device=q.device).tril(shape.keys - queries)
    right = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)[0]
    return (out[-1].transpose(0, 1).float() - right).abs().max().item()


def host_time(run: Run) -> float:
    """Microseconds until a call returns; the device is idle before each few."""
    samples = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            run()
        samples.append((time.perf_counter() - start) / 5 * 1e6)
    return spread(samples).median


def timed(run: Run, in_jax: bool = False) -> float:
    """Microseconds of one of some calls."""
    if in_jax:
        return by_clock(run, lambda out: out.block_until_ready(), 16 if torch.cuda.is_available() else 1)
    if torch.cuda.is_available():
        torch.cuda._sleep(AHEAD)
        return elapsed(lambda: [run() for _ in range(8)]) / 8
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6


def in_turns(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Samples of each, in turns whose order each round draws anew."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample([*runs], len(runs)):
            samples[name].append(timed(runs[name], name == JAX))
    return samples


def measure(table: Table, view: View, shape: Shape, rounds: int, device: str) -> None:
    caches, runs, rows = Caches.of(shape, device), dict[str, Run](), dict[str, dict[str, Any]]()
    for name, make in contenders(shape, caches).items():
        row = rows[name] = {"contender": name, **shape._asdict(), "status": "ok"}
        try:
            run = make()
            row["error"] = error(shape, caches, torch.from_dlpack(run()) if name == JAX else run())
            if device == "cuda":
                row["host_us"] = host_time(run)
            runs[name] = run
        except Exception as failure:  # a contender's failure is a result
            row["status"] = f"failed: {first_line(failure)}"
    target = torch.empty_like(caches.k)
    runs["copy"] = lambda: target.copy_(caches.k)
    rows["copy"] = {"contender": "copy", **shape._asdict(), "status": "ok"}
    samples = in_turns(runs, rounds)
    # A copy reads one of both caches and writes as much.
    moved = 2 * shape.batch * shape.keys * shape.kv_heads * shape.headdim * caches.k.itemsize
    rate = moved / spread(samples["copy"]).median
    for name, row in rows.items():
        if samples.get(name):
            us, read = spread(samples[name]), moved / 2 if name == FLOAT8 else moved
            row |= {"us": us.median, "us_min": us.low, "us_max": us.high, "gbps": read / us.median / 1e3}
            row["of_copy"] = read / us.median / rate
            if shape.queries > MOST_QUERIES and name != "copy":
                scores = shape.queries * (shape.keys - (shape.queries - 1) / 2)
                row["tflops"] = 4 * shape.batch * shape.heads * shape.headdim * scores / us.median / 1e6
        table.add(row)
        view.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in (row.get(c, "") for c in COLUMNS)))


def measure_latent(table: Table, view: View, shape: Latent, rounds: int, device: str) -> None:
    b, keys, heads, page, queries = shape
    generator = torch.Generator(device).manual_seed(0)
    given: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": generator}
    pages = b * keys // page
    q, cache = (torch.randn(*lead, RANK + ROTATED, **given) for lead in ((b, queries, heads), (pages, page)))
    pages_of = torch.randperm(pages, device=device, generator=generator, dtype=torch.int32).reshape(b, -1)
    lengths = torch.full((b,), keys, device=device, dtype=torch.int32)

    def flash_mla() -> Run:
        import flash_mla

        plan = flash_mla.get_mla_metadata(lengths, queries * heads, 1)
        return lambda: flash_mla.flash_mla_with_kvcache(
            q, cache[:, :, None], pages_of, lengths, RANK, *plan, softmax_scale=LATENT_SCALE, causal=True
        )[0]

    target = torch.empty_like(cache)

    def jax() -> Run:
        import cute_ops_jax

        return by_jax(partial(cute_ops_jax.mla_decode, scale=LATENT_SCALE), q, cache, lengths, pages_of)

    makes: dict[str, Callable[[], Run]] = {
        "ours": lambda: lambda: cute_ops_torch.mla_decode(q, cache, lengths, pages_of, scale=LATENT_SCALE)[0],
        JAX: jax,
        "FlashMLA": flash_mla,
        "copy": lambda: lambda: target.copy_(cache),
    }
    latents = cache[pages_of[-1].long()].flatten(0, 1).float()
    scores = q[-1].float().transpose(0, 1) @ latents.t() * LATENT_SCALE
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    right = (scores.masked_fill(~seen, -math.inf).softmax(-1) @ latents[:, :RANK]).transpose(0, 1)
    runs, rows = dict[str, Run](), dict[str, dict[str, Any]]()
    sizes = {"batch": b, "keys": keys, "heads": heads, "kv_heads": 1, "headdim": RANK + ROTATED, "page": page}
    for name, make in makes.items():
        row = rows[name] = {"contender": name, **sizes, "queries": queries, "status": "ok"}
        try:
            runs[name] = make()
            out = torch.from_dlpack(runs[name]()) if name == JAX else runs[name]()
            if name != "copy":
                row["error"] = (out[-1].float() - right).abs().max().item()
                if device == "cuda":
                    row["host_us"] = host_time(runs[name])
        except Exception as failure:  # a contender's failure is a result
            row["status"] = f"failed: {first_line(failure)}"
            runs.pop(name, None)
    samples = in_turns(runs, rounds)
    moved = b * keys * (RANK + ROTATED) * 2
    for name, row in rows.items():
        if name in runs:
            us, read = spread(samples[name]), 2 * moved if name == "copy" else moved
            row |= {"us": us.median, "us_min": us.low, "us_max": us.high, "gbps": read / us.median / 1e3}
            row["of_copy"] = row["gbps"] * spread(samples["copy"]).median * 1e3 / (2 * moved)
            if name != "copy":
                row["tflops"] = 2 * b * keys * heads * queries * (2 * RANK + ROTATED) / us.median / 1e6
        table.add(row)
        view.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in (row.get(c, "") for c in COLUMNS)))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for decode.csv")
    parser.add_argument("--rounds", type=int, default=9, help="samples per contender")
    for name, listed in {"shapes": SHAPES, "latent": LATENT}.items():
        every, what = [*range(len(listed))], f"those with these numbers in {name.upper()}"
        parser.add_argument(f"--{name}", nargs="*", type=int, default=every, choices=every, help=what)
    options = parse(parser, arguments, torch.cuda.is_available())
    table, view = Table(options.out / "decode.csv", COLUMNS), View(*COLUMNS, title="attention to caches")
    for index in options.shapes:
        shape = SHAPES[index]
        if options.cpu_smoke:
            shape = shape._replace(batch=2, keys=256, headdim=32, queries=min(shape.queries, 24))
        measure(table, view, shape, 1 if options.cpu_smoke else options.rounds, "cpu" if options.cpu_smoke else "cuda")
    for index in options.latent:
        latent = LATENT[index]
        if options.cpu_smoke:
            latent = latent._replace(batch=2, keys=128)
        measure_latent(
            table, view, latent, 1 if options.cpu_smoke else options.rounds, "cpu" if options.cpu_smoke else "cuda"
        )
    Console(width=200).print(view)


if __name__ == "__main__":
    main()
