"""Registers declarations as ops of torch: ``register(op)``."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib import import_module
from typing import Any

import torch

from cute_ops.op import Op
from cute_ops_torch.host.fast_path import FastPath
from cute_ops_torch.host.function import make_function, make_inplace
from cute_ops_torch.host.launch import Launcher
from cute_ops_torch.library.autograd import autograd_kernel
from cute_ops_torch.library.nodes import Nodes
from cute_ops_torch.library.reference import cpu_kernel, fake_kernel, register_fake
from cute_ops_torch.library.schema import schema
from cute_ops_torch.library.vmap import vmap_rule

_libraries: dict[str, torch.library.Library] = {}
_registered: dict[tuple[str, str], Registered] = {}
_lock, _lowering = threading.RLock(), threading.RLock()


def register(op: Op, namespace: str = "cute") -> Callable[..., Any]:
    """Make ``torch.ops.<namespace>.<name>`` of a declaration, and of its gradient.

    The op has a CUDA implementation, the reference on CPU, a fake kernel, reverse-mode autograd and a vmap rule.
    Autocast does not change its inputs: kernels accumulate in float32 whatever these are, so a cast would cost
    bandwidth and gain nothing. Registering the same declaration again returns the same function.

    Returns:
        The op as a Python function, with the declaration's signature and docstring.

    Raises:
        ValueError: another declaration has that name, or another library's op.
    """
    with _lock:
        return define(op, namespace).function


def define(op: Op, namespace: str = "cute") -> Registered:
    """What :func:`register` does, without making the Python function."""
    with _lock:
        # Refuse what is to be refused, of the gradient too, before defining anything: a second try would find it there.
        for stage in filter(None, (op, op.grad)):
            _check(stage, namespace)
        return _define(op, namespace)


def _check(op: Op, namespace: str) -> None:
    known = _registered.get((namespace, op.name))
    name = f"torch.ops.{namespace}.{op.name}"
    if known is not None and known.op is not op:
        hint = f"a changed op takes another name, or namespace: register({op.name}, '{namespace}_2')"
        raise ValueError(f"{name} is registered already, for another declaration; {hint}")
    if known is None and hasattr(getattr(torch.ops, namespace), op.name):
        raise ValueError(f"{name} is there already: take another name or namespace")


def _define(op: Op, namespace: str) -> Registered:
    key = (namespace, op.name)
    if key in _registered:
        return _registered[key]
    gradient = None if op.grad is None else _define(op.grad, namespace)
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    library = _libraries[namespace]
    # Exact strides: Inductor must not pass a layout that eager would have refused.
    library.define(schema(op), tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    made = _registered[key] = Registered(op, getattr(getattr(torch.ops, namespace), op.name).default, gradient)
    library.impl(op.name, _deferred(lambda: made.launcher.launch), "CUDA")
    library.impl(op.name, _deferred(lambda: cpu_kernel(op)), "CPU")
    library.impl(op.name, autograd_kernel(op, made.overload, made.fast_path, made.nodes), "Autograd")
    register_fake(library, op.name, _deferred(lambda: fake_kernel(op, made.lower)))
    vmap = _deferred(lambda: vmap_rule(op, made.overload))
    torch.library.register_vmap(f"{namespace}::{op.name}", vmap, lib=library)
    if (distributed := sys.modules.get("cute_ops_torch.distributed.dtensor")) is not None:
        distributed.shard(op, made.overload, library)
    return made


def _deferred(make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """The function that ``make`` makes, made by its first call: a program uses few of the ops there are."""
    made: Callable[..., Any] | None = None

    def call(*args: Any) -> Any:
        nonlocal made
        if made is None:
            made = make()
        return made(*args)

    return call


class Registered:
    """A declaration as an op of torch. Its parts are made when they are first used.

    Attributes:
        op: the declaration.
        overload: the op.
        gradient: the backward op.
        nodes: its autograd nodes.
        fast_path: the way past the dispatcher.
    """

    def __init__(self, op: Op, overload: Any, gradient: Registered | None) -> None:
        self.op, self.overload, self.gradient = op, overload, gradient
        self.nodes = Nodes(op, lambda: gradient.raw if gradient else None)
        self.fast_path = FastPath(op, lambda: self.launcher, self.nodes)
        self._lowered = False

    @cached_property
    def launcher(self) -> Launcher:
        """The CUDA implementation."""
        return Launcher(self.op)

    @cached_property
    def raw(self) -> Callable[..., Any]:
        """The Python function that returns what the raw op returns."""
        return make_function(self.op, self.overload, self.fast_path, raw=True)

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The Python function."""
        inplace = None
        if self.gradient is not None and "inplace_backward" in self.op.options:
            backward = self.gradient.raw, self.gradient.launcher.into
            inplace = make_inplace(self.op, self.overload, self.launcher, *backward)
        return make_function(self.op, self.overload, self.fast_path, inplace=inplace)

    def lower(self) -> None:
        """Register the op's lowering with Inductor, the first time a fake kernel runs while Inductor is loaded.

        Dynamo runs fake kernels before Inductor compiles, and before it takes compiled code from its cache. In the
        latter case only the forward's runs, so a forward registers its gradient's lowering too.
        """
        if self._lowered or "torch._inductor" not in sys.modules:
            return
        with _lowering:  # a second thread must not compile before the first has registered
            if not self._lowered:
                # Importing Inductor takes over a second, so only programs that have loaded it get this far.
                lowering = import_module("cute_ops_torch.inductor.lowering")
                lowering.register_lowering(self.op, self.overload, self.launcher)
                if self.gradient:
                    self.gradient.lower()
                self._lowered = True


def register_lowerings() -> None:
    """Register every op's lowering now. Imports Inductor."""
    import_module("torch._inductor.lowering")
    for made in list(_registered.values()):
        made.lower()


def everything() -> Iterator[tuple[Op, Any, torch.library.Library]]:
    """Every registered op: its declaration, the op and the library that it is in."""
    for (namespace, _), made in list(_registered.items()):
        yield made.op, made.overload, _libraries[namespace]


def family(namespace: str, name: str) -> tuple[Op, Callable[..., Any], Callable[..., Any]]:
    """A registered op: its declaration, its raw function, and its CUDA implementation with outputs given."""
    made = _registered[namespace, name]
    return made.op, made.raw, made.launcher.into
