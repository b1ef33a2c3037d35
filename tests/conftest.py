"""Markers that every test folder shares."""

from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from importlib import import_module, metadata
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# What a user has set for programs and not for their tests: widths and colours of terminals, which tests compare text
# with, and what changes the numbers of frameworks or whether they compile. `other_machines.py` sets all of it.
FOR_PROGRAMS = {
    "COLUMNS", "LINES", "TERMINAL_WIDTH", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "TTY_COMPATIBLE",
    "TTY_INTERACTIVE", "GITHUB_ACTIONS",  # by which typer takes a file for a terminal
    "JAX_ENABLE_X64", "JAX_NUMPY_RANK_PROMOTION", "JAX_NUMPY_DTYPE_PROMOTION", "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_DEBUG_NANS", "JAX_DEBUG_INFS", "JAX_DISABLE_JIT", "JAX_LOG_COMPILES", "JAX_COMPILATION_CACHE_DIR",
    "TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
    "TORCHINDUCTOR_CACHE_DIR",
    # Programs that tests start print whole lines: unbuffered, those of two processes that share a pipe mix. They import
    # what lies beside them.
    "PYTHONUNBUFFERED", "PYTHONSAFEPATH",
}  # fmt: skip
# What tests themselves read: how many calls they draw, and by which seed.
OF_TESTS = {
    "CUTE_OPS_EXPRESSIONS_SEED", "CUTE_OPS_FEATURES", "CUTE_OPS_SEED", "CUTE_OPS_SWEEP", "CUTE_OPS_SWEEP_SEED",
}  # fmt: skip
GIVEN: dict[str, str] = {}
DRAW = "TESTS_DRAW"  # in the environment: the text that draws cases
DRAWN = 0.6  # of the parts that marks name: they draw again for each commit
BYTECODE = str(Path(__file__).parents[1] / "out" / "bytecode")


def _forget_the_user() -> None:
    """Tests of what the environment or the umask do set it; all others take what most machines have."""
    for name in FOR_PROGRAMS | {name for name in os.environ if name.startswith("CUTE_OPS_")} - OF_TESTS:
        if name in os.environ:
            GIVEN[name] = os.environ.pop(name)
    os.umask(0o022)
    # Programs that tests start find our packages and `tests`, as under make.
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(Path(__file__).parents[1]), *path]))
    _keep_bytecode()


def _keep_bytecode() -> None:
    """Modules are compiled once for all runs and the hundreds of programs that tests start, not once a process: from
    source, torch's and JAX's take five seconds. Environments may have been made without bytecode, and be read-only.
    """
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None) and "PYTHONPYCACHEPREFIX" not in os.environ:
        os.environ["PYTHONPYCACHEPREFIX"] = BYTECODE
    sys.dont_write_bytecode, sys.pycache_prefix = False, os.environ.get("PYTHONPYCACHEPREFIX")


# Before the import of our packages, which reads some. A process of xdist has what the first one has chosen since.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _forget_the_user()

from cute_ops import FLOATS, Op, Program, Tensor  # noqa: E402
from cute_ops.autotune import dispatch  # noqa: E402
from cute_ops.composite.models import MODELS  # noqa: E402
from cute_ops.jit import target  # noqa: E402
from cute_ops.ops import OPS, PRODUCTS  # noqa: E402
from cute_ops.ops.attention import config as attention  # noqa: E402
from tests.drawing import part_of  # noqa: E402
from tests.gpu_memory import give_back, large_turn  # noqa: E402

# What the second table of features has as columns.
PRODUCT_NAMES = (
    "linear", "linear_epilogue", *(op.name for op in PRODUCTS), "gated_mlp", "mlp", "linear_add_rmsnorm",
    "rmsnorm_linear", "qkv_rope",
)  # fmt: skip


def _compile_quickly() -> None:
    """On a CPU XLA and Inductor take longer to compile than what they compiled takes to run, once."""
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    # XLA ends a process at a flag that it does not know, so only where constraints.txt's JAX is. Splitting a small
    # program to generate its code in parallel takes longer than generating it.
    flags = os.environ.get("XLA_FLAGS", "").split()
    ours = ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
    if any(found.version.startswith("0.10.") for found in metadata.distributions(name="jaxlib")):
        os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys([*flags, *ours]))
    # The key of a program that JAX would look up in a kept cache takes 5% of the time to compile it.
    os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "0")
    # No vector instructions, which each kind takes a program and a process that imports torch to look for, and no
    # processes that wait for something to compile: they import torch, too.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Torch keeps what its own ops gave for tensors without data; a test's shapes rarely come again, and with symbols
    # for sizes an entry takes longer than the op.
    os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")


# A shell's background jobs ignore interrupts, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before any folder's conftest imports JAX or torch. Of a GPU's tests the cache may hold kernels compiled ahead.
if not target.device_count():
    _compile_quickly()
elif "CUTE_OPS_CACHE_DIR" in GIVEN:
    os.environ["CUTE_OPS_CACHE_DIR"] = GIVEN["CUTE_OPS_CACHE_DIR"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="one case of each fast test; with --room all cases")
    parser.addoption("--attention-by-warps", action="store_true", help="attention by mma.sync on Hopper, too")
    parser.addoption("--all", action="store_true", help="all cases of tests with the mark drawn")
    parser.addoption("--draw", metavar="TEXT", help="another text draws other cases; by default the commit")
    parser.addoption(
        "--drawn", type=float, default=DRAWN, metavar="PART", help="so much of the parts that the mark drawn names"
    )
    parser.addoption("--room", metavar="NAME", help="only files of tests that import this room, or have its name")
    parser.addoption("--sample", type=float, default=1.0, metavar="PART", help="this part of the tests, by chance")
    parser.addoption("--sample-seed", default="0", metavar="TEXT", help="another text takes another part")
    parser.addoption(
        "--sample-often", default="1:", metavar="TIMES:PATTERN", help="so many times the part of tests with such names"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``--room``, leave out files of tests that neither name that room of our packages nor have its name."""
    room = config.getoption("--room")
    if not room or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text(encoding="utf-8")
    path = (
        rf"(?m)\bcute_ops\w*[./]([\w./]+[./])?{re.escape(room)}\b|^\s*from cute_ops\S* import .*\b{re.escape(room)}\b"
    )
    return None if room in collection_path.stem.split("_") or re.search(path, text) else True


def _quick(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests and, without ``--room``, all cases of a test but one, which its name draws."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("slow") and not _skipped(item):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    if not config.getoption("--room"):
        cases = {name: [some[zlib.crc32(name.encode()) % len(some)]] for name, some in cases.items()}
    kept = {item for some in cases.values() for item in some}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _draw(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out cases of tests with the mark ``drawn``, and tests that are drawn among others, that are not drawn."""
    cases: dict[tuple[str, float], list[pytest.Item]] = {}
    for item in items:
        if (mark := item.get_closest_marker("drawn")) and not _skipped(item):
            key = mark.kwargs.get("among") or item.nodeid.partition("[")[0]
            cases.setdefault((key, mark.args[0]), []).append(item)
    left = set[pytest.Item]()
    for (name, part), some in cases.items():
        part *= config.getoption("--drawn")
        left.update(set(some).difference(part_of(some, part, f"{os.environ[DRAW]} {name}")))
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def _draws(config: pytest.Config) -> bool:
    """Not on a GPU, where ``--sample`` takes a part of all tests."""
    whole = any(map(config.getoption, ("--all", "--quick"))) or "CUTE_OPS_FEATURES" in os.environ
    return not (whole or target.device_count())


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if _draws(config):
        terminalreporter.write_line(f"drawn tests: --draw {os.environ[DRAW]} takes these again, --all takes all")


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what ``--sample`` does not draw: by each test's name, so that all processes draw the same."""
    part, seed = config.getoption("--sample"), config.getoption("--sample-seed")
    times, _, pattern = config.getoption("--sample-often").partition(":")

    def chance(name: str) -> float:
        return part * float(times) if re.search(pattern, name) else part

    drawn = [item for item in items if zlib.crc32(f"{seed} {item.nodeid}".encode()) < chance(item.nodeid) * 2**32]
    if len(drawn) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(drawn)])
        items[:] = drawn


def pytest_collection(session: pytest.Session) -> None:
    """From source, two processes that collect all tests would compile the same modules side by side, their frameworks,
    too, for fifteen seconds. Every second one imports tests from the last to the first, so each finds half compiled.
    """
    config = session.config
    if os.environ.get("PYTEST_XDIST_WORKER", "")[-1:] not in {*"13579"} or config.args != config.getini("testpaths"):
        return
    root = Path(__file__).parents[1]
    for folder in sorted({path.parent for path in root.glob("tests/*/test_*.py")}, reverse=True):
        for path in [folder / "conftest.py", *sorted(folder.glob("test_*.py"), reverse=True)]:
            if path.exists():
                with suppress(Exception, pytest.skip.Exception):  # collecting it says so
                    import_module(".".join(path.relative_to(root).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Frameworks and thousands of tests stay: the garbage collector need not look at them again and again. To look for
    garbage among them once takes a second in each process.
    """
    if not target.device_count():  # whose memory garbage must not hold
        gc.enable()
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)  # outside of pytest-timeout, which would count the wait
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """On a GPU tests with the mark ``large`` take turns, and what a test has freed is other processes'."""
    if not target.device_count():
        yield
        return
    with large_turn() if item.get_closest_marker("large") else nullcontext():
        yield
        give_back()


def pytest_sessionfinish() -> None:
    """Nor at the end: pytest and Python would look twice each, and nothing of this process is used again."""
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Nothing that this user has measured, or compiled from an earlier state of this repository, is in its tests.

    On a GPU kernels stay: ``gpu_kernels.py`` compiles them ahead.
    """
    if not target.device_count():
        gc.disable()  # until all tests are collected
    for name in ("TORCHINDUCTOR_CACHE_DIR", *(() if target.device_count() else ("CUTE_OPS_CACHE_DIR",))):
        if name not in os.environ:
            os.environ[name] = folder = tempfile.mkdtemp(prefix="cute_ops_tests_")
            config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))
    if "PYTEST_XDIST_WORKER" not in os.environ:  # all processes draw the same
        os.environ[DRAW] = config.getoption("--draw") or _commit() or "0"
    if config.getoption("--attention-by-warps"):
        attention.by_warpgroups = lambda arch: False
    if "PYTEST_XDIST_WORKER" not in os.environ:  # of modules that tests wrote and that are gone
        config.add_cleanup(partial(shutil.rmtree, BYTECODE + tempfile.gettempdir(), ignore_errors=True))
    # Both folders' conftest take it from here: a conftest cannot be imported.
    config.some_of = some_of  # type: ignore[attr-defined]
    if "CUTE_OPS_FEATURES" in os.environ:
        config.pluginmanager.register(Features(Path(os.environ["CUTE_OPS_FEATURES"]), config))


class Features:
    """Which features were proven for which ops in a run: tests with the mark ``feature`` that run for every op, and for
    every product.

    ``CUTE_OPS_FEATURES=docs/features_torch.md python -m pytest -m feature tests/torch`` writes the page's tables anew.
    What a run does not touch or skips, GPU tests where no GPU is, stays as it was; ``not run`` is what no run has
    proven yet, and a dash what does not apply.
    """

    def __init__(self, page: Path, config: pytest.Config) -> None:
        self.page, self.config = page, config
        self.seen: dict[tuple[str, str], None] = {}
        self.passed: dict[tuple[str, str], bool] = {}

    # The reports, since they travel from the processes of xdist.
    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = (yield).get_result()  # type: ignore[misc]
        report.user_properties = [*report.user_properties, *(("feature", list(cell)) for cell in self._cells(item))]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, cell in report.user_properties:
            if name == "feature":
                row, op = cell
                self.seen[row, op] = None
                if report.failed or (report.when == "call" and report.passed):
                    self.passed[row, op] = self.passed.get((row, op), True) and report.passed

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workerinput"):
            return
        known = table(self.page)
        cells = {**known, **{cell: "not run" for cell in self.seen if known.get(cell, "-") == "-"}}
        cells |= {cell: "yes" if passed else "**no**" for cell, passed in self.passed.items()}
        texts = TABLE.split(self.page.read_text(encoding="utf-8"))
        for place, every in enumerate(([op.name for op in OPS], PRODUCT_NAMES, [op.name for op in MODELS])):
            columns = {op for _, op in cells}.intersection(every)
            ops, rows = [op for op in every if op in columns], dict.fromkeys(row for row, op in cells if op in columns)
            lines = [f"| | {' | '.join(f'`{op}`' for op in ops)} |", f"|---|{'---|' * len(ops)}"]
            lines += [f"| {row} | {' | '.join(cells.get((row, op), '-') for op in ops)} |" for row in rows]
            texts.insert(2 * place + 1, "\n".join(lines) + "\n")
        self.page.write_text("".join(texts), encoding="utf-8")

    def _cells(self, item: Any) -> list[tuple[str, str]]:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if params.get("adapter", self.page.name).split()[0] not in self.page.name:  # of the other framework
            return []
        subject = next(
            (
                params[name]
                for name in ("op", "any_op", "row_op", "layer", "problem", "turn", "trained", "product")
                if name in params
            ),
            None,
        )
        # A problem's op, a product or the op; a test without one is for all of them.
        if subject is None:
            names = [*(op.name for op in OPS), *PRODUCT_NAMES]
        else:
            names = [subject.name if "product" in params else getattr(subject, "op", subject).name]
        return [(mark.args[0], name.removesuffix("_bwd")) for mark in item.iter_markers("feature") for name in names]


TABLE = re.compile(r"(?m)^(?:\|.*\n)+")  # on a page of features


def table(page: Path) -> dict[tuple[str, str], str]:
    """The cells of a page's tables, by row and column."""
    cells = {}
    for text in TABLE.findall(page.read_text(encoding="utf-8")):
        head, _, *rows = [line.strip("|").split("|") for line in text.splitlines()]
        ops = [cell.strip(" `") for cell in head[1:]]
        cells |= {(row[0].strip(), op): cell.strip() for row in rows for op, cell in zip(ops, row[1:], strict=True)}
    return cells


def traits(op: Op) -> set[str]:
    """What an adapter sees of a declaration."""
    inputs, outputs, grad = op.inputs.values(), op.outputs.values(), op.grad
    seen = {
        "gradient": grad, "no gradient": not grad, "weights": any(not t.rows for t in inputs),
        "several inputs": len(inputs) > 1, "optional weights": any(t.optional and not t.rows for t in inputs),
        "optional rows": any(t.optional and t.rows for t in inputs), "broadcast": any(t.broadcast for t in inputs),
        "indices": any(t.upper_bound for t in inputs), "numbers": any(not t.dims for t in inputs),
        "rows of two dims": any(t.rows and len(t.dims) > 1 for t in inputs), "several dtypes": len(op.dtypes) > 1,
        "several outputs": len(op.shown) > 1, "hidden outputs": len(op.shown) < len(op.outputs),
        "numbers made": any(not t.dims for t in outputs), "written inputs": op.mutates,
        "a gradient of two inputs": grad and any(t.same_as for t in grad.outputs.values()),
        "a gradient from outputs": grad and not op.outputs.keys().isdisjoint(grad.inputs),
    }  # fmt: skip
    return {trait for trait, there in seen.items() if there}


def some_of(ops: Sequence[Op], test: pytest.FunctionDefinition) -> Sequence[Op]:
    """The ops that a test with the mark ``some_ops`` runs for: two, which are others in each test, and as many more as
    show every trait. On a CPU it compares the reference with itself; what differs is what the adapter sees.
    """
    if test.get_closest_marker("some_ops") is None or "CUTE_OPS_FEATURES" in os.environ:
        return ops
    first = zlib.crc32(test.name.encode()) % len(ops)
    turned = [*ops[first:], *ops[:first]]
    chosen, left = turned[:2], set().union(*map(traits, ops))
    while left := left.difference(*map(traits, chosen)):
        chosen.append(max(turned, key=lambda op: len(traits(op) & left)))
    return [op for op in ops if op in chosen]


@pytest.hookimpl(hookwrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Where there is no GPU, a ``gpu`` test has one case: to make thousands takes as long as to import torch."""
    # The table of features has every case.
    if _skipped(metafunc.definition) and "CUTE_OPS_FEATURES" not in os.environ:
        parametrize: Any = metafunc.parametrize

        def once(names: Any, values: Iterable[Any], *args: Any, ids: Any = None, **options: Any) -> None:
            some = ids if ids is None or callable(ids) else list(ids)[:1]
            parametrize(names, list(values)[:1], *args, ids=some, **options)

        metafunc.parametrize = once  # type: ignore[method-assign]
    yield


def _as_root() -> bool:
    """Whether this process may give files away and become another user: not in a container that maps one user only."""
    with tempfile.NamedTemporaryFile() as file, suppress(OSError):
        os.chown(file.name, 65534, 65534)
        return True
    return False


def _skipped(item: pytest.Item) -> bool:
    return not target.device_count() and item.get_closest_marker("gpu") is not None


@pytest.hookimpl(trylast=True)  # of what -k and -m leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``gpu`` tests skip only where there is no GPU. One case of each says so: thousands take half a minute."""
    _leave_out(config, items)
    if config.getoption("--quick"):
        _quick(config, items)
    elif _draws(config):
        _draw(config, items)
    for item in items if not _as_root() else ():
        if item.get_closest_marker("as_root"):
            item.add_marker(pytest.mark.skip(reason="only root can give a file away or become another user"))
    if target.device_count():
        return
    left: dict[str, pytest.Item] = {}
    for item in items:
        if _skipped(item):
            item.add_marker(pytest.mark.skip(reason="no GPU"))
            # The table of features has every case.
            name = item.nodeid if "CUTE_OPS_FEATURES" in os.environ else item.nodeid.partition("[")[0]
            left.setdefault(name, item)
        else:
            left[item.nodeid] = item
    kept = set(left.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture
def drawn(request: pytest.FixtureRequest) -> Callable[[Sequence[Any], float], Sequence[Any]]:
    """``drawn(cases, part)``: of cases that one test runs at once, those of this run, as by the mark of this name."""

    def some(cases: Sequence[Any], part: float) -> Sequence[Any]:
        part *= request.config.getoption("--drawn")
        return part_of(cases, part, f"{os.environ[DRAW]} {request.node.nodeid}") if _draws(request.config) else cases

    return some


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, and nothing held in memory."""
    where = tmp_path / "cache"
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(where))
    dispatch.forget()
    yield where
    dispatch.forget()


@pytest.fixture(params=[0o000, 0o002, 0o077], ids="umask {:03o}".format)
def any_umask(request: pytest.FixtureRequest) -> Iterator[None]:
    """What others may do with new files: anything, as in many containers; the group may write them; nothing."""
    before = os.umask(request.param)
    yield
    os.umask(before)


class Product(NamedTuple):
    """``out = tanh(x @ w.T)``, a user's op whose gradient is three ops: of the product, then of x and of w from that.

    Attributes:
        op: the declaration.
        ran: of which of the four a reference has run or was traced.
    """

    op: Op
    ran: set[str]


_products = count()


@pytest.fixture(params=["kernels", "programs"])
def product(request: pytest.FixtureRequest) -> Product:
    """Another one for each test: no two declarations of one name can be registered. As a program the forward is the
    framework's product, and then an op.
    """
    number, ran = next(_products), set[str]()
    programs = request.param == "programs"  # the request is in no closure: its digest would be that of all tests
    x, w, out = Tensor("*m k", "T"), Tensor("n k", "T"), Tensor("*m n", "T")

    def declare(
        name: str, inputs: dict[str, Tensor], outputs: dict[str, Tensor], compute: Any, *calls: Op, **fields: Any
    ) -> Op:
        def reference(xp: Any, *arrays: Any) -> Any:
            ran.add(name)
            return compute(xp, *arrays)

        def run(xp: Any, call: Any, inputs: Any, attrs: Any) -> Any:
            return {name: reference(call, *inputs.values()) for name in outputs}

        program = programs and name != "tanh"
        how: dict[str, Any] = {"kernel": Program(run, calls)} if program else {"kernel": "a:B", "reference": reference}
        return Op(f"{name}_{number}", inputs=inputs, outputs=outputs, dtypes={"T": FLOATS}, **how, **fields)

    steps = (
        declare("inner", {"out": out, "dout": out}, {"dinner": out}, lambda _, out, dout: dout * (1 - out * out)),
        declare("dgrad", {"w": w, "dinner": out}, {"dx": x}, lambda _, w, dinner: dinner @ w),
        declare("wgrad", {"x": x, "dinner": out}, {"dw": w}, lambda _, x, d: rows(d).T @ rows(x)),
    )
    tanh = declare("tanh", {"x": x}, {"out": x}, lambda xp, x: xp.tanh(x))

    def forward(xp_or_call: Any, x: Any, w: Any) -> Any:
        inner = x @ w.T
        return xp_or_call(tanh, {"x": inner}, {})["out"] if programs else xp_or_call.tanh(inner)

    return Product(declare("product", {"x": x, "w": w}, {"out": out}, forward, tanh, grad=steps), ran)


def rows(a: Any) -> Any:
    return a.reshape(-1, a.shape[-1])


@pytest.fixture
def what_loads() -> Callable[[str, str, int], str]:
    """``what_loads(framework, adapter, limit)``: a program that prints which rooms of ours and which modules of others
    an adapter's import adds to the framework's, and whether it adds fewer modules than ``limit``.
    """

    def program(framework: str, adapter: str, limit: int) -> str:
        return f"""
import sys, {framework}
before = set(sys.modules)
import {adapter}
loaded = set(sys.modules) - before
others = {{n for n in loaded if not n.startswith("cute_ops")}}
rooms = {{".".join(n.split(".")[:2]) for n in loaded - others}}
print(sorted(others | {{r for r in rooms if "." in r}}), len(loaded) < {limit})
"""

    return program
