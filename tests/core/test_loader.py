"""Loading: no compiler, and modules onto a device ahead of the first call."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cute_ops import Array, CacheError
from cute_ops.declaration.binding import bind
from cute_ops.jit import cache, loader, target
from cute_ops.jit.layout import Memory
from cute_ops.jit.plan import plan
from cute_ops.jit.variant import Variant
from tests.ops import narrow

Make = Callable[..., Variant]


@pytest.mark.slow
@pytest.mark.parametrize("memory", [{}, {"x": Memory((104, 1))}], ids=["compact", "strided"])
def test_preload_reaches_the_driver_and_launches_nothing(
    cache_folder: Path, variant: Make, memory: dict[str, Memory]
) -> None:
    """Without a GPU the call passes TVM-FFI's argument checks and stops at the missing driver."""
    wanted = variant(n=97, memory=memory)
    function = cache.get(wanted)
    if target.device_count():
        loader.preload(function, wanted, 0)
    else:
        with pytest.raises(RuntimeError, match="Cuda Runtime Error"):
            loader.preload(function, wanted, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e8m0fnu", "uint32"])
def test_kernels_of_any_dtype_are_compiled_and_take_it(cache_folder: Path, variant: Make, dtype: str) -> None:
    op = getattr(narrow, f"copy_{dtype}")
    wanted = plan(bind(op, {"x": Array((4, 64), dtype)}), {}, target.parse("sm_90a")).variant
    function = cache.get(wanted)
    if target.device_count():
        loader.preload(function, wanted, 0)
    else:
        with pytest.raises(RuntimeError, match="Cuda Runtime Error"):
            loader.preload(function, wanted, 0)
    with pytest.raises(ValueError, match=f"expected dtype={dtype}"):
        loader.preload(function, variant(), 0)


@pytest.mark.slow
def test_preload_checks_arguments(cache_folder: Path, variant: Make) -> None:
    """The test above means something only if wrong arguments are refused before."""
    function = cache.get(variant())
    with pytest.raises(ValueError, match="shape"):
        loader.preload(function, variant(n=128), 0)


@pytest.mark.slow
def test_tvm_ffi_comes_without_torch_and_understands_a_later_one(cache_folder: Path, variant: Make) -> None:
    cache.build(variant())
    (path,) = cache_folder.glob("*.so")
    code = f"""
import sys
from pathlib import Path
from cute_ops.jit import loader
function = loader.load(Path({str(path)!r}), {path.stem!r})
print("torch" in sys.modules)
import torch
x = torch.zeros(4, 64, dtype=torch.bfloat16)
try:
    function(x, x)
except ValueError as error:
    print("expected device_type=cuda" in str(error))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["False", "True"], result.stderr


@pytest.mark.slow
@pytest.mark.fault("a kernel's object does not load", "an error", "nothing")
def test_an_object_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.so"
    path.write_bytes(b"not an object")
    with pytest.raises(CacheError, match="does not load"):
        loader.load(path, "a")


def test_a_warm_start_needs_no_compiler(cache_folder: Path, variant: Make) -> None:
    cache.build(variant())
    (path,) = cache_folder.glob("*.so")
    code = f"""
import sys
sys.modules["cutlass"] = sys.modules["torch"] = sys.modules["jax"] = None
from pathlib import Path
from cute_ops.jit import loader
print(loader.load(Path({str(path)!r}), {path.stem!r}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ffi.Function" in result.stdout, result.stderr
