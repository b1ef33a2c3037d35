r"""Pictures, the page of tables and the README's figures, from the CSV files of a folder.

    python benchmarks/plot.py benchmarks/results [--page benchmarks/results/README.md] [--readme README.md] \
        [--distributed docs/distributed.md] [--guides]

Writes the pictures of :mod:`pictures` beside the files. ``--page``, ``--readme`` and ``--distributed`` replace what
stands between the two ``figures`` comments of a file: by all pictures and tables, by a short table, by the tables of
several GPUs. The README's ``headline`` comments get a sentence of the training step, where that was measured.
``--guides`` does so with the guides of :mod:`in_pages`, between comments of the names that stand there.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable
from pathlib import Path

import in_pages
import pictures
import several_gpus
from common import ROOT, dates, markdown, read
from pictures import Row, ours, unique
from summary import BEHIND, OURS, OURS_JAX, TITLES, XLA, behind, given, mean, overview, points
from tables import TABLES

BEGIN, END = "<!-- figures: begin (made by benchmarks/plot.py) -->", "<!-- figures: end -->"
PICTURES = {
    "llama_step": "Tokens per second of a training step by library",
    "model_steps": "Speed of training steps over torch.compile by model",
    "attention": "TFLOPS of attention by shape and contender",
    "decode": "Time of attention to caches, as a part of a copy's rate",
    "sample": "Speed over the fastest other contender at drawn sizes",
    "overview": "Part of a large copy's GB/s by op and contender",
    "rates": "GB/s of every contender by shape",
    "roofline": "GB/s by the bytes of a problem",
    "startup": "Milliseconds to a first result",
    "build_time": "Seconds to build every kernel",
}


def section(folder: Path) -> str:
    """What was measured, when and on what, then a folded table, per file that is there."""
    parts = []
    for name, (title, make) in TABLES.items():
        path = folder / f"{name}.csv"
        if path.exists() and (rows := read(path)):
            links = f"[how](../{name}.py), `{name}.csv`, [notes](#{name}csv)"
            versions, commits = ("; ".join(unique(row[c] for row in rows)) for c in ("versions", "commit"))
            drivers = ", ".join(unique(row["driver"] for row in rows if row["driver"]))
            source = f"Driver {drivers}; {versions}. Commits: {commits}."
            table = folded("Table", f"{make(rows)}\n\n{source}")
            parts.append(f"### {title}\n\n{about(name)} {rows[0]['gpu']}, {dates(rows)}: {links}.\n\n{table}")
    return "\n\n".join(parts)


def about(name: str) -> str:
    """What a benchmark says that it measures: the first paragraph of its file."""
    text = ast.get_docstring(ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "`")


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
    """A short table for the README: of every file that is there, what it comes to, and when it was measured."""
    parts = (device_lines, drawn_lines, step_lines, attention_lines, head_lines, host_lines, startup_lines)
    return markdown(("what", "figure", "measured"), [line for part in parts for line in part(folder)])


Lines = list[tuple[str, str, str]]


def device_lines(folder: Path) -> Lines:
    rows = read(folder / "device_time.csv")
    found, when = points(rows), dates(rows)
    ours = [p for p in found if OURS in p.us]
    lines = []
    for direction, title in TITLES.items():
        of = [p for p in ours if p.direction == direction]
        shares = [p.share[OURS] for p in of if p.large]
        what = f"ops bound by memory, {title}: {len(shares)} points of 128 MB and more"
        lines.append((what, f"{mean(shares)} of a copy's GB/s", when))
    ratios = {d: mean(given(p.ahead_of_best() for p in ours if p.direction == d)) for d in TITLES}
    best = f"{ratios['fwd']} x forward, {ratios['bwd']} x backward"
    others = "their speed over the fastest of PyTorch, torch.compile, quack, Liger and XLA at each point"
    lines.append((others, best, when))
    lines.append(("points of this grid more than 3% behind the fastest", f"{len(behind(ours))} of {len(ours)}", when))
    in_jax = f"{mean(given(p.ahead(XLA, OURS_JAX) for p in found))} x"
    return [*lines, ("the same ops in JAX: speed over XLA", in_jax, when)]


def drawn_lines(folder: Path) -> Lines:
    """What the points of sample.csv come to, which nobody picked."""
    path = folder / "sample.csv"
    rows = read(path) if path.exists() else []
    texts = []
    for kind, speeds in pictures.drawn_speeds(rows).items():
        late = sum(speed < 1 - BEHIND for speed in speeds)
        texts.append(f"{kind} {mean(speeds)} x, {late} of {len(speeds)} more than {BEHIND:.0%} behind")
    what = "sizes drawn by a seed: speed over the fastest other at each point"
    return [(what, "; ".join(texts), dates(rows))] if texts else []


def attention_lines(folder: Path) -> Lines:
    """Speed over the fastest other contender of the same shape; forms for which few have a kernel are a line apart."""
    path = folder / "attention.csv"
    rows = [r for r in read(path) if r["status"] == "ok"] if path.exists() else []
    plain = [r for r in rows if r["form"] in PLAIN]
    more = "windows, documents, functions and soft caps"
    kinds = {" and ".join(PLAIN): plain, more: [r for r in rows if r["form"] not in PLAIN]}
    lines = []
    for kind, of in kinds.items():
        if texts := [text for direction in TITLES.values() if (text := attention_speed(of, direction))]:
            what = f"attention, {kind}: speed over the fastest of cuDNN, FlashAttention and FlexAttention"
            lines.append((what, ", ".join(texts), dates(of)))
    return lines


def attention_speed(rows: Iterable[Row], direction: str) -> str:
    """The mean over the shapes of a direction that others ran, too; empty if there is none."""
    tflops: dict[str, dict[str, float]] = {}
    for r in rows:
        if r["direction"] == direction:
            tflops.setdefault(pictures.attended(r), {})[r["contender"]] = float(r["tflops"])
    pairs = [(of.pop("ours"), max(of.values())) for of in tflops.values() if "ours" in of and len(of) > 1]
    return f"{mean(ours / other for ours, other in pairs)} x {direction} ({len(pairs)} shapes)" if pairs else ""


PLAIN = ("causal", "full")


def step_lines(folder: Path) -> Lines:
    lines = []
    steps = by(folder / "llama_step.csv", "contender")
    if {"Liger", "ours"} <= steps.keys():
        mine, liger = steps["ours"], steps["Liger"]
        ratio = float(mine["tokens_per_s"]) / float(liger["tokens_per_s"])
        memory = f"{mine['peak_gb']} GB for {liger['peak_gb']}"
        what = "Llama-shaped training step in PyTorch"
        lines.append((what, f"{ratio:.2f} x Liger's tokens/s, {memory}", dates(steps.values())))
    rows = read(path) if (path := folder / "model_steps.csv").exists() else []
    models = pictures.model_speeds(rows)
    others = [max([1.0, *(speed for name, speed in of.items() if not ours(name))]) for of in models.values()]
    best = [max(speed for name, speed in of.items() if ours(name)) for of in models.values()]
    if gains := [speed / other for speed, other in zip(best, others, strict=True)]:
        what = "the faster of patched and by the graph pass, over the fastest of eager, torch.compile and Liger"
        text = f"{min(gains):.2f} to {max(gains):.2f} x, {mean(gains)} x in the mean"
        lines.append((f"training steps of {len(gains)} other models: {what}", text, dates(rows)))
    steps = by(folder / "optax_decoder.csv", "ops")
    if {"ours", "XLA"} <= steps.keys():
        mine, xla = steps["ours"], steps["XLA"]
        ratio = float(mine["tokens_per_s"]) / float(xla["tokens_per_s"])
        memory = f"{mine['temporaries_gb']} GB of temporaries for {xla['temporaries_gb']}"
        what = "decoder trained with optax in JAX"
        lines.append((what, f"{ratio:.2f} x XLA's tokens/s, {memory}", dates(steps.values())))
    return lines


def headline(folder: Path) -> str:
    """The one figure of the README's opening: how much faster the same model trains."""
    speed = {name: float(r["tokens_per_s"]) for name, r in by(folder / "llama_step.csv", "contender").items()}
    ours, gpu = speed["ours"], read(folder / "llama_step.csv")[0]["gpu"]
    liger, compiled = (f"{ours / speed[name]:.2f} x" for name in ("Liger", "torch.compile"))
    best = f"at **{liger} the speed of Liger** and {compiled} that of `torch.compile`"
    untouched = f"at {speed['graph pass + compile'] / speed['Liger']:.2f} x Liger's"
    return f"A Llama-shaped model trains {best} on one {gpu}; compiled with the graph pass, not patched, {untouched}."


def head_lines(folder: Path) -> Lines:
    """Time and memory at the first shape of the file, with both dtypes of sums, beside Liger's and PyTorch's."""
    path = folder / "linear_cross_entropy.csv"
    names = ("ours (torch)", "ours, summed in bfloat16", "Liger", "torch eager")
    rows = [r for r in read(path) if r["status"] == "ok" and r["contender"] in names] if path.exists() else []
    if not rows:
        return []
    first = {r["contender"]: r for r in rows if shape_of_head(r) == shape_of_head(rows[0])}
    texts = (f"{name} {float(r['ms']):.1f} ms, {float(r['peak_mb']) / 1e3:.1f} GB" for name, r in first.items())
    return [(f"loss of a linear head, {' x '.join(shape_of_head(rows[0]))}", "; ".join(texts), dates(first.values()))]


def shape_of_head(row: Row) -> tuple[str, str, str]:
    return row["rows"], row["hidden"], row["vocabulary"]


def host_lines(folder: Path) -> Lines:
    """With the names of host_time.csv: a call without and with gradients."""
    rows = read(folder / "host_time.csv") if (folder / "host_time.csv").exists() else []
    ours, torchs = "cute_ops_torch.rmsnorm", "F.rms_norm"
    rows = [r for r in rows if r["status"] == "ok" and r["call"] in (ours, torchs)]
    us = {(r["call"], r["grad"]): r["us"] for r in rows}
    if not all((call, grad) in us for call in (ours, torchs) for grad in ("no", "yes")):
        return []
    text = ", ".join(
        f"{float(us[ours, g]):.1f} us{with_grad} (`F.rms_norm` {float(us[torchs, g]):.1f})"
        for g, with_grad in (("no", ""), ("yes", " with a gradient"))
    )
    return [("host time of `cute_ops_torch.rmsnorm`", text, dates(rows))]


def startup_lines(folder: Path) -> Lines:
    rows = read(folder / "startup.csv") if (folder / "startup.csv").exists() else []
    warm = [r for r in rows if (r["cache"], r["status"]) == ("warm", "ok")]
    ms = {(r["framework"], r["phase"]): float(r["ms"]) for r in warm}
    texts = [
        f"{ms[each, 'all to first result']:.0f} ms in {name}, {ms[each, 'import tvm_ffi']:.0f} of them TVM-FFI's import"
        for each, name in NAMES.items()
        if (each, "all to first result") in ms
    ]
    return [("import and first call with a warm cache", "; ".join(texts), dates(warm))] if texts else []


NAMES = {"torch": "PyTorch", "jax": "JAX"}


def by(path: Path, column: str) -> dict[str, Row]:
    return {r[column]: r for r in read(path)} if path.exists() else {}


def marks(name: str = "figures") -> tuple[str, str]:
    """The two comments around what is made of this name."""
    return BEGIN.replace("figures", name), END.replace("figures", name)


def put(body: str, path: Path, marks: tuple[str, str] = (BEGIN, END)) -> str:
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
    made = ((options.page, page), (options.readme, figures), (options.distributed, several_gpus.section))
    guides = in_pages.PAGES if options.guides else ()
    for path, make, *names in (*made, *guides):
        if path:
            path.write_text(put(make(options.folder), path, marks(*names)))
            print(f"wrote {path}")
    if options.readme and marks("headline")[0] in options.readme.read_text():
        options.readme.write_text(put(headline(options.folder), options.readme, marks("headline")))


if __name__ == "__main__":
    main()
