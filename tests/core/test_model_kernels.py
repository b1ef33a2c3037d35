"""Kernels of the ops of models without a GPU: drawn sizes, layouts, dtypes and attributes, run on NumPy arrays."""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_ops import testing
from cute_ops.declaration.binding import bind
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS, ITEMSIZE
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.plan import plan
from cute_ops.jit.target import parse
from cute_ops.kernels.conv import channels_first
from cute_ops.kernels.routing.config import SEGMENT
from cute_ops.ops import MODELS
from cute_ops.ops.conv.channels_first import causal_conv1d_channels_first, causal_conv1d_channels_first_bwd
from cute_ops.ops.optim.adamw import adamw
from cute_ops.ops.optim.adamw_stochastic import adamw_stochastic
from cute_ops.ops.reduction.kept_mean import kept_mean
from cute_ops.ops.rotary.gathered_rope import gathered_rope
from cute_ops.ops.rotary.rope import rope
from cute_ops.ops.routing.gathered import gathered_dots, gathered_sum, scattered_dots, scattered_rows
from cute_ops.ops.routing.places import class_places
from cute_ops.ops.routing.route import routed_rows
from cute_ops.ops.routing.topk import topk_step
from cute_ops.testing import kernel_calls
from cute_ops.testing.kernel_calls import LAYOUTS
from cute_ops.tools import sass

ALL = [each for op in MODELS if not op.program for each in (op, *op.steps) if not each.program]
ALL += [topk_step, gathered_rope]
GATHERED = gathered_sum, gathered_dots, scattered_rows, scattered_dots
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 0.01}
ATTRS: dict[str, list[dict[str, Any]]] = {
    "cross_entropy": [{}, SMOOTHED, {"softcap": 3.0, **SMOOTHED}, {"logit_scale": 0.5, "label_smoothing": 0.2}],
    "topk": [{"k": 1}, {"k": 3}, {"k": 40}, {"k": 8}, {"k": 16}],
}


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_kernels_agree_with_the_reference(op: Op) -> None:
    rng = np.random.default_rng(zlib.crc32(op.name.encode()))
    for i in range(10):
        family = "topk" if "topk" in op.name else "cross_entropy" if "cross_entropy" in op.name else ""
        choices = ATTRS.get(family, [{}])
        attrs = choices[i % len(choices)]
        least = attrs.get("k", 1)
        n = int(rng.integers(least, least + (33, 301, 2500)[i % 3]))
        call = kernel_calls.made(op, int(rng.choice([1, 2, 5, 37])), n, FLOATS[i % 3], LAYOUTS[i % 4], rng)
        call = call._replace(attrs={**call.attrs, **attrs})
        try:
            kernel_calls.check(call)
        except Exception as error:
            raise AssertionError(f"{call.said} {attrs}: {error}") from error


@pytest.mark.drawn(0.12)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "case"), [(op, case) for op in (*ALL, *GATHERED, class_places, routed_rows, kept_mean)
     for case in op.cases],
    ids=lambda v: v.name,
)  # fmt: skip
def test_every_case_compiles_without_spills(op: Op, case: Case, tmp_path: Path) -> None:
    """A stack is allowed to gradients of expressions of two tiles only; nothing is spilled to local memory."""
    arrays = testing.specs(op, case, "int64" if op is class_places else "float32" if op is kept_mean else "bfloat16")
    variant = plan(bind(op, arrays, testing.attributes(op, case)), {}, parse("sm_90a")).variant
    worker.compile(variant, tmp_path / "kernel.cubin")
    for each in sass.resources(tmp_path / "kernel.cubin"):
        assert each.local == 0
        assert each.stack <= (256 if op.kernel.endswith("select:fused") else 32)


def test_weights_of_a_row_in_segments_are_counted_once() -> None:
    """A thread's batch of vectors may end beyond its segment, where the next one's weights are."""
    (op,) = (op for op in ALL if op.name == "cross_entropy_metrics")
    for seed in range(8):  # until weights are drawn
        call = kernel_calls.made(op, 2, 140_003, "bfloat16", "compact", np.random.default_rng(seed))
        if call.arrays["weight"] is not None:
            break
    kernel_calls.check(call._replace(attrs={**call.attrs, "label_smoothing": 0.1}))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("n", "k"), [(77, 8), (128, 12), (1500, 40), (8199, 5)])
def test_the_largest_of_many_equal_numbers(n: int, k: int, dtype: str) -> None:
    """Of more equal numbers than are ranked, and of -0, infinities and NaN, those of the lowest columns come first."""
    rng = np.random.default_rng(n)
    call = kernel_calls.made(topk_step, 4, n, dtype, LAYOUTS[n % 4], rng)
    call = call._replace(attrs={"k": k}, arrays={**call.arrays, "index": None})
    x = call.arrays["x"]
    assert x is not None
    x[0], x[1, rng.permutation(n)[3:]] = x[0, 0], -np.inf
    x[2] = np.round(x[2].astype(np.float32))
    for value, columns in ((-0.0, n // 2), (np.nan, 3), (-np.float64(np.nan), 3), (np.inf, 3), (-np.inf, n // 4)):
        x[3, rng.permutation(n)[:columns]] = value
    if dtype == "float32":  # NaN of other bits are equal to it, too
        x[3, rng.permutation(n)[:2]] = np.array([0x7FC00800, 0xFFFFFFFF], np.uint32).view(np.float32)
    values, found = kernel_calls.run(call)
    assert values is not None
    for start in range(0, n, SEGMENT):
        wide = x[:, start : start + SEGMENT].astype(np.float64)
        columns = np.broadcast_to(np.arange(wide.shape[1]), wide.shape)
        expected = np.lexsort((columns, np.where(np.isnan(wide), 0, -wide), ~np.isnan(wide)))[:, :k]
        part = slice(start // SEGMENT * k, start // SEGMENT * k + k)
        np.testing.assert_array_equal(found[:, part], expected + start)
        np.testing.assert_array_equal(values[:, part].astype(np.float64), np.take_along_axis(wide, expected, -1))


@pytest.mark.slow
@pytest.mark.parametrize("op", GATHERED, ids=lambda op: op.name)
def test_rows_that_an_index_names(op: Op) -> None:
    rng = np.random.default_rng(7)
    for i in range(12):
        dims = dict(zip("trk", map(int, rng.integers(1, (30, 20, 9))), strict=True))
        dims["n"] = (1, 7, 64, 255, 1000, 2057)[i % 6]
        dims |= {d: of(dims, {}) for d, of in scattered_rows.derived.items() if op is scattered_dots or d in op.derived}
        kinds = {"I": ("int32", "int64")[i % 2], "W": FLOATS[i // 2 % 3]}
        case = Case("", dims, {v: kind for v, kind in kinds.items() if v in op.dtypes})
        draw = partial(testing.inputs, op, case, FLOATS[i % 3])
        arrays = draw(i)
        if i % 4 == 0 and op is not scattered_dots:
            arrays["weights"] = None
        where = {
            name: kernel_calls.place(op.inputs[name], a, LAYOUTS[i % 4]) for name, a in arrays.items() if a is not None
        }
        kernel_calls.check(kernel_calls.Call(op, {n: arrays[n] for n in op.inputs}, where, {}, "", draw))


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 3), (60, 4), (128, 8), (141, 16), (256, 4), (384, 6)])
def test_experts_that_are_chosen_in_one_pass(n: int, k: int) -> None:
    """Their weights and the balance; by CTAs with several tiles of rows, and with none; equal logits; races, too."""
    rng = np.random.default_rng(n)
    for i, rows in enumerate((1, 37, 130)):
        case = Case("", {"m": (rows,), "n": n, "t": k}, attrs={"k": k, "normalize": bool(i % 2)})
        draw = partial(testing.inputs, routed_rows, case, FLOATS[i])
        x = draw(int(rng.integers(1 << 20)))["logits"]
        x = np.round(4 * x) / 4 if i else x
        where = {"logits": kernel_calls.place(routed_rows.inputs["logits"], x, LAYOUTS[(n + i) % 4])}
        call = kernel_calls.Call(routed_rows, {"logits": x}, where, case.attrs, "", draw)
        tile = dict(call.planned()[1].variant.config) | {"ctas": 1 + i}
        kernel_calls.check(call._replace(tile=tile), watched=True)


@pytest.mark.parametrize(("r", "k", "classes"), [(1, 1, 1), (15, 3, 5), (67, 2, 8), (300, 8, 64), (700, 1, 130)])
def test_places_of_classes_are_those_of_a_stable_sort(r: int, k: int, classes: int) -> None:
    """Some numbers are no class: they come last. Warps and CTAs without a number, and races, too."""
    rng = np.random.default_rng(r)
    for kind in ("int64", "int32"):
        index = rng.integers(-1, classes + 1, (r, k)).astype(kind)
        tile = {"threads": (32, 64, 256)[r % 3], "ctas": 1 + r % 4}
        given: dict[str, np.ndarray | None] = {"index": index}
        call = kernel_calls.Call(class_places, given, {}, {"classes": classes}, "", partial(dict, given), tile)
        kernel_calls.check(call, watched=True)
        place, ends = kernel_calls.run(call)
        key = np.where((index < 0) | (index >= classes), classes, index).reshape(-1)
        assert place is not None
        np.testing.assert_array_equal(place.reshape(-1)[np.argsort(key, kind="stable")], np.arange(r * k))
        np.testing.assert_array_equal(ends, np.searchsorted(np.sort(key), np.arange(classes), "right"))


@pytest.mark.parametrize("op", [adamw, adamw_stochastic], ids=lambda op: op.name)
def test_steps_of_adamw_that_the_device_counts(op: Op) -> None:
    """Steps up to the millionth agree with float64, for decay rates of 0 and of nearly 1."""
    rng = np.random.default_rng(3)
    for i, betas in enumerate(((0.9, 0.999), (0.0, 0.5), (0.999999, 0.9999999))):
        call = kernel_calls.made(op, 5, int(rng.integers(1, 1500)), "bfloat16", LAYOUTS[i], rng)
        steps = rng.integers(1, (3, 50, 10**6)[i], 5).astype(np.float32)

        def draw(seed: int, more: Any = call.more, steps: Any = steps) -> dict[str, np.ndarray | None]:
            return {**more(seed), "scale": steps}

        attrs = {**call.attrs, **dict(zip(("beta1", "beta2"), betas, strict=True)), "eps": 0.1, "counted": True}
        kernel_calls.check(call._replace(arrays={**call.arrays, "scale": steps}, more=draw, attrs=attrs))


def test_adamw_of_compact_rows_that_vectors_cross() -> None:
    """A vector takes the numbers of both its rows; other layouts, and rows shorter than a vector, go row by row."""
    rng = np.random.default_rng(4)
    for i in range(6):
        rows, n = int(rng.integers(1, 40)), int(rng.integers(1, 400)) | 1
        dtype, layout = str(rng.choice(FLOATS)), LAYOUTS[0] if i % 3 else str(rng.choice(LAYOUTS))
        call = kernel_calls.made(adamw, rows, n, dtype, layout, rng)
        kernel_calls.check(call._replace(attrs={**adamw.attrs, "eps": 0.1}))


@pytest.mark.parametrize("n", [1, 31, 1025, 4096, 9001])
def test_the_mean_of_losses_that_are_not_ignored(n: int) -> None:
    """With losses and of one; targets of both widths, among them the widest; NaN where all are ignored."""
    rng = np.random.default_rng(n)
    for ignored, kind in ((3, "int64"), (3, "int32"), (2**40 + 3, "int64"), (-(2**31), "int32")):
        target = rng.integers(0, 5, n).astype(kind)
        target = np.where(target == 3, ignored, target).astype(kind)
        loss = np.where(target == ignored, 0, rng.normal(size=n)).astype(np.float32)
        for given in ({"target": target, "loss": loss}, {"target": target, "loss": None}):
            call = kernel_calls.Call(kept_mean, given, {}, {"ignore_index": ignored}, "", partial(dict, given))
            kernel_calls.check(call, watched=True)
            count = int((target != ignored).sum())
            (out,) = kernel_calls.run(call)
            assert out is not None
            total = 1.0 if given["loss"] is None else loss.astype(np.float64).sum()
            np.testing.assert_allclose(out, np.divide(total, np.float64(count)), rtol=1e-5, atol=1e-6)


def test_tables_of_a_token_are_read_for_two_heads() -> None:
    """48 heads of 8 x 4096 tokens: 194 us in place of 229. Where sequences share the tables, neighbouring CTAs do."""
    for leading, expected in (({}, 2), ({"cos": 1, "sin": 1}, 1)):
        case = Case("tables", {"m": (8, 64), "h": 48, "d": 128, "r": 64}, leading=leading)
        config = plan(bind(rope, testing.specs(rope, case, "bfloat16")), {}, parse("sm_90a")).variant.config
        assert config["heads_per_thread"] == expected


def test_rows_are_copied_bit_by_bit_and_an_index_that_is_no_row_gives_nan() -> None:
    rng = np.random.default_rng(3)
    for n, dtype in ((255, "bfloat16"), (64, "float32"), (67, "float32"), (1, "float16")):
        case = Case("", {"t": 6, "r": 9, "k": 1, "n": n}, {"I": "int64"}, ("weights",))
        arrays = testing.inputs(gathered_sum, case, dtype, 5)
        y, index = arrays["y"], arrays["index"]
        assert y is not None and index is not None
        for value in (-0.0, np.nan, np.inf, -np.inf):
            y[rng.integers(6, size=4), rng.integers(n, size=4)] = value
        wrong = rng.permutation(9)[:3]
        index[wrong, 0] = [6, -1, 1 << 40]
        call = kernel_calls.Call(gathered_sum, arrays, {}, {}, "", partial(dict, arrays))
        (out,) = kernel_calls.run(call)
        assert out is not None
        kept = np.delete(np.arange(9), wrong)
        expected = y[index[kept, 0]]
        np.testing.assert_array_equal(out[kept].astype(np.float64), expected.astype(np.float64))
        np.testing.assert_array_equal(np.signbit(out[kept].astype(np.float64)), np.signbit(expected.astype(np.float64)))
        assert np.isnan(out[wrong].astype(np.float64)).all()
        with pytest.raises(RuntimeError, match="a kernel traps"):
            kernel_calls.run(call._replace(attrs={"strict": True}))


@pytest.mark.parametrize("op", [causal_conv1d_channels_first_bwd, causal_conv1d_channels_first], ids=lambda op: op.name)
def test_numbers_of_sequences_that_are_off_a_vector(op: Op) -> None:
    """Their alignment bounds a thread's vector beside that of the positions."""
    call = kernel_calls.made(op, 3, 5, "bfloat16", "compact", np.random.default_rng(0), s=64, w=4)
    for seed in range(1, 9):  # until they are drawn
        if call.arrays["seq_idx"] is not None:
            break
        call = kernel_calls.made(op, 3, 5, "bfloat16", "compact", np.random.default_rng(seed), s=64, w=4)
    where = call.where["seq_idx"]
    kernel_calls.check(call._replace(where={**call.where, "seq_idx": where._replace(address=4)}))


def test_lanes_of_a_warp_take_a_short_row_each() -> None:
    """Rows of four to sixteen lanes, some of which have no row, and that walk some steps where vectors are short."""
    rng, found = np.random.default_rng(5), set()
    for s in (3, 16, 33, 64, 77, *map(int, rng.integers(1, 120, 5))):
        op, w, dtype = causal_conv1d_channels_first_bwd, int(rng.integers(2, 5)), str(rng.choice(FLOATS))
        layout = str(rng.choice(LAYOUTS, p=(0.6, *(0.4 / (len(LAYOUTS) - 1),) * (len(LAYOUTS) - 1))))
        call = kernel_calls.made(op, int(rng.integers(1, 4)), int(rng.integers(1, 40)), dtype, layout, rng, s=s, w=w)
        found.add(call.planned()[1].variant.config.get("lanes"))
        kernel_calls.check(call, watched=True)
    assert {4, 8, 16} <= found


@pytest.mark.parametrize("op", [causal_conv1d_channels_first_bwd, causal_conv1d_channels_first], ids=lambda op: op.name)
def test_long_rows_and_grids_without_room(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several steps of several warps, where a warp's last slopes are those of the next one's part; and more
    channels and sequences than a grid has CTAs.
    """
    monkeypatch.setattr(channels_first, "MOST_CTAS", 2)
    rng = np.random.default_rng(zlib.crc32(op.name.encode()))
    for rows, n, s, w in ((2, 3, 2100, 4), (3, 5, 1000, 3), (1, 2, 1024, 2), (2, 2, 777, 4), (7, 300, 9, 4)):
        call = kernel_calls.made(op, rows, n, str(rng.choice(FLOATS)), str(rng.choice(LAYOUTS)), rng, s=s, w=w)
        kernel_calls.check(call)


@pytest.mark.parametrize("op", [causal_conv1d_channels_first_bwd, causal_conv1d_channels_first], ids=lambda op: op.name)
def test_compact_rows_that_start_anywhere_are_read_by_vectors(op: Op) -> None:
    """Each one's ends are parts of vectors, of which the last ones may end behind the tensor."""
    rng = np.random.default_rng(zlib.crc32(op.name.encode()))
    for rows, n, s, w, dtype in ((2, 3, 5, 4, "bfloat16"), (1, 4, 601, 3, "float16"), (3, 2, 1, 2, "float32")):
        call = kernel_calls.made(op, rows, n, dtype, "compact", rng, s=s, w=w)
        arrays = {**call.arrays, "seq_idx": None}
        call = kernel_calls.Call(op, arrays, {}, call.attrs, "", partial(dict, arrays))
        variant = call.planned()[1].variant
        assert getattr(channels_first, variant.kernel.partition(":")[2])(variant).vec == 16 // ITEMSIZE[dtype]
        kernel_calls.check(call, watched=True)
