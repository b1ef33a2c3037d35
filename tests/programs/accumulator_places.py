"""Compares the places of accumulators that attention's kernels compute with those that ``partition_C`` gives."""

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16

from cute_ops.kernels.attention import tiles, warps
from cute_ops.kernels.attention.products import mma_of_scores
from cute_ops.kernels.tensor_core.accumulators import by_rows


def compare(mma: Any, shape: tuple[int, int], threads: int, place_of: Callable[..., tiles.Place]) -> None:
    every = cute.make_identity_tensor(shape)
    for thread in range(threads):
        own, place = by_rows(mma.get_slice(thread).partition_C(every)), place_of(thread, None, (0, 0, shape[1]), None)
        assert own.layout.shape[0] == (len(place.rows), 1) and cute.size(own, mode=[1]) == len(place.columns)
        for r, row in enumerate(place.rows):
            for c, column in enumerate(place.columns):
                assert (*own[r, c],) == (row, place.start + column), (thread, r, c)


@cute.jit
def trace() -> None:
    compare(mma_of_scores(BFloat16, 72), (128, 72), 256, tiles.place_of)
    compare(warps.mma_of_warp(BFloat16), (16, 64), 32, warps.place_of_warp)


cute.compile(trace)
print("equal")
