"""Kernels' arithmetic without a GPU: NumPy runs them, one number per thread (see :mod:`cute_ops.testing.interpreter`).

Here a sample; ``python -m cute_ops verify OP --interpret`` goes through all lengths.
"""

from __future__ import annotations

import importlib
import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cute_ops import testing
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.jit.layout import compact
from cute_ops.kernels.attention.config import AppendConfig
from cute_ops.kernels.conv.config import ConvConfig
from cute_ops.kernels.embedding.config import EmbeddingConfig
from cute_ops.kernels.norm.config import NormConfig
from cute_ops.kernels.rotary.config import RotaryBackwardConfig
from cute_ops.ops.rotary import config as rotary
from cute_ops.testing import kernel_calls, numpy_dtype
from cute_ops.testing.kernel_calls import ALL, LAYOUTS

# Marks tests of more numbers for lines that another test runs: measured by pytest-cov, they take twice as long.
more_numbers = pytest.mark.no_cover
NORMS = [op for op in ALL if "norm" in op.name and "n" in op.static]
CALLS = 10  # of each op


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_kernels_agree_with_the_reference(op: Op) -> None:
    """Every number of a row counted once, every output stored once, nothing read or written beside the tensors."""
    rng = np.random.default_rng(zlib.crc32(op.name.encode()))
    for i in range(CALLS):
        n, rows = int(rng.integers(1, (33, 301)[i % 2])), int(rng.choice([1, 2, 5, 37]))
        call = kernel_calls.made(op, rows, n, FLOATS[i % 3], LAYOUTS[i % 4], rng)
        try:
            kernel_calls.check(call)
        except Exception as error:
            raise AssertionError(f"{call.said}: {error}") from error


@pytest.mark.parametrize("n", [40, 41])
@pytest.mark.parametrize("name", ["rmsnorm", "add_rmsnorm", "silu_mul", "swiglu", "softmax"])
def test_rows_of_two_leading_dims_with_strides_of_their_own(name: str, n: int) -> None:
    (op,) = (op for op in ALL if op.name == name)
    call = kernel_calls.made(op, 6, n, "bfloat16", "compact", np.random.default_rng(n))

    def folded(seed: int) -> dict[str, Any]:
        return {k: a if a is None or a.ndim < 2 else a.reshape(2, 3, -1) for k, a in call.more(seed).items()}

    arrays = folded(0)
    # Rows lie the other way round: of the outer dim side by side, of the inner one far apart.
    where = {
        k: kernel_calls.Place((2 * VECTOR_BYTES * n, 5 * VECTOR_BYTES * n, 1))
        if a is not None and a.ndim == 3
        else call.where[k]
        for k, a in arrays.items()
        if k in call.where
    }
    kernel_calls.check(call._replace(arrays=arrays, where=where, more=folded))


# A thread of these holds up to four vectors of one element each.
@pytest.mark.drawn(0.3)
@more_numbers
@pytest.mark.parametrize("n", [1, 3, 5, 9, 11, 13, 17, 19, 21, 23, 33, 35, 47])
@pytest.mark.parametrize("op", NORMS, ids=lambda op: op.name)
def test_norms_of_a_few_elements_to_a_thread(op: Op, n: int) -> None:
    for dtype in ("float32", "bfloat16"):
        kernel_calls.check(kernel_calls.made(op, 5, n, dtype, "compact", np.random.default_rng(n)))


def test_a_row_whose_first_element_is_far_from_all_others() -> None:
    """Sums relative to that element lose bits: one of these thousand rows was off by 1.9 times the tolerance."""
    (op,) = (op for op in NORMS if op.name == "layernorm_bwd")
    arrays = testing.inputs(op, Case("many", op.example((1024,), 85)), "float32", seed=6)
    where = {name: kernel_calls.place(op.inputs[name], a, "compact") for name, a in arrays.items() if a is not None}
    call = kernel_calls.Call(op, arrays, where, op.attrs, "", lambda _: arrays)
    testing.check(op, arrays, op.attrs, kernel_calls.run(call))


@pytest.mark.drawn(0.4)
@more_numbers
@pytest.mark.parametrize("n", [65, 131, 136, 255])
@pytest.mark.parametrize("op", NORMS, ids=lambda op: op.name)
def test_weights_of_rows_that_start_anywhere(op: Op, n: int) -> None:
    for i, kind in enumerate(FLOATS):
        layout = LAYOUTS[n % 2]
        call = kernel_calls.made(op, 3, n, FLOATS[(n + i) % 3], layout, np.random.default_rng(n + i))
        given = {name: a for name, a in call.arrays.items() if a is not None}
        weights = {name: a.astype(numpy_dtype(kind)) for name, a in given.items() if a.ndim == 1}
        places = {name: kernel_calls.place(op.inputs[name], a, layout) for name, a in weights.items()}
        kernel_calls.check(call._replace(arrays={**call.arrays, **weights}, where={**call.where, **places}))


# One of each form of a norm's kernels, which heuristics choose for longer or more rows than fit a test.
ROW, WIDE = NormConfig("one_pass", threads=64, threads_per_row=32), NormConfig("one_pass", 64, threads_per_row=64)
FORWARD = [
    ROW, replace(ROW, unroll=2), replace(ROW, align_vectors=8, delay_weight_load=True),
    replace(WIDE, cluster=2, keep_dtype=True, resident=2),
    replace(WIDE, form="smem", cluster=4, delay_weight_load=True), replace(ROW, form="smem", align_vectors=8),
    replace(ROW, form="persistent", stages=2, clusters=64),
    replace(WIDE, form="persistent", cluster=2, stages=3, clusters=8, sort_period=8), NormConfig("two_pass", 64),
    replace(WIDE, form="smem", cluster=2, align_vectors=8, lines=True, delay_weight_load=True),
    replace(WIDE, align_vectors=8, lines=True),
    replace(WIDE, form="persistent", cluster=2, stages=2, clusters=8, align_vectors=8, lines=True),
]  # fmt: skip
WALK, WIDE_WALK = (replace(config, form="persistent", stages=2, clusters=64) for config in (ROW, WIDE))
BACKWARD = [
    WALK, replace(WIDE_WALK, cluster=2), replace(WIDE_WALK, cluster=4, stages=3),
    replace(WIDE_WALK, cluster=2, clusters=3, sort_period=8, stages=3),
    replace(WIDE_WALK, cluster=4, balanced=True, sort_period=8), replace(WALK, align_vectors=8),
    NormConfig("two_pass", 64, clusters=8),
    replace(WIDE_WALK, cluster=2, clusters=8, align_vectors=8, stages=3, lines=True),
    replace(WIDE_WALK, clusters=8, align_vectors=2, lines=True),
]  # fmt: skip
FORMS = [
    pytest.param(op, config, id=f"{op.name}-{i}")
    for op in NORMS if "fp8" not in op.name
    for i, config in enumerate(BACKWARD if "dout" in op.inputs else FORWARD)
]  # fmt: skip


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(("op", "config"), FORMS)
def test_every_form_of_a_norm(op: Op, config: NormConfig) -> None:
    for i, n in enumerate((24, 129, 264)):
        # Of a config for rows off a vector, rows on one are no problem; the reverse is none that a heuristic gives.
        if n % 8 == 0 or config.align_vectors > 1 or config.sort_period or config.form == "two_pass":
            dtype = FLOATS[(i + len(config.flat())) % 3]
            call = kernel_calls.made(op, 21, n, dtype, "compact", np.random.default_rng(n))
            kernel_calls.check(call._replace(tile=config.flat()))


@more_numbers
@pytest.mark.parametrize("name", ["rmsnorm_bwd", "layernorm_bwd"])
def test_rows_off_a_vector_beyond_one_for_each_cluster(name: str) -> None:
    """Without column sums, too, a cluster's rows start at the same place of a vector: 132 clusters had others."""
    (op,) = (op for op in NORMS if op.name == name)
    case = Case("many", op.example((140,), 6001), absent=("weight", "bias"))
    arrays = testing.inputs(op, case, "bfloat16")
    call = kernel_calls.Call(op, arrays, {}, op.attrs, "", lambda _: arrays)
    testing.check(op, arrays, op.attrs, kernel_calls.run(call))


def test_a_second_launch_reads_early_what_the_first_does_not_write() -> None:
    (op,) = (op for op in NORMS if op.name == "rmsnorm_bwd")
    call = kernel_calls.made(op, 9, 64, "bfloat16", "compact", np.random.default_rng(0))
    config = NormConfig("overlapped", 64, threads_per_row=32, stages=2, column_threads=16, rows_per_thread=1)
    kernel_calls.check(call._replace(tile=config.flat()), watched=True)


CONV = [op for op in ALL if "conv" in op.name]
# Spans of one step, of several, and of all rows; several spans, channels and CTAs to a thread, a warp or a CTA.
CONV_CONFIGS = [
    None, ConvConfig(64, channels=8, ahead=3, resident=1, sms=1, span=12), ConvConfig(32, 4, 3, 1, 4, 96),
    ConvConfig(128, 4, 6, 1, 7, 6), ConvConfig(64, 2, 1, 2, 1, 24),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.drawn(0.5)
@more_numbers
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("op", CONV, ids=lambda op: op.name)
def test_convolutions_of_any_length(op: Op, width: int) -> None:
    """Sequences shorter than the taps, and those that end about a span's end."""
    rng = np.random.default_rng(width)
    for i, s in enumerate((*range(1, 21), 23, 24, 25, 47, 48, 49, 61)):
        n, rows = int(rng.choice([1, 7, 8, 12, 64, 67, 130, 261, 264])), int(rng.choice([1, 2, 5]))
        call = kernel_calls.made(op, rows, n, FLOATS[i % 3], LAYOUTS[i % 4], rng, s=s, w=width)
        config = CONV_CONFIGS[(i + width) % 5]
        kernel_calls.check(call._replace(tile=config and config.flat()))


@pytest.mark.slow
@pytest.mark.parametrize("op", CONV, ids=lambda op: op.name)
def test_warps_of_a_convolution_wait_for_what_other_threads_copy(op: Op) -> None:
    """Channels a warp apart, on rows that start anywhere: threads take elements out of units that others copied."""
    rng = np.random.default_rng(11)
    for n, dtype, layout in ((67, "bfloat16", "compact"), (131, "float32", "spaced"), (130, "float16", "apart")):
        kernel_calls.check(kernel_calls.made(op, 2, n, dtype, layout, rng, s=29, w=4), watched=True)


def test_neither_spans_nor_calls_change_the_bits_of_a_convolution() -> None:
    op = CONV[0]
    arrays = testing.inputs(op, Case("", op.example((3,), 24, {"s": 50})), "bfloat16")
    call = kernel_calls.Call(op, arrays, {}, {"activation": "silu"}, "", lambda _: arrays)
    out, final = kernel_calls.run(call)
    for config in CONV_CONFIGS[1:]:
        np.testing.assert_array_equal(out, kernel_calls.run(call._replace(tile=config.flat()))[0])
    x, state = arrays["x"], arrays["initial_state"]
    for start, end in ((0, 2), (2, 21), (21, 22), (22, 50)):
        given = {**arrays, "x": np.ascontiguousarray(x[:, start:end]), "initial_state": state}
        part, state = kernel_calls.run(call._replace(arrays=given))
        np.testing.assert_array_equal(out[:, start:end], part)
    np.testing.assert_array_equal(final, state)


def losing(call: kernel_calls.Call, names: tuple[str, ...]) -> float:
    """The largest error of float32 sums, of what the tolerance rule allows where the reference loses nothing. NumPy's
    reference adds rows one after another, so its own loss would allow for a kernel that does.
    """
    found = 0.0
    exacts = testing.expected(call.op, call.arrays, call.attrs)
    for name, got, exact in zip(call.op.results, kernel_calls.run(call), exacts, strict=True):
        if name in names:
            assert got is not None
            largest = max(np.abs(a).max() for a in (exact, *call.arrays.values()) if a is not None)
            allowed = 2 * testing.EPS["float32"] * (np.abs(exact) + largest)
            found = max(found, float((np.abs(got - exact) / allowed).max()))
    return found


@pytest.mark.slow
@more_numbers
def test_sums_of_normed_heads_lose_little_over_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warp adds up all heads, four at a time; without totals it loses 1.7 times what is allowed."""
    monkeypatch.setattr(rotary, "PARTIALS", 1)
    monkeypatch.setattr(rotary, "HEADS_OF_PARTIALS", 1 << 30)
    (op,) = (op for op in ALL if op.name == "qk_norm_rope_bwd")
    arrays = testing.inputs(op, Case("", {"m": (3000,), "hq": 1, "hk": 1, "d": 64, "r": 32}), "float32")
    config = RotaryBackwardConfig(32, heads_per_thread=1, resident=1).flat()
    call = kernel_calls.Call(op, arrays, {}, op.attrs, "", lambda _: arrays, config)
    assert losing(call, ("dq_weight", "dk_weight")) < 1


def test_sums_of_a_common_class_lose_little() -> None:
    """3000 chunks of one class; added one after another, they lose twice what is allowed."""
    (op,) = (op for op in ALL if op.name == "sorted_embedding_bwd")
    arrays = testing.inputs(op, Case("", {"t": 6000, "n": 32, "c": 1}), "float32")
    config = EmbeddingConfig(32, threads_per_group=32, classes=1, chunk=2, resident=1).flat()
    assert losing(kernel_calls.Call(op, arrays, {}, op.attrs, "", lambda _: arrays, config), ("dweight",)) < 1


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "s", "activation"), [(1, 1400, "none"), (2, 700, "none"), (100, 13, "silu")])
def test_sums_of_a_convolution_lose_little_over_many_rows(rows: int, s: int, activation: str) -> None:
    """All rows are one thread's. Added one after another, they lose two to three times what is allowed."""
    op, config = CONV[1], ConvConfig(32, channels=1, ahead=3, resident=1, sms=1)
    case = Case("", op.example((rows,), 32, {"s": s, "w": 4}), absent=("initial_state", "dfinal_state"))
    arrays = testing.inputs(op, case, "float32")
    call = kernel_calls.Call(op, arrays, {}, {"activation": activation}, "", lambda _: arrays, config.flat())
    assert losing(call, ("dweight", "dbias")) < 1


def test_convolutions_of_more_spans_than_fit_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """If 32 bits do not count the spans of all sequences, these are taken batch by batch."""
    with kernel_calls.interpreted():
        kernels = importlib.import_module("cute_ops.kernels.conv.causal_conv1d")
    monkeypatch.setattr(kernels, "BATCH_SPANS", 5)
    for rows, s in ((1, 13), (7, 1), (7, 13)):
        call = kernel_calls.made(CONV[0], rows, 64, "bfloat16", "compact", np.random.default_rng(rows), s=s)
        kernel_calls.check(call._replace(tile=ConvConfig(64, 8, 3, 1, 4, 3).flat()))


@pytest.mark.parametrize(("vectors", "lanes", "depth", "ctas"), [
    (1344, 96, 1, 8), (1024, 128, 1, 6), (130, 96, 1, 8), (128, 128, 1, 6), (40, 40, 3, 6), (None, 32, 4, 6),
])  # fmt: skip
def test_ctas_of_a_convolution_begin_on_a_sector(vectors: int | None, lanes: int, depth: int, ctas: int) -> None:
    """They take whole warps of rows that have several, as few idle ones as can be, and as many threads of an SM."""
    config = ConvConfig(128, 4, 9, 6, 132)
    assert (config.lanes(vectors), config.depth(vectors), config.ctas(vectors)) == (lanes, depth, ctas)


APPEND, ROPE = (next(op for op in ALL if op.name == name) for name in ("append_kv", "rope"))
# Threads for less than a token, for one and for several; several segments to a token.
APPEND_CONFIGS = [None, AppendConfig(32, 4, 1), AppendConfig(64, 64, 2), AppendConfig(128, 8, 4)]


def spread(rng: np.random.Generator, shape: tuple[int, ...], size: int) -> kernel_calls.Place:
    """Any order of the dims but the last, compact, on vectors or off them, from an address on a vector or off it."""
    strides, step, gap = [1] * len(shape), shape[-1] if shape else 1, int(rng.choice([0, 0, 1, VECTOR_BYTES // size]))
    for dim in rng.permutation(len(shape) - 1):
        step += gap if gap < 2 else -step % gap
        strides[dim], step = step, step * shape[dim]
    return kernel_calls.Place(tuple(strides), int(rng.choice([0, size])))


def appending(rng: np.random.Generator) -> kernel_calls.Call:
    """Tokens for some slots of poisoned caches, and some for none of them, all laid out in any way."""
    dtype, index = numpy_dtype(str(rng.choice(FLOATS))), str(rng.choice(["int32", "int64"]))
    lead = [(), (1,), (5,), (37,), (2, 3), (3, 1, 4)][rng.integers(6)]
    pages, size, heads, tokens = *rng.integers(1, 9, 3), math.prod(lead)
    d, e = rng.choice([1, 5, 8, 12, 64, 80, 128, 192], 2)
    shapes = {
        "k_cache": (pages, size, heads, d), "v_cache": (pages, size, heads, e), "k": (*lead, heads, d),
        "v": (*lead, heads, e),
    }  # fmt: skip
    arrays = {name: rng.standard_normal(tuple(map(int, shape))).astype(dtype) for name, shape in shapes.items()}
    eights = rng.random() < 0.4
    for name in APPEND.mutates:
        arrays[name] = np.full_like(arrays[name], np.nan, dtype=ml_dtypes.float8_e4m3fn if eights else dtype)
    outside = [-1, -pages * size, pages * size, pages * size + 5, np.iinfo(index).min, np.iinfo(index).max]
    free = [*rng.permutation(int(pages * size)), *rng.choice(outside, tokens)]
    arrays["slots"] = rng.permutation(np.array(free[:tokens], index)).reshape(lead)
    where = {name: spread(rng, a.shape, a.itemsize) for name, a in arrays.items() if name != "slots"}
    where["slots"] = kernel_calls.Place(tuple(2 * s for s in compact(lead)))
    if turned := d > 1 and rng.random() < 0.5:
        table = (*lead[rng.integers(len(lead) + 1) :], rng.integers(1, d // 2 + 1))
        for name in ("cos", "sin"):
            arrays[name] = rng.standard_normal(table).astype(numpy_dtype(str(rng.choice(FLOATS))))
            arrays[name] = arrays[name].astype(arrays["cos"].dtype)
            where[name] = spread(rng, table, arrays[name].itemsize)
    for name in ("k_scale", "v_scale"):
        if rng.random() < (0.7 if eights else 0.2):
            arrays[name] = rng.uniform(0.001, 2, heads).astype(np.float32)
            where[name] = kernel_calls.Place((int(rng.integers(1, 3)),))
    attrs = {"interleaved": bool(rng.integers(2))} if turned else {}
    config = APPEND_CONFIGS[rng.integers(4)]
    said = ", ".join(f"{name} {a.dtype}{list(a.shape)} {where[name]}" for name, a in arrays.items())
    return kernel_calls.Call(APPEND, arrays, where, attrs, said, lambda _: arrays, config and config.flat())


@pytest.mark.parametrize("seed", range(40))
def test_keys_and_values_go_to_their_slots_and_nowhere_else(seed: int) -> None:
    """Bit by bit. The interpreter raises at a store beside the caches' own elements."""
    call = appending(np.random.default_rng(seed))
    expected, k = [call.arrays[name].copy() for name in APPEND.mutates], call.arrays["k"]
    eights = expected[0].dtype != k.dtype
    if "cos" in call.arrays:
        k = k.astype(np.float32) if eights or "k_scale" in call.arrays else k  # rounded once
        tables = {name: call.arrays[name] for name in ("cos", "sin")}
        (k,) = testing.run_reference(ROPE, {"x": k, **tables}, {"interleaved": False} | call.attrs)
    for cache, new, name in zip(expected, (k, call.arrays["v"]), ("k_scale", "v_scale"), strict=True):
        if name in call.arrays:
            new = new.astype(np.float32) * (1 / call.arrays[name])[:, None]
        new = (new.astype(np.float32).clip(-448, 448) if eights else new).astype(cache.dtype)
        pages, size = cache.shape[:2]
        for token in np.ndindex(call.arrays["slots"].shape):
            slot = int(call.arrays["slots"][token])
            if 0 <= slot < pages * size:
                cache[slot // size, slot % size] = new[token]
    for got, cache in zip(kernel_calls.run(call), expected, strict=True):
        assert got.tobytes() == cache.tobytes(), call.said


def dropping(self: Any) -> Any:
    """``Total.value`` as it once was: of three sums it forgot one."""
    while len(self.sums) > 1:
        half = len(self.sums) // 2
        self.sums = [self.sums[i] + self.sums[i + half] for i in range(half)]
    return self.sums[0]


BROKEN = [
    pytest.param("norm.statistics", "Total", "value", dropping, 11, "output out: error", id="a sum is dropped"),
    pytest.param(
        "lib.row_layout", "RowTile", "ends_outside", lambda *_: False, 200, "outside of all tensors", id="no mask"
    ),
    pytest.param("lib.row_layout", "RowTile", "vector", lambda self, t, rank, k: t, 200, "stored", id="a vector twice"),
    pytest.param(
        "lib.row_layout", "Vectors", "shift", lambda *_: 8, 256, "outside of all|output out", id="rows too early"
    ),
]


@pytest.mark.fault(
    "a kernel drops a sum, omits a mask, takes a vector twice or starts a row too early",
    "tests that run its threads in NumPy on a CPU report the wrong output, the bad address or the bytes stored twice",
    "nothing",
)  # fmt: skip
@pytest.mark.parametrize(("module", "name", "method", "wrong", "n", "told"), BROKEN)
def test_a_broken_kernel_is_found(
    module: str, name: str, method: str, wrong: Callable[..., Any], n: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (op,) = (op for op in NORMS if op.name == "rmsnorm")
    call = kernel_calls.made(op, 5, n, "float32", "compact", np.random.default_rng(0))
    kernel_calls.check(call)
    with kernel_calls.interpreted():
        monkeypatch.setattr(getattr(importlib.import_module(f"cute_ops.kernels.{module}"), name), method, wrong)
    with pytest.raises((AssertionError, IndexError), match=told):
        kernel_calls.check(call)
