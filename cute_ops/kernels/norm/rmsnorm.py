"""RMSNorm kernels."""

import cutlass.cute as cute

from cute_ops.kernels.norm.select import backward_form, forward_form


class RMSNorm:
    """``out = x * rsqrt(mean(x^2) + eps) * (weight_offset + weight) + bias``."""

    def __init__(self, variant):
        self.form = forward_form(variant)

    @cute.jit
    def __call__(self, mX, mWeight, mBias, mOut, stream):
        self.form(mX, None, mWeight, mBias, mOut, None, stream)


class RMSNormBackward:
    """Gradients of :class:`RMSNorm`; rstd is computed again from x."""

    def __init__(self, variant):
        self.form = backward_form(variant, x="x", dx=("dx",))

    @cute.jit
    def __call__(self, mX, mDout, mWeight, mBias, mDx, mDweight, mDbias, mDweightParts, mDbiasParts, mTerms, stream):
        inputs, parts = (mX, mDout, None), (mDweightParts, mDbiasParts, mTerms)
        self.form(inputs, (mWeight, mBias), (mDx,), (mDweight, mDbias), parts, stream)
