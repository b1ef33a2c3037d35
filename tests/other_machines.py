"""Run a drawn part of the tests as if on other machines: other processors, users, folders, languages, environments.

    make machines                                        # every machine: an hour or two on two cores
    python tests/other_machines.py --list
    python tests/other_machines.py --only nobody --only turkish --fraction 0.2
    python tests/other_machines.py --only "umask 000" --tests tests/core/test_cache.py --fraction 1

Each machine gets a copy of the working tree, as a fresh clone would be, and ``make test`` runs there. Tests that start
programs, read files or compare numbers with another library are drawn more often. The seed is printed: the same seed
draws the same tests. Exit code 1 where a test failed or a machine could not run; what this computer cannot be (another
user without root's rights, AVX-512 without such a processor) is skipped, and the table says why.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).parents[1]
NOBODY, STRANGER = 65534, 54321  # the second has no name and no home
# Where tests depend on the machine most: processes, files, users, text, and numbers of other libraries.
LIKELY = (
    "test_author|test_bundle|test_cache|test_cli|test_docs|test_exchange|test_isolation|test_loader|test_manifest|"
    "test_notebook|test_processes|test_sources|test_trust|test_tuning|test_worker|cross_entropy|numerics|test_export|"
    "export|inductor|distributed|test_torch_run|tests/examples|loading|patching"
)
LIKELY_TIMES = 4


@dataclass(frozen=True)
class Machine:
    """What is other than here.

    Attributes:
        about: what it stands for.
        variables: of the environment; None removes one. ``{base}`` is a folder of this machine's own.
        clean: nothing of this environment but PATH comes along.
        place: the copy's folder, relative to a folder of this machine's own.
        mode: the copy's folder has these rights.
        link: the copy is reached through a symbolic link.
        user: the user that runs the tests; None for this one.
        owned: the copy belongs to that user, too. Otherwise it cannot write there.
        umask: of the copy and of the tests.
        wrap: a command that runs the tests' command.
        processes: of pytest-xdist.
        threads: of each of them.
        load: so many busy processes for each core beside the tests.
        tests: of these folders only.
        needs: why this computer cannot be it; an empty text where it can.
    """

    about: str
    variables: Mapping[str, str | None] = field(default_factory=dict)
    clean: bool = False
    place: str = "clone"
    mode: int = 0o755
    link: bool = False
    user: int | None = None
    owned: bool = True
    umask: int = 0o022
    wrap: tuple[str, ...] = ()
    processes: int = 0
    threads: int = 1
    load: int = 0
    tests: tuple[str, ...] = ()
    needs: Callable[[], str] = lambda: ""


def root() -> str:
    return "" if os.geteuid() == 0 else "only root can be another user"


def processor(flag: str) -> Callable[[], str]:
    def missing() -> str:
        return "" if flag in Path("/proc/cpuinfo").read_text().split() else f"this processor has no {flag}"

    return missing


def command(*words: str) -> Callable[[], str]:
    def missing() -> str:
        try:
            return "" if subprocess.run([*words, "true"], capture_output=True).returncode == 0 else "not permitted here"
        except FileNotFoundError:
            return f"there is no {words[0]}"

    return missing


def vectors(torch: str, xla: str, onednn: str, blas: str, numpy: str | None = None) -> dict[str, str | None]:
    """Each library's own variable for the vector instructions that it may use."""
    return {
        "ATEN_CPU_CAPABILITY": torch, "XLA_FLAGS": f"--xla_cpu_max_isa={xla}", "ONEDNN_MAX_CPU_ISA": onednn,
        "OPENBLAS_CORETYPE": blas, "NPY_DISABLE_CPU_FEATURES": numpy,
    }  # fmt: skip


NO_HOME = {"HOME": None, "XDG_CACHE_HOME": None}
NO_NETWORK = ("unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")
NO_NAME = ("unshare", "--uts", "sh", "-c", 'hostname unknown.invalid; exec "$@"', "sh")

MACHINES = {
    "as it is": Machine("a fresh clone here"),
    # Processors.
    # (Without AVX XLA compiles no float16.)
    "no vectors": Machine(
        "a processor of 2011", vectors("default", "AVX", "SSE41", "Nehalem", "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX")
    ),
    "avx2": Machine(
        "a processor without AVX-512", vectors("avx2", "AVX2", "AVX2", "Haswell", "AVX512F AVX512CD AVX512_SKX")
    ),
    "avx512": Machine(
        "a server's processor", vectors("avx512", "AVX512", "AVX512_CORE", "SkylakeX"), needs=processor("avx512bw")
    ),
    "one core": Machine(
        "a container with one core", wrap=("taskset", "--cpu-list", "0"), needs=command("taskset", "--cpu-list", "0")
    ),
    "sixteen processes": Machine("a large workstation", processes=16, tests=("tests/core",)),
    "threads": Machine("libraries that use sixteen threads", threads=16),
    "load": Machine("a computer that is four times too busy", load=4),
    # Users.
    "user": Machine(
        "a user with a home and a group of its own",
        {"HOME": "{base}/home"},
        user=1000,
        umask=0o002,
        mode=0o700,
        needs=root,
    ),
    "root of a container": Machine(
        "root that is another user outside",
        wrap=("unshare", "--user", "--map-root-user"),
        needs=command("unshare", "--user", "--map-root-user"),
    ),
    "nobody": Machine("a user without a home", NO_HOME, user=NOBODY, needs=root),
    "stranger": Machine(
        "a user without a name or a home, as in many containers, that cannot write the checkout",
        NO_HOME,
        user=STRANGER,
        owned=False,
        needs=root,
    ),
    # Folders.
    "private folder": Machine("a home that only its owner may enter", mode=0o700),
    "open folder": Machine("a folder that everybody may write", mode=0o777),
    "spaces": Machine("a folder with spaces and quotes", place="my own files/it's 50%"),
    "letters": Machine("a folder with letters of other languages", place="Größe/日本語"),
    "deep folder": Machine("a long path", place="/".join(["a-folder-with-a-long-name"] * 8)),
    "symbolic link": Machine("a folder that is reached through a link", link=True),
    # (PyTorch's Inductor gives the C++ compiler paths without quotes.)
    "temporary files elsewhere": Machine("a scratch disk", {"TMPDIR": "{base}/scratch-disk/ü"}),
    "umask 077": Machine("what only this user may read", umask=0o077),
    "umask 002": Machine("what a group may write", umask=0o002),
    "umask 000": Machine("what everybody may write, as in many containers", umask=0o000),
    # Languages.
    "C": Machine("no language", {"LANG": "C", "LC_ALL": "C", "LANGUAGE": None}),
    # (PyTorch's Inductor reads its own files in the language's encoding.)
    "ascii": Machine(
        "no letters but ASCII", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, tests=("tests/core",)
    ),
    "turkish": Machine("i is not the small I", {"LANG": "tr_TR.UTF-8", "LC_ALL": "tr_TR.UTF-8", "LANGUAGE": "tr"}),
    "kathmandu": Machine("a quarter of an hour off", {"TZ": "Asia/Kathmandu", "LC_ALL": None, "LANG": "de_DE.UTF-8"}),
    "no time zone": Machine("one that does not exist", {"TZ": "Nowhere/At_All"}),
    # Environments.
    "nothing": Machine("a job of cron: PATH alone", clean=True),
    "narrow": Machine(
        "a small terminal without colours",
        {"COLUMNS": "20", "LINES": "5", "TERM": "dumb", "NO_COLOR": "1", "TERMINAL_WIDTH": "20"},
    ),
    "colours": Machine(
        "programs that write colours into files",
        {
            "FORCE_COLOR": "1",
            "CLICOLOR_FORCE": "1",
            "PY_COLORS": "1",
            "COLUMNS": "500",
            "TERM": "xterm-256color",
            "TTY_COMPATIBLE": "1",
            "TTY_INTERACTIVE": "1",
            "GITHUB_ACTIONS": "true",
            "COLORTERM": "truecolor",
        },
    ),
    "python -O": Machine("Python without assertions", {"PYTHONOPTIMIZE": "1"}),
    "careful python": Machine(
        "Python that warns",
        {"PYTHONDEVMODE": "1", "PYTHONWARNINGS": "default", "PYTHONSAFEPATH": "1", "PYTHONVERBOSE": None},
    ),
    "other python": Machine(
        "odd habits of Python",
        {
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "{drawn}",
            "PYTHONUNBUFFERED": "1",
            "PYTHONIOENCODING": "latin-1:replace",
            "PYTHONFAULTHANDLER": "1",
            "PYTHONNOUSERSITE": "1",
            "PYTHONPYCACHEPREFIX": "{base}/bytecode",
        },
    ),
    "no devices": Machine(
        "a GPU host whose GPUs are hidden", {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}
    ),
    "relative caches": Machine(
        "what XDG does not allow", {"XDG_CACHE_HOME": "cache", "XDG_CONFIG_HOME": "config", "XDG_DATA_HOME": "."}
    ),
    "caches elsewhere": Machine(
        "a cluster's scratch disk",
        {
            "XDG_CACHE_HOME": "{base}/caches",
            "TORCHINDUCTOR_CACHE_DIR": "{base}/inductor",
            "HOME": "/nowhere",
            "TRITON_CACHE_DIR": "{base}/triton",
            "JAX_COMPILATION_CACHE_DIR": "{base}/xla",
            "HF_HOME": "{base}/hf",
        },
    ),
    "no home": Machine("HOME is not set", NO_HOME),
    "our variables": Machine(
        "a user who tunes and records",
        {
            "CUTE_OPS_TUNE": "1",
            "CUTE_OPS_ARCH": "sm_100a",
            "CUTE_OPS_CACHE_DIR": "{base}/kernels",
            "CUTE_OPS_RECORD": "{base}/calls.txt",
            "CUTE_OPS_BUNDLE": "{base}/bundles:/nowhere",
            "CUTE_OPS_COMPILE_WORKERS": "1",
            "CUTE_OPS_COMPILE_TIMEOUT": "1",
            "CUTE_OPS_CACHE_MAX_BYTES": "1",
        },
    ),
    "our variables, wrong": Machine(
        "values that are refused",
        {
            "CUTE_OPS_TUNE": "yes",
            "CUTE_OPS_ARCH": "h100",
            "CUTE_OPS_COMPILE_WORKERS": "-1",
            "CUTE_OPS_CACHE_DIR": "~nobody-here/x",
        },
    ),
    "their variables": Machine(
        "a user who changes what the frameworks do",
        {
            "JAX_ENABLE_X64": "1",
            "JAX_NUMPY_RANK_PROMOTION": "raise",
            "JAX_DEFAULT_MATMUL_PRECISION": "bfloat16",
            "JAX_LOG_COMPILES": "1",
            "JAX_DEBUG_NANS": "1",
            "JAX_DEBUG_INFS": "1",
            "JAX_NUMPY_DTYPE_PROMOTION": "strict",
            "JAX_DISABLE_JIT": "1",
            "JAX_PLATFORMS": None,
            "TORCH_LOGS": "+dynamo",
            "TORCH_COMPILE_DISABLE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "NVIDIA_TF32_OVERRIDE": "1",
            "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        },
    ),
    # Networks.
    "no network": Machine("a computer by itself", wrap=NO_NETWORK, needs=command("unshare", "--net")),
    "no name": Machine("a computer whose name nobody can look up", wrap=NO_NAME, needs=command("unshare", "--uts")),
}


running: set[subprocess.Popen[str]] = set()


class Outcome(NamedTuple):
    """How the tests of a machine ended: counts, and of each failure its test and its last line."""

    passed: int = 0
    skipped: int = 0
    failures: Sequence[tuple[str, str]] = ()
    problem: str = ""
    unlike: str = ""  # why this computer cannot be that machine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", choices=MACHINES, metavar="NAME", help="this machine; repeat. Default: all"
    )
    parser.add_argument(
        "--fraction", type=float, default=0.03, metavar="PART",
        help=f"this part of the tests, {LIKELY_TIMES} times as many of the likely ones (0.03)",
    )  # fmt: skip
    parser.add_argument("--seed", help="draws the same tests as before; each machine draws others. Default: by chance")
    parser.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="of these files or folders only")
    parser.add_argument("--python", default=sys.executable, help="that runs the tests; other users must be able to")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many machines at a time (1)")
    parser.add_argument("--minutes", type=float, default=30.0, help="that one machine may take (30)")
    parser.add_argument(
        "--logs",
        type=Path,
        default=ROOT / "out" / "machines",
        metavar="FOLDER",
        help="of pytest's output and reports",
    )
    parser.add_argument("--list", action="store_true", help="show the machines, and run nothing")
    given = parser.parse_args()
    console = Console()
    if given.list:
        shown = Table("machine", "what it is", "here")
        for name, machine in MACHINES.items():
            shown.add_row(name, machine.about, machine.needs() or "yes")
        console.print(shown)
        return 0
    given.seed = given.seed or str(random.SystemRandom().randrange(10**6))
    given.logs.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(given.only or MACHINES))
    console.print(f"seed {given.seed}, part {given.fraction:g}, what pytest says in {given.logs}")
    outcomes = run_all(names, given, console)
    console.print(summary(outcomes))
    for name, outcome in outcomes.items():
        for test, text in outcome.failures:
            console.print(f"{name}: {test}\n    {text}", markup=False, highlight=False, soft_wrap=True)
    return int(any(outcome.failures or outcome.problem for outcome in outcomes.values()))


def run_all(names: Sequence[str], given: argparse.Namespace, console: Console) -> dict[str, Outcome]:
    columns = (
        TextColumn("{task.description:26}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(given.jobs) as pool:
        whole = progress.add_task("all machines", total=len(names))

        def one(name: str) -> Outcome:
            task = progress.add_task(name, total=100)
            outcome = run(name, given, progress, task)
            progress.remove_task(task)
            progress.advance(whole)
            said = outcome.unlike or outcome.problem or f"{outcome.passed} passed, {len(outcome.failures)} failed"
            progress.console.print(f"{name}: {said}", markup=False, highlight=False)
            return outcome

        try:
            return dict(zip(names, pool.map(one, names), strict=True))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                end(process)
            raise


def summary(outcomes: Mapping[str, Outcome]) -> Table:
    shown = Table("machine", "what it is", "passed", "skipped", "failed")
    for name, outcome in outcomes.items():
        failed = outcome.unlike or outcome.problem or str(len(outcome.failures))
        shown.add_row(name, MACHINES[name].about, str(outcome.passed), str(outcome.skipped), failed)
    return shown


def run(name: str, given: argparse.Namespace, progress: Progress, task: TaskID) -> Outcome:
    """Copy the working tree, run a part of its tests as that machine would, and read how they ended."""
    machine = MACHINES[name]
    if reason := machine.needs():
        return Outcome(unlike=reason)
    if machine.user is not None and not runs(given.python, machine.user):
        return Outcome(unlike=f"user {machine.user} cannot run {given.python}; see --python")
    base = Path(tempfile.mkdtemp(prefix="cute_ops_machine_"))
    try:
        return _run(name, machine, base, given, progress, task)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _run(
    name: str, machine: Machine, base: Path, given: argparse.Namespace, progress: Progress, task: TaskID
) -> Outcome:
    clone = copy(machine, base)
    drawn = str(random.Random(f"{given.seed} {name}").randrange(2**32))
    report, log = base / "results" / "report.xml", given.logs / f"{name.replace(' ', '_')}.txt"
    arguments = [
        "-v", "-p", "no:cacheprovider", "--all", "--sample", str(given.fraction), "--sample-seed", drawn,
        "--sample-often", f"{LIKELY_TIMES}:{LIKELY}", f"--junitxml={report}", *(given.tests or machine.tests),
    ]  # fmt: skip
    if machine.processes:
        arguments += [f"--numprocesses={machine.processes}", "--dist=worksteal"]
    words = " ".join(f"'{word}'" for word in arguments)
    command = [*machine.wrap, "make", "test", f"PYTHON={given.python}", "JOBS=", f"ARGS={words}"]
    with busy(machine.load), log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=clone, env=environment(machine, base, drawn), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True, umask=machine.umask,
            **as_user(machine.user),
        )  # fmt: skip
        running.add(process)
        late = threading.Timer(60 * given.minutes, end, (process,))
        late.start()
        try:
            for line in process.stdout or ():
                file.write(line)
                if found := re.search(r"\[ *(\d+)%\]", line):
                    progress.update(task, completed=int(found[1]))
            process.wait()
        finally:
            late.cancel()
            end(process)
            running.discard(process)
    if report.exists():
        report = Path(shutil.copy(report, log.with_suffix(".xml")))
    return read(report, process.returncode, log)


def end(process: subprocess.Popen[str]) -> None:
    """End a machine's tests, and whatever they have started and left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def copy(machine: Machine, base: Path) -> Path:
    """A copy of what git would clone, and of what is new, with the machine's rights; the path to reach it by."""
    base.chmod(0o755)
    for each in ("home", "results", "scratch disk", "scratch disk/ü"):
        (base / each).mkdir(mode=0o700)
    clone = base / machine.place
    clone.mkdir(parents=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, stdout=subprocess.PIPE,
        check=True,
    )  # fmt: skip
    # Paths as bytes: the tests' language may have no letters for them, but this program's need not be it.
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, where = ROOT / name, clone / name
        if not source.exists():  # deleted, and not yet committed
            continue
        where.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, where)
        where.chmod((0o777 if source.stat().st_mode & stat.S_IXUSR else 0o666) & ~machine.umask)
    for folder in (clone, *filter(Path.is_dir, clone.rglob("*"))):
        folder.chmod(0o777 & ~machine.umask)
    clone.chmod(machine.mode)
    if machine.user is not None:
        others = [base / "home", base / "results", *(base / "scratch disk").rglob("*"), base / "scratch disk"]
        for path in (*others, *((clone, *clone.rglob("*")) if machine.owned else ())):
            os.chown(path, machine.user, machine.user)
    if machine.link:
        (base / "link").symlink_to(clone)
        return base / "link"
    return clone


def environment(machine: Machine, base: Path, drawn: str) -> dict[str, str]:
    # What make hands on to make: `make test COVERAGE=1` would measure all tests of the core here.
    forgotten = ("CUTE_OPS_", "MAKE", "MFLAGS", "COVERAGE", "ARGS", "JOBS", "PYTEST_")
    kept = {k: v for k, v in os.environ.items() if k == "PATH" or not (machine.clean or k.startswith(forgotten))}
    kept.pop("PYTHONPATH", None)
    kept["PYTHONUNBUFFERED"] = "1"  # so that progress is seen; tests' programs do not get it
    if not machine.clean:
        kept |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(machine.threads))
    for name, value in machine.variables.items():
        if value is None:
            kept.pop(name, None)
        else:
            kept[name] = value.replace("{base}", str(base)).replace("{drawn}", drawn)
    return kept


def as_user(user: int | None) -> dict[str, object]:
    return {} if user is None else {"user": user, "group": user, "extra_groups": []}


def runs(python: str, user: int) -> bool:
    """Whether a user can start this Python, and import what the tests need."""
    try:
        tried = subprocess.run(
            [python, "-c", "import subprocess, sys, pytest; sys.exit(subprocess.call([sys.executable, '-c', '']))"],
            cwd="/", env={"PATH": os.environ["PATH"]}, capture_output=True, check=False, **as_user(user),  # type: ignore[call-overload]
        )  # fmt: skip
    except PermissionError:
        return False
    return tried.returncode == 0


@contextmanager
def busy(each: int) -> Iterator[None]:
    """So many processes for each core that do nothing but compute."""
    code = "while True: pass"
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(each * len(os.sched_getaffinity(0)))]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def read(report: Path, code: int, log: Path) -> Outcome:
    """How the tests ended, by pytest's report; without one, or where pytest ended otherwise, the last lines it said."""
    if not report.exists():
        return Outcome(problem=f"exit code {code}: {' '.join(log.read_text().split()[-40:])}")
    cases = list(ElementTree.parse(report).iter("testcase"))
    failures, skipped = [], 0
    for case in cases:
        skipped += case.find("skipped") is not None
        for kind in ("failure", "error"):
            for found in case.findall(kind):
                said = (found.get("message") or "").strip().splitlines() or [kind]
                failures.append((f"{case.get('classname')}::{case.get('name')}", said[0][:200]))
    broken = {name for name, _ in failures}
    problem = "" if bool(failures) == bool(code) else f"exit code {code}, see {log}"
    return Outcome(len(cases) - skipped - len(broken), skipped, failures, problem)


if __name__ == "__main__":
    sys.exit(main())
