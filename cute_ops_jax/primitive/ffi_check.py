"""Checks that jax, jaxlib and jax-tvm-ffi fit together.

A mismatch shows late and with a useless message ("No FFI handler registered"). So versions are compared before the
first kernel is loaded, and ``probe`` makes a real call: for ``doctor``, and where jax is newer than any tested version.
Programs for CPUs need neither.
"""

from __future__ import annotations

from functools import cache
from itertools import takewhile

import jax
import jax.numpy as jnp

from cute_ops.errors import first_line
from cute_ops.jit import loader, toolchain

OLDEST_JAX = (0, 9, 1)
# The first version that is not tested.
UNKNOWN_JAX = (0, 13)
OLDEST_BRIDGE = (0, 1, 3)
_BRIDGE = "jax-tvm-ffi"


def versions() -> list[str]:
    """The problems that the installed versions tell; imports nothing."""
    problems = []
    if jax.__version_info__ < OLDEST_JAX:
        problems.append(f"jax {jax.__version__} is too old for {_BRIDGE}: pip install 'jax>={_text(OLDEST_JAX)}'")
    bridge = toolchain.version(_BRIDGE)
    if bridge is None:
        problems.append(f"{_BRIDGE} is not installed: pip install 'cute-ops[jax]'")
    elif tuple(map(int, takewhile(str.isdigit, bridge.split(".")))) < OLDEST_BRIDGE:  # 0.1.3.post1 is (0, 1, 3)
        problems.append(f"{_BRIDGE} {bridge} is too old: pip install '{_BRIDGE}>={_text(OLDEST_BRIDGE)}'")
    return problems


@cache
def require() -> None:
    """Check that the versions fit: those that are known by number, newer ones by a call.

    Raises:
        RuntimeError: they do not fit. Says what to install.
    """
    problems = versions()
    if not problems and jax.__version_info__ >= UNKNOWN_JAX and _has_cpu():
        from concurrent.futures import ThreadPoolExecutor  # here, since hardly any process needs it

        # This thread is tracing a program, so the call needs another one.
        with ThreadPoolExecutor(1) as pool:
            problems = pool.submit(probe).result()
    if problems:
        raise RuntimeError(f"cute_ops_jax: kernels cannot run: {'; '.join(problems)}")


def probe() -> list[str]:
    """The reasons why kernels cannot run, one sentence each; empty if they can.

    Compares versions, then calls a function through XLA's FFI on the CPU. Needs no GPU.
    """
    problems = versions()
    if problems:
        return problems
    try:
        called = _call()
    except Exception as error:  # of any type: the message is what matters
        return [
            f"jaxlib {toolchain.version('jaxlib')} and {_BRIDGE} {toolchain.version(_BRIDGE)} do not fit together "
            f"({first_line(error)}): pip install --upgrade jax {_BRIDGE}"
        ]
    return [] if called else ["XLA's FFI did not call a registered function"]


def _has_cpu() -> bool:
    """Whether JAX has a CPU backend: ``JAX_PLATFORMS`` may leave it out."""
    try:
        return bool(jax.devices("cpu"))
    except RuntimeError:
        return False


def _call() -> bool:
    """Call a function through jax-tvm-ffi on the CPU; whether it was reached."""
    tvm_ffi = loader.tvm_ffi()
    import jax_tvm_ffi  # here, after TVM-FFI, which the loader has imported without torch

    reached = []
    function = tvm_ffi.convert(lambda x, out: reached.append(tuple(x.shape)))
    name = f"cute_ops_probe_{jax_tvm_ffi.registered_count()}"
    jax_tvm_ffi.register_ffi_target(name, function, arg_spec=["args", "rets"], platform="cpu")
    with jax.default_device(jax.devices("cpu")[0]):
        x = jnp.zeros((2, 3), jnp.float32)
        jax.jit(jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((2, 3), jnp.float32)))(x).block_until_ready()
    return reached == [(2, 3)]


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
