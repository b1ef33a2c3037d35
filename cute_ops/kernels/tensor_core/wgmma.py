"""Matrix instructions of a warpgroup (WGMMA): tiled MMAs, their accumulators, and the product of a stage."""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers as hopper

from cute_ops.kernels.tensor_core.sizes import MMA_M


def tiled_mma(dtypes, majors, tile_n, warpgroups=1, a_source=warpgroup.OperandSource.SMEM):
    """An MMA of 64 rows of each warpgroup and ``tile_n`` columns, accumulated in float32.

    Args:
        dtypes: of A and of B; both of 16 bits and equal, or any of 8 bits.
        majors: which dim of A and of B is contiguous.
        tile_n: columns, a multiple of 8, at most 256.
        warpgroups: those that have rows of the tile each.
        a_source: whether A comes from shared memory or from registers, as accumulators of another MMA do.
    """
    atoms = (warpgroups, 1, 1)
    return hopper.make_trivial_tiled_mma(*dtypes, *majors, Float32, atoms, (MMA_M, tile_n), a_source)


def major_of(is_last_contiguous):
    """The major mode of an operand ``(rows, k)``."""
    return OperandMajorMode.K if is_last_contiguous else OperandMajorMode.MN


def multiply(mma, operands, acc, stages=(None, None), zero_init=False):
    """Issue ``acc += A B^T``, or ``acc = A B^T``, and commit it as one group.

    Args:
        operands: A ``(mma, m, k)``, descriptors of shared memory or registers, and B ``(mma, n, k)``, descriptors; with
            one more mode if they have stages.
        acc: the accumulators, ``(mma, m, n)``.
        stages: the stage of each.
        zero_init: whether accumulators are overwritten.
    """
    steps = cute.size(operands[0], mode=[2])
    warpgroup.fence()
    for k in range(steps):
        if zero_init and k < 2:
            mma.set(warpgroup.Field.ACCUMULATE, k == 1)
        # One index for both modes: descriptors are added up in 64 bits.
        a, b = (x[None, None, k] if s is None else x[None, None, k, s] for x, s in zip(operands, stages))
        cute.gemm(mma, acc, a, b, acc)
    if zero_init and steps == 1:
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def accumulators(mma, shape, zero=False):
    """A thread's accumulators of a tile ``(m, n)``; ``zero`` for those that no product with ``zero_init`` overwrites
    first.
    """
    acc = cute.make_rmem_tensor(mma.partition_shape_C(shape), Float32)
    if zero:
        acc.fill(0.0)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    return acc
