"""The compile process: it reports failures, crashes and time-outs, and the next compile works."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cute_ops import CompileError
from cute_ops import worker as workers
from cute_ops.variant import Variant
from cute_ops.worker import Worker

Make = Callable[..., Variant]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    started = Worker()
    yield started
    started.close()


def works(worker: Worker, variant: Variant, folder: Path) -> bool:
    path = folder / "works.so"
    worker.compile(variant, path)
    return path.read_bytes().startswith(b"\x7fELF")


def test_compiles_without_a_gpu(worker: Worker, variant: Make, tmp_path: Path) -> None:
    assert works(worker, variant(), tmp_path)


def test_a_failing_kernel_is_reported(worker: Worker, variant: Make, tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        worker.compile(variant("Broken"), tmp_path / "a.so")
    text = str(caught.value)
    assert text.startswith(
        "cute.copying: kernel does not compile: copying sm_90a x:bfloat16[?,64] out:bfloat16[?,64]\n"
    )
    assert "ValueError: this kernel is broken on purpose" in text
    assert not list(tmp_path.iterdir())
    assert works(worker, variant(), tmp_path)


def test_a_crash_is_reported_with_the_log(worker: Worker, variant: Make, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"(?s)the compiler died with signal 6.*about to abort"):
        worker.compile(variant("Aborting"), tmp_path / "a.so")
    assert works(worker, variant(), tmp_path)


def test_a_killed_compile_is_reported(variant: Make, tmp_path: Path) -> None:
    worker = Worker()
    works(worker, variant(), tmp_path)
    process = worker._process
    assert process is not None
    killer = threading.Timer(1.0, os.kill, (process.pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(CompileError, match="the compiler died with signal 9"):
        worker.compile(variant("Slow"), tmp_path / "a.so")
    assert works(worker, variant(), tmp_path)
    worker.close()


def test_a_compile_that_hangs_is_ended(variant: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    works(worker, variant(), tmp_path)
    monkeypatch.setattr(workers, "TIMEOUT_SECONDS", 1.0)
    start = time.perf_counter()
    with pytest.raises(CompileError, match=r"no answer within 1 s \(CUTE_OPS_COMPILE_TIMEOUT\)"):
        worker.compile(variant("Slow"), tmp_path / "a.so")
    assert time.perf_counter() - start < 4
    monkeypatch.undo()
    worker.close()


def test_a_worker_that_left_is_started_again(variant: Make, tmp_path: Path) -> None:
    worker = Worker()
    works(worker, variant(), tmp_path)
    process = worker._process
    assert process is not None and process.stdin is not None
    process.stdin.close()
    process.wait(timeout=10)
    assert process.returncode == 0
    assert works(worker, variant(), tmp_path)
    worker.close()


def test_sources_edited_under_a_running_program_are_refused(worker: Worker, variant: Make, tmp_path: Path) -> None:
    stale = dataclasses.replace(variant(), sources="0" * 64)
    with pytest.raises(CompileError, match="the sources of copying:Copy have changed since this program started"):
        worker.compile(stale, tmp_path / "a.so")


def test_the_worker_sees_no_gpu_and_no_framework() -> None:
    code = "from cute_ops.worker import serve; import sys; serve(); assert sys.modules['torch'] is None"
    result = subprocess.run([os.sys.executable, "-c", code], stdin=subprocess.DEVNULL, check=False)  # type: ignore[attr-defined]
    assert result.returncode == 0
