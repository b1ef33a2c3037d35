"""How rows are cut for the search of their largest numbers, and how sums of rows spread over threads."""

from __future__ import annotations

from cute_ops.declaration.config import KernelConfig
from cute_ops.kernels.lib.row_config import RowConfig

# Columns of a segment, of which each gives its k largest: 16 bits of a key count them backwards.
SEGMENT = 8192
# Rows that do not start on multiples of half a vector are moved into place if they have at least this many vectors.
MOVED_FROM = 8
# Counts of classes that are loaded together.
QUAD = 4


class TopkConfig(RowConfig):
    """How segments spread over threads.

    Attributes:
        groups: ``select``: groups of a segment's columns whose largest numbers bound the k-th from below.
        unroll: ``sort``: rows of a thread, of which it shares each with the same threads.
    """

    groups: int = 0
    unroll: int = 1


class RouteConfig(RowConfig):
    """How rows are routed in one pass, by persistent CTAs: as :class:`TopkConfig` sorts them.

    Attributes:
        ctas: how many there are.
        ahead: how many tiles ahead of a CTA's rows their logits are prefetched to L2; 0: none are.
        unroll: tiles that a CTA loads, and computes, at a time.

    In the form ``vectors`` only the vectors of a row are sorted whose largest numbers are the largest; in ``route`` all
    numbers.
    """

    ctas: int = 0
    ahead: int = 0
    unroll: int = 1


class GatherConfig(KernelConfig):
    """``threads`` of a CTA; ``threads_per_row`` share a row, ``unroll`` vectors each of every named row at a time."""

    threads: int
    threads_per_row: int
    unroll: int


class PlacesConfig(KernelConfig):
    """``ctas`` CTAs of ``threads`` threads share the numbers that are sorted by class."""

    threads: int
    ctas: int
