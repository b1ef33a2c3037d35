"""Kernels in the emulator of PTX, watched as compute-sanitizer does it: racecheck, initcheck, memcheck.

That it finds what is wrong is shown by kernels of which an instruction is left out.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_ops import testing
from cute_ops.calls.lookup import ours
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.jit.layout import Memory, compact
from cute_ops.kernels.gemm.config import GemmConfig
from cute_ops.testing import kernel_calls
from cute_ops.testing.kernel_calls import Call
from tests.emulator import device, products
from tests.emulator.hazards import Hazard

# Ops on rows; other ones need inputs that fit each other.
DRAWN = [
    op
    for op in kernel_calls.ALL
    if op.kernel and not op.program and not op.numbers and not op.kernel.startswith("cute_ops.kernels.attention")
]


def of_case(name: str, **dims: Any) -> Call:
    """A call with inputs that need not fit each other: that changes numbers and nothing else."""
    op = ours()[name]
    absent = tuple(each for each, tensor in op.inputs.items() if tensor.optional)
    arrays = testing.inputs(op, Case("", dims, {}, absent), "bfloat16")
    where = {each: Memory(compact(a.shape)) for each, a in arrays.items() if a is not None}
    return Call(op, arrays, where, op.attrs, name, lambda _: arrays)


def of_rows(name: str, rows: int, n: int, **sizes: int) -> Call:
    return kernel_calls.made(ours()[name], rows, n, "bfloat16", "compact", np.random.default_rng(0), **sizes)


def in_clusters(m: int, n: int, k: int, **shared: int) -> Call:
    config = GemmConfig("cooperative", tile_m=128, tile_n=128, stages=3, clusters=1, **shared)
    return of_case("linear", m=(m,), n=n, k=k)._replace(tile=config.flat())


def of_numbers(call: Call, dtype: str, **given: Sequence[int]) -> Call:
    """A call with these integers."""
    return call._replace(arrays={**call.arrays, **{name: np.array(each, dtype) for name, each in given.items()}})


def of_packed_sequences(*lengths: int) -> Call:
    sizes = {"s": sum(lengths), "t": sum(lengths), "b": len(lengths), "g": 1, "r": 2, "d": 64, "e": 64}
    offsets = np.cumsum([0, *lengths])
    call = of_case("attention_packed_bwd", **sizes)
    return of_numbers(call, "int32", cu_seqlens_q=offsets, cu_seqlens_k=offsets)


# Kernels whose calls are not drawn.
OTHERS = {
    "append_kv": lambda: of_numbers(
        of_case("append_kv", m=(5,), p=3, s=4, h=2, d=72, e=72), "int64", slots=[7, -1, 0, 11, 12]
    ),
    "attention_packed_bwd": lambda: of_packed_sequences(0, 37, 5),
    "linear, rows shared": lambda: in_clusters(200, 200, 136, cluster_m=2),
    "linear, columns shared": lambda: in_clusters(200, 301, 136, cluster_n=2),
    "linear, terms shared": lambda: in_clusters(130, 126, 320, cluster_k=2, store_stages=2),
    "mla_decode": lambda: of_numbers(of_case("mla_decode", b=2, s=1, h=16, d=576, p=2, c=70), "int32", lengths=[70, 9]),
}


@pytest.mark.drawn(0.02, among="watched kernels")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
def test_other_calls(call: Callable[[], Call], tmp_path: Path) -> None:
    """Twice, as below: nothing is found, and the bits are the same."""
    first, second = (device.run(call(), tmp_path, seed) for seed in (0, 1))
    assert [a is None or a.tobytes() for a in first] == [a is None or a.tobytes() for a in second]


@pytest.mark.drawn(0.02, among="watched kernels")
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("op", DRAWN, ids=lambda op: op.name)
def test_calls_of_drawn_lengths(op: Op, tmp_path: Path) -> None:
    """Twice, with warps in another order: with the same bits."""
    rng = np.random.default_rng(zlib.crc32(op.name.encode()))
    n, rows = int(rng.choice([rng.integers(1, 65), rng.integers(65, 400)])), int(rng.choice([1, 2, 3]))
    dtype, layout = str(rng.choice(["float32", "float16", "bfloat16"])), str(rng.choice(kernel_calls.LAYOUTS))
    call = kernel_calls.made(op, rows, n, dtype, layout, rng)
    first, second = (device.run(call, tmp_path, seed) for seed in (0, 1))
    testing.check(op, call.arrays, call.attrs, first, lambda: map(call.more, range(testing.draws(call.arrays))))
    assert [a is None or a.tobytes() for a in first] == [a is None or a.tobytes() for a in second]


@pytest.mark.drawn(0.2)
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_of_nan_and_of_equal_logits(dtype: str, tmp_path: Path) -> None:
    """NaN is above infinity; of equal logits the first one counts. Those of few vectors are sorted."""
    rng = np.random.default_rng(3)
    case = Case("", {"m": (3,), "n": 64, "t": 4}, attrs={"k": 4, "normalize": True})
    x = np.round(testing.inputs(ours()["routed_rows"], case, dtype)["logits"])
    x[0, rng.integers(0, 64, 3)], x[0, rng.integers(0, 64, 2)], x[1] = -np.nan, np.inf, -np.inf
    call = Call(ours()["routed_rows"], {"logits": x}, {"logits": Memory(compact(x.shape))}, case.attrs, "", dict)
    assert dict(device.planned(call)[1].variant.config)["form"] == "vectors"
    numbers = np.where(np.isnan(x), np.inf, np.minimum(x.astype(np.float64), 1e300))
    np.testing.assert_array_equal(device.run(call, tmp_path)[1], np.argsort(-numbers, -1, kind="stable")[:, :4])


@pytest.mark.drawn(0.2)
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize(
    ("name", "left_out", "hazard"),
    [
        ("softmax", "bar.sync", "a load of shared memory .* follows a store"),
        ("softmax", "griddepcontrol.wait", "x is accessed before the previous kernel"),
        # Copies of the next span's rows wait there until all lanes have read the last ones.
        ("causal_conv1d_bwd", "bar.warp.sync", "a store to shared memory .* follows a load"),
        ("linear", "mbarrier.try_wait", "follows a store by TMA"),
        ("attention_bwd", "fence.proxy.async", "follows an unfenced store by thread"),
    ],
)
def test_what_is_left_out_is_found(name: str, left_out: str, hazard: str, tmp_path: Path) -> None:
    calls = {
        "softmax": lambda: of_rows("softmax", 2, 3000), "linear": lambda: of_case("linear", m=(70,), n=64, k=200),
        "causal_conv1d_bwd": lambda: of_rows("causal_conv1d_bwd", 18, 77, s=23, w=4),
        "attention_bwd": lambda: of_case("attention_bwd", m=(1,), s=70, t=70, g=1, r=1, d=64, e=64),
    }  # fmt: skip
    call = calls[name]()
    host = device.compiled(device.planned(call)[1].variant, tmp_path)
    for kernel, text in host.ptx.items():
        host.ptx[kernel] = without(text, left_out)
    with pytest.raises(Hazard, match=hazard):
        device.run(call, tmp_path)


def without(ptx: str, instruction: str) -> str:
    """A kernel without the first such instruction, or all loops that wait for mbarriers."""
    if "try_wait" in instruction:
        return re.sub(r"\{\s*\.reg \.pred\s+P1;\s*LAB_WAIT:.*?DONE:\s*\}", "", ptx, flags=re.DOTALL)
    return re.sub(rf"(?:@!?%p\d+\s+)?{re.escape(instruction)}\b[^;]*;", "", ptx, count=1)
