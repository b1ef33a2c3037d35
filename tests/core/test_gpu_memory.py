"""Tests that share a GPU: turns of large ones, and what is given back."""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu_memory import KEPT, give_back, turn

WAIT = 20.0  # seconds, on a busy machine


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_more_hold_a_turn_than_there_are_slots(slots: int, tmp_path: Path) -> None:
    """All slots are held at a time, none twice, and whoever waits gets one that becomes free."""
    held: set[int] = set()
    leave = [threading.Event() for _ in range(slots + 2)]
    entered: dict[int, int] = {}
    changed = threading.Condition()

    def one(number: int) -> None:
        with turn(tmp_path, slots) as slot:
            with changed:
                assert slot not in held
                held.add(slot)
                entered[number] = slot
                changed.notify()
            assert leave[number].wait(WAIT)
            with changed:
                held.remove(slot)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(leave))]
    for thread in threads:
        thread.start()
    left: list[int] = []
    rng = random.Random(slots)
    while len(left) < len(threads):
        with changed:
            expected = min(len(left) + slots, len(threads))
            assert changed.wait_for(lambda: len(entered) >= expected, WAIT)  # noqa: B023
            assert len(entered) == expected  # the others wait
            left.append(rng.choice(sorted(entered.keys() - set(left))))
        leave[left[-1]].set()
        threads[left[-1]].join(WAIT)
    assert not held
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    ("initialized", "reserved", "times"), [(False, 2 * KEPT, 0), (True, KEPT, 0), (True, KEPT + 1, 1)]
)
def test_much_is_given_back(initialized: bool, reserved: int, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[None] = []
    cuda = SimpleNamespace(
        is_initialized=lambda: initialized,
        memory_reserved=lambda: reserved,
        empty_cache=lambda: emptied.append(None),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    give_back()
    assert len(emptied) == times
