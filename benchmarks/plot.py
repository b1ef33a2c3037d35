r"""Pictures, the page of tables and the README's figures, from the CSV files of a folder.

    python benchmarks/plot.py benchmarks/results [--page benchmarks/results/README.md] [--readme README.md] \
        [--distributed docs/distributed.md] [--guides]

Writes the pictures of :mod:`pictures` beside the files. ``--page``, ``--readme`` and ``--distributed`` replace what
stands between the two ``figures`` comments of a file: by all pictures and tables, by a short table, by the tables of
several GPUs. The README's ``headline`` comments get a sentence of the training step, where that was measured.
``--guides`` does so with the guides of :mod:`in_pages`, which name a figure or two.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import in_pages
import pictures
import several_gpus
from common import markdown, read
from pictures import STYLES, TITLES, Row, copy_rate, plain, shape, unique
from summary import (
    OURS,
    OURS_JAX,
    XLA,
    Point,
    behind,
    given,
    head,
    head_kinds,
    mean,
    of_expressions,
    optax,
    overview,
    points,
)

BEGIN, END = "<!-- figures: begin (made by benchmarks/plot.py) -->", "<!-- figures: end -->"
HEADLINE = tuple(mark.replace("figures:", "headline:") for mark in (BEGIN, END))
PICTURES = {
    "llama_step": "Tokens per second of a training step by library",
    "overview": "Part of a large copy's GB/s by op and contender",
    "rates": "GB/s of every contender by shape",
    "roofline": "GB/s by the bytes of a problem",
    "startup": "Milliseconds to a first result",
    "build_time": "Seconds to build every kernel",
}


PRODUCTS_IN_JAX = ("XLA", "ours (JAX)")


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
    table = markdown(["GB/s", *names], ([p, *(cells.get(n, "") for n in names)] for p, cells in problems.items()))
    return f"A large copy moves {copy_rate(rows):.0f} GB/s.\n\n{table}"


def expression_table(rows: list[Row]) -> str:
    return f"{of_expressions(points(rows))}\n\n{device_table(rows)}"


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


def floor_table(rows: list[Row]) -> str:
    """Loops and contenders beside Liger in the same run, then the ways of each part."""
    liger = {r["commit"]: float(r["ms"]) for r in rows if r["contender"] == "Liger"}
    steps = [r for r in rows if r["part"] == "step"]
    cells = (
        [
            r["contender"],
            r["commit"],
            r["ms"],
            r["watts"],
            r["mhz"],
            r["joules"],
            f"{liger[r['commit']] / float(r['ms']):.3f}",
        ]
        for r in steps
    )
    whole = markdown(["loop or contender", "commit", "ms", "W", "MHz", "J a step", "x Liger"], cells)
    parts = [r for r in rows if r["part"] != "step"]
    ways = unique(r["contender"] for r in parts)
    ms = {(r["part"], r["contender"]): f"{r['ms']} ({r['tflops']})" if r["tflops"] else r["ms"] for r in parts}
    lines = ([part, *(ms.get((part, way), "") for way in ways)] for part in unique(r["part"] for r in parts))
    return f"{whole}\n\n{markdown(['all of a step, ms (TFLOPS)', *ways], lines)}"


def fusion_table(rows: list[Row]) -> str:
    by_graph: dict[str, dict[str, str]] = {}
    for r in rows:
        figure = f"{float(r['us']):.0f}" if r["status"] == "ok" and r["us"] else r["status"].partition(":")[0]
        by_graph.setdefault(f"{r['graph']} {r['rows']}x{r['n']}", {})[r["contender"]] = figure
    names = unique(r["contender"] for r in rows)
    cells = ([f"`{graph}`", *(v.get(name, "") for name in names)] for graph, v in by_graph.items())
    return markdown(["graph under max-autotune, us", *names], cells)


def product_table(rows: list[Row]) -> str:
    """Microseconds of each contender by product, the fastest of PyTorch's in bold; JAX's are beside one another."""
    names = unique(r["contender"] for r in rows)
    table: dict[tuple[str, ...], dict[str, Row]] = {}
    for r in rows:
        table.setdefault((r["op"], r["case"], f"{r['m']} x {r['n']} x {r['k']}"), {})[r["contender"]] = r
    lines = []
    for key, of in table.items():
        us = {n: float(of[n]["us"]) for n in names if n in of and of[n]["us"]}
        best = min((n for n in us if n not in PRODUCTS_IN_JAX), key=us.__getitem__)
        cells = (f"{us[n]:.4g}" if n in us else "" for n in names)
        lines.append((*key, *(f"**{c}**" if n == best else c for n, c in zip(names, cells, strict=True))))
    return markdown(("op", "case", "m x n x k", *names), lines)


def section(folder: Path) -> str:
    """What was measured on what, then a folded table, per file that is there."""
    parts = []
    for name, title, make in (
        ("device_time", "Device time", device_table),
        ("expressions", "Expressions", expression_table),
        ("llama_step", "Training step", step_table),
        ("llama_floor", "Floor of the training step", floor_table),
        ("optax_decoder", "Training step in JAX", optax),
        ("linear_cross_entropy", "Loss of a linear head", head),
        ("head_losses", "Preferences and distillation on a linear head", head_kinds),
        ("host_time", "Host time", host_table),
        ("linear", "Matrix products", product_table),
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
            parts.append(f"### {title}\n\n{source}.\n\n{folded('Table', make(rows))}")
    return "\n\n".join(parts)


def folded(summary: str, body: str) -> str:
    """Markdown that a reader opens: on GitHub and, by the extension ``md_in_html``, on the site."""
    return f'<details markdown="1"><summary>{summary}</summary>\n\n{body}\n\n</details>'


def page(folder: Path) -> str:
    """One picture, then all others and all tables, folded, for the page beside the files."""
    drawn = [(what, f"![{what}]({name}.svg)") for name, what in PICTURES.items() if (folder / f"{name}.svg").exists()]
    (_, first), *others = drawn
    rest = "\n\n".join(folded(what, picture) for what, picture in others)
    come_to = overview(points(read(folder / "device_time.csv")))
    means = f"What the device times come to, beside the aims; means are geometric.\n\n{come_to}"
    return f"{first}\n\n{rest}\n\n{folded('Aims of the device times', means)}\n\n{section(folder)}"


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
    if {"Liger", "ours"} <= steps.keys():
        ours, liger = steps["ours"], steps["Liger"]
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


def headline(folder: Path) -> str:
    """The one figure of the README's opening: how much faster the same model trains."""
    speed = {name: float(r["tokens_per_s"]) for name, r in by(folder / "llama_step.csv", "contender").items()}
    ours, gpu = speed["ours"], read(folder / "llama_step.csv")[0]["gpu"]
    liger, compiled = (f"{ours / speed[name]:.2f} x" for name in ("Liger", "torch.compile"))
    best = f"at **{liger} the speed of Liger** and {compiled} that of `torch.compile`"
    untouched = f"{speed['graph pass + compile'] / speed['Liger']:.2f} x Liger's untouched, by the graph pass"
    return f"A Llama-shaped model trains {best} on one {gpu} ({untouched})."


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


def put(body: str, path: Path, marks: tuple[str, ...] = (BEGIN, END)) -> str:
    """The text of a file with ``body`` between its two comments.

    Raises:
        ValueError: it has no such comments.
    """
    begin, end = marks
    before, _, rest = path.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{path} has no {begin} ... {end}")
    return f"{before}{begin}\n{body}\n{end}{after}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with device_time.csv and, where measured, the other files")
    parser.add_argument("--page", type=Path, help="file to put all tables into")
    parser.add_argument("--readme", type=Path, help="file to put the short table into")
    parser.add_argument("--distributed", type=Path, help="file to put the tables of several GPUs into")
    parser.add_argument("--guides", action="store_true", help="put figures into the guides that name some")
    options = parser.parse_args(arguments)
    for picture in pictures.draw_all(options.folder):
        print(f"wrote {picture}")
    guides = in_pages.PAGES.items() if options.guides else ()
    made = ((options.page, page), (options.readme, figures), (options.distributed, several_gpus.section), *guides)
    for path, make in made:
        if path:
            path.write_text(put(make(options.folder), path))
            print(f"wrote {path}")
    if options.readme and HEADLINE[0] in options.readme.read_text():
        options.readme.write_text(put(headline(options.folder), options.readme, HEADLINE))


if __name__ == "__main__":
    main()
