"""Attention's kernels on packed sequences, in the emulator of PTX.

Tokens behind the last sequence, and those of one sequence between the others, are NaN: nothing of them spreads.
"""

from __future__ import annotations

import re
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_ops import mods
from cute_ops.kernels.attention.config import AttentionBackwardConfig, AttentionConfig
from cute_ops.ops.attention.attention import attention_packed, attention_packed_bwd
from tests.core.test_attention_kernels import TWO_PASSES, Run, columns_of_keys, halves, one_pass_of
from tests.emulator import products, ptx_cta
from tests.ops.attention_calls import NO_FUNCTIONS, Call, Functions, arrays, expected

# Lengths of queries and of keys; behind them a few tokens of no sequence.
LENGTHS = ([(70, 70), (0, 3), (130, 130), (5, 90), (1, 1), (40, 0)], [(60, 200), (129, 129)], [(0, 2), (80, 70)],
           [(3, 2), (0, 70), (150, 130), (40, 0)])  # fmt: skip
REST = 3
CALLS = (
    Call(1, 0, 0, 2, 1, 64, 64, "bfloat16", {"causal": True, "left": 60}, False, True),
    Call(1, 0, 0, 2, 2, 128, 128, "bfloat16", {"softcap": 5.0}, False, True),
    Call(1, 0, 0, 1, 1, 64, 256, "bfloat16", {}, False, True),
    Call(1, 0, 0, 2, 1, 192, 128, "bfloat16", {"causal": True}, False, True),
)
UNKNOWN = 0  # the sequence of NaN


def slots_of(starts: np.ndarray, tokens: int, tile: int) -> np.ndarray:
    """Where each token's numbers lie in rows of whole tiles of each sequence."""
    number = np.searchsorted(starts[1:], np.arange(tokens), side="right")
    return (starts[number] // tile + number) * tile + np.arange(tokens) - starts[number]


class Case:
    """A call, its arrays, and what is right of each sequence."""

    def __init__(self, number: int, functions: Functions = NO_FUNCTIONS, **attrs: Any) -> None:
        self.lengths, self.functions = LENGTHS[number], functions
        self.offsets = [np.cumsum([0, *each], dtype=np.int32) for each in zip(*self.lengths, strict=True)]
        s, t = (int(each[-1]) + REST for each in self.offsets)
        self.call = CALLS[number]._replace(s=s, t=t, **{n: x for n, x in attrs.items() if n in "de"})
        self.call = self.call._replace(attrs={**self.call.attrs, **{n: x for n, x in attrs.items() if n not in "de"}})
        rng, (self.q, self.k, self.v) = np.random.default_rng(number), halves(*arrays(self.call, number))
        (self.dout,) = halves(rng.standard_normal((*self.q.shape[:-1], self.call.e)))
        self.dlse = rng.standard_normal((1, self.call.h, s)).astype(np.float32)
        for array, offsets in zip((self.q, self.k, self.v, self.dout), (0, 1, 1, 0), strict=True):
            array[:, self.offsets[offsets][-1] :] = np.nan
            array[:, self.part(UNKNOWN)[offsets]] = np.nan

    def part(self, i: int) -> list[slice]:
        """The queries and the keys of a sequence."""
        return [slice(int(each[i]), int(each[i + 1])) for each in self.offsets]

    def right(self, i: int) -> dict[str, np.ndarray]:
        q, k = self.part(i)
        given = [x[:, part].astype(np.float64) for x, part in ((self.q, q), (self.k, k), (self.v, k), (self.dout, q))]
        call = self.call._replace(s=q.stop - q.start, t=k.stop - k.start)
        captured = {name: x[i : i + 1] for name, x in self.functions.captured.items()}
        own = self.functions._replace(captured=captured)
        return expected(call, [*given[:3], None], (given[3], self.dlse[:, :, q]), own)

    def results(self) -> tuple[np.ndarray, np.ndarray]:
        """Results, as the gradient reads them."""
        out, lse = np.full_like(self.dout, np.nan), np.full(self.dlse.shape, np.nan, np.float32)
        for i, _ in enumerate(self.lengths):
            right, (q, _) = self.right(i), self.part(i)
            out[:, q], lse[:, :, q] = right["out"].value.astype(out.dtype), right["lse"].value
        lse[:, :, self.offsets[0][-1] :] = -np.inf
        return out, lse

    def deltas(self, out: np.ndarray) -> np.ndarray:
        """Sums of results and cotangents over each row; unknown behind the last sequence."""
        delta = np.einsum("bshe,bshe->bhs", *(x.astype(np.float64) for x in (out, self.dout))) - self.dlse
        delta[:, :, int(self.offsets[0][-1]) :] = np.nan
        return delta.astype(np.float32)

    def check(self, found: dict[str, np.ndarray]) -> None:
        for i, lengths in enumerate(self.lengths):
            if i == UNKNOWN:
                continue
            right, (q, k) = self.right(i), self.part(i)
            for name, array in found.items():
                part = array[:, :, q] if name == "lse" else array[:, k if name in ("dk", "dv") else q]
                right[name].assert_holds(part.astype(np.float64), f"{name} of a sequence of {lengths}")
        for name, array in found.items():
            side = int(name in ("dk", "dv"))
            rest = (array.swapaxes(1, 2) if name == "lse" else array)[:, self.offsets[side][-1] :]
            assert (rest == (-np.inf if name == "lse" else 0)).all(), f"{name} behind the last sequence"


def document(xp, batch, head, q, k, document):
    return xp.logical_and(k <= q, mods.documents(xp, batch, head, q, k, document))


def with_documents(number: int, **attrs: Any) -> Case:
    longest = max(max(pair) for pair in LENGTHS[number])
    places = np.random.default_rng(0).random((len(LENGTHS[number]), longest)) < 0.03
    functions = Functions(mask=document, captured={"document": np.cumsum(places, axis=1).astype(np.int32)})
    return Case(number, functions, **attrs)


CASES = {"window": partial(Case, 0), "softcap": partial(Case, 1), "documents": partial(with_documents, 0)}


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize(
    "which", ["window", *(pytest.param(x, marks=pytest.mark.slow) for x in CASES if x != "window")]
)
def test_results(which: str, tmp_path: Path) -> None:
    case = CASES[which]()
    run = Run(attention_packed, case.call, tmp_path, case.functions, case.offsets)
    out, lse = np.full_like(case.dout, np.nan), np.full(case.dlse.shape, np.nan, np.float32)
    config = AttentionConfig.of(run.variant.config)
    moved = [(case.q, config.block), (case.k, config.tile_n), (case.v, config.tile_n), (out, 64)]
    run("AttentionFwd", 3, moved, [run.rows(1)], [lse], 2)
    case.check({"out": out, "lse": lse})


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("which", [*CASES, "one stage"])
def test_gradients(which: str, tmp_path: Path) -> None:
    case = Case(2, deterministic=True) if which == "one stage" else CASES[which](deterministic=True, **TWO_PASSES)
    call = case.call
    run = Run(attention_packed_bwd, call, tmp_path, case.functions, case.offsets)
    out, lse = case.results()
    memory = [lse, case.deltas(out)]
    rows = [run.rows(1), struct.pack("<Q3q2q", 2 << 32, 1, call.h, call.s, call.h * call.s, call.s)]
    config, n = dict(run.variant.settings), len(case.lengths)
    dq, dk, dv = (np.full_like(x, np.nan) for x in (case.q, case.k, case.v))
    moved = [(case.q, 128), (case.k, config["tile_k"]), (case.v, config["tile_k"]), (case.dout, 128), (dq, 64)]
    run("QueriesBackward", 3, moved, rows, memory, (call.s // 128 + n + 1) * call.h)
    moved = [
        (case.q, config["tile_q"]),
        (case.k, 128),
        (case.v, 128),
        (case.dout, config["tile_q"]),
        (dk, 64),
        (dv, 64),
    ]
    run("KeysBackward", 4, moved, rows, memory, (call.t // 128 + n + 1) * call.g)
    case.check({"dq": dq, "dk": dk, "dv": dv})


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize(
    ("which", "in_turns"), [*((x, False) for x in CASES), ("wide", False), ("documents", True), ("softcap", True)]
)
def test_gradients_in_one_pass(which: str, in_turns: bool, tmp_path: Path) -> None:
    case = Case(0, d=192, e=192) if which == "wide" else CASES[which](deterministic=in_turns)
    call, (out, lse) = case.call, case.results()
    run = Run(attention_packed_bwd, call, tmp_path, case.functions, case.offsets)
    tile, n = AttentionBackwardConfig.of(run.variant.config).tile_q, len(case.lengths)
    length = (call.s // tile + n + 1) * tile
    logs, delta = (np.full((1, call.h, length), np.nan, np.float32) for _ in range(2))
    sums = np.full((1, call.h, length, call.d), np.nan, np.float32)
    dq, dk, dv = (np.full_like(x, np.nan) for x in (case.q, case.k, case.v))

    def around(name: str, memory: list[np.ndarray], arguments: list[bytes], threads: int, more: bytes = b"") -> None:
        """Run a kernel of rows; ``more``: its last parameter, if it has one."""
        (text,) = (e for e in run.entries if re.search(name, e.partition("(")[0]))
        last = struct.pack("<Qq", len(memory) + 1 << 32, n + 1), struct.pack("<Qq", len(memory) + 2 << 32, n + 1)
        blocks = [x.reshape(-1).view(np.uint8) for x in (*memory, *case.offsets)]
        reads = [struct.pack("<Q2q1q", 99 << 32, *x.shape, x.shape[1]) for x in case.functions.captured.values()]
        tables = [table for key, table in run.tables.items() if key.endswith("_2")]
        kernel = ptx_cta.Kernel(run.head + text)
        given = [*arguments, *run.sizes, *reads, *tables, *last, *([more] if more else [])]
        kernel.run(-(-threads // kernel.threads), given, blocks)

    def heads(block: int, x: np.ndarray) -> bytes:
        _, s, h, d = x.shape
        return struct.pack("<Q3i4x2q", block << 32, s, h, 1, h * d, s * h * d)

    def of_tiles(block: int) -> bytes:
        return struct.pack("<Q3q2q", block << 32, 1, call.h, length, call.h * length, length)

    of_sums = struct.pack(
        "<Q4i3q", 6 << 32, length, call.d, call.h, 1, call.d, length * call.d, call.h * length * call.d
    )
    lanes, rows = 2 ** (call.e // 8 - 1).bit_length(), 2  # of a row, and of a thread
    ctas = call.h * -(-length // (rows * 256 // lanes))
    arguments = [heads(1, out), heads(2, case.dout), run.rows(3), run.rows(7), of_tiles(4), of_tiles(5), of_sums]
    arguments.append(struct.pack("<i", -(-sums.size // 4 // ctas)))
    memory = [out, case.dout, lse, delta, logs, sums, case.dlse]
    turns = np.full((1, call.h, length // tile), -1, np.int32) if in_turns else None
    if turns is not None:
        memory.append(turns)
        arguments.append(struct.pack("<Q3q2q", 8 << 32, *turns.shape, turns.size, turns.shape[2]))
    around("_delta_cute", memory, arguments, ctas * 256)
    block, name = (96, "WideHeads") if run.is_wide else (128, one_pass_of(call))
    moved = [(case.q, tile), (case.k, block), (case.v, block), (case.dout, tile), (dk, block // 2), (dv, block // 2)]
    of_rows = [(logs, tile), (delta, tile)]
    count, keys = min(call.h // call.g, 2), (call.t // block + n + 1) * block
    parts = np.full((2 * count, call.g, keys, call.d), np.nan, np.float32)
    ctas = keys // block * call.g * count
    run(name, 6, moved, [], [], ctas, of_rows, sums, {1: columns_of_keys(call)}, parts, turns)
    of_sums = struct.pack("<Q", 1 << 32) + of_sums[8:]
    around(
        "_round_cute.*(OnePass|ShortHeads|WideHeads)",
        [sums, dq],
        [of_sums, heads(2, dq)],
        call.h * length * call.d // 8,
    )
    if count > 1:
        strides = call.d, keys * call.d, call.g * keys * call.d
        of_parts = struct.pack("<Q4i3q", 1 << 32, keys, call.d, call.g, 2 * count, *strides)
        threads, last = parts.size // count // 16, struct.pack("<i", count)
        around(
            "_round_cute.*Parts(OfKeys|ByColumns)",
            [parts, dk, dv],
            [of_parts, heads(2, dk), heads(3, dv)],
            threads,
            last,
        )
    case.check({"dq": dq, "dk": dk, "dv": dv})


@pytest.mark.slow
@products.emulated
def test_no_block_waits_for_ever_where_offsets_fall(tmp_path: Path) -> None:
    """The third block of keys is none of the first sequence's then, whose second one would wait for it."""
    case = Case(1, deterministic=True)
    case.offsets[0][:], case.offsets[1][:] = (0, 150, 0), (0, 300, 0)
    call = case.call
    run = Run(attention_packed_bwd, call, tmp_path, offsets=case.offsets)
    tile, n = AttentionBackwardConfig.of(run.variant.config).tile_q, len(case.lengths)
    length, keys = (call.s // tile + n + 1) * tile, (call.t // 128 + n + 1) * 128
    (logs, delta), sums = (
        np.zeros((2, 1, call.h, length), np.float32),
        np.zeros((1, call.h, length, call.d), np.float32),
    )
    moved = [(x, rows) for x, rows in zip((case.q, case.k, case.v, case.dout), (tile, 128, 128, tile), strict=True)]
    moved += [(np.full_like(x, np.nan), 64) for x in (case.k, case.v)]
    parts, turns = np.zeros((2, call.g, keys, call.d), np.float32), np.zeros((1, call.h, length // tile), np.int32)
    of_rows = [(logs, tile), (delta, tile)]
    with pytest.raises(RuntimeError, match="stored twice"):  # the emulator tells of what is wrong then
        run(one_pass_of(call), 6, moved, [], [], keys // 128 * call.g, of_rows, sums, {1: call.d // 2}, parts, turns)


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
def test_gradients_of_long_heads(tmp_path: Path) -> None:
    case = Case(3)
    call, (out, lse), n = case.call, case.results(), len(case.lengths)
    run = Run(attention_packed_bwd, call, tmp_path, offsets=case.offsets, others=3)
    tile = AttentionBackwardConfig.of(run.variant.config).tile_k
    length, width = (call.t // tile + n + 1) * tile, max(call.d, call.e)
    sums, memory = np.zeros((2, call.g, length, width), np.float32), [lse, case.deltas(out)]
    rows = [run.rows(2), struct.pack("<Q3q2q", 3 << 32, 1, call.h, call.s, call.h * call.s, call.s)]
    dq, dk, dv = (np.full_like(x, np.nan) for x in (case.q, case.k, case.v))
    moved = [(case.q, 128), (case.k, tile), (case.v, tile), (case.dout, 128), (dq, 64)]
    run("LongHeads", 3, moved, rows, memory, (call.s // 128 + n + 1) * call.h, sums=sums)
    (text,) = (e for e in run.entries if "_round_cute" in e.partition("(")[0])
    blocks = [x.reshape(-1).view(np.uint8) for x in (sums, dk, dv, *case.offsets)]
    of_sums = struct.pack("<Q4i3q", 1 << 32, length, width, call.g, 2, width, length * width, call.g * length * width)
    outs = [
        struct.pack("<Q3i4x2q", block << 32, x.shape[1], call.g, 1, call.g * x.shape[3], x.size)
        for block, x in ((2, dk), (3, dv))
    ]
    offsets = [struct.pack("<Qq", block << 32, n + 1) for block in (4, 5)]
    kernel = ptx_cta.Kernel(run.head + text)
    kernel.run(-(-sums.size // 16 // kernel.threads), [of_sums, *outs, *run.sizes, *offsets], blocks)
    case.check({"dq": dq, "dk": dk, "dv": dv})


@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("count", [3, 80])
def test_the_gradient_of_sinks_in_one_pass(count: int, tmp_path: Path) -> None:
    """Deltas of rows are those of whole tiles of each sequence, and what lies between is NaN. A warp looks at as many
    sequences at a time as it has lanes.
    """
    rng = np.random.default_rng(0)
    lengths = [70, 0, 130] if count == 3 else rng.integers(0, 6, count)
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    tokens, tile = int(starts[-1]) + 3, 64
    call = CALLS[0]._replace(s=tokens, t=tokens, attrs={})
    run = Run(attention_packed_bwd, call, tmp_path, offsets=[starts, starts], sinks=True)
    sinks, lse = rng.standard_normal(call.h), rng.standard_normal((1, call.h, tokens)) + 1
    lse[0, 0, 5] = -np.inf
    delta = rng.standard_normal((1, call.h, tokens))
    slots = np.full((1, call.h, (tokens // tile + len(starts)) * tile), np.nan, np.float32)
    slots[:, :, slots_of(starts, tokens, tile)] = delta
    found = np.full(call.h, np.nan, np.float32)
    (text,) = (e for e in run.entries if "_sinks_cute" in e.partition("(")[0])
    of_slots = struct.pack("<Q3q2q", 3 << 32, *slots.shape, slots[0].size, slots.shape[2])
    ends = (struct.pack("<Qq", block << 32, call.h) for block in (1, 4))
    offsets = (struct.pack("<Qq", block << 32, len(starts)) for block in (5, 6))
    arguments = [next(ends), run.rows(2), of_slots, next(ends), *run.sizes, *offsets]
    memory = [sinks.astype(np.float32), lse.astype(np.float32), slots, found, starts, starts]
    ptx_cta.Kernel(run.head + text).run(call.h, arguments, [x.reshape(-1).view(np.uint8) for x in memory])
    right = -np.where(lse > -np.inf, np.exp(sinks[:, None] - lse) * delta, 0).sum(axis=(0, 2))
    np.testing.assert_allclose(found, right, rtol=2e-5)
