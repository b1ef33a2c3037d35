"""First calls of several threads at once: they get one op."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.contract.adapters import Adapter

X, Q = np.ones((2, 8), np.float32), np.ones((1, 4, 1, 16), np.float32)


@pytest.fixture(autouse=True)
def many_switches() -> Iterator[None]:
    """Threads take turns after every few instructions."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def errors_of_threads(call: Callable[[], Any], count: int = 8) -> list[Exception]:
    barrier, errors = threading.Barrier(count), list[Exception]()

    def run() -> None:
        barrier.wait()
        try:
            call()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def calls(ours: Any, factor: float) -> dict[str, Callable[[Any, Any], Any]]:
    """Calls of a matrix and of queries, whose ops no call has made yet."""

    def times(xp: Any, x: Any) -> Any:
        return x * factor

    def mod(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
        return score * factor

    fused = ours.fused(times)
    return {
        "linear": lambda x, q: ours.linear(x, x, epilogue=times),
        "rmsnorm_linear": lambda x, q: ours.rmsnorm_linear(x, None, x, epilogue=times),
        "attention": lambda x, q: ours.attention(q, q, q, score_mod=mod),
        "fused": lambda x, q: fused(x),
    }


@pytest.mark.parametrize("what", ["linear", "rmsnorm_linear", "attention", "fused"])
def test_a_first_call_by_several_threads(adapter: Adapter, what: str) -> None:
    """In JAX a call takes a compilation; its op is made when it is traced."""
    given = adapter.arrays([X, Q])
    for i in range(6):
        call = calls(adapter.ours, 1.625 + i)[what]
        run = call if adapter.name == "torch" else partial(adapter.abstract, call)
        assert not errors_of_threads(partial(run, *given))
