"""Layers with learned parameters, each declared once: the function that it calls and what it learns.

Modules of torch, flax and equinox follow these rows. Each framework has its own constructors and names: what rows call
``weight`` is a ``kernel`` or a ``scale`` in flax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cute_ops.errors import suggesting
from cute_ops.ops.gemm.named import gelu_epilogue


class Learned(NamedTuple):
    """A parameter.

    Attributes:
        dims: its shape, by the names of the layer's sizes.
        start: what all of its elements start as, less the layer's ``weight_offset`` where that is no zero; None: as in
            the framework's own linear layer.
    """

    dims: str
    start: float | None = None

    def value(self, weight_offset: float) -> float:
        """The number that all elements start as."""
        return self.start - weight_offset if self.start else 0.0


class Layer(NamedTuple):
    """A layer, whatever the framework of its modules.

    Attributes:
        function: the adapters' function that it calls.
        arguments: of the function, by position. The layer holds those in ``learned``, a call gives the others; what a
            call gives beyond them are operands of the layer's epilogue.
        learned: parameters by their place; ``up.weight`` is the weight of a layer inside.
        options: attributes of the layer that the function takes by name.
    """

    function: str
    arguments: tuple[str, ...]
    learned: Mapping[str, Learned]
    options: tuple[str, ...]


NORM = {"weight": Learned("n", 1.0), "bias": Learned("n", 0.0)}
TAPS = {"weight": Learned("n w", 1.0), "bias": Learned("n", 0.0)}
MATRIX, BIAS = Learned("out_features in_features"), Learned("out_features")
LINEAR = {"weight": MATRIX, "bias": BIAS}
UP = {"up.weight": Learned("hidden_features in_features"), "up.bias": Learned("hidden_features")}
DOWN = {"down.weight": Learned("in_features hidden_features"), "down.bias": Learned("in_features")}


def _layer(function: str, arguments: str, learned: Mapping[str, Learned], options: str) -> Layer:
    return Layer(function, tuple(arguments.split()), learned, tuple(options.split()))


LAYERS = {
    "RMSNorm": _layer("rmsnorm", "x weight bias", NORM, "eps weight_offset"),
    "AddRMSNorm": _layer("add_rmsnorm", "x residual weight bias", NORM, "eps weight_offset"),
    "LayerNorm": _layer("layernorm", "x weight bias", NORM, "eps"),
    "AddLayerNorm": _layer("add_layernorm", "x residual weight bias", NORM, "eps"),
    "DropoutAddRMSNorm": _layer(
        "dropout_add_rmsnorm", "x residual weight seed", {"weight": Learned("n", 1.0)}, "p eps",
    ),
    "DropoutAddLayerNorm": _layer("dropout_add_layernorm", "x residual weight bias seed", NORM, "p eps"),
    "GroupNorm": _layer(
        "group_norm", "x weight bias", {"weight": Learned("channels", 1.0), "bias": Learned("channels", 0.0)},
        "groups eps channels_last activation",
    ),
    "HeadRMSNorm": _layer("head_rmsnorm", "x weight", {"weight": Learned("heads n", 1.0)}, "eps weight_offset"),
    "HeadLayerNorm": _layer(
        "head_layernorm", "x weight bias", {"weight": Learned("heads n", 1.0), "bias": Learned("heads n", 0.0)}, "eps"
    ),
    "QKNormRope": _layer(
        "qk_norm_rope", "q k q_weight k_weight cos sin",
        {"q_weight": Learned("head_dim", 1.0), "k_weight": Learned("head_dim", 1.0)}, "eps",
    ),
    "CausalConv1d": _layer("causal_conv1d", "x weight bias initial_state", TAPS, "activation"),
    "CausalConv1dChannelsFirst": _layer("causal_conv1d_channels_first", "x weight bias seq_idx", TAPS, "activation"),
    "Linear": _layer("linear", "x weight bias", LINEAR, "epilogue"),
    "RMSNormLinear": _layer(
        "rmsnorm_linear", "x norm_weight weight bias", {"norm_weight": Learned("in_features", 1.0), **LINEAR},
        "eps epilogue",
    ),
    "LinearAddRMSNorm": _layer(
        "linear_add_rmsnorm", "x weight residual norm_weight",
        {"weight": MATRIX, "norm_weight": Learned("out_features", 1.0)}, "eps fused",
    ),
    "QKVRope": _layer("qkv_rope", "x weight cos sin", {"weight": MATRIX}, "heads fused"),
    "GatedLinear": _layer(
        "gated_linear", "x weight", {"weight": Learned("2*out_features in_features")}, "activation fused halves"
    ),
    "GatedMLP": _layer(
        "gated_mlp", "x gate_up.weight down.weight",
        {"gate_up.weight": Learned("2*hidden_features in_features"), "down.weight": DOWN["down.weight"]},
        "activation fused save halves",
    ),
    "Attention": _layer(
        "attention", "q k v sinks", {"sinks": Learned("heads", 0.0)},
        "scale causal left right softcap deterministic fused score_mod mask_mod",
    ),
    "MLP": _layer("mlp", "x up.weight up.bias down.weight down.bias", {**UP, **DOWN}, "activation fused save"),
    "CrossEntropy": _layer(
        "cross_entropy", "logits target", {},
        "ignore_index label_smoothing z_loss classes softcap logit_scale reduction inplace_backward",
    ),
    "CrossEntropyMetrics": _layer(
        "cross_entropy_metrics", "logits target weight", {},
        "ignore_index label_smoothing z_loss softcap logit_scale reduction token_scaling inplace_backward",
    ),
    "CrossEntropyOfSlice": _layer(
        "cross_entropy_of_slice", "logits target lse_partial", {},
        "ignore_index label_smoothing z_loss classes softcap logit_scale inplace_backward",
    ),
    "SoftCrossEntropy": _layer(
        "soft_cross_entropy", "logits target", {}, "label_smoothing z_loss softcap logit_scale reduction"
    ),
    "Divergence": _layer("divergence", "student teacher", {}, "beta temperature"),
    "LinearCrossEntropy": _layer(
        "linear_cross_entropy", "hidden weight target bias", LINEAR,
        "ignore_index label_smoothing z_loss reduction softcap logit_scale",
    ),
    "LinearCrossEntropyMetrics": _layer(
        "linear_cross_entropy_metrics", "hidden weight target bias class_weight", LINEAR,
        "ignore_index label_smoothing z_loss softcap logit_scale accum_dtype chunk_rows reduction token_scaling",
    ),
}  # fmt: skip


# Constructors that precede a framework's ``Linear`` among the bases of a class.


class GELU:
    """The constructor of a linear layer and GELU."""

    @suggesting
    def __init__(self, *args: Any, approximate: str = "none", **options: Any) -> None:
        super().__init__(*args, epilogue=gelu_epilogue(approximate), **options)  # type: ignore[call-arg]


class SiLU:
    """The constructor of a linear layer and SiLU."""

    @suggesting
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, epilogue="silu", **options)  # type: ignore[call-arg]


class Add:
    """The constructor of a linear layer whose output is added to a residual."""

    @suggesting
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, epilogue="add", **options)  # type: ignore[call-arg]
