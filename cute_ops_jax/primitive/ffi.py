"""FFI targets: the architecture to lower for, and the registration of kernels with XLA by name.

A target's name holds the variant's digest, so it means one kernel for ever, also in XLA's persistent cache. XLA keeps
every target until the process ends, and jax-tvm-ffi has room for 1024.

JAX lowers one op after the other, and each waits for its kernel. So the first kernel of a program that has to be
compiled starts the compiles of all others that the program was traced with, each in a worker of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np

from cute_ops import env
from cute_ops.files import file_lock
from cute_ops.jit import cache, loader, target
from cute_ops.jit.variant import Variant
from cute_ops_jax.primitive import ffi_check

log = logging.getLogger("cute_ops")
WARN_AT, LIMIT = 900, 1024

_known: dict[str, Variant] = {}
_lock = file_lock.between_threads()
_lowering_for: ContextVar[target.Target | None] = ContextVar("lowering_for", default=None)
_noted: ContextVar[tuple[dict[str, None], ...]] = ContextVar("noted", default=())
_collected: ContextVar[dict[str, Variant] | None] = ContextVar("collected", default=None)


class _Traced(threading.local):
    """The calls that this thread has traced since it last lowered a program, and most likely lowers next.

    Attributes:
        lowerings: what asks for the kernels of each.
        lowers: whether the thread lowers since: what it traces next belongs to another program.
    """

    def __init__(self) -> None:
        self.lowerings: dict[Hashable, Callable[[], object]] = {}
        self.lowers = False


traced = _Traced()


def device_target() -> target.Target:
    """The architecture to lower for: that of :func:`lowering_for`, else of ``CUTE_OPS_ARCH`` (to lower on a machine
    without that GPU), else of device 0.
    """
    return target_and_device()[0]


def target_and_device() -> tuple[target.Target, int | None]:
    """The architecture to lower for, and the device that the program will run on, where a kernel may be measured; None
    if it runs elsewhere.
    """
    named = _lowering_for.get() or target.of_environment(env.ARCH.read())
    return (target.of_device(0), 0) if named is None else (named, None)


@contextmanager
def lowering_for(chosen: target.Target | None) -> Iterator[None]:
    """Lower for this architecture, whichever GPU is here; None changes nothing."""
    token = _lowering_for.set(chosen)
    try:
        yield
    finally:
        _lowering_for.reset(token)


def asked_for_by(trace: Callable[[], object]) -> list[str]:
    """The names of the kernels that :func:`ensure` is asked for while ``trace()`` runs, in that order."""
    names: dict[str, None] = {}
    token = _noted.set((*_noted.get(), names))
    try:
        trace()
    finally:
        _noted.reset(token)
    return list(names)


def compile_ahead() -> None:
    """Start to compile the kernels of all calls that this thread has traced. Errors are raised where a kernel is asked
    for.
    """
    lowerings = list(traced.lowerings.values())
    traced.lowerings.clear()
    if not lowerings or env.TUNE.read() or env.RECORD.read() is not None or env.BUNDLE.read():
        return  # a call that is never lowered is not measured or recorded, and bundles hold all kernels
    wanted: dict[str, Variant] = {}
    token = _collected.set(wanted)
    try:
        for lower in lowerings:
            try:
                lower()
            except Exception as error:  # it is raised again where the call is lowered
                log.debug("a traced call cannot be lowered: %s", error)
    finally:
        _collected.reset(token)
    for variant in wanted.values():
        if variant.symbol not in _known:
            cache.start(variant)


def known() -> dict[str, Variant]:
    """The kernels that this process has registered, by target name."""
    return dict(_known)


def cuda_devices() -> list[int]:
    """The CUDA devices that JAX runs in this process; none on a machine that only lowers."""
    try:
        return [device.local_hardware_id for device in jax.local_devices(backend="cuda")]
    except RuntimeError:
        return []


def aliases(operands: Sequence[str], results: Sequence[str], donated: Mapping[str, str | None]) -> dict[int, int]:
    """The index of the result that takes an operand's memory, by the operand's index. XLA copies an operand that is
    read later.
    """
    return {operands.index(source): results.index(n) for n, source in donated.items() if source in operands}


def attributes(scalars: Iterable[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """The scalars of a call as attributes of its target.

    Numbers of 64 bits go by value, which is safe; by its public sources (0.1.1), jax-tvm-ffi frees texts before the
    kernel reads them. Of each number it keeps 16 bytes for every launch by the host, until the thread ends (measured
    with 0.1.3).
    """
    kinds = {float: np.float64, int: np.int64}
    return {name: kinds[type(values[name])](values[name]) for name in scalars}


def ensure(variant: Variant, load: Callable[[Variant], Callable[..., Any]] | None = None) -> None:
    """Compile and load a variant and register it under its symbol, once per process. By default ``load`` asks the
    caches, then the compiler.

    Raises:
        RuntimeError: jax-tvm-ffi is missing or does not fit, or its 1024 targets are used up.
        CompileError: the kernel does not compile.
    """
    for names in _noted.get():
        names[variant.symbol] = None
    if (wanted := _collected.get()) is not None:
        wanted[variant.symbol] = variant
        return
    if variant.symbol in _known:
        return
    devices = [device for device in cuda_devices() if target.of_device(device).arch == variant.arch]
    ffi_check.require()
    # Of a program with one call there is nothing to start ahead.
    if load is None and len(traced.lowerings) > 1 and not cache.holds(variant):
        compile_ahead()
    function = (load or cache.get)(variant)
    import jax_tvm_ffi  # here, after TVM-FFI, which the loader has imported without torch

    with _lock:
        if variant.symbol in _known:
            return
        # Load now: a first call can deadlock while several devices run, and must not fall into a graph's capture.
        for device in devices:
            loader.preload(function, variant, device)
        count = jax_tvm_ffi.registered_count()
        if count >= LIMIT:
            raise RuntimeError(
                f"cute.{variant.op}: this process has registered {count} FFI targets and jax-tvm-ffi holds no more. "
                "Each distinct last dim, dtype combination and attribute value takes one and none is ever freed: "
                "use fewer of them, or start a new process."
            )
        if count >= WARN_AT:
            log.warning("%d of %d FFI targets are used in this process; none is ever freed", count, LIMIT)
        numbers = [f"attrs.{key.name}" for key in variant.args if key and key.layout == "number"]
        jax_tvm_ffi.register_ffi_target(
            variant.symbol, function, arg_spec=["args", "rets", *numbers], platform="gpu", allow_cuda_graph=True
        )
        _known[variant.symbol] = variant
