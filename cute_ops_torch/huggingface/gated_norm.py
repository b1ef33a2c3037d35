"""Norms with a gate, and any other function of the rows of two tensors and a module's parameters, found by meaning.

Mamba 2, Bamba, Qwen 3 Next and others gate before the norm or after it, in float32 or not. A module is traced on fake
tensors in each dtype; if one expression of rows computes all of it, and gives what the original gives for random
numbers, gradients included, its op takes the place of the ``forward``.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from cute_ops.declaration.op import Op
from cute_ops.fusion.analyse import analyse
from cute_ops.fusion.declare import declared
from cute_ops_torch import registry
from cute_ops_torch.composite import constant
from cute_ops_torch.huggingface.bypass import declined, takes
from cute_ops_torch.huggingface.match import Forward, Replacement, innermost, named_as
from cute_ops_torch.huggingface.meaning import state_of, within
from cute_ops_torch.huggingface.trial import Watching, agreeing_ranks, all_close, names_of, trial

log = logging.getLogger("cute_ops")
Tensor = torch.Tensor
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROWS = (2, 3)
# Of an operand that is no parameter: which argument of the ``forward`` it is.
_ARGUMENTS = ("<0>", "<1>")
# By class, attributes and sizes; None of those that are no expression.
_known: dict[Any, Replacement | None] = {}


class _Meaning(NamedTuple):
    """The op of a module, and its operands: names of parameters, or :data:`_ARGUMENTS`."""

    op: Op
    operands: tuple[str, ...]


def replacement_of(module: nn.Module) -> Replacement | None:
    """Replacement of a module without children whose ``forward`` takes two tensors; None where no expression fits."""
    sizes = {tuple(t.shape) for t in (*module.parameters(), *module.buffers())}
    forward = innermost(type(module).forward)
    size = sizes.pop() if len(sizes) == 1 else ()
    if [*module.children()] or len(size) != 1 or not _takes_two(forward):
        return None
    state = state_of(module)
    key = (type(module), forward, state, names_of(module), size)
    if key not in _known:
        _known[key] = _replacement(module, size[0], state)
    return _known[key]


def _takes_two(forward: Any) -> bool:
    if forward is None or forward.__module__.startswith("torch."):
        return False
    kinds = [p.kind for p in [*inspect.signature(forward).parameters.values()][1:]]
    return kinds == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 2


def _replacement(module: nn.Module, n: int, state: Any) -> Replacement | None:
    try:
        with trial(module) as seen:
            found = {dtype: _traced(module, n, dtype) for dtype in _DTYPES}
        if seen.more or seen.modes or not all(found.values()):
            return None
        ranks = agreeing_ranks(
            module, lambda rows, watching: _agrees(module, found[torch.float32], (*rows, n), watching)
        )
        if not ranks:
            return None
    except Exception as error:  # a forward may raise, or branch on what a trace does not know
        log.debug("%s is no function of rows: %s: %s", type(module).__name__, type(error).__name__, error)
        return None
    functions = {each: (_function_of(made.op), made.operands) for each, made in found.items() if made}
    run = _running(functions, tuple((*name.rpartition(".")[::2], value) for name, value in state))

    def gated(self: Any, hidden_states: Tensor, gate: Any = None) -> Any:
        return run(self, hidden_states, gate) if hidden_states.ndim in ranks else NotImplemented

    return Replacement("fused", lambda module, model: True, lambda original: _named(gated, original))


def _running(functions: Mapping[torch.dtype, Any], checked: tuple[tuple[str, str, Any], ...]) -> Forward:
    """Runs the op of a call's dtype; what the recognised module was not is left to the original."""

    def run(self: Any, x: Tensor, gate: Any) -> Any:
        if gate is None or gate.shape != x.shape or gate.dtype != x.dtype:
            return NotImplemented
        found = functions.get(x.dtype)
        if found is None or torch.is_autocast_enabled(x.device.type):
            return NotImplemented
        function, operands = found
        own = {**self._parameters, **self._buffers, **dict(zip(_ARGUMENTS, (x, gate), strict=True))}
        given = [own.get(name) for name in operands]
        same = all(getattr(within(self, owner), key, None) == value for owner, key, value in checked)
        if not same or any(t is None or t.dtype != x.dtype for t in given):
            return NotImplemented
        return function()(*given) if takes(*given) else declined(self, *given)

    return run


def _function_of(op: Op) -> Callable[[], Callable[..., Any]]:
    """A callable that returns the function that runs an op, also while torch.compile traces."""
    return constant.functions(lambda: op)


def _named(ours: Any, original: Any) -> Forward:
    last = [*inspect.signature(original).parameters.values()][-1]
    renamed: Any = named_as(ours, original)
    renamed.__defaults__ = None if last.default is last.empty else (last.default,)
    return renamed  # type: ignore[no-any-return]


def _traced(module: nn.Module, n: int, dtype: torch.dtype) -> _Meaning | None:
    from cute_ops_torch.inductor.front import Front  # importing Inductor's neighbours takes a second
    from cute_ops_torch.inductor.trace import traced

    with torch.device("meta"):
        given = tuple(torch.empty(*_ROWS, n, dtype=dtype) for _ in _ARGUMENTS)
    graph, names = traced(module, given, dtype=dtype)
    front = Front(graph)
    places = dict(zip(front.inputs, [*names, *_ARGUMENTS], strict=True))
    analysis = analyse(front.graph)
    (found,) = analysis.found if len(analysis.found) == 1 else (None,)
    outputs = tuple(front.graph.outputs)
    if found is None or analysis.reasons or found.roots != outputs or len(outputs) != 1:
        return None
    if outputs[0].dtype != str(dtype).removeprefix("torch.") or not all(leaf.node in places for leaf in found.leaves):
        return None
    operands = tuple(places[leaf.node] for leaf in found.leaves)
    return _Meaning(declared(found), operands) if {*_ARGUMENTS} <= {*operands} else None


def _agrees(module: nn.Module, meaning: _Meaning | None, shape: tuple[int, ...], watching: Watching) -> bool:
    """Whether op and original give the same results and gradients for random numbers of this shape."""
    assert meaning is not None  # so the caller has asked
    draw = torch.Generator().manual_seed(0)
    named = (*module.named_parameters(), *module.named_buffers())
    own = {name: torch.randn(t.shape, generator=draw).requires_grad_() for name, t in named}
    given = {name: torch.randn(shape, generator=draw).requires_grad_() for name in _ARGUMENTS}
    leaves = [*own.values(), *given.values()]
    with torch.enable_grad():
        with watching():
            want = torch.func.functional_call(module, own, tuple(given.values()))
            cotangent = torch.randn(want.shape, generator=draw)
            wanted: Any = torch.autograd.grad(want, leaves, cotangent, allow_unused=True)
        got = registry.define(meaning.op).function(*((own | given)[name] for name in meaning.operands))
        found: Any = torch.autograd.grad(got, leaves, cotangent, allow_unused=True)
    return all_close([(got, want), *zip(found, wanted, strict=True)])
