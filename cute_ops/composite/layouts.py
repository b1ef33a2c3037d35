"""Functions over ops for arrays of several layouts, written once for the arrays of any framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Generic, TypeVar

from cute_ops.composite.group_norm import group_norm_first, group_norm_last, group_norm_long, is_long
from cute_ops.ops.rotary.rope import rope, rope_packed, rope_tables

Array = TypeVar("Array")


class Layouts(Generic[Array]):
    """The functions of a framework.

    Args:
        xp: its namespace: ``torch`` or ``jax.numpy``.
        register: makes functions of ops.
        frequencies: ``base ** (-j / r)`` for j below r, in float32, on the device of an array.
        places: int32 below r, there, too.
        float32: an array in float32, where it is.
        kept: ``kept(key, make, x)``: an array that depends on the key and on the device of x alone, made or kept.
        constant: an array, of which nothing is differentiated.
        turned: an array whose first dim is its last.
        channels_last: whether an image ``[N, C, H, W]`` lies in memory with its channels last.
    """

    def __init__(
        self, xp: Any, register: Callable[..., Any], *, frequencies: Callable[[float, int, Any], Any],
        places: Callable[[int, Any], Any], float32: Callable[[Any], Any],
        kept: Callable[[Any, Callable[[], Any], Any], Any], constant: Callable[[Any], Any],
        turned: Callable[[Any], Any], channels_last: Callable[[Any], bool],
    ) -> None:  # fmt: skip
        self._xp, self._frequencies, self._places, self._channels_last = xp, frequencies, places, channels_last
        self._float32, self._kept, self._constant, self._turned = float32, kept, constant, turned
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
            ValueError: fewer than two dims, channels that groups do not divide, no channel, no position.

        Source: Wu and He, Group Normalization, 2018.
        """
        given: Any = x
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
            ValueError: an odd rotary dim, sections that do not add up to r, or fewer positions than sections.

        Source: Su et al., RoFormer, 2021; Wang et al., Qwen2-VL, 2024.
        """
        given, at = _any(x), _any(positions)
        r = (rotary_dim or given.shape[-1]) // 2
        if (rotary_dim or given.shape[-1]) % 2:
            problem = f"option `rotary_dim` is {rotary_dim or given.shape[-1]}, expected an even number."
            raise ValueError(f"cute.rope_from_positions: {problem}")
        sections = tuple(sections)
        if sections:
            self._check_sections(sections, r, at.shape[0])
        if frequencies is None:
            steps = self._kept((base, r), lambda: self._frequencies(base, r, given), given)
        else:
            steps = self._float32(self._constant(frequencies))
        section = self._kept((sections, mixed, r), lambda: self._section(sections, mixed, r, given), given)
        at = self._turned(at) if sections else at[..., None]
        if str(at.dtype).rpartition(".")[2] not in rope_tables.dtypes["I"]:
            at = self._float32(at)
        cos, sin = self._rope_tables(self._constant(at), steps, section)
        if heads:
            return self._rope_packed(x, cos, sin, heads, interleaved)  # type: ignore[no-any-return]
        return self._rope(x, cos, sin, interleaved)  # type: ignore[no-any-return]

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

    def _check_sections(self, sections: tuple[int, ...], r: int, count: int) -> None:
        """Raise ValueError for sections that are not those of r angles, or of so many positions."""
        problem = ""
        if sum(sections) != r:
            problem = f"option `sections` is {sections}, expected a sum of r={r}."
        elif count != len(sections):
            problem = f"argument `positions` has {count} positions of a token, expected {len(sections)}, one a section."
        if problem:
            raise ValueError(f"cute.rope_from_positions: {problem}")


def _any(array: Any) -> Any:
    """An array of whose framework nothing is known here."""
    return array
