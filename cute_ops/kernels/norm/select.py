"""Which form of a norm's kernel a variant gets."""

from cute_ops.kernels.norm.bwd_few_rows import NormBackwardFew
from cute_ops.kernels.norm.bwd_overlapped import NormBackwardSplit
from cute_ops.kernels.norm.bwd_persistent import NormBackward
from cute_ops.kernels.norm.fwd import NormForward
from cute_ops.kernels.norm.fwd_persistent import NormForwardWalk
from cute_ops.kernels.norm.fwd_smem import NormForwardStaged
from cute_ops.kernels.norm.two_pass import NormBackwardLong, NormForwardLong


def is_long(variant):
    """Whether rows go through memory twice: their length is not known, or the heuristic found them too long."""
    return variant.dims["n"] is None or bool(variant.tile.get("long", 0))


def forward_form(variant, centred=False):
    if is_long(variant):
        return NormForwardLong(variant, centred)
    if variant.tile.get("stages", 0):
        return NormForwardWalk(variant, centred)
    return (NormForwardStaged if variant.tile.get("staged", 0) else NormForward)(variant, centred)


def backward_form(variant, x, dx, centred=False):
    if is_long(variant):
        return NormBackwardLong(variant, x, dx, centred)
    if variant.tile.get("split", 0):
        return NormBackwardSplit(variant, x, dx, centred)
    return (NormBackwardFew if variant.tile.get("few", 0) else NormBackward)(variant, x, dx, centred)
