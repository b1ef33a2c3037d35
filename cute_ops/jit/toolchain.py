"""Versions of the packages that compile and run kernels, without importing them."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from cute_ops.jit import target

DSL = "nvidia-cutlass-dsl"
RUNTIMES = ("nvidia-cutlass-dsl-libs-cu13", "nvidia-cutlass-dsl-libs-cu12")
TVM_FFI = "apache-tvm-ffi"
DSL_TESTED = "4.8"


def version(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@cache
def versions() -> tuple[str, str]:
    """Versions of the DSL and of TVM-FFI, which every variant holds; empty if not installed.

    The DSL's runtime comes in packages of its own, of the same version, which suffice to run compiled kernels.
    """
    return next(filter(None, map(version, (DSL, *RUNTIMES))), ""), version(TVM_FFI) or ""


@cache
def runtime_library() -> Path | None:
    """``libcute_dsl_runtime.so``, which every kernel object links to, or None without the DSL.

    If the DSL has it for CUDA 12 and for CUDA 13, the driver's version decides.
    """
    driver = target.driver_version()
    flavours = ("cu12", "cu13", ".") if driver and driver < (13, 0) else ("cu13", "cu12", ".")
    spec = find_spec("nvidia_cutlass_dsl")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for flavour in flavours:
            library = Path(folder, flavour, "lib", "libcute_dsl_runtime.so")
            if library.exists():
                return library
    return None
