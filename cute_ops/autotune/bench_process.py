"""The process that measures, and its client.

A candidate may do what no check foresees: write where it must not, or never end. A CUDA context does not survive that,
and a program that is being tuned should. So candidates run in a process of their own, on the same GPU, which says which
one it is about to run; when it dies, that one is left out and another process goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from cute_ops import processes
from cute_ops.aot import manifest
from cute_ops.autotune.tuner import Examined, Trial
from cute_ops.binding import bind
from cute_ops.config import Config
from cute_ops.jit.target import Target

IDLE_SECONDS = 60.0
START_SECONDS = 120.0  # a framework's import may take long
TIMEOUT_SECONDS = 60.0  # of one step


class Apart:
    """Examines in another process; see :class:`cute_ops.autotune.tuner.Examiner`."""

    def __init__(self, device: int = 0, measurer: str = "") -> None:
        variables = {"CUTE_OPS_TUNE": "0", "CUTE_OPS_RECORD": ""}
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        if "CUDA_VISIBLE_DEVICES" not in os.environ or visible:
            variables["CUDA_VISIBLE_DEVICES"] = visible[device] if visible else str(device)
        self._process = processes.Process("cute_ops.autotune.bench_process", measurer, **variables)
        self._gpu = ""

    def examine(self, trials: Sequence[Trial], tiles: Sequence[Config], target: Target, least: float) -> Examined:
        """As :func:`cute_ops.autotune.compare.examine`; tiles that end the process are refused.

        Raises:
            RuntimeError: it cannot measure: no framework, no GPU, an op that no module holds, or the heuristic's tile
                itself fails.
        """
        calls = [manifest.call_of(*trial) for trial in trials]
        if None in calls:
            op = trials[0].binding.op.name
            raise RuntimeError(f"no module holds the declaration of {op}, so that no other process finds it")
        refused: dict[int, str] = {}
        with self._process.lock:
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
        with self._process.lock:
            self._ready()
            return self._gpu

    def close(self) -> None:
        with self._process.lock:
            self._process.stop()

    def _ready(self) -> None:
        if self._process.running():
            return
        try:
            answer = self._process.ask({}, START_SECONDS)
        except processes.Ended as ended:
            answer = {"error": _text(ended)}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        self._gpu = answer["ready"]

    def _ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """The answer, and the last tile that ran before it."""
        self._ready()
        steps: list[int] = []
        try:
            answer = self._process.ask(request, TIMEOUT_SECONDS, lambda step: steps.append(step["trying"]))
        except processes.Ended as ended:
            answer = {"fatal": True, "error": _text(ended)}
        if answer.get("fatal"):
            self._process.stop()
        return answer, steps[-1] if steps else None


def _text(ended: processes.Ended) -> str:
    """How the process ended, and its last words."""
    said = ended.log.strip().splitlines()
    return f"{ended}: {said[-1]}" if said else str(ended)


def serve(named: str) -> None:
    """Say which GPU this is, then measure what is asked for, see :func:`cute_ops.processes.requests`."""
    for request, say in processes.requests(IDLE_SECONDS):
        # The asker's sys.path, which frameworks are found on, comes with its requests.
        from cute_ops.autotune import compare

        try:
            by = compare.measurer(named)
            if "calls" not in request:
                say(ready=by.device())
                continue
        except Exception as error:
            say(error=str(error))
            return
        last: list[int] = []

        def trying(index: int, last: list[int] = last, say: Callable[..., None] = say) -> None:
            if last[-1:] != [index]:
                last.append(index)
                say(step=True, trying=index)

        try:
            calls = manifest.parse("\n".join(request["calls"]), files=True)
            trials = [Trial(bind(call.op, call.inputs, call.attrs), call.memory) for call in calls]
            found = compare.examine(
                trials, request["tiles"], Target(*request["target"]), by, request["least"], trying
            )  # fmt: skip
            say(found=[found.which, found.before, found.after, found.gain, found.refused])
        except Exception as error:  # it belongs to the caller
            text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if by.broken():
                say(fatal=True, error=text)
                os._exit(1)  # what is left of the context would hang
            say(error=text)
