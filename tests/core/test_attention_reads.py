"""The gradient of what changes of scores read: which scores share an element, and its kernels in the emulator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_ops import Array, Op, mods
from cute_ops.expressions.reads import Mod
from cute_ops.jit.layout import Memory, compact
from cute_ops.ops.attention.attention import reference
from cute_ops.ops.attention.by_call import op_of
from cute_ops.ops.attention.reads import sharing_of
from cute_ops.testing.kernel_calls import Call
from tests.core.test_attention_kernels import halves
from tests.emulator import device, products


def of_head(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, array: Any) -> Any:
    return score + array[head, q - (k.size - q.size), k]


def of_query(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, array: Any) -> Any:
    return score * array[batch, q - (k.size - q.size)]


def of_key(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, array: Any) -> Any:
    return score * array[head, k]


def in_buckets(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, array: Any) -> Any:
    near = xp.where(k <= q, xp.minimum(q - k, 8), 8 + xp.floor(xp.abs(q - k) / 16))
    return score + array[xp.minimum(near, 15), head]


def by_number(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, array: Any, place: Any) -> Any:
    return score + array[head, place[batch, q] - place[batch, k]]


def slopes(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, array: Any) -> Any:
    return mods.alibi(xp, score, batch, head, q, k, array)


def distances(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, array: Any) -> Any:
    return mods.relative_bias(xp, score, batch, head, q, k, array)


def biases(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, array: Any) -> Any:
    return mods.bias(xp, score, batch, head, q, k, array)


def rounded(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, array: Any) -> Any:
    return score + array[head, xp.floor(q * 0.1 - k * 0.1) + 20]


def between(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, array: Any) -> Any:
    return score + array[head, (q + 0.1) - (k + 0.1) + 20]


SHARES: list[tuple[Callable[..., Any], int, tuple[str, bool, bool]]] = [
    (biases, 4, ("score", True, True)), (of_head, 3, ("score", False, True)), (of_query, 2, ("query", True, False)),
    (of_key, 2, ("key", False, True)), (slopes, 1, ("all", False, True)), (distances, 2, ("distance", False, True)),
    (in_buckets, 2, ("distance", False, True)), (by_number, 2, ("score", True, True)),
    # Of one distance these may be rounded to different numbers.
    (rounded, 2, ("score", False, True)), (between, 2, ("score", False, True)),
]  # fmt: skip


def op_with(function: Callable[..., Any], rank: int) -> Op:
    place = {"place": Array((1, 1), "int32")} if function is by_number else {}
    return op_of(function, captured={"array": Array((1,) * rank, "float32"), **place})


@pytest.mark.parametrize(("function", "rank", "share"), SHARES, ids=lambda x: getattr(x, "__name__", ""))
def test_which_scores_share_an_element(function: Any, rank: int, share: Any) -> None:
    mod = Mod.parse(op_with(function, rank).reference.keywords["own"].score)
    (read,) = (i for i, each in enumerate(mod.reads) if each.array == 0 and each.kind == "f")
    assert sharing_of(mod, read) == share


@pytest.mark.drawn(0.3, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("arch", ["sm_80:2", "sm_90a:2"])
@pytest.mark.parametrize(
    ("function", "shape", "sizes", "attrs"),
    [
        (of_head, (2, 131, 70), (2, 131, 70, 2, 1, 32, 16), {"softcap": 10.0}),
        (of_head, (2, 3, 68), (3, 3, 68, 2, 2, 16, 16), {}),
        (biases, (2, 1, 5, 33), (2, 5, 33, 1, 1, 16, 16), {}),
        (distances, (2, 401), (1, 140, 200, 2, 1, 16, 16), {"left": 30}),
        (slopes, (2,), (1, 20, 130, 2, 1, 32, 32), {"causal": True}),
        (of_query, (2, 30), (2, 30, 70, 2, 2, 16, 32), {}),
        (of_key, (2, 70), (2, 135, 70, 2, 2, 16, 16), {}), (of_key, (1, 20), (1, 37, 20, 1, 1, 16, 256), {}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_sums(function: Any, shape: Any, sizes: Any, attrs: Any, arch: str, tmp_path: Path) -> None:
    """Watched, twice, with warps in another order: the same bits."""
    (b, s, t, h, g, d, e), rng = sizes, np.random.default_rng(0)
    op = op_with(function, len(shape))
    sums, full = op.steps[1].program.ops[0], {**op.attrs, **attrs, "fused": "auto"}
    array, dlse = (rng.standard_normal(x).astype(np.float32) for x in (shape, (b, h, s)))
    q, k, v, dout = halves(*(rng.standard_normal(x) for x in ((b, s, h, d), (b, t, g, d), (b, t, g, e), (b, s, h, e))))
    wide = [x.astype(np.float64) for x in (q, k, v, array)]
    out, lse = reference(np, *wide, None, own=op.reference.keywords["own"], **full)
    given = {"q": q, "k": k, "v": v, "out": out.astype(q.dtype), "lse": lse.astype(np.float32), "dout": dout}
    given |= {"array": array, "dlse": dlse}
    right = sums.reference(np, *(x.astype(np.float64) for x in given.values()), **full)
    call = Call(sums, given, {name: Memory(compact(x.shape)) for name, x in given.items()}, full, "", dict)
    (first,), (second,) = (device.run(call, tmp_path, seed, arch) for seed in (0, 1))
    assert first is not None and second is not None
    assert first.tobytes() == second.tobytes()
    assert np.abs(first - right).max() <= 1e-4 * max(np.abs(right).max(), 1.0)
