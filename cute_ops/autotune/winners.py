"""Which tile a call runs with: the heuristic's, or one that was measured to be faster and remembered.

Winners are remembered by what a heuristic looks at, op, dtypes, alignments, compile-time dims, attributes and SM, and
by what the heuristic says there: when it changes, or the kernel, what was measured is forgotten. They are looked for in
the bundles of ``CUTE_OPS_BUNDLE``, then in the cache folder, then among those that this package ships. A process
decides once for each class of calls, so that the bits of a row stay what they are while it runs. The tile is part of
a variant, and so of the name of its kernel: no cache can serve one for another.

``CUTE_OPS_TUNE=0`` turns this off; ``CUTE_OPS_TUNE=1`` measures what is not remembered, on the first call.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from cute_ops.config import Config, Problem
from cute_ops.errors import CacheError
from cute_ops.files import cache_dir, file_lock, json_schema
from cute_ops.jit import source_digest
from cute_ops.op import Op

log = logging.getLogger("cute_ops")
FORMAT, NAME = 1, "tuning.json"
WINNER = {"call": str, "heuristic": {str: int}, "tile": {str: int}}
SHIPPED = Path(__file__).parent / "shipped"
# Up to so many rows a power of two of them is a class of its own, where an op's tile may depend on rows at all.
FEW_ROWS = 1024
LOCK_SECONDS = 10.0  # whoever writes the file for longer has stopped
Items = tuple[tuple[str, int], ...]
Key = tuple[str, Items]
Winners = Mapping[Key, "Winner"]

_lock = file_lock.between_threads(threading.RLock)
_decided: dict[Key, dict[str, int]] = {}
_planned: dict[str, set[Key]] = {}  # by symbol: the classes of calls that run this kernel
_stores: list[Winners] | None = None


class Winner(NamedTuple):
    """The tile that a class of calls runs fastest with; ``measured`` says how that was found, for people."""

    call: str
    heuristic: Config
    tile: Config
    measured: Mapping[str, Any] = {}

    @property
    def key(self) -> Key:
        return self.call, items(self.heuristic)


def items(tile: Config) -> Items:
    return tuple(sorted(tile.items()))


def class_of(op: Op, problem: Problem) -> str:
    """The class of a call, in words: ``rmsnorm sm_90a:132 x:bfloat16/16 out:bfloat16/16 n=4096``.

    An op whose kernel is none of ours is named with it. A tensor's number is the alignment of its rows in bytes.
    Attributes are there where they differ from their defaults, of numbers only whether they are zero. Rows are there in
    ops whose tiles may depend on them.
    """
    # Another's op may have the name of one of ours, and would run with its tile.
    own = op.kernel.startswith("cute_ops.kernels.")
    words = [op.name if own else f"{op.name}({op.kernel})", f"{problem.arch}:{problem.sm_count}"]
    words += [f"{name}:{dtype}/{problem.aligns[name]}" for name, dtype in problem.dtypes.items()]
    words += [f"{name}={problem.dims[name]}" for name in op.static]
    for name, value in problem.attrs.items():
        default = op.attrs[name]
        if isinstance(default, float):
            words += [f"{name}{'=' if value == 0 else '!='}0"] if (value == 0) != (default == 0) else []
        elif value != default:
            words.append(f"{name}={json.dumps(value)}".replace(" ", "\\u0020"))
    if op.space and op.space.by_rows:
        words.append(
            f"rows<={1 << max(problem.m - 1, 0).bit_length()}" if problem.m <= FEW_ROWS else f"rows>{FEW_ROWS}"
        )
    return " ".join(words)


def choose(op: Op, problem: Problem, heuristic: Config, measure: Callable[[], Config] | None = None) -> Config:
    """The tile to run a call with.

    Args:
        measure: finds the fastest one now; called where none is remembered, for the first call of a class.
    """
    if op.space is None:
        return heuristic
    key = class_of(op, problem), items(heuristic)
    decided = _decided.get(key)
    if decided is not None:
        return decided
    with _lock:
        if key not in _decided:
            mode = os.environ.get("CUTE_OPS_TUNE", "")
            tile = None if mode == "0" else remembered(op, problem, heuristic, key)
            if tile is None and measure is not None and mode == "1":
                tile = measure()
            _decided[key] = dict(heuristic if tile is None else tile)
        return _decided[key]


def remembered(op: Op, problem: Problem, heuristic: Config, key: Key, anew: bool = False) -> Config | None:
    """The tile that was measured for a class of calls; None where none was, or the op no longer proposes it.

    Args:
        anew: look into the cache folder again: another process may just have measured.
    """
    for winners in [_read_folder()] if anew else stores():
        winner = winners.get(key)
        if winner is None or op.space is None:
            continue
        if winner.measured.get("sources", sources_of(op)) != sources_of(op):
            log.info("tuned tile of %s was measured with another kernel than is here", winner.call)
            continue
        if winner.tile == heuristic or dict(winner.tile) in op.space.others(problem, heuristic):
            return winner.tile
        log.info("tuned tile %s of %s is no candidate any more", dict(winner.tile), winner.call)
    return None


def sources_of(op: Op) -> str:
    """Names the state of a kernel's own sources: another one is measured anew."""
    return source_digest.digest(op.kernel, op.sources)[:16]


def note(symbol: str, op: Op, problem: Problem, heuristic: Config) -> None:
    """Remember which class of calls runs a kernel, for bundles that it may end up in."""
    if op.space is not None:
        _planned.setdefault(symbol, set()).add((class_of(op, problem), items(heuristic)))


def behind(symbols: Iterable[str]) -> list[Winner]:
    """What this process decided for the calls that run these kernels: who is to find them must decide the same."""
    keys = sorted({key for symbol in symbols for key in _planned.get(symbol, ()) if key in _decided})
    return [Winner(call, dict(heuristic), _decided[call, heuristic]) for call, heuristic in keys]


@contextmanager
def as_shipped() -> Iterator[None]:
    """Within, decide by nothing but the package's own winners, as a machine does where nothing was measured."""
    global _decided, _stores
    with _lock:
        before = _decided, _stores
        _decided, _stores = {}, [_read_shipped()]
        try:
            yield
        finally:
            _decided, _stores = before


def stores() -> list[Winners]:
    """All that is remembered, the first to ask first; read once."""
    global _stores
    with _lock:
        if _stores is None:
            from cute_ops.jit import bundle

            _stores = [*map(_read_bundle, bundle.named()), _read_folder(), _read_shipped()]
        return _stores


def forget() -> None:
    """Decide anew."""
    global _stores
    with _lock:
        _stores = None
        _decided.clear()
        _planned.clear()


def remember(winners: Iterable[Winner], path: Path | None = None) -> Path:
    """Add winners to the cache folder's file, or another one; those of the same class are replaced.

    Raises:
        CacheError: the folder cannot be trusted or written, or the file is of a newer version of cute_ops.
    """
    global _stores
    where = path or cache_dir.folder() / NAME
    with cache_dir.locked(cache_dir.folder(), "tuning", LOCK_SECONDS) as usable:
        if not usable and path is None:
            raise CacheError(f"cute_ops: {where} cannot be written: what was measured is not kept")
        known = _known(where)
        known.update((winner.key, winner) for winner in winners)
        try:
            cache_dir.sweep(where.parent)
            cache_dir.write_whole(
                where, dump(known.values()).encode(), 0o600 if path is None else 0o644
            )  # to be shipped
        except OSError as error:
            raise CacheError(f"cute_ops: {where} cannot be written ({error}): what was measured is not kept") from error
    _stores = None
    return where


def _known(where: Path) -> dict[Key, Winner]:
    """What is in a file that is to be written anew. One that cannot be read is kept under another name."""
    if where.is_symlink() or (where.exists() and not where.is_file()):
        kind = "a link: what was measured is not kept; name the file that it leads to"
        raise CacheError(f"cute_ops: {where} is {kind if where.is_symlink() else 'no file: name another one'}")
    try:
        return parse(where.read_bytes())
    except FileNotFoundError:
        return {}
    except NewerFormat as error:
        raise CacheError(
            f"cute_ops: {where} is of another version of cute_ops ({error}): what was measured is not kept; move the "
            "file away, or use that version"
        ) from error
    except (OSError, ValueError) as error:
        kept = where.with_name(f"{where.name}.damaged")
        log.warning("tuning file %s cannot be read (%s): it is kept as %s", where, error, kept.name)
        with suppress(FileNotFoundError):
            where.replace(kept)
        return {}


def dump(winners: Iterable[Winner]) -> str:
    """A file of winners as text, one a line, sorted."""
    lines = [
        json.dumps({"call": w.call, "heuristic": dict(items(w.heuristic)), "tile": dict(items(w.tile)), **w.measured})
        for w in sorted(winners, key=lambda w: w.key)
    ]
    return f'{{"format": {FORMAT}, "winners": [\n' + ",\n".join(lines) + "\n]}\n"


class NewerFormat(ValueError):
    """A file is sound, but of a format that this version does not read."""


def parse(text: str | bytes) -> dict[Key, Winner]:
    """The winners of a file's text.

    Raises:
        ValueError: it is no such file.
        NewerFormat: another version wrote it.
    """
    raw = json_schema.parse(text, {"format": int})
    if raw["format"] != FORMAT:
        raise NewerFormat(f"it has format {raw['format']}, this version of cute_ops reads {FORMAT}")
    json_schema.check(raw, {"winners": [WINNER]})
    found = {}
    for entry in raw["winners"]:
        rest = dict(entry)
        winner = Winner(rest.pop("call"), rest.pop("heuristic"), rest.pop("tile"), rest)
        found[winner.key] = winner
    return found


def read(path: Path) -> Winners:
    """The winners of a file; none, and one sentence in the log, where it cannot be used."""
    return _parsed(path, path.read_bytes)


def _read_folder() -> Winners:
    """Those of the cache folder, if only this user could have written them."""
    where = cache_dir.folder()

    def content() -> bytes:
        with cache_dir.opened(where) as folder:
            return folder.read(NAME)

    return _parsed(where / NAME, content)


def _parsed(path: Path, content: Callable[[], bytes]) -> Winners:
    try:
        if path.is_symlink():
            raise ValueError("it is a link")
        return parse(content())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, CacheError) as error:
        log.warning("tuning file %s is ignored: %s", path, error)
        return {}


def _read_bundle(where: Path) -> Winners:
    from cute_ops.jit import bundle

    try:
        text = bundle.Bundle(where).text(NAME)
        return parse(text) if text else {}
    except (CacheError, ValueError) as error:
        log.warning("tuning of bundle %s is ignored: %s", where, error)
        return {}


def _read_shipped() -> Winners:
    found: dict[Key, Winner] = {}
    for path in sorted(SHIPPED.iterdir()) if SHIPPED.is_dir() else ():  # a glob takes longer than reading them
        if path.suffix == ".json":
            found.update(read(path))
    return found
