"""The optional C++ extension: the host side of every op without Python (``extension.cpp``).

Built on request, ``python -m cute_ops_torch build-extension``, for exactly the torch, Python and TVM-FFI that are
installed, and kept in the cache folder, which is private. Importing ``cute_ops_torch`` loads it where it was built;
``CUTE_OPS_TORCH_EXTENSION=0`` turns it off. Nothing needs it: without it the same ops run through Python.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache as cache_forever
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cute_ops import __version__
from cute_ops.errors import CacheError, CompileError, message
from cute_ops.files import cache_dir, json_schema
from cute_ops.jit import toolchain
from cute_ops.op import Op, Tensor
from cute_ops_torch.library.autograd import no_gradients
from cute_ops_torch.library.tensors import arrays

log = logging.getLogger("cute_ops")
MODULE = "_cute_ops_torch"
SOURCE = Path(__file__).with_name("extension.cpp")
SWITCH = "CUTE_OPS_TORCH_EXTENSION"
_COMPILERS = ("c++", "g++", "clang++")
_KINDS = {float: "f", int: "i", bool: "b", str: "s"}


def state() -> str:
    """One line for people."""
    if not enabled():
        return f"C++ extension: turned off by {SWITCH}=0"
    if loaded() is not None:
        return f"C++ extension: {path()}"
    return "C++ extension: not built for this torch (optional: python -m cute_ops_torch build-extension)"


def enabled() -> bool:
    """False where the switch turns it off."""
    return os.environ.get(SWITCH, "1") != "0"


def path() -> Path:
    """Where the extension for this environment lies, or would."""
    what = (
        torch.__version__, torch.version.git_version, sysconfig.get_config_var("SOABI"), toolchain.versions()[1],
        __version__, hashlib.sha256(SOURCE.read_bytes()).hexdigest(),
    )  # fmt: skip
    return cache_dir.folder() / f"torch_extension_{hashlib.sha256(repr(what).encode()).hexdigest()[:24]}.so"


def build() -> Path:
    """Compile the extension into the cache folder, unless it is there.

    Raises:
        CompileError: no C++ compiler, or it fails.
        CacheError: the cache folder cannot be trusted or written.
    """
    target = path()
    if _verified(target):
        return target
    compiler = next(
        (found for name in (os.environ.get("CXX"), *_COMPILERS) if name and (found := shutil.which(name))), None
    )
    if compiler is None:
        raise CompileError(
            f"cute_ops_torch: no C++ compiler found ({', '.join(_COMPILERS)}); install one, e.g. the g++ package, or "
            "set CXX. Nothing needs the extension: without it ops run through Python."
        )
    tvm_ffi = importlib.util.find_spec("tvm_ffi")
    if tvm_ffi is None or tvm_ffi.origin is None:
        raise CompileError(f"cute_ops_torch: {toolchain.TVM_FFI} is not installed; pip install 'cute-ops'")
    here = Path(torch.__file__).parent
    include = (
        here / "include", here / "include/torch/csrc/api/include", Path(sysconfig.get_path("include")),
        Path(tvm_ffi.origin).parent / "include",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="cute_ops-") as staging:
        built = Path(staging, target.name)
        command = [
            compiler, "-O2", "-fPIC", "-shared", "-std=c++20", "-fvisibility=hidden", "-s",
            *(f"-isystem{folder}" for folder in include), str(SOURCE), "-o", str(built),
            f"-L{here / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10",  # loaded with torch: found by their names
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise CompileError(f"cute_ops_torch: the extension does not compile: {' '.join(command)}\n{result.stderr}")
        data = built.read_bytes()
    folder = target.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        cache_dir.check_trusted(folder)
        cache_dir.write_whole(target, data)
        record = {"sha256": hashlib.sha256(data).hexdigest()}
        cache_dir.write_whole(target.with_suffix(".json"), json.dumps(record).encode())
    except OSError as error:
        raise CacheError(f"cute_ops_torch: cannot keep the extension in {folder}: {error}") from error
    return target


def _verified(where: Path) -> bool:
    """Whether a built extension is there and may be loaded."""
    if not where.exists():
        return False
    with cache_dir.opened(where.parent) as folder:
        try:
            record = json_schema.parse(folder.read(where.with_suffix(".json").name), {"sha256": str})
            return hashlib.sha256(folder.read(where.name)).hexdigest() == record["sha256"]
        except (OSError, ValueError):
            return False


@cache_forever
def loaded() -> Any:
    """The extension module, None where it was not built for this environment or is turned off."""
    if not enabled():
        return None
    try:
        # Asked first: naming the extension takes reading package metadata.
        folder = cache_dir.folder()
        entries = os.scandir(folder) if folder.is_dir() else ()
        if not any(entry.name.startswith("torch_extension_") for entry in entries) or not _verified(where := path()):
            return None
        loader = importlib.machinery.ExtensionFileLoader(MODULE, str(where))
        module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(MODULE, where, loader=loader))  # type: ignore[arg-type]
        loader.exec_module(module)
    except (CacheError, ImportError, OSError) as error:
        log.warning("the torch extension cannot be used, ops run through Python: %s", error)
        return None
    return module


class Native(NamedTuple):
    """An op in C++.

    Attributes:
        handle: for the op whose gradient this is.
        call: ``call(*inputs, *attributes)``, the raw op, past the dispatcher where nothing listens to it.
        into: ``into(*inputs, *attributes, *outputs)``.
    """

    handle: Any
    call: Callable[..., Any]
    into: Callable[..., None]


def bind(
    op: Op, overload: Any, prepare: Callable[..., Mapping[str, Any]], grad: Native | None, device: str = "cuda"
) -> Native:
    """Register an op's C++ kernels: one for the device, one for autograd.

    Args:
        op: the declaration.
        overload: the defined op.
        prepare: ``prepare(*inputs, *attributes)``: the plan of a call, see :func:`cute_ops_torch.host.launch.describe`.
        grad: the backward op's.
        device: whose tensors kernels run on; tests run stand-ins on the CPU.
    """
    inputs, outputs = list(op.inputs), list(op.outputs)
    source = {t.dtype: i for i, t in reversed(list(enumerate(op.inputs.values())))}

    def refuse(*tensors: Any) -> None:
        problem = "forward-mode AD (jvp) is not supported; reverse mode is."
        raise NotImplementedError(message(op, problem, arrays(op, tensors)))

    def fail(given: Any, cotangents: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
        return no_gradients(op, given, cotangents, wanted)

    table: dict[str, Any] = {
        "name": f"{overload.namespace}::{op.name}", "inputs": len(inputs), "device": device,
        "kinds": "".join(_KINDS[type(value)] for value in op.attrs.values()),
        "outputs": [
            (
                inputs.index(t.given) if t.given else -1,
                outputs.index(t.same_as) if t.same_as else -1,
                source[t.dtype] if t.same_as else -1,
                source[op.outputs[t.same_as].dtype] if t.same_as else -1,
                int(t.hidden),
            )
            for t in op.outputs.values()
        ],
        "overload": overload, "prepare": prepare, "refuse": refuse, "fail": fail,
        "describe": lambda *tensors: arrays(op, tensors), "grad": None,
    }  # fmt: skip
    if op.grad is not None and grad is not None:
        cotangents = [f"d{name}" for name in outputs]
        table |= {
            "grad": grad.handle,
            "sources": [_source(name, t, (inputs, outputs, cotangents)) for name, t in op.grad.inputs.items()],
            "passed": [list(op.attrs).index(name) for name in op.grad.attrs],
            "results": [
                list(op.grad.outputs).index(f"d{name}") if f"d{name}" in op.grad.outputs else -1 for name in inputs
            ],
        }
    return Native(*loaded().define(table))


def _source(name: str, tensor: Tensor, places: Sequence[list[str]]) -> tuple[int, int, bool, bool]:
    """Where a backward op's input comes from: which kind, which of them; whether it may be absent and has rows."""
    kind = next(kind for kind, names in enumerate(places) if name in names)
    return kind, places[kind].index(name), tensor.optional, bool(tensor.dims)


@cache_forever
def runtime() -> tuple[int, int, int]:
    """Addresses of the functions of TVM-FFI that the extension calls."""
    from tvm_ffi import libinfo

    library = ctypes.CDLL(str(libinfo.find_libtvm_ffi()))
    names = ("TVMFFIEnvSetStream", "TVMFFIErrorMoveFromRaised", "TVMFFIObjectDecRef")
    return tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names)  # type: ignore[return-value]
