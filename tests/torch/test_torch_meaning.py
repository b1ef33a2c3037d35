"""Modules and graphs by meaning: fx graphs give the texts of jaxprs, and `patch` finds what a module computes."""

from __future__ import annotations

import copy
import cProfile
import gc
import json
import math
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cute_ops_torch
from cute_ops.expressions import evaluate
from cute_ops.fusion import analyse
from cute_ops.fusion.analyse import Found
from cute_ops_torch.huggingface import meaning
from cute_ops_torch.huggingface.meaning import replacement_of
from cute_ops_torch.huggingface.trial import same_everywhere
from cute_ops_torch.inductor.front import Front
from cute_ops_torch.inductor.trace import traced
from cute_ops_torch.library import reference

N = 16
RMS = "e1(t,r) square 0; mean 2; add 3 9.999999974752427e-07; rsqrt 4; multiply 0 5; multiply 1 6 -> 7"


class Norm(nn.Module):
    """A norm whose ``forward`` no digest knows; ``how`` says which way it is written."""

    def __init__(self, how: str, n: int = N, eps: float = 1e-6) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(n))
        self.how, self.eps = how, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "written out":
            wide = x.float()
            mean = (wide * wide).sum(-1, keepdim=True) / x.shape[-1]
            return (wide / torch.sqrt(mean + self.eps)).to(x.dtype) * self.gain
        if self.how == "torch's":
            return F.rms_norm(x, x.shape[-1:], self.gain, self.eps)
        if self.how == "squeezed":
            r = torch.rsqrt(x.float().pow(2).mean(-1) + self.eps)
            return (self.gain.float() * (x.float() * r.unsqueeze(-1))).to(x.dtype)
        if self.how == "twice":
            return 2 * F.rms_norm(x, x.shape[-1:], self.gain, self.eps)
        return F.rms_norm(x, x.shape[-1:], None, self.eps) * (self.gain + 1)


class MLP(nn.Module):
    """A gated MLP, apart or packed, with names of its own."""

    def __init__(self, packed: bool, act: nn.Module, dropout: float = 0.0, bias: bool = False) -> None:
        super().__init__()
        self.both = nn.Linear(N, 64, bias) if packed else None
        self.one, self.two = (None, None) if packed else (nn.Linear(N, 32, bias), nn.Linear(N, 32, bias))
        self.out, self.nonlinearity, self.dropout = nn.Linear(32, N, bias), act, dropout

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(h).chunk(2, -1) if self.both is not None else (self.one(h), self.two(h))  # type: ignore[misc]
        return self.out(F.dropout(self.nonlinearity(gate) * up, self.dropout, self.training))


def found(module: nn.Module, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Found]:
    graph, _ = traced(module, tuple(torch.empty(shape, device="meta", dtype=dtype) for shape in shapes), dtype=dtype)
    return analyse(Front(graph).graph).found


@pytest.mark.parametrize("how", ["written out", "torch's", "squeezed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_have_one_text(how: str, dtype: torch.dtype) -> None:
    assert [each.text for each in found(Norm(how), (2, 3, N), dtype=dtype)] == [RMS]


def test_texts_of_transformers() -> None:
    """The texts that JAX's programs have in tests/jax/test_jax_fuse.py."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma")
    phi3 = pytest.importorskip("transformers.models.phi3.modeling_phi3")
    cohere = pytest.importorskip("transformers.models.cohere.modeling_cohere")
    assert [each.text for each in found(llama.LlamaRMSNorm(N), (2, 3, N))] == [RMS]
    (one_more,) = found(gemma.GemmaRMSNorm(N), (2, 3, N))
    assert one_more.meaning is not None and one_more.meaning.attrs == {"weight_offset": 1.0, "eps": 1e-6}
    config = phi3.Phi3Config(hidden_size=N, intermediate_size=32, pad_token_id=0)
    assert [each.text for each in found(phi3.Phi3MLP(config), (2, 3, N))] == [
        "e1(2t) silu 0[:n]; multiply 0[n:] 1 -> 2"
    ]

    class Rotated(nn.Module):
        def __init__(self, function: Callable[..., Any]) -> None:
            super().__init__()
            self.function = function

        def forward(self, *args: torch.Tensor) -> Any:
            return self.function(*args)

    shapes = ((2, 4, 3, 8), (2, 2, 3, 8), (2, 3, 8), (2, 3, 8))
    halves = found(Rotated(llama.apply_rotary_pos_emb), *shapes)
    assert [each.meaning and each.meaning.attrs for each in halves] == [{"size": 8}] * 2
    pairs = found(Rotated(cohere.apply_rotary_pos_emb), *shapes)
    assert [each.meaning and each.meaning.attrs for each in pairs if each.meaning] == [{"interleaved": True}] * 2


@pytest.mark.slow
def test_regions_of_training_graphs_compute_what_the_graph_does() -> None:
    """Forward and backward of a DiT block: each region's expression is evaluated beside the graph."""
    from functorch.compile import make_boxed_func
    from torch._decomp import core_aten_decompositions
    from torch._dynamo.backends.common import aot_autograd

    xp = pytest.importorskip("array_api_compat.torch")
    seen: list[str] = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.shift = nn.Linear(N, 32), nn.Linear(32, N), nn.Linear(N, 3 * N)

        def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            scale, shift, gate = self.shift(F.silu(c)).chunk(3, -1)
            y = F.layer_norm(x, (N,)) * (1 + scale[:, None]) + shift[:, None]
            return x + gate[:, None] * self.down(F.gelu(self.up(y)))

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        def run(*args: Any) -> Any:
            interpreter = torch.fx.Interpreter(graph, garbage_collect_values=False)
            out = interpreter.run(*args)
            front = Front(graph)
            nodes = {value: node for node, value in front.values.items() if not isinstance(value, tuple)}
            for each in analyse(front.graph).found:
                if all(leaf.node in nodes for leaf in each.leaves) and all(root in nodes for root in each.roots):
                    _compare(each, {value: interpreter.env[node] for value, node in nodes.items()}, xp)
                    seen.append(each.text)
            return out

        return make_boxed_func(run)

    torch.manual_seed(3)
    block, decompositions = Block(), core_aten_decompositions()
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, decompositions=decompositions)
    torch.compile(block, backend=backend)(torch.randn(2, 5, N), torch.randn(2, N)).square().mean().backward()
    assert len(seen) >= 6
    assert any("gelu" in text or "erf" in text for text in seen)


def _compare(each: Found, values: dict[Any, torch.Tensor], xp: Any) -> None:
    arrays = []
    for leaf in each.leaves:
        array = values[leaf.node]
        sizes = [size for size, label in zip(array.shape, leaf.labels, strict=True) if label != -2]
        own = [size for i, size in enumerate(leaf.rows) if i in leaf.labels]
        assert sizes[: len(own)] == own
        there = [size if i in leaf.labels else 1 for i, size in enumerate(leaf.rows)]
        columns = [array.shape[-1] if -1 in leaf.labels else 1]
        whole = array.reshape(*there, *columns).expand(*leaf.rows, *columns)
        arrays.append(
            whole.reshape(math.prod(leaf.rows), *columns) if leaf.operand.kind.rows else array.reshape(columns)
        )
    for root, out in zip(each.roots, evaluate(each.expression, xp, arrays), strict=True):
        want = values[root]
        if out.numel() != want.numel():
            out = out.expand(-1, want.shape[-1])
        torch.testing.assert_close(out.reshape(want.shape).to(want.dtype), want, rtol=1e-4, atol=1e-5)


MODULES: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "written out": (lambda: Norm("written out"), "rmsnorm"),
    "squeezed": (lambda: Norm("squeezed"), "rmsnorm"),
    "1 + gain": (lambda: Norm("1 + gain"), "rmsnorm"),
    "twice": (lambda: Norm("twice"), None),
    "gate": (lambda: MLP(False, nn.SiLU()), "silu_mul"),
    "gelu gate": (lambda: MLP(False, nn.GELU("tanh")), "gelu_mul"),
    "packed gate": (lambda: MLP(True, nn.SiLU()), "swiglu"),
    "packed gelu gate": (lambda: MLP(True, nn.GELU()), "geglu"),
    "gate with biases": (lambda: MLP(False, nn.SiLU(), bias=True), "silu_mul"),
    "packed gelu gate with biases": (lambda: MLP(True, nn.GELU(), bias=True), "geglu"),
    "another gate": (lambda: MLP(False, nn.Tanh()), None),
    "dropout": (lambda: MLP(False, nn.SiLU(), dropout=0.5), None),
}


@pytest.mark.parametrize("name", MODULES)
def test_patch_finds_what_modules_compute(name: str) -> None:
    torch.manual_seed(0)
    make, op = MODULES[name]
    module = make()
    model = nn.Sequential(nn.Embedding(7, N), module)
    replacement = replacement_of(module)
    assert (replacement and replacement.op) == op
    ids = torch.randint(7, (2, 5))

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        out = model(ids)
        out.tanh().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    torch.manual_seed(1)
    want = run()
    patched = cute_ops_torch.patch(model)
    assert [each.op for each in patched if each.module == "1"] == ([op] if op else [])
    torch.manual_seed(1)
    torch.testing.assert_close(run(), want, rtol=1e-4, atol=1e-5)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of meanings of a process that knows none yet."""
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(meaning, "_known", {})
    return tmp_path / "cache" / "meanings"


@pytest.mark.slow
def test_meanings_are_kept_on_disk(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[nn.Module] = []
    trace = meaning.meaning_of
    monkeypatch.setattr(meaning, "meaning_of", lambda module, n: traces.append(module) or trace(module, n))
    modules = (Norm("written out"), MLP(True, nn.GELU(), bias=True), Norm("twice"))
    want = [each and each.op for each in map(replacement_of, modules)]
    assert (want, len(traces), len([*kept.iterdir()])) == (["rmsnorm", "geglu", None], 3, 3)
    meaning._known.clear()
    assert [each and each.op for each in map(replacement_of, modules)] == want
    assert len(traces) == 3
    replacement_of(Norm("written out", eps=1e-3))  # another key
    assert len(traces) == 4


@pytest.mark.parametrize("wrong", ["another op", "other numbers", "no JSON", "another shape", "no op at all"])
def test_what_is_kept_is_only_a_guess(kept: Path, wrong: str) -> None:
    norm = Norm("written out")
    replacement_of(norm)
    (file,) = kept.iterdir()
    said = json.loads(file.read_text())
    changed = {
        "another op": said | {"op": "layernorm"}, "other numbers": said | {"attrs": [["eps", 0.5]]},
        "another shape": said | {"tensors": "x"}, "no op at all": said | {"op": "system"}, "no JSON": None,
    }[wrong]  # fmt: skip
    file.write_text("{" if changed is None else json.dumps(changed))
    meaning._known.clear()
    found = replacement_of(norm)
    assert found is not None and found.op == "rmsnorm"
    assert json.loads(file.read_text()) == said


COUNTS: list[object] = []


class Collected:
    """Garbage whose finalizer reads a list among the globals of this file."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        COUNTS.append(None)


@pytest.mark.parametrize("what", ["an op", "a finalizer"])
def test_what_others_run_meanwhile_is_not_what_a_module_reads(
    what: str, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an op runs, which a program may have wrapped, and finalizers of garbage."""
    run, threshold = reference.run_reference, gc.get_threshold()

    def counted(*given: Any) -> Any:
        COUNTS.append(given)
        return run(*given)

    class Squares(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if what == "a finalizer":
                Collected()
                [[] for _ in range(3)]  # lets the collector run
            return super().forward(x)

    if what == "an op":
        monkeypatch.setattr(reference, "run_reference", counted)
    COUNTS.clear()
    try:
        gc.set_threshold(1, 1, 1)
        found = replacement_of(Squares("written out"))
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert COUNTS
    assert found is not None and found.op == "rmsnorm"


def test_a_disagreement_is_not_kept_on_disk(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meaning, "_agreeing", lambda module, meaning, n: frozenset())
    assert replacement_of(Norm("written out")) is None
    monkeypatch.undo()
    monkeypatch.setattr(meaning, "_known", {})
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(kept.parent))
    found = replacement_of(Norm("written out"))
    assert found is not None and found.op == "rmsnorm"


def test_what_changes_after_patching_is_computed_by_the_original() -> None:
    norm, mlp = Norm("written out"), MLP(False, nn.SiLU())
    model = nn.Sequential(nn.Embedding(7, N), norm, mlp)
    ids = torch.randint(7, (2, 5))
    cute_ops_torch.patch(model)
    norm.eps = 0.5
    hidden = model[0](ids)
    torch.testing.assert_close(norm(hidden), F.rms_norm(hidden, (N,), norm.gain, 0.5))
    assert norm(hidden.double()).dtype == torch.float64
    mlp.nonlinearity.register_forward_hook(lambda module, args, out: out * 0)
    torch.testing.assert_close(mlp(hidden), torch.zeros_like(hidden))
    del mlp.nonlinearity
    mlp.nonlinearity = torch.tanh
    torch.testing.assert_close(mlp(hidden), mlp.out(torch.tanh(mlp.one(hidden)) * mlp.two(hidden)))


def test_layers_replaced_after_patching_need_no_attributes_of_linear_layers() -> None:
    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.inner(x)

    for packed in (False, True):
        mlp = MLP(packed, nn.SiLU())
        x = torch.randn(3, N)
        want = 2 * mlp(x)
        cute_ops_torch.patch(nn.Sequential(nn.Embedding(7, N), mlp))
        mlp.out = Doubled(mlp.out)
        torch.testing.assert_close(mlp(x), want)


class Configured(Norm):
    """Reads the size of its input from a config, in one of several ways."""

    def __init__(self, how: str, scale: float = 1.0) -> None:
        super().__init__("squeezed")
        self.how, self.config = how, {"scale": scale}

    @property
    def scale(self) -> float:
        return self.config["scale"]

    def method(self) -> float:
        return self.config["scale"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scales: dict[str, Any] = {
            "an attribute": lambda: self.config["scale"], "a property": lambda: self.scale, "a method": self.method,
            "a name": lambda: getattr(self, "config")["scale"],  # noqa: B009
        }  # fmt: skip
        return F.rms_norm(x, x.shape[-1:], self.gain, self.eps) * scales[self.how]()


@pytest.mark.parametrize("how", ["an attribute", "a property", "a method", "a name"])
def test_a_forward_that_reads_a_config_is_left(how: str) -> None:
    assert replacement_of(Configured(how)) is None


class Keeping(Norm):
    """Does something else beside its norm."""

    def __init__(self, does: str) -> None:
        super().__init__("squeezed")
        self.does, self.calls, self.last, self.effect = does, 0, None, SIDE_EFFECTS[does]
        self.kept: dict[str, Any] = {"shapes": [], "all": {3}, "calls": torch.zeros(1)}
        self.counted = torch.zeros(1)

    def train(self, mode: bool = True) -> Any:
        raise AssertionError("patch called a module's `train`")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.effect(self, x)
        return super().forward(x)


SIDE_EFFECTS: dict[str, Any] = {
    "counts": lambda self, x: setattr(self, "calls", self.calls + 1),
    "counts in a tensor": lambda self, x: self.counted.add_(1),
    "counts in a dict's tensor": lambda self, x: self.kept["calls"].add_(1),
    "keeps its input": lambda self, x: setattr(self, "last", x),
    "makes a buffer": lambda self, x: self.register_buffer("made", torch.ones(3)),
    "draws": lambda self, x: torch.rand(3),
    "fills a list": lambda self, x: self.kept["shapes"].append(x.shape),
    "fills a set": lambda self, x: self.kept["all"].add(len(x.shape)),
    "fills a dict": lambda self, x: self.kept.pop("all", None),
    "nothing": lambda self, x: None,
}


@pytest.mark.parametrize("does", SIDE_EFFECTS)
def test_patch_changes_nothing_of_a_module_that_it_calls(does: str) -> None:
    norm, called = Keeping(does), list[int]()
    for register in (norm.register_forward_pre_hook, norm.register_forward_hook, norm.register_full_backward_hook):
        register(lambda *_: called.append(1))
    kept = copy.deepcopy(norm.kept)
    state, held = dict(vars(norm)), {name: dict(vars(norm)[name]) for name in ("_parameters", "_buffers")}
    numbers = torch.get_rng_state()
    with same_everywhere():
        found = replacement_of(norm)
    assert (found and found.op) == ("rmsnorm" if does in ("draws", "nothing") else None)
    assert not called and torch.equal(torch.get_rng_state(), numbers)
    assert all(vars(norm)[name] is value for name, value in state.items()) and vars(norm).keys() == state.keys()
    assert {name: dict(vars(norm)[name]) for name in held} == held and norm.kept == kept
    assert norm.counted == 0


class Settings:
    scale = 1.0


SETTINGS, SCALE, OF_METHODS, SCALES = Settings(), 1.0, 1.0, {"scale": 1.0}


def scale_of_the_file() -> float:
    return SCALE


class Reading(Norm):
    """Reads the size of its output where :func:`patch` compares it with what it was, or where nothing does."""

    shared, settings = 1.0, SETTINGS

    def __init__(self, how: str) -> None:
        super().__init__("squeezed")
        self.how, self.own = how, 1.0

    def method(self) -> float:
        return OF_METHODS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scales: dict[str, Any] = {
            "a number of the file": scale_of_the_file, "a number of the class": lambda: self.shared,
            "a method": self.method, "an object": lambda: SETTINGS.scale, "a class": lambda: Settings.scale,
            "a dict": lambda: SCALES["scale"], "an object of the class": lambda: self.settings.scale,
            "an object of the type": lambda: type(self).settings.scale,
            "vars": lambda: vars(self)["own"], "__dict__": lambda: self.__dict__["own"],
        }  # fmt: skip
        return F.rms_norm(x, x.shape[-1:], self.gain, self.eps) * scales[self.how]()


def change(norm: Reading, how: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SCALE", "OF_METHODS"):
        monkeypatch.setattr(f"{__name__}.{name}", scale)
    monkeypatch.setattr(Reading, "shared", scale)
    monkeypatch.setattr(Settings, "scale", scale)
    monkeypatch.setitem(SCALES, "scale", scale)
    norm.own = scale


@pytest.mark.parametrize("how", [
    "a number of the file", "a number of the class", "a method", "an object", "a class", "a dict",
    "an object of the class", "an object of the type", "vars", "__dict__",
])  # fmt: skip
def test_what_a_forward_reads_elsewhere_may_change(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Embedding(7, N), Reading(how)), torch.randn(3, N)
    found = {each.op for each in cute_ops_torch.patch(model)}
    assert ("rmsnorm" in found) == ("number" in how)
    before = model[1](x)
    change(model[1], how, 3.0, monkeypatch)
    torch.testing.assert_close(model[1](x), 3 * before)


def normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class WithMethods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(N))

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return normalised(x)

    def by_another(self, x: torch.Tensor) -> torch.Tensor:
        return self.method(x)

    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return normalised(x)

    @classmethod
    def of_the_class(cls, x: torch.Tensor) -> torch.Tensor:
        return cls.static(x)

    @property
    def as_property(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return normalised


class CallsAMethod(WithMethods):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method(x) * self.gain


class CallsByAnother(WithMethods):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.by_another(x) * self.gain


class CallsAStaticMethod(WithMethods):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.static(x) * self.gain


class CallsOfTheClass(WithMethods):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of_the_class(x) * self.gain


class ReadsAProperty(WithMethods):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.as_property(x) * self.gain


class SquaredReLU(nn.Module):
    def method(self, x: torch.Tensor) -> torch.Tensor:
        return torch.square(torch.relu(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.method(x)


class SiLUByMethod(SquaredReLU):
    def method(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x)


class CallsItsBase(CallsAMethod):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class CallsTheMethodOfItsBase(CallsAMethod):
    def method(self, x: torch.Tensor) -> torch.Tensor:
        return super().method(x)


CHANGED: dict[str, tuple[Callable[[], nn.Module], type, str, Any, str]] = {
    "method": (CallsAMethod, WithMethods, "method", lambda self, x: 2 * x, "rmsnorm"),
    "forward of a base": (CallsItsBase, CallsAMethod, "forward", lambda self, x: 2 * x, "rmsnorm"),
    "by the forward of a base": (CallsItsBase, WithMethods, "method", lambda self, x: 2 * x, "rmsnorm"),
    "of a base": (CallsTheMethodOfItsBase, WithMethods, "method", lambda self, x: 2 * x, "rmsnorm"),
    "by another": (CallsByAnother, WithMethods, "method", lambda self, x: 2 * x, "rmsnorm"),
    "of a derived class": (CallsByAnother, CallsByAnother, "method", lambda self, x: 2 * x, "rmsnorm"),
    "static": (CallsAStaticMethod, WithMethods, "static", staticmethod(lambda x: 2 * x), "rmsnorm"),
    "class": (CallsOfTheClass, WithMethods, "of_the_class", classmethod(lambda cls, x: 2 * x), "rmsnorm"),
    "property": (ReadsAProperty, WithMethods, "as_property", property(lambda self: torch.sin), "rmsnorm"),
    "activation": (SquaredReLU, SquaredReLU, "method", lambda self, x: 2 * x, "relu2"),
    "activation of a layer": (
        lambda: nn.Sequential(nn.Linear(N, 24), SquaredReLU(), nn.Linear(24, N)), SquaredReLU, "method",
        lambda self, x: 2 * x, "mlp",
    ),
    "activation of a gate": (
        lambda: MLP(False, SiLUByMethod()), SiLUByMethod, "method", lambda self, x: 2 * x, "silu_mul",
    ),
}  # fmt: skip


@pytest.mark.drawn(0.55)
@pytest.mark.parametrize("when", ["eager", "compiled after", "compiled before"])
@pytest.mark.parametrize("how", CHANGED)
def test_methods_of_a_class_may_change(how: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, cls, name, method, op = CHANGED[how]
    model, x = nn.Sequential(make()), torch.randn(3, N)
    want = model(x)
    assert op in {each.op for each in cute_ops_torch.patch(model)}
    torch._dynamo.reset()
    run = model if when == "eager" else torch.compile(model, backend="eager", fullgraph=True)
    if when != "compiled after":
        torch.testing.assert_close(run(x), want)
    monkeypatch.setattr(cls, name, method, raising=False)
    got = run(x)
    cute_ops_torch.unpatch(model)
    torch.testing.assert_close(got, model(x))
    assert not torch.allclose(got, want, atol=1e-2)


@pytest.mark.parametrize("when", ["eager", "compiled before"])
@pytest.mark.parametrize("how", [how for how in CHANGED if "base" not in how and how != "property"])
def test_an_instance_may_get_a_method_of_its_own(how: str, when: str) -> None:
    make, cls, name, _, op = CHANGED[how]
    model, x = nn.Sequential(make()), torch.randn(3, N)
    want = model(x)
    assert op in {each.op for each in cute_ops_torch.patch(model)}
    torch._dynamo.reset()
    run = model if when == "eager" else torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(run(x), want)
    (owner,) = (each for each in model.modules() if isinstance(each, cls))
    own = (lambda x: 2 * x, types.MethodType(lambda self, x: 2 * x, nn.Identity()), F.softsign)
    setattr(owner, name, random.Random(how).choice(own))
    got = run(x)
    cute_ops_torch.unpatch(model)
    torch.testing.assert_close(got, model(x))
    assert not torch.allclose(got, want, atol=1e-2)


class SiLUByFunction(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu(x)


def silu(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("how", ["a method's function", "a part's function", "a part's forward"])
def test_what_methods_and_parts_call_may_change(how: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = CallsAMethod() if how == "a method's function" else MLP(False, SiLUByFunction())
    model, x = nn.Sequential(module), torch.randn(3, N)
    want = model(x)
    assert {each.op for each in cute_ops_torch.patch(model)} <= {"rmsnorm", "silu_mul"}
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    torch.testing.assert_close(run(x), want)
    if how == "a part's forward":
        monkeypatch.setattr(SiLUByFunction, "forward", lambda self, x: 2 * x)
    else:
        name = "normalised" if isinstance(module, CallsAMethod) else "silu"
        monkeypatch.setattr(sys.modules[__name__], name, lambda x: 2 * x)
    got = run(x)
    cute_ops_torch.unpatch(model)
    torch.testing.assert_close(got, model(x))
    assert not torch.allclose(got, want, atol=1e-2)


class ReadsItsClass(Norm):
    eps = 0.5

    def __init__(self) -> None:
        super().__init__("written out")
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + type(self).eps) * self.gain


class GatedByItsClass(ReadsItsClass):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * F.silu(gate)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [ReadsItsClass, GatedByItsClass])
def test_a_class_has_a_number_that_its_module_has_too(
    make: type[ReadsItsClass], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = make(), torch.randn(3, N)
    given = (x, torch.randn(3, N)) if make is GatedByItsClass else (x,)
    want = module(*given)
    assert len(cute_ops_torch.patch(module)) == 1
    torch._dynamo.reset()
    run = torch.compile(module, backend="eager", fullgraph=True) if compiled else module
    torch.testing.assert_close(run(*given), want)
    monkeypatch.setattr(ReadsItsClass, "eps", 3.0)
    got = run(*given)
    cute_ops_torch.unpatch(module)
    torch.testing.assert_close(got, module(*given))
    assert not torch.allclose(got, want, atol=1e-2)


def test_a_class_of_activations_may_change() -> None:
    class Bent(nn.Module):
        approximate = "none"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(x, approximate=self.approximate) * 1.0

    model, x = nn.Sequential(nn.Embedding(7, N), TwoLayers(Bent())), 3 * torch.randn(5, N)
    assert "mlp" in {each.op for each in cute_ops_torch.patch(model)}
    Bent.approximate = "tanh"
    want = model[1].down(F.gelu(model[1].up(x), approximate="tanh"))
    torch.testing.assert_close(model[1](x), want, rtol=1e-6, atol=1e-6)


def test_a_profiler_goes_on_while_patch_looks_at_modules() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    with same_everywhere():
        found = replacement_of(type("Profiled", (Norm,), {})("squeezed"))
    math.gcd(4, 6)
    profiler.disable()
    assert found and found.op == "rmsnorm"
    assert any("math.gcd" in str(entry.code) for entry in profiler.getstats())


@pytest.mark.parametrize(("n", "width", "asks"), [(3584, 9728, False), (288, 416, True)])
def test_large_layers_are_compared_by_few_columns(n: int, width: int, asks: bool) -> None:
    """Unless they ask for their number. Sums of so many products differ by more than small ones do."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.out = nn.Linear(n, 2 * width, bias=False), nn.Linear(width, n, bias=False)
            self.width = width if asks else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = self.both(x).split(self.width or self.both.weight.shape[0] // 2, -1)
            return self.out(gate * torch.sigmoid(gate) * up)

    with torch.device("meta"):
        module = Large()
    with same_everywhere():
        found = replacement_of(module)
    assert found and found.op == "swiglu"


def test_a_model_with_script_modules() -> None:
    model = nn.Sequential(
        nn.Embedding(7, N), torch.jit.script(nn.LayerNorm(N)), nn.LayerNorm(N), TwoLayers(torch.jit.script(nn.GELU())),
        torch.jit.trace(MLP(False, nn.SiLU()), torch.randn(2, N)), MLP(False, torch.jit.script(nn.SiLU())),
    )  # fmt: skip
    ids = torch.randint(7, (2, 5))
    want = model(ids)
    assert [each.module for each in cute_ops_torch.patch(model) if each.op] == ["0", "2"]
    torch.testing.assert_close(model(ids), want)


PLACES: dict[str, Any] = {
    "inference mode": torch.inference_mode, "no_grad": torch.no_grad, "a device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("place", [*PLACES, "a default dtype"])
def test_modules_are_recognised_wherever_patch_is_called(place: str) -> None:
    model = nn.Sequential(nn.Embedding(7, N), type("Named", (MLP,), {})(False, nn.SiLU()))
    if place == "a default dtype":
        torch.set_default_dtype(torch.bfloat16)
    try:
        with PLACES.get(place, torch.enable_grad)():
            found = cute_ops_torch.patch(model)
            assert torch.get_default_dtype() == (torch.bfloat16 if place == "a default dtype" else torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [each.op for each in found] == ["embedding", "silu_mul"]


def test_activations_of_one_forward_differ_by_attributes_of_their_classes() -> None:
    class Exact(nn.Module):
        approximate = "none"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.gelu(x, approximate=self.approximate) * 1.0

    class Approximate(Exact):
        approximate = "tanh"

    for act in (Exact(), Approximate()):
        model = nn.Sequential(nn.Embedding(7, N), TwoLayers(act))
        x = 3 * torch.randn(5, N)
        want = model[1](x)
        assert "mlp" in {each.op for each in cute_ops_torch.patch(model)}
        torch.testing.assert_close(model[1](x), want, rtol=1e-6, atol=1e-6)


class TwoLayers(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(N, 32), act, nn.Linear(32, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class Scaled(Norm):
    """A norm, multiplied where an instance has a scale."""

    def __init__(self, how: str, scale: torch.Tensor | None = None) -> None:
        super().__init__(how)
        if scale is not None:
            self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * self.scale if hasattr(self, "scale") else y


class ScaledGate(Scaled):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * F.silu(gate)


@pytest.mark.parametrize("cls", [Scaled, ScaledGate])
def test_an_instance_with_one_attribute_more_is_another(cls: type[Scaled]) -> None:
    modules = cls("squeezed"), cls("squeezed", torch.tensor(3.0))
    given = [torch.randn(2, 3, N) for _ in range(1 + (cls is ScaledGate))]
    wanted = [module(*given) for module in modules]
    assert len(cute_ops_torch.patch(nn.Sequential(*modules))) == 1
    for module, want in zip(modules, wanted, strict=True):
        torch.testing.assert_close(module(*given), want)


class OfItsClass(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if type(self) is OfItsClass else 1)


class OfOneExample(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).squeeze(0)


class OfModesOfImages(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if x.ndim == 4 and self.training else y


class WithSlots(Norm):
    __slots__ = ("share",)

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.share = 3.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.share


@pytest.mark.parametrize("cls", [OfItsClass, OfOneExample, OfModesOfImages, WithSlots])
@pytest.mark.parametrize("mode", [True, False])
def test_what_a_trace_does_not_show_stays(cls: type[Norm], mode: bool) -> None:
    module = cls("squeezed").train(mode)
    given = [torch.randn(*rows, N) for rows in ((2, 3), (1, 3), (2, 3, 2), (1,))]
    wanted = [[module.train(each)(x) for x in given] for each in (True, False)]
    cute_ops_torch.patch(nn.Sequential(nn.Embedding(7, N), module.train(mode)))
    for each, want in zip((True, False), wanted, strict=True):
        torch.testing.assert_close([module.train(each)(x) for x in given], want)


class OfImages(Norm):
    """Normalises the channels of images, which it takes by their four dims; of a gate, multiplies them by it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.ndim == 4:
            return super().forward(x.movedim(1, -1)).movedim(-1, 1)
        return super().forward(x)


class Gated(OfImages):
    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * F.silu(gate)


class OfImagesMLP(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, -1) if x.ndim == 4 else x)


@pytest.mark.parametrize(
    "module", [OfImages("squeezed"), Gated("squeezed"), OfImagesMLP(False, nn.SiLU())], ids=lambda m: type(m).__name__
)
def test_a_forward_may_depend_on_the_number_of_dims(module: nn.Module) -> None:
    given = [torch.randn(2, N, N, N), torch.randn(2, N, N, N)][: 1 + isinstance(module, Gated)]
    want, of_rows = module(*given), module(*(x[0] for x in given))
    assert len(cute_ops_torch.patch(nn.Sequential(nn.Embedding(7, N), module))) > 1
    torch.testing.assert_close(module(*given), want)
    torch.testing.assert_close(module(*(x[0] for x in given)), of_rows)


class OfThree(nn.Module):
    """Takes three rows, whatever it is called with to find out what it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.reshape(4, 1, -1), torch.ones(4, 3, 1))


def test_what_cannot_be_traced_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError):
        traced(OfThree(), (torch.ones(4, 8),))
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


def test_a_function_that_is_replaced_afterwards_runs() -> None:
    class Gate(MLP):
        def __init__(self) -> None:
            super().__init__(False, nn.Identity())
            self.function = F.silu

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return self.out(self.function(self.one(h)) * self.two(h))  # type: ignore[misc]

    gate = Gate()
    model, x = nn.Sequential(nn.Embedding(7, N), gate), torch.randn(2, N)
    assert [each.op for each in cute_ops_torch.patch(model)] == ["embedding", "silu_mul"]
    gate.function = F.relu
    torch.testing.assert_close(gate(x), gate.out(F.relu(gate.one(x)) * gate.two(x)))  # type: ignore[misc]


@pytest.mark.slow
def test_two_sizes_and_eps_of_one_class() -> None:
    model = nn.Sequential(
        nn.Embedding(7, N), Norm("squeezed", eps=1e-3), nn.Linear(N, 8), Norm("squeezed", n=8, eps=1.0)
    )
    ids = torch.randint(7, (2, 5))
    want = model(ids)
    assert [each.op for each in cute_ops_torch.patch(model)].count("rmsnorm") == 2
    torch.testing.assert_close(model(ids), want)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(ids), want)
