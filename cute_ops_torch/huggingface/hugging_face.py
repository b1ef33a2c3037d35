"""What Hugging Face's modules compute, and what computes it instead.

A module is known by a digest of how its ``forward`` is written; beside each digest stands what it computes.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import itertools
import math
import textwrap
import types
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any, NamedTuple

import torch
from torch import nn

from cute_ops.composite import chunks
from cute_ops_torch import functions
from cute_ops_torch.composite.embedding import embedding
from cute_ops_torch.composite.linear_cross_entropy import linear_cross_entropy
from cute_ops_torch.host.function import transformed
from cute_ops_torch.huggingface import residual as residuals
from cute_ops_torch.huggingface.autograd_nodes import norm_of_stream, projections, rotated_projections, silu_mlp

# mypy: disable-error-code="attr-defined, no-untyped-def, has-type"


class Form(NamedTuple):
    """One thing that is replaced.

    Attributes:
        op: the op that it then runs on.
        fits: ``fits(module, model)``: is the module of this form?
        forward: the new ``forward`` for a class of modules.
        unused: the name of a submodule that the new ``forward`` does not call.
        together: ``together(module)``: names of linear layers that it runs as one where weights lie side by side.
    """

    op: str
    fits: Callable[[nn.Module, nn.Module], bool]
    forward: Callable[[type[nn.Module]], Callable[..., Any]]
    unused: str = ""
    together: Callable[[nn.Module], tuple[str, ...]] = lambda module: ()


@cache
def written(function: Any) -> str | None:
    """A digest of a function's parameters and body as they are written; None where there is no source.

    Annotations, comments and the docstring do not count, nor does the version of Python.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    body = definition.body[1:] if ast.get_docstring(definition) else definition.body
    text = "\n".join([ast.unparse(definition.args), *map(ast.unparse, body)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _form(
    op: str,
    digest: str,
    ours: Callable[..., Any],
    also: Callable[[nn.Module], bool] = lambda module: True,
    unused: str = "",
    together: tuple[str, ...] = (),
) -> Form:
    """The form of modules whose ``forward`` is written like this."""

    def fits(module: nn.Module, model: nn.Module) -> bool:
        return written(type(module).forward) == digest and also(module)

    return Form(op, fits, lambda original: ours, unused, lambda module: together)


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


# Norms


# Llama's: in float32, rounded to the input's dtype before the weight.
_NORM = "075c8d1982795b4a"


def _norm(self, hidden_states: torch.Tensor) -> torch.Tensor:
    if not torch.compiler.is_compiling() and (out := residuals.take(self, hidden_states)) is not None:
        return out
    out = functions.rmsnorm(hidden_states, self.weight, None, self.variance_epsilon)
    return out.to(torch.promote_types(out.dtype, self.weight.dtype))  # as the product above promotes


# In float32 with one more than the weight, rounded after it.
_GEMMA_NORM = "072c442d528d274c"


# The norm in the one above.
_GEMMA_INNER_NORM = "80a7328746bf45b4"


def _gemma_norm(self, x: torch.Tensor) -> torch.Tensor:
    return functions.rmsnorm(x, self.weight, None, self.eps, 1.0)


def _is_layer_norm(module: nn.Module, model: nn.Module) -> bool:
    return type(module) is nn.LayerNorm and len(module.normalized_shape) == 1


def _layer_norm(self, input: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled(input.device.type):
        return nn.LayerNorm.forward(self, input)  # autocast makes it float32, its output too
    return functions.layernorm(input, self.weight, self.bias, self.eps)


# Embeddings


def _is_embedding(module: nn.Module, model: nn.Module) -> bool:
    return type(module) is nn.Embedding and _gathers(module)


def _gathers(module: Any) -> bool:
    """Whether an embedding does no more than gather rows of a dtype that we take."""
    return (
        module.max_norm is None
        and not (module.scale_grad_by_freq or module.sparse)
        and module.weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
    )


def _embedding(self, input: torch.Tensor) -> torch.Tensor:
    # Only its gradient is ours; parameters that ranks share (tensor parallelism) are torch's.
    if not (torch.is_grad_enabled() and self.weight.requires_grad) or type(self.weight) is not nn.Parameter:
        return nn.Embedding.forward(self, input)
    return embedding(input, self.weight, self.padding_idx)


# Gemma's: what the above gives, times `embed_scale`.
_SCALED_EMBEDDING = "d7afd985f430fa7f"


def _scaled_embedding(self, input_ids: torch.Tensor) -> torch.Tensor:
    return _embedding(self, input_ids) * self.embed_scale.to(self.weight.dtype)


def _is_scaled_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and type(module).__mro__[1] is nn.Embedding and _gathers(module)


# Gated MLPs


# `down(act(gate(x)) * up(x))`
_MLP = "d9e9fc4111026fc2"


def _silu_mlp(self, x: torch.Tensor) -> torch.Tensor:
    layers = _projections(self)
    if torch.is_grad_enabled() and _plain(x, *layers):
        return silu_mlp(x, *(layer.weight for layer in layers))
    return self.down_proj(functions.silu_mul(self.gate_proj(x), self.up_proj(x)))


def _projections(mlp: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    return mlp.gate_proj, mlp.up_proj, mlp.down_proj


def _plain(x: torch.Tensor, *layers: Any) -> bool:
    """Whether linear layers are nothing but products with their weights, and nobody looks at each of them."""
    return (
        not torch.compiler.is_compiling()
        and not transformed()
        and not torch.is_autocast_enabled(x.device.type)
        and type(x) is torch.Tensor
        and all(
            type(layer) is nn.Linear
            and layer._parameters["bias"] is None
            and type(layer.weight) is nn.Parameter
            and layer.weight.dtype == x.dtype
            and "forward" not in vars(layer)
            and not _hooked(layer)
            for layer in layers
        )
    )


def _gelu_mlp(approximate: str) -> Callable[..., torch.Tensor]:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functions.gelu_mul(self.gate_proj(x), self.up_proj(x), approximate))

    return forward


def _is_silu(activation: Any) -> bool:
    return type(activation).__name__ in ("SiLU", "SiLUActivation")


# Activations


# A module that calls its `act`.
_ACTIVATION = "bf403fa7538eaf8a"


def _gelu(approximate: str) -> Callable[..., torch.Tensor]:
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functions.gelu(input, approximate)

    return forward


def _is_gelu(activation: Any, approximate: str) -> bool:
    """Whether a module is torch's or Hugging Face's GELU in this approximation."""
    if type(activation) is nn.GELU:
        return activation.approximate == approximate
    act = getattr(activation, "act", None)
    if written(type(activation).forward) != _ACTIVATION:
        return False
    if isinstance(act, partial):
        return act.func is nn.functional.gelu and not act.args and act.keywords == {"approximate": approximate}
    return act is nn.functional.gelu and approximate == "none"


def _gelus(approximate: str) -> tuple[Form, Form]:
    """GELU in one approximation: gating an MLP, and alone."""
    return (
        _form("gelu_mul", _MLP, _gelu_mlp(approximate), lambda m: _is_gelu(m.act_fn, approximate), "act_fn"),
        Form("gelu", lambda m, _: _is_gelu(m, approximate), lambda original: _gelu(approximate)),
    )


# The residual add before a norm


# Llama's: attention and MLP, each behind its norm and added to the residual stream.
_LAYER = "bb4a23cffe10017e"


def _layer(
    self,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    normed, residual = _norm_of_stream(self.input_layernorm, hidden_states)
    attended, _ = self.self_attn(
        hidden_states=normed,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    norm = self.post_attention_layernorm
    if residual.dtype == attended.dtype == norm.weight.dtype and not _hooked(norm):
        hidden_states, residual = functions.add_rmsnorm(attended, residual, norm.weight, None, norm.variance_epsilon)
    else:  # mixed dtypes promote step by step in the original; hooks want the module called
        residual = residual + attended
        hidden_states = norm(residual)
    out, norm = self.mlp(hidden_states), None if torch.compiler.is_compiling() else residuals.norm_after(self)
    if norm is None or not _goes_on(norm, out) or not _goes_on(norm, residual):
        return residual + out
    return residuals.add(out, residual, norm)


def _norm_of_stream(norm: Any, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of a residual stream, and the stream, as it goes on."""
    if _goes_on(norm, stream):
        normed = residuals.take(norm, stream)
        if normed is not None:
            return normed, stream
        return norm_of_stream(stream, norm.weight, norm.variance_epsilon)
    return norm(stream), stream


def _goes_on(norm: Any, stream: torch.Tensor) -> bool:
    """Whether the norm of a residual stream may be one node with what else becomes of the stream."""
    return (
        type(norm).forward is _norm
        and torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not transformed()
        and type(stream) is torch.Tensor
        and type(norm.weight) is nn.Parameter
        and stream.dtype == norm.weight.dtype
        and stream.device == norm.weight.device
        and "forward" not in vars(norm)
        and not _hooked(norm)
    )


def _hands_on(forward: Any) -> bool:
    """Whether a model's ``forward`` does nothing with its layers' outputs but to give them to the next, then a norm."""
    body = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))).body[0].body
    for loop, after in itertools.pairwise(body):
        if isinstance(loop, ast.For) and "self.layers[" in ast.unparse(loop.iter) and len(loop.body) == 1:
            step = ast.unparse(loop.body[0]).replace("\n", "")
            alone = step.startswith("hidden_states = decoder_layer(hidden_states,") and not loop.orelse
            return alone and ast.unparse(after) == "hidden_states = self.norm(hidden_states)"
    return False


def _norms_after(model: Any) -> dict[int, nn.Module]:
    """Of each layer that nobody looks at: the norm that reads its output, the next layer's or the model's."""
    if not torch.is_grad_enabled() or transformed() or nn.modules.module._has_any_global_hook():
        return {}
    layers = list(model.layers)[: model.config.num_hidden_layers]
    quiet = [
        inspect.unwrap(type(m).forward) is _layer  # checkpointing wraps it
        and "forward" not in vars(m)
        and not getattr(m, "gradient_checkpointing", False)  # its second forward is alone
        and not _hooked(m)
        for m in layers
    ]
    norms = [m.input_layernorm if q else None for m, q in zip(layers, quiet, strict=True)]
    pairs = zip(layers, quiet, [*norms[1:], model.norm], strict=True)
    return {id(layer): norm for layer, q, norm in pairs if q and norm is not None}


def _llama_norm_follows(module: nn.Module) -> bool:
    norm = module.get_submodule("post_attention_layernorm")
    return "forward" not in vars(norm) and written(type(norm).forward) == _NORM


# Rotary embeddings


# The two halves of the last dim, the second negated, in the other order.
_ROTATE_HALF = "a68a16140f32af85"


# `x * cos + rotate_half(x) * sin` for q and k.
_ROTATE = "6e071d28b2d6c73c"


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = _angles(cos), _angles(sin)
    if unsqueeze_dim == 2:
        return functions.rope(q, cos, sin), functions.rope(k, cos, sin)
    # Heads come before positions, as a view of memory in which they come after.
    q, k = (functions.rope(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))
    return q, k


def _angles(table: torch.Tensor) -> torch.Tensor:
    """One of the two halves, which are the same; of all sequences where they share it."""
    table = table[..., : table.shape[-1] // 2]
    return table[0] if table.shape[0] == 1 else table


def _rotates(module: nn.Module, model: nn.Module) -> bool:
    """Whether a ``forward`` calls the function above, in a model whose angles come in two equal halves."""
    forward = type(module).forward
    if not isinstance(forward, types.FunctionType) or "apply_rotary_pos_emb" not in forward.__code__.co_names:
        return False
    rotate, half = (forward.__globals__.get(name) for name in ("apply_rotary_pos_emb", "rotate_half"))
    angles = [type(m).forward for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")]
    return (
        written(rotate) == _ROTATE
        and written(half) == _ROTATE_HALF
        and bool(angles)
        and all("emb = torch.cat((freqs, freqs), dim=-1)" in inspect.getsource(inspect.unwrap(a)) for a in angles)
    )


def _rotating(original: type[nn.Module]) -> Callable[..., Any]:
    forward = _rebound(original.forward, apply_rotary_pos_emb=_rotate)
    if not _projects(original.forward):
        return forward
    turned = _rebound(original.forward, apply_rotary_pos_emb=_turned) if _rotates_at_once(original.forward) else None
    return _projecting(forward, turned)


def _turned(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In place of a rotation of heads that are turned already."""
    return q, k


def _held(forward: Any) -> bool:
    """Whether :func:`_rebound` reaches a function through its decorators."""
    while (inner := getattr(forward, "__wrapped__", None)) is not None:
        cells = forward.__closure__ or () if isinstance(forward, types.FunctionType) else ()
        if not any(cell.cell_contents is inner for cell in cells):
            return False
        forward = inner
    return isinstance(forward, types.FunctionType)


def _rebound(forward: Any, **names: Any) -> Callable[..., Any]:
    """A class's own ``forward``, in which these names mean ours; decorators hold it in a closure."""
    inner, closure = getattr(forward, "__wrapped__", None), forward.__closure__
    if inner is not None:
        within = _rebound(inner, **names)
        closure = tuple(types.CellType(within) if c.cell_contents is inner else c for c in closure)
        names = {}
    # Without a name: Dynamo would look names up in the module of that name.
    scope = {k: v for k, v in forward.__globals__.items() if k != "__name__"} | names
    ours = types.FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, closure)
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


# The causal mask


_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask")
_OWN_POSITIONS = "position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens"
_SAY_POSITIONS = ("attention_mask", "position_ids", "past_key_values")


def _counts_positions(module: nn.Module, model: nn.Module) -> bool:
    """Whether a ``forward`` counts positions itself where it is given none, and makes its masks of them."""
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, types.FunctionType) or not set(_MASKS) & set(forward.__code__.co_names):
        return False
    tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    masks = [forward.__globals__[name] for name in _MASKS if name in forward.__code__.co_names]
    return (
        _held(type(module).forward)
        and _OWN_POSITIONS in map(ast.unparse, ast.walk(tree))
        and set(_SAY_POSITIONS) <= set(inspect.signature(forward).parameters)
        and all(inspect.signature(mask).parameters["position_ids"].default is None for mask in masks)
    )


def _counting(original: type[nn.Module]) -> Callable[..., Any]:
    """Masks without a look at positions that the model has counted: it would wait for the GPU, to find one sequence."""
    plain = original.forward
    forward = inspect.unwrap(plain)
    masks = {name: _without_positions(forward.__globals__[name]) for name in _MASKS if name in forward.__globals__}
    counted, names = _rebound(plain, **masks), list(inspect.signature(plain).parameters)[1:]
    hands_on = _hands_on(plain)

    @wraps(plain)
    def counting(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        own = all(given.get(name) is None for name in _SAY_POSITIONS)
        run = counted if own else plain
        if not hands_on or torch.compiler.is_compiling():
            return run(self, *args, **kwargs)
        with residuals.followed(_norms_after(self)):
            return run(self, *args, **kwargs)

    return counting


def _without_positions(mask: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, position_ids=None, **kwargs: mask(*args, **kwargs)


# Queries, keys and values


_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def _projects(forward: Any) -> bool:
    """Whether a ``forward`` hands its input to each projection once, and otherwise only reads the module."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    nodes = list(ast.walk(tree))
    made = [ast.unparse(n) for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func).endswith("_proj")]
    named = [n.attr for n in nodes if isinstance(n, ast.Attribute) and n.attr in _PROJECTIONS]
    stored = [n for n in nodes if isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, ast.Store | ast.Del)]
    kept = all(isinstance(n, ast.Name) and n.id not in ("self", "hidden_states") for n in stored)
    return (
        sorted(named) == sorted(_PROJECTIONS)
        and all(f"self.{name}(hidden_states)" in made for name in _PROJECTIONS)
        and kept
        and "super" not in forward.__code__.co_names
    )


# Heads are rotated as they come out of their projections.
_AT_ONCE = """
query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
cos, sin = position_embeddings
query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
"""


def _rotates_at_once(forward: Any) -> bool:
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    body = [ast.unparse(statement) for statement in tree.body[0].body]
    wanted = _AT_ONCE.strip().splitlines()
    return "hidden_shape = (*input_shape, -1, self.head_dim)" in body and any(
        body[i : i + len(wanted)] == wanted for i in range(len(body))
    )


class _Projected:
    """An attention whose projections have been computed: calls of them give the results."""

    def __init__(self, module: nn.Module, results: dict[str, torch.Tensor]) -> None:
        self._module = module
        for name, result in results.items():
            setattr(self, name, lambda _, result=result: result)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _projecting(forward: Any, turned: Any) -> Callable[..., Any]:
    """Computes the projections as one node of autograd, then the rest of a ``forward``.

    Args:
        forward: of the attention.
        turned: the same, for projections that are rotated already; None where something lies between.
    """

    @wraps(forward)
    def projecting(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        layers = [getattr(self, name) for name in _PROJECTIONS]
        if torch.is_grad_enabled() and _plain(hidden_states, *layers):
            weights, tables = [layer.weight for layer in layers], kwargs.get("position_embeddings")
            run, results = forward, tuple[torch.Tensor, ...]()
            if turned is None or tables is None:
                results = projections(hidden_states, *weights)
            else:
                run, (cos, sin) = turned, tables
                results = rotated_projections(hidden_states, weights, _angles(cos), _angles(sin), self.head_dim)
            return run(_Projected(self, dict(zip(_PROJECTIONS, results, strict=True))), hidden_states, *args, **kwargs)
        return forward(self, hidden_states, *args, **kwargs)

    return projecting


# Attention whose weights are written out


# BERT's: the softmax in the dtype of the scores.
_ATTENTION = "9e835ca230ffc68a"


# Llama's: keys and values repeated for their group, the softmax in float32.
_GROUPED_ATTENTION = "a0a9be62b4bcf53a"


def _attends_eagerly(module: nn.Module, model: nn.Module) -> bool:
    forward = type(module).forward
    if not isinstance(forward, types.FunctionType) or "eager_attention_forward" not in forward.__code__.co_names:
        return False
    found = written(forward.__globals__.get("eager_attention_forward"))
    eager = getattr(getattr(module, "config", None), "_attn_implementation", None) == "eager"
    return eager and found in (_ATTENTION, _GROUPED_ATTENTION)


def _attending(original: type[nn.Module]) -> Callable[..., Any]:
    forward = original.forward
    plain = forward.__globals__["eager_attention_forward"]  # type: ignore[index]
    repeat = plain.__globals__["repeat_kv"] if written(plain) == _GROUPED_ATTENTION else None

    def eager_attention_forward(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.is_autocast_enabled(query.device.type):  # it makes a softmax float32, its output too
            return plain(module, query, key, value, attention_mask, scaling, dropout, **kwargs)
        if repeat is not None:
            key, value = (repeat(t, module.num_key_value_groups) for t in (key, value))
        scores = torch.matmul(query, key.transpose(2, 3)) * (query.size(-1) ** -0.5 if scaling is None else scaling)
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = functions.softmax(scores).to(query.dtype)
        weights = nn.functional.dropout(weights, p=dropout, training=module.training)
        return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights

    return _rebound(forward, eager_attention_forward=eager_attention_forward)


# The loss


# Hidden states, their logits, the loss of these; in two ways to say which logits are wanted.
_CAUSAL_LM = ("251f057fcb6bc2ca", "0800d02eb9d8daa4")


def _next_token_loss(module: nn.Module, model: nn.Module) -> bool:
    """Whether the model's loss is the plain one of the next token, through a plain linear head."""
    return (
        written(type(module).forward) in _CAUSAL_LM
        and getattr(module.loss_function, "__name__", "") == "ForCausalLMLoss"
        and type(module.lm_head) is nn.Linear
    )


def _causal_lm(original: type[nn.Module]) -> Callable[..., Any]:
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.utils import can_return_tuple

    plain = original.forward

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        common = {
            "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
            "past_key_values": past_key_values, "inputs_embeds": inputs_embeds, "use_cache": use_cache, **kwargs,
        }  # fmt: skip
        whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
        if labels is None or not self.training or not whole or _hooked(self.lm_head):
            return plain(self, labels=labels, logits_to_keep=logits_to_keep, **common)
        outputs = self.model(**common)
        hidden, head, logits = outputs.last_hidden_state, self.lm_head, None
        if hidden.dtype == head.weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
            loss = _loss_of_hidden(head, hidden, labels, _chunk_rows(self, hidden), **kwargs)
        else:  # the product is in another dtype
            logits = head(hidden)
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    return can_return_tuple(forward)


def _chunk_rows(model: Any, hidden: torch.Tensor) -> int | None:
    """Rows whose logits take half of the memory that the gated MLPs did not; None where they saved none."""
    if torch.compiler.is_compiling() or any(getattr(m, "gradient_checkpointing", False) for m in model.modules()):
        return None
    mlps: list[Any] = [m for m in model.modules() if type(m).forward is _silu_mlp and _plain(hidden, *_projections(m))]
    # Without a gradient of its own a projection keeps nothing in either form.
    spare = sum(m.down_proj.in_features for m in mlps if m.down_proj.weight.requires_grad)
    spare = spare * math.prod(hidden.shape[:-1]) // 2
    rows = min(spare // model.lm_head.out_features, chunks.FULL) // chunks.TILE * chunks.TILE
    return rows if rows * model.lm_head.out_features > chunks.SHARE * hidden.numel() else None


def _loss_of_hidden(
    head: nn.Linear,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    chunk_rows: int | None,
    num_items_in_batch: torch.Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """``ForCausalLMLoss`` of ``head(hidden)``, whose logits are never held at once."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    reduction = "mean" if num_items_in_batch is None else "sum"
    # In the shape of the hidden states: as one line of rows, positions that are sharded would have to be gathered.
    target = shift_labels.view(hidden.shape[:-1]).to(hidden.device)
    loss = linear_cross_entropy(
        hidden, head.weight, target, head.bias, ignore_index=ignore_index, reduction=reduction, chunk_rows=chunk_rows
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


# Of these a module has one, the first.
FORMS = (
    _form("rmsnorm", _NORM, _norm),
    _form("rmsnorm", _GEMMA_NORM, _gemma_norm, lambda m: written(type(m)._norm) == _GEMMA_INNER_NORM),
    Form("layernorm", _is_layer_norm, lambda original: _layer_norm),
    Form("embedding", _is_embedding, lambda original: _embedding),
    _form("embedding", _SCALED_EMBEDDING, _scaled_embedding, _is_scaled_embedding),
    _form("silu_mul", _MLP, _silu_mlp, lambda m: _is_silu(m.act_fn), "act_fn", ("gate_proj", "up_proj")),
    *_gelus("tanh"),
    *_gelus("none"),
    _form("add_rmsnorm", _LAYER, _layer, _llama_norm_follows),
    Form("rope", _rotates, _rotating, together=lambda m: _PROJECTIONS if _projects(type(m).forward) else ()),
    Form("attention_mask", _counts_positions, _counting),
    Form("linear_cross_entropy", _next_token_loss, _causal_lm),
)
# And this one besides: an attention may rotate, too.
ATTENTION = Form("softmax", _attends_eagerly, _attending)
