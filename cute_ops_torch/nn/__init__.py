"""Modules over the functions: one for every op on rows, and for those of models and their trainers."""

from typing import Any

from cute_ops.composite.layers import LAYERS
from cute_ops.composite.models import MODELS
from cute_ops.errors import no_attribute
from cute_ops.ops import OPS
from cute_ops_torch.nn.attention import Attention as Attention
from cute_ops_torch.nn.from_op import class_name as class_name
from cute_ops_torch.nn.from_op import module as module
from cute_ops_torch.nn.linear import MLP as MLP
from cute_ops_torch.nn.linear import GatedLinear as GatedLinear
from cute_ops_torch.nn.linear import GatedMLP as GatedMLP
from cute_ops_torch.nn.linear import Linear as Linear
from cute_ops_torch.nn.linear import LinearAdd as LinearAdd
from cute_ops_torch.nn.linear import LinearAddRMSNorm as LinearAddRMSNorm
from cute_ops_torch.nn.linear import LinearCrossEntropy as LinearCrossEntropy
from cute_ops_torch.nn.linear import LinearGELU as LinearGELU
from cute_ops_torch.nn.linear import LinearSiLU as LinearSiLU
from cute_ops_torch.nn.linear import QKVRoPE as QKVRoPE
from cute_ops_torch.nn.linear import RMSNormLinear as RMSNormLinear
from cute_ops_torch.nn.norm import AddRMSNorm as AddRMSNorm
from cute_ops_torch.nn.norm import DropoutAddLayerNorm as DropoutAddLayerNorm
from cute_ops_torch.nn.norm import DropoutAddRMSNorm as DropoutAddRMSNorm
from cute_ops_torch.nn.norm import GroupNorm as GroupNorm
from cute_ops_torch.nn.norm import LayerNorm as LayerNorm
from cute_ops_torch.nn.norm import RMSNorm as RMSNorm

# Ops on the tokens of all sequences, which are no layers; and arguments of losses that are not learned.
_ON_TOKENS = {"permute_tokens", "unpermute_tokens", "causal_conv1d_packed", "causal_conv1d_states", "rope_at"}
_GIVEN = {"CrossEntropyMetrics": ("weight",), "LinearCrossEntropyMetrics": ("class_weight",)}
# An op without a gradient is a layer where it is for inference; a step of an optimizer is none.
_LAYERS = (*OPS, *(op for op in MODELS if op.name not in _ON_TOKENS))
_OPS = {class_name(op): op for op in _LAYERS if op.grad or op.inference_only}
_WRITTEN = {
    "AddRMSNorm", "Attention", "DropoutAddLayerNorm", "DropoutAddRMSNorm", "GatedLinear", "GatedMLP", "GroupNorm",
    "LayerNorm", "Linear", "LinearAdd", "LinearAddRMSNorm", "LinearCrossEntropy", "LinearGELU", "LinearSiLU", "MLP",
    "QKVRoPE", "RMSNorm", "RMSNormLinear",
}  # fmt: skip
_ROWS = {name.replace("Rope", "RoPE"): row for name, row in LAYERS.items()}
for _name, _row in _ROWS.items():
    if (_class := globals().get(_name)) is not None:  # others are made of their op
        _class.layer = _row
__all__ = ["module", *sorted({*_OPS, *_WRITTEN})]


def __getattr__(name: str) -> Any:
    """Classes of other ops are made when they are first used."""
    if name not in _OPS:
        raise no_attribute(__name__, name, __all__)
    made: Any = module(_OPS[name], given=_GIVEN.get(name, ()))
    globals()[name], made.layer = made, _ROWS.get(name)
    return made


def __dir__() -> list[str]:
    return sorted(__all__)
