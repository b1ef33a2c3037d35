"""HOW: the row sum after the four edits: any rank, any float, rows beyond 2^31 elements, the caller's stream."""

import cutlass
import cutlass.cute as cute

from cute_ops.kernels.lib.matrix import folded


@cute.kernel
def _reduce_sum_kernel(gA: cute.Tensor, output: cute.Tensor):
    smem_alloc = cutlass.utils.SmemAllocator()
    shmem = smem_alloc.allocate_tensor(cute.Float32, cute.make_layout((32,)))  # warp size

    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    bdimx, _, _ = cute.arch.block_dim()
    lane = cute.arch.lane_idx()
    warp = cute.arch.warp_idx()

    M, N = gA.shape
    ntiles = cute.ceil_div(N, bdimx)
    acc = cutlass.Float32(0)
    row = cutlass.Int64(bidx)
    for tile_idx in range(ntiles):
        idx = tile_idx * bdimx + tidx
        if idx < N:
            acc += gA[row, idx].to(cutlass.Float32)

    acc = cute.arch.warp_reduction_sum(acc)
    if lane == 0:
        shmem[warp] = acc
    cute.arch.sync_threads()

    if warp == 0:
        block_warps = bdimx // 32
        acc2 = shmem[lane] if lane < block_warps else 0.0
        acc2 = cute.arch.warp_reduction_sum(acc2)
        if lane == 0:
            output[row] = acc2.to(output.element_type)


@cute.jit
def reduce_sum(x: cute.Tensor, output: cute.Tensor, stream):
    num_warps = 4
    threads_per_block = num_warps * 32
    x, output = folded(x), folded(output, own=0)
    M, N = x.shape

    _reduce_sum_kernel(x, output).launch(
        grid=(M, 1, 1),
        block=(threads_per_block, 1, 1),
        stream=stream,
    )


def any_row_sum(variant):
    return reduce_sum
