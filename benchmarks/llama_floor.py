"""What no fusion removes of a training step of llama_step.py: its matrix products, its attention, what must move.

The operands are those of a step of the eager model that has trained for a while. Each part of it, in all layers, takes
the fastest of its ways: a product our kernel or cuBLAS, attention ours or cuDNN's. Then loops of steps take turns with
contenders of llama_step.py, which have processes of their own:

- `products`: nothing else; q, k and v are one product, gate and up are one, the head takes its rows in four parts;
- `products, attention`: with attention, forward and backward;
- `products, attention, bytes`: with PyTorch's fused AdamW, the rounding of the head's gradient, and a copy of a tensor
  for each pass that norms, rotations and the loss take over theirs.

Rows of `part` step are those turns: watts and MHz are NVML's of a whole turn, joules those of a step. The others are
the parts, hot. Where all draw the watts of the power limit, time is energy, and neither fusing nor launching better
makes a step faster than the last loop.

python benchmarks/llama_floor.py --out out/benchmarks
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import linear
import torch
import torch.nn.functional as F
from common import Spread, Table, parse, spread
from linear import CUBLAS, OURS, Call, Tensors
from llama_step import CONTENDERS, Steps, Trainer, Worker, in_drawn_order
from rich.console import Console
from tensor_cores import Driver
from torch.nn.attention import SDPBackend, sdpa_kernel

from cute_ops import Op
from cute_ops.jit import cache
from cute_ops.ops.gemm.linear import linear as product
from cute_ops.ops.gemm.linear import linear_dweight, linear_dx
from cute_ops_torch import attention
from cute_ops_torch.library.row_chunks import add_product
from cute_ops_torch.library.tensors import bind_tensors

COLUMNS = (
    "part", "contender", "batch", "seqlen", "ms", "ms_min", "ms_max", "tflops", "watts", "mhz", "joules",
)  # fmt: skip
GROUPS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",),
}  # fmt: skip
LOOPS = ("products", "products, attention", "products, attention, bytes")
BESIDE = ("Liger", "ours", "graph pass + compile")
CUDNN = "cuDNN"
# Parts of the head's rows; steps before the one whose operands are kept; steps of a part's sample.
CHUNKS, TRAINED, HOT_STEPS = 4, 12, 32


class Loop(Steps):
    """Steps of these calls, timed as a trainer's are."""

    def __init__(self, calls: Sequence[Call], of: Steps) -> None:
        self.calls, self.nothing = calls, torch.zeros(())
        super().__init__(of.run, of.inputs, of.optimizer, 1)

    def step(self) -> torch.Tensor:
        for call in self.calls:
            call()
        return self.nothing


class Floor:
    """The parts of a step: the calls of each by way, one for each layer, or for each chunk of the head."""

    def __init__(self, batch: int, seqlen: int, small: bool) -> None:
        self.trainer, self.attended = Trainer("eager", batch, seqlen, small), list[Tensors]()
        self.x, self.dy, self.out = (dict[Any, torch.Tensor]() for _ in range(3))
        self.ways, self.flops = defaultdict[str, dict[str, list[Call]]](lambda: defaultdict(list)), Counter[str]()
        for _ in range(TRAINED - len(self.trainer.losses)):
            self.trainer.step()
        self.record()
        weights = {name.removesuffix(".weight"): p.detach() for name, p in self.trainer.run.named_parameters()}
        for k in range(len(self.attended)):
            for group, members in GROUPS.items():
                names = [f"model.layers.{k}.{each}" for each in members]
                dy, weight = torch.cat([self.dy.pop(n) for n in names], 1), torch.cat([weights[n] for n in names])
                self.add(k, group, self.x[names[0]], dy, weight)
            for way in (OURS, CUDNN) if not small else (OURS,):
                self.ways["attention"][way].append(partial(self.both, way, k))
        self.hidden, self.weight = self.x["lm_head"], weights["lm_head"]
        self.sum = torch.empty_like(self.weight, dtype=torch.float32)
        for k, (x, dy) in enumerate(zip(self.hidden.chunk(CHUNKS), self.dy["lm_head"].chunk(CHUNKS), strict=True)):
            self.add(k, "head", x, dy, self.weight)
        self.best = {part: next(iter(ways)) for part, ways in self.ways.items()}
        for options in self.trainer.optimizer.param_groups:
            options["lr"] = 0.0  # steps read the gradients that are there and leave the weights

    def record(self) -> None:
        """What linear layers and attention are given in a step, and their outputs' gradients."""
        plain, heads = F.scaled_dot_product_attention, self.trainer.run.config.num_key_value_heads

        def layer(name: str, _: Any, given: tuple[torch.Tensor], out: torch.Tensor) -> None:
            self.x[name] = given[0].detach().flatten(0, -2)
            out.register_hook(lambda g: self.dy.update({name: g.flatten(0, -2).contiguous()}))

        def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any, **given: Any) -> torch.Tensor:
            out, each = plain(q, k, v, *more, **given), k.shape[1] // heads  # so often keys are repeated
            found = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in (q, k[:, ::each], v[:, ::each])]
            out.register_hook(lambda g: found.append(g.transpose(1, 2).contiguous()))
            self.attended.append(found)
            return out

        layers = ((name, m) for name, m in self.trainer.run.named_modules() if isinstance(m, torch.nn.Linear))
        hooks = [module.register_forward_hook(partial(layer, name)) for name, module in layers]
        with mock.patch.object(F, "scaled_dot_product_attention", attended):
            self.trainer.step()
        for hook in hooks:
            hook.remove()
        torch.cuda.empty_cache()  # contenders need it

    def add(self, k: int, group: str, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor) -> None:
        """The three products of a linear layer."""
        operands = {"": (x, weight), " dx": (dy, weight), " dw": (dy, x)}
        for (end, (first, second)), op in zip(operands.items(), (product, linear_dx, linear_dweight), strict=True):
            part, pair, (rows, columns) = group + end, [first, second], linear.matrices(op, first, second)
            self.flops[part] += 2 * rows.numel() * columns.shape[1]
            if part == "head dw":
                self.ways[part][CUBLAS].append(partial(add_product, self.sum, k == 0, dy.T, x))
                continue
            out = self.out[part, k] = x.new_empty(rows.shape[0], columns.shape[1])
            self.ways[part][CUBLAS].append(partial(linear.matrix_product, op, first, second, out))
            if out.is_cuda:
                self.ways[part][OURS].append(self.by_ours(op, pair, out))

    def by_ours(self, op: Op, pair: Tensors, out: torch.Tensor) -> Call:
        """Our kernel in the config that is chosen for it."""
        binding = bind_tensors(op, pair, [*linear.attributes(op).values()])
        (plan,) = linear.plans(binding, pair, None, {}).values()
        for built in cache.build_all([plan.variant]):
            if built.error is not None:
                raise built.error
        call = partial(linear.filling(binding, plan, out.device), *pair, out)
        call()
        first, second = linear.matrices(op, *pair)
        if wrong := linear.difference(out[:64], torch.mm(first[:64], second)):
            raise ValueError(wrong)
        return call

    def attend(self, way: str, layer: int) -> None:
        q, k, v = self.attended[layer][:3]
        if way == OURS:
            self.out["attention", layer] = attention(q, k, v, causal=True)[0]
            return
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        self.out["attention", layer] = out.transpose(1, 2)

    def unattend(self, k: int) -> None:
        torch.autograd.grad(self.out.pop(("attention", k)), self.attended[k][:3], self.attended[k][3])

    def both(self, way: str, k: int) -> None:
        self.attend(way, k)
        self.unattend(k)

    def contest(self, rounds: int) -> Iterator[dict[str, Any]]:
        """Finds the fastest way of each part; a row for each way of each."""
        self.loop(LOOPS[0]).sample(HOT_STEPS // 2)
        for part, ways in self.ways.items():
            loops = {way: Loop(calls, self.trainer) for way, calls in ways.items()}
            for k in range(rounds):
                for way in in_drawn_order([*loops], k):
                    loops[way].sample(HOT_STEPS)
            found = {way: spread(loop.times) for way, loop in loops.items()}
            self.best[part] = min(found, key=lambda way: found[way].median)
            for way, seconds in found.items():
                tflops = {"tflops": self.flops[part] / seconds.median / 1e12} if self.flops[part] else {}
                yield {"part": part, "contender": way, **milliseconds(seconds), **tflops}

    def loop(self, kind: str) -> Loop:
        """A step's calls in its order."""
        calls, layers = list[Call](), range(len(self.attended))

        def take(k: int, *parts: str) -> None:
            calls.extend(self.ways[part][self.best[part]][k] for part in parts)

        def move(*tensors: torch.Tensor) -> None:
            calls.extend(partial(torch.empty_like(t).copy_, t) for t in tensors if kind == LOOPS[2])

        def attend(call: Call) -> None:
            calls.extend([call] if kind != LOOPS[0] else [])

        for k in layers:
            move(self.hidden)
            take(k, "qkv")
            attend(partial(self.attend, self.best["attention"], k))
            take(k, "o")
            move(self.hidden)
            take(k, "gate_up", "down")
        move(self.hidden)
        for k in range(CHUNKS):
            take(k, "head")
            move(self.out["head", k])
            take(k, "head dx", "head dw")
        for k in reversed(layers):
            move(self.hidden, self.hidden)
            take(k, "down dx", "down dw", "gate_up dx", "gate_up dw")
            move(self.hidden, self.hidden)
            take(k, "o dx", "o dw")
            attend(partial(self.unattend, k))
            take(k, "qkv dx", "qkv dw")
            move(self.out["qkv", k])
        move(self.hidden, self.hidden)
        if kind == LOOPS[2]:
            rounded, embedding = torch.empty_like(self.weight), torch.empty_like(self.weight)
            calls += [partial(rounded.copy_, self.sum), embedding.zero_, self.trainer.optimizer.step]
        return Loop(calls, self.trainer)


def milliseconds(seconds: Spread) -> dict[str, float]:
    return {"ms": 1e3 * seconds.median, "ms_min": 1e3 * seconds.low, "ms_max": 1e3 * seconds.high}


def watched(call: Call, driver: Driver | None) -> tuple[float, float]:
    """Mean watts and median MHz of a call; NaN without a driver."""
    if driver is None:
        call()
        return math.nan, math.nan
    done = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(driver.watch, done)
        try:
            call()
        finally:
            done.set()
        return seen.result()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for llama_floor.csv")
    parser.add_argument("--contenders", nargs="*", default=list(BESIDE), choices=CONTENDERS, help="beside the loops")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=20, help="steps of one turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--warm", action="store_true", help="start all at once: what they compile is in caches")
    options = parse(parser, arguments, torch.cuda.is_available())
    given = ["--batch", str(options.batch), "--seqlen", str(options.seqlen), "--steps", str(options.steps)]
    given += ["--cpu-smoke"] if options.cpu_smoke else []
    starting = (Worker(contender, given) for contender in options.contenders)
    early = list(starting) if options.warm else []
    floor = Floor(options.batch, options.seqlen, options.cpu_smoke)
    workers = []
    for worker in chain(early, starting):  # else one after the other: Inductor measures as it compiles
        worker.ready()
        workers.append(worker)
    table, console = Table(options.out / "llama_floor.csv", COLUMNS), Console(soft_wrap=True)

    def add(row: dict[str, Any]) -> None:
        table.add({**row, "batch": options.batch, "seqlen": options.seqlen})
        console.print(", ".join(f"{v:.4g} {k}" if isinstance(v, float) else str(v) for k, v in row.items()))

    for row in floor.contest(options.rounds):
        add(row)
    loops = {kind: floor.loop(kind) for kind in LOOPS}
    turns: dict[str, Call] = {kind: partial(loop.sample, options.steps) for kind, loop in loops.items()}
    turns |= {worker.contender: worker.sample for worker in workers}
    driver = None if options.cpu_smoke else Driver()
    driven = defaultdict[str, list[tuple[float, float]]](list)
    for k in range(options.rounds):
        for name in in_drawn_order([*turns], k):
            driven[name].append(watched(turns[name], driver))
    times = {kind: milliseconds(spread(loop.times)) for kind, loop in loops.items()}
    for worker in workers:
        ended = worker.end()
        if isinstance(ended, str):
            console.print(f"{worker.contender}: failed\n{ended}")
            continue
        low, high = (1e3 * options.batch * options.seqlen / ended[f"tokens_per_s_{end}"] for end in ("max", "min"))
        times[worker.contender] = {"ms": ended["ms"], "ms_min": low, "ms_max": high}
    for name, ms in times.items():
        watts, mhz = (statistics.median(each) for each in zip(*driven[name], strict=True))
        read = {} if driver is None else {"watts": watts, "mhz": mhz, "joules": watts * ms["ms"] / 1e3}
        add({"part": "step", "contender": name, **ms, **read})
    return 0


if __name__ == "__main__":
    sys.exit(main())
