"""Attention's kernels in the emulator of PTX: values, barriers that hang, accesses outside; nothing of races."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cute_ops import Op
from cute_ops.declaration.binding import bind
from cute_ops.declaration.shapes import Array
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.plan import plan
from cute_ops.jit.target import parse
from cute_ops.ops.attention.attention import attention, attention_bwd
from tests.emulator import products, ptx_sm90
from tests.ops.attention_calls import Bounded, Call, arrays, expected

DESCRIPTOR = bytes(128)
CALLS = (
    Call(1, 150, 130, 2, 1, 64, 64, "bfloat16", {"causal": True, "left": 100}, False, False),
    Call(1, 70, 150, 2, 2, 128, 64, "bfloat16", {"softcap": 5.0}, False, False),
)
ONE_PASS = (CALLS[0], Call(1, 70, 150, 2, 1, 128, 128, "bfloat16", {"softcap": 5.0}, False, False))


class Run:
    """One call of an op whose kernels are compiled for Hopper and emulated."""

    def __init__(self, op: Op, call: Call, folder: Path) -> None:
        b, s, t, h, g, d, e = call[:7]
        shapes = (s, h, d), (t, g, d), (t, g, e), (s, h, e)
        q, k, v, out = (Array((b, *shape), call.dtype) for shape in shapes)
        lse = Array((b, h, s), "float32")
        more = {"out": out, "lse": lse, "dout": out, "dlse": lse} if op is attention_bwd else {}
        binding = bind(op, {"q": q, "k": k, "v": v, **more}, call.attrs)
        self.call, self.variant = call, plan(binding, {}, parse("sm_90a")).variant
        worker.compile(self.variant, folder / "kernel.cubin", folder)
        (ptx,) = folder.glob("*.ptx")
        self.head, *self.entries = re.split(r"(?=\.visible \.entry)", ptx.read_text())
        self.sizes = [struct.pack("<i", x) for x in (s, t, h, h // g, b)]

    def rows(self, block: int) -> bytes:
        """A parameter for numbers of rows, (batch, heads, seqlen), in this block of memory."""
        b, s, _, h = self.call[:4]
        return struct.pack("<Q3q2q", block << 32, b, h, s, h * s, s)

    def __call__(
        self, name: str, mmas: int, moved: Sequence[tuple[np.ndarray, int]], rows: Sequence[bytes],
        memory: Sequence[np.ndarray], ctas: int, of_rows: Sequence[tuple[np.ndarray, int]] = (),
        sums: np.ndarray | None = None, columns: Mapping[int, int] | None = None,
    ) -> None:  # fmt: skip
        """Run the kernel of this name.

        Args:
            mmas: so many parameters say how it multiplies.
            moved: what TMA moves, (batch, seqlen, heads, headdim), and rows of a tile.
            rows: parameters, see :meth:`rows`.
            memory: blocks.
            ctas: how many there are.
            of_rows: numbers of rows, (batch, heads, seqlen), that TMA loads, and how many at once: after the first four
                of ``moved``.
            sums: what TMA adds to, (batch, heads, seqlen, headdim).
            columns: that TMA moves at once, by the place in ``moved``; 64 at most where none are given.
        """
        (text,) = (
            entry for entry in self.entries if all(part in entry.partition("(")[0] for part in ("_kernel_", name))
        )
        kernel, arguments, maps = ptx_sm90.Kernel(self.head + text), [b"0"] * mmas, {}
        for i, (array, height) in enumerate((*moved[:4], *of_rows, *moved[4:])):
            if 4 <= i < 4 + len(of_rows):
                batch, heads, length = array.shape
                maps[len(arguments)] = ptx_sm90.Map(array, 1, height, set())
            else:
                batch, length, heads, width = array.shape
                width = (columns or {}).get(i, min(width, 64))
                maps[len(arguments)] = ptx_sm90.Map(array.transpose(0, 2, 1, 3), height, width, set())
            arguments += [DESCRIPTOR, struct.pack("<3i", length, heads, batch)]
        if sums is not None:
            batch, heads, length, width = sums.shape
            maps[len(arguments)] = ptx_sm90.Map(sums, of_rows[0][1], width, set())
            arguments += [DESCRIPTOR, struct.pack("<4i", length, width, heads, batch)]
        arguments += [*rows, *self.sizes]
        blocks = [a.reshape(-1).view(np.uint8) for a in memory]
        for index in range(ctas):
            ptx_sm90.Cluster(kernel, index, ctas, (1, 1), arguments, maps, blocks, in_a_row=True).run(seed=index)


def halves(*given: np.ndarray | None) -> list[np.ndarray]:
    return [x.astype(ml_dtypes.bfloat16) for x in given if x is not None]


@products.emulated
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_results(call: Call, tmp_path: Path) -> None:
    run, (q, k, v) = Run(attention, call, tmp_path), halves(*arrays(call, 0))
    out = np.full((*q.shape[:-1], call.e), np.nan, q.dtype)
    lse = np.full((call.batch, call.h, call.s), np.nan, np.float32)
    tile = dict(run.variant.settings)["tile_n"]
    moved = [(q, 128), (k, tile), (v, tile), (out, 64)]
    run("AttentionFwd", 3, moved, [run.rows(1)], [lse], 2)
    _check({"out": out, "lse": lse}, expected(call, [*map(_wide, (q, k, v)), None]))


@products.emulated
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_gradients(call: Call, tmp_path: Path) -> None:
    call = call._replace(attrs={**call.attrs, "deterministic": True})
    run, (q, k, v) = Run(attention_bwd, call, tmp_path), halves(*arrays(call, 0))
    dout, lse, delta, right = _backward(call, q, k, v)
    config, rows, memory = dict(run.variant.settings), [run.rows(1), run.rows(2)], [lse, delta]
    dq, dk, dv = (np.full_like(x, np.nan) for x in (q, k, v))
    moved = [(q, 128), (k, config["tile_k"]), (v, config["tile_k"]), (dout, 128), (dq, 64)]
    run("QueriesBackward", 3, moved, rows, memory, -(-call.s // 128) * call.h * call.batch)
    moved = [(q, config["tile_q"]), (k, 128), (v, 128), (dout, config["tile_q"]), (dk, 64), (dv, 64)]
    run("KeysBackward", 4, moved, rows, memory, -(-call.t // 128) * call.g * call.batch)
    _check({"dq": dq, "dk": dk, "dv": dv}, right)


@products.emulated
@pytest.mark.parametrize("call", ONE_PASS, ids=lambda call: call.name)
def test_gradients_in_one_pass(call: Call, tmp_path: Path) -> None:
    run, (q, k, v) = Run(attention_bwd, call, tmp_path), halves(*arrays(call, 0))
    dout, lse, delta, right = _backward(call, q, k, v)
    tile = dict(run.variant.settings)["tile_q"]
    whole = ((0, 0), (0, 0), (0, -call.s % 128))
    logs = np.pad(np.where(lse > -np.inf, lse * np.float32(np.log2(np.e)), np.inf), whole, constant_values=np.inf)
    sums = np.zeros((call.batch, call.h, call.s, call.d), np.float32)
    dk, dv = (np.full_like(x, np.nan) for x in (k, v))
    moved = [(q, tile), (k, 128), (v, 128), (dout, tile), (dk, 64), (dv, 64)]
    of_rows = [(logs, tile), (np.pad(delta, whole), tile)]
    ctas = -(-call.t // 128) * call.g * call.batch
    run("OnePass", 6, moved, [], [], ctas, of_rows, sums, {1: call.d // 2})
    # Four neighbouring chunks of eight elements change places by the row.
    chunks = np.arange(call.d // 8) ^ np.arange(call.s)[:, None] % 4
    dq = np.take_along_axis(sums.reshape(*sums.shape[:3], -1, 8), chunks[None, None, :, :, None], axis=3)
    dq = dq.reshape(sums.shape).transpose(0, 2, 1, 3) * call.d**-0.5
    _check({"dq": dq.astype(q.dtype), "dk": dk, "dv": dv}, right)


def _backward(call: Call, *given: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Bounded]]:
    """A cotangent of the result, each row's log-sum-exp and delta, and what is right."""
    rng, (q, k, v) = np.random.default_rng(1), given
    (dout,) = halves(rng.standard_normal((*q.shape[:-1], call.e)))
    dlse = rng.standard_normal((call.batch, call.h, call.s)).astype(np.float32)
    right = expected(call, [*map(_wide, (q, k, v)), None], (_wide(dout), dlse))
    lse = right["lse"].value.astype(np.float32)
    delta = (np.einsum("bshe,bshe->bhs", right["out"].value, _wide(dout)) - dlse).astype(np.float32)
    return dout, lse, delta, right


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def _check(found: dict[str, np.ndarray], right: dict[str, Bounded]) -> None:
    for name, array in found.items():
        right[name].assert_holds(_wide(array), name)
