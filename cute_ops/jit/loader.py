"""Loads compiled kernels, without importing the compiler."""

from __future__ import annotations

import ctypes
import importlib
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from cute_ops.errors import CacheError
from cute_ops.files import file_lock, staging
from cute_ops.jit import target, toolchain
from cute_ops.jit.variant import TensorKey, Variant

log = logging.getLogger("cute_ops")
_lock = file_lock.between_threads()


def load(path: Path, symbol: str, through: str = "") -> Callable[..., Any]:
    """The compiled function, which takes the present tensors in order and runs on TVM-FFI's current stream.

    Args:
        through: a path to the same file through its open folder, in case the folder is replaced.

    Raises:
        CacheError: the object does not load.
    """
    with _lock:
        _load_runtime()
        try:
            with _encodable(through or str(path)) as readable, _executable(path, readable) as file:
                function: Callable[..., Any] = tvm_ffi().load_module(file)[symbol]
                return function
        except (RuntimeError, AttributeError, OSError) as error:
            raise CacheError(f"cute_ops: {path} does not load: {error}") from error


@contextmanager
def _encodable(path: str) -> Iterator[str]:
    """The path as UTF-8 holds it, which TVM-FFI asks for: through its open folder where it is other bytes."""
    try:
        path.encode()
    except UnicodeEncodeError:
        folder, name = os.path.split(path)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{handle}/{name}"
        finally:
            os.close(handle)
    else:
        yield path


@contextmanager
def _executable(path: Path, through: str) -> Iterator[str]:
    """A path that can be mapped as code: ``through`` itself, or a copy in memory if it is on a noexec file system."""
    if not os.statvfs(through).f_flag & os.ST_NOEXEC:
        yield through
        return
    _warn_of_noexec(path.parent)
    with os.fdopen(os.memfd_create(path.name), "wb") as memory, staging.folder() as place:
        memory.write(Path(through).read_bytes())
        memory.flush()
        # TVM-FFI tells the kind of a file by its suffix.
        link = place / path.name
        link.symlink_to(f"/proc/self/fd/{memory.fileno()}")
        yield str(link)


@cache
def _warn_of_noexec(folder: Path) -> None:
    log.warning(
        "%s is on a file system that is mounted noexec: kernels from there are copied into memory at every start; "
        "CUTE_OPS_CACHE_DIR sets another folder",
        folder,
    )


@cache
def tvm_ffi() -> ModuleType:
    """The module ``tvm_ffi``, imported late and alone.

    TVM-FFI imports torch if torch is installed, which costs a JAX program seconds for nothing. So if torch is not
    imported yet, it is hidden from this thread during the import; if torch is imported later, its tensors work too.
    """
    if "torch" in sys.modules:
        return importlib.import_module("tvm_ffi")
    hidden = _Hidden("torch", threading.get_ident())
    sys.meta_path.insert(0, hidden)
    try:
        return importlib.import_module("tvm_ffi")
    finally:
        sys.meta_path.remove(hidden)


class _Hidden(MetaPathFinder):
    """An import finder that hides one package from one thread."""

    def __init__(self, package: str, thread: int) -> None:
        self.package, self.thread = package, thread

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == self.package and threading.get_ident() == self.thread:
            raise ModuleNotFoundError(f"{name} is hidden while TVM-FFI is imported", name=name)


@cache
def _load_runtime() -> None:
    """Load the DSL's runtime library by its path, so that kernels can refer to it by its name."""
    library = toolchain.runtime_library()
    if library is None:
        raise CacheError(f"cute_ops: {toolchain.DSL} is not installed; its runtime library runs every kernel")
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def preload(function: Callable[..., Any], variant: Variant, device: int) -> None:
    """Load a kernel's module onto a CUDA device without launching it.

    Otherwise a module is loaded by its first call. That must not happen while XLA runs several devices, and if it
    allocates memory, it breaks the capture of a CUDA graph in this or another thread. The call made here passes arrays
    without memory, for which nothing is launched.
    """
    given = [0 if key.layout == "number" else _NullArray(key, device) for key in variant.args if key]
    with _lock, target.relaxed_capture():
        function(*(a if isinstance(a, int) else tvm_ffi().from_dlpack(a) for a in given))


class _Managed(ctypes.Structure):
    """DLManagedTensor of the DLPack specification."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    )  # fmt: skip


class _NullArray:
    """An array without memory on a CUDA device, handed over by DLPack."""

    _CUDA = 2
    _CODES: ClassVar = {
        "int": 0, "uint": 1, "float": 2, "bfloat": 4, "bool": 6, "float8_e4m3fn": 10, "float8_e5m2": 12,
        "float8_e8m0fnu": 14,
    }  # fmt: skip

    def __init__(self, key: TensorKey, device: int) -> None:
        kind = key.dtype if key.dtype in self._CODES else key.dtype.rstrip("0123456789")
        shape = [key.shape[i] or 0 for i in key.passed]
        # Strides with the alignment that the kernel was compiled for.
        step = max(key.row_align // key.itemsize, 1) if key.layout == "strided" else 1
        strides = [math.prod(-(-size // step) * step for size in shape[i + 1 :]) for i in range(len(shape))]
        self._shape, self._strides = ((ctypes.c_int64 * len(shape))(*values) for values in (shape, strides))
        self._managed = _Managed(
            device_type=self._CUDA, device_id=device, ndim=len(shape), code=self._CODES[kind],
            bits=8 * key.itemsize, lanes=1, shape=self._shape, strides=self._strides,
        )  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._CUDA, self._managed.device_id

    def __dlpack__(self, **_: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._managed), b"dltensor", None)
