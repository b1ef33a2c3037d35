"""Bundles: read-only folders of compiled kernels for several targets, which are shipped and run without the compiler.

``bundle.json`` lists kernels, targets, versions and a checksum of every other file. ``kernels/`` holds the objects,
``manifest.txt`` the calls, ``licenses/`` the licenses of the compiled code. ``tuning.json`` holds the configs that the
kernels were built with, because a program that loads the bundle must choose the same ones.
:mod:`cute_ops.aot.build` writes them. A bundle is served where ``CUTE_OPS_BUNDLE`` names it, or from an
installed package with an entry point in the group ``cute_ops.bundles`` that names the package that holds it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cute_ops.errors import CacheError
from cute_ops.files import file_lock, json_schema, ownership
from cute_ops.files.ownership import Folder
from cute_ops.jit import loader, source_digest, toolchain
from cute_ops.jit.variant import Variant
from cute_ops.version import __version__

log = logging.getLogger("cute_ops")
FORMAT = 1
GROUP = "cute_ops.bundles"
_LONGEST = 2000  # characters of an error's text, which may repeat wrong data
RECORD = {
    "format": int, "platform": str, "versions": {str: str}, "targets": [str], "kernels": {str: object},
    "files": {str: str},
}  # fmt: skip
KERNEL = {"sha256": str, "bytes": int, "variant": {"kernel": str, "arch": str, "sources": str}}
T = TypeVar("T")

_lock = file_lock.between_threads()
_open: dict[str, list[Bundle | CacheError]] = {}


class Misfit(CacheError):
    """An intact bundle that was built for another machine, with other versions or from other kernel sources."""


class Bundle:
    """A bundle's folder, its record read and checked; both are read anew after the folder was replaced.

    Args:
        installed: whether a package brought it, see :class:`cute_ops.files.ownership.Folder`.

    Raises:
        CacheError: it is not a bundle, or others can write it.
        Misfit: it was built for another machine or other versions.
    """

    def __init__(self, where: Path, installed: bool = False) -> None:
        self.where, self._installed = where, installed
        with suppress(FileNotFoundError):  # made absolute: a program may change its working directory, or delete it
            self.where = where.absolute()
        # With the identity of the folder that it was read from.
        self._record: tuple[tuple[int, int], Mapping[str, Any]] = (0, 0), {}
        self._in_one_state(lambda folder: None)

    @property
    def targets(self) -> Sequence[str]:
        """The targets that it was built for."""
        found: Sequence[str] = self._record[1]["targets"]
        return found

    @property
    def versions(self) -> Mapping[str, str]:
        """The versions of the packages that it was built with."""
        found: Mapping[str, str] = self._record[1]["versions"]
        return found

    @property
    def kernels(self) -> Mapping[str, Mapping[str, Any]]:
        """Checksum, size and variant by symbol."""
        found: Mapping[str, Mapping[str, Any]] = self._record[1]["kernels"]
        return found

    def load(self, variant: Variant) -> Callable[..., Any] | None:
        """A variant's function, after its object's checksum was compared; None if the bundle does not hold it.

        Raises:
            CacheError: the object is damaged.
            Misfit: the bundle is of another target or of other kernel sources.
        """

        def load(folder: Folder) -> Callable[..., Any] | None:
            if variant.symbol not in self.kernels:
                self._check_fits(variant)
                return None
            record, name = self._kernel(variant.symbol), file_of(variant.symbol)
            self._verify(folder, name, record["sha256"])
            if record["variant"] != json.loads(variant.text):
                raise self._refusal(f"holds another kernel under the name {variant.symbol}")
            return loader.load(self.where / name, variant.symbol, folder.path(name))

        return self._in_one_state(load)

    def text(self, name: str) -> str | None:
        """One of its files, after its checksum was compared; None if it has no such file.

        Raises:
            CacheError: the file is damaged.
        """

        def read(folder: Folder) -> str | None:
            files = self._record[1]["files"]
            return self._verify(folder, name, files[name]).decode() if name in files else None

        return self._in_one_state(read)

    def verify(self) -> int:
        """Compare every checksum; returns the number of kernels.

        Raises:
            CacheError: a file is damaged or missing.
        """

        def compare(folder: Folder) -> int:
            for name, digest in self._record[1]["files"].items():
                self._verify(folder, name, digest)
            for symbol in self.kernels:
                self._verify(folder, file_of(symbol), self._kernel(symbol)["sha256"])
                self.variant(symbol)
            return len(self.kernels)

        return self._in_one_state(compare)

    def variant(self, symbol: str) -> Variant:
        """The variant of one of its kernels.

        Raises:
            CacheError: the record does not hold it.
        """
        try:
            return Variant.from_raw(self._kernel(symbol)["variant"])
        except ValueError as error:
            raise self._refusal(f"has a bundle.json that cannot be read ({symbol}: {error})") from error

    def changed(self) -> list[str]:
        """The kernels, ``module:Class``, whose sources on this machine differ from those that it was built from.

        Raises:
            CacheError: the record does not hold the variant of a kernel.
        """
        variants = {(v.kernel, v.declared, v.sources): v for v in map(self.variant, self.kernels)}.values()
        return sorted({v.kernel for v in variants if _sources_here(v) not in (None, v.sources)})

    def _in_one_state(self, read: Callable[[Folder], T]) -> T:
        def once(folder: Folder) -> T:
            if folder.identity != self._record[0]:
                self._record = folder.identity, self._read(folder)
            return read(folder)

        try:
            return ownership.read_one_state(self.where, once, self._installed)
        except ownership.Untrusted as error:
            raise self._refusal(
                f"{error}; it holds native code: put it into a new folder that only you or root can change, from a "
                "source that you trust"
            ) from error
        except FileNotFoundError:
            raise self._refusal("has no bundle.json") from None
        except OSError as error:
            raise self._refusal(f"cannot be read ({error})") from error

    def _read(self, folder: Folder) -> Mapping[str, Any]:
        """The record, after a check that it fits this machine."""
        data = folder.read("bundle.json")
        try:
            record: Mapping[str, Any] = json_schema.parse(data, {"format": int})
            if record["format"] != FORMAT:
                raise self._misfit(f"has format {record['format']}, this version of cute_ops reads {FORMAT}")
            json_schema.check(record, RECORD)
        except ValueError as error:
            raise self._refusal(f"has a bundle.json that cannot be read ({error})") from error
        if record["platform"] != this_platform():
            raise self._misfit(f"was built for {record['platform']}, this is {this_platform()}")
        for name, here in versions().items():
            built = record["versions"].get(name)
            if built != here:
                raise self._misfit(f"was built with {name} {built}, here is {here or 'none'}: build it again")
        return record

    def _check_fits(self, variant: Variant) -> None:
        arches = {target.partition(":")[0] for target in self.targets}
        if variant.arch not in arches:
            raise self._misfit(
                f"was built for {', '.join(self.targets)}, this GPU is {variant.arch}: build it again with "
                f"--arch {variant.arch}"
            )
        held = (self._kernel(symbol)["variant"] for symbol in self.kernels)
        known = {v["sources"] for v in held if (v["kernel"], v["arch"]) == (variant.kernel, variant.arch)}
        if known and variant.sources not in known:
            raise self._misfit(f"was built from other sources of {variant.kernel} than are here: build it again")

    def _kernel(self, symbol: str) -> Mapping[str, Any]:
        record = self.kernels[symbol]
        try:
            json_schema.check(record, KERNEL)
        except ValueError as error:
            raise self._refusal(f"has a bundle.json that cannot be read ({symbol}: {error})") from error
        return record

    def _verify(self, folder: Folder, name: str, digest: str) -> bytes:
        try:
            data = folder.read(name)
        except OSError as error:
            raise self._refusal(f"is damaged: {name}: {error.strerror}") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise self._refusal(f"is damaged: the checksum of {name.rpartition('/')[2]} does not match")
        return data

    def _refusal(self, problem: str) -> CacheError:
        return CacheError(f"cute_ops: bundle {self.where} {problem[:_LONGEST]}")

    def _misfit(self, problem: str) -> Misfit:
        return Misfit(f"cute_ops: bundle {self.where} {problem[:_LONGEST]}")


def _sources_here(variant: Variant) -> str | None:
    """The digest of a kernel's sources on this machine; None if they are not installed."""
    try:
        return source_digest.key(variant.kernel, variant.declared)
    except ImportError:
        return None


def file_of(symbol: str) -> str:
    """The path of a kernel's object in a bundle."""
    return f"kernels/{symbol}.so"


def load(variant: Variant, folders: Sequence[Path]) -> Callable[..., Any] | None:
    """The variant's function from the bundles in these folders, which ``CUTE_OPS_BUNDLE`` names.

    Raises:
        CacheError: one is damaged, or none of them fits.
    """
    where = os.pathsep.join(map(str, folders))
    function, refusals = _first(_opened(where, lambda: folders), variant)
    if damaged := [refusal for refusal in refusals if not isinstance(refusal, Misfit)]:
        raise damaged[0]
    if len(refusals) == len(folders):  # none of several fits this target
        raise refusals[0]
    if function is None:
        log.warning("%s does not hold %s: it is looked for in the cache, then compiled", where, variant.describe())
    return function


def load_installed(variant: Variant) -> Callable[..., Any] | None:
    """The variant's function from the bundles of installed packages. Damaged ones are logged; those that do not fit are
    logged if no other one has the variant.
    """
    function, refusals = _first(_opened("", lambda: [found.where for found in installed()]), variant)
    for refusal in refusals:
        if function is None or not isinstance(refusal, Misfit):
            log.warning("%s", refusal)
    return function


def _first(
    bundles: Iterable[Bundle | CacheError], variant: Variant
) -> tuple[Callable[..., Any] | None, list[CacheError]]:
    """The variant's function from the first bundle that has it, and why those before are refused."""
    refusals: list[CacheError] = []
    for bundle in bundles:
        try:
            if isinstance(bundle, CacheError):
                raise bundle
            if (function := bundle.load(variant)) is not None:
                return function, refusals
        except CacheError as error:
            refusals.append(error)
    return None, refusals


class Installed(NamedTuple):
    """The bundle of an installed package: its folder, and the entry point that names it."""

    where: Path
    entry: metadata.EntryPoint

    @property
    def package(self) -> str:
        """Name and version of the package. Reading them takes longer than finding the bundle."""
        dist = self.entry.dist
        return f"{dist.name} {dist.version}" if dist else self.entry.value


def installed() -> list[Installed]:
    """The bundles of installed packages; none of them is imported. An entry point of another distribution that names no
    package is logged and left out: a program must not fail because of what is installed beside it.
    """
    found = []
    try:
        entries = metadata.entry_points(group=GROUP)
    except Exception as error:  # metadata of any distribution may be broken in any way
        log.warning("no bundle of an installed package is used, since their entry points cannot be read: %s", error)
        return []
    for entry in entries:
        package, *rest = entry.value.split(".")
        try:
            spec = find_spec(package)
        except (ImportError, ValueError) as error:
            of = f" of {entry.dist.name}" if entry.dist else ""
            log.warning("the entry point %s = %r%s names no package: %s", entry.name, entry.value, of, error)
            continue
        folders = (spec.submodule_search_locations or ()) if spec else ()
        found += [Installed(Path(where, *rest), entry) for where in folders]
    return found


def forget() -> None:
    """Forget opened bundles: they are opened anew when they are next needed."""
    _open.clear()


def _opened(name: str, folders: Callable[[], Iterable[Path]]) -> list[Bundle | CacheError]:
    """Bundles, or why they are refused; ``name`` is the text that lists the folders, empty for installed ones."""
    with _lock:
        if name not in _open:
            _open[name] = [_attempt(where, installed=not name) for where in folders()]
        return _open[name]


def _attempt(where: Path, installed: bool) -> Bundle | CacheError:
    try:
        return Bundle(where, installed)
    except CacheError as error:
        return error


def versions() -> dict[str, str]:
    return {"cute-ops": __version__} | dict(zip((toolchain.DSL, toolchain.TVM_FFI), toolchain.versions(), strict=True))


def this_platform() -> str:
    return f"{sys.platform}-{platform.machine()}"
