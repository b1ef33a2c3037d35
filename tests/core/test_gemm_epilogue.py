"""Products with epilogues without a GPU: declarations, references, what is refused, results and machine code."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cute_ops import Array, Case, Op, testing
from cute_ops.autotune import dispatch
from cute_ops.composite.gated_mlp import gated_mlp
from cute_ops.declaration.binding import bind
from cute_ops.errors import CompileError
from cute_ops.expressions import TraceError
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.layout import Memory
from cute_ops.jit.plan import plan
from cute_ops.jit.target import parse
from cute_ops.kernels.gemm.config import GemmConfig
from cute_ops.ops.expression.broadcast import fit
from cute_ops.ops.expression.fused import fused
from cute_ops.ops.gemm import mlp_products
from cute_ops.ops.gemm.by_call import op_of_call
from cute_ops.ops.gemm.config import EpilogueCost, configs
from cute_ops.ops.gemm.fused import fused_linear
from cute_ops.ops.gemm.linear import linear, linear_float32
from cute_ops.testing import kernel_calls
from cute_ops.tools import gradient, sass
from tests.emulator import machine_code, products
from tests.ops.epilogues import BY_NAME, DIFFERENTIABLE, OPS, TILE, columns

TARGET = parse("sm_90a")
each = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def made(op: Op, m: tuple[int, ...], n: int, k: int, dtype: str = "bfloat16", **others: str) -> dict[str, np.ndarray]:
    """Random inputs, those of other dtypes by name."""
    dtypes = {f"T_{name}": other for name, other in others.items()}
    given = testing.inputs(op, Case("", {"m": m, "n": n, "k": k}, dtypes), dtype)
    found = {name: a for name, a in given.items() if a is not None}
    # Sums of the size of what is added to them.
    return found | {"weight": testing.as_dtype(found["weight"].astype(np.float32) / k**0.5, dtype)}


# --- declarations --------------------------------------------------------------------------------------------------


def test_the_declaration_follows_from_the_function() -> None:
    assert repr(BY_NAME["with_all"]) == (
        "Op with_all(x: T[*m k], weight: T[n k], scale: T_scale[*m], bias: T_bias[n], residual: T_residual[*m n],"
        " factor: T_factor[]) -> out: T[*m n]"
    )
    assert repr(BY_NAME["gated_dgrad"]) == (
        "Op gated_dgrad(x: T[*m k], weight: T[k n], pre: T_pre[*m 2n]) -> dpre: T[*m 2n]"
    )
    assert repr(BY_NAME["saving"]) == (
        "Op saving(x: T[*m k], weight: T[n k], bias: T_bias[n]) -> pre: float32[*m n], out: T[*m n]"
    )


def test_an_epilogue_by_its_text() -> None:
    op = fused_linear("e1(t,r) add 0 1; gelu 2 -> 3", operands={"bias": "n"}, name="by_text")
    given = made(op, (3,), 8, 16)
    (got,) = testing.run_reference(op, given, {})
    (wanted,) = testing.run_reference(BY_NAME["with_gelu"], given, {})
    np.testing.assert_array_equal(got, wanted)
    texts = [plan(bind(o, specs(o, 64, 64, 64)), {}, TARGET).variant.config for o in (op, BY_NAME["with_gelu"])]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("shape", "packed", "wanted"),
    [
        ((), False, ("", ())), ((1,), False, ("", ())), ((1, 1), False, ("", ())),
        ((8,), False, ("n", (8,))), ((1, 8), False, ("n", (8,))), ((16,), True, ("2n", (16,))),
        ((2, 8, 8), False, ("*m n", (2, 8, 8))), ((8, 8), False, ("*m n", (2, 8, 8))),
        ((2, 1, 8), False, ("*m n", (2, 8, 8))), ((2, 8, 16), True, ("*m 2n", (2, 8, 16))),
        ((2, 8, 1), False, ("*m 1", (2, 8, 1))), ((8, 1), False, ("*m 1", (2, 8, 1))),
        ((7,), False, None), ((16,), False, None), ((3, 8), False, None), ((1, 2, 8, 8), False, None),
    ],
    ids=str,
)  # fmt: skip
def test_operands_fit_as_numpy_broadcasts_them(shape: Any, packed: bool, wanted: Any) -> None:
    """Against ``(2, 8, 8)``, whose last two sizes are equal."""
    found = fit(shape, (2, 8), 8, packed)
    assert (found and found[:2]) == wanted
    if wanted:
        whole = (2, 8, 16 if "2n" in wanted[0] else 8)
        assert np.broadcast_shapes(shape, whole) == whole == np.broadcast_shapes(wanted[1], whole)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((), ("", (2, 3))), ((1, 1), ("", (2, 3))), ((3, 1, 1), ("", (2, 3))), ((7,), ("n", (2, 3, 7))),
        ((2, 3, 1, 7), ("n", (2, 3, 7))), ((2, 1, 1, 7), ("n", (2, 3, 7))), ((5, 7), ("*m n", (2, 3, 5, 7))),
        ((2, 3, 5, 1), ("*m 1", (2, 3, 5, 1))), ((3, 7), None), ((1, 2, 3, 5, 7), None),
    ],
    ids=str,
)  # fmt: skip
def test_operands_of_batches_fit_as_numpy_broadcasts_them(shape: Any, wanted: Any) -> None:
    """Against ``(2, 3, 5, 7)``, of six weights."""
    found = fit(shape, (2, 3, 5), 7, False, (2, 3))
    assert (found and found[:2]) == wanted
    if found:
        given = np.arange(np.prod(shape)).reshape(shape)
        one_row = () if "*m" in found.shape else (slice(None),) * 2 + (0,)
        whole = np.broadcast_to(given, (2, 3, 5, 7))[..., : 1 if found.shape in ("*m 1", "") else 7][one_row]
        np.testing.assert_array_equal(
            np.broadcast_to(given.reshape(found.own), found.sizes), whole.reshape(found.sizes)
        )


def test_an_op_of_a_call_is_made_once() -> None:
    def shifted(xp: Any, acc: Any, bias: Any, factor: Any = None, *, slope: float = 1.0) -> Any:
        return slope * (acc + bias) if factor is None else slope * (acc + bias) * factor

    def other(xp: Any, y: Any, bias: Any) -> Any:
        return bias + y

    op = op_of_call(shifted, ("n",))
    assert op is op_of_call(shifted, ("n", None))
    other.__name__ = "shifted"
    assert op is op_of_call(other, ("n",))  # what it computes, and how it is called, are the same
    assert op.name == "linear_shifted_1f90a1072368"  # in every process
    assert {op.name} == {o.name for o in (op, op_of_call(shifted, ("n",), attrs=(("slope", 1.0),)))}
    others = [op_of_call(shifted, shapes) for shapes in ((TILE,), ("n", ""), ("n", "*m 1"))]
    others += [op_of_call(shifted, ("n",), layout="k n"), op_of_call(shifted, ("n",), attrs=(("slope", 2.0),))]
    others.append(op_of_call(shifted, ("n",), save="none"))
    assert len({op.name for op in (op, *others)}) == 7
    assert repr(others[2]).startswith("Op linear_shifted_")
    assert list(others[2].inputs) == ["x", "weight", "bias", "factor"]
    beside = op_of_call(lambda xp, acc, weight, y, _x: acc * weight + y + _x, ("n", "n", "n"))
    assert list(beside.inputs) == ["x", "weight", "operand0", "y", "operand2"]


def test_operands_go_by_name() -> None:
    op = fused_linear(lambda xp, acc, x1, x2: acc + x1 - x2, operands={"x2": TILE, "x1": "n"}, name="swapped")
    assert plan(bind(op, specs(op, 64, 64, 64)), {}, TARGET).variant.config["reads"] == "x2 x1"
    given = made(op, (3,), 8, 16)
    acc = given["x"].astype(np.float64) @ given["weight"].astype(np.float64).T
    (exact,) = testing.expected(op, given, {})
    np.testing.assert_allclose(exact, acc + given["x1"].astype(np.float64) - given["x2"].astype(np.float64))


def specs(op: Op, m: int, n: int, k: int, dtype: str = "bfloat16") -> dict[str, Array | None]:
    return testing.specs(op, Case("", {"m": (m,), "n": n, "k": k}), dtype)


@each
@pytest.mark.parametrize("m", [(), (2, 3)], ids=str)
def test_references(op: Op, m: tuple[int, ...]) -> None:
    """By NumPy in float64, written out."""
    given = made(op, m, columns(op, 6), 5)
    x, weight, *operands = (a.astype(np.float64) for a in given.values())
    acc = x @ (weight if op.inputs["weight"].shape.startswith("k") else weight.T)
    n, exact = acc.shape[-1] // 2, testing.expected(op, given, op.attrs)

    def gelu(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    def silu(x: np.ndarray) -> np.ndarray:
        return x / (1 + np.exp(-x))

    wanted: Any
    match op.name:
        case "with_bias" | "with_residual":
            wanted = (acc + operands[0],)
        case "with_gelu":
            wanted = (gelu(acc + operands[0]),)
        case "with_silu":
            wanted = (silu(acc),)
        case "saving":
            wanted = (acc + operands[0], gelu(acc + operands[0]))
        case "with_swiglu":
            wanted = (silu(acc[..., :n]) * acc[..., n:],)
        case "gated_saving":
            pre = acc + operands[0]
            wanted = (pre, silu(pre[..., :n]) * pre[..., n:])
        case "gated_dgrad":
            gate, up = np.split(operands[0], 2, -1)
            slope = (silu(gate + 1e-6) - silu(gate - 1e-6)) / 2e-6
            wanted = (np.concatenate([acc * up * slope, acc * silu(gate)], -1),)
        case "with_rstd":
            out = acc + operands[0]
            wanted = (out, 1 / np.sqrt((out**2).mean(-1, keepdims=True) + op.attrs["eps"]))
        case "gated_reducing":
            out = silu(acc[..., :n]) * acc[..., n:]
            wanted = (abs(out).max(-1) * operands[0], out, out.min(-1, keepdims=True), out.sum(-1, keepdims=True))
        case "with_rope":
            bias, cos, sin = operands
            a, b = np.split((acc + bias), 2, -1)
            wanted = (np.concatenate([a * cos - b * sin, b * cos + a * sin], -1),)
        case "with_qk_norm":
            norm, cos, sin = operands
            a, b = np.split(acc / np.sqrt((acc**2).mean(-1, keepdims=True) + 1e-6) * norm, 2, -1)
            wanted = (np.concatenate([a * cos - b * sin, b * cos + a * sin], -1),)
        case "rescaled":
            y = silu(acc[..., :n]) * acc[..., n:] * operands[0][..., None]
            largest = abs(y).max(-1, keepdims=True)
            wanted = (y / np.maximum(largest, 1e-4), largest)
        case _:
            scale, bias, residual, factor = operands
            wanted = (np.clip(acc * scale[..., None] + bias, -2, 2) * factor + residual,)
    assert len(wanted) == len(exact)
    for got, each in zip(exact, wanted, strict=True):
        np.testing.assert_allclose(
            got, each, rtol=1e-6, atol=2e-3 if "gelu" in op.name or op.name == "saving" else 1e-8
        )


@each
@pytest.mark.parametrize("zero", ["m", "n", "k"])
@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:invalid value encountered in divide")
def test_nothing_is_launched_for_nothing(op: Op, zero: str) -> None:
    """Where there is nothing to add up, the epilogue of zero."""
    sizes: dict[str, Any] = {"m": (3,), "n": columns(op, 4), "k": 8, zero: (0,) if zero == "m" else 0}
    given = testing.inputs(op, Case("", sizes), "bfloat16")
    assert bind(op, {name: Array(a.shape, "bfloat16") for name, a in given.items() if a is not None}).empty
    outs = testing.run_reference(op, given, op.attrs)
    assert [out.shape for out in outs] == [t.of(sizes) for t in op.outputs.values()]
    if op.name == "with_residual" and zero == "k":
        np.testing.assert_array_equal(outs[0], given["residual"])


REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "total does not have the shape '*m n'": (
        lambda xp, acc: (acc, xp.sum(acc, axis=-1, keepdims=True)), {"outputs": {"out": TILE, "total": TILE}}
    ),
    "value 2 does not have the shape": (
        lambda xp, acc, scale: (acc, acc, scale * 2), {"operands": {"scale": "*m 1"}}
    ),
    "operand `mask` holds bools": (
        lambda xp, acc, mask: xp.where(mask, acc, 0.0), {"operands": {"mask": "bool *m n"}}
    ),
    "value 0 holds bools": (lambda xp, acc: acc > 0, {}),
    "value 1 does not have the shape": (lambda xp, acc, row: (acc, row * 2), {"operands": {"row": "n"}}),
    "it returns 1 values for out[:n], out[n:]": (lambda xp, acc: acc, {"outputs": {"out": "*m 2n"}}),
    "out has shape 'n'": (lambda xp, acc: acc, {"outputs": {"out": "n"}}),
    "weight has shape 'm k'": (lambda xp, acc: acc, {"weight": "m k"}),
    "its text takes (t,r), and its operands are (t,t)": ("e1(t,r) add 0 1 -> 2", {"operands": {"bias": TILE}}),
    "acc, which is packed": (lambda xp, acc: acc * 2, {"weight": "2n k"}),
    "it has groups of 48 columns": (lambda xp, acc: xp.rotate_half(acc, 48), {}),
    "xp.rotate_half of the tile `residual`": (
        lambda xp, acc, residual: xp.rotate_half(acc + residual, 64), {"operands": {"residual": TILE}}
    ),
    "it reduces groups of `bias`": (
        lambda xp, acc, bias: xp.group_sum(acc + bias, 64), {"operands": {"bias": "n"}}
    ),
    "it has groups of 32 columns, which are reduced, and of 64": (
        lambda xp, acc: xp.rotate_half(acc * xp.group_max(acc, 32), 64), {}
    ),
    "xp.rotate_half of a value that depends on": (lambda xp, acc: xp.rotate_half(xp.rotate_half(acc, 64), 128), {}),
    "rotate_half of a value without columns": (
        lambda xp, acc, scale: acc + xp.rotate_half(scale, 64), {"operands": {"scale": "*m"}}
    ),
    "xp.arange of anything but": (lambda xp, acc: acc + xp.arange(64), {}),
    "dtypes has 'out'": (lambda xp, acc: acc, {"dtypes": {"out": "float8_e4m3fn"}}),
    "save is 'post'": (lambda xp, acc: acc, {"save": "post"}),
    "an operand or an output is called 'acc'": (lambda xp, acc: acc, {"outputs": {"acc": TILE}}),
    "operand `bias` has shape 'm'": (lambda xp, acc, bias: acc + bias, {"operands": {"bias": "m"}}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_fused_is_refused(message: str) -> None:
    epilogue, more = REFUSED[message]
    with pytest.raises((ValueError, TraceError), match=re.escape(message)):
        fused_linear(epilogue, name="refused", **more)


def test_columns_in_groups_are_for_products() -> None:
    with pytest.raises(ValueError, match="columns by their number or in groups are for epilogues of products"):
        fused(lambda xp, x: xp.rotate_half(x, 64), operands={"x": TILE}, name="turned")


def test_wrong_operands() -> None:
    with pytest.raises(ValueError, match="argument `weight` has n=96, no multiple of the 64 columns"):
        bind(BY_NAME["with_rope"], specs(BY_NAME["with_rope"], 3, 96, 8))
    op = BY_NAME["with_gelu"]
    with pytest.raises(ValueError, match="argument `bias` has n=7, but n=8"):
        bind(op, {"x": Array((3, 16), "float16"), "weight": Array((8, 16), "float16"), "bias": Array((7,), "float16")})
    with pytest.raises(TypeError, match="argument `x` has dtype float64, expected bfloat16, float16 or float32"):
        bind(op, {"x": Array((3, 16), "float64"), "weight": Array((8, 16), "float64"), "bias": Array((8,), "float32")})
    with pytest.raises(ValueError, match="attribute `fused` must be 'auto', 'always' or 'never', got 'alway'"):
        bind(op, specs(op, 3, 8, 16), {"fused": "alway"})


# --- gradients -----------------------------------------------------------------------------------------------------

STEPS = {
    "with_bias": "with_bias_bwd_bias linear_dx linear_dweight",
    "with_gelu": "with_gelu_bwd linear_of_dacc_dx linear_of_dacc_dweight",
    "with_residual": "linear_dx linear_dweight",
    "saving": "saving_bwd linear_of_dacc_dx linear_of_dacc_dweight",
    "with_swiglu": "with_swiglu_bwd linear_of_dacc_dx linear_of_dacc_dweight",
    "gelu_again": "linear_acc gelu_again_bwd linear_of_dacc_dx linear_of_dacc_dweight",
    "with_tanh": "with_tanh_bwd with_tanh_bwd_scale linear_of_dacc_dx linear_of_dacc_dweight",
    "multiplied": "multiplied_bwd linear_kn_of_dacc_dx linear_kn_of_dacc_dweight",
    "with_summands": "with_summands_bwd with_summands_bwd_bias linear_of_dacc_dx linear_of_dacc_dweight",
    "with_rstd": "with_rstd_bwd linear_of_dacc_dx linear_of_dacc_dweight",
    "rescaled": "rescaled_bwd linear_of_dacc_dx linear_of_dacc_dweight",
    "turned_heads": "turned_heads_bwd turned_heads_bwd_norm turned_heads_bwd_sin turned_heads_bwd_scale"
    " turned_heads_bwd_shift linear_of_dacc_dx linear_of_dacc_dweight",
}
DIFFERENTIABLE_BY_NAME = {op.name: op for op in DIFFERENTIABLE}
DERIVED = tuple(dict.fromkeys((*OPS, *DIFFERENTIABLE)))
POINTWISE = {step.name: (step, columns(op, 1)) for op in DERIVED for step in op.steps if "linear" not in step.name}


@pytest.mark.parametrize("name", STEPS)
def test_what_computes_a_gradient(name: str) -> None:
    op = DIFFERENTIABLE_BY_NAME[name]
    assert " ".join(step.name for step in op.backward(op.differentiable, op.inputs)) == STEPS[name]
    # What is the cotangent itself is not computed, and what outputs say is not saved.
    assert op.handed_on == ({"residual": "out"} if name == "with_residual" else {})
    halves = ("with_swiglu", "rescaled")
    one = ("with_gelu", "multiplied", "with_rstd", "turned_heads", "with_summands")
    saves = dict.fromkeys(halves, "T[*m 2n]") | dict.fromkeys(one, "T[*m n]")
    assert (op.saving.outputs["acc"].declared if op.saving else None) == saves.get(name)


def test_gradients_that_are_one_are_written_once() -> None:
    """Where they have one dtype; the product's own is never left out for another's."""
    first, sums, *_ = DIFFERENTIABLE_BY_NAME["with_summands"].steps
    case = Case("", {"m": (64,), "n": 64, "k": 64})

    def writes(op: Op, **dtypes: str) -> str:
        given = testing.specs(op, case._replace(dtypes={f"T_{key}": d for key, d in dtypes.items()}), "bfloat16")
        chosen = plan(bind(op, given), {}, TARGET)
        assert chosen.variant.config["writes"].split() == [n for n in op.outputs if chosen.variant.tensors[n]]
        return str(chosen.variant.config["writes"])

    assert writes(first) == writes(first, bias="float32") == writes(first.only("dresidual")) == "dacc"
    assert writes(first, other="float32") == "dacc dother" and writes(first.only("dacc"), other="float32") == "dacc"
    assert writes(sums) == "dbias" and writes(sums, shift="float32") == "dbias dshift"


def test_in_which_dtype_sums_are_saved() -> None:
    saving = DIFFERENTIABLE_BY_NAME["silu_float32"].saving
    assert saving is not None and saving.outputs["acc"].declared == "float32[*m n]"


@pytest.mark.parametrize(
    ("wanted", "steps"),
    [
        ("x", "multiplied_bwd_only_dacc linear_kn_of_dacc_dx"),
        ("weight", "multiplied_bwd_only_dacc linear_kn_of_dacc_dweight"),
        ("bias", "multiplied_bwd_only_dbias"),
        ("other", "multiplied_bwd_only_dother"),
        ("x other", "multiplied_bwd_only_dacc_dother linear_kn_of_dacc_dx"),
    ],
)
def test_only_what_is_wanted_is_computed(wanted: str, steps: str) -> None:
    op = DIFFERENTIABLE_BY_NAME["multiplied"]
    found = op.backward(wanted.split(), op.inputs)
    assert " ".join(step.name for step in found) == steps
    # The gradient of the tile alone does not read that tile.
    assert (wanted == "other") == all("other" not in step.inputs or step.inputs["other"].unread for step in found)


def test_a_product_that_only_chooses_has_no_gradient() -> None:
    op = fused_linear(lambda xp, acc, row: xp.where(acc > 0, row, 0.0), operands={"row": "n"}, name="chosen")
    assert " ".join(step.name for step in op.steps) == "chosen_bwd_row"
    assert op.no_gradient == ("fused", "weight", "x")
    gradient.check(op, Case("", {"m": (2, 3), "n": 5, "k": 4}))


@pytest.mark.parametrize("op", [op for op in (*DERIVED, linear, linear_float32) if op.grad], ids=lambda op: op.name)
@pytest.mark.parametrize("m", [(), (2, 3)], ids=str)
def test_gradients(op: Op, m: tuple[int, ...]) -> None:
    gradient.check(op, Case("", {"m": m, "n": columns(op, 5), "k": 4}))


@pytest.mark.drawn(0.3)
@pytest.mark.no_cover
@pytest.mark.parametrize("layout", ["compact", "apart"])
@pytest.mark.parametrize("name", POINTWISE)
def test_kernels_of_gradients(name: str, layout: str) -> None:
    """Those that compute some of the outputs take turns at the sizes."""
    whole, size = POINTWISE[name]
    for i, (n, rows, dtype) in enumerate(
        ((7, 5, "float16"), (64, 3, "bfloat16"), (1, 1, "bfloat16"), (4160, 3, "float32"))
    ):
        for op in (whole, *whole.narrowed[(i + (layout == "apart")) % 2 :: 2]):
            given = kernel_calls.made(op, rows, -(-n // size) * size, dtype, layout, np.random.default_rng(n))
            kernel_calls.check(given)


@pytest.mark.parametrize("name", ["with_rope_bwd", "with_qk_norm_bwd"])
def test_kernels_of_gradients_with_tables_that_rows_share(name: str) -> None:
    given = kernel_calls.made(POINTWISE[name][0], 5, 192, "bfloat16", "compact", np.random.default_rng(0))
    shared = {key: table[:1].copy() for key in ("cos", "sin") if (table := given.arrays[key]) is not None}
    kernel_calls.check(given._replace(arrays={**given.arrays, **shared}))


@pytest.mark.parametrize("name", ["with_qk_norm_bwd", "rescaled_bwd", "gated_reducing_bwd"])
def test_kernels_of_groups_for_rows_of_any_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_calls, "plan", partial(plan, fixed=False))
    op, size = POINTWISE[name]
    call = kernel_calls.made(op, 3, 65 * size, "bfloat16", "compact", np.random.default_rng(0))
    assert call.planned()[1].variant.dims == {"n": None}
    kernel_calls.check(call)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("name", [*POINTWISE, "multiplied_bwd_only_dother"])
def test_kernels_of_gradients_compile(name: str, tmp_path: Path) -> None:
    every = {name: op for name, (op, _) in POINTWISE.items()}
    op = {**every, **{each.name: each for each in every["multiplied_bwd"].narrowed}}[name]
    case = Case("", {"m": (64,), "n": 4096, "k": 64})
    path = tmp_path / "kernel.cubin"
    worker.compile(plan(bind(op, testing.specs(op, case, "bfloat16")), {}, TARGET).variant, path)
    assert all((kernel.stack, kernel.local) == (0, 0) for kernel in sass.resources(path))


def test_a_gradient_has_no_gradient() -> None:
    """``d`` and an operand's name, as the gated backward's output has it."""
    assert BY_NAME["gated_dgrad"].steps == ()


# --- the framework's product ---------------------------------------------------------------------------------------


def runs_apart(op: Op, m: int = 512, n: int = 64, k: int = 64, dtype: str = "bfloat16", **more: Any) -> bool:
    """Whether the framework's product runs: in float32, as elsewhere, where ``target`` is None."""
    where, memory = more.pop("target", TARGET), more.pop("memory", {})
    given = testing.specs(op, Case("", {"m": (m,), "n": n, "k": k}, {f"T_{o}": "bfloat16" for o in op.inputs}), dtype)
    return dispatch.fallback(bind(op, given, more), memory, where) is not None


@pytest.mark.parametrize("op", [linear, *linear.steps, BY_NAME["with_gelu"], BY_NAME["with_gelu"].saving])
def test_where_the_kernel_runs(op: Op) -> None:
    large: dict[str, Any] = {"m": 8192, "n": 4096, "k": 4096}
    assert not runs_apart(op, **large)
    assert not runs_apart(op, target=None)  # the reference runs on a CPU
    assert op in (linear, *linear.steps) or not runs_apart(op, m=512)  # what costs a pass otherwise gains here, too
    unaligned, wide = {"n": 4095, "k": 4095}, {"dtype": "float32"}
    for less in (unaligned, wide, {"target": parse("sm_80")}, {"target": parse("sm_100a")}):
        assert runs_apart(op, **{**large, **less})


def test_the_host_decides_between_products_of_few_microseconds() -> None:
    """Torch's product with a bias takes the host longer than ours: it must be faster by more than the model's error."""
    small = {"m": 256, "n": 1024, "k": 2048}
    assert runs_apart(linear, **small) and not runs_apart(BY_NAME["with_bias"], **small)
    assert runs_apart(BY_NAME["with_bias"], m=192, n=2304, k=14336)


def test_who_asks_for_a_kernel_gets_it_or_hears_why() -> None:
    for more in ({"m": 1}, {"n": 63}, {"target": parse("sm_80")}):
        assert not runs_apart(linear, fused="always", **more)
    for where in (TARGET, None):
        assert runs_apart(linear, fused="never", target=where)
    problem = "attribute `fused` is 'always', but no kernel takes float32; 'auto' does."
    with pytest.raises(ValueError, match=re.escape(problem)):
        runs_apart(linear, dtype="float32", fused="always")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({}, "our kernel: # us are expected, # of the framework's product"),
        ({"fused": "always"}, "our kernel: `fused` is 'always'"),
        ({"fused": "never"}, "the framework's product: `fused` is 'never'"),
        ({"dtype": "float32"}, "the framework's product: no kernel takes float32"),
        ({"k": 4095}, "the framework's product: TMA cannot load its operands, or registers do not hold its epilogue"),
        ({"target": parse("sm_80")}, "the framework's product: it was not measured on sm_80"),
        ({"m": 155, "n": 2304, "k": 12288}, "the framework's product: # us are expected, # of our kernel"),
    ],
)  # fmt: skip
def test_the_log_says_how_a_call_runs_and_why(call: dict[str, Any], said: str, caplog: Any) -> None:
    caplog.set_level("DEBUG", "cute_ops")
    runs_apart(linear, **{"m": 8192, "n": 4096, "k": 4096, **call})
    (line,) = caplog.messages
    line = re.sub(r"\b\d+(\.\d+)?(e\+\d+)? (?=us|of)", "# ", line)
    assert line.startswith("linear{'m': (") and f"}} runs by {said}" in line


def test_no_kernel_depends_on_the_choice() -> None:
    op = BY_NAME["with_all"]
    symbols = {
        plan(bind(op, specs(op, 512, 64, 64), {"fused": fused, "limit": limit}), {}, TARGET).variant.symbol
        for fused in ("auto", "always")
        for limit in (2.0, 3.0)
    }
    assert len(symbols) == 2


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "alone", [alone for op in OPS if op.fallback for alone in op.fallback.program.ops], ids=lambda op: op.name
)
@pytest.mark.parametrize("layout", ["compact", "apart"])
def test_kernels_of_epilogues_alone(alone: Op, layout: str) -> None:
    for n, rows, dtype in ((7, 5, "float16"), (64, 3, "bfloat16"), (64, 3, "float32")):
        kernel_calls.check(kernel_calls.made(alone, rows, n, dtype, layout, np.random.default_rng(n)))


# --- results -------------------------------------------------------------------------------------------------------


def check(op: Op, given: dict[str, np.ndarray], folder: Path, arch: str, config: GemmConfig | None = None) -> None:
    """What a CPU makes of the kernel's PTX, against the reference."""
    outputs = products.run(op, given, folder, arch, config)
    testing.check(op, given, op.attrs, tuple(outputs.values()))


@pytest.mark.drawn(0.3)
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize(
    ("name", "sizes", "others"),
    [
        ("with_silu", (1, 8, 8), {}),
        ("saving", (130, 66, 40), {}),
        ("with_swiglu", (33, 70, 24), {}),
        ("gated_saving", (5, 67, 9), {}),
        ("gated_dgrad", (35, 131, 33), {}),
        ("with_all", (67, 130, 17), {"scale": "float32", "bias": "float32", "residual": "float32"}),
        ("with_all", (3, 9, 40), {}),
        ("with_rope", (67, 256, 17), {}),
        ("with_qk_norm", (35, 256, 17), {}),
        ("rescaled", (35, 192, 33), {}),
        ("with_rstd", (67, 330, 17), {}),
        ("gated_reducing", (35, 131, 33), {"scale": "float32"}),
    ],
    ids=str,
)
def test_results_without_tma(name: str, sizes: tuple[int, int, int], others: dict[str, str], tmp_path: Path) -> None:
    m, n, k = sizes
    check(
        BY_NAME[name], made(BY_NAME[name], (m,), n, k, "float16" if m % 2 else "bfloat16", **others), tmp_path, "sm_80"
    )


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize(
    ("name", "ranks", "sizes", "others"),
    [
        ("with_all", 4, (33, 133, 264), {"scale": "float32", "residual": "float32"}),
        ("gated_saving", 2, (64, 72, 136), {}), ("with_swiglu", 2, (3, 9, 136), {}),
        ("with_rstd", 2, (67, 330, 72), {}),
    ],
    ids=str,
)  # fmt: skip
def test_results_where_a_cluster_shares_terms(
    name: str, ranks: int, sizes: tuple[int, int, int], others: dict[str, str], tmp_path: Path
) -> None:
    """Each CTA computes the epilogue of its part of the columns."""
    (m, n, k), op = sizes, BY_NAME[name]
    tiles = 2 if name in ("with_all", "with_rstd") else 0
    config = GemmConfig("pingpong", 64, 128, 3, 2, store_stages=2, tile_stages=tiles, cluster_k=ranks, edge_m=16)
    check(op, made(op, (m,), n, k, **others), tmp_path, "sm_90a", config)


def of_batch(name: str, b: int, m: int, n: int, k: int) -> tuple[Op, dict[str, np.ndarray]]:
    op = BY_NAME[name].batched
    assert op is not None
    given = testing.inputs(op, Case("", {"b": (b,), "m": m, "n": n, "k": k}), "bfloat16")
    return op, {key: a for key, a in given.items() if a is not None}


@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize(("name", "sizes"), [("with_all", (130, 9, 40)), ("gated_saving", (5, 67, 9))])
def test_results_of_batches_without_tma(name: str, sizes: tuple[int, int, int], tmp_path: Path) -> None:
    check(*of_batch(name, 2, *sizes), tmp_path, "sm_80")


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize(
    ("name", "config", "sizes"),
    [
        ("with_all", GemmConfig("pingpong", 64, 128, 3, 2, store_stages=2, tile_stages=2), (70, 136, 72)),
        ("with_all", GemmConfig("pingpong", 64, 128, 3, 2, store_stages=2, tile_stages=2), (3, 9, 40)),
        ("gated_saving", GemmConfig("cooperative", 128, 128, 3, 2, 2, store_stages=2), (200, 72, 72)),
    ],
    ids=lambda value: getattr(value, "form", str(value)),
)
def test_results_of_batches_with_tma(
    name: str, config: GemmConfig, sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    check(*of_batch(name, 3, *sizes), tmp_path, "sm_90a", config)


COOPERATIVE = GemmConfig("cooperative", 128, 128, 3, 2, store_stages=2, tile_stages=2)
PINGPONG = GemmConfig("pingpong", 64, 128, 3, 2, store_stages=2, tile_stages=2)
TRANSPOSED = GemmConfig(
    "pingpong", 128, 144, 3, 2, store_stages=3, tile_stages=3, store_bytes=32, transposed=True
)  # fmt: skip


@pytest.mark.drawn(0.3)
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize(
    ("name", "config", "sizes", "others"),
    [
        ("with_silu", PINGPONG, (1, 8, 8), {}),
        ("saving", replace(COOPERATIVE, tile_n=256, cluster_m=2), (130, 72, 72), {}),
        ("with_swiglu", replace(COOPERATIVE, cluster_m=2), (260, 136, 72), {}),
        ("with_swiglu", PINGPONG, (5, 67, 136), {}),
        ("gated_saving", PINGPONG, (70, 72, 72), {}),
        ("gated_dgrad", replace(PINGPONG, cluster_n=2), (200, 136, 72), {}),
        ("gated_dgrad", replace(PINGPONG, tile_m=128, tile_n=160, cluster_m=2), (64, 168, 64), {}),
        ("gated_saving", replace(PINGPONG, tile_n=256, cluster_m=2), (64, 16, 136), {}),
        ("with_all", replace(PINGPONG, tile_stages=4), (200, 136, 72), {"residual": "float32", "scale": "float32"}),
        ("with_all", PINGPONG, (3, 9, 40), {}),
        ("with_rope", PINGPONG, (70, 320, 72), {}),
        ("with_qk_norm", PINGPONG, (70, 320, 72), {}),
        ("with_qk_norm", replace(COOPERATIVE, store_stages=4), (130, 256, 72), {"norm": "float32"}),
        ("rescaled", COOPERATIVE, (130, 128, 72), {}),
        ("with_rope", replace(COOPERATIVE, tile_n=256, store_stages=4), (130, 256, 72), {"cos": "float32"}),
        ("with_rstd", replace(COOPERATIVE, tile_m=256, cluster_n=2), (260, 264, 72), {}),
        ("with_rstd", PINGPONG, (200, 2056, 8), {}),
        ("gated_reducing", replace(PINGPONG, cluster_n=2), (70, 136, 72), {}),
        ("gated_reducing", PINGPONG, (1, 8, 8), {"scale": "float32"}),
        ("with_all", replace(TRANSPOSED, cluster_m=2), (141, 392, 72), {}),
        (
            "with_all",
            replace(TRANSPOSED, tile_n=80, store_stages=5, tile_stages=5),
            (85, 136, 72),
            {"residual": "float32"},
        ),
        ("with_all", replace(TRANSPOSED, tile_stages=0, cluster_k=3), (90, 136, 264), {"scale": "float32"}),
        ("saving", replace(TRANSPOSED, form="cooperative", tile_n=96, cluster_n=2, store_bytes=64), (150, 136, 72), {}),
        ("with_swiglu", replace(TRANSPOSED, tile_stages=0), (141, 136, 72), {}),
        ("with_swiglu", replace(TRANSPOSED, tile_n=96, tile_stages=0, store_stages=2, cluster_k=3), (90, 136, 264), {}),
        (
            "gated_saving",
            replace(COOPERATIVE, tile_m=256, tile_n=96, tile_stages=0, transposed=True),
            (70, 264, 72),
            {},
        ),
        ("gated_dgrad", replace(TRANSPOSED, tile_m=64, tile_n=80, store_stages=5, tile_stages=5), (77, 136, 72), {}),
        ("with_all", replace(PINGPONG, tile_stages=0, parts=3), (67, 136, 264), {"residual": "float32"}),
        ("gated_saving", replace(PINGPONG, tile_stages=0, parts=2, cluster_m=2), (70, 72, 136), {}),
        ("gated_dgrad", replace(COOPERATIVE, tile_stages=0, parts=4), (35, 136, 264), {}),
        ("with_swiglu", replace(PINGPONG, tile_stages=0, parts=2), (3, 72, 136), {}),
    ],
    ids=lambda value: getattr(value, "form", str(value)),
)
def test_results_with_tma(
    name: str, config: GemmConfig, sizes: tuple[int, int, int], others: dict[str, str], tmp_path: Path
) -> None:
    m, n, k = sizes
    check(BY_NAME[name], made(BY_NAME[name], (m,), n, k, **others), tmp_path, "sm_90a", config)


@pytest.mark.parametrize("name", ["with_rope", "with_rstd", "with_qk_norm", "gated_reducing"])
def test_transposed_tiles_are_for_epilogues_by_element(name: str, tmp_path: Path) -> None:
    """No config has them for others, and the kernel refuses them."""
    op = BY_NAME[name]
    assert not plan(bind(op, specs(op, 141, 4096, 4096)), {}, TARGET).variant.config.get("transposed")
    with pytest.raises(CompileError, match="transposed tiles are for epilogues by element"):
        check(op, made(op, (70,), 320, 72), tmp_path, "sm_90a", TRANSPOSED)


@pytest.mark.parametrize("name", ["with_rope", "with_rstd", "with_qk_norm"])
def test_terms_in_parts_are_for_epilogues_by_element(name: str, tmp_path: Path) -> None:
    """No config has parts for others, and the kernel refuses them."""
    op, config = BY_NAME[name], replace(PINGPONG, tile_stages=0, parts=2)
    assert "parts" not in plan(bind(op, specs(op, 256, 768, 12800)), {}, TARGET).variant.config
    with pytest.raises(CompileError, match="not cut into parts"):
        check(op, made(op, (70,), 320, 136), tmp_path, "sm_90a", config)


@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("columns", [16, 15], ids=["by-tma", "by-threads"])
def test_a_tile_that_is_a_part_of_a_larger_one(columns: int, tmp_path: Path) -> None:
    op = BY_NAME["with_residual"]
    given = made(op, (67,), columns - columns % 2, 16)
    wide = np.full((67, columns + 9 + columns % 2), np.nan, ml_dtypes.bfloat16)
    part = wide[:, 8 : 8 + given["residual"].shape[1]]
    part[:] = given["residual"]
    check(op, {**given, "residual": part}, tmp_path, "sm_90a", PINGPONG)


@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_vectors_in_other_layouts(arch: str, tmp_path: Path) -> None:
    """A column of a matrix, and a row vector that starts off its elements' pairs."""
    op = BY_NAME["with_all"]
    given = made(op, (35,), 16, 16)
    columns, row = np.full((35, 3), np.nan, ml_dtypes.bfloat16), np.full(19, np.nan, ml_dtypes.bfloat16)
    columns[:, 1], row[1:17] = given["scale"], given["bias"]
    config = PINGPONG if arch == "sm_90a" else None
    check(op, {**given, "scale": columns[:, 1], "bias": row[1:17]}, tmp_path, arch, config)


@pytest.mark.slow
@products.emulated
def test_halves_of_packed_operands_alone(tmp_path: Path) -> None:
    """Only those halves are loaded that are read."""
    op = fused_linear(
        lambda xp, acc, pre: acc * pre[..., pre.shape[-1] // 2 :], operands={"pre": "*m 2n"}, name="of_second_half"
    )
    check(op, made(op, (35,), 64, 16), tmp_path, "sm_90a", PINGPONG)


@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_table_that_rows_share(arch: str, tmp_path: Path) -> None:
    op = BY_NAME["with_rope"]
    given = made(op, (70,), 128, 16)
    config = PINGPONG if arch == "sm_90a" else None
    check(op, {**given, "cos": given["cos"][:1].copy(), "sin": given["sin"][:1].copy()}, tmp_path, arch, config)


@products.emulated
def test_the_length_of_a_row(tmp_path: Path) -> None:
    op = fused_linear(lambda xp, acc: acc * acc.shape[-1], name="times_length")
    check(op, made(op, (3,), 24, 8), tmp_path, "sm_80")


# --- configs and machine code --------------------------------------------------------------------------------------

USUAL = (
    "with_gelu", "with_silu", "with_residual", "saving", "with_swiglu", "gated_dgrad", "with_rstd", "gated_reducing",
    "with_rope", "with_qk_norm", "rescaled",
)  # fmt: skip


def test_tiles_that_tma_cannot_take_are_loaded_by_threads() -> None:
    op = BY_NAME["with_residual"]
    for stride, stages in ((72, True), (68, False)):
        memory = {"residual": Memory((stride, 1))}
        tile = plan(bind(op, specs(op, 512, 64, 64)), memory, TARGET).variant.config
        assert (tile["form"] != "mma_sync", bool(tile.get("tile_stages"))) == (True, stages)


def test_halves_that_do_not_start_on_16_bytes() -> None:
    op = BY_NAME["gated_saving"]
    for n, form in ((4096, True), (4100, False)):
        tile = plan(bind(op, specs(op, 512, n, 64)), {}, TARGET).variant.config
        assert (tile["form"] != "mma_sync", tile.get("half_align", 16)) == (form, 16 if form else 8)


SIZES = ((16, 14336, 4096), (1024, 3072, 768), (8192, 14336, 4096))


@pytest.mark.drawn(0.2)
@pytest.mark.slow
@pytest.mark.parametrize("name", USUAL)
def test_machine_code(name: str, tmp_path: Path) -> None:
    """Of every config that is chosen at these sizes: no register is spilled, and matrices come by TMA."""
    op, cubins = BY_NAME[name], {}
    # Of fewer rows with_qk_norm, which turns heads too, has the same configs.
    for m, n, k in SIZES[-1:] if name == "with_rope" else SIZES:
        variant = plan(bind(op, specs(op, m, n, k)), {}, TARGET).variant
        path = tmp_path / f"{variant.symbol}.cubin"
        if path in cubins:
            continue
        cubins[path] = variant.config
        worker.compile(variant, path)
    codes = machine_code.disassembled([path.read_bytes() for path in cubins])
    for (path, config), code in zip(cubins.items(), codes, strict=True):
        (kernel,) = [each for each in sass.resources(path) if "GemmSm90" in each.kernel]
        assert (kernel.registers, kernel.stack, kernel.local) == (168, 0, 0), config
        assert not re.search(r"\b(STL|LDL)\b", code), config
        # More waits would mean that the compiler runs one instruction after the other.
        assert code.count("WARPGROUP.DEPBAR") == 2
        # Both operands, of packed weights each half, and each tile of the epilogue's; a wide one in several copies.
        packed = name in ("with_swiglu", "gated_reducing", "rescaled")
        tiles = {"with_residual": 1, "gated_dgrad": 2, "with_rstd": 1}.get(name, 0)
        assert len(re.findall(r"\bUTMALDG\b", code)) >= 2 + packed + tiles
        assert "HGMMA" in code and "UTMASTG" in code
        # The warps that load have given most of their registers away.
        loading = code[code.index("USETMAXREG.DEALLOC") : code.index("USETMAXREG.TRY_ALLOC")]
        assert max(map(int, re.findall(r"\bR(\d+)\b", loading))) < 40


def test_what_would_spill_takes_another_config() -> None:
    """Tiles with more sums leave fewer registers."""
    cost = EpilogueCost()
    most = {
        extra: max(c.accumulators for c in configs("sm_90a", 132, cost._replace(live=1 + extra))) for extra in (0, 40)
    }
    assert most == {0: 192, 40: 144}
    assert list(configs("sm_90a", 132, cost._replace(live=200))) == []
    text = f"e1({','.join('t' * 13)}) add 0 1; " + "; ".join(f"add {i} {i + 11}" for i in range(2, 13)) + " -> 24"
    op = fused_linear(text, operands={f"t{i}": TILE for i in range(12)}, name="many")
    assert plan(bind(op, specs(op, 128, 64, 64)), {}, TARGET).variant.config["form"] == "mma_sync"


@pytest.mark.drawn(0.35)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "transposed"), [("silu", False), ("gelu", False), ("gelu_tanh", False), ("gelu_tanh", True)]
)
def test_the_gated_gradient_does_not_spill(activation: str, transposed: bool, tmp_path: Path) -> None:
    """The epilogue that reads two tiles and writes three; the longest one with both layouts of the weight."""
    (step,) = (step for step in gated_mlp("pre", transposed).steps if step.name.endswith("_bwd"))
    (op,) = step.program.ops
    check_spills(op, activation, tmp_path)


@pytest.mark.drawn(0.5)
@pytest.mark.slow
def test_the_gradient_of_an_mlp_does_not_spill(tmp_path: Path) -> None:
    """The longest of its epilogues, forward and backward."""
    for op in (mlp_products.dgrad(False, again=True), mlp_products.up(False, biased=True, saving=True)):
        check_spills(op, "gelu", tmp_path)


def check_spills(op: Op, activation: str, tmp_path: Path) -> None:
    variant = plan(bind(op, specs(op, 4096, 8192, 2048), {"activation": activation}), {}, TARGET).variant
    assert variant.config["form"] in ("cooperative", "pingpong")
    path = tmp_path / f"{op.name}.cubin"
    worker.compile(variant, path)
    assert all((kernel.stack, kernel.local) == (0, 0) for kernel in sass.resources(path))
