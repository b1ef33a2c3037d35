"""What may be tried instead of a heuristic's tile, and what can be told of it without compiling.

An op declares in a line what its kernel lets vary::

    tile=lambda problem: {"threads": 128}, tuning=vary(threads=(64, 128, 256, 512))

Whatever measuring chooses is one of these candidates or the heuristic's tile, and nothing else is ever compiled: a
file of winners is advice, not configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import NamedTuple

from cute_ops.op import Problem

Tile = Mapping[str, int]
MAX_THREADS, MAX_REGISTERS, WARP = 1024, 255, 32
MAX_SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 120: 101_376}  # bytes of one CTA
_SHARED = 232_448


class Needs(NamedTuple):
    """What one CTA takes of an SM: less than the kernel surely takes, so that no candidate is lost.

    Args:
        threads: of the CTA.
        registers: of a thread.
        shared: bytes of shared memory.
        resident: CTAs that are to fit on an SM together.
    """

    threads: int
    registers: int = 1
    shared: int = 0
    resident: int = 1


class Tuning(NamedTuple):
    """What measuring may choose from.

    Args:
        candidates: ``candidates(problem, tile)``: tiles to try instead of the heuristic's; doubles do no harm.
        needs: ``needs(problem, tile)``: what a tile takes. By default what its ``threads`` and ``resident`` say.
        by_rows: whether few rows may get another tile than many. Only where the bits of a row may depend on how many
            rows there are: in ops that sum over rows.
    """

    candidates: Callable[[Problem, Tile], Iterable[Tile]]
    needs: Callable[[Problem, Tile], Needs] | None = None
    by_rows: bool = False


def vary(
    *, needs: Callable[[Problem, Tile], Needs] | None = None, by_rows: bool = False, **choices: Iterable[int]
) -> Tuning:
    """Every combination of some values, the heuristic's among them: ``vary(threads=(64, 128), unroll=(1, 2))``."""
    values = {name: tuple(v) for name, v in choices.items()}

    def candidates(problem: Problem, tile: Tile) -> Iterable[Tile]:
        options = [dict.fromkeys((*([tile[n]] if n in tile else []), *v)) for n, v in values.items()]
        return ({**tile, **dict(zip(values, chosen, strict=True))} for chosen in product(*options))

    return Tuning(candidates, needs, by_rows)


def candidates(tuning: Tuning, problem: Problem, heuristic: Tile) -> list[dict[str, int]]:
    """The tiles to try, without the heuristic's and without doubles."""
    found: dict[tuple[tuple[str, int], ...], dict[str, int]] = {}
    for tile in tuning.candidates(problem, heuristic):
        if dict(tile) != dict(heuristic):
            found.setdefault(tuple(sorted(tile.items())), dict(tile))
    return list(found.values())


def objection(tuning: Tuning, problem: Problem, tile: Tile) -> str:
    """Why a tile cannot run on the target, empty where it may: divisibility, threads, clusters, registers and shared
    memory.
    """
    from cute_ops.jit.target import sm
    from cute_ops.tools.sass import occupancy

    wrong = [f"{name}={value!r}" for name, value in tile.items() if type(value) is not int or value < 0]
    if wrong:
        return f"{wrong[0]} is no number"
    threads, row = tile.get("threads", WARP), tile.get("threads_per_row", 1)
    if not 0 < threads <= MAX_THREADS:
        return f"{threads} threads, a CTA has at most {MAX_THREADS}"
    if threads % WARP:
        return f"{threads} threads are not whole warps"
    if row < 1 or threads % row or (row < WARP and row & (row - 1)) or (row > WARP and row % WARP):
        return f"{threads} threads cannot be shared out in rows of {row}"
    cluster, generation = tile.get("cluster", 1), sm(problem.arch)
    most = 1 if generation < 90 else 16 if generation < 120 else 8
    if cluster < 1 or cluster & (cluster - 1) or cluster > most:
        return f"clusters of {cluster} CTAs, {problem.arch} has powers of two up to {most}"
    needs = tuning.needs(problem, tile) if tuning.needs else Needs(threads, resident=tile.get("resident", 1))
    if needs.registers > MAX_REGISTERS:
        return f"{needs.registers} registers a thread, there are {MAX_REGISTERS}"
    largest = MAX_SHARED.get(generation, _SHARED)
    if needs.shared > largest:
        return f"{needs.shared} bytes of shared memory, a CTA has at most {largest}"
    fit = occupancy(problem.arch, needs.threads, needs.registers, needs.shared)
    if fit < max(needs.resident, 1):
        return f"{needs.resident} CTAs are to be resident, {fit} fit by threads, registers and shared memory"
    return ""
