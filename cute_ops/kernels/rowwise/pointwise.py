"""One pass over ``[m, n]``, element by element."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import CopyG2ROp, CopyR2GOp, StoreCacheMode

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.lib.copy import (
    AHEAD,
    fetch_ahead,
    fragment,
    gmem_elements,
    load,
    load_inside,
    narrow,
    store_if,
    store_masked,
    widen,
)
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_layout import element_address, row_address, row_count
from cute_ops.kernels.lib.tiled_copy import as_rows, lane_copy, load_vector, store_vector
from cute_ops.kernels.rowwise.pointwise_unaligned import PointwiseShifted


class Piece(NamedTuple):
    """A tensor, or a half of a packed one: the ``index``-th of ``count`` equal pieces of its rows, ``n`` elements each.

    Inputs may be smaller: without ``rows`` it is a vector that all rows share, without ``columns`` each row has one
    element, without both it is a scalar. A ``shared`` one has a row for each example, which all rows of that share.
    """

    name: str
    index: int = 0
    count: int = 1
    rows: bool = True
    columns: bool = True
    shared: bool = False

    @property
    def tile(self):
        return self.rows and self.columns


def start_of(key, piece, n):
    """Bytes, a power of two, that divide the address of every row of a piece of a tensor with rows of n elements."""
    start = min(key.align, key.row_align) if piece.rows else key.align
    if piece.count > 1:
        # If the length of rows is not known, halves start on any element.
        step = n * ITEMSIZE[key.dtype] if n is not None else ITEMSIZE[key.dtype]
        start = min(start, step & -step)
    return start


def vector_widths(variant, inputs, outputs):
    """(widest, vec) in elements: a vector of 16 bytes of the widest tile that is read, and the vector that is used. The
    latter divides the length of rows; in every piece it is aligned, or several aligned vectors of 16 bytes.
    """
    keys, n, pieces = variant.tensors, variant.dims["n"], (*inputs, *outputs)
    read = [piece for piece in inputs if piece.tile] or outputs
    widest = VECTOR_BYTES // max(ITEMSIZE[keys[piece.name].dtype] for piece in read)
    starts = [(start_of(keys[p.name], p, n), ITEMSIZE[keys[p.name].dtype]) for p in pieces if p.columns]
    starts = [start // size for start, size in starts if start < VECTOR_BYTES]
    flat = all(keys[piece.name].layout == "flat" for piece in pieces if piece.tile)
    length = n & -n if n is not None else widest if flat else 1
    return widest, min(widest, length, *starts)


class Pointwise:
    """Computes ``outputs = compute(*inputs)`` in fp32.

    If all tensors are compact and none is read by halves, they are one long row, whatever n; else rows are taken one by
    one. With numbers of rows beside them, too, they are one long row if rows start off a vector: a vector has elements
    of two rows at most, and takes the numbers of both. Tile: a CTA of ``threads`` takes ``unroll`` vectors per thread,
    ``threads`` apart, and more if alignment makes vectors shorter than 16 bytes. A vector has 16 bytes of the widest
    tile that is read; a wider tensor takes several accesses. All loads of a thread are in flight together. None depends
    on a condition, because the compiler would put conversions behind it, too, for which the next load would wait. CTAs
    that start while the previous kernel is busy prefetch their inputs to L2. No shared memory. Bytes moved per element:
    every tensor once. Rows of tiles that do not start on half a vector, unless they are short, go to
    :class:`~cute_ops.kernels.rowwise.pointwise_unaligned.PointwiseShifted`, which takes no vectors and scalars.

    Args:
        variant: the kernel's variant.
        inputs, outputs: the tensors, or pieces of them.
        compute: fp32 elements to a tuple of fp32 elements.
        config: with its ``threads`` and ``unroll``.
    """

    def __init__(self, variant, inputs, outputs, compute, config):
        self.inputs, self.outputs = inputs, outputs
        self.keys = variant.tensors
        self.compute = compute
        self.n = variant.dims["n"]
        pieces = (*self.inputs, *self.outputs)
        self.one_row = all(map(self._follows, pieces))
        widest, self.vec = self._widths(pieces)
        self._cross(pieces, widest)
        self.shared = next((i for i, p in enumerate(inputs) if p.shared), None)
        self.turns = self.shared is not None and config.turns
        self.shifted, tiles = None, all(p.tile and not p.shared for p in pieces)
        if tiles and 2 * self.vec < widest and (self.n is None or self.n >= 8 * widest):
            self.shifted = PointwiseShifted(variant, config, self.inputs, self.outputs, compute, widest)
        self.threads = config.threads
        self.unroll = config.unroll * max(widest // self.vec, 1)
        self.block = self.threads * self.unroll
        # Rows of whole vectors need no masks inside a vector.
        self.whole = self.n is not None and self.n % self.vec == 0
        per_row = self.n // self.vec if self.whole else 0
        # CTAs per row if they divide it evenly, else 0.
        self.even = 0 if self.one_row or per_row % self.block else per_row // self.block
        # Whether all vectors of a CTA are of one row.
        self.tiled = bool(self.even) or (self.one_row and self.whole)
        self.pdl = can_use_pdl(variant.arch)

    def _cross(self, pieces, widest):
        """Take tiles for one long row if its vectors may have numbers of two rows. Such rows are no whole vectors."""
        self.crossed = self._crosses(pieces, widest)
        if self.crossed:
            self.one_row, self.vec = True, widest

    def _crosses(self, pieces, widest):
        numbers = [p for p in pieces if p.rows and not p.columns]
        others = [p for p in pieces if p not in numbers]
        aligned = all(self.keys[p.name].align >= VECTOR_BYTES for p in others if p.tile)
        if not numbers or any(p.shared for p in numbers) or not aligned or not all(map(self._follows, others)):
            return False
        return self.vec < widest and self.n is not None and widest <= self.n < 2**30

    def _widths(self, pieces):
        """Elements of a vector of 16 bytes of the widest tile that is read, and as many as alignment allows."""
        read = [p for p in self.inputs if p.tile] or self.outputs
        widest = VECTOR_BYTES // max(self._itemsize(p) for p in read)
        starts = [(self._start(p), self._itemsize(p)) for p in pieces if p.columns]
        return widest, min([widest, *(start // size for start, size in starts if start < VECTOR_BYTES)])

    def _itemsize(self, piece):
        return ITEMSIZE[self.keys[piece.name].dtype]

    def _follows(self, piece):
        """Whether each row of a piece follows on the one before, so that they are one long row; scalars fit any."""
        if not piece.tile:
            return not piece.rows and not piece.columns
        return not piece.shared and piece.count == 1 and self.keys[piece.name].layout == "flat"

    def _start(self, piece):
        """Bytes, a power of two, that divide the address of every row of a piece."""
        key = self.keys[piece.name]
        return key.align if self.one_row else start_of(key, piece, self.n)

    def rounded(self, x, dtype):
        """An fp32 vector rounded to a fragment of an output's dtype."""
        return narrow(x, dtype, self.vec)

    @cute.jit
    def __call__(self, inputs, outputs, stream):
        if const_expr(self.shifted is not None):
            self.shifted(inputs, outputs, row_count(outputs[0]), self._length(outputs[0]), stream)
        else:
            self._launch(inputs, outputs, stream)

    @cute.jit
    def _launch(self, inputs, outputs, stream):
        rows, n = self._shape(outputs[0])
        vectors = rows * ((n + (self.vec - 1)) // self.vec)
        kernel = self.kernel
        if const_expr(self.one_row and not self.crossed):
            kernel = self.tiles if const_expr(self.whole) else self.long_row
        elif const_expr(self.tiled):
            kernel = self.tiles
        kernel(inputs, outputs).launch(
            grid=[Int32((vectors + (self.block - 1)) // self.block), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    def _shape(self, mOut):
        """(rows, elements of a row's piece) as the kernel walks them, in 64 bits."""
        rows, n = row_count(mOut), self._length(mOut)
        return (Int64(1), rows * n) if self.one_row else (rows, n)

    def _length(self, mOut):
        """Elements of a row's piece."""
        return Int64(mOut.shape[-1]) // self.outputs[0].count if self.n is None else self.n

    @cute.kernel
    def tiles(self, inputs, outputs):
        """A CTA takes a segment of one row, and gives it to its threads by a tiled copy."""
        self._take_tile(inputs, outputs)

    @cute.kernel
    def long_row(self, inputs, outputs):
        """The tiles of one long row that ends within a vector: its last CTA masks vectors."""
        _, n = self._shape(outputs[0])
        if (Int64(cute.arch.block_idx()[0]) + 1) * (self.block * self.vec) <= n:
            self._take_tile(inputs, outputs)
        else:
            self._take_vectors(inputs, outputs)

    @cute.jit
    def _take_tile(self, inputs: cutlass.Constexpr, outputs: cutlass.Constexpr):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        rows, n = self._shape(outputs[0])
        row, segment = Int64(0), Int64(bidx)
        if const_expr(not self.one_row):
            row = segment // self.even
            segment = Int32(segment - row * self.even)
        own = self._own_row(inputs, rows, row)
        # A lane of the copy holds a vector, and a thread has several lanes. A lane past the end loads the CTA's first
        # vector, so that no load depends on a condition.
        lanes = [u * self.threads + tidx for u in range(self.unroll)]
        inside = self._inside(n, segment, lanes)
        sources = []
        for lane, here in zip(lanes, inside):
            coord = lane if const_expr(here is True) else cutlass.select_(here, lane, 0)
            sources.append([self._vector(mX, p, n, own(p), segment, coord) for mX, p in zip(inputs, self.inputs)])
        if const_expr(self.pdl):
            for vectors in sources:
                for tXgX, piece in zip(vectors, self.inputs):
                    fetch_ahead(tXgX.iterator.toint(), self._fetches(piece, bidx, tidx, row))
        let_next_start(self.pdl)
        wait_for_previous(self.pdl)
        loaded = []
        for lane, vectors in zip(lanes, sources):
            loaded.append([self._load(tXgX, piece, lane) for tXgX, piece in zip(vectors, self.inputs)])
        for lane, here, vectors in zip(lanes, inside, loaded):
            results = self._computed([widen(rX) for rX in vectors])
            for mX, piece, rX in zip(outputs, self.outputs, results):
                tXgX = self._vector(mX, piece, n, row, segment, lane)
                copy = self._lane(CopyR2GOp(), mX.element_type, lane, store_cache_mode=StoreCacheMode.STREAMING)
                store_vector(copy, self.rounded(rX.load(), mX.element_type), tXgX, here)

    def _own_row(self, inputs, rows, row):
        """From a piece to the row of it that a row reads; of a shared one that is an example's."""
        if self.shared is None:
            return lambda piece: row
        count = row_count(inputs[self.shared])
        if self.turns:
            example = Int64(Int32(row) % Int32(count))
        else:
            example = Int64(Int32(row) // Int32(rows // count))
        return lambda piece: example if piece.shared else row

    def _lane(self, op, dtype, lane, **cache_mode):
        return lane_copy(op, dtype, self.block, self.vec, lane, **cache_mode)

    def _inside(self, n, segment, lanes):
        """Whether lanes' vectors are inside the one long row; in rows of whole CTAs all are."""
        if not self.one_row:
            return [True] * self.unroll
        width = self.block * self.vec
        left = Int32(cutlass.min(n - segment * width, Int64(width)))
        cX = cute.make_identity_tensor((width,))
        return [self._lane(CopyG2ROp(), Uint8, lane).partition_S(cX)[0, 0][0] < left for lane in lanes]

    def _vector(self, mX, piece, n, row, segment, lane):
        """A lane's vector of a piece of a row, ((access, accesses)), or the number that stands for it."""
        if not piece.columns:
            return gmem_elements(mX.element_type, self._address(mX, piece, n, row, 0), 1)
        gRow = mX
        if self.one_row:
            gRow = cute.make_tensor(mX.iterator, cute.make_layout((n,)))
        elif piece.rows:
            gRow = as_rows(mX, self.keys[piece.name], n * piece.count)[(row, None)]
        gPiece = gRow if piece.count == 1 else cute.local_tile(gRow, (n,), (piece.index,))
        gX = cute.local_tile(gPiece, (self.block * self.vec,), (segment,))
        return self._lane(CopyG2ROp(), mX.element_type, lane).partition_S(gX)[None, 0]

    def _fetches(self, piece, bidx, tidx, row):
        """Whether a thread prefetches what it will load of a piece to L2. One thread does so for what several load:
        requests for the same line wait for each other.
        """
        if piece.tile:
            return bidx < AHEAD
        if piece.columns:
            return (bidx < AHEAD) & (row == 0)
        return (bidx < (AHEAD if piece.rows else 1)) & (tidx == 0)

    def _load(self, tXgX, piece, lane):
        if piece.columns:
            return load_vector(self._lane(CopyG2ROp(), tXgX.element_type, lane), tXgX)
        rX = fragment(tXgX.element_type, 1)
        rX[0] = tXgX[0]
        return rX

    @cute.kernel
    def kernel(self, inputs, outputs):
        """A CTA takes vectors of any rows, which it finds by division."""
        self._take_vectors(inputs, outputs)

    @cute.jit
    def _take_vectors(self, inputs: cutlass.Constexpr, outputs: cutlass.Constexpr):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        rows, n = self._shape(outputs[0])
        start = Int64(bidx) * self.block
        coords = []
        for u in cutlass.range_constexpr(self.unroll):
            coords.append(self._coordinate(start, Int32(u * self.threads) + tidx, rows, n))
        sources = []
        for row, first, _, _ in coords:
            own = self._own_row(inputs, rows, row)
            sources.append([self._address(mX, p, n, own(p), first) for mX, p in zip(inputs, self.inputs)])
        if const_expr(self.pdl):
            for (row, _, _, _), addresses in zip(coords, sources):
                for address, piece in zip(addresses, self.inputs):
                    fetch_ahead(address, self._fetches(piece, bidx, tidx, row))
        let_next_start(self.pdl)
        wait_for_previous(self.pdl)
        loaded = []
        for (row, _, left, border), addresses in zip(coords, sources):
            vectors = [fragment(mX.element_type, self._loaded(p)) for mX, p in zip(inputs, self.inputs)]
            for rX, address, mX, piece in zip(vectors, addresses, inputs, self.inputs):
                if const_expr(self.whole):
                    load(rX, address)
                elif const_expr(cute.size(rX) == 2 and not piece.columns):
                    self._load_numbers(rX, mX, piece, row, border < cutlass.min(left, Int32(self.vec)))
                else:
                    rX.fill(0)
                    load_inside(left > 0, rX, address, left)
            loaded.append(vectors)
        for coord, vectors in zip(coords, loaded):
            results = self._computed([widen(rX) for rX in vectors], coord[3])
            for mX, piece, rX in zip(outputs, self.outputs, results):
                self._store(rX, mX, piece, n, coord)

    def _loaded(self, piece):
        """Elements of a piece for a vector."""
        return self.vec if piece.columns else 2 if self.crossed and piece.rows else 1

    def _load_numbers(self, rX, mX, piece, row, crosses):
        """The numbers of the row that a vector begins in and, if it ``crosses`` into another, of that."""
        for i, each in enumerate((row, row + cutlass.select_(crosses, Int64(1), Int64(0)))):
            address = number_address(mX, self.keys[piece.name], each)
            rX[i] = gmem_elements(mX.element_type, address, 1)[0]

    def _computed(self, given, border=None):
        """fp32 fragments of the outputs. ``border``: of the elements that are of the vector's first row."""
        results = [fragment(Float32, self.vec) for _ in self.outputs]
        for j in range(self.vec):
            elements = [self._element(g, piece, j, border) for g, piece in zip(given, self.inputs)]
            for rX, x in zip(results, self.compute(*elements)):
                rX[j] = x
        return results

    def _element(self, given, piece, j, border):
        """The j-th element of a piece's vector, or the number that stands for it."""
        if piece.columns or self._loaded(piece) == 1:
            return given[j if piece.columns else 0]
        return Float32(cutlass.select_(border > j, given[0], given[1]))

    def _coordinate(self, start, index, rows, n):
        """A vector's place: (its row, the element of the row it starts at, elements left in that row, and before the
        next row's numbers count).

        A vector past the end, with no elements left, gets the place of another one, which is loaded but not stored.
        """
        if self.one_row:
            first = index * self.vec
            left = Int32(cutlass.min(n - start * self.vec, Int64(self.block * self.vec))) - first
            first, row, border = cutlass.select_(left > 0, first, Int32(0)), Int64(0), None
            if self.crossed:
                # One division in 64 bits per CTA, the rest in 32.
                above = start * self.vec // Int64(self.n)
                local = Int32(start * self.vec - above * self.n) + first
                below = local // self.n
                row, border = above + below, self.n - (local - below * self.n)
            return row, start * self.vec + first, left, border
        per_row = (n + (self.vec - 1)) // self.vec
        # One division in 64 bits per CTA, the rest in 32.
        above = start // per_row
        local = Int32(start - above * per_row) + index
        below = local // Int32(per_row)
        first = (local - below * Int32(per_row)) * self.vec
        row = above + below
        left = cutlass.select_(row < rows, Int32(n) - first, Int32(0))
        return cutlass.min(row, rows - 1), Int64(first), left, None

    def _address(self, mX, piece, n, row, first):
        itemsize = mX.element_type.width // 8
        if not piece.columns:
            return number_address(mX, self.keys[piece.name], row) if piece.rows else mX.iterator.toint()
        if self.one_row:
            return mX.iterator.toint() + first * itemsize
        first = first + piece.index * Int64(n)
        if not piece.rows:
            return mX.iterator.toint() + first * itemsize
        return row_address(mX, self.keys[piece.name], row, mX.shape[-1]) + first * itemsize

    def _store(self, rX, mX, piece, n, coord):
        row, first, left, _ = coord
        rOut = self.rounded(rX.load(), mX.element_type)
        address = self._address(mX, piece, n, row, first)
        if self.whole:
            store_if(left > 0, rOut, address, True)
        else:
            store_masked(rOut, address, Int32(0), left, True)


def number_address(mX, key, row):
    """Byte address of a row's element in a tensor of one number per row, ``*m 1`` or ``*m``."""
    return element_address(mX, key, row) if key.layout == "scattered" else row_address(mX, key, row, 1)
