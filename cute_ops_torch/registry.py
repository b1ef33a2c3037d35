"""Registers declarations as ops of torch: ``register(op)``."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import count
from typing import Any

import torch

from cute_ops.declaration.headers import check_declaration
from cute_ops.declaration.op import Op
from cute_ops.declaration.tensor import Tensor
from cute_ops.errors import suggesting
from cute_ops_torch.host.compiled_call import CompiledCall
from cute_ops_torch.host.fast_path import FastPath
from cute_ops_torch.host.function import make_function, make_inplace
from cute_ops_torch.host.launch import Launcher
from cute_ops_torch.host.lists import ListCalls
from cute_ops_torch.library import program
from cute_ops_torch.library.autograd import autograd_kernel
from cute_ops_torch.library.inplace import inplace_gradient
from cute_ops_torch.library.nodes import Nodes
from cute_ops_torch.library.reference import cpu_kernel, fake_kernel, implement
from cute_ops_torch.library.schema import schema
from cute_ops_torch.library.vmap import register_vmap, vmap_rule

_libraries: dict[str, torch.library.Library] = {}
_registered: dict[tuple[str, str], Registered] = {}
_lock, _lowering = threading.RLock(), threading.RLock()


def _repeated(name: str, inputs: Mapping[str, Tensor], *functions: Callable[..., Any]) -> Callable[..., Any]:
    """Calls of several ops by one guard, from a module that programs without gradients do not load."""
    module = import_module("cute_ops_torch.host.repeated")
    call: Callable[..., Any] = module.repeated(module.Signature(name, inputs), *functions)
    return call


program.repeated = _repeated


@suggesting
def register(op: Op, namespace: str = "cute") -> Callable[..., Any]:
    """Make ``torch.ops.<namespace>.<name>`` of a declaration, and of those of its gradient.

    The op has a CUDA implementation, the reference on CPU, a fake kernel, reverse-mode autograd and a vmap rule.
    Autocast does not change its inputs: kernels accumulate in float32 whatever these are, so a cast would cost
    bandwidth and gain nothing. Registering the same declaration again returns the same function. A declaration that a
    cell of a notebook or a module that was reloaded makes anew takes the name over; what was made of the one before
    keeps to that.

    Returns:
        The op as a Python function, with the declaration's signature and docstring.

    Raises:
        TypeError: not a declaration.
        ValueError: another declaration has that name, or another library's op.
    """
    check_declaration(op, "cute_ops_torch.register")
    with _lock:
        return define(op, namespace).function


def define(op: Op, namespace: str = "cute") -> Registered:
    """Register an op as :func:`register` does, without making the Python function."""
    with _lock:
        # Refuse what is to be refused, of the gradient too, before defining anything: a second try would find it there.
        for each in (op, *_computing(op)):
            _check(each, namespace)
        return _define(op, namespace)


def _computing(op: Op) -> tuple[Op, ...]:
    """The ops that compute an op's gradient."""
    return (*op.steps, *([op.saving] if op.saving else []))


def _check(op: Op, namespace: str) -> None:
    known = _registered.get((namespace, op.name))
    if known is not None and (known.op is op or _declared_anew(known, op)):
        return
    name = f"torch.ops.{namespace}.{op.name}"
    if known is not None:
        hint = f"a changed op takes another name, or namespace: register({op.name}, '{namespace}_2')"
        raise ValueError(f"{name} is registered already, for another declaration; {hint}")
    if hasattr(getattr(torch.ops, namespace), op.name):
        raise ValueError(f"{name} is there already: take another name or namespace")


def _origin(op: Op) -> tuple[str, Any, Any]:
    """A declaration's module: its name, the module and its spec, one of which changes when the module runs again."""
    name = getattr(op.reference, "__module__", "")
    module = sys.modules.get(name)
    return name, module, getattr(module, "__spec__", None)


def _declared_anew(known: Registered, op: Op) -> bool:
    """Whether an op is declared by the module of a registered one, in a later run of it or a cell of a notebook."""
    (before, first_module, first_spec), (name, module, spec) = known.origin, _origin(op)
    notebook = name == "__main__" and spec is None and not hasattr(module, "__file__")
    return name == before and (notebook or module is not first_module or spec is not first_spec)


def _define(op: Op, namespace: str) -> Registered:
    key, names = (namespace, op.name), getattr(torch.ops, namespace)
    known = _registered.get(key)
    if known is not None and known.op is op:
        return known
    # torch cannot change a definition, and what follows from the earlier one lives on: the new one has another name in
    # programs, and `torch.ops.<namespace>.<name>` leads to it.
    name = op.name if known is None else next(n for k in count(2) if not hasattr(names, n := f"{op.name}_v{k}"))
    origin, gradient = _origin(op), {step: _define(step, namespace) for step in _computing(op)}
    for called in op.without_kernel.ops if op.without_kernel else ():
        if called not in program.functions:
            _define(called, namespace)
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    library = _libraries[namespace]
    # Exact strides: Inductor must not pass a layout that eager would have refused.
    library.define(schema(op, name), tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    packet = getattr(names, name)
    nodes = Nodes(op, lambda step: found.beside(step).raw, _repeated)
    fast_path: FastPath | ListCalls = (
        ListCalls(op, lambda one: define(one, namespace).raw)
        if op.numbers
        else FastPath(op, lambda: found.launcher, nodes, lambda more: found.beside(more).launcher)
    )
    found = _registered[key] = Registered(op, packet, origin, nodes, fast_path, gradient)
    program.functions.setdefault(op, lambda inplace: found.overwriting if inplace else found.raw)
    program.planned.setdefault(op, found.plan)
    if known is not None:
        setattr(names, op.name, packet)
    if op.numbers:
        # It is made of the unrolled ops, in every transform: these have all that is below.
        kernels = dict.fromkeys(("CompositeImplicitAutograd", "FuncTorchBatchedDecomposition"), fast_path.specialize)
    else:
        kernels = {
            "Autograd": autograd_kernel(
                op, lambda: found.overload, fast_path, nodes, saving=lambda more: found.beside(more).overload
            ),
            "CUDA": lambda *args: found.launcher.launch(*args), "CPU": cpu_kernel(op),
            "Fake": fake_kernel(op, found.lower),
        }  # fmt: skip
    implement(library, name, kernels, bool(op.outputs))
    if not op.numbers:
        vmap = vmap_rule(op, lambda one: (found if one is op else define(one, namespace)).overload)
        register_vmap(library, name, vmap, lambda: found.overload)
        if (distributed := sys.modules.get("cute_ops_torch.distributed.dtensor")) is not None:
            distributed.shard(op, found.overload, library)
    return found


@dataclass(eq=False)
class Registered:
    """A declaration as an op of torch. What few programs need is made on first use.

    Attributes:
        op: the declaration.
        packet: what ``torch.ops.<namespace>.<name>`` is.
        origin: where the declaration came from.
        nodes: its autograd nodes.
        fast_path: the way past the dispatcher.
        gradient: the ops that compute its gradient.
    """

    op: Op
    packet: Any
    origin: tuple[str, Any, Any]
    nodes: Nodes
    fast_path: FastPath | ListCalls
    gradient: dict[Op, Registered]
    _lowered: bool = False

    @property
    def _devices(self) -> tuple[str, ...]:
        return ("cpu", "cuda") if self.op.program else ("cuda",)

    @cached_property
    def overload(self) -> Any:
        """The op as dispatchers know it."""
        return self.packet.default

    @cached_property
    def launcher(self) -> Launcher:
        """The CUDA implementation."""
        return Launcher(self.op)

    @cached_property
    def raw(self) -> Callable[..., Any]:
        """The Python function that returns what the raw op returns."""
        return make_function(self.op, self.overload, self.fast_path, raw=True, devices=self._devices)

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The Python function."""
        inplace = None
        if "inplace_backward" in self.op.options:
            nodes = Nodes(self.op, lambda step: self.beside(step).overwriting)
            inplace = make_inplace(self.op, self.overload, self.launcher, nodes)
        return make_function(
            self.op, self.overload, self.fast_path, inplace=inplace, finished=self._finished(), devices=self._devices
        )

    def _finished(self) -> Callable[..., Any] | None:
        if self.op.finish is None:
            return None
        from cute_ops.composite.finished import FINISHED  # when such a function is first used

        whole = FINISHED.get(self.op)
        return define(whole, self.overload.namespace).raw if whole else None

    def plan(self, tensors: Sequence[Any], attrs: Sequence[Any]) -> CompiledCall | None:
        """The planned call; None where kernels do not take the tensors."""
        if self.op.numbers or any(t is not None and t.device.type not in self._devices for t in tensors):
            return None
        return self.launcher.find(tensors, attrs)

    @cached_property
    def overwriting(self) -> Callable[..., Any]:
        """The raw function whose outputs take the memory of the inputs that are donated to them."""
        return inplace_gradient(self.op, self.raw, self.launcher)

    def lower(self) -> None:
        """Register the op's lowering with Inductor, the first time a fake kernel runs while Inductor is loaded.

        Dynamo runs fake kernels before Inductor compiles, and before it takes compiled code from its cache. In the
        latter case only the forward's runs, so a forward registers its gradient's lowering too.
        """
        if self._lowered or self.op.numbers or "torch._inductor" not in sys.modules:
            return
        with _lowering:  # a second thread must not compile before the first has registered
            if not self._lowered:
                # Importing Inductor takes over a second, so only programs that have loaded it get this far.
                lowering = import_module("cute_ops_torch.inductor.lowering")
                if self.op.program:
                    lowering.leave_to_torch(self.overload, self.op)
                else:
                    lowering.register_lowering(self.op, self.overload, self.launcher)
                for op in [op for step in _computing(self.op) for op in (step, *step.narrowed)]:
                    self.beside(op).lower()
                self._lowered = True

    def beside(self, step: Op) -> Registered:
        """An op of the gradient; one that is narrowed to some outputs is registered when it is first needed."""
        with _lock:
            if step not in self.gradient:
                self.gradient[step] = _define(step, self.overload.namespace)
            return self.gradient[step]


def register_lowerings() -> None:
    """Register every op's lowering now. Imports Inductor."""
    import_module("torch._inductor.lowering")
    for made in list(_registered.values()):
        made.lower()


def everything() -> Iterator[tuple[Op, Any, torch.library.Library]]:
    """Every registered op without lists: its declaration, the op and the library that it is in."""
    for (namespace, _), made in list(_registered.items()):
        if not made.op.numbers:
            yield made.op, made.overload, _libraries[namespace]


def family(namespace: str, name: str) -> tuple[Op, Callable[..., Any], Callable[..., Any]]:
    """A registered op: its declaration, its raw function, and its CUDA implementation with outputs given."""
    made = _registered[namespace, name]
    return made.op, made.raw, made.launcher.into
