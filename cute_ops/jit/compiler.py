"""Compiles a variant to a shared object. This is the only module that calls the CuTe DSL compiler.

It runs in a worker process (see :mod:`cute_ops.jit.compile_pool`), needs no GPU and sees no framework: tensors are
described by fakes. The exported object holds the kernel's machine code and a TVM-FFI entry point under the variant's
symbol, which takes exactly the tensors that are present.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cute_ops.errors import CompileError
from cute_ops.jit import toolchain
from cute_ops.jit.variant import TensorKey, Variant

# Concurrent compiles abort the process.
_lock = threading.Lock()
# The entry point needs the runtimes of the DSL and of TVM-FFI, which the loader loads first.
_LINKERS = (("cc", "-shared"), ("gcc", "-shared"), ("clang", "-shared"), ("ld", "-shared"), ("ld.lld", "-shared"))


def compile_variant(variant: Variant, path: Path, dump: Path | None = None) -> None:
    """Compile a variant and write it to ``path``: a shared object, a relocatable one for ``.o``, or for ``.cubin``
    the GPU's machine code alone, which takes a third less time.

    Args:
        dump: folder for PTX, cubin and the launches' dynamic shared memory.

    Raises:
        CompileError: the kernel does not compile, or there is no linker.
    """
    with _lock:
        # The DSL reads the variable once, at import; each compile names its own target.
        os.environ.setdefault("CUTE_DSL_ARCH", variant.arch)
        import cutlass.cute as cute

        # Python takes bytecode for that of any source of the same size and second. Kernels are named by their sources:
        # bytecode is never read here.
        sys.pycache_prefix, sys.dont_write_bytecode = os.devnull, True
        module, _, name = variant.kernel.partition(":")
        kernel = getattr(importlib.import_module(module), name)(variant)
        arguments = [_fake(key) for key in variant.args if key]
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        only_cubin = path.suffix == ".cubin"
        # The entry point does not belong to the machine code, but to dumps.
        entry_point = "" if only_cubin and not dump else "--enable-tvm-ffi "
        options = f"{entry_point}--gpu-arch {variant.arch} --opt-level 3"
        keep = dump or (Path(tempfile.mkdtemp(dir=path.parent)) if only_cubin else None)
        entry = _entry(kernel, variant)
        with ExitStack() as stack:
            if keep:
                keep.mkdir(parents=True, exist_ok=True)
                # The options' text takes neither spaces nor quotes, which the folder's name may have.
                handle = os.open(keep, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, handle)
                options += f" --keep-cubin --dump-dir /proc/self/fd/{handle}" + (" --keep-ptx" if dump else "")
            # Only the exported object runs. An engine that could run the kernel here would take a quarter of the time.
            compiled = cute.compile(entry, *arguments, stream, options=options, no_jit_engine=True)
        if dump:
            (dump / "shared.json").write_text(json.dumps(_dynamic_shared(str(compiled.ir_module))), encoding="utf-8")
        if only_cubin and keep:
            (cubin,) = keep.glob("*.cubin")
            cubin.replace(path)
            if not dump:
                keep.rmdir()
            return
        object_file = path.with_suffix(".o")
        compiled.export_to_c(str(object_file), function_name=variant.symbol)
    if path != object_file:
        _link(object_file, path)
        object_file.unlink()


# In the driver's launch configuration, dynamic shared memory is the field after the grid and the block.
_CONFIG_SHARED = re.compile(r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] .*array<3 x i32>, array<3 x i32>, i64, ptr")


def _dynamic_shared(module: str) -> list[int | None]:
    """Dynamic shared memory of each launch in lowered host code, in order; None if it is not constant."""
    found: list[int | None] = []
    for field in _CONFIG_SHARED.finditer(module):
        stored = re.compile(rf"llvm\.store (%\w+), {field[1]} :").search(module, field.end())
        # Names are local to functions: the last value of the name before the store counts.
        values = (
            re.findall(rf"{stored[1]} = llvm\.mlir\.constant\((\d+) : i64\)", module[: stored.start()])
            if stored
            else []
        )
        found.append(int(values[-1]) if values else None)
    return found


def _entry(kernel: Any, variant: Variant) -> Any:
    """The exported function: it takes the present arguments and calls the kernel with all, None for absent ones."""
    from cute_ops.kernels.lib.entry import Entry  # imports the DSL, as below

    taken = {name: k for k, name in enumerate(n for n, key in zip(variant.names, variant.args, strict=True) if key)}
    orders = {taken[n]: key.order for n, key in variant.tensors.items() if key and key.order}
    return Entry(kernel, tuple(taken.get(name) for name in dict.fromkeys(variant.names)), orders)


def _fake(key: TensorKey) -> Any:
    import cutlass.cute as cute  # after the environment is set, see compile_variant

    if key.layout == "number":
        return _dtype(key.dtype)(0)
    sizes = [key.shape[i] for i in key.passed]
    shape = tuple(cute.sym_int64() if size is None else size for size in sizes)
    dtype = _dtype(key.dtype)
    if key.layout == "flat":
        order = tuple(reversed(range(key.rank)))
        return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=key.align)
    if key.layout == "scattered":
        free = tuple(cute.sym_int64() for _ in shape)
        return cute.runtime.make_fake_tensor(dtype, shape, free, assumed_align=key.align)
    step = max(key.row_align // key.itemsize, 1)
    strides = tuple(cute.sym_int64(divisibility=step) for _ in shape[:-1])
    return cute.runtime.make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=key.align)


def _dtype(name: str) -> Any:
    import cutlass  # as above

    names = {
        "float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16", "int64": "Int64", "int32": "Int32",
        "uint32": "Uint32", "int8": "Int8", "uint8": "Uint8", "float8_e4m3fn": "Float8E4M3FN",
        "float8_e5m2": "Float8E5M2", "float8_e8m0fnu": "Float8E8M0FNU", "float64": "Float64", "bool": "Boolean",
    }  # fmt: skip
    return getattr(cutlass, names[name])


def linker() -> tuple[str, ...] | None:
    """The command that links a shared object, or None."""
    found = ((shutil.which(command), flag) for command, flag in _LINKERS)
    return next(((path, flag) for path, flag in found if path), None)


def _link(source: Path, path: Path) -> None:
    command = linker()
    if command is None:
        raise CompileError(
            "cute_ops: no linker found (cc, gcc, clang, ld or ld.lld); install one, e.g. the gcc package"
        )
    runtime = toolchain.runtime_library()
    if runtime is None:
        raise CompileError(f"cute_ops: {toolchain.DSL} is not installed; pip install 'cute-ops'")
    arguments = [*command, "-o", str(path), str(source), str(runtime)]
    result = subprocess.run(arguments, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode:
        raise CompileError(f"cute_ops: linking failed: {' '.join(arguments)}\n{result.stderr}")
