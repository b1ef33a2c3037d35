"""What a declaration says: :class:`Op` and the values it is made of.

A declaration is a plain value. Everything else is derived from it: the torch schema, fake kernel and
autograd, the JAX abstract evaluation, batching and gradient, the compiled variant, error messages,
tests, benchmarks and documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import copy
from functools import partial, update_wrapper
from itertools import combinations
from typing import Any

from cute_ops.declaration import lists
from cute_ops.declaration.attributes import OneOf, defaults_of
from cute_ops.declaration.case import Case
from cute_ops.declaration.checks import problems
from cute_ops.declaration.config import DEFAULT, Tuning
from cute_ops.declaration.finish import Finish
from cute_ops.declaration.kernel import Kernel, importable
from cute_ops.declaration.program import Instead, Program
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.static import WhileFew
from cute_ops.declaration.tensor import Tensor
from cute_ops.errors import renamed, suggesting

# ``work(dims, attrs)`` of a call, leading dims as their product.
Work = Callable[[Mapping[str, int], Mapping[str, Any]], int]


# Ops that are made of others on first use, by the other and what is made of it.
_made: dict[tuple[Op, str | tuple[str | int, ...]], Op] = {}


def _once(op: Op, what: str | tuple[str | int, ...], make: Callable[[], Op]) -> Op:
    """What is made of an op, the same object every time."""
    # Of several threads the first one's counts.
    return _made.get((op, what)) or _made.setdefault((op, what), make())


def _without(places: Collection[int], reference: Callable[..., Any], *args: Any, **attrs: Any) -> tuple[Any, ...]:
    """What a reference returns, without the outputs at these places."""
    returned = reference(*args, **attrs)
    results = returned if isinstance(returned, tuple) else (returned,)
    return tuple(result for k, result in enumerate(results) if k not in places)


def _as_tuple(names: Any) -> Any:
    """A tuple of names. A single string stays one, so that validation refuses it."""
    return names if isinstance(names, str) else tuple(names)


class Op:
    """The declaration of one operation.

    Args:
        name: the op's name; it becomes ``torch.ops.cute.<name>`` and ``cute_ops_jax.<name>``.
        inputs: tensors by argument name, in call order. Optional ones come last.
        outputs: tensors by name, in return order.
        mutates: inputs that the kernel writes. In PyTorch a call changes them in place; in JAX it returns the new
            arrays before the outputs. Such an op may have no outputs, and has no gradient.
        dtypes: the dtype names that each dtype variable may take.
        attrs: default by attribute name: ``float``, ``int``, ``bool`` or ``str``; or the values that an attribute
            may take, ``OneOf("tanh", "none")``. A default is finite, because torch's schemas cannot say others.
        scalars: default by name of numbers that a kernel takes at run time, so that one serves all values: a ``float``,
            float32 in the kernel, or an ``int`` of 64 bits. They follow the attributes; references get both by name.
        static: dims that are compile-time constants, always (each size has a kernel of its own) or ``WhileFew``; all
            others are dynamic. By default ``WhileFew("n")`` if there is an ``n``. Attributes are always constants. A
            kernel knows a dim of an optional input if the call gives that input.
        sharding: which dims several devices may share.
        reference: ``reference(xp, *inputs, **attrs)`` in array-API style, one body for NumPy, torch and
            jax.numpy; it returns one array or a tuple, ``None`` for an absent output. It writes no input: the new
            values of inputs that the op mutates come before the outputs. A composite needs none, because its program
            runs on every device.
        kernel: ``"module:Class"``, a :class:`Kernel` that says more, or the :class:`Program` of a composite.
        instead: a program that may run in place of the kernel.
        tuning: how the kernel is configured: ``Tuning(heuristic, space=vary(threads=(64, 128)))``.
        grad: the backward op. It is wired by argument names: an input of the backward op that is named
            like an input or output of this one gets that array, ``d<output>`` the cotangent; its outputs
            ``d<input>`` are the gradients; attributes pass by name. Or several such ops, run in this order, each of
            which may read outputs of earlier ones by name: ``grad=(linear_dx, linear_dweight)``. Only those run whose
            gradients are wanted or whose outputs such an op reads.
        handed_on: inputs whose gradient is an output's cotangent, unchanged but for the input's dtype, so that no step
            computes it: ``{"residual": "out"}``.
        scaled: inputs whose gradient the forward computes for a cotangent of one: ``{"x": "x_gradient"}``, an output
            of ``saving`` or of this op. The backward multiplies it by the cotangent of the first output, a scalar.
        saving: the op that runs in place of this one if its gradient is wanted and reads more than inputs and outputs.
            It has the same inputs and attributes, and the same outputs followed by others. Of its skippable outputs
            those are computed that the gradient reads.
        narrow: ``narrow(name, outputs)`` makes the op with these outputs alone, for an op that then reads fewer inputs,
            too. By default the same kernel runs and gets None for the other outputs.
        batched: makes the op for a batch of examples in which other inputs than rows are batched, too. It has the same
            names, ``*b n k`` in place of ``n k``, and one dim for each example's rows, ``*b m n`` in place of ``*m n``.
            ``vmap`` calls it once; without it, ``vmap`` calls this op for each example.
        no_gradient: floating inputs without a gradient, and attributes on which ``grad`` does not depend.
        derived: dims of outputs that no input binds, ``{"blocks": f}`` with ``f(dims, attrs) -> size``; sizes may be
            symbolic.
        inference_only: for an op that has no gradient on purpose: what to do instead, for the error message.
        called: the function that messages name if it is not this op: ``linear`` for ``linear_batched``.
        finish: what the Python functions do after the op; it adds keyword arguments to them.
        check: ``check(binding)``: what is wrong with a call that the declaration cannot express; None if nothing is.
        cases: named problems.
        arrange: ``arrange(xp, arrays)`` changes random inputs of tests and ``verify`` in place, NumPy arrays, so that
            they fit together: sorted indices, the statistics of a row.
        flops: ``flops(dims, attrs)``: the operations of a call, with which ``bench`` shows TFLOPS. ``dims`` has the
            sizes by name, of leading dims their product.
        bytes: ``bytes(dims, attrs)``: the least bytes that a call moves. By default every input is read once and every
            output written once.
        doc: the public docstring: formula first.
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
        instead: Instead | None = None,
        attrs: Mapping[str, Any] | None = None,
        scalars: Mapping[str, float] | None = None,
        mutates: tuple[str, ...] = (),
        static: WhileFew | tuple[str | WhileFew, ...] | None = None,
        tuning: Tuning = DEFAULT,
        sharding: Sharding = Sharding(),  # noqa: B008 (an immutable value)
        grad: Op | tuple[Op, ...] | None = None,
        handed_on: Mapping[str, str] | None = None,
        scaled: Mapping[str, str] | None = None,
        saving: Op | None = None,
        narrow: Callable[[str, tuple[str, ...]], Op] | None = None,
        batched: Callable[[], Op] | None = None,
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
        self.name = name
        self.inputs = dict(inputs)
        self.outputs = dict(outputs)
        # The outputs that the kernel takes, also when the op is narrowed.
        self.kernel_outputs = tuple(self.outputs)
        for argument, tensor in [*self.inputs.items(), *self.outputs.items()]:
            if not isinstance(tensor, Tensor) or not isinstance(tensor.shape, str):
                raise ValueError(f"op {name}: {argument} must be a Tensor with its shape as text, got {tensor!r}")
        self.dtypes = {k: _as_tuple(v) for k, v in dtypes.items()}
        for what, given, kinds in (
            ("kernel", kernel, (str, Kernel, Program)), ("tuning", tuning, (Tuning,)),
            ("sharding", sharding, (Sharding,)),
        ):  # fmt: skip
            if not isinstance(given, kinds):
                expected = " or ".join(", ".join(kind.__name__ for kind in kinds).rsplit(", ", 1))
                raise ValueError(f"op {name}: {what} must be a {expected}, got {given!r}")
        self.program, self.instead = kernel if isinstance(kernel, Program) else None, instead
        made_from = kernel if isinstance(kernel, Kernel) else Kernel(kernel if isinstance(kernel, str) else "")
        runs = reference or (self.program and self.program.run)
        if runs is None:
            raise ValueError(f"op {name}: it has a kernel, so it must have a reference")
        self.reference = runs
        try:
            self.kernel, self.least_sm = importable(made_from.name), made_from.least_sm
        except ValueError as error:
            raise ValueError(f"op {name}: {error}") from None
        self.sources = _as_tuple(made_from.sources)
        self.choices = {k: v.values for k, v in (attrs or {}).items() if isinstance(v, OneOf)}
        self.attrs = defaults_of(attrs or {})
        self.scalars = dict(scalars or {})
        self.keywords = {**self.attrs, **self.scalars}
        self.mutates = _as_tuple(mutates)
        dims = {name for t in self.inputs.values() if not t.optional for d in t.dims for name in d.names}
        if static is None:
            static = WhileFew("n") if "n" in dims else ()
        words: Any = (static,) if isinstance(static, WhileFew) else _as_tuple(static)
        self.few: tuple[str, ...] = tuple(dim for each in words if isinstance(each, WhileFew) for dim in each.dims)
        self.static: tuple[str, ...] = words
        if self.few:
            self.static = tuple(d for each in words for d in (each.dims if isinstance(each, WhileFew) else (each,)))
        self.parallel, self.split = _as_tuple(sharding.parallel), sharding.split
        self.contracted, self.whole = _as_tuple(sharding.contracted), sharding.whole
        self.inner = _as_tuple(sharding.inner)
        self.config, self.space, self.workspace = tuning.heuristic(name), tuning.space, tuning.workspace
        self.flops, self.bytes = flops, bytes
        self.grad, self.saving, self.narrow, self._make_batched = grad, saving, narrow, batched
        self.handed_on, self.scaled = dict(handed_on or {}), dict(scaled or {})
        self.no_gradient = _as_tuple(no_gradient)
        self.derived = dict(derived or {})
        self.inference_only = inference_only
        self.finish = finish
        self.check = check or (lambda binding: None)
        self.cases = cases
        self.arrange = arrange or (lambda xp, arrays: None)
        self.doc = doc
        self.template: Op | None = None
        self.counts: Mapping[str, int] = {}
        self.aliases: Mapping[str, str] = {name: called} if called else {}
        self._derive()
        self._validate()

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

    def backward(self, wanted: Collection[str], present: Collection[str]) -> tuple[Op, ...]:
        """The ops that compute gradients, in order, without steps and skippable outputs that nobody reads.

        Args:
            wanted: the inputs that need a gradient.
            present: the inputs that are not None. An output that is absent because an input is does not narrow an op.
        """
        read = {f"d{name}" for name in wanted if name in present}
        chosen: list[Op] = []
        for step in reversed(self.steps):
            if read & step.outputs.keys():
                absent = self._absent(step, present)
                idle = any(t.skippable for name, t in step.outputs.items() if name not in read | absent)
                chosen.insert(0, step.only(*read) if idle else step)
                read |= chosen[0].inputs.keys()
        return tuple(chosen)

    @property
    def without_kernel(self) -> Program | None:
        """The program that runs in place of a kernel: of a composite always, of ``instead`` at times."""
        return self.program or (self.instead.program if self.instead else None)

    def saved_by(self, wanted: Collection[str], present: Collection[str]) -> Op | None:
        """:attr:`saving` with the outputs that the gradients of these inputs read; None if they read only what this op
        has, too. Arguments as in :meth:`backward`.
        """
        if self.saving is None:
            return None
        read = {name for step in self.backward(wanted, present) for name in step.inputs}
        read |= {gradient for name, gradient in self.scaled.items() if name in wanted and name in present}
        if read.isdisjoint(self.saving.outputs.keys() - self.outputs.keys()):
            return None
        return self.saving.only(*read, *self._absent(self.saving, present))

    def with_twins(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """What a program got of this op, with the other's array for each output that another serves for."""
        twins = {name: t.same_as for name, t in self.outputs.items() if t.same_as and found.get(name) is None}
        return {name: found[twins.get(name, name)] for name in found}

    def _absent(self, step: Op, present: Collection[str]) -> set[str]:
        """The outputs of a step that are absent because an input of this op is."""
        return {name for name, t in step.outputs.items() if t.given in self.inputs and t.given not in present}

    def only(self, *outputs: str) -> Op:
        """The op without the skippable outputs that are not named here; the same object every time."""
        left = tuple(name for name, t in self.outputs.items() if name in outputs or not t.skippable)
        if left == tuple(self.outputs):
            return self
        return _once(self, left, lambda: (self.narrow or self._without)(self.name_of(left), left))

    def _without(self, name: str, left: tuple[str, ...]) -> Op:
        """The op with this name and these outputs, whose kernel gets None for the others."""
        made, skipped = copy(self), frozenset(k for k, output in enumerate(self.outputs) if output not in left)
        made.name = name
        made.outputs = {output: self.outputs[output] for output in left}
        made.grad, made.no_gradient, made.scaled, made._make_batched = None, (), {}, None
        made.reference = partial(_without, skipped, self.reference)
        update_wrapper(made.reference, self.reference, ("__module__",), ())  # where it is declared
        made._derive()
        return made

    @property
    def batched(self) -> Op | None:
        """The op of a batch of examples, the same object every time; None if it has none."""
        return _once(self, "batched", self._make_batched) if self._make_batched else None

    def unrolled(self, counts: Mapping[str, int]) -> Op:
        """The op without lists for these numbers of tensors; the same object every time.

        Raises:
            ValueError: the declaration is wrong for them.
        """

        def made() -> Op:
            op = lists.unroll(self, counts)
            op._derive()
            op._validate()
            return op

        return _once(self, tuple(counts[name] for name in self.numbers), made) if self.numbers else self

    @property
    def instances(self) -> tuple[Op, ...]:
        """The ops that the cases call: of an op with lists one for each number of tensors, for two without a case."""
        asked = [{name: case.dims[name] for name in self.numbers} for case in self.cases]
        found = [self.unrolled(counts) for counts in asked or [dict.fromkeys(self.numbers, 2)]]
        return tuple(dict.fromkeys(found))

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

    @property
    def narrowed(self) -> tuple[Op, ...]:
        """The op without some of its skippable outputs: one for each of :attr:`narrowings`."""
        return tuple(self.only(*left) for left in self.narrowings)

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

    def _derive(self) -> None:
        """Set what follows from the rest of the declaration.

        Attributes:
            accepts: the dtypes of each dtype variable, including those that only the program of ``instead`` takes.
            steps: the backward ops in the order in which they run; none if no gradient is declared.
            differentiable: the inputs that have a gradient.
            results: what the reference returns: the inputs that the op mutates, then the outputs.
            shown: the outputs that a Python function returns.
            options: keyword arguments of the Python functions beyond inputs and attributes, with their defaults.
            numbers: the names of its lists' lengths; none if it has no lists.
            template: the op with lists that this one is unrolled from, for ``counts`` tensors, or None.
            aliases: what messages call the arguments of an unrolled op, ``xs[2]`` for ``xs_2``.
        """
        beyond = self.instead.dtypes if self.instead else {}
        self.accepts = {name: (*choices, *beyond.get(name, ())) for name, choices in self.dtypes.items()}
        self.numbers = tuple(dict.fromkeys(t.many for t in self.inputs.values() if t.many))
        steps = self.grad if isinstance(self.grad, tuple) else () if self.grad is None else (self.grad,)
        if not all(isinstance(step, Op) for step in steps):
            raise ValueError(f"op {self.name}: grad must be an Op or a tuple of Ops, got {self.grad!r}")
        self.steps: tuple[Op, ...] = steps
        given = {name: tensor for step in steps for name, tensor in step.outputs.items()}
        apart = self.handed_on.keys() | self.scaled.keys()
        self.differentiable = tuple(name for name in self.inputs if f"d{name}" in given or name in apart)
        self.results = {**{name: self.inputs[name] for name in self.mutates if name in self.inputs}, **self.outputs}
        self.shown = tuple(name for name, t in self.outputs.items() if not t.hidden)
        self.options: dict[str, Any] = self.finish.defaults if self.finish else {}
        if any(tensor.donates for tensor in given.values()):
            self.options["inplace_backward"] = False

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError for a value that an option does not take."""
        if self.finish:
            self.finish.check(self.name, options)

    def _validate(self) -> None:
        """Raise ValueError for the first thing that is wrong with the declaration."""
        for problem in lists.problems(self):
            raise ValueError(f"op {self.name}: {problem}")
        if self.numbers:
            self.unrolled(dict.fromkeys(self.numbers, 2))
            return
        for problem in problems(self):
            raise ValueError(renamed(f"op {self.name}: {problem}", self.aliases))
