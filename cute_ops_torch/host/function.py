"""The public function of an op: the declaration's signature, and the fast path where no mode is active.

The fast path is taken while nothing compiles or traces, no mode of torch, functorch level, forward-mode AD or profiler
is active, and all inputs are exactly Tensor or Parameter. Autocast does not matter: ops run in the dtypes they get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from cute_ops.declaration.messages import message, wrong_attribute
from cute_ops.declaration.op import Op
from cute_ops.errors import shown, unknown_argument
from cute_ops.ops.checks import inplace_backward_of
from cute_ops_torch.host import codegen
from cute_ops_torch.host.fast_path import FastPath
from cute_ops_torch.host.given_outputs import GivenOutputs
from cute_ops_torch.host.launch import Launcher
from cute_ops_torch.host.lists import ListCalls
from cute_ops_torch.host.traced_constants import keep_constant
from cute_ops_torch.library.modes import EXACT, modes_active, wrapped
from cute_ops_torch.library.nodes import Nodes
from cute_ops_torch.library.schema import parameters, resolver, takes_out
from cute_ops_torch.library.tensors import check_inputs

Call = Callable[..., Any]
# The default of a required argument. Python would refuse a call without it before it says which name was misspelt.
_MISSING = ...  # which torch.compile knows, too

# What torch.compile runs while it traces the function, in which the attributes are variables.
_CONSTANTS = """if _compiling():
                from torch._dynamo.comptime import comptime as _comptime
                _comptime(_constants)
            """

_SYMBOLIC = torch.SymInt, torch.SymFloat, torch.SymBool


def make_function(
    op: Op, overload: Call, fast_path: FastPath | ListCalls, *, raw: bool = False, inplace: Call | None = None,
    finished: Call | None = None, devices: tuple[str, ...] = ("cuda",),
) -> Call:  # fmt: skip
    """``cute_ops_torch.<op>``, by the registered op or past the dispatcher.

    Args:
        op, overload, fast_path: the declaration and these.
        raw: return what the raw op returns: also hidden outputs, and an empty tensor for an absent one.
        inplace: the raw function with a gradient that overwrites the inputs that it reuses, for the option
            ``inplace_backward``.
        finished: the raw function of a composite whose first output is the op's, finished by its options' defaults.
        devices: whose tensors its kernels take, or its program; tests run stand-ins on the CPU.
    """

    def is_plain(tensor: Any) -> bool:
        if isinstance(tensor, (list, tuple)):
            return all(map(is_plain, tensor))
        # The dispatcher resolves a negated view, which shares its base's memory, and what a functorch transform that is
        # over has wrapped, such as the tensors that `torch.func.vjp` saved.
        return type(tensor) in EXACT and tensor.device.type in devices and not tensor.is_neg() and not wrapped(tensor)

    def specialize(*args: Any) -> Any:
        check_inputs(op, args, _MISSING)
        tensors = zip(op.inputs.values(), args, strict=False)
        if modes_active() or not all((declared.optional and t is None) or is_plain(t) for declared, t in tensors):
            if isinstance(fast_path, ListCalls):
                fast_path.counts(args)  # what torch's schema refuses, it refuses without the argument's name
            # A schema cuts a block of 0.5 in an array to 0; of floats it loses nothing.
            _check_attributes(op, args[len(op.inputs) :], (bool, int, str))
            try:
                return overload(*args)
            except (RuntimeError, OverflowError, TypeError, AttributeError):
                _check_attributes(op, args[len(op.inputs) :])
                raise
        try:
            return fast_path.specialize(*args)
        except (RuntimeError, ValueError, TypeError, AttributeError):  # an attribute without a hash, of another type
            _check_attributes(op, args[len(op.inputs) :])
            raise

    values: dict[str, Any] = {
        "_compiling": torch.compiler.is_dynamo_compiling, "_function_modes": torch._C._len_torch_function_stack,
        "_profiled": torch.autograd._profiler_enabled,  # type: ignore[attr-defined]
        "_exact": EXACT, "_get": fast_path.table.get, "_overload": overload, "_specialize": specialize,
    }  # fmt: skip
    header = parameters(op) if raw else f"{parameters(op, options=True, required='=_missing')}, **_others"
    arguments, before, first = ", ".join((*op.inputs, *op.keywords)), "", next(iter(op.inputs))
    returned = "_out" if op.outputs else "None"
    constants = ""
    if floats := [name for name, value in op.attrs.items() if isinstance(value, float)]:
        values["_constants"], constants = keep_constant(floats), _CONSTANTS
    if not raw and (op.options or any(t.given or t.same_as or t.hidden for t in op.outputs.values())):
        values["_postprocess"] = postprocessing(op)
        returned = _postprocessed(op)
    if not raw and inplace is not None:
        values["_inplace"] = inplace
        values["_flag"] = partial(inplace_backward_of, op)
        test = "inplace_backward is not False and _flag(inplace_backward)"
        before = f"if {test}:\n            _out = _inplace({arguments})\n        el"
    if not raw and finished is not None:
        values |= {"_finished": finished, "_observed": _observed}
        defaults = [f"{name} {'is' if default is False else '=='} {default!r}" for name, default in op.options.items()]
        test = f"{' and '.join(defaults)} and type({first}) in _exact and not _observed()"
        before = f"if {test}:\n            return _finished({arguments})[0]\n        {before}"
    if not raw and takes_out(op) and isinstance(fast_path, FastPath):
        values["_write"] = GivenOutputs(op, overload, fast_path.launcher, devices)
        before = f"if out is not None:\n            return _write(out, {arguments})\n        {before}"
    if not raw:
        # Python's own error suggests no name. This takes 40 ns of a call.
        values |= {"_refuse": partial(_refuse, op), "_missing": _MISSING}
        before = f"if _more or _others:\n            _refuse(_more, _others)\n        {before}"
    make = codegen.maker(
        codegen.FUNCTION, op.name, values, name=op.name, parameters=header, before=before, first=first,
        arguments=arguments, constants=constants, returned=returned,
    )  # fmt: skip
    function = make(**values)
    function.__doc__, function.__module__, function.__qualname__ = op.doc, "cute_ops_torch", op.name
    function.__signature__ = codegen.public_signature(function, _MISSING)
    return function  # type: ignore[no-any-return]


def _postprocessed(op: Op) -> str:
    """Source of what a function returns where that is not what the raw op returns."""
    attributes, options = ("".join(f"{name}, " for name in names) for names in (op.keywords, _own_options(op)))
    return f"_postprocess(_out, ({', '.join(op.inputs)},), ({attributes}), {options})"


def _check_attributes(op: Op, values: Iterable[Any], kinds: tuple[type, ...] = (bool, int, str, float)) -> None:
    """Raise TypeError for attributes of these kinds that are of another type, and ValueError for integers that are too
    large.
    """
    for name, value in zip(op.keywords, values, strict=False):
        if isinstance(value, _SYMBOLIC) or not isinstance(op.keywords[name], kinds):
            continue
        if problem := wrong_attribute(op, name, value):
            raise TypeError(message(op, problem)) from None
        bits = 1023 if isinstance(op.keywords[name], float) else 63
        if isinstance(value, int) and value.bit_length() > bits:
            problem = f"attribute `{name}` is {shown(value)}, expected a number of 64 bits."
            raise ValueError(message(op, problem)) from None


def _observed() -> bool:
    return torch.compiler.is_dynamo_compiling() or modes_active()


def _refuse(op: Op, more: Sequence[Any], others: Iterable[str]) -> NoReturn:
    by_position = (*op.inputs, *op.keywords, *op.options)
    names = (*by_position, *(["out"] if takes_out(op) else []))
    problem = next((unknown_argument(name, names) for name in others), "")
    if not problem:
        listed = ", ".join(f"`{name}`" for name in by_position)
        problem = f"{len(by_position) + len(more)} arguments were given by position; it takes {listed}."
    raise TypeError(message(op, problem))


def _own_options(op: Op) -> list[str]:
    """The options that the declaration postprocesses outputs by."""
    return [name for name in op.options if name != "inplace_backward"]


def postprocessing(op: Op) -> Call:
    """``postprocess(raw outputs, inputs, attributes, *options)``: what the public function returns."""
    finish, names, resolve = op.finish, _own_options(op), resolver(op)
    shown = [list(op.outputs).index(name) for name in op.shown]

    def postprocess(raw: Any, tensors: tuple[Any, ...], attributes: tuple[Any, ...], *values: Any) -> Any:
        options = dict(zip(names, values, strict=True))
        if finish is not None:
            finish.check(op.name, options)
        outputs = resolve(tensors, raw if isinstance(raw, tuple) else (raw,))
        results = {name: outputs[k] for name, k in zip(op.shown, shown, strict=True)}
        if finish is not None and options != finish.plain:
            from array_api_compat import torch as xp  # lazily: few calls need it, and it takes 30 ms to import

            inputs, attrs = dict(zip(op.inputs, tensors, strict=True)), dict(zip(op.keywords, attributes, strict=True))
            try:
                results = dict(finish.apply(xp, inputs, results, attrs, **options))
            except (AttributeError, TypeError):
                _check_attributes(op, attributes)  # torch's schemas take a dtype for a number
                raise
        found = tuple(results.values())
        return found[0] if len(found) == 1 else found

    return postprocess


def make_inplace(op: Op, overload: Call, launcher: Launcher, nodes: Nodes) -> Call:
    """The raw function of an op with a gradient that overwrites the inputs that it reuses.

    ``nodes`` have such a gradient. Where a mode is active it is the op itself: a compiler plans memory on its own.
    """
    arity = len(op.inputs)

    def dispatched(*args: Any) -> Any:
        if torch.compiler.is_compiling() or modes_active():
            return overload(*args)
        exact = all(t is None or type(t) in EXACT for t in args[:arity])
        return nodes.apply(overload, *args) if exact and torch.is_grad_enabled() else overload(*args)

    return make_function(op, dispatched, FastPath(op, lambda: launcher, nodes), raw=True)
