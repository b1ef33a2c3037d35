"""The MLP without a gate in PyTorch: values and gradients against float64, what runs, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

import cute_ops_torch
from cute_ops import Op
from cute_ops.composite.mlp import ACTIVATIONS
from cute_ops_torch.composite import products as composite
from cute_ops_torch.composite.products import products
from cute_ops_torch.registry import define
from tests.torch.test_torch_wanted_gradients import Recorded

EXACT = {
    "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2, "silu": F.silu, "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}  # fmt: skip
NAMES = ("x", "w_up", "b_up", "w_down", "b_down")


def inputs(
    m: tuple[int, ...] = (2, 3), dtype: torch.dtype = torch.bfloat16, biases: tuple[bool, bool] = (True, True),
    sizes: tuple[int, int, int] = (24, 33, 20), seed: int = 0,
) -> list[torch.Tensor | None]:  # fmt: skip
    """x, weights and biases for sizes k, n, p; biases are float32."""
    generator, (k, n, p) = torch.Generator().manual_seed(seed), sizes
    shapes = (*m, k), (n, k), (n,), (p, n), (p,)
    made = [torch.randn(shape, generator=generator) / 4 for shape in shapes]
    made = [t if t.ndim == 1 else t.to(dtype) for t in made]
    there = (True, True, biases[0], True, biases[1])
    return [t.requires_grad_() if given else None for t, given in zip(made, there, strict=True)]


def plain(x: Any, w_up: Any, b_up: Any, w_down: Any, b_down: Any, activation: str = "gelu") -> torch.Tensor:
    return F.linear(EXACT[activation](F.linear(x, w_up, b_up)), w_down, b_down)


def gradients(function: Any, tensors: Sequence[torch.Tensor | None], *wanted: str) -> list[torch.Tensor]:
    """The output, and the gradients of what is there."""
    out = function(*tensors)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(out.dtype)
    named = {name: t for name, t in zip(NAMES, tensors, strict=True) if t is not None}
    return [out, *torch.autograd.grad(out, [named[name] for name in wanted or named], cotangent)]


def check(found: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor | None], activation: str = "gelu") -> None:
    wide = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    exact = gradients(partial(plain, activation=activation), wide)
    for got, right, given in zip(found, exact, [found[0], *(t for t in tensors if t is not None)], strict=True):
        assert got.dtype == given.dtype
        loss = 2e-5 if tensors[0].dtype == torch.float32 else 0.02
        torch.testing.assert_close(got.double(), right, rtol=loss, atol=loss * right.abs().max().item())


def test_each_activation_is_tested() -> None:
    assert list(EXACT) == [*ACTIVATIONS.values]


@pytest.mark.parametrize("save", ["pre", "none"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", EXACT)
def test_values_and_gradients(activation: str, transposed: bool, save: str) -> None:
    """With all biases, or some, or none, in bfloat16 and float32; of odd sizes."""

    def run(x: Any, w_up: Any, b_up: Any, w_down: Any, b_down: Any, fused: str) -> torch.Tensor:
        first, second = (w.T.contiguous() if transposed else w for w in (w_up, w_down))
        options: dict[str, Any] = {"save": save, "transposed": transposed, "fused": fused}
        return cute_ops_torch.mlp(x, first, b_up, second, b_down, activation, **options)

    for biases, dtype in (
        ((True, True), torch.bfloat16), ((False, False), torch.float32), ((True, False), torch.float32),
        ((False, True), torch.float16),
    ):  # fmt: skip
        for fused in ("auto", "never"):
            tensors = inputs(dtype=dtype, biases=biases)
            check(gradients(partial(run, fused=fused), tensors), tensors, activation)


def test_derivatives_at_the_ends() -> None:
    """Where torch's are finite, so are ours, at zero the same."""
    x = torch.tensor([-65504.0, -1e4, -30, -8, -1e-6, 0, 1e-6, 8, 30, 1e4, 65504])[:, None]
    one = torch.ones(1, 1)
    for activation in EXACT:
        found = [x.clone().requires_grad_(), x.double().requires_grad_()]
        outs = [cute_ops_torch.mlp(found[0], one, None, one, None, activation), EXACT[activation](found[1])]
        got, right = (torch.autograd.grad(out.sum(), t)[0] for out, t in zip(outs, found, strict=True))
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("m", [(), (0,), (3, 0), (2, 3)], ids=str)
@pytest.mark.parametrize("sizes", [(24, 33, 20), (0, 8, 4), (8, 0, 4), (8, 8, 0)], ids=str)
def test_nothing_at_all(m: tuple[int, ...], sizes: tuple[int, int, int]) -> None:
    """Without rows, terms, hidden or other columns an output is what biases leave, and gradients are zeros."""
    tensors = inputs(m, torch.float32, sizes=sizes)
    for got, right in zip(gradients(cute_ops_torch.mlp, tensors), gradients(plain, tensors), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("wanted", "save", "forward", "backward"),
    [
        ("", "pre", "mlp", ""),
        ("x", "pre", "mlp_saving", "mlp_bwd_only_dpre mlp_dx"),
        ("w_up", "none", "mlp_again", "mlp_pre mlp_bwd_only_dpre mlp_dw_up"),
        ("w_down", "pre", "mlp_saving", "mlp_bwd_only_hidden mlp_dw_down"),
        ("x w_down", "pre", "mlp_saving", "mlp_bwd mlp_dx mlp_dw_down"),
        ("b_up", "pre", "mlp_saving", "mlp_bwd_only_dpre mlp_db_up"),
        ("b_down", "none", "mlp_again", "mlp_db_down"),
    ],
)
def test_only_what_is_wanted_runs(wanted: str, save: str, forward: str, backward: str) -> None:
    tensors = [t.requires_grad_(name in wanted.split()) for name, t in zip(NAMES, inputs(), strict=True)]
    with Recorded() as ran:
        out = cute_ops_torch.mlp(*tensors, save=save)
    assert [name for name in ran.names if name in ("mlp", "mlp_saving", "mlp_again")] == [forward]
    with Recorded() as ran:
        if wanted:
            out.sum().backward()
    assert " ".join(name for name in ran.names if name.startswith("mlp")) == backward
    for name, t in zip(NAMES, tensors, strict=True):
        assert (t.grad is not None) == (name in wanted.split())


@pytest.mark.parametrize(("save", "transposed"), [("pre", False), ("none", True)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_batch_runs_once(biased: bool, save: str, transposed: bool) -> None:
    """In the gradient of ``vmap``, in ``vmap`` of a gradient, and where the weights have leading dims."""
    one = [t for t in inputs((4,), torch.float32, biases=(biased, biased)) if t is not None]
    stacked = [
        torch.stack([w.mT if transposed and i and w.ndim == 2 else w for w in (t.detach(), t.detach() / 2)])
        for i, t in enumerate(one)
    ]
    places = tuple(range(len(stacked)))

    def total(*given: torch.Tensor) -> torch.Tensor:
        x, w_up, *others = given
        b_up, w_down, b_down = others if biased else (None, others[0], None)
        found = cute_ops_torch.mlp(x, w_up, b_up, w_down, b_down, "relu2", save=save, transposed=transposed)
        return found.sin().sum()

    gradient = torch.func.grad(total, places)
    exact = [gradient(*(t[i] for t in stacked)) for i in range(2)]
    for calls in (torch.vmap(gradient), torch.func.grad(lambda *g: torch.vmap(total)(*g).sum(), places), gradient):
        with Recorded() as ran:
            found = calls(*stacked)
        assert len(set(ran.names)) == len(ran.names)
        for place, got in enumerate(found):
            torch.testing.assert_close(got, torch.stack([each[place] for each in exact]), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_compiled_call() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(cute_ops_torch.mlp, fullgraph=True, dynamic=True, backend="aot_eager")
    for m, biases in (((2, 3), (True, True)), ((2, 5), (True, True)), ((2, 3), (False, False))):
        tensors = inputs(m, biases=biases)
        check(gradients(compiled, tensors), tensors)


def test_an_exported_module() -> None:
    mlp, rows = cute_ops_torch.nn.MLP(16, 24, "silu"), torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(mlp, (torch.randn(5, 16),), dynamic_shapes=({0: rows},))
    x = torch.randn(9, 16)
    torch.testing.assert_close(program.module()(x), mlp(x))
    called = [node.target._opname for node in program.graph.nodes if getattr(node.target, "namespace", "") == "cute"]
    assert called == ["mlp"]


def test_autocast_casts_x_and_weights() -> None:
    """As torch's own products have it; biases keep their dtype, and so do gradients."""
    tensors = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = cute_ops_torch.mlp(*tensors)
        narrow = [t.bfloat16() if t.ndim > 1 else t for t in tensors]
        assert out.dtype == torch.bfloat16 and torch.equal(out, cute_ops_torch.mlp(*narrow))
    for t, gradient in zip(tensors, torch.autograd.grad(out.float().sum(), tensors), strict=True):
        assert gradient.dtype == t.dtype == torch.float32


def test_rows_that_lie_apart() -> None:
    """Strided rows and transposed weights are read in place, or copied; the numbers stay."""
    x, w_up, b_up, w_down, b_down = (t.detach() for t in inputs((6,), torch.float32))
    expected = cute_ops_torch.mlp(x, w_up, b_up, w_down, b_down)
    apart = torch.stack([x, x], 1).flatten(1)[:, :24]
    given = apart, w_up.T.contiguous().T, torch.stack([b_up, b_up], 1)[:, 0], w_down.T.contiguous().T, b_down
    torch.testing.assert_close(cute_ops_torch.mlp(*given), expected)


def test_which_hidden_layers_are_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd ones of 16 bits on a GPU, of rows enough or without a gradient large enough, unless a form is asked for."""
    monkeypatch.setattr(composite, "EXACT", {FakeTensor, torch.nn.Parameter})
    with FakeTensorMode():

        def columns(
            m: int, n: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", fused: str = "auto"
        ) -> int:  # fmt: skip
            x = torch.empty(4, m // 4, 24, dtype=dtype, device=device)
            down = torch.empty(20, n, dtype=dtype, device=device, requires_grad=True)
            return products.columns_to_vectors(x, down, down, False, fused)

        assert [columns(48, 33), columns(44, 33), columns(48, 40), columns(48, 36, torch.float16)] == [7, 0, 0, 4]
        assert not columns(96, 33, torch.float32) and not columns(96, 33, device="cpu")
        assert not columns(96, 33, fused="never")
        monkeypatch.setattr(composite, "transforms_active", lambda: False)  # but for that of fake tensors
        with torch.no_grad():
            assert [columns(4, 2**20 - 1), columns(4, 2**20 + 1), columns(2**20, 33)] == [0, 7, 7]


@pytest.mark.parametrize("transposed", [False, True])
def test_widened_hidden_layers(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients are the same, and so are their shapes."""
    generator, (k, n, p) = torch.Generator().manual_seed(0), (24, 33, 20)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).div(4).requires_grad_()

    first = made(k, n) if transposed else made(n, k)
    gated = [made(k, 2, n), made(k, 2 * n)] if transposed else [made(2, n, k), made(2 * n, k)]
    x, bias, down = made(7, k), made(n), made(n, p) if transposed else made(p, n)
    calls: list[tuple[Any, ...]] = [(cute_ops_torch.mlp, x, first, bias, down)]
    calls += [(partial(cute_ops_torch.gated_mlp, halves=w.ndim == 3), x, w, down) for w in gated]

    def run(function: Any, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        out = function(*given, transposed=transposed)
        return [out, *torch.autograd.grad(out.square().sum(), given)]

    def apart(self: Any, op: Op, columns: int, arrays: Sequence[torch.Tensor], attrs: Sequence[Any]) -> Any:
        """What our kernel writes on a GPU."""
        if torch.is_grad_enabled():
            return None
        out = arrays[0].new_full((*arrays[0].shape[:-1], 64), torch.nan)[..., :columns]
        return out.copy_(define(op).function(*arrays, *attrs))

    for function, *given in calls:
        expected = run(function, given)
        with monkeypatch.context() as patch:
            patch.setattr(type(products), "columns_to_vectors", lambda *_: 7)
            torch.testing.assert_close(run(function, given), expected)
            with pytest.raises(ValueError, match="k=23"):
                function(x[:, 1:], *given[1:], transposed=transposed)
            patch.setattr(type(products), "apart", apart)
            with torch.no_grad():
                torch.testing.assert_close(function(*given, transposed=transposed), expected[0])
                with pytest.raises(ValueError, match="k=23"):
                    function(x[:, 1:], *given[1:], transposed=transposed)
