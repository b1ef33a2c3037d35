"""Ops of functions with reductions of rows: kernels against references in each of their forms, gradients, configs."""

from __future__ import annotations

import itertools
import os
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_ops import FLOATS, Array, Op, fused
from cute_ops.autotune.dispatch import choose
from cute_ops.autotune.space import objection
from cute_ops.declaration.binding import bind
from cute_ops.declaration.case import Case
from cute_ops.expressions.primitives import PRIMITIVES
from cute_ops.expressions.stages import awaited, stages
from cute_ops.expressions.text import parse as parse_text
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.plan import signature
from cute_ops.jit.target import parse
from cute_ops.kernels.rows.config import FusedRowConfig
from cute_ops.ops import MODELS, PARTS
from cute_ops.testing import interpreter, kernel_calls
from cute_ops.tools import gradient, sass
from tests.ops import random_programs
from tests.ops.reducing import FIVE, OPS, ROW, TILE
from tests.ops.row_forms import FORMS, in_form

ALL = [stage for op in OPS for stage in (op, op.grad) if stage]
BY_NAME = {op.name: op for op in ALL}
each = pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)


def configured(op: Op, rows: int, n: int, dtype: str = "bfloat16", arch: str = "sm_90a") -> FusedRowConfig:
    sizes = op.example((rows,), n)
    arrays = {name: Array(t.of(sizes), op.dtype_near(t, dtype)) for name, t in op.inputs.items()}
    return FusedRowConfig.of(choose(bind(op, arrays), {}, parse(arch)).variant.config)


def test_what_follows_from_a_row_s_numbers_is_a_number_of_the_row() -> None:
    op = BY_NAME["log_sum_exp"]
    assert repr(op) == "Op log_sum_exp(x: T[*m n], scale: T_scale[*m 1]) -> lse: float32[*m 1], below: T[*m n]"
    assert repr(op.grad) == (
        "Op log_sum_exp_bwd(x: T[*m n], scale: T_scale[*m 1], dlse: float32[*m 1], dbelow: T[*m n])"
        " -> dx: T[*m n], dscale: T_scale[*m 1]"
    )


@pytest.mark.drawn(0.3)
@pytest.mark.no_cover
@pytest.mark.parametrize("layout", kernel_calls.LAYOUTS)
@each
def test_kernels_compute_the_reference(op: Op, layout: str) -> None:
    for i, (n, rows) in enumerate(((1, 1), (7, 5), (64, 3), (97, 4), (2048, 2))):
        for dtype in FLOATS if n == 7 else (FLOATS[i % 3],):
            kernel_calls.check(kernel_calls.made(op, rows, n, dtype, layout, np.random.default_rng([n, rows])))


@pytest.mark.slow
def test_unaligned_rows_of_any_length() -> None:
    """Rows of one CTA, whose threads hold two to nine vectors of each."""
    seed = int(os.environ.get("CUTE_OPS_SEED", "29"))
    print("seed", seed)
    rng = np.random.default_rng(seed)
    for _ in range(16):
        op, n = ALL[int(rng.integers(len(ALL)))], int(2 ** rng.uniform(5, 13)) | 1
        dtype, layout = str(rng.choice(FLOATS)), str(rng.choice(kernel_calls.LAYOUTS))
        kernel_calls.check(kernel_calls.made(op, int(rng.integers(1, 9)), n, dtype, layout, rng))


def test_vectors_of_one_long_row_take_the_numbers_of_two_rows() -> None:
    """Compact rows that start anywhere, and end within a vector; other layouts go row by row."""
    seed = int(os.environ.get("CUTE_OPS_SEED", "30"))
    print("seed", seed)
    rng = np.random.default_rng(seed)
    op = fused(
        lambda xp, x, y, shift, scale: (xp.tanh((x - shift) * scale), x * y * shift),
        operands={"x": TILE, "y": TILE, "shift": "*m 1", "scale": "*m 1"}, name="shifted_and_scaled",
    )  # fmt: skip
    drawn = [(int(rng.integers(1, 60)), int(rng.integers(1, 700))) for _ in range(6)]
    for rows, n in ((1, 9), (3, 8), (257, 11), *drawn):
        dtype, layout = str(rng.choice(FLOATS)), str(rng.choice(kernel_calls.LAYOUTS, p=(0.7, 0.1, 0.1, 0.1)))
        kernel_calls.check(kernel_calls.made(op, rows, n, dtype, layout, rng))


# Those that add up over rows, for row vectors and scalars, go from row to row.
SUMMED = [
    BY_NAME[name] for name in ("rms_bwd", "rms_of_gated_bwd", "spread_bwd", "rms_of_sum_bwd", "rms_beside_sum_bwd")
]
IN_FORMS = [(op, form) for op in ALL for form in FORMS if op not in SUMMED or "clusters" in FORMS[form]]


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize(("op", "form"), IN_FORMS, ids=lambda x: getattr(x, "name", x))
def test_every_form_computes_the_reference(op: Op, form: str) -> None:
    for i, (n, rows) in enumerate(((1, 1), (64, 13), (97, 140), (1030, 5))):
        layout = kernel_calls.LAYOUTS[i]
        made = kernel_calls.made(op, rows, n, ("float32", "bfloat16")[i % 2], layout, np.random.default_rng(n))
        watched = i == 1 and op.name in ("probabilities", "spread_bwd")
        kernel_calls.check(made._replace(tile=in_form(made.planned()[1], form)), watched)


ARCH = interpreter.ARCH
FAULTS = [
    ("registers of a CTA", "barrier", lambda: None, "follows a store by another thread"),
    ("registers of a CTA", "griddepcontrol_wait", lambda: None, "before the previous kernel is waited for"),
    ("registers of a cluster", "cluster_wait", lambda: None, "before the whole cluster is known to run"),
    ("registers of a cluster", "mbarrier_wait", lambda *_: None, "follows a store by another thread"),
    (
        "registers of a cluster", "mbarrier_arrive_and_expect_tx",
        lambda p, size, expect=ARCH.mbarrier_arrive_and_expect_tx: expect(p, size + 4), "4 bytes are missing",
    ),
    ("persistent", "cp_async_wait_group", lambda count, wait=ARCH.cp_async_wait_group: wait(count + 1), "has NaN"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "name", "wrong", "told"), FAULTS, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_not_waited_for_is_found(
    form: str, name: str, wrong: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = kernel_calls.made(BY_NAME["probabilities"], 3, 1030, "float32", "compact", np.random.default_rng(0))
    call = made._replace(tile=in_form(made.planned()[1], form))
    kernel_calls.check(call, watched=True)
    monkeypatch.setattr(ARCH, name, wrong)
    with pytest.raises((AssertionError, RuntimeError), match=told):
        kernel_calls.check(call, watched=True)


@pytest.mark.drawn(0.4)
@each
def test_kernels_for_any_length(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_calls, "plan", partial(kernel_calls.plan, fixed=False))
    for n, rows in ((1, 1), (7, 5), (64, 70)):
        for layout in ("compact", "apart"):
            kernel_calls.check(kernel_calls.made(op, rows, n, "bfloat16", layout, np.random.default_rng(n)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("off", ["x", "weight"])
def test_one_tensor_off_16_bytes(off: str, dtype: str) -> None:
    for op in (BY_NAME["rms"], BY_NAME["rms_bwd"], BY_NAME["rms_of_gated"], BY_NAME["spread_bwd"]):
        made = kernel_calls.made(op, 3, 64, dtype, "compact", np.random.default_rng(0))
        shifted = kernel_calls.place(op.inputs[off], made.arrays[off], "off")
        kernel_calls.check(made._replace(where={**made.where, off: shifted}))


def test_sums_over_many_rows() -> None:
    for name in ("rms_bwd", "spread_bwd"):
        for n, layout in ((8, "compact"), (65, "apart")):
            made = kernel_calls.made(BY_NAME[name], 1201, n, "float32", layout, np.random.default_rng(0))
            kernel_calls.check(made)


def test_sums_for_a_scalar_alone() -> None:
    """Of short rows a CTA has several, each of which has its own sum."""
    tempered = fused(
        lambda xp, x, s: xp.exp(x * s - xp.max(x, **ROW)), operands={"x": "*m n", "s": ""}, name="tempered"
    )
    for n, rows in ((8, 1201), (64, 37), (600, 3)):
        kernel_calls.check(kernel_calls.made(tempered.grad, rows, n, "float32", "compact", np.random.default_rng(n)))


def test_workspaces_stop_growing_with_the_rows() -> None:
    def parts(m: int) -> dict[str, Array | None]:
        made = kernel_calls.made(BY_NAME["spread_bwd"], m, 64, "float32", "compact", np.random.default_rng(0))
        return dict(made.planned()[1].workspaces)

    assert parts(10**5) == parts(10**4)
    assert {name: array.shape[0] for name, array in parts(20).items() if array} == {
        "dweight_partials": 2, "dbias_partials": 2, "dfactor_partials": 32
    }  # fmt: skip


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("lead", [(3, 2), ()])
def test_gradients(op: Op, lead: tuple[int, ...]) -> None:
    for attrs in ({}, {"cap": 0.7}) if op.attrs else ({},):
        gradient.check(op, Case("", {"m": lead, "n": 5}, attrs=attrs))


def smooth(seed: int) -> Op | None:
    """An op of a random expression with reductions, without steps; None of another one."""
    program = random_programs.program(seed)
    primitives = {step.primitive for step in program.steps}
    steep = {"floor", "round", "sign", "less", "less_equal", "equal"}
    if primitives & steep or not primitives & {*random_programs.REDUCTIONS}:
        return None

    def function(xp: Any, x: Any, y: Any, bias: Any, scale: Any, s: Any, packed: Any) -> Any:
        given = {"x": x, "y": y, "bias": bias, "scale": scale, "s": s, "packed": packed, "mask": y > 0}
        named: dict[str, Any] = {
            name: partial(getattr(xp, name), **ROW) if primitive.reduces else getattr(xp, name)
            for name, primitive in PRIMITIVES.items()
        }
        return program(named, given, packed.shape[-1] // 2)

    operands = {name: shape for name, shape in random_programs.OPERANDS.items() if name != "mask"}
    try:
        return fused(function, operands=operands, name=f"random{seed}")
    except ValueError:  # its outputs have no rows
        return None


@pytest.mark.no_cover
@pytest.mark.parametrize("start", range(0, 400, 50))
def test_random_expressions(start: int) -> None:
    made = [op for seed in range(start, start + 50) if (op := smooth(seed))]
    assert len(made) >= 5
    for op in made:
        for stage in (op, op.grad):
            rng = np.random.default_rng(start)
            n, rows = int(rng.choice([5, 16, 33, 200])), int(rng.choice([1, 3, 20]))
            layout, dtype = str(rng.choice(kernel_calls.LAYOUTS)), str(rng.choice(FLOATS))
            kernel_calls.check(kernel_calls.made(stage, rows, n, dtype, layout, rng))


def test_nan_and_infinities_of_a_row() -> None:
    """NaN reaches whatever follows from the row; a softmax is 0 at -inf; other rows do not notice."""
    for name in ("probabilities", "total", "log_sum_exp"):
        for n in (7, 1030):
            made = kernel_calls.made(BY_NAME[name], 3, n, "float32", "compact", np.random.default_rng(0))
            arrays = {key: a.copy() for key, a in made.arrays.items() if a is not None}
            arrays["x"][1, 2], arrays["x"][2, 0] = np.nan, -np.inf
            got = kernel_calls.run(made._replace(arrays=arrays))
            with np.errstate(invalid="ignore"):
                wanted = BY_NAME[name].reference(np, *arrays.values())
            for found, exact in zip(got, wanted, strict=True):
                np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)
            assert np.isnan(got[0][1]).all()


@pytest.mark.parametrize(
    ("name", "n", "form", "ctas", "kept"),
    [
        ("rms", 128, "one_pass", 1, True), ("rms", 8192, "one_pass", 1, True), ("rms", 32768, "ring", 1, False),
        ("rms", 131072, "ring", 4, False), ("rms", 1 << 20, "passes", 1, False),
        ("rms_bwd", 1024, "ring", 1, False), ("rms_bwd", 32768, "ring", 4, False),
        ("rms_bwd", 1 << 19, "passes", 1, False), ("probabilities_bwd", 8192, "one_pass", 1, True),
        ("probabilities_bwd", 32768, "one_pass", 4, True), ("probabilities_bwd", 1 << 20, "passes", 1, False),
        ("capped_log_probabilities", 32768, "one_pass", 4, True), ("probabilities", 32768, "ring", 1, False),
    ],
)  # fmt: skip
def test_where_rows_wait(name: str, n: int, form: str, ctas: int, kept: bool) -> None:
    config = configured(BY_NAME[name], 4096, n)
    assert (config.form, config.cluster, config.keep) == (form, ctas, kept)
    assert config.threads % 32 == 0
    assert bool(config.clusters) == (name == "rms_bwd")


@pytest.mark.parametrize(
    ("name", "n", "threads", "resident", "slots", "ctas"),
    [
        ("rms", 4097, 192, 6, 1, 1), ("probabilities_bwd", 4097, 192, 4, 1, 1), ("unit_bwd", 2049, 96, 8, 1, 1),
        ("capped_log_probabilities", 4097, 96, 8, 1, 1), ("capped_log_probabilities", 32768, 256, 5, 1, 4),
        ("rms_bwd", 8192, 256, 2, 2, 2), ("rms_bwd", 32768, 512, 1, 3, 4), ("rms_of_gated_bwd", 4096, 512, 1, 3, 1),
    ],
)  # fmt: skip
def test_threads_slots_and_clusters(name: str, n: int, threads: int, resident: int, slots: int, ctas: int) -> None:
    """Those that were the fastest on an H200."""
    config = configured(BY_NAME[name], 4096, n)
    assert (config.threads, config.resident, config.stages, config.cluster) == (threads, resident, slots, ctas)


def test_columns_do_not_wait_for_reductions_of_numbers_alone() -> None:
    """The gradient of a temperature is a third stage, which that of the tile does not need."""

    def tempered(xp: Any, x: Any, scale: Any) -> Any:
        e = xp.exp(x * scale - xp.max(x * scale, **ROW))
        return e / xp.sum(e, **ROW)

    made = fused(tempered, operands={"x": TILE, "scale": "*m 1"})
    assert made.grad
    config = configured(made.grad, 4096, 4096)
    expression = parse_text(config.expression)
    assert (config.kinds, len(stages(expression)), awaited(expression, config.kinds)) == ("tc", 3, 2)
    assert (config.keep, config.resident) == (True, 4)
    for n, layout in ((97, "off"), (2048, "compact")):
        kernel_calls.check(kernel_calls.made(made.grad, 5, n, "bfloat16", layout, np.random.default_rng(n)))


def test_sums_that_nothing_waits_for_take_many_threads() -> None:
    made = fused(lambda xp, x, shift: xp.softplus(x + shift), operands={"x": TILE, "shift": "n"}, name="shifted")
    assert made.grad
    found = [
        (c.threads, c.resident, c.cluster) for c in (configured(made.grad, 4096, n) for n in (3072, 4096, 4097, 8192))
    ]
    assert found == [(384, 2, 1), (512, 2, 1), (544, 2, 1), (512, 1, 1)]


@pytest.mark.slow
def test_ctas_of_a_row_without_reductions_run_on_any_sm(monkeypatch: pytest.MonkeyPatch) -> None:
    """They exchange nothing, so that none is left out because a cluster must lie within a group of SMs."""
    made = fused(lambda xp, x, shift: xp.softplus(x + shift), operands={"x": TILE, "shift": "n"}, name="shifted")
    launched, launch = [], interpreter.launch

    def noted(*given: Any, cluster: Any = None, **more: Any) -> None:
        launched.append(cluster)
        launch(*given, cluster=cluster, **more)

    monkeypatch.setattr(interpreter, "launch", noted)
    assert made.grad
    for op, cluster in ((made.grad, None), (BY_NAME["rms_bwd"], [1, 2, 1])):
        config = configured(op, 4096, 12_289)
        assert (config.cluster, config.clusters) == (2, 128)
        kernel_calls.check(kernel_calls.made(op, 3, 12_289, "bfloat16", "compact", np.random.default_rng(3)))
        assert launched.pop(0) == cluster
        launched.clear()
    assert [configured(op, 600, 40_704).clusters for op in (made.grad, BY_NAME["rms_bwd"])] == [33, 28]


def test_long_rows_off_a_vector_without_reductions_are_shared_by_clusters() -> None:
    seed = int(os.environ.get("CUTE_OPS_SEED", "39"))
    print("seed", seed)
    rng = np.random.default_rng(seed)
    op = fused(
        lambda xp, x, of_row, gain: x * of_row * gain,
        operands={"x": TILE, "of_row": "*m 1", "gain": "n"}, name="dequantized_rows",
    )  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        n = int(rng.integers(9_000, 30_000)) | 1
        config = configured(op, 4096, n, dtype)
        assert config.form == "one_pass" and config.cluster > 1, (n, dtype)
        kernel_calls.check(kernel_calls.made(op, 3, n, dtype, "compact", rng))


@pytest.mark.parametrize(
    ("n", "dtype", "threads", "share", "resident", "slots"),
    [
        (768, "bfloat16", 256, 32, 1, 2), (1024, "bfloat16", 192, 64, 2, 3), (1536, "bfloat16", 256, 64, 1, 3),
        (2048, "bfloat16", 192, 96, 2, 3), (3584, "bfloat16", 256, 128, 1, 3), (4096, "bfloat16", 256, 128, 1, 2),
        (6144, "bfloat16", 256, 256, 1, 3), (3072, "float32", 256, 256, 2, 2), (1375, "float16", 128, 64, 3, 2),
        (127, "bfloat16", 128, 8, 3, 2), (201, "bfloat16", 128, 16, 4, 2),
    ],
)  # fmt: skip
def test_two_sums_of_reduced_rows_have_few_threads(
    n: int, dtype: str, threads: int, share: int, resident: int, slots: int
) -> None:
    """A layer norm's gradient, as it was the fastest on an H200."""

    def norm(xp: Any, x: Any, weight: Any, shift: Any) -> Any:
        x = x - xp.mean(x, **ROW)
        return x * xp.rsqrt(xp.mean(x * x, **ROW) + 1e-6) * weight + shift

    made = fused(norm, operands={"x": TILE, "weight": "n", "shift": "n"})
    assert made.grad
    c = configured(made.grad, 20_000, n, dtype)
    assert (c.threads, c.threads_per_row, c.resident, c.stages) == (threads, share, resident, slots)


@pytest.mark.slow
def test_sums_of_all_elements_are_exchanged_once() -> None:
    """Not for each row, unless many warps share it: nothing but the gradients of scalars waits for them."""

    def scaled(xp: Any, x: Any, factor: Any, shift: Any) -> Any:
        return xp.sigmoid(x * factor + shift)

    def divided(xp: Any, x: Any, factor: Any) -> Any:
        return x / xp.sum(x * factor, **ROW)

    for function, operands, late in ((scaled, {"factor": "", "shift": ""}, 2), (divided, {"factor": ""}, 0)):
        op = fused(function, operands={"x": TILE, **operands}).grad
        assert op
        for n, rows, many in ((97, 70, False), (1500, 5, False), (5000, 3, True)):
            call = kernel_calls.made(op, rows, n, "bfloat16", "compact", np.random.default_rng(n))
            kernel_calls.check(call, n < 100)
            with kernel_calls.interpreted("cute_ops.kernels.rows.on_chip"):
                kernel = import_module("cute_ops.kernels.rows.on_chip").RowsInRing(call.planned()[1].variant)
            assert len(kernel.late_sums) == (0 if many else late)


@pytest.mark.parametrize("rows", [2, 3, 5, 7, 13])
def test_a_cluster_waits_for_the_sums_of_all_elements(rows: int) -> None:
    """However many rows it has: on an H200 a CTA ended while others still sent to it, an unspecified launch failure."""

    def scaled(xp: Any, x: Any, factor: Any) -> Any:
        return xp.sigmoid(x * factor)

    def beside_mean(xp: Any, x: Any, factor: Any) -> Any:
        return x - xp.mean(x, **ROW) * factor

    for function in (scaled, beside_mean):
        op = fused(function, operands={"x": TILE, "factor": ""}).grad
        assert op
        call = kernel_calls.made(op, rows, 1030, "float32", "compact", np.random.default_rng(rows))
        tile = {**in_form(call.planned()[1], "persistent"), "cluster": 2, "clusters": 2}
        kernel_calls.check(call._replace(tile=tile), watched=True)


def test_what_is_compared_with_an_extreme_number_rounds_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 266010093 of the random expressions: with a product and a sum as one instruction where the smallest number
    was found, and as two where it was looked for, a row's gradient was lost on an H200.
    """

    def smallest(xp: Any, x: Any, y: Any) -> Any:
        return xp.min(xp.sin(x) / (y * y + 1.5) + xp.sin(x), **ROW)

    op = fused(smallest, operands={"x": TILE, "y": TILE}).grad
    assert op
    call = kernel_calls.made(op, 13, 64, "float32", "compact", np.random.default_rng(0))
    with kernel_calls.interpreted("cute_ops.kernels.emit.primitives"):
        device = import_module("cute_ops.kernels.emit.primitives").DEVICE
    add, turns = device["add"], itertools.count()
    monkeypatch.setitem(device, "add", lambda x, y: add(x, y) * (1 + next(turns) % 2 * 2.0**-23))
    tile = in_form(call.planned()[1], "shared memory")  # where values are computed again
    kernel_calls.check(call._replace(tile=tile))


@pytest.mark.parametrize(("n", "found"), [(12_288, (2, 256)), (36_864, (4, 256)), (61_440, (4, 384))])
def test_few_ctas_share_long_rows_of_two_sums(n: int, found: tuple[int, int]) -> None:
    """As measured: of a copy's rate 61440 take 0.35 with two clusters of eight on their SMs, 0.65 with one of four."""

    def norm(xp: Any, x: Any, weight: Any, bias: Any) -> Any:
        apart = x - xp.mean(x, **ROW)
        return apart * xp.rsqrt(xp.mean(apart * apart, **ROW) + 1e-6) * weight + bias

    config = configured(fused(norm, operands={"x": "*m n", "weight": "n", "bias": "n"}).grad, 1000, n)
    assert (config.cluster, config.threads) == found and (n < 30_000 or config.resident == 1)


@pytest.mark.parametrize(("n", "threads"), [(777, 32), (1039, 32), (1501, 64), (2051, 96), (3001, 96)])
def test_few_vectors_of_threads_lie_past_the_end_of_unaligned_rows(n: int, threads: int) -> None:
    """As measured: 1039 take 0.75 of a copy's rate with 64 threads, 0.95 with 32; 1501 0.73 with 96, 0.88 with 64."""
    made = fused(
        lambda xp, x, s: xp.softmax(x * s, axis=-1), operands={"x": TILE, "s": "*m 1"}, name="tempered_softmax"
    )
    assert configured(made, 4096, n).threads_per_row == threads


@pytest.mark.parametrize(("n", "threads"), [(67, 2), (495, 8), (835, 16), (1664, 32), (3072, 64), (16_384, 256)])
def test_rows_of_which_only_sums_are_stored_have_few_threads(n: int, threads: int) -> None:
    """As measured: 110647 x 1664 took 135 us with two vectors a thread, 85 with seven; 261510 x 836 160 and 102."""
    made = fused(lambda xp, x: xp.logsumexp(x, **ROW), operands={"x": TILE}, name="lse")
    assert configured(made, 4096, n).threads_per_row == threads


@pytest.mark.parametrize(("n", "threads"), [(41, 4), (105, 4), (139, 4), (251, 8)])
def test_short_unaligned_rows_have_few_threads(n: int, threads: int) -> None:
    made = fused(lambda xp, x: x - xp.mean(x, **ROW), operands={"x": TILE}, name="centred")
    assert configured(made, 4096, n).threads_per_row == threads


def test_what_two_outputs_need_is_computed_again() -> None:
    """Kept in registers it was spilled: the gradient of 13370 x 12288 took 466 us instead of 315."""
    op = next(op for op in (*MODELS, *PARTS) if op.name == "soft_cross_entropy")
    assert isinstance(op.grad, Op)
    for n in (4096, 12_288):
        assert not configured(op.grad, 4096, n).keep


def test_few_clusters_of_unaligned_rows_do_nothing() -> None:
    """Of 14 clusters, eight of which took rows, there are 21 now, of which 16 do."""
    config = configured(BY_NAME["rms_bwd"], 477, 73_447, "float16")
    assert (config.cluster, config.resident, config.clusters) == (16, 3, 16)


def test_rows_a_little_longer_than_a_cta_s_need_no_cluster_where_unaligned() -> None:
    """4097 numbers of 4 bytes, beside those of 4096 and of 5000."""
    for name, threads in (("rms", (352, 3)), ("unit_bwd", (352, 2)), ("capped_log_probabilities", (192, 4))):
        config = configured(BY_NAME[name], 4096, 4097, "float32")
        assert (config.form, config.cluster, config.threads, config.resident) == ("one_pass", 1, *threads)
        longer = configured(BY_NAME[name], 4096, 5001, "float32")
        assert longer.form == "ring" or longer.cluster > 1


def test_warps_with_many_reductions_have_more_vectors() -> None:
    def cosine(xp: Any, x: Any, y: Any) -> Any:
        products = (xp.sum(a * b, **ROW) for a, b in ((x, y), (x, x), (y, y)))
        total, *squares = products
        return total * xp.rsqrt(squares[0] * squares[1] + 1e-6)

    found = fused(cosine, operands={"x": TILE, "y": TILE})
    threads = [(c.threads, c.resident) for c in (configured(op, 4096, 4096) for op in (found, BY_NAME["unit_bwd"]))]
    assert threads == [(256, 3), (512, 2)]


def test_more_threads_where_copies_are_not_asynchronous() -> None:
    threads = {}
    for n in (4097, 4098):
        config = configured(BY_NAME["rms_of_gated_bwd"], 4096, n)
        threads[n] = config.threads * config.resident
    assert threads == {4097: 864, 4098: 576}


def test_older_gpus_have_no_clusters() -> None:
    for op in (BY_NAME["rms"], BY_NAME["rms_bwd"]):
        for n in (1024, 32768, 131072):
            assert configured(op, 4096, n, arch="sm_80").cluster == 1


@each
def test_other_configs_are_tried(op: Op) -> None:
    for n in (64, 616, 32768):  # 616: of 77 vectors, three warps to a row
        sizes = op.example((64,), n)
        call = bind(op, {name: Array(t.of(sizes), op.dtype_near(t, "bfloat16")) for name, t in op.inputs.items()})
        problem = signature(call, {}, parse("sm_90a")).problem
        heuristic = op.config(problem)
        assert not objection(op.space, problem, heuristic)
        found = op.space.others(problem, heuristic)
        assert len(found) >= 2
        assert all(op.space.needs(problem, config).threads <= 1024 for config in (heuristic, *found))


COMPILED = [
    *((stage, n, "sm_90a") for op in FIVE for stage in (op, op.grad) for n in (128, 4096, 8192, 32768)),
    *((stage, 32768, "sm_80") for stage in (FIVE[0], FIVE[4].grad)),
    *((stage, 97, "sm_90a") for op in OPS[5:] for stage in (op, op.grad)),
]  # fmt: skip


@pytest.mark.drawn(0.2)
@pytest.mark.parametrize(("op", "n", "arch"), COMPILED, ids=lambda x: getattr(x, "name", str(x)))
def test_kernels_compile_without_spills(op: Op, n: int, arch: str, tmp_path: Path) -> None:
    sizes, path = op.example((4096,), n), tmp_path / "kernel.cubin"
    arrays = {name: Array(t.of(sizes), op.dtype_near(t, "bfloat16")) for name, t in op.inputs.items()}
    worker.compile(choose(bind(op, arrays), {}, parse(arch)).variant, path)
    assert all((kernel.stack, kernel.local) == (0, 0) for kernel in sass.resources(path))


@pytest.mark.slow
def test_halves_off_a_vector_are_loaded_in_whole_vectors(tmp_path: Path) -> None:
    op, path = BY_NAME["rms_of_gated"], tmp_path / "kernel.cubin"
    arrays = {name: Array(t.of(op.example((64,), 4097)), "bfloat16") for name, t in op.inputs.items()}
    worker.compile(choose(bind(op, arrays), {}, parse("sm_90a")).variant, path)
    # A thread has two vectors of each half, which lie in two aligned ones each.
    assert (
        sum(access.number for access in sass.accesses(sass.sass(path)) if (access.kind, access.bytes) == ("LDG", 16))
        >= 8
    )


COMPILED_FORMS = [(op, form) for op, form in IN_FORMS if op.name in ("log_sum_exp", "spread_bwd")]


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize(("op", "form"), COMPILED_FORMS, ids=lambda x: getattr(x, "name", x))
def test_every_form_compiles(op: Op, form: str, tmp_path: Path) -> None:
    made = kernel_calls.made(op, 64, 97, "bfloat16", "compact", np.random.default_rng(0))
    planned = made._replace(tile=in_form(made.planned()[1], form)).planned()[1]
    worker.compile(planned.variant, tmp_path / "kernel.cubin")


def test_a_function_that_only_sometimes_reduces() -> None:
    """Each combination of attributes has the kernel that it needs."""

    def centred(xp: Any, x: Any, *, mean: bool) -> Any:
        return x - xp.mean(x, **ROW) if mean else x * 2

    op = fused(centred, operands={"x": TILE}, attrs={"mean": False})
    for stage in (op, op.grad):
        for mean in (False, True):
            made = kernel_calls.made(stage, 3, 40, "float32", "compact", np.random.default_rng(0))
            kernel_calls.check(made._replace(attrs={"mean": mean}))
