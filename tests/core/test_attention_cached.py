"""The kernel of attention to caches, in the emulator of PTX: pages of any size, holes, packed queries, functions.

NaN stands in caches wherever no key of a sequence does: nothing of it spreads.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from cute_ops import Array
from cute_ops.declaration.binding import bind
from cute_ops.jit.plan import plan
from cute_ops.jit.target import parse
from cute_ops.kernels.attention.config import AttentionConfig
from cute_ops.ops.attention import config
from cute_ops.ops.attention.attention_cached import attention_cached, attention_cached_packed
from cute_ops.ops.attention.by_call import Captured, kind_of, op_of_call
from tests.core.test_attention_by_warps import of_heads
from tests.core.test_decode_kernels import check_shared
from tests.emulator import products, ptx_cta, ptx_sm90
from tests.emulator.calls import EmulatedCall, parameter
from tests.ops.attention_calls import Functions
from tests.ops.cached_calls import Cached, biased, documents
from tests.ops.decode_calls import Decoding

DESCRIPTOR = bytes(128)
TILE_Q, ROWS = 128, 64
LONG = np.random.default_rng(0)
CALLS = {
    "pages of one": Cached(
        Decoding((150, 0, 33), 1, 1, 2, 64, 64, 1, 150, holes=True), (40, 40, 40), False, {"causal": True}
    ),
    "packed": Cached(
        Decoding((200, 0, 129), 1, 2, 1, 128, 64, 16, 208, holes=True), (70, 9, 129), True,
        {"causal": True, "left": 100}, rest=3,
    ),
    "contiguous": Cached(
        Decoding((130, 300), 1, 1, 1, 96, 64, 0, 310, heads_first=True, sinks=True), (60, 60), False, {"softcap": 5.0}
    ),
    "long heads": Cached(Decoding((100,), 1, 1, 1, 256, 256, 24, 120), (20,), False, {"causal": True}),
    "functions": Cached(
        Decoding((140, 90), 1, 2, 1, 64, 64, 7, 140, holes=True), (50, 90), True, {"causal": True},
        Functions(biased, None, {"slopes": LONG.random(2).astype(np.float32),
                                 "keys": LONG.standard_normal((2, 141)).astype(np.float32)}),
    ),
    "float8": Cached(
        Decoding((150, 33), 1, 2, 1, 128, 64, 16, 160, holes=True, float8=True), (40, 40), False, {"causal": True}
    ),
    "float8 in float16": Cached(
        Decoding((150,), 1, 1, 1, 96, 160, 5, 150, "float16", float8=True), (60,), True, {"left": 70}
    ),
    "documents": Cached(
        Decoding((300, 170), 1, 2, 1, 64, 64, 16, 304), (100, 100), False, {"causal": True},
        Functions(None, documents, {"document": np.cumsum(LONG.random((2, 301)) < 0.02, axis=1).astype(np.int32)}),
    ),
}  # fmt: skip


class Emulated(EmulatedCall):
    """A call whose queries and outputs TMA moves, or by warps as they lie in memory."""

    def __init__(self, call: Cached, given: dict[str, np.ndarray], folder: Path, arch: str = "sm_90a") -> None:
        op = attention_cached_packed if call.packed else attention_cached
        own = call.functions
        if own.options:
            read = tuple(Captured(name, kind_of(str(a.dtype)), a.ndim) for name, a in own.captured.items())
            op = op_of_call(own.score, own.mask, read, form=op.name)
        super().__init__(op, given, call.attrs, folder, arch)
        self.call, self.config = call, AttentionConfig.of(self.variant.config)
        if self.config.warps:
            check_shared(folder, self.config.shared(call.caches.d, call.caches.e))

    def attend(self) -> dict[str, np.ndarray]:
        packed, a, c, warps = self.call.packed, self.arrays, self.call.caches, self.config.warps
        q, out = (a[name][None] if packed else a[name] for name in ("q", "out"))
        (b, s, h, _), lengths, splits = q.shape, a["lengths"], a["partial_lse"].shape[1]
        room = a["k"].shape[1] * (a["page_table"].shape[1] if "page_table" in a else 1)
        names = [*a]
        place = {name: i << 32 for i, name in enumerate(names, start=1)}
        of = {name: parameter(a[name], self.variant.tensors[name], place[name]) for name in names if name != "lse"}
        form, sizes = ("<Qq3i4xq", (1, h, s, h * s, s)) if packed else ("<Q3q2q", (b, h, s, h * s, s))
        numbers = [struct.pack("<i", x) for x in (s, room, h, c.r, len(lengths))]
        behind = [*self.call.functions.captured, *(n for n in a if n.startswith("ranges")), *["cu_seqlens_q"] * packed,
                  "lengths", *(n for n in a if n.endswith("_scale")), "partial", "partial_lse"]  # fmt: skip
        rest = [*numbers, *(of[name] for name in behind)]
        caches = [of[name] for name in ("k", "v", "page_table") if name in a]
        of_rows = [*(of[name] for name in ("sinks",) if name in a), struct.pack(form, place["lse"], *sizes)]
        blocks = [(x if x.base is None else x.base).reshape(-1).view(np.uint8) for x in a.values()]
        for entry in self.entries:
            if "Ranges" in entry.partition("(")[0]:
                ptx_cta.Kernel(self.head + entry).run(8, rest, blocks)
        maps, ctas = {}, 2
        if warps:
            moved = [of_heads(place[name] >> 32, x) for name, x in (("q", q), ("out", out))]
            arguments = [moved[0], *caches, moved[1], *of_rows, *rest]
            count = s // self.config.block + len(lengths) + 1 if packed else -(-s // self.config.block) * b
            ctas = count * h * splits
        else:
            arguments = [b"0"] * 3
            for array, rows in ((q, TILE_Q), (out, ROWS)):
                columns = next(n for n in (64, 32, 16) if array.shape[-1] % n == 0)
                maps[len(arguments)] = ptx_sm90.Map(array.transpose(0, 2, 1, 3), rows, columns, set())
                arguments += [DESCRIPTOR, struct.pack("<i", h) if packed else struct.pack("<3i", s, h, b)]
            arguments += caches
            for array in (a["k"], a["v"]) if self.config.box else ():
                columns = next(n for n in (64, 32) if array.shape[-1] % n == 0)
                maps[len(arguments)] = ptx_sm90.Map(array.transpose(0, 2, 1, 3), self.config.box, columns, set())
                arguments += [DESCRIPTOR, struct.pack("<3i", *array.shape[1:3], array.shape[0])]
            arguments += [*of_rows, *rest]
        self._run("AttentionCachedSm80" if warps else "cached_kernel", ctas, arguments, maps, blocks)
        if splits > 1:
            rows, e = b * s * h, out.shape[-1]
            of_out = struct.pack("<Qq3i4xq", place["out"], 1, s, h, s * h * e, h * e) if packed else of["out"]
            arguments = [of["partial"], of["partial_lse"], *of_rows[:-1], of_out, of_rows[-1]]
            arguments.append(struct.pack("<i", splits))
            self._run("Combine", rows, arguments, {}, blocks)
        return {name: a[name] for name in ("out", "lse")}

    def _run(
        self, name: str, ctas: int, arguments: list[bytes], maps: dict[int, ptx_sm90.Map], blocks: list[np.ndarray]
    ) -> None:
        (text,) = (entry for entry in self.entries if name in entry.partition("(")[0])
        kernel = ptx_sm90.Kernel(self.head + text)
        for index in range(ctas):
            ptx_sm90.Cluster(kernel, index, ctas, (1, 1), arguments, maps, blocks, in_a_row=True).run(seed=index)


@pytest.mark.drawn(0.2, among="emulated attention")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize(
    "which", [*(pytest.param(name, marks=() if name == "packed" else pytest.mark.slow) for name in CALLS)]
)
def test_results(which: str, tmp_path: Path) -> None:
    _check(which, tmp_path, "sm_90a")


@pytest.mark.drawn(0.2, among="emulated attention")
@products.emulated
@pytest.mark.parametrize("which", [pytest.param(n, marks=pytest.mark.slow) for n in ("long heads", "functions")])
def test_results_by_warps(which: str, tmp_path: Path) -> None:
    _check(which, tmp_path, "sm_80")


@pytest.mark.drawn(0.2, among="emulated attention")
@products.emulated
@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "arch"), [("packed", "sm_90a"), ("packed", "sm_80"), ("contiguous", "sm_80"), ("float8", "sm_89")]
)
def test_results_of_parts(which: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in three parts, of which sequences may have none."""
    monkeypatch.setattr(config, "CHUNK_LEAST_KEYS", 3)
    monkeypatch.setattr(config, "MOST_SPLITS", 3)
    _check(which, tmp_path, arch)


@pytest.mark.parametrize(
    ("keys", "blocks", "splits"),
    [(131072, 128, 1), (131072, 64, 2), (131072, 32, 4), (8192, 8, 16), (8192, 300, 1), (1024, 8, 2), (600, 8, 1)],
)
def test_few_blocks_of_queries_split_long_caches(keys: int, blocks: int, splits: int) -> None:
    """64 queries of 32 heads of one sequence would leave 100 of 132 SMs idle."""
    array = Array((1, 64, blocks, 128), "bfloat16"), Array((1, keys, blocks, 128), "bfloat16")
    given = {"q": array[0], "k": array[1], "v": array[1], "lengths": Array((1,), "int32")}
    found = plan(bind(attention_cached, given, {"causal": True}), {}, parse("sm_90a"))
    assert found.workspaces["partial_lse"].shape == ((64 * blocks, splits) if splits > 1 else (1, 1))
    windowed = plan(bind(attention_cached, given, {"causal": True, "left": 128}), {}, parse("sm_90a"))
    assert windowed.workspaces["partial_lse"].shape == (1, 1)


def _check(which: str, folder: Path, arch: str) -> None:
    call = CALLS[which]
    given = call.arrays(0)
    call.assert_right(given, Emulated(call, given, folder, arch).attend(), which)
