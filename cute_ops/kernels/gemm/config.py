"""The config of the kernels of matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Literal

from cute_ops.declaration.config import KernelConfig
from cute_ops.kernels.tensor_core.shared_struct import MBARRIER_BYTES, Buffer, SharedStruct, mbarriers
from cute_ops.kernels.tensor_core.sizes import MMA_M, WARPGROUP, RegisterBudget

Form = Literal["cooperative", "pingpong", "mma_sync", "in_place"]
WARPS = 8  # of ``mma_sync`` and ``in_place``
ROW_PARTIALS = "row_partials"  # the workspace of reductions of rows
K_PARTS = "k_parts"  # the workspace of sums of parts of the terms, (parts, m, columns of b)
EXCHANGE = "exchange"  # mbarriers of the exchange of partial sums of a cluster that shares k
REGISTERS = RegisterBudget(load=40, multiply=232)
OPERAND_BYTES = (2, 2)  # of an element of each operand, if these have 16 bits
LEAST_STORED = 16  # columns that warps store at once, by matrices of 16 x 16
STORE_BYTES = 64  # of a row of the subtile that is stored at once, unless a tile's rows are no multiple of it


class Barrier(IntEnum):
    """Named barriers of a product's CTA; with ping-pong a warpgroup has the next number, too."""

    CTA = 0
    ORDER = 1  # whose turn it is to multiply
    STORED = 3  # a subtile is in shared memory


class GemmConfig(KernelConfig):
    """How a product's tiles are computed. A CTA has a warpgroup that loads and two that multiply.

    Both multiply one tile, half of its rows each (``cooperative``), or each its own, one storing while the other
    multiplies (``pingpong``). Where TMA cannot load, or on other GPUs than Hopper, eight warps load and multiply
    (``mma_sync``); of few rows each loads rows of b that begin alike, by vectors (``in_place``).

    Attributes:
        tile_m: rows of a tile.
        tile_n: columns of a tile.
        stages: of the pipeline of both operands' tiles.
        clusters: persistent clusters altogether.
        cluster_m: CTAs of a cluster along m, which share a tile of ``b``.
        cluster_n: CTAs of a cluster along n, which share a tile of ``a``.
        edge_m: rows of ``a`` that are loaded of a tile that has no more of them (0: always ``tile_m``). Rows past the
            end would take TMA longer than others.
        cluster_k: CTAs of a cluster that share one tile, a range of k each. They exchange partial sums through shared
            memory, and each stores a part of the columns. Such a cluster has one tile, and no other CTAs.
        tile_k: elements of k in a stage.
        store_stages: subtiles of each output on their way out, of each group of warps that stores.
        group: clusters' tiles that are walked together, so that their operands stay in L2.
        vec_a: elements that a thread of ``mma_sync`` loads of ``a`` at once.
        vec_b: of ``b``.
        tile_stages: subtiles of the epilogue's operands on their way in, of each group of warps that stores.
        expression: the epilogue's text; its first operand is the product.
        reads: the tensors that are its other operands, separated by blanks; ``cos%64`` repeats itself after 64 columns.
        writes: the tensors, or halves, that its outputs are stored in: ``pre[:n] pre[n:] out``. If it is empty, the
            call's last tensor.
        half_align: bytes, at most 16, that divide the offset of the up projection in a row ``[gate | up]``.
        warps_n: warps of ``mma_sync`` along n.
        store_bytes: of a row of the subtile that is stored at once, of the tensor with the smallest elements.
        transposed: whether the transpose of the output is computed, ``out.T = b @ a.T``: rows of tiles are then columns
            of the output, columns of tiles its rows, of which there may be any multiple of 16. Only for epilogues by
            element, of matrices whose outputs TMA can store.
        parts: ranges of k whose sums are stored apart, in float32; a second kernel adds them up in order and computes
            the epilogue.
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
    tile_stages: int = 0
    expression: str = "e1(t) -> 0"
    reads: str = ""
    writes: str = ""
    half_align: int = 16
    warps_n: int = 4
    cluster_k: int = 1
    edge_m: int = 0
    store_bytes: int = STORE_BYTES
    transposed: bool = False
    parts: int = 1

    @property
    def threads(self) -> int:
        return 3 * WARPGROUP

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the output that a tile has."""
        return (self.tile_n, self.tile_m) if self.transposed else (self.tile_m, self.tile_n)

    @property
    def cluster(self) -> tuple[int, int]:
        """CTAs of a cluster along the output's rows and columns."""
        return (self.cluster_n, self.cluster_m) if self.transposed else (self.cluster_m, self.cluster_n)

    @property
    def sharing(self) -> int:
        """Warpgroups that multiply one tile."""
        return 2 if self.form == "cooperative" else 1

    @property
    def accumulators(self) -> int:
        """Registers of a thread that hold its elements of a tile."""
        return self.tile_m * self.tile_n // (WARPGROUP * self.sharing)

    @property
    def stored_n(self) -> int:
        """Columns of a tile that a CTA stores."""
        return self.tile_n // self.cluster_k

    @property
    def ctas(self) -> int:
        """Of a cluster."""
        return self.cluster_m * self.cluster_n * self.cluster_k

    @property
    def groups(self) -> int:
        """Groups of warps that store, each its own tiles."""
        return 2 // self.sharing

    def row_partials(self, n: int, gate_up: bool) -> int:
        """Partial results of each reduction of a row of n columns: one for each warp along the row, including those of
        tiles past the last column that fill a cluster.
        """
        tiles = -(-n // (self.tile_n // (1 + gate_up) * self.cluster_n)) * self.cluster_n * self.cluster_k
        return tiles * (self.warps_n if self.form == "mma_sync" else 1)

    def subtile(self, *itemsizes: int) -> tuple[int, int]:
        """Rows and columns of a tile that are stored at once, for outputs and operands of these sizes."""
        return MMA_M * self.sharing, self.store_bytes // min(itemsizes)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage of 16-bit operands, with its mbarriers."""
        a, b = OPERAND_BYTES
        return (self.tile_m * a + self.tile_n * b) * self.tile_k + 2 * MBARRIER_BYTES

    def buffers(
        self, outputs: Sequence[int], tiles: Sequence[int] = (), operands: Sequence[int] = OPERAND_BYTES
    ) -> tuple[Buffer, ...]:
        """Shared memory of a product: stages of both operands, subtiles on their way in and out, and mbarriers.

        Args:
            outputs: bytes of an element of each output.
            tiles: of each operand of the epilogue that TMA loads.
            operands: of both operands.
        """
        rows, columns = self.subtile(*outputs, *tiles)
        a, b = (size * self.tile_k * self.stages for size in (self.tile_m, self.tile_n))
        incoming, outgoing = (self.groups * count * rows * columns for count in (self.tile_stages, self.store_stages))
        return (
            Buffer("a", a * operands[0]),
            Buffer("b", b * operands[1]),
            *(Buffer(f"tile{i}", incoming * size) for i, size in enumerate(tiles)),
            *(Buffer(f"output{i}", outgoing * size) for i, size in enumerate(outputs)),
            mbarriers("mainloop", self.stages),
            mbarriers("tiles", self.groups * self.tile_stages if tiles else 0),
            mbarriers(EXCHANGE, 1 if self.cluster_k > 1 else 0),
        )

    @property
    def fits_sums(self) -> bool:
        """Whether the partial sums of a tile fit where its operands were."""
        return self.stages * (self.stage_bytes - 2 * MBARRIER_BYTES) >= 4 * self.tile_m * self.tile_n

    def shared(self, outputs: Sequence[int], tiles: Sequence[int] = ()) -> int:
        """Bytes of shared memory, see :meth:`buffers`."""
        return SharedStruct(self.buffers(outputs, tiles)).bytes
