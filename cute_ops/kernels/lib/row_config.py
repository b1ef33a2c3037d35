"""Configs of kernels on rows. Nothing here needs the compiler: declarations import it."""

from __future__ import annotations

from cute_ops.declaration.config import KernelConfig


class RowConfig(KernelConfig):
    """How rows spread over threads and CTAs.

    Attributes:
        form: the kernel's form; each family has its own.
        threads: of a CTA.
        threads_per_row: of each CTA; 0 if all threads of a CTA walk over a row.
        cluster: CTAs that share a row.
        resident: CTAs that are to fit on an SM together: a cap on registers.
        align_vectors: the start of an unaligned row is rounded down to a multiple of this many vectors.
        balanced: a CTA holds the fewest whole warps' vectors that suffice, so that some threads have no last one.
    """

    form: str
    threads: int
    threads_per_row: int = 0
    cluster: int = 1
    resident: int = 1
    align_vectors: int = 1
    balanced: bool = False
