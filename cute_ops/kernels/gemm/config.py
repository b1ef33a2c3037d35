"""What the kernels of matrix products are configured with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cute_ops.config import KernelConfig

Form = Literal["cooperative", "pingpong", "mma_sync"]
WARPGROUP = 128  # threads
MMA_M, MMA_K = 64, 16  # rows of a warpgroup's instruction; 16-bit elements of k that it takes
STORE_BYTES = 64  # of a row of the subtile that is stored at once


@dataclass(frozen=True)
class GemmConfig(KernelConfig):
    """How a product's tiles are computed. A CTA has a warpgroup that loads and two that multiply.

    Both multiply one tile, half of its rows each (``cooperative``), or each its own, one storing while the other
    multiplies (``pingpong``). Where TMA cannot load, or on other GPUs than Hopper, eight warps load and multiply
    (``mma_sync``).

    Attributes:
        tile_m: rows of a tile.
        tile_n: columns of a tile.
        stages: slots of the ring of loaded tiles of both operands.
        clusters: persistent clusters altogether.
        cluster_m: CTAs of a cluster below one another, which share a tile of ``b``.
        cluster_n: CTAs of a cluster beside one another, which share a tile of ``a``.
        tile_k: elements of k in a slot.
        store_stages: subtiles in shared memory on their way out, of each group of warps that stores.
        group: clusters' tiles that are walked together, so that their operands stay in L2.
        vec_a: elements that a thread of ``mma_sync`` loads of ``a`` at once.
        vec_b: of ``b``.
    """

    form: Form
    tile_m: int
    tile_n: int
    stages: int
    clusters: int
    cluster_m: int = 1
    cluster_n: int = 1
    tile_k: int = 64
    store_stages: int = 4
    group: int = 8
    vec_a: int = 0
    vec_b: int = 0

    @property
    def threads(self) -> int:
        return 3 * WARPGROUP

    @property
    def sharing(self) -> int:
        """Warpgroups that multiply one tile."""
        return 2 if self.form == "cooperative" else 1

    @property
    def accumulators(self) -> int:
        """Registers of a thread that hold its part of a tile."""
        return self.tile_m * self.tile_n // (WARPGROUP * self.sharing)

    def subtile(self, itemsize: int) -> tuple[int, int]:
        """Rows and columns of the part of a tile that is stored at once, for outputs of this size."""
        return MMA_M * self.sharing, STORE_BYTES // itemsize

    def load_bytes(self, itemsize: int) -> int:
        """Shared memory of the ring."""
        return self.stages * (self.tile_m + self.tile_n) * self.tile_k * itemsize

    def store_bytes(self) -> int:
        """Shared memory of subtiles on their way out."""
        return 2 * self.store_stages * MMA_M * STORE_BYTES

    def shared(self, itemsize: int) -> int:
        """Bytes of shared memory: ring, subtiles, and a full and an empty barrier of 8 bytes for each slot."""
        return self.load_bytes(itemsize) + self.store_bytes() + 16 * self.stages
