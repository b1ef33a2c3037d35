"""Two ranks under torchrun share a cache: a kernel that nobody has is compiled once, and none when it is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, sys
import torch.distributed as dist
from cute_ops import Array, cache, declarations
from cute_ops.binding import bind
from cute_ops.plan import plan
from cute_ops.target import parse

dist.init_process_group("gloo")
for n in (64, 96):
    shapes = dict.fromkeys(("gate", "up"), Array((4, n), "float32"))
    variant = plan(bind(declarations.find("silu_mul"), shapes), {}, parse("sm_90a")).variant
    dist.barrier()
    cache.get(variant)
found = [None] * dist.get_world_size()
dist.all_gather_object(found, vars(cache.counters))
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write(json.dumps(found))
dist.destroy_process_group()
"""


def counters(folder: Path) -> list[dict[str, int]]:
    """What each of two ranks did."""
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*command, str(folder / "program.py"), str(folder / "found.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


def test_ranks_compile_once_and_never_when_warm(tmp_path: Path, cache_folder: Path) -> None:
    cold = counters(tmp_path)
    assert len(cold) == 2 and sum(rank["compiled"] for rank in cold) == 2 and sum(rank["disk"] for rank in cold) == 2
    assert counters(tmp_path) == [{"bundled": 0, "disk": 2, "compiled": 0}] * 2
