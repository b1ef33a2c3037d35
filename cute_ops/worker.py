"""The processes that compile, and their clients.

The compiler never runs in the caller's process: its import takes a second, a failed compile can abort,
and two at once always do. Workers start when there is something to compile, one for each compile that is asked for
at the same time, and leave after a minute without work. They never see a GPU.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

from cute_ops import settings
from cute_ops.errors import CompileError
from cute_ops.variant import Variant

IDLE_SECONDS = 60.0
TIMEOUT_SECONDS = settings.number("CUTE_OPS_COMPILE_TIMEOUT", 300.0)
_LOG_TAIL = 4000


class Worker:
    """A compile process, started when needed and restarted when it died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def compile(self, variant: Variant, path: Path, dump: Path | None = None) -> float:
        """Compile ``variant`` into ``path``; returns the seconds it took.

        Raises:
            CompileError: with the compiler's output: it failed, crashed or took too long.
        """
        request = {
            "variant": variant.to_json(), "path": str(path), "dump": str(dump) if dump else None, "sys_path": sys.path,
        }  # fmt: skip
        start = time.perf_counter()
        with self._lock:
            answer = self._ask(request)
            if answer is None:  # the worker left just as we asked
                answer = self._ask(request)
            if answer is None:
                raise self._dead(variant)
        if answer.get("error"):
            raise CompileError(f"cute.{variant.op}: kernel does not compile: {variant.describe()}\n{answer['error']}")
        return time.perf_counter() - start

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Send one request; None when the worker had left for want of work."""
        process = self._process if self._process and self._process.poll() is None else self._start()
        requests, answers = process.stdin, process.stdout
        if requests is None or answers is None:
            raise RuntimeError("the worker was started without pipes")
        try:
            requests.write(json.dumps(request).encode() + b"\n")
            requests.flush()
        except BrokenPipeError:
            process.wait()
            return None
        ready, _, _ = select.select([answers], [], [], TIMEOUT_SECONDS)
        if not ready:
            self._stop()
            return {"error": f"no answer within {TIMEOUT_SECONDS:.0f} s (CUTE_OPS_COMPILE_TIMEOUT)\n{self._tail()}"}
        line = answers.readline()
        if line.endswith(b"\n"):  # else it died in the middle of its answer
            return json.loads(line)
        if process.wait() == 0:
            return None
        return {"error": f"the compiler died with {exit_text(process.returncode)}\n{self._tail()}"}

    def _start(self) -> subprocess.Popen[bytes]:
        self._stop()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
        # The worker must not find a GPU: a context there would cost memory and could hang. The DSL's own
        # cache lies in the shared temporary folder: ours replaces it.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "CUTE_DSL_DISABLE_FILE_CACHING": "1"}
        command = [sys.executable, "-c", "from cute_ops.worker import serve; serve()"]
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment,
        )  # fmt: skip
        return self._process

    def _stop(self) -> None:
        if self._process and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _tail(self) -> str:
        return log_tail(self._log)

    def _dead(self, variant: Variant) -> CompileError:
        return CompileError(f"cute.{variant.op}: the compile process does not start\n{self._tail()}")


class Pool:
    """Workers for compiles at the same time, at most ``size``; a further one waits.

    A worker that crashes or is ended takes nobody with it: its compile raises, and the next one starts another.
    """

    def __init__(self, size: int | None = None) -> None:
        self._size = size
        self._free = threading.Condition()
        self._idle: list[Worker] = []
        self._busy = 0

    @property
    def size(self) -> int:
        """``CUTE_OPS_COMPILE_WORKERS``, or the cores this process may use."""
        return self._size or max(int(settings.number("CUTE_OPS_COMPILE_WORKERS", len(os.sched_getaffinity(0)))), 1)

    def compile(self, variant: Variant, path: Path, dump: Path | None = None) -> float:
        """Compile ``variant`` into ``path``; returns the seconds it took, without any wait for a worker.

        Raises:
            CompileError: with the compiler's output: it failed, crashed or took too long.
        """
        with self._free:
            self._free.wait_for(lambda: self._busy < self.size)
            self._busy += 1
            # The last one back first: those that have nothing to do may leave.
            worker = self._idle.pop() if self._idle else Worker()
        try:
            return worker.compile(variant, path, dump)
        finally:
            with self._free:
                self._busy -= 1
                self._idle.append(worker)
                self._free.notify()

    def close(self) -> None:
        """End the workers that have nothing to do."""
        with self._free:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.close()


worker = Pool()
# A forked child must not share its parent's pipes.
os.register_at_fork(after_in_child=lambda: worker.__init__())  # type: ignore[misc]


def serve() -> None:
    """The worker's loop: one JSON request a line on stdin, one JSON answer a line on stdout."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what the compiler prints goes to the log
    for name in ("torch", "jax"):
        # TVM-FFI would import torch (1-2 s); kernels have no use for a framework.
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    from cute_ops.compiler import compile_variant

    while select.select([0], [], [], IDLE_SECONDS)[0]:
        line = _read_line()
        if not line:
            return
        request = json.loads(line)
        sys.path[:] = request["sys_path"]
        try:
            dump, variant = request["dump"], Variant.from_json(request["variant"])
            _check_sources(variant)
            compile_variant(variant, Path(request["path"]), Path(dump) if dump else None)
            _check_sources(variant)  # what was imported was read between the two checks
            answer: dict[str, Any] = {}
        except Exception as error:  # every failure of a kernel belongs to the caller
            import traceback

            Path(request["path"]).unlink(missing_ok=True)
            answer = {"error": "".join(traceback.format_exception(error))[-_LOG_TAIL:]}
        answers.write(json.dumps(answer).encode() + b"\n")


def _check_sources(variant: Variant) -> None:
    """A kernel edited under a running program must not be cached under the old sources' name."""
    from cute_ops import sources

    sources.forget()
    if sources.key(variant.kernel, variant.declared) != variant.sources:
        raise CompileError(
            f"the sources of {variant.kernel} have changed since this program started: restart it (so have, perhaps, "
            "those of cute_ops or the environment's CUTE_DSL_ variables, which are part of its name)"
        )


def _read_line() -> bytes:
    """One line of stdin, unbuffered, so that select sees what has not been read."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 65536)
        if not part:
            return b""
        line += part
    return line


def log_tail(log: IO[bytes] | None) -> str:
    """The end of what a process has said."""
    if log is None:
        return ""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(size - _LOG_TAIL, 0))
    return log.read().decode(errors="replace")


def exit_text(code: int) -> str:
    """How a process ended."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
