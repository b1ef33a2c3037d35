"""Functions that torch.compile meets as arguments: which they are, and guards on what they read.

Our ops trace an epilogue themselves, so no guard of Dynamo concerns what that reads. The guards made here call
:func:`cute_ops.constants.state` on the function that the program would call now, as an eager call does, in 0.1 to
0.3 us: a graph runs as long as its functions read what they read when it was made.

Everything here runs while Dynamo traces, by ``torch._dynamo.comptime``, which shows the variables of the code that
calls it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import count
from types import FunctionType, MethodType
from typing import Any

from cute_ops.constants import Exact, Unknown, make_room, state, steps

_numbers = count()
# Functions by number. Those that a program holds are not kept alive: each entry is called for its function.
_captured: dict[str, Callable[[], Any]] = {}
_last = _problem = ""


class _MadeInside(Exception):
    """A function reads what exists only once the compiled code has run."""


def capture(context: Any) -> None:
    """Find the function ``function``, a variable of the code that calls this, and guard what it reads."""
    global _last, _problem
    _last, _problem, variable = str(next(_numbers)), "", _variable(context, "function")
    graph = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    try:
        function = _real(graph, variable)
        _refuse_changed(graph.side_effects, function)
    except _MadeInside as error:
        _problem = str(error)
        return
    make_room(_captured)
    _captured[_last] = (lambda: function) if variable.source is None else _weakly(function)
    known = state(function, "keeps in a compiled graph what it reads now")
    if known is not None:
        _guard_state(variable, function, known)


def captured() -> str:
    """The number of the function that was captured last; empty if there was a problem."""
    return "" if _problem else _last


def problem() -> str:
    """The fault that the last capture found; else empty."""
    return _problem


def function_of(number: str) -> Any:
    """A captured function."""
    return _captured[number]()


def guard_zero(context: Any) -> None:
    """Guard the sign of the zero ``value``, of which Dynamo's guards say nothing; ``found`` is its number."""
    source, then = _variable(context, "value").source, Exact((_variable(context, "found").as_python_constant(),))
    if source is not None:
        _install(source, lambda now: Exact((now,)) == then, "cute_ops: the sign of zero")


def _variable(context: Any, name: str) -> Any:
    return _realized(context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker())


def _realized(variable: Any) -> Any:
    return variable.realize() if hasattr(variable, "realize") else variable


def _real(graph: Any, variable: Any) -> Any:
    """The function that a variable of Dynamo is, with its real object."""
    owner = getattr(variable, "obj", getattr(variable, "im_self", None))  # of a method, in PyTorch 2.11 and 2.15
    held = _realized(owner or variable)
    changed = graph.side_effects.store_attr_mutations.get(held)
    if changed and held.python_type() is not FunctionType:
        raise _MadeInside(
            "cute_ops_torch: an epilogue's object is made or changed in a function that torch.compile compiles, where "
            f"its `{next(iter(changed))}` cannot be read: make it outside, or let a function close over the number."
        )
    if variable.source is not None:
        return _value(graph, variable.source)
    if variable.python_type() is partial:
        args = [_number(_realized(each)) for each in variable.args]
        keywords = {name: _number(_realized(each)) for name, each in variable.keywords.items()}
        return partial(_real(graph, _realized(variable.func)), *args, **keywords)
    if owner is not None:
        function = getattr(variable, "fn", None) or variable.im_func.fn
        return MethodType(function, _real(graph, _realized(owner)))
    _fix_numbers(graph, variable)
    if hasattr(variable, "value"):
        return variable.value
    try:
        return variable.as_python_constant()
    except NotImplementedError:
        raise _MadeInside(
            "cute_ops_torch: an epilogue closes over an object that is made in a function that torch.compile compiles, "
            "where what it holds cannot be read: make it outside, or let the epilogue close over the number."
        ) from None


def _refuse_changed(effects: Any, function: Any) -> None:
    """Raise where the compiled code has changed what a function reads: torch.compile makes such changes when the graph
    has run, and the function would read what was there before.
    """
    stored = {name for each, names in effects.store_attr_mutations.items() if _is_module(each) for name in names}
    try:
        read = steps(function)
        for holder, name, said in read:
            variable = effects.id_to_variable.get(id(holder))
            if (isinstance(holder, dict) and name in stored) or (
                variable is not None and _changes(effects, variable, name)
            ):
                raise _MadeInside(
                    f"cute_ops_torch: an epilogue reads {said}, which is changed in a function that torch.compile "
                    "compiles, where it cannot be read: change it outside, or let a function that is made there close "
                    "over the number."
                )
    except Unknown:  # which is told
        return


def _is_module(variable: Any) -> bool:
    """Whether a variable of Dynamo stands for globals."""
    return type(variable).__name__ in ("NewGlobalVariable", "PythonModuleVariable")


def _changes(effects: Any, variable: Any, name: Any) -> bool:
    """Whether the compiled code has changed an attribute or an element of an object."""
    if name in effects.store_attr_mutations.get(variable, ()):
        return True
    if effects.is_attribute_mutation(variable):
        of_class = getattr(type(variable), "is_base_vt_modified", None)  # of a dict's or a list's subclass
        return bool(of_class and of_class(variable, effects))
    return variable.mutation_type is not None and bool(effects.is_modified(variable))


def _fix_numbers(graph: Any, variable: Any) -> None:
    """Put constants in the place of the symbols that a function made inside closes over, and functions in it."""
    from torch._dynamo.variables import ConstantVariable

    for cell in getattr(getattr(variable, "closure", None), "items", ()):
        held = _realized(graph.side_effects.load_cell(cell))
        if hasattr(held, "sym_num"):
            graph.side_effects.store_cell(cell, ConstantVariable.create(_number(held)))
        elif held is not variable:
            _fix_numbers(graph, held)


def _value(graph: Any, source: Any) -> Any:
    from torch._dynamo.guards import _get_closure_vars  # what sources refer to, besides the frame's variables

    return source.get_value({"L": graph.local_scope, "G": graph.global_scope}, _get_closure_vars(), {})


def _number(variable: Any) -> Any:
    """A constant; of a symbol its number, of which alone the graph then is."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(variable.sym_num) if hasattr(variable, "sym_num") else variable.as_python_constant()


def _weakly(function: Any) -> Callable[[], Any]:
    return weakref.WeakMethod(function) if isinstance(function, MethodType) else weakref.ref(function)


def _guard_state(variable: Any, function: Any, known: Any) -> None:
    said = f"cute_ops: {getattr(function, '__qualname__', type(function).__qualname__)} reads what it read"
    if variable.source is not None:
        _install(variable.source, lambda now: state(now, "") is known, said)
    elif isinstance(function, partial):  # made in what is compiled: its arguments are part of the graph
        of = state(function.func, "")
        if of is not None:
            _guard_state(_realized(variable.func), function.func, of)
    else:  # so is what a function that is made there closes over, but its globals may change
        _install(None, lambda scope: state(function, "") is known, said)


def _install(source: Any, holds: Callable[[Any], bool], said: str) -> None:
    """Add a guard on the value of a source; without one, on the frame's variables."""
    from torch._dynamo.guards import install_guard
    from torch._dynamo.source import GlobalStateSource

    def CUTE_MATCH(builder: Any, guard: Any) -> None:
        manager = builder.guard_manager.root if source is None else builder.get_guard_manager(guard)
        manager.add_lambda_guard(holds, [said], guard.user_stack)

    install_guard((source or GlobalStateSource()).make_guard(CUTE_MATCH))
