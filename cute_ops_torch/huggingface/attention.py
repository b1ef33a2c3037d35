"""Attention whose queries and keys are rotated: its three projections, and the rotation, in one autograd node."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import nn

from cute_ops.composite.qkv_rope import SIZES
from cute_ops_torch.composite.constant import constant
from cute_ops_torch.huggingface import autograd_nodes
from cute_ops_torch.huggingface.bypass import calls, can_bypass_linear, takes
from cute_ops_torch.huggingface.lazy_logits import realised
from cute_ops_torch.huggingface.lazy_norm import LazyNorm, norm_and_rotate, stand_ins
from cute_ops_torch.huggingface.masks import band_of
from cute_ops_torch.huggingface.match import Forward, Replacement, hands_on, innermost, rebind
from cute_ops_torch.huggingface.rotations import HALVES, PAIRS, Rotation, rotate, rotation_of
from cute_ops_torch.huggingface.source import Parameters, definition, find, source_digest, unify
from cute_ops_torch.huggingface.traced import version_of

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_OUTPUT = "o_proj"
# The argument that holds cosines and sines.
_TABLES = "position_embeddings"
# Statements of a `forward` that rotates queries and keys as they come out of their projections.
_HIDDEN_SHAPE = "shape = (*input_shape, -1, self.head_dim)"
_PROJECT_AND_ROTATE = """
query = self.q_proj(hidden).view(shape).transpose(1, 2)
key = self.k_proj(hidden).view(shape).transpose(1, 2)
value = self.v_proj(hidden).view(shape).transpose(1, 2)
cos, sin = tables
query, key = apply_rotary_pos_emb(query, key, cos, sin)
"""
# The last statements of a `forward` that returns its output projection.
_PROJECT_OUTPUT = """
out = self.o_proj(out)
return (out, weights)
"""
# `apply_rotary_pos_emb`: `x * cos + rotate_half(x) * sin` for q and k, where `rotate_half` swaps the halves of the last
# dim and negates the second one.
_APPLY = "65a3f73debb53d80"
# Statements that give a table equal halves, or equal neighbours.
_TABLES_MADE = {
    HALVES: "table = torch.cat((angles, angles), dim=-1)",
    PAIRS: "table = torch.repeat_interleave(angles, 2, dim=-1)",
}
# The attribute of a table that says which of the two it is, and its version then.
_MARK = "_cute_equal"


def without_output(attention: Any, x: torch.Tensor) -> Forward | None:
    """An attention's call on ``x`` without its output projection, which is left to the caller; None where a hook or a
    mode would notice.
    """
    forward: Forward = type(attention).forward
    if not (_ends_in_output(forward) and calls(attention, forward) and can_bypass_linear(x, attention.o_proj)):
        return None
    return partial(forward, Bypassed(attention, {_OUTPUT: lambda output: output}))


@constant
def _ends_in_output(forward: Any) -> bool:
    return hands_on(forward) and _projects_output(forward)


def _make_forward(original: Any) -> Forward:
    plain = original.__globals__["apply_rotary_pos_emb"]
    rotation = rotation_of(plain, f"{HALVES} {PAIRS}")
    assert rotation is not None  # it has been found
    forward = rebind(original, apply_rotary_pos_emb=_rotate(plain, rotation))
    if not rotation.interleaved:
        forward = _norm_lazily(forward)
    if not _projects_once(original):
        return forward
    together = source_digest(plain) == _APPLY and _rotates_projections(original)
    skips = rebind(original, apply_rotary_pos_emb=_keep) if together else None
    return _fuse_projections(forward, skips, _cache_argument(original))


def _norm_lazily(forward: Forward) -> Forward:
    """A ``forward`` whose norms of heads are left to the rotation behind them."""

    @wraps(forward)
    def lazily(self: Any, *args: Any, **kwargs: Any) -> Any:
        norms = stand_ins(self)
        return forward(Bypassed(self, norms) if norms else self, *args, **kwargs)

    return lazily


def _keep(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the place of ``apply_rotary_pos_emb`` for queries and keys that are rotated already."""
    return q, k


def _fuse_projections(forward: Forward, skips_rotation: Forward | None, cache: str) -> Forward:
    """A ``forward`` that projects in one autograd node, then runs the rest: ``skips_rotation`` if that rotates, too.

    ``cache`` is the name of the argument that holds keys and values of earlier positions.
    """

    @wraps(forward)
    def fused(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        layers = [getattr(self, name) for name in _PROJECTIONS]
        traced = torch.compiler.is_compiling()
        if not torch.is_grad_enabled() or not can_bypass_linear(hidden_states, *layers):
            return forward(self, hidden_states, *args, **kwargs)
        weights, tables = [layer.weight for layer in layers], kwargs.get(_TABLES)
        if skips_rotation is None or tables is None or not _can_rotate(hidden_states, *tables):
            if traced:
                return forward(self, hidden_states, *args, **kwargs)
            rest, outputs = forward, autograd_nodes.projections(hidden_states, *weights)
        else:
            rest, (cos, sin) = skips_rotation, map(_half_table, tables)
            if not traced:
                together = _keeps_projections(self, kwargs.get(cache), kwargs.get("attention_mask"))
                outputs = autograd_nodes.rotated_projections(hidden_states, weights, cos, sin, self.head_dim, together)
            elif self.head_dim in SIZES:
                outputs = autograd_nodes.rotated_heads(hidden_states, weights, cos, sin, self.head_dim)
            else:
                return forward(self, hidden_states, *args, **kwargs)
        projected = Bypassed(self, {n: _returns(o) for n, o in zip(_PROJECTIONS, outputs, strict=True)})
        return rest(projected, hidden_states, *args, **kwargs)

    return fused


def _keeps_projections(attention: Any, cache: Any, mask: torch.Tensor | None) -> bool:
    """Whether attention saves queries, keys and values as they are. A cache copies keys and values, and so does
    attention with a mask, or eager, for the heads of their group: their memory is to be free then. Ours copies nothing.
    """
    if cache is not None:
        return False
    if mask is None:
        return attention.config._attn_implementation != "eager"  # type: ignore[no-any-return]
    return band_of(mask) is not None


def _returns(output: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda _: output


class Bypassed:
    """Stands in for an attention: functions take the place of some of its layers."""

    def __init__(self, module: nn.Module, layers: Mapping[str, Callable[..., Any]]) -> None:
        self._module = module
        for name, layer in layers.items():  # not by `vars`, which Dynamo of PyTorch 2.11 does not know
            setattr(self, name, layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def unwrapped(module: Any) -> Any:
    """The module that a ``forward`` runs for, where some of its layers are bypassed."""
    while isinstance(module, Bypassed):
        module = module._module
    return module


def _projects_once(forward: Any) -> bool:
    """Whether a ``forward`` passes its input to each projection once, and assigns to no attribute of the module."""
    tree = definition(forward)
    if tree is None:
        return False
    nodes, hidden = list(ast.walk(tree)), tree.args.args[1].arg if len(tree.args.args) > 1 else ""
    called = {ast.unparse(n) for n in nodes if isinstance(n, ast.Call)}
    named = [n.attr for n in nodes if isinstance(n, ast.Attribute) and n.attr in _PROJECTIONS]
    stored = [n for n in nodes if isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, ast.Store | ast.Del)]
    return (
        sorted(named) == sorted(_PROJECTIONS)
        and called >= {f"self.{name}({hidden})" for name in _PROJECTIONS}
        and all(isinstance(n, ast.Name) and n.id not in ("self", hidden) for n in stored)
        and not any(isinstance(n, ast.Name) and n.id == "super" for n in nodes)
    )


@cache
def _projects_output(forward: Any) -> bool:
    """Whether a ``forward`` returns its output projection, and uses it for nothing else."""
    tree = definition(forward)
    if tree is None:
        return False
    named = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == _OUTPUT]
    return len(named) == 1 and unify(_PROJECT_OUTPUT, tree.body[-2:]) is not None


def _rotates_projections(forward: Any) -> bool:
    """Whether a ``forward`` rotates what its projections return, with nothing between."""
    tree = definition(forward)
    shape = find(_HIDDEN_SHAPE, tree) if tree else None
    names = find(_PROJECT_AND_ROTATE, tree) if tree else None
    as_here = {"shape": shape and shape["shape"], "apply_rotary_pos_emb": "apply_rotary_pos_emb", "tables": _TABLES}
    return names is not None and all(names[name] == value for name, value in as_here.items())


def _cache_argument(forward: Any) -> str:
    """The argument whose method ``update`` a ``forward`` calls; empty where there is none."""
    names, tree = Parameters.of(forward).names, definition(forward)
    calls = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)} if tree else set()
    return next((name for name in names if f"{name}.update" in calls), "")


def _packed(module: nn.Module) -> tuple[str, ...]:
    return _PROJECTIONS if _projects_once(type(module).forward) else ()


def _apart(module: Any) -> str:
    """Why queries and keys are rotated after their product."""
    forward = type(module).forward
    if source_digest(inspect.unwrap(forward).__globals__.get("apply_rotary_pos_emb")) != _APPLY:
        return "its rotation is not Llama's"
    if not (_projects_once(forward) and _rotates_projections(forward)):
        return "it does more between projecting queries and keys and rotating them"
    if any(getattr(getattr(module, name), "bias", None) is not None for name in _PROJECTIONS):
        return "its projections have biases"
    if module.head_dim not in SIZES:
        return f"its heads have {module.head_dim} columns, not {' or '.join(map(str, SIZES))}"
    return ""


def _rotate(plain: Forward, rotation: Rotation) -> Forward:
    """``apply_rotary_pos_emb`` on our op, and ``plain`` where that does not take the heads or the tables."""

    def apply_rotary_pos_emb(
        q: Any, k: Any, cos: torch.Tensor, sin: torch.Tensor, *more: Any, unsqueeze_dim: int = 1, **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        known = not more and not options and unsqueeze_dim in rotation.dims
        if known and unsqueeze_dim == 1 and _are_normed_alike(q, k, cos, sin, rotation):
            return norm_and_rotate(q, k, rotation.angles(cos), rotation.angles(sin))
        q, k = realised((q, k))
        if not (known and all(_can_rotate(x, cos, sin, rotation) and rotation.fits(x, cos) for x in (q, k))):
            options |= {} if unsqueeze_dim == 1 else {"unsqueeze_dim": unsqueeze_dim}
            return plain(q, k, cos, sin, *more, **options)  # type: ignore[no-any-return]
        cos, sin = rotation.angles(cos), rotation.angles(sin)
        return rotate(q, rotation, cos, sin, unsqueeze_dim), rotate(k, rotation, cos, sin, unsqueeze_dim)

    return apply_rotary_pos_emb


def _are_normed_alike(q: Any, k: Any, cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation) -> bool:
    """Whether queries and keys wait for norms that our op computes with their rotation."""
    if not (isinstance(q, LazyNorm) and isinstance(k, LazyNorm)):
        return False
    if (q.made.eps, q.made.offset) != (k.made.eps, k.made.offset):
        return False
    heads = [x.heads.transpose(1, 2) for x in (q, k)]
    return all(_can_rotate(x, cos, sin, rotation) and rotation.fits(x, cos) for x in heads)


_OF_HALVES = Rotation("first", HALVES, False, False, False, (1,))


def _can_rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation = _OF_HALVES) -> bool:
    """Whether our op rotates ``x``, or products of it, by tables of cosines and sines that are as the rotation needs.

    With tables of another dtype the original's product promotes; under autocast what follows converts it back.
    """
    if not (takes(x, cos, sin) and all(_is(rotation.tables, table) for table in (cos, sin))):
        return False
    narrow = rotation.keeps_dtype and cos.dtype == sin.dtype == torch.float32
    return x.dtype == cos.dtype == sin.dtype or narrow or torch.is_autocast_enabled(x.device.type)


def _mark_tables(plain: Any) -> Forward:
    """A ``forward`` of a rotary embedding that marks its tables: their halves, or neighbours, are equal, which nobody
    sees in them.
    """
    kind = _made(plain)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        tables = plain(self, *args, **kwargs)
        for table in tables:
            setattr(table, _MARK, (kind, _version(table)))
        return tables

    return forward


def _is(kind: str, table: torch.Tensor) -> bool:
    """Whether a table is as a known rotary embedding has made it. What a hook makes of it is another tensor, or has
    another version.
    """
    if not kind:
        return True
    made, version = getattr(table, _MARK, ("", None))
    return made == kind and version is not None and version == _version(table)


def _version(table: torch.Tensor) -> int | None:
    """A number that changes with a table; None where torch counts no changes."""
    if torch.compiler.is_dynamo_compiling():
        return version_of(table)
    return None if table.is_inference() else table._version


def _half_table(table: torch.Tensor) -> torch.Tensor:
    """One of the two equal halves of a table of cosines or sines, without a batch dim of one."""
    table = table[..., : table.shape[-1] // 2]
    return table[0] if table.shape[0] == 1 else table


def _applies_rotary(module: nn.Module, model: nn.Module) -> bool:
    """Whether a module's ``forward`` calls ``apply_rotary_pos_emb``, a rotation of ours by the model's tables."""
    forward = innermost(type(module).forward)
    if forward is None or "apply_rotary_pos_emb" not in forward.__code__.co_names:
        return False
    kinds = {_made(type(m).forward) for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")}
    rotation = rotation_of(forward.__globals__.get("apply_rotary_pos_emb"), f"{HALVES} {PAIRS}")
    return rotation is not None and (not rotation.tables or kinds == {rotation.tables})


def _makes_tables(module: nn.Module, model: nn.Module) -> bool:
    """Whether a module makes tables of cosines and sines whose halves or neighbours are equal."""
    return type(module).__name__.endswith("RotaryEmbedding") and bool(_made(type(module).forward))


def _made(forward: Any) -> str:
    """Which tables a ``forward`` makes."""
    tree = definition(forward)
    return next((kind for kind, statement in _TABLES_MADE.items() if tree and find(statement, tree)), "")


REPLACEMENTS = (
    Replacement("rope", _applies_rotary, _make_forward, packed=_packed, apart=_apart),
    Replacement("", _makes_tables, _mark_tables),
)
