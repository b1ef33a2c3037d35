"""Build a wheel of prebuilt kernels, ``cute-ops-kernels-sm90``: programs that it fits compile nothing.

Without a manifest it holds what the models of ``models.csv`` call in bfloat16, in generation and in training on 512 to
16,384 tokens at a time. It needs no GPU.

    python release/kernel_wheel.py --out dist [--arch sm_90a] [manifest.txt ...]
    python release/kernel_wheel.py --check dist/cute_ops_kernels_sm90-*.whl

The second command compares a wheel with these sources, as the first one does in the end.

The wheel is a bundle inside a package, which ``cute_ops`` finds by its entry point. Kernels run only with the versions
that they were built with, so the wheel depends on exactly these.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from cute_ops import __version__
from cute_ops.aot.build import build, variants_of
from cute_ops.aot.hf_config import LEAD, calls_of_model
from cute_ops.autotune import dispatch
from cute_ops.calls import manifest
from cute_ops.calls.manifest import ROWS, Call
from cute_ops.cli import progress
from cute_ops.declaration.shapes import Array
from cute_ops.jit import bundle, target
from cute_ops.jit.target import Target

MODELS = Path(__file__).with_name("models.csv")
PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "{count} compiled kernels of cute-ops for {target}"
license = "Apache-2.0 AND LicenseRef-NVIDIA-Software-License"
license-files = ["{package}/bundle/licenses/*"]
requires-python = ">=3.11"
dependencies = [{dependencies}]
entry-points."cute_ops.bundles" = {{ {arch} = "{package}.bundle" }}

[tool.setuptools]
packages.find.namespaces = true
package-data = {{ "*" = ["*"] }}

[tool.distutils.bdist_wheel]
plat-name = "manylinux_2_28_{machine}"
"""


def models() -> dict[str, dict[str, Any]]:
    """Configurations by model, as far as shapes depend on them."""
    with MODELS.open(newline="") as file:
        return {row.pop("model"): {k: _value(v) for k, v in row.items() if v} for row in csv.DictReader(file)}


def calls_of(config: dict[str, Any], dtype: str = "bfloat16") -> Iterator[Call]:
    """What a model calls once it is patched; its norms and gates without a batch dim, as servers call them; and the
    rotations and the loss of a decoder in JAX.
    """
    # Angles are inputs: any value says that queries and keys are rotated.
    for call in calls_of_model({**config, "rope_theta": 1.0}, dtype, train=True):
        yield call
        batched = [name for name, array in call.inputs.items() if len(array.shape) > 2 and array.shape[:2] == LEAD]
        if batched and not {"cos", "k"} & call.inputs.keys():
            inputs = {n: Array(a.shape[1:], a.dtype) if n in batched else a for n, a in call.inputs.items()}
            yield Call(call.name, inputs, attrs=call.attrs)
    yield from _of_jax(config, dtype)


def _of_jax(config: dict[str, Any], dtype: str) -> Iterator[Call]:
    """Rotations by float32 tables, in one pass with the norms of queries and keys, and losses of int32 targets."""
    heads, kv_heads, size = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    queries, keys = (Array((*LEAD, count, size), dtype) for count in (heads, kv_heads))
    tables = dict.fromkeys(("cos", "sin"), Array((ROWS, size // 2), "float32"))
    if config["model_type"].startswith(("qwen3", "gemma3")):
        weights = dict.fromkeys(("q_weight", "k_weight"), Array((size,), dtype))
        inputs, attrs = {"q": queries, "k": keys, **weights, **tables}, {"eps": config["rms_norm_eps"]}
        yield Call("qk_norm_rope", inputs, attrs=attrs)
        yield Call("qk_norm_rope_bwd", {**inputs, "dq_out": queries, "dk_out": keys}, attrs=attrs)
    else:
        for rotated in (queries, keys):
            yield Call("rope", {"x": rotated, **tables})
            yield Call("rope_bwd", {"dout": rotated, **tables})
    judged = {"logits": Array((ROWS, config["vocab_size"]), dtype), "target": Array((ROWS,), "int32")}
    yield Call("cross_entropy", judged)
    yield Call("cross_entropy_step", {**judged, "dloss": Array((ROWS,), "float32")})


def _value(text: str) -> object:
    """A number where it is one."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def build_wheel(calls: list[Call], where: Target, out: Path) -> Path:
    """Compile calls for a target and write the wheel.

    Raises:
        ExceptionGroup: kernels that do not compile.
    """
    digits = "".join(filter(str.isdecimal, where.arch))
    package = f"cute_ops_kernels_sm{digits}"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, package)
        root.mkdir()
        (root / "__init__.py").touch()
        # Not by what was measured on this machine: a program that finds the kernels has not read these winners.
        with dispatch.as_shipped(), progress(len(variants_of(calls, [where])), f"{package}:") as done:
            built = build(calls, [where], root / "bundle", done)
        if errors := [one.error for one in built if one.error]:
            raise ExceptionGroup(f"{len(errors)} of {len(built)} kernels do not compile", errors)
        Path(folder, "pyproject.toml").write_text(
            PROJECT.format(
                name=package.replace("_", "-"), version=__version__, package=package, count=len(built), target=where,
                dependencies=", ".join(f'"{n}=={v}"' for n, v in bundle.versions().items()), arch=f"sm{digits}",
                machine=platform.machine(),
            )
        )  # fmt: skip
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", folder]
        # The first second of 1980, before which zip files know no time: the same kernels make the same wheel.
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "315532800"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        (wheel,) = Path(folder, "dist").glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, out))


def check(wheel: Path, calls: list[Call], where: Target) -> int:
    """Compare a wheel with what calls run on a target by these sources; returns the number of its kernels.

    Raises:
        CacheError: a file is damaged, or the wheel was built with other versions.
        ValueError: a kernel is missing; its name depends on the sources that it is made from.
    """
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as files:
            files.extractall(folder)
        (record,) = Path(folder).glob("*/bundle/bundle.json")
        found = bundle.Bundle(record.parent)
        count = found.verify()
        with dispatch.as_shipped():
            missing = [v.describe() for v in variants_of(calls, [where]) if v.symbol not in found.kernels]
    if missing:
        raise ValueError(f"{wheel} lacks {len(missing)} kernels, such as {missing[0]}: build it again")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifests", nargs="*", type=Path, help="calls to build in place of the models'")
    parser.add_argument("--arch", default="sm_90a", type=target.parse, help="sm_90a, or sm_90a:114 with so many SMs")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("--check", type=Path, metavar="WHEEL", help="build nothing, say whether this wheel holds all")
    options = parser.parse_args()
    calls = [call for path in options.manifests for call in manifest.read(path)]
    calls = calls or [call for config in models().values() for call in calls_of(config)]
    begin = time.perf_counter()
    wheel = options.check or build_wheel(calls, options.arch, options.out)
    count, size = check(wheel, calls, options.arch), wheel.stat().st_size / 1e6
    print(f"{wheel}: {count} kernels, {size:.1f} MB in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
