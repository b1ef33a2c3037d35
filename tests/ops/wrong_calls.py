"""Wrong calls of public functions, drawn at random, and what their errors must say."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# What no argument of any function is.
ODD: tuple[Any, ...] = (
    None, 0, 1, -1, 2**70, 10**400, 1.5, float("nan"), float("inf"), -0.0, 1j, True, "a", "auto", b"x", [], [1.0], (),
    {}, object(), int, print, lambda: 0, slice(None), ..., np.ones(8), np.float32(1),
)  # fmt: skip
NAMES = (
    "eps", "out", "foo", "epilogue", "fused", "activation", "dim", "axis", "bias", "transposed", "packed", "halves",
    "save", "reduction", "ignore_index", "inplace_backward",
)  # fmt: skip


def halves(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float16)


def whole(*numbers: Any) -> np.ndarray:
    return np.asarray(numbers, np.int32)


# A good call of each function: shapes, the number of classes of an index, arrays, or a value.
ROWS, ROW, COLUMNS = (2, 8), (8,), (6, 8)
Q, KV, TOKENS = (2, 5, 4, 16), halves(2, 5, 2, 16), halves(7, 2, 16)
STARTS, SCALAR = whole(0, 3, 7), np.ones((), np.float32)
GOOD: dict[str, tuple[Any, ...]] = {
    "add_rmsnorm": (ROWS, ROWS, ROW), "add_rmsnorm_fp8": (ROWS, ROWS, ROW), "causal_conv1d": ((2, 8, 6), (6, 4)),
    "cross_entropy": (ROWS, {"classes": 8}), "embedding": ({"classes": 6}, COLUMNS), "gated_linear": (ROWS, (12, 8)),
    "gated_mlp": (ROWS, (12, 8), (8, 6)), "geglu": (ROWS,), "gelu": (ROWS,), "gelu_mul": (ROWS, ROWS),
    "layernorm": (ROWS, ROW, ROW), "linear": (ROWS, COLUMNS), "linear_add": (ROWS, COLUMNS, (2, 6)),
    "linear_add_rmsnorm": (ROWS, COLUMNS, (2, 6), (6,)), "linear_cross_entropy": (ROWS, COLUMNS, {"classes": 6}),
    "linear_gelu": (ROWS, COLUMNS, (6,)), "linear_silu": (ROWS, COLUMNS, (6,)), "log_softmax": (ROWS,), "mean": (ROWS,),
    "mlp": (ROWS, COLUMNS, (6,), (8, 6), (8,)),
    "qkv_rope": (ROWS, (192, 8), (2, 32), (2, 32), 2), "quantize_fp8": (ROWS,), "relu2": (ROWS,),
    "rmsnorm": (ROWS, ROW), "rmsnorm_fp8": (ROWS, ROW),
    "rmsnorm_linear": (ROWS, ROW, COLUMNS), "rope": ((2, 3, 4, 8), (2, 3, 4), (2, 3, 4)),
    "silu": (ROWS,), "silu_mul": (ROWS, ROWS), "silu_mul_fp8": (ROWS, ROWS), "softmax": (ROWS,), "sum": (ROWS,),
    "swiglu": (ROWS,),
    "adamw": (ROW, ROW, ROW, np.ones(8, np.float32), SCALAR, SCALAR, SCALAR), "add_layernorm": (ROWS, ROWS, ROW, ROW),
    "attention": (halves(*Q), KV, KV, (4,)), "attention_cached": (halves(*Q), KV, KV, whole(5, 5)),
    "attention_packed": (halves(7, 4, 16), TOKENS, TOKENS, STARTS, STARTS),
    "causal_conv1d_channels_first": ((2, 6, 8), (6, 4), (6,)), "causal_conv1d_packed": ((7, 6), (6, 4), STARTS, (6,)),
    "causal_conv1d_states": ((7, 6), STARTS), "cross_entropy_metrics": (ROWS, {"classes": 8}, ROW),
    "decode_attention": (halves(2, 1, 4, 16), KV, KV, whole(5, 3)), "divergence": (ROWS, ROWS),
    "dropout_add_rmsnorm": (ROWS, ROWS, ROW, np.asarray(3, np.int32)), "group_norm": ((2, 8, 3), ROW, ROW, 4),
    "head_layernorm": ((2, 3, 8), (3, 8), (3, 8)), "head_rmsnorm": ((2, 3, 8), (3, 8)), "l2norm": (ROWS,),
    "linear_cross_entropy_metrics": (ROWS, COLUMNS, {"classes": 6}),
    "linear_distillation_loss": (ROWS, COLUMNS, (2, 4), (6, 4), {"classes": 6}),
    "linear_log_probs": ((2, 3, 8), COLUMNS, whole((1, 2, 3), (4, 5, 0)), (6,)),
    "linear_policy_loss": ((2, 3, 8), COLUMNS, whole((1, 2, 3), (4, 5, 0)), (2,), (2, 3), (2, 3)),
    "linear_preference_loss": ((2, 3, 8), COLUMNS, whole((1, 2, 3), (4, 5, 0)), (2,)),
    "merge_states": (halves(*Q), (2, 4, 5), halves(*Q), (2, 4, 5)),
    "permute_tokens": ((2, 8), whole((0, 1), (2, 1)), 3),
    "qk_norm_rope": ((2, 3, 4, 8), (2, 3, 2, 8), ROW, ROW, (2, 3, 4), (2, 3, 4)),
    "rope_at": ((2, 3, 4, 8), whole((0, 1, 2), (3, 4, 5)), (9, 4), (9, 4)),
    "rope_from_positions": ((2, 3, 4, 8), whole((0, 1, 2), (3, 4, 5))),
    "rope_packed": ((2, 3, 4, 8), (2, 3, 4), (2, 3, 4), 2), "route": (ROWS, 2), "scaled_fp8": (ROWS, SCALAR),
    "soft_cross_entropy": (ROWS, np.ones(ROWS, np.float32)), "topk": (ROWS, 2),
    "unpermute_tokens": ((4, 8), whole((0, 1), (2, 3)), (2, 2)),
}  # fmt: skip
# Of these, an index that a table lacks raises the framework's own error.
LOOKUPS = "embedding", "rope_at", "unpermute_tokens", "causal_conv1d_packed", "causal_conv1d_states"


class WrongCall(NamedTuple):
    """A call of a function, most likely a wrong one."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def complaints(
    module: Any, make: Callable[[np.ndarray], Any], arrays: Sequence[Any], count: int, rng: np.random.Generator,
    every: int = 1,
) -> list[str]:  # fmt: skip
    """The faults of the errors of so many calls of each function of an adapter, which makes arrays by ``make``, or
    of one of ``every`` so many functions; ``arrays`` are wrong for most arguments.
    """
    found = []
    for name in rng.permutation([*GOOD])[::every]:
        specs = GOOD[name]
        function, good = getattr(module, name), []
        for spec in specs:
            drawn = rng.standard_normal(spec).astype(np.float32) if isinstance(spec, tuple) else spec
            drawn = rng.integers(0, spec["classes"], 2).astype(np.int32) if isinstance(spec, dict) else drawn
            good.append(make(drawn) if isinstance(drawn, np.ndarray) else drawn)
        function(*good)
        for _ in range(count):
            call = draw(function, good, arrays, rng)
            if (said := complaint(name, call, function)) and name not in LOOKUPS:
                found.append(f"{name}{call.args} {call.kwargs}\n{said}")
    return found


def draw(
    function: Callable[..., Any], good: Sequence[Any], arrays: Sequence[Any], rng: np.random.Generator
) -> WrongCall:
    """A good call with one or two arguments changed, left out, added or given by another name."""
    args, kwargs = list(good), dict[str, Any]()
    every = (*ODD, *arrays, [arrays[0]], (arrays[0],))
    for _ in range(int(rng.integers(1, 3))):
        value, what = every[int(rng.integers(len(every)))], rng.random()
        if what < 0.55 and args:
            args[int(rng.integers(len(args)))] = value
        elif what < 0.65 and args:
            args.pop(int(rng.integers(len(args))))
        elif what < 0.8:
            args.insert(int(rng.integers(len(args) + 1)), value)
        else:
            names = (*inspect.signature(function).parameters, *NAMES)
            kwargs[names[int(rng.integers(len(names)))]] = value
    return WrongCall(tuple(args), kwargs)


def complaint(name: str, call: WrongCall, function: Callable[..., Any]) -> str:
    """What is wrong with the error of a call: it has another type, no name, or the elements of an array."""
    try:
        function(*call.args, **call.kwargs)
    except (ValueError, TypeError, NotImplementedError) as error:
        text = str(error)
        twice = rf"{name}\(\) got multiple values for argument"  # Python's own, before the function runs
        named = re.match(rf"cute(_ops(_torch|_jax)?)?\.{name}\b|cute_ops: .* cannot be traced|{twice}", text)
        values = re.search(r"(tensor|array)\(|-?\d\.\d{3,}e?", text, re.IGNORECASE)
        return "" if named and not values and len(text) < 1500 else f"{type(error).__name__}: {text}"
    except Exception as error:
        # As torch's own functions say it.
        return "" if "automatic differentiation" in str(error) else f"{type(error).__name__}: {error}"
    return ""
