"""Config of the kernel of rows times a number each."""

from __future__ import annotations

from cute_ops.declaration.config import KernelConfig


class ScaleConfig(KernelConfig):
    """``unroll`` vectors of each of ``threads`` threads at a time, in ``ctas`` persistent CTAs."""

    threads: int
    unroll: int
    ctas: int
