"""Texts that the docstrings of several ops share."""

from __future__ import annotations

ROWS = "``T[*m n]``; float32, float16 or bfloat16; any leading shape, any row stride"
X = f"x: {ROWS}."
RESIDUAL = "residual: ``R[*m n]``, T or a wider float (a float32 residual stream)."
BIAS = "bias: ``B[n]``, a float dtype of its own; zeros where None."
# Of a norm without a mean.
RMS = f"""weight: ``W[n]``, a float dtype of its own; ones where None (and then no offset).
        {BIAS}
        eps: added to the mean square; a compile-time constant.
        weight_offset: added to the weight: 1.0 is Gemma's; a compile-time constant."""
