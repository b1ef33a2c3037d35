"""Markers that every test folder shares."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cute_ops import cache, target


def pytest_configure(config: pytest.Config) -> None:
    """Code that Inductor kept from an earlier state of this repository must not run in its tests."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder = tempfile.mkdtemp(prefix="cute_ops_inductor_")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


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
