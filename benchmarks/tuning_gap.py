"""How far the heuristics' tiles are from the fastest of their candidates, on the benchmarks' grid.

Every problem of the grid is tuned as ``python -m cute_ops tune`` does it, from nothing. A row is a class of calls: what
the heuristic's tile takes, what the winner takes, and by how much of its time the best candidate was ahead; of a class
whose heuristic stays, what the best candidate promised in the first samples, which is partly luck.

    python benchmarks/tuning_gap.py --out out/benchmarks [--ops rmsnorm] [--ship cute_ops/tuned/sm_90a.json]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from common import Table
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"))
    parser.add_argument("--ops", nargs="+", default=list(BY_NAME), choices=list(BY_NAME))
    parser.add_argument("--ship", type=Path, help=f"add winners that gain at least {SHIPPED_GAIN:.0%} to this file")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no class of calls after so many seconds")
    parser.add_argument("--append", action="store_true", help="add rows to the file of an earlier run")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    table = Table(options.out / "tuning_gap.csv", COLUMNS, append=options.append)
    begin, gaps, number = time.perf_counter(), [], 0

    def groups(found: int) -> None:
        nonlocal number
        number = found

    outcomes = tuner.tune(
        trials(options.ops), target.of_device(), tuner.measurer(), anew=True, done=lambda text: None, groups=groups
    )
    for count, outcome in enumerate(outcomes, 1):
        winner, refused = outcome.winner, outcome.refused
        table.add({
            "call": winner.call, "rows": " ".join(map(str, winner.measured.get("rows", ()))),
            "status": outcome.problem or ("tuned" if outcome.changed else "heuristic"),
            "us": " ".join(f"{us:.2f}" for us in outcome.before),
            "us_tuned": " ".join(f"{us:.2f}" for us in outcome.after),
            "gain": f"{outcome.gain:.4f}", "change": tuner.changes(winner),
            "heuristic": " ".join(f"{k}={v}" for k, v in winner.heuristic.items()),
            "tile": " ".join(f"{k}={v}" for k, v in winner.tile.items()), "tried": outcome.tried,
            "refused": "; ".join(f"{dict(tile)}: {why}" for tile, why in refused.items()),
        })  # fmt: skip
        console.print(f"{time.perf_counter() - begin:5.1f} s  {winner.call}\n         {tuner.describe(outcome)}")
        if not outcome.problem:
            gaps.append(outcome.gain if outcome.changed else 0.0)
        if options.ship and outcome.changed and outcome.gain >= SHIPPED_GAIN:
            tuning.remember([winner], options.ship)
        if time.perf_counter() - begin > options.seconds:
            console.print(f"the time is over: {number - count} classes are left")
            break
    outcomes.close()
    if gaps:
        far = sum(gap > SHIPPED_GAIN for gap in gaps)
        console.print(
            f"{len(gaps)} classes of calls: the heuristic is within {SHIPPED_GAIN:.0%} of tuned in {len(gaps) - far}, "
            f"the mean gap is {statistics.mean(gaps):.2%}, the largest {max(gaps):.1%}"
        )


if __name__ == "__main__":
    main()
