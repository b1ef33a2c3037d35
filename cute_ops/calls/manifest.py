"""Manifests: the calls that a program makes, one per line, as text that people read and write.

    rmsnorm x:bfloat16[*,4096] weight:float32[4096] eps=1e-05
    silu_mul gate:bfloat16[8,2048,1024]/strides=4194304,2048,1/align=16 up:bfloat16[8,2048,1024]
    softcap:softcap x:float16[2,7] cap=30.0

A line is the op, its inputs with dtype and shape, and attributes that differ from their defaults. ``*`` is any number
of rows. A shape is followed by strides if the array is not compact, and by the bytes that divide its address if they
are not 16. ``dynamic`` at the end asks for the kernel in which dims that are static while few are dynamic. A line has
no config, since it is planned again for every target. ``#`` begins a comment.

An op's name that contains blanks or a ``#`` is written as a JSON string. Reading a line imports the module that it
names; a Python file is run only if the reader allows it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cute_ops.calls import lookup
from cute_ops.constants import exact
from cute_ops.declaration.binding import Binding, bind
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import ITEMSIZE, Array
from cute_ops.errors import meant
from cute_ops.files import cache_dir, file_lock, json_schema
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.jit.layout import Memory, compact

_LONGEST = 2000  # characters of an error's text, which may repeat wrong data
ROWS = 4096  # rows that ``*`` stands for
LOCK_SECONDS = 1.0  # if a process holds the lock for longer, it is stopped, and the line is appended without the lock
HEADER = "# Calls of cute_ops, for `python -m cute_ops build`. One per line: op, inputs, attributes.\n"
_INPUT = re.compile(r"(\w+):(\w+)\[([*\d,]*)\](?:/strides=([\d,]+))?(?:/align=(\d+))?")


@dataclass(frozen=True)
class Call:
    """One line: an op and the inputs of a call. ``memory`` has the inputs that are not compact and 16-byte aligned."""

    name: str
    inputs: Mapping[str, Array]
    memory: Mapping[str, Memory] = field(default_factory=dict)
    attrs: Mapping[str, Any] = field(default_factory=dict)
    dynamic: bool = False

    @property
    def op(self) -> Op:
        return lookup.find(self.name)

    def __str__(self) -> str:
        words = [_word(self.name)]
        for name, array in self.inputs.items():
            where = self.memory.get(name)
            word = f"{name}:{array.dtype}[{','.join(map(str, array.shape))}]"
            if where is not None and where.strides != compact(array.shape):
                word += f"/strides={','.join(map(str, where.strides))}"
            if where is not None and where.address % VECTOR_BYTES:
                word += f"/align={math.gcd(where.address, VECTOR_BYTES)}"
            words.append(word)
        words += [f"{name}={_quoted(value)}" for name, value in self.attrs.items()]
        return " ".join(words + ["dynamic"] * self.dynamic)


def call_of(binding: Binding, memory: Mapping[str, Memory], dynamic: bool = False) -> Call | None:
    """A call as it is written to a manifest; None if no module holds its op."""
    name = lookup.place(binding.op)
    if name is None:
        return None
    arrays = {n: Array(tuple(map(int, a.shape)), a.dtype) for n, a in binding.inputs.items() if a is not None}
    odd = {n: m for n, m in memory.items() if n in arrays}
    return Call(name, arrays, odd, _differing(binding.op, binding.attrs), dynamic)


def parse(text: str, source: str = "manifest", files: bool = False) -> list[Call]:
    """The calls of a manifest, without duplicates.

    Args:
        files: whether lines may name Python files, which are executed.

    Raises:
        ValueError: says which line is wrong, and how.
    """
    calls: dict[str, Call] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            call = _call(words, files)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{source}, line {number}: {str(error)[:_LONGEST]}") from error
        calls.setdefault(str(call), call)
    return list(calls.values())


def read(path: Path, files: bool = False) -> list[Call]:
    """The calls of a manifest file.

    Args:
        files: whether lines may name Python files, which are executed.

    Raises:
        ValueError: a line is wrong.
        OSError: the file cannot be read.
    """
    return parse(_text(path), str(path), files)


def write(path: Path, calls: Iterable[Call]) -> int:
    """Write a manifest, sorted and without duplicates; returns its number of calls."""
    return _write(path, map(str, calls))


def append(path: Path, call: Call) -> None:
    """Add a line to a manifest, which several processes may share: each writes while it holds the file's lock.

    Raises:
        OSError: the file cannot be written.
    """
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        file_lock.acquire(handle, LOCK_SECONDS)
        # The last line may lack its line break, if it was edited by hand or a process was killed while writing.
        size = os.fstat(handle).st_size
        apart = "\n" if size and os.pread(handle, 1, size - 1) != b"\n" else ""
        os.write(handle, f"{apart}{call}\n".encode())
    finally:
        os.close(handle)


def tidy(path: Path) -> int:
    """Sort a manifest's lines and drop duplicates and comments; returns their number. Nothing that they name is run.

    Raises:
        ValueError: it is not text.
        OSError: the file cannot be read or written.
    """
    return _write(path, (line.partition("#")[0].strip() for line in _text(path).splitlines()))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # Windows' editors write a mark in front
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error


def _write(path: Path, lines: Iterable[str]) -> int:
    lines = sorted({line for line in lines if line})
    text = HEADER + "".join(f"{line}\n" for line in lines)
    if path.exists() and not path.is_file():  # a terminal or a pipe
        path.write_text(text, encoding="utf-8")
    else:
        where = path.resolve()
        where.touch()  # with the permissions of new files
        cache_dir.write_whole(where.parent, {where.name: text.encode()}, where.stat().st_mode)
    return len(lines)


def _quoted(value: object) -> str:
    """JSON text without blanks and ``#``, so that it is one word and not a comment."""
    return json.dumps(value).replace(" ", "\\u0020").replace("#", "\\u0023")


def _word(name: str) -> str:
    return name if name.isprintable() and not set(name) & set(' #"') else _quoted(name)


def _call(words: list[str], files: bool) -> Call:
    word, *rest = words
    name = json_schema.parse(word, str) if word.startswith('"') else word
    module = name.rpartition(":")[0]
    if module.endswith(".py") and not files:
        raise ValueError(
            f"it names the Python file {module}, which would be executed: --allow-files (files=True) allows that, if "
            "you trust the manifest and the file"
        )
    op, dynamic = lookup.find(name), bool(rest) and rest[-1] == "dynamic"
    inputs: dict[str, Array] = {}
    memory: dict[str, Memory] = {}
    attrs: dict[str, Any] = {}
    for word in rest[: len(rest) - dynamic]:
        if match := _INPUT.fullmatch(word):
            key = match[1]
            inputs[key], layout = _input(match)
            memory |= {key: layout} if layout else {}
        elif "=" in word:
            key, _, value = word.partition("=")
            try:
                attrs[key] = json_schema.parse(value, object)
            except ValueError as error:
                raise ValueError(f'{word[:60]!r}: {error}; values are JSON, like eps=1e-5 or kind="a"') from None
        else:
            raise ValueError(f"{word!r} is neither an input, like x:bfloat16[*,4096], nor an attribute, like eps=1e-5")
    bound = bind(op, inputs, attrs)
    if bound.empty:
        raise ValueError("an input or output has no element: such a call runs the reference, no kernel")
    return Call(name, inputs, memory, _differing(op, {n: bound.attrs[n] for n in attrs}), dynamic)


def _input(match: re.Match[str]) -> tuple[Array, Memory | None]:
    """An input, and its memory where it is not compact and 16-byte aligned."""
    word, dtype, shape, strides, align = match[0], match[2], match[3], match[4], match[5]
    if dtype not in ITEMSIZE:
        raise ValueError(f"unknown dtype {dtype!r}{meant(dtype, ITEMSIZE)} in {word!r}")
    sizes = tuple(ROWS if size == "*" else int(size) for size in shape.split(",") if size)
    steps = tuple(map(int, strides.split(","))) if strides else compact(sizes)
    if len(steps) != len(sizes):
        raise ValueError(f"{word!r} has {len(steps)} strides for {len(sizes)} dims")
    return Array(sizes, dtype), Memory(steps, int(align) if align else 0) if strides or align else None


def _differing(op: Op, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a line, those that differ from their defaults; a scalar's value does not change the kernel."""
    return {
        n: v for n, v in attrs.items() if n not in op.scalars and (n not in op.attrs or exact(v) != exact(op.attrs[n]))
    }
