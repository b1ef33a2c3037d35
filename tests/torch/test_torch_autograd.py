"""Gradients: against float64, undefined cotangents, torch.func, and what must raise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from array_api_compat import torch as xp
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import cute_ops_torch
from cute_ops import Op, testing
from cute_ops.ops import OPS


def leaves(tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if t is None else t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]


def raw_of(op: Op) -> Callable[..., Any]:
    """The registered op without its hidden outputs."""
    return lambda *args, **attrs: testing.shown(op, getattr(torch.ops.cute, op.name)(*args, **attrs))


def function_of(op: Op) -> Callable[..., Any]:
    return testing.plain(op, getattr(cute_ops_torch, op.name))


def as_tuple(value: Any) -> tuple[Any, ...]:
    """The outputs that may have a gradient."""
    return tuple(o for o in (value if isinstance(value, tuple) else (value,)) if o.is_floating_point())


def wanted(op: Op, tensors: list[Any]) -> list[Any]:
    """Those of an op's inputs that are there and have a gradient."""
    return [t for n, t in zip(op.inputs, tensors, strict=True) if n in op.differentiable and t is not None]


def gradients(op: Op, function: Callable[..., Any], tensors: list[Any], attrs: Any, douts: list[Any]) -> list[Any]:
    """Gradients of the outputs whose cotangent is given, to every input that is."""
    outs = as_tuple(function(*tensors, **attrs))
    pairs = [(o, d) for o, d in zip(outs, douts, strict=True) if d is not None]
    return list(
        torch.autograd.grad(
            [o for o, _ in pairs], wanted(op, tensors), [d.to(o.dtype) for o, d in pairs],
            allow_unused=True, materialize_grads=True,
        )
    )  # fmt: skip


@pytest.mark.feature("gradients against float64")
def test_against_float64_autograd_of_the_reference(trained: Any) -> None:
    problem, op = trained, trained.op
    tensors = leaves(problem.tensors())
    torch.manual_seed(0)
    douts = [torch.randn(o.shape) for o in as_tuple(raw_of(op)(*tensors, **problem.attrs))]
    exact_inputs = [
        t.detach().double().requires_grad_() if t is not None and t.is_floating_point() else t for t in tensors
    ]

    def exact(*inputs: Any, **attrs: Any) -> Any:
        return testing.differentiated(
            op, dict(zip(op.inputs, inputs, strict=True)), op.reference(xp, *inputs, **attrs), attrs
        )

    functions = (raw_of(op), function_of(op))
    masks = [[True] * len(douts), *([i == k for i in range(len(douts))] for k in range(len(douts)) if len(douts) > 1)]
    for mask in masks:
        chosen = [d if used else None for d, used in zip(douts, mask, strict=True)]
        expected = [None] * len(exact_inputs)
        outs = as_tuple(exact(*exact_inputs, **problem.attrs))
        pairs = [(o, d.double()) for o, d in zip(outs, chosen, strict=True) if d is not None]
        expected = torch.autograd.grad(
            [o for o, _ in pairs], wanted(op, exact_inputs), [d for _, d in pairs],
            allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        for function in functions:
            for got, e in zip(gradients(op, function, tensors, problem.attrs, chosen), expected, strict=True):
                # Inputs and outputs are rounded to the dtype, and a sum of rows to the weight's.
                eps = max(torch.finfo(got.dtype).eps, torch.finfo(tensors[0].dtype).eps)
                assert (got.double() - e).abs().max() <= 8 * eps * max(1.0, e.abs().max())


def test_expanded_cotangent(op: Op, make_inputs: Callable[..., Any]) -> None:
    tensors, raw = leaves(make_inputs(op)), raw_of(op)
    outs = as_tuple(raw(*tensors))
    expected = gradients(op, raw, tensors, {}, [torch.ones_like(o) for o in outs])
    sum(o.sum() for o in as_tuple(raw(*tensors))).backward()
    for t, e in zip(wanted(op, tensors), expected, strict=True):
        torch.testing.assert_close(t.grad, e, rtol=0, atol=0)


def test_only_what_is_needed_gets_a_gradient(op: Op, make_inputs: Callable[..., Any]) -> None:
    raw = raw_of(op)
    for needed in testing.argnums(op):
        tensors = [t.requires_grad_(i == needed) for i, t in enumerate(make_inputs(op))]
        sum(o.sum() for o in as_tuple(raw(*tensors))).backward()
        has = [i == needed and name in op.differentiable for i, name in enumerate(op.inputs)]
        assert [t.grad is not None for t in tensors] == has


def test_no_graph_without_need(op: Op, make_inputs: Callable[..., Any]) -> None:
    raw, tensors = raw_of(op), make_inputs(op)
    assert not any(o.requires_grad for o in as_tuple(raw(*tensors)))
    tensors[0].requires_grad_()
    with torch.no_grad():
        assert not any(o.requires_grad for o in as_tuple(raw(*tensors)))
    with torch.inference_mode():
        assert all(o.is_inference() for o in as_tuple(raw(*tensors)))
    assert all(o.requires_grad for o in as_tuple(raw(*tensors)))


@pytest.mark.feature("activation checkpointing")
def test_checkpoint_and_saved_tensor_hooks(op: Op, make_inputs: Callable[..., Any]) -> None:
    raw, tensors = raw_of(op), leaves(make_inputs(op))
    expected = torch.autograd.grad(sum(o.sin().sum() for o in as_tuple(raw(*tensors))), wanted(op, tensors))
    outs = as_tuple(checkpoint(raw, *tensors, use_reentrant=False))
    torch.testing.assert_close(torch.autograd.grad(sum(o.sin().sum() for o in outs), wanted(op, tensors)), expected)


class Count(TorchDispatchMode):
    """How often an op is called."""

    def __init__(self, overload: Any) -> None:
        super().__init__()
        self.overload, self.calls = overload, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is self.overload
        return func(*args, **kwargs or {})


@pytest.mark.some_ops
@pytest.mark.feature("selective activation checkpointing")
@pytest.mark.parametrize(("policy", "calls"), [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.MUST_RECOMPUTE, 2)])
def test_selective_checkpoint(op: Op, make_inputs: Callable[..., Any], policy: CheckpointPolicy, calls: int) -> None:
    """A policy that names the op decides whether it runs once more."""
    overload, loss = getattr(torch.ops.cute, op.name).default, loss_of(function_of(op))

    def choose(ctx: Any, called: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if called is overload else CheckpointPolicy.MUST_RECOMPUTE

    tensors = leaves(make_inputs(op))
    expected = torch.autograd.grad(loss(*tensors), wanted(op, tensors))
    with Count(overload) as count:
        contexts = partial(create_selective_checkpoint_contexts, choose)
        out = checkpoint(loss, *tensors, use_reentrant=False, context_fn=contexts)
        got = torch.autograd.grad(out, wanted(op, tensors))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert count.calls == calls


def test_selective_checkpoints_see_ops_that_ran_without_them() -> None:
    """Their modes are none to Dynamo's guards, by which calls like earlier ones go past the dispatcher."""
    rows = int(torch.randint(2, 99, ()))
    x, norm, weight = (torch.randn(*shape, requires_grad=True) for shape in ((rows, 16), (16,), (8, 16)))
    cute_ops_torch.rmsnorm_linear(x[:1], norm, weight)  # defines the op
    overload, seen = torch.ops.cute.rmsnorm_linear.default, list[Any]()

    def keep(ctx: Any, called: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append(called)
        return CheckpointPolicy.MUST_SAVE if called is overload else CheckpointPolicy.MUST_RECOMPUTE

    def layer(x: torch.Tensor) -> torch.Tensor:
        return cute_ops_torch.rmsnorm_linear(x, norm, weight)

    contexts = partial(create_selective_checkpoint_contexts, keep)
    expected = torch.autograd.grad(layer(x).sin().sum(), (x, norm, weight))
    for warm in (True, False):
        seen.clear()
        rows += not warm
        x = x if warm else torch.randn(rows, 16, requires_grad=True)
        out = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        assert seen.count(overload) == 1 and torch.ops.cute.rmsnorm.default not in seen
        expected = torch.autograd.grad(layer(x).sin().sum(), (x, norm, weight))  # between forward and backward
        torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), (x, norm, weight)), expected)


@pytest.mark.feature("double backward and forward mode raise")
def test_double_backward_raises(op: Op, make_inputs: Callable[..., Any]) -> None:
    tensors = leaves(make_inputs(op))
    loss = sum(o.sin().sum() for o in raw_of(op)(*tensors))
    first = torch.autograd.grad(loss, wanted(op, tensors), create_graph=True)
    with pytest.raises(
        NotImplementedError, match=rf"^cute\.{op.grad.name}: has no gradient of its own, so there is no"
    ):
        first[0].sum().backward()


def loss_of(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    return lambda *tensors, **named: sum(o.sin().sum() for o in as_tuple(function(*tensors, **named)))


@pytest.mark.some_ops
@pytest.mark.feature("torch.func: grad, vjp, jacrev")
def test_func_grad_vjp_jacrev(op: Op, make_inputs: Callable[..., Any]) -> None:
    function, tensors = function_of(op), make_inputs(op)
    everything = tuple(i for i, t in enumerate(tensors) if t.is_floating_point())
    given = leaves(tensors)
    at = [given[i] for i in everything]
    expected = torch.autograd.grad(loss_of(function)(*given), at, allow_unused=True, materialize_grads=True)

    def loss(*some: torch.Tensor) -> torch.Tensor:
        chosen = dict(zip(everything, some, strict=True))
        return loss_of(function)(*(chosen.get(i, t) for i, t in enumerate(tensors)))

    torch.testing.assert_close(grad(loss_of(function), everything)(*tensors), expected)
    torch.testing.assert_close(jacrev(loss_of(function), everything)(*tensors), expected)
    torch.testing.assert_close(vjp(loss, *(tensors[i] for i in everything))[1](torch.tensor(1.0)), expected)


class Module(torch.nn.Module):
    """An op's float inputs as parameters."""

    def __init__(self, op: Op, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.function = function_of(op)
        for name, t in zip(op.inputs, tensors, strict=True):
            if t.is_floating_point():
                self.register_parameter(name, torch.nn.Parameter(t))
            else:
                self.register_buffer(name, t)

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        every = dict(self.named_parameters()) | dict(self.named_buffers())
        return scale * loss_of(self.function)(**every)


@pytest.mark.feature("torch.func: functional_call, and its gradients per example")
def test_functional_call(op: Op, make_inputs: Callable[..., Any]) -> None:
    module, scales = Module(op, make_inputs(op)), torch.tensor([1.0, -2.0])
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    loss = lambda p, scale: functional_call(module, p, (scale,))  # noqa: E731
    got = vmap(grad(loss), (None, 0))(parameters, scales)
    for i, scale in enumerate(scales):
        module.zero_grad()
        module(scale).backward()
        for name, p in module.named_parameters():
            expected = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(got[name][i], expected, rtol=1e-4, atol=1e-5)


def varied(t: torch.Tensor) -> list[torch.Tensor]:
    """Three different examples; of classes, valid ones."""
    return [t, t + 1, t - 2] if t.is_floating_point() else [t, t.flip(0), t]


@pytest.mark.some_ops
@pytest.mark.feature("torch.func: vmap, of any inputs, and of grad")
def test_vmap_of_every_subset_of_inputs(op: Op, make_inputs: Callable[..., Any]) -> None:
    function, tensors = function_of(op), make_inputs(op)
    everything = tuple(range(len(tensors)))
    floats = tuple(i for i, t in enumerate(tensors) if t.is_floating_point())
    subsets = range(1, 2 ** len(tensors))
    if len(tensors) > 4:  # too many: one, two and all of them
        subsets = [b for b in subsets if b.bit_count() in (1, 2, len(tensors))]
    for batched in subsets:
        dims = tuple((i % 2 and -1) if batched >> i & 1 else None for i in everything)
        many = [t if d is None else torch.stack(varied(t), d) for t, d in zip(tensors, dims, strict=True)]
        one = lambda i: [t if d is None else t.select(d, i).contiguous() for t, d in zip(many, dims, strict=True)]  # noqa: B023, E731
        for transformed in (function, grad(loss_of(function), floats)):
            got = as_tuple(vmap(transformed, dims)(*many))
            looped = zip(*[as_tuple(transformed(*one(i))) for i in range(3)], strict=True)
            for g, rows in zip(got, looped, strict=True):
                torch.testing.assert_close(g, torch.stack(rows))
        nothing = [t if d is None else t.narrow(d, 0, 0) for t, d in zip(many, dims, strict=True)]
        # Torch refuses to add the number 0, as `loss_of` does, to a batch of nothing.
        for transformed in (function, grad(lambda *t: as_tuple(function(*t))[0].sum(), floats)):
            shapes = [t.shape for t in as_tuple(transformed(*one(0)))]
            assert [t.shape for t in as_tuple(vmap(transformed, dims)(*nothing))] == [(0, *s) for s in shapes]


@pytest.mark.feature("double backward and forward mode raise")
def test_forward_mode_and_second_order_raise(op: Op, make_inputs: Callable[..., Any]) -> None:
    function, (first, *others) = function_of(op), make_inputs(op, (2,), 4)
    loss = lambda x: loss_of(function)(x, *others)  # noqa: E731
    for transformed in (
        lambda: jvp(loss, (first,), (first,)),
        lambda: jacfwd(loss)(first),
        lambda: hessian(loss)(first),
        lambda: jvp(grad(loss), (first,), (first,)),
    ):
        with pytest.raises(NotImplementedError, match="forward-mode AD"):
            transformed()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(first, first)
        with pytest.raises(NotImplementedError, match="forward-mode AD"):
            loss(dual)
        assert loss(first).ndim == 0  # no tangent, no error
    with pytest.raises(NotImplementedError, match="no double backward"):
        grad(lambda x: grad(loss)(x).sum())(first)


def test_a_second_derivative_through_what_only_the_forward_saw_is_not_left_out() -> None:
    """A product's weight is frozen, so that its node saves the product, and not x."""
    weight = torch.randn(6, 4)
    for call in (cute_ops_torch.gated_linear, partial(cute_ops_torch.linear, epilogue="gelu")):
        x = torch.randn(3, 4, requires_grad=True) * 1
        (gradient,) = torch.autograd.grad(call(x, weight).sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="no double backward"):
            pytest.fail(str(torch.autograd.grad(gradient.square().sum(), x, allow_unused=True)))


def test_gradients_of_many_cotangents_at_once() -> None:
    """``is_grads_batched`` has a vmap of its own, older than functorch's."""
    x, w, bias, norm = (torch.randn(s).requires_grad_() for s in ((3, 4), (5, 4), (5,), (4,)))
    target, F = torch.tensor([0, 4, 2]), torch.nn.functional
    calls = {
        "rmsnorm": (lambda: cute_ops_torch.rmsnorm(x, norm, eps=1e-5), lambda: F.rms_norm(x, (4,), norm, 1e-5)),
        "linear": (lambda: cute_ops_torch.linear(x, w, bias, epilogue="bias"), lambda: F.linear(x, w, bias)),
        "mlp": (lambda: cute_ops_torch.mlp(x, w, bias, w.t()), lambda: F.linear(F.gelu(F.linear(x, w, bias)), w.t())),
        "loss": (
            lambda: cute_ops_torch.linear_cross_entropy(x, w, target), lambda: F.cross_entropy(F.linear(x, w), target),
        ),
    }  # fmt: skip
    for call, plain in calls.values():
        out, expected = call(), plain()
        cotangents = torch.randn(2, *out.shape)
        got, wanted = (
            torch.autograd.grad(o, (x, w, bias, norm), cotangents, is_grads_batched=True, allow_unused=True)
            for o in (out, expected)
        )
        for g, e in zip(got, wanted, strict=True):
            assert (g is None) == (e is None)
            if g is not None:
                torch.testing.assert_close(g, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dims", [(0, 0, None), (0, None, 0), (None, 0, 0)])
@pytest.mark.parametrize("last", [False, True])
def test_gradients_of_a_vmap_of_group_norm_over_parameters(dims: tuple[Any, ...], last: bool) -> None:
    """Its parts, which vmap maps one by one, have no gradient of parameters."""
    shape = (2, 3, 5, 8) if last else (2, 3, 8, 5)
    given = [torch.randn(s[d is None :]).requires_grad_() for s, d in zip((shape, (2, 8), (2, 8)), dims, strict=True)]

    def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        x = x.mT if last else x
        groups = x.reshape(3, 2, -1)
        normed = (groups - groups.mean(-1, keepdim=True)) * (groups.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
        out = normed.reshape(x.shape) * weight[:, None] + bias[:, None]
        return out.mT if last else out

    got = vmap(partial(cute_ops_torch.group_norm, groups=2, channels_last=last), dims)(*given)
    expected = vmap(plain, dims)(*given)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    found, wanted = (torch.autograd.grad(out.sin().sum(), given) for out in (got, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


# --- gradients that nobody wants ------------------------------------------------------------------------------------


def compiled_by(backend: str) -> Callable[..., Any]:
    def compile(function: Callable[..., Any]) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(function, backend=backend, fullgraph=True)

    return compile


WAYS = {
    "eager": lambda function: function,
    "checkpoint": lambda function: partial(checkpoint, function, use_reentrant=False),
    "aot": compiled_by("aot_eager"), "inductor": compiled_by("inductor"),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_steps_of_a_gradient_run_where_somebody_reads_them(product: Any, way: str) -> None:
    """One function, of which another call wants other gradients; the graph is run twice."""
    function = WAYS[way](cute_ops_torch.register(product.op, "steps"))
    for wanted in ("xw", "x", "w", "xw"):
        x, w = (torch.randn(size).requires_grad_(n in wanted) for n, size in (("x", (2, 3, 4)), ("w", (5, 4))))
        some = [t for t in (x, w) if t.requires_grad]
        expected = torch.autograd.grad(torch.tanh(x @ w.T).sin().sum(), some)
        loss = function(x, w).sin().sum()
        product.ran.clear()
        with torch.autograd.profiler.profile():  # programs that nothing observes run their Python once
            for keep in (True, False):
                torch.testing.assert_close(torch.autograd.grad(loss, some, retain_graph=keep), expected)
        again = {"product", "tanh"} if way == "checkpoint" else set()
        assert product.ran - again == {"inner", *({"x": "dgrad", "w": "wgrad"}[name] for name in wanted)}


def test_a_gradient_that_is_asked_for_by_name(product: Any) -> None:
    """Torch tells a node which inputs need a gradient, not which of these a call asks for."""
    function = cute_ops_torch.register(product.op, "steps")
    x, w = torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    expected = torch.autograd.grad(torch.tanh(x @ w.T).sum(), (x, w))
    out = function(x, w).sum()
    for given, e in zip((x, w), expected, strict=True):
        torch.testing.assert_close(torch.autograd.grad(out, inputs=[given], retain_graph=True), (e,))
    (once_more,) = torch.autograd.grad(out, [w])
    assert x.grad is w.grad is None and torch.equal(once_more, torch.autograd.grad(function(x, w).sum(), [w])[0])


def test_what_only_an_unwanted_gradient_reads_is_not_saved(product: Any) -> None:
    function = cute_ops_torch.register(product.op, "steps")
    for wanted, shapes in (("xw", {(2, 4), (5, 4), (2, 5)}), ("x", {(5, 4), (2, 5)}), ("w", {(2, 4), (2, 5)})):
        x, w = torch.randn(2, 4).requires_grad_("x" in wanted), torch.randn(5, 4).requires_grad_("w" in wanted)
        assert {tuple(t.shape) for t in function(x, w).grad_fn.saved_tensors} == shapes


class Names(TorchDispatchMode):
    """The names of our ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "cute":
            self.seen.append(func.name().removeprefix("cute::"))
        return func(*args, **kwargs or {})


@pytest.mark.slow
@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("way", ["eager", "checkpoint", "inductor"])
@pytest.mark.parametrize(("frozen", "suffix"), [((), ""), (("bias",), "_dweight"), (("weight", "bias"), "")])
@pytest.mark.parametrize("name", ["rmsnorm", "add_rmsnorm", "layernorm"])
def test_frozen_weights_of_norms_have_no_gradient(
    name: str, frozen: tuple[str, ...], suffix: str, way: str, make_inputs: Callable[..., Any]
) -> None:
    op = next(op for op in OPS if op.name == name)
    function = loss_of(WAYS[way](function_of(op)))  # nothing but the op is compiled: no C++
    every = leaves(make_inputs(op))
    expected = dict(zip(op.inputs, torch.autograd.grad(function(*every), every), strict=True))
    given = {n: t.detach().requires_grad_(n not in frozen) for n, t in zip(op.inputs, every, strict=True)}
    loss = function(*given.values())
    with Names() as names:
        loss.backward()
    first = "_dx_dresidual" if name == "add_rmsnorm" else "_dx"
    assert names.seen[-1] == f"{name}_bwd" + (f"_only{first}{suffix}" if frozen else "")
    for n, t in given.items():
        assert (t.grad is None) == (n in frozen)
        assert n in frozen or torch.equal(t.grad, expected[n])


def test_examples_of_a_frozen_norm_are_one_backward() -> None:
    """A gradient of the weight would be one for each example."""
    x, w = torch.randn(3, 2, 8), torch.randn(8)
    for argnums, calls in ((0, 1), ((0, 1), 3)):
        with Names() as names:
            vmap(grad(loss_of(cute_ops_torch.rmsnorm), argnums), (0, None))(x, w)
        assert sum(name.startswith("rmsnorm_bwd") for name in names.seen) == calls


IN_PLACE: dict[str, Callable[..., torch.Tensor]] = {
    "group_norm": lambda x, w: cute_ops_torch.group_norm(x.view(2, 8, 3), w, groups=2),
    "group_norm, long": lambda x, w: cute_ops_torch.group_norm(x.repeat(1, 6000).view(2, 8, -1), w, groups=1),
    "group_norm, channels last": lambda x, w: cute_ops_torch.group_norm(
        x.view(2, 8, 3, 1).contiguous(memory_format=torch.channels_last), w, groups=2
    ),
    "loss of a head": lambda x, w: cute_ops_torch.linear_cross_entropy(
        x.view(6, 8), torch.outer(w, w), torch.arange(6), reduction="none"
    ),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_results_may_be_changed_in_place(name: str) -> None:
    """``relu_`` of a norm, or a mask times the losses of tokens: torch forbids it to a view that a node returns."""
    torch.manual_seed(0)
    found, expected = ([torch.randn(2, 24, requires_grad=True), torch.randn(8, requires_grad=True)] for _ in range(2))
    for one, other in zip(found, expected, strict=True):
        other.data = one.data
    IN_PLACE[name](*found).mul_(2).relu_().sum().backward()
    (IN_PLACE[name](*expected) * 2).relu().sum().backward()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
