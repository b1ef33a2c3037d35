"""Attention's kernels in the emulator of PTX: values, barriers that hang, accesses outside; nothing of races."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cutlass import BFloat16, Float16

from cute_ops import Op, mods, testing
from cute_ops.declaration.binding import bind
from cute_ops.declaration.case import Case
from cute_ops.declaration.shapes import Array
from cute_ops.expressions.reference import evaluate
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.layout import Memory, compact
from cute_ops.jit.plan import plan
from cute_ops.jit.target import parse
from cute_ops.kernels.attention import forward, tiles
from cute_ops.kernels.attention.config import AttentionBackwardConfig, AttentionConfig
from cute_ops.kernels.attention.forward import ForwardKernel
from cute_ops.kernels.attention.limits import limits_of
from cute_ops.kernels.attention.mods import FAST, K, Mods, Q
from cute_ops.kernels.attention.softmax import (
    CUBICS,
    HIGHEST,
    LOWEST,
    QUINTIC,
    BoundedSoftmax,
    CappedSoftmax,
    polynomial,
)
from cute_ops.kernels.attention.weights import GRADIENTS, HIDDEN, LEAST_CAP, Weights
from cute_ops.ops.attention import config as configs
from cute_ops.ops.attention.attention import attention, attention_bwd
from cute_ops.ops.attention.by_call import Captured, kind_of, op_of, op_of_call
from cute_ops.ops.attention.mods import LARGE_CAP, gradient_of, mask_mod, score_of
from cute_ops.testing.kernel_calls import Call as KernelCall
from tests.emulator import device, products, ptx_cta, ptx_sm90
from tests.emulator.launches import HostCode
from tests.ops.attention_calls import NO_FUNCTIONS, Bounded, Call, Functions, arrays, expected

DESCRIPTOR = bytes(128)
SEED = int(os.environ.get("CUTE_OPS_SEED", "41"))
Offsets = Sequence[np.ndarray]  # where packed sequences begin, of queries and of keys
OTHERS = 2  # blocks of memory before those of what functions read
CALLS = (
    Call(1, 150, 130, 2, 1, 64, 64, "bfloat16", {"causal": True, "left": 100}, False, False),
    Call(1, 77, 150, 2, 2, 128, 64, "bfloat16", {"softcap": 50.0}, False, False),
)
# Of the forward: scores so large that a row's largest one grows by more than 2^8 from tile to tile, and that of some
# tiles a soft cap has polynomials.
FORWARD = (
    CALLS[0]._replace(attrs={**CALLS[0].attrs, "scale": 1.0}),
    CALLS[1]._replace(attrs={"softcap": 50.0, "scale": 0.42}),
)
# Long heads leave room for one tile of keys, and of queries, in shared memory.
ONE_STAGE = Call(1, 70, 140, 1, 1, 64, 256, "bfloat16", {}, False, False)
TWO_PASSES = {"d": 48, "e": 48}  # heads whose deterministic gradients take two kernels
LONG_HEADS = (
    Call(2, 150, 130, 2, 1, 256, 256, "bfloat16", {"causal": True, "left": 100}, False, False),
    Call(1, 77, 100, 2, 2, 256, 256, "bfloat16", {"softcap": 5.0}, False, False),
    Call(1, 130, 70, 1, 1, 192, 128, "bfloat16", {"causal": True}, False, False),
)
ONE_PASS = (
    CALLS[0],
    Call(1, 62, 150, 2, 1, 128, 128, "bfloat16", {"softcap": 5.0}, False, False),
    Call(1, 150, 130, 2, 1, 96, 96, "bfloat16", {"causal": True, "left": 100}, False, False),
    Call(1, 70, 65, 1, 1, 80, 80, "bfloat16", {"softcap": 1e6}, False, False),
    Call(1, 130, 70, 1, 1, 112, 112, "bfloat16", {"causal": True}, False, False),
    Call(1, 250, 150, 2, 1, 64, 64, "bfloat16", {"causal": True}, False, False),
    Call(1, 250, 70, 1, 1, 64, 64, "bfloat16", {}, False, False),
    Call(1, 200, 130, 2, 1, 192, 192, "bfloat16", {"causal": True, "left": 100}, False, False),
    Call(1, 70, 150, 1, 1, 192, 192, "bfloat16", {"softcap": 5.0}, False, False),
)


def document(xp: Any, batch: Any, head: Any, q: Any, k: Any, document: Any) -> Any:
    return xp.logical_and(mods.causal(xp, batch, head, q, k), mods.documents(xp, batch, head, q, k, document))


def tables(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, table: Any, slopes: Any, keys: Any) -> Any:
    near = mods.relative_bias(xp, score, batch, head, q, k, table)
    behind = xp.sqrt(k.size - 1 - q)  # NaN of rows that fill the last tile
    return xp.where(q - k < 40, near * slopes[head], xp.tanh(score)) + keys[batch, k] + behind


def of_head(xp: Any, batch: Any, head: Any, q: Any, k: Any, document: Any) -> Any:
    return document[batch, q] == document[batch, k] + head


def band(xp: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
    return xp.logical_and(k - q < 3, xp.logical_and(-k <= 70 - q, q + 2 > k - 40))


def modded(number: int) -> tuple[Call, Functions]:
    """A call with functions of its own, which read arrays."""
    rng = np.random.default_rng(number)
    if number == 0:
        call = Call(2, 140, 150, 2, 1, 64, 64, "bfloat16", {}, False, False)
        place = np.cumsum(rng.random((2, 150)) < 0.02, axis=1).astype(np.int32)
        return call, Functions(mask=document, captured={"document": place})
    if number == 3:  # an interval of each row, and of each column
        return Call(1, 140, 150, 2, 1, 64, 64, "bfloat16", {}, False, False), Functions(mask=band)
    if number == 2:  # tiles where each distance keeps its sign, and such where it does not
        call = Call(1, 70, 150, 2, 2, 64, 64, "bfloat16", {}, False, False)
        return call, Functions(mods.alibi, None, {"slopes": np.array([0.5, -0.01], np.float32)})
    call = Call(1, 70, 140, 2, 2, 64, 64, "bfloat16", {"softcap": 20.0, "left": 90}, False, False)
    numbers = {"table": (2, 281), "slopes": (2,), "keys": (1, 140)}
    return call, Functions(tables, None, {n: rng.random(shape, np.float32) for n, shape in numbers.items()})


def in_steps(xp: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
    """Reads what the step before computes three times."""
    for i in range(30):
        q = xp.where(q > 40 + i, q - 3, q + i)
    return k <= q


@pytest.mark.parametrize(
    ("mask", "of_q", "of_k"),
    [
        (band, 3, 3), (in_steps, None, 1),
        # Sums that float32 rounds: neither kernel may reorder them, or they would differ in what they leave out.
        (lambda xp, batch, head, q, k: q < k + 3.0000002, 1, None),
        (lambda xp, batch, head, q, k: k + 3e7 < q + 3e7, None, None),
        (lambda xp, batch, head, q, k: k - q <= 2.0**31, 1, 1),
    ],
)  # fmt: skip
def test_limits_of_masks(mask: Any, of_q: int | None, of_k: int | None) -> None:
    for axis, count in ((Q, of_q), (K, of_k)):
        found, others = limits_of(mask_mod(mask), axis, FAST)
        assert (len(found), others is None) == (count or 0, count is not None)


def test_limits_beside_the_rest_of_a_mask() -> None:
    for axis in (Q, K):
        found, others = limits_of(mask_mod(document, {0: "i"}), axis, FAST)
        assert len(found) == 1
        assert others.text == mask_mod(mods.documents, {0: "i"}).text


class Run:
    """One call of an op whose kernels are compiled and emulated.

    Args:
        offsets: where packed sequences begin.
        arch: what is compiled for.
        others: blocks of memory before those of what functions read.
        sinks: whether it has sinks.
    """

    def __init__(
        self, op: Op, call: Call, folder: Path, functions: Functions = NO_FUNCTIONS, offsets: Offsets = (),
        arch: str = "sm_90a", others: int = OTHERS, sinks: bool = False,
    ) -> None:  # fmt: skip
        b, s, t, h, g, d, e = call[:7]
        shapes, lead = ((s, h, d), (t, g, d), (t, g, e), (s, h, e)), () if offsets else (b,)
        q, k, v, out = (Array((*lead, *shape), call.dtype) for shape in shapes)
        lse, captured = Array((*lead, h, s), "float32"), functions.captured
        given = [Captured(name, kind_of(str(a.dtype)), a.ndim) for name, a in captured.items()]
        if functions.options:
            made = op_of_call(
                functions.score, functions.mask, tuple(given), form="attention_packed" if offsets else "attention"
            )
            op = made.steps[0] if "dout" in op.inputs else made
        more = {"out": out, "lse": lse, "dout": out, "dlse": lse} if "dout" in op.inputs else {}
        arrays = {name: Array(a.shape, str(a.dtype)) for name, a in captured.items()}
        more |= {f"cu_seqlens_{x}": Array(o.shape, "int32") for x, o in zip("qk", offsets, strict=False)}
        more |= {"sinks": Array((h,), "float32")} if sinks else {}
        binding = bind(op, {"q": q, "k": k, "v": v, **more, **arrays}, call.attrs)
        self.others = others
        self.call, self.is_packed, found = call, bool(offsets), plan(binding, {}, parse(arch))
        self.variant, scratch = found.variant, found.workspaces
        worker.compile(self.variant, folder / "kernel.cubin", folder)
        (ptx,) = folder.glob("*.ptx")
        self.head, *self.entries = re.split(r"(?=\.visible \.entry)", ptx.read_text())
        names = [entry.partition("(")[0] for entry in self.entries]
        self.tall = any("TallOnePass" in name for name in names)
        self.is_wide = any("WideHeads" in name for name in names)
        self.is_long = any("LongSequences" in name for name in names)
        of_two = self.tall or self.is_wide or self.is_long
        self.shares = 2 if of_two or any("InParts" in name for name in names) else 1
        tables = {n: np.full(a.shape, np.nan, np.float32) for n, a in scratch.items() if n.startswith("ranges")}
        self.memory = [*captured.values(), *tables.values(), *offsets]
        packed = [_packed(i, a) for i, a in enumerate(self.memory, 1 + others)]
        self.read = packed[: len(captured)]
        self.tables = dict(zip(tables, packed[len(captured) :], strict=False))
        self.offsets = packed[len(captured) + len(tables) :]
        self.sizes = [struct.pack("<i", x) for x in (s, t, h, h // g, len(offsets[0]) - 1 if offsets else b)]

    def rows(self, block: int) -> bytes:
        """A parameter for numbers of rows, (batch, heads, seqlen), in this block of memory."""
        b, s, _, h = self.call[:4]
        if self.is_packed:
            return struct.pack("<Qq3i4xq", block << 32, 1, h, s, h * s, s)
        return struct.pack("<Q3q2q", block << 32, b, h, s, h * s, s)

    def __call__(
        self, name: str, mmas: int, moved: Sequence[tuple[np.ndarray, int]], rows: Sequence[bytes],
        memory: Sequence[np.ndarray], ctas: int, of_rows: Sequence[tuple[np.ndarray, int]] = (),
        sums: np.ndarray | None = None, columns: Mapping[int, int] | None = None, parts: np.ndarray | None = None,
        turns: np.ndarray | None = None,
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
            sums: what TMA adds to, (batch, heads, seqlen, headdim), or threads do: then the first block of memory.
            parts: sums of keys and values of each part of the heads that share them, a block of memory behind these.
            turns: of tiles of queries, (batch, heads, tiles), another one.
            columns: that TMA moves at once, by the place in ``moved``; where none are given the largest power of 2
                that divides all, 64 at most.
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
                width = (columns or {}).get(i, min(width & -width, 64))
                maps[len(arguments)] = ptx_sm90.Map(array.transpose(0, 2, 1, 3), height, width, set())
            whole = not self.is_packed or 4 <= i < 4 + len(of_rows)
            arguments += [DESCRIPTOR, struct.pack("<3i", length, heads, batch) if whole else struct.pack("<i", heads)]
        if sums is not None:
            b, h, s, d = sums.shape
            if name in ("OnePass", "WideHeads"):
                maps[len(arguments)] = ptx_sm90.Map(sums, of_rows[0][1] // self.shares, d, set())
                arguments += [DESCRIPTOR, struct.pack("<4i", s, d, h, b)]
            else:
                arguments.append(struct.pack("<Q4i3q", 1 << 32, s, d, h, b, d, s * d, h * s * d))
                memory = [sums, *memory]
        if parts is not None:
            b, h, s, d = parts.shape
            memory = [*memory, parts]
            arguments.append(struct.pack("<Q4i3q", len(memory) << 32, s, d, h, b, d, s * d, h * s * d))
        if turns is not None:
            (b, h, s), memory = turns.shape, [*memory, turns]
            arguments.append(struct.pack("<Q3q2q", len(memory) << 32, b, h, s, h * s, s))
        second = name not in ("AttentionFwd", "QueriesBackward", "LongHeads")
        ranges = [table for key, table in self.tables.items() if key.endswith("_2") == second]
        arguments += [*rows, *self.sizes, *self.read, *ranges, *self.offsets]
        empty = [np.zeros(8, np.uint8)] * (self.others - len(memory))
        blocks = [a.reshape(-1).view(np.uint8) for a in (*memory, *empty, *self.memory)]
        self._fill(ranges, blocks, second)
        for index in range(ctas):
            ptx_sm90.Cluster(kernel, index, ctas, (1, 1), arguments, maps, blocks, in_a_row=True).run(seed=index)

    def _fill(self, ranges: Sequence[bytes], blocks: list[np.ndarray], second: bool) -> None:
        """Run the kernel that bounds what a mask reads over tiles, or the second one."""
        kernels = [entry for entry in self.entries if "Ranges" in entry.partition("(")[0]]
        for entry in kernels[-1:] if second else kernels[:1]:
            ptx_cta.Kernel(self.head + entry).run(8, [*self.sizes, *self.read, *ranges, *self.offsets], blocks)


def _packed(block: int, a: np.ndarray) -> bytes:
    """A compact array in this block of memory as a parameter."""
    strides = [stride // a.itemsize for stride in a.strides[:-1]]
    return struct.pack(f"<Q{a.ndim}q{a.ndim - 1}q", block << 32, *a.shape, *strides)


def halves(*given: np.ndarray | None) -> list[np.ndarray]:
    return [x.astype(ml_dtypes.bfloat16) for x in given if x is not None]


@pytest.mark.drawn(0.7)
@pytest.mark.slow
def test_polynomials_in_the_place_of_tanh() -> None:
    """As accurate as scores in float32, and where rows have larger numbers below zero, ascending."""
    for d, near in ((16, QUINTIC), *CUBICS.items()):
        x = np.linspace(1e-3, near.bound, 1000)
        assert np.abs(polynomial(near, x) / np.tanh(x) - 1).max() < 2.0**-18 * (d / 16) ** 0.5  # a sum of d products
    assert (np.diff(polynomial(QUINTIC, np.linspace(-50, 50, 10001))) > 0).all()
    tiny = CappedSoftmax((1e-12, 0.088e12), 1.0, 0.0, 8.0, False)  # factors of x^5 would be infinite
    assert not all(low < high for low, high in map(tiny.range_of, tiny.near))
    for cap in (1e-6, 1.0, 50.0, 1000.0):
        capped = CappedSoftmax((cap, 0.088 / cap), 2 * cap, -cap, 8.0, False)
        assert all(low < high for low, high in map(capped.range_of, capped.near))
        assert all(2 * cap * np.tanh(capped.range_of(near)[1] * capped.inner) <= LOWEST for near in capped.near)
        bounded = BoundedSoftmax((cap, 0.088 / cap), 2 * cap, -cap)
        assert all(cap * np.tanh(bounded.range_of(near)[1] * bounded.inner) <= HIGHEST for near in bounded.near)


def test_polynomials_of_gradients_in_the_place_of_tanh_and_its_slope() -> None:
    """16 bits do not show their errors, and what takes the place of hidden products has no weight."""
    for near in GRADIENTS:
        x = np.linspace(0, near.bound, 1000)
        value, slope = x * (near.value[0] + near.value[1] * x**2), near.slope[0] + near.slope[1] * x**2
        assert np.abs(value - np.tanh(x)).max() < near.error
        assert np.abs(slope - 1 / np.cosh(x) ** 2).max() < 9e-5
        far = LEAST_CAP * HIDDEN * (near.value[0] + near.value[1] * HIDDEN**2)
        assert np.exp2(far + 128) == 0


@pytest.mark.parametrize("cap", [LARGE_CAP, 257.0, 1e6, 2.0**126])
def test_slopes_of_soft_caps_at_scores_of_all_sizes(cap: float) -> None:
    """A series in the place of tanh has none where scores are so large that its powers are infinite."""
    change = score_of(cap)
    assert change is not None
    x = np.array([0, 1e-3, 1, cap / 8.001, cap / 7.999, cap / 2, min(1e10 * cap, 3e38), np.inf, -np.inf], np.float32)
    with np.errstate(over="ignore"):
        (slope,) = evaluate(gradient_of(change), np, [x, *[np.zeros_like(x)] * 8, np.ones_like(x)])
    np.testing.assert_allclose(slope, 1 - np.tanh(x.astype(np.float64) / cap) ** 2, rtol=0, atol=1e-6)


@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("call", [*FORWARD, ONE_STAGE], ids=lambda call: call.name)
def test_results(call: Call, tmp_path: Path) -> None:
    _check_results(call, NO_FUNCTIONS, tmp_path)


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("number", range(3))
def test_results_with_functions_that_read_arrays(number: int, tmp_path: Path) -> None:
    _check_results(*modded(number), tmp_path)


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("number", range(3))
def test_results_of_blocks_of_two_heads(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each warpgroup has its own head, of drawn lengths: with a window, of long heads, with functions that read."""
    print("seed", SEED)
    rng = np.random.default_rng((SEED, number))
    monkeypatch.setattr(configs, "_heads_of_block", lambda *_: 2)
    t = int(rng.integers(130, 260))
    call = Call(2, t - int(rng.integers(70)), t, 4, 2, 128, 64, "bfloat16", {"causal": True}, False, False)
    if number == 0:
        return _check_results(call._replace(attrs={"causal": True, "left": 100}), NO_FUNCTIONS, tmp_path)
    captured = {"document": np.cumsum(rng.random((2, t)) < 0.02, axis=1).astype(np.int32)}
    if number == 1:
        call = call._replace(batch=1, h=2, g=1, d=256, e=256)
        return _check_results(call, Functions(None, document, {"document": captured["document"][:1]}), tmp_path)
    captured["slopes"] = rng.random(4, np.float32)
    return _check_results(call, Functions(mods.alibi, document, captured), tmp_path)


@pytest.mark.drawn(0.5, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("number", range(2))
def test_results_of_scores_that_grow_from_tile_to_tile(number: int, tmp_path: Path) -> None:
    """By so much that weights are made smaller, and by more than float32 holds."""
    print("seed", SEED)
    rng = np.random.default_rng((SEED, number))
    t = int(rng.integers(260, 380))
    attrs = {"causal": True} if number else {"left": 300, "right": 100}
    call = Call(1, int(rng.integers(40, 64)), t, 1, 1, (128, 64)[number], 64, "bfloat16", attrs, False, False)
    factors = np.array([7, 300, 1] if number else [1, 7, 1])[:, None, None]
    _check_results(call, NO_FUNCTIONS, tmp_path, factors)


@pytest.mark.drawn(0.5, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("number", range(3))
def test_results_of_biases_that_are_read_in_pairs(number: int, tmp_path: Path) -> None:
    """Of rows where pairs of elements lie together, behind which keys end in a tile, and where they do not."""
    print("seed", SEED)
    rng = np.random.default_rng((SEED, number))
    t = 2 * int(rng.integers(80, 150)) + (number == 2)
    call = Call(2, t - int(rng.integers(70)), t, 2, 1, (64, 128, 64)[number], 64, "bfloat16", {}, False, False)
    bias = 3 * rng.standard_normal((1, 2, call.s, t), np.float32)
    bias = bias if number == 1 else bias.astype(ml_dtypes.bfloat16)
    _check_results(call, Functions(mods.bias, None, {"bias": bias.repeat(2, 0)}), tmp_path)


@pytest.mark.slow
@products.emulated
def test_slots_are_released_by_warps_that_have_read_them_again(tmp_path: Path) -> None:
    """Keys of the second tile, whose scores float32 cannot exponentiate, give their slot to those of the fourth."""
    call = Call(1, 20, 520, 1, 1, 64, 64, "bfloat16", {}, False, False)
    q, k, v = halves(*arrays(call, 0))
    k = (k * np.where(np.arange(call.t) // 128 == 3, 300, 1)[:, None, None]).astype(k.dtype)
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "sinks": None}
    where = {name: Memory(compact(given[name].shape)) for name in ("q", "k", "v")}
    out, lse = device.run(KernelCall(attention, given, where, attention.attrs, "", lambda _: given), tmp_path)
    assert out is not None
    assert lse is not None
    _check({"out": out, "lse": lse}, expected(call, [*map(_wide, (q, k, v)), None]))


@pytest.mark.parametrize(
    ("sizes", "options", "heads"),
    [
        ((120, 272, 2, 1, 256), {}, 2), ((120, 272, 2, 1, 256), {"causal": True}, 2), ((120, 272, 2, 2, 256), {}, 1),
        ((16, 1024, 32, 8, 128), {"causal": True}, 1), ((16, 1024, 16, 8, 256), {"causal": True}, 1),
        ((200, 60, 4, 2, 128), {}, 2), ((2, 8192, 32, 8, 128), {}, 1),
        ((120, 272, 2, 1, 64), {}, 1), ((1, 60, 8, 2, 128), {}, 2), ((2, 8192, 32, 8, 128), {"mask_mod": document}, 2),
        ((2, 8192, 32, 8, 128), {"mask_mod": of_head}, 1), ((2, 8192, 32, 8, 128), {"mask_mod": band}, 1),
    ],
)  # fmt: skip
def test_which_blocks_have_two_heads(sizes: tuple[int, ...], options: dict[str, Any], heads: int) -> None:
    b, s, h, g, d = sizes
    q, k = (Array((b, s, n, d), "bfloat16") for n in (h, g))
    captured = {"document": Array((b, s), "int32")} if options.get("mask_mod") in (document, of_head) else {}
    op = op_of(mask_mod=options["mask_mod"], captured=captured) if "mask_mod" in options else attention
    attrs = {name: value for name, value in options.items() if name != "mask_mod"}
    found = plan(bind(op, {"q": q, "k": k, "v": k, **captured}, attrs), {}, parse("sm_90a:132"))
    assert AttentionConfig.of(found.variant.config).heads == heads


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
def test_rows_without_a_key_have_the_sink_alone(tmp_path: Path) -> None:
    """However small it is, with a soft cap, too."""
    names, dims = ("q", "k", "v", "sinks"), {"m": (1,), "s": 70, "t": 50, "g": 1, "r": 2, "d": 64, "e": 64}
    arrays = {**testing.inputs(attention, Case("", dims), "bfloat16"), "sinks": np.array([-200.0, 3.0], np.float32)}
    where = {name: Memory(compact(arrays[name].shape)) for name in names}
    attrs = {**attention.attrs, "causal": True, "softcap": 30.0}
    out, lse = device.run(KernelCall(attention, arrays, where, attrs, "", lambda _: arrays), tmp_path)
    assert not out[:, :20].astype(np.float32).any()
    np.testing.assert_allclose(lse[0, :, :20], np.repeat([[-200.0], [3.0]], 20, 1), rtol=1e-6)


@pytest.mark.slow
@products.emulated
def test_few_ctas_go_through_the_blocks_of_all_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CTAs have three blocks of each of two heads, of which L2 would hold one."""
    monkeypatch.setattr(tiles, "CACHED_BYTES", 1)
    call = Call(1, 270, 270, 2, 2, 128, 64, "bfloat16", {"causal": True}, False, False)
    _check_results(call, NO_FUNCTIONS, tmp_path)


def test_ctas_have_as_many_blocks_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is one CTA's, whether heads that are walked together fill rows of CTAs or not."""
    print("seed", SEED)
    rng = np.random.default_rng(SEED)
    kernel = ForwardKernel.__new__(ForwardKernel)
    fixed = [(133 * 32, 133 * 3, 132), (7, 133, 7), (1, 1, 1)]
    drawn = [(int(rng.integers(1, 9 * n)), int(rng.integers(1, 4 * n)), n) for n in rng.integers(1, 20, 200).tolist()]
    for count, together, ctas in fixed + drawn:
        found = []
        for own in range(ctas):
            arch = SimpleNamespace(grid_dim=lambda n=ctas: (n, 1, 1), block_idx=lambda i=own: (i, 0, 0))
            monkeypatch.setattr(forward, "cute", SimpleNamespace(arch=arch, ceil_div=lambda a, b: -(-a // b)))
            monkeypatch.setattr(forward, "cutlass", SimpleNamespace(min=min, select_=lambda c, a, b: a if c else b))
            monkeypatch.setattr(kernel, "_count", lambda _, n=count: n, raising=False)
            monkeypatch.setattr(kernel, "_together", lambda _, n=together: n, raising=False)
            steps, index_of = kernel._steps(None)
            found.append([i for i in map(index_of, range(steps)) if i < count])
        lengths = [len(each) for each in found]
        assert sorted(i for each in found for i in each) == list(range(count)), (count, together, ctas)
        assert max(lengths) - min(lengths) <= 1, (count, together, ctas, lengths)


def _check_results(call: Call, functions: Functions, folder: Path, factors: np.ndarray | None = None) -> None:
    """``factors``: of keys, by tiles of 128."""
    run, (q, k, v) = Run(attention, call, folder, functions), halves(*arrays(call, 0))
    if factors is not None:
        k = (k * factors[np.arange(call.t) // 128]).astype(k.dtype)
    out = np.full((*q.shape[:-1], call.e), np.nan, q.dtype)
    lse = np.full((call.batch, call.h, call.s), np.nan, np.float32)
    config = AttentionConfig.of(run.variant.config)
    moved = [(q, config.block), (k, config.tile_n), (v, config.tile_n), (out, 64)]
    run("AttentionFwd", 3, moved, [run.rows(1)], [lse], 2)
    _check({"out": out, "lse": lse}, expected(call, [*map(_wide, (q, k, v)), None], None, functions))


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("call", [*CALLS, ONE_STAGE], ids=lambda call: call.name)
def test_gradients(call: Call, tmp_path: Path) -> None:
    _check_gradients(call, NO_FUNCTIONS, tmp_path)


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("number", [0, 1, 3])
def test_gradients_with_functions_that_read_arrays(number: int, tmp_path: Path) -> None:
    _check_gradients(*modded(number), tmp_path)


def _check_gradients(call: Call, functions: Functions, folder: Path) -> None:
    call = call._replace(attrs={**call.attrs, "deterministic": True}, **(TWO_PASSES if call.d == call.e else {}))
    run, (q, k, v) = Run(attention_bwd, call, folder, functions), halves(*arrays(call, 0))
    dout, lse, delta, right = with_cotangents(call, (q, k, v), functions)
    config, rows, memory = dict(run.variant.settings), [run.rows(1), run.rows(2)], [lse, delta]
    dq, dk, dv = (np.full_like(x, np.nan) for x in (q, k, v))
    moved = [(q, 128), (k, config["tile_k"]), (v, config["tile_k"]), (dout, 128), (dq, 64)]
    run("QueriesBackward", 3, moved, rows, memory, -(-call.s // 128) * call.h * call.batch)
    moved = [(q, config["tile_q"]), (k, 128), (v, 128), (dout, config["tile_q"]), (dk, 64), (dv, 64)]
    run("KeysBackward", 4, moved, rows, memory, -(-call.t // 128) * call.g * call.batch)
    _check({"dq": dq, "dk": dk, "dv": dv}, right)


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("call", ONE_PASS, ids=lambda call: call.name)
def test_gradients_in_one_pass(call: Call, tmp_path: Path) -> None:
    _check_one_pass(call, NO_FUNCTIONS, tmp_path)


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("number", range(4))
def test_gradients_of_soft_caps(number: int, tmp_path: Path) -> None:
    """Of drawn lengths, where all warps, some or none have a polynomial."""
    print("seed", SEED)
    rng = np.random.default_rng((SEED, number))
    (s, t), d = rng.integers(130, 260, 2).tolist(), (64, 128)[number % 2]
    attrs = {"softcap": float(rng.choice([3.0, 15.0, 30.0, 200.0])), "causal": number < 2}
    _check_one_pass(Call(1, s, t, 2, 1, d, d, "bfloat16", attrs, False, False), NO_FUNCTIONS, tmp_path)


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_long_sequences(causal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of drawn lengths, which would be too short."""
    print("seed", SEED)
    s, t = np.random.default_rng((SEED, causal)).integers(90, 260, 2).tolist()
    monkeypatch.setattr(configs, "_is_long", lambda own, problem: True)
    call = Call(1, s, t, 2, 1, 128, 128, "bfloat16", {"causal": causal}, False, False)
    _check_one_pass(call, NO_FUNCTIONS, tmp_path)


@pytest.mark.parametrize(
    ("queries", "attrs", "tile"),
    [
        (560, {}, 80), (559, {}, 0), (3072, {"causal": True}, 80), (3071, {"causal": True}, 0), (1041, {}, 0),
        (1024, {}, 80), (832, {}, 0),
        (32768, {"left": 100}, 0), (32768, {"causal": True, "left": 100}, 0), (32768, {"right": 0}, 0),
        (32768, {"softcap": 9.0}, 0), (32768, {"deterministic": True}, 0), (32768, {"causal": True}, 80),
    ],
)  # fmt: skip
def test_which_sequences_are_long(queries: int, attrs: dict[str, Any], tile: int) -> None:
    """Long sequences, and of heads of 128 alone, with sums of whole tiles."""
    for d in (128, 112, 192):
        x = Array((2, queries, 4, d), "bfloat16")
        given = {"q": x, "k": x, "v": x, "out": x, "lse": Array((2, 4, queries), "float32"), "dout": x}
        found = plan(bind(attention_bwd, given, attrs), {}, parse("sm_90a:132"))
        chosen = AttentionBackwardConfig.of(found.variant.config)
        assert chosen.tile_q == (tile if tile and d == 128 else 64)
        whole = 80 if chosen.tile_q == 80 else 128
        assert found.workspaces["sums"].shape == (2, 4, -(-queries // whole) * whole, d)


def test_which_short_heads_have_tall_tiles() -> None:
    """Of drawn lengths and caps: such as leave few rows empty, and caps whose tanh kernels have."""
    print("seed", SEED)
    rng = np.random.default_rng(SEED)
    caps = [0.0, LARGE_CAP, 257.0, *rng.uniform(0.1, 400, 5).tolist()]
    lengths = [64, 65, 128, *rng.integers(1, 3000, 5).tolist()]
    for cap, queries in ((cap, queries) for cap in caps for queries in lengths):
        x = Array((1, queries, 2, 64), "bfloat16")
        given = {"q": x, "k": x, "v": x, "out": x, "lse": Array((1, 2, queries), "float32"), "dout": x}
        found = plan(bind(attention_bwd, given, {"softcap": cap}), {}, parse("sm_90a:132"))
        of_128, of_64 = -(-queries // 128) * 128, -(-queries // 64) * 64
        tall = cap <= LARGE_CAP and 16 * of_128 <= 17 * of_64
        assert AttentionBackwardConfig.of(found.variant.config).tile_q == (128 if tall else 64), (cap, queries)
        found = plan(bind(attention_bwd, given, {"softcap": cap, "left": 100}), {}, parse("sm_90a:132"))
        assert AttentionBackwardConfig.of(found.variant.config).tile_q == (128 if tall and not cap else 64), cap


def _from_segments(xp: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
    """Keys up to a query, of its 64 and of its 500: that a tile is of one 500 does not say that it is of one 64."""
    return (k <= q) & (q < xp.floor(k / 64) * 64 + 64) & (xp.floor(q / 500) == xp.floor(k / 500))


def _every_fourth(xp: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
    return (k < 100) & ((q - k) % 4 == 0)


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("number", range(6))
def test_gradients_in_turns(number: int, tmp_path: Path) -> None:
    """Deterministic: each block of keys adds to a tile of queries once the block behind it has."""
    causal = ONE_PASS[2]._replace(s=300, t=300, d=128, e=128, attrs={"causal": True})
    calls = CALLS[0], ONE_PASS[1], causal, None, ONE_PASS[-4], causal._replace(s=200, t=200, d=192, e=192)
    call, functions = modded(0) if number == 3 else (calls[number], NO_FUNCTIONS)
    _check_one_pass(call._replace(attrs={**call.attrs, "deterministic": True}), functions, tmp_path)


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("number", range(4))
def test_gradients_in_one_pass_with_functions_that_read_arrays(number: int, tmp_path: Path) -> None:
    call, functions = modded(number % 3)
    _check_one_pass(call._replace(d=192, e=192) if number == 3 else call, functions, tmp_path)


@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("mask", [_from_segments, _every_fourth])
def test_gradients_of_wide_heads_know_the_rest_of_their_rows(mask: Any, tmp_path: Path) -> None:
    """Of masks that say of queries, their rows, what they do not say of keys."""
    call = Call(1, 128, 128, 1, 1, 192, 192, "bfloat16", {}, False, False)
    _check_one_pass(call, Functions(mask=mask), tmp_path)


@pytest.mark.parametrize(
    ("sizes", "attrs", "parts"),
    [
        ((2, 14720, 8, 2), {}, 2), ((1, 2048, 32, 8), {"causal": True}, 2), ((2, 8192, 32, 8), {"causal": True}, 1),
        ((1, 2048, 16, 16), {}, 1), ((1, 900, 6, 2), {}, 2), ((5, 5632, 32, 4), {"causal": True}, 2),
        ((5, 5632, 32, 4), {"causal": True, "left": 200}, 1), ((1, 1 << 20, 32, 8), {"causal": True}, 1),
    ],
)  # fmt: skip
def test_parts_of_heads_that_share_keys(sizes: tuple[int, ...], attrs: dict[str, Any], parts: int) -> None:
    """Of 132 SMs, 460 CTAs of keys would leave half idle in the fourth wave."""
    b, s, h, g = sizes
    q, k = (Array((b, s, heads, 128), "bfloat16") for heads in (h, g))
    given = {"q": q, "k": k, "v": k, "out": q, "lse": Array((b, h, s), "float32"), "dout": q}
    found = plan(bind(attention_bwd, given, attrs), {}, parse("sm_90a:132")).workspaces["parts"]
    assert found.shape == ((2 * b * parts, g, -(-s // 128) * 128, 128) if parts > 1 else (1, 1, 1, 4))


def _check_one_pass(call: Call, functions: Functions, folder: Path) -> None:
    run, (q, k, v) = Run(attention_bwd, call, folder, functions), halves(*arrays(call, 0))
    dout, lse, delta, right = with_cotangents(call, (q, k, v), functions)
    tile = dict(run.variant.settings)["tile_q"]
    logs, delta = of_whole_tiles(call, lse, delta, tile if 128 % tile else 128)
    sums = np.zeros((*logs.shape, call.d), np.float32)
    dk, dv = (np.full_like(x, np.nan) for x in (k, v))
    block = 96 if run.is_wide else 128
    moved = [(q, tile), (k, block), (v, block), (dout, tile), (dk, block // 2), (dv, block // 2)]
    of_rows = [(logs, tile), (delta, tile)]
    ctas, count = -(-call.t // block) * call.g * call.batch, min(call.h // call.g, 2)
    parts = np.full((2 * count * call.batch, call.g, -(-call.t // block) * block, call.d), np.nan, np.float32)
    turns = np.zeros((*logs.shape[:2], logs.shape[2] // tile), np.int32) if call.attrs.get("deterministic") else None
    columns = {1: call.d if run.tall else columns_of_keys(call)}
    kinds = {"TallOnePass": run.tall, "WideHeads": run.is_wide, "LongSequences": run.is_long}
    name = next((name for name, is_it in kinds.items() if is_it), one_pass_of(call))
    run(name, 6, moved, [], [], ctas * count, of_rows, sums, columns, parts, turns)
    if turns is not None and "left" not in call.attrs and not functions.mask:
        # The first block of keys was the last one to add, but to tiles of queries before all keys.
        before = max(call.s - call.t, 0) if call.attrs.get("causal") else 0
        assert (turns[:, :, before // tile : -(-call.s // tile)] == 1).all()
    config = AttentionBackwardConfig.of(run.variant.config)
    weights = Weights(Mods(call.d**-0.5, config.score), call.d**-0.5)
    scale = call.d**-0.5 * weights.leave_out(BFloat16 if call.dtype == "bfloat16" else Float16)
    if count > 1:
        by_keys = by_columns(parts) if run.is_wide else by_tiles(parts, 128)
        halves_of = by_keys.reshape(count, 2, call.batch, *parts.shape[1:])[..., : call.t, :].sum(0)
        dk, dv = (x.transpose(0, 2, 1, 3) for x in halves_of)
        dk, dv = (dk * scale).astype(q.dtype), dv.astype(q.dtype)
    if tile == 80:
        sums = transposed(sums, tile)
    else:
        sums = by_tiles(sums, tile // 2) if run.tall else by_rows(sums, run.shares)
    dq = sums[:, :, : call.s].transpose(0, 2, 1, 3) * scale
    _check({"dq": dq.astype(q.dtype), "dk": dk, "dv": dv}, right)


@pytest.mark.slow
@products.emulated
def test_grids_for_more_than_two_to_the_31_elements(tmp_path: Path) -> None:
    """Of the kernels that zero and round the sums of dq, here of so many elements."""
    batch = 2**31 // (128 * 8 * 64) + 3
    q, k = (Array((batch, 128, heads, 64), "bfloat16") for heads in (8, 1))
    given = {"q": q, "k": k, "v": k, "out": q, "lse": Array((batch, 8, 128), "float32"), "dout": q}
    binding = bind(attention_bwd, given, {"causal": True})
    found = plan(binding, {name: Memory(compact(a.shape)) for name, a in given.items()}, parse("sm_90a:132"))
    arrays = {**binding.inputs, **binding.outputs, **found.workspaces}
    tensors: list[Any] = []
    for key in filter(None, found.variant.args):
        shape = found.views[key.name].shape if key.name in found.views else arrays[key.name].shape
        tensors.append((len(tensors) + 1 << 40, shape, compact(shape)))
    launches = {each.kernel: each.grid for each in HostCode(found.variant, tmp_path).launches(tensors)}
    elements = batch * 8 * 128 * 64
    assert [grid[0] for grid in launches.values()] == [elements // 64 * 8 // 256 // 2, batch, elements // 16 // 256]


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("number", range(4))
def test_gradients_of_long_heads(number: int, tmp_path: Path) -> None:
    call, functions = (LONG_HEADS[number], NO_FUNCTIONS) if number < 3 else modded(0)
    call = call._replace(d=256, e=256) if number == 3 else call
    run, (q, k, v) = Run(attention_bwd, call, tmp_path, functions, others=3), halves(*arrays(call, 0))
    dout, lse, delta, right = with_cotangents(call, (q, k, v), functions)
    tile = dict(run.variant.settings)["tile_k"]
    sums = np.zeros((2 * call.batch, call.g, -(-call.t // tile) * tile, max(call.d, call.e)), np.float32)
    dq = np.full_like(q, np.nan)
    moved = [(q, 128), (k, tile), (v, tile), (dout, 128), (dq, 64)]
    ctas = -(-call.s // 128) * call.h * call.batch
    run("LongHeads", 3, moved, [run.rows(2), run.rows(3)], [lse, delta], ctas, sums=sums)
    dk, dv = (x[:, :, : call.t].transpose(0, 2, 1, 3) for x in np.split(by_tiles(sums, tile), 2))
    dk = dk[..., : call.d] * call.d**-0.5
    _check({"dq": dq, "dk": dk.astype(q.dtype), "dv": dv[..., : call.e].astype(q.dtype)}, right)


def by_tiles(sums: np.ndarray, tile: int) -> np.ndarray:
    """Sums of keys, or values, by rows and columns."""
    # Of a tile: blocks of 8 columns, warps, 8 rows, pairs of columns, rows 8 apart, columns.
    x = sums.reshape(-1, sums.shape[-1] // 8, tile // 16, 8, 4, 2, 2)
    return x.transpose(0, 2, 5, 3, 1, 4, 6).reshape(sums.shape)


def by_columns(sums: np.ndarray) -> np.ndarray:
    """Transposed sums of 96 keys, or values, of heads of 192, by rows and columns."""
    # Of a tile: blocks of 64 columns, of 8 keys, warpgroups, warps, 8 columns, pairs of keys, columns 8 apart, keys.
    x = sums.reshape(-1, 3, 6, 2, 4, 8, 4, 2, 2)
    return x.transpose(0, 3, 2, 6, 8, 1, 4, 7, 5).reshape(sums.shape)


def transposed(sums: np.ndarray, tile: int) -> np.ndarray:
    """Transposed sums of queries of heads of 128, by rows and columns."""
    # Of a tile: warpgroups, blocks of 8 rows, warps, 8 columns, pairs of rows, columns 8 apart, rows.
    x = sums.reshape(-1, 2, tile // 8, 4, 8, 4, 2, 2)
    return x.transpose(0, 2, 5, 7, 1, 3, 6, 4).reshape(sums.shape)


def columns_of_keys(call: Call) -> int:
    """Columns of keys that TMA moves at once where dq is computed, too: a warpgroup has a multiple of them."""
    return call.d // 2 & -(call.d // 2)


def one_pass_of(call: Call) -> str:
    """The kernel of gradients in one pass."""
    return "ShortHeads" if call.d <= 64 and not call.attrs.get("deterministic") else "OnePass"


def by_rows(sums: np.ndarray, shares: int) -> np.ndarray:
    """Sums of queries by rows and columns; ``shares``: of warpgroups, behind one another, or 1."""
    # Of a tile: blocks of 8 columns of a warpgroup, warpgroups, warps, 8 rows, pairs of columns, rows 8 apart, columns.
    x = sums.reshape(-1, shares, sums.shape[-1] // 16, 2 // shares, 4, 8, 4, 2, 2)
    return x.transpose(0, 4, 7, 5, 1, 3, 2, 6, 8).reshape(sums.shape)


def of_whole_tiles(call: Call, lse: np.ndarray, delta: np.ndarray, tile: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of base 2 of rows, and deltas, as one pass reads them."""
    whole = ((0, 0), (0, 0), (0, -call.s % tile))
    logs = np.where(lse > -np.inf, lse * np.float32(np.log2(np.e)), np.inf)
    return np.pad(logs, whole, constant_values=np.inf), np.pad(delta, whole)


def with_cotangents(
    call: Call, given: Sequence[np.ndarray], functions: Functions
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Bounded]]:
    """A cotangent of the result, each row's log-sum-exp and delta, and what is right."""
    rng, (q, k, v) = np.random.default_rng(1), given
    (dout,) = halves(rng.standard_normal((*q.shape[:-1], call.e)))
    dlse = rng.standard_normal((call.batch, call.h, call.s)).astype(np.float32)
    right = expected(call, [*map(_wide, (q, k, v)), None], (_wide(dout), dlse), functions)
    lse = right["lse"].value.astype(np.float32)
    delta = (np.einsum("bshe,bshe->bhs", right["out"].value, _wide(dout)) - dlse).astype(np.float32)
    return dout, lse, delta, right


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def _check(found: dict[str, np.ndarray], right: dict[str, Bounded]) -> None:
    for name, array in found.items():
        right[name].assert_holds(_wide(array), name)
