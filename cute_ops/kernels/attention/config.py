"""What the kernels around attention are configured with."""

from __future__ import annotations

from dataclasses import dataclass

from cute_ops.declaration.config import KernelConfig


@dataclass(frozen=True)
class AppendConfig(KernelConfig):
    """How the vectors of tokens spread over threads.

    Attributes:
        threads: of a CTA, at most.
        threads_per_token: threads that copy the keys or the values of one token.
        unroll: vectors that a thread has in flight.
    """

    threads: int
    threads_per_token: int
    unroll: int


@dataclass(frozen=True)
class AttentionConfig(KernelConfig):
    """The tile of keys of attention, and what is done to scores.

    Attributes:
        tile_n: keys of a tile.
        sms: CTAs that run at a time.
        mask: the expression of the mask; empty if there is none.
        bounds: the expression of the mask's bounds over a tile.
        score: the expression of a change of scores; empty if there is none.
    """

    tile_n: int
    sms: int
    mask: str = ""
    bounds: str = ""
    score: str = ""


@dataclass(frozen=True)
class AttentionBackwardConfig(KernelConfig):
    """The tiles of attention's gradients, and what is done to scores.

    Attributes:
        tile_k: keys of a tile of the kernel of queries.
        key_stages: tiles of keys and values in shared memory.
        tile_q: queries of a tile of the kernel of keys and values.
        query_stages: tiles of queries and cotangents in shared memory.
        mask: the expression of the mask; empty if there is none.
        bounds: the expression of the mask's bounds over a tile.
        score: the expression of a change of scores; empty if there is none.
        dscore: the expression of its gradient.
    """

    tile_k: int
    key_stages: int
    tile_q: int
    query_stages: int
    mask: str = ""
    bounds: str = ""
    score: str = ""
    dscore: str = ""
