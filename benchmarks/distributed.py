"""Several GPUs: training steps and ops, by PyTorch's and XLA's own means and by ours, beside each other.

    python benchmarks/distributed.py --out out/benchmarks [--phases products fsdp jax] [--seconds 540]

Each phase is a process of its own for each GPU (of JAX one for all), and has a limit. If one of them fails or hangs,
all of that phase are ended; what they had measured stays, and the next phase runs. Figures go to distributed.csv,
whose rows of other phases stay, and what processes say goes to logs/. ``--device cpu`` runs the same with tiny sizes,
on two ranks with gloo and on two devices of XLA's CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT, Table, read
from ranks import Limits, last_line, together
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as View

HERE = Path(__file__).parent
COLUMNS = (
    "phase", "case", "contender", "gpus", "tokens", "ms", "ms_min", "ms_max", "tokens_per_s", "peak_gb", "error",
    "loss_first", "loss_last", "apart", "status",
)  # fmt: skip
LEAST = 15.0  # seconds that are worth starting a phase for


class Phase(NamedTuple):
    """What a phase's processes may take, and whether there is one for each GPU."""

    limits: Limits
    by_rank: bool = True


PHASES = {
    "checks": Phase(Limits(240, 150)),
    "products": Phase(Limits(150, 90)),
    "fsdp": Phase(Limits(150, 90)),
    "tensor_parallel": Phase(Limits(200, 90)),
    "jax": Phase(Limits(240, 150), by_rank=False),
    "fsdp_compiled": Phase(Limits(240, 150)),
}
SLOWER = 4  # a CPU that runs other work, too


class Setting(NamedTuple):
    """On what a run measures."""

    device: str
    gpus: int
    rounds: int
    batch: int


def commands(name: str, setting: Setting, folder: Path) -> list[list[str]]:
    """A command for each process of a phase, which write to rows.jsonl in the folder, those of ``checks`` to a report
    each.
    """
    device, gpus = setting.device, setting.gpus
    if name == "checks":
        program = [str(ROOT / "tests" / "torch" / "distributed_ranks.py"), str(gpus), device, str(folder)]
        return [[sys.executable, *program, str(rank)] for rank in range(gpus)]
    rounds = ["--rounds", str(setting.rounds)]
    if not PHASES[name].by_rank:
        return [[sys.executable, str(HERE / "distributed_jax.py"), device, str(gpus), str(folder), *rounds]]
    program, options = str(HERE / "distributed_torch.py"), ["--batch", str(setting.batch), *rounds]
    return [
        [sys.executable, program, name, str(rank), str(gpus), device, str(folder), *options] for rank in range(gpus)
    ]


class Rows:
    """The rows that a phase's processes have written so far, on their way into the table."""

    def __init__(self, name: str, folder: Path, table: Table, gpus: int) -> None:
        self.name, self.gpus, self.failed = name, gpus, 0
        self._table, self._seen, self._folder = table, 0, folder

    def take(self) -> None:
        if self.name != "checks":
            path = self._folder / "rows.jsonl"
            lines = path.read_text().split("\n")[:-1] if path.exists() else []  # a line that is being written is not
            for line in lines[self._seen :]:
                self.add(**json.loads(line))
            self._seen = len(lines)

    def take_checks(self) -> None:
        """Of each check what the first rank on which it failed says."""
        if self.name != "checks":
            return
        found: dict[str, str] = {}
        for rank in range(self.gpus):
            path = self._folder / f"{rank}.json"
            for check, text in (json.loads(path.read_text()) if path.exists() else {}).items():
                if found.get(check, "passed") == "passed":
                    found[check] = text
        for check, text in found.items():
            status = "ok" if text == "passed" else f"failed: {text.strip().splitlines()[-1][:200]}"
            self.add(case=check.replace("_", " "), contender="ours", status=status)

    def add(self, **row: Any) -> None:
        self._table.add({"phase": self.name, "gpus": self.gpus, **row})
        self.failed += row["status"] != "ok"


def run(name: str, setting: Setting, table: Table, out: Path, seconds: float, say: Callable[[str], object]) -> str:
    """``ok``, or what went wrong."""
    limits = PHASES[name].limits
    if setting.device == "cpu":
        limits = Limits(*(SLOWER * limit for limit in limits))
    with tempfile.TemporaryDirectory() as folder:
        rows = Rows(name, Path(folder), table, setting.gpus)
        every = commands(name, setting, Path(folder))
        logs = [out / "logs" / f"distributed {name}{f' {k}' if len(every) > 1 else ''}.txt" for k in range(len(every))]

        def tick() -> None:
            rows.take()
            say(last_line(logs[0])[:60])

        wrong = together(every, logs, limits._replace(whole=min(limits.whole, seconds)), tick)
        rows.take_checks()
    if wrong:
        rows.add(case="all that is left", contender="", status=f"failed: {wrong[:300]}")
        return f"{wrong}; more in {out / 'logs'}"
    return f"{rows.failed} rows are not ok" if rows.failed else "ok"


def show(path: Path, console: Console) -> None:
    shown = ("case", "contender", "ms", "tokens_per_s", "peak_gb", "error", "loss_last", "status")
    view = View(*shown, title="several GPUs")
    for row in read(path):
        view.add_row(*(row[name] for name in shown))
    console.print(view)


def on_this_machine(device: str, gpus: int | None) -> tuple[int, float]:
    """How many GPUs to take, and the memory of the smallest in GB. PyTorch is not asked, which would take memory."""
    if device == "cpu":
        return gpus or 2, 0.0
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        found = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(found) if visible is None else min(len(found), len([v for v in visible.split(",") if v.strip()]))
    return gpus or count, min(map(float, found), default=0.0) / 1024


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for distributed.csv")
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=list(PHASES), metavar="PHASE",
                        help=f"of {', '.join(PHASES)}")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=540, help="for all of them")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tiny sizes, to check the code")
    parser.add_argument("--gpus", type=int, help="by default all, on a CPU two ranks")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each contender")
    parser.add_argument("--batch", type=int, help="sequences of 4096 tokens of a training step; 2 below 100 GB, else 4")
    options = parser.parse_args(arguments)
    gpus, memory = on_this_machine(options.device, options.gpus)
    if gpus < 2:
        parser.error(f"{gpus} GPU here; --device cpu checks the code paths")
    setting = Setting(options.device, gpus, options.rounds, options.batch or (4 if memory > 100 else 2))
    (options.out / "logs").mkdir(parents=True, exist_ok=True)
    deadline, console, wrong = time.monotonic() + options.seconds, Console(highlight=False, width=150), 0
    path = options.out / "distributed.csv"
    kept = [row for row in read(path) if row["phase"] not in options.phases] if path.exists() else []
    table = Table(path, COLUMNS)
    table.keep(kept)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(options.phases))
        for name in options.phases:
            begin, left = time.monotonic(), deadline - time.monotonic()
            said = "no time left"
            if left > LEAST:
                say = lambda text, name=name: progress.update(task, description=f"{name}: {text}")  # noqa: E731
                said = run(name, setting, table, options.out, left - LEAST / 3, say)
            console.print(f"{name}: {said}, {time.monotonic() - begin:.0f} s")
            wrong += said != "ok"
            progress.advance(task)
    show(path, console)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
