"""HOW: a class with its tile in the constructor and ``__call__(a, b, out, stream)``, as NVIDIA's examples have it."""

import cutlass
import cutlass.cute as cute

from cute_ops.kernels.lib.matrix import folded


class TiledAdd:
    def __init__(self, threads=(4, 32), values=(4, 4)):
        self.threads, self.values = threads, values

    @cute.jit
    def __call__(self, a, b, out, stream):
        a, b, out = [folded(t) for t in (a, b, out)]
        threads = cute.make_ordered_layout(self.threads, order=(1, 0))
        values = cute.make_ordered_layout(self.values, order=(1, 0))
        tiler, tv_layout = cute.make_layout_tv(threads, values)
        gA, gB, gOut = [cute.zipped_divide(t, tiler) for t in (a, b, out)]  # ((tile_m, tile_n), (rest_m, rest_n))
        places = cute.zipped_divide(cute.make_identity_tensor(out.shape), tiler)
        self.kernel(gA, gB, gOut, places, out.shape, tiler, tv_layout).launch(
            grid=[cute.size(gOut, mode=[1]), 1, 1], block=[cute.size(tv_layout, mode=[0]), 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, gA, gB, gOut, places, shape, tiler: cutlass.Constexpr, tv_layout: cutlass.Constexpr):
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        tile = ((None, None), cutlass.Int64(block))
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), gOut.element_type)
        copy = cute.make_tiled_copy(atom, tv_layout, tiler).get_slice(thread)
        tA, tB, tOut, mine = [copy.partition_S(t[tile]) for t in (gA, gB, gOut, places)]
        inside = cute.make_rmem_tensor(mine.shape, cutlass.Boolean)
        for i in cutlass.range_constexpr(cute.size(inside)):
            inside[i] = cute.elem_less(mine[i], shape)
        rA, rB, rOut = [cute.make_fragment_like(t) for t in (tA, tB, tOut)]
        cute.copy(atom, tA, rA, pred=inside)
        cute.copy(atom, tB, rB, pred=inside)
        rOut.store((rA.load().to(cutlass.Float32) + rB.load().to(cutlass.Float32)).to(gOut.element_type))
        cute.copy(atom, rOut, tOut, pred=inside)


def tiled_add(variant):
    return TiledAdd(values=(4, 16 // variant.tensors["out"].itemsize))
