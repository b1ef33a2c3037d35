"""Finds what lock step hides: unordered accesses, waits without an end, kernels that do not wait.

Every thread has vector clocks: which stores and which loads of each thread of its cluster happened before. Barriers and
mbarriers merge the clocks, shuffles those of loads only. Two accesses of a byte, one of them a store, are a race if the
earlier one did not happen before the later one by these clocks; accesses of two clusters always are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_ops.hardware import WARP

STORES, LOADS = slice(0, 1), slice(1, 2)  # of clocks
MOST = 1 << 26  # bytes of shared memory times threads of a cluster: beyond, only one of several readers is remembered


class Race(RuntimeError):
    """Two threads meet at an address, or one waits for ever."""


class Mbarrier:
    """Arrivals of a phase and those that are missing, bytes that are missing, the phase and the last one waited for."""

    def __init__(self, count: int, threads: int) -> None:
        self.count = self.missing = count
        self.bytes = self.phase = self.seen = 0
        self.clock = np.zeros((2, threads), np.int32)

    def arrive(self, arrivals: int, expected: int, clock: np.ndarray) -> None:
        self.missing -= arrivals
        self.bytes += expected
        np.maximum(self.clock, clock, out=self.clock)
        if self.missing < 0:
            raise Race("too many arrivals at an mbarrier")
        if not self.missing and not self.bytes:
            self.missing, self.phase = self.count, self.phase + 1


class Traces:
    """Who has stored and who has read the bytes of a memory, and when; nobody is -1."""

    def __init__(self, threads: int, shared: bool) -> None:
        self.threads, self.shared = threads, shared
        self.writer, self.stored, self.reader, self.read = np.zeros((4, 0), np.int32)
        self.readers: np.ndarray | None = None  # by thread of the cluster, when it has read

    def fit(self, size: int) -> None:
        more = size - self.writer.size
        if more <= 0:
            return
        none, never = np.full(more, -1, np.int32), np.zeros(more, np.int32)
        self.writer, self.reader = (np.concatenate([a, none]) for a in (self.writer, self.reader))
        self.stored, self.read = (np.concatenate([a, never]) for a in (self.stored, self.read))
        before, self.readers = self.readers, None
        if self.shared and self.threads * size <= MOST:
            self.readers = np.zeros((self.threads, size), np.int32)
            if before is not None:
                self.readers[:, : before.shape[1]] = before


class Order:
    """The clocks of a launch.

    Args:
        count, threads, ctas: threads altogether, of a CTA, and CTAs of a cluster.
        early: whether the kernel may start before the previous one has ended.
        known: whether it does not start before that one's own wait has ended.
    """

    def __init__(self, count: int, threads: int, ctas: int, early: bool, known: bool) -> None:
        self.known, self.tells = known, True
        self.threads, self.size = threads, threads * ctas
        self.cluster, self.own = np.divmod(np.arange(count), self.size)
        self.every = np.arange(count)
        self.clocks = np.zeros((2, count, self.size), np.int32)  # of stores, and of loads
        self.clocks[:, self.every, self.own] = 1
        self.waited = np.full(count, not early)
        self.together = np.full(count, ctas == 1)  # whether the thread knows that all CTAs of its cluster run
        self.traces: dict[int, Traces] = {}
        self.mbarriers: dict[int, Mbarrier] = {}

    def barrier(self, mask: np.ndarray) -> None:
        self._join(mask, self.threads)

    def sync_warp(self, mask: np.ndarray) -> None:
        self._join(mask, min(WARP, self.threads))

    def shuffle(self, mask: np.ndarray) -> None:
        """Values have arrived before a lane shuffles them, so the other lanes know of its loads."""
        self._join(mask, min(WARP, self.threads), LOADS)

    def cluster_wait(self, mask: np.ndarray) -> None:
        """Accesses are not put in order: threads arrive relaxed."""
        if not mask.all():
            raise Race("a barrier of a cluster: some threads are elsewhere")
        self.together[:] = True

    def wait_for_previous(self, mask: np.ndarray) -> None:
        self.waited |= mask

    def let_next_start(self, mask: np.ndarray) -> None:
        """Note whether the next kernel knows by its start that this one has waited."""
        self.tells &= bool(self.waited[mask].all())

    def _join(self, mask: np.ndarray, size: int, of: slice = slice(None)) -> None:
        """So many neighbours wait for each other: all of them or none."""
        here = mask.reshape(-1, size)
        some = np.asarray(here.any(1))
        if (some != here.all(1)).any():
            raise Race(f"a barrier: {here.sum(1)[some].min()} of {size} threads are here")
        clocks = self.clocks[of].reshape(-1, len(some), size, self.size)
        clocks[:, some] = clocks[:, some].max(2, keepdims=True)
        self._next(mask)

    def _next(self, mask: np.ndarray) -> None:
        """Advance these threads' own clocks: others do not know yet what they do from now on."""
        self.clocks[:, self.every[mask], self.own[mask]] += 1

    def access(self, memory: Any, shared: bool, places: np.ndarray, active: np.ndarray, size: int, store: bool) -> None:
        """Note, and compare with those noted, accesses of so many bytes at ``places``, (elements, threads)."""
        # What kernels before the previous one wrote may be there already.
        early = not shared and not self.waited[active.any(0)].all()
        if early and (store or not self.known or memory.stores[places[active]].any()):
            raise Race("memory is accessed before the previous kernel is waited for")
        traces = self.traces.setdefault(id(memory), Traces(self.size, shared))
        traces.fit(memory.bytes.size)
        element, thread = np.nonzero(active)
        place = (places[element, thread][:, None] + np.arange(size)).ravel()
        thread = np.repeat(thread, size)
        self._compare(traces.writer[place], traces.stored[place], thread, STORES)
        when = self.clocks[0, thread, self.own[thread]]
        if not store:
            if traces.readers is not None:
                traces.readers[self.own[thread], place] = when
            traces.reader[place], traces.read[place] = thread, when
            return
        self._compare(traces.reader[place], traces.read[place], thread, LOADS)
        if traces.readers is not None:
            late = traces.readers[:, place] > self.clocks[1][thread].T
            late[self.own[thread], np.arange(thread.size)] = False
            if late.any():
                raise Race(f"a store follows a load by another thread without a barrier: byte {place[late.any(0)][0]}")
        order = np.argsort(place, kind="stable")
        if ((np.diff(place[order]) == 0) & (np.diff(thread[order]) != 0)).any():
            raise Race("two threads store to one place at once")
        traces.writer[place], traces.stored[place] = thread, when

    def _compare(self, other: np.ndarray, when: np.ndarray, thread: np.ndarray, of: slice) -> None:
        known = np.where(self.cluster[other] == self.cluster[thread], self.clocks[of][0][thread, self.own[other]], 0)
        if ((other >= 0) & (other != thread) & (when > known)).any():
            what = "a store" if of is STORES else "a load"
            raise Race(f"an access follows {what} by another thread without a barrier")

    # mbarriers, by their addresses

    def initialise(self, mask: np.ndarray, addresses: np.ndarray, count: int) -> None:
        for thread in np.flatnonzero(mask):
            self.mbarriers[int(addresses[thread])] = Mbarrier(count, self.size)

    def arrive(self, mask: np.ndarray, addresses: np.ndarray, arrivals: int, expected: int) -> None:
        if not self.together[mask].all():
            raise Race("an mbarrier is used before the whole cluster is known to run")
        for thread in np.flatnonzero(mask):
            self.mbarriers[int(addresses[thread])].arrive(arrivals, expected, self.clocks[:, thread])
        self._next(mask)

    def wait(self, mask: np.ndarray, addresses: np.ndarray, parity: np.ndarray) -> None:
        for address in np.unique(addresses[mask]):
            mbarrier, here = self.mbarriers[int(address)], mask & (addresses == address)
            if (parity[here] == mbarrier.phase % 2).any():
                raise Race(f"waits for ever: {mbarrier.missing} arrivals and {mbarrier.bytes} bytes are missing")
            mbarrier.seen = mbarrier.phase
            self.clocks[:, here] = np.maximum(self.clocks[:, here], mbarrier.clock[:, None])

    def end(self) -> None:
        for mbarrier in self.mbarriers.values():
            if mbarrier.bytes or mbarrier.missing != mbarrier.count or mbarrier.seen != mbarrier.phase:
                raise Race("a CTA ends while an mbarrier of it is in use")
