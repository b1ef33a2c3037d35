"""Attention and its gradient: ours beside PyTorch's functions.

All contenders take the same queries, keys and values, (batch, seqlen, heads, headdim) in bfloat16, in turns, in one
process. A product of scores or of values is ``2 * batch * heads * seqlen^2 * headdim`` floating-point operations, half
of them where causal; forward there are two, backward five, whatever a contender computes again. Inputs lie in L2 as far
as they fit, as after the projection before them. `error` is the largest difference of the output from PyTorch's
function in float32 in some rows. FlashAttention 4 takes turns where it is installed (`flash-attn-4`). With `--jax` ours
in JAX, cuDNN by `jax.nn`, and FlashAttention 3 and tokamax where they are installed do, too. The time of all is by the
clock then, of many calls less those of a few: calls right after a pause take up to 8% less, as the GPU is cooler.

    python benchmarks/attention.py --out out/benchmarks
    python benchmarks/attention.py --out out/benchmarks --drawn 20 --seed 7    # shapes that nobody picked
    python benchmarks/attention.py --again benchmarks/results/attention.csv --directions backward    # those of a file
    python benchmarks/attention.py --jax --forms causal full    # after pip install tokamax flash-attn3-jax
"""

from __future__ import annotations

import argparse
import math
import random
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import Table, by_clock, first_line, parse_for_gpu, read, spread
from rich.console import Console
from rich.table import Table as View
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_ops_torch
from cute_ops import mods
from cute_ops.ops.attention import config
from cute_ops_torch.tools.measure import elapsed

COLUMNS = (
    "contender", "direction", "batch", "seqlen", "heads", "kv_heads", "headdim", "form", "status", "us", "us_min",
    "us_max", "tflops", "error",
)  # fmt: skip
Tensor = torch.Tensor


class Shape(NamedTuple):
    batch: int
    seqlen: int
    heads: int
    kv_heads: int
    headdim: int


SHAPES = (
    Shape(2, 8192, 32, 8, 128), Shape(16, 1024, 32, 8, 128), Shape(1, 32768, 16, 16, 128), Shape(4, 4096, 32, 8, 64),
    Shape(2, 4096, 16, 16, 256),
)  # fmt: skip
TOKENS = 1 << 15  # of a drawn batch, at most
CONTENDERS = OURS, CUDNN, FLASH_2, FLASH_4, FLEX = (
    "ours",
    "cuDNN",
    "FlashAttention 2",
    "FlashAttention 4",
    "FlexAttention",
)
IN_JAX = OURS_JAX, CUDNN_JAX, FLASH_3, TOKAMAX = "ours in JAX", "jax.nn cuDNN", "FlashAttention 3 in JAX", "tokamax"
PRODUCTS = {"forward": 2, "backward": 5}
CALLS = 8  # of a sample
AHEAD = 1 << 20  # cycles that the device waits before one, so that the host is ahead of it
# By name, our options.
FORMS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window of 1024": {"causal": True, "left": 1023},
    "causal, softcap 50": {"causal": True, "softcap": 50.0},
    "causal, softcap 30": {"causal": True, "softcap": 30.0},
    "causal, ALiBi": {"causal": True, "score_mod": mods.alibi},
    "documents of 1000": {"causal": True, "mask_mod": mods.documents},
}
DOCUMENT = 1000  # tokens of one


def captured(form: str, q: Tensor) -> dict[str, Tensor]:
    """What a form's functions read."""
    b, s, h, _ = q.shape
    found = {}
    if "score_mod" in FORMS[form]:
        found["slopes"] = 2.0 ** (-8 / h * torch.arange(1, h + 1, device=q.device))
    if "mask_mod" in FORMS[form]:
        found["document"] = (torch.arange(s, device=q.device, dtype=torch.int32) // DOCUMENT).expand(b, s).contiguous()
    return found


def drawn(rng: random.Random) -> Shape:
    """A shape of lengths and heads as models have them, and of any length."""
    seqlen = round(2 ** rng.uniform(8, 15))
    seqlen = rng.choice((seqlen, -(-seqlen // 128) * 128))
    kv_heads = rng.choice((1, 2, 4, 8, 16))
    heads = kv_heads * rng.choice((1, 2, 4, 8))
    return Shape(max(TOKENS // seqlen, 1), seqlen, heads, kv_heads, rng.choice((64, 64, 96, 128, 128, 128, 192, 256)))


def contenders(form: str) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        key = q.shape[:3]
        if key not in arrays:
            arrays[key] = captured(form, q)
        out: Tensor = cute_ops_torch.attention(q, k, v, **FORMS[form], captured=arrays[key])[0]
        return out

    arrays: dict[Any, dict[str, Tensor]] = {}

    def by(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    *heads_first, is_causal=form == "causal", enable_gqa=q.shape[2] != k.shape[2]
                )

        return run

    def flex() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # It is compiled anew for each shape and form, and runs unfused once that was too often.
        torch._dynamo.config.recompile_limit = 256
        compiled, masks, arrays = torch.compile(flex_attention, dynamic=False), {}, dict[str, Tensor]()
        window = FORMS[form].get("left", math.inf)

        def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
            if "mask_mod" in FORMS[form]:
                document = arrays["document"]
                return (i >= j) & (document[b, i] == document[b, j])
            return (i >= j) & (i - j <= window) if window < math.inf else i >= j

        def sloped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score - arrays["slopes"][h] * (i - j).abs()

        def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return FORMS[form]["softcap"] * torch.tanh(score / FORMS[form]["softcap"])

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            b, s = q.shape[:2]
            if s not in masks:
                arrays.update(captured(form, q))
                batch = b if "mask_mod" in FORMS[form] else None
                masks[s] = None if form == "full" else create_block_mask(seen, batch, None, s, s, device=q.device)
            change = capped if "softcap" in form else sloped if "score_mod" in FORMS[form] else None
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            out: Tensor = compiled(
                *heads_first, score_mod=change, block_mask=masks[s], enable_gqa=q.shape[2] != k.shape[2]
            )
            return out

        return run

    def fourth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn.cute import flash_attn_func

        options = FORMS[form]
        window = options.get("left"), 0 if "left" in options else None
        out: Tensor = flash_attn_func(
            q, k, v, causal=options.get("causal", False), window_size=window, softcap=options.get("softcap", 0.0)
        )[0]
        return out

    plain = form in ("causal", "full")
    named = {CUDNN: by(SDPBackend.CUDNN_ATTENTION), FLASH_2: by(SDPBackend.FLASH_ATTENTION)}
    changed = FORMS[form].keys() & {"score_mod", "mask_mod"}
    return {OURS: ours, **(named if plain else {}), **({} if changed else {FLASH_4: fourth}), FLEX: flex()}


class InJax:
    """A contender of JAX, which takes tensors without a copy: ``function`` of q, k and v."""

    def __init__(self, function: Callable[..., Any]) -> None:
        import jax

        self.jax, self.function = jax, function
        self.forward = jax.jit(function)

    def arrays(self, *tensors: Tensor) -> list[Any]:
        torch.cuda.synchronize()
        return [self.jax.dlpack.from_dlpack(x.detach()) for x in tensors]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.from_dlpack(self.forward(*self.arrays(q, k, v)).block_until_ready())

    def run(self, given: list[Tensor], backward: bool) -> Callable[[], Any]:
        """Computes the result, or the gradients of a call that was made once."""
        arrays = self.arrays(*given)
        if not backward:
            return lambda: self.forward(*arrays)
        out, derivative = self.jax.jit(lambda *x: self.jax.vjp(self.function, *x))(*arrays)
        (dout,) = self.arrays(torch.randn_like(torch.from_dlpack(out)))
        compiled = self.jax.jit(lambda derivative, dout: derivative(dout))
        return lambda: compiled(derivative, dout)


def in_jax(form: str) -> dict[str, InJax]:
    """Contenders that have arguments for a form."""
    import jax

    options = FORMS[form]
    if options.keys() & {"score_mod", "mask_mod"}:
        return {}
    causal, left, cap = options.get("causal", False), options.get("left"), options.get("softcap")

    def ours(q: Any, k: Any, v: Any) -> Any:
        import cute_ops_jax

        return cute_ops_jax.attention(q, k, v, **options)[0]

    def cudnn(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, local_window_size=left and (left, 0), implementation="cudnn"
        )

    def third(q: Any, k: Any, v: Any) -> Any:
        from flash_attn3_jax import flash_mha

        return flash_mha(q, k, v, is_causal=causal, window_size=(-1 if left is None else left, -1))

    def tokamax(q: Any, k: Any, v: Any) -> Any:
        from tokamax import dot_product_attention

        window = left and (left, 0)
        return dot_product_attention(q, k, v, is_causal=causal, local_window_size=window, logits_soft_cap=cap)

    uncapped = {CUDNN_JAX: cudnn, FLASH_3: third} if cap is None else {}
    return {name: InJax(f) for name, f in {OURS_JAX: ours, **uncapped, TOKAMAX: tokamax}.items()}


def error(form: str, given: list[Tensor], out: Tensor) -> float:
    """The largest difference in the last rows of the last head."""
    q, k, v = (x[-1, :, -1].float() for x in given)
    q, rows = q[-256:], q.shape[0] - 256 + torch.arange(256, device=q.device)[:, None]
    scores, keys = q @ k.t() * q.shape[-1] ** -0.5, torch.arange(k.shape[0], device=q.device)
    options = FORMS[form]
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if "causal" in options:
        scores = scores.masked_fill(keys > rows, -math.inf)
    if "left" in options:
        scores = scores.masked_fill(rows - keys > options["left"], -math.inf)
    if "score_mod" in options:
        scores = scores - captured(form, given[0])["slopes"][-1] * (rows - keys).abs()
    if "mask_mod" in options:
        scores = scores.masked_fill(rows // DOCUMENT != keys // DOCUMENT, -math.inf)
    right = torch.softmax(scores, -1) @ v
    heads_last = out if out.shape[1] == given[0].shape[1] else out.transpose(1, 2)
    return (heads_last[-1, -256:, -1].float() - right).abs().max().item()


def gradients(run: Callable[..., Tensor], given: list[Tensor]) -> Callable[[], Any]:
    """Computes the gradients of a call that was made once."""
    leaves = [x.detach().requires_grad_() for x in given]
    out = run(*leaves)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def pairs(shape: Shape, form: str) -> int:
    """Queries and keys that attend to each other, of one head."""
    s, options = shape.seqlen, FORMS[form]
    if "mask_mod" in options:
        whole, rest = divmod(s, DOCUMENT)
        return (whole * DOCUMENT**2 + rest**2) // 2
    if "left" in options:
        width = options["left"] + 1
        return s * width - width * width // 2
    return s * s // 2 if "causal" in options else s * s


class Case(NamedTuple):
    shape: Shape
    form: str
    direction: str

    @property
    def operations(self) -> float:
        b, _, h, _, d = self.shape
        return PRODUCTS[self.direction] * 2 * b * h * pairs(self.shape, self.form) * d


def recorded(path: Path) -> list[Case]:
    """The cases that a file has rows of, in its order."""
    rows = read(path)
    return [*dict.fromkeys(Case(Shape(*(int(r[n]) for n in Shape._fields)), r["form"], r["direction"]) for r in rows)]


def _synchronize(_: Any) -> None:
    torch.cuda.synchronize()


def measure(case: Case, names: list[str] | None, rounds: int, jax: bool = False) -> list[dict[str, Any]]:
    generator = torch.Generator("cuda").manual_seed(0)
    b, s, h, g, d = case.shape
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    given = [torch.randn(b, s, heads, d, **options) for heads in (h, g, g)]  # type: ignore[call-overload]
    runs: dict[str, Callable[[], Any]] = {}
    rows: dict[str, dict[str, Any]] = {}
    every: dict[str, Callable[..., Any]] = {**contenders(case.form), **(in_jax(case.form) if jax else {})}
    for name, run in every.items():
        if names is not None and name not in names:
            continue
        row = rows[name] = {"contender": name, **case.shape._asdict(), "form": case.form, "direction": case.direction}
        try:
            row |= {"status": "ok", "error": error(case.form, given, run(*given))}
            backward = case.direction == "backward"
            if isinstance(run, InJax):
                runs[name] = run.run(given, backward)
            else:
                runs[name] = gradients(run, given) if backward else partial(run, *given)
            runs[name]()
        except Exception as failure:  # a contender's failure is a result
            row["status"] = f"failed: {first_line(failure)}"
            runs.pop(name, None)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, call in runs.items():
            if jax:
                torch.cuda.synchronize()
                finish = run.jax.block_until_ready if isinstance(run := every[name], InJax) else _synchronize
                us = by_clock(call, finish, CALLS)
            else:
                torch.cuda._sleep(AHEAD)
                us = elapsed(lambda call=call: [call() for _ in range(CALLS)]) / CALLS
            samples[name].append(us)
    for name, found in samples.items():
        median, low, high = spread(found)
        rows[name] |= {"us": median, "us_min": low, "us_max": high, "tflops": case.operations / median / 1e6}
    return [*rows.values()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for attention.csv")
    parser.add_argument("--rounds", type=int, default=9, help="samples per contender")
    parser.add_argument("--contenders", nargs="+", choices=(*CONTENDERS, *IN_JAX), help="only these")
    parser.add_argument("--jax", action="store_true", help="contenders of JAX, too")
    points = parser.add_mutually_exclusive_group()
    numbers = range(len(SHAPES))
    points.add_argument("--shapes", nargs="+", type=int, choices=numbers, help="only those with these numbers")
    parser.add_argument("--directions", nargs="+", default=list(PRODUCTS), choices=PRODUCTS)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--keys", type=int, help="of a tile of our forward, instead of what the heuristic takes")
    points.add_argument("--drawn", type=int, metavar="COUNT", help="so many drawn shapes, instead of those listed")
    parser.add_argument("--seed", type=int, help="draws the shapes; by default a new one, which is printed")
    points.add_argument("--again", type=Path, metavar="CSV", help="the cases of this file, instead of shapes")
    options = parse_for_gpu(parser, arguments, torch.cuda.is_available())
    if options.keys:
        config.KEYS = {size: (options.keys, warpgroups) for size, (_, warpgroups) in config.KEYS.items()}
    shapes: Sequence[Shape] = [SHAPES[i] for i in options.shapes or numbers]
    if options.drawn:
        seed = secrets.randbelow(1000) if options.seed is None else options.seed
        print(f"seed {seed}")
        rng = random.Random(seed)
        shapes = [drawn(rng) for _ in range(options.drawn)]
    cases = recorded(options.again) if options.again else starmap(Case, product(shapes, FORMS, PRODUCTS))
    wanted = [case for case in cases if case.form in options.forms and case.direction in options.directions]
    table, view = Table(options.out / "attention.csv", COLUMNS), View(*COLUMNS, title="attention")
    for case in wanted:
        for row in measure(case, options.contenders, options.rounds, options.jax):
            table.add(row)
            view.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in (row.get(c, "") for c in COLUMNS)))
    Console(width=200).print(view)


if __name__ == "__main__":
    main()
