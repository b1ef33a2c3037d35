"""RMSNorm kernels, with or without a residual; what the other norms are, too."""

from typing import Any, NamedTuple

import cutlass.cute as cute

from cute_ops.kernels.lib.arguments import by_name, named
from cute_ops.kernels.norm.bwd_few_rows import NormBackwardFewRows
from cute_ops.kernels.norm.bwd_overlapped import NormBackwardOverlapped
from cute_ops.kernels.norm.bwd_persistent import NormBackward
from cute_ops.kernels.norm.config import NormConfig
from cute_ops.kernels.norm.fwd import NormForward
from cute_ops.kernels.norm.fwd_blocks import blocks
from cute_ops.kernels.norm.fwd_persistent import NormForwardPersistent
from cute_ops.kernels.norm.fwd_smem import NormForwardSmem
from cute_ops.kernels.norm.two_pass import NormBackwardTwoPass, NormForwardTwoPass

# Forms of their own beside those of expressions (kernels/rows): a layer norm merges moments where those add plain sums,
# and of an RMS norm's backward they take 5% longer (16384 x 4097, benchmarks/results).
FORWARD = {
    "one_pass": NormForward, "smem": NormForwardSmem, "persistent": NormForwardPersistent,
    "two_pass": NormForwardTwoPass, "blocks": blocks,
}  # fmt: skip
BACKWARD = {
    "few_rows": NormBackwardFewRows, "overlapped": NormBackwardOverlapped, "persistent": NormBackward,
    "two_pass": NormBackwardTwoPass,
}  # fmt: skip


class Tensors(NamedTuple):
    """The forward's tensors, None where absent."""

    x: Any
    residual: Any
    weight: Any
    bias: Any
    out: Any
    residual_out: Any


class BackwardTensors(NamedTuple):
    """The backward's tensors, None where absent.

    Attributes:
        inputs: the normalised tensor, dout, and the gradient of the residual's output.
        columns: weight and bias.
        outputs: gradients of the normalised tensor, and of the residual.
        dcolumns: gradients of weight and bias.
        partials: workspaces of these, and of each row's mean and rstd.
    """

    inputs: Any
    columns: Any
    outputs: Any
    dcolumns: Any
    partials: Any


class RMSNorm:
    """``out = (x - mean(x)) * rsqrt(var(x) + eps) * (weight_offset + weight) + bias``, with the mean 0 and the variance
    the mean square unless ``centred``. Where there is a residual, x is their sum, rounded: ``residual_out``.
    """

    def __init__(self, variant, centred=False):
        config = NormConfig.of(variant.config)
        self.variant, self.form = variant, FORWARD[config.form](variant, config, centred)

    @cute.jit
    def __call__(self, *arguments):
        self.form(named(Tensors, self.variant, arguments), arguments[-1])


class RMSNormBackward:
    """Gradients of :class:`RMSNorm`; mean and rstd are recomputed from x. The gradient of the sum of x and a
    residual is that of both: ``dresidual``, and ``dx`` in x's dtype.
    """

    def __init__(self, variant, centred=False):
        config, self.variant = NormConfig.of(variant.config), variant
        added = "dresidual" in variant.names
        self.x, self.dx = ("residual_out", ("dx", "dresidual")) if added else ("x", ("dx",))
        self.form = BACKWARD[config.form](variant, config, self.x, self.dx, centred)

    @cute.jit
    def __call__(self, *arguments):
        tensors = by_name(self.variant, arguments)
        names = (self.x, "dout", "dresidual_out"), ("weight", "bias"), self.dx, ("dweight", "dbias")
        partials = ("dweight_partials", "dbias_partials", "terms")
        groups = [tuple([tensors.get(name) for name in group]) for group in (*names, partials)]
        self.form(BackwardTensors(*groups), arguments[-1])
