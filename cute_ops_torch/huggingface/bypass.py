"""Checks at each call that a model still is what a replaced ``forward`` relies on; if not, the original one runs.

A patched model goes on being changed: adapters wrap its layers, libraries put a ``forward`` on an instance, hooks and
parametrizations come and go, weights change their dtype. So nothing that was true when a model was patched is taken
for granted later. :func:`or_original` makes each replaced ``forward``; :func:`takes`, :func:`runs`,
:func:`calls` and :func:`can_bypass_linear` are the questions that it asks.
"""

from __future__ import annotations

import dis
import inspect
import logging
import sys
import types
from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from cute_ops_torch.huggingface.match import Forward, innermost, rewrap, with_own_code
from cute_ops_torch.library.modes import EXACT, transforms_active
from cute_ops_torch.library.supported import DTYPES as _DTYPES
from cute_ops_torch.library.supported import takes as takes

log = logging.getLogger("cute_ops")
_LINEAR = nn.Linear.forward
_METHODS = (types.FunctionType, property, staticmethod, classmethod)
# The module of the hooks by which Hugging Face keeps outputs.
CAPTURES = "transformers.utils.output_capturing"


def or_original(original: Any, ours: Forward, whole: bool = False) -> tuple[Forward, Callable[[Any], bool]]:
    """A ``forward`` for subclasses of ``original`` that runs ``ours``, and a function that says whether a module may.

    ``ours`` runs beneath the decorators of the original ``forward``, or with ``whole`` in place of them, too. The
    original runs if ``ours`` returns ``NotImplemented``, if somebody has replaced that ``forward`` or a function that
    it calls, and if a model is to return a tuple, which has no place for logits that were not computed.
    """
    plain, may = original.forward, unchanged(original)
    inner = plain if whole else innermost(plain)

    @with_own_code
    @wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if may(self):
            out = ours(self, *args, **kwargs)
            return inner(self, *args, **kwargs) if out is NotImplemented else out
        return original.forward(self, *args, **kwargs)

    if plain is inner:
        return forward, may
    beneath = rewrap(plain, forward)

    @with_own_code
    @wraps(plain)
    def decorated(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours_may = may(self) and not (getattr(type(self), "_cute_drops_logits", False) and _returns_tuple(self, kwargs))
        return (beneath if ours_may else original.forward)(self, *args, **kwargs)

    return decorated, may


def _returns_tuple(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether a call of one of transformers' models returns a tuple."""
    asked = given.get("return_dict")
    return not (getattr(model.config, "return_dict", True) if asked is None else asked)


def unchanged(cls: Any) -> Callable[[Any], bool]:
    """A function that says whether a class has the ``forward`` that it has now, and a module of it the methods and
    globals that this reads.
    """
    plain, methods = cls.forward, _methods_of(cls)
    reads_the_same = reads(
        plain, *filter(None, (_function_of(method) for *_, method in (*methods.own, *methods.above)))
    )
    has_the_same = _has(cls, methods)
    if reads_the_same is _always and has_the_same is None:
        return lambda module: cls.forward is plain
    if has_the_same is None:
        return lambda module: cls.forward is plain and reads_the_same()
    return lambda module: cls.forward is plain and reads_the_same() and has_the_same(module)


def _always() -> bool:
    return True


def reads(*functions: Any) -> Callable[[], bool]:
    """A function that says whether all that ``functions`` read from their modules is what it is now.

    Functions of those modules count with what they read.
    """
    found: dict[int, tuple[types.ModuleType, dict[str, Any]]] = {}
    for function in map(inspect.unwrap, functions):
        if read := read_globals(function):
            home = sys.modules[function.__module__]
            found.setdefault(id(home), (home, {}))[1].update(read)
    checks = [_has_globals(*each) for each in found.values()]
    if len(checks) < 2:
        return checks[0] if checks else _always
    return lambda: all(same() for same in checks)


def _has_globals(home: types.ModuleType, read: Mapping[str, Any]) -> Callable[[], bool]:
    scope, find = vars(home), itemgetter(*read)
    known = find(scope)

    def same() -> bool:
        if torch.compiler.is_compiling():  # Dynamo would guard on all names of the module
            return all(getattr(home, name) is value for name, value in read.items())
        return find(scope) == known  # type: ignore[no-any-return]

    return same


def read_globals(function: Any) -> dict[str, Any]:
    """The globals that a function and those of its module that it calls read, but for modules."""
    function = inspect.unwrap(function)
    home, scope = sys.modules.get(function.__module__), function.__globals__
    read, pending = dict[str, Any](), [function]
    while pending:
        for name in _globals_of(pending.pop().__code__):
            if name in scope and name not in read and not isinstance(scope[name], types.ModuleType):
                read[name], inner = scope[name], inspect.unwrap(scope[name])
                if isinstance(inner, types.FunctionType) and inner.__globals__ is scope:
                    pending.append(inner)
    return read if home is not None and vars(home) is scope else {}


def _globals_of(code: types.CodeType) -> set[str]:
    """The names of globals that code reads; `co_names` has those of attributes, too."""
    return {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}


class _Methods(NamedTuple):
    """Methods and properties that a class's ``forward`` calls, directly or by one another. PyTorch's own do not count.

    Attributes:
        own: those that the class has, by name.
        above: those of its bases that ``super()`` finds.
    """

    own: tuple[tuple[str, Any], ...]
    above: tuple[tuple[type, str, Any], ...]


def _has(cls: Any, methods: _Methods) -> Callable[[Any], bool] | None:
    """A function that says whether a module has these methods: those of its class, and not attributes of their names.

    torch.compile traces it, and guards what it guards of the methods' calls; None where there are no methods.
    """
    if not methods.own and not methods.above:
        return None
    kinds: dict[Any, Any] = {kind: [(name, m) for name, m in methods.own if isinstance(m, kind)] for kind in _METHODS}
    bound, properties = (*kinds[types.FunctionType],), (*kinds[property],)
    homes = ((name, next(base for base in cls.__mro__ if name in vars(base))) for name, _ in properties)
    # Dynamo guards what a class has itself, and no property that `getattr` finds.
    above = (*methods.above, *((base, name, vars(base)[name]) for name, base in homes))
    static, of_class = (
        tuple((name, method.__func__) for name, method in kinds[kind]) for kind in (staticmethod, classmethod)
    )

    def has(module: Any) -> bool:
        return (
            all(_is_bound(getattr(module, name, None), function, module) for name, function in bound)
            and all(_is_bound(getattr(module, name, None), function, type(module)) for name, function in of_class)
            and all(getattr(module, name, None) is function for name, function in static)
            and all(getattr(type(module), name, None) is value for name, value in properties)
            and all(vars(base).get(name) is value for base, name, value in above)
        )

    return has


def _is_bound(method: Any, function: Any, to: Any) -> bool:
    return isinstance(method, types.MethodType) and method.__func__ is function and method.__self__ is to


def _methods_of(cls: Any) -> _Methods:
    own, above = dict[str, Any](), dict[tuple[type, str], Any]()
    pending = [getattr(inspect.unwrap(cls.forward), "__code__", None)]
    bases = [base for base in cls.__mro__[1:] if not base.__module__.startswith("torch.")]
    while pending:
        code = pending.pop()
        if code is None:
            continue
        pending += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        for name in {*code.co_names} - own.keys():
            value = inspect.getattr_static(cls, name, None)
            if isinstance(value, _METHODS) and not hasattr(nn.Module, name):
                own[name] = value
                pending.append(getattr(_function_of(value), "__code__", None))
        for base, name in product(bases if "super" in code.co_names else (), code.co_names):
            value = vars(base).get(name)
            if isinstance(value, _METHODS) and (base, name) not in above:
                above[base, name] = value
                pending.append(getattr(_function_of(value), "__code__", None))
    return _Methods(
        tuple(sorted(own.items(), key=itemgetter(0))), tuple((*place, value) for place, value in above.items())
    )


def _function_of(method: Any) -> Any:
    """The Python function beneath a method's or property's decorators; None where there is none."""
    function = inspect.unwrap(getattr(method, "fget", None) or getattr(method, "__func__", method))
    return function if isinstance(function, types.FunctionType) else None


def declined(module: nn.Module, *tensors: torch.Tensor | None) -> Any:
    """Say, once for each class and kind of tensors, that a module runs its original ``forward``; ``NotImplemented``."""
    if not torch.compiler.is_compiling():
        _say(type(module).__name__, ", ".join(_described(x) for x in tensors if x is not None))
    return NotImplemented


@lru_cache(256)
def _say(name: str, given: str) -> None:
    log.warning("%s runs its original forward: no op of ours takes %s", name, given)


def _described(x: torch.Tensor) -> str:
    kind = "" if type(x) in EXACT else f" ({type(x).__name__})"
    dtype = str(x.dtype).removeprefix("torch.")
    if x.is_nested:  # it may have neither sizes nor strides
        return f"a nested tensor of {dtype}"
    return f"{dtype}{list(x.shape)}{kind} of stride {x.stride()[-1:]} on {x.device.type}"


def runs(module: nn.Module, ours: Forward) -> bool:
    """Whether calling a module runs this replaced ``forward``, and nothing changes its result."""
    cls: Any = type(module)
    return getattr(cls, "_cute_runs", None) is ours and cls._cute_may(module) and calls(module, cls._cute_forward)


def calls(module: nn.Module, forward: Forward, but: str = "") -> bool:
    """Whether calling a module calls this ``forward`` of its class, and nothing but hooks of the module ``but``."""
    bound = module.forward  # of an instance's own `forward`, too: Dynamo guards on this, not on `vars(module)`
    return (
        isinstance(bound, types.MethodType)
        and bound.__func__ is forward
        and bound.__self__ is module
        and (not has_hooks(module) or (but != "" and _has_only_hooks_of(module, but)))
        and not nn.modules.module._has_any_global_hook()
    )


def can_bypass_linear(x: torch.Tensor, *layers: nn.Module) -> bool:
    """Whether linear layers without bias do nothing but multiply ``x``, or what is made of it, by their weights."""
    if not is_plain(x) or x.dtype not in _DTYPES or torch.is_autocast_enabled(x.device.type):
        return False
    return all(only_multiplies(layer, x.dtype) for layer in layers)


def only_multiplies(layer: nn.Module, dtype: torch.dtype) -> bool:
    """Whether calling a module multiplies by its weight, of this dtype, and does nothing else."""
    if not is_plain_linear(layer) or layer._parameters["bias"] is not None:
        return False
    weight = parameter(layer, "weight")
    return weight is not None and weight.dtype == dtype


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether calling a module multiplies by its weight, adds a bias of its columns if it has one, and no more."""
    if type(layer) is not nn.Linear:
        return False
    own = layer._parameters  # pruning makes other attributes of them
    return "weight" in own and "bias" in own and calls(layer, _LINEAR) and fits(own["bias"], own["weight"], 0)


def fits(bias: torch.Tensor | None, weight: torch.Tensor | None, dim: int) -> bool:
    """Whether a bias has an element for each column, of which this dim of the weight has the number: torch's functions
    take any that can be broadcast.
    """
    return bias is None or (weight is not None and bias.ndim == 1 and bias.shape[0] == weight.shape[dim])


def parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """A module's own parameter. That of a parametrization, of pruning or of a stateless call is computed, or no
    parameter: None.
    """
    found = module._parameters.get(name)
    return found if type(found) is nn.Parameter else None


def is_eager(x: torch.Tensor) -> bool:
    """Whether ``x`` is a plain tensor, and no compiler, mode or transform sees the calls made on it."""
    return not torch.compiler.is_compiling() and not transforms_active() and type(x) is torch.Tensor


def is_plain(x: torch.Tensor) -> bool:
    """Whether ``x`` is a plain tensor, and no mode or transform sees the calls made on it; a compiler may."""
    return type(x) is torch.Tensor and (torch.compiler.is_compiling() or not transforms_active())


def is_exporting() -> bool:
    """Whether ``torch.export`` traces. With ``strict=True`` an ``autograd.Function`` has no gradient in its graph."""
    # The flag itself: Dynamo of torch 2.11 takes `is_exporting()` for true in each compile.
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_observed(module: nn.Module) -> bool:
    """Whether a hook may read or write what a module gets or returns: any but those by which transformers keeps it.
    A ``forward`` of the instance, as accelerate wraps around that of the class, may do so, too.
    """
    return "forward" in vars(module) or (has_hooks(module) and not _has_only_hooks_of(module, CAPTURES))


def _has_only_hooks_of(module: nn.Module, source: str) -> bool:
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    return all(getattr(hook, "__module__", "") == source for hook in module._forward_hooks.values())
