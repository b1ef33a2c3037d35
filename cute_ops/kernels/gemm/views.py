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
    """The same, transposed."""
    rows = by_row(m, key)
    return cute.make_tensor(rows.iterator, cute.select(rows.layout, mode=[1, 0]))


def half(m, index, dim, align):
    """One half of a packed matrix, ``[first | second]`` along a dim; ``align`` bytes divide where the second starts."""
    size = m.shape[dim] // 2
    place = m.iterator.toint() + Int64(index * size) * Int64(m.stride[dim]) * (m.element_type.width // 8)
    pointer = cute.make_ptr(m.element_type, place, cute.AddressSpace.gmem, assumed_align=align)
    shape = (size, m.shape[1]) if dim == 0 else (m.shape[0], size)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=m.stride))
