"""Processes under faults, each caused: interrupts, forks, kills, limits, hostile folders and odd environments.

What is compiled are kernels whose constructors end it with an error (``tests/programs/quick.py``): the compiler itself
need not be imported, so that each program takes a fraction of a second.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cute_ops
from cute_ops.jit.compile_pool import Pool
from tests.programs.asking import compiled, variant

KERNELS = Path(__file__).parents[1] / "programs"
WITHOUT_COMPILER = KERNELS / "without_compiler"
ROOT = Path(cute_ops.__file__).parents[1]
IMPORTS = f"import sys; sys.path[:0] = {[str(p) for p in (KERNELS, WITHOUT_COMPILER, ROOT)]!r}\n"
HEAD = IMPORTS + "import os, signal, threading, time, asking; from pathlib import Path; from asking import *\n"
# What takes a second here takes a minute on a busy machine.
LONG = 200


@pytest.fixture(autouse=True)
def begun(begun: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(KERNELS), str(WITHOUT_COMPILER), *sys.path])
    return begun


@pytest.fixture
def worker() -> Iterator[Pool]:
    started = Pool(1)
    yield started
    started.close()


def program(code: str, *flags: str, cwd: Path | None = None, before: str = "", **variables: str) -> str:
    """What a program prints that imports the core and :mod:`asking`; on stderr, too."""
    environment = {**os.environ, **variables}
    command = [sys.executable, *flags, "-c", before + HEAD + code]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=cwd or KERNELS, timeout=LONG, check=False
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def started(code: str, **given: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HEAD + code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=KERNELS, **given)  # type: ignore[call-overload]


def ends(pid: int, seconds: float = LONG) -> bool:
    """Whether a process ends in that time; one that does not is killed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return False


# --- interrupts ----------------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "Ctrl-C, or a signal handler that raises, during a compile",
    "the next compile gets its own answer, not the interrupted one's", "that compile",
)  # fmt: skip
def test_what_follows_an_interrupted_compile(worker: Pool, begun: Callable[[], int]) -> None:
    def interrupt() -> None:
        begun()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        compiled("Waiting", n=32, by=worker)
    for n in (64, 96, 128):
        assert f"n is {n}" in compiled("Raising", n=n, by=worker)


def test_a_pool_stays_as_large_after_interrupts(begun: Callable[[], int], tmp_path: Path) -> None:
    pool = Pool(1)
    for _ in range(3):
        threading.Thread(target=lambda: (begun(), os.kill(os.getpid(), signal.SIGINT))).start()
        with pytest.raises(KeyboardInterrupt):
            compiled("Waiting", by=pool)
        (tmp_path / "begun").unlink()
    assert "n is 96" in compiled("Raising", n=96, by=pool)
    pool.close()


# The second compiler starts when the first has been ended.
STARTS_LATE = """
from cute_ops import processes
start, stop, ended = processes.Process._start, Pool.cancel, threading.Event()
first = threading.Semaphore(1)
processes.Process._start = lambda self: (first.acquire(False) or ended.wait(), start(self))[1]
Pool.cancel = lambda *given: (stop(*given), ended.set())
"""


@pytest.mark.fault("Ctrl-C while many kernels are built", "the program and its compilers end at once", "nothing")
@pytest.mark.parametrize("late", ["", STARTS_LATE], ids=["", "one has not started"])
def test_an_interrupted_build_ends_at_once(begun: Callable[[], int], late: str) -> None:
    environment = {**os.environ, "CUTE_OPS_COMPILE_WORKERS": "2"}
    process = started(f"{late}\ncache.build_all([variant('Spinning', n=32), variant('Spinning', n=64)])",
                      start_new_session=True, stderr=subprocess.PIPE, env=environment)  # fmt: skip
    compiler = begun()
    os.kill(process.pid, signal.SIGINT)  # a terminal's would come to the program alone, too
    try:
        assert "KeyboardInterrupt" in process.communicate(timeout=LONG)[1]
    finally:
        process.kill()
    assert ends(compiler)


@pytest.mark.fault("Ctrl-C in a terminal, in a program that handles it and goes on", "the compile continues", "nothing")
def test_an_interrupt_of_the_terminal_is_the_programs(tmp_path: Path) -> None:
    code = """
signal.signal(signal.SIGINT, lambda *_: print("handled", flush=True))
threading.Thread(target=lambda: (begun(), os.killpg(0, signal.SIGINT), let_go())).start()
print(compiled("Waiting", n=32))
"""
    process = started(code, start_new_session=True)
    said = process.communicate(timeout=LONG)[0]
    assert "handled" in said and "n is 32" in said


@pytest.mark.fault("a kernel calls sys.exit", "an error for that variant", "nothing")
def test_a_kernel_that_leaves(worker: Pool) -> None:
    assert "SystemExit: 0" in compiled("Leaving", by=worker)


@pytest.mark.slow
@pytest.mark.fault("Ctrl-C while a class of calls is measured", "the next class gets its own answer", "that class")
def test_what_follows_an_interrupted_measurement(begun: Callable[[], int], tmp_path: Path) -> None:
    from cute_ops.autotune.bench_process import BenchProcess
    from cute_ops.autotune.tuner import Trial
    from cute_ops.declaration.binding import bind
    from cute_ops.jit.target import parse
    from cute_ops.ops import silu_mul

    (tmp_path / "measures.py").write_text(MEASURER)
    sys.path.insert(0, str(tmp_path))
    trial = Trial(bind(silu_mul, dict.fromkeys(("gate", "up"), cute_ops.Array((512, 64), "bfloat16"))), {})
    apart = BenchProcess(measurer="measures")
    apart.start()
    threading.Thread(target=lambda: (begun(), os.kill(os.getpid(), signal.SIGINT))).start()
    with pytest.raises(KeyboardInterrupt):  # of these the second tile would win
        apart.measure([trial], [{"threads": n} for n in (224, 32)], parse("sm_90a"), 0.02)
    for threads in (448, 480):
        found = apart.measure([trial], [{"threads": threads}], parse("sm_90a"), 0.02)
        assert found.which == 0 and found.before == [threads]
    apart.close()


# --- where code comes from -----------------------------------------------------------------------------------------

HOSTILE = "import os; open(os.environ['CUTE_OPS_TEST_RAN'], 'a').write(__name__ + chr(10))\n"


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that nobody may run."""
    where = tmp_path / "hostile"
    (where / "cute_ops").mkdir(parents=True)
    for name in ("json", "select", "numpy", "encodings", "site", "usercustomize", "cutlass", "measures", "quick"):
        (where / f"{name}.py").write_text(HOSTILE)
    for name in ("__init__", "worker", "apart", "processes"):
        (where / "cute_ops" / f"{name}.py").write_text(HOSTILE)
    monkeypatch.setenv("CUTE_OPS_TEST_RAN", str(tmp_path / "ran"))
    return where


MEASURER = """
import os, sys, time
from contextlib import contextmanager
from cute_ops import testing

def available(): return True
def device(): return os.getcwd() + " of " + sys.modules["cute_ops"].__file__
def broken(): return False

def run(binding, chosen, arrays):
    begun = os.environ["CUTE_OPS_TEST_BEGUN"]
    if chosen.variant.config["threads"] == 224:
        open(begun + ".part", "w").write(str(os.getpid()))
        os.rename(begun + ".part", begun)
        time.sleep(600)
    return testing.run_reference(binding.op, arrays, binding.attrs)

class Contest:
    def __init__(self, plans): self.plans = plans
    def differs(self, index, floors): return ""
    def sample(self, index): return float(self.plans[index].variant.config["threads"])

@contextmanager
def contest(binding, memory, plans): yield Contest(plans)
"""


@pytest.mark.fault(
    "the working directory has modules named like Python's, the compiler's and ours", "none of them is imported",
    "nothing",
)  # fmt: skip
@pytest.mark.parametrize("flags", [["-P"], ["-I"], ["script"]], ids=lambda flags: flags[0])
def test_the_working_directory_runs_nothing(hostile: Path, tmp_path: Path, flags: list[str]) -> None:
    measures = tmp_path / "measures"
    measures.mkdir()
    (measures / "measures.py").write_text(MEASURER)
    code = f"""
sys.path.insert(0, {str(measures)!r})
from cute_ops.autotune.bench_process import BenchProcess
seen = told()
print(seen["json"], seen["cute_ops"], seen["cwd"])
print(BenchProcess(measurer="measures").start())
"""
    script = tmp_path / "script.py"
    script.write_text(HEAD + code)
    arguments = [str(script)] if flags == ["script"] else [*flags, "-c", HEAD + code]
    result = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=hostile, timeout=LONG, check=False
    )  # fmt: skip
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    ours = cute_ops.__file__
    assert result.stdout.splitlines() == [f"{json.__file__} {ours} {hostile}", f"{hostile} of {ours}"], result.stderr


@pytest.mark.parametrize("way", ["script", "-c", "-m"])
def test_kernels_beside_a_program_compile(tmp_path: Path, way: str) -> None:
    """Also where they are found by the working directory, which is another one meanwhile."""
    where, elsewhere = tmp_path / "program", tmp_path / "elsewhere"
    where.mkdir()
    elsewhere.mkdir()
    shutil.copy(KERNELS / "quick.py", where / "beside.py")
    code = IMPORTS.replace("[:0]", "[1:1]") + "import os\nfrom asking import *\n"
    code += f"print(compiled('Raising', n=96, module='beside'))\nos.chdir({str(elsewhere)!r})\n"
    code += "print(compiled('Raising', n=96, module='beside'))" if way == "script" else ""
    (where / "program.py").write_text(code)
    arguments = {"script": ["program.py"], "-c": ["-c", code], "-m": ["-m", "program"]}[way]
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=where, check=False)
    assert result.stdout.count("n is 96") == (2 if way == "script" else 1), result.stdout + result.stderr


# --- limits, forks, deaths -----------------------------------------------------------------------------------------


@pytest.mark.fault("more than 1024 open files", "everything compiles", "nothing")
@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1200, reason="nobody may open so many files")
def test_many_open_files() -> None:
    code = """
import resource
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
print(compiled("Raising", n=32))
"""
    assert "n is 32" in program(code)


@pytest.mark.fault("no more files can be opened", "an error that says so; later compiles work", "nothing")
def test_no_more_files() -> None:
    code = """
import resource
print(compiled("Raising", n=32))
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (os.dup(0) + 1, most))
print(compiled("Raising", n=64, by=Pool(1)))
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
print(compiled("Raising", n=96, by=Pool(1)))
"""
    said = program(code)
    assert "n is 32" in said and "cannot be started: [Errno 24] Too many open files" in said and "n is 96" in said


@pytest.mark.fault(
    "a process forks while one of its threads compiles", "the child starts a compiler of its own", "nothing",
)  # fmt: skip
def test_a_fork_during_a_compile() -> None:
    code = """
thread = threading.Thread(target=lambda: print("parent:", got("Waiting", n=32).splitlines()[-1], flush=True))
thread.start()
begun()
child = os.fork()
if child == 0:
    signal.alarm(150)
    print("child:", got("Waiting", n=32).splitlines()[-1], flush=True)
    os._exit(0)
let_go()
thread.join()
begun()
let_go()
assert os.waitpid(child, 0)[1] == 0, "the child hung"
"""
    # Since Python 3.12 a fork beside threads is warned of, in the same stream.
    lines = [line for line in program(code).splitlines() if line.startswith(("child: ", "parent: "))]
    assert sorted(lines) == ["child: ValueError: n is 32", "parent: ValueError: n is 32"]


@pytest.mark.fault(
    "a process forks while one of its threads holds a lock, then dies", "the child does not keep the lock", "nothing",
)  # fmt: skip
def test_a_child_does_not_hold_its_parents_locks(tmp_path: Path) -> None:
    code = """
thread = threading.Thread(target=lambda: got("Spinning"), daemon=True)
thread.start()
begun()
child = os.fork()
if child == 0:
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""
    parent = started(code)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        compiler = int((tmp_path / "begun").read_text())
        parent.kill()
        parent.wait()
        assert ends(compiler), "the compiler goes on: the child holds its pipes"
        from cute_ops.files import file_lock

        (lock,) = (tmp_path / "cache").glob("*.lock")
        with file_lock.exclusive(lock, LONG) as held:
            assert held
    finally:
        os.kill(child, signal.SIGKILL)
        parent.communicate()


@pytest.mark.fault("a process forks while one of its threads measures", "the child continues", "nothing")
def test_a_fork_while_tuning() -> None:
    code = """
from cute_ops.autotune import tuner
from cute_ops.ops import silu_mul
from cute_ops.declaration.binding import bind
os.environ["CUTE_OPS_TUNE"] = "1"
call = bind(silu_mul, dict.fromkeys(("gate", "up"), Array((512, 64), "bfloat16")))
parent, measuring, forked = os.getpid(), threading.Event(), threading.Event()
def now(call, *_):
    measuring.set()
    assert os.getpid() != parent or forked.wait(150)
    return call.binding.op.config(call.problem)
tuner.now = now
thread = threading.Thread(target=choose, args=(call, {}, parse("sm_90a"), 0))
thread.start()
measuring.wait()
child = os.fork()
if child == 0:
    signal.alarm(150)
    choose(call, {}, parse("sm_90a"), 0)
    os._exit(0)
forked.set()
assert os.waitpid(child, 0)[1] == 0, "the child hung"
"""
    program(code)


@pytest.mark.fault("kill -9 of a program while it compiles", "its compiler ends", "nothing")
@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with a child"])
def test_the_compiler_of_a_program_that_died(begun: Callable[[], int], forked: bool) -> None:
    """Also where a child of the program lives on, which was forked when the compiler had its pipes."""
    fork = "compiled('Raising')\nif os.fork() == 0: time.sleep(600)\n" if forked else ""
    process = started(fork + "compiled('Spinning')", start_new_session=True)
    compiler = begun()
    process.kill()
    process.wait()
    try:
        assert ends(compiler)
    finally:
        if forked:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.fault(
    "a compile hangs in native code while its program is stopped", "the compiler ends by its own time limit", "nothing",
)  # fmt: skip
def test_a_compiler_has_limits_of_its_own(begun: Callable[[], int]) -> None:
    from cute_ops import processes

    request = {
        "variant": variant("Spinning").text, "path": "/nowhere/a.so", "dump": None, "program": "", "number": 1,
        "sys_path": sys.path, "seconds": 0.3 - processes._GRACE_SECONDS,
    }  # fmt: skip
    command = [sys.executable, "-P", processes.__file__, "cute_ops.jit.compile_pool"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    assert process.wait(LONG) == -signal.SIGALRM
    process.communicate()


# --- environments --------------------------------------------------------------------------------------------------


@pytest.mark.fault(
    "sys.path has entries that are no paths or deleted folders; the working directory is deleted",
    "everything compiles", "nothing",
)  # fmt: skip
def test_odd_search_paths_and_a_deleted_working_directory(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"""
sys.path += [Path("/somewhere"), None, "", "relative", "/not/there", os.fsdecode(b"/not/utf\\xff8")]
print(compiled("Raising", n=32))
os.chdir({str(gone)!r})
os.rmdir({str(gone)!r})
print(compiled("Raising", n=64))
print(compiled("Raising", n=96, by=Pool(1)))
"""
    said = program(code)
    assert all(f"n is {n}" in said for n in (32, 64, 96)), said


@pytest.mark.fault(
    "Python is embedded in another program: `sys.executable` is empty, or names that program",
    "the Python that belongs to the library compiles", "nothing",
)  # fmt: skip
@pytest.mark.parametrize("executable", ["", "/usr/bin/true", None])
def test_an_embedded_python(executable: str | None) -> None:
    code = f"""
sys.executable = {executable!r}
print(compiled("Raising", n=32))
sys.exec_prefix = sys.base_exec_prefix = "/nowhere"
print(compiled("Raising", n=64, by=Pool(1)))
"""
    said = program(code)
    assert "n is 32" in said and "set sys.executable to the path of a Python of this version" in said


@pytest.mark.fault(
    "HOME is unset and the user has no home", "a warning; kernels are kept in the temporary folder", "nothing",
)  # fmt: skip
@pytest.mark.fault("HOME cannot be read", "a warning; the program runs", "a compile per process")
@pytest.mark.parametrize("home", ["", "unreadable"])
def test_users_without_a_home(home: str, tmp_path: Path) -> None:
    (tmp_path / "unreadable").mkdir(mode=0o000)
    (tmp_path / "tmp").mkdir()
    names = ("HOME", "CUTE_OPS_CACHE_DIR", "XDG_CACHE_HOME")
    environment = {name: text for name, text in os.environ.items() if name not in names}
    environment["TMPDIR"] = str(tmp_path / "tmp")
    code, prefix = HEAD + "print(tuned(), got('Raising', n=32), got('Raising', n=96))", []
    if home:
        environment["HOME"] = str(tmp_path / home)
        if os.geteuid() == 0:  # who can read everything
            prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    else:
        prefix = ["unshare", "--user", "--map-user=54321"]
        if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
            # This machine lets nobody be an unknown user.
            prefix, code = [], f"import pwd\ndef getpwuid(user): raise KeyError(user)\npwd.getpwuid = getpwuid\n{code}"
    command = [*prefix, sys.executable, "-c", code]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=LONG, check=False
    )  # fmt: skip
    assert "n is 32" in result.stdout and "n is 96" in result.stdout, result.stdout + result.stderr
    if home:
        assert "kernels stay in memory" in result.stderr
    else:
        assert result.stderr.count("CUTE_OPS_CACHE_DIR sets another folder") == 1, result.stderr
        assert [path.name[:9] for path in (tmp_path / "tmp").iterdir()] == ["cute_ops-"]
    assert not (tmp_path / "~").exists()


def test_a_tilde_is_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_ops import env
    from cute_ops.files import cache_dir

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", "~/kernels")
    monkeypatch.setenv("CUTE_OPS_BUNDLE", "~/one:/two:~")
    monkeypatch.setenv("CUTE_OPS_RECORD", "~/manifest.txt")
    assert cache_dir.folder() == tmp_path / "kernels"
    assert env.BUNDLE.read() == [tmp_path / "one", Path("/two"), tmp_path]
    assert env.RECORD.read() == tmp_path / "manifest.txt"
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", "~nobody-of-that-name/kernels")
    with pytest.raises(ValueError, match="CUTE_OPS_CACHE_DIR holds '~nobody-of-that-name/kernels', but ~nobody"):
        cache_dir.folder()


@pytest.mark.slow
@pytest.mark.fault("kill -9 of a program while it compiles", "the next compile deletes its files", "nothing")
@pytest.mark.parametrize("cached", [True, False], ids=["cache folder", "temporary folder"])
def test_what_a_killed_compile_left(tmp_path: Path, begun: Callable[[], int], cached: bool) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    variables = {**os.environ, "TMPDIR": str(temporary)}
    if not cached:
        (tmp_path / "file").touch()
        variables["CUTE_OPS_CACHE_DIR"] = str(tmp_path / "file" / "cache")
    process = started("got('Spinning')", env=variables)
    begun()
    process.kill()
    process.communicate()
    place = tmp_path / "cache" if cached else temporary
    assert any(path.is_dir() for path in place.iterdir()), "nothing was left"
    subprocess.run([sys.executable, "-c", HEAD + "got('Raising')"], env=variables, check=True)
    assert not [path for path in place.iterdir() if path.is_dir() or path.name.startswith("staging-")]


# --- programs that do odd things -----------------------------------------------------------------------------------


@pytest.mark.fault(
    "a program that ignores SIGCHLD", "compiles and failures of tools are recognised correctly", "nothing",
)  # fmt: skip
def test_a_program_that_ignores_its_children() -> None:
    code = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGTERM, signal.SIGCHLD})
seen = told()
said = compiled("Dying").splitlines()
print("SIGCHLD" in seen["ignored"], seen["blocked"], "the compiler died without an answer" in said)
"""
    assert program(code) == "False 0 True\n"


@pytest.mark.slow
@pytest.mark.fault("a program has no standard input, output and error, like a daemon", "everything compiles", "nothing")
def test_a_program_without_standard_files() -> None:
    code = """
import fcntl
kept = fcntl.fcntl(1, fcntl.F_DUPFD, 100)
os.closerange(0, 3)
os.write(kept, compiled("Raising", n=32).encode())
"""
    assert "n is 32" in program(code)


@pytest.mark.slow
@pytest.mark.fault(
    "a program closes files that it did not open", "an error that says so; the next compile starts another process",
    "that compile",
)  # fmt: skip
def test_a_program_that_closes_our_pipes() -> None:
    code = """
for n in (32, 64, 96):
    print(compiled("Raising", n=n))
    if n == 32:
        os.closerange(3, 200)
"""
    said = program(code)
    assert "n is 32" in said and "n is 96" in said
    # Or it was seen to have left, which it does once its pipes are closed, and another one was started.
    assert (
        "the compiler cannot be reached: the program has closed files that it did not open" in said or "n is 64" in said
    )


@pytest.mark.slow
@pytest.mark.fault(
    "a program gives up root's rights after a compile", "no process with root's rights compiles for it", "nothing",
)  # fmt: skip
@pytest.mark.as_root
def test_a_program_that_gives_up_its_rights() -> None:
    code = """
from tests.programs import rights
assert told()["user"] == 0
rights.become(54321)
print(told()["user"])
"""
    # Python warns of root's process, which it may not end; that ends when its pipes close.
    assert program(code, "-Wignore::ResourceWarning") == "54321\n"


@pytest.mark.slow
@pytest.mark.fault("a program ends, or calls exec, while a thread compiles", "its compiler ends", "nothing")
@pytest.mark.parametrize("way", ["sys.exit()", "os.execv('/bin/sleep', ['sleep', '600'])"], ids=["exit", "exec"])
def test_a_program_that_ends_while_a_thread_compiles(begun: Callable[[], int], way: str) -> None:
    process = started(f"threading.Thread(target=compiled, args=('Spinning',), daemon=True).start()\nbegun()\n{way}")
    try:
        assert ends(begun())
        if "exit" in way:
            assert process.wait(LONG) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_process_outlives_the_thread_that_started_it(worker: Pool) -> None:
    """As it would not where the kernel's signal at a parent's death was asked for."""

    def pid() -> int:
        compiled("Raising", by=worker)
        assert worker._idle[0]._process is not None
        return worker._idle[0]._process.pid

    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(pid()))
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert found == [pid()]


@pytest.mark.fault(
    "a program is stopped (Ctrl-Z) for longer than a compile may take", "an answer that arrived meanwhile is used",
    "nothing",
)  # fmt: skip
@pytest.mark.slow
def test_a_program_that_is_stopped_while_it_waits() -> None:
    code = """
from cute_ops.jit import compile_pool
me = os.getpid()
compiled("Raising")  # a compiler that has started
compile_pool.TIMEOUT_SECONDS = 4.0
if os.fork() == 0:
    begun()
    os.kill(me, signal.SIGSTOP)
    let_go()
    time.sleep(5)
    os.kill(me, signal.SIGCONT)
    os._exit(0)
print(compiled("Waiting", n=32))
"""
    assert "n is 32" in program(code)


@pytest.mark.slow
@pytest.mark.fault(
    "Python's executable disappears while a program runs, as when an environment is rebuilt", "another Python compiles",
    "nothing",
)  # fmt: skip
def test_an_interpreter_that_is_gone() -> None:
    assert "n is 32" in program("sys.executable = '/nowhere/bin/python3'\nprint(compiled('Raising', n=32))")


@pytest.mark.slow
@pytest.mark.fault("sys.path has 300 kB and folders with colons and line breaks", "everything compiles", "nothing")
def test_a_long_search_path_with_odd_names(tmp_path: Path) -> None:
    for name in ("a:b", "a\nb"):
        (tmp_path / name).mkdir()
        shutil.copy(KERNELS / "quick.py", tmp_path / name / f"quick_{ord(name[1])}.py")
    code = f"""
sys.path += [{str(tmp_path / "a:b")!r}, {str(tmp_path)!r} + "/a\\nb"]
sys.path += ["/" + "x" * 100 + str(i) for i in range(3000)]
print(compiled("Raising", n=32, module="quick_58"), compiled("Raising", n=64, module="quick_10"))
"""
    said = program(code)
    assert "n is 32" in said and "n is 64" in said


@pytest.mark.slow
@pytest.mark.fault(
    "the temporary folder is deleted under a running program", "everything compiles, in memory", "nothing"
)
def test_a_temporary_folder_that_is_gone(tmp_path: Path) -> None:
    code = "import tempfile\ntempfile.gettempdir()\nos.rmdir(os.environ['TMPDIR'])\nprint(got('Raising', n=32))"
    (tmp_path / "tmp").mkdir()
    (tmp_path / "file").touch()
    unusable = str(tmp_path / "file" / "cache")
    assert "n is 32" in program(code, TMPDIR=str(tmp_path / "tmp"), CUTE_OPS_CACHE_DIR=unusable)


@pytest.mark.fault("the size of files is limited (ulimit)", "an error that says so", "nothing")
def test_no_room_for_what_is_compiled(tmp_path: Path) -> None:
    code = """
import resource
from cute_ops import CacheError
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    got("Raising")
except CacheError as error:
    print(error)
"""
    said = program(code)
    assert "cute_ops: no folder has room for a compile" in said and "cache: File too large; " in said
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith("staging")]


# --- processes that answer oddly -----------------------------------------------------------------------------------


@pytest.mark.fault("a compiler prints endlessly", "all output is read and the end of it kept", "nothing")
def test_a_process_that_prints_more_than_a_pipe_holds(worker: Pool) -> None:
    assert "n is 32" in compiled("Chatting", n=32, by=worker)


@pytest.mark.fault(
    "a compiler dies while a child of its own keeps its pipes open", "an error for that variant, at once", "nothing",
)  # fmt: skip
@pytest.mark.slow
def test_a_process_whose_child_lives_on(worker: Pool, begun: Callable[[], int]) -> None:
    start = time.monotonic()
    assert "the compiler died with signal 6" in compiled("Parting", by=worker)
    assert time.monotonic() - start < LONG, "it waited for the child"
    os.kill(begun(), signal.SIGKILL)


@pytest.mark.fault(
    "a compiler stops in the middle of its answer, or does not read", "it is killed after `CUTE_OPS_COMPILE_TIMEOUT`",
    "nothing",
)  # fmt: skip
@pytest.mark.fault("a compiler writes something that is no answer", "an error for that variant", "nothing")
@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("os.write(1, b'{'); time.sleep(600)", "the compiler gave no answer within 0 s (CUTE_OPS_COMPILE_TIMEOUT)"),
        ("time.sleep(600)", "the compiler gave no answer within 0 s (CUTE_OPS_COMPILE_TIMEOUT)"),
        ("os.write(1, b'hello\\n'); time.sleep(600)", "the compiler sent something that is not an answer: b'hello'"),
        ("sys.exit('no such library')", "the compiler died with exit code 1\nno such library"),
        ("os._exit(0)", "the compiler left without an answer"),
    ],
    ids=["half an answer", "silence", "no JSON", "a start that fails", "a start that ends"],
)
def test_processes_that_do_not_answer(worker: Pool, monkeypatch: pytest.MonkeyPatch, does: str, said: str) -> None:
    from cute_ops.jit import compile_pool as workers

    popen = subprocess.Popen
    command = [sys.executable, "-Sc", f"import os, sys, time; {does}"]
    sys.path.extend(f"/nowhere/{i:0100}" for i in range(1000))  # more than a pipe holds
    with monkeypatch.context() as patch:
        if "within 0 s" in said:
            patch.setattr(workers, "TIMEOUT_SECONDS", 0.4)
        patch.setattr(subprocess, "Popen", lambda _, **given: popen(command, **given))
        assert said in compiled("Raising", by=worker)
    assert "n is 32" in compiled("Raising", n=32, by=worker)


def test_the_examination_of_a_framework_runs_nothing_of_the_working_directory(
    hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cute_ops.tools import doctor

    (tmp_path / "adapter" / "tools").mkdir(parents=True)
    (tmp_path / "adapter" / "tools" / "doctor.py").write_text("import json\nexamine = lambda: [('ok', json.__file__)]")
    sys.path.insert(0, str(tmp_path))  # of the test's own list
    monkeypatch.chdir(hostile)
    assert [found.text for found in doctor._framework("json", "adapter")] == [json.__file__]
    assert not (tmp_path / "ran").exists()
