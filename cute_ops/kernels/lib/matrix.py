"""Tensors of any rank as the matrices that most kernels are written for."""

import cutlass.cute as cute
from cutlass import Int64


def folded(m, own=1):
    """A tensor that is declared ``merged``, with all leading dims as one: ``(rows, n)``. Nothing is copied.

    Args:
        own: the number of dims behind the leading ones, 0 for one number per row.
    """
    lead = cute.rank(m) - own
    if lead == 1:
        return m
    # Of merged tensors only compact ones arrive with several leading dims.
    rows, step = Int64(1), 1
    for size in m.shape[:lead]:
        rows *= size
    for size in m.shape[lead:]:
        step *= size
    return cute.make_tensor(m.iterator, cute.make_layout((rows, *m.shape[lead:]), stride=(step, *m.stride[lead:])))
