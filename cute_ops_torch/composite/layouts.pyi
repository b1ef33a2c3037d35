"""Functions for arrays of several layouts: :mod:`cute_ops.composite.layouts`. Made by ``python -m cute_ops_torch.tools.stubs``."""

from torch import Tensor

def group_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    groups: int = 32,
    eps: float = 1e-05,
    *,
    channels_last: bool = False,
) -> Tensor:
    """Normalisation of each example's groups of channels.

    ``out = (x - mean) * rsqrt(var + eps) * weight + bias``, mean and var over all positions of ``c / groups``
    neighbouring channels of an example

    Channels first, a group is read once; channels last, and in both gradients of weight and bias, twice.

    Args:
        x: ``T[n c *s]``, or ``T[n *s c]`` with ``channels_last``: any number of dims of positions, or none;
            float32, float16 or bfloat16. In PyTorch an image in ``torch.channels_last`` is read as it lies, and so
            is what is returned.
        weight: ``W[c]``, a float dtype of its own; ones where None.
        bias: ``B[c]``, a float dtype of its own; zeros where None.
        groups: of channels, a divisor of c.
        eps: added to the variance.
        channels_last: whether the last dim has the channels, not the second.

    Returns:
        The shape and dtype of x. Computed in float32, rounded once; deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: fewer than two dims, channels that groups do not divide, no position.

    Source: Wu and He, Group Normalization, 2018.
    """
