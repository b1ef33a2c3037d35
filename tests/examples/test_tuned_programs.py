"""Tuning on a GPU as users do it: programs use what other programs and the command measured, without a compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cute_ops.autotune import winners

ROOT = Path(__file__).parents[2]
# A heuristic that any GPU beats: CTAs of one warp leave half of an SM's threads empty.
DECLARED = """
from cute_ops import FLOATS, Case, Op, Tensor, Tuning, vary
from cute_ops.ops.activation.unary import silu

rows = Tensor("*m n", "T")
narrow = Op(
    "narrow_silu", inputs={"x": rows}, outputs={"out": rows}, dtypes={"T": FLOATS}, reference=silu.reference,
    kernel=silu.kernel, cases=(Case("one", {"m": (3,), "n": 4096}),),
    tuning=Tuning(
        lambda problem: {**silu.config(problem), "threads": 32},
        vary(threads=(128, 256), buckets={"m": (1024,)}),
    ),
)
"""
CALLS = {
    "torch": """
import torch, cute_ops_torch
from narrow import narrow
x = torch.linspace(-4, 4, 32768 * 4096, device="cuda").bfloat16().view(32768, 4096)
error = (cute_ops_torch.register(narrow)(x).float() - torch.nn.functional.silu(x.float())).abs().max().item()
""",
    "jax": """
import jax, jax.numpy as jnp, cute_ops_jax
from narrow import narrow
x = jnp.linspace(-4, 4, 32768 * 4096, dtype=jnp.bfloat16).reshape(32768, 4096)
error = jnp.abs(cute_ops_jax.register(narrow)(x).astype(jnp.float32) - jax.nn.silu(x.astype(jnp.float32))).max().item()
""",
}
PROGRAM = """
import json, logging, os, sys
if "WITHOUT_COMPILER" in os.environ:
    sys.modules["cutlass"] = None
messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("cute_ops").addHandler(handler)
logging.getLogger("cute_ops").setLevel(logging.INFO)
{call}
from cute_ops.autotune import dispatch
from cute_ops.jit import cache
used = [dict(winner.config) for winner in dispatch.winners_of(cache._functions)]
print(json.dumps({{"error": error, "used": used, "compiled": cache.counters.compiled, "messages": messages}}))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "narrow.py").write_text(DECLARED)
    path = os.pathsep.join(p for p in (str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH")) if p)
    return {
        **os.environ, "PYTHONPATH": path, "CUTE_OPS_CACHE_DIR": str(tmp_path / "cache"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }  # fmt: skip


def start(framework: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM.format(call=CALLS[framework])]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answer(program: subprocess.Popen[str]) -> dict[str, Any]:
    out, problem = program.communicate(timeout=200)
    assert program.returncode == 0, problem
    return json.loads(out.splitlines()[-1])


def check_that_it_is_used(framework: str, environment: dict[str, str]) -> None:
    """By a program that has no compiler, with the config of the one line of the cache folder's file."""
    (winner,) = winners.read(Path(environment["CUTE_OPS_CACHE_DIR"], winners.NAME)).values()
    assert winner.call.startswith("narrow_silu ")
    assert (winner.heuristic["threads"], winner.heuristic["unroll"]) == (32, 1)
    assert winner.config["threads"] in (128, 256), (
        "a warp to a CTA is as fast as four: this test's heuristic is no bad one"
    )
    ((before, after),) = winner.measured["us"]
    assert after < 0.98 * before
    found = answer(start(framework, {**environment, "WITHOUT_COMPILER": "1"}))
    assert found["used"] == [winner.config] and not found["compiled"] and found["error"] < 0.02
    assert not found["messages"]


@pytest.mark.gpu
@pytest.mark.parametrize("framework", CALLS)
def test_of_two_programs_one_measures_and_a_third_runs_without_a_compiler(
    framework: str, environment: dict[str, str]
) -> None:
    found = [answer(p) for p in [start(framework, {**environment, "CUTE_OPS_TUNE": "1"}) for _ in range(2)]]
    assert found[0]["used"] == found[1]["used"] and max(f["error"] for f in found) < 0.02
    said = [message for f in found for message in f["messages"] if message.startswith("tuned narrow_silu")]
    assert len(said) == 1, said
    check_that_it_is_used(framework, environment)


@pytest.mark.gpu
def test_a_program_runs_with_what_the_command_measured(tmp_path: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "cute_ops", "tune", "narrow:narrow", "--n", "4096", "--rows", "32768"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 changed, 0 stay with the heuristic" in done.stdout
    check_that_it_is_used("torch", environment)
