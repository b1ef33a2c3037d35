"""Kernels of a graph that are compiled while Inductor compiles it. Nothing is compiled here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import cute_ops_torch
from cute_ops import Op
from cute_ops.errors import CompileError
from cute_ops.jit import cache, target
from cute_ops.jit.target import Target
from cute_ops.jit.variant import Variant
from cute_ops_torch import registry
from cute_ops_torch.inductor import ahead, lowering

H200 = Target("sm_90a", 132)
M, K, N = 4096, 1024, 4096


def nodes_of(function: Callable[..., Any], *shapes: tuple[int, ...], dynamic: bool = False) -> list[tuple[Op, Any]]:
    """The calls of our ops in the graph of a function of bfloat16 arrays on a GPU, which need not be there."""
    with FakeTensorMode(shape_env=ShapeEnv()) as fake, torch.no_grad():
        given = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
        if dynamic:
            given = [fake.from_tensor(x, static_shapes=False) for x in given]
        graph = make_fx(function)(*given).graph
    known = {made.overload: made.op for made in registry._registered.values()}
    return [(known[node.target], node) for node in graph.nodes if node.target in known]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops whose kernels were started, one after the other."""
    found: list[str] = []
    monkeypatch.setattr(target, "of_device", lambda index=0: H200)
    monkeypatch.setattr(ahead, "_seen", set())
    monkeypatch.setattr(cache, "start", lambda variant: found.append(variant.op))
    return found


def norm(x: Any, weight: Any) -> Any:
    return cute_ops_torch.rmsnorm(x, weight)


def test_the_kernel_of_a_call(started: list[str]) -> None:
    for op, node in nodes_of(norm, (M, K), (K,)) * 2:
        ahead.compile_ahead(op, node)
    assert started == ["rmsnorm"]
    for op, node in nodes_of(norm, (M, 2 * K), (2 * K,), dynamic=True):
        ahead.compile_ahead(op, node)
    assert started == ["rmsnorm", "rmsnorm"]


def test_the_kernels_of_a_composites_steps(started: list[str]) -> None:
    def mlp(x: Any, up: Any, down: Any, bias: Any) -> Any:
        return cute_ops_torch.mlp(x, up, bias, down)

    for op, node in nodes_of(mlp, (M, K), (N, K), (K, N), (N,)):
        ahead.compile_ahead(op, node)
    assert started == ["mlp_up_bias"]  # the other product is the framework's


def test_the_kernels_of_a_loss_and_its_head(caplog: pytest.LogCaptureFixture) -> None:
    op = {made.op.name: made.op for made in registry._registered.values()}["linear_cross_entropy_step"]
    with caplog.at_level("DEBUG"), FakeTensorMode(), torch.no_grad():
        hidden, weight = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((M, K), (N, K)))
        given = [hidden, weight, torch.empty(M, dtype=torch.int64), None, None]
        attrs = [*{**op.keywords, "chunk_rows": M // 4}.values()]
        assert [variant.op for variant in ahead.kernels(op, given, attrs, H200)] == ["cross_entropy_step"]
    assert "cannot be foreseen" not in caplog.text


def test_products_that_are_wider_than_their_operands(caplog: pytest.LogCaptureFixture) -> None:
    """On a GPU sums of gradients in float32 are such, of which torch 2.11 logged that fake tensors raised TypeError."""
    wide: Any = {"out_dtype": torch.float32}
    with FakeTensorMode(), torch.no_grad(), ahead._WiderProducts():
        a, b = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((M, K), (K, N)))
        total = torch.empty(M, N)
        assert torch.addmm(total, a, b, out=total, **wide) is total
        made = torch.mm(a, b, **wide)
        assert (made.shape, made.dtype) == ((M, N), torch.float32)
    assert caplog.text == ""


def test_what_waits_for_the_call(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ((op, node),) = nodes_of(norm, (M, K), (K,))
    for name in ("TUNE", "BUNDLE", "RECORD"):  # another kernel may run, or all are there
        with monkeypatch.context() as patch:
            patch.setenv(f"CUTE_OPS_{name}", "1")
            ahead.compile_ahead(op, node)
    monkeypatch.setattr(target, "of_device", None)  # a device that cannot be asked
    ahead.compile_ahead(op, node)
    assert started == []


def test_a_kernel_that_does_not_compile_is_the_calls_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(variant: Variant) -> Any:
        raise CompileError("no compiler")

    monkeypatch.setattr(cache, "get", fails)
    monkeypatch.setattr(cache, "holds", lambda variant: False)
    before = {*threading.enumerate()}
    with caplog.at_level("DEBUG"):
        cache.start(None)  # type: ignore[arg-type]
        for thread in {*threading.enumerate()} - before:
            thread.join()
    assert "no compiler" in caplog.text


@pytest.mark.slow
def test_lowerings_start_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    monkeypatch.setattr(lowering, "compile_ahead", lambda op, node: found.append(op.name))
    x, up, down, weight = (torch.randn(shape) for shape in ((4, 16), (32, 16), (16, 32), (16,)))

    def function(x: Any) -> Any:
        return cute_ops_torch.mlp(cute_ops_torch.rmsnorm(x, weight), up, None, down)

    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        got = torch.compile(function, fullgraph=True)(x)
    torch.testing.assert_close(got, function(x), rtol=1e-5, atol=1e-5)
    assert found == ["rmsnorm", "mlp"]
