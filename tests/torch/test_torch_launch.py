"""Planning and launching, with kernels that a CPU can run in place of the compiler's."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_ops_torch
from cute_ops import FLOATS, Op, Tensor
from cute_ops.aot import build
from cute_ops.calls import manifest
from cute_ops.jit.target import parse
from cute_ops.ops import OPS
from cute_ops_torch.host import compiled_call, launch
from cute_ops_torch.host.call_site import CallSite, any_call, call_site
from cute_ops_torch.host.launch import Launcher
from cute_ops_torch.registry import register
from cute_ops_torch.tools import runner
from tests.ops.product import product

rmsnorm, add_rmsnorm = OPS[0], OPS[1]


@pytest.mark.drawn(0.4)
def test_values_against_float64(turn: Any, compiled: Any) -> None:
    """In outputs of the launcher's own, in given ones, and in those that are made because nobody gives them."""
    cuda, tensors = Launcher(turn.op), turn.tensors()
    made = runner.functional(turn.op, cuda.launch)(*tensors, *turn.attrs.values())
    turn.check(made)
    assert compiled.calls == [turn.op.name]
    turn.check_into(cuda.into, made)
    into_new = runner.functional(turn.op, lambda *args: cuda.into(*args, *[None for _ in turn.op.outputs]))
    found = into_new(*turn.tensors(), *turn.attrs.values())
    results = [each if isinstance(each, tuple) else (each,) for each in (found, made)]
    for new, first in zip(*results, strict=True):
        assert not first.numel() if new is None else torch.equal(new, first)


@pytest.mark.drawn(0.4)
@pytest.mark.feature("strided rows, read in place")
def test_strided_rows_are_read_in_place(turn: Any, compiled: Any) -> None:
    call = runner.functional(turn.op, Launcher(turn.op).launch)
    turn.check(call(*turn.strided(), *turn.attrs.values()))


def test_a_second_call_does_not_plan(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, x, w = Launcher(rmsnorm), torch.randn(4, 64), torch.ones(64)
    first = cuda.launch(x, w)
    monkeypatch.setattr(launch, "prepare", None)
    assert torch.equal(cuda.launch(x.clone(), w), first)
    assert compiled.calls == ["rmsnorm", "rmsnorm"]


def test_whatever_a_plan_depends_on_is_in_the_key(compiled: Any) -> None:
    cuda, w = Launcher(rmsnorm), torch.ones(64)
    base = torch.randn(9, 68)
    calls = [
        (base[:4, :64].contiguous(), w), (base[:5, :64].contiguous(), w), (base[:4, :64], w), (base[:4, 1:65], w),
        (base[:4, :64].contiguous().bfloat16(), w), (base[:4, :64].contiguous(), w.half()),
        (base[:4, :64].contiguous(), None), (base[:4, :64].contiguous(), None, w),
        (base[:4, :64].contiguous(), w, None, 1e-5), (base[:4, :64].contiguous(), w, None, 1e-6, 1.0),
    ]  # fmt: skip
    for arguments in calls:
        cuda.launch(*arguments)
    assert len(cuda.calls) == len(calls)
    assert len({v.digest for v in compiled.variants}) == len(calls) - 1  # the number of rows is dynamic


def test_calls_of_one_shape_are_told_apart(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is compared with the last call of its shape, whatever that was."""
    cuda, w = Launcher(rmsnorm), torch.rand(64)
    base = torch.randn(9, 68)
    x, b = base[:4, :64].contiguous(), torch.rand(64)
    shifted = torch.empty(4 * 64 + 1)[1:].view(4, 64).copy_(x)
    calls: list[tuple[Any, ...]] = [
        (x, w, None), (base[:4, :64], w, None), (base[:4, 1:65], w, None), (shifted, w, None), (x.bfloat16(), w, None),
        (x, w.half(), None), (x, None, None), (x, None, b), (x, w, b), (x, w[:1].expand(64).clone(), None),
        (x.clone().requires_grad_(), w, None), (x, torch.nn.Parameter(w), None), (x, w, None, 1e-2),
        (x, w, None, 1e-6, 1.0), (x, torch.rand(65)[1:], None),
    ]  # fmt: skip

    def check(arguments: tuple[Any, ...]) -> None:
        attrs = (*arguments[3:], *(1e-6, 0.0)[len(arguments) - 3 :])
        expected = torch.ops.cute.rmsnorm(*arguments).detach()
        out = torch.full_like(expected, torch.nan)
        cuda.into(*arguments[:3], *attrs, out)
        for got in (cuda.launch(*arguments), out):
            torch.testing.assert_close(got, expected)

    for arguments in calls:
        check(arguments)
    monkeypatch.setattr(launch, "prepare", None)
    for arguments in calls:
        for other in calls:
            check(other)
            check(arguments)
    count = len(compiled.calls)
    for wrong, problem in (
        ((x.long(), w, None), TypeError), ((x, w[:32], None), TypeError), ((x, w.double(), None), TypeError),
    ):  # fmt: skip
        with pytest.raises(problem):  # `prepare` is not there to refuse them
            cuda.launch(*wrong)
    assert len(compiled.calls) == count


@pytest.mark.drawn(0.4)
def test_a_place_in_a_program_fills_outputs(turn: Any, compiled: Any) -> None:
    cuda, tensors, attrs = Launcher(turn.op), turn.tensors(), tuple(turn.attrs.values())
    made = runner.functional(turn.op, cuda.launch)(*tensors, *attrs)
    given = {name: t for name, t in zip(turn.op.inputs, tensors, strict=True) if t is not None}
    for make, anywhere in ((call_site, tuple(given)), (call_site, ()), (any_call, ())):
        sites: dict[tuple[str, ...], Any] = {}

        def into(*args: Any, make: Any = make, anywhere: Any = anywhere, sites: Any = sites) -> None:
            outputs = zip(turn.op.outputs, args[len(tensors) + len(attrs) :], strict=True)
            wanted = {name: out for name, out in outputs if out is not None}
            site = CallSite(tuple(given), attrs, tuple(wanted), anywhere, False)
            by = cuda if make is call_site else cuda.into
            present = [t for t in args[: len(tensors)] if t is not None]
            sites.setdefault(site.wanted, make(turn.op, site, by))(*present, *wanted.values())

        turn.check_into(into, made)
        assert sites


def test_a_place_in_a_program_plans_once_for_a_size(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, w, base = Launcher(rmsnorm), torch.rand(64), torch.randn(9, 64)
    place = CallSite(("x", "weight"), (1e-6, 0.0), ("out",), ("x", "weight"), True)
    site = call_site(rmsnorm, place, cuda)

    def check(x: torch.Tensor) -> None:
        out = torch.full((len(x), 64), torch.nan)
        site(len(x), x, w, out)
        torch.testing.assert_close(out, torch.ops.cute.rmsnorm(x, w))

    shifted = torch.empty(4 * 64 + 1)[1:].view(4, 64).copy_(base[:4])  # what was planned for aligned rows does not fit
    for again in (False, True):
        if again:
            monkeypatch.setattr(launch, "prepare", None)
        for x in (base[:4], base[:5], shifted, base[:4] + 1):
            check(x)
    assert len({v.digest for v in compiled.variants}) == 2


def test_any_argument_name_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("key", "get", "ready", "prepare", "args", "self")
    own = Op(
        "names",
        inputs={name: Tensor("*m n", "T") for name in names},
        outputs={"out": Tensor("*m n", "T")},
        dtypes={"T": FLOATS},
        attrs={"tensors": 1.0},
        reference=lambda xp, *arrays, tensors: sum(arrays) * tensors,
        kernel="nowhere:Names",
    )
    seen: list[Any] = []
    call = compiled_call.CompiledCall(lambda *tensors: seen.extend(tensors), lambda wanted: seen.extend)
    monkeypatch.setattr(launch, "prepare", lambda op, tensors, attrs, outputs: call)
    given = [torch.full((2, 3), float(i)) for i in range(len(names))]
    Launcher(own).launch(*given)
    assert [id(t) for t in seen] == [id(t) for t in given]
    torch.testing.assert_close(register(own, namespace="cute_test")(*given), sum(given))


def test_what_is_remembered_is_bounded(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("cute_ops.constants.state"), "REMEMBERED", 3)
    cuda = Launcher(rmsnorm)
    for m in (1, 2, 3, 4, 5, 1):
        cuda.launch(torch.randn(m, 8))
    assert [key[0][1][0] for key in cuda.calls] == [4, 5, 1]
    assert len(compiled.variants) == 6


def test_zero_rows_launch_nothing(compiled: Any) -> None:
    x = torch.randn(0, 64)
    assert Launcher(rmsnorm).launch(x).shape == (0, 64)
    dx, dweight, dbias = Launcher(rmsnorm.grad).launch(x, x, torch.ones(64), None)
    assert dx.shape == (0, 64)
    assert torch.equal(dweight, torch.zeros(64))
    assert dbias.shape == (0,)
    assert not compiled.calls


def test_an_empty_input_launches_nothing_and_leaves_no_output_unwritten(compiled: Any) -> None:
    """A kernel's entry returns at once where its first argument is empty."""
    total = Op(
        "total", inputs={"x": Tensor("*m n", "T"), "start": Tensor("n", "T")}, outputs={"out": Tensor("n", "T")},
        dtypes={"T": FLOATS}, reference=lambda xp, x, start: xp.sum(x, axis=0) + start, kernel=rmsnorm.kernel,
    )  # fmt: skip
    launcher, start, out = Launcher(total), torch.arange(64.0), torch.full((64,), torch.nan)
    assert torch.equal(launcher.launch(torch.randn(0, 64), start), start)
    launcher.into(torch.randn(0, 64), start, out)
    assert torch.equal(out, start) and not compiled.calls


NOTHING = {
    "k": ((2, 3, 0), (2, 4, 0)), "m": ((2, 0, 5), (2, 4, 5)), "n": ((2, 3, 5), (2, 0, 5)), "b": ((0, 3, 5), (0, 4, 5)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dim", NOTHING)
def test_a_product_of_nothing_is_its_epilogue(dim: str, compiled: Any) -> None:
    """A sum over no ``k`` is zero, to which the bias is added; gradients are as large as what they are of."""
    x, w = map(torch.randn, NOTHING[dim])
    bias = torch.randn(w.shape[1])
    expected, given = x @ w.mT + bias, (x, w, bias)
    dynamic = torch.compile(cute_ops_torch.register(product, "nothing"), fullgraph=True, dynamic=True)
    torch.testing.assert_close(dynamic(*given), expected)
    torch.testing.assert_close(Launcher(product).launch(*given), expected)  # as on a GPU
    assert not compiled.calls


def test_outputs_are_compact_whatever_the_inputs_are(compiled: Any) -> None:
    x = torch.randn(3, 4, 64).transpose(0, 1)
    out, residual_out = Launcher(add_rmsnorm).launch(x, x)
    assert out.is_contiguous()
    assert residual_out.is_contiguous()
    torch.testing.assert_close(residual_out, 2 * x)


def test_another_device_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    call = compiled_call.CompiledCall(lambda value: value, lambda wanted: lambda value: (wanted, value))
    for index in (0, 1):
        on = compiled_call.on_device(call, torch.device("cuda", index))
        assert on.run(5) == 5
        assert on.fill(("out",))(6) == (("out",), 6)
    assert entered == [torch.device("cuda", 1)] * 2


def test_what_is_recorded_plans_what_ran(
    op: Op, compiled: Any, make_inputs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows off by one element of a wider tensor: strides and alignment are part of a call."""
    monkeypatch.setenv("CUTE_OPS_RECORD", str(tmp_path / "m.txt"))
    tensors = make_inputs(op, dtype=torch.bfloat16)
    for inputs in (tensors, [shifted(t) for t in tensors]):
        Launcher(op).launch(*inputs)
    ran = {variant.symbol for variant in compiled.variants}
    assert {
        build.variant_of(call, parse("sm_90a")).symbol for call in manifest.read(tmp_path / "m.txt")
    } == ran and len(ran) == 2


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros((*tensor.shape[:-1], tensor.shape[-1] + 3), dtype=tensor.dtype)
    inner = wide[..., 1 : 1 + tensor.shape[-1]]
    inner.copy_(tensor)
    return inner
