"""Loss modules of flax.nnx and equinox with drawn options, under jit and grad, against functions and float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from cute_ops.composite.layers import LAYERS

ROWS, N, CLASSES = 6, 16, 40
CHOICES: dict[str, tuple[Any, ...]] = {
    "ignore_index": (-100, 3), "label_smoothing": (0.0, 0.1), "z_loss": (0.0, 1e-2), "softcap": (0.0, 5.0),
    "logit_scale": (1.0, 0.5), "reduction": ("mean", "sum", "none"), "token_scaling": (False, True),
    "inplace_backward": (False, True), "beta": (0.0, 0.3, 1.0), "temperature": (1.0, 2.0), "chunk_rows": (0, 4),
}  # fmt: skip
LOSSES = [name for name, row in LAYERS.items() if "entropy" in row.function or row.function == "divergence"]


def entropy(
    logits: Any, target: Any, weight: Any = None, known: Any = None, *, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0, logit_scale: float = 1.0,
    reduction: str = "mean", token_scaling: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """The loss of classes, or of their probabilities, in the dtype of the logits."""
    n, soft = logits.shape[-1], target.ndim == logits.ndim
    y = logit_scale * logits
    y = softcap * jnp.tanh(y / softcap) if softcap else y
    lse = jax.nn.logsumexp(y, -1)
    lse = lse if known is None else jnp.logaddexp(lse, known)
    distance, weight = lse[:, None] - y, jnp.ones(n) if weight is None else jnp.asarray(weight)
    kept = jnp.ones(len(y), bool) if soft else target != ignore_index
    chosen = target if soft else jax.nn.one_hot(target, n)
    w = 1.0 if soft else weight[jnp.where(kept, target, 0)]
    loss = (1 - label_smoothing) * (chosen * weight * distance).sum(-1) + w * z_loss * lse**2
    loss += label_smoothing / n * (weight * distance).sum(-1)
    if token_scaling:
        loss *= jax.lax.stop_gradient(jnp.exp(-(chosen * distance).sum(-1)))
    loss = jnp.where(kept, loss, 0.0)
    if known is not None or reduction == "none":
        return loss
    return loss.sum() / (jnp.where(kept, w, 0.0).sum() if reduction == "mean" else 1.0)


def divergence(student: Any, teacher: Any, *, beta: float, temperature: float) -> Any:
    q, p = (jax.nn.log_softmax(each / temperature) for each in (student, teacher))
    if beta in (0.0, 1.0):
        one, other = (p, q) if beta == 0.0 else (q, p)
        return (jnp.exp(one) * (one - other)).sum(-1)
    m = jnp.log(beta * jnp.exp(p) + (1 - beta) * jnp.exp(q))
    return (beta * jnp.exp(p) * (p - m) + (1 - beta) * jnp.exp(q) * (q - m)).sum(-1)


def right(name: str, options: dict[str, Any]) -> Callable[..., Any]:
    """The loss by definition, of all of a function's arguments but the options."""
    if name == "Divergence":
        return lambda *arrays: divergence(*arrays, **options)
    if name.startswith("Linear"):
        return lambda hidden, weight, target, bias, *of: entropy(hidden @ weight.T + bias, target, *of, **options)
    if name == "CrossEntropyOfSlice":
        return lambda logits, target, known: entropy(logits, target, None, known, **options)
    return lambda *arrays: entropy(*arrays, **options)


def drawn(name: str, rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Options, and what a call is given."""
    options = {
        each: CHOICES[each][rng.integers(len(CHOICES[each]))] for each in LAYERS[name].options if each in CHOICES
    }
    floats = {
        "logits": (ROWS, CLASSES), "student": (ROWS, CLASSES), "teacher": (ROWS, CLASSES), "hidden": (ROWS, N),
        "lse_partial": (ROWS,),
    }  # fmt: skip
    arrays = {each: rng.standard_normal(floats[each], np.float32) for each in LAYERS[name].arguments if each in floats}
    if name == "SoftCrossEntropy":
        arrays["target"] = rng.dirichlet(np.ones(CLASSES), ROWS).astype(np.float32)
    elif name != "Divergence":
        arrays["target"] = rng.integers(0, CLASSES, ROWS).astype(np.int32)
        arrays["target"][2] = options["ignore_index"]
    classes = {"CrossEntropyMetrics": "weight", "LinearCrossEntropyMetrics": "class_weight"}
    if name in classes:
        arrays[classes[name]] = rng.uniform(0.5, 2, CLASSES).astype(np.float32)
    return options, arrays


def first(results: Any) -> Any:
    """The loss: metrics stand behind it."""
    return results[0] if isinstance(results, tuple) else results


def nnx_module(name: str, options: dict[str, Any], learned: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """A module's arrays, and the module of such arrays."""
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    from cute_ops_jax import nnx as ours

    if learned:
        module = getattr(ours, name)(N, CLASSES, use_bias=True, rngs=nnx.Rngs(0), **options)
        module.kernel[...], module.bias[...] = learned["weight"], learned["bias"]
    else:
        module = getattr(ours, name)(**options)
    graph, state = nnx.split(module)
    return state, lambda state: nnx.merge(graph, state)


def equinox_module(name: str, options: dict[str, Any], learned: dict[str, np.ndarray]) -> tuple[Any, Any]:
    """A module's arrays, and the module of such arrays."""
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    from cute_ops_jax import equinox as ours

    if learned:
        module = getattr(ours, name)(N, CLASSES, True, key=jax.random.key(0), **options)
        parameters = jnp.asarray(learned["weight"]), jnp.asarray(learned["bias"])
        module = eqx.tree_at(lambda m: (m.weight, m.bias), module, parameters)
    else:
        module = getattr(ours, name)(**options)
    arrays, static = eqx.partition(module, eqx.is_array)
    return arrays, lambda arrays: eqx.combine(arrays, static)


MODULES = {"nnx": nnx_module, "equinox": equinox_module}


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("library", MODULES)
def test_values_and_gradients(library: str, name: str, close: Callable[[Any, Any], None]) -> None:
    """Each has the bits of its function; flax stores a kernel, the weight transposed."""
    row, rng = LAYERS[name], np.random.default_rng(LOSSES.index(name))
    options, given = drawn(name, rng)
    learned = {}
    if row.learned:
        shape = (N, CLASSES) if library == "nnx" else (CLASSES, N)
        learned = {"weight": rng.standard_normal(shape, np.float32), "bias": rng.standard_normal(CLASSES, np.float32)}
    held, module = MODULES[library](name, options, learned)
    place, cotangent = row.arguments[0], rng.standard_normal(ROWS, np.float32)
    x = given.pop(place)

    def of_module(held: Any, x: Any) -> Any:
        called = {place: x, **given}
        results = module(held)(*(called[each] for each in row.arguments if each not in row.learned))
        return (first(results) * cotangent).sum()

    def of_function(function: Callable[..., Any], learned: Any, x: Any) -> Any:
        arrays = {place: x, **given, **learned}
        if learned and library == "nnx":
            arrays["weight"] = arrays["weight"].T
        return (first(function(*(arrays[each] for each in row.arguments))) * cotangent).sum()

    def with_gradients(function: Callable[..., Any], *arguments: Any) -> Any:
        """The loss, gradients of parameters by their number of dims, and that of the input."""
        value, (parameters, dx) = jax.jit(jax.value_and_grad(function, argnums=(0, 1)))(*arguments)
        return value, {np.ndim(each): np.asarray(each) for each in jax.tree.leaves(parameters)}, dx

    found = with_gradients(of_module, held, x)
    function = partial(getattr(cute_ops_jax, row.function), **options)
    jax.tree.map(np.testing.assert_array_equal, found, with_gradients(partial(of_function, function), learned, x))
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda a: a.astype(np.float64) if a.dtype == np.float32 else a, (learned, x, given, cotangent)
        )
        learned, x, given, cotangent = wide
        exact = with_gradients(partial(of_function, right(name, options)), learned, x)
    close(found, exact)
