"""The fast path past the dispatcher, with stand-ins for kernels that run on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cute_ops import Op
from cute_ops.autotune import dispatch
from cute_ops.ops import OPS
from cute_ops_torch.host import fast_path, function, launch
from cute_ops_torch.library import autograd, reference
from cute_ops_torch.library import tensors as binding
from cute_ops_torch.library.modes import transforms_active
from cute_ops_torch.library.nodes import Nodes
from cute_ops_torch.library.reference import fake_kernel, implement
from cute_ops_torch.library.schema import schema
from cute_ops_torch.tools import runner
from tests.ops import writing
from tests.ops.epilogues import BY_NAME

NAMESPACE, WITH_GELU = "cute_fast_path", BY_NAME["with_gelu"]
rmsnorm = OPS[0]


class Made(NamedTuple):
    """An op whose kernels run on the CPU."""

    raw: Any
    function: Callable[..., Any]
    fast_path: fast_path.FastPath
    nodes: Nodes
    launcher: launch.Launcher


@pytest.fixture
def make(compiled: Any) -> Iterator[Callable[[Op], Made]]:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU).add(torch._C.DispatchKey.AutogradCPU)
    library, made = torch.library.Library(NAMESPACE, "FRAGMENT"), {}

    def one(op: Op) -> Made:
        if op.name not in made:
            library.define(schema(op))
            overload = getattr(getattr(torch.ops, NAMESPACE), op.name).default
            launcher, nodes = launch.Launcher(op), Nodes(op, lambda step: one(step).function)
            fast = fast_path.FastPath(op, lambda: launcher, nodes, lambda more: one(more).launcher)
            compiled.ops[op.name] = op
            kernel = autograd.autograd_kernel(
                op, lambda: overload, fast, nodes, keys.raw_repr(), lambda more: one(more).raw
            )
            kernels = {
                "CPU": lambda *args: launcher.launch(*args),
                "Autograd": kernel,
                "Fake": fake_kernel(op, lambda: None),
            }
            implement(library, op.name, kernels, bool(op.outputs))
            call = function.make_function(op, overload, fast, raw=True, devices=("cpu",))
            made[op.name] = Made(overload, call, fast, nodes, launcher)
        return made[op.name]

    yield one
    library._destroy()


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def with_gradients(op: Op, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.requires_grad_(name in op.differentiable) for name, t in zip(op.inputs, tensors, strict=True)]


def differentiable(outputs: Any) -> list[torch.Tensor]:
    return [o for o in as_tuple(outputs) if o.requires_grad]


@pytest.mark.drawn(0.4)
def test_values_against_float64(turn: Any, make: Any, compiled: Any) -> None:
    made, tensors = make(turn.op), turn.tensors()
    function, raw = (runner.functional(turn.op, call) for call in (made.function, made.raw))
    for _ in range(2):  # learned, then known
        turn.check(function(*tensors, *turn.attrs.values()))
        turn.check(raw(*tensors, **turn.attrs))
    assert compiled.calls == [turn.op.name] * 4


def test_gradients(op: Op, make: Any, make_inputs: Callable[..., Any], compiled: Any) -> None:
    made, known, attrs = make(op), getattr(torch.ops.cute, op.name).default, op.attrs.values()
    calls = (made.function, made.raw, known)
    leaves = [with_gradients(op, make_inputs(op)) for _ in calls]
    wanted = [[t for t in tensors if t.requires_grad] for tensors in leaves]
    douts = [torch.randn_like(o) for o in differentiable(known(*leaves[0]))]
    for chosen in (None, None, *range(len(douts))):  # all cotangents, one
        results = []
        for call, tensors, some in zip(calls, leaves, wanted, strict=True):
            pairs = zip(differentiable(call(*tensors, *attrs)), douts, strict=True)
            outs, given = zip(*[pair for k, pair in enumerate(pairs) if chosen in (None, k)], strict=True)
            results.append(torch.autograd.grad(outs, some, given, materialize_grads=True))
        *got, expected = results
        for one in got:
            torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)
    assert compiled.calls == [op.name, op.grad.name] * 2 * (2 + len(douts))


def test_known_calls_that_want_other_gradients_are_told_apart(make: Any, compiled: Any) -> None:
    made, x, w = make(rmsnorm), torch.randn(4, 104, requires_grad=True), torch.ones(104)
    for _ in range(2):
        for weight, backward in ((w, "rmsnorm_bwd_only_dx"), (w.clone().requires_grad_(), "rmsnorm_bwd")):
            for call in (made.function, made.raw):
                call(x, weight).sum().backward()
                assert compiled.calls[-2:] == ["rmsnorm", backward]


@pytest.mark.parametrize("public", [True, False], ids=["function", "op"])
def test_what_a_gradient_saves_is_written_where_one_is_wanted(public: bool, make: Any, compiled: Any) -> None:
    """And the kernel that does not write it is neither planned nor compiled."""
    made = make(WITH_GELU)
    call = made.function if public else made.raw
    x, weight, bias = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((72, 64), (64, 64), (64,)))
    for _ in range(2):
        out = call(x, weight.requires_grad_(), bias)
        assert compiled.calls.pop() == "with_gelu_saving"
        with torch.no_grad():
            assert torch.equal(call(x, weight, bias), out)
        assert torch.equal(call(x, weight.detach(), bias), out)
        assert [compiled.calls.pop() for _ in range(2)] == ["with_gelu"] * 2
        (gradient,) = torch.autograd.grad(out.sum(), [weight])
        assert gradient.shape == weight.shape
        compiled.calls.clear()
    assert [variant.op for variant in compiled.variants][:2] == ["with_gelu_saving", "with_gelu"]


def test_inputs_left_out_get_no_gradient(op: Op, make: Any, make_inputs: Callable[..., Any]) -> None:
    given = sum(not t.optional for t in op.inputs.values())
    known = getattr(torch.ops.cute, op.name).default
    gradients = []
    for call in (make(op).function, make(op).raw, known):
        leaves = with_gradients(op, make_inputs(op))[:given]
        outs = differentiable(call(*leaves))
        some = [t for t in leaves if t.requires_grad]
        gradients.append(torch.autograd.grad(outs, some, [torch.ones_like(o) for o in outs]))
    for one in gradients[:2]:
        torch.testing.assert_close(one, gradients[2], rtol=1e-4, atol=1e-4)


def test_a_known_call_neither_plans_nor_dispatches(make: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x, w = make(rmsnorm), torch.randn(4, 72, requires_grad=True), torch.ones(72)
    first = made.function(x, w)
    monkeypatch.setattr(launch, "prepare", None)
    monkeypatch.setattr(made.fast_path, "specialize", None)
    other = x.detach().clone().requires_grad_()
    assert torch.equal(made.function(other, w), first)
    assert type(made.raw(other, w).grad_fn).__name__ == "cute_rmsnormBackward"
    with torch.no_grad():
        assert not made.function(other, w).requires_grad
        assert not made.raw(other, w).requires_grad
    assert compiled.calls == ["rmsnorm"] * 5


def test_one_tensor_as_two_arguments_is_a_known_call(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And told apart from two tensors."""
    gated = next(op for op in OPS if op.name == "silu_mul")
    made, x, y = make(gated), torch.randn(4, 72, requires_grad=True), torch.randn(4, 72, requires_grad=True)
    right = torch.nn.functional.silu(x) * x
    for _ in range(2):
        for call in (made.function, made.raw):
            torch.testing.assert_close(call(x, x), right)
            torch.testing.assert_close(call(x, y), torch.nn.functional.silu(x) * y)
            (found,), (known,) = (torch.autograd.grad(out.sum(), [x]) for out in (call(x, x), right))
            torch.testing.assert_close(found, known)
            right = torch.nn.functional.silu(x) * x
        monkeypatch.setattr(made.fast_path, "specialize", None)


def test_a_first_call_binds_and_plans_once(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each direction; nothing else binds, for autograd neither."""
    done: list[str] = []
    bind = binding.bind_tensors
    for module in (launch, binding, reference):
        monkeypatch.setattr(module, "bind_tensors", noting(done, "bind", bind))
    monkeypatch.setattr(dispatch, "choose", noting(done, "plan", dispatch.choose))
    made, x = make(rmsnorm), torch.randn(4, 88, requires_grad=True)
    for _ in range(2):
        made.function(x).sum().backward()
        assert done == ["bind rmsnorm", "plan rmsnorm", "bind rmsnorm_bwd", "plan rmsnorm_bwd"]
    made.raw(x)
    made.raw(x.detach())
    made.function(x.detach())
    assert len(done) == 4


def noting(done: list[str], what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(first: Any, *args: Any) -> Any:
        done.append(f"{what} {(first if isinstance(first, Op) else first.op).name}")
        return function(first, *args)

    return call


@pytest.mark.slow
def test_calls_of_one_shape_are_told_apart(make: Any) -> None:
    made, base, w = make(rmsnorm), torch.randn(9, 68), torch.rand(64)
    x, b = base[:4, :64].contiguous(), torch.rand(64)
    calls: list[tuple[Any, ...]] = [
        (x, w, None), (base[:4, :64], w, None), (base[:4, 1:65], w, None), (x.bfloat16(), w, None),
        (x, w.half(), None), (x, None, None), (x, None, b), (x, w, b), (x.clone().requires_grad_(), w, None),
        (x, torch.nn.Parameter(w), None), (x, torch.nn.Parameter(w), torch.nn.Parameter(b)), (x, w, None, 1e-2),
        (x.clone().requires_grad_(), w, None, 1e-2), (x, w, None, 1e-6, 1.0), (x, torch.rand(65)[1:], None),
    ]  # fmt: skip

    def check(arguments: tuple[Any, ...]) -> None:
        expected = torch.ops.cute.rmsnorm(*arguments)
        leaves = [t for t in arguments[:3] if t is not None and t.requires_grad]
        for got in (made.function(*arguments), made.raw(*arguments)):
            torch.testing.assert_close(got, expected)
            assert got.requires_grad == expected.requires_grad
            if leaves:
                pair = [torch.autograd.grad(v.sin().sum(), leaves, retain_graph=True) for v in (got, expected)]
                torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)

    for arguments in calls:
        for other in calls:
            check(other)
            check(arguments)


def test_what_is_watched_goes_through_the_dispatcher(make: Any, check_watched: Any) -> None:
    made, x = make(rmsnorm), torch.randn(3, 96)
    expected = made.function(x)
    for leaf in (x, x.clone().requires_grad_()):
        for call in (made.function, made.raw):
            check_watched(partial(call, leaf), expected, NAMESPACE)
    for call in (made.function, made.raw):
        assert torch.equal(call(torch._neg_view(x)), -expected)
        with torch.inference_mode():
            assert call(x).is_inference()
            assert torch.equal(call(x), expected)
        assert not call(x).is_inference()
        with torch.device("meta"):
            assert call(torch.empty(3, 96)).is_meta
        with torch.autocast("cpu", torch.bfloat16):
            assert call(x).dtype == torch.float32


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_default_device_hides_no_mode() -> None:
    """Patched models run their ops under ``torch.set_default_device``, and under no mode that sees calls."""
    with torch.device("meta"):
        assert not transforms_active()
        with Functions():
            assert transforms_active()
    with Functions(), torch.device("meta"):
        assert transforms_active()


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_dispatch_keys_are_the_dispatchers() -> None:
    """Those that the dispatcher hands to a kernel that asks for them."""
    library = torch.library.Library(f"{NAMESPACE}_keys", "FRAGMENT")
    library.define("add(Tensor x, Tensor? y=None) -> Tensor")
    seen: list[tuple[Any, Any]] = []

    def kernel(keys: Any, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        seen.append((keys, autograd.dispatch_keys((x, y))))
        return x + (x if y is None else y)

    library.impl("add", kernel, "Autograd", with_keyset=True)
    call, x = torch.ops.cute_fast_path_keys.add.default, torch.randn(3, 4)
    try:
        for leaf in (x, x.clone().requires_grad_()):
            call(leaf)
            call(leaf, x)
            with torch.autocast("cpu", torch.bfloat16):
                call(leaf)
        assert [given.raw_repr() for given, _ in seen] == [own.raw_repr() for _, own in seen]
        for leaf in (x, x.clone().requires_grad_()):
            with Passing():
                call(leaf)
            with FakeTensorMode(allow_non_fake_inputs=True):
                call(leaf)
            torch.func.grad(lambda t: call(t, x).sum())(leaf)
            torch.func.grad(lambda t: torch.func.grad(lambda u: call(u, t).sum())(t).sum())(leaf)
            call(torch._neg_view(leaf))
            call(leaf.to("meta"))
        below = torch._C._after_autograd_keyset
        assert len(seen) == 18
        assert [(given & below).raw_repr() for given, _ in seen] == [(own & below).raw_repr() for _, own in seen]
    finally:
        library._destroy()


def test_transforms_of_a_known_call(make: Any) -> None:
    made, x, w = make(rmsnorm), torch.randn(3, 96), torch.rand(96)
    for call in (made.function, made.raw):
        call(x, w), call(x.requires_grad_(), w), x.requires_grad_(False)

        def loss(x: torch.Tensor, call: Any = call) -> torch.Tensor:
            return call(x, w).sin().sum()

        leaf = x.clone().requires_grad_()
        torch.testing.assert_close(torch.func.grad(loss)(x), torch.autograd.grad(loss(leaf), leaf)[0])
        with pytest.raises(NotImplementedError, match="forward-mode AD"):
            torch.func.jvp(loss, (x,), (x,))
        with forward_ad.dual_level():
            call(x, w)
            with pytest.raises(NotImplementedError, match="forward-mode AD"):
                call(forward_ad.make_dual(x, x), w)
        (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        with pytest.raises(NotImplementedError, match="no double backward"):
            first.sum().backward()


def test_errors_come_through(make: Any, compiled: Any) -> None:
    made, x, w = make(rmsnorm), torch.randn(3, 80), torch.ones(80)
    made.function(x, w)
    for call in (made.function, made.raw):
        with pytest.raises(ValueError, match=r"^cute\.rmsnorm: argument `weight` has n=32, but n=80\."):
            call(x, torch.ones(32))
        with pytest.raises(TypeError, match="argument `x` has dtype int64"):
            call(x.long())
        with pytest.raises(TypeError, match="argument `weight` has dtype float64"):
            call(x, w.double())
    nested = torch.nested.nested_tensor([x[0], x[1]])
    for wrong in (nested, [1.0]):  # torch's guard would end the process
        with pytest.raises(TypeError, match="argument `weight` must be one dense tensor, got"):
            made.function(x, wrong)
    for wrong in (3.0, [1.0], x.numpy()):
        with pytest.raises((TypeError, RuntimeError), match=r"argument (`x` must be one dense tensor|'x')"):
            made.function(wrong)
    with pytest.raises(TypeError, match="argument `x` is required, but None was given"):
        made.function(None)
    assert len(compiled.calls) == 1
    made.function(x, torch.nn.Parameter(w))
    with pytest.raises(TypeError, match="argument `weight` must be one dense tensor, got a nested tensor"):
        made.function(x, torch.nn.Parameter(nested))


def test_zero_rows_launch_nothing(op: Op, make: Any, make_inputs: Callable[..., Any], compiled: Any) -> None:
    for _ in range(2):
        for call in (make(op).function, make(op).raw):
            leaves = with_gradients(op, make_inputs(op, (2, 0), 24))
            outs, some = differentiable(call(*leaves)), [t for t in leaves if t.requires_grad]
            grads = torch.autograd.grad(outs, some, [torch.ones_like(o) for o in outs])
            assert all(g.shape == t.shape and not g.any() for g, t in zip(grads, some, strict=True))
    assert not compiled.calls


def test_a_graph_sees_changes_in_place(make: Any) -> None:
    for call in (make(rmsnorm).function, make(rmsnorm).raw):
        leaf = torch.randn(3, 112, requires_grad=True)
        for _ in range(2):
            x = leaf * 1
            out = call(x)
            x.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
            out = call(leaf)
            out.sum().backward()
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                out.sum().backward()


def test_threads(make: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    call = make(rmsnorm).function

    def work(seed: int) -> bool:
        x = torch.randn(3, 8 * (seed % 5 + 15), requires_grad=seed % 2 == 0)
        out = call(x)
        if x.requires_grad:
            out.sum().backward()
        torch.testing.assert_close(out, torch.ops.cute.rmsnorm(x))
        return (x.grad is not None) == x.requires_grad

    assert work(0)  # makes the backward's stand-in, which is not for several threads
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(100)))


def test_what_is_remembered_is_bounded(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("cute_ops.constants.state"), "REMEMBERED", 3)
    made = make(rmsnorm)
    for m in range(1, 9):
        x = torch.randn(m, 8, requires_grad=True)
        torch.testing.assert_close(made.function(x, eps=m / 8), torch.ops.cute.rmsnorm(x, eps=m / 8))
    assert [shape[0] for shape in made.fast_path.table] == [6, 7, 8]
    calls = made.fast_path._calls
    assert len(calls._links) == len(calls._chains) == len(made.nodes._known) == 3


def test_calls_that_take_turns_are_known(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = make(rmsnorm), torch.randn(4, 72)
    calls = [(x, None), (x, torch.rand(72)), (x.clone().requires_grad_(), None)]
    for arguments in (*calls, (x.bfloat16(),), *calls):  # more than are kept
        made.function(*arguments)
    monkeypatch.setattr(made.fast_path, "_fill_defaults", None)
    for arguments in calls * 2:
        torch.testing.assert_close(made.function(*arguments), torch.ops.cute.rmsnorm(*arguments))
    with pytest.raises(TypeError, match="NoneType"):
        made.function(x, torch.rand(72).half())


def test_a_parameter_after_a_tensor_is_known(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x, weight = make(rmsnorm), torch.randn(4, 72), torch.rand(72)
    calls = [(x, weight), (x, torch.nn.Parameter(weight, requires_grad=False))]
    for arguments in calls:
        made.function(*arguments)
    monkeypatch.setattr(made.fast_path, "_fill_defaults", None)
    for arguments in calls * 2:
        torch.testing.assert_close(made.function(*arguments), torch.ops.cute.rmsnorm(*arguments))


@pytest.mark.parametrize("raw", [False, True])
def test_inputs_are_written_in_place(make: Any, compiled: Any, raw: bool) -> None:
    """In the caller's memory, views of a larger tensor too, and autograd is told."""
    made = make(writing.store)
    whole = torch.zeros(2, 12, 16)
    rows, index = torch.randn(3, 8), torch.tensor([7, 0, 3], dtype=torch.int32)
    for cache in (whole[0, :, :8], whole[1, :, 8:]):
        for call in (made.raw, made.raw) if raw else (made.function, made.function):
            before = cache._version
            assert call(cache, rows, index) is None
            assert torch.equal(cache[index.long()], rows) and cache._version > before
            cache[3] = 5.0
    assert whole.count_nonzero() == 2 * (2 * 8 + 8)
    assert compiled.calls == ["store"] * 4 and {v.op for v in compiled.variants} == {"store"}


def test_outputs_come_beside_what_is_written(make: Any, compiled: Any) -> None:
    made = make(writing.follow)
    state, x, gain = torch.ones(3, 8), torch.ones(3, 8), torch.tensor(3.0)
    kept = made.function(state, x, gain, 0.25)
    assert torch.equal(kept, torch.full((3, 8), 0.25)) and torch.equal(state, torch.full((3, 8), 3.25))


def test_a_new_value_of_a_scalar_is_a_known_call(make: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x, y = make(writing.axpy), torch.randn(3, 8), torch.randn(3, 8)
    made.function(x, y, 1.5, 0)
    monkeypatch.setattr(made.fast_path, "specialize", None)
    monkeypatch.setattr(launch.Launcher, "find", None)
    for k in range(70):
        assert torch.equal(made.raw(x, y, k / 2, 3)[:, 3:], (y + k / 2 * x)[:, 3:])
        assert torch.equal(made.function(x, y, alpha=-k / 2, first=8), y)
    assert made.function(x, y, float("nan")).isnan().all() and made.function(x, y, float("inf"))[x > 0].isinf().all()
    assert len(compiled.variants) == 1


def test_scalars_reach_the_gradient(make: Any, compiled: Any) -> None:
    made = make(writing.axpy)
    for call in (made.function, made.raw):
        for alpha in (1.5, 2.5):
            x, y = (torch.randn(3, 8, requires_grad=True) for _ in range(2))
            call(x, y, alpha, 5).backward(torch.ones(3, 8))
            assert torch.equal(x.grad[:, 5:], torch.full((3, 3), alpha)) and not x.grad[:, :5].any()
            assert torch.equal(y.grad, torch.ones(3, 8))
    assert [v.op for v in compiled.variants] == ["axpy", "axpy_bwd"]


@pytest.mark.parametrize("value", [True, "1.0", None])
def test_what_is_no_number_is_no_scalar(make: Any, value: Any) -> None:
    made, x = make(writing.axpy), torch.randn(3, 8)
    made.function(x, x + 1, 1.0)
    with pytest.raises(TypeError, match=r"^cute\.axpy: scalar `alpha` must be float, got"):
        made.function(x, x + 1, value)


def cases() -> dict[str, tuple[Callable[[], tuple[Any, ...]], type[Exception], str]]:
    """Calls of ``store`` that torch refuses of its own in-place ops."""
    rows, index = torch.randn(3, 8), torch.tensor([7, 0, 3], dtype=torch.int32)

    def overlapping() -> tuple[Any, ...]:
        return torch.zeros(20).as_strided((12, 8), (1, 1)), rows, index

    return {
        "expanded": (lambda: (torch.zeros(8).expand(12, 8), rows, index), ValueError, "several of its elements are"),
        "overlapping": (overlapping, ValueError, r"with strides \(1, 1\) several of its elements are one place"),
        "aliased": (lambda: ((t := torch.zeros(12, 8)), t[:3], index), ValueError, "but shares memory with `rows`"),
        "alias": (lambda: ((t := torch.zeros(12, 8)), t[2:5], index), ValueError, "shares memory with `rows`"),
        "leaf": (lambda: (torch.zeros(12, 8).requires_grad_(), rows, index), NotImplementedError, "`cache` requires"),
        "rows": (
            lambda: (torch.zeros(12, 8), rows.clone().requires_grad_(), index), NotImplementedError,
            r"argument `rows` requires grad, but an op that writes its inputs has no gradient: call it under "
            r"torch\.no_grad\(\), or with rows\.detach\(\)",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("wrong", cases())
def test_memory_that_cannot_be_written_is_refused(make: Any, compiled: Any, wrong: str, known: bool) -> None:
    """Also after a call of the same shapes, strides and dtypes: whether tensors overlap is not a matter of these."""
    made = make(writing.store)
    arguments, error, problem = cases()[wrong]
    given = arguments()
    if known:
        with torch.no_grad():
            made.function(
                *(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for t in map(apart, given))
            )
    ran = len(compiled.calls)
    for call in (made.function, made.raw):
        with pytest.raises(error, match=f"^cute.store: .*{problem}"):
            call(*given)
    assert len(compiled.calls) == ran
    if error is NotImplementedError:
        with torch.no_grad():
            made.function(*given)
            made.raw(*given)
        with pytest.raises(error, match=problem):
            made.function(*given)


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same values where each element has a place of its own."""
    return tensor.detach().contiguous()


def test_tensors_within_each_other_may_be_written(make: Any, compiled: Any) -> None:
    """Two caches in one tensor, as engines allocate them."""
    made, both = make(writing.store), torch.zeros(12, 2, 8)
    index = torch.tensor([7, 0, 3], dtype=torch.int32)
    for k in (0, 1):
        made.function(both[:, k], both[:, 1 - k][:3] + k + 1, index)
    assert both.count_nonzero() == 6 * 8
    made.function(both[:6, 0], both[6:9, 1], index % 6)


def test_a_first_call_on_a_gpu_may_load_kernels_and_collect_garbage_in_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread is in the relaxed mode of capture while it plans, loads and launches; not on a CPU."""
    seen: list[str] = []

    @contextmanager
    def relaxed() -> Iterator[None]:
        seen.append("relaxed")
        yield
        seen.append("as before")

    monkeypatch.setattr(launch.target, "relaxed_capture", relaxed)
    monkeypatch.setattr(launch.Launcher, "_run_first", lambda self, calls, *args: seen.append("run") or args[0])
    monkeypatch.setattr(fast_path.FastPath, "_run_first", lambda self, *args: seen.append("run") or args[0])
    for on_gpu, expected in ((True, ["relaxed", "run", "as before"]), (False, ["run"])):
        x = SimpleNamespace(is_cuda=on_gpu, shape=(2, 3))
        fast = fast_path.FastPath(rmsnorm, lambda: launch.Launcher(rmsnorm), Nodes(rmsnorm, lambda step: None))
        for call in (launch.Launcher(rmsnorm)._launches.call(), fast.specialize):
            assert call(x) is x
            assert seen == expected
            seen.clear()
