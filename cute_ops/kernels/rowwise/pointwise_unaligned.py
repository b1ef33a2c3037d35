"""One pass over ``[m, n]``, element by element, where rows start anywhere."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.kernels.lib.copy import fragment, load_first_if, load_if, narrow, store_masked, widen
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.realign import bytes_past, fetch, settle
from cute_ops.kernels.lib.row_layout import row_address


class PointwiseShifted:
    """Computes ``outputs = compute(*inputs)`` in fp32; see :class:`~cute_ops.kernels.rowwise.pointwise.Pointwise`.

    Vectors are those of an output's memory, 16 bytes wide, so that all stores but those at a row's ends are whole. The
    inputs' elements for them begin anywhere and are moved into place. Outputs whose rows start at different places of a
    vector are computed one after another, from inputs that L1 holds by then.

    Tile: a thread takes ``unroll`` vectors, ``threads`` apart, of every output. No shared memory.
    Bytes moved per element: every tensor once.
    """

    def __init__(self, variant, config, inputs, outputs, compute, vec):
        self.inputs, self.outputs = inputs, outputs
        self.keys = variant.tensors
        self.compute = compute
        self.n = variant.dims["n"]
        self.vec = vec
        self.threads, self.unroll = config.threads, config.unroll
        self.pdl = can_use_pdl(variant.arch)
        self.groups = []
        for i, piece in enumerate(outputs):
            for group in self.groups:
                if self._distance(piece, outputs[group[0]]) == 0:
                    group.append(i)
                    break
            else:
                self.groups.append([i])

    def _distance(self, piece, other):
        """By how many elements a piece's rows start later in a vector than another's; None if that is not known."""
        keys = self.keys[piece.name], self.keys[other.name]
        same = keys[0].dtype == keys[1].dtype and piece.count == other.count
        if self.n is None or not same or any(key.layout != "flat" or key.align < 16 for key in keys):
            return None
        return (piece.index - other.index) * self.n % self.vec

    @cute.jit
    def __call__(self, inputs, outputs, rows, n, stream):
        block = self.threads * self.unroll
        vectors = rows * self._per_row(n)
        self.kernel(inputs, outputs, rows, n).launch(
            grid=[Int32((vectors + (block - 1)) // block), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    def _per_row(self, n):
        """The most vectors that a row can touch, wherever it starts."""
        return (n + 2 * (self.vec - 1)) // self.vec

    @cute.kernel
    def kernel(self, inputs, outputs, rows: Int64, long_n: Int64):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        n = Int32(long_n) if self.n is None else self.n
        per_row = self._per_row(n)
        # One division in 64 bits per CTA, the rest in 32.
        start = Int64(bidx) * (self.threads * self.unroll)
        above = start // Int64(per_row)
        local = Int32(start - above * per_row) + tidx
        coords = []
        for u in cutlass.range_constexpr(self.unroll):
            below = (local + u * self.threads) // per_row
            column = (local + u * self.threads - below * per_row) * self.vec
            row = above + below
            # A row past the last one gets an end below all columns.
            coords.append((row, column, cutlass.select_(row < rows, Int32(n), Int32(-2 * self.vec))))
        wait_for_previous(self.pdl)
        loaded = [[self._load(inputs, outputs, group, n, rows, coord) for group in self.groups] for coord in coords]
        let_next_start(self.pdl)
        for coord, groups in zip(coords, loaded):
            for group, (shift, pairs) in zip(self.groups, groups):
                self._postprocess(outputs, group, n, coord, shift, pairs)

    def _row(self, mX, piece, n, row):
        """Byte address of the first element of a piece of a row."""
        address = row_address(mX, self.keys[piece.name], row, mX.shape[-1])
        return address + Int64(n) * (piece.index * ITEMSIZE[self.keys[piece.name].dtype])

    def _edge(self, piece, n, row, rows):
        """(bound, tail) of a piece of a row, see :meth:`RowTile.edge`: a compact row is followed by the next one."""
        # Rows shorter than a vector are never loaded whole.
        tail = Boolean(n < self.vec)
        if self.keys[piece.name].layout != "flat":
            tail = Boolean(True)
        elif piece.index + 1 == piece.count:
            tail = tail | (row + 1 >= rows)
        return cutlass.select_(tail, Int32(n - self.vec + 1), Int32(n)), tail

    def _load(self, inputs, outputs, group, n, rows, coord):
        """The inputs' data for the vector at a column of a group's outputs: (how far rows start in a vector, the pairs
        of vectors that contain it and where in them it begins).
        """
        (row, column, end), target, mOut = coord, self.outputs[group[0]], outputs[group[0]]
        out = self._row(mOut, target, n, row)
        shift = bytes_past(out, mOut.element_type, self.vec) // ITEMSIZE[self.keys[target.name].dtype]
        first = column - shift
        pairs = []
        for mX, piece in zip(inputs, self.inputs):
            itemsize = ITEMSIZE[self.keys[piece.name].dtype]
            rPair = fragment(mX.element_type, 2 * self.vec)
            address = self._row(mX, piece, n, row) + Int64(first) * itemsize
            bound, tail = self._edge(piece, n, row, rows)
            past = self._distance(piece, target)
            if past == 0:
                low = cute.make_tensor(rPair.iterator, cute.make_layout(self.vec))
                load_if((first + self.vec > 0) & (first < cutlass.min(end, bound)), low, address)
                load_first_if(tail & (first >= bound) & (first < end), low, address, end - first)
            else:
                past = bytes_past(address, mX.element_type, self.vec) if past is None else past * itemsize
                fetch(rPair, address - past, first - past // itemsize, end, bound, tail)
            pairs.append((rPair, past))
        return first, pairs

    def _postprocess(self, outputs, group, n, coord, first, pairs):
        row, _, end = coord
        given = [widen(settle(rPair, past)) for rPair, past in pairs]
        results = [[] for _ in self.outputs]
        for j in range(self.vec):
            for found, x in zip(results, self.compute(*(g[j] for g in given))):
                found.append(x)
        for i in group:
            rX = fragment(Float32, self.vec)
            for j, x in enumerate(results[i]):
                rX[j] = x
            rOut = narrow(rX.load(), outputs[i].element_type, self.vec)
            address = self._row(outputs[i], self.outputs[i], n, row) + Int64(first) * (rOut.element_type.width // 8)
            store_masked(rOut, address, first, end, True)
