"""Pictures of the committed results, in one style: without a background, in colours that show on white and on black.

SVG files whose bytes depend on the figures alone; :mod:`plot` writes them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from common import read
from matplotlib.figure import Figure
from summary import OURS, Point, points

GREY, OUR_COLOR, OTHER_COLOR = "#808080", "#e53935", "#9e9e9e"
STYLES = {
    "torch eager": ("#9e9e9e", "v"),
    "torch.compile": ("#a1785f", "^"),
    "quack": ("#1e88e5", "s"),
    "Liger": ("#ab47bc", "D"),
    "XLA (jit)": ("#43a047", "P"),
    "ours (torch)": (OUR_COLOR, "o"),
    "ours (JAX)": ("#fb8c00", "o"),
}
TITLES = {"fwd": "forward", "bwd": "backward"}
FEW = 3  # shapes of an op that has no panel of its own
COLUMNS = 2  # panels side by side: forward and backward, as wide as a page
STARTUP = ("import ours", "import tvm_ffi", "first result")
PLAIN = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), GREY)
Row = dict[str, str]


def draw_all(folder: Path) -> list[Path]:
    """Draw what was measured, beside the files; returns the pictures."""
    rows = read(folder / "device_time.csv")
    found = points(rows)
    made = {"rates": rates(rows), "overview": overview(found), "roofline": roofline(rows, found)}
    for name, draw in (("llama_step", training_steps), ("startup", startup), ("build_time", build_time)):
        if (path := folder / f"{name}.csv").exists():
            made[name] = draw(read(path))
    for name, figure in made.items():
        save(figure, folder / f"{name}.svg")
    return [folder / f"{name}.svg" for name in made]


def save(figure: Figure, path: Path) -> None:
    """Write a picture that has grey text, no background and no date."""
    for panel in figure.axes:
        panel.patch.set_alpha(0)
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path, transparent=True, metadata={"Date": None})


def new(width: float, height: float, lines: int = 1, columns: int = 1) -> tuple[Figure, list[Any]]:
    """A figure and its panels."""
    with matplotlib.rc_context({**PLAIN, "grid.color": GREY, "grid.alpha": 0.3, "legend.frameon": False}):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, list(figure.subplots(lines, columns, squeeze=False).flat)


def legend(figure: Figure, panel: Any) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, labelcolor=GREY, frameon=False
    )


def copy_rate(rows: Iterable[Row]) -> float:
    """GB/s of a large copy."""
    return float(next(r["gb_s"] for r in rows if r["op"] == "copy"))


def unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def shape(row: Row) -> str:
    return f"{row['rows']}x{row['n']}"


def plain(row: Row) -> bool:
    """Whether a row belongs into the picture of rates: one dtype for all, compact, more than a few megabytes."""
    same = row["dtype"] == row["weight"] == row["residual"] == "bfloat16"
    return same and row["layout"] == "flat" and int(row["bytes"]) >= 32 << 20


def panels(rows: Iterable[Row]) -> dict[str, list[tuple[str, Row]]]:
    """By title, rows with their labels: the shapes of an op, and of those that have few of them one shape for each."""
    by_op: dict[tuple[str, str], list[Row]] = {}
    for r in rows:
        by_op.setdefault((r["op"], r["direction"]), []).append(r)
    found: dict[str, list[tuple[str, Row]]] = {}
    others: dict[str, list[tuple[str, Row]]] = {}
    for (op, direction), of in by_op.items():
        if len(unique(map(shape, of))) < FEW:
            others.setdefault(f"other ops, {TITLES[direction]}", []).extend(
                (op, r) for r in of if shape(r) == shape(of[0])
            )
        else:
            found[f"{op} {TITLES[direction]}"] = sorted(((shape(r), r) for r in of), key=lambda pair: int(pair[1]["n"]))
    return found | others


def rates(rows: list[Row]) -> Figure:
    """GB/s of every contender by shape, one panel per op and direction, with the rate of a copy."""
    drawn = panels(r for r in rows if r["op"] != "copy" and plain(r))
    columns = min(COLUMNS, len(drawn))
    lines = -(-len(drawn) // columns)
    figure, axes = new(4.2 * columns, 2.5 * lines + 0.6, lines, columns)
    for panel, (title, labelled) in zip(axes, drawn.items(), strict=False):
        draw_rates(panel, labelled, copy_rate(rows))
        panel.set_title(title, fontsize=10, color=GREY)
        panel.set_ylabel("GB/s by least bytes moved" if panel in axes[::columns] else "")
    for unused in axes[len(drawn) :]:
        unused.set_axis_off()
    legend(figure, axes[0])
    figure.suptitle(f"bfloat16 on one {rows[0]['gpu']}, rows x n", fontsize=11, color=GREY)
    return figure


def draw_rates(panel: Any, labelled: list[tuple[str, Row]], ceiling: float) -> None:
    """GB/s of every contender by label."""
    labels = unique(label for label, _ in labelled)
    for name, (color, marker) in STYLES.items():
        given = {label: float(r["gb_s"]) for label, r in labelled if r["contender"] == name and r["status"] == "ok"}
        xs = [k for k, label in enumerate(labels) if label in given]
        size = 9 if name == OURS else 6
        panel.plot(xs, [given[labels[k]] for k in xs], marker, color=color, label=name, markersize=size, alpha=0.85)
    panel.axhline(ceiling, color=GREY, linewidth=1, linestyle="--", label="copy")
    panel.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=8)
    panel.set_ylim(0, 1.16 * ceiling)  # what is only read may pass the copy
    panel.grid(axis="y")


def overview(found: Sequence[Point]) -> Figure:
    """Part of the copy rate by op and contender: the geometric mean over the points of 128 MB and more."""
    large = [p for p in found if p.large]
    names = {d: sorted({p.op for p in large if p.direction == d}, reverse=True) for d in TITLES}
    figure, axes = new(11, 0.21 * max(map(len, names.values())) + 1.6, columns=len(TITLES))
    for panel, (direction, title) in zip(axes, TITLES.items(), strict=True):
        ops = names[direction]
        for name, (color, marker) in STYLES.items():
            shares = {op: [p.share[name] for p in large if (p.op, p.direction) == (op, direction) and name in p.share]
                      for op in ops}  # fmt: skip
            ys = [y for y, op in enumerate(ops) if shares[op]]
            xs = [statistics.geometric_mean(shares[ops[y]]) for y in ys]
            size = 8 if name == OURS else 5
            panel.plot(xs, ys, marker, color=color, label=name, markersize=size, alpha=0.85)
        panel.axvline(1, color=GREY, linewidth=1, linestyle="--", label="copy")
        panel.set_yticks(range(len(ops)), ops, fontsize=8)
        panel.set_xlim(0, 1.12)
        panel.set_title(title, fontsize=10, color=GREY)
        panel.set_xlabel("part of a large copy's GB/s", fontsize=8)
        panel.grid(axis="both")
    legend(figure, axes[0])
    return figure


def roofline(rows: list[Row], found: Sequence[Point]) -> Figure:
    """GB/s by the bytes of a problem, under two roofs: the time of the shortest kernel, and the rate of a copy.

    Row-wise ops compute little for each byte, so bytes stand where other rooflines have operations per byte.
    """
    figure, (panel,) = new(8, 4.4)
    for name in ("torch.compile", "XLA (jit)", OURS):
        color, marker = STYLES[name]
        given = [(p.bytes, p.bytes / p.us[name] / 1e3) for p in found if name in p.us]
        panel.plot(*zip(*given, strict=True), marker, color=color, label=name, markersize=4, alpha=0.7)
    sizes = [min(p.bytes for p in found), max(p.bytes for p in found)]
    least = min(us for p in found for us in p.us.values())
    panel.plot(
        sizes, [size / least / 1e3 for size in sizes], ":", color=GREY, label=f"the shortest kernel, {least:.1f} us"
    )
    panel.axhline(copy_rate(rows), color=GREY, linewidth=1, linestyle="--", label="copy")
    panel.set(xscale="log", yscale="log", xlabel="bytes read and written, at least", ylabel="GB/s")
    panel.set_ylim(copy_rate(rows) / 200, 2 * copy_rate(rows))
    panel.set_title(f"every op, shape, dtype and direction on one {rows[0]['gpu']}", fontsize=10, color=GREY)
    panel.grid()
    legend(figure, panel)
    return figure


def bars(names: Sequence[str], values: Sequence[float], notes: Sequence[str], title: str) -> Figure:
    """Bars with notes in them, ours in our colour."""
    figure, (panel,) = new(8, 0.36 * len(names) + 0.9)
    colors = [OUR_COLOR if name.startswith(("ours", "graph pass")) else OTHER_COLOR for name in names]
    panel.bar_label(panel.barh(names, values, color=colors), notes, label_type="center", fontsize=8, color="white")
    panel.invert_yaxis()
    panel.set_title(title, fontsize=10, color=GREY)
    return figure


def training_steps(rows: list[Row]) -> Figure:
    """Tokens per second of a training step by library, and its peak memory."""
    speeds = [float(r["tokens_per_s"]) / 1e3 for r in rows]
    notes = [f"{speed:.0f}k, {float(r['peak_gb']):.1f} GB" for speed, r in zip(speeds, rows, strict=True)]
    title = f"Llama-shaped training step on one {rows[0]['gpu']}: thousand tokens/s, peak memory"
    return bars([r["contender"] for r in rows], speeds, notes, title)


def startup(rows: list[Row]) -> Figure:
    """Milliseconds from the import to the first result, by framework and by where the kernel comes from."""
    kinds = unique(f"{r['framework']}, {r['cache']}" for r in rows)
    ms = {(f"{r['framework']}, {r['cache']}", r["phase"]): float(r["ms"]) for r in rows if r["status"] == "ok"}
    figure, (panel,) = new(8, 0.36 * len(kinds) + 1.3)
    left = [0.0] * len(kinds)
    for phase, color in zip(STARTUP, ("#fb8c00", GREY, OUR_COLOR), strict=True):
        widths = [ms.get((kind, phase), 0.0) for kind in kinds]
        drawn = panel.barh(kinds, widths, left=left, color=color, label=phase)
        panel.bar_label(
            drawn, [f"{w:.0f}" if w else "" for w in widths], label_type="center", fontsize=8, color="white"
        )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    panel.invert_yaxis()
    panel.set_title("milliseconds to a first result, by where the kernel comes from", fontsize=10, color=GREY)
    legend(figure, panel)
    return figure


def build_time(rows: list[Row]) -> Figure:
    """Seconds to build every op and gradient in all declared cases, by the commit that built them: its last run."""
    last = {r["commit"]: r for r in rows}.values()
    names = [f"{r['commit']}: {r['kernels']} kernels" for r in last]
    notes = [f"{float(r['seconds']):.0f} s, {float(r['megabytes']):.0f} MB" for r in last]
    title = f"seconds to build every kernel for {rows[-1]['targets']} on {rows[-1]['cores']} cores"
    return bars(names, [float(r["seconds"]) for r in last], notes, title)
