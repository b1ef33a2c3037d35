"""The rotation that a function of queries and keys computes, found by running it once on random numbers.

Families write ``apply_rotary_pos_emb`` in many ways: by halves or by neighbours, of some columns or of all, with
tables that hold each angle twice or once, in the dtype of the heads or in float32. All are our ``rope`` with some
columns of the tables. A rotation is linear in the heads, so that two that agree on random heads and tables are equal.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import torch

from cute_ops.ops.rotary.rope import reference
from cute_ops_torch import functions

Tensor = torch.Tensor
HEADDIM, SEQLEN = 16, 5
# Which columns of a table are those of our op, and what a table must be for that: all of them, the first half, or every
# other one. `halves` have equal halves, `pairs` equal neighbours.
ALL, FIRST, OTHER = "all", "first", "other"
HALVES, PAIRS = "halves", "pairs"


class Rotation(NamedTuple):
    """A rotation.

    Attributes:
        columns: which columns of the tables it reads.
        tables: :data:`HALVES` or :data:`PAIRS` if its tables must be such; else empty.
        interleaved: whether it rotates neighbouring columns.
        partial: whether it keeps columns for which the tables have no angle.
        keeps_dtype: whether heads of 16 bits that meet tables of float32 keep their dtype.
        dims: where heads may be: what ``unsqueeze_dim`` may say.
    """

    columns: str
    tables: str
    interleaved: bool
    partial: bool
    keeps_dtype: bool
    dims: tuple[int, ...]

    def angles(self, table: Tensor) -> Tensor:
        """The columns of a table that our op takes, without a batch dim of one."""
        half = table.shape[-1] // 2
        if self.columns != ALL:
            table = table[..., :half] if self.columns == FIRST else table[..., ::2].contiguous()
        return table[0] if table.shape[0] == 1 else table

    def fits(self, x: Tensor, table: Tensor) -> bool:
        """Whether tables have an angle for each pair of columns, or for those that are rotated alone."""
        rotated = table.shape[-1] * (2 if self.columns == ALL else 1)
        return x.ndim == 4 and table.ndim == 3 and (rotated == x.shape[-1] or (self.partial and rotated < x.shape[-1]))


@cache
def rotation_of(function: Any, tables: str) -> Rotation | None:
    """The rotation that a function of queries, keys and two tables computes; None if it is none of ours.

    Args:
        function: ``function(q, k, cos, sin)``, perhaps with ``unsqueeze_dim``.
        tables: what its tables may be: :data:`HALVES`, :data:`PAIRS`, or with a space between them either.
    """
    assumed = [(columns, needs) for columns, needs in ((FIRST, HALVES), (OTHER, PAIRS)) if needs in tables.split()]
    for columns, needs in ((ALL, ""), (FIRST, ""), *assumed):
        for interleaved in (False, True):
            found = Rotation(columns, needs, interleaved, False, False, ())
            dims = tuple(dim for dim in (1, 2) if _agrees(function, found, dim, HEADDIM))
            if 1 in dims:
                partial = _agrees(function, found, 1, HEADDIM // 2)
                return found._replace(dims=dims, partial=partial, keeps_dtype=_keeps_dtype(function, found))
    return None


def _agrees(function: Any, rotation: Rotation, dim: int, rotated: int) -> bool:
    """Whether a function rotates the first ``rotated`` columns as our op does."""
    draw = torch.Generator().manual_seed(7)
    heads = [torch.randn(2, count, SEQLEN, HEADDIM, generator=draw) for count in (3, 2)]
    if dim == 2:
        heads = [x.transpose(1, 2).contiguous() for x in heads]
    width = rotated // 2 if rotation.columns == ALL else rotated
    cos, sin = (_table(rotation.tables, width, draw) for _ in range(2))
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            found = function(*heads, cos, sin, **({} if dim == 1 else {"unsqueeze_dim": dim}))
    except Exception:  # it takes other tensors
        return False
    if not isinstance(found, tuple) or len(found) != 2:
        return False
    wanted = [_rotated(x, rotation, rotation.angles(cos), rotation.angles(sin), dim) for x in heads]
    return all(
        isinstance(a, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype) and torch.allclose(a, b, atol=1e-5)
        for a, b in zip(found, wanted, strict=True)
    )


def _rotated(x: Tensor, rotation: Rotation, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
    from array_api_compat import torch as xp  # lazily: few programs need it

    x = x if dim == 2 else x.transpose(1, 2)
    out: Tensor = reference(xp, x, cos, sin, interleaved=rotation.interleaved)
    return out if dim == 2 else out.transpose(1, 2)


def _table(tables: str, width: int, draw: torch.Generator) -> Tensor:
    each = torch.randn(2, SEQLEN, width if not tables else width // 2, generator=draw)
    return {"": each, HALVES: torch.cat((each, each), -1), PAIRS: each.repeat_interleave(2, -1)}[tables]


def _keeps_dtype(function: Any, rotation: Rotation) -> bool:
    width = HEADDIM // 2 if rotation.columns == ALL else HEADDIM
    q, table = torch.zeros(1, 2, SEQLEN, HEADDIM, dtype=torch.bfloat16), torch.zeros(1, SEQLEN, width)
    try:
        return all(x.dtype == q.dtype for x in function(q, q, table, table))
    except Exception:  # it takes tables of the heads' dtype only
        return False


def rotate(x: Tensor, rotation: Rotation, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
    """Heads rotated by our op, by tables of single angles: (batch, seqlen, heads, headdim) if ``dim`` is 2; if it is 1,
    (batch, heads, seqlen, headdim), as views of memory that has positions before heads.
    """
    rope = partial(functions.rope, interleaved=True) if rotation.interleaved else functions.rope
    return rope(x, cos, sin) if dim == 2 else rope(x.transpose(1, 2), cos, sin).transpose(1, 2)
