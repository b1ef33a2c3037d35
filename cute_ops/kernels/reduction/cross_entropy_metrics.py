"""Kernels of the cross entropy with class weights, shared classes and predictions: see
:mod:`cute_ops.ops.reduction.cross_entropy_metrics` for the maths.
"""

import operator
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cute_ops.hardware import WARP
from cute_ops.kernels.lib.column_params import column_vector
from cute_ops.kernels.lib.copy import fragment, gmem_elements
from cute_ops.kernels.lib.row_copy import number_or, store_number
from cute_ops.kernels.lib.row_layout import Vectors
from cute_ops.kernels.lib.row_reduce_lse import RowLogSum, exponentials, moved, origin
from cute_ops.kernels.reduction.cross_entropy import (
    Settings,
    ShapedLogSum,
    logit,
    number_where,
    subtract_at,
)
from cute_ops.kernels.rowwise.function import RowFunction
from cute_ops.kernels.rowwise.kernel import RowKernel

# In place of the column of a largest logit where there is none. Smaller numbers are exact in float32.
NOWHERE = float(2**24)
# Rows of more vectors find the vector of a largest logit first, then its element.
BY_VECTOR_FROM = 64


class RowBest(RowLogSum):
    """Exchanges the values of a :class:`BestLogSum`: of equal logits the first one's column, or its vector's, stays."""

    def _reduce(self, values, group):
        *pair, raw, column = values
        top = cute.arch.warp_reduction(pair[0], cute.arch.fmax, threads_in_group=group)
        largest = cute.arch.warp_reduction(raw, cute.arch.fmax, threads_in_group=group)
        _, *sums = moved(pair, top)
        sums = [cute.arch.warp_reduction(v, operator.add, threads_in_group=group) for v in sums]
        column = cute.arch.warp_reduction(where_at(raw, largest, column), cute.arch.fmin, threads_in_group=group)
        return (top, *sums, largest, column)

    def _combine(self, sSum, stage, lane, row):
        count = self.partials
        few = count <= 8
        places = [Int32(p) for p in range(count)] if few else [Int32(p) + lane for p in range(0, count, WARP)]
        least = Float32(-Float32.inf)
        empty = [least, *[Float32(0.0)] * (self.values - 3), least, Float32(NOWHERE)]
        found = []
        for i, place in enumerate(places):
            if const_expr(few or (i + 1) * WARP <= count):
                found.append([sSum[k, place, row, stage] for k in range(self.values)])
            else:
                inside = place < count
                safe = cutlass.select_(inside, place, Int32(0))
                found.append(
                    [cutlass.select_(inside, sSum[k, safe, row, stage], empty[k]) for k in range(self.values)]
                )  # fmt: skip
        combined = found[0]
        for values in found[1:]:
            combined = joined(combined, values)
        return tuple(combined) if few else self._reduce(combined, WARP)


def where_at(raw, largest, column):
    """The column of a largest logit, if no other is larger."""
    return cutlass.select_(raw == largest, column, Float32(NOWHERE))


def joined(a, b):
    """Two states as one."""
    (*pair, raw, column), (*other, raw2, column2) = a, b
    top, largest = cute.arch.fmax(pair[0], other[0]), cute.arch.fmax(raw, raw2)
    column = cute.arch.fmin(where_at(raw, largest, column), where_at(raw2, largest, column2))
    sums = [x + y for x, y in zip(moved(pair, top)[1:], moved(other, top)[1:])]
    return (top, *sums, largest, column)


class BestLogSum(ShapedLogSum):
    """The reduction of shaped logits, with the largest logit and its column: a cap makes large logits equal. The plain
    sum is weighted by the classes' weights, as is the number of elements.

    Args:
        by_vector: whether the column is that of the first element of the largest logit's vector, which takes few
            instructions: each of a thread's vectors comes after its last one.
        whole: whether a vector's elements are all inside the row, or all outside.
    """

    def __init__(self, shape, plain, weights, by_vector, whole):
        super().__init__(shape, plain)
        self.values += 2
        self.weights, self.by_vector, self.whole = weights, by_vector, whole

    def across(self, tile, stages):
        return RowBest(tile, self.values, stages)

    def start(self):
        least = Float32(-Float32.inf)
        return (least, *[Float32(0.0)] * (self.values - 3), least, Float32(NOWHERE))

    def add(self, state, get, inside):
        *pair, raw, column = state
        logits = get()[0]
        x = self.vector(logits)
        here = logits.reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
        largest = cute.arch.fmax(raw, here)
        if const_expr(self.by_vector):
            column = cutlass.select_(here > raw, inside.first.to(Float32), column)
        else:
            rX = fragment(Float32, inside.vec)
            rX.store(logits)
            first = first_at(rX, largest, inside.first, here == largest)
            column = cute.arch.fmin(where_at(raw, largest, column), first)
        top = cute.arch.fmax(pair[0], self.number(here))
        return (*self._with(moved(pair, top), x, inside), largest, column)

    def gather(self, gets, insides):
        state = self.start()
        for get, inside in zip(gets, insides):
            state = self.add(state, get, inside)
        return state

    def _with(self, state, x, inside):
        together = self.whole and not inside.whole
        if not self.plain or (self.weights.absent and not together):
            return super()._with(state, x, inside)
        top, s, p, count = state
        base = origin(top)
        s = s + exponentials(x, base).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        apart, number = x - base, Float32(float(inside.vec))
        if not self.weights.absent:
            weight = self.weights.vector(inside.first, inside.vec)
            weight = weight if together else inside.only(weight)
            apart = weight * (apart if together else inside.only(apart))
            number = weight.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        added = apart.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        if together:
            here = inside.first < inside.end
            added, number = (cutlass.select_(here, value, Float32(0.0)) for value in (added, number))
        return (top, s, p + added, count + number)


@cute.jit
def first_at(rX: cute.Tensor, top: Float32, first: Int32, there: Boolean):
    """The first column of the row's largest logit so far, if this vector holds it.

    Where no logit of a row is larger than -inf, elements before the row are as large: the row's first one is meant.
    """
    column = Float32(NOWHERE)
    if there:
        place = Float32(0.0)
        for j in cutlass.range_constexpr(cute.size(rX) - 1, -1, -1):
            place = cutlass.select_(rX[j] == top, Float32(float(j)), place)
        column = cute.arch.fmax(first.to(Float32) + place, Float32(0.0))
    return column


@cute.jit
def place_of(
    mLogits: cute.Tensor, key: cutlass.Constexpr, row: Int64, first: Int32, top: Float32, vec: cutlass.Constexpr
):
    """The first column from ``first`` on of a vector's logits that is as large as ``top``; 0 where none is."""
    n, place = Int32(mLogits.shape[-1]), Int32(0)
    for j in cutlass.range_constexpr(vec - 1, -1, -1):
        column = first + j
        x = logit(mLogits, key, row, Int64(column), (column >= 0) & (column < n))
        place = cutlass.select_((x == top) & (column >= 0), column, place)
    return place


class ClassWeights:
    """The weights of the classes, which all rows share.

    ``of`` is called with the tensor when the kernel has it, before a row is read.
    """

    def __init__(self, variant):
        self.key, self.n = variant.tensors.get("weight"), variant.dims["n"]
        self.absent = self.key is None
        self.shifted = Vectors(variant, ("logits", "dlogits"), self.n).shifted

    def of(self, mWeight):
        self.mWeight = mWeight
        return self

    def vector(self, first, vec):
        """The weights of a vector's columns in fp32; those outside of the row are undefined."""
        return column_vector(self.mWeight, self.key, self.shifted, vec, first, self.n).load().to(Float32)

    def at(self, target, known):
        """The weight of a class; 1 without weights, 0 if it is none."""
        if self.absent:
            return Float32(1.0)
        return weight_at(self.mWeight, target, known)


@cute.jit
def weight_at(mWeight: cute.Tensor, target: Int64, known: Boolean):
    rW, dtype = fragment(Float32, 1, 0.0), mWeight.element_type
    if known:
        address = mWeight.iterator.toint() + target * (dtype.width // 8)
        rW[0] = gmem_elements(dtype, address, 1)[0].to(Float32)
    return rW[0]


class Metrics(RowFunction):
    """``loss = weight[target] * ((1 - label_smoothing) * (lse - logits[target]) + z_loss * lse^2)
    + label_smoothing / n * sum(weight * (lse - logits))``, the lse, the target's log-probability and the largest logit.
    """

    inputs, outputs = ("logits",), ()

    def __init__(self, variant):
        self.numbers = tuple(variant.names)
        self.set, self.weights = Settings(variant), ClassWeights(variant)
        vectors = Vectors(variant, ("logits",), variant.dims["n"])
        # Weights that are shifted to a row's vectors take registers that loads between vectors would need.
        shifts = vectors.masked and self.set.smoothing != 0 and not self.weights.absent
        long = vectors.n is None or vectors.n > BY_VECTOR_FROM * vectors.vec
        self.vec, self.by_vector = vectors.vec, long and not shifts
        self.reduction = BestLogSum(
            self.set.shape, self.set.smoothing != 0, self.weights, self.by_vector, not vectors.masked
        )

    def begin(self, variant, numbers, row, valid):
        given, tensors = dict(zip(self.numbers, numbers)), variant.tensors
        mLogits, mTarget, mPartial = given["logits"], given["target"], given.get("lse_partial")
        target = Int64(number_or(mTarget, tensors["target"], row, valid, 0))
        kept = target != self.set.ignored
        known = valid & kept & (target >= 0) & (target < Int64(mLogits.shape[-1]))
        picked = self.set.shape.number(logit(mLogits, tensors["logits"], row, target, known))
        weight = self.weights.of(given.get("weight")).at(target, known)
        partial_lse = None
        if const_expr(mPartial is not None):
            partial_lse = number_or(mPartial, tensors["lse_partial"], row, valid & kept, 0)
        return (kept, known, picked, weight, partial_lse), valid & kept

    def postprocess(self, variant, numbers, rows, results, context, row):
        kept, known, picked, weight, partial_lse = context
        pair = results[:-2]
        if partial_lse is not None:
            top = cute.arch.fmax(pair[0], partial_lse)
            top = cutlass.select_(partial_lse == partial_lse, top, Float32.nan)
            pair = moved(pair, top)
            pair = (top, pair[1] + exponentials(partial_lse, origin(top)), *pair[2:])
        given = dict(zip(self.numbers, numbers))
        smoothing, n = self.set.smoothing, given["logits"].shape[-1]
        log_sum = cute.math.log(pair[1])
        top = cutlass.select_(log_sum == log_sum, pair[0], log_sum)  # fmax ignores NaN, a sum does not
        lse = top + log_sum
        log_prob = cutlass.select_(known, (picked - top) - log_sum, Float32(self.set.absent))
        loss = -(1.0 - smoothing) * log_prob
        slope = Float32(1.0 - smoothing)
        if self.set.z != 0:
            term = self.set.z * lse * lse
            if self.set.classes:  # the device that has the target's class counts it
                term = cutlass.select_(known, term, Float32(0.0))
            loss = loss + term
            slope = slope + 2.0 * self.set.z * lse
        if not self.weights.absent:
            loss, slope = loss * weight, slope * weight
        if smoothing != 0:
            share = smoothing / Float32(self.set.classes or n)
            loss = loss + share * (pair[3] * log_sum - pair[2])
            # Without weights all devices' classes add up to one.
            slope = slope + (smoothing if self.weights.absent else share * pair[3])
        found = {
            "loss": loss, "lse": lse, "log_prob": log_prob, "row_max": top, "log_sum": log_sum,
            "target_weight": weight, "slope": slope,
        }  # fmt: skip
        for name, value in found.items():
            store_number(number_where(kept, value), given[name], variant.tensors[name], row)
        best = self._best(given["logits"], variant.tensors["logits"], row, results)
        best = Int32(cutlass.select_(kept, best, Int32(-1)))
        store_number(best, given["predicted"], variant.tensors["predicted"], row)

    def _best(self, mLogits, key, row, results):
        """The column of the first of a row's largest logits."""
        *_, raw, column = results
        # Behind a row of NaN there may be columns that are -inf.
        best = Int32(cutlass.select_(column < Float32(mLogits.shape[-1]), column, Float32(0.0)))
        return place_of(mLogits, key, row, best, raw, self.vec) if const_expr(self.by_vector) else best


class MetricsGradient(RowFunction):
    """``(dloss * slope + dlse - dlog_prob) * softmax(logits) + dlog_prob * onehot
    - dloss * ((1 - label_smoothing) * weight[target] * onehot + label_smoothing / n * weight)``.
    """

    inputs, outputs = ("logits",), ("dlogits",)

    def __init__(self, variant):
        self.numbers = tuple(name for name in variant.names if name != "dlogits")
        self.set, self.weights = Settings(variant), ClassWeights(variant)

    def begin(self, variant, numbers, row, valid):
        given, tensors = dict(zip(self.numbers, numbers)), variant.tensors
        n = given["logits"].shape[-1]
        self.weights.of(given.get("weight"))
        target = Int64(number_or(given["target"], tensors["target"], row, valid, 0))
        kept = target != self.set.ignored
        known = (target >= 0) & (target < Int64(n))
        top, log_sum, weight, slope, dloss, dlse, dlog_prob = (
            Float32(0.0) if given.get(name) is None else number_or(given[name], tensors[name], row, valid, 0)
            for name in ("row_max", "log_sum", "target_weight", "slope", "dloss", "dlse", "dlog_prob")
        )
        if not self.set.classes:
            dloss = cutlass.select_(known, dloss, Float32.nan)
        # For rows that are not read, logits and what the forward saved are replaced by zeros, which gives no NaN.
        dloss, dlse, dlog_prob = (cutlass.select_(kept, d, Float32(0.0)) for d in (dloss, dlse, dlog_prob))
        column = Int32(cutlass.select_(known & kept, target, Int64(-1)))
        return (column, top, log_sum, weight, slope, dloss, dlse, dlog_prob, n), valid & kept

    def emit(self, values, results, context, columns):
        column, top, log_sum, weight, slope, dloss, dlse, dlog_prob, n = context
        y = self.set.shape.vector(values[0])
        # Computed here, because earlier the logits' loads would wait for the numbers.
        dx = exponentials(y, top) * ((dloss * slope + (dlse - dlog_prob)) * cute.math.exp(-log_sum))
        if self.set.smoothing:
            share = dloss * (self.set.smoothing / Float32(self.set.classes or n))
            dx = dx - (share if self.weights.absent else self.weights.vector(columns.first, columns.count) * share)
        rDx = fragment(Float32, columns.count)
        rDx.store(dx)
        subtract_at(rDx, column - columns.first, self.set.at_target(dloss) * weight - dlog_prob)
        self.set.shape.derived(rDx, y)
        return (rDx.load(),)


CrossEntropyMetrics, CrossEntropyMetricsBackward = (
    partial(RowKernel, function) for function in (Metrics, MetricsGradient)
)
