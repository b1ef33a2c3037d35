"""How rows are cut for the search of their largest numbers."""

from __future__ import annotations

from dataclasses import dataclass

from cute_ops.kernels.lib.row_config import RowConfig

# Columns of a segment, of which each gives its k largest: 16 bits of a key count them backwards.
SEGMENT = 8192


@dataclass(frozen=True)
class TopkConfig(RowConfig):
    """How segments spread over threads.

    Attributes:
        groups: ``select``: groups of a segment's columns whose largest numbers bound the k-th from below.
    """

    groups: int = 0
