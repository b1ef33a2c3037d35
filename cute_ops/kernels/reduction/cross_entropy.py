"""Cross entropy kernels: see :mod:`cute_ops.ops.reduction.cross_entropy` for the maths."""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_ops.kernels.lib.copy import fragment, gmem_elements
from cute_ops.kernels.lib.row_copy import number_or, store_number
from cute_ops.kernels.lib.row_layout import row_address
from cute_ops.kernels.lib.row_reduce_lse import LogSum, exponentials, moved
from cute_ops.kernels.rowwise.function import RowFunction
from cute_ops.kernels.rowwise.kernel import RowKernel


@cute.jit
def logit(mLogits: cute.Tensor, key: cutlass.Constexpr, row: Int64, column: Int64, valid: Boolean):
    """A row's element in fp32, -inf if it does not exist."""
    rX, dtype = fragment(Float32, 1, -Float32.inf), mLogits.element_type
    if valid:
        address = row_address(mLogits, key, row, mLogits.shape[-1]) + column * (dtype.width // 8)
        rX[0] = gmem_elements(dtype, address, 1)[0].to(Float32)
    return rX[0]


class Shape:
    """``y = softcap * tanh(logit_scale * x / softcap)``, or ``logit_scale * x`` without a cap; -inf stays -inf."""

    def __init__(self, variant):
        self.cap, self.scale = variant.attrs["softcap"], variant.attrs["logit_scale"]
        self.plain = self.cap == 0 and self.scale == 1

    def number(self, x):
        if self.cap == 0:
            return x if self.plain else x * self.scale
        return cutlass.select_(x == -Float32.inf, x, self.cap * cute.math.tanh(x * (self.scale / self.cap)))

    def slope(self, y):
        """The derivative, by what it made of the logit."""
        if self.cap == 0:
            return Float32(self.scale)
        part = y * (1.0 / self.cap)
        return cutlass.select_(y == -Float32.inf, Float32(0.0), self.scale * (1.0 - part * part))

    def vector(self, x):
        return x if self.plain else self._each(self.number, x)

    def derived(self, rDx, y):
        """Multiply the gradient of a vector by the derivative."""
        if not self.plain:
            rDx.store(rDx.load() * self._each(self.slope, y))

    def _each(self, function, x):
        rX = fragment(Float32, cute.size(x.shape))
        rX.store(x)
        for j in range(cute.size(rX)):
            rX[j] = function(rX[j])
        return rX.load()


class ShapedLogSum(LogSum):
    """The reduction of shaped logits. The largest one is the shape of the largest logit: shapes grow with logits."""

    def __init__(self, shape, plain):
        super().__init__(plain)
        self.number, self.vector = shape.number, shape.vector

    def add(self, state, get, inside):
        return super().add(state, lambda: (self.vector(get()[0]),), inside)


class Settings:
    """The attributes, and the loss and gradient that they make of a row's sums."""

    def __init__(self, variant):
        attrs = variant.attrs
        self.shape = Shape(variant)
        self.ignored, self.smoothing, self.z = attrs["ignore_index"], attrs["label_smoothing"], attrs["z_loss"]
        # In a slice of the classes a target may belong to another slice: then it adds nothing to this slice's loss.
        self.classes = attrs.get("classes", 0)
        self.absent = 0.0 if self.classes else Float32.nan

    def loss(self, results, known, picked, n):
        """(loss, log-sum) of a row that is not ignored, from differences to the maximum, which may be large."""
        top, log_sum = results[0], cute.math.log(results[1])
        loss = log_sum + (1.0 - self.smoothing) * cutlass.select_(known, top - picked, Float32(self.absent))
        if self.smoothing != 0:
            loss = loss - self.smoothing * (results[2] / Float32(self.classes or n))
        if self.z != 0:
            lse = top + log_sum
            loss = loss + self.z * lse * lse
        return loss, log_sum

    def scales(self, log_sum, top, dloss, n):
        """(factor, offset): the gradient of a logit x but for the target is ``factor * exp(x - maximum) - offset``."""
        scale = dloss * (1.0 + 2.0 * self.z * (top + log_sum)) if self.z else dloss
        return scale * cute.math.exp(-log_sum), dloss * (self.smoothing / Float32(self.classes or n))

    def gradient(self, x, top, scales, columns):
        """The gradient of a vector of logits, without the target's term, as a fragment."""
        dx, rDx = exponentials(x, top) * scales[0], fragment(Float32, columns.count)
        rDx.store(dx - scales[1] if self.smoothing else dx)
        return rDx

    def at_target(self, dloss):
        return dloss * (1.0 - self.smoothing)


class Loss(RowFunction):
    """``loss = lse - (1 - label_smoothing) * logits[target] - label_smoothing * mean(logits) + z_loss * lse^2``.

    The lse is a maximum and a sum per row. The target's logit is loaded on its own, at the same time as the row: loaded
    after the sum, it would make the CTA wait a second time.

    Rows whose target is ``ignore_index`` are not read.
    """

    inputs, outputs = ("logits",), ()
    numbers = ("logits", "target", "loss", "row_max", "log_sum")

    def __init__(self, variant):
        self.set = Settings(variant)
        self.reduction = ShapedLogSum(self.set.shape, plain=self.set.smoothing != 0)

    def begin(self, variant, numbers, row, valid):
        mLogits, mTarget, *_ = numbers
        n = Int64(mLogits.shape[-1])
        target = Int64(number_or(mTarget, variant.tensors["target"], row, valid, 0))
        kept = target != self.set.ignored
        known = valid & kept & (target >= 0) & (target < n)
        picked = logit(mLogits, variant.tensors["logits"], row, target, known)
        return (kept, known, self.set.shape.number(picked)), valid & kept

    def postprocess(self, variant, numbers, rows, results, context, row):
        mLogits, _, mLoss, mMax, mSum = numbers
        kept, known, picked = context
        loss, log_sum = self.set.loss(results, known, picked, mLogits.shape[-1])
        # fmax ignores NaN, a sum does not.
        top = cutlass.select_(log_sum == log_sum, results[0], log_sum)
        for name, m, value in zip(("loss", "row_max", "log_sum"), (mLoss, mMax, mSum), (loss, top, log_sum)):
            store_number(number_where(kept, value), m, variant.tensors[name], row)


class LossGradient(RowFunction):
    """``dloss * (softmax(logits) * (1 + 2 * z_loss * lse) - (1 - label_smoothing) * onehot - label_smoothing / n)``."""

    inputs, outputs = ("logits",), ("dlogits",)
    numbers = ("logits", "target", "row_max", "log_sum", "dloss")

    def __init__(self, variant):
        self.set = Settings(variant)

    def begin(self, variant, numbers, row, valid):
        mLogits, mTarget, mMax, mSum, mDloss = numbers
        n = mLogits.shape[-1]
        tensors = variant.tensors
        target = Int64(number_or(mTarget, tensors["target"], row, valid, 0))
        top = number_or(mMax, tensors["row_max"], row, valid, 0)
        log_sum = number_or(mSum, tensors["log_sum"], row, valid, 0)
        dloss = number_or(mDloss, tensors["dloss"], row, valid, 0)
        kept = target != self.set.ignored
        known = (target >= 0) & (target < Int64(n))
        if not self.set.classes:
            dloss = cutlass.select_(known, dloss, Float32.nan)
        # For rows that are not read, logits and what the forward saved are replaced by zeros, which gives no NaN.
        dloss = cutlass.select_(kept, dloss, Float32(0.0))
        column = Int32(cutlass.select_(known & kept, target, Int64(-1)))
        return (column, top, log_sum, dloss, n), valid & kept

    def emit(self, values, results, context, columns):
        column, top, log_sum, dloss, n = context
        # Computed here, because earlier the logits' loads would wait for the numbers.
        scales = self.set.scales(log_sum, top, dloss, n)
        y = self.set.shape.vector(values[0])
        rDx = self.set.gradient(y, top, scales, columns)
        subtract_at(rDx, column - columns.first, self.set.at_target(dloss))
        self.set.shape.derived(rDx, y)
        return (rDx.load(),)


class LossStep(RowFunction):
    """A row's loss and its gradient; the row stays on the SM between the two."""

    inputs, outputs = ("logits",), ("dlogits",)
    numbers = ("logits", "target", "dloss", "loss")

    def __init__(self, variant):
        self.set = Settings(variant)
        self.reduction = ShapedLogSum(self.set.shape, plain=self.set.smoothing != 0)

    def begin(self, variant, numbers, row, valid):
        mLogits, mTarget, mDloss, _ = numbers
        tensors, n = variant.tensors, mLogits.shape[-1]
        target = Int64(number_or(mTarget, tensors["target"], row, valid, 0))
        dloss = number_or(mDloss, tensors["dloss"], row, valid, 0)
        kept = target != self.set.ignored
        known = kept & (target >= 0) & (target < Int64(n))
        picked = self.set.shape.number(logit(mLogits, tensors["logits"], row, target, valid & known))
        column = Int32(cutlass.select_(known, target, Int64(-1)))
        return (kept, known, column, cutlass.select_(known, dloss, Float32.nan), picked, n), valid & kept

    def tied(self, state, context):
        """Contribute the target's logit to the maximum, which covers it anyway. No thread writes before all have
        contributed, so an in-place gradient cannot overwrite that logit before it is loaded.
        """
        return moved(state, cute.arch.fmax(state[0], context[4]))

    def emit(self, values, results, context, columns):
        kept, _, column, dloss, _, n = context
        scales = self.set.scales(cute.math.log(results[1]), results[0], dloss, n)
        y = self.set.shape.vector(values[0])
        rDx = self.set.gradient(y, results[0], scales, columns)
        subtract_within(rDx, column - columns.first, self.set.at_target(dloss))
        self.set.shape.derived(rDx, y)
        zero_unless(rDx, kept)  # a row that was not read has undefined values here
        return (rDx.load(),)

    def postprocess(self, variant, numbers, rows, results, context, row):
        mLoss = numbers[3]
        kept, known, _, _, picked, n = context
        loss, _ = self.set.loss(results, known, picked, n)
        store_number(number_where(kept, loss), mLoss, variant.tensors["loss"], row)


@cute.jit
def subtract_at(rX: cute.Tensor, place: Int32, amount: Float32):
    """Subtract from the element at a place, if the vector has it."""
    for j in cutlass.range_constexpr(cute.size(rX)):
        rX[j] = rX[j] - cutlass.select_(place == j, amount, Float32(0.0))


@cute.jit
def subtract_within(rX: cute.Tensor, place: Int32, amount: Float32):
    """Subtract from the element at a place by a branch, which is faster if instructions limit the kernel."""
    if (place >= 0) & (place < cute.size(rX)):
        subtract_at(rX, place, amount)


@cute.jit
def zero_unless(rX: cute.Tensor, kept: Boolean):
    for j in cutlass.range_constexpr(cute.size(rX)):
        rX[j] = cutlass.select_(kept, rX[j], Float32(0.0))


def number_where(valid, number):
    return Float32(cutlass.select_(valid, number, Float32(0.0)))


CrossEntropy, CrossEntropyBackward, CrossEntropyStep = (
    partial(RowKernel, function) for function in (Loss, LossGradient, LossStep)
)
