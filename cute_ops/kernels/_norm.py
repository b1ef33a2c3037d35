"""Which form of a norm's kernel a variant gets."""

from cute_ops.kernels._backward import NormBackward
from cute_ops.kernels._forward import NormForward
from cute_ops.kernels._forward_staged import NormForwardStaged
from cute_ops.kernels._long import NormBackwardLong, NormForwardLong


def is_long(variant):
    """Whether rows go through memory twice: their length is not known, or the heuristic found them too long."""
    return variant.dims["n"] is None or bool(variant.tile.get("long", 0))


def forward_form(variant):
    if is_long(variant):
        return NormForwardLong(variant)
    return NormForwardStaged(variant) if variant.tile.get("staged", 0) else NormForward(variant)


def backward_form(variant, x, dx):
    return NormBackwardLong(variant, x, dx) if is_long(variant) else NormBackward(variant, x, dx)
