"""How far the heuristics' configs are from the fastest ones, on the benchmarks' grid.

Every problem of the grid is tuned as ``python -m cute_ops tune`` does it, from nothing. A row is a class of calls: what
the heuristic's config takes, what the winner takes, and by how much of its time the best one was ahead; where the
heuristic stays, what the best one promised in the first samples, which is partly luck. A row counts as long as the
heuristic and the kernel's sources are what they were.

    python benchmarks/tuning_gap.py --out out/benchmarks [--ops rmsnorm] [--append]
    python benchmarks/tuning_gap.py --out out/benchmarks --ship cute_ops/autotune/shipped/sm_90a.json
    python benchmarks/tuning_gap.py --out benchmarks/results --report    # measures nothing
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from common import ROOT, Table, read
from problems import BY_NAME, Problem, grid
from rich.console import Console

from cute_ops.autotune import tuner, winners
from cute_ops.autotune.types import Trial
from cute_ops.declaration.config import Config
from cute_ops.jit import target
from cute_ops.jit.layout import Memory
from cute_ops.ops import OPS, PARTS

COLUMNS = (
    "call", "rows", "status", "us", "us_tuned", "gain", "change", "heuristic", "config", "tried", "refused", "sources",
)  # fmt: skip
NEAR = 0.03  # a heuristic should be as near to the fastest of its candidates
RATES = ROOT / "benchmarks" / "results" / "device_time.csv"
SM90 = "sm_90a:132"  # an H200, where --report is asked for
STAGES = {stage.name: stage for op in (*OPS, *PARTS) for stage in (op, *op.steps)}
Row = Mapping[str, str]


def trials(ops: list[str]) -> list[Trial]:
    """The calls of the grid, those that are the furthest from a copy's rate by the last results first."""
    rates: dict[tuple[str, ...], float] = {}
    for row in read(RATES) if RATES.exists() else []:
        if row["contender"] == "ours (torch)" and row["of_copy"]:
            key = tuple(row[name] for name in ("op", "direction", "rows", "n", "dtype"))
            rates[key] = min(rates.get(key, 1.0), float(row["of_copy"]))

    def rate(call: tuple[Problem, str]) -> float:
        problem, direction = call
        return rates.get((problem.op, direction, str(problem.rows), str(problem.n), problem.dtype), 0.0)

    # Compact and cold ones are of the same classes as the others.
    calls = [(p, direction) for p in grid(ops) if not (p.strided or p.hot) for direction in p.directions]
    return [Trial(p.binding(direction), dict[str, Memory]()) for p, direction in sorted(calls, key=rate)]


def classes(ops: list[str], on: target.Target) -> list[winners.Key]:
    return [group.key for group in tuner.grouped(trials(ops), on)]


def current(rows: Iterable[Row], among: Iterable[winners.Key]) -> list[Row]:
    """The last row of each class that is as it was when it was measured."""
    found = {winner(row).key: row for row in rows if row["sources"] == sources(row["call"])}
    return [found[key] for key in among if key in found]


def sources(call: str) -> str:
    stage = STAGES.get(call.partition(" ")[0])
    return winners.sources_of(stage) if stage else ""


def config(text: str) -> dict[str, int | str]:
    words = (word.partition("=") for word in text.split())
    return {name: int(value) if value.isdecimal() else value for name, _, value in words}


def show(config: Config) -> str:
    return " ".join(f"{name}={value}" for name, value in winners.items(config))


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split()]


def winner(row: Row) -> winners.Winner:
    """What a row of the table says, as the package ships it."""
    measured = {
        "us": [list(pair) for pair in zip(numbers(row["us"]), numbers(row["us_tuned"]), strict=True)],
        "rows": [int(rows) for rows in row["rows"].split()],
        **{name: row[name] for name in ("gpu", "date", "commit", "sources")},
    }
    return winners.Winner(row["call"], config(row["heuristic"]), config(row["config"]), measured)


def ship(rows: Iterable[Row], where: Path) -> None:
    """Write the winners, those that serve few rows and many only where both were measured."""
    tuned = [row for row in rows if row["status"] == "tuned"]
    good = [row for row in tuned if "rows" in row["call"].split()[-1] or len(row["rows"].split()) > 1]
    where.parent.mkdir(exist_ok=True)
    where.write_text(winners.dump(map(winner, good)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"))
    parser.add_argument("--ops", nargs="+", default=list(BY_NAME), choices=list(BY_NAME))
    parser.add_argument("--ship", type=Path, help="write the winners to this file")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no class of calls after so many seconds")
    parser.add_argument("--report", action="store_true", help="measure nothing: read the table of an earlier run")
    parser.add_argument("--append", action="store_true", help="measure only what the file of an earlier run lacks")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    path = options.out / "tuning_gap.csv"
    on = target.parse(SM90) if options.report else target.of_device()
    wanted = classes(options.ops, on)
    if not options.report:
        measure(options.ops, path, options.append, options.seconds, on, console)
    rows = current(read(path), wanted)
    gaps = [(float(row["gain"]) * (row["status"] == "tuned"), row["call"]) for row in rows if row["us"]]
    console.print(f"{len(gaps)} of {len(wanted)} classes of calls are measured")
    if gaps:
        far = [f"  {gap:.1%} {call}" for gap, call in gaps if gap > NEAR]
        console.print(
            f"the heuristic is within {NEAR:.0%} of tuned in {len(gaps) - len(far)} of them, "
            f"the mean gap is {statistics.mean(gap for gap, _ in gaps):.2%}, the largest {max(gaps)[0]:.1%}"
        )
        console.print("\n".join(far))
    if options.ship:
        ship(rows, options.ship)


def measure(ops: list[str], path: Path, append: bool, seconds: float, on: target.Target, console: Console) -> None:
    begin = time.perf_counter()
    calls = trials(ops)
    earlier = current(read(path), classes(ops, on)) if append and path.exists() else []
    known = {found.key: found for found in map(winner, (row for row in earlier if row["us"]))}
    table = Table(path, COLUMNS, append=append)
    left = 0

    def groups(found: int) -> None:
        nonlocal left
        left = found

    outcomes = tuner.tune(calls, on, tuner.bench(), known=known, done=lambda text: None, groups=groups)
    for outcome in outcomes:
        left -= 1
        found, refused = outcome.winner, outcome.refused
        table.add({
            "call": found.call, "rows": " ".join(map(str, found.measured.get("rows", ()))),
            "status": outcome.problem or ("tuned" if outcome.changed else "heuristic"),
            "us": " ".join(f"{us:.2f}" for us in outcome.before),
            "us_tuned": " ".join(f"{us:.2f}" for us in outcome.after),
            "gain": f"{outcome.gain:.4f}", "change": tuner.changes(found), "heuristic": show(found.heuristic),
            "config": show(found.config), "tried": outcome.tried,
            "refused": "; ".join(f"{show(dict(config))}: {why}" for config, why in refused.items()),
            "sources": sources(found.call),
        })  # fmt: skip
        console.print(f"{time.perf_counter() - begin:5.1f} s  {found.call}\n         {tuner.describe(outcome)}")
        if time.perf_counter() - begin > seconds:
            console.print(f"the time is over: {left} classes are left")
            break
    outcomes.close()


if __name__ == "__main__":
    main()
