"""Named barriers, of which a CTA has 16. A kernel gives each a number in an enum of its own; 0 is ``__syncthreads``."""

import cutlass.cute as cute

from cute_ops.kernels.tensor_core.sizes import WARPGROUP


class OrderBarrier:
    """Lets two warpgroups multiply in turns (ping-pong), one while the other computes its epilogue.

    Args:
        first: the barrier of warpgroup 0; that of warpgroup 1 is the next number.
    """

    threads = 2 * WARPGROUP

    def __init__(self, first):
        self.first = first

    def wait(self, group):
        """Wait for the turn of this warpgroup."""
        cute.arch.barrier(barrier_id=self.first + group, number_of_threads=self.threads)

    def pass_on(self, group):
        """End the turn of this warpgroup: the other one's begins."""
        cute.arch.barrier_arrive(barrier_id=self.first + 1 - group, number_of_threads=self.threads)
