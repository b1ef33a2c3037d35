"""Bundles: compiled kernels that are shipped, for several targets, read-only, without a compiler.

A bundle is a folder: ``bundle.json`` says what was built for what with which versions, and holds a checksum of every
other file; ``kernels/`` the objects; ``manifest.txt`` the calls; ``tuning.json`` the tiles they were built with, which
who loads the bundle must choose, too; ``licenses/`` those of what is in the objects.
:mod:`cute_ops.bundling` writes them. A bundle is served where ``CUTE_OPS_BUNDLE`` names it, or from an
installed package with an entry point in the group ``cute_ops.bundles`` that names the package that holds it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cute_ops import toolchain
from cute_ops.errors import CacheError
from cute_ops.variant import Variant

log = logging.getLogger("cute_ops")
FORMAT = 1
GROUP = "cute_ops.bundles"

_lock = threading.Lock()
_open: dict[str, list[Bundle | CacheError]] = {}


class Bundle:
    """A bundle's folder, its record read and checked.

    Args:
        installed: it lies among installed packages, whose code runs whoever of the group can write it: installers
            leave files as the user's umask says.

    Raises:
        CacheError: it is no bundle, others can write it, or it was built for another machine or other versions.
    """

    def __init__(self, where: Path, installed: bool = False) -> None:
        self.where = where
        self._others = stat.S_IWOTH if installed else stat.S_IWGRP | stat.S_IWOTH
        try:
            self._check_folder(where)
            self._check_file(where / "bundle.json")
            record = json.loads((where / "bundle.json").read_bytes())
            self.format, self.platform = record["format"], record["platform"]
            self.versions: Mapping[str, str] = record["versions"]
            self.targets: Sequence[str] = record["targets"]
            self.kernels: Mapping[str, Any] = record["kernels"]
            self.files: Mapping[str, str] = record["files"]
        except FileNotFoundError:
            raise self._refusal("has no bundle.json") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._refusal(f"has a bundle.json that cannot be read ({error})") from error
        if self.format != FORMAT:
            raise self._refusal(f"has format {self.format}, this version of cute_ops reads {FORMAT}")
        if self.platform != this_platform():
            raise self._refusal(f"was built for {self.platform}, this is {this_platform()}")
        for name, here in versions().items():
            built = self.versions.get(name)
            if built != here:
                raise self._refusal(f"was built with {name} {built}, here is {here or 'none'}: build it again")

    def find(self, variant: Variant) -> Path | None:
        """A variant's object, its checksum compared; None where the bundle has none for such a call.

        Raises:
            CacheError: the object is damaged, or the bundle is of another target or of other kernel sources.
        """
        record = self.kernels.get(variant.symbol)
        if record is None:
            self._check_fits(variant)
            return None
        if record["variant"] != json.loads(variant.to_json()):
            raise self._refusal(f"holds another kernel under the name {variant.symbol}")
        path = self.where / "kernels" / f"{variant.symbol}.so"
        self._verify(path, record["sha256"])
        return path

    def text(self, name: str) -> str | None:
        """One of its files, its checksum compared; None where there is none.

        Raises:
            CacheError: the file is damaged.
        """
        if name not in self.files:
            return None
        self._verify(self.where / name, self.files[name])
        return (self.where / name).read_text()

    def verify(self) -> int:
        """Compare every checksum; returns the number of kernels.

        Raises:
            CacheError: a file is damaged or missing.
        """
        for name, digest in self.files.items():
            self._verify(self.where / name, digest)
        for symbol, record in self.kernels.items():
            self._verify(self.where / "kernels" / f"{symbol}.so", record["sha256"])
        return len(self.kernels)

    def _check_fits(self, variant: Variant) -> None:
        arches = {target.partition(":")[0] for target in self.targets}
        if variant.arch not in arches:
            raise self._refusal(
                f"was built for {', '.join(self.targets)}, this GPU is {variant.arch}: build it again with "
                f"--arch {variant.arch}"
            )
        known = self._sources.get((variant.kernel, variant.arch))
        if known is not None and known != variant.sources:
            raise self._refusal(f"was built from other sources of {variant.kernel} than are here: build it again")

    @cached_property
    def _sources(self) -> dict[tuple[str, str], str]:
        variants = (record["variant"] for record in self.kernels.values())
        return {(v["kernel"], v["arch"]): v["sources"] for v in variants}

    def _verify(self, path: Path, digest: str) -> None:
        try:
            self._check_folder(path.parent)
            self._check_file(path)
            data = path.read_bytes()
        except OSError as error:
            raise self._refusal(f"is damaged: {path.name}: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise self._refusal(f"is damaged: the checksum of {path.name} does not match")

    def _check_folder(self, path: Path) -> None:
        status = path.stat()  # a link may lead to it
        if not stat.S_ISDIR(status.st_mode):
            raise self._refusal("is not a folder" if path == self.where else f"is damaged: {path.name} is not a folder")
        self._check_mode(path, status.st_mode)

    def _check_file(self, path: Path) -> None:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise self._refusal(f"is damaged: {path.name} is not a file")
        self._check_mode(path, status.st_mode)

    def _check_mode(self, path: Path, mode: int) -> None:
        if mode & self._others:
            raise self._refusal(
                f"holds native code, but others can write {path.name} (mode {stat.S_IMODE(mode):o}): "
                f"chmod -R go-w {self.where}"
            )

    def _refusal(self, problem: str) -> CacheError:
        return CacheError(f"cute_ops: bundle {self.where} {problem}")


def variant_of(record: Mapping[str, Any]) -> Variant:
    """The variant of one of a bundle's kernels."""
    return Variant.from_json(json.dumps(record["variant"]))


def find(variant: Variant) -> Path | None:
    """The variant's object in the bundles that ``CUTE_OPS_BUNDLE`` names.

    Raises:
        CacheError: none of them fits.
    """
    folders = named()
    if not folders:
        return None
    path, refusals = _search(os.environ["CUTE_OPS_BUNDLE"], named, variant)
    # One of several may be of another target; where none serves, the reason is worth an error.
    if path is None and refusals and len(refusals) == len(folders):
        raise refusals[0]
    if path is None:
        where = os.environ["CUTE_OPS_BUNDLE"]
        log.warning("%s does not hold %s: it is looked for in the cache, then compiled", where, variant.describe())
    return path


def named() -> list[Path]:
    """The folders that ``CUTE_OPS_BUNDLE`` names."""
    return [Path(part) for part in os.environ.get("CUTE_OPS_BUNDLE", "").split(os.pathsep) if part]


def find_installed(variant: Variant) -> Path | None:
    """The variant's object in the bundles of installed packages; those that do not fit say so in the log."""
    path, refusals = _search("", installed, variant)
    if path is None:
        for refusal in refusals:
            log.warning("%s", refusal)
    return path


def installed() -> list[Path]:
    """The folders of installed packages that are bundles; none of them is imported."""
    found = []
    for entry in metadata.entry_points(group=GROUP):
        package, *rest = entry.value.split(".")
        spec = find_spec(package)
        found += [Path(where, *rest) for where in (spec.submodule_search_locations or ())] if spec else []
    return found


def forget() -> None:
    """Open bundles anew when they are next asked for."""
    _open.clear()


def _search(name: str, folders: Callable[[], Iterable[Path]], variant: Variant) -> tuple[Path | None, list[CacheError]]:
    """The object, and why bundles were refused; ``name`` is what names the folders, empty for installed ones."""
    with _lock:
        if name not in _open:
            _open[name] = [_opened(where, installed=not name) for where in folders()]
    refusals = []
    for bundle in _open[name]:
        try:
            if isinstance(bundle, CacheError):
                raise bundle
            path = bundle.find(variant)
        except CacheError as error:
            refusals.append(error)
            continue
        if path is not None:
            return path, refusals
    return None, refusals


def _opened(where: Path, installed: bool) -> Bundle | CacheError:
    try:
        return Bundle(where, installed)
    except CacheError as error:
        return error


def versions() -> dict[str, str]:
    from cute_ops import __version__

    return {"cute-ops": __version__} | dict(zip((toolchain.DSL, toolchain.TVM_FFI), toolchain.versions(), strict=True))


def this_platform() -> str:
    return f"{sys.platform}-{platform.machine()}"
