"""The kernels of attention to caches in the emulator of PTX: values, masks, pages, and waits for copies."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cute_ops import Array, Op, testing
from cute_ops.declaration.binding import bind
from cute_ops.jit.layout import Memory
from cute_ops.jit.plan import signature
from cute_ops.jit.target import parse
from cute_ops.kernels.attention.config import DecodeConfig, MlaConfig
from cute_ops.ops.attention.by_call import Captured, kind_of, op_of_call
from cute_ops.ops.attention.config import Splitting
from cute_ops.ops.attention.decode_attention import decode_attention
from cute_ops.ops.attention.merge_states import merge_states
from cute_ops.ops.attention.mla_decode import mla_decode
from cute_ops.testing.kernel_calls import Call
from tests.emulator import device, products
from tests.emulator.calls import EmulatedCall
from tests.ops.attention_calls import NO_FUNCTIONS, Functions
from tests.ops.decode_calls import Decoding, arrays, expected, functions_of, latent, of_latent

CALLS = (
    Decoding((70, 0, 33), 1, 1, 4, 64, 64, 0, 70, attrs={"softcap": 5.0}, heads_first=True),
    Decoding((95, 2), 2, 2, 3, 32, 48, 3, 99, sinks=True, holes=True),
    Decoding((64, 41), 5, 1, 7, 64, 32, 16, 80, "float16", {"window": 20}, holes=True),
    Decoding((530,), 1, 1, 2, 64, 16, 1, 540, attrs={"batch_invariant": True}, holes=True),
    Decoding((270,), 1, 1, 2, 16, 144, 0, 600, sinks=True),
    Decoding((75, 40), 1, 2, 4, 96, 64, 16, 80, attrs={"window": 60}, holes=True, float8=True),
    # By TMA.
    Decoding((300, 33), 2, 1, 8, 128, 64, 0, 310, "float16", {"window": 90}, heads_first=True),
    Decoding((1000, 640), 2, 1, 4, 64, 64, 0, 1010, "float16", {"window": 700}),  # parts of a window
    Decoding((270, 0, 97), 1, 2, 4, 64, 128, 16, 288, sinks=True, holes=True),
    Decoding((390, 200), 3, 1, 4, 128, 128, 128, 512, holes=True, float8=True),
    Decoding((170,), 4, 1, 8, 128, 96, 0, 180),  # two tiles of rows
    Decoding((0, 131, 33), 5, 1, 4, 64, 128, 32, 160, "float16", holes=True, float8=True),  # of warps that share keys
    Decoding((150, 40), 1, 1, 4, 192, 256, 16, 160, holes=True),
    # By eight warps: long parts of keys on few SMs.
    Decoding((700, 20), 1, 1, 4, 96, 128, 0, 4100, sinks=True),
    Decoding((0, 530), 2, 1, 4, 64, 128, 16, 4096, holes=True, float8=True),
    # Whose clusters combine two parts, one of which may have no key.
    Decoding((700,), 1, 1, 4, 128, 128, 0, 8200, sinks=True),
    Decoding((700,), 3, 1, 5, 64, 128, 16, 8192, holes=True, float8=True),
    Decoding((100,), 1, 1, 3, 128, 64, 16, 8192, "float16", sinks=True, float8=True),
    Decoding((0,), 1, 1, 1, 128, 128, 0, 8200),
)
LONG = 4096  # keys of caches that few SMs have


def check_shared(folder: Path, counted: int) -> None:
    """Kernels take the shared memory that the config has counted, up to alignment."""
    taken = max(json.loads((folder / "shared.json").read_text()))
    assert counted - 64 <= taken <= counted + 64


def arch_of(call: Decoding) -> str:
    return device.FEW_SMS if call.keys >= LONG else "sm_90a"


def emulated(op: Op, call: Decoding, given: dict[str, np.ndarray | None], folder: Path) -> tuple[dict[str, Any], Any]:
    """The results of a call by name, and the config of its kernel."""
    inputs = {name: given.get(name) for name in op.inputs}
    where = {
        name: Memory(tuple(stride // a.itemsize for stride in a.strides)) for name, a in inputs.items() if a is not None
    }
    made, arch = Call(op, inputs, where, call.attrs, call.name, lambda _: inputs), arch_of(call)
    results = dict(zip(op.results, device.run(made, folder, arch=arch), strict=True))
    return {name: a for name, a in results.items() if a is not None}, device.planned(made, arch)[1].variant.config


def run(
    call: Decoding, given: dict[str, np.ndarray], folder: Path, functions: Functions = NO_FUNCTIONS
) -> dict[str, np.ndarray]:
    op, captured = decode_attention, functions.captured
    if functions.score:
        read = tuple(Captured(name, kind_of(str(a.dtype)), a.ndim) for name, a in captured.items())
        op = op_of_call(functions.score, None, read, form="decode_attention")
    results, config = emulated(op, call, {**given, **captured}, folder)
    check_shared(folder, DecodeConfig.of(config).shared(call.d, call.e))
    return results


@pytest.mark.drawn(0.3)
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_results(call: Decoding, tmp_path: Path) -> None:
    given = arrays(call, 0)
    right = expected(call, given)
    for name, found in run(call, given, tmp_path).items():
        right[name].assert_holds(found.astype(np.float64), name)


@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("number", [1, 5])
def test_changes_of_scores(number: int, tmp_path: Path) -> None:
    """Rows of a tile are queries of several heads, whose numbers a function reads by."""
    call = CALLS[number]
    given, functions = arrays(call, 0), functions_of(call, 0)
    right = expected(call, given, functions)
    for name, found in run(call, given, tmp_path, functions).items():
        right[name].assert_holds(found.astype(np.float64), name)


@pytest.mark.parametrize(
    ("keys", "blocks", "slots", "splits"),
    [
        (131072, 8, 264, 33), (131072, 1, 132, 128), (8192, 512, 264, 1), (8192, 64, 264, 4), (8192, 64, 132, 2),
        (1024, 2048, 264, 1), (65536, 2, 132, 66), (100, 1, 264, 1), (600, 264, 264, 1),
    ],
)  # fmt: skip
def test_splits_fill_whole_waves(keys: int, blocks: int, slots: int, splits: int) -> None:
    """One sequence of 131072 keys and 8 heads fills all slots of 132 SMs: with 29 splits an eighth of them idled."""
    assert Splitting(keys, blocks, slots, 0).number() == splits
    for every in (64, 512):
        assert Splitting(keys, blocks, slots, every).number() == -(-keys // every)


def test_short_keys_are_split_less() -> None:
    """Of few bytes: more of them are read while a CTA starts and while parts are combined."""
    assert Splitting(700, 600, 264, 0).number() == 2
    assert Splitting(700, 600, 264, 0, start=512, combine=512).number() == 1


def test_boxes_are_whole_swizzles_for_pages_of_any_size() -> None:
    """A tile of 224 keys of float8, which warps share, has 28 in common with pages of 28 or 84."""
    target = parse("sm_90a")
    for size in range(1, 260):
        cache, integers = Array((9, size, 1, 128), "float8_e4m3fn"), (Array((2, 4), "int32"), Array((2,), "int32"))
        given = {"q": Array((2, 4, 8, 128), "bfloat16"), "k_cache": cache, "v_cache": cache}
        given |= {"page_table": integers[0], "lengths": integers[1]}
        problem = signature(bind(decode_attention, given, {}), {}, target).problem
        config = DecodeConfig.of(decode_attention.config(problem))
        assert config.box % 8 == 0
        assert config.sharers == (2 if config.box else 1)


LATENT = (
    Decoding((70, 0), 1, 1, 5, 80, 64, 3, 72, attrs={"scale": 0.1, "rank": 64}, holes=True),
    Decoding((34,), 2, 1, 13, 80, 64, 64, 64, "float16", {"scale": 0.1, "rank": 64}),
    Decoding((40,), 3, 1, 13, 64, 64, 0, 520, attrs={"scale": 0.1, "rank": 64}),
    # By warpgroups.
    Decoding((70, 0), 1, 1, 5, 192, 128, 3, 72, attrs={"scale": 0.1, "rank": 128}, holes=True),
    Decoding((300, 33), 2, 1, 64, 192, 128, 64, 320, "float16", {"scale": 0.1, "rank": 128}, holes=True),
    Decoding((66,), 1, 1, 33, 576, 512, 0, 70, attrs={"scale": 0.1, "rank": 512}),
    Decoding((1200,), 1, 1, 4, 320, 256, 0, 1210, attrs={"scale": 0.1, "rank": 256, "batch_invariant": True}),
)


@pytest.mark.drawn(0.3)
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("call", LATENT, ids=lambda call: call.name)
def test_latent_attention(call: Decoding, tmp_path: Path) -> None:
    given = latent(call, 0)
    right = of_latent(call, given)
    results, config = emulated(mla_decode, call, given, tmp_path)
    check_shared(tmp_path, MlaConfig.of(config).shared(call.d))
    for name in ("out", "lse"):
        right[name].assert_holds(results[name].astype(np.float64), name)


@products.emulated
def test_merged_states(tmp_path: Path) -> None:
    """Rows of which one, the other or none has keys, beside such as both have."""
    rng, half = np.random.default_rng(0), ml_dtypes.bfloat16
    given = {f"out_{which}": rng.standard_normal((2, 3, 5, 24)).astype(half) for which in "ab"}
    given |= {f"lse_{which}": rng.standard_normal((2, 5, 3)).astype(np.float32) * 9 for which in "ab"}
    for i, which in enumerate(("a", "b", "ab")):
        for each in which:
            given[f"lse_{each}"][0, i] = -math.inf
            given[f"out_{each}"][0, :, i] = math.nan
    given["lse_b"] = np.ascontiguousarray(given["lse_b"].swapaxes(1, 2)).swapaxes(1, 2)
    ordered = {name: given[name] for name in merge_states.inputs}
    emulated = EmulatedCall(merge_states, ordered, {}, tmp_path)
    names, vectors = ("out_a", "out_b", "out", "lse_a", "lse_b", "lse"), 2 * 3 * 5 * 3
    emulated.run("MergeStates", names, [struct.pack("<q", vectors)], -(-vectors // 128))
    testing.check(merge_states, ordered, {}, (emulated.arrays["out"], emulated.arrays["lse"]))
