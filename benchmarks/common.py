"""What the benchmarks share: the machine they ran on, statistics, CSV files, JAX set up beside PyTorch."""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "torch", "triton", "jax", "jax-tvm-ffi", "nvidia-cutlass-dsl", "apache-tvm-ffi", "quack-kernels", "liger-kernel",
    "flash-attn-4", "flash-attn3-jax", "tokamax",
)  # fmt: skip

# JAX shares the GPU with PyTorch: it must not take most of its memory at the start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None, gpu: bool) -> argparse.Namespace:
    """A benchmark's options, with ``--cpu-smoke``; without that it ends where there is no GPU."""
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny sizes on the CPU: checks this file only")
    options = parser.parse_args(arguments)
    if not (options.cpu_smoke or gpu):
        parser.error("no GPU here; --cpu-smoke checks the code paths")
    return options


def parse_for_gpu(parser: argparse.ArgumentParser, arguments: Sequence[str] | None, gpu: bool) -> argparse.Namespace:
    """The options of a benchmark that runs on a GPU alone: it ends where there is none, before it opens its file."""
    options = parser.parse_args(arguments)
    if not gpu:
        parser.error("no GPU here")
    return options


class Spread(NamedTuple):
    """Median, minimum and maximum of some samples."""

    median: float
    low: float
    high: float


def spread(samples: Iterable[float]) -> Spread:
    values = list(samples)
    return Spread(statistics.median(values), min(values), max(values))


def by_clock(run: Callable[[], Any], finish: Callable[[Any], Any], calls: int) -> float:
    """Microseconds of a call by the clock: of many calls, less those of a few. So neither the launch of the first one
    counts, before which the device has nothing to do, nor the wait for the last one; ``finish`` waits for a result.
    """

    def elapsed(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            out = run()
        finish(out)
        return time.perf_counter() - start

    finish(run())
    few = elapsed(calls)
    return (elapsed(3 * calls) - few) / (2 * calls) * 1e6


@functools.cache
def environment() -> dict[str, str]:
    """Columns that say where a figure comes from."""
    return {
        "gpu": _smi("name") or platform.processor() or platform.machine(),
        "driver": _smi("driver_version"),
        "versions": ", ".join(f"{p} {v}" for p in PACKAGES if (v := _version(p))),
        "torch_native_dsl": str(_native_dsl()),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


class Table:
    """A CSV file that is written row by row, so that a run which is cut short keeps what it has measured.

    Args:
        of: where the figures come from, as :func:`environment` says it.
    """

    def __init__(
        self, path: Path, columns: tuple[str, ...], append: bool = False, of: Mapping[str, str] | None = None
    ) -> None:
        self._path, self._environment = path, of or environment()
        self._columns = (*columns, *self._environment)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (append and path.exists()):
            with path.open("w", newline="") as file:
                csv.writer(file).writerow(self._columns)

    def add(self, row: Mapping[str, Any]) -> None:
        cells = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow({**cells, **self._environment})

    def keep(self, rows: Iterable[Mapping[str, str]]) -> None:
        """Write rows of an earlier run as they were."""
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def dates(rows: Iterable[Mapping[str, str]]) -> str:
    """From the first day of some rows to the last one."""
    days = sorted({row["date"] for row in rows})
    return " to ".join(dict.fromkeys((days[0], days[-1])))


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(header)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def first_line(error: BaseException) -> str:
    """An error for a table cell."""
    lines = re.sub("\x1b\\[[0-9;]*m", "", str(error)).strip().splitlines() or [""]  # some errors are in colours
    return f"{type(error).__name__}: {lines[0][:120]}"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _smi(field: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    return _output(command).split("\n")[0]


def _commit() -> str:
    """The commit, marked where the tree differs from it. ``CUTE_OPS_COMMIT`` names it where git does not."""
    dirty = "+changes" if _output(["git", "status", "--porcelain", "--untracked-files=no"]) else ""
    found = _output(["git", "rev-parse", "--short", "HEAD"])
    return os.environ.get("CUTE_OPS_COMMIT") or (found + dirty if found else "unknown")


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _native_dsl() -> bool:
    """Whether torch itself may answer ``F.rms_norm`` with a CuTe DSL kernel (it wants exact DSL versions)."""
    try:
        from torch._native.cutedsl_utils import runtime_available  # type: ignore[import-not-found,unused-ignore]

        return bool(runtime_available())
    except Exception:  # private and absent from most releases: any failure means no
        return False
