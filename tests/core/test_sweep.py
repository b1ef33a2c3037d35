"""What a sweep tries, and that it finds faults: without a GPU, with a runner that fails on purpose."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from cute_ops import Array, Case, Op, Tensor
from cute_ops.calls.lookup import ours
from cute_ops.cli.author import NOT_SWEPT
from cute_ops.declaration.config import Problem, Tuning
from cute_ops.declaration.shapes import FLOATS
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.jit.target import parse
from cute_ops.ops import rope, scale, softmax
from cute_ops.tools import sweep, sweep_run
from cute_ops.tools.sweep_run import sweep as run

SM90 = parse("sm_90a:132")


@pytest.mark.slow
def test_twelve_rounds_take_every_dtype_in_every_layout() -> None:
    found: dict[int, set[tuple[str, str]]] = {}
    rows: dict[int, set[int]] = {}
    for number in range(12):
        for trial in sweep.trials(rope, SM90, number):
            found.setdefault(trial.case.dims["d"], set()).add((trial.dtype, trial.base))
            rows.setdefault(trial.case.dims["d"], set()).add(int(np.prod(trial.case.dims["m"])))
    assert set(found) == set(range(2, 301))  # of a head of one element nothing is rotated
    assert all(pairs == set(sweep.PAIRS) for pairs in found.values())
    assert all(set(sweep.ROWS) <= counts for counts in rows.values())


def with_thresholds(tile: Callable[[Problem], Mapping[str, int]], longest: int = sweep.LONGEST) -> Op:
    return Op(
        "with_thresholds", inputs={"x": Tensor("*m n", "T")}, outputs={"out": Tensor("*m n", "T")},
        dtypes={"T": FLOATS}, reference=lambda xp, x: x, kernel="tests.ops.copying:Copy", tuning=Tuning(tile),
        check=lambda binding: "too long" if binding.dims["n"] > longest else None,
        cases=(Case("one", {"m": (1,), "n": 1}),),
    )  # fmt: skip


@pytest.mark.slow
def test_both_sides_of_a_threshold() -> None:
    def tile(problem: Problem) -> dict[str, int]:
        long = {"long": 1} if problem.dims["n"] >= 12345 and problem.dtypes["x"] == "float16" else {}
        return {"threads": 32 * (1 + problem.dims["n"] // 5000), **long}

    op = with_thresholds(tile)
    assert sweep.thresholds(op, SM90) == [12345]
    assert {12344, 12345, 12346} <= set(sweep.lengths(op, SM90, np.random.default_rng(0)))
    assert sweep.thresholds(with_thresholds(tile, 23456), SM90) == [12345, 23457]  # from which on it takes none


def test_a_form_that_comes_with_alignment_has_no_threshold() -> None:
    def tile(problem: Problem) -> dict[str, int]:
        n = problem.dims["n"]
        return {"threads": 32, "vectors": int(n % 8 == 0), "long": int(n >= 12345)}

    edges = sweep.thresholds(with_thresholds(tile), SM90, sweep.PAIRS[:1])
    assert len(edges) < 10 and all(abs(n - 12345) <= sweep.STEP for n in edges)
    near = [n for edge in edges for n in (edge - 1, edge, edge + 1)]
    assert {(n % 8 == 0, n >= 12345) for n in near} >= {(True, True), (False, False), (False, True)}


def test_shares_take_all_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict(zip(sweep.PAIRS, (400, 5000, 70000) * 4, strict=True))
    monkeypatch.setattr(sweep, "thresholds", lambda _op, _target, pairs: [found[pair] for pair in pairs])
    whole = sweep.lengths(softmax, SM90, np.random.default_rng(3))
    shares = [sweep.lengths(softmax, SM90, np.random.default_rng(3), i, 4) for i in range(4)]
    assert set().union(*shares) == set(whole)
    short = sorted(n for share in shares for n in share if n <= sweep.SHORTEST)
    assert short[: sweep.SHORTEST - 1] == list(range(1, sweep.SHORTEST))  # each of them once


def test_a_sample_looks_for_few_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the chance of all lengths: it takes that many more of what it finds."""
    looked: list[int] = []
    monkeypatch.setattr(sweep, "thresholds", lambda _op, _target, pairs: looked.append(len(pairs)) or [5000])
    rng = np.random.default_rng(0)
    taken = [sweep.lengths(softmax, SM90, rng, fraction=0.01)[5000] for _ in range(100)]
    assert set(taken) == {1 / len(sweep.PAIRS)} and 80 < sum(looked) < 160  # 0.12 of 1200


@pytest.mark.slow
def test_calls_of_every_op_can_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "lengths", lambda *_: dict.fromkeys([1, 64, 300, 4096], 1.0))
    for op in ours().values():
        if op.name not in NOT_SWEPT:
            list(sweep.trials(op, SM90, 0))


def test_our_kernel_of_a_product_is_tried() -> None:
    tried = list(sweep.trials(ours()["linear_gelu"], SM90, 0, fraction=0.2))
    assert {trial.dtype for trial in tried} == {"float16", "bfloat16"}
    assert all(trial.case.attrs["fused"] == "always" for trial in tried)


@pytest.mark.parametrize("base", sweep.BASES)
def test_views_end_where_their_buffers_end(base: str) -> None:
    for shape in ((1,), (7,), (5, 1), (5, 16), (2, 3, 9)):
        where = sweep.place(Tensor("*m n", "T"), Array(shape, "float16"), base)
        last = where.start + sum((n - 1) * stride for n, stride in zip(shape, where.strides, strict=True))
        assert last == where.size - 1 and where.strides[-1] == 1
        assert where.start == (base in ("shifted", "slices"))
        if base in ("strided", "slices") and len(shape) > 1:
            assert where.strides[-2] % VECTOR_BYTES == 0 and where.strides[-2] > shape[-1]


@pytest.mark.slow
def test_a_sweep_says_what_is_wrong_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(run([scale], "tests.programs.dying_runner", number=0, seed=8, workers=2, fraction=0.03))
    expected = list(sweep.trials(scale, SM90, 0, 8, 0.03))
    assert sorted(one.trial for one in found) == sorted(map(str, expected)) and len(found) > 50
    for one in found:
        n = int(re.search(r"n=(\d+)", one.trial)[1])  # type: ignore[index]
        dead, wrong = n % 50 == 0, n % 2 == 0 and n % 50
        assert (f"length {n}" == one.problem) == bool(wrong) and ("died with signal 9" in one.problem) == dead


@pytest.mark.slow
def test_what_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_run, "GRACE_SECONDS", 0.5)
    start = time.monotonic()
    assert not list(run([scale], "tests.programs.hanging_runner", number=0, seed=8, workers=2, seconds=1.0))
    assert time.monotonic() - start < 200  # on a busy machine; nobody would ever end
