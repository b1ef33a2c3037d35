"""Which form of a norm's kernel a variant gets."""

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


def forward_form(variant, centred=False):
    config = NormConfig.of(variant.config)
    return FORWARD[config.form](variant, config, centred)


def backward_form(variant, x, dx, centred=False):
    config = NormConfig.of(variant.config)
    return BACKWARD[config.form](variant, config, x, dx, centred)
