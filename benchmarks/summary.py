"""What the figures of device_time.csv come to: geometric means, the points that are short, who is ahead where.
Where they are beside it, host_time.csv against its aims, who wins the graphs of fusion.csv, the training steps and the
loss of a linear head.

    python benchmarks/summary.py benchmarks/results [--write benchmarks/results/summary.md]

A point is an op, a shape, a dtype and a direction. The aims are those that the project has set itself for an H200.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import markdown, read
from contenders import ALL

OURS, OURS_JAX, XLA, COMPILED = "ours (torch)", "ours (JAX)", "XLA (jit)", "torch.compile"
OTHERS = tuple(name for name in ALL if not name.startswith("ours"))
LARGE = 128e6  # bytes
SMALL_ROWS = 64
BEHIND = 0.03
SHARE = {"fwd": 0.93, "bwd": 0.85}  # of the copy rate, at every large point
MEAN = {"fwd": 0.95, "bwd": 0.90}  # its geometric mean
TITLES = {"fwd": "forward", "bwd": "backward"}
ON_CHIP, BYTES_ALONE = ROW_FLOORS = "without DRAM", "bytes alone"  # kernels of row_floor.py


@dataclass
class Point:
    """One problem in one direction.

    Attributes:
        us: median per contender that gave a right result.
        status: of those that did not.
    """

    name: str
    op: str
    direction: str
    rows: int
    bytes: int
    us: dict[str, float]
    share: dict[str, float]
    status: dict[str, str]

    @property
    def large(self) -> bool:
        return self.bytes >= LARGE

    @property
    def small(self) -> bool:
        return self.rows <= SMALL_ROWS

    def best(self) -> tuple[str, float] | None:
        """The fastest of the others."""
        others = [(self.us[name], name) for name in OTHERS if name in self.us]
        return min(others)[::-1] if others else None

    def ahead(self, other: str, ours: str = OURS) -> float | None:
        """By what factor ours is faster than another contender."""
        return self.us[other] / self.us[ours] if other in self.us and ours in self.us else None

    def ahead_of_best(self) -> float | None:
        best = self.best()
        return self.ahead(best[0]) if best else None


def points(rows: Iterable[dict[str, str]]) -> list[Point]:
    """Of the same point and contender the last row counts."""
    found: dict[str, Point] = {}
    for row in rows:
        if row["op"] == "copy":
            continue
        kinds = " ".join(f"{k}={row[c]}" for k, c in (("W", "weight"), ("R", "residual")) if row[c] != row["dtype"])
        words = (f"{row['rows']}x{row['n']}", row["dtype"], kinds, "" if row["layout"] == "flat" else row["layout"])
        title = TITLES.get(row["direction"], row["direction"])
        name = " ".join(word for word in (row["op"], title, *words) if word)
        point = found.setdefault(
            name, Point(name, row["op"], row["direction"], int(row["rows"]), int(row["bytes"]), {}, {}, {})
        )
        who = row["contender"]
        for known in (point.us, point.share, point.status):
            known.pop(who, None)
        if row["status"] == "ok":
            point.us[who], point.share[who] = float(row["us"]), float(row["of_copy"])
        else:
            point.status[who] = row["status"]
    return list(found.values())


def mean(values: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(values):.3f}" if values else "not measured"


def given(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def overview(found: Sequence[Point]) -> str:
    """A line per aim."""
    lines: list[tuple[str, str, str, str]] = []

    def line(what: str, aim: str, figure: str, count: int) -> None:
        lines.append((what, aim, figure, str(count)))

    ours = [p for p in found if OURS in p.us]
    line("points with ours", "60", str(len(ours)), len(found))
    for direction, title in TITLES.items():
        of = [p for p in ours if p.direction == direction]
        large = [p for p in of if p.large]
        shares = [p.share[OURS] for p in large]
        line(f"{title}, 128 MB and more: part of the copy rate", f"{MEAN[direction]:.2f}", mean(shares), len(large))
        under = [p for p in large if p.share[OURS] < SHARE[direction]]
        line(f"{title}, 128 MB and more: points under {SHARE[direction]:.0%}", "none", str(len(under)), len(large))
        some = given(p.ahead_of_best() for p in of)
        aim = {"fwd": "", "bwd": "1.25"}[direction]
        line(f"{title}: speed over the best other contender", aim, mean(some), len(some))
    very_low = [p for p in ours if p.large and p.share[OURS] < 0.85]
    line("128 MB and more: points under 85%", "none", str(len(very_low)), sum(p.large for p in ours))
    compared = [p for p in ours if p.best()]
    line(f"points more than {BEHIND:.0%} behind the best", "none", str(len(behind(compared))), len(compared))
    small = [p for p in compared if p.small]
    slower = [p for p in small if (p.ahead_of_best() or 1) < 1]
    line(f"{SMALL_ROWS} rows and fewer: points behind the best", "none", str(len(slower)), len(small))
    over = given(p.ahead(XLA) for p in ours)
    line("speed over XLA", "1.6", mean(over), len(over))
    for direction, aim in (("fwd", "1.6"), ("bwd", "1.8")):
        of_jax = given(p.ahead(XLA, OURS_JAX) for p in found if p.large and p.direction == direction)
        line(f"JAX, {TITLES[direction]}, 128 MB and more: speed over XLA", aim, mean(of_jax), len(of_jax))
    both = [p for p in found if p.ahead(OURS, OURS_JAX)]
    for what, some_points in (("", [p for p in both if p.large]), (", smaller", [p for p in both if not p.large])):
        ratios = [p.us[OURS_JAX] / p.us[OURS] for p in some_points]
        slow = sum(ratio > 1 + BEHIND for ratio in ratios)
        line(f"JAX{what or ', 128 MB and more'}: time over PyTorch's", "1.03", largest(ratios, slow), len(ratios))
    return markdown(("", "aim", "measured", "of points"), lines)


def of_expressions(found: Sequence[Point]) -> str:
    """What expressions.csv comes to."""
    lines: list[tuple[str, ...]] = []

    def line(what: str, values: Sequence[float]) -> None:
        if values:
            lines.append((what, mean(values), f"{min(values):.3f}", str(len(values))))

    for direction, title in TITLES.items():
        of = [p for p in found if p.direction == direction and OURS in p.us]
        line(f"{title}, 128 MB and more: part of the copy rate", [p.share[OURS] for p in of if p.large])
        line(f"{title}, smaller: part of the copy rate", [p.share[OURS] for p in of if not p.large])
        for other in (COMPILED, XLA):
            line(f"{title}: speed over {other}", given(p.ahead(other) for p in of))
    compared = [p for p in found if OURS in p.us and p.best()]
    if compared:
        late = str(len(behind(compared)))
        lines.append((f"points more than {BEHIND:.0%} behind the faster of them", late, "", str(len(compared))))
    return markdown(("", "geometric mean", "worst", "points"), lines)


def largest(ratios: Sequence[float], over: int) -> str:
    return f"at most {max(ratios):.3f}, {over} over" if ratios else "not measured"


def behind(found: Iterable[Point]) -> list[Point]:
    return [p for p in found if (p.ahead_of_best() or 1) < 1 / (1 + BEHIND)]


def table(found: Iterable[Point], order: Callable[[Point], float]) -> str:
    rows = []
    for p in sorted(found, key=order):
        best = p.best()
        other = f"{best[0]} {best[1]:.2f}" if best else ""
        ratio = p.ahead_of_best()
        rows.append((p.name, f"{p.us[OURS]:.2f}", f"{p.share[OURS]:.1%}", other, f"{ratio:.3f}" if ratio else ""))
    return markdown(("point", "ours, us", "of copy", "best other, us", "ours is faster by"), rows) if rows else "None."


def by_op(found: Sequence[Point]) -> str:
    rows = []
    for op, direction in dict.fromkeys((p.op, p.direction) for p in found):
        of = [p for p in found if (p.op, p.direction) == (op, direction) and OURS in p.us]
        shares = [p.share[OURS] for p in of if p.large]
        ratios = given(p.ahead_of_best() for p in of)
        jax = given(p.ahead(XLA, OURS_JAX) for p in of)
        worst = (f"{min(v):.3f}" if v else "" for v in (shares, ratios, jax))
        means = (mean(v) if v else "" for v in (shares, ratios, jax))
        pairs = (f"{m} ({w})" if m else "" for m, w in zip(means, worst, strict=True))
        rows.append((f"{op} {TITLES[direction]}", str(len(of)), *pairs))
    header = ("geometric mean (worst)", "points", "of copy, 128 MB and more", "over the best other", "JAX over XLA")
    return markdown(header, rows)


def failures(found: Sequence[Point]) -> str:
    """Contenders that gave no figure, but those that have no such op."""
    states = [(p.name, who, state) for p in found for who, state in p.status.items() if state != "not available"]
    return markdown(("point", "contender", "status"), states) if states else "None."


def step(rows: Sequence[dict[str, str]]) -> str:
    """The training step: ours against each other contender."""
    speed = {row["contender"]: float(row["tokens_per_s"]) for row in rows}
    memory = {row["contender"]: float(row["peak_gb"]) for row in rows}
    others = [name for name in speed if not name.startswith(("ours", "graph pass"))]
    cells = [
        (name, f"{speed[name]:,.0f}", f"{memory[name]:.2f}", *(f"{speed[name] / speed[other]:.3f}" for other in others))
        for name in speed
    ]
    return markdown(("training step", "tokens/s", "peak GB", *(f"x {other}" for other in others)), cells)


# Host time as a part of F.rms_norm's, without and with a gradient.
HOST = {
    "torch.ops.cute.rmsnorm": {"no": 1.02, "yes": 1.25},
    "cute_ops_torch.rmsnorm": {"no": 0.75, "yes": 0.97},
    "cute_ops_torch.nn.RMSNorm": {"no": 1.3, "yes": 1.3},
}
IN_A_GRAPH = 1.0  # microseconds of an op in a compiled graph, beyond the compiled function alone
ALONE = {"rmsnorm": "the compiled function alone", "add_rmsnorm": "the compiled function alone: add_rmsnorm"}


def host(rows: Sequence[dict[str, str]]) -> str:
    """Host time against its aims. Of two rows of the same call the last counts."""
    known = {(r["call"], r["grad"]): r for r in rows if r["status"] == "ok"}
    lines = [
        (f"`{call}`, {'with' if grad == 'yes' else 'without'} grad: of F.rms_norm", f"{aim}",
         f"{float(row['of_rms_norm']):.2f}")
        for call, aims in HOST.items() for grad, aim in aims.items() if (row := known.get((call, grad)))
    ]  # fmt: skip
    for op, function in ALONE.items():
        alone, one = known.get((function, "no")), known.get((f"in a graph: cute_ops_torch.{op}", "no"))
        if alone and one:
            cell = f"{float(one['us']) - float(alone['us']):.2f}"
            lines.append((f"{op} in a compiled graph, us an op beyond the compiled function", f"{IN_A_GRAPH}", cell))
    return markdown(("host time", "aim, at most", "is"), lines)


def fusion(rows: Sequence[dict[str, str]]) -> str:
    """Which form of a graph is faster, and which max-autotune took."""
    us: dict[str, dict[str, str]] = {}
    for r in rows:
        cells = us.setdefault(f"{r['graph']} {r['rows']}x{r['n']}", {})
        cells[r["contender"]] = f"{float(r['us']):.1f}" if r["us"] else r["status"]
        cells["took"] = r["took"] or cells.get("took", "")
    names = ("ours", "fused by Inductor", "took", "max-autotune's choice", "torch's own")
    lines = [(graph, *(cells.get(name, "") for name in names)) for graph, cells in us.items()]
    return markdown(("graph, us", "ours", "fused by Inductor", "max-autotune took", "its time", "torch's own"), lines)


def megabytes(row: dict[str, str]) -> str:
    return f"{float(row['peak_mb']):g}" if row["peak_mb"] else ""


def head(rows: Sequence[dict[str, str]]) -> str:
    """The loss of a linear head: each contender's time and peak memory, shape by shape."""
    lines = [
        (r["contender"], f"{r['rows']} x {r['hidden']} x {r['vocabulary']}", r["ms"] or r["status"], megabytes(r))
        for r in rows
    ]
    return markdown(("loss of a linear head", "rows x hidden x vocabulary", "ms", "peak MB"), lines)


def row_floors(rows: Iterable[dict[str, str]]) -> str:
    """Of row_floor.csv a line for each kernel: its share of a copy's rate, its floors', and how much of the lower one
    it reaches.
    """
    by_point: dict[str, dict[str, float]] = {}
    for row in rows:
        by_point.setdefault(row["point"], {})[row["kernel"]] = float(row["of_copy"])
    lines = []
    for point, shares in by_point.items():
        floors, (ours, *_) = {kernel: shares[kernel] for kernel in ROW_FLOORS}, shares.values()
        lower = min(floors, key=floors.__getitem__)
        more = [f"{kernel} {share:.2f}" for kernel, share in list(shares.items())[1:] if kernel not in floors]
        cells = (f"{share:.3f}" for share in (ours, *floors.values()))
        lines.append([point, *cells, f"{ours / floors[lower]:.2f}", lower, ", ".join(more)])
    return markdown(["kernel", "of a copy's rate", *ROW_FLOORS, "of the lower", "which", "others"], lines)


def head_kinds(rows: Sequence[dict[str, str]]) -> str:
    """Losses of preferences and of distillation on a linear head: each contender's time and peak memory by kind."""
    lines = []
    for r in rows:
        shape = f"{int(r['sequences']) * int(r['tokens'])} x {r['hidden']} x {r['vocabulary']}"
        lines.append((r["kind"], r["contender"], shape, r["ms"] or r["status"], r["peak_mb"]))
    return markdown(("loss", "contender", "rows x hidden x vocabulary", "ms", "peak MB"), lines)


def optax(rows: Sequence[dict[str, str]]) -> str:
    """Training steps in JAX: ours beside XLA's own."""
    speed = {(r["model"], r["ops"]): float(r["tokens_per_s"]) for r in rows}
    lines = [
        (r["model"], r["ops"], f"{speed[r['model'], r['ops']]:,.0f}", r["temporaries_gb"], r["loss_last"],
         f"{speed[r['model'], r['ops']] / speed[r['model'], 'XLA']:.3f}")
        for r in rows
    ]  # fmt: skip
    return markdown(("decoder trained with optax", "ops", "tokens/s", "temporaries, GB", "last loss", "x XLA"), lines)


def summary(folder: Path) -> str:
    rows = read(folder / "device_time.csv")
    found = points(rows)
    ours = [p for p in found if OURS in p.us]
    copies = ", ".join(dict.fromkeys(f"{float(r['gb_s']):.0f}" for r in rows if r["op"] == "copy"))
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    short = [p for p in ours if p.large and p.share[OURS] < SHARE[p.direction]]
    parts = [
        f"# What device_time.csv comes to\n\n{rows[0]['gpu']}, copy {copies} GB/s, commit {commits}. Made by "
        "benchmarks/summary.py; means are geometric.",
        overview(found),
        f"## 128 MB and more, under {SHARE['fwd']:.0%} of the copy rate forward or {SHARE['bwd']:.0%} backward",
        table(short, lambda p: p.share[OURS]),
        f"## More than {BEHIND:.0%} behind the best other contender",
        table(behind(ours), lambda p: p.ahead_of_best() or 1),
        "## Backward, behind the best other contender by less",
        table(
            (p for p in ours if p.direction == "bwd" and (p.ahead_of_best() or 1) < 1 and p not in behind(ours)),
            lambda p: p.ahead_of_best() or 1,
        ),
        f"## {SMALL_ROWS} rows and fewer",
        table((p for p in ours if p.small), lambda p: p.ahead_of_best() or 1),
        "## By op",
        by_op(found),
        "## Without a figure",
        failures(found),
    ]
    for name, title, make in (
        ("host_time", "Host time", host), ("fusion", "Ours or fused", fusion), ("llama_step", "Training step", step),
        ("linear_cross_entropy", "Loss of a linear head", head),
        ("head_losses", "Preferences and distillation on a linear head", head_kinds),
        ("optax_decoder", "Training step in JAX", optax),
    ):  # fmt: skip
        path = folder / f"{name}.csv"
        if path.exists():
            parts += [f"## {title}", make(read(path))]
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with device_time.csv")
    parser.add_argument("--write", type=Path, help="a Markdown file to write")
    options = parser.parse_args(arguments)
    text = summary(options.folder)
    print(text)
    if options.write:
        options.write.write_text(text)


if __name__ == "__main__":
    main()
