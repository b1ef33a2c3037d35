"""Figures that guides name, from the CSV files: what stands in two places is made from one."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log
from pathlib import Path

from attention import PRODUCTS, SHAPES, Shape
from common import ROOT, dates, markdown, read

Times = dict[tuple[str, str], dict[str, float]]
# Contenders of linear.csv that are not compared: quack was not tuned, and JAX's ran in turns of their own.
NOT_COMPARED = ("ours", "ours (JAX)", "XLA", "quack")


def host_times(folder: Path) -> str:
    rows = [r for r in read(folder / "host_time.csv") if r["status"] == "ok" and r["call"] in (RMSNORM, F_RMS_NORM)]
    us = {(r["call"], r["grad"]): float(r["us"]) for r in rows}
    ours, torchs = ([f"{us[call, grad]:.1f}" for grad in ("no", "yes")] for call in (RMSNORM, F_RMS_NORM))
    return (
        f"On the host of an {rows[0]['gpu'].split()[-1]} `{RMSNORM}` takes {ours[0]} us and {ours[1]} us with a "
        f"gradient, where `{F_RMS_NORM}` takes {torchs[0]} and {torchs[1]} ({dates(rows)})."
    )


RMSNORM, F_RMS_NORM = "cute_ops_torch.rmsnorm", "F.rms_norm"


def gelu_add(folder: Path) -> str:
    every = read(folder / "expressions.csv")
    rows = {(r["direction"], r["contender"]): r for r in every if (r["op"], r["n"]) == ("gelu_add", "4096")}
    texts = []
    for direction, title in (("fwd", "forward"), ("bwd", "gradient")):
        ours, compiled = rows[direction, "ours (torch)"], rows[direction, "torch.compile"]
        share = f"{100 * float(ours['of_copy']):.0f}% of a copy's rate"
        texts.append(
            f"the {title} takes {float(ours['us']):.0f} us, {share}, and torch.compile's {float(compiled['us']):.0f} us"
        )
    first = rows["fwd", "ours (torch)"]
    where = f"{first['rows']} x {first['n']} in bfloat16 on an {first['gpu'].split()[-1]}"
    return f"At {where} {texts[0]}; {texts[1]} ({dates(rows.values())})."


def softcap(folder: Path) -> str:
    """The product of own_kernel.md with its epilogue, beside the same shape without one."""
    rows, times = read(folder / "linear.csv"), products(folder)
    (case,) = (case for op, case in times if op == "linear_softcap")
    us, alone = times["linear_softcap", case], times["linear", case]["ours"]
    r = next(r for r in rows if r["op"] == "linear_softcap")
    return (
        f"On an {r['gpu'].split()[-1]}, {r['m']} rows, {r['k']} features and {r['n']} outputs in bfloat16 take "
        f"{us['ours']:.0f} us with this epilogue, where the product alone takes {alone:.0f} us; cuBLAS followed by "
        f"PyTorch's functions takes {us['cuBLAS']:.0f} us, torch.compile {us['torch.compile']:.0f} us ({r['date']})."
    )


def product_speeds(folder: Path) -> str:
    times = {key: us for key, us in products(folder).items() if "decode" not in key[1]}
    alone = {k: us for k, us in times.items() if k[0] in ALONE and k[1].startswith(("llama", "vit"))}
    fused = {k: us for k, us in times.items() if k[0] in ("linear_gelu", "linear_add", "gated_linear")}
    gated = {k: us for k, us in times.items() if k[0] == "gated_mlp_dgrad"}
    fastest = "the fastest of cuBLAS and a pass, cuBLAS's fused forms and `torch.compile`"
    groups = {
        "alone, at shapes of Llama and ViT; beside cuBLAS": alone,
        f"with GELU, a residual or a gate; beside {fastest}": fused,
        "a gated activation's gradient behind its product; beside the same": gated,
    }
    product = f"product, {dates(read(folder / 'linear.csv'))}"
    return markdown((product, "shapes", "speed", "least", "most"), [(name, *_speed(g)) for name, g in groups.items()])


ALONE = ("linear", "linear_dx", "linear_dweight")


def products(folder: Path) -> Times:
    """Microseconds by op and case, then by contender."""
    found: Times = {}
    for r in read(folder / "linear.csv"):
        if r["status"] == "ok":
            found.setdefault((r["op"], r["case"]), {})[r["contender"]] = float(r["us"])
    return {key: us for key, us in found.items() if "ours" in us}


def _speed(times: Times) -> tuple[str, ...]:
    ahead = [min(t for name, t in us.items() if name not in NOT_COMPARED) / us["ours"] for us in times.values()]
    mean = exp(sum(map(log, ahead)) / len(ahead))
    return str(len(ahead)), *(f"{each:.2f} x" for each in (mean, min(ahead), max(ahead)))


def compile_times(folder: Path) -> str:
    """What compiling with the graph pass takes of what it takes without, at models that one run has both of."""
    rows = [r for r in read(folder / "model_steps.csv") if r["status"] == "ok" and r["warm_up_s"]]
    seconds: Times = {}
    for r in rows:
        seconds.setdefault((r["model"], r["commit"]), {})[r["contender"]] = float(r["warm_up_s"])
    both = {m: s[PASS] / s[COMPILED] for (m, _), s in seconds.items() if {PASS, COMPILED} <= s.keys()}
    gpu, least, most = rows[0]["gpu"].split()[-1], min(both.values()), max(both.values())
    days = dates(r for r in rows if r["model"] in both and r["contender"] == PASS)
    return (
        f"On the host of an {gpu}, compiling a training step with the pass took {least:.2f} to {most:.2f} of the time "
        f"without it, kernels included ({', '.join(both)}; {days})."
    )


COMPILED, PASS = "torch.compile", "graph pass + compile"


def attention_times(folder: Path) -> str:
    """Microseconds by listed shape and form, forward and with gradients; of several rows the last counts."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    listed = {tuple(map(str, shape)) for shape in SHAPES}
    for r in read(folder / "attention.csv"):
        shape = tuple(r[c] for c in Shape._fields)
        if shape in listed and r["status"] == "ok":
            label = f"{r['batch']} x {r['seqlen']}, {r['heads']} and {r['kv_heads']}, {r['headdim']}"
            found.setdefault((label, r["form"]), {})[f"{r['direction']}: {r['contender']}"] = f"{float(r['us']):.0f}"
    names = [f"{direction}: {name}" for direction in PRODUCTS for name in ATTENTION]
    lines = ((*key, *(us.get(name, "") for name in names)) for key, us in found.items() if len(us) > 1)
    return markdown(("batch x seqlen, heads of q and k, headdim", "form", *names), lines)


def attention_means(folder: Path) -> str:
    """Our time over that of each other kernel, causal and full, at all shapes that both have."""
    columns, us = (*Shape._fields, "form"), dict[tuple[str, ...], dict[str, float]]()
    for r in read(folder / "attention.csv"):
        if r["status"] == "ok" and r["form"] in ("causal", "full"):
            us.setdefault(tuple(r[c] for c in ("direction", *columns)), {})[r["contender"]] = float(r["us"])
    lines = []
    for direction in PRODUCTS:
        for other in ATTENTION[1:3]:
            both = {k: each for k, each in us.items() if k[0] == direction and {"ours", other} <= each.keys()}
            of = {k: each["ours"] / each[other] for k, each in both.items()}
            mean, worst = exp(sum(map(log, of.values())) / len(of)), max(of, key=of.__getitem__)
            where = dict(zip(columns, worst[1:], strict=True))
            shape = "{batch} x {seqlen}, {heads} and {kv_heads} heads of {headdim}, {form}".format_map(where)
            behind = str(sum(ratio > 1.05 for ratio in of.values()))
            lines.append((direction, other, str(len(of)), f"{mean:.2f}", f"{of[worst]:.2f} ({shape})", behind))
    header = (
        "direction",
        "beside",
        "shapes, causal and full",
        "our time, in the mean",
        "at worst",
        "more than 5% behind",
    )
    return markdown(header, lines)


ATTENTION = ("ours", "cuDNN", "FlashAttention 4", "FlexAttention")


def cache_rates(folder: Path) -> str:
    """GB/s of few queries a sequence, by shape and page size; of several rows the last counts."""
    rows = [r for r in read(folder / "decode.csv") if r["status"] == "ok" and int(r["queries"]) <= FEW]
    found: dict[tuple[str, str], dict[str, str]] = {}
    for r in rows:
        if r["headdim"] != LATENT:
            several = f", {r['queries']} queries" if r["queries"] != "1" else ""
            label = f"{r['batch']} x {r['keys']}, {r['heads']} and {r['kv_heads']}, {r['headdim']}{several}"
            page = "none" if r["page"] == "0" else r["page"]
            found.setdefault((label, page), {})[r["contender"]] = r["gbps"]
    lines = ((*key, *(rates.get(name, "") for name in CACHES)) for key, rates in found.items())
    return markdown(("sequences x keys, heads of q and kv, headdim", "page", *CACHES.values()), lines)


CACHES = {
    "ours": "ours", "ours, float8": "float8 caches", "ours, batch-invariant": "batch-invariant", "SDPA": "SDPA",
    "copy": "copy",
}  # fmt: skip
FEW, LATENT = 16, "576"  # what decode_attention takes, and the head dim of mla_decode

# Of each page, what stands between two comments, and their name where it is not "figures".
PAGES: tuple[tuple[Path, Callable[[Path], str], str], ...] = (
    (ROOT / "docs/pytorch.md", host_times, "figures"),
    (ROOT / "docs/fused.md", gelu_add, "figures"),
    (ROOT / "docs/own_kernel.md", softcap, "figures"),
    (ROOT / "docs/products.md", product_speeds, "figures"),
    (ROOT / "docs/compile.md", compile_times, "figures"),
    (ROOT / "docs/attention.md", attention_times, "figures"),
    (ROOT / "docs/attention.md", attention_means, "means"),
    (ROOT / "docs/attention.md", cache_rates, "caches"),
)
