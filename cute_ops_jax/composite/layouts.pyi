"""Functions for arrays of several layouts: :mod:`cute_ops.composite.layouts`. Made by ``python -m cute_ops_jax.tools.stubs``."""

from collections.abc import Sequence

from jax import Array

def group_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    groups: int = 32,
    eps: float = 1e-05,
    *,
    channels_last: bool = False,
    activation: str = "none",
) -> Array:
    """Normalisation of each example's groups of channels.

    ``out = activation((x - mean) * rsqrt(var + eps) * weight + bias)``, mean and var over all positions of
    ``c / groups`` neighbouring channels of an example

    Channels first, a group is read once; channels last, and a group that is too long for a chip's shared memory,
    twice.

    Args:
        x: ``T[n c *s]``, or ``T[n *s c]`` with ``channels_last``: any number of dims of positions, or none;
            float32, float16 or bfloat16. In PyTorch an image in ``torch.channels_last`` is read as it lies, and so
            is what is returned.
        weight: ``W[c]``, a float dtype of its own; ones where None.
        bias: ``B[c]``, a float dtype of its own; zeros where None.
        groups: of channels, a divisor of c.
        eps: added to the variance.
        channels_last: whether the last dim has the channels, not the second.
        activation: ``"silu"`` applies it in the same pass, as blocks of image models do; or ``"none"``.

    Returns:
        The shape and dtype of x. Computed in float32, rounded once; deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: fewer than two dims, an ``eps`` that is negative or not finite, channels that groups do not
            divide, no channel, no position.

    Source: Wu and He, Group Normalization, 2018.
    """

def rope_from_positions(
    x: Array,
    positions: Array,
    *,
    base: float = 10000.0,
    rotary_dim: int = 0,
    sections: Sequence[int] = (),
    mixed: bool = False,
    heads: int = 0,
    interleaved: bool = False,
    frequencies: Array | None = None,
) -> Array:
    """Rotary position embedding by positions, without tables; with sections that of images and videos (M-RoPE).

    ``rope(x, cos(angles), sin(angles))``, ``angles[..., j] = positions * base ** (-j / r)``

    Args:
        x: ``T[*m h d]``: (batch, seqlen, nheads, headdim), or (tokens, nheads, headdim).
        positions: integers or floats ``[*m]``, or of the last few of these dims; with sections ``[k *m]``: time,
            height and width.
        base: of the frequencies.
        rotary_dim: ``2r``, the elements of a head that are rotated; d where 0.
        sections: how many of the r angles each of k positions has: ``(16, 24, 24)`` of Qwen2-VL.
        mixed: sections take turns, as in Qwen3-VL: of angles ``3j + i`` below ``3 * sections[i]`` the position is
            that of i, of others the first.
        heads: how many heads are rotated, the first ones, as in :func:`rope_packed`; all where 0.
        interleaved: pairs are ``(2j, 2j + 1)`` instead of ``(j, j + r)``.
        frequencies: float32 ``[r]``, in place of ``base ** (-j / r)``: scaled ones of longer contexts.

    Returns:
        ``T[*m h d]``. Angles, cosines and sines are computed in float32.

    Raises:
        TypeError: dtypes that are not listed, sections that are no numbers.
        ValueError: shapes that do not fit, an odd rotary dim, a base that is not positive, sections that do not add
            up to r, or fewer positions than sections.

    Source: Su et al., RoFormer, 2021; Wang et al., Qwen2-VL, 2024.
    """
