"""Steps of group norm on NumPy arrays, for drawn groups, positions, layouts and dtypes; and as machine code."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_ops import Op, fused, testing
from cute_ops.declaration.binding import bind
from cute_ops.declaration.shapes import FLOATS, ITEMSIZE
from cute_ops.hardware import ARCHES, MAX_THREADS
from cute_ops.jit import plan as plans
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.layout import Memory
from cute_ops.jit.plan import plan
from cute_ops.jit.target import parse
from cute_ops.kernels.norm.group_config import GroupConfig
from cute_ops.ops.norm import group_config
from cute_ops.ops.norm.group_norm import PARTS, group_norm_moments, group_norm_of_examples
from cute_ops.testing import kernel_calls
from cute_ops.testing.kernel_calls import LAYOUTS
from cute_ops.tools import sass

SEED = int(os.environ.get("CUTE_OPS_SEED", "41"))


@pytest.mark.parametrize("op", PARTS, ids=lambda op: op.name)
def test_kernels_of_any_groups(op: Op) -> None:
    """Rows in registers, in shared memory and read again; channels of whole vectors and others."""
    print("seed", SEED)
    rng = np.random.default_rng((SEED, *op.name.encode()))
    shape = next(iter(op.inputs.values())).shape
    fixed = [(3, 4, 10, 64), (2, 1, 5, 12000), (3, 2, 3, 343)]
    drawn = [tuple(int(rng.integers(1, most)) for most in (9, 5, 17, 200)) for _ in range(3)]
    for rows, groups, channels, positions in fixed + drawn:
        attrs = {"silu": bool(rng.integers(2)), "groups": groups}
        if "n" in shape.split() and "d" in shape.split():
            sizes = {"n": positions, "h": groups, "d": channels}
        elif any("d" in tensor.shape.split() for tensor in op.inputs.values()):
            sizes = {"n": channels * positions, "h": groups, "d": channels}
        elif "h" in shape.split():
            sizes = {"n": channels, "h": groups}
        elif "*b" in shape:
            sizes = {"n": groups * channels, "m": min(positions, 300), "g": groups}
        else:
            sizes = {"n": positions}
        dtype, layout = str(rng.choice(["bfloat16", "float32", "float16"])), str(rng.choice(LAYOUTS))
        n = sizes.pop("n")
        call = kernel_calls.made(op, rows, n, dtype, layout, rng, **sizes)
        given = {**call.attrs, **{name: value for name, value in attrs.items() if name in op.attrs}}
        kernel_calls.check(call._replace(attrs=given))


@pytest.mark.slow
@pytest.mark.parametrize("silu", [False, True])
def test_clusters_read_groups_once(silu: bool) -> None:
    """Groups in the shared memory of clusters; threads wait for each other where they have to."""
    rng = np.random.default_rng(0)
    for name, sizes, n in (
        ("group_norm_groups_bwd", {"h": 2, "d": 10}, 5128), ("group_norm_groups_bwd", {"h": 1, "d": 3}, 36000),
        ("group_norm_examples", {"m": 1100, "g": 8}, 80), ("group_norm_examples_bwd", {"m": 640, "g": 4}, 48),
    ):  # fmt: skip
        op = next(op for op in PARTS if op.name == name)
        call = kernel_calls.made(op, 2, n, "bfloat16", "compact", rng, **sizes)
        attrs = {**op.attrs, "silu": silu, **({"groups": sizes["g"]} if "groups" in op.attrs else {})}
        call = call._replace(attrs=attrs)
        config = call.planned()[1].variant.config
        assert config["form"] == "smem" and (config["cluster"] > 1 or name == "group_norm_examples_bwd")
        assert config.get("keep", 0) == (silu and name.endswith("bwd"))
        kernel_calls.check(call, watched=n < 100)


def test_clusters_hold_a_part_while_the_next_one_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are more than clusters, of groups that cross vectors, with means that are large."""
    seed = int(os.environ.get("CUTE_OPS_SEED", "43"))
    print("seed", seed)
    rng = np.random.default_rng(seed)
    op = next(op for op in PARTS if op.name == "group_norm_examples")
    for cluster, groups, each, width in ((1, 8, 6, 24), (2, 4, 10, 40), (2, 3, 16, 16), (4, 8, 2, 8)):
        examples, positions, clusters = int(rng.integers(2, 6)), int(rng.integers(1, 90)), int(rng.integers(1, 5))
        config = GroupConfig("held", 64, cluster, 1, width=width, vec=8, clusters=clusters)
        call = kernel_calls.made(op, examples, groups * each, "bfloat16", "compact", rng, m=positions, g=groups)
        x = call.arrays["x"]
        assert x is not None
        shifted = (x.astype(np.float32) + 40 * int(rng.integers(2))).astype(x.dtype)
        attrs = {**op.attrs, "groups": groups, "silu": bool(rng.integers(2))}
        monkeypatch.setattr(plans, "configured", partial(configured_by, config.flat()))
        kernel_calls.check(call._replace(arrays={**call.arrays, "x": shifted}, attrs=attrs), watched=True)


def configured_by(config: Mapping[str, Any], call: plans.Signature, _: Any) -> plans.Plan:
    return CONFIGURED(call, config)


CONFIGURED = plans.configured


def test_examples_of_any_sizes_fit_a_cta() -> None:
    """Also channels that are no whole vectors, of which one a thread would be too many threads."""
    print("seed", SEED)
    rng = np.random.default_rng(SEED)
    fixed = [
        (118, 11, 165, "bfloat16", "compact"),
        (40, 1, 2048, "bfloat16", "off"),
        (2654, 16, 2, "bfloat16", "spaced"),
    ]
    drawn = [
        (*(int(most ** rng.random()) for most in (1e4, 200, 600)), str(rng.choice(["bfloat16", "float32"])),
         str(rng.choice(LAYOUTS)))
        for _ in range(300)
    ]  # fmt: skip
    # Groups of one channel, by pairs of CTAs that hold a part: sums took more shared memory than a CTA has.
    fixed += [(44, 2280, 1, "bfloat16", "compact"), (1, 64, 1, "float32", "compact")]
    drawn += [
        (int(rng.integers(1, 100)), 8 * int(rng.integers(100, 400)), 1, str(rng.choice(FLOATS)), "compact")
        for _ in range(60)
    ]
    calls = [(op, *sizes) for sizes in fixed + drawn for op in PARTS[-2:]]
    found = []
    for op, positions, groups, each, dtype, layout in calls:
        inputs, itemsize = len([name for name in ("x", "dy") if name in op.inputs]), ITEMSIZE[dtype]
        if not group_config.on_chip((positions, groups * each), groups, itemsize, inputs):
            continue
        sizes = {"b": (2,), "m": positions, "n": groups * each, "g": groups}
        given = {k: kernel_calls.Array(t.of(sizes), dtype if t.dtype == "T" else "float32")
                 for k, t in op.inputs.items()}  # fmt: skip
        where = {k: kernel_calls.place(op.inputs[k], np.broadcast_to(np.float32(0), a.shape), layout)
                 for k, a in given.items()}  # fmt: skip
        attrs = {"silu": bool(rng.integers(2)), **({"groups": groups} if "groups" in op.attrs else {})}
        arch, sms = str(rng.choice(["sm_80", "sm_89", "sm_90a", "sm_120a"])), rng.choice([1, 16, 78, 114, 132, 148])
        variant = plan(bind(op, given, attrs), where, parse(f"{arch}:{sms}")).variant
        found.append((variant, inputs, itemsize, (variant.config, sizes, arch, sms)))
    with kernel_calls.interpreted():
        for variant, inputs, itemsize, told in found:
            module, _, name = variant.kernel.partition(":")
            kernel = getattr(importlib.import_module(module), name)(variant)
            held = itemsize + 4 if kernel.config.keep else itemsize * inputs
            vectors = kernel.vec * kernel.threads * kernel.per_thread * held
            sums = 4 * kernel.of_width * (kernel.depth * kernel.together + (4 - inputs) * kernel.helpers)
            exchanged = kernel.cluster * kernel.numbers.stages
            sums += 8 * kernel.of_block * (exchanged + 1) + 12 * kernel.width * (inputs > 1)
            taken = sums + vectors * (kernel.config.form != "passes")
            assert kernel.threads <= MAX_THREADS, told
            assert kernel.config.form != "held" or kernel.config.clusters > 0, told
            assert taken <= ARCHES[variant.arch].shared_per_cta, (taken, *told)


def test_threads_have_more_channels_than_they_read_at_once() -> None:
    rng = np.random.default_rng(0)
    for op in PARTS[-2:]:
        call = kernel_calls.made(op, 2, 1304, "bfloat16", "off", rng, m=5, g=1)
        assert call.planned()[1].variant.config["vec"] == 8
        kernel_calls.check(call)


@pytest.mark.parametrize("op", [PARTS[1], *PARTS[-2:]], ids=lambda op: op.name)
def test_aligned_rows_end_within_a_vector(op: Op) -> None:
    rng = np.random.default_rng(0)
    sizes = {"h": 1, "d": 1} if "h" in op.inputs["x"].shape.split() else {"m": 1, "g": 26}
    for rows, layout in ((2, "spaced"), (1, "compact")):
        call = kernel_calls.made(op, rows, 26, "float32", layout, rng, **sizes)
        call = call._replace(attrs=call.attrs | ({"groups": 26} if "groups" in op.attrs else {}))
        assert call.planned()[1].variant.config["form"] == "passes"
        kernel_calls.check(call)


def test_groups_are_read_twice_where_no_chip_holds_them() -> None:
    for positions, channels, groups, expected in ((4096, 320, 32, 16), (1024, 1280, 32, 4), (64, 1280, 32, 1)):
        assert group_config.on_chip((positions, channels), groups, 2, 2)
        given = {"b": (2,), "m": positions, "n": channels, "g": groups}
        op = next(op for op in PARTS if op.name == "group_norm_examples_bwd")
        arrays = {name: kernel_calls.Array(t.of(given), "bfloat16" if t.dtype == "T" else "float32")
                  for name, t in op.inputs.items()}  # fmt: skip
        assert plan(bind(op, arrays), {}, parse("sm_90a")).variant.config.get("cluster", 1) == expected
    assert not group_config.on_chip((512 * 512, 128), 32, 2, 2)


def test_groups_have_threads_or_are_refused() -> None:
    """A CTA holds a group wherever its rows begin, or the call is refused."""
    for channels, dtype, threads in (
        (1024, "float32", 256), (2048, "float16", 256), (8200, "bfloat16", 1025), (4097, "float32", 4097),
        (1021, "bfloat16", 1021), (8198, "bfloat16", 4099),
    ):  # fmt: skip
        for op in PARTS[-2:]:
            given = {"b": (2,), "m": 5, "n": channels, "g": 1}
            arrays = {name: kernel_calls.Array(t.of(given), dtype if t.dtype == "T" else "float32")
                      for name, t in op.inputs.items()}  # fmt: skip
            if threads > MAX_THREADS:
                with pytest.raises(ValueError, match=f"A group has {channels} channels, which takes {threads} threads"):
                    bind(op, arrays)
                continue
            for address in (0, ITEMSIZE[dtype]):
                where = {"x": Memory((5 * channels, channels, 1), address)}
                assert plan(bind(op, arrays), where, parse("sm_90a")).variant.config["threads"] <= MAX_THREADS


def test_an_example_does_not_depend_on_the_others() -> None:
    """Sums of examples have the same bits alone and beside others."""
    rng = np.random.default_rng(0)
    whole = kernel_calls.made(group_norm_moments, 3, 64, "bfloat16", "compact", rng, m=700)
    found = kernel_calls.run(whole)
    for i in range(3):
        alone = whole._replace(arrays={name: a if a is None else a[i : i + 1] for name, a in whole.arrays.items()})
        where = {name: kernel_calls.place(whole.op.inputs[name], a, "compact") for name, a in alone.arrays.items()}
        for one, all_of_them in zip(kernel_calls.run(alone._replace(where=where)), found, strict=True):
            np.testing.assert_array_equal(one[0], all_of_them[i])


def test_examples_of_whole_vectors_take_a_column_pass() -> None:
    """Tiles and sums of channels that are whole vectors; others keep their kernels."""
    for n, expected in ((64, True), (62, False)):
        for op in (group_norm_moments, group_norm_of_examples):
            shapes = {"b": (3,), "m": 7, "n": n}
            given = {name: kernel_calls.Array(t.of(shapes), "bfloat16") for name, t in op.inputs.items()}
            variant = plan(bind(op, given), {}, parse("sm_90a")).variant
            with kernel_calls.interpreted():
                select = importlib.import_module("cute_ops.kernels.rows.select")
                assert (getattr(select.fused(variant), "column_pass", None) is not None) == expected


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@pytest.mark.parametrize("op", PARTS, ids=lambda op: op.name)
def test_every_case_compiles_without_spills(op: Op, tmp_path: Path) -> None:
    for case in op.cases[1:]:
        variant = plan(bind(op, testing.specs(op, case, "bfloat16"), dict(op.attrs)), {}, parse("sm_90a")).variant
        worker.compile(variant, tmp_path / "kernel.cubin")
        assert all(each.local == 0 for each in sass.resources(tmp_path / "kernel.cubin")), case


def test_stretched_operands_without_a_gradient_are_declared() -> None:
    shapes = {"x": "*m n", "weight": "h d"}
    with pytest.raises(ValueError, match="operand `weight` of shape 'h d' has no gradient: name it in `no_gradient`"):
        fused(lambda xp, x, weight: x * weight, name="stretched", operands=shapes)
    op = fused(lambda xp, x, weight: x * weight, name="stretched", operands=shapes, no_gradient=("weight",))
    arrays = {n: kernel_calls.Array(s, "float32") for n, s in {"x": (3, 2, 7), "weight": (2, 3)}.items()}
    with pytest.raises(ValueError, match="heads have n=7 elements, expected a multiple of d=3"):
        bind(op, arrays)
