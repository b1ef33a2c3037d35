"""A second of damaged files for each of the readers; ``tests/fuzz/parsers.py`` does it for as long as one likes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# About a second for each.
CASES = {"expression": 3000, "manifest": 500, "bundle": 300, "tuning": 600, "cache": 300, "export": 150}


@pytest.mark.drawn(0.5)
@pytest.mark.fault(
    "random changes in manifests, bundles, tuning files, exports and the cache: bits, types, names, numbers, nesting",
    "what is read is valid, or an error says what is wrong", "nothing",
)  # fmt: skip
@pytest.mark.parametrize("parser", CASES)
def test_damaged_files_are_explained(parser: str) -> None:
    if parser == "export" and not (find_spec("jax") and find_spec("flatbuffers")):
        pytest.skip("exports need JAX and flatbuffers")
    command = [sys.executable, "-m", "tests.fuzz.parsers", "--parser", parser, "--seed", "0"]
    command += ["--cases", str(CASES[parser]), "--seconds", "inf", "--hangs", "600"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.match(rf"{parser}: {CASES[parser]} cases, \d+ read in spite of them, 0 faults", done.stdout), done.stdout
