"""Subprocesses that answer requests: those that compile, measure and sweep are started, asked and ended here.

A request is one line of JSON on the subprocess's stdin. It has a number, which every answer on stdout repeats, so that
an answer to an interrupted request is never taken for that of a later one. An interrupted subprocess is killed.

The subprocess runs this file, isolated: it imports nothing from the working directory, and the client's own
``cute_ops``. Each request brings the client's ``sys.path``. The subprocess ends when it has been idle for a while, when
the client dies, and when a request takes too long; the last by a signal, which also ends compiled code that holds the
GIL.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

_LOG_TAIL = 4000
_GRACE_SECONDS = 5.0  # the subprocess waits longer than the client, whose error says more
_LONGEST_SECONDS = 1e8  # about the most that the system's timers can hold
_LOOK_SECONDS = 1.0  # between checks that the subprocess lives: its own children may hold its pipes open

_all: WeakSet[Process] = WeakSet()


class Ended(RuntimeError):
    """A subprocess ended before it answered. The message, which begins with a verb, says how; ``log`` is its output."""

    def __init__(self, how: str, log: str = "") -> None:
        super().__init__(how)
        self.log = log

    @property
    def line(self) -> str:
        """How it ended, and the last line of its output."""
        return ": ".join([str(self), *self.log.strip().splitlines()[-1:]])


class Silent(Ended):
    """A subprocess did not answer in time and was killed."""


class Process:
    """One subprocess. A request starts it if it does not run. One thread at a time may use it.

    Args:
        module: the module of this package whose ``serve(*arguments)`` runs in the subprocess.
        arguments: of ``serve``.
        variables: environment variables that it gets besides those of this process.
    """

    def __init__(self, module: str, *arguments: str, **variables: str) -> None:
        self._module, self._arguments, self._variables = module, arguments, variables
        self._process: subprocess.Popen[bytes] | None = None
        self._user = -1
        self._number = 0
        self._log = b""
        _all.add(self)

    def ask(
        self, request: Mapping[str, Any], seconds: float, progress: Callable[[dict[str, Any]], object] | None = None
    ) -> dict[str, Any]:
        """The answer to a request.

        Args:
            request: values that JSON can hold.
            seconds: the longest wait for the answer, or for the next step.
            progress: called with each step that comes before the answer.

        Raises:
            Ended: the subprocess died or could not be started.
            Silent: it took too long.
        """
        self._number += 1
        whole = {**request, "number": self._number, "sys_path": search_path(), "seconds": seconds}
        line = json.dumps(whole).encode() + b"\n"
        try:
            answer = self._exchange(line, seconds, progress)
            if answer is None:  # it was idle for too long and ended just before it could read the request
                answer = self._exchange(line, seconds, progress)
        except BaseException as error:  # interrupts too: a late answer must not be read by a later request
            self.stop()
            if isinstance(error, OSError) and error.errno == errno.EBADF:
                raise Ended(
                    "cannot be reached: the program has closed files that it did not open", self.log()
                ) from error
            raise
        if answer is None:
            raise Ended("left without an answer", self.log())
        return answer

    def running(self) -> bool:
        """Whether it runs as this user: a program that dropped privileges must not use a subprocess that has them."""
        return self._process is not None and self._process.poll() is None and self._user == os.geteuid()

    def stop(self) -> None:
        """End it, if it runs."""
        process, self._process = self._process, None
        if process is None:
            return
        # Another user's process cannot be killed, but ends when its pipes close. A hanging driver keeps killed ones.
        with suppress(PermissionError, subprocess.TimeoutExpired):
            process.kill()
            process.wait(_GRACE_SECONDS)
        _close(process)

    def kill(self) -> None:
        """Kill it from another thread; the thread that waits for an answer gets an error."""
        if (process := self._process) is not None:
            process.kill()

    def log(self) -> str:
        """The end of what it has printed."""
        return self._log.decode(errors="replace")

    def forget(self) -> None:
        """In a forked child: drop the subprocess and the pipes, which belong to the parent."""
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0  # this child must not wait for the parent's process
            _close(process)

    def _exchange(
        self, line: bytes, seconds: float, progress: Callable[[dict[str, Any]], object] | None
    ) -> dict[str, Any] | None:
        """Send a request and wait for its answer; None if the subprocess ended on its own before it read it."""
        process = self._started()
        poll, (stdin, stdout, stderr) = _poll(process)
        received, taken, deadline = b"", False, time.monotonic() + seconds
        while True:
            left = deadline - time.monotonic()
            ready = dict(poll.poll(min(max(left, 0.0), _LOOK_SECONDS) * 1000))
            if not ready and process.poll() is not None:
                self._ended(process, taken)
                return None
            # An answer that has arrived counts, even if this process was stopped past the deadline.
            if left <= 0 and stdout not in ready:
                raise Silent(f"gave no answer within {seconds:.0f} s", self.log())
            if stdin in ready:
                line = _sent(stdin, line)
                if not line:
                    poll.unregister(stdin)
            if stderr in ready and not self._hear(stderr):
                poll.unregister(stderr)
            if stdout not in ready:
                continue
            data = os.read(stdout, 1 << 16)
            if not data:
                self._ended(process, taken)
                return None
            *lines, received = (received + data).split(b"\n")
            for answer in self._answers(lines):
                if not answer.pop("step"):
                    return answer
                deadline, taken = time.monotonic() + seconds, True
                if answer and progress is not None:
                    progress(answer)

    def _answers(self, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
        """The answers to the last request."""
        return (answer for answer in map(_parsed, lines) if answer.pop("number") == self._number)

    def _started(self) -> subprocess.Popen[bytes]:
        process = self._process
        return self._start() if process is None or not self.running() else process

    def _start(self) -> subprocess.Popen[bytes]:
        self.stop()
        self._log = b""
        environment = {**os.environ, **self._variables}
        for name in ("PYTHONPATH", "PYTHONINSPECT"):
            environment.pop(name, None)
        flags = sys.flags
        kept = {"-E": flags.ignore_environment, "-s": flags.no_user_site, "-S": flags.no_site}
        command = [
            interpreter(), "-P", *(flag for flag, there in kept.items() if there), __file__, self._module,
            *self._arguments,
        ]  # fmt: skip
        try:
            # A session of its own, so that interrupts from the terminal reach the client only.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
                bufsize=0, cwd=_working_directory() or "/", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise Ended(f"cannot be started: {error}") from error
        self._user = os.geteuid()
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)
        return self._process

    def _ended(self, process: subprocess.Popen[bytes], taken: bool) -> None:
        """Raise unless the subprocess ended on its own before it read the request."""
        if process.stderr is not None:
            poll = select.poll()
            poll.register(process.stderr, select.POLLIN)
            while poll.poll(0) and self._hear(process.stderr.fileno()):
                pass
        try:
            code = process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            raise Ended("closed its pipes", self.log()) from None
        if code or taken:
            # A program that ignores SIGCHLD sees 0 whatever the code was.
            how = f"with signal {-code}" if code < 0 else f"with exit code {code}" if code else "without an answer"
            raise Ended(f"died {how}", self.log())

    def _hear(self, stderr: int) -> bytes:
        data = os.read(stderr, 1 << 16)
        self._log = (self._log + data)[-_LOG_TAIL:]
        return data


def _poll(process: subprocess.Popen[bytes]) -> tuple[select.poll, list[int]]:
    """What waits for a process's pipes, and these: what it reads, its output and its errors. Not select, which refuses
    file descriptors above 1023.
    """
    poll, handles = select.poll(), [f.fileno() for f in (process.stdin, process.stdout, process.stderr) if f]
    for handle, event in zip(handles, (select.POLLOUT, select.POLLIN, select.POLLIN), strict=True):
        poll.register(handle, event)
    return poll, handles


def _sent(handle: int, line: bytes) -> bytes:
    """The rest of a line after a write; empty if the pipe is broken."""
    try:
        return line[os.write(handle, line) :]
    except BrokenPipeError:
        return b""


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        return {"number": None, "step": True, **json.loads(line)}
    except (ValueError, TypeError) as error:
        raise Ended(f"sent something that is not an answer: {line[:100]!r}") from error


def _close(process: subprocess.Popen[bytes]) -> None:
    for file in (process.stdin, process.stdout, process.stderr):
        if file is not None:
            with suppress(OSError):  # the program may have closed them
                file.close()


def _forget_all() -> None:
    for process in list(_all):
        process.forget()


os.register_at_fork(after_in_child=_forget_all)


def search_path() -> list[str]:
    """``sys.path``, as a process in another working directory needs it."""
    here = _working_directory()
    # The import system skips entries that are not text, too. Relative ones mean nothing if the working folder is gone.
    entries = [entry for entry in sys.path if isinstance(entry, str) and (here or entry.startswith("/"))]
    return [str(Path(here, entry)) for entry in entries]


def interpreter() -> str:
    """The Python to run another process with.

    Raises:
        Ended: this one is part of another program, and no Python lies beside it.
    """
    names = ("python{}.{}".format(*sys.version_info), "python3", "python")
    beside = [Path(prefix, "bin", name) for prefix in (sys.exec_prefix, sys.base_exec_prefix) for name in names]
    # In a program that embeds Python, or is frozen, this is empty or the program itself.
    own = Path(sys.executable or "")
    for path in [own, *beside] if "python" in own.name and not hasattr(sys, "frozen") else beside:
        if os.access(path, os.X_OK, effective_ids=True):  # whose rights the kernel looks at when it starts
            return str(path)
    raise Ended(
        f"cannot be started: sys.executable is {sys.executable!r} and {sys.exec_prefix}/bin holds no Python; "
        "set sys.executable to the path of a Python of this version"
    )


def _working_directory() -> str:
    """The working directory; empty if it is gone or cannot be read."""
    try:
        return str(Path.cwd())
    except OSError:
        return ""


# --- in the subprocess ---------------------------------------------------------------------------------------------


def requests(idle_seconds: float) -> Iterator[tuple[dict[str, Any], Callable[..., None]]]:
    """Requests from stdin, each with a function to answer it: ``say(**answer)``, or ``say(step=True, **step)`` before.

    Printed text goes to the log. Ends after ``idle_seconds`` without requests, and when the client has gone.
    """
    answers = os.dup(1)
    os.dup2(2, 1)
    # Signals that the client ignores are ignored here, too; without the defaults exit codes and time limits are lost.
    for number in (signal.SIGCHLD, signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    threading.Thread(target=_end_with_the_client, name="cute_ops-watch", daemon=True).start()
    poll = select.poll()
    poll.register(0, select.POLLIN)
    received = b""
    while b"\n" in received or poll.poll(idle_seconds * 1000):
        while b"\n" not in received:
            data = os.read(0, 1 << 16)
            if not data:
                return
            received += data
        line, _, received = received.partition(b"\n")
        request = json.loads(line)
        sys.path[:] = request.pop("sys_path")
        number, limit = request.pop("number"), min(request.pop("seconds"), _LONGEST_SECONDS) + _GRACE_SECONDS
        signal.setitimer(signal.ITIMER_REAL, limit)

        def say(step: bool = False, *, number: int = number, limit: float = limit, **answer: Any) -> None:
            signal.setitimer(signal.ITIMER_REAL, limit if step else 0)
            line = json.dumps({**answer, "number": number, "step": step}).encode() + b"\n"
            while line:
                line = line[os.write(answers, line) :]

        say(step=True)  # tells the client that the request was read and must not be sent to another subprocess
        yield request, say


def _end_with_the_client() -> None:
    """End this process when the client has gone, whatever it is doing."""
    # A signal at the parent's death (PR_SET_PDEATHSIG) would come when the thread ends that started this process.
    poll = select.poll()
    poll.register(0, 0)  # poll reports hang-ups without being asked
    poll.poll()
    os._exit(0)


def _main(module: str, *arguments: str) -> None:
    """Run a module of the package that this file lies in, which need not be on ``sys.path``."""
    # Only a subprocess gets here.
    from importlib import import_module
    from importlib.util import module_from_spec, spec_from_file_location

    folder = Path(__file__).absolute().parent
    spec = spec_from_file_location("cute_ops", folder / "__init__.py", submodule_search_locations=[str(folder)])
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} holds no package")
    sys.modules["cute_ops"] = package = module_from_spec(spec)
    spec.loader.exec_module(package)
    import_module(module).serve(*arguments)


if __name__ == "__main__":
    _main(*sys.argv[1:])
