"""The fields of a declaration, and what can be read off them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import combinations
from typing import Any, Self

from cute_ops.declaration.attributes import OneOf
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import DEFAULT, Tuning
from cute_ops.declaration.finish import Finish
from cute_ops.declaration.kernel import Kernel, importable
from cute_ops.declaration.program import Fallback, Program
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.static import WhileFew, static_dims
from cute_ops.declaration.tensor import Tensor
from cute_ops.errors import suggesting

# ``work(dims, attrs)`` of a call, leading dims as their product.
Work = Callable[[Mapping[str, int], Mapping[str, Any]], int]
_checked = ContextVar("_checked", default=True)
_KINDS = {"kernel": (str, Kernel, Program), "tuning": (Tuning,), "sharding": (Sharding,)}


@contextmanager
def without_checks() -> Iterator[None]:
    """Skip validation of the ops declared within. Our own ops are validated by a test; validating them at each import
    would take a tenth of it.
    """
    before = _checked.set(False)
    try:
        yield
    finally:
        _checked.reset(before)


class Declaration:
    """The fields of an op. :class:`cute_ops.declaration.op.Op` says what each means, and checks them.

    Attributes:
        accepts: the dtypes of each dtype variable, including those that only the program of ``fallback`` takes.
        aliases: what messages call the op and the arguments of an unrolled one, ``xs[2]`` for ``xs_2``.
        differentiable: the inputs that have a gradient.
        few: the static dims that are constants while few of their sizes are in use.
        kernel_outputs: the outputs that the kernel takes, also when the op is narrowed.
        numbers: the names of its lists' lengths; none if it has no lists.
        options: keyword arguments of the Python functions beyond inputs and attributes, with their defaults.
        results: what the reference returns: the inputs that the op mutates, then the outputs.
        shown: the outputs that a Python function returns.
        steps: the backward ops in the order in which they run; none if no gradient is declared.
        template: the op with lists that this one is unrolled from, for ``counts`` tensors, or None.
        without_kernel: the program that runs in place of a kernel: of a composite always, of ``fallback`` at times.
    """

    @suggesting
    def __init__(
        self,
        name: str,
        *,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        dtypes: Mapping[str, tuple[str, ...]],
        reference: Callable[..., Any] | None = None,
        kernel: str | Kernel | Program,
        fallback: Fallback | None = None,
        attrs: Mapping[str, Any] | None = None,
        scalars: Mapping[str, float] | None = None,
        mutates: tuple[str, ...] = (),
        static: WhileFew | tuple[str | WhileFew, ...] | None = None,
        tuning: Tuning = DEFAULT,
        sharding: Sharding = Sharding(),  # noqa: B008 (an immutable value)
        grad: Self | tuple[Self, ...] | None = None,
        handed_on: Mapping[str, str] | None = None,
        scaled: Mapping[str, str] | None = None,
        saving: Self | None = None,
        narrow: Callable[[str, tuple[str, ...]], Self] | None = None,
        batched: Callable[[], Self] | None = None,
        no_gradient: tuple[str, ...] = (),
        derived: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Any]] | None = None,
        inference_only: str = "",
        called: str = "",
        finish: Finish | None = None,
        check: Callable[[Any], str | None] | None = None,
        cases: tuple[Case, ...] = (),
        arrange: Callable[[Any, dict[str, Any]], None] | None = None,
        flops: Work | None = None,
        bytes: Work | None = None,
        doc: str = "",
    ) -> None:
        self.name, self.doc, self.cases, self.inference_only = name, doc, cases, inference_only
        self.aliases: Mapping[str, str] = {name: called} if called else {}
        self.inputs, self.outputs = dict(inputs), dict(outputs)
        self._check_kinds(kernel=kernel, tuning=tuning, sharding=sharding)
        self._set_kernel(kernel, reference)
        self.kernel_outputs, self.mutates = tuple(outputs), _as_tuple(mutates)
        self.fallback, self.finish, self.derived = fallback, finish, dict(derived or {})
        self.without_kernel = self.program or (fallback.program if fallback else None)
        self.dtypes = {variable: _as_tuple(names) for variable, names in dtypes.items()}
        self._set_attributes(attrs or {}, scalars or {})
        self.parallel, self.contracted, self.inner, self.whole, self.split = (
            _as_tuple(sharding.parallel), _as_tuple(sharding.contracted), _as_tuple(sharding.inner), sharding.whole,
            sharding.split,
        )  # fmt: skip
        self.config: Callable[..., dict[str, Any]] = partial(tuning.heuristic, name)
        self.space, self.workspace = tuning.space, tuning.workspace
        self.grad, self.saving, self.narrow, self.make_batched = grad, saving, narrow, batched
        self.handed_on, self.scaled = dict(handed_on or {}), dict(scaled or {})
        self.no_gradient = _as_tuple(no_gradient)
        self.flops, self.bytes, self.check, self.arrange = flops, bytes, check or _accept, arrange or _keep
        self.template: Self | None = None
        self.counts: Mapping[str, int] = {}
        self.derive()
        self.static, self.few = static_dims(static, [t for t in inputs.values() if not t.optional])
        if _checked.get():
            self.validate()

    def _check_kinds(self, **arguments: Any) -> None:
        for argument, tensor in [*self.inputs.items(), *self.outputs.items()]:
            if not isinstance(tensor, Tensor) or not isinstance(tensor.shape, str):
                raise ValueError(f"op {self.name}: {argument} must be a Tensor with its shape as text, got {tensor!r}")
        for what, value in arguments.items():
            if not isinstance(value, _KINDS[what]):
                expected = " or ".join(", ".join(kind.__name__ for kind in _KINDS[what]).rsplit(", ", 1))
                raise ValueError(f"op {self.name}: {what} must be a {expected}, got {value!r}")

    def _set_kernel(self, kernel: str | Kernel | Program, reference: Callable[..., Any] | None) -> None:
        self.program = kernel if isinstance(kernel, Program) else None
        source = kernel if isinstance(kernel, Kernel) else Kernel("" if isinstance(kernel, Program) else kernel)
        self.least_sm, self.sources = source.least_sm, _as_tuple(source.sources)
        run = reference or (self.program and self.program.run)
        if run is None:
            raise ValueError(f"op {self.name}: it has a kernel, so it must have a reference")
        self.reference: Callable[..., Any] = run
        self.kernel = source.name
        if source.name.startswith("__main__:"):
            try:
                self.kernel = importable(source.name)
            except ValueError as error:
                raise ValueError(f"op {self.name}: {error}") from None

    def _set_attributes(self, attrs: Mapping[str, Any], scalars: Mapping[str, float]) -> None:
        self.choices = {name: value.values for name, value in attrs.items() if isinstance(value, OneOf)}
        self.attrs = {name: self.choices[name][0] if name in self.choices else v for name, v in attrs.items()}
        self.scalars = dict(scalars)
        self.keywords = {**self.attrs, **self.scalars}

    def derive(self) -> None:
        """Set what follows from the other fields."""
        beyond = self.fallback.dtypes if self.fallback else {}
        self.accepts = {name: (*choices, *beyond.get(name, ())) for name, choices in self.dtypes.items()}
        self.numbers = tuple(dict.fromkeys(t.many for t in self.inputs.values() if t.many))
        self.steps: tuple[Self, ...] = self._steps()
        gradients = {name: tensor for step in self.steps for name, tensor in step.outputs.items()}
        free = self.handed_on.keys() | self.scaled.keys()
        self.differentiable = tuple(name for name in self.inputs if f"d{name}" in gradients or name in free)
        self.results = {**{name: self.inputs[name] for name in self.mutates if name in self.inputs}, **self.outputs}
        self.shown = tuple(name for name, t in self.outputs.items() if not t.hidden)
        self.options: dict[str, Any] = self.finish.defaults if self.finish else {}
        if any(tensor.donates for tensor in gradients.values()):
            self.options["inplace_backward"] = False

    def _steps(self) -> Any:
        steps = self.grad if isinstance(self.grad, tuple) else () if self.grad is None else (self.grad,)
        if not all(isinstance(step, Declaration) for step in steps):
            raise ValueError(f"op {self.name}: grad must be an Op or a tuple of Ops, got {self.grad!r}")
        return steps

    def validate(self) -> None:
        """Raise ValueError for the first thing that is wrong with the declaration."""
        raise NotImplementedError

    def __repr__(self) -> str:
        ins = ", ".join(f"{n}{'?' if t.optional else ''}: {t.declared}" for n, t in self.inputs.items())
        outs = ", ".join(f"{n}: {t.declared}" for n, t in self.outputs.items())
        return f"Op {self.name}({ins}) -> {outs}"

    @property
    def called(self) -> str:
        """The name of the called function, for messages."""
        return self.aliases.get(self.name, self.name)

    @property
    def declared_attrs(self) -> dict[str, Any]:
        """The attributes as another declaration takes them."""
        return {name: OneOf(*self.choices[name]) if name in self.choices else v for name, v in self.attrs.items()}

    def dtype_choices(self, tensor: Tensor) -> tuple[str, ...]:
        """The dtypes that an input or output may have."""
        choices: tuple[str, ...] = {**self.choices, **self.dtypes}.get(tensor.dtype, (tensor.dtype,))
        return choices

    def dtype_near(self, tensor: Tensor, dtype: str) -> str:
        """This dtype if the tensor may have it, else the first that it may have."""
        choices = self.dtype_choices(tensor)
        return dtype if dtype in choices else choices[0]

    def name_of(self, left: tuple[str, ...]) -> str:
        """The name of the op that is narrowed to these outputs."""
        return f"{self.name}_only_{'_'.join(left)}"

    @property
    def narrowings(self) -> list[tuple[str, ...]]:
        """Every set of outputs that is left when some skippable ones are left out."""
        skippable = [name for name, t in self.outputs.items() if t.skippable]
        kept = [names for k in range(len(skippable)) for names in combinations(skippable, k)]
        left = [tuple(n for n, t in self.outputs.items() if n in names or not t.skippable) for names in kept]
        return [names for names in left if names]

    def sums(self, output: str, dim: str) -> bool:
        """Whether an output without this dim, or without leading dims of this name, is a sum over it, so that slices of
        the dim give partial sums.

        It is for a contracted dim, and within the op for an inner one. So is the gradient of an input without the dim
        if every cotangent has it: then every slice of the outputs depends on that input, and the slices' gradients add
        up.
        """
        if dim in self.contracted or dim in self.inner:
            return True
        source = self.inputs.get(output.removeprefix("d")) if output.startswith("d") else None
        cotangents = [t for n, t in self.inputs.items() if n.startswith("d") and f"d{n}" not in self.outputs]
        return source is not None and not source.has(dim) and all(t.has(dim) for t in cotangents)

    def example(self, lead: tuple[int, ...], n: int, sizes: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Sizes of a problem: these leading dims, ``n`` for the dim of that name, other dims from ``sizes`` or else the
        first case; derived dims follow with the default attributes.
        """
        tensors = [*self.inputs.values(), *self.outputs.values()]
        asked = sizes or {}
        known = {**(self.cases[0].dims if self.cases else {}), "n": n, **asked}
        known |= {name: size(known, self.attrs) for name, size in self.derived.items()}
        found = {name: known[name] for t in tensors for d in t.dims for name in d.names}
        return found | {t.rows: (asked[t.rows],) if t.rows in asked else lead for t in tensors if t.rows}


def _as_tuple(names: Any) -> Any:
    """A tuple of names. A single string stays one, so that validation refuses it."""
    return names if isinstance(names, str) else tuple(names)


def _accept(binding: Any) -> str | None:
    return None


def _keep(xp: Any, arrays: dict[str, Any]) -> None:
    pass
