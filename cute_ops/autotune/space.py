"""Checks of a config that need no compile."""

from __future__ import annotations

from cute_ops.config import Config, Needs, Problem, Space
from cute_ops.hardware import ARCHES, MAX_REGISTERS, MAX_THREADS, WARP, occupancy
from cute_ops.kernels.epilogue.config import Texts

# Fields of configs that are not numbers.
TEXTS = ("form", *Texts._fields)


def objection(space: Space, problem: Problem, config: Config) -> str:
    """Why a config cannot run on the target (divisibility, threads, clusters, registers, shared memory); empty if it
    may.
    """
    numbers = {name: value for name, value in config.items() if name not in TEXTS}
    wrong = [f"{name}={value!r}" for name, value in numbers.items() if type(value) is not int or value < 0]
    if wrong:
        return f"{wrong[0]} is not a number of at least 0"
    threads, row = config.get("threads", WARP), config.get("threads_per_row", 1)
    if not 0 < threads <= MAX_THREADS:
        return f"{threads} threads, a CTA has at most {MAX_THREADS}"
    if threads % WARP:
        return f"{threads} threads are not whole warps"
    if row < 1 or threads % row or (row < WARP and row & (row - 1)) or (row > WARP and row % WARP):
        return f"{threads} threads cannot be shared out in rows of {row}"
    limits, cluster = ARCHES[problem.arch], config.get("cluster", 1)
    if cluster < 1 or cluster & (cluster - 1) or cluster > limits.cluster:
        return f"clusters of {cluster} CTAs, {problem.arch} has powers of two up to {limits.cluster}"
    needs = space.needs(problem, config) if space.needs else Needs(threads, resident=config.get("resident", 1))
    if needs.registers > MAX_REGISTERS:
        return f"{needs.registers} registers a thread, there are {MAX_REGISTERS}"
    if needs.shared > limits.shared_per_cta:
        return f"{needs.shared} bytes of shared memory, a CTA has at most {limits.shared_per_cta}"
    fit = occupancy(problem.arch, needs.threads, needs.registers, needs.shared)
    if fit < max(needs.resident, 1):
        return f"{needs.resident} CTAs are to be resident, {fit} fit by threads, registers and shared memory"
    return ""
