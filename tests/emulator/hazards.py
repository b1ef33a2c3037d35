"""racecheck and initcheck of an emulated cluster: unordered accesses, and loads of memory that nobody has written.

Every thread has a vector clock: how much it knows to have been done by each thread, and by what goes on beside threads:
copies by cp.async, bulk stores, products of WGMMA, what TMA brings to an mbarrier. An access is stamped with an entry
of the clocks and its count. Two accesses of a byte, one of them a store, are a race unless the later thread's clock has
come to the earlier one's stamp. Barriers, mbarriers and waits for copies pass clocks on. What threads have stored must
be fenced before TMA or WGMMA read it: a clock has a second half, of what is known to be fenced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

LANES, MBARRIERS = 32, 64
BITS = 32  # of a stamp below the entry's number
COUNT, ATOMIC = (1 << BITS) - 1, np.int64(1 << 62)


class Hazard(RuntimeError):
    """A race, a read of what nobody has written, or a thread that goes on before others can know of it."""


def atomic(stamps: np.ndarray) -> np.ndarray:
    """Whether these are stamps of atomic stores."""
    return stamps >= ATOMIC


class Unwatched:
    """Takes the calls of :class:`Clocks` and does nothing, for kernels that are not watched."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Traces:
    """Stamps of the last store to each byte, and of each warp's last load of it, by threads and by copies."""

    def __init__(self, name: str, size: int, warps: int, written: np.ndarray | None = None) -> None:
        self.name, self.written = name, np.ones(size, bool) if written is None else written  # before
        self.stores = np.zeros(size, np.int64)
        self.loads = np.zeros((2 * warps, size), np.int64)
        self.read_by: set[int] = set()  # rows of loads


class Clocks:
    """The clocks of a cluster.

    Args:
        ctas: how many.
        warps: of a CTA.
    """

    def __init__(self, ctas: int, warps: int) -> None:
        self.warps, threads = warps, ctas * warps * LANES
        # Entries: threads, their copies by cp.async, their bulk stores, warps' products, mbarriers.
        self.copies, self.stores, self.products = threads, 2 * threads, 3 * threads
        self.mbarriers = 3 * threads + ctas * warps
        # What a thread knows, then what of that it knows to be fenced.
        self.fenced = self.mbarriers + MBARRIERS * ctas
        self.known = np.zeros((threads, 2 * self.fenced), np.int32)
        self.every = np.arange(threads)
        self.known[self.every, self.every] = 1
        self.shuffled = np.zeros(threads, np.int32)  # what a thread had done at its warp's last exchange of numbers
        self.waiting: dict[Any, np.ndarray] = {}  # what those know who have arrived at a barrier
        self.passed: dict[Any, np.ndarray] = {}  # and those of the last phase
        self.entries: dict[tuple[int, int], int] = {}  # of mbarriers
        self.remote: list[tuple[int, int]] = []  # a CTA, and the stamp of another one's access to it

    # What puts accesses in order

    def sync_warp(self, threads: np.ndarray) -> None:
        self.known[threads] = self.known[threads].max(0)
        self.known[threads, threads] += 1

    def shuffle(self, threads: np.ndarray) -> None:
        """Let other lanes store to places that a warp has loaded: loads arrive before lanes exchange numbers."""
        self.shuffled[threads] = self.known[threads, threads]
        self.known[threads, threads] += 1

    def arrive(self, barrier: Any, threads: np.ndarray) -> None:
        clock = self.known[threads].max(0)
        self.waiting[barrier] = np.maximum(self.waiting[barrier], clock) if barrier in self.waiting else clock
        self.known[threads, threads] += 1

    def full(self, barrier: Any, phases: int = 0) -> None:
        """All have arrived; of an mbarrier so many phases have ended, and the copies of these."""
        none = np.zeros(self.known.shape[1], np.int32)  # all have arrived relaxed
        self.passed[barrier] = passed = self.waiting.pop(barrier, none)
        if phases:
            passed[self.entry(barrier)] = phases

    def wait(self, barrier: Any, threads: np.ndarray) -> None:
        if barrier in self.passed:  # else an mbarrier whose phase before the first one is waited for
            self.known[threads] = np.maximum(self.known[threads], self.passed[barrier])

    def fence(self, threads: np.ndarray) -> None:
        self.known[threads, self.fenced :] = self.known[threads, : self.fenced]

    def started(self, entry: np.ndarray | int, count: Any) -> Any:
        """Stamps of copies that are begun now."""
        return (np.asarray(entry, np.int64) << BITS) + count

    # Threads have waited for this many groups.

    def copies_ended(self, threads: np.ndarray, count: int) -> None:
        self.known[threads, self.copies + threads] = count

    def bulk_ended(self, threads: np.ndarray, count: np.ndarray) -> None:
        self.known[threads, self.stores + threads] = count

    def products_ended(self, threads: np.ndarray, count: int) -> None:
        self.known[threads, self.products + threads // LANES] = count

    def entry(self, mbarrier: tuple[int, int]) -> int:
        return self.entries.setdefault(mbarrier, self.mbarriers + len(self.entries))

    # Accesses

    def access(
        self, traces: Traces, places: np.ndarray, threads: np.ndarray, row: int, stamps: Any = None, *,
        store: bool, proxy: bool = False, atomic: bool = False,
    ) -> None:  # fmt: skip
        """Check and note accesses.

        Args:
            places: of bytes, a row for each thread.
            row: of loads, the warp's.
            stamps: of who copies, by default the threads.
            proxy: whether TMA or WGMMA access memory, for which threads must fence what they have stored.
            atomic: two of these are no race.
        """
        places = places.reshape(len(threads), -1)
        last = traces.stores[places]
        both = atomic & (last >= ATOMIC)
        last &= ATOMIC - 1
        access = "a store to" if store else "a load of"
        self._refuse(self._late(last, threads) & ~both, last, (f"{access} {traces.name}", places, threads), "a store")
        if proxy:
            unfenced = (last >> BITS < self.stores) & self._late(last, threads, self.fenced)
            self._refuse(
                unfenced, last, (f"TMA's or WGMMA's use of {traces.name}", places, threads), "an unfenced store"
            )
        stamps = np.broadcast_to(np.reshape(self.stamps(threads) if stamps is None else stamps, (-1, 1)), places.shape)
        if not store:
            if not last.all() and (unwritten := (last == 0) & ~traces.written[places]).any():
                raise Hazard(
                    f"initcheck: a load of byte {places[unwritten].min()} of {traces.name}, which nobody has written"
                )
            traces.loads[row, places] = stamps
            traces.read_by.add(row)
            return
        for other in traces.read_by:
            loads = traces.loads[other][places]
            late = self._late(loads, threads)
            if late.any():
                late &= ~self._exchanged(loads, threads)
            self._refuse(late, loads, (f"a store to {traces.name}", places, threads), "a load")
        traces.stores[places] = stamps | atomic * ATOMIC

    def _late(self, stamps: np.ndarray, threads: np.ndarray, part: int = 0) -> np.ndarray:
        """Whether these threads do not know, or know to be fenced, of what was stamped."""
        return (stamps & COUNT) > self.known[threads[:, None], part + (stamps >> BITS)]

    def _exchanged(self, loads: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """Whether these are loads by other lanes before the warp's last exchange of numbers."""
        entry = loads >> BITS
        own = (entry < self.copies) & (entry // LANES == threads[:, None] // LANES)
        return own & ((loads & COUNT) <= self.shuffled[np.where(own, entry, 0)])

    def _refuse(
        self, late: np.ndarray, stamps: np.ndarray, access: tuple[str, np.ndarray, np.ndarray], other: str
    ) -> None:
        if not late.any():
            return
        (i, j), (what, places, threads) = np.argwhere(late)[0], access
        by, before = self.said(int(threads[i])), self.said(int(stamps[i, j] >> BITS))
        raise Hazard(f"racecheck: {what} at byte {places[i, j]} by {by} follows {other} by {before}, out of order")

    def said(self, entry: int) -> str:
        """An entry in words."""
        kinds = {
            "TMA for mbarrier": self.mbarriers, "WGMMA of warp": self.products, "a bulk store of thread": self.stores,
            "cp.async of thread": self.copies, "thread": 0,
        }  # fmt: skip
        name, first = next(each for each in kinds.items() if entry >= each[1])
        return f"{name} {entry - first}"

    def stamps(self, threads: np.ndarray) -> np.ndarray:
        """Stamps of accesses that these threads make now."""
        return self.started(threads, self.known[threads, threads])

    def reach(self, cta: int, threads: np.ndarray) -> None:
        """These threads access another CTA's shared memory."""
        self.remote.extend((cta, int(stamp)) for stamp in self.stamps(threads))

    def end(self) -> None:
        """All threads have ended: a CTA's do not before they know of other CTAs' accesses to its memory."""
        known = self.known.reshape(-1, self.warps * LANES, self.known.shape[1]).max(1)
        for cta, stamp in self.remote:
            if known[cta, stamp >> BITS] < stamp & COUNT:
                raise Hazard(f"CTA {cta} may end before {self.said(stamp >> BITS)} accesses its shared memory")
