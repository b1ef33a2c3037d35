"""Random expressions: NumPy, torch and JAX agree, and derivatives are those of torch, of JAX and of differences.

A random program is run twice: traced, and on arrays with functions of torch and JAX that know nothing of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from cute_ops.expressions import differentiate, evaluate, parse, text_of, trace
from cute_ops.expressions.derivative import Derivative, worth_saving
from cute_ops.expressions.primitives import PRIMITIVES
from tests.ops.random_programs import FLOATS, OPERANDS, ROW, Program, program

M, N = (2, 3), 5
SHAPES = {"x": (*M, N), "y": (*M, N), "bias": (N,), "scale": (*M, 1), "s": (), "packed": (*M, 2 * N), "mask": (*M, N)}
COUNT, CHUNK = 500, 100


@cache
def torch_primitives() -> Mapping[str, Any]:
    torch = pytest.importorskip("torch")  # here: of pytest's processes, one may do
    functional = torch.nn.functional
    return {
        **{name: getattr(torch, name) for name in PRIMITIVES if hasattr(torch, name)},
        "equal": torch.eq, "stop_gradient": torch.Tensor.detach,
        "gelu": functional.gelu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "ndtr": torch.special.ndtr, "silu": functional.silu,
        "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)), "max": lambda x: torch.amax(x, -1, True),
        "min": lambda x: torch.amin(x, -1, True),
        "mean": lambda x: torch.mean(x, -1, True), "sum": lambda x: torch.sum(x, -1, True),
    }  # fmt: skip


@cache
def jax_primitives() -> Mapping[str, Any]:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    return {
        **{name: getattr(jnp, name) for name in PRIMITIVES if hasattr(jnp, name)},
        **{name: getattr(jax.nn, name) for name in ("relu", "sigmoid", "silu", "softplus")},
        "erf": jax.lax.erf, "stop_gradient": jax.lax.stop_gradient,
        "gelu": lambda x: jax.nn.gelu(x, approximate=False), "gelu_tanh": jax.nn.gelu,
        "ndtr": jax.scipy.special.ndtr, "rsqrt": jax.lax.rsqrt, "max": lambda x: jnp.max(x, -1, keepdims=True),
        "min": lambda x: jnp.min(x, -1, keepdims=True),
        "mean": lambda x: jnp.mean(x, -1, keepdims=True), "sum": lambda x: jnp.sum(x, -1, keepdims=True),
    }  # fmt: skip


def namespaces() -> list[tuple[Any, Any]]:
    """torch's and JAX's, and what makes their arrays of NumPy's."""
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    return [(pytest.importorskip("array_api_compat.torch"), torch.from_numpy), (jnp, jnp.asarray)]


def arrays(seed: int, dtype: Any = np.float64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    given = {name: np.asarray(rng.standard_normal(SHAPES[name])).astype(dtype) for name in FLOATS}
    return given | {"mask": rng.random(SHAPES["mask"]) < 0.5}


def gradients(
    derivative: Derivative, given: Sequence[Any], cotangents: Sequence[Any], outputs: Sequence[Any] = ()
) -> dict[int, np.ndarray]:
    """What a derivative's parts add up to, by operand."""
    sources = {"operand": given, "cotangent": cotangents, "output": outputs}
    read = [np.asarray(sources[source.role][source.position]) for source in derivative.sources]
    found = {part.operand: np.zeros(np.shape(given[part.operand])) for part in derivative.addends}
    for part, value in zip(derivative.addends, evaluate(derivative.expression, np, read), strict=True):
        if part.columns:
            value = np.sum(value, axis=-1, keepdims=True)
        if part.rows:
            value = np.sum(value, axis=tuple(range(value.ndim - 1)))
        whole = found[part.operand]
        target = {"": whole, "[:n]": whole[..., :N], "[n:]": whole[..., N:]}[part.half] if whole.ndim else whole
        target[...] += value if target.ndim else np.reshape(value, ())
    return found


def close(found: Any, wanted: Any, tolerance: float) -> None:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    scale = max(1, np.abs(wanted).max(initial=0))
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("start", range(0, COUNT, CHUNK))
def test_values_and_gradients_are_torch_s(start: int) -> None:
    torch = pytest.importorskip("torch")
    for seed in range(start, start + CHUNK):
        made, given = program(seed), arrays(seed)
        expression = made.traced()
        assert parse(text_of(expression)) == expression
        tensors = {name: torch.from_numpy(a) for name, a in given.items()}
        for name in FLOATS:
            tensors[name].requires_grad_()
        wanted = made(torch_primitives(), tensors, N)
        found = evaluate(expression, np, list(given.values()))
        for value, tensor in zip(found, wanted, strict=True):
            close(value, tensor.detach(), 1e-9)
        cotangents = [np.random.default_rng(i).standard_normal(value.shape) for i, value in enumerate(found)]
        saved = range(len(found)) if seed % 2 else ()
        derivative = differentiate(expression, saved=saved, sum_columns=seed % 3 == 0)
        assert seed % 3 or not any(part.columns for part in derivative.addends)
        assert parse(text_of(derivative.expression)) == derivative.expression
        mine = gradients(derivative, list(given.values()), cotangents, found)
        active = [(w, torch.from_numpy(c)) for w, c in zip(wanted, cotangents, strict=True) if w.requires_grad]
        theirs = (
            torch.autograd.grad(
                [w for w, _ in active],
                [tensors[name] for name in FLOATS],
                [c for _, c in active],
                materialize_grads=True,
            )
            if active
            else [torch.zeros(SHAPES[name]) for name in FLOATS]
        )
        for i, gradient in enumerate(theirs):
            close(mine[i], gradient, 1e-8)


def test_gradients_that_read_sums() -> None:
    """Every sum, difference and product of tiles is an output, too. Those that are read change no gradient."""

    def tiles_of(derivative: Derivative) -> int:
        return sum(1 + o.packed for o in derivative.expression.operands if str(o.kind)[0] == "t")

    fewer = 0
    for seed in range(60):
        expression, given = program(seed).traced(), [*arrays(seed).values()]
        tiles = [i for i, kind in enumerate(expression.kinds) if str(kind) == "t"]
        more = [i for i in tiles if expression.nodes[i].primitive in ("add", "subtract", "multiply")]
        expression = expression._replace(outputs=(*expression.outputs, *more)[:8])
        outputs = evaluate(expression, np, given)
        cotangents = [np.random.default_rng(i).standard_normal(value.shape) for i, value in enumerate(outputs)]
        wanted = [i for i, operand in enumerate(expression.operands) if operand.kind.dtype != "bool"]
        saved = worth_saving(expression, wanted)
        plain, reading = differentiate(expression), differentiate(expression, saved=saved)
        read = {source.position for source in reading.sources if source.role == "output"}
        assert read == {*saved} and (tiles_of(reading) < tiles_of(plain) if saved else reading == plain)
        fewer += bool(saved)
        exact = gradients(plain, given, cotangents)
        for i, gradient in gradients(reading, given, cotangents, outputs).items():
            close(gradient, exact[i], 1e-9)
    assert fewer > 3


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@pytest.mark.no_cover  # the test above runs the same lines of the core
@pytest.mark.parametrize("start", range(0, COUNT, CHUNK))
def test_values_are_the_same_in_all_namespaces(start: int) -> None:
    with pytest.importorskip("jax").enable_x64(True):
        for seed in range(start, start + CHUNK):
            expression = program(seed).traced()
            given = list(arrays(seed).values())
            exact = evaluate(expression, np, given)
            for xp, convert in namespaces():
                found = evaluate(expression, xp, [convert(a) for a in given])
                for value, wanted in zip(found, exact, strict=True):
                    assert value.shape == wanted.shape and str(value.dtype).endswith("float64")
                    close(value, wanted, 1e-9)


@pytest.mark.slow
def test_float32_is_near_in_all_namespaces() -> None:
    steep = {"floor", "round", "sign", "less", "less_equal", "equal"}
    smooth = [s for s in range(100) if not steep & {step.primitive for step in program(s).steps}]
    for seed in smooth:
        expression = program(seed).traced()
        exact = evaluate(expression, np, list(arrays(seed).values()))
        given = list(arrays(seed, np.float32).values())
        for xp, convert in ((np, np.asarray), *namespaces()):
            if "jax" in xp.__name__ and seed >= 15:  # each of its functions is compiled for each dtype and shape
                continue
            for value, wanted in zip(evaluate(expression, xp, [convert(a) for a in given]), exact, strict=True):
                assert str(value.dtype).endswith("float32")
                close(value, wanted, 2e-4)


@pytest.mark.slow
def test_gradients_are_jax_s() -> None:
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        for seed in range(8):
            made, given = program(seed), arrays(seed)
            expression = made.traced()

            def run(*floats: Any, made: Program = made, mask: Any = given["mask"]) -> Any:
                return made(jax_primitives(), {**dict(zip(FLOATS, floats, strict=True)), "mask": mask}, N)

            values, pull = jax.vjp(run, *(jax.numpy.asarray(given[name]) for name in FLOATS))
            cotangents = [np.random.default_rng(i).standard_normal(value.shape) for i, value in enumerate(values)]
            theirs = pull(tuple(jax.numpy.asarray(c) for c in cotangents))
            mine = gradients(differentiate(expression), list(given.values()), cotangents)
            for i, gradient in enumerate(theirs):
                close(mine[i], gradient, 1e-8)


@pytest.mark.parametrize(
    "function",
    [
        lambda xp, x, scale, bias, s: xp.sum(x + scale, **ROW), lambda xp, x, scale, bias, s: xp.mean(x + s, **ROW) * x,
        lambda xp, x, scale, bias, s: xp.sum(x + scale, **ROW) + scale + xp.exp(s),
        lambda xp, x, scale, bias, s: xp.sum(scale - xp.sum(bias - s * x, **ROW) + x, **ROW),
        lambda xp, x, scale, bias, s: (xp.sum(bias * s, **ROW) + s, scale * s + xp.mean(bias, **ROW)),
        lambda xp, x, scale, bias, s: (xp.exp(scale) * x, xp.exp(scale), xp.exp(bias), bias * x / x.shape[-1]),
        lambda xp, x, scale, bias, s: xp.sum(xp.where(x > bias, scale, s), **ROW),
    ],
)  # fmt: skip
def test_what_is_broadcast_in_a_row_is_summed_over_it(function: Any) -> None:
    torch, names = pytest.importorskip("torch"), ("x", "scale", "bias", "s")
    given = arrays(0)
    tensors = {name: torch.from_numpy(given[name]).requires_grad_() for name in names}
    wanted = function(pytest.importorskip("array_api_compat.torch"), **tensors)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    cotangents = [np.random.default_rng(i).standard_normal(tuple(value.shape)) for i, value in enumerate(wanted)]
    theirs = torch.autograd.grad(
        wanted, list(tensors.values()), [torch.from_numpy(c) for c in cotangents], materialize_grads=True
    )
    derivative = differentiate(trace(function, {name: OPERANDS[name] for name in names}))
    mine = gradients(derivative, [given[name] for name in names], cotangents)
    for i, gradient in enumerate(theirs):
        close(mine[i], gradient, 1e-12)


@pytest.mark.parametrize(
    "primitive", ["silu", "gelu", "gelu_tanh", "sigmoid", "softplus", "tanh", "relu", "erf", "ndtr"]
)
def test_derivatives_do_not_overflow(primitive: str) -> None:
    x = np.asarray([-1e36, -1e13, -200, 200, 1e13, 1e36], np.float32)
    derivative = differentiate(trace(lambda xp, x: getattr(xp, primitive)(x), {"x": "n"}))
    with np.errstate(over="ignore"):
        (found,) = evaluate(derivative.expression, np, [x, np.ones_like(x)][: len(derivative.sources)])
    right = float(primitive not in ("sigmoid", "tanh", "erf", "ndtr"))
    assert found == pytest.approx([0, 0, 0, right, right, right], abs=1e-30)


@pytest.mark.parametrize(
    "primitive",
    [
        name
        for name, primitive in PRIMITIVES.items()
        if "f" in primitive.takes and primitive.gives == "f" and not primitive.grouped and name != "stop_gradient"
    ],
)
def test_every_primitive_s_derivative_is_that_of_differences(primitive: str) -> None:
    takes = PRIMITIVES[primitive].takes.replace("b", "")
    names = ["x", "y", "z"][: len(takes)]

    def function(xp: Any, **given: Any) -> Any:
        args = [given[name] for name in names]
        if PRIMITIVES[primitive].reduces:
            return getattr(xp, primitive)(*args, axis=-1, keepdims=True)
        if primitive == "astype":
            return xp.astype(*args, xp.bfloat16)
        if primitive == "clip":
            args = [args[0], args[1] - 0.5, args[2]]
        return getattr(xp, primitive)(*([args[0] > 1.1] if primitive == "where" else []), *args)

    expression = trace(function, dict.fromkeys(names, "*m n"))
    rng, step = np.random.default_rng(3), 1e-6
    given = [rng.uniform(0.3, 1.9, (4, 5)) for _ in names]
    (out,) = evaluate(expression, np, given)
    cotangent = rng.standard_normal(out.shape)
    mine = gradients(differentiate(expression), given, [cotangent])
    for i, x in enumerate(given):
        for place in np.ndindex(x.shape):
            moved = []
            for sign in (1, -1):
                others = [a.copy() for a in given]
                others[i][place] += sign * step
                moved.append(np.sum(evaluate(expression, np, others)[0] * cotangent))
            assert mine[i][place] == pytest.approx((moved[0] - moved[1]) / (2 * step), abs=1e-6)


@pytest.mark.parametrize(
    ("function", "dx", "dy"),
    [
        (lambda xp, x, y: xp.max(x, **ROW), [0.5, 0, 0.5, 0], 0),
        (lambda xp, x, y: xp.min(x * x, **ROW), [0, -1, 0, 1], 0),
        (lambda xp, x, y: xp.maximum(x, 1.0), [1, 0, 1, 0.5], 0),
        (lambda xp, x, y: xp.minimum(x, y), [0, 0.5, 0, 1], [1, 0.5, 1, 0]),
        (lambda xp, x, y: xp.relu(x - 1), [1, 0, 1, 0], 0),
        (lambda xp, x, y: xp.abs(x - 1), [1, -1, 1, 0], 0), (lambda xp, x, y: xp.clip(x, -1.0, 1.0), [0, 1, 0, 1], 0),
    ],
)  # fmt: skip
def test_where_there_is_no_derivative(function: Any, dx: list[float], dy: Any) -> None:
    given = [np.asarray([[3.0, -1.0, 3.0, 1.0]]), np.asarray([[2.0, -1.0, 1.0, 4.0]])]
    expression = trace(function, {"x": "*m n", "y": "*m n"})
    (out,) = evaluate(expression, np, given)
    mine = gradients(differentiate(expression), given, [np.ones(out.shape)])
    assert mine[0].ravel() == pytest.approx(dx)
    assert mine[1].ravel() == pytest.approx(np.broadcast_to(dy, 4))
