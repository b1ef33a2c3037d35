"""Finds the fastest tile of a class of calls by measuring on the GPU.

Candidates are pruned by what an SM has and compiled in the pool, later calls' while earlier ones are measured. An
:class:`Examiner` checks and times them: a process of its own (:mod:`cute_ops.autotune.bench_process`), since a kernel
that faults takes its process with it; see :mod:`cute_ops.autotune.compare` for how.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol

from cute_ops.autotune import winners
from cute_ops.autotune.space import objection
from cute_ops.autotune.winners import Winner
from cute_ops.binding import Binding, bind, own_lead
from cute_ops.config import Config
from cute_ops.files import cache_dir
from cute_ops.jit import cache, toolchain
from cute_ops.jit.cache import Built
from cute_ops.jit.plan import Memory, Plan, compact, plan, problem_of
from cute_ops.jit.target import Target
from cute_ops.op import Op
from cute_ops.shapes import ITEMSIZE, Array

log = logging.getLogger("cute_ops")
MEASURERS = ("cute_ops_torch.tools.measure",)
LEAST = 0.02  # a winner's time is less than the heuristic's by this part of it
# What a call that stands for many rows reads and writes, and the rows of one that stands for few.
MANY_BYTES, FEW_ROWS = 128 << 20, 64
# Whoever measures for longer than this has stopped.
LOCK_SECONDS = 900.0

_examiners: dict[int, Examiner] = {}


class Trial(NamedTuple):
    """A call to measure."""

    binding: Binding
    memory: Mapping[str, Memory]


class Examined(NamedTuple):
    """What an examiner found: which of the tiles is fastest beyond doubt; microseconds of the heuristic's and of that
    one, by call; its gain, or what the best of the others promised; which tiles are wrong, and how; the GPU.
    """

    which: int
    before: list[float]
    after: list[float]
    gain: float
    refused: Mapping[int, str]
    device: str


class Examiner(Protocol):
    """Checks and times tiles, the heuristic's first, on calls of one class."""

    def examine(self, trials: Sequence[Trial], tiles: Sequence[Config], target: Target, least: float) -> Examined: ...

    def close(self) -> None: ...


@dataclass
class Group:
    """Calls of one class: they get one tile."""

    key: winners.Key
    op: Op
    trials: list[Trial] = field(default_factory=list)
    tiles: list[dict[str, int]] = field(default_factory=list)  # the heuristic's first
    plans: list[list[Plan]] = field(default_factory=list)  # per trial, one a tile
    refused: dict[winners.Items, str] = field(default_factory=dict)


class Outcome(NamedTuple):
    """What tuning a class of calls gave; ``refused`` says why tiles were not measured, or why nothing was."""

    op: str
    winner: Winner
    before: list[float]
    after: list[float]
    gain: float
    tried: int
    refused: Mapping[winners.Items, str]
    problem: str = ""

    @property
    def changed(self) -> bool:
        return dict(self.winner.tile) != dict(self.winner.heuristic)


def tune(
    trials: Iterable[Trial],
    target: Target,
    by: Examiner,
    *,
    least: float = LEAST,
    anew: bool = False,
    known: winners.Winners | None = None,
    done: Callable[[str], None] = log.info,
    groups: Callable[[int], None] = lambda count: None,
) -> Iterator[Outcome]:
    """Measure calls, class by class; kernels of the later ones compile meanwhile. Nothing is stored here.

    Args:
        least: by what part of its time the heuristic's must be beaten.
        anew: also what is remembered.
        known: what is remembered; by default whatever a program here would use.
        done: is told what was compiled or measured.
        groups: is told how many classes there are, before the first.
    """
    remembered = winners.stores() if known is None else [known]
    found = [g for g in grouped(trials, target) if anew or not any(g.key in stored for stored in remembered)]
    groups(len(found))
    for group in found:
        _plan(group, target)
    with _compiled((p.variant for g in found for plans in g.plans for p in plans), done) as built:
        for group in found:
            done(group.key[0])
            yield _measured(group, target, by, least, built)


def now(binding: Binding, memory: Mapping[str, Memory], target: Target, device: int) -> Config:
    """The fastest tile of a call, measured and stored, unless another process just did; the heuristic's where that
    fails, which the log says.
    """
    (group,) = grouped([Trial(binding, memory)], target)
    call, heuristic = group.key
    problem = problem_of(binding, memory, target)
    name = "tuning-" + hashlib.sha256(repr(group.key).encode()).hexdigest()[:24]
    try:
        with cache_dir.locked(cache_dir.folder(), name, LOCK_SECONDS):
            known = winners.remembered(binding.op, problem, group.tiles[0], group.key, anew=True)
            if known is not None:
                return known
            (outcome,) = tune(group.trials, target, examiner(device), anew=True)
            if outcome.problem:
                raise RuntimeError(outcome.problem)
            winners.remember([outcome.winner])
        log.info("tuned %s: %s", call, describe(outcome))
        return outcome.winner.tile
    except Exception as error:  # a program must run where it cannot be measured
        log.warning("%s is not tuned (%s: %s): it runs with the heuristic's tile", call, type(error).__name__, error)
        return dict(heuristic)


def examiner(device: int = 0) -> Examiner:
    """What measures on a GPU, in a process of its own; one for each, which leaves when it has nothing to do."""
    from cute_ops.autotune.bench_process import Apart

    return _examiners.setdefault(device, Apart(device))


def describe(outcome: Outcome) -> str:
    """One line for people."""
    if outcome.problem:
        return outcome.problem
    times = ", ".join(f"{us:.2f}" for us in outcome.before)
    if not outcome.changed:
        return f"the heuristic's tile stays, {times} us; the best of {outcome.tried} others gained {outcome.gain:.1%}"
    other = ", ".join(f"{us:.2f}" for us in outcome.after)
    return f"{changes(outcome.winner)}: {times} us -> {other} us, {outcome.gain:.1%} less; {outcome.tried} tried"


def changes(winner: Winner) -> str:
    """What a winner has other than the heuristic's tile: ``threads 128 -> 256``."""
    names = [n for n in {**winner.heuristic, **winner.tile} if winner.heuristic.get(n) != winner.tile.get(n)]
    return ", ".join(f"{n} {winner.heuristic.get(n, '-')} -> {winner.tile.get(n, '-')}" for n in names)


def grouped(trials: Iterable[Trial], target: Target) -> list[Group]:
    """Calls by class; those whose op has nothing to choose from are left out."""
    groups: dict[winners.Key, Group] = {}
    for trial in trials:
        op = trial.binding.op
        if op.space is None or trial.binding.empty:
            continue
        problem = problem_of(*trial, target)
        heuristic = dict(op.config(problem))
        key = winners.class_of(op, problem), winners.items(heuristic)
        group = groups.setdefault(key, Group(key, op, tiles=[heuristic]))
        group.trials.append(trial)
    for group in groups.values():
        group.trials += _others(group, target)
    return list(groups.values())


def _others(group: Group, target: Target) -> Iterator[Trial]:
    """Calls of few and of many rows, where a class is of any number of them and its calls are not."""
    op, (binding, memory) = group.op, group.trials[0]
    flat = all(where.strides == compact(binding.inputs[n].shape) for n, where in memory.items() if binding.inputs[n])  # type: ignore[union-attr]
    if op.space is None or op.space.by_rows or not flat or not binding.rows:
        return
    counts = [trial.binding.rows for trial in group.trials]
    many = max(MANY_BYTES * binding.rows // max(bytes_moved(binding), 1), 1)
    wanted = [FEW_ROWS] if min(counts) > 16 * FEW_ROWS else []
    wanted += [many] if max(counts) < many // 4 else []
    for rows in wanted:
        other = resized(binding, rows)
        placed = {n: Memory(compact(a.shape), memory[n].address) for n, a in other.inputs.items() if a and n in memory}
        problem = problem_of(other, placed, target)
        if (winners.class_of(op, problem), winners.items(op.config(problem))) == group.key:
            yield Trial(other, placed)


def bytes_moved(binding: Binding) -> int:
    """The least bytes that a call reads and writes."""
    read = [a for n, a in binding.inputs.items() if not binding.op.inputs[n].unread]
    return sum(math.prod(a.shape) * ITEMSIZE[a.dtype] for a in (*read, *binding.outputs.values()) if a is not None)


def lead_of(binding: Binding, rows: int) -> tuple[int, ...]:
    """As many leading dims as a call has, with so many rows."""
    lead = next((v for v in binding.dims.values() if isinstance(v, tuple)), ())
    return (*(1,) * (len(lead) - 1), rows) if lead else ()


def resized(binding: Binding, rows: int) -> Binding:
    """The same call with another number of rows."""
    op, lead, given = binding.op, lead_of(binding, rows), {}
    for name, tensor in op.inputs.items():
        array = binding.inputs[name]
        if array is not None:
            own = len(own_lead(tensor, array)) if tensor.broadcast else len(lead) if tensor.rows else 0
            tail = array.shape[len(array.shape) - len(tensor.dims) :]
            given[name] = Array((*lead[len(lead) - own :], *tail), array.dtype)
    return bind(op, given, binding.attrs)


def _plan(group: Group, target: Target) -> None:
    """The plans of all candidates that the target has room for."""
    tuned = group.op.space
    if tuned is None:
        return
    problem = problem_of(*group.trials[0], target)
    for tile in tuned.others(problem, group.tiles[0]):
        reason = objection(tuned, problem, tile)
        if reason:
            group.refused[winners.items(tile)] = reason
        else:
            group.tiles.append(tile)
    group.plans = [[plan(*trial, target, fixed=True, tile=tile) for tile in group.tiles] for trial in group.trials]


class _Compiled:
    """What of many variants is built, as it becomes known."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._built: dict[str, Built] = {}
        self._over = False
        self.unwanted = False

    def add(self, built: Built) -> None:
        if self.unwanted:
            raise InterruptedError("nobody waits for more")
        with self._news:
            self._built[built.variant.symbol] = built
            self._news.notify_all()

    def end(self) -> None:
        with self._news:
            self._over = True
            self._news.notify_all()

    def error(self, symbol: str) -> str:
        """Why a variant does not compile; waits until that is known."""
        with self._news:
            self._news.wait_for(lambda: symbol in self._built or self._over)
            built = self._built.get(symbol)
        return "was not compiled" if built is None else str(built.error).partition("\n")[0] if built.error else ""


@contextmanager
def _compiled(variants: Iterable[Any], done: Callable[[str], None]) -> Iterator[_Compiled]:
    """Compile in the background, in order."""
    wanted, state = list(variants), _Compiled()

    def add(built: Built) -> None:
        state.add(built)
        done(f"compiled {built.variant.describe()}")

    def work() -> None:
        try:
            cache.build_all(wanted, add)
        except InterruptedError:
            pass
        except Exception as error:  # it belongs to the log, and every variant that waits is told
            log.warning("compiling candidates ended early: %s", error)
        finally:
            state.end()

    thread = threading.Thread(target=work, name="cute_ops-tune", daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.unwanted = True
        thread.join()


def _measured(group: Group, target: Target, by: Examiner, least: float, built: _Compiled) -> Outcome:
    call, heuristic = group.key
    stays = Winner(call, dict(heuristic), dict(heuristic))

    def nothing(problem: str) -> Outcome:
        return Outcome(group.op.name, stays, [], [], 0.0, 0, group.refused, problem)

    tiles = []
    for i, tile in enumerate(group.tiles):
        # One tile is one kernel for all calls of a class, except where layouts differ.
        error = next((e for plans in group.plans if (e := built.error(plans[i].variant.symbol))), "")
        if error and i == 0:
            return nothing(error)
        if error:
            group.refused[winners.items(tile)] = error
        else:
            tiles.append(tile)
    try:
        found = by.examine(group.trials, tiles, target, least)
    except Exception as error:  # no memory, for one: other classes may be measured all the same
        return nothing(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    group.refused.update((winners.items(tiles[i]), why) for i, why in found.refused.items())
    tried = len(tiles) - 1 - len(found.refused)
    versions = dict(zip((toolchain.DSL, toolchain.TVM_FFI), toolchain.versions(), strict=True))
    measured = {
        "us": [[round(a, 3), round(b, 3)] for a, b in zip(found.before, found.after, strict=True)],
        "rows": [trial.binding.rows for trial in group.trials], "tried": tried, "gpu": found.device,
        "date": datetime.now(UTC).date().isoformat(), "sources": winners.sources_of(group.op), **versions,
    }  # fmt: skip
    winner = Winner(call, dict(heuristic), tiles[found.which], measured)
    return Outcome(group.op.name, winner, found.before, found.after, found.gain, tried, group.refused)
