"""How rows are cut for the search of their largest numbers."""

from __future__ import annotations

from dataclasses import dataclass

# Columns of a segment, which a warp holds in registers: 32 numbers a lane.
SEGMENT = 1024


@dataclass(frozen=True)
class TopkConfig:
    """``warps`` of a CTA, each of which takes a segment of another row."""

    warps: int = 4
