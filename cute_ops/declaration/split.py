"""Which dims several devices may share, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Split(NamedTuple):
    """How devices that each have a slice of one dim run an op together: each calls it on its slice, and the results are
    combined. In array-API style.

    Args:
        dim: the name of the dim.
        of_slice: ``of_slice(xp, inputs, attrs, start, size, whole) -> (inputs, attrs)``: the call for the slice
            ``[start, start + size)`` of ``whole``; inputs with that dim are slices already. ``start`` may be an array.
        merge: ``merge(xp, stacked, inputs, attrs, sizes, whole) -> outputs``: the outputs without that dim, by name.
            ``stacked`` has the slices' outputs, stacked along a new first dim, and ``sizes`` the slices' sizes. Outputs
            with that dim are slices. None if outputs without it are sums of the slices' ones, or if there are none.
        merged: for a program, which has neither function, since each device runs it on its slice, and the devices run
            the ops in it that split the dim together: the outputs without that dim that are computed from merged ones.
    """

    dim: str
    of_slice: Callable[..., tuple[Mapping[str, Any], Mapping[str, Any]]] | None = None
    merge: Callable[..., Mapping[str, Any]] | None = None
    merged: tuple[str, ...] = ()

    def adds_up(self, output: str) -> bool:
        """Whether the devices' values of an output without the dim are partial sums."""
        return self.merge is None and output not in self.merged


class Sharding(NamedTuple):
    """Which dims several devices may share, besides the leading ones.

    Args:
        parallel: dims shared like rows: from slices of its inputs the op computes the same slices of its outputs. All
            outputs have the dim, except gradients of inputs without it, which are partial sums. ``g`` may be the first
            name of a tied dim, ``g*r`` heads: each device has the same number of whole groups, of all tensors.
        split: how devices share a dim that is neither parallel nor contracted.
        contracted: dims that outputs are sums over, ``k`` of a product, or the name of leading dims: from slices of
            its inputs the op computes slices of the outputs that have the dim, and partial sums of the others.
        whole: dims along which no DTensor may be sharded, because gathering them would cost more than the op; each with
            what to do instead.
        inner: dims that are summed over within the op, ``k`` of a product with an epilogue. On slices of them devices
            run the program that replaces the kernel, and add up the results of each ``xp.product`` in it and of each
            op that has a contracted dim of this name.
    """

    parallel: tuple[str, ...] = ()
    split: Split | None = None
    contracted: tuple[str, ...] = ()
    whole: Mapping[str, str] = {}
    inner: tuple[str, ...] = ()
