"""Ops of functions in PyTorch: values and gradients against float64 autograd, torch.compile, vmap, opcheck."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from array_api_compat import torch as xp
from torch._dynamo.testing import CompileCounterWithBackend

from cute_ops import Op
from cute_ops.expressions import evaluate, trace
from cute_ops_torch import fused, register
from tests.ops import fusing, reducing

PLAIN = [*fusing.PLAIN, *reducing.PLAIN]

each = pytest.mark.parametrize("declared", PLAIN, ids=lambda op: op.name)


def tensors(declared: Op) -> list[torch.Tensor]:
    rng = np.random.default_rng(0)
    shapes = [t.of({"m": (3, 2), "n": 8}) for t in declared.inputs.values()]
    return [torch.tensor(rng.standard_normal(shape), dtype=torch.float32, requires_grad=True) for shape in shapes]


def function_of(declared: Op) -> Callable[..., Any]:
    return getattr(fusing, declared.name, None) or getattr(reducing, declared.name)


def as_tuple(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


@each
def test_values_and_gradients(declared: Op) -> None:
    given = tensors(declared)
    wide = [t.detach().double().requires_grad_() for t in given]
    expression = trace(function_of(declared), {name: t.shape for name, t in declared.inputs.items()})
    found, exact = as_tuple(register(declared)(*given)), evaluate(expression, xp, wide)
    cotangents = [torch.randn(out.shape, dtype=torch.float64) for out in exact]
    for out, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=1e-6)
    gradients = torch.autograd.grad(found, given, [c.float() for c in cotangents])
    for gradient, wanted in zip(gradients, torch.autograd.grad(exact, wide, cotangents), strict=True):
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_saved_sum_takes_the_place_of_what_it_is_the_sum_of(dtype: torch.dtype) -> None:
    """As rounded, within the tolerance rule, PyTorch's own functions in this dtype being the reference run."""
    declared = next(op for op in PLAIN if op.name == "rms_beside_sum")
    torch.manual_seed(0)
    given = [2 * torch.randn(64, 512), 2 * torch.randn(64, 512), 1 + torch.randn(512) / 4]
    cotangents = [torch.randn(64, 512).to(dtype) for _ in range(2)]

    def run(function: Callable[..., Any], wide: torch.dtype) -> Any:
        leaves = [t.to(dtype).to(wide).requires_grad_() for t in given]
        outputs = function(*leaves)
        return outputs, torch.autograd.grad(outputs, leaves, [c.to(wide) for c in cotangents])

    own, kept = partial(reducing.rms_beside_sum, xp), list[torch.Tensor]()
    exact, rounded = run(own, torch.float64)[1], run(own, dtype)[1]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        outputs, found = run(register(declared), dtype)
    assert {t.data_ptr() for t in kept if t.ndim > 1} == {outputs[1].data_ptr()}
    unit = torch.finfo(dtype).eps
    for got, low, wanted in zip(found, rounded, exact, strict=True):
        loss = ((low - wanted).abs() - unit * wanted.abs()).max()
        assert bool(((got - wanted).abs() <= 2 * (unit * wanted.abs() + loss)).all())


@pytest.mark.drawn(0.4)
@each
def test_the_op_is_a_good_citizen(declared: Op) -> None:
    register(declared)
    torch.library.opcheck(getattr(torch.ops.cute, declared.name).default, tuple(tensors(declared)))


@pytest.mark.drawn(0.4)
@each
def test_compile_and_vmap_give_the_same_bits(declared: Op) -> None:
    function, given = register(declared), tensors(declared)
    outputs = as_tuple(function(*given))
    for out, wanted in zip(as_tuple(torch.compile(function, fullgraph=True)(*given)), outputs, strict=True):
        assert torch.equal(out, wanted)
    stacked = [torch.stack([t, 2 * t]).detach() for t in given]
    for out, wanted in zip(as_tuple(torch.vmap(function)(*stacked)), outputs, strict=True):
        assert torch.equal(out[0], wanted)


def test_a_decorated_function_is_called_without_a_namespace() -> None:
    @fused(operands={"x": "*m n", "weight": "n"}, namespace="fused_tests")
    def weighted(xp, x, weight):
        """The tanh of x, weighted."""
        return xp.tanh(x) * weight

    x, weight = torch.randn(3, 8), torch.randn(8)
    torch.testing.assert_close(weighted(x, weight=weight), torch.tanh(x) * weight)
    assert weighted.__doc__ == "The tanh of x, weighted."
    assert torch.ops.fused_tests.weighted(x, weight).shape == x.shape


def test_rows_without_elements() -> None:
    of_nothing = fused(operands={"x": "*m n"}, namespace="fused_tests")(reducing.of_nothing)
    x = torch.ones(3, 0, requires_grad=True)
    torch.testing.assert_close(
        torch.cat(of_nothing(x), -1), torch.tensor([[0, np.nan, -np.inf, np.inf]] * 3), equal_nan=True
    )
    of_nothing(x)[2].sum().backward()
    assert x.grad.shape == x.shape


# --- operands' shapes by the call ------------------------------------------------------------------------------------


@fused
def by_call(xp, x, bias, residual):
    """``out = tanh(x + bias) * residual``"""
    return xp.tanh(x + bias) * residual


def plainly(x: Any, bias: Any, residual: Any) -> Any:
    return torch.tanh(x + bias) * residual


@fused(namespace="fused_tests", name="glu")
def gated(xp, x, bias=None, *, limit=1.0, kind="silu"):
    n = x.shape[-1] // 2
    gate, up = x[..., :n], x[..., n:]
    if bias is not None:
        gate, up = gate + bias[..., :n], up + bias[..., n:]
    return xp.clip(getattr(xp, kind)(gate) * up, -limit, limit), gate


def drawn(*shapes: Any, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Tensors of these shapes, tiles of this dtype and others of float32; numbers stay."""
    whole, rng = torch.broadcast_shapes(*(s for s in shapes if isinstance(s, tuple))), torch.Generator().manual_seed(0)
    return [
        torch.randn(s, generator=rng).to(dtype if len(s) > 1 and s[-1] == whole[-1] else torch.float32)
        if isinstance(s, tuple) else s for s in shapes
    ]  # fmt: skip


TILE = (3, 4, 8)
CALLS = [
    (TILE, (8,), TILE), (TILE, (3, 4, 1), ()), (TILE, (1, 1, 8), 0.5), (TILE, (4, 8), (3, 1, 1)), (2, TILE, (1, 1, 1)),
    ((3, 1), (8,), (3, 8)), ((8,), (8,), (1,)), ((1, 8), (1, 1), (8,)), ((3, 1), (3, 1), (1,)), ((0, 8), (8,), (0, 1)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", CALLS, ids=str)
def test_calls_broadcast_as_those_of_torch(shapes: tuple[Any, ...], dtype: torch.dtype) -> None:
    given = drawn(*shapes, dtype=dtype)
    leaves = [t.requires_grad_() for t in given if isinstance(t, torch.Tensor)]
    wide = [t.detach().double().requires_grad_() if isinstance(t, torch.Tensor) else t for t in given]
    out, exact = by_call(*given), plainly(*wide)
    cotangent = torch.randn(exact.shape).to(out.dtype)
    gradients = torch.autograd.grad(out, leaves, cotangent)
    exacts = torch.autograd.grad(exact, [t for t in wide if isinstance(t, torch.Tensor)], cotangent.double())
    assert [g.dtype for g in gradients] == [t.dtype for t in leaves]
    loses = 1e-6 if dtype is torch.float32 else 2.0**-7
    for found, wanted in zip((out, *gradients), (exact, *exacts), strict=True):
        largest = wanted.abs().max().item() if wanted.numel() else 0.0
        torch.testing.assert_close(found.double(), wanted, rtol=loses, atol=4 * loses * max(largest, 1.0))


@pytest.mark.parametrize("dtypes", ["bfloat16 bfloat16", "float32 bfloat16", "float16 bfloat16"])
def test_tiles_that_are_all_expanded_keep_their_dtypes(dtypes: str) -> None:
    tiles = zip(drawn((3, 1, 8), (1, 4, 8)), dtypes.split(), strict=True)
    x, y = (t.to(getattr(torch, dtype)).requires_grad_() for t, dtype in tiles)
    out, exact = by_call(x, 0.5, y), plainly(*(t.double() for t in (x, torch.tensor(0.5), y)))
    assert out.dtype == by_call(x.detach(), 0.5, y.detach()).dtype
    torch.testing.assert_close(out.double(), exact, rtol=2.0**-7, atol=2.0**-7)
    for found, wanted, t in zip(*(torch.autograd.grad(o.sum(), (x, y)) for o in (out, exact)), (x, y), strict=True):
        assert found.dtype == t.dtype
        torch.testing.assert_close(found, wanted, rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.slow
def test_compiled_calls_have_one_graph_for_all_rows() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(by_call, fullgraph=True, dynamic=True, backend=counter)
    for shapes in (((3, 4, 8), (8,), (3, 4, 1)), ((5, 4, 8), (8,), (5, 4, 1))):
        given = [t.requires_grad_() for t in drawn(*shapes)]
        out, wanted = compiled(*given), by_call(*given)
        assert torch.equal(out, wanted)
        for found, expected in zip(*(torch.autograd.grad(o.sum(), given) for o in (out, wanted)), strict=True):
            assert torch.equal(found, expected)
    assert counter.frame_count == 1
    x, row, _ = drawn((5, 8), (8,), 1.0)
    for scale in (0.5, 2.5, 3):
        assert torch.equal(compiled(x, row, scale), by_call(x, row, scale))


@pytest.mark.slow
def test_compiled_calls_with_halves_and_attributes_and_rows_that_depend_on_data() -> None:
    x, bias = drawn((3, 16), (16,))
    compiled = torch.compile(gated, fullgraph=True, backend="aot_eager")
    for given, attrs in (((x,), {}), ((x, bias), {"limit": 0.1, "kind": "gelu"})):
        for out, wanted in zip(compiled(*given, **attrs), gated(*given, **attrs), strict=True):
            assert torch.equal(out, wanted)

    def chosen(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return by_call(x[mask], bias, x[mask])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        mask = torch.tensor([True, False, True])
        assert torch.equal(torch.compile(chosen, fullgraph=True, backend="aot_eager")(x, mask), chosen(x, mask))


def test_calls_under_vmap_and_in_functional_gradients() -> None:
    x, row, column = drawn((3, 4, 8), (8,), (3, 4, 1))
    for given, dims in (
        ((x, row, column), (0, None, 0)),
        ((x, row, 0.5), (0, None, None)),
        ((row, x, x), (None, 0, 0)),
    ):
        assert torch.equal(torch.vmap(by_call, dims)(*given), by_call(*given))

    def loss(function: Callable[..., Any], *given: torch.Tensor) -> torch.Tensor:
        return function(*given).square().sum()

    found, wanted = (
        torch.vmap(torch.func.grad(loss, (1, 2, 3)), (None, 0, None, 0))(f, x, row, column) for f in (by_call, plainly)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_calls_in_exported_programs() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
            return by_call(x, row, x)

    x, row = drawn((3, 8), (8,))
    sizes = ({0: torch.export.Dim("rows")}, None)
    program = torch.export.export(Module(), (x, row), dynamic_shapes=sizes)
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert len(called) == 1 and called[0].startswith("cute.by_call_trt_")
    assert torch.equal(program.module()(x[:2], row), by_call(x[:2], row, x[:2]))


def test_what_a_decorated_function_is() -> None:
    assert by_call.__doc__ == "``out = tanh(x + bias) * residual``"
    assert (by_call.__name__, by_call.__module__) == ("by_call", __name__)
    assert str(inspect.signature(by_call)) == "(x, bias, residual)"
    x = torch.randn(3, 16)
    out, gate = gated(x, limit=0.5)
    assert torch.equal(gate, x[..., :8])
    torch.testing.assert_close(out, (torch.nn.functional.silu(gate) * x[..., 8:]).clip(-0.5, 0.5))
    names = [name for name in dir(torch.ops.fused_tests) if re.fullmatch(r"glu_2t__\w{12}", name)]
    assert names and torch.equal(getattr(torch.ops.fused_tests, names[0])(x)[1], gate)


def test_a_declared_function_of_no_module() -> None:
    made: dict[str, Any] = {}
    exec("def product_of_no_module(xp, x, y): return x * y", made)
    assert made["product_of_no_module"].__module__ is None
    x = torch.randn(2, 3)
    declared = fused(made["product_of_no_module"], operands={"x": "*m n", "y": "*m n"})
    assert torch.equal(declared(x, x), x * x)


def test_a_function_that_is_written_again_is_another_op() -> None:
    def make(power: int) -> Any:
        return fused(lambda xp, x: x**power, name="to_a_power")

    x = torch.randn(3, 8)
    for power in (2, 3, 2):
        torch.testing.assert_close(make(power)(x), x**power)


def test_calls_that_are_refused() -> None:
    x, row = torch.ones(3, 8), torch.ones(7)
    with pytest.raises(ValueError, match=r"cute.by_call: argument `bias` has shape \[7\], which does not broadcast"):
        by_call(x, row, x)
    with pytest.raises(TypeError, match="argument `residual` has dtype float64, expected float32, float16 or bfloat16"):
        by_call(x, 1.0, x.double())
    with pytest.raises(TypeError, match="argument `bias` must be an array, a number or None, got list"):
        by_call(x, [1.0], x)
    with pytest.raises(TypeError, match="`outputs` belongs to declared shapes: give `operands`, too"):
        fused(lambda xp, x: x, outputs=("y",))


def test_a_call_of_other_dtypes_is_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same shapes: bools and whole numbers have other ops than floats, and so have tiles of several dtypes."""

    @fused
    def scaled(xp: Any, x: Any, scale: Any, keep: Any) -> Any:
        return xp.where(keep > 0, x * scale, 0.0)

    by_call, chosen = scaled.by_call, []  # type: ignore[attr-defined]
    choose = by_call.choose
    monkeypatch.setattr(by_call, "choose", lambda *given: chosen.append(given) or choose(*given))
    x, scale, keep = torch.randn(2, 3, 8), torch.arange(8), torch.randn(2, 3, 8)
    calls = [
        (tile, row, kept)
        for tile in (x, x.bfloat16()) for row in (scale, scale.float(), scale.int()) for kept in (keep, keep.bfloat16())
    ]  # fmt: skip
    for given in 2 * calls:
        found = scaled(*given)
        tile, row, kept = (t.double() for t in given)
        torch.testing.assert_close(found.double(), torch.where(kept > 0, tile * row, 0.0), rtol=1e-2, atol=1e-2)
    assert len(chosen) == len(calls)
