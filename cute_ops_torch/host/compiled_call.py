"""A planned call as Python functions: allocate the outputs, call the compiled kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from cute_ops.declaration.binding import Binding
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.shapes import Array
from cute_ops.jit.layout import compact
from cute_ops.jit.plan import Plan
from cute_ops_torch.host import codegen
from cute_ops_torch.host.recorded import placed, recorded
from cute_ops_torch.library import products
from cute_ops_torch.library import program as programs
from cute_ops_torch.library.copies import copied
from cute_ops_torch.library.reference import run_reference
from cute_ops_torch.library.tensors import DTYPES, absent_dtype

Run = Callable[..., Any]
NO_COPIERS: Mapping[str, Run] = MappingProxyType({})


class CompiledCall(NamedTuple):
    """A planned call. Nothing is left to decide or to loop over when it runs.

    Attributes:
        run: ``run(*inputs, *scalars)`` takes the inputs that are not None, allocates the outputs and returns them.
        fill: ``fill(wanted)`` makes ``call(*inputs, *outputs, *scalars)``, which takes outputs of these names to write
            to, allocates the others and returns those, None for what is absent.
        unobserved: a shorter ``run`` for calls while autocast is off and no mode is active; None where there is none.
        anywhere: whether tensors may lie at any address, since torch's own function reads them.
        differentiable: whether both are functions of torch, which its autograd differentiates.
    """

    run: Run
    fill: Callable[[tuple[str, ...]], Run]
    unobserved: Run | None = None
    anywhere: bool = False
    differentiable: bool = False


class KernelCall:
    """Writes the source of a kernel's calls. Its arguments are those of the variant that are there.

    Attributes:
        inputs: names of the inputs that are there.
        written: names of those that the kernel writes.
        scalars: names of the numbers that it takes.
        outputs: variable and array by name of the output, None where it is absent.
        copiers: ``copy(x, out)`` by name of the input that is copied first; torch copies the others.
    """

    def __init__(
        self, binding: Binding, chosen: Plan, kernel: Run, device: torch.device, copiers: Mapping[str, Run] = NO_COPIERS
    ) -> None:
        self.binding, self.chosen, self.kernel, self.copiers = binding, chosen, kernel, copiers
        # Inductor's allocator: a third of the host time of `torch.empty`.
        self.new = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}")
        self.inputs = [name for name, array in binding.inputs.items() if array is not None]
        self.written = [name for name in binding.op.mutates if name in self.inputs]
        self.scalars = list(binding.op.scalars)
        self.outputs = {name: (f"_out{k}", array) for k, (name, array) in enumerate(binding.outputs.items())}

    def run(self) -> Run:
        outputs = ", ".join(variable for variable, _ in self.outputs.values()) or "()"
        return self._make("run", [*self.inputs, *self.scalars], tuple(self.outputs), outputs)

    def fill(self, wanted: tuple[str, ...]) -> Run:
        present = tuple(name for name, (_, array) in self.outputs.items() if array is not None)
        chosen = self.chosen
        if wanted == present and not (chosen.views or chosen.workspaces or chosen.copies or self.written):
            return self.kernel
        parameters = [*self.inputs, *(self.outputs[name][0] for name in wanted), *self.scalars]
        others = [name for name in self.outputs if name not in wanted]
        returned = "".join(f"{self.outputs[name][0] if name in present else None}, " for name in others)
        return self._make("fill", parameters, tuple(name for name in others if name in present), f"({returned})")

    def _make(self, name: str, parameters: list[str], allocated: tuple[str, ...], returned: str) -> Run:
        values: dict[str, Any] = {"_kernel": self.kernel, "_new": self.new, "_placed": placed}
        arrays = {variable: array for variable, array in self.outputs.values() if array is not None}
        arguments = [self._view(n, n, values) for n in self.inputs]
        arguments += [self._view(v, n, values) for n, (v, _) in self.outputs.items() if v in arrays]
        allocations = [self._new_output(output, values) for output in allocated]
        for n, strides in self.chosen.copies.items():
            array = self.binding.inputs[n]
            assert array is not None
            if n not in self.copiers:
                allocations.append(_new(n, array.shape, DTYPES[array.dtype], values, strides) + f".copy_({n})")
                continue
            values |= {"_copied": copied, f"_copy_{n}": self._copies(n, array, strides)}
            allocations.append(f"{n} = _copied({n}, _copy_{n})")
        for k, array in enumerate(self.chosen.workspaces.values()):
            allocations.append(_new(f"_work{k}", tuple(array.shape), DTYPES[array.dtype], values))
            arguments.append(f"_work{k}")
        arguments += [self._view(n, n, values) for n in self.written]
        finish = ""
        if self.written:
            values["_increment_version"] = torch.autograd.graph.increment_version
            finish = f"        _increment_version(({', '.join(self.written)},))\n"
        make = codegen.maker(
            codegen.KERNEL_CALL, f"{self.binding.op.name}.{name}", values, name=name, parameters=", ".join(parameters),
            allocations="".join(f"        {line}\n" for line in allocations), finish=finish,
            arguments=", ".join([*arguments, *self.scalars]), outputs=returned,
        )  # fmt: skip
        made: Run = make(**values)
        return made

    def _copies(self, name: str, array: Array, strides: tuple[int, ...]) -> Run:
        """``copy(x)`` of an input, with these strides."""
        copy, new, dtype, shape = self.copiers[name], self.new, DTYPES[array.dtype], array.shape

        def made(x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = new(shape, strides, dtype)
            copy(x, out)
            return out

        return made

    def _new_output(self, name: str, values: dict[str, Any]) -> str:
        variable, array = self.outputs[name]
        if array is None:  # torch's schemas know no absent output: an empty tensor stands for it
            return _new(variable, (0,), absent_dtype(self.binding, self.binding.op.outputs[name]), values)
        return _new(variable, tuple(array.shape), DTYPES[array.dtype], values)

    def _view(self, variable: str, name: str, values: dict[str, Any]) -> str:
        """Source of a tensor as the kernel takes it."""
        view = self.chosen.views.get(name)
        if view is None:
            return variable
        values[f"_size_{variable}"], values[f"_stride_{variable}"] = view.shape, view.strides
        return f"_placed({variable}, _size_{variable}, _stride_{variable})"


def _new(
    variable: str, shape: tuple[int, ...], dtype: torch.dtype, values: dict[str, Any], strides: Sequence[int] = ()
) -> str:
    """Source that allocates a tensor, a compact one by default."""
    values |= {f"_shape{variable}": shape, f"_strides{variable}": strides or compact(shape), f"_dtype{variable}": dtype}
    return f"{variable} = _new(_shape{variable}, _strides{variable}, _dtype{variable})"


def of_reference(binding: Binding, program: Program | None = None) -> CompiledCall:
    """A call by the reference, or a program: no kernel can be launched on an empty input or output."""
    names = [*(name for name, array in binding.inputs.items() if array is not None), *binding.op.scalars]

    def run(*given: Any) -> Any:
        there, call = dict(zip(names, given, strict=True)), binding
        if numbers := {name: there[name] for name in binding.op.scalars}:
            call = binding._replace(attrs={**binding.attrs, **numbers})
        return run_reference(call, [there.get(name) for name in binding.inputs], program)

    fill, repeats = partial(_copying, binding, run), program or binding.op.program
    if repeats is None or binding.empty or binding.op.mutates or binding.op.scalars:
        return CompiledCall(run, fill)
    return CompiledCall(run, fill, recorded(binding, repeats, run))


def _copying(binding: Binding, run: Run, wanted: tuple[str, ...]) -> Run:
    """``fill(wanted)`` of a call that makes all outputs: copies them to those that are given."""
    inputs, scalars = [name for name, array in binding.inputs.items() if array is not None], binding.op.scalars

    def call(*args: Any) -> tuple[Any, ...]:
        there = dict(zip((*inputs, *wanted, *scalars), args, strict=True))
        result = run(*(there[name] for name in (*inputs, *scalars)))
        made = dict(zip(binding.outputs, result if isinstance(result, tuple) else (result,), strict=True))
        for name in wanted:
            there[name].copy_(made[name])
        return tuple(out for name, out in made.items() if name not in wanted)

    return call


def of_program(binding: Binding, program: Program) -> CompiledCall:
    """The call of a program that runs in place of a kernel. Torch's functions, and ours, make a device current."""
    product = program.product
    if product is None:
        return of_reference(binding, program)
    (a, b, *_), bias = binding.inputs.values(), binding.inputs.get(product.bias)
    assert a is not None and b is not None  # no input of a product is optional
    multiply, alone = products.multiplier(product, a, b), not program.ops or products.adds_bias(product, a, bias)
    if not alone:
        multiply = _then(multiply, binding, program.ops[0], product.read_as)
    run = products.without_autocast(multiply)
    into = products.multiplies_into(product, a, b, bias is not None) if alone else None

    def fill(wanted: tuple[str, ...]) -> Run:
        copying = _copying(binding, run, wanted)
        return products.without_autocast(products.writing(into, copying)) if into and wanted else copying

    return CompiledCall(run, cache(fill), multiply, True, alone)


def _then(multiply: Run, binding: Binding, after: Op, read_as: str) -> Run:
    """A product, and an op that reads it and the op's other inputs."""
    (_, weight, *operands), attrs = binding.inputs, tuple(binding.attrs[name] for name in after.keywords)
    raw, saves = programs.functions[after](False), read_as in binding.outputs
    reads_weight = weight in after.inputs  # its dtype
    assert list(after.inputs) == [read_as, *operands, *([weight] if reads_weight else [])]

    def run(x: Any, weight: Any, *others: Any) -> Any:
        product = multiply(x, weight)
        made = raw(product, *others, weight, *attrs) if reads_weight else raw(product, *others, *attrs)
        if not saves:
            return made
        return (*made, product) if isinstance(made, tuple) else (made, product)

    return run


def on_device(call: CompiledCall, device: torch.device) -> CompiledCall:
    """A call with the tensors' device current: stream and loaded module depend on it."""
    current = torch.cuda.current_device

    def guarded(run: Run) -> Run:
        def on(*args: Any) -> Any:
            if current() == device.index:
                return run(*args)
            with torch.cuda.device(device):
                return run(*args)

        return on

    return CompiledCall(guarded(call.run), cache(lambda wanted: guarded(call.fill(wanted))))
