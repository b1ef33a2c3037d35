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
