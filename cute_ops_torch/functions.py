"""Register every declaration of ``cute_ops.ops`` as an op of torch, and make its function when that is first used.

Parts of other functions become ops only.
"""

from typing import Any

from cute_ops.composite.models import MODELS
from cute_ops.errors import no_attribute
from cute_ops.ops import ATTENTION, OPS, PARTS, PRODUCTS
from cute_ops_torch.registry import define

_DEFINED = {op.name: define(op) for op in (*OPS, *PRODUCTS, *ATTENTION, *MODELS)}
__all__ = list(_DEFINED)

for _part in PARTS:
    define(_part)


def __getattr__(name: str) -> Any:
    if name not in _DEFINED:
        raise no_attribute(__name__, name, __all__)
    function = globals()[name] = _DEFINED[name].function
    return function


def __dir__() -> list[str]:
    return sorted(__all__)
