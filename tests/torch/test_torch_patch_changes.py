"""Changes to a model after it was patched: it computes what the same changed model computes without ``patch``.

docs/patch.md has the table of what then still runs on our ops: ``python tests/torch/test_torch_patch_changes.py``
writes it.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize, prune

import cute_ops_torch
from cute_ops_torch import functions
from cute_ops_torch.composite import scaled_dot_product
from cute_ops_torch.huggingface import bypass, decoder, embedding, loss, plain_mlp

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

PAGE = Path(__file__).parents[2] / "docs" / "patch.md"
BEGIN, END = "<!-- made by tests/torch/test_torch_patch_changes.py -->", "<!-- end -->"
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
TOKENS = torch.randint(3, 32, (2, 7), generator=torch.Generator().manual_seed(1))


def llama(attention: str = "sdpa") -> nn.Module:
    config = transformers.LlamaConfig(
        **SIZES, num_key_value_heads=1, head_dim=16, use_cache=False, pad_token_id=0, attn_implementation=attention
    )
    return transformers.LlamaForCausalLM(config)


def mistral() -> nn.Module:
    """In 16 bits, which our attention takes, with a mask that is a window."""
    heads = {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 4}
    config = transformers.MistralConfig(**SIZES, **heads, use_cache=False, pad_token_id=0)
    return transformers.MistralForCausalLM(config).bfloat16()


def gemma() -> nn.Module:
    config = transformers.GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=16, use_cache=False, pad_token_id=0)
    return transformers.GemmaForCausalLM(config)


def bert() -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **dropout, pad_token_id=0))


def nemotron() -> nn.Module:
    config = transformers.NemotronConfig(**SIZES, num_key_value_heads=1, head_dim=16, use_cache=False, pad_token_id=0)
    return transformers.NemotronForCausalLM(config)


class Kind(NamedTuple):
    """One kind of module that is replaced.

    Attributes:
        make: makes a model that has it.
        path: where in the model it is.
        linears: names of the linear layers, or the embedding, that it runs.
        count: how many of its kind ran on our ops, from the calls of all of them.
    """

    make: Callable[[], nn.Module]
    path: str
    linears: tuple[str, ...]
    count: Callable[[Counter[str]], int]


MLP = ("gate_proj", "up_proj", "down_proj")
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
KINDS = {
    "embedding": Kind(llama, "model.embed_tokens", ("embed_tokens",), lambda c: c["embedding"]),
    "rmsnorm": Kind(llama, "model.norm", (), lambda c: c["rmsnorm"] + c["add_rmsnorm"]),
    "layernorm": Kind(bert, "bert.encoder.layer.0.output.LayerNorm", (), lambda c: c["layernorm"]),
    "add_rmsnorm": Kind(llama, "model.layers.0", (*MLP, *QKVO), lambda c: c["add_rmsnorm"]),
    "silu_mul": Kind(llama, "model.layers.0.mlp", MLP, lambda c: c["silu_mul"] + c["swiglu"]),
    "gelu_mul": Kind(gemma, "model.layers.0.mlp", MLP, lambda c: c["gelu_mul"]),
    "mlp": Kind(nemotron, "model.layers.0.mlp", MLP[1:], lambda c: c["mlp"]),
    "gelu": Kind(bert, "cls.predictions.transform.transform_act_fn", (), lambda c: c["gelu"]),
    "rope": Kind(llama, "model.layers.0.self_attn", QKVO, lambda c: min(c["rope"], 1)),
    "attention": Kind(mistral, "model.layers.0.self_attn", QKVO, lambda c: c["attention"]),
    # In 16 bits our attention runs in its place.
    "softmax": Kind(lambda: llama("eager"), "model.layers.0.self_attn", QKVO, lambda c: c["softmax"] + c["attention"]),
    "attention_mask": Kind(llama, "model", (*MLP, *QKVO), lambda c: c["mask"]),
    "linear_cross_entropy": Kind(llama, "", ("lm_head",), lambda c: c["loss"]),
}


def made(kind: Kind) -> nn.Module:
    torch.manual_seed(0)
    model = kind.make()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def module_of(model: nn.Module, kind: Kind) -> nn.Module:
    return model.get_submodule(kind.path)


def holders(model: nn.Module, kind: Kind) -> list[nn.Module]:
    """The modules that have the kind's weights."""
    found = [m for name, m in module_of(model, kind).named_modules() if name.split(".")[-1] in kind.linears]
    own = module_of(model, kind)
    return found or ([own] if isinstance(own._parameters.get("weight"), nn.Parameter) else [])


def replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def twice(out: Any) -> Any:
    if isinstance(out, tuple):
        return (2 * out[0], *out[1:])
    if isinstance(out, torch.Tensor):
        return 2 * out
    name = "loss" if out.get("loss") is not None else "last_hidden_state"
    if out.get(name) is not None:
        out[name] = 2 * out[name]
    return out


class Twice(nn.Module):
    """A wrapper that has the attributes of what it wraps, as adapters do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return twice(self.inner(*args, **kwargs))


class Quantized(nn.Linear):
    """A linear layer whose weight is rounded to a few values."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, dtype=linear.weight.dtype)
        self.load_state_dict(linear.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + ((self.weight * 8).round() / 8 - self.weight).detach()
        return nn.functional.linear(x, weight, self.bias)


class Negated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x


class Subclass(torch.Tensor):
    """A tensor to which each use by torch adds one: whoever uses its memory computes something else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.detach:
                return func(*args).as_subclass(cls)
            used = func in (nn.functional.linear, torch.Tensor.mul, torch.Tensor.__rmul__, nn.functional.embedding,
                            nn.functional.layer_norm, torch.Tensor.matmul)  # fmt: skip
            return func(*((a + 1 if used and isinstance(a, Subclass) else a) for a in args), **(kwargs or {}))


# Changes: each changes a model, and returns it, or returns None where it does not apply to the kind.


def nothing(model: nn.Module, kind: Kind) -> Any:
    return model


def adapted(model: nn.Module, config: Any) -> nn.Module:
    torch.manual_seed(2)
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return model


def lora(model: nn.Module, kind: Kind) -> Any:
    return adapted(model, peft.LoraConfig(r=2, target_modules=list(kind.linears))) if kind.linears else None


def saved_modules(model: nn.Module, kind: Kind) -> Any:
    name = {"": "lm_head", "model": "norm", "model.layers.0": "post_attention_layernorm"}.get(kind.path)
    target = "dense" if kind.make is bert else "o_proj" if "mlp" in kind.path else "gate_proj"
    saved = [name or kind.path.split(".")[-1]]
    return adapted(model, peft.LoraConfig(r=2, target_modules=[target], modules_to_save=saved))


def tuned_norms(model: nn.Module, kind: Kind) -> Any:
    names = ["LayerNorm"] if kind.make is bert else ["input_layernorm", "post_attention_layernorm", "norm"]
    return adapted(model, peft.LNTuningConfig(target_modules=names))


def instance_forward(model: nn.Module, kind: Kind) -> Any:
    module = module_of(model, kind)
    forward = module.forward
    module.forward = lambda *args, **kwargs: twice(forward(*args, **kwargs))
    return model


def instance_forwards_below(model: nn.Module, kind: Kind) -> Any:
    """As tensor parallelism, offloading and kernels of the hub do it."""
    children = [m for m in module_of(model, kind).modules() if not list(m.children())]
    if children == [module_of(model, kind)]:
        return None
    for child in children:
        child.forward = lambda *args, forward=child.forward, **kwargs: forward(*args, **kwargs)
    linear = next(c for c in reversed(children) if isinstance(c, nn.Linear))
    forward = linear.forward
    linear.forward = lambda x: 2 * forward(x)
    return model


def class_forward(model: nn.Module, kind: Kind) -> Any:
    module = module_of(model, kind)
    cls: Any = getattr(type(module), "_cute_original", type(module))
    forward = cls.forward
    CLEAN_UP.callback(setattr, cls, "forward", forward)
    if not hasattr(forward, "_doubled"):
        cls.forward = lambda self, *args, **kwargs: twice(forward(self, *args, **kwargs))
        cls.forward._doubled = True
    return model


def function_replaced(model: nn.Module, kind: Kind) -> Any:
    """A function that the kind's ``forward`` finds in its module."""
    name = {"model": "create_causal_mask", "model.layers.0.self_attn": "rotate_half"}.get(kind.path)
    home = sys.modules[type(model).__module__]
    if name is None:
        return None
    plain = getattr(home, name)
    CLEAN_UP.callback(setattr, home, name, plain)
    if not hasattr(plain, "_changed"):
        changed = (lambda x: -x) if name == "rotate_half" else lambda *args, **kwargs: None
        changed._changed = True
        setattr(home, name, changed)
    return model


def wrapper(model: nn.Module, kind: Kind) -> Any:
    if not kind.path:
        model.lm_head = Twice(model.lm_head)
    else:
        replace(model, kind.path, Twice(module_of(model, kind)))
    return model


def forward_hook(model: nn.Module, kind: Kind) -> Any:
    module_of(model, kind).register_forward_hook(lambda module, args, out: twice(out))
    return model


def hooks_below(model: nn.Module, kind: Kind) -> Any:
    below = list(module_of(model, kind).children())
    for child in below:
        child.register_forward_hook(lambda module, args, out: twice(out) if isinstance(out, torch.Tensor) else None)
    return model if below else None


def backward_hook(model: nn.Module, kind: Kind) -> Any:
    def halve(module: nn.Module, gradients: Any) -> Any:
        return tuple(g if g is None else g / 2 for g in gradients)

    owner = module_of(model, kind) if kind.path not in ("", "model") else module_of(model, kind).get_submodule(
        "lm_head" if not kind.path else "norm")  # fmt: skip
    owner.register_full_backward_pre_hook(halve)
    return model


def tied(model: nn.Module, kind: Kind) -> Any:
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return model


def resized(model: nn.Module, kind: Kind) -> Any:
    torch.manual_seed(3)
    model.resize_token_embeddings(40, mean_resizing=False)
    return model


def parametrized(model: nn.Module, kind: Kind) -> Any:
    owners = holders(model, kind)
    for owner in owners:
        parametrize.register_parametrization(owner, "weight", Negated())
    return model if owners else None


def pruned(model: nn.Module, kind: Kind) -> Any:
    owners = holders(model, kind)
    for owner in owners:
        prune.l1_unstructured(owner, "weight", amount=0.5)
    return model if owners else None


def frozen(model: nn.Module, kind: Kind) -> Any:
    for owner in holders(model, kind):
        owner.requires_grad_(False)
    return model if holders(model, kind) else None


def thawed(model: nn.Module, kind: Kind) -> Any:
    """Frozen when it was patched, or at least at its first step."""
    model.requires_grad_(False)
    with torch.no_grad():
        run(model)
    for owner in holders(model, kind) or [model]:
        owner.requires_grad_(True)
    return model


def subclassed(model: nn.Module, kind: Kind) -> Any:
    owners = holders(model, kind)
    for owner in owners:
        owner.weight = nn.Parameter(owner.weight.detach().as_subclass(Subclass))
    return model if owners else None


def other_loss(model: nn.Module, kind: Kind) -> Any:
    def doubled(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        return 2 * nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    if kind.make is bert:
        return None  # computes its loss by itself
    model.loss_function = doubled
    return model


def attributes(model: nn.Module, kind: Kind) -> Any:
    for module in module_of(model, kind).modules():
        for name, value in {"variance_epsilon": 0.5, "eps": 0.5, "padding_idx": 5, "scaling": 0.7}.items():
            if isinstance(getattr(module, name, None), int | float):
                setattr(module, name, value)
    if hasattr(module_of(model, kind), "act"):
        module_of(model, kind).act = torch.tanh
    return model


def other_attention(model: nn.Module, kind: Kind) -> Any:
    model.set_attn_implementation("sdpa" if model.config._attn_implementation == "eager" else "eager")
    return model


def other_activation(model: nn.Module, kind: Kind) -> Any:
    changed = [m for m in module_of(model, kind).modules() if hasattr(m, "act_fn")]
    for module in changed:
        module.act_fn = nn.Tanh()
    return model if changed else None


class Unequal(Twice):
    """Tables whose halves differ."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cos, sin = self.inner(*args, **kwargs)
        ramp = torch.linspace(0.5, 1.5, cos.shape[-1]).to(cos)
        return cos * ramp, sin * ramp


def other_tables(model: nn.Module, kind: Kind) -> Any:
    if kind.make is bert:
        return None
    model.model.rotary_emb = Unequal(model.model.rotary_emb)
    return model


def tables_changed_in_place(model: nn.Module, kind: Kind) -> Any:
    if kind.make is bert:
        return None

    def change(module: nn.Module, args: Any, tables: Any) -> None:
        for table in tables:
            table[..., 0] *= 2

    model.model.rotary_emb.register_forward_hook(change)
    return model


def quantized(model: nn.Module, kind: Kind) -> Any:
    changed = False
    for name, module in list(module_of(model, kind).named_modules()):
        if type(module) is nn.Linear:
            replace(module_of(model, kind), name, Quantized(module))
            changed = True
    return model if changed else None


def in_bfloat16(model: nn.Module, kind: Kind) -> Any:
    return model.to(torch.bfloat16)


def in_half(model: nn.Module, kind: Kind) -> Any:
    return model.half()


def in_float64(model: nn.Module, kind: Kind) -> Any:
    return model.double()


def part_in_float64(model: nn.Module, kind: Kind) -> Any:
    """One module; what it gets is converted to its dtype, and what it returns back."""
    module = module_of(model, kind)
    if kind.path in ("", "model") or isinstance(module, nn.Embedding):
        return None

    def convert(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, tuple):
            return tuple(convert(v, dtype) for v in value)
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return convert(args, torch.float64), {k: convert(v, torch.float64) for k, v in kwargs.items()}

    home = next(model.parameters()).dtype
    module.double()
    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(lambda module, args, out: convert(out, home))
    return model


def copied(model: nn.Module, kind: Kind) -> Any:
    return copy.deepcopy(model)


def checkpointed(model: nn.Module, kind: Kind) -> Any:
    model.gradient_checkpointing_enable()
    return model


def compiled(model: nn.Module, kind: Kind) -> Any:
    if kind.path in ("", "model"):  # test_torch_patching.py compiles these
        return None
    if hasattr(module_of(model, kind), "_cute_original"):  # the other one is as it is compiled, or not
        torch._dynamo.reset()
        module_of(model, kind).compile(backend="eager")
    return model


def sharded(model: nn.Module, kind: Kind) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    if kind.path and list(module_of(model, kind).parameters()):
        fully_shard(module_of(model, kind), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def offloaded(model: nn.Module, kind: Kind) -> Any:
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=torch.device("cpu"))


CHANGES: dict[str, Callable[[nn.Module, Kind], Any]] = {
    "nothing": nothing,
    "LoRA on its layers": lora,
    "LoRA, `modules_to_save`": saved_modules,
    "LNTuning": tuned_norms,
    "`forward` of the module replaced": instance_forward,
    "`forward` of modules in it replaced": instance_forwards_below,
    "`forward` of its class replaced": class_forward,
    "a function of its file replaced": function_replaced,
    "a wrapper around it": wrapper,
    "a hook on it": forward_hook,
    "hooks on modules in it": hooks_below,
    "a backward hook": backward_hook,
    "weights tied": tied,
    "`resize_token_embeddings`": resized,
    "`torch.nn.utils.parametrize`": parametrized,
    "`torch.nn.utils.prune`": pruned,
    "frozen": frozen,
    "frozen, then trained": thawed,
    "weights of a tensor subclass": subclassed,
    "quantized linear layers": quantized,
    "`loss_function` replaced": other_loss,
    "attributes (`eps`, `padding_idx`, ...)": attributes,
    "`set_attn_implementation`": other_attention,
    "`act_fn` replaced": other_activation,
    "`rotary_emb` replaced": other_tables,
    "its tables changed by a hook": tables_changed_in_place,
    "`.to(torch.bfloat16)`": in_bfloat16,
    "`.half()`": in_half,
    "`.double()`": in_float64,
    "`.double()` of the module": part_in_float64,
    "`copy.deepcopy`": copied,
    "gradient checkpointing": checkpointed,
    "`torch.compile` of the module": compiled,
    "`fully_shard`": sharded,
    "`accelerate.cpu_offload`": offloaded,
}
# Changes of which a copy of the model is no changed one, or is refused.
UNCOPIED = (instance_forward, instance_forwards_below, subclassed, sharded)
CLEAN_UP = contextlib.ExitStack()


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the calls of what the kinds run."""
    counts: Counter[str] = Counter()

    def count(name: str, function: Any) -> Any:
        return lambda *args, **kwargs: (counts.update([name]), function(*args, **kwargs))[1]

    with pytest.MonkeyPatch.context() as patched:
        for name in (*(KINDS.keys() & {*functions.__all__}), "swiglu"):
            patched.setattr(functions, name, count(name, getattr(functions, name)))
        patched.setattr(scaled_dot_product, "_attention", count("attention", scaled_dot_product._attention))
        patched.setattr(plain_mlp, "mlp", count("mlp", plain_mlp.mlp))
        patched.setattr(embedding, "embedding", count("embedding", embedding.embedding))
        patched.setattr(loss, "loss_of_head", count("loss", loss.loss_of_head))
        patched.setattr(decoder, "_masked", count("mask", decoder._masked))
        yield counts


def run(model: nn.Module) -> Any:
    return model(input_ids=TOKENS, labels=TOKENS)


def results(model: nn.Module, differentiable: bool) -> dict[str, torch.Tensor | None]:
    """Losses, logits and gradients in training mode, in evaluation mode and without gradients."""
    found: dict[str, torch.Tensor | None] = {}
    for mode in ("train", "eval", "no_grad"):
        model.train(mode == "train")
        with torch.set_grad_enabled(mode != "no_grad"):
            out = run(model)
        found[f"{mode} loss"] = out.loss.detach()
        if mode != "train":
            found[f"{mode} logits"] = out.logits.detach()
        if mode != "no_grad" and differentiable and out.loss.requires_grad:
            model.zero_grad()
            out.loss.backward()
            for name, p in model.named_parameters():
                grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                found[f"{mode} {name}"] = None if grad is None else grad.detach().clone()
    return found


def check(plain: nn.Module, patched: nn.Module, differentiable: bool, case: str, wide: nn.Module | None = None) -> None:
    """``wide`` is ``plain`` in float64, where a copy of it is not to be had."""
    expected, got = results(plain, differentiable), results(patched, differentiable)
    assert expected.keys() == got.keys(), case
    dtypes = {p.dtype for p in plain.parameters()}
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    exact = results(wide or copy.deepcopy(plain).double(), differentiable) if eps > 1e-6 else expected
    sizes = {name: max(float(x.abs().max()), 1e-2) for name, x in exact.items() if x is not None}
    lost = max(float((expected[name] - exact[name]).abs().max()) / size for name, size in sizes.items())
    moved: dict[str, Any] = {}
    for name, e in expected.items():
        assert (e is None) == (got[name] is None), f"{case}: {name}"
        if e is None:
            continue
        assert (got[name].dtype, got[name].shape) == (e.dtype, e.shape), f"{case}: {name} is a {got[name].dtype}"
        error = float((got[name] - exact[name]).abs().max()) / sizes[name]
        # Twice what rounding takes from the model without patch; else 1e-4 in float32, for sums in another order.
        allowed = 2 * lost + 4 * eps if exact is not expected else 1024 * eps
        if error > allowed:  # as ill-conditioned as a change of the weights' last bit shows
            moved = moved or results_of_moved(plain, differentiable)
            allowed = max(allowed, float((moved[name] - e).abs().max()) / sizes[name])
        assert error <= allowed, f"{case}: {name} is off by {error:.3g} of its size, {allowed:.3g} allowed"


def results_of_moved(model: nn.Module, differentiable: bool) -> dict[str, Any]:
    """The results of a model whose float32 weights are off by a unit in the last place, by turns up and down."""
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            if p.dtype == torch.float32:
                p.data.mul_(1 + (-1) ** i * 2**-23)
    found = results(model, differentiable)
    with torch.no_grad():
        for p, old in zip(model.parameters(), before, strict=True):
            p.data.copy_(old)
    return found


def mark(name: str, change: Callable[[nn.Module, Kind], Any]) -> dict[str, str]:
    """One row of the table: runs a change on each kind, and says what then runs."""
    row = {}
    for label, kind in KINDS.items():
        with CLEAN_UP:  # a change may put its undoing there
            models = [made(kind), made(kind)]
            models[1].load_state_dict(models[0].state_dict())
            cute_ops_torch.patch(models[1])
            with counted() as before:
                run(models[1].train())
            wide = None
            if change in UNCOPIED and next(models[0].parameters()).dtype == torch.bfloat16:
                wide = made(kind).double()
                wide.load_state_dict(models[0].state_dict())
                wide = change(wide, kind)
            models = [change(model, kind) for model in models]
            if models[0] is None:
                row[label] = ""
                continue
            check(*models, change is not offloaded, f"{name}, {label}", wide)
            with counted() as after:
                run(models[1].train())
            now, then = kind.count(after), kind.count(before)
            row[label] = "ours" if now >= then else "part" if now else "own"
    return row


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, which does not know these norms
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.drawn(0.3)
@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_model_computes_what_it_computes_without_patch(name: str) -> None:
    assert row(name, mark(name, CHANGES[name])) in table(), "run python tests/torch/test_torch_patch_changes.py"


def test_the_page_has_a_row_for_each_change() -> None:
    assert [line.split(" | ")[0][2:] for line in table()[2:]] == list(CHANGES)
    assert table()[0] == row("after `patch`", {kind: f"`{kind}`" for kind in KINDS})


# Changes that another one may follow.
COMBINED = [
    instance_forward, instance_forwards_below, wrapper, forward_hook, hooks_below, tied, resized, parametrized, frozen,
    thawed, other_loss, attributes, other_attention, other_activation, other_tables, tables_changed_in_place, quantized,
    in_float64, copied, checkpointed,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_changes_in_combination(seed: int) -> None:
    rng = random.Random(seed)
    make = rng.choice([llama, KINDS["softmax"].make, gemma, bert])
    kinds = [kind for kind in KINDS.values() if kind.make is make]
    steps = [(rng.choice(COMBINED), rng.choice(kinds)) for _ in range(rng.randint(2, 4))]
    if rng.random() < 0.3 and (last := rng.choice(kinds)).linears:
        steps.append((lora, last))
    case = f"seed {seed}: " + ", ".join(f"{change.__name__} of {kind.path or 'the model'}" for change, kind in steps)
    print(case)
    models = [made(kinds[0]), made(kinds[0])]
    cute_ops_torch.patch(models[1])
    for change, kind in steps:
        try:
            changed = [change(copy.deepcopy(model), kind) for model in models[:1]]
        except Exception:
            continue  # cannot follow the changes before it, with or without patch
        if changed[0] is None:
            continue
        try:
            run(changed[0].train())
        except Exception:
            continue
        models = [change(model, kind) for model in models]
    check(*models, True, case)


@pytest.mark.parametrize("seed", range(4))
def test_inputs_of_any_layout_run(seed: int) -> None:
    """Modules that our ops do not take in such memory, or in such a dtype, run their own ``forward``."""
    rng = random.Random(seed)
    norms = [transformers.models.llama.modeling_llama.LlamaRMSNorm(6), nn.LayerNorm(6), nn.LayerNorm((5, 6)), nn.GELU(),
             nn.LayerNorm(6, bias=False), nn.LayerNorm(6, elementwise_affine=False)]  # fmt: skip
    for module in norms:
        plain, patched = nn.Sequential(module, nn.GELU()), nn.Sequential(copy.deepcopy(module), nn.GELU())
        cute_ops_torch.patch(patched)
        for _ in range(40):
            lead = [rng.choice([0, 1, 2, 5]) for _ in range(rng.randint(1, 3))]
            shape = [*lead, 5, 6]
            order = rng.sample(range(len(shape)), len(shape))
            x = torch.randn([shape[i] for i in order]).permute([order.index(i) for i in range(len(shape))])
            if rng.random() < 0.5:
                x = torch.randn([*shape, 2])[..., rng.randint(0, 1)]
            if rng.random() < 0.3:
                x = torch.randn(6).expand(shape)
            if rng.random() < 0.2:
                x, _ = x.double(), (plain.double(), patched.double())
            x = x.detach().requires_grad_()
            outs = []
            for model in (plain, patched):
                out = model(x)
                outs.append((out, *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])))
            torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-5)
            plain.float(), patched.float()
    zero = torch.tensor(1.5)
    torch.testing.assert_close(patched[1](zero), plain[1](zero))


def test_a_forward_reads_no_global_by_an_attribute_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``model = torch.compile(model)`` does not concern a ``forward`` with ``self.model``."""
    unchanged = bypass.reads(lambda self: (self.PAGE, MLP))
    for name, still in (("PAGE", True), ("MLP", False)):
        monkeypatch.setattr(sys.modules[__name__], name, ())
        assert unchanged() == still


def test_what_no_op_takes_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    bypass._say.cache_clear()
    model = nn.Sequential(nn.GELU())
    cute_ops_torch.patch(model)
    for _ in range(3):
        model(torch.randn(3, 4).t())
    assert caplog.messages == [
        "GELU runs its original forward: no op of ours takes float32[4, 3] of stride (4,) on cpu"
    ]


def test_a_model_made_by_the_class_of_a_patched_one_is_not_patched(tmp_path: Path) -> None:
    plain = made(KINDS["rmsnorm"])
    patched = copy.deepcopy(plain)
    cute_ops_torch.patch(patched)
    patched.save_pretrained(tmp_path)
    for again in (type(patched).from_pretrained(tmp_path), type(patched)(plain.config)):
        again.load_state_dict(plain.state_dict())
        assert [type(m) for m in again.modules()] == [type(m) for m in plain.modules()]
        assert run(again.train()).logits is not None
        check(plain, again, True, "made anew")
        cute_ops_torch.patch(again)
        check(plain, again, True, "made anew and patched")
    inner = type(patched.model.layers[0].mlp)(plain.config)
    assert type(inner) is type(plain.model.layers[0].mlp)


def table() -> list[str]:
    return PAGE.read_text("utf-8").split(f"{BEGIN}\n")[1].split(f"\n{END}")[0].splitlines()


def row(name: str, cells: dict[str, str]) -> str:
    return f"| {name} | " + " | ".join(cells[kind] for kind in KINDS) + " |"


def write_table() -> None:
    warnings.simplefilter("ignore")
    head = [row("after `patch`", {kind: f"`{kind}`" for kind in KINDS}), "|---" * (len(KINDS) + 1) + "|"]
    made_rows = [row(name, mark(name, change)) for name, change in CHANGES.items()]
    before, rest = PAGE.read_text("utf-8").split(f"{BEGIN}\n")
    after = rest.split(END)[1]
    PAGE.write_text("\n".join([f"{before}{BEGIN}", *head, *made_rows, f"{END}{after}"]), "utf-8")


if __name__ == "__main__":
    write_table()
