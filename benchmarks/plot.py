"""Pictures, the page of tables and the README's figures, from the CSV files of a folder.

    python benchmarks/plot.py benchmarks/results [--page benchmarks/results/README.md] [--readme README.md]

Writes ``device_time.png`` (every point) and ``overview.png`` (means per op) beside the files. ``--page`` and
``--readme`` replace what stands between the two ``figures`` comments of a file, the one by all tables, the other by a
short table.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common import markdown, read
from matplotlib.figure import Figure
from summary import OURS, OURS_JAX, XLA, Point, behind, given, head, mean, optax, overview, points

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


def draw_overview(found: Sequence[Point], path: Path) -> None:
    """Part of the copy rate by op and contender: the geometric mean over the points of 128 MB and more."""
    large = [p for p in found if p.large]
    names = {d: sorted({p.op for p in large if p.direction == d}, reverse=True) for d in TITLES}
    figure = Figure(figsize=(11, 0.21 * max(map(len, names.values())) + 1.6), layout="constrained")
    for panel, (direction, title) in zip(
        figure.subplots(1, len(TITLES), squeeze=False).flat, TITLES.items(), strict=True
    ):
        ops = names[direction]
        for name, (color, marker) in STYLES.items():
            shares = {op: [p.share[name] for p in large if (p.op, p.direction) == (op, direction) and name in p.share]
                      for op in ops}  # fmt: skip
            ys = [y for y, op in enumerate(ops) if shares[op]]
            xs = [statistics.geometric_mean(shares[ops[y]]) for y in ys]
            size = 8 if name == OURS else 5
            panel.plot(xs, ys, marker, color=color, label=name, markersize=size, alpha=0.85)
        panel.axvline(1, color="black", linewidth=1, linestyle="--", label="copy")
        panel.set_yticks(range(len(ops)), ops, fontsize=8)
        panel.set_xlim(0, 1.12)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("part of a large copy's GB/s", fontsize=8)
        panel.grid(axis="both", alpha=0.3)
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    figure.savefig(path, dpi=110)


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
    """What was measured on what, then a table, per file that is there."""
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
            parts.append(f"### {title}\n\n{source}.\n\n{make(rows)}")
    return "\n\n".join(parts)


def page(folder: Path) -> str:
    """All tables, for the page beside the files."""
    come_to = overview(points(read(folder / "device_time.csv")))
    means = f"What the device times come to, beside the aims; means are geometric.\n\n{come_to}"
    return f"![GB/s of every contender by shape](device_time.png)\n\n{means}\n\n{section(folder)}"


def figures(folder: Path) -> str:
    """A short table for the README: of every file that is there, what it comes to."""
    found = points(read(folder / "device_time.csv"))
    lines = [
        *device_lines(found),
        *step_lines(folder),
        *head_lines(folder),
        *host_lines(folder),
        *startup_lines(folder),
    ]
    return markdown(("what", "figure"), lines)


Lines = list[tuple[str, str]]


def device_lines(found: Sequence[Point]) -> Lines:
    ours = [p for p in found if OURS in p.us]
    lines = []
    for direction, title in TITLES.items():
        of = [p for p in ours if p.direction == direction]
        shares = [p.share[OURS] for p in of if p.large]
        lines.append((f"{title}, {len(shares)} points of 128 MB and more", f"{mean(shares)} of a copy's GB/s"))
    ratios = {d: mean(given(p.ahead_of_best() for p in ours if p.direction == d)) for d in TITLES}
    best = f"{ratios['fwd']} x forward, {ratios['bwd']} x backward"
    lines.append(("speed over the fastest of PyTorch, torch.compile, quack, Liger and XLA at each point", best))
    lines.append(("points more than 3% behind the fastest of them", f"{len(behind(ours))} of {len(ours)}"))
    lines.append(("JAX: speed over XLA", f"{mean(given(p.ahead(XLA, OURS_JAX) for p in found))} x"))
    return lines


def step_lines(folder: Path) -> Lines:
    lines = []
    steps = by(folder / "llama_step.csv", "contender")
    if {"Liger", "ours + AdamW"} <= steps.keys():
        ours, liger = steps["ours + AdamW"], steps["Liger"]
        ratio = float(ours["tokens_per_s"]) / float(liger["tokens_per_s"])
        memory = f"{ours['peak_gb']} GB for {liger['peak_gb']}"
        lines.append(("Llama-shaped training step in PyTorch", f"{ratio:.2f} x Liger's tokens/s, {memory}"))
    steps = by(folder / "optax_decoder.csv", "ops")
    if {"ours", "XLA"} <= steps.keys():
        ours, xla = steps["ours"], steps["XLA"]
        ratio = float(ours["tokens_per_s"]) / float(xla["tokens_per_s"])
        memory = f"{ours['temporaries_gb']} GB of temporaries for {xla['temporaries_gb']}"
        lines.append(("decoder trained with optax in JAX", f"{ratio:.2f} x XLA's tokens/s, {memory}"))
    return lines


def head_lines(folder: Path) -> Lines:
    """Time and memory at the first shape of the file, beside Liger's and PyTorch's."""
    path, names = folder / "linear_cross_entropy.csv", ("ours (torch)", "Liger", "torch eager")
    rows = [r for r in read(path) if r["status"] == "ok" and r["contender"] in names] if path.exists() else []
    if not rows:
        return []
    first = {r["contender"]: r for r in rows if shape_of_head(r) == shape_of_head(rows[0])}
    texts = (f"{name} {float(r['ms']):.1f} ms, {float(r['peak_mb']) / 1e3:.1f} GB" for name, r in first.items())
    return [(f"loss of a linear head, {' x '.join(shape_of_head(rows[0]))}", "; ".join(texts))]


def shape_of_head(row: Row) -> tuple[str, str, str]:
    return row["rows"], row["hidden"], row["vocabulary"]


def host_lines(folder: Path) -> Lines:
    """With the names of host_time.csv: a call without and with gradients."""
    rows = read(folder / "host_time.csv") if (folder / "host_time.csv").exists() else []
    us = {(r["call"], r["grad"]): r["us"] for r in rows if r["status"] == "ok"}
    ours, torchs = "cute_ops_torch.rmsnorm", "F.rms_norm"
    if not all((call, grad) in us for call in (ours, torchs) for grad in ("no", "yes")):
        return []
    text = ", ".join(
        f"{float(us[ours, g]):.1f} us{with_grad} (`F.rms_norm` {float(us[torchs, g]):.1f})"
        for g, with_grad in (("no", ""), ("yes", " with a gradient"))
    )
    return [("host time of `cute_ops_torch.rmsnorm`", text)]


def startup_lines(folder: Path) -> Lines:
    rows = read(folder / "startup.csv") if (folder / "startup.csv").exists() else []
    wanted = [r for r in rows if (r["cache"], r["phase"], r["status"]) == ("warm", "all of ours", "ok")]
    ms = {r["framework"]: f"{float(r['ms']):.0f} ms in {NAMES[r['framework']]}" for r in wanted}
    return [("import and first call with a warm cache", ", ".join(ms.values()))] if ms else []


NAMES = {"torch": "PyTorch", "jax": "JAX"}


def by(path: Path, column: str) -> dict[str, Row]:
    return {r[column]: r for r in read(path)} if path.exists() else {}


def put(body: str, path: Path) -> str:
    """The text of a file with ``body`` between its ``figures`` comments.

    Raises:
        ValueError: it has no such comments.
    """
    before, _, rest = path.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{path} has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{body}\n{END}{after}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with device_time.csv and, where measured, the other files")
    parser.add_argument("--page", type=Path, help="file to put all tables into")
    parser.add_argument("--readme", type=Path, help="file to put the short table into")
    options = parser.parse_args(arguments)
    rows, steps = read(options.folder / "device_time.csv"), options.folder / "llama_step.csv"
    draw(rows, read(steps) if steps.exists() else [], options.folder / "device_time.png")
    draw_overview(points(rows), options.folder / "overview.png")
    for path, make in ((options.page, page), (options.readme, figures)):
        if path:
            path.write_text(put(make(options.folder), path))
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
