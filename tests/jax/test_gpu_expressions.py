"""Random expressions, new ones in every run: kernels and their gradients against float64, torch against JAX."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from cute_ops import testing
from cute_ops.autotune.dispatch import foresee
from cute_ops.declaration.binding import bind
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import Array
from cute_ops.jit import cache, target
from cute_ops.tools import verify

pytest.importorskip("torch")
from tests.ops.random_programs import Drawn, drawn

COUNT, PARTS = 500, 10
Arrays = Mapping[str, np.ndarray]


def check(one: Drawn, runners: Mapping[str, Any]) -> None:
    """Raise unless all runners give the same bits, near the exact results; of the gradients only that of all outputs is
    asked of each of them.
    """
    calls = one.calls()
    for i, (op, arrays) in enumerate(calls):
        by = [*runners] if i in (0, len(calls) - 1) else [*runners][:1]
        first, *others = (runners[name].run(op, arrays, {}) for name in by)
        with np.errstate(all="ignore"):
            testing.check(op, arrays, {}, first, lambda i=i: one.more(i))
        for other in others:
            for name, a, b in zip(op.results, first, other, strict=True):
                same = a is b if a is None or b is None else a.tobytes() == b.tobytes()
                assert same, f"{op.name}: {name} is another one in {' and '.join(by)}"


def compile_all(every: Sequence[Drawn]) -> None:
    where = target.of_device()
    variants = []
    for one in every:
        for op, given in one.calls()[:2]:
            specs = {name: Array(a.shape, str(a.dtype)) for name, a in given.items()}
            variants.append(foresee(bind(op, specs, {}), {}, where).variant)
    for built in cache.build_all(variants):
        if built.error is not None:
            raise built.error


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(PARTS))
def test_random_expressions(part: int) -> None:
    """``CUTE_OPS_EXPRESSIONS_SEED`` repeats a run. JAX, whose calls are compiled each, takes half of them."""
    seed = int(os.environ.get("CUTE_OPS_EXPRESSIONS_SEED") or time.time_ns() % 2**31)
    print(f"CUTE_OPS_EXPRESSIONS_SEED={seed}")
    every = [*drawn(seed, COUNT)][part::PARTS]
    compile_all(every)
    runners = verify.installed(("torch", "jax"))
    assert {runner.device() for runner in runners.values()} == {"cuda"}
    wrong = []
    for i, one in enumerate(every):
        try:
            check(one, runners if i % 2 else {"torch": runners["torch"]})
        except AssertionError as error:
            wrong.append(f"{error}, of {one.case.dims} {one.dtype}\n{one.programs}")
    assert not wrong, f"CUTE_OPS_EXPRESSIONS_SEED={seed}: {len(wrong)} of {len(every)}\n" + "\n".join(wrong)


class Altered:
    """A runner of references, whose first output's last element is off by this much."""

    def __init__(self, runner: Any, by: float) -> None:
        self.runner, self.by = runner, by

    def run(self, op: Op, arrays: Arrays, attrs: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
        first, *others = self.runner.run(op, arrays, attrs)
        wide = first.astype(np.float64)
        wide[..., -1] += self.by * np.abs(wide).max()
        return wide.astype(first.dtype), *others


def test_errors_are_found() -> None:
    one = next(one for one in drawn(0, COUNT) if one.dtype == "float32")
    runner = verify.installed(("torch",))["torch"]
    check(one, {"torch": runner, "jax": Altered(runner, 0)})
    with pytest.raises(AssertionError, match="exceeds"):
        check(one, {"torch": Altered(runner, 1e-4)})
    with pytest.raises(AssertionError, match="is another one in torch and jax"):
        check(one, {"torch": runner, "jax": Altered(runner, 2e-7)})
