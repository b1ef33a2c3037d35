"""Ops of a user's own in compiled models: they replace what they mean, in both passes, as ours do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cute_ops import FLOATS, Op, Tensor, fused, fused_linear, widen
from cute_ops_torch import inductor
from cute_ops_torch.inductor import Own
from tests.ops.unit_rows import unit, unit_gradient
from tests.torch.drawn_programs import only_the_pass, through_autograd, with_graphs_after_autograd

N = 16
X = Tensor("*m n", "T")


def softcap(xp: Any, x: Any, *, cap: float) -> Any:
    (wide,) = widen(xp, x)
    return xp.astype(cap * xp.tanh(wide / cap), x.dtype)


def softcap_gradient(xp: Any, x: Any, dout: Any, *, cap: float) -> Any:
    wide, dy = widen(xp, x, dout)
    return xp.astype(dy * (1 - xp.tanh(wide / cap) ** 2), x.dtype)


def own(name: str, reference: Callable[..., Any], **more: Any) -> Op:
    fields = {"inputs": {"x": X}, "outputs": {"out": X}, "dtypes": {"T": FLOATS}, "kernel": "no_module:Kernel"}
    return Op(name, reference=reference, **{**fields, **more})


SOFTCAP = own(
    "own_softcap", softcap, attrs={"cap": 30.0}, grad=own(
        "own_softcap_bwd", softcap_gradient, inputs={"x": X, "dout": X}, outputs={"dx": X}, attrs={"cap": 30.0},
    ),
)  # fmt: skip
INFERENCE = own("own_cube", lambda xp, x: x * x * x + 1)


def capped(xp: Any, acc: Any, bias: Any) -> Any:
    return 8.0 * xp.tanh((acc + bias) / 8.0)


LINEAR = fused_linear(capped, operands={"bias": "n"}, name="own_linear")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    inductor.disable()


def check(function: Callable[..., Any], given: tuple[Any, ...], *tensors: torch.Tensor, backend: Any) -> list[str]:
    """What was put in, by a compiled function that has the values and gradients of the eager one."""
    inductor.enable(devices=("cpu",), own=given)
    results = []
    for run in (function, torch.compile(function, backend=backend, fullgraph=True)):
        leaves = [each.clone().requires_grad_() for each in tensors]
        out = run(*leaves)
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=3e-5, atol=3e-5)
    return sorted(entry.becomes for entry in inductor.report().replaced)


@pytest.mark.slow
def test_a_row_kernel_with_any_value_of_its_attribute() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x / 30.0) * 30).cumsum(-1) + 50 * torch.tanh(x.flip(-1) * (1 / 50))

    put_in = check(function, (SOFTCAP,), 40 * torch.randn(3, N), backend=through_autograd)
    assert "own_softcap" in put_in
    other = lambda x: (30.0 * torch.tanh(x / 20.0)).cumsum(-1)  # noqa: E731
    assert "own_softcap" not in check(other, (SOFTCAP,), torch.randn(3, N), backend=through_autograd)


@pytest.mark.slow
def test_what_is_kept_for_the_gradient_need_not_be_in_the_model() -> None:
    """Nor must a reference's reductions keep their dim: the op of docs/row_kernel.md."""
    scale = Tensor("*m", "float32", hidden=True)
    saved = {"out": X, "scale": scale._replace(hidden=False), "dout": X}
    backward = own("own_unit_bwd", unit_gradient, inputs=saved, outputs={"dx": X})
    outputs, more = {"out": X, "scale": scale}, {"attrs": {"eps": 1e-12}, "no_gradient": ("eps",)}
    op = own("own_unit", unit, outputs=outputs, grad=backward, **more)
    function = lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)  # noqa: E731
    assert check(function, (op,), torch.randn(3, N), backend=through_autograd) == ["own_unit"]


def test_ops_of_products_are_copied_with_inductors_config() -> None:
    with inductor.enable(own=[Own(LINEAR, capped, product=("x", "weight"))]):
        copied = torch._inductor.config.get_config_copy()
    assert isinstance(copied["pre_grad_custom_pass"], inductor.graph_pass.Replace)


@pytest.mark.slow
def test_a_product_of_ones_own() -> None:
    x, w, b = torch.randn(2, 3, N), torch.randn(8, N), torch.randn(8)
    function = lambda x, w, b: 8 * torch.tanh(F.linear(x, w, b) * 0.125)  # noqa: E731
    given = (Own(LINEAR, capped, product=("x", "weight")),)
    assert check(function, given, x, w, b, backend=through_autograd) == ["own_linear"]
    torch._dynamo.reset()
    turned = lambda x, w, b: 8 * torch.tanh((x @ w + b) * 0.125)  # noqa: E731
    assert "own_linear" not in check(turned, given, x, w.t().contiguous(), b, backend=through_autograd)


def test_an_op_without_a_gradient_computes_the_forward_after_autograd() -> None:
    function = lambda x: (x * x * x + 1).cumsum(-1)  # noqa: E731
    x = torch.randn(3, N)
    assert check(function, (INFERENCE,), x, backend=only_the_pass) == []
    assert "own_cube has no gradient" in {entry.why for entry in inductor.report()}
    torch._dynamo.reset()
    assert check(function, (INFERENCE,), x, backend=with_graphs_after_autograd(True)) == ["own_cube"]


def test_a_function_says_what_a_reference_does_not() -> None:
    def silu_plus_one(xp: Any, x: Any) -> Any:
        return xp.silu(x) + 1.0

    op = fused(silu_plus_one, operands={"x": "*m n"})
    with pytest.raises(ValueError, match="silu_plus_one: its reference is no expression of rows, give Own"):
        inductor.enable(own=[op])
    function = lambda x: F.silu(x) + 1  # noqa: E731
    put_in = check(function, (Own(op, silu_plus_one),), torch.randn(3, N), backend=through_autograd)
    assert put_in == ["silu_plus_one"]


def test_what_is_no_op_of_ones_own() -> None:
    with pytest.raises(
        TypeError, match=r"inductor\.enable: an op of your own must be an Op, or Own\(op, ...\), got str"
    ):
        inductor.enable(own=["rmsnorm"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"own_linear: say what follows the product: Own\(op, meaning, product\)"):
        inductor.enable(own=[Own(LINEAR, product=("x", "weight"))])
    with pytest.raises(ValueError, match=r"own_linear: product names .* but the op has the inputs x, weight, bias"):
        inductor.enable(own=[Own(LINEAR, capped, product=("x", "w"))])
    heads = own("own_heads", lambda xp, x: x * 2 + 1, inputs={"x": Tensor("*m h d", "T")},
                outputs={"out": Tensor("*m h d", "T")})  # fmt: skip
    with pytest.raises(ValueError, match=r"own_heads: input `x` has shape '\*m h d'; recognised are '\*m n',"):
        inductor.enable(own=[heads])


def test_a_cached_program_is_of_the_same_ops() -> None:
    keys = []
    for given in ((), (SOFTCAP,), (SOFTCAP,), (INFERENCE,)):
        inductor.enable(devices=("cpu",), own=given)
        keys.append(torch._inductor.config.pre_grad_custom_pass.uuid())
        after = torch._inductor.config.post_grad_custom_pre_pass
        assert after.uuid() != keys[-1]
        assert " at 0x" not in after.key
    assert keys[1] == keys[2]
    assert len(set(keys)) == 3
