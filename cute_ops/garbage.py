"""A pause of Python's garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections(stays: bool = False) -> Iterator[None]:
    """Collect no garbage within, where many objects are made that all stay: the collector would look at them, and at
    all that a framework holds, again and again. That was half of the import in JAX, and of the reading of graphs.

    Args:
        stays: they stay as long as the process, so that the first collection after it need not look at them either.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if stays and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # to the oldest ones
            gc.enable()
