"""Tables of what distributed.csv holds, for docs/distributed.md and the page of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common import markdown, read

Row = dict[str, str]
NOT_MEASURED = "Not measured yet: `python benchmarks/distributed.py` does so on two GPUs or more."


def section(folder: Path) -> str:
    """On what it was measured, then a table for each kind of case."""
    path = folder / "distributed.csv"
    rows = read(path) if path.exists() else []
    if not rows:
        return NOT_MEASURED
    commits = ", ".join(dict.fromkeys(r["commit"] for r in rows))
    first = rows[0]
    source = f"{first['gpus']} x {first['gpu']}; {first['versions']}; commit {commits}, {first['date']}."
    parts = [source, *(part for part in (steps(rows), calls(rows), in_jax(rows), checks(rows)) if part)]
    return "\n\n".join(parts)


def steps(rows: Sequence[Row]) -> str:
    """Training steps in PyTorch. In compiled layers the first contender is the one without ours."""
    found = [r for r in rows if r["phase"] in ("fsdp", "fsdp_compiled", "tensor_parallel")]
    header = ("training step in PyTorch", "ops", "ms", "tokens/s", "x", "peak GB of a GPU", "losses differ by")
    return table(header, found, ("peak_gb", "apart"))


def calls(rows: Sequence[Row]) -> str:
    header = ("forward and backward on DTensors", "ops", "ms", "x", "GB beyond the inputs", "error against float64")
    return table(header, [r for r in rows if r["phase"] == "products"], ("peak_gb", "error"), rates=False)


def in_jax(rows: Sequence[Row]) -> str:
    header = ("training step in JAX", "ops", "ms", "tokens/s", "x", "GB of temporaries", "error against float32")
    return table(header, [r for r in rows if r["phase"] == "jax"], ("peak_gb", "error"))


def checks(rows: Sequence[Row]) -> str:
    found = [r for r in rows if r["phase"] == "checks"]
    failed = [f"{r['case']} ({r['status']})" for r in found if r["status"] != "ok"]
    if not found:
        return ""
    said = f"{len(found) - len(failed)} of {len(found)} checks of values passed with NCCL"
    return f"{said}: not {', '.join(failed)}." if failed else f"{said}."


def table(header: Sequence[str], rows: Sequence[Row], columns: Sequence[str], rates: bool = True) -> str:
    """A line for each row, with its speed as a multiple of that of the case's first contender; empty without rows."""
    if not rows:
        return ""
    lines = []
    for r in rows:
        if r["status"] != "ok":
            rest = len(header) - 3
            lines.append((r["case"], r["contender"], r["status"].partition("\n")[0], *[""] * rest))
            continue
        first = next(o for o in rows if (o["phase"], o["case"]) == (r["phase"], r["case"]))
        ratio = f"{float(first['ms']) / float(r['ms']):.2f}" if first["status"] == "ok" else ""
        rate = [f"{float(r['tokens_per_s']):,.0f}"] if rates else []
        ms = f"{r['ms']} ({r['ms_min']} to {r['ms_max']})"
        lines.append((r["case"], r["contender"], ms, *rate, ratio, *map(short, (r[c] for c in columns))))
    return markdown(header, lines)


def short(number: str) -> str:
    return f"{float(number):.2g}" if number else ""
