"""The CUDA implementation: plan once, then allocate and call.

Host time is the point of this module. Everything about a call that binding and planning look at is in its
key; a call whose key was seen does nothing but build the key, allocate the outputs and call the compiled
function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from cute_ops import dispatch
from cute_ops.binding import Binding
from cute_ops.jit import cache, loader, target
from cute_ops.jit.layout import View, compact
from cute_ops.jit.plan import Plan
from cute_ops.op import Op
from cute_ops_torch.host.guards import Kinds, guarded, kinds
from cute_ops_torch.library.reference import run_reference
from cute_ops_torch.library.schema import define, parameters
from cute_ops_torch.library.tensors import DTYPES, Tensors, absent_dtype, bind_tensors, check_strides, memory

# Problems remembered per op; the oldest leaves first. Forgetting one costs a bind and a plan, no compile.
REMEMBERED = 4096
# Inductor's allocator: a third of the host time of `torch.empty`.
_new_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda")  # noqa: B009 (stubs do not know it)


def make_room(most: int, *tables: dict[Any, Any]) -> None:
    """For one more entry in each; other threads may take entries, too."""
    for table in tables:
        while len(table) >= most:
            table.pop(next(iter(table)), None)


Run = Callable[..., Any]
# What has been loaded, by symbol and device.
_on_devices: dict[tuple[str, int], Run] = {}


class Ready(NamedTuple):
    """A planned problem.

    Attributes:
        run: ``run(*inputs)`` allocates the outputs and returns them.
        into: ``into(*inputs, *outputs)`` fills given ones.
        bare: the compiled function, where that is all of ``into``.
    """

    run: Run
    into: Run
    bare: Bare | None = None


class Bare(NamedTuple):
    """``function(*inputs, *outputs)`` takes the inputs that are there and the outputs of these names."""

    function: Run
    outputs: tuple[str, ...]


# Kernels are compiled for an alignment of at most 16 bytes.
_PLACE = "({0}.dtype, {0}.shape, {0}.stride(), {0}.get_device(), {0}.data_ptr() & 15)"
_SOURCE = """
def _find({arguments}):
    _key = ({key},)
    return _get(_key) or _prepare(_key, ({tensors},), ({attrs}))

def launch({parameters}):
    return _find({arguments}).run({tensors})

def into({arguments}, {outputs}):
    _last.get({lead}.shape, _learn)({arguments}, {outputs})

def _learn({arguments}, {outputs}):
    _ready = _find({arguments})
    _kind = ({kinds},)
    _last[{lead}.shape] = _made((_ready, _kind)) or _make(_ready, _kind, ({tensors},), ({attrs}))
    _ready.into({tensors}, {outputs})
"""


_SITE = """
def make(_into, _get, _learn, {values}):
    _known = None
    def _whole(_fill):
        return lambda {given}, {wanted}: _fill({tensors}, {outputs})
    def site({key}{given}, {wanted}):
        nonlocal _known
        if {otherwise}:
            _into({tensors}, {attributes}{outputs})
        else:
            _fill = {find}
            _fill({given}, {wanted})
    return site
"""


class Launcher(NamedTuple):
    """One op on CUDA tensors.

    Attributes:
        launch: ``launch(*inputs, *attributes)``, with the declaration's defaults; returns new outputs.
        into: ``into(*inputs, *attributes, *outputs)`` fills compact, 16-byte aligned outputs; no defaults. An output
            that nobody wants is None.
        find: ``find(*inputs, *attributes)``, the planned problem; no defaults.
        ready: what is remembered, by key.
    """

    launch: Run
    into: Run
    find: Callable[..., Ready]
    ready: dict[tuple[Any, ...], Ready]


def launcher(op: Op) -> Launcher:
    """The CUDA implementation of an op."""
    ready: dict[tuple[Any, ...], Ready] = {}
    last: dict[Any, Run] = {}
    made: dict[Any, Run] = {}
    outputs = _numbered("out", op.outputs)

    def prepared(key: tuple[Any, ...], tensors: Tensors, attrs: Sequence[Any]) -> Ready:
        one = prepare(op, tensors, attrs)
        make_room(REMEMBERED, ready)
        ready[key] = one
        return one

    def make(one: Ready, kind: Kinds, tensors: Tensors, attrs: Sequence[Any]) -> Run:
        make_room(REMEMBERED, last, made)
        arguments, results = ", ".join((*op.inputs, *op.attrs)), ", ".join(outputs)
        texts = {
            "parameters": f"{arguments}, {results}", "arguments": f"{arguments}, {results}",
            "result": f"_into({', '.join(op.inputs)}, {results})",
        }  # fmt: skip
        call = made[(one, kind)] = guarded(op, tensors, attrs, texts, _into=one.into)(space["_learn"])
        return call

    places = [
        f"None if {name} is None else {_PLACE.format(name)}" if t.optional else _PLACE.format(name)
        for name, t in op.inputs.items()
    ]
    source = _SOURCE.format(
        parameters=parameters(op), key=", ".join((*places, *op.attrs)), tensors=", ".join(op.inputs),
        lead=next(iter(op.inputs)),
        attrs="".join(f"{name}, " for name in op.attrs), arguments=", ".join((*op.inputs, *op.attrs)),
        outputs=", ".join(outputs),
        kinds=kinds(op),
    )  # fmt: skip
    space = define(
        source, f"launch {op.name}", _get=ready.get, _prepare=prepared, _last=last, _made=made.get, _make=make
    )
    return Launcher(space["launch"], space["into"], space["_find"], ready)


class Site(NamedTuple):
    """What is known of one place in a compiled program: all its calls have it in common.

    Attributes:
        given: names of the inputs that are there.
        attrs: all attributes.
        wanted: names of the outputs that are read.
        anywhere: names of the inputs that may lie at any address.
        sized: whether sizes differ; a key of them is the first argument then.
    """

    given: tuple[str, ...]
    attrs: tuple[Any, ...]
    wanted: tuple[str, ...]
    anywhere: tuple[str, ...]
    sized: bool


def site(op: Op, place: Site, into: Run, find: Callable[..., Ready] | None) -> Run:
    """``into`` for one place in a compiled program: ``call(*key, *given inputs, *wanted outputs)``.

    What calls from there have in common is not looked at again.

    Args:
        op: the declaration.
        place: the place.
        into: the launcher's.
        find: the launcher's; None where ``into`` itself looks a call up faster than this could.
    """
    ready: dict[Any, Run] = {}

    def learn(key: Any, whole: Callable[[Run], Run], *tensors: Any) -> Run:
        assert find is not None
        make_room(REMEMBERED, ready)
        _, fill, bare = find(*tensors, *place.attrs)
        made = ready[key] = bare.function if bare and bare.outputs == place.wanted else whole(fill)
        return made

    names = _numbered("out", op.outputs)
    outs = [out if name in place.wanted else "None" for out, name in zip(names, op.outputs, strict=True)]
    tensors = ", ".join(name if name in place.given else "None" for name in op.inputs)
    values = {f"_given_{name}": value for name, value in zip(op.attrs, place.attrs, strict=True)}
    pointers = " | ".join(f"{name}.data_ptr()" for name in place.anywhere)
    source = _SITE.format(
        values=", ".join(values), attributes="".join(f"{value}, " for value in values), given=", ".join(place.given),
        tensors=tensors, wanted=", ".join(out for out in outs if out != "None"), outputs=", ".join(outs),
        key="_key, " if place.sized else "",
        otherwise="True" if find is None else f"({pointers}) & 15" if pointers else "False",
        find=f"_get(_key) or _learn(_key, _whole, {tensors})" if place.sized
        else f"_known = _known or _learn(None, _whole, {tensors})",
    )  # fmt: skip
    return _maker(source)(into, ready.get, learn, **values)  # type: ignore[no-any-return]


def prepare(op: Op, tensors: Tensors, attrs: Sequence[Any]) -> Ready:
    """All the checking and planning for calls like this one."""
    binding = bind_tensors(op, tensors, attrs)
    check_strides(binding, tensors)
    if binding.empty:
        return _nothing_to_launch(binding)
    device = next(t.device for t in tensors if t is not None)
    ready = ready_to_run(binding, _plan(binding, tensors, device), tensors)
    if torch.cuda.device_count() > 1:
        bare = ready.bare and ready.bare._replace(function=_on_device(ready.bare.function, device))
        ready = Ready(_on_device(ready.run, device), _on_device(ready.into, device), bare)
    return ready


def ready_to_run(binding: Binding, chosen: Plan, tensors: Tensors) -> Ready:
    """A plan of calls with tensors like these, compiled and loaded."""
    device = next(t.device for t in tensors if t is not None)
    return _ready(binding, chosen, _loaded(chosen, device), tensors, device)


def _plan(binding: Binding, tensors: Tensors, device: torch.device) -> Plan:
    index = device.index or 0
    on = index if device.type == "cuda" else None
    where = dispatch.target_of(binding, partial(target.of_device, index))
    return dispatch.choose(binding, memory(binding.op, tensors), where, on)


def _loaded(chosen: Plan, device: torch.device) -> Run:
    """The compiled function, its module on the device: a first call may come while a CUDA graph is captured."""
    function = cache.get(chosen.variant)
    key = (chosen.variant.symbol, device.index or 0)
    # Every new problem comes here, with a new number of rows for one; most of them run what is on the device already.
    if device.type == "cuda" and _on_devices.get(key) is not function:
        loader.preload(function, chosen.variant, key[1])
        _on_devices[key] = function
    return function


def _nothing_to_launch(binding: Binding) -> Ready:
    """Kernels cannot be launched on nothing; the reference knows what a sum over no rows is."""
    arity = len(binding.op.inputs)

    def run(*tensors: Any) -> Any:
        return run_reference(binding, tensors)

    def into(*tensors: Any) -> None:
        result = run(*tensors[:arity])
        for out, value in zip(tensors[arity:], result if isinstance(result, tuple) else (result,), strict=True):
            if out is not None:
                out.copy_(value)

    return Ready(run, into)


def _ready(binding: Binding, chosen: Plan, function: Run, tensors: Tensors, device: torch.device) -> Ready:
    """A planned problem as two functions with nothing left to decide or to loop over."""
    op = binding.op
    made, values = [], {"_function": function, "_as_strided": torch.as_strided}
    given = []
    for name, tensor in zip(op.inputs, tensors, strict=True):
        if tensor is not None:
            given.append(_viewed(name, name, chosen.views, values))
    outs = _numbered("out", op.outputs)
    for out, (name, declared) in zip(outs, op.outputs.items(), strict=True):
        array = binding.outputs[name]
        shape, dtype = ((0,), absent_dtype(binding, declared)) if array is None else (array.shape, DTYPES[array.dtype])
        made.append(_new(out, tuple(shape), dtype, device, values))
    written = [out for out, name in zip(outs, op.outputs, strict=True) if binding.outputs[name] is not None]
    given += [
        _viewed(out, name, chosen.views, values) for out, name in zip(outs, op.outputs, strict=True) if out in written
    ]
    scratch = _numbered("work", chosen.workspaces)
    for work, array in zip(scratch, chosen.workspaces.values(), strict=True):
        given.append(f"({_new(work, tuple(array.shape), DTYPES[array.dtype], device, values)})")
    source = _READY.format(
        values=", ".join(values), inputs=", ".join(op.inputs), outputs=", ".join(outs), given=", ".join(given),
        make="".join(f"        {out} = {new}\n" for out, new in zip(outs, made, strict=True)),
        replace="".join(
            f"        if {out} is None:\n            {out} = {new}\n"
            for out, new in zip(outs, made, strict=True) if out in written
        ),
    )  # fmt: skip
    run, into = _maker(source)(**values)
    present = tuple(name for name, array in binding.outputs.items() if array is not None)
    return Ready(run, into, None if chosen.views or scratch else Bare(function, present))


_READY = """
def make({values}):
    def run({inputs}):
{make}        _function({given})
        return {outputs}
    def into({inputs}, {outputs}):
{replace}        _function({given})
    return run, into
"""


@lru_cache(1024)
def _maker(source: str) -> Callable[..., Any]:
    return define(source, "ready")["make"]


def _numbered(stem: str, names: Iterable[str]) -> list[str]:
    """Names that no argument has: arguments do not start with an underscore."""
    return [f"_{stem}{k}" for k, _ in enumerate(names)]


def _viewed(variable: str, name: str, views: Mapping[str, View], values: dict[str, Any]) -> str:
    view = views.get(name)
    if view is None:
        return variable
    values[f"_size_{variable}"], values[f"_stride_{variable}"] = view.shape, view.strides
    return f"_as_strided({variable}, _size_{variable}, _stride_{variable})"


def _new(
    variable: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, values: dict[str, Any]
) -> str:
    """The expression of a new compact tensor."""
    values |= {f"_shape{variable}": shape, f"_dtype{variable}": dtype}
    if device.type == "cuda":
        values |= {f"_strides{variable}": compact(shape), "_new": _new_cuda}
        return f"_new(_shape{variable}, _strides{variable}, _dtype{variable})"
    values |= {"_new": torch.empty, "_device": device}
    return f"_new(_shape{variable}, dtype=_dtype{variable}, device=_device)"


def _on_device(run: Run, device: torch.device) -> Run:
    """Runs with the tensors' device current, which the stream and the loaded module go by."""
    current = torch.cuda.current_device

    def guarded(*args: Any) -> Any:
        if current() == device.index:
            return run(*args)
        with torch.cuda.device(device):
            return run(*args)

    return guarded
