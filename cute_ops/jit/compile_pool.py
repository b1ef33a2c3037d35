"""The subprocesses that compile, and their client.

The compiler never runs in the caller's process: its import takes a second, a failed compile can abort the process, and
two at once always do. A worker is started for each concurrent compile and ends after a minute without work. Workers
never see a GPU.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cute_ops import env, processes
from cute_ops.declaration.kernel import importable
from cute_ops.errors import CompileError
from cute_ops.jit import toolchain
from cute_ops.jit.variant import Variant

# The worker must not find a GPU, since a context would cost memory and could hang. The DSL's own cache is off, since it
# lies in the shared temporary folder. The compiler imports NumPy, whose BLAS would start a thread per core: they have
# nothing to do, but spin for a while.
SETTINGS = {"CUDA_VISIBLE_DEVICES": "", "CUTE_DSL_DISABLE_FILE_CACHING": "1", "OPENBLAS_NUM_THREADS": "1"}
FRAMEWORKS = ("torch", "jax")
# The program's module, by the name under which a worker can import it.
_PROGRAM = importable("__main__:").partition(":")[0]
IDLE_SECONDS = 60.0
TIMEOUT_SECONDS = env.COMPILE_TIMEOUT.read()
_ERROR_TAIL = 4000


class Pool:
    """Compiles at most ``size`` kernels at the same time, each in a process of its own; further compiles wait.

    A process is started when it is needed. If one crashes or is killed, only its own compile raises, and the next
    compile starts another process.
    """

    def __init__(self, size: int | None = None) -> None:
        self._size = size
        self._free = threading.Condition()
        self._idle: list[processes.Process] = []
        self._busy: dict[int, processes.Process] = {}  # by thread

    @property
    def size(self) -> int:
        """``CUTE_OPS_COMPILE_WORKERS``, or the cores this process may use."""
        return self._size or env.COMPILE_WORKERS.read() or len(os.sched_getaffinity(0))

    def compile(self, variant: Variant, path: Path, dump: Path | None = None) -> float:
        """Compile ``variant`` into ``path``; returns the seconds it took, without any wait for a process.

        Raises:
            CompileError: with the compiler's output: it failed, crashed or took too long; or there is none.
        """
        if find_spec("cutlass") is None:
            raise CompileError(
                f"cute.{variant.op}: no bundle and no cache holds {variant.describe()}, and the compiler is not "
                f"installed: add the call to the manifest and build the bundle again, or pip install {toolchain.DSL}"
            )
        request = {
            "variant": variant.text, "path": str(path.absolute()), "dump": str(dump.absolute()) if dump else None,
            "program": _PROGRAM,
        }  # fmt: skip
        thread = threading.get_ident()
        try:
            with self._free:
                self._free.wait_for(lambda: not self._busy or len(self._busy) < self.size)
                # The most recently used process is taken, so that the others become idle and end.
                process = self._busy[thread] = (
                    self._idle.pop() if self._idle else processes.Process(__name__, **SETTINGS)
                )
            start = time.perf_counter()
            error = process.ask(request, TIMEOUT_SECONDS).get("error")
            seconds = time.perf_counter() - start
        except processes.Ended as ended:
            named = " (CUTE_OPS_COMPILE_TIMEOUT)" if isinstance(ended, processes.Silent) else ""
            error = f"the compiler {ended}{named}\n{ended.log}"
        finally:
            with self._free:
                if thread in self._busy:  # else an interrupt came before it was entered
                    self._idle.append(self._busy.pop(thread))
                    self._free.notify()
        if error:
            raise CompileError(f"cute.{variant.op}: kernel does not compile: {variant.describe()}\n{error}")
        return seconds

    def cancel(self, threads: Collection[int]) -> None:
        """Kill the processes that compile for these threads, given by identifiers; their compiles raise."""
        with self._free:
            for thread, process in self._busy.items():
                if thread in threads:
                    process.kill()

    def close(self) -> None:
        """End the processes that have nothing to do."""
        with self._free:
            idle, self._idle = self._idle, []
        for process in idle:
            process.stop()


worker = Pool()
# A forked child starts without workers.
os.register_at_fork(after_in_child=lambda: worker.__init__())  # type: ignore[misc]


def serve() -> None:
    """Run in a worker: compile what requests ask for, see :func:`cute_ops.processes.requests`."""
    for name in FRAMEWORKS:
        # TVM-FFI would import torch (1-2 s); kernels have no use for a framework.
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    from cute_ops.jit.compiler import compile_variant  # in a worker only, after the lines above

    gc.disable()  # until the compiler is imported: collections find nothing then and take an eighth of the time
    for request, say in processes.requests(IDLE_SECONDS):
        answer: dict[str, Any] = {}
        try:
            dump, variant = request["dump"], Variant.from_json(request["variant"])
            if variant.kernel.startswith(f"{request['program']}:"):  # a program may import frameworks, a kernel may not
                for name in FRAMEWORKS:
                    if name in sys.modules and sys.modules[name] is None:
                        del sys.modules[name]
            _check_sources(variant)
            compile_variant(variant, Path(request["path"]), Path(dump) if dump else None)
            _check_sources(variant)  # again: the sources were read between the two checks
        except (Exception, SystemExit) as error:  # every failure of a kernel belongs to the caller
            import traceback  # start-up time

            Path(request["path"]).unlink(missing_ok=True)
            answer["error"] = "".join(traceback.format_exception(error))[-_ERROR_TAIL:]
        say(**answer)
        if not gc.isenabled():
            gc.freeze()  # the compiler's modules stay: later collections need not look at them
            gc.enable()


def _check_sources(variant: Variant) -> None:
    """Raise if a kernel was edited since the program started: it must not be cached under its old sources' digest."""
    from cute_ops.jit import source_digest  # in a worker only

    source_digest.forget()
    if source_digest.key(variant.kernel, variant.declared) != variant.sources:
        raise CompileError(
            f"the sources of {variant.kernel} have changed since this program started: restart the program (cute_ops "
            "itself and the CUTE_DSL_ environment variables count as sources, too)"
        )
