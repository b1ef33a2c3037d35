"""The lowering of ops: Inductor's code calls them past the dispatcher, with outputs in its own buffers.

Inductor's own out variant takes one output. Here one node calls the kernel, and a node for each output allocates its
buffer before. Ahead-of-time code runs without Python, so it takes the fallback, which calls ``torch.ops``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import config as inductor
from torch._inductor import ir, lowering
from torch._inductor.select_algorithm import extern_kernels
from torch._inductor.utils import convert_shape_to_inductor
from torch._inductor.virtualized import V
from torch.compiler import config

from cute_ops.autotune import choices
from cute_ops.declaration.op import Op
from cute_ops.declaration.tensor import Tensor
from cute_ops_torch.host.call_site import CallSite, any_call, call_site
from cute_ops_torch.host.launch import Launcher
from cute_ops_torch.inductor import cache_key, tied_weight
from cute_ops_torch.inductor.ahead import compile_ahead
from cute_ops_torch.inductor.fusion_choice import asked_for, decomposed
from cute_ops_torch.library import products  # noqa: F401  # defines ops
from cute_ops_torch.library.known_recipes import registering
from cute_ops_torch.library.schema import defaults


def register_lowering(op: Op, overload: Any, launcher: Launcher) -> None:
    """Register the lowering of an op."""
    _mark_caches(op)
    if op.mutates or op.scalars:
        # Inductor's own call of ``torch.ops`` knows what is written, and takes numbers that are symbolic.
        leave_to_torch(overload, op)
        return
    arity, names, tail = len(op.inputs), (*op.inputs, *op.attrs), defaults(op)
    default = dict(zip(names[len(names) - len(tail) :], tail, strict=True))
    fallback = lowering.fallback_handler(overload, add_to_fallback_set=False)
    # With the namespace's length my.ops_norm and my_ops.norm have different names.
    stem, length = f"{overload.namespace}_{overload._opname}", len(overload.namespace)
    kernels = {device: f"{stem}_{device}{length}" for device in ("cuda", "cpu")}
    # Inductor's code calls these once for each place that calls the op, and keeps the functions that they return.
    setattr(extern_kernels, kernels["cuda"], lambda *place: call_site(op, CallSite(*place), launcher))
    by_overload = _by_overload(overload, len(names))
    setattr(extern_kernels, kernels["cpu"], lambda *place: any_call(op, CallSite(*place), by_overload))

    @lowering.register_lowering(overload, type_promotion_kind=None)
    def lower(*args: Any, **kwargs: Any) -> Any:
        given = {**default, **dict(zip(names, args, strict=False)), **kwargs}
        args = tuple(given[name] for name in names)
        tensors, attrs = args[:arity], args[arity:]
        values = V.graph.current_node.meta["val"]
        values = values if isinstance(values, tuple) else (values,)
        device = values[0].device
        constant = all(isinstance(a, (int, float, str)) for a in attrs)
        if V.graph.cpp_wrapper or V.aot_compilation or not constant or device.type not in kernels:
            return fallback(*args)
        other = _fused_by_inductor(op, overload, args, device)
        if other is not None:
            return other
        compile_ahead(op, V.graph.current_node)
        given = {n: (t, declared) for (n, declared), t in zip(op.inputs.items(), tensors, strict=True) if t is not None}
        kernel = f"extern_kernels.{kernels[device.type]}"
        call = _Call(device, kernel, given, [_literal(a) for a in attrs], list(op.outputs))
        call.registering = registering(op)
        call.outputs = [_Output(_layout(value), call, k) for k, value in enumerate(values)]
        outputs = tuple(ir.TensorBox.create(output) for output in call.outputs)
        return outputs if len(outputs) > 1 else outputs[0]


def leave_to_torch(overload: Any, op: Op | None = None) -> None:
    """Have an op called through ``torch.ops``; of one of ours the kernels are compiled meanwhile.

    Inductor does so with every op that it finds without a lowering; but torch 2.11 first writes down what the op's
    arguments are computed from, which takes twice as long with each layer of a model.
    """
    lowering.make_fallback(overload, lowering.constrain_to_fake_tensors, warn=False)
    if op is None:
        return
    _mark_caches(op)
    called = lowering.lowerings[overload]

    @lowering.register_lowering(overload, type_promotion_kind=None)
    def lower(*args: Any, **kwargs: Any) -> Any:
        if not (V.graph.cpp_wrapper or V.aot_compilation):
            compile_ahead(op, V.graph.current_node)
        return called(*args, **kwargs)


def _register_functions() -> None:
    """Lowerings of ops that are functions of torch. A backward that owns a gradient scales it in place, as eager does:
    a factor of one then moves no byte.
    """
    ops = torch.ops.cute
    leave_to_torch(ops.scaled_gradient.default)
    leave_to_torch(ops.scaled_gradient_.default)
    leave_to_torch(ops.input_gradients.default)
    anew, in_place = (lowering.lowerings[each] for each in (ops.scaled_gradient.default, ops.scaled_gradient_.default))

    @lowering.register_lowering(ops.scaled_gradient.default, type_promotion_kind=None)
    def lower(gradient: Any, dloss: Any) -> Any:
        if not _is_given_away(gradient):
            return anew(gradient, dloss)
        in_place(gradient, dloss)
        return gradient

    tied_weight.register(leave_to_torch)


def _is_given_away(tensor: Any) -> bool:
    """Whether a tensor of a backward graph is one that autograd gives it, and that only the present node reads.

    CUDA graphs refuse backwards that write to what they did not allocate.
    """
    if V.graph.cpp_wrapper or V.aot_compilation or inductor.triton.cudagraphs:
        return False
    whole = isinstance(tensor, ir.TensorBox) and isinstance(tensor.data, ir.StorageBox)
    alone = len(V.graph.current_node.all_input_nodes[0].users) == 1
    return whole and alone and isinstance(tensor.data.data, ir.DonatedBuffer)


_register_functions()


def _fused_by_inductor(op: Op, overload: Any, args: Sequence[Any], device: torch.device) -> Any:
    """The op as Inductor's own code where ``max-autotune`` finds it faster, else None. The reference of a product
    multiplies in float32, so a product's first call measures the framework's product instead.
    """
    if not asked_for(device):
        return None
    if op.fallback is None:
        return decomposed(op, overload, V.graph.current_node, args)
    choices.ask(op)
    return None


def _mark_caches(op: Op) -> None:
    """Keep torch from using graphs that it compiled with another state of this package or of an op's declaration."""
    declared = "" if op.program else cache_key.of_op(op)  # code calls a program through torch, which finds it by name
    for tag in (f"cute_ops {cache_key.package()[:32]}", f"{op.name} {declared[:32]}" if declared else ""):
        if tag not in config.cache_key_tag:
            config.cache_key_tag = f"{config.cache_key_tag} {tag}".strip()


def _by_overload(overload: Any, arity: int) -> Callable[..., None]:
    """The stand-in for :attr:`Launcher.into` on a CPU."""

    def into(*args: Any) -> None:
        made = overload(*args[:arity])
        for out, value in zip(args[arity:], made if isinstance(made, tuple) else (made,), strict=True):
            if out is not None:
                out.copy_(value)

    return into


class _Call(ir.ExternKernelAlloc):
    """The call of a kernel with its inputs and a buffer for each output that is read.

    It goes through a :mod:`call site <cute_ops_torch.host.call_site>` of its own, whose key holds the symbols in the
    inputs' sizes and strides.

    Attributes:
        registering: the statement that makes the op, for code that another process takes from a cache.
    """

    registering = ""

    def __init__(
        self,
        device: torch.device,
        kernel: str,
        given: dict[str, tuple[Any, Tensor]],
        attrs: Sequence[str],
        names: Sequence[str],
    ) -> None:
        inputs = [_realize(t, declared) for t, declared in given.values()]
        super().__init__(ir.MultiOutputLayout(device=device), inputs, python_kernel_name=kernel)
        self.given, self.attrs, self.names = tuple(given), attrs, names

    def codegen(self, wrapper: Any) -> None:
        self.codegen_comment(wrapper)
        wanted = {
            name: output for name, output in zip(self.names, self.outputs, strict=True)
            if output.get_name() not in V.graph.removed_buffers
        }  # fmt: skip
        for output in wanted.values():
            wrapper.codegen_allocation(output)
        inputs: Any = self.inputs
        tensors = [t.codegen_reference() for t in inputs]
        symbols = [wrapper.codegen_python_sizevar(s) for s in sorted(self._symbols(), key=str)]
        key = [f"({', '.join(symbols)})"] if symbols[1:] else symbols
        arguments = ", ".join([*key, *tensors, *(output.get_name() for output in wanted.values())])
        wrapper.writeline(f"{self.get_name()} = {self._site(wrapper, tuple(wanted), bool(symbols))}({arguments})")

    def _site(self, wrapper: Any, wanted: tuple[str, ...], sized: bool) -> str:
        """The name of the call site's function, which Inductor's module makes when it is imported."""
        attrs = "".join(f"{a}, " for a in self.attrs)
        inputs: Any = self.inputs
        anywhere = tuple(name for name, t in zip(self.given, inputs, strict=True) if not _allocated(t))
        kernel = f"{self.get_kernel_name()}({self.given}, ({attrs}), {wanted}, {anywhere}, {sized})"
        like = [(t.get_device(), t.get_dtype(), *map(_simplified, (t.get_size(), t.get_stride()))) for t in inputs]
        # Named by a digest of all that its calls have in common: several graphs in a module may name tensors alike.
        digest = hashlib.sha256(f"{kernel} {like}".encode()).hexdigest()[:16]
        name = f"{self.get_kernel_name().removeprefix('extern_kernels.')}_{digest}"
        while hasattr(wrapper, "parent_wrapper"):
            wrapper = wrapper.parent_wrapper
        known = wrapper.__dict__.setdefault("_cute_sites", set())
        if name not in known:
            known.add(name)
            if self.registering and self.registering not in known:
                known.add(self.registering)
                wrapper.imports.writeline(self.registering)
            wrapper.imports.writeline(f"{name} = {kernel}")
        return name

    def _symbols(self) -> set[Any]:
        inputs: Any = self.inputs
        return {
            s for t in inputs for sizes in (t.get_size(), t.get_stride()) for e in _simplified(sizes)
            for s in e.free_symbols
        }  # fmt: skip

    def get_free_symbol_uses(self, unbacked_only: bool = False) -> Any:
        found = super().get_free_symbol_uses(unbacked_only)
        return found if unbacked_only else found | self._symbols()


def _allocated(tensor: Any) -> bool:
    """Whether Inductor allocates a tensor, and so aligns it: no input, no view, no part of another."""
    own = isinstance(tensor, ir.Buffer) and tensor.should_allocate()
    # A backward may reuse the memory of inputs that autograd donates to it.
    inherited = V.graph.bw_donated_idxs and V.graph.unaligned_buffers
    layout = tensor.get_layout()
    return own and isinstance(layout, ir.FixedLayout) and layout.offset == 0 and not inherited


def _simplified(sizes: Sequence[Any]) -> list[Any]:
    return [V.graph.sizevars.simplify(e) for e in sizes]


class _Output(ir.MultiOutput):
    """A buffer that :class:`_Call` fills, which Inductor's memory planning knows."""

    def __init__(self, layout: ir.FixedLayout, call: _Call, index: int) -> None:
        super().__init__(layout, call, [(tuple, index)], skip_size_stride_alignment_checks=True)

    def should_allocate(self) -> bool:
        return True

    def codegen(self, wrapper: Any) -> None:
        """Writes nothing: the call fills the buffer."""

    def get_free_symbol_uses(self, unbacked_only: bool = False) -> Any:
        return super().get_free_symbol_uses(unbacked_only) | self.layout.get_free_symbol_uses(unbacked_only)


def _layout(value: torch.Tensor) -> ir.FixedLayout:
    return ir.FixedLayout(
        device=value.device,
        dtype=value.dtype,
        size=convert_shape_to_inductor(value.shape),
        stride=convert_shape_to_inductor(value.stride()),
    )


def _literal(value: Any) -> str:
    """An attribute as Python source, also infinities and NaN, which have no literal."""
    return f"float('{value}')" if isinstance(value, float) and repr(value) in ("inf", "-inf", "nan") else repr(value)


def _realize(tensor: Any, declared: Tensor) -> Any:
    """A buffer in memory that lies as an input demands."""
    buffer = ir.ExternKernel.realize_input(tensor)
    if not declared.axes:
        return buffer
    strides = buffer.get_stride()
    if any(place >= -len(strides) and strides[place] == 1 for place in declared.axes):
        return buffer
    order = declared.memory_order(len(strides), declared.axes[0])[::-1]  # from the contiguous dim on
    return ir.ExternKernel.require_stride_order(buffer, [order.index(dim) for dim in range(len(strides))])
