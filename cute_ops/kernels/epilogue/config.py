"""What kernels of expressions are configured with."""

from __future__ import annotations

from dataclasses import dataclass

from cute_ops.kernels.rowwise.config import PointwiseConfig


@dataclass(frozen=True)
class FusedConfig(PointwiseConfig):
    """``unroll`` vectors of each of ``threads`` threads, and what they compute.

    Attributes:
        expression: the expression's text.
        reads: the tensors that are its operands, divided by blanks.
        writes: the tensors that its outputs are of: ``dx[:n] dx[n:] dbias``.
        kinds: what these are, a letter each as in the expression's text: ``ttr``.
    """

    expression: str
    reads: str
    writes: str
    kinds: str
