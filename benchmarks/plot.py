"""One picture and the README's tables, from the CSV files of a folder.

    python benchmarks/plot.py benchmarks/results [--readme README.md]

Writes ``device_time.png`` beside the files. With ``--readme`` it also replaces what stands between the two ``figures``
comments there, so that no figure is ever typed by hand.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import markdown, read
from matplotlib.figure import Figure
from summary import head, optax, overview, points

BEGIN, END = "<!-- figures: begin (made by benchmarks/plot.py) -->", "<!-- figures: end -->"
STYLES = {
    "torch eager": ("#9e9e9e", "v"),
    "torch.compile": ("#6d4c41", "^"),
    "quack": ("#1e88e5", "s"),
    "Liger": ("#8e24aa", "D"),
    "XLA (jit)": ("#43a047", "P"),
    "ours (torch)": ("#e53935", "o"),
    "ours (JAX)": ("#fb8c00", "o"),
}
FEW = 3  # shapes of an op that has no panel of its own
COLUMNS = 4  # panels side by side: forward and backward of two ops
TITLES = {"fwd": "forward", "bwd": "backward"}
Row = dict[str, str]


def plain(row: Row) -> bool:
    """Whether a row belongs into the picture: one dtype for all, compact, more than a few megabytes."""
    same = row["dtype"] == row["weight"] == row["residual"] == "bfloat16"
    return same and row["layout"] == "flat" and int(row["bytes"]) >= 32 << 20


def shape(row: Row) -> str:
    return f"{row['rows']}x{row['n']}"


def unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


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


def draw(rows: list[Row], steps: list[Row], path: Path) -> None:
    """GB/s by shape, one panel per op and direction; tokens per second of a training step, where measured."""
    ceiling = float(next(r["gb_s"] for r in rows if r["op"] == "copy"))
    drawn = panels(r for r in rows if r["op"] != "copy" and plain(r))
    columns = min(COLUMNS, len(drawn) + bool(steps))
    lines = -(-(len(drawn) + bool(steps)) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * lines + 0.6), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for panel, (title, labelled) in zip(axes, drawn.items(), strict=False):
        draw_panel(panel, labelled, ceiling)
        panel.set_title(title, fontsize=10)
        panel.set_ylabel("GB/s by least bytes moved" if panel in axes[::columns] else "")
    if steps:
        draw_steps(axes[len(drawn)], steps)
    for unused in axes[len(drawn) + bool(steps) :]:
        unused.set_axis_off()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    figure.suptitle(f"bfloat16 on one {rows[0]['gpu']}, rows x n", fontsize=11)
    figure.savefig(path, dpi=120)


def draw_panel(panel: Any, labelled: list[tuple[str, Row]], ceiling: float) -> None:
    """GB/s of every contender by label."""
    labels = unique(label for label, _ in labelled)
    for name, (color, marker) in STYLES.items():
        points = {label: float(r["gb_s"]) for label, r in labelled if r["contender"] == name and r["status"] == "ok"}
        xs = [k for k, label in enumerate(labels) if label in points]
        size = 9 if name == "ours (torch)" else 6
        panel.plot(xs, [points[labels[k]] for k in xs], marker, color=color, label=name, markersize=size, alpha=0.85)
    panel.axhline(ceiling, color="black", linewidth=1, linestyle="--", label="copy")
    panel.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=8)
    panel.set_ylim(0, 1.16 * ceiling)  # what is only read may pass the copy
    panel.grid(axis="y", alpha=0.3)


def draw_steps(panel: Any, rows: list[Row]) -> None:
    """Tokens per second of a training step, and its peak memory."""
    names = [r["contender"] for r in rows]
    speeds = [float(r["tokens_per_s"]) / 1e3 for r in rows]
    colors = ["#e53935" if name.startswith(("ours", "graph pass")) else "#9e9e9e" for name in names]
    bars = panel.barh(names, speeds, color=colors)
    memory = [f"{speed:.0f}k, {float(r['peak_gb']):.0f} GB" for speed, r in zip(speeds, rows, strict=True)]
    panel.bar_label(bars, memory, label_type="center", fontsize=8)
    panel.invert_yaxis()
    panel.set_title("Llama-shaped training step: tokens/s, peak memory", fontsize=10)


def device_table(rows: list[Row]) -> str:
    """GB/s by problem and contender."""
    names = [n for n in STYLES if any(r["contender"] == n and r["status"] != "not available" for r in rows)]
    problems: dict[str, dict[str, str]] = {}
    for r in rows:
        if r["op"] == "copy" or not plain(r):
            continue
        state = r["status"].partition(":")[0]
        cell = {"ok": f"{float(r['gb_s'] or 0):.0f}", "not available": ""}.get(state, state)
        problems.setdefault(f"{r['op']} {TITLES[r['direction']]} {shape(r)}", {})[r["contender"]] = cell
    ceiling = float(next(r["gb_s"] for r in rows if r["op"] == "copy"))
    table = markdown(["GB/s", *names], ([p, *(cells.get(n, "") for n in names)] for p, cells in problems.items()))
    return f"A large copy moves {ceiling:.0f} GB/s.\n\n{table}"


def host_table(rows: list[Row]) -> str:
    ok = [r for r in rows if r["status"] == "ok"]
    cells = ([f"`{r['call']}`", r["grad"], f"{float(r['us']):.1f}"] for r in ok)
    return markdown(["host time per call", "with grad", "us"], cells)


def startup_table(rows: list[Row]) -> str:
    ok = [r for r in rows if r["status"] == "ok"]
    phases = unique(r["phase"] for r in ok)
    by_key: dict[tuple[str, str], dict[str, str]] = {}
    for r in ok:
        by_key.setdefault((r["framework"], r["cache"]), {})[r["phase"]] = f"{float(r['ms']):.1f}"
    cells = ([f"{f}, {c} cache", *(v.get(p, "") for p in phases)] for (f, c), v in by_key.items())
    return markdown(["fresh process, ms", *phases], cells)


def step_table(rows: list[Row]) -> str:
    cells = ([r["contender"], f"{float(r['tokens_per_s']):,.0f}", r["ms"], r["peak_gb"], r["loss_first"]] for r in rows)
    return markdown(["Llama-shaped training step", "tokens/s", "ms", "peak GB", "first loss"], cells)


def fusion_table(rows: list[Row]) -> str:
    by_graph: dict[str, dict[str, str]] = {}
    for r in rows:
        figure = f"{float(r['us']):.0f}" if r["status"] == "ok" and r["us"] else r["status"].partition(":")[0]
        by_graph.setdefault(f"{r['graph']} {r['rows']}x{r['n']}", {})[r["contender"]] = figure
    names = unique(r["contender"] for r in rows)
    cells = ([f"`{graph}`", *(v.get(name, "") for name in names)] for graph, v in by_graph.items())
    return markdown(["graph under max-autotune, us", *names], cells)


def section(folder: Path) -> str:
    """The README's section: what was measured on what, then a table per file that is there."""
    parts = []
    for name, title, make in (
        ("device_time", "Device time", device_table),
        ("llama_step", "Training step", step_table),
        ("optax_decoder", "Training step in JAX", optax),
        ("linear_cross_entropy", "Loss of a linear head", head),
        ("host_time", "Host time", host_table),
        ("fusion", "Our kernels or Inductor's fusion", fusion_table),
        ("startup", "Start-up", startup_table),
    ):
        path = folder / f"{name}.csv"
        if path.exists():
            rows = read(path)
            first = rows[0]
            machine = f"{first['gpu']}, driver {first['driver']}"
            commits = unique(row["commit"] for row in rows)
            source = f"{machine}; {first['versions']}; commit {', '.join(commits)}, {first['date']}"
            parts.append(f"<details><summary>{title}</summary>\n\n{source}.\n\n{make(rows)}\n\n</details>")
    return "\n\n".join(parts)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with device_time.csv and, where measured, the other files")
    parser.add_argument("--readme", type=Path, help="file to put the tables into")
    options = parser.parse_args(arguments)
    steps = options.folder / "llama_step.csv"
    draw(
        read(options.folder / "device_time.csv"),
        read(steps) if steps.exists() else [],
        options.folder / "device_time.png",
    )
    print(f"wrote {options.folder / 'device_time.png'}")
    if options.readme:
        before, _, rest = options.readme.read_text().partition(BEGIN)
        _, found, after = rest.partition(END)
        if not found:
            parser.error(f"{options.readme} has no {BEGIN} ... {END}")
        picture = (options.folder / "device_time.png").as_posix()
        come_to = overview(points(read(options.folder / "device_time.csv")))
        means = f"What the device times come to, beside the aims; means are geometric.\n\n{come_to}"
        body = f"![GB/s of every contender by shape]({picture})\n\n{means}\n\n{section(options.folder)}"
        options.readme.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}")
        print(f"wrote {options.readme}")


if __name__ == "__main__":
    main()
