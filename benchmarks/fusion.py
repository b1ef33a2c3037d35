"""Our kernels or Inductor's own fusion: graphs in which one or the other is faster, and what max-autotune takes.

Every graph is compiled four times: with our kernel kept, with Inductor's form of it, with max-autotune's choice
between the two, and as PyTorch itself writes it, without us. Forward without gradients, or, where it says so, one
backward of the graph.

    python benchmarks/fusion.py --out out/benchmarks
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._inductor.config
import torch.nn.functional as F
from common import Table, first_line, spread
from rich.console import Console
from rich.table import Table as View

import cute_ops_torch as ours

COLUMNS = ("graph", "rows", "n", "contender", "status", "us", "us_min", "us_max")
CONTENDERS = ("ours", "fused by Inductor", "max-autotune's choice", "torch's own")
EPS = 1e-6
Function = Callable[..., Any]


class Graph(NamedTuple):
    """One graph, in our ops and in torch's own.

    Attributes:
        name: what it computes.
        rows, n: of the bfloat16 tensors that it is called with.
        tensors: how many of them, without the weight, which comes last.
        ours: with our op.
        plain: the same without it.
        backward: time the gradient of it.
    """

    name: str
    rows: int
    n: int
    tensors: int
    ours: Function
    plain: Function
    backward: bool = False


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


GRAPHS = (
    Graph(
        "rmsnorm(x) * sigmoid(gate)", 16384, 8192, 2,
        lambda x, g, w: ours.rmsnorm(x, w, eps=EPS) * g.sigmoid(), lambda x, g, w: _norm(x, w) * g.sigmoid(),
    ),
    Graph(
        "rmsnorm(a + b + c)", 32768, 1024, 3,
        lambda a, b, c, w: ours.rmsnorm(a + b + c, w, eps=EPS), lambda a, b, c, w: _norm(a + b + c, w),
    ),
    Graph(
        "rmsnorm(x, 1 + weight)", 16384, 8192, 1,
        lambda x, w: ours.rmsnorm(x, 1 + w, eps=EPS), lambda x, w: _norm(x, 1 + w),
    ),
    Graph(
        "x + rmsnorm(y), odd rows", 16384, 4097, 2,
        lambda x, y, w: x + ours.rmsnorm(y, w, eps=EPS), lambda x, y, w: x + _norm(y, w),
    ),
    Graph(
        "softmax(x / 8)", 4096, 131072, 1, lambda x, w: ours.softmax(x / 8), lambda x, w: F.softmax(x / 8, -1),
    ),
    Graph(
        "x + layernorm(gelu(x))", 16384, 8192, 1,
        lambda x, w: x + ours.layernorm(F.gelu(x), w, eps=EPS),
        lambda x, w: x + F.layer_norm(F.gelu(x), x.shape[-1:], w, eps=EPS),
    ),
    Graph(
        "backward of rmsnorm(x) * gate", 4096, 32768, 2,
        lambda x, g, w: ours.rmsnorm(x, w, eps=EPS) * g, lambda x, g, w: _norm(x, w) * g, True,
    ),
)  # fmt: skip


def make(graph: Graph, contender: str, tensors: list[torch.Tensor]) -> Callable[[], Any]:
    """The compiled call. All form decisions are made while it runs for the first time."""
    from cute_ops_torch import _choice

    torch._dynamo.reset()
    function = graph.plain if contender == "torch's own" else graph.ours
    forced = {"ours": (0.0, 1.0), "fused by Inductor": (1.0, 0.0)}.get(contender)
    compiled = torch.compile(function, fullgraph=True, mode="max-autotune-no-cudagraphs")
    measured = (lambda *part: forced) if forced else _choice.measured
    # The backward is timed again and again, so it must not take memory that the forward has saved.
    donated = torch._functorch.config.patch(donated_buffer=False)
    # A cache would hand over what an earlier contender has compiled.
    afresh = torch._inductor.config.patch(force_disable_caches=True)
    with mock.patch.object(_choice, "measured", measured), donated, afresh:
        if not graph.backward:
            compiled(*tensors)
            return lambda: compiled(*tensors)
        leaves = [t.requires_grad_() for t in tensors]
        out = compiled(*leaves)
        dout = tensors[0].detach()
        torch.autograd.grad(out, leaves, dout, retain_graph=True)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def sampler(call: Callable[[], Any], calls: int) -> Callable[[], float]:
    """Microseconds per call on the device, of calls that take longer there than on the host. The tensors are larger
    than the caches together, so one set of them will do.
    """

    def sample() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / calls

    sample()
    return sample


def close(got: Any, expected: Any) -> bool:
    pairs = zip(*(v if isinstance(v, tuple) else (v,) for v in (got, expected)), strict=True)
    return all((a.float() - b.float()).norm() <= 0.02 * b.float().norm() for a, b in pairs)


def measure(graph: Graph, rounds: int, small: bool) -> list[dict[str, Any]]:
    rows, n = (8, 64 + graph.n % 2) if small else (graph.rows, graph.n)
    device = "cpu" if small else "cuda"
    torch.manual_seed(0)
    tensors = [torch.randn(rows, n, device=device, dtype=torch.bfloat16) for _ in range(graph.tensors)]
    tensors.append(torch.randn(n, device=device, dtype=torch.bfloat16))
    shared = {"graph": graph.name, "rows": rows, "n": n}
    made: dict[str, Any] = {}
    expected = None
    for contender in reversed(CONTENDERS):
        row = made[contender] = {**shared, "contender": contender}
        try:
            call = make(graph, contender, tensors)
            got = call()
            expected = got if expected is None else expected
            row["status"] = "ok" if close(got, expected) else "wrong"
            if not small:
                row["sample"] = sampler(call, 10)
        except Exception as failure:  # a contender's failure is a result
            row["status"] = f"failed: {first_line(failure)}"
    samples: dict[str, list[float]] = {name: [] for name in CONTENDERS if "sample" in made[name]}
    for _ in range(rounds):
        for name, values in samples.items():
            values.append(made[name]["sample"]())
    for name, values in samples.items():
        made[name] |= dict(zip(("us", "us_min", "us_max"), spread(values), strict=True))
    return [{k: v for k, v in made[name].items() if k != "sample"} for name in CONTENDERS]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for fusion.csv")
    parser.add_argument("--rounds", type=int, default=9, help="samples per contender")
    parser.add_argument("--graphs", nargs="*", type=int, default=range(len(GRAPHS)), help="numbers of graphs, from 0")
    parser.add_argument("--append", action="store_true", help="add to the file")
    parser.add_argument("--cpu-smoke", action="store_true", help="small tensors on the CPU: checks this file only")
    options = parser.parse_args(arguments)
    if not options.cpu_smoke and not torch.cuda.is_available():
        parser.error("no GPU here; --cpu-smoke checks the code paths")
    table = Table(options.out / "fusion.csv", COLUMNS, options.append)
    view = View("graph", *CONTENDERS, title="us per call, bfloat16")
    for index in options.graphs:
        rows = measure(GRAPHS[index], options.rounds, options.cpu_smoke)
        for row in rows:
            table.add(row)
        cells = [f"{row['us']:.1f}" if "us" in row else row["status"] for row in rows]
        view.add_row(f"{GRAPHS[index].name} {rows[0]['rows']}x{rows[0]['n']}", *cells)
    Console(width=120).print(view)


if __name__ == "__main__":
    main()
