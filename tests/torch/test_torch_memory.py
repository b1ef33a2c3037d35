"""Operands that lie as their declarations say: read in place, copied or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_ops_torch
from cute_ops import FLOATS, Op, Tensor
from cute_ops.autotune.dispatch import foresee, realigned
from cute_ops.declaration.binding import bind
from cute_ops.declaration.shapes import Array
from cute_ops.jit.layout import Memory, compact
from cute_ops.jit.target import parse
from cute_ops.ops import OPS
from cute_ops.ops.gemm import choice
from cute_ops.ops.gemm.linear import linear, linear_dweight, linear_dx
from cute_ops.ops.gemm.row_copy import row_copy
from cute_ops_torch.host import launch
from cute_ops_torch.host.fast_path import FastPath
from cute_ops_torch.host.function import make_function
from cute_ops_torch.host.launch import Launcher
from cute_ops_torch.library.copies import kept
from cute_ops_torch.library.nodes import Nodes
from cute_ops_torch.library.schema import takes_out
from cute_ops_torch.library.tensors import bind_tensors, memory
from cute_ops_torch.registry import define
from tests.ops import layouts

by_columns, aligned = (cute_ops_torch.register(op) for op in (layouts.by_columns, layouts.aligned))


def columns(*shape: int) -> torch.Tensor:
    """A matrix whose columns are contiguous."""
    return torch.randn(shape[::-1]).t()


def operands(*lead: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(*lead, 8), columns(8, 4), torch.randn(4, 3)[:, 1]


def plain(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x @ w + bias


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, compiled: Any) -> list[tuple[Any, ...]]:
    """The arguments of kernels."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launch.cache, "get", lambda variant: lambda *args: calls.append(args))
    return calls


@pytest.mark.parametrize("x", [torch.randn(6, 8), columns(6, 8), torch.randn(8, 9).t()[:6], torch.randn(6, 12)[:, :8]])
def test_transposed_operands_are_read_in_place(x: torch.Tensor, seen: list[tuple[Any, ...]]) -> None:
    _, w, bias = operands()
    launcher = Launcher(layouts.by_columns)
    for _ in range(2):
        launcher.launch(x, w, bias)
    for given in seen:
        assert [t.data_ptr() for t in given[:3]] == [x.data_ptr(), w.data_ptr(), bias.data_ptr()]
        # A kernel takes the contiguous dim last, and its entry turns that back.
        assert given[0].stride(-1) == given[1].stride(-1) == 1 and given[1].shape == (4, 8)
    assert len(seen) == 2


def test_weight_of_a_product_by_its_transpose(seen: list[tuple[Any, ...]]) -> None:
    x, weight = torch.randn(3, 5, 8).bfloat16(), torch.randn(8, 16).bfloat16()
    out = Launcher(linear).launch(x, weight.t(), "always")
    ((first, second, third, *_),) = seen  # and a workspace
    assert [t.data_ptr() for t in (x, weight, out)] == [t.data_ptr() for t in (first, second, third)]
    torch.testing.assert_close(cute_ops_torch.register(linear)(x, weight.t()), x @ weight)


@pytest.mark.parametrize(
    ("x", "by_tma"),
    [
        (torch.empty(64).as_strided((1, 64), (7, 1)), True),  # nothing is at the stride of one row,
        (torch.empty(256 * 64).as_strided((1, 256, 64), (5, 64, 1)), True),  # nor at that of one matrix
        (torch.empty(1, 64).expand(256, 64), True),
        (torch.empty(64, 256).t(), True),
        (torch.empty(256, 72)[:, :64], True),
        (torch.empty(256, 65)[:, :64], False),
        (torch.empty(64, 255).t(), False),
        (torch.empty(256 * 64 + 1)[1:].view(256, 64), False),  # off 16 bytes
    ],
)
def test_which_layouts_of_a_product_tma_takes(x: torch.Tensor, by_tma: bool) -> None:
    """Others go by threads, and nothing is copied."""
    room = torch.empty(x.untyped_storage().nbytes() // 4, dtype=torch.bfloat16)
    given = [room.as_strided(x.shape, x.stride(), x.storage_offset()), torch.empty(128, 64, dtype=torch.bfloat16)]
    chosen = foresee(bind_tensors(linear, given, ["auto"]), memory(linear, given), parse("sm_90a:132"))
    assert (chosen.variant.config["form"] != "mma_sync") == by_tma and not chosen.copies


@pytest.mark.parametrize(
    ("m", "n", "k", "pays"),
    [(2048, 1024, 1031, True), (64, 16384, 4099, True), (4096, 2047, 512, True), (16, 64, 71, False)],
)
def test_operands_of_odd_rows_are_copied_where_that_pays(m: int, n: int, k: int, pays: bool) -> None:
    """A product and both gradients: those operands that TMA cannot load as they lie."""
    where = parse("sm_90a:132")
    for op, shapes in (
        (linear, {"x": (m, k), "weight": (n, k)}),
        (linear_dx, {"dout": (m, n), "weight": (n, k)}),
        (linear_dweight, {"dout": (m, n), "x": (m, k)}),
    ):
        arrays = {name: Array(shape, "bfloat16") for name, shape in shapes.items()}
        binding, places = bind(op, arrays, {}), {name: Memory(compact(a.shape)) for name, a in arrays.items()}
        expected = {name: (-(-c // 64) * 64, 1) for name, (_, c) in shapes.items() if pays and c % 8}
        assert realigned(binding, places, where) == expected
        assert not any(realigned(bind(op, arrays, {"fused": f}), places, where) for f in ("always", "never"))
        assert not realigned(binding, places, parse("sm_80:108")) and not realigned(binding, places, None)


@pytest.mark.parametrize(
    ("product", "first", "second", "pays"),
    [
        (linear_dweight, (64, 9216), (64, 5854), True),  # 55 us by our kernel, 80 by the framework's product (H200)
        (linear_dweight, (64, 1600), (64, 12906), True),  # 20 and 33
        (linear, (2, 9999), (24576, 9999), False),  # 368 with a copy of the weight, and 237
    ],
)
def test_copies_pay_as_was_measured(product: Op, first: tuple[int, int], second: tuple[int, int], pays: bool) -> None:
    arrays = {n: Array(shape, "bfloat16") for n, shape in zip(product.inputs, (first, second), strict=True)}
    places = {name: Memory(compact(a.shape)) for name, a in arrays.items()}
    assert bool(realigned(bind(product, arrays, {}), places, parse("sm_90a:132"))) == pays


def test_copies_that_a_backward_reads_pay_sooner() -> None:
    """Of 64 rows a copy of the weight takes longer than our kernel gains, unless two products share it."""
    binding = bind(linear, {"x": Array((64, 2686), "bfloat16"), "weight": Array((21454, 2686), "bfloat16")}, {})
    places, where = {name: Memory((2686, 1)) for name in binding.inputs}, parse("sm_90a:132")
    assert not realigned(binding, places, where)
    assert realigned(binding, places, where, reads=2) == dict.fromkeys(places, (2688, 1))


def test_copies_of_operands(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gets rows of whole lines; columns stay columns. A kernel of ours copies, one for all lengths."""
    monkeypatch.setattr(choice, "THEIR_ODD", {1: (1.0, 1.0)})  # the smallest product pays
    compiled.ops.update({"linear": linear, "row_copy": row_copy()})
    x, weight = torch.randn(2, 100, 71).bfloat16(), columns(33, 71).bfloat16()
    out = Launcher(linear).launch(x, weight, "auto")
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), rtol=2**-7, atol=0.1)
    assert compiled.calls == ["row_copy", "row_copy", "linear"]
    assert [key.row_align for key in compiled.variants[-1].args][:2] == [16, 16]
    assert compiled.variants[-1].config["form"] != "mma_sync"
    assert {variant.dims["n"] for variant in compiled.variants[:-1]} == {None}


def test_a_backward_reads_the_copies_of_its_forward(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operand is copied once, a cotangent that both gradients read, too; a second derivative is refused."""
    monkeypatch.setattr(choice, "THEIR_ODD", {1: (1.0, 1.0)})
    compiled.ops.update({op.name: op for op in (linear, linear_dx, linear_dweight, row_copy())})
    launchers = {op: Launcher(op).launch for op in (linear, linear_dx, linear_dweight)}
    x, weight = (torch.randn(*shape).bfloat16().requires_grad_() for shape in ((2, 50, 71), (33, 71)))
    dout = torch.randn(2, 50, 33).bfloat16()
    out = Nodes(linear, launchers.__getitem__).apply(launchers[linear], x, weight, "auto")
    copied = {t.stride()[-2] for t in out.grad_fn.saved_tensors}
    found = torch.autograd.grad(out, (x, weight), dout, retain_graph=True)
    wanted = torch.autograd.grad(x.double() @ weight.double().t(), (x, weight), dout.double())
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0.2)
    assert compiled.calls == ["row_copy", "row_copy", "linear", "row_copy", "linear_dx", "linear_dweight"]
    assert copied == {128} and kept.now == ((), [])
    inner = weight * 1  # no leaf
    out = Nodes(linear, lambda step: define(step).raw).apply(launchers[linear], x, inner, "auto")
    (dx,) = torch.autograd.grad(out, x, dout, create_graph=True)
    with pytest.raises(NotImplementedError, match="no double backward"):
        torch.autograd.grad(dx.sum(), inner, allow_unused=True)


def test_values_through_kernels(compiled: Any) -> None:
    compiled.ops["by_columns"] = layouts.by_columns
    for x in (torch.randn(2, 3, 8), torch.randn(8, 6).t().view(2, 3, 8), torch.randn(8, 2, 3).permute(1, 2, 0)):
        _, w, bias = operands()
        torch.testing.assert_close(Launcher(layouts.by_columns).launch(x, w, bias), plain(x, w, bias))


def test_a_dim_that_must_be_contiguous() -> None:
    x, w, bias = operands(6)
    with pytest.raises(ValueError, match=r"`w` has strides \(4, 1\), expected 1 in k\.\n"):
        by_columns(x, w.contiguous(), bias)
    with pytest.raises(ValueError, match=r"`x` has strides \(16, 2\), expected 1 in k or m\.\n"):
        by_columns(torch.randn(6, 16)[:, ::2], w, bias)


def ways(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {
        "eager": function,
        "compile": torch.compile(function, fullgraph=True),
        "dynamic": torch.compile(function, fullgraph=True, dynamic=True),
        "vmap": lambda x, *more: torch.vmap(function, (0, None, None))(x[:, None], *more)[:, 0],
        "vmap of columns": lambda x, *more: torch.vmap(function, (1, None, None), 1)(x[:, None], *more)[:, 0],
        "vmap of a weight": lambda x, w, b: torch.vmap(function, (None, 0, None))(x, w[None], b)[0],
    }


@pytest.mark.parametrize("way", ways(by_columns))
@pytest.mark.parametrize("turned", [False, True])
def test_gradients(way: str, turned: bool) -> None:
    """The backward wants a cotangent by columns: one that lies otherwise is copied, since nobody chose its strides."""
    torch._dynamo.reset()
    x, w, bias = (t.requires_grad_() for t in operands(6))
    x = (x.detach().t().contiguous().t() if turned else x.detach()).requires_grad_()
    for finish in (lambda out: out.sin().sum(), lambda out: out.sum(), lambda out: (out.t() * columns(6, 4).t()).sum()):
        torch.manual_seed(0)
        expected = torch.autograd.grad(finish(plain(x, w, bias)), (x, w, bias))
        torch.manual_seed(0)
        found = torch.autograd.grad(finish(ways(by_columns)[way](x, w, bias)), (x, w, bias))
        torch.testing.assert_close(found, expected)


def test_torch_checks_the_registration() -> None:
    torch.library.opcheck(torch.ops.cute.by_columns.default, operands(6))


def test_what_is_not_aligned(compiled: Any) -> None:
    compiled.ops["aligned"] = layouts.aligned
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    launcher = Launcher(layouts.aligned)
    for other in (columns(4, 8), y, torch.randn(8, 5).t()[:4], torch.randn(33)[1:].view(8, 4).t()):
        for _ in range(2):
            torch.testing.assert_close(launcher.launch(x, other), x + other)
        out = torch.empty(4, 8)
        launcher.into(x, other, out)
        torch.testing.assert_close(out, x + other)
    odd = torch.randn(33)[1:].view(4, 8)
    for wrong, problem in ((odd, "lies 4 bytes off a multiple of 16"), (torch.randn(4, 9)[:, :8], "stride of 9 elem")):
        for call in (launcher.launch, aligned):
            with pytest.raises(ValueError, match=f"`x` .*{problem}"):
                call(wrong, y)
    with pytest.raises(ValueError, match="`y` has a stride of 3 elements, expected a multiple of 4: pad its rows"):
        aligned(x[:3], y[:3])


# --- outputs that the caller gives


@pytest.fixture
def function(compiled: Any) -> Callable[..., Any]:
    """``function(op)``: the op's Python function, with stand-ins for kernels on the CPU."""

    def make(op: Op) -> Callable[..., Any]:
        compiled.ops.setdefault(op.name, op)
        made = define(op)
        launcher = Launcher(op)
        return make_function(op, made.overload, FastPath(op, lambda: launcher, made.nodes), devices=("cpu",))

    return make


@pytest.mark.drawn(0.4)
def test_a_training_step_makes_copies_that_one_product_alone_does_not(
    function: Callable[..., Any], compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the dispatcher, too: its backward reads them. A call without a gradient runs the framework's product."""
    monkeypatch.setattr(choice, "THEIR_ODD", {1: (1.0, 1.0)})
    monkeypatch.setattr(choice, "pays", lambda copied, problem, times, reads: reads == 2)
    compiled.ops.update({op.name: op for op in (linear, linear_dx, linear_dweight, row_copy())})
    call = function(linear)
    x, weight = (torch.randn(*shape).bfloat16().requires_grad_() for shape in ((50, 71), (33, 71)))
    for _ in range(2):
        compiled.calls.clear()
        with torch.no_grad():
            alone = call(x, weight)
        assert not compiled.calls
        out = call(x, weight)
        assert compiled.calls == ["row_copy", "row_copy", "linear"] and {
            t.stride(0) for t in out.grad_fn.saved_tensors
        } == {128}
        torch.testing.assert_close(out, alone, rtol=2**-7, atol=0.1)


@pytest.mark.parametrize("lies", ["compact", "apart", "columns", "off"])
@pytest.mark.parametrize("device", ["kernels", "reference"])
def test_outputs_of_the_caller(any_op: Op, make_inputs: Any, function: Any, lies: str, device: str) -> None:
    """They are filled wherever they lie, and are what comes back."""
    if not takes_out(any_op):
        pytest.skip("does more than its op")
    call = function(any_op) if device == "kernels" else define(any_op).function
    tensors = make_inputs(any_op)
    expected = call(*[t.clone() for t in tensors])
    some = expected if isinstance(expected, tuple) else (expected,)

    def place(like: torch.Tensor) -> torch.Tensor:
        shape, options = like.shape, {"dtype": like.dtype}
        if lies == "apart" and like.ndim:
            return torch.zeros(*shape[:-1], 2 * shape[-1] + 1, **options)[..., 1 : shape[-1] + 1]
        if lies == "columns":
            return torch.zeros(shape[::-1], **options).permute(*reversed(range(like.ndim)))
        if lies == "off":
            return torch.zeros(like.numel() + 1, **options)[1:].view(shape)
        return torch.zeros(shape, **options)

    out = tuple(None if t is None else place(t) for t in some)
    for _ in range(2):
        given = out if len(out) > 1 else out[0]
        versions = [t._version for t in out if t is not None]
        assert call(*[t.clone() for t in tensors], out=given) is given
        assert all(t._version > before for t, before in zip(filter(torch.is_tensor, out), versions, strict=True))
        torch.testing.assert_close(out, some, equal_nan=True)


def test_an_output_that_may_lie_apart_is_written_in_place(seen: list[tuple[Any, ...]]) -> None:
    x, weight = torch.randn(2, 3, 8).bfloat16(), torch.randn(16, 8).bfloat16()
    out = torch.empty(2, 3, 20).bfloat16()[..., :16]
    Launcher(linear).write((x, weight), ("always",), {"out": out})
    ((_, _, given, *_),) = seen
    assert (given.data_ptr(), given.shape, given.stride()) == (out.data_ptr(), (6, 16), (20, 1))


def other(like: torch.Tensor, **changes: Any) -> torch.Tensor:
    return torch.empty_like(like, **changes)


WIDE = torch.randn(4, 128)


@pytest.mark.parametrize(
    ("x", "out", "kind", "said"),
    [
        (WIDE[:, :64], torch.empty(4, 65), ValueError, r"float32\[4, 65\] for `out`, expected float32\[4, 64\]"),
        (WIDE[:, :64], torch.empty(4, 64).half(), TypeError, r"float16\[4, 64\] for `out`, expected float32\[4, 64\]"),
        (WIDE[:, :64], torch.empty(4, 64, device="meta"), ValueError, "a tensor on meta for `out`, expected cpu"),
        (WIDE[:, :64], (torch.empty(4, 64),) * 2, TypeError, "out= has 2 tensors, expected 1: out"),
        (WIDE[:, :64], 7.0, TypeError, "out= has float for `out`, expected a tensor"),
        (WIDE[:, :64], WIDE[:, 32:96], ValueError, "`out` is written, but shares memory with `x`"),
        (WIDE[:, :64], WIDE[0, :64].expand(4, 64), ValueError, "`out` is written, but with strides"),
        (WIDE[:, :64].requires_grad_(), torch.empty(4, 64), RuntimeError, r"rmsnorm\(\): functions with out=\.\.\."),
        (WIDE[:, :64].detach(), torch.empty(4, 64, requires_grad=True), RuntimeError, "don't support automatic"),
    ],
)
def test_outputs_that_are_refused(x: torch.Tensor, out: Any, kind: type[Exception], said: str, function: Any) -> None:
    for call in (cute_ops_torch.rmsnorm, function(OPS[0])):
        with pytest.raises(kind, match=said):
            call(x, out=out)
    if kind is RuntimeError:
        with torch.no_grad():
            torch.testing.assert_close(cute_ops_torch.rmsnorm(x, out=out), cute_ops_torch.rmsnorm(x))


def test_outputs_between_the_rows_of_an_input() -> None:
    """They share no byte, though one lies in the other."""
    wide = torch.randn(4, 128)
    expected = cute_ops_torch.rmsnorm(wide[:, :64])
    torch.testing.assert_close(cute_ops_torch.rmsnorm(wide[:, :64], out=wide[:, 64:]), expected)


def test_an_output_over_the_input_that_is_donated() -> None:
    donating = Op(
        "donating", inputs={"x": Tensor("*m n", "T")}, outputs={"out": Tensor("*m n", "T", donates="x")},
        dtypes={"T": FLOATS}, reference=lambda xp, x: x + 1, kernel="a:B",
    )  # fmt: skip
    call, x = cute_ops_torch.register(donating), torch.ones(5, 8)
    assert call(x, out=x) is x and torch.equal(x, torch.full((5, 8), 2.0))
    with pytest.raises(ValueError, match="`out` is written, but shares memory with `x`"):
        call(x[:4], out=x[1:])


def test_several_outputs_in_order() -> None:
    x, residual = torch.randn(4, 64), torch.randn(4, 64)
    out = torch.empty(4, 64), torch.empty(4, 64)
    expected = cute_ops_torch.add_rmsnorm(x, residual)
    assert cute_ops_torch.add_rmsnorm(x, residual, out=out) is out
    torch.testing.assert_close(out, expected)
    with pytest.raises(ValueError, match="`residual_out` is written, but shares memory with `out`"):
        cute_ops_torch.add_rmsnorm(x, residual, out=(out[0], out[0]))


@pytest.mark.drawn(0.5, among="inductor")
@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_outputs_in_compiled_programs(dynamic: bool) -> None:
    torch._dynamo.reset()
    x, out = torch.randn(4, 64), torch.empty(4, 64)

    @torch.compile(fullgraph=True, dynamic=dynamic)
    def step(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return cute_ops_torch.rmsnorm(x.sin(), out=out) + 1

    expected = cute_ops_torch.rmsnorm(x.sin())
    torch.testing.assert_close(step(x, out), expected + 1)
    torch.testing.assert_close(out, expected)


def test_outputs_under_vmap() -> None:
    x, out = torch.randn(3, 4, 64), torch.empty(3, 4, 64)
    torch.vmap(lambda x, out: cute_ops_torch.rmsnorm(x, out=out))(x, out)
    torch.testing.assert_close(out, cute_ops_torch.rmsnorm(x))
