"""What is made from the declarations is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "docs"))
import make_ops
import make_pages


@pytest.mark.parametrize("page", make_pages.MADE)
def test_pages_are_made_anew(page: str) -> None:
    assert (make_pages.PAGES / page).read_text() == make_pages.MADE[page](), "run python docs/make_pages.py"


def test_ops_are_documented() -> None:
    assert make_ops.PAGE.read_text() == make_ops.page(), "run python docs/make_ops.py"
    assert make_ops.README.read_text() == make_ops.readme(), "run python docs/make_ops.py"
