"""Feed damaged files and texts to what reads them: expressions, manifests, bundles, tuning files, exported programs,
entries of the cache.

    python -m tests.fuzz.parsers --parser bundle --seconds 600
    python -m tests.fuzz.parsers --parser export --seed 7 --case 1234      # one case again, in this process

Every case is a valid file with some changes: bits, bytes, lines, JSON of other types, names, numbers and depths.
Nothing but the errors that a reader documents may come out, and what is read in spite of the changes must be sound.
Readers run in a process of their own: one that dies or does not answer is a fault too. Exit code 1 where there was one.

An exported program of other bytes whose checksum is right again goes on to jaxlib's reader of StableHLO, which is not
made for that: where it dies or does not answer, the case is counted apart. Who can write such a file is trusted.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import logging
import os
import random
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# One case; True where the file was read. It calls its second argument before a file goes to somebody else's reader.
Reader = Callable[[random.Random, Callable[[], None]], bool]

# --- changes -------------------------------------------------------------------------------------------------------

WORDS = (
    "", " ", "#", "\n", '"', "\\", "\0", "\ud800", "\u2028", "é", "../../x", "/etc/passwd", "a" * 100_000, "-1",
    "1e999", "NaN", "*", "[" * 100_000, '{"a":' * 50_000, "9" * 5000, "9" * 400, "x.py:op", "=", ":",
    "/align=0", "/strides=0", "dynamic", "float33", "18446744073709551616",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), [], {},
    [[]], [None], {"": 0}, *WORDS,
)  # fmt: skip


def change_bytes(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at, length = rng.randrange(len(changed) + 1), rng.choice((1, 1, 2, 4, 16, 256))
        kind = rng.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del changed[at : at + length]
        elif kind == 2:
            changed[at:at] = rng.randbytes(length)
        elif kind == 3:
            changed[at:at] = changed[rng.randrange(len(changed) + 1) :][:length]
        elif kind == 4:
            changed[at:at] = rng.choice(WORDS).encode(errors="surrogatepass")
        else:
            del changed[at if rng.randrange(4) == 0 else len(changed) :]
    return bytes(changed)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container within a value, with each of its keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def change_json(rng: random.Random, data: bytes) -> bytes:
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        found = list(places(value))
        if not found or rng.randrange(50) == 0:
            return json.dumps(rng.choice(VALUES)).encode()
        (holder, key), (other, name) = rng.choice(found), rng.choice(found)
        kind = rng.randrange(7)
        if kind <= 2:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        elif kind == 3:
            del holder[key]
        elif kind == 4 and isinstance(holder, dict):
            holder[rng.choice(WORDS)] = holder.pop(key)
        elif kind == 5:
            holder[key] = json.loads(json.dumps(other[name]))
        else:
            holder[key] = rng.choice(([holder[key]], {"x": holder[key]}, str(holder[key]), [holder[key]]))
    return json.dumps(value).encode()


def change(rng: random.Random, data: bytes, structured: bool = True) -> bytes:
    return change_json(rng, data) if structured and rng.randrange(3) else change_bytes(rng, data)


# --- readers -------------------------------------------------------------------------------------------------------

LINES = """# a comment
rmsnorm x:bfloat16[*,4096] weight:float32[4096] eps=1e-05
rmsnorm x:float16[2,3,1000]/strides=6003,2001,1/align=2
silu_mul gate:float32[7]/align=4 up:float32[7]
rmsnorm x:float32[8,64] weight:float32[64] bias:float32[64] weight_offset=1.0 dynamic
"json:dumps" x:float32[4]
softmax x:float32[5,50257]
"""


def manifest_reader(where: Path) -> Reader:
    from cute_ops.aot import build
    from cute_ops.calls import manifest
    from cute_ops.jit.target import parse

    target = parse("sm_90a")
    words = LINES.split()

    def read(rng: random.Random, elsewhere: Callable[[], None]) -> bool:
        data = LINES.encode()
        if rng.randrange(2):
            data = change_bytes(rng, data)
        else:  # words in other places, and others in their place
            lines = [line.split() for line in LINES.splitlines()[1:]]
            for _ in range(rng.choice((1, 1, 2, 3))):
                line = rng.choice(lines)
                line[rng.randrange(len(line))] = rng.choice((rng.choice(words), rng.choice(WORDS)))
            data = "\n".join(" ".join(line) for line in [rng.choice(lines)]).encode(errors="surrogatepass")
        (where / "m.txt").write_bytes(data)
        try:
            calls = manifest.read(where / "m.txt")
        except ValueError as error:
            check_text(error)
            return False
        for call in calls:
            (again,) = manifest.parse(str(call))
            require(str(again) == str(call), f"{call} is read back as {again}")
            try:
                build.variant_of(call, target)
            except (ValueError, TypeError, NotImplementedError) as error:
                check_text(error)
        return True

    return read


def tuning_reader(where: Path) -> Reader:
    from cute_ops.autotune import winners

    some = [
        winners.Winner(
            f"rmsnorm sm_90a:132 n={n}", {"threads": 128}, {"threads": 64 * n}, {"us": [1.5], "sources": "0"}
        )
        for n in range(4)
    ]
    valid = winners.dump(some).encode()

    def read(rng: random.Random, elsewhere: Callable[[], None]) -> bool:
        try:
            found = winners.parse(change(rng, valid))
        except ValueError as error:
            check_text(error)
            return False
        again = winners.parse(winners.dump(found.values()))
        require(repr(sorted(again)) == repr(sorted(found)), "what was read is written otherwise")
        return True

    return read


def bundle_reader(where: Path) -> Reader:
    from cute_ops.aot import build
    from cute_ops.calls import manifest
    from cute_ops.errors import CacheError
    from cute_ops.jit import bundle, loader
    from cute_ops.jit.target import parse

    targets = [parse("sm_90a"), parse("sm_80")]
    calls = manifest.parse("silu_mul gate:bfloat16[*,64] up:bfloat16[*,64]")
    here = where / "bundle"
    build.write([], targets, here, calls)
    record = json.loads((here / "bundle.json").read_text())
    content = b"an object"
    variants = [build.variant_of(calls[0], target) for target in targets]
    for variant in variants:
        record["kernels"][variant.symbol] = {
            "sha256": hashlib.sha256(content).hexdigest(), "bytes": 9, "variant": json.loads(variant.text),
        }  # fmt: skip
        (here / "kernels" / f"{variant.symbol}.so").write_bytes(content)
    valid = json.dumps(record).encode()

    # Nothing of this is an object: what is loaded must be what the checksum was of.
    def loaded(path: Path, symbol: str, through: str = "") -> Callable[[], bytes]:
        data = Path(through).read_bytes()
        return lambda: data

    loader.load = loaded

    def read(rng: random.Random, elsewhere: Callable[[], None]) -> bool:
        (here / "bundle.json").write_bytes(change(rng, valid))
        done = 0
        attempts: list[Callable[[], object]] = []
        try:
            opened = bundle.Bundle(here)
        except CacheError as error:
            check_text(error)
        else:
            attempts = [opened.verify, lambda: opened.text("manifest.txt")]
            attempts += [lambda v=v: (opened.load(v) or (lambda: content))() for v in variants]  # type: ignore[misc]
            done = 1
        for attempt in attempts:
            try:
                found = attempt()
            except CacheError as error:
                check_text(error)
            else:
                require(not isinstance(found, bytes) or found == content, "another object was loaded")
        try:
            build.files(here)
        except ValueError as error:
            check_text(error)
        return bool(done)

    return read


def cache_reader(where: Path) -> Reader:
    from cute_ops.aot import build
    from cute_ops.calls import manifest
    from cute_ops.jit import cache
    from cute_ops.jit.target import parse

    os.environ["CUTE_OPS_CACHE_DIR"] = str(where / "cache")
    (where / "cache").mkdir(mode=0o700)
    (call,) = manifest.parse("rmsnorm x:bfloat16[*,4096] weight:float32[4096]")
    variant, content = build.variant_of(call, parse("sm_90a")), b"\x7fELF" + bytes(200)
    built = where / f"{variant.symbol}.so"
    built.write_bytes(content)
    path = cache._store(where / "cache", variant, built, 1.0)
    require(path is not None, "the entry cannot be written")
    record = Path(str(path)).with_suffix(".json")
    valid = record.read_bytes()

    def read(rng: random.Random, elsewhere: Callable[[], None]) -> bool:
        record.write_bytes(change(rng, valid))
        Path(str(path)).write_bytes(content if rng.randrange(4) else change_bytes(rng, content))
        found = cache.read(variant)
        require(found in (None, content), "another object was read")
        require(len(cache.entries()) <= 1, "more entries than files")
        for entry, _, _ in cache.entries():
            entry.describe()
        return found is not None

    return read


def export_reader(where: Path) -> Reader:
    import jax
    import jax.numpy as jnp

    import cute_ops_jax
    from cute_ops.errors import CacheError

    here = where / "program"
    jax.config.update("jax_traceback_in_locations_limit", 0)  # a case is the same one again
    cute_ops_jax.export(here, lambda x: jnp.sin(x) @ x.T, jax.ShapeDtypeStruct((3, 5), "float32"), platforms="cpu",
                        vjp_order=1)  # fmt: skip
    valid, program = (here / "program.json").read_bytes(), (here / "any.jax").read_bytes()

    def read(rng: random.Random, elsewhere: Callable[[], None]) -> bool:
        data, record = program, valid
        if rng.randrange(3):
            record = change(rng, valid)
        else:  # a program of other bytes, with its checksum
            data = change_bytes(rng, program)
            checksums = (hashlib.sha256(text).hexdigest().encode() for text in (program, data))
            record = valid.replace(*checksums)
            elsewhere()
        (here / "program.json").write_bytes(record)
        (here / "any.jax").write_bytes(data)
        try:
            require(callable(cute_ops_jax.load(here)), "no function")
        except CacheError as error:
            check_text(error)
            return False
        return True

    return read


def expression_reader(where: Path) -> Reader:
    from cute_ops.expressions import parse, text_of
    from cute_ops.expressions.graph import MOST_DEPTH, MOST_NODES

    text = "e1(t,r,2t,c?) add 0 1; less 2[:n] 4; where 3 0.5 -1e-06; logical_and 3 5; max 4; add 4 7; mean 0 -> 8 2[n:]"
    letters = "".join(sorted({*text, *"45"}))

    def read(rng: random.Random, elsewhere: Callable[[], None]) -> bool:
        given = text
        for _ in range(rng.choice((1, 1, 2, 3))):
            at, word = rng.randrange(len(given)), rng.choice(WORDS if rng.randrange(3) == 0 else letters)
            given = given[:at] + word + given[at + rng.randrange(2) :]
        if rng.randrange(50) == 0:  # as large as it may be, and larger
            count = rng.choice((MOST_DEPTH, MOST_NODES)) - rng.randrange(3)
            given = f"e1(t) {'; '.join(f'add {i} {i}' for i in range(count))} -> {count}"
        try:
            expression = parse(given)
        except ValueError as error:
            check_text(error)
            return False
        require(text_of(expression) == given, f"{given!r} is read as {text_of(expression)!r}")
        return True

    return read


READERS = {
    "expression": expression_reader, "manifest": manifest_reader, "bundle": bundle_reader, "tuning": tuning_reader,
    "export": export_reader, "cache": cache_reader,
}  # fmt: skip


class Wrong(Exception):
    """A reader took what it should not have."""


def require(condition: bool, text: str) -> None:
    if not condition:
        raise Wrong(text)


def check_text(error: Exception) -> None:
    """An error says something, at a length that people read."""
    require(0 < len(str(error)) < 5000, f"an error of {len(str(error))} characters")


# --- running -------------------------------------------------------------------------------------------------------


def serve(parser: str, seed: int, first: int, most: int, seconds: float, state: Path | None) -> None:
    """Run cases up to number ``most``; lines on stdout count them, and each fault has one. ``state`` holds the number
    of the present case.
    """
    logging.disable(logging.CRITICAL)
    where = Path(tempfile.mkdtemp(prefix="cute_ops-fuzz-"))
    present = os.open(state, os.O_WRONLY) if state else None

    def elsewhere() -> None:
        if present is not None:
            os.pwrite(present, b"*", 20)

    try:
        read, number, accepted, told = READERS[parser](where), first, 0, 0.0
        end = time.monotonic() + seconds
        while number == first or (number < most and time.monotonic() < end):
            if present is not None:
                os.pwrite(present, f"{number:20d} ".encode(), 0)
            try:
                accepted += read(random.Random(f"{seed}/{number}"), elsewhere)
            except Exception:  # which is what this program looks for
                print(json.dumps({"fault": number, "text": traceback.format_exc()[-3000:]}), flush=True)
            number += 1
            if time.monotonic() - told > 1:
                told = time.monotonic()
                print(json.dumps({"done": number, "accepted": accepted}), flush=True)
        print(json.dumps({"done": number, "accepted": accepted}), flush=True)
    finally:
        shutil.rmtree(where, ignore_errors=True)


def fuzz(
    parser: str, seed: int, most: int, seconds: float, hangs: float, log: Callable[[str], None]
) -> tuple[int, int, list[str], list[str]]:
    """Run so many cases, or for so long; returns their number, how many were read, the faults, and those of other
    readers.
    """
    faults, apart = list[str](), list[str]()
    number = accepted = 0
    end = time.monotonic() + seconds
    while number == 0 or (number < most and time.monotonic() < end and len(faults) <= 20):
        with tempfile.TemporaryDirectory() as folder:
            state, errors = Path(folder, "state"), Path(folder, "errors")
            state.touch()
            command = [
                sys.executable, __file__, "--parser", parser, "--seed", str(seed), "--first", str(number),
                "--cases", str(most), "--seconds", str(max(end - time.monotonic(), 0)), "--state", str(state),
            ]  # fmt: skip
            counts = {"done": number, "accepted": 0}
            with errors.open("w") as said:
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
                killed = _follow(process, counts, faults, parser, hangs, log)
            number = counts["done"]
            if killed or process.returncode:
                last = int(state.read_text()[:20] or number)
                how = f"no answer in {hangs:.0f} s" if killed else f"exit code {process.returncode}"
                text = f"case {last}: {how}\n{errors.read_text(errors='replace')[-2000:]}"
                (apart if state.read_text().endswith("*") else faults).append(text)
                number = last + 1
            accepted += counts["accepted"]
    return number, accepted, faults, apart


def _follow(
    process: subprocess.Popen[str],
    counts: dict[str, int],
    faults: list[str],
    parser: str,
    hangs: float,
    log: Callable[[str], None],
) -> bool:
    """Read a process's lines to the end; True where it had to be killed."""
    if process.stdout is None:
        raise RuntimeError("started without a pipe")
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(hangs):
            line = process.stdout.readline()
            if not line:
                process.wait()
                return False
            said = json.loads(line)
            if "fault" in said:
                faults.append(f"case {said['fault']}: {said['text']}")
            else:
                counts.update(said)
            log(f"{parser}: {counts['done']} cases, {len(faults)} faults")
    process.kill()
    process.wait()
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parser", choices=READERS, action="append", help="which; repeat. Default: all")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each of them (10)")
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="at most so many for each of them (no limit)")
    parser.add_argument("--hangs", type=float, default=20.0, help="seconds without an answer that are a fault (20)")
    parser.add_argument("--seed", type=int, default=0, help="other cases (0)")
    parser.add_argument("--case", type=int, help="run this case of a parser and a seed only, in this process")
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case is not None:
        for name in given.parser or READERS:
            serve(name, given.seed, given.case, given.case + 1, 0.0, None)
        return 0
    if given.first is not None:
        serve(given.parser[0], given.seed, given.first, given.cases, given.seconds, given.state)
        return 0
    failed = 0
    for name in given.parser or READERS:
        end = "\r" if sys.stderr.isatty() else "\n"
        shown = [0.0]

        def log(text: str, end: str = end, shown: list[float] = shown) -> None:
            if end == "\r" or time.monotonic() - shown[0] > 60:
                shown[0] = time.monotonic()
                print(text, end=end, file=sys.stderr, flush=True)

        cases, accepted, faults, apart = fuzz(name, given.seed, given.cases, given.seconds, given.hangs, log)
        also = f"; {len(apart)} in somebody else's reader" if apart else ""
        print(f"{name}: {cases} cases, {accepted} read in spite of them, {len(faults)} faults{also}", flush=True)
        for fault in faults + apart:
            print(fault, flush=True)
        failed += len(faults)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
