"""Kernel launches of compiled host code, which runs as it is, beside a CUDA runtime that notes the launches."""

from __future__ import annotations

import ctypes
import math
import re
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cute_ops.jit import loader
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.compiler import linker
from cute_ops.jit.variant import TensorKey, Variant

# Of an H200: shared memory that a CTA may ask for, and multiprocessors. A kernel is its name.
RUNTIME = """
#include <string.h>
typedef int (*Launch)(const void *config, const char *kernel, void **arguments);
Launch launch;
int _cudaLaunchKernelEx(const void *config, const char *kernel, void **arguments) {
  return launch(config, kernel, arguments);
}
int _cudaLibraryGetKernel(char **kernel, void *library, const char *name) { return !(*kernel = strdup(name)); }
int _cudaLibraryLoadData(char **library) { *library = "loaded"; return 0; }
int _cudaDeviceGetAttribute(int *value, int name, int device) { *value = name == 16 ? 132 : 232448; return 0; }
int _cuKernelGetAttribute(int *value) { *value = 0; return 0; }
int _cudaFuncSetAttribute(void) { return 0; }
int _cudaKernelSetAttributeForDevice(void) { return 0; }
int _cudaGetDevice(int *device) { return *device = 0; }
int _cudaSetDevice(int device) { return 0; }
void CuteDSLRT_TVMFFISetRaisedCudaError(void) {}
void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(void) {}
int cuda_dialect_init_library_once(void **library, int (*init)(void **), int (*load)(void **, int)) {
  return *library ? 0 : init(library) || load(library, 0);
}
int cuda_dialect_unload_library_once(void) { return 0; }
"""
# What a launch may ask for.
MOST_THREADS, SHARED, MOST_CTAS, MOST_GRID = 1024, 232448, 16, ((1 << 31) - 1, 65535, 65535)
# Attributes of a launch: the shape of clusters, and whether the kernel may start before the previous one ends.
CLUSTER, EARLY = 4, 6
Launching = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))


class Launch(NamedTuple):
    """A kernel's name, grid, CTA and cluster in threads, bytes of shared memory, whether it may start before the
    previous one has ended, and parameters.
    """

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    shared: int
    early: bool
    arguments: Sequence[bytes]

    def check(self) -> None:
        """Raise ValueError where a card does not launch it."""
        fits = math.prod(self.block) <= MOST_THREADS and self.shared <= SHARED and math.prod(self.cluster) <= MOST_CTAS
        grid = all(0 < size <= most for size, most in zip(self.grid, MOST_GRID, strict=True))
        if not fits or not grid or any(size % part for size, part in zip(self.grid, self.cluster, strict=True)):
            raise ValueError(f"an invalid launch: {self._replace(arguments=())}")


class HostCode:
    """A compiled variant: its kernels as PTX, each with the head of the file, and its entry point.

    Args:
        folder: an empty one, where the compiler writes.
    """

    def __init__(self, variant: Variant, folder: Path) -> None:
        self.variant = variant
        worker.compile(variant, folder / "kernel.o", folder)
        (ptx,) = folder.glob("*.ptx")
        head, *entries = re.split(r"(?=\.visible \.entry)", ptx.read_text())
        named = {re.search(r"\.entry\s+([\w$]+)", entry)[1]: head + entry for entry in entries}  # type: ignore[index]
        self.ptx: dict[str, str] = named
        (folder / "runtime.c").write_text(RUNTIME)
        own = [str(folder / name) for name in ("host.so", "kernel.o", "runtime.c")]
        # Its own runtime comes first, whatever else the process has loaded.
        command = [*(linker() or ())[:1], "-shared", "-fPIC", "-w", "-Wl,-Bsymbolic", "-o", *own]
        subprocess.run(command, check=True)
        self._function: Callable[..., Any] = loader.tvm_ffi().load_module(own[0])[variant.symbol]
        self._launch = ctypes.c_void_p.in_dll(ctypes.CDLL(own[0]), "launch")

    def launches(self, tensors: Sequence[tuple[int, Sequence[int], Sequence[int]] | int]) -> list[Launch]:
        """The launches of a call, whose present tensors are given as address, shape and strides, or numbers."""
        found: list[Launch] = []

        def launch(config: int, name: bytes, arguments: Any) -> int:
            *dims, shared, _, attributes, count = struct.unpack("<6IQQQI", ctypes.string_at(config, 52))
            each = [ctypes.string_at(attributes + 72 * i, 24) for i in range(count)]
            known = {struct.unpack_from("<I", one)[0]: struct.unpack_from("<3I", one, 8) for one in each}
            sizes = parameter_sizes(self.ptx[name.decode()])
            given = [ctypes.string_at(arguments[i], size) for i, size in enumerate(sizes)]
            cluster, early = known.get(CLUSTER, (1, 1, 1)), bool(known.get(EARLY, (0,))[0])
            found.append(Launch(name.decode(), tuple(dims[:3]), tuple(dims[3:]), cluster, shared, early, given))
            return 0

        callback = Launching(launch)
        self._launch.value = ctypes.cast(callback, ctypes.c_void_p).value
        keys = [key for key in self.variant.args if key]
        # These live until the call has ended.
        given = [each if isinstance(each, int) else _Array(k, *each) for k, each in zip(keys, tensors, strict=True)]
        self._function(*(each if isinstance(each, int) else loader.tvm_ffi().from_dlpack(each) for each in given))
        for each in found:
            each.check()
        return found


class _Array(loader._NullArray):
    """An array at an address that nobody reads."""

    def __init__(self, key: TensorKey, address: int, shape: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__(key, 0)
        self._shape[:], self._strides[:] = ([values[i] for i in key.passed] for values in (shape, strides))
        self._managed.data = address


def parameter_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter of the one entry."""
    signature = ptx.split(".entry", 1)[1].split("{", 1)[0]
    found = re.findall(r"\.param (?:\.align \d+ )?\.(\w)(\d+) [\w$]+(?:\[(\d+)\])?", signature)
    return [int(bits) // 8 * math.prod([int(count or 1)]) for _, bits, count in found]
