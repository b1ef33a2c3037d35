"""Instructions of several kernels of SM 9.0 at once: to start the disassembler takes longer than to compile one."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from cute_ops.tools import sass


def disassembled(cubins: Sequence[bytes]) -> list[str]:
    """The instructions of each, by the disassembler run once on all of their code as one piece."""
    pieces = [_code(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile() as whole:
        whole.write(b"".join(pieces))
        whole.flush()
        command = [sass.tool("nvdisasm"), "--binary", "SM90a", "--no-dataflow", whole.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    starts = list(accumulate(map(len, pieces), initial=0))
    texts: list[list[str]] = [[] for _ in pieces]
    for line in printed.splitlines():
        if address := re.match(r" *\/\*([0-9a-f]{4,})\*/", line):
            texts[bisect_right(starts, int(address[1], 16)) - 1].append(line)
    for piece, text in zip(pieces, texts, strict=True):
        assert len(text) == len(piece) // 16, "an instruction is 16 bytes"
    return ["\n".join(text) for text in texts]


def _code(cubin: bytes) -> bytes:
    """The code sections of an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    found = b""
    for name, _, _, _, offset, length in sections:
        if cubin.startswith(b".text.", sections[names][4] + name):
            found += cubin[offset : offset + length]
    return found
