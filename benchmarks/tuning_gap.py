"""How far the heuristics' tiles are from the fastest of their candidates, on the benchmarks' grid.

Every problem of the grid is tuned as ``python -m cute_ops tune`` does it, from nothing. A row is a class of calls: what
the heuristic's tile takes, what the winner takes, and by how much of its time the best candidate was ahead; of a class
whose heuristic stays, what the best candidate promised in the first samples, which is partly luck.

    python benchmarks/tuning_gap.py --out out/benchmarks [--ops rmsnorm] [--append] [--ship cute_ops/tuned/sm_90a.json]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from common import Table, read
from problems import BY_NAME, grid
from rich.console import Console

from cute_ops import target, tuner, tuning
from cute_ops.plan import Memory

COLUMNS = (
    "call", "rows", "status", "us", "us_tuned", "gain", "change", "heuristic", "tile", "tried", "refused",
)  # fmt: skip
SHIPPED_GAIN = 0.03  # less is not worth a kernel that differs from the heuristic's


def trials(ops: list[str]) -> Iterator[tuner.Trial]:
    for problem in grid(ops):
        if problem.strided or problem.hot:
            continue  # the same classes as compact and cold ones
        for direction in problem.directions:
            yield tuner.Trial(problem.binding(direction), dict[str, Memory]())


def config(text: str) -> dict[str, int]:
    return {name: int(value) for name, _, value in (word.partition("=") for word in text.split())}


def show(tile: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in tuning.config(tile))


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split()]


def winner(row: Mapping[str, str]) -> tuning.Winner:
    """What a row of the table says, as the package ships it."""
    measured = {
        "us": [list(pair) for pair in zip(numbers(row["us"]), numbers(row["us_tuned"]), strict=True)],
        "rows": [int(rows) for rows in row["rows"].split()],
        **{name: row[name] for name in ("gpu", "date", "commit")},
    }
    return tuning.Winner(row["call"], config(row["heuristic"]), config(row["tile"]), measured)


def ship(rows: list[dict[str, str]], where: Path) -> None:
    """Write the winners that are worth it: they gain enough, and on few rows and many where they serve both."""
    good = [
        row
        for row in rows
        if row["status"] == "tuned"
        and float(row["gain"]) >= SHIPPED_GAIN
        and ("rows" in row["call"].split()[-1] or len(row["rows"].split()) > 1)
    ]
    where.parent.mkdir(exist_ok=True)
    where.write_text(tuning.dump(map(winner, good)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"))
    parser.add_argument("--ops", nargs="+", default=list(BY_NAME), choices=list(BY_NAME))
    parser.add_argument("--ship", type=Path, help=f"write winners that gain at least {SHIPPED_GAIN:.0%} to this file")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no class of calls after so many seconds")
    parser.add_argument("--ship-only", action="store_true", help="measure nothing: write the file from the table")
    parser.add_argument("--append", action="store_true", help="measure only what the file of an earlier run lacks")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    path = options.out / "tuning_gap.csv"
    if options.ship_only:
        return ship(read(path), options.ship)
    earlier = read(path) if options.append and path.exists() else []
    known = {found.key: found for found in map(winner, earlier)}
    table = Table(path, COLUMNS, append=options.append)
    left = 0

    def groups(found: int) -> None:
        nonlocal left
        left = found

    begin = time.perf_counter()
    outcomes = tuner.tune(
        trials(options.ops), target.of_device(), tuner.examiner(), known=known, done=lambda text: None, groups=groups
    )
    for outcome in outcomes:
        left -= 1
        found, refused = outcome.winner, outcome.refused
        table.add({
            "call": found.call, "rows": " ".join(map(str, found.measured.get("rows", ()))),
            "status": outcome.problem or ("tuned" if outcome.changed else "heuristic"),
            "us": " ".join(f"{us:.2f}" for us in outcome.before),
            "us_tuned": " ".join(f"{us:.2f}" for us in outcome.after),
            "gain": f"{outcome.gain:.4f}", "change": tuner.changes(found), "heuristic": show(found.heuristic),
            "tile": show(found.tile), "tried": outcome.tried,
            "refused": "; ".join(f"{show(dict(tile))}: {why}" for tile, why in refused.items()),
        })  # fmt: skip
        console.print(f"{time.perf_counter() - begin:5.1f} s  {found.call}\n         {tuner.describe(outcome)}")
        if time.perf_counter() - begin > options.seconds:
            console.print(f"the time is over: {left} classes are left")
            break
    outcomes.close()
    rows = read(path)
    gaps = [float(row["gain"]) if row["status"] == "tuned" else 0.0 for row in rows if row["us"]]
    if gaps:
        far = sum(gap > SHIPPED_GAIN for gap in gaps)
        console.print(
            f"{len(gaps)} classes of calls: the heuristic is within {SHIPPED_GAIN:.0%} of tuned in {len(gaps) - far}, "
            f"the mean gap is {statistics.mean(gaps):.2%}, the largest {max(gaps):.1%}"
        )
    if options.ship:
        ship(rows, options.ship)


if __name__ == "__main__":
    main()
