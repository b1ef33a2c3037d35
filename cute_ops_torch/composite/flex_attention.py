"""Attention with the arguments of ``torch.nn.attention.flex_attention.flex_attention``."""

from __future__ import annotations

import builtins
import weakref
from collections.abc import Callable, Hashable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from cute_ops.constants import make_room
from cute_ops.ops.attention.by_call import Captured, kind_of
from cute_ops_torch.composite.attending import attend
from cute_ops_torch.composite.scalar_function import ScalarFunction
from cute_ops_torch.library.tensors import checked

Tensor = torch.Tensor
Function = Callable[..., Any]
_LIBRARIES = ("torch", "math", "operator")  # whose modules do not change
_NUMBERS = (bool, int, float, str, type(None), torch.dtype)


class _Call(NamedTuple):
    """The op that calls with some functions run.

    Attributes:
        run: the function of an op.
        places: of the tensors that it captures, among those that the functions refer to.
    """

    run: Function
    places: tuple[int, ...]


_known: dict[Hashable, _Call] = {}
# Whether the blocks of a block mask are those that its function shows.
_blocks_agree: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


@torch.compiler.disable(reason="its functions are traced when it is called; compile what is around it")  # type: ignore[untyped-decorator]
@checked
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Function | None = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
) -> Any:  # fmt: skip
    """``torch.nn.attention.flex_attention.flex_attention`` by :func:`attention`.

    Functions are written for torch, and traced when they are first called: there is nothing to compile. Tensors that
    they read may be others in the next call, of other sizes, too. Of a block mask its ``mask_mod`` counts, whose bounds
    over a tile say which tiles are skipped.

    Args:
        query: ``[B, heads, L, E]``.
        key: ``[B, kv heads, S, E]``, of one batch for all, too.
        value: ``[B, kv heads, S, Ev]``.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, torch's functions of scalars; tensors that it refers to
            are read by one index for each dim.
        block_mask: a ``BlockMask`` that ``create_block_mask`` has made of a ``mask_mod(b, h, q_idx, kv_idx)``. The
            first call with one waits for the device, to see that its blocks are those of the function.
        scale: of scores; None is ``1 / sqrt(E)``.
        enable_gqa: ``heads / kv heads`` neighbouring heads of ``query`` share one of ``key`` and ``value``.
        return_lse: whether to return the log-sum-exp of scores, ``[B, heads, L]``, too.

    Returns:
        ``[B, heads, L, Ev]``, a view of memory that has positions before heads; with ``return_lse`` a tuple of that and
        the log-sum-exp.

    Raises:
        TraceError: a function does what cannot be traced; the message says what.
        ValueError: shapes do not fit each other, or those of the block mask.
        NotImplementedError: a block mask leaves out blocks, or has whole ones, that its ``mask_mod`` says otherwise,
            or the scale is 0.
        RuntimeError: the first call with a block mask is captured in a CUDA graph.
    """
    if not query.ndim == key.ndim == value.ndim == 4:
        ranks = ", ".join(str(x.ndim) for x in (query, key, value))
        raise ValueError(f"cute.flex_attention: query, key and value have 4 dims, got {ranks}.")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        what = f"{query.shape[1]} heads of query and {key.shape[1]} of key need enable_gqa=True"
        raise ValueError(f"cute.flex_attention: {what}.")
    if scale == 0:  # our op's default, and here equal weights
        raise NotImplementedError("cute.flex_attention: a scale of 0 is not implemented; None is the default.")
    mask_mod = None if block_mask is None else _mask_of(block_mask, query.shape[-2], key.shape[-2])
    call, tensors = _call(score_mod, mask_mod)
    batch = query.shape[0]
    q, k, v = ((x if x.shape[0] == batch else x.expand(batch, -1, -1, -1)).transpose(1, 2) for x in (query, key, value))
    captured = [x if x.ndim else x.reshape(1) for x in (tensors[i] for i in call.places)]
    out, lse = call.run(q, k, v, *captured, None, scale or 0.0)
    return (out.transpose(1, 2), lse) if return_lse else out.transpose(1, 2)


def _mask_of(block_mask: Any, queries: int, keys: int) -> Function | None:
    """The function of a block mask; None where it leaves out nothing."""
    from torch.nn.attention.flex_attention import noop_mask

    lengths = tuple(block_mask.seq_lengths)
    if lengths != (queries, keys):
        what = f"the block mask is of {lengths[0]} queries and {lengths[1]} keys, not of {queries} and {keys}"
        raise ValueError(f"cute.flex_attention: {what}.")
    if block_mask not in _blocks_agree:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            what = "argument `block_mask` is a new mask within the capture of a CUDA graph, expected one that was used"
            raise RuntimeError(f"cute.flex_attention: {what} before: the first call with one waits for the device.")
        _blocks_agree[block_mask] = _agrees(block_mask)
    if not _blocks_agree[block_mask]:
        what = "a block mask whose blocks are not those that its mask_mod says is not implemented"
        raise NotImplementedError(f"cute.flex_attention: {what}: give create_block_mask a mask_mod that says them.")
    return None if block_mask.mask_mod is noop_mask else block_mask.mask_mod


def _agrees(block_mask: Any) -> bool:
    """Whether the function of a block mask hides the blocks that this leaves out, and nothing of those that it has as
    whole ones: at their corners and in their middle. Waits for the device.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    (queries, keys), (rows, columns) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    numbers = block_mask.kv_num_blocks
    across, device, lead = -(-keys // columns), numbers.device, (1, 1, *numbers.shape[:-1])[-2:]

    def listed(numbers: Tensor | None, indices: Tensor | None) -> Tensor:
        found = torch.zeros(*lead, block_mask.kv_num_blocks.shape[-1], across + 1, dtype=torch.bool, device=device)
        if numbers is None or indices is None:
            return found[..., :-1]
        counted = torch.arange(indices.shape[-1], device=device) < numbers[..., None]
        places = torch.where(counted, indices, across).long()
        return found.scatter_(-1, places.view(*found.shape[:-1], -1), True)[..., :-1]

    whole = listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    some = listed(numbers, block_mask.kv_indices) | whole
    differ = torch.zeros_like(some)
    for row, column in ((0, 0), (0, columns - 1), (rows - 1, 0), (rows - 1, columns - 1), (rows // 2, columns // 2)):
        q = (torch.arange(some.shape[-2], device=device) * rows + row).clamp(max=queries - 1)
        k = (torch.arange(across, device=device) * columns + column).clamp(max=keys - 1)
        batch, head = (torch.arange(n, device=device) for n in lead)
        each = [x.flatten().int() for x in torch.meshgrid(batch, head, q, k, indexing="ij")]
        with TransformGetItemToIndex():
            seen = torch.vmap(block_mask.mask_mod)(*each).bool().view(some.shape)
        differ |= torch.where(seen, ~some, whole)
    return not bool(differ.any())


def _call(score_mod: Function | None, mask_mod: Function | None) -> tuple[_Call, list[Tensor]]:
    """The function that runs a call, found again by its functions' key, and the tensors that these refer to. Functions
    without a key are traced at each call.
    """
    referred: list[Tensor] = []
    key: Hashable = (_state(score_mod, referred, []), _state(mask_mod, referred, []))
    known = None if None in key else _known.get(key)  # type: ignore[operator]
    if known is not None:
        return known, referred
    made = {
        name: ScalarFunction(function, name, scores)
        for name, function, scores in (("score_mod", score_mod, 1), ("mask_mod", mask_mod, 0)) if function is not None
    }  # fmt: skip
    every: list[Tensor] = []
    for each in made.values():
        every += [x for x in each.tensors if not any(x is other for other in every)]
    functions = {name: _placed(name, each, every) for name, each in made.items()}
    captured = tuple(Captured("", kind_of(str(x.dtype).partition(".")[2]), max(x.ndim, 1)) for x in every)
    run = attend.plain if not functions else attend.chosen(
        functions.get("score_mod"), functions.get("mask_mod"), captured, 1
    )  # fmt: skip
    places = [next((i for i, x in enumerate(referred) if x is own), -1) for own in every]
    if None in key or -1 in places:  # type: ignore[operator]
        return _Call(run, tuple(range(len(every)))), every
    make_room(_known)
    _known[key] = _Call(run, tuple(places))
    return _known[key], referred


def _placed(name: str, function: ScalarFunction, every: list[Tensor]) -> Function:
    """A function as :func:`attention` takes it: there the last query stands beside the last key."""
    own = function.of(every)
    if name == "score_mod":

        def score_mod(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any, *captured: Any) -> Any:
            return own(xp, score, batch, head, q - k.size + q.size, k, *captured)

        placed: Function = score_mod
    else:

        def mask_mod(xp: Any, batch: Any, head: Any, q: Any, k: Any, *captured: Any) -> Any:
            return own(xp, batch, head, q - k.size + q.size, k, *captured)

        placed = mask_mod
    placed.__name__ = placed.__qualname__ = function.__name__
    return placed


def _state(x: Any, tensors: list[Tensor], within: list[Any]) -> Hashable:
    """A key of a function with what it refers to; None where something may change unseen. Of tensors, which it adds to
    a list, dtype and rank count.
    """
    if isinstance(x, _NUMBERS):
        return type(x), x
    if isinstance(x, Tensor):
        if not any(x is other for other in tensors):
            tensors.append(x)
        return next(i for i, other in enumerate(tensors) if other is x), x.dtype, x.ndim
    if isinstance(x, ModuleType):
        return (x.__name__,) if x.__name__.partition(".")[0] in _LIBRARIES else None
    if isinstance(x, BuiltinFunctionType | type):
        return x, x.__module__
    if isinstance(x, list | tuple):
        found = [_state(each, tensors, within) for each in x]
        return None if None in found else (type(x), *found)
    return _state_of_function(x, tensors, within) if isinstance(x, FunctionType) else None


def _state_of_function(function: FunctionType, tensors: list[Tensor], within: list[Any]) -> Hashable:
    if str(function.__module__).partition(".")[0] == "torch":
        return function
    if function in within:
        return function.__code__
    refers = [function.__defaults__ or (), [*(function.__kwdefaults__ or {}).values()], *_globals(function)]
    try:
        refers += [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell is empty
        return None
    found = [_state(each, tensors, [*within, function]) for each in refers]
    return None if None in found else (function.__code__, *found)


def _globals(function: FunctionType) -> Iterator[Any]:
    """The globals and builtins that a function reads, or a function that it makes."""
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        for name in code.co_names:
            if name in function.__globals__:
                yield function.__globals__[name]
            elif hasattr(builtins, name):
                yield getattr(builtins, name)
