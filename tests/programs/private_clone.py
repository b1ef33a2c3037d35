"""Tests that ``test_other_machines.py`` names: they pass on one machine and fail on another."""

from __future__ import annotations

from pathlib import Path


def test_nobody_else_reads_the_clone() -> None:
    assert Path(__file__).stat().st_mode & 0o077 == 0
