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
# What to do with float64, which NumPy and `jax_enable_x64` make by default.
_CAST = " Kernels compute in float32: cast `{name}` to it, or take the framework's own function where float64 matters."
# An argument, one of its dims, and the size that it came with.
Declared = tuple[str, Dim, Any]
# Makes the error that :func:`bind` raises, from its type and the problem.
Fail = Callable[[type[Exception], str], Exception]


class Binding(NamedTuple):
    """A checked call of an op.

    Attributes:
        dims: sizes by dim name; leading dims as a tuple.
        dtypes: dtype names by variable, and by attribute that names an output's dtype.
        attrs: all attributes and scalars by name.
        inputs: the arrays as given, None where absent.
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
        """The names of the results that are there."""
        return [name for name, array in self.results.items() if array is not None]

    @property
    def empty(self) -> bool:
        """Whether an input or an output has no element: no kernel takes such a call, so the reference runs."""
        return any(0 in a.shape for a in (*self.inputs.values(), *self.outputs.values()) if a is not None)

    @property
    def dtype_without_kernel(self) -> str | None:
        """The first dtype of the call that no kernel takes, only the program of ``op.instead``; None without one."""
        wide = self.op.instead.dtypes if self.op.instead else {}
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
    given = {name: inputs.get(name) for name in op.inputs}
    dims: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    where: dict[str, str] = {}
    later: list[Declared] = []

    def fail(kind: type[Exception], problem: str) -> Exception:
        return kind(message(op, problem, given, dims, dtypes))

    unknown = inputs.keys() - op.inputs.keys()
    if unknown:
        raise fail(TypeError, f"unknown argument {_unknown(unknown, op.inputs)}; it takes {_quoted(op.inputs)}.")
    for name, tensor in op.inputs.items():
        array = given[name]
        if array is None:
            if not tensor.optional:
                raise fail(TypeError, f"argument `{name}` is required, but None was given.")
            continue
        choices = op.accepts.get(tensor.dtype, (tensor.dtype,))
        if array.dtype not in choices:
            what_to_do = _CAST.format(name=name) if array.dtype == "float64" and "float32" in choices else ""
            raise fail(
                TypeError, f"argument `{name}` has dtype {array.dtype}, expected {_one_of(choices)}.{what_to_do}"
            )
        if tensor.dtype in op.dtypes:
            first = dtypes.setdefault(tensor.dtype, array.dtype)
            if first != array.dtype:
                conflict = f"has dtype {array.dtype}, but {tensor.dtype}={first} from `{where[tensor.dtype]}`."
                raise fail(TypeError, f"argument `{name}` {conflict}")
            where.setdefault(tensor.dtype, name)
        later += _bind_dims(fail, name, tensor, array, dims)
    for name, dim, size in _bind_expressions(fail, later, dims) if later else ():
        free = next(n for n in dim.names if n not in dims)
        raise fail(ValueError, f"argument `{name}` has {dim}={size}, from which {free} does not follow.")
    _check_together(fail, op, given, dims)
    full_attrs = _attributes(op, attrs or {}, fail)
    dtypes |= {t.dtype: full_attrs[t.dtype] for t in op.outputs.values() if t.dtype in full_attrs}
    binding = Binding(op, dims, dtypes, full_attrs, given, {}, {})
    problem = op.check(binding)
    if problem:
        raise fail(ValueError, problem)
    constants = {name: full_attrs[name] for name in op.attrs}
    dims |= {name: size(dims, constants) for name, size in op.derived.items()}
    outputs: dict[str, Array | None] = {}
    for name, tensor in op.outputs.items():
        absent = tensor.given is not None and given[tensor.given] is None
        if tensor.same_as is not None:
            absent |= binding.dtype(tensor) == binding.dtype(op.outputs[tensor.same_as])
        for dim in () if absent else tensor.dims:
            if not dim.name and (wrong := dim.wrong(dims)):
                raise fail(ValueError, f"output `{name}` has {dim}, but {dim.bound(dims)}: expected {wrong}.")
        outputs[name] = None if absent else Array(tensor.of(dims), dtypes.get(tensor.dtype, tensor.dtype))
    results = {**{name: given[name] for name in op.mutates}, **outputs}
    return Binding(op, dims, dtypes, full_attrs, given, outputs, results)


def _bind_dims(fail: Fail, name: str, tensor: Tensor, array: Array, dims: dict[str, Any]) -> list[Declared]:
    """Check an argument's dims and bind names; returns the dims that cannot be checked before other arguments."""
    names, shape = tensor.dims, tuple(array.shape)
    if len(shape) < len(names) or (tensor.rows is None and len(shape) != len(names)):
        least = "at least " if tensor.rows else ""
        raise fail(
            ValueError, f"argument `{name}` has {len(shape)} dims, expected {least}{len(names)}: {tensor.declared}."
        )
    split = len(shape) - len(names)
    if tensor.rows is not None and not tensor.broadcast:
        lead = shape[:split]
        first = dims.setdefault(tensor.rows, lead)
        if len(first) != split or any(a != b for a, b in zip(first, lead, strict=True)):
            raise fail(ValueError, f"argument `{name}` has leading dims {lead}, but *{tensor.rows}={first}.")
    expressions = []
    for dim, size in zip(names, shape[split:], strict=True):
        if not dim.name:
            expressions.append((name, dim, size))
            continue
        first = dims.setdefault(dim.name, size)
        if size != first:
            raise fail(ValueError, f"argument `{name}` has {dim}={size}, but {dim.name}={first}.")
    return _bind_expressions(fail, expressions, dims) if expressions else expressions


def _bind_expressions(fail: Fail, sizes: list[Declared], dims: dict[str, Any]) -> list[Declared]:
    """Check dims that are expressions and bind what follows from them; returns those that cannot be checked yet."""
    while later := [each for each in sizes if not _bind_expression(fail, each, dims)]:
        if len(later) == len(sizes):
            break
        sizes = later
    return later


def _bind_expression(fail: Fail, declared: Declared, dims: dict[str, Any]) -> bool:
    """Check a dim whose names all have sizes, or bind the one that has none; False if neither is possible yet."""
    name, dim, size = declared
    expected = dim.of(dims)
    if expected is not None:
        wrong = dim.wrong(dims)
        if wrong or size != expected:
            has = f"{dim}={size}, but {dim.bound(dims)}" if dim.names else f"a dim of {size}, expected {dim}"
            raise fail(ValueError, f"argument `{name}` has {has}{wrong and f': expected {wrong}'}.")
        return True
    if free := dim.binds(dims):
        try:
            found = dim.solve(size, dims)
        except ValueError as error:
            raise fail(ValueError, f"argument `{name}` has {dim}={size}, expected {error}.") from None
        if found is not None:
            dims[free] = found
            return True
    return False


def _check_together(fail: Fail, op: Op, given: Mapping[str, Array | None], dims: dict[str, Any]) -> None:
    """Check inputs that come in pairs, and those that broadcast; all inputs must be bound."""
    for name, tensor in op.inputs.items():
        array = given[name]
        if tensor.given and (array is None) != (given[tensor.given] is None):
            given_one, missing = (tensor.given, name) if array is None else (name, tensor.given)
            raise fail(ValueError, f"argument `{given_one}` is given without `{missing}`.")
        if tensor.broadcast and array is not None:
            _check_broadcast(fail, name, tensor, array, dims)


def _check_broadcast(fail: Fail, name: str, tensor: Tensor, array: Array, dims: dict[str, Any]) -> None:
    """Check that leading dims are the last ones of the op, or 1; all other inputs must be bound."""
    whole = dims[tensor.rows or ""]
    lead = own_lead(tensor, array)
    if len(lead) > len(whole) or any(
        a != b and a != 1 for a, b in zip(lead, whole[len(whole) - len(lead) :], strict=True)
    ):
        came = tuple(array.shape[: len(array.shape) - len(tensor.dims)])
        problem = f"argument `{name}` has leading dims {came}, expected the last ones of *{tensor.rows}={whole}, or 1."
        raise fail(ValueError, problem)


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


def _attributes(op: Op, attrs: Mapping[str, Any], fail: Fail) -> dict[str, Any]:
    unknown = attrs.keys() - op.keywords.keys()
    if unknown:
        raise fail(
            TypeError, f"unknown attribute {_unknown(unknown, op.keywords)}; it takes {_quoted(op.keywords) or 'none'}."
        )
    full = {}
    for name, default in op.keywords.items():
        value = attrs.get(name, default)
        kind = type(default)
        if type(value) is not kind and (problem := wrong_attribute(op, name, value)):
            raise fail(TypeError, problem)
        if name in op.choices and value not in op.choices[name]:
            values = _one_of(tuple(repr(v) for v in op.choices[name]))
            near = meant(value, op.choices[name]) if kind is str else ""
            raise fail(ValueError, f"attribute `{name}` must be {values}, got {shown(value)}{near}.")
        if isinstance(value, int) and not (-INT64 <= value < INT64 or (kind is float and value.bit_length() < 1024)):
            what = "scalar" if name in op.scalars else "attribute"
            raise fail(ValueError, f"{what} `{name}` is {shown(value)}, expected a number of 64 bits.")
        if kind is float and math.isnan(value) and name in op.attrs:
            raise fail(
                ValueError, f"attribute `{name}` is nan, expected a number: kernels are found by equal attributes."
            )
        if name in op.scalars:
            full[name] = kind(value)
            continue
        full[name] = kind(value)
    return full


def as_outputs(op: Op, returned: Any) -> tuple[Any, ...]:
    """What the op's reference returned, as a tuple with one entry for each output.

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


def _one_of(choices: tuple[str, ...]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"
