"""The command that measures which configs are fastest on this GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cute_ops.autotune import tuner, winners
from cute_ops.autotune.types import Trial
from cute_ops.cli import AllowFiles, calls, console, fail, progress_bar, read_calls
from cute_ops.declaration.binding import Binding, bind
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import Array
from cute_ops.errors import CacheError
from cute_ops.files import cache_dir
from cute_ops.jit import target

# The row lengths of an op's cases that are worth it, of an op that is tuned by name.
LONG_ROWS = 256


def tune(
    what: Annotated[
        list[str],
        typer.Argument(metavar="OP|FILE.py|MANIFEST ...", help="rmsnorm, or yours: file.py, module:name; a manifest."),
    ],
    *,
    dtype: Annotated[list[str] | None, typer.Option("--dtype", help="Dtype of OP; repeat. Default: bfloat16.")] = None,
    n: Annotated[
        list[int] | None, typer.Option("--n", min=1, help="Sizes of OP's dim n; repeat. Default: its cases'.")
    ] = None,
    dim: calls.Dims = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of OP. Default: as many as make 256 MB.")] = None,
    least: Annotated[
        float, typer.Option(min=0, max=1, help="The fraction of the heuristic's time that a winner must save.")
    ] = 0.02,
    anew: Annotated[bool, typer.Option("--anew", help="Also measure calls that have a winner already.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to add winners to. Default: the cache folder's tuning.json")
    ] = None,
    allow_files: AllowFiles = False,
) -> None:
    """Measure on this GPU which config is fastest for calls of an op and its gradient, and remember it.

    Without this every op runs with its heuristic's config. The configs of the op's search space that fit the SM are
    compiled, checked against float64, and timed in turns on cold buffers in CUDA graphs. A winner must beat the
    heuristic in new samples, by more than chance, and be slower on no call of its class.

    Example: python -m cute_ops tune rmsnorm --n 4096 --n 8192

    Example: python -m cute_ops record -o train.txt -- python train.py; python -m cute_ops tune train.txt

    Programs that start afterwards use the winners; CUTE_OPS_TUNE=0 turns that off. CUTE_OPS_TUNE=1 measures whatever a
    program calls first, PyTorch's or JAX's. `build` puts what calls were tuned to into the bundle. See docs/tuning.md.
    """
    try:
        trials = [trial for name in what for trial in _trials(name, dtype, n, rows, allow_files, dim)]
    except (ValueError, TypeError, RuntimeError, OSError, NotImplementedError) as error:
        fail(error)
    if not any(trial.binding.op.space for trial in trials):
        fail(f"{', '.join(what)}: no search space is declared, see `tuning` of cute_ops.Op")
    if find_spec("torch") is None or not target.device_count():
        fail("tuning needs a GPU, and PyTorch to measure with")
    outcomes: list[tuner.Outcome] = []
    where = out or cache_dir.folder() / winners.NAME
    with progress_bar("tune:") as bar:
        task = bar.add_task("", total=None)
        found = tuner.tune(
            trials, target.of_device(), tuner.bench(), least=least, anew=anew,
            known=winners.read(out) if out else None,
            done=lambda text: bar.update(task, description=text[:70]),
            groups=lambda count: bar.update(task, total=count),
        )  # fmt: skip
        try:
            for outcome in found:
                bar.update(task, advance=1)
                outcomes.append(outcome)
                _remember(outcome, out)
        except CacheError as error:
            fail(error)
    console.print(_table(outcomes))
    changed, failed = sum(o.changed for o in outcomes), sum(bool(o.problem) for o in outcomes)
    console.print(
        f"{len(outcomes)} classes of calls: {changed} changed, {len(outcomes) - changed - failed} stay with the "
        f"heuristic" + (f", {failed} failed" if failed else "") + f"; {where}",
        highlight=False,
    )
    if not outcomes:
        console.print("all of them are remembered; --anew measures again")
    raise typer.Exit(int(failed > 0))


def _remember(outcome: tuner.Outcome, out: Path | None) -> None:
    """Store a winner at once, so that an interruption loses no measurement; or say what is wrong."""
    if outcome.problem:
        console.print(f"{outcome.winner.call}: {outcome.problem}", style="red", markup=False)
    else:
        winners.remember([outcome.winner], out)


def _table(outcomes: Sequence[tuner.Outcome]) -> Table:
    table = Table("call", "us", "tuned", "less", "change", "tried", "refused")
    for o in outcomes:
        gain = f"{o.gain:.1%}" if o.changed else ""
        times = (" ".join(f"{us:.2f}" for us in each) for each in (o.before, o.after if o.changed else ()))
        table.add_row(
            o.winner.call, *times, gain, tuner.changes(o.winner) if o.changed else "", str(o.tried), str(len(o.refused))
        )
    return table


def _trials(
    name: str,
    dtypes: Sequence[str] | None,
    lengths: Sequence[int] | None,
    rows: int | None,
    files: bool = False,
    dims: Sequence[str] | None = None,
) -> Iterator[Trial]:
    """Calls of an op by its cases or sizes, of every op of a file, or of a manifest."""
    path = Path(name)
    if path.suffix != ".py" and path.is_file():
        for call in read_calls([path], files):
            if not call.dynamic:
                yield Trial(bind(call.op, call.inputs, call.attrs), call.memory)
        return
    ops = calls.ops_of(name)
    calls.check_dtypes(ops, dtypes or [])
    for op in ops:
        if op.space is None:
            continue
        for dtype in dtypes or ["bfloat16"]:
            if lengths or dims:
                for sizes in calls.sizes_of(op, lengths, dims, [4096], ops):
                    few = calls.bound(op, calls.example(op, dtype, 1, sizes))
                    given = calls.example(op, dtype, rows or calls.many_rows(few), sizes)
                    yield Trial(calls.bound(op, given), {})
            else:
                for case in _cases(op):
                    yield Trial(_of_case(op, case, dtype, rows or _rows(op, case, dtype)), {})


def _cases(op: Op) -> list[Case]:
    """The cases with rows that are long enough to be worth tuning; all cases if none has."""
    long = [case for case in op.cases if math.prod(v for v in case.dims.values() if isinstance(v, int)) >= LONG_ROWS]
    return long or list(op.cases)


def _rows(op: Op, case: Case, dtype: str) -> int:
    """How many rows a case is measured with: its own where a winner depends on all of its sizes, a product's."""
    sizes: dict[str, int] = {n: math.prod(v) if isinstance(v, tuple) else v for n, v in case.dims.items()}
    if op.space and sizes.keys() <= op.space.buckets.keys():
        return sizes[next(t.rows for t in op.inputs.values() if t.rows)]
    return calls.many_rows(_of_case(op, case, dtype, 1))


def _of_case(op: Op, case: Case, dtype: str, rows: int) -> Binding:
    """A case's call with so many rows."""
    dims = {n: (rows,) if isinstance(v, tuple) else v for n, v in case.dims.items()}
    given = {
        n: Array(t.of(dims), case.dtypes.get(t.dtype) or op.dtype_near(t, dtype))
        for n, t in op.inputs.items()
        if n not in case.absent
    }
    return bind(op, given, {n: v for n, v in case.attrs.items() if n in op.attrs})
