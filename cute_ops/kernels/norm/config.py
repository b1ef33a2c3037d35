"""Configs of the norms' kernels."""

from __future__ import annotations

from typing import Literal

from cute_ops.kernels.lib.row_config import RowConfig

Form = Literal["one_pass", "smem", "persistent", "two_pass", "few_rows", "overlapped", "blocks"]


class NormConfig(RowConfig):
    """How a norm's rows are computed.

    Forms of the forward: a row stays in registers (``one_pass``) or in shared memory (``smem``) between its sum and its
    output; clusters go from row to row with the weight in registers (``persistent``); a row is read twice
    (``two_pass``); rows of a CTA go through shared memory as whole vectors (``blocks``). Forms of the backward:
    ``persistent`` and ``two_pass`` likewise; each of a few clusters takes all rows (``few_rows``); a second kernel sums
    the columns while the first goes by rows (``overlapped``).

    Attributes:
        unroll: row groups of a CTA in one pass.
        keep_dtype: rows are kept in their own dtype instead of float32.
        delay_weight_load: the weight is loaded after a row's sum is known.
        stages: slots of the ring of rows in shared memory.
        clusters: persistent clusters altogether.
        sort_period: rows are sorted by ``row % sort_period``, so that rows which start at the same place of a vector
            follow each other; 0 if they are not sorted.
        lines: rows that start on a vector, or on half of one, are read from the start of a line, too.
        replicas: clusters that each take all rows, of ``few_rows``.
        column_threads: threads that share a vector of columns in the second kernel of ``overlapped``.
        rows_per_thread: rows of such a thread.
    """

    form: Form
    unroll: int = 1
    keep_dtype: bool = False
    delay_weight_load: bool = False
    stages: int = 0
    clusters: int = 0
    sort_period: int = 0
    lines: bool = False
    replicas: int = 0
    column_threads: int = 0
    rows_per_thread: int = 0
