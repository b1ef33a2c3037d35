"""Binding: checks the arguments of a call against the declaration and finds dims, dtypes and output shapes.

It needs shapes and dtype names only, so fake kernels, abstract evaluation and real calls share it. Dims may be symbolic
(torch ``SymInt``, JAX symbolic dims): they are compared, computed with and passed on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cute_ops.declaration.dims import Dim
from cute_ops.declaration.messages import message, wrong_attribute
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import Array
from cute_ops.declaration.tensor import Tensor
from cute_ops.errors import meant, shown

INT64 = 2**63
# What to do with float64, which NumPy and `jax_enable_x64` make by default, and with floats too wide for an op.
_CAST = " Kernels compute in float32: cast `{name}` to it, or take the framework's own function where float64 matters."
_NARROW = " Its kernels take floats of 16 bits: cast `{name}` to one of these, or take the framework's own function."
# An argument, one of its dims, and the size that it came with.
Declared = tuple[str, Dim, Any]


class Binding(NamedTuple):
    """A checked call of an op.

    Attributes:
        dims: sizes by dim name; leading dims as a tuple.
        dtypes: dtype names by variable, and by attribute that names an output's dtype.
        attrs: all attributes and scalars by name.
        inputs: the arguments, None where absent.
        outputs: the arrays to produce, None where absent.
        results: what the reference returns: the inputs that are mutated, then the outputs.
    """

    op: Op
    dims: Mapping[str, Any]
    dtypes: Mapping[str, str]
    attrs: Mapping[str, Any]
    inputs: Mapping[str, Array | None]
    outputs: Mapping[str, Array | None]
    results: Mapping[str, Array | None]

    @property
    def rows(self) -> Any:
        """The product of the leading dims that count as rows."""
        return math.prod(self.dims.get(self.leading, ()))

    @property
    def leading(self) -> str:
        """The name of the leading dims that count as rows, the outputs' if there are several names; empty if there are
        no leading dims.
        """
        tensors = (*self.op.results.values(), *self.op.inputs.values())
        return next((t.rows for t in tensors if t.rows and t.rows in self.dims), "")

    @property
    def result_names(self) -> list[str]:
        """The names of the results that are present."""
        return [name for name, array in self.results.items() if array is not None]

    @property
    def empty(self) -> bool:
        """Whether an input or an output has no element: no kernel takes such a call, so the reference runs."""
        return any(0 in a.shape for a in (*self.inputs.values(), *self.outputs.values()) if a is not None)

    @property
    def dtype_without_kernel(self) -> str | None:
        """The first dtype of the call that no kernel takes, only the program of ``op.fallback``; None without one."""
        wide = self.op.fallback.dtypes if self.op.fallback else {}
        return next((self.dtypes[v] for v, names in wide.items() if self.dtypes.get(v) in names), None)

    def shape(self, tensor: Tensor) -> tuple[Any, ...]:
        return tensor.of(self.dims)

    def dtype(self, tensor: Tensor) -> str:
        return self.dtypes.get(tensor.dtype, tensor.dtype)


def bind(op: Op, inputs: Mapping[str, Array | None], attrs: Mapping[str, Any] | None = None) -> Binding:
    """Check a call against its declaration.

    Raises:
        TypeError: unknown or missing argument, wrong dtype, wrong attribute type.
        ValueError: shapes that do not fit together, a failed check of the op.
    """
    if op.numbers:
        raise TypeError(f"cute.{op.name}: it has lists of tensors, so its `unrolled` op is called")
    call = _Call(op, inputs)
    if unknown := inputs.keys() - op.inputs.keys():
        raise call.error(TypeError, f"unknown argument {_unknown(unknown, op.inputs)}; it takes {_quoted(op.inputs)}.")
    call.bind_inputs()
    call.check_together()
    values = call.attributes(attrs or {})
    dims, dtypes, absent = call.dims, call.dtypes, call.absent_outputs(values)
    binding = Binding(op, dims, dtypes, values, call.inputs, {}, {})
    if problem := op.check(binding):
        raise call.error(ValueError, problem)
    constants = {name: values[name] for name in op.attrs}
    dims |= {name: size(dims, constants) for name, size in op.derived.items()}
    outputs: dict[str, Array | None] = {}
    for name, tensor in op.outputs.items():
        for dim in () if name in absent else tensor.dims:
            if not dim.name and (wrong := dim.wrong(dims)):
                raise call.error(ValueError, f"output `{name}` has {dim}, but {dim.bound(dims)}: expected {wrong}.")
        outputs[name] = None if name in absent else Array(tensor.of(dims), dtypes.get(tensor.dtype, tensor.dtype))
    results = {**{name: call.inputs[name] for name in op.mutates}, **outputs}
    return Binding(op, dims, dtypes, values, call.inputs, outputs, results)


class _Call:
    """A call that is checked: its inputs by name, and the dims and dtypes that are bound so far."""

    def __init__(self, op: Op, inputs: Mapping[str, Array | None]) -> None:
        self.op, self.inputs = op, {name: inputs.get(name) for name in op.inputs}
        self.dims: dict[str, Any] = {}
        self.dtypes: dict[str, str] = {}
        self._binds: dict[str, str] = {}  # the argument that binds a dtype variable

    def error(self, kind: type[Exception], problem: str) -> Exception:
        return kind(message(self.op, problem, self.inputs, self.dims, self.dtypes))

    def bind_inputs(self) -> None:
        later: list[Declared] = []
        for name, tensor in self.op.inputs.items():
            array = self.inputs[name]
            if array is not None:
                self._bind_dtype(name, tensor, array.dtype)
                later += self._bind_dims(name, tensor, tuple(array.shape))
            elif not tensor.optional:
                raise self.error(TypeError, f"argument `{name}` is required, but None was given.")
        for name, dim, size in self._bind_expressions(later) if later else ():
            free = next(n for n in dim.names if n not in self.dims)
            raise self.error(ValueError, f"argument `{name}` has {dim}={size}, from which {free} does not follow.")

    def _bind_dtype(self, name: str, tensor: Tensor, dtype: str) -> None:
        choices = self.op.accepts.get(tensor.dtype, (tensor.dtype,))
        problem = ""
        if dtype not in choices:
            problem = f"expected {_one_of(choices)}.{_advice(dtype, choices).format(name=name)}"
        elif tensor.dtype in self.op.dtypes:
            first, other = self.dtypes.setdefault(tensor.dtype, dtype), self._binds.setdefault(tensor.dtype, name)
            problem = "" if first == dtype else f"but {tensor.dtype}={first} from `{other}`."
        if problem:
            raise self.error(TypeError, f"argument `{name}` has dtype {dtype}, {problem}")

    def _bind_dims(self, name: str, tensor: Tensor, shape: tuple[Any, ...]) -> list[Declared]:
        """Check an argument's dims and bind names; returns the dims that cannot be checked before other arguments."""
        names, dims = tensor.dims, self.dims
        lead = len(shape) - len(names)
        if lead < 0 or (tensor.rows is None and lead):
            least = "at least " if tensor.rows else ""
            problem = f"has {len(shape)} dims, expected {least}{len(names)}: {tensor.declared}."
            raise self.error(ValueError, f"argument `{name}` {problem}")
        if tensor.rows is not None and not tensor.broadcast:
            first = dims.setdefault(tensor.rows, shape[:lead])
            if len(first) != lead or any(a != b for a, b in zip(first, shape, strict=False)):
                problem = f"has leading dims {shape[:lead]}, but *{tensor.rows}={first}."
                raise self.error(ValueError, f"argument `{name}` {problem}")
        expressions = []
        for dim, size in zip(names, shape[lead:], strict=True):
            if not dim.name:
                expressions.append((name, dim, size))
            elif size != (first := dims.setdefault(dim.name, size)):
                raise self.error(ValueError, f"argument `{name}` has {dim}={size}, but {dim.name}={first}.")
        return self._bind_expressions(expressions) if expressions else expressions

    def _bind_expressions(self, sizes: list[Declared]) -> list[Declared]:
        """Check dims that are expressions and bind what follows from them; returns those that cannot be checked yet."""
        while later := [each for each in sizes if not self._bind_expression(*each)]:
            if len(later) == len(sizes):
                break
            sizes = later
        return later

    def _bind_expression(self, name: str, dim: Dim, size: Any) -> bool:
        """Check a dim whose names all have sizes, or bind the one that has none; False if neither is possible yet."""
        dims = self.dims
        expected = dim.of(dims)
        if expected is not None:
            wrong = dim.wrong(dims)
            if wrong or size != expected:
                has = f"{dim}={size}, but {dim.bound(dims)}" if dim.names else f"a dim of {size}, expected {dim}"
                raise self.error(ValueError, f"argument `{name}` has {has}{wrong and f': expected {wrong}'}.")
            return True
        free = dim.binds(dims)
        try:
            found = dim.solve(size, dims) if free else None
        except ValueError as error:
            raise self.error(ValueError, f"argument `{name}` has {dim}={size}, expected {error}.") from None
        if found is not None:
            dims[free] = found
        return found is not None

    def check_together(self) -> None:
        """Check inputs that come in pairs, and those that broadcast; all inputs must be bound."""
        for name, tensor in self.op.inputs.items():
            array = self.inputs[name]
            if tensor.given and (array is None) != (self.inputs[tensor.given] is None):
                present, missing = (tensor.given, name) if array is None else (name, tensor.given)
                raise self.error(ValueError, f"argument `{present}` is given without `{missing}`.")
            if tensor.broadcast and array is not None:
                self._check_broadcast(name, tensor, array)

    def _check_broadcast(self, name: str, tensor: Tensor, array: Array) -> None:
        """Check that leading dims are the last ones of the op, or 1."""
        whole = self.dims[tensor.rows or ""]
        lead = own_lead(tensor, array)
        last = whole[max(len(whole) - len(lead), 0) :]
        came = tuple(array.shape[: len(array.shape) - len(tensor.dims)])
        if len(came) > len(whole) or any(a != b and a != 1 for a, b in zip(lead, last, strict=True)):
            problem = f"has leading dims {came}, expected the last ones of *{tensor.rows}={whole}, or 1."
            raise self.error(ValueError, f"argument `{name}` {problem}")

    def attributes(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """All attributes and scalars, in the types of their defaults."""
        known = self.op.keywords
        if unknown := attrs.keys() - known.keys():
            takes = _quoted(known) or "none"
            raise self.error(TypeError, f"unknown attribute {_unknown(unknown, known)}; it takes {takes}.")
        return {name: self._attribute(name, attrs.get(name, default)) for name, default in known.items()}

    def _attribute(self, name: str, value: Any) -> Any:
        kind, choices = type(self.op.keywords[name]), self.op.choices.get(name)
        if type(value) is not kind and (problem := wrong_attribute(self.op, name, value)):
            raise self.error(TypeError, problem)
        if choices is not None and value not in choices:
            expected = _one_of(tuple(map(repr, choices)))
            near = meant(value, choices) if kind is str else ""
            raise self.error(ValueError, f"attribute `{name}` must be {expected}, got {shown(value)}{near}.")
        if isinstance(value, int) and not (-INT64 <= value < INT64 or (kind is float and value.bit_length() < 1024)):
            what = "scalar" if name in self.op.scalars else "attribute"
            raise self.error(ValueError, f"{what} `{name}` is {shown(value)}, expected a number of 64 bits.")
        if kind is float and math.isnan(value) and name in self.op.attrs:
            problem = f"attribute `{name}` is nan, expected a number: kernels are found by equal attributes."
            raise self.error(ValueError, problem)
        return kind(value)

    def absent_outputs(self, attrs: Mapping[str, Any]) -> set[str]:
        """The outputs that the call does not have; binds the dtypes that attributes name, too."""
        outputs, dtypes, absent = self.op.outputs, self.dtypes, set()
        dtypes |= {tensor.dtype: attrs[tensor.dtype] for tensor in outputs.values() if tensor.dtype in attrs}
        for name, tensor in outputs.items():
            if tensor.given is not None and self.inputs[tensor.given] is None:
                absent.add(name)
            elif tensor.same_as is not None:
                own, other = tensor.dtype, outputs[tensor.same_as].dtype
                if dtypes.get(own, own) == dtypes.get(other, other):
                    absent.add(name)
        return absent


def expanded_shape(tensor: Tensor, array: Array, dims: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The shape of an input that broadcasts, with leading dims of size 1 expanded to the op's; None if there are none
    to expand.
    """
    lead = own_lead(tensor, array)
    whole = dims[tensor.rows or ""] if tensor.broadcast else ()
    expanded = tuple(whole[len(whole) - len(lead) :])
    if not tensor.broadcast or all(a == b for a, b in zip(lead, expanded, strict=True)):
        return None
    return (*expanded, *array.shape[len(array.shape) - len(tensor.dims) :])


def own_lead(tensor: Tensor, array: Array) -> tuple[Any, ...]:
    """The leading dims of a tensor, without those of size 1 in front: they broadcast like missing dims."""
    lead = tuple(array.shape[: len(array.shape) - len(tensor.dims)])
    if tensor.broadcast:
        while lead and lead[0] == 1:
            lead = lead[1:]
    return lead


def as_outputs(op: Op, returned: Any) -> tuple[Any, ...]:
    """The results of the op's reference, as a tuple with one entry for each output.

    Raises:
        TypeError: more or fewer than are declared.
    """
    results = returned if isinstance(returned, tuple) else (returned,)
    if len(results) != len(op.results):
        problem = f"its reference returned {len(results)} outputs, declared are {len(op.results)}."
        raise TypeError(message(op, problem))
    return results


def check_returned(binding: Binding, results: Sequence[Any], array: Callable[[Any], Array]) -> None:
    """Raise TypeError unless a reference's outputs are what this call of its op declares.

    Args:
        array: describes one of the framework's arrays.
    """
    for (name, declared), result in zip(binding.results.items(), results, strict=True):
        known = result is None or (hasattr(result, "shape") and hasattr(result, "dtype"))
        got = array(result) if known and result is not None else None
        if not known or got != declared:
            came = _text(got) if known else f"a {type(result).__name__}"
            problem = f"its reference returned {came} for `{name}`, declared is {_text(declared)}."
            raise TypeError(message(binding.op, problem))


def _text(array: Array | None) -> str:
    return "nothing" if array is None else f"{array.dtype}{list(array.shape)}"


def _unknown(names: Iterable[str], known: Iterable[str]) -> str:
    return ", ".join(f"`{name}`{meant(name, known)}" for name in sorted(names))


def _quoted(names: Any) -> str:
    return ", ".join(f"`{n}`" for n in names)


def _advice(dtype: str, choices: tuple[str, ...]) -> str:
    """What to do with a float that is wider than those an op takes; nothing for other dtypes."""
    if "float32" in choices:
        return _CAST if dtype == "float64" else ""
    return _NARROW if dtype in ("float32", "float64") and "bfloat16" in choices else ""


def _one_of(choices: tuple[str, ...]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"
