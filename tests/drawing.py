"""A part of a test's cases, drawn by a text: what the mark ``drawn`` leaves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

Case = TypeVar("Case")


def part_of(cases: Sequence[Case], part: float, text: str) -> list[Case]:
    """So many of the cases, one at least: one of as many neighbours each, so that whatever neighbours have in common,
    an op or a dtype, each run has some of all of it.
    """
    rng, count = random.Random(text), max(round(part * len(cases)), 1)
    edges = [len(cases) * i // count for i in range(count + 1)]
    return [cases[rng.randrange(*between)] for between in pairwise(edges)]
