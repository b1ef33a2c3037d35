"""The compile process: it reports failures, crashes and time-outs, and the next compile works."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cute_ops import CompileError, env, processes
from cute_ops.jit import compile_pool as workers
from cute_ops.jit import source_digest
from cute_ops.jit.compile_pool import Pool
from cute_ops.jit.variant import Variant
from cute_ops.tools import sass

Make = Callable[..., Variant]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def worker() -> Iterator[Pool]:
    started = Pool(1)
    yield started
    started.close()


def works(worker: Pool, variant: Variant, folder: Path) -> bool:
    path = folder / "works.so"
    worker.compile(variant, path)
    return path.read_bytes().startswith(b"\x7fELF")


@pytest.mark.slow
def test_compiles_without_a_gpu(worker: Pool, variant: Make, tmp_path: Path) -> None:
    assert works(worker, variant(), tmp_path)


@pytest.mark.slow
def test_a_failing_kernel_is_reported(worker: Pool, variant: Make, tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        worker.compile(variant("Broken"), tmp_path / "a.so")
    text = str(caught.value)
    assert text.startswith(
        "cute.copying: kernel does not compile: copying sm_90a x:bfloat16[?,64] out:bfloat16[?,64]\n"
    )
    assert "ValueError: this kernel is broken on purpose" in text
    assert not list(tmp_path.iterdir())
    assert works(worker, variant(), tmp_path)


@pytest.mark.slow
@pytest.mark.fault(
    "the compiler aborts",
    "an error for that variant with the compiler's output; the next compile starts another worker", "nothing",
)  # fmt: skip
def test_a_crash_is_reported_with_the_log(worker: Pool, variant: Make, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"(?s)the compiler died with signal 6.*about to abort"):
        worker.compile(variant("Aborting"), tmp_path / "a.so")
    assert works(worker, variant(), tmp_path)


@pytest.mark.slow
@pytest.mark.fault("kill -9 of the compiler", "an error for that variant", "nothing")
def test_a_killed_compile_is_reported(variant: Make, tmp_path: Path, begun: Callable[[], int]) -> None:
    worker = Pool(1)
    threading.Thread(target=lambda: os.kill(begun(), signal.SIGKILL)).start()
    with pytest.raises(CompileError, match="the compiler died with signal 9"):
        worker.compile(variant("Hanging"), tmp_path / "a.so")
    assert works(worker, variant(), tmp_path)
    worker.close()


@pytest.mark.slow
@pytest.mark.fault("the compiler dies in the middle of its answer", "an error for that variant", "nothing")
def test_half_an_answer_is_none(variant: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, popen = Pool(1), subprocess.Popen
    with monkeypatch.context() as patch:
        dies = [os.sys.executable, "-c", "import os; os.write(1, b'{\"err'); os.abort()"]  # type: ignore[attr-defined]
        patch.setattr(processes.subprocess, "Popen", lambda _, **given: popen(dies, **given))
        with pytest.raises(CompileError, match="the compiler died with signal 6"):
            worker.compile(variant(), tmp_path / "a.so")
    assert works(worker, variant(), tmp_path)
    worker.close()


def test_numbers_of_the_environment_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, size in (("3", 3), ("", len(os.sched_getaffinity(0)))):
        monkeypatch.setenv("CUTE_OPS_COMPILE_WORKERS", text)
        assert Pool().size == size
    for text in ("many", "0", "-2", "nan", "inf", "1.5"):
        monkeypatch.setenv("CUTE_OPS_COMPILE_WORKERS", text)
        problem = f"CUTE_OPS_COMPILE_WORKERS is '{text}', it must be a whole number above 0"
        for read in (lambda: Pool().size, env.check):  # the second when an adapter is imported
            with pytest.raises(ValueError, match=problem):
                read()


@pytest.mark.slow
@pytest.mark.fault("the compiler hangs", "it is killed after `CUTE_OPS_COMPILE_TIMEOUT`; an error says so", "nothing")
def test_a_compile_that_hangs_is_ended(
    variant: Make, tmp_path: Path, begun: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Pool(1)
    works(worker, variant(), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(workers, "TIMEOUT_SECONDS", 1.0)
        with pytest.raises(CompileError, match=r"the compiler gave no answer within 1 s \(CUTE_OPS_COMPILE_TIMEOUT\)"):
            worker.compile(variant("Hanging"), tmp_path / "a.so")
    assert works(worker, variant(), tmp_path)
    worker.close()


@pytest.mark.slow
def test_a_worker_that_left_is_started_again(worker: Pool, variant: Make, tmp_path: Path) -> None:
    works(worker, variant(), tmp_path)
    process = worker._idle[0]._process
    assert process is not None and process.stdin is not None
    process.stdin.close()
    process.wait(timeout=200)
    assert process.returncode == 0
    assert works(worker, variant(), tmp_path)


@pytest.mark.fault(
    "a kernel's file is edited while a program runs",
    "an error asks for a restart; nothing is stored under the old name", "nothing",
)  # fmt: skip
def test_sources_edited_under_a_running_program_are_refused(worker: Pool, variant: Make, tmp_path: Path) -> None:
    stale = variant()._replace(sources="0" * 64)
    with pytest.raises(CompileError, match=r"the sources of tests\.ops\.copying:Copy have changed since"):
        worker.compile(stale, tmp_path / "a.so")


def test_all_that_a_compile_imports_is_part_of_every_kernels_name(worker: Pool, variant: Make, tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        worker.compile(variant("Telling"), tmp_path / "a.so")
    (found,) = re.findall(r"imported: \[(.*?)\]", str(caught.value))[-1:]
    imported = set(re.findall(r"cute_ops[\w.]*", found))
    assert (
        {"cute_ops.jit.compiler", "cute_ops.kernels.lib.entry", "cute_ops.jit.compile_pool"}
        <= imported
        <= set(source_digest.DRIVER)
    )


@pytest.mark.slow
def test_a_compile_has_no_threads_of_a_blas(variant: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    worker = Pool(1)
    with pytest.raises(CompileError, match="threads: 2, "):  # its own, and the one that ends it with the program
        worker.compile(variant("Telling"), tmp_path / "a.so")
    worker.close()


@pytest.mark.fault(
    "a kernel's file is edited while it is compiled",
    "an error asks for a restart; nothing is stored under the old name", "nothing",
)  # fmt: skip
def test_sources_edited_during_a_compile_are_refused(
    worker: Pool, variant: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    body = (HERE.parent / "ops" / "copying.py").read_text()
    edits = "Path(__file__).write_text(Path(__file__).read_text() + '# edited')\n"
    (tmp_path / "edits_itself.py").write_text(body + edits)
    wanted = variant()
    name = "edits_itself:Copy"
    with pytest.raises(CompileError, match="the sources of edits_itself:Copy have changed since this program started"):
        worker.compile(wanted._replace(kernel=name, sources=source_digest.key(name)), tmp_path / "a.so")
    assert not (tmp_path / "a.so").exists()
    assert (tmp_path / "edits_itself.py").read_text().endswith("# edited")


@pytest.mark.slow
@pytest.mark.fault(
    "a file that a kernel imports is edited within a second and keeps its size",
    "the kernel is compiled from the new file, not from Python's bytecode of the old one", "nothing",
)  # fmt: skip
def test_bytecode_of_another_source_is_not_used(variant: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "reads_a_step.py").write_text(
        "import step_of_it\nclass Copy:\n    def __init__(self, _): raise ValueError(f'step {step_of_it.STEP}')\n"
    )
    helper = tmp_path / "step_of_it.py"
    for step in (32, 64):
        helper.write_text(f"STEP = {step}\n")
        os.utime(helper, (1e9, 1e9))
        # As a program that imports it leaves it.
        subprocess.run([os.sys.executable, "-c", "import step_of_it"], cwd=tmp_path, check=True)  # type: ignore[attr-defined]
    assert list((tmp_path / "__pycache__").iterdir())
    worker = Pool(1)
    with pytest.raises(CompileError, match="step 64"):
        worker.compile(
            variant()._replace(kernel="reads_a_step:Copy", sources=source_digest.key("reads_a_step:Copy")),
            tmp_path / "a.so",
        )
    worker.close()


@pytest.mark.slow
def test_the_worker_sees_no_gpu_and_no_framework() -> None:
    code = "from cute_ops.jit.compile_pool import serve; import sys; serve(); assert sys.modules['torch'] is None"
    result = subprocess.run([os.sys.executable, "-c", code], stdin=subprocess.DEVNULL, check=False)  # type: ignore[attr-defined]
    assert result.returncode == 0


@pytest.fixture(scope="module")
def meeting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("meeting")


@pytest.fixture(scope="module")
def pool(meeting: Path) -> Iterator[Pool]:
    """Of two, whose processes know where kernels meet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTE_OPS_TEST_MEETING", str(meeting))
        started = Pool(2)
        yield started
        started.close()


@pytest.mark.slow
def test_a_pool_compiles_at_the_same_time_and_no_more_than_its_size(
    pool: Pool, variant: Make, tmp_path: Path, meeting: Path
) -> None:
    """Kernels that end only when two have met in two different processes."""
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda n: pool.compile(variant("Meeting", n=n), tmp_path / f"{n}.so"), (32, 64, 96, 128)))
    assert len(list(tmp_path.glob("*.so"))) == 4
    assert len(list(meeting.glob("*.met"))) == 2


@pytest.mark.slow
def test_a_crash_in_a_pool_is_its_variants_error_only(pool: Pool, variant: Make, tmp_path: Path) -> None:
    def attempt(kernel: str) -> str:
        try:
            pool.compile(variant(kernel), tmp_path / f"{kernel}.so")
        except CompileError as error:
            return str(error)
        return "compiled"

    with ThreadPoolExecutor(4) as threads:
        aborted, copied, broken, again = threads.map(attempt, ("Aborting", "Copy", "Broken", "Slow"))
    assert "the compiler died with signal 6" in aborted and "about to abort" in aborted
    assert "this kernel is broken on purpose" in broken
    assert copied == again == "compiled"


# A program of its own, since threads of other tests' frameworks may hold locks while they are forked.
FORKING = """
import os, sys
from pathlib import Path
from tests.core.conftest import copying_variant
from cute_ops.jit.compile_pool import worker
folder = Path(sys.argv[1])
worker.compile(copying_variant(), folder / "parent.so")
child = os.fork()
worker.compile(copying_variant(n=96 if child else 128), folder / ("both.so" if child else "child.so"))
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.fault("a process forks while it has a compiler running", "the child starts its own", "nothing")
@pytest.mark.slow
def test_a_forked_child_has_workers_of_its_own(variant: Make, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", FORKING, str(tmp_path)], env=environment, check=True)
    assert {p.name for p in tmp_path.glob("*.so")} == {"parent.so", "child.so", "both.so"}


@pytest.mark.slow
def test_a_request_is_compiled_once(worker: Pool, variant: Make, tmp_path: Path) -> None:
    worker.compile(variant("Slow"), tmp_path / "a.so")
    assert worker._idle[0].log().count("slow kernel begins") == 1


@pytest.mark.slow
def test_only_the_machine_code(worker: Pool, variant: Make, tmp_path: Path) -> None:
    where = tmp_path / "somebody's Größe"
    where.mkdir()
    worker.compile(variant(), where / "a.cubin")
    assert [p.name for p in where.iterdir()] == ["a.cubin"]
    worker.compile(variant(), where / "a.so")
    # The object runs the very same machine code, and holds nothing else of the kind.
    assert list(sass.cubins((where / "a.so").read_bytes())) == [(where / "a.cubin").read_bytes()]
    (resources,) = sass.resources(where / "a.so")
    assert "Copy" in resources.kernel and 0 < resources.registers < 64 and resources.stack == resources.local == 0
    assert "STG.E.U16" in sass.sass(where / "a.so")


PROGRAM = """
import cutlass.cute as cute
from cute_ops import FLOATS, Array, Op, Tensor
from cute_ops.autotune import dispatch
from cute_ops.declaration.binding import bind
from cute_ops.jit import cache
from cute_ops.jit.target import parse

class Fill:
    def __init__(self, variant):
        pass

    @cute.kernel
    def kernel(self, mOut: cute.Tensor):
        row, _, _ = cute.arch.block_idx()
        mOut[row, 0] = mOut.element_type(1)

    @cute.jit
    def __call__(self, mX: cute.Tensor, mOut: cute.Tensor, stream):
        self.kernel(mOut).launch(grid=[mX.shape[0], 1, 1], block=[1, 1, 1], stream=stream)

X = Tensor("*m n", "T")
op = Op("fill", inputs={"x": X}, outputs={"out": X}, dtypes={"T": FLOATS}, reference=lambda xp, x: xp.ones_like(x),
        kernel=f"{__name__}:Fill")

if __name__ == "__main__":
    cache.build(dispatch.foresee(bind(op, {"x": Array((4, 1), "float32")}), {}, parse("sm_90a")).variant)
    print("compiled", op.kernel)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "kernel"), [(["script.py"], "script:Fill"), (["-m", "package.mine"], "package.mine:Fill")]
)
def test_a_program_compiles_its_own_kernel(cache_folder: Path, tmp_path: Path, start: list[str], kernel: str) -> None:
    """The compiler's process has another ``__main__``, and no frameworks for kernels of other modules."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "mine.py").write_text(PROGRAM)
    (tmp_path / "jax.py").touch()  # to import the real one takes longer than all the rest
    (tmp_path / "script.py").write_text(f"import jax\n{PROGRAM}")
    path = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, *start], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ran.stdout == f"compiled {kernel}\n", ran.stdout + ran.stderr


@pytest.mark.slow
def test_a_program_without_a_file_says_what_to_do(cache_folder: Path) -> None:
    ran = subprocess.run(
        [sys.executable], input=PROGRAM, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 1 and "'__main__' of '__main__:Fill' cannot be found; this program has no" in ran.stderr


# Runs cells as a notebook does: their source is known to linecache alone.
NOTEBOOK = """
import __main__, linecache
def run(*cells):
    for text in cells:
        name = f"<cell {len(linecache.cache)}>"
        linecache.cache[name] = len(text), None, text.splitlines(True), name
        exec(compile(text, name, "exec"), vars(__main__))
"""
KERNEL = PROGRAM[PROGRAM.index("class Fill") : PROGRAM.index("X = ")]
IMPORTS, DECLARATION = PROGRAM[: PROGRAM.index("class Fill")], PROGRAM[PROGRAM.index("X = ") :]
# A global of the notebook that has the name of a local variable of the kernel.
SHARED = """
from dataclasses import dataclass
row = object()
ONES, HUGE = (1, 1), float("inf")

@dataclass(frozen=True)
class Base:
    variant: object

def block():
    return [*ONES, 1]

@cute.jit
def fill(mOut: cute.Tensor, row):
    mOut[row, 0] = mOut.element_type(1)
"""
CELL = (
    KERNEL.replace("class Fill:", "class Fill(Base):")
    .replace("block=[1, 1, 1]", "block=block()")
    .replace("mOut[row, 0] = mOut.element_type(1)", "fill(mOut, row)")
    .replace("    def __init__(self, variant):\n        pass\n", "")
)


@pytest.mark.slow
def test_a_notebooks_kernel_is_compiled_with_what_it_refers_to(cache_folder: Path) -> None:
    """And again after one of its cells has changed."""
    cells = [IMPORTS, SHARED, CELL + DECLARATION, SHARED.replace("element_type(1)", "element_type(2)"), DECLARATION]
    code = f"{NOTEBOOK}\nrun(*{cells!r})\nassert cache.counters.compiled == 2, cache.counters"
    path = os.pathsep.join(sys.path)
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    kernels = re.findall(r"compiled (cute_ops_cell_[0-9a-f]{16}):Fill\n", ran.stdout)
    assert len(kernels) == len(set(kernels)) == 2, ran.stdout + ran.stderr
