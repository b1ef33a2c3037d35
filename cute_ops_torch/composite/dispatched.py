"""The op ``torch.ops.cute.linear_cross_entropy``, which calls the Python function, and the ops that functions call.

Programs find them in graphs and packages that other processes wrote, before they import the functions.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from cute_ops.composite import embedding, linear_cross_entropy
from cute_ops_torch.registry import define

for _op in (linear_cross_entropy.linear_cross_entropy_rows, linear_cross_entropy.linear_cross_entropy_total):
    define(_op)
define(embedding.embedding)
_library = torch.library.Library("cute", "FRAGMENT")
_library.define(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, int ignore_index=-100, "
    "float label_smoothing=0.0, float z_loss=0.0, str reduction='mean', ScalarType? accum_dtype=None, "
    "float softcap=0.0, float logit_scale=1.0, int? chunk_rows=None) -> Tensor"
)


def _linear_cross_entropy(*given: Any) -> Any:
    names = [argument.name for argument in torch.ops.cute.linear_cross_entropy.default._schema.arguments]
    module = import_module("cute_ops_torch.composite.linear_cross_entropy")  # start-up time: few programs call it
    return module.linear_cross_entropy(**dict(zip(names, given, strict=False)))


_library.impl("linear_cross_entropy", _linear_cross_entropy, "CompositeImplicitAutograd")
