"""Processes that depend on one another, such as the ranks of a process group.

A collective waits for ever for a rank that has died, and a rank that waits says nothing. So when one process fails, is
silent or takes too long, all are killed, and what went wrong is said with the last line of each.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

GRACE = 3.0  # seconds in which others say what they have to say of the same failure
POLL = 0.1


class Limits(NamedTuple):
    """Seconds: of all, and without a word from one of them."""

    whole: float
    silent: float


def together(
    commands: Sequence[Sequence[str]], logs: Sequence[Path], limits: Limits, tick: Callable[[], object] = lambda: None
) -> str:
    """Run commands at the same time, and wait for all of them.

    Args:
        commands: one for each process; none of them, or of what they start, outlives this call.
        logs: a file for the output of each.
        limits: how long they may take.
        tick: called again and again meanwhile.

    Returns:
        What went wrong; empty where all ended with 0.
    """
    processes: list[subprocess.Popen[bytes]] = []
    start = time.monotonic()
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("wb") as out:
                processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
        while True:
            tick()
            codes = [process.poll() for process in processes]
            if not any(code is None for code in codes) and not any(codes):
                return ""
            if any(codes):
                end = time.monotonic() + GRACE
                while any(p.poll() is None for p in processes) and time.monotonic() < end:
                    time.sleep(POLL)
                return "; ".join(_ended(k, process.poll(), logs[k]) for k, process in enumerate(processes))
            quiet = [k for k, code in enumerate(codes) if code is None and _silence(logs[k]) > limits.silent]
            if quiet or time.monotonic() - start > limits.whole:
                why = f"silent for {limits.silent:.0f} s" if quiet else f"over its limit of {limits.whole:.0f} s"
                which = " and ".join(f"rank {k}" for k in quiet) or "all"
                said = "; ".join(_ended(k, process.poll(), logs[k]) for k, process in enumerate(processes))
                return f"{which}: {why}: {said}"
            time.sleep(POLL)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        tick()


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1][:300] if lines else "nothing"


def _silence(log: Path) -> float:
    """Seconds since a process last wrote."""
    return time.time() - log.stat().st_mtime


def _ended(rank: int, code: int | None, log: Path) -> str:
    """How a process ended, and the last line that it wrote."""
    if code is None:
        how = "was waiting"
    elif code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    else:
        how = f"ended with {code}"
    return f"rank {rank} {how} after: {last_line(log)}"
