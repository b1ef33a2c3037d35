"""Tensors of a call as the matrices that a product takes."""

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_ops.kernels.lib.row_layout import row_count


def is_last_contiguous(m):
    """Whether neighbours in the last dim are neighbours in memory: known at compile time."""
    return isinstance(m.stride[1], int) and m.stride[1] == 1


def by_row(m, key):
    """A tensor as a matrix with its leading dims as rows. Either dim of it may be contiguous."""
    rows, n = Int32(row_count(m)), Int32(m.shape[-1])
    across = key.contiguous == -2  # a row's elements are apart
    if key.rank > 2 and (across or key.layout == "strided"):
        raise NotImplementedError(f"`{key.name}` has rows that no single stride steps over; call .contiguous()")
    stride = m.stride[-1 if across else 0] if key.layout == "strided" else Int64(rows if across else n)
    if key.row_align > key.itemsize:
        stride = cute.assume(stride, divby=key.row_align // key.itemsize)
    strides = (1, stride) if across else (stride, 1)
    return cute.make_tensor(m.iterator, cute.make_layout((rows, n), stride=strides))


def by_column(m, key):
    """A tensor as a matrix with its leading dims as columns."""
    return transposed(by_row(m, key))


def each_by_row(m, key):
    """A tensor as matrices, one for each index of its leading dims: (rows, columns, batch)."""
    *lead, rows, n = (Int32(size) for size in m.shape)
    across, step = key.contiguous == -2, key.row_align // key.itemsize
    # The first of nested dims is the innermost.
    batch, between = tuple(reversed(lead)), tuple(reversed(m.stride[:-2]))
    stride = m.stride[-1 if across else -2]
    if key.layout == "flat":
        stride, batch = Int64(rows if across else n), (Int32(row_count(m)) // rows,)
        between = (Int64(rows) * Int64(n),)
    if step > 1:
        stride, *between = (cute.assume(s, divby=step) for s in (stride, *between))
    strides = (1, stride, tuple(between)) if across else (stride, 1, tuple(between))
    return cute.make_tensor(m.iterator, cute.make_layout((rows, n, batch), stride=strides))


def each_by_column(m, key):
    """A tensor as matrices, each transposed: (columns, rows, batch)."""
    return transposed(each_by_row(m, key))


def transposed(m):
    """A matrix, or each of a batch, transposed."""
    modes = [1, 0, *range(2, cute.rank(m))]
    return cute.make_tensor(m.iterator, cute.select(m.layout, mode=modes))


def half(m, index, dim, align):
    """One half of a matrix ``[gate | up]`` along a dim; ``align`` bytes divide the offset of the second one."""
    size = m.shape[dim] // 2
    address = m.iterator.toint() + Int64(index * size) * Int64(m.stride[dim]) * (m.element_type.width // 8)
    pointer = cute.make_ptr(m.element_type, address, cute.AddressSpace.gmem, assumed_align=align)
    shape = (*m.shape[:dim], size, *m.shape[dim + 1 :])
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=m.stride))
