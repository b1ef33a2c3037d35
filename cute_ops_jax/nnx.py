"""``flax.nnx`` modules over the functions: ``pip install 'cute-ops[nnx]'``.

Norms take the arguments of ``flax.nnx``'s own and give their parameters the same names, so a state fits both. The one
difference: the result has the dtype of ``x``, whatever the dtype of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp

import cute_ops_jax
from cute_ops.composite import layers
from cute_ops.composite.layers import LAYERS
from cute_ops.errors import no_attribute, suggesting
from cute_ops.ops.gemm.by_call import Epilogue, check_options
from cute_ops_jax import layers as layered
from cute_ops_jax.layers import Layered

try:
    from flax import nnx
except ImportError as error:
    raise ImportError("cute_ops_jax.nnx needs flax: pip install 'cute-ops[nnx]'") from error

Array = jax.Array
Initializer = Callable[..., Array]
ones, zeros = nnx.initializers.ones_init(), nnx.initializers.zeros_init()
GATED: dict[str, Callable[[Any, Any], Array]] = {
    "silu": lambda gate, up: cute_ops_jax.silu_mul(gate, up),
    "gelu": lambda gate, up: cute_ops_jax.gelu_mul(gate, up, approximate="none"),
    "gelu_tanh": lambda gate, up: cute_ops_jax.gelu_mul(gate, up, approximate="tanh"),
}
# Arguments that layers with products convert to their ``dtype``, as flax's own do; biases of an MLP keep theirs.
PROMOTED = {"x", "hidden", "residual", "weight", "bias", "gate_up.weight", "up.weight", "down.weight"}


def _parameter(made: bool, init: Initializer, n: int | tuple[int, ...], dtype: Any, rngs: nnx.Rngs) -> Any:
    return nnx.Param(init(rngs.params(), n if isinstance(n, tuple) else (n,), dtype)) if made else nnx.data(None)


def _given(dtype: Any, param_dtype: Any, kernel_init: Initializer | None, rngs: nnx.Rngs) -> dict[str, Any]:
    """Keyword arguments of flax's linear layers; without an initializer they have their own."""
    init = {} if kernel_init is None else {"kernel_init": kernel_init}
    return {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs, **init}


class _Layer(Layered):
    """A layer by flax's names: ``kernel``, ``scale`` and ``epsilon``."""

    def _read(self, name: str) -> Any:
        if name not in self.layer.learned:
            return super()._read("epsilon" if name == "eps" else name)
        scales = self.layer.learned[name].start is not None
        parameter = super()._read(name.replace("weight", "scale" if scales else "kernel"))
        return None if parameter is None else parameter[...]

    @classmethod
    def _like(cls, layer: nnx.Linear, *sizes: int, **options: Any) -> Self:
        """A layer of these sizes and another one's dtypes, without arrays."""
        make: Any = cls
        return nnx.eval_shape(lambda: make(*sizes, dtype=layer.dtype, rngs=nnx.Rngs(0), **options))


class _Product(_Layer):
    """A layer with products, whose operands have one dtype."""

    def _arguments(self, given: tuple[Any, ...]) -> list[Any]:
        found = super()._arguments(given)
        places = [i for i, name in enumerate(self.layer.arguments) if name in PROMOTED]
        linear: Any = getattr(self, "down", self)
        arrays = linear.promote_dtype([found[i] for i in places], dtype=linear.dtype)
        for i, array in zip(places, arrays, strict=True):
            found[i] = array
        return found

    def _run(self, *given: Any, **options: Any) -> Any:
        return super()._run(*given, transposed=True, **options)


class _OfLinear(_Product, nnx.Linear):
    """A linear layer with what follows it."""

    @classmethod
    def from_linear(cls, layer: nnx.Linear, **options: Any) -> Self:
        """A layer with the parameters of another one, which they share."""
        options = {"use_bias": layer.use_bias, "param_dtype": layer.param_dtype, **options}
        made = cls._like(layer, layer.in_features, layer.out_features, **options)
        made.kernel, made.bias = layer.kernel, layer.bias
        return made


class RMSNorm(_Layer, nnx.Module):
    """:func:`cute_ops_jax.rmsnorm` with a learned scale.

    Args:
        num_features: size of the last dim.
        epsilon: added to the mean square.
        param_dtype: a float dtype; it need not be that of the input.
        use_scale: learn a scale.
        use_bias: learn a bias.
        scale_init, bias_init: of the parameters.
        weight_offset: added to the scale; 1.0 with ``scale_init`` of zeros is Gemma's.
        rngs: keys for the initializers.
    """

    @suggesting
    def __init__(
        self, num_features: int, *, epsilon: float = 1e-6, param_dtype: Any = jnp.float32, use_scale: bool = True,
        use_bias: bool = False, scale_init: Initializer = ones, bias_init: Initializer = zeros,
        weight_offset: float = 0.0, rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        self.num_features, self.epsilon, self.weight_offset = num_features, epsilon, weight_offset
        self.scale = _parameter(use_scale, scale_init, num_features, param_dtype, rngs)
        self.bias = _parameter(use_bias, bias_init, num_features, param_dtype, rngs)

    def __call__(self, x: Array) -> Array:
        return self._run(x)


class AddRMSNorm(RMSNorm):
    """:func:`cute_ops_jax.add_rmsnorm` with a learned scale: ``(x, residual) -> (out, residual_out)``."""

    def __call__(self, x: Array, residual: Array) -> tuple[Array, Array]:  # type: ignore[override]
        return self._run(x, residual)


class LayerNorm(_Layer, nnx.Module):
    """:func:`cute_ops_jax.layernorm` with a learned scale and bias.

    Args:
        num_features: size of the last dim.
        epsilon: added to the variance.
        param_dtype: a float dtype; it need not be that of the input.
        use_bias: learn a bias.
        use_scale: learn a scale.
        bias_init, scale_init: of the parameters.
        rngs: keys for the initializers.
    """

    @suggesting
    def __init__(
        self, num_features: int, *, epsilon: float = 1e-6, param_dtype: Any = jnp.float32, use_bias: bool = True,
        use_scale: bool = True, bias_init: Initializer = zeros, scale_init: Initializer = ones, rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        self.num_features, self.epsilon = num_features, epsilon
        self.scale = _parameter(use_scale, scale_init, num_features, param_dtype, rngs)
        self.bias = _parameter(use_bias, bias_init, num_features, param_dtype, rngs)

    def __call__(self, x: Array) -> Array:
        return self._run(x)


class AddLayerNorm(LayerNorm):
    """:func:`cute_ops_jax.add_layernorm` with a learned scale and bias: ``(x, residual) -> (out, residual_out)``."""

    def __call__(self, x: Array, residual: Array) -> tuple[Array, Array]:  # type: ignore[override]
        return self._run(x, residual)


class DropoutAddRMSNorm(_Layer, nnx.Module):
    """:func:`cute_ops_jax.dropout_add_rmsnorm` with a learned scale: ``(x, residual) -> (out, residual_out)``.

    Each call draws a seed with the stream ``dropout``, unless it is given one.

    Args:
        num_features: size of the last dim.
        p: how many elements are dropped.
        epsilon: added to the mean square.
        deterministic: drop nothing, as in evaluation.
        param_dtype: a float dtype; it need not be that of the input.
        scale_init: of the scale.
        rngs: keys for the initializer and for seeds.
    """

    use_bias = False

    @suggesting
    def __init__(
        self, num_features: int, p: float = 0.1, *, epsilon: float = 1e-6, deterministic: bool = False,
        param_dtype: Any = jnp.float32, scale_init: Initializer = ones, rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        self.p, self.epsilon, self.deterministic, self.rngs = p, epsilon, deterministic, rngs
        self.scale = _parameter(True, scale_init, num_features, param_dtype, rngs)
        self.bias = _parameter(self.use_bias, zeros, num_features, param_dtype, rngs)

    def __call__(self, x: Array, residual: Array, seed: Array | None = None) -> tuple[Array, Array]:
        whole = self.deterministic or not self.p
        if seed is None:
            seed = jnp.zeros((), jnp.int32) if whole else layered.seed(self.rngs.dropout())
        kept = {"p": 0.0} if whole else {}
        return self._run(x, residual, seed, **kept)


class DropoutAddLayerNorm(DropoutAddRMSNorm):
    """:func:`cute_ops_jax.dropout_add_layernorm` with a learned scale and bias, as :class:`DropoutAddRMSNorm`."""

    use_bias = True


class GroupNorm(_Layer, nnx.Module):
    """:func:`cute_ops_jax.group_norm` of channels in the last dim, with a learned scale and bias.

    Args:
        num_features: channels.
        num_groups: groups of channels.
        epsilon: added to the variance.
        param_dtype: a float dtype; it need not be that of the input.
        use_bias: learn a bias.
        use_scale: learn a scale.
        bias_init, scale_init: of the parameters.
        rngs: keys for the initializers.
        activation: ``"silu"`` or ``"none"``, in the same pass.
    """

    channels_last = True

    @suggesting
    def __init__(
        self, num_features: int, num_groups: int = 32, *, epsilon: float = 1e-6, param_dtype: Any = jnp.float32,
        use_bias: bool = True, use_scale: bool = True, bias_init: Initializer = zeros, scale_init: Initializer = ones,
        rngs: nnx.Rngs, activation: str = "none",
    ) -> None:  # fmt: skip
        self.num_features, self.groups, self.epsilon = num_features, num_groups, epsilon
        self.activation = activation
        self.scale = _parameter(use_scale, scale_init, num_features, param_dtype, rngs)
        self.bias = _parameter(use_bias, bias_init, num_features, param_dtype, rngs)

    def __call__(self, x: Array) -> Array:
        return self._run(x)


class HeadRMSNorm(_Layer, nnx.Module):
    """:func:`cute_ops_jax.head_rmsnorm` with a learned scale for each head.

    Args:
        num_heads: heads of a token, the dim before the last.
        head_dim: elements of a head.
        epsilon: added to the mean square.
        param_dtype: a float dtype; it need not be that of the input.
        scale_init: of the scales.
        weight_offset: added to the scale.
        rngs: keys for the initializers.
    """

    @suggesting
    def __init__(
        self, num_heads: int, head_dim: int, *, epsilon: float = 1e-6, param_dtype: Any = jnp.float32,
        scale_init: Initializer = ones, weight_offset: float = 0.0, rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        self.epsilon, self.weight_offset = epsilon, weight_offset
        self.scale = _parameter(True, scale_init, (num_heads, head_dim), param_dtype, rngs)

    def __call__(self, x: Array) -> Array:
        return self._run(x)


class HeadLayerNorm(_Layer, nnx.Module):
    """:func:`cute_ops_jax.head_layernorm` with a learned scale and bias for each head.

    Args:
        num_heads: heads of a token, the dim before the last.
        head_dim: elements of a head.
        epsilon: added to the variance.
        param_dtype: a float dtype; it need not be that of the input.
        scale_init, bias_init: of the parameters.
        rngs: keys for the initializers.
    """

    @suggesting
    def __init__(
        self, num_heads: int, head_dim: int, *, epsilon: float = 1e-5, param_dtype: Any = jnp.float32,
        scale_init: Initializer = ones, bias_init: Initializer = zeros, rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        self.epsilon, size = epsilon, (num_heads, head_dim)
        self.scale = _parameter(True, scale_init, size, param_dtype, rngs)
        self.bias = _parameter(True, bias_init, size, param_dtype, rngs)

    def __call__(self, x: Array) -> Array:
        return self._run(x)


class QKNormRope(_Layer, nnx.Module):
    """:func:`cute_ops_jax.qk_norm_rope` with learned scales: ``(q, k, cos, sin) -> (q_out, k_out)``.

    Args:
        head_dim: elements of a head.
        epsilon: added to the mean square.
        param_dtype: a float dtype; it need not be that of the input.
        scale_init: of both scales.
        rngs: keys for the initializers.
    """

    @suggesting
    def __init__(
        self, head_dim: int, *, epsilon: float = 1e-6, param_dtype: Any = jnp.float32, scale_init: Initializer = ones,
        rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        self.head_dim, self.epsilon = head_dim, epsilon
        self.q_scale, self.k_scale = (_parameter(True, scale_init, head_dim, param_dtype, rngs) for _ in range(2))

    def __call__(self, q: Array, k: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        return self._run(q, k, cos, sin)


class CausalConv1d(_Layer, nnx.Module):
    """:func:`cute_ops_jax.causal_conv1d` with learned taps: ``(x[, initial_state]) -> (out, final_state)``.

    Args:
        num_features: channels, the last dim.
        width: taps of each channel: 2, 3 or 4.
        activation: ``"silu"`` or ``"none"``.
        param_dtype: a float dtype; it need not be that of the input.
        use_bias: learn a bias.
        scale_init, bias_init: of the taps and the bias.
        rngs: keys for the initializers.
    """

    @suggesting
    def __init__(
        self, num_features: int, width: int = 4, *, activation: str = "none", param_dtype: Any = jnp.float32,
        use_bias: bool = False, scale_init: Initializer = ones, bias_init: Initializer = zeros, rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        self.num_features, self.width, self.activation = num_features, width, activation
        self.scale = _parameter(True, scale_init, (num_features, width), param_dtype, rngs)
        self.bias = _parameter(use_bias, bias_init, num_features, param_dtype, rngs)

    def __call__(self, x: Array, initial_state: Array | None = None) -> Any:
        return self._run(x, initial_state)


class CausalConv1dChannelsFirst(CausalConv1d):
    """:func:`cute_ops_jax.causal_conv1d_channels_first` with learned taps, as :class:`CausalConv1d`, of channels before
    positions: ``(x[, seq_idx]) -> out``.
    """

    def __call__(self, x: Array, seq_idx: Array | None = None) -> Array:
        return self._run(x, seq_idx)


class Attention(_Layer, nnx.Module):
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
        param_dtype: of the sinks.
        sinks_init: of the sinks.
        rngs: keys for the initializers.
    """

    @suggesting
    def __init__(
        self, sinks: int | None = None, *, scale: float = 0.0, causal: bool = False, left: int = -1, right: int = -1,
        softcap: float = 0.0, deterministic: bool = False, fused: str = "auto",
        score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None,
        param_dtype: Any = jnp.float32, sinks_init: Initializer = zeros, rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        self.scale, self.causal, self.left, self.right, self.softcap = scale, causal, left, right, softcap
        self.deterministic, self.fused, self.score_mod, self.mask_mod = deterministic, fused, score_mod, mask_mod
        self.sinks = _parameter(sinks is not None, sinks_init, sinks or 0, param_dtype, rngs)

    def __call__(
        self, q: Array, k: Array, v: Array, *, captured: Any = (), cu_seqlens_q: Array | None = None,
        cu_seqlens_k: Array | None = None,
    ) -> tuple[Array, Array]:  # fmt: skip
        where = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        return self._run(q, k, v, captured=captured, **where)


class GatedMLP(nnx.Module):
    """``down(activation(gate(x)) * up(x))``, the product of both halves in one kernel.

    Args:
        num_features: size of the last dim, in and out.
        hidden_features: size between.
        activation: ``"silu"`` (SwiGLU), ``"gelu"`` (by the error function) or ``"gelu_tanh"`` (GeGLU).
        use_bias, dtype, param_dtype, kernel_init: of the three ``nnx.Linear``.
        rngs: keys for the initializers.

    Raises:
        ValueError: an unknown activation.
    """

    @suggesting
    def __init__(
        self, num_features: int, hidden_features: int, *, activation: str = "silu", use_bias: bool = False,
        dtype: Any = None, param_dtype: Any = jnp.float32, kernel_init: Initializer | None = None, rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        if activation not in GATED:
            raise ValueError(f"GatedMLP: activation is {activation!r}, expected one of {', '.join(map(repr, GATED))}.")
        given = _given(dtype, param_dtype, kernel_init, rngs)
        linear = partial(nnx.Linear, use_bias=use_bias, **given)
        self.activation = activation
        self.gate = linear(num_features, hidden_features)
        self.up = linear(num_features, hidden_features)
        self.down = linear(hidden_features, num_features)

    def __call__(self, x: Array) -> Array:
        out: Array = self.down(GATED[self.activation](self.gate(x), self.up(x)))
        return out


class Linear(_OfLinear):
    """:func:`cute_ops_jax.linear` with a learned kernel and bias: ``(x, *operands) -> out``.

    Args:
        in_features: size of x's last dim.
        out_features: columns of the product.
        epilogue: the function's: ``"gelu"``, ``"gelu_tanh"``, ``"silu"``, ``"add"`` or a function. It reads the bias,
            None where it is not learned, then what the module is called with.
        use_bias, dtype, param_dtype, kernel_init, bias_init: as ``nnx.Linear`` has them.
        rngs: keys for the initializers.
        options: other options of the function, and attributes of the epilogue.
    """

    @suggesting
    def __init__(
        self, in_features: int, out_features: int, *, epilogue: Epilogue = "bias", use_bias: bool = True,
        dtype: Any = None, param_dtype: Any = jnp.float32, kernel_init: Initializer | None = None,
        bias_init: Initializer = zeros, rngs: nnx.Rngs, **options: Any,
    ) -> None:  # fmt: skip
        check_options(epilogue, options, type(self))
        given = _given(dtype, param_dtype, kernel_init, rngs)
        super().__init__(in_features, out_features, use_bias=use_bias, bias_init=bias_init, **given)
        self.epilogue, self.options = epilogue, tuple(options.items())

    def __call__(self, x: Array, *operands: Array | None) -> Any:
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
    """:func:`cute_ops_jax.rmsnorm_linear` with learned parameters: those of :class:`Linear`, and ``norm_scale``, which
    starts at one: ``(x, *operands) -> out``. Arguments are those of :class:`Linear`, and these.

    Args:
        epsilon: added to the mean square.
        use_scale: learn a scale.
    """

    @suggesting
    def __init__(
        self, in_features: int, out_features: int, *, epsilon: float = 1e-6, use_scale: bool = True,
        param_dtype: Any = jnp.float32, rngs: nnx.Rngs, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, param_dtype=param_dtype, rngs=rngs, **options)
        self.epsilon, self.norm_scale = epsilon, _parameter(use_scale, ones, in_features, param_dtype, rngs)

    @classmethod
    def from_layers(cls, norm: nnx.RMSNorm, layer: nnx.Linear, **options: Any) -> Self:
        """A layer with the parameters of a norm and of the layer that reads it, which they share.

        Raises:
            ValueError: the norm is not of the layer's rows.
        """
        _check_columns("RMSNormLinear", norm, layer.in_features)
        made = cls.from_linear(layer, epsilon=norm.epsilon, use_scale=norm.use_scale, **options)
        made.norm_scale = norm.scale
        return made


class LinearAddRMSNorm(_Product, nnx.Linear):
    """:func:`cute_ops_jax.linear_add_rmsnorm` with learned parameters, ``kernel`` and ``norm_scale``, which starts at
    one: ``(x, residual) -> (out, residual_out)``.

    Args:
        in_features: size of x's last dim.
        out_features: columns of the product, and of the norm.
        epsilon: added to the mean square.
        dtype, param_dtype, kernel_init: as ``nnx.Linear`` has them.
        fused: the function's.
        rngs: keys for the initializers.
    """

    @suggesting
    def __init__(
        self, in_features: int, out_features: int, *, epsilon: float = 1e-6, dtype: Any = None,
        param_dtype: Any = jnp.float32, kernel_init: Initializer | None = None, fused: str = "auto", rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        given = _given(dtype, param_dtype, kernel_init, rngs)
        super().__init__(in_features, out_features, use_bias=False, **given)
        self.norm_scale = _parameter(True, ones, out_features, param_dtype, rngs)
        self.epsilon, self.fused = epsilon, fused

    @classmethod
    def from_layers(cls, layer: nnx.Linear, norm: nnx.RMSNorm, **options: Any) -> Self:
        """A layer with the parameters of a layer without bias and of the norm behind it, which they share.

        Raises:
            ValueError: the norm has no scale or is not of the layer's outputs, or the layer has a bias.
        """
        _check_columns("LinearAddRMSNorm", norm, layer.out_features)
        if layer.use_bias or not norm.use_scale:
            raise ValueError("LinearAddRMSNorm: expected a layer without bias and a norm with a scale.")
        made = cls._like(layer, layer.in_features, layer.out_features, **{"epsilon": norm.epsilon, **options})
        made.kernel, made.norm_scale = layer.kernel, norm.scale
        return made

    def __call__(self, x: Array, residual: Array) -> tuple[Array, Array]:
        return self._run(x, residual)


class QKVRope(_Product, nnx.Linear):
    """:func:`cute_ops_jax.qkv_rope` with a learned kernel, whose columns are those of queries, of keys and of as many
    values: ``(x, cos, sin) -> out``.

    Args:
        in_features: size of x's last dim.
        query_heads: how many heads queries have.
        key_heads: how many heads keys have, and values.
        head_dim: columns of a head, 64 or 128.
        fused: the function's.
        options: of ``nnx.Linear``.
    """

    @suggesting
    def __init__(
        self, in_features: int, query_heads: int, key_heads: int, head_dim: int = 128, *, fused: str = "auto",
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, (query_heads + 2 * key_heads) * head_dim, use_bias=False, **options)
        self.heads, self.fused = query_heads + key_heads, fused

    def __call__(self, x: Array, cos: Array, sin: Array) -> Array:
        return self._run(x, cos, sin)


class GatedLinear(_Product, nnx.Linear):
    """:func:`cute_ops_jax.gated_linear` with a learned kernel, ``[gate | up]``, of ``2 * out_features`` columns.

    Args:
        in_features: size of x's last dim.
        out_features: size of the output's last dim.
        activation: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``.
        fused: the function's.
        halves: the kernel is ``[in_features, 2, out_features]``, which devices share by its last dim.
        options: of ``nnx.Linear``.
    """

    @suggesting
    def __init__(
        self, in_features: int, out_features: int, *, activation: str = "silu", fused: str = "auto",
        halves: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        if halves:
            options["kernel_init"] = _in_halves(options.get("kernel_init", nnx.initializers.lecun_normal()))
        super().__init__(in_features, 2 * out_features, use_bias=False, **options)
        self.activation, self.fused, self.halves = activation, fused, halves

    @classmethod
    def from_linear(cls, gate: nnx.Linear, up: nnx.Linear, **options: Any) -> Self:
        """The layer of two without biases, whose kernels are copied side by side."""
        made = cls._like(gate, gate.in_features, gate.out_features, **options)
        side_by_side = jnp.stack if made.halves else jnp.concatenate
        made.kernel = nnx.Param(side_by_side([gate.kernel[...], up.kernel[...]], axis=1))
        return made

    def __call__(self, x: Array) -> Array:
        return self._run(x)


def _in_halves(init: Initializer) -> Initializer:
    """An initializer of the same numbers, with halves as a dim."""
    return lambda key, shape, dtype: init(key, shape, dtype).reshape(shape[0], 2, shape[1] // 2)


def _check_columns(name: str, norm: nnx.RMSNorm, columns: int) -> None:
    if norm.num_features != columns:
        raise ValueError(f"{name}: norm has {norm.num_features} columns, expected {columns}.")


class PackedGatedMLP(_Product, nnx.Module):
    """:func:`cute_ops_jax.gated_mlp` with learned kernels: ``gate_up``, packed, and ``down``.

    Args:
        num_features: size of the last dim, in and out.
        hidden_features: size between.
        activation: ``"silu"`` (SwiGLU), ``"gelu"`` (by the error function) or ``"gelu_tanh"`` (GeGLU).
        dtype, param_dtype, kernel_init: of both ``nnx.Linear``.
        fused, save: the function's.
        halves: the first kernel is ``[num_features, 2, hidden_features]``. Devices that share hidden features then
            gather nothing.
        rngs: keys for the initializers.
    """

    @suggesting
    def __init__(
        self, num_features: int, hidden_features: int, *, activation: str = "silu", dtype: Any = None,
        param_dtype: Any = jnp.float32, kernel_init: Initializer | None = None, fused: str = "auto", save: str = "pre",
        halves: bool = False, rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        given = _given(dtype, param_dtype, kernel_init, rngs)
        self.activation, self.fused, self.save = activation, fused, save
        self.gate_up = GatedLinear(
            num_features, hidden_features, activation=activation, fused=fused, halves=halves, **given
        )
        self.down = nnx.Linear(hidden_features, num_features, use_bias=False, **given)

    @classmethod
    def from_linear(cls, gate: nnx.Linear, up: nnx.Linear, down: nnx.Linear, **options: Any) -> Self:
        """The MLP of three layers without biases: the first two kernels are copied side by side, the last is shared."""
        made = cls._like(gate, gate.in_features, gate.out_features, **options)
        made.gate_up.kernel = GatedLinear.from_linear(gate, up, halves=made.gate_up.halves).kernel
        made.down.kernel = down.kernel
        return made

    @property
    def halves(self) -> bool:
        return self.gate_up.halves

    def __call__(self, x: Array) -> Array:
        return self._run(x)


class MLP(_Product, nnx.Module):
    """:func:`cute_ops_jax.mlp` with learned kernels and biases: those of ``up`` and ``down``.

    Args:
        num_features: size of the last dim, in and out.
        hidden_features: size between.
        activation: the function's.
        use_bias, dtype, param_dtype, kernel_init, bias_init: of both ``nnx.Linear``.
        fused, save: the function's.
        rngs: keys for the initializers.
    """

    @suggesting
    def __init__(
        self, num_features: int, hidden_features: int, *, activation: str = "gelu", use_bias: bool = True,
        dtype: Any = None, param_dtype: Any = jnp.float32, kernel_init: Initializer | None = None,
        bias_init: Initializer = zeros, fused: str = "auto", save: str = "pre", rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        given = _given(dtype, param_dtype, kernel_init, rngs)
        linear = partial(nnx.Linear, use_bias=use_bias, bias_init=bias_init, **given)
        self.activation, self.fused, self.save = activation, fused, save
        self.up, self.down = linear(num_features, hidden_features), linear(hidden_features, num_features)

    @classmethod
    def from_linear(cls, up: nnx.Linear, down: nnx.Linear, **options: Any) -> Self:
        """The MLP of two layers, whose parameters it shares; either may have no bias."""
        made = cls._like(up, up.in_features, up.out_features, **options)
        made.up, made.down = up, down
        return made

    def __call__(self, x: Array) -> Array:
        return self._run(x)


class CrossEntropy(layered.CrossEntropy, nnx.Module):
    """:func:`cute_ops_jax.cross_entropy` as a module: ``(logits, target) -> loss``.

    Args:
        ignore_index, label_smoothing, z_loss, classes, softcap, logit_scale, reduction, inplace_backward: the
            function's.
    """


class CrossEntropyMetrics(layered.CrossEntropyMetrics, nnx.Module):
    """:func:`cute_ops_jax.cross_entropy_metrics` as a module: ``(logits, target, weight)`` to what the
    function returns.

    Args:
        ignore_index, label_smoothing, z_loss, softcap, logit_scale, reduction, token_scaling, inplace_backward: the
            function's.
    """


class CrossEntropyOfSlice(layered.CrossEntropyOfSlice, nnx.Module):
    """:func:`cute_ops_jax.cross_entropy_of_slice` as a module: ``(logits, target, lse_partial)`` to what the
    function returns.

    Args:
        ignore_index, label_smoothing, z_loss, classes, softcap, logit_scale, inplace_backward: the function's.
    """


class SoftCrossEntropy(layered.SoftCrossEntropy, nnx.Module):
    """:func:`cute_ops_jax.soft_cross_entropy` as a module: ``(logits, target) -> loss``.

    Args:
        label_smoothing, z_loss, softcap, logit_scale, reduction: the function's.
    """


class Divergence(layered.Divergence, nnx.Module):
    """:func:`cute_ops_jax.divergence` as a module: ``(student, teacher) -> loss``.

    Args:
        beta, temperature: the function's.
    """


class _LinearLoss(layered.Loss, _OfLinear):
    """A linear layer and its loss; the function takes the kernel as a weight, ``[classes, num_features]``."""

    def _read(self, name: str) -> Any:
        found = super()._read(name)
        return found.T if name == "weight" else found

    def _run(self, *given: Any, **options: Any) -> Any:
        return Layered._run(self, *given, **options)


class LinearCrossEntropy(_LinearLoss):
    """:func:`cute_ops_jax.linear_cross_entropy` with a learned kernel: ``(hidden, target) -> loss``.

    Args:
        num_features: size of the hidden states' last dim.
        classes: number of classes.
        use_bias: learn a bias.
        ignore_index, label_smoothing, z_loss, reduction, softcap, logit_scale: the function's.
        dtype, param_dtype, kernel_init, bias_init: as ``nnx.Linear`` has them.
        rngs: keys for the initializers.
    """

    @suggesting
    def __init__(
        self, num_features: int, classes: int, *, use_bias: bool = False, ignore_index: int = -100,
        label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean", softcap: float = 0.0,
        logit_scale: float = 1.0, dtype: Any = None, param_dtype: Any = jnp.float32,
        kernel_init: Initializer | None = None, bias_init: Initializer = zeros, rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        given = _given(dtype, param_dtype, kernel_init, rngs)
        super().__init__(num_features, classes, use_bias=use_bias, bias_init=bias_init, **given)
        self._keep(locals())

    def __call__(self, hidden: Array, target: Array) -> Array:
        return self._run(hidden, target)


class LinearCrossEntropyMetrics(_LinearLoss):
    """:func:`cute_ops_jax.linear_cross_entropy_metrics` with a learned kernel: ``(hidden, target, class_weight)``
    to what the function returns.

    Args:
        num_features: size of the hidden states' last dim.
        classes: number of classes.
        use_bias: learn a bias.
        ignore_index, label_smoothing, z_loss, softcap, logit_scale, accum_dtype, chunk_rows, reduction,
            token_scaling: the function's.
        dtype, param_dtype, kernel_init, bias_init: as ``nnx.Linear`` has them.
        rngs: keys for the initializers.
    """

    @suggesting
    def __init__(
        self, num_features: int, classes: int, *, use_bias: bool = False, ignore_index: int = -100,
        label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0, logit_scale: float = 1.0,
        accum_dtype: str = "float32", chunk_rows: int = 0, reduction: str = "mean", token_scaling: bool = False,
        dtype: Any = None, param_dtype: Any = jnp.float32, kernel_init: Initializer | None = None,
        bias_init: Initializer = zeros, rngs: nnx.Rngs,
    ) -> None:  # fmt: skip
        given = _given(dtype, param_dtype, kernel_init, rngs)
        super().__init__(num_features, classes, use_bias=use_bias, bias_init=bias_init, **given)
        self._keep(locals())

    def __call__(
        self, hidden: Array, target: Array, class_weight: Array | None = None
    ) -> tuple[Array, Array, Array, Array]:
        return self._run(hidden, target, class_weight)


for _name, _row in LAYERS.items():
    globals()["PackedGatedMLP" if _name == "GatedMLP" else _name].layer = _row
if not TYPE_CHECKING:  # for which each name would exist

    def __getattr__(name: str) -> Any:
        own = [each for each, value in globals().items() if getattr(value, "__module__", "") == __name__]
        raise no_attribute(__name__, name, own)
