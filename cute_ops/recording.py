"""Recording: the calls that a program makes are appended to a manifest as they are planned."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from cute_ops.binding import Binding
from cute_ops.files import file_lock
from cute_ops.jit.layout import Memory
from cute_ops.jit.variant import Variant
from cute_ops.manifest import call_of

log = logging.getLogger("cute_ops")
LOCK_SECONDS = 1.0  # if a process holds the lock for longer, it is stopped, and the line is appended without the lock


class Recorder:
    """Appends every new kind of call to a manifest as soon as it is planned, so that a crash loses none.

    Several processes may share the file: each appends its line while it holds the file's lock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: set[str] = set()

    def __call__(self, binding: Binding, memory: Mapping[str, Memory], variant: Variant) -> None:
        if variant.symbol in self._seen:
            return
        self._seen.add(variant.symbol)
        dynamic = any(size is None for _, size in variant.static)
        call = call_of(binding, memory, dynamic)
        if call is None:
            log.warning("not recorded: no module holds the declaration of %s", binding.op.name)
            return
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                file_lock.acquire(handle, LOCK_SECONDS)
                # The last line may lack its line break, if it was edited by hand or a process was killed while writing.
                size = os.fstat(handle).st_size
                apart = "\n" if size and os.pread(handle, 1, size - 1) != b"\n" else ""
                os.write(handle, f"{apart}{call}\n".encode())
            finally:
                os.close(handle)
        except OSError as error:
            log.warning("cannot record into %s: %s", self._path, error)
