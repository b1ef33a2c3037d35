"""Facts that replaced ``forward``s need while torch.compile traces them: versions of tensors, and who reads a sum.

Code that calls these functions is traced, but they run: Dynamo calls them (``torch._dynamo.comptime``) with the
variables of that code. So they see the tensors that stand for real ones, and the modules themselves.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from cute_ops_torch.composite.constant import constant
from cute_ops_torch.huggingface.bypass import is_observed
from cute_ops_torch.huggingface.captures import returns_sums
from cute_ops_torch.huggingface.match import with_own_code

log = logging.getLogger("cute_ops")
# An attribute of modules that add: by the number of each add the norm that has read its sum.
READERS = "_cute_readers"
# Attributes of a sum. The norm that was computed with it, None once that is read.
NORMED = "_cute_normed"
# The module that has added it, the number of the add there, and, outside of compilers, the sum's version.
SIGNED = "_cute_sum"
# An attribute of models that have returned such sums.
_RETURNS = "_cute_returns_sums"
# By the number of each add: the norm, the model, and the modules on the way to the norm.
_WAYS = "_cute_ways"
# (module, number, norm) of each sum whose reader a trace has found and not yet written to the module.
_found: list[tuple[nn.Module, int, nn.Module]] = []
# Numbers that Dynamo has read for the traced code, which takes the last one by `noted`.
_numbers: list[int] = []


def version_of(x: torch.Tensor) -> int:
    """A number that changes when a tensor is written to."""
    if not torch.compiler.is_dynamo_compiling():
        return x._version
    from torch._dynamo.comptime import comptime  # start-up time; torch.compile has imported it

    comptime(_note_version)
    return noted()


def _note_version(context: Any) -> None:
    note(context.get_local("x").as_fake()._version)


def note(number: int) -> None:
    """Give a number that Dynamo has read to the code that it traces, which takes it by :func:`noted`."""
    _numbers.append(number)


@constant
def noted() -> int:
    """The number noted last."""
    return _numbers.pop()


def goes_on(module: nn.Module, number: int) -> bool:
    """Whether a trace goes on, in the same graph, after this add of a module to the end of the patched model or of a
    stack of its layers, which holds the norm that is known to read the sum.

    It does not where a graph calls a part of a model as a whole, as one that is checkpointed, or where the graph of
    all that holds the layer breaks: then Dynamo traces a ``forward`` in pieces, or modules alone.
    """
    from torch._dynamo.comptime import comptime

    comptime(_note_whole)
    return bool(noted())


def _note_whole(context: Any) -> None:
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    whole, outer = None, translator
    while outer is not None:
        code = outer.f_code  # that of a piece has another name
        if (code.co_name, code.co_filename) == ("whole", __file__):
            whole = outer
        outer = getattr(outer, "parent", None)
    if whole is None or translator.output.current_tracer.parent is not None:
        note(0)
        return
    model, module = _realized(whole.symbolic_locals["self"]).value, _variable(context, "module").value
    reader = vars(module).get(READERS, {}).get(_variable(context, "number").as_python_constant())
    note(int(reader is None or any(each is reader() for each in model.modules())))


def has_set(x: torch.Tensor, name: str) -> bool:
    """Whether the code of this trace has set an attribute of ``x``. An attribute that other code has set is not read:
    Dynamo would guard its value, and trace each module again whose input carries another one.
    """
    from torch._dynamo.comptime import comptime

    comptime(_note_attribute)
    return bool(noted())


def _note_attribute(context: Any) -> None:
    variable, name = _variable(context, "x"), _variable(context, "name").as_python_constant()
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    note(int(translator.output.side_effects.has_pending_mutation_of_attr(variable, name)))


def learn(norm: nn.Module, module: nn.Module, number: int) -> None:
    """Know from now on that ``norm`` reads the sum of this add in a module; of a trace, once :func:`settle` is called.

    Dynamo guards on what a trace has read, so that nothing of it may change before its end.
    """
    if not torch.compiler.is_dynamo_compiling():
        vars(module).setdefault(READERS, {})[number] = weakref.ref(norm)
        return
    from torch._dynamo.comptime import comptime

    comptime(_note_reader)


def _note_reader(context: Any) -> None:
    norm, module = (getattr(_variable(context, name), "value", None) for name in ("norm", "module"))
    number = _variable(context, "number").as_python_constant()
    if norm is not None and module is not None and number not in vars(module).get(READERS, {}):
        _found.append((module, number, norm))


def module_of(context: Any, name: str) -> Any:
    """The module that a local variable of the traced code is; None where Dynamo has only its name."""
    return getattr(_variable(context, name), "value", None)


def _variable(context: Any, name: str) -> Any:
    return _realized(context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker())


def _realized(variable: Any) -> Any:
    return variable.realize() if hasattr(variable, "realize") else variable


def settle() -> None:
    """Trace once more where the trace has found who reads a sum."""
    if torch.compiler.is_dynamo_compiling():
        from torch._dynamo.comptime import comptime

        comptime(_settle)


def _settle(context: Any) -> None:
    found = [*_found]
    _found.clear()
    for module, number, norm in found:
        vars(module).setdefault(READERS, {}).setdefault(number, weakref.ref(norm))
    if not found:
        return
    log.debug("%d norms read sums of other modules: torch.compile traces the model again", len(found))
    from torch._dynamo.exc import RestartAnalysis

    # Else Dynamo would expect that it meets the same calls in the same order.
    context._i_will_not_complain_if_bc_breaks_InstructionTranslator().speculation_log.clear()
    raise RestartAnalysis(restart_reason="cute_ops: norms read sums of other modules")


def settling(forward: Any) -> Any:
    """The ``forward`` of a model or of a stack of layers, after which a trace settles."""

    @with_own_code
    @wraps(forward)
    def whole(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return _run(forward, self, args, kwargs)
        out = forward(self, *args, **kwargs)
        settle()
        return out

    return whole


class _Run:
    """The forward of a model or of a stack of layers that runs outside of compilers.

    Attributes:
        model: the outermost of such.
        keeps_sums: whether no caller gets a sum of its layers. A norm that is computed together with a sum does not
            depend on it in the autograd graph, so the sum's gradient would lack the norm's part.
    """

    def __init__(self, model: nn.Module, keeps_sums: bool) -> None:
        self.model, self.keeps_sums = model, keeps_sums

    def between(self, module: nn.Module, norm: nn.Module) -> list[nn.Module] | None:
        """The modules whose hooks may see a sum: those that hold one of the two, and the norm's neighbours, which may
        read it, too. None if the model holds not both.
        """
        names = {id(each): name for name, each in self.model.named_modules()}
        if not names.keys() >= {id(module), id(norm)}:
            return None
        adds, reads = (set(_prefixes(names[id(each)])) for each in (module, norm))
        apart = [self.model.get_submodule(name) for name in (adds ^ reads) - {names[id(norm)]}]
        neighbours = [each for name in reads - adds for each in self.model.get_submodule(name).children()]
        return [each for each in (*apart, *neighbours) if each is not norm]


_running: ContextVar[_Run | None] = ContextVar("cute_ops_running", default=None)


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:k]) for k in range(1, len(parts) + 1))


def _run(forward: Any, model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call the ``forward`` of a model or of a stack of layers for the adds within, which read that it runs."""
    outer = _running.get()
    keeps = (outer is None or outer.keeps_sums) and not (_RETURNS in vars(model) or returns_sums(model, kwargs))
    token = _running.set(_Run(model if outer is None else outer.model, keeps))
    try:
        out = forward(model, *args, **kwargs)
    finally:
        _running.reset(token)
    return _returned(model, out) if outer is None and keeps else out


def _returned(model: nn.Module, out: Any) -> Any:
    """The outputs of a model's call. If a norm of the model reads a sum among them, the model hands on no sums in later
    calls. An output whose norm was already computed with it becomes a view: its gradient would lack the norm's part, so
    autograd raises if it is asked for.
    """
    found = [leaf for leaf in tree_leaves(out) if type(leaf) is torch.Tensor and _is_read(leaf)]
    if not found:
        return out
    setattr(model, _RETURNS, True)
    log.debug("%s returns sums that norms of its own read: each is an add alone", type(model).__name__)
    handed = {id(leaf) for leaf in found if hasattr(leaf, NORMED)}
    return tree_map(lambda leaf: leaf.view_as(leaf) if id(leaf) in handed else leaf, out) if handed else out


def _is_read(x: torch.Tensor) -> bool:
    """Whether a tensor is a sum of which a norm is known that reads it."""
    module, number, _ = getattr(x, SIGNED, (None, 0, None))
    return module is not None and number in (getattr(module, READERS, None) or {})


def keeps_sums() -> bool:
    """Whether a patched model runs, outside of compilers, and gives nobody the sums of its layers."""
    run = _running.get()
    return run is not None and run.keeps_sums


def reader_of(module: nn.Module, number: int) -> nn.Module | None:
    """The norm that has read the last sum of this add in a module, if no hook sees the sum on its way; a patched module
    has the attribute.
    """
    readers: Any = getattr(module, READERS)
    found = readers.get(number) if readers is not None else None
    norm = None if found is None else found()
    if norm is None or torch.compiler.is_dynamo_compiling():
        return norm
    return None if _is_seen(module, number, norm) else norm


def _is_seen(module: nn.Module, number: int, norm: nn.Module) -> bool:
    """Whether a hook may see the sum on its way from a module to a norm."""
    ways, run = vars(module).setdefault(_WAYS, {}), _running.get()
    if run is None:
        return True
    known = ways.get(number)
    if known is None or known[0]() is not norm or known[1]() is not run.model:
        between = run.between(module, norm)
        way = None if between is None else [weakref.ref(each) for each in between]
        known = ways[number] = weakref.ref(norm), weakref.ref(run.model), way
    way = known[2]
    return way is None or any((each := ref()) is None or is_observed(each) for ref in way)


def forget(module: nn.Module) -> None:
    """Forget which norms have read a module's sums."""
    for name in (READERS, _WAYS, _RETURNS):
        vars(module).pop(name, None)
