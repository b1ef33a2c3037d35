"""Cross entropy kernels: see :mod:`cute_ops.ops.cross_entropy` for the maths."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.kernels._access import number_or, store_number
from cute_ops.kernels._held import RowFunction
from cute_ops.kernels._log_sum import LogSum, exponentials
from cute_ops.kernels._rows import row_address
from cute_ops.kernels._segments import Segments
from cute_ops.kernels._vectors import fragment, gmem_elements
from cute_ops.kernels._walked import run_rows


class Loss(RowFunction):
    """A maximum and a sum per row; the target's logit is read once more, by one thread.

    Rows whose target is ``ignore_index`` are not read.
    """

    inputs, outputs = ("logits",), ()

    def __init__(self, variant):
        attrs = variant.attrs
        self.ignored, self.smoothing, self.z = attrs["ignore_index"], attrs["label_smoothing"], attrs["z_loss"]
        self.classes = attrs["classes"]
        self.reduction = LogSum(plain=self.smoothing != 0)

    def begin(self, variant, numbers, row, there):
        mTarget = numbers[0]
        target = Int64(number_or(mTarget, variant.tensors["target"], row, there, 0))
        return target, there & (target != self.ignored)

    @cute.jit
    def finish(self, variant: cutlass.Constexpr, numbers, rows, results: cutlass.Constexpr, target: Int64, row: Int64):
        _, mLoss, mLse = numbers
        mLogits = rows[0]
        long_n = mLogits.shape[len(mLogits.shape) - 1]
        n = Int64(long_n)
        top, total = results[0], results[1]
        loss, lse = Float32(0.0), Float32(0.0)
        if target != self.ignored:
            lse = top + cute.math.log(total)
            # Of a slice of the classes the target may be in another one, and adds nothing to this one's loss.
            picked = Float32(0.0) if const_expr(self.classes) else Float32.nan
            if target >= 0 and target < n:
                address = row_address(mLogits, variant.tensors["logits"], row, long_n)
                address = address + target * (mLogits.element_type.width // 8)
                picked = gmem_elements(mLogits.element_type, address, 1)[0].to(Float32)
            if const_expr(self.smoothing == 0):
                loss = lse - picked
            else:
                mean = results[2] / Float32(self.classes or n)
                loss = lse - ((1.0 - self.smoothing) * picked + self.smoothing * mean)
            if const_expr(self.z != 0):
                loss = loss + self.z * lse * lse
        store_number(loss, mLoss, variant.tensors["loss"], row)
        store_number(lse, mLse, variant.tensors["lse"], row)


class CrossEntropy:
    """``loss = lse - (1 - label_smoothing) * logits[target] - label_smoothing * mean(logits) + z_loss * lse^2``."""

    def __init__(self, variant):
        self.form = run_rows(variant, Loss(variant))

    @cute.jit
    def __call__(self, mLogits, mTarget, mLoss, mLse, stream):
        self.form((mLogits,), (), (mTarget, mLoss, mLse), stream)


class LossGradient:
    """``dloss * (softmax(logits) * (1 + 2 * z_loss * lse) - (1 - label_smoothing) * onehot - label_smoothing / n)``."""

    inputs, outputs = ("logits",), ("dlogits",)

    def __init__(self, variant):
        attrs = variant.attrs
        self.ignored, self.smoothing, self.z = attrs["ignore_index"], attrs["label_smoothing"], attrs["z_loss"]
        self.classes = attrs["classes"]

    def begin(self, variant, numbers, row, there):
        mLogits, mTarget, mLse, mDloss = numbers
        n = Int64(mLogits.shape[len(mLogits.shape) - 1])
        tensors = variant.tensors
        target = Int64(number_or(mTarget, tensors["target"], row, there, 0))
        lse = number_or(mLse, tensors["lse"], row, there, 0)
        dloss = number_or(mDloss, tensors["dloss"], row, there, 0)
        kept = target != self.ignored
        known = (target >= 0) & (target < n)
        if not self.classes:
            dloss = cutlass.select_(known, dloss, Float32.nan)
        # -inf in place of the logits of rows that are not read, and 0 for their lse: exp is 0, not NaN.
        dloss = cutlass.select_(kept, dloss, Float32(0.0))
        column = Int32(cutlass.select_(known & kept, target, Int64(-1)))
        smoothing = dloss * (self.smoothing / Float32(self.classes or n)) if self.smoothing else None
        scale = dloss * (1.0 + 2.0 * self.z * lse) if self.z else dloss
        return (column, lse, dloss, scale, smoothing), there & kept

    def emit(self, values, first, vec, context):
        column, lse, dloss, scale, smoothing = context
        dx = exponentials(values[0], lse) * scale
        if smoothing is not None:
            dx = dx - smoothing
        rDx = fragment(Float32, vec)
        rDx.store(dx)
        self._at_target(rDx, column - first, dloss * (1.0 - self.smoothing))
        return (rDx.load(),)

    @cute.jit
    def _at_target(self, rDx: cute.Tensor, place: Int32, amount: Float32):
        for j in cutlass.range_constexpr(cute.size(rDx)):
            rDx[j] = rDx[j] - cutlass.select_(place == j, amount, Float32(0.0))


class CrossEntropyBackward:
    """Gradient of :class:`CrossEntropy`, from the saved lse."""

    def __init__(self, variant):
        self.form = Segments(variant, LossGradient(variant))

    @cute.jit
    def __call__(self, mLogits, mTarget, mLse, mDloss, mDlogits, stream):
        self.form((mLogits,), (mDlogits,), (mLogits, mTarget, mLse, mDloss), stream)
