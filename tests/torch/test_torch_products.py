"""Every product under every transform of torch: ``linear`` with and without an epilogue, and those with names."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from array_api_compat import torch as xp
from torch._subclasses import FakeTensorMode
from torch.export import Dim
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import cute_ops_torch
from tests.ops.offered_products import PRODUCTS, Product

every_product = pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: product.name)
Tensors = tuple[torch.Tensor, ...]
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
same = partial(torch.testing.assert_close, rtol=0, atol=0)


def made(product: Product, *sizes: Any) -> list[torch.Tensor]:
    """Inputs, of which those that have a gradient want it."""
    tensors = [torch.from_numpy(a) for a in product.arrays(*sizes)]
    return [t.requires_grad_(i in product.differentiable) for i, t in enumerate(tensors)]


def function_of(product: Product) -> Callable[..., Tensors]:
    def call(*tensors: torch.Tensor) -> Tensors:
        found = product.of(cute_ops_torch)(*tensors)
        return found if isinstance(found, tuple) else (found,)

    return call


def overload_of(product: Product) -> Any:
    cute_ops_torch.register(product.op)
    return getattr(torch.ops.cute, product.op.name).default


def loss_of(function: Callable[..., Tensors]) -> Callable[..., torch.Tensor]:
    return lambda *tensors: sum(out.sin().sum() for out in function(*tensors))


def gradients(function: Callable[..., Tensors], product: Product, tensors: list[torch.Tensor]) -> Tensors:
    return torch.autograd.grad(loss_of(function)(*tensors), [tensors[i] for i in product.differentiable])


class Calls(TorchDispatchMode):
    """The ops of ours that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [func] if func.namespace == "cute" else []
        return func(*args, **kwargs or {})


@pytest.mark.feature("eager, against float64")
@pytest.mark.feature("gradients against float64")
@pytest.mark.parametrize("fused", ["auto", "never"])
@every_product
def test_values_and_gradients(product: Product, fused: str) -> None:
    product = product._replace(options={**product.options, "fused": fused})
    function, tensors = function_of(product), made(product)
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    exact = partial(product.exact, xp)
    for got, wanted in zip(function(*tensors), exact(*wide), strict=True):
        close(got.double(), wanted)
    for got, wanted in zip(gradients(function, product, tensors), gradients(exact, product, wide), strict=True):
        close(got.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.feature("zero rows, and their gradients")
@pytest.mark.feature("no terms: the epilogue of zero")
@every_product
def test_of_nothing(product: Product) -> None:
    function = function_of(product)
    for rows, k in (((0,), 16), ((2, 0, 3), 16), ((3, 4), 0)):
        tensors = made(product, rows, k)
        outs = function(*tensors)
        exact = product.exact(xp, *(t.detach().double() for t in tensors))
        for got, wanted in zip(outs, exact, strict=True):
            close(got.double(), wanted)
        for t, g in zip(
            (tensors[i] for i in product.differentiable), gradients(function, product, tensors), strict=True
        ):
            assert g.shape == t.shape and g.isfinite().all() and (k == 0 or not g.any())


@pytest.mark.drawn(0.4)
@pytest.mark.feature("opcheck")
@every_product
def test_opcheck(product: Product) -> None:
    torch.library.opcheck(overload_of(product), tuple(made(product)), dict(product.attrs))


@pytest.mark.feature("FakeTensorMode")
@pytest.mark.feature("meta device")
@every_product
def test_fakes(product: Product) -> None:
    function, tensors = function_of(product), [t.detach() for t in made(product)]
    real = function(*tensors)
    with FakeTensorMode() as mode:
        fake = function(*map(mode.from_tensor, tensors))
    for found in (fake, function(*(t.to("meta") for t in tensors))):
        assert [(f.shape, f.dtype, f.stride()) for f in found] == [(r.shape, r.dtype, r.stride()) for r in real]


@pytest.mark.feature("autocast")
@every_product
def test_autocast(product: Product) -> None:
    """Functions that stand for several ops cast x and weights; an op gets what it is given."""
    tensors = [t.detach() for t in made(product)]
    with torch.autocast("cpu", torch.bfloat16):
        found = function_of(product)(*tensors)
    own = getattr(cute_ops_torch.functions, product.function, None)
    casts = own is not getattr(cute_ops_torch, product.function)
    assert {out.dtype for out in found} == {torch.bfloat16 if casts else torch.float32}
    for got, wanted in zip(found, function_of(product)(*tensors), strict=True):
        torch.testing.assert_close(got.float(), wanted, rtol=0.03, atol=0.03 * wanted.abs().max().item() * casts)


@pytest.mark.feature("deterministic algorithms")
@every_product
def test_deterministic_algorithms(product: Product) -> None:
    function, tensors = function_of(product), made(product)
    expected = function(*tensors), gradients(function, product, tensors)
    torch.use_deterministic_algorithms(True)  # memory is filled with NaN
    try:
        same((function(*tensors), gradients(function, product, tensors)), expected)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.feature("activation checkpointing")
@pytest.mark.feature("selective activation checkpointing")
@every_product
def test_checkpoints(product: Product) -> None:
    """Also with a policy that names the op that runs where a gradient is wanted."""
    function, tensors = function_of(product), made(product)
    expected = gradients(function, product, tensors)
    again = partial(checkpoint, function, use_reentrant=False)
    same(gradients(again, product, tensors), expected)
    with Calls() as calls:
        function(*tensors)
    (called,) = calls.seen[:1]

    def policy(save: bool, ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if save and func is called else CheckpointPolicy.MUST_RECOMPUTE

    for save in (True, False):
        contexts = partial(create_selective_checkpoint_contexts, partial(policy, save))
        loss = partial(checkpoint, loss_of(function), use_reentrant=False, context_fn=contexts)
        with Calls() as calls:
            found = torch.autograd.grad(loss(*tensors), [tensors[i] for i in product.differentiable])
        same(found, expected)
        assert calls.seen.count(called) == (1 if save else 2)


@pytest.mark.feature("double backward and forward mode raise")
@every_product
def test_other_derivatives_raise(product: Product) -> None:
    function, (first, *others) = function_of(product), made(product)
    (once,) = torch.autograd.grad(loss_of(function)(first, *others), [first], create_graph=True)
    with pytest.raises(NotImplementedError, match="there is no double backward"):
        once.sum().backward()
    with pytest.raises(NotImplementedError, match="forward-mode AD"):
        jvp(lambda x: loss_of(function)(x, *others), (first,), (first,))


@pytest.mark.feature("torch.func: grad, vjp, jacrev")
@every_product
def test_torch_func(product: Product) -> None:
    function, tensors = function_of(product), made(product)
    loss, wrt = loss_of(function), product.differentiable
    expected, given = gradients(function, product, tensors), [t.detach() for t in tensors]
    chosen = lambda *some: loss(*[dict(zip(wrt, some, strict=True)).get(i, t) for i, t in enumerate(given)])  # noqa: E731
    close(grad(loss, wrt)(*given), expected)
    close(jacrev(loss, wrt)(*given), expected)
    close(vjp(chosen, *(given[i] for i in wrt))[1](torch.tensor(1.0)), expected)


@pytest.mark.feature("torch.func: vmap over x, one call")
@every_product
def test_vmap_over_rows(product: Product) -> None:
    """Batched rows are more rows of one call, of whatever shape weights and angles are."""
    function = function_of(product)
    stacked, single = [t.detach() for t in made(product, (2, 3, 4))], [t.detach() for t in made(product)]
    dims = tuple(0 if t.rows and not t.broadcast else None for t in product.inputs.values())
    given = [many if d == 0 else one for many, one, d in zip(stacked, single, dims, strict=True)]
    with Calls() as calls:
        found = vmap(function, dims)(*given)
    assert len(calls.seen) == 1
    each = [function(*(t[i] if d == 0 else t for t, d in zip(given, dims, strict=True))) for i in range(2)]
    close(found, tuple(torch.stack(outs) for outs in zip(*each, strict=True)))


@pytest.mark.feature("torch.func: functional_call, and its gradients per example")
@every_product
def test_gradients_per_example(product: Product) -> None:
    x, *others = [t.detach() for t in made(product)]
    learned = {n: t for n, t in zip(list(product.inputs)[1:], others, strict=True) if n in product.op.differentiable}
    function = function_of(product)

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, t in learned.items():
                self.register_parameter(name, torch.nn.Parameter(t))

        def forward(self, scale: torch.Tensor) -> torch.Tensor:
            known = dict(self.named_parameters())
            given = [known.get(n, t) for n, t in zip(list(product.inputs)[1:], others, strict=True)]
            return scale * loss_of(function)(x, *given)

    module, scales = Module(), torch.tensor([1.0, -2.0])
    found = vmap(grad(lambda p, scale: functional_call(module, p, (scale,))), (None, 0))(learned, scales)
    module(torch.tensor(1.0)).backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(found[name], torch.stack([p.grad, -2 * p.grad]), rtol=1e-4, atol=1e-4)


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@pytest.mark.feature("compile: full graph, any number of rows, backward")
@every_product
def test_compiled(product: Product) -> None:
    torch.compiler.reset()
    function = function_of(product)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in ((7, 4), (5, 4)):
            tensors = made(product, rows)
            same(compiled(*tensors), function(*tensors))
            same(gradients(compiled, product, tensors), gradients(function, product, tensors))


@pytest.mark.slow
@pytest.mark.drawn(0.4)
@pytest.mark.feature("compile: inference")
@every_product
def test_inductor(product: Product) -> None:
    torch.compiler.reset()
    function, tensors = function_of(product), made(product)
    with torch.no_grad():
        same(torch.compile(function, fullgraph=True)(*tensors), function(*tensors))


@pytest.mark.feature("torch.export: any number of rows, saved and loaded")
@every_product
def test_export(product: Product) -> None:
    function = function_of(product)

    class Module(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Tensors:
            return function(*tensors)

    rows = ({0: Dim.DYNAMIC} if t.rows and not t.broadcast else None for t in product.inputs.values())
    program = torch.export.export(Module(), tuple(made(product, (5, 3))), dynamic_shapes=(tuple(rows),))
    ours = [n.target for n in program.graph.nodes if getattr(n.target, "namespace", "") == "cute"]
    assert ours == [overload_of(product)]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for count in (2, 7):
        tensors = made(product, (count, 3))
        same(tuple(loaded(*tensors)), function(*tensors))
