"""``register(op)``: a declaration becomes an op of torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cute_ops.op import Op
from cute_ops_torch import extension
from cute_ops_torch.autograd import autograd_kernel
from cute_ops_torch.batching import vmap_rule
from cute_ops_torch.front import finished, make_function, make_inplace, make_native_function
from cute_ops_torch.launch import Launcher, describe, launcher
from cute_ops_torch.reference import cpu_kernel, fake_kernel
from cute_ops_torch.schema import schema

_libraries: dict[str, torch.library.Library] = {}
_lowerings: dict[tuple[str, str], _Lowering] = {}
_registered: dict[tuple[str, str], tuple[Op, Callable[..., Any]]] = {}
_natives: dict[tuple[str, str], extension.Native] = {}
_launchers: dict[tuple[str, str], Launcher] = {}
_raw: dict[tuple[str, str], Callable[..., Any]] = {}


def register(op: Op, namespace: str = "cute") -> Callable[..., Any]:
    """Make ``torch.ops.<namespace>.<name>`` of a declaration, and of its gradient.

    The op has a CUDA implementation, the reference on CPU, a fake kernel, reverse-mode autograd and a vmap
    rule. Autocast leaves it alone: kernels accumulate in float32 whatever the inputs are, so casting inputs
    would cost bandwidth and gain nothing. Registering the same declaration again returns the same function.

    Returns:
        The op as a Python function, with the declaration's signature and docstring.

    Raises:
        ValueError: another declaration has that name.
    """
    key = (namespace, op.name)
    if key in _registered:
        known, function = _registered[key]
        if known is not op:
            raise ValueError(f"torch.ops.{namespace}.{op.name} is registered already, for another declaration")
        return function
    gradient = None
    if op.grad is not None:
        register(op.grad, namespace)
        gradient = _raw[namespace, op.grad.name]

    library = _libraries.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
    # Exact strides: Inductor must not hand over a layout that eager would have refused.
    library.define(schema(op), tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    overload = _overload(namespace, op.name)
    cuda = _launchers[key] = launcher(op)

    native = _bind_native(op, namespace, overload)
    if native:
        cuda = cuda._replace(into=native.into)
    else:
        library.impl(op.name, cuda.launch, "CUDA")
        library.impl(op.name, autograd_kernel(op, overload, cuda.launch, gradient), "Autograd", with_keyset=True)
    library.impl(op.name, cpu_kernel(op), "CPU")
    for autocast in ("AutocastCPU", "AutocastCUDA"):
        library.impl(op.name, torch.library.fallthrough_kernel, autocast)
    name = f"{namespace}::{op.name}"
    lowering = _lowerings[key] = _Lowering(_lowerings[namespace, op.grad.name] if op.grad else None, op, overload, cuda)
    torch.library.register_fake(name, fake_kernel(op, lowering), lib=library)
    torch.library.register_vmap(name, vmap_rule(op, overload), lib=library)

    def front(raw: bool) -> Callable[..., Any]:
        if native:
            return make_native_function(op, overload, native.call, raw)
        return make_function(op, overload, cuda.launch, gradient, raw)

    _raw[key] = front(raw=True)
    if op.options or len(op.shown) < len(op.outputs):
        inplace = None
        if op.grad is not None and "inplace_backward" in op.options:
            into = _launchers[namespace, op.grad.name].into
            inplace = make_inplace(op, overload, cuda.launch, _raw[namespace, op.grad.name], into)
        function = finished(op, _raw[key], inplace)
    else:
        function = front(raw=False)
    _registered[key] = op, function
    return function


def family(namespace: str, name: str) -> tuple[Op, Callable[..., Any], Callable[..., Any]]:
    """A registered op: its declaration, its function, raw, and its CUDA implementation with outputs given."""
    key = (namespace, name)
    return _registered[key][0], _raw[key], _launchers[key].into


def _bind_native(op: Op, namespace: str, overload: Any) -> extension.Native | None:
    """The op in C++ where the extension is there, together with its gradient."""
    if extension.loaded() is None:
        return None
    gradient = _natives[namespace, op.grad.name] if op.grad else None
    made = extension.bind(op, overload, partial(describe, op), gradient)
    _natives[namespace, op.name] = made
    return made


def register_lowerings() -> None:
    """Teach Inductor every op now. Imports Inductor."""
    import torch._inductor.lowering  # noqa: F401

    for lowering in list(_lowerings.values()):
        lowering()


class _Lowering:
    """Teaches Inductor the op, once, the first time a fake runs in a process that has Inductor loaded.

    Importing Inductor costs over a second, so nothing here asks for it. Dynamo runs the fake before Inductor
    compiles, and also before it takes compiled code from its cache; but then only the forward's fake, so a forward
    brings its gradient's lowering along.
    """

    def __init__(self, gradient: _Lowering | None, *what: Any) -> None:
        self.gradient = gradient
        self.what: tuple[Any, ...] | None = what

    def __call__(self) -> None:
        if self.what is not None and "torch._inductor" in sys.modules:
            what, self.what = self.what, None
            from cute_ops_torch._inductor import register_lowering

            register_lowering(*what)
            if self.gradient:
                self.gradient()


def _overload(namespace: str, name: str) -> Any:
    return getattr(getattr(torch.ops, namespace), name).default
