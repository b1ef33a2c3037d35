"""HOW: a wrapper of a kernel and a function that launches it, as kernel collections have it."""

import cutlass
import cutlass.cute as cute
from planned_relu_tiling import Tiling

from cute_ops.kernels.lib.matrix import folded


@cute.kernel
def relu_kernel(gX: cute.Tensor, gOut: cute.Tensor, threads: cutlass.Constexpr):
    i = cutlass.Int64(cute.arch.block_idx()[0]) * threads + cute.arch.thread_idx()[0]
    columns = cute.size(gOut, mode=[1, 1])
    if i < cute.size(gOut, mode=[1]):
        place = (None, (i // columns, i % columns))
        x = gX[place].load().to(cutlass.Float32)
        gOut[place].store(cute.where(x > 0, x, cute.full_like(x, 0)).to(gOut.element_type))


class ReluPlan:
    """The wrapper: ``launch_fn`` is the collection's, ``tiling`` what was planned or tuned."""

    def __init__(self, tiling):
        self.tiling = tiling

    @cute.jit
    def launch_fn(self, x, out, stream):
        gX, gOut = [cute.zipped_divide(folded(t), (1, self.tiling.vec)) for t in (x, out)]
        blocks = cute.ceil_div(cute.size(gOut, mode=[1]), self.tiling.threads)
        relu_kernel(gX, gOut, self.tiling.threads).launch(
            grid=[blocks, 1, 1], block=[self.tiling.threads, 1, 1], stream=stream
        )


def planned_relu(variant):
    return ReluPlan(Tiling(**variant.config)).launch_fn
