"""The kernels of attention to caches in the emulator of PTX: values, masks, pages, and waits for copies."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest

from cute_ops import Array, testing
from cute_ops.declaration.binding import bind
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.layout import Memory
from cute_ops.jit.plan import plan
from cute_ops.jit.target import parse
from cute_ops.jit.variant import TensorKey
from cute_ops.kernels.attention.combine import Combine
from cute_ops.kernels.attention.config import DecodeConfig
from cute_ops.ops.attention.decode_attention import decode_attention
from tests.emulator import products, ptx_sm90
from tests.ops.decode_calls import Decoding, arrays, expected

CALLS = (
    Decoding((70, 0, 33), 1, 1, 4, 64, 64, 0, 70, attrs={"softcap": 5.0}, heads_first=True),
    Decoding((95, 2), 2, 2, 3, 32, 48, 3, 99, sinks=True, holes=True),
    Decoding((64, 41), 5, 1, 7, 64, 32, 16, 80, "float16", {"window": 20}, holes=True),
    Decoding((1100,), 1, 1, 2, 64, 16, 1, 1110, attrs={"batch_invariant": True}, holes=True),
    Decoding((520,), 1, 1, 2, 16, 144, 0, 600, sinks=True),
)


def parameter(array: np.ndarray, key: TensorKey, address: int) -> bytes:
    """A tensor as kernels get it: pointer, and of shape and strides what is not known when they are compiled."""
    shape = [size for size, known in zip(array.shape, key.shape, strict=True) if known is None]
    strides = []
    for i, stride in enumerate(array.strides[:-1]):
        if key.layout == "strided" or None in key.shape[i + 1 :]:
            strides.append(stride // array.itemsize)
    return struct.pack(f"<{1 + len(shape) + len(strides)}q", address, *shape, *strides)


def run(call: Decoding, given: dict[str, np.ndarray], folder: Path, arch: str = "sm_90a") -> dict[str, np.ndarray]:
    """The outputs, which are NaN before, as workspaces are."""
    binding = bind(
        decode_attention, {name: Array(a.shape, testing.dtype_name(a)) for name, a in given.items()}, call.attrs
    )
    places = {name: Memory(tuple(stride // a.itemsize for stride in a.strides)) for name, a in given.items()}
    found = plan(binding, places, parse(arch))
    made = {name: a for name, a in binding.outputs.items() if a} | dict(found.workspaces)
    all_arrays = given | {name: np.full(a.shape, np.nan, testing.numpy_dtype(a.dtype)) for name, a in made.items()}
    worker.compile(found.variant, folder / "kernel.cubin", folder)
    (ptx,) = folder.glob("*.ptx")
    head, *entries = re.split(r"(?=\.visible \.entry)", ptx.read_text())
    memory = [(a if a.base is None else a.base).reshape(-1).view(np.uint8) for a in all_arrays.values()]
    keys = found.variant.tensors
    packed = {name: parameter(a, keys[name], i << 32) for i, (name, a) in enumerate(all_arrays.items(), start=1)}
    rows, splits = all_arrays["partial_lse"].shape
    blocks = -(-call.s * call.r // DecodeConfig.of(found.variant.settings).rows)
    launches = [("DecodeAttention", [*packed], (call.g, splits), len(call.lengths) * call.g * splits * blocks)]
    if splits > 1:
        names = ["partial", "partial_lse", *["sinks"] * call.sinks, "out", "lse"]
        launches.append(("Combine", names, (rows, splits), -(-rows // Combine.warps)))
    for name, tensors, numbers, ctas in launches:
        arguments = [*(packed[tensor] for tensor in tensors), *(struct.pack("<i", x) for x in numbers)]
        (text,) = (entry for entry in entries if name in entry.partition("(")[0])
        kernel = ptx_sm90.Kernel(head + text)
        for index in range(ctas):
            ptx_sm90.Cluster(kernel, index, ctas, (1, 1), arguments, {}, memory, in_a_row=True).run(seed=index)
    return {name: all_arrays[name] for name in ("out", "lse")}


@products.emulated
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_results(call: Decoding, tmp_path: Path) -> None:
    given = arrays(call, 0)
    right = expected(call, given)
    for name, found in run(call, given, tmp_path).items():
        right[name].assert_holds(found.astype(np.float64), name)
