"""Modules of Hugging Face's models are recognised under other names and beneath decorators, which go on working."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cute_ops_torch
from cute_ops_torch.huggingface import match, source

transformers = pytest.importorskip("transformers")


def helper(x: Any) -> Any:
    return 2 * x


def other_helper(y: Any) -> Any:
    """Computes what ``helper`` does."""
    return 2 * y


def third_helper(x: Any) -> Any:
    return 3 * x


class Norm:
    eps = 1e-6

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Normalise."""
        variance: torch.Tensor = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return helper([scale * part for part in x])

    @functools.lru_cache  # noqa: B019
    def renamed(self, states, scaled=1.0):  # type: ignore[no-untyped-def]
        square = states.pow(2).mean(-1, keepdim=True)
        states = states * torch.rsqrt(square + self.eps)
        return other_helper([scaled * each for each in states])

    def other_attribute(self, x, scale=1.0):  # type: ignore[no-untyped-def]
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.epsilon)
        return helper([scale * part for part in x])

    def other_default(self, x, scale=2.0):  # type: ignore[no-untyped-def]
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return helper([scale * part for part in x])

    def other_local(self, x, scale=1.0):  # type: ignore[no-untyped-def]
        variance = x.pow(2).mean(-1, keepdim=True)
        scale = x * torch.rsqrt(variance + self.eps)
        return helper([scale * part for part in x])

    def other_function(self, x, scale=1.0):  # type: ignore[no-untyped-def]
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return third_helper([scale * part for part in x])


def test_names_do_not_count_and_everything_else_does() -> None:
    digest = source.source_digest(Norm.forward)
    assert digest == source.source_digest(Norm.renamed)
    others = [source.source_digest(getattr(Norm, name)) for name in vars(Norm) if name.startswith("other_")]
    assert len({digest, *others}) == 5


class Layer:
    norm: Any
    attention: Any

    def forward(self, hidden, mask=None, cache=None, **kwargs):  # type: ignore[no-untyped-def]
        return self.attention(hidden=self.norm(hidden), mask=mask, cache=cache, **kwargs)

    def renamed(self, x, mask=None, positions=None, memory=False, **others):  # type: ignore[no-untyped-def]
        return self.attention(x=self.norm(x), positions=positions, memory=memory, mask=mask, **others)

    def looks(self, x, mask=None, cache=None, **kwargs):  # type: ignore[no-untyped-def]
        return self.attention(x=self.norm(x) if cache else x, mask=mask, cache=cache, **kwargs)

    def swaps(self, x, mask=None, cache=None, **kwargs):  # type: ignore[no-untyped-def]
        return self.attention(x=self.norm(x), mask=cache, cache=mask, **kwargs)

    def keeps(self, x, mask=None, cache=None, **kwargs):  # type: ignore[no-untyped-def]
        return self.attention(x=self.norm(x), mask=mask, cache=cache)


def test_arguments_that_are_only_passed_on_do_not_count() -> None:
    digest = source.source_digest(Layer.forward)
    assert digest == source.source_digest(Layer.renamed)
    assert len({digest, *(source.source_digest(f) for f in (Layer.looks, Layer.swaps, Layer.keeps))}) == 4
    parameters = source.Parameters.of(Layer.renamed)
    assert (parameters.used, parameters.passed) == (("x",), ("mask", "positions", "memory"))
    assert parameters.bind((1, 2), {"positions": 3, "more": 4}) == {
        "x": 1, "mask": 2, "positions": 3, "memory": False, "more": 4
    }  # fmt: skip
    for args, kwargs in (((), {}), ((1, 2), {"mask": 3}), ((1, 2, 3, 4, 5), {})):
        assert parameters.bind(args, kwargs) is None


def test_functions_that_their_source_does_not_tell_are_unknown() -> None:
    def make(factor: float) -> Callable[[Any, Any], Any]:
        def forward(self: Any, x: Any) -> Any:
            return factor * x

        return forward

    assert source.source_digest(make(2.0)) is source.source_digest(len) is source.source_digest(None) is None
    assert source.source_digest(eval("lambda self, x: x")) is None


def test_statements_are_found_under_other_names() -> None:
    tree = source.definition(Norm.renamed)
    assert tree is not None
    found = source.find("v = x.pow(2).mean(-1, keepdim=True)\nx = x * torch.rsqrt(v + self.eps)", tree)
    assert found == {"v": "square", "x": "states", "torch": "torch", "self": "self"}
    assert source.find("v = x.pow(2).mean(-1, keepdim=True)\nx = v * torch.rsqrt(v + self.eps)", tree) is None
    assert source.find("v = self.pow(2).mean(-1, keepdim=True)", tree) is None  # which stands for itself


def changed(function: Any) -> Any:
    """A decorator that changes the result, and takes another name for an argument."""

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, old: Any = None, **kwargs: Any) -> Any:
        out = function(self, *args, **kwargs if old is None else {"x": old, **kwargs})
        if isinstance(out, torch.Tensor):
            return out.tanh()
        if isinstance(out, tuple):  # of attention
            return (out[0].tanh(), *out[1:])
        for name in ("loss", "last_hidden_state"):
            if out.get(name) is not None:
                out[name] = out[name].tanh()
        return out

    return wrapper


class Hidden:
    """A decorator that holds what it wraps where no copy can put another function."""

    def __init__(self, function: Any) -> None:
        self.__wrapped__ = function

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else functools.partial(self.__wrapped__, instance)


def test_decorators_are_kept() -> None:
    def plain(self: Any, x: Any) -> Any:
        return x

    decorated = changed(torch.no_grad()(plain))
    assert match.innermost(decorated) is plain
    again = match.rewrap(decorated, lambda self, x: torch.atanh(x / 4))
    x = torch.ones(2, requires_grad=True)
    for given in ({"x": x}, {"old": x}):
        out = again(None, **given)
        torch.testing.assert_close(out, torch.full((2,), 0.25))
        assert not out.requires_grad
    assert torch.equal(decorated(None, x), x.tanh())
    assert again.__name__ == "plain" and match.rewrap(plain, len) is len
    assert match.innermost(Hidden(plain)) is None


def changed_llama(tmp_path: Path, name: str, *changes: tuple[str, str, str]) -> Any:
    """The module of Hugging Face's Llama, with these (class or function, pattern, replacement) changes."""
    text = Path(sys.modules[transformers.LlamaModel.__module__].__file__ or "").read_text()
    text = text.replace("from ...", "from transformers.").replace("from .", "from transformers.models.llama.")
    for part, pattern, replacement in changes:
        before, start, rest = re.split(rf"^((?:class|def) {part}\b)", text, maxsplit=1, flags=re.MULTILINE)
        body, *after = re.split(r"^(?=@|class |def )", rest, maxsplit=1, flags=re.MULTILINE)
        body, count = re.subn(pattern, replacement, body)
        assert count, (part, pattern)
        text = before + start + body + "".join(after)
    path = tmp_path / f"{name}.py"
    path.write_text(
        text.replace("\nlogger =", f"\nimport sys\nchanged = sys.modules[{__name__!r}].changed\nlogger =", 1)
    )
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
ALL = {
    "linear_cross_entropy": 1, "attention_mask": 1, "embedding": 1, "add_rmsnorm": 2, "rope": 2, "silu_mul": 2,
    "rmsnorm": 5, "attention": 2,
}  # fmt: skip
CACHE = r"\b(past_key_values|cache)\b(?=[:.,)=]| is)"
RENAMED = (
    *((part, r" +@deprecate_kwarg.*\n", "") for part in ("LlamaAttention", "LlamaDecoderLayer")
      if transformers.__version__ >= "5.24"),
    ("LlamaAttention", CACHE, "memory"), ("LlamaDecoderLayer", CACHE, "memory"),
    ("LlamaModel", rf"(?<= {{16}}){CACHE}=", "memory="),
    ("LlamaRMSNorm", "hidden_states", "x"), ("LlamaMLP", r"\bx\b", "hidden"),
    ("LlamaAttention", r"\b(query_states|key_states|value_states|hidden_shape|attn_output)\b", r"\1_"),
    ("LlamaDecoderLayer", "residual", "stream"), ("LlamaModel", r"hidden_states\b(?!=)", "states"),
    ("LlamaModel", "past_seen_tokens", "seen"), ("LlamaForCausalLM", r"\boutputs\b", "result"),
    ("LlamaForCausalLM", r"(?<!\.)\bhidden_states\b(?!=)", "states"), ("rotate_half", r"\bx1\b", "left"),
    ("apply_rotary_pos_emb", r"\bq_embed\b", "turned"), ("LlamaRotaryEmbedding", r"\b(freqs|emb)\b", r"\1_"),
)  # fmt: skip


def outcome(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    model.train().zero_grad()
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    logits = model.eval()(tokens).logits
    words = model.generate(tokens, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(tokens))
    return loss.detach(), logits.detach(), *(p.grad.clone() for p in model.parameters()), words


def compare(module: Any, kinds: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = module.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    tokens = torch.randint(0, 97, (2, 19))
    expected = outcome(model, tokens)
    replaced = cute_ops_torch.patch(model)
    assert Counter(each.op for each in replaced) == kinds
    for e, got in zip(expected, outcome(model, tokens), strict=True):
        torch.testing.assert_close(got, e, rtol=1e-4, atol=1e-6)


def test_a_llama_whose_arguments_and_locals_have_other_names(tmp_path: Path) -> None:
    compare(changed_llama(tmp_path, "renamed_llama", *RENAMED), ALL)


@pytest.mark.slow
def test_a_llama_whose_modules_are_decorated(tmp_path: Path) -> None:
    """The decorators change results, so that none may be lost, or skipped by a fused pass."""
    parts = ("LlamaRMSNorm", "LlamaMLP", "LlamaAttention", "LlamaDecoderLayer", "LlamaModel", "LlamaForCausalLM")
    for i, together in enumerate([*((part,) for part in parts), parts]):
        changes = [(part, r"(    @.*\n)*    def forward\(", r"    @changed\n\g<0>") for part in together]
        compare(changed_llama(tmp_path, f"decorated_llama_{i}", *changes), ALL)
