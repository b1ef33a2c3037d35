"""Launching from the C++ extension, with kernels that a CPU can run in place of the compiler's.

Run by ``test_torch_extension.py`` in a process that has the extension.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import tvm_ffi

import cute_ops_torch
from cute_ops import FLOATS, Op, Tensor
from cute_ops.jit import cache
from cute_ops.ops import OPS
from cute_ops_torch.host import extension, launch
from cute_ops_torch.library.reference import fake_kernel
from cute_ops_torch.library.register import define
from cute_ops_torch.library.schema import schema

NAMESPACE = "cute_native"


@pytest.fixture
def native(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[Op], extension.Native]:
    """Ops whose C++ kernels run on the CPU, with compiled functions that check what they are given."""
    get = cache.get

    def get_native(variant: Any) -> Any:
        kernel = get(variant)
        return tvm_ffi.convert(lambda *given: kernel(*map(tensor_at, given)))

    monkeypatch.setattr(cache, "get", get_native)
    for made in _bound.values():
        extension.loaded().forget(made.handle)
    return _bind


def tensor_at(given: Any) -> torch.Tensor:
    """The memory that a compiled function was given: a borrowed DLTensor, which from_dlpack cannot share."""
    dtype = getattr(torch, str(given.dtype))
    shape, strides = tuple(given.shape), tuple(given.strides)
    items = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_uint8 * (items * dtype.itemsize)).from_address(given.data_ptr())
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_bound: dict[str, extension.Native] = {}


def _bind(op: Op) -> extension.Native:
    if op.name not in _bound:
        grad = _bind(op.grad) if op.grad else None
        _library.define(schema(op))
        overload = getattr(getattr(torch.ops, NAMESPACE), op.name).default
        torch.library.register_fake(f"{NAMESPACE}::{op.name}", fake_kernel(op, lambda: None), lib=_library)
        _bound[op.name] = extension.bind(op, overload, partial(launch.describe, op), grad, device="cpu")
    return _bound[op.name]


def raw(op: Op) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), op.name).default


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def with_gradients(op: Op, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.requires_grad_(name in op.differentiable) for name, t in zip(op.inputs, tensors, strict=True)]


def wanted(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t for t in tensors if t.requires_grad]


def test_the_extension_is_used() -> None:
    assert extension.loaded() is not None
    assert all(define(op).native for op in OPS)
    x = torch.randn(2, 8, requires_grad=True)
    assert type(cute_ops_torch.rmsnorm(x).grad_fn).__name__ == "CppFunction"


# Dtypes in turn: to the C++ code they are numbers in a key.
def test_values_against_float64(turn: Any, native: Any, compiled: Any) -> None:
    call, tensors = native(turn.op).call, turn.tensors()
    turn.check(call(*tensors, *turn.attrs.values()))
    turn.check(raw(turn.op)(*tensors, **turn.attrs))  # through the dispatcher
    assert compiled.calls == [turn.op.name] * 2


def test_strided_rows_are_read_in_place(turn: Any, native: Any, compiled: Any) -> None:
    turn.check(native(turn.op).call(*turn.strided(), *turn.attrs.values()))


def test_into_given_outputs(turn: Any, native: Any) -> None:
    made = native(turn.op)
    turn.check_into(made.into, made.call(*turn.tensors(), *turn.attrs.values()))


def test_gradients(op: Op, native: Any, make_inputs: Callable[..., Any], compiled: Any) -> None:
    known, attrs = getattr(torch.ops.cute, op.name).default, op.attrs.values()
    calls = (native(op).call, raw(op), known)
    leaves = [with_gradients(op, make_inputs(op)) for _ in calls]
    douts = [torch.randn_like(o) for o in differentiable(known(*leaves[0]))]
    for chosen in (None, *range(len(douts))):  # all cotangents, one

        def gradients(call: Any, tensors: list[torch.Tensor], chosen: int | None = chosen) -> Any:
            pairs = zip(differentiable(call(*tensors, *attrs)), douts, strict=True)
            outs, given = zip(*[pair for k, pair in enumerate(pairs) if chosen in (None, k)], strict=True)
            return torch.autograd.grad(outs, wanted(tensors), given)

        *got, expected = map(gradients, calls, leaves)
        for one in got:
            torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)
    assert compiled.calls == [op.name, op.grad.name] * 2 * (1 + len(douts))


def differentiable(outputs: Any) -> list[torch.Tensor]:
    return [o for o in as_tuple(outputs) if o.requires_grad]


def test_a_second_call_does_not_plan(native: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call, x, w = native(OPS[0]).call, torch.randn(4, 72), torch.ones(72)
    first = call(x, w, None, 1e-6, 0.0)
    monkeypatch.setattr(launch.dispatch, "choose", None)
    assert torch.equal(call(x.clone(), w, None, 1e-6, 0.0), first)


def test_whatever_a_plan_depends_on_is_in_the_key(native: Any, compiled: Any) -> None:
    made, w, base = native(OPS[0]), torch.ones(64), torch.randn(9, 76)
    x = base[:4, :64].contiguous()
    calls = [
        (x, w), (base[:5, :64].contiguous(), w), (base[:4, :64], w), (base[:4, 1:65], w), (x.bfloat16(), w),
        (x, w.half()), (x, None), (x, None, w), (x, w, None, 1e-5), (x, w, None, 1e-6, 1.0), (x[None], w),
    ]  # fmt: skip
    for _ in range(2):
        for arguments in calls:
            made.call(*arguments, *(None, None, 1e-6, 0.0)[len(arguments) - 1 :])
    assert extension.loaded().remembered(made.handle) == len(calls)


def test_attributes_of_every_type(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Op(
        "typed",
        inputs={"x": Tensor("*m n", "T")},
        outputs={"out": Tensor("*m n", "T")},
        dtypes={"T": FLOATS},
        attrs={"scale": 1.0, "shift": 2, "flip": False, "name": "plus"},
        reference=lambda xp, x, scale, shift, flip, name: (x * scale + shift) * (-1 if flip else 1) * len(name),
        kernel="nowhere:Typed",
    )

    def kernel(variant: Any, x: Any, out: Any) -> None:
        tensor_at(out).copy_(own.reference(None, tensor_at(x), **variant.attrs))

    monkeypatch.setattr(cache, "get", lambda variant: tvm_ffi.convert(partial(kernel, variant)))
    monkeypatch.setattr("cute_ops.jit.source_digest.digest", lambda *_: "")
    x, call = torch.randn(3, 8), _bind(own).call
    for attrs in (
        (1.0, 2, False, "plus"), (0.5, 2, False, "plus"), (1.0, 3, False, "plus"), (1.0, 2, True, "plus"),
        (1.0, 2, False, "minus"), (2, 2, False, "plus"),
    ):  # fmt: skip
        torch.testing.assert_close(call(x, *attrs), own.reference(None, x, *attrs))
        torch.testing.assert_close(raw(own)(x, *attrs), own.reference(None, x, *attrs))


def test_errors_come_through(native: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = native(OPS[0]), torch.randn(3, 80)
    for call in (made.call, raw(OPS[0])):
        with pytest.raises(ValueError, match=r"^cute\.rmsnorm: argument `weight` has n=32, but n=80\."):
            call(x, torch.ones(32), None, 1e-6, 0.0)
        with pytest.raises(TypeError, match="argument `x` has dtype int64"):
            call(x.long(), None, None, 1e-6, 0.0)
    assert not compiled.calls

    def broken(*tensors: Any) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(cache, "get", lambda variant: tvm_ffi.convert(broken))
    with pytest.raises(RuntimeError, match="cute_native::rmsnorm: the kernel failed: ValueError: no such kernel"):
        made.call(torch.randn(3, 88), None, None, 1e-6, 0.0)


def test_zero_rows_launch_nothing(op: Op, native: Any, compiled: Any, make_inputs: Callable[..., Any]) -> None:
    leaves = with_gradients(op, make_inputs(op, (2, 0), 24))
    outs = differentiable(native(op).call(*leaves, *op.attrs.values()))
    grads = torch.autograd.grad(outs, wanted(leaves), [torch.ones_like(o) for o in outs])
    assert all(g.shape == t.shape and not g.any() for g, t in zip(grads, wanted(leaves), strict=True))
    assert not compiled.calls


def test_what_is_watched_goes_through_the_dispatcher(native: Any, compiled: Any, check_watched: Any) -> None:
    call, x = native(OPS[0]).call, torch.randn(3, 96)
    arguments = (x, None, None, 1e-6, 0.0)
    expected = call(*arguments)
    check_watched(lambda: call(*arguments), expected, NAMESPACE)
    negated = torch._neg_view(x)
    assert torch.equal(call(negated, *arguments[1:]), -expected)
    with torch.inference_mode():
        assert call(*arguments).is_inference()
    with torch.device("meta"):
        assert call(torch.empty(3, 96), *arguments[1:]).is_meta


def test_nothing_leaks(native: Any, compiled: Any) -> None:
    call, leaf = native(OPS[0]).call, torch.randn(3, 104, requires_grad=True)
    alive: list[Any] = []
    for _ in range(2):
        for _ in range(50):
            call(leaf * 2, None, None, 1e-6, 0.0).sum().backward()
            call(leaf * 2, None, None, 1e-6, 0.0)
        del compiled.calls[:]
        gc.collect()
        alive.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    assert alive[0] == alive[1]


def test_a_graph_runs_backward_once_and_sees_changes_in_place(native: Any, compiled: Any) -> None:
    call, leaf = native(OPS[0]).call, torch.randn(3, 112, requires_grad=True)
    out = call(leaf, None, None, 1e-6, 0.0)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()
    x = leaf * 1
    out = call(x, None, None, 1e-6, 0.0)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_threads(native: Any, compiled: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    call = native(OPS[0]).call

    def work(seed: int) -> bool:
        x = torch.randn(3, 8 * (seed % 5 + 15), requires_grad=True)
        out = call(x, None, None, 1e-6, 0.0)
        out.sum().backward()
        return torch.equal(out, call(x.detach(), None, None, 1e-6, 0.0)) and x.grad is not None

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(100)))
