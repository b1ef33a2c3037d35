"""Composites' calls that are like an earlier one: what the program ran is run again, without its Python."""

from __future__ import annotations

import inspect
import itertools
import linecache
import re
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import cute_ops_torch
from cute_ops import Op, Program, Tensor
from cute_ops.composite.linear_cross_entropy import linear_cross_entropy_total
from cute_ops_torch.host import compiled_call, launch, recorded
from tests.ops import offered_products

PRODUCTS = [p for p in offered_products.PRODUCTS if p.op.program]
number = itertools.count()
Run = Callable[..., Any]


def of_run(run: Run, **more: Any) -> Op:
    """A composite of two matrices whose program is ``run(xp, call, x, y)``."""

    def program(xp: Any, call: Any, inputs: Any, attrs: Any) -> Any:
        return run(xp, call, inputs["x"], inputs["y"])

    rows = Tensor("m n", "T")
    return Op(
        f"recorded_{next(number)}", inputs={"x": rows, "y": rows}, outputs={"out": rows}, dtypes={"T": ("float32",)},
        kernel=Program(program), **more,
    )  # fmt: skip


def repeated(op: Op, *tensors: torch.Tensor) -> str:
    """The source that repeats a program."""
    call = launch.Launcher(op).find(tensors, ())
    assert call.unobserved is not None
    call.unobserved(*tensors)
    return "".join(linecache.getlines(f"<cute_ops {op.name}.program>"))


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda p: p.name)
def test_calls_of_a_composite_give_the_same_bits(product: offered_products.Product) -> None:
    """The first call, one like it with other numbers, and one by the program; with gradients, too."""
    function = product.of(cute_ops_torch)
    for grad in (False, True):
        for seed in (1, 2, 3):
            given = [torch.from_numpy(a) for a in product.arrays((3, 5 + grad), seed=seed)]
            for place in product.differentiable if grad else ():
                given[place].requires_grad_()
            results = []
            for observed in (False, True):
                with torch.autograd.profiler.profile(enabled=observed):
                    found = function(*given)
                    found = found if isinstance(found, tuple) else (found,)
                    douts = [torch.ones_like(t) for t in found]
                    wanted = [t for t in given if t.requires_grad]
                    results.append([*found, *(torch.autograd.grad(found, wanted, douts) if grad else ())])
            for ours, theirs in zip(*results, strict=True):
                np.testing.assert_array_equal(ours.detach().numpy(), theirs.detach().numpy())


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_loss_of_a_head_in_chunks(reduction: str) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        hidden, weight = torch.randn(300, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
        target = torch.randint(0, 20, (300,))
        for rows in (None, 128):
            loss = cute_ops_torch.linear_cross_entropy(hidden, weight, target, reduction=reduction, chunk_rows=rows)
            expected = torch.nn.functional.cross_entropy(hidden @ weight.T, target, reduction=reduction)
            torch.testing.assert_close(loss, expected)
            found, wanted = (torch.autograd.grad(out.sum(), (hidden, weight)) for out in (loss, expected))
            torch.testing.assert_close(found, wanted)


def gradients(call: Run, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """What a call returns, and the gradients of what is float."""
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    found = call(*leaves)
    found = found if isinstance(found, tuple) else (found,)
    wanted = [t for t in leaves if t.requires_grad]
    grads = torch.autograd.grad(found, wanted, [torch.ones_like(t) for t in found], allow_unused=True)
    return [*(t.detach() for t in found), *(t for t in grads if t is not None)]


HEAD = torch.randn(6, 8), torch.randn(20, 8), torch.arange(6)
CALLS: dict[str, tuple[Run, tuple[torch.Tensor, ...]]] = {
    p.name: (p.of(cute_ops_torch), tuple(map(torch.from_numpy, p.arrays((2, 3))))) for p in PRODUCTS
} | {
    "embedding": (cute_ops_torch.embedding, (torch.arange(6), torch.randn(9, 8))),
    "cross_entropy": (cute_ops_torch.cross_entropy, (torch.randn(2, 3, 20), torch.arange(6).view(2, 3))),
    "gated_mlp, again": (
        partial(cute_ops_torch.gated_mlp, save="none"), (torch.randn(3, 8), torch.randn(12, 8), torch.randn(8, 6)),
    ),
    **{
        f"linear_cross_entropy, {reduction}": (
            partial(cute_ops_torch.linear_cross_entropy, reduction=reduction, chunk_rows=rows), HEAD,
        )
        for reduction, rows in (("none", 4), ("mean", None), ("sum", 4))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_known_call_runs_no_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any composite, in the forward and in the backward."""
    call, tensors = CALLS[name]
    for run in (call, partial(gradients, call)):
        expected = [run(*tensors) for _ in range(3)][-1]
        with monkeypatch.context() as patch:
            for module in (recorded, compiled_call):
                patch.setattr(module, "run_reference", None)
            torch.testing.assert_close(run(*tensors), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "embedding"])
def test_a_known_backward_looks_at_its_tensors_once(name: str) -> None:
    """Not in each of its steps: what a step gets follows from what the backward gets."""
    call, tensors = CALLS[name]
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    wanted, guards = [t for t in leaves if t.requires_grad], list[str]()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.endswith((".guarded>", *(f".guarded {k}>" for k in range(99)))):
            guards.append(frame.f_code.co_name)

    for _ in range(3):
        out = call(*leaves)
        outs = out if isinstance(out, tuple) else (out,)
        douts = [torch.ones_like(t) for t in outs]
        guards.clear()
        sys.setprofile(note)
        try:
            torch.autograd.grad(outs, wanted, douts, allow_unused=True)
        finally:
            sys.setprofile(None)
    # Of calls of one shape, those that another test has made may be asked first.
    assert len(set(guards)) == 1, guards


def test_a_gradient_that_is_the_cotangent_takes_no_step() -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    for wanted in (("residual",), ("bias",), ("residual", "bias")):
        residual, bias = torch.randn(3, 5), bias.detach().clone()
        named = {"residual": residual, "bias": bias}
        for name in wanted:
            named[name].requires_grad_()
        for _ in range(2):
            out = cute_ops_torch.linear(x, weight, bias, residual, epilogue="add")
            found = torch.autograd.grad(out, [named[name] for name in wanted], torch.full((3, 5), 2.0))
            for name, gradient in zip(wanted, found, strict=True):
                assert torch.equal(gradient, torch.full_like(named[name], 2.0 if name == "residual" else 6.0))


def test_a_mean_loss_of_one_chunk_takes_few_calls() -> None:
    """A product and two kernels; with gradients three products and three kernels."""
    given, step = (torch.randn(6, 8), torch.randn(24, 8), torch.arange(6)), linear_cross_entropy_total.saving
    assert step is not None
    narrowed = step.only("loss", "hidden_gradient", "weight_gradient")
    for op, calls in ((linear_cross_entropy_total, 3), (narrowed, 6)):
        call = launch.Launcher(op).find((*given, None, None), tuple({**op.attrs, "mean": True}.values()))
        assert call.unobserved is not None
        call.unobserved(*given)
        repeat = inspect.getclosurevars(call.unobserved).nonlocals["repeat"]
        lines = linecache.getlines(repeat.__code__.co_filename)
        assert len([line for line in lines if re.search(r"_c\d+\(.*_(in|t)\d", line)]) == calls, lines


def test_the_source_is_what_ran() -> None:
    """Views without copies are one instruction or none, and memory is given back after its last use."""

    def run(xp: Any, call: Any, x: Any, y: Any) -> Any:
        rows = x.reshape(-1, x.shape[-1])  # nothing is left of it
        product = torch.mm(rows, y.T)
        product.add_(1.0)
        unread = x.new_empty(3)
        assert unread.numel() == 3
        return {"out": torch.where(product > 0, product, y[:, :1])}

    op = of_run(run)
    source = repeated(op, torch.randn(3, 3), torch.randn(3, 3)).partition("_in1):\n")[2].split("\n")
    assert [re.sub(r"_c\d+", "_c", line.strip()) for line in source if "return run" not in line] == [
        "_t0 = _placed(_in1, _c, _c)", "_t1 = _c(_in0, _t0)", "del _t0", "_c(_t1, _c)",
        "_t3 = _c(_t1, 0)", "_t4 = _placed(_in1, _c, _c)", "_t5 = _c(_t3, _t1, _t4)", "del _t3, _t1, _t4",
        "return _t5", "",
    ]  # fmt: skip


def test_a_program_that_reads_elements_always_runs() -> None:
    ran = list[bool]()

    def run(xp: Any, call: Any, x: Any, y: Any) -> Any:
        ran.append(bool((x > y).all()))
        return {"out": x + y if ran[-1] else x - y}

    function = cute_ops_torch.register(of_run(run), "recorded")
    one, two = torch.ones(2, 3), torch.full((2, 3), 2.0)
    for _ in range(2):
        assert torch.equal(function(two, one), two + one)
        assert torch.equal(function(one, two), one - two)
    assert len(ran) == 4


def test_a_program_of_thousands_of_steps_is_not_written_down() -> None:
    def run(steps: int, xp: Any, call: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for _ in range(steps):
            x = x + y
        return {"out": x}

    x, y = torch.zeros(2, 3), torch.ones(2, 3)
    for steps in (recorded.MOST_LINES, recorded.MOST_LINES + 1):
        op = of_run(partial(run, steps))
        assert bool(repeated(op, x, y)) == (steps == recorded.MOST_LINES)
        assert (cute_ops_torch.register(op)(x, y) == steps).all()


def test_tensors_from_elsewhere_are_not_remembered() -> None:
    held = [torch.ones(3)]

    def run(xp: Any, call: Any, x: Any, y: Any) -> Any:
        return {"out": x + y * held[0]}

    function = cute_ops_torch.register(of_run(run), "recorded")
    x = torch.ones(2, 3)
    for factor in (1.0, 2.0, 3.0):
        held[0] = torch.full((3,), factor)
        assert torch.equal(function(x, x.clone()), torch.full((2, 3), 1 + factor))


def test_one_tensor_as_both_inputs() -> None:
    function = cute_ops_torch.register(of_run(lambda xp, call, x, y: {"out": x - 2 * y}), "recorded")
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    for first, second in ((x, x), (x, y), (x, x), (y, x)):
        assert torch.equal(function(first, second), first - 2 * second)


def test_outputs_are_new_tensors() -> None:
    function = cute_ops_torch.register(of_run(lambda xp, call, x, y: {"out": x.view(-1).view(x.shape)}), "recorded")
    for _ in range(3):
        x = torch.randn(2, 3)
        out = function(x, x.clone())
        assert torch.equal(out, x) and out.data_ptr() != x.data_ptr()


def test_nothing_that_ran_is_kept_alive() -> None:
    seen = list[weakref.ref[torch.Tensor]]()

    def run(xp: Any, call: Any, x: Any, y: Any) -> Any:
        made = x + y
        seen.append(weakref.ref(made))
        return {"out": made * 2}

    function, x = cute_ops_torch.register(of_run(run), "recorded"), torch.ones(2, 3)
    out = [function(x, x.clone()) for _ in range(2)]
    assert len(seen) == 1 and seen[0]() is None and torch.equal(out[0], out[1])


def test_observers_see_the_ops_of_a_program() -> None:
    x, weight, norm = torch.randn(4, 16), torch.randn(8, 16), torch.ones(16)
    for _ in range(2):
        cute_ops_torch.rmsnorm_linear(x, norm, weight)
    with torch.autograd.profiler.profile() as found:
        cute_ops_torch.rmsnorm_linear(x, norm, weight)
    assert {"cute::rmsnorm_linear", "cute::rmsnorm", "cute::linear"} <= {event.name for event in found.function_events}


def test_an_error_in_a_first_call_leaves_nothing() -> None:
    broken = [True]

    def run(xp: Any, call: Any, x: Any, y: Any) -> Any:
        if broken:
            raise RuntimeError("out of luck")
        return {"out": x + y}

    function, x = cute_ops_torch.register(of_run(run), "recorded"), torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="out of luck"):
        function(x, x.clone())
    assert torch._C._len_torch_function_stack() == 0
    broken.clear()
    assert [float(function(x, x.clone()).sum()) for _ in range(2)] == [12.0, 12.0]
