"""Configs of the kernels that quantise rows."""

from __future__ import annotations

from typing import Literal

from cute_ops.kernels.lib.row_config import RowConfig


class QuantizeConfig(RowConfig):
    """Rows are held in registers (``one_pass``) or in shared memory (``smem``) until their scale is known, or are read
    again (``two_pass``). Those of a CTA that are short and start anywhere go through shared memory together
    (``blocks``).

    Attributes:
        unroll: row groups of a CTA in one pass.
        delay_weight_load: the weight is loaded after a row's sum is known.
    """

    form: Literal["one_pass", "blocks", "smem", "two_pass"]
    unroll: int = 1
    delay_weight_load: bool = False
