"""The mesh while JAX traces: which axes are manual, and over which axes a value varies.

In a ``shard_map`` with replication checks (``check_vma``) the type of a value names the mesh axes that it varies over.
A value that varies over fewer axes is the same on the devices along the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AxisType

from cute_ops_jax import _compat

Axes: TypeAlias = tuple[str, ...]


def manual() -> set[str]:
    """The axes of the ``shard_map`` programs that are being traced."""
    mesh = jax.sharding.get_abstract_mesh()
    return {a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual}


def as_axes(axes: str | Axes | None) -> Axes:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def alike(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, each made to vary over all axes that any of them varies over.

    The derivative of this is a sum over devices, which gives replicated weights their whole gradient.
    """
    if not manual():
        return list(arrays)
    axes = [_compat.varying_axes(getattr(a, "aval", None)) for a in arrays]
    union = frozenset[str]().union(*axes)
    return [_compat.vary(a, union - own) if union - own else a for a, own in zip(arrays, axes, strict=True)]


def varies(array: Any, axes: str | Axes | None) -> bool:
    """Whether a value varies over one of these axes."""
    return not _compat.varying_axes(getattr(array, "aval", None)).isdisjoint(as_axes(axes))


def varying_like(array: Any, other: Any, but: str | Axes | None = None) -> Any:
    """The array, made to vary over the axes that ``other`` varies over, except for those in ``but``."""
    own, wanted = (_compat.varying_axes(getattr(a, "aval", None)) for a in (array, other))
    wanted -= set(as_axes(but))
    return _compat.vary(array, wanted - own) if wanted - own else array
