"""Config of the kernel of an embedding's gradient."""

from __future__ import annotations

from cute_ops.declaration.config import KernelConfig

# Rows that do not start on half a vector are moved into place if they have so many vectors.
LEAST_VECTORS = 8


class EmbeddingConfig(KernelConfig):
    """How the classes of an embedding's gradient spread over threads.

    Attributes:
        threads: of a CTA.
        threads_per_group: threads that share a row, or a CTA's share of a long row: a group.
        classes: classes of a group.
        chunk: tokens of one class that the first launch adds up.
        resident: CTAs that are to fit on an SM together: a cap on registers.
    """

    threads: int
    threads_per_group: int
    classes: int
    chunk: int
    resident: int
