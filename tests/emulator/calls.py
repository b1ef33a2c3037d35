"""A call of an op whose kernels take tensors as they are: compiled, and run on the CPU, warp by warp."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cute_ops import Array, Op, testing
from cute_ops.declaration.binding import bind
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.layout import Memory
from cute_ops.jit.plan import plan
from cute_ops.jit.target import parse
from cute_ops.jit.variant import TensorKey
from tests.emulator import ptx_sm90


class EmulatedCall:
    """Inputs, outputs and workspaces of a call by name, the last two NaN, and the kernels that were compiled for it.

    Args:
        op: without leading dims that are merged.
        given: its inputs.
        attrs: its attributes.
        folder: where the compiler writes.
        arch: what is compiled for.
    """

    def __init__(
        self, op: Op, given: Mapping[str, np.ndarray], attrs: Mapping[str, Any], folder: Path, arch: str = "sm_90a"
    ) -> None:
        binding = bind(op, {name: Array(a.shape, testing.dtype_name(a)) for name, a in given.items()}, attrs)
        places = {name: Memory(tuple(stride // a.itemsize for stride in a.strides)) for name, a in given.items()}
        found = plan(binding, places, parse(arch))
        self.variant = found.variant
        made = {name: a for name, a in binding.outputs.items() if a} | dict(found.workspaces)
        empty = {name: np.full(a.shape, np.nan, testing.numpy_dtype(a.dtype)) for name, a in made.items()}
        self.arrays: dict[str, np.ndarray] = {**given, **empty}
        worker.compile(self.variant, folder / "kernel.cubin", folder)
        (ptx,) = folder.glob("*.ptx")
        self.head, *self.entries = re.split(r"(?=\.visible \.entry)", ptx.read_text())

    def run(self, kernel: str, tensors: Sequence[str], numbers: Sequence[bytes], ctas: int) -> None:
        """Run all CTAs of the kernel of a class. Its arguments are some tensors, then numbers."""
        (text,) = (entry for entry in self.entries if kernel in entry.partition("(")[0])
        parsed, blocks, packed = ptx_sm90.Kernel(self.head + text), [], {}
        for i, (name, a) in enumerate(self.arrays.items(), start=1):
            blocks.append((a if a.base is None else a.base).reshape(-1).view(np.uint8))
            packed[name] = parameter(a, self.variant.tensors[name], i << 32)
        arguments = [*(packed[name] for name in tensors), *numbers]
        for index in range(ctas):
            ptx_sm90.Cluster(parsed, index, ctas, (1, 1), arguments, {}, blocks, in_a_row=True).run(seed=index)


def parameter(array: np.ndarray, key: TensorKey | None, address: int) -> bytes:
    """A tensor as kernels get it: pointer, and of shape and strides what is not known when they are compiled."""
    assert key is not None
    shape = [size for size, known in zip(array.shape, key.shape, strict=True) if known is None]
    strides = [
        stride // array.itemsize
        for i, stride in enumerate(array.strides if key.layout == "scattered" else array.strides[:-1])
        if key.layout != "flat" or None in key.shape[i + 1 :]
    ]
    return struct.pack(f"<{1 + len(shape) + len(strides)}q", address, *shape, *strides)
