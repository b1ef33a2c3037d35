"""Choose between our kernel of a product, and the framework's product followed by a pass over its output."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from cute_ops.config import Problem
from cute_ops.hardware import sm
from cute_ops.kernels.gemm.config import GemmConfig
from cute_ops.op import Instead, Program
from cute_ops.ops.gemm.config import FEW_ROWS, GemmSize, busy
from cute_ops.ops.rows import VECTOR_BYTES
from cute_ops.shapes import ITEMSIZE, Array

# A product without an epilogue runs by our kernel if the model of cycles keeps the Tensor Cores busy for at least this
# part of the time. With 0.51 and 0.61 (BERT's gradients) our kernel reached 84% and 88% of cuBLAS's speed, from 0.71 on
# 100% and more. cuBLAS needs rows that are multiples of 16 bytes: for others ours was five times as fast
# even with 0.40.
LEAST_BUSY = 0.65
# With an epilogue few rows are faster by our kernel up to these rows and columns, if the weight has so many elements:
# it took 0.87 to 1.00 of the framework's product and a pass; with 64 rows, or a weight of 2048 x 2048, up to 1.4.
MOST_FEW_ROWS, MOST_COLUMNS, LEAST_WEIGHT = 32, 8192, 6 << 20
WIDE = {"T": ("float32",)}  # operands that no kernel takes: the framework always multiplies them
# Of a product with n or k off a vector (8 elements of 16 bits) cuBLAS computes so many FLOP and reads so many bytes of
# its operands a second at most, whatever the strides are: 64 x 18944 x 11127 with strides of 11128 took 549 us, our
# kernel 148 (H200). Ours and a copy reach the others; a launch takes so many seconds.
ODD_FLOPS, ODD_BYTES = 2.0e14, 0.9e12
OUR_FLOPS, OUR_BYTES, LAUNCH = 4.5e14, 3.5e12, 3e-6


def instead(
    program: Program, config: Callable[[Problem], GemmConfig], sizes: tuple[str, str, str] | None = None,
    few_rows: bool = False, anywhere: tuple[str, ...] = ("x", "weight"),
) -> Instead:  # fmt: skip
    """What may run in place of a product's kernel, and where it does: on GPUs other than Hopper, where TMA cannot load
    the operands, for most products of few rows, and where a product without an epilogue leaves the Tensor Cores idle
    for too long. Elsewhere our kernel was measured to be at least as fast.

    ``sizes`` are, for a product without an epilogue, the dims of its rows, columns and terms; ``few_rows`` says whether
    few rows were measured: of one output, by elements; ``anywhere`` are the two that are multiplied.
    """

    def when(problem: Problem) -> str:
        chosen = config(problem)
        if reason := lags(problem, chosen.form, few_rows):
            return reason
        if sizes is None:
            return ""
        size = GemmSize.of(problem, sizes)
        used = busy(chosen, size, problem.sm_count)
        if _is_odd(problem) or used >= LEAST_BUSY:
            return ""
        return f"its tiles keep the Tensor Cores busy for {used:.0%} of the time, less than {LEAST_BUSY:.0%}"

    return Instead(program, when, WIDE, anywhere)


def lags(problem: Problem, form: str, few_rows: bool = False) -> str:
    """Why a kernel of this form with an epilogue may be slower than the framework's product and a pass; empty where it
    was measured to be at least as fast.
    """
    if sm(problem.arch) != 90:
        return f"it was not measured on {problem.arch}"
    if form == "mma_sync":
        return "TMA cannot load its operands, or registers do not hold its epilogue"
    if problem.size("m") <= FEW_ROWS and not _is_odd(problem) and not (few_rows and _gains_by_few_rows(problem)):
        return f"it has at most {FEW_ROWS} rows"
    return ""


def _gains_by_few_rows(problem: Problem) -> bool:
    n, k = problem.size("n"), problem.size("k")
    return problem.size("m") <= MOST_FEW_ROWS and n <= MOST_COLUMNS and n * k >= LEAST_WEIGHT


def _is_odd(problem: Problem) -> bool:
    """Whether the rows of an operand, or of the output, would not be whole vectors if they lay close together: cuBLAS
    is several times slower then, also where they do not.
    """
    return any(problem.size(name) * 2 % VECTOR_BYTES for name in ("n", "k"))


def realigned(operands: Sequence[tuple[Array, Sequence[int], int]], flops: int) -> list[tuple[int, ...] | None]:
    """The strides of copies of a product's operands that TMA can load, None for one that it can load as it lies; None
    for both where copying costs more than our kernel gains on cuBLAS.

    Args:
        operands: each with its strides and its address.
        flops: of the product.
    """
    found = [None if _loadable(*operand) else _whole_vectors(*operand[:2]) for operand in operands]
    sizes = [math.prod(array.shape) * ITEMSIZE[array.dtype] for array, _, _ in operands]
    moved = sum(2 * size for size, strides in zip(sizes, found, strict=True) if strides)
    ours = (
        max(flops / OUR_FLOPS, sum(sizes) / OUR_BYTES)
        + moved / OUR_BYTES
        + LAUNCH * (1 + len(found) - found.count(None))
    )
    theirs = max(flops / ODD_FLOPS, sum(sizes) / ODD_BYTES) + LAUNCH
    return found if ours < theirs else [None] * len(found)


def _loadable(array: Array, strides: Sequence[int], address: int) -> bool:
    """Whether TMA can load a matrix with one contiguous dim."""
    stepped = [stride for stride, size in zip(strides, array.shape, strict=True) if stride != 1 and size > 1]
    return all(number % VECTOR_BYTES == 0 for number in (address, *(s * ITEMSIZE[array.dtype] for s in stepped)))


def _whole_vectors(array: Array, strides: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of a copy whose rows begin at whole vectors, with the contiguous dim that there is; else None."""
    vector, shape = VECTOR_BYTES // ITEMSIZE[array.dtype], array.shape
    last = strides[-1] == 1
    if not last and (len(shape) != 2 or strides[0] != 1):
        return None
    inner = shape[-1] if last else shape[0]
    padded = -(-inner // vector) * vector
    if not last:
        return (1, padded)
    return (*(padded * math.prod(shape[i + 1 : -1]) for i in range(len(shape) - 1)), 1)
