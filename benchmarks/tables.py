"""The tables of plot.py's page, a function for each CSV file."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from common import markdown
from pictures import STYLES, TITLES, Row, attended, copy_rate, decoded, plain, shape, unique
from summary import BEHIND, COMPILED, given, head, head_kinds, mean, of_expressions, optax, points, row_floors

PRODUCTS_IN_JAX = ("XLA", "ours (JAX)")
NOT_COMPARED = ("copy", "ours, float8", "ours, JAX", "ours, no cache")  # of other bytes, or by another clock


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
    columns = ("contender", "commit", "ms", "watts", "mhz", "joules")
    cells = ([*(r[c] for c in columns), f"{liger[r['commit']] / float(r['ms']):.3f}"] for r in steps)
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


def model_table(rows: list[Row]) -> str:
    """Milliseconds and peak memory of a step by model and contender, and the fastest of ours over torch.compile. A star
    stands at what is of another commit, so of another run, than the patched model.
    """
    names, models = unique(r["contender"] for r in rows), unique(r["model"] for r in rows)
    ok = {(r["model"], r["contender"]): r for r in rows if r["status"] == "ok"}
    lines = []
    for model in models:
        of = {n: ok[model, n] for n in names if (model, n) in ok}
        ours = [float(r["ms"]) for n, r in of.items() if n.startswith(("ours", "graph pass"))]
        speed = f"{float(of[COMPILED]['ms']) / min(ours):.2f} x" if COMPILED in of and ours else ""
        run = of["ours"]["commit"] if "ours" in of else ""
        stars = {n: "*" if run not in ("", r["commit"]) else "" for n, r in of.items()}
        cells = (f"{of[n]['ms']} ({of[n]['peak_gb']}){stars[n]}" if n in of else "" for n in names)
        lines.append((model, *cells, speed))
    return markdown(["ms of a step (peak GB); *: of another run", *names, "best of ours over torch.compile"], lines)


def attention_table(rows: list[Row]) -> str:
    """TFLOPS by shape and contender, the fastest in bold."""
    return by_shape(rows, lambda r: f"{r['direction']} {attended(r)}", "tflops", max)


def masked_table(rows: list[Row]) -> str:
    """Microseconds by shape and contender, the fastest in bold."""
    return by_shape(rows, lambda r: f"{r['direction']} {attended(r)}", "us", min)


def decode_table(rows: list[Row]) -> str:
    """Microseconds by shape and contender, the fastest in bold."""
    return by_shape(rows, decoded, "us", min)


def cache_floors(rows: list[Row]) -> str:
    """Microseconds by shape and contender, each with its part of a copy's rate, or TFLOPS and MHz."""
    found: dict[str, dict[str, str]] = {}
    for r in rows:
        more = r["of_copy"] or f"{r['tflops']} TFLOPS, {r['mhz']} MHz"
        found.setdefault(f"{decoded(r)}, {r['dtype']}", {})[r["contender"]] = f"{r['us']} ({more})"
    names = unique(r["contender"] for r in rows)
    return markdown(
        ["us (part of a copy's rate)", *names], ([s, *(of.get(n, "") for n in names)] for s, of in found.items())
    )


def by_shape(rows: Iterable[Row], label: Callable[[Row], str], column: str, best: Callable[..., str]) -> str:
    """A line for each shape with a column for each contender, of which the last row counts; the best in bold."""
    ok = [r for r in rows if r["status"] == "ok"]
    names = unique(r["contender"] for r in ok)
    found: dict[str, dict[str, float]] = {}
    for r in ok:
        found.setdefault(label(r), {})[r["contender"]] = float(r[column])
    lines = []
    for line, of in found.items():
        fastest = best((n for n in of if n not in NOT_COMPARED), key=of.__getitem__, default="")
        cells = (f"{of[n]:.4g}" if n in of else "" for n in names)
        lines.append((line, *(f"**{c}**" if n == fastest else c for n, c in zip(names, cells, strict=True))))
    return markdown([UNITS[column], *names], lines)


UNITS = {"tflops": "TFLOPS", "us": "us"}


def sample_table(rows: list[Row]) -> str:
    """What each run of a seed came to, as it was measured."""
    runs: dict[tuple[str, str, str], list[Row]] = {}
    for r in rows:
        if r["kind"]:
            runs.setdefault((r["kind"], r["seed"], r["commit"]), []).append(r)
    lines = []
    for key, of in sorted(runs.items(), key=lambda run: (run[0][0], run[1][0]["date"])):
        if speeds := given(p.ahead_of_best() for p in points(of)):
            late = sum(speed < 1 - BEHIND for speed in speeds)
            figures = (str(len(speeds)), mean(speeds), f"{min(speeds):.2f}", str(late))
            lines.append((*key, of[0]["date"], *figures))
    header = ("kind", "seed", "commit", "date", "points", "speed over the fastest other", "least", "3% behind")
    return markdown(header, lines)


def fuse_table(rows: list[Row]) -> str:
    """Steps of JAX models through ``fuse`` beside XLA's."""
    ms = {(r["model"], r["contender"]): float(r["ms"]) for r in rows}
    lines = (
        [r["model"], r["contender"], r["ms"], r["temporaries_gb"], r["compile_s"],
         f"{ms[r['model'], 'XLA'] / float(r['ms']):.2f}"]
        for r in rows
    )  # fmt: skip
    return markdown(["training step in JAX", "by", "ms", "GB of temporaries", "s to compile", "x XLA"], lines)


def attention_floors(rows: list[Row]) -> str:
    columns = ("pairs", "tiles", "us", "floor_us", "asked_us", "of_floor", "floor_of_asked")
    shape = "{direction}, {batch} x {seqlen}, {heads}/{kv_heads} heads of {headdim}, {form}".format_map
    header = ["attention", "pairs", "in tiles", "us", "floor", "all keys' by pairs", "us / floor", "floor / by pairs"]
    return markdown(header, ([shape(r), *(r[c] for c in columns)] for r in rows))


# Of each CSV file: its title, and its table.
TABLES: dict[str, tuple[str, Callable[[list[Row]], str]]] = {
    "device_time": ("Device time", device_table),
    "expressions": ("Expressions", expression_table),
    "sample": ("Drawn sizes", sample_table),
    "attention": ("Attention", attention_table),
    "masked_attention": ("Attention with masks of padded batches", masked_table),
    "attention_floor": ("Floors of windows and documents", attention_floors),
    "decode": ("Attention to caches", decode_table),
    "decode_floor": ("Floors of attention to caches", cache_floors),
    "llama_step": ("Training step", step_table),
    "llama_floor": ("Floor of the training step", floor_table),
    "row_floor": ("Floors of rows below 0.90 of a copy's rate", row_floors),
    "model_steps": ("Training steps of other models", model_table),
    "optax_decoder": ("Training step in JAX", optax),
    "fuse_step": ("Untouched models in JAX", fuse_table),
    "linear_cross_entropy": ("Loss of a linear head", head),
    "head_losses": ("Preferences and distillation on a linear head", head_kinds),
    "host_time": ("Host time", host_table),
    "linear": ("Matrix products", product_table),
    "fusion": ("Our kernels or Inductor's fusion", fusion_table),
    "startup": ("Start-up", startup_table),
}
