"""Functions over ops for arrays of several layouts, written once for the arrays of any framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from numbers import Integral
from typing import Any, Generic, TypeVar

from cute_ops.composite.group_norm import group_norm_first, group_norm_last, group_norm_long, is_long
from cute_ops.errors import shown
from cute_ops.ops.checks import check_flag
from cute_ops.ops.rotary.rope import rope, rope_packed, rope_tables

Array = TypeVar("Array")


class Layouts(Generic[Array]):
    """The functions of a framework.

    Args:
        xp: its namespace: ``torch`` or ``jax.numpy``.
        register: makes functions of ops.
        frequencies: ``frequencies(base, r, x)``: ``base ** (-j / r)`` for j below r, in float32, on the device of x.
        places: ``places(r, x)``: int32 numbers below r, on the device of x.
        float32: converts an array to float32 on its device.
        kept: ``kept(key, make, x)``: ``make()``, which may be kept for later calls with this key and the device of x.
        constant: an array without its gradient.
        turned: an array whose first dim is moved to the end.
        array: converts an argument to an array.
        channels_last: whether an image ``[N, C, H, W]`` lies in memory with its channels last.
    """

    def __init__(
        self, xp: Any, register: Callable[..., Any], *, frequencies: Callable[[float, int, Any], Any],
        places: Callable[[int, Any], Any], float32: Callable[[Any], Any],
        kept: Callable[[Any, Callable[[], Any], Any], Any], constant: Callable[[Any], Any],
        turned: Callable[[Any], Any], array: Callable[[Any], Any], channels_last: Callable[[Any], bool],
    ) -> None:  # fmt: skip
        self._xp, self._frequencies, self._places, self._channels_last = xp, frequencies, places, channels_last
        self._float32, self._kept, self._constant = float32, kept, constant
        self._turned, self._array = turned, array
        self._rope, self._rope_packed, self._rope_tables = map(register, (rope, rope_packed, rope_tables))
        norms = group_norm_last, group_norm_first, group_norm_long
        self._group_norm_last, self._group_norm_first, self._group_norm_long = map(register, norms)

    def group_norm(
        self, x: Array, weight: Array | None = None, bias: Array | None = None, groups: int = 32, eps: float = 1e-5,
        *, channels_last: bool = False, activation: str = "none",
    ) -> Array:  # fmt: skip
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
        check_flag("group_norm", "channels_last", channels_last)
        given = self._array(x)
        shape = tuple(given.shape)
        if len(shape) < 2:
            raise ValueError(f"cute.group_norm: argument `x` has {len(shape)} dims, expected at least 2.")
        if channels_last:
            rows = given.reshape((shape[0], prod(shape[1:-1]), shape[-1]))
        elif self._channels_last(given):
            given = given.permute(0, 2, 3, 1)
            last = self.group_norm(given, weight, bias, groups, eps, channels_last=True, activation=activation)
            return last.permute(0, 3, 1, 2)  # type: ignore[attr-defined,no-any-return]
        else:
            rows = given.reshape((*shape[:2], prod(shape[2:])))
        if channels_last:
            norm = self._group_norm_last
        else:
            norm = self._group_norm_long if is_long(rows.shape, groups) else self._group_norm_first
        out: Any = norm(rows, weight, bias, groups, eps, activation)
        return out.reshape(shape)  # type: ignore[no-any-return]

    def rope_from_positions(
        self, x: Array, positions: Array, *, base: float = 10000.0, rotary_dim: int = 0, sections: Sequence[int] = (),
        mixed: bool = False, heads: int = 0, interleaved: bool = False, frequencies: Array | None = None,
    ) -> Array:  # fmt: skip
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
        check_flag("rope_from_positions", "mixed", mixed)
        given, at = self._array(x), self._array(positions)
        if not isinstance(sections, tuple | list):
            problem = f"option `sections` is {shown(sections)}, expected whole numbers."
            raise TypeError(f"cute.rope_from_positions: {problem}")
        sections = tuple(sections)
        own = None if frequencies is None else self._array(frequencies)
        if problem := _problem(given.shape, at.shape, (base, rotary_dim, sections, heads), own):
            raise ValueError(f"cute.rope_from_positions: {problem}")
        r = (rotary_dim or given.shape[-1]) // 2
        if own is None:
            steps = self._kept((base, r), lambda: self._frequencies(base, r, given), given)
        else:
            steps = self._float32(self._constant(own))
        section = self._kept((sections, mixed, r), lambda: self._section(sections, mixed, r, given), given)
        at = self._turned(at) if sections else at[..., None]
        if str(at.dtype).rpartition(".")[2] not in rope_tables.dtypes["I"]:
            at = self._float32(at)
        cos, sin = self._rope_tables(self._constant(at), steps, section)
        if heads:
            return self._rope_packed(given, cos, sin, int(heads), interleaved)  # type: ignore[no-any-return]
        return self._rope(given, cos, sin, interleaved)  # type: ignore[no-any-return]

    def _section(self, sections: tuple[int, ...], mixed: bool, r: int, x: Any) -> Any:
        """Which of the positions of a token each of r angles has."""
        places = self._places(r, x)
        section, start = 0 * places, 0
        for k in range(1, len(sections)):
            start += sections[k - 1]
            if mixed:
                own = (places % len(sections) == k) & (places < len(sections) * sections[k])
            else:
                own = (places >= start) & (places < start + sections[k])
            section = self._xp.where(own, k, section)
        return section


def _problem(x: Sequence[Any], positions: Sequence[Any], options: tuple[Any, ...], frequencies: Any) -> str:
    """The problem with the shapes and options of a call of ``rope_from_positions``; empty if nothing is."""
    base, rotary_dim, sections, heads = options
    if len(x) < 2:
        return f"argument `x` has {len(x)} dims, expected at least 2: T[*m h d]."
    size = rotary_dim or x[-1]
    if size % 2 or rotary_dim < 0:
        return f"option `rotary_dim` is {size}, expected an even number."
    if problem := _wrong_number(base, heads, sections, size // 2):
        return problem
    if problem := _misplaced(x[:-2], positions, len(sections)):
        return f"argument `positions` {problem}"
    if frequencies is not None and [*frequencies.shape] != [size // 2]:
        return f"argument `frequencies` has the shape {[*frequencies.shape]}, expected [{size // 2}]."
    return ""


def _wrong_number(base: Any, heads: Any, sections: tuple[Any, ...], r: int) -> str:
    """The problem with these options of a head of r angles; empty if nothing is."""
    if isinstance(base, int | float) and not 0 < base < inf:  # under jit it may be no number yet
        return f"option `base` is {shown(base)}, expected a positive number."
    if isinstance(heads, bool) or not isinstance(heads, Integral) or heads < 0:
        return f"option `heads` is {shown(heads)}, expected how many heads are rotated, or 0."
    if sections and (not all(isinstance(each, Integral) for each in sections) or sum(sections) != r):
        return f"option `sections` is {shown(sections)}, expected a sum of r={r}."
    return ""


def _misplaced(rows: Sequence[Any], positions: Sequence[Any], sections: int) -> str:
    """The problem with the shape of positions of so many rows; empty if nothing is."""
    if sections and (not positions or positions[0] != sections):
        return f"has {positions[0] if positions else 'no'} positions of a token, expected {sections}, one a section."
    lead = positions[bool(sections) :]
    last = rows[max(len(rows) - len(lead), 0) :]
    if len(lead) > len(rows) or any(a != b and a != 1 for a, b in zip(lead, last, strict=True)):
        return f"has the shape {[*positions]}, expected the last ones of *m={tuple(rows)}, or 1."
    return ""
