"""What config rules promise, of drawn problems on GPUs with few and many SMs: in plain arithmetic, or interpreted."""

from __future__ import annotations

import importlib
import math
import os
from functools import partial
from typing import Any

import numpy as np
import pytest

from cute_ops import Array, Op, testing
from cute_ops.declaration.binding import bind
from cute_ops.declaration.shapes import FLOATS
from cute_ops.hardware import ARCHES, MAX_THREADS
from cute_ops.jit.plan import Plan, plan
from cute_ops.jit.target import parse
from cute_ops.kernels.attention.bwd import AttentionBackward
from cute_ops.kernels.attention.config import AttentionBackwardConfig
from cute_ops.ops.attention.attention import attention_bwd
from cute_ops.ops.norm import config as norms
from cute_ops.testing import kernel_calls
from tests.core.test_kernel_layouts import ROW_OPS, check_row, form_of

SEED = int(os.environ.get("CUTE_OPS_SEED", "37"))
SMS = (1, 16, 78, 114, 132, 148)
SHARED = ARCHES["sm_90a"].shared_per_cta


def drawn_row(rng: np.random.Generator) -> tuple[Op, int, int, str, Plan]:
    """An op, rows, their length and how they lie, and how they run."""
    op, sms = ROW_OPS[rng.integers(len(ROW_OPS))], rng.choice(SMS)
    n, rows = (int(np.exp(rng.uniform(0, np.log(most)))) for most in (2e5, 5e5))
    n += -n % int(rng.choice([1, 4, 8]))
    others = {name: str(rng.choice(kinds)) for name, kinds in op.dtypes.items() if name != "T" and kinds}
    dtype, layout = str(rng.choice(FLOATS)), str(rng.choice(kernel_calls.LAYOUTS, p=[0.55, 0.15, 0.15, 0.15]))
    call = kernel_calls.shaped(op, rows, n, dtype, layout, **others)
    absent = testing.left_out(op, rng, 0.3)
    given = {k: Array(a.shape, str(a.dtype)) for k, a in call.arrays.items() if a is not None and k not in absent}
    where = {name: place for name, place in call.where.items() if name in given}
    return op, rows, n, layout, plan(bind(op, given, call.attrs), where, parse(f"sm_90a:{sms}"))


def test_each_row_has_a_walk_and_each_element_a_thread() -> None:
    """And rows fit shared memory; sums of each walk have a row of the workspace, and each of these a walk."""
    print("seed", SEED)
    rng, calls = np.random.default_rng(SEED), []
    while len(calls) < 300:
        try:
            calls.append(drawn_row(rng))
        except ValueError:  # dtypes that do not fit each other
            continue
    with kernel_calls.interpreted():
        for op, rows, n, layout, found in calls:
            source, _, name = found.variant.kernel.partition(":")
            form, told = (
                form_of(getattr(importlib.import_module(source), name)(found.variant)),
                (op.name, rows, n, layout),
            )
            tile = getattr(form, "tile", None)
            if not hasattr(tile, "starts_outside"):
                continue
            assert tile.threads <= MAX_THREADS, (told, found.variant.config)
            starts = {row * n % tile.v.unit for row in range(tile.v.unit)} if tile.v.shifted else {0}
            check_row(tile, int(rng.choice(sorted(starts))))
            if getattr(form, "ring", None):
                sums = getattr(form, "sum", None)
                more = 4 * sums.values * sums.partials * sums.stages * tile.rows + 8 * sums.stages if sums else 0
                assert form.ring.bytes + more <= SHARED, (told, found.variant.config)
            if found.variant.config.get("form") == "persistent" and hasattr(form, "sort_period"):
                check_walks(form, rows, n, found, (*told, found.variant.config))


def check_walks(form: Any, rows: int, n: int, found: Plan, told: Any) -> None:
    """Clusters take each row once, those of one place in a vector one after another: see ``RowWalk``."""
    tile, period, config = form.tile, form.sort_period, found.variant.config
    apart = tile.v.unit // math.gcd(n, tile.v.unit) if tile.v.shifted else 1
    of_sums = [a for name, a in found.workspaces.items() if a and name.endswith("partials")]
    groups = -(-rows // tile.rows)
    clusters = of_sums[0].shape[0] - max(period - 1, 0) if of_sums else min(groups, config["clusters"])
    assert clusters > 0, told
    if not period:
        assert groups <= clusters or clusters * tile.rows % apart == 0, told
        return
    assert period % apart == 0 and tile.rows == 1, told
    height = -(-rows // period)
    whole = height * (period if "dx" in found.variant.tensors or of_sums else min(rows, period))
    walked, lines = np.zeros(rows, int), np.zeros(clusters + period - 1, int)
    for c in range(clusters):
        begin, end = whole * c // clusters, whole * (c + 1) // clusters
        for remainder in range(begin // height, (end - 1) // height + 1):
            low = height * remainder
            taken = (np.arange(max(begin, low), min(end, low + height)) - low) * period + remainder
            walked[taken[taken < rows]] += 1
            lines[c + remainder] += 1
            lines[c + remainder - 1] += c > 0 and begin == low
    assert (walked == 1).all(), told
    assert not of_sums or (lines == 1).all(), told


@pytest.mark.slow
def test_rows_of_norms_on_any_number_of_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, where few rows take persistent clusters, too: sorted, from lines, and by several in one CTA."""
    print("seed", SEED)
    rng = np.random.default_rng(SEED)
    monkeypatch.setattr(norms, "FEW_BYTES", 0)
    monkeypatch.setattr(norms, "OVERLAPPED_BYTES", 0)
    ops = [op for op in ROW_OPS if op.name.startswith(("rmsnorm", "layernorm", "add_rmsnorm"))]
    for _ in range(12):
        sms = int(rng.choice([1, 2, 5, 16, 78]))
        monkeypatch.setattr(kernel_calls, "parse", partial(parse_of, sms))
        op, n = ops[rng.integers(len(ops))], int(rng.integers(1024, 9000))
        n, rows = n + -n % int(rng.choice([1, 4, 8])), int(rng.integers(1, 30))
        dtype, layout = str(rng.choice(FLOATS)), str(rng.choice(["compact", "compact", "off", "spaced"]))
        call = kernel_calls.made(op, rows, n, dtype, layout, rng)
        print(call.said, sms, call.planned()[1].variant.config)
        kernel_calls.check(call)


def parse_of(sms: int, arch: str) -> Any:
    return parse(f"{arch}:{sms}")


def test_gradients_of_attention_have_whole_tiles() -> None:
    """Of the kernel that a config chooses: workspaces, parts of heads that share keys, turns."""
    print("seed", SEED)
    rng = np.random.default_rng(SEED)
    for _ in range(300):
        d, g, r = (
            int(rng.choice(some)) for some in ((64, 80, 96, 112, 128, 128, 192), (1, 2, 8, 16), (1, 2, 3, 7, 16))
        )
        s, t = (int(np.exp(rng.uniform(0, np.log(70000)))) for _ in "st")
        b, attrs = int(rng.integers(1, 9)), {"causal": bool(rng.integers(2)), "deterministic": bool(rng.random() < 0.2)}
        attrs |= (
            {"softcap": 30.0} if rng.random() < 0.2 else {"left": int(rng.integers(5000))} if rng.random() < 0.2 else {}
        )
        q, k = (Array((b, length, heads, d), "bfloat16") for length, heads in ((s, g * r), (t, g)))
        given = {"q": q, "k": k, "v": k, "out": q, "lse": Array((b, g * r, s), "float32"), "dout": q}
        found = plan(bind(attention_bwd, given, attrs), {}, parse(f"sm_90a:{rng.choice(SMS)}"))
        config, kernel = AttentionBackwardConfig.of(found.variant.config), AttentionBackward(found.variant).one_pass
        told = b, s, t, g, r, d, attrs, type(kernel).__name__, config
        assert kernel is not None and kernel.tile_q == config.tile_q, told
        length, parts = found.workspaces["sums"].shape[2], found.workspaces["parts"].shape
        assert length % kernel.tile_q == 0 and 0 <= length - s < max(kernel.tile_q, 128), told
        assert kernel.tile_q % kernel.shares == 0 and d % kernel.sharing == 0, told
        for name in ("delta", "logs"):
            assert found.workspaces[name].shape == (b, g * r, length), told
        if attrs["deterministic"]:
            assert found.workspaces["turns"].shape == (b, g * r, length // kernel.tile_q), told
        if parts != (1, 1, 1, 4):
            number = parts[0] // (2 * b)
            assert 2 <= number <= r and parts == (2 * b * number, g, -(-t // kernel.tile_k) * kernel.tile_k, d), told
