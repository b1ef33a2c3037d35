"""Tuning with a GPU's figures made up: what is tried, what wins, what is remembered, what is refused."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer

from cute_ops import (
    FLOATS,
    Array,
    Case,
    Needs,
    Op,
    Problem,
    Space,
    Tensor,
    Tuning,
    fused,
    processes,
    testing,
    vary,
    widen,
)
from cute_ops.__main__ import cache_info
from cute_ops.aot import build
from cute_ops.autotune import dispatch, winners
from cute_ops.autotune import tuner as tuners
from cute_ops.autotune.bench_process import BenchProcess
from cute_ops.autotune.compare import Measurer, by_chance, measure, select
from cute_ops.autotune.dispatch import choose, foresee
from cute_ops.autotune.rows import resized
from cute_ops.autotune.space import objection
from cute_ops.autotune.tuner import Outcome, tune
from cute_ops.autotune.types import Measurement, Trial
from cute_ops.autotune.winners import Winner
from cute_ops.calls import manifest
from cute_ops.cli import calls
from cute_ops.cli import tuning as command
from cute_ops.composite.linear_add_rmsnorm import linear_add_rstd
from cute_ops.declaration.binding import Binding, bind
from cute_ops.declaration.config import POWERS, Config
from cute_ops.errors import CompileError
from cute_ops.jit import cache
from cute_ops.jit.cache import Built
from cute_ops.jit.layout import Memory
from cute_ops.jit.plan import Plan, signature
from cute_ops.jit.target import Target, parse
from cute_ops.kernels.gemm.config import GemmConfig
from cute_ops.ops import OPS, PARTS, rmsnorm, rope, silu_mul
from cute_ops.ops.gemm.linear import linear, linear_dweight
from cute_ops.ops.gemm.named import gated_linear, linear_gelu

SM90 = parse("sm_90a")
X = Tensor("*m n", "T")


def make_op(
    config: Callable[[Problem], dict[str, int]] = lambda problem: {"threads": 128},
    space: Space | None = vary(threads=(64, 128, 256, 2048, 100)),  # noqa: B008
    kernel: str = "tests.ops.copying:Copy",
) -> Op:
    return Op(
        "doubling", inputs={"x": X}, outputs={"out": X}, dtypes={"T": FLOATS}, reference=lambda xp, x: x + x,
        cases=(Case("one", {"m": (3,), "n": 512}),), kernel=kernel, tuning=Tuning(config, space),
    )  # fmt: skip


def trial(op: Op, rows: int = 4096, n: int = 64, dtype: str = "bfloat16") -> Trial:
    return Trial(bind(op, {"x": Array((rows, n), dtype)}), {})


class Fake:
    """A measurer whose kernels take a time that follows from their tile, with noise; ``wrong`` ones err."""

    def __init__(self, us: Mapping[int, float], noise: float = 0.01, wrong: Sequence[int] = (), off: float = 1.5):
        self.us, self.noise, self.wrong, self.off = us, noise, wrong, off
        self.random = random.Random(0)
        self.samples: list[int] = []

    def available(self) -> bool:
        return True

    def device(self) -> str:
        return "a GPU made up"

    def broken(self) -> bool:
        return False

    def run(self, binding: Binding, chosen: Plan, arrays: testing.Arrays) -> tuple[np.ndarray | None, ...]:
        threads = chosen.variant.config["threads"]
        scale = self.off if threads in self.wrong else 1
        return tuple(
            None if a is None else (a * np.asarray(scale)).astype(a.dtype)
            for a in testing.run_reference(binding.op, arrays, binding.attrs)
        )

    @contextmanager
    def contest(self, binding: Binding, memory: Mapping[str, Memory], plans: Sequence[Plan]) -> Iterator[Any]:
        outer = self

        class Contest:
            def differs(self, index: int, floors: Mapping[str, float]) -> str:
                assert set(floors) == set(binding.op.outputs) and all(0 < f < 1e-4 for f in floors.values())
                return ""

            def sample(self, index: int) -> float:
                threads = plans[index].variant.config["threads"]
                outer.samples.append(threads)
                return outer.us[threads] * (1 + outer.noise * outer.random.random())

        yield Contest()


@pytest.fixture(autouse=True)
def built(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing is compiled; what would have been."""
    found: list[str] = []

    @contextmanager
    def building(variants: Any) -> Iterator[dict[str, Future[Built]]]:
        futures: dict[str, Future[Built]] = {}
        for v in variants:
            error = CompileError("no kernel") if v.config.get("threads") == 96 else None
            futures[v.symbol] = Future()
            futures[v.symbol].set_result(Built(v, 0.1, error))
            found.append(v.symbol)
        yield futures

    monkeypatch.setattr(cache, "building", building)
    monkeypatch.setattr(winners, "SHIPPED", cache_folder / "none")
    monkeypatch.setattr("cute_ops.jit.source_digest.digest", lambda *_: "0" * 8)
    return found


class InProcessBench:
    """A :class:`cute_ops.autotune.types.Bench` that measures in this process."""

    def __init__(self, by: Measurer) -> None:
        self._by = by

    def measure(self, trials: Sequence[Trial], configs: Sequence[Config], target: Target, least: float) -> Measurement:
        return measure(trials, configs, target, self._by, least)

    def close(self) -> None:
        pass


def tuned(op: Op, by: Fake, *trials: Trial, **options: Any) -> Outcome:
    (outcome,) = tune(trials or [trial(op)], SM90, InProcessBench(by), **options)
    return outcome


# --- configs -------------------------------------------------------------------------------------------------------


def test_vary_is_every_combination_but_the_heuristics() -> None:
    op = make_op(space=vary(threads=(64, 128), unroll=(1, 2)))
    assert op.space
    found = op.space.others(signature(*trial(op), SM90).problem, {"threads": 128, "unroll": 1, "other": 3})
    assert found == [
        {"threads": 128, "unroll": 2, "other": 3}, {"threads": 64, "unroll": 1, "other": 3},
        {"threads": 64, "unroll": 2, "other": 3},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tile", "arch", "reason"),
    [
        ({"threads": 256, "threads_per_row": 64, "cluster": 16}, "sm_90a", ""),
        ({"threads": 2048}, "sm_90a", "2048 threads, a CTA has at most 1024"),
        ({"threads": 100}, "sm_90a", "100 threads are not whole warps"),
        ({"threads": 256, "threads_per_row": 96}, "sm_90a", "cannot be shared out in rows of 96"),
        ({"threads": 96, "threads_per_row": 24}, "sm_90a", "cannot be shared out in rows of 24"),
        ({"threads": 128, "cluster": 2}, "sm_80", "clusters of 2 CTAs"),
        ({"threads": 128, "cluster": 3}, "sm_90a", "clusters of 3 CTAs"),
        ({"threads": 1024, "resident": 3}, "sm_90a", "3 CTAs are to be resident, 2 fit"),
        ({"threads": 128, "unroll": -1}, "sm_90a", "unroll=-1 is not a number of at least 0"),
        ({"threads": "128"}, "sm_90a", "threads='128' is not a number of at least 0"),
        ({"threads": 128, "registers": 300}, "sm_90a", "300 registers a thread, there are 255"),
        ({"threads": 512, "registers": 200}, "sm_90a", "1 CTAs are to be resident, 0 fit by threads, registers"),
        ({"threads": 128, "shared": 240_000}, "sm_90a", "240000 bytes of shared memory"),
        ({"threads": 128, "shared": 120_000}, "sm_89", "120000 bytes of shared memory"),
        ({"threads": 128, "shared": 120_000, "resident": 2}, "sm_90a", "2 CTAs are to be resident, 1 fit"),
    ],
)
def test_the_resource_model_prunes(tile: dict[str, int], arch: str, reason: str) -> None:
    def needs(problem: Problem, tile: Mapping[str, int]) -> Needs:
        return Needs(tile["threads"], tile.get("registers", 1), tile.get("shared", 0), tile.get("resident", 1))

    found = objection(Space(lambda p, t: (), needs), signature(*trial(make_op()), parse(arch)).problem, tile)
    assert found.startswith(reason) or reason in found
    assert bool(found) == bool(reason)


def test_every_op_of_ours_proposes_what_its_target_has_room_for() -> None:
    """On every SM, for short, odd and long rows; a heuristic's own tile is never one to object to."""
    count = 0
    # What writes its inputs cannot be measured.
    for op in (*(op for op in OPS if not op.mutates), *(op for op in PARTS if op.space)):
        for stage in filter(None, (op, op.grad)):
            assert stage.space is not None, stage.name
            for arch in ("sm_80", "sm_90a", "sm_120a"):
                for n in (64, 4096, 4097, 4098, 65536):
                    if parse(arch).arch == "sm_80" and stage.least_sm > 80:
                        continue
                    dims = stage.example((4096,), n)
                    dtype = "float32" if n == 4098 and "float32" in stage.dtypes.get("T", ()) else "bfloat16"
                    given = {k: Array(t.of(dims), stage.dtype_near(t, dtype)) for k, t in stage.inputs.items()}
                    problem = signature(bind(stage, given), {}, parse(arch)).problem
                    heuristic = stage.config(problem)
                    fit = [t for t in stage.space.others(problem, heuristic) if not objection(stage.space, problem, t)]
                    assert len(fit) <= 24, (stage.name, n, len(fit))
                    # A cluster's CTAs take one row at a time.
                    assert all(
                        t.get("cluster", 1) == 1 or t["threads"] == t.get("threads_per_row", t["threads"]) for t in fit
                    )
                    count += len(fit)
                    if arch == "sm_90a":
                        reason = objection(stage.space, problem, heuristic)
                        assert not reason or "shared out" in reason, (stage.name, n, reason)
    assert count > 1000


PRODUCT_CALLS = [
    (linear, {"m": (8192,), "n": 4096, "k": 4096}), (linear, {"m": (16,), "n": 28672, "k": 4096}),
    (linear_dweight, {"m": (300,), "n": 3072, "k": 768}), (gated_linear, {"m": (8192,), "n": 14336, "k": 4096}),
    (linear_gelu, {"m": (1024,), "n": 4096, "k": 1024}), (linear.batched, {"b": (8,), "m": 100, "n": 333, "k": 200}),
    (linear_add_rstd(), {"m": (8192,), "n": 4096, "k": 4096}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "dims"), PRODUCT_CALLS, ids=lambda value: getattr(value, "name", ""))
def test_products_propose_other_tiles(op: Op, dims: dict[str, Any]) -> None:
    """All sizes of a bucket propose the same, none that registers or shared memory do not hold, and none that the model
    takes for much slower. On other GPUs there is nothing to choose from.
    """

    def proposed(dims: dict[str, Any], arch: str) -> tuple[Any, ...]:
        problem = signature(bind(op, testing.specs(op, Case("", dims), "bfloat16")), {}, parse(arch)).problem
        heuristic = op.config(problem)
        found = op.space.others(problem, heuristic)
        assert not any(objection(op.space, problem, config) for config in (heuristic, *found))
        return winners.class_of(op, problem), heuristic, found

    name, heuristic, found = proposed(dims, "sm_90a:132")
    smaller = {key: (8,) if size == (8,) else (size[0] - 1,) if isinstance(size, tuple) else size - 8
               for key, size in dims.items()}  # fmt: skip
    again = proposed(smaller, "sm_90a:132")
    assert again[0] == name
    if again[1] == heuristic:
        assert again[2] == found
    forms = [GemmConfig.of(config) for config in found]
    assert 3 <= len(found) <= 40
    assert {(c.expression, c.reads, c.writes) for c in forms} == {
        tuple(heuristic.get(key, getattr(forms[0], key)) for key in ("expression", "reads", "writes"))
    }
    assert {4, 16} <= {c.group for c in forms}
    made = Winner(name, heuristic, found[-1])
    assert winners.parse(winners.dump([made])) == {made.key: made}
    assert proposed(dims, "sm_80")[2] == []


def test_products_are_tuned_at_the_sizes_of_their_cases() -> None:
    """``tune linear`` and its gradients; a winner of one number of rows says nothing of others."""
    trials = [*command._trials("linear", None, None, None)]
    sizes = {(trial.binding.op.name, trial.binding.rows, trial.binding.dims["n"]) for trial in trials}
    assert {("linear", 8192, 28672), ("linear", 16, 28672), ("linear_dweight", 8192, 4096)} <= sizes
    assert {trial.binding.rows for trial in command._trials("linear_gelu", None, None, 512)} == {512}
    # A step of the gradient that has no k has the other sizes.
    asked = command._trials("linear_gelu", None, [3072], 1024, dims=["k=768"])
    sizes = {trial.binding.op.name: (trial.binding.dims["n"], trial.binding.dims.get("k")) for trial in asked}
    assert sizes["linear_gelu"] == sizes["linear_of_dacc_dx"] == (3072, 768) and sizes["linear_gelu_bwd"][0] == 3072


class ByTile(Fake):
    """A measurer to which products are the faster the larger their tiles are, or the ``smaller``, with the kernels that
    it checked.
    """

    def __init__(self, smaller: bool = False) -> None:
        super().__init__({})
        self.smaller = smaller
        self.checked: list[tuple[str, Mapping[str, Any]]] = []

    def run(self, binding: Binding, chosen: Plan, arrays: testing.Arrays) -> tuple[np.ndarray | None, ...]:
        self.checked.append((chosen.variant.symbol, binding.dims))
        return testing.run_reference(binding.op, arrays, {**binding.attrs})

    @contextmanager
    def contest(self, binding: Binding, memory: Mapping[str, Memory], plans: Sequence[Plan]) -> Iterator[Any]:
        tiles = [self.size(plan.variant.config) for plan in plans]
        us, noise = [2.0**-9 * size if self.smaller else 2**20 / size for size in tiles], self.random.random
        yield SimpleNamespace(differs=lambda index, floors: "", sample=lambda index: (1 + 0.001 * noise()) * us[index])

    @staticmethod
    def size(config: Config) -> int:
        return int(config.get("tile_m", 1)) * int(config.get("tile_n", 1))


@pytest.mark.parametrize("op", [linear, linear_dweight, linear_gelu], ids=lambda op: op.name)
def test_kernels_of_large_products_are_checked_on_small_ones(op: Op) -> None:
    """Of the same kernels, which depend on no size."""
    by = ByTile()
    dims = {"m": (8192,), "n": 28672, "k": 4104}
    given = {name: Array(t.of(dims), op.dtype_near(t, "bfloat16")) for name, t in op.inputs.items()}
    outcome = tuned(op, by, Trial(bind(op, given, {}), {}))
    symbols = {symbol for symbol, _ in by.checked}
    assert not outcome.refused and outcome.problem == "" and outcome.tried + 1 == len(symbols)
    assert all((sizes["n"], sizes["k"]) == (1024, 1032) for _, sizes in by.checked)


def test_ops_of_functions_have_configs_to_measure_and_to_remember() -> None:
    """Their configs hold texts."""
    functions = (lambda xp, x: xp.exp(x), lambda xp, x: x - xp.max(x, axis=-1, keepdims=True))
    for op in (fused(function, name="made", operands={"x": "*m n"}) for function in functions):
        problem = signature(bind(op, {"x": Array((64, 4096), "bfloat16")}), {}, SM90).problem
        heuristic = op.config(problem)
        found = [c for c in op.space.others(problem, heuristic) if not objection(op.space, problem, c)]
        assert found
        made = Winner("made", heuristic, found[-1])
        assert winners.parse(winners.dump([made])) == {made.key: made}


def test_forwards_propose_the_same_for_any_number_of_rows() -> None:
    """A row's bits must not depend on other rows, so neither heuristics nor search spaces look at their number."""
    for op in (*OPS, *PARTS):
        if op.space is None or op.space.buckets:
            continue
        seen = []
        for rows in (100_000, 4096):
            dims = op.example((rows,), 4096)
            given = {k: Array(t.of(dims), op.dtype_near(t, "bfloat16")) for k, t in op.inputs.items()}
            problem = signature(bind(op, given), {}, SM90).problem
            heuristic = op.config(problem)
            seen.append((winners.class_of(op, problem), heuristic, op.space.others(problem, heuristic)))
        assert seen[0] == seen[1], op.name


# --- selection -----------------------------------------------------------------------------------------------------


class Times:
    """A contest of given times; ``noise`` multiplies each by up to so much more."""

    def __init__(self, *us: float, noise: float = 0.0, seed: int = 0) -> None:
        self.us, self.noise, self.random = us, noise, random.Random(seed)
        self.samples = [0] * len(us)

    def differs(self, index: int, floors: Mapping[str, float]) -> str:
        return ""

    def sample(self, index: int) -> float:
        self.samples[index] += 1
        return self.us[index] * (1 + self.noise * self.random.random())


def test_the_fastest_wins_when_it_is_clearly_faster() -> None:
    found = select([Times(100.0, 97.0, 80.0, 120.0, noise=0.02)], (1, 2, 3))
    assert found.which == 2 and 0.18 < found.gain < 0.22 and found.chance < 1e-5


def test_less_than_the_least_gain_changes_nothing() -> None:
    assert select([Times(100.0, 98.6)], (1,), least=0.02).which == 0
    assert select([Times(100.0, 98.6)], (1,), least=0.01).which == 1


def test_luck_does_not_win() -> None:
    """Twelve tiles as fast as the heuristic, all of them noisy: the best of the first samples is only lucky."""
    wins = [select([Times(*[100.0] * 13, noise=0.3, seed=s)], range(1, 13)).which for s in range(60)]
    assert wins.count(0) >= 58


def test_noise_does_not_hide_a_large_gain() -> None:
    wins = [select([Times(100.0, 70.0, noise=0.2, seed=s)], (1,)).which for s in range(20)]
    assert wins.count(1) >= 19


def test_a_call_of_the_class_that_gets_slower_forbids_it() -> None:
    fast, slow = Times(100.0, 60.0), Times(100.0, 103.0)
    assert select([fast], (1,)).which == 1
    assert select([fast, slow], (1,)).which == 0
    assert select([fast, Times(100.0, 100.5)], (1,)).which == 1


def test_time_goes_to_what_could_win() -> None:
    """Who is far behind is sampled once; who cannot win any more meets the heuristic's in half of the pairs."""
    times = Times(100.0, 130.0, 99.5, 95.0)
    assert select([times], (1, 2, 3)).which == 3
    assert times.samples == [3 + 7 + 20, 1, 3, 3 + 7 + 20]

    class Lucky(Times):
        """Ahead until it is chosen."""

        def sample(self, index: int) -> float:
            return super().sample(index) if index == 0 or self.samples[1] < 10 else 101.0

    lucky = Lucky(100.0, 90.0)
    assert select([lucky], (1,)).which == 0 and lucky.samples[0] == 3 + 7 + 10


def test_only_what_could_win_is_checked_and_the_next_takes_a_wrong_ones_place() -> None:
    asked = []

    def right(index: int) -> bool:
        asked.append(index)
        return index != 2

    found = select([Times(100.0, 90.0, 80.0, 100.0, 120.0)], (1, 2, 3, 4), right=right)
    assert found.which == 1 and asked == [2, 1]
    # Of what is wrong nothing is promised.
    found = select([Times(100.0, 104.0, 80.0)], (1, 2), right=lambda index: False)
    assert found.which == 0 and found.gain == pytest.approx(-0.04)


def test_chance() -> None:
    assert by_chance(20, 20) == 2.0**-20 and by_chance(0, 20) == 1.0
    assert by_chance(15, 20) == pytest.approx(0.0207, abs=1e-4)


# --- one class of calls --------------------------------------------------------------------------------------------


def test_the_winner_is_chosen_and_remembered(built: list[str], cache_folder: Path) -> None:
    op = make_op()
    fake = Fake({64: 80.0, 128: 100.0, 256: 90.0})
    outcome = tuned(op, fake)
    assert outcome.winner.config == {"threads": 64} and outcome.changed and outcome.tried == 2
    # What cannot run was not compiled, and says why.
    assert len(set(built)) == 3
    assert {dict(tile)["threads"]: why.split(",")[0] for tile, why in outcome.refused.items()} == {
        2048: "2048 threads", 100: "100 threads are not whole warps",
    }  # fmt: skip
    assert tuners.describe(outcome).startswith("threads 128 -> 64: 100.")

    heuristic = choose(*trial(op), SM90)
    winners.remember([outcome.winner])
    assert choose(*trial(op), SM90).variant == heuristic.variant  # this process has decided
    dispatch.forget()
    found = choose(*trial(op), SM90)
    assert found.variant.config == {"threads": 64} and found.variant.digest != heuristic.variant.digest
    # For any number of rows, but no other length, dtype, alignment or SM.
    assert choose(*trial(op, rows=3), SM90).variant == found.variant
    for other in (trial(op, n=128), trial(op, dtype="float16"), Trial(trial(op).binding, {"x": Memory((64, 1), 2)})):
        assert choose(*other, SM90).variant.config == {"threads": 128}
    assert choose(*trial(op), parse("sm_90a:114")).variant.config == {"threads": 128}
    (line,) = json.loads((cache_folder / "tuning.json").read_text())["winners"]
    assert (
        line["call"] == "doubling(tests.ops.copying:Copy) sm_90a:132 x:bfloat16/16 out:bfloat16/16 n=64"
        and line["gpu"] == "a GPU made up"
    )


def test_the_heuristic_stays_and_that_is_remembered_too() -> None:
    op, fake = make_op(), Fake({64: 100.0, 128: 100.0, 256: 120.0})
    outcome = tuned(op, fake)
    assert not outcome.changed and "the heuristic's config stays" in tuners.describe(outcome)
    winners.remember([outcome.winner])
    dispatch.forget()
    assert not list(tune([trial(op)], SM90, InProcessBench(fake)))
    assert len(list(tune([trial(op)], SM90, InProcessBench(fake), anew=True))) == 1


def test_a_wrong_result_never_wins() -> None:
    op = make_op()
    outcome = tuned(op, Fake({64: 50.0, 128: 100.0, 256: 90.0}, wrong=[64]))
    assert outcome.winner.config == {"threads": 256}
    assert "exceeds" in outcome.refused[("threads", 64),]
    # Nor does one that errs by less than it shows at a glance.
    slightly = tuned(op, Fake({64: 50.0, 128: 100.0, 256: 90.0}, wrong=[64], off=1.03))
    assert slightly.winner.config == {"threads": 256}


def test_a_wrong_heuristic_is_an_error_not_a_winner() -> None:
    outcome = tuned(make_op(), Fake({64: 50.0, 128: 100.0, 256: 90.0}, wrong=[128]))
    assert "the heuristic's config gives wrong results" in outcome.problem and not outcome.changed


def test_what_does_not_compile_is_left_out() -> None:
    op = make_op(space=vary(threads=(64, 96)))
    outcome = tuned(op, Fake({64: 80.0, 128: 100.0}))
    assert outcome.winner.config == {"threads": 64} and outcome.refused[("threads", 96),] == "no kernel"
    broken = make_op(config=lambda problem: {"threads": 96})
    assert tuned(broken, Fake({64: 80.0})).problem == "no kernel"


def test_calls_of_one_class_get_one_config() -> None:
    op, fake = make_op(), Fake({64: 80.0, 128: 100.0, 256: 90.0})
    outcome = tuned(op, fake, trial(op, rows=512), trial(op, rows=8192))
    assert outcome.winner.measured["rows"][:2] == [512, 8192] and len(outcome.before) == 3
    by_rows = make_op(space=vary(threads=(64,), buckets={"m": POWERS}))
    names = [
        w.winner.call for w in tune([trial(by_rows, rows=r) for r in (60, 64, 2000, 90000)], SM90, InProcessBench(fake))
    ]
    assert [call.split()[-1] for call in names] == ["rows<=64", "rows>1024"]


def test_winners_of_different_sizes_differ() -> None:
    """By dims that are not static: of a product, whose rows are a dim, and whose static dims are all in the class."""
    op = Op(
        "product", inputs={"x": Tensor("m k", "T"), "w": Tensor("n k", "T")}, outputs={"out": Tensor("m n", "T")},
        dtypes={"T": FLOATS}, static=("n",), kernel="tests.ops.copying:Copy",
        reference=lambda xp, x, w: xp.astype(xp.matmul(*widen(xp, x, w.T)), x.dtype),
        tuning=Tuning(lambda p: {"threads": 128}, vary(threads=(64, 256), buckets={"m": (64, 512), "k": (100,)})),
    )  # fmt: skip

    def call(m: int, k: int) -> Trial:
        return Trial(bind(op, {"x": Array((m, k), "bfloat16"), "w": Array((32, k), "bfloat16")}), {})

    sizes = (1, 8), (64, 100), (65, 100), (512, 101), (513, 8)
    tails = [winners.class_of(op, signature(*call(*each), SM90).problem).partition(" n=32 ")[2] for each in sizes]
    assert tails == ["m<=64 k<=100", "m<=64 k<=100", "m<=512 k<=100", "m<=512 k>100", "m>512 k<=100"]
    few = tuned(op, Fake({64: 80.0, 128: 100.0, 256: 90.0}), call(8, 8)).winner
    many = tuned(op, Fake({64: 95.0, 128: 100.0, 256: 70.0}), call(4096, 8)).winner
    assert len(few.measured["us"]) == 1  # a product without rows is not measured again with more
    winners.remember([few, many])
    dispatch.forget()
    chosen = [choose(*call(m, 8), SM90).variant.config["threads"] for m in (64, 65, 4096)]
    assert chosen == [64, 128, 256]


def test_keys_of_rows_are_those_of_shipped_winners() -> None:
    backward = rmsnorm.grad
    assert backward is not None
    for rows, word in {0: "<=1", 1: "<=1", 3: "<=4", 1024: "<=1024", 1025: ">1024"}.items():
        x = Array((rows, 64), "bfloat16")
        problem = signature(bind(backward, {"x": x, "dout": x}), {}, SM90).problem
        assert winners.class_of(backward, problem).endswith(f" n=64 rows{word}")


def test_few_rows_and_many_are_measured_where_one_config_serves_both() -> None:
    op, fake, n = make_op(), Fake({64: 80.0, 128: 100.0, 256: 90.0}), 4096
    many = tuners.MANY_BYTES // (2 * 2 * n)
    for rows, expected in ((8, [8, many]), (50_000, [50_000, 64]), (1024, [1024, many]), (4096, [4096, 64])):
        assert tuned(op, fake, trial(op, rows, n)).winner.measured["rows"] == expected
    bound = bind(op, {"x": Array((2, 4, n), "bfloat16")})
    assert tuned(op, fake, Trial(bound, {"x": Memory((4 * n, n, 1), 16)})).winner.measured["rows"] == [8, many]
    assert tuned(op, fake, Trial(bound, {"x": Memory((8 * n, 2 * n, 1))})).winner.measured["rows"] == [8]
    by_rows = make_op(space=vary(threads=(64,), buckets={"m": POWERS}))
    assert tuned(by_rows, fake, trial(by_rows, 8, n)).winner.measured["rows"] == [8]


def test_calls_with_another_number_of_rows() -> None:
    """Leading dims stay as many, and inputs that are shared by the outer ones are shared."""
    x, table = Array((4, 32, 2, 64), "bfloat16"), Array((32, 32), "float32")
    call = bind(rope, {"x": x, "cos": table, "sin": table})
    assert {n: a and a.shape for n, a in resized(call, 1000).inputs.items()} == {
        "x": (1, 1000, 2, 64), "cos": (1000, 32), "sin": (1000, 32),
    }  # fmt: skip


def test_attributes_are_in_a_class_where_they_differ() -> None:
    x = {"x": Array((4, 64), "bfloat16")}
    names = [
        winners.class_of(rmsnorm, signature(bind(rmsnorm, x, attrs), {}, SM90).problem)
        for attrs in ({}, {"eps": 1e-3}, {"weight_offset": 1.0}, {"weight_offset": 2.0})
    ]
    assert names[0] == names[1] and names[2] == names[3] == names[0] + " weight_offset!=0"


def test_an_op_without_candidates_is_left_alone() -> None:
    op = make_op(space=None)
    assert not list(tune([trial(op)], SM90, InProcessBench(Fake({128: 1.0}))))
    assert choose(*trial(op), SM90).variant.config == {"threads": 128}


def test_a_dynamic_kernel_is_left_alone() -> None:
    op = make_op()
    winners.remember([tuned(op, Fake({64: 80.0, 128: 100.0, 256: 90.0})).winner])
    dispatch.forget()
    assert foresee(*trial(op), SM90, fixed=False).variant.config == {"threads": 128}
    assert choose(*trial(op), SM90).variant.config == {"threads": 64}


def test_rows_with_strides_are_tuned_too() -> None:
    op = make_op()
    bound = bind(op, {"x": Array((8, 512, 64), "bfloat16")})
    strided = Trial(bound, {"x": Memory((512 * 192, 192, 1))})
    outcome = tuned(op, Fake({64: 80.0, 128: 100.0, 256: 90.0}), strided)
    assert outcome.changed


# --- in another process ---------------------------------------------------------------------------------------------

MEASURER = """
import os, time
from concurrent.futures import Future
from contextlib import contextmanager
from cute_ops import testing

spoilt = []

def available(): return True
def device(): return "a GPU made up"
def broken(): return bool(spoilt)

def run(binding, chosen, arrays):
    threads = chosen.variant.config["threads"]
    if threads == 32:
        os.abort()
    if threads == 64:
        spoilt.append(threads)
        raise RuntimeError("an illegal memory access")
    if threads == 96:
        open(os.environ["CUTE_OPS_TEST_HANGS"], "w").close()
        time.sleep(600)
    if threads == 160:
        raise MemoryError("no memory")
    print("kernels may print")
    return testing.run_reference(binding.op, arrays, binding.attrs)

class Contest:
    def __init__(self, plans): self.plans = plans
    def differs(self, index, floors): return "a race?" if self.plans[index].variant.config["threads"] == 256 else ""
    def sample(self, index):
        if self.plans[index].variant.config["threads"] == 192:
            os.abort()
        return float(self.plans[index].variant.config["threads"])

@contextmanager
def contest(binding, memory, plans): yield Contest(plans)
"""


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BenchProcess]:
    (tmp_path / "made_up_measurer.py").write_text(MEASURER)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    made = BenchProcess(measurer="made_up_measurer")
    yield made
    made.close()


def silu_trial() -> Trial:
    return Trial(bind(silu_mul, dict.fromkeys(("gate", "up"), Array((512, 64), "bfloat16"))), {})


@pytest.mark.slow
@pytest.mark.fault(
    "a config that is measured aborts, breaks the CUDA context or never ends",
    "another process continues with the other configs", "nothing",
)  # fmt: skip
def test_a_config_that_ends_its_process_is_left_out(
    other: BenchProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "hangs"
    monkeypatch.setenv("CUTE_OPS_TEST_HANGS", str(hangs))
    stop, now = other._process.stop, [0.0]

    def clock() -> float:
        """Passes the limit of a minute at once while a config hangs, and never on a busy machine."""
        now[0] += 90.0 * hangs.exists()
        return now[0]

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(other._process, "stop", lambda: (hangs.unlink(missing_ok=True), stop()))
    tiles = [{"threads": n} for n in (512, 32, 64, 96, 256, 192, 480, 448)]
    found = other.measure([silu_trial()], tiles, SM90, 0.02)
    assert found.which == 7 and found.before == [512.0] and found.after == [448.0] and found.device == "a GPU made up"
    assert {i: text.partition(":")[0] for i, text in found.refused.items()} == {
        1: "died with signal 6", 2: "RuntimeError", 3: "gave no answer within 60 s", 4: "a race?",
        5: "died with signal 6",
    }  # fmt: skip
    # The process that is left goes on.
    assert other.measure([silu_trial()], tiles[:1], SM90, 0.02).which == 0


@pytest.mark.parametrize(
    ("visible", "names"), [(None, ["0", "1"]), ("5,3", ["5", "3"]), ("GPU-a,GPU-b,-1,2", ["GPU-a", "GPU-b"])]
)
def test_devices_by_the_names_that_a_subprocess_takes(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for count in range(3):
        monkeypatch.setattr(command.target, "device_count", lambda count=count: count)
        assert command.target.device_names() == names[:count]


@pytest.mark.slow
def test_what_is_no_candidates_fault_is_an_error(other: BenchProcess) -> None:
    with pytest.raises(RuntimeError, match="died with signal 6"):
        other.measure([silu_trial()], [{"threads": 32}, {"threads": 512}], SM90, 0.02)
    with pytest.raises(RuntimeError, match="MemoryError: no memory"):
        other.measure([silu_trial()], [{"threads": 512}, {"threads": 160}], SM90, 0.02)
    with pytest.raises(RuntimeError, match="no module holds the declaration of doubling"):
        other.measure([trial(make_op())], [{"threads": 512}], SM90, 0.02)
    with pytest.raises(RuntimeError, match=r"tuning needs a GPU.*nothing cannot be imported"):
        BenchProcess(measurer="nothing").start()


# --- at run time ---------------------------------------------------------------------------------------------------


def test_a_program_measures_what_it_calls_when_asked(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    op, fake = make_op(), Fake({64: 80.0, 128: 100.0, 256: 90.0})
    monkeypatch.setattr(tuners, "bench", lambda device=0: InProcessBench(fake))
    assert choose(*trial(op), SM90, device=0).variant.config == {"threads": 128} and not fake.samples
    dispatch.forget()
    monkeypatch.setenv("CUTE_OPS_TUNE", "1")
    assert choose(*trial(op), SM90).variant.config == {"threads": 128}, "not where no GPU is"
    assert choose(*trial(op), SM90, device=0).variant.config == {"threads": 128}, "decided: bits stay what they are"
    dispatch.forget()
    with caplog.at_level(logging.INFO, "cute_ops"):
        assert choose(*trial(op), SM90, device=0).variant.config == {"threads": 64}
    assert "tuned doubling(tests.ops.copying:Copy) sm_90a:132" in caplog.text
    count = len(fake.samples)
    for again in range(2):
        assert choose(*trial(op, rows=7 + again), SM90, device=0).variant.config == {"threads": 64}
        dispatch.forget()  # as a new process
    assert len(fake.samples) == count
    monkeypatch.setenv("CUTE_OPS_TUNE", "0")
    assert choose(*trial(op), SM90, device=0).variant.config == {"threads": 128}


def test_a_program_runs_where_measuring_fails(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def bench(device: int) -> Any:
        raise RuntimeError("no GPU here")

    monkeypatch.setenv("CUTE_OPS_TUNE", "1")
    monkeypatch.setattr(tuners, "bench", bench)
    assert choose(*trial(make_op()), SM90, device=0).variant.config == {"threads": 128}
    assert "is not tuned (RuntimeError: no GPU here): it runs with the heuristic's config" in caplog.text


CALLING = """
import sys
from pathlib import Path
from cute_ops import Array
from cute_ops.jit import cache
from cute_ops.autotune import tuner
from cute_ops.autotune.bench_process import BenchProcess
from cute_ops.declaration.binding import bind
from cute_ops.autotune.dispatch import choose
from cute_ops.ops import silu_mul
from cute_ops.jit.target import parse

cache.build = lambda variant: 0.1

class Counted(BenchProcess):
    def measure(self, *given):
        with open(sys.argv[1], "a") as file:
            file.write("measured\\n")
        return super().measure(*given)

tuner.bench = lambda device: Counted(measurer="made_up_measurer")
call = bind(silu_mul, dict.fromkeys(("gate", "up"), Array((512, 64), "bfloat16")))
print(dict(choose(call, {}, parse("sm_90a"), device=0).variant.config)["threads"])
"""


@pytest.mark.slow
def test_of_two_programs_that_call_at_once_one_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_up_measurer.py").write_text(MEASURER)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(winners.__file__).parents[1]}", "CUTE_OPS_TUNE": "1"}
    command = [sys.executable, "-c", CALLING, str(tmp_path / "log")]
    programs = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [program.communicate(timeout=600)[0] for program in programs] == ["128\n", "128\n"]
    assert (tmp_path / "log").read_text() == "measured\n"


# --- on disk -------------------------------------------------------------------------------------------------------


def remembered(tile: Mapping[str, int], op: Op | None = None, path: Path | None = None) -> Op:
    op = op or make_op()
    call = winners.class_of(op, signature(*trial(op), SM90).problem)
    winners.remember([Winner(call, {"threads": 128}, tile)], path)
    dispatch.forget()
    return op


@pytest.mark.fault("a tuning file names a config that the op does not propose", "the config is not compiled", "nothing")
def test_a_config_that_the_op_does_not_propose_is_never_used() -> None:
    """Whoever wrote the file: it may only choose among the op's configs."""
    op = remembered({"threads": 512})
    assert choose(*trial(op), SM90).variant.config == {"threads": 128}
    assert choose(*trial(make_op(space=vary(threads=(512,)))), SM90).variant.config == {"threads": 128}, "decided"
    dispatch.forget()
    assert choose(*trial(make_op(space=vary(threads=(512,)))), SM90).variant.config == {"threads": 512}


@pytest.mark.parametrize("threads", [100, 2048])
def test_a_proposed_config_that_cannot_run_is_never_used(threads: int, caplog: pytest.LogCaptureFixture) -> None:
    """Measuring leaves it out; a file may name it."""
    op = remembered({"threads": threads})
    with caplog.at_level("INFO", "cute_ops"):
        assert choose(*trial(op), SM90).variant.config == {"threads": 128}
    assert f"{threads} threads" in caplog.text


def test_when_the_heuristic_changes_the_winner_is_forgotten() -> None:
    remembered({"threads": 64})
    changed = make_op(config=lambda problem: {"threads": 256})
    assert choose(*trial(changed), SM90).variant.config == {"threads": 256}


def test_ops_of_one_name_have_winners_of_their_own() -> None:
    """Two packages may each have an op of that name, with kernels that take other tiles."""
    remembered({"threads": 64})
    assert choose(*trial(make_op()), SM90).variant.config == {"threads": 64}
    assert choose(*trial(make_op(kernel="others:Copy")), SM90).variant.config == {"threads": 128}


def test_when_the_kernel_changes_the_winner_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    op = make_op()
    outcome = tuned(op, Fake({64: 80.0, 128: 100.0, 256: 90.0}))
    winners.remember([outcome.winner])
    monkeypatch.setattr("cute_ops.jit.source_digest.digest", lambda *_: "1" * 64)
    dispatch.forget()
    assert choose(*trial(op), SM90).variant.config == {"threads": 128}
    monkeypatch.setattr("cute_ops.jit.source_digest.digest", lambda *_: "0" * 8)
    dispatch.forget()
    assert choose(*trial(op), SM90).variant.config == {"threads": 64}


@pytest.mark.fault(
    "a tuning file is damaged", "a warning; the heuristics' configs run; the next measurement renames the file",
    "what was measured, until the file is repaired",
)  # fmt: skip
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "it is a list, expected an object"),
        ('{"format": 2}', "it has no 'winners'"),
        ('{"format": 1, "winners": []}', "it has format 1, this version of cute_ops reads 2"),
        ('{"format": true, "winners": []}', "format is true, expected an integer"),
        (
            '{"format": 2, "winners": [{"call": "x", "heuristic": {}, "config": {"threads": "many"}}]}',
            'winners[0].config.threads is "many", expected an integer',
        ),
        (
            '{"format": 2, "winners": [{"call": "x", "heuristic": {}, "config": 7}]}',
            "winners[0].config is 7, expected an object",
        ),
        ("\x00" * 99, "Expecting value"),
        ("[" * 1_000_000, "its JSON is nested too deeply"),
        ('{"format": 2, "winners": [' * 100_000, "its JSON is nested too deeply"),
    ],
)
def test_a_file_that_is_none_is_ignored_with_a_sentence(
    text: str, reason: str, cache_folder: Path, caplog: Any
) -> None:
    op = remembered({"threads": 64})
    (cache_folder / "tuning.json").write_text(text)
    assert choose(*trial(op), SM90).variant.config == {"threads": 128}
    (record,) = caplog.records
    assert "tuning.json is ignored: " in record.getMessage() and reason in record.getMessage()
    # Measuring anew keeps it under another name.
    assert remembered({"threads": 64}) and choose(*trial(op), SM90).variant.config == {"threads": 64}
    assert (cache_folder / "tuning.json.damaged").read_text() == text


@pytest.mark.fault(
    "a tuning file has a newer version's format",
    "the heuristics' configs run; measuring raises an error that says what to do", "nothing",
)  # fmt: skip
def test_a_file_of_a_newer_version_is_left_alone(cache_folder: Path, caplog: Any) -> None:
    op = remembered({"threads": 64})
    newer = '{"format": 99, "winners": {"of": "another kind"}}'
    for path in (cache_folder / "tuning.json", cache_folder / "shipped.json"):
        path.write_text(newer)
        with pytest.raises(cache.CacheError, match=r"of a newer version of cute_ops .*: what was measured is not kept"):
            remembered({"threads": 64}, path=None if path.name == "tuning.json" else path)
        assert path.read_text() == newer
    assert choose(*trial(op), SM90).variant.config == {"threads": 128}
    assert "it has format 99, this version of cute_ops reads 2" in caplog.text


@pytest.mark.fault("the tuning file is a link, and something is measured", "an error", "nothing")
def test_a_link_is_not_written_through(cache_folder: Path, tmp_path: Path) -> None:
    """It was replaced by a file that lacked what the linked one held."""
    remembered({"threads": 64})
    (cache_folder / "tuning.json").rename(tmp_path / "elsewhere.json")
    (cache_folder / "tuning.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(cache.CacheError, match="is a link: what was measured is not kept; name the file"):
        remembered({"threads": 256})
    assert len(winners.read(tmp_path / "elsewhere.json")) == 1


@pytest.mark.fault("others can write the tuning file, or it is a link", "it is ignored; a warning", "nothing")
def test_a_file_that_others_can_write_and_a_link_are_ignored(cache_folder: Path, tmp_path: Path, caplog: Any) -> None:
    op = remembered({"threads": 64})
    cache_folder.chmod(0o777)
    assert choose(*trial(op), SM90).variant.config == {"threads": 128} and "can be written by others" in caplog.text
    cache_folder.chmod(0o700)
    dispatch.forget()
    elsewhere = tmp_path / "elsewhere.json"
    (cache_folder / "tuning.json").rename(elsewhere)
    (cache_folder / "tuning.json").symlink_to(elsewhere)
    assert choose(*trial(op), SM90).variant.config == {"threads": 128} and "it is a link" in caplog.text


ADD = """
import sys
from cute_ops.autotune import winners
for i in range(40):
    winners.remember([winners.Winner(f"call {sys.argv[1]} {i}", {"threads": 128}, {"threads": 64})])
"""


@pytest.mark.slow
@pytest.mark.fault("3 processes store winners at once", "each adds to the file; readers see complete files", "nothing")
def test_processes_that_write_at_once_lose_nothing(cache_folder: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", ADD, str(k)]) for k in range(3)]
    while any(w.poll() is None for w in writers):
        winners.parse(
            (cache_folder / "tuning.json").read_text() if (cache_folder / "tuning.json").exists() else winners.dump([])
        )
    assert [w.returncode for w in writers] == [0, 0, 0]
    assert len(winners.read(cache_folder / "tuning.json")) == 120
    assert [p.name for p in cache_folder.iterdir()] == ["tuning.json"]


DYING = """
import os, sys
from pathlib import Path
from cute_ops.autotune import winners
os.fsync = lambda handle: os.kill(os.getpid(), 9)
winners.remember([winners.Winner("call", {"threads": 128}, {"threads": 64})], Path(sys.argv[1]))
"""


@pytest.mark.fault(
    "kill -9 while a tuning file outside the cache is written", "the next writer deletes what was left",
    "what was just measured",
)  # fmt: skip
def test_a_death_while_a_file_is_written_elsewhere(tmp_path: Path, cache_folder: Path) -> None:
    where = tmp_path / "tuned" / "x.json"
    where.parent.mkdir()
    assert subprocess.run([sys.executable, "-c", DYING, str(where)], check=False).returncode == -9
    assert [path.name[:9] for path in where.parent.iterdir()] == ["cute_tmp-"]
    remembered({"threads": 64}, path=where)
    assert list(where.parent.iterdir()) == [where]


@pytest.mark.fault("the tuning file is a pipe", "an error when it is written; no process waits for the pipe", "nothing")
def test_a_pipe_in_place_of_the_file(cache_folder: Path, caplog: Any) -> None:
    cache_folder.mkdir(mode=0o700)
    os.mkfifo(cache_folder / "tuning.json", 0o600)
    code = "from cute_ops.autotune import winners as w; w.stores(); w.remember([w.Winner('call', {}, {})])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert "holds tuning.json, which is not a file" in found.stderr
    assert "tuning.json is no file: name another one" in found.stderr


def test_a_folder_that_cannot_be_written(cache_folder: Path) -> None:
    cache_folder.write_text("a file")
    with pytest.raises(cache.CacheError, match="cannot be written: what was measured is not kept"):
        winners.remember([Winner("call", {}, {})])


def test_clearing_the_cache_keeps_what_was_measured(cache_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    op = remembered({"threads": 64})
    cache.clear()
    cache_info()
    assert "tuning.json: 1 classes of calls, 1 with another config" in capsys.readouterr().out
    assert choose(*trial(op), SM90).variant.config == {"threads": 64}


# --- shipped -------------------------------------------------------------------------------------------------------


def test_what_ships_with_the_package_comes_last(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winners, "SHIPPED", tmp_path / "tuned")
    (tmp_path / "tuned").mkdir()
    op = remembered({"threads": 256}, path=tmp_path / "tuned" / "sm_90a.json")
    assert choose(*trial(op), SM90).variant.config == {"threads": 256}
    remembered({"threads": 64}, op)
    assert choose(*trial(op), SM90).variant.config == {"threads": 64}
    with dispatch.as_shipped():
        assert choose(*trial(op), SM90).variant.config == {"threads": 256}
    assert choose(*trial(op), SM90).variant.config == {"threads": 64}
    assert (tmp_path / "tuned" / "sm_90a.json").stat().st_mode & 0o777 == 0o644


def test_what_ships_is_forgotten_when_the_kernel_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winners, "SHIPPED", tmp_path)
    op = make_op()
    winners.remember([tuned(op, Fake({64: 80.0, 128: 100.0, 256: 90.0})).winner], tmp_path / "sm_90a.json")
    for digest, threads in (("1" * 64, 128), ("0" * 8, 64)):
        monkeypatch.setattr("cute_ops.jit.source_digest.digest", lambda *_, digest=digest: digest)
        dispatch.forget()
        assert choose(*trial(op), SM90).variant.config == {"threads": threads}


def test_the_files_that_ship_are_sound_and_of_these_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """``benchmarks/tuning_gap.py --out benchmarks/results --report --ship FILE`` leaves out those that are not."""
    monkeypatch.undo()
    stages = {stage.name: stage for op in (*OPS, *PARTS) for stage in (op, op.grad) if stage}
    for path in winners.SHIPPED.glob("*.json"):
        shipped = winners.parse(path.read_text())
        assert path.read_text() == winners.dump(shipped.values())
        for winner in shipped.values():
            name, where, *_ = winner.call.split()
            assert where.startswith(path.stem)
            assert dict(winner.config) != dict(winner.heuristic)
            assert winner.measured["sources"] == winners.sources_of(stages[name]), winner.call


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake({64: 80.0, 128: 90.0, 256: 100.0, 512: 100.0})
    monkeypatch.setattr(tuners, "bench", lambda device=0: InProcessBench(fake))
    monkeypatch.setattr(command.target, "of_device", lambda: SM90)
    monkeypatch.setattr(command.target, "device_count", lambda: 1)
    return fake


def test_the_command_tunes_ops_and_manifests(
    gpu: Fake, tmp_path: Path, cache_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.console, "_width", 300)
    with pytest.raises(typer.Exit) as left:
        command.tune(["silu_mul"], n=[64])
    text = capsys.readouterr().out
    assert left.value.exit_code == 0 and "2 classes of calls: 2 changed, 0 stay with the heuristic" in text
    assert "silu_mul sm_90a:132" in text and "threads 256 -> 64" in text
    lines = "silu_mul gate:bfloat16[*,64] up:bfloat16[*,64]\nsilu_mul gate:float16[*,96] up:float16[*,96]\n"
    (tmp_path / "m.txt").write_text(lines)
    for expected in ("1 classes of calls: 1 changed", "all of them are remembered"):
        with pytest.raises(typer.Exit):
            command.tune([str(tmp_path / "m.txt")])
        assert expected in capsys.readouterr().out
    assert len(winners.read(cache_folder / "tuning.json")) == 3
    with pytest.raises(typer.Exit):
        command.tune([str(tmp_path / "m.txt")], out=tmp_path / "out.json")
    assert len(winners.read(tmp_path / "out.json")) == 2
    dispatch.forget()
    (call, _) = manifest.parse(lines)
    assert build.variant_of(call, SM90).config["threads"] == 64


def test_the_command_tunes_products(
    gpu: Fake, cache_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``tune linear``: what it finds is what calls of that class run with from then on, and other classes do not."""
    monkeypatch.setattr(tuners, "bench", lambda device=0: InProcessBench(ByTile(smaller=True)))
    monkeypatch.setattr(command.console, "_width", 300)

    def config(m: int) -> Config:
        given = {name: Array(t.of({"m": (m,), "n": 3072, "k": 768}), "bfloat16") for name, t in linear.inputs.items()}
        return dispatch.foresee(bind(linear, given, {}), {}, SM90).variant.config

    dispatch.forget()
    before, other = config(1024), config(8192)
    with pytest.raises(typer.Exit) as left:
        command.tune(["linear"], dtype=["bfloat16"], n=[3072], rows=1024, dim=["k=768"])
    said = capsys.readouterr().out
    assert left.value.exit_code == 0 and "3 classes of calls: " in said and "tile_m" in said, said
    found = {winner.call.split()[0] for winner in winners.read(cache_folder / "tuning.json").values()}
    assert found == {"linear", "linear_dx", "linear_dweight"}  # also where the heuristic stays
    dispatch.forget()
    assert ByTile.size(config(1024)) < ByTile.size(before) and config(8192) == other


def test_the_command_takes_an_ops_cases(gpu: Fake) -> None:
    sizes = [t.binding for t in command._trials("softmax", ["bfloat16"], None, None)]
    assert {b.op.name for b in sizes} == {"softmax", "softmax_bwd"}
    assert {b.dims["n"] for b in sizes} == {4097, 4096, 50257, 262144}
    moved = [sum(2 * a.shape[0] * a.shape[1] for a in (*b.inputs.values(), *b.outputs.values()) if a) for b in sizes]
    assert all(0.9 * calls.BYTES < m <= calls.BYTES for m in moved)


def test_the_command_explains_mistakes(gpu: Fake) -> None:
    composite = "cute_ops.composite.embedding:embedding"
    for arguments, text in (
        (["nothing"], "no op 'nothing'"), (["cute_ops.declaration.op"], "cute_ops.declaration.op declares no op"),
        ([composite], f"{composite} declares no op with a kernel"),
    ):  # fmt: skip
        with pytest.raises(typer.BadParameter, match=text):
            command.tune(arguments)
