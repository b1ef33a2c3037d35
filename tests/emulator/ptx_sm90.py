"""Runs the warps of a kernel's PTX on the CPU: TMA, mbarriers, named barriers and WGMMA of a cluster, and cp.async.

Warps go in a random order, each until it has to wait. WGMMA and TMA act at once, in place: this finds wrong addresses,
swizzles, coordinates, counts and phases, and waits without an end. Copies by cp.async act when they are waited for.
Other waits that are missing are found where a cluster is watched, see :mod:`hazards`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tests.emulator import hazards, ptx_cta
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
AT_ONCE = ("griddepcontrol", "fence", "prefetch", "setmaxnreg", "wgmma", "membar", "discard")
SHARED_BYTES, STEPS_WITHOUT_CHANGE = 227 << 10, 50
NAMED_BARRIERS, MOST_OF_MBARRIER, TMA_BYTES = 16, (1 << 20) - 1, 128  # TMA's places in shared memory are aligned so
RANK_BITS = 20  # of an address in another CTA: above these stands the rank, from 1


class Map(NamedTuple):
    """What a TMA descriptor says: a matrix in memory, or a batch of them, and rows and columns of the part that is
    copied at once; row, column and matrix of what was stored.
    """

    tensor: np.ndarray
    rows: int
    columns: int
    stored: set[tuple[int, ...]]

    @property
    def dtype(self) -> np.dtype:
        return self.tensor.dtype

    def places(self, start: int) -> np.ndarray:
        """Addresses in shared memory of a part's bytes; rows of 64 or 128 bytes are swizzled."""
        width = self.columns * self.tensor.itemsize
        vectors = start + np.arange(0, self.rows * width, 16)
        vectors = swizzled(vectors, width) if width <= 128 else vectors
        return (vectors[:, None] + np.arange(16)).reshape(self.rows, width)

    def _part(self, at: Sequence[int]) -> tuple[np.ndarray, tuple[int, ...]]:
        """The part of a matrix from these coordinates on, and its row, column and matrix."""
        first, top, *batch = at
        if len(batch) == 3:  # of a packed sequence: see tiles.by_sequence
            batch, (end, far) = [batch[0], 0], batch[1:]
            top, end = top + end - far, end
            matrix = self.tensor[0, batch[0]][:end]
        else:
            matrix = self.tensor[tuple(reversed(batch))]
        return matrix[top : top + self.rows, first : first + self.columns], (top, first, *batch)

    def load(self, warp: Warp, at: Sequence[int]) -> np.ndarray:
        """The bytes of a part, with zeros for what lies outside."""
        part, _ = self._part(at)
        tile = np.zeros((self.rows, self.columns), part.dtype)
        tile[: part.shape[0], : part.shape[1]] = part
        return tile.view(np.uint8)

    def store(self, warp: Warp, at: Sequence[int], tile: np.ndarray, added: bool) -> None:
        """Write a part's bytes, or add its numbers."""
        part, (top, first, *batch) = self._part(at)
        rows, columns = part.shape
        if added:
            part += tile.view(part.dtype)[:rows, :columns]
            return
        now_stored = {(top + row, first + column, *batch) for row in range(rows) for column in range(columns)}
        if twice := self.stored & now_stored:
            raise RuntimeError(f"stored twice, by row, column and matrix: {sorted(twice)}")
        self.stored.update(now_stored)
        part[:] = tile.view(part.dtype)[:rows, :columns]


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


class Access(NamedTuple):
    """How memory is accessed.

    Attributes:
        block: of memory, 0 is shared memory.
        store: whether it is written.
        by: ``cp.async``, ``bulk`` stores of TMA, or ``wgmma``; by default the threads themselves.
        mbarrier: whose phase ends when TMA has written.
        atomic: by one instruction that reads and writes.
    """

    block: int = 0
    store: bool = False
    by: str = ""
    mbarrier: int | None = None
    atomic: bool = False


LOAD, STORE = Access(), Access(store=True)


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
        self.barrier = [0, 0]  # threads that have arrived, phase
        self.clocks: hazards.Clocks | hazards.Unwatched = hazards.Unwatched()
        self.traces: dict[int, hazards.Traces] = {}  # of blocks of memory

    def depends(self, warp: Warp, what: str, now: np.ndarray) -> None:
        """Threads wait for the previous kernel, or let the next one start."""

    def accessed(self, warp: Warp, access: Access, places: np.ndarray, now: np.ndarray) -> None:
        """Threads access these bytes of a block of memory."""

    def special(self, rank: int) -> dict[str, int]:
        """Registers that say where in the grid a CTA is."""
        found = {
            "%ctaid.x": rank % self.shape[0], "%ctaid.y": rank // self.shape[0], "%ctaid.z": self.index,
            "%nctaid.z": self.count, "%cluster_ctarank": rank,
        }  # fmt: skip
        return found | ({"%ctaid.x": self.index, "%nctaid.x": self.count} if self.in_a_row else {})

    def run(self, seed: int) -> None:
        """Run all warps to their end.

        Raises:
            RuntimeError: all that are left wait, a named barrier is left with threads that have arrived, or what TMA
                copies is not waited for.
        """
        with np.errstate(all="ignore"):
            self._run(np.random.default_rng(seed))

    def _run(self, rng: np.random.Generator) -> None:
        count = self.kernel.warps
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
        self.clocks.end()
        if any(arrived for cta in self.ctas for arrived, _ in cta.named.values()):
            raise RuntimeError(f"threads have arrived that nobody waits for: {[cta.named for cta in self.ctas]}")
        for cta in self.ctas:
            for address, phase in cta.loaded.items():
                if phase > cta.awaited.get(address, 0):
                    raise RuntimeError(f"a CTA ends before TMA's copies for the mbarrier at {address}")


class Cta:
    """What the warps of one CTA share."""

    def __init__(self, cluster: Cluster, rank: int, memory: Sequence[np.ndarray]) -> None:
        self.cluster, self.kernel, self.rank = cluster, cluster.kernel, rank
        self.blocks = [np.zeros(SHARED_BYTES, np.uint8), *memory]
        self.phases: dict[int, list[int]] = {}  # mbarriers: arrivals of a phase, missing ones, missing bytes, phases
        self.traces: hazards.Traces | None = None  # of shared memory
        self.named: dict[int, list[int]] = {}  # named barriers: threads that have arrived, phase
        self.counts: dict[tuple[int, int], int] = {}  # threads that a named barrier counts in a phase
        # By mbarrier the last phase to which TMA's copies belong, and the last one that was waited for.
        self.loaded: dict[int, int] = {}
        self.awaited: dict[int, int] = {}

    def arrive(self, address: int, arrivals: int, expected: int, threads: np.ndarray | None = None) -> None:
        """Arrive at an mbarrier, to which this many more bytes will come, or fewer by those that have: another CTA's
        may come before they are expected.
        """
        if address not in self.phases:
            raise RuntimeError(f"an arrival at {address}, where no mbarrier is")
        barrier, clocks = self.phases[address], self.cluster.clocks
        if threads is not None:
            if threads[0] // (self.kernel.warps * LANES) != self.rank:
                clocks.reach(self.rank, threads)
            clocks.arrive((self.rank, address), threads)
        barrier[1] -= arrivals
        barrier[2] += expected
        if abs(barrier[2]) > MOST_OF_MBARRIER:
            raise RuntimeError(f"the mbarrier at {address} counts {barrier[2]} bytes")
        if barrier[1] < 0:
            raise RuntimeError(f"too many arrivals at the mbarrier at {address}: {barrier}")
        if barrier[1:3] == [0, 0]:
            barrier[1], barrier[3] = barrier[0], barrier[3] + 1
            clocks.full((self.rank, address), barrier[3])

    def load(self, address: int, count: int) -> None:
        """Count bytes that TMA has brought."""
        if address in self.phases:
            self.loaded[address] = self.phases[address][3] + 1
        self.arrive(address, 0, -count)


class Warp(ptx_cta.Cta):
    """The threads of one warp."""

    def __init__(self, cta: Cta, index: int) -> None:
        self.kernel, self.cta, self.index = cta.kernel, cta, index  # type: ignore[assignment]
        self.arguments, self.blocks, cluster = cta.cluster.arguments, cta.blocks, cta.cluster
        self.threads, zero = np.arange(LANES), np.zeros(LANES, np.int64)
        self.everyone = self.threads + LANES * index < self.kernel.threads
        self.registers = ptx_cta.Registers(LANES)
        self.registers |= {name: zero + value for name, value in cluster.special(cta.rank).items()}
        self.registers |= {name: zero + i for i, name in enumerate(self.kernel.parameters)}
        self.registers |= {name: zero + value for name, value in self.kernel.shared.items()}
        width, height, _ = self.kernel.block
        place = self.threads + LANES * index
        each = place % width, place // width % height, place // (width * height)
        self.registers |= {f"%tid.{axis}": number.astype(np.int64) for axis, number in zip("xyz", each, strict=True)}
        self.registers |= {f"%ntid.{axis}": zero + n for axis, n in zip("xyz", self.kernel.block, strict=True)}
        self.registers["%laneid"] = self.threads.astype(np.int64)
        self.copies: list[list[tuple[Any, ...]]] = [[]]  # groups of cp.async, the last one not yet committed
        self.ended = 0  # groups of copies that have been waited for
        self.arrived = 0  # the phase of the cluster's barrier when it arrived there
        self.stores, self.products = np.zeros(LANES, np.int64), 0  # groups of bulk stores, and of WGMMA
        self.stored = np.zeros(LANES, np.int64)  # groups of bulk stores that have been waited for
        self.open = np.zeros(LANES, bool)  # threads with bulk stores of no group yet
        self.numbers = (cta.rank * self.kernel.warps + index) * LANES + self.threads  # in the cluster

    def run(self) -> Iterator[str]:  # type: ignore[override]
        """Yields what it waits for."""
        for op, operands, now in self.steps():
            if op[0] in AT_ONCE or op[:2] == ("bar", "warp"):
                self.order(op, operands, now)
                continue
            if op[0] in ("await", "bar", "barrier"):
                yield from self.wait(op, operands, now)
            else:
                self.act(op, operands, now)
        if self.open.any() or (self.stored < self.stores).any():
            raise RuntimeError(f"warp {self.index} ends before its bulk stores have read shared memory")

    def one(self, names: Sequence[str], now: np.ndarray) -> int:
        """The sum of some registers and numbers in the first thread that is here."""
        return int(sum(self.read(name) for name in names)[np.flatnonzero(now)[0]])

    def wait(self, op: tuple[str, ...], operands: list[list[str]], now: np.ndarray) -> Iterator[str]:
        if op[0] == "barrier":
            yield from self.wait_for_cluster(op)
            return
        first, clocks, threads = self.one(operands[0], now), self.cta.cluster.clocks, self.numbers[now]
        if op[0] == "await":
            if first not in self.cta.phases:
                raise RuntimeError(f"a wait at {first}, where no mbarrier is")
            while self.cta.phases[first][3] & 1 == self.one(operands[1], now):
                yield f"mbarrier {first}"
            self.cta.awaited[first] = self.cta.phases[first][3]
            clocks.wait((self.cta.rank, first), threads)
            return
        if now is not self.everyone:
            raise RuntimeError(f"{'.'.join(op)} of a part of a warp")
        count = self.one(operands[1], now) if len(operands) > 1 else self.kernel.warps * LANES
        barrier = self.cta.named.setdefault(first, [0, 0])
        phase = barrier[1]
        agreed = self.cta.counts.setdefault((first, phase), count) == count
        if not 0 <= first < NAMED_BARRIERS or count % LANES or not agreed:
            raise RuntimeError(f"barrier {first} of {count} threads, {self.cta.counts}")
        barrier[0] += LANES
        clocks.arrive((self.cta.rank, "bar", first), threads)
        if barrier[0] == count:
            barrier[:] = 0, phase + 1
            clocks.full((self.cta.rank, "bar", first))
        if barrier[0] > count:
            raise RuntimeError(f"too many threads arrive at barrier {first}: {barrier[0]} of {count}")
        if op[1] == "sync":
            while barrier[1] == phase:
                yield f"barrier {first}"
            clocks.wait((self.cta.rank, "bar", first), threads)

    def wait_for_cluster(self, op: tuple[str, ...]) -> Iterator[str]:
        cluster, threads = self.cta.cluster, self.numbers
        barrier, clocks = cluster.barrier, cluster.clocks
        if "arrive" in op:
            barrier[0], self.arrived = barrier[0] + LANES, barrier[1]
            if "relaxed" not in op:
                clocks.arrive("cluster", threads)
            if barrier[0] == len(cluster.ctas) * self.kernel.warps * LANES:
                barrier[:] = 0, barrier[1] + 1
                clocks.full("cluster")
        if "wait" in op:
            while barrier[1] == self.arrived:
                yield "cluster"
            clocks.wait("cluster", threads)

    def order(self, op: tuple[str, ...], operands: list[list[str]], now: np.ndarray) -> None:
        """Pass an instruction's order of accesses on to the clocks, and nothing else."""
        threads, clocks = self.numbers[now], self.cta.cluster.clocks
        if op[0] == "bar":
            mask = self.one(operands[0], now)
            if mask & 0xFFFFFFFF != int((now.astype(np.int64) << self.threads).sum()):
                raise RuntimeError(f"{'.'.join(op)} of {mask & 0xFFFFFFFF:b}: others are here")
            clocks.sync_warp(threads)
        elif op[:2] == ("fence", "proxy"):
            clocks.fence(threads)
        elif op[0] == "griddepcontrol":
            self.cta.cluster.depends(self, op[1], now)
        elif op[:2] == ("wgmma", "commit_group"):
            self.products += 1
        elif op[:2] == ("wgmma", "wait_group"):
            count = self.products - self.one(operands[0], now)
            clocks.products_ended(threads, count)

    def watched(self, places: np.ndarray, now: np.ndarray, access: Access = LOAD, cta: Cta | None = None) -> None:
        """Tell the cluster's clocks, if it has some, of an access to bytes at ``places``, a row for each thread; shared
        memory is this CTA's if no ``cta`` is named.
        """
        cluster, clocks = self.cta.cluster, self.cta.cluster.clocks
        if isinstance(clocks, hazards.Unwatched):
            return
        if access.block:
            cluster.accessed(self, access, places, now)
        threads, cta = self.numbers[now], cta or self.cta
        traces = cluster.traces.get(access.block) if access.block else cta.traces
        if traces is None:
            return
        row, stamps = int(self.numbers[0]) // LANES, None
        if access.mbarrier is not None:
            stamps = clocks.started(clocks.entry((cta.rank, access.mbarrier)), cta.phases[access.mbarrier][3] + 1)
        elif access.by == "cp.async":
            stamps = clocks.started(clocks.copies + threads, self.ended + len(self.copies))
        elif access.by == "bulk":
            stamps = clocks.started(clocks.stores + threads, self.stores[now] + 1)
        elif access.by == "wgmma":
            stamps = clocks.started(clocks.products + row, self.products + 1)
        elif cta is not self.cta:
            clocks.reach(cta.rank, threads)
        if by_itself := access.by in ("bulk", "wgmma"):
            row += len(cluster.ctas) * clocks.warps
        proxy = by_itself or access.mbarrier is not None
        clocks.access(traces, places, threads, row, stamps, store=access.store, proxy=proxy, atomic=access.atomic)

    def access(self, op: tuple[str, ...], operands: list[list[str]], now: np.ndarray) -> None:
        if self.cta.traces and "param" not in op:
            data, place = operands if op[0] == "ld" else operands[::-1]
            size, address = int(op[-1][1:]) // 8, sum(self.read(name) for name in place)
            parts = [i for i, name in enumerate(data) if op[0] == "st" or name not in self.kernel.unread]
            within = (size * np.array(parts or [0])[:, None] + np.arange(size)).ravel()
            for block in {*(address[now] >> 32).tolist()}:
                here = now & (address >> 32 == block)
                known = Access(block, op[0] == "st", atomic=not {"acquire", "release"}.isdisjoint(op))
                self.watched((address[here] & 0xFFFFFFFF)[:, None] + within, here, known)
        super().access(op, operands, now)
        if self.cta.traces and op[0] == "st" and len({*address[now].tolist()}) < now.sum():
            self.agreed(data, address, size, now)

    def agreed(self, data: list[str], address: np.ndarray, size: int, now: np.ndarray) -> None:
        """Refuse that threads have stored different numbers to one place at once."""
        for lane in np.flatnonzero(now):
            block, start = self.blocks[int(address[lane]) >> 32], int(address[lane]) & 0xFFFFFFFF
            stored = np.array([self.read(name)[lane] for name in data]).astype(f"u{size}").view(np.uint8)
            if (block[start : start + len(stored)] != stored).any():
                raise hazards.Hazard(f"racecheck: two threads store different numbers to byte {start} at once")

    def act(self, op: tuple[str, ...], operands: list[list[str]], now: np.ndarray) -> None:
        if op[0] == "elect":
            self.write(operands[0][0].split("|")[1], (self.threads == 0).astype(np.int64), now)
        elif op[0] == "mbarrier" and op[1] == "init":
            count, address = self.one(operands[1], now), self.one(operands[0], now)
            if address % 8 or not 0 < count <= MOST_OF_MBARRIER:
                raise RuntimeError(f"an mbarrier of {count} arrivals at {address}")
            self.cta.phases[address] = [count, count, 0, 0]
        elif op[0] == "mbarrier":
            count = self.one(operands[2], now)
            bytes_too = "expect_tx" in op
            for thread in np.flatnonzero(now):
                address = int(sum(self.read(name) for name in operands[1])[thread])
                rank = address >> RANK_BITS
                cta = self.cta.cluster.ctas[rank - 1] if rank else self.cta
                cta.arrive(
                    address & (1 << RANK_BITS) - 1, 1 if bytes_too else count, count if bytes_too else 0,
                    self.numbers[thread : thread + 1],
                )  # fmt: skip
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
            elif "mbarrier::complete_tx::bytes" in op:
                self.copy_bulk(operands, now)
            elif op[1] == "reduce":
                self.add_bulk(operands, now)
            elif "commit_group" in op:
                self.stores[now] += 1
                self.open[now] = False
            elif "wait_group" in op:
                self.stored[now] = ended = self.stores[now] - self.one(operands[0], now)
                self.cta.cluster.clocks.bulk_ended(self.numbers[now], ended)
            else:
                raise NotImplementedError(".".join(op))
        elif op[0] == "multiply":
            if now is not self.everyone:
                raise RuntimeError(f"{'.'.join(op)} of a part of a warp")
            self.multiply(op, operands)
        elif op[0] == "stmatrix":
            rows = sum(self.read(name) for name in operands[0])
            if (rows[: 8 * len(operands[1])] % 16).any():
                raise IndexError(f"stmatrix of rows at {rows}")
            for i, name in enumerate(operands[1]):
                matrix = self.read(name).astype(np.uint32).view(np.uint8).reshape(8, 16)
                if "trans" in op:
                    matrix = matrix.view(np.uint16).T.copy().view(np.uint8)
                here = self.threads // 8 == i
                self.watched(rows[here, None] + np.arange(16), here, STORE)
                self.blocks[0][rows[8 * i : 8 * i + 8, None] + np.arange(16)] = matrix
        elif op[:2] == ("st", "async"):
            self.store_async(operands, now)
        elif op[:2] == ("ld", "shared::cluster"):
            self.load_of_cluster(operands, now)
        elif op[0] in ("ld", "st"):
            self.access(op, operands, now)
        elif op[0] == "red" and op[-1] == "f32":
            self.add_to_memory(operands, now)
        elif op[0] in ("atom", "red"):
            self.change_memory(op, operands, now)
        elif op[0] == "vote":
            if now is not self.everyone:
                raise RuntimeError(f"hangs: {'.'.join(op)} of a part of a warp")
            self.cta.cluster.clocks.shuffle(self.numbers)
            self.vote(op, operands, np.ones(LANES, bool))
        elif op[0] in ("ldmatrix", "mma", "shfl"):
            if now is not self.everyone:
                raise RuntimeError(f"{'.'.join(op)} of a part of a warp")
            if op[0] == "ldmatrix":
                self.watched(sum(self.read(name) for name in operands[1])[:, None] + np.arange(16), now)
            self.cta.cluster.clocks.shuffle(self.numbers)
            self.together(op, operands)
        elif op[0] == "redux":
            self.reduce(op, operands, now)
        elif op[0] == "cvta":
            self.write(operands[0][0], self.read(operands[1][0]), now)
        else:
            self.compute(op, operands, now)

    def reduce(self, op: tuple[str, ...], operands: list[list[str]], now: np.ndarray) -> None:
        """One number of all lanes."""
        if now is not self.everyone:
            raise RuntimeError(f"{'.'.join(op)} of a part of a warp")
        combine = {"max": np.maximum, "min": np.minimum, "add": np.add, "or": np.bitwise_or, "and": np.bitwise_and}
        found = combine[op[2]].reduce(ptx_cta.number(self.read(operands[1][0]), op[-1]))
        self.write(operands[0][0], np.full(LANES, ptx_cta.number(np.asarray(found), op[-1])), now)

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
            access = Access(store=True, mbarrier=int(mbarrier[lane]) % (1 << RANK_BITS))
            self.watched(start + np.arange(4 * len(values)), self.threads == lane, access, cta)
            cta.blocks[0][start : start + 4 * len(values)] = words[:, lane].copy().view(np.uint8)
            cta.arrive(int(mbarrier[lane]) % (1 << RANK_BITS), 0, -4 * len(values))

    def load_of_cluster(self, operands: list[list[str]], now: np.ndarray) -> None:
        """Words of shared memory of a CTA of the cluster."""
        names, place = operands
        source, found = sum(self.read(name) for name in place), np.zeros((len(names), LANES), np.int64)
        for lane in np.flatnonzero(now):
            rank, start = divmod(int(source[lane]), 1 << RANK_BITS)
            cta = self.cta.cluster.ctas[rank - 1]
            if start % (4 * len(names)):
                raise IndexError(f"ld of {len(names)} words from {start}")
            self.watched(start + np.arange(4 * len(names)), self.threads == lane, LOAD, cta)
            found[:, lane] = cta.blocks[0][start : start + 4 * len(names)].view(np.uint32)
        for name, value in zip(names, found, strict=True):
            self.write(name, value, now)

    def add_to_memory(self, operands: list[list[str]], now: np.ndarray) -> None:
        """Add float32 numbers to neighbours in memory, as many as an instruction has."""
        places, values = sum(self.read(name) for name in operands[0]), [floats(self.read(name)) for name in operands[1]]
        for lane in np.flatnonzero(now):
            start, block = int(places[lane]) & 0xFFFFFFFF, self.blocks[int(places[lane]) >> 32]
            end = start + 4 * len(values)
            if start % (4 * len(values)) or end > len(block):
                raise IndexError(f"red at byte {start} of {len(block)}")
            access = Access(int(places[lane]) >> 32, store=True, atomic=True)
            self.watched(np.arange(start, end), self.threads == lane, access)
            block[start:end].view(np.float32)[:] += [each[lane] for each in values]

    def change_memory(self, op: tuple[str, ...], operands: list[list[str]], now: np.ndarray) -> None:
        """Change numbers in memory at once, lane after lane; ``atom`` says what was there."""
        *result, place, value = operands
        change = next(ptx_cta.ARITHMETIC[part] for part in op[1:] if part in ("add", "min", "max", "and", "or", "xor"))
        places, values, size = sum(self.read(name) for name in place), self.read(value[0]), int(op[-1][1:]) // 8
        found = np.zeros(LANES, np.int64)
        for lane in np.flatnonzero(now):
            number, start = int(places[lane]) >> 32, int(places[lane]) & 0xFFFFFFFF
            block = self.blocks[number]
            if start % size or start + size > len(block):
                raise IndexError(f"{'.'.join(op)} at byte {start} of {len(block)}")
            self.watched(start + np.arange(size), self.threads == lane, Access(number, store=True, atomic=True))
            there = block[start : start + size].view(ptx_cta.dtype_of(op[-1]))
            found[lane] = there[0]
            new = change(found[lane : lane + 1], ptx_cta.number(values[lane : lane + 1], op[-1]))
            there[:] = new.astype(there.dtype)
        if result:
            self.write(result[0][0], found, now)

    def copy_async(self, op: tuple[str, ...], operands: list[list[str]], now: np.ndarray) -> None:
        """Begin copies, of which the last bytes may be zeros; commit or await a group of copies."""
        if op[2] == "commit_group":
            self.copies.append([])
        elif op[2] == "wait_group":
            self.end_copies(len(self.copies) - 1 - self.one(operands[0], now))
        elif op[2] == "mbarrier":  # arrives when the copies so far are done, as they are at once
            self.end_copies(len(self.copies))
            self.copies.append([])
            self.cta.arrive(self.one(operands[0], now), int(now.sum()), 0, self.numbers[now])
        else:
            target, source = (sum(self.read(name) for name in place) for place in operands[:2])
            size, width = self.read(operands[-1][0]), int(operands[2][0])
            if width not in ((16,) if "cg" in op else (4, 8, 16)) or ((size < 0) | (size > width))[now].any():
                raise IndexError(f"{'.'.join(op)} of {size} of {width} bytes")
            for lane in np.flatnonzero(now):
                start, block = int(source[lane]) & 0xFFFFFFFF, self.blocks[int(source[lane]) >> 32]
                self.within(int(target[lane]), width)
                if target[lane] % width or start % width or start + size[lane] > len(block):
                    raise IndexError(f"cp.async from byte {start} of {len(block)} to {target[lane]}")
                self.copies[-1].append((int(target[lane]), int(source[lane]), int(size[lane]), width))
            self.watched(target[now, None] + np.arange(width), now, Access(store=True, by="cp.async"))

    def copy_bulk(self, operands: list[list[str]], now: np.ndarray) -> None:
        """Neighbouring bytes of memory to shared memory, which an mbarrier counts."""
        target, source, size, barrier = (sum(self.read(name) for name in each) for each in operands[:4])
        for lane in np.flatnonzero(now):
            start, block = int(source[lane]) & 0xFFFFFFFF, self.blocks[int(source[lane]) >> 32]
            count = int(size[lane])
            self.within(int(target[lane]), count)
            if target[lane] % 16 or start % 16 or count % 16 or start + count > len(block):
                raise IndexError(f"bulk copy of {count} bytes from byte {start} of {len(block)} to {target[lane]}")
            read = Access(int(source[lane]) >> 32, mbarrier=int(barrier[lane]))
            self.watched(start + np.arange(count), self.threads == lane, read)
            access = Access(store=True, mbarrier=int(barrier[lane]))
            self.watched(int(target[lane]) + np.arange(count), self.threads == lane, access)
            self.blocks[0][target[lane] : target[lane] + count] = block[start : start + count]
            self.cta.load(int(barrier[lane]), count)

    def add_bulk(self, operands: list[list[str]], now: np.ndarray) -> None:
        """Neighbouring numbers in float32 in shared memory, added to those in memory."""
        target, source, size = (sum(self.read(name) for name in each) for each in operands[:3])
        for lane in np.flatnonzero(now):
            start, block = int(target[lane]) & 0xFFFFFFFF, self.blocks[int(target[lane]) >> 32]
            count = int(size[lane])
            self.within(int(source[lane]), count)
            self.open[lane] = True
            if source[lane] % 16 or start % 16 or count % 16 or start + count > len(block):
                raise IndexError(f"bulk sum of {count} bytes from {source[lane]} to byte {start} of {len(block)}")
            self.watched(int(source[lane]) + np.arange(count), self.threads == lane, Access(by="bulk"))
            access = Access(int(target[lane]) >> 32, store=True, atomic=True)
            self.watched(start + np.arange(count), self.threads == lane, access)
            shared = self.blocks[0][source[lane] : source[lane] + count]
            block[start : start + count].view(np.float32)[:] += shared.view(np.float32)

    def within(self, start: int, count: int) -> None:
        """Refuse so many bytes that are not all in shared memory."""
        if start < 0 or start + count > len(self.blocks[0]):
            raise IndexError(f"{count} bytes at byte {start} of {len(self.blocks[0])} of shared memory")

    def end_copies(self, groups: int) -> None:
        """Copy the first groups of copies."""
        self.ended += max(groups, 0)
        self.cta.cluster.clocks.copies_ended(self.numbers, self.ended)
        for target, source, size, width in (each for _ in range(groups) for each in self.copies.pop(0)):
            self.blocks[0][target : target + width] = 0
            self.blocks[0][target : target + size] = self.blocks[source >> 32][source & 0xFFFFFFFF :][:size]

    def copy(self, operands: list[list[str]], now: np.ndarray, taking: Sequence[Cta], added: bool) -> None:
        """A part of a matrix by TMA into these CTAs, with zeros for what lies outside of it; where there are none, from
        this one into the matrix, or ``added`` to it.
        """
        shared, (name, *at) = operands[:2] if taking else operands[1::-1]
        which = self.cta.cluster.maps[self.one([name], now)]
        coordinates, start = [self.one([coordinate], now) for coordinate in at], self.one(shared, now)
        # Strides are whole vectors. On a card these are an illegal instruction.
        if coordinates[0] * which.dtype.itemsize % 16 or start % TMA_BYTES:
            raise IndexError(f"TMA of elements from {coordinates} on of {which.dtype} at byte {start} of shared memory")
        places = which.places(start)
        self.within(int(places.min()), int(places.max() - places.min()) + 1)
        if not taking:
            self.open[now] = True
            self.watched(places, now, Access(by="bulk"))
            which.store(self, coordinates, self.blocks[0][places], added)
            return
        tile, mbarrier = which.load(self, coordinates), self.one(operands[2], now)
        for cta in taking:
            self.watched(places, now, Access(store=True, mbarrier=mbarrier), cta)
            cta.blocks[0][places] = tile
            cta.load(mbarrier, tile.size)

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
        if descriptor >> 49 & 7:
            raise NotImplementedError(f"an operand whose swizzle begins {descriptor >> 49 & 7} rows further")
        row, k = np.asarray(rows)[:, None], np.arange(32 // size)
        if turned:
            inside = width // 2  # rows of the operand
            leading, stride = (stride, leading) if width == 16 else (leading, stride)
            address = start + row // inside * leading + k // 8 * stride + k % 8 * width + row % inside * 2
        else:
            address = start + row // 8 * stride + row % 8 * width + size * k
            if width == 16:
                address += k // 8 * (leading - 16)
        places = swizzled(address, width)
        if self.cta.traces:
            each = (places[..., None] + np.arange(size)).reshape(1, -1)
            self.watched(each, self.threads == 0, Access(by="wgmma"))
        return self.blocks[0].view(kind)[places // size].astype(np.float32)
