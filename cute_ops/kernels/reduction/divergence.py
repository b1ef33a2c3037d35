"""The kernel of divergences: see :mod:`cute_ops.ops.reduction.divergence` for the maths."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.lib.activation import LOG2_E
from cute_ops.kernels.lib.copy import AHEAD, Inside, compiler_barrier, fragment, widen
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import RowAccess, store_number
from cute_ops.kernels.lib.row_layout import SMEM_PERCENT, RowTile, Vectors, clusters, row_count
from cute_ops.kernels.lib.row_reduce import RowSum
from cute_ops.kernels.lib.row_reduce_lse import RowLogSum, origin
from cute_ops.kernels.rows.config import FusedRowConfig
from cute_ops.kernels.rows.select import fused

ROWS = ("student", "teacher")
NUMBERS = ("student_max", "student_log_sum", "teacher_max", "teacher_log_sum", "offset")
LEAST = 2.0**-126
# Rows of so many vectors, which the warps of one CTA hold, take less for three small exchanges than for one of pairs:
# 20381 x 2880 runs at 0.62 of a copy's rate, by two stages at 0.58.
FEW = 1024


def divergence(variant):
    """The kernel of a variant: the expression's for rows of up to :data:`FEW` vectors, and for those that are not held
    in registers.
    """
    config, n = FusedRowConfig.of(variant.config), variant.dims["n"]
    few = config.form != "one_pass" or n * ITEMSIZE[variant.tensors["student"].dtype] <= FEW * VECTOR_BYTES
    return fused(variant) if few else Divergence(variant)


class Divergence:
    """Rows in two stages: each thread's largest logits and sums of powers, which one exchange combines, then the
    mixture's logarithms.

    Rows stay in registers, in their own dtype: ``threads_per_row`` threads of each of ``cluster`` CTAs hold a row,
    ``per_thread`` vectors each, all of whose loads are in flight together. Powers are computed in both stages.
    Shared memory: 16 bytes per warp and CTA of the cluster, and 4 or 8 for the sums of the second stage.
    Bytes moved per element: both logits once.
    """

    def __init__(self, variant):
        self.variant, self.n = variant, variant.dims["n"]
        self.config = FusedRowConfig.of(variant.config)
        self.beta, self.scale = variant.attrs["beta"], LOG2_E / variant.attrs["temperature"]
        self.tile = RowTile(Vectors(variant, ROWS, self.n, self.config.align_vectors), self.config)
        self.access = RowAccess(variant, self.tile, -math.inf)
        # Numbers for the gradient: the student's own divergence is a second sum, unless it is the loss.
        self.saved = [name for name in variant.names if name in NUMBERS]
        self.apart = bool(self.saved) and 0.0 < self.beta < 1.0
        self.sums, self.last = LogSums(self.tile, 4, 1), FirstSum(self.tile, 1 + self.apart, 1)
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, *arguments):
        tensors = dict(zip(self.variant.names, arguments))
        outputs = tuple([tensors[name] for name in ("loss", *self.saved)])
        inputs = tuple([tensors[name] for name in ROWS])
        count = Int32((row_count(inputs[0]) + (self.tile.rows - 1)) // self.tile.rows)
        resident = self.config.resident
        self.kernel(inputs, outputs).launch(
            **clusters(self.tile, count, resident, SMEM_PERCENT if resident > 1 else None),
            stream=arguments[-1], use_pdl=self.pdl,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, inputs, outputs):
        bidx, local, t, rank = self.tile.here()
        shared = self._allocate(cutlass.utils.SmemAllocator())
        row, count = Int64(bidx) * self.tile.rows + local, row_count(inputs[0])
        valid = row < count
        coord = self.access.coord(row, count, t, rank)
        if const_expr(self.pdl):
            few = cute.arch.grid_dim()[0] <= AHEAD
            self.access.fetch_ahead(self.access.rows(inputs, ROWS, cutlass.min(row, count - 1)), coord, few)
        wait_for_previous(self.pdl)
        held = self._load(inputs, coord, valid)
        read = lambda k: self._read(held, k)  # noqa: E731
        sums = self._log_sums(read)
        self.last.ready()
        results = self.sums(sums, shared[0], Int32(0))
        totals = self.last(self._share(read, results, coord.first), shared[1], Int32(0))
        if (t == 0) & (rank == 0) & valid:
            self._store(outputs, totals, results, row)

    def _load(self, inputs, coord, valid):
        held = self.access.load(self.access.rows(inputs, ROWS, coord.row), coord, valid)
        let_next_start(self.pdl)
        for k in range(self.tile.per_thread):
            for vectors in held:
                self.access.trim(vectors[k], k, coord)
        return held

    def _read(self, held, k):
        for vectors in held:
            if self.tile.vec * vectors[k].element_type.width >= 32:
                compiler_barrier(vectors[k])
        return [vectors[k] for vectors in held]

    def _allocate(self, smem):
        shared = self.sums.allocate(smem), self.last.allocate(smem)
        self.sums.prepare(shared[0], last=False)
        self.last.prepare(shared[1])
        return shared

    def _log_sums(self, read):
        """This thread's largest logits, scaled, and sums of powers relative to them, of each input; ``read(k)`` gives
        its k-th vectors.
        """
        tops, found = None, []
        for k in range(self.tile.per_thread):
            each = [largest(rX) for rX in read(k)]
            tops = each if tops is None else [larger(a, b, rX) for a, b, rX in zip(tops, each, read(k))]
        tops = [top_of(top, rX) * self.scale for top, rX in zip(tops, read(0))]
        sums = [Float32(0.0)] * 2
        for k in range(self.tile.per_thread):
            for i, rX in enumerate(read(k)):
                rP = self._powers(widen(rX), origin(tops[i]))[1]
                sums[i] = sums[i] + rP.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        for top, total in zip(tops, sums):
            found += [top, total]
        return tuple(found)

    def _powers(self, x, top):
        """The exponents of a vector's elements, scaled and relative to the largest, and powers of 2 of these."""
        rX, rE = fragment(Float32, self.tile.vec), fragment(Float32, self.tile.vec)
        rP = fragment(Float32, self.tile.vec)
        rX.store(x)
        for j in range(self.tile.vec):
            rE[j] = rX[j] * self.scale - top
            rP[j] = cute.math.exp2(rE[j], fastmath=True)
        return rE, rP

    def _share(self, read, results, first):
        """This thread's share of the loss, but for a number of the row, and that of the student's own divergence.

        With powers ``u`` of the student and ``v`` of the teacher, and the sums of both, the logarithm of the mixture is
        that of ``(1 - beta) * u + beta * S(u) / S(v) * v``, less ``log(S(u))``.
        """
        if self.beta in (0.0, 1.0):
            return self._share_of_one(read, results, first)
        tops, shares = [origin(results[i]) for i in (0, 2)], [cute.arch.rcp_approx(results[i]) for i in (1, 3)]
        weights = 1.0 - self.beta, self.beta * results[1] * shares[1]
        sums = [Float32(0.0)] * 2
        for k in range(self.tile.per_thread):
            inside = self._inside(k, first)
            (rE, rU), (rF, rV) = (self._powers(widen(rX), top) for rX, top in zip(read(k), tops))
            rE.store(inside.only(rE.load()))
            rF.store(inside.only(rF.load()))
            for j in range(self.tile.vec):
                mixed = rU[j] * weights[0] + rV[j] * weights[1]
                log = cute.math.log2(cute.arch.fmax(mixed, Float32(LEAST)), fastmath=True)
                sums = [sums[0] + rU[j] * (rE[j] - log), sums[1] + rV[j] * (rF[j] - log)]
        parts = [total * share for total, share in zip(sums, shares)]
        loss = parts[0] * (1.0 - self.beta) + parts[1] * self.beta
        return (loss, parts[0]) if self.apart else (loss,)

    def _share_of_one(self, read, results, first):
        """Of one Kullback-Leibler divergence: one row's powers times differences of exponents."""
        tops = [origin(results[i]) for i in (0, 2)]
        of, other = (1, 0) if self.beta == 0.0 else (0, 1)
        total = Float32(0.0)
        for k in range(self.tile.per_thread):
            inside = self._inside(k, first)
            found = [self._powers(widen(rX), top) for rX, top in zip(read(k), tops)]
            rD = fragment(Float32, self.tile.vec)
            rD.store(inside.only(found[of][0].load() - found[other][0].load()))
            for j in range(self.tile.vec):
                total = total + found[of][1][j] * rD[j]
        return (total * cute.arch.rcp_approx(results[1 + 2 * of]),)

    def _addend(self, results):
        """What the loss, in bits, is besides the sum of all threads' shares."""
        student, teacher = (cute.math.log2(results[i], fastmath=True) for i in (1, 3))
        return teacher - student if self.beta == 1.0 else (student - teacher) * (self.beta or 1.0)

    def _inside(self, k, first):
        """Which elements of the k-th vectors are inside the row."""
        whole = not (self.tile.predicated(k) or self.tile.ends_outside(k))
        return Inside(self.tile.vec, first[k], Int32(self.n), whole)

    def _store(self, outputs, totals, results, row):
        """Store a row's loss, and what its gradient takes."""
        loss = totals[0] + self._addend(results)
        store_number(loss * math.log(2), outputs[0], self.variant.tensors["loss"], row)
        if self.saved:
            logs = [cute.math.log2(results[i], fastmath=True) for i in (1, 3)]
            numbers = results[0], logs[0], results[2], logs[1], totals[1] if self.apart else loss
            for name, mX, x in zip(self.saved, outputs[1:], numbers):
                store_number(x, mX, self.variant.tensors[name], row)


class LogSums(RowLogSum):
    """Combines pairs over the threads of a row: a largest number, and a sum of powers of 2 relative to it."""

    def _states(self, values):
        return [values[i : i + 2] for i in range(0, self.values, 2)]

    def _moved(self, state, top):
        largest, total = state
        return top, total * cute.math.exp2(largest - origin(top), fastmath=True)

    def _partials(self, sSum, stage, lane, row):
        if self.partials <= 8:
            return super()._partials(sSum, stage, lane, row)
        found = []
        for p in range(0, self.partials, WARP):
            whole = p + WARP <= self.partials  # else lanes past the last pair read it again
            place = p + lane if whole else cutlass.min(p + lane, self.partials - 1)
            values = [sSum[i, place, row, stage] for i in range(self.values)]
            if not whole:
                inside, empty = p + lane < self.partials, [Float32(-math.inf), Float32(0.0)] * (self.values // 2)
                values = [cutlass.select_(inside, x, none) for x, none in zip(values, empty)]
            found.append(values)
        return found


class FirstSum(RowSum):
    """Sums up numbers over the threads of a row for the first CTA of its cluster alone."""

    def __init__(self, tile, values, stages):
        super().__init__(tile, values, stages)
        self.halved = False

    @cute.jit
    def _share(self, values: cutlass.Constexpr, shared, stage, lane, row, partial):
        sSum, mbar = shared
        if const_expr(self.tile.cluster == 1):
            if lane == 0:
                for i in cutlass.range_constexpr(self.values):
                    sSum[i, partial, row, stage] = values[i]
        else:
            rank = cute.arch.block_idx_in_cluster()
            if (rank == 0) & (cute.arch.thread_idx()[0] == 0):
                size = self.values * self.partials * self.tile.rows * 4
                cute.arch.mbarrier_arrive_and_expect_tx(mbar + stage, size)
            if lane == 0:
                target = sSum.iterator + cute.crd2idx((0, rank * self.warps + partial, row, stage), sSum.layout)
                sTarget = cute.arch.map_dsmem_ptr(target, 0).toint()
                sBarrier = cute.arch.map_dsmem_ptr(mbar + stage, 0).toint()
                for i in cutlass.range_constexpr(self.values):
                    cute.arch.inline_ptx(
                        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [{$r0}], {$r1}, [{$r2}];",
                        read_only_args=[Int32(sTarget + 4 * i), values[i], Int32(sBarrier)],
                    )

    def __call__(self, values, shared, step):
        """The sums of a step, in the first CTA."""
        return self._first(self.arrive(values, shared, step), shared, step)

    @cute.jit
    def _first(self, values: cutlass.Constexpr, shared, step: Int32):
        totals = tuple([Float32(0.0) for _ in values])
        if const_expr(self.tile.cluster == 1):
            totals = self.wait(values, shared, step)
        elif cute.arch.block_idx_in_cluster() == 0:
            totals = self.wait(values, shared, step)
        return totals


def paired(rX):
    """Whether the largest element is found by pairs of 16 bits."""
    return rX.element_type.width == 16 and cute.size(rX) % 2 == 0


def larger(a, b, rX):
    """The larger one of two numbers, or of both halves of two words of a vector; NaN where one is."""
    if not paired(rX):
        return cute.arch.fmax(a, b, nan=True)
    kind = "bf16x2" if rX.element_type == BFloat16 else "f16x2"
    ptx = f"max.NaN.{kind} {{$w0}}, {{$r0}}, {{$r1}};"
    return cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[a, b])


def largest(rX):
    """The largest element of a vector, or those of its even and its odd elements, in a word."""
    each = cute.recast_tensor(rX, Int32) if paired(rX) else widen(rX)
    each = [each[j] for j in range(cute.size(rX) // (2 if paired(rX) else 1))]
    while len(each) > 1:
        each = [larger(a, b, rX) for a, b in zip(each[::2], each[1::2])] + each[len(each) // 2 * 2 :]
    return each[0]


def top_of(top, rX):
    """The largest element in fp32 by what :func:`largest` found."""
    if not paired(rX):
        return top
    rWord = fragment(Int32, 1)
    rWord[0] = top
    rBoth = cute.recast_tensor(rWord, rX.element_type)
    return cute.arch.fmax(rBoth[0].to(Float32), rBoth[1].to(Float32), nan=True)
