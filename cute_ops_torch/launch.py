"""The CUDA implementation: plan once, then allocate and call.

Host time is the point of this module. Everything about a call that binding and planning look at is in its
key; a call whose key was seen does nothing but build the key, allocate the outputs and call the compiled
function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache as cache_forever
from itertools import compress
from typing import Any, NamedTuple

import torch

from cute_ops import cache, target
from cute_ops.binding import Binding
from cute_ops.op import Op
from cute_ops.plan import Plan, View, plan
from cute_ops_torch.reference import run_reference
from cute_ops_torch.schema import parameters
from cute_ops_torch.tensors import DTYPES, Tensors, absent_dtype, bind_tensors, check_strides, memory

# Problems remembered per op; the oldest leaves first. Forgetting one costs a bind and a plan, no compile.
REMEMBERED = 4096

Run = Callable[..., Any]


class Ready(NamedTuple):
    """A planned problem: ``run(*inputs)`` allocates its outputs, ``into(inputs, outputs)`` fills given ones."""

    run: Run
    into: Run


# Written out per op, as dataclasses write their methods: a loop over the arguments costs a third of a microsecond.
# Kernels are compiled for an alignment of at most 16 bytes.
_PLACE = "({0}.dtype, {0}.shape, {0}.stride(), {0}.get_device(), {0}.data_ptr() & 15)"
_SOURCE = """
def launch({parameters}):
    _key = ({key},)
    _ready = _get(_key)
    if _ready is None:
        _ready = _prepare(_key, ({tensors},), ({attrs}))
    return _ready.run({tensors})
"""


class Launcher(NamedTuple):
    """One op on CUDA tensors.

    Attributes:
        launch: ``launch(*inputs, *attributes)``, with the declaration's defaults; returns new outputs.
        into: ``into(*inputs, *attributes, outputs)`` fills compact, 16-byte aligned outputs; no defaults.
        ready: what is remembered, by key.
    """

    launch: Run
    into: Run
    ready: dict[tuple[Any, ...], Ready]


def launcher(op: Op) -> Launcher:
    """The CUDA implementation of an op."""
    ready: dict[tuple[Any, ...], Ready] = {}

    def remember(key: tuple[Any, ...], tensors: Tensors, attrs: Sequence[Any]) -> Ready:
        made = prepare(op, tensors, attrs)
        while len(ready) >= REMEMBERED:
            ready.pop(next(iter(ready)), None)
        ready[key] = made
        return made

    places = [
        f"None if {name} is None else {_PLACE.format(name)}" if t.optional else _PLACE.format(name)
        for name, t in op.inputs.items()
    ]
    source = _SOURCE.format(
        parameters=parameters(op), key=", ".join((*places, *op.attrs)), tensors=", ".join(op.inputs),
        attrs="".join(f"{name}, " for name in op.attrs),
    )  # fmt: skip
    space: dict[str, Any] = {"_get": ready.get, "_prepare": remember}
    exec(compile(source, f"<cute_ops_torch launch {op.name}>", "exec"), space)
    arity = len(op.inputs)

    def into(*args: Any) -> None:
        tensors, attrs, outputs = args[:arity], args[arity:-1], args[-1]
        places = [
            None if t is None else (t.dtype, t.shape, t.stride(), t.get_device(), t.data_ptr() & 15) for t in tensors
        ]
        key = (*places, *attrs)
        (ready.get(key) or remember(key, tensors, attrs)).into(tensors, outputs)

    return Launcher(space["launch"], into, ready)


def prepare(op: Op, tensors: Tensors, attrs: Sequence[Any]) -> Ready:
    """All the checking and planning for calls like this one."""
    binding = bind_tensors(op, tensors, attrs)
    check_strides(binding, tensors)
    if binding.empty:
        return _nothing_to_launch(binding)
    device = next(t.device for t in tensors if t is not None)
    chosen = plan(binding, memory(op, tensors), target.of_device(device.index or 0))
    ready = _ready(binding, chosen, cache.get(chosen.variant), tensors, device)
    if torch.cuda.device_count() > 1:
        ready = Ready(_on_device(ready.run, device), _on_device(ready.into, device))
    return ready


def _nothing_to_launch(binding: Binding) -> Ready:
    """Kernels cannot be launched on nothing; the reference knows what a sum over no rows is."""

    def run(*tensors: Any) -> Any:
        return run_reference(binding, tensors)

    def into(tensors: Tensors, outputs: Sequence[torch.Tensor]) -> None:
        result = run(*tensors)
        for out, value in zip(outputs, result if isinstance(result, tuple) else (result,), strict=True):
            out.copy_(value)

    return Ready(run, into)


def _ready(binding: Binding, chosen: Plan, function: Run, tensors: Tensors, device: torch.device) -> Ready:
    op = binding.op
    present = [t is not None for t in tensors]
    shown = [binding.outputs[name] is not None for name in op.outputs]
    allocate = _allocators(binding, tensors, device)
    scratch = [(array.shape, DTYPES[array.dtype]) for array in chosen.workspaces.values()]
    input_views = [chosen.views.get(name) for name in compress(op.inputs, present)]
    output_views = [chosen.views.get(name) for name in compress(op.outputs, shown)]
    viewed = bool(chosen.views)

    def into(tensors: Tensors, outputs: Sequence[torch.Tensor]) -> None:
        inputs, written = compress(tensors, present), compress(outputs, shown)
        workspaces = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in scratch]
        if viewed:
            function(*map(_view, inputs, input_views), *map(_view, written, output_views), *workspaces)
        else:
            function(*inputs, *written, *workspaces)

    def run_many(*tensors: Any) -> tuple[torch.Tensor, ...]:
        outputs = tuple([new(tensors) for new in allocate])
        into(tensors, outputs)
        return outputs

    if len(allocate) > 1:
        return Ready(run_many, into)
    new = allocate[0]

    def run_one(*tensors: Any) -> torch.Tensor:
        out = new(tensors)
        into(tensors, (out,))
        return out

    twin = _twin(binding, tensors, next(iter(op.outputs)))
    plain = twin is not None and not viewed and not scratch
    return Ready(_direct(tuple(op.inputs), tuple(present), twin)(function) if plain else run_one, into)


_DIRECT = """
def make(_function):
    def run({inputs}):
        _out = _empty_like({twin})
        _function({given}, _out)
        return _out
    return run
"""


@cache_forever
def _direct(names: tuple[str, ...], present: tuple[bool, ...], twin: int) -> Callable[[Run], Run]:
    """``run`` of an op with one output like input ``twin``, with nothing left to loop over: the common case."""
    source = _DIRECT.format(inputs=", ".join(names), twin=names[twin], given=", ".join(compress(names, present)))
    # `empty_like` takes half the host time of `empty` with its three arguments.
    space: dict[str, Any] = {"_empty_like": torch.empty_like}
    exec(compile(source, f"<cute_ops_torch run {', '.join(compress(names, present))}>", "exec"), space)
    return space["make"]


def _view(tensor: Any, view: View | None) -> Any:
    return tensor if view is None else tensor.as_strided(view.shape, view.strides)


def _allocators(binding: Binding, tensors: Tensors, device: torch.device) -> list[Callable[[Any], torch.Tensor]]:
    """One function per output: the inputs -> a new tensor, empty where the output is absent."""
    made = []
    for name, declared in binding.op.outputs.items():
        array = binding.outputs[name]
        twin = _twin(binding, tensors, name)
        if twin is not None:
            made.append(_like(twin))
        elif array is None:
            made.append(_new((0,), absent_dtype(binding, declared), device))
        else:
            made.append(_new(tuple(array.shape), DTYPES[array.dtype], device))
    return made


def _twin(binding: Binding, tensors: Tensors, output: str) -> int | None:
    """The first input that an output is like: shape, dtype, compact."""
    array = binding.outputs[output]
    if array is None:
        return None
    for i, t in enumerate(tensors):
        if t is not None and t.shape == tuple(array.shape) and t.dtype == DTYPES[array.dtype] and t.is_contiguous():
            return i
    return None


def _like(index: int) -> Callable[[Any], torch.Tensor]:
    empty_like = torch.empty_like
    return lambda tensors: empty_like(tensors[index])


def _new(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[Any], torch.Tensor]:
    return lambda tensors: torch.empty(shape, dtype=dtype, device=device)


def _on_device(run: Run, device: torch.device) -> Run:
    """Runs with the tensors' device current, which the stream and the loaded module go by."""
    current = torch.cuda.current_device

    def guarded(*args: Any) -> Any:
        if current() == device.index:
            return run(*args)
        with torch.cuda.device(device):
            return run(*args)

    return guarded
