"""Pictures of the committed results, in one style: SVG files whose bytes depend on the figures alone.

:mod:`plot` writes them. Each has a light and a dark background of its own, chosen by the reader's setting, so that
its text has a contrast of 4.5 : 1 at least wherever it is shown.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from common import read
from matplotlib.figure import Figure
from summary import BEHIND, COMPILED, OURS, TITLES, Point, given, points

# Text and lines are drawn in TEXT, which the file's own style sheet replaces by a colour of the theme.
TEXT, OUR_COLOR, OTHER_COLOR = "#808080", "#d32f2f", "#757575"
THEMES = {"light": ("#24292f", "#ffffff"), "dark": ("#d0d7de", "#1b1f27")}  # text, background
STYLES = {
    "torch eager": ("#8a8a8a", "v"),
    "torch.compile": ("#a1785f", "^"),
    "quack": ("#1e88e5", "s"),
    "Liger": ("#ab47bc", "D"),
    "XLA (jit)": ("#43a047", "P"),
    "ours (torch)": (OUR_COLOR, "o"),
    "ours (JAX)": ("#d97706", "o"),
}
FEW = 3  # shapes of an op that has no panel of its own
# Inches, of every picture: at the 460 pixels that a telephone leaves, text of 11 points is 11 pixels high. So panels
# stand below one another.
WIDTH = 6.4
STARTUP = ("import ours", "import tvm_ffi", "first result")
PLAIN = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), TEXT)
Row = dict[str, str]


def draw_all(folder: Path) -> list[Path]:
    """Draw what was measured, beside the files; returns the pictures."""
    rows = read(folder / "device_time.csv")
    found = points(rows)
    made = {"rates": rates(rows), "overview": overview(found), "roofline": roofline(rows, found)}
    for name, draw in DRAWN.items():
        if (path := folder / f"{name}.csv").exists() and (measured := read(path)):
            made[name] = draw(measured)
    for name, figure in made.items():
        save(figure, folder / f"{name}.svg")
    return [folder / f"{name}.svg" for name in made]


def save(figure: Figure, path: Path) -> None:
    """Write a picture without a date, whose text and background follow the reader's theme."""
    for panel in figure.axes:
        panel.patch.set_alpha(0)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    path.write_text(themed(file.getvalue()), encoding="utf-8")


def themed(svg: str) -> str:
    """An SVG file whose ``TEXT`` is the colour of the theme, on the background of the theme."""
    light, dark = (f"svg{{color:{text};background:{ground}}}" for text, ground in THEMES.values())
    style = f"<style>{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"
    head, mark, rest = svg.replace(TEXT, "currentColor").partition(" <metadata>")
    return f"{head} {style}\n{mark}{rest}"


def new(
    width: float, height: float, lines: int = 1, heights: Sequence[float] | None = None
) -> tuple[Figure, list[Any]]:
    """A figure and its panels, below one another."""
    with matplotlib.rc_context({**PLAIN, "grid.color": TEXT, "grid.alpha": 0.3, "legend.frameon": False}):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, list(figure.subplots(lines, squeeze=False, height_ratios=heights).flat)


def legend(figure: Figure, panel: Any) -> None:
    handles, labels = panel.get_legend_handles_labels()
    where = {"loc": "outside lower center", "ncols": min(4, len(labels))}
    figure.legend(handles, labels, fontsize=10, labelcolor=TEXT, frameon=False, **where)


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
    figure, axes = new(WIDTH, 2.6 * len(drawn) + 0.8, len(drawn))
    for panel, (title, labelled) in zip(axes, drawn.items(), strict=True):
        draw_rates(panel, labelled, copy_rate(rows))
        panel.set_title(title, fontsize=11, color=TEXT)
        panel.set_ylabel("GB/s by least bytes moved")
    legend(figure, axes[0])
    figure.suptitle(f"bfloat16 on one {rows[0]['gpu']}, rows x n", fontsize=11, color=TEXT)
    return figure


def draw_rates(panel: Any, labelled: list[tuple[str, Row]], ceiling: float) -> None:
    """GB/s of every contender by label."""
    labels = unique(label for label, _ in labelled)
    for name, (color, marker) in STYLES.items():
        given = {label: float(r["gb_s"]) for label, r in labelled if r["contender"] == name and r["status"] == "ok"}
        xs = [k for k, label in enumerate(labels) if label in given]
        size = 9 if name == OURS else 6
        panel.plot(xs, [given[labels[k]] for k in xs], marker, color=color, label=name, markersize=size, alpha=0.85)
    panel.axhline(ceiling, color=TEXT, linewidth=1, linestyle="--", label="copy")
    panel.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=9)
    panel.set_ylim(0, 1.16 * ceiling)  # what is only read may pass the copy
    panel.grid(axis="y")


def overview(found: Sequence[Point]) -> Figure:
    """Part of the copy rate by op and contender: the geometric mean over the points of 128 MB and more."""
    large = [p for p in found if p.large]
    names = {d: sorted({p.op for p in large if p.direction == d}, reverse=True) for d in TITLES}
    heights = [len(names[d]) + 3 for d in TITLES]
    figure, axes = new(WIDTH, 0.2 * sum(heights) + 0.7, len(TITLES), heights)
    for panel, (direction, title) in zip(axes, TITLES.items(), strict=True):
        ops = names[direction]
        for name, (color, marker) in STYLES.items():
            shares = {op: [p.share[name] for p in large if (p.op, p.direction) == (op, direction) and name in p.share]
                      for op in ops}  # fmt: skip
            ys = [y for y, op in enumerate(ops) if shares[op]]
            xs = [statistics.geometric_mean(shares[ops[y]]) for y in ys]
            size = 8 if name == OURS else 5
            panel.plot(xs, ys, marker, color=color, label=name, markersize=size, alpha=0.85)
        panel.axvline(1, color=TEXT, linewidth=1, linestyle="--", label="copy")
        panel.set_yticks(range(len(ops)), ops, fontsize=10)
        panel.set_xlim(0, 1.12)
        panel.set_title(f"{title}: part of a large copy's GB/s", fontsize=11, color=TEXT)
        panel.grid(axis="both")
    legend(figure, axes[0])
    return figure


def roofline(rows: list[Row], found: Sequence[Point]) -> Figure:
    """GB/s by the bytes of a problem, under two roofs: the time of the shortest kernel, and the rate of a copy.

    Row-wise ops compute little for each byte, so bytes stand where other rooflines have operations per byte.
    """
    figure, (panel,) = new(WIDTH, 4.6)
    for name in ("torch.compile", "XLA (jit)", OURS):
        color, marker = STYLES[name]
        given = [(p.bytes, p.bytes / p.us[name] / 1e3) for p in found if name in p.us]
        panel.plot(*zip(*given, strict=True), marker, color=color, label=name, markersize=4, alpha=0.7)
    sizes = [min(p.bytes for p in found), max(p.bytes for p in found)]
    least = min(us for p in found for us in p.us.values())
    panel.plot(
        sizes, [size / least / 1e3 for size in sizes], ":", color=TEXT, label=f"the shortest kernel, {least:.1f} us"
    )
    panel.axhline(copy_rate(rows), color=TEXT, linewidth=1, linestyle="--", label="copy")
    panel.set(xscale="log", yscale="log", xlabel="bytes read and written, at least", ylabel="GB/s")
    panel.set_ylim(copy_rate(rows) / 200, 2 * copy_rate(rows))
    panel.set_title(f"every op, shape, dtype and direction on one {rows[0]['gpu']}", fontsize=11, color=TEXT)
    panel.grid()
    legend(figure, panel)
    return figure


def bars(names: Sequence[str], values: Sequence[float], notes: Sequence[str], title: str) -> Figure:
    """Bars with notes beside them, ours in our colour; as wide as a telephone shows in full."""
    figure, (panel,) = new(WIDTH, 0.4 * len(names) + 0.7)
    colors = [OUR_COLOR if ours(name) else OTHER_COLOR for name in names]
    panel.bar_label(panel.barh(names, values, color=colors), notes, padding=4, fontsize=11, color=TEXT)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.45 * max(values))  # room for the notes
    panel.set_xticks([])
    panel.tick_params(axis="y", length=0, labelsize=11)
    panel.spines[["top", "right", "bottom"]].set_visible(False)
    figure.suptitle(title, fontsize=12, color=TEXT)
    return figure


LIBRARIES = {
    "ours + AdamW": "cute_ops, with its AdamW",
    "ours": "cute_ops: patch",
    "ours + compile": "patch + torch.compile",
    "graph pass + compile": "cute_ops: graph pass",
}
STEPS = {
    "eager": ("#8a8a8a", "v"),
    "Liger": ("#ab47bc", "D"),
    "ours": (OUR_COLOR, "o"),
    "ours + compile": (OUR_COLOR, "^"),
    "graph pass + compile": ("#d97706", "s"),
}
ATTENTION = {
    "FlashAttention 2": ("#8a8a8a", "v"),
    "FlexAttention": ("#a1785f", "^"),
    "cuDNN": ("#43a047", "P"),
    "FlashAttention 4": ("#1e88e5", "s"),
    "ours": (OUR_COLOR, "o"),
}
CACHES = {
    "SDPA": ("#43a047", "P"),
    "FlashInfer": ("#1e88e5", "s"),
    "FlashMLA": ("#ab47bc", "D"),
    "ours, float8": ("#d97706", "o"),
    "ours": (OUR_COLOR, "o"),
}
KINDS = {"rows": (OUR_COLOR, "-"), "expressions": ("#1e88e5", "--"), "products": ("#43a047", "-.")}


def ours(contender: str) -> bool:
    return contender.startswith(("cute_ops", "ours", "graph pass", "patch"))


def training_steps(rows: list[Row]) -> Figure:
    """Tokens per second of a training step by library, the fastest first, and its peak memory."""
    rows = sorted(rows, key=lambda r: -float(r["tokens_per_s"]))
    speeds = [float(r["tokens_per_s"]) / 1e3 for r in rows]
    notes = [f"{speed:.0f}k   {float(r['peak_gb']):.0f} GB" for speed, r in zip(speeds, rows, strict=True)]
    names = [LIBRARIES.get(r["contender"], r["contender"]) for r in rows]
    title = f"Training a Llama-shaped model on one {rows[0]['gpu']}:\ntokens/s and peak memory"
    return bars(names, speeds, notes, title)


def startup(rows: list[Row]) -> Figure:
    """Milliseconds from the import to the first result, by framework and by where the kernel comes from."""
    kinds = unique(f"{r['framework']}, {r['cache']}" for r in rows)
    ms = {(f"{r['framework']}, {r['cache']}", r["phase"]): float(r["ms"]) for r in rows if r["status"] == "ok"}
    figure, (panel,) = new(WIDTH, 0.4 * len(kinds) + 1.4)
    left = [0.0] * len(kinds)
    for phase, color in zip(STARTUP, ("#a85500", OTHER_COLOR, OUR_COLOR), strict=True):
        widths = [ms.get((kind, phase), 0.0) for kind in kinds]
        drawn = panel.barh(kinds, widths, left=left, color=color, label=phase)
        panel.bar_label(
            drawn, [f"{w:.0f}" if w else "" for w in widths], label_type="center", fontsize=8, color="white"
        )
        left = [a + b for a, b in zip(left, widths, strict=True)]
    panel.invert_yaxis()
    panel.set_title("milliseconds to a first result, by where the kernel comes from", fontsize=11, color=TEXT)
    legend(figure, panel)
    return figure


def build_time(rows: list[Row]) -> Figure:
    """Seconds to build every op and gradient in all declared cases, by the commit that built them: its last run."""
    last = {r["commit"]: r for r in rows}.values()
    names = [f"{r['commit']}: {r['kernels']} kernels" for r in last]
    notes = [f"{float(r['seconds']):.0f} s, {float(r['megabytes']):.0f} MB" for r in last]
    title = f"seconds to build every kernel for {rows[-1]['targets']} on {rows[-1]['cores']} cores"
    return bars(names, [float(r["seconds"]) for r in last], notes, title)


def dots(panel: Any, found: dict[str, dict[str, float]], styles: dict[str, tuple[str, str]]) -> None:
    """A line for each label, the first one above, with a mark for each contender."""
    labels = [*found][::-1]
    for name, (color, marker) in styles.items():
        marks = [(found[label][name], y) for y, label in enumerate(labels) if name in found[label]]
        if marks:
            size = 8 if name == "ours" else 6
            panel.plot(*zip(*marks, strict=True), marker, color=color, label=name, markersize=size, alpha=0.85)
    panel.set_yticks(range(len(labels)), labels, fontsize=9)
    panel.set_ylim(-0.7, len(labels) - 0.3)
    panel.grid()


def model_speeds(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """By model and contender, torch.compile's milliseconds over its own."""
    ms: dict[str, dict[str, float]] = {}
    for r in rows:
        if r["status"] == "ok":
            ms.setdefault(r["model"], {})[r["contender"]] = float(r["ms"])
    return {
        model: {name: of[COMPILED] / each for name, each in of.items() if name != COMPILED}
        for model, of in ms.items() if COMPILED in of
    }  # fmt: skip


def model_steps(rows: list[Row]) -> Figure:
    """Speed of training steps over torch.compile's by model and contender."""
    found = model_speeds(rows)
    figure, (panel,) = new(WIDTH, 0.32 * len(found) + 1.5)
    dots(panel, found, STEPS)
    panel.axvline(1, color=TEXT, linewidth=1, linestyle="--", label=COMPILED)
    panel.set_title(f"speed of a training step over torch.compile, one {rows[0]['gpu']}", fontsize=11, color=TEXT)
    panel.set_xlim(left=0)
    legend(figure, panel)
    return figure


def attended(row: Row) -> str:
    """The shape of a row of attention.csv."""
    heads = f"{row['heads']}/{row['kv_heads']} heads of {row['headdim']}"
    return f"{row['batch']} x {row['seqlen']}, {heads}, {row['form']}"


def attention(rows: list[Row]) -> Figure:
    """TFLOPS by shape and contender, forward and backward, of shapes that another contender takes, too."""
    found: dict[str, dict[str, dict[str, float]]] = {direction: {} for direction in TITLES.values()}
    for r in sorted(rows, key=lambda r: (int(r["headdim"]), r["form"], int(r["batch"]) * int(r["seqlen"]) ** 2)):
        if r["status"] == "ok":
            found[r["direction"]].setdefault(attended(r), {})[r["contender"]] = float(r["tflops"])
    found = {direction: {k: v for k, v in of.items() if v.keys() > {"ours"}} for direction, of in found.items()}
    heights = [len(of) + 3 for of in found.values()]
    figure, axes = new(WIDTH, 0.2 * sum(heights) + 0.8, len(found), heights)
    for panel, (direction, of) in zip(axes, found.items(), strict=True):
        dots(panel, of, ATTENTION)
        panel.set_title(f"attention, {direction}: TFLOPS in bfloat16", fontsize=11, color=TEXT)
        panel.set_xlim(left=0)
    legend(figure, axes[0])
    return figure


def decoded(row: Row) -> str:
    """The shape of a row of decode.csv."""
    pages = f", pages of {row['page']}" if row["page"] != "0" else ""
    queries = f", {row['queries']} queries" if row["queries"] != "1" else ""
    return f"{row['batch']} x {row['keys']}, {row['heads']}/{row['kv_heads']} of {row['headdim']}{pages}{queries}"


def decode(rows: list[Row]) -> Figure:
    """Part of a copy's rate by shape and contender; chunks of a prompt, which are bound by products, are left out."""
    found: dict[str, dict[str, float]] = {}
    for r in rows:
        if r["status"] == "ok" and r["of_copy"] and int(r["queries"]) <= MOST_QUERIES:
            found.setdefault(decoded(r), {})[r["contender"]] = float(r["of_copy"])
    figure, (panel,) = new(WIDTH, 0.24 * len(found) + 1.5)
    dots(panel, found, CACHES)
    panel.axvline(1, color=TEXT, linewidth=1, linestyle="--", label="copy")
    panel.set_title("attention to caches: part of a copy's rate", fontsize=11, color=TEXT)
    panel.set_xlim(left=0)
    legend(figure, panel)
    return figure


MOST_QUERIES = 16


def drawn_speeds(rows: Iterable[Row]) -> dict[str, list[float]]:
    """By kind, the fastest other contender's time over ours at the last points of sample.csv, the least first. Those
    before were of older kernels.
    """
    of_kind: dict[str, list[Row]] = {}
    for r in rows:
        of_kind.setdefault(r["kind"], []).append(r)
    found = {kind: given(p.ahead_of_best() for p in points(of_kind.get(kind, ()))) for kind in KINDS}
    return {kind: sorted(speeds[-LAST:]) for kind, speeds in found.items() if speeds}


LAST = 100


def sample(rows: list[Row]) -> Figure:
    """Speed over the fastest other contender at drawn points, the least first."""
    figure, (panel,) = new(WIDTH, 3.6)
    for kind, speeds in drawn_speeds(rows).items():
        color, line = KINDS[kind]
        parts = [(k + 0.5) / len(speeds) for k in range(len(speeds))]
        panel.plot(parts, speeds, line, color=color, linewidth=2, label=f"{kind}, {len(speeds)} points")
    panel.axhline(1, color=TEXT, linewidth=1)
    panel.axhspan(1 - BEHIND, 1 + BEHIND, color=TEXT, alpha=0.2, linewidth=0)
    panel.set(xlim=(0, 1), yscale="log", xlabel="part of the drawn points", ylabel="speed over the fastest other")
    ticks = (0.7, 1, 1.5, 2, 3, 5, 10)
    panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.set_yticks([], minor=True)
    panel.set_ylim(top=12)  # some are 100 times as fast
    panel.set_title(f"sizes that nobody picked, one {rows[0]['gpu']}; within 3% in grey", fontsize=11, color=TEXT)
    panel.grid()
    legend(figure, panel)
    return figure


# Of each CSV file that has a picture of its own.
DRAWN: dict[str, Callable[[list[Row]], Figure]] = {
    "llama_step": training_steps, "model_steps": model_steps, "attention": attention, "decode": decode,
    "sample": sample, "startup": startup, "build_time": build_time,
}  # fmt: skip
