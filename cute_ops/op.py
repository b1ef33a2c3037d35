"""What a declaration says: :class:`Op` and the values it is made of.

A declaration is a plain value. Everything else is derived from it: the torch schema, fake kernel and
autograd, the JAX abstract evaluation, batching and gradient, the compiled variant, error messages,
tests, benchmarks and documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from cute_ops.op_checks import problems

if TYPE_CHECKING:
    from cute_ops.config import Tuning

FLOATS = ("float32", "float16", "bfloat16")
ITEMSIZE = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1,
    "float8_e4m3fn": 1, "bool": 1,
}  # fmt: skip


class Array(NamedTuple):
    """Shape and dtype name of an array: all that binding needs to know of one."""

    shape: tuple[Any, ...]
    dtype: str


class Dim(NamedTuple):
    """One dim of a declared shape, ``factor`` times the size that its name binds: ``n``, ``2n``."""

    factor: int
    name: str

    def of(self, dims: Mapping[str, Any]) -> Any:
        """The size, None where the name's is not known."""
        size = dims.get(self.name)
        return None if size is None else size if self.factor == 1 else self.factor * size

    def __str__(self) -> str:
        return self.name if self.factor == 1 else f"{self.factor}{self.name}"


class Shape(NamedTuple):
    """A declared shape taken apart: the name of the leading dims or None, whether some of them may be missing, the
    other dims, and what is wrong with it.
    """

    rows: str | None
    broadcast: bool
    dims: tuple[Dim, ...]
    wrong: str = ""


@cache
def parse(shape: str) -> Shape:
    words = shape.split()
    leading = words.pop(0) if shape.startswith("*") else ""
    rows = leading.removeprefix("*").removeprefix("#")
    parts = [(word, word.lstrip("0123456789")) for word in words]
    dims = tuple(Dim(int(word.removesuffix(name) or 1), name) for word, name in parts)
    wrong = ""
    if any("*" in word for word in words):
        wrong = f"leading dims must come first, got {shape!r}"
    elif any(word[0] == "0" or not name.isidentifier() for word, name in parts) or (
        leading and not rows.isidentifier()
    ):
        wrong = f"{shape!r} is not a shape like '*m n' or '*#m 2n'"
    return Shape(rows or None, leading.startswith("*#"), dims, wrong)


class OneOf:
    """The values that an attribute may take, the default first: ``attrs={"approximate": OneOf("tanh", "none")}``."""

    def __init__(self, *values: Any) -> None:
        if len({type(v) for v in values}) != 1:
            raise ValueError(f"OneOf needs one value or more, all of one type, got {values}")
        self.values = values


class Tensor(NamedTuple):
    """One input or output of an op.

    Args:
        shape: dims separated by blanks, ``"*m n"``. A name binds a dim, ``2n`` is twice that size; one leading
            ``*name`` binds any number of leading dims. The empty string is a scalar. An input with ``*#name`` has
            only the last few of these leading dims, or all, any of them 1, and is shared by (broadcasts over) the
            others.
        dtype: a dtype variable of the op (``"T"``) or a dtype name (``"float32"``).
        optional: the input may be ``None``.
        given: for outputs: it exists only when this input was passed.
        same_as: for outputs: when the named output has the same dtype, that one serves for this one too
            and nothing is written twice.
        below: for integer inputs: the dim that bounds its values, ``[0, dim)``. Kernels still check.
        at_most: for floating inputs: what no valid value exceeds. Samples keep to it; kernels need not check.
        unread: for inputs: only its shape is used.
        hidden: for outputs: kept for the gradient. The raw op returns it, the Python function does not; it has
            no cotangent.
        reuses: for outputs: an input of this shape and dtype whose memory this output may take, since nothing
            is read after it was written. It happens where the caller asks for it.
    """

    shape: str
    dtype: str
    optional: bool = False
    given: str | None = None
    same_as: str | None = None
    below: str | None = None
    at_most: float | None = None
    unread: bool = False
    hidden: bool = False
    reuses: str | None = None

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The dims after the leading ones."""
        return parse(self.shape).dims

    @property
    def rows(self) -> str | None:
        """The name that binds the leading dims, or None."""
        return parse(self.shape).rows

    @property
    def broadcast(self) -> bool:
        """Whether some of the leading dims may be missing."""
        return parse(self.shape).broadcast

    def of(self, dims: Mapping[str, Any]) -> tuple[Any, ...]:
        """The shape for these sizes, with all leading dims."""
        return (*(dims[self.rows] if self.rows else ()), *(dim.of(dims) for dim in self.dims))

    @property
    def wrong(self) -> str:
        """What is wrong with the shape."""
        return parse(self.shape).wrong

    @property
    def declared(self) -> str:
        return f"{self.dtype}[{self.shape}]"


class Case(NamedTuple):
    """A named problem that tests, tuning and benchmarks share.

    Args:
        name: where the shape comes from, ``"llama3-8b"``.
        dims: sizes by dim name; leading dims as a tuple.
        dtypes: dtype variables that the case fixes; the others follow the first one.
        absent: optional inputs left out.
        attrs: attributes that differ from the default.
        leading: number of leading dims of inputs that broadcast, all of them where not said.
    """

    name: str
    dims: Mapping[str, Any]
    dtypes: Mapping[str, str] = {}
    absent: tuple[str, ...] = ()
    attrs: Mapping[str, Any] = {}
    leading: Mapping[str, int] = {}


class Finish(NamedTuple):
    """What the Python functions do after an op, in array-API style: the framework differentiates it.

    Args:
        apply: ``apply(xp, inputs, outputs, attrs, **options) -> outputs``; the first three are mappings by name.
        options: the values that each option may take, its default first.
        plain: option values with which the outputs come back as they are.
    """

    apply: Callable[..., Mapping[str, Any]]
    options: Mapping[str, tuple[Any, ...]]
    plain: Mapping[str, Any]

    @property
    def defaults(self) -> dict[str, Any]:
        return {name: choices[0] for name, choices in self.options.items()}

    def check(self, what: str, options: Mapping[str, Any]) -> None:
        """Raise ValueError for a value that an option does not take, of the function ``what``."""
        for name, choices in self.options.items():
            if options[name] not in choices:
                known = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
                raise ValueError(f"cute.{what}: option `{name}` is {options[name]!r}, expected {known}.")


class Split(NamedTuple):
    """How devices with a slice each of one dim run an op together: each runs it on its slice, as a call of its own, and
    what they get is combined. In array-API style.

    Args:
        dim: the name of the dim.
        part: ``part(xp, inputs, attrs, start, size, whole) -> (inputs, attrs)``: the call for the slice ``[start,
            start + size)`` of ``whole``; inputs with that dim are slices already. ``start`` may be an array.
        merge: ``merge(xp, parts, inputs, attrs, sizes, whole) -> outputs``: the outputs without that dim, by name, from
            the slices' ones, stacked in front, the inputs and attributes of the call, and the slices' sizes. Outputs
            with it are slices. None where the former, if there are any, add up.
    """

    dim: str
    part: Callable[..., tuple[Mapping[str, Any], Mapping[str, Any]]]
    merge: Callable[..., Mapping[str, Any]] | None = None


class Problem(NamedTuple):
    """What a tile heuristic may look at: sizes, dtypes and alignments by tensor name, and the target."""

    m: int
    n: int | None
    dims: Mapping[str, Any]
    dtypes: Mapping[str, str]
    aligns: Mapping[str, int]
    attrs: Mapping[str, Any]
    arch: str
    sm_count: int


def _as_tuple(names: Any) -> Any:
    """A tuple of names; what was given as one name stays, to be refused."""
    return names if isinstance(names, str) else tuple(names)


class Op:
    """The declaration of one operation.

    Args:
        name: the op's name; it becomes ``torch.ops.cute.<name>`` and ``cute_ops_jax.<name>``.
        inputs: tensors by argument name, in call order. Optional ones come last.
        outputs: tensors by name, in return order.
        dtypes: the dtype names that each dtype variable may take.
        attrs: default by attribute name: ``float``, ``int``, ``bool`` or ``str``; or the values that an attribute
            may take, ``OneOf("tanh", "none")``. A default is finite, as torch's schemas have it.
        static: dims that are compile-time constants, ``n`` where not said. All attributes are.
        parallel: dims that several devices may share like rows: on a slice of them the op gives that slice of its
            outputs.
        split: how devices share a dim that is not parallel.
        reference: ``reference(xp, *inputs, **attrs)`` in array-API style, one body for NumPy, torch and
            jax.numpy; it returns one array or a tuple, ``None`` where an output is absent.
        kernel: ``"module:Class"``, imported only where it is compiled. Its compiled form is kept under the state of
            its sources: of its module, of the packages that this is in and of what they import, also in functions, in
            the same package, in this one and beside it. Of other installed packages the modules count that are named
            in imports, of frameworks and the compiler none.
        sources: what else the kernel is made from, which no import statement names: files and folders, relative to the
            folder of the kernel's module, that are read while it is compiled, and modules that are imported by
            ``importlib`` or ``exec``, ``("data/table.bin", "mypackage.generated")``; a package that is installed counts
            whole if it is named here. When one of them changes, the kernel is compiled anew.
        tile: ``tile(problem) -> {name: int}``, the kernel's compile-time configuration.
        tuning: other tiles that may be faster, which `python -m cute_ops tune` measures: ``vary(threads=(64, 128))``.
        workspace: ``workspace(problem, tile) -> {name: Array or None}``, scratch arrays handed to the kernel. One that
            does not grow with the rows must serve fewer rows too: programs exported for any number share it.
        grad: the backward op. It is wired by argument names: an input of the backward op that is named
            like an input or output of this one gets that array, ``d<output>`` the cotangent; its outputs
            ``d<input>`` are the gradients; attributes pass by name.
        no_gradient: floating inputs that ``grad`` gives no gradient, and attributes that it does not depend on.
        derived: dims of outputs that no input binds, ``{"blocks": f}`` with ``f(dims, attrs) -> size``; sizes may be
            symbolic.
        least_sm: the oldest SM that the kernels run on, ``89`` for 8.9.
        inference_only: for an op that has no gradient on purpose: what to do instead, for the error message.
        finish: what the Python functions do after the op; it adds keyword arguments to them.
        check: ``check(binding) -> str | None``: a problem the declaration cannot express.
        cases: named problems.
        doc: the public docstring: formula first.
    """

    def __init__(
        self,
        name: str,
        *,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        dtypes: Mapping[str, tuple[str, ...]],
        reference: Callable[..., Any],
        kernel: str,
        sources: tuple[str, ...] = (),
        attrs: Mapping[str, Any] | None = None,
        static: tuple[str, ...] | None = None,
        parallel: tuple[str, ...] = (),
        split: Split | None = None,
        tile: Callable[[Problem], Mapping[str, int]] | None = None,
        tuning: Tuning | None = None,
        workspace: Callable[[Problem, Mapping[str, int]], Mapping[str, Array | None]] | None = None,
        grad: Op | None = None,
        no_gradient: tuple[str, ...] = (),
        derived: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Any]] | None = None,
        least_sm: int = 80,
        inference_only: str = "",
        finish: Finish | None = None,
        check: Callable[[Any], str | None] | None = None,
        cases: tuple[Case, ...] = (),
        doc: str = "",
    ) -> None:
        self.name = name
        self.inputs = dict(inputs)
        self.outputs = dict(outputs)
        for argument, tensor in [*self.inputs.items(), *self.outputs.items()]:
            if not isinstance(tensor, Tensor) or not isinstance(tensor.shape, str):
                raise ValueError(f"op {name}: {argument} must be a Tensor with its shape as text, got {tensor!r}")
        self.dtypes = {k: _as_tuple(v) for k, v in dtypes.items()}
        self.reference = reference
        self.kernel = kernel
        self.sources = _as_tuple(sources)
        self.choices = {k: v.values for k, v in (attrs or {}).items() if isinstance(v, OneOf)}
        self.attrs = {k: v.values[0] if isinstance(v, OneOf) else v for k, v in (attrs or {}).items()}
        dims = {d.name for t in self.inputs.values() if not t.optional for d in t.dims}
        self.static: tuple[str, ...] = (("n",) if "n" in dims else ()) if static is None else _as_tuple(static)
        self.parallel = _as_tuple(parallel)
        self.split = split
        self.tile = tile or (lambda problem: {})
        self.tuning = tuning
        self.workspace = workspace or (lambda problem, tile: {})
        self.grad = grad
        self.no_gradient = _as_tuple(no_gradient)
        self.derived = dict(derived or {})
        self.least_sm = least_sm
        self.inference_only = inference_only
        self.finish = finish
        self.check = check or (lambda binding: None)
        self.cases = cases
        self.doc = doc
        self._validate()

    def __repr__(self) -> str:
        ins = ", ".join(f"{n}{'?' if t.optional else ''}: {t.declared}" for n, t in self.inputs.items())
        outs = ", ".join(f"{n}: {t.declared}" for n, t in self.outputs.items())
        return f"Op {self.name}({ins}) -> {outs}"

    def dtype_choices(self, tensor: Tensor) -> tuple[str, ...]:
        return self.dtypes.get(tensor.dtype, (tensor.dtype,))

    def dtype_near(self, tensor: Tensor, dtype: str) -> str:
        """This dtype where the tensor may have it, else the first that it may."""
        choices = self.dtype_choices(tensor)
        return dtype if dtype in choices else choices[0]

    @property
    def differentiable(self) -> tuple[str, ...]:
        """The inputs that have a gradient."""
        return tuple(name for name in self.inputs if self.grad and f"d{name}" in self.grad.outputs)

    def example(self, lead: tuple[int, ...], n: int) -> dict[str, Any]:
        """Sizes of a problem: these leading dims, ``n`` for the dim of that name, others as in the first case; derived
        ones with the default attributes.
        """
        tensors = [*self.inputs.values(), *self.outputs.values()]
        known = {**(self.cases[0].dims if self.cases else {}), "n": n}
        known |= {name: size(known, self.attrs) for name, size in self.derived.items()}
        return {d.name: known[d.name] for t in tensors for d in t.dims} | {t.rows: lead for t in tensors if t.rows}

    @cached_property
    def shown(self) -> tuple[str, ...]:
        """The outputs that a Python function returns."""
        return tuple(name for name, t in self.outputs.items() if not t.hidden)

    @cached_property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the Python functions beyond inputs and attributes, with their defaults."""
        found = self.finish.defaults if self.finish else {}
        reuses = self.grad is not None and any(t.reuses for t in self.grad.outputs.values())
        return {**found, "inplace_backward": False} if reuses else found

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError for a value that an option does not take."""
        if self.finish:
            self.finish.check(self.name, options)

    def _validate(self) -> None:
        """Raise ValueError for the first thing that is wrong with the declaration."""
        for problem in problems(self, ITEMSIZE):
            raise ValueError(f"op {self.name}: {problem}")
