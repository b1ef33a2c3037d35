"""Markers that every test folder shares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cute_ops import cache, target


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``gpu`` tests skip only where there is no GPU."""
    if target.device_count():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, and nothing held in memory."""
    where = tmp_path / "cache"
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(where))
    cache.forget()
    yield where
    cache.forget()
