"""Runs the CTAs of a kernel's PTX on the CPU, with the matrix instructions of a warp.

All threads of a CTA go in step, those that are furthest behind first, and a register is an array with a number for each
thread. Memory is that of :mod:`ptx`: the upper word of an address names a block, and an access outside its block is an
error. Block 0 is shared memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import ml_dtypes
import numpy as np

OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^\s,]+")
HALVES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "bf16x2": ml_dtypes.bfloat16, "f16x2": np.float16}
LANES, SHARED_BYTES = 32, 1 << 17
ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": lambda a, b, c: a * b + c, "neg": np.negative,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "shl": np.left_shift,
    "shr": np.right_shift, "mov": lambda a: a, "cvt": lambda a: a, "selp": lambda a, b, p: np.where(p != 0, a, b),
    "div": lambda a, b: np.trunc(a / b).astype(np.int64), "rem": np.fmod, "min": np.minimum, "max": np.maximum,
}  # fmt: skip
COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
           "ge": np.greater_equal}  # fmt: skip
# Of float32: in float64, then rounded to the nearest.
FLOATS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": lambda a, b, c: a * b + c, "neg": np.negative,
    "abs": np.abs, "rcp": lambda a: 1 / a, "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt, "min": np.fmin,
    "max": np.fmax, "cvt": lambda a: a.clip(0, 1), "rsqrt": lambda a: 1 / np.sqrt(a),
}  # fmt: skip


def number(bits: np.ndarray, kind: str) -> np.ndarray:
    """Bit patterns as numbers of one of PTX's types."""
    width = 1 if kind == "pred" else int(kind[1:])
    if width == 64:
        return bits.astype(np.int64)
    bits = bits & ((1 << width) - 1)
    return bits - (bits >> (width - 1) << width) if kind[0] == "s" else bits


class Kernel:
    """An entry of a PTX text, the first one by default."""

    def __init__(self, text: str, entry: int = 0) -> None:
        signature, body = re.sub(r"//.*", "", text).split(".entry")[1 + entry].split("{", 1)
        self.parameters = re.findall(r"([\w$]+)(?:\[\d+\])?\s*[,)]", signature[: signature.index(")") + 1])
        self.threads = int(re.search(r"\.reqntid (\d+)", signature)[1])  # type: ignore[index]
        self.labels: dict[str, int] = {}
        self.statements: list[tuple[str, list[str], list[list[str]]]] = []
        for part in body.split(";"):
            line = " ".join(part.split())
            while label := re.match(r"(\$\w+): ?", line):
                self.labels[label[1]] = len(self.statements)
                line = line[label.end() :]
            if line and line[0] not in ".}":
                guard, op, rest = re.fullmatch(r"(?:@(!?%p\d+) )?(\S+) ?(.*)", line).groups("")  # type: ignore[union-attr]
                operands = [re.findall(r"[^\s,{}\[\]+]+", operand) for operand in OPERAND.findall(rest)]
                self.statements.append((guard, op.split("."), operands))

    def run(self, grid: int, arguments: Sequence[bytes], memory: Sequence[bytearray]) -> None:
        """Run all CTAs. Arguments are a kernel's parameters as bytes; block ``i + 1`` is ``memory[i]``."""
        for cta in range(grid):
            Cta(self, cta, dict(zip(self.parameters, arguments, strict=True)), memory).run()


class Cta:
    """The threads of one CTA."""

    def __init__(self, kernel: Kernel, cta: int, arguments: Mapping[str, bytes], memory: Sequence[bytearray]) -> None:
        self.kernel, self.arguments = kernel, arguments
        self.blocks = [np.frombuffer(block, np.uint8) for block in (bytearray(SHARED_BYTES), *memory)]
        self.threads = np.arange(kernel.threads)
        zero = np.zeros(kernel.threads, np.int64)
        self.registers = {"%tid.x": self.threads.astype(np.int64), "%ctaid.x": zero + cta, "__dynamic_shmem__0": zero}

    def run(self) -> None:
        at, end = np.zeros(len(self.threads), np.int64), len(self.kernel.statements)
        while (here := at.min()) < end:
            now = at == here
            guard, op, operands = self.kernel.statements[here]
            at[now] += 1
            if guard:
                holds = (self.registers[guard.lstrip("!")] != 0) != (guard[0] == "!")
                now = now & holds
            if op[0] == "bra":
                at[now] = self.kernel.labels[operands[0][0]]
            elif op[0] == "ret":
                at[now] = end
            elif op[0] in ("ld", "st"):
                self.access(op, operands, now)
            elif op[0] in ("ldmatrix", "mma", "bar", "shfl"):
                if not now.all():
                    raise RuntimeError(f"{'.'.join(op)}: only some threads are here")
                self.together(op, operands)
            elif op[0] != "griddepcontrol":
                self.compute(op, operands, now)

    def read(self, name: str) -> np.ndarray:
        if name.startswith("0f"):
            return np.full(len(self.threads), int(name[2:], 16), np.int64)
        if name[0] in "-0123456789":
            return np.full(len(self.threads), int(name.rstrip("U"), 0), np.int64)
        return self.registers[name]

    def write(self, name: str, value: np.ndarray, now: np.ndarray) -> None:
        self.registers[name] = np.where(now, value, self.registers.get(name, np.full(len(self.threads), 0xBAD)))

    def access(self, op: list[str], operands: list[list[str]], now: np.ndarray) -> None:
        data, place = operands if op[0] == "ld" else operands[::-1]
        size = int(op[-1][1:]) // 8
        if "param" in op:
            start = int(place[1]) if len(place) > 1 else 0
            for i, name in enumerate(data):
                piece = self.arguments[place[0]][start + i * size : start + (i + 1) * size]
                self.write(name, np.int64(int.from_bytes(piece, "little", signed=True)), now)
            return
        address = sum(self.read(name) for name in place)
        for thread in np.flatnonzero(now):
            block, start = self.blocks[int(address[thread]) >> 32], int(address[thread]) & 0xFFFFFFFF
            if start % (size * len(data)) or start + size * len(data) > len(block):
                raise IndexError(f"{'.'.join(op)} at byte {start} of {len(block)}, thread {thread}")
            for i, name in enumerate(data):
                piece = block[start + i * size : start + (i + 1) * size]
                if op[0] == "ld":
                    self.registers.setdefault(name, np.full(len(self.threads), 0xBAD))
                    self.registers[name][thread] = int.from_bytes(piece.tobytes(), "little")
                else:
                    bits = int(self.read(name)[thread]) & ((1 << 8 * size) - 1)
                    piece[:] = np.frombuffer(bits.to_bytes(size, "little"), np.uint8)

    def together(self, op: list[str], operands: list[list[str]]) -> None:
        everyone = np.ones(len(self.threads), bool)
        if op[0] == "shfl":  # of the first lane, as make_warp_uniform has it, or of the one across
            lanes, (distance,) = self.threads % LANES, operands[2]
            assert op[2] == "bfly" or distance == "0"
            source = lanes ^ int(distance) if op[2] == "bfly" else 0
            self.write(operands[0][0], self.read(operands[1][0])[self.threads - lanes + source], everyone)
        elif op[0] == "ldmatrix":
            rows = sum(self.read(name) for name in operands[1])
            for i, name in enumerate(operands[0]):
                words = [self.matrix(rows[w + 8 * i : w + 8 * i + 8], "trans" in op) for w in self.threads[::LANES]]
                self.write(name, np.concatenate(words), everyone)
        elif op[0] == "mma":
            d, a, b, c = ([self.read(name) if i else name for name in names] for i, names in enumerate(operands))
            found = [self.multiplied(a, b, c, HALVES[op[-2]], w) for w in self.threads[::LANES]]
            for i, name in enumerate(d):
                self.write(name, np.concatenate([f[i] for f in found]), everyone)

    def matrix(self, rows: np.ndarray, transposed: bool) -> np.ndarray:
        """A word of each lane of 8 x 8 numbers of 16 bits, whose rows lie at these addresses."""
        if (rows % 16).any():
            raise IndexError(f"ldmatrix of rows at {rows}")
        values = np.stack([self.blocks[0][int(row) : int(row) + 16].view(np.uint16) for row in rows])
        values = np.ascontiguousarray(values.T if transposed else values)
        return values.view(np.uint32).reshape(-1).astype(np.int64)

    def multiplied(self, a: list, b: list, c: list, half: type, w: int) -> list[np.ndarray]:
        """``c + a @ b`` of a warp: 16 x 16 times 16 x 8."""
        lanes = slice(w, w + LANES)
        a0, a1, a2, a3, b0, b1 = (
            r[lanes].astype(np.uint32).view(half).reshape(8, 8).astype(np.float32) for r in (*a, *b)
        )
        c0, c1, c2, c3 = (r[lanes].astype(np.uint32).view(np.float32).reshape(8, 4) for r in c)
        # A lane's numbers of b are neighbours in a column.
        product = np.block([[a0, a2], [a1, a3]]) @ np.block([[b0.T], [b1.T]])
        sums = product.reshape(2, 8, 4, 2) + np.stack([np.stack([c0, c1], -1), np.stack([c2, c3], -1)])
        return [
            np.ascontiguousarray(sums[half_rows, :, :, i]).reshape(-1).view(np.uint32).astype(np.int64)
            for half_rows in range(2) for i in range(2)
        ]  # fmt: skip

    def compute_floats(self, op: list[str], result: str, given: list[np.ndarray], now: np.ndarray) -> None:
        values = [bits.astype(np.uint32).view(np.float32).astype(np.float64) for bits in given]
        with np.errstate(all="ignore"):
            if op[0] == "setp":
                self.write(result, COMPARE[op[1]](*values).astype(np.int64), now)
                return
            exact = FLOATS[op[0]](*values)
            found = exact.astype(np.float32)
            if "rm" in op:  # rounded down
                found = np.where(found > exact, np.nextafter(found, np.float32(-np.inf)), found)
        self.write(result, found.view(np.uint32).astype(np.int64), now)

    def compute(self, op: list[str], operands: list[list[str]], now: np.ndarray) -> None:
        results, *given = operands
        kind = op[-1]
        if len(results) > 1:  # a move that takes a register apart
            width = int(kind[1:]) // len(results)
            for i, name in enumerate(results):
                self.write(name, number(self.read(given[0][0]) >> i * width, f"b{width}"), now)
        elif len(given[0]) > 1:  # one that puts a register together
            width = int(kind[1:]) // len(given[0])
            parts = [number(self.read(name), f"b{width}") << i * width for i, name in enumerate(given[0])]
            self.write(results[0], np.bitwise_or.reduce(parts), now)
        elif op[0] == "cvt" and op[-2] == "f32" and kind != "f32":
            bits = self.read(given[0][0])
            wide = (bits.astype(np.uint16).view(HALVES[kind]) if kind in HALVES else number(bits, kind)).astype(
                np.float32
            )
            self.write(results[0], wide.view(np.uint32).astype(np.int64), now)
        elif kind == "f32" and (op[0] == "setp" or (op[0] in FLOATS and op[-2] not in HALVES)):
            self.compute_floats(op, results[0], [self.read(name) for (name,) in given], now)
        elif op[0] == "cvt" and kind == "f32":
            halves = [self.read(n).astype(np.uint32).view(np.float32).astype(HALVES[op[-2]]) for (n,) in given]
            low, high = (h.view(np.uint16).astype(np.int64) for h in (halves * 2)[1::-1][:2])
            self.write(results[0], low if len(given) == 1 else low | high << 16, now)
        else:
            function = COMPARE[op[1]] if op[0] == "setp" else ARITHMETIC[op[0]]
            values = [
                number(self.read(name), "pred" if op[0] == "selp" and i == 2 else kind)
                for i, (name,) in enumerate(given)
            ]
            result = {"setp": "pred", "cvt": op[-2]}.get(op[0], f"{kind[0]}64" if "wide" in op else kind)
            with np.errstate(over="ignore"):
                self.write(results[0], number(function(*values).astype(np.int64), result), now)
