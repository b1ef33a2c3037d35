"""DTensors, FSDP2 and tensor parallelism on four processes with gloo, and on two GPUs with NCCL, against one process.

Every rank runs ``distributed_checks.py``: one group of processes for all checks, since starting one takes longer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("distributed_checks.py")


def run(ranks: int, device: str, folder: Path) -> None:
    """Run every check on every rank; fail with their errors."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = []
    # On CPUs fork the ranks from one process: importing torch in each would take as long as half of the checks.
    first = ("all",) if device == "cpu" else range(ranks)
    for rank in first:
        with (folder / f"{rank}.log").open("wb") as log:
            command = [sys.executable, str(PROGRAM), str(ranks), device, str(folder)]
            own = {**environment, "RANK": str(rank)}
            processes.append(
                subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            )
    try:
        for process in processes:
            process.wait(timeout=900)  # GPUs compile kernels
    except subprocess.TimeoutExpired:
        pass  # checks without a report count as failed
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    problems = []
    for rank in range(ranks):
        log = folder / ("all.log" if device == "cpu" else f"{rank}.log")
        report, said = folder / f"{rank}.json", log.read_text()[-3000:]
        found = json.loads(report.read_text()) if report.exists() else {"start": said}
        problems += [f"rank {rank}, {name}: {text}" for name, text in found.items() if text != "passed"]
        if found and "done" not in found and not problems:
            problems.append(f"rank {rank} did not end: {said}")
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


@pytest.mark.feature("DTensors: rows, losses, tensor parallelism, FSDP2, with gloo")
def test_four_processes(tmp_path: Path) -> None:
    run(4, "cpu", tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_two_gpus(tmp_path: Path) -> None:
    run(2, "cuda", tmp_path)
