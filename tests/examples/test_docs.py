"""What is made from the declarations is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "docs"))
import make_ops


def test_ops_are_documented() -> None:
    assert make_ops.PAGE.read_text() == make_ops.page(), "run python docs/make_ops.py"
    assert make_ops.README.read_text() == make_ops.readme(), "run python docs/make_ops.py"
