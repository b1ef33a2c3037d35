"""Our kernels or Inductor's own fusion: graphs in which one or the other is faster, and what max-autotune takes.

"ours" and "fused by Inductor" are the two forms of a graph as max-autotune itself compiles and times them before it
chooses; `took` says which one that was. Its choice, and the graph as PyTorch writes it without us, are compiled and
timed from outside: forward without gradients or, where it says so, the backward alone.

    python benchmarks/fusion.py --out out/benchmarks
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._inductor.config
import torch.nn.functional as F
from common import Table, first_line, parse, spread
from rich.console import Console
from rich.table import Table as View

import cute_ops_torch as ours
from cute_ops_torch.tools.measure import elapsed

COLUMNS = ("graph", "rows", "n", "contender", "status", "us", "us_min", "us_max", "took")
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


def _target(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0], device=x.device) % x.shape[-1]


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
        "x + rmsnorm(y), odd rows", 16384, 4097, 2,
        lambda x, y, w: x + ours.rmsnorm(y, w, eps=EPS), lambda x, y, w: x + _norm(y, w),
    ),
    Graph(
        "rmsnorm(x, 1 + weight)", 2048, 131072, 1,
        lambda x, w: ours.rmsnorm(x, 1 + w, eps=EPS), lambda x, w: _norm(x, 1 + w),
    ),
    Graph(
        "cross_entropy(x) * mask", 4096, 131072, 1,
        lambda x, w: ours.cross_entropy(x, _target(x), reduction="none") * (_target(x) > 7),
        lambda x, w: F.cross_entropy(x.float(), _target(x), reduction="none") * (_target(x) > 7),
    ),
    Graph("softmax(x / 8)", 4096, 131072, 1, lambda x, w: ours.softmax(x / 8), lambda x, w: F.softmax(x / 8, -1)),
    Graph(
        "backward of rmsnorm(x) * gate", 16384, 8192, 2,
        lambda x, g, w: ours.rmsnorm(x, w, eps=EPS) * g, lambda x, g, w: _norm(x, w) * g, True,
    ),
)  # fmt: skip


def make(graph: Graph, function: Function, tensors: list[torch.Tensor]) -> Callable[[], Any]:
    """The compiled call. All choices are made while it runs for the first time."""
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, mode="max-autotune-no-cudagraphs")
    # A cache would leave nothing to choose. The backward is timed again and again, so it must not take memory that the
    # forward has saved.
    afresh = torch._inductor.config.patch(force_disable_caches=True)
    with afresh, torch._functorch.config.patch(donated_buffer=False):
        if not graph.backward:
            compiled(*tensors)
            return lambda: compiled(*tensors)
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = compiled(*leaves)
        dout = tensors[0]
        torch.autograd.grad(out, leaves, dout, retain_graph=True)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def sampler(call: Callable[[], Any], calls: int) -> Callable[[], float]:
    """Microseconds per call on the device, of calls that take longer there than on the host. The tensors are larger
    than the caches together, so one set of them will do.
    """

    def all_calls() -> None:
        for _ in range(calls):
            call()

    def sample() -> float:
        return elapsed(all_calls) / calls

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
    from cute_ops_torch.inductor import fusion_choice

    rows_of = {
        name: {"graph": graph.name, "rows": rows, "n": n, "contender": name, "status": "ok"} for name in CONTENDERS
    }
    fusion_choice._known.clear()
    expected, samples = None, {}
    for name, function in (("torch's own", graph.plain), ("max-autotune's choice", graph.ours)):
        try:
            call = make(graph, function, tensors)
            got = call()
            expected = got if expected is None else expected
            if not close(got, expected):
                rows_of[name]["status"] = "wrong"
            if not small:
                samples[name] = (sampler(call, 10), [])
        except Exception as failure:  # a contender's failure is a result
            rows_of[name]["status"] = f"failed: {first_line(failure)}"
    for _ in range(rounds):
        for sample, values in samples.values():
            values.append(sample())
    for name, (_, values) in samples.items():
        rows_of[name] |= dict(zip(("us", "us_min", "us_max"), spread(values), strict=True))
    timed = list(fusion_choice._known.values())[-1:]  # of the backward, which comes after the forward
    for k, name in enumerate(CONTENDERS[:2]):
        rows_of[name] |= {"us": timed[0][k] * 1e3} if timed else {"status": "not timed"}
    if timed:
        rows_of[CONTENDERS[2]]["took"] = CONTENDERS[fusion_choice.fused_wins(*timed[0])]
    return list(rows_of.values())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for fusion.csv")
    parser.add_argument("--rounds", type=int, default=9, help="samples per contender")
    parser.add_argument("--graphs", nargs="*", type=int, default=range(len(GRAPHS)), help="numbers of graphs, from 0")
    parser.add_argument("--append", action="store_true", help="add to the file")
    options = parse(parser, arguments, torch.cuda.is_available())
    table = Table(options.out / "fusion.csv", COLUMNS, options.append)
    view = View("graph", *CONTENDERS, title="us per call, bfloat16")
    for index in options.graphs:
        rows = measure(GRAPHS[index], options.rounds, options.cpu_smoke)
        for row in rows:
            table.add(row)
        cells = [f"{row['us']:.1f}" if "us" in row else row["status"] for row in rows]
        cells[2] += f" ({rows[2]['took']})" if "took" in rows[2] else ""
        view.add_row(f"{GRAPHS[index].name} {rows[0]['rows']}x{rows[0]['n']}", *cells)
    Console(width=120).print(view)


if __name__ == "__main__":
    main()
