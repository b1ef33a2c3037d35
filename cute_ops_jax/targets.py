"""FFI targets: which architecture, and kernels made known to XLA by name.

A target's name is the variant's digest, so a name means one kernel for ever, also in XLA's persistent
cache. XLA keeps every target until the process ends and jax-tvm-ffi has room for 1024.
"""

from __future__ import annotations

import logging
import os
import threading

import jax

from cute_ops import cache, loader, target
from cute_ops.variant import Variant
from cute_ops_jax import bridge

log = logging.getLogger("cute_ops")
WARN_AT, LIMIT = 900, 1024

_known: set[str] = set()
_lock = threading.Lock()


def device_target() -> target.Target:
    """The architecture to lower for: ``CUTE_OPS_ARCH`` (lowering on a machine without that GPU), or device 0's."""
    chosen = os.environ.get("CUTE_OPS_ARCH")
    return target.parse(chosen) if chosen else target.of_device(0)


def cuda_devices() -> list[int]:
    """The CUDA devices that JAX runs in this process; none on a machine that only lowers."""
    try:
        return [device.local_hardware_id for device in jax.local_devices(backend="cuda")]
    except RuntimeError:
        return []


def ensure(variant: Variant) -> None:
    """Compile and load a variant and register it under its symbol; once per process.

    Raises:
        RuntimeError: jax-tvm-ffi is missing or does not fit, or its 1024 targets are used up.
        CompileError: the kernel does not compile.
    """
    if variant.symbol in _known:
        return
    bridge.require()
    function = cache.get(variant)
    import jax_tvm_ffi  # after TVM-FFI, which the loader has imported without torch

    with _lock:
        if variant.symbol in _known:
            return
        # Now, since a first call while several devices run can wait for ever, and none may fall into a graph's capture.
        for device in cuda_devices():
            if target.of_device(device).arch == variant.arch:
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
        jax_tvm_ffi.register_ffi_target(
            variant.symbol, function, arg_spec=["args", "rets"], platform="gpu", allow_cuda_graph=True
        )
        _known.add(variant.symbol)
