"""Attention functions of Hugging Face's models on our op: those that a model's config names, and one more, "cute".

An attention module hands queries, keys, values and a mask to the function that its config names. ``patch`` puts ours in
the place of ``sdpa`` and of the ``eager`` ones that are known; the original function runs where ours does not compute
what it would: with a mask that is no band, with dropout, in float32, where attention weights are read.
"""

from __future__ import annotations

import ast
import copy
import sys
import types
from collections.abc import Mapping
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn

from cute_ops_torch.composite.scaled_dot_product import attend, attend_rows
from cute_ops_torch.huggingface.attention import Bypassed, unwrapped
from cute_ops_torch.huggingface.bypass import CAPTURES, calls
from cute_ops_torch.huggingface.captures import captured
from cute_ops_torch.huggingface.masks import (
    ANY,
    CREATORS,
    as_made,
    band_of,
    make_mask,
    sequences_of,
    without_computing,
)
from cute_ops_torch.huggingface.match import Forward, Replacement, innermost, rebind
from cute_ops_torch.huggingface.source import caller, definition, only_reads, source_digest
from cute_ops_torch.huggingface.statements import compiled

Tensor = torch.Tensor
NAME = "cute"
_FUNCTIONS, _EAGER = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"
# `eager_attention_forward` of Llama, BERT, ViT and CLIP, which differ in the dtype of the softmax and in how keys are
# repeated for the heads of their group; of Gemma 2 and 3, with a soft cap; of GPT-OSS, with sinks.
_PLAIN = (
    "3703dfb5640252f0", "898dcc7251219ad0", "1355b8a74d8b8187", "1d3f7a03efb1ba57", "845c359f2b54be34",
    "dfba99d4d6198058",
)  # fmt: skip
_CAPPED, _SINKS = ("e497b5cad493bd06", "07daa3059fecede5"), ("50b806677e6547d8", "1104ddae388372ec")
# Arguments that say nothing to a function that gets a mask: a model hands on what its caller gives it for others, such
# as the number of items by which a trainer divides the loss.
_SAID_BY_THE_MASK = frozenset((
    "position_ids", "cache_position", "use_cache", "sliding_window", "output_hidden_states", "output_router_logits",
    "num_items_in_batch", "return_dict", "ignore_index", "shift_labels", "logits_to_keep",
))  # fmt: skip
# Arguments by which layers tell their attention more than a mask: keys chosen by an indexer, sinks of another form.
_UNREAD = ("indices", "block_indices", "sinks")
# Outputs that hooks keep and that are no attention weights.
_NO_WEIGHTS = {"hidden_states", "_hidden_states_layers", "router_logits"}
# Methods with masks, by the `forward` that calls them.
_METHODS: dict[Any, dict[str, Any]] = {}
# Arguments of FlashAttention's function, which say where sequences begin in the one row of a batch.
_BIAS = "position_bias"  # added to scores, as T5's
_OFFSETS, _LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k")


def register_attention() -> None:
    """Let Hugging Face's models take ``attn_implementation="cute"``: our attention, by any model that takes ``sdpa``,
    patched or not, with its sliding windows, sinks (GPT-OSS) and soft caps (Gemma 2). Models whose ``eager`` attention
    alone reads a mask get one; keys that a layer chooses by itself (DeepSeek V3.2) are refused.

    No mask is computed where it is causal, a window or none and no token is padding. Sequences may be packed in a row:
    by ``position_ids`` that begin anew, or by the arguments of FlashAttention, ``cu_seq_lens_q`` and others, that
    ``DataCollatorWithFlattening`` gives. Elsewhere, in float32 and with
    dropout, ``sdpa`` runs, or attention written out for sinks and soft caps. :func:`cute_ops_torch.patch` calls this.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ModuleNotFoundError as error:
        if find_spec("transformers") is not None:
            raise  # one of the packages that it uses does not import, as this error says
        raise ImportError("register_attention needs transformers: pip install 'cute-ops[hf]'") from error
    AttentionInterface.register(NAME, cute_attention_forward)
    AttentionMaskInterface.register(NAME, _make_mask)


def _make_mask(**given: Any) -> Tensor | None:
    """The mask of ``attn_implementation="cute"``. Of models that do not take ``sdpa`` nothing says that they read a
    mask that is missing, or none of numbers: DeepSeek V4 appends to it, and BigBird-Pegasus' decoder says that it is
    not causal.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    config = given.get("config")
    return make_mask(sdpa_mask if config is None or _takes_sdpa(config.__class__) else eager_mask, **given)


@cache
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _takes_sdpa(config: Any) -> bool:
    """Whether the models of a config take ``sdpa``, or are GPT-OSS, which does not for its sinks alone."""
    beside = sys.modules.get(config.__module__.replace("configuration_", "modeling_"))
    models = [model for model in vars(beside or object).values() if getattr(model, "config_class", None) is config]
    supported = [getattr(model, "_supports_sdpa", True) for model in models]
    return all(supported) or config.__name__ == "GptOssConfig"


def cute_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The function of ``attn_implementation="cute"``.

    Raises:
        NotImplementedError: an argument that ``sdpa`` would leave out, such as keys that the layer has chosen.
    """
    if unread := [name for name in _UNREAD if kwargs.get(name) is not None]:
        problem = f"`{unread[0]}` of {type(module).__name__} is not implemented for attn_implementation={NAME!r}"
        raise NotImplementedError(f"cute.attention: {problem}: choose 'eager' or 'sdpa', and patch the model.")
    given = [kwargs.pop(name, None) for name in (*_OFFSETS, *_LENGTHS)][:2]
    if None not in given and sequences_of(attention_mask) is None:
        options: Any = {"dropout": dropout, "scaling": scaling, "softcap": softcap, "sinks": s_aux}
        sides = _sides_of_sequences(attention_mask, kwargs.get("sliding_window"), _is_causal(module, is_causal))
        if sides is not None:
            return _attend_sequences(query, key, value, given, sides, **options), None
    known = _computed(dropout, _without_flat_bias(kwargs))
    seen = _seen(attention_mask, query, key, _is_causal(module, is_causal)) if known else None
    out = None if seen is None else _attend(query, key, value, seen, scaling=scaling, softcap=softcap, sinks=s_aux)
    if out is not None:
        return out, None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    mask = as_made(attention_mask)
    if softcap is None and s_aux is None:
        others = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **_with_rows_of_bias(kwargs)}
        return sdpa_attention_forward(module, query, key, value, mask, **others)  # type: ignore[no-any-return]
    if mask is None and query.shape[2] > 1 and _is_causal(module, is_causal):
        mask = _first_keys(query, key)
    return _written_out(query, key, value, mask, dropout=dropout, scaling=scaling, softcap=softcap, sinks=s_aux), None


def _of_sdpa(plain: Any) -> Forward:
    """``sdpa_attention_forward`` on our op."""

    def sdpa_attention_forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
        scaling: float | None = None, is_causal: bool | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        # Of one query torch's kernel splits the keys over the GPU, and ours does not.
        if query.shape[2] > 1 and _computed(dropout, _without_flat_bias(kwargs)):
            seen = _seen(attention_mask, query, key, _is_causal(module, is_causal))
            out = None if seen is None else _attend(query, key, value, seen, scaling=scaling)
            if out is not None:
                return out, None
        given = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **_with_rows_of_bias(kwargs)}
        return plain(module, query, key, value, as_made(attention_mask), **given)

    return sdpa_attention_forward


def _of_eager(plain: Any, digest: str) -> Forward:
    """``eager_attention_forward`` on our op, where nobody sees the weights that it returns."""

    def eager_attention_forward(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Any:
        options = dict(kwargs)
        dropout, scaling = options.pop("dropout", 0.0), options.pop("scaling", None)
        softcap = options.pop("softcap", None) if digest in _CAPPED else None
        sinks = module.sinks if digest in _SINKS else None
        options.pop("s_aux" if sinks is not None else "", None)
        if not args and _computed(dropout, options) and _returns_to_its_caller(module):
            seen = _seen(attention_mask, query, key, False)
            out = (
                None
                if seen is None
                else _attend(query, key, value, seen, scaling=scaling, softcap=softcap, sinks=sinks)
            )
            if out is not None:
                return out, None
        return plain(module, query, key, value, as_made(attention_mask), *args, **kwargs)

    return eager_attention_forward


def _returns_to_its_caller(module: Any) -> bool:
    """Whether no hook reads the weights that a module returns, as that does by which Hugging Face keeps them. Its
    hooks stay on a module once any output was asked for, and keep nothing in calls that do not ask for weights.
    """
    module = unwrapped(module)
    forward = type(module).forward
    return calls(module, forward) or (calls(module, forward, but=CAPTURES) and not captured() - _NO_WEIGHTS)


def _computed(dropout: float, others: Mapping[str, Any]) -> bool:
    """Whether our attention computes what these arguments say, beside a mask."""
    return dropout == 0 and not any(
        value is not None and value is not False and name not in _SAID_BY_THE_MASK for name, value in others.items()
    )


def _without_flat_bias(others: dict[str, Any]) -> dict[str, Any]:
    """Arguments without a bias of scores that is one number for all keys, which changes no weight."""
    bias = others.get(_BIAS)
    flat = isinstance(bias, Tensor) and bias.ndim > 0 and bias.shape[-1] > 1 and bias.stride(-1) == 0
    return {name: value for name, value in others.items() if name != _BIAS} if flat else others


def _with_rows_of_bias(others: dict[str, Any]) -> dict[str, Any]:
    """Arguments with a bias of scores whose rows lie in one piece: torch's fused kernels take no other. T5 looks it up
    with its heads last.
    """
    bias = others.get(_BIAS)
    return {**others, _BIAS: bias.contiguous()} if isinstance(bias, Tensor) and bias.ndim else others


def _is_causal(module: Any, given: bool | None) -> bool:
    return getattr(module, "is_causal", True) if given is None else given


def _sides_of_sequences(mask: Tensor | None, window: int | None, causal: bool) -> tuple[int, int] | None:
    """How many keys before and after its own a query attends to, of a call that says where sequences begin; None where
    a compiler sees a mask, which tells the sequences from each other.
    """
    if mask is None:
        right = 0 if causal else ANY if window is None else window - 1
        return (ANY if window is None else window - 1), right
    band = band_of(mask)
    if band is not None:
        return band.left, band.right
    if torch.compiler.is_compiling():
        return None
    raise NotImplementedError("cute.attention: cu_seq_lens_q beside a mask that is no band is not implemented.")


def _attend_sequences(
    query: Tensor, key: Tensor, value: Tensor, offsets: list[Any], sides: tuple[int, int], *, dropout: float,
    scaling: float | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention within sequences, in any dtype: torch's function has nothing to tell them from each other."""
    if dropout:
        raise NotImplementedError("cute.attention: dropout is not implemented for sequences by cu_seq_lens_q.")
    of_q, of_k = (x.to(torch.int32) for x in offsets)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    left, right = sides
    options = scaling or 0.0, right == 0, left, -1 if right == 0 else right, softcap or 0.0
    return attend_rows(q, k, v, (of_q, of_k), sinks, options)


class _Seen(NamedTuple):
    """The keys that queries attend to.

    Attributes:
        left, right: how many before and after a query's own.
        keys: how many there are; the last one is beside the last query.
        offsets: where sequences begin in the rows of a batch; None where each row is one.
    """

    left: int
    right: int
    keys: int
    offsets: Tensor | None = None


def _seen(mask: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> _Seen | None:
    """The keys that queries attend to by a mask; None where no band of keys says it. Without a mask, ``causal`` means
    keys up to the query's number.
    """
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        if not causal or queries == 1:
            return _Seen(ANY, ANY, keys)
        return _Seen(ANY, 0, queries) if queries <= keys else None
    if (sequences := sequences_of(mask)) is not None:
        own, offsets = sequences
        alike = (own.queries, own.keys) == (queries, keys)
        return _Seen(own.left, own.right, keys, offsets) if alike else None
    band = band_of(mask)
    if band is None or (band.queries, band.keys) != (queries, keys):
        return None
    last = band.shift + queries
    if last == keys or (band.left, band.right) == (ANY, ANY):
        return _Seen(band.left, band.right, keys)
    # Keys after the last query's: of a cache whose size is static.
    return _Seen(band.left, 0, last) if 0 < last < keys and band.right == 0 else None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, seen: _Seen, *, scaling: float | None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    if seen.keys != key.shape[2]:
        key, value = key[:, :, : seen.keys], value[:, :, : seen.keys]
    sides, offsets = (seen.left, seen.right), None if seen.offsets is None else (seen.offsets, seen.offsets)
    return attend(query, key, value, sides, scale=scaling, softcap=softcap, sinks=sinks, offsets=offsets)


def _first_keys(query: Tensor, key: Tensor) -> Tensor:
    """The mask of keys up to each query's number."""
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()


def _written_out(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, dropout: float, scaling: float | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention with a soft cap and sinks by torch's functions, (batch, seqlen, heads, headdim)."""
    share = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(share, dim=1) for x in (key, value))
    scores = (query @ key.mT).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        last = sinks.float().reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, last], dim=-1)
    # A row that attends to nothing is zero.
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., : key.shape[2]].to(value.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=dropout > 0)
    return (weights @ value).transpose(1, 2).contiguous()


class _Functions:
    """Hugging Face's attention functions by name, with ours in the place of ``sdpa``."""

    def __init__(self, plain: Any) -> None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        self._plain, self._sdpa = plain, sdpa_attention_forward
        self._ours = _of_sdpa(sdpa_attention_forward)

    def __getitem__(self, name: str) -> Any:
        found = self._plain[name]
        return self._ours if found is self._sdpa else found

    def get_interface(self, name: str, default: Any) -> Any:
        found = self._plain.get_interface(name, default)
        return self._ours if found is self._sdpa else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def _attends(module: nn.Module, model: nn.Module) -> bool:
    """Whether a module's ``forward`` calls the attention function that its config names, one that we replace."""
    forward = innermost(type(module).forward)
    if forward is None or _FUNCTIONS not in forward.__code__.co_names:
        return False
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if name != "eager":
        return name == "sdpa"
    digest = source_digest(forward.__globals__.get(_EAGER))
    return digest in (*_PLAIN, *_CAPPED, *_SINKS) and _drops_weights(module, model)


def _drops_weights(module: nn.Module, model: nn.Module) -> bool:
    """Whether the caller of an attention drops the weights that it returns: ``out, _ = self.attention(...)``."""
    around = caller(module, model)
    return module is model if around is None else _takes_first(*around)


def _takes_first(tree: ast.AST, call: str) -> bool:
    """Whether each call of a submodule is unpacked to two names, of which the second is read nowhere."""
    called = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == call]
    targets = [n.targets[0] for n in ast.walk(tree) if isinstance(n, ast.Assign) and n.value in called]
    read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    pairs = [t.elts for t in targets if isinstance(t, ast.Tuple) and len(t.elts) == 2]
    return len(called) == len(pairs) > 0 and all(isinstance(b, ast.Name) and b.id not in read for _, b in pairs)


def _make_attention(forward: Any) -> Forward:
    forward = _with_views(forward)
    scope = forward.__globals__
    names: dict[str, Any] = {_FUNCTIONS: _Functions(scope[_FUNCTIONS])}
    # What runs in its place may be rebound already: its softmax.
    digest = source_digest(scope.get(_EAGER))
    if digest in (*_PLAIN, *_CAPPED, *_SINKS):
        names[_EAGER] = _of_eager(scope[_EAGER], digest)
    return rebind(forward, **names)


def _with_views(forward: Any) -> Forward:
    """A ``forward`` that hands heads to attention, and to its cache, as they lie in memory: ours reads any strides, and
    gradients come back without a copy, too. Whisper makes queries, keys and values contiguous. A bias of zeros, as T5
    gives it to attention that has none, is one number, expanded.
    """
    tree = copy.deepcopy(definition(forward))
    if tree is None or forward.__code__.co_freevars:
        return forward  # type: ignore[no-any-return]
    assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)]
    attended = _attended(tree)
    heads = [n for n in assigned if _copies_heads(n) and ast.unparse(n.targets[0]) in attended]
    zeros = [n for n in assigned if _makes_zeros(n) and ast.unparse(n.targets[0]) == _BIAS]
    for node in heads:
        node.value = node.value.func.value  # type: ignore[attr-defined]  # of `heads.contiguous()` the heads
    for node in zeros:
        size, node.value.args[0] = node.value.args[0], ast.Tuple([], ast.Load())  # type: ignore[attr-defined]
        node.value = ast.Call(ast.Attribute(node.value, "expand", ast.Load()), [size], [])
    return compiled(tree, forward, {}) if heads or zeros else forward


def _makes_zeros(node: ast.Assign) -> bool:
    """Whether a statement is ``name = torch.zeros((a, b), ...)``."""
    call = node.value
    return (
        isinstance(call, ast.Call) and ast.unparse(call.func) == "torch.zeros" and isinstance(call.args[0], ast.Tuple)
    )


def _copies_heads(node: ast.Assign) -> bool:
    """Whether a statement is ``name = heads.transpose(1, 2).contiguous()``."""
    text = ast.unparse(node.value)
    return (
        len(node.targets) == 1 and text.endswith(".transpose(1, 2).contiguous()") and isinstance(node.value, ast.Call)
    )


def _attended(tree: ast.FunctionDef) -> set[str]:
    """Names that a ``forward`` reads to hand them to its attention function, or to a cache's ``update``, only."""
    named = [n.targets[0].id for n in ast.walk(tree) if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
             and any(isinstance(each, ast.Name) and each.id == _FUNCTIONS for each in ast.walk(n.value))]  # fmt: skip
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    taking = [n for n in calls if ast.unparse(n.func) in named or ast.unparse(n.func).endswith(".update")]
    handed = {id(each) for call in taking for each in call.args}
    reads = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    return {n.id for n in reads if id(n) in handed} - {n.id for n in reads if id(n) not in handed}


def _makes_masks(module: nn.Module, model: nn.Module) -> bool:
    """Whether a module's ``forward``, or a method that it calls, makes masks by functions of
    ``transformers.masking_utils``.
    """
    forward = innermost(type(module).forward)
    if forward is None:
        return False
    named = [(name, getattr(type(module), name, None)) for name in forward.__code__.co_names]
    methods = {name: found for name, found in named if isinstance(found, types.FunctionType) and _creators(found)}
    if methods and only_reads(forward):
        _METHODS.setdefault(forward, methods)
    return bool(_creators(forward)) or forward in _METHODS


def _creators(forward: Any) -> list[str]:
    found = [name for name in CREATORS if name in forward.__code__.co_names]
    home = "transformers.masking_utils"
    return [name for name in found if getattr(forward.__globals__.get(name), "__module__", "") == home]


def _make_masks(forward: Any) -> Forward:
    masked = _with_masks(forward)
    methods = {name: (found, _with_masks(found)) for name, found in _METHODS.get(forward, {}).items()}
    if not methods:
        return masked

    @wraps(masked)
    def with_methods(self: Any, *args: Any, **kwargs: Any) -> Any:
        kind = type(unwrapped(self))
        parts = {name: _bound(ours, self) for name, (own, ours) in methods.items() if getattr(kind, name) is own}
        return masked(Bypassed(self, parts), *args, **kwargs)

    return with_methods


def _with_masks(function: Any) -> Forward:
    return rebind(function, **{name: without_computing(function.__globals__[name]) for name in _creators(function)})


def _bound(function: Any, module: Any) -> Forward:
    """A function as a method of a module; Dynamo of PyTorch 2.11 does not know how to make one."""
    return lambda *args, **kwargs: function(module, *args, **kwargs)


ATTENTION = Replacement("attention", _attends, _make_attention)
MASKS = Replacement("", _makes_masks, _make_masks)
