"""Rows to float8_e4m3fn, held in shared memory; see :mod:`cute_ops.kernels.quantize.one_pass` for the maths."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.lib.copy import compiler_barrier, compiler_barrier_value, narrow, widen
from cute_ops.kernels.lib.fp8 import INFINITY, largest_of_each, magnitude, scale_of, to_fp8
from cute_ops.kernels.lib.kept import FLOATS, KeptVectors
from cute_ops.kernels.lib.pdl import let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import store_number_if
from cute_ops.kernels.lib.row_layout import Vectors, present, row_address, row_count
from cute_ops.kernels.lib.row_reduce_max import RowMax
from cute_ops.kernels.lib.smem_ring import RowRing, Source
from cute_ops.kernels.lib.smem_ring_unaligned import WindowRing
from cute_ops.kernels.norm.statistics import Total
from cute_ops.kernels.quantize.one_pass import QuantizeRows

# The largest factor of the norm and the scale together: the product of an element with it, and then with the weight, is
# in the range of fp32.
MOST = 2.0**63


class QuantizeRowsInSmem(QuantizeRows):
    """One pass: a row stays in shared memory in its own dtype and is converted to fp32 each time that it is read.

    For long rows: more bytes are in flight than registers could receive, and the weight's loads with them. Unaligned
    compact rows with one scale move in aligned vectors, whose elements outside the row are masked. For all other
    unaligned rows threads make vectors that start with the row from aligned ones (:class:`WindowRing`).
    If a norm adds no bias, its sum and its largest element are exchanged together. What is costly to compute, of two
    inputs, takes their place in fp32 until the largest element is known.
    Shared memory: the CTA's share of the row; 4 bytes per warp and CTA of the cluster, twice.
    Bytes moved per element: every tensor once.
    """

    def __init__(self, variant, config, source):
        super().__init__(variant, config, source)
        keys = present(variant, source.names)
        self.windowed = bool(self.tile.v.unaligned)
        self.ring = WindowRing(self.tile, keys) if self.windowed else RowRing(self.tile, keys, 1)
        self.carveout = 100
        # A factor of all elements can be applied after the largest is known; a bias that is added after it cannot.
        bias = variant.tensors.get("bias") is not None
        self.together = source.normed and self.by_row and not bias and self.tile.rows == 1
        whole = not self.windowed and self.tile.vec * ITEMSIZE[keys[0].dtype] == VECTOR_BYTES
        self.kept = source.costly and self.by_row and whole and len({key.dtype for key in keys}) == 1
        # The sum needs neither the order of the columns nor the vectors that other threads have copied.
        self.own_copies = (
            self.windowed and source.normed and not self.together and len(keys) == 1 and self.ring.complete
        )
        if self.together:
            self.sum_and_max = RowMax(self.tile, stages=1, values=2)

    def _vectors(self, variant, names):
        v = Vectors(variant, names, self.n, self.config.align_vectors)
        if self.by_row and v.shifted:
            v.unaligned = {}
            return v
        return super()._vectors(variant, names)

    @cute.kernel
    def kernel(self, inputs, columns, mResidualOut, mOut, mScale):
        smem = cutlass.utils.SmemAllocator()
        memory, slots = self.ring.allocate(smem, inputs)
        both = self.sum_and_max.allocate(smem) if const_expr(self.together) else None
        if const_expr(self.together):
            self.sum_and_max.prepare(both, last=False)
        sums, maxima = self._exchange(smem)
        bidx, local, t, rank = self.tile.here()
        count, row = row_count(mOut), Int64(bidx) * self.tile.rows + local
        coord = self.access.coord(row, count, t, rank)
        base = row_address(mScale, self.variant.tensors["scale"], row, self.blocks)
        bases = [
            None if m is None else row_address(m, self.variant.tensors[name], row, self.n)
            for m, name in zip(inputs, self.source.names)
        ]

        wait_for_previous(self.pdl)
        held = [(sX, address) for sX, address in zip(slots, bases) if sX is not None]
        edge = self.tile.edge(row, count)
        # One group per vector, so that the first vectors are read while the last ones are in flight.
        for k in cutlass.range_constexpr(self.tile.per_thread):
            self._fetch(held, coord, row < count, edge, k)
            cute.arch.cp_async_commit_group()
        # After the row's copies, since for unaligned rows these loads are waited for.
        loaded = None if const_expr(self.delay_weight_load) else self._columns(columns, coord)
        if const_expr(self.clustered):
            cute.arch.cluster_wait()
        if const_expr(self.windowed and not self.own_copies):
            cute.arch.cp_async_wait_group(0)
            cute.arch.barrier()
        given = held, mResidualOut, columns, loaded, coord
        targets = memory, mOut, mResidualOut, base
        speaks = (t == 0) & (rank == 0) & (row < count)
        if const_expr(self.together):
            self._at_once(given, both, maxima, speaks, targets)
        else:
            rstd = self._rstd(given, sums) if const_expr(self.source.normed) else None
            if const_expr(self.own_copies):
                cute.arch.barrier()
            self._one_by_one(given, rstd, maxima, speaks, targets)
        let_next_start(self.pdl)

    def _columns(self, columns, coord):
        """Weight and bias at this thread's columns; loaded two vectors at a time, since until unaligned ones are in
        place they take twice their registers.
        """
        pairs = [range(self.tile.per_thread)[k : k + 2] for k in range(0, self.tile.per_thread, 2)]
        return [found for ks in pairs for found in self.access.columns(*columns, coord, ks)]

    def _fetch(self, held, coord, valid, edge, k):
        """Start loading this thread's k-th vectors; with the last ones also the vector past the CTA's own."""
        tails = []
        for sX, address in held:
            begins = self.ring.begins(sX, address, coord.first) if self.windowed else coord.first
            tails.append(Source(sX, address, begins, valid))
            self.ring.fetch(tails[-1], edge[0], Int32(0), [k])
            if self.windowed and k == self.tile.per_thread - 1:
                self.ring.fetch_last(sX, address, coord.rank, valid, edge[0])
        self.ring.fetch_tails(tails, edge, Int32(0), [k])

    @cute.jit
    def _at_once(self, given: cutlass.Constexpr, both, maxima, speaks, targets: cutlass.Constexpr):
        """Exchange a norm's sum and its largest unnormalised element together, then write the output from both."""
        squares, largest = Total(self.tile.per_thread), Float32(0.0)
        for k in cutlass.range_constexpr(self.tile.per_thread):
            self._arrive(given, k)
            h = widen(self._hidden(given, k))
            squares.add(h, h)
            largest = magnitude(self._y(given, Float32(1.0), k), largest)
        squares, largest = self.sum_and_max((squares.value(), largest), both, Int32(0))
        _, rstd = self.sum.forward_terms((squares,), 1.0 / self.n)
        factor, inverse = scale_of(largest * rstd, self.power_of_two)
        if (largest * rstd < INFINITY) & (rstd * inverse < MOST) & (rstd * inverse > 1 / MOST):
            store_number_if(speaks, factor, targets[3])
            self._write(given, rstd * inverse, None, targets)
        else:
            # This is rare, so nothing is kept for it: the weight is loaded again.
            held, mResidualOut, columns, _, coord = given
            coord = coord._replace(first=[compiler_barrier_value(f) for f in coord.first])
            again = held, mResidualOut, columns, None, coord
            self._one_by_one(again, rstd, maxima, speaks, targets)

    def _one_by_one(self, given, rstd, maxima, speaks, targets):
        """The row's largest element, then its output."""
        inverse = None
        if self.by_row:
            largest, kept = Float32(0.0), self._kept(given)
            for k in range(self.tile.per_thread):
                if not self.source.normed:
                    self._arrive(given, k)
                rY = self._y(given, rstd, k)
                if kept:
                    kept.store(rY, cute.arch.thread_idx()[0], k)
                largest = cute.arch.fmax(largest, *largest_of_each([rY]))
            inverse = self._row_scale(largest, maxima, targets[3], 0, speaks)
        self._write(given, rstd, inverse, targets)

    def _rstd(self, given, sums):
        def look(k):
            self._arrive(given, k)
            return (widen(self._own(given, k)),)

        terms = self.sum.thread(look, given[-1].first, None)
        _, rstd = self.sum.forward_terms(self.sum(terms, sums, Int32(0)), 1.0 / self.n)
        return rstd

    def _write(self, given, rstd, inverse, targets):
        memory, mOut, mResidualOut, base = targets
        coord, through, kept = given[-1], {}, self._kept(given)
        for k in range(self.tile.per_thread):
            if not self.source.normed and not self.by_row:
                self._arrive(given, k)
            rY = kept.load(cute.arch.thread_idx()[0], k) if kept else self._y(given, rstd, k)
            if not self.by_row:
                speaks = (coord.t % self.lanes == 0) & coord.valid
                inverse = self._block_scale(*largest_of_each([rY]), base, coord.first[k], speaks)
            y = rY.load() if inverse is None else rY.load() * inverse
            outputs = {"out": (mOut, to_fp8(y, self.tile.vec))}
            if mResidualOut is not None:
                outputs["residual_out"] = mResidualOut, self._hidden(given, k)
            for name, (m, rX) in outputs.items():
                if name in self.tile.v.unaligned:
                    through.setdefault(name, (m, []))[1].append(rX)
                else:
                    self.access.store(self.access.row(m, name, coord.row), rX, coord, k)
        for name, (m, vectors) in through.items():
            # The inputs have been read, so their memory serves for one output after the other.
            cute.arch.barrier()
            address = row_address(m, self.variant.tensors[name], coord.row, self.n)
            self.column_store(vectors, self.column_store.view(memory), address, coord.t, coord.rank, coord.valid)

    def _kept(self, given):
        """Where this thread's vectors of y stay; None where they are computed again."""
        if not self.kept:
            return None
        slots = [sX[None, 0, None, None, 0] for sX, _ in given[0]]
        return KeptVectors.over(*slots[: self.tile.vec // FLOATS])

    def _y(self, given, rstd, k):
        """This thread's k-th vector of y."""
        _, _, columns, loaded, coord = given
        parameters = self.access.columns(*columns, coord, [k])[0] if loaded is None else loaded[k]
        for rW in parameters:
            if rW is not None:
                compiler_barrier(rW)  # kept in its own dtype until here
        return self._value(self._wide(given, k), rstd, *parameters, coord.first[k], k)

    def _arrive(self, given, k):
        """Wait for this thread's k-th vectors, before they are first read."""
        if self.windowed and not self.own_copies:
            return
        cute.arch.cp_async_wait_group(self.tile.per_thread - 1 - k)
        if not self.windowed and self.tile.predicated(k):
            self.ring.trim([sX for sX, _ in given[0]], k, Int32(0), given[-1].first[k])

    def _own(self, given, k):
        """This thread's k-th vector of h, or the one that it has copied, which serves a sum as well."""
        if not self.own_copies:
            return self._hidden(given, k)
        ((sX, address),) = given[0]
        return self.ring.read_own(sX, address, given[-1].first, k)

    def _read(self, held, first, k):
        sX, address = held
        return self.ring.read_row(sX, address, first, k) if self.windowed else self.ring.read(sX, k, Int32(0))

    def _hidden(self, given, k):
        """This thread's k-th vector of h."""
        held, mResidualOut, *_, coord = given
        vectors = [self._read(one, coord.first, k) for one in held]
        if mResidualOut is None:
            return vectors[0]
        return narrow(widen(vectors[0]) + widen(vectors[1]), mResidualOut.element_type, self.tile.vec)

    def _wide(self, given, k):
        """The arguments of the source for this thread's k-th vector."""
        if self.source.normed:
            return [widen(self._hidden(given, k))]
        return [widen(self._read(one, given[-1].first, k)) for one in given[0]]
