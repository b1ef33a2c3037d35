"""Winners, the configs that were measured to be the fastest for a class of calls, and the files that keep them.

A winner's key is what a heuristic looks at (op, dtypes, alignments, compile-time dims, attributes and SM) and the
heuristic's config: when the heuristic or the kernel changes, the measurement no longer counts. Winners are
read from the bundles of ``CUTE_OPS_BUNDLE``, then from the cache folder, then from this package. The config is part of
a variant, and so of the name of its kernel: no cache can serve one for another.
:mod:`cute_ops.autotune.dispatch` decides what a process runs with.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cute_ops import env
from cute_ops.autotune.space import NUMBERS, objection
from cute_ops.declaration.config import Config, Problem
from cute_ops.declaration.op import Op
from cute_ops.errors import CacheError
from cute_ops.files import cache_dir, file_lock, json_schema
from cute_ops.jit import bundle, source_digest

log = logging.getLogger("cute_ops")
FORMAT, NAME = 2, "tuning.json"
CONFIG: dict[Any, Any] = {str: json_schema.Either(int, str), **dict.fromkeys(NUMBERS, int)}
WINNER = {"call": str, "heuristic": CONFIG, "config": CONFIG}
SHIPPED = Path(__file__).parent / "shipped"
LOCK_SECONDS = 10.0  # a process that holds the lock for longer is taken to hang
Items = tuple[tuple[str, int | str], ...]
Key = tuple[str, Items]
Winners = Mapping[Key, "Winner"]

_lock = file_lock.between_threads(threading.RLock)
_stores: list[Winners] | None = None


class Winner(NamedTuple):
    """The fastest config of a class of calls; ``measured`` is text for people on how it was measured."""

    call: str
    heuristic: Config
    config: Config
    measured: Mapping[str, Any] = {}

    @property
    def key(self) -> Key:
        return self.call, items(self.heuristic)


def items(config: Config) -> Items:
    return tuple(sorted(config.items()))


def class_of(op: Op, problem: Problem) -> str:
    """The class of a call, in words: ``rmsnorm sm_90a:132 x:bfloat16/16 out:bfloat16/16 n=4096``.

    An op whose kernel is not ours is named together with its kernel. The number after a tensor's dtype is the alignment
    of its rows in bytes; ``w|k`` says that k is contiguous in w, if several dims may be. Attributes appear if they
    differ from their defaults, numbers only by whether they are zero. Dims that are not static appear by their bucket,
    ``rows<=64 k>4096``, if the op's space has buckets for them.
    """
    # A user's op may have the name of one of ours, and must not run with its config.
    own = op.kernel.startswith("cute_ops.kernels.")
    words = [op.name if own else f"{op.name}({op.kernel})", f"{problem.arch}:{problem.sm_count}"]
    words += [f"{name}:{dtype}/{problem.aligns[name]}" for name, dtype in problem.dtypes.items()]
    words += [f"{name}|{dim}" for name, dim in problem.contiguous.items()]
    words += [f"{name}={problem.dims[name]}" for name in op.static if name in problem.dims]
    for name, value in problem.attrs.items():
        default = op.attrs[name]
        if isinstance(default, float):
            words += [f"{name}{'=' if value == 0 else '!='}0"] if (value == 0) != (default == 0) else []
        elif value != default:
            words.append(f"{name}={json.dumps(value)}".replace(" ", "\\u0020"))
    rows = next((t.rows for t in (*op.outputs.values(), *op.inputs.values()) if t.rows), None)
    for name, sizes in (op.space.buckets if op.space else {}).items():
        fits = [f"<={size}" for size in sizes if problem.size(name) <= size]
        words.append(f"{'rows' if name == rows else name}{fits[0] if fits else f'>{sizes[-1]}'}")
    return " ".join(words)


def key_of(op: Op, problem: Problem, heuristic: Config) -> Key:
    """The key of a call's winner."""
    return class_of(op, problem), items(heuristic)


def remembered(op: Op, problem: Problem, heuristic: Config, key: Key, anew: bool = False) -> Config | None:
    """The config that was measured for a class of calls; None if there is none, if the op no longer proposes it, or if
    it cannot run.

    Args:
        anew: whether to read the cache folder again, since another process may just have measured.
    """
    for winners in [_read_folder(cache_dir.folder())] if anew else stores():
        winner = winners.get(key)
        if winner is None or op.space is None:
            continue
        if winner.measured.get("sources", sources_of(op)) != sources_of(op):
            log.info("the tuned config of %s is not used: it was measured with another kernel", winner.call)
            continue
        if winner.config == heuristic:
            return winner.config
        config, reason = dict(winner.config), "it is no longer in its search space"
        if config in op.space.others(problem, heuristic, op.name):
            reason = objection(op.space, problem, config, op.name)
        if not reason:
            return winner.config
        log.info("the tuned config %s of %s is not used: %s", config, winner.call, reason)
    return None


def sources_of(op: Op) -> str:
    """The digest of a kernel's own sources; a changed kernel is measured anew."""
    return source_digest.digest(op.kernel, op.sources)[:16]


@contextmanager
def only_shipped() -> Iterator[None]:
    """Within the block, only this package's own winners are used."""
    global _stores
    with _lock:
        before, _stores = _stores, [_read_shipped()]
        try:
            yield
        finally:
            _stores = before


def stores() -> list[Winners]:
    """All files' winners, in the order in which they are searched; read once."""
    global _stores
    with _lock:
        if _stores is None:
            where, bundles = cache_dir.folder(), env.BUNDLE.read()
            _stores = [*map(_read_bundle, bundles), _read_folder(where), _read_shipped()]
        return _stores


def forget() -> None:
    """Forget the files: they are read anew when they are next needed."""
    global _stores
    with _lock:
        _stores = None


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
            mode = 0o600 if path is None else 0o644  # to be shipped
            cache_dir.write_whole(where.parent, {where.name: dump(known.values()).encode()}, mode)
        except OSError as error:
            raise CacheError(f"cute_ops: {where} cannot be written ({error}): what was measured is not kept") from error
    _stores = None
    return where


def _known(where: Path) -> dict[Key, Winner]:
    """The winners of a file that is about to be rewritten. A file that cannot be read is renamed and kept."""
    if where.is_symlink() or (where.exists() and not where.is_file()):
        kind = "a link: what was measured is not kept; name the file that it leads to"
        raise CacheError(f"cute_ops: {where} is {kind if where.is_symlink() else 'no file: name another one'}")
    try:
        return parse(where.read_bytes())
    except FileNotFoundError:
        return {}
    except NewerFormat as error:
        raise CacheError(
            f"cute_ops: {where} is of a newer version of cute_ops ({error}): what was measured is not kept; move the "
            "file away, or use that version"
        ) from error
    except (OSError, ValueError) as error:
        kept = where.with_name(f"{where.name}.damaged")
        log.warning("tuning file %s cannot be read (%s): it is kept as %s", where, error, kept.name)
        with suppress(FileNotFoundError):
            where.replace(kept)
        return {}


def dump(winners: Iterable[Winner]) -> str:
    """A file of winners as text, sorted, one winner per line."""
    lines = []
    for w in sorted(winners, key=lambda w: w.key):
        configs = {"heuristic": dict(items(w.heuristic)), "config": dict(items(w.config))}
        lines.append(json.dumps({"call": w.call, **configs, **w.measured}))
    return f'{{"format": {FORMAT}, "winners": [\n' + ",\n".join(lines) + "\n]}\n"


class NewerFormat(ValueError):
    """A valid file, but of a format that only a newer version reads."""


def parse(text: str | bytes) -> dict[Key, Winner]:
    """The winners of a file's text.

    Raises:
        ValueError: it is not such a file.
        NewerFormat: a newer version wrote it.
    """
    raw = json_schema.parse(text, {"format": int})
    if raw["format"] != FORMAT:
        kind = NewerFormat if raw["format"] > FORMAT else ValueError
        raise kind(f"it has format {raw['format']}, this version of cute_ops reads {FORMAT}")
    json_schema.check(raw, {"winners": [WINNER]})
    found = {}
    for entry in raw["winners"]:
        rest = dict(entry)
        winner = Winner(rest.pop("call"), rest.pop("heuristic"), rest.pop("config"), rest)
        found[winner.key] = winner
    return found


def read(path: Path) -> Winners:
    """The winners of a file; none, and one sentence in the log, if it cannot be used."""
    return _parsed(path, path.read_bytes)


def _read_folder(where: Path) -> Winners:
    """The winners of the cache folder, if only this user could have written them."""
    return _parsed(where / NAME, partial(cache_dir.read, where, NAME))


def _parsed(path: Path, content: Callable[[], bytes]) -> Winners:
    if not os.path.lexists(path):
        return {}
    try:
        if path.is_symlink():
            raise ValueError("it is a link")
        return parse(content())
    except (OSError, ValueError, CacheError) as error:
        log.warning("tuning file %s is ignored: %s", path, error)
        return {}


def _read_bundle(where: Path) -> Winners:
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
