"""What the kernels of our functions' parts are configured with."""

from __future__ import annotations

from dataclasses import dataclass

from cute_ops.config import KernelConfig


@dataclass(frozen=True)
class EmbeddingConfig(KernelConfig):
    """How the classes of an embedding's gradient spread over threads.

    Attributes:
        threads: of a CTA.
        threads_per_group: those that share a row, or the part of it that a CTA takes: a group.
        classes: classes of a group.
        chunk: tokens of one class that are added up beforehand.
        resident: CTAs that are to fit on an SM together: a cap on registers.
    """

    threads: int
    threads_per_group: int
    classes: int
    chunk: int
    resident: int


@dataclass(frozen=True)
class ScaleConfig(KernelConfig):
    """``unroll`` vectors of each of ``threads`` threads at a time, in ``ctas`` persistent CTAs."""

    threads: int
    unroll: int
    ctas: int
