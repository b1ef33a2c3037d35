"""Autograd on the raw op: one kernel for torch's Autograd dispatch keys.

``torch.library.register_autograd`` costs a call more host time than the op itself; a kernel of our own can
also skip the dispatcher where nothing listens below autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from cute_ops.errors import message
from cute_ops.op import Op
from cute_ops_torch.host.guards import unknown
from cute_ops_torch.library.reference import register_fake
from cute_ops_torch.library.schema import define, filler, resolved, resolver
from cute_ops_torch.library.tensors import arrays

_C = torch._C
_is_grad_enabled, _any_requires_grad = torch.is_grad_enabled, _C._any_requires_grad
# The dispatch keys of a call that nothing below autograd watches: no mode, no subclass, no negated view.
PLAIN_CUDA = _C.DispatchKeySet(_C.DispatchKey.CUDA).add(_C.DispatchKey.AutogradCUDA).raw_repr()
# Keys that the dispatcher leaves out of a call: our ops have no kernels for them, and torch's fallbacks pass them by.
_FALL_THROUGH = _C.DispatchKeySet(_C.DispatchKey.ADInplaceOrView)
for _name in ("BackendSelect", "AutocastCPU", "AutocastCUDA"):
    _FALL_THROUGH = _FALL_THROUGH.add(getattr(_C.DispatchKey, _name))

if TYPE_CHECKING:
    from cute_ops_torch.host.fast_path import Direct

Call = Callable[..., Any]
_REMEMBERED = ("attributes", "required", "given")


def autograd_kernel(
    op: Op, overload: Any, direct: Direct, gradient: Callable[[], Call | None], plain: int = PLAIN_CUDA
) -> Call:
    """The Autograd kernel of an op.

    Args:
        op: the declaration.
        overload: the registered op.
        direct: the way past the dispatcher.
        gradient: makes ``gradient(*inputs, *attributes)`` of the backward op, None where there is none, when it is
            needed: written-out code takes a while to compile.
        plain: the dispatch keys of a call that nothing watches; tests run stand-ins on the CPU.
    """
    fill, get, arity = filler(op), direct.table.get, len(op.inputs)
    apply: Call | None = None

    def node(run: Call, *args: Any) -> Any:
        nonlocal apply
        apply = apply or graph_node(op, gradient()).apply
        return apply(run, *fill(args))

    dispatched = dispatching_kernel(op, overload, lambda *args: fill(args)[:arity], node)

    def kernel(*args: Any) -> Any:
        try:
            call = get(args[0].shape, unknown)
        except (AttributeError, TypeError):  # no tensor; a symbolic shape, which has no hash
            call = unknown
        out = call(*args)
        return otherwise(*args) if out is None else out

    def otherwise(*args: Any) -> Any:
        keys = dispatch_keys(args[:arity])
        if keys.raw_repr() == plain and forward_ad._current_level < 0:
            return direct.learn(*args)
        return dispatched(keys, *args)

    return kernel


def dispatching_kernel(op: Op, overload: Any, inputs: Call, node: Call) -> Call:
    """The Autograd kernel of an op whose calls all go on in the dispatcher: ``kernel(keys, *args)``.

    Args:
        op: the declaration.
        overload: the registered op.
        inputs: ``inputs(*args)`` are the declaration's, as far as a tangent may be theirs.
        node: a Function's ``apply``: ``node(run, *args)`` calls ``run`` with the same, which goes on below autograd.
    """

    def kernel(keys: Any, *args: Any) -> Any:
        def run(*args: Any) -> Any:
            with _C._AutoDispatchBelowAutograd():
                return overload.redispatch(keys & _C._after_autograd_keyset, *args)

        def run_in_transform(*args: Any) -> Any:
            # A Function's forward turns both kinds of gradient off; functorch's outer levels still want theirs.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                return run(*args)

        if forward_ad._current_level >= 0:
            refuse_tangents(op, inputs(*args))
        if not (_is_grad_enabled() and _any_requires_grad(*args)):
            return run(*args)
        if not _C._are_functorch_transforms_active():
            return node(run, *args)
        # functorch has entered its level by the time it calls an autograd kernel. A Function that stays
        # on that level is right here, but torch wants to be told.
        with enable_single_level_autograd_function():
            return node(run_in_transform, *args)

    return kernel


def dispatch_keys(tensors: Sequence[Any]) -> Any:
    """The dispatch keys of a call with these inputs, as the dispatcher finds them.

    A kernel may have them handed to it, but wrapping them for Python costs every call 5% of its host time: too much
    where most calls have no use for them, less than this where all do.
    """
    keys = _C._dispatch_tls_local_include_set()
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            keys |= _C._dispatch_keys(tensor)
    return keys - _C._dispatch_tls_local_exclude_set() - _FALL_THROUGH


def refuse_tangents(op: Op, tensors: Sequence[Any]) -> None:
    """Raise where an input carries a forward-mode tangent, which would silently be dropped."""
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        problem = "forward-mode AD (jvp) is not supported; reverse mode is."
        raise NotImplementedError(message(op, problem, arrays(op, tensors)))


def graph_node(op: Op, gradient: Call | None) -> Any:
    """The autograd Function of an op: ``apply(run, *inputs, *attributes)`` calls ``run`` with the same."""
    if op.grad is None or gradient is None:
        return _function(op, _without_gradient(op))
    names = [*op.inputs, *op.attrs]
    return _function(op, _with_gradient(op, gradient, ["_run", *names], f"_run({', '.join(names)})"))


def node_of(op: Op, gradient: Call, given: Sequence[str], attrs: Sequence[Any]) -> Any:
    """The same of calls with these inputs and attributes: ``apply(run, *inputs)`` calls ``run(*inputs)``, with None for
    the others. Each argument that a Function is not given saves host time.
    """
    assert op.grad is not None
    call = f"_run({', '.join(name if name in given else 'None' for name in op.inputs)})"
    named = dict(zip(op.attrs, attrs, strict=True))
    passed = tuple(named[name] for name in op.grad.attrs)
    return _function(op, _with_gradient(op, gradient, ["_run", *given], call, _attributes=passed))


class Node(_SingleLevelFunction):
    """Base of our nodes. Not autograd.Function itself: its ``apply`` is for calls from outside the dispatcher."""

    # What compiled autograd tells backwards apart by.
    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)


def _function(op: Op, methods: Mapping[str, Call]) -> Any:
    made: Any = type(f"cute_{op.name}", (Node,), {k: staticmethod(v) for k, v in methods.items()})
    # What a context remembers: slots cost less than a dict.
    made._backward_cls = type(made._backward_cls.__name__, (made._backward_cls,), {"__slots__": _REMEMBERED})
    return made


# `save_for_backward` and `set_materialize_grads` assign these attributes of the context and do nothing else.
_SOURCE = """
def forward(ctx, {arguments}):
    _out = {call}
    ctx.to_save = ({saved},)
    ctx.materialize_grads = False{remember}
    return _out

def backward(ctx, {cotangents}):
    if {none_given}:
        return {nothing}
    {saved_names}, = ctx.saved_tensors{replace}
{row_major}    _grad = _gradient({given}, *{attributes})
    return {gradients}
"""


def _with_gradient(op: Op, gradient: Call, arguments: Sequence[str], call: str, **values: Any) -> dict[str, Call]:
    """Forward and backward, wired by names as :class:`cute_ops.Op` describes.

    Args:
        op: the declaration.
        gradient: the backward op's function.
        arguments: names of the node's; inputs that are not among them are None.
        call: what makes the raw outputs of them.
        values: what that uses, and ``_attributes`` of the backward op where they are no arguments.
    """
    grad, single = op.grad, len(op.outputs) == 1
    assert grad is not None
    outputs = dict.fromkeys(op.outputs, "_out") if single else {n: f"_out[{k}]" for k, n in enumerate(op.outputs)}
    # In the backward's scope: inputs by their names, outputs and cotangents with an underscore.
    cotangents = {f"d{name}": f"_d_{name}" for name in op.outputs}
    inputs = {name: name if name in arguments else "None" for name in op.inputs}
    local = inputs | {name: f"_o_{name}" for name in op.outputs} | cotangents
    saved = {n: inputs[n] if n in op.inputs else outputs[n] for n in (*op.inputs, *op.outputs) if n in grad.inputs}
    saved = {n: text for n, text in saved.items() if text != "None"}
    # With one output, a backward runs only if its cotangent is there.
    required = [] if single else [n for n in op.outputs if f"d{n}" in grad.inputs and not grad.inputs[f"d{n}"].optional]
    given = [local[name] for name in grad.inputs]
    raw = ["_grad"] if len(grad.outputs) == 1 else [f"_grad[{k}]" for k, _ in enumerate(grad.outputs)]
    names = dict(zip(grad.inputs, given, strict=True))
    results = dict(zip(grad.outputs, resolved(grad, raw, names), strict=True))
    remember, replace = "", ""
    if "_attributes" not in values:
        remember += f"\n    ctx.attributes = ({''.join(f'{name}, ' for name in grad.attrs)})"
    if any(t.given or t.same_as or t.hidden for t in op.outputs.values()):
        remember += f"\n    _mark(ctx, ({', '.join(inputs.values())},), _out)"
    if required:
        remember += f"\n    ctx.required = ({''.join(f'({outputs[n]}.shape, {outputs[n]}.dtype), ' for n in required)})"
        replace = "".join(
            f"\n    if _d_{n} is None:\n        _d_{n} = _zeros(ctx.required[{k}], ({', '.join(cotangents.values())},))"
            for k, n in enumerate(required)
        )
    source = _SOURCE.format(
        arguments=", ".join(arguments), call=call, saved=", ".join(saved.values()) or "None", remember=remember,
        attributes="_attributes" if "_attributes" in values else "ctx.attributes",
        cotangents=", ".join(cotangents.values()), none_given=" and ".join(f"{c} is None" for c in cotangents.values()),
        nothing=", ".join(["None"] * len(arguments)) + ",",
        saved_names=", ".join(local[name] for name in saved) or "_", replace=replace,
        row_major="".join(
            f"    if {c} is not None and {c}.stride()[-1:] != (1,):\n        {c} = _row_major({c})\n"
            for n, c in cotangents.items() if n in grad.inputs and grad.inputs[n].dims
        ),
        given=", ".join(given), gradients="".join(f"{results.get(f'd{name}', 'None')}, " for name in arguments),
    )  # fmt: skip
    values |= {"_gradient": gradient, "_row_major": _row_major, "_zeros": _zeros, "_mark": _marker(op)}
    space = define(source, f"node {op.name}", **values)
    return {"forward": space["forward"], "backward": space["backward"]}


def _marker(op: Op) -> Call:
    """Absent, shared and hidden outputs have no gradient."""
    hidden = [t.hidden for t in op.outputs.values()]
    resolve = resolver(op)

    def mark(ctx: Any, tensors: tuple[Any, ...], result: Any) -> None:
        results = result if isinstance(result, tuple) else (result,)
        real = resolve(tensors, results)
        idle = [r for r, used, kept in zip(results, real, hidden, strict=True) if r is not used or kept]
        ctx.mark_non_differentiable(*idle)

    return mark


def inplace_gradient(grad: Op, gradient: Call, into: Call) -> Call:
    """The backward op with its outputs in the memory of the inputs that they reuse, where those are compact.

    Args:
        grad: the backward op.
        gradient: its function, raw.
        into: its CUDA implementation with outputs given.
    """
    names = list(grad.inputs)
    sources = [names.index(t.donates) if t.donates else None for t in grad.outputs.values()]
    return overwriting(gradient, into, sources)


def overwriting(call: Call, into: Call, sources: Sequence[int | None]) -> Call:
    """A raw function of tensors with its outputs in the memory of arguments: which one's, for each output.

    Args:
        call: the function.
        into: its CUDA implementation with outputs given.
        sources: places of the arguments; None for an output with memory of its own.
    """

    def run(*args: Any) -> Any:
        reused = [None if k is None else args[k].detach() for k in sources]
        results = tuple(t for t in reused if t is not None)
        whole = all(t.is_cuda and t.is_contiguous() and t.data_ptr() % 16 == 0 for t in results)
        # A negated view has the memory of its base.
        whole &= not any(isinstance(a, torch.Tensor) and a.is_neg() for a in args)
        if whole and len(results) == len(reused):
            if all(t.numel() for t in results):
                into(*args, *results)
                # Whoever else has saved this memory for a backward of his own gets autograd's error, not other numbers.
                torch.autograd.graph.increment_version(results)
        else:
            made = call(*args)
            made = made if isinstance(made, tuple) else (made,)
            results = tuple(r if t is None else t.copy_(r) for r, t in zip(made, reused, strict=True))
        return results[0] if len(results) == 1 else results

    return run


def _zeros(like: tuple[torch.Size, torch.dtype], cotangents: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
    """A cotangent that is not given, but needed: zeros where the others are."""
    return next(d for d in cotangents if d is not None).new_zeros(like[0], dtype=like[1])


def _row_major(cotangent: torch.Tensor) -> torch.Tensor:
    """Copies what kernels cannot read. The caller never chose a cotangent's strides: `sum` makes expanded ones."""
    return cotangent if cotangent.ndim == 0 or cotangent.stride(-1) == 1 else cotangent.contiguous()


def _without_gradient(op: Op) -> dict[str, Call]:
    """Runs, and raises when a backward runs. Backward ops are such ops: there is no double backward."""
    rest = (None,) * len(op.attrs)

    def forward(ctx: Any, run: Call, *args: Any) -> Any:
        ctx.given = arrays(op, args[: len(op.inputs)])
        return run(*args)

    def backward(ctx: Any, *cotangents: Any) -> Any:
        wanted = ctx.needs_input_grad[1 : 1 + len(op.inputs)]
        return None, *no_gradients(op, ctx.given, cotangents, wanted), *rest

    return {"forward": forward, "backward": backward}


def once(name: str) -> Callable[[Call], Call]:
    """For a Function's backward: what it returns raises when it is differentiated.

    Torch's ``once_differentiable`` returns constants where the cotangents are constants, as those of a sum are.
    """

    def wrap(backward: Call) -> Call:
        @wraps(backward)
        def run(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
            with torch.no_grad():
                found = backward(ctx, *cotangents)
            # Compilers refuse double backwards themselves; functorch takes every gradient as if there was to be one.
            if torch.compiler.is_compiling() or _C._are_functorch_transforms_active() or not torch.is_grad_enabled():
                return found  # type: ignore[no-any-return]
            made = iter(_Last.apply(name, *[g.detach().requires_grad_() for g in found if g is not None]))  # type: ignore[no-untyped-call]
            return tuple(None if g is None else next(made) for g in found)

        return run

    return wrap


class _Last(torch.autograd.Function):
    """Gradients that have none."""

    @staticmethod
    def forward(ctx: Any, name: str, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.name = name
        return tuple(g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise NotImplementedError(f"cute.{ctx.name}: its gradient has none of its own, so there is no double backward.")


_LIBRARY = torch.library.Library("cute", "FRAGMENT")


def _refuse(cotangents: Sequence[torch.Tensor], size: Sequence[int], dtype: torch.dtype, text: str) -> torch.Tensor:
    """Zeros for cotangents of zeros, which compiled backwards make of outputs that a loss does not depend on."""
    if any(d.float().any() for d in cotangents):
        raise NotImplementedError(text)
    return cotangents[0].new_zeros(size, dtype=dtype)


def _fake_gradient(
    cotangents: Sequence[torch.Tensor], size: Sequence[int], dtype: torch.dtype, text: str
) -> torch.Tensor:
    return cotangents[0].new_empty(size, dtype=dtype)


def _register() -> None:
    tags = torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe  # it waits for the device
    schema = "(Tensor[] cotangents, SymInt[] size, ScalarType dtype, str text) -> Tensor"
    _LIBRARY.define(f"_no_gradient{schema}", tags=tags)
    _LIBRARY.impl("_no_gradient", _refuse, "CompositeExplicitAutograd")
    register_fake(_LIBRARY, "_no_gradient", _fake_gradient)


_register()


def no_gradients(
    op: Op, given: Mapping[str, Any], cotangents: Sequence[torch.Tensor | None], wanted: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The gradients of an op that has none, in a backward: an error.

    Compilers trace the backward of all that may be differentiated, long before anybody asks for it, if anybody does.
    So what they trace is an op that raises where their program comes to it.
    """
    text = message(op, without_gradient_text(op), given)
    if not torch.compiler.is_compiling():
        raise NotImplementedError(text)
    there = [d for d in cotangents if d is not None]
    return [
        torch.ops.cute._no_gradient(there, a.shape, getattr(torch, a.dtype), text) if want and a and there else None
        for a, want in zip(given.values(), wanted, strict=True)
    ]


def without_gradient_text(op: Op) -> str:
    """Why an op cannot be differentiated."""
    if op.inference_only:
        return f"is for inference only, it has no gradient; {op.inference_only}."
    also = ", so there is no double backward" if op.name.endswith("_bwd") else ""
    return f"has no gradient of its own{also}."
