"""Drawn stacks of transformations around drawn functions of the adapter."""

from __future__ import annotations

import pytest

from tests.jax.drawn_walks import check


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_drawn_walks(seed: int) -> None:
    """``python -m tests.jax.drawn_walks --count 500`` runs more of them."""
    check(seed)
