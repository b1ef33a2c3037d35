"""Attention with masks of padded batches: ``F.scaled_dot_product_attention`` in a program, with the graph pass and
without it.

Queries, keys and values are bfloat16, views of (batch, seqlen, heads, headdim); the program computes the mask from one
of tokens, as transformers does, with or without the condition of causal models. A third to all of a sequence's tokens
are there. ``forward`` is a call without gradients, ``both`` one with them and its gradients. The time is the device's,
of calls behind a pause in which the host gets ahead. ``error`` is the largest difference of the output and the
gradients of the first sequence's first keys' head from float64, as a part of the largest value. All shapes compile at
once, each in a process of its own; they are measured one after the other, contenders in turns.

python benchmarks/masked_attention.py --out out/benchmarks [--shapes 0 3]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import Table, parse, spread
from llama_step import READY, Worker
from rich.console import Console

from cute_ops_torch import inductor
from cute_ops_torch.tools.measure import elapsed

Tensor = torch.Tensor
COLUMNS = (
    "contender", "direction", "batch", "seqlen", "heads", "kv_heads", "headdim", "form", "status", "us", "us_min",
    "us_max", "error",
)  # fmt: skip
CONTENDERS = EAGER, COMPILED, OURS = "eager", "torch.compile", "graph pass + compile"
DIRECTIONS = "forward", "both"
LEAST = 0.02  # seconds of a sample
MOST = 16  # calls of one
AHEAD = 1 << 25  # cycles before one, in which the host launches its calls


class Shape(NamedTuple):
    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    headdim: int
    form: str

    def inputs(self, device: str) -> list[Tensor]:
        """Queries, keys, values, and which tokens are there."""
        make = torch.Generator().manual_seed(self.batch * self.seqlen)
        b, s, h, g, d, _ = self
        tensors = [torch.randn(b, s, n, d, generator=make) for n in (h, g, g)]
        lengths = torch.randint(s // 3, s + 1, (b,), generator=make)
        lengths[0] = s - s // 5
        there = (torch.arange(s) < lengths[:, None]).long().to(device)
        return [*(t.to(device, torch.bfloat16).transpose(1, 2).requires_grad_() for t in tensors), there]


PADDED, BOTH = "padding", "causal, padding"
SHAPES = (
    Shape(4, 2048, 32, 8, 128, BOTH), Shape(8, 512, 16, 16, 64, PADDED), Shape(8, 512, 32, 8, 128, BOTH),
    Shape(2, 4096, 16, 16, 128, BOTH), Shape(16, 384, 16, 16, 64, PADDED), Shape(1, 8192, 32, 8, 128, BOTH),
    Shape(32, 128, 12, 12, 64, PADDED), Shape(8, 1000, 16, 8, 64, BOTH), Shape(3, 1531, 20, 20, 128, BOTH),
    Shape(16, 1500, 20, 20, 64, PADDED),
)  # fmt: skip
SMALL = Shape(2, 40, 4, 2, 64, BOTH)


def attend(q: Tensor, k: Tensor, v: Tensor, there: Tensor, causal: bool) -> Tensor:
    seen = there[:, None, None, :] > 0
    if causal:
        at = torch.arange(q.shape[-2], device=q.device)
        seen = seen & (at[:, None] >= at)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(2)


class Attention:
    """A shape's contenders, compiled and warm."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device, causal = shape, device, shape.form == BOTH
        *self.given, self.there = shape.inputs(device)
        torch.manual_seed(0)
        self.dout = torch.randn(shape.batch, shape.seqlen, shape.heads * shape.headdim, device=device).bfloat16()
        self.runs: dict[str, Callable[..., Tensor]] = {}
        self.status = dict.fromkeys(CONTENDERS, "ok")
        for name in CONTENDERS:

            def run(*given: Tensor) -> Tensor:
                return attend(*given, causal)

            run.__code__ = run.__code__.replace(co_name=name)  # else Dynamo takes what it compiled for another one
            self.runs[name] = run if name == EAGER else torch.compile(run, fullgraph=True, dynamic=False)
            on = inductor.enable(devices=(device,)) if name == OURS else contextlib.nullcontext()
            with on:
                for direction in DIRECTIONS:
                    self.call(name, direction)
        if not inductor.replaced["attention"]:
            self.status[OURS] = f"left to torch: {inductor.report()}"

    def call(self, name: str, direction: str) -> Any:
        if direction == "forward":
            with torch.no_grad():
                return self.runs[name](*self.given, self.there)
        out = self.runs[name](*self.given, self.there)
        return out, *torch.autograd.grad(out, self.given, self.dout)

    def error(self, name: str) -> float:
        """Of the first sequence's queries that share keys, and those keys."""
        _, s, h, g, d, form = self.shape
        heads = (h // g, 1, 1)
        wide = [t.detach()[:1, :n].double().requires_grad_() for t, n in zip(self.given, heads, strict=True)]
        right = attend(*wide, self.there[:1], form == BOTH)
        toward = self.dout[:1].view(1, s, h, d)[:, :, : h // g].flatten(2)
        expected = [right, *torch.autograd.grad(right, wide, toward.double())]
        out, *grads = self.call(name, "both")
        same = out[:1].view(1, s, h, d)[:, :, : h // g].flatten(2)
        pairs = zip([same, *(t[:1, :n] for t, n in zip(grads, heads, strict=True))], expected, strict=True)
        return max(float((a.double() - e).abs().max() / e.abs().max()) for a, e in pairs)

    def rows(self, rounds: int) -> list[dict[str, Any]]:
        rows, errors = [], {name: self.error(name) for name in CONTENDERS}
        for direction in DIRECTIONS:
            samples: dict[str, list[float]] = {name: [] for name in CONTENDERS}
            for _ in range(rounds):
                for name, found in samples.items():
                    found.append(self.sample(name, direction))
            for name, found in samples.items():
                us, low, high = spread(found)
                shown = self.shape._asdict() | {"contender": name, "direction": direction, "error": errors[name]}
                rows.append(shown | {"status": self.status[name], "us": us, "us_min": low, "us_max": high})
        return rows

    def sample(self, name: str, direction: str) -> float:
        """Microseconds of a call."""
        if self.device == "cpu":
            self.call(name, direction)
            return 1.0
        once = elapsed(lambda: self.call(name, direction)) / 1e6
        calls = max(1, min(MOST, round(LEAST / once)))
        torch.cuda._sleep(AHEAD)
        return elapsed(lambda: [self.call(name, direction) for _ in range(calls)]) / calls


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for masked_attention.csv")
    numbers = range(len(SHAPES))
    parser.add_argument("--shapes", nargs="+", type=int, choices=numbers, default=list(numbers), help="their numbers")
    parser.add_argument("--rounds", type=int, default=7, help="samples")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--in-turns", action="store_true", help=argparse.SUPPRESS)
    options = parse(parser, arguments, torch.cuda.is_available())
    if options.one is not None:
        small = options.cpu_smoke
        attention = Attention(SMALL if small else SHAPES[options.one], "cpu" if small else "cuda")
        print(READY, flush=True)
        sys.stdin.read()  # until its turn
        print(json.dumps(attention.rows(options.rounds)))
        return 0

    console, table = Console(width=150), Table(options.out / "masked_attention.csv", COLUMNS)
    passed_on = ["--rounds", str(options.rounds), *(["--cpu-smoke"] if options.cpu_smoke else [])]
    workers = [Worker(str(k), passed_on, __file__) for k in options.shapes]
    for worker in workers:  # all have compiled before the first is measured
        worker.ready()
    failed = False
    for worker in workers:
        found: Any = worker.end()
        if isinstance(found, str):
            console.print(f"{SHAPES[int(worker.contender)]}: failed\n{found}", highlight=False)
            failed = True
            continue
        for row in found:
            table.add(row)
            console.print(" ".join(f"{each:.4g}" if isinstance(each, float) else str(each) for each in row.values()))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
