"""``patch(model)``: run a Hugging Face model's modules on our ops.

Modules are recognised by the source of their ``forward`` (:mod:`cute_ops_torch.huggingface.match`). A replaced module
keeps its parameters, buffers, hooks and names: only its class becomes a subclass with another ``forward``.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

from torch import nn

from cute_ops.errors import meant, suggesting
from cute_ops_torch.huggingface import (
    activated_norm,
    attention,
    captures,
    convolutions,
    decoder,
    embedding,
    experts,
    gated_norm,
    layer,
    loss,
    mlp,
    norm,
    plain_mlp,
    t5_mlp,
    traced,
)
from cute_ops_torch.huggingface.attention_function import ATTENTION, MASKS, register_attention
from cute_ops_torch.huggingface.balance import BALANCE
from cute_ops_torch.huggingface.bypass import is_plain_linear, or_original
from cute_ops_torch.huggingface.eager_attention import EAGER_ATTENTION
from cute_ops_torch.huggingface.match import Replacement, hands_on, innermost
from cute_ops_torch.huggingface.meaning import replacement_of
from cute_ops_torch.huggingface.multi_head import MULTI_HEAD
from cute_ops_torch.huggingface.packed_weights import pack
from cute_ops_torch.huggingface.report import Patched, Replaced, describe
from cute_ops_torch.huggingface.shared_input import SHARED
from cute_ops_torch.huggingface.state_space import CONVOLUTION, SCAN
from cute_ops_torch.huggingface.sums import SUMS
from cute_ops_torch.huggingface.trial import same_everywhere
from cute_ops_torch.huggingface.unreplaced import UNWANTED, find_left, is_causal

log = logging.getLogger("cute_ops")
# A module gets the first one that matches, and all of those of functions that it calls.
_REPLACEMENTS = (
    *norm.REPLACEMENTS, *embedding.REPLACEMENTS, *mlp.REPLACEMENTS, *layer.REPLACEMENTS, *attention.REPLACEMENTS,
    *decoder.REPLACEMENTS, *plain_mlp.REPLACEMENTS, *t5_mlp.REPLACEMENTS, *activated_norm.REPLACEMENTS,
    *convolutions.REPLACEMENTS, *experts.REPLACEMENTS, MULTI_HEAD,
)  # fmt: skip
_OF_ALL = (ATTENTION, MASKS, EAGER_ATTENTION, BALANCE, CONVOLUTION, SCAN, activated_norm.ACTIVATED)
_WHOLE = Replacement("", lambda module, model: module is model or _holds_layers(module), traced.settling)
_OF_FUNCTIONS = (*_OF_ALL, *SUMS, SHARED, _WHOLE)
# The ops that modules run.
RUN = frozenset({
    "add_layernorm", "add_rmsnorm", "attention", "attention_mask", "causal_conv1d", "cross_entropy", "embedding",
    "expert_balance", "fused", "geglu", "gelu", "gelu_mul", "group_norm", "layernorm", "linear",
    "linear_cross_entropy", "mlp", "permute_tokens", "relu2", "rmsnorm", "rope", "silu_mul", "softmax", "swiglu",
})  # fmt: skip


@suggesting
def patch(
    model: nn.Module, *, logits: bool = False, only: Iterable[str] | None = None, without: Iterable[str] = ()
) -> Patched:
    """Run a model's embeddings, norms, MLPs, rotary embeddings, attention and loss of tokens on cute ops, in place.

    Parameters and state dict stay as they are; :func:`unpatch` undoes it. On a GPU, weights of linear layers that read
    the same input (gate and up; queries, keys and values) move to one piece of memory: patch before CUDA graphs are
    captured, and after the model is on the device and in the dtype that it trains in. To pickle the whole model (not
    its state dict), unpatch it first. Where the default dtype is not float32, that of the process is float32 meanwhile,
    also for other threads. A language model in training mode that is given ``labels`` (of the next token, of
    masked ones, of a translation) computes the loss straight from the hidden states, and returns ``logits=None``: they
    never exist, unless ``logits`` asks for them, or the model returns a tuple (``return_dict=False``).

    Args:
        model: a Hugging Face ``LlamaForCausalLM``, or a model whose modules are built alike (Mistral, Qwen,
            Gemma), or one with layer norms, GELUs and written-out attention (BERT).
        logits: a language model returns its logits in training, too, for metrics or losses of one's own. Their
            loss is one pass over them (:func:`cute_ops_torch.cross_entropy`); they and their gradient take the memory
            that the loss from hidden states saves.
        only: ops that modules may run, ``["rmsnorm", "rope"]``; all by default.
        without: ops that none may run.

    Returns:
        What was replaced, in the model's order: a list of (module, op). Its attribute ``left`` has what was not, of
        the kinds that ops are for, each with the reason; ``print`` shows both as a table.

    Warns:
        UserWarning: a model that predicts the next token keeps its own loss, or some of its own norms.

    Raises:
        TypeError: not a module.
        ValueError: nothing in the model is known, or all of it is patched already; an op in ``only`` or ``without``
            is none that modules run.
    """
    _check_model("patch", model)
    wanted = _wanted(only, without)
    if of_transformers := _is_of_transformers(model):
        register_attention()
    with same_everywhere():
        every = [
            (name, module, each) for name, module in model.named_modules() for each in _matching(module, model, logits)
        ]
        found = _called([each for each in every if _serves(each[2], wanted)], model)
        unwanted = [Replaced(name, each.op) for name, _, each in every if each.op and each.op not in wanted]
        if not any(each.op for _, _, each in found):
            if len(wanted) < len(RUN) and not _is_patched(model):
                return _report(model, {}, unwanted)
            raise ValueError(_nothing_to_patch(model))
        for name, module, replacement in reversed(found):  # functions first: `rope` wraps a forward rebound to them
            if why := replacement.apart(module):
                log.debug("%s runs %s in a pass of its own: %s", name, replacement.op, why)
            _pack(module, replacement)
            module.__class__ = _subclass(type(module), replacement)  # type: ignore[arg-type]
    if of_transformers:
        captures.install_hooks(model)
    ops: dict[str, list[str]] = {}
    for name, _, each in found:
        if each.op or each is _WHOLE:
            ops.setdefault(name, []).extend([each.op] if each.op else [])
    return _report(model, ops, unwanted)


def _is_of_transformers(model: nn.Module) -> bool:
    """Whether a model has modules of transformers. Others need no import of it, which takes seconds, and fails where a
    package that it uses is broken.
    """
    kinds = {type(module) for module in model.modules()}
    return any(base.__module__.startswith("transformers.") for kind in kinds for base in kind.__mro__)


def _called(
    found: Sequence[tuple[str, nn.Module, Replacement]], model: nn.Module
) -> list[tuple[str, nn.Module, Replacement]]:
    """Replacements of modules that something goes on calling: not of the activation of an MLP that is replaced, now or
    before.
    """
    before = ((name, getattr(type(module), "_cute_unused", "")) for name, module in model.named_modules())
    pairs = (*((name, each.unused) for name, _, each in found), *before)
    unused = {f"{name}.{part}" for name, part in pairs if part}
    return [each for each in found if each[0] not in unused]


def _wanted(only: Iterable[str] | None, without: Iterable[str]) -> frozenset[str]:
    """The ops that modules may run."""
    sets = {"only": only, "without": without}
    for argument, ops in sets.items():
        if isinstance(ops, str):
            raise TypeError(f'cute_ops_torch.patch: argument `{argument}` is a str, expected names, ["{ops}"].')
        for op in ops or ():
            if op not in RUN:
                raise ValueError(
                    f"cute_ops_torch.patch: argument `{argument}` has {op!r}{meant(str(op), RUN)}; modules run "
                    f"{', '.join(sorted(RUN))}."
                )
    return frozenset(RUN if only is None else only) - frozenset(without)


@suggesting
def unpatch(model: nn.Module) -> None:
    """Undo :func:`patch`.

    Raises:
        TypeError: not a module.
        ValueError: the model is not patched.
    """
    _check_model("unpatch", model)
    patched = [module for module in model.modules() if hasattr(type(module), "_cute_original")]
    if not patched:
        raise ValueError(f"cute_ops_torch.unpatch: {type(model).__name__} is not patched")
    for module in patched:
        module.__class__ = _unpatched(type(module))  # type: ignore[arg-type]
        traced.forget(module)


def _report(model: nn.Module, ops: Mapping[str, Sequence[str]], unwanted: list[Replaced]) -> Patched:
    """The report on the modules of a model, and a warning if those that matter most stayed."""
    replaced = [Replaced(name, op) for name, own in ops.items() for op in own]
    found = Patched(type(model).__name__, replaced, find_left(model, ops, unwanted))
    kept = [each for each in found.left if each.kind in ("loss", "norm") and each.reason != UNWANTED]
    if kept and is_causal(model):
        text = (
            f"cute_ops_torch.patch: {found.model} keeps {describe(kept)}. print(patch(model)) shows all that is left."
        )
        warnings.warn(text, stacklevel=4)  # where `patch` is called, which is decorated
    return found


def _is_patched(model: nn.Module) -> bool:
    return any(hasattr(type(module), "_cute_original") for module in model.modules())


def _nothing_to_patch(model: nn.Module) -> str:
    name = type(model).__name__
    if _is_patched(model):
        return f"cute_ops_torch.patch: {name} is patched already"
    return (
        f"cute_ops_torch.patch: {name} has no module that is known: no norm, gated MLP, "
        "attention or decoder layer whose forward computes what an op of ours does"
    )


def _check_model(caller: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        came = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"cute_ops_torch.{caller}: argument `model` must be a torch.nn.Module, got {came}.")


def _matching(module: nn.Module, model: nn.Module, logits: bool) -> list[Replacement]:
    """The replacements of a module: at most one, and those of the functions that it calls, which are applied first."""
    patched: Any = type(module)
    if getattr(patched, "_cute_functions_only", False):
        # What it calls was not there when a part of the model was patched: the tables of rotations.
        module.__class__ = _unpatched(patched)
        if found := _matching(module, model, logits):
            found = [] if all(each in _OF_FUNCTIONS for each in found) else found
        if not found:
            module.__class__ = patched
        return found
    if (
        "forward" in vars(module)
        or hasattr(type(module), "_cute_original")
        or innermost(getattr(type(module), "forward", None)) is None
    ):
        return []  # its forward is replaced already, or hidden by a decorator
    first = _first(module, model, logits)
    op = first.op if first else ""
    others = (*_OF_ALL, *(SUMS if op != "add_rmsnorm" else ()))  # that of a layer does its sums
    around = [SHARED] if op in ("", "rope") and SHARED.matches(module, model) else []
    whole = [_WHOLE] if _WHOLE.matches(module, model) else []
    return [*whole, *around, *([first] if first else []), *(each for each in others if each.matches(module, model))]


def _first(module: nn.Module, model: nn.Module, logits: bool) -> Replacement | None:
    """The replacement of a module's ``forward``: the first that knows it, by its source or by its meaning."""
    known = (*_REPLACEMENTS, *(loss.WITH_LOGITS if logits else loss.REPLACEMENTS))
    first = next((each for each in known if each.matches(module, model)), None)
    return first or plain_mlp.replacement_of(module) or gated_norm.replacement_of(module) or replacement_of(module)


def _holds_layers(module: nn.Module) -> bool:
    """Whether a module has a list of layers, or holds one that has: compiled alone, it goes from layer to layer."""
    return any(isinstance(each, nn.ModuleList) and each is not module for each in module.modules())


def _serves(replacement: Replacement, wanted: frozenset[str]) -> bool:
    """Whether a replacement runs an op that modules may run, or prepares what one needs."""
    return replacement.op in wanted or (not replacement.op and (replacement is not MASKS or "attention" in wanted))


def _pack(module: nn.Module, replacement: Replacement) -> None:
    layers = [getattr(module, name) for name in replacement.packed(module)]
    # A layer with a bias runs by itself.
    if layers and all(is_plain_linear(m) and m.bias is None and m.weight.is_cuda for m in layers):
        pack([layer.weight for layer in layers])


@cache
def _unpatched(patched: Any) -> Any:
    """The class that a patched module had; one that others have derived since (``fully_shard``, parametrizations), of
    that.
    """
    if "_cute_original" in vars(patched):
        return patched._cute_original
    bases = tuple(_unpatched(base) if hasattr(base, "_cute_original") else base for base in patched.__bases__)
    own = {name: value for name, value in vars(patched).items() if name not in ("__dict__", "__weakref__")}
    # Transformers wraps the `forward` of each class derived from a layer: here it would be ours, and it wraps it again.
    inherited = next(vars(base)["forward"] for base in patched.__mro__[1:] if "forward" in vars(base))
    if getattr(own.get("forward"), "__wrapped__", None) is inherited:
        del own["forward"]
    return type(patched)(patched.__name__, bases, own)


@cache
def _subclass(original: Any, replacement: Replacement) -> type[nn.Module]:
    unpatched: Any = getattr(original, "_cute_original", original)
    ours = replacement.forward(getattr(original, "_cute_ours", None) or innermost(original.forward))
    forward, may = or_original(unpatched, ours, replacement.whole)
    # The same name: checkpointing, sharding and device maps find modules by it.
    attributes = {
        "__module__": original.__module__, "__qualname__": original.__qualname__, "forward": forward,
        "__init__": _unpatched_init(unpatched), "_cute_original": unpatched, "_cute_ours": staticmethod(ours),
        "_cute_runs": staticmethod(inspect.unwrap(ours)) if hands_on(unpatched.forward) else None,
        **({"_cute_norm": staticmethod(replacement.norm)} if replacement.norm else {}),
        "_cute_may": staticmethod(may), "__reduce_ex__": _reduce,
        "_cute_unused": replacement.unused or getattr(original, "_cute_unused", ""),
        "_cute_drops_logits": replacement in loss.REPLACEMENTS or getattr(original, "_cute_drops_logits", False),
        traced.READERS: None,
        "_cute_functions_only": replacement in _OF_FUNCTIONS and getattr(original, "_cute_functions_only", True),
    }  # fmt: skip
    made = type(original.__name__, (original,), attributes)
    made._cute_forward = staticmethod(made.forward)  # type: ignore[attr-defined]  # which a base class may have wrapped
    return made


class _Maker:
    """Makes a copy of a patched module for :mod:`copy`. ``pickle`` is refused: by the class's name it would find the
    original one.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, *args: Any) -> Any:
        return self.make(*args)

    def __reduce__(self) -> Any:
        raise TypeError(
            "cute_ops_torch.patch: a patched model cannot be pickled: save its state_dict(), or call "
            "cute_ops_torch.unpatch(model) first and patch(model) afterwards"
        )


def _reduce(self: Any, protocol: Any) -> Any:
    """``__reduce_ex__`` of a patched module."""
    make, *rest = self._cute_original.__reduce_ex__(self, protocol)
    return (_Maker(make), *rest)


def _unpatched_init(original: type[nn.Module]) -> Callable[..., None]:
    """An ``__init__`` that makes an object of the original class.

    Else ``type(model).from_pretrained`` of a patched model makes one of which only the outermost module is patched.
    """

    @wraps(original.__init__)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.__class__ = original
        original.__init__(self, *args, **kwargs)

    return init
