"""Functions and modules of other libraries, with their names and arguments, which run our ops.

>>> from cute_ops_torch.compat.flash_attn import flash_attn_func  # instead of: from flash_attn import flash_attn_func

``liger`` has names of ``liger_kernel.transformers``, ``liger_chunked_loss`` those of its losses on a head, ``quack`` of
quack, ``flash_attn`` of FlashAttention 2, ``flash_attn_cute`` of FlashAttention 4 (``flash_attn.cute``),
``causal_conv1d`` of causal-conv1d. Their code is neither needed nor in here. An argument whose value ours do not
compute is refused by name; a name that is missing is an AttributeError that lists those that are there.
"""

from importlib import import_module
from typing import Any

from cute_ops.errors import no_attribute

__all__ = ["causal_conv1d", "flash_attn", "flash_attn_cute", "liger", "liger_chunked_loss", "quack"]


def __getattr__(name: str) -> Any:
    """Modules are imported when they are first used."""
    if name not in __all__:
        raise no_attribute(__name__, name, __all__, f"; there are {', '.join(__all__)}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted(__all__)
