"""Configs of the kernels of expressions."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Literal

from cute_ops.declaration.config import KernelConfig
from cute_ops.hardware import WARP
from cute_ops.kernels.lib.row_config import RowConfig

# Threads of a CTA of a column pass, and CTAs of an SM that run at once where they sum over rows.
COLUMN_THREADS, COLUMN_CTAS = 256, 4


class Texts(KernelConfig):
    """The computation of a kernel.

    Attributes:
        expression: the expression's text.
        reads: the tensors that are its operands, separated by blanks.
        writes: the tensors, or halves, that its outputs are stored in: ``dx[:n] dx[n:] dbias``.
        kinds: their kinds, a letter each as in the expression's text: ``ttr``.
        shared: of these tensors, those of which the rows of an example share one row: ``gain dgain``.
        turns: whether rows take turns with the rows that are shared, as tokens' heads do, instead of examples following
            on each other.
        stretched: of these tensors, those whose elements each serve as many neighbouring columns: ``weight bias`` of
            channels that come before positions.
        random: of these tensors, integer scalars, which are the seeds of a random number for each element.
    """

    _: KW_ONLY
    expression: str
    reads: str
    writes: str
    kinds: str
    shared: str = ""
    turns: bool = False
    stretched: str = ""
    random: str = ""


class FusedConfig(Texts):
    """``unroll`` vectors of each of ``threads`` threads, and what they compute.

    Attributes:
        alone: whether a CTA adds up all rows of its columns, so that sums over rows need no workspace, and no other
            kernel.
    """

    threads: int
    unroll: int
    _: KW_ONLY
    alone: bool = False


class FusedRowConfig(Texts, RowConfig):
    """How rows spread over threads, and what is computed of each.

    Rows wait between their reductions in registers (``one_pass``), in slots of shared memory (``ring``), or are read
    again for each stage and for the outputs (``passes``).

    Attributes:
        stages: slots of shared memory.
        clusters: clusters that go from row to row; 0 where each has one group of rows.
        keep: for ``one_pass``, whether values may be kept from stage to stage; else they are recomputed from the
            operands, which takes fewer registers.
    """

    form: Literal["one_pass", "ring", "passes"]
    _: KW_ONLY
    stages: int = 1
    clusters: int = 0
    keep: bool = False


def column_width(vectors: int) -> int:
    """How many neighbouring vectors a CTA of a column pass over examples takes, of rows with ``vectors`` vectors: the
    number for which fewest lie past the end of rows; at least 8, a whole cache line, if rows have as many.
    """
    if vectors < 8:
        return 1 << (vectors - 1).bit_length()
    return min((WARP, 16, 8), key=lambda width: -(-vectors // width) * width)
