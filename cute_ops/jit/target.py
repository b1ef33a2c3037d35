"""The GPU architecture that kernels are built for, as the driver tells it, without a framework."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

from cute_ops import env
from cute_ops.hardware import ARCHES, GPUS, arch_of, sm

_MULTIPROCESSOR_COUNT, _CAPABILITY_MAJOR, _CAPABILITY_MINOR = 16, 75, 76  # CUdevice_attribute
_CAPTURE_MODE_RELAXED = 2  # CUstreamCaptureMode


class Target(NamedTuple):
    """An SM architecture and the device's number of SMs, which sets the grid of persistent kernels."""

    arch: str
    sm_count: int

    def __str__(self) -> str:
        return f"{self.arch}:{self.sm_count}"


def parse(arch: str) -> Target:
    """The target of an architecture's name: ``sm_90a`` with the SMs of its usual GPU, ``sm_90a:114`` with 114 SMs.

    Raises:
        ValueError: there is no such architecture, or the text after the colon is not a number of SMs.
    """
    name, colon, count = arch.partition(":")
    if name not in ARCHES:
        number = "".join(filter(str.isdecimal, name))
        close = [known for known, gpus in GPUS.items() if name.upper() in gpus.split(", ")]
        close += [known for known in ARCHES if str(sm(known)) == number]
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"unknown architecture {name!r}{meant}; known: {', '.join(ARCHES)}")
    if colon and not (count.isdecimal() and int(count)):
        raise ValueError(f"{count!r} in {arch!r} is not a number of SMs")
    return Target(name, int(count) if colon else ARCHES[name].number)


def of_environment(chosen: str | None) -> Target | None:
    """The target that ``CUTE_OPS_ARCH`` names, if it is set.

    Raises:
        ValueError: it names none.
    """
    try:
        return parse(chosen) if chosen else None
    except ValueError as error:
        raise ValueError(f"the environment variable {env.ARCH.name} names no target: {error}") from None


@cache
def of_device(index: int = 0) -> Target:
    """The target of a visible CUDA device.

    Raises:
        RuntimeError: there is no driver or no such device.
        NotImplementedError: no kernel is built for the device.
    """
    cuda = _driver()
    device = ctypes.c_int()
    _check(cuda, cuda.cuDeviceGet(ctypes.byref(device), index), f"no CUDA device {index}")

    def attribute(code: int) -> int:
        value = ctypes.c_int()
        _check(cuda, cuda.cuDeviceGetAttribute(ctypes.byref(value), code, device), "cannot read device attributes")
        return value.value

    major, minor = attribute(_CAPABILITY_MAJOR), attribute(_CAPABILITY_MINOR)
    arch = arch_of(major, minor)
    if arch is None:
        known = ", ".join(f"{sm(name) // 10}.{sm(name) % 10}" for name in ARCHES)
        raise NotImplementedError(
            f"cute_ops: device {index} has compute capability {major}.{minor}; kernels exist for {known}"
        )
    return Target(arch, attribute(_MULTIPROCESSOR_COUNT))


@cache
def device_count() -> int:
    """Visible CUDA devices; 0 without a driver."""
    try:
        cuda = _driver()
    except RuntimeError:
        return 0
    count = ctypes.c_int()
    return count.value if cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def device_names() -> list[str]:
    """The visible CUDA devices by the names that ``CUDA_VISIBLE_DEVICES`` of a subprocess takes."""
    count = device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(map(str, range(count))) if named is None else named.split(",")[:count]


def driver_version() -> tuple[int, int] | None:
    """The newest CUDA version that the driver supports, or None without a driver."""
    try:
        cuda = _driver()
    except RuntimeError:
        return None
    version = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread load kernels while it or another captures a CUDA graph.

    Loading a kernel may allocate device memory. A capture in the default mode forbids that in every thread and becomes
    invalid, although the allocation would not be recorded.
    """
    try:
        cuda = _driver()
    except RuntimeError:
        yield
        return
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # ``mode`` now holds the previous mode
    try:
        yield
    finally:
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@cache
def _driver() -> ctypes.CDLL:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError("cute_ops: no CUDA driver (libcuda.so.1) on this machine") from error
    _check(cuda, cuda.cuInit(0), "the CUDA driver cannot start")
    return cuda


def _check(cuda: ctypes.CDLL, code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"cute_ops: {what}: {(text.value or b'unknown error').decode()} (CUDA error {code})")
