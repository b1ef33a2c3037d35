"""Two ranks under torchrun share a cache: a kernel that nobody has is compiled once, and none when it is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, sys, time
from pathlib import Path
from cute_ops import Array
from cute_ops.calls import lookup
from cute_ops.jit import cache
from cute_ops.declaration.binding import bind
from cute_ops.autotune.dispatch import foresee
from cute_ops.jit.target import parse

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
for n in (64, 96):
    shapes = dict.fromkeys(("gate", "up"), Array((4, n), "float32"))
    variant = foresee(bind(lookup.find("silu_mul"), shapes), {}, parse("sm_90a")).variant
    (folder / f"{rank} is at {n}").touch()
    while len(list(folder.glob(f"* is at {n}"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.001)  # no torch, whose import takes longer than all of this
    cache.get(variant)
(folder / f"{rank}.json").write_text(json.dumps(vars(cache.counters)))
if again := sys.argv[2:]:  # in a fresh interpreter; torchrun, which imports torch, starts once
    os.execv(sys.executable, [sys.executable, sys.argv[0], *again])
"""


@pytest.mark.slow
def test_ranks_compile_once_and_never_when_warm(tmp_path: Path, cache_folder: Path) -> None:
    program, folders = tmp_path / "program.py", [tmp_path / "cold", tmp_path / "warm"]
    program.write_text(PROGRAM)
    for folder in folders:
        folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*command, str(program), *map(str, folders)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    cold, warm = ([json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)] for folder in folders)
    assert sum(rank["compiled"] for rank in cold) == 2 and sum(rank["disk"] for rank in cold) == 2
    assert warm == [{"bundled": 0, "disk": 2, "compiled": 0}] * 2
