"""Kernels that quantise rows to float8_e4m3fn."""

from functools import partial

import cutlass.cute as cute

from cute_ops.kernels.quantize.config import QuantizeConfig
from cute_ops.kernels.quantize.one_pass import QuantizeRows
from cute_ops.kernels.quantize.one_pass_blocks import blocks
from cute_ops.kernels.quantize.one_pass_smem import QuantizeRowsInSmem
from cute_ops.kernels.quantize.prologue import Gated, Normed, Plain
from cute_ops.kernels.quantize.two_pass import QuantizeTwoPass

# Forms of their own beside those of row functions (kernels/rowwise): vectors start with the row, so that neighbouring
# lanes hold a block of 128 columns, and a norm's sum and the largest element are exchanged together.
FORMS = {"one_pass": QuantizeRows, "blocks": blocks, "smem": QuantizeRowsInSmem, "two_pass": QuantizeTwoPass}


class Quantize:
    """``source(variant)``, a function of the vectors of a row, quantised."""

    def __init__(self, source, variant):
        config, self.names, self.source = QuantizeConfig.of(variant.config), variant.names, source(variant)
        self.form = FORMS[config.form](variant, config, self.source)

    @cute.jit
    def __call__(self, *arguments):
        tensors = dict(zip(self.names, arguments))
        names = self.source.names, ("weight", "bias")
        inputs, columns = (tuple([tensors.get(name) for name in group]) for group in names)
        self.form(inputs, columns, tensors.get("residual_out"), tensors["out"], tensors["scale"], arguments[-1])


QuantizeFP8, SiluMulFP8 = partial(Quantize, Plain), partial(Quantize, Gated)
RMSNormFP8 = AddRMSNormFP8 = partial(Quantize, Normed)
