"""Runs a kernel's PTX on the CPU, one thread at a time: what the compiler has made of a kernel, seen without a GPU.

Registers hold bit patterns; arithmetic is of integers only, as in kernels that move data. The upper word of an address
is the number of a block of memory, the lower word the place in it: an access outside its block, or one that is not
aligned, is an error, and so is an instruction that is not known.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable

# A register or a number, several in braces, or an address in brackets.
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+")
UNDEFINED = 0xBAD0BAD0BAD0BAD0


def permute(a: int, b: int, selector: int) -> int:
    """``prmt.b32``: any four of the eight bytes of two words."""
    both = (a | b << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(both[selector >> 4 * i & 7] for i in range(4)), "little")


def insert(part: int, whole: int, start: int, length: int) -> int:
    """``bfi``: some bits of a number replaced."""
    mask = (1 << length) - 1
    return whole & ~(mask << start) | (part & mask) << start


ARITHMETIC: dict[str, Callable[..., int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "mad": lambda a, b, c: a * b + c, "min": min,
    "max": max, "neg": operator.neg, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "not": operator.invert, "shl": operator.lshift, "shr": operator.rshift, "prmt": permute,
    "bfi": insert, "mov": lambda a: a, "cvt": lambda a: a, "selp": lambda a, b, p: a if p else b,
}  # fmt: skip
Registers = defaultdict[str, int]
WIDTHS = {"pred": 1} | {f"{kind}{width}": width for kind in "bus" for width in (8, 16, 32, 64)}


def number(bits: int, kind: str) -> int:
    """A bit pattern as a number of one of PTX's types."""
    width = WIDTHS[kind]
    bits &= (1 << width) - 1
    return bits - (bits >> width - 1 << width) if kind[0] == "s" else bits


class Kernel:
    """The one entry of a PTX text."""

    def __init__(self, text: str) -> None:
        signature, body = re.sub(r"//.*", "", text).split(".entry", 1)[1].split("{", 1)
        self.parameters = re.findall(r"([\w$]+)(?:\[\d+\])?\s*[,)]", signature[: signature.index(")") + 1])
        self.labels: dict[str, int] = {}
        self.statements: list[tuple[str, list[str], list[str]]] = []
        for line in map(str.strip, re.split(r"[;\n]", body)):
            if line.endswith(":"):
                self.labels[line[:-1]] = len(self.statements)
            elif line and line[0] not in ".{})":  # neither a declaration nor a bracket
                guard, op, operands = re.fullmatch(r"(?:@(!?%p\d+)\s+)?(\S+)\s*(.*)", line).groups("")  # type: ignore[union-attr]
                self.statements.append((guard, op.split("."), OPERAND.findall(operands)))

    def run(self, *arguments: int | bytearray, thread: int) -> None:
        """Run one thread; of a ``bytearray``, a block of memory, the kernel gets the address."""
        memory = [bytearray(16 * len(arguments))]
        registers = defaultdict(lambda: UNDEFINED, {"%tid.x": thread})
        for i, (name, argument) in enumerate(zip(self.parameters, arguments, strict=True)):
            if isinstance(argument, bytearray):
                memory.append(argument)
                argument = len(memory) - 1 << 32
            memory[0][16 * i : 16 * i + 8] = argument.to_bytes(8, "little")
            registers[name] = 16 * i
        at = 0
        while self.statements[at][1] != ["ret"]:
            guard, op, operands = self.statements[at]
            at += 1
            if guard and bool(registers[guard.lstrip("!")]) == (guard[0] == "!"):
                continue
            if op[0] == "bra":
                at = self.labels[operands[0]]
            elif op[0] in ("ld", "st"):
                self._access(op, operands, registers, memory)
            else:
                self._compute(op, operands, registers)

    def _access(self, op: list[str], operands: list[str], registers: Registers, memory: list[bytearray]) -> None:
        """Load or store one or several registers."""
        data, place = map(names, operands if op[0] == "ld" else reversed(operands))
        size = WIDTHS[op[-1]] // 8
        address = sum(read(name, registers) for name in place)
        block, start = memory[address >> 32], address & 0xFFFFFFFF
        if start % (size * len(data)) or start + size * len(data) > len(block):
            raise IndexError(f"{'.'.join(op)} of {size * len(data)} bytes at byte {start} of {len(block)}")
        for i, name in enumerate(data):
            piece = slice(start + i * size, start + (i + 1) * size)
            if op[0] == "ld":
                registers[name] = number(int.from_bytes(block[piece], "little"), op[-1])
            else:
                block[piece] = number(read(name, registers), f"b{8 * size}").to_bytes(size, "little")

    def _compute(self, op: list[str], operands: list[str], registers: Registers) -> None:
        """Any other instruction: the first operand receives what it makes of the others."""
        (*results,), *given = map(names, operands)
        kind, width = op[-1], WIDTHS[op[-1]]
        if len(results) > 1:  # a move that takes a register apart
            width //= len(results)
            for i, name in enumerate(results):
                registers[name] = number(registers[given[0][0]] >> i * width, f"b{width}")
            return
        if len(given[0]) > 1:  # one that puts a register together
            width //= len(given[0])
            parts = (number(read(name, registers), f"b{width}") << i * width for i, name in enumerate(given[0]))
            registers[results[0]] = sum(parts)
            return
        if "hi" in op:
            raise NotImplementedError(".".join(op))
        function = getattr(operator, op[1]) if op[0] == "setp" else ARITHMETIC[op[0]]
        result = {"setp": "pred", "cvt": op[-2]}.get(op[0], f"{kind[0]}64" if "wide" in op else kind)
        registers[results[0]] = number(function(*(number(read(n, registers), kind) for (n,) in given)), result)


def names(operand: str) -> list[str]:
    """The registers and numbers of an operand."""
    return re.findall(r"[^\s,{}\[\]+]+", operand)


def read(name: str, registers: Registers) -> int:
    if name.startswith("0f"):
        return int(name[2:], 16)
    return int(name.rstrip("U"), 0) if name[0] in "-0123456789" else registers[name]
