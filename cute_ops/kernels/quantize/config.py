"""What the kernels that quantise rows are configured with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cute_ops.kernels.lib.row_config import RowConfig


@dataclass(frozen=True)
class QuantizeConfig(RowConfig):
    """Rows wait in registers (``one_pass``) or in shared memory (``smem``) for their scale, or are read again.

    Attributes:
        unroll: row groups of a CTA in one pass.
        delay_weight_load: the weight is loaded when a row's sum is known.
    """

    form: Literal["one_pass", "smem", "two_pass"]
    unroll: int = 1
    delay_weight_load: bool = False
