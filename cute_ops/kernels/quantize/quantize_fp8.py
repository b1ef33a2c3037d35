"""Kernels that quantise rows to float8_e4m3fn."""

import cutlass.cute as cute

from cute_ops.kernels.quantize.config import QuantizeConfig
from cute_ops.kernels.quantize.one_pass import QuantizeRows
from cute_ops.kernels.quantize.one_pass_smem import QuantizeRowsInSmem
from cute_ops.kernels.quantize.prologue import Gated, Normed, Plain
from cute_ops.kernels.quantize.two_pass import QuantizeTwoPass

FORMS = {"one_pass": QuantizeRows, "smem": QuantizeRowsInSmem, "two_pass": QuantizeTwoPass}


def quantize_form(variant, source):
    config = QuantizeConfig.of(variant.config)
    return FORMS[config.form](variant, config, source)


class QuantizeFP8:
    """``x``, quantised."""

    def __init__(self, variant):
        self.form = quantize_form(variant, Plain())

    @cute.jit
    def __call__(self, mX, mOut, mScale, stream):
        self.form((mX,), (None, None), None, mOut, mScale, stream)


class SiluMulFP8:
    """``silu(gate) * up``, quantised."""

    def __init__(self, variant):
        self.form = quantize_form(variant, Gated())

    @cute.jit
    def __call__(self, mGate, mUp, mOut, mScale, stream):
        self.form((mGate, mUp), (None, None), None, mOut, mScale, stream)


class RMSNormFP8:
    """``rmsnorm(x)``, quantised."""

    def __init__(self, variant):
        self.form = quantize_form(variant, Normed(variant))

    @cute.jit
    def __call__(self, mX, mWeight, mBias, mOut, mScale, stream):
        self.form((mX, None), (mWeight, mBias), None, mOut, mScale, stream)


class AddRMSNormFP8:
    """``residual_out = x + residual``; ``rmsnorm(residual_out)``, quantised."""

    def __init__(self, variant):
        self.form = quantize_form(variant, Normed(variant))

    @cute.jit
    def __call__(self, mX, mResidual, mWeight, mBias, mOut, mScale, mResidualOut, stream):
        self.form((mX, mResidual), (mWeight, mBias), mResidualOut, mOut, mScale, stream)
