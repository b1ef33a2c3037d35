"""Commands for authors of kernels: ``verify``, ``bench`` and ``inspect``."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cute_ops import hardware
from cute_ops.autotune.rows import flops
from cute_ops.calls import lookup
from cute_ops.cli import Arches, calls, console, fail
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.errors import CompileError
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.variant import Variant
from cute_ops.tools import sass

if TYPE_CHECKING:
    from cute_ops.tools.contract import Contract
    from cute_ops.tools.verify import Runner, Verdict

Which = Annotated[
    str,
    typer.Argument(metavar="OP", help="rmsnorm, or yours: file.py, file.py:name, module:name; gradients come along."),
]
Dtypes = Annotated[
    list[str] | None,
    typer.Option("--dtype", help=f"Dtype: {', '.join(FLOATS)}, ...; repeat. Default: all of the op's."),
]

LENGTHS = 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072  # of the rows that are measured
# Ops of other sizes than rows and columns.
_DRAWN = "tests/torch/test_torch_attention.py draws calls of it"
_PACKED = "tests/torch/test_torch_attention_packed.py draws calls of it"
_ROUTING = "tests/contract/test_routing.py draws calls of it"
NOT_SWEPT = {
    "sorted_embedding_bwd": "it has classes; tests/torch/test_gpu_sweep.py sweeps embedding, which calls it",
    "attention": _DRAWN, "attention_bwd": _DRAWN, "attention_packed": _PACKED, "attention_packed_bwd": _PACKED,
    **dict.fromkeys(
        ("attention_cached", "attention_cached_packed"), "tests/torch/test_torch_attention_cached.py draws calls of it"
    ),
    "decode_attention": "tests/torch/test_torch_decode.py draws calls of it",
    "mla_decode": "tests/contract/test_latent_attention.py draws calls of it",
    **dict.fromkeys(
        ("topk_bwd", "route_bwd", "permute_tokens_bwd", "unpermute_tokens_bwd", "expert_balance_bwd"), _ROUTING
    ),
    **{
        f"group_norm_{step}": "tests/contract/test_group_norm.py draws calls of it"
        for step in (
            "first_bwd", "long_slopes", "long_dx", "long_dweight", "last_bwd",
        )
    },
    "causal_conv1d_packed_bwd": "tests/contract/test_packed.py draws calls of it",
}  # fmt: skip


class CompiledKernel(NamedTuple):
    """One compiled kernel of a variant."""

    name: str
    threads: int
    resources: sass.Resources
    dynamic: int | None
    accesses: list[sass.Access]
    sass: str


def inspect(
    op: Which,
    *,
    dtype: Annotated[str | None, typer.Option(help=f"{calls.DTYPE}. Default: bfloat16.")] = None,
    n: calls.Sizes = None,
    dim: calls.Dims = None,
    arch: Arches = None,
    rows: calls.Rows = 4096,
    with_: calls.With = None,
    without: calls.Without = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for PTX, SASS and cubin.")] = None,
) -> None:
    """Show registers, shared memory and memory accesses of kernels; needs no GPU.

    Example: python -m cute_ops inspect rmsnorm --n 4096 --n 50257 --arch sm_80,sm_90a -o out/

    Stack and local memory are spills or arrays that do not fit registers: both are slow and should be 0. Loads (LDG,
    or LDGSTS to shared memory) and stores (STG) of 16 bytes are the widest; UBLKCP are bulk copies. CTAs/SM is how many
    fit by registers, threads and shared memory.
    """
    ops = calls.ops_of(op)
    wide = console if console.width >= 80 else Console(width=80)  # in fewer columns the table cannot be read
    asked = calls.Asked(n, dim, arch, rows, with_, without)
    for variant in calls.variants_of(ops, [dtype] if dtype else [], asked):
        table = _table_of(variant)
        for kernel in _kernels(variant, out):
            used, dynamic = kernel.resources, kernel.dynamic
            shared = hardware.own_shared(variant.arch, used.shared) + (dynamic or 0)
            fits = hardware.occupancy(variant.arch, kernel.threads, used.registers, shared)
            bad = "[red]" if used.stack or used.local else ""
            table.add_row(
                kernel.name, str(kernel.threads), str(used.registers), f"{bad}{used.stack}", f"{bad}{used.local}",
                f"{shared}" + ("" if dynamic is not None else " + ?"), str(fits),
                "\n".join(f"{a.number} {a.kind} of {a.bytes or 'bulk'}" for a in kernel.accesses),
            )  # fmt: skip
        wide.print(table, "", soft_wrap=False)
    if out:
        console.print(f"PTX, SASS and cubins are in {out}")


def verify(
    op: Annotated[
        str, typer.Argument(metavar="OP", help="As for inspect. Default with --sweep: all ops of this package.")
    ] = "",
    *,
    dtype: Dtypes = None,
    dim: calls.Dims = None,
    framework: Annotated[list[str] | None, typer.Option(help="torch or jax; repeat. Default: those installed.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Calls on a GPU, all of which must give the same bits.")] = 20,
    sweep: Annotated[bool, typer.Option("--sweep", help="Every row length, dtype and layout, in PyTorch.")] = False,
    interpret: Annotated[
        bool, typer.Option("--interpret", help="Run kernels on a CPU, by NumPy, at every row length up to 300.")
    ] = False,
    number: Annotated[
        int, typer.Option("--round", min=0, max=11, help="Number of the sweep's round; 0 to 11 cover all of it.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of what --sweep and --interpret draw at random.")] = 0,
    processes: Annotated[int, typer.Option(min=0, help="Processes of the sweep. Default: one per core.")] = 0,
    fraction: Annotated[float, typer.Option(min=0, max=1, help="Part of the sweep's lengths, drawn at random.")] = 1.0,
    seconds: Annotated[
        float, typer.Option(min=0, help="Seconds after which --sweep and --interpret begin nothing more.")
    ] = float("inf"),
) -> None:
    """Check every named case of an op in every dtype and installed framework against float64.

    On a GPU kernels run: outputs and scratch arrays lie where memory was just filled with NaN, so that an element
    which is not written shows; calls are repeated, since a race gives other bits sooner or later; both frameworks must
    agree to the bit. On a CPU the declared reference runs. A backward op's reference is held to the derivative of the
    forward's. Exit code 1 when anything is wrong. With --dim every case has these sizes in place of its own, also on a
    CPU, where references otherwise run on small cases.

    With --sweep: every row length from 1 to 300, both sides of every length at which the heuristic changes its mind and
    random ones up to 262144, with 1, 2, 5, 201 and 4099 rows, in one pair of dtype and layout a length; twelve rounds
    take each length in every pair. A round compiles some 35000 kernels for all of our ops.

    A file that declares no op but has kernel_fn, reference_fn and get_inputs is checked, too: one on the inputs of the
    third against the other in float64. bench takes such a file as well.

    With --interpret: the kernel itself runs on a CPU, each thread a number of a NumPy array, at rows of 1 to 300
    elements or at the sizes of --dim, each with rows, layout and optional inputs drawn at random. A load or store
    outside of all tensors or off its alignment, an element that is stored twice or never, and in every eighth call a
    race, is an error. docs/debugging.md says which part of CuTe DSL is covered.

    Example: python -m cute_ops verify examples/custom_op/softcap.py --dtype bfloat16

    Example: python -m cute_ops verify examples/custom_op/softcap.py --interpret

    Example: python -m cute_ops verify rmsnorm --sweep --round 3
    """
    asked = Asked(number, seed, processes, fraction, seconds)
    _check_options(op, {"--dtype": dtype, "--framework": framework, "--dim": dim}, asked, sweep, interpret)
    if sweep:
        _sweep(calls.ops_of(op) if op else list(lookup.ours().values()), asked)
    if (given := calls.contract_of(op)) is not None:
        if dtype or dim or framework or interpret:
            raise typer.BadParameter(f"{op} declares no op: its get_inputs() says what is checked", param_hint="OP")
        from cute_ops.tools import contract  # start-up time: other commands need it not

        _report(given.name, contract.verify(given, repeats), dtype, "kernel_fn against reference_fn")
    ops = calls.ops_of(op)
    calls.check_dtypes(ops, dtype or [])
    sizes = calls.parsed(ops, dim)
    if interpret:
        from cute_ops.tools.interpret import interpret as interpreted  # as above

        found = interpreted(ops, dtype or (), sizes, seed, seconds)
        _report(ops, found, dtype, "kernels, interpreted on the CPU")
    _verify(ops, dtype, framework, repeats, sizes)


class Asked(NamedTuple):
    """Options of a sweep and of the interpreter's calls."""

    number: int
    seed: int
    processes: int
    fraction: float
    seconds: float


def _check_options(op: str, chosen: Mapping[str, Any], asked: Asked, sweep: bool, interpret: bool) -> None:
    """Refuse options that do not go together; ``chosen``: those that choose among cases."""
    if sweep and any(chosen.values()):
        hint = next(name for name, value in chosen.items() if value)
        raise typer.BadParameter("a sweep takes every dtype and its own sizes, in PyTorch", param_hint=hint)
    if interpret and (sweep or chosen["--framework"] or not op):
        wrong = "names no op" if not op else "is neither a sweep nor a framework's run"
        raise typer.BadParameter(f"the interpreter {wrong}", param_hint="--interpret")
    if not sweep and (asked.number, asked.processes, asked.fraction) != (0, 0, 1.0):
        raise typer.BadParameter("--round, --processes and --fraction are a sweep's: add --sweep")
    if not sweep and not interpret and (asked.seed, asked.seconds) != (0, float("inf")):
        raise typer.BadParameter("--seed and --seconds are for --sweep and --interpret: add one of them")
    if not sweep and not op:
        raise typer.BadParameter("which op? (all of ours only with --sweep)", param_hint="OP")


def _verify(
    ops: list[Op], dtype: list[str] | None, framework: list[str] | None, repeats: int, sizes: Mapping[str, list[int]]
) -> NoReturn:
    """Check the cases of ops in installed frameworks, say what is wrong and leave."""
    # Start-up time: other commands do not need it.
    from cute_ops.tools.verify import installed, verify

    try:
        runners = installed(framework or ())
    except ValueError as error:
        fail(error)
    if not runners:
        fail("no framework is installed: pip install 'cute-ops[torch]' or 'cute-ops[jax]'")
    where = {name: runner.device() for name, runner in runners.items()}
    console.print(", ".join(f"{name} on {device}" for name, device in where.items()), highlight=False)
    _say_what_is_not_checked(runners)
    what = "kernels" if "cuda" in where.values() else "references, no kernel: there is no GPU here"
    _report(ops, verify(ops, runners, dtype or (), repeats, sizes), dtype, what)


def _say_what_is_not_checked(runners: Mapping[str, Runner]) -> None:
    for name, runner in runners.items():
        if missing := runner.not_checked():
            console.print(f"{name}: {missing}", highlight=False, markup=False)


def _report(ops: list[Op] | str, verdicts: Iterable[Verdict], dtype: list[str] | None, what: str) -> NoReturn:
    """Print what is wrong and how many calls were right; leave with exit code 1 if any was not."""
    failed, called, cases = 0, 0, 0
    with console.status("") as status:
        for found in verdicts:
            cases, called = cases + 1, called + found.calls
            line = f"{found.op} {found.case} {found.dtype} {found.framework}"
            status.update(line)
            if found.problem:
                failed += 1
                console.print(f"[red]BAD [/] {line}", highlight=False)
                console.print(f"     {found.problem}", highlight=False, markup=False)
    if not cases and not isinstance(ops, str):
        declared = any(o.cases for o in ops)
        problem = f"no case takes {', '.join(dtype or ())}" if declared else "no cases are declared"
        fail(f"{', '.join(o.name for o in ops)}: {problem}, so nothing was checked")
    console.print(f"{cases - failed} of {cases} right, {called} calls ({what})", highlight=False)
    raise typer.Exit(int(failed > 0))


def _sweep(ops: list[Op], asked: Asked) -> NoReturn:
    """Run a round of a sweep, say what is wrong and leave with exit code 1 if anything is."""
    # Start-up time: other commands need none.
    from cute_ops.tools.sweep import comparable
    from cute_ops.tools.sweep_run import sweep
    from cute_ops.tools.verify import RUNNERS, installed

    try:
        _say_what_is_not_checked(installed(["torch"]))
    except ValueError as error:
        fail(error)
    left_out = {o.name: "it has no reference but its program" for o in ops if not comparable(o)}
    left_out |= {o.name: NOT_SWEPT[o.name] for o in ops if o.name in NOT_SWEPT}
    start, count, kernels, wrong = time.monotonic(), 0, 0, 0
    with console.status("") as status:
        for found in sweep(
            [o for o in ops if o.name not in left_out], RUNNERS["torch"], asked.number, asked.seed,
            asked.processes or len(os.sched_getaffinity(0)), fraction=asked.fraction, seconds=asked.seconds,
        ):  # fmt: skip
            count, kernels = count + 1, kernels + found.kernels
            if found.problem:
                wrong += 1
                console.print(f"BAD  {found.trial}", style="red", highlight=False, markup=False)
                console.print(f"     {found.problem}", highlight=False, markup=False)
            if count % 100 == 0:
                status.update(f"{count} calls, {kernels} kernels, {wrong} wrong: {found.trial}")
    for name, reason in left_out.items():
        console.print(f"{name} is not swept: {reason}", highlight=False)
    console.print(
        f"round {asked.number}, seed {asked.seed}: {count - wrong} of {count} calls right, {kernels} kernels compiled, "
        f"{time.monotonic() - start:.0f} s",
        highlight=False,
    )
    raise typer.Exit(int(wrong > 0))


def bench(
    op: Which,
    dtype: Annotated[str | None, typer.Option(help=f"{calls.DTYPE}. Default: bfloat16.")] = None,
    n: calls.Sizes = None,
    dim: calls.Dims = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the table and the picture.")] = Path("out/bench"),
) -> None:
    """Measure an op and its gradient on this GPU: GB/s by row length, with what a large copy reaches drawn beside it.

    Calls take turns on buffers that together exceed three times the L2 cache, 64 or more in one CUDA graph; the median
    of its replays counts. GB/s counts the least bytes: every input read once, every output written once, or what the
    op declares as its ``bytes``; of an op that declares ``flops``, TFLOPS are shown, too.

    Example: python -m cute_ops bench rmsnorm --n 1024 --n 4096 --n 50257
    """
    try:
        measure = import_module("cute_ops_torch.tools.measure")
    except ImportError as error:
        fail(f"bench measures through PyTorch, which cannot be imported: {error}")
    if not measure.available():
        fail("bench needs a GPU and a PyTorch that can use it")
    if (given := calls.contract_of(op)) is not None:
        _bench_contract(given, measure)
        return
    ops = calls.ops_of(op)
    calls.check_dtypes(ops, [dtype] if dtype else [])
    ceiling = measure.copy_rate()
    counted = any(declaration.flops for declaration in ops)
    found = []
    for declaration in ops:
        for sizes in calls.sizes_of(declaration, n, dim, LENGTHS, ops):
            found += _measured(measure, declaration, dtype or "bfloat16", sizes, ceiling)
    if not found:
        fail("nothing was measured")
    table = Table("op", "rows", "sizes", "us", "spread", "GB/s", "of a copy", *["TFLOPS"] * counted)
    for row in found:
        table.add_row(
            row.op, row.rows, row.sizes, f"{row.us:.1f}", f"{row.low:.1f} to {row.high:.1f}",
            f"{row.rate:.0f}", f"{row.rate / ceiling:.0%}", *[row.tflops] * counted,
        )  # fmt: skip
    console.print(table)
    out.mkdir(parents=True, exist_ok=True)
    header = f"op,rows,sizes,us,us_min,us_max,gb_s,copy_gb_s{',tflops' * counted}\n"
    rows = (row if counted else row[:-1] for row in found)
    lines = [",".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row) for row in rows]
    (out / "bench.csv").write_text(header + "\n".join(lines) + "\n", encoding="utf-8")
    console.print(f"a large copy: {ceiling:.0f} GB/s; {out / 'bench.csv'}{_picture(found, ceiling, out)}")


class Measured(NamedTuple):
    """A line of bench's table; ``tflops`` is empty where an op declares no ``flops``, ``rows`` without leading dims."""

    op: str
    rows: str
    sizes: str
    us: float
    low: float
    high: float
    rate: float
    ceiling: float
    tflops: str


def _measured(measure: Any, op: Op, dtype: str, sizes: Mapping[str, int], ceiling: float) -> list[Measured]:
    """How long a call with these sizes takes; says so and returns nothing where it cannot be measured."""
    rows = calls.many_rows(calls.bound(op, calls.example(op, dtype, 1, sizes)))
    example = calls.example(op, dtype, rows, sizes)
    binding = calls.bound(op, example)
    # An op of whole matrices has no rows to add: its other sizes are those of a case, which are shown.
    shown = sizes if binding.leading else {**sizes, **binding.dims}
    text = " ".join(f"{name}={size}" for name, size in shown.items())
    try:
        found = measure.measure(op, example)
    except Exception as error:  # the other lengths are measured even if one has no kernel
        console.print(f"{op.name} {text}: {type(error).__name__}: {error}", style="red", markup=False)
        return []
    work = flops(binding)
    tflops = "" if work is None else f"{work / found.us / 1e6:.4g}"
    return [
        Measured(
            op.name,
            str(rows) if binding.leading else "",
            text,
            found.us,
            found.low,
            found.high,
            found.rate,
            ceiling,
            tflops,
        )
    ]


def _bench_contract(given: Contract, measure: Any) -> None:
    """Show how long ``kernel_fn`` and ``reference_fn`` take, in turns on copies of the inputs."""
    ceiling, table = measure.copy_rate(), Table("function", "us", "spread", "GB/s", "of a copy")
    contenders = {"kernel_fn": given.kernel_fn, "reference_fn": given.reference_fn}
    for name, found in measure.functions(given.get_inputs(), contenders).items():
        spread = f"{found.low:.1f} to {found.high:.1f}"
        table.add_row(name, f"{found.us:.1f}", spread, f"{found.rate:.0f}", f"{found.rate / ceiling:.0%}")
    console.print(table)
    console.print(f"a large copy: {ceiling:.0f} GB/s; the host's time counts where it is longer", highlight=False)


def _kernels(variant: Variant, out: Path | None) -> Iterator[CompiledKernel]:
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder)
        try:
            worker.compile(variant, dump / "kernel.so", dump)
            (ptx,) = (path.read_text(encoding="utf-8") for path in dump.glob("*.ptx"))
            resources = {r.kernel: r for r in sass.resources(dump / "kernel.so")}
            code = sass.sass(dump / "kernel.so")
        except (CompileError, FileNotFoundError) as error:
            fail(error)
        if out:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{variant.symbol}.ptx").write_text(ptx, encoding="utf-8")
            (out / f"{variant.symbol}.sass").write_text(code, encoding="utf-8")
            (cubin,) = sass.cubins((dump / "kernel.so").read_bytes())
            (out / f"{variant.symbol}.cubin").write_bytes(cubin)
        shared = json.loads((dump / "shared.json").read_text(encoding="utf-8"))
        for order, (name, threads) in enumerate(sass.threads_of(ptx).items()):
            _, _, rest = code.partition(f"Function : {name}")
            text = rest.partition("Function : ")[0]
            dynamic = shared[order] if order < len(shared) else None
            yield CompiledKernel(short(name), threads, resources[name], dynamic, sass.accesses(text), text)


def short(name: str) -> str:
    """``kernel_cutlass_kernel_cute_opskernelsnormbwd_persistentNormBackward_object_at_...`` -> ``NormBackward``."""
    path = name.removeprefix("kernel_cutlass_kernel_").partition("_object_at")[0]
    if path.startswith("kernel_cutlass_"):  # of a function, followed by the types of its arguments
        return path.removeprefix("kernel_cutlass_").partition("_tensorptr")[0].strip("_")
    # Names of modules have no capitals, and those of classes begin with one.
    return path.lstrip("abcdefghijklmnopqrstuvwxyz0123456789_") or path


def _table_of(variant: Variant) -> Table:
    """An empty table for a variant's kernels, 80 columns wide."""
    title = escape(variant.describe())
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, title=title, title_justify="left")
    table.add_column("kernel", overflow="fold", min_width=17)
    for name in ("threads", "registers", "stack", "local", "  shared", "CTAs/SM"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("loads, stores", overflow="fold", min_width=15)
    return table


def _picture(rows: list[Measured], ceiling: float, out: Path) -> str:
    try:
        import matplotlib  # may be missing
    except ImportError:
        return "; no picture without matplotlib"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in dict.fromkeys(row.op for row in rows):
        # By the first size of ``n=4096 k=512``.
        points = sorted((int(r.sizes.partition(" ")[0].partition("=")[2] or 1), r.rate) for r in rows if r.op == name)
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.axhline(ceiling, color="gray", linestyle="--", label="a large copy")
    axes.set(xscale="log", xlabel="row length, or the first size that was asked for", ylabel="GB/s", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(out / "bench.png", dpi=120)
    return f", {out / 'bench.png'}"
