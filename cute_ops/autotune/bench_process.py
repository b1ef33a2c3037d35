"""The subprocess that measures, and its client.

A bad config can write out of bounds or hang, which destroys the CUDA context, so configs run in a subprocess on the
same GPU. It reports each config before it runs it; if it dies, that config is refused and a new subprocess goes on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from cute_ops import env, processes
from cute_ops.autotune.types import Measurement, Trial
from cute_ops.calls import manifest
from cute_ops.declaration.binding import bind
from cute_ops.declaration.config import Config
from cute_ops.errors import first_line
from cute_ops.files import file_lock
from cute_ops.jit.target import Target, device_names

IDLE_SECONDS = 60.0
START_SECONDS = 120.0  # a framework's import may take long
TIMEOUT_SECONDS = 60.0  # of one step


class BenchProcess:
    """Measures in a subprocess; a :class:`cute_ops.autotune.types.Bench`."""

    def __init__(self, device: int = 0, measurer: str = "") -> None:
        variables = {env.TUNE.name: "0", env.RECORD.name: ""}
        if names := device_names():
            variables["CUDA_VISIBLE_DEVICES"] = names[device]
        self._process = processes.Process("cute_ops.autotune.bench_process", measurer, **variables)
        self._lock = file_lock.between_threads(threading.RLock)
        self._gpu = ""

    def measure(self, trials: Sequence[Trial], configs: Sequence[Config], target: Target, least: float) -> Measurement:
        """Measure configs in the subprocess by :func:`cute_ops.autotune.compare.measure`; one that ends it is refused.

        Raises:
            RuntimeError: it cannot measure: there is no framework or no GPU, no module holds the op, or the heuristic's
                config itself fails.
        """
        calls = [manifest.call_of(*trial) for trial in trials]
        if None in calls:
            op = trials[0].binding.op.name
            raise RuntimeError(f"no module holds the declaration of {op}, so the measuring subprocess cannot import it")
        refused: dict[int, str] = {}
        with self._lock:
            while True:
                left = [i for i in range(len(configs)) if i not in refused]
                answer, trying = self._ask({
                    "calls": [str(call) for call in calls], "configs": [dict(configs[i]) for i in left],
                    "target": [target.arch, target.sm_count], "least": least,
                })  # fmt: skip
                if "found" in answer:
                    which, before, after, gain, wrong = answer["found"]
                    refused |= {left[int(i)]: why for i, why in wrong.items()}
                    return Measurement(left[which], before, after, gain, refused, self._gpu)
                if not trying or not answer.get("fatal"):  # the heuristic's own config failed, or something else
                    raise RuntimeError(answer["error"])
                refused[left[trying]] = answer["error"]

    def start(self) -> str:
        """Start the process unless it runs; returns the GPU's name.

        Raises:
            RuntimeError: it cannot measure.
        """
        with self._lock:
            if not self._process.running():
                try:
                    answer = self._process.ask({}, START_SECONDS)
                except processes.Ended as ended:
                    answer = {"error": ended.line}
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                self._gpu = answer["ready"]
            return self._gpu

    def close(self) -> None:
        with self._lock:
            self._process.stop()

    def _ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """The answer, and the last config that was reported before it."""
        self.start()
        steps: list[int] = []
        try:
            answer = self._process.ask(request, TIMEOUT_SECONDS, lambda step: steps.append(step["trying"]))
        except processes.Ended as ended:
            answer = {"fatal": True, "error": ended.line}
        if answer.get("fatal"):
            self._process.stop()
        return answer, steps[-1] if steps else None


def serve(named: str) -> None:
    """Run in the subprocess: answer requests to measure, see :func:`cute_ops.processes.requests`."""
    for request, say in processes.requests(IDLE_SECONDS):
        # Only the subprocess needs NumPy, which it finds on the client's sys.path, sent with the first request.
        from cute_ops.autotune import compare

        try:
            by = compare.measurer(named)
            if "calls" not in request:
                say(ready=by.device())
                continue
        except Exception as error:
            say(error=str(error))
            return

        def trying(index: int, say: Callable[..., None] = say) -> None:
            say(step=True, trying=index)

        try:
            calls = manifest.parse("\n".join(request["calls"]), files=True)
            trials = [Trial(bind(call.op, call.inputs, call.attrs), call.memory) for call in calls]
            found = compare.measure(
                trials, request["configs"], Target(*request["target"]), by, request["least"], trying
            )  # fmt: skip
            say(found=[found.which, found.before, found.after, found.gain, found.refused])
        except Exception as error:  # the client gets every error
            if by.broken():
                say(fatal=True, error=first_line(error))
                os._exit(1)  # shutting the broken context down would hang
            say(error=first_line(error))
