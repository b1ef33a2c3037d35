"""A part of the sweep over all row lengths on a GPU, another one in every run, and kernels under compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import cute_ops_torch
from tests.torch.sanitized_calls import every_op

pytestmark = pytest.mark.gpu
CALLS = Path(__file__).with_name("sanitized_calls.py")
LENGTHS = {"memcheck": ["17", "129", "4097", "50257"], "racecheck": ["17", "129"], "initcheck": ["17", "129", "4097"]}
AT_ONCE = min(len(os.sched_getaffinity(0)), 16)


def run(command: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_sample_of_the_sweep() -> None:
    """``CUTE_OPS_SWEEP_SEED`` repeats a run's sample."""
    seed = os.environ.get("CUTE_OPS_SWEEP_SEED") or str(time.time_ns() % 2**31)
    command = [sys.executable, "-m", "cute_ops", "verify", "--sweep", "--fraction", "0.0005"]
    result = run([*command, "--seed", seed, "--round", str(int(seed) % 12)])
    print(result.stdout)
    assert result.returncode == 0, f"CUTE_OPS_SWEEP_SEED={seed}: {result.stdout}\n{result.stderr}"


def test_embeddings_of_all_widths() -> None:
    def check(n: int) -> None:
        dtype = (torch.float32, torch.float16, torch.bfloat16)[n % 3]
        index = torch.randint(7, (97,), device="cuda")
        table = torch.randn(7, n, device="cuda", dtype=dtype, requires_grad=True)
        dout = torch.randn(97, n, device="cuda", dtype=dtype)
        (got,) = torch.autograd.grad(cute_ops_torch.embedding(index, table), table, dout)
        exact = torch.zeros(7, n, device="cuda", dtype=torch.float64).index_add(0, index, dout.double())
        torch.testing.assert_close(got, exact.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)

    with ThreadPoolExecutor(AT_ONCE) as threads:  # kernels compile in other processes
        list(threads.map(check, range(1, 301)))


@pytest.mark.parametrize(("tool", "lengths"), LENGTHS.items(), ids=list(LENGTHS))
def test_nothing_is_found_by_the_sanitizer(tool: str, lengths: list[str]) -> None:
    """Every op and gradient, in dtypes and layouts that are drawn; ``CUTE_OPS_SWEEP_SEED`` repeats a run's draw."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    seed = os.environ.get("CUTE_OPS_SWEEP_SEED") or str(time.time_ns() % 2**31)
    calls_of_all = [sys.executable, str(CALLS), *lengths, "--seed", seed]
    assert run([*calls_of_all, "--build"]).returncode == 0
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--destroy-on-device-error", "kernel", *calls_of_all]

    def calls(ops: Sequence[str]) -> str:
        # Every tensor an allocation of its own: a byte past its end is nobody's.
        named = [word for op in ops for word in ("--op", op)]
        result = run([*command, *named], PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        return "" if result.returncode == 0 else f"{ops}: {result.returncode}\n{result.stdout[-3000:]}"

    every = [*every_op(), "sorted_embedding_bwd"]
    with ThreadPoolExecutor(AT_ONCE) as threads:  # to start a process takes longer than the calls of an op
        found = [problem for problem in threads.map(calls, [every[i::AT_ONCE] for i in range(AT_ONCE)]) if problem]
    assert not found, f"CUTE_OPS_SWEEP_SEED={seed}: " + "\n".join(found)
