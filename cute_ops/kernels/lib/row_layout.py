"""How the elements of a row spread over vectors, threads and CTAs.

A row is cut into vectors of ``vec`` elements, ``vec`` the same for every row tensor of a kernel. Vector ``v`` covers
the columns ``v * vec - shift + j``, ``j < vec``. Three ways to lay vectors over a row:

* aligned: every row starts on a vector, ``shift == 0``; vectors are as wide as the alignment of all row tensors.
* shifted: compact rows of a length that is no multiple of a vector, on an aligned base. Vectors are those of the
  flat array, from the last memory unit that starts no later than the row, ``shift = row * n % unit``, so that
  accesses stay 16 bytes wide and in step with sectors. Vectors at a row's ends may also hold elements of its
  neighbours: these are masked, and stored one by one. A vector with an element inside the row never leaves its page.
  With ``lines``, compact rows of whole vectors are shifted, too, if they do not all start on a unit: a warp's accesses
  then lie in as few sectors as they have bytes, and a vector lies in the row or outside of it.
* narrow: whatever else; vectors shrink down to one element.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES, WARP

# Percent of an SM's L1 that is shared memory: enough for the sums, and the system's share, of any number of CTAs.
SMEM_PERCENT = 50
MAX_GRID = 1 << 20  # CTAs that walk rows: further rows are theirs, too


def present(variant, names):
    """The descriptions of those of the named tensors that are present."""
    return [variant.tensors[name] for name in names if variant.tensors.get(name) is not None]


class Vectors:
    """Vector width and mode of the named row tensors of a kernel, with rows of length n, None where dynamic.

    Args:
        variant: the kernel's.
        names: of the tensors.
        n: elements of a row.
        align_vectors: vectors of a unit.
        lines: whether rows that start on a vector, or on half of one, are shifted, too.
    """

    def __init__(self, variant, names, n, align_vectors=1, *, lines=False):
        tensors = present(variant, names)
        sizes = [ITEMSIZE[t.dtype] for t in tensors]
        self.n = n
        # Tensors of narrower dtypes take narrower accesses: with two accesses per vector for the widest dtype, each
        # would use half of the bytes that it touches.
        widest = VECTOR_BYTES // max(sizes)
        starts = [min(t.align, t.row_align) for t in tensors]
        narrow = min(min(a, VECTOR_BYTES) // s for a, s in zip(starts, sizes))
        flat = all(t.layout == "flat" and t.align >= VECTOR_BYTES for t in tensors)
        aligned = narrow >= widest
        # Half vectors are faster than masked ones, and narrow accesses than vectors that mostly hold neighbouring rows.
        self.shifted = flat and self._shifts(narrow, widest, lines * widest * align_vectors)
        self.vec = widest if aligned or self.shifted else narrow
        self.unit = self.vec * align_vectors
        # Rows of whole vectors need no masks inside a vector. Strides do not tell a dynamic row length.
        whole = n % self.vec == 0 if n is not None else flat
        self.masked = not whole or (self.shifted and n is None)
        # Whether a row is followed by the next one in all tensors. The memory between strided rows may not be readable.
        self.follows = all(t.layout == "flat" for t in tensors) and (n is None or n >= widest)

    def _shifts(self, narrow, widest, unit):
        """Whether compact rows are shifted: long ones off half a vector, or off a unit if that is not 0."""
        if unit and self.n % unit:
            return True
        return 2 * narrow < widest and (self.n is None or self.n >= 8 * widest)

    def shift(self, row, n):
        """Elements of the row before that the first vectors of a row begin with."""
        return Int32((row * n) % self.unit) if self.shifted else Int32(0)


class RowTile:
    """Static thread mapping of whole rows.

    ``threads_per_row`` threads of each of ``cluster`` CTAs hold a row, ``per_thread`` vectors each, and a CTA holds
    ``rows`` rows. Vector ``k`` of thread ``t`` of cluster rank ``r`` is ``r * span + k * threads_per_row + t``: a CTA
    holds ``span`` vectors: as many as its threads can or, with ``balanced``, the fewest whole warps' that suffice.
    Then some threads have no last vector.
    """

    local = 1

    def __init__(self, vectors, config):
        self.v = vectors
        self.vec = vectors.vec
        self.n = vectors.n
        self.cluster = config.cluster
        self.threads_per_row = config.threads_per_row
        self.rows = max(config.threads // self.threads_per_row, 1)
        self.threads = self.rows * self.threads_per_row
        longest = self.n + (vectors.unit - (1 if vectors.masked else vectors.vec) if vectors.shifted else 0)
        self.count = -(-longest // self.vec)
        self.per_thread = -(-self.count // (self.threads_per_row * self.cluster))
        self.span = self.per_thread * self.threads_per_row
        if config.balanced:
            self.span = -(-self.count // (self.cluster * WARP)) * WARP
            self.per_thread = -(-self.span // self.threads_per_row)

    def here(self):
        """This cluster, the thread's row in its CTA, the thread among those of the row, and the CTA in the cluster."""
        tidx, (bidx, rank, _) = cute.arch.thread_idx()[0], cute.arch.block_idx()
        return bidx, tidx // self.threads_per_row, tidx % self.threads_per_row, rank if self.cluster > 1 else 0

    @property
    def even(self):
        """Whether all threads hold the same number of elements of a row."""
        return not self.v.masked and self.n == self.cluster * self.per_thread * self.threads_per_row * self.vec

    def vector(self, t, rank, k):
        """Index of this thread's k-th vector in its row."""
        return rank * self.span + k * self.threads_per_row + t

    def sparse(self, k):
        """Whether most of a CTA's threads have no k-th vector."""
        return k > 0 and 2 * (self.span - k * self.threads_per_row) < self.threads_per_row

    def first(self, t, rank, k, shift):
        """First column of this thread's k-th vector, far outside the row if it has none."""
        column = self.vector(t, rank, k) * self.vec - shift
        if (k + 1) * self.threads_per_row <= self.span:
            return column
        # So far that the columns of a warp's other lanes, counted from this one's, are outside too.
        return cutlass.select_(k * self.threads_per_row + t < self.span, column, self.n + WARP * self.vec)

    def columns(self, t, rank, row):
        """First columns of this thread's vectors of a row."""
        shift = self.v.shift(row, self.n)
        return [self.first(t, rank, k, shift) for k in range(self.per_thread)]

    def reach(self, k):
        """Columns from the start of a thread's first vector to that of its k-th, a static number."""
        return k * self.threads_per_row * self.vec

    def starts_outside(self, k):
        """Whether some thread's k-th vector may begin before the row."""
        return self.v.shifted and k * self.threads_per_row * self.vec < self.v.unit

    def predicated(self, k):
        """Whether some thread's k-th vector may have elements before the row, or be :meth:`partial`."""
        return self.starts_outside(k) or (self.v.masked and self.ends_outside(k))

    def partial(self, k):
        """Whether some thread's k-th vector may be partly inside and partly outside the row."""
        return self.v.masked and (self.starts_outside(k) or self.ends_outside(k))

    def inside(self, k, first, end):
        """Whether this thread's k-th vector, which is not :meth:`partial`, lies in the row and before ``end``."""
        return (first >= 0) & (first < end) if self.starts_outside(k) else first < end

    def predicate(self, k, first, bound=None):
        """Whether this thread's k-th vector has an element inside the row and begins before the column ``bound``; True
        if every thread's does.
        """
        inside = first < (self.n if bound is None else bound) if self.ends_outside(k) else True
        return (first + self.vec > 0) & inside if self.starts_outside(k) and self.v.unit > self.vec else inside

    def edge(self, row, count):
        """(bound, tail): a row's vectors that begin before the column ``bound`` may be loaded whole. If ``tail``, one
        vector is left that may not, because the memory after the row may not be readable.
        """
        if not self.v.masked:
            return self.n, False
        last = row + 1 >= count if self.v.follows else True
        short = self.n - self.vec + 1
        return cutlass.select_(last, Int32(short), Int32(self.n)) if self.v.follows else Int32(short), last

    def ends_outside(self, k, beyond=0):
        """Whether some thread's k-th vector, or ``beyond`` elements after it, may reach past the row's end."""
        end = (k + 1) * self.threads_per_row
        return end > self.span or ((self.cluster - 1) * self.span + end) * self.vec + beyond > self.n


def clusters(tile, count, resident=0, carveout=None, *, apart=False):
    """The arguments of a launch of ``count`` clusters of a tile's CTAs. ``resident`` caps registers so that so many
    CTAs fit on an SM; 0 caps nothing. ``carveout`` is the percentage of the L1 that is shared memory. ``apart``: the
    CTAs of a row exchange nothing, so that each may run on any SM.
    """
    return {
        "grid": [count, tile.cluster, 1], "block": [tile.threads, 1, 1],
        "cluster": [1, tile.cluster, 1] if tile.cluster > 1 and not apart else None, "min_blocks_per_mp": resident,
        "preferred_smem_carveout": carveout,
    }  # fmt: skip


def readable(vectors, n, row, count):
    """Columns, counted from a row's first, that may be read: in compact rows those of the next row, too. None if no
    vector reaches past them.
    """
    if not vectors.masked:
        return None
    return cutlass.select_(row + 1 < count, n + vectors.vec, n) if vectors.follows else n


def extent(mX, dim):
    """Size of a dim in 64 bits; the entries of ``mX.shape`` have 32."""
    return Int64(cute.size(mX, mode=[dim]))


def row_count(mX, inner=1):
    """Rows of a tensor, the product of its dims but for the ``inner`` last ones, in 64 bits."""
    count = Int64(1)
    for i in range(len(mX.shape) - inner):
        count = count * extent(mX, i)
    return count


class WalkedRow:
    """``threads`` threads of each of ``cluster`` CTAs walk one row together, each CTA ``local`` segments of it."""

    here = RowTile.here

    def __init__(self, vectors, config, cluster=1, local=1):
        self.v = vectors
        self.vec = vectors.vec
        self.cluster, self.local = cluster, local
        self.rows = 1
        self.n = vectors.n
        self.even = False
        self.threads = self.threads_per_row = config.threads


def row_address(mX, key, row, n):
    """Byte address of the first element of a row, in 64 bits throughout.

    In a compact tensor it is a product; with free leading strides the row index is taken apart in row-major order.
    """
    return _address(mX, key, row, n, len(mX.shape) - 1)


def element_address(mX, key, row):
    """Byte address of a row's element in a tensor that holds one number per row, in 64 bits throughout."""
    return _address(mX, key, row, 1, len(mX.shape))


def _address(mX, key, row, n, rank):
    """``rank``: how many of the dims are leading ones."""
    itemsize = mX.element_type.width // 8
    base = mX.iterator.toint()
    if key.layout == "flat":
        return base + row * Int64(n * itemsize)
    return base + strided_offset(mX, row, rank) * itemsize


def strided_offset(mX, index, rank, offset=0):
    """Elements from a tensor's start to where ``index`` leads, which counts through ``rank`` leading dims in row-major
    order, and ``offset`` more.
    """
    offset = Int64(offset)
    for i in reversed(range(1, rank)):
        size = extent(mX, i)
        above = index // size
        offset = offset + (index - above * size) * Int64(mX.stride[i])
        index = above
    return offset + index * Int64(mX.stride[0]) if rank else offset


def vector_address(mX, address, tile, first, k):
    """Byte address of this thread's k-th vector, whose first column is ``first``, in the row at ``address``.

    It is written so that the compiler sees constant distances from a thread's first vector to its others.
    """
    itemsize = mX.element_type.width // 8
    return address + Int64(first - tile.reach(k)) * itemsize + tile.reach(k) * itemsize
