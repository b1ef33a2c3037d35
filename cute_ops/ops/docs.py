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


APPROXIMATE = "approximate: ``tanh``, or ``none`` for the error function, as :func:`gelu`."
PAIR = f"gate: {ROWS}.\n        up: ``T[*m n]``."  # of equal shapes
GLU = "Shazeer, GLU Variants Improve Transformer, 2020."


def elementwise(what: str, formula: str, args: str, source: str, *, other_dtypes: str = "", wrong: str = "") -> str:
    """The docstring of an op whose outputs follow from the same elements of its inputs.

    ``other_dtypes`` adds to what raises TypeError, ``wrong`` replaces what raises ValueError.
    """
    return f"""{what}

    ``out = {formula}``

    Args:
        {args}

    Returns:
        ``T[*m n]``, compact. Computed in float32, rounded once.

    Raises:
        TypeError: a dtype that is not listed{other_dtypes}.
        ValueError: {wrong or "a last dim that is not contiguous"}.

    Source: {source}
    """
