"""Whether a product runs by our kernel, or by the framework's product and a pass over its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cute_ops.config import Problem
from cute_ops.hardware import sm
from cute_ops.kernels.gemm.config import GemmConfig
from cute_ops.op import Instead, Program

# With fewer rows an H200's Tensor Cores wait for the weight, and cuBLAS, which divides the sums, is ahead.
MOST_FEW_ROWS = 64
WIDE = {"T": ("float32",)}  # which no kernel takes


def fuses(rows: int, by_tma: bool, arch: str) -> bool:
    """Whether our kernel was measured to be at least as fast, of bfloat16 and float16: on Hopper, with TMA, for more
    than a few rows.

    Args:
        rows: of x.
        by_tma: whether TMA takes both operands, and the epilogue leaves registers enough.
        arch: the GPU's.
    """
    return sm(arch) == 90 and by_tma and rows > MOST_FEW_ROWS


def instead(program: Program, config: Callable[[Problem], GemmConfig]) -> Instead:
    """What may run in place of a product's kernel, whose heuristic is ``config``."""

    def when(problem: Any) -> bool:
        rows = problem.size("m")
        # Finding a config takes a while.
        return not fuses(rows, True, problem.arch) or not fuses(rows, config(problem).form != "mma_sync", problem.arch)

    return Instead(program, when, WIDE)
