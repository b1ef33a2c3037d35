"""max-autotune: an op with its neighbours against Inductor's own code of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError
from torch._inductor.utils import get_code
from torch.fx.experimental.proxy_tensor import make_fx

import cute_ops_torch
from cute_ops import Op, testing
from cute_ops.autotune import choices
from cute_ops.ops.gemm.linear import linear, linear_dweight, linear_dx
from cute_ops_torch.inductor import fusion_choice
from cute_ops_torch.library.reference import traced_reference

NO_GRAPHS = "max-autotune-no-cudagraphs"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(fusion_choice, "DEVICES", {"cuda", "cpu"})
    monkeypatch.setattr(fusion_choice, "_known", {})
    with config.patch(force_disable_caches=True):
        yield


def as_list(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple | list) else [value]


@pytest.mark.drawn(0.3)
@pytest.mark.feature("max-autotune: Inductor's own form as a choice")
def test_the_traced_reference_is_the_op(row_op: Op, make_inputs: Callable[..., Any]) -> None:
    """For any number of rows, with all inputs and with those only that it needs; the gradient too."""
    for op in filter(None, (row_op, row_op.grad)):
        raw, required = getattr(torch.ops.cute, op.name).default, sum(not t.optional for t in op.inputs.values())
        for count in {required, len(op.inputs)}:
            trace = make_fx(
                lambda *tensors, op=op: as_list(traced_reference(op, *tensors)),
                decomposition_table=select_decomp_table(), tracing_mode="symbolic",
            )  # fmt: skip
            module = trace(*make_inputs(op, (7, 5))[:count])
            assert not any(getattr(n.target, "namespace", "") == "cute" for n in module.graph.nodes)
            tensors = make_inputs(op, (4, 5))[:count]
            got, expected = module(*tensors), as_list(raw(*tensors))
            for one, other in zip(got, expected, strict=True):
                assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
                # A step of fp8 where a decomposition rounds otherwise.
                eps = 0.13 if one.dtype == torch.float8_e4m3fn else 1e-5
                torch.testing.assert_close(one.float(), other.float(), rtol=eps, atol=eps)


def part_of(function: Callable[..., Any], *tensors: torch.Tensor) -> list[str] | None:
    module = make_fx(function)(*tensors)
    node = next(n for n in module.graph.nodes if getattr(n.target, "namespace", "") == "cute")
    part = fusion_choice.neighbourhood(node)
    return part and [
        n.target.overloadpacket.__name__ if hasattr(n.target, "namespace") else "getitem" for n in part.nodes
    ]


def test_neighbours() -> None:
    x, w, square = torch.randn(4, 8), torch.randn(8), torch.randn(8, 8)
    norm = cute_ops_torch.rmsnorm
    assert part_of(lambda: norm(x, w)) is None
    assert part_of(lambda: norm(x.view(2, 2, 8), w).view(4, 8)) is None  # views cost nothing
    assert part_of(lambda: norm(x @ square, w) @ square) is None
    assert part_of(lambda: norm((x @ square).sin() * x, w).cos() @ square) == ["sin", "mul", "rmsnorm", "cos"]
    assert part_of(lambda: norm(x, w).cos() + x.sin()) == ["rmsnorm", "cos", "sin", "add"]
    # What is there only after the op cannot be read by what fuses with it.
    late = lambda: (lambda h: h.cos() + (h @ square).sin())(norm(x, w))  # noqa: E731
    assert part_of(late) == ["rmsnorm", "cos"]
    both = lambda: [t.sin() for t in cute_ops_torch.add_rmsnorm(x, x.cos(), w)]  # noqa: E731
    assert part_of(both) == ["cos", "add_rmsnorm", "getitem", "getitem", "sin", "sin"]
    assert len(part_of(lambda: norm(x, w) * sum(x.sin() for _ in range(100))) or ()) <= fusion_choice.MOST + 1


def block(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h, residual = cute_ops_torch.add_rmsnorm(x.sin(), y, w)
    return h * residual.cos()


def calls_ours(compiled: Callable[..., Any], *tensors: torch.Tensor) -> bool:
    """Whether the code calls our kernel; it is written, but not compiled."""
    return any("extern_kernels.cute_add_rmsnorm" in code for code in get_code(compiled, *tensors))


@pytest.mark.parametrize("winner", ["ours", "Inductor"])
def test_the_faster_one_is_taken(
    winner: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fusion_choice, "measured", lambda *part: (1.0, 2.0) if winner == "ours" else (2.0, 1.0))
    tensors = (torch.randn(5, 64), torch.randn(5, 64), torch.randn(64))
    compiled = torch.compile(block, fullgraph=True, dynamic=winner != "ours", mode=NO_GRAPHS)
    with caplog.at_level(logging.INFO, "cute_ops"), torch.no_grad():
        if winner == "ours":
            assert calls_ours(compiled, *tensors)
        else:
            torch.testing.assert_close(compiled(*tensors), block(*tensors), rtol=1e-5, atol=1e-5)
            tensors = (torch.randn(9, 64), torch.randn(9, 64), torch.randn(64))
            torch.testing.assert_close(compiled(*tensors), block(*tensors), rtol=1e-5, atol=1e-5)
            assert not calls_ours(torch.compile(block, mode=NO_GRAPHS), *tensors)
    ours, theirs = (1, 2) if winner == "ours" else (2, 1)
    assert f"add_rmsnorm with 3 neighbours: ours {ours}.0000 ms, fused by Inductor {theirs}.0000 ms" in caplog.text


def test_timing_takes_no_random_numbers() -> None:
    before = torch.get_rng_state()
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool):
        made = fusion_choice._concrete(torch.empty(3, 4, dtype=dtype).t()).filled()
        assert (made.shape, made.stride(), made.dtype) == ((4, 3), (1, 4), dtype)
    assert torch.equal(torch.get_rng_state(), before)


def test_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion_choice, "decomposed", None)
    tensors = (torch.randn(5, 64), torch.randn(5, 64), torch.randn(64))
    with torch.no_grad():
        assert calls_ours(torch.compile(block), *tensors)


def test_a_contender_that_fails_has_lost(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*part: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(fusion_choice, "measured", fails)
    tensors = (torch.randn(5, 64), torch.randn(5, 64), torch.randn(64))
    with torch.no_grad():
        assert calls_ours(torch.compile(block, mode=NO_GRAPHS), *tensors)
    assert "add_rmsnorm stays as it is, Inductor's own form of it cannot compete: no room" in caplog.text


@pytest.mark.gpu
@pytest.mark.feature("GPU: compile, max-autotune, Inductor's own form")
def test_inductors_form_on_a_gpu(
    op: Op, make_inputs: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of an op and of its gradient, between pointwise neighbours, with sizes that change."""
    monkeypatch.setattr(fusion_choice, "measured", lambda *part: (1.0, 0.0))
    function = testing.plain(op, getattr(cute_ops_torch, op.name))

    def model(*tensors: torch.Tensor) -> torch.Tensor:
        return sum(o.sin().sum() for o in as_list(function(tensors[0] * 2, *tensors[1:])))

    compiled = torch.compile(model, fullgraph=True, dynamic=True, mode=NO_GRAPHS)
    for m in (64, 7):
        given = dict(zip(op.inputs, make_inputs(op, (m, 3), 256, torch.float32, "cuda"), strict=True))
        leaves = [given[name].requires_grad_() for name in op.differentiable]
        with caplog.at_level(logging.INFO, "cute_ops"):
            try:
                got = compiled(*given.values())
            except InductorError as error:
                # A form that Triton cannot compile is not chosen where it is measured.
                if "PassManager::run failed" not in str(error):
                    raise
                pytest.xfail("this Triton cannot compile what Inductor writes")
            grads = torch.autograd.grad(got, leaves)
        expected = model(*given.values())
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(grads, torch.autograd.grad(expected, leaves), rtol=1e-3, atol=1e-3)
    assert f"{op.name} with " in caplog.text
    assert "cannot compete" not in caplog.text


@pytest.mark.feature("max-autotune: Inductor's own form as a choice")
def test_products_are_to_be_measured_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the mode max-autotune alone: our kernel and the framework's product, at the first call of each class."""
    monkeypatch.setattr(choices, "_asked", set())
    x, weight = (torch.randn(*shape, requires_grad=True) for shape in ((6, 8), (16, 8)))
    for mode, ops in (("default", ()), (NO_GRAPHS, (linear, linear_dx, linear_dweight))):
        torch._dynamo.reset()
        out = torch.compile(lambda x, weight: cute_ops_torch.linear(x, weight), fullgraph=True, mode=mode)(x, weight)
        out.sum().backward()
        assert [op for op in (linear, linear_dx, linear_dweight) if choices.asked(op)] == [*ops]
