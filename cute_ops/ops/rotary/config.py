"""How the rotary kernels are configured: heuristics, their search spaces and the workspace of a gradient."""

from __future__ import annotations

from cute_ops.declaration.config import POWERS, Config, Problem, vary
from cute_ops.declaration.shapes import Array
from cute_ops.kernels.rotary.config import RotaryBackwardConfig, RotaryConfig
from cute_ops.ops.rows import next_power

# Elements of a head that one thread takes: two vectors of 16-bit elements.
CHUNK = 16
# The workspace of the weights' gradients has a multiple of PARTIALS rows: where heads are long, each of a CTA's 8 warps
# writes one. It has at most PARTIALS rows for every HEADS_OF_PARTIALS heads, since more would have nothing to add up.
PARTIALS, HEADS_OF_PARTIALS = 8, 64


def rope(problem: Problem) -> RotaryConfig:
    """A thread reads the tables of its token for two heads, unless sequences share them: then neighbouring CTAs have
    read the same.
    """
    return RotaryConfig(threads=128, heads_per_thread=1 if "cos" in problem.shared else 2)


def tables(problem: Problem) -> RotaryConfig:
    return RotaryConfig(threads=256, heads_per_thread=1)


def qk_norm_rope(problem: Problem) -> RotaryConfig:
    return RotaryConfig(threads=256, heads_per_thread=2)


def qk_norm_rope_bwd(problem: Problem) -> RotaryBackwardConfig:
    """Two heads per thread, or one where tokens are too few for all threads that fit the GPU."""
    dims, many = problem.dims, RotaryBackwardConfig(threads=128, heads_per_thread=2, resident=3)
    threads = next_power(problem.m) * (dims["hq"] + dims["hk"]) * max(dims["d"] // CHUNK, 1)
    if threads < many.threads * many.resident * problem.sm_count:
        return RotaryBackwardConfig(threads=256, heads_per_thread=1, resident=1)
    return many


def workspace(problem: Problem, flat: Config) -> dict[str, Array | None]:
    """Partial sums of the weights' gradients: a row for each CTA that runs at once, divided among q and k in
    proportion to their heads.
    """
    total = problem.sm_count * RotaryBackwardConfig.of(flat).resident
    dims = problem.dims
    share = {"k": max(round(total * dims["hk"] / (dims["hq"] + dims["hk"]) / PARTIALS), 1)}
    share["q"] = max(total // PARTIALS - share["k"], 1)
    partials = {n: PARTIALS * min(share[n], -(-problem.m * dims[f"h{n}"] // HEADS_OF_PARTIALS)) for n in ("q", "k")}
    return {f"d{n}_weight_partials": Array((partials[n], dims["d"]), "float32") for n in ("q", "k")}


SPACE = vary(threads=(64, 128, 256), heads_per_thread=(1, 2, 4))
# Depends on the number of rows, as ``resident`` sets how many partial sums the weights' gradients have.
BACKWARD = vary(threads=(128, 256, 512), heads_per_thread=(1, 2), resident=(1, 2, 3, 4), buckets={"m": POWERS})
