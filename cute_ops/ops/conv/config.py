"""How the convolution kernels are configured: heuristics, their search spaces and the workspace of a gradient."""

from __future__ import annotations

from cute_ops.config import POWERS, Config, Needs, Problem, vary
from cute_ops.kernels.conv.config import ConvConfig
from cute_ops.ops.rows import LEAST_REGISTERS, VECTOR_BYTES
from cute_ops.shapes import ITEMSIZE, Array

THREADS = 128
# Rows that a thread loads ahead. In the forward, where it holds MANY_WEIGHTS, more would make the compiler spill.
AHEAD, AHEAD_OF_MANY_WEIGHTS, MANY_WEIGHTS = 6, 3, 24
# The rows before a span are loaded twice: 6% of the loads with 48 rows, from L2. In the gradient, which has them on
# both sides, spans are longer.
SPAN, SPAN_BACKWARD = 48, 96
# CTAs of an SM: 128 registers of a thread. The gradient takes 150 to 255.
RESIDENT, RESIDENT_BACKWARD = 4, 2
# A thread of the gradient holds half a vector of 16-bit elements: windows, weights and sums of a whole one take more
# than 255 registers.
CHANNELS_BACKWARD = 4


def forward(problem: Problem) -> ConvConfig:
    channels = VECTOR_BYTES // ITEMSIZE[problem.dtypes["x"]]
    ahead = AHEAD_OF_MANY_WEIGHTS if channels * problem.dims["w"] >= MANY_WEIGHTS else AHEAD
    return ConvConfig(THREADS, channels, ahead, SPAN, RESIDENT, problem.sm_count)


def backward(problem: Problem) -> ConvConfig:
    return ConvConfig(THREADS, CHANNELS_BACKWARD, AHEAD, SPAN_BACKWARD, RESIDENT_BACKWARD, problem.sm_count)


def workspace(problem: Problem, flat: Config) -> dict[str, Array | None]:
    """Partial sums of the parameters' gradients: a row for each CTA that runs at once and has the same channels."""
    config, dims = ConvConfig.of(flat), problem.dims
    blocks = -(-dims["n"] // (config.threads * config.channels))
    parts = max(config.ctas // blocks, 1)
    return {
        "dweight_parts": Array((parts, dims["n"] * dims["w"]), "float32"),
        "dbias_parts": Array((parts, dims["n"]), "float32") if "dbias" in problem.dtypes else None,
    }


def needs(problem: Problem, flat: Config) -> Needs:
    """A thread holds weights and the rows before the present one in float32, in the gradient two of such rows and sums
    of its weights' gradients.
    """
    config, width = ConvConfig.of(flat), problem.dims["w"]
    held = 2 * width - 1 if "dout" not in problem.dtypes else 4 * width - 2
    return Needs(config.threads, LEAST_REGISTERS + held * config.channels, resident=config.resident)


SPACE = vary(needs=needs, ahead=(3, 6), span=(24, 48, 96), resident=(2, 3, 4))
# Depends on the number of rows, as the grouping of the parameters' gradients does.
BACKWARD = vary(
    needs=needs,
    buckets={"m": POWERS, "s": POWERS},
    ahead=(3, 6),
    span=(48, 96, 192),
    resident=(2, 3, 4),
)
