"""The order in which a product's tiles are computed: integer arithmetic on Python's numbers and on those of kernels.

Tiles here are those of a cluster. They are walked in groups of ``group`` rows, down each column before the next one,
and every second group from its last column to its first. So clusters that run together share few rows and columns,
which stay in L2, and a group begins with the columns that the one before ended with.
"""

from __future__ import annotations

from typing import Any


def bytes_by_grouping(rows: Any, columns: Any, group: int, m: Any, n: Any) -> tuple[Any, Any]:
    """Bytes read past L2 with groups of rows and with groups of columns, relative to each other. The grouped operand
    is read once, the other one once for each group.
    """
    return m + (rows + group - 1) // group * n, n + (columns + group - 1) // group * m


def tile_of(index: Any, rows: Any, columns: Any, group: int, by_columns: Any) -> tuple[Any, Any]:
    """Row and column of the tile with this index in the order; ``by_columns`` is 1 where columns are grouped, ``group``
    of them, instead of rows, else 0.
    """
    swap = by_columns * (columns - rows)
    outer, inner = _in_groups(index, rows + swap, columns - swap, group)
    swap = by_columns * (inner - outer)
    return outer + swap, inner - swap


def tile_of_batch(index: Any, order: tuple[Any, ...], group: int) -> tuple[Any, ...]:
    """Row, column and, in a batch, the matrix of the tile with this index: one matrix comes after another. ``order``:
    rows, columns and ``by_columns`` as in :func:`tile_of`, and in a batch the number of matrices.
    """
    rows, columns, by_columns, *batch = order
    if not batch:
        return tile_of(index, rows, columns, group, by_columns)
    which = index // (rows * columns)
    return *tile_of(index - which * rows * columns, rows, columns, group, by_columns), which


def tile_count(order: tuple[Any, ...]) -> Any:
    """The tiles of all matrices."""
    rows, columns, _, *batch = order
    return rows * columns * batch[0] if batch else rows * columns


def _in_groups(index: Any, rows: Any, columns: Any, group: int) -> tuple[Any, Any]:
    full = rows // group
    current = index // (group * columns)
    within = index - current * group * columns
    rest = rows - full * group
    height = rest + (current < full) * (group - rest)  # the last group may have fewer rows
    column = within // height
    odd = current % 2
    return current * group + within % height, column + odd * (columns - 1 - 2 * column)
