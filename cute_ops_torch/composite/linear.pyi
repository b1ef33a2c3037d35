"""Linear layers: :mod:`cute_ops.composite.products`. Made by ``python -m cute_ops_torch.tools.stubs``."""

from typing import Any

from torch import Tensor

from cute_ops.ops.gemm.by_call import Epilogue

def linear(
    x: Tensor,
    weight: Tensor,
    *operands: Tensor | None,
    epilogue: Epilogue | None = None,
    fused: str = "auto",
    packed: bool = False,
    transposed: bool = False,
    halves: bool = False,
    save: str = "pre",
    **attrs: Any,
) -> Any:
    """A product and what happens to it before it is stored: ``out = epilogue(x @ weight.T, *operands)``.

    Its op's name, ``linear_<function>_<digest>``, is the same in every process that has made this call.

    Args:
        x: ``T[*m k]``; bfloat16, float16 or float32; any leading shape.
        weight: ``T[n k]``, as in PyTorch; ``T[k n]`` with ``transposed``; twice as many, gate and up, with ``packed``. With
            leading dims, ``T[*b n k]``, it is one matrix for each of x, ``T[*b m k]``.
        operands: what the epilogue reads besides the product, each float32, bfloat16 or float16. They broadcast against
            ``[*m n]`` as in NumPy: ``[n]`` is a row that all rows share, ``[*m 1]`` a number per row, ``[*m n]`` a tile,
            ``[]`` a scalar; with ``packed`` also ``[2n]`` and ``[*m 2n]``. None stands for one that is left out. One that
            has some of the leading dims alone is copied to all of them, and one whose last dim has a stride other than 1 is
            copied, too.
        epilogue: ``epilogue(xp, acc, *operands, **attrs)`` in array-API style, which returns one value or several, each
            rounded once. ``acc`` is the product in float32. A function is traced once for each combination of operands'
            shapes, attributes and numbers that it refers to: these are constants of its kernel. Or ``"gelu"``,
            ``"gelu_tanh"``, ``"silu"``, ``"bias"``, which read a bias if one is given; ``"add"``, which reads a bias or
            None and a residual; or an expression's text.
        fused: whether one kernel computes all of it: ``"always"``; ``"never"``, but the framework's product and a pass over
            its output; or ``"auto"``, a kernel where it was measured to be at least as fast. float32 is never fused, and
            neither are an x and a weight that our kernel cannot read where they lie, which ``"always"`` refuses.
        packed: the weight is ``[gate | up]``: the epilogue reads ``acc[..., :n]`` and ``acc[..., n:]`` with
            ``n = acc.shape[-1] // 2``.
        transposed: the weight is ``[k, n]``, as in JAX.
        halves: the packed weight is ``[2, n, k]``, or ``[k, 2, n]``, the same memory. Devices that share n then each have
            rows of both halves, so nothing is gathered.
        save: what a call that is differentiated keeps for its gradient where that reads the product: ``"pre"``, the product
            before the epilogue; or ``"none"``, and the backward computes it again.
        attrs: of the epilogue; numbers, each combination of which is a kernel of its own.

    Returns:
        ``T[*m n]``, of reductions of rows ``float32[*m 1]``, or a tuple where the epilogue returns several values. One that
        ``xp.astype`` gives has that dtype.

    Raises:
        TraceError: the epilogue does what an expression cannot say; what to write instead.
        TypeError: a dtype that is not listed, operands that the epilogue does not have.
        ValueError: shapes that do not fit together.
    """

def gated_linear(
    x: Tensor,
    weight: Tensor,
    activation: str = "silu",
    fused: str = "auto",
    *,
    transposed: bool = False,
    halves: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``out = activation(x @ gate.T) * (x @ up.T)`` with ``gate, up = weight[:n], weight[n:]``.

    Args:
        x: ``T[*m k]``; bfloat16, float16 or float32; any leading shape.
        weight: ``T[2n k]``, ``[gate | up]``; ``T[k 2n]`` with ``transposed``. With leading dims it is one matrix for each
            of x, ``T[*b m k]``.
        activation: ``"silu"`` (SwiGLU), ``"gelu"`` (by the error function) or ``"gelu_tanh"`` (GeGLU).
        fused: as :func:`linear` has it.
        transposed: the weight is ``[k, 2n]``, as in JAX.
        halves: the weight is ``[2, n, k]``, or ``[k, 2, n]``, the same memory. Devices that share n then each have rows of
            both halves, so nothing is gathered.

    Returns:
        ``T[*m n]``, compact. Summed up in float32, rounded once: neither half is stored.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit together, another activation.
    """
