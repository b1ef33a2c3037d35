"""How the kernels around attention are configured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from heapq import heapreplace
from typing import Any, NamedTuple, TypeVar

from cute_ops.declaration.config import Config, Problem
from cute_ops.declaration.shapes import ITEMSIZE, Array
from cute_ops.expressions.reads import ranged
from cute_ops.expressions.text import text_of
from cute_ops.hardware import ARCHES, VECTOR_BYTES, sm
from cute_ops.kernels.attention.config import (
    LATENT_STAGES,
    LONG_TILE,
    LONGEST_OF_TWO,
    MMA_ROWS,
    RESIDENT,
    AppendConfig,
    AttentionBackwardConfig,
    AttentionConfig,
    DecodeConfig,
    Form,
    MergeConfig,
    MlaConfig,
    OnePass,
)
from cute_ops.kernels.tensor_core.sizes import MMA_M
from cute_ops.ops.attention import mods
from cute_ops.ops.rows import threads_for

T = TypeVar("T")
C = TypeVar("C", AttentionConfig, AttentionBackwardConfig)
THREADS, UNROLL = 128, 4
# Keys of a tile and warpgroups, by the most elements of a head.
KEYS = {64: (128, 3), 128: (128, 2), 192: (96, 2), 256: (80, 2)}
# In one pass, by the elements of a head: queries and slots of CTAs with keys of their own, keys and slots of others.
ONE_PASS = {64: (64, 3), 80: (64, 3), 96: (64, 3), 112: (64, 2), 128: (64, 2)}
TALL = (128, 2)  # of heads of 64
# Of long sequences, with heads of 128: queries and slots of tiles; the least queries, without a mask and with a causal
# one, as measured. Such tiles fill 1/64 more rows than those of 64 at most.
LONG, LEAST_LONG = (LONG_TILE, 2), (560, 3072)
# Heads of so many elements of which CTAs with keys of their own have 96; queries and slots.
WIDE_HEADS, KEYS_OF_WIDE, OF_WIDE = 192, 96, (64, 2)
ONE_PASS_OF_QUERIES = {192: (64, 2), 256: (64, 1)}
COLUMNS = 64  # of such a head, at least, and a divisor
# By the most elements of a head, keys and slots of the gradient of queries, then queries and slots of that of keys and
# values.
BACKWARD = {64: (128, 2, 96, 2), 128: (96, 2, 48, 2), 192: (64, 2, 32, 2), 256: (64, 1, 32, 2)}
# By ``mma.sync``, by the most elements of a head: warps, tiles of 16 queries of each, and keys of a tile; the first one
# that shared memory holds.
BY_WARPS = {
    64: ((4, 2, 64),), 128: ((4, 2, 48),), 192: ((8, 1, 64), (8, 1, 48)), 256: ((8, 1, 64), (4, 1, 48)),
}  # fmt: skip
# Of gradients: warps with 16 rows each, and rows and stages of the tiles that a CTA goes through.
BACKWARD_BY_WARPS = {
    64: ((8, 64, 2),), 128: ((8, 32, 2), (8, 32, 1)), 192: ((8, 32, 2), (4, 32, 1)), 256: ((4, 32, 2), (4, 16, 1)),
}  # fmt: skip
ONE_PASS_BY_WARPS = ((8, 64, 2), (8, 32, 1))
# Of attention to caches: warps of a CTA; a warp's tiles in shared memory, the most and the fewest.
WARPS, MOST_STAGES, FEWEST_STAGES = 4, 6, 3
# Warps of the only CTA of an SM, the least keys of its part, and what waves of them fill of all SMs.
WIDE, WIDE_KEYS, FILLED = 8, 4096, 0.96
PAIR = 2  # parts that a cluster of CTAs combines
# Heads whose queries a block may have, one for each of two warpgroups. Of more queries than this a block has one head,
# unless its mask reads arrays, such as documents: under a causal mask 64 queries then see nearly as many keys as 128.
HEADS_OF_BLOCK, LONGEST_OF_HEADS = 2, 4096
# Of those that share keys, without pages and with them. 64 x 8192, 64 heads over 8, four queries: 302 and 324 us with
# six of them, 308 and 305 with seven.
SHARING = (6, 7)
LEAST_SM_OF_FP8 = 89
# Tiles that TMA loads: at most so many; a row has boxes of at least so many bytes.
MOST_SLOTS, BOX_BYTES, HOPPER = 12, 64, 90
SHORT = 64  # the longest heads of 16 bits of which a warp's tile has 32 keys
# Keys that TMA loads at once are a multiple of so many, after which a swizzle repeats.
LEAST_BOX = 8
# Splits of keys: each of so many keys at least; a batch-invariant one. What starting a CTA and combining parts take, as
# keys that a CTA reads meanwhile.
LEAST_KEYS, MOST_SPLITS, INVARIANT_KEYS, START, COMBINE = 256, 128, 512, 128, 64
# Both in bytes of keys and values that an SM reads meanwhile; rows of which it combines the parts at a time.
START_BYTES, COMBINE_BYTES, COMBINED = 1 << 17, 1 << 16, 16
# Parts of the heads that share keys, each a CTA's. What starting a CTA of gradients takes, and writing and adding its
# part of dk and dv, as tiles of queries that it goes through meanwhile; of the time without parts, what is worth it.
# Most waves of parts; what L2 holds of queries and cotangents, as the kernel has it.
PARTS, START_OF_KEYS, WRITTEN_PART, WORTH_PARTS = (1, 2, 4), 3, 4, 0.97
MOST_WAVES, HELD_BYTES = 16, 32 << 20
# The least keys of a split of attention to caches: to start a CTA and to write a block's results takes as long as to
# read half as many.
CHUNK_LEAST_KEYS = 512


def append_kv(problem: Problem) -> AppendConfig:
    """A token has the fewest threads that copy its keys, and its values, at once."""
    _check_float8("append_kv", problem)
    vectors = max(_vectors(problem, "k", "d"), _vectors(problem, "v", "e"))
    return AppendConfig(THREADS, threads_for(vectors, UNROLL, THREADS), UNROLL)


def attention(own: mods.Own, problem: Problem) -> AttentionConfig:
    """A tile of as many keys as registers and shared memory hold."""
    if by_warpgroups(problem.arch):
        tile_n, consumers = _of_size(KEYS, problem)
        heads = _heads_of_block(own, problem, tile_n, consumers)
        return AttentionConfig(tile_n, problem.sm_count, consumers, heads=heads, **_changes(own, problem))
    return _attention_by_warps(own, problem)


def _heads_of_block(own: mods.Own, problem: Problem, tile_n: int, consumers: int) -> int:
    """Two where a CTA has 64 queries of each of two heads that share keys, instead of 128 of one, which see fewer tiles
    of keys together: those of documents, and of short sequences, where at least 15% fewer. With 6% fewer, 16 x 1024
    causal with heads of 256, they take 4% longer.
    """
    dims, mask = problem.dims, mods.mask_of_call(problem.attrs, own.mask)
    if consumers != HEADS_OF_BLOCK or dims["r"] % HEADS_OF_BLOCK:
        return 1
    if mask and (mods.computes_with_head(mask) or mods.reads_by_head(mask)):
        return 1
    if mask and any(ranged(mask)):
        return HEADS_OF_BLOCK
    if _is_packed(problem) or dims["s"] > LONGEST_OF_HEADS:
        return 1
    few, many = (_tiles_of_keys(problem, rows, tile_n) for rows in (MMA_M, HEADS_OF_BLOCK * MMA_M))
    return HEADS_OF_BLOCK if 20 * few <= 17 * HEADS_OF_BLOCK * many else 1


def _tiles_of_keys(problem: Problem, rows: int, tile_n: int) -> int:
    """Tiles that blocks of so many queries of one head go through, by a causal mask or a window."""
    attrs, found = problem.attrs, 0
    s, t, left, right = *(problem.dims[name] for name in "st"), attrs["left"], attrs["right"]
    for first in range(t - s, t, rows):
        last = min(first + rows, t) - 1
        high = t - 1 if right < 0 and not attrs["causal"] else last + (0 if attrs["causal"] else right)
        low = max(first - left, 0) if left >= 0 else 0
        found += max(min(high, t - 1) // tile_n - low // tile_n + 1, 0) if high >= 0 else 0
    return found


def attention_cached(own: mods.Own, problem: Problem) -> AttentionConfig:
    """Two warpgroups, which leave registers for the one that copies, and tiles of which its warps copy whole rows."""
    dims = problem.dims
    _check_float8("attention", problem, "k")
    if not by_warpgroups(problem.arch):
        return _attention_by_warps(own, problem, cached=True)
    size, narrow = _headdim(problem), dims["d"] % 32 or dims["e"] % 32 or ITEMSIZE[problem.dtypes["k"]] == 1
    tile_n = 128 if size <= 128 else 96 if size <= 192 and not narrow else 64
    box = math.gcd(dims["c"], tile_n // 4) if "page_table" in problem.dtypes else tile_n // 4
    fits = ITEMSIZE[problem.dtypes["k"]] == 2 and all(dims[name] * 2 % BOX_BYTES == 0 for name in "de")
    box = box if fits and box % LEAST_BOX == 0 else 0
    return AttentionConfig(tile_n, problem.sm_count, box=box, **_changes(own, problem))


def _attention_by_warps(own: mods.Own, problem: Problem, cached: bool = False) -> AttentionConfig:
    configs = (
        AttentionConfig(tile_n, 0, 0, warps, tiles_m, cached=cached, **_changes(own, problem))
        for warps, tiles_m, tile_n in _of_size(BY_WARPS, problem)
    )
    return _that_fits(configs, problem)


def _changes(own: mods.Own, problem: Problem) -> dict[str, Any]:
    """The expressions of a forward kernel."""
    mask, bounds = mask_of(own, problem)
    score = mods.score_of(problem.attrs["softcap"], own.score)
    return {"mask": mask, "bounds": bounds, "score": score.text if score else ""}


def attention_bwd(own: mods.Own, problem: Problem) -> AttentionBackwardConfig:
    """Tiles of as many keys and queries as registers and shared memory hold."""
    score = mods.score_of(problem.attrs["softcap"], own.score)
    changes = *mask_of(own, problem), *((score.text, text_of(mods.gradient_of(score))) if score else ("", ""))
    size, d, tiles = _headdim(problem), problem.dims["d"], _of_size(BACKWARD, problem)
    e, one_pass = problem.dims["e"], not problem.attrs["deterministic"]
    if not by_warpgroups(problem.arch):
        one_pass = one_pass and d == e and size <= max(ONE_PASS)
        choices: list[tuple[OnePass, int, int, int]]
        choices = [("keys", *each) for each in ONE_PASS_BY_WARPS if one_pass and _divides_columns(d, *each[:2])]
        choices += [("", *each) for each in _of_size(BACKWARD_BY_WARPS, problem)]
        configs = (
            AttentionBackwardConfig(tile, stages, tile, stages, name, warps, *changes)
            for name, warps, tile, stages in choices
        )
        return _that_fits(configs, problem)
    of_keys = _tile_of_queries(own, problem)
    if d == e and of_keys:
        return AttentionBackwardConfig(*tiles[:2], *of_keys, "keys", 0, *changes)
    if one_pass and size > max(ONE_PASS) and not (d % COLUMNS or e % COLUMNS):
        of_queries = _of_size(ONE_PASS_OF_QUERIES, problem)
        return AttentionBackwardConfig(*of_queries, *tiles[2:], "queries", 0, *changes)
    return AttentionBackwardConfig(*tiles, "", 0, *changes)


def _tile_of_queries(own: mods.Own, problem: Problem) -> tuple[int, int] | None:
    """Queries and slots of CTAs with keys of their own in one pass; None where there are none."""
    size = _headdim(problem)
    if size == WIDE_HEADS:
        return OF_WIDE
    if _is_long(own, problem):
        return LONG
    return TALL if _is_tall(own, problem) else ONE_PASS.get(size)


def _is_tall(own: mods.Own, problem: Problem) -> bool:
    """Whether tiles of gradients have :data:`TALL` queries: 4 to 10% faster, 20% where deterministic, as measured of
    scores and masks that are no functions; 4% slower with a soft cap and a window. Such tiles may leave 1/16 more rows
    empty.
    """
    attrs = problem.attrs
    if _headdim(problem) != MMA_M or _is_packed(problem) or any(own) or attrs["softcap"] > mods.LARGE_CAP:
        return False
    if attrs["softcap"] and _is_windowed(problem):
        return False
    rows, few = (_blocks(problem, "s", tile) * tile for tile in (TALL[0], ONE_PASS[MMA_M][0]))
    return bool(16 * rows <= 17 * few)


def _is_long(own: mods.Own, problem: Problem) -> bool:
    """Whether tiles of gradients have :data:`LONG` queries, each of which ends before the next one begins: 3 to 10%
    faster for long sequences of heads of 128 with full and causal masks, as measured. Deterministic gradients do not.
    """
    attrs, queries = problem.attrs, problem.dims["s"]
    if _headdim(problem) != 2 * MMA_M or _is_packed(problem) or any(own) or attrs["softcap"] or attrs["deterministic"]:
        return False
    if _is_windowed(problem) or queries < LEAST_LONG[bool(attrs["causal"])]:
        return False
    rows, few = (_blocks(problem, "s", tile) * tile for tile in (LONG_TILE, ONE_PASS[2 * MMA_M][0]))
    return bool(64 * rows <= 65 * few)


def _is_windowed(problem: Problem) -> bool:
    """Whether a band other than a causal mask hides keys."""
    attrs = problem.attrs
    return bool(attrs["left"] >= 0 or (attrs["right"] >= 0 and not attrs["causal"]))


def _divides_columns(d: int, warps: int, tile: int) -> bool:
    """Whether warps that have 16 rows of a tile each share the columns of a head evenly, 16 at a time."""
    return d % (MMA_ROWS * warps // (tile // MMA_ROWS)) == 0


def by_warpgroups(arch: str) -> bool:
    """Whether warpgroups multiply, which Hopper alone has; elsewhere warps do, by ``mma.sync``."""
    return arch.startswith("sm_90")


def _of_size(tiles: Mapping[int, T], problem: Problem) -> T:
    """The entry for the longer of both head dims."""
    size = _headdim(problem)
    return next(each for longest, each in tiles.items() if size <= longest)


def _that_fits(configs: Iterable[C], problem: Problem) -> C:
    """The first config whose shared memory an SM has."""
    d, e, most = problem.dims["d"], problem.dims["e"], ARCHES[problem.arch].shared_per_cta
    return next(config for config in configs if config.shared(d, e) <= most)


def workspace(own: mods.Own, problem: Problem, config: Config) -> dict[str, Array | None]:
    """The tables of what the mask reads, over the tiles of the forward."""
    chosen = AttentionConfig.of(config)
    return tables(own, problem, {"queries": chosen.block, "keys": chosen.tile_n})


def workspace_cached(own: mods.Own, problem: Problem, config: Config) -> dict[str, Array | None]:
    """Tables as :func:`workspace` has them, of packed queries in one row and of the keys of each sequence; the result
    and the log-sum-exp of each split of keys.
    """
    dims, chosen = problem.dims, AttentionConfig.of(config)
    keys, heads = dims["c"] * (dims["t"] if "page_table" in problem.dtypes else 1), dims["g"] * dims["r"]
    queries = (1 if _is_packed(problem) else dims["b"], _blocks(problem, "s", chosen.block))
    # Packed queries are counted as one row: the block more that each sequence may have is mostly empty.
    blocks = queries[0] * queries[1] * heads
    window = _window(problem)
    seen = keys if window is None else min(keys, window + chosen.block)
    # At most as many splits as run in one wave: past that a split fills no idle SM, but has results to write.
    splits = max(min(seen // CHUNK_LEAST_KEYS, problem.sm_count // max(blocks, 1), MOST_SPLITS), 1)
    return {
        **_tables_of(own, problem, {"queries": queries, "keys": (dims["b"], -(-keys // chosen.tile_n))}),
        **_parts(queries[0] * dims["s"] * heads, splits, dims["e"]),
    }


def workspace_bwd(own: mods.Own, problem: Problem, config: Config) -> dict[str, Array | None]:
    """Numbers for each row of each head: the sum of its output times its cotangent, and its log-sum-exp, of whole
    tiles, where CTAs have keys of their own in one pass; sums of the gradients that CTAs add up: of queries, or of keys
    and then of values; those of keys and values of each part of the heads that share them; tables of what the mask
    reads, over the tiles of each kernel.
    """
    dims, chosen = problem.dims, AttentionBackwardConfig.of(config)
    rows, length, sums, of_parts, turns = (problem.m, dims["g"] * dims["r"]), dims["s"], None, None, None
    if chosen.one_pass == "keys":
        tile = chosen.tile_q if _is_packed(problem) or chosen.block % chosen.tile_q else chosen.block
        length = _blocks(problem, "s", tile) * tile
        sums = Array((*rows, length, dims["d"]), "float32")
        if not chosen.warps:
            of_parts = _parts_of_keys(own, problem, chosen)
        if problem.attrs["deterministic"]:
            turns = Array((*rows, length // chosen.tile_q), "int32")
    elif chosen.one_pass == "queries":
        keys = _blocks(problem, "t", chosen.tile_k) * chosen.tile_k
        sums = Array((2 * problem.m, dims["g"], keys, _headdim(problem)), "float32")
    of_rows = Array((*rows, length), "float32")
    first = tables(own, problem, {"queries": chosen.block, "keys": chosen.tile_k})
    second = tables(own, problem, {"queries": chosen.tile_q, "keys": _block_of_keys(problem, chosen)})
    return {
        "delta": of_rows, "logs": of_rows if chosen.one_pass == "keys" else None, "sums": sums, "parts": of_parts,
        "turns": turns,
        **(dict.fromkeys(first) if chosen.one_pass == "keys" else first),
        **{f"{name}_2": None if chosen.one_pass == "queries" else table for name, table in second.items()},
    }  # fmt: skip


def _block_of_keys(problem: Problem, config: AttentionBackwardConfig) -> int:
    """Keys of a CTA with keys of its own."""
    return KEYS_OF_WIDE if config.one_pass == "keys" and _headdim(problem) == WIDE_HEADS else config.block


def _window(problem: Problem) -> int | None:
    """How many keys more than its own a query attends to at most; None where all on one side or on both."""
    attrs = problem.attrs
    if attrs["left"] < 0 or not (attrs["causal"] or attrs["right"] >= 0):
        return None
    return int(attrs["left"] + max(attrs["right"], 0))


def _parts_of_keys(own: mods.Own, problem: Problem, config: AttentionBackwardConfig) -> Array:
    """Gradients of keys and values of so many parts of the heads that share them that all SMs have work to the end."""
    block = _block_of_keys(problem, config)
    dims, blocks = problem.dims, _blocks(problem, "t", block)
    heads, window = int(problem.m * dims["g"]), _window(problem)
    sequences = max(dims["b"], 1) if _is_packed(problem) else 1  # of which only the mean length is known
    queries = dims["s"] // sequences
    seen = queries if window is None else min(queries, window + block)
    falls = blocks // sequences if mask_of(own, problem)[0] and window is None else 0
    of_head = dims["s"] * dims["r"] * ITEMSIZE["bfloat16"] * (dims["d"] + dims["e"])
    together, slots = max(HELD_BYTES // max(of_head, 1), 1), max(problem.sm_count, 1)

    def time(parts: int) -> float:
        longest = -(-dims["r"] // parts) * -(-seen // config.tile_q)
        of_cta = START_OF_KEYS + (WRITTEN_PART if parts > 1 else 0)
        return _end_of_blocks(
            parts, longest, of_cta, (blocks, falls), heads, together=together, slots=slots,
            rises=problem.attrs["deterministic"],
        )  # fmt: skip

    most, parts = min(dims["r"], MOST_WAVES * slots // max(blocks * heads, 1)), 1
    if most > 1:
        parts = min((n for n in PARTS if n <= most), key=time)
    if parts == 1 or time(parts) > WORTH_PARTS * time(1):
        return Array((1, 1, 1, 4), "float32")
    return Array((parts * 2 * problem.m, dims["g"], blocks * block, dims["d"]), "float32")


@lru_cache(1024)
def _end_of_blocks(
    parts: int, longest: int, of_cta: int, blocks: tuple[int, int], heads: int, *, together: int, slots: int,
    rises: bool,
) -> float:  # fmt: skip
    """When the last CTA of blocks of keys ends, as tiles of queries: the next one starts where one has ended.

    Args:
        parts: CTAs that share a block.
        longest: tiles of such a CTA, at most.
        of_cta: what a CTA takes besides, as tiles.
        blocks: of a head, and over how many of them tiles fall from all to none; 0 where all have as many.
        heads: of all batches.
        together: heads whose blocks are taken before those of others.
        slots: CTAs that run at a time.
        rises: whether tiles rise from none to all instead.
    """
    ends, (count, falls) = [0.0] * slots, blocks
    for first in range(0, heads, together):
        for block in range(count):
            share = 1 - block % falls / falls if falls else 1.0
            share = 1 + 1 / falls - share if rises and falls else share
            for _ in range(min(together, heads - first) * parts):
                heapreplace(ends, ends[0] + longest * share + of_cta)
    return max(ends)


def tables(own: mods.Own, problem: Problem, tiles: Mapping[str, int]) -> dict[str, Array | None]:
    """Tables of tiles of so many queries and keys."""
    blocks = {
        name: (problem.m, _blocks(problem, dim, tile)) for (name, tile), dim in zip(tiles.items(), "st", strict=True)
    }
    return _tables_of(own, problem, blocks)


def _tables_of(own: mods.Own, problem: Problem, blocks: Mapping[str, tuple[int, int]]) -> dict[str, Array | None]:
    """For each tile of queries and of keys, so many of so many batches, the least and the largest number of each read
    of the mask; behind them is room for a count of blocks.
    """
    attrs, dims = problem.attrs, problem.dims
    mask = mods.mask_of_call(attrs, own.mask)
    heads = dims["g"] * dims["r"] if mask and mods.reads_by_head(mask) else 1
    found: dict[str, Array | None] = {}
    for (name, (batches, tiles)), reads in zip(blocks.items(), ranged(mask) if mask else ([], []), strict=True):
        found[f"ranges_of_{name}"] = Array((2 * len(reads) + 1, batches, heads, tiles), "float32") if reads else None
    return found


def _is_packed(problem: Problem) -> bool:
    return "cu_seqlens_q" in problem.dtypes


def _blocks(problem: Problem, length: str, tile: int) -> int:
    """Blocks of a head; those of packed sequences are in one row: see :meth:`Tiles.blocks` of the kernels."""
    size = problem.dims[length]
    return int(size // tile + problem.dims["b"] + 1 if _is_packed(problem) else -(-size // tile))


def merge_states(_: Problem) -> MergeConfig:
    return MergeConfig(THREADS)


def decode_attention(own: mods.Own, problem: Problem) -> DecodeConfig:
    """The most stages with which :data:`RESIDENT` CTAs fit an SM, or one CTA, of fewer warps, where heads are long. TMA
    loads tiles where it can.
    """
    dims, attrs = problem.dims, problem.attrs
    d, e, rows = dims["d"], dims["e"], dims["r"] * dims["s"]
    itemsize = ITEMSIZE[problem.dtypes["k_cache"]]
    _check_float8("decode_attention", problem)
    tiles_m = 2 if rows > MMA_ROWS and max(d, e) <= LONGEST_OF_TWO else 1

    def form(keys: int) -> Form:
        if "page_table" not in problem.dtypes:
            return "contiguous"
        return "any_pages" if dims["c"] % keys else "whole_pages"

    split, score = INVARIANT_KEYS if attrs["batch_invariant"] else 0, mods.score_of(attrs["softcap"], own.score)
    text = score.text if score else ""
    # What is done once a tile counts less where a tile of few bytes has more keys.
    longest = MMA_ROWS * 2 // (itemsize if max(d, e) > SHORT else 1)
    choices = _by_tma(problem, tiles_m, longest)
    if not choices and itemsize == 1:
        choices.append((RESIDENT, WARPS, longest, 0, 1))
    choices += [(n, warps, MMA_ROWS, 0, 1) for n, warps in ((RESIDENT, WARPS), (1, WARPS), (1, WARPS // 2), (1, 1))]
    configs = (
        (resident, DecodeConfig(form(box or keys), tiles_m, warps, stages, keys, itemsize, box, sharers, split, text))
        for resident, warps, keys, box, sharers in choices
        for stages in range(MOST_SLOTS if box else MOST_STAGES, FEWEST_STAGES - 1, -1)
    )
    return _wide(problem, next(config for resident, config in configs if _resident(problem, config) >= resident))


def _wide(problem: Problem, config: DecodeConfig) -> DecodeConfig:
    """``config``, or one CTA of eight warps on each SM: half as many parts to combine, where these are long and one
    wave fills all SMs; in float8 in pages of 16 keys also several waves. 16 x 8192 in 16 bits take 123 us, else 126,
    64 x 8192 in float8 in pages of 16 keys 260, else 269, but without pages 253, else 247, and 4 x 8192 22.6, else
    21.5. Pages in 16 bits have not been timed. A pair of CTAs combines two parts: 8 x 8192 in float8 35.4, else 37.1.
    """
    box = _box(problem, 1, config.keys * WIDE) if config.box and config.tiles_m == 1 else 0
    if not box or problem.attrs["batch_invariant"] or not SHORT < _headdim(problem) <= LONGEST_OF_TWO:
        return config
    form: Form = "any_pages" if config.form != "contiguous" and problem.dims["c"] % box else config.form
    wide = (replace(config, form=form, warps=WIDE, stages=n, box=box) for n in range(MOST_SLOTS, FEWEST_STAGES - 1, -1))
    found = next(each for each in wide if _resident(problem, each))
    if not _fills_sms(problem, found):
        return config
    parts = _splitting(problem, found)
    return replace(found, cluster=PAIR) if parts.number() == PAIR and parts.blocks * PAIR <= parts.slots else found


def _fills_sms(problem: Problem, config: DecodeConfig) -> bool:
    """Whether parts of keys are long, and CTAs of one wave fill all SMs; in float8 in pages of 16 those of several."""
    parts, paged, eight = _splitting(problem, config), config.form != "contiguous", config.itemsize == 1
    number = parts.number()
    count = parts.blocks * number
    waves = -(-count // parts.slots)
    fill = parts.keys >= WIDE_KEYS * number and count >= FILLED * waves * parts.slots
    return fill and (eight or not paged) and (waves == 1 or (paged and config.box == MMA_ROWS))


def _by_tma(problem: Problem, tiles_m: int, keys: int) -> list[tuple[int, int, int, int, int]]:
    """CTAs of an SM, warps, keys of a warp's tile, keys that TMA loads at once, and sharers; none if it loads none."""
    longest = _headdim(problem)
    # Two tiles of queries have warps of their own, which share keys: each converts them, but waits for fewer products.
    eight, paged = ITEMSIZE[problem.dtypes["k_cache"]] == 1, "page_table" in problem.dtypes
    shared = eight and tiles_m == 2 and longest > SHORT and not problem.attrs["batch_invariant"]
    warps, sharers = (SHARING[paged], 2) if shared else (WARPS, 1)
    box = _box(problem, tiles_m // sharers, keys * warps)
    return [(RESIDENT if tiles_m * longest <= LONGEST_OF_TWO else 1, warps, keys, box, sharers)] if box else []


def _box(problem: Problem, own: int, tile: int) -> int:
    """Keys of a tile of so many that TMA loads at once, all or those of one page; 0 where it loads none.

    Two tiles of queries of a warp, its ``own``, take 1.05 of the time by TMA in float8: they wait for products, not for
    copies. In 16 bits they leave an SM with one CTA, which short parts of keys do not fill (64 x 8192 in parts of 512:
    809 us, else 656).
    """
    dims, itemsize = problem.dims, ITEMSIZE[problem.dtypes["k_cache"]]
    keys = math.gcd(dims["c"], tile) if "page_table" in problem.dtypes else tile
    fits = own == 1 or (itemsize == 2 and not problem.attrs["batch_invariant"])
    fits = fits and all(dims[name] * itemsize % BOX_BYTES == 0 for name in "de")
    fits = fits and keys >= MMA_ROWS and keys % LEAST_BOX == 0
    return keys if fits and sm(problem.arch) == HOPPER else 0


def _check_float8(op: str, problem: Problem, name: str = "k_cache") -> None:
    """Raise NotImplementedError for caches in float8 where the target has no such numbers."""
    if ITEMSIZE[problem.dtypes[name]] == 1 and sm(problem.arch) < LEAST_SM_OF_FP8:
        what = f"argument `{name}` is float8_e4m3fn, which needs SM 8.9 or newer, the target is {problem.arch}"
        raise NotImplementedError(f"cute.{op}: {what}.")


def _resident(problem: Problem, config: DecodeConfig) -> int:
    """CTAs that fit an SM together, by their shared memory."""
    limits = ARCHES[problem.arch]
    shared: int = config.shared(problem.dims["d"], problem.dims["e"])
    return 0 if shared > limits.shared_per_cta else limits.shared // (shared + limits.shared - limits.shared_per_cta)


def mla_decode(problem: Problem) -> MlaConfig:
    """A block of as many rows as registers and shared memory hold, and stages for the rest of it; on Hopper the block
    of warpgroups, where a latent has one tile of 64 columns more than its halves of values.
    """
    dims, attrs = problem.dims, problem.attrs
    rows, arch = dims["h"] * dims["s"], problem.arch
    invariant = INVARIANT_KEYS if attrs["batch_invariant"] else 0
    paged, rank = "page_table" in problem.dtypes, attrs["rank"]
    if arch.startswith("sm_90") and dims["d"] - rank == MMA_M and rank % (2 * MMA_M) == 0:
        boxed = not paged or dims["c"] % MMA_M == 0
        return MlaConfig(MMA_M // MMA_ROWS, MMA_M, 8, MMA_M, LATENT_STAGES, paged, invariant, wgmma=True, boxed=boxed)
    configs = (
        MlaConfig(tiles_m, keys, warps, min(keys, 32), stages, paged, invariant)
        for least_rows, tiles_m, keys, warps in ((32, 4, 32, 8), (16, 2, 32, 4), (0, 1, 64, 4), (0, 1, 32, 2))
        for stages in range(MOST_STAGES, 2 * keys // 32 - 1, -1)
        if rows > least_rows
    )
    return next(c for c in configs if c.shared(dims["d"]) <= ARCHES[arch].shared_per_cta)


def mla_workspace(problem: Problem, flat: Config) -> dict[str, Array | None]:
    """The workspace of :func:`decode_workspace`, where all heads share a cache's head."""
    dims, config = problem.dims, MlaConfig.of(flat)
    queries = dims["h"] * dims["s"]
    keys = dims["c"] * (dims["t"] if config.paged else 1)
    split = Splitting(keys, dims["b"] * -(-queries // config.rows), problem.sm_count, config.split_keys)
    return _parts(dims["b"] * queries, split.number(), problem.attrs["rank"])


def decode_workspace(problem: Problem, flat: Config) -> dict[str, Array | None]:
    """The result of each split of keys, and its log-sum-exp; of one split these are outputs."""
    dims = problem.dims
    config = DecodeConfig.of(flat)
    if config.cluster > 1:
        return {"partial": Array((1, 1, 1), "float32"), "partial_lse": Array((1, config.cluster), "float32")}
    parts = _splitting(problem, config)
    return _parts(dims["b"] * dims["g"] * dims["r"] * dims["s"], parts.number(), dims["e"])


def _splitting(problem: Problem, config: DecodeConfig) -> Splitting:
    """How attention to caches splits keys."""
    dims, window = problem.dims, problem.attrs["window"]
    keys = dims["c"] * (1 if config.form == "contiguous" else dims["t"])
    if window and not config.split_keys:
        keys = min(keys, window + dims["s"])
    queries = dims["r"] * dims["s"]
    blocks = dims["b"] * dims["g"] * -(-queries // config.rows)
    resident, rows = min(_resident(problem, config), RESIDENT), dims["b"] * dims["g"] * queries
    of_keys = (dims["d"] + dims["e"]) * config.itemsize * resident  # bytes of a key in each of an SM's CTAs
    waves = -(-rows // (COMBINED * problem.sm_count))
    return Splitting(
        keys, blocks, problem.sm_count * resident, config.split_keys, START_BYTES // of_keys,
        waves * COMBINE_BYTES // of_keys,
    )  # fmt: skip


def _parts(rows: int, splits: int, e: int) -> dict[str, Array | None]:
    """Workspaces for results of parts, which nothing uses if there is one."""
    rows, e = (rows, e) if splits > 1 else (1, 1)
    return {"partial": Array((rows, splits, e), "float32"), "partial_lse": Array((rows, splits), "float32")}


class Splitting(NamedTuple):
    """How the keys of sequences are split: what their pages hold is known, their lengths are not.

    Attributes:
        keys: of a sequence at most.
        blocks: CTAs of a split.
        slots: CTAs that run at a time.
        every: keys after which they are split; 0 where the number of splits is chosen.
        start, combine: what starting a CTA and combining parts take, as keys that a CTA reads meanwhile.
    """

    keys: int
    blocks: int
    slots: int
    every: int
    start: int = START
    combine: int = COMBINE

    def number(self) -> int:
        """The splits that take the least time."""
        if self.every:
            return max(-(-self.keys // self.every), 1)
        return min(range(1, max(min(self.keys // LEAST_KEYS, MOST_SPLITS), 1) + 1), key=self._time)

    def _time(self, splits: int) -> float:
        """Of the waves of CTAs, as keys that one of them reads."""
        waves = math.ceil(self.blocks * splits / self.slots)
        return waves * (self.keys / splits + self.start) + (self.combine if splits > 1 else 0)


def _headdim(problem: Problem) -> int:
    """The longer of both head dims."""
    return int(max(problem.dims["d"], problem.dims["e"]))


def mask_of(own: mods.Own, problem: Problem) -> tuple[str, str]:
    """The texts of the mask and of its bounds; empty without one."""
    attrs = problem.attrs
    mask = mods.mask_of_call(attrs, own.mask)
    return (mask.text, mods.bounds_of(mask)[0]) if mask else ("", "")


def _vectors(problem: Problem, name: str, dim: str) -> int:
    """Vectors of a token's heads, as wide as their alignment allows, here and in the cache."""
    size = problem.dims[dim]
    aligned = [
        min(VECTOR_BYTES, problem.aligns[each]) // ITEMSIZE[problem.dtypes[each]] for each in (name, f"{name}_cache")
    ]
    return int(problem.dims["h"] * (size // math.gcd(size, min(aligned))))
