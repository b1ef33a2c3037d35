"""The machine code inside a compiled kernel: resources and disassembly, without a GPU.

A kernel's object carries its cubins as they are, so nothing has to be dumped while it is compiled.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MAGIC, _CUDA = b"\x7fELF\x02\x01", 190  # a 64-bit little-endian ELF file; its machine type
_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


class Resources(NamedTuple):
    """What one kernel of a cubin takes: registers a thread; bytes of stack, static shared and local memory."""

    kernel: str
    registers: int
    stack: int
    shared: int
    local: int


class Access(NamedTuple):
    """Instructions of one kind that move ``bytes`` at a time to or from global memory."""

    kind: str
    bytes: int
    number: int


def accesses(code: str) -> list[Access]:
    """Loads and stores of global memory in SASS, by kind and width, the widest first."""
    counts: dict[tuple[str, int], int] = {}
    for kind, suffixes in re.findall(r"\b(LDGSTS|LDG|STG|UBLKCP|RED|ATOMG)((?:\.\w+)*)", code):
        width = re.search(r"\.(?:U|S)?(8|16|64|128|256)\b", suffixes)
        key = kind, int(width[1]) // 8 if width else 0 if kind == "UBLKCP" else 4
        counts[key] = counts.get(key, 0) + 1
    return sorted((Access(*key, number) for key, number in counts.items()), key=lambda a: (a.kind, -a.bytes))


def threads_of(ptx: str) -> dict[str, int]:
    """Threads of a CTA by kernel, as PTX demands them."""
    found = re.findall(r"\.entry (\w+)\(.*?\.reqntid (\d+)(?:, (\d+))?(?:, (\d+))?", ptx, re.DOTALL)
    return {name: int(x) * int(y or 1) * int(z or 1) for name, x, y, z in found}


def cubins(data: bytes) -> Iterator[bytes]:
    """Every cubin inside an object, or the bytes themselves where they are one."""
    start = data.find(_MAGIC)
    while start >= 0:
        (machine,) = struct.unpack_from("<H", data, start + 18)
        if machine == _CUDA:
            # The section headers come last: their place and size give the file's.
            (sections,) = struct.unpack_from("<Q", data, start + 40)
            size, count = struct.unpack_from("<HH", data, start + 58)
            (programs,) = struct.unpack_from("<Q", data, start + 32)
            program_size, program_count = struct.unpack_from("<HH", data, start + 54)
            end = max(sections + size * count, programs + program_size * program_count)
            yield data[start : start + end]
        start = data.find(_MAGIC, start + 1)


def resources(path: Path) -> list[Resources]:
    """Of every kernel in an object or a cubin.

    Raises:
        FileNotFoundError: no cuobjdump.
    """
    found = _USAGE.findall(_disassemble(path, "-res-usage"))
    return [Resources(name, *map(int, numbers)) for name, *numbers in found]


def sass(path: Path) -> str:
    """The instructions of an object or a cubin.

    Raises:
        FileNotFoundError: no cuobjdump, or no nvdisasm beside it.
    """
    return _disassemble(path, "-sass")


def tool(name: str) -> str:
    """A program of the CUDA toolkit, or of its packages.

    Raises:
        FileNotFoundError: neither is there.
    """
    beside = [str(p) for folder in sys.path for p in Path(folder or ".").glob("nvidia/cu*/bin")]
    found = shutil.which(name) or shutil.which(name, path=":".join(beside))
    if found is None:
        raise FileNotFoundError(f"{name} is not here: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    return found


def _disassemble(path: Path, option: str) -> str:
    text = []
    with tempfile.TemporaryDirectory() as folder:
        for cubin in cubins(path.read_bytes()):
            file = Path(folder, "kernel.cubin")
            file.write_bytes(cubin)
            command = [tool("cuobjdump"), option, str(file)]
            text.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return "\n".join(text)
