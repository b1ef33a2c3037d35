"""Checks of training on several ranks: FSDP2 in the ways that programs use it, optimizers, patched models.

A model that is patched is compared with the same one that is not, and both with one process in float32.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import cute_ops_torch
from cute_ops.autotune import dispatch
from cute_ops.declaration.binding import bind
from cute_ops.declaration.shapes import Array
from cute_ops.jit import cache, target
from cute_ops.ops import OPS
from cute_ops_torch import inductor
from cute_ops_torch.huggingface.packed_weights import pack
from cute_ops_torch.optim import AdamW
from tests.torch.distributed_checks import (
    VOCABULARY,
    World,
    check,
    hugging_face,
    llama,
    same_gradients,
    tensor_parallel,
)
from tests.torch.drawn_programs import through_autograd

# What needs Hugging Face's models.
of_models = check if find_spec("transformers") else lambda function: function


def sharded(world: World, model: Any, **options: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, mesh=world.line, **options)
    return fully_shard(model, mesh=world.line, **options)


def own_rows(world: World, steps: int = 1) -> torch.Tensor:
    """Tokens by step, rank, and place."""
    torch.manual_seed(11)
    return torch.randint(VOCABULARY, (steps, world.line.size(), 9)).to(world.device)


def whole_gradients(world: World, tokens: torch.Tensor, layers: int = 2) -> Any:
    """A model whose gradient is the mean over ranks and the sum over steps, and what it was before."""
    whole = hugging_face(world, layers)
    start = copy.deepcopy(whole)
    for rows in tokens:
        (sum(whole(row[None], labels=row[None]).loss for row in rows) / len(rows)).backward()
    return whole, start


# --- FSDP2 -----------------------------------------------------------------------------------------------------------


@of_models
def untouched_models_under_the_graph_pass(world: World) -> None:
    """FSDP2 around what is compiled, and a gated MLP whose features ranks share, as DTensors in its graph."""
    if world.few or world.rank > 1:  # graphs do not depend on the device; two ranks are enough, and Dynamo is slow
        return
    mesh = world.grid["tp"]
    torch.manual_seed(11)
    tokens = torch.randint(VOCABULARY, (1, 2, 9))
    whole, start = whole_gradients(world, tokens, layers=1)
    with inductor.enable(devices=("cpu",)):
        inductor.replaced.clear()
        model: Any = start
        for layer in model.model.layers:
            layer.compile(backend=through_autograd)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(tokens[0][world.rank][None], labels=tokens[0][world.rank][None]).loss.backward()
        same_gradients(world, model, whole, "graph pass under FSDP2")
        assert inductor.replaced["gated_mlp"] >= 1, inductor.replaced

        torch._dynamo.reset()
        inductor.replaced.clear()
        torch.manual_seed(3)
        x = torch.randn(2, 5, 16)
        alone = GatedMLP()
        shared = parallelize_module(copy.deepcopy(alone), mesh, {
            "gate": ColwiseParallel(use_local_output=False), "up": ColwiseParallel(use_local_output=False),
            "down": RowwiseParallel(),
        })  # fmt: skip
        loss = torch.compile(shared, backend=through_autograd, fullgraph=True)(x).square().sum()
        loss.backward()
        wanted = alone(x).square().sum()
        wanted.backward()
        world.close(loss, wanted.detach(), "loss")
        same_gradients(world, shared, alone, "graph pass of DTensors")
        assert not inductor.replaced["gated_mlp"], inductor.replaced


class GatedMLP(nn.Module):
    """As models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16)
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((16, 32), (16, 32), (32, 16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


@of_models
def fsdp_sums_gradients_when_it_is_told_to(world: World) -> None:
    """Two steps without and with synchronization, parameters that stay gathered and such that do not."""
    tokens = own_rows(world, 2)
    whole, start = whole_gradients(world, tokens)
    for reshard in (True, False) if not world.few else (True,):
        model = copy.deepcopy(start)
        cute_ops_torch.patch(model)
        sharded(world, model, reshard_after_forward=reshard)
        for last, rows in zip((False, True), tokens, strict=True):
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            mine = rows[world.rank][None]
            model(mine, labels=mine).loss.backward()
        same_gradients(world, model, whole, f"reshard: {reshard}")


@of_models
def fsdp_in_mixed_precision(world: World) -> None:
    """Weights in float32, products in bfloat16: as near to float32 as the model that is not patched."""
    tokens = own_rows(world)
    whole, start = whole_gradients(world, tokens)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    errors = {}
    for patched in (False, True):
        model = copy.deepcopy(start)
        if patched:
            cute_ops_torch.patch(model)
        sharded(world, model, mp_policy=policy)
        mine = tokens[0][world.rank][None]
        out = model(mine, labels=mine)
        out.loss.backward()
        assert (out.logits is None) == patched, out.logits
        pairs = zip(model.parameters(), whole.parameters(), strict=True)
        errors[patched] = max(float((p.grad.full_tensor() - w.grad).norm() / w.grad.norm()) for p, w in pairs)
    assert errors[True] < 1.25 * errors[False] + 1e-3, errors


def checkpointed_by_hugging_face(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def checkpointed_by_torch(model: Any) -> None:
    layer = type(model.model.layers[0])
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, layer))


@of_models
def fsdp_of_checkpointed_layers(world: World) -> None:
    tokens = own_rows(world)
    whole, start = whole_gradients(world, tokens)
    for prepare in (checkpointed_by_hugging_face, checkpointed_by_torch):
        model = copy.deepcopy(start).train()
        cute_ops_torch.patch(model)
        prepare(model)
        sharded(world, model)
        mine = tokens[0][world.rank][None]
        model(mine, labels=mine).loss.backward()
        same_gradients(world, model, whole, prepare.__name__)


@of_models
def patch_and_unpatch_leave_fsdp_alone(world: World) -> None:
    """A model may be patched after it was sharded, and what was sharded after it was patched may be unpatched."""
    tokens = own_rows(world)
    whole, start = whole_gradients(world, tokens)
    mine = tokens[0][world.rank][None]
    for first in ("patch", "shard"):
        model = copy.deepcopy(start)
        if first == "patch":
            cute_ops_torch.patch(model)
        sharded(world, model)
        if first == "shard":
            cute_ops_torch.patch(model)
        for patched in (True, False):
            model.zero_grad()
            out = model(mine, labels=mine)
            assert (out.logits is None) == patched, first
            out.loss.backward()
            same_gradients(world, model, whole, f"{first}, then patched: {patched}")
            if patched:
                cute_ops_torch.unpatch(model)
            assert all(isinstance(m, FSDPModule) for m in (model, *model.model.layers)), first
            model.set_requires_gradient_sync(True)


@of_models
def packed_weights_leave_no_memory_behind(world: World) -> None:
    """Weights that ``patch`` lays side by side, sharded by FSDP and by a plan: a rank keeps its part only."""
    for by_plan in (False, True):
        model: Any = hugging_face(world)
        for layer in model.model.layers:
            pack([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
        if by_plan:
            plan = {f"model.layers.*.mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")}
            parallelize_module(model, world.grid["tp"], {**plan, "model.layers.*.mlp.down_proj": RowwiseParallel()})
        else:
            sharded(world, model)
        for layer in model.model.layers:
            for weight in (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight):
                local = weight.to_local()
                assert local.untyped_storage().nbytes() == local.nbytes, by_plan


@of_models
def compiled_layers_under_fsdp(world: World) -> None:
    if world.rank > 1:  # two ranks are enough, and Dynamo is slow
        return
    mesh = world.grid["tp"]
    torch.manual_seed(11)
    tokens = torch.randint(VOCABULARY, (2, 9)).to(world.device)
    whole, start = whole_gradients(world, tokens[None], layers=1)
    model: Any = copy.deepcopy(start)
    cute_ops_torch.patch(model)
    for layer in model.model.layers:
        layer.compile(backend="inductor" if world.few else "eager")
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    mine = tokens[world.rank][None]
    model(mine, labels=mine).loss.backward()
    same_gradients(world, model, whole, "compiled")


@of_models
def every_pass_has_the_same_bits(world: World) -> None:
    """Memory that a collective still reads is not used again, and kernels wait for what it gathers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(13)
    scale = 16 if world.few else 1  # so that collectives and kernels take long enough to meet
    config = LlamaConfig(
        vocab_size=256 * scale, hidden_size=64 * scale, intermediate_size=128 * scale, num_hidden_layers=3,
        num_attention_heads=scale, num_key_value_heads=scale,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(world.device)
    cute_ops_torch.patch(model)
    cute_ops_torch.warm_up(model, torch.bfloat16)
    sharded(world, model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    mine = (torch.randint(256, (2, 64 * scale)).to(world.device) + world.rank) % 256
    seen = []
    # Attention's dq is else summed in the order in which CTAs come. Of cuBLAS, which wants a variable set for several
    # streams, torch warns only: products run in one.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        for _ in range(8 if world.few else 2):
            model.zero_grad()
            model(mine, labels=mine).loss.backward()
            seen.append([p.grad.to_local().clone() for p in model.parameters()])
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    names = [name for name, _ in model.named_parameters()]
    wrong = [
        (step, name)
        for step, gradients in enumerate(seen[1:], 1)
        for name, a, b in zip(names, seen[0], gradients, strict=True)
        if not torch.equal(a, b)
    ]
    assert not wrong, wrong


# --- optimizers ------------------------------------------------------------------------------------------------------


def after_steps(optimizer: Any, model: nn.Module, tokens: Any, target: Any) -> list[torch.Tensor]:
    own = optimizer(model.parameters(), lr=1e-2)
    for _ in range(3):
        own.zero_grad()
        model(tokens, target).backward()
        own.step()
    return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


@check
def adamw_of_shards(world: World) -> None:
    """Steps on parameters that FSDP shards, and on such of a plan, whose norms have gradients that are sums."""

    def by_plan(model: Any) -> None:
        tensor_parallel(model, world.grid["tp"])

    def by_fsdp(model: Any) -> None:
        fully_shard(model, mesh=world.line)

    for shard in (by_plan, by_fsdp):
        whole, tokens, target = llama(world, True)
        model = copy.deepcopy(whole)
        shard(model)
        found = after_steps(AdamW, model, tokens, target)
        expected = after_steps(partial(torch.optim.AdamW, eps=1e-8), whole, tokens, target)
        for (name, _), got, right in zip(whole.named_parameters(), found, expected, strict=True):
            # A step of a gradient near zero is a quotient of rounding errors.
            assert (got - right).abs().mean() < 1e-4, f"{shard.__name__}: {name}"


# --- tensor parallelism ----------------------------------------------------------------------------------------------


@check
def results_that_are_still_on_their_way(world: World) -> None:
    """Parallel layers hand over tensors whose collective has not ended; ops wait for them."""
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(s, device=world.device) for s in ((4, 3, 8), (4, 3, 8), (8,)))
    head, target = torch.randn(11, 8, device=world.device), torch.randint(11, (4, 3), device=world.device)

    def late(tensor: torch.Tensor) -> torch.Tensor:
        part = DTensor.from_local(tensor / world.line.size(), world.line, [Partial()], run_check=False)
        return part.redistribute(placements=[Replicate()], async_op=True).to_local()

    calls: list[Callable[[Any, Any], Any]] = [
        lambda x, r: cute_ops_torch.rmsnorm(x, weight),
        lambda x, r: cute_ops_torch.add_rmsnorm(x, r, weight)[0],
        lambda x, r: cute_ops_torch.add_rmsnorm(r, x, weight)[1],
        lambda x, r: cute_ops_torch.linear(x, head, epilogue="gelu"),
        lambda x, r: cute_ops_torch.linear_cross_entropy(x, head, target),
        lambda x, r: cute_ops_torch.cross_entropy(x, target.clamp(max=7)),
        lambda x, r: cute_ops_torch.silu_mul(x, r),
        lambda x, r: torch.ops.cute.rmsnorm(x, weight),
    ]
    for number, call in enumerate(calls):
        results = []
        for arrives in (lambda t: t, late):
            leaf, other = (t.detach().clone().requires_grad_() for t in (x, residual))
            given = arrives(leaf)
            out = call(given, other)
            results.append([out, *torch.autograd.grad(out.sin().sum(), [given, other], allow_unused=True)])
            with torch.no_grad():
                results[-1].append(call(arrives(x), residual))
        for expected, got in zip(*results, strict=True):
            assert (expected is None) == (got is None)
            if got is not None:
                world.close(got.detach(), expected.detach(), number)


@of_models
def hugging_face_s_own_plan(world: World) -> None:
    """``tp_plan="auto"`` sets a forward on each module that it shards."""
    if world.line.size() != 2:
        return  # it has a mesh of all ranks, and two heads of keys
    from safetensors.torch import save_file

    whole: Any = hugging_face(world, vocabulary=38)
    torch.manual_seed(12)
    tokens = torch.randint(38, (2, 8)).to(world.device)
    whole(tokens, labels=tokens).loss.backward()
    with tempfile.TemporaryDirectory() as folder:
        whole.config.save_pretrained(folder)  # the model's own writes on the first rank only
        save_file(whole.state_dict(), f"{folder}/model.safetensors", {"format": "pt"})
        model = type(whole).from_pretrained(folder, tp_plan="auto").train()
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)
    for patched in (False, True):
        if patched:
            cute_ops_torch.patch(model)
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        same_gradients(world, model, whole, f"patched: {patched}")


# --- compiling -------------------------------------------------------------------------------------------------------


@check
def one_rank_compiles_and_the_others_wait(world: World) -> None:
    """Ranks that need a kernel at the same time, which no cache holds."""
    norm, eps = next(op for op in OPS if op.name == "rmsnorm"), 1e-6 + os.getpid() * 1e-12
    (shared,) = [torch.tensor([eps], dtype=torch.float64, device=world.device)]
    dist.broadcast(shared, 0)
    shapes = {"x": Array((4, 256), "bfloat16"), "weight": Array((256,), "bfloat16")}
    plan = dispatch.choose(bind(norm, shapes, {"eps": float(shared)}), {}, target.parse("sm_90a"))
    dist.barrier()
    seconds = cache.build(plan.variant)
    counts = torch.tensor([float(seconds > 0)], device=world.device)
    dist.all_reduce(counts)
    assert float(counts) == 1.0, float(counts)
