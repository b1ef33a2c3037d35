"""One training step of a Llama-shaped decoder: tokens per second and peak memory.

The model is Hugging Face's ``LlamaForCausalLM`` with random weights (the layers of Llama 3.2 1B, eight of them), in
bfloat16, with SDPA attention and PyTorch's fused AdamW ("... + AdamW": with ours). Every contender trains from the
same weights on the same tokens in a process of its own, because Liger changes Hugging Face's modules for good. All
processes are ready before the first sample; then they take turns, in an order that each round draws anew, so that a GPU
which gets warmer, or rests while a slow host starts its kernels, does so for all of them. A sample is the time on the
GPU of steps of a loop that never waits for it, as loops of training do not: steps before the first that counts let the
host run ahead, and one of them, behind an idle GPU, says what the host takes (``host_ms``). Their first losses are
compared.

python benchmarks/llama_step.py --out out/benchmarks
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import Table, parse, read, spread
from rich.console import Console
from rich.table import Table as View

CONTENDERS = (
    "eager", "torch.compile", "Liger", "Liger + compile", "ours", "ours + AdamW", "ours + compile",
    "graph pass + compile", "graph pass + compile + AdamW", "graph pass + max-autotune", "ours + graph pass + compile",
)  # fmt: skip
COLUMNS = (
    "contender", "batch", "seqlen", "tokens_per_s", "tokens_per_s_min", "tokens_per_s_max", "ms", "host_ms", "peak_gb",
    "loss_first", "loss_last",
)  # fmt: skip
READY = "ready"
# The largest difference of two contenders' losses after the same steps, in nats.
TOLERANCE = 0.02


def build(seed: int = 0, small: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    }  # fmt: skip
    if small:
        sizes |= {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 512}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(seed)
    config = LlamaConfig(tie_word_embeddings=False, attn_implementation="sdpa", use_cache=False, **sizes)
    with torch.device("cpu" if small else "cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).train()


def prepare(contender: str, model: Any) -> Any:
    """The contender's form of the model."""
    parts = contender.removesuffix(" + AdamW").split(" + ")
    if "Liger" in parts:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model.config.model_type)
        if apply is None:
            raise LookupError(f"Liger does not have {model.config.model_type}")
        apply(model=model)
    if "ours" in parts:
        import cute_ops_torch

        print(cute_ops_torch.patch(model), file=sys.stderr)
        with contextlib.suppress(TypeError, ValueError):  # of no decoder; the first steps warm up, too
            cute_ops_torch.warm_up(model)
    if "graph pass" in parts:  # without "ours", the model as it is; Liger and ours return no logits either
        import cute_ops_torch.inductor

        cute_ops_torch.inductor.enable(devices=(next(model.parameters()).device.type,), logits=False)
    if parts[-1] == "max-autotune":
        return torch.compile(model, mode="max-autotune-no-cudagraphs")
    return torch.compile(model) if parts[-1] in ("compile", "torch.compile") else model


def optimizer_of(contender: str, model: Any, small: bool) -> torch.optim.Optimizer:
    if contender.endswith(" + AdamW"):
        from cute_ops_torch.optim import AdamW

        return AdamW(model.parameters(), lr=1e-4)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not small)


class Steps:
    """Training steps of a model, compiled and warm.

    Args:
        run: what is called for a step, with ``inputs``.
        warm_up: so many steps, which compile, too.
    """

    def __init__(
        self, run: Any, inputs: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, warm_up: int
    ) -> None:
        self.run, self.inputs, self.optimizer = run, inputs, optimizer
        self.device = next(iter(inputs.values())).device
        self.times: list[float] = []
        self.host_times: list[float] = []
        self.losses = [self.step() for _ in range(warm_up)]
        self.wait()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.run(**self.inputs).loss
        loss.backward()
        self.optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def sample(self, steps: int) -> None:
        """The seconds of a step once the host is ahead of the GPU, and those of the host in a step."""
        self.step()  # the process has been waiting for its turn
        self.wait()
        begin = time.perf_counter()
        self.step()
        self.host_times.append(time.perf_counter() - begin)
        first = self._mark()
        for _ in range(steps):
            last = self.step()
        self.times.append(self._seconds(first, self._mark()) / steps)
        self.losses.append(last)

    def _mark(self) -> Any:
        """A moment of the device."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, first: Any, last: Any) -> float:
        self.wait()
        return last - first if self.device.type != "cuda" else first.elapsed_time(last) / 1e3  # type: ignore[no-any-return]

    def figures(self) -> dict[str, float]:
        """Columns that do not depend on the model."""
        peak = torch.cuda.max_memory_allocated() / 1e9 if self.device.type == "cuda" else 0.0
        host = spread(self.host_times).median * 1e3
        losses = {"loss_first": self.losses[0].item(), "loss_last": self.losses[-1].item()}
        return {"host_ms": host, "peak_gb": peak, **losses}


class Trainer(Steps):
    """A contender's Llama."""

    def __init__(self, contender: str, batch: int, seqlen: int, small: bool) -> None:
        self.contender, self.batch, self.seqlen = contender, batch, seqlen
        model = build(small=small)
        tokens = torch.randint(0, model.config.vocab_size, (batch, seqlen), device=model.device)
        inputs = {"input_ids": tokens, "labels": tokens}
        super().__init__(prepare(contender, model), inputs, optimizer_of(contender, model, small), 4)

    def row(self) -> dict[str, Any]:
        """Medians over the samples."""
        seconds, count = spread(self.times), self.batch * self.seqlen
        return {
            "contender": self.contender, "batch": self.batch, "seqlen": self.seqlen,
            "tokens_per_s": count / seconds.median, "tokens_per_s_min": count / seconds.high,
            "tokens_per_s_max": count / seconds.low, "ms": seconds.median * 1e3, **self.figures(),
        }  # fmt: skip


def measure(contender: str, batch: int, seqlen: int, steps: int, rounds: int, small: bool) -> dict[str, Any]:
    """One contender alone."""
    trainer = Trainer(contender, batch, seqlen, small)
    for _ in range(rounds):
        trainer.sample(steps)
    if "graph pass" in contender:
        from cute_ops_torch import inductor

        print(inductor.report(), file=sys.stderr)
    return trainer.row()


def obey(trainer: Trainer, steps: int) -> None:
    """A contender's process: a sample for each line that comes, then its row."""
    print(READY, flush=True)
    for _ in sys.stdin:
        trainer.sample(steps)
        print(READY, flush=True)
    print(json.dumps(trainer.row()), flush=True)


def in_drawn_order(workers: Sequence[Any], number: int) -> list[Any]:
    """The order of a round: nobody's turn comes after the same one's each time."""
    return random.Random(number).sample(workers, len(workers))


class Worker:
    """Such a process, from outside."""

    def __init__(self, contender: str, options: Sequence[str], file: str = __file__) -> None:
        self.contender = contender
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, file, "--one", contender, "--in-turns", *options]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def ready(self) -> bool:
        """Waits until it has done what it was told; False where it has ended."""
        assert self._process.stdout
        return any(line.strip() == READY for line in iter(self._process.stdout.readline, ""))

    def sample(self) -> bool:
        assert self._process.stdin
        try:
            print(file=self._process.stdin, flush=True)
        except BrokenPipeError:
            return False
        return self.ready()

    def end(self) -> dict[str, Any] | str:
        """Its row, or the end of what it said before it died."""
        output, _ = self._process.communicate()
        if self._process.returncode == 0:
            return json.loads(output.splitlines()[-1])  # type: ignore[no-any-return]
        self._errors.seek(0)
        return self._errors.read()[-2000:]


def show(path: Path, console: Console) -> None:
    rows = read(path)
    view = View("contender", "tokens/s", "ms per step", "peak GB", "first loss", title="Llama-shaped training step")
    for row in rows:
        figures = (f"{float(row['tokens_per_s']):,.0f}", row["ms"], row["peak_gb"], row["loss_first"])
        view.add_row(row["contender"], *figures)
    console.print(view)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for llama_step.csv")
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5, help="steps of one sample")
    parser.add_argument("--rounds", type=int, default=5, help="samples")
    parser.add_argument("--warm", action="store_true", help="start all at once: what they compile is in caches")
    parser.add_argument("--one", choices=CONTENDERS, help="this contender alone, in this process")
    parser.add_argument("--in-turns", action="store_true", help=argparse.SUPPRESS)
    options = parse(parser, arguments, torch.cuda.is_available())
    sizes = (options.batch, options.seqlen, options.steps, options.rounds, options.cpu_smoke)
    if options.one and options.in_turns:
        obey(Trainer(options.one, options.batch, options.seqlen, options.cpu_smoke), options.steps)
        return 0
    if options.one:
        print(json.dumps(measure(options.one, *sizes)))
        return 0

    console = Console(width=110)
    path = options.out / "llama_step.csv"
    table = Table(path, COLUMNS)
    passed_on = ["--batch", str(options.batch), "--seqlen", str(options.seqlen), "--steps", str(options.steps)]
    passed_on += ["--cpu-smoke"] if options.cpu_smoke else []
    starting: Iterable[Worker] = (Worker(contender, passed_on) for contender in options.contenders)
    if options.warm or not any("compile" in each or "autotune" in each for each in options.contenders):
        starting = list(starting)  # at once; but Inductor measures as it compiles
    workers, alive = [], []
    for worker in starting:
        workers.append(worker)
        begin = time.perf_counter()
        if worker.ready():
            alive.append(worker)
        console.print(f"{worker.contender}: waited {time.perf_counter() - begin:.0f} s for its first steps")
    for k in range(options.rounds):
        alive = [worker for worker in in_drawn_order(alive, k) if worker.sample()]
    losses = []
    for worker in workers:
        row = worker.end()
        if isinstance(row, str):
            console.print(f"{worker.contender}: failed\n{row}")
            continue
        losses.append(row["loss_first"])
        table.add(row)
    show(path, console)
    if losses and max(losses) - min(losses) > TOLERANCE:
        console.print(f"[red]the first losses differ by {max(losses) - min(losses):.3g} nats[/red]")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
