"""Text that every machine has: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

MAX_BYTES = 2_000_000


def load_bytes() -> np.ndarray:
    """The modules of the standard library's top folder, in alphabetical order, up to ``MAX_BYTES``."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= MAX_BYTES:
            break
    return np.frombuffer(bytes(text[:MAX_BYTES]), dtype=np.uint8)


def batches(text: np.ndarray, batch: int, seqlen: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Random windows ``int32[batch, seqlen + 1]``: tokens and, one further, what follows them."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - seqlen - 1, size=batch)
        yield np.stack([text[s : s + seqlen + 1] for s in starts]).astype(np.int32)
