"""Language models: the loss of tokens straight from the hidden states, without their logits, or from these.

Models whose ``forward`` is Llama's run one of ours, which compilers follow. Others that pass the head's product to a
loss, of the next token (Gemma), of masked ones (BERT) or of a translation (T5, Whisper), run their own, with
:class:`~cute_ops_torch.huggingface.lazy_logits.LazyLogits` in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn

from cute_ops_torch import functions
from cute_ops_torch.composite.linear_cross_entropy import loss_of_head
from cute_ops_torch.huggingface import mlp, traced
from cute_ops_torch.huggingface.attention import Bypassed
from cute_ops_torch.huggingface.bypass import calls, is_exporting, is_plain_linear, reads, takes
from cute_ops_torch.huggingface.counted_rows import CountedRows
from cute_ops_torch.huggingface.lazy_logits import PLAIN, Caps, LazyLogits, realised
from cute_ops_torch.huggingface.match import Forward, Replacement, innermost, rebind
from cute_ops_torch.huggingface.source import Parameters, definition, only_reads, source_digest
from cute_ops_torch.library.row_chunks import rows_in_saved

Tensor = torch.Tensor
# `forward` of LlamaForCausalLM, with either way to choose the positions that get logits.
_CAUSAL_LM = ("d98f8281207965a0", "bb9146bdb775d911")


def _make_forward(original: Any, *, keeps_logits: bool = False) -> Forward:
    """Its arguments and the fields of its output have the names that they have in ``original``.

    With ``keeps_logits`` the model's output has its logits in training, too.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss  # lazily: patching is imported without transformers, too

    computes_the_same = reads(ForCausalLMLoss)
    parameters, tree = Parameters.of(original), definition(original)
    labels_name, keep_name = parameters.used
    output = original.__globals__[tree.body[-1].value.func.id]  # type: ignore[union-attr]  # of `return Output(...)`

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(args, kwargs)
        if given is None:
            return NotImplemented  # raises
        labels, keep = given.pop(labels_name), given.pop(keep_name)
        keeps_all = isinstance(keep, int) and keep == 0
        known = self.loss_function is ForCausalLMLoss and computes_the_same()
        if labels is None or not (self.training and keeps_all and known and _has_plain_head(self, self.lm_head)):
            return NotImplemented
        counted = CountedRows(labels)
        outputs = self.model(**given)  # in which a hook may change the head
        hidden, head, logits = outputs.last_hidden_state, self.lm_head, None
        others = {name: value for name, value in kwargs.items() if name not in parameters.names}
        if not (_has_plain_head(self, head) and _multiplies(hidden, head)):
            logits = head(hidden)
            loss = self.loss_function(
                logits=logits, **{labels_name: labels}, vocab_size=self.config.vocab_size, **others
            )
        elif keeps_logits:
            logits = head(hidden)
            loss = _loss_of_logits(logits, labels, **others)
        else:
            rows = _chunk_rows(self, head, hidden)
            loss = _next_token_loss(head, hidden, labels, rows, counted, bias=head.bias, **others)
        return output(loss=loss, logits=logits, **{name: getattr(outputs, name) for name in parameters.copied})

    return forward


def _make_lazy(original: Any, *, keeps_logits: bool = False) -> Forward:
    """``original`` on logits that only the loss computes; with ``keeps_logits`` it returns them, too."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    computes_the_same, asks, find_head = reads(ForCausalLMLoss), _asks(original), _HeadFinder()
    names, while_traced = Parameters.of(original).names, _with_functions(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        within = isinstance(self, Bypassed)  # a model around this one has the head's product go to its own loss
        path = find_head(self) if self.training and not within else ""
        function: Any = _loss_function(self) if asks and path else None
        if not path or (asks and function not in LOSS_MAPPING.values()):
            return NotImplemented
        head, counted = self.get_submodule(path), _counted(names, args, kwargs)
        if not is_plain_linear(head):
            return NotImplemented

        def product(hidden: Tensor) -> Any:
            if not (is_plain_linear(head) and _multiplies(hidden, head)):
                return head(hidden)
            return LazyLogits(hidden, head, lambda: head(hidden), of_logits if keeps_logits else of_hidden)

        def of_hidden(logits: LazyLogits, target: Tensor, **options: Any) -> Tensor | None:
            rows, caps = _chunk_rows(self, head, logits.hidden), logits.caps
            if caps is None:
                return None
            hidden, target = counted.of(target, logits.hidden, target, options["ignore_index"], options["reduction"])
            options |= {"chunk_rows": rows, "softcap": caps.softcap, "logit_scale": caps.scale}
            return loss_of_head(hidden, head.weight, target, logits.bias, skip_ignored=_counts_in_graph(), **options)

        def of_logits(logits: LazyLogits, target: Tensor, **options: Any) -> Tensor | None:
            real = logits.narrow()
            return functions.cross_entropy(real, target, **options) if takes(real) else None

        def loss(logits: Any, labels: Tensor, *sizes: Any, **options: Any) -> Tensor:
            caps = logits.caps if isinstance(logits, LazyLogits) and not keeps_logits else None
            width = sizes or (options.get("vocab_size"),)
            if caps is not None and logits.shape == (*labels.shape, *width):
                rows = _chunk_rows(self, head, logits.hidden)
                return _next_token_loss(
                    head, logits.hidden, labels, rows, counted, caps=caps, bias=logits.bias, **options
                )
            return function(logits, labels, *sizes, **options)  # type: ignore[no-any-return]

        parts = {path.partition(".")[0]: _stand_in(self, path, product)}
        if function is ForCausalLMLoss and computes_the_same():
            parts["loss_function"] = loss
        run = while_traced if torch.compiler.is_compiling() else original
        out = run(Bypassed(self, parts), *args, **kwargs)
        return _without_lazy(out, keeps_logits)

    return forward


def _with_functions(original: Any) -> Forward:
    """A ``forward`` whose ``CrossEntropyLoss`` calls the function, in which logits have a say. Dynamo writes torch's
    own module into its graph.
    """
    scope = original.__globals__
    given: dict[str, Any] = {"CrossEntropyLoss": _entropy, "nn": _ModulesWithFunctions()}
    names = [name for name in ("CrossEntropyLoss", "nn") if scope.get(name) in (nn.CrossEntropyLoss, nn)]
    return rebind(original, **{name: given[name] for name in names}) if names else original


def _entropy(*given: Any, **options: Any) -> Callable[[Any, Tensor], Tensor]:
    return lambda logits, target: nn.functional.cross_entropy(logits, target, *given, **options)


class _ModulesWithFunctions:
    """``torch.nn`` with the function in place of its module of cross entropy."""

    CrossEntropyLoss = staticmethod(_entropy)

    def __getattr__(self, name: str) -> Any:
        return getattr(nn, name)


def _loss_function(model: Any) -> Any:
    """A model's ``loss_function``, by a property that may log a warning, at which Dynamo would end its graph."""
    from transformers.loss.loss_utils import LOSS_MAPPING
    from transformers.modeling_utils import PreTrainedModel  # Dynamo of PyTorch 2.11 knows no lazy module

    own = type(model).loss_function is PreTrainedModel.loss_function and not hasattr(model, "_loss_function")
    if not (own and torch.compiler.is_compiling()):
        return model.loss_function
    return LOSS_MAPPING.get(getattr(model, "loss_type", None), LOSS_MAPPING["ForCausalLM"])


def _counted(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> CountedRows:
    """The labels of a call."""
    return CountedRows(kwargs.get("labels", dict(zip(names, args, strict=False)).get("labels")))


class _HeadFinder:
    """Finds the path of a model's head in its modules; empty where it is none of them. The last one is tried first."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, model: Any) -> str:
        if torch.compiler.is_compiling():  # a graph would be guarded by the last path, and compiled again
            return _head_of(model)
        head, found = model.get_output_embeddings(), model
        for name in self._last.split("."):
            found = getattr(found, name, None)
        if found is None or found is not head:
            self._last = _head_of(model)
        return self._last


def _stand_in(module: Any, path: str, product: Callable[[Tensor], Any]) -> Any:
    """The stand-in for a module's child on the ``path`` to the head, whose products go to ``product``."""
    name, _, rest = path.partition(".")
    child = getattr(module, name)
    if not rest:
        return _Head(child, product)

    def call(*args: Any, **kwargs: Any) -> Any:
        forward: Any = getattr(type(child), "forward", None)
        if not calls(child, forward):
            return child(*args, **kwargs)
        return forward(Bypassed(child, {rest.partition(".")[0]: _stand_in(child, rest, product)}), *args, **kwargs)

    return _Head(child, call)


class _Head:
    """Stands in for a head, or for a module around it: what it is called with goes to ``call``."""

    def __init__(self, head: nn.Module, call: Callable[..., Any]) -> None:
        self._head, self._call = head, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)


def _without_lazy(out: Any, keeps_logits: bool) -> Any:
    """A model's output, in which logits that nothing has computed are None, unless they are to be kept or there is no
    loss; those of a tuple are computed. An output of a model within (BLIP-2) has no others.
    """
    from transformers.utils import ModelOutput

    def changed(out: Any) -> Any:
        return type(out)(**{name: changed(each) if within(each) else change(each) for name, each in out.items()})

    def within(out: Any) -> bool:
        return isinstance(out, ModelOutput) and any(isinstance(x, LazyLogits) or within(x) for x in out.values())

    if not within(out):
        return realised(out)
    change = realised if keeps_logits or out.get("loss") is None else _if_computed
    return changed(out)


def _if_computed(value: Any) -> Any:
    return None if isinstance(value, LazyLogits) and not value.exist else realised(value)


def _head_of(model: Any) -> str:
    """The path of the linear layer that makes a model's logits; empty where it is none of the model's modules."""
    head = model.get_output_embeddings()
    return next((name for name, child in model.named_modules() if child is head), "")


def _passes_logits_on(model: Any) -> bool:
    """Whether a model's ``forward``, with those of the modules around its head, assigns to no attribute: what takes the
    place of its modules would have it.
    """
    path = _head_of(model).split(".")
    around = [model.get_submodule(".".join(path[:i])) for i in range(len(path))]
    return path != [""] and all(only_reads(innermost(type(module).forward)) for module in around)


def _has_plain_head(model: Any, head: Any) -> bool:
    """Whether a model's logits are its hidden states times a matrix: no adapter, hook or other module sees them."""
    return is_plain_linear(head) and head.weight.shape[0] == model.config.vocab_size


def _multiplies(hidden: Tensor, head: nn.Linear) -> bool:
    """Whether our op takes the hidden states and the head as they are: other logits would have another dtype."""
    given = [t for t in (hidden, head.weight, head.bias) if t is not None]
    alike = all(t.dtype == hidden.dtype for t in given)
    return alike and takes(*given) and not torch.is_autocast_enabled(hidden.device.type)


def _next_token_loss(
    head: nn.Linear, hidden: Tensor, labels: Tensor, chunk_rows: int | None, counted: CountedRows, *,
    caps: Caps = PLAIN, bias: Tensor | None, num_items_in_batch: Tensor | int | float | None = None,
    ignore_index: int = -100, shift_labels: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """``ForCausalLMLoss`` of ``hidden @ head.weight.T + bias``, a chunk of logits at a time."""
    target = _next_tokens(labels, shift_labels, ignore_index, hidden)
    count, reduction = num_items_in_batch, "mean" if num_items_in_batch is None else "sum"
    if shift_labels is None:
        hidden, target = counted.of(labels, hidden, target, ignore_index, reduction)
    if isinstance(count, int | float):
        count = hidden.new_full((), count, dtype=torch.float32 if isinstance(count, float) else torch.int64)
    divisor = None
    # A trainer's number is in float32 if it has divided that by its ranks.
    if isinstance(count, Tensor) and count.ndim == 0 and count.dtype in _COUNTS:
        divisor, count = count.to(hidden.device), None
    loss = loss_of_head(
        hidden, head.weight, target, bias, ignore_index=ignore_index, reduction=reduction, chunk_rows=chunk_rows,
        softcap=caps.softcap, logit_scale=caps.scale, count=divisor, skip_ignored=_counts_in_graph(),
    )  # fmt: skip
    return _divided(loss, count)


_COUNTS = (torch.int64, torch.int32, torch.float32)


def _counts_in_graph() -> bool:
    """Whether a program is being compiled that can wait for the GPU: one for another process might not."""
    return torch.compiler.is_compiling() and not is_exporting()


def _loss_of_logits(
    logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | float | None = None, ignore_index: int = -100,
    shift_labels: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """``ForCausalLMLoss`` of logits, which need no copy in float32."""
    target = _next_tokens(labels, shift_labels, ignore_index, logits)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = functions.cross_entropy(logits, target, ignore_index=ignore_index, reduction=reduction)
    return _divided(loss, num_items_in_batch)


def _next_tokens(labels: Tensor, shift_labels: Tensor | None, ignore_index: int, hidden: Tensor) -> Tensor:
    """The label that each position predicts."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    # In the leading shape of the hidden states: flat rows of a sharded sequence would have to be gathered.
    return shift_labels.view(hidden.shape[:-1]).to(hidden.device)


def _divided(loss: Tensor, count: Tensor | int | float | None) -> Tensor:
    count = count.to(loss.device) if isinstance(count, Tensor) else count
    return loss if count is None else loss / count


def _chunk_rows(model: Any, head: nn.Linear, hidden: Tensor) -> int | None:
    """Rows whose logits fit half of the memory that the gated MLPs have saved; None where that is too little, or where
    sizes are symbols to a compiler.
    """
    if torch.compiler.is_dynamo_compiling():
        from torch._dynamo.comptime import comptime  # start-up time; torch.compile has imported it

        comptime(_note_rows)
        return traced.noted() or None
    if torch.compiler.is_compiling():
        return None
    return _rows(model, head, hidden, lambda module: mlp.drops_product(module, hidden))


def _note_rows(context: Any) -> None:
    model, head = (traced.module_of(context, name) for name in ("model", "head"))
    hidden = context.get_local("hidden").as_fake()
    known = None not in (model, head) and all(type(size) is int for size in hidden.shape)
    drops = lambda module: mlp.drops_product_in_graph(module, hidden.dtype)  # noqa: E731
    traced.note((_rows(model, head, hidden, drops) if known else None) or 0)


def _rows(model: Any, head: nn.Linear, hidden: Tensor, drops_product: Callable[[Any], bool]) -> int | None:
    modules: list[Any] = list(model.modules())
    if any(getattr(m, "gradient_checkpointing", False) for m in modules):
        return None
    # A frozen down projection would not have kept the product either.
    features = sum(m.down_proj.in_features for m in modules if drops_product(m) and m.down_proj.weight.requires_grad)
    return rows_in_saved(features * math.prod(hidden.shape[:-1]), hidden, head.weight)


def _is_llama_s(module: nn.Module, model: nn.Module) -> bool:
    """Whether a model's loss is Hugging Face's of the next token, through a plain linear head, as Llama computes it."""
    return source_digest(type(module).forward) in _CAUSAL_LM and _predicts_next(module)


def _is_another_s(module: Any, model: nn.Module) -> bool:
    """Whether a model passes its head's product to a loss in any other way."""
    if not hasattr(module, "get_output_embeddings") or "labels" not in signature(type(module).forward).parameters:
        return False
    return type(module.get_output_embeddings()) is nn.Linear and asks_known_loss(module) and _passes_logits_on(module)


def asks_known_loss(model: Any) -> bool:
    """Whether a model's ``forward`` computes its loss itself, or by one of Hugging Face's functions."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    forward: Any = innermost(type(model).forward)
    return forward is not None and (not _asks(forward) or model.loss_function in LOSS_MAPPING.values())


def _asks(forward: Any) -> bool:
    return "loss_function" in forward.__code__.co_names


def _predicts_next(module: Any) -> bool:
    # `loss_function` is asked for last: it is a property that logs a warning in modules without a loss.
    return (
        type(module.get_output_embeddings()) is nn.Linear
        and getattr(getattr(module, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    )


REPLACEMENTS = (
    Replacement("linear_cross_entropy", _is_llama_s, _make_forward),
    Replacement("linear_cross_entropy", _is_another_s, _make_lazy),
)
WITH_LOGITS = (
    Replacement("cross_entropy", _is_llama_s, partial(_make_forward, keeps_logits=True)),
    Replacement("cross_entropy", _is_another_s, partial(_make_lazy, keeps_logits=True)),
)
