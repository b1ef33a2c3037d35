"""Check an installation, compile kernels ahead of time, ship them, tune them, and work on kernels of your own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from cute_ops import __version__, env

# Modules below read variables when they are imported: say what is wrong in a line, not in a traceback.
if __name__ == "__main__" and (problems := env.wrong()):
    sys.exit("\n".join(f"cute_ops: {problem}" for problem in problems))

from cute_ops.autotune import winners as tuned_calls
from cute_ops.cli import Arches, author, bundles, calls, console, fail, prose, said, table_of, tuning
from cute_ops.errors import CacheError, CompileError
from cute_ops.files import cache_dir
from cute_ops.jit import cache
from cute_ops.jit.compile_pool import worker
from cute_ops.tools import doctor


def _version(asked: bool) -> None:
    if asked:
        console.print(f"cute_ops {__version__}", highlight=False)
        raise typer.Exit


app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
cache_app = typer.Typer(no_args_is_help=True, help="The folder of compiled kernels: CUTE_OPS_CACHE_DIR sets it.")
app.add_typer(cache_app, name="cache")
bundle_app = typer.Typer(no_args_is_help=True, help="Folders of compiled kernels that are shipped; see build.")
app.add_typer(bundle_app, name="bundle")
COMMANDS: dict[str, Callable[..., None]] = {
    "verify": author.verify, "bench": author.bench, "inspect": author.inspect, "tune": tuning.tune,
    "record": bundles.record, "manifest": bundles.model, "build": bundles.build, "warm-up": bundles.warm_up,
}  # fmt: skip
for name, command in COMMANDS.items():
    app.command(name, help=prose(command))(command)
bundle_app.command("check", help=prose(bundles.show))(bundles.show)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command("doctor")
def doctor_command() -> None:
    """Check this machine: versions, driver, GPU, cache folder, compiler, and one kernel in each framework.

    Exit code 0 when everything an installed framework needs works, 1 otherwise; each wrong line says what to do.
    """
    marks = {"ok": "[green]ok  [/]", "note": "[yellow]note[/]", "bad": "[red]BAD [/]"}
    failed = False
    for finding in doctor.examine():
        failed |= finding.level == "bad"
        console.print(f"{marks[finding.level]} {escape(finding.text)}", highlight=False)
        if finding.remedy:
            console.print(f"     do: {escape(finding.remedy)}", highlight=False)
    raise typer.Exit(int(failed))


@app.command("compile")
def compile_command(
    op: Annotated[
        str,
        typer.Argument(metavar="OP", help="rmsnorm, rmsnorm_bwd, ..., or yours: file.py, file.py:name, module:name."),
    ],
    *,
    dtype: Annotated[list[str] | None, typer.Option(help=f"{calls.DTYPE}; repeat. Default: bfloat16.")] = None,
    n: calls.Sizes = None,
    dim: calls.Dims = None,
    arch: Arches = None,
    rows: calls.Rows = 4096,
    with_: calls.With = None,
    without: calls.Without = None,
    dump: Annotated[Path | None, typer.Option(help="Folder for PTX and cubin.")] = None,
) -> None:
    """Compile kernels into the cache, for this GPU or any other; needs no GPU.

    Optional inputs are passed if most of the op's cases have them. A file stands for all of its ops.

    Example: python -m cute_ops compile rmsnorm --dtype bfloat16 --n 4096 --n 8192 --arch sm_90a
    """
    ops = calls.ops_of(op, gradients=False)
    table = table_of("kernel", "seconds", "file")
    for variant in calls.variants_of(ops, dtype or [], calls.Asked(n, dim, arch, rows, with_, without)):
        try:
            if dump:
                dump.mkdir(parents=True, exist_ok=True)
                seconds, path = worker.compile(variant, dump / f"{variant.symbol}.so", dump), dump
            else:
                seconds, path = cache.build(variant), cache_dir.folder()
        except (CompileError, CacheError) as error:
            fail(error)
        table.add_row(variant.describe(), f"{seconds:.2f}", str(path / f"{variant.symbol}.so"))
    console.print(table)


@cache_app.command("info")
def cache_info() -> None:
    """List the cached kernels, most recently used first, and say how many classes of calls were tuned."""
    found = cache.entries()
    total = sum(size for _, size, _ in found)
    console.print(
        f"{cache_dir.folder()}: {len(found)} kernels, {total / 1e6:.2f} MB of at most {cache.MAX_BYTES / 1e6:.0f}"
    )
    tuned = tuned_calls.read(cache_dir.folder() / tuned_calls.NAME).values()
    if tuned:
        other = sum(dict(winner.config) != dict(winner.heuristic) for winner in tuned)
        console.print(
            f"{tuned_calls.NAME}: {len(tuned)} classes of calls, {other} with another config than the heuristic's"
        )
    if found:
        table = table_of("kernel", "KB", "symbol")
        for variant, size, _ in found:
            table.add_row(escape(variant.describe()), f"{size / 1e3:.1f}", escape(variant.symbol))
        console.print(table)


@cache_app.command("clear")
def cache_clear() -> None:
    """Delete every cached kernel. Programs that run keep what they have loaded."""
    try:
        console.print(f"deleted {cache.clear()} kernels from {cache_dir.folder()}")
    except CacheError as error:
        fail(error)


def main() -> None:
    """Run the command line. A file that cannot be read or written gives one line instead of a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # of characters that the terminal's encoding lacks
    try:
        app()
    except OSError as error:
        try:
            console.print(said(error), style="red", highlight=False, markup=False)
        except OSError:  # there is no room for the output
            sys.stderr.write(f"{said(error)}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
