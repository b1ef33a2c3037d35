"""Ops with lists of tensors as ops of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_ops_torch
from cute_ops import FLOATS, Op, Tensor
from cute_ops_torch.host.function import make_function
from cute_ops_torch.registry import define
from tests.ops import listing

FORWARDS = listing.add_n, listing.scale_all, listing.concatenate
add_n, scale_all, concatenate = (cute_ops_torch.register(op) for op in FORWARDS)


def tensors(*rows: int, device: str = "cpu", requires_grad: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(r, 8, device=device, requires_grad=requires_grad) for r in rows]


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
    rows = Tensor("r n", "T", many="k", own=("r",))
    grow = Op(
        "grow_in_place", inputs={"xs": rows, "by": Tensor("k", "float32")}, outputs={}, mutates=("xs",),
        dtypes={"T": FLOATS}, kernel="a:B", reference=lambda xp, xs, by: ([x * by[i] for i, x in enumerate(xs)],),
    )  # fmt: skip
    cute_ops_torch.register(grow)
    schema = str(torch.ops.cute.grow_in_place.default._schema)
    assert schema == "cute::grow_in_place(Tensor(w0!)[] xs, Tensor by) -> ()"


@pytest.mark.parametrize("k", range(3), ids=["add_n", "scale_all", "concatenate"])
def test_torch_checks_the_registration(k: int) -> None:
    op, xs = FORWARDS[k], tensors(*((4, 4, 4) if k == 0 else (1, 5, 3)))
    arguments = (xs, torch.randn(3)) if k == 1 else (xs,)
    found = torch.library.opcheck(getattr(torch.ops.cute, op.name).default, arguments)
    found |= torch.library.opcheck(define(op.unrolled({"k": 3}), "cute").overload, (*arguments[0], *arguments[1:]))
    assert set(found.values()) == {"SUCCESS"}


def test_batches_of_raw_ops() -> None:
    batches, same = [torch.randn(2, r, 8) for r in (1, 5, 3)], [torch.randn(2, 4, 8) for _ in range(3)]
    found = torch.vmap(lambda *xs: torch.ops.cute.concatenate(list(xs)))(*batches)
    assert torch.equal(found, torch.cat(batches, 1))
    total = torch.func.grad(lambda *xs: torch.ops.cute.add_n(list(xs)).sin().sum(), argnums=(0, 1, 2))
    for gradient in torch.func.vmap(total)(*same):
        torch.testing.assert_close(gradient, sum(same[1:], same[0]).cos())


@pytest.mark.slow
def test_an_exported_program_keeps_the_op_with_lists() -> None:
    class Sum(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return add_n([a, b]).sin()

    xs = tensors(4, 4, requires_grad=False)
    program = torch.export.export(Sum(), tuple(xs))
    assert torch.ops.cute.add_n.default in [node.target for node in program.graph.nodes]
    assert torch.equal(program.module()(*xs), (xs[0] + xs[1]).sin())
    assert torch.equal(program.run_decompositions().module()(*xs), (xs[0] + xs[1]).sin())


def test_all_tensors_are_on_one_device() -> None:
    with pytest.raises(ValueError, match=r"cute\.add_n: argument `xs\[1\]` is on meta, but `xs\[0\]` is on"):
        add_n([torch.ones(3, 8), torch.ones(3, 8, device="meta")])
