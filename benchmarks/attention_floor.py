"""What attention with a window, or to documents, takes at least with tiles of the size that our kernels have.

`pairs` is the share of queries and keys that attend to each other, `tiles` that of pairs in tiles of which one does.
`floor_us` is a call without a mask whose blocks, of queries forward and of keys backward, go through as many tiles as
those of a masked call in the mean, between two calls of whole numbers of them: nothing is masked or looked up, and each
tile is whole. `asked_us` is the time of a call to all keys times `pairs`.

    python benchmarks/attention_floor.py --out out/benchmarks
"""

from __future__ import annotations

import argparse
import math
import statistics
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import attention as A
import numpy as np
import torch
from common import Table, parse_for_gpu
from rich.console import Console
from rich.table import Table as View

import cute_ops_torch
from cute_ops.kernels.attention.config import BACKWARD_BLOCK
from cute_ops.kernels.tensor_core.sizes import MMA_M
from cute_ops.ops.attention import config
from cute_ops_torch.tools.measure import elapsed

COLUMNS = (
    "direction", "batch", "seqlen", "heads", "kv_heads", "headdim", "form", "pairs", "tiles", "us", "floor_us",
    "asked_us", "of_floor", "floor_of_asked",
)  # fmt: skip
FORMS = ("window of 1024", "documents of 1000")
SHAPES = (A.SHAPES[0], A.SHAPES[3])


def sizes_of_tiles(case: A.Case) -> tuple[int, int]:
    """Queries and keys of a tile; of a forward whose blocks have more queries than a tile has keys, or those of two
    heads, warpgroups' own.
    """
    if case.direction == "backward":
        return config.ONE_PASS[case.shape.headdim][0], BACKWARD_BLOCK
    keys, warpgroups = config.KEYS[case.shape.headdim]
    of_two_heads = "mask_mod" in A.FORMS[case.form] and warpgroups == config.PAIR
    return MMA_M if of_two_heads or warpgroups * MMA_M > keys else warpgroups * MMA_M, keys


def shares(case: A.Case) -> tuple[float, float]:
    """Of pairs, and of those in tiles with one."""
    n, (rows, columns) = case.shape.seqlen, sizes_of_tiles(case)
    q, k = np.arange(n, dtype=np.int32)[:, None], np.arange(n, dtype=np.int32)
    options = A.FORMS[case.form]
    seen = (q >= k) & ((q - k <= options["left"]) if "left" in options else q // A.DOCUMENT == k // A.DOCUMENT)
    touched = seen.reshape(n // rows, rows, n // columns, columns).any((1, 3))
    return float(seen.mean()), float(touched.mean())


def call(case: A.Case, given: list[torch.Tensor], **options: Any) -> Any:
    def ours(*tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = cute_ops_torch.attention(*tensors, **options)[0]
        return out

    return A.gradients(ours, given) if case.direction == "backward" else partial(ours, *given)


def measure(case: A.Case, rounds: int) -> dict[str, Any]:
    b, s, h, g, d = case.shape
    options, (rows, columns) = {"device": "cuda", "dtype": torch.bfloat16}, sizes_of_tiles(case)
    q, k, v = (torch.randn(b, s, heads, d, **options) for heads in (h, g, g))  # type: ignore[call-overload]
    (pairs, tiles), step = shares(case), rows if case.direction == "backward" else columns
    least = math.floor(tiles * s / step)
    calls = {
        "us": call(case, [q, k, v], **A.FORMS[case.form], captured=A.captured(case.form, q)),
        "full": call(case, [q, k, v]),
    }
    for count in (least, least + 1):
        few = [x[:, : count * step].contiguous() for x in (q, k, v)]
        few = [few[0], k, v] if case.direction == "backward" else [q, *few[1:]]
        calls[str(count)] = call(case, few)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, run in calls.items():
            torch.cuda._sleep(A.AHEAD)
            samples[name].append(elapsed(lambda run=run: [run() for _ in range(A.CALLS)]) / A.CALLS)
    us = {name: statistics.median(found) for name, found in samples.items()}
    floor = us[str(least)] + (tiles * s / step - least) * (us[str(least + 1)] - us[str(least)])
    asked = us["full"] * pairs
    return {
        "direction": case.direction, **case.shape._asdict(), "form": case.form, "pairs": pairs, "tiles": tiles,
        "us": us["us"], "floor_us": floor, "asked_us": asked, "of_floor": us["us"] / floor,
        "floor_of_asked": floor / asked,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for attention_floor.csv")
    parser.add_argument("--rounds", type=int, default=9, help="samples per call")
    options = parse_for_gpu(parser, None, torch.cuda.is_available())
    table, view = Table(options.out / "attention_floor.csv", COLUMNS), View(*COLUMNS, title="attention_floor")
    for shape, form, direction in product(SHAPES, FORMS, A.PRODUCTS):
        row = measure(A.Case(shape, form, direction), options.rounds)
        table.add(row)
        view.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in (row[c] for c in COLUMNS)))
    Console(width=200).print(view)


if __name__ == "__main__":
    main()
