"""Ops with lists of tensors as ops of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_ops_torch
from cute_ops import FLOATS, Op, Tensor, testing
from cute_ops_torch.host.function import make_function
from cute_ops_torch.registry import define
from cute_ops_torch.tools import runner
from tests.ops import listing

FORWARDS = listing.add_n, listing.scale_all, listing.concatenate
add_n, scale_all, concatenate = (cute_ops_torch.register(op) for op in FORWARDS)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensors(*rows: int, device: str = "cpu", requires_grad: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(r, 8, device=device, requires_grad=requires_grad) for r in rows]


def calls(device: str = "cpu") -> list[tuple[Any, Any, Any]]:
    """A function, torch's own of the same, and their arguments."""
    factors, own = torch.randn(3, device=device), tensors(1, 5, 3, device=device)
    return [
        (add_n, lambda xs: xs[0] + xs[1] + xs[2], (tensors(4, 4, 4, device=device),)),
        (scale_all, lambda xs, fs: [x * f for x, f in zip(xs, fs, strict=True)], (own, factors)),
        (concatenate, torch.cat, (own,)),
    ]


def loss(found: Any) -> torch.Tensor:
    return sum(out.sin().sum() for out in (found if isinstance(found, list) else [found]))


def gradients(function: Any, xs: list[torch.Tensor], *rest: Any) -> tuple[Any, Any]:
    found = function(xs, *rest)
    return found, list(torch.autograd.grad(loss(found), [x for x in xs if x.requires_grad]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True])
def test_values_and_a_list_of_gradients(device: str, compiled: bool) -> None:
    for function, expected, arguments in calls(device):
        run = torch.compile(function, fullgraph=True) if compiled else function
        torch.testing.assert_close(gradients(run, *arguments), gradients(expected, *arguments))
        frozen = [x.detach() if i == 1 else x for i, x in enumerate(arguments[0])]
        torch.testing.assert_close(gradients(run, frozen, *arguments[1:]), gradients(expected, frozen, *arguments[1:]))


def test_a_plain_call_goes_past_the_dispatcher() -> None:
    """A list or a tuple of tensors that no mode observes; a call with anything else does not."""
    calls: list[Any] = []
    run = make_function(listing.add_n, calls.append, define(listing.add_n, "cute").fast_path, devices=("cpu",))
    xs = tensors(4, 4)
    assert torch.equal(run(xs), run(tuple(xs))) and not calls
    for observed in (
        [xs[0], torch.ones(4, 8, device="meta")],
        [xs[0], torch.ones(4, 8, dtype=torch.cfloat).conj().imag],
    ):
        run(observed)
        assert calls.pop() is observed


def test_no_outputs_are_given() -> None:
    xs = tensors(4, 4, requires_grad=False)
    for function in (add_n, concatenate):
        with pytest.raises(TypeError, match=rf"^cute\.{function.__name__}: unknown argument `out`; it takes `xs`"):
            function(xs, out=xs[0])


def test_schemas_have_lists() -> None:
    assert str(torch.ops.cute.add_n.default._schema) == "cute::add_n(Tensor[] xs) -> Tensor"
    assert str(torch.ops.cute.scale_all.default._schema) == (
        "cute::scale_all(Tensor[] xs, Tensor factors, float alpha=1.) -> Tensor[]"
    )


@pytest.mark.parametrize("k", range(3), ids=["add_n", "scale_all", "concatenate"])
def test_torch_checks_the_registration(k: int) -> None:
    op, (_, _, arguments) = FORWARDS[k], calls()[k]
    found = torch.library.opcheck(getattr(torch.ops.cute, op.name).default, arguments)
    found |= torch.library.opcheck(define(op.unrolled({"k": 3}), "cute").overload, (*arguments[0], *arguments[1:]))
    assert set(found.values()) == {"SUCCESS"}


def test_vmap() -> None:
    batches = [torch.randn(2, r, 8) for r in (1, 5, 3)]
    for function in (concatenate, torch.ops.cute.concatenate):
        found = torch.vmap(lambda *xs, f=function: f(list(xs)))(*batches)
        assert torch.equal(found, torch.cat(batches, 1))
    same = [torch.randn(2, 4, 8) for _ in range(3)]
    for function in (add_n, torch.ops.cute.add_n):
        each = torch.func.vmap(torch.func.grad(lambda *xs, f=function: loss(f(list(xs))), argnums=(0, 1, 2)))(*same)
        for gradient in each:
            torch.testing.assert_close(gradient, sum(same[1:], same[0]).cos())


def test_an_exported_program_keeps_the_op_with_lists() -> None:
    class Sum(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return add_n([a, b]).sin()

    xs = tensors(4, 4, requires_grad=False)
    program = torch.export.export(Sum(), tuple(xs))
    assert torch.ops.cute.add_n.default in [node.target for node in program.graph.nodes]
    assert torch.equal(program.module()(*xs), (xs[0] + xs[1]).sin())
    assert torch.equal(program.run_decompositions().module()(*xs), (xs[0] + xs[1]).sin())


@pytest.mark.parametrize(
    "one", [one for op in FORWARDS for each in (op, *op.steps) for one in each.instances], ids=lambda op: op.name
)
def test_values_against_float64(one: Op) -> None:
    (case,) = one.cases
    arrays, attrs = testing.inputs(one, case, "bfloat16"), testing.attributes(one, case)
    testing.check(one, arrays, attrs, runner.run(one, arrays, attrs))


def test_inputs_that_are_written() -> None:
    rows = Tensor("r n", "T", many="k", own=("r",))
    grow = cute_ops_torch.register(
        Op(
            "grow", inputs={"xs": rows, "by": Tensor("k", "float32")}, outputs={}, mutates=("xs",),
            dtypes={"T": FLOATS}, kernel="a:B",
            reference=lambda xp, xs, by: ([x * by[i] for i, x in enumerate(xs)],),
        )
    )  # fmt: skip
    assert str(torch.ops.cute.grow.default._schema) == "cute::grow(Tensor(w0!)[] xs, Tensor by) -> ()"
    xs, by = tensors(2, 3, requires_grad=False), torch.tensor([2.0, 3.0])
    for run in (grow, torch.compile(grow, fullgraph=True)):
        given = [x.clone() for x in xs]
        assert run(given, by) is None
        torch.testing.assert_close(given, [xs[0] * 2, xs[1] * 3])


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        (torch.ones(3, 8), TypeError, "argument `xs` must be a list of tensors, got Tensor"),
        ([], ValueError, "argument `xs` is empty, expected one tensor or more"),
        ([torch.ones(3, 8), None], TypeError, r"argument `xs\[1\]` is required, but None was given"),
        ([torch.ones(3, 8)] * 2 + [torch.ones(3, 7)], ValueError, r"argument `xs\[2\]` has n=7, but n=8"),
        ([torch.ones(3, 8), torch.ones(3, 8).int()], TypeError, r"argument `xs\[1\]` has dtype int32, expected"),
        ([torch.ones(3, 8), torch.ones(3, 8, device="meta")], ValueError, r"`xs\[1\]` is on meta, but `xs\[0\]` is on"),
    ],
)
def test_what_is_refused(given: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=f"cute.add_n: .*{said}"):
        add_n(given)
