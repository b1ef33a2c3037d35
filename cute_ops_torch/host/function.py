"""The Python function of an op, with its real signature and a way past the dispatcher.

The direct way is taken only where nobody watches: not compiling or tracing, no mode of torch, no functorch
level, no forward-mode AD, no profiler, and exact Tensor or Parameter types. Autocast does not matter, since
the ops run in the dtypes they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from cute_ops.op import Op
from cute_ops_torch.host.fast_path import Direct
from cute_ops_torch.host.guards import unknown
from cute_ops_torch.host.launch import Launcher
from cute_ops_torch.library.autograd import graph_node, inplace_gradient
from cute_ops_torch.library.schema import define, parameters, resolved

_C = torch._C
EXACT = frozenset((torch.Tensor, torch.nn.Parameter))


# All that it uses is in its closure: a global of a module that does not exist would confuse torch.compile.
_SOURCE = """
def make(_compiling, _function_modes, _profiled, _watched, _plain, _exact, _get, _unknown, _overload, _learn):
    def _otherwise({arguments}):
        if _watched() or not ({plain}):
            return _overload({arguments})
        return _learn({arguments})
    def {name}({parameters}):
        if _compiling() or _function_modes() or _profiled():
            _out = _overload({arguments})
        else:
            try:
                _call = _get({lead}.shape, _unknown) if type({lead}) in _exact else _unknown
            except TypeError:  # a symbolic shape has no hash
                _call = _unknown
            _out = _call({arguments})
            if _out is None:
                _out = _otherwise({arguments})
        return {returned}
    return {name}
"""


def make_function(op: Op, overload: Any, direct: Direct, raw: bool = False, device: str = "cuda") -> Any:
    """``cute_ops_torch.<op>``: the declaration's signature and docstring.

    Args:
        op: the declaration.
        overload: the registered op.
        direct: the way past the dispatcher.
        raw: return what the raw op returns: an empty tensor for an absent output.
        device: whose tensors kernels run on; tests run stand-ins on the CPU.
    """

    def is_plain(tensor: Any) -> bool:
        # A negated view has the memory of its base: only the dispatcher's fallback resolves it.
        return type(tensor) in EXACT and tensor.device.type == device and not tensor.is_neg()

    plain = " and ".join(
        f"({name} is None or _plain({name}))" if t.optional else f"_plain({name})" for name, t in op.inputs.items()
    )
    function = _maker(op, _SOURCE, raw, lead=next(iter(op.inputs)), plain=plain)(
        torch.compiler.is_compiling, _C._len_torch_function_stack, torch.autograd._profiler_enabled, watched, is_plain,  # type: ignore[attr-defined]
        EXACT, direct.table.get, unknown, overload, direct.learn,
    )  # fmt: skip
    return _dressed(function, op)


def _maker(op: Op, source: str, raw: bool, **more: str) -> Callable[..., Any]:
    outputs = ["_out"] if len(op.outputs) == 1 else [f"_out[{k}]" for k, _ in enumerate(op.outputs)]
    returned = ", ".join(resolved(op, outputs))
    text = source.format(
        name=op.name, parameters=parameters(op), arguments=", ".join((*op.inputs, *op.attrs)),
        returned="_out" if raw or returned == ", ".join(outputs) else returned, **more,
    )  # fmt: skip
    return define(text, op.name, __name__=__name__)["make"]


def _dressed(function: Any, op: Op) -> Any:
    function.__doc__, function.__module__, function.__qualname__ = op.doc, "cute_ops_torch", op.name
    return function


_FINISHED = """
def make(_plain, _inplace, _finish):
    def {name}({parameters}):
        return _finish({call}({arguments}), ({tensors},), ({attributes}), {options})
    return {name}
"""


def finished(op: Op, plain: Callable[..., Any], inplace: Callable[..., Any] | None) -> Any:
    """The function of an op that has options or hidden outputs.

    Args:
        op: the declaration.
        plain: its function, raw.
        inplace: the same with a gradient that takes the memory of what it reuses.
    """
    finish, shown = op.finish, [list(op.outputs).index(name) for name in op.shown]
    own = [name for name in op.options if name != "inplace_backward"]

    def after(raw: Any, tensors: tuple[Any, ...], attributes: tuple[Any, ...], *values: Any) -> Any:
        options = dict(zip(own, values, strict=True))
        op.check_options(options)
        outputs = raw if isinstance(raw, tuple) else (raw,)
        results = {name: outputs[k] for name, k in zip(op.shown, shown, strict=True)}
        if finish is not None and options != finish.plain:
            from array_api_compat import torch as xp  # lazily: not every call has a use for it

            inputs, attrs = dict(zip(op.inputs, tensors, strict=True)), dict(zip(op.attrs, attributes, strict=True))
            results = dict(finish.apply(xp, inputs, results, attrs, **options))
        values = tuple(results.values())
        return values[0] if len(values) == 1 else values

    source = _FINISHED.format(
        name=op.name, parameters=parameters(op, options=True), arguments=", ".join((*op.inputs, *op.attrs)),
        call="(_inplace if inplace_backward else _plain)" if inplace else "_plain", tensors=", ".join(op.inputs),
        attributes="".join(f"{name}, " for name in op.attrs), options="".join(f"{name}, " for name in own),
    )  # fmt: skip
    function = define(source, op.name, __name__=__name__)["make"](plain, inplace, after)
    function.__doc__, function.__module__, function.__qualname__ = op.doc, "cute_ops_torch", op.name
    return function


def make_inplace(op: Op, overload: Any, cuda: Launcher, gradient: Callable[..., Any], into: Callable[..., Any]) -> Any:
    """As :func:`make_function`, raw, with a gradient that takes the memory of the inputs that it reuses.

    Where somebody watches it is the op itself: a compiler plans memory on its own.

    Args:
        op: the declaration.
        overload: the registered op.
        cuda: its CUDA implementation.
        gradient: the backward op's function, raw.
        into: its CUDA implementation with outputs given.
    """
    assert op.grad is not None
    inplace = inplace_gradient(op.grad, gradient, into)
    node, arity = graph_node(op, inplace).apply, len(op.inputs)

    def elsewhere(*args: Any) -> Any:
        if torch.compiler.is_compiling() or watched():
            return overload(*args)
        exact = all(t is None or type(t) in EXACT for t in args[:arity])
        return node(overload, *args) if exact and torch.is_grad_enabled() else overload(*args)

    return make_function(op, elsewhere, Direct(op, lambda: (cuda, inplace)), raw=True)


def watched() -> bool:
    return transformed() or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def transformed() -> bool:
    """Whether somebody does more with calls than to note them."""
    return (
        _C._len_torch_dispatch_stack() > 0
        or _C._len_torch_function_stack() > 0
        or _C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or _C._get_tracing_state() is not None
    )
