"""Finds the fastest tile of a class of calls by measuring on the GPU.

Candidates are pruned by what an SM has, compiled in the pool, and checked: on a small problem against float64 by the
rule of the tests, on the whole one against what the heuristic's kernel gives. Then they take turns, sample by sample,
on the same buffers. The best one meets the heuristic's again, for new samples, since the best of many is partly the
luckiest; it wins where it is faster by a least amount, in nearly all pairs of samples, and nowhere slower. Where the
clock of the GPU drifts, it drifts for both.

The measuring itself needs memory and CUDA graphs, so a framework: an adapter's module is a :class:`Measurer`.
"""

from __future__ import annotations

import hashlib
import logging
import math
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import numpy as np

from cute_ops import cache, testing, toolchain, tuning
from cute_ops.binding import Binding, bind, own_lead
from cute_ops.cache import Built
from cute_ops.candidates import Tile, candidates, objection
from cute_ops.op import Array, Case, Op
from cute_ops.plan import Memory, Plan, plan, problem_of
from cute_ops.target import Target
from cute_ops.tuning import Winner

log = logging.getLogger("cute_ops")
MEASURERS = ("cute_ops_torch.measure",)
LEAST = 0.02  # a winner's time is less than the heuristic's by this part of it
CHANCE = 0.001  # how likely so many pairs may be won by two tiles that are as fast
SLOWER = 0.01  # no problem of the class may lose so much
SCREENED, SELECTED, CONFIRMED = 3, 7, 20  # samples of each tile
FINALISTS = 3
SMALL = 1 << 16  # elements of the problem that is checked against float64
# Whoever measures for longer than this has stopped.
LOCK_SECONDS = 900.0


class Contest(Protocol):
    """Some plans of one call, ready to run on the same buffers; the first is the heuristic's."""

    def differs(self, index: int, floors: Mapping[str, float]) -> str:
        """How a plan's outputs differ from the first one's beyond tolerance, empty where they don't.

        Args:
            floors: per output, what may be lost beside one unit in the last place, relative to the largest element.
        """

    def sample(self, index: int) -> float:
        """Microseconds of a call of a plan."""


class Measurer(Protocol):
    """An adapter's side: runs plans and takes samples."""

    def available(self) -> bool: ...

    def device(self) -> str: ...

    def run(self, binding: Binding, chosen: Plan, arrays: testing.Arrays) -> tuple[np.ndarray | None, ...]: ...

    def contest(
        self, binding: Binding, memory: Mapping[str, Memory], plans: Sequence[Plan]
    ) -> AbstractContextManager[Contest]: ...


class Trial(NamedTuple):
    """A call to measure."""

    binding: Binding
    memory: Mapping[str, Memory]


@dataclass
class Group:
    """Calls of one class: they get one tile."""

    key: tuning.Key
    op: Op
    trials: list[Trial] = field(default_factory=list)
    tiles: list[dict[str, int]] = field(default_factory=list)  # the heuristic's first
    plans: list[list[Plan]] = field(default_factory=list)  # per trial, one a tile
    refused: dict[tuning.Config, str] = field(default_factory=dict)


class Verdict(NamedTuple):
    """Which plan won; microseconds of the heuristic's and of the winner's by call; the winner's gain, or what the best
    of the others promised; how likely chance gives as much.
    """

    which: int
    before: list[float]
    after: list[float]
    gain: float
    chance: float


class Outcome(NamedTuple):
    """What tuning a class of calls gave; ``refused`` says why tiles were not measured, or why nothing was."""

    op: str
    winner: Winner
    before: list[float]
    after: list[float]
    gain: float
    tried: int
    refused: Mapping[tuning.Config, str]
    problem: str = ""

    @property
    def changed(self) -> bool:
        return dict(self.winner.tile) != dict(self.winner.heuristic)


def measurer() -> Measurer:
    """The first adapter that can measure here.

    Raises:
        RuntimeError: none can, says why.
    """
    problems = []
    for name in MEASURERS:
        try:
            found: Any = import_module(name)
        except ImportError as error:
            problems.append(f"{name} cannot be imported ({error})")
            continue
        if found.available():
            return found
        problems.append(f"{name} finds no GPU")
    raise RuntimeError(f"cute_ops: tuning needs a GPU and PyTorch: {'; '.join(problems)}")


def tune(
    trials: Iterable[Trial],
    target: Target,
    by: Measurer,
    *,
    least: float = LEAST,
    anew: bool = False,
    known: tuning.Winners | None = None,
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
    remembered = tuning.stores() if known is None else [known]
    found = [g for g in _grouped(trials, target) if anew or not any(g.key in winners for winners in remembered)]
    groups(len(found))
    for group in found:
        _plan(group, target)
    with _compiled((p.variant for g in found for plans in g.plans for p in plans), done) as built:
        for group in found:
            done(group.key[0])
            yield _measured(group, target, by, least, built)


def now(binding: Binding, memory: Mapping[str, Memory], target: Target) -> Tile:
    """The fastest tile of a call, measured and stored, unless another process just did; the heuristic's where that
    fails, which the log says.
    """
    (group,) = _grouped([Trial(binding, memory)], target)
    call, heuristic = group.key
    problem = problem_of(binding, memory, target)
    name = "tuning-" + hashlib.sha256(repr(group.key).encode()).hexdigest()[:24]
    try:
        by = measurer()
        with cache.locked(cache.folder(), name, LOCK_SECONDS):
            known = tuning.remembered(binding.op, problem, group.tiles[0], group.key, anew=True)
            if known is not None:
                return known
            (outcome,) = tune(group.trials, target, by, anew=True)
            if outcome.problem:
                raise RuntimeError(outcome.problem)
            tuning.remember([outcome.winner])
        log.info("tuned %s: %s", call, describe(outcome))
        return outcome.winner.tile
    except Exception as error:  # a program must run where it cannot be measured
        log.warning("%s is not tuned (%s: %s): it runs with the heuristic's tile", call, type(error).__name__, error)
        return dict(heuristic)


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


def select(contests: Sequence[Contest], among: Sequence[int], least: float = LEAST) -> Verdict:
    """The fastest of some plans, where it is faster than the first one beyond doubt.

    Args:
        contests: one a call; all calls count the same.
        among: the plans besides the first.
    """
    times: dict[int, list[list[float]]] = {i: [[] for _ in contests] for i in (0, *among)}
    _rounds(contests, times, (0, *among), SCREENED)
    close = sorted(among, key=lambda i: _ratio(times, i))[:FINALISTS]
    if close and _ratio(times, close[0]) < 1 - least / 2:
        close = [i for i in close if _ratio(times, i) < 1.03 * _ratio(times, close[0])]
        _rounds(contests, times, (0, *close), SELECTED)
        close.sort(key=lambda i: _ratio(times, i))
    before = [statistics.median(t) for t in times[0]]
    if not close or _ratio(times, close[0]) >= 1 - least / 2:
        return Verdict(0, before, before, 1 - _ratio(times, close[0]) if close else 0.0, 1.0)
    best = close[0]
    fresh: dict[int, list[list[float]]] = {i: [[] for _ in contests] for i in (0, best)}
    for half in ((0, best), (best, 0)):  # either one comes first as often
        _rounds(contests, fresh, half, CONFIRMED // 2)
    won = [sum(b < a for a, b in zip(*pairs, strict=True)) for pairs in zip(fresh[0], fresh[best], strict=True)]
    chance = min(1.0, len(contests) * by_chance(max(won), CONFIRMED))  # of any of the calls
    gain = 1 - _ratio(fresh, best)
    worst = max(_median_ratio(fresh, best, c) for c in range(len(contests)))
    wins = gain >= least and chance <= CHANCE and worst <= 1 + SLOWER
    before, after = ([statistics.median(t) for t in fresh[i]] for i in (0, best))
    return Verdict(best if wins else 0, before, after if wins else before, gain, chance)


def by_chance(wins: int, pairs: int) -> float:
    """How likely one of two that are as fast wins at least so many of so many pairs."""
    return sum(math.comb(pairs, k) for k in range(wins, pairs + 1)) / 2**pairs


def _rounds(
    contests: Sequence[Contest], times: Mapping[int, list[list[float]]], among: Sequence[int], count: int
) -> None:
    for c, contest in enumerate(contests):
        for _ in range(count):
            for i in among:
                times[i][c].append(contest.sample(i))


def _median_ratio(times: Mapping[int, list[list[float]]], i: int, c: int) -> float:
    return statistics.median(b / a for a, b in zip(times[0][c], times[i][c], strict=False))


def _ratio(times: Mapping[int, list[list[float]]], i: int) -> float:
    """A plan's time as a part of the first one's: the geometric mean over calls."""
    return statistics.geometric_mean(_median_ratio(times, i, c) for c in range(len(times[0])))


def _grouped(trials: Iterable[Trial], target: Target) -> list[Group]:
    """Calls by class; those whose op has nothing to choose from are left out."""
    groups: dict[tuning.Key, Group] = {}
    for trial in trials:
        op = trial.binding.op
        if op.tuning is None or trial.binding.empty:
            continue
        problem = problem_of(*trial, target)
        heuristic = dict(op.tile(problem))
        key = tuning.class_of(op, problem), tuning.config(heuristic)
        group = groups.setdefault(key, Group(key, op, tiles=[heuristic]))
        group.trials.append(trial)
    return list(groups.values())


def _plan(group: Group, target: Target) -> None:
    """The plans of all candidates that the target has room for."""
    tuned = group.op.tuning
    if tuned is None:
        return
    problem = problem_of(*group.trials[0], target)
    for tile in candidates(tuned, problem, group.tiles[0]):
        reason = objection(tuned, problem, tile)
        if reason:
            group.refused[tuning.config(tile)] = reason
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


def _measured(group: Group, target: Target, by: Measurer, least: float, built: _Compiled) -> Outcome:
    call, heuristic = group.key
    stays = Winner(call, dict(heuristic), dict(heuristic))

    def nothing(problem: str) -> Outcome:
        return Outcome(group.op.name, stays, [], [], 0.0, 0, group.refused, problem)

    usable = []
    for i, tile in enumerate(group.tiles):
        # One tile is one kernel for all calls of a class, except where layouts differ.
        error = next((e for plans in group.plans if (e := built.error(plans[i].variant.symbol))), "")
        if error and i == 0:
            return nothing(error)
        if error:
            group.refused[tuning.config(tile)] = error
        else:
            usable.append(i)
    try:
        with ExitStack() as stack:
            floors = _check(group, usable, target, by)
            contests = [
                stack.enter_context(by.contest(*trial, plans))
                for trial, plans in zip(group.trials, group.plans, strict=True)
            ]
            for i in usable[1:]:
                wrong = next((w for c in contests if (w := c.differs(i, floors))), "")
                if wrong:
                    usable.remove(i)
                    group.refused[tuning.config(group.tiles[i])] = wrong
            verdict = select(contests, usable[1:], least)
    except Exception as error:  # no memory, for one: other classes may be measured all the same
        return nothing(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    versions = dict(zip((toolchain.DSL, toolchain.TVM_FFI), toolchain.versions(), strict=True))
    measured = {
        "us": [[round(a, 3), round(b, 3)] for a, b in zip(verdict.before, verdict.after, strict=True)],
        "rows": [trial.binding.rows for trial in group.trials],
        "tried": len(usable) - 1, "gpu": by.device(), "date": datetime.now(UTC).date().isoformat(), **versions,
    }  # fmt: skip
    winner = Winner(call, dict(heuristic), group.tiles[verdict.which], measured)
    return Outcome(
        group.op.name, winner, verdict.before, verdict.after, verdict.gain, len(usable) - 1, group.refused
    )  # fmt: skip


def _check(group: Group, usable: list[int], target: Target, by: Measurer) -> dict[str, float]:
    """Drop tiles whose kernels give wrong results on a small problem; returns what each output may lose beside one
    unit in the last place, relative to its largest element.
    """
    op, binding = group.op, group.trials[0].binding
    case = smaller(binding)
    dtype = next(iter(binding.dtypes.values()), "float32")
    arrays, attrs = testing.inputs(op, case, dtype), dict(binding.attrs)
    given = {n: None if a is None else Array(a.shape, str(a.dtype)) for n, a in arrays.items()}
    small = bind(op, given, attrs)
    exact, tolerances = testing.expected(op, arrays, attrs), testing.tolerances(op, arrays, attrs)
    for i in list(usable):
        chosen = plan(small, {}, target, fixed=True, tile=group.tiles[i])
        if chosen.variant.symbol != group.plans[0][i].variant.symbol:
            break  # rows with strides of their own: the whole problem is compared with the heuristic's result
        try:
            testing.compare(op, by.run(small, chosen, arrays), exact, tolerances)
        except AssertionError as error:
            if i == usable[0]:
                raise RuntimeError(f"the heuristic's tile gives wrong results: {error}") from error
            usable.remove(i)
            group.refused[tuning.config(group.tiles[i])] = str(error)
    floors = {}
    for name, value, tolerance in zip(op.outputs, exact, tolerances, strict=True):
        if value is None or tolerance is None or binding.outputs[name] is None:
            continue
        finite = np.isfinite(value) & np.isfinite(tolerance)
        largest = float(np.max(np.abs(value), initial=0.0, where=finite))
        eps = testing.EPS[binding.outputs[name].dtype]  # type: ignore[union-attr]
        loss = float(np.max(tolerance / 2 - eps * np.abs(value), initial=0.0, where=finite))
        floors[name] = loss / largest if largest else testing.EPS["float32"]
    return floors


def smaller(binding: Binding) -> Case:
    """The problem with so few rows that float64 is quick; their number is odd."""
    op, lead = binding.op, next((v for v in binding.dims.values() if isinstance(v, tuple)), ())
    columns = max(sum(math.prod(a.shape) for a in binding.inputs.values() if a) // max(binding.rows, 1), 1)
    rows = min(max(SMALL // columns, 3) | 1, max(binding.rows, 1))
    few = (*(1,) * (len(lead) - 1), rows) if lead else ()
    dims = {n: few if isinstance(v, tuple) else v for n, v in binding.dims.items() if n not in op.derived}
    given = {n: (t, a) for n, t in op.inputs.items() if (a := binding.inputs[n]) is not None}
    leading = {n: len(own_lead(t, a)) for n, (t, a) in given.items() if t.broadcast}
    absent = tuple(n for n in op.inputs if n not in given)
    return Case("tuning", dims, dict(binding.dtypes), absent, dict(binding.attrs), leading)
