"""Torch's own product where it is the faster one: what is remembered of it, and that it is what the program says."""

from __future__ import annotations

import itertools
import logging
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cute_ops_torch
from cute_ops import Op
from cute_ops.autotune import dispatch
from cute_ops.jit.target import parse
from cute_ops.ops.gemm import by_call, choice, linear
from cute_ops.ops.gemm.fused import fused_linear
from cute_ops.ops.gemm.gated_dgrad import gated_dgrad_again
from cute_ops.ops.gemm.named import linear_add, linear_gelu
from cute_ops_torch.composite.products import products as composites
from cute_ops_torch.host import compiled_call, framework_gradient, function, guards, launch
from cute_ops_torch.host.fast_path import FastPath
from cute_ops_torch.library import products, program
from cute_ops_torch.library.tensors import bind_tensors
from cute_ops_torch.registry import define

Tensor = torch.Tensor
BIASED = by_call.op_of_call("bias", ("n",))
ACROSS = by_call.op_of_call("bias", ("n",), layout="k n")
# What comes next reads a float32 product, and the weight says the output's dtype.
WIDE = fused_linear(
    lambda xp, acc, bias: xp.gelu(acc + bias), operands={"bias": "n"}, name="wide_gelu", dtypes={"acc": "float32"}
)
PRODUCTS = [
    *linear.PRODUCTS, *(op.batched for op in linear.PRODUCTS), *linear.product_gradients("dout", across=True),
    BIASED, ACROSS, linear_gelu, linear_gelu.saving, linear_add, WIDE, WIDE.saving, gated_dgrad_again(False),
]  # fmt: skip
ROWS = {"m": (2, 3), "n": 16, "k": 8, "b": (2,)}


def made(op: Op, m: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    batch = "*b" in op.inputs[next(iter(op.inputs))].shape
    sizes = ROWS | {"m": m[-1] if batch else m}
    torch.manual_seed(0)
    return [torch.randn(t.of(sizes)).to(torch.float32 if t.dtype == "float32" else dtype) for t in op.inputs.values()]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.target, "of_device", lambda index: parse("sm_90a"))
    monkeypatch.setattr(choice, "ERROR", 0.0)  # small products with a bias are the framework's, too


@pytest.fixture
def fast(hopper: None) -> Callable[[Op], Callable[..., Any]]:
    """The public function of an op as on a GPU; its kernels are not there."""

    def make(op: Op) -> Callable[..., Any]:
        known, launcher = define(op), launch.Launcher(op)
        path = FastPath(op, lambda: launcher, known.nodes)
        return function.make_function(op, known.overload, path, devices=("cpu",))

    return make


def exact(op: Op, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """By the program, as JAX and devices that share terms run it."""
    attrs = op.keywords | {"fused": "never"}
    found = program.run(op.fallback.program, bind_tensors(op, tensors, list(attrs.values())), tensors, program.call)
    return tuple(found)


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("m", [(3,), (2, 3), (1,), (5, 1, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda op: op.name)
def test_what_is_remembered_is_the_program(product: Op, dtype: torch.dtype, m: tuple[int, ...]) -> None:
    """New compact outputs, and given ones: compact, or rows with gaps; also while a gradient could be wanted."""
    define(product)
    tensors = made(product, m, dtype)
    turned = [t.mT.contiguous().mT if t.ndim > 1 else t for t in tensors] if product.name in TURNED else tensors
    attrs = [*(product.keywords | {"fused": "never"}).values()]
    for given in (tensors, turned):
        call = compiled_call.of_program(bind_tensors(product, given, attrs), product.fallback.program)
        assert call.unobserved is not None
        outs = as_tuple(call.run(*given))
        for out, other, wanted in zip(outs, as_tuple(call.unobserved(*given)), exact(product, given), strict=True):
            assert out.is_contiguous() and out.dtype == wanted.dtype and torch.equal(out, other)
            torch.testing.assert_close(out, wanted, rtol=2**-6, atol=2**-6)
        fill = call.fill(tuple(product.outputs))
        gaps = [torch.full((*o.shape[:-1], o.shape[-1] + 8), torch.nan, dtype=o.dtype) for o in outs]
        for places in ([torch.full_like(o, torch.nan) for o in outs], [g[..., :-8] for g in gaps]):
            for grad in (False, True):
                with torch.set_grad_enabled(grad):
                    assert fill(*given, *places) == ()
                for place, out in zip(places, outs, strict=True):
                    torch.testing.assert_close(place, out, rtol=2**-6, atol=2**-6)
                    place.fill_(torch.nan)
        assert all(gap[..., -8:].isnan().all() for gap in gaps)


TURNED = [op.name for op in PRODUCTS if all(len(t.axes) > 1 for t in list(op.inputs.values())[:2])]


def test_autocast_changes_no_dtype(hopper: None) -> None:
    for op in (linear.linear, BIASED, linear_gelu):
        define(op)
        tensors = made(op, (3,), torch.float32)
        call = launch.prepare(op, tensors, [*op.keywords.values()])
        wanted, given = call.run(*tensors), torch.empty(3, 16)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(call.run(*tensors), wanted)
            call.fill(("out",))(*tensors, given)
        assert torch.equal(given, wanted)


def frames(call: Callable[[], Any]) -> list[str]:
    """The Python functions that a call runs, without list comprehensions, which are frames on Python 3.11 only."""
    found: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [name for name in found[1:] if name != "<listcomp>"]


def test_a_known_call_runs_torchs_function_and_little_else(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public function in what suggests names, the op's, its look at the compiler, and the guard; for an epilogue
    two more functions find the op.
    """
    plain, biased = fast(linear.linear), fast(BIASED)
    monkeypatch.setattr(composites, "plain", plain)
    monkeypatch.setattr(composites, "function", lambda op: biased)
    monkeypatch.setattr(composites, "known", {})
    x, weight, bias = made(BIASED, (2, 3))
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Tensor]]] = {
        "linear": (lambda: cute_ops_torch.linear(x, weight), lambda: F.linear(x, weight)),
        "bias": (
            lambda: cute_ops_torch.linear(x, weight, bias, epilogue="bias"), lambda: F.linear(x, weight, bias),
        ),
    }  # fmt: skip
    for required in (False, True):
        for t in (x, weight, bias):
            t.requires_grad_(required)
        for name, (call, torchs) in calls.items():
            for _ in range(2):
                assert torch.equal(call(), torchs())
            seen = frames(call)
            assert len(seen) == (5 if name == "linear" else 7), seen
            with torch.no_grad():
                assert len(frames(call)) == len(seen)


NODES = {"linear": "cute_linearBackward", BIASED.name: f"cute_{BIASED.name}Backward"}


@pytest.mark.parametrize("product", [linear.linear, BIASED], ids=lambda op: op.name)
def test_torch_differentiates_its_own_product(
    product: Op, fast: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it is the faster one for each gradient that is wanted; the log says so once of each."""
    call = fast(product)
    for wanted in dict.fromkeys([("x",), ("weight",), ("x", "weight"), tuple(product.inputs)]):
        leaves = [
            t.requires_grad_(name in wanted) for name, t in zip(product.inputs, made(product, (2, 3)), strict=True)
        ]
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "cute_ops"):
            for _ in range(3):
                out = call(*leaves)
        assert not type(out.grad_fn).__name__.startswith("cute")
        # Inputs of the first call are those of the others, but for who requires a gradient.
        said = [record.message.partition("{")[0] for record in caplog.records]
        assert [name for name in said if name != product.name] == [
            f"linear_d{name}" for name in ("x", "weight") if name in wanted
        ]
        some, dout = [t for t in leaves if t.requires_grad], torch.randn_like(out)
        expected = torch.autograd.grad(torch.ops.cute.linear(*leaves[:2]) + sum(leaves[2:]), some, dout)
        torch.testing.assert_close(torch.autograd.grad(out, some, dout), expected, rtol=2**-6, atol=2**-6)
        (first, *_) = torch.autograd.grad(call(*leaves).square().sum(), some, create_graph=True)
        first.sum().backward()  # a second derivative, too
        with torch.no_grad():
            assert not call(*leaves).requires_grad


@pytest.mark.parametrize("product", [linear.linear, BIASED], ids=lambda op: op.name)
@pytest.mark.parametrize("ours", ["linear_dx", "linear_dweight"])
def test_a_gradient_that_a_kernel_computes_takes_a_node(
    product: Op, ours: str, fast: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = dispatch.fallback
    choose = lambda binding, *where: None if binding.op.name == ours else chosen(binding, *where)  # noqa: E731
    monkeypatch.setattr(framework_gradient.dispatch, "fallback", choose)
    x, weight, *others = made(product, (2, 3))
    call = fast(product)
    for _ in range(2):
        out = call(x.requires_grad_(), weight.requires_grad_(), *others)
        assert type(out.grad_fn).__name__ == NODES[product.name]
        one = {"linear_dx": weight, "linear_dweight": x}[ours]  # whose gradient torch's product computes
        others_frozen = [t.detach() if t is not one else t for t in (x, weight)]
        assert not type(call(*others_frozen, *others).grad_fn).__name__.startswith("cute")


def test_long_sums_of_a_bias_are_ours(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bias that needs no gradient nothing is summed up."""
    for most, ours in ((7 * 16, False), (7 * 16 - 1, True)):
        monkeypatch.setattr(framework_gradient, "MOST_SUMMED", most)
        call = fast(BIASED)
        x, weight, bias = (t.requires_grad_() for t in made(BIASED, (7,)))
        assert weight.shape[0] == 16
        assert type(call(x, weight, bias).grad_fn).__name__.startswith("cute") == ours
        assert not type(call(x, weight, bias.detach()).grad_fn).__name__.startswith("cute")


def test_weights_of_many_sizes_that_read_one_x_are_all_known(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys, gate and head of a model, with gradients and without, also by another `fused`."""
    call = fast(linear.linear)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    weights = [torch.randn(8 * n, 8, dtype=torch.bfloat16, requires_grad=n % 2 == 0) for n in range(1, 13)]

    def every() -> None:
        for weight in weights:
            for fused in ("auto", "never"):
                assert torch.equal(call(x, weight, fused), F.linear(x, weight))
                assert torch.equal(call(x, weight.detach(), fused), F.linear(x, weight))

    every()
    with monkeypatch.context() as patch:
        patch.setattr(FastPath, "specialize", None)
        every()
    with pytest.raises(TypeError, match="argument `weight` is required, but None was given"):
        call(x, None)


def test_gradients_of_a_call_are_planned_once(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where kinds of calls of the same shapes are more than are known at a time."""
    done, planned = list[Any](), framework_gradient._products_are_faster
    monkeypatch.setattr(
        framework_gradient, "_products_are_faster", lambda *call: done.append(call[-1]) or planned(*call)
    )
    call, tensors = fast(linear.linear), made(linear.linear, (3,))
    kinds = [
        [kind(t, grad) for kind, t, grad in zip(types, tensors, grads, strict=True)]
        for types in itertools.product((torch.nn.Parameter, lambda t, grad: t.detach().requires_grad_(grad)), repeat=2)
        for grads in itertools.product((True, False), repeat=2)
    ]
    assert len(kinds) > guards.CHAIN
    for _ in range(3):
        for given in kinds:
            out = call(*given)
            assert (out.grad_fn is None) == (not any(t.requires_grad for t in given))
            assert not type(out.grad_fn).__name__.startswith("cute")
    assert sorted(done) == [("weight",), ("x",), ("x", "weight")]


def test_a_gradient_in_autocast_takes_a_node(fast: Any) -> None:
    """Torch's backward would run in other dtypes there."""
    call = fast(linear.linear)
    x, weight = (t.requires_grad_() for t in made(linear.linear, (3,), torch.float32))
    names = []
    for on in (False, True, False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            out = call(x, weight)
            assert out.dtype == torch.float32
            names.append(type(out.grad_fn).__name__)
    assert names[1::2] == ["cute_linearBackward"] * 2
    assert not any(name.startswith("cute") for name in names[::2])


def test_what_torchs_function_runs_may_lie_anywhere(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it was chosen for aligned operands; which of both is faster for others does not follow from those."""
    x, weight = made(linear.linear, (3,))
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    for first, other, planned in ((x, shifted, 1), (shifted, x, 2)):
        call, prepare, done = fast(linear.linear), launch.prepare, list[Op]()
        with monkeypatch.context() as patch:
            patch.setattr(launch, "prepare", lambda op, *args: done.append(op) or prepare(op, *args))  # noqa: B023
            for given in (first, other, first, other):
                assert torch.equal(call(given, weight), F.linear(given, weight))
        assert len(done) == planned


def test_operands_lie_in_any_layout_on_a_gpu(fast: Any, compiled: Any) -> None:
    """Drawn layouts of each operand: no stride of 1, rows that no stride steps over, rows off a vector. What our kernel
    does not read where it lies is given to the framework's product, and what the pass does not read is copied.
    """
    ops, rng = (linear.linear, linear.linear_dweight, linear_add, linear_gelu, BIASED), random.Random(0)
    calls = {op: fast(op) for op in ops}
    compiled.ops.update({op.name: op for op in (*ops, *(step for op in ops[2:] for step in op.fallback.program.ops))})
    for _ in range(40):
        op, dtype = rng.choice([*calls]), rng.choice([torch.bfloat16, torch.float16, torch.float32])
        tensors = [lying(rng.choice(LAYOUTS), t) for t in made(op, (2, 3), dtype)]
        wanted = calls[op](*[t.contiguous() for t in tensors])
        torch.testing.assert_close(calls[op](*tensors), wanted, rtol=2**-6, atol=2**-6)


LAYOUTS = ("compact", "apart", "steps", "turned")


def lying(how: str, tensor: Tensor) -> Tensor:
    """The values of a tensor in another layout, beside NaN."""
    if how == "turned":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    more = {"compact": tensor.shape[-1], "apart": tensor.shape[-1] + 3, "steps": 2 * tensor.shape[-1]}[how]
    wide = torch.full((*tensor.shape[:-1], more), torch.nan, dtype=tensor.dtype)
    view = wide[..., ::2] if how == "steps" else wide[..., : tensor.shape[-1]]
    return view.copy_(tensor)


def test_one_tensor_as_both_operands(fast: Any) -> None:
    """No guard fits such a call."""
    call, x = fast(linear.linear), torch.randn(8, 8, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        (got,) = torch.autograd.grad(call(x, x).sum(), [x])
        (wanted,) = torch.autograd.grad(F.linear(x, x).sum(), [x])
        assert torch.equal(got, wanted)


def test_a_bias_of_another_dtype_is_added_by_a_pass(hopper: None) -> None:
    define(BIASED)
    x, weight, bias = made(BIASED, (2, 3))
    for given, alone in ((bias, True), (bias.float(), False)):
        call = launch.prepare(BIASED, [x, weight, given], ["auto"])
        assert call.differentiable == alone
        torch.testing.assert_close(call.run(x, weight, given), F.linear(x, weight, bias), rtol=2**-6, atol=2**-6)
    assert not products.adds_bias(ACROSS.fallback.program.product, *(bind_of(ACROSS, x, weight.T, bias)))


def bind_of(op: Op, *tensors: Tensor) -> tuple[Any, Any]:
    inputs = bind_tensors(op, tensors, ["auto"]).inputs
    return inputs["x"], inputs["bias"]
