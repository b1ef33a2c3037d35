"""Checks of a config that need no compile."""

from __future__ import annotations

from cute_ops.declaration.config import Config, Needs, Problem, Space
from cute_ops.hardware import ARCHES, MAX_REGISTERS, MAX_THREADS, WARP, occupancy

# Fields that every family uses alike. Of the others, a text is a form.
NUMBERS = ("threads", "threads_per_row", "cluster", "resident")


def objection(space: Space, problem: Problem, config: Config, op: str = "") -> str:
    """Why a config cannot run on the target (divisibility, threads, clusters, registers, shared memory); empty if it
    may. ``op``: its name, for messages.
    """
    numbers = {name: value for name, value in config.items() if name in NUMBERS or not isinstance(value, str)}
    wrong = [f"{name}={value!r}" for name, value in numbers.items() if type(value) is not int or value < 0]
    if wrong:
        return f"{wrong[0]} is not a number of at least 0"
    threads, limits = config.get("threads", WARP), ARCHES[problem.arch]
    if wrong_threads := _of_threads(threads, config.get("threads_per_row", 1)):
        return wrong_threads
    cluster = config.get("cluster", 1)
    if cluster < 1 or cluster & (cluster - 1) or cluster > limits.cluster:
        return f"clusters of {cluster} CTAs, {problem.arch} has powers of two up to {limits.cluster}"
    needs = space.needed(problem, config, op) or Needs(threads, resident=config.get("resident", 1))
    if needs.registers > MAX_REGISTERS:
        return f"{needs.registers} registers a thread, there are {MAX_REGISTERS}"
    if needs.shared > limits.shared_per_cta:
        return f"{needs.shared} bytes of shared memory, a CTA has at most {limits.shared_per_cta}"
    fit = occupancy(problem.arch, needs.threads, needs.registers, needs.shared)
    if fit < max(needs.resident, 1):
        return f"{needs.resident} CTAs are to be resident, {fit} fit by threads, registers and shared memory"
    return ""


def _of_threads(threads: int, row: int) -> str:
    """Why a CTA of these threads, of which ``row`` share a row, cannot run; empty if it can."""
    if not 0 < threads <= MAX_THREADS:
        return f"{threads} threads, a CTA has at most {MAX_THREADS}"
    if threads % WARP:
        return f"{threads} threads are not whole warps"
    if row < 1 or threads % row or (row < WARP and row & (row - 1)) or (row > WARP and row % WARP):
        return f"{threads} threads cannot be shared out in rows of {row}"
    return ""
