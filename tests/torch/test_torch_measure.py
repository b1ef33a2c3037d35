"""PyTorch's side of tuning, with references in place of kernels: buffers laid out as in calls, wrong results found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cute_ops_torch
from cute_ops import testing
from cute_ops.autotune import compare, dispatch, winners
from cute_ops.autotune.dispatch import foresee
from cute_ops.declaration.binding import bind
from cute_ops.declaration.shapes import Array
from cute_ops.jit import cache
from cute_ops.jit.layout import Memory
from cute_ops.jit.plan import plan
from cute_ops.jit.target import parse
from cute_ops.ops import OPS, PARTS
from cute_ops.ops.activation.unary import silu
from cute_ops.ops.norm.rmsnorm import rmsnorm
from cute_ops.ops.reduction.cross_entropy import cross_entropy
from cute_ops.tools import sweep
from cute_ops_torch.tools import measure
from tests.torch import sanitized_calls

SM90 = parse("sm_90a")


@pytest.mark.parametrize(
    "stage", [s for op in (*OPS, *PARTS) for s in (op, op.grad) if s and s.space], ids=lambda op: op.name
)
def test_a_plan_runs_on_a_small_problem(stage: Any, compiled: Any) -> None:
    op = stage
    case = testing.small(op.cases[0])
    arrays, attrs = testing.inputs(op, case, "bfloat16"), testing.attributes(op, case)
    given = {n: None if a is None else Array(a.shape, str(a.dtype)) for n, a in arrays.items()}
    binding = bind(op, given, attrs)
    outputs = measure.run(binding, plan(binding, {}, SM90), arrays)
    testing.check(op, arrays, attrs, outputs)
    assert compiled.calls == [op.name]
    # The problem that tuning checks has the same sizes, and few rows.
    small = compare.smaller(binding)
    assert {n: v for n, v in small.dims.items() if not isinstance(v, tuple)} == {
        n: v for n, v in binding.dims.items() if not isinstance(v, tuple) and n not in op.derived
    }
    again = testing.inputs(op, small, "bfloat16")
    assert {n for n, a in again.items() if a is None} == {n for n, a in arrays.items() if a is None}


@pytest.mark.slow
def test_what_the_sanitizer_watches_of_products() -> None:
    """Its calls fit their declarations, and their plans are of every form; the framework computes some."""
    forms: dict[str, set[str]] = {}
    run = {"linear", "linear_dx", "linear_dweight_add", "linear_dweight_add_batched", "gated_linear", "linear_add_rstd"}
    for op in (op for op in sanitized_calls.every_op().values() if op.fallback):
        seen = forms.setdefault(op.name, set())
        for _, case, dtype, base in sanitized_calls.calls([op], [17]):
            arrays, attrs = testing.specs(op, case, dtype), testing.attributes(op, case)
            config = foresee(bind(op, arrays, attrs), sweep.memory(op, arrays, base), SM90).variant.config
            seen.add(dict(config)["form"])
            if op.name in run and case.dims["m"] in (1, (1,)):
                cute_ops_torch.register(op)
                tensors = [torch.from_numpy(a) for a in testing.inputs(op, case, "float16").values()]
                getattr(torch.ops.cute, op.name)(*tensors, **attrs | {"fused": "never"})
        for _, case, config in sanitized_calls.cooperative(op, SM90):
            binding = bind(op, testing.specs(op, case, dtype), testing.attributes(op, case))
            assert plan(binding, {}, SM90, config=config).variant.config
            seen.add("clusters")
    assert {"linear_dweight_add", "linear_dweight_add_batched", "linear_dx", "linear_add_rstd", "qkv_rope_64"} <= {
        *forms
    }
    assert all({"pingpong", "mma_sync"} <= seen for seen in forms.values()), forms
    assert "clusters" in forms["linear"] & forms["gated_linear"] & forms["linear_gelu"]


def test_the_sanitizers_calls_are_ones_of_their_ops() -> None:
    for op, case, dtype, _ in sanitized_calls.calls(list(sanitized_calls.every_op().values()), [17, 129]):
        bind(op, testing.specs(op, case, dtype), testing.attributes(op, case))


def test_buffers_lie_as_in_the_call(compiled: Any) -> None:
    binding = bind(rmsnorm, {"x": Array((3, 5, 8), "bfloat16"), "weight": Array((8,), "float32")})
    where = {"x": Memory((120, 24, 1), 6), "weight": Memory((1,), 4)}
    state = torch.get_rng_state()
    with measure.contest(binding, where, [plan(binding, where, SM90)]) as taken:
        sets = taken._inputs
        assert len(sets) == 4 and len({id(t) for s in sets for t in s if t is not None}) == 8
        for x, weight, bias in sets:
            assert x is not None and weight is not None and bias is None
            assert (x.stride(), x.data_ptr() % 16) == ((120, 24, 1), 6) and weight.data_ptr() % 16 == 4
            assert torch.equal(x, sets[0][0]) and x.float().std() > 0.5 and abs(weight.mean() - 1) < 0.5  # type: ignore[arg-type]
        assert not taken.differs(0, {"out": 1e-6})
    assert torch.equal(torch.get_rng_state(), state), "a program's random numbers are its own"
    classes = bind(cross_entropy, {"logits": Array((64, 7), "float32"), "target": Array((64,), "int64")})
    with measure.contest(classes, {}, [plan(classes, {}, SM90)]) as taken:
        target = taken._inputs[0][1]
        assert target is not None and target.min() == 0 and target.max() == 6


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda out, call: out.view(-1)[3].mul_(1.1), "differs from the heuristic's by"),
        (lambda out, call: out.view(-1)[3].fill_(float("nan")), "differs from the heuristic's by inf times"),
        (lambda out, call: out.view(-1)[3].mul_(1 + call / 128), "differs from call to call"),
        (lambda out, call: out.view(-1)[3].mul_(1 + 2.0**-8), ""),
    ],
)
def test_results_that_differ_are_found(
    spoil: Any, message: str, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    binding = bind(rmsnorm, {"x": Array((6, 64), "bfloat16")})
    first = plan(binding, {}, SM90)
    other = plan(binding, {}, SM90, config={**first.variant.config, "unroll": 2})
    right, calls = measure.planned_call, []

    def planned(binding: Any, chosen: Any, device: Any) -> Any:
        call = right(binding, chosen, device)
        if chosen is first:
            return call

        def fill(wanted: Any) -> Any:
            def spoiled(*given: Any) -> None:
                call.fill(wanted)(*given)
                calls.append(1)
                spoil(given[-1], len(calls))

            return spoiled

        return call._replace(fill=fill)

    monkeypatch.setattr(measure, "planned_call", planned)
    with measure.contest(binding, {}, [first, other]) as taken:
        found = taken.differs(1, {"out": 1e-6})
    assert (message in found and "output out" in found) if message else not found


def test_excess_is_a_part_of_what_is_allowed() -> None:
    a = torch.tensor([1.0, -2.0, float("inf"), float("nan"), 0.0])
    assert measure._excess(a, a.clone(), 1e-6) == 0
    b = a.clone()
    b[4] = 4 * 1e-3 * 2.0
    assert measure._excess(a, b, 1e-3) == pytest.approx(1.0)
    b[4], b[2] = 0.0, 1e30
    assert measure._excess(a, b, 1e-3) == np.inf
    below = torch.tensor([2.0**-24, 1e-3], dtype=torch.float16)  # the least number of float16, and its neighbour
    assert measure._excess(below, below * torch.tensor([2.0, 1.0], dtype=torch.float16), 1e-7) < 1


@pytest.mark.gpu
def test_a_program_tunes_what_it_calls(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also inside a capture, since another process measures; and the next program finds what was measured."""
    monkeypatch.setattr(winners, "SHIPPED", cache_folder / "none")
    monkeypatch.setenv("CUTE_OPS_TUNE", "1")
    x = torch.randn(8000, 1032, device="cuda").bfloat16()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cute_ops_torch.softmax(x)
    graph.replay()
    expected = torch.softmax(x.float(), -1)
    for _ in range(2):
        torch.testing.assert_close(cute_ops_torch.softmax(x).float(), expected, rtol=2e-2, atol=1e-4)
        (winner,) = winners.read(cache_folder / "tuning.json").values()
        assert winner.call.startswith("softmax sm_") and winner.measured["tried"] > 3
        count = cache.counters.compiled
        dispatch.forget()
        cute_ops_torch.softmax(x[:77])
        assert cache.counters.compiled == count
    torch.testing.assert_close(captured.float(), expected, rtol=2e-2, atol=1e-4)


@pytest.mark.gpu
def test_samples_are_of_a_call(cache_folder: Path) -> None:
    """A large copy-like op takes about what its bytes take, and twice the rows about twice that."""
    found = [measure.measure(silu, {"x": Array((rows, 8192), "bfloat16")}) for rows in (8192, 16384)]
    assert 0.2 * measure.copy_rate() < found[0].rate < 1.1 * measure.copy_rate()
    assert 1.7 < found[1].us / found[0].us < 2.3 and found[0].low <= found[0].us <= found[0].high
