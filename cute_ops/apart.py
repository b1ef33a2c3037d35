"""The process that measures, and its client.

A candidate may do what no check foresees: write where it must not, or never end. A CUDA context does not survive that,
and a program that is being tuned should. So candidates run in a process of their own, on the same GPU, which says which
one it is about to run; when it dies, that one is left out and another process goes on.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from cute_ops import manifest
from cute_ops.binding import bind
from cute_ops.candidates import Tile
from cute_ops.target import Target
from cute_ops.tuner import Examined, Trial
from cute_ops.worker import exit_text, log_tail

IDLE_SECONDS = 60.0
START_SECONDS = 120.0  # a framework's import may take long
TIMEOUT_SECONDS = 60.0  # of one step


class Apart:
    """Examines in another process; see :class:`cute_ops.tuner.Examiner`."""

    def __init__(self, device: int = 0, measurer: str = "") -> None:
        self._device, self._measurer = device, measurer
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._gpu = ""

    def examine(self, trials: Sequence[Trial], tiles: Sequence[Tile], target: Target, least: float) -> Examined:
        """As :func:`cute_ops.measuring.examine`; tiles that end the process are refused.

        Raises:
            RuntimeError: it cannot measure: no framework, no GPU, an op that no module holds, or the heuristic's tile
                itself fails.
        """
        calls = [manifest.call_of(*trial) for trial in trials]
        if None in calls:
            op = trials[0].binding.op.name
            raise RuntimeError(f"no module holds the declaration of {op}, so that no other process finds it")
        refused: dict[int, str] = {}
        with self._lock:
            while True:
                left = [i for i in range(len(tiles)) if i not in refused]
                answer, trying = self._ask({
                    "calls": [str(call) for call in calls], "tiles": [dict(tiles[i]) for i in left],
                    "target": [target.arch, target.sm_count], "least": least,
                })  # fmt: skip
                if "found" in answer:
                    which, before, after, gain, wrong = answer["found"]
                    refused |= {left[int(i)]: why for i, why in wrong.items()}
                    return Examined(left[which], before, after, gain, refused, self._gpu)
                if not trying or not answer.get("fatal"):  # nothing but the heuristic's, or nobody's fault
                    raise RuntimeError(answer["error"])
                refused[left[trying]] = answer["error"]

    def start(self) -> str:
        """Start the process; returns the GPU's name.

        Raises:
            RuntimeError: it cannot measure.
        """
        with self._lock:
            return self._ready()

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _ready(self) -> str:
        if self._process is not None and self._process.poll() is None:
            return self._gpu
        self._stop()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
        environment = {**os.environ, "CUTE_OPS_TUNE": "0", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        environment.pop("CUTE_OPS_RECORD", None)
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        if "CUDA_VISIBLE_DEVICES" not in os.environ or visible:
            environment["CUDA_VISIBLE_DEVICES"] = visible[self._device] if visible else str(self._device)
        command = [sys.executable, "-c", "from cute_ops.apart import serve; serve()", self._measurer]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment, bufsize=0,
        )  # fmt: skip
        answer = self._line(START_SECONDS)
        if "ready" not in answer:
            self._stop()
            raise RuntimeError(answer["error"])
        self._gpu = answer["ready"]
        return self._gpu

    def _ask(self, request: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
        """The answer, and the last tile that ran before it."""
        self._ready()
        process, trying = self._process, None
        if process is None or process.stdin is None:
            raise RuntimeError("the process was started without pipes")
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:  # it left just as we asked
            self._stop()
            self._ready()
            return self._ask(request)
        while True:
            answer = self._line(TIMEOUT_SECONDS)
            if "trying" not in answer:
                if answer.get("fatal"):
                    self._stop()
                return answer, trying
            trying = answer["trying"]

    def _line(self, seconds: float) -> dict[str, Any]:
        """One line of the process's; an error that is fatal where it dies or says nothing."""
        process = self._process
        if process is None or process.stdout is None:
            raise RuntimeError("the process was started without pipes")
        ready, _, _ = select.select([process.stdout], [], [], seconds)
        if not ready:
            return {"fatal": True, "error": f"did not end within {seconds:.0f} s"}
        line = process.stdout.readline()
        if line.endswith(b"\n"):  # else it died in the middle of its answer
            return json.loads(line)
        return {"fatal": True, "error": f"ended the process with {exit_text(process.wait())}{self._tail()}"}

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _tail(self) -> str:
        said = log_tail(self._log).strip().splitlines()
        return f": {said[-1]}" if said else ""


def serve() -> None:
    """The process's loop: one JSON request a line on stdin, JSON answers on stdout."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def say(**answer: Any) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")

    from cute_ops import measuring

    try:
        by = measuring.measurer(*sys.argv[1:2])
        say(ready=by.device())
    except Exception as error:
        say(error=str(error))
        return
    while select.select([0], [], [], IDLE_SECONDS)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        request = json.loads(line)
        last: list[int] = []

        def trying(index: int, last: list[int] = last) -> None:
            if last[-1:] != [index]:
                last.append(index)
                say(trying=index)

        try:
            calls = manifest.parse("\n".join(request["calls"]), files=True)
            trials = [Trial(bind(call.op, call.inputs, call.attrs), call.memory) for call in calls]
            found = measuring.examine(
                trials, request["tiles"], Target(*request["target"]), by, request["least"], trying
            )  # fmt: skip
            say(found=[found.which, found.before, found.after, found.gain, found.refused])
        except Exception as error:  # it belongs to the caller
            text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if by.broken():
                say(fatal=True, error=text)
                answers.close()
                os._exit(1)  # what is left of the context would hang
            say(error=text)
