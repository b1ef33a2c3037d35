"""The calls that the options ``--dtype``, ``--n``, ``--rows``, ``--with`` and ``--without`` describe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from cute_ops import lookup
from cute_ops.errors import meant
from cute_ops.op import Op
from cute_ops.shapes import FLOATS, Array

Sizes = Annotated[list[int] | None, typer.Option("--n", min=1, help="Size of the dim n; repeat for more.")]
Rows = Annotated[int, typer.Option(min=1, help="Number of rows; only its class (few or many) matters.")]
With = Annotated[list[str] | None, typer.Option("--with", help="Pass an optional input; repeat.")]
Without = Annotated[list[str] | None, typer.Option(help="Leave out an optional input; repeat.")]
DTYPE = f"Dtype of all tensors that may have it, {', '.join(FLOATS)}, ..."


def ops_of(name: str) -> list[Op]:
    """The op of a name and its gradient, or every op of a module or file."""
    try:
        return lookup.find_all(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="OP") from error


def check_dtypes(ops: Sequence[Op], dtypes: Sequence[str]) -> None:
    """Refuse a dtype that no input of these ops may have."""
    taken = list(dict.fromkeys(choice for op in ops for t in op.inputs.values() for choice in op.dtype_choices(t)))
    for dtype in dtypes:
        if dtype not in taken:
            names = ", ".join(op.name for op in ops)
            problem = f"no input of {names} may be {dtype}{meant(dtype, taken)}, but {', '.join(taken)}"
            raise typer.BadParameter(problem, param_hint="--dtype")


def sizes_of(op: Op, sizes: Sequence[int] | None, default: Sequence[int]) -> Sequence[int]:
    """The sizes of the dim ``n``: those asked for, else the default; one, which nothing uses, of an op without it."""
    dims = list(dict.fromkeys(name for t in op.inputs.values() for dim in t.dims for name in dim.names))
    if sizes and "n" not in dims:
        where = "its dims have the sizes of its first case" if op.cases else "declare a case to give its dims sizes"
        raise typer.BadParameter(f"{op.name} has no dim n but {', '.join(dims)}: {where}", param_hint="--n")
    return sizes or (default if "n" in dims else default[:1])


def example(
    op: Op, dtype: str, rows: int, n: int, with_: Sequence[str] = (), without: Sequence[str] = ()
) -> dict[str, Array | None]:
    """A call with one dtype and one size, and with the optional inputs that most of the op's cases have."""
    optional = [name for name, tensor in op.inputs.items() if tensor.optional]
    for name in (*with_, *without):
        if name not in optional:
            raise typer.BadParameter(f"{op.name} has no optional input {name}{meant(name, optional)}")
    rare = [name for name in optional if 2 * sum(name in case.absent for case in op.cases) > len(op.cases)]
    absent = {*rare, *without} - {*with_}
    try:
        sizes = op.example((rows,), n)
    except KeyError as error:
        problem = f"{op.name} declares no case that says how large its dim {error.args[0]} is"
        raise typer.BadParameter(problem, param_hint="OP") from None
    return {
        name: None if name in absent else Array(tensor.of(sizes), op.dtype_near(tensor, dtype))
        for name, tensor in op.inputs.items()
    }
