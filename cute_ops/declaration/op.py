"""What a declaration says: :class:`Op` and the values it is made of.

A declaration is a plain value. Everything else is derived from it: the torch schema, fake kernel and
autograd, the JAX abstract evaluation, batching and gradient, the compiled variant, error messages,
tests, benchmarks and documentation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from functools import cached_property, partial, update_wrapper
from itertools import combinations, pairwise
from typing import Any, NamedTuple

from cute_ops.declaration import lists
from cute_ops.declaration.checks import HOW_FUSED, problems
from cute_ops.declaration.config import DEFAULT, Tuning
from cute_ops.declaration.dims import Dim
from cute_ops.declaration.dims import parse as parse_dim
from cute_ops.declaration.shapes import parse
from cute_ops.errors import renamed, shown, suggesting


class OneOf:
    """The values that an attribute may take, the default first: ``attrs={"approximate": OneOf("tanh", "none")}``."""

    def __init__(self, *values: Any) -> None:
        if len({type(v) for v in values}) != 1:
            raise ValueError(f"OneOf needs one value or more, all of one type, got {values}")
        self.values = values


def defaults_of(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The values of declared attributes that a call does not give."""
    return {name: value.values[0] if isinstance(value, OneOf) else value for name, value in attrs.items()}


# ``work(dims, attrs)`` of a call, leading dims as their product.
Work = Callable[[Mapping[str, int], Mapping[str, Any]], int]


class WhileFew:
    """Dims that are compile-time constants until a program has called the op with 64 of their sizes:
    ``static=("d", WhileFew("n"))``. One kernel, in which these dims are dynamic, serves all further sizes.
    """

    def __init__(self, *dims: str) -> None:
        self.dims = dims


class Accumulation(NamedTuple):
    """An output that is summed one term after another, which loses more than other sums: the tolerance allows for it.

    Args:
        over: the dims whose terms are added, ``("k",)`` of a product.
        dtype: what the sum is kept in: ``"float32"``, ``"float22"`` (fp8 on Hopper's tensor cores) or ``"float16"``.
    """

    over: tuple[str, ...]
    dtype: str = "float32"


class _TensorFields(NamedTuple):
    shape: str
    dtype: str
    optional: bool = False
    given: str | None = None
    same_as: str | None = None
    upper_bound: str | None = None
    at_most: float | None = None
    unread: bool = False
    hidden: bool = False
    donates: str | None = None
    accumulates: Accumulation | None = None
    skippable: bool = False
    contiguous: str | tuple[str, ...] | None = None
    align: int = 0
    otherwise: str = "refuse"
    merged: bool = False
    many: str | None = None
    own: tuple[str, ...] = ()
    strided_like: str | None = None


class Tensor(_TensorFields):
    """One input or output of an op, or with ``many`` a list of them.

    Args:
        shape: dims separated by blanks, ``"*m n"``. A name binds a dim. ``2n``, ``n/2`` (2 must divide n), ``g*r``,
            ``b+1``, ``k-1``, ``ceil(k/128)`` and ``3`` are checked against the sizes of their names; all but ``ceil``
            also bind a name that no other dim binds. One leading ``*name`` binds any number of leading dims, the rows:
            a row of an output depends on the rows at its index of tensors with the same name, and on all of any other
            tensor. The empty string is a scalar. An input with ``*#name`` has the last few of these leading dims, or
            all of them, any of size 1, and is broadcast over the others.
        dtype: a dtype variable of the op (``"T"``) or a dtype name (``"float32"``); of outputs also an attribute whose
            value is the dtype's name, ``attrs={"out_dtype": OneOf("bfloat16", "float32")}``.
        optional: the input may be ``None``.
        given: for outputs: the optional input with which the output exists. For optional inputs: another optional
            input; a call passes both or neither.
        same_as: for outputs: another output of equal values. If both have the same dtype, only that one is written.
        upper_bound: for integer inputs: the dim that bounds its values, ``[0, dim)``, or an expression such as
            ``"p*s"``. Kernels still check.
        at_most: for floating inputs: the largest valid value. Random inputs stay below it; kernels need not check.
        unread: for inputs: only its shape is used.
        hidden: for outputs: kept for the gradient. The raw op returns it, the Python function does not; it has
            no cotangent.
        donates: for outputs: the input of this shape and dtype whose memory the output may take if the caller asks for
            it. The kernel reads each element before it writes there.
        accumulates: for outputs: that one term is added after another, as tensor cores do it, ``Accumulation(("k",))``.
            By default the tolerance is that of sums in float32 by the framework, which adds up pairs or blocks.
        skippable: for outputs of a backward op: if this gradient is not wanted, the kernel gets None for it and skips
            its work. The reference always returns it.
        contiguous: the dim whose elements are neighbours in memory, ``"k"``; or several, ``("k", "n")``, of which at
            least one must be: each has a kernel of its own, the first if several are contiguous. The name of leading
            dims means the last of them. The other dims have any strides. ``()`` leaves all strides free. By default the
            last dim is contiguous. An output is made compact; one that the caller gives may have these strides.
        align: for inputs: bytes, at most 16, that divide the address and the strides of all dims but the contiguous
            one: 16 where TMA loads it. By default each alignment has a kernel of its own.
        otherwise: what happens to an input with other strides or another alignment: ``"refuse"`` or ``"copy"``.
        merged: whether one stride steps over all rows, as those of a matrix. Strided leading dims arrive as one, and
            :func:`cute_ops.kernels.lib.matrix.folded` makes one of compact ones, too.
        many: for a list of one or more such tensors: the name of their number, ``"k"``. Lists with the same name have
            the same length, which is also the size of a dim of this name, ``"k n"``. The kernel gets the tensors one
            after another and is compiled for their number; references, ``check`` and ``arrange`` get lists.
        own: for a list: the dims, or the name of the leading dims, whose sizes differ from tensor to tensor. Lists of
            the same length share these sizes, index by index. Functions of sizes get a tuple of them, and cases give
            a tuple.
        strided_like: for outputs of programs, in PyTorch: the input whose strides it gets. By default it is compact.
    """

    # Cached: binding and planning ask for these some forty times per call.
    @cached_property
    def dims(self) -> tuple[Dim, ...]:
        """The dims after the leading ones."""
        return parse(self.shape).dims

    @cached_property
    def rows(self) -> str | None:
        """The name that binds the leading dims, or None."""
        return parse(self.shape).rows

    @cached_property
    def broadcast(self) -> bool:
        """Whether some of the leading dims may be missing."""
        return parse(self.shape).broadcast

    @cached_property
    def may_be_contiguous(self) -> tuple[str, ...]:
        """The dims of which one is contiguous in memory, the preferred one first; none where all strides are free."""
        if self.contiguous is None:
            return tuple(str(d) for d in self.dims[-1:])
        return (self.contiguous,) if isinstance(self.contiguous, str) else self.contiguous

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where these dims are, counted from the end: -1 is the last."""
        if self.contiguous is None:
            return (-1,) if self.dims else ()
        names = (self.rows, *map(str, self.dims))
        return tuple(names.index(name) - len(names) for name in self.may_be_contiguous)

    def contiguous_place(self, shape: Sequence[Any], strides: Sequence[Any]) -> int | None:
        """Which of :attr:`places` is contiguous in memory with these strides; None if none is. A dim of one element
        always is; leading dims of one element do not count.
        """
        return next((p for p in self.places if self._is_contiguous(p, shape, strides)), None)

    def _is_contiguous(self, place: int, shape: Sequence[Any], strides: Sequence[Any]) -> bool:
        if place >= -len(self.dims):
            # Strides come first, so that the usual case does not compare a symbolic size.
            return bool(strides[place] == 1 or shape[place] <= 1)
        lead = len(shape) - len(self.dims)
        stepped = [stride for size, stride in zip(shape[:lead], strides[:lead], strict=True) if size != 1]
        return not stepped or bool(stepped[-1] == 1)

    def is_merged(self, shape: Sequence[Any], strides: Sequence[Any]) -> bool:
        """Whether one stride steps over all leading dims."""
        lead = len(shape) - len(self.dims)
        if lead < 2:
            return True
        # A dim of one element is stepped over last, so that the usual case does not compare a symbolic size.
        every = [*zip(shape[:lead], strides[:lead], strict=True)]
        return _one_stride(every) or _one_stride([each for each in every if each[0] != 1])

    def memory_order(self, rank: int, place: int) -> tuple[int, ...]:
        """The dims from the outermost in memory to the contiguous one, which is at this place. Leading dims stay
        together, so that they can be merged.
        """
        lead = rank - len(self.dims)
        inner = range(lead) if place < -len(self.dims) else range(rank + place, rank + place + 1)
        return (*(i for i in range(rank) if i not in inner), *inner)

    def of(self, dims: Mapping[str, Any]) -> tuple[Any, ...]:
        """The shape for these sizes, with all leading dims."""
        own = [dims[d.name] if d.name else d.of(dims) for d in self.dims]
        return (*(dims[self.rows] if self.rows else ()), *own)

    def has(self, dim: str) -> bool:
        """Whether it has leading dims of this name, or a dim with this name in it."""
        return dim == self.rows or any(dim in d.names for d in self.dims)

    def bound(self, dims: Mapping[str, Any]) -> Any:
        """The value of ``upper_bound`` for these sizes."""
        dim = parse_dim(self.upper_bound or "")
        return dim.of(dims) if dim else None

    @property
    def wrong(self) -> str:
        """What is wrong with the shape."""
        return parse(self.shape).wrong

    @property
    def declared(self) -> str:
        return f"{self.dtype}[{self.shape}]"


def _one_stride(dims: Sequence[tuple[Any, Any]]) -> bool:
    """Whether one stride steps over dims with these sizes and strides."""
    return all(above == size * stride for (_, above), (size, stride) in pairwise(dims))


class Case(NamedTuple):
    """A named problem that tests, tuning and benchmarks share.

    Args:
        name: where the shape comes from, ``"llama3-8b"``.
        dims: sizes by dim name; leading dims as a tuple.
        dtypes: dtype variables that the case fixes; the others follow the first one.
        absent: optional inputs left out.
        attrs: attributes that differ from the default.
        leading: number of leading dims of inputs that broadcast; all of them by default.
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
            value = options[name]
            if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
                known = ", ".join(map(repr, choices[:-1])) + f" or {choices[-1]!r}"
                raise ValueError(f"cute.{what}: option `{name}` is {shown(value)}, expected {known}.")


class Split(NamedTuple):
    """How devices that each have a slice of one dim run an op together: each calls it on its slice, and the results are
    combined. In array-API style.

    Args:
        dim: the name of the dim.
        of_slice: ``of_slice(xp, inputs, attrs, start, size, whole) -> (inputs, attrs)``: the call for the slice
            ``[start, start + size)`` of ``whole``; inputs with that dim are slices already. ``start`` may be an array.
        merge: ``merge(xp, stacked, inputs, attrs, sizes, whole) -> outputs``: the outputs without that dim, by name.
            ``stacked`` has the slices' outputs, stacked along a new first dim, and ``sizes`` the slices' sizes. Outputs
            with that dim are slices. None if outputs without it are sums of the slices' ones, or if there are none.
        merged: for a program, which has neither function, since each device runs it on its slice, and the devices run
            the ops in it that split the dim together: the outputs without that dim that are made of merged ones.
    """

    dim: str
    of_slice: Callable[..., tuple[Mapping[str, Any], Mapping[str, Any]]] | None = None
    merge: Callable[..., Mapping[str, Any]] | None = None
    merged: tuple[str, ...] = ()

    def adds_up(self, output: str) -> bool:
        """Whether the devices' values of an output without the dim are partial sums."""
        return self.merge is None and output not in self.merged


class Sharding(NamedTuple):
    """Which dims several devices may share, besides the leading ones.

    Args:
        parallel: dims shared like rows: from slices of its inputs the op computes the same slices of its outputs. All
            outputs have the dim, except gradients of inputs without it, which are partial sums. ``g`` may be the first
            name of a tied dim, ``g*r`` heads: each device has the same number of whole groups, of all tensors.
        split: how devices share a dim that is neither parallel nor contracted.
        contracted: dims that outputs are sums over, ``k`` of a product, or the name of leading dims: from slices of
            its inputs the op computes slices of the outputs that have the dim, and partial sums of the others.
        whole: dims along which no DTensor may be sharded, because gathering them would cost more than the op; each with
            what to do instead.
        inner: dims that are summed over within the op, ``k`` of a product with an epilogue. On slices of them devices
            run the program that replaces the kernel, and add up the results of each ``xp.product`` in it and of each
            op that has a contracted dim of this name.
    """

    parallel: tuple[str, ...] = ()
    split: Split | None = None
    contracted: tuple[str, ...] = ()
    whole: Mapping[str, str] = {}
    inner: tuple[str, ...] = ()


class Kernel(NamedTuple):
    """What an op is compiled from.

    Args:
        name: ``"module:Class"``, imported by the compiler's process only. The compiled kernel is kept under the digest
            of its sources: its module, the packages that contain it, and all that these import, also in functions, from
            the same package, from this one and from modules that are not installed. Of other installed packages the
            modules that import statements name count; frameworks and the compiler do not. A script may name its own
            class, ``f"{__name__}:Class"``: the compiler's process imports the script, so what the script runs stands
            under ``if __name__ == "__main__"``. So may a notebook: the class is compiled with the functions, imports
            and constants of other cells that it uses.
        sources: sources that no import statement names: files and folders that are read while the kernel is compiled,
            relative to the folder of its module, and modules that ``importlib`` or ``exec`` imports,
            ``("data/table.bin", "mypackage.generated")``; an installed package that is named here counts as a whole.
            When one of them changes, the kernel is compiled anew.
        least_sm: the oldest SM that the kernel runs on, ``89`` for 8.9.
    """

    name: str
    sources: tuple[str, ...] = ()
    least_sm: int = 80


class Program(NamedTuple):
    """What a composite runs in place of a kernel: a Python function that calls other ops and the framework's own
    functions. A composite is declared like any op; the ops of its gradient may be composites, too.

    Args:
        run: ``run(xp, call, inputs, attrs) -> outputs``: arrays by name, None where absent; outputs are new arrays.
            ``call(op, inputs, attrs, inplace=False)`` runs another op, all by name; in place, outputs take the memory
            of inputs that they donate. Arrays have the methods that both frameworks share, such as ``reshape``. ``xp``
            has

            - ``where(condition, x, y)``
            - ``rows_of(table, index)``: ``table[index]``; the framework decides what an index out of range gives
            - ``classes_of(index, count)``: indices as int32, ``count`` in place of those out of range
            - ``sort(keys) -> (keys, order)``: stable
            - ``ends(keys, count)``: int32, for each of ``range(count)`` how many of the sorted keys do not exceed it
            - ``product(a, b, dtype=None)``: ``a @ b`` of a matrix ``b``, or of batches of matrices, with sums in
              float32, rounded once to this or their own dtype
            - ``add_product(total, a, b)``: ``total + a @ b`` of matrices, or of batches of matrices, rounded to the
              dtype of ``total``
            - ``leads(op, inputs, attrs)``: whether our kernel of a product with an epilogue was measured to be at least
              as fast on this GPU as ``product`` and a pass; False without a GPU
            - ``broadcast_to(x, shape)``
            - ``sums(x, axes, like)``: sums in float32 over these axes, counted from the end, in the dtype of ``like``
            - ``ones(shape, like)``: in float32, where ``like`` is
            - ``chunks(inputs, attrs, wanted, share=False)``: the rows of a linear layer a few at a time
              (:class:`cute_ops.composite.chunks.Chunks`)
            - ``shared``: whether devices share the dim that the op splits
        ops: the ops that it calls. If there are none, XLA sees the framework's functions and may shard and fuse them.
        product: the product that it begins with, and that is all but the first of ``ops``: an adapter may run both
            without ``run``.
        maps: whether vmap maps the program where the op has no op of batches: each op that it calls is batched by
            itself. Such a program calls none in place.
    """

    run: Callable[..., Mapping[str, Any]]
    ops: tuple[Op, ...] = ()
    product: Product | None = None
    maps: bool = False


class Product(NamedTuple):
    """A product of the first two inputs of an op: ``a @ b``, of matrices or of batches of them.

    Args:
        turned: which of both is transposed, 0 or 1; None for neither.
        flat: whether the leading dims of both are rows of one matrix.
        dtype: of the product; None for that of ``a``.
        read_as: the input of the op that comes next, in which that reads the product.
        bias: the input whose addition to each row of the product is all that comes next; empty where it is not.
    """

    turned: int | None
    flat: bool = False
    dtype: str | None = None
    read_as: str = ""
    bias: str = ""


class Instead(NamedTuple):
    """A program that runs in place of a kernel if it is faster, or if the kernel does not take the dtypes. Its results
    differ from the kernel's by rounding only.

    Args:
        program: the program; it returns the new values of inputs that the op mutates, too.
        when: ``when(problem)``: whether it runs if the attribute ``fused`` is ``"auto"``; a text means yes and says why
            in the log. With ``"always"`` the kernel runs, with ``"never"`` the program, also on a CPU. No kernel
            depends on this attribute, which must be declared as ``FUSED``.
        dtypes: dtypes that variables of the op may have beside those that the kernel takes.
        anywhere: inputs that the program takes with any strides: it runs where the kernel cannot read one of them.
    """

    program: Program
    when: Callable[[Any], bool | str]
    dtypes: Mapping[str, tuple[str, ...]] = {}
    anywhere: tuple[str, ...] = ()


FUSED = OneOf(*HOW_FUSED)


def importable(name: str) -> str:
    """``__main__:Class`` as another process can import it: by the name of the program's module or file, or of a module
    made from a notebook's cells. Other names are returned unchanged, as are those of a program without a known source.

    Raises:
        ValueError: a notebook's class that refers to what no module can hold.
    """
    module, _, attribute = name.partition(":")
    if module != "__main__":
        return name
    program = sys.modules[module]
    spec, file = getattr(program, "__spec__", None), getattr(program, "__file__", None)
    if spec:
        module = spec.name
    elif file and file.endswith(".py"):
        module = os.path.basename(file).removesuffix(".py")  # noqa: PTH119 (start-up time)
    elif attribute:
        from cute_ops.declaration import notebook  # start-up time: few programs are notebooks

        module = notebook.module_of(attribute, vars(program)) or module
    return f"{module}:{attribute}"


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
