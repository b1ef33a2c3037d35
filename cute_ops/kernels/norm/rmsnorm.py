"""RMSNorm kernels, with or without a residual; what the other norms are, too."""

import cutlass.cute as cute

from cute_ops.kernels.norm.bwd_few_rows import NormBackwardFewRows
from cute_ops.kernels.norm.bwd_overlapped import NormBackwardOverlapped
from cute_ops.kernels.norm.bwd_persistent import NormBackward
from cute_ops.kernels.norm.config import NormConfig
from cute_ops.kernels.norm.fwd import NormForward
from cute_ops.kernels.norm.fwd_persistent import NormForwardPersistent
from cute_ops.kernels.norm.fwd_smem import NormForwardSmem
from cute_ops.kernels.norm.two_pass import NormBackwardTwoPass, NormForwardTwoPass

FORWARD = {
    "one_pass": NormForward, "smem": NormForwardSmem, "persistent": NormForwardPersistent,
    "two_pass": NormForwardTwoPass,
}  # fmt: skip
BACKWARD = {
    "few_rows": NormBackwardFewRows, "overlapped": NormBackwardOverlapped, "persistent": NormBackward,
    "two_pass": NormBackwardTwoPass,
}  # fmt: skip


class RMSNorm:
    """``out = (x - mean(x)) * rsqrt(var(x) + eps) * (weight_offset + weight) + bias``, with the mean 0 and the variance
    the mean square unless ``centred``. Where there is a residual, x is their sum, rounded: ``residual_out``.
    """

    def __init__(self, variant, centred=False):
        config = NormConfig.of(variant.config)
        self.names, self.form = variant.names, FORWARD[config.form](variant, config, centred)

    @cute.jit
    def __call__(self, *arguments):
        tensors = dict(zip(self.names, arguments))
        rows = [tensors.get(name) for name in ("x", "residual", "weight", "bias", "out", "residual_out")]
        self.form(*rows, arguments[-1])


class RMSNormBackward:
    """Gradients of :class:`RMSNorm`; mean and rstd are computed again from x. The gradient of the sum of x and a
    residual is that of both: ``dresidual``, and ``dx`` in x's dtype.
    """

    def __init__(self, variant, centred=False):
        config, self.names = NormConfig.of(variant.config), variant.names
        added = "dresidual" in self.names
        self.x, self.dx = ("residual_out", ("dx", "dresidual")) if added else ("x", ("dx",))
        self.form = BACKWARD[config.form](variant, config, self.x, self.dx, centred)

    @cute.jit
    def __call__(self, *arguments):
        tensors = dict(zip(self.names, arguments))
        named = (self.x, "dout", "dresidual_out"), ("weight", "bias"), self.dx, ("dweight", "dbias")
        partials = ("dweight_partials", "dbias_partials", "terms")
        groups = [tuple([tensors.get(name) for name in names]) for names in (*named, partials)]
        self.form(*groups, arguments[-1])
