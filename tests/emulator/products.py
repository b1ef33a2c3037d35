"""Runs a product's kernel on the CPU, from its PTX."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from cute_ops import Array, Op, testing
from cute_ops.declaration.binding import bind
from cute_ops.expressions.groups import reads
from cute_ops.expressions.stages import split
from cute_ops.expressions.text import parse as parse_expression
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.layout import Memory
from cute_ops.jit.plan import plan
from cute_ops.jit.target import parse
from cute_ops.kernels.gemm.add_parts import AddParts
from cute_ops.kernels.gemm.config import GemmConfig
from cute_ops.kernels.gemm.rows import FinishRows
from cute_ops.ops.gemm.fused import COLUMNS
from tests.emulator import ptx_cta, ptx_sm90

CLUSTERS = 2  # persistent ones
CHOSEN = ("expression", "reads", "writes", "half_align", "warps_n")  # of a config: what no other tile changes
# Of both operands, whether rows in memory are columns of the matrices that are multiplied.
ACROSS = {"Linear": (False, False), "LinearDx": (False, True), "LinearDweight": (True, True)}
ACROSS |= {f"Batched{name}": across for name, across in ACROSS.items()}

# The emulator takes longer where pytest-cov measures the package, of which it is no part.
emulated = pytest.mark.no_cover


class Part(NamedTuple):
    """A matrix or vector in memory, or a half of one.

    Attributes:
        address: where its block and its first element are.
        array: its elements.
        whole: the array that it is a half of, or itself.
    """

    address: int
    array: np.ndarray
    whole: np.ndarray

    def tensor(self) -> bytes:
        """The whole tensor as kernels get it from a call: pointer, shape and strides in 64 bits."""
        a = self.whole[..., 0] if self.whole.ndim >= 2 and self.whole.shape[-1] == 1 else self.whole
        scattered = a.ndim == 1 and a.strides[0] != a.itemsize
        strides = [stride // a.itemsize for stride in (a.strides if scattered else a.strides[:-1])]
        return struct.pack(f"<{1 + a.ndim + len(strides)}q", self.address, *a.shape, *strides)

    def matrix(self, across: bool = False) -> bytes:
        """A view that the launching code makes: pointer, shape in 32 bits, stride."""
        start = self.address + offset(self.array, self.whole)
        strides = [stride // self.array.itemsize for stride in self.array.strides[-2::-1]]
        shape = struct.pack(f"<q{self.array.ndim}i", start, *self.shape(across))
        return shape + bytes(-len(shape) % 8) + struct.pack(f"<{len(strides)}q", *strides)

    def shape(self, across: bool = False) -> tuple[int, ...]:
        """Rows, columns and, of a batch, matrices."""
        *batch, rows, columns = self.array.shape
        batch = batch[::-1]  # the first one is the innermost
        return (columns, rows, *batch) if across else (rows, columns, *batch)

    @property
    def by_tma(self) -> bool:
        a = self.array
        rows = a.ndim >= 2 and all(stride % 16 == 0 for stride in a.strides[:-1])
        return rows and (offset(a, self.whole) + self.address) % 16 == 0


def offset(part: np.ndarray, whole: np.ndarray) -> int:
    """Bytes between the first elements of two arrays."""
    return int(part.__array_interface__["data"][0] - whole.__array_interface__["data"][0])


def run(
    op: Op, given: Mapping[str, np.ndarray], folder: Path, arch: str, config: GemmConfig | None = None
) -> dict[str, np.ndarray]:
    """The outputs, which are NaN before, and the new values of inputs that are written.

    Args:
        op: the product.
        given: its inputs: matrices and vectors, or parts of larger ones.
        folder: where the compiler writes.
        arch: what is compiled for.
        config: tiles, instead of those that the op chooses.
    """
    binding = bind(op, {name: Array(a.shape, testing.dtype_name(a)) for name, a in given.items()})
    made = {name: out for name, out in binding.outputs.items() if out}
    given = {**given, **{name: given[name].copy() for name in op.mutates}}
    arrays = {name: np.full(out.shape, np.nan, testing.numpy_dtype(out.dtype)) for name, out in made.items()}
    arrays = {**given, **arrays}
    strides = {name: tuple(stride // a.itemsize for stride in a.strides) for name, a in given.items()}
    places = {name: Memory(strides[name], offset(a, _base(a))) for name, a in given.items()}
    tile = dict(plan(binding, places, parse(arch)).variant.config)
    if config:
        tile = {**config.flat(), **{name: tile[name] for name in CHOSEN if name in tile}}
    variant, scratch, views, _ = plan(binding, places, parse(arch), config=tile)
    arrays |= {name: np.full(array.shape, np.nan, np.float32) for name, array in scratch.items()}
    memory = [_base(a) for a in arrays.values()]
    address = {name: (i << 32) + offset(a, memory[i - 1]) for i, (name, a) in enumerate(arrays.items(), start=1)}
    worker.compile(variant, folder / "kernel.cubin", folder)
    (ptx,) = folder.glob("*.ptx")
    shapes = {name: tensor.shape for name, tensor in {**op.inputs, **op.outputs}.items()}

    def parts(name: str) -> list[Part]:
        words, a, key = shapes.get(name, "").split(), arrays[name], variant.tensors[name]
        if name in views and not key.order:  # merged leading dims
            view = views[name]
            a = as_strided(a, view.shape, [stride * a.itemsize for stride in view.strides])
        if key and key.order:
            a = a.T  # as it lies in memory
        halves = np.split(a, 2, axis=words.index("2n") - len(words)) if "2n" in words else [a]
        if key and key.layout == "flat" and a.ndim > 3:  # one dim of matrices
            halves = [half.reshape(-1, *half.shape[-2:]) for half in halves]
        return [Part(address[name], half, a) for half in halves]

    chosen = GemmConfig.of(tile)
    first, second = map(parts, [*op.inputs][:2])
    elements, words, rows = split(parse_expression(chosen.expression))
    named = [name.partition("%")[0] for name in ("", *chosen.reads.split())]
    operands = [parts(named[read.operand])[read.half == "[n:]"] for read in reads(elements) if read.operand]
    outputs = [part for name in op.results if shapes[name] not in COLUMNS for part in parts(name)]
    scratched = [part for name in scratch for part in parts(name)]
    on_sm = _run_sm80 if chosen.form == "mma_sync" else _run_sm90
    blocks = [block.reshape(-1).view(np.uint8) for block in memory]
    lies = [bool(variant.tensors[name].order) for name in [*op.inputs][:2]]
    ways = ACROSS.get(op.kernel.partition(":")[2], ACROSS["Linear"])
    across = tuple(way != turned for way, turned in zip(ways, lies, strict=True))
    if chosen.transposed:
        first, second, across = second, first, across[::-1]
    call = Call(first, second, operands, outputs, scratched)
    if chosen.parts > 1:  # these are the outputs, of a product without an epilogue
        whole = [Part(address[name], a, a) for name, a in given.items() if a is second[0].whole]
        call = Call(first, whole, [], scratched, [])
    on_sm(chosen, across, call, ptx.read_text(), blocks)
    if chosen.parts > 1:
        m, n = outputs[0].array.shape
        arguments = [part.tensor() for part in (*scratched, *operands, *outputs)]
        threads = -(-m // 2) * -(-n // 2)
        adding = ptx_cta.Kernel(ptx.read_text(), entry=1)
        adding.run(-(-threads // AddParts.threads), [*arguments, struct.pack("<i", m), struct.pack("<i", n)], blocks)
    if rows:
        late = [named[read.operand - len(words)] for read in reads(rows) if read.operand >= len(words)]
        given_rows = [*late, *(name for name in op.outputs if shapes[name] in COLUMNS)]
        m, n = outputs[0].array.shape
        arguments = [part.tensor() for part in (*scratched, *(part for name in given_rows for part in parts(name)))]
        finish, per_cta = ptx_cta.Kernel(ptx.read_text(), entry=1), FinishRows.threads // FinishRows.lanes
        finish.run(-(-m // per_cta), [*arguments, struct.pack("<i", n)], blocks)
    return {name: arrays[name] for name in op.results}


def _base(a: np.ndarray) -> np.ndarray:
    """The array that it is a part of, or itself."""
    return a if a.base is None else a.base


class Call(NamedTuple):
    """What is multiplied, what the epilogue reads, what it writes, and where parts of rows' reductions go."""

    first: list[Part]
    second: list[Part]
    operands: list[Part]
    outputs: list[Part]
    scratch: list[Part]

    def tiles(self, config: GemmConfig) -> tuple[int, int]:
        """Of a cluster, below and beside one another."""
        m, n = self.outputs[0].array.shape[-2:]
        m, n = (n, m) if config.transposed else (m, n)
        rows, columns = config.tile_m // len(self.first), config.tile_n // len(self.second)
        return -(-m // (rows * config.cluster_m)), -(-n // (columns * config.cluster_n))


def _run_sm80(config: GemmConfig, across: tuple[bool, bool], call: Call, ptx: str, memory: list[np.ndarray]) -> None:
    arguments = [call.first[0].matrix(across[0]), *(part.matrix(across[1]) for part in call.second)]
    arguments += [part.tensor() for part in (*call.operands, *call.outputs, *call.scratch)]
    (rows, columns), batch = call.tiles(config), call.outputs[0].array.shape[:-2]
    arguments += [struct.pack("<i", number) for number in (rows, columns, 0, *([math.prod(batch)] if batch else []))]
    ptx_cta.Kernel(ptx).run(math.prod((rows, columns, *batch)), arguments, memory)


def _run_sm90(config: GemmConfig, across: tuple[bool, bool], call: Call, ptx: str, memory: list[np.ndarray]) -> None:
    arguments, maps = [b"0"], {}

    def by_tma(part: Part, box: tuple[int, int], turned: bool = False) -> None:
        maps[len(arguments)] = ptx_sm90.Map(part.array, *box, set())
        arguments.extend([bytes(128), struct.pack(f"<{part.array.ndim}i", *part.shape(turned))])

    def multiplied(part: Part, rows: int, sharers: int, turned: bool) -> None:
        """Each of the CTAs that share a tile loads a part of it: some rows of memory."""
        row = 128 // part.array.itemsize
        by_tma(part, (64 // sharers, 32 if rows % 64 else 64) if turned else (rows // sharers, row), turned)

    for part in call.first:
        multiplied(part, config.tile_m // len(call.first), config.cluster_n, across[0])
    if config.edge_m:
        multiplied(call.first[0], config.edge_m, config.cluster_n, across[0])
    for part in call.second:
        multiplied(part, config.tile_n // len(call.second), config.cluster_m, across[1])
    is_tile = [p.by_tma and p.array.shape == call.outputs[0].array.shape and config.tile_stages for p in call.operands]
    loaded = [part for part, taken in zip(call.operands, is_tile, strict=True) if taken]
    arguments += [part.tensor() for part, taken in zip(call.operands, is_tile, strict=True) if not taken]
    subtile = config.subtile(*(part.array.itemsize for part in (*loaded, *call.outputs)))

    def stored(part: Part) -> None:
        """Of a transposed subtile a copy has as many columns of memory as a line has."""
        wide = min(subtile[0], 128 // part.array.itemsize)
        by_tma(part, (subtile[1], wide) if config.transposed else subtile, config.transposed)

    for part in loaded:
        stored(part)
    for part in call.outputs:
        if part.by_tma:
            stored(part)
        else:
            arguments.append(part.matrix())
    arguments += [part.tensor() for part in call.scratch]
    rows, columns = call.tiles(config)
    *batch, m, n = call.outputs[0].array.shape
    m, n = (n, m) if config.transposed else (m, n)
    arguments += [
        struct.pack("<i", number) for number in (m, n, rows, columns, 0, *([math.prod(batch)] if batch else []))
    ]
    kernel, tiles = ptx_sm90.Kernel(ptx), math.prod((rows, columns, *batch))
    count = min(CLUSTERS, tiles) if config.cluster_k == 1 else tiles
    shape = (config.cluster_m * config.cluster_k, config.cluster_n)
    for index in range(count):
        ptx_sm90.Cluster(kernel, index, count, shape, arguments, maps, memory).run(seed=index)
