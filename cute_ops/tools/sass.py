"""The machine code inside a compiled kernel: its resources and its disassembly, without a GPU.

A kernel's object file contains its cubins, so nothing has to be dumped while it is compiled.
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
    """Resources of a cubin's kernel: registers a thread; bytes of stack, static shared memory and local memory."""

    kernel: str
    registers: int
    stack: int
    shared: int
    local: int


class Access(NamedTuple):
    """``number`` instructions of one kind that each move ``bytes`` between a thread and global memory."""

    kind: str
    bytes: int
    number: int


def accesses(code: str) -> list[Access]:
    """Loads and stores of global memory in SASS, by kind and width, the widest first. A bulk copy has width 0."""
    counts: dict[tuple[str, int], int] = {}
    for kind, suffixes in re.findall(r"\b(LDGSTS|LDG|STG|UBLKCP|RED|ATOMG)((?:\.\w+)*)", code):
        width = re.search(r"\.(?:U|S)?(8|16|64|128|256)\b", suffixes)
        key = kind, int(width[1]) // 8 if width else 0 if kind == "UBLKCP" else 4
        counts[key] = counts.get(key, 0) + 1
    return sorted((Access(*key, number) for key, number in counts.items()), key=lambda a: (a.kind, -a.bytes))


def threads_of(ptx: str) -> dict[str, int]:
    """Threads of a CTA by kernel, from the ``.reqntid`` of PTX."""
    found = re.findall(r"\.entry (\w+)\(.*?\.reqntid (\d+)(?:, (\d+))?(?:, (\d+))?", ptx, re.DOTALL)
    return {name: int(x) * int(y or 1) * int(z or 1) for name, x, y, z in found}


def cubins(data: bytes) -> Iterator[bytes]:
    """Every cubin inside an object file; a cubin contains itself."""
    start = data.find(_MAGIC)
    while start >= 0:
        (machine,) = struct.unpack_from("<H", data, start + 18)
        if machine == _CUDA:
            # Section or program headers are the last thing in the file: where they end, it ends.
            (sections,) = struct.unpack_from("<Q", data, start + 40)
            size, count = struct.unpack_from("<HH", data, start + 58)
            (programs,) = struct.unpack_from("<Q", data, start + 32)
            program_size, program_count = struct.unpack_from("<HH", data, start + 54)
            end = max(sections + size * count, programs + program_size * program_count)
            yield data[start : start + end]
        start = data.find(_MAGIC, start + 1)


def resources(path: Path) -> list[Resources]:
    """The resources of every kernel in an object file or a cubin.

    Raises:
        FileNotFoundError: cuobjdump is not installed.
    """
    found = _USAGE.findall(_disassemble(path, "-res-usage"))
    return [Resources(name, *map(int, numbers)) for name, *numbers in found]


def sass(path: Path) -> str:
    """The disassembly of an object file or a cubin.

    Raises:
        FileNotFoundError: cuobjdump is not installed.
    """
    return _disassemble(path, "-sass")


def tool(name: str) -> str:
    """The path of a program of the CUDA toolkit, or of NVIDIA's Python packages.

    Raises:
        FileNotFoundError: neither has it.
    """
    beside = [str(p) for folder in sys.path for p in Path(folder or ".").glob("nvidia/cu*/bin")]
    found = shutil.which(name) or shutil.which(name, path=":".join(beside))
    if found is None:
        raise FileNotFoundError(f"{name} is not installed: pip install 'cute-ops[inspect]'")
    return found


def _disassemble(path: Path, option: str) -> str:
    text = []
    with tempfile.TemporaryDirectory() as folder:
        for cubin in cubins(path.read_bytes()):
            file = Path(folder, "kernel.cubin")
            file.write_bytes(cubin)
            command = [tool("cuobjdump"), option, str(file)]
            text.append(subprocess.run(command, capture_output=True, text=True, errors="replace", check=True).stdout)
    return "\n".join(text)
