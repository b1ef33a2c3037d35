"""What the kernels of row functions are configured with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cute_ops.config import KernelConfig
from cute_ops.kernels.lib.row_config import RowConfig


@dataclass(frozen=True)
class ReduceConfig(RowConfig):
    """A reduction over each row: rows wait in registers (``one_pass``) or in shared memory (``smem``) for what follows
    from it, or are read again (``two_pass``).

    Attributes:
        parts_per_cta: parts of a row that one CTA takes one after another in two passes. The parts of a cluster's CTAs
            give the same bits.
    """

    form: Literal["one_pass", "smem", "two_pass"]
    parts_per_cta: int = 1


@dataclass(frozen=True)
class MapConfig(RowConfig):
    """Outputs element by element: rows of a CTA (``rows``), a row in segments of a CTA each (``segments``), or a row of
    any length to a CTA, one element of a thread at a time (``elements``).

    Attributes:
        segments: CTAs that share a row.
    """

    form: Literal["rows", "segments", "elements"]
    segments: int = 1


@dataclass(frozen=True)
class PointwiseConfig(KernelConfig):
    """``unroll`` vectors of each of ``threads`` threads, whatever row they are of."""

    threads: int
    unroll: int
