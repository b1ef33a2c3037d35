"""How the convolution kernels are configured: heuristics, their search spaces and the workspace of a gradient."""

from __future__ import annotations

from dataclasses import replace

from cute_ops.declaration.config import POWERS, Config, Needs, Problem, vary
from cute_ops.declaration.shapes import ITEMSIZE, Array
from cute_ops.kernels.conv.config import ConvConfig
from cute_ops.ops.rows import LEAST_REGISTERS

THREADS = 128
# Row tensors, whose alignment makes the vectors.
ROWS = ("x", "dout", "initial_state", "dfinal_state", "dx", "dinitial_state", "out", "final_state")
# Half a vector of 16-bit elements. Windows, weights and sums of a whole one leave registers for few threads, and those
# of the gradient take more than 255.
CHANNELS = 4
# On an H200, 40 to 60 KB that are on their way to an SM are enough; with more, the gradient becomes slower.
AHEAD, AHEAD_BACKWARD = 12, 6
# The two numbers above for rows that start anywhere, where the channels of a thread are a warp apart.
AHEAD_APART, AHEAD_APART_BACKWARD = 6, 4
# Short spans: most of their rows are on their way at once, CTAs are so many that those of an SM end one after another,
# and the rows before a span, which are loaded twice, come from L2, since it is soon over. 3 x 2048 x 5216 in float32
# runs at 0.92 of a copy's rate, by spans of 48 rows at 0.85; 97 x 1024 x 920 in float16 at 0.91, by those at 0.84, by
# 12 rows at 0.87. Rows that start anywhere: 3 x 2048 x 6843 in float32 runs by 12 rows at 0.85, by 24 at 0.80; of
# 16-bit elements 4 x 4096 x 5217 by 48 at 0.65, by 24 at 0.61, and 8 x 4096 x 2049 by both at 0.61, by 12 at 0.53.
SPAN, SPAN_APART, SPAN_APART_WIDE = 18, 48, 12
# CTAs of an SM: 80 registers of a thread, in the gradient 168.
RESIDENT, RESIDENT_BACKWARD, RESIDENT_BACKWARD_WIDE = 6, 3, 2


def forward(problem: Problem) -> ConvConfig:
    found = ConvConfig(THREADS, CHANNELS, AHEAD, RESIDENT, problem.sm_count, SPAN)
    apart = found.apart(problem.n, _start(problem))
    if not apart:
        return found
    span = SPAN_APART if ITEMSIZE[problem.dtypes["x"]] < 4 else SPAN_APART_WIDE
    return replace(found, ahead=AHEAD_APART, span=span)


def backward(problem: Problem) -> ConvConfig:
    resident = RESIDENT_BACKWARD if ITEMSIZE[problem.dtypes["x"]] < 4 else RESIDENT_BACKWARD_WIDE
    found = ConvConfig(THREADS, CHANNELS, AHEAD_BACKWARD, resident, problem.sm_count)
    return replace(found, ahead=AHEAD_APART_BACKWARD) if found.apart(problem.n, _start(problem)) else found


def _start(problem: Problem) -> int:
    """The elements of which all rows start on multiples."""
    return min(problem.aligns[name] for name in ROWS if name in problem.aligns) // ITEMSIZE[problem.dtypes["x"]]


def workspace(problem: Problem, flat: Config) -> dict[str, Array | None]:
    """Partial sums of the parameters' gradients: a row for each CTA that runs at once and has the same channels."""
    config, dims = ConvConfig.of(flat), problem.dims
    start = _start(problem)
    lanes, _, ctas = config.spread(problem.n, start)
    blocks = -(-dims["n"] // (lanes * config.vec(problem.n, start)))
    partials = max(ctas * config.sms // blocks, 1)
    return {
        "dweight_partials": Array((partials, dims["n"] * dims["w"]), "float32"),
        "dbias_partials": Array((partials, dims["n"]), "float32") if "dbias" in problem.dtypes else None,
    }


def needs(problem: Problem, flat: Config) -> Needs:
    """A thread holds weights and the rows before the present one in float32, in the gradient two of such rows and sums
    of its weights' gradients.
    """
    config, width = ConvConfig.of(flat), problem.dims["w"]
    held = 2 * width - 1 if "dout" not in problem.dtypes else 4 * width - 2
    return Needs(config.threads, LEAST_REGISTERS + held * config.channels, resident=config.resident)


SPACE = vary(needs=needs, ahead=(6, 9, 12), span=(12, 18, 24, 48), resident=(4, 6))
# Depends on the number of rows, as the grouping of the parameters' gradients does.
BACKWARD = vary(needs=needs, buckets={"m": POWERS, "s": POWERS}, ahead=(4, 6, 8), resident=(2, 3, 4))
