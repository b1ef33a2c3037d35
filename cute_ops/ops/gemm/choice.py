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
# With an epilogue few rows are faster by our kernel up to these rows and columns, if the weight has so many elements:
# it took 0.87 to 1.00 of the framework's product and a pass; with 64 rows, or a weight of 2048 x 2048, up to 1.4.
MOST_FEW_ROWS, MOST_COLUMNS, LEAST_WEIGHT = 32, 8192, 6 << 20
WIDE = {"T": ("float32",)}  # operands that no kernel takes: the framework always multiplies them


def instead(
    program: Program, config: Callable[[Problem], GemmConfig], sizes: tuple[str, str, str] | None = None,
    few_rows: bool = False,
) -> Instead:  # fmt: skip
    """What may run in place of a product's kernel, and where it does: on GPUs other than Hopper, where TMA cannot load
    the operands, for most products of few rows, and where a product without an epilogue leaves the Tensor Cores idle
    for too long. Elsewhere our kernel was measured to be at least as fast.

    ``sizes`` are, for a product without an epilogue, the dims of its rows, columns and terms; ``few_rows`` says whether
    few rows were measured: of one output, by elements.
    """

    def when(problem: Problem) -> str:
        chosen = config(problem)
        if reason := lags(problem, chosen.form, few_rows):
            return reason
        if sizes is None:
            return ""
        size = GemmSize.of(problem, sizes)
        used = busy(chosen, size, problem.sm_count)
        if size.n % (VECTOR_BYTES // 2) or used >= LEAST_BUSY:
            return ""
        return f"its tiles keep the Tensor Cores busy for {used:.0%} of the time, less than {LEAST_BUSY:.0%}"

    return Instead(program, when, WIDE)


def lags(problem: Problem, form: str, few_rows: bool = False) -> str:
    """Why a kernel of this form with an epilogue may be slower than the framework's product and a pass; empty where it
    was measured to be at least as fast.
    """
    if sm(problem.arch) != 90:
        return f"it was not measured on {problem.arch}"
    if problem.size("m") <= FEW_ROWS and not (few_rows and _gains_by_few_rows(problem)):
        return f"it has at most {FEW_ROWS} rows"
    if form == "mma_sync":
        return "TMA cannot load its operands, or registers do not hold its epilogue"
    return ""


def _gains_by_few_rows(problem: Problem) -> bool:
    n, k = problem.size("n"), problem.size("k")
    return problem.size("m") <= MOST_FEW_ROWS and n <= MOST_COLUMNS and n * k >= LEAST_WEIGHT
