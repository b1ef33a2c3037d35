"""Lists of tensors: what declarations say of them, how calls are checked, and kernels that get them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_ops import FLOATS, Case, Finish, Op, Program, Sharding, Split, Tensor, testing
from cute_ops.calls import lookup, manifest
from cute_ops.calls.manifest import call_of
from cute_ops.declaration import lists
from cute_ops.declaration.binding import bind
from cute_ops.declaration.shapes import Array
from cute_ops.jit import cache, loader, target
from cute_ops.jit.plan import plan
from cute_ops.jit.target import parse
from cute_ops.testing import kernel_calls
from cute_ops.tools.verify import verify
from tests.ops import listing

FORWARDS = listing.add_n, listing.scale_all, listing.concatenate
OPS = [one for op in FORWARDS for each in (op, op.grad) for one in each.instances]
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def test_an_op_for_so_many_tensors() -> None:
    op = listing.scale_all.unrolled({"k": 2})
    assert op is listing.scale_all.unrolled({"k": 2}) is lists.named(listing.scale_all, "scale_all_of_2")
    assert str(op) == (
        "Op scale_all_of_2(xs_0: T[r_0 n], xs_1: T[r_1 n], factors: float32[2]) -> ys_0: T[r_0 n], ys_1: T[r_1 n]"
    )
    assert op.grad is listing.scale_all.grad.unrolled({"k": 2})
    assert op.differentiable == ("xs_0", "xs_1")
    assert op.cases == (Case("two", {"r_0": 3, "r_1": 40, "n": 8}),)


def test_sizes_that_follow_from_those_of_all() -> None:
    binding = bind(listing.concatenate.unrolled({"k": 3}), {f"xs_{i}": Array((i + 1, 8), "float32") for i in range(3)})
    assert binding.outputs == {"out": Array((6, 8), "float32")}


@pytest.mark.parametrize(
    ("given", "kind", "problem"),
    [
        ({"xs": np.zeros(3)}, TypeError, "argument `xs` must be a list of tensors, got ndarray"),
        ({}, TypeError, "argument `xs` must be a list of tensors, got None"),
        ({"xs": []}, ValueError, "argument `xs` is empty, expected one tensor or more"),
        ({"xs": [1, None]}, TypeError, "argument `xs[1]` is required, but None was given"),
        ({"xs": [1, 2], "ys": [1]}, ValueError, "argument `ys` has 1 tensors, but k=2 from `xs`"),
    ],
)
def test_what_is_no_list(given: dict[str, Any], kind: type[Exception], problem: str) -> None:
    lists_of_two = Op(
        "both", inputs={"xs": listing.LIST, "ys": listing.LIST}, outputs={"out": listing.ROWS}, dtypes={"T": FLOATS},
        reference=lambda xp, xs, ys: xs[0], kernel="a:B",
    )  # fmt: skip
    with pytest.raises(kind, match=re.escape(f"cute.both: {problem}")):
        lists.counts(lists_of_two, {"ys": [1, 2], **given})


def test_messages_name_the_tensor_of_a_list() -> None:
    shapes = [(3, 8), (2, 8), (4, 7)]
    with pytest.raises(ValueError) as raised:
        bind(
            listing.concatenate.unrolled({"k": 3}),
            {f"xs_{i}": Array(shape, "float32") for i, shape in enumerate(shapes)},
        )
    first, *_, last = str(raised.value).splitlines()
    assert first == "cute.concatenate: argument `xs[2]` has n=7, but n=8."
    assert last == "  bound so far: r[0]=3, n=8, r[1]=2, r[2]=4, T=float32"


MANY, ROW = Tensor("r n", "T", many="k", own=("r",)), Tensor("n", "T")
# A gradient without lists, that is written over its cotangent.
OVERWRITING = Op(
    "overwriting", inputs={"dout": ROW}, outputs={"dy": ROW._replace(donates="dout")}, dtypes={"T": FLOATS},
    reference=lambda xp, dout: dout, kernel="a:B",
)  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "declared"),
    [
        ("xs has own=('n',), but is not a list", {"inputs": {"xs": Tensor("n", "T", own=("n",))}}),
        ("xs: many is the name of how many tensors there are, 'k', got True",
         {"inputs": {"xs": Tensor("n", "T", many=True)}}),  # type: ignore[arg-type]
        ("xs has own=('m',), but 'm' is no dim of 'r n'", {"inputs": {"xs": MANY._replace(own=("m",))}}),
        ("out has dim 'r', whose size differs from tensor to tensor of a list",
         {"outputs": {"out": Tensor("r", "T")}}),
        ("gradient concatenate_bwd has lists of 'k', but wrong has lists of []",
         {"inputs": {"xs": Tensor("n", "T")}, "grad": listing.concatenate.grad}),
        ("output 'out' is a list of j, but no input is; there are ['k']",
         {"outputs": {"out": Tensor("n", "T", many="j")}}),
        ("output 'out' is a list of j, but no input is",
         {"inputs": {"xs": Tensor("n", "T")}, "outputs": {"out": Tensor("n", "T", many="j")}}),
        ("xs: 'k' is how many tensors there are, so it is no dim of each",
         {"inputs": {"xs": Tensor("k n", "T", many="k")}}),
        ("out: the number of tensors may only be a dim or a factor of one", {"outputs": {"out": Tensor("k+1", "T")}}),
        ("xs has 'optional', which a list cannot have", {"inputs": {"xs": MANY._replace(optional=True)}}),
        ("'r' has a size of its own in each tensor: devices cannot share it",
         {"outputs": {"out": MANY}, "sharding": Sharding(parallel=("r",))}),
        ("case 'a' must give the number 'k'", {"cases": (Case("a", {"n": 8}),)}),
        ("case 'a' must have 2 sizes for 'r', got 3", {"cases": (Case("a", {"k": 2, "r": 3, "n": 8}),)}),
        ("'xs_1' is the name of one of 'xs'", {"inputs": {"xs": MANY, "xs_1": Tensor("n", "T")}}),
        ("'r_0' is the name of one of 'r'", {"inputs": {"xs": MANY, "y": Tensor("r_0", "T")}}),
        ("xs[0]: contiguous names 'm'", {"inputs": {"xs": MANY._replace(contiguous="m")}}),
        ("it has lists of tensors, so it cannot have finish", {"finish": Finish(lambda *given: given[2], {}, {})}),
        ("it has lists of tensors, so it cannot have a split",
         {"sharding": Sharding(split=Split("n", lambda *given: given[1:3]))}),
        ("it has lists of tensors, so it cannot have a program", {"kernel": Program(lambda *given: given[2])}),
        ("it has lists of tensors, so it cannot have narrow", {"narrow": lambda name, outputs: listing.add_n}),
        ("it has lists of tensors, so it cannot have inputs that gradients overwrite", {"grad": OVERWRITING}),
        ("ys has 'donates', which a list cannot have", {"outputs": {"ys": MANY._replace(donates="xs")}}),
        ("out has 'donates', which an op with lists cannot have",
         {"inputs": {"xs": MANY, "y": ROW}, "outputs": {"out": ROW._replace(donates="y")}}),
    ],
)  # fmt: skip
def test_declarations_that_cannot_work(problem: str, declared: dict[str, Any]) -> None:
    usual = {"inputs": {"xs": MANY}, "outputs": {"out": ROW}, "dtypes": {"T": FLOATS}, "kernel": "a:B"}
    with pytest.raises(ValueError, match=re.escape(f": {problem}")):
        Op("wrong", reference=lambda xp, xs: xs[0], **{**usual, **declared})


def test_an_op_with_lists_is_unrolled_first() -> None:
    """Whatever else would take a list for one tensor."""
    with pytest.raises(TypeError, match=r"cute\.add_n: it has lists of tensors, so its `unrolled` op is called"):
        bind(listing.add_n, {"xs": Array((3, 8), "float32")})
    with pytest.raises(TypeError, match="add_n has lists of tensors: take one of its `instances`"):
        testing.inputs(listing.add_n, listing.add_n.cases[0], "float32")


def test_a_reference_that_returns_no_list() -> None:
    for returned, problem in ((0, "int for `ys`, declared is a list"), ([0], "1 for `ys`, declared are 2 tensors")):
        wrong = Op(
            "wrong", inputs={"xs": MANY}, outputs={"ys": MANY}, dtypes={"T": FLOATS}, kernel="a:B",
            reference=lambda xp, xs, given=returned: given,
        )  # fmt: skip
        with pytest.raises(TypeError, match=problem):
            wrong.unrolled({"k": 2}).reference(np, *[np.zeros((3, 8))] * 2)


def test_samples_are_arranged_as_lists() -> None:
    def arrange(xp: Any, arrays: dict[str, Any]) -> None:
        arrays["xs"][1][...] = 5

    own = Op(
        "own", inputs={"xs": MANY}, outputs={"ys": MANY}, dtypes={"T": FLOATS}, kernel="a:B", arrange=arrange,
        reference=lambda xp, xs: xs, cases=listing.JAGGED,
    )  # fmt: skip
    (one, _) = own.instances
    assert (testing.inputs(one, one.cases[0], "float32")["xs_1"] == 5).all()


def test_gradients_are_derivatives() -> None:
    """Of every number of tensors in the cases; ``verify`` needs no framework for that."""
    found = [verdict for verdict in verify(FORWARDS, {}) if verdict.framework == "gradient"]
    assert [v.op for v in found] == [one.name for op in FORWARDS for one in op.instances]
    assert not [v for v in found if v.problem]


def test_manifests_name_an_op_for_so_many() -> None:
    op = listing.concatenate.grad.unrolled({"k": 2})
    shapes = {"xs_0": (3, 8), "xs_1": (2, 8), "dout": (5, 8)}
    call = call_of(bind(op, {name: Array(shape, "float32") for name, shape in shapes.items()}), {})
    name = "tests.ops.listing:concatenate.grad.concatenate_bwd_of_2"
    text = f"{name} xs_0:float32[3,8] xs_1:float32[2,8] dout:float32[5,8]"
    assert str(call) == text
    assert [found.op for found in manifest.parse(text)] == [op]
    assert listing.add_n.unrolled({"k": 1}) in lookup.find_all("tests.ops.listing:add_n")


@every_op
@pytest.mark.parametrize("dtype", FLOATS)
def test_kernels_get_the_tensors_one_after_another(op: Op, dtype: str) -> None:
    (case,) = op.cases
    arrays, attrs = testing.inputs(op, case, dtype), testing.attributes(op, case)
    kernel_calls.check(kernel_calls.Call(op, arrays, {}, attrs, "", lambda seed: testing.inputs(op, case, dtype, seed)))


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@every_op
def test_kernels_compile(op: Op, cache_folder: Path) -> None:
    (case,) = op.cases
    binding = bind(op, testing.specs(op, case, "bfloat16"))
    variant = plan(binding, {}, parse("sm_90a")).variant
    function = cache.get(variant)
    with pytest.raises(TypeError) as raised:
        function()
    assert len(re.findall(r"_vararg_\d+: Tensor\(", str(raised.value))) == len(variant.args)
    if not target.device_count():
        with pytest.raises(RuntimeError, match="Cuda Runtime Error"):  # all arguments are what it takes
            loader.preload(function, variant, 0)
