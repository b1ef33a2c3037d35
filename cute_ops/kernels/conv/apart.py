"""Loads and stores of rows that start anywhere in memory: the channels of a thread are a warp apart.

Each thread of a warp copies one aligned unit of memory of the warp's channels of a row to the ring, wherever in a unit
the row starts. Then each thread reads its channels one by one from all of the warp's units. Where single elements are
stored, neighbouring threads store neighbouring elements.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import WARP
from cute_ops.kernels.conv.walk import copy_if
from cute_ops.kernels.lib.copy import fragment, gmem_elements, store, store_elements
from cute_ops.kernels.lib.row_layout import extent, row_address, row_count


class Apart:
    """A mixin before a :class:`~cute_ops.kernels.conv.walk.Walk`, for rows that start anywhere.

    Tile: that of the walk, but a thread's channels are a warp's threads apart, and a CTA has whole warps, the last of
    which may have channels past the row. Shared memory: a unit more for each warp and row.
    """

    units = WARP + 1

    def inside(self, channel, c):
        """Whether a thread's c-th channel exists, by its first one."""
        return channel + c * WARP < self.n

    def coordinate(self, mX):
        """(row of CTAs, first channel, depth in the CTA, whether one of the warp's channels exists) of this thread."""
        lane, level, _ = cute.arch.thread_idx()
        level = 0 if self.depth == 1 else level
        group, first = self.cta_coordinate(mX)
        first = first + lane // WARP * (WARP * self.vec)
        return group, first + lane % WARP, level, first < self.n

    def place(self, channel):
        """(which of a thread's channels it is, the thread of the row) of one of the CTA's channels."""
        warp, rest = channel // (WARP * self.vec), channel % (WARP * self.vec)
        return rest // WARP, warp * WARP + rest % WARP

    def columns(self, channel, each):
        """(elements of a thread's columns that are neighbours, the first column, which of the thread's channels)."""
        return [(each, (channel + c * WARP) * each, c) for c in range(self.vec)]

    def ring(self, smem, mX):
        """The units of each stream that are on their way, and of a step's outputs: (element, warp, row)."""
        layout = cute.make_layout((self.units * self.vec, self.threads // WARP, self.unit))
        return [*self.inputs(smem, mX), smem.allocate_tensor(mX.element_type, layout, byte_alignment=16)]

    def inputs(self, smem, mX):
        layout = cute.make_layout((self.units * self.vec, self.threads // WARP, self.slots * self.batch))
        return [smem.allocate_tensor(mX.element_type, layout, byte_alignment=16) for _ in self.names]

    def rows(self, tensors, names, span):
        """The rows by name. Before row ``until`` of one, all of the warp's units may be read."""
        found = super().rows(tensors, names, span)
        start = span.channel - self.thread() % WARP
        inside = start + self.units * self.vec <= self.n
        for name in self.names:
            mX, key = getattr(tensors, name), self.keys[name]
            seqlen = Int32(extent(mX, len(mX.shape) - 2))
            if key.layout == "flat" and key.align >= self.vec * key.itemsize:
                # A row's last units hold elements of the next rows.
                after = -(-self.units * self.vec // self.n)
                inside, rest = inside | (span.sequence + 1 < row_count(mX, 2)), seqlen - after
            else:
                inside, rest = inside & (start > 0), Int32(-1)
            found[name].until = cutlass.select_(inside, seqlen, rest)
        return found

    def inner(self, start, last, rows):
        for name in self.names:
            last = cutlass.min(last, rows[name].until)
        return super().inner(start, last, rows)

    def fetch(self, ring, rows, t, more, end, stage):
        lane, warp = self.thread() % WARP, self.thread() // WARP
        for u in range(self.batch):
            for sX, name in zip(ring, self.names):
                row, here = rows[name], t + (more + u)
                address = row.address(t, more + u) - lane * (sX.element_type.width // 8)
                sRow = sX[None, warp, stage * self.batch + u]
                size = self.vec * sX.element_type.width // 8
                past = Int32(address & (size - 1))
                source = address - past + lane * size
                sUnits = [self._unit(sRow, unit) for unit in (lane, lane + WARP)]
                if end is None:
                    copy_if(Boolean(True), source, sUnits[0])
                    copy_if(lane == 0, source + WARP * size, sUnits[1])
                else:
                    column = row.channel - lane - past // (size // self.vec) + lane * self.vec
                    for i, sUnit in enumerate(sUnits):
                        valid = (here < end) & ((lane == 0) | (i == 0))
                        self._copy(
                            valid, here < row.until, source + i * WARP * size, sUnit, column + i * WARP * self.vec
                        )
        cute.arch.cp_async_commit_group()

    def _unit(self, sRow, unit):
        """A unit in shared memory, which begins on its size."""
        dtype = sRow.element_type
        address, size = (sRow.iterator + unit * self.vec).toint(), self.vec * dtype.width // 8
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=size)
        return cute.make_tensor(pointer, cute.make_layout((self.vec,)))

    @cute.jit
    def _copy(self, valid: Boolean, whole: Boolean, source: Int64, sUnit: cute.Tensor, column: Int32):
        """Start copying a unit from a column on; without ``whole`` only its elements in the row may be read."""
        if valid:
            if whole:
                copy_if(Boolean(True), source, sUnit)
            else:
                self._copy_inside(source, sUnit, column)

    @cute.jit
    def _copy_inside(self, source: Int64, sUnit: cute.Tensor, column: Int32):
        if (column >= 0) & (column + self.vec <= self.n):
            copy_if(Boolean(True), source, sUnit)
        else:
            self._copy_elements(source, sUnit, column)

    @cute.jit
    def _copy_elements(self, source: Int64, sUnit: cute.Tensor, column: Int32):
        """Copy a unit's elements that lie in the row."""
        gX = gmem_elements(sUnit.element_type, source, self.vec)
        for j in cutlass.range_constexpr(self.vec):
            if (column + j >= 0) & (column + j < self.n):
                sUnit[j] = gX[j]

    def wait(self):
        super().wait()
        cute.arch.sync_warp()

    def taken(self):
        cute.arch.sync_warp()

    def take(self, ring, rows, t, stage):
        lane, warp = self.thread() % WARP, self.thread() // WARP
        held = []
        for u in range(self.batch):
            vectors = []
            for sX, name in zip(ring, self.names):
                past = self._past(rows[name], t, u, lane, sX.element_type)
                rX = fragment(sX.element_type, self.vec)
                for c in range(self.vec):
                    rX[c] = sX[past + lane + c * WARP, warp, stage * self.batch + u]
                vectors.append(rX)
            held.append(vectors)
        return held

    def emit(self, to, rX, valid, t, more):
        """Put a row's elements where they are in the warp's units of memory."""
        row, ring, stores = to
        lane, warp = self.thread() % WARP, self.thread() // WARP
        past = self._past(row, t, more, lane, rX.element_type)
        for c in range(self.vec):
            ring[-1][past + lane + c * WARP, warp, len(stores)] = rX[c]
        stores.append((valid, more))

    def flush(self, to, t):
        """Store a step's rows by units: a store of part of a sector costs L2 as much as one of all of it."""
        row, ring, stores = to
        lane, warp, sX = self.thread() % WARP, self.thread() // WARP, ring[-1]
        itemsize, rows = sX.element_type.width // 8, Int32(0)
        cute.arch.sync_warp()
        for u, (valid, more) in enumerate(stores):
            past = self._past(row, t, more, lane, sX.element_type)
            column = row.channel - lane - past + lane * self.vec
            address = row.address(t, more) + (column - row.channel) * itemsize
            whole = valid & ((past == 0) | (lane > 0)) & (column < self.n)
            self._store_unit(whole, self._unit(sX[None, warp, u], lane), address, column)
            rows = rows | cutlass.select_(valid, Int32(1 << u), Int32(0))
        # One element to a lane: of each row those of the first unit that are the warp's, and those of the last one.
        u, place = lane // self.vec, lane % self.vec
        past = self._past(row, t + u, stores[0][1], lane, sX.element_type)
        valid = (past > 0) & (u < len(stores)) & (((rows >> u) & 1) != 0)
        place = place + cutlass.select_(place < past, Int32(WARP * self.vec), Int32(0))
        address = row.address(t + u, stores[0][1]) + (place - past - lane) * itemsize
        self._store_element(valid & (row.channel - lane - past + place < self.n), sX, place, warp, u, address)

    @cute.jit
    def _store_element(self, valid: Boolean, sX: cute.Tensor, place: Int32, warp: Int32, u: Int32, address: Int64):
        if valid:
            gmem_elements(sX.element_type, address, 1)[0] = sX[place, warp, u]

    @cute.jit
    def _store_unit(self, valid: Boolean, sUnit: cute.Tensor, address: Int64, column: Int32):
        """Store a unit, or what of it lies in the row."""
        if valid:
            rX = fragment(sUnit.element_type, self.vec)
            cute.autovec_copy(sUnit, rX)
            if column + self.vec <= self.n:
                store(rX, address, True)
            else:
                store_elements(rX, address, column, Int32(self.n))

    def _past(self, row, t, more, lane, dtype):
        """How many elements of a unit come before the warp's first channel of a row."""
        address = row.address(t, more) - lane * (dtype.width // 8)
        return Int32(address & (self.vec * dtype.width // 8 - 1)) // (dtype.width // 8)

    @cute.jit
    def get(self, valid: Boolean, rX: cute.Tensor, address: Int64, channel: Int32):
        gX = self._elements(rX.element_type, address)
        for c in cutlass.range_constexpr(self.vec):
            if valid & self.inside(channel, c):
                rX[c] = gX[c]

    @cute.jit
    def put(self, valid: Boolean, rX: cute.Tensor, address: Int64, channel: Int32):
        gX = self._elements(rX.element_type, address)
        for c in cutlass.range_constexpr(self.vec):
            if valid & self.inside(channel, c):
                gX[c] = rX[c]

    def _elements(self, dtype, address):
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem)
        return cute.make_tensor(pointer, cute.make_layout((self.vec,), stride=(WARP,)))

    def column(self, mBias, channel):
        return self._parameters(mBias, "bias", channel, 1)[0]

    def weights(self, mWeight, channel):
        return self._parameters(mWeight, "weight", channel, self.width)

    def _parameters(self, mW, name, channel, width):
        """``width`` numbers of each of a thread's channels, in fp32; past the row those of the last channel."""
        key, wide = self.keys[name], [fragment(Float32, self.vec) for _ in range(width)]
        for c in range(self.vec):
            here = Int64(cutlass.min(channel + c * WARP, self.n - 1))
            if width == 1:
                address = mW.iterator.toint() + here * ITEMSIZE[key.dtype]
            else:
                address = row_address(mW, key, here, width)
            gW = gmem_elements(mW.element_type, address, width)
            for j, rTap in enumerate(wide):
                rTap[c] = gW[j].to(Float32)
        return wide
