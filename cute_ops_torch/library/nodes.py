"""The autograd nodes of an op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.autograd.function import _SingleLevelFunction

from cute_ops.constants import of_attributes
from cute_ops.declaration.op import Op
from cute_ops.declaration.tensor import Tensor
from cute_ops_torch.library import copies
from cute_ops_torch.library.modes import EXACT, transforms_active
from cute_ops_torch.library.no_gradient import LINKS, linking_inputs, no_gradients, once
from cute_ops_torch.library.remembered import remembered
from cute_ops_torch.library.scaled_gradient import scaled_gradients
from cute_ops_torch.library.schema import resolver
from cute_ops_torch.library.tensors import arrays, readable

Call = Callable[..., Any]
# By the type of tensors: a context in which several steps of one backward run that read the inputs of these names.
# `cute_ops_torch.distributed` puts one here, so that ranks gather such an input once.
sharing: dict[type, Callable[[frozenset[str]], AbstractContextManager[None]]] = {}
# What a context stores besides tensors.
_SLOTS = ("required", "given", "numbers", LINKS)


class AutogradNode(_SingleLevelFunction):
    """Base of our nodes. ``apply`` of ``autograd.Function`` is for calls from outside the dispatcher.

    Attributes:
        saving: the op that it runs in place of its own, to save more; or None.
    """

    saving: Op | None = None

    # Compiled autograd tells backwards apart by this.
    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)


class Nodes:
    """One op: a node for each set of inputs that are not None, of those that need a gradient, and of attributes.

    ``apply`` of a Function takes 0.1 us for each argument, so a node has the attributes in it, and absent inputs are no
    arguments of it. Scalars are: they follow the inputs. What nobody wants is known when a node is made: the backward
    looks nothing up.
    """

    def __init__(self, op: Op, function: Callable[[Op], Call], repeated: Call | None = None) -> None:
        """``function`` makes the raw function of an op that computes a part of the gradient; ``repeated(name, inputs,
        run, otherwise)`` the call of several by one guard.
        """
        self._op, self._function, self._repeated = op, function, repeated
        self._known: dict[Any, Any] = {}

    def of(self, tensors: Sequence[Any], attrs: Sequence[Any]) -> Any:
        """The node of calls like this one: ``apply(run, *inputs, *scalars)``, without absent inputs, returns
        ``run(*inputs, *scalars)``, of an op that saves the first of them.
        """
        given = {name: t for name, t in zip(self._op.inputs, tensors, strict=True) if t is not None}
        names, wanted = tuple(given), tuple(name for name, t in given.items() if t.requires_grad)
        # What the forward computes serves every level of functorch.
        kept = tuple(name for name, t in given.items() if tracked(t)) if self._op.scaled else wanted
        key = names, wanted, kept, of_attributes(attrs)
        return remembered(self._known, key, lambda: self._make(names, wanted, kept, attrs))

    def apply(self, run: Call, *args: Any, saving: Callable[[Op], Call] | None = None) -> Any:
        """``run(*inputs, *attributes, *scalars)`` as a node; ``saving(op)`` runs the op that saves more."""
        arity, count = len(self._op.inputs), len(self._op.inputs) + len(self._op.attrs)
        tensors, attrs, numbers = args[:arity], args[arity:count], args[count:]

        node = self.of(tensors, attrs)
        chosen = saving(node.saving) if node.saving and saving is not None else run

        def run_given(*given: Any) -> Any:
            rest = iter(given)
            return chosen(*[None if t is None else next(rest) for t in tensors], *attrs, *rest)

        return node.apply(run_given, *[t for t in tensors if t is not None], *numbers)

    def _runs(self, step: Op) -> Call:
        """The function of a step. A program takes tensors however they lie, and saves them so."""
        run, declared = self._function(step), tuple(step.inputs.values())
        if not self._op.program or step.program:
            return run

        def read(*args: Any) -> Any:
            tensors = (t if t is None else readable(d, t) for d, t in zip(declared, args, strict=False))
            return run(*tensors, *args[len(declared) :])

        return read

    def _make(
        self, given: tuple[str, ...], wanted: tuple[str, ...], kept: tuple[str, ...], attrs: Sequence[Any]
    ) -> Any:
        op = self._op
        if op.differentiable:
            named = dict(zip(op.attrs, attrs, strict=True))
            absent = {f"d{name}" for name in op.inputs if name not in given}
            chosen = op.backward(wanted, given)
            steps = [_Step.of(step, self._runs(step), named, absent, given) for step in chosen]
            steps += [_scaled(op, scaled)] if (scaled := [name for name in op.scaled if name in wanted]) else []
            saving = op.saved_by(kept, given)
            # Products may copy what a composite, or an op with the framework's product as a fallback, reads.
            copying = op.program is not None or (op.fallback is not None and bool(op.fallback.anywhere))
            step = steps[0] if len(steps) == 1 else _chain(op, steps, copying, self._repeated)
            forward, backward = _with_gradient(op, step, given, saving)
            if copying:
                forward = copies.saving(forward)
            # What the forward has computed is no function of its inputs to autograd.
            lost = range(1, 1 + len(given)) if scaled else _lost(op, saving or op, step, given, wanted)
            if lost:
                forward, backward = linking_inputs(forward, lost), once(op.aliases.get(op.name, op.name))(backward)
        else:
            saving, (forward, backward) = None, _without_gradient(op, given)
        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward), "saving": saving}
        made: Any = type(f"cute_{op.name}", (AutogradNode,), methods)
        # Slots cost less than a dict; torch's own `apply` looks for what a node's class has, then calls its backward.
        own = {"__slots__": _SLOTS, "apply": backward}
        made._backward_cls = type(made._backward_cls.__name__, (made._backward_cls,), own)
        return made


def _lost(op: Op, ran: Op, step: _Step, given: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """The places, after the first, of inputs to which a second derivative would be left out: the gradient depends on
    them through an output of ``ran`` that autograd does not know, and not by what else a node saves.
    """
    read = [name for name in ran.outputs if name in step.inputs]
    unknown = [name for name in read if name not in op.outputs or op.outputs[name].hidden]
    if not unknown or len(unknown) < len(read):  # by one that it knows it finds all inputs
        return []
    return [k for k, name in enumerate(given, 1) if name in wanted and name not in step.inputs.keys() - step.shapes]


def tracked(tensor: torch.Tensor) -> bool:
    """Whether autograd tracks a tensor, or a level of functorch does."""
    if torch.compiler.is_dynamo_compiling():
        return tensor.requires_grad
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor) and not tensor.requires_grad:
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.requires_grad


class _Step(NamedTuple):
    """A backward op of one call, or several as one.

    Attributes:
        inputs: its inputs, by name.
        outputs: the names of its outputs.
        run: ``run(*inputs, *attributes, *scalars)``, raw.
        attributes: the values.
        scalars: the names.
        resolve: ``resolve(inputs, raw outputs)``: the outputs, None where absent.
        shapes: the inputs of which a composite reads only the shape.
        op: the op, where it is one.
    """

    inputs: Mapping[str, Tensor]
    outputs: tuple[str, ...]
    run: Call
    attributes: tuple[Any, ...]
    scalars: tuple[str, ...]
    resolve: Call
    shapes: frozenset[str] = frozenset()
    op: Op | None = None

    @classmethod
    def of(cls, op: Op, run: Call, attrs: Mapping[str, Any], absent: Collection[str], given: Collection[str]) -> _Step:
        """One backward op, for these attributes and inputs of the forward; nobody reads the absent gradients."""
        outputs, attributes = tuple(op.outputs), tuple(attrs[name] for name in op.attrs)
        resolve = resolver(op, [name for name in outputs if name not in absent], given)
        shapes = frozenset(name for name, t in op.inputs.items() if t.unread and op.program)
        return cls(op.inputs, outputs, run, attributes, tuple(op.scalars), resolve, shapes, op)


def _chain(op: Op, steps: Sequence[_Step], share_copies: bool, repeated: Call | None) -> _Step:
    """Backward ops in order as one, each of which may read what earlier ones gave; also none at all. With
    ``share_copies`` an operand that several products read is copied once.
    """
    inputs = _inputs_of(steps)
    read = {f"d{name}" for name in op.inputs}
    outputs = tuple(name for step in steps for name in step.outputs if name in read)
    scalars = tuple(dict.fromkeys(name for step in steps for name in step.scalars))
    often = frozenset(name for name, count in Counter(n for step in steps for n in step.inputs).items() if count > 1)

    # Where a value is among those given and what steps have made, in order: by names each step takes 1 us longer.
    place = {name: k for k, name in enumerate((*inputs, *scalars))}
    count, wired = len(place), []
    for step in steps:
        found, numbers = (_take([place[name] for name in names]) for names in (step.inputs, step.scalars))
        wired.append((step, found, numbers, len(step.outputs) == 1))
        place |= {name: k for k, name in enumerate(step.outputs, count)}
        count += len(step.outputs)
    results = _take([place[name] for name in outputs])

    def in_turn(values: tuple[Any, ...], record: Any = None) -> tuple[Any, ...]:
        for step, tensors, numbers, alone in wired:
            found = tensors(values)
            if record is None:
                raw = step.run(*found, *step.attributes, *numbers(values))
            else:
                raw = record.run_step(step.op, found, step.attributes)
            values = (*values, *step.resolve(found, (raw,) if alone else raw))
            if share_copies:
                copies.add(values)
        return results(values)

    turns = copies.sharing(in_turn) if share_copies else in_turn

    def apart(*given: Any) -> Any:
        within = sharing.get(type(given[0])) if sharing and given else None
        if within is None:
            return turns(given)
        with within(often):
            return turns(given)

    def together(record: Any, *given: Any) -> Any:
        """The steps as a record notes them. Copies that they share belong to one call: these are not repeated."""
        found, shared = copies.watched(lambda values: in_turn(values, record), given)
        record.complete &= not shared
        return found

    run = apart
    there = any(not t.optional for t in inputs.values())
    if repeated is not None and there and not scalars and all(map(_is_repeatable, steps)):
        run = repeated(f"{op.name}_backward", inputs, together, apart)
    used = {name for step in steps for name in step.inputs.keys() - step.shapes}
    whole = (lambda found, raw: raw[0]) if len(outputs) == 1 else (lambda found, raw: raw)
    return _Step(inputs, outputs, run, (), scalars, whole, frozenset(inputs.keys() - used))


def _inputs_of(steps: Sequence[_Step]) -> dict[str, Tensor]:
    """The tensors that steps read and no step makes. A tensor that any step requires is required, in the layout of the
    strictest step. The first one is there.
    """
    made = {name for step in steps for name in step.outputs}
    every = [(name, t) for step in steps for name, t in step.inputs.items() if name not in made]
    every.sort(key=lambda each: len(each[1].axes), reverse=True)
    merged = dict(sorted(every, key=lambda each: not each[1].optional))
    return dict(sorted(merged.items(), key=lambda each: each[1].optional))


def _is_repeatable(step: _Step) -> bool:
    return step.op is not None and not (step.op.mutates or step.op.numbers)


def _scaled(op: Op, names: Sequence[str]) -> _Step:
    """The gradients of these inputs that the forward has computed, as a step."""
    first, *others = op.outputs
    saved = {op.scaled[name]: op.inputs[name]._replace(optional=False) for name in names}
    # Cotangents of gradients themselves come from a second derivative.
    second = {f"d{name}": op.outputs[name]._replace(optional=True) for name in others}

    scaled, count = scaled_gradients(op), len(saved)

    def run(*given: Any) -> Any:
        found = scaled(given[:count], given[count], given[count + 1 :])
        return tuple(found) if count > 1 else found[0]

    inputs = {**saved, f"d{first}": op.outputs[first], **second}
    return _Step(inputs, tuple(f"d{name}" for name in names), run, (), (), lambda tensors, raw: raw)


def _with_gradient(op: Op, grad: _Step, given: tuple[str, ...], saving: Op | None) -> tuple[Call, Call]:
    """Forward and backward, wired by names as :class:`cute_ops.Op` describes; ``saving``: the op that the forward runs
    to save more.

    Both run in every training step, so where each tensor goes is worked out here and they only index: loops in them
    cost 1 us and 3 us.
    """
    ran = saving or op
    single, count, taken = len(ran.outputs) == 1, len(given), len(given) + len(op.scalars)
    inputs, outputs = _places(given, grad.inputs), _places(ran.outputs, grad.inputs)
    # What a backward has: saved inputs and outputs, cotangents, and at last None for all else.
    values = [*(given[k] for k in inputs), *(list(ran.outputs)[k] for k in outputs), *(f"d{n}" for n in op.outputs)]
    arguments = _take([values.index(name) if name in values else len(values) for name in grad.inputs])
    results = _gradients(op, grad, given)
    gradient, attributes, resolve = grad.run, grad.attributes, grad.resolve
    prepare, absent = _Cotangents(op, grad.inputs), _absent_without(op, given)
    read, required = prepare.read, prepare.required
    mark, nothing = _marker(op, given), (None,) * (1 + taken)
    shown = len(op.outputs)
    saved, alone = _take([*inputs, *(taken + k for k in outputs)]), len(grad.outputs) == 1
    composed = op.program is not None
    thin = [inputs.index(k) for k in inputs if given[k] in grad.shapes]
    numbers, has_numbers = _take([count + list(op.scalars).index(n) for n in grad.scalars]), bool(grad.scalars)

    # `save_for_backward` and `set_materialize_grads` assign these attributes and do nothing else.
    def forward(ctx: Any, run: Call, *args: Any) -> Any:
        out = run(*args)
        if composed:
            out = _own(out, args) if single else (*[_own(t, args) for t in out[:shown]], *out[shown:])
        made = (out,) if single else out
        if has_numbers:
            ctx.numbers = numbers(args)
        kept = saved(args + made)
        ctx.to_save = _thinned(kept, thin) if thin else kept
        ctx.materialize_grads = False
        if required:
            ctx.required = [(made[k].shape, made[k].dtype) for k in required]
        if mark is not None:
            mark(ctx, args, made)
        return (made[0] if shown == 1 else made[:shown]) if saving else out

    def forward_of_inputs(ctx: Any, run: Call, *tensors: Any) -> Any:
        ctx.to_save = tensors
        ctx.materialize_grads = False
        out = run(*tensors)
        if composed:
            return _own(out, tensors) if single else tuple([_own(t, tensors) for t in out])
        return out

    def backward(ctx: Any, *cotangents: Any) -> Any:
        missing: Collection[int] = ()
        for k, place, merged, may_miss in read:
            cotangent = cotangents[k]
            if cotangent is None:
                unread = not may_miss
            else:
                unread = (place and cotangent.stride()[place] != (1,)) or (merged and not cotangent.is_contiguous())
            if unread:
                missing = [at for k, places in absent.items() if cotangents[k] is None for at in places]
                cotangents = prepare(ctx, cotangents)
                if not cotangents:
                    return nothing
                break
        found = arguments((*ctx.saved_tensors, *cotangents, None))
        raw = gradient(*found, *attributes, *(ctx.numbers if has_numbers else ()))
        gradients = results((*resolve(found, (raw,) if alone else raw), *cotangents, None))
        return tuple([None if at in missing else d for at, d in enumerate(gradients)]) if missing else gradients

    only_inputs = len(inputs) == count and not (outputs or required or mark or op.scalars or thin)
    return forward_of_inputs if only_inputs else forward, backward


def _absent_without(op: Op, given: Sequence[str]) -> dict[int, list[int]]:
    """By the place of each output's cotangent, where in a backward's results gradients are that are None without it."""
    sums = {name: t.zero_without for step in op.steps for name, t in step.outputs.items() if t.zero_without}
    return {
        k: [at for at, name in enumerate(given, 1) if sums.get(f"d{name}") == f"d{output}"]
        for k, output in enumerate(op.outputs)
        if f"d{output}" in sums.values()
    }


def _thinned(kept: Sequence[Any], places: Sequence[int]) -> tuple[Any, ...]:
    """The tensors that a node saves, with tensors of little memory in these places."""
    found, plain = list(kept), not transforms_active()
    for place in places:
        found[place] = _shape_of(found[place], plain)
    return tuple(found)


def _own(out: torch.Tensor | None, args: Sequence[Any]) -> torch.Tensor | None:
    """Detach a result of a program that is a view of what the program has made. Torch forbids in-place writes to a view
    that a node returns.
    """
    if out is None or not out._is_view() or type(out) not in EXACT or out.requires_grad:  # of an outer level
        return out
    given = [a for a in args if isinstance(a, torch.Tensor)]
    return out if any(out._base is a or out._base is a._base for a in given) else out.detach()


def _places(names: Iterable[str], wanted: Container[str]) -> list[int]:
    return [k for k, name in enumerate(names) if name in wanted]


def _gradients(op: Op, grad: _Step, given: tuple[str, ...]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Takes gradients of all arguments from what is computed, cotangents that are handed on, and None."""
    handed = {f"d{name}": f"d{output}" for name, output in op.handed_on.items()}
    sources = [*grad.outputs, *(f"d{name}" for name in op.outputs), None]
    gradients = [sources.index(d if (d := handed.get(f"d{n}", f"d{n}")) in sources else None) for n in given]
    # `run`, the first argument, has none, nor have scalars, the last ones.
    return _take([len(sources) - 1, *gradients, *[len(sources) - 1] * len(op.scalars)])


def _shape_of(tensor: torch.Tensor, plain: bool) -> torch.Tensor:
    """A tensor of the same shape in the memory of one row, which the other's changes do not concern. Its last dim is
    contiguous: kernels copy what they cannot read, even if they do not read it. ``plain``: nothing transforms calls.
    """
    if plain and tensor.ndim == 1 and type(tensor) in EXACT and tensor.is_contiguous():
        return tensor.data  # is one row; to allocate another takes ten times as long
    strides = (*[0] * (tensor.ndim - 1), *[1] * (tensor.ndim > 0))
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)


def _take(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """``take(values)``: the tuple of the values at these places."""
    if len(places) > 1:
        return itemgetter(*places)
    (place,) = places or (None,)
    return (lambda values: ()) if place is None else (lambda values: (values[place],))


class _Cotangents:
    """Makes cotangents what the backward can read, which has these inputs.

    Attributes:
        read: the places of those that it reads, where in their strides a 1 is expected, whether their rows must be one
            stride apart, and whether they may be None while others are not.
        required: the places of those that it needs. A backward with one cotangent runs only if that is there.
    """

    def __init__(self, op: Op, inputs: Mapping[str, Tensor]) -> None:
        declared = [inputs.get(f"d{name}") for name in op.outputs]
        required = [k for k, t in enumerate(declared) if t and not t.optional]
        self.read = [(k, _first_place(t), t.merged, t.optional and bool(required)) for k, t in enumerate(declared) if t]
        self.declared = [(k, t) for k, t in enumerate(declared) if t]
        self.required = [] if len(declared) == 1 else required

    def __call__(self, ctx: Any, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
        """The cotangents, contiguous, with zeros for those that are required; empty where all are None."""
        some = next((d for d in cotangents if d is not None), None)
        if some is None:
            return ()
        made = list(cotangents)
        for i, k in enumerate(self.required):
            if made[k] is None:
                shape, dtype = ctx.required[i]
                made[k] = some.new_zeros(shape, dtype=dtype)
        for k, tensor in self.declared:
            if made[k] is not None:
                made[k] = readable(tensor, made[k])
        return tuple(made)


def _first_place(declared: Tensor) -> slice | None:
    """The slice of a cotangent's strides with the dim that should be contiguous; None if none need be."""
    if not declared.axes:
        return None
    place = declared.axes[0]
    # Which of leading dims it is depends on their sizes: then no place is surely right.
    return slice(place, place + 1 or None) if place >= -len(declared.dims) else slice(0)


def _marker(op: Op, given: tuple[str, ...]) -> Call | None:
    """``mark(ctx, inputs, results)``: absent, shared and hidden outputs have no gradient. None where there are none."""
    declared = op.outputs.values()
    if not any(t.given or t.same_as or t.hidden for t in declared):
        return None
    resolve = resolver(op)

    def mark(ctx: Any, tensors: tuple[Any, ...], results: tuple[Any, ...]) -> None:
        there = dict(zip(given, tensors, strict=False))  # scalars follow
        real = resolve([there.get(name) for name in op.inputs], results)
        idle = [r for r, used, t in zip(results, real, declared, strict=True) if r is not used or t.hidden]
        ctx.mark_non_differentiable(*idle)

    return mark


def _without_gradient(op: Op, given: tuple[str, ...]) -> tuple[Call, Call]:
    """Forward, and a backward that raises. Backward ops are such ops: there is no double backward."""

    def forward(ctx: Any, run: Call, *args: Any) -> Any:
        there = dict(zip(given, args, strict=False))
        ctx.given = arrays(op, [there.get(name) for name in op.inputs])
        return run(*args)

    def backward(ctx: Any, *cotangents: Any) -> Any:
        wanted = dict(zip(given, ctx.needs_input_grad[1:], strict=False))
        gradients = no_gradients(op, ctx.given, cotangents, [wanted.get(name, False) for name in op.inputs])
        found = [g for name, g in zip(op.inputs, gradients, strict=True) if name in given]
        return None, *found, *[None for _ in op.scalars]

    return forward, backward
