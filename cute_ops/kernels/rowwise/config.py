"""Configs of the kernels of row functions."""

from __future__ import annotations

from typing import Literal

from cute_ops.kernels.lib.row_config import RowConfig


class ReduceConfig(RowConfig):
    """A reduction over each row, and the outputs that need its result: until then rows stay in registers (``one_pass``)
    or in shared memory (``smem``), or they are read again (``two_pass``). A softmax of short unaligned rows is an
    ``expression``.

    Attributes:
        segments_per_cta: segments of a row that one CTA takes one after another in two passes. A cluster whose CTAs
            take one each gives the same bits.
    """

    form: Literal["one_pass", "smem", "two_pass", "expression"]
    segments_per_cta: int = 1


class MapConfig(RowConfig):
    """Outputs element by element: a CTA takes whole rows (``rows``), a segment of a row (``segments``), or a row of any
    length with one element per thread at a time (``elements``). Compact tensors are one long row (``flat``) in ops that
    have this form; other tensors are taken by segments there.

    Attributes:
        segments: CTAs that share a row.
    """

    form: Literal["rows", "segments", "elements", "flat"]
    segments: int = 1
