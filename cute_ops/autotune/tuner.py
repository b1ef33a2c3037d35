"""Finds the fastest config of a class of calls by measuring on the GPU.

Configs that do not fit the SM are dropped. The others are compiled in the pool; the kernels of later classes compile
while earlier classes are measured. A bad config can write out of bounds or hang, which destroys the CUDA context, so
configs are checked and timed in a subprocess (:mod:`cute_ops.autotune.bench_process`), as
:mod:`cute_ops.autotune.compare` says.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from cute_ops.autotune import winners
from cute_ops.autotune.bench_process import BenchProcess
from cute_ops.autotune.rows import bytes_moved, resized
from cute_ops.autotune.space import objection
from cute_ops.autotune.types import LEAST, Bench, Trial
from cute_ops.autotune.winners import Winner
from cute_ops.declaration.config import Config
from cute_ops.declaration.op import Op
from cute_ops.errors import first_line
from cute_ops.files import cache_dir
from cute_ops.jit import cache, toolchain
from cute_ops.jit.cache import Built
from cute_ops.jit.layout import Memory, compact
from cute_ops.jit.plan import Signature, configured, signature
from cute_ops.jit.target import Target
from cute_ops.jit.variant import Variant

log = logging.getLogger("cute_ops")
# A class of calls for any number of rows is measured on a call that moves MANY_BYTES and on one with FEW_ROWS.
MANY_BYTES, FEW_ROWS = 128 << 20, 64
LOCK_SECONDS = 900.0  # a process that holds the lock for longer is taken to hang

_benches: dict[int, Bench] = {}  # by device


@dataclass
class Group:
    """Calls of one class: they get one config.

    Attributes:
        key: the key of the winner.
        op: their op.
        trials: the calls.
        calls: the signatures of the calls.
        configs: the configs to measure, the heuristic's first.
        variants: per call, the kernel of each config.
        refused: by index of a config, why it is not measured.
    """

    key: winners.Key
    op: Op
    trials: list[Trial] = field(default_factory=list)
    calls: list[Signature] = field(default_factory=list)
    configs: list[Config] = field(default_factory=list)
    variants: list[list[Variant]] = field(default_factory=list)
    refused: dict[winners.Items, str] = field(default_factory=dict)

    def add(self, trial: Trial, call: Signature) -> None:
        self.trials.append(trial)
        self.calls.append(call)


class Outcome(NamedTuple):
    """The result of tuning a class of calls.

    Attributes:
        op: the op's name.
        winner: the config to run them with.
        before: microseconds with the heuristic's config, by call.
        after: microseconds with the winner's, by call.
        gain: see :class:`~cute_ops.autotune.types.Measurement`.
        tried: how many configs besides the heuristic's were timed.
        refused: why other configs were not.
        problem: why nothing was measured.
    """

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
        return dict(self.winner.config) != dict(self.winner.heuristic)


def tune(
    trials: Iterable[Trial],
    target: Target,
    by: Bench,
    *,
    least: float = LEAST,
    anew: bool = False,
    known: winners.Winners | None = None,
    done: Callable[[str], None] = log.info,
    groups: Callable[[int], None] = lambda count: None,
) -> Iterator[Outcome]:
    """Measure calls, class by class; the kernels of later classes compile meanwhile. Nothing is stored here.

    Args:
        target: the GPU that ``by`` measures on.
        by: checks and times.
        least: the fraction of the heuristic's time that a winner must save.
        anew: whether to measure classes again that have a winner.
        known: the remembered winners; by default those that a program on this machine would use.
        done: called with a line of text after each compile, and before each class.
        groups: called with the number of classes before the first.
    """

    def told(future: Future[Built]) -> None:
        if not future.cancelled() and not future.exception():
            done(f"compiled {future.result().variant.describe()}")

    remembered = winners.stores() if known is None else [known]
    found = [g for g in grouped(trials, target) if anew or not any(g.key in stored for stored in remembered)]
    groups(len(found))
    for group in found:
        _plan(group)
    with cache.building(v for group in found for variants in group.variants for v in variants) as built:
        for future in built.values():
            future.add_done_callback(told)
        for group in found:
            done(group.key[0])
            yield _measured(group, target, by, least, built)


def now(call: Signature, memory: Mapping[str, Memory], target: Target, device: int) -> Config:
    """The fastest config of a call, measured and stored now unless another process has just done so; the heuristic's if
    measuring fails, which is logged.
    """
    op, problem = call.binding.op, call.problem
    group = _group(op, call)
    group.add(Trial(call.binding, memory), call)
    name = "tuning-" + hashlib.sha256(repr(group.key).encode()).hexdigest()[:24]
    try:
        with cache_dir.locked(cache_dir.folder(), name, LOCK_SECONDS):
            known = winners.remembered(op, problem, group.configs[0], group.key, anew=True)
            if known is not None:
                return known
            (outcome,) = tune(group.trials, target, bench(device), anew=True)
            if outcome.problem:
                raise RuntimeError(outcome.problem)
            winners.remember([outcome.winner])
        log.info("tuned %s: %s", group.key[0], describe(outcome))
        return outcome.winner.config
    except Exception as error:  # the program must run even if nothing can be measured
        log.warning(
            "%s is not tuned (%s: %s): it runs with the heuristic's config", group.key[0], type(error).__name__, error
        )
        return group.configs[0]


def bench(device: int = 0) -> Bench:
    """The subprocess that measures on a GPU, one per GPU; it ends after a while without requests."""
    return _benches.setdefault(device, BenchProcess(device))


def describe(outcome: Outcome) -> str:
    """One line for people."""
    if outcome.problem:
        return outcome.problem
    times = ", ".join(f"{us:.2f}" for us in outcome.before)
    if not outcome.changed:
        return f"the heuristic's config stays, {times} us; the best of {outcome.tried} others gained {outcome.gain:.1%}"
    other = ", ".join(f"{us:.2f}" for us in outcome.after)
    return f"{changes(outcome.winner)}: {times} us -> {other} us, {outcome.gain:.1%} less; {outcome.tried} tried"


def changes(winner: Winner) -> str:
    """How a winner's config differs from the heuristic's: ``threads 128 -> 256``."""
    names = [n for n in {**winner.heuristic, **winner.config} if winner.heuristic.get(n) != winner.config.get(n)]
    return ", ".join(f"{n} {winner.heuristic.get(n, '-')} -> {winner.config.get(n, '-')}" for n in names)


def grouped(trials: Iterable[Trial], target: Target) -> list[Group]:
    """Calls by class; calls of ops without other configs are left out."""
    groups: dict[winners.Key, Group] = {}
    for trial in trials:
        op = trial.binding.op
        if op.space is None or trial.binding.empty:
            continue
        call = signature(*trial, target)
        group = _group(op, call)
        groups.setdefault(group.key, group).add(trial, call)
    for group in groups.values():
        for trial, call in list(_others(group, target)):
            group.add(trial, call)
    return list(groups.values())


def _group(op: Op, call: Signature) -> Group:
    """The class of a call, without calls yet."""
    heuristic = op.config(call.problem)
    return Group(winners.key_of(op, call.problem, heuristic), op, configs=[dict(heuristic)])


def _others(group: Group, target: Target) -> Iterator[tuple[Trial, Signature]]:
    """A call with few rows and one with many, if the class is for any number of rows and its calls lack such ones."""
    op, (binding, memory) = group.op, group.trials[0]
    given = {n: a for n, a in binding.inputs.items() if a}
    flat = all(memory[n].strides == compact(a.shape) for n, a in given.items() if n in memory)
    if op.space is None or binding.leading in ("", *op.space.buckets) or not flat or not binding.rows:
        return
    counts = [trial.binding.rows for trial in group.trials]
    many = max(MANY_BYTES * binding.rows // max(bytes_moved(binding), 1), 1)
    wanted = [FEW_ROWS] if min(counts) > 16 * FEW_ROWS else []
    wanted += [many] if max(counts) < many // 4 else []
    for rows in wanted:
        other = resized(binding, rows)
        placed = {n: Memory(compact(a.shape), memory[n].address) for n, a in other.inputs.items() if a and n in memory}
        call = signature(other, placed, target)
        if _group(op, call).key == group.key:
            yield Trial(other, placed), call


def _plan(group: Group) -> None:
    """Set the configs that fit the target, and their variants."""
    space, problem = group.op.space, group.calls[0].problem
    for config in space.others(problem, group.configs[0], group.op.name) if space else ():
        reason = objection(space, problem, config, group.op.name) if space else ""
        if reason:
            group.refused[winners.items(config)] = reason
        else:
            group.configs.append(config)
    group.variants = [[configured(call, config).variant for config in group.configs] for call in group.calls]


def _problem(built: Future[Built]) -> str:
    """Why a variant does not compile; waits until that is known."""
    error = built.exception() or built.result().error
    return str(error).partition("\n")[0] if error else ""


def _measured(group: Group, target: Target, by: Bench, least: float, built: Mapping[str, Future[Built]]) -> Outcome:
    call, heuristic = group.key
    stays = Winner(call, dict(heuristic), dict(heuristic))

    def nothing(problem: str) -> Outcome:
        return Outcome(group.op.name, stays, [], [], 0.0, 0, group.refused, problem)

    configs = []
    for i, config in enumerate(group.configs):
        # One config is one kernel for all calls of a class, except where layouts differ.
        error = next((e for variants in group.variants if (e := _problem(built[variants[i].symbol]))), "")
        if error and i == 0:
            return nothing(error)
        if error:
            group.refused[winners.items(config)] = error
        else:
            configs.append(config)
    try:
        found = by.measure(group.trials, configs, target, least)
    except Exception as error:  # for instance out of memory: other classes may still be measured
        return nothing(first_line(error))
    group.refused.update((winners.items(configs[i]), why) for i, why in found.refused.items())
    tried = len(configs) - 1 - len(found.refused)
    versions = dict(zip((toolchain.DSL, toolchain.TVM_FFI), toolchain.versions(), strict=True))
    measured = {
        "us": [[round(a, 3), round(b, 3)] for a, b in zip(found.before, found.after, strict=True)],
        "rows": [trial.binding.rows for trial in group.trials], "tried": tried, "gpu": found.device,
        "date": datetime.now(UTC).date().isoformat(), "sources": winners.sources_of(group.op), **versions,
    }  # fmt: skip
    winner = Winner(call, dict(heuristic), configs[found.which], measured)
    return Outcome(group.op.name, winner, found.before, found.after, found.gain, tried, group.refused)
