"""Residual add + RMSNorm kernels."""

import cutlass.cute as cute

from cute_ops.kernels.norm.select import backward_form, forward_form


class AddRMSNorm:
    """``residual_out = x + residual``; ``out = rmsnorm(residual_out)``, of the rounded sum."""

    def __init__(self, variant):
        self.form = forward_form(variant)

    @cute.jit
    def __call__(self, mX, mResidual, mWeight, mBias, mOut, mResidualOut, stream):
        self.form(mX, mResidual, mWeight, mBias, mOut, mResidualOut, stream)


class AddRMSNormBackward:
    """``dresidual = rmsnorm_bwd(residual_out, dout) + dresidual_out``; dx is the same in x's dtype."""

    def __init__(self, variant):
        self.form = backward_form(variant, x="residual_out", dx=("dx", "dresidual"))

    @cute.jit
    def __call__(
        self, mResidualOut, mDout, mDresidualOut, mWeight, mBias,
        mDx, mDresidual, mDweight, mDbias, mDweightParts, mDbiasParts, mTerms, stream,
    ):  # fmt: skip
        inputs, parts = (mResidualOut, mDout, mDresidualOut), (mDweightParts, mDbiasParts, mTerms)
        self.form(inputs, (mWeight, mBias), (mDx, mDresidual), (mDweight, mDbias), parts, stream)
