"""Shared memory of a kernel as one struct. Configs ask for its bytes, kernels for its buffers: integers only."""

from typing import NamedTuple

SWIZZLE_ALIGN = 1024  # bytes: the period of the 128-byte swizzle of TMA and WGMMA
MBARRIER_BYTES = 8


class Buffer(NamedTuple):
    """A field of the struct."""

    name: str
    bytes: int
    align: int = SWIZZLE_ALIGN


def mbarriers(name: str, stages: int) -> Buffer:
    """A full and an empty mbarrier of each of a pipeline's stages."""
    return Buffer(name, 2 * MBARRIER_BYTES * stages, MBARRIER_BYTES)


class SharedStruct(NamedTuple):
    """Buffers one after another, each at its alignment."""

    buffers: tuple[Buffer, ...]

    @property
    def bytes(self) -> int:
        """Of all of them, if the first one begins at its alignment."""
        end = 0
        for _, size, align in self.buffers:
            end = -(-end // align) * align + size if size else end
        return end
