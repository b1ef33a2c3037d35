"""Expressions in kernels: what primitives' device functions compute, and that they compile, at the declared cost."""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_ops import FLOATS, Array, Op, Tensor, fused
from cute_ops.autotune.dispatch import choose
from cute_ops.declaration.binding import bind
from cute_ops.expressions import differentiate, evaluate, text_of, trace
from cute_ops.expressions.primitives import PRIMITIVES, ROUNDS_TO
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.target import parse
from cute_ops.jit.variant import Variant
from cute_ops.testing import interpreter
from cute_ops.testing.kernel_calls import interpreted
from cute_ops.tools import sass

POINTWISE = [name for name, primitive in PRIMITIVES.items() if not (primitive.reduces or primitive.grouped)]
# Of the math library's functions with branches, which compilers unroll around.
BRANCHING = ("sin", "cos")
WIDE = {"x": "*m n", "bias": "n", "scale": "*m 1", "packed": "*m 2n"}


@pytest.fixture
def emitter() -> Iterator[Any]:
    with interpreted():
        yield importlib.import_module("cute_ops.kernels.emit.emitter").Emitter


def computed(emitter: Any, text: str, *given: Any, **options: Any) -> list[np.ndarray]:
    """What a kernel computes of float32 elements, one for each of as many threads."""
    kinds = [interpreter.KINDS["Bool"] if np.asarray(x).dtype == bool else interpreter.Float32 for x in given]
    return [np.asarray(x) for x in emitter(text)(*(kind(x) for kind, x in zip(kinds, given, strict=True)), **options)]


@pytest.mark.parametrize("primitive", [name for name in POINTWISE if name != "astype"])
def test_device_functions_are_the_references(primitive: str, emitter: Any) -> None:
    """Large and small arguments too, infinities and NaN; logarithms and roots of positive ones."""
    takes, rng = PRIMITIVES[primitive].takes, np.random.default_rng(0)
    near, far = rng.standard_normal(4000), rng.standard_normal(400) * 10.0 ** rng.integers(-12, 13, 400)
    floats = np.concatenate([near, far, [0.0, np.inf, -np.inf, np.nan]]).astype(np.float32)
    if primitive in ("log", "log1p", "log2", "sqrt", "rsqrt"):
        floats = np.abs(floats)
    given = [rng.permutation(floats) if i else floats for i in range(len(takes))]
    given = [x > 0 if letter == "b" else x for x, letter in zip(given, takes, strict=True)]
    names = "xyz"[: len(takes)]
    shapes = {name: "bool n" if letter == "b" else "n" for name, letter in zip(names, takes, strict=True)}
    expression = trace(lambda xp, **values: getattr(xp, primitive)(*values.values()), shapes)
    (found,) = computed(emitter, text_of(expression), *given)
    with np.errstate(all="ignore"):
        wide = [x if x.dtype == bool else x.astype(np.float64) for x in given]
        (exact,) = evaluate(expression, np, wide)
    if found.dtype == bool:
        assert np.array_equal(found, exact)
        return
    # Not what float32 has no number for, and not infinite arguments, which a formula may multiply by 0.
    kept = (np.abs(exact) < 3e38) & (np.abs(exact) > 1e-30) & np.all([np.isfinite(x) for x in wide], axis=0)
    tail = primitive in (
        "gelu",
        "gelu_tanh",
        "ndtr",
        "sigmoid",
        "silu",
    )  # its exponential is rounded before it is taken
    assert kept.sum() > 2000
    np.testing.assert_allclose(found[kept], exact[kept], rtol=5e-6 if tail else 1e-6)
    if primitive in ("minimum", "maximum", "relu", "clip", "where", "abs", "negative", "sign"):
        assert np.array_equal(found, exact.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("primitive", ["exp", "tanh", "softplus"])
def test_short_device_functions_are_right_to_17_bits(primitive: str, emitter: Any) -> None:
    """Tanh loses no more of 1 than 2 units in the last place, as a derivative's ``1 - tanh(x)**2`` needs."""
    x = np.concatenate([np.linspace(-100, 88, 20001), np.geomspace(1e-30, 88, 2001), [0.0, np.inf, -np.inf, np.nan]])
    x = x.astype(np.float32)
    device = importlib.import_module("cute_ops.kernels.emit.primitives").SHORT_DEVICE[primitive]
    exactly = partial(np.logaddexp, 0) if primitive == "softplus" else getattr(np, primitive)
    found, exact = np.asarray(device(interpreter.Float32(x))), exactly(x.astype(np.float64))
    np.testing.assert_allclose(found, exact, rtol=2**-17, atol=1e-37)
    if primitive == "tanh":
        np.testing.assert_allclose(found, exact, rtol=0, atol=2**-22)


@pytest.mark.parametrize(
    ("dtype", "table"), [("bfloat16", "SHORT_DEVICE"), ("float16", "SHORT_DEVICE"), ("float32", "DEVICE")]
)
def test_outputs_of_16_bits_take_short_device_functions(dtype: str, table: str, emitter: Any) -> None:
    op = fused(lambda xp, x: xp.tanh(x), operands={"x": "*m n"}, name="tanh_of_x")
    variant = choose(bind(op, {"x": Array((64, 4096), dtype)}), {}, parse("sm_90a")).variant
    primitives = importlib.import_module("cute_ops.kernels.emit.primitives")
    kernel = importlib.import_module("cute_ops.kernels.rows.pointwise").FusedPointwise(variant)
    assert kernel.emit.device is getattr(primitives, table)


@pytest.mark.parametrize("dtype", ROUNDS_TO)
def test_rounding_is_the_reference_s(dtype: str, emitter: Any) -> None:
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    expression = trace(lambda xp, x: xp.astype(x, dtype) * 3, {"x": "n"})
    assert np.array_equal(computed(emitter, text_of(expression), x)[0], evaluate(expression, np, [x])[0])


def test_an_emitter_reads_halves_masks_and_lengths(emitter: Any) -> None:
    def function(xp: Any, packed: Any, mask: Any) -> Any:
        n = packed.shape[-1] // 2
        gate, up = packed[..., :n], packed[..., n:]
        return xp.where(mask, gate * up, 0.5), up / n, ~mask & True

    expression = trace(function, {"packed": "2n", "mask": "bool n"})
    rng = np.random.default_rng(0)
    packed, mask = rng.standard_normal(32).astype(np.float32), rng.random(16) < 0.5
    halves = tuple(interpreter.Float32(x) for x in (packed[:16], packed[16:]))

    found = emitter(text_of(expression))(halves, interpreter.KINDS["Bool"](mask), length=16)
    for value, wanted in zip(found, evaluate(expression, np, [packed, mask]), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-6)


# What compiles


@pytest.fixture
def instructions(tmp_path: Path) -> Callable[[str], list[str]]:
    """From an expression's text to the kernel's instructions."""

    def code(text: str) -> list[str]:
        path = tmp_path / "kernel.cubin"
        worker.compile(variant(text), path)
        assert [(kernel.stack, kernel.local) for kernel in sass.resources(path)] == [(0, 0)]
        command = [sass.tool("cuobjdump"), "--dump-sass", str(path)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return re.findall(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+ +)?([A-Z][A-Z0-9_.]+)", listing)

    return code


def variant(text: str) -> Variant:
    shapes = {"x": "*m n", "bias": "n", "scale": "*m", "packed": "*m 2n"}
    op = Op(
        "expressed",
        inputs={name: Tensor(shape, "T") for name, shape in shapes.items()},
        outputs={"out": Tensor("*m n", "T")},
        dtypes={"T": FLOATS},
        attrs={"expression": ""},
        reference=lambda xp, x, **_: x,
        kernel="tests.ops.expressed:Expressed",
    )
    sizes = {"x": (4, 64), "bias": (64,), "scale": (4,), "packed": (4, 128)}
    arrays = {name: Array(size, "float32") for name, size in sizes.items()}
    return choose(bind(op, arrays, {"expression": text}), {}, parse("sm_90a")).variant


def every_primitive(xp: Any, x: Any, bias: Any, scale: Any, packed: Any) -> Any:
    """All primitives without branches, no two of which have an instruction in common."""
    n, least, some = packed.shape[-1] // 2, scale, x > bias
    for i, primitive in enumerate(each for each in POINTWISE if each not in BRANCHING):
        floats = [x + float(i), bias, packed[..., n:]]
        bools = [floats[0] > scale, packed[..., :n] > scale]
        if primitive == "astype":
            values = [xp.astype(floats[0] * (2.0 + j), dtype) for j, dtype in enumerate(ROUNDS_TO)]
        else:
            values = [
                getattr(xp, primitive)(
                    *((bools if letter == "b" else floats).pop(0) for letter in PRIMITIVES[primitive].takes)
                )
            ]
        for value in values:
            least, some = (least, some | value) if value.dtype == "bool" else (xp.minimum(least, value), some)
    return xp.where(some, least, packed[..., :n])


@pytest.mark.slow
def test_every_primitive_compiles_at_its_cost(instructions: Callable[[str], list[str]]) -> None:
    expression = trace(every_primitive, WIDE)
    assert {node.primitive for node in expression.nodes} >= {*POINTWISE} - {*BRANCHING}
    names = [name.partition(".")[0] for name in instructions(text_of(expression))]
    slow = sum(names.count(name) for name in ("MUFU", "F2F", "FRND"))
    assert slow == expression.cost[0] - (len(ROUNDS_TO) - 1)  # of the roundings only bfloat16's


@pytest.mark.parametrize("primitive", BRANCHING)
def test_branching_primitives_compile_at_their_cost(primitive: str, instructions: Callable[[str], list[str]]) -> None:
    """One conversion to an integer for each of two elements, and no local memory, which ``instructions`` looks at."""
    expression = trace(lambda xp, x, **_: getattr(xp, primitive)(x), WIDE)
    names = [name.partition(".")[0] for name in instructions(text_of(expression))]
    assert names.count("F2I") == 2 * expression.cost[0] and "MUFU" not in names


def gated(xp: Any, x: Any, bias: Any, scale: Any, packed: Any) -> Any:
    n = packed.shape[-1] // 2
    return (xp.silu(packed[..., :n]) * packed[..., n:] + x + bias) * scale


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("primitive", ["gelu", "gelu_tanh", "silu"])
def test_expressions_and_derivatives_compile(primitive: str, instructions: Callable[[str], list[str]]) -> None:
    def scaled(xp: Any, x: Any, bias: Any, scale: Any) -> Any:
        return getattr(xp, primitive)(x + bias) * scale

    derivative = differentiate(trace(scaled, {"x": "*m n", "bias": "n", "scale": "*m 1"}))
    assert [source.role for source in derivative.sources] == ["operand", "operand", "operand", "cotangent"]
    for expression in (trace(gated, WIDE), derivative.expression):
        names = [name.partition(".")[0] for name in instructions(text_of(expression))]
        assert names.count("MUFU") == 2  # a primitive and its derivative share an exponential and a reciprocal
