"""One rank of a phase of distributed.py in PyTorch: training steps under FSDP2 and tensor parallelism, ops on DTensors.

    distributed_torch.py PHASE RANK RANKS DEVICE FOLDER [--batch 4] [--rounds 7]

Contenders run in the same processes and take turns. Rank 0 writes a line of JSON for each into FOLDER/rows.jsonl. What
raises on all ranks costs its own row; ranks tell each other in files, since one that waits in a collective hears
nothing else.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import first_line, spread
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    loss_parallel,
    parallelize_module,
)

import cute_ops_torch
from cute_ops.jit import cache
from cute_ops_torch.optim import AdamW

sys.path.append(str(Path(__file__).parents[1] / "examples" / "llama"))
from tensor_parallel import sequence_parallel

Tensor = torch.Tensor
# The largest difference of two contenders' losses in their first steps, in nats.
LOSS_TOLERANCE = 0.02
# By so much the error of ours, against float64, may exceed that of PyTorch's own functions.
ERROR_FACTOR, ERROR_MORE = 1.5, 1e-3
AGREE_SECONDS = 120
RATE = 1e-5  # on the same tokens again and again: at 1e-4 the losses fall so fast that roundings part them
WARM_UP_STEPS = 3


class Ranks:
    """This rank, its mesh, and what it knows of the others."""

    def __init__(self, phase: str, rank: int, ranks: int, device: str, folder: Path) -> None:
        self.phase, self.rank, self.ranks, self.small = phase, rank, ranks, device == "cpu"
        self._rows, self._asked = folder / "rows.jsonl", 0
        self.device = torch.device(device) if self.small else torch.device(device, rank)
        options: dict[str, Any] = {"backend": "gloo"}
        if not self.small:
            torch.cuda.set_device(self.device)
            options = {"backend": "nccl", "device_id": self.device}
        dist.init_process_group(
            init_method=f"file://{folder.absolute()}/group", rank=rank, world_size=ranks,
            timeout=timedelta(seconds=300), **options,
        )  # fmt: skip
        self.mesh = init_device_mesh(device, (ranks,))
        self._store = dist.FileStore(str(folder / "said"), ranks)
        self._store.set_timeout(timedelta(seconds=AGREE_SECONDS))

    def say(self, text: str) -> None:
        print(text, flush=True)

    def report(self, **row: Any) -> None:
        self.say(f"{row['case']}: {row['contender']}: {row['status']}")
        if self.rank == 0:
            with self._rows.open("a") as file:
                file.write(json.dumps({"phase": self.phase, "gpus": self.ranks, **row}) + "\n")

    def attempt(self, what: str, run: Callable[[], Any]) -> tuple[Any, str]:
        """What ``run()`` gives, and what went wrong on any rank.

        Raises:
            SystemExit: a rank does not come to the end of it.
        """
        self.say(f"at {what}")
        made, error = None, ""
        try:
            made = run()
            self.wait()
        except Exception as problem:
            traceback.print_exc()
            error = first_line(problem)
        self._asked += 1
        self._store.set(f"{self._asked}/{self.rank}", error or "ok")
        try:
            said = [self._store.get(f"{self._asked}/{k}").decode() for k in range(self.ranks)]
        except (RuntimeError, dist.DistStoreError):
            sys.exit(f"{what}: another rank has not come to its end in {AGREE_SECONDS} s; here: {error or 'ok'}")
        wrong = dict.fromkeys(text for text in said if text != "ok")
        return (None if wrong else made), "; ".join(wrong)

    def wait(self) -> None:
        if not self.small:
            torch.cuda.synchronize()

    def most(self, values: Sequence[float]) -> list[float]:
        """Of each value the largest of all ranks."""
        found = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()  # type: ignore[no-any-return]

    def spread(self, tensor: Tensor, placement: Any) -> DTensor:
        """Distribute without communication: all ranks have the whole tensor."""
        return distribute_tensor(tensor, self.mesh, [placement], src_data_rank=None)


# --- a training step -------------------------------------------------------------------------------------------------


def build(ranks: Ranks, dtype: torch.dtype) -> Any:
    """The layers of Llama 3.2 1B, eight of them, with the same random weights on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    }  # fmt: skip
    if ranks.small:
        sizes |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(tie_word_embeddings=False, attn_implementation="sdpa", use_cache=False, **sizes)
    with ranks.device:
        return LlamaForCausalLM(config).to(dtype).train()


class Trainer:
    """A contender's step, warm.

    Attributes:
        seconds: of a step, by sample.
        peak: the most memory of a step, in bytes, that of other contenders left out.
    """

    def __init__(self, ranks: Ranks, make: Callable[[], Callable[[], Tensor]]) -> None:
        self.ranks, self.seconds, self.peak = ranks, list[float](), 0
        before = self._allocated()
        self.step = make()
        self.losses = [self._loss() for _ in range(WARM_UP_STEPS)]
        ranks.wait()
        gc.collect()
        self._own = self._allocated() - before

    def _allocated(self) -> int:
        return 0 if self.ranks.small else torch.cuda.memory_allocated()

    def _loss(self) -> float:
        """The mean over the ranks."""
        loss = self.step()
        dist.all_reduce(loss)
        return float(loss) / self.ranks.ranks

    def sample(self, steps: int) -> None:
        others = self._allocated() - self._own
        if not self.ranks.small:
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        self.ranks.wait()
        begin = time.perf_counter()
        for _ in range(steps):
            last = self.step()
        self.ranks.wait()
        self.seconds.append((time.perf_counter() - begin) / steps)
        if not self.ranks.small:
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() - others)
        dist.all_reduce(last)
        self.losses.append(float(last) / self.ranks.ranks)


def training_steps(ranks: Ranks, case: str, makes: dict[str, Any], tokens: int, rounds: int) -> None:
    """Make all contenders, then sample them in turns; the first one's losses are what the others' should be."""
    trainers: dict[str, Trainer] = {}
    for name, make in makes.items():
        made, wrong = ranks.attempt(f"{case}: making {name}", lambda make=make: Trainer(ranks, make))
        if wrong:
            ranks.report(case=case, contender=name, tokens=tokens, status=f"failed: {wrong}")
            gc.collect()
        else:
            trainers[name] = made
    for turn in range(rounds):
        for name in list(trainers)[:: 1 if turn % 2 == 0 else -1]:
            sample = partial(trainers[name].sample, 1 if ranks.small else 4)
            _, wrong = ranks.attempt(f"{case}: sample {turn} of {name}", sample)
            if wrong:
                ranks.report(case=case, contender=name, tokens=tokens, status=f"failed: {wrong}")
                del trainers[name]
    first = next(iter(trainers.values()), None)
    for name, trainer in trainers.items():
        assert first
        pairs = zip(first.losses[:WARM_UP_STEPS], trainer.losses, strict=False)
        apart = max(abs(a - b) for a, b in pairs)
        seconds = spread(ranks.most(trainer.seconds))
        ranks.report(
            case=case, contender=name, tokens=tokens, ms=seconds.median * 1e3, ms_min=seconds.low * 1e3,
            ms_max=seconds.high * 1e3, tokens_per_s=tokens / seconds.median,
            peak_gb=ranks.most([trainer.peak])[0] / 1e9, loss_first=trainer.losses[0], loss_last=trainer.losses[-1],
            apart=apart, status="ok" if apart < LOSS_TOLERANCE else f"wrong: losses differ by {apart:.3g} nats",
        )  # fmt: skip


def trained(model: Any, optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def step() -> Tensor:
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = value.detach()
        return value.full_tensor() if isinstance(value, DTensor) else value

    return step


def optimizer_of(contender: str, model: Any, small: bool) -> torch.optim.Optimizer:
    if contender.endswith("+ AdamW"):
        return AdamW(model.parameters(), lr=RATE)
    # The fused one takes no list of DTensors and tensors, which Hugging Face's plan leaves.
    mixed = len({type(p.data) for p in model.parameters()}) > 1
    return torch.optim.AdamW(model.parameters(), lr=RATE, **({"foreach": False} if mixed else {"fused": not small}))


def sharded(ranks: Ranks, contender: str, tokens: Tensor, compiled: bool) -> Callable[[], Tensor]:
    """FSDP2: weights in float32, each layer gathered in bfloat16, gradients summed in float32."""
    model = build(ranks, torch.float32)
    if contender.startswith("ours"):
        cute_ops_torch.patch(model)
        cute_ops_torch.warm_up(model, torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        if compiled:
            layer.compile(backend="eager" if ranks.small else "inductor")
        fully_shard(layer, mesh=ranks.mesh, mp_policy=policy)
    fully_shard(model, mesh=ranks.mesh, mp_policy=policy)
    optimizer = optimizer_of(contender, model, ranks.small)
    return trained(model, optimizer, lambda: model(input_ids=tokens, labels=tokens).loss)


def fsdp(ranks: Ranks, options: Any, compiled: bool = False) -> None:
    size = (2, 16) if ranks.small else (options.batch, 4096)
    torch.manual_seed(100 + ranks.rank)
    tokens = torch.randint(0, 128 if ranks.small else 128256, size, device=ranks.device)
    names = ("torch", "ours") if compiled else ("torch", "ours", "ours + AdamW")
    makes = {name: partial(sharded, ranks, name, tokens, compiled) for name in names}
    case = "FSDP2, compiled layers" if compiled else "FSDP2"
    training_steps(ranks, case, makes, ranks.ranks * tokens.numel(), options.rounds)


def fsdp_compiled(ranks: Ranks, options: Any) -> None:
    fsdp(ranks, options, compiled=True)


def by_plan(ranks: Ranks, contender: str, tokens: Tensor) -> Callable[[], Tensor]:
    """Tensor parallel with a sharded sequence between layers, and a loss over a sharded vocabulary."""
    model, plan = build(ranks, torch.bfloat16), sequence_parallel()
    if contender.startswith("ours"):
        cute_ops_torch.patch(model)
    else:
        plan["lm_head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, ranks.mesh, plan)
    if contender.startswith("ours"):
        model.lm_head.weight = nn.Parameter(ranks.spread(model.lm_head.weight.data, Shard(0)))

    def loss() -> Tensor:
        return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]

    step = trained(model, optimizer_of(contender, model, ranks.small), loss)
    return step if contender.startswith("ours") else in_loss_parallel(step)


def in_loss_parallel(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with ExitStack() as stack:
            stack.enter_context(loss_parallel())
            stack.enter_context(implicit_replication())
            return step()

    return run


def by_hugging_face(ranks: Ranks, contender: str, tokens: Tensor) -> Callable[[], Tensor]:
    """Hugging Face's own plan, as ``tp_plan="auto"`` applies it: the head gathers its logits."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    model = build(ranks, torch.bfloat16)
    if contender.startswith("ours"):
        cute_ops_torch.patch(model)
    takes_plan = "tp_plan" in inspect.signature(apply_tensor_parallelism).parameters  # since 5.23
    plan = [model._expand_parallel_plan(model.tp_plan)] if takes_plan else []
    apply_tensor_parallelism(model, ranks.mesh, *plan)
    optimizer = optimizer_of(contender, model, ranks.small)
    return trained(model, optimizer, lambda: model(input_ids=tokens, labels=tokens).loss)


def tensor_parallel(ranks: Ranks, options: Any) -> None:
    size = (2, 16) if ranks.small else (options.batch, 4096)
    torch.manual_seed(100)
    tokens = torch.randint(0, 128 if ranks.small else 128256, size, device=ranks.device)
    for case, prepare, names in (
        ("tensor parallel, sharded sequence", by_plan, ("torch", "ours", "ours + AdamW")),
        ("tensor parallel, Hugging Face's plan", by_hugging_face, ("torch", "ours")),
    ):
        makes = {name: partial(prepare, ranks, name, tokens) for name in names}
        training_steps(ranks, case, makes, tokens.numel(), options.rounds)
        gc.collect()


# --- ops on DTensors -------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A call on DTensors, forward and backward.

    Attributes:
        sizes: of the inputs, in this order.
        cuts: placements of the inputs.
        torch: PyTorch's functions on DTensors.
        ours: our functions on the same.
        plain: PyTorch's functions on whole tensors; by default ``torch``.
        classes: of integer targets, which are the last input; 0 where there are none.
    """

    name: str
    sizes: Sequence[Sequence[int]]
    cuts: Sequence[Any]
    torch: Callable[..., Any]
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    classes: int = 0


def cases(small: bool) -> list[Case]:
    b, s, k, n, c = (2, 8, 32, 48, 64) if small else (4, 2048, 4096, 14336, 128256)
    same, rows, columns, sequence = Replicate(), Shard(1), Shard(0), Shard(1)
    ours = cute_ops_torch

    def onto(out: Any, placement: Any) -> Any:
        return out.redistribute(placements=[placement]) if isinstance(out, DTensor) else out

    def norm(x: Any, weight: Any) -> Any:
        return F.rms_norm(x, weight.shape, weight, 1e-6)

    def gated(x: Any, both: Any, down: Any) -> Any:
        x = onto(x, same)
        return onto(F.linear(F.silu(F.linear(x, both[0])) * F.linear(x, both[1]), down), sequence)

    def our_gated(x: Any, both: Any, down: Any) -> Any:
        return onto(ours.gated_mlp(onto(x, same), both, down, halves=True), sequence)

    def loss(logits: Any, target: Any) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    return [
        Case(
            "linear and GELU, by columns", [(b, s, k), (n, k), (n,)], [same, columns, Shard(0)],
            lambda x, w, bias: F.gelu(F.linear(x, w, bias)),
            lambda x, w, bias: ours.linear(x, w, bias, epilogue="gelu"),
            lambda x, w, bias: F.gelu(F.linear(x, w, bias)),
        ),
        Case(
            "linear and residual, by rows, onto a sharded sequence", [(b, s, n), (k, n), (b, s, k)],
            [Shard(2), rows, sequence],
            lambda x, w, r: onto(F.linear(x, w), sequence) + r,
            lambda x, w, r: ours.linear(x, w, None, r, epilogue="add"),
            lambda x, w, r: F.linear(x, w) + r,
        ),
        Case(
            "gated MLP between sharded sequences", [(b, s, k), (2, n, k), (k, n)], [sequence, Shard(1), rows],
            gated, our_gated, gated,
        ),
        Case("RMS norm of a sharded sequence", [(b, s, k), (k,)], [sequence, same], norm, ours.rmsnorm, norm),
        Case(
            "cross entropy of sharded classes", [(b, s, c), (b, s)], [Shard(2), same], loss, ours.cross_entropy, loss,
            classes=c,
        ),
        Case(
            "head and cross entropy of sharded classes", [(b, s, k), (c, k), (b, s)], [same, columns, same],
            lambda h, w, t: loss(F.linear(h, w), t), ours.linear_cross_entropy,
            lambda h, w, t: loss(F.linear(h, w), t), classes=c,
        ),
    ]  # fmt: skip


class Call:
    """A case's forward and backward by one of its functions."""

    def __init__(self, ranks: Ranks, case: Case, function: Callable[..., Any]) -> None:
        self.ranks, self.function, self.seconds = ranks, function, list[float]()
        self.parallel = function is case.torch and bool(case.classes)
        self.inputs = [
            ranks.spread(t, cut).requires_grad_(t.is_floating_point())
            for t, cut in zip(whole_inputs(ranks, case), case.cuts, strict=True)
        ]
        with torch.no_grad(), self._contexts():
            out = function(*self.inputs)
        same = [Replicate() if isinstance(p, Partial) else p for p in out.placements]
        whole = cotangent(ranks, out.shape, out.dtype)
        self.dout = None if out.ndim == 0 else distribute_tensor(whole, ranks.mesh, same, src_data_rank=None)

    def _contexts(self) -> ExitStack:
        stack = ExitStack()
        if self.parallel:
            stack.enter_context(loss_parallel())
        return stack

    def run(self) -> list[Any]:
        wanted = [t for t in self.inputs if t.requires_grad]
        with self._contexts():
            out = self.function(*self.inputs)
            return [out, *torch.autograd.grad(out, wanted, self.dout)]

    def sample(self, calls: int) -> None:
        dist.barrier()
        self.ranks.wait()
        begin = time.perf_counter()
        for _ in range(calls):
            self.run()
        self.ranks.wait()
        self.seconds.append((time.perf_counter() - begin) / calls)


def whole_inputs(ranks: Ranks, case: Case) -> list[Tensor]:
    """The same on all ranks: numbers whose products are of the size of one; targets."""
    torch.manual_seed(7)
    floats = case.sizes[:-1] if case.classes else case.sizes
    options: dict[str, Any] = {"device": ranks.device, "dtype": torch.float32 if ranks.small else torch.bfloat16}
    made = [torch.randn(s, **options) / (s[-1] ** 0.5 if i and len(s) > 1 else 1) for i, s in enumerate(floats)]
    return made + ([torch.randint(case.classes, case.sizes[-1], device=ranks.device)] if case.classes else [])


def cotangent(ranks: Ranks, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    torch.manual_seed(8)
    return torch.randn(tuple(shape), device=ranks.device, dtype=dtype)


def exact(ranks: Ranks, case: Case) -> list[Tensor]:
    """Output and gradients in float64 on one device."""
    inputs = [t.double().requires_grad_() if t.is_floating_point() else t for t in whole_inputs(ranks, case)]
    out = case.plain(*inputs)
    dtype = inputs[0].dtype if ranks.small else torch.bfloat16
    dout = None if out.ndim == 0 else cotangent(ranks, out.shape, torch.float32 if ranks.small else dtype).double()
    return [out.detach(), *torch.autograd.grad(out, [t for t in inputs if t.requires_grad], dout)]


def error(got: Sequence[Any], right: Sequence[Tensor] | None) -> float:
    """The largest relative error of an array, by its norm. All ranks gather the arrays; who has ``right`` compares."""
    worst = 0.0
    for place, each in enumerate(got):
        whole = each.detach().full_tensor()
        if right is not None:
            apart = (whole.double() - right[place]).norm() / right[place].norm()
            worst = max(worst, float(apart.nan_to_num(torch.inf)))
        del whole
    return worst


def products(ranks: Ranks, options: Any) -> None:
    for case in cases(ranks.small):
        _, wrong = ranks.attempt(case.name, lambda case=case: compared(ranks, case, options.rounds))
        if wrong:
            ranks.report(case=case.name, contender="both", status=f"failed: {wrong}")
        gc.collect()
        if not ranks.small:
            torch.cuda.empty_cache()


def compared(ranks: Ranks, case: Case, rounds: int) -> None:
    calls, peaks, errors = dict[str, Call](), dict[str, float](), dict[str, float]()
    right = exact(ranks, case) if ranks.rank == 0 else None
    for name, function in (("torch", case.torch), ("ours", case.ours)):
        call, wrong = ranks.attempt(f"{case.name}: {name}", lambda f=function: Call(ranks, case, f))
        found, more = ranks.attempt(f"{case.name}: {name}, the first time", call.run) if call else (None, wrong)
        if more:
            ranks.report(case=case.name, contender=name, status=f"failed: {more}")
            continue
        errors[name] = ranks.most([error(found, right)])[0]
        del found
        calls[name] = call
    del right
    for name, call in calls.items():
        peaks[name] = peak(ranks, call)
    for turn in range(rounds):
        for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
            calls[name].sample(1 if ranks.small else 5)
    for name, call in calls.items():
        seconds = spread(ranks.most(call.seconds))
        limit = ERROR_FACTOR * errors.get("torch", 0.0) + ERROR_MORE
        ranks.report(
            case=case.name, contender=name, ms=seconds.median * 1e3, ms_min=seconds.low * 1e3,
            ms_max=seconds.high * 1e3, peak_gb=peaks[name], error=errors[name],
            status="ok" if errors[name] <= limit else f"wrong: relative error {errors[name]:.2g}",
        )  # fmt: skip


def peak(ranks: Ranks, call: Call) -> float:
    """GB that a call needs beyond its inputs."""
    if ranks.small:
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call.run()
    torch.cuda.synchronize()
    return ranks.most([torch.cuda.max_memory_allocated() - before])[0] / 1e9


PHASES = {"products": products, "fsdp": fsdp, "fsdp_compiled": fsdp_compiled, "tensor_parallel": tensor_parallel}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=PHASES)
    parser.add_argument("rank", type=int)
    parser.add_argument("ranks", type=int)
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch", type=int, default=4, help="sequences of 4096 tokens")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each contender")
    options = parser.parse_args(arguments)
    ranks = Ranks(options.phase, options.rank, options.ranks, options.device, options.folder)
    PHASES[options.phase](ranks, options)
    ranks.say(f"done; kernels: {vars(cache.counters)}")
    ranks.attempt("the end", lambda: None)
    if ranks.rank == 0:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
