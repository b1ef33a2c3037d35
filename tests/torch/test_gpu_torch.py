"""The kernels under torch on a GPU."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.exc import InductorError

import cute_ops_torch
from cute_ops import FLOATS, Case, Op, testing
from cute_ops.ops import OPS, PARTS
from cute_ops.ops.norm.layernorm import layernorm
from cute_ops_torch.host import launch
from cute_ops_torch.tools import runner

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _poisoned() -> None:
    """What a kernel does not write reads as NaN: blocks that the allocator hands out next are full of it."""
    if torch.cuda.is_available():
        blocks = [
            torch.full((size,), torch.nan, device="cuda") for size in (64, 1 << 12, 1 << 18, 1 << 20, 1 << 24)
        ] * 2
        del blocks


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def both(op: Op) -> list[tuple[str, Any]]:
    return [(o.name, getattr(torch.ops.cute, o.name).default) for o in (op, op.grad) if o]


def poison_like(outputs: Any) -> None:
    """Free NaN-filled blocks of exactly the outputs' sizes, which the allocator hands out next."""
    blocks = [torch.full_like(o, torch.nan) for o in as_tuple(outputs)]
    torch.cuda.synchronize()
    del blocks


@pytest.mark.feature("GPU: eager, against float64")
def test_values_against_float64(problem: Any) -> None:
    tensors = problem.tensors("cuda")
    poison_like(problem.raw(*tensors, **problem.attrs))
    problem.check(problem.raw(*tensors, **problem.attrs))


def test_values_of_narrowed_ops(narrowed: Any) -> None:
    test_values_against_float64(narrowed)


@pytest.mark.feature("GPU: deterministic")
def test_deterministic(problem: Any) -> None:
    tensors = problem.tensors("cuda")
    first = as_tuple(problem.raw(*tensors, **problem.attrs))
    for _ in range(5):
        poison_like(first)
        for a, b in zip(first, as_tuple(problem.raw(*tensors, **problem.attrs)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("shift", [0, 1])
def test_slices_of_a_wider_buffer(problem: Any, shift: int) -> None:
    """Rows with a stride and, shifted by one element, a base address that no vector load can use."""
    tensors = []
    for t, declared in zip(problem.tensors("cuda"), problem.op.inputs.values(), strict=True):
        if t is not None and declared.rows and not declared.dims:
            view = torch.full((*t.shape, 3), -1, dtype=t.dtype, device="cuda")[..., 1]
            view.copy_(t)
            t = view
        elif t is not None and declared.rows:
            n = t.shape[-1]
            poison = torch.nan if t.is_floating_point() else -1
            view = torch.full((*t.shape[:-1], n + 8 - n % 8 + 8), poison, dtype=t.dtype, device="cuda")
            view = view[..., shift : shift + n]
            view.copy_(t)
            t = view
        elif t is not None and shift:
            t = torch.cat([t[:1], t])[1:]
        tensors.append(t)
    problem.check(problem.raw(*tensors, **problem.attrs))


@pytest.mark.parametrize("dtype", FLOATS)
def test_q_and_k_of_a_fused_qkv(dtype: str) -> None:
    batch, seqlen, heads, kv_heads, headdim = 2, 33, 8, 2, 128
    qkv = torch.randn(batch, seqlen, (heads + 2 * kv_heads) * headdim, device="cuda").to(getattr(torch, dtype))
    weight = torch.randn(headdim, device="cuda")
    q, k, _ = qkv.split([heads * headdim, kv_heads * headdim, kv_heads * headdim], -1)
    for part, count in ((q, heads), (k, kv_heads)):
        rows = part.unflatten(-1, (count, headdim))
        for view in (rows, rows.transpose(1, 2)):
            assert not view.is_contiguous()
            a, b = view.detach().requires_grad_(), view.contiguous().detach().requires_grad_()
            out, expected = cute_ops_torch.rmsnorm(a, weight), cute_ops_torch.rmsnorm(b, weight)
            assert torch.equal(out, expected)
            dout = torch.randn_like(expected)
            assert torch.equal(*(torch.autograd.grad(o, t, dout)[0] for o, t in ((out, a), (expected, b))))


def test_zero_rows_and_empty_batches(op: Op, make_inputs: Callable[..., Any]) -> None:
    given = dict(zip(op.inputs, make_inputs(op, (2, 0, 3), device="cuda"), strict=True))
    tensors = [given[name].requires_grad_() for name in op.differentiable]
    outs = testing.shown(op, getattr(torch.ops.cute, op.name)(*given.values()))
    assert all(o.shape[:3] == (2, 0, 3) and o.is_cuda for o in outs)
    grads = torch.autograd.grad(outs, tensors, [torch.ones_like(o) for o in outs])
    assert all(g.shape == t.shape and not g.any() for g, t in zip(grads, tensors, strict=True))


def test_nan_and_infinity_stay_in_their_row(op: Op, make_inputs: Callable[..., Any]) -> None:
    for n in (64, 4096, 65536):
        clean = make_inputs(op, (6,), n, torch.bfloat16, "cuda")
        dirty = [t.clone() for t in clean]
        width = dirty[0].shape[-1]
        dirty[0][1, ..., width // 2], dirty[0][3, ..., 0], dirty[0][4, ..., -1] = torch.nan, torch.inf, -torch.inf
        raw = getattr(torch.ops.cute, op.name)
        on_cpu = as_tuple(raw(*[t.cpu() for t in dirty]))
        for got, reference, untouched in zip(as_tuple(raw(*dirty)), on_cpu, as_tuple(raw(*clean)), strict=True):
            assert torch.equal(got.isnan().cpu(), reference.isnan())
            assert torch.equal(got[[0, 2, 5]], untouched[[0, 2, 5]])


@pytest.mark.parametrize("n", [96, 4096, 4097, 50257, 262144])
def test_layernorm_of_rows_far_from_zero(n: int) -> None:
    """A mean of 1e4 beside deviations of 1, and a row that begins with an outlier."""
    for op in (layernorm, layernorm.grad):
        arrays = testing.inputs(op, Case("far", {"m": (33,), "n": n}), "float32")
        arrays["x"] += 1e4
        arrays["x"][5] -= 1e4
        arrays["x"][5, 0] = 1e4
        tensors = [torch.from_numpy(a).cuda() for a in arrays.values()]
        outs = as_tuple(getattr(torch.ops.cute, op.name)(*tensors))
        testing.check(op, arrays, op.attrs, tuple(o.cpu().numpy() for o in outs))


def test_gradients_match_the_cpu(op: Op, make_inputs: Callable[..., Any]) -> None:
    raw = lambda *args: testing.shown(op, getattr(torch.ops.cute, op.name)(*args))  # noqa: E731
    function = testing.plain(op, getattr(cute_ops_torch, op.name))
    tensors = make_inputs(op, (33,), 257)
    floating = [n for n in op.shown if "int" not in op.outputs[n].dtype]
    douts = [torch.randn(op.outputs[n].of(op.example((33,), 257))) for n in floating]
    expected = None
    for call, device in ((raw, "cpu"), (raw, "cuda"), (function, "cuda")):
        given = dict(zip(op.inputs, [t.to(device) for t in tensors], strict=True))
        leaves = [given[name].requires_grad_() for name in op.differentiable]
        outs = [o for o in as_tuple(call(*given.values())) if o.is_floating_point()]
        grads = torch.autograd.grad(outs, leaves, [d.to(device) for d in douts])
        expected = expected or grads
        torch.testing.assert_close([g.cpu() for g in grads], list(expected), rtol=1e-4, atol=1e-4)


def test_function_and_raw_op_agree_bitwise(op: Op, make_inputs: Callable[..., Any]) -> None:
    raw = lambda *args: testing.shown(op, getattr(torch.ops.cute, op.name)(*args))  # noqa: E731
    function = testing.plain(op, getattr(cute_ops_torch, op.name))
    tensors = make_inputs(op, (33,), 257, torch.bfloat16, "cuda")
    with torch.profiler.profile() as profile:
        watched = as_tuple(function(*tensors))
    assert any(event.key == f"cute::{op.name}" for event in profile.key_averages())
    for outs in (as_tuple(function(*tensors)), as_tuple(raw(*tensors))):
        assert all(torch.equal(a, b) for a, b in zip(outs, watched, strict=True))
    with torch.inference_mode():
        assert all(torch.equal(a, b) for a, b in zip(as_tuple(raw(*tensors)), watched, strict=True))


def test_negated_views_are_resolved() -> None:
    x = torch.randn(4, 64, dtype=torch.complex64, device="cuda")
    negated = torch._neg_view(x.real.contiguous())
    assert negated.is_neg()
    assert torch.equal(cute_ops_torch.rmsnorm(negated), cute_ops_torch.rmsnorm(-x.real.contiguous()))


def test_errors_on_a_gpu() -> None:
    x = torch.randn(3, 64, device="cuda")
    for call in (cute_ops_torch.rmsnorm, torch.ops.cute.rmsnorm):
        with pytest.raises(ValueError, match="argument `weight` is on cpu, but `x` is on cuda:0"):
            call(x, torch.ones(64))
        with pytest.raises(ValueError, match="argument `x` has stride 64 in its last dim"):
            call(x.t())
        with pytest.raises(TypeError, match="argument `x` has dtype int64"):
            call(x.long())
        with pytest.raises(ValueError, match="argument `weight` has n=32, but n=64"):
            call(x, torch.ones(32, device="cuda"))


@pytest.mark.feature("GPU: streams")
def test_current_stream_is_used(any_op: Op, make_inputs: Callable[..., Any]) -> None:
    for declared in filter(None, (any_op, any_op.grad)):
        raw = runner.functional(declared)
        given = make_inputs(declared, (4096,), 4096, device="cuda")
        expected = as_tuple(raw(*given))
        stream = torch.cuda.Stream()
        late = [torch.zeros_like(t) for t in given]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # a kernel on another stream would read the zeros
            for a, b in zip(late, given, strict=True):
                a.copy_(b)
            got = as_tuple(raw(*late))
        stream.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.feature("GPU: CUDA graph capture, also of a first call")
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first-call-in-capture"])
def test_cuda_graph(any_op: Op, make_inputs: Callable[..., Any], warm: bool) -> None:
    # Sizes that no other test uses, so that the kernel is loaded for the first time inside the capture.
    n = 1536 if warm else 1152 + 128 * (*OPS, *PARTS).index(any_op)
    tensors = make_inputs(any_op, (64,), n, torch.bfloat16, "cuda")
    raw = runner.functional(any_op)
    if warm:
        raw(*tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = as_tuple(raw(*tensors))
    for seed in range(3):
        torch.manual_seed(seed)
        for t in tensors:
            if t.is_floating_point():
                t.copy_(torch.randn_like(t))
        for o in outs:
            o.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outs, as_tuple(raw(*tensors)), strict=True))


@pytest.mark.feature("GPU: CUDA graph capture, also of a first call")
def test_a_graph_that_a_first_call_collects_cannot_break_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA forbids a capture's thread to destroy another graph, unless it is in the relaxed mode."""
    x, weight = torch.randn(4, 1096, device="cuda"), torch.randn(1096, device="cuda")
    old, plan = torch.cuda.CUDAGraph(), launch.prepare
    with torch.cuda.graph(old):
        x * 2
    cycle = [old]
    cycle.append(cycle)  # type: ignore[arg-type]

    def collecting(*args: Any) -> Any:
        gc.collect()
        return plan(*args)

    monkeypatch.setattr(launch, "prepare", collecting)
    graph = torch.cuda.CUDAGraph()
    gc.disable()
    try:
        del old, cycle
        with torch.cuda.graph(graph):
            out = cute_ops_torch.rmsnorm(x, weight)
    finally:
        gc.enable()
    graph.replay()
    assert torch.equal(out, cute_ops_torch.rmsnorm(x, weight))


@pytest.mark.feature("GPU: CUDA graph of a training step")
def test_training_step_in_a_cuda_graph(op: Op, make_inputs: Callable[..., Any]) -> None:
    given = dict(zip(op.inputs, make_inputs(op, (64,), 512, torch.float32, "cuda"), strict=True))
    leaves = [given[name].requires_grad_() for name in op.differentiable]
    function = testing.plain(op, getattr(cute_ops_torch, op.name))

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(sum(o.sin().sum() for o in as_tuple(function(*given.values()))), leaves)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def check_some_rows(op: Op, name: str, n: int, dtype: torch.dtype) -> None:
    """A problem of more than 2^31 elements: rows at both ends and around element 2^31 as a small problem has them."""
    declared = op if name == op.name else op.grad
    row = max(math.prod(t.of(declared.example((1,), n))) for t in declared.inputs.values() if t.rows)
    m, around = 2**31 // row + 5, 2**31 // row
    sizes = declared.example((m,), n)
    every = [t.of(sizes) for t in (*declared.inputs.values(), *declared.outputs.values())]
    if torch.cuda.mem_get_info()[0] < sum(map(math.prod, every)) * dtype.itemsize + 8 * m * row:
        pytest.skip("not enough free GPU memory for 2^31 elements")
    raw = getattr(torch.ops.cute, name)
    shared: dict[Any, torch.Tensor] = {}
    for t in declared.inputs.values():
        if t.upper_bound:
            shared[t.shape, t.dtype] = torch.randint(n, t.of(sizes), device="cuda")
        else:
            kind = dtype if t.dtype in declared.dtypes else getattr(torch, t.dtype)
            if (t.shape, t.dtype) not in shared:
                shared[t.shape, t.dtype] = torch.randn(t.of(sizes), device="cuda", dtype=kind)
    tensors = [shared[t.shape, t.dtype] for t in declared.inputs.values()]
    outs = as_tuple(raw(*tensors))
    picked = torch.tensor([0, 1, around - 1, around, around + 1, m - 2, m - 1], device="cuda")
    # Many times, because a backward adds in another order where rows are few.
    many = picked.repeat(128)
    small = as_tuple(raw(*[t[many] if d.rows else t for t, d in zip(tensors, declared.inputs.values(), strict=True)]))
    for o, s, d in zip(outs, small, declared.outputs.values(), strict=True):
        if d.rows and o.numel():
            assert torch.equal(o[many], s)
            assert not torch.isnan(o[:: max(m // 4096, 1)]).any()


@pytest.mark.large
@pytest.mark.feature("GPU: more than 2^31 elements, backward too")
@pytest.mark.parametrize("n", [4096, 262144])
def test_more_than_2_31_elements(op: Op, n: int) -> None:
    for name, _ in both(op):
        check_some_rows(op, name, n, torch.bfloat16)
        torch.cuda.empty_cache()


@pytest.mark.large
@pytest.mark.parametrize("first", ["pages", "heads"])
def test_slots_of_a_cache_of_more_than_2_31_elements(first: str) -> None:
    """The last page's too, compact and with heads before slots."""
    pages, size, heads, d, e = 2**31 // (16 * 8 * 128) + 5, 16, 8, 128, 8
    shapes = [(pages, size, heads, n) if first == "pages" else (pages, heads, size, n) for n in (d, e)]
    if torch.cuda.mem_get_info()[0] < 4 * sum(map(math.prod, shapes)):
        pytest.skip("not enough free GPU memory for 2^31 elements")
    made = [torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda") for shape in shapes]
    caches = made if first == "pages" else [cache.transpose(1, 2) for cache in made]
    new = [torch.randn(5, heads, n, dtype=torch.bfloat16, device="cuda") for n in (d, e)]
    slots = torch.tensor([0, 2**31 // (heads * d), -1, pages * size - 1, pages * size], device="cuda")
    cute_ops_torch.append_kv(*caches, *new, slots)
    kept = slots[[0, 1, 3]]
    for cache, rows in zip(caches, new, strict=True):
        assert torch.equal(cache[kept // size, kept % size], rows[[0, 1, 3]])
        assert sum(int((~page.isnan()).sum()) for page in cache.split(4096)) == 3 * rows[0].numel()


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("default", marks=pytest.mark.feature("GPU: compile, backward, dynamic rows")),
        pytest.param("reduce-overhead", marks=pytest.mark.feature("GPU: compile, reduce-overhead")),
        pytest.param("max-autotune", marks=pytest.mark.feature("GPU: compile, max-autotune")),
    ],
)
def test_compiled_without_recompiling(
    op: Op, make_inputs: Callable[..., Any], mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    function = testing.plain(op, getattr(cute_ops_torch, op.name))

    def model(*tensors: torch.Tensor) -> torch.Tensor:
        return sum(o.sin().sum() for o in as_tuple(function(tensors[0] * 2, *tensors[1:])))

    compiled = torch.compile(model, fullgraph=True, dynamic=True, mode=mode)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (7, 5, 64):  # no other dim is 7: sizes that agree at first are taken for one
            given = dict(zip(op.inputs, make_inputs(op, (m, 3), 256, torch.float32, "cuda"), strict=True))
            leaves = [given[name].requires_grad_() for name in op.differentiable]
            try:
                out, expected = compiled(*given.values()), model(*given.values())
            except InductorError as error:
                if mode != "max-autotune" or "PassManager::run failed" not in str(error):
                    raise
                pytest.xfail("Triton cannot compile what Inductor makes of its own form and its neighbours")
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
            got = torch.autograd.grad(out.sum(), leaves)
            torch.testing.assert_close(got, torch.autograd.grad(expected.sum(), leaves), rtol=1e-3, atol=1e-3)
    # With max-autotune, Inductor's own form of the op, unless Triton cannot compile it.
    assert "cannot compete" not in caplog.text or "PassManager::run failed" in caplog.text


@pytest.mark.feature("GPU: several GPUs in one process")
def test_every_device(any_op: Op, make_inputs: Callable[..., Any]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    tensors = make_inputs(any_op, (33,), 256, device="cuda:0")
    raw = runner.functional(any_op)
    expected = as_tuple(raw(*tensors))
    for index in range(1, torch.cuda.device_count()):
        outs = as_tuple(raw(*[t.to(f"cuda:{index}") for t in tensors]))
        assert torch.cuda.current_device() == 0
        assert all(
            o.get_device() == index and torch.equal(o.cpu(), e.cpu()) for o, e in zip(outs, expected, strict=True)
        )
