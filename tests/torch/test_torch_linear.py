"""The products of a linear layer under torch without a GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from array_api_compat import torch as xp
from torch.utils._python_dispatch import TorchDispatchMode

import cute_ops_torch
from cute_ops import Array, Case, Op, testing
from cute_ops.autotune import dispatch
from cute_ops.composite.linear_add_rmsnorm import linear_add_rmsnorm, linear_add_rstd
from cute_ops.composite.qkv_rope import qkv_rope
from cute_ops.composite.rmsnorm_linear import rmsnorm_linear
from cute_ops.declaration.binding import bind
from cute_ops.expressions import TraceError
from cute_ops.jit.target import parse
from cute_ops.ops import PRODUCTS as NAMED
from cute_ops.ops.gemm import by_call
from cute_ops.ops.gemm.accumulate import linear_dweight_add
from cute_ops.ops.gemm.linear import PRODUCTS, linear, linear_dweight, linear_dx, linear_float32
from cute_ops.tools.gradient import check as check_gradient
from cute_ops_torch.host import launch
from cute_ops_torch.library import framework, program
from tests.ops.epilogues import DIFFERENTIABLE, columns
from tests.ops.epilogues import OPS as EPILOGUES

every_product = pytest.mark.parametrize("product", PRODUCTS, ids=lambda op: op.name)


def plain(product: Op, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    if product is linear_dweight:
        return first.flatten(0, -2).T @ second.flatten(0, -2)
    return first @ (second if product is linear_dx else second.T)


@every_product
@pytest.mark.parametrize("sizes", [(5, 32, 24), (0, 32, 24), (5, 0, 24), (5, 32, 0), (0, 0, 0), (1, 1, 1)], ids=str)
def test_values(product: Op, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    shapes = [t.of({"m": (2, m), "n": n, "k": k}) for t in product.inputs.values()]
    tensors = [torch.randint(-4, 5, shape).to(torch.bfloat16) for shape in shapes]
    out = cute_ops_torch.register(product)(*tensors)
    exact = plain(product, *(t.double() for t in tensors))
    assert out.shape == exact.shape
    assert torch.equal(out, exact.to(out.dtype))


@every_product
def test_as_an_op_of_torch(product: Op) -> None:
    cute_ops_torch.register(product)
    shapes = [t.of({"m": (3, 5), "n": 16, "k": 8}) for t in product.inputs.values()]
    tensors = [torch.randn(shape).half() for shape in shapes]
    torch.library.opcheck(getattr(torch.ops.cute, product.name).default, tuple(tensors))


def test_refused() -> None:
    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    with pytest.raises(TypeError, match="argument `x` has dtype float64, expected bfloat16, float16 or float32"):
        cute_ops_torch.register(linear)(x.double(), weight.double())
    with pytest.raises(ValueError, match="argument `weight` has k=7, but k=8"):
        cute_ops_torch.register(linear)(x.half(), weight[:, :7].half())
    apart = torch.randn(4, 16).half()[:, ::2]
    with pytest.raises(ValueError, match=r"argument `weight` has strides \(16, 2\), expected 1 in k or n\. With"):
        cute_ops_torch.register(linear)(x.half(), apart, fused="always")


@pytest.mark.parametrize("fused", ["auto", "never"])
@pytest.mark.parametrize("epilogue", [None, "gelu", lambda xp, acc: (acc, xp.sum(acc, axis=-1, keepdims=True))])
def test_operands_lie_anywhere(epilogue: Any, fused: str) -> None:
    """Rows that no stride steps over, and gaps between columns: values and gradients are those of compact operands."""
    every = a, b = torch.randn(4, 3, 16), torch.randn(5, 16)
    for x, weight in ((a[::2], b), (a[:, :2, ::2], b[:, ::2]), (a.mT[::2], b[:, :3])):
        results = []
        for given in ((x, weight), (x.contiguous(), weight.contiguous())):
            leaves = [t.detach().requires_grad_() for t in given]
            out = cute_ops_torch.linear(*leaves, epilogue=epilogue, fused=fused)
            outs = out if isinstance(out, tuple) else (out,)
            results.append([*outs, *torch.autograd.grad([o.square().sum() for o in outs], leaves)])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)
    whole, weight = (t.half() for t in every)
    for x in (whole[::2], whole[..., ::2]):
        with pytest.raises(ValueError, match=r"cute\.linear: argument `x` has strides? .*fused='auto'"):
            cute_ops_torch.linear(x, weight[:, : x.shape[-1]], epilogue=epilogue, fused="always")


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda op: op.name)
def test_epilogues(epilogue: Op) -> None:
    """As ops of torch, with leading dims, and of nothing."""
    function = cute_ops_torch.register(epilogue)
    for sizes in ({"m": (2, 3), "n": 16, "k": 8}, {"m": (), "n": 5, "k": 0}, {"m": (0,), "n": 5, "k": 8}):
        case = Case("", {**sizes, "n": columns(epilogue, sizes["n"])})
        given = testing.inputs(epilogue, case, "float16")
        tensors = {name: torch.from_numpy(a) for name, a in given.items() if a is not None}
        got = function(*tensors.values())
        testing.check(epilogue, tensors, epilogue.attrs, got if isinstance(got, tuple) else (got,))
    torch.library.opcheck(getattr(torch.ops.cute, epilogue.name).default, (*tensors.values(), *epilogue.attrs.values()))


@pytest.mark.parametrize("name", ["with_rstd", "gated_reducing", "with_qk_norm"])
def test_epilogues_of_more_than_an_element_by_the_framework(name: str) -> None:
    op = next(op for op in EPILOGUES if op.name == name)
    given = testing.inputs(op, Case("", {"m": (2, 3), "n": 256, "k": 8}), "float32")
    tensors = {name: torch.from_numpy(a) for name, a in given.items() if a is not None}
    got = cute_ops_torch.register(op)(*tensors.values(), fused="never")
    testing.check(op, tensors, op.attrs, got if isinstance(got, tuple) else (got,))


# --- gradients -----------------------------------------------------------------------------------------------------

ALL = [*DIFFERENTIABLE, *NAMED, linear, linear_float32]
every_gradient = pytest.mark.parametrize("product", ALL, ids=lambda op: op.name)
WITH_BIAS, MULTIPLIED = (next(op for op in ALL if op.name == name) for name in ("with_gelu", "multiplied"))


def tensors_of(op: Op, m: tuple[int, ...] = (2, 3), n: int = 16, k: int = 8) -> list[torch.Tensor]:
    given = testing.inputs(op, Case("", {"m": m, "n": columns(op, n), "k": k}), "float16")
    return [torch.from_numpy(a).requires_grad_() for a in given.values() if a is not None]


def as_tuple(outputs: Any) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def loss(outputs: Any) -> torch.Tensor:
    return sum((out.float() * torch.arange(out.numel()).reshape(out.shape).cos()).sum() for out in as_tuple(outputs))


def exact(op: Op, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The gradients of the reference by torch's autograd, in float64."""
    wide = [t.detach().double().requires_grad_() for t in tensors]
    return torch.autograd.grad(loss(op.reference(xp, *wide, **op.attrs)), wide)


def check(gradients: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    """Within what rounding to float16 loses, of sums of like size."""
    for got, gradient in zip(gradients, wanted, strict=True):
        limit = 2.0**-8 * max(1, gradient.abs().max().item()) if gradient.numel() else 0.0
        torch.testing.assert_close(got.double(), gradient.double(), rtol=2.0**-8, atol=limit)


@every_gradient
@pytest.mark.parametrize("m", [(2, 3), (), (1,)], ids=str)
def test_gradients(product: Op, m: tuple[int, ...]) -> None:
    tensors = tensors_of(product, m)
    gradients = torch.autograd.grad(loss(cute_ops_torch.register(product)(*tensors)), tensors)
    assert [g.dtype for g in gradients] == [torch.float16] * len(tensors)
    check(gradients, exact(product, tensors))


def test_a_table_that_rows_share_has_no_gradient() -> None:
    op = next(op for op in EPILOGUES if op.name == "with_qk_norm")
    *tensors, cos, sin = (t.detach() for t in tensors_of(op, n=256))
    wanted = [t.requires_grad_() for t in tensors]
    gradients = torch.autograd.grad(loss(cute_ops_torch.register(op)(*tensors, cos, sin)), wanted)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    exact = torch.autograd.grad(loss(op.reference(xp, *wide, cos.double(), sin.double(), **op.attrs)), wide)
    check(gradients, exact)


@every_gradient
@pytest.mark.parametrize("sizes", [{"m": (0, 3)}, {"k": 0}], ids=str)
def test_gradients_of_nothing(product: Op, sizes: dict[str, Any]) -> None:
    tensors = tensors_of(product, **sizes)
    outputs = as_tuple(cute_ops_torch.register(product)(*tensors))
    gradients = torch.autograd.grad(outputs, tensors, [torch.ones_like(out) for out in outputs])
    assert [g.shape for g in gradients] == [t.shape for t in tensors]
    assert all(g.isfinite().all() for g in gradients)
    if 0 in sizes.get("m", ()):
        assert not any(g.any() for g in gradients)


@every_gradient
def test_transforms(product: Op) -> None:
    """``torch.func.grad``, and ``vmap`` of it with weights that are batched, too."""
    function, tensors = cute_ops_torch.register(product), [t.detach() for t in tensors_of(product)]
    places = tuple(range(len(tensors)))

    def total(*tensors: torch.Tensor) -> torch.Tensor:
        return loss(function(*tensors))

    wanted = exact(product, tensors)
    check(torch.func.grad(total, places)(*tensors), wanted)
    stacked = [torch.stack([t, t / 2]) for t in tensors]
    check([g[0] for g in torch.vmap(torch.func.grad(total, places))(*stacked)], wanted)
    rows = [t.ndim > 2 for t in tensors]
    shared = [torch.stack([t, t]) if batched else t for t, batched in zip(tensors, rows, strict=True)]
    dims = tuple(0 if batched else None for batched in rows)
    summed = torch.func.grad(lambda *tensors: loss(torch.vmap(function, dims)(*tensors)), places)(*shared)
    assert [g.shape for g in summed] == [t.shape for t in shared]


@every_gradient
def test_no_op_runs_for_each_weight_of_a_batch(product: Op) -> None:
    """In ``vmap`` of a gradient, and in the gradient of ``vmap``."""
    function, tensors = cute_ops_torch.register(product), [t.detach() for t in tensors_of(product)]
    stacked = [torch.stack([t, t / 2, t / 4]) for t in tensors]
    dims = tuple(t.ndim - 1 for t in stacked)

    def total(*one: torch.Tensor) -> torch.Tensor:
        return loss(function(*one))

    # What reduces rows or groups runs for each of them.
    once = product.batched is not None
    with Ran() as ran:
        moved = [t.movedim(0, dim) for t, dim in zip(stacked, dims, strict=True)]
        each = torch.vmap(torch.func.grad(total, tuple(range(len(tensors)))), dims)(*moved)
    assert (len(set(ran.names)) == len(ran.names)) == once
    for i in range(3):
        check([g[i] for g in each], exact(product, [t[i] for t in stacked]))
    leaves = [t.requires_grad_() for t in stacked]
    with Ran() as ran:
        check(torch.autograd.grad(torch.vmap(total)(*leaves).sum(), leaves), each)
    assert (len(set(ran.names)) == len(ran.names)) == once


@pytest.mark.drawn(0.3)
@pytest.mark.slow
@every_gradient
def test_compiled_with_rows_of_any_number(product: Op) -> None:
    torch._dynamo.reset()  # it compiles one function for a few ops only
    function = cute_ops_torch.register(product)
    compiled = torch.compile(
        lambda *tensors: loss(function(*tensors)), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for m in ((2, 3), (2, 5)):
        tensors = tensors_of(product, m)
        check(torch.autograd.grad(compiled(*tensors), tensors), exact(product, tensors))


@pytest.mark.slow
def test_inductor() -> None:
    function, tensors = cute_ops_torch.register(WITH_BIAS), tensors_of(WITH_BIAS)
    compiled = torch.compile(function, fullgraph=True)
    check(torch.autograd.grad(loss(compiled(*tensors)), tensors), exact(WITH_BIAS, tensors))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*tensors), function(*tensors))


class Ran(TorchDispatchMode):
    """Names of the ops that run; with ``arguments`` each beside what it got for ``fused``."""

    def __init__(self, arguments: bool = False) -> None:
        super().__init__()
        self.names: list[Any] = []
        self.arguments = arguments

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "cute":
            choice = next((a for a in args if isinstance(a, str)), None)
            self.names.append((func._opname, choice) if self.arguments else func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("wanted", "forward", "backward"),
    [
        ("", "multiplied", ""),
        ("x", "multiplied_saving", "multiplied_bwd_only_dacc linear_kn_of_dacc_dx"),
        ("weight", "multiplied_saving", "multiplied_bwd_only_dacc linear_kn_of_dacc_dweight"),
        ("other", "multiplied_saving", "multiplied_bwd_only_dother"),
        ("bias", "multiplied_saving", "multiplied_bwd_only_dbias"),
    ],
)
def test_only_what_is_wanted_runs(wanted: str, forward: str, backward: str) -> None:
    given = {name: t.detach() for name, t in zip(MULTIPLIED.inputs, tensors_of(MULTIPLIED), strict=True)}
    if wanted:
        given[wanted].requires_grad_()
    with Ran() as ran:
        out = cute_ops_torch.register(MULTIPLIED)(*given.values())
    assert ran.names == [forward]
    with Ran() as ran:
        if wanted:
            out.sum().backward()
    assert " ".join(ran.names) == backward


def test_a_checkpoint_saves_nothing_of_its_own() -> None:
    tensors = tensors_of(MULTIPLIED)
    with Ran() as ran:
        function = cute_ops_torch.register(MULTIPLIED)
        out = torch.utils.checkpoint.checkpoint(function, *tensors, use_reentrant=False)
    assert ran.names == ["multiplied_saving"]
    check(torch.autograd.grad(loss(out), tensors), exact(MULTIPLIED, tensors))


def test_a_residual_gets_the_cotangent_itself() -> None:
    op = next(op for op in ALL if op.name == "with_residual")
    x, weight, residual = (t.detach() for t in tensors_of(op))
    residual.requires_grad_()
    out = cute_ops_torch.register(op)(x, weight, residual)
    cotangent = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, [residual], cotangent)
    assert gradient.data_ptr() == cotangent.data_ptr()
    wide = residual.detach().float().requires_grad_()
    (gradient,) = torch.autograd.grad(cute_ops_torch.register(op)(x, weight, wide), [wide], cotangent)
    assert torch.equal(gradient, cotangent.float())


def test_cotangents_that_lie_otherwise() -> None:
    """Transposed ones, which a product reads in place and a sum of rows does not."""
    op = next(op for op in ALL if op.name == "with_bias")
    tensors = tensors_of(op, (6,))
    out = cute_ops_torch.register(op)(*tensors)
    for cotangent in (torch.randn(16, 6).half().T, torch.ones(()).half().expand(6, 16)):
        wide = [t.detach().double().requires_grad_() for t in tensors]
        wanted = torch.autograd.grad(op.reference(xp, *wide), wide, cotangent.double())
        check(torch.autograd.grad(out, tensors, cotangent, retain_graph=True), wanted)


def test_a_backward_of_a_backward_is_refused() -> None:
    tensors = tensors_of(WITH_BIAS)
    (gradient, *_) = torch.autograd.grad(loss(cute_ops_torch.register(WITH_BIAS)(*tensors)), tensors, create_graph=True)
    with pytest.raises(NotImplementedError, match="there is no double backward"):
        gradient.sum().backward()


# --- the framework's product ---------------------------------------------------------------------------------------


@every_gradient
@pytest.mark.parametrize("m", [(2, 3), (), (0,)], ids=str)
def test_both_choices_give_the_same(product: Op, m: tuple[int, ...]) -> None:
    function, tensors = cute_ops_torch.register(product), tensors_of(product, m)
    outputs = {fused: as_tuple(function(*tensors, fused=fused)) for fused in ("auto", "never")}
    for ours, theirs in zip(*outputs.values(), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    check(outputs["never"], outputs["auto"])
    for ours in outputs.values():
        check(torch.autograd.grad(loss(ours), tensors), exact(product, tensors))


@every_gradient
def test_float32(product: Op) -> None:
    tensors = [t.detach().float().requires_grad_() for t in tensors_of(product)]
    wanted = exact(product, tensors)
    # A cotangent has the dtype of its output.
    close = 2.0**-8 if any(t.dtype == "bfloat16" for t in product.outputs.values()) else 1e-5
    for fused in ("auto", "never"):
        outputs = cute_ops_torch.register(product)(*tensors, fused=fused)
        for got, gradient in zip(torch.autograd.grad(loss(outputs), tensors), wanted, strict=True):
            torch.testing.assert_close(got.double(), gradient, rtol=close, atol=close)


def test_the_choice_reaches_the_products_of_the_gradient() -> None:
    tensors = tensors_of(MULTIPLIED)
    with Ran(arguments=True) as ran:
        loss(cute_ops_torch.register(MULTIPLIED)(*tensors, fused="never")).backward()
    chosen = {name: choice for name, choice in ran.names if choice}
    assert chosen == dict.fromkeys(("multiplied_saving", "linear_kn_of_dacc_dx", "linear_kn_of_dacc_dweight"), "never")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_choice_is_one_op_in_a_graph(backend: str) -> None:
    torch._dynamo.reset()
    function, tensors = cute_ops_torch.register(WITH_BIAS), tensors_of(WITH_BIAS)
    compiled = torch.compile(lambda *tensors: function(*tensors, fused="never"), fullgraph=True, backend=backend)
    check(torch.autograd.grad(loss(compiled(*tensors)), tensors), exact(WITH_BIAS, tensors))


def test_a_call_on_a_gpu_by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the launcher runs it, into new outputs and into given ones."""
    monkeypatch.setattr(launch.target, "of_device", lambda index: parse("sm_90a"))
    op = WITH_BIAS.saving
    cute_ops_torch.register(WITH_BIAS)
    tensors = [t.detach() for t in tensors_of(op)]
    call = launch.prepare(op, tensors, ["never"])
    out, acc = call.run(*tensors)
    check((acc,), (tensors[0] @ tensors[1].T,))
    given = torch.full_like(out, torch.nan)
    (other,) = call.fill(("out",))(*tensors, given)
    assert torch.equal(given, out) and torch.equal(other, acc)


# --- the function --------------------------------------------------------------------------------------------------


def gelu_add(xp, acc, bias, residual=None, *, slope=1.0):
    out = slope * xp.gelu(acc + bias)
    return out if residual is None else out + residual


def swiglu(xp, acc, bias):
    n = acc.shape[-1] // 2
    return xp.silu(acc[..., :n] + bias[..., :n]) * (acc[..., n:] + bias[..., n:])


def made(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Random numbers: x and the weight in bfloat16, operands in float32."""
    generator = torch.Generator().manual_seed(0)
    first = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes[:2]]
    return [*first, *(torch.randn(shape, generator=generator) for shape in shapes[2:])]


@pytest.mark.parametrize("residual", [None, (2, 8, 8), (8, 8), (2, 1, 8), (2, 8, 1), (8,), (1, 8), (1, 1), ()], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_a_function_as_epilogue(residual: tuple[int, ...] | None, transposed: bool) -> None:
    x, weight, bias, *others = made((2, 8, 16), (8, 16), (8,), *([] if residual is None else [residual]))
    given = (x, weight.T.contiguous() if transposed else weight, bias, *others)
    out = cute_ops_torch.linear(*given, epilogue=gelu_add, transposed=transposed, slope=0.5)
    exact = 0.5 * torch.nn.functional.gelu(x.double() @ weight.double().T + bias)
    torch.testing.assert_close(out.double(), exact + sum(others), rtol=0.01, atol=0.01)


def rescaled(xp, acc, bias, residual, scale, factor):
    return xp.gelu(acc * scale + bias) * factor + residual


# Of a bias, a residual, a number per row and one for all: against (2, 3, 5, 8), of six weights.
OPERANDS_OF_BATCHES = (
    ((8,), (2, 3, 5, 8), (), (2, 1, 1, 1)), ((3, 1, 8), (5, 8), (2, 3, 5, 1), (1,)),
    ((2, 3, 1, 8), (3, 5, 8), (5, 1), (2, 3, 1, 1)), ((2, 1, 1, 8), (2, 1, 5, 8), (2, 1, 5, 1), (3, 1, 1)),
)  # fmt: skip


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("shapes", OPERANDS_OF_BATCHES, ids=str)
@pytest.mark.parametrize("fused", ["auto", "never"])
def test_a_batch_of_weights(shapes: tuple[tuple[int, ...], ...], fused: str) -> None:
    given = [t.float().requires_grad_() for t in made((2, 3, 5, 16), (2, 3, 8, 16), *shapes)]

    def run(x: torch.Tensor, weight: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        return cute_ops_torch.linear(x, weight, *operands, epilogue=rescaled, fused=fused)

    def plain(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any, scale: Any, factor: Any) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ weight.mT * scale + bias) * factor + residual

    torch._dynamo.reset()
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        out = function(*given)
        torch.testing.assert_close(out, plain(*given), rtol=1e-4, atol=1e-4)
        found, exact = (torch.autograd.grad(each.cos().sum(), given) for each in (out, plain(*given)))
        for got, wanted in zip(found, exact, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)


def test_a_batch_of_weights_without_an_epilogue() -> None:
    x, weight = made((2, 3, 5, 16), (2, 3, 8, 16))
    out = cute_ops_torch.linear(x, weight)
    torch.testing.assert_close(out, x @ weight.mT)
    assert torch.equal(cute_ops_torch.linear(x, weight.mT.contiguous(), transposed=True), out)
    assert torch.equal(torch.compile(cute_ops_torch.linear, backend="aot_eager", fullgraph=True)(x, weight), out)
    shared = torch.vmap(torch.vmap(cute_ops_torch.linear, (None, 0)))(x[:, 0], weight)
    torch.testing.assert_close(shared, x[:, :1] @ weight.mT)
    for epilogue in (None, "gelu"):
        assert cute_ops_torch.linear(x[:0], weight[:0], epilogue=epilogue).shape == (0, 3, 5, 8)


def test_a_call_like_an_earlier_one_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given = made((2, 3, 16), (8, 16), (8,), (3, 8))
    first = cute_ops_torch.linear(*given, epilogue=gelu_add)
    monkeypatch.setattr(by_call, "fits", None)
    assert torch.equal(cute_ops_torch.linear(*given, epilogue=gelu_add), first)


def test_packed_weights() -> None:
    x, weight, bias = made((2, 3, 16), (16, 16), (16,))
    gate, up = (x.double() @ weight.double().T + bias).chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up
    for given, transposed in ((weight, False), (weight.T.contiguous(), True)):
        out = cute_ops_torch.linear(x, given, bias, epilogue=swiglu, packed=True, transposed=transposed)
        torch.testing.assert_close(out.double(), exact, rtol=0.01, atol=0.01)


def test_without_an_epilogue() -> None:
    x, weight = made((2, 3, 16), (8, 16))
    out = cute_ops_torch.linear(x, weight)
    assert torch.equal(out, torch.ops.cute.linear(x, weight))
    assert torch.equal(out, cute_ops_torch.linear(x, weight.T.contiguous(), transposed=True))


@pytest.mark.slow
def test_the_function_compiled() -> None:
    """In one graph for any number of rows, with a function of a module and one that is made in what is compiled."""

    def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        factor = 0.5
        hidden = cute_ops_torch.linear(x, weight, bias, epilogue=gelu_add)
        return cute_ops_torch.linear(hidden, weight, x, epilogue=lambda xp, acc, x: acc * factor + x)

    torch.compiler.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    compiled = torch.compile(layer, fullgraph=True)
    for rows in (2, 3, 5, 9):
        given = made((rows, 3, 16), (16, 16), (16,))
        assert torch.equal(compiled(*given), layer(*given))
    assert graphs["unique_graphs"] - before <= 2


@pytest.mark.parametrize("sizes", [(0, 8, 16), (3, 0, 16), (3, 8, 0)], ids=str)
def test_the_function_of_nothing(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    x, weight, bias, residual = made((m, k), (n, k), (n,), (m, n))
    out = cute_ops_torch.linear(x, weight, bias, residual, epilogue=gelu_add)
    assert torch.equal(out, (torch.nn.functional.gelu(bias) + residual).bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_the_function_exported(strict: bool) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = cute_ops_torch.nn.Linear(16, 16, epilogue=gelu_add)
            self.second = cute_ops_torch.nn.GatedMLP(16, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x, x))

    block, rows = Block(), torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(block, (torch.randn(5, 16),), dynamic_shapes=({0: rows},), strict=strict)
    x = torch.randn(9, 16)
    torch.testing.assert_close(program.module()(x), block(x))
    called = [node.target._opname for node in program.graph.nodes if getattr(node.target, "namespace", "") == "cute"]
    assert called == [next(name for name in called if name.startswith("linear_gelu_add_")), "gated_mlp"]


def test_calls_that_are_refused() -> None:
    x, weight, bias = made((2, 3, 16), (8, 16), (8,))

    def refused(error: type[Exception], text: str, *given: Any, **options: Any) -> None:
        with pytest.raises(error) as raised:
            cute_ops_torch.linear(*given, **options)
        assert str(raised.value).startswith(text)

    refused(
        ValueError,
        "cute.linear: argument `bias` has shape [7], which does not broadcast to [2, 3, 8].\n"
        "  x:      bfloat16[2, 3, 16]   declared T[*m k]\n"
        "  weight: bfloat16[8, 16]      declared T[n k]\n"
        "  bias:   float32[7]           declared T_bias[*m n]",
        x, weight, bias[:7], epilogue=gelu_add,
    )  # fmt: skip
    packed = "cute.linear: argument `bias` has shape [3], which does not broadcast to [2, 3, 4] or [2, 3, 8]."
    refused(ValueError, packed, x, weight, bias[:3], epilogue=swiglu, packed=True)
    odd = "cute.linear: argument `weight` has 7 columns of the product, which two halves cannot share."
    refused(ValueError, odd, x, weight[:7], bias, epilogue=swiglu, packed=True)
    refused(
        ValueError, "cute.linear: argument `weight` has 1 dims, expected 2 or more.", x, bias, bias, epilogue=gelu_add
    )
    batch = (
        "cute.linear: argument `x` has the leading dims [2, 3], but `weight` [3]: expected one more, the rows.\n"
        "  x:      bfloat16[2, 3, 16]   declared T[*b m k]\n  weight: bfloat16[3, 8, 16]   declared T[*b n k]"
    )
    refused(ValueError, batch, x, weight.expand(3, 8, 16), bias, epilogue=gelu_add)
    text = "e1(t) sum 0 -> 0 1"
    reduced = f"cute.linear: {text} reduces rows, looks at groups of columns or repeats an operand, which is not"
    refused(NotImplementedError, reduced, x, weight.expand(2, 8, 16), epilogue=text)
    few = "cute.linear: the epilogue gelu_add reads `bias`, `residual` besides the product; 0 were given."
    refused(TypeError, few, x, weight, epilogue=gelu_add)
    functions = torch.nn.functional
    for name, of_torch in {"silu": functions.silu, "gelu": functions.gelu, "GELU": torch.nn.GELU()}.items():
        library = f"cute.linear: argument `epilogue` is torch's {name}, expected a function of xp and the product, such"
        refused(TypeError, library, x, weight, epilogue=of_torch)
    unread = 'cute.linear: operand 1 was given, but no epilogue that reads it. epilogue="bias" adds one number for each'
    refused(TypeError, unread, x, weight, bias)
    refused(TypeError, "cute.linear: `slope` was given, but no epilogue that reads it.", x, weight, slope=2.0)
    mixed = "argument `weight` has dtype float32, but T=bfloat16 from `x`."
    with pytest.raises(TypeError, match=mixed):
        cute_ops_torch.linear(x, weight.float(), bias, epilogue=gelu_add)
    array = "add of a torch array of shape (8,), which is no operand"
    with pytest.raises(TraceError, match=re.escape(array)):
        cute_ops_torch.linear(x, weight, epilogue=lambda xp, acc: acc + bias)
    with pytest.raises(TraceError, match="a slice of a row"):
        cute_ops_torch.linear(x, weight, bias, epilogue=swiglu)


# --- the gated MLP -------------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}  # fmt: skip
MLP = ("x", "w_gate_up", "w_down")


def mlp_inputs(m: tuple[int, ...] = (2, 3)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((*m, 24), (2 * 33, 24), (20, 33))
    return [(torch.randn(shape, generator=generator) / 4).bfloat16().requires_grad_() for shape in shapes]


def plain_mlp(x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = (x @ w_gate_up.T).chunk(2, -1)
    return (ACTIVATIONS[activation](gate) * up) @ w_down.T


def mlp_gradients(function: Any, tensors: list[torch.Tensor], *wanted: str) -> list[torch.Tensor]:
    out = function(*tensors)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(out.dtype)
    named = dict(zip(MLP, tensors, strict=True))
    return [out, *torch.autograd.grad(out, [named[name] for name in wanted or MLP], cotangent)]


def check_mlp(found: Sequence[torch.Tensor], tensors: list[torch.Tensor], activation: str, *wanted: str) -> None:
    wide = [t.detach().double().requires_grad_() for t in tensors]
    for got, exact in zip(found, mlp_gradients(lambda *t: plain_mlp(*t, activation), wide, *wanted), strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=0.02, atol=0.02 * exact.abs().max().item())


@pytest.mark.parametrize("save", ["pre", "none"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("halves", [False, True])
def test_gated_mlp(activation: str, transposed: bool, save: str, halves: bool) -> None:
    def run(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        first, second = (w.T.contiguous() if transposed else w for w in weights)
        first = first.unflatten(int(transposed), (2, -1)) if halves else first
        return cute_ops_torch.gated_mlp(x, first, second, activation, save=save, transposed=transposed, halves=halves)

    check_mlp(mlp_gradients(run, mlp_inputs()), mlp_inputs(), activation)


def gated_with_bias(xp: Any, acc: Any, bias: Any, residual: Any) -> Any:
    n = acc.shape[-1] // 2
    return xp.silu(acc[..., :n] + bias[..., :n]) * (acc[..., n:] + bias[..., n:]) + residual


@pytest.mark.parametrize("save", ["pre", "none"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["gated_linear", "linear", "rmsnorm_linear"])
def test_halves_of_packed_weights(name: str, transposed: bool, save: str) -> None:
    """The same memory as another shape: results and gradients are the same, also of a batch and of a compiled call."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, residual = (
        torch.randn(shape, generator=generator) for shape in ((2, 3, 16), (2, 10, 16), (20,), (2, 3, 10))
    )
    weight = weight.permute(2, 0, 1).contiguous() if transposed else weight

    def run(halves: bool, x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        given = weight if halves else weight.flatten(-2) if transposed else weight.flatten(-3, -2)
        options = {"epilogue": gated_with_bias, "packed": True, "transposed": transposed, "save": save}
        if name == "gated_linear":
            return cute_ops_torch.gated_linear(x, given, "gelu", transposed=transposed, halves=halves)
        if name == "linear":
            return cute_ops_torch.linear(x, given, *others, halves=halves, **options)
        return cute_ops_torch.rmsnorm_linear(x, None, given, *others, halves=halves, **options)

    def gradients(halves: bool) -> list[torch.Tensor]:
        tensors = [
            t.clone().requires_grad_() for t in (x, weight, bias, residual)[: 2 if name == "gated_linear" else 4]
        ]
        out = run(halves, *tensors)
        return [out, *torch.autograd.grad(out.sin().sum(), tensors)]

    for got, wanted in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    batch = [torch.stack([t, t / 2]) for t in (x, weight)]
    found = torch.vmap(lambda *given: run(True, *given, bias, residual))(*batch)
    for i, one in enumerate(found):
        torch.testing.assert_close(one, run(True, *(t[i] for t in batch), bias, residual))
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(True, x, weight, bias, residual), run(True, x, weight, bias, residual))


def test_options_may_be_numbers() -> None:
    x, weights = torch.randn(3, 8), (torch.randn(2, 6, 8), torch.randn(8, 6))
    wanted = cute_ops_torch.gated_mlp(x, *weights, halves=True)
    assert torch.equal(cute_ops_torch.gated_mlp(x, *weights, halves=1, transposed=0), wanted)
    with pytest.raises(ValueError, match="argument `w_gate_up` has 2 dims, expected 3"):
        cute_ops_torch.gated_mlp(x, weights[0][0], weights[1], halves=1)
    with pytest.raises(TypeError, match="option `halves` must be bool, got 2"):
        cute_ops_torch.gated_mlp(x, *weights, halves=2)


def test_what_halves_refuse() -> None:
    x, weight = torch.randn(3, 16), torch.randn(2, 10, 16)
    with pytest.raises(ValueError, match=r"cute\.linear: option `halves` is for packed weights, expected `packed` too"):
        cute_ops_torch.linear(x, weight, torch.ones(20), epilogue="bias", halves=True)
    with pytest.raises(TypeError, match=r"cute\.linear: `halves` was given, but no epilogue that reads halves"):
        cute_ops_torch.linear(x, weight, packed=True, halves=True)
    options: dict[str, Any] = {"epilogue": swiglu, "packed": True, "halves": True}
    with pytest.raises(ValueError, match=r"argument `weight` has 2 dims, expected 3 or more\.[^$]*declared T\[2 n k\]"):
        cute_ops_torch.linear(x, weight.flatten(0, 1), torch.ones(20), **options)
    with pytest.raises(ValueError, match="argument `weight` has 3 in place of 2, its halves"):
        cute_ops_torch.linear(x, torch.randn(3, 10, 16), torch.ones(20), **options)


def test_a_product_and_a_norm_of_matrices_that_lie_apart() -> None:
    """A program copies them, and so does its gradient."""
    x, weight, residual = torch.randn(5, 16)[:, ::2], torch.randn(6, 16)[:, ::2], torch.randn(5, 6)
    tensors = [t.requires_grad_() for t in (x, weight, residual, torch.ones(6))]
    compact = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in tensors]
    results = []
    for given in (tensors, compact):
        out, total = cute_ops_torch.linear_add_rmsnorm(*given)
        results.append([out, total, *torch.autograd.grad((out * total).sum(), given)])
    torch.testing.assert_close(*results)


def test_a_product_of_nothing_is_refused() -> None:
    x = torch.ones(3, 4)
    for function, name in ((cute_ops_torch.linear, "linear"), (cute_ops_torch.gated_linear, "gated_linear")):
        with pytest.raises(TypeError, match=rf"cute\.{name}: argument `weight` is required, but None was given\."):
            function(x, None)
    with pytest.raises(TypeError, match=r"cute\.linear: argument `x` is required, but None was given\."):
        cute_ops_torch.linear(None, x, epilogue="gelu")


def test_gradients_of_summands_are_one() -> None:
    """Written once where dtypes allow; only those that are wanted."""

    def summands(xp: Any, acc: Any, bias: Any, residual: Any, other: Any) -> Any:
        return xp.gelu(acc + bias + residual + other)

    def run(given: Sequence[torch.Tensor], wanted: Sequence[int], function: Any) -> list[torch.Tensor]:
        tensors = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(given)]
        out = function(*tensors)
        return [out, *torch.autograd.grad(out, [tensors[i] for i in wanted], torch.full_like(out, 0.5))]

    def plain(x: Any, weight: Any, bias: Any, residual: Any, other: Any) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ weight.T + bias + residual + other)

    generator = torch.Generator().manual_seed(0)
    shapes = (3, 5, 8), (6, 8), (6,), (3, 5, 6), (3, 5, 6)
    given = [torch.randn(shape, generator=generator) for shape in shapes]

    def ours(*tensors: torch.Tensor) -> Any:
        return cute_ops_torch.linear(*tensors, epilogue=summands)

    for wanted in ((0, 1, 2, 3, 4), (0,), (3,), (4,), (2, 4), (1, 3)):
        torch.testing.assert_close(run(given, wanted, ours), run(given, wanted, plain), rtol=1e-4, atol=1e-4)
    with Ran() as ran:
        run(given, (3, 4), ours)
    assert not [name for name in ran.names if name.endswith(("_dx", "_dweight", "_bias"))]
    mixed = [t if i in (2, 4) else t.bfloat16() for i, t in enumerate(given)]
    for got, wide in zip(run(mixed, (0, 2, 3, 4), ours), run(given, (0, 2, 3, 4), plain), strict=True):
        torch.testing.assert_close(got.float(), wide, rtol=0.04, atol=0.04)


@pytest.mark.parametrize(
    ("wanted", "save", "forward", "backward"),
    [
        ("", "pre", "gated_mlp", ""),
        ("x", "pre", "gated_mlp_saving", "gated_mlp_bwd_only_dpre gated_mlp_dx"),
        ("w_gate_up", "none", "gated_mlp_again", "gated_mlp_pre gated_mlp_bwd_only_dpre gated_mlp_dw_gate_up"),
        ("w_down", "pre", "gated_mlp_saving", "gated_mlp_bwd_only_hidden gated_mlp_dw_down"),
        ("x w_down", "pre", "gated_mlp_saving", "gated_mlp_bwd gated_mlp_dx gated_mlp_dw_down"),
    ],
)
def test_only_what_is_wanted_of_a_gated_mlp_runs(wanted: str, save: str, forward: str, backward: str) -> None:
    tensors = [t.requires_grad_(name in wanted.split()) for name, t in zip(MLP, mlp_inputs(), strict=True)]
    composites = {"gated_mlp", "gated_mlp_saving", "gated_mlp_again"}
    with Ran() as ran:
        out = cute_ops_torch.gated_mlp(*tensors, save=save)
    assert [name for name in ran.names if name in composites] == [forward]
    with Ran() as ran:
        if wanted:
            out.sum().backward()
    assert " ".join(name for name in ran.names if name.startswith("gated_mlp")) == backward
    if wanted:
        named = [t for name, t in zip(MLP, mlp_inputs(), strict=True) if name in wanted.split()]
        assert [t.grad.shape for t in tensors if t.requires_grad] == [t.shape for t in named]


@pytest.mark.parametrize(("save", "transposed"), [("pre", False), ("none", True)])
@pytest.mark.parametrize("wanted", ["x w_gate_up w_down", "x", "w_down"])
def test_a_batch_of_gated_mlps_runs_once(wanted: str, save: str, transposed: bool) -> None:
    """In the gradient of ``vmap``, in ``vmap`` of a gradient, and where the weights have leading dims."""
    stacked = [torch.stack([t.detach().mT if transposed and i else t.detach() for t in (one, one / 2, one / 4)])
               for i, one in enumerate(mlp_inputs((4,)))]  # fmt: skip
    places = tuple(MLP.index(name) for name in wanted.split())

    def run(*given: torch.Tensor) -> torch.Tensor:
        return cute_ops_torch.gated_mlp(*given, save=save, transposed=transposed)

    def total(*one: torch.Tensor) -> torch.Tensor:
        return run(*one).double().sin().sum()

    gradient = torch.func.grad(total, places)
    exact = [gradient(*(t[i] for t in stacked)) for i in range(3)]
    for calls in (torch.vmap(gradient), torch.func.grad(lambda *g: torch.vmap(total)(*g).sum(), places),
                  torch.func.grad(total, places)):  # fmt: skip
        with Ran() as ran:
            found = calls(*stacked)
        assert len(set(ran.names)) == len(ran.names)
        for place, got in enumerate(found):
            torch.testing.assert_close(got, torch.stack([each[place] for each in exact]), rtol=0.02, atol=0.05)


def test_a_compiled_gated_mlp() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(cute_ops_torch.gated_mlp, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in ((2, 3), (2, 5)):
        check_mlp(mlp_gradients(compiled, mlp_inputs(m)), mlp_inputs(m), "silu")


def test_what_a_gated_mlp_refuses() -> None:
    tensors = [t.detach() for t in mlp_inputs()]
    with pytest.raises(ValueError, match=r"cute\.gated_mlp: option `save` is 'h', expected 'pre' or 'none'"):
        cute_ops_torch.gated_mlp(*tensors, save="h")
    with pytest.raises(ValueError, match=r"argument `w_down` has n=32, but n=33"):
        cute_ops_torch.gated_mlp(*tensors[:2], tensors[2][:, :32])


@pytest.mark.parametrize("product", [linear, *NAMED], ids=lambda op: op.name)
def test_autocast_does_not_round_what_an_op_gets(product: Op) -> None:
    tensors = [t.detach().float() for t in tensors_of(product)]
    function = getattr(torch.ops.cute, product.name).default
    with torch.autocast("cpu", torch.bfloat16):
        found = function(*tensors)
    assert found.dtype == torch.float32 and torch.equal(found, function(*tensors))


# --- the next norm -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", ["always", "never", "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_linear_add_rmsnorm(fused: str, dtype: torch.dtype) -> None:
    """Forward, with the product's epilogue or without, and the gradients."""
    op, eps = linear_add_rmsnorm(), 1e-5
    tensors = [t.detach().to(dtype).requires_grad_() for t in tensors_of(op, n=24)]
    out, residual_out = cute_ops_torch.register(op)(*tensors, eps=eps, fused=fused)
    x, weight, residual, norm_weight = wide = [t.detach().double().requires_grad_() for t in tensors]
    summed = x @ weight.T + residual
    normed = torch.nn.functional.rms_norm(summed, (24,), norm_weight, eps)
    tolerance = {"rtol": 2**-6, "atol": 2**-5} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close((out.double(), residual_out.double()), (normed, summed), **tolerance)
    cotangents = [torch.randn_like(normed, dtype=dtype) for _ in range(2)]
    got = torch.autograd.grad([out, residual_out], tensors, cotangents)
    wanted = torch.autograd.grad([normed, summed], wide, [d.double() for d in cotangents])
    for ours, exact in zip(got, wanted, strict=True):
        torch.testing.assert_close(
            ours.double(), exact, rtol=tolerance["rtol"], atol=tolerance["atol"] * exact.abs().max()
        )


@pytest.mark.parametrize(
    ("arch", "rows", "dtype", "fused"),
    [
        ("sm_90a", 65, "bfloat16", True), ("sm_90a", 64, "bfloat16", True), ("sm_90a", 65, "float32", False),
        ("sm_80", 65, "bfloat16", False), ("sm_90a", 0, "bfloat16", False),
    ],
)  # fmt: skip
def test_the_next_norm_is_fused_where_that_gains(
    arch: str, rows: int, dtype: str, fused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """On Hopper, in 16 bits."""
    caplog.set_level("DEBUG", "cute_ops")
    arrays = {name: Array(shape, dtype) for name, shape in (("x", (rows, 64)), ("weight", (256, 64)))}
    binding = bind(linear_add_rstd(), {**arrays, "residual": Array((rows, 256), dtype)})
    assert dispatch.kernel_is_faster(binding, {}, parse(arch)) == fused and not dispatch.kernel_is_faster(
        binding, {}, None
    )
    why = "runs by the framework's product and a pass: it was not measured on sm_80"
    said = [m for m in caplog.messages if m.endswith(why)]
    assert len(said) == (rows > 0 and dtype == "bfloat16" and not fused)


@pytest.mark.parametrize(("faster", "few"), [(True, False), (False, False), (True, True)])
def test_auto_adds_the_next_norm_where_that_is_faster(faster: bool, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of few elements, where the kernel that adds up squares takes longer than a pass."""
    monkeypatch.setattr(framework, "kernel_is_faster", lambda op, inputs, attrs: faster)
    if not few:
        monkeypatch.setattr("cute_ops.composite.linear_add_rmsnorm.FEW_ELEMENTS", 0)
    function, called = cute_ops_torch.register(linear_add_rmsnorm()), []
    for op in (linear_add_rstd(), linear):
        raw = program.functions[op](False)
        monkeypatch.setitem(program.functions, op, lambda inplace, op=op, raw=raw: called.append(op) or raw)
    with torch.autograd.profiler.profile():  # what a program chose for these shapes is not looked at again otherwise
        function(*[t.detach() for t in tensors_of(linear_add_rmsnorm())])
    assert called == [linear_add_rstd() if faster and not few else linear]


@pytest.mark.parametrize("transposed", [False, True])
def test_the_declared_gradient_of_linear_add_rmsnorm(transposed: bool) -> None:
    check_gradient(linear_add_rmsnorm(transposed), Case("", {"m": (3,), "n": 8, "k": 4}))


def test_projections_read_weights_of_jax() -> None:
    """``[k, n]`` gives what ``[n, k]`` does, also to the gradient."""
    x, weight, residual = torch.randn(3, 16), torch.randn(4 * 64, 16, requires_grad=True), torch.randn(3, 4 * 64)
    across, angles = weight.detach().T.contiguous().requires_grad_(), torch.rand(3, 32)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (cute_ops_torch.qkv_rope, (angles.cos(), angles.sin(), 3)),
        (cute_ops_torch.linear_add_rmsnorm, (residual, torch.ones(4 * 64))),
    ]
    for function, others in calls:
        (out, *_), (same, *_) = (
            found if isinstance(found, tuple) else (found,)
            for found in (function(x, weight, *others), function(x, across, *others, transposed=True))
        )
        torch.testing.assert_close(same, out)
        ((dweight,), (dacross,)) = (torch.autograd.grad(o.sin().sum(), w) for o, w in ((out, weight), (same, across)))
        torch.testing.assert_close(dacross.T, dweight)


NORMED = pytest.mark.parametrize(
    ("epilogue", "biased", "weighted"),
    [
        ("bias", False, True),
        ("bias", True, False),
        ("gelu", True, True),
        ("gelu_tanh", True, False),
        ("silu", False, True),
    ],
)


def normed_inputs(biased: bool, weighted: bool, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor | None]:
    """x, the norm's weight, the layer's weight and its bias."""
    generator = torch.Generator().manual_seed(0)
    x, norm_weight, weight, bias = (torch.randn(s, generator=generator) for s in ((2, 3, 32), (32,), (24, 32), (24,)))
    found = [(3 * x).to(dtype), norm_weight, (weight / 32**0.5).to(dtype), bias]
    there = (True, weighted, True, biased)
    return [t.requires_grad_() if given else None for t, given in zip(found, there, strict=True)]


@NORMED
@pytest.mark.parametrize("fused", ["always", "never"])
def test_rmsnorm_linear(epilogue: str, biased: bool, weighted: bool, fused: str) -> None:
    """Forward and gradients."""
    given = normed_inputs(biased, weighted)
    tensors = [t for t in given if t is not None]
    out = cute_ops_torch.rmsnorm_linear(*given, eps=1e-2, epilogue=epilogue, fused=fused)
    wide = [t if t is None else t.detach().double().requires_grad_() for t in given]
    x, norm_weight, weight, bias = wide
    activation = {"bias": lambda x: x, **ACTIVATIONS}[epilogue]
    exact = activation(
        torch.nn.functional.linear(torch.nn.functional.rms_norm(x, (32,), norm_weight, 1e-2), weight, bias)
    )
    torch.testing.assert_close(out.double(), exact, rtol=2**-6, atol=2**-5)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    got = torch.autograd.grad(out, tensors, cotangent)
    wanted = torch.autograd.grad(exact, [t for t in wide if t is not None], cotangent.double())
    for ours, gradient in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.double(), gradient, rtol=2**-6, atol=2**-6 * gradient.abs().max().item())


@pytest.mark.parametrize("transposed", [False, True])
def test_a_norm_of_no_columns(transposed: bool) -> None:
    """The product of rows of nothing is zero."""
    weight, bias = torch.randn((0, 6) if transposed else (6, 0)), torch.randn(6)
    given = [t.half().requires_grad_() for t in (torch.randn(3, 0), weight, bias)]
    x, weight, bias = given
    out = cute_ops_torch.rmsnorm_linear(x, None, weight, bias, epilogue="silu", transposed=transposed)
    torch.testing.assert_close(out, torch.nn.functional.silu(bias).expand(3, 6))
    assert [g.shape for g in torch.autograd.grad(out.sum(), given)] == [t.shape for t in given]


@pytest.mark.parametrize("save", ["pre", "none"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["bias", "gelu", "swiglu", "halves"])
def test_rmsnorm_linear_of_a_batch_of_weights(kind: str, transposed: bool, save: str) -> None:
    """One op for all of them, with gradients; the norm's weight is that of all."""
    torch.manual_seed(0)
    packed = kind in ("swiglu", "halves")
    x, norm_weight, bias = torch.randn(2, 3, 5, 8), torch.rand(8) + 0.5, torch.randn(2, 3, 1, 12)
    weight = torch.randn(2, 3, 2, 6, 8) if packed else torch.randn(2, 3, 12, 8)
    weight = (weight if kind == "halves" or not packed else weight.flatten(2, 3)) / 3
    weight = weight.movedim(-1, 2) if transposed else weight
    given = [t.clone().requires_grad_() for t in (x, norm_weight, weight, bias)]
    options: dict[str, Any] = {
        "epilogue": swiglu if packed else kind,
        "transposed": transposed,
        "save": save,
        "eps": 1e-2,
    }
    options |= {"packed": packed, "halves": kind == "halves"}
    with Ran() as ran:
        out = cute_ops_torch.rmsnorm_linear(*given, **options)
        got = torch.autograd.grad(out.sin().sum(), given)
    assert len(set(ran.names)) == len(ran.names)
    each = [
        cute_ops_torch.rmsnorm_linear(given[0][i, j], given[1], *(t[i, j] for t in given[2:]), **options)
        for i in range(2)
        for j in range(3)
    ]
    expected = torch.stack(each).unflatten(0, (2, 3))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(got, torch.autograd.grad(expected.sin().sum(), given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["gelu", "swiglu", "halves"])
@pytest.mark.parametrize("dims", [(0, None, 0, 0), (0, 0, 0, 0), (None, None, 0, 0), (None, None, None, 0)], ids=str)
def test_vmap_of_rmsnorm_linear_over_weights(dims: tuple[Any, ...], kind: str, transposed: bool) -> None:
    """Products run once for all examples, forward and backward; a gradient of the norm's weight is one for each."""
    packed, generator = kind != "gelu", torch.Generator().manual_seed(0)
    shapes = (5, 8), (8,), ((2, 6, 8) if kind == "halves" else (12, 8)), (12,)
    tensors = [torch.randn((3, *shape), generator=generator) for shape in shapes]
    tensors[1], tensors[2] = tensors[1].exp(), tensors[2] / 3
    if transposed:
        tensors[2] = tensors[2].movedim(-1, 1)
    given = [t[0] if dim is None else t for t, dim in zip(tensors, dims, strict=True)]
    options = {"packed": packed, "transposed": transposed, "halves": kind == "halves"}

    def total(*each: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = cute_ops_torch.rmsnorm_linear(*each, epilogue=swiglu if packed else kind, **options)
        return out.sin().sum(), out

    run = torch.func.grad_and_value(total, (0, 1, 2, 3), has_aux=True)
    with Ran() as ran:
        found, (_, out) = torch.vmap(run, dims)(*given)
    products = [name for name in ran.names if "linear" in name]
    assert len(set(products)) == len(products) and any("batched" in name for name in products)
    each = [run(*(t if dim is None else t[i] for t, dim in zip(given, dims, strict=True))) for i in range(3)]
    torch.testing.assert_close(out, torch.stack([out for _, (_, out) in each]))
    for got, gradients in zip(found, zip(*(g for g, _ in each), strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(gradients), rtol=1e-4, atol=1e-4)


def test_vmap_of_rmsnorm_linear_of_no_example_and_twice() -> None:
    x, norm_weight, weight = torch.randn(2, 3, 5, 8), torch.rand(3, 8), torch.randn(2, 3, 6, 8)
    function = cute_ops_torch.rmsnorm_linear
    assert torch.vmap(function)(x[0, :0], norm_weight[:0], weight[0, :0]).shape == (0, 5, 6)
    out = torch.vmap(torch.vmap(function), (0, None, 0))(x, norm_weight, weight)
    normed = torch.nn.functional.rms_norm(x, (8,), eps=1e-6) * norm_weight[:, None]
    torch.testing.assert_close(out, normed @ weight.mT, rtol=1e-4, atol=1e-5)
    plain = torch.vmap(partial(function, fused="always"), (0, None, 0))(x[0], None, weight[0])
    torch.testing.assert_close(plain, torch.nn.functional.rms_norm(x[0], (8,), eps=1e-6) @ weight[0].mT)


@pytest.mark.slow
def test_a_compiled_batch_behind_a_norm() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(cute_ops_torch.rmsnorm_linear, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (5, 7):
        given = [torch.randn(s).requires_grad_() for s in ((2, m, 8), (8,), (2, 12, 8), (2, 1, 12))]
        results = []
        for function in (compiled, cute_ops_torch.rmsnorm_linear):
            out = function(*given, epilogue="gelu")
            results.append([out, *torch.autograd.grad(out.sum(), given)])
        torch.testing.assert_close(*results)
    op = rmsnorm_linear("gelu", ("n",), batched=True)
    x, norm_weight, weight, bias = given
    torch.library.opcheck(getattr(torch.ops.cute, op.name).default, (x, weight, bias[:, 0], norm_weight))


def test_a_batch_that_rmsnorm_linear_refuses() -> None:
    x, weight = torch.randn(2, 5, 8), torch.randn(2, 12, 8)
    refused: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (NotImplementedError, "with_sums reduces rows, .* a batch of weights", (None, weight), {"epilogue": with_sums}),
        (ValueError, r"argument `norm_weight` has 2 dims, expected 1: W\[k\]", (torch.ones(2, 8), weight), {}),
        (ValueError, r"argument `x` has the leading dims \[2, 5\], but `weight` \[1\]", (None, weight[:1]), {}),
    ]
    for error, problem, arrays, options in refused:
        with pytest.raises(error, match=rf"cute\.rmsnorm_linear: .*{problem}"):
            cute_ops_torch.rmsnorm_linear(x, *arrays, **options)


def with_sums(xp: Any, acc: Any) -> Any:
    return acc, xp.sum(acc, axis=-1, keepdims=True)


@pytest.mark.parametrize(
    ("wanted", "backward"),
    [
        ("x", "bwd_only_dacc rmsnorm_linear_of_dacc_dx rmsnorm_linear_norm_bwd_only_dx"),
        ("norm_weight", "bwd_only_dacc rmsnorm_linear_of_dacc_dx rmsnorm_linear_norm_bwd_only_dnorm_weight"),
        ("weight", "rmsnorm_linear_normed bwd_only_dacc rmsnorm_linear_of_dacc_dweight"),
        ("bias", "bwd_only_dbias"),
    ],
)
def test_only_what_is_wanted_of_a_norm_and_a_layer_runs(wanted: str, backward: str) -> None:
    names = ("x", "norm_weight", "weight", "bias")
    every = (t for t in normed_inputs(True, True) if t is not None)
    given = [t.detach().requires_grad_(name == wanted) for name, t in zip(names, every, strict=True)]
    with Ran() as ran:
        out = cute_ops_torch.rmsnorm_linear(*given, epilogue="gelu")
    assert ran.names[0] == "rmsnorm_linear_bias_gelu_saving"
    with Ran() as ran:
        out.sum().backward()
    # Steps, without the ops that these call in turn.
    steps = [re.sub(r"^linear_bias_gelu_\w{12}_", "", name) for name in ran.names]
    assert " ".join(name for name in steps if name.startswith(("bwd", "rmsnorm_linear"))) == backward


def largest_beside(xp: Any, acc: Any, norm_weight: Any, residual: Any, *, slope: float) -> Any:
    y = xp.tanh(acc) * slope + norm_weight * residual
    return y, xp.max(y, axis=-1, keepdims=True)


@pytest.mark.parametrize(
    ("epilogue", "shapes", "options"),
    [
        ("add", [(24,), (2, 3, 24)], {}),
        ("gelu", [(24,)], {"transposed": True, "save": "none"}),
        ("bias", [], {"transposed": True}),
        (swiglu, [(48,)], {"packed": True}),
        (largest_beside, [(24,), (2, 3, 24)], {"slope": 0.5}),
        (lambda xp, acc, bias: xp.exp(bias) + 0 * acc, [(24,)], {}),
    ],
    ids=["add", "transposed", "plain", "packed", "own", "without the product"],
)
def test_any_epilogue_behind_a_norm(epilogue: Any, shapes: Any, options: dict[str, Any]) -> None:
    """It gives what ``linear`` gives of normalised rows, also to the gradient and to torch.compile."""
    generator = torch.Generator().manual_seed(0)
    weight = (32, 24) if "transposed" in options else (48, 32) if "packed" in options else (24, 32)
    given = [torch.randn(s, generator=generator).requires_grad_() for s in ((2, 3, 32), (32,), weight, *shapes)]
    x, norm_weight, *others = given

    def ours(x: Any, norm_weight: Any, *others: Any) -> Any:
        return cute_ops_torch.rmsnorm_linear(x, norm_weight, *others, eps=1e-2, epilogue=epilogue, **options)

    normed = torch.nn.functional.rms_norm(x, (32,), norm_weight, 1e-2)
    found, wanted = ours(*given), cute_ops_torch.linear(normed, *others, epilogue=epilogue, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    sums = [sum((t * t).sum() for t in (out if isinstance(out, tuple) else (out,))) for out in (found, wanted)]
    torch.testing.assert_close(*(torch.autograd.grad(s, given) for s in sums), rtol=1e-4, atol=1e-3)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), found, rtol=0, atol=0)


def test_refused_epilogues_behind_a_norm() -> None:
    """Messages name the function that was called."""
    x, norm_weight, weight, bias = normed_inputs(True, True)
    cute_ops_torch.rmsnorm_linear(x, norm_weight, weight, bias)  # a call that is known hides nothing
    cute_ops_torch.linear(x, weight, bias, epilogue="bias")
    with pytest.raises(TypeError, match=r"cute\.linear: .*unknown attribute `slope`"):
        cute_ops_torch.linear(x, weight, bias, epilogue="bias", slope=1.0)
    refused: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (TypeError, "the epilogue bias_add reads `bias`, `residual` .*; 1 was", (weight, bias), {"epilogue": "add"}),
        (TypeError, "unknown attribute `slope`", (weight, bias), {"slope": 1.0}),
        (ValueError, "argument `bias` has shape .*does not broadcast", (weight, bias[1:]), {}),
        (ValueError, "option `save` is 'all'", (weight, bias), {"save": "all"}),
    ]
    for error, problem, arrays, options in refused:
        with pytest.raises(error, match=rf"cute\.rmsnorm_linear: .*{problem}"):
            cute_ops_torch.rmsnorm_linear(x, norm_weight, *arrays, **options)


@pytest.mark.parametrize(("size", "rows"), [(64, ()), (128, (2, 3)), (64, (3,))], ids=str)
def test_qkv_rope(size: int, rows: tuple[int, ...]) -> None:
    """Six heads of queries, two of keys and two of values; angles that a batch shares."""
    function = cute_ops_torch.register(qkv_rope(size))
    x, weight = torch.randn(*rows, 16), torch.randn(10 * size, 16)
    angles = torch.rand(*rows[1:], size // 2) * 6
    for fused in ("auto", "never"):
        tensors = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = function(*tensors, angles.cos(), angles.sin(), heads=8, fused=fused)
        wide = [t.detach().double().requires_grad_() for t in tensors]
        q, k, v = (wide[0] @ wide[1].T).unflatten(-1, (10, size)).split((6, 2, 2), -2)
        first, second = torch.cat([q, k], -2).chunk(2, -1)
        cos, sin = (f(angles.double())[..., None, :] for f in (torch.cos, torch.sin))
        exact = torch.cat([torch.cat([first * cos - second * sin, second * cos + first * sin], -1), v], -2).flatten(-2)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)
        dout = torch.randn_like(out)
        for got, wanted in zip(
            torch.autograd.grad(out, tensors, dout), torch.autograd.grad(exact, wide, dout.double()), strict=True
        ):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="heads have 96 columns, expected 64 or 128"):
        qkv_rope(96)
    gradient = cute_ops_torch.register(qkv_rope(size).grad[0])
    for n, problem in ((size + 1, f"no multiple of the {size} columns of a head"), (3 * size, "3 heads in all")):
        with pytest.raises(ValueError, match=problem):
            gradient(torch.ones(*rows, n), angles.cos(), angles.sin(), heads=1)


# --- weight gradients that are added up ----------------------------------------------------------------------------


@pytest.mark.parametrize("fused", ["auto", "never"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("m", [(2, 3), (0,)], ids=str)
def test_adding_to_a_total(fused: str, dtype: torch.dtype, m: tuple[int, ...]) -> None:
    add = cute_ops_torch.register(linear_dweight_add)
    dout, x, total = torch.randn(*m, 16).half(), torch.randn(*m, 8).half(), torch.randn(16, 8).to(dtype)
    exact, version = total.double(), total._version
    for _ in range(3):
        exact += dout.flatten(0, -2).double().T @ x.flatten(0, -2).double()
        assert add(dout, x, total, fused=fused) is None
    assert total._version > version
    tolerance = 1e-5 if dtype is torch.float32 else 8e-3
    torch.testing.assert_close(total.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fused", ["auto", "never"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_adding_to_the_totals_of_a_batch(fused: str, dtype: torch.dtype) -> None:
    """One op changes all of them, also where they lie apart."""
    add = cute_ops_torch.register(linear_dweight_add)
    dout, x = torch.randn(3, 2, 5, 16).half(), torch.randn(2, 5, 3, 8).half()
    totals = torch.randn(16, 3, 8).to(dtype)
    exact = totals.double() + torch.einsum("bijn,ijbk->nbk", dout.double(), x.double())

    def adds(*given: torch.Tensor) -> torch.Tensor:
        add(*given, fused=fused)
        return given[0]

    with Ran() as ran:
        torch.vmap(adds, (0, 2, 1))(dout, x, totals)
    assert ran.names == ["linear_dweight_add_batched"]
    torch.testing.assert_close(totals.double(), exact, rtol=8e-3, atol=8e-3)
    with pytest.raises(ValueError, match="`total` is written but not batched"):
        torch.vmap(adds, (0, 2, None))(dout, x, totals[:, 0])


def test_adding_in_a_graph() -> None:
    torch._dynamo.reset()
    add = cute_ops_torch.register(linear_dweight_add)
    dout, x, total = torch.randn(6, 16).half(), torch.randn(6, 8).half(), torch.zeros(16, 8)
    torch.compile(add, fullgraph=True)(dout, x, total)
    torch.testing.assert_close(total, dout.float().T @ x.float())
    torch.library.opcheck(torch.ops.cute.linear_dweight_add.default, (dout, x, total))


def test_what_adding_refuses() -> None:
    add = cute_ops_torch.register(linear_dweight_add)
    dout, x = torch.randn(8, 8).half(), torch.randn(8, 8).half()
    with pytest.raises(ValueError, match="argument `total` is written, but shares memory with `x`"):
        add(dout, x, x)
    with pytest.raises(NotImplementedError, match="argument `dout` requires grad"):
        add(dout.requires_grad_(), x, torch.zeros(8, 8))


def test_what_a_transformer_does_next() -> None:
    """The public functions, and under torch.compile."""
    x, weight = torch.randn(2, 5, 24).bfloat16(), torch.randn(4 * 64, 24).bfloat16()
    residual, norm_weight = torch.randn(2, 5, 4 * 64).bfloat16(), torch.rand(4 * 64)
    angles = torch.rand(5, 32)

    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rotated = cute_ops_torch.qkv_rope(x, weight, angles.cos(), angles.sin(), 3)
        return rotated, *cute_ops_torch.linear_add_rmsnorm(x, weight, residual, norm_weight, 1e-5)

    rotated, out, total = both(x)
    exact = (x.double() @ weight.double().T).unflatten(-1, (4, 64))
    first, second = exact.chunk(2, -1)
    cos, sin = (f(angles.double())[:, None] for f in (torch.cos, torch.sin))
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    wanted = torch.cat([turned[..., :3, :], exact[..., 3:, :]], -2).flatten(-2)
    torch.testing.assert_close(rotated.double(), wanted, rtol=2.0**-7, atol=0.01)
    exact = exact.flatten(-2) + residual.double()
    torch.testing.assert_close(total.double(), exact, rtol=2.0**-7, atol=0.01)
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5) * norm_weight.double()
    torch.testing.assert_close(out.double(), normed, rtol=2.0**-6, atol=0.01)
    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="aot_eager")
    for eager, found in zip(both(x), compiled(x), strict=True):
        assert torch.equal(eager, found)


@pytest.mark.parametrize("fused", ["auto", "never"])
def test_all_heads_may_be_rotated(fused: str) -> None:
    """Of queries alone, or keys."""
    x, weight, angles = torch.randn(2, 5, 24, requires_grad=True), torch.randn(4 * 64, 24), torch.rand(5, 32)
    tables, dout = (angles.cos(), angles.sin()), torch.randn(2, 5, 4 * 64)
    out = cute_ops_torch.qkv_rope(x, weight, *tables, 4, fused=fused)
    exact = cute_ops_torch.rope((x @ weight.T).unflatten(-1, (4, 64)), *tables).flatten(-2)
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(*(torch.autograd.grad(each, x, dout) for each in (out, exact)))


@pytest.mark.parametrize(
    ("n", "columns", "heads", "message"),
    [
        (256, 31, 3, "qkv_rope: argument `cos` has 31 columns, expected 32 or 64: half of a head's"),
        (250, 32, 3, "qkv_rope: argument `weight` has n=250, no multiple of the 64 columns of a group"),
        (256, 32, 5, "qkv_rope: attribute `heads` is 5, but 4 heads in all are queries, keys and as many values"),
        (256, 32, 2, "qkv_rope: attribute `heads` is 2, but 4 heads in all"),
    ],
)
def test_heads_that_do_not_fit(n: int, columns: int, heads: int, message: str) -> None:
    """By the function, and by the op that it calls."""
    x, weight, angles = torch.randn(5, 8), torch.randn(n, 8), torch.rand(5, columns)
    op = cute_ops_torch.register(qkv_rope(64))
    for called in [cute_ops_torch.qkv_rope] + [op] * (columns == 32):
        with pytest.raises(ValueError, match=re.escape(f"cute.{message}")):
            called(x, weight, angles, angles, heads)


def test_vectors_that_share_a_gradient_beside_one_that_has_its_own() -> None:
    given = [torch.randn(shape, requires_grad=True) for shape in ((7, 16), (24, 16), (24,), (24,), (24,))]

    def epilogue(xp: Any, acc: Any, factor: Any, one: Any, other: Any) -> Any:
        return acc * factor + one + other

    ours = cute_ops_torch.linear(*given[:2], *given[2:], epilogue=epilogue)
    theirs = epilogue(torch, given[0] @ given[1].t(), *given[2:])
    torch.testing.assert_close(ours, theirs)
    dout = torch.randn_like(ours)
    torch.testing.assert_close(*[torch.autograd.grad(out, given, dout) for out in (ours, theirs)], rtol=1e-4, atol=1e-4)
