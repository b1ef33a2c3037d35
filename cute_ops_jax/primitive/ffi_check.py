"""Do jax, jaxlib and jax-tvm-ffi fit together?

A mismatch shows late and badly ("No FFI handler registered"), so versions are compared before the first kernel, and
``probe`` makes a real call: for ``doctor``, and where jax is newer than what this was tested with. CPUs need neither.
"""

from __future__ import annotations

from functools import cache
from itertools import takewhile

import jax
import jax.numpy as jnp

from cute_ops.jit import loader, toolchain

OLDEST_JAX = (0, 9, 1)
# From here on nobody has tried.
UNKNOWN_JAX = (0, 13)
OLDEST_BRIDGE = (0, 1, 3)
_BRIDGE = "jax-tvm-ffi"


def versions() -> list[str]:
    """What the installed versions say is wrong; imports nothing."""
    problems = []
    if jax.__version_info__ < OLDEST_JAX:
        problems.append(f"jax {jax.__version__} is too old for {_BRIDGE}: pip install 'jax>={_text(OLDEST_JAX)}'")
    bridge = toolchain.version(_BRIDGE)
    if bridge is None:
        problems.append(f"{_BRIDGE} is not installed: pip install 'cute-ops[jax]'")
    elif _numbers(bridge) < OLDEST_BRIDGE:
        problems.append(f"{_BRIDGE} {bridge} is too old: pip install '{_BRIDGE}>={_text(OLDEST_BRIDGE)}'")
    return problems


@cache
def require() -> None:
    """Raise unless the versions fit, by what is known of them or by a call.

    Raises:
        RuntimeError: says what to install.
    """
    problems = versions()
    if not problems and jax.__version_info__ >= UNKNOWN_JAX and _has_cpu():
        from concurrent.futures import ThreadPoolExecutor

        # In a thread of its own, since this one is tracing a program.
        with ThreadPoolExecutor(1) as pool:
            problems = pool.submit(probe).result()
    if problems:
        raise RuntimeError(f"cute_ops_jax: kernels cannot run: {'; '.join(problems)}")


def probe() -> list[str]:
    """What keeps kernels from running, one sentence each; empty when all is well.

    Compares versions, then calls a function through XLA's FFI on the CPU. Needs no GPU.
    """
    problems = versions()
    if problems:
        return problems
    try:
        called = _call()
    except Exception as error:  # whatever it is, the reader wants to know
        first = str(error).strip().partition("\n")[0]
        return [
            f"jaxlib {toolchain.version('jaxlib')} and {_BRIDGE} {toolchain.version(_BRIDGE)} do not fit together "
            f"({type(error).__name__}: {first}): pip install --upgrade jax {_BRIDGE}"
        ]
    return [] if called else ["XLA's FFI did not call a registered function"]


def _has_cpu() -> bool:
    """Not where ``JAX_PLATFORMS`` leaves it out."""
    try:
        return bool(jax.devices("cpu"))
    except RuntimeError:
        return False


def _call() -> bool:
    """Call a function through jax-tvm-ffi on the CPU: was it reached?"""
    tvm_ffi = loader.tvm_ffi()
    import jax_tvm_ffi

    reached = []
    function = tvm_ffi.convert(lambda x, out: reached.append(tuple(x.shape)))
    name = f"cute_ops_probe_{jax_tvm_ffi.registered_count()}"
    jax_tvm_ffi.register_ffi_target(name, function, arg_spec=["args", "rets"], platform="cpu")
    with jax.default_device(jax.devices("cpu")[0]):
        x = jnp.zeros((2, 3), jnp.float32)
        jax.jit(jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((2, 3), jnp.float32)))(x).block_until_ready()
    return reached == [(2, 3)]


def _numbers(version: str) -> tuple[int, ...]:
    """``0.1.3.post1`` -> (0, 1, 3)."""
    return tuple(int(part) for part in takewhile(str.isdigit, version.split(".")))


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
