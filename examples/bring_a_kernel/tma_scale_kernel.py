"""HOW: tiles that TMA loads and stores. ``__call__`` makes the descriptors and passes them to the kernel."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from cute_ops.kernels.lib.matrix import folded


class TmaScale:
    """``out = alpha * x``. A CTA holds a tile in shared memory."""

    tile, threads = (32, 64), 128

    def __init__(self, variant):
        self.alpha = variant.attrs["alpha"]

    @cute.jit
    def __call__(self, x, out, stream):
        x, out = folded(x), folded(out)
        self.dtype, layout = out.element_type, cute.make_ordered_layout(self.tile, order=(1, 0))
        load, mX = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, self.tile)
        store, mOut = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), out, layout, self.tile)
        grid = [*(cute.ceil_div(out.shape[i], self.tile[i]) for i in (0, 1)), 1]
        self.kernel(load, mX, store, mOut, layout).launch(grid=grid, block=[self.threads, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, load, mX, store, mOut, layout):
        thread, (row, column, _) = cute.arch.thread_idx()[0], cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        smem = cutlass.utils.SmemAllocator()
        sX = smem.allocate_tensor(self.dtype, layout, byte_alignment=128)
        loaded = smem.allocate_array(cutlass.Int64, 1)
        if thread == 0:
            cute.arch.mbarrier_init(loaded, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(loaded, cute.size_in_bytes(self.dtype, layout))
            source, target = self.partition(load, mX, sX, row, column)
            cute.copy(load, source, target, tma_bar_ptr=loaded)
        cute.arch.mbarrier_wait(loaded, 0)
        for i in cutlass.range_constexpr(cute.size(layout) // self.threads):
            place = (i * self.threads + thread) // self.tile[1], thread % self.tile[1]
            sX[place] = (sX[place].to(cutlass.Float32) * self.alpha).to(self.dtype)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        if warp == 0:
            target, source = self.partition(store, mOut, sX, row, column)
            cute.copy(store, source, target)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def partition(self, tma, m, sX, row, column):
        """This CTA's tile in global and in shared memory, as TMA takes them."""
        tile = cute.group_modes(cute.local_tile(m, self.tile, (row, column)), 0, 2)
        shared, whole = cpasync.tma_partition(tma, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), tile)
        return whole, shared
