"""Attention's kernels by ``mma.sync`` in the emulator of PTX: values, barriers that hang, accesses outside."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cute_ops.kernels.attention.config import AttentionBackwardConfig, AttentionConfig
from cute_ops.ops.attention.attention import (
    attention,
    attention_bwd,
    attention_packed,
    attention_packed_bwd,
)
from tests.core import test_attention_packed
from tests.core.test_attention_kernels import (
    CALLS,
    FORWARD,
    ONE_PASS,
    ONE_STAGE,
    Run,
    halves,
    modded,
    of_whole_tiles,
    with_cotangents,
)
from tests.core.test_decode_kernels import check_shared
from tests.emulator import products, ptx_cta, ptx_sm90
from tests.ops.attention_calls import NO_FUNCTIONS, Call, Functions, arrays, expected

# Of a smaller one the gradients of long heads have one stage.
ARCH, SMALLER = "sm_80", "sm_86"
OTHERS = 9  # blocks of memory before those of what functions read


def named(value: object) -> str:
    """A case's name: its call's, its target, and whether it has functions."""
    return getattr(value, "name", "functions" if value != NO_FUNCTIONS else "") if not isinstance(value, str) else value


def of_heads(block: int, x: np.ndarray) -> bytes:
    """A parameter for (batch, seqlen, heads, headdim) in this block of memory."""
    b, s, h, d = x.shape
    return struct.pack("<Q3i4x2q", block << 32, s, h, b, h * d, s * h * d)


def emulate(
    run: Run, name: str, heads: Sequence[np.ndarray], rows: Sequence[np.ndarray], ctas: int,
    sums: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Run a kernel that takes tensors of heads, sums of queries if there are some, and numbers of rows."""
    (text,) = (entry for entry in run.entries if all(part in entry.partition("(")[0] for part in ("_kernel_", name)))
    second = not name.startswith("Queries")
    ranges = [table for key, table in run.tables.items() if key.endswith("_2") == ("Backward" in name and second)]
    memory = [*heads, *([] if sums is None else [sums]), *rows]
    first = 1 + len(memory) - len(rows)
    of_rows = [run.rows(i) for i, _ in enumerate(rows, first)]
    whole = sums is not None or run.is_packed  # have a batch, and another length
    for i, x in enumerate(rows):
        if sums is not None or (whole and i):
            of_rows[i] = struct.pack("<Q3q2q", first + i << 32, *x.shape, x[0].size, x.shape[2])
    of_tensors = [of_heads(i, x) for i, x in enumerate(heads, 1)]
    if sums is not None:
        _, h, s, d = sums.shape
        of_tensors.append(struct.pack("<Q4i3q", first - 1 << 32, s, d, h, len(sums), d, s * d, h * s * d))
    arguments = [*of_tensors, *of_rows, *run.sizes, *run.read, *ranges, *run.offsets]
    empty = [np.zeros(8, np.uint8)] * (OTHERS - len(memory))
    blocks = [x.reshape(-1).view(np.uint8) for x in (*memory, *empty, *run.memory)]
    run._fill(ranges, blocks, "Backward" in name and second)
    kernel = ptx_sm90.Kernel(run.head + text)
    for index in range(ctas):
        ptx_sm90.Cluster(kernel, index, ctas, (1, 1), arguments, {}, blocks, in_a_row=True).run(seed=index)


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize(("call", "functions"), [*((call, NO_FUNCTIONS) for call in FORWARD), modded(1)], ids=named)
def test_results(call: Call, functions: Functions, tmp_path: Path) -> None:
    run, (q, k, v) = Run(attention, call, tmp_path, functions, (), ARCH, OTHERS), halves(*arrays(call, 0))
    out = np.full((*q.shape[:-1], call.e), np.nan, q.dtype)
    lse = np.full((call.batch, call.h, call.s), np.nan, np.float32)
    config = AttentionConfig.of(run.variant.config)
    check_shared(tmp_path, config.shared(call.d, call.e))
    emulate(run, "AttentionFwdSm80", [q, k, v, out], [lse], -(-call.s // config.block) * call.h * call.batch)
    right = expected(call, [*(x.astype(np.float64) for x in (q, k, v)), None], None, functions)
    for name, found in (("out", out), ("lse", lse)):
        right[name].assert_holds(found.astype(np.float64), name)


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize(
    ("call", "functions", "arch"),
    [(CALLS[0], NO_FUNCTIONS, ARCH), (ONE_STAGE, NO_FUNCTIONS, SMALLER), (*modded(1), ARCH)],
    ids=named,
)
def test_gradients(call: Call, functions: Functions, arch: str, tmp_path: Path) -> None:
    call = call._replace(attrs={**call.attrs, "deterministic": True})
    run, (q, k, v) = Run(attention_bwd, call, tmp_path, functions, (), arch, OTHERS), halves(*arrays(call, 0))
    dout, lse, delta, right = with_cotangents(call, (q, k, v), functions)
    config = AttentionBackwardConfig.of(run.variant.config)
    check_shared(tmp_path, config.shared(call.d, call.e))
    queries, keys = (-(-size // config.block) * call.batch for size in (call.s, call.t))
    dq, dk, dv = (np.full_like(x, np.nan) for x in (q, k, v))
    emulate(run, "QueriesBackwardSm80", [q, k, v, dout, dq], [lse, delta], queries * call.h)
    emulate(run, "KeysBackwardSm80", [q, k, v, dout, dk, dv], [lse, delta], keys * call.g)
    for name, found in (("dq", dq), ("dk", dk), ("dv", dv)):
        right[name].assert_holds(found.astype(np.float64), name)


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize(("call", "functions"), [(ONE_PASS[1], NO_FUNCTIONS), modded(0)], ids=named)
def test_gradients_in_one_pass(call: Call, functions: Functions, tmp_path: Path) -> None:
    run, (q, k, v) = Run(attention_bwd, call, tmp_path, functions, (), SMALLER, OTHERS), halves(*arrays(call, 0))
    dout, lse, delta, right = with_cotangents(call, (q, k, v), functions)
    config = AttentionBackwardConfig.of(run.variant.config)
    check_shared(tmp_path, config.shared(call.d, call.e))
    logs, delta = of_whole_tiles(call, lse, delta)
    sums = np.zeros((*logs.shape, call.d), np.float32)
    dk, dv = (np.full_like(x, np.nan) for x in (k, v))
    ctas = -(-call.t // config.block) * call.g * call.batch
    emulate(run, "OnePassBackwardSm80", [q, k, v, dout, dk, dv], [logs, delta], ctas, sums)
    dq, (b, h, length, d) = np.full_like(q, np.nan), sums.shape
    (text,) = (entry for entry in run.entries if "_round_cute" in entry.partition("(")[0])
    of_sums = struct.pack("<Q4i3q", 1 << 32, length, d, h, b, d, length * d, h * length * d)
    blocks = [x.reshape(-1).view(np.uint8) for x in (sums, dq)]
    ptx_cta.Kernel(run.head + text).run(-(-dq.size // 8 // 256), [of_sums, of_heads(2, dq)], blocks)
    for name, found in (("dq", dq), ("dk", dk), ("dv", dv)):
        right[name].assert_holds(found.astype(np.float64), name)


def by_rows(sums: np.ndarray, config: AttentionBackwardConfig) -> np.ndarray:
    """Sums of queries, which lie as the threads of a tile have them, by rows and columns."""
    *lead, d = sums.shape
    down = config.tile_q // 16
    beside = config.warps // down
    # Of a tile: warps, their registers (blocks of columns, rows 8 apart, pairs), their lanes (rows, pairs).
    x = sums.reshape(-1, beside, down, d // beside // 8, 2, 2, 8, 4)
    return x.transpose(0, 2, 4, 6, 1, 3, 7, 5).reshape(*lead, d)


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("check", ["results", "gradients", "gradients in one pass"])
def test_packed_sequences(check: str, tmp_path: Path) -> None:
    case = test_attention_packed.CASES["window"]()
    op, attrs = (attention_packed if check == "results" else attention_packed_bwd), case.call.attrs
    call = case.call._replace(attrs={**attrs, "deterministic": True} if check == "gradients" else attrs)
    run = Run(op, call, tmp_path, case.functions, case.offsets, ARCH, OTHERS)
    {"results": _packed_results, "gradients": _packed_gradients}.get(check, _packed_gradients_in_one_pass)(case, run)


def _packed_results(case: test_attention_packed.Case, run: Run) -> None:
    call, out, lse = case.call, np.full_like(case.dout, np.nan), np.full(case.dlse.shape, np.nan, np.float32)
    ctas = (call.s // AttentionConfig.of(run.variant.config).block + len(case.lengths) + 1) * call.h
    emulate(run, "AttentionFwdSm80", [case.q, case.k, case.v, out], [lse], ctas)
    case.check({"out": out, "lse": lse})


def _packed_gradients(case: test_attention_packed.Case, run: Run) -> None:
    call, (out, lse), (q, k, v, dout) = case.call, case.results(), (case.q, case.k, case.v, case.dout)
    rows, count = [lse, case.deltas(out)], len(case.lengths)
    block = AttentionBackwardConfig.of(run.variant.config).block
    dq, dk, dv = (np.full_like(x, np.nan) for x in (q, k, v))
    emulate(run, "QueriesBackwardSm80", [q, k, v, dout, dq], rows, (call.s // block + count + 1) * call.h)
    emulate(run, "KeysBackwardSm80", [q, k, v, dout, dk, dv], rows, (call.t // block + count + 1) * call.g)
    case.check({"dq": dq, "dk": dk, "dv": dv})


def _packed_gradients_in_one_pass(case: test_attention_packed.Case, run: Run) -> None:
    call, (q, k, v, dout) = case.call, (case.q, case.k, case.v, case.dout)
    out, lse = case.results()
    config, count = AttentionBackwardConfig.of(run.variant.config), len(case.lengths)
    length = (call.s // config.tile_q + count + 1) * config.tile_q
    slots = test_attention_packed.slots_of(case.offsets[0], call.s, config.tile_q)
    logs, delta = np.full((1, call.h, length), np.inf, np.float32), np.zeros((1, call.h, length), np.float32)
    logs[:, :, slots] = np.where(lse > -np.inf, lse * np.float32(np.log2(np.e)), np.inf)
    delta[:, :, slots] = np.nan_to_num(case.deltas(out))
    sums = np.zeros((1, call.h, length, call.d), np.float32)
    dk, dv = (np.full_like(x, np.nan) for x in (k, v))
    ctas = (call.t // config.block + count + 1) * call.g
    emulate(run, "OnePassBackwardSm80", [q, k, v, dout, dk, dv], [logs, delta], ctas, sums)
    dq = (by_rows(sums, config)[:, :, slots].transpose(0, 2, 1, 3) * call.d**-0.5).astype(q.dtype)
    case.check({"dq": dq, "dk": dk, "dv": dv})
