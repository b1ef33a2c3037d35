"""Builds bundles (:mod:`cute_ops.jit.bundle`): compiles calls for targets, without a GPU.

If one kernel fails, nothing is written. The same manifest, targets and versions give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path

from cute_ops.autotune import dispatch, winners
from cute_ops.calls import manifest
from cute_ops.calls.manifest import Call
from cute_ops.declaration.binding import bind
from cute_ops.errors import CacheError
from cute_ops.files import cache_dir, folder_swap, json_schema, ownership
from cute_ops.jit import bundle, cache, toolchain
from cute_ops.jit.cache import Built
from cute_ops.jit.target import Target
from cute_ops.jit.variant import Variant

log = logging.getLogger("cute_ops")
_EPOCH = 315_532_800  # 1980, the first time that a zip file knows
_NOTICE = """\
What the licences of this folder are for

A file in kernels/ is the machine code of one kernel with the host code that launches it. NVIDIA's compiler,
nvidia-cutlass-dsl, generated both from the sources of cute-ops, or of the op's own package. A system's C compiler or
linker made it a library. It contains no library and no file of NVIDIA: libcute_dsl_runtime.so, through which it
reaches the CUDA driver, and TVM-FFI are loaded from the packages that are installed where it runs.

cute-ops            Apache-2.0, cute-ops-LICENSE.txt
TVM-FFI             Apache-2.0, apache-tvm-ffi-LICENSE.txt; the host code follows its calling convention
nvidia-cutlass-dsl  NVIDIA Software License Agreement, nvidia-cutlass-dsl-LICENSE.txt

NVIDIA's licence lets Python files of the compiler be distributed under conditions (1.1 d), and no other part of it
(2.2): there is none here. It does not say whether code that the compiler generated may be distributed. What is
developed with the compiler is for systems with NVIDIA GPUs (1.1), and its output must not be reverse engineered to
be translated for others (2.11).
"""


def build(
    calls: Sequence[Call],
    targets: Sequence[Target],
    where: Path,
    done: Callable[[Built], None] | None = None,
    skip: Callable[[str], None] = log.warning,
) -> list[Built]:
    """Compile calls for targets, without a GPU, and write the bundle; nothing is written where one fails.

    Args:
        done: called after every kernel.
        skip: called with a line of text on calls that a target has no kernel for.

    Returns:
        One entry per kernel; those with an error did not compile.

    Raises:
        CacheError: the folder holds something else, or the compile cache cannot be used.
        ValueError, TypeError: an op does not take such a call.
    """
    folder_swap.check_replaceable(where, files, "bundle")
    built = cache.build_all(variants_of(calls, targets, skip), done)
    there = {one.variant.symbol for one in built}
    # A program does not read the winners of an installed bundle, so the bundle has the kernels of our own configs, too.
    with dispatch.as_shipped():
        built += cache.build_all(v for v in variants_of(calls, targets, log.debug) if v.symbol not in there)
    if not any(one.error for one in built):
        write([one.variant for one in built], targets, where, calls)
    return built


def variant_of(call: Call, target: Target) -> Variant:
    """The kernel that a call runs on a target, with the config that a program on this machine would choose.

    Raises:
        ValueError, TypeError: the op does not take such a call.
        NotImplementedError: the target is older than the op's kernels.
    """
    bound = bind(call.op, call.inputs, call.attrs)
    return dispatch.foresee(bound, call.memory, target, fixed=not call.dynamic).variant


def runs_by_framework(call: Call, target: Target) -> bool:
    """Whether a call needs no kernel, because the framework computes its product faster."""
    op = call.op
    return bool(op.fallback) and dispatch.fallback(bind(op, call.inputs, call.attrs), call.memory, target) is not None


def variants_of(
    calls: Iterable[Call], targets: Iterable[Target], skip: Callable[[str], None] = log.warning
) -> list[Variant]:
    """The kernels that the calls run on the targets, without duplicates.

    Args:
        skip: called with a line of text on calls that one target has no kernel for, but another has.

    Raises:
        NotImplementedError: no target has a kernel for a call.
        ValueError, TypeError: an op does not take such a call.
    """
    targets, found = list(targets), {}
    reasons: dict[str, int] = {}
    for call in calls:
        refused: list[NotImplementedError] = []
        for target in targets:
            try:
                if not runs_by_framework(call, target):
                    variant = variant_of(call, target)
                    found[variant.symbol] = variant
            except NotImplementedError as error:
                refused.append(error)
        if refused and len(refused) == len(targets):
            raise refused[0]
        for refusal in refused:
            reason = str(refusal).partition("\n")[0]
            reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in reasons.items():
        skip(f"left out: {reason}" + (f" ({count} calls)" if count > 1 else ""))
    return list(found.values())


def write(variants: Sequence[Variant], targets: Sequence[Target], where: Path, calls: Sequence[Call] = ()) -> None:
    """Write a bundle of kernels that are in the compile cache, all or nothing.

    Raises:
        CacheError: the folder holds something else, or the cache does not hold a kernel.
    """
    with folder_swap.replacing(where, files, "bundle") as made:
        _fill(made, calls, targets, variants)
    bundle.forget()


def files(where: Path) -> set[str]:
    """The files and folders of a bundle, by its record.

    Raises:
        OSError, ValueError: the record cannot be read.
    """
    record = json_schema.parse((where / "bundle.json").read_bytes(), bundle.RECORD)
    found = {"bundle.json", "kernels", "licenses", *record["files"], *map(bundle.file_of, record["kernels"])}
    for name in found:
        ownership.components(name)
    return found


def _fill(where: Path, calls: Sequence[Call], targets: Sequence[Target], variants: Sequence[Variant]) -> None:
    (where / "kernels").mkdir()
    (where / "licenses").mkdir()
    kernels = {}
    for variant in sorted(variants, key=lambda v: v.symbol):
        data = cache.read(variant)
        if data is None:
            raise CacheError(
                f"cute_ops: {variant.symbol}.so was deleted from the cache folder while the bundle was built: "
                f"CUTE_OPS_CACHE_MAX_BYTES, {cache.MAX_BYTES}, may be too small"
            )
        (where / "kernels" / f"{variant.symbol}.so").write_bytes(data)
        kernels[variant.symbol] = {
            "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "variant": json.loads(variant.text),
        }  # fmt: skip
    manifest.write(where / "manifest.txt", calls)
    if measured := dispatch.winners_of(kernels):
        (where / winners.NAME).write_text(winners.dump(measured), encoding="utf-8")
    for name, text in _licenses().items():
        (where / "licenses" / f"{name}.txt").write_bytes(text)
    others = sorted(p for p in where.rglob("*") if p.is_file() and p.parent.name != "kernels")
    record = {
        "format": bundle.FORMAT,
        "platform": bundle.this_platform(),
        "versions": bundle.versions(),
        "targets": sorted({str(target) for target in targets}),
        "kernels": kernels,
        "files": {str(p.relative_to(where)): hashlib.sha256(p.read_bytes()).hexdigest() for p in others},
    }
    lines = json.dumps(record, indent=1, sort_keys=True) + "\n"
    cache_dir.write_whole(where, {"bundle.json": lines.encode()})
    for path in [*where.rglob("*"), where]:
        path.chmod(0o755 if path.is_dir() else 0o644)
        os.utime(path, (_EPOCH, _EPOCH))


def _licenses() -> dict[str, bytes]:
    """The licences of our kernels, of the compiler and of TVM-FFI, and a notice that says what each is for."""
    found = {"NOTICE": _NOTICE.encode()}
    for distribution in ("cute-ops", toolchain.DSL, toolchain.TVM_FFI):
        try:
            files = metadata.distribution(distribution).files or []
        except metadata.PackageNotFoundError:
            files = []
        for file in files:
            if "license" in file.name.lower() or file.name == "NOTICE":
                text = Path(str(file.locate()))
                if text.is_file() and "dist-info" in str(file):
                    found[f"{distribution}-{file.name}"] = text.read_bytes()
    ours = Path(__file__).parents[2] / "LICENSE"  # a checkout
    if ours.exists():
        found.setdefault("cute-ops-LICENSE", ours.read_bytes())
    return dict(sorted(found.items()))
