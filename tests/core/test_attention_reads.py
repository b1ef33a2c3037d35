"""The gradient of what changes of scores read: which scores share an element, and its kernels in the emulator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_ops import Array, Op, mods
from cute_ops.expressions.graph import Expression, Graph, Kind, Operand
from cute_ops.expressions.reads import Mod, rounds_products
from cute_ops.jit.layout import Memory, compact
from cute_ops.kernels.attention.mods import FAST, ROUNDED, Evaluated
from cute_ops.ops.attention.attention import reference
from cute_ops.ops.attention.by_call import op_of
from cute_ops.ops.attention.reads import sharing_of
from cute_ops.testing.kernel_calls import Call
from tests.core.test_attention_kernels import SEED, halves
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


NUMBERS = (0.1, 0.25, 1.5, 2, 3, -1, 7)


def _drawn_expression(rng: np.random.Generator) -> Expression:
    """Of two whole numbers and one that may be none."""
    graph = Graph([Operand(Kind(False, False))] * 3)
    nodes = [graph.operand(i) for i in range(3)] + [graph.constant(x) for x in rng.choice(NUMBERS, 2)]
    for _ in range(rng.integers(2, 7)):
        name = str(rng.choice(["multiply", "add", "subtract", "square", "floor", "abs", "negative"]))
        count = 2 if name in ("multiply", "add", "subtract") else 1
        nodes.append(graph.add(name, *(int(rng.choice(nodes)) for _ in range(count))))
    return graph.finish([nodes[-1]])


def _computed(expression: Expression, operands: list[np.ndarray], fuses: bool) -> tuple[np.ndarray, bool]:
    """The output in float32, where products may be fused with additions, and whether float32 holds whole numbers of all
    sizes that there are.
    """
    found: list[np.ndarray] = []  # in float64; products are not rounded before they are used
    for node in expression.nodes:
        x = [found[i] if node.primitive in ("add", "subtract") else np.float32(found[i]) for i in node.args]
        x = [np.float64(each) for each in x]
        if node.primitive == "operand":
            value = np.float64(operands[node.operand])
        elif node.number is not None:
            value = np.full_like(found[0] if found else np.zeros(1), np.float32(node.number), np.float64)
        elif node.primitive in ("multiply", "square"):
            value = x[0] * x[-1]
        else:
            value = np.float64(np.float32(getattr(np, node.primitive)(*x)))
        found.append(value if fuses else np.float64(np.float32(value)))
    return np.float32(found[-1]), all((np.abs(value) < 2**24).all() for value in found)


def test_what_rounds_products() -> None:
    """Where none is said to be rounded, it is all the same whether a product is rounded before something is added."""
    print("seed", SEED)
    rng, counts, differ = np.random.default_rng(SEED), {False: 0, True: 0}, 0
    for _ in range(2000):
        expression = _drawn_expression(rng)
        whole = rng.integers(-60, 60, (2, 200)).astype(np.float32)
        operands = [*whole, rng.standard_normal(200).astype(np.float32)]
        (alone, held), (fused, _) = (_computed(expression, operands, fuses) for fuses in (False, True))
        rounds = rounds_products(expression, frozenset({2}))
        counts[rounds] += 1
        differ += rounds and not (alone == fused).all()
        assert rounds or not held or (alone == fused).all(), expression
    assert min(counts.values()) > 100 and differ > 5  # the drawn ones tell


def test_masks_and_indices_are_rounded_as_references_are() -> None:
    """Where products are not whole; others are left to be fused."""
    for function, table in ((rounded, ROUNDED), (distances, FAST), (of_key, FAST), (in_buckets, FAST)):
        indices = Evaluated(Mod.parse(op_with(function, 2).reference.keywords["own"].score)).indices
        assert {each.device is table for each in indices if each} == {True}
    for mask, table in ((near, ROUNDED), (mods.causal, FAST)):
        assert Evaluated(Mod.parse(op_of(mask_mod=mask).reference.keywords["own"].mask)).emit.device is table


def near(xp: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
    return q * 0.1 - k * 0.1 < 3
