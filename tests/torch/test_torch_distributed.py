"""DTensors, FSDP2 and tensor parallelism on four processes with gloo, and on two GPUs with NCCL, against one process.

Every rank runs ``distributed_ranks.py``: one group of processes for all checks, since starting one takes longer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from ranks import Limits, together

from tests.torch import distributed_training  # noqa: F401  adds its checks
from tests.torch.distributed_checks import CHECKS

PROGRAM = Path(__file__).with_name("distributed_ranks.py")


def run(ranks: int, device: str, folder: Path, *checks: str) -> None:
    """Run every check on every rank; fail with their errors."""
    # On CPUs the ranks are forked from one process: importing torch in each would take as long as half of the checks.
    which = ("all",) if device == "cpu" else tuple(map(str, range(ranks)))
    command = [sys.executable, str(PROGRAM), str(ranks), device, str(folder)]
    logs = [folder / f"{rank}.log" for rank in which]
    limits = Limits(900, 600) if device == "cpu" else Limits(240, 150)
    wrong = together([[*command, rank, *checks] for rank in which], logs, limits)
    problems = []
    for rank in range(ranks):
        report = folder / f"{rank}.json"
        found = json.loads(report.read_text()) if report.exists() else {}
        problems += [f"rank {rank}, {name}: {text}" for name, text in found.items() if text != "passed"]
    if wrong:
        said = "\n".join(log.read_text()[-3000:] for log in logs) if not problems else ""
        pytest.fail("\n".join([*problems, wrong, said]), pytrace=False)


@pytest.mark.slow
@pytest.mark.feature("DTensors: rows, losses, tensor parallelism, FSDP2, with gloo")
def test_four_processes(drawn: Callable[[Sequence[str], float], Sequence[str]], tmp_path: Path) -> None:
    run(4, "cpu", tmp_path, *drawn([*CHECKS], 0.35))


@pytest.mark.parametrize(("check", "said"), [("dies", "was killed by SIGKILL"), ("hangs", "silent for 4 s")])
@pytest.mark.slow
def test_a_rank_that_is_lost_ends_the_others(check: str, said: str, tmp_path: Path) -> None:
    """The caller learns which one, and where it was."""
    lost = """
import os, signal, sys, time
print("at the collective", flush=True)
if sys.argv[1:] == ["1", "dies"]:
    os.kill(os.getpid(), signal.SIGKILL)
while sys.argv[1:] != ["1", "hangs"]:
    print("at the collective", flush=True)
    time.sleep(0.5)
time.sleep(60)
"""
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    wrong = together([[sys.executable, "-c", lost, str(rank), check] for rank in range(2)], logs, Limits(50, 4))
    assert said in wrong and "rank 0 was waiting after: at the collective" in wrong, wrong
    assert wrong.startswith("rank 1: ") == (check == "hangs"), wrong


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_two_gpus(tmp_path: Path) -> None:
    run(2, "cuda", tmp_path)
