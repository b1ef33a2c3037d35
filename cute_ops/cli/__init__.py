"""The command line: one module per group of commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from cute_ops.calls import manifest
from cute_ops.calls.manifest import Call
from cute_ops.jit import target
from cute_ops.jit.cache import Built
from cute_ops.jit.target import Target

console = Console(soft_wrap=True)
ARCHES = "sm_80, sm_90a, sm_90a:114 (with 114 SMs), ...; repeat, or commas."
Arches = Annotated[list[str] | None, typer.Option("--arch", help=f"{ARCHES} Default: this GPU, or sm_90a.")]

AllowFiles = Annotated[
    bool, typer.Option("--allow-files", help="Execute Python files that a manifest's lines name: file.py:op.")
]


def prose(command: Callable[..., object]) -> str:
    """A command's docstring without the ends of its lines, so that help wraps at the terminal's width."""
    paragraphs = cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def fail(problem: object) -> NoReturn:
    """Print what went wrong and leave with exit code 1."""
    console.print(said(problem), style="red", highlight=False, markup=False)
    raise typer.Exit(1)


def said(problem: object) -> str:
    """The text of an error, one of the system without its number: ``No such file or directory: 'calls.txt'``."""
    if isinstance(problem, OSError) and problem.strerror and problem.filename:
        return f"{problem.strerror}: {str(problem.filename)!r}"
    return str(problem)


def targets(arches: list[str] | None) -> list[Target]:
    """The targets of an ``--arch`` option; this GPU by default, or Hopper where there is none."""
    names = [name for word in arches or () for name in word.split(",") if name]
    try:
        return [target.parse(name) for name in names] or [
            target.of_device() if target.device_count() else target.parse("sm_90a")
        ]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--arch") from error


def table_of(*columns: str) -> Table:
    """An empty table whose cells wrap and are never cut, so that names of files can be copied."""
    table = Table()
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def progress_bar(what: str) -> Progress:
    """A bar with a line of text behind it, on a terminal; in a pipe or a file nothing of it is left."""
    columns = TextColumn(what), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn()
    text = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
    return Progress(*columns, text, console=console, expand=True, disable=not console.is_terminal)


def read_calls(paths: Sequence[Path], files: bool) -> list[Call]:
    """The calls of manifests; none at all is a mistake."""
    try:
        calls = [call for path in paths for call in manifest.read(path, files)]
    except (OSError, ValueError) as error:
        fail(error)
    if not calls:
        fail(f"{', '.join(map(str, paths))}: no calls; on a CPU, where references run, a program records none")
    return calls


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[Built], None]]:
    """A progress bar; the callback advances it by one kernel, names that kernel and prints its error."""
    with progress_bar(what) as bar:
        task = bar.add_task("", total=total)

        def done(built: Built) -> None:
            bar.update(task, advance=1, description=built.variant.describe()[:60])
            if built.error:
                bar.console.print(str(built.error), style="red", highlight=False, markup=False)

        yield done
