"""The versions of transformers that are claimed are those that ``make transformers`` runs."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from transformers_versions import TESTS, VERSIONS  # noqa: E402


def test_what_is_claimed_is_what_is_run() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (claimed,) = (each for each in extras["dev"] if each.startswith("transformers"))
    oldest, newest = VERSIONS[0].split("."), VERSIONS[-1].split(".")
    assert claimed == f"transformers>={oldest[0]}.{oldest[1]},<{newest[0]}.{int(newest[1]) + 1}"
    pinned = re.search(r"^transformers==(.*)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None and pinned[1] in VERSIONS
    for page in ("docs/patch.md", "docs/install.md"):
        assert f"`pip install '{claimed}'`" in (ROOT / page).read_text(encoding="utf-8"), page
    text = (ROOT / "docs" / "patch.md").read_text(encoding="utf-8")
    assert ", ".join(VERSIONS[:-1]) + f" and {VERSIONS[-1]}" in text.replace("\n", " ")
    assert all((ROOT / test).is_file() for test in TESTS)
