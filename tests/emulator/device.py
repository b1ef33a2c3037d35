"""A device on which a call of an op runs as compiled, host code and kernels, watched as compute-sanitizer does it.

racecheck finds accesses of threads, clusters and kernels that nothing puts in order; initcheck finds loads of memory
that nobody has written, and outputs that are left out; memcheck finds accesses outside of a tensor's own memory, and
stores between its elements.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cute_ops import Array, testing
from cute_ops.declaration.binding import bind
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.jit.layout import Memory, compact
from cute_ops.jit.plan import Plan, plan
from cute_ops.jit.target import parse
from cute_ops.jit.variant import Variant
from cute_ops.testing.kernel_calls import Call
from tests.emulator import hazards, ptx_sm90
from tests.emulator.launches import HostCode, Launch
from tests.emulator.ptx_cta import LANES

FEW_SMS = "sm_90a:2"  # CTAs of persistent kernels have several tiles each
SHARED_UNIT = 128  # bytes of shared memory that a CTA gets at least
DESCRIPTOR, FLOAT16 = 128, 3  # bytes for TMA, and what they say of a dtype
NAN = 0xFF  # in each byte of memory that nobody has written


class Block:
    """Memory of a tensor: bytes, which of them are elements, have been written, and are written by this launch.

    Attributes:
        shift: of the first element.
        writable: whether kernels may store here.
    """

    def __init__(self, name: str, array: Array, where: Memory, given: np.ndarray | None, writable: bool) -> None:
        self.name, self.dtype, self.shift = name, testing.numpy_dtype(array.dtype), where.address % VECTOR_BYTES
        self.shape, self.strides, self.writable = tuple(array.shape), where.strides, writable
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        size = self.shift + self.dtype.itemsize * (1 + last if math.prod(self.shape) else 0)
        self.bytes = np.full(size, NAN, np.uint8)
        self.inside, self.written, self.stored = np.zeros((3, size), bool)
        if math.prod(self.shape):
            steps = [s * self.dtype.itemsize for s in self.strides]
            as_strided(self.inside[self.shift :], (*self.shape, self.dtype.itemsize), (*steps, 1))[...] = True
        if given is not None:
            self.array()[...] = given
            self.written[:] = True  # what lies between elements may be read

    def array(self) -> np.ndarray:
        words = self.bytes[self.shift :].view(f"u{self.dtype.itemsize}")
        return as_strided(words, self.shape, [s * self.dtype.itemsize for s in self.strides]).view(self.dtype)


def planned(call: Call, arch: str = FEW_SMS) -> tuple[dict[str, Array], Plan]:
    """All arrays of a call, and how it runs."""
    given = {name: None if a is None else Array(a.shape, testing.dtype_name(a)) for name, a in call.arrays.items()}
    binding = bind(call.op, given, call.attrs)
    found = plan(binding, call.where, parse(arch), config=call.tile)
    arrays = {**binding.inputs, **binding.outputs, **found.workspaces}
    return {name: a for name, a in arrays.items() if a is not None}, found


@cache
def compiled(variant: Variant, folder: Path) -> HostCode:
    """The host code of a variant, compiled once for all calls of one folder."""
    return HostCode(variant, folder)


def run(call: Call, folder: Path, seed: int = 0, arch: str = FEW_SMS) -> tuple[np.ndarray | None, ...]:
    """The inputs that the kernels write, then their outputs; warps go in an order drawn by the seed.

    Args:
        folder: an empty one, or that of the same call before.

    Raises:
        Hazard: a race, or a read of what nobody has written.
        IndexError: an access outside.
        RuntimeError: a wait without an end.
        AssertionError: an output is not written.
    """
    arrays, found = planned(call, arch)
    blocks: dict[str, Block] = {}
    tensors: list[Any] = []
    for name, key in zip(found.variant.names, found.variant.args, strict=True):
        if key is None:
            continue
        if key.layout == "number":
            tensors.append(call.attrs.get(name, call.op.scalars[name]))
            continue
        a = arrays[key.name]
        where = call.where.get(key.name, Memory(compact(a.shape)))
        if key.name not in blocks:
            given = call.arrays.get(key.name)
            blocks[key.name] = Block(key.name, a, where, given, given is None or key.name in call.op.mutates)
        address = (list(blocks).index(key.name) + 1 << 32) + blocks[key.name].shift
        view = found.views.get(key.name)
        tensors.append((address, *((view.shape, view.strides) if view else (a.shape, where.strides))))
    host = compiled(found.variant, folder)
    with np.errstate(all="ignore"):
        _run(host.launches(tensors), host, [*blocks.values()], np.random.default_rng(seed))
    for name in call.op.outputs:
        if name in blocks and (left_out := blocks[name].inside & ~blocks[name].written).any():
            raise AssertionError(f"initcheck: byte {np.flatnonzero(left_out)[0]} of {name} is not written")
    return tuple(blocks[name].array().copy() if name in blocks else None for name in call.op.results)


def _run(launches: Sequence[Launch], host: HostCode, blocks: Sequence[Block], rng: np.random.Generator) -> None:
    """Run cluster after cluster. No two may meet: in what one has stored, or in what it has read another one stores."""
    known = False  # whether a kernel starts only when the one before has waited for the previous one
    for launch in launches:
        kernel, tells = ptx_sm90.Kernel(host.ptx[launch.kernel]), True
        loaded = [np.zeros(block.bytes.size, bool) for block in blocks]
        for index in range(math.prod(launch.grid) // math.prod(launch.cluster)):
            before = [block.bytes.copy() for block in blocks]
            cluster = Cluster(kernel, launch, index, blocks, known)
            cluster.run(int(rng.integers(1 << 30)))
            tells &= cluster.tells
            for i, traces in cluster.traces.items():
                block, stored, loads = blocks[i - 1], traces.stores > 0, traces.loads.any(0)
                # Two may store the same number.
                changed = stored & ~hazards.atomic(traces.stores) & (before[i - 1] != block.bytes)
                met = changed & (block.stored | loaded[i - 1])
                if not cluster.synchronised:
                    met |= loads & block.stored
                if met.any():
                    raise hazards.Hazard(f"racecheck: two CTAs meet at byte {np.flatnonzero(met)[0]} of {block.name}")
                block.stored |= stored
                loaded[i - 1] |= loads
        for block in blocks:
            block.written |= block.stored
            block.stored[:] = False
        known = tells


class Cluster(ptx_sm90.Cluster):
    """A cluster of a launch.

    Attributes:
        known: whether the kernel starts only when the one before has waited for the previous one.
        waited: of each thread, whether it knows that the previous kernel has ended.
        tells: whether all threads knew so when they let the next kernel start.
        synchronised: whether it takes part in what CTAs agree on by atomics.
    """

    def __init__(
        self, kernel: ptx_sm90.Kernel, launch: Launch, index: int, blocks: Sequence[Block], known: bool
    ) -> None:
        self.launch, self.blocks, self.known, self.tells, self.synchronised = launch, blocks, known, True, False
        maps = {i: Map(a, blocks) for i, a in enumerate(launch.arguments) if len(a) == DESCRIPTOR}
        memory, count = [block.bytes for block in blocks], math.prod(launch.cluster)
        super().__init__(kernel, index, 1, (count, 1), launch.arguments, maps, memory)
        self.clocks = hazards.Clocks(count, kernel.warps)
        shared, warps = kernel.static + launch.shared, count * kernel.warps
        for cta in self.ctas:
            cta.blocks[0] = np.full(shared + -shared % SHARED_UNIT, NAN, np.uint8)
            cta.traces = hazards.Traces("shared memory", cta.blocks[0].size, warps)
        self.traces = {
            i: hazards.Traces(block.name, block.bytes.size, warps, block.written)
            for i, block in enumerate(blocks, 1)
            if block.writable
        }
        self.waited = np.full(warps * LANES, not launch.early)

    def special(self, rank: int) -> dict[str, int]:
        found = {"%cluster_ctarank": rank, "%cluster_nctarank": math.prod(self.launch.cluster)}
        at, inside = self.index, rank
        for axis, size, part in zip("xyz", self.launch.grid, self.launch.cluster, strict=True):
            (at, cluster), (inside, place) = divmod(at, size // part), divmod(inside, part)
            found |= {
                f"%ctaid.{axis}": cluster * part + place, f"%nctaid.{axis}": size, f"%clusterid.{axis}": cluster,
                f"%nclusterid.{axis}": size // part, f"%cluster_ctaid.{axis}": place, f"%cluster_nctaid.{axis}": part,
            }  # fmt: skip
        return found

    def depends(self, warp: ptx_sm90.Warp, what: str, now: np.ndarray) -> None:
        threads = warp.numbers[now]
        if what == "wait":
            self.waited[threads] = True
        else:
            self.tells &= bool(self.waited[threads].all())

    def accessed(self, warp: ptx_sm90.Warp, access: ptx_sm90.Access, places: np.ndarray, now: np.ndarray) -> None:
        block = self.blocks[access.block - 1]
        self.synchronised |= access.atomic
        early = not self.waited[warp.numbers[now]].all()
        if early and (access.store or not self.known or (block.writable and block.written[places].any())):
            raise hazards.Hazard(f"racecheck: {block.name} is accessed before the previous kernel is waited for")
        if access.store and not block.writable:
            raise hazards.Hazard(f"memcheck: a store to {block.name}, which is only read")
        if access.store and not block.inside[places].all():
            outside = places[~block.inside[places]].min()
            raise IndexError(f"memcheck: a store to byte {outside} of {block.name}, between its elements")


class Map:
    """A TMA descriptor: address, sizes and strides of five dims, and of these the part that is copied at once."""

    def __init__(self, descriptor: bytes, blocks: Sequence[Block]) -> None:
        address, format, *strides = struct.unpack_from("<QI4I", descriptor)
        self.block, self.start = address >> 32, address & 0xFFFFFFFF
        self.dtype = blocks[self.block - 1].dtype
        if self.dtype.itemsize == 1 and format >> 8 & 0xF == FLOAT16:  # pairs of neighbours
            self.dtype = np.dtype(np.float16)
        self.strides = [self.dtype.itemsize, *(16 * stride for stride in strides)]
        self.sizes = [size + 1 for size in struct.unpack_from("<5I", descriptor, 32)]
        self.box = [size + 1 for size in descriptor[55:60]]
        self.rows, self.columns = math.prod(self.box[1:]), self.box[0]

    def places(self, start: int) -> np.ndarray:
        return ptx_sm90.Map(np.empty(0, self.dtype), self.rows, self.columns, set()).places(start)

    def _bytes(self, at: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The places of a part's bytes, in rows, and whether each is inside."""
        address, inside = np.full(1, self.start, np.int64), np.ones(1, bool)
        for d in reversed(range(len(self.box))):
            index = (at[d] if d < len(at) else 0) + np.arange(self.box[d])
            address = (address[:, None] + index * self.strides[d]).ravel()
            inside = (inside[:, None] & (index >= 0) & (index < self.sizes[d])).ravel()
        shape = self.rows, self.columns * self.dtype.itemsize
        each = address[:, None] + np.arange(self.dtype.itemsize)
        return each.reshape(shape), np.repeat(inside, self.dtype.itemsize).reshape(shape)

    def load(self, warp: ptx_sm90.Warp, at: Sequence[int]) -> np.ndarray:
        places, inside = self._bytes(at)
        tile = np.zeros(places.shape, np.uint8)
        self._watched(warp, places[inside], ptx_sm90.Access(self.block))
        tile[inside] = warp.blocks[self.block][places[inside]]
        return tile

    def store(self, warp: ptx_sm90.Warp, at: Sequence[int], tile: np.ndarray, added: bool) -> None:
        places, inside = self._bytes(at)
        memory, new = warp.blocks[self.block], tile[inside]
        self._watched(warp, places[inside], ptx_sm90.Access(self.block, store=True, atomic=added))
        if added:
            new = (memory[places[inside]].view(self.dtype) + new.view(self.dtype)).view(np.uint8)
        memory[places[inside]] = new

    def _watched(self, warp: ptx_sm90.Warp, places: np.ndarray, access: ptx_sm90.Access) -> None:
        """Report accesses by TMA as ones of the warp's first thread."""
        if places.size:
            warp.watched(places.reshape(1, -1), warp.threads == 0, access)
