"""The loss of a linear head, forward and backward: time and peak memory, ours beside the others.

All contenders take the same hidden states, weight and targets, in turns, in one process; a sample is one forward and
backward, timed by events. `peak_mb` is what the call holds beyond its inputs at most, the gradients that it returns
among them. `loss` and `relative_error` (of the hidden states' gradient, against ours) say that they compute the same.
A second table, linear_cross_entropy_error.csv, has the errors of the weight's gradient against float64 in more and more
chunks of a small problem, summed in float32 and in bfloat16.

    python benchmarks/linear_cross_entropy.py --out out/benchmarks
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from common import Table, first_line, parse, read, spread
from rich.console import Console
from rich.table import Table as View

from cute_ops_torch.tools.measure import elapsed

COLUMNS = (
    "contender", "rows", "hidden", "vocabulary", "dtype", "status", "ms", "ms_min", "ms_max", "peak_mb", "loss",
    "relative_error",
)  # fmt: skip
SHAPES = ((16384, 2048, 128256), (16384, 4096, 32000), (8192, 2304, 256000))
OURS = "ours (torch)"
IN_BFLOAT16, LIGER_IN_FLOAT32 = "ours, summed in bfloat16", "Liger, summed in float32"
ERROR_COLUMNS = ("accum_dtype", "rows", "hidden", "vocabulary", "chunks", "relative_error")
ERROR_SHAPE = (4096, 64, 512)
CHUNKS = (1, 16, 64, 256)
TOLERANCE = 0.05  # of a bfloat16 gradient whose products are summed in another order; a wrong one is off by 1
Tensor = torch.Tensor
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Run = Callable[[], Tensor | tuple[Tensor, ...]]


def contenders() -> dict[str, Callable[[], Loss]]:
    """Makers of losses by name; a maker may raise where its package is missing."""

    def ours() -> Loss:
        from cute_ops_torch import linear_cross_entropy

        return linear_cross_entropy

    def in_bfloat16() -> Loss:
        return partial(ours(), accum_dtype=torch.bfloat16)

    def liger() -> Callable[..., Tensor]:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return lambda hidden, weight, target, **more: liger_fused_linear_cross_entropy(hidden, weight, target, **more)

    def liger_in_float32() -> Loss:
        return partial(liger(), accum_dtype=torch.float32)

    def quack() -> Loss:
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        return lambda hidden, weight, target: chunked_linear_cross_entropy(hidden, weight, target)

    def eager() -> Loss:
        return lambda hidden, weight, target: F.cross_entropy((hidden @ weight.t()).float(), target)

    def compiled() -> Loss:
        return torch.compile(eager())

    return {
        OURS: ours, IN_BFLOAT16: in_bfloat16, "Liger": liger, LIGER_IN_FLOAT32: liger_in_float32, "quack": quack,
        "torch.compile": compiled, "torch eager": eager,
    }  # fmt: skip


def inputs(rows: int, hidden: int, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of a norm's size, a weight as models begin with, targets: logits of the size 1."""
    generator = torch.Generator(device).manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": device, "generator": generator}
    x = torch.randn(rows, hidden, **options).requires_grad_()  # type: ignore[call-overload]
    weight = torch.randn(vocabulary, hidden, **options).mul_(hidden**-0.5).requires_grad_()  # type: ignore[call-overload]
    return x, weight, torch.randint(vocabulary, (rows,), device=device, generator=generator)


def measure(table: Table, shape: tuple[int, int, int], device: torch.device, rounds: int, names: list[str]) -> None:
    x, weight, target = inputs(*shape, device)

    def of(make: Callable[[], Loss]) -> Run:
        return partial(make(), x, weight, target)

    makers = {name: partial(of, make) for name, make in contenders().items() if name in names}
    in_turns(table, dict(zip(("rows", "hidden", "vocabulary"), shape, strict=True)), makers, x, weight, rounds)


def in_turns(
    table: Table, case: Mapping[str, object], makers: Mapping[str, Callable[[], Run]], x: Tensor, weight: Tensor,
    rounds: int,
) -> None:  # fmt: skip
    """Add a row for each contender, which take turns.

    Args:
        case: the columns that all rows share.
        makers: of losses of ``x`` and ``weight`` by contender; one may raise where its package is missing. Errors are
            against the gradient of the first that runs.
    """
    runs: dict[str, Callable[[], Tensor]] = {}
    found: dict[str, dict[str, object]] = {}
    expected: Tensor | None = None
    for name, make in makers.items():
        row = found[name] = {**case, "contender": name, "dtype": "bfloat16", "status": "ok"}
        try:
            runs[name] = run = partial(step, make(), x, weight)
            for _ in range(2):
                row["loss"] = run().item()
            assert x.grad is not None
            expected = x.grad.float() if expected is None else expected
            error = ((x.grad.float() - expected).norm() / expected.norm()).item()
            row["relative_error"] = error
            if not error <= TOLERANCE:
                row["status"] = f"wrong: relative error {error:.2g}"
            row["peak_mb"] = peak(run, x, weight)
        except Exception as failure:  # a contender's failure is a result
            row["status"] = "not available" if isinstance(failure, ImportError) else f"failed: {first_line(failure)}"
            runs.pop(name, None)
        x.grad = weight.grad = None
        gc.collect()
        if x.device.type == "cuda":
            torch.cuda.empty_cache()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds if x.device.type == "cuda" else 0):
        for name, run in runs.items():
            samples[name].append(elapsed(run) / 1e3)
    for name, row in found.items():
        if samples.get(name):
            ms = spread(samples[name])
            row |= {"ms": ms.median, "ms_min": ms.low, "ms_max": ms.high}
        table.add(row)


def step(loss: Run, x: Tensor, weight: Tensor) -> Tensor:
    x.grad = weight.grad = None
    value = loss()
    value = value[0] if isinstance(value, tuple) else value
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


def errors(table: Table, shape: tuple[int, int, int], device: torch.device) -> None:
    """The weight's gradient against float64, by chunks and what it is summed in."""
    from cute_ops_torch import linear_cross_entropy

    x, weight, target = inputs(*shape, device)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    (exact,) = torch.autograd.grad(F.cross_entropy(wide[0] @ wide[1].t(), target), wide[1])
    for accum_dtype in (torch.float32, torch.bfloat16):
        for chunks in CHUNKS:
            rows = max(shape[0] // chunks, 1)
            loss = linear_cross_entropy(x, weight, target, chunk_rows=rows, accum_dtype=accum_dtype)
            (found,) = torch.autograd.grad(loss, weight)
            error = ((found.double() - exact).norm() / exact.norm()).item()
            table.add(dict(zip(ERROR_COLUMNS, (str(accum_dtype), *shape, chunks, error), strict=True)))


def peak(run: Callable[[], Tensor], x: Tensor, weight: Tensor) -> float:
    """Megabytes beyond the inputs."""
    if x.device.type != "cuda":
        return 0.0
    x.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def show(path: Path, console: Console) -> None:
    view = View("contender", "rows", "hidden", "vocabulary", "ms", "peak MB", "loss", title="loss of a linear head")
    for row in read(path):
        view.add_row(*(row[c] for c in ("contender", "rows", "hidden", "vocabulary")), row["ms"] or row["status"],
                     row["peak_mb"], row["loss"])  # fmt: skip
    console.print(view)
    errors = View("summed in", "chunks", "relative error", title="the weight's gradient against float64")
    for row in read(path.with_name("linear_cross_entropy_error.csv")):
        errors.add_row(row["accum_dtype"], row["chunks"], row["relative_error"])
    console.print(errors)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for linear_cross_entropy.csv")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each")
    parser.add_argument("--contenders", nargs="+", default=list(contenders()), choices=list(contenders()))
    options = parse(parser, arguments, torch.cuda.is_available())
    device = torch.device("cpu" if options.cpu_smoke else "cuda")
    path = options.out / "linear_cross_entropy.csv"
    table = Table(path, COLUMNS)
    for shape in ((64, 32, 512),) if options.cpu_smoke else SHAPES:
        measure(table, shape, device, options.rounds, options.contenders)
    table = Table(options.out / "linear_cross_entropy_error.csv", ERROR_COLUMNS)
    errors(table, (64, 32, 64) if options.cpu_smoke else ERROR_SHAPE, device)
    show(path, Console(width=110))


if __name__ == "__main__":
    main()
