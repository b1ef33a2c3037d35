"""The declared reference on torch tensors: the CPU implementation, and the fake kernel. Composites run a program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cute_ops.autotune.dispatch import fallback
from cute_ops.declaration.binding import Binding, as_outputs, check_returned
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops_torch.library import program as programs
from cute_ops_torch.library.mutation import check_memory, write_back
from cute_ops_torch.library.schema import filler
from cute_ops_torch.library.tensors import Tensors, absent_dtype, array, bind_tensors, check_strides


def cpu_kernel(op: Op) -> Callable[..., Any]:
    """The CPU implementation: checks a call exactly as on a GPU, then runs the reference."""
    fill, arity = filler(op), len(op.inputs)

    def run(*args: Any) -> Any:
        args = fill(args)
        tensors, attrs = args[:arity], args[arity:]
        binding = bind_tensors(op, tensors, attrs)
        check_strides(binding, tensors, addresses=True)
        check_memory(op, tensors)
        return run_reference(binding, tensors, None if binding.empty else fallback(binding, {}, None))

    return run


def implement(
    library: torch.library.Library, name: str, kernels: Mapping[str, Callable[..., Any]], returns: bool
) -> None:
    """Give an op its kernels, by dispatch key, ``"Fake"`` among them; ``returns`` says whether it has outputs."""
    for key, kernel in kernels.items():
        run = kernel if returns else _returning_none(kernel)
        if key == "Fake":
            register_fake(library, name, run)
        else:
            library.impl(name, run, key)


def _returning_none(kernel: Callable[..., Any]) -> Callable[..., None]:
    """A kernel of an op without outputs, as the dispatcher takes it: it returns None, not an empty tuple."""

    def call(*args: Any) -> None:
        kernel(*args)

    return call


def register_fake(library: torch.library.Library, name: str, fake: Callable[..., Any]) -> None:
    """``torch.library.register_fake`` of an op that ``library`` has just defined.

    Torch's own searches all loaded modules for the caller's file at every call, which took a third of our import. It is
    the fallback for versions that keep fake kernels elsewhere than torch 2.11 to 2.13.
    """
    qualified = f"{library.ns}::{name}"
    try:
        entry = torch._library.simple_registry.singleton.find(qualified)
        library._registration_handles.append(entry.fake_impl.register(fake, f"{__name__}: {qualified}", lib=library))
    except (AttributeError, TypeError):
        torch.library.register_fake(qualified, fake, lib=library)


def fake_kernel(op: Op, on_trace: Callable[[], None]) -> Callable[..., Any]:
    """The fake kernel: outputs with shapes and dtypes only. Sizes may be symbolic. ``on_trace`` is called first."""
    fill, arity = filler(op), len(op.inputs)

    def fake(*args: Any) -> Any:
        on_trace()
        args = fill(args)
        # Attributes are compile-time constants: a symbolic one is pinned to its value here. A scalar's is not needed.
        tensors, attrs = args[:arity], [float(a) if isinstance(a, torch.SymFloat) else a for a in args[arity:]]
        named = zip(op.keywords.items(), attrs, strict=True)
        attrs = [d if n in op.scalars and isinstance(a, torch.SymInt) else a for (n, d), a in named]
        binding = bind_tensors(op, tensors, attrs)
        if not _inductor_runs():
            check_strides(binding, tensors)
        like = next(t for t in tensors if t is not None)
        outputs = []
        for name, declared in op.outputs.items():
            out = binding.outputs[name]
            shape = (0,) if out is None else out.shape
            dtype = absent_dtype(binding, declared) if out is None else getattr(torch, out.dtype)
            model = tensors[list(op.inputs).index(declared.strided_like)] if declared.strided_like else None
            made = like.new_empty(shape, dtype=dtype) if model is None else torch.empty_like(model)
            outputs.append(made)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return fake


def _inductor_runs() -> bool:
    """Whether Inductor compiles a graph: tensors that a backward reads lie as its own forward laid them out, and the
    lowering of an op sees to it that its inputs lie as they must.
    """
    virtualized = sys.modules.get("torch._inductor.virtualized")
    return virtualized is not None and not isinstance(virtualized.V.debug, virtualized.NullHandler)


def traced_reference(op: Op, *args: Any, **kwargs: Any) -> Any:
    """The reference of a call that a compiler traces, as the raw op returns it."""
    default = {**dict.fromkeys(op.inputs), **op.keywords}
    given = {**default, **dict(zip(default, args, strict=False)), **kwargs}
    tensors, attrs = [given[name] for name in op.inputs], {name: given[name] for name in op.keywords}
    like = next(t for t in tensors if t is not None)
    binding = bind_tensors(op, tensors, list(attrs.values()))
    outputs: list[Any] = []
    for (name, declared), result in zip(op.outputs.items(), _results(binding, tensors), strict=True):
        if binding.outputs[name] is None:
            result = like.new_empty((0,), dtype=absent_dtype(binding, declared))
        # An output may not be an input, nor another output.
        taken = any(result is other for other in (*tensors, *outputs))
        outputs.append(result.clone() if taken else result.contiguous())
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def run_reference(
    binding: Binding, tensors: Tensors, program: Program | None = None, call: Callable[..., Any] = programs.call
) -> Any:
    """The outputs of the reference, or a program, as the raw op returns them, new and compact; mutates inputs. A
    program runs other ops by ``call``.
    """
    op = binding.op
    taken = {t.untyped_storage().data_ptr() for t in tensors if t is not None}
    results: list[Any] = []
    for (name, declared), result in zip(op.results.items(), _results(binding, tensors, program, call), strict=True):
        if binding.results[name] is None:
            like = next(t for t in tensors if t is not None)
            result = like.new_empty((0,), dtype=absent_dtype(binding, declared))
        result = result if declared.strided_like else result.contiguous()
        place = result.untyped_storage().data_ptr()
        if place in taken:
            result = result.clone()  # torch forbids outputs that share memory with an input or each other
        elif result.numel():
            taken.add(place)
        results.append(result)
    outputs = write_back(op, tensors, results)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _results(
    binding: Binding, tensors: Tensors, program: Program | None = None, call: Callable[..., Any] = programs.call
) -> tuple[Any, ...]:
    """The results of the op's program or of its fallback, or else of the reference; None where absent.

    Raises:
        TypeError: it is not what the op declares.
    """
    if (program := program or binding.op.program) is not None:
        results = programs.run(program, binding, tensors, call)
    else:
        from array_api_compat import torch as xp  # lazily: a call on a GPU does not need it

        with torch._C._DisableAutocast():  # products would round their operands
            results = as_outputs(binding.op, binding.op.reference(xp, *tensors, **binding.attrs))
    check_returned(binding, results, array)
    return results
