"""Compares configs in the process that has the GPU: checks their kernels, then times them against each other.

1. The kernel of every config is checked on a small problem against float64, by the rule of the tests.
2. All take turns, sample by sample, on the same buffers, so that a drift of the GPU's clock affects all alike. Configs
   that are clearly slower after one sample are dropped.
3. The outputs of those that could win are compared with the heuristic's on the whole problem.
4. The best one is timed against the heuristic's in new samples, since the best of many is partly the luckiest. It wins
   if it is faster by a minimum, faster in nearly all pairs of samples, and slower on no call.

A framework provides memory and CUDA graphs: an adapter's module is a :class:`Measurer`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from itertools import islice
from typing import Protocol, cast

import numpy as np

from cute_ops import testing
from cute_ops.autotune.rows import lead_of
from cute_ops.autotune.types import LEAST, Measurement, Trial
from cute_ops.declaration.binding import Binding, bind, own_lead
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Config
from cute_ops.declaration.shapes import Array
from cute_ops.jit.layout import Memory
from cute_ops.jit.plan import Plan, plan
from cute_ops.jit.target import Target

MEASURERS = ("cute_ops_torch.tools.measure",)
CHANCE = 0.001  # the most likely that a config that is just as fast may win so many pairs
SLOWER = 0.01  # the fraction by which no call of the class may get slower
SCREENED, SELECTED, CONFIRMED = 3, 7, 20  # samples of each config
FINALISTS = 3
FAR = 1.06  # a config that takes this much longer than the heuristic's in the first sample is dropped
SMALL = 1 << 16  # elements of the problem that is checked against float64
SIDE = 1024  # about the longest other dims of it, of an op that is compiled for any: the weight of a product


class Contestants(Protocol):
    """Some plans of one call, ready to run on the same buffers; the first is the heuristic's."""

    def differs(self, index: int, floors: Mapping[str, float]) -> str:
        """How a plan's outputs differ from the first one's beyond tolerance; empty if they do not.

        Args:
            floors: per output, the error allowed beyond one unit in the last place, relative to the largest element.
        """

    def sample(self, index: int) -> float:
        """Microseconds of a call of a plan."""


class Measurer(Protocol):
    """An adapter's side: runs plans and takes samples; ``broken``: whether a kernel has destroyed the context."""

    def available(self) -> bool: ...

    def device(self) -> str: ...

    def broken(self) -> bool: ...

    def run(self, binding: Binding, chosen: Plan, arrays: testing.Arrays) -> tuple[np.ndarray | None, ...]: ...

    def contest(
        self, binding: Binding, memory: Mapping[str, Memory], plans: Sequence[Plan]
    ) -> AbstractContextManager[Contestants]: ...


def measurer(named: str = "") -> Measurer:
    """The first adapter that can measure here, or the one of this name.

    Raises:
        RuntimeError: none can; says why.
    """
    problems = []
    for name in [named] if named else MEASURERS:
        try:
            found = cast(Measurer, import_module(name))
        except ImportError as error:
            problems.append(f"{name} cannot be imported ({error})")
            continue
        if found.available():
            return found
        problems.append(f"{name} finds no GPU")
    raise RuntimeError(f"cute_ops: tuning needs a GPU and PyTorch: {'; '.join(problems)}")


def measure(
    trials: Sequence[Trial],
    configs: Sequence[Config],
    target: Target,
    by: Measurer,
    least: float = LEAST,
    trying: Callable[[int], None] = lambda index: None,
) -> Measurement:
    """Check and time configs, the heuristic's first, on calls of one class.

    Args:
        target: this process's GPU.
        by: the framework that runs kernels.
        least: the fraction of the heuristic's time that a winner must save.
        trying: called with the index of the config that runs next.

    Raises:
        RuntimeError: the heuristic's config gives wrong results.
    """
    plans = [[plan(*trial, target, config=config) for config in configs] for trial in trials]
    refused: dict[int, str] = {}
    floors = _check(trials[0], plans[0], target, by, refused, trying)
    with ExitStack() as stack:
        contests = [
            _Announced(stack.enter_context(by.contest(*trial, own)), trying)
            for trial, own in zip(trials, plans, strict=True)
        ]

        def right(i: int) -> bool:
            wrong = next((w for c in contests if (w := c.differs(i, floors))), "")
            if wrong:
                refused[i] = wrong
            return not wrong

        found = select(contests, [i for i in range(1, len(configs)) if i not in refused], least, right)
    return found._replace(refused=refused, device=by.device())


class _Announced:
    """Contestants that report which plan they run next."""

    def __init__(self, contest: Contestants, trying: Callable[[int], None]) -> None:
        self._contest, self._trying = contest, trying

    def differs(self, index: int, floors: Mapping[str, float]) -> str:
        self._trying(index)
        return self._contest.differs(index, floors)

    def sample(self, index: int) -> float:
        self._trying(index)
        return self._contest.sample(index)


# Of each plan, and of each call, the samples.
Times = dict[int, list[list[float]]]


def select(
    contests: Sequence[Contestants],
    among: Sequence[int],
    least: float = LEAST,
    right: Callable[[int], bool] = lambda i: True,
) -> Measurement:
    """The fastest of some plans if it is faster than the first one beyond doubt, else the first one.

    Args:
        contests: one per call; all calls count the same.
        among: the plans besides the first.
        right: whether a plan gives right results; called for those that could win.
    """
    times: Times = {i: [[] for _ in contests] for i in (0, *among)}
    close, best = _finalists(contests, times, among, least, right)
    before = [statistics.median(t) for t in times[0]]
    if not close or _ratio(times, close[0]) >= 1 - least / 2:
        return Measurement(0, before, before, 1 - _ratio(times, best))
    return _confirmed(contests, close[0], least)


def _finalists(
    contests: Sequence[Contestants], times: Times, among: Sequence[int], least: float, right: Callable[[int], bool]
) -> tuple[list[int], int]:
    """The plans that may win, fastest first, and the fastest of which no wrong result is known; fills ``times``."""
    _rounds(contests, times, (0, *among), 1)
    left = [i for i in among if _ratio(times, i) < FAR]
    _rounds(contests, times, (0, *left), SCREENED - 1)
    ranked = sorted(among, key=lambda i: _ratio(times, i))
    promising = [i for i in ranked if i in left and _ratio(times, i) < 1 - least / 2]
    close = list(islice(filter(right, promising), FINALISTS))
    if close:
        close = [i for i in close if _ratio(times, i) < 1.03 * _ratio(times, close[0])]
        _rounds(contests, times, (0, *close), SELECTED)
        close.sort(key=lambda i: _ratio(times, i))
    return close, next((i for i in (*close, *ranked) if i in close or i not in promising), 0)


def _confirmed(contests: Sequence[Contestants], best: int, least: float) -> Measurement:
    """Whether a plan beats the first one in new samples, by more than chance."""
    fresh: Times = {i: [[] for _ in contests] for i in (0, best)}
    for half in ((0, best), (best, 0)):  # each comes first equally often
        _rounds(contests, fresh, half, CONFIRMED // 2)
        won = [sum(b < a for a, b in zip(*pairs, strict=True)) for pairs in zip(fresh[0], fresh[best], strict=True)]
        missing = CONFIRMED - len(fresh[0][0])
        chance = min(1.0, len(contests) * by_chance(max(won) + missing, CONFIRMED))  # of any of the calls
        if chance > CHANCE:
            break  # the remaining samples cannot change the result
    gain = 1 - _ratio(fresh, best)
    worst = max(_median_ratio(fresh, best, c) for c in range(len(contests)))
    wins = gain >= least and chance <= CHANCE and worst <= 1 + SLOWER
    before, after = ([statistics.median(t) for t in fresh[i]] for i in (0, best))
    return Measurement(best if wins else 0, before, after if wins else before, gain, chance=chance)


def by_chance(wins: int, pairs: int) -> float:
    """The probability that one of two equally fast plans wins at least ``wins`` of ``pairs`` pairs."""
    return sum(math.comb(pairs, k) for k in range(wins, pairs + 1)) / float(2**pairs)


def _rounds(
    contests: Sequence[Contestants], times: Mapping[int, list[list[float]]], among: Sequence[int], count: int
) -> None:
    for c, contest in enumerate(contests):
        for _ in range(count):
            for i in among:
                times[i][c].append(contest.sample(i))


def _median_ratio(times: Mapping[int, list[list[float]]], i: int, c: int) -> float:
    return statistics.median(b / a for a, b in zip(times[0][c], times[i][c], strict=False))


def _ratio(times: Mapping[int, list[list[float]]], i: int) -> float:
    """The ratio of a plan's time to the first one's, as the geometric mean over calls."""
    return statistics.geometric_mean(_median_ratio(times, i, c) for c in range(len(times[0])))


def _check(
    trial: Trial,
    plans: Sequence[Plan],
    target: Target,
    by: Measurer,
    refused: dict[int, str],
    trying: Callable[[int], None],
) -> dict[str, float]:
    """Refuse plans whose kernels give wrong results on a small problem. Returns the error that each output is allowed
    beyond one unit in the last place, relative to its largest element.
    """
    binding = trial.binding
    op = binding.op
    case = smaller(binding)
    dtype = next(iter(binding.dtypes.values()), "float32")
    arrays, attrs = testing.inputs(op, case, dtype), dict(binding.attrs)
    given = {n: None if a is None else Array(a.shape, str(a.dtype)) for n, a in arrays.items()}
    small = bind(op, given, attrs)
    exact, tolerances = testing.limits(op, arrays, attrs)
    for i, whole in enumerate(plans):
        chosen = plan(small, {}, target, config=whole.variant.config)
        if chosen.variant.symbol != whole.variant.symbol:
            break  # strided rows are only compared with the heuristic's result, on the whole problem
        trying(i)
        try:
            testing.compare(op, by.run(small, chosen, arrays), exact, tolerances)
        except AssertionError as error:
            if i == 0:
                raise RuntimeError(f"the heuristic's config gives wrong results: {error}") from error
            refused[i] = str(error)
    floors = {}
    for name, value, tolerance in zip(op.outputs, exact, tolerances, strict=True):
        if value is None or tolerance is None or binding.outputs[name] is None:
            continue
        finite = np.isfinite(value) & np.isfinite(tolerance)
        largest = float(np.max(np.abs(value), initial=0.0, where=finite))
        eps = testing.EPS.get(binding.outputs[name].dtype, 0.0)  # type: ignore[union-attr]
        loss = float(np.max(tolerance / 2 - eps * np.abs(value), initial=0.0, where=finite))
        floors[name] = loss / largest if largest else testing.EPS["float32"]
    return floors


def smaller(binding: Binding) -> Case:
    """The problem with so few rows that float64 is quick; their number is odd. Dims that are tuned by buckets, of which
    no kernel depends on one, get shorter, too, and stay multiples of what they are multiples of.
    """
    op = binding.op
    columns = max(sum(math.prod(a.shape) for a in binding.inputs.values() if a) // max(binding.rows, 1), 1)
    few = lead_of(binding, min(max(SMALL // columns, 3) | 1, max(binding.rows, 1)))
    dims = {n: few if n == binding.leading else v for n, v in binding.dims.items() if n not in op.derived}
    given = {n: (t, a) for n, t in op.inputs.items() if (a := binding.inputs[n]) is not None}
    any_size = (op.space.buckets.keys() if op.space else set()) - {*op.static, binding.leading}
    short = {n: SIDE + v % SIDE for n, v in dims.items() if n in any_size and isinstance(v, int) and v > 2 * SIDE}
    try:
        bind(op, {n: Array(t.of(dims | short), a.dtype) for n, (t, a) in given.items()}, dict(binding.attrs))
        dims |= short
    except ValueError:  # it has so many heads, as an attribute says
        pass
    leading = {n: len(own_lead(t, a)) for n, (t, a) in given.items() if t.broadcast}
    absent = tuple(n for n in op.inputs if n not in given)
    return Case("tuning", dims, dict(binding.dtypes), absent, dict(binding.attrs), leading)
