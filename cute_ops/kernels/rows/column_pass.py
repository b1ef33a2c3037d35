"""An expression of tiles, vectors and scalars, with sums of its values over rows, in one pass over ``[m, n]``."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.lib.copy import (
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
from cute_ops.kernels.lib.row_layout import SMEM_PERCENT, row_address, row_count
from cute_ops.kernels.rows.config import COLUMN_CTAS, column_width
from cute_ops.kernels.rows.config import COLUMN_THREADS as THREADS
from cute_ops.kernels.rowwise.pointwise import number_address

# Loads of tiles that a thread starts together: 16 bytes of each of these rows and tiles. While a thread computes those,
# as many of its next step are in flight; LOADS_ALONE where no next step is. GELU's gradient with that of the bias runs
# at 0.85 - 0.88 of a copy's rate, without loads ahead at 0.76 - 0.81.
LOADS, LOADS_ALONE = 2, 4
# Sums of one tile have nothing else to wait for: 8224 x 5120 takes 23 us with 8 vectors, 25 without loads ahead.
LOADS_OF_ONE = 8
# Without sums a part has the rows of this number of steps: what all rows of an example read is loaded once for them.
STEPS = 4


class ColumnPass:
    """Computes ``tiles, sums = compute(*inputs)`` in fp32; ``partials[p, c]`` are sums over the rows of part p.

    Tile: a CTA of 256 threads takes ``width`` vectors of neighbouring columns, a warp's if rows have as many, and the
    ``256 / width`` rows of its part in every ``parts * 256 / width``. Its threads in a column add a row each, one after
    another in registers, then the CTA adds their sums, in a fixed order. Rows that are loaded at once are neighbours in
    memory. All loads of :data:`LOADS` vectors, or of :data:`LOADS_OF_ONE`, start together, before those of the step
    before are computed, and none depends on a condition.
    With ``shared`` operands no part has rows of two examples: ``partials[p * examples + e, c]`` is the sum over part p
    of example e. Without sums the last examples come first: L2 still has what the pass before has read last.
    Compact rows that start anywhere are taken ``fold`` at a time, as one row that is whole vectors: its columns ``c``,
    ``c + n``, ... are sums of the same column, each in a row of its own of the workspaces. Fewer than ``fold`` rows are
    left, which are added after the others, element by element where a vector is not whole.
    Shared memory: 4 bytes for each thread and element of a vector. Bytes moved per element: every tensor once.

    Args:
        variant: the kernel's variant.
        inputs, tiles: pieces of tensors (:class:`~cute_ops.kernels.rowwise.pointwise.Piece`).
        sums: pieces of the row vectors or scalars; their partial sums are in the workspaces ``<name>_partials``. May be
            empty: then there are no ``partials``.
        compute: fp32 elements to fp32 elements of the tiles, then of the sums.
        vec: elements of a vector, which divide the rows of every piece, or ``fold`` of them.
        fold: rows that are taken as one, a divisor of the workspaces' rows.
        alone: whether there is one part, and the sums are stored as they are, to row vectors of any dtype.
    """

    def __init__(self, variant, inputs, tiles, sums, compute, vec, *, fold=1, alone=False):
        self.inputs, self.tiles, self.sums, self.compute, self.vec = inputs, tiles, sums, compute, vec
        self.keys, self.n, self.fold, self.alone = variant.tensors, variant.dims["n"], fold, alone
        vectors = WARP if self.n is None else -(-self.n * fold // vec)
        # An operand whose rows are the examples.
        self.example = next((i for i, piece in enumerate(inputs) if piece.shared), None)
        self.width = next(width for width in (1, 2, 4, 8, 16, WARP) if width >= min(vectors, WARP))
        if self.example is not None and self.n is not None:
            self.width = column_width(vectors)
        self.depth = THREADS // self.width
        read = sum(piece.tile and not piece.shared for piece in inputs)
        # Registers hold what several tiles and their sums need, or the next step: with both they spill.
        self.ahead = self.example is None and (len(tiles) < 2 or not sums)
        loads = LOADS if self.ahead else LOADS_ALONE
        self.unroll = LOADS_OF_ONE if read == 1 and not tiles else max(loads // max(read, 1), 1)
        if self.example is not None and sums:
            # If the shared operands are float32, vectors of 16-bit tiles are short: more of them are in flight.
            widest = max(ITEMSIZE[self.keys[p.name].dtype] for p in inputs if p.tile and not p.shared)
            self.unroll *= max(VECTOR_BYTES // (vec * widest), 1)
        self.splits = bool(tiles) and fold == 1  # steps whose rows all exist are computed apart
        self.resident = COLUMN_CTAS if sums and tiles and self.ahead else 0
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, inputs, tiles, partials, rows, n, stream):
        columns, examples = self.width * self.vec, self._examples(inputs)
        strips, parts = Int32((n * self.fold + (columns - 1)) // columns), Int32(1)
        if const_expr(len(partials) > 0 and not self.alone):
            parts = Int32(partials[0].shape[0]) // (self.fold * examples)
        elif const_expr(not self.alone):
            parts = _parts(rows // examples, self.depth * self.unroll * STEPS)
        self.kernel(inputs, tiles, partials, rows, n).launch(
            grid=[strips * examples, parts, 1], block=[self.width, self.depth, 1], stream=stream, use_pdl=self.pdl,
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=SMEM_PERCENT if self.resident else None,
        )  # fmt: skip

    def _examples(self, inputs):
        return 1 if self.example is None else Int32(row_count(inputs[self.example]))

    @cute.kernel
    def kernel(self, inputs, tiles, partials, count: Int64, n: Int64):
        x, y, _ = cute.arch.thread_idx()
        strip, part, _ = cute.arch.block_idx()
        example, above = Int32(0), Int64(0)
        if const_expr(self.example is not None):
            columns, examples = self.width * self.vec, self._examples(inputs)
            strips = Int32((n + (columns - 1)) // columns)
            example = strip // strips
            strip = strip - example * strips
            if const_expr(len(self.sums) == 0):
                example = examples - 1 - example
            count = count // examples
            above = example * count
        if const_expr(len(self.sums) > 0):
            smem = cutlass.utils.SmemAllocator()
            layout = cute.make_layout((self.width * self.vec, self.depth), stride=(1, self.width * self.vec))
            sSum = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        first, end = (strip * self.width + x) * self.vec, Int32(n) * self.fold
        inside = first < end
        # A thread past the row's end loads its last vector.
        place = Place(self, cutlass.min(first, end - self.vec), n, count, example, above)
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        shared = [self._shared(mX, piece, place) for mX, piece in zip(inputs, self.inputs)]
        rSums = [fragment(Float32, self.vec, 0.0) for _ in self.sums]
        # Rows are counted in 64 bits: some steps past the last one, 32 might not do.
        step = Int64(cute.arch.grid_dim()[1] * self.depth)
        top, stride, rows = Int64(part * self.depth + y), step * self.unroll, count // self.fold
        tensors = inputs, shared, tiles, rSums
        walk = top, step, stride, rows
        if const_expr(not self.ahead):
            self._walk(tensors, place, walk, inside)
        elif rows > 0:
            self._walk_ahead(tensors, place, walk, inside)
        if const_expr(self.fold > 1):
            # The rows that are left are the beginning of one more.
            room = cutlass.min(Int32(count - rows * self.fold) * Int32(n) - first, self.vec)
            if (room > 0) & ((rows - top) % step == 0):
                self._add_left(tensors, place, rows, room)
        for mPartials, piece, rSum in zip(partials, self.sums, rSums):
            row = part if const_expr(self.example is None) else part * self._examples(inputs) + example
            self._add_up(mPartials, piece, rSum, sSum, (row, strip * (self.width * self.vec)), n)

    @cute.jit
    def _walk(
        self, tensors: cutlass.Constexpr, place: cutlass.Constexpr, walk: cutlass.Constexpr, inside: Boolean
    ):  # fmt: skip
        """Compute a thread's rows. Of examples, steps whose rows all exist need no selects, which many sums would spend
        a third of their time with.
        """
        top, step, stride, rows = walk
        whole = Int32(0)
        if const_expr(self.example is not None):
            whole = Int32(rows // stride)
            for i in cutlass.range(whole, unroll=1):
                first = top + i * stride
                loaded = self._loaded(tensors, place, (first, step, rows), True)
                self._compute(tensors, place, loaded, (first, step, rows), inside, True)
        for i in cutlass.range(whole, Int32((rows + (stride - 1)) // stride), unroll=1):
            first = top + i * stride
            loaded = self._loaded(tensors, place, (first, step, rows), False)
            self._compute(tensors, place, loaded, (first, step, rows), inside, False)

    @cute.jit
    def _walk_ahead(
        self, tensors: cutlass.Constexpr, place: cutlass.Constexpr, walk: cutlass.Constexpr, inside: Boolean
    ):  # fmt: skip
        """Compute a thread's rows, while those of the next step are on their way. Sums alone have time for selects, for
        which fewer registers do.
        """
        top, step, stride, rows = walk
        whole = Int32(rows // stride if self.splits else (rows + (stride - 1)) // stride)
        current = self._loaded(tensors, place, (top, step, rows), False)
        own = [i for i, rX in enumerate(tensors[1]) if rX is None]
        for i in cutlass.range(whole, unroll=1):
            first = top + i * stride
            following = self._loaded(tensors, place, (first + stride, step, rows), False)
            self._compute(tensors, place, current, (first, step, rows), inside, self.splits)
            for vectors, others in zip(current, following):
                for j in own:
                    vectors[j].store(others[j].load())
        if const_expr(self.splits):
            if whole * stride < rows:
                self._compute(tensors, place, current, (top + whole * stride, step, rows), inside, False)

    def _loaded(self, tensors, place, walk, whole):
        """The vectors of the rows that a thread loads together; ``whole``: whether all of them exist, else those past
        the end are the last one again.
        """
        (inputs, shared, *_), (first, step, rows), loaded = tensors, walk, []
        for u in range(self.unroll):
            row = first + u * step if whole else cutlass.min(first + u * step, rows - 1)
            loaded.append([self._load(mX, piece, place, row, rX) for mX, piece, rX in zip(inputs, self.inputs, shared)])
        return loaded

    @cute.jit
    def _compute(
        self, tensors: cutlass.Constexpr, place: cutlass.Constexpr, loaded: cutlass.Constexpr,
        walk: cutlass.Constexpr, inside: Boolean, whole: cutlass.Constexpr,
    ):  # fmt: skip
        """Compute the rows that a thread has loaded; those past the end are not counted."""
        (*_, tiles, rSums), (first, step, rows) = tensors, walk
        for u, vectors in enumerate(loaded):
            coord = first + u * step
            results = self._computed([widen(rX) for rX in vectors], place)
            for mX, piece, rX in zip(tiles, self.tiles, results):
                address = self._address(mX, piece, place, place.first_row + coord)
                rOut = narrow(rX.load(), mX.element_type, self.vec)
                store_if(inside if whole else (coord < rows) & inside, rOut, address, True)
            for rSum, rX in zip(rSums, results[len(self.tiles) :]):
                for j in cutlass.range_constexpr(self.vec):
                    x = rX[j] if whole else cutlass.select_(coord < rows, rX[j], Float32(0.0))
                    rSum[j] = rSum[j] + x

    @cute.jit
    def _add_left(self, tensors: cutlass.Constexpr, place: cutlass.Constexpr, row: Int64, room: Int32):
        """Compute a vector of which the first ``room`` elements are inside the tensors."""
        (inputs, shared, tiles, rSums), vectors = tensors, []
        for mX, piece, rShared in zip(inputs, self.inputs, shared):
            if const_expr(piece.tile):
                rX = fragment(mX.element_type, self.vec, 0)
                load_inside(Boolean(True), rX, self._address(mX, piece, place, row), room)
            else:
                rX = self._load(mX, piece, place, row, rShared)
            vectors.append(rX)
        results = self._computed([widen(rX) for rX in vectors], place)
        for mX, piece, rX in zip(tiles, self.tiles, results):
            rOut = narrow(rX.load(), mX.element_type, self.vec)
            store_masked(rOut, self._address(mX, piece, place, row), Int32(0), room, True)
        for rSum, rX in zip(rSums, results[len(self.tiles) :]):
            for j in cutlass.range_constexpr(self.vec):
                rSum[j] = rSum[j] + cutlass.select_(j < room, rX[j], Float32(0.0))

    @cute.jit
    def _add_up(self, mPartials, piece: cutlass.Constexpr, rSum, sSum, target, n):
        """Store the sums of a CTA's columns over its threads; ``target``: the workspace's row, and the first column."""
        x, y, _ = cute.arch.thread_idx()
        row_of_sums, start = target
        cute.arch.barrier()
        for j in cutlass.range_constexpr(self.vec):
            sSum[x * self.vec + j, y] = rSum[j]
        cute.arch.barrier()
        thread, columns = y * self.width + x, self.width * self.vec
        for i in cutlass.range_constexpr(-(-columns // THREADS)):
            column = i * THREADS + thread
            place = cutlass.min(column, columns - 1)
            total = Float32(0.0)
            for row in cutlass.range_constexpr(self.depth):
                total = total + sSum[place, row]
            if (column < columns) & (start + column < Int32(n) * self.fold):
                above = (start + column) // Int32(n) if const_expr(self.fold > 1) else 0
                column = start + column - above * Int32(n) if const_expr(self.fold > 1) else start + column
                column = Int32(piece.index * n) + column
                if const_expr(self.alone):
                    mPartials[column] = total.to(mPartials.element_type)
                else:
                    mPartials[row_of_sums * self.fold + above, column] = total

    def _shared(self, mX, piece, place):
        """The vector or number of an input that all rows read, or all rows of an example; None if each row has its
        own.
        """
        if piece.rows and not piece.shared:
            return None
        rX = fragment(mX.element_type, self.vec if piece.columns else 1)
        if piece.shared:
            load(rX, self._address(mX, piece, place, place.example))
            return rX
        address, itemsize = mX.iterator.toint(), mX.element_type.width // 8
        if piece.columns:
            address = address + piece.index * place.n * itemsize
        if piece.columns and self.fold > 1:
            gX = gmem_elements(mX.element_type, address, Int32(place.n))
            for j in range(self.vec):
                rX[j] = gX[(place.first + j) % Int32(place.n)]
        else:
            load(rX, address + Int64(place.first) * itemsize if piece.columns else address)
        return rX

    def _load(self, mX, piece, place, row, rShared):
        if rShared is not None:
            return rShared
        if not piece.columns and self.fold > 1:
            return self._numbers(mX, piece, place, row)
        rX = fragment(mX.element_type, self.vec if piece.columns else 1)
        load(rX, self._address(mX, piece, place, place.first_row + row))
        return rX

    def _numbers(self, mX, piece, place, row):
        """The numbers of the two rows that a vector may have elements of."""
        rX, top = fragment(mX.element_type, 2), row * self.fold + place.above
        for i in range(2):
            address = number_address(mX, self.keys[piece.name], cutlass.min(top + i, place.count - 1))
            rX[i] = gmem_elements(mX.element_type, address, 1)[0]
        return rX

    def _address(self, mX, piece, place, row):
        if not piece.columns:
            return number_address(mX, self.keys[piece.name], row)
        itemsize, n = mX.element_type.width // 8, place.n
        if self.fold > 1:
            return mX.iterator.toint() + (row * (n * self.fold) + place.first) * itemsize
        column = Int64(place.first) + piece.index * n
        return row_address(mX, self.keys[piece.name], row, mX.shape[-1]) + column * itemsize

    def _computed(self, given, place):
        """fp32 fragments of the outputs."""
        results = [fragment(Float32, self.vec) for _ in (*self.tiles, *self.sums)]
        for j in range(self.vec):
            elements = [self._element(g, piece, place, j) for g, piece in zip(given, self.inputs)]
            for rX, value in zip(results, self.compute(*elements)):
                rX[j] = value
        return results

    def _element(self, given, piece, place, j):
        if piece.columns:
            return given[j]
        if not piece.rows or self.fold == 1:
            return given[0]
        return cutlass.select_(j < place.left, given[0], given[1])


class Place:
    """Where a thread's vector is in each row, or in each ``fold`` rows that are taken as one.

    Attributes:
        first: the vector's first column.
        n: the length of rows.
        count: of rows, of one example if operands are shared by examples.
        example, first_row: the example, and the number of its first row.
        above: which of these rows it begins in; ``left``: how many elements are left of that one.
    """

    def __init__(self, column_pass, first, n, count, example, first_row):
        self.first, self.n, self.count, self.example, self.first_row = first, n, count, example, first_row
        if column_pass.fold > 1:
            self.above = first // Int32(n)
            self.left = (self.above + 1) * Int32(n) - first


class PartSum:
    """``out[c] = sum_p partials[p, c]`` in fp32, for few parts, whose rows have the columns of all examples.

    Tile: a CTA takes 128 columns of one workspace. The four threads of a column add every fourth row each, then one of
    them adds their sums, in a fixed order. Shared memory: 2 KB. Bytes moved: the workspaces once, mostly from L2.
    """

    columns, depth, batch = 128, 4, 8

    def __init__(self, arch):
        self.pdl = can_use_pdl(arch)

    @cute.jit
    def __call__(self, partials, outputs, stream):
        # All workspaces are equally wide.
        blocks = cute.ceil_div(Int32(partials[0].shape[1]), self.columns)
        self.kernel(partials, outputs).launch(
            grid=[blocks, len(partials), 1], block=[self.columns, self.depth, 1], stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def kernel(self, partials, outputs):
        block, which, _ = cute.arch.block_idx()
        smem = cutlass.utils.SmemAllocator()
        sSum = smem.allocate_tensor(Float32, cute.make_layout((self.columns, self.depth)), byte_alignment=16)
        wait_for_previous(self.pdl)
        let_next_start(self.pdl)
        for i, (mPartials, mOut) in enumerate(zip(partials, outputs)):
            if which == i:
                self._sum(mPartials, mOut, sSum, block * self.columns)

    @cute.jit
    def _sum(self, mPartials, mOut, sSum, start: Int32):
        x, level, _ = cute.arch.thread_idx()
        count, n, total = Int32(mPartials.shape[0]), Int32(mPartials.shape[1]), Float32(0.0)
        column = cutlass.min(start + x, n - 1)
        for p in cutlass.range(level, count, self.depth * self.batch, unroll=1):
            # Loads past the end are those of the last row, which is not counted again.
            rows = [p + i * self.depth for i in range(self.batch)]
            terms = [mPartials[cutlass.min(row, count - 1), column] for row in rows]
            for row, term in zip(rows, terms):
                total = total + cutlass.select_(row < count, term, Float32(0.0))
        sSum[x, level] = total
        cute.arch.barrier()
        if (level == 0) & (start + x < n):
            for d in cutlass.range_constexpr(1, self.depth):
                total = total + sSum[x, d]
            mOut[start + x] = total.to(mOut.element_type)


def _parts(rows, of_one):
    """How many CTAs share the rows; 65535 at most."""
    return cutlass.min(Int32((rows + (of_one - 1)) // of_one), 65535)
