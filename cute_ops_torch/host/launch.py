"""The CUDA implementation of an op: bind and plan a call once, then look it up."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cute_ops.autotune import choices, dispatch
from cute_ops.constants import of_attributes
from cute_ops.declaration.binding import Binding, bind
from cute_ops.declaration.messages import naming
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import Array
from cute_ops.jit import cache, loader, target
from cute_ops.jit.layout import Memory
from cute_ops.jit.plan import Plan, Signature
from cute_ops_torch.host import compiled_call
from cute_ops_torch.host.compiled_call import NO_COPIERS, CompiledCall, KernelCall, Run
from cute_ops_torch.host.guards import GuardedCalls, Link, guarded, kinds
from cute_ops_torch.library.copies import kept
from cute_ops_torch.library.mutation import check_memory
from cute_ops_torch.library.remembered import remembered
from cute_ops_torch.library.schema import filler, parameters
from cute_ops_torch.library.tensors import Tensors, bind_tensors, check_strides, memory

NOTHING: Mapping[str, torch.Tensor] = {}
COMPACT = torch.contiguous_format
# Kernels whose modules are on a device, by symbol and device.
_on_devices: dict[tuple[str, int], Run] = {}


class Launcher:
    """One op on CUDA tensors.

    Attributes:
        calls: the planned calls by all that binding and planning depend on.
        launch: ``launch(*inputs, *attributes, *scalars)`` returns new outputs; trailing arguments may be left out.
        into: ``into(*inputs, *attributes, *scalars, *outputs)`` fills compact outputs that are 16-byte aligned. Where
            the caller gives None it makes them, and returns a tuple of these, None for absent ones; None where all
            are absent.
    """

    def __init__(self, op: Op) -> None:
        self.op = op
        self.calls: dict[tuple[Any, ...], CompiledCall] = {}
        self._fill_defaults = filler(op)
        self._launches = GuardedCalls(op, lambda *args: self._specialize(self._launches, *self._fill_defaults(args)))
        self._fills = GuardedCalls(op, lambda *args: self._specialize(self._fills, *args))
        self.launch, self.into = self._launches.call(), self._fills.call()

    def write(self, tensors: Tensors, attrs: Sequence[Any], outputs: Mapping[str, torch.Tensor]) -> None:
        """Fill outputs that lie anywhere; those that the kernel cannot write there it writes elsewhere first."""
        fresh = {n: torch.empty_like(t, memory_format=COMPACT) for n, t in outputs.items() if not self._writable(n, t)}
        filled = {**outputs, **fresh}
        if all(map(_compact, filled.values())):
            self.into(*tensors, *attrs, *map(filled.get, self.op.outputs))
        else:
            call = self.find(tensors, attrs, filled)
            given = [t for t in (*tensors, *filled.values()) if t is not None]
            call.fill(tuple(filled))(*given, *attrs[len(self.op.attrs) :])
        for name, made in fresh.items():
            outputs[name].copy_(made)
        torch.autograd.graph.increment_version(tuple(outputs.values()))

    def _writable(self, name: str, out: torch.Tensor) -> bool:
        """Whether the kernel writes an output where it lies."""
        declared = self.op.outputs[name]
        if declared.contiguous is None:
            return _compact(out)
        place = declared.contiguous_axis(out.shape, out.stride())
        merged = not declared.merged or declared.is_merged(out.shape, out.stride())
        return merged and (not declared.axes or place is not None)

    def find(
        self, tensors: Tensors, attrs: Sequence[Any], outputs: Mapping[str, torch.Tensor] = NOTHING
    ) -> CompiledCall:
        """The planned call, of any value of the scalars; plans it the first time. ``outputs`` are those that are not
        compact and 16-byte aligned, or all.
        """
        if self.op.mutates:
            check_memory(self.op, tensors)
        # Kernels are compiled for an alignment of at most 16 bytes.
        places = [
            None if t is None else (t.dtype, t.shape, t.stride(), t.get_device(), t.data_ptr() & 15)
            for t in (*tensors, *outputs.values())
        ]
        constants = len(self.op.attrs)
        key = (*places, *outputs, of_attributes(attrs[:constants]), *map(type, attrs[constants:]), kept.forward)
        return remembered(self.calls, key, lambda: prepare(self.op, tensors, attrs, outputs))

    def _specialize(self, calls: GuardedCalls, *args: Any) -> Any:
        """Run a call, and add a guarded one for others like it.

        CUDA brings a kernel's code to the device at the kernel's first launch, and Python may collect garbage before
        it. Either may do what a capture in the default mode forbids, and break it.
        """
        if not args[0].is_cuda:
            return self._run_first(calls, *args)
        with target.relaxed_capture():
            return self._run_first(calls, *args)

    def _run_first(self, calls: GuardedCalls, *args: Any) -> Any:
        op, fills = self.op, calls is self._fills
        arity, count = len(op.inputs), len(op.inputs) + len(op.keywords)
        tensors, attrs, outputs = args[:arity], args[arity:count], args[count:]
        call = self.find(tensors, attrs)
        variables = [f"_out{k}" for k, _ in enumerate(outputs)]
        given = [n for n, t in zip((*op.inputs, *variables), (*tensors, *outputs), strict=True) if t is not None]
        wanted = tuple(name for name, out in zip(op.outputs, outputs, strict=False) if out is not None)
        run = call.fill(wanted) if fills else call.run

        def guard() -> Link:
            arguments = ", ".join((*op.inputs, *op.keywords, *variables))
            absent = [f"{name} is {'not ' if name in given else ''}None" for name in variables]
            return guarded(
                op, tensors, attrs, absent, {"_run": run}, parameters=arguments if fills else parameters(op),
                arguments=arguments, result=f"_run({', '.join((*given, *op.scalars))})",
            )  # fmt: skip

        calls.put(tensors, (call, kinds(tensors), wanted), guard)
        return run(*[t for t in (*tensors, *outputs) if t is not None], *attrs[len(op.attrs) :])


def _compact(tensor: torch.Tensor) -> bool:
    """Whether any kernel writes an output there."""
    return tensor.is_contiguous() and not tensor.data_ptr() & 15


def prepare(
    op: Op, tensors: Tensors, attrs: Sequence[Any], outputs: Mapping[str, torch.Tensor] = NOTHING
) -> CompiledCall:
    """Bind, plan and load: once for all calls like this one."""
    binding = bind_tensors(op, tensors, attrs)
    check_strides(binding, tensors)
    places = memory(op, tensors) | {name: Memory(t.stride(), t.data_ptr()) for name, t in outputs.items()}
    if binding.empty or op.program:
        return compiled_call.of_reference(binding)
    device = next(t.device for t in tensors if t is not None)
    index = device.index or 0
    on = index if device.type == "cuda" else None
    with naming(op, binding.inputs, binding.dims, binding.dtypes):
        arch = target.of_device(index)
    measures = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
    copies = dispatch.realigned(binding, places, arch, reads=2 if kept.forward else 1, measures=measures)
    lying = {name: places[name] for name in copies}
    places |= {name: Memory(strides) for name, strides in copies.items()}

    def kernel() -> CompiledCall:
        chosen = dispatch.choose(binding, places, arch, on)
        copiers = {name: _copier(binding.inputs[name], lying[name], s, device) for name, s in copies.items()}
        return planned_call(binding, chosen._replace(copies={**chosen.copies, **copies}), device, copiers)

    unmeasured = dispatch.to_measure(binding, places, arch)
    if unmeasured is not None and measures:
        _measure(unmeasured, kernel(), tensors)
    program = dispatch.fallback(binding, places, arch)
    if program is not None:
        return compiled_call.of_program(binding, program)
    return compiled_call.on_device(kernel(), device) if torch.cuda.device_count() > 1 else kernel()


def _measure(call: Signature, kernel: CompiledCall, tensors: Tensors) -> None:
    """Measure a call by our kernel and by the program that stands in for it, and keep the result."""
    from cute_ops_torch.host.sampler import alternately  # start-up time: few programs measure

    other = call.binding.op.fallback
    assert other is not None
    program = compiled_call.of_program(call.binding, other.program)
    ours, theirs = alternately([kernel.run, program.run], [t for t in tensors if t is not None])
    choices.keep(call.binding.op, call, choices.Times(ours, theirs))


def _copier(array: Array | None, lies: Memory, strides: tuple[int, ...], device: torch.device) -> Run:
    """``copy(x, out)`` of a matrix, and of one that lies transposed; one kernel serves all lengths of rows."""
    from cute_ops.ops.gemm.row_copy import row_copy  # where rows have to be copied

    assert array is not None
    op, turned = row_copy(), strides[-1] != 1
    if turned:
        array, strides = array._replace(shape=array.shape[::-1]), strides[::-1]
        lies = lies._replace(strides=lies.strides[::-1])
    binding, index = bind(op, {"x": array}), device.index or 0
    on = index if device.type == "cuda" else None
    chosen = dispatch.choose(binding, {"x": lies, "out": Memory(strides)}, target.of_device(index), on, fixed=False)
    copy = KernelCall(binding, chosen, _loaded(chosen, device), device).fill(("out",))
    return (lambda x, out: copy(x.T, out.T)) if turned else copy


def planned_call(
    binding: Binding, chosen: Plan, device: torch.device, copiers: Mapping[str, Run] = NO_COPIERS
) -> CompiledCall:
    """The call of a plan, compiled and loaded."""
    written = KernelCall(binding, chosen, _loaded(chosen, device), device, copiers)
    return CompiledCall(written.run(), functools.cache(written.fill))


def _loaded(chosen: Plan, device: torch.device) -> Run:
    """The compiled kernel with its module on the device: a first call may come while a CUDA graph is captured."""
    kernel = cache.get(chosen.variant)
    key = (chosen.variant.symbol, device.index or 0)
    # Every new number of rows comes here, though most run a kernel that is on the device already.
    if device.type == "cuda" and _on_devices.get(key) is not kernel:
        loader.preload(kernel, chosen.variant, key[1])
        _on_devices[key] = kernel
    return kernel
