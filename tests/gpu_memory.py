"""Several processes of tests share a GPU: its largest tests take turns, and each gives back what it took."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cute_ops.files.file_lock import acquire

# A test with the mark `large` takes less than this, and a GPU runs as many at a time as it holds: two on an H200.
LARGE = 1 << 36
# PyTorch keeps freed memory for its own process. More than this goes back to the GPU: the next test allocates anew.
KEPT = 1 << 30


@contextmanager
def turn(folder: Path, slots: int) -> Iterator[int]:
    """Wait for one of so many slots, which all processes that name the folder share, and hold it.

    Yields:
        the slot's number.
    """
    handles = [
        os.open(folder / f"slot-{slot}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for slot in range(slots)
    ]
    try:
        while (held := next((slot for slot, handle in enumerate(handles) if acquire(handle)), None)) is None:
            time.sleep(0.05)
        yield held
    finally:
        for handle in handles:
            os.close(handle)


@contextmanager
def large_turn() -> Iterator[None]:
    """A turn among the tests with the mark ``large`` of this user on these GPUs."""
    import torch  # tests of JAX alone do without

    name = f"cute_ops_tests_gpu-{os.getuid()}-{os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
    folder = Path(tempfile.gettempdir(), name)
    folder.mkdir(mode=0o700, exist_ok=True)
    with turn(folder, max(1, torch.cuda.mem_get_info()[1] // LARGE)):
        yield


def give_back() -> None:
    """Free what PyTorch's allocator holds and no tensor uses, where it is much."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT:
        torch.cuda.empty_cache()
