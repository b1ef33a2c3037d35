"""The products of attention: MMAs, TMA copies of their operands, and the instructions of a product."""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.warp import LdMatrix8x8x16bOp
from cutlass.utils import hopper_helpers as hopper

from cute_ops.kernels.tensor_core.sizes import MMA_M


def mma_of_scores(dtype, columns, warpgroups=2):
    """Of 64 rows a warpgroup and so many columns; both operands lie in shared memory, by rows."""
    by_rows = OperandMajorMode.K
    return hopper.make_trivial_tiled_mma(dtype, dtype, by_rows, by_rows, Float32, (warpgroups, 1, 1), (MMA_M, columns))


def mma_of_kept(dtype, columns, warpgroups=2):
    """What :func:`mma_of_scores` makes, with the first operand in registers."""
    by_rows, kept = OperandMajorMode.K, warpgroup.OperandSource.RMEM
    return hopper.make_trivial_tiled_mma(
        dtype, dtype, by_rows, by_rows, Float32, (warpgroups, 1, 1), (MMA_M, columns), kept
    )


def mma_of_weights(dtype, width, warpgroups=2):
    """Of 64 rows of weights in a warpgroup's registers and vectors of this width in shared memory, by columns."""
    return hopper.make_trivial_tiled_mma(
        dtype, dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32, (warpgroups, 1, 1), (MMA_M, width),
        warpgroup.OperandSource.RMEM,
    )  # fmt: skip


def tma_copies(tensors, layouts, tiles, stored):
    """For each tensor its TMA copy and its coordinates; the last ``stored`` tensors are stored, the others loaded."""
    load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    operations = [load] * (len(tensors) - stored) + [store] * stored
    return tuple(
        [
            cpasync.make_tiled_tma_atom(operation, m, cute.select(layout, mode=[0, 1]), tile)
            for operation, m, layout, tile in zip(operations, tensors, layouts, tiles)
        ]
    )


def multiply(mmas, tXrA, tXrB, rX, stages):
    """Issue a product of shared memory, which overwrites what was there."""
    warpgroup.fence()
    for k in range(cute.size(tXrA, mode=[2])):
        cute.gemm(mmas[k > 0], rX, tXrA[None, None, k, stages[0]], tXrB[None, None, k, stages[1]], rX)
    warpgroup.commit_group()


def keep_rows(mma, sX, tidx):
    """A thread's registers of the first operand of products, (mma, m, k), out of shared memory, (rows, k)."""
    rX = cute.make_rmem_tensor(mma.partition_shape_A(sX.shape), sX.element_type)
    reader = cute.make_tiled_copy_A(cute.make_copy_atom(LdMatrix8x8x16bOp(False, 4), sX.element_type), mma)
    reader = reader.get_slice(tidx)
    cute.copy(reader, reader.partition_S(sX), reader.retile(rX))
    return rX


def multiply_kept(mmas, rA, tXrB, rX, stage):
    """Issue a product of registers and shared memory, which overwrites what was there."""
    warpgroup.fence()
    for k in range(cute.size(rA, mode=[2])):
        cute.gemm(mmas[k > 0], rX, rA[None, None, k], tXrB[None, None, k, stage], rX)
    warpgroup.commit_group()


def multiply_weights(mma, rA, tXrB, rX, stage):
    """Issue a product of a thread's weights with a slot of shared memory, which is added to what was there."""
    warpgroup.fence()
    for k in range(cute.size(rA, mode=[2])):
        cute.gemm(mma, rX, rA[None, None, k], tXrB[None, None, k, stage], rX)
    warpgroup.commit_group()


def multiply_part(mma, rA, tXrB, rX, part, stage):
    """Issue one instruction of :func:`multiply_weights` as a group of its own."""
    warpgroup.fence()
    cute.gemm(mma, rX, rA[None, None, part], tXrB[None, None, part, stage], rX)
    warpgroup.commit_group()
