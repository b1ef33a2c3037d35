"""The calls that the options ``--dtype``, ``--n``, ``--dim``, ``--rows``, ``--with`` and ``--without`` describe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from cute_ops.autotune import dispatch
from cute_ops.autotune.rows import bytes_moved
from cute_ops.calls import lookup
from cute_ops.cli import fail, targets
from cute_ops.declaration.binding import Binding, bind
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS, Array
from cute_ops.errors import meant
from cute_ops.jit.variant import Variant

if TYPE_CHECKING:
    from cute_ops.tools.contract import Contract

Sizes = Annotated[list[int] | None, typer.Option("--n", min=1, help="Size of the dim n; repeat for more.")]
Dims = Annotated[
    list[str] | None,
    typer.Option("--dim", metavar="NAME=SIZE", help="Size of a dim by its name, k=512; repeat for more dims or sizes."),
]
Rows = Annotated[int, typer.Option(min=1, help="Number of rows; only its class (few or many) matters.")]
With = Annotated[list[str] | None, typer.Option("--with", help="Pass an optional input; repeat.")]
Without = Annotated[list[str] | None, typer.Option(help="Leave out an optional input; repeat.")]
# What a call whose number of rows is not said reads and writes.
BYTES = 256 << 20
DTYPE = f"Dtype of all tensors that may have it, {', '.join(FLOATS)}, ..."


def ops_of(name: str, gradients: bool = True) -> list[Op]:
    """The op of a name and, unless ``gradients`` is false, its gradient; or every op of a module or file."""
    try:
        return lookup.find_all(name, gradients)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="OP") from error


def contract_of(name: str) -> Contract | None:
    """The contract of a file that declares no op but ``kernel_fn``, ``reference_fn`` and ``get_inputs``; else None."""
    from cute_ops.tools import contract  # start-up time: it imports NumPy

    if not name.endswith(".py"):
        return None
    try:
        module = lookup.load(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="OP") from error
    return None if lookup.of_module(module) else contract.of_module(module)


def check_dtypes(ops: Sequence[Op], dtypes: Sequence[str]) -> None:
    """Refuse a dtype that no input of these ops may have."""
    taken = list(dict.fromkeys(choice for op in ops for t in op.inputs.values() for choice in op.dtype_choices(t)))
    for dtype in dtypes:
        if dtype not in taken:
            names = ", ".join(op.name for op in ops)
            problem = f"no input of {names} may be {dtype}{meant(dtype, taken)}, but {', '.join(taken)}"
            raise typer.BadParameter(problem, param_hint="--dtype")


def sizes_of(
    op: Op, n: Sequence[int] | None, dims: Sequence[str] | None, default: Sequence[int], among: Sequence[Op] = ()
) -> list[dict[str, int]]:
    """Sizes of an op's dims by name: every combination of those asked for. ``n`` has the default's where it is not.

    Args:
        n, dims: what is asked for.
        default: sizes of ``n``.
        among: the ops that are asked for together, an op and its gradient: some of the dims may be others' alone.
    """
    names, ops = names_of(op), among or (op,)
    if n and not any("n" in names_of(each) for each in ops):
        where = "the first case's are the sizes" if op.cases else "no case gives sizes"
        problem = f"{op.name} has no dim n but {', '.join(names)}: {where} that no --dim NAME=SIZE does"
        raise typer.BadParameter(problem, param_hint="--n")
    asked = {"n": list(default), **parsed(ops, [*(f"n={size}" for size in n or ()), *(dims or ())])}
    given = {name: sizes for name, sizes in asked.items() if name in names}
    return [dict(zip(given, chosen, strict=True)) for chosen in product(*given.values())]


def parsed(ops: Sequence[Op], dims: Sequence[str] | None) -> dict[str, list[int]]:
    """The sizes that ``--dim k=512`` gives to dims, which one of the ops must have."""
    names = list(dict.fromkeys(name for op in ops for name in names_of(op)))
    found: dict[str, list[int]] = {}
    for word in dims or ():
        name, _, size = word.partition("=")
        if not size.isdecimal() or int(size) < 1:
            raise typer.BadParameter(f"{word!r} is not NAME=SIZE, such as k=512", param_hint="--dim")
        if name not in names:
            what = ", ".join(op.name for op in ops)
            problem = f"{what}: no dim {name}{meant(name, names)}, but {', '.join(names)}"
            raise typer.BadParameter(problem, param_hint="--dim")
        found.setdefault(name, []).append(int(size))
    return found


def names_of(op: Op) -> list[str]:
    """The names of the dims, and of the leading dims, of an op's inputs."""
    inputs = op.inputs.values()
    found = [name for t in inputs for dim in t.dims for name in dim.names] + [t.rows for t in inputs if t.rows]
    return list(dict.fromkeys(found))


def many_rows(one: Binding) -> int:
    """Rows with which a call moves :data:`BYTES`, from the call with one row."""
    return max(BYTES // bytes_moved(one), 1)


def example(
    op: Op,
    dtype: str,
    rows: int,
    sizes: Mapping[str, int],
    with_: Sequence[str] = (),
    without: Sequence[str] = (),
) -> dict[str, Array | None]:
    """A call with one dtype and these sizes, and with the optional inputs that most of the op's cases have."""
    optional = [name for name, tensor in op.inputs.items() if tensor.optional]
    for name in (*with_, *without):
        if name not in optional:
            raise typer.BadParameter(f"{op.name} has no optional input {name}{meant(name, optional)}")
    rare = [name for name in optional if 2 * sum(name in case.absent for case in op.cases) > len(op.cases)]
    absent = {*rare, *without} - {*with_}
    try:
        dims = op.example((rows,), sizes.get("n", 1), sizes)
    except KeyError as error:
        name = error.args[0]
        problem = f"{op.name} declares no case that says how large its dim {name} is: --dim {name}=SIZE does"
        raise typer.BadParameter(problem, param_hint="OP") from None
    return {
        name: None if name in absent else Array(tensor.of(dims), op.dtype_near(tensor, dtype))
        for name, tensor in op.inputs.items()
    }


class Asked(NamedTuple):
    """Options of calls: sizes, targets, rows, and which optional inputs are passed or not."""

    n: Sequence[int] | None
    dims: Sequence[str] | None
    arches: list[str] | None
    rows: int
    with_: Sequence[str] | None
    without: Sequence[str] | None


def variants_of(ops: Sequence[Op], dtypes: Sequence[str], asked: Asked) -> Iterator[Variant]:
    """The kernels that the options ask for, with what a program on this machine would choose."""
    check_dtypes(ops, dtypes)
    for op, where, dtype in product(ops, targets(asked.arches), dtypes or ["bfloat16"]):
        for sizes in sizes_of(op, asked.n, asked.dims, [4096], ops):
            binding = bound(op, example(op, dtype, asked.rows, sizes, asked.with_ or (), asked.without or ()))
            try:
                yield dispatch.foresee(binding, {}, where).variant
            except NotImplementedError as error:
                fail(error)


def bound(op: Op, given: Mapping[str, Array | None]) -> Binding:
    """The checked call of an example, or what is wrong with the sizes that were asked for."""
    try:
        return bind(op, given)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error).partition("\n")[0]) from error
