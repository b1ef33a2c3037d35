"""Runs the CTAs of a kernel's PTX on the CPU, with the matrix instructions of a warp.

All threads of a CTA go in step, those that are furthest behind first, and a register is an array with a number for each
thread. Memory is that of :mod:`ptx`: the upper word of an address names a block, and an access outside its block is an
error. Block 0 is shared memory.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

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
    "prmt": lambda a, b, selector: permuted(a, b, selector),
    "popc": lambda a: np.bitwise_count(a.astype(np.uint32)).astype(np.int64),
    # Of two halves with the lower two bytes.
    "dp2a": lambda a, b, c: c + (a & 0xFFFF) * (b & 0xFF) + (a >> 16 & 0xFFFF) * (b >> 8 & 0xFF),
}  # fmt: skip


def permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Any four of the eight bytes of two words, or what has all bits as the sign of one."""
    both = np.stack([a, b], axis=-1).astype(np.uint32).view(np.uint8)
    places = selector[:, None] >> np.arange(0, 16, 4)
    found = np.take_along_axis(both, places & 7, axis=-1)
    return np.where(places & 8, (found >> 7) * np.uint8(255), found).view(np.uint32)[:, 0]


COMPARE = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
           "ge": np.greater_equal}  # fmt: skip
# Also true beside a NaN.
COMPARE |= {f"{name}u": lambda a, b, f=f: f(a, b) | np.isnan(a) | np.isnan(b) for name, f in [*COMPARE.items()]}
COMPARE |= {"num": lambda a, b: ~np.isnan(a) & ~np.isnan(b), "nan": lambda a, b: np.isnan(a) | np.isnan(b)}
# Of float32: in float64, then rounded to the nearest.
FLOATS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "fma": lambda a, b, c: a * b + c, "neg": np.negative, "abs": np.abs, "rcp": lambda a: 1 / a, "ex2": np.exp2,
    "lg2": np.log2, "sqrt": np.sqrt, "min": np.fmin,
    "max": np.fmax, "cvt": lambda a: a.clip(0, 1), "rsqrt": lambda a: 1 / np.sqrt(a),
    "copysign": lambda a, b: np.copysign(b, a),
}  # fmt: skip


# Of min and max that are NaN where an operand is; and the one NaN that results of 16 bits have.
OR_NAN = {"max": np.maximum, "min": np.minimum}
NAN_OF_HALF = 0x7FFF
UNWRITTEN = "0xA5A5A5A5"


class Registers(dict[str, np.ndarray]):
    """Bits by name; what is no register is a number, the same in all threads. Registers that were not written have bits
    that nothing expects: LLVM reads some, whose bytes it leaves out later.
    """

    def __init__(self, threads: int) -> None:
        super().__init__()
        self.threads = threads

    def __missing__(self, name: str) -> np.ndarray:
        if name.startswith("%"):
            name = UNWRITTEN
        value = int(name[2:], 16) if name[:2] in ("0f", "0d") else int(name.rstrip("U"), 0)
        value -= (value >> 63) << 64 if name.startswith("0d") else 0
        return self.setdefault(name, np.full(self.threads, value, np.int64))


@cache
def dtype_of(kind: str) -> np.dtype:
    """NumPy's dtype for one of PTX's types; floats are bits."""
    if kind == "pred":
        return np.dtype(bool)
    return np.dtype(f"{'i' if kind[0] == 's' or kind[1:] == '64' else 'u'}{int(kind[1:]) // 8}")


def number(bits: np.ndarray, kind: str) -> np.ndarray:
    """Bit patterns as numbers of one of PTX's types."""
    return bits.astype(dtype_of(kind), copy=False).astype(np.int64, copy=False)


def floats(bits: np.ndarray) -> np.ndarray:
    """The numbers of float32 that these bit patterns stand for."""
    return bits.astype(np.uint32).view(np.float32)


@cache
def function_of(*op: str) -> Callable[..., np.ndarray]:
    """What an instruction with one result makes of the bits of its operands."""
    kind = op[-1]
    if kind == "e4m3x2":

        def function(bits: np.ndarray) -> np.ndarray:
            pairs = bits.astype(np.uint16)[:, None].view(ml_dtypes.float8_e4m3fn)
            return pairs.astype(np.float16).view(np.uint32)[:, 0].astype(np.int64)

    elif "f64" in op:

        def function(*given: np.ndarray) -> np.ndarray:
            values = [bits.view(np.float64) if kind == "f64" else floats(bits) for bits in given]
            found = values[0] if op[0] == "cvt" else FLOATS[op[0]](*values)
            if op[0] == "cvt" and op[-2] == "f32":
                return found.astype(np.float32).view(np.uint32).astype(np.int64)
            return found.astype(np.float64).view(np.int64)

    elif "satfinite" in op:
        eight, most = {"e4m3x2": (ml_dtypes.float8_e4m3fn, 448), "e5m2x2": (ml_dtypes.float8_e5m2, 57344)}[op[-2]]

        def function(*given: np.ndarray) -> np.ndarray:
            high, low = (floats(bits).clip(-most, most).astype(eight).view(np.uint8).astype(np.int64) for bits in given)
            return low | high << 8

    elif kind in HALVES and op[0] != "cvt" and op[0] in ("setp", *FLOATS):
        half, width = HALVES[kind], 2 if kind.endswith("x2") else 1
        apply = COMPARE[op[1]] if op[0] == "setp" else FLOATS[op[0]]
        apply = OR_NAN[op[0]] if "NaN" in op else apply

        def function(*given: np.ndarray) -> np.ndarray:
            values = [bits.astype(f"u{2 * width}")[:, None].view(half).astype(np.float64) for bits in given]
            if op[0] == "setp":
                return apply(*values)[:, 0].astype(np.int64)
            found = apply(*values).astype(half)
            found = np.where(np.isnan(found), np.uint16(NAN_OF_HALF), found.view(np.uint16))
            return found.view(f"u{2 * width}")[:, 0].astype(np.int64)

    elif op[0] == "cvt" and op[-2] == "f32" and kind != "f32":

        def function(bits: np.ndarray) -> np.ndarray:
            wide = bits.astype(np.uint16).view(HALVES[kind]) if kind in HALVES else number(bits, kind)
            return wide.astype(np.float32).view(np.uint32).astype(np.int64)

    elif op[:2] == ("cvt", "rzi") and op[-2:] == ("f32", "f32"):

        def function(bits: np.ndarray) -> np.ndarray:
            return np.trunc(floats(bits)).view(np.uint32).astype(np.int64)

    elif op[:2] == ("cvt", "rzi") and kind == "f32":

        def function(bits: np.ndarray) -> np.ndarray:
            return np.trunc(floats(bits)).astype(np.int64)

    elif kind == "f32" and (op[0] == "setp" or (op[0] in FLOATS and op[-2] not in HALVES)):

        def function(*given: np.ndarray) -> np.ndarray:
            values = [floats(bits).astype(np.float64) for bits in given]
            if op[0] == "setp":
                return COMPARE[op[1]](*values).astype(np.int64)
            apply = np.floor if "rmi" in op else np.rint if "rni" in op else FLOATS[op[0]]
            exact = (OR_NAN[op[0]] if "NaN" in op else apply)(*values)
            found = exact.astype(np.float32)
            if "rm" in op:  # rounded down
                found = np.where(found > exact, np.nextafter(found, np.float32(-np.inf)), found)
            return found.view(np.uint32).astype(np.int64)

    elif op[0] == "cvt" and kind == "f32":

        def function(*given: np.ndarray) -> np.ndarray:
            halves = [floats(bits).astype(HALVES[op[-2]]).view(np.uint16).astype(np.int64) for bits in given]
            return halves[0] if len(halves) == 1 else halves[1] | halves[0] << 16

    else:
        apply = COMPARE[op[1]] if op[0] == "setp" else ARITHMETIC[op[0]]
        dtypes = [dtype_of(each) for each in (kind, kind, "pred" if op[0] == "selp" else kind)]
        result = dtype_of({"setp": "pred", "cvt": op[-2]}.get(op[0], f"{kind[0]}64" if "wide" in op else kind))

        def function(*given: np.ndarray) -> np.ndarray:
            values = [bits.astype(dtype, copy=False) for bits, dtype in zip(given, dtypes, strict=False)]
            values = [value.astype(np.int64) for value in values] if "wide" in op else values
            return apply(*values).astype(result, copy=False).astype(np.int64, copy=False)

    return function


class Statement(NamedTuple):
    """An instruction, decoded once.

    Attributes:
        guard: a predicate, or empty.
        unless: whether those threads execute it whose predicate is false.
        op: the parts of its name.
        operands: registers and numbers of each.
        function: what it makes of the bits of its operands, if it is arithmetic with one result.
        given: these operands.
    """

    guard: str
    unless: bool
    op: tuple[str, ...]
    operands: list[list[str]]
    function: Callable[..., np.ndarray] | None
    given: list[str]


def decoded(line: str) -> Statement:
    guard, name, rest = re.fullmatch(r"(?:@(!?%p\d+) )?(\S+) ?(.*)", line).groups("")  # type: ignore[union-attr]
    operands = [re.findall(r"[^\s,{}\[\]+]+", operand) for operand in OPERAND.findall(rest)]
    op = tuple(name.split("."))
    # Pieces of registers, and the upper half of a product, are no arithmetic of whole registers.
    whole = op[0] in (*ARITHMETIC, *FLOATS, "setp") and "hi" not in op and all(len(each) == 1 for each in operands)
    given = [each[0] for each in operands[1:]] if whole else []
    return Statement(guard.lstrip("!"), guard[:1] == "!", op, operands, function_of(*op) if whole else None, given)


class Kernel:
    """An entry of a PTX text, the first one by default."""

    def __init__(self, text: str, entry: int = 0) -> None:
        signature, body = re.sub(r"//.*", "", text).split(".entry")[1 + entry].split("{", 1)
        self.parameters = re.findall(r"([\w$]+)(?:\[\d+\])?\s*[,)]", signature[: signature.index(")") + 1])
        sizes = re.search(r"\.reqntid (\d+)(?:, (\d+), (\d+))?", signature)
        self.block = tuple(int(size or 1) for size in sizes.groups())  # type: ignore[union-attr]
        self.threads = math.prod(self.block)
        self.warps = -(-self.threads // LANES)
        self.shared, self.static = {"__dynamic_shmem__0": 0}, 0  # addresses by name, and bytes of fixed size
        for align, bits, name, count in re.findall(r"\.shared \.align (\d+) \.b(\d+) ([\w$]+)\[(\d+)\]", text):
            self.static += -self.static % int(align)
            self.shared[name] = self.static
            self.static += int(bits) // 8 * int(count)
        self.shared["__dynamic_shmem__0"] = self.static = self.static + -self.static % 1024 * (self.static > 0)
        # Of vectors that LLVM loads some numbers may be beyond what the source reads.
        self.unread = {name for name, times in Counter(re.findall(r"%\w+", body)).items() if times == 1}
        self.labels: dict[str, int] = {}
        self.statements: list[Statement] = []
        for part in body.split(";"):
            line = " ".join(part.split())
            while label := re.match(r"(\$\w+): ?", line):
                self.labels[label[1]] = len(self.statements)
                line = line[label.end() :]
            line = line.lstrip("{} ")  # of inline assembly
            if line and line[0] not in ".":
                self.statements.append(decoded(line))

    def run(self, grid: int, arguments: Sequence[bytes], memory: Sequence[bytearray]) -> None:
        """Run all CTAs. Arguments are a kernel's parameters as bytes; block ``i + 1`` is ``memory[i]``."""
        with np.errstate(all="ignore"):
            for cta in range(grid):
                Cta(self, cta, dict(zip(self.parameters, arguments, strict=True)), memory).run()


class Cta:
    """The threads of one CTA."""

    def __init__(self, kernel: Kernel, cta: int, arguments: Mapping[str, bytes], memory: Sequence[bytearray]) -> None:
        self.kernel, self.arguments = kernel, arguments
        self.blocks = [np.frombuffer(block, np.uint8) for block in (bytearray(SHARED_BYTES), *memory)]
        self.threads = np.arange(kernel.threads)
        self.everyone = np.ones(kernel.threads, bool)
        zero = np.zeros(kernel.threads, np.int64)
        self.registers = Registers(kernel.threads)
        self.registers |= {"%tid.x": zero + self.threads, "%ctaid.x": zero + cta, "__dynamic_shmem__0": zero}
        self.registers["%laneid"] = zero + self.threads % LANES

    def run(self) -> None:
        for op, operands, now in self.steps():
            if op[0] in ("ld", "st"):
                self.access(op, operands, now)
            elif op[0] == "vote":
                self.vote(op, operands, now)
            elif op[0] in ("ldmatrix", "mma", "bar", "shfl"):
                if now is not self.everyone:
                    raise RuntimeError(f"{'.'.join(op)}: only some threads are here")
                self.together(op, operands)
            elif op[0] != "griddepcontrol":
                self.compute(op, operands, now)

    def steps(self) -> Iterator[tuple[tuple[str, ...], list[list[str]], np.ndarray]]:
        """The instructions but branches and arithmetic, each with the threads that execute it; who is behind goes
        first.
        """
        statements, registers, everyone = self.kernel.statements, self.registers, self.everyone
        at, here, elsewhere = 0, everyone, dict[int, np.ndarray]()  # other threads, by their next statement

        def go(threads: np.ndarray, there: int) -> None:
            if threads is everyone:
                elsewhere[there] = threads
            elif threads.any():
                elsewhere[there] = self.some(threads | elsewhere[there] if there in elsewhere else threads)

        while at < len(statements):
            guard, unless, op, operands, function, given = statements[at]
            now = here
            if guard:
                now = self.some(here & ((registers[guard] != 0) != unless))
            if branch := op[0] in ("bra", "ret"):
                go(now, self.kernel.labels[operands[0][0]] if op[0] == "bra" else len(statements))
                go(here & ~now, at + 1)
            elif now is everyone or now.any():
                if function is None:
                    yield op, operands, now
                else:
                    self.write(operands[0][0], function(*[registers[name] for name in given]), now)
            at += 1
            if branch or elsewhere:
                if not branch:
                    go(here, at)
                at = min(elsewhere)
                here = elsewhere.pop(at)

    def some(self, threads: np.ndarray) -> np.ndarray:
        """These threads, ``everyone`` where they are all."""
        return self.everyone if (threads == self.everyone).all() else threads

    def read(self, name: str) -> np.ndarray:
        return self.registers[name]

    def write(self, name: str, value: np.ndarray, now: np.ndarray) -> None:
        if now is not self.everyone:
            value = np.where(now, value, self.registers.get(name, 0xBAD))
        self.registers[name] = value

    def access(self, op: tuple[str, ...], operands: list[list[str]], now: np.ndarray) -> None:
        data, place = operands if op[0] == "ld" else operands[::-1]
        size = int(op[-1][1:]) // 8
        if "param" in op:
            start = int(place[1]) if len(place) > 1 else 0
            for i, name in enumerate(data):
                piece = self.arguments[place[0]][start + i * size : start + (i + 1) * size]
                self.write(name, np.full(len(now), int.from_bytes(piece, "little", signed=True)), now)
            return
        address = sum(self.read(name) for name in place)
        for number_of_block in {*(address[now] >> 32).tolist()}:
            block, here = self.blocks[number_of_block], now & (address >> 32 == number_of_block)
            start = address[here] & 0xFFFFFFFF
            outside = (start % (size * len(data)) != 0) | (start + size * len(data) > len(block))
            if outside.any():
                raise IndexError(f"{'.'.join(op)} at byte {start[outside][0]} of {len(block)}")
            for i, name in enumerate(data):
                places = start[:, None] + np.arange(i * size, (i + 1) * size)
                if op[0] == "ld":
                    value = np.zeros(len(now), np.int64)
                    value[here] = block[places].view(f"u{size}")[:, 0]
                    self.write(name, value, self.some(here))
                else:
                    block[places] = self.read(name)[here].astype(f"u{size}")[:, None].view(np.uint8)

    def vote(self, op: tuple[str, ...], operands: list[list[str]], now: np.ndarray) -> None:
        """A warp's vote on a predicate: a bit of each lane, or whether it is true of all. If some lanes have gone
        another way, the others wait for them for ever.
        """
        here = now.reshape(-1, LANES)
        if (here.any(axis=1) != here.all(axis=1)).any():
            raise RuntimeError(f"hangs: {'.'.join(op)} of a part of a warp")
        true = (self.read(operands[1][0]) != 0) & now
        if "all" in op:
            found = np.repeat((true == now).reshape(-1, LANES).all(axis=1), LANES).astype(np.int64)
        else:
            bits = (true.reshape(-1, LANES) << np.arange(LANES)).sum(axis=1)
            found = np.repeat(bits, LANES)
        self.write(operands[0][0], found, now)

    def together(self, op: tuple[str, ...], operands: list[list[str]]) -> None:
        if op[0] == "shfl":  # of a lane, or of the one across
            lanes, distance = self.threads % LANES, self.read(operands[2][0])
            assert op[2] in ("bfly", "idx")
            source = lanes ^ distance if op[2] == "bfly" else distance % LANES
            self.write(operands[0][0], self.read(operands[1][0])[self.threads - lanes + source], self.everyone)
        elif op[0] == "ldmatrix":
            rows = sum(self.read(name) for name in operands[1]).reshape(-1, 4, 8)
            for i, name in enumerate(operands[0]):
                self.write(name, self.matrix(rows[:, i], "trans" in op), self.everyone)
        elif op[0] == "mma":
            for name, found in zip(operands[0], self.multiplied(*operands[1:], HALVES[op[-2]]), strict=True):
                self.write(name, found, self.everyone)

    def matrix(self, rows: np.ndarray, transposed: bool) -> np.ndarray:
        """A word of each lane of 8 x 8 numbers of 16 bits, whose rows lie at these addresses, eight of each warp."""
        if (rows % 16).any():
            raise IndexError(f"ldmatrix of rows at {rows}")
        values = self.blocks[0][rows[..., None] + np.arange(16)].view(np.uint16)
        values = np.ascontiguousarray(values.swapaxes(1, 2) if transposed else values)
        return values.view(np.uint32).reshape(-1).astype(np.int64)

    def multiplied(self, a: list[str], b: list[str], c: list[str], half: type) -> np.ndarray:
        """``c + a @ b`` of each warp: 16 x 16 times 16 x 8."""
        a_parts, b_parts = (
            np.array([self.read(name) for name in names]).astype(np.uint32).view(half).astype(np.float32)
            for names in (a, b)
        )
        # A lane has neighbours in a row of a and in a column of b; its words of a go down first, then to the right.
        rows = a_parts.reshape(2, 2, -1, 8, 8).transpose(2, 1, 3, 0, 4).reshape(-1, 16, 16)
        columns = b_parts.reshape(2, -1, 8, 8).transpose(1, 0, 3, 2).reshape(-1, 16, 8)
        product = (rows @ columns).reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        found = product + floats(np.array([self.read(name) for name in c]))
        return found.view(np.uint32).astype(np.int64)

    def compute(self, op: tuple[str, ...], operands: list[list[str]], now: np.ndarray) -> None:
        """A move that takes a register apart or puts one together, and the upper half of a product."""
        results, *given = operands
        if op[:2] == ("mul", "hi"):
            width = int(op[-1][1:])
            a, b = (number(self.read(name), op[-1]).astype(object) for (name,) in given)
            if op[-1] == "u64":
                a, b = a % (1 << 64), b % (1 << 64)
            high = np.array([int(x) % (1 << 64) for x in a * b >> width], np.uint64)
            self.write(results[0], number(high.astype(np.int64), op[-1]), now)
            return
        if len(results) > 1:
            width = int(op[-1][1:]) // len(results)
            for i, name in enumerate(results):
                self.write(name, number(self.read(given[0][0]) >> i * width, f"b{width}"), now)
        elif len(given[0]) > 1:
            width = int(op[-1][1:]) // len(given[0])
            parts = [number(self.read(name), f"b{width}") << i * width for i, name in enumerate(given[0])]
            self.write(results[0], np.bitwise_or.reduce(parts), now)
        else:
            raise NotImplementedError(".".join(op))
