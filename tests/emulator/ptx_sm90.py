"""Runs the warps of a kernel's PTX on the CPU: TMA, mbarriers, named barriers and WGMMA of a cluster, and cp.async.

Warps go in a random order, each until it has to wait. WGMMA and TMA act at once, in place: this finds wrong addresses,
swizzles, coordinates, counts and phases, and waits without an end; not a wait that is missing. Copies by cp.async act
when they are waited for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.emulator import ptx_cta
from tests.emulator.ptx_cta import HALVES, LANES, floats

# Inline assembly as single statements.
WAIT = re.compile(
    r"\{\s*\.reg \.pred\s+P1;\s*LAB_WAIT:\s*mbarrier\.try_wait\S+ P1, (\[[^\]]*\]), (\S+), \d+;"
    r"\s*@P1 bra\.uni DONE;\s*bra\.uni\s+LAB_WAIT;\s*DONE:\s*\}"
)
MULTIPLY = re.compile(
    r"\{\s*\.reg \.pred p;\s*setp\.ne\.b32 p, (\S+), 0;"
    r"\s*wgmma\.mma_async\.(\S+)\s+(\{[^}]*\}), (\{[^}]*\}|\S+), (\S+), p, 1,\s+1(?:,\s+(\d))?(?:, (\d))?;\s*\}"
)
ELEMENTS = {**HALVES, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
AT_ONCE = ("griddepcontrol", "fence", "prefetch", "setmaxnreg", "wgmma")
SHARED_BYTES, STEPS_WITHOUT_CHANGE = 1 << 18, 50
RANK_BITS = 20  # of an address in another CTA: above these stands the rank, from 1


class Map(NamedTuple):
    """What a TMA descriptor says: a matrix in memory, or a batch of them, and rows and columns of the part that is
    copied at once; row, column and matrix of what was stored.
    """

    tensor: np.ndarray
    rows: int
    columns: int
    stored: set[tuple[int, ...]]

    def places(self, start: int) -> np.ndarray:
        """Addresses in shared memory of a part's bytes; rows of 64 or 128 bytes are swizzled."""
        width = self.columns * self.tensor.itemsize
        vectors = start + np.arange(0, self.rows * width, 16)
        vectors = swizzled(vectors, width) if width <= 128 else vectors
        return (vectors[:, None] + np.arange(16)).reshape(self.rows, width)


def swizzled(address: Any, width: int) -> Any:
    """Where 16 bytes lie in rows of this width."""
    return address ^ (address >> 7 & width // 16 - 1) << 4


class Kernel(ptx_cta.Kernel):
    """The one entry of a PTX text."""

    def __init__(self, text: str) -> None:
        text = WAIT.sub(r"await.b32 \1, \2;", re.sub(r"//.*", "", text))
        super().__init__(MULTIPLY.sub(_multiply, text))


def _multiply(found: re.Match[str]) -> str:
    """A matrix instruction as one statement. An operand in registers, or of 8 bits, says not which way it lies."""
    keep, kind, sums, a, b, *across = found.groups()
    turned = ["0", *(way for way in across if way)] if a.startswith("{") else [way or "0" for way in across]
    return f"multiply.{kind} {sums}, {a}, {b}, {keep}, {', '.join(turned)};"


class Cluster:
    """One cluster of a grid of ``(*shape, count)``, or of one CTA of ``count`` in a row.

    Args:
        kernel: what runs.
        index: of the cluster.
        count: clusters altogether.
        shape: CTAs below and beside one another.
        arguments: parameters as bytes.
        maps: TMA descriptors by the position of their parameter.
        memory: block ``i + 1`` is ``memory[i]``.
        in_a_row: whether CTAs are counted along the grid's first dim, instead of its last.
    """

    def __init__(
        self, kernel: Kernel, index: int, count: int, shape: tuple[int, int], arguments: Sequence[bytes],
        maps: Mapping[int, Map], memory: Sequence[np.ndarray] = (), *, in_a_row: bool = False,
    ) -> None:  # fmt: skip
        self.in_a_row = in_a_row
        self.kernel, self.index, self.count, self.shape, self.maps = kernel, index, count, shape, maps
        self.arguments = dict(zip(kernel.parameters, arguments, strict=True))
        self.ctas = [Cta(self, rank, memory) for rank in range(shape[0] * shape[1])]
        self.barrier = [0, 0]

    def run(self, seed: int) -> None:
        """Run all warps to their end.

        Raises:
            RuntimeError: all that are left wait, or a named barrier is left with threads that have arrived.
        """
        with np.errstate(all="ignore"):
            self._run(np.random.default_rng(seed))

    def _run(self, rng: np.random.Generator) -> None:
        count = self.kernel.threads // LANES
        warps = {(cta.rank, w): Warp(cta, w).run() for cta in self.ctas for w in range(count)}
        before, unchanged = "", 0
        while warps:
            for w in rng.permutation(list(warps)):
                if next(warps[tuple(w)], None) is None:
                    del warps[tuple(w)]
            now = f"{[(cta.phases, cta.named) for cta in self.ctas]} {list(warps)}"
            unchanged = unchanged + 1 if now == before else 0
            before = now
            if unchanged > STEPS_WITHOUT_CHANGE:
                raise RuntimeError(f"hangs: { ({w: next(warp) for w, warp in warps.items()}) }, {now}")
        if any(arrived for cta in self.ctas for arrived, _ in cta.named.values()):
            raise RuntimeError(f"threads have arrived that nobody waits for: {[cta.named for cta in self.ctas]}")


class Cta:
    """What the warps of one CTA share."""

    def __init__(self, cluster: Cluster, rank: int, memory: Sequence[np.ndarray]) -> None:
        self.cluster, self.kernel, self.rank = cluster, cluster.kernel, rank
        self.blocks = [np.zeros(SHARED_BYTES, np.uint8), *memory]
        self.phases: dict[int, list[int]] = {}  # mbarriers: arrivals of a phase, missing ones, missing bytes, phase
        self.named: dict[int, list[int]] = {}  # named barriers: threads that have arrived, phase

    def arrive(self, address: int, arrivals: int, expected: int) -> None:
        """Arrive at an mbarrier, to which this many more bytes will come, or fewer by those that have: another CTA's
        may come before they are expected.
        """
        barrier = self.phases[address]
        barrier[1] -= arrivals
        barrier[2] += expected
        if barrier[1] < 0:
            raise RuntimeError(f"too many arrivals at the mbarrier at {address}: {barrier}")
        if barrier[1:3] == [0, 0]:
            barrier[1], barrier[3] = barrier[0], barrier[3] ^ 1


class Warp(ptx_cta.Cta):
    """The threads of one warp."""

    def __init__(self, cta: Cta, index: int) -> None:
        self.kernel, self.cta, self.index = cta.kernel, cta, index  # type: ignore[assignment]
        self.arguments, self.blocks, cluster = cta.cluster.arguments, cta.blocks, cta.cluster
        self.threads, self.everyone, zero = np.arange(LANES), np.ones(LANES, bool), np.zeros(LANES, np.int64)
        self.registers = ptx_cta.Registers(LANES)
        self.registers |= {
            "%tid.x": self.threads + LANES * index, "%ctaid.x": zero + cta.rank % cluster.shape[0],
            "%ctaid.y": zero + cta.rank // cluster.shape[0], "%ctaid.z": zero + cluster.index,
            "%nctaid.z": zero + cluster.count, "%cluster_ctarank": zero + cta.rank, "__dynamic_shmem__0": zero,
            "%laneid": self.threads.astype(np.int64),
        }  # fmt: skip
        if cluster.in_a_row:
            self.registers |= {"%ctaid.x": zero + cluster.index, "%nctaid.x": zero + cluster.count}
        self.registers |= {name: zero + i for i, name in enumerate(self.kernel.parameters)}
        self.copies: list[list[tuple[Any, ...]]] = [[]]  # groups of cp.async, the last one not yet committed

    def run(self) -> Iterator[str]:  # type: ignore[override]
        """Yields what it waits for."""
        for op, operands, now in self.steps():
            if op[0] in AT_ONCE or op[:2] == ("bar", "warp"):
                continue
            if op[0] in ("await", "bar", "barrier"):
                yield from self.wait(op, operands, now)
            else:
                self.act(op, operands, now)

    def one(self, names: Sequence[str], now: np.ndarray) -> int:
        """The sum of some registers and numbers in the first thread that is here."""
        return int(sum(self.read(name) for name in names)[np.flatnonzero(now)[0]])

    def wait(self, op: tuple[str, ...], operands: list[list[str]], now: np.ndarray) -> Iterator[str]:
        if op[0] == "barrier":
            yield from self.wait_for_cluster(op)
            return
        first = self.one(operands[0], now)
        if op[0] == "await":
            while self.cta.phases[first][3] == self.one(operands[1], now):
                yield f"mbarrier {first}"
            return
        threads = self.one(operands[1], now) if len(operands) > 1 else self.kernel.threads
        barrier = self.cta.named.setdefault(first, [0, 0])
        phase = barrier[1]
        barrier[0] += LANES
        if barrier[0] == threads:
            barrier[:] = 0, phase + 1
        while op[1] == "sync" and barrier[1] == phase:
            yield f"barrier {first}"

    def wait_for_cluster(self, op: tuple[str, ...]) -> Iterator[str]:
        barrier, threads = self.cta.cluster.barrier, len(self.cta.cluster.ctas) * self.kernel.threads
        barrier[0] += LANES * ("arrive" in op)
        while "wait" in op and barrier[0] < threads:
            yield "cluster"

    def act(self, op: tuple[str, ...], operands: list[list[str]], now: np.ndarray) -> None:
        if op[0] == "elect":
            self.write(operands[0][0].split("|")[1], (self.threads == 0).astype(np.int64), now)
        elif op[0] == "mbarrier" and op[1] == "init":
            count = self.one(operands[1], now)
            self.cta.phases[self.one(operands[0], now)] = [count, count, 0, 0]
        elif op[0] == "mbarrier":
            count = self.one(operands[2], now)
            bytes_too = "expect_tx" in op
            for thread in np.flatnonzero(now):
                address = int(sum(self.read(name) for name in operands[1])[thread])
                rank = address >> RANK_BITS
                cta = self.cta.cluster.ctas[rank - 1] if rank else self.cta
                cta.arrive(address & (1 << RANK_BITS) - 1, 1 if bytes_too else count, count if bytes_too else 0)
        elif op[0] == "mapa":
            self.write(operands[0][0], self.read(operands[1][0]) + (self.read(operands[2][0]) + 1 << RANK_BITS), now)
        elif op[:2] == ("cp", "async") and "bulk" not in op:
            self.copy_async(op, operands, now)
        elif op[0] == "cp":
            if "tensor" in op:
                ctas = self.cta.cluster.ctas
                mask = self.one(operands[3], now) if "multicast::cluster" in op else 1 << self.cta.rank
                taking = [cta for cta in ctas if mask >> cta.rank & 1]
                taking = taking if "mbarrier::complete_tx::bytes" in op else []
                self.copy(operands, now, taking, added="reduce" in op)
        elif op[0] == "multiply":
            self.multiply(op, operands)
        elif op[0] == "stmatrix":
            rows = sum(self.read(name) for name in operands[0])
            for i, name in enumerate(operands[1]):
                matrix = self.read(name).astype(np.uint32).view(np.uint8).reshape(8, 16)
                self.blocks[0][rows[8 * i : 8 * i + 8, None] + np.arange(16)] = matrix
        elif op[:2] == ("st", "async"):
            self.store_async(operands, now)
        elif op[0] in ("ld", "st"):
            self.access(op, operands, now)
        elif op[0] == "red":
            self.add_to_memory(operands, now)
        elif op[0] == "vote":
            self.vote(op, operands, now)
        elif op[0] in ("ldmatrix", "mma", "shfl"):
            self.together(op, operands)
        elif op[0] == "cvta":
            self.write(operands[0][0], self.read(operands[1][0]), now)
        else:
            self.compute(op, operands, now)

    def store_async(self, operands: list[list[str]], now: np.ndarray) -> None:
        """Words to shared memory of a CTA of the cluster, whose mbarrier counts their bytes."""
        place, values, barrier = operands
        target, mbarrier = (sum(self.read(name) for name in each) for each in (place, barrier))
        words = np.array([self.read(name) for name in values]).astype(np.uint32)
        for lane in np.flatnonzero(now):
            cta, start = (
                self.cta.cluster.ctas[(int(target[lane]) >> RANK_BITS) - 1],
                int(target[lane]) % (1 << RANK_BITS),
            )
            if start % (4 * len(values)) or target[lane] >> RANK_BITS != mbarrier[lane] >> RANK_BITS:
                raise IndexError(f"st.async of {len(values)} words to {target[lane]}, mbarrier {mbarrier[lane]}")
            cta.blocks[0][start : start + 4 * len(values)] = words[:, lane].copy().view(np.uint8)
            cta.arrive(int(mbarrier[lane]) % (1 << RANK_BITS), 0, -4 * len(values))

    def add_to_memory(self, operands: list[list[str]], now: np.ndarray) -> None:
        """Add float32 numbers to neighbours in memory, as many as an instruction has."""
        places, values = sum(self.read(name) for name in operands[0]), [floats(self.read(name)) for name in operands[1]]
        for lane in np.flatnonzero(now):
            start, block = int(places[lane]) & 0xFFFFFFFF, self.blocks[int(places[lane]) >> 32]
            end = start + 4 * len(values)
            if start % (4 * len(values)) or end > len(block):
                raise IndexError(f"red at byte {start} of {len(block)}")
            block[start:end].view(np.float32)[:] += [each[lane] for each in values]

    def copy_async(self, op: tuple[str, ...], operands: list[list[str]], now: np.ndarray) -> None:
        """Begin copies of 16 bytes, of which the last ones may be zeros; commit or await a group of copies."""
        if op[2] == "commit_group":
            self.copies.append([])
        elif op[2] == "wait_group":
            self.end_copies(len(self.copies) - 1 - self.one(operands[0], now))
        elif op[2] == "mbarrier":  # arrives when the copies so far are done, as they are at once
            self.end_copies(len(self.copies))
            self.copies.append([])
            self.cta.arrive(self.one(operands[0], now), int(now.sum()), 0)
        else:
            target, source = (sum(self.read(name) for name in place) for place in operands[:2])
            size = self.read(operands[-1][0])
            for lane in np.flatnonzero(now):
                start, block = int(source[lane]) & 0xFFFFFFFF, self.blocks[int(source[lane]) >> 32]
                if target[lane] % 16 or start % 16 or start + size[lane] > len(block):
                    raise IndexError(f"cp.async from byte {start} of {len(block)} to {target[lane]}")
                self.copies[-1].append((int(target[lane]), int(source[lane]), int(size[lane])))

    def end_copies(self, groups: int) -> None:
        """Copy the first groups of copies."""
        for target, source, size in (each for _ in range(groups) for each in self.copies.pop(0)):
            self.blocks[0][target : target + 16] = 0
            self.blocks[0][target : target + size] = self.blocks[source >> 32][source & 0xFFFFFFFF :][:size]

    def copy(self, operands: list[list[str]], now: np.ndarray, taking: Sequence[Cta], added: bool) -> None:
        """A part of a matrix by TMA into these CTAs, with zeros for what lies outside of it; where there are none, from
        this one into the matrix, or ``added`` to it.
        """
        shared, (name, *at) = operands[:2] if taking else operands[1::-1]
        which = self.cta.cluster.maps[self.one([name], now)]
        first, top, *batch = (self.one([coordinate], now) for coordinate in at)
        if len(batch) == 3:  # of a packed sequence: see tiles.by_sequence
            batch, (end, far) = [batch[0], 0], batch[1:]
            top, end = top + end - far, end
            matrix = which.tensor[0, batch[0]][:end]
        else:
            matrix = which.tensor[tuple(reversed(batch))]
        part = matrix[top : top + which.rows, first : first + which.columns]
        rows, columns = part.shape
        places = which.places(self.one(shared, now))
        if taking:
            tile = np.zeros((which.rows, which.columns), part.dtype)
            tile[:rows, :columns] = part
            for cta in taking:
                cta.blocks[0][places] = tile.view(np.uint8)
        elif added:
            part += self.blocks[0][places].view(part.dtype)[:rows, :columns]
        else:
            now_stored = {(top + row, first + column, *batch) for row in range(rows) for column in range(columns)}
            if twice := which.stored & now_stored:
                raise RuntimeError(f"stored twice, by row, column and matrix: {sorted(twice)}")
            which.stored.update(now_stored)
            part[:] = self.blocks[0][places].view(part.dtype)[:rows, :columns]
        for cta in taking:
            cta.arrive(self.one(operands[2], now), 0, -which.rows * which.columns * which.tensor.itemsize)

    def multiply(self, op: tuple[str, ...], operands: list[list[str]]) -> None:
        """This warp's 16 rows of a warpgroup's 64 x n x 32 bytes."""
        sums, a, (b,), (keep,), *across = operands
        n, kinds = int(re.search(r"n(\d+)k", op[3])[1]), [ELEMENTS[name] for name in op[-2:]]  # type: ignore[index]
        (turned_a,), (turned_b,) = across
        if len(a) == 4:
            first = self.in_registers(a, kinds[0])
        else:
            mine = range(self.index % 4 * 16, self.index % 4 * 16 + 16)
            first = self.operand(int(self.read(a[0])[0]), mine, turned_a == "1", kinds[0])
        second = self.operand(int(self.read(b)[0]), range(n), turned_b == "1", kinds[1])
        product = (first @ second.T).reshape(2, 8, n // 8, 4, 2)
        found = product.transpose(2, 0, 4, 1, 3).reshape(-1, LANES)
        if self.read(keep)[0]:
            found = found + floats(np.stack([self.read(name) for name in sums]))
        self.registers.update(zip(sums, found.view(np.uint32).astype(np.int64), strict=True))

    def in_registers(self, names: list[str], kind: Any) -> np.ndarray:
        """16 rows of 16 numbers: a register has two neighbours in k; rows 8 apart, then columns 8 apart follow."""
        pairs = np.stack([self.read(name) for name in names]).astype(np.uint32).view(np.uint16).view(kind)
        lanes = pairs.astype(np.float32).reshape(2, 2, 8, 4, 2)  # k / 8, row / 8, row, k / 2, k
        return lanes.transpose(1, 2, 0, 3, 4).reshape(16, 16)

    def operand(self, descriptor: int, rows: range, turned: bool, kind: Any) -> np.ndarray:
        """Some rows of 32 bytes of an operand in rows of 128, 64, 32 or 16 bytes; turned, in columns."""
        start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        width, size = {1: 128, 2: 64, 3: 32, 0: 16}[descriptor >> 62 & 3], np.dtype(kind).itemsize
        row, k = np.asarray(rows)[:, None], np.arange(32 // size)
        if turned:
            inside = width // 2  # rows of the operand
            leading, stride = (stride, leading) if width == 16 else (leading, stride)
            address = start + row // inside * leading + k // 8 * stride + k % 8 * width + row % inside * 2
        else:
            address = start + row // 8 * stride + row % 8 * width + size * k
            if width == 16:
                address += k // 8 * (leading - 16)
        return self.blocks[0].view(kind)[swizzled(address, width) // size].astype(np.float32)
