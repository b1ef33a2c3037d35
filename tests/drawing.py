"""Drawn tests: the part of a test's cases that the mark ``drawn`` keeps, and command lines that check many seeds."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
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


def check_seeds(check: Callable[[int], object], what: str, name: Callable[[int], str] = "seed {}".format) -> None:
    """Run the command line ``--first N --count N``: check the programs of these seeds, and print which are wrong.

    Args:
        check: checks the program of a seed, and raises an error if it is wrong.
        what: the programs' name in the plural.
        name: how a line begins about the program of a seed.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    wrong = 0
    for seed in range(args.first, args.first + args.count):
        try:
            check(seed)
        except Exception as error:
            wrong += 1
            print(f"{name(seed)}: {type(error).__name__}: {str(error)[:1500]}", flush=True)
    print(f"{args.count} {what}, {wrong} wrong")
