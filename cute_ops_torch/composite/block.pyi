"""Parts of a transformer's block: :mod:`cute_ops.composite.block`. Made by ``python -m cute_ops_torch.tools.stubs``."""

from typing import Any

from torch import Tensor

from cute_ops.ops.gemm.by_call import Epilogue

def linear_add_rmsnorm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-06,
    *,
    fused: str = "auto",
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """The last layer of a transformer's block, and the norm that comes next.

    ``residual_out = x @ weight.T + residual``; ``out = rmsnorm(residual_out, norm_weight, eps)``

    Args:
        x: ``T[*m k]``; bfloat16, float16 or float32; any leading shape.
        weight: ``T[n k]``; ``T[k n]`` with ``transposed``.
        residual: ``T[*m n]``.
        norm_weight: ``W[n]``, a float dtype of its own.
        fused: ``"always"`` adds the residual and the squares in the product's epilogue, for bfloat16 and float16, and so
            does ``"auto"`` on Hopper from 2^21 elements of the output on: on an H200 that was faster by 1% at k = 14336, 4%
            at 8192 and 10% at 2048. ``"never"``, and ``"auto"`` elsewhere, run a product, as in :func:`linear`, and
            :func:`add_rmsnorm`.
        transposed: the weight is ``[k, n]``, as in JAX.

    Returns:
        ``(out, residual_out)``, both ``T[*m n]``. Sums are in float32, in a fixed order.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit together.
    """

def rmsnorm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    weight: Tensor,
    *operands: Tensor | None,
    eps: float = 1e-06,
    epilogue: Epilogue = "bias",
    fused: str = "auto",
    packed: bool = False,
    transposed: bool = False,
    halves: bool = False,
    save: str = "pre",
    **attrs: Any,
) -> Any:
    """The norm before a linear layer, the layer, and what happens to its product before that is stored.

    ``out = epilogue(rmsnorm(x, norm_weight, eps=eps) @ weight.T, *operands)``

    Args:
        x: ``T[*m k]``; bfloat16, float16 or float32; any leading shape.
        norm_weight: ``W[k]``, a float dtype of its own, or None.
        weight: ``T[n k]``; ``T[k n]`` with ``transposed``; twice as many, gate and up, with ``packed``. With leading dims,
            ``T[*b n k]``, it is one matrix for each of x, ``T[*b m k]``; all of them have the same ``norm_weight``.
        operands: what the epilogue reads besides the product, as in :func:`linear`; by default a bias ``[n]``, or None.
        eps: what is added to the mean of squares.
        epilogue: as in :func:`linear`; ``"bias"`` for no activation.
        fused, packed, transposed, halves, save, attrs: as in :func:`linear`.

    Returns:
        ``T[*m n]``, or what the epilogue returns. Sums are in float32, in a fixed order. Devices may share n; each has
        whole rows of x, since they are normalised.

    Raises:
        TraceError: the epilogue does what an expression cannot say.
        TypeError: a dtype that is not listed, operands that the epilogue does not have.
        ValueError: shapes that do not fit together.
        NotImplementedError: a batch of weights with an epilogue that reduces rows or looks at groups of columns.
    """

def qkv_rope(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    *,
    fused: str = "auto",
    transposed: bool = False,
) -> Tensor:
    """The projection to queries, keys and values, and the rotary embedding of queries and keys.

    ``out = x @ weight.T``, whose first ``heads`` heads are rotated as by :func:`rope`.

    Args:
        x: ``T[*m k]``; bfloat16, float16 or float32; any leading shape.
        weight: ``T[n k]``: rows of queries, then of keys, then of as many values; ``T[k n]`` with ``transposed``.
        cos, sin: ``[*#m r]``, with r half of a head's 64 or 128 columns; any float dtype; leading dims that broadcast.
        heads: how many heads are rotated: those of queries and keys, or all where ``weight`` has no others.
        fused: ``"auto"`` and ``"always"`` rotate in the product's epilogue, ``"never"`` after the framework's product.
        transposed: the weight is ``[k, n]``, as in JAX.

    Returns:
        ``T[*m n]``. ``cos`` and ``sin`` have no gradient.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, heads of another size, more or fewer of them than queries and keys can be.
    """

def gated_mlp(
    x: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    activation: str = "silu",
    *,
    fused: str = "auto",
    save: str = "pre",
    transposed: bool = False,
    halves: bool = False,
) -> Tensor:
    """``out = (activation(x @ gate.T) * (x @ up.T)) @ w_down.T``, where gate and up are the halves of w_gate_up.

    Args:
        x: ``T[*m k]``; bfloat16, float16 or float32; any leading shape.
        w_gate_up: ``T[2n k]``, ``[gate | up]``; ``T[k 2n]`` with ``transposed``. If both weights have leading dims, each
            matrix of x, ``T[*b m k]``, has weights of its own.
        w_down: ``T[p n]``, for an output of p columns; ``T[n p]`` with ``transposed``.
        activation: ``"silu"`` (SwiGLU), ``"gelu"`` (by the error function) or ``"gelu_tanh"`` (GeGLU).
        fused: as in :func:`linear`, for all products.
        save: what a call that is differentiated keeps for its gradient: ``"pre"``, the product ``[*m 2n]`` before the
            activation; or ``"none"``, and the backward computes that product again.
        transposed: weights are ``[k, 2n]`` and ``[n, p]``, as in JAX.
        halves: ``w_gate_up`` is ``[2, n, k]``, or ``[k, 2, n]``, the same memory. Devices that share n then each have rows
            of both halves, so nothing is gathered, and their outputs are partial sums: ``Shard(1)`` of both weights.

    Returns:
        ``T[*m p]``. Products are summed in float32, and the hidden layer between them is rounded once.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit together, another activation.
    """

def mlp(
    x: Tensor,
    w_up: Tensor,
    b_up: Tensor | None,
    w_down: Tensor,
    b_down: Tensor | None = None,
    activation: str = "gelu",
    *,
    fused: str = "auto",
    save: str = "pre",
    transposed: bool = False,
) -> Tensor:
    """``out = activation(x @ w_up.T + b_up) @ w_down.T + b_down``; biases may be None.

    Args:
        x: ``T[*m k]``; bfloat16, float16 or float32; any leading shape.
        w_up: ``T[n k]``; ``T[k n]`` with ``transposed``. If both weights have leading dims, each matrix of x,
            ``T[*b m k]``, has weights and biases of its own.
        b_up: ``[n]``; float32, bfloat16 or float16; or None.
        w_down: ``T[p n]``, for an output of p columns; ``T[n p]`` with ``transposed``.
        b_down: ``[p]``; float32, bfloat16 or float16; or None.
        activation: ``"gelu"`` (by the error function), ``"gelu_tanh"``, ``"relu"``, ``"relu2"`` (``max(x, 0)^2``),
            ``"silu"``, or ``"quick_gelu"`` (``x * sigmoid(1.702 x)``).
        fused: as in :func:`linear`, for all products.
        save: what a call that is differentiated keeps for its gradient: ``"pre"``, what the activation is of, ``[*m n]``;
            or ``"none"``, and the backward computes that product again.
        transposed: weights are ``[k, n]`` and ``[n, p]``, as in JAX.

    Returns:
        ``T[*m p]``. Products are summed in float32, and the hidden layer between them is rounded once. If devices share
        ``n``, each adds up its part of the output with the others' before ``b_down`` is added.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit together, another activation.
    """
