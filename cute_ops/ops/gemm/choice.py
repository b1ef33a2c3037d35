"""Choose between our kernel of a product, and the framework's product followed by a pass over its output.

The model of cycles says how long our kernel takes. Of cuBLAS it is asked for the best of more tiles and of k cut into
parts, which is what that library has. Both were fitted to sampled products (benchmarks/fused_choice.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

from cute_ops.declaration.config import Problem
from cute_ops.declaration.program import Fallback, Program
from cute_ops.declaration.shapes import ITEMSIZE, Array
from cute_ops.hardware import VECTOR_BYTES, sm
from cute_ops.kernels.gemm.config import GemmConfig
from cute_ops.ops.gemm import in_parts, transposed
from cute_ops.ops.gemm.config import (
    L2_BYTES,
    LINE,
    STORED_BY_FEW,
    EpilogueCost,
    GemmSize,
    cycles,
    cycles_of_few_rows,
    stores_few,
)

WIDE = {"T": ("float32",)}  # operands that no kernel takes: the framework always multiplies them
# cuBLAS, as the model of cycles sees it: cooperative tiles of the product or its transpose, so that 150 rows take one
# of 160, not two of 128; clusters; parts of k, each of at least so many terms, and of tiles of so many waves at most;
# cycles to start the kernel that adds up the parts, and the part of L2's rate at which it reads them.
THEIR_TILES = (*((64, n) for n in range(64, 257, 64)), *((128, n) for n in range(64, 257, 16)))
THEIR_CLUSTERS, THEIR_SPLITS, LEAST_TERMS, WAVES_OF_PARTS = ((1, 2), (2, 1)), (1, 2, 3, 4, 8), 512, 2
ADD_CYCLES, ADD_RATE = 2500, 0.6
# Cycles of a microsecond, microseconds besides and FLOP of a microsecond at which power limits it, of our kernel and of
# cuBLAS; bytes of a microsecond of a pass, and microseconds besides. Ours is fitted to 196 drawn products, of which 90
# had the configs of today, and 30 of odd sizes (H200): the standard deviation is a tenth. cuBLAS' time is fitted to 159
# products, and to 91 of up to SMALL_M rows: each, left out of the fit, is off by 10 and 12% (root mean square).
OURS, THEIRS, PASS = (1540.0, 1.6, 7.8e8), (1640.0, 2.1, 7.7e8), (4e6, 1.5)
# Up to so many rows memory is what both wait for, while the clock is higher.
SMALL_M, OURS_OF_SMALL_M, THEIRS_OF_SMALL_M = 512, (1650.0, 2.0, 7.8e8), (1800.0, 2.1, 7.7e8)
# Of 147 drawn products of so few rows the choices, fitted to half of them in turns, are 1.6% behind the better way in
# the mean. Of 19 others cuBLAS' time has no bias.
FEW_M, OURS_OF_FEW_M, THEIRS_OF_FEW_M = 64, (1870.0, 2.3, 7.8e8), (1700.0, 2.1, 7.7e8)
# Products of up to FEWEST_M rows take ours this part of the time of OURS_OF_FEW_M, in the mean of 20 drawn ones (H200).
FEWEST_M, OURS_OF_FEWEST_M = 16, 0.95
# Ours must be this much ahead of more rows up to SMALL_M, and with a pass that it saves.
UNSURE = 1.03
# Bytes of a microsecond that our kernel of few rows reads of operands off vectors, of all SMs and of one, microseconds
# besides, and how much longer more rows of a tile take. Eleven of 12 products (H200) are within 11%, one of 14 us takes
# 17% less by this.
IN_PLACE, IN_PLACE_SM, IN_PLACE_MORE = 3.3e6, 3e4, 3.0
OF_MORE_ROWS = {8: 1.0, 16: 1.25, 32: 2.1}
HOST = 4.0  # microseconds that torch's own product takes the host, and each copy of an operand
ERROR = 1.1  # of the model: the standard deviation of what it expects
# Of a product with n or k off a vector cuBLAS computes so many FLOP and moves so many bytes a microsecond at most, by
# the elements that divide n and k, and takes so many microseconds more; strides of whole vectors do not help it: 64 x
# 18944 x 11127 took 549 us with strides of 11128, our kernel 148. Ours reaches the others where the model of cycles is
# not asked; a copy of an operand, which is read and written, has a rate and microseconds of its own.
THEIR_ODD, THEIR_ODD_MORE = {1: (1.15e8, 1.05e6), 2: (2.15e8, 1.75e6), 4: (2.15e8, 1.75e6)}, 7.0
# Up to so many rows cuBLAS multiplies vectors, with these rates: 2 x 24576 x 9999 took 237 us, our kernel with copies
# 368.
VECTORS, THEIR_ODD_VECTORS = 2, (2.15e8, 2.1e6)
OUR_ODD, OUR_ODD_MORE, COPY, COPY_MORE = (4.5e8, 3.5e6), 3.5, 3.8e6, 1.8


def fallback(
    program: Program, config: Callable[[Problem], GemmConfig],
    work: Callable[[Problem], tuple[GemmSize, EpilogueCost]] | None = None, after: bool = True,
    anywhere: tuple[str, ...] = ("x", "weight"),
) -> Fallback:  # fmt: skip
    """The fallback of a product's kernel, and where it runs: on GPUs other than Hopper, where TMA cannot load
    the operands, and where the model expects it to be faster.

    Args:
        work: the size of the product, of columns of each half if these are packed, and what its epilogue needs; by
            default nothing is expected.
        after: whether a pass follows the framework's product.
        anywhere: the two inputs that are multiplied.
    """
    biased = program.product is not None and bool(program.product.bias)

    def expected(problem: Problem) -> tuple[float, float] | None:
        chosen = config(problem)
        if work is None or chosen.form == "mma_sync":
            return None
        return _expected(chosen, *work(problem), after, problem)

    def margin(problem: Problem) -> float:
        unsure = after or (work is not None and FEW_M < work(problem)[0].m <= SMALL_M)
        return UNSURE if unsure else 1.0

    def when(problem: Problem) -> str:
        if reason := fallback_reason(problem, config(problem).form):
            return reason
        ours, theirs = expected(problem) or (0.0, 0.0)
        # The two times differ by less than the model's error, and the host takes longer than either: 10 microseconds
        # for a call of our kernel, 17 for torch's product with a bias (H200).
        if biased and ours <= ERROR * theirs and max(ours, theirs) < 2 * HOST:
            return ""
        if theirs and theirs < HOST and not after:
            return f"{theirs:.2g} us are expected, and the host takes longer for any call"
        # Of small products with a pass the host takes longer to launch two kernels than either way runs.
        if ours * margin(problem) <= theirs or (after and max(ours, theirs) < 2 * HOST):
            return ""
        return f"{theirs:.3g} us are expected{' with a pass' if after else ''}, {ours:.3g} of our kernel"

    return Fallback(program, when, WIDE, anywhere, expected)


def fallback_reason(problem: Problem, form: str) -> str:
    """Why a kernel of this form is not compared with the framework's product and a pass; empty where it is."""
    if sm(problem.arch) != 90:
        return f"it was not measured on {problem.arch}"
    if form == "mma_sync":
        return "TMA cannot load its operands, or registers do not hold its epilogue"
    return ""


def _expected(
    config: GemmConfig, size: GemmSize, cost: EpilogueCost, after: bool, problem: Problem
) -> tuple[float, float]:
    """Microseconds of our kernel, and of the framework's product and what comes after it."""
    whole = size._replace(n=size.n * (1 + cost.gate_up))

    def time_of(count: float, kernel: tuple[float, float, float]) -> float:
        rate, more, most = kernel
        return max(count / rate, 2 * whole.multiply_adds / most) + more

    few = size.m <= FEW_M
    if config.form == "in_place":
        ours = _in_place(config, whole, problem.sm_count)
    elif few:
        ours = time_of(cycles_of_few_rows(config, size, cost), OURS_OF_FEW_M)
        ours *= OURS_OF_FEWEST_M if size.m <= FEWEST_M else 1
    elif config.parts > 1:
        ours = in_parts.microseconds(config, size, cost)
    elif config.transposed:
        ours = transposed.microseconds(config, size, cost)
    else:
        count = cycles(config, size, cost) * (STORED_BY_FEW if stores_few(config) else 1)
        ours = time_of(count, OURS_OF_SMALL_M if size.m <= SMALL_M else OURS)
    fitted = THEIRS_OF_FEW_M if few else THEIRS_OF_SMALL_M if size.m <= SMALL_M else THEIRS
    theirs = time_of(_their_cycles(whole, problem.sm_count), fitted)
    if off_vector(problem):
        theirs = _their_odd(whole, problem)
    if after:
        (rate, more), elements = PASS, size.batch * size.m * size.n
        moved = elements * (sum(cost.outputs) + sum(cost.tiles) + 2 * (1 + cost.gate_up))
        theirs += moved / rate + more
    return ours, theirs


def _in_place(config: GemmConfig, size: GemmSize, sm_count: int) -> float:
    """Microseconds of our kernel of few rows that reads operands where they lie: memory's, or those of an SM."""
    waves = -(-size.n // (config.tile_n * sm_count))
    ctas = -(-size.m // config.tile_m)
    moved, of_sm = 2 * size.n * size.k * ctas, 2 * config.tile_n * size.k * ctas * waves
    return max(moved / IN_PLACE, of_sm / IN_PLACE_SM) * OF_MORE_ROWS[config.tile_m] + IN_PLACE_MORE


def _divisor(problem: Problem) -> int:
    """The elements of a vector of 16-bit ones that divide compact rows of the operands and of the output."""
    return math.gcd(problem.size("n"), problem.size("k"), VECTOR_BYTES // 2)


def _their_odd(size: GemmSize, problem: Problem) -> float:
    """Microseconds of cuBLAS where n or k is off a vector."""
    rates = THEIR_ODD_VECTORS if size.m <= VECTORS else THEIR_ODD[_divisor(problem)]
    return _at_rates(size, rates, THEIR_ODD_MORE)


def _at_rates(size: GemmSize, rates: tuple[float, float], more: float) -> float:
    """Microseconds at rates of FLOP and of bytes."""
    flops, moved = rates
    elements = size.m * size.k + size.n * size.k + size.m * size.n
    return max(2 * size.multiply_adds / flops, 2 * size.batch * elements / moved) + more


@lru_cache(maxsize=1024)
def _their_cycles(size: GemmSize, sm_count: int) -> float:
    """About how long cuBLAS takes."""
    return min(_in_parts(config, each, parts, sm_count) for config, each, parts in _their_ways(size, sm_count))


def _their_ways(size: GemmSize, sm_count: int) -> Iterator[tuple[GemmConfig, GemmSize, int]]:
    """Tiles and clusters, the product or its transpose, and parts of k: more than one where few tiles are computed."""
    transposed = size._replace(m=size.n, n=size.m, off_a=size.off_b, off_b=size.off_a)
    for each, (m, n), parts in product((size, transposed)[: 1 + (size.m > FEW_M)], THEIR_TILES, THEIR_SPLITS):
        tiles = parts * size.batch * -(-each.m // m) * -(-each.n // n)
        if parts == 1 or (size.k >= parts * LEAST_TERMS and tiles <= WAVES_OF_PARTS * sm_count):
            for c, r in THEIR_CLUSTERS:
                yield GemmConfig("cooperative", m, n, 4, max(sm_count // (c * r), 1), c, r), each, parts


def _in_parts(config: GemmConfig, size: GemmSize, parts: int, sm_count: int) -> float:
    """The cycles of a product whose terms are cut into parts, which another kernel adds up in float32. Rows past the
    end take cuBLAS no time: 413 x 16384 x 9216 took 164 us, where they would make it 195.
    """
    config = replace(config, edge_m=size.m % config.tile_m)
    found = cycles(config, size._replace(k=-(-size.k // parts), batch=size.batch * parts))
    if parts == 1:
        return found
    written = 2 * parts * size.batch * size.m * size.n * ITEMSIZE["float32"]
    return found + ADD_CYCLES + written / (L2_BYTES * sm_count * ADD_RATE)


def copies(operands: Sequence[tuple[Array, Sequence[int], int]]) -> list[tuple[int, ...] | None]:
    """The strides of copies of a product's operands, each with its strides and its address, that TMA can load; None for
    one that it can load as it lies, and for those that no copy helps.
    """
    return [None if _loadable(*operand) else whole_lines(*operand[:2]) for operand in operands]


def off_vector(problem: Problem) -> bool:
    """Whether compact rows of the operands or of the output begin off vectors."""
    return _divisor(problem) in THEIR_ODD


def padded(problem: Problem) -> Problem:
    """The product with rows of whole vectors."""
    vector = VECTOR_BYTES // 2
    whole = {name: -(-problem.size(name) // vector) * vector for name in ("n", "k")}
    return problem._replace(dims={**problem.dims, **whole}, aligns=dict.fromkeys(problem.aligns, VECTOR_BYTES))


def pays(copied: Sequence[Array], problem: Problem, times: tuple[float, float] | None, reads: int) -> bool:
    """Whether our kernel gains more than its share of these copies costs, which so many products read; ``times`` are
    what is expected of it, with the copies, and of the framework's product.
    """
    if not off_vector(problem):
        return False
    ours, theirs = with_copies(copied, problem, times, reads)
    return ours < theirs


def with_copies(
    copied: Sequence[Array], problem: Problem, times: tuple[float, float] | None, reads: int
) -> tuple[float, float]:
    """Microseconds of our kernel and its share of these copies, or of the host if that takes longer, and of the
    framework's product. Arguments as in :func:`pays`.
    """
    if times is None:
        size = GemmSize(problem.m, problem.size("n"), problem.size("k"))
        times = _at_rates(size, OUR_ODD, OUR_ODD_MORE), _their_odd(size, problem)
    moved = [2 * math.prod(array.shape) * ITEMSIZE[array.dtype] for array in copied]
    copying = (sum(moved) / COPY + COPY_MORE * len(moved)) / reads
    return max(times[0] + copying, HOST * (1 + len(moved))), times[1]


def _loadable(array: Array, strides: Sequence[int], address: int) -> bool:
    """Whether TMA can load a matrix with one contiguous dim."""
    stepped = [stride for stride, size in zip(strides, array.shape, strict=True) if stride != 1 and size > 1]
    return all(number % VECTOR_BYTES == 0 for number in (address, *(s * ITEMSIZE[array.dtype] for s in stepped)))


def whole_lines(array: Array, strides: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of a copy whose rows begin at lines of L2, with the contiguous dim that there is; else None."""
    line, shape = LINE // ITEMSIZE[array.dtype], array.shape
    last = strides[-1] == 1
    if not last and (len(shape) != 2 or strides[0] != 1):
        return None
    inner = shape[-1] if last else shape[0]
    padded = -(-inner // line) * line
    if not last:
        return (1, padded)
    return (*(padded * math.prod(shape[i + 1 : -1]) for i in range(len(shape) - 1)), 1)
