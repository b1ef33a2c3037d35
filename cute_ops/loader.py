"""Shared object -> callable, without importing the compiler."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from cute_ops import toolchain
from cute_ops.errors import CacheError

_lock = threading.Lock()


def load(path: Path, symbol: str) -> Callable[..., Any]:
    """The compiled function: it takes the present tensors, in order, and runs on TVM-FFI's current stream.

    Raises:
        CacheError: the object does not load.
    """
    with _lock:
        import tvm_ffi  # lazily: it imports torch where torch is installed

        _load_runtime()
        try:
            return tvm_ffi.load_module(str(path))[symbol]
        except (RuntimeError, AttributeError) as error:
            raise CacheError(f"cute_ops: {path} does not load: {error}") from error


@cache
def _load_runtime() -> None:
    """Load the DSL's runtime by its path, so that objects find it by name wherever they lie."""
    library = toolchain.runtime_library()
    if library is None:
        raise CacheError(f"cute_ops: {toolchain.DSL} is not installed; its runtime library runs every kernel")
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
