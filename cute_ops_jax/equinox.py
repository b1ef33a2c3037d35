"""``equinox`` modules over the functions: ``pip install 'cute-ops[equinox]'``.

They take one example, as ``equinox.nn``'s own norms do, or any leading dims; ``jax.vmap`` costs nothing. Their
parameters have the same names. The result has the dtype of ``x``, whatever the dtype of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import jax
import jax.numpy as jnp

from cute_ops.composite import layers
from cute_ops.composite.layers import LAYERS
from cute_ops.errors import no_attribute, suggesting
from cute_ops.ops.gemm.by_call import Epilogue, check_options
from cute_ops_jax import layers as layered
from cute_ops_jax.layers import Layered

try:
    import equinox as eqx
except ImportError as error:
    raise ImportError("cute_ops_jax.equinox needs equinox: pip install 'cute-ops[equinox]'") from error

Array = jax.Array
T = TypeVar("T")


class RMSNorm(Layered, eqx.Module):
    """:func:`cute_ops_jax.rmsnorm` with a learned weight.

    Args:
        shape: size of the last dim.
        eps: added to the mean square.
        use_weight: learn a weight.
        use_bias: learn a bias.
        dtype: of the parameters; it need not be that of the input.
        weight_offset: added to the weight; the weight starts at ``1 - weight_offset``.
    """

    weight: Array | None
    bias: Array | None
    eps: float = eqx.field(static=True)
    weight_offset: float = eqx.field(static=True)

    @suggesting
    def __init__(
        self, shape: int, eps: float = 1e-5, use_weight: bool = True, use_bias: bool = True, dtype: Any = jnp.float32,
        *, weight_offset: float = 0.0,
    ) -> None:  # fmt: skip
        self.weight = jnp.full(shape, 1 - weight_offset, dtype) if use_weight else None
        self.bias = jnp.zeros(shape, dtype) if use_bias else None
        self.eps, self.weight_offset = eps, weight_offset

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        return self._run(x)


class AddRMSNorm(RMSNorm):
    """:func:`cute_ops_jax.add_rmsnorm` with a learned weight: ``(x, residual) -> (out, residual_out)``."""

    def __call__(self, x: Array, residual: Array, *, key: Any = None) -> tuple[Array, Array]:  # type: ignore[override]
        return self._run(x, residual)


class LayerNorm(Layered, eqx.Module):
    """:func:`cute_ops_jax.layernorm` with a learned weight and bias.

    Args:
        shape: size of the last dim.
        eps: added to the variance.
        use_weight: learn a weight.
        use_bias: learn a bias.
        dtype: of the parameters; it need not be that of the input.
    """

    weight: Array | None
    bias: Array | None
    eps: float = eqx.field(static=True)

    @suggesting
    def __init__(
        self, shape: int, eps: float = 1e-5, use_weight: bool = True, use_bias: bool = True, dtype: Any = jnp.float32
    ) -> None:
        self.weight = jnp.ones(shape, dtype) if use_weight else None
        self.bias = jnp.zeros(shape, dtype) if use_bias else None
        self.eps = eps

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        return self._run(x)


class AddLayerNorm(LayerNorm):
    """:func:`cute_ops_jax.add_layernorm` with a learned weight and bias: ``(x, residual) -> (out, residual_out)``."""

    def __call__(self, x: Array, residual: Array, *, key: Any = None) -> tuple[Array, Array]:  # type: ignore[override]
        return self._run(x, residual)


class DropoutAddRMSNorm(Layered, eqx.Module):
    """:func:`cute_ops_jax.dropout_add_rmsnorm` with a learned weight: ``(x, residual) -> (out, residual_out)``.

    Args:
        shape: size of the last dim.
        p: how many elements are dropped.
        eps: added to the mean square.
        inference: drop nothing.
        dtype: of the weight; it need not be that of the input.

    A call takes a ``key``, of which it draws the seed, or the ``seed``.
    """

    weight: Array
    p: float = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    inference: bool

    @suggesting
    def __init__(
        self, shape: int, p: float = 0.1, eps: float = 1e-6, inference: bool = False, dtype: Any = jnp.float32
    ) -> None:
        self.weight, self.p, self.eps, self.inference = jnp.ones(shape, dtype), p, eps, inference

    def __call__(self, x: Array, residual: Array, seed: Array | None = None, *, key: Any = None) -> tuple[Array, Array]:
        whole = self.inference or not self.p
        if seed is None and key is None and not whole:
            raise ValueError(f"{type(self).__name__}: a call that drops elements needs a `key`, or a `seed`.")
        if seed is None:
            seed = jnp.zeros((), jnp.int32) if whole else layered.seed(key)
        return self._run(x, residual, seed, **({"p": 0.0} if whole else {}))


class DropoutAddLayerNorm(DropoutAddRMSNorm):
    """:func:`cute_ops_jax.dropout_add_layernorm` with a learned weight and bias, as :class:`DropoutAddRMSNorm`."""

    bias: Array

    @suggesting
    def __init__(
        self, shape: int, p: float = 0.1, eps: float = 1e-5, inference: bool = False, dtype: Any = jnp.float32
    ) -> None:
        super().__init__(shape, p, eps, inference, dtype)
        self.bias = jnp.zeros(shape, dtype)


class GroupNorm(Layered, eqx.Module):
    """:func:`cute_ops_jax.group_norm` of one example, ``[c *s]``, with a learned weight and bias.

    Args:
        groups: of channels.
        channels: the size of the dim of channels.
        eps: added to the variance.
        channelwise_affine: learn a weight and a bias.
        dtype: of the parameters; it need not be that of the input.
        channels_last: whether the last dim has the channels, not the first.
        activation: ``"silu"`` or ``"none"``, in the same pass.
    """

    weight: Array | None
    bias: Array | None
    groups: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    channels_last: bool = eqx.field(static=True)
    activation: str = eqx.field(static=True)

    @suggesting
    def __init__(
        self, groups: int, channels: int, eps: float = 1e-5, channelwise_affine: bool = True, dtype: Any = jnp.float32,
        *, channels_last: bool = False, activation: str = "none",
    ) -> None:  # fmt: skip
        self.weight = jnp.ones(channels, dtype) if channelwise_affine else None
        self.bias = jnp.zeros(channels, dtype) if channelwise_affine else None
        self.groups, self.eps, self.channels_last, self.activation = groups, eps, channels_last, activation

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        return self._run(x[None])[0]


class HeadRMSNorm(Layered, eqx.Module):
    """:func:`cute_ops_jax.head_rmsnorm` with a learned weight for each head.

    Args:
        heads: of a token, the dim before the last.
        head_dim: elements of a head.
        eps: added to the mean square.
        dtype: of the weight; it need not be that of the input.
        weight_offset: added to the weight; the weight starts at ``1 - weight_offset``.
    """

    weight: Array
    eps: float = eqx.field(static=True)
    weight_offset: float = eqx.field(static=True)

    @suggesting
    def __init__(
        self, heads: int, head_dim: int, eps: float = 1e-6, dtype: Any = jnp.float32, *, weight_offset: float = 0.0
    ) -> None:
        self.weight, self.eps = jnp.full((heads, head_dim), 1 - weight_offset, dtype), eps
        self.weight_offset = weight_offset

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        return self._run(x)


class HeadLayerNorm(Layered, eqx.Module):
    """:func:`cute_ops_jax.head_layernorm` with a learned weight and bias for each head.

    Args:
        heads: of a token, the dim before the last.
        head_dim: elements of a head.
        eps: added to the variance.
        dtype: of the parameters; it need not be that of the input.
    """

    weight: Array
    bias: Array
    eps: float = eqx.field(static=True)

    @suggesting
    def __init__(self, heads: int, head_dim: int, eps: float = 1e-5, dtype: Any = jnp.float32) -> None:
        self.weight, self.bias, self.eps = jnp.ones((heads, head_dim), dtype), jnp.zeros((heads, head_dim), dtype), eps

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        return self._run(x)


class QKNormRope(Layered, eqx.Module):
    """:func:`cute_ops_jax.qk_norm_rope` with learned weights: ``(q, k, cos, sin) -> (q_out, k_out)``.

    Args:
        head_dim: elements of a head.
        eps: added to the mean square.
        dtype: of the parameters; it need not be that of the input.
    """

    q_weight: Array
    k_weight: Array
    eps: float = eqx.field(static=True)

    @suggesting
    def __init__(self, head_dim: int, eps: float = 1e-6, dtype: Any = jnp.float32) -> None:
        self.q_weight, self.k_weight, self.eps = jnp.ones(head_dim, dtype), jnp.ones(head_dim, dtype), eps

    def __call__(self, q: Array, k: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        return self._run(q, k, cos, sin)


class CausalConv1d(Layered, eqx.Module):
    """:func:`cute_ops_jax.causal_conv1d` with learned taps: ``(x[, initial_state]) -> (out, final_state)``.

    Args:
        channels: the size of the last dim.
        width: taps of each channel: 2, 3 or 4.
        activation: ``"silu"`` or ``"none"``.
        use_bias: learn a bias.
        dtype: of the parameters; it need not be that of the input.
    """

    weight: Array
    bias: Array | None
    activation: str = eqx.field(static=True)

    @suggesting
    def __init__(
        self, channels: int, width: int = 4, activation: str = "none", use_bias: bool = False, dtype: Any = jnp.float32
    ) -> None:
        self.weight, self.activation = jnp.ones((channels, width), dtype), activation
        self.bias = jnp.zeros(channels, dtype) if use_bias else None

    def __call__(self, x: Array, initial_state: Array | None = None, *, key: Any = None) -> Any:
        return self._run(x, initial_state)


class CausalConv1dChannelsFirst(CausalConv1d):
    """:func:`cute_ops_jax.causal_conv1d_channels_first` with learned taps, as :class:`CausalConv1d`, of channels before
    positions: ``(x[, seq_idx]) -> out``.
    """

    def __call__(self, x: Array, seq_idx: Array | None = None, *, key: Any = None) -> Array:
        found: Array = self._run(x, seq_idx)
        return found


class Attention(Layered, eqx.Module):
    """:func:`cute_ops_jax.attention` with these options: ``(q, k, v) -> (out, lse)``. What functions read, and where
    packed sequences begin, is given with each call.

    Args:
        sinks: heads of q, for each of which a sink is learned; None learns none.
        scale: of scores; 0 is ``1 / sqrt(headdim)``.
        causal: a query attends to keys up to its own.
        left: keys before its own that a query attends to at most; -1 is all.
        right: keys after its own that a query attends to at most; -1 is all.
        softcap: ``softcap * tanh(score / softcap)`` takes the place of a score; 0 is none.
        deterministic: gradients are summed in a fixed order, too.
        fused: ``"auto"``, ``"always"`` or ``"never"``, as the function has it.
        score_mod: what takes the place of a score.
        mask_mod: whether a query attends to a key.
        dtype: of the sinks.
    """

    sinks: Array | None
    scale: float = eqx.field(static=True)
    causal: bool = eqx.field(static=True)
    left: int = eqx.field(static=True)
    right: int = eqx.field(static=True)
    softcap: float = eqx.field(static=True)
    deterministic: bool = eqx.field(static=True)
    fused: str = eqx.field(static=True)
    score_mod: Callable[..., Any] | None = eqx.field(static=True)
    mask_mod: Callable[..., Any] | None = eqx.field(static=True)

    @suggesting
    def __init__(
        self, sinks: int | None = None, *, scale: float = 0.0, causal: bool = False, left: int = -1, right: int = -1,
        softcap: float = 0.0, deterministic: bool = False, fused: str = "auto",
        score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None,
        dtype: Any = jnp.float32,
    ) -> None:  # fmt: skip
        self.scale, self.causal, self.left, self.right, self.softcap = scale, causal, left, right, softcap
        self.deterministic, self.fused, self.score_mod, self.mask_mod = deterministic, fused, score_mod, mask_mod
        self.sinks = None if sinks is None else jnp.zeros(sinks, dtype)

    def __call__(
        self, q: Array, k: Array, v: Array, *, captured: Any = (), cu_seqlens_q: Array | None = None,
        cu_seqlens_k: Array | None = None,
        key: Any = None,
    ) -> tuple[Array, Array]:  # fmt: skip
        where = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        return self._run(q, k, v, captured=captured, **where)


class Linear(Layered, eqx.nn.Linear):
    """:func:`cute_ops_jax.linear` with a learned weight and bias: ``(x, *operands) -> out``.

    Args:
        in_features: size of x's last dim.
        out_features: columns of the product.
        use_bias, dtype: as ``equinox.nn.Linear`` has them.
        epilogue: the function's: ``"gelu"``, ``"gelu_tanh"``, ``"silu"``, ``"add"`` or a function. It reads the bias,
            None where it is not learned, then what the module is called with.
        key: for the initial values.
        options: other options of the function, and attributes of the epilogue.
    """

    epilogue: Epilogue = eqx.field(static=True)
    options: tuple[tuple[str, Any], ...] = eqx.field(static=True)

    @suggesting
    def __init__(
        self, in_features: int, out_features: int, use_bias: bool = True, dtype: Any = None, *,
        epilogue: Epilogue = "bias", key: Any, **options: Any,
    ) -> None:  # fmt: skip
        check_options(epilogue, options, type(self))
        super().__init__(in_features, out_features, use_bias, dtype, key=key)
        self.epilogue, self.options = epilogue, tuple(options.items())

    @classmethod
    def from_linear(cls, layer: eqx.nn.Linear, **options: Any) -> Self:
        """A layer with the parameters of another one."""
        shape = partial(cls, layer.in_features, layer.out_features, layer.use_bias, **options)
        return _holding(shape, lambda m: (m.weight, m.bias), (layer.weight, layer.bias))

    def __call__(self, x: Array, *operands: Array | None, key: Any = None) -> Any:
        return self._run(x, *operands, **dict(self.options))


class LinearGELU(layers.GELU, Linear):
    """A linear layer and GELU. Arguments are those of :class:`Linear`, and this one.

    Args:
        approximate: ``"none"`` for the error function, or ``"tanh"``.
    """


class LinearSiLU(layers.SiLU, Linear):
    """A linear layer and SiLU. Arguments are those of :class:`Linear`."""


class LinearAdd(layers.Add, Linear):
    """A linear layer whose output is added to a residual: ``(x, residual) -> out``. Arguments are those of
    :class:`Linear`.
    """


class RMSNormLinear(Linear):
    """:func:`cute_ops_jax.rmsnorm_linear` with learned parameters: those of :class:`Linear`, and ``norm_weight``, which
    starts at one: ``(x, *operands) -> out``. Arguments are those of :class:`Linear`, and these.

    Args:
        eps: added to the mean square.
        use_weight: learn a weight of the norm.
    """

    norm_weight: Array | None
    eps: float = eqx.field(static=True)

    @suggesting
    def __init__(
        self, in_features: int, out_features: int, use_bias: bool = True, dtype: Any = None, *, eps: float = 1e-5,
        use_weight: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, use_bias, dtype, **options)
        self.norm_weight = jnp.ones(in_features, self.weight.dtype) if use_weight else None
        self.eps = eps

    @classmethod
    def from_layers(cls, norm: eqx.nn.RMSNorm, layer: eqx.nn.Linear, **options: Any) -> Self:
        """A layer with the parameters of a norm without bias and of the layer that reads it.

        Raises:
            ValueError: the norm has a bias, or is not of the layer's rows.
        """
        _check_norm("RMSNormLinear", norm, layer.in_features)
        made = cls.from_linear(layer, eps=norm.eps, use_weight=norm.use_weight, **options)
        found: Self = eqx.tree_at(lambda m: m.norm_weight, made, norm.weight, is_leaf=lambda x: x is None)
        return found


class LinearAddRMSNorm(Layered, eqx.nn.Linear):
    """:func:`cute_ops_jax.linear_add_rmsnorm` with learned parameters, ``weight`` and ``norm_weight``, which starts at
    one: ``(x, residual) -> (out, residual_out)``.

    Args:
        in_features: size of x's last dim.
        out_features: columns of the product, and of the norm.
        dtype: of the parameters.
        eps: added to the mean square.
        fused: the function's.
        key: for the initial values.
    """

    norm_weight: Array
    eps: float = eqx.field(static=True)
    fused: str = eqx.field(static=True)

    @suggesting
    def __init__(
        self, in_features: int, out_features: int, dtype: Any = None, *, eps: float = 1e-5, fused: str = "auto",
        key: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, False, dtype, key=key)
        self.norm_weight = jnp.ones(out_features, self.weight.dtype)
        self.eps, self.fused = eps, fused

    @classmethod
    def from_layers(cls, layer: eqx.nn.Linear, norm: eqx.nn.RMSNorm, **options: Any) -> Self:
        """A layer with the parameters of a layer without bias and of the norm behind it.

        Raises:
            ValueError: one of them has a bias, or the norm has no weight or is not of the layer's outputs.
        """
        _check_norm("LinearAddRMSNorm", norm, layer.out_features)
        if layer.use_bias or not norm.use_weight:
            raise ValueError("LinearAddRMSNorm: expected a layer without bias and a norm with a weight.")
        shape = partial(cls, layer.in_features, layer.out_features, **{"eps": norm.eps, **options})
        return _holding(shape, lambda m: (m.weight, m.norm_weight), (layer.weight, norm.weight))

    def __call__(self, x: Array, residual: Array, *, key: Any = None) -> tuple[Array, Array]:
        return self._run(x, residual)


class QKVRope(Layered, eqx.nn.Linear):
    """:func:`cute_ops_jax.qkv_rope` with a learned weight, whose rows are those of queries, of keys and of as many
    values: ``(x, cos, sin) -> out``.

    Args:
        in_features: size of x's last dim.
        query_heads: how many heads queries have.
        key_heads: how many heads keys have, and values.
        head_dim: columns of a head, 64 or 128.
        dtype: of the weight.
        fused: the function's.
        key: for the initial values.
    """

    heads: int = eqx.field(static=True)
    fused: str = eqx.field(static=True)

    @suggesting
    def __init__(
        self, in_features: int, query_heads: int, key_heads: int, head_dim: int = 128, dtype: Any = None, *,
        fused: str = "auto", key: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, (query_heads + 2 * key_heads) * head_dim, False, dtype, key=key)
        self.heads, self.fused = query_heads + key_heads, fused

    def __call__(self, x: Array, cos: Array, sin: Array, *, key: Any = None) -> Array:
        return self._run(x, cos, sin)


class GatedLinear(Layered, eqx.nn.Linear):
    """:func:`cute_ops_jax.gated_linear` with a learned weight, ``[gate | up]``, of ``2 * out_features`` rows.

    Args:
        in_features: size of x's last dim.
        out_features: size of the output's last dim.
        activation: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        dtype: of the weight.
        fused: the function's.
        halves: the weight is ``[2, out_features, in_features]``, which devices share by the dim in the middle.
        key: for the initial values.
    """

    activation: str = eqx.field(static=True)
    fused: str = eqx.field(static=True)
    halves: bool = eqx.field(static=True)

    @suggesting
    def __init__(
        self, in_features: int, out_features: int, activation: str = "silu", dtype: Any = None, *, fused: str = "auto",
        halves: bool = False, key: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, 2 * out_features, False, dtype, key=key)
        self.activation, self.fused, self.halves = activation, fused, halves
        if halves:
            self.weight = jnp.reshape(self.weight, (2, out_features, in_features))  # type: ignore[has-type]

    @classmethod
    def from_linear(cls, gate: eqx.nn.Linear, up: eqx.nn.Linear, **options: Any) -> Self:
        """The layer of two without biases, whose weights are copied side by side."""
        shape = partial(cls, gate.in_features, gate.out_features, **options)
        return _holding(shape, lambda m: m.weight, _packed(gate, up, options))

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        return self._run(x)


def _holding(make: Callable[..., T], places: Callable[[T], Any], parameters: Any) -> T:
    """A module that has other ones' parameters: none of its own are made for these places."""
    made = eqx.filter_eval_shape(make, key=jax.random.key(0))
    found: T = eqx.tree_at(places, made, parameters, is_leaf=lambda x: x is None)
    return found


def _packed(gate: eqx.nn.Linear, up: eqx.nn.Linear, options: Mapping[str, Any]) -> Array:
    return (jnp.stack if options.get("halves") else jnp.concatenate)([gate.weight, up.weight])


def _check_norm(name: str, norm: eqx.nn.RMSNorm, columns: int) -> None:
    if tuple(norm.shape) != (columns,) or norm.use_bias:
        raise ValueError(f"{name}: norm is {norm}, expected one of {columns} columns without bias.")


class GatedMLP(Layered, eqx.Module):
    """:func:`cute_ops_jax.gated_mlp` with learned weights: ``gate_up``, packed, and ``down``.

    Args:
        in_features: size of x's last dim, and of the output's.
        hidden_features: size between.
        activation: ``"silu"`` (SwiGLU), ``"gelu"`` (by the error function) or ``"gelu_tanh"`` (GeGLU).
        dtype: of the weights.
        fused, save: the function's.
        halves: the first weight is ``[2, hidden_features, in_features]``. Devices that share hidden features then
            gather nothing.
        key: for the initial values.
    """

    gate_up: GatedLinear
    down: eqx.nn.Linear
    activation: str = eqx.field(static=True)
    fused: str = eqx.field(static=True)
    save: str = eqx.field(static=True)

    @suggesting
    def __init__(
        self, in_features: int, hidden_features: int, activation: str = "silu", dtype: Any = None, *,
        fused: str = "auto", save: str = "pre", halves: bool = False, key: Any,
    ) -> None:  # fmt: skip
        first, second = jax.random.split(key)
        self.gate_up = GatedLinear(
            in_features, hidden_features, activation, dtype, fused=fused, halves=halves, key=first
        )
        self.down = eqx.nn.Linear(hidden_features, in_features, False, dtype, key=second)
        self.activation, self.fused, self.save = activation, fused, save

    @classmethod
    def from_linear(cls, gate: eqx.nn.Linear, up: eqx.nn.Linear, down: eqx.nn.Linear, **options: Any) -> Self:
        """The MLP of three layers without biases."""
        shape = partial(cls, gate.in_features, gate.out_features, **options)
        weights = _packed(gate, up, options), down.weight
        return _holding(shape, lambda mlp: (mlp.gate_up.weight, mlp.down.weight), weights)

    @property
    def halves(self) -> bool:
        return self.gate_up.halves

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        return self._run(x)


class MLP(Layered, eqx.Module):
    """:func:`cute_ops_jax.mlp` with learned weights and biases: those of ``up`` and ``down``.

    Args:
        in_features: size of x's last dim, and of the output's.
        hidden_features: size between.
        activation: the function's.
        dtype: of the parameters.
        use_bias: learn biases of both layers.
        fused, save: the function's.
        key: for the initial values.
    """

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: str = eqx.field(static=True)
    fused: str = eqx.field(static=True)
    save: str = eqx.field(static=True)

    @suggesting
    def __init__(
        self, in_features: int, hidden_features: int, activation: str = "gelu", dtype: Any = None, *,
        use_bias: bool = True, fused: str = "auto", save: str = "pre", key: Any,
    ) -> None:  # fmt: skip
        first, second = jax.random.split(key)
        self.up = eqx.nn.Linear(in_features, hidden_features, use_bias, dtype, key=first)
        self.down = eqx.nn.Linear(hidden_features, in_features, use_bias, dtype, key=second)
        self.activation, self.fused, self.save = activation, fused, save

    @classmethod
    def from_linear(cls, up: eqx.nn.Linear, down: eqx.nn.Linear, **options: Any) -> Self:
        """The MLP of two layers, whose parameters it shares; either may have no bias."""
        shape = partial(cls, up.in_features, up.out_features, **options)
        return _holding(shape, lambda mlp: (mlp.up, mlp.down), (up, down))

    def __call__(self, x: Array, *, key: Any = None) -> Array:
        return self._run(x)


class _Loss(layered.Loss, eqx.Module):
    """A loss without parameters, whose options are no leaves."""

    options: tuple[tuple[str, Any], ...] = eqx.field(static=True)


class CrossEntropy(layered.CrossEntropy, _Loss):
    """:func:`cute_ops_jax.cross_entropy` as a module: ``(logits, target) -> loss``.

    Args:
        ignore_index, label_smoothing, z_loss, classes, softcap, logit_scale, reduction, inplace_backward: the
            function's.
    """


class CrossEntropyMetrics(layered.CrossEntropyMetrics, _Loss):
    """:func:`cute_ops_jax.cross_entropy_metrics` as a module: ``(logits, target, weight)`` to what the
    function returns.

    Args:
        ignore_index, label_smoothing, z_loss, softcap, logit_scale, reduction, token_scaling, inplace_backward: the
            function's.
    """


class CrossEntropyOfSlice(layered.CrossEntropyOfSlice, _Loss):
    """:func:`cute_ops_jax.cross_entropy_of_slice` as a module: ``(logits, target, lse_partial)`` to what the
    function returns.

    Args:
        ignore_index, label_smoothing, z_loss, classes, softcap, logit_scale, inplace_backward: the function's.
    """


class SoftCrossEntropy(layered.SoftCrossEntropy, _Loss):
    """:func:`cute_ops_jax.soft_cross_entropy` as a module: ``(logits, target) -> loss``.

    Args:
        label_smoothing, z_loss, softcap, logit_scale, reduction: the function's.
    """


class Divergence(layered.Divergence, _Loss):
    """:func:`cute_ops_jax.divergence` as a module: ``(student, teacher) -> loss``.

    Args:
        beta, temperature: the function's.
    """


class _LinearLoss(layered.Loss, eqx.nn.Linear):
    """A linear layer and its loss."""

    options: tuple[tuple[str, Any], ...] = eqx.field(static=True)

    @classmethod
    def from_linear(cls, layer: eqx.nn.Linear, **options: Any) -> Self:
        """The loss of a linear layer's outputs, with its parameters."""
        make: Any = cls
        shape = partial(make, layer.in_features, layer.out_features, use_bias=layer.use_bias, **options)
        return _holding(shape, lambda m: (m.weight, m.bias), (layer.weight, layer.bias))


class LinearCrossEntropy(_LinearLoss):
    """:func:`cute_ops_jax.linear_cross_entropy` with a learned weight: ``(hidden, target) -> loss``.

    Args:
        in_features: size of the hidden states' last dim.
        classes: number of classes.
        use_bias, dtype: as ``equinox.nn.Linear`` has them; no bias unless it is asked for.
        ignore_index, label_smoothing, z_loss, reduction, softcap, logit_scale: the function's.
        key: for the initial values.
    """

    @suggesting
    def __init__(
        self, in_features: int, classes: int, use_bias: bool = False, dtype: Any = None, *,
        ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean",
        softcap: float = 0.0, logit_scale: float = 1.0, key: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, classes, use_bias, dtype, key=key)
        self._keep(locals())

    def __call__(self, hidden: Array, target: Array, *, key: Any = None) -> Array:
        return self._run(hidden, target)


class LinearCrossEntropyMetrics(_LinearLoss):
    """:func:`cute_ops_jax.linear_cross_entropy_metrics` with a learned weight: ``(hidden, target, class_weight)``
    to what the function returns.

    Args:
        in_features: size of the hidden states' last dim.
        classes: number of classes.
        use_bias, dtype: as ``equinox.nn.Linear`` has them; no bias unless it is asked for.
        ignore_index, label_smoothing, z_loss, softcap, logit_scale, accum_dtype, chunk_rows, reduction,
            token_scaling: the function's.
        key: for the initial values.
    """

    @suggesting
    def __init__(
        self, in_features: int, classes: int, use_bias: bool = False, dtype: Any = None, *,
        ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
        logit_scale: float = 1.0, accum_dtype: str = "float32", chunk_rows: int = 0, reduction: str = "mean",
        token_scaling: bool = False, key: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, classes, use_bias, dtype, key=key)
        self._keep(locals())

    def __call__(
        self, hidden: Array, target: Array, class_weight: Array | None = None, *, key: Any = None
    ) -> tuple[Array, Array, Array, Array]:
        return self._run(hidden, target, class_weight)


for _name, _row in LAYERS.items():
    globals()[_name].layer = _row
if not TYPE_CHECKING:  # for which each name would exist

    def __getattr__(name: str) -> Any:
        own = [each for each, value in globals().items() if getattr(value, "__module__", "") == __name__]
        raise no_attribute(__name__, name, own)
