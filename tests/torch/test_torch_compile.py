"""torch.compile on the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch._inductor.lowering import lowerings
from torch.utils.checkpoint import checkpoint

import cute_ops_torch
from cute_ops import FLOATS, Op, Tensor, testing
from cute_ops.composite.linear_cross_entropy import linear_cross_entropy_total
from cute_ops_torch import registry
from cute_ops_torch.tools import runner
from tests.ops import rounding


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def block(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h, residual = cute_ops_torch.add_rmsnorm(x, residual, w, b)
    h = cute_ops_torch.silu_mul(h * 2, h.sin())
    return cute_ops_torch.rmsnorm(h + 1, w, eps=1e-5) + residual


def run(function: Callable[..., Any], m: int) -> list[torch.Tensor]:
    torch.manual_seed(m)
    tensors = [torch.randn(s, requires_grad=True) for s in ((m, 3, 64), (m, 3, 64), (64,), (64,))]
    out = function(*tensors)
    return [out, *torch.autograd.grad(out.sin().sum(), tensors)]


def test_every_op_has_a_lowering() -> None:
    for _ in range(2):  # some register others
        registry.register_lowerings()
    assert not {made.overload for made in registry._registered.values() if not made.op.numbers} - set(lowerings)
    assert torch.ops.cute.scaled_gradient.default in lowerings


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dynamic_rows_compile_once(backend: str) -> None:
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (2, 5, 9, 33):
            torch.testing.assert_close(run(compiled, m), run(block, m), rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1


def tied_reference(xp: Any, q: torch.Tensor, k: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    heads = xp.reshape(q, (*k.shape[:-1], q.shape[-2] // k.shape[-2], q.shape[-1])) * k[..., None, :]
    flat = xp.reshape(heads, q.shape)
    return flat[..., : q.shape[-1] // 2] - flat[..., q.shape[-1] // 2 :]


TIED = Op(
    "tied", inputs={"q": Tensor("*m b g*r d", "T"), "k": Tensor("*m b g d", "T"), "ends": Tensor("b+1", "int32")},
    outputs={"out": Tensor("*m b g*r d/2", "T")}, dtypes={"T": FLOATS}, reference=tied_reference, kernel="m:K",
)  # fmt: skip


@pytest.mark.slow
def test_sizes_that_follow_from_others_may_be_symbolic() -> None:
    function = cute_ops_torch.register(TIED, "sizes")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")

    def given(b: int, g: int, r: int, d: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(3, b, g * r, d), torch.randn(3, b, g, d), torch.zeros(b + 1, dtype=torch.int32)

    with torch._dynamo.config.patch(error_on_recompile=True):
        for sizes in ((4, 2, 3, 8), (5, 3, 5, 6), (7, 4, 2, 10)):
            tensors = given(*sizes)
            torch.testing.assert_close(compiled(*tensors), function(*tensors))
    torch.library.opcheck(torch.ops.sizes.tied.default, tensors)
    q, k, ends = given(4, 2, 3, 8)
    one_by_one = torch.stack([function(one, other, ends) for one, other in zip(q, k, strict=True)])
    torch.testing.assert_close(torch.vmap(function, (0, 0, None))(q, k, ends), one_by_one)


@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e8m0fnu", "uint32"])
def test_dtypes_that_none_of_our_ops_has(dtype: str) -> None:
    x = Tensor("*m n", dtype)
    op = Op(f"copy_{dtype}", inputs={"x": x}, outputs={"out": x}, dtypes={}, reference=lambda xp, x: x, kernel="m:K")
    function = cute_ops_torch.register(op, "narrow")
    rows = torch.arange(24, dtype=torch.uint8).view(getattr(torch, dtype)).reshape(2, -1)
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        out = run(rows)
        assert out.dtype == rows.dtype and torch.equal(out.view(torch.uint8), rows.view(torch.uint8))
        assert out.data_ptr() != rows.data_ptr()


def test_torch_checks_an_op_whose_attribute_names_a_dtype() -> None:
    cute_ops_torch.register(rounding.double, "rounding")
    for dtype in rounding.double.choices["out_dtype"]:
        x = torch.randn(3, 8, requires_grad=True)
        torch.library.opcheck(torch.ops.rounding.double.default, (x,), {"out_dtype": dtype})


def test_automatic_dynamic_rows_compile_twice_at_most() -> None:
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for m in (2, 5, 9, 33):
        run(compiled, m)
    assert counters["stats"]["unique_graphs"] == 2  # once as seen first, once with dynamic rows


def test_modules() -> None:
    norm = cute_ops_torch.nn.RMSNorm(64, eps=1e-5, bias=True)
    compiled_norm = torch.compile(norm, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (2, 3, 7):
            x = torch.randn(m, 64)
            torch.testing.assert_close(compiled_norm(x), norm(x), rtol=0, atol=0)


def test_code_from_a_cache_finds_the_ops_of_programs() -> None:
    """Of a compiled program's gradient no fake kernel runs, so the forward's defines what it may call."""
    import torch._inductor  # what tells that there may be such code

    total = linear_cross_entropy_total
    registry.define(total, "from_a_cache")
    torch.ops.from_a_cache.linear_cross_entropy_total(
        *(torch.empty(s, device="meta") for s in ((2, 3), (5, 3))), torch.empty(2, dtype=torch.int64, device="meta")
    )
    names = [step.name for step in (total.saving, *total.saving.narrowed)]
    assert len(names) == 8 and all(hasattr(torch.ops.from_a_cache, name) for name in names)


@pytest.mark.drawn(0.5, among="inductor")
@pytest.mark.slow
def test_inductor_calls_ops_directly() -> None:
    from torch._inductor.utils import run_and_get_code

    def function(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> Any:
        h, _ = cute_ops_torch.add_rmsnorm(x + 1, y, None, w, eps=1e-5)
        h = cute_ops_torch.rmsnorm(h * 2, None, w, eps=1e-5)
        return torch.cat([cute_ops_torch.silu_mul(h, y.cos()), h]).sin()

    def step(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        out = function(*tensors)
        return [out, *torch.autograd.grad(out.sum(), tensors)]

    x, y = torch.randn(4, 3, 64), torch.randn(3, 4, 64).transpose(0, 1)
    tensors = [t.requires_grad_() for t in (x, y, torch.randn(64))]
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    with torch.no_grad():
        _, (inference,) = run_and_get_code(compiled, *tensors)
    got, (forward, backward) = run_and_get_code(step, compiled, *tensors)
    torch.testing.assert_close(got, step(function, *tensors), rtol=1e-4, atol=1e-4)
    for code in (forward, backward, inference):
        assert "torch.ops.cute." not in code
    # Each call has a function of its own, made for the inputs and attributes that it has, the outputs that are read,
    # and the inputs that may lie anywhere: what the graph is given, and in a backward what may reuse memory of that.
    # Its key is the sizes.
    calls = []
    for code in (inference, backward):
        known = dict(re.findall(r"^(cute_\w+) = extern_kernels\.cute_(.*)$", code, re.MULTILINE))
        for name, arguments in re.findall(r" = (cute_\w+)\((.*)\)$", code, re.MULTILINE):
            arguments = re.sub(r"^(\(s[\w, ]*\)|s\d+)(?=, )", "SIZES", arguments)
            calls.append((known[name], re.sub(r"\b[a-z]\w*", "T", arguments)))
    assert calls == [
        # Nobody reads residual_out.
        (
            "add_rmsnorm_cpu4(('x', 'residual', 'bias'), (1e-05, 0.0, ), ('out',), ('residual', 'bias'), True)",
            "SIZES, T, T, T, T",
        ),
        ("rmsnorm_cpu4(('x', 'bias'), (1e-05, 0.0, ), ('out',), ('bias',), True)", "SIZES, T, T, T"),
        ("silu_mul_cpu4(('gate', 'up'), (), ('out',), (), True)", "SIZES, T, T, T"),
        (
            "silu_mul_bwd_cpu4(('gate', 'up', 'dout'), (), ('dgate', 'dup'), ('gate', 'up', 'dout'), True)",
            "SIZES, T, T, T, T, T",
        ),
        (
            "rmsnorm_bwd_cpu4(('x', 'dout', 'bias'), (1e-05, 0.0, ), ('dx', 'dbias'), ('x', 'dout', 'bias'), True)",
            "SIZES, T, T, T, T, T",
        ),
        (
            "add_rmsnorm_bwd_cpu4(('residual_out', 'dout', 'bias'), (1e-05, 0.0, ), ('dresidual', 'dbias'), "
            "('residual_out', 'dout', 'bias'), True)",
            "SIZES, T, T, T, T, T",
        ),
    ]


@pytest.mark.slow
@pytest.mark.some_ops
@pytest.mark.feature("compile: full graph, any number of rows, backward")
def test_every_op_and_gradient_in_inductor(op: Op, make_inputs: Callable[..., Any]) -> None:
    """All outputs are read, and each alone is. Nothing but the op is in the graph: no C++ to compile."""
    function = testing.plain(op, getattr(cute_ops_torch, op.name))
    reads = (None, *range(len(op.shown)))

    def step(groups: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        results = []
        for read, tensors in zip(reads, groups, strict=True):
            outs = function(*tensors)
            outs = outs if isinstance(outs, tuple) else (outs,)
            results += [o for k, o in enumerate(outs) if read in (None, k)]
        return results

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (7, 4):  # no other dim is 7: sizes that agree at first are taken for one
            groups = [
                [
                    t.requires_grad_(n in op.differentiable)
                    for n, t in zip(op.inputs, make_inputs(op, (m, 5)), strict=True)
                ]
                for _ in reads
            ]
            leaves = [t for group in groups for t in group if t.requires_grad]
            both = [compiled(groups), step(groups)]
            torch.testing.assert_close(*both, rtol=1e-5, atol=1e-5)
            losses = [sum(o.sin().sum() for o in outs) for outs in both]
            # A norm that nobody reads has none.
            grads = [torch.autograd.grad(loss, leaves, materialize_grads=True) for loss in losses]
            torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.some_ops
@pytest.mark.feature("compile: inference")
def test_every_op_in_inductor(any_op: Op, make_inputs: Callable[..., Any]) -> None:
    raw = runner.functional(any_op)
    compiled = torch.compile(lambda *tensors: raw(*tensors), fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (7, 4):
            tensors = make_inputs(any_op, (m, 5))
            torch.testing.assert_close(compiled(*tensors), raw(*tensors), rtol=0, atol=0)


def test_a_float_argument_as_an_attribute() -> None:
    compiled = torch.compile(lambda x, eps: cute_ops_torch.rmsnorm(x, eps=eps), fullgraph=True, dynamic=True)
    x = torch.randn(4, 64)
    for eps in (1e-6, 0.5):
        torch.testing.assert_close(compiled(x, eps), cute_ops_torch.rmsnorm(x, eps=eps), rtol=1e-5, atol=1e-5)


D = 16
WEIGHT, SCALE = torch.randn(D, D, requires_grad=True), torch.ones(D, requires_grad=True)
# Layers whose calls leave floats out.
LAYERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rmsnorm": lambda x: cute_ops_torch.rmsnorm(x, SCALE),
    "layernorm": lambda x: cute_ops_torch.layernorm(x, SCALE, SCALE),
    "attention": lambda x: cute_ops_torch.attention(x, x, x)[0],
    "scaled_dot_product_attention": lambda x: cute_ops_torch.scaled_dot_product_attention(x, x, x),
    "cross_entropy": lambda x: x * cute_ops_torch.cross_entropy(x.flatten(0, 2), torch.arange(24) % D).sum(),
    "linear_cross_entropy": lambda x: x * cute_ops_torch.linear_cross_entropy(
        x.flatten(0, 2), WEIGHT, torch.arange(24) % D
    ),
    "rmsnorm_linear": lambda x: cute_ops_torch.rmsnorm_linear(x, SCALE, WEIGHT),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("name", LAYERS)
def test_checkpointed_layers_share_no_symbol_of_a_default(name: str) -> None:
    """Each is a graph of its own, and Dynamo makes symbols of floats under dynamic=True."""

    def both(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(LAYERS[name], x, use_reentrant=False)
        return x

    compiled = torch.compile(both, backend="eager", fullgraph=True, dynamic=True)
    for m in torch.randint(2, 6, (2,)).tolist():
        x = torch.randn(m, 24 // 4, 4, D)[: 1 if "cross" in name else None].requires_grad_()
        found, expected = compiled(x), both(x)
        torch.testing.assert_close(found, expected)
        for each in zip(*(torch.autograd.grad(out.sum(), x) for out in (found, expected)), strict=True):
            torch.testing.assert_close(*each)


@pytest.mark.slow
def test_compiled_autograd() -> None:
    """A backward that torch traces while it runs, of a forward that it has not seen."""
    x, weight, index = torch.randn(3, 64), torch.randn(64, requires_grad=True), torch.randint(3, (5,))
    for eps in (1e-6, 0.5):
        for function in (cute_ops_torch.rmsnorm, torch.ops.cute.rmsnorm):
            rows, grads = x.clone().requires_grad_(), []
            for compiled in (True, False):
                out = function(cute_ops_torch.embedding(index, rows), weight, eps=eps)
                with compiled_autograd._enable(torch.compile(backend="aot_eager")) if compiled else nullcontext():
                    grads.append(torch.autograd.grad(out.pow(2).sum(), (rows, weight)))
            torch.testing.assert_close(*grads)


def test_an_attribute_that_changes_is_seen() -> None:
    compiled = torch.compile(cute_ops_torch.rmsnorm, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 64)
    for eps in (1e-6, 1.0):
        torch.testing.assert_close(compiled(x, eps=eps), cute_ops_torch.rmsnorm(x, eps=eps), rtol=0, atol=0)


def test_bad_shapes_fail_while_compiling() -> None:
    compiled = torch.compile(cute_ops_torch.rmsnorm, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="argument `weight` has n=32, but n=64"):
        compiled(torch.randn(2, 64), torch.ones(32))
