"""Which work a CTA, or a warpgroup of it, takes: persistent kernels go from work tile to work tile."""

from typing import Any, NamedTuple

import cutlass.cute as cute


class PersistentWork(NamedTuple):
    """Indices of work tiles: ``for index in cutlass.range(work.first, work.end, work.step, unroll=1)``.

    Attributes:
        first: the first of them.
        end: the number of all work tiles.
        step: how many participants take tiles in turn.
    """

    first: Any
    end: Any
    step: Any


def persistent(count, groups=1, group=0):
    """The work tiles of a cluster of a grid ``(cluster_m, cluster_n, clusters)``; of a warpgroup of its CTAs if
    ``groups`` of them take tiles of their own, in turns.
    """
    clusters, first = cute.arch.grid_dim()[2], cute.arch.block_idx()[2]
    if groups > 1:
        first = first + group * clusters
    return PersistentWork(first, count, groups * clusters)
