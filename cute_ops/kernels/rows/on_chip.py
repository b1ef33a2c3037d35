"""An expression with reductions of rows that wait for them in registers or in shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.emit.primitives import COMBINE, NEUTRAL
from cute_ops.kernels.lib.column_params import column_elements, column_vectors
from cute_ops.kernels.lib.column_reduce import TileColumnSum
from cute_ops.kernels.lib.copy import (
    AHEAD,
    compiler_barrier,
    fragment,
    gmem_elements,
    narrow,
    store,
    store_elements,
    store_if,
    trim,
    widen,
)
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.realign import bytes_past, fetch, settle_all
from cute_ops.kernels.lib.row_copy import RowAccess
from cute_ops.kernels.lib.row_layout import SMEM_PERCENT, RowTile, Vectors, clusters
from cute_ops.kernels.lib.smem_ring import RowRing
from cute_ops.kernels.rows.config import FusedRowConfig
from cute_ops.kernels.rows.exchange import exchanges
from cute_ops.kernels.rows.pieces import RowPieces, Shown, combined, wide

# Vectors of a row in shared memory for which row vectors are loaded together.
BATCH = 4
# Threads of one CTA that share a row, from which on an exchange of sums for each row gains more than it costs.
IN_STEP = 256


class HeldRows(RowPieces):
    """A thread's vectors of a row, from stage to stage, in both forms.

    Tile: ``threads_per_row`` threads of each of ``cluster`` CTAs hold a row, ``per_thread`` vectors each; a CTA of
    ``threads`` holds ``threads / threads_per_row`` rows. Row vectors are loaded once. Bytes moved per element: every
    tile once.
    """

    def __init__(self, variant):
        super().__init__(variant)
        self.config = FusedRowConfig.of(variant.config)
        shown = Shown(self.tensors)
        self.tile = RowTile(self._vectors(shown), self.config)
        self.access = RowAccess(shown, self.tile)
        self.exchanges = exchanges(self.tile, self.emit.primitives)
        self.exchanged = len(self.exchanges)  # of a row: exchanges are counted, since mbarriers take turns
        self.independent = not self.exchanges  # the CTAs of a row
        self.pdl = can_use_pdl(variant.arch)

    def _vectors(self, shown):
        return Vectors(shown, self.names, self.n, self.config.align_vectors)

    def _allocate(self, smem):
        """Shared memory of the reductions, which may be used after :meth:`_ready`."""
        if not self.exchanges:
            return None, None
        shared = self.exchanges[0].allocate(smem)
        self.exchanges[0].prepare(shared)
        return shared

    def _ready(self):
        if self.exchanges:
            self.exchanges[0].ready()

    def _columns(self, tensors, first, vectors):
        """Row vectors at this thread's columns, with their nodes and pieces."""
        return [
            (each, column_vectors(self.column(tensors, each[1], self.n), self.keys[each[1]], self.tile, first))
            for each in vectors
        ]

    def _reduced(self, values, totals, step, shared, *, last=False):
        """Compute the stages of a row that its columns wait for or, ``last``, the others; ``totals(s)`` is this
        thread's share of stage ``s``.
        """
        for s in range(self.awaited, len(self.emit.primitives)) if last else range(self.awaited):
            values.reduced(s, self.exchanges[s](totals(s), shared, step * self.exchanged + s))

    def _totals(self, values, stage, read, columns, first):
        """A thread's share of a stage's reductions; ``read(k)`` gives the k-th vectors."""
        totals = self.nothing(stage)
        for k in range(self.tile.per_thread):
            totals = self._more(totals, values, stage, self._elements(read, columns, k), first[k], k)
        return totals

    def _more(self, totals, values, stage, elements, first, k):
        """A stage's reductions with the k-th vectors."""
        found = []
        terms = self.terms(values, stage, elements, self.tile.vec)
        for primitive, total, rTerm in zip(self.emit.primitives[stage], totals, terms):
            if self.tile.predicated(k):
                trim(rTerm, first, Int32(self.n), NEUTRAL[primitive])
            x = combined(COMBINE[primitive], rTerm)
            if self.tile.ends_outside(k) and not self.tile.predicated(k):
                x = cutlass.select_(first < self.n, x, Float32(NEUTRAL[primitive]))
            found.append(COMBINE[primitive](total, x))
        return tuple(found)

    def _elements(self, read, columns, k):
        """From j to the operands' j-th elements of the k-th vectors, by node."""
        held = [*zip(self.tiles, read(k)), *((each, wide(rW[k])) for each, rW in columns)]
        return lambda j: {i: vector[j] for (i, _), vector in held}

    def _emit(self, values, elements, targets, coord, k, valid=None):
        """Store a thread's k-th vectors of the tiles."""
        vectors = self.computed(values, self.outputs["t"], elements, self.tile.vec)
        for rOut, gOut in zip(vectors, targets):
            self.access.store(gOut, narrow(rOut.load(), gOut.element_type, self.tile.vec), coord, k, valid)


class RowsInRegisters(HeldRows):
    """One pass: rows stay in registers, in their own dtype.

    All loads of a thread are in flight together. Halves of packed rows that start off a vector of the other tiles are
    read as pairs of vectors, see :mod:`cute_ops.kernels.lib.realign`. Two row vectors or more that reductions do not
    need are loaded after these: they would take as many registers as the row. Shared memory: 4 bytes per reduction,
    warp and CTA of the cluster, twice; none where a row fits a warp.
    """

    def __init__(self, variant):
        super().__init__(variant)
        late = [each for each in self.vectors if each[0] not in self.emit.reduced]
        self.late = late if self.emit.stages and len(late) > 1 else []

    def _vectors(self, shown):
        """The vectors of all tiles or, if these are wider, of those that are not packed; then halves lie apart."""
        self.apart, vectors = set(), super()._vectors(shown)
        whole = [self.keys[piece].name for _, piece in (*self.tiles, *self.outputs["t"]) if piece.count == 1]
        if not whole or any(piece.count > 1 for _, piece in self.outputs["t"]):
            return vectors
        wider = Vectors(shown, whole, self.n, self.config.align_vectors)
        apart = {piece for _, piece in self.tiles if piece.count > 1}
        # A pair of vectors of a wider dtype would be more than two accesses.
        wide = any(wider.vec * ITEMSIZE[self.keys[piece].dtype] > VECTOR_BYTES for piece in apart)
        if wider.vec == vectors.vec or wide:
            return vectors
        self.apart = apart
        return wider

    @cute.jit
    def __call__(self, arguments, stream):
        rows, resident = self.shape(self.named(arguments))[0], self.config.resident
        count = Int32((rows + (self.tile.rows - 1)) // self.tile.rows)
        self.kernel(arguments).launch(
            **clusters(self.tile, count, resident, SMEM_PERCENT if resident > 1 else None, apart=self.independent),
            stream=stream, use_pdl=self.pdl,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, arguments):
        bidx, local, t, rank = self.tile.here()
        tensors = self.named(arguments)
        smem = cutlass.utils.SmemAllocator()
        shared = self._allocate(smem)
        pieces = [piece for _, piece in self.outputs["t"]]
        names = [self.keys[piece].name for piece in pieces]
        blocks = self.access.allocate(smem, [tensors[piece.name] for piece in pieces], names)
        row = Int64(bidx) * self.tile.rows + local
        count = self.shape(tensors)[0]
        valid = row < count
        coord = self.access.coord(row, count, t, rank)
        first = coord.first
        if const_expr(self.pdl):
            few = cute.arch.grid_dim()[0] <= AHEAD
            self.access.fetch_ahead(self.rows(tensors, self.tiles, cutlass.min(row, count - 1), self.n), coord, few)
        wait_for_previous(self.pdl)
        held = self._load(tensors, coord)
        columns = self._columns(tensors, first, [each for each in self.vectors if each not in self.late])
        columns += self.stretches(tensors, row, first, self.n)
        values = self.emit.begin(self.row_numbers(tensors, row, valid), self.n)
        let_next_start(self.pdl)
        self._ready()
        read = lambda k: self._read(held, k)  # noqa: E731
        totals = lambda s: self._totals(values, s, read, columns, first)  # noqa: E731
        self._reduced(values, totals, Int32(0), shared)
        columns += self._columns(tensors, first, self.late)
        found = self._store(tensors, values, read, columns, coord, blocks)
        totals = lambda s: found if s == self.awaited else self._totals(values, s, read, columns, first)  # noqa: E731
        self._reduced(values, totals, Int32(0), shared, last=True)
        self.store_numbers(tensors, values, row, valid & (t == 0) & (rank == 0))

    def _store(self, tensors, values, read, columns, coord, blocks):
        """Store a row's columns. Returns this thread's share of the next stage, which the same registers serve."""
        rows = lambda row: self.rows(tensors, self.outputs["t"], row, self.n)  # noqa: E731
        targets = self.access.targets(rows(coord.row), blocks)
        last = self.awaited < len(self.emit.primitives)
        totals = self.nothing(self.awaited) if last else ()
        for k in range(self.tile.per_thread if targets or last else 0):
            elements = self._elements(read, columns, k)
            if targets:
                self._emit(values, elements, targets, coord, k)
            if last:
                totals = self._more(totals, values, self.awaited, elements, coord.first[k], k)
        self.access.flush(blocks, rows, coord)
        return totals

    def _load(self, tensors, coord):
        """This thread's vectors of each tile, all on their way together."""
        rows = dict(zip([piece for _, piece in self.tiles], self.rows(tensors, self.tiles, coord.row, self.n)))
        pairs = {piece: self._load_pairs(rows[piece], piece, coord) for piece in rows if piece in self.apart}
        others = [piece for piece in rows if piece not in pairs]
        loaded = dict(zip(others, self.access.load([rows[piece] for piece in others], coord, coord.valid)))
        return [settle_all(*pairs[piece]) if piece in pairs else loaded[piece] for piece in rows]

    def _load_pairs(self, gRow, piece, coord):
        """The pairs that hold this thread's vectors of a half, and how many bytes past their beginning these begin."""
        vec, itemsize, base = self.tile.vec, gRow.element_type.width // 8, gRow.address
        past = bytes_past(base + Int64(coord.first[0]) * itemsize, gRow.element_type, vec)
        end, bound, tail = cutlass.select_(coord.valid, Int32(self.n), Int32(-2 * vec)), Int32(self.n), Boolean(False)
        if piece.index + 1 == piece.count:  # behind it lies no other half
            flat = self.variant.tensors[piece.name].layout == "flat" and not piece.shared
            tail = coord.row + 1 >= coord.count if flat else Boolean(True)
            bound = cutlass.select_(tail, Int32(self.n - vec + 1), bound)
        pairs = [fragment(gRow.element_type, 2 * vec, 0) for _ in coord.first]
        for rPair, start in zip(pairs, coord.first):
            begin = start - past // itemsize
            fetch(rPair, base + Int64(begin) * itemsize, begin, end, bound, tail)
        return pairs, past

    def _read(self, held, k):
        for vectors in held:
            if not self.config.keep and self.tile.vec * vectors[k].element_type.width >= 32:
                compiler_barrier(vectors[k])
        return [widen(vectors[k]) for vectors in held]


class RowsInRing(HeldRows):
    """Rows wait in slots of shared memory; in persistent clusters the next ones load meanwhile.

    Each thread copies, and later reads, its own vectors. With ``clusters`` cluster ``c`` takes the row groups ``c, c +
    clusters, ...``, all of whose rows start at the same place of a vector: a thread keeps its columns, and adds up the
    gradients of row vectors in registers. What a cluster has added up becomes a row of the workspaces.
    Shared memory: ``stages`` slots for each tile that is read; reductions as in registers.
    """

    def __init__(self, variant):
        super().__init__(variant)
        # Where a cluster adds up sums of one example, what its rows share is loaded once, as row vectors are.
        once = bool(self.sums_of_examples and self.outputs["r"])
        self.once = [each for each in self.tiles if once and each[1].shared]
        self.tiles = [each for each in self.tiles if each not in self.once]
        self.ring = RowRing(self.tile, [self.keys[piece] for _, piece in self.tiles], self.config.stages)
        self.sums = [*self.outputs["r"], *self.outputs["s"]]
        self.late_sums = self._late_sums()
        if self.late_sums:
            self.exchanged = self.awaited
        self.tile_sum = TileColumnSum(self.tile)
        together = self.tile.rows > 1 and self.outputs["r"]
        self.bytes = max(self.ring.bytes, 4 * self.tile_sum.width * self.tile.rows if together else 0)

    @cute.jit
    def __call__(self, arguments, stream):
        tensors = self.named(arguments)
        rows = self.shape(tensors)[0]
        groups = (rows + (self.tile.rows - 1)) // self.tile.rows
        if const_expr(len(self.sums) > 0):
            # Each of a cluster's rows has its own sums of scalars.
            rows_of_sums = 1 if const_expr(len(self.outputs["r"]) > 0) else self.tile.rows
            groups = tensors[self.partials_of(self.sums[0][1])].shape[0] // rows_of_sums
        elif const_expr(self.config.clusters > 0):
            groups = cutlass.min(groups, Int64(self.config.clusters))
        self.kernel(arguments).launch(
            **clusters(self.tile, Int32(groups), self.config.resident, 100, apart=self.independent),
            stream=stream, use_pdl=self.pdl,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, arguments):
        group, rank, _ = cute.arch.block_idx()
        if const_expr(self.tile.cluster == 1):
            rank = 0
        tensors = self.named(arguments)
        smem = cutlass.utils.SmemAllocator()
        base, slots = None, []
        if const_expr(self.bytes > 0):
            base = smem.allocate(self.bytes, 16)
            slots = [self.ring.view(base, tensors[piece.name], self.keys[piece].name) for _, piece in self.tiles]
        for sX in slots:
            self.ring.clear(sX)
        shared = self._allocate(smem)
        wait_for_previous(self.pdl)
        self._ready()
        self._walk(tensors, slots, base, shared, Int32(group), rank)
        if const_expr(self.config.clusters > 0):
            let_next_start(self.pdl)

    @cute.jit
    def _walk(
        self, tensors: cutlass.Constexpr, slots: cutlass.Constexpr, base: cutlass.Constexpr, shared, group: Int32,
        rank,
    ):  # fmt: skip
        tidx, groups = cute.arch.thread_idx()[0], cute.arch.grid_dim()[0]
        t, count = tidx % self.tile.threads_per_row, self.shape(tensors)[0]
        local = tidx // self.tile.threads_per_row
        if const_expr(self.sums_of_examples):
            walk = self.walk_of_example(tensors, group, groups, self.tile.rows)
            steps, start, stride = walk.steps, walk.beside(local), Int64(walk.stride)
            row_of = lambda step: walk.row(start, step, count)  # noqa: E731
        else:
            tiles = (count + (self.tile.rows - 1)) // self.tile.rows
            steps = Int32((tiles - group + (groups - 1)) // Int64(groups))
            start, stride = Int64(group) * self.tile.rows + local, Int64(groups) * self.tile.rows
            row_of = lambda step: cutlass.select_(step < steps, start + Int64(step) * stride, count)  # noqa: E731
        coord = self.access.coord(start, count, t, rank)
        first = coord.first
        for stage in cutlass.range_constexpr(self.config.stages - 1):
            self._fetch(tensors, slots, first, row_of(Int32(stage)), count, Int32(stage))
        columns = self._columns(tensors, first, self.vectors) if const_expr(len(self.outputs["r"]) > 0) else []
        if const_expr(len(self.once) > 0):
            columns += self._of_example(tensors, coord)
        sums, numbers = self._nothing(), self._numbers(tensors, row_of(Int32(0)), count)
        for step in cutlass.range(steps, unroll=1):
            ahead = step + (self.config.stages - 1)
            self._fetch(tensors, slots, first, row_of(ahead), count, ahead % self.config.stages)
            row = row_of(step)
            values = self.emit.begin({i: rX[0].to(Float32) for (i, _), rX in zip(self.numbers, numbers)}, self.n)
            # Those of the next row, so that nobody waits for them.
            self._load_numbers(tensors, numbers, row_of(step + 1), count)
            cute.arch.cp_async_wait_group(self.config.stages - 1)
            if const_expr(self.config.clusters == 0):
                let_next_start(self.pdl)
            stage = step % self.config.stages
            held = Slot(self, tensors, slots, stage, rank * self.tile.span + t, row)
            own = [*columns, *self._by_row(tensors, row, first)]
            totals = lambda s: self._stage(held, values, s, own, first)  # noqa: E731
            self._reduced(values, totals, step, shared)
            if row < count:
                self._postprocess(held, values, own, sums, coord._replace(row=row))
            scalars = sums[len(self.outputs["r"]) :]
            if const_expr(len(self.late_sums) > 0):
                self._add_to(scalars, totals(self.awaited), row < count)
            else:
                self._reduced(values, totals, step, shared, last=True)
                if row < count:
                    self._finish(tensors, values, scalars, row, (t == 0) & (rank == 0))
        if const_expr(len(self.late_sums) > 0):
            self._exchange_scalars(sums[len(self.outputs["r"]) :], shared, steps)
        cute.arch.cp_async_wait_group(0)
        for (_, piece), rSums in zip(self.outputs["r"], sums):
            mPartials = tensors[self.partials_of(piece)]
            address = mPartials.iterator.toint() + (Int64(group) * mPartials.shape[1] + piece.index * self.n) * 4
            self._store_columns(address, rSums, base, group, rank, first)
        slot = Int64(group) * self.tile.rows + local
        self._store_scalars(tensors, sums[len(self.outputs["r"]) :], slot, (t == 0) & (rank == 0))

    def _late_sums(self):
        """For each scalar its reduction in the last stage, if the scalars are that stage's sums and nothing else waits
        for it: a thread then adds up its share of all rows, and exchanges it once.
        """
        places, last = [self.emit.expression.outputs[i] for i, _ in self.outputs["s"]], self.awaited
        alone = len(self.emit.stages) == last + 1 and not self.outputs["c"]
        # An exchange a row keeps the loads of many warps in step: 16384 x 5120 in float16 takes 130 us instead of 139.
        alone &= self.tile.cluster > 1 or self.tile.threads_per_row < IN_STEP
        if not (alone and {*places} == {*self.emit.stages[last]} and {*self.emit.primitives[last]} == {"sum"}):
            return []
        return [self.emit.stages[last].index(i) for i in places]

    def _add_to(self, scalars, totals, valid):
        """Add a thread's share of a row's sums, if the row exists."""
        for rSum, s in zip(scalars, self.late_sums):
            rSum[0] = rSum[0] + cutlass.select_(valid, totals[s], Float32(0.0))

    def _exchange_scalars(self, scalars, shared, steps):
        """Add up the threads' shares."""
        shares = [Float32(0.0)] * len(scalars)
        for rSum, s in zip(scalars, self.late_sums):
            shares[s] = rSum[0]
        totals = self.exchanges[self.awaited](tuple(shares), shared, steps * self.exchanged)
        for rSum, s in zip(scalars, self.late_sums):
            rSum[0] = totals[s]

    def _of_example(self, tensors, coord):
        """Operands that the rows of this cluster's example share, at this thread's columns."""
        coord = coord._replace(row=cutlass.min(coord.row, coord.count - 1))
        held = self.access.load(self.rows(tensors, self.once, coord.row, self.n), coord)
        return [*zip(self.once, held)]

    def _by_row(self, tensors, row, first):
        """Operands that are not loaded, for rows whose vectors a thread takes all at once."""
        return self.stretches(tensors, row, first, self.n) if self.outputs["r"] else []

    def _numbers(self, tensors, row, count):
        """The operands that have one number for a row."""
        numbers = [fragment(tensors[piece.name].element_type, 1) for _, piece in self.numbers]
        self._load_numbers(tensors, numbers, row, count, scalars=True)
        return numbers

    def _load_numbers(self, tensors, numbers, row, count, scalars=False):
        """Load a row's numbers, past the last row those of the last one: a branch would wait for the loads."""
        row = cutlass.min(row, count - 1)
        for (_, piece), rX in zip(self.numbers, numbers):
            if piece.rows or scalars:
                mX = tensors[piece.name]
                rX[0] = gmem_elements(mX.element_type, self.number_address(tensors, piece, row), 1)[0]

    def _fetch(self, tensors, slots, first, row, count, stage):
        """Start loading a row into a slot."""
        rows = self.rows(tensors, self.tiles, row, self.n)
        held = ((sX, gRow.address, first, row < count) for sX, gRow in zip(slots, rows))
        self.ring.fetch_rows(held, self.tile.edge(row, count), stage)
        cute.arch.cp_async_commit_group()

    def _stage(self, held, values, stage, columns, first):
        if self.outputs["r"]:
            return self._totals(values, stage, held.read, columns, first)
        return self._walked(held, values, stage)

    @cute.jit
    def _walked(self, held: cutlass.Constexpr, values: cutlass.Constexpr, stage: cutlass.Constexpr):
        """Loop over a thread's vectors: all of them at once would take too many registers."""
        totals = self.nothing(stage)
        for k in cutlass.range(held.vectors, unroll=2):
            totals = self._with(totals, held, values, stage, k)
        return totals

    def _with(self, totals, held, values, stage, k):
        elements = held.elements(k, held.columns(k))
        return self.added(totals, values, stage, elements, held.first(k), Int32(self.n))

    def _postprocess(self, held, values, columns, sums, coord):
        """Store a row's columns and add to their sums over rows."""
        vectors = self.outputs["r"]
        if vectors:
            targets = self.rows(held.tensors, self.outputs["t"], coord.row, self.n)
            for k in range(self.tile.per_thread):
                elements = self._elements(held.read, columns, k)
                self._emit(values, elements, targets, coord, k, True)
                for rSums, rX in zip(sums, self.computed(values, vectors, elements, self.tile.vec)):
                    rSums[k].store(rSums[k].load() + rX.load())
        elif self.outputs["t"]:
            self._emit_walked(held, values, self.rows(held.tensors, self.outputs["t"], coord.row, self.n))

    def _finish(self, tensors, values, sums, row, alone):
        """Store a row's numbers and add to their sums over rows."""
        self.store_numbers(tensors, values, row, alone)
        for rSum, (coord, _) in zip(sums, self.outputs["s"]):
            rSum[0] = rSum[0] + values.number(coord)

    @cute.jit
    def _emit_walked(self, held: cutlass.Constexpr, values: cutlass.Constexpr, targets: cutlass.Constexpr):
        if const_expr(len(self.vectors) > 0 and not self.tile.v.masked):
            for batch in cutlass.range((held.vectors + (BATCH - 1)) // BATCH, unroll=1):
                self._emit_batch(held, values, targets, batch * BATCH)
        else:
            for k in cutlass.range(held.vectors, unroll=2):
                self._emit_walking(held, values, targets, k)

    def _emit_batch(self, held, values, targets, start):
        """Some vectors, whose row vectors are on their way together: no load may overtake a store."""
        coords = [start + b for b in range(BATCH)]
        columns = [held.columns(cutlass.min(k, held.vectors - 1)) for k in coords]
        for k, each in zip(coords, columns):
            self._emit_if(k < held.vectors, held, values, targets, k, each)

    @cute.jit
    def _emit_if(
        self, valid: Boolean, held: cutlass.Constexpr, values: cutlass.Constexpr, targets: cutlass.Constexpr, k: Int32,
        columns: cutlass.Constexpr,
    ):  # fmt: skip
        if valid:
            self._emit_vector(held, values, targets, k, columns)

    def _emit_walking(self, held, values, targets, k):
        self._emit_vector(held, values, targets, k, held.columns(k))

    def _emit_vector(self, held, values, targets, k, columns):
        vectors = self.computed(values, self.outputs["t"], held.elements(k, columns), self.tile.vec)
        self.store_inside(vectors, targets, self.tile.v, held.first(k), Int32(self.n))

    def _nothing(self):
        """Sums over rows, all 0: of this thread's vectors of each row vector, and of each scalar."""
        vec, count = self.tile.vec, self.tile.per_thread
        vectors = [[fragment(Float32, vec, 0.0) for _ in range(count)] for _ in self.outputs["r"]]
        return [*vectors, *(fragment(Float32, 1, 0.0) for _ in self.outputs["s"])]

    @cute.jit
    def _store_columns(
        self, address: Int64, rSums: cutlass.Constexpr, base: cutlass.Constexpr, group: Int32, rank,
        first: cutlass.Constexpr,
    ):  # fmt: skip
        """Add up the sums of a CTA's rows and store those of the cluster in its row of the workspace."""
        if const_expr(self.tile.rows == 1):
            for k in cutlass.range_constexpr(self.tile.per_thread):
                if const_expr(self.tile.v.masked):
                    store_elements(rSums[k], address + Int64(first[k]) * 4, first[k], Int32(self.n))
                else:
                    store_if(first[k] < self.n, rSums[k], address + Int64(first[k]) * 4)
        else:
            self.tile_sum(rSums, base, address, group, rank)

    @cute.jit
    def _store_scalars(self, tensors: cutlass.Constexpr, sums: cutlass.Constexpr, coord: Int64, alone: Boolean):
        """Store the sums of each of a cluster's rows."""
        if alone:
            for rSum, (_, piece) in zip(sums, self.outputs["s"]):
                store(rSum, tensors[self.partials_of(piece)].iterator.toint() + coord * 4)


class Slot:
    """A thread's vectors of a row in shared memory.

    Attributes:
        vectors: how many of them begin inside the row or before it.
    """

    def __init__(self, rows, tensors, slots, stage, begin, row):
        tile, shift = rows.tile, rows.tile.v.shift(row, rows.n)
        self.rows, self.tensors, self.slots, self.stage, self.row = rows, tensors, slots, stage, row
        self.shift = shift
        self.begin = begin  # the first of them
        left = rows.n + shift - begin * tile.vec
        apart = tile.threads_per_row * tile.vec
        self.vectors = cutlass.max(cutlass.min((left + (apart - 1)) // apart, tile.per_thread), Int32(0))

    def first(self, k):
        tile = self.rows.tile
        return (self.begin + k * tile.threads_per_row) * tile.vec - self.shift

    def read(self, k):
        return [widen(self.rows.ring.read(sX, k, self.stage)) for sX in self.slots]

    def columns(self, k):
        """The row vectors at the k-th vectors, with their nodes."""
        rows, first = self.rows, self.first(k)
        found = []
        for i, piece in rows.vectors:
            mW = rows.column(self.tensors, piece, rows.n)
            found.append((i, column_elements(mW, rows.keys[piece], rows.tile.v, first, Int32(rows.n))))
        stretches = rows.stretches(self.tensors, self.row, (first,), rows.n)
        return found + [(i, stretch[0]) for (i, _), stretch in stretches]

    def elements(self, k, columns):
        """From j to the operands' j-th elements of the k-th vectors, by node."""
        held = [(i, vector) for (i, _), vector in zip(self.rows.tiles, self.read(k))]
        held += [(i, wide(rW)) for i, rW in columns]
        return lambda j: {i: vector[j] for i, vector in held}
