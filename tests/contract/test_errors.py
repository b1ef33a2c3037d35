"""Wrong calls: the core's errors word for word, whoever calls, with arrays or without their elements."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import cute_ops
from tests.contract.adapters import Adapter
from tests.ops.offered_products import REFUSED, Refused
from tests.ops.wrong_calls import complaints

X, W = np.ones((3, 5, 64), np.float32), np.ones(64, np.float32)
Call = Callable[..., Any]

TEXTS: dict[str, tuple[str, tuple[Any, ...], type[Exception], str]] = {
    "n": (
        "rmsnorm", (X, W[:32]), ValueError,
        "cute.rmsnorm: argument `weight` has n=32, but n=64.\n"
        "  x:      float32[3, 5, 64]   declared T[*m n]\n"
        "  weight: float32[32]         declared W[n]\n"
        "  bound so far: *m=(3, 5), n=64, T=float32, W=float32",
    ),
    "dtype": (
        "rmsnorm", (np.arange(3, dtype=np.int32),), TypeError,
        "cute.rmsnorm: argument `x` has dtype int32, expected float32, float16 or bfloat16.\n"
        "  x: int32[3]   declared T[*m n]",
    ),
    "rows": (
        "silu_mul", (X, X[:, 0]), ValueError,
        "cute.silu_mul: argument `up` has leading dims (3,), but *m=(3, 5).\n"
        "  gate: float32[3, 5, 64]   declared T[*m n]\n"
        "  up:   float32[3, 64]      declared T[*m n]\n"
        "  bound so far: *m=(3, 5), n=64, T=float32",
    ),
    "residual": (
        "add_rmsnorm", (X, X.astype("bfloat16")), ValueError,
        "cute.add_rmsnorm: argument `residual` has dtype bfloat16, expected float32 (that of `x`) or a wider one.\n"
        "  x:        float32[3, 5, 64]    declared T[*m n]\n"
        "  residual: bfloat16[3, 5, 64]   declared R[*m n]\n"
        "  bound so far: *m=(3, 5), n=64, T=float32, R=bfloat16",
    ),
    "two dtypes": (
        "silu_mul", (X, X.astype("bfloat16")), TypeError,
        "cute.silu_mul: argument `up` has dtype bfloat16, but T=float32 from `gate`.\n"
        "  gate: float32[3, 5, 64]    declared T[*m n]\n"
        "  up:   bfloat16[3, 5, 64]   declared T[*m n]\n"
        "  bound so far: *m=(3, 5), n=64, T=float32",
    ),
    "scalar": (
        "rmsnorm", (np.float32(1),), ValueError,
        "cute.rmsnorm: argument `x` has 0 dims, expected at least 1: T[*m n].\n"
        "  x: float32[]   declared T[*m n]\n"
        "  bound so far: T=float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", ["plain", "usual", "abstract"])
@pytest.mark.parametrize("name", TEXTS)
def test_texts(adapter: Adapter, name: str, way: str) -> None:
    function, arrays, kind, text = TEXTS[name]
    call, given = getattr(adapter.ours, function), adapter.arrays(arrays)
    run = {"plain": call, "usual": adapter.usual(call), "abstract": partial(adapter.abstract, call)}[way]
    with pytest.raises(kind) as caught:
        run(*given)
    assert str(caught.value) == text


SAID = {
    "torch": {"by": " by position", "static": "an array float32[8]"},
    "jax": {
        "by": "", "static": "a JAX array float32[8]: it is part of the compiled kernel, so it is given to jax.jit by "
        "static_argnames or not at all",
    },
}  # fmt: skip
UNKNOWN, TAKES = "cute.rmsnorm: unknown argument", "it takes `x`, `weight`, `bias`, `eps`, `weight_offset`"


def add(xp: Any, x: Any, y: Any) -> Any:
    return x + y


# Calls of an adapter's functions with an array of three dims. {array}: what it calls an array.
WRONG: dict[Call, str] = {
    lambda ours, x: ours.rmsnorm(): "cute.rmsnorm: argument `x` is required, but was not given.",
    lambda ours, x: ours.rmsnorm(None): "cute.rmsnorm: argument `x` is required, but None was given.",
    lambda ours, x: ours.rmsnorm([x, x]): "cute.rmsnorm: argument `x` must be {array}, got list.",
    lambda ours, x: ours.rmsnorm([1.0, 2.0]): "cute.rmsnorm: argument `x` must be {array}, got list.",
    lambda ours, x: ours.rmsnorm("x"): "cute.rmsnorm: argument `x` must be {array}, got str.",
    lambda ours, x: ours.softmax("a"): "cute.softmax: argument `x` must be {array}, got str.",
    lambda ours, x: ours.rmsnorm(
        x, memoryview(b"x")
    ): "cute.rmsnorm: argument `weight` must be {array}, got memoryview.",
    lambda ours, x: ours.rmsnorm(x, epsilon=1.0): f"{UNKNOWN} `epsilon` (did you mean eps?); {TAKES}",
    lambda ours, x: ours.rmsnorm(x, mode="fast"): f"{UNKNOWN} `mode`; {TAKES}",
    lambda ours, x: ours.rmsnorm(input=x): "cute.rmsnorm: unknown argument `input`; it takes `x`, ",
    lambda ours, x: ours.rmsnorm(
        x, x[0, 0], x[0, 0], 1e-6, 0.0, 1
    ): "cute.rmsnorm: 6 arguments were given{by}; it takes `x`",
    lambda ours, x: ours.rmsnorm(x, eps="small"): "cute.rmsnorm: attribute `eps` must be float, got 'small'.",
    lambda ours, x: ours.rmsnorm(x, eps=[1e-6]): "cute.rmsnorm: attribute `eps` must be float, got [1e-06].",
    lambda ours, x: ours.softmax(x, 0): "cute.softmax: 2 arguments were given{by}; it takes `x`.",
    lambda ours, x: ours.gelu(x, "tanh", x): "cute.gelu: 3 arguments were given{by}; it takes `x`, `approximate`.",
    lambda ours, x: ours.rope(x, sin=x): "cute.rope: argument `cos` is required, but was not given.",
    lambda ours, x: ours.add_rmsnorm(x): "cute.add_rmsnorm: argument `residual` is required, but was not given",
    lambda ours, x: ours.embedding(x): "cute.embedding: argument `weight` is required, but was not given.",
    lambda ours, x: ours.embedding(x, index=x): "cute.embedding: argument `index` was given twice, by position",
    lambda ours, x: ours.embedding(x, x, 1, 2): (
        "cute.embedding: 4 arguments were given; it takes `index`, `weight`, `padding_idx`."
    ),
    lambda ours, x: ours.embedding(x[0, :, 0], x[0], padding_idx=True): (
        "cute.embedding: option `padding_idx` is True, expected an int or None."
    ),
    lambda ours, x: ours.quantize_fp8(x, 64): "cute.quantize_fp8: attribute `block` must be 0 or 128, got 64.",
    lambda ours, x: ours.linear_cross_entropy(x[0], x[0], x[0], label_smooth=0.1): (
        "cute.linear_cross_entropy: unknown argument `label_smooth` (did you mean label_smoothing?); it takes"
    ),
    lambda ours, x: ours.linear_cross_entropy(x[0], x[0], x[0], reductions="sum"): (
        "cute.linear_cross_entropy: unknown argument `reductions` (did you mean reduction?); it takes `hidden`, "
    ),
    lambda ours, x: ours.linear(None, x[0]): "cute.linear: argument `x` is required, but None was given.",
    lambda ours, x: ours.linear(x, None): "cute.linear: argument `weight` is required, but None was given.",
    lambda ours, x: ours.linear(x, "weight"): "cute.linear: argument `weight` must be {array}, got str.",
    lambda ours, x: ours.linear(x, x[0], {}, epilogue="gelu"): (
        "cute.linear: argument `operands[0]` must be {array}, got dict."
    ),
    lambda ours, x: ours.linear(x, x[0], epilogue=max): (
        "cute.linear: argument `epilogue` must be a function written in Python, got the built-in max."
    ),
    lambda ours, x: ours.linear(x, x[0], x[0], epilogue=ours.fused(add)): (
        "cute.linear: argument `epilogue` is add as `fused` decorates it, whose callers leave out `xp`: give the "
        "function that `fused` was given."
    ),
    lambda ours, x: ours.linear(x, x[0], x[0, 0]): (
        'cute.linear: operand 1 was given, but no epilogue that reads it. epilogue="bias" adds one number for each '
        'column, "add" a residual, too.'
    ),
    lambda ours, x: ours.linear(
        x, x[0], packed=True
    ): "cute.linear: `packed` was given, but no epilogue that reads halves",
    lambda ours, x: ours.linear(x, x[0], save="all"): "cute.linear: option `save` is 'all', expected 'pre' or 'none'.",
    lambda ours, x: ours.linear(x, x[0], transposed=x): (
        "cute.linear: option `transposed` is an array float32[3, 5, 64], expected none."
    ),
    lambda ours, x: ours.linear(x, x[0], None, epilogue="silu", fusd="never"): (
        "cute.linear: unknown attribute `fusd` (did you mean fused?); the epilogue bias_silu has none."
    ),
    lambda ours, x: ours.linear(x, x[0], fusd="never"): (
        "cute.linear: `fusd` (did you mean fused?) was given, but no epilogue that reads it."
    ),
    lambda ours, x: ours.linear(x, x[0], epilogue="silu", bias=x): (
        "cute.linear: attribute `bias` is a kernel's constant: give a number or text, not "
    ),
    lambda ours, x: ours.linear(x, x[0], epilogue="e1(t) exp 0 -> 1", limit=1.0): (
        "cute.linear: unknown attribute `limit`; the epilogue 'e1(t) exp 0 -> 1' has none."
    ),
    lambda ours, x: ours.linear_silu(x, x[0].tolist(), x[0, 0]): (
        "cute.linear_silu: argument `weight` must be {array}, got list."
    ),
    lambda ours, x: ours.gated_linear(x, "weight"): "cute.gated_linear: argument `weight` must be {array}, got str.",
    lambda ours, x: ours.gated_linear(x, x[0, :4], x[0, 0, :8]): (
        "cute.gated_linear: attribute `activation` must be str, got {static}; its arrays are `x`, "
        "`weight`, and no bias."
    ),
    lambda ours, x: ours.gated_mlp(
        x, None, None
    ): "cute.gated_mlp: argument `w_gate_up` is required, but None was given.",
    lambda ours, x: ours.mlp(x, x[0], None, "down"): "cute.mlp: argument `w_down` must be {array}, got str.",
    lambda ours, x: ours.qkv_rope(x, x[0], "cos", x, 2): "cute.qkv_rope: argument `cos` must be {array}, got str.",
    lambda ours, x: ours.fused(max): (
        "cute_ops.fused: argument `function` must be a function written in Python, got the built-in max."
    ),
    lambda ours, x: ours.fused(operands="*m n")(lambda xp, x: x): (
        "cute_ops.fused: argument `operands` must be shapes by name, {{'x': '*m n'}}, got str."
    ),
    lambda ours, x: ours.register(lambda x: x): (
        "{package}.register: argument `op` must be a cute_ops.Op, got function; cute_ops.fused makes a "
    ),
    lambda ours, x: ours.register(3): "{package}.register: argument `op` must be a cute_ops.Op, got int.",
}


@pytest.mark.parametrize(("call", "text"), WRONG.items(), ids=[re.sub(r"[^\w `]", "", t)[4:54] for t in WRONG.values()])
def test_wrong_arguments(adapter: Adapter, call: Call, text: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call(adapter.ours, adapter.array(X))
    said = {"array": adapter.one_array, "package": adapter.package, **SAID[adapter.name]}
    assert str(caught.value).startswith(text.format(**said))


@pytest.mark.parametrize("call", REFUSED, ids=lambda call: call.text.partition("\n")[0][:60])
def test_products_that_are_refused(adapter: Adapter, call: Refused) -> None:
    with pytest.raises(call.error) as raised:
        getattr(adapter.ours, call.function)(*adapter.arrays(call.arrays()), **call.options)
    assert str(raised.value).removeprefix("cute.").removeprefix("cute_ops: ").startswith(call.text)


def odd_arrays(adapter: Adapter) -> Iterator[Any]:
    """What is no argument of most functions."""
    yield from adapter.arrays(
        [np.ones(s, np.float32) for s in ((0,), (3,), (8,), (8, 2), (2, 0), (0, 8), (1, 1, 1, 8), ())]
    )
    yield from adapter.arrays([np.ones((2, 8), dtype) for dtype in ("f4", bool, "c8", "i4")])
    yield adapter.array(np.ones((2, 8)), "float8_e4m3fn")
    if adapter.name == "torch":
        torch = adapter.torch
        ones = torch.ones(2, 8)
        yield from (ones.double(), ones.long(), ones.to("meta"), ones.to_sparse(), torch.randn(2, 8)[:, ::2])
        yield from (torch.nn.Parameter(ones), torch.randn(8, 2).t(), torch.float32, torch.device("cpu"))
    else:
        jax = adapter.jax
        yield from (jax.numpy.float32, jax.numpy, np.ones((2, 8)), jax.random.key(0))
        yield jax.ShapeDtypeStruct((2, 8), jax.numpy.float32)


def test_wrong_calls_are_named_without_values(adapter: Adapter) -> None:
    """Drawn ones, of every function, or of some: no error of Python's or the framework's, and no elements of arrays."""
    count, every = {"torch": (8, 1), "jax": (3, 3)}[adapter.name]  # of JAX a good call takes a compilation
    found = complaints(adapter.ours, adapter.array, [*odd_arrays(adapter)], count, np.random.default_rng(34), every)
    assert not found, "\n\n".join(found)


# Modules of an adapter, and which of their names take arguments that are checked; by default all that are public.
HOMES: dict[str, dict[str, tuple[str, ...]]] = {
    "torch": {"": (), "nn": (), "inductor": ("enable",), "optim": ("AdamW",)},
    "jax": {"": (), "nnx": (), "equinox": ()},
}


def public(module: Any, names: tuple[str, ...]) -> dict[str, Any]:
    classes = {name: found for name, found in vars(module).items() if isinstance(found, type)}
    own = [name for name, found in classes.items() if found.__module__ == module.__name__ and name[0] != "_"]
    every = {name: getattr(module, name) for name in names or getattr(module, "__all__", own)}
    return {name: found for name, found in every.items() if callable(found)}


def misspelt(function: Any) -> list[str]:
    """Names close to those of a function's parameters, which are none of them, nor as close to another: of ``out`` and
    ``out_a`` not ``out_``.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    closer = {name[:-1] for name in names} | {*names}
    return [f"{name}_" for name in names if len(name) > 1 and f"{name}_" not in closer and name != "declaration"]


@pytest.mark.slow
def test_near_misses_are_suggested_everywhere(adapter: Adapter) -> None:
    homes = {f"{adapter.package}.{home}".rstrip("."): names for home, names in HOMES[adapter.name].items()}
    functions = [
        each
        for home, names in {**homes, "cute_ops": ("Op", "fused", "fused_linear")}.items()
        for each in public(importlib.import_module(home), names).items()
        if each[0] != "register" or adapter.name == "torch"  # Python names the only argument of JAX's
    ]
    assert len(functions) > 40
    for short, function in functions:
        parameters = inspect.signature(function).parameters.values()
        passes_on = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
        for wrong in misspelt(function):
            with pytest.raises(TypeError) as caught:
                function(**{wrong: None})
            said = rf"^cute(_ops|_ops_torch|_ops_jax)?\.{short}: unknown argument `{wrong}` "
            expected = rf"{said}\(did you mean {wrong[:-1]}\?\); it takes "
            if (inspect.isclass(function) and passes_on) or wrong == "namespace_":  # passes what it does not know on
                expected = rf"^cute(_ops|_ops_torch)?\.{short}: unknown a"
            assert re.match(expected, str(caught.value)), str(caught.value)


MISSPELT = {
    "torch": [
        ("", "rms_norm", "rmsnorm"), ("functions", "rms_norm", "rmsnorm"), ("", "rmsnorn", "rmsnorm"),
        ("", "unpach", "unpatch"), ("", "inductr", "inductor"), ("nn", "RmsNorm", "RMSNorm"),
        ("nn", "SiLUMull", "SiLUMul"), ("optim", "adamw", "AdamW"),
    ],
    "jax": [
        ("", "rms_norm", "rmsnorm"), ("", "nxx", "nnx"), ("nnx", "RMSNrm", "RMSNorm"),
        ("equinox", "gatedMLP", "GatedMLP"),
    ],
}  # fmt: skip


def test_a_misspelt_name_of_a_module_is_suggested_once(adapter: Adapter, capsys: pytest.CaptureFixture[str]) -> None:
    for home, name, near in MISSPELT[adapter.name]:
        module = importlib.import_module(f"{adapter.package}.{home}".rstrip("."))
        with pytest.raises(AttributeError) as error:
            getattr(module, name)
        text = f"module '{module.__name__}' has no attribute '{name}' (did you mean {near}?)"
        assert str(error.value) == text
        sys.__excepthook__(error.type, error.value, error.tb)
        assert capsys.readouterr().err.endswith(f"AttributeError: {text}\n")  # Python's own would say it again
        assert getattr(module, near) is not None and not hasattr(module, "__path_of_no_module__")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rmsnorm_fp8", "rmsnorm has one."),
        ("quantize_fp8", "quantise where none is needed (torch.no_grad, jax.lax.stop_gradient)."),
    ],
)
def test_inference_only_ops_say_so(adapter: Adapter, name: str, hint: str) -> None:
    x = adapter.array(np.ones((3, 64), np.float32))
    assert adapter.dtype(getattr(adapter.ours, name)(x)[0]) == "float8_e4m3fn"
    with pytest.raises(NotImplementedError) as caught:
        adapter.value_and_gradients(lambda x: getattr(adapter.ours, name)(x)[1], [x])
    assert str(caught.value).startswith(
        f"cute.{name}: is for inference only, it has no gradient; {hint}\n  x: float32[3, 64]   declared T[*m n]"
    )


def test_an_error_inside_of_a_traced_function_stays_as_it_is(adapter: Adapter) -> None:
    @adapter.ours.fused
    def scaled(xp: Any, x: Any) -> Any:
        try:
            return x * 2 if x > 0 else x
        except Exception:
            return x * 3

    with pytest.raises(TypeError, match=r"scaled cannot be traced: Python's control flow on a value\n"):
        scaled(adapter.array(X))
    assert cute_ops.fused is not adapter.ours.fused
