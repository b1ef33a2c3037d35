"""Choose between our kernel of a product, and the framework's product followed by a pass over its output."""

from __future__ import annotations

from collections.abc import Callable

from cute_ops.config import Problem
from cute_ops.hardware import sm
from cute_ops.kernels.gemm.config import GemmConfig
from cute_ops.op import Instead, Program
from cute_ops.ops.gemm.config import FEW_ROWS, GemmSize, busy
from cute_ops.ops.rows import VECTOR_BYTES

# A product without an epilogue runs by our kernel if the model of cycles keeps the Tensor Cores busy for at least this
# part of the time. With 0.51 and 0.61 (BERT's gradients) our kernel reached 84% and 88% of cuBLAS's speed, from 0.71 on
# 100% and more. cuBLAS needs rows that are multiples of 16 bytes: for others ours was five times as fast
# even with 0.40.
LEAST_BUSY = 0.65
WIDE = {"T": ("float32",)}  # operands that no kernel takes: the framework always multiplies them


def instead(
    program: Program, config: Callable[[Problem], GemmConfig], sizes: tuple[str, str, str] | None = None
) -> Instead:
    """What may run in place of a product's kernel, and where it does: on GPUs other than Hopper, where TMA cannot load
    the operands, for few rows, and where a product without an epilogue leaves the Tensor Cores idle for too long.
    Elsewhere our kernel was measured to be at least as fast.

    Args:
        program: the framework's product, and a pass over its output.
        config: the kernel's heuristic.
        sizes: for a product without an epilogue, the dims of its rows, its columns and its terms.
    """

    def when(problem: Problem) -> bool:
        chosen = config(problem)
        if not leads(problem, chosen.form):
            return True
        if sizes is None:
            return False
        size = GemmSize.of(problem, sizes)
        return size.n % (VECTOR_BYTES // 2) == 0 and busy(chosen, size, 2, problem.sm_count) < LEAST_BUSY

    return Instead(program, when, WIDE)


def leads(problem: Problem, form: str) -> bool:
    """Whether a kernel of this form with an epilogue is at least as fast as the framework's product and a pass."""
    # TMA takes both operands, and the epilogue's registers suffice.
    return sm(problem.arch) == 90 and problem.size("m") > FEW_ROWS and form != "mma_sync"
