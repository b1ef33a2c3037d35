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
        """The rows by name. Before row ``until`` of one, all of the warp's units may be read. ``unit`` and ``column``:
        where this thread's unit starts, in memory and in bytes from the row, if the warp's channels start on a unit.
        """
        found, lane = super().rows(tensors, names, span), self.thread() % WARP
        start = span.channel - lane
        for row in found.values():
            if row is not None:
                row.unit = row.start + lane * (self.size - self.itemsize)
                row.column = start * self.itemsize + lane * self.size
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
        lane, warp, more_units = self.thread() % WARP, self.thread() // WARP, WARP * self.size
        for u in range(self.batch):
            for sX, name in zip(ring, self.names):
                row, here = rows[name], t + (more + u)
                past, source = self._past(row, t, more + u), self._start(row, t, more + u)
                sRow = sX[None, warp, stage * self.batch + u]
                sUnits = [self._unit(sRow, unit) for unit in (lane, lane + WARP)]
                if end is None:
                    copy_if(Boolean(True), source, sUnits[0])
                    copy_if(lane == 0, source + more_units, sUnits[1])
                else:
                    for i, sUnit in enumerate(sUnits):
                        valid, off = (here < end) & ((lane == 0) | (i == 0)), i * more_units
                        self._copy(valid, here < row.until, source + off, sUnit, row.column - past + off)
        cute.arch.cp_async_commit_group()

    def _unit(self, sRow, unit):
        """A unit in shared memory, which begins on its size."""
        dtype = sRow.element_type
        address, size = (sRow.iterator + unit * self.vec).toint(), self.vec * dtype.width // 8
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=size)
        return cute.make_tensor(pointer, cute.make_layout((self.vec,)))

    @cute.jit
    def _copy(self, valid: Boolean, whole: Boolean, source: Int64, sUnit: cute.Tensor, column: Int32):
        """Start copying a unit, ``column`` bytes from the row; without ``whole`` only what lies in it may be read."""
        if valid:
            if whole:
                copy_if(Boolean(True), source, sUnit)
            else:
                self._copy_inside(source, sUnit, column)

    @cute.jit
    def _copy_inside(self, source: Int64, sUnit: cute.Tensor, column: Int32):
        if (column >= 0) & (column <= self.last):
            copy_if(Boolean(True), source, sUnit)
        else:
            self._copy_elements(source, sUnit, column)

    @cute.jit
    def _copy_elements(self, source: Int64, sUnit: cute.Tensor, column: Int32):
        """Copy a unit's elements that lie in the row."""
        gX = gmem_elements(sUnit.element_type, source, self.vec)
        for j in cutlass.range_constexpr(self.vec):
            if (column + j * self.itemsize >= 0) & (column + j * self.itemsize < self.n * self.itemsize):
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
                rX, past = fragment(sX.element_type, self.vec), self._past(rows[name], t, u)
                sElements = self._own(sX[None, warp, stage * self.batch + u], past + lane * self.itemsize)
                for c in range(self.vec):
                    rX[c] = sElements[c]
                vectors.append(rX)
            held.append(vectors)
        return held

    def emit(self, to, rX, valid, t, more):
        """Put a row's elements where they are in the warp's units of memory."""
        row, ring, stores = to
        lane, warp = self.thread() % WARP, self.thread() // WARP
        past = self._past(row, t, more)
        sElements = self._own(ring[-1][None, warp, len(stores)], past + lane * self.itemsize)
        for c in range(self.vec):
            sElements[c] = rX[c]
        stores.append((valid, more))

    def flush(self, to, t):
        """Store a step's rows by units: a store of part of a sector costs L2 as much as one of all of it."""
        row, ring, stores = to
        lane, warp, sX, rows = self.thread() % WARP, self.thread() // WARP, ring[-1], Int32(0)
        cute.arch.sync_warp()
        for u, (valid, more) in enumerate(stores):
            own, left = self._left(row, t, (valid, more))
            sUnit, address = self._unit(sX[None, warp, u], lane), self._start(row, t, more)
            if self.ends_later:
                self._store_whole(own & (left >= self.size), sUnit, address)
            else:
                self._store_unit(own & (left > 0), sUnit, address, left)
            rows = rows | cutlass.select_(valid, Int32(1 << u), Int32(0))
        if self.ends_later:
            self._store_ends(row.column > self.last, to, t)
        # One element to a lane: of each row those of the first unit that are the warp's, and those of the last one.
        u, place = lane // self.vec, lane % self.vec * self.itemsize
        past = self._past(row, t + u, stores[0][1])
        valid = (past > 0) & (u < len(stores)) & (((rows >> u) & 1) != 0)
        place = place + cutlass.select_(place < past, Int32(WARP * self.size), Int32(0))
        off = place - lane * self.size
        valid = valid & (row.column - past + off < self.n * self.itemsize)
        self._store_element(valid, sX[None, warp, u], place, self._start(row, t + u, stores[0][1]) + off)

    @cute.jit
    def _store_element(self, valid: Boolean, sRow: cute.Tensor, place: Int32, address: Int64):
        if valid:
            gmem_elements(sRow.element_type, address, 1)[0] = self._own(sRow, place)[0]

    def _left(self, row, t, store):
        """(whether all of this thread's unit is the warp's, and stored; bytes from its start to the row's end)"""
        valid, more = store
        past = self._past(row, t, more)
        return valid & ((past == 0) | (self.thread() % WARP > 0)), self.n * self.itemsize - row.column + past

    @cute.jit
    def _store_unit(self, valid: Boolean, sUnit: cute.Tensor, address: Int64, left: Int32):
        """Store a unit, or what of it lies in the row, ``left`` bytes."""
        if valid:
            rX = fragment(sUnit.element_type, self.vec)
            cute.autovec_copy(sUnit, rX)
            if left >= self.size:
                store(rX, address, True)
            else:
                store_elements(rX, address, Int32(0), left // self.itemsize)

    @cute.jit
    def _store_whole(self, valid: Boolean, sUnit: cute.Tensor, address: Int64):
        if valid:
            rX = fragment(sUnit.element_type, self.vec)
            cute.autovec_copy(sUnit, rX)
            store(rX, address, True)

    @cute.jit
    def _store_ends(self, last: Boolean, to: cutlass.Constexpr, t: Int32):
        """Store what lies in the row of the units at its end, which few threads have."""
        if last:
            row, ring, stores = to
            lane, warp, sX = self.thread() % WARP, self.thread() // WARP, ring[-1]
            for u, each in enumerate(stores):
                own, left = self._left(row, t, each)
                valid = own & (left > 0) & (left < self.size)
                self._store_unit(valid, self._unit(sX[None, warp, u], lane), self._start(row, t, each[1]), left)

    def _past(self, row, t, more):
        """How many bytes of a unit come before the warp's first channel of a row."""
        return Int32(row.unit + Int64(t) * row.step + more * row.step) & (self.size - 1)

    def _start(self, row, t, more):
        """Where this thread's unit of the warp's starts."""
        return (row.unit + Int64(t) * row.step + more * row.step) & -self.size

    def _own(self, sRow, offset):
        """A thread's elements of a row in shared memory, from so many bytes on."""
        dtype = sRow.element_type
        pointer = cute.make_ptr(dtype, sRow.iterator.toint() + offset, cute.AddressSpace.smem)
        return cute.make_tensor(pointer, cute.make_layout((self.vec,), stride=(WARP,)))

    @property
    def size(self):
        """Bytes of a unit."""
        return self.vec * self.itemsize

    @property
    def ends_later(self):
        """Whether the ends of rows are stored after all units of a step: one branch in place of one for each row. With
        32 bits it takes registers that there are not.
        """
        return self.itemsize == 2

    @property
    def last(self):
        """Bytes from a row's start to where the last unit that is all in it may start."""
        return self.n * self.itemsize - self.size

    @property
    def itemsize(self):
        return ITEMSIZE[self.keys["x"].dtype]

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
