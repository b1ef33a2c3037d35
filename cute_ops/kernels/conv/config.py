"""Configs of the convolution kernels."""

from __future__ import annotations

from cute_ops.declaration.config import KernelConfig
from cute_ops.hardware import WARP


class ConvConfig(KernelConfig):
    """How sequences and channels spread over threads.

    Attributes:
        threads: of a CTA at most.
        channels: that a thread holds at most: as many as alignment allows.
        ahead: rows that a thread loads ahead, at least.
        span: rows that a thread of the forward walks through, about: fewer where the GPU has room for more threads.
        resident: CTAs of so many threads that are to fit on an SM together: a cap on registers.
        sms: SMs of the GPU: threads walk through fewer rows until there are CTAs for all of them.
    """

    threads: int
    channels: int
    ahead: int
    resident: int
    sms: int
    span: int = 0

    def apart(self, n: int | None, start: int) -> bool:
        """Whether a thread's channels are a warp apart: if rows have two warps of channels or more, and start on
        multiples of ``start`` elements, fewer than a thread holds.
        """
        return n is not None and n >= 2 * WARP and start < self.channels

    def vec(self, n: int | None, start: int) -> int:
        """Channels of a thread."""
        return self.channels if self.apart(n, start) else min(self.channels, start)

    def spread(self, n: int | None, start: int) -> tuple[int, int, int]:
        """(threads of a row in a CTA, threads at the same channels, CTAs of an SM)."""
        vectors = None if n is None else -(-n // self.vec(n, start))
        if vectors is not None and self.apart(n, start):
            vectors = -(-vectors // WARP) * WARP
        return self.lanes(vectors), self.depth(vectors), self.ctas(vectors)

    def lanes(self, vectors: int | None) -> int:
        """Vectors of a row that a CTA takes, side by side: whole warps if it takes a share of the row, so that it
        begins on a whole sector of memory. Fewer warps than allowed where that leaves fewer of them idle.
        """
        if vectors is None:
            return WARP
        if vectors <= self.threads:
            return vectors
        warps, most = -(-vectors // WARP), self.threads // WARP
        return WARP * min(range(most, most // 2, -1), key=lambda count: -warps % count)

    def depth(self, vectors: int | None) -> int:
        """Threads of a CTA at the same channels."""
        return max(self.threads // self.lanes(vectors), 1)

    def ctas(self, vectors: int | None) -> int:
        """CTAs that are to fit on an SM together."""
        return self.resident * self.threads // (self.lanes(vectors) * self.depth(vectors))


class FirstConfig(KernelConfig):
    """Where positions are neighbours in memory.

    Attributes:
        threads: of a CTA.
        steps: vectors of a row that a thread of the forward has.
        ahead: vectors of a row for which a thread of the gradient prefetches to L2.
        lanes: of a warp, that take a row of the gradient.
    """

    threads: int
    steps: int = 1
    ahead: int = 0
    lanes: int = WARP
